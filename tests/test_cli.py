"""The commands through typer's runner: output, exit codes, and that each can fail."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fusedblock
from fusedblock import blocks, cli
from fusedblock.blocks import BlockSpec
from fusedblock.cli import checkpoints, compare, presets
from fusedblock.cli.app import app
from fusedblock.kernels._target import TARGETS
from fusedblock.metering import Report
from fusedblock.models import table

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.random_checkpoint(tmp_path_factory.mktemp("random"))


@pytest.fixture
def wrong_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused layers that are off by a tenth of a percent."""
    right = blocks.forward
    monkeypatch.setattr(blocks, "forward", lambda *args, **kwargs: right(*args, **kwargs) * 1.001)


# ---- the command itself


@pytest.mark.parametrize("absent", [("typer",), ("rich",), ("typer", "rich")])
def test_without_its_libraries_it_names_the_extra(absent, monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name in absent else object())
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 2
    message = capsys.readouterr().err
    assert " and ".join(absent) in message and "pip install '.[cli]' in the directory of" in message


def test_module_entry_point_prints_the_version():
    done = subprocess.run([sys.executable, "-m", "fusedblock", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, fusedblock.__version__), done.stderr


def test_help_loads_neither_torch_nor_transformers():
    code = """
import sys
from fusedblock.cli import main
sys.argv = ["fusedblock", "--help"]
try:
    main()
except SystemExit:
    print(sorted({"torch", "transformers", "matplotlib"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.rstrip().endswith("[]"), done.stdout + done.stderr


def test_families_is_only_the_table():
    code = """
import sys
from fusedblock.cli import main
sys.argv = ["fusedblock", "families"]
try:
    main()
except SystemExit:
    print(sorted({"torch", "triton", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "LlamaDecoderLayer" in done.stdout and done.stdout.rstrip().endswith("[]"), done.stdout + done.stderr


def test_help_says_what_each_command_does_in_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    output = run("--help").output.partition("Options:")[2]
    assert "doctor" in output and "..." not in output and max(map(len, output.splitlines())) <= 80


def test_help_lists_every_command():
    result = run("--help")
    assert result.exit_code == 0
    for name in ("demo", "measure", "verify", "explain", "doctor"):
        assert name in result.output
        assert run(name, "--help").exit_code == 0


# ---- measure


def test_measure_writes_what_the_function_returns(tmp_path, checkpoint):
    result = run("measure", checkpoint, "--batch", 2, "--seq", 24, "--baseline", "eager", "--device", "cpu",
                 "--json", tmp_path / "r.json", "--png", tmp_path / "r.png")  # fmt: skip
    assert result.exit_code == 0, result.output
    report = Report.from_json(tmp_path / "r.json")
    expected = fusedblock.measure(
        presets.on_meta(presets.config_of(str(checkpoint))), batch=2, seq=24, baseline="eager", device="cpu"
    )
    assert report == dataclasses.replace(expected, date=report.date)
    assert report.layers == 4 and report.dtype == "bfloat16"
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert str(report) in result.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"phase": "prefill", "batch": 1, "seq": 4096, "context": 4096, "dtype": "bfloat16"}),
        (["--phase", "decode"], {"phase": "decode", "seq": 1, "context": 4096}),
        (["--phase", "decode", "--context", "100", "--batch", "3"], {"phase": "decode", "seq": 1, "context": 100, "batch": 3}),
        (["--phase", "train", "--seq", "64", "--dtype", "fp32"], {"phase": "train", "context": 64, "dtype": "float32"}),
    ],
)
def test_measure_of_a_preset(arguments, expected, tmp_path):
    result = run("measure", "llama-3.2-1b", "--layer", "--device", "cpu", "--json", tmp_path / "r.json", *arguments)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert {name: report[name] for name in expected} == expected
    assert (report["layers"], report["baseline"]) == (1, "sdpa")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "'nowhere' is neither a directory with a config.json nor a preset"),
        (["llama-3.2-1b", "--phase", "train", "--seq", "8", "--context", "16"], "context=16"),
        (["llama-3.2-1b", "--seq", "16", "--context", "8"], "context=8 is less than seq=16"),
        (["llama-3.2-1b", "--device", "tpu"], "tpu"),
        (["llama-3.2-1b", "--seq", "8", "--layer", "--json", "missing/folder/r.json"], "missing/folder/r.json"),
    ],
)
def test_measure_refuses(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("measure", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr and "Traceback" not in result.output


def test_a_picture_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else there(name))
    monkeypatch.setattr(fusedblock, "measure", lambda *args, **kwargs: pytest.fail("measured"))
    result = run("measure", "smollm2-135m", "--layer", "--png", tmp_path / "r.png")
    assert result.exit_code == 2 and result.stdout == ""
    assert "--png needs matplotlib: pip install '.[demo]' in the directory of fusedblock's source" in result.stderr
    assert "needs matplotlib: pip install '.[demo]'" in " ".join(run("measure", "--help").output.split())


@pytest.mark.parametrize("device", ["nope", "meta", "cuda:99"])
def test_verify_refuses_a_device(device, tmp_path):
    result = run("verify", tmp_path, "--device", device)
    assert result.exit_code == 2
    assert f"device '{device}'" in result.stderr and "Traceback" not in result.output


def test_measure_refuses_a_picture_of_no_format(tmp_path):
    result = run("measure", "smollm2-135m", "--layer", "--seq", "8", "--device", "cpu", "--png", tmp_path / "r.xyz")
    assert result.exit_code == 2 and "xyz" in result.stderr


@pytest.mark.parametrize("command", ["measure", "explain", "verify"])
@pytest.mark.parametrize(
    "content", ["{", "[]", '{"model_type": "llama", "hidden_size": -5}', '{"model_type": "llama", "hidden_size": "x"}',
                '{"model_type": "llama", "num_attention_heads": 0}']  # fmt: skip
)  # fmt: skip
def test_a_bad_config_is_one_line(command, content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    result = run(command, tmp_path)
    assert result.exit_code == 2 and result.exception.__class__ in (SystemExit, type(None))
    assert "Traceback" not in result.output + result.stderr and "config" in result.stderr


# ---- explain


@pytest.mark.parametrize("phase", ["prefill", "decode", "train"])
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_a_user_asks_what_a_workload_launches(phase, target):
    result = run("explain", "llama-3.1-8b", "--phase", phase, "--context", 777, "--batch", 3, "--target", target)
    assert result.exit_code == 0, result.output
    spec = BlockSpec(4096, 14336, 32, 8, 128, 128**-0.5, 1e-5)
    plan = blocks.plan(spec, batch=3, seq=1 if phase == "decode" else 777, context=777, dtype=torch.bfloat16,
                       training=phase == "train", target=TARGETS[target])  # fmt: skip
    lines = [line.strip() for line in result.output.splitlines()]
    expected = [line.strip() for line in str(plan).splitlines()]
    assert expected == lines[-len(expected) :]
    shape = {"prefill": "prefill, 3 x 777", "decode": "decode, 3 x 1 over 777", "train": "training, 3 x 777"}[phase]
    cache = "; the cache's own update is not counted" if phase == "decode" else ""
    assert lines[-len(expected) - 1] == f"{shape}, bfloat16: {plan.kernels} launches a layer's forward on {target}{cache}"
    assert lines[0] == "llama-3.1-8b (LlamaForCausalLM, a preset: sizes only): 32 of 32 layers fused"
    assert lines[1].startswith("as under attn_implementation='fusedblock'; ") and lines[2:4] == ["", "LlamaDecoderLayer 0-31"]


def test_explain_of_a_directory_shows_all_phases(checkpoint):
    result = run("explain", checkpoint)
    assert result.exit_code == 0
    for workload in ("prefill, 1 x 2048", "decode, 1 x 1 over 2048", "training, 1 x 2048"):
        assert workload in result.output
    assert "4 of 4 layers fused" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-3.1-8b", "--target", "sm_1"], "target 'sm_1', expected one of sm_80"),
        (["llama-3.1-8b", "--phase", "prefill", "--seq", "9", "--context", "8"], "seq is 9, prefill expects at most"),
        (["llama-3.1-8b", "--phase", "train", "--seq", "7", "--context", "8"], "seq is 7, train expects seq 8, as many"),
        (["nowhere"], "'nowhere' is neither"),
        (["vit-base", "--phase", "decode"], "ViTLayer attends both ways: it has no cache"),
    ],
)
def test_explain_refuses(arguments, message):
    result = run("explain", *arguments)
    assert result.exit_code == 2 and message in result.stderr


@pytest.mark.parametrize(
    "arguments", [{"batch": 0}, {"context": -1}, {"seq": 0}, {"phase": "training"}, {"batch": "2"}, {"seq": 2.0}]
)
def test_explain_names_a_bad_argument(arguments):
    model = presets.on_meta(presets.config_of("llama-3.2-1b"))
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError, match=f"explain: {name} is {value!r}, expected"):
        fusedblock.explain(model, **arguments)


@pytest.mark.parametrize("name", families.ENCODERS)
def test_explain_of_an_encoder_has_no_decode(name):
    model = families.build(name)
    cls = {"bert": "BertLayer", "roberta": "RobertaLayer", "vit": "ViTLayer",
           "modernbert": "ModernBertEncoderLayer"}[name]  # fmt: skip
    for _ in ("not fused", "fused"):
        with pytest.raises(ValueError, match=f"explain: phase='decode', but {cls} attends both ways: it has no cache"):
            fusedblock.explain(model, phase="decode")
        with pytest.raises(ValueError, match=f"explain: context=9 with seq=4, but {cls} attends both ways"):
            fusedblock.explain(model, phase="prefill", seq=4, context=9)
        fusedblock.fuse(model)
    for layer in fusedblock.explain(model, batch=4, context=100).layers:
        assert [name for name, _ in layer.plans] == ["prefill, 4 x 100, float32", "training, 4 x 100, float32"]


def test_explain_follows_the_options(checkpoint):
    with fusedblock.options(batch_invariant=True):
        result = run("explain", checkpoint, "--phase", "decode")
    assert "on sm_90, batch_invariant" in result.output and "decode_attention" not in result.output
    assert "decode_attention" in run("explain", checkpoint, "--phase", "decode").output


def test_a_preset_with_dropout_says_what_training_runs():
    rates = "attn.attn_dropout=0.1, attn.resid_dropout=0.1, mlp.dropout=0.1"
    assert f"original forward in training: {rates}; set them to 0" in run("explain", "gpt2", "--phase", "train").output


@pytest.mark.parametrize("command", ["explain", "measure", "verify"])
def test_an_unsupported_architecture_is_refused_at_once_with_what_is_supported(command, tmp_path):
    from transformers import BloomConfig

    BloomConfig(n_layer=1, hidden_size=32, n_head=2).save_pretrained(tmp_path)  # no weights, which verify would miss first
    result = run(command, tmp_path)
    assert result.exit_code == 2 and "no layer that can be fused" in result.stderr and not result.stdout
    names = ", ".join(sorted(spec.family for spec in table.SPECS.values()))
    assert f"supported are the families {names} (`fusedblock families`" in result.stderr


@pytest.mark.parametrize("command", ["measure", "verify"])
def test_a_family_that_waits_is_refused_with_its_reason(command, tmp_path):
    from transformers import DeepseekV3Config

    DeepseekV3Config(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, num_key_value_heads=2).save_pretrained(tmp_path)
    result = run(command, tmp_path)
    assert result.exit_code == 2 and not result.stdout
    assert "DeepseekV3DecoderLayer: multi-head latent attention has no kernel yet" in result.stderr


# ---- verify


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_user_verifies_a_checkpoint(dtype, checkpoint):
    result = run("verify", checkpoint, "--dtype", dtype, "--tokens", 4, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "all 8 checks passed" in result.output
    assert "gradients of 39 weights" in result.output  # embedding, 4 layers of 9, last norm, head
    assert "39 weights saved by the fused model" in result.output
    assert "An error is |value - reference| / |reference| of one token" in result.output
    assert ("1e-05, or 1.5 times" in result.output) == (dtype == "fp32")


@pytest.mark.parametrize("name", families.ALL)
def test_verify_of_every_family(name, tmp_path):
    model = families.build(name, seed=3)
    model.save_pretrained(tmp_path)
    result = run("verify", tmp_path, "--tokens", 3, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "2 of 2 layers fused" in result.output
    assert ("greedy tokens" in result.output) == (name in (*families.DECODERS, *families.MIXTURES))
    assert f"{len(model.state_dict())} weights saved by the fused model" in result.output


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_verify_fails_for_wrong_layers(dtype, checkpoint, wrong_layers):
    if dtype == "bf16":  # where a tenth of a percent is less than the rounding
        right = blocks.forward
        blocks.forward = lambda *args, **kwargs: right(*args, **kwargs) * 1.02  # undone by the fixture
    result = run("verify", checkpoint, "--dtype", dtype, "--tokens", 2, "--device", "cpu")
    assert result.exit_code == 1, result.output
    assert "FAIL logits" in result.output and "FAIL gradients" in result.output


def test_verify_fails_for_wrong_gradients(checkpoint, monkeypatch):
    right = blocks.forward
    wrong = lambda *args, **kwargs: GradientScaled.apply(right(*args, **kwargs))
    monkeypatch.setattr(blocks, "forward", wrong)
    result = run("verify", checkpoint, "--tokens", 2, "--device", "cpu")
    assert result.exit_code == 1
    assert "FAIL gradients of 39 weights" in result.output and "1 of 8 checks failed" in result.output
    assert run("verify", checkpoint, "--tokens", 2, "--device", "cpu", "--no-gradients").exit_code == 0


class GradientScaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.001


def test_verify_fails_where_no_call_is_fused(checkpoint, monkeypatch):
    from fusedblock.models import adapter

    monkeypatch.setattr(adapter, "prepare", lambda *args: "on purpose")
    result = run("verify", checkpoint, "--tokens", 2, "--device", "cpu", "--no-gradients")
    assert result.exit_code == 1 and "1 of 7 checks failed" in result.output
    assert "no call was fused: " in result.output and " x on purpose" in result.output


def test_calls_check_counts_what_fell_back():
    from fusedblock.cli.verify import calls_check
    from fusedblock.models import Calls, FusionReport, LayerRecord

    def check(fused, **fallbacks):
        calls = Calls(fused, Counter(fallbacks))
        return calls_check(FusionReport((LayerRecord("l", 0, "Layer", "fused", "", calls),)))

    assert (check(3).passed, check(3).found) == (True, "0 of 3")
    assert (check(3, why=2).passed, check(3, why=2).found) == (False, "2 of 5: 2 x why")
    assert (check(0).passed, check(0).found) == (False, "no call was fused: no fused layer was called")


def test_verify_fails_for_weights_saved_wrong(checkpoint, monkeypatch):
    """One weight off by one bit, another under a name of its own."""
    from transformers import LlamaForCausalLM

    save = LlamaForCausalLM.save_pretrained

    def wrong(model, folder, **kwargs):
        weights = {name: t.clone() for name, t in model.state_dict().items()}
        weights["model.norm.weight"].view(torch.int32)[0] ^= 1
        weights["other.weight"] = weights.pop("model.layers.1.mlp.up_proj.weight")
        save(model, folder, state_dict=weights, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", wrong)
    result = run("verify", checkpoint, "--tokens", 2, "--device", "cpu", "--no-gradients")
    assert result.exit_code == 1 and "1 of 7 checks failed" in result.output
    assert "2 differ: model.layers.1.mlp.up_proj.weight, model.norm.weight" in result.output


def test_verify_refuses_a_folder_without_a_checkpoint(tmp_path):
    result = run("verify", tmp_path)
    assert result.exit_code == 2 and "no config.json" in result.stderr


def test_verify_names_a_truncated_file(tmp_path, checkpoint):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    result = run("verify", tmp_path, "--device", "cpu")
    assert result.exit_code == 2 and str(weights) in result.stderr


# ---- the rules


def test_token_errors_against_numpy():
    value, reference = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    v, r = value.double().numpy().reshape(6, 5), reference.double().numpy().reshape(6, 5)
    expected = np.sqrt(((v - r) ** 2).sum(1)) / np.sqrt((r**2).sum(1))
    np.testing.assert_allclose(compare.token_errors(value, reference).numpy(), expected, rtol=1e-12)
    whole = np.sqrt(((v - r) ** 2).sum()) / np.sqrt((r**2).sum())
    np.testing.assert_allclose(compare.relative_error(value, reference).numpy(), [whole], rtol=1e-12)


def test_nan_is_an_infinite_error():
    assert compare.token_errors(torch.tensor([[float("nan"), 1.0]]), torch.ones(1, 2)).tolist() == [float("inf")]


@pytest.mark.parametrize(
    ("dtype", "fused", "plain", "whole_model", "passed"),
    [
        (torch.float32, [9e-6, 1e-9], [0.0, 0.0], False, True),
        (torch.float32, [1.1e-5, 0.0], [1.0, 1.0], False, False),  # one token is enough, and plain's error no excuse
        (torch.bfloat16, [1.4e-2], [1e-2], False, True),
        (torch.bfloat16, [1.6e-2], [1e-2], False, False),
        (torch.bfloat16, [2e-2, 0.0, 0.0, 0.0], [1e-2] * 4, False, True),  # root mean square
        (torch.float32, [1.4e-4], [1e-4], True, True),
        (torch.float32, [1.6e-4], [1e-4], True, False),
        (torch.float32, [9e-6], [1e-8], True, True),
        (torch.float32, [1.1e-5], [1e-8], True, False),
        (torch.bfloat16, [float("inf")], [1e-2], False, False),
    ],
)
def test_error_rule(dtype, fused, plain, whole_model, passed):
    errors = torch.tensor(fused, dtype=torch.float64), torch.tensor(plain, dtype=torch.float64)
    assert compare.error_check("x", dtype, *errors, whole_model=whole_model).passed is passed


class FixedLogits:
    """A model that answers with these logits whatever it is asked."""

    def __init__(self, dtype: torch.dtype, row: list[float]) -> None:
        self.dtype, self.row, self.device = dtype, row, "cpu"

    def __call__(self, ids: torch.Tensor, use_cache: bool) -> Any:
        return type("Output", (), {"logits": torch.tensor(self.row, dtype=self.dtype).expand(*ids.shape, -1)})


@pytest.mark.parametrize(
    ("dtype", "rounded", "exact", "passed"),
    [
        (torch.bfloat16, [1.0, 1.0, 0.0], [1.0, 1.001, 0.0], True),  # 0.001 apart, and rounding moved them by as much
        (torch.bfloat16, [1.0, 1.2, 0.0], [1.0, 1.199, 0.0], False),  # 0.2 apart
        (torch.float32, [1.0, 1.0, 0.0], [1.0, 1.001, 0.0], False),  # no ties in fp32
    ],
)
def test_greedy_rule_at_a_tie(dtype, rounded, exact, passed):
    fused, plain = torch.tensor([5, 6, 1, 7]), torch.tensor([5, 6, 0, 8])
    models = FixedLogits(dtype, rounded), FixedLogits(torch.float32, exact)
    assert compare.greedy_check("x", fused, plain, *models).passed is passed
    assert compare.greedy_check("x", plain, plain, *models).passed
    assert not compare.greedy_check("x", plain[:3], plain, *models).passed

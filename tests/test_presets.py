"""The models that the commands know by name: sizes as published, one of every family, measured and explained."""

from __future__ import annotations

import json

import pytest
import torch
from test_cli import run

import fusedblock
from fusedblock.cli import presets
from fusedblock.models.table import BLOCKS, SPECS


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_are_the_published_models(name):
    """By their numbers of parameters, as published (in millions)."""
    published = {"smollm2-135m": 134.5, "llama-2-7b": 6738.4, "llama-3.1-8b": 8030.3, "llama-3.1-70b": 70553.7,
                 "llama-3.2-1b": 1235.8, "llama-3.2-3b": 3212.7, "mistral-7b": 7248.0, "qwen2.5-7b": 7615.6, "qwen3-8b": 8190.7,
                 "gemma-7b": 8537.7, "gemma-2-9b": 9241.7, "gemma-3-1b": 999.9, "olmo-3-7b": 7298.0, "command-r7b": 8028.0,
                 "modernbert-base": 149.0, "phi-3-mini": 3821.1, "gpt2": 124.4, "pythia-6.9b": 6857.3, "starcoder2-7b": 7173.9,
                 "olmo-2-7b": 7298.6, "command-r-35b": 34980.8, "granite-3.0-8b": 8170.8, "smollm3-3b": 3075.1,
                 "glm-4-9b": 9400.0, "stablelm-2-1.6b": 1644.5, "mixtral-8x7b": 46702.8, "qwen1.5-moe-a2.7b": 14315.8,
                 "qwen3-30b-a3b": 30532.1, "olmoe-1b-7b": 6919.2, "gpt-oss-20b": 20914.8,
                 # 110468.8 are published, with 3616.6 of a 47th layer that predicts a second token: transformers does not load it
                 "glm-4.5-air": 106852.2, "deepseek-v2-lite": 15706.5,
                 "deepseek-v3": 671026.4,  # of 684489.8 published: likewise, of a 62nd layer
                 "bert-base": 109.5, "roberta-base": 124.6, "minilm-l6": 22.7,
                 "vit-base": 86.4}  # fmt: skip
    model = presets.on_meta(presets.config_of(name))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(published[name], abs=0.06)


def test_every_family_has_a_preset_that_measures_and_explains():
    """One layer of each counted; the names are in the help, and a family added to the table needs one here."""
    families = {presets.config_of(name).model_type for name in presets.PRESETS}
    assert families == {spec.family for spec in (*SPECS.values(), *BLOCKS.values())}
    shown = " ".join(run("measure", "--help").output.split()).replace("- ", "-")  # lines break after hyphens
    assert ", ".join(presets.PRESETS) in shown
    for name in presets.PRESETS:
        baseline = "eager" if name in ("gemma-2-9b", "gpt-oss-20b") else "sdpa"  # which has no softcap and no sinks
        report = fusedblock.measure(presets.config_of(name), batch=2, seq=128, baseline=baseline, device="cpu")
        assert report.after.total().launches < report.before.total().launches, name
        assert report.after.total().bytes < report.before.total().bytes, name


def test_an_encoder_by_name_is_measured_and_has_no_decode(tmp_path):
    result = run("measure", "minilm-l6", "--seq", 128, "--batch", 8, "--device", "cpu", "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["subject"], report["layers"]) == ("BertModel", 6)
    result = run("measure", "minilm-l6", "--phase", "decode", "--device", "cpu")
    assert result.exit_code == 2 and "BertLayer attends both ways" in result.stderr
    assert "12 of 12 layers fused" in run("explain", "vit-base", "--context", 197).output


def test_a_model_of_which_the_experts_alone_are_fused(tmp_path):
    """With --layer the first layer that has any."""
    arguments = ("measure", "deepseek-v3", "--layer", "--seq", 1, "--batch", 16, "--phase", "decode", "--device", "cpu")
    result = run(*arguments, "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["subject"] == "layer 3 of deepseek_v3, the first with experts"
    assert report["after"]["label"] == "transformers, sdpa attention: blocks of experts fused alone"
    assert "experts: 102 of 256 touched" in result.output
    output = run("explain", "deepseek-v2-lite", "--phase", "decode").output
    assert "0 of 27 layers fused, and 26 of 26 blocks of experts alone\n" in output and "DeepseekV2Moe 1-26\n" in output


def test_the_commands_say_which_model_they_took():
    """Also the one that nobody named."""
    for command, rest in (("explain", []), ("measure", ["--layer", "--seq", 8, "--device", "cpu"])):
        assert "[default: llama-3.1-8b]" in " ".join(run(command, "--help").output.split())
        assert run(command, *rest).output.startswith("llama-3.1-8b (")
    assert run("measure", "vit-base", *rest).output.startswith("vit-base (one layer of vit, a preset: sizes only)\n")


def test_explain_of_a_preset_is_as_under_our_attention_and_says_for_which_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    output = run("explain", "gemma-2-9b", "--phase", "prefill", "--context", 8192).output
    assert "\nas under attn_implementation='fusedblock'; fusedblock.explain(model) follows that of a loaded model\n" in output
    assert output.count("softcap 50, keys up to 4095 before: the rest is not read") == 1 and "original forward" not in output
    assert "\nno GPU here: as for sm_90\n" in output
    assert "no GPU" not in run("explain", "llama-3.2-1b", "--target", "sm_80", "--phase", "decode").output


def test_measure_of_a_preset_with_a_softcap_takes_eager_and_says_so(tmp_path):
    arguments = ["measure", "gemma-2-9b", "--layer", "--seq", 8, "--device", "cpu"]
    result = run(*arguments, "--json", tmp_path / "r.json")
    assert result.exit_code == 0 and json.loads((tmp_path / "r.json").read_text())["baseline"] == "eager"
    assert "--baseline eager: sdpa has no softcap, Gemma2DecoderLayer has softcap=50.0" in result.output
    refused = run(*arguments, "--baseline", "sdpa")
    assert refused.exit_code == 2 and "--baseline sdpa has no softcap" in refused.stderr
    assert refused.stderr.rstrip().endswith("use --baseline eager")
    assert "--baseline" not in run("measure", "llama-3.2-1b", *arguments[2:]).output

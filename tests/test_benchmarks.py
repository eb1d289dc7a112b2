"""The benchmark's flow on the CPU: checks before times, failures as rows, and numbers that agree with `measure`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

import fusedblock
from benchmarks import cold, engine, rows
from benchmarks import layer as layers
from benchmarks.__main__ import main
from benchmarks.breakdown import operators
from benchmarks.engine import Candidate, Case, Settings, errors, run, verdict
from benchmarks.implementations import (
    LLAMA_8B,
    MODELS,
    TINY,
    Cache,
    _home,
    implementations,
    make_inputs,
    make_layer,
    reference,
)
from fusedblock.metering import measure
from fusedblock.metering.timing import MOST_CALLS, CpuTimer

CPU = torch.device("cpu")
NAMES = ["hf-sdpa", "hf-eager", "torch.compile", "liger", "fusedblock"]


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    layers.add_arguments(parser)
    return parser.parse_args(words)


def settings(seconds_left: float = 1e6) -> Settings:
    stamp = rows.Stamp("cpu", {"torch": "x"}, "abc", "2026-01-01")
    return Settings(stamp, CPU, 1.0, 3, time.monotonic() + seconds_left, timer=CpuTimer, log=lambda line: None)


@pytest.mark.parametrize("command", ["layer", "attention"])
def test_without_a_gpu_it_says_so(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmarks", command])
    assert main() == 2
    captured = capsys.readouterr()
    assert captured.out == "" and f"benchmarks {command}: torch sees no GPU" in captured.err and "--dry" in captured.err


ONLY = "^layer decode: B1 |^operator: (norm|attention|o) forward B1 S24"


@pytest.mark.slow
def test_dry_run_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert layers.main(arguments("--dry", "--model", "llama", "--json", str(tmp_path / "out.json"), "--only", ONLY)) == 0
    found = rows.read(tmp_path / "out.json")
    printed = capsys.readouterr().out
    assert f"{len(found)} rows" in printed
    cases = {(r.bench, r.case) for r in found}
    assert {c for _, c in cases} == {"B1 KV80"} | {f"{op} forward B1 S24" for op in ("norm", "attention", "o")}
    for bench, case in cases:
        of_case = {r.impl: r for r in found if (r.bench, r.case) == (bench, case)}
        assert f"{bench}: {case}" in printed and "fusedblock" in of_case
        if bench != "operator":
            assert list(of_case) == NAMES
        for name, row in of_case.items():
            if row.status == "ok":
                assert row.ms and row.ms > 0 and row.tflops is not None and row.gbps is not None and row.spread is not None
                assert row.max_rel_error is not None and 0 < row.max_rel_error < 0.05
            else:  # what a CPU cannot have
                assert (name, row.ms) in (("liger", None), ("sdpa, cudnn", None)), row
    assert {r.versions["torch"] for r in found} == {torch.__version__} and all(r.date and r.device for r in found)


@pytest.mark.slow
def test_whole_dry_run(tmp_path: Path) -> None:
    assert layers.main(arguments("--dry", "--json", str(tmp_path / "out.json"), "--budget", "600")) == 0
    found = rows.read(tmp_path / "out.json")
    of_layers = {"layer forward", "layer forward+backward", "layer decode", "layer host", "layer cold"}
    assert {r.bench for r in found if r.model == "llama"} == of_layers | {"operator"}
    assert {r.bench for r in found if r.model == "layernorm"} == {r.bench for r in found if r.model == "qwen3"} == of_layers
    bad = {(r.case, r.impl, r.status) for r in found if r.status != "ok" and r.impl not in ("liger", "sdpa, cudnn")}
    assert bad == set()
    for row in found:
        if row.impl == "fusedblock" and row.bench != "operator":
            timed = row.bench == "layer host" or f"{row.bench}: {row.case}" in ("layer decode: B1 KV80", "layer forward: B1 S8")
            assert (row.host_us is not None) == timed, row
        if row.bench == "layer host":
            assert row.tflops is None and row.method == "host" and row.host_us == pytest.approx(1e3 * row.ms, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["layernorm", "qwen3"])
def test_dry_run_of_one_model(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, only = tmp_path / "out.json", "forward: B1 S8|decode: B1 |host"
    assert layers.main(arguments("--dry", "--model", model, "--json", str(path), "--only", only)) == 0
    found = rows.read(path)
    cases = {("layer forward", "B1 S8"), ("layer decode", "B1 KV80"), ("layer host", "B1 S8, static cache"),
             ("layer host", "B1 S1, no cache")}  # fmt: skip
    assert {r.model for r in found} == {model} and {(r.bench, r.case) for r in found} == cases
    assert {r.status for r in found if r.impl != "liger"} == {"ok"}
    assert [r.impl for r in found if r.impl == "liger"] == (["liger"] * 2 if model == "qwen3" else [])
    ours = [r for r in found if r.impl == "fusedblock"]
    assert len(ours) == 4 and all(r.max_rel_error is not None and 0 < r.max_rel_error < 0.05 for r in ours)
    assert all(r.host_us is not None and r.host_us > 0 for r in ours)
    targets = json.loads(path.read_text())["targets"]
    limits = [(t["what"].rpartition(": ")[2], t["limit"]) for t in targets if t["limit"]]
    assert sorted(limits) == [("host us", 60.0)] * 4 + [("time to torch.compile's", 1.0)] * 2
    printed = capsys.readouterr().out
    assert "targets" in printed and all(t["what"] in printed for t in targets)


def row(impl: str, ms: float, bench: str = "layer forward", case: str = "B1 S512", **more: Any) -> rows.Row:
    blank = dict.fromkeys(("tflops", "gbps", "peak_mib", "max_rel_error", "spread", "launches", "method", "commit"))
    values = {**blank, "status": "ok", "device": "x", "versions": {}, "date": "2026-01-01", "model": "qwen3", **more}
    return rows.Row(bench, case, impl, ms, **values)


def test_targets_are_of_the_rows() -> None:
    made = [
        row("torch.compile", 2.0), row("fusedblock", 1.9, host_us=61.0, launches=8), row("torch.compile", 9.0, model="llama"),
        row("torch.compile", 4.0, "layer forward+backward"), row("fusedblock", 5.0, "layer forward+backward"),
        row("fusedblock, first call", 15000.0, "layer cold"), row("fusedblock, second call", 0.6, "layer cold"),
        row("fusedblock, steady call", 0.5, "layer cold"), row("hf-sdpa", 1.0, host_us=900.0),
    ]  # fmt: skip
    found = {t["what"]: (t["measured"], t["limit"]) for t in layers.targets(made)}
    assert found == {
        "layer forward, B1 S512: time to torch.compile's": (0.95, 1.0),
        "layer forward, B1 S512: launches": (8, None),
        "layer forward, B1 S512: host us": (61.0, 60.0),
        "layer forward+backward, B1 S512: time to torch.compile's": (1.25, None),
        "layer cold, B1 S512: first call, s": (15.0, 20.0),
        "layer cold, B1 S512: second call to a steady one": (1.2, None),
    }
    lines = [line.split() for line in layers.targets_text(layers.targets(made)).splitlines()]
    assert [line[-1] for line in lines if line and line[-1] in ("met", "missed")] == ["met", "missed", "met"]


def test_cold_is_a_new_process_with_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def process(command: list[str], env: dict[str, str], **kwargs: Any) -> Any:
        seen.append((command, Path(env["TRITON_CACHE_DIR"]), list(Path(env["TRITON_CACHE_DIR"]).iterdir())))
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nRuntimeError: no room")

    monkeypatch.setattr(subprocess, "run", process)
    made = cold.run("qwen3", settings())
    ((command, cache, held),) = seen
    assert command[1:] == ["-m", "benchmarks.cold", "qwen3", "--dry"] and held == [] and not cache.exists()
    assert {r.status for r in made} == {"failed: RuntimeError: no room"} and {r.ms for r in made} == {None}
    assert {r.status for r in cold.run("qwen3", settings(-1.0))} == {"skipped: out of time"} and len(seen) == 1


def test_a_layer_that_falls_back_when_cold_says_so() -> None:
    found = cold.measure("layernorm", CPU, True)
    assert [one["status"] for one in found] == ["ok", "ok"]
    reason = "fell back: forward-mode differentiation is on"
    with torch.autograd.forward_ad.dual_level():
        assert {one["status"] for one in cold.measure("layernorm", CPU, True)} == {reason}


def test_models_are_what_they_are_called() -> None:
    """The layers of the benchmark, by the parameters that their sizes give."""
    hidden, kv = 4096, 1024
    expected = {
        "llama": hidden * (2 * hidden + 2 * kv + 3 * 14336) + 2 * hidden,
        "layernorm": hidden * (4 * hidden + 2 * 16384) + 4 * hidden + (4 * hidden + 16384 + hidden),
        "qwen3": hidden * (2 * hidden + 2 * kv + 3 * 12288) + 2 * hidden + 2 * 128,
    }
    for name, model in MODELS.items():
        home, layer_class = _home(model.config)
        with torch.device("meta"):
            made = getattr(home, layer_class)(model.config, 0)
        assert sum(p.numel() for p in made.parameters()) == expected[name]
        tiny = make_layer(model.tiny, CPU)
        assert type(tiny) is type(made) and all(p.abs().sum() > 0 for p in tiny.parameters())
    assert MODELS["llama"].config is LLAMA_8B


def test_models_share_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one leaves is the next one's; none begins with less than its share."""
    clock, left = [0.0], {}
    monkeypatch.setattr(layers.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(layers, "cases", lambda name, *rest: [types.SimpleNamespace(bench="forward", name=name)])
    monkeypatch.setattr(layers, "breakdowns", lambda *rest: [types.SimpleNamespace(bench="forward", name="operators")])

    def spend(case: Any, given: Settings) -> list[rows.Row]:
        left[case.name] = given.deadline - clock[0]
        clock[0] += 10.0 if case.name == "llama" else 100.0
        return [row("fusedblock", 1.0)]

    monkeypatch.setattr(layers, "run", spend)
    assert layers.main(arguments("--dry", "--budget", "300", "--only", "forward")) == 0
    assert left == {"llama": 100.0, "layernorm": 145.0, "qwen3": 190.0, "operators": 90.0}


def test_budget_leaves_rows_that_say_skipped(tmp_path: Path) -> None:
    path = str(tmp_path / "out.json")
    assert layers.main(arguments("--dry", "--json", path, "--model", "llama", "--only", "forward: B1 S24", "--budget", "0")) == 0
    assert [(r.impl, r.ms, r.status) for r in rows.read(path)] == [(name, None, "skipped: out of time") for name in NAMES]


def test_errors_and_verdict() -> None:
    ref = [torch.tensor([3.0, 4.0]), torch.tensor([1.0])]
    assert errors([torch.tensor([3.0, 4.5]), torch.tensor([1.0])], ref) == [pytest.approx(0.1), 0.0]
    assert verdict([0.1, 0.2], None) == "ok"
    assert verdict([0.1, 0.29], [0.1, 0.2]) == "ok"
    assert "result 1" in verdict([0.1, 0.31], [0.1, 0.2])
    assert "wrong" in verdict([float("nan")], None) and "wrong" in verdict([float("inf")], None)
    with pytest.raises(ValueError, match="shapes"):
        errors([torch.zeros(3)], ref)


def test_wrong_and_broken_implementations_are_not_timed() -> None:
    x = torch.randn(64, dtype=torch.float64)
    timed: list[str] = []

    def form(name: str, factor: float):
        def call() -> torch.Tensor:
            timed.append(name)
            return x * factor

        return lambda: Candidate([call])

    def broken() -> Candidate:
        raise RuntimeError("no kernel\nfor this")

    def absent() -> Candidate:
        raise ModuleNotFoundError("No module named 'peer'", name="peer")

    built = {
        "plain": form("plain", 1.01),
        "good": form("good", 0.99),
        "wrong": form("wrong", 1.02),
        "nan": form("nan", float("nan")),
        "broken": broken,
        "absent": absent,
        "part": lambda: Candidate([lambda: torch.zeros(1)], checked=False),
    }
    made = run(Case("b", "c", built, lambda: [x], 2 * 10**9, lambda: 10**6), settings())
    status = {r.impl: r.status for r in made}
    assert status["plain"] == status["good"] == status["part"] == "ok"
    assert status["wrong"].startswith("wrong: result 0 has error 2.00e-02")
    assert status["nan"].startswith("wrong") and status["broken"] == "failed: RuntimeError: no kernel"
    assert status["absent"] == "not installed: peer"
    assert [r.impl for r in made if r.ms is not None] == ["plain", "good", "part"]
    assert timed.count("wrong") == timed.count("nan") == 1 and timed.count("good") > 3
    row = made[1]
    assert row.max_rel_error == pytest.approx(0.01) and row.ms is not None and row.tflops is not None
    assert row.tflops == pytest.approx(2.0 / row.ms, rel=0.05, abs=1e-3)
    assert made[3].max_rel_error is None and made[6].max_rel_error is None


def test_a_fused_layer_that_falls_back_fails() -> None:
    made = make_layer(TINY, CPU)
    inputs = make_inputs(made, 1, 8)
    inputs.cos.requires_grad_()  # a reason to fall back
    case = Case("b", "c", implementations(made, lambda: inputs, "eager"), lambda: reference(made, inputs), 1, lambda: 1)
    case.implementations = {n: b for n, b in case.implementations.items() if n in ("hf-sdpa", "fusedblock")}
    status = {r.impl: r.status for r in run(case, settings())}
    assert status["hf-sdpa"] == "ok" and "fell back: position_embeddings" in status["fusedblock"]


def test_one_that_breaks_while_timed_leaves_the_others_their_times() -> None:
    calls = []

    def flaky() -> torch.Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("second call")
        return torch.ones(2)

    built = {"good": lambda: Candidate([lambda: torch.ones(2)]), "flaky": lambda: Candidate([flaky])}
    good, bad = run(Case("b", "c", built, lambda: [torch.ones(2)], 1, lambda: 1), settings())
    assert good.status == "ok" and good.ms is not None
    assert bad.status == "failed while timed: RuntimeError: second call" and bad.ms is None


@pytest.mark.gpu
@pytest.mark.alone
def test_launches_are_counted_in_the_graph() -> None:
    x = torch.randn(64, 64, device="cuda")
    gpu = dataclasses.replace(settings(), device=torch.device("cuda"))
    assert engine._launches(Candidate([lambda: (x * 2).exp() + x]), gpu) == 3


UNCAPTURABLE = """
import dataclasses, torch, test_benchmarks as t
gpu = dataclasses.replace(t.settings(), device=torch.device("cuda"))
x = torch.ones(64, device="cuda")
assert t.engine._launches(t.Candidate([lambda: x.sum().item()]), gpu) is None
assert (x * 2).sum().item() == 128
"""


@pytest.mark.gpu
@pytest.mark.alone
def test_what_cannot_be_captured_has_no_count() -> None:
    # In a process of its own: torch's random generator does not recover from a capture that failed.
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    subprocess.run([sys.executable, "-c", UNCAPTURABLE], check=True, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.parametrize("cached", [None, 80])
@pytest.mark.parametrize("train", [False, True])
def test_reference_is_the_layer_in_float64(cached: int | None, train: bool) -> None:
    """Against SDPA in float64 on all sequences at once."""
    if cached and train:
        cached = None
    made = make_layer(TINY, CPU)
    inputs = make_inputs(made, 3, 1 if cached else 8, train=train, context=cached)
    double = make_layer(TINY, CPU).double()
    double.self_attn.config._attn_implementation = "sdpa"
    x = inputs.x.double().requires_grad_(train)
    extra = {}
    if cached:
        cache = Cache(TINY, type(inputs)(**{n: t if t is None else t.double() for n, t in vars(inputs).items()}))
        cache.last()
        extra = {"past_key_values": cache.cache}
    with torch.set_grad_enabled(train):
        out = double(x, position_embeddings=(inputs.cos.double(), inputs.sin.double()), **extra)
    expected = [out]
    if train:
        expected += torch.autograd.grad(out, [x, *double.parameters()], inputs.grad_out.double())
    found = reference(made, inputs)
    assert len(found) == (11 if train else 1)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_rewound_cache_has_room_for_a_sample() -> None:
    made = make_layer(TINY, CPU)
    inputs = make_inputs(made, 1, 1, context=2 * MOST_CALLS + 8)
    built = implementations(made, lambda: inputs, "eager")["hf-sdpa"]()
    assert built.before is not None
    built.before()
    for _ in range(2 * MOST_CALLS):
        built.calls[0]()


@pytest.mark.parametrize("model", MODELS)
def test_demand_is_what_measure_counts(model: str) -> None:
    home, layer_class = _home(MODELS[model].config)
    with torch.device("meta"):
        made = getattr(home, layer_class)(MODELS[model].config, 0).to(torch.bfloat16)
    for batch, seq, context, phase in ((1, 4096, None, "prefill"), (4, 512, None, "train"), (16, 1, 4096, "decode")):
        flops, moved = layers.demand(made, batch, seq, context, phase == "train")
        counted = measure(made, batch=batch, seq=seq, phase=phase, context=context, baseline="sdpa")
        assert counted.before.total().flops == flops
        assert moved <= counted.after.total().bytes
    weights, kv_heads = {"llama": (218_112_000, 8), "layernorm": (201_379_840, 32), "qwen3": (192_946_432, 8)}[model]
    assert moved == 2 * (weights + 2 * 16 * 4096 + 2 * 16 * 4096 * kv_heads * 128)


def test_operators_of_the_layer_add_up() -> None:
    flops, _ = layers.demand(make_layer(TINY, CPU), 2, 8, None, False)
    found = {op.name: op.flops for op in operators(TINY, 2, 8, 8, CPU)}
    assert list(found) == ["norm", "qkv_rope", "attention", "o", "gated_mlp", "down"]
    assert sum(found.values()) - found["norm"] == flops


def test_liger_stays_in_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for liger_kernel: its parts must run in the layer they are put into, and nowhere else."""
    calls: list[str] = []

    def rope(q, k, cos, sin, *rest):
        calls.append("rope")
        return original_rope(q, k, cos, sin)

    class SwiGLU(nn.Module):
        def forward(self, x):
            calls.append("swiglu")
            return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    def bind(module: nn.Module, function) -> None:
        module.__dict__["forward"] = types.MethodType(function, module)

    def norm_forward(self, x):
        calls.append("norm")
        return type(self).forward(self, x)

    original_rope = modeling_llama.apply_rotary_pos_emb
    package, patches = types.ModuleType("liger_kernel.transformers"), types.ModuleType("liger_kernel.transformers.monkey_patch")
    package.LigerSwiGLUMLP, package.liger_rotary_pos_emb = SwiGLU, rope
    patches._patch_rms_norm_module = lambda module: bind(module, norm_forward)
    patches._patch_swiglu_module = lambda module, cls: bind(module, cls.forward)
    for module in (types.ModuleType("liger_kernel"), package, patches):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    made = make_layer(TINY, CPU)
    inputs = make_inputs(made, 2, 8)
    built = implementations(made, lambda: inputs, "eager")
    expected = built["hf-sdpa"]().calls[0]()
    torch.testing.assert_close(built["liger"]().calls[0](), expected, rtol=0, atol=0)
    assert sorted(calls) == ["norm", "norm", "rope", "swiglu"]
    built["hf-sdpa"]().calls[0]()
    assert len(calls) == 4 and modeling_llama.apply_rotary_pos_emb is original_rope


def test_result_file_is_one_row_a_line(tmp_path: Path) -> None:
    made = run(
        Case("b", "c", {"a": lambda: Candidate([lambda: torch.ones(2)])}, lambda: [torch.ones(2)], 1, lambda: 1), settings()
    )
    path = tmp_path / "results" / "out.json"
    rows.write(path, made * 2, {"machine": {"name": "x"}})
    assert rows.read(path) == made * 2
    assert sum('"bench"' in line for line in path.read_text().splitlines()) == 2
    path.write_text(path.read_text().replace("benchmark/1", "benchmark/9"))
    with pytest.raises(ValueError, match="benchmark/9"):
        rows.read(path)


def test_default_path_names_gpu_and_date() -> None:
    path = rows.default_path("layer", rows.Stamp("NVIDIA H200", {}, None, "2026-11-29"))
    assert path.relative_to(rows.ROOT).as_posix() == "benchmarks/results/layer-nvidia-h200-2026-11-29.json"


def test_fusedblock_is_what_is_measured() -> None:
    """The fused candidate must be a fused layer, on the weights of the layer under test."""
    made = make_layer(TINY, CPU)
    inputs = make_inputs(made, 1, 8)
    step = implementations(made, lambda: inputs, "eager")["fusedblock"]()
    run_layer = step.calls[0].__closure__
    cells = {type(c.cell_contents).__name__: c.cell_contents for c in run_layer}
    fused = cells["Step"].run
    assert fusedblock.fuse(fused).having("already fused")
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(fused.parameters(), made.parameters()))

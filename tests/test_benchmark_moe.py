"""The benchmark of mixtures on the CPU: what is computed, against a formula that shares nothing with it, and its flow."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import aot
import pytest
import torch
import torch.nn.functional as F
from test_moe_experts_aot import compiled
from torch import Tensor, nn

from benchmarks import ahead, moe, rows
from benchmarks.engine import Candidate, Settings, errors, run, tensors, verdict
from benchmarks.moe import BOTH, FORWARD, MIXTRAL, MODELS, OSS, OURS, QWEN, ROUTER, SKEWED, cases, choices, groups, targets
from benchmarks.moe_forms import COMPILED, CONFIG_WAYS, CONFIGS, FORM_WAYS, FORMS, ROUTER_WAYS, WAYS, within
from benchmarks.moe_problem import Inputs, Problem, Weights, make_inputs, make_weights, plain, plain_router
from fusedblock import ops
from fusedblock.kernels import _moe, moe_route
from fusedblock.kernels._target import TARGETS
from fusedblock.metering.timing import CpuTimer
from fusedblock.ops import OPS

CPU = torch.device("cpu")
TINY = {group.name: group for group in groups(True)}
PROBLEMS = {group.label.partition(", ")[0]: group.problem for group in reversed((*groups(True), *choices(True)))}


def settings(seconds_left: float = 1e6) -> Settings:
    stamp = rows.Stamp("cpu", {"torch": "x"}, "abc", "2026-01-01")
    return Settings(stamp, CPU, 0.05, 2, time.monotonic() + seconds_left, timer=CpuTimer, log=lambda line: None)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    moe.add_arguments(parser)
    return parser.parse_args(words)


def made(p: Problem, backward: bool = False) -> Inputs:
    return make_inputs(p, CPU, make_weights(p, CPU, backward), 0, backward)


def dense(p: Problem, given: Inputs) -> list[Tensor]:
    """Every expert of every token in float64; those that were not chosen weigh nothing."""
    x, router, gate_up, down = (t.detach().double().requires_grad_() for t in given.leaves())
    logits = x @ router.T
    chosen = torch.zeros_like(logits).scatter_(1, logits.argsort(descending=True)[:, : p.top_k], 1.0).bool()
    weights = logits.masked_fill(~chosen, float("-inf")).softmax(-1)
    both = torch.einsum("th,ehf->tef" if p.transposed else "th,efh->tef", x, gate_up)
    h = F.silu(both[..., : p.ffn]) * both[..., p.ffn :]
    y = torch.einsum("tef,efh->teh" if p.transposed else "tef,ehf->teh", h, down)
    out = (weights[..., None] * y).sum(1)
    if p.shared:
        gate, up, down = (t.detach().double() for t in given.weights.shared)
        out = out + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    grads = () if given.grad_out is None else torch.autograd.grad(out, (x, router, gate_up, down), given.grad_out.double())
    return [out, *grads]


@pytest.mark.parametrize("label", PROBLEMS)
def test_formula_is_the_dense_one(label: str) -> None:
    """With all gradients; the yardstick is that within bf16."""
    p = PROBLEMS[label]
    given = made(p, backward=not p.shared)  # which has no gradients
    exact = dense(p, given)
    assert max(errors(plain(p, given, torch.float64), exact)) < 1e-12
    rounded = errors(plain(p, given, torch.bfloat16), exact)
    assert 2e-3 < rounded[0] < 1e-2 and max(rounded) < 2e-2
    assert len(plain(p, dataclasses.replace(given, grad_out=None), torch.float64)) == 1
    weights, logits = plain_router(p, given, torch.float64)
    assert torch.allclose(weights, logits.topk(p.top_k).values.softmax(-1), rtol=1e-12)


@pytest.mark.parametrize("label", PROBLEMS)
def test_no_rounding_changes_a_choice(label: str) -> None:
    p = dataclasses.replace(PROBLEMS[label], tokens=300)
    given = made(p)
    router = given.weights.router.detach()
    exact = (given.x.double() @ router.double().T).topk(p.top_k + 1).values
    assert (exact[:, -2] - exact[:, -1]).min() > 0.9
    chosen = (given.x @ router.T).topk(p.top_k).indices
    assert torch.equal(chosen.sort().values, (given.x.double() @ router.double().T).topk(p.top_k).indices.sort().values)
    counts = torch.bincount(chosen.flatten(), minlength=p.experts)
    assert given.touched == int((counts > 0).sum()) == p.experts
    if p.hot:
        assert counts[: p.hot].tolist() == [300] * p.hot and 2 * p.hot == p.top_k  # half of the slots
    else:
        assert counts.max() < 1.5 * 300 * p.top_k / p.experts


def test_sets_of_tokens_choose_other_experts() -> None:
    p = dataclasses.replace(MODELS[QWEN](1), hidden=256, ffn=16)
    weights = make_weights(p, CPU)
    found = [make_inputs(p, CPU, weights, seed) for seed in range(3)]
    chosen = [set((given.x @ weights.router.T).topk(8).indices[0].tolist()) for given in found]
    assert all(len(c) == 8 and given.touched == 8 for c, given in zip(chosen, found)) and len(set.union(*chosen)) > 16


@pytest.mark.parametrize("name", TINY)
def test_all_compute_the_same(name: str) -> None:
    (case,) = cases(TINY[name], True, CPU)
    assert case.yardstick is not None and set(OURS) <= set(case.implementations)
    for impl, build in case.implementations.items():
        results, reference = tensors(build().calls[0]()), case.reference()
        assert len(results) == (5 if case.bench == BOTH else 1)
        assert verdict(errors(results, reference), errors(case.yardstick(), reference)) == "ok", impl


def test_wrong_implementations_are_told() -> None:
    """One choice of a token lost, gate and up exchanged, one expert's gradient that misses a row, a router without one."""
    group = next(g for g in TINY.values() if g.bench == BOTH and g.label == QWEN)
    p, (case,) = group.problem, cases(group, True, CPU)
    given = made(p, backward=True)
    right = plain(p, given, torch.bfloat16)
    swapped = nn.Parameter(torch.cat(given.weights.gate_up.detach().chunk(2, 1)[::-1], 1))
    swap = dataclasses.replace(given, weights=dataclasses.replace(given.weights, gate_up=swapped))
    short = right[2 + 1].clone()
    token = int((given.x @ given.weights.router.T).topk(p.top_k).indices.eq(3).nonzero()[0, 0])
    one = dataclasses.replace(given, x=given.x.detach()[token][None], grad_out=given.grad_out[token][None])  # type: ignore[index]
    short[3] -= plain(p, one, torch.bfloat16)[3][3]
    results = {
        "right": right, "lost": [plain(dataclasses.replace(p, top_k=p.top_k - 1), given, torch.bfloat16)[0], *right[1:]],
        "swapped": [plain(p, swap, torch.bfloat16)[0], *right[1:]], "row": [*right[:3], short, right[4]],
        "router": [*right[:2], right[2] * 0, *right[3:]],
    }  # fmt: skip
    case.implementations = {name: lambda found=found: Candidate([lambda: found]) for name, found in results.items()}
    status = {row.impl: row.status for row in run(case, settings())}
    assert status.pop("right") == "ok"
    assert [s.partition(" has")[0] for s in status.values()] == [f"wrong: result {i}" for i in (0, 0, 3, 2)]


def test_cases_are_those_of_the_targets() -> None:
    found = {(group.bench, group.case): group for group in groups(False)}
    assert len(found) == len(groups(False)) == 17
    for (bench, label), limits in moe.LIMIT_MS.items():
        for tokens in limits:
            group = found.pop((bench, f"{label}, {MODELS[label](tokens)}"))
            assert set(group.peers) <= set(FORMS) and group.peers[0] == "hf grouped_mm" and group.peers[-2:] == OURS
            assert ("hf batched_mm" in group.peers) == (tokens <= 16)
    assert {case for _, case in found} == {f"{SKEWED}, {MODELS[QWEN](tokens)}" for tokens in (4096, 16384)}
    assert sum(group.quick for group in groups(False)) == 5


def test_flops_and_bytes() -> None:
    p = MODELS[QWEN](4096)
    expert = 3 * 2048 * 768
    assert p.flops(False) == 2 * 4096 * (8 * expert + 128 * 2048) and p.flops(True) == 3 * p.flops(False)
    assert MODELS[MIXTRAL](1).bytes(False, 2) == 2 * (2 * 3 * 4096 * 14336 + 8 * 4096 + 2 * 4096)
    forward = 100 * expert + 128 * 2048 + 2 * 4096 * 2048
    assert p.bytes(True, 100) == 2 * (2 * forward + 128 * expert + 128 * 2048)


def row(impl: str, ms: float | None, case: str, bench: str = FORWARD, **more: Any) -> rows.Row:
    empty = rows.failed(bench, case, impl, "ok", rows.Stamp("gpu", {}, None, ""), "")
    return dataclasses.replace(empty, ms=ms, **more)


def test_targets_are_of_the_rows() -> None:
    long, few, skewed = (f"{label}, {MODELS[label](tokens)}" for label, tokens in ((QWEN, 16384), (MIXTRAL, 64), (SKEWED, 16384)))
    tiny = f"{QWEN}, {MODELS[QWEN](16384).tiny()}"
    found = targets([
        row("hf grouped_mm", 6.0, long), row("hf eager", 5.0, long), row("fusedblock", 2.0, long, launches=5, host_us=70.0),
        row("fusedblock experts", 2.5, long, launches=9, host_us=200.0),
        row("fusedblock", 0.7, few, launches=5, host_us=50.0), row("hf grouped_mm", None, few), row("fusedblock", 2.5, skewed),
        row("hf grouped_mm", 20.0, long, BOTH, peak_mib=4000.0), row("fusedblock", 6.0, long, BOTH, peak_mib=3000.0, launches=20),
        row("fusedblock", 1.0, tiny, launches=9, host_us=900.0),
    ])  # fmt: skip
    assert {t["what"]: (t["measured"], t["limit"]) for t in found} == {
        f"{FORWARD}, {long}: time to hf eager's": (0.4, None),
        f"{FORWARD}, {long}: ms": (2.0, 2.1),
        f"{FORWARD}, {long}: launches": (5, 6),
        f"{FORWARD}, {long}: host us": (70.0, 60.0),
        f"{FORWARD}, {long}, fusedblock experts: time to hf eager's": (0.5, None),
        f"{FORWARD}, {few}: ms": (0.7, 0.69),
        f"{FORWARD}, {few}: launches": (5, 4),
        f"{FORWARD}, {few}: host us": (50.0, 60.0),
        f"{FORWARD}, {skewed}: time to the balanced one's": (1.25, 1.3),
        f"{BOTH}, {long}: time to hf grouped_mm's": (0.3, None),
        f"{BOTH}, {long}: ms": (6.0, 6.4),
        f"{BOTH}, {long}: memory to hf grouped_mm's": (0.75, 0.7),
        f"{FORWARD}, {tiny}: launches": (9, None),
        f"{FORWARD}, {tiny}: host us": (900.0, None),
    }
    words = [line.split()[-1] for line in moe.targets_text(found).splitlines() if line.strip()]
    assert [w for w in words if w in ("met", "missed")] == [
        "met", "met", "missed", "missed", "missed", "met", "met", "met", "missed",
    ]  # fmt: skip


@pytest.mark.slow
def test_dry_run_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    only = "(Qwen3-30B-A3B,.*T1$|backward: Mixtral)"
    assert moe.main(arguments("--dry", "--json", str(path), "--only", only, "--seconds", "0.02")) == 0
    found, printed = rows.read(path), capsys.readouterr().out
    assert {(r.bench, r.case) for r in found} == {
        (FORWARD, "Qwen3-30B-A3B, E8 k4 H64 I32 T1"), (BOTH, "Mixtral-8x7B, E4 k2 H64 I32 T40"),
    }  # fmt: skip
    assert f"{len(found)} rows" in printed and all(f"{r.bench}: {r.case}" in printed for r in found)
    for r in found:
        assert r.status == "ok" and r.ms and r.tflops is not None and r.gbps is not None and r.spread is not None
        assert r.max_rel_error is not None and 0 < r.max_rel_error < 0.02
        assert (r.host_us is not None) == (r.case.endswith("T1"))
    reached = json.loads(path.read_text())["targets"]
    whats = {t["what"].rpartition(": ")[2] for t in reached}
    assert "host us" in whats and any(what.startswith("time to hf ") for what in whats)  # which of HF's was the fastest


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--choices",)])
def test_whole_dry_run(words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert moe.main(arguments("--dry", "--seconds", "0.02", "--json", str(path), *words)) == 0
    assert {r.status for r in rows.read(path)} == {"ok"}


@pytest.mark.slow
def test_choices_in_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert moe.main(arguments("--choices", "--dry", "--only", "(gpt-oss|GLM|router: Mixtral.*T1$)", "--seconds", "0.02")) == 0
    printed = capsys.readouterr().out
    assert "shared after" in printed and "router few" in printed and "at most" not in printed
    assert "failed" not in printed and "wrong" not in printed


def test_budget_leaves_rows_that_say_skipped(tmp_path: Path) -> None:
    path = str(tmp_path / "out.json")
    assert moe.main(arguments("--dry", "--quick", "--json", path, "--only", "T40", "--budget", "0")) == 0
    assert {(r.impl, r.ms, r.status) for r in rows.read(path)} >= {(name, None, "skipped: out of time") for name in OURS}


def test_choices_differ_in_what_they_set() -> None:
    """Every way is timed somewhere; inside, what it says is so, and outside as before."""
    found = choices(False)
    assert max(Counter(group.name for group in found).values()) == 1
    named = {name for group in found for name in group.peers}
    assert set(WAYS) <= named | {"rows 128"} and named <= set(FORMS)
    assert {group.bench for group in found} == {FORWARD, BOTH, ROUTER} and OSS in {group.label for group in found}
    before = {place: getattr(*place) for way in WAYS.values() for place in way.settings}
    for name, way in WAYS.items():
        assert within(name, lambda way=way: {p: getattr(*p) for p in way.settings})() == way.settings
        assert {place: getattr(*place) for place in before} == before
    target = TARGETS["sm_90"]
    for name in FORM_WAYS:
        assert within(name, lambda: _moe.form(7, 16, False, target))() == name
    kinds = ("gate_up", "down", "vector", "vector_down", "grad_rows", "grad_hidden", "grad_weight")
    configs = {name: within(name, lambda: [_moe.configure(k, 64, 2, target) for k in kinds])() for name in CONFIG_WAYS}
    chosen = [_moe.configure(k, 64, 2, target) for k in kinds]
    for name, those in configs.items():
        changed = [kind for kind, a, b in zip(kinds, those, chosen) if a != b]
        assert changed in ([name.partition(" ")[0]], []), name
    assert len({str(those) for those in configs.values()}) >= len(configs) - 1
    routers = [within(name, lambda: moe_route.configure(512, 128, 2, target))() for name in ROUTER_WAYS]
    assert len(set(routers)) == len(routers)


def test_ahead_compiles_what_all_cases_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(COMPILED) == {name for name in FORMS if not name.startswith("hf ")}
    name = f"{BOTH}: Mixtral-8x7B, E4 k2 H64 I32 T40"
    assert ahead.main("moe", name, dry=True) == 0
    done, broken = ahead.outcome(capsys.readouterr().out.splitlines(), 0, "")
    assert broken == {} and {(d["bench"], d["impl"], d["status"]) for d in done} == {(BOTH, impl, "ok") for impl in OURS}
    for listed in (groups(False), choices(False)):
        needed = {(g.bench, dataclasses.replace(g.problem, hot=0), n) for g in listed for n in g.peers if n in COMPILED}
        done_ahead = {(g.bench, g.problem, n) for g in listed if g.ahead for n in g.peers}
        assert needed <= done_ahead


@pytest.mark.slow
@pytest.mark.parametrize("group", [g for g in choices(False) if g.bench != BOTH and not g.problem.shared], ids=lambda g: g.name)
def test_choices_fit_an_h200(group: moe.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("moe_route", "moe_experts"):  # past the dispatcher, which would only tell shapes
        monkeypatch.setattr(ops, f"_{name}_op", OPS[name].launch)
    p = group.problem
    up, down = (p.hidden, 2 * p.ffn), (p.ffn, p.hidden)
    shapes = [(p.experts, p.hidden), *((p.experts, *(pair if p.transposed else pair[::-1])) for pair in (up, down))]
    router, gate_up, down_weight, x = (
        nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"), requires_grad=False)
        for shape in (*shapes, (p.tokens, p.hidden))
    )
    given = Inputs(x, Weights(router, gate_up, down_weight), 1)
    for name in group.peers:
        with torch.no_grad(), aot.compile_only(TARGETS["sm_90"]) as kernels:
            within(name, partial(FORMS[name](p, given.weights), given))()
        assert kernels and aot.problems(kernels, TARGETS["sm_90"], max_spill_bytes=aot.spills(0)) == [], name


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3", "mixtral"])
@pytest.mark.parametrize("name", [name for kind in ("grad_rows", "grad_hidden", "grad_weight") for name, _ in CONFIGS[kind]])
def test_choices_of_the_backward_fit_an_h200(name: str, model: str) -> None:
    kernels = within(name, lambda: compiled("sm_90", model, 4096, 128))()
    assert kernels and aot.problems(kernels, TARGETS["sm_90"], max_spill_bytes=aot.spills(0)) == []

"""The attention benchmark on the CPU: what is computed, against formulas that share nothing with it, and its flow."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import ahead, attention, command, rows
from benchmarks.attention import BACKWARD, FORWARD, cases, groups, targets, targets_text
from benchmarks.attention_forms import BIAS_TILES, COMPILED, FORMS, WAYS, Way, standard, within
from benchmarks.attention_problem import Inputs, Problem, make_inputs, plain
from benchmarks.command import guarded
from benchmarks.engine import Candidate, Case, Settings, errors, run, tensors, verdict
from fusedblock.kernels._target import target_of
from fusedblock.metering.counter import TrafficCounter
from fusedblock.metering.timing import CpuTimer

CPU = torch.device("cpu")
TINY = {group.name: group for group in groups(True)}


def settings(seconds_left: float = 1e6) -> Settings:
    stamp = rows.Stamp("cpu", {"torch": "x"}, "abc", "2026-01-01")
    return Settings(stamp, CPU, 1.0, 2, time.monotonic() + seconds_left, timer=CpuTimer, log=lambda line: None)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    attention.add_arguments(parser)
    return parser.parse_args(words)


def attended(p: Problem, b: int, i: int, j: int) -> bool:
    """One pair at a time."""
    at = i + p.keys - p.seq
    ok = j <= at or not p.causal or bool(p.prefix) and j < p.prefix[b]
    if p.left >= 0:
        ok = ok and at - j <= p.left
    if p.documents:
        ends = torch.tensor(p.documents).cumsum(0).tolist()
        ok = ok and sum(i >= e for e in ends) == sum(j >= e for e in ends)
    return ok and not (p.block_map and i // 128 != j // 128 and min(i, j) // 128 > 0)


def pairs(p: Problem) -> torch.Tensor:
    return torch.tensor([[[attended(p, b, i, j) for j in range(p.keys)] for i in range(p.seq)] for b in range(p.batch)])


@pytest.mark.parametrize("name", TINY)
def test_formula_is_sdpa_in_float64(name: str) -> None:
    """With gradients; what SDPA lacks written as a mask, or beside it. The yardstick is that within bf16."""
    p = TINY[name].problem
    given = make_inputs(p, CPU, backward=True)
    allowed = pairs(p)
    assert p.pairs() == int(allowed.sum())
    own = Inputs(*(None if t is None else t.double().requires_grad_() for t in (given.q, given.k, given.v)),
                 bias=None if given.bias is None else given.bias.double().requires_grad_(),
                 sinks=None if given.sinks is None else given.sinks.double().requires_grad_())  # fmt: skip
    q, k, v = (t.transpose(1, 2) for t in (own.q, own.k, own.v))
    group = p.heads // p.kv_heads
    mask = torch.zeros(p.batch, p.heads, p.seq, p.keys, dtype=torch.float64).masked_fill(~allowed[:, None], float("-inf"))
    if own.bias is not None:
        mask = mask + own.bias
    if given.alibi_slopes is not None:
        distance = (torch.arange(p.seq)[:, None] + p.keys - p.seq - torch.arange(p.keys)).abs()
        mask = mask - given.alibi_slopes.double()[:, None, None] * distance
    if p.softcap:  # by hand: SDPA has none
        logits = q @ k.repeat_interleave(group, 1).mT * p.head_dim**-0.5
        out = (p.softcap * (logits / p.softcap).tanh() + mask).softmax(-1) @ v.repeat_interleave(group, 1)
    elif own.sinks is not None:  # a key more, of value 0, whose logit is the sink
        k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        mask = torch.cat([mask, own.sinks[:, None, None].expand(p.batch, -1, p.seq, 1)], -1)
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    out = out.transpose(1, 2)
    assert given.grad_out is not None
    expected = torch.autograd.grad(out, own.leaves(), given.grad_out.double())
    forward = dataclasses.replace(given, grad_out=None)
    for found, wanted in ((plain(p, forward, torch.float64), [out]), (plain(p, given, torch.float64), expected)):
        assert max(errors(found, list(wanted))) < 1e-12
    low, high = (1e-2, 3e-2) if p.fp8 else (1e-3, 6e-3)
    assert low < errors(plain(p, forward, torch.bfloat16), [out])[0] < high
    if not p.fp8:
        assert max(errors(plain(p, given, torch.bfloat16), list(expected))) < 2e-2


def test_formula_in_pieces_is_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bias, H4/2 D16 B2 S40", "window 128 and sinks, H4/2 D8 B2 S40"):
        p = TINY[name].problem
        given = make_inputs(p, CPU, backward=True)
        whole = plain(p, given, torch.float64)
        monkeypatch.setattr("benchmarks.attention_problem.CHUNK", 7 * p.heads * p.keys)  # 40 rows: five of 7, one of 5
        assert max(errors(plain(p, given, torch.float64), whole)) < 1e-13
        monkeypatch.undo()


def test_pages_and_fp8_hold_what_the_others_get() -> None:
    paged = TINY["paged decode, H4/2 D16 B2 KV64"].problem
    given = make_inputs(paged, CPU)
    table = given.ours["block_table"]
    assert sorted(table.flatten().tolist()) == list(range(8)) and given.ours["seqused_k"].tolist() == [64, 64]
    for name in ("k", "v"):
        gathered = given.ours[name][table.long()].flatten(1, 2)
        assert torch.equal(gathered, getattr(given, name))
    given = make_inputs(TINY["fp8, H4/2 D16 B2 S40"].problem, CPU)
    for name, heads in (("q", 4), ("k", 2), ("v", 2)):
        small, scale = given.ours[name], given.ours[f"{name}_scale"]
        assert small.dtype == torch.float8_e4m3fn and scale.shape == (2, heads) and small.float().abs().max() > 100
        assert torch.equal(small.double() * scale.double()[:, None, :, None], getattr(given, name).double())


@pytest.mark.parametrize("name", TINY)
def test_peers_compute_the_same(name: str) -> None:
    """Those that a CPU can run, in bf16."""
    group = TINY[name]
    given = make_inputs(group.problem, CPU)
    expected = plain(group.problem, given, torch.float64)
    names = [n for n in group.peers if not n.startswith("fusedblock") and n not in ("fa4", "varlen_attn")]
    assert names or name.startswith("fp8")
    for peer in names:
        with torch.no_grad():
            assert errors([FORMS[peer](group.problem, given, False)(given)], expected)[0] < 8e-3, peer


@pytest.mark.parametrize("name", TINY)
def test_ours_is_called_as_the_case_says(name: str) -> None:
    for case in cases(TINY[name], True, CPU):
        builders = [build for n, build in case.implementations.items() if n.startswith("fusedblock")]
        assert builders and case.yardstick is not None
        for build in builders:
            results, reference = tensors(build().calls[0]()), case.reference()
            assert verdict(errors(results, reference), errors(case.yardstick(), reference)) == "ok"


def test_cases_are_those_of_the_issue() -> None:
    found = {group.name: group for group in groups(False)}
    assert len(found) == len(groups(False)) == 27
    for size in ("B32 S512", "B8 S2048", "B4 S4096", "B2 S8192", "B1 S16384", "B1 S32768"):
        group = found[f"causal, H32/8 D128 {size}"]
        assert not group.inference and {"sdpa, cudnn", "sdpa, flash", "fa4", "fusedblock"} <= {*group.peers}
    for name in (
        "full, H32/8 D128 B2 S8192", "causal, H32/8 D64 B4 S4096", "causal, H16/16 D256 B4 S4096", "causal, H16/8 D512 B1 S8192",
        "window 128, H32/8 D128 B2 S8192", "window 128 and sinks, H64/8 D64 B2 S8192", "16 documents, H32/8 D128 B1 S32768",
        "softcap 50, H32/8 D128 B4 S4096", "ALiBi, H32/8 D128 B4 S4096", "bias, H32/8 D128 B4 S2048",
        "block map, H8/8 D128 B1 S65536", "prefix, H32/8 D128 B2 S8192",
    ):  # fmt: skip
        assert not found[name].inference and "fusedblock" in found[name].peers
    for n in (64, 128, 256):
        assert found[f"causal, H32/8 D128 B{32768 // n} S{n}"].inference
    for n in (512, 2048, 8192, 32768):
        assert "standard" in found[f"full beside three steps, H32/8 D128 B1 S{n}"].peers
    assert found["paged decode, H32/8 D128 B64 KV8192"].problem.page == 64
    assert all(set(group.peers) <= set(FORMS) and "fusedblock" in group.peers[-2:] for group in found.values())
    documents = found["16 documents, H32/8 D128 B1 S32768"].problem.documents
    assert sum(documents) == 32768 and len(set(documents)) == 16
    density = found["block map, H8/8 D128 B1 S65536"].problem.blocks().float().mean().item()
    assert density == pytest.approx(0.1, abs=0.02)


def test_flops_and_bytes() -> None:
    causal = Problem(2, 8192)
    assert causal.flops(False) == 4 * 2 * 32 * 128 * (8192 * 8193 // 2)
    assert causal.flops(True) == causal.flops(False) * 5 // 2
    assert causal.bytes(False) == 2 * 2 * 8192 * 128 * (32 + 2 * 8 + 32)
    assert causal.bytes(True) == 2 * 2 * 8192 * 128 * (48 + 32 + 32 + 48)  # the inputs, out, its gradient; theirs
    assert Problem(1, 8192, left=127).pairs() == 128 * 8192 - 128 * 127 // 2
    assert Problem(1, 300, documents=(100, 200)).pairs() == 100 * 101 // 2 + 200 * 201 // 2
    assert Problem(64, 1, context=8192).pairs() == 64 * 8192
    assert Problem(2, 8192, prefix=(2048, 0)).pairs() == 8192 * 8193 + 2048 * 2047 // 2
    assert Problem(1, 64, fp8=True).bytes(False) == 64 * 128 * (32 + 16 + 2 * 32)
    bias = 2 * 32 * 64 * 64
    assert Problem(4, 64, bias=True).bytes(False) == 2 * 4 * 64 * 128 * 80 + bias


@pytest.mark.parametrize("seq", [512, 2048])
def test_bytes_of_three_steps_are_what_is_counted(seq: int) -> None:
    p = Problem(1, seq, causal=False)
    with torch.device("meta"):
        given = Inputs(*(torch.empty(1, seq, heads, 128, dtype=torch.bfloat16) for heads in (32, 8, 8)))
    with TrafficCounter() as counter:
        standard(p, given, False)(given)
    logits = 32 * seq * seq
    # On a GPU the softmax reads bf16; elsewhere torch casts for it first, which reads 2 and writes 4 and has it read 4 for 2.
    assert counter.total().bytes - p.standard_bytes() == 8 * logits


def test_backward_is_timed_alone() -> None:
    """Over a forward made once: the same gradients at every call, and nothing of the forward in it."""
    p = TINY["causal, H4/2 D16 B2 S40"].problem
    made: list[int] = []

    def form(given: Inputs) -> torch.Tensor:
        made.append(1)
        return FORMS["sdpa, flash"](p, given, False)(given)

    given = make_inputs(p, CPU, backward=True)
    call = attention._backward(form, given)
    first, second = call(), call()
    assert len(made) == 1 and all(torch.equal(a, b) for a, b in zip(first, second))
    assert max(errors(list(first), plain(p, given, torch.float64))) < 1e-2
    assert not given.q.requires_grad


ONLY = "(causal|fp8), H4/2 D16"


@pytest.mark.slow
def test_dry_run_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert attention.main(arguments("--dry", "--json", str(path), "--only", ONLY)) == 0
    found, printed = rows.read(path), capsys.readouterr().out
    assert {(r.bench, r.case) for r in found} == {
        (FORWARD, "causal, H4/2 D16 B2 S40"), (BACKWARD, "causal, H4/2 D16 B2 S40"), (FORWARD, "fp8, H4/2 D16 B2 S40"),
        (FORWARD, "causal, H4/2 D16 B1 S40"), (BACKWARD, "causal, H4/2 D16 B1 S40"),
    }  # fmt: skip
    assert f"{len(found)} rows" in printed and all(f"{r.bench}: {r.case}" in printed for r in found)
    for r in found:
        if r.status == "ok":
            assert r.ms and r.tflops is not None and r.gbps is not None and r.spread is not None
            assert r.max_rel_error is not None and 0 < r.max_rel_error < 0.05
        elif r.impl == "fa4":
            assert r.status == "not installed: flash_attn"
        else:
            assert (r.impl, r.bench) == ("flex", BACKWARD) and "CPU" in r.status, r
    data = json.loads(path.read_text())
    assert {t["what"].rpartition(": ")[2] for t in data["targets"]} >= {"sdpa, cudnn"}
    assert all(s["bytes"] > s["least"] > 0 for s in data["three_steps"]) and len(data["three_steps"]) == 1


@pytest.mark.slow
def test_whole_dry_run(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert attention.main(arguments("--dry", "--json", str(path))) == 0
    bad = {(r.bench, r.impl) for r in rows.read(path) if r.status != "ok"}
    assert bad <= {(FORWARD, "varlen_attn"), (BACKWARD, "varlen_attn"), (BACKWARD, "flex"), (FORWARD, "fa4"), (BACKWARD, "fa4")}


def test_budget_leaves_rows_that_say_skipped(tmp_path: Path) -> None:
    path = str(tmp_path / "out.json")
    assert attention.main(arguments("--dry", "--quick", "--json", path, "--only", "backward: window", "--budget", "0")) == 0
    assert [(r.impl, r.ms, r.status) for r in rows.read(path)] == [
        (name, None, "skipped: out of time")
        for name in ("sdpa, mask", "varlen_attn", "flex", "fa4", "fusedblock", "fusedblock, portable")
    ]


def row(impl: str, ms: float | None, case: str, bench: str = FORWARD) -> rows.Row:
    made = rows.failed(bench, case, impl, "ok", rows.Stamp("gpu", {}, None, ""), "")
    return dataclasses.replace(made, ms=ms)


def test_targets_are_of_the_rows() -> None:
    long, short, window = "causal, H32/8 D128 B8 S2048", "causal, H32/8 D128 B256 S128", "window 128, H32/8 D128 B2 S8192"
    wide, full, alibi = "causal, H16/8 D512 B1 S8192", "full, H32/8 D128 B2 S8192", "ALiBi, H32/8 D128 B4 S4096"
    made = [
        row("sdpa, cudnn", 0.79, long), row("sdpa, flash", 0.5, long), row("fa4", 1.1, long), row("fusedblock", 1.0, long),
        row("fusedblock, portable", 2.0, long),
        row("sdpa, cudnn", 1.5, long, BACKWARD), row("fusedblock", 2.0, long, BACKWARD),
        row("sdpa, cudnn", 0.9, short), row("fusedblock", 1.0, short),
        row("sdpa, mask", 9.0, window), row("flex", 2.0, window), row("varlen_attn", 3.0, window), row("fa4", 0.5, window),
        row("fusedblock", 1.0, window), row("sdpa, efficient", 0.9, wide), row("fusedblock", 1.0, wide),
        row("sdpa, cudnn", 0.9, full), row("fusedblock", None, full), row("flex", 3.0, alibi), row("fusedblock", 1.0, alibi),
        row("flex", None, "softcap 50, H32/8 D128 B4 S4096"), row("fusedblock", 1.0, "softcap 50, H32/8 D128 B4 S4096"),
    ]  # fmt: skip
    found = targets(made)
    assert {t["what"]: (t["measured"], t["limit"]) for t in found} == {
        f"{FORWARD}, {long}: sdpa, cudnn": (0.79, 0.80),
        f"{FORWARD}, {long}: fa4": (1.1, None),
        f"{FORWARD}, {long}, portable: sdpa, cudnn": (0.395, 0.80),
        f"{FORWARD}, {long}, portable: fa4": (0.55, None),
        f"{BACKWARD}, {long}: sdpa, cudnn": (0.75, 0.75),
        f"{FORWARD}, {short}: sdpa, cudnn": (0.9, None),
        f"{FORWARD}, {window}: fa4": (0.5, None),
        f"{FORWARD}, {window}: flex": (2.0, 1.0),
        f"{FORWARD}, {wide}: sdpa, efficient": (0.9, 1.0),
        f"{FORWARD}, {alibi}: flex": (3.0, None),
    }
    lines = [line.split() for line in targets_text(found).splitlines()]
    assert [line[-1] for line in lines if line and line[-1] in ("met", "missed")] == ["missed", "missed", "met", "met", "missed"]


def test_errors_are_held_to_the_yardstick() -> None:
    x = torch.randn(64, dtype=torch.float64)
    built = {n: lambda f=f: Candidate([lambda: x * f]) for n, f in (("far", 1.02), ("near", 1.01))}
    case = Case("b", "c", built, lambda: [x], 1, lambda: 1, yardstick=lambda: [x * 0.99])
    assert [r.status.split(":")[0] for r in run(case, settings())] == ["wrong", "ok"]


def test_what_broke_ahead_is_not_run_and_no_error_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    x, ran = torch.ones(2), []

    def candidate(name: str) -> Candidate:
        ran.append(name)
        return Candidate([lambda: x])

    case = Case("b", "c", {n: lambda n=n: candidate(n) for n in ("hangs", "good")}, lambda: [x + 1], 1, lambda: 1)
    made = guarded(case, settings(), {("b", "c", "hangs"): "compiled ahead: still busy", ("b", "other", "good"): "x"})
    assert ran == ["good"] and [r.status for r in made] == ["failed: RuntimeError: compiled ahead: still busy", "ok"]

    def lost(*rest: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    monkeypatch.setattr(command, "run", lost)
    given = settings()
    made = guarded(case, given, {})
    assert {r.status for r in made} == {"failed: RuntimeError: CUDA error: an illegal memory access"} and given.rows == made


def test_choices_differ_in_what_they_set() -> None:
    """Every way is timed somewhere; inside, what it says is so, and outside as before."""
    found = attention.choices(False)
    assert len({group.name for group in found}) == len(found)
    named = {name for group in found for direction in ("forward", "backward") for name in group.of(direction)}
    assert set(WAYS) <= named <= set(FORMS)
    before = {place: getattr(*place) for way in WAYS.values() for place in way.settings}
    for name, way in WAYS.items():

        def seen(way: Way = way) -> Any:
            return target_of(CPU).skeleton, {place: getattr(*place) for place in way.settings}

        assert within(name, seen, CPU)() == (way.skeleton, way.settings)
        assert target_of(CPU).skeleton == "" and {place: getattr(*place) for place in before} == before
    inside = [tuple(way.settings.values())[0]("of", "any", arguments=1) for way in BIAS_TILES.values()]
    assert len({*map(str, inside)}) == len(BIAS_TILES)
    assert not any(b for b in found for name in b.of("forward") if "dP" in name)


def test_choices_in_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.main(arguments("--choices", "--dry", "--only", "full", "--seconds", "0.02")) == 0
    printed = capsys.readouterr().out
    assert "fusedblock, Hopper" in printed and "dP in two products" in printed and "at least" not in printed


def test_ahead_says_what_it_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert ahead.main("attention", "causal, H4/2 D16 B2 S40", dry=True) == 0
    done, broken = ahead.outcome(capsys.readouterr().out.splitlines(), 0, "")
    assert broken == {} and {(d["bench"], d["impl"]) for d in done} == {
        (b, i) for b in (FORWARD, BACKWARD) for i in ("flex", "fa4", "fusedblock", "fusedblock, portable")
    }
    assert {d["impl"] for d in done} <= set(COMPILED) and {d["case"] for d in done} == {"causal, H4/2 D16 B2 S40"}
    assert [d["status"] for d in done if d["impl"] == "fusedblock"] == ["ok", "ok"]


def test_ahead_tells_a_broken_kernel_from_a_failed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(impl: str, **more: Any) -> str:
        return json.dumps({"bench": "b", "case": "c", "impl": impl, **more})

    ended = [line("flex"), "a library's words", line("flex", status="RuntimeError: no", seconds=1), line("fusedblock")]
    done, broken = ahead.outcome(ended, -11, "the process ended with status -11")
    assert broken == {("b", "c", "fusedblock"): "compiled ahead: the process ended with status -11"}
    assert [d["impl"] for d in done] == ["flex"]
    ended.append(line("fusedblock", status="AcceleratorError: CUDA error: an illegal memory access", seconds=1))
    assert ahead.outcome(ended, 1, "?")[1].keys() == {("b", "c", "fusedblock")}
    seen: list[Any] = []

    def process(command: list[str], timeout: float, stdout: Any, **kwargs: Any) -> Any:
        seen.append((command[1:], timeout))
        stdout.write(line("fusedblock") + "\n")
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", process)
    done, broken = ahead.compile_all("attention", ["one", "two"], 100.0, lambda text: None)
    assert done == [] and list(broken) == [("b", "c", "fusedblock")]
    assert sorted(command[-1] for command, _ in seen) == ["one", "two"] and all(90 < timeout <= 100 for _, timeout in seen)
    assert "still busy after" in broken["b", "c", "fusedblock"]
    assert ahead.compile_all("attention", ["one"], -1.0, lambda text: None) == ([], {}) and len(seen) == 2

"""Attention in all its variants, forward and backward, beside SDPA's backends, FlexAttention, varlen_attn and FlashAttention 4.

All implementations of a case run in this one process on the same inputs and are timed in turns. Each is first held to the
formula in float64; one that is farther from it than 1.5 times the formula in bf16, as plain torch computes it, is not timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedblock.metering.device import describe
from fusedblock.metering.report import table
from fusedblock.metering.timing import input_sets

from . import command
from .attention_forms import BIAS_TILES, COMPILED, FORMS, WAYS, Form, within
from .attention_problem import Inputs, Problem, make_inputs, plain
from .command import tiny
from .engine import Candidate, Case
from .rows import Row

__all__ = ["COMPILED", "add_arguments", "cases", "choices", "groups", "main", "summary"]

FORWARD, BACKWARD = "attention forward", "attention backward"
OURS = ("fusedblock", "fusedblock, portable")
ASKED = "fusedblock, Hopper"  # chosen or not
BACKENDS = ("sdpa, cudnn", "sdpa, flash", "sdpa, efficient")
DOCUMENTS = (2048, 512, 8192, 96, 3072, 1277, 639, 4096, 256, 801, 6144, 128, 2560, 1024, 384, 1539)


@dataclass(frozen=True)
class Group:
    """A problem forward and, unless inference, backward. peers: in FORMS. ahead: it needs kernels that no other compiles."""

    label: str
    problem: Problem
    peers: tuple[str, ...]
    inference: bool = False
    quick: bool = False
    ahead: bool = True

    def of(self, direction: str) -> list[str]:
        """The peers that tell something about a direction."""
        return [name for name in self.peers if name not in WAYS or WAYS[name].direction in ("", direction)]

    @property
    def name(self) -> str:
        return f"{self.label}, {self.problem}"


def groups(dry: bool) -> list[Group]:
    """In the order of their worth: what a short budget cuts off comes last."""
    core = (*BACKENDS, "fa4", *OURS)
    made = [
        Group("causal", Problem(2, 8192), (*BACKENDS, "flex", "fa4", *OURS), quick=True),
        Group("causal", Problem(8, 2048), core, quick=True, ahead=False),
        Group("causal", Problem(4, 4096), core, ahead=False),
        Group("causal", Problem(1, 16384), core, ahead=False),
        Group("causal", Problem(32, 512), core),
        Group("causal", Problem(1, 32768), (*BACKENDS[:2], "fa4", *OURS), ahead=False),  # without "efficient", the slowest by far
        Group("window 128", Problem(2, 8192, left=127), ("sdpa, mask", "varlen_attn", "flex", "fa4", *OURS), quick=True),
        Group("16 documents", Problem(1, 32768, documents=DOCUMENTS),
              ("sdpa, padded", "varlen_attn", "flex", "fa4", *OURS), quick=True),
        Group("block map", Problem(1, 65536, heads=8, causal=False, block_map=True), ("flex", "fusedblock", ASKED)),
        Group("window 128 and sinks", Problem(2, 8192, heads=64, head_dim=64, left=127, sinks=True),
              ("flex", "fa4", *OURS)),
        Group("softcap 50", Problem(4, 4096, softcap=50.0), ("flex", "fa4", *OURS)),
        Group("bias", Problem(4, 2048, causal=False, bias=True), ("sdpa, mask", "flex", "fusedblock")),
        Group("causal", Problem(1, 8192, heads=16, head_dim=512), ("sdpa, efficient", "sdpa, formula", "fusedblock")),
        *(Group("full beside three steps", Problem(1, seq, causal=False), (*BACKENDS[:2], "standard", "fusedblock"),
                inference=True, ahead=False) for seq in (512, 2048, 8192, 32768)),
        Group("full", Problem(2, 8192, causal=False), core),
        Group("causal", Problem(4, 4096, head_dim=64), core),
        Group("causal", Problem(4, 4096, heads=16, kv_heads=16, head_dim=256), core),
        *(Group("causal", Problem(32768 // seq, seq), (*BACKENDS, *OURS), inference=True) for seq in (64, 128, 256)),
        Group("paged decode", Problem(64, 1, context=8192, page=64),
              ("sdpa, cudnn", "sdpa, flash", "fusedblock, contiguous bf16", "fusedblock"), inference=True, quick=True),
        Group("fp8", Problem(2, 8192, fp8=True), ("fusedblock, contiguous bf16", "fusedblock"), inference=True),
        Group("prefix", Problem(2, 8192, prefix=(2048, 4096)), ("sdpa, mask", "flex", "fusedblock")),
        Group("ALiBi", Problem(4, 4096, alibi=True), ("flex", "fusedblock")),
    ]  # fmt: skip
    return tiny(made) if dry else made


def choices(dry: bool) -> list[Group]:
    """What fusedblock chooses between, beside a peer that was fast: for the tables in kernels/ that hold the choice."""
    hopper = (ASKED, "fusedblock, dP in one product", "fusedblock, dP in two products")
    both = ("fusedblock, portable", *hopper)
    made = [
        *(Group("causal", Problem(16384 // seq, seq), ("sdpa, cudnn", *hopper)) for seq in (8192, 2048, 512, 16384)),
        Group("full", Problem(2, 8192, causal=False), ("sdpa, cudnn", *hopper)),
        Group("causal", Problem(4, 4096, head_dim=64), ("sdpa, cudnn", *hopper)),
        *(Group(label, Problem(4, 2048, bias=True, **change), ("flex", "fusedblock", *BIAS_TILES)) for label, change in (
            ("bias", {"causal": False}), ("causal bias", {}), ("bias", {"causal": False, "head_dim": 64}))),
        Group("window 128", Problem(2, 8192, left=127), both),
        Group("window 128 and sinks", Problem(2, 8192, heads=64, head_dim=64, left=127, sinks=True), both),
        Group("16 documents", Problem(1, 32768, documents=DOCUMENTS), both),
        Group("block map", Problem(1, 65536, heads=8, causal=False, block_map=True), ("flex", "fusedblock, portable", ASKED)),
        *(Group("causal", Problem(32768 // seq, seq), ("sdpa, cudnn", "fusedblock, short", *both[:2]), inference=True)
          for seq in (64, 128, 256)),
    ]  # fmt: skip
    return tiny(made) if dry else made


def cases(group: Group, dry: bool, device: torch.device) -> Iterator[Case]:
    for backward in (False,) if group.inference else (False, True):
        yield _case(group, backward, dry, device)


def _case(group: Group, backward: bool, dry: bool, device: torch.device) -> Case:
    """Inputs are made when the first form is built, and all forms run on the same."""
    p, sets = group.problem, list[Inputs]()

    def inputs() -> list[Inputs]:
        if not sets:
            count = 1 if dry else input_sets(p.bytes(False), describe(device)["l2_bytes"], most=16)
            sets.extend(make_inputs(p, device, seed, backward) for seed in range(count))
        return sets

    def build(name: str) -> Candidate:
        form = FORMS[name](p, inputs()[0], not dry)
        made = _backward if backward else _forward
        return Candidate([within(name, made(form, given), device) for given in inputs()])

    return Case(
        BACKWARD if backward else FORWARD, group.name,
        {name: partial(build, name) for name in group.of("backward" if backward else "forward")},
        lambda: plain(p, inputs()[0], torch.float64), p.flops(backward), lambda: p.bytes(backward), model="",
        yardstick=lambda: plain(p, inputs()[0], torch.bfloat16),
    )  # fmt: skip


def _forward(form: Form, given: Inputs) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with torch.no_grad():
            return form(given)

    return call


def _backward(form: Form, given: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """The backward alone, again and again over one forward. Autograd runs it on the forward's stream: not the default one, which
    cannot join the capture of a CUDA graph."""
    own = given.fresh()
    stream = torch.cuda.Stream() if given.q.is_cuda else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = form(own)
    if stream is not None:
        stream.synchronize()
    return lambda: torch.autograd.grad(out, own.leaves(), given.grad_out, retain_graph=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_arguments(parser, "attention", "five problems and fewer samples", budget=440.0, seconds=2.5)


def main(args: argparse.Namespace) -> int:
    return command.main(args, sys.modules[__name__])


def summary(found: Sequence[Row], dry: bool) -> tuple[dict[str, Any], list[str]]:
    """What is added to the file, and printed."""
    steps, reached = three_steps(dry), targets(found)
    return {"three_steps": steps, "targets": reached}, [steps_text(steps), targets_text(reached)]


# Label -> what its fastest peer's time over ours must come to; None: only reported.
LIMITS = {"window 128": 1.0, "16 documents": 1.0, "block map": 1.0, "window 128 and sinks": 1.0, "softcap 50": 1.0, "bias": 1.0}
CUDNN = {FORWARD: 0.80, BACKWARD: 0.75}  # at causal, head_dim 128, 2048 tokens and more


def targets(found: Sequence[Row]) -> list[dict[str, Any]]:
    """Of fusedblock's rows, by the kernels it chooses and by those it is made to take: what, measured (a peer's time over ours),
    limit (at least; None: only reported)."""
    made: list[dict[str, Any]] = []
    ours = (*OURS, ASKED)
    for row in found:
        if row.impl not in ours or row.ms is None:
            continue
        peers = {r.impl: r.ms for r in found if (r.bench, r.case) == (row.bench, row.case) and r.ms and r.impl not in ours}
        label, _, size = row.case.partition(", ")
        for name in ("sdpa, cudnn", "fa4"):
            if name in peers:
                long = label == "causal" and " D128 " in size and int(size.rpartition("S")[2]) >= 2048
                limit = CUDNN[row.bench] if name == "sdpa, cudnn" and long else None
                made.append(_target(row, name, peers[name], limit))
        others = {name: ms for name, ms in peers.items() if name != "fa4"}
        if others and "sdpa, cudnn" not in others:
            best = min(others, key=lambda name: others[name])
            limit = 1.0 if label == "causal" and " D512 " in size else LIMITS.get(label)
            made.append(_target(row, best, others[best], limit))
    return made


def _target(row: Row, peer: str, ms: float, limit: float | None) -> dict[str, Any]:
    assert row.ms is not None
    kernels = row.impl.partition(", ")[2]
    what = f"{row.bench}, {row.case}{f', {kernels}' if kernels else ''}: {peer}"
    return {"what": what, "measured": round(ms / row.ms, 3), "limit": limit}


def targets_text(found: Sequence[dict[str, Any]]) -> str:
    cells = [
        (t["what"], f"{t['measured']:.2f}", "-" if t["limit"] is None else f"{t['limit']:.2f}",
         "" if t["limit"] is None else "met" if t["measured"] >= t["limit"] else "missed")
        for t in found
    ]  # fmt: skip
    return table("a peer's time over ours", ("case, peer", "measured", "at least", ""), cells)


def three_steps(dry: bool) -> list[dict[str, Any]]:
    """HBM bytes of three-step attention by count, beside what any implementation must move."""
    chosen = [group for group in groups(dry) if "standard" in group.peers]
    return [{"case": g.name, "bytes": g.problem.standard_bytes(), "least": g.problem.bytes(False)} for g in chosen]


def steps_text(found: Sequence[dict[str, Any]]) -> str:
    cells = [(t["case"], *(f"{n:.0f}" for n in (t["bytes"] / 2**20, t["least"] / 2**20, t["bytes"] / t["least"]))) for t in found]
    return table("bytes of the three steps", ("case", "MiB", "least MiB", "ratio"), cells)

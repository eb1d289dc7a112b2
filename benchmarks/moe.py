"""Mixtures of experts, router and experts together, forward and with the backward, beside transformers' own blocks.

All implementations of a case run in this one process on the same weights and tokens and are timed in turns. Each is first held to
the formula in float64, of every token and every gradient: an expert at a time even the largest case is 35 TFLOP and some tens of
GB, so nothing need be sampled. Tokens are made so that their choice of experts is beyond any rounding (`make_inputs`); else a
choice that tips over would count as an error, and hide others. One that is farther from the formula than 1.5 times the formula in
bf16, as transformers' eager experts compute it, is not timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fusedblock.metering.device import describe
from fusedblock.metering.report import table
from fusedblock.metering.timing import input_sets

from . import command
from .command import tiny
from .engine import Candidate, Case
from .moe_forms import COMPILED, CONFIGS, FORMS, ROUTERS, Form, within
from .moe_problem import Inputs, Problem, make_inputs, make_weights, plain, plain_router
from .rows import Row

__all__ = ["COMPILED", "add_arguments", "cases", "choices", "groups", "main", "summary"]

FORWARD, BOTH, ROUTER = "moe forward", "moe forward+backward", "moe router"
OURS = ("fusedblock experts", "fusedblock")
GROUPED = "hf grouped_mm"
QWEN, MIXTRAL, OSS = "Qwen3-30B-A3B", "Mixtral-8x7B", "gpt-oss-20b"
SHARED = "Qwen1.5-MoE-A2.7B", "GLM-4.5-Air"  # their sizes, with Qwen3's router
SKEWED = f"{QWEN} skewed"  # four experts that every token chooses have half of the slots
MODELS = {
    QWEN: partial(Problem, experts=128, top_k=8, hidden=2048, ffn=768, model="qwen3_moe"),
    MIXTRAL: partial(Problem, experts=8, top_k=2, hidden=4096, ffn=14336, model="mixtral"),
    SKEWED: partial(Problem, experts=128, top_k=8, hidden=2048, ffn=768, model="qwen3_moe", hot=4),
    SHARED[0]: partial(Problem, experts=60, top_k=4, hidden=2048, ffn=1408, model="", shared=5632),
    SHARED[1]: partial(Problem, experts=128, top_k=8, hidden=4096, ffn=1408, model="", shared=1408),
    OSS: partial(Problem, experts=32, top_k=4, hidden=2880, ffn=2880, model="", transposed=True),  # its sizes, with SiLU
}
# bench, label -> tokens: what the project has set itself on an H200, in ms. The same tokens' host time and launches are below.
LIMIT_MS = {
    (FORWARD, QWEN): {16384: 2.1, 4096: 0.62, 512: 0.33, 64: 0.32, 16: 0.19, 1: 0.030},
    (FORWARD, MIXTRAL): {16384: 16.8, 4096: 4.6, 512: 0.85, 64: 0.69, 1: 0.171},
    (BOTH, QWEN): {16384: 6.4, 4096: 2.2},
    (BOTH, MIXTRAL): {16384: 57.0, 4096: 16.0},
}
HOST_TOKENS, HOST_US = (1, 64), 60.0
SKEW, PEAK = 1.3, 0.7  # time to the balanced one's; memory of a step with gradients to that of GROUPED


@dataclass(frozen=True)
class Group:
    """One case. peers: in FORMS. ahead: it needs kernels that no other compiles."""

    bench: str
    label: str
    problem: Problem
    peers: tuple[str, ...]
    quick: bool = False
    ahead: bool = True

    @property
    def case(self) -> str:
        return f"{self.label}, {self.problem}"

    @property
    def name(self) -> str:
        return f"{self.bench}: {self.case}"


def groups(dry: bool) -> list[Group]:
    """In the order of their worth: what a short budget cuts off comes last."""

    def one(bench: str, label: str, tokens: int, quick: bool = False) -> Group:
        peers = [GROUPED]
        if tokens <= 16:
            peers.append("hf batched_mm")  # it copies every token's experts
        if tokens >= (4096 if label == MIXTRAL else 16384) and label != SKEWED:
            peers.append("hf eager")  # a loop over experts that waits for the device
        return Group(bench, label, MODELS[label](tokens), (*peers, *OURS), quick, label != SKEWED)

    made = [
        one(FORWARD, QWEN, 4096, True), one(FORWARD, MIXTRAL, 4096), one(FORWARD, QWEN, 1, True), one(FORWARD, MIXTRAL, 1, True),
        one(FORWARD, QWEN, 64, True), one(FORWARD, MIXTRAL, 64), one(FORWARD, QWEN, 16384), one(FORWARD, MIXTRAL, 16384),
        one(BOTH, QWEN, 16384), one(BOTH, QWEN, 4096, True), one(BOTH, MIXTRAL, 4096), one(BOTH, MIXTRAL, 16384),
        one(FORWARD, SKEWED, 4096), one(FORWARD, SKEWED, 16384), one(FORWARD, QWEN, 512), one(FORWARD, MIXTRAL, 512),
        one(FORWARD, QWEN, 16),
    ]  # fmt: skip
    return tiny(made) if dry else made


def _names(*kinds: str) -> tuple[str, ...]:
    return tuple(name for kind in kinds for name, _ in CONFIGS[kind])


def choices(dry: bool) -> list[Group]:
    """What the tables of choices in kernels/ are filled from: forms by tokens, tile rows, tiles, the backward's, the router's."""
    chosen = "fusedblock, as chosen"

    def one(label: str, tokens: int, *ways: str, quick: bool = False) -> Group:
        return Group(FORWARD, label, MODELS[label](tokens), (chosen, *ways), quick)

    def gradients(label: str, kind: str, tokens: int = 4096) -> Group:  # a case a kind: each takes a compiler a minute
        return Group(BOTH, f"{label}, {kind}", MODELS[label](tokens), (chosen, *_names(kind)))

    def router(label: str, tokens: int, kind: str) -> Group:
        return Group(ROUTER, label, MODELS[label](tokens), ("router, as chosen", *(name for name, _ in ROUTERS[kind])))

    grouped = {kind: _names(f"gate_up {kind}", f"down {kind}") for kind in (16, 64, 128)}
    made = [
        one(QWEN, 1, "vector", "few", "grouped", *_names("vector", "vector_down"), quick=True),
        one(MIXTRAL, 1, "vector", "few", "grouped", *_names("vector", "vector_down")),
        *(one(label, tokens, "few", "grouped") for tokens in (2, 8) for label in (QWEN, MIXTRAL)),
        one(QWEN, 16, "few", "grouped", "rows 32", *grouped[16]), one(MIXTRAL, 16, "few", "grouped", "rows 32", *grouped[16]),
        one(QWEN, 64, "few", "grouped", "rows 32", *grouped[16]), one(MIXTRAL, 64, "few", "grouped", "rows 16", *grouped[16]),
        *(one(label, 128, "few", "grouped") for label in (QWEN, MIXTRAL)),
        *(gradients(label, kind) for kind in ("grad_weight", "grad_hidden", "grad_rows") for label in (QWEN, MIXTRAL)),
        *(gradients(QWEN, kind, 16384) for kind in ("grad_weight", "grad_hidden", "grad_rows")),
        one(QWEN, 256, "rows 16", "rows 64", *grouped[16]), one(MIXTRAL, 256, "rows 64"),
        one(QWEN, 512, "rows 16", "rows 32", "rows 128", *grouped[64], quick=True),
        one(MIXTRAL, 512, "portable", "rows 16", "rows 32", "rows 64", *grouped[128]),
        one(QWEN, 4096, "portable", "rows 32", "rows 64", *grouped[128]),
        one(MIXTRAL, 4096, "portable", "rows 64", *grouped[128]),
        one(QWEN, 16384, "portable", "rows 64", *grouped[128]), one(MIXTRAL, 16384, "portable", "rows 64", *grouped[128]),
        *(router(label, tokens, kind) for label in (QWEN, MIXTRAL)
          for tokens, kind in ((1, "few"), (64, "few"), (512, "some"), (4096, "many"), (16384, "many"))),
        one(OSS, 1, "few", "grouped"),
        *(Group(FORWARD, label, MODELS[label](tokens), ("fusedblock", "shared after"))
          for label in SHARED for tokens in (1, 64, 512)),
    ]  # fmt: skip
    return tiny(made) if dry else made


def cases(group: Group, dry: bool, device: torch.device) -> Iterator[Case]:
    """One. Weights and tokens are made when the first form is built, and all forms run on them: as many sets of tokens as keep
    the experts that they choose out of the cache. A router's weight alone stays there."""
    p, backward, sets = group.problem, group.bench == BOTH, list[Inputs]()
    router = 2 * (p.tokens + p.experts) * p.hidden if group.bench == ROUTER else 0
    formula = plain_router if router else plain

    def inputs() -> list[Inputs]:
        if not sets:
            weights = make_weights(p, device, backward)
            sets.append(make_inputs(p, device, weights, 0, backward))
            count = 1 if dry else input_sets(moved(), describe(device)["l2_bytes"], most=16)
            sets.extend(make_inputs(p, device, weights, seed, backward) for seed in range(1, count))
        return sets

    def moved() -> int:
        return router or p.bytes(backward, sets[0].touched)

    def build(name: str) -> Candidate:
        form = FORMS[name](p, inputs()[0].weights)
        return Candidate([within(name, _call(form, given, backward)) for given in inputs()])

    flops = 2 * p.tokens * p.experts * p.hidden if router else p.flops(backward)
    yield Case(
        group.bench, group.case, {name: partial(build, name) for name in group.peers},
        lambda: formula(p, inputs()[0], torch.float64), flops, moved, model="",
        host=10 if group.bench == FORWARD and p.tokens in HOST_TOKENS and "fusedblock" in group.peers else 0,
        yardstick=lambda: formula(p, inputs()[0], torch.bfloat16),
    )  # fmt: skip


def _call(form: Form, given: Inputs, backward: bool) -> Callable[[], Any]:
    """The result, with backward also the gradients of all leaves."""

    def call() -> Any:
        with torch.set_grad_enabled(backward):
            out = form(given)
            return (out.detach(), *torch.autograd.grad(out, given.leaves(), given.grad_out)) if backward else out

    return call


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_arguments(parser, "moe", "five cases and fewer samples", budget=240.0, seconds=1.5)


def main(args: argparse.Namespace) -> int:
    return command.main(args, sys.modules[__name__])


def summary(found: Sequence[Row], dry: bool) -> tuple[dict[str, Any], list[str]]:
    """What is added to the file, and printed."""
    reached = targets(found)
    return {"targets": reached}, [targets_text(reached)]


def targets(found: Sequence[Row]) -> list[dict[str, Any]]:
    """Of fusedblock's rows: what, measured, limit (at most; None: only reported)."""
    made: list[dict[str, Any]] = []
    rows = {(r.bench, r.case, r.impl): r for r in found if r.ms}

    def add(row: Row, what: str, measured: float, limit: float | None) -> None:
        name = "" if row.impl == "fusedblock" else f", {row.impl}"
        made.append({"what": f"{row.bench}, {row.case}{name}: {what}", "measured": round(measured, 4), "limit": limit})

    for row in rows.values():
        if row.impl not in OURS:
            continue
        assert row.ms is not None
        label, tokens = row.case.partition(", ")[0], int(row.case.rpartition(" T")[2])
        peers = {impl: r.ms for (bench, case, impl), r in rows.items() if (bench, case) == (row.bench, row.case) and r.ms}
        real = label in MODELS and row.case == f"{label}, {MODELS[label](tokens)}"  # limits are of these sizes
        best = min((impl for impl in peers if impl.startswith("hf ")), key=lambda impl: peers[impl], default=None)
        if best is not None:
            add(row, f"time to {best}'s", row.ms / peers[best], None)
        if row.impl != "fusedblock":
            continue
        limit = LIMIT_MS.get((row.bench, label), {}).get(tokens)
        if real and limit is not None:
            add(row, "ms", row.ms, limit)
        balanced = rows.get((row.bench, row.case.replace(SKEWED, QWEN), row.impl))
        if label == SKEWED and balanced is not None and balanced.ms:
            add(row, "time to the balanced one's", row.ms / balanced.ms, SKEW if real else None)
        peer = rows.get((row.bench, row.case, GROUPED))
        if row.bench == BOTH and peer is not None and peer.peak_mib and row.peak_mib:
            limit = PEAK if real and (label, tokens) == (QWEN, 16384) else None
            add(row, f"memory to {GROUPED}'s", row.peak_mib / peer.peak_mib, limit)
        if row.bench == FORWARD and row.launches:
            add(row, "launches", row.launches, (4 if tokens <= 64 else 6) if real else None)
        if row.host_us is not None:
            add(row, "host us", row.host_us, HOST_US if real else None)
    return made


def targets_text(found: Sequence[dict[str, Any]]) -> str:
    cells = [
        (t["what"], f"{t['measured']:g}", "-" if t["limit"] is None else f"{t['limit']:g}",
         "" if t["limit"] is None else "met" if t["measured"] <= t["limit"] else "missed")
        for t in found
    ]  # fmt: skip
    return table("targets", ("case, what", "measured", "at most", ""), cells)

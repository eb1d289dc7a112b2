"""One decoder layer of each model, fusedblock beside transformers, torch.compile and Liger; then the operators of Llama's.

All implementations of a case run in this one process on the same weights and inputs and are timed in turns. Each is first
held to a float64 reference; one that is farther from it than 1.5 times transformers' own layer in bf16 is not timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fusedblock.metering.device import describe, measure_ceilings
from fusedblock.metering.report import table
from fusedblock.metering.timing import CpuTimer, default_timer

from . import breakdown, cold, rows
from .engine import Case, Settings, run
from .implementations import MODELS, Inputs, implementations, make_inputs, make_layer, reference
from .rows import Row

HOST_CALLS = 10  # between two waits: their launches do not fill the queue
HOST_US = 60.0  # one fused call without gradients keeps the CPU no longer
COLD_S = 20.0  # the first call of a layer, everything compiled


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", action="append", choices=list(MODELS), help="one layer alone; may be repeated (default: all)")
    parser.add_argument("--json", metavar="FILE", help="result file (default: benchmarks/results/layer-GPU-DATE.json)")
    parser.add_argument("--quick", action="store_true", help="the B1 cases and fewer samples")
    parser.add_argument("--only", metavar="REGEX", default="", help="cases whose 'bench: case' matches")
    parser.add_argument("--budget", metavar="SECONDS", type=float, default=440.0,
                        help="no new work after this, shared out among the models (default: 440)")  # fmt: skip
    parser.add_argument("--dry", action="store_true", help="the whole flow on the CPU at tiny sizes; its times mean nothing")


def main(args: argparse.Namespace) -> int:
    started = time.monotonic()
    if not args.dry and not torch.cuda.is_available():
        print(
            "benchmarks layer: torch sees no GPU here, and a CPU's times would say nothing; --dry runs the flow", file=sys.stderr
        )
        return 2
    device = torch.device("cpu" if args.dry else "cuda")
    stamp = rows.Stamp.now(str(device))
    settings = Settings(
        stamp, device,
        seconds=4.0 if args.quick else 8.0, rounds=3 if args.dry else 15 if args.quick else 30,
        deadline=started + args.budget, timer=CpuTimer if args.dry else default_timer,
        log=lambda line: print(line, file=sys.stderr, flush=True),
    )  # fmt: skip
    extra: dict[str, Any] = {
        "machine": describe(device),
        "models": {name: model.title for name, model in MODELS.items()},
        "ceilings": None if args.dry else dataclasses.asdict(measure_ceilings(device)),
    }
    path = args.json or (None if args.dry else rows.default_path("layer", stamp))
    wanted = re.compile(args.only)
    end, names = settings.deadline, args.model or list(MODELS)

    def show(made: list[Row]) -> None:
        print(rows.text(made), end="\n\n", flush=True)
        if path:
            rows.write(path, settings.rows, extra)

    for i, name in enumerate(names):
        settings.deadline = time.monotonic() + (end - time.monotonic()) / (len(names) - i)  # what one leaves is the others'
        if wanted.search("layer cold: "):
            show(cold.run(name, settings))
        for case in cases(name, args.quick, args.dry, device):
            if wanted.search(f"{case.bench}: {case.name}"):
                show(run(case, settings))
    settings.deadline = end
    if "llama" in names:
        for case in breakdowns(args.quick, args.dry, device):
            if wanted.search(f"{case.bench}: {case.name}"):
                show(run(case, settings))
    extra["seconds"] = round(time.monotonic() - started, 1)
    extra["targets"] = targets(settings.rows)
    if path:
        rows.write(path, settings.rows, extra)
    print(targets_text(extra["targets"]))
    skipped = sum(row.status.startswith("skipped") for row in settings.rows)
    print(f"{len(settings.rows)} rows in {extra['seconds']:.0f} s" + (f", {skipped} skipped: out of time" if skipped else "")
          + (f", written to {path}" if path else ""))  # fmt: skip
    return 0


class _Cases:
    """Makes the cases of one model's layer, which all share its weights."""

    def __init__(self, name: str, dry: bool, device: torch.device) -> None:
        self.name, self.model, self.dry = name, MODELS[name], dry
        self.layer = make_layer(self.model.tiny if dry else self.model.config, device)

    def __call__(self, bench: str, batch: int, seq: int, *, train: bool = False, cached: int | None = None, host: int = 0,
                 host_only: bool = False) -> Case:  # fmt: skip
        where = f"B{batch} S{seq}" if cached in (None, seq) else f"B{batch} KV{cached}"
        inputs: list[Inputs] = []

        def given() -> Inputs:
            if not inputs:
                inputs.append(make_inputs(self.layer, batch, seq, train=train, context=cached))
            return inputs[0]

        flops, moved = demand(self.layer, batch, seq, cached, train)
        built = implementations(self.layer, given, "eager" if self.dry else "inductor")
        dropped = {"liger"} - set(self.model.peers)
        if self.name != "llama" and batch * seq > 4096:
            dropped.add("hf-eager")  # its score matrices take seconds, and say nothing new
        if host_only:
            dropped |= set(built) - {"hf-sdpa", "fusedblock"}
            where += ", static cache" if cached else ", no cache"
        return Case(
            bench, where, {n: b for n, b in built.items() if n not in dropped}, lambda: reference(self.layer, given()), flops,
            lambda: moved, self.name, host, host_only,
        )  # fmt: skip


def _sizes(dry: bool) -> tuple[int, int, int]:
    """Tokens of a short and of a long prefill, and keys of a decode step."""
    return (8, 24, 80) if dry else (512, 4096, 4096)


def cases(name: str, quick: bool, dry: bool, device: torch.device) -> Iterator[Case]:
    """Those of one model, in the order of their worth: what a short budget cuts off comes last."""
    case, (short, long, context) = _Cases(name, dry, device), _sizes(dry)
    yield case("layer forward", 1, long)
    yield case("layer decode", 1, 1, cached=context, host=HOST_CALLS)
    yield case("layer forward+backward", 1, long, train=True)
    yield case("layer forward", 1, short, host=HOST_CALLS)
    yield case("layer host", 1, short, cached=short, host=1, host_only=True)  # the second call would not fit into the cache
    yield case("layer host", 1, 1, host=HOST_CALLS, host_only=True)
    if not quick:
        yield case("layer decode", 16, 1, cached=context)
        yield case("layer forward", 4, long)


def breakdowns(quick: bool, dry: bool, device: torch.device) -> Iterator[Case]:
    """What there is for Llama alone: the operators of its layer, and more of its training."""
    case, (short, long, context) = _Cases("llama", dry, device), _sizes(dry)
    config = case.model.tiny if dry else case.model.config
    l2 = 0 if dry else describe(device)["l2_bytes"]

    def operators(batch: int, seq: int, cached: int, train: bool) -> list[Case]:
        return breakdown.cases(config, batch, seq, cached, train, device, l2)

    yield from operators(1, long, long, False)
    yield case("layer forward+backward", 1, short, train=True)
    yield from operators(1, 1, context, False)
    if not quick:
        yield case("layer forward+backward", 4, long, train=True)
    yield from operators(1, long, long, True)
    if not quick:
        yield from operators(16, 1, context, False)


def targets(found: Sequence[Row]) -> list[dict[str, Any]]:
    """Of fusedblock's rows, what the project has set itself a limit for: model, what, measured, limit (None: only reported)."""
    peers = {(r.model, r.bench, r.case): r.ms for r in found if r.impl == "torch.compile" and r.ms}
    made: list[dict[str, Any]] = []

    def add(row: Row, what: str, measured: float, limit: float | None) -> None:
        what = f"{row.bench}, {row.case}: {what}"
        made.append({"model": row.model, "what": what, "measured": round(measured, 3), "limit": limit})

    for row in found:
        if row.ms is None or not row.impl.startswith("fusedblock"):
            continue
        peer = peers.get((row.model, row.bench, row.case))
        if peer and row.impl == "fusedblock":
            add(row, "time to torch.compile's", row.ms / peer, None if "backward" in row.bench else 1.0)
        if row.launches and row.bench != "operator":
            add(row, "launches", row.launches, None)
        if row.host_us is not None:
            add(row, "host us", row.host_us, HOST_US)
        if row.impl == "fusedblock, first call":
            add(row, "first call, s", row.ms / 1e3, COLD_S)
    steady = {(r.model, r.case): r.ms for r in found if r.impl == "fusedblock, steady call" and r.ms}
    for row in found:
        if row.impl == "fusedblock, second call" and row.ms:
            add(row, "second call to a steady one", row.ms / steady[row.model, row.case], None)
    return made


def targets_text(found: Sequence[dict[str, Any]]) -> str:
    cells = [
        (t["model"], t["what"], f"{t['measured']:g}", "-" if t["limit"] is None else f"{t['limit']:g}",
         "" if t["limit"] is None else "met" if t["measured"] <= t["limit"] else "missed")
        for t in found
    ]  # fmt: skip
    return table("targets", ("model", "what", "measured", "limit", ""), cells)


def demand(layer: nn.Module, batch: int, seq: int, cached: int | None, train: bool) -> tuple[int, int]:
    """(FLOPs of the maths, bytes that any implementation must move): causal attention, nothing computed or moved twice."""
    attention: Any = layer.self_attn
    config, head_dim = attention.config, attention.head_dim
    hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    tokens, context = batch * seq, cached or seq
    weights = sum(p.numel() for p in layer.parameters())
    products = 2 * tokens * sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    scores = 4 * batch * heads * head_dim * (seq * (2 * context - seq + 1) // 2)
    elements = weights + 2 * tokens * hidden
    if cached and cached > seq:
        elements += 2 * batch * context * kv_heads * head_dim
    if train:  # weights again, their gradients, and the gradients of result and input
        elements += 2 * weights + 2 * tokens * hidden
    return (products * 3 + scores * 7 // 2 if train else products + scores), 2 * elements

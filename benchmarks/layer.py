"""One Llama-3.1-8B decoder layer, fusedblock beside transformers, torch.compile and Liger; then its operators.

All implementations of a case run in this one process on the same weights and inputs and are timed in turns. Each is first
held to a float64 reference; one that is farther from it than 1.5 times transformers' own layer in bf16 is not timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from fusedblock.metering.device import describe, measure_ceilings
from fusedblock.metering.timing import CpuTimer, default_timer

from . import breakdown, rows
from .engine import Case, Settings, run
from .implementations import LLAMA_8B, TINY, Inputs, implementations, make_inputs, make_layer, reference


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="result file (default: benchmarks/results/layer-GPU-DATE.json)")
    parser.add_argument("--quick", action="store_true", help="the B1 cases and fewer samples")
    parser.add_argument("--only", metavar="REGEX", default="", help="cases whose 'bench: case' matches")
    parser.add_argument("--budget", metavar="SECONDS", type=float, default=420.0, help="no new work after this (default: 420)")
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
    extra = {"machine": describe(device), "ceilings": None if args.dry else dataclasses.asdict(measure_ceilings(device))}
    path = args.json or (None if args.dry else default_path(stamp))
    wanted = re.compile(args.only)
    for case in cases(args.quick, args.dry, device):
        if not wanted.search(f"{case.bench}: {case.name}"):
            continue
        made = run(case, settings)
        print(rows.text(made), end="\n\n", flush=True)
        if path:
            rows.write(path, settings.rows, extra)
    print(f"{len(settings.rows)} rows in {time.monotonic() - started:.0f} s" + (f", written to {path}" if path else ""))
    return 0


def default_path(stamp: rows.Stamp) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", stamp.device.lower()).strip("-")
    return rows.ROOT / "benchmarks" / "results" / f"layer-{name}-{stamp.date}.json"


def cases(quick: bool, dry: bool, device: torch.device) -> Iterator[Case]:
    """In the order of their worth: what a short budget cuts off comes last."""
    config, backend = (TINY, "eager") if dry else (LLAMA_8B, "inductor")
    l2 = 0 if dry else describe(device)["l2_bytes"]
    short, long, context = (8, 24, 80) if dry else (512, 4096, 4096)
    layer = make_layer(config, device)

    def case(bench: str, batch: int, seq: int, *, train: bool = False, cached: int | None = None, host: bool = False) -> Case:
        where = f"B{batch} KV{cached}" if cached else f"B{batch} S{seq}"
        inputs: list[Inputs] = []

        def given() -> Inputs:
            if not inputs:
                inputs.append(make_inputs(layer, batch, seq, train=train, context=cached))
            return inputs[0]

        flops, moved = demand(layer, batch, seq, cached, train)
        return Case(
            bench, where, implementations(layer, given, backend), lambda: reference(layer, given()), flops, lambda: moved, host
        )

    def operators(batch: int, seq: int, cached: int, train: bool) -> list[Case]:
        return breakdown.cases(config, batch, seq, cached, train, device, l2)

    yield case("layer forward", 1, long)
    yield case("layer decode", 1, 1, cached=context)
    yield case("layer forward+backward", 1, long, train=True)
    yield from operators(1, long, long, False)
    yield case("layer decode, host time of an eager call", 1, 1, cached=context, host=True)
    yield case("layer forward", 1, short)
    yield case("layer forward+backward", 1, short, train=True)
    yield from operators(1, 1, context, False)
    if not quick:
        yield case("layer decode", 16, 1, cached=context)
        yield case("layer forward", 4, long)
        yield case("layer forward+backward", 4, long, train=True)
    yield from operators(1, long, long, True)
    if not quick:
        yield from operators(16, 1, context, False)


def demand(layer: nn.Module, batch: int, seq: int, cached: int | None, train: bool) -> tuple[int, int]:
    """(FLOPs of the maths, bytes that any implementation must move): causal attention, nothing computed or moved twice."""
    config = layer.self_attn.config  # type: ignore[union-attr]
    hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    head_dim, tokens, context = hidden // heads, batch * seq, cached or seq
    weights = sum(p.numel() for p in layer.parameters())
    products = 2 * tokens * sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    attention = 4 * batch * heads * head_dim * (seq * (2 * context - seq + 1) // 2)
    elements = weights + 2 * tokens * hidden
    if cached:
        elements += 2 * batch * context * kv_heads * head_dim
    if train:  # weights again, their gradients, and the gradients of result and input
        elements += 2 * weights + 2 * tokens * hidden
    return (products * 3 + attention * 7 // 2 if train else products + attention), 2 * elements

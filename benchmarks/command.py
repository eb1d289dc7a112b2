"""How a benchmark of one operator runs: `python -m benchmarks attention` and `moe`, modules with groups, choices, cases,
COMPILED and summary."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from fusedblock.metering.device import describe, measure_ceilings
from fusedblock.metering.timing import CpuTimer, default_timer

from . import ahead, rows
from .engine import Candidate, Case, Settings, reason, run
from .rows import Row

G = TypeVar("G")


def add_arguments(parser: argparse.ArgumentParser, bench: str, quick: str, budget: float, seconds: float) -> None:
    parser.add_argument("--json", metavar="FILE", help=f"result file (default: benchmarks/results/{bench}-GPU-DATE.json)")
    parser.add_argument("--choices", action="store_true", help="what fusedblock chooses between instead of what it is beside")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--only", metavar="REGEX", default="", help="cases whose 'bench: case' matches")
    parser.add_argument("--budget", metavar="SECONDS", type=float, default=budget, help=f"no new work after this ({budget:.0f})")
    parser.add_argument("--seconds", metavar="N", type=float, default=seconds, help=f"for the samples of one case ({seconds})")
    parser.add_argument("--dry", action="store_true", help="the whole flow on the CPU at tiny sizes; its times mean nothing")


def main(args: argparse.Namespace, of: Any) -> int:
    """of: the benchmark's module."""
    bench, started = of.__name__.rpartition(".")[2], time.monotonic()
    if not args.dry and not torch.cuda.is_available():
        print(f"benchmarks {bench}: torch sees no GPU here, and a CPU's times would say nothing; --dry runs the flow",
              file=sys.stderr)  # fmt: skip
        return 2
    device = torch.device("cpu" if args.dry else "cuda")
    stamp = rows.Stamp.now(str(device))
    settings = Settings(
        stamp, device,
        seconds=args.seconds, rounds=3 if args.dry else 15 if args.quick else 20,
        deadline=started + args.budget, timer=CpuTimer if args.dry else default_timer,
        log=lambda line: print(line, file=sys.stderr, flush=True),
    )  # fmt: skip
    extra: dict[str, Any] = {
        "machine": describe(device), "ceilings": None if args.dry else dataclasses.asdict(measure_ceilings(device)),
    }  # fmt: skip
    name = f"{'' if bench == 'attention' else bench + '-'}choices" if args.choices else bench
    path = args.json or (None if args.dry else rows.default_path(name, stamp))
    listed = [group for group in (of.choices if args.choices else of.groups)(args.dry) if group.quick or not args.quick]
    work = selected(of, listed, args.only, args.dry, device)
    broken: dict[tuple[str, str, str], str] = {}
    if not args.dry:
        wanted = list(dict.fromkeys(group.name for group, _ in work if group.ahead))
        extra["compiled_ahead"], broken = ahead.compile_all(bench, wanted, args.budget / 3, settings.log, args.choices)
    for _, case in work:
        made = guarded(case, settings, broken)
        print(rows.text(made), end="\n\n", flush=True)
        if path:
            rows.write(path, settings.rows, extra)
    extra["seconds"] = round(time.monotonic() - started, 1)
    if not args.choices:
        more, texts = of.summary(settings.rows, args.dry)
        extra |= more
        print(*texts, sep="\n\n")
    if path:
        rows.write(path, settings.rows, extra)
    skipped = sum(row.status.startswith("skipped") for row in settings.rows)
    print(f"{len(settings.rows)} rows in {extra['seconds']:.0f} s" + (f", {skipped} skipped: out of time" if skipped else "")
          + (f", written to {path}" if path else ""))  # fmt: skip
    return 0


def tiny(made: Sequence[G]) -> list[G]:
    """Groups for a CPU, one of several that come to one size."""
    small: list[Any] = [dataclasses.replace(group, problem=group.problem.tiny()) for group in made]  # type: ignore[attr-defined,type-var]
    return list({group.name: group for group in reversed(small)}.values())[::-1]


def selected(of: Any, made: Sequence[G], only: str, dry: bool, device: torch.device) -> list[tuple[G, Case]]:
    """Cases whose "bench: case" matches, each with the group it is of."""
    pattern = re.compile(only)
    return [
        (group, case)
        for group in made
        for case in of.cases(group, dry, device)
        if pattern.search(f"{case.bench}: {case.name}")
    ]


def guarded(case: Case, settings: Settings, broken: dict[tuple[str, str, str], str]) -> list[Row]:
    """broken: (bench, case, implementation) -> what it did in a process of its own that it must not do in this one."""

    def refuse(why: str) -> Candidate:
        raise RuntimeError(why)

    case.implementations = {
        name: partial(refuse, why) if (why := broken.get((case.bench, case.name, name))) else build
        for name, build in case.implementations.items()
    }
    try:
        return run(case, settings)
    except Exception as error:  # a GPU that an implementation has left unusable fails everything after it, too
        why = f"failed: {reason(error)}"
        made = [rows.failed(case.bench, case.name, name, why, settings.stamp, case.model) for name in case.implementations]
        settings.rows += made
        return made

"""One line of a result file, and the file."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedblock.metering.device import describe, versions
from fusedblock.metering.report import table

SCHEMA = "fusedblock.benchmark/1"
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Row:
    """One implementation in one case. Numbers are None where status is not "ok", or where they were not taken.

    ms: median of one call; spread: distance of the quartiles relative to it; method: "graph", "queue" or "host".
    tflops: FLOPs of the case's maths by the time; gbps: bytes that any implementation must move by the time: both have the
    same numerator for every implementation of a case. peak_mib: memory that one call takes beyond weights and inputs.
    host_us: how long one eager call without gradients keeps the CPU, in microseconds: a median. model: a key of MODELS, or "".
    max_rel_error: the largest of norm(out - ref) / norm(ref) over the results. launches: kernels, copies and fills in the CUDA
    graph of one call.
    status: "ok", or why there is no time.
    """

    bench: str
    case: str
    impl: str
    ms: float | None
    tflops: float | None
    gbps: float | None
    peak_mib: float | None
    max_rel_error: float | None
    spread: float | None
    launches: int | None
    method: str | None
    status: str
    device: str
    versions: dict[str, str | None]
    commit: str | None
    date: str
    model: str = "llama"
    host_us: float | None = None


@dataclass(frozen=True)
class Stamp:
    """What all rows of one run share."""

    device: str
    versions: dict[str, str | None]
    commit: str | None
    date: str

    @staticmethod
    def now(device: str) -> Stamp:
        return Stamp(describe(device)["name"], versions(), commit(), time.strftime("%Y-%m-%d"))


def commit() -> str | None:
    """Of the tree that is measured, with "-dirty" if it has changes; None outside a git checkout. FUSEDBLOCK_COMMIT says it where
    a tree is measured away from its history."""
    if said := os.environ.get("FUSEDBLOCK_COMMIT"):
        return said
    try:
        describe = ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
        return subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def failed(bench: str, case: str, impl: str, status: str, stamp: Stamp, model: str) -> Row:
    """A row without numbers."""
    return Row(bench, case, impl, ms=None, tflops=None, gbps=None, peak_mib=None, max_rel_error=None, spread=None, launches=None,
               method=None, status=status, device=stamp.device, versions=stamp.versions, commit=stamp.commit, date=stamp.date,
               model=model)  # fmt: skip


def default_path(command: str, stamp: Stamp) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", stamp.device.lower()).strip("-")
    return ROOT / "benchmarks" / "results" / f"{command}-{name}-{stamp.date}.json"


def write(path: str | os.PathLike[str], rows: Sequence[Row], extra: dict[str, Any]) -> None:
    """The whole file anew: one row a line. Called after each case, so that a run that is cut short leaves what it has."""
    lines = ",\n".join("  " + json.dumps(dataclasses.asdict(row)) for row in rows)
    head = "".join(f"{json.dumps(name)}: {json.dumps(value)},\n " for name, value in {"schema": SCHEMA, **extra}.items())
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{{head}"rows": [\n{lines}\n]}}\n', encoding="utf-8")


def read(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a result file. Raises ValueError if it is of another schema."""
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    if data.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema {data.get('schema')!r}, expected {SCHEMA!r}")
    return [Row(**row) for row in data["rows"]]


def text(rows: Sequence[Row]) -> str:
    """The rows of one case as a table."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    cells = [
        (
            r.impl,
            number(r.ms, ".4f"),
            number(r.spread, ".1%"),
            number(r.tflops, ".1f"),
            number(r.gbps, ".0f"),
            number(r.peak_mib, ".0f"),
            number(r.launches, "d"),
            number(r.host_us, ".0f"),
            number(r.max_rel_error, ".2e"),
            r.method or "-",
            textwrap.shorten(r.status, 60, placeholder=" ..."),
        )
        for r in rows
    ]
    header = ("implementation", "ms", "spread", "TFLOP/s", "GB/s", "peak MiB", "launches", "host us", "max rel error", "method",
              "status")  # fmt: skip
    return table(", ".join(filter(None, (rows[0].model, f"{rows[0].bench}: {rows[0].case}"))), header, cells)

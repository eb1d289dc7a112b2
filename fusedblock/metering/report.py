"""What `measure` found: data that prints itself, goes to JSON and back, and draws itself."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .device import Ceilings
from .timing import Timing

SCHEMA = "fusedblock.report/1"


@dataclass(frozen=True)
class OpRow:
    """All launches of one operator. where: "layers" or "outside" (embedding, last norm, output projection).

    Bytes are compulsory HBM bytes; flops those of the maths, executed_flops with recomputation.
    """

    name: str
    where: str
    launches: int
    read_bytes: int
    written_bytes: int
    flops: int
    executed_flops: int

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.written_bytes

    @property
    def intensity(self) -> float:
        """Executed FLOPs per compulsory byte."""
        return self.executed_flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Side:
    """One implementation. timing: of all layers together, without what is outside them; None where there is no GPU.

    floor_ms: the least time that the layers' launches can take at the measured ceilings, one after another.
    """

    label: str
    rows: tuple[OpRow, ...]
    timing: Timing | None = None
    floor_ms: float | None = None

    def total(self, where: str | None = None) -> OpRow:
        """The sum of the rows, or of those of "layers" or "outside"."""
        rows = [r for r in self.rows if where in (None, r.where)]
        numbers = ("launches", "read_bytes", "written_bytes", "flops", "executed_flops")
        return OpRow("total", where or "all", *(sum(getattr(r, n) for r in rows) for n in numbers))

    @property
    def gbps(self) -> float | None:
        """Compulsory bytes of the layers by their time, in 10**9 bytes a second."""
        return self.total("layers").bytes / self.timing.median_ms / 1e6 if self.timing else None

    @property
    def tflops(self) -> float | None:
        """FLOPs of the layers' maths by their time, in 10**12 a second."""
        return self.total("layers").flops / self.timing.median_ms / 1e9 if self.timing else None

    @property
    def share(self) -> float | None:
        """Of the measured ceiling: floor_ms by the time."""
        return self.floor_ms / self.timing.median_ms if self.timing and self.floor_ms is not None else None


@dataclass(frozen=True)
class Report:
    """Before and after of one workload. `str` is a table; see `to_json`, `from_json`, `plot`.

    subject: what was measured; layers: how many layers the numbers are for (one was measured and multiplied);
    batch, seq: the tokens of a call; context: the keys that a token may attend to, itself included; device, versions: as
    `fusedblock.metering.device` describes them; ceilings: None without a GPU; notes: what a reader must know.
    """

    subject: str
    phase: str
    batch: int
    seq: int
    context: int
    dtype: str
    layers: int
    baseline: str
    before: Side
    after: Side
    device: dict[str, Any]
    versions: dict[str, Any]
    ceilings: Ceilings | None
    date: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return _text(self)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as JSON, also written to path if given. Its "schema" is "fusedblock.report/1"."""
        text = json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=1)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    @staticmethod
    def from_json(source: str | os.PathLike[str]) -> Report:
        """From a file, or from the text that `to_json` returned. Raises ValueError if it is no report of this schema."""
        text = source if isinstance(source, str) and source.lstrip().startswith("{") else Path(source).read_text(encoding="utf-8")
        data = json.loads(text)
        found = data.pop("schema", None) if isinstance(data, dict) else None
        if found != SCHEMA:
            raise ValueError(f"from_json: schema {found!r}, expected {SCHEMA!r}")
        for name in ("before", "after"):
            side = data[name]
            side["rows"] = tuple(OpRow(**row) for row in side["rows"])
            side["timing"] = Timing(**side["timing"]) if side["timing"] else None
            data[name] = Side(**side)
        data["ceilings"] = Ceilings(**data["ceilings"]) if data["ceilings"] else None
        data["notes"] = tuple(data["notes"])
        return Report(**data)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw bytes and launches by operator, before and after, into a PNG file (or what the ending says).

        Raises ModuleNotFoundError, naming the extra, where matplotlib is not installed.
        """
        from .plot import draw

        draw(self, path)


def bytes_text(n: float) -> str:
    """1536000 -> '1.54 MB' (powers of ten)."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.0f} B"


def flops_text(n: float) -> str:
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.0f} FLOP" if n else "-"


_HEADER = ("operator", "launches", "read", "written", "FLOPs", "executed", "FLOP/byte")


def _cells(row: OpRow, name: str) -> tuple[str, ...]:
    return (name, str(row.launches), bytes_text(row.read_bytes), bytes_text(row.written_bytes), flops_text(row.flops),
            flops_text(row.executed_flops), f"{row.intensity:.1f}" if row.executed_flops else "-")  # fmt: skip


def _side_rows(side: Side) -> list[tuple[str, ...]]:
    outside = any(r.where == "outside" for r in side.rows)
    rows = [
        _cells(r, r.name + (" (outside)" if r.where == "outside" else ""))
        for r in sorted(side.rows, key=lambda r: (r.where != "layers", -r.bytes))
    ]
    if outside:
        rows.append(_cells(side.total("layers"), "all layers"))
    return [*rows, _cells(side.total(), "total")]


def _text(report: Report) -> str:
    layers = f"{report.layers} layers" if report.layers != 1 else "1 layer"
    shape = f"batch {report.batch}, {report.seq} tokens, context {report.context}"
    parts = [f"{report.subject}: {report.phase}, {shape}, {report.dtype}, {layers}"]
    for title, side in (("before", report.before), ("after", report.after)):
        parts.append(table(f"{title}: {side.label}", _HEADER, _side_rows(side)))
    before, after = report.before.total(), report.after.total()
    rows = [
        ("launches", str(before.launches), str(after.launches), _ratio(before.launches, after.launches)),
        ("HBM bytes", bytes_text(before.bytes), bytes_text(after.bytes), _ratio(before.bytes, after.bytes)),
        ("FLOPs executed", flops_text(before.executed_flops), flops_text(after.executed_flops),
         _ratio(before.executed_flops, after.executed_flops)),
        ("FLOP/byte", f"{before.intensity:.1f}", f"{after.intensity:.1f}", ""),
    ]  # fmt: skip
    b, a = report.before, report.after
    if b.timing and a.timing:
        rows += [
            ("time of the layers", _ms(b.timing), _ms(a.timing), _ratio(b.timing.median_ms, a.timing.median_ms)),
            ("GB/s", f"{b.gbps:.4g}", f"{a.gbps:.4g}", ""),
            ("TFLOP/s", f"{b.tflops:.3g}", f"{a.tflops:.3g}", ""),
            ("share of the ceiling", f"{b.share or 0:.1%}", f"{a.share or 0:.1%}", ""),
        ]
    parts.append(table("", ("", "before", "after", "before / after"), rows))
    where = report.device.get("name", "?")
    if report.ceilings:
        c = report.ceilings
        where += (f"; ceilings ({c.source}): copy {c.copy_gbps:.0f} GB/s, read {c.read_gbps:.0f} GB/s,"
                  f" matrix product {c.gemm_tflops:.0f} TFLOP/s")  # fmt: skip
    parts.append("\n".join([where, *(f"- {note}" for note in report.notes)]))
    return "\n\n".join(parts)


def _ms(t: Timing) -> str:
    return f"{t.median_ms:.3f} ms ({t.low_ms:.3f}-{t.high_ms:.3f})"


def _ratio(before: float, after: float) -> str:
    return f"{before / after:.2f}x" if after else "-"


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as text, the first column to the left and the others to the right; by rich where it is installed."""
    try:
        import rich.box
        import rich.console
        import rich.table
    except ImportError:
        return _plain_table(title, header, rows)
    made = rich.table.Table(title=title or None, title_justify="left", title_style="", box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(header):
        made.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    out = io.StringIO()
    rich.console.Console(file=out, width=160, color_system=None, markup=False, highlight=False).print(made)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def _plain_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        return "  ".join(cells).rstrip()

    return "\n".join([*([title] if title else []), line(header), "  ".join("-" * w for w in widths), *map(line, rows)])

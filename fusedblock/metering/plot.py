"""A report as a picture: bytes and launches by operator, before and after."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fusedblock.extras import install

if TYPE_CHECKING:
    from .report import Report

_COLORS = {"before": "#8c8c8c", "after": "#1f77b4"}


def draw(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the picture to path; its ending decides the format. Raises ModuleNotFoundError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"plot needs matplotlib, which is not installed here: pip install matplotlib, or {install('demo')}"
        ) from error
    from .report import bytes_text

    sides = {"before": report.before, "after": report.after}
    names: dict[str, None] = {}
    for side in sides.values():
        names.update(dict.fromkeys(r.name for r in sorted(side.rows, key=lambda r: -r.bytes)))
    labels = ["total", *names]
    figure = Figure(figsize=(11, 0.8 + 0.34 * len(labels)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, measure, title in ((panels[0], "bytes", "HBM bytes (GB)"), (panels[1], "launches", "launches")):
        for shift, (name, side) in zip((-0.2, 0.2), sides.items()):
            values = [getattr(side.total(), measure)]
            values += [sum(getattr(r, measure) for r in side.rows if r.name == label) for label in names]
            scale = 1e-9 if measure == "bytes" else 1
            heights = [v * scale for v in values]
            bars = axes.barh(
                [i + shift for i in range(len(labels))], heights, 0.38, color=_COLORS[name], label=f"{name}: {side.label}"
            )
            texts = [(bytes_text(v) if measure == "bytes" else str(v)) if v else "" for v in values]
            axes.bar_label(bars, texts, padding=2, fontsize=7)
        axes.set_xlabel(title)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.15)
    panels[0].set_yticks(range(len(labels)), labels, fontsize=8)
    panels[0].invert_yaxis()
    panels[1].legend(loc="lower right", fontsize=8, frameon=False)
    figure.suptitle(
        f"{report.subject}: {report.phase}, batch {report.batch}, {report.seq} tokens, context {report.context}, {report.dtype}",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)

"""`fusedblock explain`: which layers fuse, and the launches of each kind of layer, for any workload and GPU."""

from __future__ import annotations

import torch

import fusedblock
from fusedblock.kernels._target import TARGETS, override, target_of

from . import presets


def text(model: str, *, batch: int = 1, seq: int | None = None, context: int = 2048, phase: str | None = None,
         target: str | None = None, dtype: torch.dtype | None = None) -> str:  # fmt: skip
    """What fuse does with the layers of `model`, a preset or a directory, and what fusedblock.explain says of the workload.

    No model is loaded whose attention implementation could be followed: "fusedblock" is assumed, and the text says so.

    target: a key of TARGETS; None: the GPU here, an H200 if there is none. Raises ValueError naming the argument.
    """
    if target is not None and target not in TARGETS:
        raise ValueError(f"target {target!r}, expected one of {', '.join(TARGETS)}")
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = presets.on_meta(presets.config_of(model), dtype)
    with override(TARGETS[target] if target else target_of(here)):  # the weights are on no device
        report = fusedblock.fuse(module)
        module.set_attn_implementation("fusedblock")
        explanation = fusedblock.explain(module, batch=batch, seq=seq, context=context, phase=phase)
    head = [
        f"{presets.title(model, module)}: {report.counts}",
        "as under attn_implementation='fusedblock'; fusedblock.explain(model) follows that of a loaded model",
    ]
    if target is None and here.type == "cpu":
        head.append(f"no GPU here: as for {target_of(here).name}")
    return "\n".join([*head, "", str(explanation)])

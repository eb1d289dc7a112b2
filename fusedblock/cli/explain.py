"""`fusedblock explain`: which layers fuse, and the launches of one, for any workload and GPU."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

import fusedblock
from fusedblock import blocks
from fusedblock.kernels._target import TARGETS, Target, override, target_of
from fusedblock.models import adapter
from fusedblock.models.table import SPECS, known_class

from . import presets


def text(model: str, *, batch: int = 1, seq: int | None = None, context: int = 2048, phase: str | None = None,
         target: str | None = None, dtype: torch.dtype | None = None) -> str:  # fmt: skip
    """What fuse does with the layers of `model`, a preset or a directory, and the plan of one layer for each phase.

    phase: "prefill", "decode", "train" or None for all three. seq: tokens of a call; None: context, in decode 1. target: a
    key of TARGETS; None: the GPU here, an H200 if there is none. Raises ValueError naming the argument.
    """
    if target is not None and target not in TARGETS:
        raise ValueError(f"target {target!r}, expected one of {', '.join(TARGETS)}")
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = TARGETS[target] if target else target_of(here)
    module = presets.on_meta(presets.config_of(model), dtype)
    lines = []
    with override(gpu) if target else contextlib.nullcontext():
        report = fusedblock.fuse(module)
    lines.append(str(report).rpartition("\n")[0])  # the last line counts calls, and there were none
    layer = next((layer for layer in module.modules() if known_class(type(layer)) is not None), None)
    if report.fused == 0 or layer is None:
        return "\n".join(lines)
    spec = _block_spec(layer)
    weight_dtype = next(layer.parameters()).dtype
    for name in [phase] if phase else ["prefill", "decode", "train"]:
        tokens = seq or (1 if name == "decode" else context)
        if tokens > context or (name == "train" and tokens != context):
            limit = "the same" if name == "train" else "at most that"
            raise ValueError(f"seq {tokens} with context {context}: {name} expects {limit}")
        plan = blocks.plan(
            spec, batch=batch, seq=tokens, context=context, dtype=weight_dtype, training=name == "train", target=gpu
        )
        shape = f"batch {batch}, {tokens} tokens, context {context}, {str(weight_dtype).removeprefix('torch.')}"
        lines.append(f"\n{name}: {shape}: {plan.kernels} launches a layer's forward on {_name(gpu)}")
        lines += ["  " + line for line in str(plan).splitlines()]
    return "\n".join(lines)


def _block_spec(layer: Any) -> blocks.BlockSpec:
    known = known_class(type(layer))
    assert known is not None
    binding = adapter.bind(layer, SPECS[known.__name__])
    if isinstance(binding, str):
        raise ValueError(binding)
    return binding.spec


def _name(target: Target) -> str:
    return next((name for name, known in TARGETS.items() if known == target), f"sm_{target.arch}")

"""The launches of a layer, chosen by a pure function.

The layer executes the plan, `explain` prints it and `measure` costs what it launches: there is no second description.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from fusedblock.ops import DECODE_ROWS, Target

# Up to this many rows the second norm rides on its neighbours' epilogues. Beyond, its own launch is cheaper: at 4096 rows of an
# 8B layer it takes 19 us on an H200, the statistics in the epilogues 90 us (2026-11-29).
STATISTICS_ROWS = 64


@dataclass(frozen=True)
class BlockSpec:
    """Sizes and numerics of a pre-norm decoder layer with RMSNorm, rotary attention and a gated MLP. No tensors, no model names.

    hidden, ffn: widths; heads, kv_heads, head_dim: attention; scale: of the logits; eps: of both norms; activation: "silu",
    "gelu" or "gelu_tanh"; weight_offset and round_early: see fusedblock.ops.rms_norm.
    """

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    eps: float
    activation: str = "silu"
    weight_offset: float = 0.0
    round_early: bool = True


@dataclass(frozen=True)
class Launch:
    """One step of a layer: the registered op, its part in the layer, what runs it, and why it was chosen."""

    op: str
    role: str
    engine: str
    why: str
    kernels: int = 1  # GPU launches it makes


@dataclass(frozen=True)
class Plan:
    launches: tuple[Launch, ...]
    row_statistics: bool  # the second norm rides on its neighbours' epilogues
    decode: bool  # split-KV attention

    @property
    def kernels(self) -> int:
        """GPU launches of one forward."""
        return sum(step.kernels for step in self.launches)

    def __str__(self) -> str:
        width = max(len(step.role) for step in self.launches)
        return "\n".join(f"{s.role:{width}}  {s.op:16} {s.engine:6}  {s.why}" for s in self.launches)


@functools.lru_cache(maxsize=4096)
def plan(
    spec: BlockSpec, *, batch: int, seq: int, context: int, dtype: torch.dtype, training: bool, target: Target,
    masked: bool = False,
) -> Plan:  # fmt: skip
    """What one layer launches for x `batch seq hidden` over `context` keys.

    training: gradients are wanted. masked: an explicit mask comes with the call. Pure: equal arguments give an equal plan.
    """
    decode = not training and seq * (spec.heads // spec.kv_heads) <= DECODE_ROWS
    # Why the second norm is a launch of its own; None where it is not. fp16: out * norm_weight has no bounded range.
    apart = (
        "training keeps the normalised rows for the weight gradients" if training
        else "fp16 range" if dtype is torch.float16
        else "weight offset" if spec.weight_offset
        else f"more than {STATISTICS_ROWS} rows" if batch * seq > STATISTICS_ROWS
        else None
    )  # fmt: skip
    statistics = apart is None
    rows = "one row a program, statistics in fp32"
    if decode:
        why = f"{seq} queries a sequence: keys split over the GPU, heads of a group packed, the parts joined by a second launch"
        attention = Launch("decode_attention", "attention", "triton", why, kernels=2)
    else:
        why = "tiles of queries, the logits never leave the SM" + (", mask read by tile" if masked else "")
        attention = Launch("attention", "attention", "triton", why)
    sums = "; leaves the second norm's row sums" if statistics else ""
    scale = "the norm is a row scale in its epilogue; " if statistics else ""
    norm = Launch("norm", "post-attention norm", "triton", f"{rows} (not in an epilogue: {apart})")
    launches = (
        Launch("norm", "input norm", "triton", rows),
        Launch("qkv_rope", "q, k, v", "triton", "three projections and rotary embedding, no packed weight copy"),
        attention,
        Launch("linear", "attention output", "triton", "adds the residual" + sums),
        *([] if statistics else [norm]),
        Launch("gated_mlp", "gate and up", "triton", scale + "both products and the activation"),
        Launch("linear", "down", "triton", "adds the residual"),
    )
    return Plan(launches, statistics, decode)

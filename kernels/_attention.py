"""What the attention kernels share: tile loads, masking, argument checks."""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ._lang import tl, triton
from ._launch import contiguous_last, tma_ready
from ._spec import Args, ShapeError, Sizes, accumulate_dtype
from ._target import Target

QKV = {
    "q": "batch seq heads head_dim",
    "k": "batch context kv_heads head_dim",
    "v": "batch context kv_heads head_dim",
    "mask": "1|batch 1|heads 1|seq context",
}
LOG2E = 1.4426950408889634
# An additive mask at or below this means "not attended". HF writes finfo.min, which in the base-2 units of the kernels
# (times log2(e)) is beyond fp32.
MASKED = -2.0e38


def check(name: str, sizes: Sizes, args: Args) -> dict[str, int]:
    """Everything about attention arguments that their axes alone do not say."""
    heads, kv_heads, head_dim = sizes["heads"], sizes["kv_heads"], sizes["head_dim"]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{name}: heads={heads} of q is not a multiple of kv_heads={kv_heads} of k and v")
    if not 16 <= head_dim <= 256 or head_dim % 8:
        raise ValueError(f"{name}: head_dim={head_dim} of q, k and v, expected a multiple of 8 from 16 to 256")
    scale = args["scale"]
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"{name}: scale={scale}, expected a positive finite number")
    mask = args["mask"]
    if mask is not None and mask.dtype is not torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name}: mask has dtype {mask.dtype}, expected torch.bool or a floating dtype")
    return {"group": heads // kv_heads}


def normalise_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A mask in any of the accepted forms as a view "1|batch 1|heads 1|seq context", which is what the kernels take.

    mask: None; bool "1|batch context" (True: the key may be attended, i.e. padding is False); or four axes
    "1|batch 1|heads 1|seq 1|context", bool (True: attend) or floating (added to the scaled logits).
    q "batch seq heads head_dim", k "batch context kv_heads head_dim". Raises ShapeError or ValueError naming the mask.
    """
    if mask is None:
        return None
    batch, seq, heads = q.shape[:3]
    context = k.shape[1]
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise ValueError(f"attention: mask has dtype {mask.dtype}, expected torch.bool or a floating dtype")
    if mask.device != q.device:
        raise ValueError(f"attention: mask is on {mask.device}, but q is on {q.device}")
    if mask.ndim == 2:
        if mask.dtype is not torch.bool:
            raise ValueError(f"attention: a mask of two axes (batch context) must be torch.bool, got {mask.dtype}")
        mask = rearrange(mask, "batch context -> batch 1 1 context")
    if mask.ndim != 4:
        raise ShapeError(
            f"attention: mask has shape {tuple(mask.shape)}, expected (batch context) or (1|batch 1|heads 1|seq context)"
        )
    for axis, got, want in zip(("batch", "heads", "seq", "context"), mask.shape, (batch, heads, seq, context)):
        if got not in (1, want):
            raise ShapeError(f"attention: mask of shape {tuple(mask.shape)} has {axis}={got}, but q and k have {axis}={want}")
    return mask.expand(-1, -1, -1, context)


def allowed_pairs(seq: int, context: int, causal: bool) -> int:
    """(query, key) pairs of one head that causal, aligned bottom-right, leaves."""
    n = min(seq, context)
    return n * (2 * context - n + 1) // 2 if causal else seq * context


def mask_facts(mask: Tensor | None) -> tuple[Any, tuple[int, ...], dict[str, Any]]:
    """(kernel argument, its strides over batch, heads, seq, context, constexprs). Axes of size 1 get stride 0."""
    if mask is None:
        return None, (0, 0, 0, 0), {"MASK": 0, "PER_ROW": False}
    strides = tuple(s if n > 1 else 0 for n, s in zip(mask.shape, mask.stride()))
    kind = 1 if mask.dtype is torch.bool else 2
    return mask.view(torch.uint8) if kind == 1 else mask, strides, {"MASK": kind, "PER_ROW": strides[2] != 0}


def kind_of(target: Target) -> str:
    """The column of the config tables: by shared memory, since that bounds the tiles."""
    if target.backend == "hip" or target.smem_bytes < 160 * 1024:
        return "small"
    return "hopper" if target.tma else "ampere"


def numerics(scale: float, dtype: torch.dtype, target: Target) -> dict[str, Any]:
    """Constexprs: accumulator, precision of fp32 products, scale.

    fp32 products on NVIDIA are three TF32 ones, which keep fp32's accuracy on the tensor cores; plain fp32 ones run without
    them, unrolled, and spill kilobytes. A run-time float is fp32 in a kernel: fp64 kernels, which only gradcheck runs, take
    the scale as a constexpr instead.
    """
    double = dtype is torch.float64
    return {
        "ACC": tl.float64 if double else tl.float32,
        "PRECISION": "tf32x3" if target.backend == "cuda" else "ieee",
        "EXACT_SCALE": scale if double else None,
    }


def dense_rows(*tensors: Tensor) -> list[Tensor]:
    """Copies of tensors whose last axis is not dense, or whose rows lie so far apart that offsets in a tile need 64 bits."""
    return [t.contiguous() if t.stride(1) >= 2**23 else contiguous_last(t) for t in tensors]


def uses_tma(target: Target, *tensors: Tensor) -> bool:
    return target.tma and tma_ready(*tensors)


def row_strides(t: Tensor, tma: bool) -> tuple[int, int, int]:
    """Strides over batch, rows, heads; zeros beside a descriptor, which holds them (so that they make no new variant)."""
    return (0, 0, 0) if tma else tuple(t.stride()[:3])  # type: ignore[return-value]


def by_head(t: Tensor) -> Tensor:
    return rearrange(t, "batch rows heads head_dim -> batch heads rows head_dim")


def reference_logits(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor | None]:
    """For the references: masked logits "batch kv_heads group seq context", and which values a padding mask hides, broadcastable
    to "batch kv_heads group context head_dim" (None: none)."""
    acc = accumulate_dtype(q.dtype)
    kv_heads, seq, context = k.shape[2], q.shape[1], k.shape[1]
    rows = rearrange(q.to(acc), "batch seq (kv_heads group) head_dim -> batch kv_heads group seq head_dim", kv_heads=kv_heads)
    keys = rearrange(k.to(acc), "batch context kv_heads head_dim -> batch kv_heads 1 head_dim context")
    logits = torch.matmul(rows, keys) * scale
    hidden = None
    if mask is not None:
        outer = {"outer": kv_heads if mask.shape[1] > 1 else 1}
        mask = rearrange(mask, "batch (outer group) seq context -> batch outer group seq context", **outer)
        if mask.dtype is torch.bool:
            out = ~mask
        else:
            out = ~(mask.to(acc) > MASKED)
            logits = logits + mask.to(acc).masked_fill(out, 0)
        logits = logits.masked_fill(out, float("-inf"))
        if seq and (mask.shape[3] == 1 or mask.stride(3) == 0):
            hidden = rearrange(out[:, :, :, :1], "batch outer group 1 context -> batch outer group context 1")
    if causal:
        allowed = torch.ones(seq, context, dtype=torch.bool, device=q.device).tril(context - seq)
        logits = logits.masked_fill(~allowed, float("-inf"))
    return logits, hidden


@triton.jit
def load_rows(
    x, b, h, row, LIMIT, stride_b, stride_row, stride_h,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TMA: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """[ROWS, DP] of x from `row` on, of one batch entry and head. Zero past head_dim and, with TMA or CHECK, past LIMIT rows."""
    if TMA:
        return x.load([b, h, row, 0]).reshape(ROWS, DP)
    else:
        r = tl.arange(0, ROWS)
        d = tl.arange(0, DP)
        at = x + (b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + tl.cast(row, tl.int64) * stride_row)
        at = at + (r[:, None] * stride_row + d[None, :])  # 32 bits: dense_rows sees to it
        if CHECK and D < DP:
            return tl.load(at, mask=(row + r < LIMIT)[:, None] & (d < D)[None, :], other=0.0)
        elif CHECK:
            return tl.load(at, mask=(row + r < LIMIT)[:, None], other=0.0)
        elif D < DP:
            return tl.load(at, mask=(d < D)[None, :], other=0.0)
        else:
            return tl.load(at)


@triton.jit
def apply_mask(s, mask, row, col, SEQ, CONTEXT, stride_row, stride_col, MASK: tl.constexpr, PER_ROW: tl.constexpr):
    """Logits s with mask 1 (bool) or 2 (additive: s in base-2 units) applied; row and col broadcast to s in either order."""
    if PER_ROW:
        at = mask + row.to(tl.int64) * stride_row + col.to(tl.int64) * stride_col
        m = tl.load(at, mask=(row < SEQ) & (col < CONTEXT), other=0)
    else:
        m = tl.load(mask + col.to(tl.int64) * stride_col, mask=col < CONTEXT, other=0)
    if MASK == 1:
        return tl.where(m != 0, s, float("-inf"))
    else:
        a = m.to(s.dtype)
        return tl.where(a > -2.0e38, s + a * 1.4426950408889634, float("-inf"))


@triton.jit
def attended(mask, col, CONTEXT, stride_col, MASK: tl.constexpr):
    """Of a mask that is the same for every row: which keys are attended at all."""
    m = tl.load(mask + col.to(tl.int64) * stride_col, mask=col < CONTEXT, other=0)
    if MASK == 1:
        return m != 0
    else:
        return m > -2.0e38

"""New keys and values into a cache of fixed slots, and its length advanced: one launch for what torch does in five.

    keys[:, :, length + i] = k[:, i],   values[:, :, length + i] = v[:, i],   length += seq

    k, v          batch seq kv_heads head_dim
    keys, values  batch kv_heads slots head_dim          written in place
    length        (), int64, on the device               read and written by one program alone, so that no other sees it change

Tokens past the last slot are not written; the last value slot becomes NaN instead, and so does what attends to it: torch's own
update stops the device there, which this cannot ask for without a wait.

For a few tokens (fits): one program copies them all. HBM, in elements: reads k, v and length, writes as much.
"""

from __future__ import annotations

from torch import Tensor

from ._lang import next_power_of_2, tl, triton
from ._launch import contiguous_last, on_device
from ._launch import launch as _launch

MOST = 1 << 15  # elements of k that one program copies


def fits(elements: int) -> bool:
    """Whether `store` is for a k of so many elements."""
    return 0 < elements <= MOST


@triton.jit(do_not_specialize=["ROWS", "SEQ"])
def _kernel(
    k, v, keys, values, length, ROWS, SEQ, KV_HEADS, SLOTS, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    to_kb, to_kh, to_ks, to_vb, to_vh, to_vs, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # An atomic of one program: every thread gets the old length, and only then is it replaced.
    start = tl.atomic_add(length, tl.cast(SEQ, tl.int64), sem="relaxed")
    d = tl.arange(0, DP)[None, :]
    for first in range(0, ROWS, BLOCK):
        row = (first + tl.arange(0, BLOCK)).to(tl.int64)
        b, s, h = row // (SEQ * KV_HEADS), row // KV_HEADS % SEQ, row % KV_HEADS
        slot = start + s
        ok = ((row < ROWS) & (slot >= 0) & (slot < SLOTS))[:, None] & (d < D)
        a = tl.load(k + (b * stride_kb + s * stride_ks + h * stride_kh)[:, None] + d, ok, other=0.0)
        c = tl.load(v + (b * stride_vb + s * stride_vs + h * stride_vh)[:, None] + d, ok, other=0.0)
        tl.store(keys + (b * to_kb + h * to_kh + slot * to_ks)[:, None] + d, a, ok)
        tl.store(values + (b * to_vb + h * to_vh + slot * to_vs)[:, None] + d, c, ok)
        full = ((row < ROWS) & (start + SEQ > SLOTS))[:, None] & (d < D)
        nan = tl.full([BLOCK, DP], float("nan"), values.dtype.element_ty)
        tl.store(values + (b * to_vb + h * to_vh + (SLOTS - 1) * to_vs)[:, None] + d, nan, full)


def store(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, length: Tensor) -> None:
    """In place, as above."""
    batch, seq, kv_heads, head_dim = k.shape
    k, v = contiguous_last(k), contiguous_last(v)
    rows = batch * seq * kv_heads
    with on_device(k):
        _launch(
            _kernel, (1,),
            (k, v, keys, values, length, rows, seq, kv_heads, keys.shape[2], *k.stride()[:3], *v.stride()[:3],
             *keys.stride()[:3], *values.stride()[:3]),
            {"D": head_dim, "DP": next_power_of_2(head_dim), "BLOCK": 16, "num_warps": 8},
        )  # fmt: skip

"""What attention_hopper_backward.py launches around its products: statistics of the rows before, grad_q and grad_sinks after.

TILES: of 64 queries, of one batch entry and head; with a schedule (_attention_tiles.py) those of all sequences. A tile of a
sequence that cannot be has segment -1, and what is made of it is NaN.
"""

from __future__ import annotations

from ._attention_tiles import planned
from ._lang import tl, triton


@triton.jit
def _place(schedule, slot, SEQ):
    """(segment, first row, rows from there to the end) of a tile of queries."""
    if schedule is None:
        return 0, slot * 64, SEQ - slot * 64
    else:
        segment, tile, first, rows, _, _ = planned(schedule, slot)
        return segment, first + tile * 64, rows - tile * 64


@triton.jit
def _prepare_kernel(
    out, grad_out, lse, stats, sums, schedule, SEQ, HEADS, TILES,
    stride_ob, stride_os, stride_oh, stride_gb, stride_gs, stride_gh, D: tl.constexpr, BLANK: tl.constexpr,
):  # fmt: skip
    """stats: per tile of 64 queries their lse in base 2, +inf past the end, then their delta. BLANK: rows may see nothing."""
    pid = tl.program_id(0).to(tl.int64)
    bh = pid // TILES
    segment, first, left = _place(schedule, pid - bh * TILES, SEQ)
    i = tl.arange(0, 64)
    rows = first + i
    b = bh // HEADS
    h = bh - b * HEADS
    d = tl.arange(0, D)
    inside = i < left
    o = tl.load(out + b * stride_ob + h * stride_oh + rows[:, None] * stride_os + d[None, :], inside[:, None], other=0.0)
    g = tl.load(grad_out + b * stride_gb + h * stride_gh + rows[:, None] * stride_gs + d[None, :], inside[:, None], other=0.0)
    shift = tl.load(lse + bh * SEQ + rows, inside, other=float("inf")) * 1.4426950408889634
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    if BLANK:
        nothing = shift == float("-inf")
        shift = tl.where(nothing, float("inf"), shift)
        delta = tl.where(nothing, 0.0, delta)
    if schedule is not None:
        shift = tl.where(segment < 0, float("nan"), shift)
    tl.store(stats + pid * 128 + i, shift)
    tl.store(stats + pid * 128 + 64 + i, delta)
    tl.store(sums + pid * 64 * D + i[:, None] * D + d[None, :], tl.zeros([64, D], tl.float32))


@triton.jit
def _finish_kernel(sums, grad_q, schedule, scale, SEQ, HEADS, TILES, D: tl.constexpr):
    """grad_q "batch seq heads head_dim" of the tiles in register order: [half, column / 8, warp, row % 8, column / 2 % 4, row / 8
    % 2, column % 2]."""
    pid = tl.program_id(0).to(tl.int64)
    bh = pid // TILES
    segment, first, left = _place(schedule, pid - bh * TILES, SEQ)
    i = tl.arange(0, 64)
    b = bh // HEADS
    if schedule is not None:
        scale = tl.where(segment < 0, float("nan"), scale)
    x = tl.load(sums + pid * 64 * D + tl.arange(0, 64 * D)) * scale
    x = x.reshape([2, D // 16, 4, 8, 4, 2, 2])
    x = tl.permute(x, (2, 5, 3, 0, 1, 4, 6)).reshape([64, D])
    at = ((b * SEQ + first + i) * HEADS + (bh - b * HEADS))[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(grad_q + at, x.to(grad_q.dtype.element_ty), (i < left)[:, None])


@triton.jit
def _sinks_kernel(stats, sinks, grad_sinks, BATCH, HEADS, TILES, N: tl.constexpr):
    """-sum(exp(sink - lse) * delta) of one head, N tiles at a time."""
    h = tl.program_id(0)
    sink = tl.load(sinks + h).to(tl.float32) * 1.4426950408889634
    total = tl.zeros([N, 64], tl.float32)
    per = tl.cdiv(TILES, N)
    for i in tl.range(0, BATCH * per):
        tile = i % per * N + tl.arange(0, N)
        at = ((i // per * HEADS + h).to(tl.int64) * TILES + tile)[:, None] * 128 + tl.arange(0, 64)[None, :]
        shift = tl.load(stats + at, (tile < TILES)[:, None], other=float("inf"))
        total -= tl.math.exp2(sink - shift) * tl.load(stats + at + 64, (tile < TILES)[:, None], other=0.0)
    tl.store(grad_sinks + h, tl.sum(tl.sum(total, 1), 0).to(grad_sinks.dtype.element_ty))

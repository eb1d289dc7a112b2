"""Parts of attention_hopper_backward.py that synchronise nothing: the walk over tiles, masks, and what is launched around the
products: statistics of the rows before, grad_q and grad_sinks after.

TILES: of 64 queries, of one batch entry and head; with a schedule (_attention_tiles.py) those of all sequences. A tile of a
sequence that cannot be has segment -1, and what is made of it is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

from ._attention_tiles import COLUMNS, planned, schedule_slots
from ._gluon import gl, gluon
from ._lang import cdiv, tl, triton

ROWS = 64  # queries of a tile, and keys of a consumer


def buffer_axes(sizes: Mapping[str, int], packed: bool) -> dict[str, int]:
    """The axes of what lives from launch to launch; of sizes: batch, heads, seq, k_len, head_dim and sequences.

    stats_numbers: lse and delta of the rows of every tile; sums_rows, sums_columns: grad_q in fp32, in the order of registers;
    q_slots, k_slots, columns: tables of tiles of packed sequences."""
    seq, head_dim = sizes["seq"], sizes["head_dim"]
    tiles = cdiv(seq, ROWS)
    found = {}
    if packed:
        tiles = schedule_slots(seq, sizes["sequences"], ROWS)
        keys = ROWS if head_dim == 256 else 2 * ROWS
        found = {"q_slots": tiles, "k_slots": schedule_slots(sizes["k_len"], sizes["sequences"], keys), "columns": COLUMNS}
    every = sizes["batch"] * sizes["heads"] * tiles
    return {**found, "stats_numbers": every * 2 * ROWS, "sums_rows": every * ROWS * head_dim // 256, "sums_columns": 256}


@gluon.jit
def walk(m, h, first, end, WALL: gl.constexpr):
    """The query tile and head, counted over the batch, after (m, h). A walk starts at `first` without a bound (WALL) too: so
    programs of one head do not add to the same rows at once."""
    m += 1
    m = gl.where(m == end, first if WALL else 0, m)
    h = gl.where(m == first, h + 1, h)
    return m, h


@gluon.jit
def bounds(seq, context, key, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """(low, high, limit): of the keys from `key` on, query 0 sees number low to high, of those up to limit that there are. With
    causal those past the end do not matter: no query of the sequence sees them."""
    limit = context - 1 - key
    high = context - seq - key
    low = high
    if LEFT:
        low = high - left
    if RIGHT == 2:
        high += right
    return low, high, limit


@gluon.jit
def at_edge(low, high, limit, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Whether one of 64 queries may not see one of 64 keys. Query i sees keys j with low <= j - i <= high and j <= limit."""
    found = (high if RIGHT else limit) < 63
    if RIGHT == 2:
        found = found | (limit < 63)
    if LEFT:
        found = found | (low > -63)
    return found


@gluon.jit
def masked(x, low, high, limit, value, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """x "key query" where the query sees the key, or value. Cut into axes of threads and axes of registers, so that a thread
    keeps one number in a register and compares with constants: with more, ptxas spills in the loop."""
    layout: gl.constexpr = x.type.layout
    N: gl.constexpr = x.shape[1]
    y = x.reshape([4, 2, 8, N // 8, 4, 2])
    key: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, gl.SliceLayout(5, y.type.layout)))
    query: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, y.type.layout)))
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, key)))[:, None, None]
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, key)))[None, :, None]
    eighth = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, key)))[None, None, :]
    thread = (warp * 16 + eighth)[:, :, :, None, None, None]
    register = (half * 8)[:, :, :, None, None, None]
    if RIGHT != 1:
        y = gl.where(register <= limit - thread, y, value)
    if LEFT or RIGHT:
        eight = gl.arange(0, N // 8, gl.SliceLayout(1, gl.SliceLayout(2, query)))[:, None, None]
        pair = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, query)))[None, :, None]
        one = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, query)))[None, None, :]
        thread = thread - (pair * 2)[None, None, None, :, :, :]
        register = register - (eight * 8 + one)[None, None, None, :, :, :]
    if RIGHT:
        y = gl.where(register <= high - thread, y, value)
    if LEFT:
        y = gl.where(register >= low - thread, y, value)
    return gl.convert_layout(y.reshape([64, N]), layout)


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

"""Parts of the Hopper attention that synchronise nothing: tanh, which both directions use, a view that both forwards sum by, of
attention_hopper.py its mask, stages and pieces, and of attention_hopper_backward.py the walk over tiles, masks, and what is
launched around the products: statistics of the rows before, grad_q and grad_sinks after.

TILES: of 64 queries, of one batch entry and head; with a schedule (_attention_tiles.py) those of all sequences. A tile of a
sequence that cannot be has segment -1, and what is made of it is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

from ._attention_tiles import COLUMNS, planned, schedule_slots
from ._gluon import add_four, gl, gluon, reciprocal, warpgroup_mma_wait
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
        keys = keys_of(head_dim)
        found = {"q_slots": tiles, "k_slots": schedule_slots(sizes["k_len"], sizes["sequences"], keys), "columns": COLUMNS}
    every = sizes["batch"] * sizes["heads"] * tiles
    return {**found, "stats_numbers": every * 2 * ROWS, "sums_rows": every * ROWS * head_dim // 256, "sums_columns": 256}


def keys_of(head_dim: int) -> int:
    """Keys of a tile."""
    return ROWS if head_dim > 128 else 2 * ROWS


@gluon.jit
def by_thread(x):
    """x [64, N] as [64, 4, N / 4], so that the last axis is one thread's: the four threads of a row meet once per tile."""
    N: gl.constexpr = x.shape[1]
    return x.reshape([64, N // 8, 4, 2]).permute([0, 2, 1, 3]).reshape([64, 4, N // 4])


@gluon.jit
def first_half(x):
    """The columns of x [64, N] to N / 2."""
    half, _ = x.reshape([64, 2, x.shape[1] // 2]).permute([0, 2, 1]).split()
    return half


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    stage += 1
    phase = gl.where(stage == STAGES, phase ^ 1, phase)
    stage = gl.where(stage == STAGES, 0, stage)
    return stage, phase


@gluon.jit
def masked_rows(s, row, n, context, low, high, BN: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Logits of rows from `row` on and of block n of keys, -inf where a row does not see the key."""
    layout: gl.constexpr = s.type.layout
    cols = n * BN + gl.arange(0, BN, gl.SliceLayout(0, layout))
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    if RIGHT:
        s = gl.where(cols[None, :] <= (rows + high)[:, None], s, float("-inf"))
    if RIGHT != 1:
        s = gl.where(cols[None, :] < context, s, float("-inf"))
    if LEFT:
        s = gl.where(cols[None, :] >= (rows + low)[:, None], s, float("-inf"))
    return s


@gluon.jit
def pieces_of(acc, PARTS: gl.constexpr):
    """The columns of acc in so many tiles, 1 or 2."""
    if PARTS == 1:
        pieces = (acc,)
    else:
        pieces = acc.reshape([64, 2, acc.shape[1] // 2]).permute([0, 2, 1]).split()
    return pieces


@gluon.jit
def walk(m, h, first, end, WALL: gl.constexpr):
    """The query tile and head, counted over the batch, after (m, h).

    With a bound (WALL) from the last tile to the first: programs of unlike length then stay closer together, and more of what
    they read and add to is in the L2. Without one from `first` around to it again, so that programs of one head do not add to
    the same rows at once."""
    if WALL:
        m -= 1
        h = gl.where(m < first, h + 1, h)
        m = gl.where(m < first, end - 1, m)
    else:
        m += 1
        m = gl.where(m == end, 0, m)
        h = gl.where(m == first, h + 1, h)
    return m, h


@gluon.jit
def listed(lists, i, kv, TILES, GROUP):
    """The query tile and head, counted over the batch, that a list (_hopper_map.queries_of_keys) has as number i."""
    tile = gl.load(lists + i)
    head = tile // TILES
    return tile - head * TILES, kv * GROUP + head


@gluon.jit
def begun(lists, kv, first, end, TILES, GROUP, WALL: gl.constexpr):
    """The query tile and head that a walk begins with, or what a list says."""
    if lists is not None:
        m, h = listed(lists, 0, kv, TILES, GROUP)
    else:
        m = end - 1 if WALL else first
        h = kv * GROUP
    return m, h


@gluon.jit
def further(lists, i, m, h, kv, first, end, TILES, GROUP, WALL: gl.constexpr):
    """The query tile and head of number i, which (m, h) come before."""
    if lists is not None:
        m, h = listed(lists, i, kv, TILES, GROUP)
    else:
        m, h = walk(m, h, first, end, WALL)
    return m, h


@gluon.jit
def tanh(x):
    """tanh(x), with a relative error below 6e-6: near 0, where the exponential's form cancels, as its series.

    A rational function with one reciprocal (1.3e-6 with four terms each above and below) would spare a special function of
    three, but it issues a fifth more instructions and spills.
    """
    t = 1.0 - 2.0 * reciprocal(1.0 + gl.exp2(x * 2.8853900817779268))
    square = x * x
    return gl.where(square < 0.00390625, x - x * square * 0.3333333333333333, t)


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


@gluon.jit
def landed(YOUNGER: gl.constexpr, dv, dk, grad_v, grad_k):
    """dv and dk when their products are done, those of them that are made; so many younger products may still run."""
    if grad_v is not None and grad_k is not None:
        dv, dk = warpgroup_mma_wait(YOUNGER, deps=(dv, dk))
    elif grad_v is not None:
        dv = warpgroup_mma_wait(YOUNGER, deps=(dv,))
    elif grad_k is not None:
        dk = warpgroup_mma_wait(YOUNGER, deps=(dk,))
    return dv, dk


@gluon.jit
def in_fours(dq):
    """A part of a tile of grad_q [64, N] as [N / 4, 256]: four floats that a thread holds become neighbours."""
    N: gl.constexpr = dq.shape[1]
    return dq.reshape([4, 2, 8, N // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([N // 4, 256])


@gluon.jit
def add_part(sums, dq):
    """Add a part of a tile of grad_q to memory, from registers."""
    dq = in_fours(dq)
    rows = gl.arange(0, dq.shape[0], gl.SliceLayout(1, dq.type.layout))[:, None] * 256
    columns = gl.arange(0, 256, gl.SliceLayout(0, dq.type.layout))[None, :]
    add_four(sums + (rows + columns), dq)


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
    stride_ob, stride_os, stride_oh, stride_gb, stride_gs, stride_gh, D: tl.constexpr, V: tl.constexpr, BLANK: tl.constexpr,
):  # fmt: skip
    """stats: per tile of 64 queries their lse in base 2, +inf past the end, then their delta. BLANK: rows may see nothing."""
    pid = tl.program_id(0).to(tl.int64)
    bh = pid // TILES
    segment, first, left = _place(schedule, pid - bh * TILES, SEQ)
    i = tl.arange(0, 64)
    rows = first + i.to(tl.int64)  # packed tokens may be more than 32 bits of elements
    b = bh // HEADS
    h = bh - b * HEADS
    d = tl.arange(0, V)
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
    if sums is not None:
        for part in tl.static_range(D // 64):
            tl.store(sums + pid * 64 * D + part * 4096 + tl.arange(0, 4096), tl.zeros([4096], tl.float32))


@triton.jit
def _finish_part(sums, rows, scale, inside, WIDTH: tl.constexpr):
    x = tl.load(sums + tl.arange(0, 64 * WIDTH)) * scale
    x = x.reshape([2, WIDTH // 16, 4, 8, 4, 2, 2])
    x = tl.permute(x, (2, 5, 3, 0, 1, 4, 6)).reshape([64, WIDTH])
    tl.store(rows + tl.arange(0, WIDTH)[None, :], x.to(rows.dtype.element_ty), inside)


@triton.jit
def _finish_kernel(sums, grad_q, schedule, scale, SEQ, HEADS, TILES, D: tl.constexpr):
    """grad_q "batch seq heads head_dim" of the tiles in register order: [half, column / 8, warp, row % 8, column / 2 % 4, row / 8
    % 2, column % 2]; with head_dim 192 columns to 128, then those after."""
    pid = tl.program_id(0).to(tl.int64)
    bh = pid // TILES
    segment, first, left = _place(schedule, pid - bh * TILES, SEQ)
    i = tl.arange(0, 64)
    b = bh // HEADS
    if schedule is not None:
        scale = tl.where(segment < 0, float("nan"), scale)
    rows = ((b * SEQ + first + i) * HEADS + (bh - b * HEADS))[:, None] * D
    if D == 192:
        _finish_part(sums + pid * 64 * D, grad_q + rows, scale, (i < left)[:, None], 128)
        _finish_part(sums + pid * 64 * D + 64 * 128, grad_q + rows + 128, scale, (i < left)[:, None], 64)
    else:
        _finish_part(sums + pid * 64 * D, grad_q + rows, scale, (i < left)[:, None], D)


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

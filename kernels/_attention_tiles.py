"""What the attention kernels share on the GPU: which keys a tile of queries sees, tile loads, logits, dropout, schedules.

A query row stands at key position row + offset, offset = context - seq of its segment: causal and windows are aligned
bottom-right. `geo` is the tuple (offset, context, left, right, prefix); left, right and prefix are None where unbounded.
`terms` is the tuple (mask, its strides, bias, its strides, slope, cap): what shapes a logit besides the product, None where
absent. Strides are over batch, heads, rows and keys: rows None where all rows are alike, keys None where the tensor is a
descriptor, whose others then say which axes it has (1, or 0 for one of size 1).
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from ._lang import cdiv, tl, triton
from ._launch import launch as _launch

LOG2E = 1.4426950408889634
MAP_BLOCK = 128  # queries and keys of one entry of a block map
COLUMNS = 6  # of a schedule


@triton.jit
def key_range(first, ROWS: tl.constexpr, geo, RIGHT: tl.constexpr):
    """Keys of the query rows [first, first + ROWS): some row sees keys [low, high), every row sees [full_low, full_high)."""
    offset, context, left, right, prefix = geo
    low = 0
    full_low = 0
    high = context
    full_high = context
    if RIGHT:
        edge = first + offset + right + 1  # where the keys of the first row end
        high = tl.minimum(context, edge + ROWS - 1)
        full_high = tl.minimum(context, edge)
        if prefix is not None:
            high = tl.maximum(high, tl.minimum(context, prefix))
            full_high = tl.maximum(full_high, tl.minimum(context, prefix))
        high = tl.maximum(high, 0)
        full_high = tl.maximum(full_high, 0)
    if left is not None:
        low = tl.maximum(first + offset - left, 0)
        full_low = tl.maximum(first + offset - left + ROWS - 1, 0)
    return low, full_low, full_high, high


@triton.jit
def row_range(first, COLS: tl.constexpr, seq, geo, RIGHT: tl.constexpr):
    """Query rows [low, high) some of which see some of the keys [first, first + COLS)."""
    offset, context, left, right, prefix = geo
    low = 0
    high = seq
    if RIGHT:
        low = tl.maximum(first - offset - right, 0)
        if prefix is not None:
            low = tl.where(first < prefix, 0, low)
    if left is not None:
        high = tl.minimum(seq, tl.maximum(first + COLS - offset + left, 0))
    return low, high


@triton.jit
def section_order(pid, num_tiles, HEADS, SECTION):
    """(head, tile) of a program: SECTION heads at a time, all heads of a section at one tile before the next tile, so that L2
    keeps what they share."""
    first = pid // (num_tiles * SECTION) * SECTION
    width = tl.minimum(SECTION, HEADS - first)
    r = pid - first * num_tiles
    return first + r % width, r // width


@triton.jit
def entry_of(i, HEADS, GROUP, TOGETHER):
    """(batch entry, head) number i: heads of a batch entry after each other or, with TOGETHER > 1, first all of one group in so
    many batch entries, so that L2 keeps the mask or bias that they share."""
    unit = TOGETHER * GROUP
    n = i // unit
    r = i - n * unit
    groups = HEADS // GROUP
    return n // groups * TOGETHER + r // GROUP, n % groups * GROUP + r % GROUP


@triton.jit
def visible(row, col, geo, RIGHT: tl.constexpr):
    """Whether the query at `row` sees the key at `col`; they broadcast to each other. RIGHT: 0 all, 1 causal, 2 a window."""
    offset, context, left, right, prefix = geo
    if RIGHT == 1 and prefix is None and left is None:
        return col <= row + offset  # which also ends the context, for every row of the segment
    ok = col < context
    if RIGHT:
        near = col <= row + (offset + right)
        if prefix is not None:
            near = near | (col < prefix)
        ok = ok & near
    if left is not None:
        ok = ok & (col >= row + (offset - left))
    return ok


@triton.jit
def load_rows(
    x, b, h, row, LIMIT, strides,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TMA: tl.constexpr, CHECK: tl.constexpr, COL: tl.constexpr = 0,
):  # fmt: skip
    """[ROWS, DP] of x, of one batch entry and head, from `row` and column COL on; fp8 comes as bf16, which holds it exactly.

    Zero past column D and, with CHECK and without TMA, past LIMIT rows. TMA reads on to the end of the tensor.
    strides: over batch, rows, heads.
    """
    if TMA:
        t = x.load([b, h, row, COL]).reshape(ROWS, DP)
    else:
        stride_b, stride_row, stride_h = strides
        r = tl.arange(0, ROWS)
        d = COL + tl.arange(0, DP)
        at = x + (b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + tl.cast(row, tl.int64) * stride_row)
        at = at + (r[:, None] * stride_row + d[None, :])  # 32 bits: dense_rows sees to it
        if CHECK and D < COL + DP:
            t = tl.load(at, mask=(row + r < LIMIT)[:, None] & (d < D)[None, :], other=0.0)
        elif CHECK:
            t = tl.load(at, mask=(row + r < LIMIT)[:, None], other=0.0)
        elif D < COL + DP:
            t = tl.load(at, mask=(d < D)[None, :], other=0.0)
        else:
            t = tl.load(at)
    if t.dtype == tl.float8e4nv:
        t = t.to(tl.bfloat16)
    return t


@triton.jit
def load_paged(
    x, pages, h, col, context, strides, PAGES, PAGE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, COL: tl.constexpr = 0,
):  # fmt: skip
    """Keys or values `col` of a sequence whose pages are listed from `pages` on; zero past the context, and NaN where the
    table names no page of the PAGES there are. strides: over pages, rows of a page, heads."""
    stride_page, stride_row, stride_h = strides
    d = COL + tl.arange(0, DP)
    inside = col < context
    page = tl.load(pages + col // PAGE, inside, other=0)
    known = (page >= 0) & (page < PAGES)
    at = x + h.to(tl.int64) * stride_h + page.to(tl.int64) * stride_page + (col % PAGE).to(tl.int64) * stride_row
    t = tl.load(at[:, None] + d[None, :], (inside & known)[:, None] & (d < D)[None, :], other=0.0)
    if t.dtype == tl.float8e4nv:
        t = t.to(tl.bfloat16)
    return tl.where(known[:, None], t, float("nan"))


@triton.jit
def load_term(
    x, strides, b, h, row, col, rows, context, M: tl.constexpr, N: tl.constexpr, CHECK: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """[M, N] of a mask or bias from query `row` and key `col` on, [1, N] where all rows are alike; TURNED: transposed. Zero past
    its ends, which only CHECK looks for along the keys."""
    stride_b, stride_h, stride_row, stride_col = strides
    if stride_col is None:
        t = x.load([b * stride_b, h * stride_h, row, col]).reshape(M, N)
        if TURNED:
            t = t.T
    else:
        at = x + (b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + tl.cast(col, tl.int64) * stride_col)
        c = tl.arange(0, N)
        if stride_row is None:
            t = tl.load(at + c.to(tl.int64) * stride_col, col + c < context, other=0.0)
            if TURNED:
                t = t[:, None]
            else:
                t = t[None, :]
        else:
            # Vectors where strides tell that they are aligned; few addresses then, so 64 bits cost little.
            r = tl.arange(0, M)
            at = (at + tl.cast(row, tl.int64) * stride_row) + r.to(tl.int64)[:, None] * stride_row
            at = at + c.to(tl.int64)[None, :] * stride_col
            if CHECK:
                t = tl.load(at, (row + r < rows)[:, None] & (col + c < context)[None, :], other=0.0)
            else:
                t = tl.load(at, (row + r < rows)[:, None], other=0.0)
            if TURNED:
                t = t.T
    return t


@triton.jit
def load_terms(
    terms, b, h, row, col, rows, context, M: tl.constexpr, N: tl.constexpr, CHECK: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """(mask, bias) of the queries from `row` and the keys from `col` on, for shape_logits; anything where absent.

    To be called before the product: the loads are then on their way during it. Besides, triton 3.6 gives the row maxima and
    sums the layout of what comes first: that of a load would cost two copies of the logits through shared memory."""
    mask, mask_strides, bias, bias_strides, _, _ = terms
    m = col
    a = col
    if mask is not None:
        m = load_term(mask, mask_strides, b, h, row, col, rows, context, M, N, CHECK, TURNED)
    if bias is not None:
        a = load_term(bias, bias_strides, b, h, row, col, rows, context, M, N, CHECK, TURNED)
    return m, a


@triton.jit
def shape_logits(s, row, col, geo, terms, loaded, scale, ADDED: tl.constexpr):
    """(logits, d logit / d product) of products s; row, col and what load_terms has loaded broadcast to s. The second means
    something with softcap only.

    ADDED: logits are scaled, in natural units (base-2 ones would round a logit of -6e4 more coarsely). Otherwise they stay
    unscaled, for the exponential to scale them in one step, and only a bool mask may act on them.
    """
    offset, context, left, right, prefix = geo
    mask, _, bias, _, slope, cap = terms
    m, a = loaded
    factor = s
    if ADDED and bias is not None and cap is None and slope is None:
        s = tl.fma(s, scale, a.to(s.dtype))
    elif ADDED:
        s = tl.fma(s, scale, 0.0)  # not `s * scale`: a masked block would round it, another fuse it with a subtraction to come
    if cap is not None:
        y = s * (1.0 / cap)  # tanh(y), in a form that neither overflows nor loses the sign, and near 0 its series
        e = tl.math.exp2(-tl.abs(y) * 2.8853900817779268)
        t = tl.where(y < 0, -1.0, 1.0) * ((1.0 - e) / (1.0 + e))
        if s.dtype == tl.float32:
            y2 = y * y
            near = y * (1.0 + y2 * (-0.3333333333333333 + y2 * (0.13333333333333333 - y2 * 0.05396825396825397)))
            t = tl.where(y2 < 0.015625, near, t)
        s = t * cap
        factor = 1.0 - t * t
    if slope is not None:
        s = s - slope * tl.abs(row + offset - col).to(s.dtype)
    if bias is not None and (cap is not None or slope is not None or not ADDED):
        s = s + a.to(s.dtype)
    if mask is not None:
        if m.dtype == tl.uint8:
            s = tl.where(m != 0, s, float("-inf"))
        else:
            m = m.to(s.dtype)
            s = tl.where(m > -2.0e38, s + m, float("-inf"))
    return s, factor


@triton.jit
def power(x, ADDED: tl.constexpr):
    """exp of differences of logits, which are in natural units if ADDED, in base-2 ones otherwise."""
    if ADDED:
        x = x * 1.4426950408889634
    return tl.math.exp2(x)


@triton.jit
def kept(seed, row, col, bh, dropout_p):
    """Which weights dropout keeps: Philox (Salmon et al. 2011) on (key, query, batch and head), the same for any tiles."""
    zero = (row + col) * 0
    w, _, _, _ = tl.philox(seed, zero + col, zero + row, zero + bh, zero)
    return (w >> 8).to(tl.float32) * 5.960464477539063e-08 >= dropout_p


@triton.jit
def no_nan(tile, live):
    """The tile with rows zeroed that nothing attends: 0 * NaN is NaN."""
    return tl.where(live[:, None], tile, 0.0)


@triton.jit
def planned(schedule, slot):
    """(segment, tile, first row, rows, first row of the others, how many others) of a slot; segment -1: impossible bounds."""
    at = schedule + slot * 6
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


@triton.jit
def _schedule_kernel(
    cu, other, used, out, SEGMENTS, TOKENS, OTHERS, SLOTS, BLOCK: tl.constexpr, CHUNK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) * N + tl.arange(0, N)
    # Segment s has the slots from cu[s] // BLOCK + s on: enough, and no two segments share one.
    ended = tl.zeros([N], tl.int32)
    wrong = tl.zeros([CHUNK], tl.int32)
    for first in range(0, SEGMENTS + 1, CHUNK):
        s = first + tl.arange(0, CHUNK)
        here = tl.load(cu + s, s <= SEGMENTS, other=0)
        start = here // BLOCK + s
        ended += tl.sum(((start[None, :] <= slot[:, None]) & (s <= SEGMENTS)[None, :]).to(tl.int32), 1)
        after = tl.load(cu + s + 1, s < SEGMENTS, other=0)
        bad = (s < SEGMENTS) & ((after < here) | (after > TOKENS)) | ((s == 0) & (here != 0))
        if other is not None:
            a = tl.load(other + s, s <= SEGMENTS, other=0)
            z = tl.load(other + s + 1, s < SEGMENTS, other=0)
            bad = bad | (s < SEGMENTS) & ((z < a) | (z > OTHERS)) | ((s == 0) & (a != 0))
        if used is not None:
            n = tl.load(used + s, s < SEGMENTS, other=0)
            bad = bad | (s < SEGMENTS) & ((n < 0) | (n > OTHERS))
        wrong = wrong | bad.to(tl.int32)
    segment = ended - 1
    inside = (segment >= 0) & (segment < SEGMENTS)
    row = tl.load(cu + segment, segment >= 0, other=0)
    end = tl.load(cu + segment + 1, inside, other=TOKENS)
    tile = slot - (row // BLOCK + segment)
    start = tl.zeros([N], tl.int32)
    length = tl.zeros([N], tl.int32)
    if other is not None:
        start = tl.load(other + segment, inside, other=0)
        length = tl.load(other + segment + 1, inside, other=0) - start
    if used is not None:
        length = tl.load(used + segment, inside, other=0)
    if tl.max(wrong, 0) > 0:  # every row, by slots alone
        segment = tl.full([N], -1, tl.int32)
        tile = tl.zeros([N], tl.int32)
        row = tl.minimum(slot * BLOCK, TOKENS)
        end = tl.minimum(slot * BLOCK + BLOCK, TOKENS)
        start = tl.zeros([N], tl.int32)
        length = tl.zeros([N], tl.int32)
    at = out + slot * 6
    ok = slot < SLOTS
    tl.store(at, segment, ok)
    tl.store(at + 1, tile, ok)
    tl.store(at + 2, row, ok)
    tl.store(at + 3, end - row, ok)
    tl.store(at + 4, start, ok)
    tl.store(at + 5, length, ok)


def schedule_slots(tokens: int, segments: int, block: int) -> int:
    """How many tiles of `block` rows any `segments` segments of `tokens` tokens can need, and the tokens after the last."""
    return tokens // block + segments + 1


def schedule(cu: Tensor, other: Tensor | None, used: Tensor | None, tokens: int, others: int, block: int, out: Tensor) -> None:
    """Cut the segments that cu `segments+1` bounds into tiles of `block` rows, without reading it on the host.

    One row of out `slots 6` a tile, as `planned` reads it; tiles past the end of their segment have tile * block >= rows.
    other: boundaries of the other side (keys for queries), used: its lengths instead, at most `others`. The tokens past the
    last boundary are a segment of their own with no others. Boundaries that decrease or pass the tokens give every tile
    segment -1.
    """
    segments, slots = cu.shape[0] - 1, out.shape[0]
    cu, bounded = cu.contiguous(), [None if t is None else t.contiguous() for t in (other, used)]
    n = 32
    _launch(
        _schedule_kernel, (cdiv(slots, n),), (cu, *bounded, out, segments, tokens, others, slots),
        {"BLOCK": block, "CHUNK": 128, "N": n, "num_warps": 4},
    )  # fmt: skip


def block_lists(block_map: Tensor, by_key: bool) -> tuple[Tensor, Tensor]:
    """(numbers, list) of the map's True blocks, int32: for every block of queries its blocks of keys from the last to the first,
    or by_key for every block of keys its blocks of queries from the first on.

    block_map `batch heads q_blocks k_blocks`; list `batch heads q_blocks k_blocks` (by_key the last two the other way round),
    its first `number` entries valid.
    """
    turned = rearrange(block_map, "batch heads q_blocks k_blocks -> batch heads k_blocks q_blocks")
    rows = turned if by_key else block_map.flip(-1)
    order = torch.sort(rows.to(torch.uint8), dim=-1, descending=True, stable=True).indices
    if not by_key:
        order = block_map.shape[-1] - 1 - order
    return rows.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()

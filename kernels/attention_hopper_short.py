"""Softmax attention, forward, for contexts of at most 256 keys on sm_90 in Gluon: keys and values stay in shared memory.

    out = softmax(scale * q @ k^T, context) @ v,    lse = log(sum(exp(scale * q @ k^T), context))

    q, out   batch seq heads head_dim          bf16 or fp16, head_dim 64 or 128
    k, v     batch context kv_heads head_dim   heads is a multiple of kv_heads; context 1 to 256
    sinks    heads                             None, or the logit of a further key whose value is 0, any floating dtype
    lse      batch heads seq                   natural log, fp32, with the sink

Query i stands at p = i + context - seq and sees key j iff p - left <= j <= p + right; a negative one bounds nothing. A row that
sees nothing gives out 0 and lse -inf (the sink's logit). Lengths may be anything: a TMA copy fills with zeros past the end of a
sequence and a store stops there, so what lies beside a sequence is never read, be it NaN. Every key and value must be finite.

HBM, in elements: reads q, k, v and sinks, writes out and lse.

Why a kernel of its own: the others load k and v again for every tile of rows of every head. At 32k tokens in sequences of 256
with 32 heads of 128 that is 1.3 GB from the L2 beside 0.7 GB from HBM. Here k and v of a key head are loaded once, and all logits
of a row are in registers at once, so the softmax is a plain one: no running maximum, no rescaling.

Two consumers (warpgroups) take tiles of 64 rows each and drift apart, and programs stay on their SM: a producer warp loads the
next q, and with causal the next key head's k and v block by block as tiles stop needing them, the tiles that see most coming
first. The same in Triton, one program a key head, was level at 64 keys only and 1.3 to 1.5 times slower beyond.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ._attention_hopper_parts import by_thread
from ._attention_tiles import LOG2E
from ._gluon import (
    allocate_barriers,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ._lang import cdiv
from ._launch import launch as _launch
from ._launch import on_device
from ._target import target_of

BLOCK = 64  # rows of a tile, and keys of a block
LONGEST = 256  # keys: their logits are half of the registers
Q_SLOTS = 2  # of a consumer


@dataclass(frozen=True)
class Config:
    """stages: how many key heads' k and v there is room for."""

    stages: int


def configure(head_dim: int) -> Config:
    # H200, 2026-11-30, 32k tokens, causal, ms with one and with two stages: D=128 S64 0.172 and 0.179, S128 0.174 and 0.192, S256
    # 0.255 and no room; D=64 S64 0.124 and 0.087, S128 0.117 and 0.099, S256 0.139 and 0.132.
    return Config(1 if head_dim == 128 else 2)


@gluon.jit
def _problem(problem, parts, each, items, kv_heads):
    """(batch entry, key head, first item, end of the items)."""
    pair = problem // parts
    begin = (problem - pair * parts) * each
    b = pair // kv_heads
    return b, pair - b * kv_heads, begin, gl.minimum(begin + each, items)


@gluon.jit
def _of_class(begin, end, number, group, SKIP: gl.constexpr):
    """Those of the items [begin, end) that are of a class: of one tile of rows, the last tile first, or all."""
    if SKIP:
        begin = gl.maximum(begin, number * group)
        end = gl.minimum(end, number * group + group)
    return begin, end


@gluon.jit
def _load_block(x, b, h, j, memory, full, empty, load, BLOCKS: gl.constexpr, STAGES: gl.constexpr):
    """Load number `load` of block j, when both consumers have given back what was there."""
    at = load % STAGES * BLOCKS + j
    mbarrier.wait(empty.index(at), (load // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(at), x.block_type.nbytes)
    tma_load(x, [b, j * 64, h, 0], full.index(at), memory.index(at))


@gluon.jit
def _load_rows(q, b, h, row, consumer, count, q_s, q_full, q_empty):
    at = consumer * 2 + (count & 1)
    mbarrier.wait(q_empty.index(at), (count >> 1 & 1) ^ 1)
    mbarrier.expect(q_full.index(at), q.block_type.nbytes)
    tma_load(q, [b, row, h, 0], q_full.index(at), q_s.index(at))


@gluon.jit
def _producer(
    q, k, v, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, problems, parts, each, items, kv_heads, group,
    BLOCKS: gl.constexpr, STAGES: gl.constexpr, CLASSES: gl.constexpr, SKIP: gl.constexpr,
):  # fmt: skip
    LATE: gl.constexpr = 1 if SKIP else BLOCKS  # blocks that all classes need
    programs = gl.num_programs(0)
    round = 0
    count0 = 0
    count1 = 0
    b, kv, begin, end = _problem(gl.program_id(0), parts, each, items, kv_heads)
    for j in gl.static_range(BLOCKS):
        _load_block(k, b, kv, j, k_s, k_full, k_empty, 0, BLOCKS, STAGES)
    for j in gl.static_range(LATE, BLOCKS):
        _load_block(v, b, kv, j, v_s, v_full, v_empty, 0, BLOCKS, STAGES)
    for problem in range(gl.program_id(0), problems, programs):
        more = problem + programs < problems
        next_b, next_kv, next_begin, next_end = _problem(problem + programs, parts, each, items, kv_heads)
        for number in gl.static_range(CLASSES):
            lo, hi = _of_class(begin, end, number, group, SKIP)
            middle = lo
            for part in gl.static_range(2):
                if part == 0:
                    middle = gl.minimum(lo + 2, hi)
                    first = lo
                    last = middle
                else:
                    first = gl.maximum(middle, lo)
                    last = hi
                for i in range(first, last):
                    h = i % group
                    row = (CLASSES - 1 - number if SKIP else i // group) * 64
                    consumer = (i - begin + round) & 1
                    _load_rows(q, b, kv * group + h, row, consumer, gl.where(consumer == 0, count0, count1), q_s, q_full, q_empty)
                    count0 += 1 - consumer
                    count1 += consumer
                if number == 0 and part == 0:
                    for j in gl.static_range(LATE):
                        _load_block(v, b, kv, j, v_s, v_full, v_empty, round, BLOCKS, STAGES)
            if number > 0 and more:
                _load_block(k, next_b, next_kv, CLASSES - number, k_s, k_full, k_empty, round + 1, BLOCKS, STAGES)
                _load_block(v, next_b, next_kv, CLASSES - number, v_s, v_full, v_empty, round + 1, BLOCKS, STAGES)
        if more:
            for j in gl.static_range(LATE):
                _load_block(k, next_b, next_kv, j, k_s, k_full, k_empty, round + 1, BLOCKS, STAGES)
        b = next_b
        kv = next_kv
        begin = next_begin
        end = next_end
        round += 1


@gluon.jit
def _masked(s, row, col, low, high, context, LEFT: gl.constexpr, RIGHT: gl.constexpr, CHECK: gl.constexpr):
    """Logits of rows from `row` and keys from `col` on, -inf where a row does not see the key. Cut into an axis of registers and
    one of threads, so that a thread compares constants with a few numbers of its own."""
    N: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    y = s.reshape([64, N // 8, 8])
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, y.type.layout))
    eights: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, y.type.layout))
    ones: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, y.type.layout))
    key = (col + gl.arange(0, N // 8, eights) * 8)[None, :, None]
    one = gl.arange(0, 8, ones)[None, None, :]
    place = (row + gl.arange(0, 64, rows))[:, None, None] - one
    if RIGHT:
        y = gl.where(key <= place + high, y, float("-inf"))
    if LEFT:
        y = gl.where(key >= place + low, y, float("-inf"))
    if CHECK:
        y = gl.where(key < context - one, y, float("-inf"))
    return gl.convert_layout(y.reshape([64, N]), layout)


@gluon.jit
def _tile(
    CID: gl.constexpr, out, lse, sinks, q_s, k_s, v_s, out_s, q_full, q_empty, v_full, b, h, row, count, first, phase, scale, low,
    high, seq, context, D: gl.constexpr, SEEN: gl.constexpr, PLAIN: gl.constexpr, WAIT: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, CHECK: gl.constexpr, EMPTY: gl.constexpr,
):  # fmt: skip
    """64 rows of head h against SEEN blocks, of which those from PLAIN on need a mask. first: where the blocks lie; lse: of the
    head's row 0."""
    dtype: gl.constexpr = q_s.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    at = CID * 2 + (count & 1)
    mbarrier.wait(q_full.index(at), count >> 1 & 1)
    qt = q_s.index(at).reshape([64, D])
    zero = gl.zeros([64, 64], gl.float32, s_layout)
    flying: gl.tuple = ()
    for j in gl.static_range(SEEN):
        kt = k_s.index(first + j).reshape([64, D]).permute((1, 0))
        flying = flying + (warpgroup_mma(qt, kt, zero, use_acc=False, is_async=True),)
    logits: gl.tuple = ()
    for j in gl.static_range(SEEN):
        s = warpgroup_mma_wait(SEEN - 1 - j, deps=(flying[j],))
        if j >= PLAIN:
            s = _masked(s, row, j * 64, low, high, context, LEFT, RIGHT, CHECK)
        logits = logits + (s,)
    mbarrier.arrive(q_empty.index(at), count=1)
    top = gl.max(by_thread(logits[0]), 2)
    for j in gl.static_range(1, SEEN):
        top = gl.maximum(top, gl.max(by_thread(logits[j]), 2))
    m = gl.convert_layout(gl.max(top, 1), s_rows) * scale
    if EMPTY:
        m = gl.maximum(m, -1.0e30)  # not -inf - -inf
    acc = gl.zeros([64, D], gl.float32, acc_layout)
    partial: gl.constexpr = top.type.layout
    sums = gl.zeros([64, 4], gl.float32, partial)
    for j in gl.static_range(SEEN):
        p = gl.exp2(logits[j] * scale - m[:, None])
        sums = sums + gl.sum(by_thread(p), 2)
        pt = gl.convert_layout(p.to(dtype), p_layout)
        if WAIT:
            mbarrier.wait(v_full.index(first + j), phase)
        acc = warpgroup_mma(pt, v_s.index(first + j).reshape([64, D]), acc, use_acc=j > 0, is_async=True)
    l = gl.convert_layout(gl.sum(sums, 1), s_rows)
    inverse = 1.0 / l
    if sinks is not None:
        sink = gl.load(sinks + h).to(gl.float32) * 1.4426950408889634
        new = gl.maximum(m, sink)
        shrink = gl.exp2(m - new)
        l = l * shrink + gl.exp2(sink - new)
        inverse = shrink / l
        m = new
    if EMPTY:
        inverse = gl.where(l == 0.0, 0.0, inverse)
    logs = (m + gl.log2(l)) * 0.6931471805599453
    acc = warpgroup_mma_wait(0, deps=(acc,))
    acc = acc * gl.convert_layout(inverse, acc_rows)[:, None]
    rows = row + gl.arange(0, 64, s_rows)
    gl.store(lse + rows, logs, mask=rows < seq)
    tma_store_wait(0)  # the tile before has left the buffer
    out_s.index(CID).reshape([64, D]).store(acc.to(dtype))
    fence_async_shared()
    tma_store(out, [b, row, h, 0], out_s.index(CID))


@gluon.jit
def _class(
    CID: gl.constexpr, out, lse, sinks, q_s, k_s, v_s, out_s, q_full, q_empty, k_empty, v_full, v_empty, b, kv, begin, end, round,
    count, group, first, phase, scale, low, high, seq, context, heads, D: gl.constexpr, NUMBER: gl.constexpr,
    CLASSES: gl.constexpr, SEEN: gl.constexpr, SKIP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, CHECK: gl.constexpr,
    EMPTY: gl.constexpr,
):  # fmt: skip
    """This consumer's items of one class, which see SEEN blocks; then it gives back the blocks that no later class needs."""
    PLAIN: gl.constexpr = 0 if LEFT else SEEN - 1 if SKIP else 0 if RIGHT else SEEN - 1 if CHECK else SEEN
    lo, hi = _of_class(begin, end, NUMBER, group, SKIP)
    if NUMBER > 0:
        for j in gl.static_range(SEEN):
            mbarrier.wait(v_full.index(first + j), phase)
    lse += (b.to(gl.int64) * heads + kv * group) * seq
    for i in range(lo + (lo - begin + round + CID & 1), hi, 2):
        # 0, which the compiler does not know: else it makes addresses and masks of all blocks ahead and spills them.
        nothing = i >> 30
        t = i // group if not SKIP else NUMBER + nothing
        row = (CLASSES - 1 - t if SKIP else t) * 64
        h = i - t * group
        _tile(CID, out, lse + h.to(gl.int64) * seq, sinks, q_s, k_s, v_s, out_s, q_full, q_empty, v_full, b, kv * group + h, row,
              count, first + nothing, phase, scale, low, high, seq, context, D, SEEN, PLAIN, NUMBER == 0, LEFT, RIGHT, CHECK,
              EMPTY)  # fmt: skip
        count += 1
    for j in gl.static_range(SEEN - 1 if SKIP else 0, SEEN):
        if NUMBER == 0:
            mbarrier.wait(v_full.index(first + j), phase)  # where this consumer had no tile
        mbarrier.arrive(k_empty.index(first + j), count=1)
        mbarrier.arrive(v_empty.index(first + j), count=1)
    return count


@gluon.jit
def _consumer(
    CID: gl.constexpr, out, lse, sinks, q_s, k_s, v_s, out_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, problems, parts,
    each, items, kv_heads, group, scale, low, high, seq, context, D: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    CLASSES: gl.constexpr, SKIP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, CHECK: gl.constexpr, EMPTY: gl.constexpr,
):  # fmt: skip
    round = 0
    count = 0
    for problem in range(gl.program_id(0), problems, gl.num_programs(0)):
        b, kv, begin, end = _problem(problem, parts, each, items, kv_heads)
        first = round % STAGES * BLOCKS
        phase = round // STAGES & 1
        for j in gl.static_range(BLOCKS):
            mbarrier.wait(k_full.index(first + j), phase)
        for number in gl.static_range(CLASSES):
            count = _class(
                CID, out, lse, sinks, q_s, k_s, v_s, out_s, q_full, q_empty, k_empty, v_full, v_empty, b, kv, begin, end, round,
                count, group, first, phase, scale, low, high, seq, context, kv_heads * group, D, number, CLASSES,
                CLASSES - number if SKIP else BLOCKS, SKIP, LEFT, RIGHT, CHECK, EMPTY
            )  # fmt: skip
        round += 1
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["problems", "parts", "each", "items", "kv_heads", "group", "low", "high", "seq", "context"])
def _short_kernel(
    q, k, v, out, lse, sinks, scale, problems, parts, each, items, kv_heads, group, low, high, seq, context,
    D: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, CLASSES: gl.constexpr, SKIP: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, CHECK: gl.constexpr, EMPTY: gl.constexpr,
):  # fmt: skip
    """scale: of base-2 logits. low and high: keys that row 0 sees, first and last. An item is a tile of rows of a head of the
    group; a problem is a key head of a batch entry, or one of the parts of its items."""
    q_s = gl.allocate_shared_memory(q.dtype, [4] + q.block_shape, q.layout)
    k_s = gl.allocate_shared_memory(k.dtype, [STAGES * BLOCKS] + k.block_shape, k.layout)
    v_s = gl.allocate_shared_memory(v.dtype, [STAGES * BLOCKS] + v.block_shape, v.layout)
    out_s = gl.allocate_shared_memory(out.dtype, [2] + out.block_shape, out.layout)
    q_full = allocate_barriers(4, 1)
    q_empty = allocate_barriers(4, 1)
    k_full = allocate_barriers(STAGES * BLOCKS, 1)
    k_empty = allocate_barriers(STAGES * BLOCKS, 2)
    v_full = allocate_barriers(STAGES * BLOCKS, 1)
    v_empty = allocate_barriers(STAGES * BLOCKS, 2)
    gl.warp_specialize(
        [
            (_consumer, (0, out, lse, sinks, q_s, k_s, v_s, out_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, problems,
                         parts, each, items, kv_heads, group, scale, low, high, seq, context, D, BLOCKS, STAGES, CLASSES, SKIP,
                         LEFT, RIGHT, CHECK, EMPTY)),
            (_consumer, (1, out, lse, sinks, q_s, k_s, v_s, out_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, problems,
                         parts, each, items, kv_heads, group, scale, low, high, seq, context, D, BLOCKS, STAGES, CLASSES, SKIP,
                         LEFT, RIGHT, CHECK, EMPTY)),
            (_producer, (q, k, v, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, problems, parts, each, items,
                         kv_heads, group, BLOCKS, STAGES, CLASSES, SKIP)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# ---- the host ----------------------------------------------------------------------------------------------------------------


def unfit(head_dim: int, v_dim: int, context: int) -> str:
    """Why this kernel cannot take so many columns and keys where attention_hopper.py could, or "" where it can."""
    if head_dim not in (64, 128) or v_dim != head_dim:
        return f"head_dim={head_dim} and v_dim={v_dim}, not both 64 or 128"
    if not 0 < context <= LONGEST:
        return f"context={context}, not 1 to {LONGEST}"
    return ""


def share(items: int, pairs: int, programs: int) -> tuple[int, int]:
    """(parts, items of each) for one of `pairs` key heads with `items` items: at least two items a part, one a consumer, where
    that fills the GPU, and parts of at most 32."""
    parts = max(cdiv(items, 32), min(cdiv(items, 2), programs // pairs))
    each = cdiv(items, parts)
    return cdiv(items, each), each


def launch(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, left: int, right: int, scale: float, out: Tensor, lse: Tensor,
    config: Config | None = None,
) -> None:  # fmt: skip
    """Write out and lse, both contiguous. q, k, v: bf16 or fp16, what unfit() lets pass, with rows that TMA takes
    (_launch.tma_ready)."""
    batch, seq, heads, head_dim = q.shape
    context, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    target = target_of(q.device)
    config = config or configure(head_dim)
    tiles = cdiv(seq, BLOCK)
    parts, each = share(tiles * group, batch * kv_heads, target.sms)
    problems = batch * kv_heads * parts
    offset = context - seq
    skip = right == 0 and offset == 0
    with on_device(q):
        blocks = [descriptor(t, [1, BLOCK, 1, head_dim]) for t in (q, k, v, out)]
        _launch(
            _short_kernel, (min(target.sms, problems),),
            (*blocks, lse, None if sinks is None else sinks.contiguous(), scale * LOG2E, problems, parts, each, tiles * group,
             kv_heads, group, offset - left, offset + right, seq, context),
            {"D": head_dim, "BLOCKS": cdiv(context, BLOCK), "STAGES": config.stages, "CLASSES": tiles if skip else 1,
             "SKIP": skip, "LEFT": left >= 0, "RIGHT": right >= 0, "CHECK": right != 0 and context % BLOCK > 0,
             "EMPTY": right >= 0 and context + right < seq, "num_warps": 4, "maxnreg": 168},
        )  # fmt: skip

"""The experts' products whose tiles have 128 rows, on sm_90 in Gluon: a tile of at most 64 rows costs half the tensor work.

    gate_up: h = gated(gate, up) of x[token] @ gate_up_weight[e].T + bias      a tile: 128 rows, 128 columns of gate and 128 of up
    rows:    y = a @ w[e].T + bias, row by row                                 a tile: 128 rows, 256 columns

Roles: two consumers (warpgroups) of 64 rows and 256 columns each, and one producer. The second consumer leaves out the products
of a tile that has no rows for it, and the producer their loads. Weights, and rows that lie together, come through a ring of TMA
copies; gathered rows come by cp.async into the same ring. No two warpgroups are held together: who ends a tile first stores it
while the other's products run.

Programs stay on their SM. Tiles are ordered as _moe.tile_at has them: groups of 8 row tiles share one pass over the columns, so
an expert's tiles follow one another and share its weights in the L2. Tiles of more than 64 rows are dealt to the programs in
turn, those of fewer too but from the last program on, and every program does its own in that order. Were all dealt as one, some
would get few of the short ones and take as long as before: simulated, of gate_up with 4096 tokens and 8 of 128 experts, the
longest share is 15 tiles where all cost the same, 14.8 if all are dealt as one, and 13.5 so, as with shares that whoever is free
takes by an atomic counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import _moe
from ._attention_hopper_parts import next_stage
from ._gluon import (
    AVAILABLE,
    allocate_barriers,
    bar_arrive,
    bar_sync,
    copy_rows,
    copy_rows_arrive,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ._lang import cdiv
from ._launch import launch as _launch
from ._launch import tma_ready
from ._moe import gated
from ._spec import Args, Sizes
from ._target import Target, target_of

ROWS = 64  # of a consumer
COLUMNS = 256  # of a tile; of gate and up together
STEP = 64  # of K
STAGES = 4

# Named barriers 8 to 11: a stage is free.

# ---- the producer ------------------------------------------------------------------------------------------------------------


@gluon.jit
def _post(mail, posted, taken, slot, phase, t, WARPS: gl.constexpr):
    """Tell the consumers the number of the next tile, -1: there is none."""
    mbarrier.wait(taken.index(slot), phase ^ 1)
    mail.index(slot).store(gl.full([1], t, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))
    mbarrier.arrive(posted.index(slot), count=1)


@gluon.jit
def _kinds(tiles, g, num_m, SHORT: gl.constexpr, WARPS: gl.constexpr):
    """Which tiles of groups g and g + 1 are short, or which are not, as 16 bits."""
    i = gl.arange(0, 16, gl.BlockedLayout([1], [32], [WARPS], [0]))
    at = tiles + g * 32 + i * 4
    there = g * 8 + i < num_m
    rows = gl.load(at + 2, mask=there, other=0) - gl.load(at + 1, mask=there, other=0)
    if SHORT:
        there = there & (rows <= 64)
    else:
        there = rows > 64
    return gl.sum(gl.where(there, 1 << i, 0), 0)


@gluon.jit
def _members(kinds, g):
    """Of group g as 8 bits, and how many they are."""
    bits = (kinds >> (g % 2 * 8)) & 255
    n = bits - ((bits >> 1) & 0x55)
    n = (n & 0x33) + ((n >> 2) & 0x33)
    return bits, (n + (n >> 4)) & 15


@gluon.jit
def _seek(tiles, job, g, before, kinds, end, num_m, num_n, SHORT: gl.constexpr, WARPS: gl.constexpr):
    """The group that has job number `job` of a kind, or end; from group g on, which `before` jobs come before."""
    _, members = _members(kinds, g)
    while (g < end) & (job >= before + members * num_n):
        before += members * num_n
        g += 1
        if g % 2 == 0:
            kinds = _kinds(tiles, g, num_m, SHORT, WARPS)
        _, members = _members(kinds, g)
    return g, before, kinds


@gluon.jit
def _number(job, g, before, kinds, num_n):
    """Of a job of group g the tile's number: row tile * num_n + column tile."""
    bits, members = _members(kinds, g)
    n = (job - before) // members
    left = job - before - n * members
    m = 0
    for i in gl.static_range(8):
        there = (bits >> i) & 1
        m = gl.where((there == 1) & (left == 0), g * 8 + i, m)
        left -= there
    return m * num_n + n


@gluon.jit
def _next(
    tiles, job, g, before, kinds, short_job, short_g, short_before, short_kinds, num_m, num_n, WARPS: gl.constexpr
):  # fmt: skip
    """The number of this program's next tile, -1: there is none; and the rest as _producer has it, after that tile."""
    groups = gl.cdiv(num_m, 8)
    g, before, kinds = _seek(tiles, job, g, before, kinds, groups, num_m, num_n, False, WARPS)
    end = gl.minimum(g + 1, groups)
    short_g, short_before, short_kinds = _seek(
        tiles, short_job, short_g, short_before, short_kinds, end, num_m, num_n, True, WARPS
    )  # fmt: skip
    t = -1
    if short_g < end:
        t = _number(short_job, short_g, short_before, short_kinds, num_n)
        short_job += gl.num_programs(0)
    else:
        if g < groups:
            t = _number(job, g, before, kinds, num_n)
            job += gl.num_programs(0)
    return t, job, g, before, kinds, short_job, short_g, short_before, short_kinds


@gluon.jit
def _tile(tiles, t, num_n):
    """(expert, first row, end row, column tile) of a tile's number."""
    at = tiles + t // num_n * 4
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), t % num_n


@gluon.jit
def _token_rows(x, order, first, end, stride, TOP_K: gl.constexpr, layout: gl.constexpr):
    """To the first columns of the tokens of 64 rows. Those past the end repeat the last: always of this expert, never stored."""
    rows = gl.minimum(first + gl.arange(0, 64, gl.SliceLayout(1, layout)), end - 1)
    token = gl.load(order + rows) // TOP_K
    return x + (token.to(gl.int64)[:, None] * stride + gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :])


@gluon.jit
def _weights(w, e, n, k, HALVES: gl.constexpr, T: gl.constexpr):
    """Where TMA finds a stage's block of an expert's matrix."""
    if HALVES:
        return (e, 0, n * 128, k)
    elif T:
        return (e, k, n * 256)
    else:
        return (e, n * 256, k)


@gluon.jit
def _producer(
    a, w, order, tiles, a_s, b_s, full, mail, posted, taken, N, K, stride, TOP_K: gl.constexpr, T: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = b_s.type.shape[0]
    THREADS: gl.constexpr = 256 + 32 * WARPS
    HALVES: gl.constexpr = len(w.block_shape) == 4
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    column = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    if order is not None:  # multiples of 8, where the compiler only knows of 16
        K = K // 8 * 8
        stride = stride // 8 * 8
    num_m = gl.load(tiles + 3)
    num_n = gl.cdiv(N, 128 if HALVES else 256)
    # This program's next tile of each kind: its number among those, its group, how many come before that, and the group's kinds.
    job = gl.program_id(0)
    short_job = gl.num_programs(0) - 1 - job
    g = 0
    short_g = 0
    before = 0
    short_before = 0
    kinds = _kinds(tiles, 0, num_m, False, WARPS)
    short_kinds = _kinds(tiles, 0, num_m, True, WARPS)
    stage = 0
    loaded = 0
    slot = 0
    phase = 0
    t = 0
    while t >= 0:
        t, job, g, before, kinds, short_job, short_g, short_before, short_kinds = _next(
            tiles, job, g, before, kinds, short_job, short_g, short_before, short_kinds, num_m, num_n, WARPS
        )  # fmt: skip
        _post(mail, posted, taken, slot, phase, t, WARPS)
        if t >= 0:
            slot, phase = next_stage(slot, phase, 2)
            e, first, end, n = _tile(tiles, t, num_n)
            two = end - first > 64
            if order is not None:
                lower = _token_rows(a, order, first, end, stride, TOP_K, layout)
                upper = _token_rows(a, order, first + 64, end, stride, TOP_K, layout)
            for k in range(0, K, 64):
                if loaded >= STAGES:
                    bar_sync(8 + stage, THREADS)
                at = full.index(stage)
                if order is not None:
                    mbarrier.expect(at, w.block_type.nbytes)
                    tma_load(w, _weights(w, e, n, k, HALVES, T), at, b_s.index(stage))
                    copy_rows(a_s.index(stage * 2), lower + k, column < K - k)
                    if two:
                        copy_rows(a_s.index(stage * 2 + 1), upper + k, column < K - k)
                    copy_rows_arrive(at)
                else:
                    if two:
                        mbarrier.expect(at, w.block_type.nbytes + 2 * a.block_type.nbytes)
                        tma_load(a, (first + 64, k), at, a_s.index(stage * 2 + 1))
                    else:
                        mbarrier.expect(at, w.block_type.nbytes + a.block_type.nbytes)
                    tma_load(a, (first, k), at, a_s.index(stage * 2))
                    tma_load(w, _weights(w, e, n, k, HALVES, T), at, b_s.index(stage))
                loaded += 1
                stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    # Take the last arrivals, so that no named barrier is left half full.
    for c in gl.static_range(STAGES):
        if loaded > c:
            bar_sync(8 + c, THREADS)


# ---- the consumers -----------------------------------------------------------------------------------------------------------


@gluon.jit
def _receive(mail, posted, taken, slot, phase):
    """The number that was posted."""
    mbarrier.wait(posted.index(slot), phase)
    t = gl.max(mail.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(taken.index(slot), count=1)
    return t


@gluon.jit
def _multiply(CID: gl.constexpr, a_s, b_s, full, stage, phase, acc, begun, GATHERED: gl.constexpr, T: gl.constexpr):
    """Issue a stage's products once it is there."""
    mbarrier.wait(full.index(stage), phase)
    if GATHERED:
        fence_async_shared()  # cp.async writes as a thread does, wgmma reads as TMA does
    if T:
        b = b_s.index(stage).reshape([64, 256])
    else:
        b = b_s.index(stage).reshape([256, 64]).permute((1, 0))
    return warpgroup_mma(a_s.index(stage * 2 + CID), b, acc, use_acc=begun, is_async=True)


@gluon.jit
def _product(
    CID: gl.constexpr, a_s, b_s, full, stage, phase, steps, GATHERED: gl.constexpr, T: gl.constexpr, THREADS: gl.constexpr
):  # fmt: skip
    """[64, 256] of a tile, and the stage and phase after it. One product is under way while the next one is waited for."""
    STAGES: gl.constexpr = b_s.type.shape[0]
    acc = gl.zeros([64, 256], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
    acc = warpgroup_mma_wait(1, deps=(_multiply(CID, a_s, b_s, full, stage, phase, acc, False, GATHERED, T),))
    last = stage
    stage, phase = next_stage(stage, phase, STAGES)
    for _ in range(1, steps):
        acc = warpgroup_mma_wait(1, deps=(_multiply(CID, a_s, b_s, full, stage, phase, acc, True, GATHERED, T),))
        bar_arrive(8 + last, THREADS)
        last = stage
        stage, phase = next_stage(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    bar_arrive(8 + last, THREADS)
    return acc, stage, phase


@gluon.jit
def _pass_over(full, stage, phase, steps, STAGES: gl.constexpr, THREADS: gl.constexpr):
    """Give back the stages of a tile unread; the stage and phase after it."""
    for _ in range(steps):
        mbarrier.wait(full.index(stage), phase)
        bar_arrive(8 + stage, THREADS)
        stage, phase = next_stage(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _quarters(acc):
    """The columns of acc [64, 256] in four tiles: what one thread holds stays its own."""
    left, right = acc.reshape([64, 2, 128]).permute([0, 2, 1]).split()
    one, two = left.reshape([64, 2, 64]).permute([0, 2, 1]).split()
    three, four = right.reshape([64, 2, 64]).permute([0, 2, 1]).split()
    return one, two, three, four


@gluon.jit
def _plus_bias(value, bias, column, N):
    if bias is not None:
        columns = column + gl.arange(0, 64, gl.SliceLayout(0, value.type.layout))
        value += gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
    return value


@gluon.jit
def _store(to, stride, value, row, column, end, N):
    """value [64, 64] to rows and columns from these on of N columns of a matrix. Four threads that share a row exchange what they
    hold, so that each has 16 bytes of it."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
    value = gl.convert_layout(value.to(to.dtype.element_ty), layout)
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, 64, gl.SliceLayout(0, layout))
    at = to + (rows.to(gl.int64)[:, None] * stride + columns[None, :])
    gl.store(at, value, mask=(rows < end)[:, None] & (columns < N)[None, :])


@gluon.jit
def _consumer(
    CID: gl.constexpr, bias, tiles, a_s, b_s, full, mail, posted, taken, out, saved, N, K, alpha, limit, ACT: gl.constexpr,
    GATHERED: gl.constexpr, T: gl.constexpr, HALVES: gl.constexpr, THREADS: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = b_s.type.shape[0]
    N = N // 8 * 8  # a multiple of 8, where the compiler only knows of 16
    num_n = gl.cdiv(N, 128 if HALVES else 256)
    steps = gl.cdiv(K, 64)
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    t = _receive(mail, posted, taken, slot, slot_phase)
    while t >= 0:
        slot, slot_phase = next_stage(slot, slot_phase, 2)
        e, first, end, n = _tile(tiles, t, num_n)
        row = first + CID * 64
        if row < end:
            acc, stage, phase = _product(CID, a_s, b_s, full, stage, phase, steps, GATHERED, T, THREADS)
            pieces = _quarters(acc)
            at = bias
            if bias is not None:
                at += e * (2 * N if HALVES else N)
            if HALVES:
                for i in gl.static_range(2):
                    column = n * 128 + i * 64
                    gate = _plus_bias(pieces[i], at, column, N)
                    up = _plus_bias(pieces[2 + i], at + N if bias is not None else at, column, N)
                    if saved is not None:
                        _store(saved, 2 * N, gate, row, column, end, N)
                        _store(saved + N, 2 * N, up, row, column, end, N)
                    if out is not None:
                        _store(out, N, gated(gate, up, alpha, limit, ACT), row, column, end, N)
            else:
                for i in gl.static_range(4):
                    column = n * 256 + i * 64
                    _store(out, N, _plus_bias(pieces[i], at, column, N), row, column, end, N)
        else:
            stage, phase = _pass_over(full, stage, phase, steps, STAGES, THREADS)
        t = _receive(mail, posted, taken, slot, slot_phase)


@gluon.jit
def _run(
    a, w, bias, order, tiles, out, saved, N, K, stride, alpha, limit, TOP_K: gl.constexpr, ACT: gl.constexpr, T: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """a: x and how far its tokens lie apart, where there is an order, else a descriptor of rows. Of gate_up w's blocks have four
    axes: `experts 2 ffn hidden`; else `experts N K` or, with T, `experts K N`. WARPS: of the producer."""
    GATHERED: gl.constexpr = order is not None
    HALVES: gl.constexpr = len(w.block_shape) == 4
    THREADS: gl.constexpr = 256 + 32 * WARPS
    a_s = gl.allocate_shared_memory(w.dtype, [2 * STAGES, 64, 64], gl.NVMMASharedLayout(128, 16, 2))
    b_s = gl.allocate_shared_memory(w.dtype, [STAGES] + w.block_shape, w.layout)
    mail = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = allocate_barriers(STAGES, 1 + (32 * WARPS if GATHERED else 0))
    posted = allocate_barriers(2, 1)
    taken = allocate_barriers(2, 2)
    gl.warp_specialize(
        [
            (_consumer, (0, bias, tiles, a_s, b_s, full, mail, posted, taken, out, saved, N, K, alpha, limit, ACT, GATHERED, T,
                         HALVES, THREADS)),
            (_consumer, (1, bias, tiles, a_s, b_s, full, mail, posted, taken, out, saved, N, K, alpha, limit, ACT, GATHERED, T,
                         HALVES, THREADS)),
            (_producer, (a, w, order, tiles, a_s, b_s, full, mail, posted, taken, N, K, stride, TOP_K, T, WARPS)),
        ],
        [4, WARPS],
        [216, 72] if GATHERED else [232, 40],
    )  # fmt: skip


@gluon.jit
def _gate_up_hopper_kernel(
    x, w, bias, order, tiles, h, saved, N, K, stride, alpha, limit, TOP_K: gl.constexpr, ACT: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    _run(x, w, bias, order, tiles, h, saved, N, K, stride, alpha, limit, TOP_K, ACT, False, STAGES, 4)


@gluon.jit
def _rows_hopper_kernel(a, w, bias, tiles, y, N, K, T: gl.constexpr, STAGES: gl.constexpr):
    _run(a, w, bias, None, tiles, y, None, N, K, None, None, None, 1, "", T, STAGES, 1)


# ---- the host ----------------------------------------------------------------------------------------------------------------


def fits(c: _moe.Config, target: Target, sizes: Sizes, k: int, n: int, columns: int, *operands: Tensor) -> bool:
    """Whether these kernels take products of these operands with k columns and n results a row, in tiles of so many of them; and
    are the quicker. A short tile comes at another time than its expert's others, and where the tiles between them are many the
    weights have left L2 by then, which few tokens feel: H200, 2026-12-01, E8 H4096 I14336 with 512 tokens 1.10 ms, 0.97 by the
    portable kernels; 4.79 and 4.94 with 4096."""
    if not (c.hopper and c.tma and target.capability == 90 and not target.broken and AVAILABLE):
        return False
    if cdiv(n, columns) > 12 and sizes["rows"] < 512 * sizes["experts"]:
        return False
    return operands[0].element_size() == 2 and k > 0 and k % 8 == 0 and n % 8 == 0 and tma_ready(*operands)


def _start(kernel: Any, sizes: Sizes, columns: int, target: Target, operands: Sequence[Any], **constexprs: Any) -> None:
    """columns: tiles of them."""
    options = {**constexprs, "STAGES": STAGES, "num_warps": 4, "maxnreg": 168}
    _launch(kernel, (min(sizes["max_tiles"] * columns, target.sms),), operands, options)


def gate_up_hopper_launch(x: Tensor, w: Tensor, h: Tensor | None, saved: Tensor | None, args: Args, sizes: Sizes) -> None:
    """gate_up_launch of what fits()."""
    n, k, bias = sizes["ffn"], sizes["hidden"], args["gate_up_bias"]
    blocks = descriptor(w.unflatten(1, (2, n)), [1, 2, COLUMNS // 2, STEP])
    _start(
        _gate_up_hopper_kernel, sizes, cdiv(n, COLUMNS // 2), target_of(x.device),
        (x, blocks, None if bias is None else bias.contiguous(), args["order"], args["tiles"], h, saved, n, k, x.stride(0),
         *_moe.clamp_numbers(args)),
        TOP_K=sizes["top_k"], ACT=args["activation"],
    )  # fmt: skip


def rows_hopper_launch(a: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, args: Args, sizes: Sizes, by_columns: bool) -> None:
    """rows_launch, likewise."""
    n, k = (w.shape[2], w.shape[1]) if by_columns else w.shape[1:]
    blocks = descriptor(w, [1, STEP, COLUMNS] if by_columns else [1, COLUMNS, STEP])
    _start(
        _rows_hopper_kernel, sizes, cdiv(n, COLUMNS), target_of(a.device),
        (descriptor(a, [ROWS, STEP]), blocks, None if bias is None else bias.contiguous(), args["tiles"], y, n, k),
        T=by_columns,
    )  # fmt: skip

"""Softmax attention, backward, on sm_90 in Gluon: the form of FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608).

    p = exp(scale * q @ k^T - lse)     delta = sum(out * grad_out, head_dim)     ds = p * (grad_out @ v^T - delta)
    grad_q = scale * ds @ k            grad_k = scale * ds^T @ q                 grad_v = p^T @ grad_out
    grad_sinks = -sum(exp(sink - lse) * delta, batch seq)

With softcap logits x become c(x) = softcap * tanh(x / softcap), and ds takes the factor c'(x) = 1 - tanh(x / softcap)^2.

Axes, dtypes and what a query sees as in attention_hopper.py; here context may be shorter than seq, and sequences may be packed.
grad_k and grad_v are summed over the heads of a group in registers; grad_q is summed over key tiles in memory, in an order that
varies: not deterministic, where attention_backward.py is. 5 products.

Launches: with packed sequences the tables of their tiles; prepare (delta, lse in base 2, a zeroed fp32 buffer for grad_q), the
products, finish (grad_q in its dtype), and with sinks their sums. HBM, in elements: prepare reads out, grad_out and lse; the
products read all inputs and add to the buffer; finish reads it; the sums of the sinks read delta and lse.

With head_dim 64 and 128 one program owns 128 keys of one kv head, and walks the 64-row query tiles of the heads of its group.
Roles: two consumers (warpgroups) of 64 keys each, a producer warp, and with head_dim 128 a warp that adds finished tiles of
grad_q to memory by TMA. Logits are held transposed, so that p^T and ds^T are register operands for grad_v and grad_k; ds^T goes
through shared memory for grad_q, of which each consumer makes one half of head_dim. Order of issue in block j, so that a product
is always in flight:
dP(j) | exponentials | grad_v(j) | ds | grad_k(j) | barrier | grad_q(j) | S(j+1) | pass grad_q(j) on | wait for S(j+1).
With head_dim 192 (v_dim 128) and 256 the consumers share 64 keys (_attention_hopper_wide.py); not measured yet.

With a block map (`1|batch 1|heads q_blocks k_blocks`, blocks of 128 by 128; not with packed sequences) a program walks a list of
tiles instead, over all heads of its group, and the longest lists begin first (_hopper_map.py); not measured yet.

Tiles of queries that see none of the keys are left out, and a tile is masked only where an edge crosses it. TMA copies of packed
sequences end with their segment (_gluon.descriptor, ragged), so what lies behind it reaches nothing.

Measured on an H200, 2026-11: S(j+1) issued in block j, 4 to 9 %; adds straight from registers, 9 % at head_dim 64 and -9 % at
128; a mask branch that is never taken without causal keeps ptxas from mixing exponentials into the issue of dP, 5 to 7 %.
Not measured yet: the mask by threads and registers and the branch around the first S, which took ptxas from 248 and 136 bytes of
spills at head_dim 128 to 16 and 8, with 15 % and 2 % fewer instructions in the loops.
The buffer for grad_q is in the order of the consumers' registers, which makes its stores and adds contiguous; finish undoes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _hopper_map
from ._attention_hopper_parts import (
    ROWS,
    _finish_kernel,
    _prepare_kernel,
    _sinks_kernel,
    add_part,
    at_edge,
    begun,
    bounds,
    buffer_axes,
    first_half,
    further,
    in_fours,
    keys_of,
    landed,
    masked,
    tanh,
)
from ._attention_hopper_wide import wide_consumer
from ._attention_tiles import LOG2E, schedule
from ._gluon import (
    allocate_barriers,
    bar_sync,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    hold,
    mbarrier,
    one_less_square,
    tma_add,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ._hopper_schedule import corner_of
from ._lang import cdiv
from ._launch import launch as _launch
from ._launch import on_device

STAGES = 2
# head_dim -> columns of the first of two products for dP, of which the second is issued under the exponentials; other head_dims
# have one product. H200, 2026-11-30: 1 to 3 % faster at 128, 3 % slower with {64: 32}; with a softcap, where it spills, 6 %.
PARTS = {128: 64}


# Named barrier 8: both consumers have written their halves of ds.


@gluon.jit
def _producer(
    WALL: gl.constexpr, PACKED: gl.constexpr, q2, k2, q2_s, k2_s, lists, q, k, v, grad_out, stats, q_s, k_s, v_s, g_s, stats_s,
    kv_full, q_full, g_full, empty, kv, key, first, end, blocks, seq, context, q_start, k_start, base, TILES, KV_HEADS, GROUP,
):  # fmt: skip
    STAGES: gl.constexpr = q_s.type.shape[0]
    b = kv // KV_HEADS
    kv_head = kv - b * KV_HEADS
    KEYS: gl.constexpr = k_s.type.shape[0]
    mbarrier.expect(kv_full.index(0), KEYS * (k.block_type.nbytes + (k2.block_type.nbytes if k2 is not None else 0)))
    for c in gl.static_range(KEYS):
        tma_load(k, corner_of(b, k_start, context, key + c * 64, kv_head, 0, PACKED), kv_full.index(0), k_s.index(c))
        if k2 is not None:
            tma_load(k2, corner_of(b, k_start, context, key + c * 64, kv_head, 128, PACKED), kv_full.index(0), k2_s.index(c))
    mbarrier.expect(kv_full.index(1), KEYS * v.block_type.nbytes)
    for c in gl.static_range(KEYS):
        tma_load(v, corner_of(b, k_start, context, key + c * 64, kv_head, 0, PACKED), kv_full.index(1), v_s.index(c))
    m, h = begun(lists, kv, first, end, TILES, GROUP, WALL)
    for i in range(blocks):
        stage = i % STAGES
        place = corner_of(b, q_start, seq, m * 64, h - b * KV_HEADS * GROUP, 0, PACKED)
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        more: gl.constexpr = q2.block_type.nbytes if q2 is not None else 0
        mbarrier.expect(q_full.index(stage), q.block_type.nbytes + more + stats.block_type.nbytes)
        tma_load(q, place, q_full.index(stage), q_s.index(stage))
        if q2 is not None:
            place2 = corner_of(b, q_start, seq, m * 64, h - b * KV_HEADS * GROUP, 128, PACKED)
            tma_load(q2, place2, q_full.index(stage), q2_s.index(stage))
        tma_load(stats, [(h * TILES + base + m) * 128], q_full.index(stage), stats_s.index(stage))
        mbarrier.expect(g_full.index(stage), grad_out.block_type.nbytes)
        tma_load(grad_out, place, g_full.index(stage), g_s.index(stage))
        m, h = further(lists, i + 1, m, h, kv, first, end, TILES, GROUP, WALL)


@gluon.jit
def _adder(sums, dq_s, dq_full, dq_empty, lists, kv, first, end, blocks, base, TILES, GROUP, WALL: gl.constexpr):
    m, h = begun(lists, kv, first, end, TILES, GROUP, WALL)
    for i in range(blocks):
        tile = h * TILES + base + m
        for c in gl.static_range(2):
            mbarrier.wait(dq_full.index(c), i & 1)
            tma_add(sums, [(tile * 2 + c) * dq_s.type.shape[1], 0], dq_s.index(c))
        tma_store_wait(1)
        mbarrier.arrive(dq_empty.index(0), count=1)
        tma_store_wait(0)
        mbarrier.arrive(dq_empty.index(1), count=1)
        m, h = further(lists, i + 1, m, h, kv, first, end, TILES, GROUP, WALL)


@gluon.jit
def _consumer(
    CID: gl.constexpr, D: gl.constexpr, PART: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PACKED: gl.constexpr,
    DIRECT: gl.constexpr, grad_k, grad_v, sums, cap, lists, q_s, k_s, v_s, g_s, stats_s, ds_s, dq_s, kv_full, q_full, g_full,
    empty, dq_full, dq_empty, kv, key, first, end, blocks, seq, context, left, right, k_start, base, gain, TILES, KV_HEADS,
    GROUP, scale, scale2,
):  # fmt: skip
    """PART: columns of the first product of dP; with less than D the rest is issued after half of the exponentials. DIRECT: add
    grad_q to memory from registers. gain: NaN for a segment that cannot be, else 1. Of grad_k, grad_v and sums
    those that are None are not made."""
    STAGES: gl.constexpr = q_s.type.shape[0]
    HALF: gl.constexpr = D // 2
    dtype: gl.constexpr = q_s.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    k = k_s.index(CID).reshape([64, D])
    v = v_s.index(CID).reshape([64, D])
    k_low = k_s.index(0).reshape([64, D]).slice(CID * HALF, HALF, 1)
    k_high = k_s.index(1).reshape([64, D]).slice(CID * HALF, HALF, 1)
    key += CID * 64
    dk = gl.zeros([64, D], gl.float32, acc_layout)
    dv = gl.zeros([64, D], gl.float32, acc_layout)
    low, high, limit = bounds(seq, context, key, left, right, LEFT, RIGHT)
    zero = gl.zeros([64, 64], gl.float32, s_layout)
    zero_dq = gl.zeros([64, HALF], gl.float32, dq_layout)
    mbarrier.wait(kv_full.index(0), 0)
    # Where nobody sees these keys there is nothing to wait for. Elsewhere the branch is for ptxas, which spills ten times as much
    # without it.
    s = zero
    if blocks > 0:
        mbarrier.wait(q_full.index(0), 0)
        s = warpgroup_mma(k, q_s.index(0).reshape([64, D]).permute((1, 0)), zero, use_acc=False)
    mbarrier.wait(kv_full.index(1), 0)
    m, h = begun(lists, kv, first, end, TILES, GROUP, LEFT or RIGHT > 0)
    for i in range(blocks):
        stage = i % STAGES
        qt = q_s.index(stage).reshape([64, D])
        gt = g_s.index(stage).reshape([64, D])
        mbarrier.wait(g_full.index(stage), (i // STAGES) & 1)
        gt_part = gt.slice(0, PART, 1).permute((1, 0))
        flying_dp = warpgroup_mma(v.slice(0, PART, 1), gt_part, zero, use_acc=False, is_async=True)
        past = m * 64
        edge = at_edge(low + past, high + past, limit, LEFT, RIGHT)
        if cap is not None:
            s = tanh(s * cap)
        if DIRECT or cap is not None:
            if edge:
                s = masked(s, low + past, high + past, limit, float("-inf"), LEFT, RIGHT)
        p = gl.exp2(s * scale2 - stats_s.index(stage).slice(0, 64).load(columns)[None, :])
        if PART < D:
            hold(first_half(p))
            gt_part = gt.slice(PART, PART, 1).permute((1, 0))
            flying_dp = warpgroup_mma(v.slice(PART, PART, 1), gt_part, flying_dp, is_async=True)
        if not DIRECT and cap is None:
            if edge:
                p = masked(p, low + past, high + past, limit, 0.0, LEFT, RIGHT)
        if grad_v is not None:
            dv = warpgroup_mma(gl.convert_layout(p.to(dtype), p_layout), gt, dv, is_async=True)
        if cap is not None:
            p = p * one_less_square(s)  # which is 0 where s is -inf
        dp = warpgroup_mma_wait(1 if grad_v is not None else 0, deps=(flying_dp,))
        dp = dp - stats_s.index(stage).slice(64, 64).load(columns)[None, :]
        ds = (p * dp).to(dtype)
        buffer = (i & 1) * 2
        if sums is not None:
            ds_s.index(buffer + CID).store(ds)
            fence_async_shared()
        if grad_k is not None:
            dk = warpgroup_mma(gl.convert_layout(ds, p_layout), qt, dk, is_async=True)
        if sums is not None:
            # Also: both consumers have finished grad_q of block i-1, whose buffer of ds the next block takes.
            bar_sync(8, 256)
            flying_dq = warpgroup_mma(ds_s.index(buffer).permute((1, 0)), k_low, zero_dq, use_acc=False, is_async=True)
            flying_dq = warpgroup_mma(ds_s.index(buffer + 1).permute((1, 0)), k_high, flying_dq, is_async=True)
        dv, dk = landed(2 if sums is not None else 0, dv, dk, grad_v, grad_k)
        following = gl.where(i + 1 < blocks, (i + 1) % STAGES, stage)
        mbarrier.wait(q_full.index(following), ((i + 1) // STAGES) & 1, pred=i + 1 < blocks)
        # After the last block this multiplies the same q again, and its result goes nowhere.
        flying_s = warpgroup_mma(k, q_s.index(following).reshape([64, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
        if sums is not None:
            dq = warpgroup_mma_wait(1, deps=(flying_dq,))
            if DIRECT:
                add_part(sums + ((h * TILES + base + m).to(gl.int64) * 2 + CID) * (32 * D), dq)
            else:
                mbarrier.wait(dq_empty.index(CID), (i & 1) ^ 1)
                dq_s.index(CID).store(in_fours(dq))
                fence_async_shared()
                mbarrier.arrive(dq_full.index(CID), count=1)
        mbarrier.arrive(empty.index(stage), count=1)
        # No wgmma may be in flight over the end of the loop: ptxas would make all of them wait for one another.
        s = warpgroup_mma_wait(0, deps=(flying_s,))
        m, h = further(lists, i + 1, m, h, kv, first, end, TILES, GROUP, LEFT or RIGHT > 0)
    # k and v become the buffers of grad_k and grad_v. Both consumers read all of k.
    bar_sync(8, 256)
    b = kv // KV_HEADS  # here, where no registers are short
    kv_head = kv - b * KV_HEADS
    if PACKED:
        dv *= gain
        scale *= gain
    if grad_v is not None:
        v.store(dv.to(dtype))
    if grad_k is not None:
        k.store((dk * scale).to(dtype))
    fence_async_shared()
    place = corner_of(b, k_start, context, key, kv_head, 0, PACKED)
    if grad_v is not None:
        tma_store(grad_v, place, v_s.index(CID))
    if grad_k is not None:
        tma_store(grad_k, place, k_s.index(CID))
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["seq", "context", "left", "right", "TILES", "KEY_TILES", "KV_HEADS", "GROUP", "CHUNK", "KV",
                              "list_b", "list_h"])  # fmt: skip
def _products_kernel(
    q, q2, k, k2, v, grad_out, stats, sums_by_tma, grad_k, grad_k2, grad_v, sums, schedule, scale, scale2, cap, seq, context,
    left, right, TILES, KEY_TILES, KV_HEADS, GROUP, CHUNK, KV, lists, list_b, list_h, order,
    D: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """RIGHT: 0 without a bound, 1 causal, 2 with any other. schedule: tiles of keys of packed sequences. scale2, cap: of base-2
    logits and None, or softcap * log2(e) and scale / softcap. Results that are None are not made. q2, k2, grad_k2: columns from
    128 on with head_dim 192, else None. lists, order: of a block map, what _hopper_map.py makes of it."""
    PACKED: gl.constexpr = schedule is not None
    WALL: gl.constexpr = LEFT or RIGHT > 0
    WIDE: gl.constexpr = D > 128
    KEYS: gl.constexpr = 1 if WIDE else 2  # of 64
    q_s = gl.allocate_shared_memory(q.dtype, [STAGES] + q.block_shape, q.layout)
    k_s = gl.allocate_shared_memory(k.dtype, [KEYS] + k.block_shape, k.layout)
    v_s = gl.allocate_shared_memory(v.dtype, [KEYS] + v.block_shape, v.layout)
    g_s = gl.allocate_shared_memory(q.dtype, [STAGES] + grad_out.block_shape, grad_out.layout)
    if q2 is None:
        q2_s: gl.constexpr = None
        k2_s: gl.constexpr = None
    else:
        q2_s = gl.allocate_shared_memory(q.dtype, [STAGES] + q2.block_shape, q2.layout)
        k2_s = gl.allocate_shared_memory(k.dtype, [KEYS] + k2.block_shape, k2.layout)
    ds_s = gl.allocate_shared_memory(q.dtype, [4, 64, 64], gl.NVMMASharedLayout(64 if WIDE else 128, 16, 2))
    dq_shape: gl.constexpr = [1, 1, 256] if DIRECT else [2, D // 8, 256]
    dq_s = gl.allocate_shared_memory(gl.float32, dq_shape, gl.NVMMASharedLayout(0, 32, 2))
    stats_s = gl.allocate_shared_memory(gl.float32, [STAGES, 128], stats.layout)
    kv_full = allocate_barriers(2, 1)
    dq_full = allocate_barriers(2, 1)
    dq_empty = allocate_barriers(2, 1)
    q_full = allocate_barriers(STAGES, 1)
    g_full = allocate_barriers(STAGES, 1)
    empty = allocate_barriers(STAGES, 2)
    # Chunks of CHUNK kv heads, whose grad_q stays in the L2; in a chunk the keys that most queries see come first.
    pid = gl.program_id(0)
    if order is not None:
        pid = gl.load(order + pid)
        kv = pid // KEY_TILES
        n = pid - kv * KEY_TILES
    else:
        chunk = pid // (CHUNK * KEY_TILES)
        rest = pid - chunk * CHUNK * KEY_TILES
        size = gl.minimum(CHUNK, KV - chunk * CHUNK)
        n = rest // size
        kv = chunk * CHUNK + rest - n * size
    # The tiles of a segment's queries are `base` and on of each head's TILES.
    base = 0
    q_start = 0
    k_start = 0
    gain = 1.0
    end = TILES
    key = n * (KEYS * 64)
    if PACKED:
        at = schedule + n * 6
        segment = gl.load(at)
        key = gl.load(at + 1) * (KEYS * 64)
        k_start = gl.load(at + 2)
        context = gl.load(at + 3)
        q_start = gl.load(at + 4)
        seq = gl.load(at + 5)
        base = q_start // 64 + segment
        gain = gl.where(segment < 0, float("nan"), 1.0)
        end = gl.where(key < context, gl.cdiv(seq, 64), 0)
    first = 0
    if RIGHT:
        first = gl.maximum(key - (context - seq) - (right if RIGHT == 2 else 0), 0) // 64
    if LEFT:
        end = gl.minimum(gl.cdiv(gl.maximum(key + KEYS * 64 - (context - seq) + left, 0), 64), end)
    if WALL:
        blocks = GROUP * (end - first)
        if LEFT or PACKED:
            blocks = gl.maximum(blocks, 0)
    else:
        blocks = GROUP * end
        if PACKED:
            first = gl.where(end > 0, (2 * n) % gl.maximum(end, 1), 0)
        else:
            first = (2 * n) % TILES
    if lists is not None:
        batch = kv // KV_HEADS
        most = GROUP * TILES
        lists += (batch * list_b + (kv - batch * KV_HEADS) * list_h + n).to(gl.int64) * (most + 1)
        blocks = gl.load(lists + most)
    # Constants and what may be None come before `+`: behind it triton makes plain numbers of them.
    loads = (q, k, v, grad_out, stats, q_s, k_s, v_s, g_s, stats_s, kv_full, q_full, g_full, empty, kv, key, first, end, blocks,
             seq, context, q_start, k_start, base, TILES, KV_HEADS, GROUP)  # fmt: skip
    shared = (q_s, k_s, v_s, g_s, stats_s, ds_s, dq_s, kv_full, q_full, g_full, empty, dq_full, dq_empty, kv, key, first, end,
              blocks, seq, context, left, right, k_start, base, gain, TILES, KV_HEADS, GROUP, scale, scale2)  # fmt: skip
    if WIDE:
        gl.warp_specialize([
            (wide_consumer, (0, D, LEFT, RIGHT, PACKED, grad_k, grad_k2, grad_v, sums, cap, q2_s, k2_s, lists) + shared),
            (wide_consumer, (1, D, LEFT, RIGHT, PACKED, grad_k, grad_k2, grad_v, sums, cap, q2_s, k2_s, lists) + shared),
            (_producer, (WALL, PACKED, q2, k2, q2_s, k2_s, lists) + loads),
        ], [4, 1], [240, 24])  # fmt: skip
    elif DIRECT:
        gl.warp_specialize([
            (_consumer, (0, D, PART, LEFT, RIGHT, PACKED, DIRECT, grad_k, grad_v, sums, cap, lists) + shared),
            (_consumer, (1, D, PART, LEFT, RIGHT, PACKED, DIRECT, grad_k, grad_v, sums, cap, lists) + shared),
            (_producer, (WALL, PACKED, q2, k2, q2_s, k2_s, lists) + loads),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (0, D, PART, LEFT, RIGHT, PACKED, DIRECT, grad_k, grad_v, sums, cap, lists) + shared),
            (_consumer, (1, D, PART, LEFT, RIGHT, PACKED, DIRECT, grad_k, grad_v, sums, cap, lists) + shared),
            (_producer, (WALL, PACKED, q2, k2, q2_s, k2_s, lists) + loads),
            (_adder, (sums_by_tma, dq_s, dq_full, dq_empty, lists, kv, first, end, blocks, base, TILES, GROUP, WALL)),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip


Buffers = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def _buffers(q: Tensor, k: Tensor, cu_seqlens: tuple[Tensor, Tensor] | None, need_q: bool) -> Buffers:
    """As launch takes them."""
    sizes = {"batch": q.shape[0], "seq": q.shape[1], "heads": q.shape[2], "head_dim": q.shape[3], "k_len": k.shape[1],
             "sequences": 0 if cu_seqlens is None else cu_seqlens[0].shape[0] - 1}  # fmt: skip
    n = buffer_axes(sizes, cu_seqlens is not None)
    plans = [torch.empty(n[f"{x}_slots"], n["columns"], dtype=torch.int32, device=q.device) if cu_seqlens is not None else None
             for x in "qk"]  # fmt: skip
    sums = torch.empty(n["sums_rows"], n["sums_columns"], dtype=torch.float32, device=q.device) if need_q else None
    return torch.empty(n["stats_numbers"], dtype=torch.float32, device=q.device), sums, plans[0], plans[1]


def launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, sinks: Tensor | None,
    cu_seqlens: tuple[Tensor, Tensor] | None, left: int, right: int, scale: float, softcap: float = 0.0,
    need_q: bool = True, need_k: bool = True, need_v: bool = True, need_sinks: bool = True,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None] | None = None, buffers: Buffers | None = None,
    block_map: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """grad_q, grad_k, grad_v and, where there are sinks, grad_sinks; None for each that is not needed.

    Arguments as attention_hopper.launch takes and gives them: q, k, v and grad_out with rows that TMA takes (_launch.tma_ready),
    out with a dense last axis, lse contiguous. cu_seqlens: boundaries of packed queries and keys, int32 `segments+1`, never read
    on the host. Rows that see nothing (lse -inf) give and get zeros, and so do tokens past the last boundary; boundaries that
    decrease or pass the tokens give NaN. block_map: not with cu_seqlens. grads: where the results go, None for each that is not
    needed; buffers: of buffer_axes, "stats_numbers" and (None unless need_q) "sums_rows sums_columns" in fp32, and (None but with
    cu_seqlens) "q_slots columns" and "k_slots columns" in int32; made here if None.
    """
    batch, seq, heads, head_dim = q.shape
    context, kv_heads = k.shape[1:3]
    v_dim = v.shape[-1]
    if grads is None:
        made = [torch.empty(t.shape, dtype=q.dtype, device=q.device) if need else None
                for t, need in ((q, need_q), (k, need_k), (v, need_v))]  # fmt: skip
        grads = made[0], made[1], made[2], torch.empty_like(sinks) if sinks is not None and need_sinks else None
    stats, sums, q_plan, k_plan = _buffers(q, k, cu_seqlens, need_q) if buffers is None else buffers
    keys = keys_of(head_dim)
    tiles, key_tiles = cdiv(seq, ROWS), cdiv(context, keys)
    if q_plan is not None and k_plan is not None:
        tiles, key_tiles = q_plan.shape[0], k_plan.shape[0]
    every = batch * heads * tiles
    direct = head_dim != 128 or not need_q
    # Kv heads of a chunk. H200, 2026-11-30, causal, ms with 2 / 4 / 8 / 16: D128 B8 S2048 1.60 1.56 1.48 1.48, B2 S8192 4.93 5.00
    # 5.18 5.29, B1 S16384 9.85 9.97 10.12; D64 B4 S4096 1.69 1.53 1.54 1.54. Tiles from first to last: 1 to 5 % slower.
    # Full, where programs go in step, 2 lose 3 % to 4.
    chunk = 8 if head_dim == 64 or seq <= 4096 else 2 if max(left, right) >= 0 else 4
    shape = (seq, heads, tiles)
    options: dict[str, Any] = {"D": head_dim, "num_warps": 4}
    blank = cu_seqlens is not None or block_map is not None or (right >= 0 and context < seq)
    walks: tuple[Any, ...] = (None, None, None, None)
    ragged = cu_seqlens is not None
    with on_device(q):
        if cu_seqlens is not None and q_plan is not None and k_plan is not None:
            cu_q, cu_k = cu_seqlens
            schedule(cu_q, cu_k, None, seq, context, ROWS, q_plan)
            schedule(cu_k, cu_q, None, context, seq, keys, k_plan)
        _launch(
            _prepare_kernel, (every,),
            (out, grad_out, lse, stats, sums, q_plan, *shape, *out.stride()[:3], *grad_out.stride()[:3]),
            {"V": v_dim, "BLANK": blank, **options},
        )  # fmt: skip
        if need_q or need_k or need_v:
            width, more = (128, 64) if head_dim == 192 else (head_dim, 0)
            loads, stores = (
                [descriptor(t, [1, ROWS, 1, n], ragged=ragged) if t is not None and n else None for t, n in pairs]
                for pairs in (
                    ((q, width), (q, more), (k, width), (k, more), (v, v_dim), (grad_out, v_dim)),
                    ((grads[1], width), (grads[1], more), (grads[2], v_dim)),
                )
            )
            if block_map is not None:
                group = heads // kv_heads
                lists = _hopper_map.queries_of_keys(block_map, ROWS, keys, seq, context, left, right, group)
                walks = lists, *_hopper_map.steps(lists), _hopper_map.order(lists, batch, kv_heads, chunk)
            by_tma = None if direct or sums is None else descriptor(sums, [head_dim // 8, 256], swizzle=False)
            _launch(
                _products_kernel, (batch * kv_heads * key_tiles,),
                (*loads, descriptor(stats, [2 * ROWS], swizzle=False), by_tma, *stores, sums, k_plan, scale,
                 (softcap or scale) * LOG2E, scale / softcap if softcap else None, seq, context, left, right, tiles, key_tiles,
                 kv_heads, heads // kv_heads, chunk, batch * kv_heads, *walks),
                {"PART": head_dim if softcap else PARTS.get(head_dim, head_dim), "STAGES": STAGES, "LEFT": left >= 0,
                 "RIGHT": min(right + 1, 2), "DIRECT": direct, **options, "maxnreg": 168},
            )  # fmt: skip
        if need_q:
            _launch(_finish_kernel, (every,), (sums, grads[0], q_plan, scale, *shape), options)
        if grads[3] is not None:
            _launch(_sinks_kernel, (heads,), (stats, sinks, grads[3], batch, heads, tiles), {"N": 16, "num_warps": 4})
    return grads

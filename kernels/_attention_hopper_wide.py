"""The consumer of attention_hopper_backward.py for wide heads: head_dim 256, and 192 with v_dim 128."""

from __future__ import annotations

from ._attention_hopper_parts import add_part, at_edge, begun, bounds, further, landed, masked, tanh
from ._gluon import (
    bar_sync,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    one_less_square,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ._hopper_schedule import corner_of


@gluon.jit
def _scores(CID: gl.constexpr, k, k2_s, q_s, q2_s, stage, zero):
    """Issue S of 32 queries of a stage."""
    rows = q_s.index(stage).reshape([64, q_s.type.shape[-1]]).slice(CID * 32, 32, 0)
    flying = warpgroup_mma(k, rows.permute((1, 0)), zero, use_acc=False, is_async=True)
    if q2_s is not None:
        rows = q2_s.index(stage).reshape([64, 64]).slice(CID * 32, 32, 0)
        flying = warpgroup_mma(k2_s.index(0).reshape([64, 64]), rows.permute((1, 0)), flying, is_async=True)
    return flying


@gluon.jit
def wide_consumer(
    CID: gl.constexpr, D: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PACKED: gl.constexpr, grad_k, grad_k2,
    grad_v, sums, cap, q2_s, k2_s, lists, q_s, k_s, v_s, g_s, stats_s, ds_s, dq_s, kv_full, q_full, g_full, empty, dq_full,
    dq_empty, kv, key, first, end, blocks, seq, context, left, right, k_start, base, gain, TILES, KV_HEADS, GROUP, scale, scale2,
):  # fmt: skip
    """Heads of which grad_k and grad_v of 64 keys would fill the registers: both consumers have the same 64 keys, of S and dP
    each makes 32 queries, and of all gradients one half of the columns. p^T and ds^T go through shared memory. With head_dim 192
    (q2_s, k2_s, grad_k2) q, k and their gradients are 128 columns and 64 more, and each consumer has one half of either.

    grad_q comes first and S(j+1) last, after the sums of grad_q have left their registers: ptxas spills half as much."""
    STAGES: gl.constexpr = q_s.type.shape[0]
    WIDTH: gl.constexpr = q_s.type.shape[-1]
    HALF: gl.constexpr = WIDTH // 2
    V: gl.constexpr = v_s.type.shape[-1]
    dtype: gl.constexpr = q_s.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    v_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V // 2, 16])
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    k = k_s.index(0).reshape([64, WIDTH])
    v = v_s.index(0).reshape([64, V])
    k_half = k.slice(CID * HALF, HALF, 1)
    dk = gl.zeros([64, HALF], gl.float32, acc_layout)
    dv = gl.zeros([64, V // 2], gl.float32, v_layout)
    if q2_s is not None:
        k2_half = k2_s.index(0).reshape([64, 64]).slice(CID * 32, 32, 1)
        dk2 = gl.zeros([64, 32], gl.float32, s_layout)
    low, high, limit = bounds(seq, context, key, left, right, LEFT, RIGHT)
    zero = gl.zeros([64, 32], gl.float32, s_layout)
    zero_dq = gl.zeros([64, HALF], gl.float32, acc_layout)
    mbarrier.wait(kv_full.index(0), 0)
    s = zero
    if blocks > 0:
        mbarrier.wait(q_full.index(0), 0)
        s = warpgroup_mma_wait(0, deps=(_scores(CID, k, k2_s, q_s, q2_s, 0, zero),))
    mbarrier.wait(kv_full.index(1), 0)
    m, h = begun(lists, kv, first, end, TILES, GROUP, LEFT or RIGHT > 0)
    for i in range(blocks):
        stage = i % STAGES
        qt = q_s.index(stage).reshape([64, WIDTH])
        gt = g_s.index(stage).reshape([64, V])
        mbarrier.wait(g_full.index(stage), (i // STAGES) & 1)
        flying_dp = warpgroup_mma(v, gt.slice(CID * 32, 32, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
        if cap is not None:
            s = tanh(s * cap)
        p = gl.exp2(s * scale2 - stats_s.index(stage).slice(CID * 32, 32).load(columns)[None, :])
        past = m * 64
        if at_edge(low + past, high + past, limit, LEFT, RIGHT):
            p = masked(p, low + past + CID * 32, high + past + CID * 32, limit, 0.0, LEFT, RIGHT)
        buffer = (i & 1) * 2
        if grad_v is not None:
            ds_s.index(buffer).slice(CID * 32, 32, 1).store(p.to(dtype))
        if cap is not None:
            p = p * one_less_square(s)
        dp = warpgroup_mma_wait(0, deps=(flying_dp,))
        dp = dp - stats_s.index(stage).slice(64 + CID * 32, 32).load(columns)[None, :]
        ds_s.index(buffer + 1).slice(CID * 32, 32, 1).store((p * dp).to(dtype))
        fence_async_shared()
        # Also: both consumers have finished the products of block i-1, whose buffers the next block takes.
        bar_sync(8, 256)
        if sums is not None:
            flying_dq = warpgroup_mma(ds_s.index(buffer + 1).permute((1, 0)), k_half, zero_dq, use_acc=False, is_async=True)
            if q2_s is not None:
                flying_dq2 = warpgroup_mma(ds_s.index(buffer + 1).permute((1, 0)), k2_half, zero, use_acc=False, is_async=True)
        if grad_v is not None:
            dv = warpgroup_mma(ds_s.index(buffer), gt.slice(CID * (V // 2), V // 2, 1), dv, is_async=True)
        if grad_k is not None:
            dk = warpgroup_mma(ds_s.index(buffer + 1), qt.slice(CID * HALF, HALF, 1), dk, is_async=True)
            if q2_s is not None:
                q2t = q2_s.index(stage).reshape([64, 64])
                dk2 = warpgroup_mma(ds_s.index(buffer + 1), q2t.slice(CID * 32, 32, 1), dk2, is_async=True)
        if sums is not None:
            tile = (h * TILES + base + m).to(gl.int64)
            younger: gl.constexpr = (grad_v is not None) + (grad_k is not None) + (grad_k2 is not None)
            if q2_s is None:
                dq = warpgroup_mma_wait(younger, deps=(flying_dq,))
                add_part(sums + (tile * 2 + CID) * (32 * D), dq)
            else:
                dq, dq2 = warpgroup_mma_wait(younger, deps=(flying_dq, flying_dq2))
                add_part(sums + tile * (64 * D) + CID * (64 * HALF), dq)
                add_part(sums + tile * (64 * D) + 64 * WIDTH + CID * (64 * 32), dq2)
        following = gl.where(i + 1 < blocks, (i + 1) % STAGES, stage)
        mbarrier.wait(q_full.index(following), ((i + 1) // STAGES) & 1, pred=i + 1 < blocks)
        flying_s = _scores(CID, k, k2_s, q_s, q2_s, following, zero)
        dv, dk = landed(1 if q2_s is None else 2, dv, dk, grad_v, grad_k)
        if grad_k2 is not None:
            dk2 = warpgroup_mma_wait(2, deps=(dk2,))
        mbarrier.arrive(empty.index(stage), count=1)
        s = warpgroup_mma_wait(0, deps=(flying_s,))
        m, h = further(lists, i + 1, m, h, kv, first, end, TILES, GROUP, LEFT or RIGHT > 0)
    bar_sync(8, 256)  # both consumers read all of k and v
    b = kv // KV_HEADS
    place = corner_of(b, k_start, context, key, kv - b * KV_HEADS, 0, PACKED)
    if PACKED:
        dv *= gain
        scale *= gain
    if grad_v is not None:
        v.slice(CID * (V // 2), V // 2, 1).store(dv.to(dtype))
    if grad_k is not None:
        k_half.store((dk * scale).to(dtype))
    if grad_k2 is not None:
        k2_half.store((dk2 * scale).to(dtype))
    fence_async_shared()
    bar_sync(8, 256)  # both have written their halves
    if CID == 0 and grad_v is not None:
        tma_store(grad_v, place, v_s.index(0))
    if CID == 1 and grad_k is not None:
        tma_store(grad_k, place, k_s.index(0))
    if CID == 1 and grad_k2 is not None:
        place = corner_of(b, k_start, context, key, kv - b * KV_HEADS, 128, PACKED)
        tma_store(grad_k2, place, k2_s.index(0))
    tma_store_wait(0)

"""Softmax attention, backward, on sm_90 in Gluon: the form of FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608).

    p = exp(scale * q @ k^T - lse)     delta = sum(out * grad_out, head_dim)     ds = p * (grad_out @ v^T - delta)
    grad_q = scale * ds @ k            grad_k = scale * ds^T @ q                 grad_v = p^T @ grad_out

Axes, dtypes and what a query sees as in attention_hopper.py. grad_k and grad_v are summed over the heads of a group in registers;
grad_q is summed over key tiles in memory, in an order that varies: not deterministic, where attention_backward.py is. 5 products.

Launches: prepare (delta, lse in base 2, a zeroed fp32 buffer for grad_q), the products, finish (grad_q in its dtype). HBM, in
elements: prepare reads out, grad_out and lse; the products read all inputs and add to the buffer; finish reads it.

One program owns 128 keys of one kv head, and walks the 64-row query tiles of the heads of its group. Roles: two consumers
(warpgroups) of 64 keys each, a producer warp, and with head_dim 128 a warp that adds finished tiles of grad_q to memory by TMA.
Logits are held transposed, so that p^T and ds^T are register operands for grad_v and grad_k; ds^T goes through shared memory for
grad_q, of which each consumer makes one half of head_dim. Order of issue in block j, so that a product is always in flight:
dP(j) | exponentials | grad_v(j) | ds | grad_k(j) | barrier | grad_q(j) | S(j+1) | pass grad_q(j) on | wait for S(j+1).

Measured on an H200, 2026-11: S(j+1) issued in block j, 4 to 9 %; adds straight from registers, 9 % at head_dim 64 and -9 % at
128; a mask branch that is never taken without causal keeps ptxas from mixing exponentials into the issue of dP, 5 to 7 %.
The buffer for grad_q is in the order of the consumers' registers, which makes its stores and adds contiguous; finish undoes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._attention_tiles import LOG2E
from ._gluon import (
    add_four,
    allocate_barriers,
    bar_sync,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_add,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ._lang import cdiv, tl, triton
from ._launch import launch as _launch
from ._launch import on_device

ROWS = 64  # queries of a tile, and keys of a consumer
STAGES = 2


@triton.jit
def _prepare_kernel(
    out, grad_out, lse, stats, sums, SEQ, HEADS, TILES,
    stride_ob, stride_os, stride_oh, stride_gb, stride_gs, stride_gh, D: tl.constexpr,
):  # fmt: skip
    """stats: per tile of 64 queries their lse in base 2, +inf past the end, then their delta."""
    pid = tl.program_id(0).to(tl.int64)
    bh = pid // TILES
    rows = (pid - bh * TILES) * 64 + tl.arange(0, 64)
    b = bh // HEADS
    h = bh - b * HEADS
    d = tl.arange(0, D)
    inside = rows < SEQ
    o = tl.load(out + b * stride_ob + h * stride_oh + rows[:, None] * stride_os + d[None, :], inside[:, None], other=0.0)
    g = tl.load(grad_out + b * stride_gb + h * stride_gh + rows[:, None] * stride_gs + d[None, :], inside[:, None], other=0.0)
    i = tl.arange(0, 64)
    shift = tl.load(lse + bh * SEQ + rows, inside, other=float("inf")) * 1.4426950408889634
    tl.store(stats + pid * 128 + i, shift)
    tl.store(stats + pid * 128 + 64 + i, tl.sum(o.to(tl.float32) * g.to(tl.float32), 1))
    tl.store(sums + pid * 64 * D + i[:, None] * D + d[None, :], tl.zeros([64, D], tl.float32))


@triton.jit
def _finish_kernel(sums, grad_q, scale, SEQ, HEADS, TILES, D: tl.constexpr):
    """grad_q "batch seq heads head_dim" of the tiles in register order: [half, column / 8, warp, row % 8, column / 2 % 4, row / 8
    % 2, column % 2]."""
    pid = tl.program_id(0).to(tl.int64)
    bh = pid // TILES
    rows = (pid - bh * TILES) * 64 + tl.arange(0, 64)
    b = bh // HEADS
    x = tl.load(sums + pid * 64 * D + tl.arange(0, 64 * D)) * scale
    x = x.reshape([2, D // 16, 4, 8, 4, 2, 2])
    x = tl.permute(x, (2, 5, 3, 0, 1, 4, 6)).reshape([64, D])
    at = ((b * SEQ + rows) * HEADS + (bh - b * HEADS))[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(grad_q + at, x.to(grad_q.dtype.element_ty), (rows < SEQ)[:, None])


# Named barrier 8: both consumers have written their halves of ds.


@gluon.jit
def _walk(m, h, first, TILES, CAUSAL: gl.constexpr):
    """The query tile and head, counted over the batch, after (m, h). A walk starts at `first` without causal too: so programs of
    one head do not add to the same rows at once."""
    m += 1
    m = gl.where(m == TILES, first if CAUSAL else 0, m)
    h = gl.where(m == first, h + 1, h)
    return m, h


@gluon.jit
def _producer(
    q, k, v, grad_out, stats, q_s, k_s, v_s, g_s, stats_s, kv_full, q_full, g_full, empty, kv, key, first, blocks, TILES,
    KV_HEADS, GROUP, CAUSAL: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = q_s.type.shape[0]
    b = kv // KV_HEADS
    kv_head = kv - b * KV_HEADS
    mbarrier.expect(kv_full.index(0), 2 * k.block_type.nbytes)
    for c in gl.static_range(2):
        tma_load(k, [b, key + c * 64, kv_head, 0], kv_full.index(0), k_s.index(c))
    mbarrier.expect(kv_full.index(1), 2 * v.block_type.nbytes)
    for c in gl.static_range(2):
        tma_load(v, [b, key + c * 64, kv_head, 0], kv_full.index(1), v_s.index(c))
    m = first
    h = kv * GROUP
    for i in range(blocks):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(q_full.index(stage), q.block_type.nbytes + stats.block_type.nbytes)
        tma_load(q, [b, m * 64, h - b * KV_HEADS * GROUP, 0], q_full.index(stage), q_s.index(stage))
        tma_load(stats, [(h * TILES + m) * 128], q_full.index(stage), stats_s.index(stage))
        mbarrier.expect(g_full.index(stage), grad_out.block_type.nbytes)
        tma_load(grad_out, [b, m * 64, h - b * KV_HEADS * GROUP, 0], g_full.index(stage), g_s.index(stage))
        m, h = _walk(m, h, first, TILES, CAUSAL)


@gluon.jit
def _adder(sums, dq_s, dq_full, dq_empty, kv, first, blocks, TILES, GROUP, CAUSAL: gl.constexpr):
    m = first
    h = kv * GROUP
    for i in range(blocks):
        tile = h * TILES + m
        for c in gl.static_range(2):
            mbarrier.wait(dq_full.index(c), i & 1)
            tma_add(sums, [(tile * 2 + c) * dq_s.type.shape[1], 0], dq_s.index(c))
        tma_store_wait(1)
        mbarrier.arrive(dq_empty.index(0), count=1)
        tma_store_wait(0)
        mbarrier.arrive(dq_empty.index(1), count=1)
        m, h = _walk(m, h, first, TILES, CAUSAL)


@gluon.jit
def _seen(last, CAUSAL: gl.constexpr, layout: gl.constexpr):
    """Which of 64 keys [:, None] 64 queries [None, :] see: all up to number `last`, or the first so many and each one more."""
    seen = gl.full([1, 64], last, gl.int32, layout)
    if CAUSAL:
        seen += gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    return gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None] <= seen


@gluon.jit
def _consumer(
    CID: gl.constexpr, grad_k, grad_v, q_s, k_s, v_s, g_s, stats_s, ds_s, dq_s, kv_full, q_full, g_full, empty, dq_full, dq_empty,
    sums, kv, key, first, blocks, masked, seq, context, TILES, KV_HEADS, GROUP, scale, scale2,
    D: gl.constexpr, CAUSAL: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """masked: query tiles before it need a mask. DIRECT: add grad_q to memory from registers."""
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
    last = context - 1 - key  # without causal the key that all see, with it the one that query 0 sees
    if CAUSAL:
        last -= seq - 1
    zero = gl.zeros([64, 64], gl.float32, s_layout)
    zero_dq = gl.zeros([64, HALF], gl.float32, dq_layout)
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(q_full.index(0), 0)
    s = warpgroup_mma(k, q_s.index(0).reshape([64, D]).permute((1, 0)), zero, use_acc=False)
    mbarrier.wait(kv_full.index(1), 0)
    m = first
    h = kv * GROUP
    for i in range(blocks):
        stage = i % STAGES
        qt = q_s.index(stage).reshape([64, D])
        gt = g_s.index(stage).reshape([64, D])
        mbarrier.wait(g_full.index(stage), (i // STAGES) & 1)
        flying_dp = warpgroup_mma(v, gt.permute((1, 0)), zero, use_acc=False, is_async=True)
        if DIRECT:
            if m < masked:
                s = gl.where(_seen(last + m * 64 if CAUSAL else last, CAUSAL, s_layout), s, float("-inf"))
        p = gl.exp2(s * scale2 - stats_s.index(stage).slice(0, 64).load(columns)[None, :])
        if not DIRECT:
            if m < masked:
                p = gl.where(_seen(last + m * 64 if CAUSAL else last, CAUSAL, s_layout), p, 0.0)
        flying_dv = warpgroup_mma(gl.convert_layout(p.to(dtype), p_layout), gt, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(flying_dp,))
        dp = dp - stats_s.index(stage).slice(64, 64).load(columns)[None, :]
        ds = (p * dp).to(dtype)
        buffer = (i & 1) * 2
        ds_s.index(buffer + CID).store(ds)
        fence_async_shared()
        flying_dk = warpgroup_mma(gl.convert_layout(ds, p_layout), qt, dk, is_async=True)
        # Also: both consumers have finished grad_q of block i-1, whose buffer of ds the next block takes.
        bar_sync(8, 256)
        flying_dq = warpgroup_mma(ds_s.index(buffer).permute((1, 0)), k_low, zero_dq, use_acc=False, is_async=True)
        flying_dq = warpgroup_mma(ds_s.index(buffer + 1).permute((1, 0)), k_high, flying_dq, is_async=True)
        dv, dk = warpgroup_mma_wait(2, deps=(flying_dv, flying_dk))
        following = gl.where(i + 1 < blocks, (i + 1) % STAGES, stage)
        mbarrier.wait(q_full.index(following), ((i + 1) // STAGES) & 1, pred=i + 1 < blocks)
        # After the last block this multiplies the same q again, and its result goes nowhere.
        flying_s = warpgroup_mma(k, q_s.index(following).reshape([64, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(1, deps=(flying_dq,))
        # Four floats that a thread holds become neighbours.
        dq = dq.reshape([4, 2, 8, HALF // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([D // 8, 256])
        if DIRECT:
            tile = (h * TILES + m).to(gl.int64) * 2 + CID
            rows = gl.arange(0, D // 8, gl.SliceLayout(1, dq.type.layout))[:, None]
            add_four(sums + tile * (32 * D) + (rows * 256 + gl.arange(0, 256, gl.SliceLayout(0, dq.type.layout))[None, :]), dq)
        else:
            mbarrier.wait(dq_empty.index(CID), (i & 1) ^ 1)
            dq_s.index(CID).store(dq)
            fence_async_shared()
            mbarrier.arrive(dq_full.index(CID), count=1)
        mbarrier.arrive(empty.index(stage), count=1)
        # No wgmma may be in flight over the end of the loop: ptxas would make all of them wait for one another.
        s = warpgroup_mma_wait(0, deps=(flying_s,))
        m, h = _walk(m, h, first, TILES, CAUSAL)
    # k and v become the buffers of grad_k and grad_v. Both consumers read all of k.
    bar_sync(8, 256)
    b = kv // KV_HEADS  # here, where no registers are short
    kv_head = kv - b * KV_HEADS
    v.store(dv.to(dtype))
    k.store((dk * scale).to(dtype))
    fence_async_shared()
    tma_store(grad_v, [b, key, kv_head, 0], v_s.index(CID))
    tma_store(grad_k, [b, key, kv_head, 0], k_s.index(CID))
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["seq", "context", "TILES", "KEY_TILES", "KV_HEADS", "GROUP", "CHUNK", "KV", "never"])
def _products_kernel(
    q, k, v, grad_out, stats, sums_by_tma, grad_k, grad_v, sums, scale, scale2, seq, context, TILES, KEY_TILES, KV_HEADS, GROUP,
    CHUNK, KV, never, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    q_s = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 64, 1, D], q.layout)
    k_s = gl.allocate_shared_memory(k.dtype, [2, 1, 64, 1, D], k.layout)
    v_s = gl.allocate_shared_memory(v.dtype, [2, 1, 64, 1, D], v.layout)
    g_s = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 64, 1, D], grad_out.layout)
    ds_s = gl.allocate_shared_memory(q.dtype, [4, 64, 64], gl.NVMMASharedLayout(128, 16, 2))
    dq_s = gl.allocate_shared_memory(gl.float32, [1 if DIRECT else 2, 1 if DIRECT else D // 8, 256], sums_by_tma.layout)
    stats_s = gl.allocate_shared_memory(gl.float32, [STAGES, 128], stats.layout)
    kv_full = allocate_barriers(2, 1)
    dq_full = allocate_barriers(2, 1)
    dq_empty = allocate_barriers(2, 1)
    q_full = allocate_barriers(STAGES, 1)
    g_full = allocate_barriers(STAGES, 1)
    empty = allocate_barriers(STAGES, 2)
    # Chunks of CHUNK kv heads, whose grad_q stays in the L2; in a chunk the keys that most queries see come first.
    pid = gl.program_id(0)
    chunk = pid // (CHUNK * KEY_TILES)
    rest = pid - chunk * CHUNK * KEY_TILES
    size = gl.minimum(CHUNK, KV - chunk * CHUNK)
    n = rest // size
    kv = chunk * CHUNK + rest - n * size
    key = n * 128
    if CAUSAL:
        first = gl.maximum(key - (context - seq), 0) // 64
        blocks = GROUP * (TILES - first)
        # Keys past the context are seen by no query of the sequence, and others have p = 0.
        masked = gl.cdiv(gl.maximum(key + 127 - (context - seq), 0), 64)
    else:
        first = (2 * n) % TILES
        blocks = GROUP * TILES
        masked = gl.where(key + 128 > context, TILES, never)  # never is -1, which the compiler does not know
    if DIRECT:
        gl.warp_specialize(
            [
                (_consumer, (0, grad_k, grad_v, q_s, k_s, v_s, g_s, stats_s, ds_s, dq_s, kv_full, q_full, g_full, empty, dq_full,
                             dq_empty, sums, kv, key, first, blocks, masked, seq, context, TILES, KV_HEADS, GROUP, scale,
                             scale2, D, CAUSAL, DIRECT)),
                (_consumer, (1, grad_k, grad_v, q_s, k_s, v_s, g_s, stats_s, ds_s, dq_s, kv_full, q_full, g_full, empty, dq_full,
                             dq_empty, sums, kv, key, first, blocks, masked, seq, context, TILES, KV_HEADS, GROUP, scale,
                             scale2, D, CAUSAL, DIRECT)),
                (_producer, (q, k, v, grad_out, stats, q_s, k_s, v_s, g_s, stats_s, kv_full, q_full, g_full, empty, kv, key,
                             first, blocks, TILES, KV_HEADS, GROUP, CAUSAL)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, grad_k, grad_v, q_s, k_s, v_s, g_s, stats_s, ds_s, dq_s, kv_full, q_full, g_full, empty, dq_full,
                             dq_empty, sums, kv, key, first, blocks, masked, seq, context, TILES, KV_HEADS, GROUP, scale,
                             scale2, D, CAUSAL, DIRECT)),
                (_consumer, (1, grad_k, grad_v, q_s, k_s, v_s, g_s, stats_s, ds_s, dq_s, kv_full, q_full, g_full, empty, dq_full,
                             dq_empty, sums, kv, key, first, blocks, masked, seq, context, TILES, KV_HEADS, GROUP, scale,
                             scale2, D, CAUSAL, DIRECT)),
                (_producer, (q, k, v, grad_out, stats, q_s, k_s, v_s, g_s, stats_s, kv_full, q_full, g_full, empty, kv, key,
                             first, blocks, TILES, KV_HEADS, GROUP, CAUSAL)),
                (_adder, (sums_by_tma, dq_s, dq_full, dq_empty, kv, first, blocks, TILES, GROUP, CAUSAL)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )  # fmt: skip


def launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_q, grad_k, grad_v. Arguments as attention_hopper.launch takes and gives them; last axes dense."""
    batch, seq, heads, head_dim = q.shape
    context, kv_heads = k.shape[1:3]
    tiles, key_tiles = cdiv(seq, ROWS), cdiv(context, 2 * ROWS)
    every = batch * heads * tiles
    direct = head_dim == 64
    # H200, 2026-11-29: kv heads of a chunk; more at once lose at 8k and beyond.
    chunk = 16 if head_dim == 64 else 8 if seq <= 4096 else 4
    grads = [torch.empty(t.shape, dtype=q.dtype, device=q.device) for t in (q, k, v)]
    stats = torch.empty(every * 2 * ROWS, dtype=torch.float32, device=q.device)
    sums = torch.empty(every * ROWS * head_dim // 256, 256, dtype=torch.float32, device=q.device)
    shape = (seq, heads, tiles)
    options: dict[str, Any] = {"D": head_dim, "num_warps": 4}
    with on_device(q):
        _launch(
            _prepare_kernel, (every,),
            (out, grad_out, lse, stats, sums, *shape, *out.stride()[:3], *grad_out.stride()[:3]), options,
        )  # fmt: skip
        loads = [descriptor(t, [1, ROWS, 1, head_dim]) for t in (q, k, v, grad_out)]
        flat = descriptor(stats, [2 * ROWS], swizzle=False), descriptor(sums, [head_dim // 8, 256], swizzle=False)
        stores = [descriptor(t, [1, ROWS, 1, head_dim]) for t in grads[1:]]
        _launch(
            _products_kernel, (batch * kv_heads * key_tiles,),
            (*loads, *flat, *stores, sums, scale, scale * LOG2E, seq, context, tiles, key_tiles, kv_heads, heads // kv_heads,
             chunk, batch * kv_heads, -1),
            {"STAGES": STAGES, "CAUSAL": causal, "DIRECT": direct, **options, "maxnreg": 168},
        )  # fmt: skip
        _launch(_finish_kernel, (every,), (sums, grads[0], scale, *shape), options)
    return tuple(grads)  # type: ignore[return-value]

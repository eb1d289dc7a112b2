"""Softmax attention, forward, on sm_90 in Gluon: the form of FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608).

    out = softmax(scale * q @ k^T, context) @ v,    lse = log(sum(exp(scale * q @ k^T), context))

    q, out   batch seq heads head_dim          bf16 or fp16, head_dim 64 or 128
    k, v     batch context kv_heads head_dim   heads is a multiple of kv_heads; context >= seq where a window bounds it
    sinks    heads                             None, or the logit of a further key whose value is 0, fp32
    lse      batch heads seq                   natural log, fp32, with the sink

Query i stands at p = i + context - seq and sees key j iff p - left <= j <= p + right; a negative one bounds nothing. HBM, in
elements: reads q, k, v and sinks, writes out and lse.

Roles: two consumers (warpgroups) of 64 query rows each and one producer warp. Programs stay on their SM and follow a column of
a table of tiles, the longest first among heads whose k and v fit the L2. k and v come through rings of TMA copies; a copy fills
with zeros past the end of a sequence and a store stops there, so lengths may be anything.
Keys are visited right to left, so that the blocks at the edges alone need a mask. In a consumer, Q K^T of block j is issued
together with P V of block j-1, and PINGPONG passes a token between the consumers so that one's softmax runs under the other's
products.

What made it fast on an H200 (2026-11, D=128 causal, each alone): row sums kept per thread to the end of a tile and no order
imposed on the wait for P V, 7 to 8 %; ring slots given back by bar_arrive, which does not stop the warpgroup, 3 to 5 %; ping-pong
2 to 5 % (-1 % without causal); out in a buffer of its own, so that the next tile's q loads under the last P V, 4 % at 2k.
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from ._attention_tiles import LOG2E
from ._gluon import (
    allocate_barriers,
    bar_arrive,
    bar_sync,
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
from ._target import Target, target_of

ROWS = 64  # of a consumer
BLOCK_M = 2 * ROWS


@dataclass(frozen=True)
class Config:
    block_n: int
    k_stages: int  # 3 at most: each stage has a named barrier
    v_stages: int
    pingpong: bool


def configure(head_dim: int, bounded: bool) -> Config:
    # H200, 2026-11-29: a third stage, three consumers and other orders of waiting gain nothing at either head_dim.
    return Config(128, 2, 2, bounded or head_dim == 64)


# ---- the kernel --------------------------------------------------------------------------------------------------------------
# Named barriers: 8 and 9 whose turn it is, 10 to 12 a stage of k is free, 13 to 15 one of v.


@gluon.jit
def _tile(entry, row_tiles, heads, context, low, high, BN: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Batch, head, first row, first block of keys and number of blocks of one entry of the table. Row i sees keys i + low to
    i + high."""
    bh = entry // row_tiles
    row = (entry - bh * row_tiles) * 128
    b = bh // heads
    begin = 0
    end = gl.cdiv(context, BN)
    if LEFT:
        begin = gl.maximum(row + low, 0) // BN
    if RIGHT:
        end = gl.minimum(gl.cdiv(row + 128 + high, BN), end)
    return b, bh - b * heads, row, begin, end - begin


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    stage += 1
    phase = gl.where(stage == STAGES, phase ^ 1, phase)
    stage = gl.where(stage == STAGES, 0, stage)
    return stage, phase


@gluon.jit
def _fill(x, corner, memory, full, stage, loaded, FREE: gl.constexpr):
    """Load a block into a stage of its ring once both consumers have given it back."""
    if loaded >= memory.type.shape[0]:
        bar_sync(FREE + stage, 288)
    mbarrier.expect(full.index(stage), x.block_type.nbytes)
    tma_load(x, corner, full.index(stage), memory.index(stage))


@gluon.jit
def _producer(
    q, k, v, table, q_s, k_s, v_s, q_full, q_empty, k_full, v_full, rounds, row_tiles, context, heads, group, low, high,
    BN: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    K_STAGES: gl.constexpr = k_s.type.shape[0]
    V_STAGES: gl.constexpr = v_s.type.shape[0]
    programs = gl.num_programs(0)
    tiles = 0
    loaded = 0
    k_stage = 0
    v_stage = 0
    entry = gl.load(table + gl.program_id(0))
    for i in range(rounds):
        following = gl.load(table + (i + 1) * programs + gl.program_id(0))
        if entry >= 0:
            b, h, row, begin, blocks = _tile(entry, row_tiles, heads, context, low, high, BN, LEFT, RIGHT)
            for c in gl.static_range(2):
                mbarrier.wait(q_empty.index(c), (tiles & 1) ^ 1)
                mbarrier.expect(q_full.index(c), q.block_type.nbytes)
                tma_load(q, [b, row + c * 64, h, 0], q_full.index(c), q_s.index(c))
            tiles += 1
            for j in range(blocks):
                at = (begin + blocks - 1 - j) * BN
                _fill(k, [b, at, h // group, 0], k_s, k_full, k_stage, loaded, 10)
                _fill(v, [b, at, h // group, 0], v_s, v_full, v_stage, loaded, 13)
                loaded += 1
                k_stage = gl.where(k_stage == K_STAGES - 1, 0, k_stage + 1)
                v_stage = gl.where(v_stage == V_STAGES - 1, 0, v_stage + 1)
        entry = following
    # Take the last arrivals, so that no named barrier is left half full.
    for c in gl.static_range(K_STAGES):
        if loaded > c:
            bar_sync(10 + c, 288)
    for c in gl.static_range(V_STAGES):
        if loaded > c:
            bar_sync(13 + c, 288)


@gluon.jit
def _masked(s, row, n, context, low, high, BN: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):
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
def _own_sum(p, BN: gl.constexpr):
    """Every thread's sum over its own columns, [64, 4]: the four threads of a row meet once per tile."""
    return gl.sum(p.reshape([64, BN // 8, 4, 2]).permute([0, 2, 1, 3]).reshape([64, 4, BN // 4]), 2)


@gluon.jit
def _take_turn(CID: gl.constexpr, PINGPONG: gl.constexpr):
    if PINGPONG:
        bar_sync(8 + CID, 256)


@gluon.jit
def _pass_turn(CID: gl.constexpr, PINGPONG: gl.constexpr):
    if PINGPONG:
        bar_arrive(9 - CID, 256)


@gluon.jit
def _consumer(
    CID: gl.constexpr, out, lse, table, sinks, q_s, k_s, v_s, out_s, q_full, q_empty, k_full, v_full, rounds, row_tiles, seq,
    context, heads, low, high, scale, D: gl.constexpr, BN: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    EDGES: gl.constexpr, PINGPONG: gl.constexpr,
):  # fmt: skip
    """scale: of base-2 logits. EDGES: blocks from the right that need a mask, with LEFT besides those that reach past `low`.
    RIGHT: 0 without a bound, 1 with one inside the context, 2 where it may lie outside."""
    K_STAGES: gl.constexpr = k_s.type.shape[0]
    V_STAGES: gl.constexpr = v_s.type.shape[0]
    dtype: gl.constexpr = q_s.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    programs = gl.num_programs(0)
    q = q_s.index(CID).reshape([64, D])
    zero = gl.zeros([64, BN], gl.float32, s_layout)
    tiles = 0
    k_stage = 0
    k_phase = 0
    v_stage = 0
    v_phase = 0
    if CID == 1:
        _pass_turn(CID, PINGPONG)  # consumer 0 goes first
    entry = gl.load(table + gl.program_id(0))
    for i in range(rounds):
        following = gl.load(table + (i + 1) * programs + gl.program_id(0))
        if entry >= 0:
            b, h, row, begin, blocks = _tile(entry, row_tiles, heads, context, low, high, BN, LEFT, RIGHT)
            inner = 0  # blocks from this one on lie above `low` of every row
            if LEFT:
                inner = gl.minimum(gl.cdiv(gl.maximum(row + 127 + low, 0), BN) - begin, blocks)
            row += CID * 64
            mbarrier.wait(q_full.index(CID), tiles & 1)
            mbarrier.wait(k_full.index(k_stage), k_phase)
            _take_turn(CID, PINGPONG)
            kt = k_s.index(k_stage).reshape([BN, D]).permute((1, 0))
            flying = warpgroup_mma(q, kt, zero, use_acc=False, is_async=True)
            _pass_turn(CID, PINGPONG)
            s = warpgroup_mma_wait(0, deps=(flying,))
            bar_arrive(10 + k_stage, 288)
            k_stage, k_phase = _next(k_stage, k_phase, K_STAGES)
            if EDGES > 0 or LEFT:
                s = _masked(s, row, begin + blocks - 1, context, low, high, BN, LEFT, RIGHT)
            m = gl.max(s, 1) * scale
            if EDGES > 1 or LEFT:
                m = gl.maximum(m, -1.0e30)  # rows that see nothing of this block
            p = gl.exp2(s * scale - m[:, None])
            l = _own_sum(p, BN)
            pt = gl.convert_layout(p.to(dtype), p_layout)
            acc = gl.zeros([64, D], gl.float32, acc_layout)
            done = 1
            # Loops of their own for other blocks that need a mask: a branch in the main loop would end its basic block, and
            # ptxas would wait for P V before the exponentials.
            for part in gl.static_range(3):
                if part == 1 or (EDGES > 1 if part == 0 else LEFT):
                    end = blocks
                    if part == 0:
                        end = gl.minimum(blocks, EDGES)
                    if LEFT and part == 1:
                        end = gl.maximum(blocks - inner, done)
                    for j in range(done, end):
                        mbarrier.wait(k_full.index(k_stage), k_phase)
                        _take_turn(CID, PINGPONG)
                        kt = k_s.index(k_stage).reshape([BN, D]).permute((1, 0))
                        flying = warpgroup_mma(q, kt, zero, use_acc=False, is_async=True)
                        mbarrier.wait(v_full.index(v_stage), v_phase)
                        flying_acc = warpgroup_mma(pt, v_s.index(v_stage).reshape([BN, D]), acc, is_async=True)
                        _pass_turn(CID, PINGPONG)
                        s = warpgroup_mma_wait(1, deps=(flying,))
                        bar_arrive(10 + k_stage, 288)
                        k_stage, k_phase = _next(k_stage, k_phase, K_STAGES)
                        if part != 1:
                            s = _masked(s, row, begin + blocks - 1 - j, context, low, high, BN, LEFT, RIGHT)
                        new = gl.maximum(m, gl.max(s, 1) * scale)
                        shrink = gl.exp2(m - new)
                        p = gl.exp2(s * scale - new[:, None])
                        l = l * gl.convert_layout(shrink, gl.SliceLayout(1, l.type.layout))[:, None] + _own_sum(p, BN)
                        m = new
                        acc = warpgroup_mma_wait(0, deps=(flying_acc,))
                        bar_arrive(13 + v_stage, 288)
                        v_stage, v_phase = _next(v_stage, v_phase, V_STAGES)
                        acc = acc * gl.convert_layout(shrink, acc_rows)[:, None]
                        pt = gl.convert_layout(p.to(dtype), p_layout)
                    done = end
            mbarrier.arrive(q_empty.index(CID), count=1)  # the next tile's q may come
            mbarrier.wait(v_full.index(v_stage), v_phase)
            flying_acc = warpgroup_mma(pt, v_s.index(v_stage).reshape([BN, D]), acc, is_async=True)
            total = gl.convert_layout(gl.sum(l, 1), s_rows)
            inverse = 1.0 / total
            if sinks is not None:
                sink = gl.load(sinks + h) * 1.4426950408889634
                new = gl.maximum(m, sink)
                shrink = gl.exp2(m - new)
                total = total * shrink + gl.exp2(sink - new)
                inverse = shrink / total
                m = new
            logs = (m + gl.log2(total)) * 0.6931471805599453
            acc = warpgroup_mma_wait(0, deps=(flying_acc,))
            bar_arrive(13 + v_stage, 288)
            v_stage, v_phase = _next(v_stage, v_phase, V_STAGES)
            acc = acc * gl.convert_layout(inverse, acc_rows)[:, None]
            tma_store_wait(0)  # the store of the tile before has left the buffer
            rows = row + gl.arange(0, 64, s_rows)
            gl.store(lse + (b * heads + h).to(gl.int64) * seq + rows, logs, mask=rows < seq)
            out_s.index(CID).reshape([64, D]).store(acc.to(dtype))
            fence_async_shared()
            tma_store(out, [b, row, h, 0], out_s.index(CID))
            tiles += 1
        entry = following
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["rounds", "row_tiles", "seq", "context", "heads", "group", "low", "high"])
def _forward_kernel(
    q, k, v, out, lse, table, sinks, scale, rounds, row_tiles, seq, context, heads, group, low, high,
    D: gl.constexpr, BN: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    EDGES: gl.constexpr, PINGPONG: gl.constexpr,
):  # fmt: skip
    q_s = gl.allocate_shared_memory(q.dtype, [2, 1, 64, 1, D], q.layout)
    k_s = gl.allocate_shared_memory(k.dtype, [K_STAGES, 1, BN, 1, D], k.layout)
    v_s = gl.allocate_shared_memory(v.dtype, [V_STAGES, 1, BN, 1, D], v.layout)
    out_s = gl.allocate_shared_memory(out.dtype, [2, 1, 64, 1, D], out.layout)
    q_full = allocate_barriers(2, 1)
    q_empty = allocate_barriers(2, 1)
    k_full = allocate_barriers(K_STAGES, 1)
    v_full = allocate_barriers(V_STAGES, 1)
    gl.warp_specialize(
        [
            (_consumer, (0, out, lse, table, sinks, q_s, k_s, v_s, out_s, q_full, q_empty, k_full, v_full, rounds, row_tiles,
                         seq, context, heads, low, high, scale, D, BN, LEFT, RIGHT, EDGES, PINGPONG)),
            (_consumer, (1, out, lse, table, sinks, q_s, k_s, v_s, out_s, q_full, q_empty, k_full, v_full, rounds, row_tiles,
                         seq, context, heads, low, high, scale, D, BN, LEFT, RIGHT, EDGES, PINGPONG)),
            (_producer, (q, k, v, table, q_s, k_s, v_s, q_full, q_empty, k_full, v_full, rounds, row_tiles, context, heads,
                         group, low, high, BN, LEFT, RIGHT)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# ---- the host ----------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def schedule(
    row_tiles: int, sequences: int, heads: int, programs: int, steps: tuple[int, ...], device: torch.device
) -> Tensor:
    """"rounds programs": the tiles of every program, -1 after its last; a tile is sequence * row_tiles + its place in it.

    Tiles of `heads` sequences at a time (whose k and v stay in the L2), the longest first, each for the program that is free
    first. steps: blocks of keys of each of the row_tiles tiles of a sequence.
    """
    columns: list[list[int]] = [[] for _ in range(programs)]
    free = [(0.0, program) for program in range(programs)]
    longest = sorted(range(row_tiles), key=lambda tile: -steps[tile])
    for first in range(0, sequences, heads):
        for tile in longest:
            for sequence in range(first, min(first + heads, sequences)):
                time, program = heapq.heappop(free)
                columns[program].append(sequence * row_tiles + tile)
                heapq.heappush(free, (time + steps[tile] + 1.5, program))  # 1.5: start and end of a tile, in blocks
    rounds = max(map(len, columns)) + 1
    rows = [[column[i] if i < len(column) else -1 for column in columns] for i in range(rounds)]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def refusal(q: Tensor, k: Tensor, v: Tensor, left: int, right: int, target: Target) -> str:
    """Why this kernel cannot take these arguments on target, or "" where it can."""
    if target.capability != 90:
        return f"{target.name} is not sm_90"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"q is {q.dtype}, not bfloat16 or float16"
    if q.shape[-1] not in (64, 128) or v.shape[-1] != q.shape[-1]:
        return f"head_dim={q.shape[-1]} and v_dim={v.shape[-1]}, not both 64 or both 128"
    if max(left, right) >= 0 and k.shape[1] < q.shape[1]:
        return f"context={k.shape[1]} is shorter than seq={q.shape[1]}, so that a window leaves rows nothing"
    return ""


def launch(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, left: int, right: int, scale: float
) -> tuple[Tensor, Tensor]:
    """out and lse. q, k, v: what refusal() lets pass, not empty, with rows that TMA takes (_launch.tma_ready)."""
    batch, seq, heads, head_dim = q.shape
    context, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    target = target_of(q.device)
    config = configure(head_dim, right >= 0)
    bn = config.block_n
    row_tiles = cdiv(seq, BLOCK_M)
    offset = context - seq
    steps = []
    for first in range(offset, offset + seq, BLOCK_M):
        begin = max(first - left, 0) // bn if left >= 0 else 0
        steps.append(cdiv(min(context, first + BLOCK_M + right) if right >= 0 else context, bn) - begin)
    near = max(1, target.l2_bytes // 3 // (context * head_dim * 2 * q.element_size()))  # kv heads that share a third of the L2
    programs = min(target.sms, row_tiles * batch * heads)
    # Blocks from the right that some row of a tile does not see all of.
    edges = (1 if (offset + right) % bn == 0 else 2) if right >= 0 else int(context % bn > 0)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, seq, dtype=torch.float32, device=q.device)
    with on_device(q):
        table = schedule(row_tiles, batch * heads, min(near, batch * kv_heads) * group, programs, tuple(steps), q.device)
        blocks = [descriptor(t, [1, n, 1, head_dim]) for t, n in ((q, ROWS), (k, bn), (v, bn), (out, ROWS))]
        _launch(
            _forward_kernel, (programs,),
            (*blocks, lse, table, sinks, scale * LOG2E, table.shape[0] - 1, row_tiles, seq, context, heads, group,
             offset - left, offset + right),
            {"D": head_dim, "BN": bn, "K_STAGES": config.k_stages, "V_STAGES": config.v_stages, "LEFT": left >= 0,
             "RIGHT": min(right + 1, 2), "EDGES": edges, "PINGPONG": config.pingpong, "num_warps": 4, "maxnreg": 168},
        )  # fmt: skip
    return out, lse

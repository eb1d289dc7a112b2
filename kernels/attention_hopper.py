"""Softmax attention, forward, on sm_90 in Gluon: the form of FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608).

    out = softmax(scale * q @ k^T, context) @ v,    lse = log(sum(exp(scale * q @ k^T), context))

    q, k     batch seq heads head_dim, batch context kv_heads head_dim   bf16 or fp16; heads is a multiple of kv_heads
    v, out   batch context kv_heads v_dim, batch seq heads v_dim         head_dim and v_dim: both 64, 128 or 256, or 192 and 128
    sinks    heads                                                       None, or the logit of a further key of value 0, fp32
    lse      batch heads seq                                             natural log, fp32, with the sink

With softcap logits x become softcap * tanh(x / softcap). Query i stands at p = i + context - seq and sees key j iff
p - left <= j <= p + right; a negative one bounds nothing. A row that sees nothing gives out 0 and lse -inf (the sink's logit).
cu_seqlens_q, cu_seqlens_k `segments+1`: batch is 1, and seq and context are those of a segment; seqused_k `batch`: context is at
most that of k. Both stay on the device. Tokens after the last boundary see nothing; impossible boundaries give NaN rows, and
of an impossible seqused_k the rows of its sequence. block_map `1|batch 1|heads q_blocks k_blocks`, beside none of those: which
blocks of 128 queries and 128 keys are read and seen. HBM, in elements: reads q, k, v and sinks, writes out and lse.

Roles: two consumers (warpgroups) of 64 query rows each and one producer warp. Programs stay on their SM and follow a column of
a table of tiles, the longest first among heads whose k and v fit the L2. k and v come through rings of TMA copies; a copy fills
with zeros past the end of a sequence and a store stops there, so lengths may be anything: with packed sequences too, whose
descriptors (_gluon.descriptor, ragged) know ends inside a tensor. No tile is masked on its way to memory, and what lies beside a
sequence is never read, be it NaN.
With a block map a tile has a program of its own, the longest first, and follows a list of its blocks (_hopper_map.py); not
measured yet.
Keys are visited right to left, so that the blocks at the edges alone need a mask. In a consumer, Q K^T of block j is issued
together with P V of block j-1, and PINGPONG passes a token between the consumers so that one's softmax runs under the other's
products.

What made it fast on an H200 (2026-11, D=128 causal, each alone): row sums kept per thread to the end of a tile and no order
imposed on the wait for P V, 7 to 8 %; ring slots given back by bar_arrive, which does not stop the warpgroup, 3 to 5 %; ping-pong
2 to 5 % (-1 % without causal); out in a buffer of its own, so that the next tile's q loads under the last P V, 4 % at 2k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _hopper_map
from ._attention_hopper_parts import by_thread, masked_rows, next_stage, pieces_of, tanh
from ._attention_tiles import LOG2E
from ._attention_tiles import schedule as schedule_segments
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
from ._hopper_schedule import (
    BLOCK_M,
    Bounds,
    block_at,
    corner_of,
    entry_of,
    equal_table,
    field,
    key_step,
    lse_row,
    order,
    plan_axes,
    section_of,
    tile_of,
)
from ._lang import cdiv
from ._launch import launch as _launch
from ._launch import on_device
from ._target import Target, target_of

ROWS = 64  # of a consumer: two of them share a tile of BLOCK_M


@dataclass(frozen=True)
class Config:
    block_n: int
    k_stages: int  # 3 at most: each stage has a named barrier
    v_stages: int
    pingpong: bool


def configure(head_dim: int, bounded: bool) -> Config:
    # H200, 2026-11-29: a third stage, three consumers and other orders of waiting gain nothing at head_dim 64 and 128
    # (2026-12-01: P V waited for after one, two or three quarters of the exponentials is level to 6 % slower). Not
    # measured: what 192 and 256 have, where no more fits beside the rings than one tile of q and half of out.
    if head_dim == 256:
        return Config(64, 2, 2, True)
    return Config(128, 2, 2, bounded or head_dim == 64)


# ---- the kernel --------------------------------------------------------------------------------------------------------------
# Named barriers: 8 and 9 whose turn it is, 10 to 12 a stage of k is free, 13 to 15 one of v.


@gluon.jit
def _load(x, x2, corner, corner2, memory, memory2, full, at):
    """Load a block and, where there are such, its further columns, which lie in memory of their own."""
    mbarrier.expect(full.index(at), x.block_type.nbytes + (x2.block_type.nbytes if x2 is not None else 0))
    tma_load(x, corner, full.index(at), memory.index(at))
    if x2 is not None:
        tma_load(x2, corner2, full.index(at), memory2.index(at))


@gluon.jit
def _fill(x, x2, corner, corner2, memory, memory2, full, stage, loaded, FREE: gl.constexpr):
    """Load a block into a stage of its ring once both consumers have given it back."""
    if loaded >= memory.type.shape[0]:
        bar_sync(FREE + stage, 288)
    _load(x, x2, corner, corner2, memory, memory2, full, stage)


@gluon.jit
def _producer(
    q, q2, k, k2, v, table, q_s, q2_s, k_s, k2_s, v_s, q_full, q_empty, k_full, v_full, rounds, row_tiles, seq, context, heads,
    group, low, high, lists, list_b, list_h, BN: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PACKED: gl.constexpr,
    EMPTY: gl.constexpr,
):  # fmt: skip
    K_STAGES: gl.constexpr = k_s.type.shape[0]
    V_STAGES: gl.constexpr = v_s.type.shape[0]
    programs = gl.num_programs(0)
    q_phase = 0
    loaded = 0
    k_stage = 0
    v_stage = 0
    entry = entry_of(table, 0, programs, PACKED)
    for i in range(rounds):
        following = entry_of(table, i + 1, programs, PACKED)
        if entry >= 0:
            h, row, begin, blocks, sequence = tile_of(
                entry, table, i, programs, row_tiles, heads, seq, context, low, high, lists, list_b, list_h, BN, LEFT, RIGHT,
                PACKED, EMPTY,
            )  # fmt: skip
            b, q_start, queries, k_start, keys, _, _ = sequence
            if PACKED:
                keys = gl.maximum(keys, 0)
            for c in gl.static_range(2):
                mbarrier.wait(q_empty.index(c), q_phase ^ 1)
                at = corner_of(b, q_start, queries, row + c * 64, h, 0, PACKED)
                at2 = corner_of(b, q_start, queries, row + c * 64, h, 128, PACKED)
                _load(q, q2, at, at2, q_s, q2_s, q_full, c)
            q_phase ^= 1
            for j in range(blocks):
                n = block_at(begin, blocks, j, lists is not None)
                at = corner_of(b, k_start, keys, n * BN, h // group, 0, PACKED)
                at2 = corner_of(b, k_start, keys, n * BN, h // group, 128, PACKED)
                _fill(k, k2, at, at2, k_s, k2_s, k_full, k_stage, loaded, 10)
                _fill(v, None, at, at, v_s, v_s, v_full, v_stage, loaded, 13)
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
def _keys(memory, stage):
    """A stage of keys, transposed."""
    return memory.index(stage).reshape([memory.type.shape[-3], memory.type.shape[-1]]).permute((1, 0))


@gluon.jit
def _rows(memory, CID: gl.constexpr):
    return memory.index(CID).reshape([64, memory.type.shape[-1]])


@gluon.jit
def _scores(CID: gl.constexpr, q_s, q2_s, k_s, k2_s, stage, zero):
    """Issue Q K^T of a consumer's queries and a stage of keys."""
    flying = warpgroup_mma(_rows(q_s, CID), _keys(k_s, stage), zero, use_acc=False, is_async=True)
    if q2_s is not None:
        flying = warpgroup_mma(_rows(q2_s, CID), _keys(k2_s, stage), flying, is_async=True)
    return flying


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
    CID: gl.constexpr, out, lse, table, sinks, q_s, q2_s, k_s, k2_s, v_s, out_s, q_full, q_empty, k_full, v_full, rounds,
    row_tiles, seq, context, heads, low, high, lists, list_b, list_h, scale, cap, D: gl.constexpr, BN: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, EDGES: gl.constexpr, PINGPONG: gl.constexpr, PACKED: gl.constexpr,
    EMPTY: gl.constexpr,
):  # fmt: skip
    """scale: of base-2 logits. EDGES: blocks from the right that need a mask, with LEFT besides those that reach past `low`.
    RIGHT: 0 without a bound, 1 with one inside the context, 2 where it may lie outside. EMPTY: rows may see no key."""
    K_STAGES: gl.constexpr = k_s.type.shape[0]
    V_STAGES: gl.constexpr = v_s.type.shape[0]
    dtype: gl.constexpr = q_s.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    programs = gl.num_programs(0)
    zero = gl.zeros([64, BN], gl.float32, s_layout)
    q_phase = 0
    k_stage = 0
    k_phase = 0
    v_stage = 0
    v_phase = 0
    if CID == 1:
        _pass_turn(CID, PINGPONG)  # consumer 0 goes first
    entry = entry_of(table, 0, programs, PACKED)
    for i in range(rounds):
        following = entry_of(table, i + 1, programs, PACKED)
        if entry >= 0:
            h, row, begin, blocks, sequence = tile_of(
                entry, table, i, programs, row_tiles, heads, seq, context, low, high, lists, list_b, list_h, BN, LEFT, RIGHT,
                PACKED, EMPTY,
            )  # fmt: skip
            b, _, _, _, keys, least, most = sequence
            inner = 0  # blocks from this one on lie above `least` of every row
            if LEFT and lists is not None:
                inner = gl.minimum(128 // BN + 1, blocks)
            elif LEFT:
                inner = gl.minimum(gl.cdiv(gl.maximum(row + 127 + least, 0), BN) - begin, blocks)
            row += CID * 64
            # Issuing this product with the last P V of the tile before, under its end, is slower. H200, 2026-11-30, D=128 causal:
            # 4.5 % at S2048, 6 % at S8192, 7 % at S16384, 4 % at S8192 without causal; 1 % faster at S512.
            mbarrier.wait(q_full.index(CID), q_phase)
            mbarrier.wait(k_full.index(k_stage), k_phase)
            _take_turn(CID, PINGPONG)
            flying = _scores(CID, q_s, q2_s, k_s, k2_s, k_stage, zero)
            _pass_turn(CID, PINGPONG)
            s = warpgroup_mma_wait(0, deps=(flying,))
            bar_arrive(10 + k_stage, 288)
            k_stage, k_phase = next_stage(k_stage, k_phase, K_STAGES)
            if cap is not None:
                s = tanh(s * cap)
            if EDGES > 0 or LEFT:
                s = masked_rows(s, row, block_at(begin, blocks, 0, lists is not None), keys, least, most, BN, LEFT, RIGHT)
            m = gl.max(s, 1) * scale
            if EDGES > 1 or LEFT or EMPTY:
                m = gl.maximum(m, -1.0e30)  # rows that see nothing of this block
            p = gl.exp2(s * scale - m[:, None])
            l = gl.sum(by_thread(p), 2)
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
                        flying = _scores(CID, q_s, q2_s, k_s, k2_s, k_stage, zero)
                        mbarrier.wait(v_full.index(v_stage), v_phase)
                        flying_acc = warpgroup_mma(pt, v_s.index(v_stage).reshape([BN, D]), acc, is_async=True)
                        _pass_turn(CID, PINGPONG)
                        s = warpgroup_mma_wait(1, deps=(flying,))
                        bar_arrive(10 + k_stage, 288)
                        k_stage, k_phase = next_stage(k_stage, k_phase, K_STAGES)
                        if cap is not None:
                            s = tanh(s * cap)
                        if part != 1:
                            n = block_at(begin, blocks, j, lists is not None)
                            s = masked_rows(s, row, n, keys, least, most, BN, LEFT, RIGHT)
                        new = gl.maximum(m, gl.max(s, 1) * scale)
                        shrink = gl.exp2(m - new)
                        p = gl.exp2(s * scale - new[:, None])
                        l = l * gl.convert_layout(shrink, gl.SliceLayout(1, l.type.layout))[:, None] + gl.sum(by_thread(p), 2)
                        m = new
                        acc = warpgroup_mma_wait(0, deps=(flying_acc,))
                        bar_arrive(13 + v_stage, 288)
                        v_stage, v_phase = next_stage(v_stage, v_phase, V_STAGES)
                        acc = acc * gl.convert_layout(shrink, acc_rows)[:, None]
                        pt = gl.convert_layout(p.to(dtype), p_layout)
                    done = end
            mbarrier.arrive(q_empty.index(CID), count=1)  # the next tile's q may come
            q_phase ^= 1
            mbarrier.wait(v_full.index(v_stage), v_phase)
            flying_acc = warpgroup_mma(pt, v_s.index(v_stage).reshape([BN, D]), acc, is_async=True)
            total = gl.convert_layout(gl.sum(l, 1), s_rows)
            inverse = 1.0 / total
            if sinks is not None:
                sink = gl.load(sinks + h).to(gl.float32) * 1.4426950408889634
                new = gl.maximum(m, sink)
                shrink = gl.exp2(m - new)
                total = total * shrink + gl.exp2(sink - new)
                inverse = shrink / total
                m = new
            if EMPTY:
                inverse = gl.where(total == 0.0, 0.0, inverse)
            logs = (m + gl.log2(total)) * 0.6931471805599453
            q_start = 0
            queries = seq
            if PACKED:  # again: to hold them through the loops costs spills
                q_start = field(table, i, programs, 2)
                queries = field(table, i, programs, 3)
                keys = field(table, i, programs, 5)
                inverse = gl.where(keys < 0, float("nan"), inverse)
                logs = gl.where(keys < 0, float("nan"), logs)
            acc = warpgroup_mma_wait(0, deps=(flying_acc,))
            bar_arrive(13 + v_stage, 288)
            v_stage, v_phase = next_stage(v_stage, v_phase, V_STAGES)
            acc = acc * gl.convert_layout(inverse, acc_rows)[:, None]
            WIDTH: gl.constexpr = out_s.type.shape[-1]
            pieces = pieces_of(acc, D // WIDTH)
            for part in gl.static_range(D // WIDTH):
                tma_store_wait(0)  # the store before, of this tile or the one before it, has left the buffer
                if part == 0:
                    rows = row + gl.arange(0, 64, s_rows)
                    gl.store(lse + lse_row(b, h, q_start, heads, seq, PACKED) + rows, logs, mask=rows < queries)
                out_s.index(CID).reshape([64, WIDTH]).store(pieces[part].to(dtype))
                fence_async_shared()
                tma_store(out, corner_of(b, q_start, queries, row, h, part * WIDTH, PACKED), out_s.index(CID))
        entry = following
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["rounds", "row_tiles", "seq", "context", "heads", "group", "low", "high", "list_b", "list_h"])
def _forward_kernel(
    q, q2, k, k2, v, out, lse, table, sinks, scale, cap, rounds, row_tiles, seq, context, heads, group, low, high,
    lists, list_b, list_h, D: gl.constexpr, BN: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, EDGES: gl.constexpr, PINGPONG: gl.constexpr, PACKED: gl.constexpr,
    EMPTY: gl.constexpr,
):  # fmt: skip
    """scale and cap: scale * log2(e) and None, or softcap * log2(e) and scale / softcap. With PACKED low and high count from
    where a query stands, lse lies seq apart for heads and `heads` apart for tokens that begin a sequence. q2, k2: columns from
    128 on of wider q and k, else None. D: of v."""
    q_s = gl.allocate_shared_memory(q.dtype, [2] + q.block_shape, q.layout)
    k_s = gl.allocate_shared_memory(k.dtype, [K_STAGES] + k.block_shape, k.layout)
    v_s = gl.allocate_shared_memory(v.dtype, [V_STAGES] + v.block_shape, v.layout)
    if q2 is None:
        q2_s: gl.constexpr = None
        k2_s: gl.constexpr = None
    else:
        q2_s = gl.allocate_shared_memory(q.dtype, [2] + q2.block_shape, q2.layout)
        k2_s = gl.allocate_shared_memory(k.dtype, [K_STAGES] + k2.block_shape, k2.layout)
    out_s = gl.allocate_shared_memory(out.dtype, [2] + out.block_shape, out.layout)
    q_full = allocate_barriers(2, 1)
    q_empty = allocate_barriers(2, 1)
    k_full = allocate_barriers(K_STAGES, 1)
    v_full = allocate_barriers(V_STAGES, 1)
    gl.warp_specialize(
        [
            (_consumer, (0, out, lse, table, sinks, q_s, q2_s, k_s, k2_s, v_s, out_s, q_full, q_empty, k_full, v_full, rounds,
                         row_tiles, seq, context, heads, low, high, lists, list_b, list_h, scale, cap, D, BN, LEFT, RIGHT, EDGES,
                         PINGPONG, PACKED, EMPTY)),
            (_consumer, (1, out, lse, table, sinks, q_s, q2_s, k_s, k2_s, v_s, out_s, q_full, q_empty, k_full, v_full, rounds,
                         row_tiles, seq, context, heads, low, high, lists, list_b, list_h, scale, cap, D, BN, LEFT, RIGHT, EDGES,
                         PINGPONG, PACKED, EMPTY)),
            (_producer, (q, q2, k, k2, v, table, q_s, q2_s, k_s, k2_s, v_s, q_full, q_empty, k_full, v_full, rounds, row_tiles,
                         seq, context, heads, group, low, high, lists, list_b, list_h, BN, LEFT, RIGHT, PACKED, EMPTY)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# ---- the host ----------------------------------------------------------------------------------------------------------------


def unfit(target: Target, dtype: torch.dtype, head_dim: int, v_dim: int) -> str:
    """Why this kernel cannot take rows of these columns on target, or "" where it can."""
    if target.capability != 90:
        return f"{target.name} is not sm_90"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"q is {dtype}, not bfloat16 or float16"
    if (head_dim, v_dim) not in ((64, 64), (128, 128), (256, 256), (192, 128)):
        return f"head_dim={head_dim} and v_dim={v_dim}, neither 192 and 128 nor both 64, 128 or 256"
    return ""


def launch(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, left: int, right: int, scale: float, softcap: float = 0.0,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, seqused_k: Tensor | None = None,
    buffers: tuple[Tensor, ...] | None = None, block_map: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse. q, k, v: what unfit() and, with seqused_k, unfit_rows() let pass, not empty, with rows that TMA takes
    (_launch.tma_ready). Either both cu_seqlens (and batch 1), seqused_k, block_map or none. buffers: out, lse, and with lengths
    that the device alone knows the schedule (of packed sequences) and the table, both int32 and of plan_axes; None: made here."""
    batch, seq, heads, head_dim = q.shape
    context, kv_heads = k.shape[1:3]
    v_dim = v.shape[-1]
    group = heads // kv_heads
    target = target_of(q.device)
    mapped = block_map is not None  # then a tile may see nothing at all
    config = configure(head_dim, right >= 0)
    bn = config.block_n
    packed = cu_seqlens_q is not None or seqused_k is not None
    sizes = {"batch": batch, "seq": seq, "heads": heads, "k_len": context, "kv_heads": kv_heads, "head_dim": head_dim,
             "v_dim": v_dim, "sequences": batch if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1}  # fmt: skip
    if buffers is None:
        made = plan_axes(sizes, {"q": q, "cu_seqlens_q": cu_seqlens_q, "seqused_k": seqused_k}, target)
        shapes = [[made[axis] for axis in axes.split()] for axes in ("slots columns", "rounds programs fields")
                  if all(axis in made for axis in axes.split())]  # fmt: skip
        buffers = (torch.empty(batch, seq, heads, v_dim, dtype=q.dtype, device=q.device),
                   torch.empty(batch, heads, seq, dtype=torch.float32, device=q.device),
                   *(torch.empty(shape, dtype=torch.int32, device=q.device) for shape in shapes))  # fmt: skip
    out, lse, *planned = buffers
    offset = 0 if packed else context - seq
    walks: list[Any] = [None, None, None]
    # Blocks from the right that some row of a tile does not see all of.
    edges = BLOCK_M // bn + (packed or (offset + right) % bn > 0) if right >= 0 else int(packed or mapped or context % bn > 0)
    section = section_of(sizes, target, q.element_size())
    row_tiles = cdiv(seq, BLOCK_M)
    with on_device(q):
        if packed:
            table = planned[-1]
            bounds = Bounds(left, right, bn, context, 0 if seqused_k is None else key_step(k), seq)
            if cu_seqlens_q is not None:
                schedule_segments(cu_seqlens_q, cu_seqlens_k, None, seq, context, BLOCK_M, planned[0])
            order(planned[0] if cu_seqlens_q is not None else None, seqused_k, bounds, heads, min(section, heads), table, batch)
            lse_step = heads if seqused_k is not None else 1
        elif block_map is not None:
            numbers = seq, context, left, right, batch, heads, section
            table, *walks = _hopper_map.table_of_queries(block_map, BLOCK_M, bn, *numbers)
        else:
            table = equal_table(Bounds(left, right, bn, context, 0, seq), batch * heads, min(section, batch * heads),
                                min(target.sms, row_tiles * batch * heads), q.device)  # fmt: skip
        wide = head_dim == 192  # 128 columns and 64 more; beside their rings is room for half of out, as it is with 256
        width = 128 if wide else head_dim
        blocks = [n and descriptor(t, [1, rows, 1, n], ragged=packed) for t, rows, n in (
            (q, ROWS, width), (q, ROWS, 64 if wide else None), (k, bn, width), (k, bn, 64 if wide else None), (v, bn, v_dim),
            (out, ROWS, 64 if wide else min(v_dim, 128)))]  # fmt: skip
        _launch(
            _forward_kernel, (table.shape[1],),
            (*blocks, lse, table, sinks, (softcap or scale) * LOG2E, scale / softcap if softcap else None, table.shape[0] - 1,
             row_tiles, seq, context, lse_step if packed else heads, group, offset - left, offset + right, *walks),
            {"D": v_dim, "BN": bn, "K_STAGES": config.k_stages, "V_STAGES": config.v_stages, "LEFT": left >= 0,
             "RIGHT": min(right + 1, 2), "EDGES": edges, "PINGPONG": config.pingpong, "PACKED": packed,
             "EMPTY": packed or mapped or (right >= 0 and context < seq), "num_warps": 4, "maxnreg": 168},
        )  # fmt: skip
    return out, lse

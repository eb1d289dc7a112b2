"""Which program of the persistent Hopper attention does which tile of BLOCK_M queries, as a table it follows down a column.

Equal lengths are known to the host, which makes the table once and keeps it. Packed sequences and lengths that the device alone
knows are planned there, before every launch.
"""

from __future__ import annotations

import functools
import heapq

import torch
from torch import Tensor

from . import _attention_tiles as tiles
from ._gluon import gl, gluon, ragged_rows
from ._lang import cdiv, tl, triton
from ._launch import launch as _launch

BLOCK_M = 128
FIELDS = 8  # of an entry of a plan, six of them in use: 32 bytes, which a load brings into the L1 together


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


@triton.jit
def _blocks(plan, slot, used, left, right, SLOTS, CONTEXT, BM: tl.constexpr, BN: tl.constexpr):
    """(blocks of keys, 0 where there are no queries; keys, -1 for impossible ones) of slots."""
    at = plan + slot * 6
    ok = slot < SLOTS
    segment = tl.load(at, ok, other=0)
    row = tl.load(at + 1, ok, other=0) * BM
    rows = tl.load(at + 3, ok, other=0)
    keys = tl.load(at + 5, ok, other=0)
    if used is not None:
        keys = tl.load(used + segment, ok & (segment >= 0) & (row < rows), other=0)
        segment = tl.where((keys < 0) | (keys > CONTEXT), -1, segment)
    keys = tl.where(segment < 0, 0, keys)
    first = row + keys - rows
    begin = tl.zeros_like(row)
    end = tl.cdiv(keys, BN)
    if left is not None:
        begin = tl.maximum(first - left, 0) // BN
    if right is not None:
        end = tl.minimum(end, tl.cdiv(tl.maximum(first + BM + right, 0), BN))
    return tl.where(row < rows, tl.maximum(end - begin, 1), 0), tl.where(segment < 0, -1, keys)


@triton.jit(do_not_specialize=["left", "right", "SLOTS", "CONTEXT", "KEY_STEP", "HEADS", "SECTION", "PROGRAMS"])
def _order_kernel(
    plan, used, table, left, right, SLOTS, CONTEXT, KEY_STEP, HEADS, SECTION, PROGRAMS,
    BM: tl.constexpr, BN: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) * N + tl.arange(0, N)
    head = tl.program_id(1)
    blocks, keys = _blocks(plan, slot, used, left, right, SLOTS, CONTEXT, BM, BN)
    rank = tl.zeros([N], tl.int32)
    for first in range(0, SLOTS, CHUNK):
        other = first + tl.arange(0, CHUNK)
        theirs, _ = _blocks(plan, other, used, left, right, SLOTS, CONTEXT, BM, BN)
        before = (theirs[None, :] > blocks[:, None]) | (theirs[None, :] == blocks[:, None]) & (other[None, :] < slot[:, None])
        rank += tl.sum(before.to(tl.int32), 1)
    section = head // SECTION
    sections = tl.cdiv(HEADS, SECTION)
    place = rank * tl.minimum(SECTION, HEADS - section * SECTION) + head - section * SECTION
    turn = place // PROGRAMS
    column = place % PROGRAMS
    column = tl.where(turn % 2 == 1, PROGRAMS - 1 - column, column)
    column = (column + section * PROGRAMS // sections) % PROGRAMS
    turn += section * tl.cdiv(SLOTS * SECTION, PROGRAMS)
    to = table + (turn * PROGRAMS + column) * 8
    at = plan + slot * 6
    some = blocks > 0
    tl.store(to, head + slot * 0, some)
    tl.store(to + 1, tl.load(at + 1, some) * BM, some)
    tl.store(to + 2, tl.load(at + 2, some), some)
    tl.store(to + 3, tl.load(at + 3, some), some)
    tl.store(to + 4, tl.where(keys < 0, 0, tl.load(at + 4, some) + tl.load(at, some) * KEY_STEP), some)
    tl.store(to + 5, keys, some)


def plan(
    cu_q: Tensor, cu_k: Tensor | None, used: Tensor | None, tokens: int, keys: int, key_step: int, heads: int, section: int,
    sms: int, left: int, right: int, block_n: int,
) -> Tensor:  # fmt: skip
    """"rounds programs fields", int32, made on the device without reading a length: head (-1: no tile), first row of the tile,
    first query of its sequence, queries, first key, keys (-1 where the boundaries are impossible).

    cu_q, cu_k: boundaries `segments+1`, of `tokens` queries and `keys` keys. used: instead of cu_k, how many keys each segment
    has, `keys` at most, from key_step times its number on.

    Balance: `section` heads (whose k and v stay in the L2) at a time, their tiles ranked by blocks of keys and dealt to the
    programs from the longest on, forth and back like a snake, so that who had the longer tile of one round has the shorter one
    of the next. What remains uneven is the same in every section, as it depends on lengths alone: each begins with another
    program, 1 / sections of the way further round. With 16 and 64 uneven documents in 32k tokens, 32 heads and 132 programs the
    longest column has 0.2 to 0.9 % more blocks than the average (0.1 to 0.3 % where tiles go to whoever is free first, which
    takes atomics and a message from the producer to the consumers for every tile).
    """
    slots = tiles.schedule_slots(tokens, cu_q.shape[0] - 1, BLOCK_M)
    planned = torch.empty(slots, tiles.COLUMNS, dtype=torch.int32, device=cu_q.device)
    tiles.schedule(cu_q, cu_k, None, tokens, keys, BLOCK_M, planned)
    programs = min(sms, slots * heads)
    rounds = cdiv(heads, section) * cdiv(slots * section, programs) + 1
    table = torch.full((rounds, programs, FIELDS), -1, dtype=torch.int32, device=cu_q.device)
    n = 32
    _launch(
        _order_kernel, (cdiv(slots, n), heads),
        (planned, used, table, left if left >= 0 else None, right if right >= 0 else None, slots, keys, key_step, heads, section,
         programs),
        {"BM": BLOCK_M, "BN": block_n, "N": n, "CHUNK": 128, "num_warps": 4},
    )  # fmt: skip
    return table


# ---- what the kernel makes of an entry: PACKED is a plan's, otherwise schedule's ---------------------------------------------


@gluon.jit
def field(table, i, programs, FIELD: gl.constexpr):
    """A field of what _hopper_schedule.plan wrote for this program's round i."""
    return gl.load(table + (i * programs + gl.program_id(0)) * 8 + FIELD)


@gluon.jit
def entry_of(table, i, programs, PACKED: gl.constexpr):
    """What round i brings this program, negative where nothing: the number of a tile, or with PACKED a head. It is loaded a round
    ahead, and brings the other fields into the L1, from which tile_of and the end of a tile take them when they need them."""
    if PACKED:
        entry = field(table, i, programs, 0)
    else:
        entry = gl.load(table + i * programs + gl.program_id(0))
    return entry


@gluon.jit
def tile_of(
    entry, table, i, programs, row_tiles, heads, seq, context, low, high,
    BN: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PACKED: gl.constexpr, EMPTY: gl.constexpr,
):  # fmt: skip
    """Head, first row, first block of keys and number of blocks of an entry of the table, and its sequence: (batch, first query,
    queries, first key, keys, low, high), of which row i sees keys i + low to i + high. Keys are -1 where the boundaries are
    impossible."""
    if PACKED:
        row = field(table, i, programs, 1)
        q_start = field(table, i, programs, 2)
        queries = field(table, i, programs, 3)
        k_start = field(table, i, programs, 4)
        context = field(table, i, programs, 5)
        low += gl.maximum(context, 0) - queries
        high += gl.maximum(context, 0) - queries
        sequence = (0, q_start, queries, k_start, context, low, high)
        h = entry
    else:
        bh = entry // row_tiles
        row = (entry - bh * row_tiles) * 128
        b = bh // heads
    begin = 0
    end = gl.cdiv(context, BN)
    if LEFT:
        begin = gl.maximum(row + low, 0) // BN
    if RIGHT:
        end = gl.minimum(gl.cdiv(row + 128 + high, BN), end)
    blocks = end - begin
    if EMPTY:
        blocks = gl.maximum(blocks, 1)  # of masked logits alone
    if not PACKED:
        h = bh - b * heads
        sequence = (b, 0, seq, 0, context, low, high)
    return h, row, begin, blocks, sequence


@gluon.jit
def corner_of(b, start, length, row, h, column, PACKED: gl.constexpr):
    """Where TMA finds a block that begins at this row of a sequence."""
    if PACKED:
        z, y, x = ragged_rows(start, length, row)
        return (z, y, x, h, column)
    else:
        return (b, row, h, column)


@gluon.jit
def lse_row(b, h, q_start, heads, seq, PACKED: gl.constexpr):
    if PACKED:
        at = h.to(gl.int64) * seq + q_start.to(gl.int64) * heads
    else:
        at = (b * heads + h).to(gl.int64) * seq
    return at

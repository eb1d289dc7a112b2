"""Which program of the persistent Hopper attention does which tile of BLOCK_M queries, as a table it follows down a column.

Equal lengths are known to the host, which makes the table once and keeps it. Packed sequences and lengths that the device alone
knows are planned there, before every launch; so are equal lengths that a CUDA graph meets first: nothing may be copied into it.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._attention_tiles import COLUMNS, schedule_slots
from ._gluon import gl, gluon, ragged_rows
from ._lang import cdiv, tl, triton
from ._launch import capturing, constant, keep_for_graphs, tma_strides
from ._launch import launch as _launch
from ._target import Target

BLOCK_M = 128
_UNBOUNDED = 2**30  # as good as no bound, and no variant of the kernel: a CUDA graph can only take what is loaded already
FIELDS = 8  # of an entry of a plan, six of them in use: 32 bytes, which a load brings into the L1 together


class Bounds(NamedTuple):
    """Which keys a query sees, and where sequences lie. context: keys of each, or at most. seq, key_step: queries of each and how
    far the keys of one lie behind those of the one before, where sequences are not packed."""

    left: int
    right: int
    block_n: int
    context: int
    key_step: int
    seq: int


# ---- equal lengths, on the host ------------------------------------------------------------------------------------------------


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


@functools.lru_cache(maxsize=1024)
def _steps(bounds: Bounds) -> tuple[int, ...]:
    """Blocks of keys of each tile of a sequence."""
    left, right, bn, context, _, seq = bounds
    steps = []
    for first in range(context - seq, context, BLOCK_M):
        begin = max(first - left, 0) // bn if left >= 0 else 0
        end = cdiv(min(context, first + BLOCK_M + right) if right >= 0 else context, bn)
        steps.append(max(end - begin, 1))
    return tuple(steps)


_MOST = 256  # tables kept: a few to some hundred kilobytes each
_tables: dict[tuple[object, ...], Tensor] = {}


def equal_table(bounds: Bounds, sequences: int, heads: int, programs: int, device: torch.device) -> Tensor:
    """schedule() for sequences of bounds.seq queries, kept for the next call. To make it waits for the device, once a shape: so
    that it is there for every stream. In the capture of a CUDA graph one that is there is used, and never freed again; else
    the graph makes its own, by order().

    A thread of its own makes it: the operators of this one may be counted or recorded, and its memory may come out of the pool of
    a CUDA graph (torch.compile's warm-ups), which takes back what it does not know of."""
    key = (bounds, sequences, heads, programs, device)
    found = _tables.get(key)
    in_graph = capturing(device)
    if found is None and in_graph:
        row_tiles = cdiv(bounds.seq, BLOCK_M)
        rounds, _ = plan_shape(row_tiles, sequences, heads, programs)
        found = torch.empty(rounds, programs, dtype=torch.int32, device=device)
        order(None, None, bounds, sequences, heads, found, 1)
        return found
    if found is None:
        if len(_tables) >= _MOST:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # any stream may be reading one
            _tables.clear()
        with ThreadPoolExecutor(1) as thread:
            made = thread.submit(schedule, cdiv(bounds.seq, BLOCK_M), sequences, heads, programs, _steps(bounds), device)
        found = _tables[key] = constant(made.result())
    if in_graph:
        keep_for_graphs(found)
    return found


# ---- on the device -------------------------------------------------------------------------------------------------------------


@triton.jit
def _blocks(plan, slot, used, left, right, SLOTS, SEQ, CONTEXT, BM: tl.constexpr, BN: tl.constexpr):
    """(sequence, first row, blocks of keys or 0 where there are no queries, keys or -1 for impossible ones) of slots: of a
    schedule, or of sequences of SEQ queries each."""
    ok = slot < SLOTS
    if plan is not None:
        at = plan + slot * 6
        segment = tl.load(at, ok, other=0)
        row = tl.load(at + 1, ok, other=0) * BM
        rows = tl.load(at + 3, ok, other=0)
        keys = tl.load(at + 5, ok, other=0)
    else:
        segment = slot // tl.cdiv(SEQ, BM)
        row = (slot - segment * tl.cdiv(SEQ, BM)) * BM
        rows = tl.where(ok, SEQ, 0)
        keys = tl.where(ok, CONTEXT, 0)
    sequence = segment
    if used is not None:
        keys = tl.load(used + segment, ok & (row < rows), other=0)
        segment = tl.where((keys < 0) | (keys > CONTEXT), -1, segment)
    keys = tl.where(segment < 0, 0, keys)
    first = row + keys - rows
    begin = tl.maximum(first - left, 0) // BN
    end = tl.minimum(tl.cdiv(keys, BN), tl.cdiv(tl.maximum(first + BM + right, 0), BN))
    return sequence, row, tl.where(row < rows, tl.maximum(end - begin, 1), 0), tl.where(segment < 0, -1, keys)


@triton.jit(do_not_specialize=["left", "right", "SLOTS", "SEQ", "CONTEXT", "KEY_STEP", "HEADS", "SECTION", "PROGRAMS", "TURNS"])
def _order_kernel(
    plan, used, table, left, right, SLOTS, SEQ, CONTEXT, KEY_STEP, HEADS, SECTION, PROGRAMS, TURNS,
    FIELDS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program writes the entries of N slots of one head. Slots without a tile rank after those with one, and there are as
    many of them as it takes to say in every entry of a section's TURNS that there is none."""
    slot = tl.program_id(0) * N + tl.arange(0, N)
    head = tl.program_id(1)
    sequence, row, blocks, keys = _blocks(plan, slot, used, left, right, SLOTS, SEQ, CONTEXT, BM, BN)
    rank = tl.zeros([N], tl.int32)
    for first in range(0, tl.where(tl.program_id(0) * N < SLOTS, SLOTS, 0), CHUNK):
        other = first + tl.arange(0, CHUNK)
        _, _, theirs, _ = _blocks(plan, other, used, left, right, SLOTS, SEQ, CONTEXT, BM, BN)
        before = (theirs[None, :] > blocks[:, None]) | (theirs[None, :] == blocks[:, None]) & (other[None, :] < slot[:, None])
        rank += tl.sum(before.to(tl.int32), 1)
    rank = tl.where(slot < SLOTS, rank, slot)
    section = head // SECTION
    place = rank * tl.minimum(SECTION, HEADS - section * SECTION) + head - section * SECTION
    turn = place // PROGRAMS
    inside = turn < TURNS
    column = place % PROGRAMS
    column = tl.where(turn % 2 == 1, PROGRAMS - 1 - column, column)
    column = (column + section * PROGRAMS // tl.cdiv(HEADS, SECTION)) % PROGRAMS
    to = table + ((turn + section * TURNS) * PROGRAMS + column) * FIELDS
    some = blocks > 0
    if FIELDS == 1:
        tl.store(to, tl.where(some, head * SLOTS + slot, -1), inside)
    else:
        tl.store(to, tl.where(some, head, -1), inside)
        tl.store(to + 1, row, some)
        if plan is not None:
            at = plan + slot * 6
            tl.store(to + 2, tl.load(at + 2, some), some)
            tl.store(to + 3, tl.load(at + 3, some), some)
            tl.store(to + 4, tl.where(keys < 0, 0, tl.load(at + 4, some)), some)
        else:
            tl.store(to + 2, sequence * SEQ, some)
            tl.store(to + 3, tl.where(some, SEQ, 0), some)
            tl.store(to + 4, tl.where(keys < 0, 0, sequence * KEY_STEP), some)
        tl.store(to + 5, keys, some)
    if (tl.program_id(0) == 0) & (head == 0):
        last = table + tl.cdiv(HEADS, SECTION) * TURNS * PROGRAMS * FIELDS
        for first in range(0, PROGRAMS, CHUNK):
            program = first + tl.arange(0, CHUNK)
            tl.store(last + program * FIELDS, program * 0 - 1, program < PROGRAMS)


def plan_shape(slots: int, heads: int, section: int, sms: int) -> tuple[int, int]:
    """Rounds and programs of a table that order() makes."""
    programs = min(sms, slots * heads)
    return cdiv(heads, section) * cdiv(slots * section, programs) + 1, programs


def section_of(sizes: Mapping[str, int], target: Target, itemsize: int) -> int:
    """Query heads whose tiles go together: their k and v share a third of the L2. Of all batch entries, or with packed sequences
    of the one."""
    near = max(1, target.l2_bytes // 3 // (sizes["k_len"] * (sizes["head_dim"] + sizes["v_dim"]) * itemsize))
    return near * (sizes["heads"] // sizes["kv_heads"])


def plan_axes(sizes: Mapping[str, int], args: Mapping[str, Any], target: Target) -> dict[str, int]:
    """The axes of what is planned on the device before a launch: nothing for equal lengths. sizes: of the op attention."""
    slots = {}
    if args["cu_seqlens_q"] is not None:
        slots = {"slots": schedule_slots(sizes["seq"], sizes["sequences"], BLOCK_M), "columns": COLUMNS}
        tiles = slots["slots"]
    elif args["seqused_k"] is not None:
        tiles = sizes["batch"] * cdiv(sizes["seq"], BLOCK_M)
    else:
        return {}
    section = min(section_of(sizes, target, args["q"].element_size()), sizes["heads"])
    rounds, programs = plan_shape(tiles, sizes["heads"], section, target.sms)
    return {**slots, "rounds": rounds, "programs": programs, "fields": FIELDS}


def order(
    planned: Tensor | None, used: Tensor | None, bounds: Bounds, heads: int, section: int, table: Tensor, batch: int
) -> None:
    """Fill table "rounds programs [fields]", int32 and of plan_shape, on the device without reading a length. Fields: head (-1:
    no tile), first row of the tile, first query of its sequence, queries, first key, keys (-1 where the boundaries are
    impossible); without fields as schedule() has it, for heads that are sequences.

    planned: what tiles.schedule made of packed sequences in tiles of BLOCK_M; without it `batch` sequences of bounds.seq queries,
    whose keys are as many as used says, or all. used may not be given with planned.

    Balance: `section` heads (whose k and v stay in the L2) at a time, their tiles ranked by blocks of keys and dealt to the
    programs from the longest on, forth and back like a snake, so that who had the longer tile of one round has the shorter one
    of the next. What remains uneven is the same in every section, as it depends on lengths alone: each begins with another
    program, 1 / sections of the way further round. With 16 and 64 uneven documents in 32k tokens, 32 heads and 132 programs the
    longest column has 0.2 to 0.9 % more blocks than the average (0.1 to 0.3 % where tiles go to whoever is free first, which
    takes atomics and a message from the producer to the consumers for every tile).
    """
    slots = batch * cdiv(bounds.seq, BLOCK_M) if planned is None else planned.shape[0]
    programs = table.shape[1]
    turns = (table.shape[0] - 1) // cdiv(heads, section)
    least = heads - (cdiv(heads, section) - 1) * section  # heads of the last section
    n = 32
    _launch(
        _order_kernel, (cdiv(max(slots, cdiv(turns * programs, least)), n), heads),
        (planned, used, table, *(n if n >= 0 else _UNBOUNDED for n in bounds[:2]), slots, bounds.seq, bounds.context,
         bounds.key_step, heads, section, programs, turns),
        {"FIELDS": table.shape[2] if table.dim() == 3 else 1, "BM": BLOCK_M, "BN": bounds.block_n, "N": n, "CHUNK": 128,
         "num_warps": 4},
    )  # fmt: skip


def unfit_rows(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Why attention_hopper.py cannot take seqused_k with rows that lie so, or "" where it can."""
    if len(q) <= 1:
        return ""
    for name, t in (("q", q), ("k", k), ("v", v)):
        batch, row = tma_strides(t)[:2]
        if batch % row or (name == "q" and batch != row * t.shape[1]):
            return f"{name} has strides {t.stride()} with seqused_k, which are not those of one sequence after the other"
    if key_step(k) != key_step(v):
        return f"k has strides {k.stride()} with seqused_k and v {v.stride()}: their sequences are not equally far apart"
    return ""


def key_step(t: Tensor) -> int:
    """How many rows lie between the beginnings of two sequences of a batch."""
    batch, row = tma_strides(t)[:2]
    return batch // row


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
    entry, table, i, programs, row_tiles, heads, seq, context, low, high, lists, list_b, list_h,
    BN: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PACKED: gl.constexpr, EMPTY: gl.constexpr,
):  # fmt: skip
    """Head, first row, first block of keys (with lists: the tile's list) and number of blocks of an entry of the table, and its
    sequence: (batch, first query, queries, first key, keys, low, high), of which row i sees keys i + low to i + high. Keys are -1
    where the boundaries are impossible. list_b, list_h: as _hopper_map.steps has them."""
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
    if lists is not None:
        length = gl.cdiv(context, BN)
        begin = lists + (b * list_b + h * list_h + row // 128).to(gl.int64) * (length + 1)
        blocks = gl.load(begin + length)
    return h, row, begin, blocks, sequence


@gluon.jit
def block_at(begin, blocks, j, LISTED: gl.constexpr):
    """The block of keys that is visited as number j, from what tile_of gives."""
    if LISTED:
        n = gl.load(begin + j)
    else:
        n = begin + blocks - 1 - j
    return n


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

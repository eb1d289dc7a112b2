"""The token-to-expert index: which rows of the experts' GEMMs belong to whom, made on the device from each token's choices.

A slot is (token, j), j < top_k, numbered token * top_k + j. The rows are the slots sorted by expert, stable in their number.

    order    rows             slot of row r; undefined from offsets[experts] on
    inverse  tokens top_k     row of a slot, -1 where its index is no expert's
    offsets  experts + 1      first row of each expert, and the end of the last
    tiles    max_tiles 4      of each M tile: expert, first row, end row, number of tiles (0, 0, 0, number past the last);
                              a tile has at most tile_rows rows, one of TILE_ROWS

Every program of `index_kernel` reads the counts of all token tiles and sums those before its own: no scan launch, no atomics,
and equal bits from run to run. The host reads nothing: grids over tiles take the upper bound `max_tiles`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._lang import cdiv, next_power_of_2, tl, triton
from ._launch import launch as _launch
from ._spec import Args, ShapeError, Sizes
from ._target import Target

MAX_EXPERTS = 1024  # a program holds a row of all experts
TILE_ROWS = (8, 16, 32, 64, 128, 256)  # of an index; moe_experts takes some of them
# Instead of a number of rows: the op chooses by the tokens it gets, at most the number without its sign. What torch.compile and
# torch.export trace for any length asks for this. Never by an option: forward and backward must choose alike, and a compiled
# backward runs under nobody's options.
BY_LENGTH = (-64, -128)
LEAST = 16  # that is chosen by length
FEW_TOKENS = 64  # up to here whoever makes the last rows also sums them: one launch fewer


def max_tiles(rows: int, experts: int, tile_rows: int) -> int:
    """The most M tiles that `rows` rows of `experts` experts can need, whatever their distribution; tile_rows of BY_LENGTH:
    whatever is chosen too, an expression in rows that nobody has to compare."""
    if tile_rows < 0:
        return rows // LEAST + experts
    return rows // tile_rows + (min(experts, rows) if isinstance(rows, int) else torch.sym_min(experts, rows))


def by_length(tokens: int, top_k: int, experts: int, most: int) -> int:
    """tile_rows by the rows that an expert gets on average."""
    average = tokens * top_k / max(experts, 1)
    if average >= 64 and tokens > FEW_TOKENS:
        return most
    high = min(2 * tokens * top_k // max(experts, 1), tokens)
    return next((rows for rows in (LEAST, 32) if high <= rows), 64)


def height(tokens: int, top_k: int, experts: int, tile_rows: int) -> int:
    """tile_rows, chosen now where it is of BY_LENGTH."""
    return by_length(tokens, top_k, experts, -tile_rows) if tile_rows < 0 else tile_rows


def index_axes(op: str, tokens: int, top_k: int, experts: int, tile_rows: int) -> dict[str, int]:
    """The index's axes, after checks of the numbers."""
    if not 1 <= experts <= MAX_EXPERTS:
        raise ShapeError(f"{op}: experts={experts}, expected 1 to {MAX_EXPERTS}")
    if tile_rows not in TILE_ROWS and tile_rows not in BY_LENGTH:
        raise ValueError(f"{op}: tile_rows={tile_rows}, expected one of {TILE_ROWS}")
    rows = tokens * top_k
    if isinstance(rows, int) and rows >= 2**31:  # of a traced length when it is known
        raise ShapeError(f"{op}: tokens={tokens} times top_k={top_k} is {rows}, expected less than 2**31")
    return {"rows": rows, "experts+1": experts + 1, "max_tiles": max_tiles(rows, experts, tile_rows), "4": 4}


def index_reference(indices: Tensor, experts: int, tile_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """order, inverse, offsets and tiles of indices `tokens top_k`; no value of theirs decides a shape."""
    expert = indices.flatten().long()
    rows, device = expert.numel(), indices.device
    valid = (expert >= 0) & (expert < experts)
    expert = torch.where(valid, expert, experts)
    order = torch.argsort(expert, stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(rows, device=device))
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=device).scatter_add_(0, expert, torch.ones_like(expert))
    offsets = torch.cat((counts.new_zeros(1), counts[:experts].cumsum(0)))
    most, tile_rows = max_tiles(rows, experts, tile_rows), height(indices.shape[0], indices.shape[1], experts, tile_rows)
    tiles_of = (counts[:experts] + tile_rows - 1) // tile_rows
    end = tiles_of.cumsum(0)
    number = end[-1]
    tile = torch.arange(most, device=device)
    owner = torch.searchsorted(end, tile, right=True).clamp(max=experts - 1)
    first = offsets[owner] + (tile - (end - tiles_of)[owner]) * tile_rows
    last = torch.minimum(first + tile_rows, offsets[owner + 1])
    table = torch.where((tile < number)[:, None], torch.stack((owner, first, last), 1), 0)
    tiles = torch.cat((table, number.expand(len(tile), 1)), 1)
    inverse = torch.where(valid, inverse, -1).view(indices.shape)
    return order.int(), inverse.int(), offsets.int(), tiles.int()


def check_index(op: str, sizes: Sizes, args: Args) -> None:
    """Raises ValueError naming the argument whose values point outside what an experts' op has. Waits for the device."""
    rows, experts, tile_rows = sizes["rows"], sizes["experts"], sizes["tile_rows"]
    offsets, tiles = args["offsets"].long(), args["tiles"].long()
    bad = (offsets < 0) | (offsets > rows)
    bad[1:] |= offsets.diff() < 0
    bad[0] |= offsets[0] != 0
    _refuse(op, "offsets", offsets, bad, f"rows from 0 to at most {rows} that do not decrease")
    end = int(offsets[-1])
    order, inverse = args["order"][:end], args["inverse"]
    _refuse(op, "order", order, (order < 0) | (order >= rows), f"slots from 0 to {rows - 1}")
    _refuse(op, "inverse", inverse, (inverse < -1) | (inverse >= end), f"rows from 0 to {end - 1}, or -1")
    indices = args["indices"]
    bad = (inverse >= 0) & ((indices < 0) | (indices >= experts))
    _refuse(op, "indices", indices, bad, f"experts from 0 to {experts - 1} where inverse has a row")
    if not len(tiles):
        return
    e, first, last, number = tiles.unbind(1)
    bad = torch.zeros_like(tiles, dtype=torch.bool)
    bad[:, 3] = (number < 0) | (number > len(tiles)) | (number != number[0])
    _refuse(op, "tiles", tiles, bad, f"one number of tiles, from 0 to {len(tiles)}")
    used = torch.arange(len(tiles), device=tiles.device) < number
    bad[:, 0] = used & ((e < 0) | (e >= experts))
    _refuse(op, "tiles", tiles, bad, f"experts from 0 to {experts - 1}")
    e = e.clamp(0, experts - 1)
    bad[:, 1] = used & ((first < offsets[e]) | (first >= offsets[e + 1]))
    bad[:, 2] = used & ((last <= first) | (last > first + tile_rows) | (last > offsets[e + 1]))
    _refuse(op, "tiles", tiles, bad, f"rows of the tile's expert, at most {tile_rows}")


def _refuse(op: str, name: str, values: Tensor, bad: Tensor, expected: str) -> None:
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"{op}: {name} has {int(values[at])} at {at}, expected {expected}")


def index_block(experts: int) -> int:
    """Experts as the kernels hold them: a power of two, of 16 at least (a dot's smallest side)."""
    return max(16, next_power_of_2(experts))


def warps_for(block_tokens: int, experts: int) -> int:
    """Warps of a program that holds several matrices [block_tokens, experts]."""
    return max(4, min(16, block_tokens * index_block(experts) // 512))


INDEX_WARPS = 8


def index_reads(top_k: int, tokens: int, experts: int) -> dict[str, int]:
    """BT of read_choices, and AT_ONCE: of a token's slots how many it loads before it looks at the first, for each is a trip to
    L2; by what registers the matrices [tokens, experts] of a program of INDEX_WARPS leave."""
    elements = tokens * index_block(experts) // (32 * INDEX_WARPS)
    return {"BT": tokens, "AT_ONCE": min(8 if elements <= 4 else 4 if elements <= 8 else 2, next_power_of_2(top_k))}


def index_tile(experts: int) -> int:
    """Tokens of the tile that a program of INDEX_WARPS places at once: 4 elements a thread of each matrix [tokens, experts], of
    which there are several."""
    return min(32, max(1, 128 * INDEX_WARPS // index_block(experts)))


def index_once(tokens: int, experts: int) -> int:
    """Likewise of index_all: all of at most 64 tokens, where one program's registers hold them."""
    return tokens if index_block(experts) <= 128 else min(tokens, 2 * index_tile(experts))


@triton.jit
def _expert_of(indices, slot, live, E):
    """int32; -1 for what is none. Compared before narrowing: int64 may hold more."""
    e = tl.load(indices + slot, live, other=-1)
    return tl.where((e >= 0) & (e < E), e, -1).to(tl.int32)


@triton.jit
def read_choices(indices, token, live, E, K, AT_ONCE: tl.constexpr, BT: tl.constexpr, EP: tl.constexpr):
    """([BT, EP]: how often each expert is among a token's choices; the last of its slots there)."""
    selected = tl.zeros([BT, EP], tl.int32)
    slots = tl.full([BT, EP], -1, tl.int32)
    for first in range(0, K, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            j = first + i
            e = _expert_of(indices, token.to(tl.int64) * K + j, live & (j < K), E)
            hit = tl.arange(0, EP)[None, :] == e[:, None]
            selected += hit.to(tl.int32)
            slots = tl.where(hit, j, slots)
    return selected, slots


@triton.jit
def place(indices, selected, slots, before, total, token, live, order, inverse, E, K, DISTINCT: tl.constexpr, EP: tl.constexpr):
    """Write order and inverse of one token tile, of which read_choices gave selected and slots. before, total [EP]: rows of each
    expert in earlier tiles, and in all. DISTINCT: every slot has an expert and no token names one twice."""
    expert = tl.arange(0, EP)
    start = tl.cumsum(total, 0) - total
    at = (start + before)[None, :] + tl.cumsum(selected, 0) - selected
    if DISTINCT:
        slot = token[:, None] * K + slots
        tl.store(inverse + slot, at, selected > 0)
        tl.store(order + at, slot, selected > 0)
    else:
        for j in range(K):
            e = _expert_of(indices, token.to(tl.int64) * K + j, live, E)
            hit = expert[None, :] == e[:, None]
            row = tl.sum(tl.where(hit, at, 0), 1)
            at += hit.to(tl.int32)  # the next row, should a token name an expert twice
            slot = token * K + j
            tl.store(inverse + slot, tl.where(e >= 0, row, -1), live)
            tl.store(order + row, slot, live & (e >= 0))


@triton.jit
def tabulate(total, offsets, tiles, program, programs, E, MAX_TILES, TILE: tl.constexpr, EP: tl.constexpr):
    """Write this program's share of offsets and tiles. total [EP]: rows of each expert."""
    expert = tl.arange(0, EP)
    start = tl.cumsum(total, 0) - total
    count = (total + TILE - 1) // TILE
    first = tl.cumsum(count, 0) - count
    number = tl.sum(count, 0)
    if program == 0:
        tl.store(offsets + expert, start, expert < E)
        tl.store(offsets + E, tl.sum(total, 0))
    for i in range(program, tl.max(count, 0), programs):  # the i-th tile of every expert
        mine = i < count
        at = tiles + (first + i) * 4
        row = start + i * TILE
        tl.store(at, expert, mine)
        tl.store(at + 1, row, mine)
        tl.store(at + 2, tl.minimum(row + TILE, start + total), mine)
        tl.store(at + 3, number + tl.zeros_like(expert), mine)
    for m in range(number + program * EP, MAX_TILES, programs * EP):
        unused = m + expert < MAX_TILES
        at = tiles + (m + expert) * 4
        tl.store(at, tl.zeros_like(expert), unused)
        tl.store(at + 1, tl.zeros_like(expert), unused)
        tl.store(at + 2, tl.zeros_like(expert), unused)
        tl.store(at + 3, number + tl.zeros_like(expert), unused)


@triton.jit
def index_all(
    indices, order, inverse, offsets, tiles, T, E, K, MAX_TILES, DISTINCT: tl.constexpr, TILE: tl.constexpr, BT: tl.constexpr,
    ONE: tl.constexpr, AT_ONCE: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """The whole index, by one program, BT tokens at a time; ONE: that is all of them."""
    before = tl.zeros([EP], tl.int32)
    if ONE:
        token = tl.arange(0, BT)
        selected, slots = read_choices(indices, token, token < T, E, K, AT_ONCE, BT, EP)
        total = tl.sum(selected, 0)
        place(indices, selected, slots, before, total, token, token < T, order, inverse, E, K, DISTINCT, EP)
    else:
        counts = tl.zeros([BT, EP], tl.int32)
        for t in range(0, T, BT):
            token = t + tl.arange(0, BT)
            counts += read_choices(indices, token, token < T, E, K, AT_ONCE, BT, EP)[0]
        total = tl.sum(counts, 0)
        for t in range(0, T, BT):
            token = t + tl.arange(0, BT)
            selected, slots = read_choices(indices, token, token < T, E, K, AT_ONCE, BT, EP)
            place(indices, selected, slots, before, total, token, token < T, order, inverse, E, K, DISTINCT, EP)
            before += tl.sum(selected, 0)
    tabulate(total, offsets, tiles, 0, 1, E, MAX_TILES, TILE, EP)


@triton.jit(do_not_specialize=["T", "TILES", "PER", "MAX_TILES"])
def index_kernel(
    indices, counts, order, inverse, offsets, tiles, T, TILES, PER, E, K, MAX_TILES, DISTINCT: tl.constexpr,
    COUNTED: tl.constexpr, BT: tl.constexpr, AT_ONCE: tl.constexpr, EP: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each program places the tokens of PER tiles of COUNTED, whose counts [TILES, E] an earlier launch left; BT at a time."""
    program = tl.program_id(0)
    expert = tl.arange(0, EP)
    mine = program * PER
    # Summed over the rows once, at the end: every sum over rows is a trip through shared memory.
    earlier = tl.zeros([ROWS, EP], tl.int32)
    others = tl.zeros([ROWS, EP], tl.int32)
    for i in range(0, TILES, 4 * ROWS):
        for u in tl.static_range(4):  # so many loads are under way at once
            tile = i + u * ROWS + tl.arange(0, ROWS)
            at = counts + tile[:, None].to(tl.int64) * E + expert[None, :]
            n = tl.load(at, (tile < TILES)[:, None] & (expert < E)[None, :], other=0)
            earlier += tl.where((tile < mine)[:, None], n, 0)
            others += tl.where((tile < mine)[:, None], 0, n)
    before = tl.sum(earlier, 0)
    total = before + tl.sum(others, 0)
    for t in range(mine * COUNTED, tl.minimum((mine + PER) * COUNTED, T), BT):
        token = t + tl.arange(0, BT)
        selected, slots = read_choices(indices, token, token < T, E, K, AT_ONCE, BT, EP)
        place(indices, selected, slots, before, total, token, token < T, order, inverse, E, K, DISTINCT, EP)
        before += tl.sum(selected, 0)
    tabulate(total, offsets, tiles, program, tl.num_programs(0), E, MAX_TILES, TILE, EP)


def launch_index(
    indices: Tensor, counts: Tensor, index: tuple[Tensor, ...], experts: int, tile_rows: int, block_tokens: int, distinct: bool,
    target: Target,
) -> None:
    """Fill index, the tensors order, inverse, offsets and tiles, from indices and the counts of their tiles of block_tokens.
    distinct: every slot has an expert and no token names one twice."""
    tokens, top_k = indices.shape
    token_tiles, tile_rows = counts.shape[0], height(tokens, top_k, experts, tile_rows)
    # Every program reads all counts: a few programs an SM, or they would be read too often.
    per = cdiv(token_tiles, 2 * target.sms)
    block = index_tile(experts)
    _launch(
        index_kernel, (cdiv(token_tiles, per),),
        (indices, counts, *index, tokens, token_tiles, per, experts, top_k, index[3].shape[0]),
        {"DISTINCT": distinct, "COUNTED": block_tokens, **index_reads(top_k, min(block, block_tokens), experts),
         "EP": index_block(experts), "TILE": tile_rows, "ROWS": 2 * block, "num_warps": INDEX_WARPS},
    )  # fmt: skip

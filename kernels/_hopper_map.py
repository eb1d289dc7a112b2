"""Block maps for the Hopper attention: the tiles that a program walks, as lists, and which of the programs begin first.

Made on the device by torch; nothing is read on the host. A list is a row of int32 as long as it can get, and one number more:
how many of the others count. What windows hide from every row of a tile is in no list, so that a tile is read and masked where it
would be without a map.
"""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import Tensor

from ._attention_tiles import MAP_BLOCK
from ._lang import cdiv


def seen(block_map: Tensor, rows: int, columns: int, seq: int, context: int, left: int, right: int) -> Tensor:
    """bool "1|batch 1|heads row_tiles column_tiles": whether a query of a tile of `rows` sees a key of a tile of `columns`.

    rows and columns divide MAP_BLOCK; left and right are those of a window, negative without a bound."""
    r, c = MAP_BLOCK // rows, MAP_BLOCK // columns
    tiles = repeat(block_map, "b h rows columns -> b h (rows r) (columns c)", r=r, c=c)
    tiles = tiles[:, :, : cdiv(seq, rows), : cdiv(context, columns)]
    # Places of the first and the last of each tile.
    query = torch.arange(context - seq, context, rows, device=block_map.device)[:, None]
    key = torch.arange(0, context, columns, device=block_map.device)
    if right >= 0:
        tiles = tiles & (key <= (query + (rows - 1)).clamp(max=context - 1) + right)
    if left >= 0:
        tiles = tiles & ((key + (columns - 1)).clamp(max=context - 1) >= query - left)
    return tiles


def without_hidden(t: Tensor, seq: int, left: int) -> Tensor:
    """k or v "batch context kv_heads columns" with zeros before the first query's window, where a block of it has keys that count
    as well: 0 times NaN is NaN."""
    hidden = t.shape[1] - seq - left
    if left < 0 or hidden <= 0 or hidden % MAP_BLOCK == 0:
        return t
    return torch.cat([torch.zeros_like(t[:, :hidden]), t[:, hidden:]], 1)


def _listed(marks: Tensor) -> Tensor:
    """Where the last axis is True, from the first on; then the rest."""
    return torch.sort(marks.to(torch.uint8), dim=-1, descending=True, stable=True).indices.to(torch.int32)


def table_of_queries(
    block_map: Tensor, rows: int, columns: int, seq: int, context: int, left: int, right: int, batch: int, heads: int,
    section: int,
) -> tuple[Tensor, Tensor, int, int]:  # fmt: skip
    """The table of tiles as attention_hopper.py follows it, keys_of_queries, and its steps. Every tile has a program of its own:
    how long one takes is not known on the host, and who is free next is the GPU's to say."""
    lists = keys_of_queries(block_map, rows, columns, seq, context, left, right)
    tiles = order(lists, batch, heads, section)
    return torch.stack([tiles, torch.full_like(tiles, -1)]), lists, *steps(lists)


def keys_of_queries(block_map: Tensor, rows: int, columns: int, seq: int, context: int, left: int, right: int) -> Tensor:
    """Lists "1|batch 1|heads row_tiles column_tiles+1" of the tiles of keys, from the last to the first; where there is none, one
    past the end, which TMA fills with zeros and the end of the context masks. Arguments as of seen."""
    tiles = seen(block_map, rows, columns, seq, context, left, right)
    n = tiles.shape[-1]
    numbers = tiles.sum(-1, keepdim=True, dtype=torch.int32)
    lists = n - 1 - _listed(tiles.flip(-1))
    lists[..., :1].masked_fill_(numbers == 0, n)
    return torch.cat([lists, numbers.clamp(min=1)], -1)


def queries_of_keys(
    block_map: Tensor, rows: int, columns: int, seq: int, context: int, left: int, right: int, group: int
) -> Tensor:
    """Lists "1|batch 1|kv_heads column_tiles group*row_tiles+1" of the tiles of queries of all heads of a group, each as head of
    the group * row_tiles + tile. That of tile n of keys begins with number n * columns / rows, round and round, so that programs
    of one head do not add to the same rows at once, not to those either that see all keys."""
    tiles = seen(block_map, rows, columns, seq, context, left, right)
    tiles = tiles.expand(-1, group if tiles.shape[1] == 1 else -1, -1, -1)
    tiles = rearrange(tiles, "b (kv group) q_tiles k_tiles -> b kv k_tiles (group q_tiles)", group=group)
    n, most = tiles.shape[2:]
    numbers = tiles.sum(-1, keepdim=True, dtype=torch.int32)
    ahead = torch.arange(0, n * (columns // rows), columns // rows, device=tiles.device)[:, None]
    at = torch.arange(most, device=tiles.device)
    turned = torch.where(at < numbers, (at + ahead) % numbers.clamp(min=1), at)
    return torch.cat([_listed(tiles).gather(-1, turned), numbers], -1)


def steps(lists: Tensor) -> tuple[int, int]:
    """How many lists lie between those of two batch entries and of two heads."""
    batch, heads, n = lists.shape[:3]
    return heads * n * (batch > 1), n * (heads > 1)


def order(lists: Tensor, batch: int, heads: int, section: int) -> Tensor:
    """int32 "programs": head of the batch * tiles + tile, for every list of every head, in the order in which they begin.

    The longest first, so that none is left for the end: to a power of two, within which `section` heads (whose tensors the L2
    holds) come before the next, of these again the longest first."""
    numbers = lists[..., -1].expand(batch, heads, -1).reshape(batch * heads, -1)
    power = torch.frexp(numbers.float()).exponent
    sections = torch.arange(batch * heads, device=lists.device)[:, None] // section - power * cdiv(batch * heads, section)
    return (sections * lists.shape[-1] - numbers).flatten().argsort(stable=True).to(torch.int32)

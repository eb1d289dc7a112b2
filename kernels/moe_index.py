"""The token-to-expert index of choices made elsewhere: a model's own router, or another implementation's.

    indices  tokens top_k     int32 or int64; what is outside 0 to experts - 1 belongs to no expert (expert parallelism: to none
                              of this rank's). An expert may be named twice by a token.
    order, inverse, offsets, tiles     int32: see _moe_index.py, as for what tile_rows may be

Reads indices once; writes rows + tokens*top_k + experts + 1 + 4*max_tiles elements. One launch for few tokens, two for many,
with a row of counts for each tile of tokens between them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._lang import cdiv, tl, triton
from ._launch import launch as _launch
from ._launch import on_device
from ._moe_index import (
    INDEX_WARPS,
    height,
    index_all,
    index_axes,
    index_block,
    index_reads,
    index_reference,
    index_tile,
    launch_index,
    read_choices,
)
from ._spec import Args, Op, Sizes, Spec, Stage, Write
from ._target import target_of


def _most(experts: int) -> int:
    """Tokens that are counted together; no more, and one program does all."""
    return min(64, max(16, 8192 // index_block(experts)))


def _axes(sizes: Sizes, args: Args) -> dict[str, int]:
    tokens, experts = sizes["tokens"], args["experts"]
    found = index_axes("moe_index", tokens, sizes["top_k"], experts, args["tile_rows"])
    more = {"experts": experts}
    if isinstance(tokens, int) and tokens > (most := _most(experts)):  # a trace for any length has no scratch
        more["token_tiles"] = cdiv(tokens, most)
    return {**found, **more}


SPEC = Spec(
    name="moe_index",
    reads={"indices": "tokens top_k"},
    dtypes=(torch.int32, torch.int64),
    writes={
        "order": Write("rows", "int32"),
        "inverse": Write("tokens top_k", "int32"),
        "offsets": Write("experts+1", "int32"),
        "tiles": Write("max_tiles 4", "int32"),
    },
    scratch={"counts": Write("token_tiles experts", "int32")},
    derive=_axes,
    stages=(
        Stage("moe_index_counts", ("indices",), ("counts",), lambda s, a: s["rows"]),
        Stage("moe_index", ("indices", "counts"), ("order", "inverse", "offsets", "tiles"), lambda s, a: s["rows"]),
    ),
)


def reference(indices: Tensor, experts: int, tile_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return index_reference(indices, experts, tile_rows)


@triton.jit(do_not_specialize=["T"])
def _count_kernel(
    indices, counts, T, E, K, COUNTED: tl.constexpr, BT: tl.constexpr, AT_ONCE: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, EP)
    selected = tl.zeros([BT, EP], tl.int32)
    for i in tl.static_range(0, COUNTED, BT):
        token = tl.program_id(0) * COUNTED + i + tl.arange(0, BT)
        selected += read_choices(indices, token, token < T, E, K, AT_ONCE, BT, EP)[0]
    tl.store(counts + tl.program_id(0).to(tl.int64) * E + expert, tl.sum(selected, 0), expert < E)


@triton.jit(do_not_specialize=["T", "MAX_TILES"])
def _single_kernel(
    indices, order, inverse, offsets, tiles, T, E, K, MAX_TILES, TILE: tl.constexpr, BT: tl.constexpr, AT_ONCE: tl.constexpr,
    EP: tl.constexpr,
):  # fmt: skip
    index_all(indices, order, inverse, offsets, tiles, T, E, K, MAX_TILES, False, TILE, BT, False, AT_ONCE, EP)


def launch(indices: Tensor, experts: int, tile_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    args = {"indices": indices, "experts": experts, "tile_rows": tile_rows}
    sizes = SPEC.axes(args)
    index = SPEC.empty(args, sizes)
    (counts,) = SPEC.empty_scratch(args, sizes)
    tokens, top_k = sizes["tokens"], sizes["top_k"]
    order, inverse, offsets, tiles = index
    if not sizes["rows"]:
        return order, inverse, offsets.zero_(), tiles.zero_()
    indices = indices.contiguous()
    counted = _most(experts)
    how = {**index_reads(top_k, min(index_tile(experts), counted), experts), "EP": index_block(experts), "num_warps": INDEX_WARPS}
    with on_device(indices):
        if tokens <= counted:
            _launch(_single_kernel, (1,), (indices, *index, tokens, experts, top_k, tiles.shape[0]),
                    {"TILE": height(tokens, top_k, experts, tile_rows), **how})  # fmt: skip
        else:
            _launch(_count_kernel, (counts.shape[0],), (indices, counts, tokens, experts, top_k), {"COUNTED": counted, **how})
            launch_index(indices, counts, index, experts, tile_rows, counted, False, target_of(indices.device))
    return order, inverse, offsets, tiles


OP = Op(SPEC, launch, reference)

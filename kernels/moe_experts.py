"""The experts of a mixture: each token through its top_k experts' gated MLPs, summed by its weights (Shazeer et al. 2017).

    gate, up = halves of x[token] @ gate_up_weight[e].T + gate_up_bias[e]        for every row: a token and one of its experts e
    y        = gated(gate, up) @ down_weight[e].T + down_bias[e]
    out      = sum over the token's rows of weight * y, and residual              in the order of its experts, in fp32

    x, residual, out   tokens hidden
    gate_up_weight  experts gate_up hidden, gate_up = 2 * ffn: gate rows, then up rows; interleaved: gate and up in turn
    down_weight     experts hidden ffn
                    transposed: the two are stored `experts hidden gate_up` and `experts ffn hidden`
    gate_up_bias, down_bias   experts gate_up, experts hidden
    weights         tokens top_k, x's dtype or fp32; indices, order, inverse, offsets, tiles: the index, see _moe.py
    gate_up         rows gate_up, with save: before the activation, as stored, for the backward; without, it computes them again

gated: activation(gate) * up, or clamped_swish: (up + 1) * gate * sigmoid(alpha * gate), with gate <= limit, |up| <= limit.
Tokens are gathered by the first product and nothing is sorted but the index; nothing is added atomically: equal bits each run.

HBM, in elements: reads x, the weights of the experts that have a row, weights, residual; writes out; between the launches
`rows ffn` and, but for one token, `rows hidden`. One token, where the weights' rows are dense: both products as sums over
them, the second over all its experts. Up to 64: of the programs that make the rows of some columns the last to end sums them.
More: a third launch does; tiles of 128 rows are _moe_hopper.py's where it takes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _moe
from ._lang import cdiv
from ._launch import on_device
from ._moe_products import (
    EXPERT_BYTES,
    READS,
    combine_launch,
    gate_up_flops,
    gate_up_launch,
    rows_launch,
    tile_bytes,
)
from ._moe_vector import launch_vector
from ._spec import Args, Op, Sizes, Spec, Stage, Write, accumulate_dtype, flag
from ._target import target_of
from .moe_experts_backward import OP as BACKWARD


def _form(sizes: Sizes, args: Args) -> str:
    how = _moe.form(sizes["tokens"], sizes["tile_rows"], args["transposed"], target_of(args["x"].device))
    # Where nothing is launched for gate and up, nothing sets the counters of "few" to 0.
    return "grouped" if how == "few" and not (sizes["ffn"] and sizes["hidden"]) else how


def _down_flops(s: Sizes, args: Args) -> int:
    return 2 * s["rows"] * s["hidden"] * s["ffn"]


def _axes(sizes: Sizes, args: Args) -> dict[str, int]:
    """And what there is in some forms only."""
    sizes = {**sizes, **_moe.check("moe_experts", sizes, args)}
    if not isinstance(sizes["rows"], int):
        return sizes  # a trace for any length: no result has the axes of scratch
    how = _form(sizes, args)
    made = {**sizes, "vector_rows" if how == "vector" else "matrix_rows": sizes["rows"]}
    if how != "few":
        return made
    down = _moe.configure("down", sizes["tile_rows"], args["x"].element_size(), target_of(args["x"].device))
    return {**made, "column_tiles": cdiv(sizes["hidden"], down.block_n)}


_GATE_UP = ("x", "gate_up_weight", "gate_up_bias")
_DOWN = ("down_weight", "down_bias")
SPEC = Spec(
    name="moe_experts",
    reads={**READS, "residual": "tokens hidden"},
    optional=frozenset({"gate_up_bias", "down_bias", "residual"}),
    any_dtype=frozenset({"weights", *_moe.INDEX}),
    writes={"out": Write("tokens hidden", "x"), "gate_up": Write("rows gate_up", "x", flag("save"))},
    derive=_axes,
    read_bytes={**EXPERT_BYTES, "tiles": tile_bytes},
    scratch={
        "h": Write("matrix_rows ffn", "x"), "vector_h": Write("vector_rows ffn", "x"), "y": Write("matrix_rows hidden", "x"),
        "arrived": Write("column_tiles", "int32"),
    },
    stages=(
        Stage("moe_gate_up", (*_GATE_UP, "order", "tiles"), ("h", "gate_up", "arrived"), gate_up_flops, "h"),
        Stage("moe_gate_up", (*_GATE_UP, "indices", "inverse"), ("vector_h", "gate_up"), gate_up_flops, "vector_h"),
        Stage("moe_down", ("vector_h", *_DOWN, "indices", "inverse", "weights", "residual"), ("out",), _down_flops, "vector_h"),
        Stage("moe_down", ("h", *_DOWN, "tiles", "y", "inverse", "weights", "residual", "arrived"), ("y", "out", "arrived"),
              _down_flops, "arrived"),
        Stage("moe_down", ("h", *_DOWN, "tiles"), ("y",), _down_flops, "y", when=lambda s: "column_tiles" not in s),
        Stage("moe_combine", ("y", "inverse", "weights", "residual"), ("out",), lambda s, a: 2 * s["rows"] * s["hidden"], "y",
              when=lambda s: "column_tiles" not in s),
    ),
)  # fmt: skip


def reference(
    x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None,
    weights: Tensor, indices: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, tiles: Tensor, activation: str,
    alpha: float, limit: float, transposed: bool, interleaved: bool, tile_rows: int, save: bool,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    top_k, acc = weights.shape[1], accumulate_dtype(x.dtype)
    gate_up_weight, down_weight = (w.mT if transposed else w for w in (gate_up_weight, down_weight))
    gate_up = x.new_zeros(order.shape[0], gate_up_weight.shape[1])
    y = x.new_zeros(order.shape[0], x.shape[1])
    for e, rows in _moe.plain_groups(offsets):
        token = order[rows] // top_k
        bias = None if gate_up_bias is None else gate_up_bias[e]
        gate_up[rows] = torch.nn.functional.linear(x[token], gate_up_weight[e], bias)
        h = _moe.plain_gated(*_moe.plain_halves(gate_up[rows], interleaved), activation, alpha, limit)
        y[rows] = torch.nn.functional.linear(h, down_weight[e], None if down_bias is None else down_bias[e])
    out = _moe.plain_combine(y.to(acc), weights.to(acc), inverse)
    out = (out if residual is None else out + residual.to(acc)).to(x.dtype)
    return out, gate_up if save else gate_up.new_empty(0)


def launch(
    x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None,
    weights: Tensor, indices: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, tiles: Tensor, activation: str,
    alpha: float, limit: float, transposed: bool, interleaved: bool, tile_rows: int, save: bool,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    args: dict[str, Any] = dict(locals())
    sizes = SPEC.axes(args)
    args.update({name: args[name].contiguous() for name in _moe.INDEX})
    args["residual"] = None if residual is None else residual.contiguous()
    out, gate_up = SPEC.empty(args, sizes)
    h, vector_h, y, arrived = SPEC.empty_scratch(args, sizes)
    saved, how, weights = gate_up if save else None, _form(sizes, args), weights.contiguous()
    with on_device(x):
        if not sizes["rows"]:
            _ = out.zero_() if residual is None else out.copy_(residual)
        elif how == "vector":
            launch_vector(vector_h, out, saved, args, sizes, weights)
        else:
            few = (out, weights, arrived) if how == "few" else None
            gate_up_launch(args, sizes, h, saved, arrived if few else None)
            rows_launch("down", h, down_weight, down_bias, y, args, sizes, transposed, sums_to=few)
            if not few:
                combine_launch(y, args["inverse"], weights, args["residual"], out, sizes["top_k"])
    return out, gate_up


OP = Op(SPEC, launch, reference, BACKWARD, passthrough={"residual": "grad_out"})

"""Linear layers chosen by token: each row by the matrix of its expert, to slots or to a sum by token. With them the q and o
projections of attention experts (mixture of attention heads, Zhang et al. 2022, arXiv 2210.05144).

    without weights   out[slot]  = x[token] @ weight[e].T + bias[e]                   of every slot (token, j) and its expert e
    with weights      out[token] = sum over its slots of weights * (x[slot] @ weight[e].T + bias[e]), + residual + out_bias
                                   in the order of the token's slots, in fp32

    x         tokens in; with weights, tokens top_k*in: a token's slots, as `top_k in` or, with heads, `heads top_k in/heads`
    out       tokens top_k*out, likewise; with weights, tokens out, and so is residual
    weight    experts out in, transposed: experts in out            bias   experts out            out_bias   out
    weights   tokens top_k, x's dtype or fp32; indices, order, inverse, offsets, tiles: the index, see _moe.py

Slots with heads are queries of heads*top_k heads, of which top_k in a row share a head of keys: keys and values are not repeated,
and nothing is permuted. A slot without a row gives 0. Nothing is added atomically: equal bits each run.

HBM, in elements: reads x, the weights of the experts that have a row, and what else is given; writes out. One launch; with
weights two, and `rows out` between them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _moe
from ._launch import on_device
from ._moe_products import combine_launch, expert_bytes, rows_launch, tile_bytes
from ._spec import Args, Op, ShapeError, Sizes, Spec, Stage, Write, accumulate_dtype
from .moe_linear_backward import OP as BACKWARD
from .moe_linear_backward import READS, check, plain_joined, plain_slots, product_flops, width_of


def _axes(sizes: Sizes, args: Args) -> dict[str, int]:
    for name in ("out_bias", "residual"):
        if args[name] is not None and args["weights"] is None:
            raise ValueError(f"moe_linear: {name} is given, but weights is None: slots have none")
    found = check("moe_linear", sizes, args)
    for name, axis in (("out_bias", "out_bias_out"), ("residual", "residual_out")):
        if sizes.get(axis, found["out"]) != found["out"]:
            shape = tuple(args[name].shape)
            raise ShapeError(f"moe_linear: {name} has shape {shape}, expected a last axis of out={found['out']}")
    if args["weights"] is None or not isinstance(sizes["rows"], int):
        return found  # without weights, and in a trace for any length, there is no scratch
    return {**found, "summed_rows": sizes["rows"]}


SPEC = Spec(
    name="moe_linear",
    reads={"x": "tokens x_width", **READS, "out_bias": "out_bias_out", "residual": "tokens residual_out"},
    optional=frozenset({"bias", "weights", "out_bias", "residual"}),
    any_dtype=frozenset({"weights", *_moe.INDEX}),
    writes={"out": Write("tokens out_width", "x")},
    derive=_axes,
    read_bytes={"weight": expert_bytes("weight"), "bias": expert_bytes("bias"), "tiles": tile_bytes},
    scratch={"y": Write("summed_rows out", "x")},
    stages=(
        Stage("moe_linear", ("x", "weight", "bias", "order", "tiles", "inverse"), ("out",), product_flops,
              when=lambda s: "summed_rows" not in s),
        Stage("moe_linear", ("x", "weight", "bias", "order", "tiles"), ("y",), product_flops),
        Stage("moe_combine", ("y", "inverse", "weights", "out_bias", "residual"), ("out",),
              lambda s, a: 2 * s["rows"] * s["out"], "y"),
    ),
)  # fmt: skip


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, weights: Tensor | None, out_bias: Tensor | None, residual: Tensor | None,
    indices: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, tiles: Tensor, transposed: bool, heads: int,
    tile_rows: int,
) -> tuple[Tensor]:  # fmt: skip
    top_k, acc = indices.shape[1], accumulate_dtype(x.dtype)
    weight = weight.mT if transposed else weight
    given = x if weights is None else plain_slots(x, top_k, heads)
    y = x.new_zeros(order.shape[0], weight.shape[1])
    for e, rows in _moe.plain_groups(offsets):
        at = order[rows] // top_k if weights is None else order[rows]
        y[rows] = torch.nn.functional.linear(given[at], weight[e], None if bias is None else bias[e])
    if weights is None:
        return (plain_joined(y, inverse, heads),)
    out = _moe.plain_combine(y.to(acc), weights.to(acc), inverse)
    for more in (residual, out_bias):
        out = out if more is None else out + more.to(acc)
    return (out.to(x.dtype),)


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, weights: Tensor | None, out_bias: Tensor | None, residual: Tensor | None,
    indices: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, tiles: Tensor, transposed: bool, heads: int,
    tile_rows: int,
) -> tuple[Tensor]:  # fmt: skip
    args: dict[str, Any] = dict(locals())
    sizes = SPEC.axes(args)
    args.update({name: args[name].contiguous() for name in _moe.INDEX})
    (out,), (y,), width = SPEC.empty(args, sizes), SPEC.empty_scratch(args, sizes), width_of(args, sizes)
    if not sizes["tokens"]:
        return (out,)
    with on_device(x):
        if weights is None:
            rows_launch("gate_up", x, weight, bias, out, args, sizes, transposed, source="tokens", to_slots=True, width=width)
        else:
            rows_launch("down", x, weight, bias, y, args, sizes, transposed, source="slots", width=width)
            residual, out_bias = (None if t is None else t.contiguous() for t in (residual, out_bias))
            combine_launch(y, args["inverse"], weights.contiguous(), residual, out, sizes["top_k"], out_bias)
    return (out,)


OP = Op(SPEC, launch, reference, BACKWARD, passthrough={"residual": "grad_out"})

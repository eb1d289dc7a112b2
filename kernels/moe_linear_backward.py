"""Gradients of linear layers chosen by token: through the product, and of its weights, biases and the weights of the sum.

    without weights   grad_x[token] = sum over its slots of grad_out[slot] @ weight[e]          in the order of its slots, in fp32
                      grad of weight[e] = grad_out[slot].T @ x[token],  of bias[e] = sum of grad_out[slot]        over e's rows
    with weights      d = grad_out[token] @ weight[e],  grad_x[slot] = weights * d
                      grad of weights = <x[slot], d> + <bias[e], grad_out[token]>
                      grad of weight[e] = grad_out[token].T @ (weights * x[slot]),  of bias[e] = sum of weights * grad_out[token]

Arguments and axes as in moe_linear.py. A slot without a row gets 0, and so do an expert's weights without one. Nothing is added
atomically, and no expert's sums meet rows of another.

HBM, in elements: reads grad_out, x, and the weights of the experts that have a row; writes the gradients; without weights
`rows in` go between the launches for grad_x, with them weights * x `rows in` for weight's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _moe
from ._gemm import sum_rows
from ._lang import cdiv
from ._launch import contiguous_last, on_device
from ._moe_gradients import grad_bias_launch, grad_hidden_launch, grad_weight_launch, grad_weights_launch, hidden_config
from ._moe_products import combine_launch, expert_bytes, rows_launch, tile_bytes
from ._spec import Args, Op, ShapeError, Sizes, Spec, Stage, Write, accumulate_dtype, flag

NAME = "moe_linear_backward"
READS = {"weight": "experts weight_rows weight_columns", "bias": "experts bias_out", "weights": "tokens top_k", **_moe.INDEX}
_NO_GATE = {"activation": "", "interleaved": False}


def check(op: str, sizes: Sizes, args: Args) -> dict[str, int]:
    """in, out and out_width, and what check_rows finds. Raises naming the argument that does not fit the others."""
    sums, heads, top_k = args["weights"] is not None, args["heads"], sizes["top_k"]
    n, k = _moe.sides(sizes, "weight", args["transposed"])
    name, wide = ("in", k) if sums else ("out", n)
    if heads < 1 or wide % heads:
        raise ValueError(f"{op}: heads={heads}, expected a divisor of {name}={wide}")
    x_width, out_width = (top_k * k, n) if sums else (k, top_k * n)
    if sizes["x_width"] != x_width:
        shape, expected = tuple(args["x"].shape), f"(tokens {'top_k*in' if sums else 'in'}={x_width})"
        raise ShapeError(f"{op}: x has shape {shape}, expected {expected} for a weight of in={k}")
    if sizes.get("bias_out", n) != n:
        raise ShapeError(f"{op}: bias has shape {tuple(args['bias'].shape)}, expected (experts out={n})")
    return {"in": k, "out": n, "out_width": out_width, **_moe.check_rows(op, sizes, args)}


def width_of(args: Args, sizes: Sizes) -> int:
    """Of the heads of slots, 0: they have none."""
    return 0 if args["heads"] == 1 else sizes["out" if args["weights"] is None else "in"] // args["heads"]


def plain_slots(t: Tensor, top_k: int, heads: int) -> Tensor:
    """`tokens heads*top_k*width` as `slots heads*width`."""
    return t.unflatten(1, (heads, top_k, -1)).transpose(1, 2).flatten(2).flatten(0, 1)


def plain_joined(y: Tensor, inverse: Tensor, heads: int) -> Tensor:
    """`tokens heads*top_k*width` of y `rows heads*width`; 0 where a slot has no row."""
    slots = torch.where((inverse >= 0)[..., None], y[inverse.clamp(min=0)], 0.0)
    return slots.unflatten(2, (heads, -1)).transpose(1, 2).flatten(1)


def product_flops(s: Sizes, args: Args) -> int:
    return 2 * s["rows"] * s["in"] * s["out"]


def _axes(sizes: Sizes, args: Args) -> dict[str, int]:
    given, found = sizes["out_width"], check(NAME, sizes, args)
    if given != found["out_width"]:
        raise ShapeError(f"{NAME}: grad_out has shape {tuple(args['grad_out'].shape)}, expected (tokens {found['out_width']})")
    if not isinstance(sizes["rows"], int):
        return found  # a trace for any length: no result has the axes of scratch
    if args["weights"] is None:
        return {**found, "slot_rows": sizes["rows"]}
    named = {**args, **_NO_GATE, "down_weight": args["weight"]}
    tiles = cdiv(found["in"], hidden_config({**sizes, **found}, named).block_n)
    return {**found, "summed_rows": sizes["rows"], "in_tiles": tiles, "form": _form(args)}


def _form(args: Args) -> int:
    """What a sum's kernel reads: 1 for x, where weight's or the weights' gradient is wanted, and 2 for inverse, where grad_x is.
    -1: only weight's gradient, which takes no product; -2: none of them."""
    if not flag("need_x", "need_weights")(args):
        return -1 if args["need_weight"] else -2
    return flag("need_weight", "need_weights")(args) + 2 * args["need_x"]


def _through(form: int) -> Stage:
    more = (*("x",) * (form & 1), *("inverse",) * (form >> 1))
    return Stage("moe_grad_hidden", ("grad_out", "weight", "weights", "order", "tiles", *more), ("grad_x", "weighted", "part"),
                 lambda s, a: product_flops(s, a) + 4 * s["rows"] * s["in"], when=lambda s: s.get("form") == form)  # fmt: skip


SPEC = Spec(
    name=NAME,
    reads={"grad_out": "tokens out_width", "x": "tokens x_width", **READS},
    optional=frozenset({"bias", "weights"}),
    any_dtype=frozenset({"weights", *_moe.INDEX}),
    writes={
        "grad_x": Write("tokens x_width", "x", flag("need_x")),
        "grad_weight": Write("experts weight_rows weight_columns", "x", flag("need_weight")),
        "grad_bias": Write("experts out", "x", flag("need_bias")),
        "grad_weights": Write("tokens top_k", "weights|x", flag("need_weights")),
        "grad_out_bias": Write("out", "x", flag("need_out_bias")),
    },
    derive=_axes,
    read_bytes={"weight": expert_bytes("weight"), "bias": expert_bytes("bias"), "tiles": tile_bytes},
    scratch={
        "rows_x": Write("slot_rows in", "x", flag("need_x"), inside="grad_weight"),  # which is written after grad_x is summed
        "weighted": Write("summed_rows in", "x", flag("need_weight")),
        "part": Write("in_tiles summed_rows", "accumulate:x", flag("need_weights")),
    },
    stages=(
        Stage("moe_grad_rows", ("grad_out", "weight", "order", "tiles"), ("rows_x",), product_flops),
        Stage("moe_combine", ("rows_x", "inverse"), ("grad_x",), lambda s, a: s["rows"] * s["in"], "rows_x"),
        Stage("moe_grad_weight", ("grad_out", "x", "order", "offsets"), ("grad_weight",), product_flops,
              when=lambda s: "slot_rows" in s),
        Stage("moe_grad_bias", ("grad_out", "order", "offsets"), ("grad_bias",), lambda s, a: s["rows"] * s["out"],
              when=lambda s: "slot_rows" in s),
        *map(_through, (1, 2, 3)),
        Stage("moe_grad_hidden", ("x", "weights", "order", "tiles"), ("weighted",), lambda s, a: s["rows"] * s["in"],
              when=lambda s: s.get("form") == -1),
        Stage("moe_grad_weights", ("part", "inverse"), ("grad_weights",), lambda s, a: s["in_tiles"] * s["rows"], "part",
              when=lambda s: "bias_out" not in s),
        Stage("moe_grad_weights", ("part", "inverse", "grad_out", "bias", "indices"), ("grad_weights",),
              lambda s, a: s["rows"] * (s["in_tiles"] + 2 * s["out"]), "part", when=lambda s: "bias_out" in s),
        Stage("moe_grad_weight", ("weighted", "grad_out", "order", "offsets"), ("grad_weight",), product_flops, "weighted"),
        Stage("moe_grad_bias", ("grad_out", "weights", "order", "offsets"), ("grad_bias",), lambda s, a: 2 * s["rows"] * s["out"],
              when=lambda s: "summed_rows" in s),
        Stage("moe_grad_out_bias", ("grad_out",), ("grad_out_bias",), lambda s, a: s["tokens"] * s["out"]),
    ),
)  # fmt: skip


def reference(
    grad_out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, weights: Tensor | None, indices: Tensor, order: Tensor,
    inverse: Tensor, offsets: Tensor, tiles: Tensor, transposed: bool, heads: int, tile_rows: int, need_x: bool,
    need_weight: bool, need_bias: bool, need_weights: bool, need_out_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    top_k, acc = indices.shape[1], accumulate_dtype(x.dtype)
    w = weight.mT if transposed else weight
    given, upstream = (x, plain_slots(grad_out, top_k, heads)) if weights is None else (plain_slots(x, top_k, heads), grad_out)
    d, dw, db = x.new_zeros(order.shape[0], w.shape[2]), torch.zeros_like(w), x.new_zeros(w.shape[:2])
    d_weights = torch.zeros(order.shape[0], dtype=acc, device=x.device)
    for e, rows in _moe.plain_groups(offsets):
        slot = order[rows]
        token = slot // top_k
        if weights is None:
            a, dy = given[token], upstream[slot]
            d[rows], dw[e], db[e] = dy @ w[e], dy.mT @ a, dy.sum(0)
            continue
        a, dy, scale = given[slot].to(acc), upstream[token], weights.reshape(-1)[slot].to(acc)[:, None]
        through = (dy @ w[e]).to(acc)
        d_weights[rows] = (a * through).sum(-1)
        if bias is not None:
            d_weights[rows] += dy.to(acc) @ bias[e].to(acc)
        d[rows], dw[e] = (scale * through).to(x.dtype), dy.mT @ (scale * a).to(x.dtype)
        db[e] = (scale * dy.to(acc)).sum(0).to(x.dtype)
    if weights is None:
        dx, of_weights = _moe.plain_combine(d.to(acc), None, inverse).to(x.dtype), x.new_empty(0)
    else:
        dx = plain_joined(d, inverse, heads)
        of_weights = torch.where(inverse >= 0, d_weights[inverse.clamp(min=0)], 0.0).to(weights.dtype)
    found = (dx, dw.mT.contiguous() if transposed else dw, db, of_weights, grad_out.to(acc).sum(0).to(x.dtype))
    # Absent results are apart from one another: an operator's results must not alias.
    needs = (need_x, need_weight, need_bias, need_weights, need_out_bias)
    return tuple(g if need else g.new_empty(0) for g, need in zip(found, needs))  # type: ignore[return-value]


def launch(
    grad_out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, weights: Tensor | None, indices: Tensor, order: Tensor,
    inverse: Tensor, offsets: Tensor, tiles: Tensor, transposed: bool, heads: int, tile_rows: int, need_x: bool,
    need_weight: bool, need_bias: bool, need_weights: bool, need_out_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    args: dict[str, Any] = dict(locals())
    sizes = SPEC.axes(args)
    args.update({name: args[name].contiguous() for name in _moe.INDEX})
    results = SPEC.empty(args, sizes)
    dx, dw, db, d_weights, d_out_bias = results
    rows_x, weighted, part = SPEC.empty_scratch(args, sizes, results)
    with on_device(x):
        if not sizes["tokens"]:
            for result in results:
                result.zero_()
        elif weights is None:
            width = width_of(args, sizes)
            if need_x:
                # weight `out in` is the transpose of what this product takes
                rows_launch("grad_rows", grad_out, weight, None, rows_x, args, sizes, not transposed, source="slots", width=width)
                combine_launch(rows_x, args["inverse"], None, None, dx, sizes["top_k"])  # past here rows_x is gone
            if need_weight:
                grad_weight_launch(grad_out, x, dw, transposed, args, sizes, slots=True, width=width)
            if need_bias:
                grad_bias_launch(contiguous_last(grad_out), None, db, args, sizes, slots=True, width=width)
        else:
            _of_a_sum(args, sizes, results, weighted, part)
    return results  # type: ignore[return-value]


def _of_a_sum(args: dict[str, Any], sizes: Sizes, results: tuple[Tensor, ...], weighted: Tensor, part: Tensor) -> None:
    (dx, dw, db, d_weights, d_out_bias), grad_out = results, contiguous_last(args["grad_out"])
    weights, form, need_weight = args["weights"].contiguous(), sizes["form"], args["need_weight"]
    # By the names of a down product, without an activation before it.
    given = {**args, **_NO_GATE, "down_weight": args["weight"], "down_bias": args["bias"], "weights": weights}
    named = {**sizes, "ffn": sizes["in"], "hidden": sizes["out"], "ffn_tiles": sizes["in_tiles"]}
    if form >= -1:
        grad_hidden_launch(
            given, named, form > 0, contiguous_last(args["x"]) if form & 1 else None, dx if args["need_x"] else None,
            weighted if need_weight else None, part if args["need_weights"] else None, width_of(args, sizes),
        )  # fmt: skip
    if args["need_weights"]:
        grad_weights_launch(given, named, part, d_weights)
    if need_weight:
        grad_weight_launch(weighted, grad_out, dw, not args["transposed"], args, sizes)
    if args["need_bias"]:
        grad_bias_launch(grad_out, weights, db, args, sizes)
    if args["need_out_bias"]:
        sum_rows(grad_out, d_out_bias)


OP = Op(SPEC, launch, reference)

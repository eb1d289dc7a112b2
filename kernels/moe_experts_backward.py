"""Gradients of the experts: through both grouped products, the activation, the weights and the biases.

    dh        = grad_out[token] @ down_weight[e]                                 for every row
    grad of a routing weight = <h, dh> + <down_bias[e], grad_out[token]>         h from gate_up: y is needed nowhere
    d_gate_up = weight * dh through the activation                               in the epilogue of dh, as gate_up is stored
    grad_x    = sum over the token's rows of d_gate_up @ gate_up_weight[e]       in the order of its experts, in fp32
    grad of gate_up_weight[e] = d_gate_up.T @ x[token],  of down_weight[e] = grad_out[token].T @ (weight * h)     over e's rows

Arguments and axes as in moe_experts.py; gate_up `rows gate_up` of its forward, or None: then it is computed again first. An
expert without a token has gradients of 0. Nothing is added atomically, and no expert's sums meet rows of another.

HBM, in elements: reads grad_out, x, gate_up, and the weights of the experts that have a row; writes the gradients;
d_gate_up `rows gate_up`, weight * h `rows ffn` and `rows hidden` go between the launches, each where it is needed; the last in
the memory of a weight's gradient that is as large, before that is written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _moe
from ._lang import cdiv
from ._launch import contiguous_last, on_device
from ._moe_gradients import grad_bias_launch, grad_hidden_launch, grad_weight_launch, grad_weights_launch, hidden_config
from ._moe_products import EXPERT_BYTES, READS, combine_launch, gate_up_flops, gate_up_launch, rows_launch, tile_bytes
from ._spec import Args, Op, Sizes, Spec, Stage, Write, accumulate_dtype, flag

NAME = "moe_experts_backward"
_GATE_UP = ("need_x", "need_gate_up_weight", "need_gate_up_bias")
_THROUGH = (*_GATE_UP, "need_weights")


def _axes(sizes: Sizes, args: Args) -> dict[str, int]:
    sizes = {**sizes, **_moe.check(NAME, sizes, args)}
    if not isinstance(sizes["rows"], int):
        return sizes  # a trace for any length: no result has the axes of scratch
    return {**sizes, "ffn_tiles": cdiv(sizes["ffn"], hidden_config(sizes, args).block_n)}


def _through(args: Args) -> bool:
    """Whether anything needs dh; else, if down_weight's gradient is wanted, only h is made."""
    return flag(*_THROUGH)(args)


def _again(args: Args) -> bool:
    return args["gate_up"] is None and flag(*_THROUGH, "need_down_weight")(args)


def _through_flops(s: Sizes, args: Args) -> int:
    return s["rows"] * s["ffn"] * (2 * s["hidden"] + 16)


def _pair_flops(s: Sizes, args: Args) -> int:
    return 2 * s["rows"] * s["gate_up"] * s["hidden"]


SPEC = Spec(
    name=NAME,
    reads={"grad_out": "tokens hidden", **READS, "gate_up": "rows gate_up"},
    optional=frozenset({"gate_up_bias", "down_bias", "gate_up"}),
    any_dtype=frozenset({"weights", *_moe.INDEX}),
    writes={
        "grad_x": Write("tokens hidden", "x", flag("need_x")),
        "grad_gate_up_weight": Write("experts gate_up_rows gate_up_columns", "x", flag("need_gate_up_weight")),
        "grad_down_weight": Write("experts down_rows down_columns", "x", flag("need_down_weight")),
        "grad_gate_up_bias": Write("experts gate_up", "x", flag("need_gate_up_bias")),
        "grad_down_bias": Write("experts hidden", "x", flag("need_down_bias")),
        "grad_weights": Write("tokens top_k", "weights", flag("need_weights")),
    },
    derive=_axes,
    read_bytes={**EXPERT_BYTES, "tiles": tile_bytes},
    scratch={
        "again": Write("rows gate_up", "x", _again),
        "d_gate_up": Write("rows gate_up", "x", flag(*_GATE_UP)),
        "weighted": Write("rows ffn", "x", lambda args: args["need_down_weight"] and _through(args)),
        "weighted_alone": Write("rows ffn", "x", lambda args: args["need_down_weight"] and not _through(args)),
        "part": Write("ffn_tiles rows", "accumulate:x", lambda args: args["need_weights"] and args["down_bias"] is None),
        "biased_part": Write("ffn_tiles rows", "accumulate:x",
                             lambda args: args["need_weights"] and args["down_bias"] is not None),
        # Larger than all else but the weights' gradients, which are written after these rows are summed.
        "rows_x": Write("rows hidden", "x", flag("need_x"), inside="grad_gate_up_weight|grad_down_weight"),
    },
    stages=(
        Stage("moe_gate_up", ("x", "gate_up_weight", "gate_up_bias", "order", "tiles"), ("again",), gate_up_flops),
        Stage("moe_grad_hidden", ("grad_out", "down_weight", "gate_up|again", "weights", "order", "tiles"),
              ("d_gate_up", "weighted", "part|biased_part"), _through_flops),
        Stage("moe_grad_hidden", ("gate_up|again", "weights", "order", "tiles"), ("weighted_alone",),
              lambda s, a: 8 * s["rows"] * s["ffn"]),
        Stage("moe_grad_rows", ("d_gate_up", "gate_up_weight", "tiles"), ("rows_x",), _pair_flops),
        Stage("moe_combine", ("rows_x", "inverse"), ("grad_x",), lambda s, a: s["rows"] * s["hidden"]),
        Stage("moe_grad_weights", ("part", "inverse"), ("grad_weights",), lambda s, a: s["ffn_tiles"] * s["rows"], "part"),
        Stage("moe_grad_weights", ("biased_part", "inverse", "grad_out", "down_bias", "indices"), ("grad_weights",),
              lambda s, a: s["rows"] * (s["ffn_tiles"] + 2 * s["hidden"]), "biased_part"),
        Stage("moe_grad_weight", ("d_gate_up", "x", "order", "offsets"), ("grad_gate_up_weight",), _pair_flops),
        Stage("moe_grad_weight", ("weighted|weighted_alone", "grad_out", "order", "offsets"), ("grad_down_weight",),
              lambda s, a: 2 * s["rows"] * s["ffn"] * s["hidden"]),
        Stage("moe_grad_bias", ("d_gate_up", "offsets"), ("grad_gate_up_bias",), lambda s, a: s["rows"] * s["gate_up"]),
        Stage("moe_grad_bias", ("grad_out", "weights", "order", "offsets"), ("grad_down_bias",),
              lambda s, a: 2 * s["rows"] * s["hidden"]),
    ),
)  # fmt: skip


def reference(
    grad_out: Tensor, x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, weights: Tensor, indices: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, tiles: Tensor,
    gate_up: Tensor | None, activation: str, alpha: float, limit: float, transposed: bool, interleaved: bool, tile_rows: int,
    need_x: bool, need_gate_up_weight: bool, need_down_weight: bool, need_gate_up_bias: bool, need_down_bias: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    top_k, acc = weights.shape[1], accumulate_dtype(x.dtype)
    wu, wd = (w.mT if transposed else w for w in (gate_up_weight, down_weight))
    grads = [x.new_zeros(order.shape[0], x.shape[1]), torch.zeros_like(wu), torch.zeros_like(wd), x.new_zeros(wu.shape[:2]),
             x.new_zeros(wd.shape[:2])]  # fmt: skip
    dw = torch.zeros(order.shape[0], dtype=acc, device=x.device)
    for e, rows in _moe.plain_groups(offsets):
        slot = order[rows]
        token, weight = slot // top_k, weights.reshape(-1)[slot].to(acc)[:, None]
        pre = torch.nn.functional.linear(x[token], wu[e], None if gate_up_bias is None else gate_up_bias[e])
        gate, up = _moe.plain_halves((pre if gate_up is None else gate_up[rows]).to(acc), interleaved)
        h, dy = _moe.plain_gated(gate, up, activation, alpha, limit), grad_out[token]
        dh = (dy @ wd[e]).to(acc)
        dw[rows] = (h * dh).sum(-1)
        if down_bias is not None:
            dw[rows] += dy.to(acc) @ down_bias[e].to(acc)
        both = _moe.plain_gated_backward(weight * dh, gate, up, activation, alpha, limit)
        pre = _moe.plain_join(*both, interleaved).to(x.dtype)
        grads[0][rows] = pre @ wu[e]
        grads[1][e], grads[2][e] = pre.mT @ x[token], dy.mT @ (weight * h).to(x.dtype)
        grads[3][e], grads[4][e] = pre.sum(0), (weight * dy.to(acc)).sum(0).to(x.dtype)
    grad_x = _moe.plain_combine(grads[0].to(acc), None, inverse).to(x.dtype)
    grad_weights = torch.where(inverse >= 0, dw[inverse.clamp(min=0)], 0.0).to(weights.dtype)
    found = (grad_x, *(g.mT.contiguous() if transposed else g for g in grads[1:3]), *grads[3:], grad_weights)
    needs = (need_x, need_gate_up_weight, need_down_weight, need_gate_up_bias, need_down_bias, need_weights)
    # Absent results are apart from one another: an operator's results must not alias.
    return tuple(g if need else g.new_empty(0) for g, need in zip(found, needs))  # type: ignore[return-value]


def launch(
    grad_out: Tensor, x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, weights: Tensor, indices: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, tiles: Tensor,
    gate_up: Tensor | None, activation: str, alpha: float, limit: float, transposed: bool, interleaved: bool, tile_rows: int,
    need_x: bool, need_gate_up_weight: bool, need_down_weight: bool, need_gate_up_bias: bool, need_down_bias: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    args: dict[str, Any] = dict(locals())
    sizes = SPEC.axes(args)
    args.update({name: args[name].contiguous() for name in (*_moe.INDEX, "weights")})
    results = SPEC.empty(args, sizes)
    dx, dwu, dwd, dbu, dbd, dw = results
    again, d_gate_up, weighted, alone, part, biased_part, rows_x = SPEC.empty_scratch(args, sizes, results)
    with on_device(x):
        if not sizes["rows"]:
            for result in results:
                result.zero_()
            return results  # type: ignore[return-value]
        if _again(args):
            gate_up_launch(args, sizes, None, again)
        made = again if gate_up is None else gate_up.contiguous()
        through = _through(args)
        part = part if down_bias is None else biased_part
        h = (weighted if through else alone) if need_down_weight else None
        if through or need_down_weight:
            d = d_gate_up if flag(*_GATE_UP)(args) else None
            grad_hidden_launch(args, sizes, through, made, d, h, part if need_weights else None)
        if need_x:
            # gate_up_weight `gate_up hidden` is the transpose of what this product takes
            rows_launch("grad_rows", d_gate_up, gate_up_weight, None, rows_x, args, sizes, not transposed)
            combine_launch(rows_x, args["inverse"], None, None, dx, sizes["top_k"])
        # Past here rows_x is gone: it may lie in dwu or dwd.
        if need_weights:
            grad_weights_launch(args, sizes, part, dw)
        if need_gate_up_weight:
            grad_weight_launch(d_gate_up, x, dwu, transposed, args, sizes)
        if h is not None:
            grad_weight_launch(h, grad_out, dwd, not transposed, args, sizes)
        if need_gate_up_bias:
            grad_bias_launch(d_gate_up, None, dbu, args, sizes)
        if need_down_bias:
            grad_bias_launch(contiguous_last(grad_out), args["weights"], dbd, args, sizes)
    return results  # type: ignore[return-value]


OP = Op(SPEC, launch, reference)

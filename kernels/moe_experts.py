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
`rows ffn` and, but for one token, `rows hidden`. One token: both products as sums over rows of the weights, the second over all
its experts. Up to 64: a program of the second product has all rows of its columns, and sums them itself. More: a third does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _moe
from ._gemm import accumulator
from ._lang import cdiv, next_power_of_2, tl, triton
from ._launch import launch as _launch
from ._launch import on_device
from ._moe import expert_pointers, row_pointers, store_rows, take, take_expert
from ._moe_products import (
    EXPERT_BYTES,
    READS,
    combine_launch,
    gate_up_flops,
    gate_up_launch,
    gather_sum,
    plus,
    rows_launch,
    tile_bytes,
)  # fmt: skip
from ._moe_vector import launch_vector
from ._spec import Args, Op, Sizes, Spec, Stage, Write, accumulate_dtype, flag
from ._target import target_of
from .moe_experts_backward import OP as BACKWARD


def _form(sizes: Sizes, args: Args) -> str:
    return _moe.form(sizes["tokens"], sizes["tile_rows"], target_of(args["x"].device))


def _down_flops(s: Sizes, args: Args) -> int:
    return 2 * s["rows"] * s["hidden"] * s["ffn"]


def _axes(sizes: Sizes, args: Args) -> dict[str, int]:
    """Rows once more for what there is in one form only."""
    sizes = {**sizes, **_moe.check("moe_experts", sizes, args)}
    if not isinstance(sizes["rows"], int):
        return sizes  # a trace for any length: no result has the axes of scratch
    how = _form(sizes, args)
    return {**sizes, "matrix_rows" if how != "vector" else "vector_rows": sizes["rows"], f"{how}_rows": sizes["rows"]}


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
        "h": Write("matrix_rows ffn", "x"), "vector_h": Write("vector_rows ffn", "x"),
        "y": Write("grouped_rows hidden", "x"), "stream_y": Write("stream_rows hidden", "x"),
    },
    stages=(
        Stage("moe_gate_up", (*_GATE_UP, "order", "tiles"), ("h", "gate_up"), gate_up_flops, "h"),
        Stage("moe_gate_up", (*_GATE_UP, "indices", "inverse"), ("vector_h", "gate_up"), gate_up_flops, "vector_h"),
        Stage("moe_down", ("vector_h", *_DOWN, "indices", "inverse", "weights", "residual"), ("out",), _down_flops, "vector_h"),
        Stage("moe_down", ("h", *_DOWN, "tiles", "stream_y", "inverse", "weights", "residual"), ("stream_y", "out"), _down_flops,
              "stream_y"),
        Stage("moe_down", ("h", *_DOWN, "tiles"), ("y",), _down_flops, "y"),
        Stage("moe_combine", ("y", "inverse", "weights", "residual"), ("out",), lambda s, a: 2 * s["rows"] * s["hidden"], "y"),
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


# ---- down ----------------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["TOKENS"])
def _stream_kernel(
    h, w, bias, tiles, inverse, weights, residual, y, out, TOKENS, N, K, stride_e, stride_w, TOP_K: tl.constexpr, T: tl.constexpr,
    EVEN: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program has its columns of all rows, expert after expert, and then of all tokens: it waits for no other."""
    n0 = tl.program_id(0) * BN
    cols = n0 + tl.arange(0, BN)
    # Flattened: the next expert's weights are under way while a tile ends. Nothing may be handed from one tile to the next:
    # triton 3.6 would move it on after every step along K. Of the loads of a tile's place all but one in eight hit the L1.
    for m in tl.range(0, tl.load(tiles + 3), flatten=True):
        e, first, end = tl.load(tiles + m * 4), tl.load(tiles + m * 4 + 1), tl.load(tiles + m * 4 + 2)
        rows = first + tl.arange(0, BM)
        left = row_pointers(h, tl.minimum(rows, end - 1).to(tl.int64) * K, BK)
        right = expert_pointers(w, e, cols, stride_e, stride_w, BK, T)
        acc = tl.zeros([BM, BN], ACC)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            b = take_expert(right, cols < N, k, K, stride_w, BK, T)
            acc = tl.dot(take(left, k, K, BK, EVEN), b.T, acc, input_precision="ieee", out_dtype=ACC)
        if bias is not None:
            acc += tl.load(bias + e * N + cols, cols < N, other=0.0).to(ACC)[None, :]
        store_rows(y, rows, n0, acc, rows < end, N, BN)
    tl.debug_barrier()  # the columns of y were written by this program's own threads
    for t in range(0, TOKENS, BT):
        token = t + tl.arange(0, BT)
        total = gather_sum(y, inverse, weights, token, cols, token < TOKENS, N, TOP_K, ACC)
        store_rows(out, token, n0, plus(total, residual, token, cols, token < TOKENS, N), token < TOKENS, N, BN)


def _stream_launch(h: Tensor, y: Tensor, out: Tensor, args: Args, sizes: Sizes, weights: Tensor) -> None:
    w, bias, tile_rows = _moe.dense_rows(args["down_weight"]), args["down_bias"], sizes["tile_rows"]
    c = _moe.configure("stream", tile_rows, h.element_size(), target_of(h.device))
    n, k = sizes["hidden"], sizes["ffn"]
    block_k = min(c.block_k, next_power_of_2(max(k, 16)))
    _launch(
        _stream_kernel, (cdiv(n, c.block_n),),
        (h, w, None if bias is None else bias.contiguous(), args["tiles"], args["inverse"], weights, args["residual"], y, out,
         sizes["tokens"], n, k, w.stride(0), w.stride(1)),
        {"TOP_K": sizes["top_k"], "T": args["transposed"], "ACC": accumulator(h), "BM": tile_rows, "BN": c.block_n,
         "BK": block_k, "EVEN": k % block_k == 0, "BT": 16, "STAGES": c.num_stages, "num_warps": c.num_warps,
         "num_stages": c.num_stages},
    )  # fmt: skip


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
    h, vector_h, y, stream_y = SPEC.empty_scratch(args, sizes)
    saved, how, weights = gate_up if save else None, _form(sizes, args), weights.contiguous()
    with on_device(x):
        if not sizes["rows"]:
            _ = out.zero_() if residual is None else out.copy_(residual)
        elif how == "vector":
            launch_vector(vector_h, out, saved, args, sizes, weights)
        else:
            gate_up_launch(args, sizes, h, saved)
            if how == "stream":
                _stream_launch(h, stream_y, out, args, sizes, weights)
            else:
                rows_launch("down", h, down_weight, down_bias, y, args, sizes, transposed)
                combine_launch(y, args["inverse"], weights, args["residual"], out, sizes["top_k"])
    return out, gate_up


OP = Op(SPEC, launch, reference, BACKWARD, passthrough={"residual": "grad_out"})

"""A linear layer whose epilogue adds the residual and prepares the next RMSNorm.

    out    = residual + x @ weight.T + bias
    scaled = out * norm_weight                                  with norm_weight: what the next GEMM reads
    sumsq[token, tile] = sum(out**2 over the tile's columns)    with norm_weight: the next row scale, rstd, in partial sums

    x              tokens in_features
    weight         out_features in_features
    bias           out_features
    residual, out  tokens out_features

RMSNorm before a GEMM is a row scale after it, so a consumer that takes (scaled, sumsq) needs no norm launch of its own:
y @ w.T = rstd * ((out * norm_weight) @ w.T). out is rounded before its statistics are taken, as the next layer will read it.
Not for fp16: out * norm_weight has no normalised range (the plan then launches the plain norm).

HBM, in elements: reads x, weight, bias, residual, norm_weight once; writes out, and with norm_weight scaled and sumsq.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from einops import einsum, reduce
from torch import Tensor

from ._gemm import (
    accumulator,
    configure,
    grad_input,
    grad_weight,
    halves,
    load_tile,
    operand,
    options,
    programs,
    store_tile,
    sum_rows,
    triton_dtype,
    usable,
)  # fmt: skip
from ._lang import cdiv, tl, triton
from ._launch import contiguous_last, on_device
from ._launch import launch as _launch
from ._math import tile_order
from ._spec import Args, Op, Sizes, Spec, Stage, Write, accumulate_dtype, flag
from ._target import target_of


def _config(sizes: Sizes, x: Tensor) -> Any:
    return configure(sizes["tokens"], x.element_size(), target_of(x.device), "nt")


def _axes(sizes: Sizes, args: Args) -> dict[str, int]:
    # One partial sum per 128 columns at most: the same count for every config, descriptors or pointers.
    return {"tiles": cdiv(sizes["out_features"], min(_config(sizes, args["x"]).block_n, 128))}


SPEC = Spec(
    name="linear",
    reads={"x": "tokens in_features", "weight": "out_features in_features", "bias": "out_features",
           "residual": "tokens out_features", "norm_weight": "out_features"},
    optional=frozenset({"bias", "residual", "norm_weight"}),
    writes={
        "out": Write("tokens out_features", "x"),
        "scaled": Write("tokens out_features", "x", flag("norm_weight")),
        "sumsq": Write("tokens tiles", "accumulate:x", flag("norm_weight")),
    },
    derive=_axes,
    flops=lambda s, a: 2 * s["tokens"] * s["out_features"] * s["in_features"],
)  # fmt: skip


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.nn.functional.linear(x, weight, bias)
    if residual is not None:
        out = residual + out
    if norm_weight is None:
        return out, out.new_empty(0), out.new_empty(0, dtype=accumulate_dtype(x.dtype))
    args = {"x": x, "weight": weight, "bias": bias, "residual": residual, "norm_weight": norm_weight}
    tiles = SPEC.axes(args)["tiles"]
    square = out.to(accumulate_dtype(x.dtype)).square()
    block = min(_config({"tokens": x.shape[0]}, x).block_n, 128)
    square = torch.nn.functional.pad(square, (0, tiles * block - out.shape[1]))
    return out, out * norm_weight, reduce(square, "tokens (tiles block) -> tokens tiles", "sum", tiles=tiles).contiguous()


@triton.jit
def _finish(acc, row0, col0, bias, residual, norm_weight, out, scaled, sumsq, M, N, TILES, stride_r,
            BM: tl.constexpr, BN: tl.constexpr, STAT: tl.constexpr, TMA: tl.constexpr, OUT: tl.constexpr):  # fmt: skip
    """Epilogue of one tile of BN columns, STAT of them to a partial sum (BN == STAT or 2 * STAT after splitting)."""
    cols = col0 + tl.arange(0, BN)
    if bias is not None:
        acc += tl.load(bias + cols, cols < N, other=0.0).to(acc.dtype)[None, :]
    if residual is not None:
        acc += load_tile(residual, row0, col0, M, N, stride_r, BM, BN, TMA).to(acc.dtype)
    y = acc.to(OUT)
    store_tile(out, row0, col0, y, M, N, N, BM, BN, TMA)
    if norm_weight is not None:
        f = y.to(acc.dtype)
        g = tl.load(norm_weight + cols, cols < N, other=0.0).to(acc.dtype)
        store_tile(scaled, row0, col0, f * g[None, :], M, N, N, BM, BN, TMA)
        rows = row0 + tl.arange(0, BM)
        f = tl.where((cols < N)[None, :], f, 0.0)
        at = sumsq + rows.to(tl.int64) * TILES + col0 // STAT
        tl.store(at, tl.sum(f * f, 1), (rows < M) & (col0 < N))


@triton.jit
def _kernel(
    x, weight, bias, residual, norm_weight, out, scaled, sumsq, M, N, K, TILES, stride_x, stride_w, stride_r,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, STAT: tl.constexpr, OUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    num_m = tl.cdiv(M, BM)
    num_n = tl.cdiv(N, BN)
    for t in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=TMA):
        m, n = tile_order(t, num_m, num_n, GROUP)
        acc = tl.zeros([BM, BN], ACC)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            a = load_tile(x, m * BM, k, M, K, stride_x, BM, BK, TMA)
            b = load_tile(weight, n * BN, k, N, K, stride_w, BN, BK, TMA)
            acc = tl.dot(a, b.T, acc, input_precision="ieee", out_dtype=ACC)
        if SPLIT == 2:
            left, right = halves(acc, BM, BN)
            _finish(left, m * BM, n * BN, bias, residual, norm_weight, out, scaled, sumsq, M, N, TILES, stride_r,
                    BM, BN // 2, STAT, TMA, OUT)
            _finish(right, m * BM, n * BN + BN // 2, bias, residual, norm_weight, out, scaled, sumsq, M, N, TILES, stride_r,
                    BM, BN // 2, STAT, TMA, OUT)
        else:
            _finish(acc, m * BM, n * BN, bias, residual, norm_weight, out, scaled, sumsq, M, N, TILES, stride_r,
                    BM, BN, STAT, TMA, OUT)


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    args = {"x": x, "weight": weight, "bias": bias, "residual": residual, "norm_weight": norm_weight}
    sizes = SPEC.axes(args)
    out, scaled, sumsq = SPEC.empty(args, sizes)
    x, weight = contiguous_last(x), contiguous_last(weight)
    bias, norm_weight = (None if t is None else t.contiguous() for t in (bias, norm_weight))
    residual = None if residual is None else contiguous_last(residual)
    m, n, k = sizes["tokens"], sizes["out_features"], sizes["in_features"]
    given = [t for t in (residual, out, scaled) if t is not None and t.numel()]
    c = usable(_config(sizes, x), x, weight, *given)
    if norm_weight is not None and c.block_m * c.block_n >= 128 * 128:
        c = replace(c, num_warps=8)  # two results and their statistics spill four warps
    width = c.block_n // c.split
    tiles = cdiv(m, c.block_m) * cdiv(n, c.block_n)
    with on_device(x):
        _launch(
            _kernel, (programs(tiles, c, target_of(x.device)),),
            (operand(x, c.block_m, c.block_k, c), operand(weight, c.block_n, c.block_k, c), bias,
             None if residual is None else operand(residual, c.block_m, width, c), norm_weight,
             operand(out, c.block_m, width, c), out if norm_weight is None else operand(scaled, c.block_m, width, c), sumsq,
             m, n, k, sizes["tiles"], x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0)),
            {**options(c), "STAT": min(width, 128), "OUT": triton_dtype(x.dtype), "ACC": accumulator(x)},
        )  # fmt: skip
    return out, scaled, sumsq


BACKWARD_SPEC = Spec(
    name="linear_backward",
    reads={"grad_out": "tokens out_features", "x": "tokens in_features", "weight": "out_features in_features"},
    writes={
        "grad_x": Write("tokens in_features", "x", flag("need_x")),
        "grad_weight": Write("out_features in_features", "weight", flag("need_weight")),
        "grad_bias": Write("out_features", "weight", flag("need_bias")),
    },
    stages=(
        Stage("grad_input", ("grad_out", "weight"), ("grad_x",),
              lambda s, a: 2 * s["tokens"] * s["out_features"] * s["in_features"]),
        Stage("grad_weight", ("grad_out", "x"), ("grad_weight",),
              lambda s, a: 2 * s["tokens"] * s["out_features"] * s["in_features"]),
        Stage("sum_rows", ("grad_out",), ("grad_bias",), lambda s, a: s["tokens"] * s["out_features"]),
    ),
)  # fmt: skip


def backward_reference(
    grad_out: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # Absent results are apart from one another: an operator's results must not alias.
    dx = einsum(grad_out, weight, "tokens out, out hidden -> tokens hidden") if need_x else x.new_empty(0)
    dw = einsum(grad_out, x, "tokens out, tokens hidden -> out hidden") if need_weight else x.new_empty(0)
    return dx, dw, reduce(grad_out, "tokens out -> out", "sum") if need_bias else x.new_empty(0)


def backward_launch(
    grad_out: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    args = {"grad_out": grad_out, "x": x, "weight": weight,
            "need_x": need_x, "need_weight": need_weight, "need_bias": need_bias}  # fmt: skip
    sizes = BACKWARD_SPEC.axes(args)
    dx, dw, db = BACKWARD_SPEC.empty(args, sizes)
    grad_out = contiguous_last(grad_out)
    with on_device(x):
        if need_x:
            grad_input([grad_out], [weight], dx)
        if need_weight:
            grad_weight(grad_out, x, dw)
        if need_bias:
            sum_rows(grad_out, db)
    return dx, dw, db


OP = Op(SPEC, launch, reference, Op(BACKWARD_SPEC, backward_launch, backward_reference), passthrough={"residual": "grad_out"},
        no_grad=frozenset({"norm_weight"}))  # fmt: skip

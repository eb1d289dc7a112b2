"""A linear layer whose epilogue scales, adds the residual and prepares the next RMSNorm.

    out    = residual + scale * (x @ weight.T + bias)
    scaled = out * norm_weight                                  with norm_weight: what the next GEMM reads
    sumsq[token, tile] = sum(out**2 over the tile's columns)    with norm_weight: the next row scale, rstd, in partial sums

    x              tokens in_features
    weight         out_features in_features     by rows or by columns
    bias           out_features
    residual, out  tokens out_features          out has the residual's dtype: x's, or fp32 as under autocast

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
    layout,
    load_tile,
    operand,
    options,
    product,
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
    x, residual = args["x"], args["residual"]
    if residual is not None and residual.dtype not in (x.dtype, accumulate_dtype(x.dtype)):
        raise ValueError(f"linear: residual has dtype {residual.dtype}, but x has {x.dtype}")
    if residual is not None and residual.dtype != x.dtype and args["norm_weight"] is not None:
        raise ValueError(f"linear: residual has dtype {residual.dtype}, but x has {x.dtype}: not beside norm_weight")
    if args["norm_weight"] is None and not isinstance(sizes["tokens"], int):
        return {}  # a trace for any length
    # One partial sum per 128 columns at most: the same count for every config, descriptors or pointers.
    return {"tiles": cdiv(sizes["out_features"], min(_config(sizes, args["x"]).block_n, 128))}


SPEC = Spec(
    name="linear",
    reads={"x": "tokens in_features", "weight": "out_features in_features", "bias": "out_features",
           "residual": "tokens out_features", "norm_weight": "out_features"},
    optional=frozenset({"bias", "residual", "norm_weight"}),
    any_dtype=frozenset({"residual"}),
    writes={
        "out": Write("tokens out_features", "residual|x"),
        "scaled": Write("tokens out_features", "x", flag("norm_weight")),
        "sumsq": Write("tokens tiles", "accumulate:x", flag("norm_weight")),
    },
    derive=_axes,
    flops=lambda s, a: 2 * s["tokens"] * s["out_features"] * s["in_features"],
)  # fmt: skip


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm_weight: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.nn.functional.linear(x, weight, bias)
    if scale != 1.0:
        out = out * scale
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
def _finish(acc, row0, col0, bias, residual, norm_weight, out, scaled, sumsq, M, N, TILES, stride_r, scale,
            BM: tl.constexpr, BN: tl.constexpr, STAT: tl.constexpr, TMA: tl.constexpr, OUT: tl.constexpr):  # fmt: skip
    """Epilogue of BN columns, STAT of them to a partial sum."""
    cols = col0 + tl.arange(0, BN)
    if bias is not None:
        acc += tl.load(bias + cols, cols < N, other=0.0).to(acc.dtype)[None, :]
    if scale is not None:
        acc *= scale
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
def _finish_half(acc, row0, col0, bias, residual, norm_weight, out, scaled, sumsq, M, N, TILES, stride_r, scale,
                 BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, STAT: tl.constexpr, TMA: tl.constexpr,
                 OUT: tl.constexpr):  # fmt: skip
    if SPLIT == 2:
        left, right = halves(acc, BM, BN)
        _finish(left, row0, col0, bias, residual, norm_weight, out, scaled, sumsq, M, N, TILES, stride_r, scale,
                BM, BN // 2, STAT, TMA, OUT)
        _finish(right, row0, col0 + BN // 2, bias, residual, norm_weight, out, scaled, sumsq, M, N, TILES, stride_r, scale,
                BM, BN // 2, STAT, TMA, OUT)
    else:
        _finish(acc, row0, col0, bias, residual, norm_weight, out, scaled, sumsq, M, N, TILES, stride_r, scale,
                BM, BN, STAT, TMA, OUT)


@triton.jit(do_not_specialize=["M"])
def _kernel(
    x, weight, bias, residual, norm_weight, out, scaled, sumsq, M, N, K, TILES, stride_x, stride_w, stride_r, scale,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, T: tl.constexpr, STAT: tl.constexpr, OUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    num_m = tl.cdiv(M, BM)
    num_n = tl.cdiv(N, BN)
    for t in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=TMA):
        m, n = tile_order(t, num_m, num_n, GROUP)
        acc = product(x, weight, m, n, M, N, K, stride_x, stride_w, BM, BN, BK, TMA, T, STAGES, ACC)
        if SPLIT > 1:
            left, right = halves(acc, BM, BN)
            _finish_half(left, m * BM, n * BN, bias, residual, norm_weight, out, scaled, sumsq, M, N, TILES, stride_r, scale,
                         BM, BN // 2, SPLIT // 2, STAT, TMA, OUT)
            _finish_half(right, m * BM, n * BN + BN // 2, bias, residual, norm_weight, out, scaled, sumsq, M, N, TILES, stride_r,
                         scale, BM, BN // 2, SPLIT // 2, STAT, TMA, OUT)
        else:
            _finish(acc, m * BM, n * BN, bias, residual, norm_weight, out, scaled, sumsq, M, N, TILES, stride_r, scale,
                    BM, BN, STAT, TMA, OUT)


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm_weight: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    args = {"x": x, "weight": weight, "bias": bias, "residual": residual, "norm_weight": norm_weight}
    sizes = SPEC.axes(args)
    out, scaled, sumsq = SPEC.empty(args, sizes)
    x, (weight, transposed) = contiguous_last(x), layout(weight)
    bias, norm_weight = (None if t is None else t.contiguous() for t in (bias, norm_weight))
    residual = None if residual is None else contiguous_last(residual)
    m, n, k = sizes["tokens"], sizes["out_features"], sizes["in_features"]
    given = [t for t in (residual, out, scaled) if t is not None and t.numel()]
    c = usable(_config(sizes, x), x, weight, *given)
    if out.element_size() > x.element_size() and c.block_n >= 128:
        c = replace(c, split=2 * c.split)  # by descriptors the staging must not grow, by pointers the registers hold less at once
    if norm_weight is not None and c.block_m * c.block_n >= 128 * 128:
        c = replace(c, num_warps=8)  # two results and their statistics spill four warps
    width = c.block_n // c.split
    tiles = cdiv(m, c.block_m) * cdiv(n, c.block_n)
    with on_device(x):
        _launch(
            _kernel, (programs(tiles, c, target_of(x.device)),),
            (operand(x, c.block_m, c.block_k, c), operand(weight, c.block_n, c.block_k, c, transposed), bias,
             None if residual is None else operand(residual, c.block_m, width, c), norm_weight,
             operand(out, c.block_m, width, c), out if norm_weight is None else operand(scaled, c.block_m, width, c), sumsq,
             m, n, k, sizes["tiles"], x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0),
             None if scale == 1.0 else scale),
            {**options(c), "T": transposed, "STAT": min(width, 128), "OUT": triton_dtype(out.dtype), "ACC": accumulator(x)},
        )  # fmt: skip
    return out, scaled, sumsq


_NEEDS = ("need_x", "need_weight", "need_bias")


def _rescaled(args: Args) -> bool:
    """Whether the gradient of x @ weight.T + bias is not grad_out itself."""
    return (args["scale"] != 1.0 or args["grad_out"].dtype != args["x"].dtype) and flag(*_NEEDS)(args)


BACKWARD_SPEC = Spec(
    name="linear_backward",
    reads={"x": "tokens in_features", "weight": "out_features in_features", "grad_out": "tokens out_features"},
    any_dtype=frozenset({"grad_out"}),
    writes={
        "grad_x": Write("tokens in_features", "x", flag("need_x")),
        "grad_weight": Write("out_features in_features", "weight", flag("need_weight")),
        "grad_bias": Write("out_features", "weight", flag("need_bias")),
    },
    scratch={"d_out": Write("tokens out_features", "x", _rescaled)},
    stages=(
        Stage("rescale", ("grad_out",), ("d_out",), lambda s, a: s["tokens"] * s["out_features"]),
        Stage("grad_input", ("d_out|grad_out", "weight"), ("grad_x",),
              lambda s, a: 2 * s["tokens"] * s["out_features"] * s["in_features"]),
        Stage("grad_weight", ("d_out|grad_out", "x"), ("grad_weight",),
              lambda s, a: 2 * s["tokens"] * s["out_features"] * s["in_features"]),
        Stage("sum_rows", ("d_out|grad_out",), ("grad_bias",), lambda s, a: s["tokens"] * s["out_features"]),
    ),
)  # fmt: skip


def backward_reference(
    grad_out: Tensor, x: Tensor, weight: Tensor, scale: float, need_x: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dy = (grad_out if scale == 1.0 else grad_out * scale).to(x.dtype)
    # Absent results are apart from one another: an operator's results must not alias.
    dx = einsum(dy, weight, "tokens out, out hidden -> tokens hidden") if need_x else x.new_empty(0)
    dw = einsum(dy, x, "tokens out, tokens hidden -> out hidden") if need_weight else x.new_empty(0)
    return dx, dw, reduce(dy, "tokens out -> out", "sum") if need_bias else x.new_empty(0)


@triton.jit
def _rescale_kernel(grad_out, d_out, n, scale, BLOCK: tl.constexpr, ACC: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(grad_out + at, at < n, other=0.0).to(ACC)
    if scale is not None:
        dy *= scale
    tl.store(d_out + at, dy.to(d_out.dtype.element_ty), at < n)


def backward_launch(
    grad_out: Tensor, x: Tensor, weight: Tensor, scale: float, need_x: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    args = {"grad_out": grad_out, "x": x, "weight": weight, "scale": scale,
            "need_x": need_x, "need_weight": need_weight, "need_bias": need_bias}  # fmt: skip
    sizes = BACKWARD_SPEC.axes(args)
    dx, dw, db = BACKWARD_SPEC.empty(args, sizes)
    dy = contiguous_last(grad_out)
    with on_device(x):
        if _rescaled(args):
            (dy,) = BACKWARD_SPEC.empty_scratch(args, sizes)
            _launch(
                _rescale_kernel, (cdiv(dy.numel(), 2048),),
                (grad_out.contiguous(), dy, dy.numel(), None if scale == 1.0 else scale),
                {"BLOCK": 2048, "ACC": accumulator(x), "num_warps": 8},
            )  # fmt: skip
        if need_x:
            grad_input([dy], [weight], dx)
        if need_weight:
            grad_weight(dy, x, dw)
        if need_bias:
            sum_rows(dy, db)
    return dx, dw, db


OP = Op(SPEC, launch, reference, Op(BACKWARD_SPEC, backward_launch, backward_reference), passthrough={"residual": "grad_out"},
        no_grad=frozenset({"norm_weight"}))  # fmt: skip

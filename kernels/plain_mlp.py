"""The first half of a plain two-layer MLP in one launch: product, bias and activation.

    pre = x @ weight.T + bias
    out = activation(pre)

    x         tokens hidden
    weight    ffn hidden        by rows or by columns
    bias      ffn
    out, pre  tokens ffn        pre only with save: the backward reads it

activation: silu, gelu (erf), gelu_tanh, relu or relu2 (relu squared), applied to the fp32 sums.
HBM, in elements: reads x, weight and bias once; writes out, with save also pre.
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
from ._math import activate, activate_grad, check_activation, plain_activate, plain_activate_backward, tile_order
from ._spec import Args, Op, Sizes, Spec, Stage, Write, accumulate_dtype, flag
from ._target import target_of


def _check(sizes: Sizes, args: Args) -> dict[str, int]:
    check_activation("plain_mlp", args["activation"])
    return {}


SPEC = Spec(
    name="plain_mlp",
    reads={"x": "tokens hidden", "weight": "ffn hidden", "bias": "ffn"},
    optional=frozenset({"bias"}),
    writes={"out": Write("tokens ffn", "x"), "pre": Write("tokens ffn", "x", flag("save"))},
    derive=_check,
    flops=lambda s, a: s["tokens"] * s["ffn"] * (2 * s["hidden"] + 4),
)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: bool) -> tuple[Tensor, Tensor]:
    pre = torch.nn.functional.linear(x, weight, bias)
    return plain_activate(pre, activation), pre if save else pre.new_empty(0)


@triton.jit
def _finish(acc, row0, col0, bias, out, pre, M, N, BM: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr, ACT: tl.constexpr,
            SAVE: tl.constexpr, OUT: tl.constexpr):  # fmt: skip
    if bias is not None:
        cols = col0 + tl.arange(0, BN)
        acc += tl.load(bias + cols, cols < N, other=0.0).to(acc.dtype)[None, :]
    if SAVE:
        store_tile(pre, row0, col0, acc.to(OUT), M, N, N, BM, BN, TMA)
    store_tile(out, row0, col0, activate(acc, ACT).to(OUT), M, N, N, BM, BN, TMA)


@triton.jit(do_not_specialize=["M"])
def _kernel(
    x, weight, bias, out, pre, M, N, K, stride_x, stride_w,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, T: tl.constexpr, ACT: tl.constexpr, SAVE: tl.constexpr, OUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    num_m = tl.cdiv(M, BM)
    num_n = tl.cdiv(N, BN)
    for t in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=TMA):
        m, n = tile_order(t, num_m, num_n, GROUP)
        row0, col0 = m * BM, n * BN
        acc = product(x, weight, m, n, M, N, K, stride_x, stride_w, BM, BN, BK, TMA, T, STAGES, ACC)
        if SPLIT == 2:
            left, right = halves(acc, BM, BN)
            _finish(left, row0, col0, bias, out, pre, M, N, BM, BN // 2, TMA, ACT, SAVE, OUT)
            _finish(right, row0, col0 + BN // 2, bias, out, pre, M, N, BM, BN // 2, TMA, ACT, SAVE, OUT)
        else:
            _finish(acc, row0, col0, bias, out, pre, M, N, BM, BN, TMA, ACT, SAVE, OUT)


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: bool) -> tuple[Tensor, Tensor]:
    args = {"x": x, "weight": weight, "bias": bias, "activation": activation, "save": save}
    sizes = SPEC.axes(args)
    out, pre = SPEC.empty(args, sizes)
    x, (weight, transposed) = contiguous_last(x), layout(weight)
    m, n, k = sizes["tokens"], sizes["ffn"], sizes["hidden"]
    target = target_of(x.device)
    c = usable(configure(m, x.element_size(), target, "nt"), x, weight, out)
    if c.block_n >= 128:
        c = replace(c, split=2)  # the activation of a whole tile, its sums and their addresses spill
    width = c.block_n // c.split
    tiles = cdiv(m, c.block_m) * cdiv(n, c.block_n)
    with on_device(x):
        _launch(
            _kernel, (programs(tiles, c, target),),
            (operand(x, c.block_m, c.block_k, c), operand(weight, c.block_n, c.block_k, c, transposed),
             None if bias is None else bias.contiguous(), *[operand(t, c.block_m, width, c) for t in (out, pre if save else out)],
             m, n, k, x.stride(0), weight.stride(0)),
            {**options(c), "T": transposed, "ACT": activation, "SAVE": save, "OUT": triton_dtype(x.dtype), "ACC": accumulator(x)},
        )  # fmt: skip
    return out, pre


def _gemm_flops(s: Sizes, args: Args) -> int:
    return 2 * s["tokens"] * s["ffn"] * s["hidden"]


BACKWARD_SPEC = Spec(
    name="plain_mlp_backward",
    reads={"grad_out": "tokens ffn", "x": "tokens hidden", "weight": "ffn hidden", "pre": "tokens ffn"},
    writes={
        "grad_x": Write("tokens hidden", "x", flag("need_x")),
        "grad_weight": Write("ffn hidden", "x", flag("need_weight")),
        "grad_bias": Write("ffn", "x", flag("need_bias")),
    },
    derive=_check,
    scratch={"d_pre": Write("tokens ffn", "x")},
    stages=(
        Stage("plain_mlp_backward", ("grad_out", "pre"), ("d_pre",), lambda s, a: 8 * s["tokens"] * s["ffn"]),
        Stage("grad_input", ("d_pre", "weight"), ("grad_x",), _gemm_flops),
        Stage("grad_weight", ("d_pre", "x"), ("grad_weight",), _gemm_flops),
        Stage("sum_rows", ("d_pre",), ("grad_bias",), lambda s, a: s["tokens"] * s["ffn"]),
    ),
)  # fmt: skip


def backward_reference(
    grad_out: Tensor, x: Tensor, weight: Tensor, pre: Tensor, activation: str, need_x: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    acc = accumulate_dtype(x.dtype)
    d = plain_activate_backward(grad_out.to(acc), pre.to(acc), activation).to(x.dtype)
    # Absent results are apart from one another: an operator's results must not alias.
    dx = einsum(d, weight, "tokens ffn, ffn hidden -> tokens hidden") if need_x else x.new_empty(0)
    dw = einsum(d, x, "tokens ffn, tokens hidden -> ffn hidden") if need_weight else x.new_empty(0)
    return dx, dw, reduce(d, "tokens ffn -> ffn", "sum") if need_bias else x.new_empty(0)


@triton.jit
def _act_backward_kernel(grad_out, pre, d_pre, n, ACT: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < n
    dy = tl.load(grad_out + at, ok, other=0.0).to(ACC)
    p = tl.load(pre + at, ok, other=0.0).to(ACC)
    tl.store(d_pre + at, (dy * activate_grad(p, ACT)).to(d_pre.dtype.element_ty), ok)


def backward_launch(
    grad_out: Tensor, x: Tensor, weight: Tensor, pre: Tensor, activation: str, need_x: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    args: dict[str, Any] = dict(locals())
    sizes = BACKWARD_SPEC.axes(args)
    dx, dw, db = BACKWARD_SPEC.empty(args, sizes)
    (d,) = BACKWARD_SPEC.empty_scratch(args, sizes)
    with on_device(x):
        _launch(
            _act_backward_kernel, (cdiv(d.numel(), 2048),), (grad_out.contiguous(), pre.contiguous(), d, d.numel()),
            {"ACT": activation, "BLOCK": 2048, "ACC": accumulator(x), "num_warps": 8},
        )  # fmt: skip
        if need_x:
            grad_input([d], [weight], dx)
        if need_weight:
            grad_weight(d, x, dw)
        if need_bias:
            sum_rows(d, db)
    return dx, dw, db


OP = Op(SPEC, launch, reference, Op(BACKWARD_SPEC, backward_launch, backward_reference))

"""RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467), forward and backward.

    xhat = x * rstd,   rstd = 1 / sqrt(mean(x**2, hidden) + eps)         statistics in fp32
    y    = (weight + weight_offset) * xhat

    x, y      tokens hidden
    weight    hidden
    rstd      tokens                                                     saved for the backward

round_early: xhat is rounded to x's dtype before the weight multiplies it (Llama and most HF models); otherwise the product
is formed in fp32 and rounded once (OLMo2, gpt-oss; Gemma with weight_offset 1).

HBM, in elements:  forward reads tokens*hidden + hidden, writes tokens*hidden + tokens (fp32).
One program holds one row in registers, so hidden <= MAX_HIDDEN.

Backward, with g = grad_y * (weight + weight_offset):
    grad_x = rstd * (g - xhat * mean(g * xhat, hidden))
    grad_weight = sum(grad_y * xhat, tokens), as per-program partial sums in a fixed order and a second launch: equal bits
    from run to run.
"""

from __future__ import annotations

import torch
from einops import rearrange, reduce
from torch import Tensor

from ._gemm import accumulator
from ._lang import cdiv, next_power_of_2, tl, triton
from ._launch import contiguous_last, on_device
from ._launch import launch as _launch
from ._spec import Args, Op, Sizes, Spec, Stage, Write, accumulate_dtype, flag
from ._target import Target, target_of

MAX_HIDDEN = 65536


def _check(sizes: Sizes, args: Args) -> dict[str, int]:
    if sizes["hidden"] > MAX_HIDDEN:
        raise ValueError(f"rms_norm: hidden={sizes['hidden']} exceeds the largest supported, {MAX_HIDDEN}")
    return {}


SPEC = Spec(
    name="rms_norm",
    reads={"x": "tokens hidden", "weight": "hidden"},
    writes={"y": Write("tokens hidden", "x"), "rstd": Write("tokens", "accumulate:x", flag("save_rstd"))},
    derive=_check,
    flops=lambda s, a: s["tokens"] * (4 * s["hidden"] + 3),
)

# Row bytes up to -> warps. H200, 2026-11-29, rows of 4096 bf16: 4 warps; the rest by the same bytes per thread (64).
WARPS = ((2048, 1), (4096, 2), (8192, 4), (16384, 8), (1 << 62, 16))


def configure(hidden: int, itemsize: int) -> int:
    """Warps for one row."""
    return next(warps for limit, warps in WARPS if hidden * itemsize <= limit)


def reference(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float, round_early: bool, save_rstd: bool
) -> tuple[Tensor, Tensor]:
    f = x.to(accumulate_dtype(x.dtype))
    rstd = torch.rsqrt(reduce(f.square(), "tokens hidden -> tokens 1", "mean") + eps)
    xhat = f * rstd
    if round_early:
        xhat = xhat.to(x.dtype)
        w = weight + weight_offset if weight_offset else weight
    else:
        w = weight.to(f.dtype) + weight_offset
    return (w * xhat).to(x.dtype), rearrange(rstd, "tokens 1 -> tokens") if save_rstd else rstd.new_empty(0)


@triton.jit
def _forward_kernel(
    x, weight, y, rstd, stride_x, HIDDEN, eps, weight_offset,
    BLOCK: tl.constexpr, ROUND_EARLY: tl.constexpr, SAVE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # int64: tokens * hidden may pass 2**31
    col = tl.arange(0, BLOCK)
    mask = col < HIDDEN
    v = tl.load(x + row * stride_x + col, mask, other=0.0).to(ACC)
    r = (1.0 / tl.sqrt(tl.sum(v * v, 0) / HIDDEN + eps)).to(ACC)
    if SAVE:
        tl.store(rstd + row, r)
    v = v * r
    w = tl.load(weight + col, mask, other=0.0)
    if ROUND_EARLY:
        v = v.to(y.dtype.element_ty).to(ACC)
        w = (w.to(ACC) + weight_offset).to(y.dtype.element_ty)
    else:
        w = w.to(ACC) + weight_offset
    tl.store(y + row * HIDDEN + col, (v * w.to(ACC)).to(y.dtype.element_ty), mask)


@triton.jit
def _backward_kernel(
    grad_y, x, weight, rstd, grad_x, partial, stride_g, stride_x, TOKENS, HIDDEN, weight_offset,
    BLOCK: tl.constexpr, NEED_X: tl.constexpr, NEED_W: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    per = tl.cdiv(TOKENS, tl.num_programs(0))
    col = tl.arange(0, BLOCK)
    mask = col < HIDDEN
    if BLOCK <= 8192:
        w = tl.load(weight + col, mask, other=0.0).to(ACC) + weight_offset
    dw = tl.zeros([BLOCK], ACC)
    first = (pid * per).to(tl.int64)
    for i in range(0, tl.minimum(per, TOKENS - pid * per)):
        row = first + i
        if BLOCK > 8192:  # again for every row, from cache: kept in registers it makes rows of 16384 spill
            w = tl.load(weight + col, mask, other=0.0).to(ACC) + weight_offset
        g = tl.load(grad_y + row * stride_g + col, mask, other=0.0).to(ACC)
        r = tl.load(rstd + row)
        xhat = tl.load(x + row * stride_x + col, mask, other=0.0).to(ACC) * r
        if NEED_W:
            dw += g * xhat
        if NEED_X:
            g = g * w
            g = r * (g - xhat * (tl.sum(g * xhat, 0) / HIDDEN))
            tl.store(grad_x + row * HIDDEN + col, g.to(grad_x.dtype.element_ty), mask)
    if NEED_W:
        tl.store(partial + pid.to(tl.int64) * HIDDEN + col, dw, mask)


@triton.jit
def _sum_rows_kernel(partial, out, ROWS, HIDDEN, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr):
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, BLOCK_R)
    acc = tl.zeros([BLOCK_R, BLOCK], ACC)
    for r in range(0, ROWS, BLOCK_R):
        at = (r + row)[:, None].to(tl.int64) * HIDDEN + col[None, :]
        acc += tl.load(partial + at, (r + row < ROWS)[:, None] & (col < HIDDEN)[None, :], other=0.0)
    tl.store(out + col, tl.sum(acc, 0).to(out.dtype.element_ty), col < HIDDEN)


def launch(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float, round_early: bool, save_rstd: bool
) -> tuple[Tensor, Tensor]:
    args = {"x": x, "weight": weight, "save_rstd": save_rstd}
    sizes = SPEC.axes(args)
    y, rstd = SPEC.empty(args, sizes)
    x, weight = contiguous_last(x), weight.contiguous()
    tokens, hidden = sizes["tokens"], sizes["hidden"]
    with on_device(x):
        _launch(
            _forward_kernel, (tokens,), (x, weight, y, rstd, x.stride(0), hidden, eps, weight_offset),
            {"BLOCK": next_power_of_2(hidden), "ROUND_EARLY": round_early, "SAVE": save_rstd, "ACC": accumulator(x),
             "num_warps": configure(hidden, x.element_size())},
        )  # fmt: skip
    return y, rstd


def _programs(tokens: int, target: Target) -> int:
    # A few programs an SM hide the loads of the next row; every program writes one partial row of grad_weight.
    return min(tokens, 4 * target.sms)


def _backward_axes(sizes: Sizes, args: Args) -> dict[str, int]:
    return {**_check(sizes, args), "programs": _programs(sizes["tokens"], target_of(args["x"].device))}


BACKWARD_SPEC = Spec(
    name="rms_norm_backward",
    reads={"grad_y": "tokens hidden", "x": "tokens hidden", "weight": "hidden", "rstd": "tokens"},
    any_dtype=frozenset({"rstd"}),
    writes={
        "grad_x": Write("tokens hidden", "x", flag("need_x")),
        "grad_weight": Write("hidden", "weight", flag("need_weight")),
    },
    scratch={"partial": Write("programs hidden", "accumulate:x", flag("need_weight"))},
    derive=_backward_axes,
    stages=(
        Stage("rms_norm_backward", ("grad_y", "x", "weight", "rstd"), ("grad_x", "partial"),
              lambda s, a: 9 * s["tokens"] * s["hidden"]),
        Stage("rms_norm_backward_weight", ("partial",), ("grad_weight",), lambda s, a: s["programs"] * s["hidden"]),
    ),
)  # fmt: skip


def backward_reference(
    grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, weight_offset: float, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    acc = accumulate_dtype(x.dtype)
    r = rearrange(rstd, "tokens -> tokens 1")
    xhat, dy = x.to(acc) * r, grad_y.to(acc)
    g = dy * (weight.to(acc) + weight_offset)
    dx = r * (g - xhat * reduce(g * xhat, "tokens hidden -> tokens 1", "mean"))
    dw = reduce(dy * xhat, "tokens hidden -> hidden", "sum")
    return dx.to(x.dtype) if need_x else x.new_empty(0), dw.to(weight.dtype) if need_weight else weight.new_empty(0)


def backward_launch(
    grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, weight_offset: float, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    args = {"grad_y": grad_y, "x": x, "weight": weight, "rstd": rstd, "need_x": need_x, "need_weight": need_weight}
    sizes = BACKWARD_SPEC.axes(args)
    grad_x, grad_weight = BACKWARD_SPEC.empty(args, sizes)
    (partial,) = BACKWARD_SPEC.empty_scratch(args, sizes)
    tokens, hidden, programs = sizes["tokens"], sizes["hidden"], sizes["programs"]
    if not tokens or not hidden:
        return grad_x, grad_weight.zero_()
    grad_y, x, weight, rstd = contiguous_last(grad_y), contiguous_last(x), weight.contiguous(), rstd.contiguous()
    with on_device(x):
        if need_x or need_weight:
            _launch(
                _backward_kernel, (programs,),
                (grad_y, x, weight, rstd, grad_x, partial, grad_y.stride(0), x.stride(0), tokens, hidden, weight_offset),
                {"BLOCK": next_power_of_2(hidden), "NEED_X": need_x, "NEED_W": need_weight, "ACC": accumulator(x),
                 "num_warps": configure(hidden, 2 * x.element_size())},
            )  # fmt: skip
        if need_weight:
            _launch(
                _sum_rows_kernel, (cdiv(hidden, 128),), (partial, grad_weight, programs, hidden),
                {"BLOCK_R": 16, "BLOCK": 128, "ACC": accumulator(x), "num_warps": 4},
            )  # fmt: skip
    return grad_x, grad_weight


OP = Op(SPEC, launch, reference, Op(BACKWARD_SPEC, backward_launch, backward_reference))

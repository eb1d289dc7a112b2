"""RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467) and LayerNorm (Ba et al. 2016, arXiv 1607.06450), forward and backward.

    c    = x (kind "rms")  or  x - mean(x, hidden) (kind "layer")
    xhat = c * rstd,   rstd = 1 / sqrt(mean(c**2, hidden) + eps)         statistics in fp32
    y    = residual + ((weight + weight_offset) * xhat + bias)           the normed value is rounded to x's dtype first

    x, y, residual   tokens hidden                  y and residual of dtype `dtype`, which may differ from x's
    weight, bias     hidden                         of one dtype, which may differ from x's
    mean             tokens, fp64, kind "layer"     saved for the backward, as is
    rstd             tokens

round_early, of kind "rms" only (without effect on "layer"): xhat is rounded to x's dtype before the weight multiplies it (Llama
and most HF models); otherwise the product is formed in fp32 and rounded once (OLMo2, gpt-oss; Gemma with weight_offset 1).

A mean far larger than the deviation costs no accuracy: the row is centred twice in registers, the second time by what the
rounding of the first mean left, and the sum of both is kept in fp64, which the backward takes apart again.

HBM, in elements:  forward reads tokens*hidden + hidden, writes tokens*hidden + tokens (bias, residual and mean as much again).
One program holds whole rows in registers, so hidden <= MAX_HIDDEN; short rows share a program.

Backward, with g = grad_y * (weight + weight_offset):
    grad_x = rstd * (g - xhat * mean(g * xhat, hidden) [- mean(g, hidden), kind "layer"])
    grad_weight = sum(grad_y * xhat, tokens) and grad_bias = sum(grad_y, tokens), as per-program partial sums in a fixed order
    and a second launch for both: equal bits from run to run. The residual's gradient is grad_y itself.
"""

from __future__ import annotations

import torch
from einops import rearrange, reduce
from torch import Tensor

from ._gemm import accumulator, sum_rows
from ._lang import cdiv, next_power_of_2, tl, triton
from ._launch import contiguous_last, on_device
from ._launch import launch as _launch
from ._spec import DTYPES, Args, Op, Sizes, Spec, Stage, Write, accumulate_dtype, flag
from ._target import Target, target_of

MAX_HIDDEN = 65536
LONG = 8192  # beyond, the backward reads a row twice
KINDS = ("rms", "layer")


def _check(sizes: Sizes, args: Args) -> dict[str, int]:
    if sizes["hidden"] > MAX_HIDDEN:
        raise ValueError(f"norm: hidden={sizes['hidden']} exceeds the largest supported, {MAX_HIDDEN}")
    if args["kind"] not in KINDS:
        raise ValueError(f"norm: kind={args['kind']!r}, expected one of {', '.join(KINDS)}")
    if args["weight"].dtype not in DTYPES:
        raise ValueError(f"norm: weight has dtype {args['weight'].dtype}, expected one of {', '.join(map(str, DTYPES))}")
    return {}


def _axes(sizes: Sizes, args: Args) -> dict[str, int]:
    weight, bias, residual, dtype = args["weight"], args["bias"], args["residual"], args["dtype"]
    if bias is not None and bias.dtype != weight.dtype:
        raise ValueError(f"norm: bias has dtype {bias.dtype}, but weight has {weight.dtype}")
    if dtype not in DTYPES:
        raise ValueError(f"norm: dtype={dtype}, expected one of {', '.join(map(str, DTYPES))}")
    if residual is not None and residual.dtype != dtype:
        raise ValueError(f"norm: residual has dtype {residual.dtype}, but the result has dtype={dtype}")
    return _check(sizes, args)


def _flops(sizes: Sizes, args: Args) -> tuple[int, int]:
    given = sum(args[n] is not None for n in ("bias", "residual"))
    elements = sizes["tokens"] * sizes["hidden"]
    layer = args["kind"] == "layer"
    model = elements * (4 + 2 * layer + given) + 3 * sizes["tokens"]
    return model, model + 2 * elements * layer  # centred twice


SPEC = Spec(
    name="norm",
    reads={"x": "tokens hidden", "weight": "hidden", "bias": "hidden", "residual": "tokens hidden"},
    optional=frozenset({"bias", "residual"}),
    any_dtype=frozenset({"weight", "bias", "residual"}),
    writes={
        "y": Write("tokens hidden", "dtype"),
        "mean": Write("tokens", "float64", lambda a: a["save"] and a["kind"] == "layer"),
        "rstd": Write("tokens", "accumulate:x", flag("save")),
    },
    derive=_axes,
    flops=_flops,
)

# Row bytes up to -> warps. H200, 2026-11-29, rows of 4096 bf16: 4 warps; the rest, and how many rows below 4096 share a program,
# by the same bytes per thread (64).
WARPS = ((8192, 4), (16384, 8), (1 << 62, 16))


def configure(hidden: int, itemsize: int) -> tuple[int, int]:
    """(rows of a program, warps): short rows fill a program of four warps together."""
    size = next_power_of_2(hidden) * itemsize
    return max(WARPS[0][0] // max(size, 128), 1), next(warps for limit, warps in WARPS if size <= limit)


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, kind: str, eps: float, weight_offset: float,
    round_early: bool, save: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    v = x.to(accumulate_dtype(x.dtype))
    mean = x.new_empty(0, dtype=torch.float64)
    if kind == "layer":
        coarse = reduce(v, "tokens hidden -> tokens 1", "mean")
        fine = reduce(v - coarse, "tokens hidden -> tokens 1", "mean")
        v = v - coarse - fine
        if save:
            mean = rearrange(coarse.double() + fine.double(), "tokens 1 -> tokens")
    rstd = torch.rsqrt(reduce(v.square(), "tokens hidden -> tokens 1", "mean") + eps)
    xhat = v * rstd
    if round_early and kind == "rms":
        xhat = xhat.to(x.dtype)
        w = weight + weight_offset if weight_offset else weight
    else:
        w = weight.to(v.dtype) + weight_offset
    y = w * xhat if bias is None else w * xhat + bias
    y = y.to(x.dtype)
    y = y if residual is None else residual + y
    return y.to(dtype), mean, rearrange(rstd, "tokens 1 -> tokens") if save else rstd.new_empty(0)


@triton.jit(do_not_specialize=["TOKENS"])
def _forward_kernel(
    x, weight, bias, residual, y, mean, rstd, stride_x, stride_r, TOKENS, HIDDEN, eps, weight_offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, ROUND_EARLY: tl.constexpr, SAVE: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # int64: tokens * hidden may pass 2**31
    col = tl.arange(0, BLOCK)
    inside = (col < HIDDEN)[None, :]
    mask = (row < TOKENS)[:, None] & inside
    v = tl.load(x + row[:, None] * stride_x + col[None, :], mask, other=0.0).to(ACC)
    if KIND == "layer":
        coarse = tl.sum(v, 1) / HIDDEN
        v = tl.where(inside, v - coarse[:, None], 0.0)
        fine = tl.sum(v, 1) / HIDDEN  # v is exact where the mean is large, so this is all that coarse is off by
        v = tl.where(inside, v - fine[:, None], 0.0)
        if SAVE:
            tl.store(mean + row, coarse.to(tl.float64) + fine.to(tl.float64), row < TOKENS)
    r = (1.0 / tl.sqrt(tl.sum(v * v, 1) / HIDDEN + eps)).to(ACC)
    if SAVE:
        tl.store(rstd + row, r, row < TOKENS)
    v = v * r[:, None]
    w = tl.load(weight + col, col < HIDDEN, other=0.0)
    if ROUND_EARLY:
        v = v.to(x.dtype.element_ty).to(ACC)
        w = (w.to(ACC) + weight_offset).to(weight.dtype.element_ty)
    else:
        w = w.to(ACC) + weight_offset
    v = v * w.to(ACC)[None, :]
    if bias is not None:
        v += tl.load(bias + col, col < HIDDEN, other=0.0).to(ACC)[None, :]
    v = v.to(x.dtype.element_ty)
    if residual is not None:
        v = v.to(ACC) + tl.load(residual + row[:, None] * stride_r + col[None, :], mask, other=0.0).to(ACC)
    tl.store(y + row[:, None] * HIDDEN + col[None, :], v.to(y.dtype.element_ty), mask)


@triton.jit
def _normalised(v, mean, rstd, KIND: tl.constexpr):
    """xhat; beyond the row's end that of kind "layer" is not 0."""
    if KIND == "layer":
        coarse = mean.to(v.dtype)
        v = v - coarse - (mean - coarse.to(tl.float64)).to(v.dtype)
    return v * rstd


@triton.jit(do_not_specialize=["TOKENS"])
def _backward_kernel(
    grad_y, x, weight, mean, rstd, grad_x, partial, stride_g, stride_x, TOKENS, HIDDEN, weight_offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, NEED_X: tl.constexpr, NEED_W: tl.constexpr,
    NEED_B: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    per = tl.cdiv(tl.cdiv(TOKENS, ROWS), tl.num_programs(0)) * ROWS
    col = tl.arange(0, BLOCK)
    inside = col < HIDDEN
    w = (tl.load(weight + col, inside, other=0.0).to(ACC) + weight_offset)[None, :]
    dw = tl.zeros([ROWS, BLOCK], ACC)
    db = tl.zeros([ROWS, BLOCK], ACC)
    first = (pid * per).to(tl.int64)
    for i in range(0, tl.minimum(per, TOKENS - pid * per), ROWS):
        row = (first + i + tl.arange(0, ROWS))[:, None]
        mask = (row < TOKENS) & inside[None, :]
        g = tl.load(grad_y + row * stride_g + col[None, :], mask, other=0.0).to(ACC)
        r = tl.load(rstd + row, row < TOKENS, other=0.0)
        m = tl.load(mean + row, row < TOKENS, other=0.0) if KIND == "layer" else r
        xhat = _normalised(tl.load(x + row * stride_x + col[None, :], mask, other=0.0).to(ACC), m, r, KIND)
        if NEED_W:
            dw += g * xhat
        if NEED_B:
            db += g
        if NEED_X:
            g = g * w
            dx = g - xhat * (tl.sum(g * xhat, 1) / HIDDEN)[:, None]
            if KIND == "layer":
                dx -= (tl.sum(g, 1) / HIDDEN)[:, None]
            tl.store(grad_x + row * HIDDEN + col[None, :], (r * dx).to(grad_x.dtype.element_ty), mask)
    at = partial + pid.to(tl.int64) * HIDDEN * (NEED_W + NEED_B) + col
    if NEED_W:
        tl.store(at, tl.sum(dw, 0), inside)
    if NEED_B:
        tl.store(at + NEED_W * HIDDEN, tl.sum(db, 0), inside)


@triton.jit
def _half_means(grad_y, x, weight, m, r, col, HIDDEN, weight_offset, KIND: tl.constexpr, ACC: tl.constexpr):
    """What half a row adds to its means of g * xhat and of g. Leaves it in cache."""
    inside = col < HIDDEN
    w = tl.load(weight + col, inside, other=0.0, eviction_policy="evict_last").to(ACC) + weight_offset
    g = tl.load(grad_y + col, inside, other=0.0, eviction_policy="evict_last").to(ACC) * w
    xhat = _normalised(tl.load(x + col, inside, other=0.0, eviction_policy="evict_last").to(ACC), m, r, KIND)
    return tl.sum(g * xhat, 0) / HIDDEN, (tl.sum(g, 0) / HIDDEN if KIND == "layer" else 0.0)


@triton.jit
def _half(
    grad_y, x, weight, m, r, grad_x, dw, db, col, slope, shift, HIDDEN, weight_offset,
    KIND: tl.constexpr, NEED_X: tl.constexpr, NEED_W: tl.constexpr, NEED_B: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Half a row's part of grad_x, and the sums with it added."""
    inside = col < HIDDEN
    g = tl.load(grad_y + col, inside, other=0.0).to(ACC)
    xhat = _normalised(tl.load(x + col, inside, other=0.0).to(ACC), m, r, KIND)
    if NEED_W:
        dw += g * xhat
    if NEED_B:
        db += g
    if NEED_X:
        g = g * (tl.load(weight + col, inside, other=0.0).to(ACC) + weight_offset)
        tl.store(grad_x + col, (r * (g - xhat * slope - shift)).to(grad_x.dtype.element_ty), inside)
    return dw, db


@triton.jit(do_not_specialize=["TOKENS"])
def _long_backward_kernel(
    grad_y, x, weight, mean, rstd, grad_x, partial, stride_g, stride_x, TOKENS, HIDDEN, weight_offset,
    BLOCK: tl.constexpr, KIND: tl.constexpr, NEED_X: tl.constexpr, NEED_W: tl.constexpr, NEED_B: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """For rows that would spill beside their sums: read twice, the second time from cache, both by halves."""
    pid = tl.program_id(0)
    per = tl.cdiv(TOKENS, tl.num_programs(0))
    left = tl.arange(0, BLOCK // 2)
    right = BLOCK // 2 + left
    dw0 = tl.zeros([BLOCK // 2], ACC)
    db0 = tl.zeros([BLOCK // 2], ACC)
    dw1 = tl.zeros([BLOCK // 2], ACC)
    db1 = tl.zeros([BLOCK // 2], ACC)
    first = (pid * per).to(tl.int64)
    for i in range(0, tl.minimum(per, TOKENS - pid * per)):
        row = first + i
        gy, xs, gx = grad_y + row * stride_g, x + row * stride_x, grad_x + row * HIDDEN
        r = tl.load(rstd + row)
        m = tl.load(mean + row) if KIND == "layer" else r
        slope = r * 0.0
        shift = slope
        if NEED_X:
            slope0, shift0 = _half_means(gy, xs, weight, m, r, left, HIDDEN, weight_offset, KIND, ACC)
            slope1, shift1 = _half_means(gy, xs, weight, m, r, right, HIDDEN, weight_offset, KIND, ACC)
            slope = slope0 + slope1
            shift = shift0 + shift1
        dw0, db0 = _half(gy, xs, weight, m, r, gx, dw0, db0, left, slope, shift, HIDDEN, weight_offset, KIND, NEED_X, NEED_W,
                         NEED_B, ACC)  # fmt: skip
        dw1, db1 = _half(gy, xs, weight, m, r, gx, dw1, db1, right, slope, shift, HIDDEN, weight_offset, KIND, NEED_X, NEED_W,
                         NEED_B, ACC)  # fmt: skip
    at = partial + pid.to(tl.int64) * HIDDEN * (NEED_W + NEED_B)
    if NEED_W:
        tl.store(at + left, dw0, left < HIDDEN)
        tl.store(at + right, dw1, right < HIDDEN)
    if NEED_B:
        at += NEED_W * HIDDEN
        tl.store(at + left, db0, left < HIDDEN)
        tl.store(at + right, db1, right < HIDDEN)


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, kind: str, eps: float, weight_offset: float,
    round_early: bool, save: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    args = {"x": x, "weight": weight, "bias": bias, "residual": residual, "kind": kind, "save": save, "dtype": dtype}
    sizes = SPEC.axes(args)
    y, mean, rstd = SPEC.empty(args, sizes)
    x, weight = contiguous_last(x), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else contiguous_last(residual)
    tokens, hidden = sizes["tokens"], sizes["hidden"]
    rows, warps = configure(hidden, x.element_size())
    with on_device(x):
        _launch(
            _forward_kernel, (cdiv(tokens, rows),),
            (x, weight, bias, residual, y, mean, rstd, x.stride(0), 0 if residual is None else residual.stride(0), tokens, hidden,
             eps, weight_offset),
            {"ROWS": rows, "BLOCK": next_power_of_2(hidden), "KIND": kind, "ROUND_EARLY": round_early and kind == "rms",
             "SAVE": save, "ACC": accumulator(x), "num_warps": warps},
        )  # fmt: skip
    return y, mean, rstd


def _programs(tokens: int, rows: int, target: Target) -> int:
    # A few programs an SM hide the loads of the next rows; every program writes one partial row of each sum.
    return min(cdiv(tokens, rows), 4 * target.sms)


def _backward_axes(sizes: Sizes, args: Args) -> dict[str, int]:
    rows, _ = configure(sizes["hidden"], 2 * args["x"].element_size())
    programs = _programs(sizes["tokens"], rows, target_of(args["x"].device))
    return {**_check(sizes, args), "programs": programs, "sums": args["need_weight"] + args["need_bias"]}


BACKWARD_SPEC = Spec(
    name="norm_backward",
    reads={"x": "tokens hidden", "grad_y": "tokens hidden", "weight": "hidden", "mean": "tokens", "rstd": "tokens"},
    optional=frozenset({"mean"}),
    any_dtype=frozenset({"grad_y", "weight", "mean", "rstd"}),
    writes={
        "grad_x": Write("tokens hidden", "x", flag("need_x")),
        "grad_weight": Write("hidden", "weight", flag("need_weight")),
        "grad_bias": Write("hidden", "weight", flag("need_bias")),
    },
    scratch={"partial": Write("programs sums hidden", "accumulate:x", flag("need_weight", "need_bias"))},
    derive=_backward_axes,
    stages=(
        Stage("norm_backward", ("grad_y", "x", "weight", "mean", "rstd"), ("grad_x", "partial"),
              lambda s, a: (12 if a["kind"] == "layer" else 9) * s["tokens"] * s["hidden"]),
        Stage("norm_backward_sums", ("partial",), ("grad_weight", "grad_bias"),
              lambda s, a: s["programs"] * s["sums"] * s["hidden"]),
    ),
)  # fmt: skip


def backward_reference(
    grad_y: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, kind: str, weight_offset: float,
    need_x: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    acc = accumulate_dtype(x.dtype)
    xhat, dy = x.to(acc), grad_y.to(acc)
    if mean is not None:
        m = rearrange(mean, "tokens -> tokens 1")
        coarse = m.to(acc)
        xhat = xhat - coarse - (m - coarse).to(acc)
    r = rearrange(rstd, "tokens -> tokens 1")
    xhat = xhat * r
    g = dy * (weight.to(acc) + weight_offset)
    dx = g - xhat * reduce(g * xhat, "tokens hidden -> tokens 1", "mean")
    if kind == "layer":
        dx = dx - reduce(g, "tokens hidden -> tokens 1", "mean")
    dw = reduce(dy * xhat, "tokens hidden -> hidden", "sum") if need_weight else weight.new_empty(0)
    db = reduce(dy, "tokens hidden -> hidden", "sum") if need_bias else weight.new_empty(0)
    return (r * dx).to(x.dtype) if need_x else x.new_empty(0), dw.to(weight.dtype), db.to(weight.dtype)


def backward_launch(
    grad_y: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, kind: str, weight_offset: float,
    need_x: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    args = {"grad_y": grad_y, "x": x, "weight": weight, "mean": mean, "rstd": rstd, "kind": kind,
            "need_x": need_x, "need_weight": need_weight, "need_bias": need_bias}  # fmt: skip
    sizes = BACKWARD_SPEC.axes(args)
    grad_x, grad_weight, grad_bias = BACKWARD_SPEC.empty(args, sizes)
    (partial,) = BACKWARD_SPEC.empty_scratch(args, sizes)
    tokens, hidden, programs = sizes["tokens"], sizes["hidden"], sizes["programs"]
    if not tokens or not hidden:
        return grad_x, grad_weight.zero_(), grad_bias.zero_()
    grad_y, x, weight, rstd = contiguous_last(grad_y), contiguous_last(x), weight.contiguous(), rstd.contiguous()
    mean = None if mean is None else mean.contiguous()
    rows, warps = configure(hidden, 2 * x.element_size())
    with on_device(x):
        if need_x or need_weight or need_bias:
            block, is_long = next_power_of_2(hidden), hidden > LONG
            _launch(
                _long_backward_kernel if is_long else _backward_kernel, (programs,),
                (grad_y, x, weight, mean, rstd, grad_x, partial, grad_y.stride(0), x.stride(0), tokens, hidden, weight_offset),
                {**({} if is_long else {"ROWS": rows}), "BLOCK": block, "KIND": kind, "NEED_X": need_x, "NEED_W": need_weight,
                 "NEED_B": need_bias, "ACC": accumulator(x), "num_warps": warps},
            )  # fmt: skip
        if need_weight or need_bias:
            sums = [t for t, needed in ((grad_weight, need_weight), (grad_bias, need_bias)) if needed]
            sum_rows(partial.view(programs, -1), *sums)
    return grad_x, grad_weight, grad_bias


OP = Op(SPEC, launch, reference, Op(BACKWARD_SPEC, backward_launch, backward_reference), passthrough={"residual": "grad_y"})

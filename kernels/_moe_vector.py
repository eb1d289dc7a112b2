"""One token's experts: sums over the rows of their weights, without matrix instructions; the token's slots go in parallel.

The first launch makes h `rows ffn` (and gate_up) of every slot; the second has all slots of its columns, and sums their results.
A weight is read in blocks [BN, BK] of (out, in) features, whichever of them is dense.
"""

from __future__ import annotations

from torch import Tensor

from . import _moe
from ._gemm import accumulator
from ._lang import cdiv, next_power_of_2, tl, triton
from ._launch import launch
from ._moe import gated
from ._spec import Args, Sizes
from ._target import target_of


@triton.jit
def _dot_rows(x, w, c, ok, K, stride_n, stride_k, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr):
    """[BN] sums over K of x * w[c], where ok."""
    acc = tl.zeros([BN, BK], ACC)
    kk = tl.arange(0, BK)
    at = w + c[:, None].to(tl.int64) * stride_n + kk[None, :].to(tl.int64) * stride_k
    for k in tl.range(0, K, BK, num_stages=STAGES):
        inside = k + kk < K
        v = tl.load(at + k.to(tl.int64) * stride_k, ok[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
        acc += v.to(ACC) * tl.load(x + k + kk, inside, other=0.0).to(ACC)[None, :]
    return tl.sum(acc, 1)


@triton.jit
def _gate_up_vector_kernel(
    x, w, bias, indices, inverse, h, saved, N, K, stride_e, stride_n, stride_k, alpha, limit, ACT: tl.constexpr,
    INTERLEAVED: tl.constexpr, ACC: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1)
    row = tl.load(inverse + slot)
    if row >= 0:
        e = tl.load(indices + slot)
        j = tl.arange(0, 2 * BN)
        n0 = tl.program_id(0) * BN
        f = n0 + (j // 2 if INTERLEAVED else j % BN)
        c = 2 * n0 + j if INTERLEAVED else tl.where(j < BN, f, N + f)
        both = _dot_rows(x, w + e.to(tl.int64) * stride_e, c, f < N, K, stride_n, stride_k, 2 * BN, BK, STAGES, ACC)
        if bias is not None:
            both += tl.load(bias + e * 2 * N + c, f < N, other=0.0).to(ACC)
        if saved is not None:
            tl.store(saved + row * 2 * N + c, both.to(saved.dtype.element_ty), f < N)
        pair = tl.reshape(both, (BN, 2)) if INTERLEAVED else tl.reshape(both, (2, BN)).T
        g, u = tl.split(pair)
        n = n0 + tl.arange(0, BN)
        tl.store(h + row * N + n, gated(g, u, alpha, limit, ACT).to(h.dtype.element_ty), n < N)


@triton.jit
def _down_vector_kernel(
    h, w, bias, indices, inverse, weights, out, N, K, stride_e, stride_n, stride_k, TOP_K: tl.constexpr, ACC: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros([BN], ACC)
    for j in tl.static_range(TOP_K):
        row = tl.load(inverse + j)
        if row >= 0:
            e = tl.load(indices + j)
            y = _dot_rows(h + row * K, w + e.to(tl.int64) * stride_e, n, n < N, K, stride_n, stride_k, BN, BK, STAGES, ACC)
            if bias is not None:
                y += tl.load(bias + e * N + n, n < N, other=0.0).to(ACC)
            total += y * tl.load(weights + j).to(ACC)
    tl.store(out + n, total.to(out.dtype.element_ty), n < N)


def launch_vector(h: Tensor, out: Tensor, saved: Tensor | None, args: Args, sizes: Sizes, weights: Tensor) -> None:
    """Both launches. h `rows ffn`, out `1 hidden`, saved `rows gate_up`."""
    x, transposed, activation = args["x"].contiguous(), args["transposed"], args["activation"]
    c = _moe.configure("vector_columns" if transposed else "vector", args["tile_rows"], x.element_size(), target_of(x.device))
    ws = [_moe.dense_rows(args[name]) for name in ("gate_up_weight", "down_weight")]
    strides = [(w.stride(0), *((1, w.stride(1)) if transposed else (w.stride(1), 1))) for w in ws]
    biases = [None if args[name] is None else args[name].contiguous() for name in ("gate_up_bias", "down_bias")]
    hidden, ffn, top_k = sizes["hidden"], sizes["ffn"], sizes["top_k"]

    def options(k: int) -> dict[str, int]:
        block_k = min(c.block_k, next_power_of_2(max(k, 1)))
        return {"BN": c.block_n, "BK": block_k, "STAGES": c.num_stages, "num_warps": c.num_warps, "num_stages": c.num_stages}

    launch(
        _gate_up_vector_kernel, (cdiv(ffn, c.block_n), top_k),
        (x, ws[0], biases[0], args["indices"], args["inverse"], h, saved, ffn, hidden, *strides[0], *_moe.clamp_numbers(args)),
        {"ACT": activation, "INTERLEAVED": args["interleaved"], "ACC": accumulator(x), **options(hidden)},
    )  # fmt: skip
    launch(
        _down_vector_kernel, (cdiv(hidden, c.block_n),),
        (h, ws[1], biases[1], args["indices"], args["inverse"], weights, out, hidden, ffn, *strides[1]),
        {"TOP_K": top_k, "ACC": accumulator(x), **options(ffn)},
    )  # fmt: skip

"""One token's experts: sums over the rows of their weights, without matrix instructions; the token's slots go in parallel.

The first launch makes h `rows ffn` (and gate_up) of every slot; the second has all slots of its columns, and sums their results.
Weights are stored `experts out in`, and read in blocks [BN, BK] of (out, in).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import _moe
from ._gemm import accumulator
from ._lang import cdiv, next_power_of_2, tl, triton
from ._launch import contiguous_last, launch
from ._moe import gated
from ._spec import Args, Sizes
from ._target import target_of

UNROLLED = 4  # blocks of ffn, of each of a token's experts


@triton.jit
def _add_block(acc, x, at, k, ok, K, BK: tl.constexpr, EVEN: tl.constexpr):
    """acc [BN, BK] + x * the weights at `at`, k columns on; nothing is read where not ok."""
    kk = k + tl.arange(0, BK)
    at += k
    if EVEN:
        w = tl.load(at, ok[:, None], other=0.0, eviction_policy="evict_first")
        v = tl.load(x + kk)
    else:
        w = tl.load(at, ok[:, None] & (kk < K)[None, :], other=0.0, eviction_policy="evict_first")
        v = tl.load(x + kk, kk < K, other=0.0)
    return acc + w.to(acc.dtype) * v.to(acc.dtype)[None, :]


@triton.jit
def _dot_rows(x, w, c, ok, K, stride_n, BN: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr,
              STAGES: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """[BN] sums over K of x * w[c], where ok. BLOCKS of K: unrolled, so that loads of what comes next wait for no loop's end."""
    acc = tl.zeros([BN, BK], ACC)
    at = w + c[:, None].to(tl.int64) * stride_n + tl.arange(0, BK)[None, :]
    if BLOCKS > 0:
        for i in tl.static_range(BLOCKS):
            acc = _add_block(acc, x, at, i * BK, ok, K, BK, EVEN)
    else:
        for k in tl.range(0, K, BK, num_stages=STAGES):
            acc = _add_block(acc, x, at, k, ok, K, BK, EVEN)
    return tl.sum(acc, 1)


@triton.jit
def _gate_up_vector_kernel(
    x, w, bias, indices, inverse, h, saved, N, K, stride_e, stride_n, alpha, limit, ACT: tl.constexpr,
    INTERLEAVED: tl.constexpr, ACC: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1)
    row = tl.load(inverse + slot)
    if row >= 0:
        e = tl.load(indices + slot)
        j = tl.arange(0, 2 * BN)
        n0 = tl.program_id(0) * BN
        f = n0 + (j // 2 if INTERLEAVED else j % BN)
        c = 2 * n0 + j if INTERLEAVED else tl.where(j < BN, f, N + f)
        both = _dot_rows(x, w + e.to(tl.int64) * stride_e, c, f < N, K, stride_n, 2 * BN, BK, BLOCKS, EVEN, STAGES, ACC)
        if bias is not None:
            both += tl.load(bias + e * 2 * N + c, f < N, other=0.0).to(ACC)
        if saved is not None:
            tl.store(saved + row * 2 * N + c, both.to(saved.dtype.element_ty), f < N)
        pair = tl.reshape(both, (BN, 2)) if INTERLEAVED else tl.reshape(both, (2, BN)).T
        g, u = tl.split(pair)
        n = n0 + tl.arange(0, BN)
        tl.store(h + row * N + n, gated(g, u, alpha, limit, ACT).to(h.dtype.element_ty), n < N)


@triton.jit
def _add_slots(acc, h, at, k, ok, K, BK: tl.constexpr, EVEN: tl.constexpr):
    """acc [slots, BN, BK] + h of each slot * its weights at `at`, k columns on; nothing is read where not ok."""
    kk = k + tl.arange(0, BK)
    at += k
    if EVEN:
        w = tl.load(at, ok, other=0.0, eviction_policy="evict_first")
        v = tl.load(h + k)
    else:
        w = tl.load(at, ok & (kk < K)[None, None, :], other=0.0, eviction_policy="evict_first")
        v = tl.load(h + k, (kk < K)[None, None, :], other=0.0)
    return acc + w.to(acc.dtype) * v.to(acc.dtype)


@triton.jit
def _down_vector_kernel(
    h, w, bias, indices, inverse, weights, residual, out, N, K, stride_e, stride_n, TOP_K: tl.constexpr,
    SLOTS: tl.constexpr, ACC: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """All slots at once, SLOTS with those that only fill up: so each expert's weights are on their way from the start."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    j = tl.arange(0, SLOTS)
    row = tl.load(inverse + j, j < TOP_K, other=-1)
    e = tl.load(indices + j, row >= 0, other=0)
    ok = (row >= 0)[:, None] & (n < N)[None, :]
    start = (e.to(tl.int64) * stride_e)[:, None] + (n.to(tl.int64) * stride_n)[None, :]
    kk = tl.arange(0, BK)
    at = w + start[:, :, None] + kk[None, None, :]
    left = h + (tl.maximum(row, 0) * K)[:, None, None] + kk[None, None, :]
    acc = tl.zeros([SLOTS, BN, BK], ACC)
    if BLOCKS > 0:
        for i in tl.static_range(BLOCKS):
            acc = _add_slots(acc, left, at, i * BK, ok[:, :, None], K, BK, EVEN)
    else:
        for k in tl.range(0, K, BK, num_stages=STAGES):
            acc = _add_slots(acc, left, at, k, ok[:, :, None], K, BK, EVEN)
    y = tl.sum(acc, 2)
    if bias is not None:
        y += tl.load(bias + e[:, None] * N + n[None, :], ok, other=0.0).to(ACC)
    y = tl.where(ok, y * tl.load(weights + j, row >= 0, other=0.0).to(ACC)[:, None], 0.0)
    total = tl.sum(y, 0)
    if residual is not None:
        total += tl.load(residual + n, n < N, other=0.0).to(ACC)
    tl.store(out + n, total.to(out.dtype.element_ty), n < N)


def launch_vector(h: Tensor, out: Tensor, saved: Tensor | None, args: Args, sizes: Sizes, weights: Tensor) -> None:
    """Both launches. h `rows ffn`, out `1 hidden`, saved `rows gate_up`."""
    x, activation = args["x"].contiguous(), args["activation"]
    ws = [contiguous_last(args[name]) for name in ("gate_up_weight", "down_weight")]
    biases = [None if args[name] is None else args[name].contiguous() for name in ("gate_up_bias", "down_bias")]
    hidden, ffn, top_k = sizes["hidden"], sizes["ffn"], sizes["top_k"]

    def options(c: _moe.Config, k: int, slots: int) -> dict[str, Any]:
        """slots: that a program has at once, of whose weights a block holds block_n * block_k."""
        widest = c.block_n if slots <= 64 else 1, max(c.block_k // slots, 16)
        block_n, block_k = widest
        while k % block_k and block_k > 32:  # blocks that divide K need no masks
            block_n, block_k = block_n * (2 if slots == 1 else 1), block_k // 2
        if k % block_k:
            block_n, block_k = widest[0], min(widest[1], next_power_of_2(max(k, 1)))
        blocks = cdiv(k, block_k) if c.unrolled else 0
        return {"BN": block_n, "BK": block_k, "BLOCKS": blocks if blocks <= UNROLLED else 0, "EVEN": k % block_k == 0,
                "STAGES": c.num_stages, "num_warps": c.num_warps, "num_stages": c.num_stages}  # fmt: skip

    slots, target = next_power_of_2(top_k), target_of(x.device)
    first, second = (options(_moe.configure(kind, sizes["tile_rows"], x.element_size(), target), k, n)
                     for kind, k, n in (("vector", hidden, 1), ("vector_down", ffn, slots)))  # fmt: skip
    launch(
        _gate_up_vector_kernel, (cdiv(ffn, first["BN"]), top_k),
        (x, ws[0], biases[0], args["indices"], args["inverse"], h, saved, ffn, hidden, ws[0].stride(0), ws[0].stride(1),
         *_moe.clamp_numbers(args)),
        {"ACT": activation, "INTERLEAVED": args["interleaved"], "ACC": accumulator(x), **first},
    )  # fmt: skip
    launch(
        _down_vector_kernel, (cdiv(hidden, second["BN"]),),
        (h, ws[1], biases[1], args["indices"], args["inverse"], weights, args["residual"], out, hidden, ffn,
         ws[1].stride(0), ws[1].stride(1)),
        {"TOP_K": top_k, "SLOTS": slots, "ACC": accumulator(x), **second},
    )  # fmt: skip

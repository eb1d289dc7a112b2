"""One token's experts: sums over the rows of their weights, without matrix instructions; the token's slots go in parallel.

The first launch makes h `rows ffn` (and gate_up) of every slot; the second has all slots of its columns, and sums their results.
A weight is read in blocks [BN, BK] of (out, in) features, whichever of them is dense.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import _moe
from ._gemm import accumulator
from ._lang import cdiv, next_power_of_2, tl, triton
from ._launch import chained, launch
from ._math import after_earlier, prefetch
from ._moe import gated
from ._spec import Args, Sizes
from ._target import Target, target_of

_LINE_BYTES = 128
UNROLLED = 4  # blocks of ffn, of each of a token's experts


@triton.jit
def _add_block(acc, x, at, k, ok, K, stride_k, BK: tl.constexpr, EVEN: tl.constexpr):
    """acc [BN, BK] + x * the weights at `at`, k columns on; nothing is read where not ok."""
    kk = k + tl.arange(0, BK)
    at += tl.cast(k, tl.int64) * stride_k
    if EVEN:
        w = tl.load(at, ok[:, None], other=0.0, eviction_policy="evict_first")
        v = tl.load(x + kk)
    else:
        w = tl.load(at, ok[:, None] & (kk < K)[None, :], other=0.0, eviction_policy="evict_first")
        v = tl.load(x + kk, kk < K, other=0.0)
    return acc + w.to(acc.dtype) * v.to(acc.dtype)[None, :]


@triton.jit
def _dot_rows(x, w, c, ok, K, stride_n, stride_k, BN: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr,
              STAGES: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """[BN] sums over K of x * w[c], where ok. BLOCKS of K: unrolled, so that loads of what comes next wait for no loop's end."""
    acc = tl.zeros([BN, BK], ACC)
    at = w + c[:, None].to(tl.int64) * stride_n + tl.arange(0, BK)[None, :].to(tl.int64) * stride_k
    if BLOCKS > 0:
        for i in tl.static_range(BLOCKS):
            acc = _add_block(acc, x, at, i * BK, ok, K, stride_k, BK, EVEN)
    else:
        for k in tl.range(0, K, BK, num_stages=STAGES):
            acc = _add_block(acc, x, at, k, ok, K, stride_k, BK, EVEN)
    return tl.sum(acc, 1)


@triton.jit
def _gate_up_vector_kernel(
    x, w, bias, indices, inverse, h, saved, N, K, stride_e, stride_n, stride_k, alpha, limit, ACT: tl.constexpr,
    INTERLEAVED: tl.constexpr, ACC: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    after_earlier(CHAINED)
    slot = tl.program_id(1)
    row = tl.load(inverse + slot)
    if row >= 0:
        e = tl.load(indices + slot)
        j = tl.arange(0, 2 * BN)
        n0 = tl.program_id(0) * BN
        f = n0 + (j // 2 if INTERLEAVED else j % BN)
        c = 2 * n0 + j if INTERLEAVED else tl.where(j < BN, f, N + f)
        both = _dot_rows(x, w + e.to(tl.int64) * stride_e, c, f < N, K, stride_n, stride_k, 2 * BN, BK, BLOCKS, EVEN, STAGES, ACC)
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
    h, w, bias, indices, inverse, weights, residual, out, N, K, stride_e, stride_n, stride_k, TOP_K: tl.constexpr,
    ACC: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """AHEAD, LINES: of how many slots, and of each how many lines of LINE weights a row (or, where columns are dense, of one line
    how many rows of the matrix), are asked for while gate and up are still at work. That launch lets this one come after it has
    waited for the index, which is why the index may be read here; not from L1, which may be older."""
    if AHEAD > 0:
        line = tl.arange(0, LINES)
        for j in tl.static_range(AHEAD):
            found = tl.load(inverse + j, cache_modifier=".cg") >= 0
            at = w + tl.load(indices + j, cache_modifier=".cg").to(tl.int64) * stride_e
            if LINE > 0:
                rows = tl.program_id(0) * BN + tl.arange(0, BN)
                at += rows[:, None].to(tl.int64) * stride_n + (line * LINE)[None, :]
                prefetch(at, found & (rows < N)[:, None] & (line * LINE < K)[None, :])
            else:
                prefetch(at + tl.program_id(0) * BN + line.to(tl.int64) * stride_k, found & (line < K))
    after_earlier(CHAINED)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros([BN], ACC)
    for j in tl.static_range(TOP_K):
        # No branch, which the loads of the next expert would wait for.
        row = tl.load(inverse + j)
        found = row >= 0
        e = tl.where(found, tl.load(indices + j), 0)
        ok = (n < N) & found
        at = w + e.to(tl.int64) * stride_e
        y = _dot_rows(h + tl.maximum(row, 0) * K, at, n, ok, K, stride_n, stride_k, BN, BK, BLOCKS, EVEN, STAGES, ACC)
        if bias is not None:
            y += tl.load(bias + e * N + n, ok, other=0.0).to(ACC)
        total += tl.where(found, y * tl.load(weights + j).to(ACC), 0.0)
    if residual is not None:
        total += tl.load(residual + n, n < N, other=0.0).to(ACC)
    tl.store(out + n, total.to(out.dtype.element_ty), n < N)


def _ahead(n: int, k: int, top_k: int, block: int, itemsize: int, columns: bool, target: Target) -> dict[str, int]:
    """What a program of _down_vector_kernel asks for ahead: half of L2 for all programs together."""
    if not chained(target)["CHAINED"]:
        return {"AHEAD": 0, "LINES": 1, "LINE": 1}
    line = _LINE_BYTES // itemsize
    # Of each of the program's rows, or for dense columns of the one line that its columns are.
    budget = target.l2_bytes // 2 // max(cdiv(n, block), 1) // _LINE_BYTES // (1 if columns else block)
    whole = max(k if columns else cdiv(k, line), 1)
    lines = next_power_of_2(whole) if whole <= budget else next_power_of_2(max(budget, 1)) // 2
    return {"AHEAD": min(top_k, max(budget // whole, 1)) if lines else 0, "LINES": max(lines, 1), "LINE": 0 if columns else line}


def launch_vector(h: Tensor, out: Tensor, saved: Tensor | None, args: Args, sizes: Sizes, weights: Tensor) -> None:
    """Both launches. h `rows ffn`, out `1 hidden`, saved `rows gate_up`."""
    x, transposed, activation = args["x"].contiguous(), args["transposed"], args["activation"]
    target = target_of(x.device)
    c = _moe.configure("vector_columns" if transposed else "vector", sizes["tile_rows"], x.element_size(), target)
    chain = chained(target)
    ws = [_moe.dense_rows(args[name]) for name in ("gate_up_weight", "down_weight")]
    strides = [(w.stride(0), *((1, w.stride(1)) if transposed else (w.stride(1), 1))) for w in ws]
    biases = [None if args[name] is None else args[name].contiguous() for name in ("gate_up_bias", "down_bias")]
    hidden, ffn, top_k = sizes["hidden"], sizes["ffn"], sizes["top_k"]

    def options(k: int, unrolled: bool) -> dict[str, Any]:
        block_n, block_k = c.block_n, c.block_k
        while k % block_k and block_k > 32:  # blocks that divide K need no masks
            block_n, block_k = 2 * block_n, block_k // 2
        if k % block_k:
            block_n, block_k = c.block_n, min(c.block_k, next_power_of_2(max(k, 1)))
        blocks = cdiv(k, block_k) if unrolled else 0
        return {"BN": block_n, "BK": block_k, "BLOCKS": blocks if blocks <= UNROLLED else 0, "EVEN": k % block_k == 0,
                "STAGES": c.num_stages, "num_warps": c.num_warps, "num_stages": c.num_stages}  # fmt: skip

    first, second = options(hidden, False), options(ffn, True)
    ahead = _ahead(hidden, ffn, top_k, second["BN"], x.element_size(), transposed, target)
    launch(
        _gate_up_vector_kernel, (cdiv(ffn, first["BN"]), top_k),
        (x, ws[0], biases[0], args["indices"], args["inverse"], h, saved, ffn, hidden, *strides[0], *_moe.clamp_numbers(args)),
        {"ACT": activation, "INTERLEAVED": args["interleaved"], "ACC": accumulator(x), **first, **chain},
    )  # fmt: skip
    launch(
        _down_vector_kernel, (cdiv(hidden, second["BN"]),),
        (h, ws[1], biases[1], args["indices"], args["inverse"], weights, args["residual"], out, hidden, ffn, *strides[1]),
        {"TOP_K": top_k, "ACC": accumulator(x), **second, **ahead, **chain},
    )  # fmt: skip

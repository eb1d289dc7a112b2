"""The three attention projections in one launch, with per-head norm and rotary position embedding in the epilogue.

    q, k, v = rstd * (x @ weight.T) + bias                      separate weights, separate results, one launch
    q, k    = norm(q), norm(k)                                  over head_dim, with q_norm and k_norm ("rms" or "layer", rope.py)
    q, k    = rotate(q), rotate(k)                              with cos and sin (rope.py)

    x          batch seq hidden
    q_weight   heads head_dim hidden                            k_weight, v_weight   kv_heads head_dim hidden
    q_bias     heads head_dim                                   k_bias, v_bias       kv_heads head_dim
    cos, sin   1|batch seq half_rotary, of any dtype and any strides; 2 * half_rotary <= head_dim
    sumsq      batch seq tiles: x is then `scaled` of the linear op and rstd comes from these partial sums (no gradient)
    q_norm     1|heads head_dim                                 k_norm               1|kv_heads head_dim
    q          batch seq heads head_dim                         k, v                 batch seq kv_heads head_dim
    q_pre, k_pre   q and k before the norm, where save asks for what the backward needs

Programs walk the tiles of q, then of k, then of v, each with its own weight, so that no weight is ever copied or packed. A
weight is a view: heads any distance apart (a fused weight of q, k and v rows per head), rows dense over hidden, or dense over
the rows (a weight kept as `hidden rows`).

A tile's columns are whole heads, each padded to a power of two, in the order of features where the pairs that turn together
then lie at a distance that is a power of two; else as (halves, pairs). Where nothing is padded or permuted a descriptor fetches
the tile. Sums, norm and rotation are in fp32, rounded once.

HBM, in elements: reads x and the weights, biases and tables once; writes q, k, v and with save q_pre, k_pre.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from einops import reduce
from torch import Tensor

from ._gemm import (
    Config,
    accumulator,
    configure,
    halves,
    load_tile,
    operand,
    options,
    programs,
    row_scale,
    triton_dtype,
    usable,
)  # fmt: skip
from ._lang import cdiv, next_power_of_2, tl, triton
from ._launch import contiguous_last, descriptor, on_device
from ._launch import launch as _launch
from ._math import tile_order
from ._spec import Args, Op, Sizes, Spec, Write, accumulate_dtype
from ._target import target_of
from .qkv_rope_backward import BACKWARD, BIASES, NORMS, WEIGHTS, check, head_flops
from .rope import TABLES, load_table, one_step, pair_distance, rotate, strides_of


def _check(sizes: Sizes, args: Args) -> dict[str, int]:
    return check("qkv_rope", sizes, args)


def _saves(args: Args) -> bool:
    return args["save"] and args["q_norm"] is not None


SPEC = Spec(
    name="qkv_rope",
    reads={"x": "batch seq hidden", **WEIGHTS, **BIASES, **TABLES, "sumsq": "batch seq tiles", **NORMS},
    optional=frozenset({*BIASES, *TABLES, "sumsq", *NORMS}),
    any_dtype=frozenset({*TABLES, "sumsq", *NORMS}),
    writes={
        "q": Write("batch seq heads head_dim", "x"),
        "k": Write("batch seq kv_heads head_dim", "x"),
        "v": Write("batch seq kv_heads head_dim", "x"),
        "q_pre": Write("batch seq heads head_dim", "x", _saves),
        "k_pre": Write("batch seq kv_heads head_dim", "x", _saves),
    },
    derive=_check,
    flops=lambda s, a: s["batch"] * s["seq"] * (
        2 * (s["heads"] + 2 * s["kv_heads"]) * s["head_dim"] * s["hidden"] + (s["heads"] + s["kv_heads"]) * head_flops(s, a)
    ),
)  # fmt: skip


def head_norm(u: Tensor, weight: Tensor, kind: str, eps: float, weight_offset: float, round_early: bool,
              dtype: torch.dtype) -> Tensor:  # fmt: skip
    """u `... heads head_dim` in the dtype of sums, normalised over head_dim; dtype: what round_early rounds to."""
    if kind == "layer":
        u = u - u.mean(-1, keepdim=True)
    u = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
    w = weight.to(u.dtype) + weight_offset
    return w.to(dtype).to(w.dtype) * u.to(dtype).to(w.dtype) if round_early and kind == "rms" else w * u


def reference(
    x: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor, q_bias: Tensor | None, k_bias: Tensor | None,
    v_bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, sumsq: Tensor | None, q_norm: Tensor | None,
    k_norm: Tensor | None, interleaved: bool, norm_kind: str, eps: float, weight_offset: float, round_early: bool, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    acc = accumulate_dtype(x.dtype)
    out: list[Tensor] = []
    kept = [x.new_empty(0), x.new_empty(0)]
    for w, b, norm in ((q_weight, q_bias, q_norm), (k_weight, k_bias, k_norm), (v_weight, v_bias, None)):
        rows, bias = w.flatten(0, 1), None if b is None else b.flatten()
        y = torch.nn.functional.linear(x, rows, None if sumsq is not None else bias)
        if sumsq is not None:
            y = y.to(acc) * torch.rsqrt(reduce(sumsq, "batch seq tiles -> batch seq 1", "sum") / x.shape[-1] + eps)
            y = (y if bias is None else y + bias).to(x.dtype)
        y = y.unflatten(-1, w.shape[:2])
        turned = y.to(acc)
        if norm is not None:
            if save:
                kept[len(out)] = y
            turned = head_norm(turned, norm, norm_kind, eps, weight_offset, round_early, x.dtype)
        if cos is not None and sin is not None and len(out) < 2:
            turned = rotate(turned, cos, sin, interleaved)
        out.append(turned.to(x.dtype))
    return *out, *kept  # type: ignore[return-value]


@triton.jit
def _features(col0, N: tl.constexpr, HD: tl.constexpr, HP: tl.constexpr, HB: tl.constexpr, HR: tl.constexpr, W: tl.constexpr):
    """Head and feature of N columns of padded heads from col0 on, and whether they are more than padding."""
    j = tl.arange(0, N)
    unit = col0 // HB + j // HB
    part = unit % (HP // HB)
    if W > 0:
        feature = part * HB + j % HB
        ok = feature < HD
    else:
        i = part * (HB // 2) + j % (HB // 2)
        second = j % HB // (HB // 2)
        ok = i < HD // 2
        feature = i + second * HR
        if 2 * HR < HD:  # those that pass, in pairs after the others
            feature = tl.where(i < HR, feature, i + HR + second * (HD // 2 - HR))
    return unit // (HP // HB), feature, ok


@triton.jit
def _load_weight(w, n, k, N, K, row, ok, stride_r, stride_k, HP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 TMA: tl.constexpr, LAYOUT: tl.constexpr):  # fmt: skip
    """Rows of tile n of a weight, [BN, BK]; by pointers they lie at row."""
    if TMA:
        if LAYOUT == "heads":
            return tl.reshape(w.load([n * BN // HP, n * BN % HP, k]), (BN, BK))
        else:
            return load_tile(w, n * BN, k, N, K, stride_r, BN, BK, TMA, LAYOUT == "columns")
    else:
        kk = k + tl.arange(0, BK)
        return tl.load(w + row[:, None] + kk[None, :].to(tl.int64) * stride_k, ok[:, None] & (kk < K)[None, :], other=0.0)


@triton.jit
def _store(dst, y, row0, col0, rows, cols, ok, M, N, TMA: tl.constexpr):
    if TMA:
        dst.store([row0, col0], y)
    else:
        tl.store(dst + rows[:, None].to(tl.int64) * N + cols[None, :], y, (rows < M)[:, None] & ok[None, :])


@triton.jit
def _finish(
    acc, row0, col0, bias, cos, sin, norm, out, pre, M, HEADS, SEQ, stride_b, stride_n,
    cos_b, cos_s, sin_b, sin_s, eps, weight_offset,
    HD: tl.constexpr, HP: tl.constexpr, HB: tl.constexpr, HR: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr,
    EARLY: tl.constexpr, STEP: tl.constexpr, BM: tl.constexpr, N: tl.constexpr, TMA: tl.constexpr, OUT: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Epilogue of a tile of N columns of padded heads from col0 on."""
    NH: tl.constexpr = N // HB
    HALF: tl.constexpr = HB // 2
    rows = row0 + tl.arange(0, BM)
    head, feature, ok = _features(col0, N, HD, HP, HB, HR, W)
    ok = ok & (head < HEADS)
    if bias is not None:
        acc += tl.load(bias + head * stride_b + feature, ok, other=0.0).to(ACC)[None, :]
    if norm is not None:
        if pre is not None:
            _store(pre, acc.to(OUT), row0, col0, rows, head * HD + feature, ok, M, HEADS * HD, TMA)
        x = tl.reshape(acc, (BM, NH, HP))
        if KIND == "layer":
            x = x - (tl.sum(x, 2) / HD)[:, :, None]
            if HP > HD:
                x = tl.where(tl.reshape(ok, (1, NH, HP)), x, 0.0)
        x = x * (1.0 / tl.sqrt(tl.sum(x * x, 2) / HD + eps)).to(ACC)[:, :, None]
        g = tl.load(norm + head * stride_n + feature, ok, other=0.0).to(ACC) + weight_offset
        if EARLY:
            x = x.to(OUT).to(ACC)
            g = g.to(OUT).to(ACC)
        acc = tl.reshape(x, (BM, N)) * g[None, :]
    if cos is not None:
        D: tl.constexpr = W if W > 0 else HALF
        pair = tl.permute(tl.reshape(acc, (BM, N // (2 * D), 2, D)), (0, 1, 3, 2))
        u, v = tl.split(pair)
        u = tl.reshape(u, (BM, NH, HALF))
        v = tl.reshape(v, (BM, NH, HALF))
        i = col0 // HB % (HP // HB) * HALF + tl.arange(0, HALF)
        c = load_table(cos, rows, i, M, SEQ, cos_b, cos_s, 1.0, HR, STEP, ACC)[:, None, :]
        s = load_table(sin, rows, i, M, SEQ, sin_b, sin_s, 0.0, HR, STEP, ACC)[:, None, :]
        turned = tl.join(tl.reshape(u * c - v * s, (BM, N // (2 * D), D)), tl.reshape(v * c + u * s, (BM, N // (2 * D), D)))
        acc = tl.reshape(tl.permute(turned, (0, 1, 3, 2)), (BM, N))
    _store(out, acc.to(OUT), row0, col0, rows, head * HD + feature, ok, M, HEADS * HD, TMA)


@triton.jit
def _project(
    x, w, bias, cos, sin, sumsq, norm, out, pre, begin, M, HEADS, K, TILES, SEQ, stride_x, stride_h, stride_r, stride_k, stride_b,
    stride_n, cos_b, cos_s, sin_b, sin_s, inv_hidden, eps, weight_offset,
    HD: tl.constexpr, HP: tl.constexpr, HR: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr, EARLY: tl.constexpr,
    STEP: tl.constexpr, LAYOUT: tl.constexpr, TILES_P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, OUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """This program's share of one projection, whose tiles follow `begin` earlier ones; returns how many tiles there were."""
    HB: tl.constexpr = HP if HP < BN // SPLIT else BN // SPLIT  # columns of one head in a tile: all, or a run of pairs
    num_m = tl.cdiv(M, BM)
    num_n = tl.cdiv(HEADS * HP, BN)
    P = tl.num_programs(0)
    first = (tl.program_id(0) + P - begin % P) % P
    for t in tl.range(first, num_m * num_n, P, flatten=TMA):
        m, n = tile_order(t, num_m, num_n, GROUP)
        row0 = m * BM
        head, feature, ok = _features(n * BN, BN, HD, HP, HB, HR, W)
        ok = ok & (head < HEADS)
        row = head.to(tl.int64) * stride_h + feature.to(tl.int64) * stride_r
        acc = tl.zeros([BM, BN], ACC)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            a = load_tile(x, row0, k, M, K, stride_x, BM, BK, TMA)
            b = _load_weight(w, n, k, HEADS * HD, K, row, ok, stride_r, stride_k, HP, BN, BK, TMA, LAYOUT)
            acc = tl.dot(a, b.T, acc, input_precision="ieee", out_dtype=ACC)
        if sumsq is not None:
            acc = acc * row_scale(sumsq, row0, M, TILES, inv_hidden, eps, BM, TILES_P).to(ACC)[:, None]
        if SPLIT == 2:
            left, right = halves(acc, BM, BN)
            _finish(left, row0, n * BN, bias, cos, sin, norm, out, pre, M, HEADS, SEQ, stride_b, stride_n, cos_b, cos_s,
                    sin_b, sin_s, eps, weight_offset, HD, HP, HB, HR, W, KIND, EARLY, STEP, BM, BN // 2, TMA, OUT, ACC)
            _finish(right, row0, n * BN + BN // 2, bias, cos, sin, norm, out, pre, M, HEADS, SEQ, stride_b, stride_n,
                    cos_b, cos_s, sin_b, sin_s, eps, weight_offset, HD, HP, HB, HR, W, KIND, EARLY, STEP, BM, BN // 2,
                    TMA, OUT, ACC)
        else:
            _finish(acc, row0, n * BN, bias, cos, sin, norm, out, pre, M, HEADS, SEQ, stride_b, stride_n, cos_b, cos_s,
                    sin_b, sin_s, eps, weight_offset, HD, HP, HB, HR, W, KIND, EARLY, STEP, BM, BN, TMA, OUT, ACC)
    return num_m * num_n


@triton.jit(do_not_specialize=["M", "SEQ"])
def _kernel(
    x, wq, wk, wv, bq, bk, bv, nq, nk, q, k, v, q_pre, k_pre, cos, sin, sumsq, M, HEADS, KV_HEADS, K, TILES, SEQ, stride_x,
    stride_qh, stride_kh, stride_vh, stride_qr, stride_kr, stride_vr, stride_qk, stride_kk, stride_vk, stride_bq, stride_bk,
    stride_bv, stride_nq, stride_nk, cos_b, cos_s, sin_b, sin_s, inv_hidden, eps, weight_offset,
    HD: tl.constexpr, HP: tl.constexpr, HR: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr, EARLY: tl.constexpr,
    STEP: tl.constexpr, LAYOUT: tl.constexpr, TILES_P: tl.constexpr, OUT: tl.constexpr, ACC: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    done = _project(x, wq, bq, cos, sin, sumsq, nq, q, q_pre, 0, M, HEADS, K, TILES, SEQ, stride_x,
                    stride_qh, stride_qr, stride_qk, stride_bq, stride_nq, cos_b, cos_s, sin_b, sin_s,
                    inv_hidden, eps, weight_offset, HD, HP, HR, W, KIND, EARLY, STEP, LAYOUT, TILES_P,
                    BM, BN, BK, GROUP, TMA, SPLIT, STAGES, OUT, ACC)  # fmt: skip
    done += _project(x, wk, bk, cos, sin, sumsq, nk, k, k_pre, done, M, KV_HEADS, K, TILES, SEQ, stride_x,
                     stride_kh, stride_kr, stride_kk, stride_bk, stride_nk, cos_b, cos_s, sin_b, sin_s,
                     inv_hidden, eps, weight_offset, HD, HP, HR, W, KIND, EARLY, STEP, LAYOUT, TILES_P,
                     BM, BN, BK, GROUP, TMA, SPLIT, STAGES, OUT, ACC)  # fmt: skip
    _project(x, wv, bv, None, None, sumsq, None, v, None, done, M, KV_HEADS, K, TILES, SEQ, stride_x,
             stride_vh, stride_vr, stride_vk, stride_bv, 0, 0, 0, 0, 0,
             inv_hidden, eps, weight_offset, HD, HP, HR, W, KIND, EARLY, STEP, LAYOUT, TILES_P,
             BM, BN, BK, GROUP, TMA, SPLIT, STAGES, OUT, ACC)  # fmt: skip


def _laid(weights: Sequence[Tensor]) -> tuple[list[Tensor], str]:
    """Weights `heads head_dim hidden` as they lie, and how: by "rows" an equal distance apart, by "heads", or by "columns"."""
    if all(w.stride(2) != 1 and w.stride(1) == 1 and (w.shape[0] == 1 or w.stride(0) == w.shape[1]) for w in weights):
        return list(weights), "columns"
    weights = [contiguous_last(w) for w in weights]
    even = all(w.shape[0] == 1 or w.stride(0) == w.shape[1] * w.stride(1) for w in weights)
    return weights, "rows" if even else "heads"


def _config(m: int, x: Tensor, cos: Tensor | None, head_dim: int, kind: str, scaled: bool, distance: Callable[[int], int],
            operands: list[Tensor]) -> Config:  # fmt: skip
    """For m rows. Per-head statistics want whole heads in a tile; descriptors want its columns in the order of features."""
    target, itemsize, hp = target_of(x.device), x.element_size(), next_power_of_2(head_dim)
    c = configure(m, itemsize, target, "nt")
    if c.tma and (hp != head_dim or not distance(c.block_n)):
        operands = [x[:0]]
    c = usable(c, *operands)
    wide = cos is not None and cos.element_size() > itemsize
    if c.tma and (wide or kind) and c.block_m * c.block_n == 128 * 128:
        c = replace(c, num_warps=8)  # four spill
    if c.split == 2:
        halved = hp <= c.block_n // 2 if kind else distance(c.block_n // 2) > 0
        if not halved:
            c = replace(c, num_stages=2, split=1)  # heads of 256
        elif wide and (kind or scaled):
            c = replace(c, block_n=128, num_stages=4, split=1)  # spills at 128x256
        elif cos is not None and not wide and not kind and not scaled:
            c = replace(c, split=1)  # all fits at once
    if kind and c.block_n < hp:
        c = replace(c, block_n=hp, num_warps=max(4, c.num_warps), tma=False)
        while c.smem_bytes(itemsize) > target.smem_bytes * 3 // 4 and c.block_k > 32:
            c = replace(c, block_k=c.block_k // 2)
    return c


def launch(
    x: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor, q_bias: Tensor | None, k_bias: Tensor | None,
    v_bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, sumsq: Tensor | None, q_norm: Tensor | None,
    k_norm: Tensor | None, interleaved: bool, norm_kind: str, eps: float, weight_offset: float, round_early: bool, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    args: dict[str, Any] = dict(locals())
    sizes = SPEC.axes(args)
    results = SPEC.empty(args, sizes)
    hidden, head_dim, m = sizes["hidden"], sizes["head_dim"], sizes["batch"] * sizes["seq"]
    if not m:
        return results  # type: ignore[return-value]
    rows = contiguous_last(x).reshape(m, hidden)
    cos, sin, step = one_step(cos, sin)
    weights, layout = _laid((q_weight, k_weight, v_weight))
    biases = [None if t is None else contiguous_last(t) for t in (q_bias, k_bias, v_bias)]
    norms = [None if t is None else contiguous_last(t) for t in (q_norm, k_norm)]
    flat = [t.view(m, -1) if t.numel() else None for t in results]
    kind = "" if q_norm is None else norm_kind
    half, hp = head_dim // 2 if cos is None else sizes["half_rotary"], next_power_of_2(head_dim)

    def distance(columns: int) -> int:
        return 1 if cos is None else pair_distance(head_dim, half, interleaved, min(hp, columns))

    matrices = weights if layout == "heads" else [w.flatten(0, 1) for w in weights]
    if layout == "columns":
        matrices = [w.t() for w in matrices]
    operands = [rows, *matrices, *[t for t in flat if t is not None]]
    c = _config(m, rows, cos, head_dim, kind, sumsq is not None, distance, operands)

    def weight(w: Tensor, matrix: Tensor) -> Any:
        if layout == "heads" and c.tma:
            return descriptor(w, [max(1, c.block_n // hp), min(hp, c.block_n), c.block_k])
        return operand(matrix, c.block_n, c.block_k, c, layout == "columns") if c.tma else w

    tiles = cdiv(m, c.block_m) * sum(cdiv(t.shape[2] * hp, c.block_n) for t in results[:3])
    n_sums = sizes.get("tiles", 1)
    with on_device(x):
        _launch(
            _kernel, (programs(tiles, c, target_of(x.device)),),
            (operand(rows, c.block_m, c.block_k, c), *map(weight, weights, matrices), *biases, *norms,
             *[None if t is None else operand(t, c.block_m, c.block_n // c.split, c) for t in flat], cos, sin,
             None if sumsq is None else sumsq.contiguous(), m, sizes["heads"], sizes["kv_heads"], hidden, n_sums, sizes["seq"],
             rows.stride(0), *[w.stride(i) for i in range(3) for w in weights],
             *[0 if b is None else b.stride(0) for b in biases],
             *[w.stride(0) if w is not None and w.shape[0] > 1 else 0 for w in norms], *strides_of(cos), *strides_of(sin),
             1.0 / hidden, eps, weight_offset),
            {"HD": head_dim, "HP": hp, "HR": half, "W": distance(c.block_n // c.split), "KIND": kind,
             "EARLY": round_early and kind == "rms", "STEP": step, "LAYOUT": layout, "TILES_P": next_power_of_2(n_sums),
             "OUT": triton_dtype(x.dtype), "ACC": accumulator(x), **options(c)},
        )  # fmt: skip
    return results  # type: ignore[return-value]


OP = Op(SPEC, launch, reference, BACKWARD, no_grad=frozenset({"sumsq"}))

"""The three attention projections in one launch, with per-head norm and rotary position embedding in the epilogue.

    q, k, v = rstd * (x @ weight.T) + bias                      separate weights, separate results, one launch
    q, k    = norm(q), norm(k)                                  over head_dim, with q_norm and k_norm (see rope.py for "rms", "layer")
    q, k    = rotate(q), rotate(k)                              with cos and sin (see rope.py)

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

from typing import Any

import torch
from einops import rearrange, reduce
from torch import Tensor

from ._gemm import (
    Config,
    accumulator,
    configure,
    load_tile,
    operand,
    options,
    programs,
    row_scale,
    triton_dtype,
    usable,
)  # fmt: skip
from ._lang import cdiv, next_power_of_2, tl, triton
from ._launch import contiguous_last, on_device
from ._launch import launch as _launch
from ._math import tile_order
from ._spec import Args, Op, Sizes, Spec, Write, accumulate_dtype
from ._target import target_of
from .qkv_rope_backward import BACKWARD, BIASES, NORMS, WEIGHTS, check, head_flops
from .rope import TABLES, rotate


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
    out, kept = [], [x.new_empty(0), x.new_empty(0)]
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
def _project(
    x, w, bias, cos, sin, sumsq, out, begin, M, N, K, TILES, SEQ, stride_x, stride_w, stride_cos, inv_hidden, eps,
    ROPE: tl.constexpr, SHARED: tl.constexpr, HD: tl.constexpr, HP: tl.constexpr, TILES_P: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
    OUT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """This program's share of one projection, whose tiles follow `begin` earlier ones; returns how many tiles there were."""
    HB: tl.constexpr = HP if HP < BN else BN  # columns of one head in a tile: all, or a run of pairs
    PARTS: tl.constexpr = HP // HB
    NH: tl.constexpr = BN // HB
    HALF: tl.constexpr = HB // 2
    num_m = tl.cdiv(M, BM)
    num_n = tl.cdiv(N // HD * PARTS, NH)
    P = tl.num_programs(0)
    first = (tl.program_id(0) + P - begin % P) % P
    for t in tl.range(first, num_m * num_n, P, flatten=TMA):
        m, n = tile_order(t, num_m, num_n, GROUP)
        row0 = m * BM
        j = tl.arange(0, BN)
        unit = n * NH + j // HB
        feature = (unit % PARTS) * HALF + j % HALF
        w_row = unit // PARTS * HD + ((j % HB) // HALF) * (HD // 2) + feature
        w_ok = (feature < HD // 2) & (unit // PARTS < N // HD)
        acc = tl.zeros([BM, BN], ACC)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            a = load_tile(x, row0, k, M, K, stride_x, BM, BK, TMA)
            if TMA:
                b = w.load([n * BN, k])
            else:
                kk = k + tl.arange(0, BK)
                at = w + w_row[:, None].to(tl.int64) * stride_w + kk[None, :]
                b = tl.load(at, w_ok[:, None] & (kk < K)[None, :], other=0.0)
            acc = tl.dot(a, b.T, acc, input_precision="ieee", out_dtype=ACC)
        if sumsq is not None:
            acc = acc * row_scale(sumsq, row0, M, TILES, inv_hidden, eps, BM, TILES_P).to(ACC)[:, None]
        if bias is not None:
            acc += tl.load(bias + w_row, w_ok, other=0.0).to(ACC)[None, :]
        rows = row0 + tl.arange(0, BM)
        if ROPE:
            pair = tl.permute(tl.reshape(acc, (BM, NH, 2, HALF)), (0, 1, 3, 2))
            u, v = tl.split(pair)
            i = (n * NH % PARTS) * HALF + tl.arange(0, HALF)
            at = (rows % SEQ if SHARED else rows)[:, None].to(tl.int64) * stride_cos + i[None, :]
            ok = (rows < M)[:, None] & (i < HD // 2)[None, :]
            c = tl.load(cos + at, ok, other=0.0).to(ACC)[:, None, :]
            s = tl.load(sin + at, ok, other=0.0).to(ACC)[:, None, :]
            acc = tl.reshape(tl.permute(tl.join(u * c - v * s, v * c + u * s), (0, 1, 3, 2)), (BM, BN))
        y = acc.to(OUT)
        if TMA:
            out.store([row0, n * BN], y)
        else:
            tl.store(out + rows[:, None].to(tl.int64) * N + w_row[None, :], y, (rows < M)[:, None] & w_ok[None, :])
    return num_m * num_n


@triton.jit
def _kernel(
    x, wq, wk, wv, bq, bk, bv, cos, sin, sumsq, q, k, v, M, NQ, NK, K, TILES, SEQ, stride_x, stride_wq, stride_wk, stride_wv,
    stride_cos, inv_hidden, eps,
    SHARED: tl.constexpr, HD: tl.constexpr, HP: tl.constexpr, TILES_P: tl.constexpr, OUT: tl.constexpr, ACC: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    done = _project(x, wq, bq, cos, sin, sumsq, q, 0, M, NQ, K, TILES, SEQ, stride_x, stride_wq, stride_cos, inv_hidden, eps,
                    True, SHARED, HD, HP, TILES_P, BM, BN, BK, GROUP, TMA, STAGES, OUT, ACC)  # fmt: skip
    done += _project(x, wk, bk, cos, sin, sumsq, k, done, M, NK, K, TILES, SEQ, stride_x, stride_wk, stride_cos, inv_hidden, eps,
                     True, SHARED, HD, HP, TILES_P, BM, BN, BK, GROUP, TMA, STAGES, OUT, ACC)  # fmt: skip
    _project(x, wv, bv, cos, sin, sumsq, v, done, M, NK, K, TILES, SEQ, stride_x, stride_wv, stride_cos, inv_hidden, eps,
             False, SHARED, HD, HP, TILES_P, BM, BN, BK, GROUP, TMA, STAGES, OUT, ACC)  # fmt: skip


def _table(t: Tensor) -> Tensor:
    """cos or sin as rows of one row stride: a view where the layout allows."""
    batch, seq, half = t.shape
    if t.stride(2) == 1 and (batch == 1 or t.stride(0) == seq * t.stride(1)):
        return t.as_strided((batch * seq, half), (t.stride(1), 1))
    return rearrange(t.contiguous(), "batch seq half -> (batch seq) half")


def _tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Both as rows of one row stride, for all batch items or for each."""
    if cos.shape[0] != sin.shape[0]:
        cos, sin = torch.broadcast_tensors(cos, sin)
    cos, sin = _table(cos), _table(sin)
    return (cos, sin) if cos.stride(0) == sin.stride(0) else (cos.contiguous(), sin.contiguous())


def padded_head(head_dim: int) -> int:
    """Columns a head takes in a tile: both halves padded to a power of two."""
    return 2 * next_power_of_2(head_dim // 2)


def _config(m: int, head_dim: int, x: Tensor, cos: Tensor, operands: list[Tensor]) -> Config:
    c = configure(m, x.element_size(), target_of(x.device), "nt")
    if c.tma and c.block_m * c.block_n >= 128 * 128 and cos.element_size() > x.element_size():
        # Wide tables: 128x256 takes 240 KB of shared memory with them, and four warps spill at 128x128.
        c = Config(c.block_m, 128, c.block_k, 8, 4, c.group, tma=True)
    if c.tma and (padded_head(head_dim) != head_dim or c.block_n % head_dim):
        operands = [x[:0]]  # padded columns are gathered by pointers
    return usable(c, *operands)


def launch(
    x: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor, q_bias: Tensor | None, k_bias: Tensor | None,
    v_bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, sumsq: Tensor | None, q_norm: Tensor | None,
    k_norm: Tensor | None, interleaved: bool, norm_kind: str, eps: float, weight_offset: float, round_early: bool, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    args: dict[str, Any] = dict(locals())
    sizes = SPEC.axes(args)
    q, k, v, q_pre, k_pre = SPEC.empty(args, sizes)
    head_dim = sizes["head_dim"]
    if cos is None or sin is None or q_norm is not None or interleaved or sizes["half_rotary"] * 2 != head_dim:
        raise NotImplementedError("qkv_rope")
    rows = contiguous_last(x).reshape(-1, sizes["hidden"])
    weights = [contiguous_last(t.flatten(0, 1)) for t in (q_weight, k_weight, v_weight)]
    biases = [None if t is None else t.contiguous() for t in (q_bias, k_bias, v_bias)]
    cos_rows, sin_rows = _tables(cos, sin)
    m, hidden = rows.shape[0], sizes["hidden"]
    nq, nk = sizes["heads"] * head_dim, sizes["kv_heads"] * head_dim
    flat = [q.view(m, nq), k.view(m, nk), v.view(m, nk)] if m else []
    if not flat:
        return q, k, v, q_pre, k_pre
    c = _config(m, head_dim, rows, cos, [rows, *weights, *flat])
    hp = padded_head(head_dim)
    parts, per_tile = max(1, hp // c.block_n), max(1, c.block_n // hp)
    tiles = cdiv(m, c.block_m) * sum(cdiv(n // head_dim * parts, per_tile) for n in (nq, nk, nk))
    n_sums = sizes.get("tiles", 1)
    with on_device(x):
        _launch(
            _kernel, (programs(tiles, c, target_of(x.device)),),
            (operand(rows, c.block_m, c.block_k, c), *[operand(w, c.block_n, c.block_k, c) for w in weights], *biases,
             cos_rows, sin_rows, None if sumsq is None else sumsq.contiguous(),
             *[operand(t, c.block_m, c.block_n, c) for t in flat],
             m, nq, nk, hidden, n_sums, sizes["seq"], rows.stride(0), *[w.stride(0) for w in weights], cos_rows.stride(0),
             1.0 / hidden, eps),
            {"SHARED": cos_rows.shape[0] < m, "HD": head_dim, "HP": hp, "TILES_P": next_power_of_2(n_sums),
             "OUT": triton_dtype(x.dtype), "ACC": accumulator(x), **options(c)},
        )  # fmt: skip
    return q, k, v, q_pre, k_pre


OP = Op(SPEC, launch, reference, BACKWARD, no_grad=frozenset({"sumsq"}))

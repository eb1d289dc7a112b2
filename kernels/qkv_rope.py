"""The three attention projections in one launch, with rotary position embedding in the epilogue.

    q, k, v = rstd * (x @ weight.T) + bias                      separate weights, separate results, one launch
    q, k    = rotate(q), rotate(k)      half-split rotary embedding (Su et al. 2021, arXiv 2104.09864; GPT-NeoX form):
              y[i] = u[i] * cos[i] - u[i + d/2] * sin[i],   y[i + d/2] = u[i + d/2] * cos[i] + u[i] * sin[i],   i < d/2

    x          batch seq hidden
    q_weight   q_width hidden, q_width = heads * head_dim      k_weight, v_weight   kv_width hidden
    cos, sin   batch|1 seq half_dim, half_dim = head_dim / 2, of any dtype
    sumsq      batch seq tiles: x is then `scaled` of the linear op and rstd comes from these partial sums (no gradient)
    q          batch seq heads head_dim                        k, v   batch seq kv_heads head_dim

Programs walk the tiles of q, then of k, then of v, each with its own weight, so that no weight is ever copied or packed.
A tile's columns are (heads, halves, features), each half padded to a power of two: both features of a rotated pair lie in
one tile. Where nothing is padded a tile is a plain run of rows, which a descriptor can fetch.

HBM, in elements: reads x and the weights, biases and tables once; writes q, k, v.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import einsum, rearrange, reduce
from torch import Tensor

from ._gemm import (
    Config,
    accumulator,
    configure,
    grad_input,
    grad_weight,
    load_tile,
    operand,
    options,
    programs,
    row_scale,
    sum_rows,
    triton_dtype,
    usable,
)  # fmt: skip
from ._lang import cdiv, next_power_of_2, tl, triton
from ._launch import contiguous_last, on_device
from ._launch import launch as _launch
from ._math import tile_order
from ._spec import Args, Op, ShapeError, Sizes, Spec, Stage, Write, accumulate_dtype, flag
from ._target import target_of


def _heads(sizes: Sizes, args: Args) -> dict[str, int]:
    head_dim = args["head_dim"]
    if not 16 <= head_dim <= 256 or head_dim % 8:
        raise ValueError(f"qkv_rope: head_dim={head_dim}, expected 16 to 256 in multiples of 8")
    for axis in ("q_width", "kv_width"):
        if sizes[axis] % head_dim:
            raise ShapeError(f"qkv_rope: {axis}={sizes[axis]} is not a multiple of head_dim={head_dim}")
    if sizes["half_dim"] * 2 != head_dim:
        raise ShapeError(f"qkv_rope: cos has half_dim={sizes['half_dim']}, expected head_dim/2={head_dim // 2}")
    return {"heads": sizes["q_width"] // head_dim, "kv_heads": sizes["kv_width"] // head_dim, "head_dim": head_dim}


_WEIGHTS = {"q_weight": "q_width hidden", "k_weight": "kv_width hidden", "v_weight": "kv_width hidden"}
_BIASES = {"q_bias": "q_width", "k_bias": "kv_width", "v_bias": "kv_width"}
_TABLES = {"cos": "1|batch seq half_dim", "sin": "1|batch seq half_dim"}

SPEC = Spec(
    name="qkv_rope",
    reads={"x": "batch seq hidden", **_WEIGHTS, **_BIASES, **_TABLES, "sumsq": "batch seq tiles"},
    optional=frozenset({*_BIASES, "sumsq"}),
    any_dtype=frozenset({*_TABLES, "sumsq"}),
    writes={
        "q": Write("batch seq heads head_dim", "x"),
        "k": Write("batch seq kv_heads head_dim", "x"),
        "v": Write("batch seq kv_heads head_dim", "x"),
    },
    derive=_heads,
    flops=lambda s, a: s["batch"] * s["seq"] * (
        2 * (s["q_width"] + 2 * s["kv_width"]) * s["hidden"] + 3 * (s["q_width"] + s["kv_width"])
    ),
)  # fmt: skip


def rotate(u: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """u `batch seq heads head_dim`, cos and sin `batch|1 seq half_dim`."""
    cos, sin = (rearrange(t, "batch seq half -> batch seq 1 half") for t in (cos, sin))
    a, b = rearrange(u, "batch seq heads (two half) -> two batch seq heads half", two=2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def reference(
    x: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor, q_bias: Tensor | None, k_bias: Tensor | None,
    v_bias: Tensor | None, cos: Tensor, sin: Tensor, sumsq: Tensor | None, head_dim: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    acc = accumulate_dtype(x.dtype)
    cos, sin = cos.to(acc), sin.to(acc)
    out = []
    for w, b in ((q_weight, q_bias), (k_weight, k_bias), (v_weight, v_bias)):
        y = torch.nn.functional.linear(x, w, None if sumsq is not None else b)
        if sumsq is not None:
            y = y.to(acc) * torch.rsqrt(reduce(sumsq, "batch seq tiles -> batch seq 1", "sum") / x.shape[-1] + eps)
            y = (y if b is None else y + b).to(x.dtype)
        out.append(rearrange(y, "batch seq (heads head_dim) -> batch seq heads head_dim", head_dim=head_dim))
    q, k, v = out
    return rotate(q.to(acc), cos, sin).to(x.dtype), rotate(k.to(acc), cos, sin).to(x.dtype), v


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
    v_bias: Tensor | None, cos: Tensor, sin: Tensor, sumsq: Tensor | None, head_dim: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    args = {"x": x, "q_weight": q_weight, "k_weight": k_weight, "v_weight": v_weight, "q_bias": q_bias, "k_bias": k_bias,
            "v_bias": v_bias, "cos": cos, "sin": sin, "sumsq": sumsq, "head_dim": head_dim}  # fmt: skip
    sizes = SPEC.axes(args)
    q, k, v = SPEC.empty(args, sizes)
    rows = contiguous_last(x).reshape(-1, sizes["hidden"])
    weights = [contiguous_last(t) for t in (q_weight, k_weight, v_weight)]
    biases = [None if t is None else t.contiguous() for t in (q_bias, k_bias, v_bias)]
    cos_rows, sin_rows = _tables(cos, sin)
    m, hidden, nq, nk = rows.shape[0], sizes["hidden"], sizes["q_width"], sizes["kv_width"]
    flat = [q.view(m, nq), k.view(m, nk), v.view(m, nk)] if m else []
    if not flat:
        return q, k, v
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
    return q, k, v


BACKWARD_SPEC = Spec(
    name="qkv_rope_backward",
    reads={"grad_q": "batch seq heads head_dim", "grad_k": "batch seq kv_heads head_dim",
           "grad_v": "batch seq kv_heads head_dim", "x": "batch seq hidden", **_WEIGHTS, **_TABLES},
    any_dtype=frozenset(_TABLES),
    writes={
        "grad_x": Write("batch seq hidden", "x", flag("need_x")),
        **{f"grad_{n}": Write(axes, "x", flag(f"need_{n}")) for n, axes in {**_WEIGHTS, **_BIASES}.items()},
    },
    derive=_heads,
    scratch={
        "turned_q": Write("batch seq heads head_dim", "x"),
        "turned_k": Write("batch seq kv_heads head_dim", "x"),
    },
    stages=(
        Stage("qkv_rope_backward", ("grad_q", "grad_k", *_TABLES), ("turned_q", "turned_k"),
              lambda s, a: 3 * s["batch"] * s["seq"] * (s["q_width"] + s["kv_width"])),
        Stage("grad_input", ("turned_q", "turned_k", "grad_v", *_WEIGHTS), ("grad_x",),
              lambda s, a: 2 * s["batch"] * s["seq"] * (s["q_width"] + 2 * s["kv_width"]) * s["hidden"]),
        *[Stage("grad_weight", (dy, "x"), (f"grad_{w}",),
                lambda s, a, width=width: 2 * s["batch"] * s["seq"] * s[width] * s["hidden"])  # type: ignore[misc]
          for dy, w, width in (("turned_q", "q_weight", "q_width"), ("turned_k", "k_weight", "kv_width"),
                               ("grad_v", "v_weight", "kv_width"))],
        *[Stage("sum_rows", (dy,), (f"grad_{b}",),
                lambda s, a, width=width: s["batch"] * s["seq"] * s[width])  # type: ignore[misc]
          for dy, b, width in (("turned_q", "q_bias", "q_width"), ("turned_k", "k_bias", "kv_width"),
                               ("grad_v", "v_bias", "kv_width"))],
    ),
)  # fmt: skip


def backward_reference(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, x: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor,
    cos: Tensor, sin: Tensor, head_dim: int, need_x: bool, need_q_weight: bool, need_k_weight: bool, need_v_weight: bool,
    need_q_bias: bool, need_k_bias: bool, need_v_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    acc = accumulate_dtype(x.dtype)
    cos, sin = cos.to(acc), sin.to(acc)
    turned = [rotate(g.to(acc), cos, -sin).to(x.dtype) for g in (grad_q, grad_k)]
    dys = [rearrange(g, "batch seq heads head_dim -> batch seq (heads head_dim)") for g in (*turned, grad_v)]
    weights = (q_weight, k_weight, v_weight)
    dx = x.new_empty(0)  # absent results are apart from one another: an operator's results must not alias
    if need_x:
        dx = sum(einsum(d.to(acc), w.to(acc), "b s out, out hidden -> b s hidden") for d, w in zip(dys, weights)).to(x.dtype)  # type: ignore[union-attr]
    dws = [einsum(d, x, "b s out, b s hidden -> out hidden") if need else x.new_empty(0)
           for d, need in zip(dys, (need_q_weight, need_k_weight, need_v_weight))]  # fmt: skip
    dbs = [reduce(d, "b s out -> out", "sum") if need else x.new_empty(0)
           for d, need in zip(dys, (need_q_bias, need_k_bias, need_v_bias))]  # fmt: skip
    return dx, *dws, *dbs  # type: ignore[return-value]


@triton.jit
def _turn_back_kernel(
    gq, gk, cos, sin, dq, dk, M, SEQ, HEADS, KV_HEADS, stride_cos,
    SHARED: tl.constexpr, HD: tl.constexpr, HALF: tl.constexpr, BM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    h = tl.program_id(1)
    i = tl.arange(0, HALF)
    ok = (rows < M)[:, None] & (i < HD // 2)[None, :]
    at = (rows % SEQ if SHARED else rows)[:, None].to(tl.int64) * stride_cos + i[None, :]
    c = tl.load(cos + at, ok, other=0.0).to(ACC)
    s = tl.load(sin + at, ok, other=0.0).to(ACC)
    if h < HEADS:
        src, dst, head, per_row = gq, dq, h, HEADS
    else:
        src, dst, head, per_row = gk, dk, h - HEADS, KV_HEADS
    at = (rows[:, None].to(tl.int64) * per_row + head) * HD + i[None, :]
    u = tl.load(src + at, ok, other=0.0).to(ACC)
    v = tl.load(src + at + HD // 2, ok, other=0.0).to(ACC)
    tl.store(dst + at, (u * c + v * s).to(dst.dtype.element_ty), ok)
    tl.store(dst + at + HD // 2, (v * c - u * s).to(dst.dtype.element_ty), ok)


def backward_launch(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, x: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor,
    cos: Tensor, sin: Tensor, head_dim: int, need_x: bool, need_q_weight: bool, need_k_weight: bool, need_v_weight: bool,
    need_q_bias: bool, need_k_bias: bool, need_v_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    args: dict[str, Any] = dict(locals())
    sizes = BACKWARD_SPEC.axes(args)
    dx, *dws_dbs = BACKWARD_SPEC.empty(args, sizes)
    turned_q, turned_k = BACKWARD_SPEC.empty_scratch(args, sizes)
    m, seq, heads, kv_heads = sizes["batch"] * sizes["seq"], sizes["seq"], sizes["heads"], sizes["kv_heads"]
    rows = contiguous_last(x).reshape(-1, sizes["hidden"])
    cos_rows, sin_rows = _tables(cos, sin)
    with on_device(x):
        _launch(
            _turn_back_kernel, (cdiv(m, 16), heads + kv_heads),
            (grad_q.contiguous(), grad_k.contiguous(), cos_rows, sin_rows, turned_q, turned_k, m, max(seq, 1), heads, kv_heads,
             cos_rows.stride(0)),
            {"SHARED": cos_rows.shape[0] < m, "HD": head_dim, "HALF": next_power_of_2(head_dim // 2), "BM": 16,
             "ACC": accumulator(x), "num_warps": 4},
        )  # fmt: skip
        widths = (sizes["q_width"], sizes["kv_width"], sizes["kv_width"])
        dys = [g.view(m, width) for g, width in zip((turned_q, turned_k, grad_v.contiguous()), widths)]
        if need_x:
            grad_input(dys, [q_weight, k_weight, v_weight], dx.view(m, -1) if m else dx.view(0, sizes["hidden"]))
        for dy, dw, need in zip(dys, dws_dbs[:3], (need_q_weight, need_k_weight, need_v_weight)):
            if need:
                grad_weight(dy, rows, dw)
        for dy, db, need in zip(dys, dws_dbs[3:], (need_q_bias, need_k_bias, need_v_bias)):
            if need:
                sum_rows(dy, db)
    return dx, *dws_dbs  # type: ignore[return-value]


OP = Op(SPEC, launch, reference, Op(BACKWARD_SPEC, backward_launch, backward_reference), no_grad=frozenset({"sumsq"}))

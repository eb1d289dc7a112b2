"""Gradients of the experts: through both grouped products, the activation, the weights and the biases.

    dh        = grad_out[token] @ down_weight[e]                                 for every row
    grad of a routing weight = <h, dh> + <down_bias[e], grad_out[token]>         h from gate_up: y is needed nowhere
    d_gate_up = weight * dh through the activation                               in the epilogue of dh, as gate_up is stored
    grad_x    = sum over the token's rows of d_gate_up @ gate_up_weight[e]       in the order of its experts, in fp32
    grad of gate_up_weight[e] = d_gate_up.T @ x[token],  of down_weight[e] = grad_out[token].T @ (weight * h)     over e's rows

Arguments and axes as in moe_experts.py; gate_up `rows gate_up` of its forward, or None: then it is computed again first. An
expert without a token has gradients of 0. Nothing is added atomically, and no expert's sums meet rows of another.

HBM, in elements: reads grad_out, x, gate_up, and the weights of the experts that have a row; writes the gradients;
d_gate_up `rows gate_up`, weight * h `rows ffn` and `rows hidden` go between the launches, each where it is needed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import _moe
from ._gemm import accumulator, halves
from ._lang import cdiv, next_power_of_2, tl, triton
from ._launch import contiguous_last, descriptor, on_device
from ._launch import launch as _launch
from ._math import tile_order
from ._moe import boxed, expert_pointers, gated_grad, multiply, row_pointers, store_rows, sums, take, take_expert, tile_at
from ._moe_products import EXPERT_BYTES, READS, combine_launch, gate_up_flops, gate_up_launch, rows_launch, tile_bytes
from ._spec import Args, Op, Sizes, Spec, Stage, Write, accumulate_dtype, flag
from ._target import target_of

NAME = "moe_experts_backward"
_GATE_UP = ("need_x", "need_gate_up_weight", "need_gate_up_bias")
_THROUGH = (*_GATE_UP, "need_weights")


def _hidden_config(sizes: Sizes, args: Args) -> _moe.Config:
    c = _moe.configure("grad_hidden", sizes["tile_rows"], args["x"].element_size(), target_of(args["x"].device))
    # Gate and up in turn take more registers to tell apart.
    return replace(c, block_n=64, split=2) if args["interleaved"] and c.block_n > 64 else c


def _axes(sizes: Sizes, args: Args) -> dict[str, int]:
    sizes = {**sizes, **_moe.check(NAME, sizes, args)}
    if not isinstance(sizes["rows"], int):
        return sizes  # a trace for any length: no result has the axes of scratch
    return {**sizes, "ffn_tiles": cdiv(sizes["ffn"], _hidden_config(sizes, args).block_n)}


def _through(args: Args) -> bool:
    """Whether anything needs dh; else, if down_weight's gradient is wanted, only h is made."""
    return flag(*_THROUGH)(args)


def _again(args: Args) -> bool:
    return args["gate_up"] is None and flag(*_THROUGH, "need_down_weight")(args)


def _through_flops(s: Sizes, args: Args) -> int:
    return s["rows"] * s["ffn"] * (2 * s["hidden"] + 16)


def _pair_flops(s: Sizes, args: Args) -> int:
    return 2 * s["rows"] * s["gate_up"] * s["hidden"]


SPEC = Spec(
    name=NAME,
    reads={"grad_out": "tokens hidden", **READS, "gate_up": "rows gate_up"},
    optional=frozenset({"gate_up_bias", "down_bias", "gate_up"}),
    any_dtype=frozenset({"weights", *_moe.INDEX}),
    writes={
        "grad_x": Write("tokens hidden", "x", flag("need_x")),
        "grad_gate_up_weight": Write("experts gate_up_rows gate_up_columns", "x", flag("need_gate_up_weight")),
        "grad_down_weight": Write("experts down_rows down_columns", "x", flag("need_down_weight")),
        "grad_gate_up_bias": Write("experts gate_up", "x", flag("need_gate_up_bias")),
        "grad_down_bias": Write("experts hidden", "x", flag("need_down_bias")),
        "grad_weights": Write("tokens top_k", "weights", flag("need_weights")),
    },
    derive=_axes,
    read_bytes={**EXPERT_BYTES, "tiles": tile_bytes},
    scratch={
        "again": Write("rows gate_up", "x", _again),
        "d_gate_up": Write("rows gate_up", "x", flag(*_GATE_UP)),
        "weighted": Write("rows ffn", "x", lambda args: args["need_down_weight"] and _through(args)),
        "weighted_alone": Write("rows ffn", "x", lambda args: args["need_down_weight"] and not _through(args)),
        "part": Write("ffn_tiles rows", "accumulate:x", lambda args: args["need_weights"] and args["down_bias"] is None),
        "biased_part": Write("ffn_tiles rows", "accumulate:x",
                             lambda args: args["need_weights"] and args["down_bias"] is not None),
        "rows_x": Write("rows hidden", "x", flag("need_x")),
    },
    stages=(
        Stage("moe_gate_up", ("x", "gate_up_weight", "gate_up_bias", "order", "tiles"), ("again",), gate_up_flops),
        Stage("moe_grad_hidden", ("grad_out", "down_weight", "gate_up|again", "weights", "order", "tiles"),
              ("d_gate_up", "weighted", "part|biased_part"), _through_flops),
        Stage("moe_grad_hidden", ("gate_up|again", "weights", "order", "tiles"), ("weighted_alone",),
              lambda s, a: 8 * s["rows"] * s["ffn"]),
        Stage("moe_grad_rows", ("d_gate_up", "gate_up_weight", "tiles"), ("rows_x",), _pair_flops),
        Stage("moe_combine", ("rows_x", "inverse"), ("grad_x",), lambda s, a: s["rows"] * s["hidden"]),
        Stage("moe_grad_weights", ("part", "inverse"), ("grad_weights",), lambda s, a: s["ffn_tiles"] * s["rows"], "part"),
        Stage("moe_grad_weights", ("biased_part", "inverse", "grad_out", "down_bias", "indices"), ("grad_weights",),
              lambda s, a: s["rows"] * (s["ffn_tiles"] + 2 * s["hidden"]), "biased_part"),
        Stage("moe_grad_weight", ("d_gate_up", "x", "order", "offsets"), ("grad_gate_up_weight",), _pair_flops),
        Stage("moe_grad_weight", ("weighted|weighted_alone", "grad_out", "order", "offsets"), ("grad_down_weight",),
              lambda s, a: 2 * s["rows"] * s["ffn"] * s["hidden"]),
        Stage("moe_grad_bias", ("d_gate_up", "offsets"), ("grad_gate_up_bias",), lambda s, a: s["rows"] * s["gate_up"]),
        Stage("moe_grad_bias", ("grad_out", "weights", "order", "offsets"), ("grad_down_bias",),
              lambda s, a: 2 * s["rows"] * s["hidden"]),
    ),
)  # fmt: skip


def reference(
    grad_out: Tensor, x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, weights: Tensor, indices: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, tiles: Tensor,
    gate_up: Tensor | None, activation: str, alpha: float, limit: float, transposed: bool, interleaved: bool, tile_rows: int,
    need_x: bool, need_gate_up_weight: bool, need_down_weight: bool, need_gate_up_bias: bool, need_down_bias: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    top_k, acc = weights.shape[1], accumulate_dtype(x.dtype)
    wu, wd = (w.mT if transposed else w for w in (gate_up_weight, down_weight))
    grads = [x.new_zeros(order.shape[0], x.shape[1]), torch.zeros_like(wu), torch.zeros_like(wd), x.new_zeros(wu.shape[:2]),
             x.new_zeros(wd.shape[:2])]  # fmt: skip
    dw = torch.zeros(order.shape[0], dtype=acc, device=x.device)
    for e, rows in _moe.plain_groups(offsets):
        slot = order[rows]
        token, weight = slot // top_k, weights.reshape(-1)[slot].to(acc)[:, None]
        pre = torch.nn.functional.linear(x[token], wu[e], None if gate_up_bias is None else gate_up_bias[e])
        gate, up = _moe.plain_halves((pre if gate_up is None else gate_up[rows]).to(acc), interleaved)
        h, dy = _moe.plain_gated(gate, up, activation, alpha, limit), grad_out[token]
        dh = (dy @ wd[e]).to(acc)
        dw[rows] = (h * dh).sum(-1)
        if down_bias is not None:
            dw[rows] += dy.to(acc) @ down_bias[e].to(acc)
        both = _moe.plain_gated_backward(weight * dh, gate, up, activation, alpha, limit)
        pre = _moe.plain_join(*both, interleaved).to(x.dtype)
        grads[0][rows] = pre @ wu[e]
        grads[1][e], grads[2][e] = pre.mT @ x[token], dy.mT @ (weight * h).to(x.dtype)
        grads[3][e], grads[4][e] = pre.sum(0), (weight * dy.to(acc)).sum(0).to(x.dtype)
    grad_x = _moe.plain_combine(grads[0].to(acc), None, inverse).to(x.dtype)
    grad_weights = torch.where(inverse >= 0, dw[inverse.clamp(min=0)], 0.0).to(weights.dtype)
    found = (grad_x, *(g.mT.contiguous() if transposed else g for g in grads[1:3]), *grads[3:], grad_weights)
    needs = (need_x, need_gate_up_weight, need_down_weight, need_gate_up_bias, need_down_bias, need_weights)
    # Absent results are apart from one another: an operator's results must not alias.
    return tuple(g if need else g.new_empty(0) for g, need in zip(found, needs))  # type: ignore[return-value]


# ---- through the down product and the activation -------------------------------------------------------------------------------


@triton.jit
def _activation_part(
    dh, f0, rows, live, weight, gate_up, d_gate_up, weighted, N, alpha, limit, ACT: tl.constexpr, INTERLEAVED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BN columns of ffn from f0 on: stores d_gate_up and weight * h where they are given; returns sum(h * dh) of the rows."""
    f = f0 + tl.arange(0, BN)
    start = rows[:, None].to(tl.int64) * (2 * N)
    ok = live[:, None] & (f < N)[None, :]
    if INTERLEAVED:
        c = 2 * f0 + tl.arange(0, 2 * BN)
        wide = live[:, None] & (c < 2 * N)[None, :]
        both = tl.load(gate_up + start + c[None, :], wide, other=0.0).to(dh.dtype)
        g, u = tl.split(tl.reshape(both, (BM, BN, 2)))
    else:
        g = tl.load(gate_up + start + f[None, :], ok, other=0.0).to(dh.dtype)
        u = tl.load(gate_up + start + (N + f)[None, :], ok, other=0.0).to(dh.dtype)
    h, dg, du = gated_grad(dh * weight[:, None], g, u, alpha, limit, ACT)
    if weighted is not None:
        store_rows(weighted, rows, f0, h * weight[:, None], live, N, BN)
    if d_gate_up is not None:
        if INTERLEAVED:
            both = tl.reshape(tl.join(dg, du), (BM, 2 * BN))
            tl.store(d_gate_up + start + c[None, :], both.to(d_gate_up.dtype.element_ty), wide)
        else:
            tl.store(d_gate_up + start + f[None, :], dg.to(d_gate_up.dtype.element_ty), ok)
            tl.store(d_gate_up + start + (N + f)[None, :], du.to(d_gate_up.dtype.element_ty), ok)
    return tl.sum(dh * h, 1)


@triton.jit
def _activation_parts(
    dh, f0, rows, live, weight, gate_up, d_gate_up, weighted, N, alpha, limit, ACT: tl.constexpr, INTERLEAVED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The same in one or two parts, so that less is in registers at once."""
    if SPLIT == 1:
        return _activation_part(dh, f0, rows, live, weight, gate_up, d_gate_up, weighted, N, alpha, limit, ACT,
                                INTERLEAVED, BM, BN)  # fmt: skip
    else:
        left, right = halves(dh, BM, BN)
        HN: tl.constexpr = BN // 2
        p = _activation_part(left, f0, rows, live, weight, gate_up, d_gate_up, weighted, N, alpha, limit, ACT,
                             INTERLEAVED, BM, HN)  # fmt: skip
        return p + _activation_part(right, f0 + HN, rows, live, weight, gate_up, d_gate_up, weighted, N, alpha, limit, ACT,
                                    INTERLEAVED, BM, HN)  # fmt: skip


@triton.jit(do_not_specialize=["ROWS"])
def _grad_hidden_kernel(
    grad_out, w, weights, order, tiles, gate_up, d_gate_up, weighted, part, ROWS, N, K, stride_g, stride_e, stride_w,
    alpha, limit, TOP_K: tl.constexpr, ACT: tl.constexpr, T: tl.constexpr, INTERLEAVED: tl.constexpr, EVEN: tl.constexpr,
    SPLIT: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    num_m = tl.load(tiles + 3)
    num_n = tl.cdiv(N, BN)
    for t in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=TMA):
        e, first, end, n = tile_at(tiles, t, num_m, num_n, GROUP)
        rows = first + tl.arange(0, BM)
        live = rows < end
        slot = tl.load(order + tl.minimum(rows, end - 1))
        acc = sums(BM, BN, SWAP, ACC)
        if grad_out is not None:
            cols = n * BN + tl.arange(0, BN)
            if not TMA:
                right = expert_pointers(w, e, cols, stride_e, stride_w, BK, T)
            left = row_pointers(grad_out, (slot // TOP_K).to(tl.int64) * stride_g, BK)
            for k in tl.range(0, K, BK, num_stages=STAGES):
                if TMA:
                    b = boxed(w, e, n * BN, k, BN, BK, T)
                else:
                    b = take_expert(right, cols < N, k, K, stride_w, BK, T)
                acc = multiply(take(left, k, K, BK, EVEN), b, acc, SWAP, ACC)
        if SWAP:
            acc = acc.T
        weight = tl.load(weights + slot).to(ACC)
        if SPLIT == 4:
            lower, upper = halves(acc, BM, BN)
            HN: tl.constexpr = BN // 2
            p = _activation_parts(lower, n * BN, rows, live, weight, gate_up, d_gate_up, weighted, N, alpha, limit, ACT,
                                  INTERLEAVED, BM, HN, 2)  # fmt: skip
            p += _activation_parts(upper, n * BN + HN, rows, live, weight, gate_up, d_gate_up, weighted, N, alpha, limit, ACT,
                                   INTERLEAVED, BM, HN, 2)  # fmt: skip
        else:
            p = _activation_parts(acc, n * BN, rows, live, weight, gate_up, d_gate_up, weighted, N, alpha, limit, ACT,
                                  INTERLEAVED, BM, BN, SPLIT)  # fmt: skip
        if part is not None:
            tl.store(part + n.to(tl.int64) * ROWS + rows, p, live)


def _grad_hidden_launch(args: Args, sizes: Sizes, gate_up: Tensor, d_gate_up: Tensor | None, weighted: Tensor | None,
                        part: Tensor | None) -> None:  # fmt: skip
    through, transposed, tile_rows = _through(args), args["transposed"], sizes["tile_rows"]
    w, dy = _moe.dense_rows(args["down_weight"]), contiguous_last(args["grad_out"])
    n, k = sizes["ffn"], sizes["hidden"]
    target = target_of(dy.device)
    c = _hidden_config(sizes, args)
    c = _moe.usable(c, w) if through else _moe._by_pointers(c)
    options = _moe.options(c)
    if not through:
        options["SWAP"] = False
    _launch(
        _grad_hidden_kernel, (_moe.programs(sizes["max_tiles"] * cdiv(n, c.block_n), c, target),),
        (dy if through else None, _moe.expert_operand(w, c.block_n, c.block_k, c, not transposed), args["weights"], args["order"],
         args["tiles"], gate_up, d_gate_up, weighted, part, sizes["rows"], n, k, dy.stride(0), w.stride(0), w.stride(1),
         *_moe.clamp_numbers(args)),
        {"TOP_K": sizes["top_k"], "ACT": args["activation"], "T": not transposed, "INTERLEAVED": args["interleaved"],
         "EVEN": k % c.block_k == 0, "SPLIT": c.split, "ACC": accumulator(dy), "BM": tile_rows, **options},
    )  # fmt: skip


# ---- the routing weights -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["ROWS"])
def _grad_weights_kernel(
    part, grad_out, bias, indices, inverse, grad, ROWS, FFN_TILES, H, stride_g, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    BH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One token's: the sum of its rows' parts, in order, and of down_bias * grad_out."""
    t = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, SLOTS)
    slot = t * TOP_K + j
    r = tl.load(inverse + slot, j < TOP_K, other=-1)
    total = tl.zeros([SLOTS], ACC)
    for i in range(0, FFN_TILES):
        total += tl.load(part + tl.cast(i, tl.int64) * ROWS + r, r >= 0, other=0.0)
    if bias is not None:
        e = tl.load(indices + slot, r >= 0, other=0)
        for h0 in range(0, H, BH):
            c = h0 + tl.arange(0, BH)
            b = tl.load(bias + e[:, None] * H + c[None, :], (r >= 0)[:, None] & (c < H)[None, :], other=0.0).to(ACC)
            total += tl.sum(b * tl.load(grad_out + t * stride_g + c, c < H, other=0.0).to(ACC)[None, :], 1)
    tl.store(grad + slot, tl.where(r >= 0, total, 0.0).to(grad.dtype.element_ty), j < TOP_K)


def _grad_weights_launch(args: Args, sizes: Sizes, part: Tensor, grad: Tensor) -> None:
    bias, dy, slots = args["down_bias"], contiguous_last(args["grad_out"]), next_power_of_2(sizes["top_k"])
    given = (None, None, None) if bias is None else (dy, bias.contiguous(), args["indices"])
    _launch(
        _grad_weights_kernel, (sizes["tokens"],),
        (part, *given, args["inverse"], grad, sizes["rows"], sizes["ffn_tiles"], sizes["hidden"], dy.stride(0)),
        {"TOP_K": sizes["top_k"], "SLOTS": slots, "BH": max(16, 2048 // slots), "ACC": accumulator(args["x"]), "num_warps": 4},
    )  # fmt: skip


# ---- the experts' weights ------------------------------------------------------------------------------------------------------


@triton.jit
def _weight_step(
    acc, a, a_box, b, order, r, end, a0, b0, A, B, stride_b, TOP_K: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
    BK: tl.constexpr, TMA: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, FLIP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    rows = r + tl.arange(0, BK)
    live = rows < end
    if LAST:  # rows past the end repeat the last one, times 0: no other expert's NaN comes in
        rows = tl.minimum(rows, end - 1)
    ca = a0 + tl.arange(0, BA)
    cb = b0 + tl.arange(0, BB)
    if TMA and not LAST:
        left = a_box.load([r, a0])
    else:
        at = a + rows[:, None].to(tl.int64) * A + ca[None, :]
        if EVEN:
            left = tl.load(at)
        else:
            left = tl.load(at, (ca < A)[None, :], other=0.0)
    token = tl.load(order + rows) // TOP_K
    at = b + token[:, None].to(tl.int64) * stride_b + cb[None, :]
    if LAST:
        right = tl.load(at, live[:, None] & (cb < B)[None, :], other=0.0)
    elif EVEN:
        right = tl.load(at)
    else:
        right = tl.load(at, (cb < B)[None, :], other=0.0)
    if FLIP:
        return tl.dot(right.T, left, acc, input_precision="ieee", out_dtype=ACC)
    else:
        return tl.dot(left.T, right, acc, input_precision="ieee", out_dtype=ACC)


@triton.jit
def _grad_weight_kernel(
    a, a_box, b, order, offsets, grad, EXPERTS, M, N, A, B, stride_b, TOP_K: tl.constexpr, FLIP: tl.constexpr, EVEN: tl.constexpr,
    ACC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """grad[e] = a.T @ b[token] over e's rows, FLIP: its transpose; a `rows A`, b `tokens B`, grad `experts M N`."""
    BA: tl.constexpr = BN if FLIP else BM
    BB: tl.constexpr = BM if FLIP else BN
    num_m = tl.cdiv(M, BM)
    num_n = tl.cdiv(N, BN)
    per_expert = num_m * num_n
    for t in tl.range(tl.program_id(0), EXPERTS * per_expert, tl.num_programs(0)):
        e = t // per_expert
        m, n = tile_order(t % per_expert, num_m, num_n, GROUP)
        first = tl.load(offsets + e)
        end = tl.load(offsets + e + 1)
        whole = first + (end - first) // BK * BK
        a0 = n * BN if FLIP else m * BM
        b0 = m * BM if FLIP else n * BN
        acc = tl.zeros([BM, BN], ACC)
        for r in tl.range(first, whole, BK, num_stages=STAGES):
            acc = _weight_step(acc, a, a_box, b, order, r, end, a0, b0, A, B, stride_b, TOP_K, BA, BB, BK, TMA, False, EVEN,
                               FLIP, ACC)  # fmt: skip
        for r in tl.range(whole, end, BK, num_stages=1):  # at most once
            acc = _weight_step(acc, a, a_box, b, order, r, end, a0, b0, A, B, stride_b, TOP_K, BA, BB, BK, TMA, True, EVEN,
                               FLIP, ACC)  # fmt: skip
        rows = m * BM + tl.arange(0, BM)
        store_rows(grad + e.to(tl.int64) * M * N, rows, n * BN, acc, rows < M, N, BN)


def _grad_weight_launch(a: Tensor, b: Tensor, grad: Tensor, flip: bool, args: Args, sizes: Sizes) -> None:
    """grad `experts A B` = a.T @ b[token] of each expert's rows; flip: `experts B A`."""
    b, target = contiguous_last(b), target_of(a.device)
    c = _moe.usable(_moe.configure("grad_weight", sizes["tile_rows"], a.element_size(), target), a)
    (experts, m, n), wide = grad.shape, c.block_n if flip else c.block_m
    options = _moe.options(c)
    del options["SWAP"]
    _launch(
        _grad_weight_kernel, (_moe.programs(experts * cdiv(m, c.block_m) * cdiv(n, c.block_n), c, target),),
        (a, descriptor(a, [c.block_k, wide]) if c.tma else None, b, args["order"], args["offsets"], grad, experts, m, n,
         a.shape[1], b.shape[1], b.stride(0)),
        {"TOP_K": sizes["top_k"], "FLIP": flip, "EVEN": m % c.block_m == n % c.block_n == 0, "ACC": accumulator(a),
         "BM": c.block_m, **options},
    )  # fmt: skip


@triton.jit
def _grad_bias_kernel(v, order, weights, offsets, grad, COLS, stride, TOP_K: tl.constexpr, BLOCK_R: tl.constexpr,
                      BLOCK: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """grad[e] = the sum of v's rows of e, in order; with weights v is `tokens COLS` and they multiply it."""
    e = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(offsets + e + 1)
    acc = tl.zeros([BLOCK_R, BLOCK], ACC)
    for r in range(tl.load(offsets + e), end, BLOCK_R):
        rows = r + tl.arange(0, BLOCK_R)
        live = rows < end
        if weights is not None:
            slot = tl.load(order + rows, live, other=0)
            rows = slot // TOP_K
        at = v + rows[:, None].to(tl.int64) * stride + cols[None, :]
        value = tl.load(at, live[:, None] & (cols < COLS)[None, :], other=0.0).to(ACC)
        if weights is not None:
            value *= tl.load(weights + slot, live, other=0.0).to(ACC)[:, None]
        acc += value
    tl.store(grad + e.to(tl.int64) * COLS + cols, tl.sum(acc, 0).to(grad.dtype.element_ty), cols < COLS)


def _grad_bias_launch(v: Tensor, weights: Tensor | None, grad: Tensor, args: Args, sizes: Sizes) -> None:
    experts, cols = grad.shape
    order = None if weights is None else args["order"]
    _launch(
        _grad_bias_kernel, (cdiv(cols, 64), experts), (v, order, weights, args["offsets"], grad, cols, v.stride(0)),
        {"TOP_K": sizes["top_k"], "BLOCK_R": 32, "BLOCK": 64, "ACC": accumulator(v), "num_warps": 4},
    )  # fmt: skip


def launch(
    grad_out: Tensor, x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, weights: Tensor, indices: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, tiles: Tensor,
    gate_up: Tensor | None, activation: str, alpha: float, limit: float, transposed: bool, interleaved: bool, tile_rows: int,
    need_x: bool, need_gate_up_weight: bool, need_down_weight: bool, need_gate_up_bias: bool, need_down_bias: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    args: dict[str, Any] = dict(locals())
    sizes = SPEC.axes(args)
    args.update({name: args[name].contiguous() for name in (*_moe.INDEX, "weights")})
    results = SPEC.empty(args, sizes)
    dx, dwu, dwd, dbu, dbd, dw = results
    again, d_gate_up, weighted, alone, part, biased_part, rows_x = SPEC.empty_scratch(args, sizes)
    with on_device(x):
        if not sizes["rows"]:
            for result in results:
                result.zero_()
            return results  # type: ignore[return-value]
        if _again(args):
            gate_up_launch(args, sizes, None, again)
        made = again if gate_up is None else gate_up.contiguous()
        through = _through(args)
        part = part if down_bias is None else biased_part
        h = (weighted if through else alone) if need_down_weight else None
        if through or need_down_weight:
            d = d_gate_up if flag(*_GATE_UP)(args) else None
            _grad_hidden_launch(args, sizes, made, d, h, part if need_weights else None)
        if need_x:
            # gate_up_weight `gate_up hidden` is the transpose of what this product takes
            rows_launch("grad_rows", d_gate_up, gate_up_weight, None, rows_x, args, sizes, not transposed)
            combine_launch(rows_x, args["inverse"], None, None, dx, sizes["top_k"])
        if need_weights:
            _grad_weights_launch(args, sizes, part, dw)
        if need_gate_up_weight:
            _grad_weight_launch(d_gate_up, x, dwu, transposed, args, sizes)
        if h is not None:
            _grad_weight_launch(h, grad_out, dwd, not transposed, args, sizes)
        if need_gate_up_bias:
            _grad_bias_launch(d_gate_up, None, dbu, args, sizes)
        if need_down_bias:
            _grad_bias_launch(contiguous_last(grad_out), args["weights"], dbd, args, sizes)
    return results  # type: ignore[return-value]


OP = Op(SPEC, launch, reference)

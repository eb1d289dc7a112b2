"""The experts' gradients, as kernels that their backwards share: through the down product and the activation, of the routing
weights, and of the experts' weights and biases. See moe_experts_backward.py for the maths.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from . import _moe
from ._gemm import accumulator, halves
from ._lang import TensorDescriptor, cdiv, next_power_of_2, tl, triton
from ._launch import contiguous_last, dense_last, descriptor, for_tma, strides_suit_tma, tma_ready
from ._launch import launch as _launch
from ._math import tile_order
from ._moe import (
    boxed,
    clear_slots,
    expert_pointers,
    gated_grad,
    multiply,
    row_pointers,
    slot_columns,
    slot_start,
    store_rows,
    store_slots,
    sums,
    take,
    take_expert,
    tile_at,
)
from ._spec import Args, Sizes
from ._target import target_of

# ---- through the down product and the activation -------------------------------------------------------------------------------


def hidden_config(sizes: Sizes, args: Args) -> _moe.Config:
    """By its columns there are parts of the routing weights' gradient: a trace, which has no addresses, must say so too."""
    x, w = args["x"], args["down_weight"]
    c = _moe.configure("grad_hidden", sizes["tile_rows"], x.element_size(), target_of(x.device))
    # Gate and up in turn take more registers to tell apart.
    c = replace(c, block_n=c.block_n // 2) if args["interleaved"] and c.block_n > 64 else c
    if dense_last(w):
        boxed = strides_suit_tma(w) and not w.storage_offset() * w.element_size() % 16
    else:  # a copy will
        boxed = not w.shape[-1] * w.element_size() % 16
    return c if boxed and w.numel() else _moe._by_pointers(c)


@triton.jit
def _slot_part(
    dh, f0, rows, live, weight, x, grad_x, weighted, N, place, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Without an activation, h is x: stores grad_x of slots and weight * x of rows where they are given; returns sum(x * dh)."""
    slot, stride = place
    f = f0 + tl.arange(0, BN)
    ok = live[:, None] & (f < N)[None, :]
    if grad_x is not None:
        at = slot_start(slot, TOP_K * N, N, TOP_K, WIDTH)
        store_slots(grad_x, at, f0, dh * weight[:, None], live, N, TOP_K, WIDTH, BN)
    if x is not None:
        at = (x + slot_start(slot, stride, N, TOP_K, WIDTH))[:, None] + slot_columns(f, TOP_K, WIDTH)[None, :]
        h = tl.load(at, ok, other=0.0).to(dh.dtype)
        if weighted is not None:
            store_rows(weighted, rows, f0, h * weight[:, None], live, N, BN)
        dh *= h
    return tl.sum(dh, 1)


@triton.jit
def _gate_part(
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
        both = tl.load(gate_up + start + c[None, :], (c < 2 * N)[None, :], other=0.0).to(dh.dtype)
        g, u = tl.split(tl.reshape(both, (BM, BN, 2)))
    else:
        g = tl.load(gate_up + start + f[None, :], (f < N)[None, :], other=0.0).to(dh.dtype)
        u = tl.load(gate_up + start + (N + f)[None, :], (f < N)[None, :], other=0.0).to(dh.dtype)
    h, dg, du = gated_grad(dh * weight[:, None], g, u, alpha, limit, ACT)
    p = tl.sum(dh * h, 1)  # first, so that dh need not be kept: this is all registers
    if weighted is not None:
        store_rows(weighted, rows, f0, h * weight[:, None], live, N, BN)
    if d_gate_up is not None:
        if INTERLEAVED:
            both = tl.reshape(tl.join(dg, du), (BM, 2 * BN))
            tl.store(d_gate_up + start + c[None, :], both.to(d_gate_up.dtype.element_ty), wide)
        else:
            tl.store(d_gate_up + start + f[None, :], dg.to(d_gate_up.dtype.element_ty), ok)
            tl.store(d_gate_up + start + (N + f)[None, :], du.to(d_gate_up.dtype.element_ty), ok)
    return p


@triton.jit
def _activation_part(
    dh, f0, rows, live, weight, gate_up, d_gate_up, weighted, N, alpha, limit, place, ACT: tl.constexpr,
    INTERLEAVED: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    if ACT == "":
        return _slot_part(dh, f0, rows, live, weight, gate_up, d_gate_up, weighted, N, place, TOP_K, WIDTH, BN)
    else:
        return _gate_part(dh, f0, rows, live, weight, gate_up, d_gate_up, weighted, N, alpha, limit, ACT, INTERLEAVED, BM, BN)


@triton.jit
def _pieces(x, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr):
    """x [BM, BN] as a tuple of SPLIT parts of its columns, a power of two."""
    if SPLIT == 1:
        return (x,)
    else:
        left, right = halves(x, BM, BN)
        if SPLIT == 2:
            return left, right
        else:
            a, b = halves(left, BM, BN // 2)
            c, d = halves(right, BM, BN // 2)
            if SPLIT == 4:
                return a, b, c, d
            else:
                a0, a1 = halves(a, BM, BN // 4)
                b0, b1 = halves(b, BM, BN // 4)
                c0, c1 = halves(c, BM, BN // 4)
                d0, d1 = halves(d, BM, BN // 4)
                return a0, a1, b0, b1, c0, c1, d0, d1


@triton.jit(do_not_specialize=["ROWS", "TOKENS"])
def _grad_hidden_kernel(
    grad_out, w, weights, order, tiles, inverse, gate_up, d_gate_up, weighted, part, ROWS, TOKENS, N, K, stride_g, stride_x,
    stride_e, stride_w, alpha, limit, TOP_K: tl.constexpr, WIDTH: tl.constexpr, ACT: tl.constexpr, T: tl.constexpr,
    INTERLEAVED: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, ACC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """ACT "": gate_up and d_gate_up are x and grad_x of slots, see _slot_part; inverse is given with grad_x."""
    num_m = tl.load(tiles + 3)
    num_n = tl.cdiv(N, BN)
    for t in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=TMA):
        e, first, end, n = tile_at(tiles, t, num_m, num_n, GROUP)
        live = first + tl.arange(0, BM) < end
        rows = tl.minimum(first + tl.arange(0, BM), end - 1)  # past the end the last one again: never stored
        slot = tl.load(order + rows)
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
        place = (slot, stride_x)
        PN: tl.constexpr = BN // SPLIT  # in parts, so that less is in registers at once
        pieces = _pieces(acc, BM, BN, SPLIT)
        p = tl.zeros([BM], ACC)
        for i in tl.static_range(SPLIT):
            p += _activation_part(pieces[i], n * BN + i * PN, rows, live, weight, gate_up, d_gate_up, weighted, N, alpha, limit,
                                  place, ACT, INTERLEAVED, TOP_K, WIDTH, BM, PN)  # fmt: skip
        if part is not None:
            tl.store(part + n.to(tl.int64) * ROWS + rows, p, live)
    if inverse is not None:
        clear_slots(d_gate_up, inverse, TOKENS, N, TOP_K, WIDTH, 64)


def grad_hidden_launch(args: Args, sizes: Sizes, through: bool, gate_up: Tensor | None, d_gate_up: Tensor | None,
                       weighted: Tensor | None, part: Tensor | None, width: int = 0) -> None:  # fmt: skip
    """d_gate_up, weighted and part, each where it is given; not through: weighted alone. args' activation "": of slots."""
    transposed, tile_rows, slots = args["transposed"], sizes["tile_rows"], not args["activation"]
    w, dy = contiguous_last(args["down_weight"]), contiguous_last(args["grad_out"])
    n, k = sizes["ffn"], sizes["hidden"]
    target = target_of(dy.device)
    c = hidden_config(sizes, args)
    c = c if through else _moe._by_pointers(c)
    w = for_tma(w) if c.tma else w  # storage that begins at an odd address
    options = _moe.options(c)
    if not through:
        options["SWAP"] = False
    clears = slots and d_gate_up is not None
    _launch(
        _grad_hidden_kernel, (_moe.programs(sizes["max_tiles"] * cdiv(n, c.block_n), c, target),),
        (dy if through else None, _moe.expert_operand(w, c.block_n, c.block_k, c, not transposed), args["weights"], args["order"],
         args["tiles"], args["inverse"] if clears else None, gate_up, d_gate_up, weighted, part, sizes["rows"],
         sizes["tokens"] if clears else None, n, k, dy.stride(0), gate_up.stride(0) if slots and gate_up is not None else None,
         w.stride(0), w.stride(1), *_moe.clamp_numbers(args)),
        {"TOP_K": sizes["top_k"], "WIDTH": width, "ACT": args["activation"], "T": not transposed,
         "INTERLEAVED": args["interleaved"], "EVEN": k % c.block_k == 0, "SPLIT": c.split, "ACC": accumulator(dy),
         "BM": tile_rows, **options},
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


def grad_weights_launch(args: Args, sizes: Sizes, part: Tensor, grad: Tensor) -> None:
    bias, dy, slots = args["down_bias"], contiguous_last(args["grad_out"]), next_power_of_2(sizes["top_k"])
    given = (None, None, None) if bias is None else (dy, bias.contiguous(), args["indices"])
    _launch(
        _grad_weights_kernel, (sizes["tokens"],),
        (part, *given, args["inverse"], grad, sizes["rows"], sizes["ffn_tiles"], sizes["hidden"], dy.stride(0)),
        {"TOP_K": sizes["top_k"], "SLOTS": slots, "BH": max(16, 2048 // slots), "ACC": accumulator(args["x"]), "num_warps": 4},
    )  # fmt: skip


# ---- the experts' weights ------------------------------------------------------------------------------------------------------


@triton.jit
def _grad_weight_kernel(
    a, b, order, offsets, grad, EXPERTS, A, B, stride_a, stride_b, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    WIDTH: tl.constexpr, FLIP: tl.constexpr, EVEN: tl.constexpr, ACC: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, BOXED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grad[e] = a.T @ b[token] over e's rows, FLIP: its transpose; a `rows A`, or SLOTS, b `tokens B`, grad `experts A B`.

    The last step of an expert ends at its last row; what it has too much comes first and is 0 in both operands, so that no other
    expert's NaN comes in. With TMA a is windows `rows BK A` of it, see _windows: a box outside of its window is 0 there. The
    gathered operand is always the one of BB rows: it goes through the threads, whom twice as many columns would keep too busy."""
    num_a = tl.cdiv(A, BA)
    num_b = tl.cdiv(B, BB)
    per_expert = num_a * num_b
    for t in tl.range(tl.program_id(0), EXPERTS * per_expert, tl.num_programs(0)):
        e = t // per_expert
        tile_b, tile_a = tile_order(t % per_expert, num_b, num_a, GROUP)
        first = tl.load(offsets + e)
        end = tl.load(offsets + e + 1)
        ca = tile_a * BA + tl.arange(0, BA)
        cb = tile_b * BB + tl.arange(0, BB)
        acc = tl.zeros([BB, BA], ACC)
        for r in tl.range(first, end, BK, num_stages=STAGES):
            early = BK - tl.minimum(end - r, BK)
            rows = r - early + tl.arange(0, BK)
            live = rows >= r
            slot = tl.load(order + rows, live, other=0)
            if TMA:
                left = tl.reshape(a.load([r, -early, tile_a * BA]), (BK, BA))
            elif SLOTS:
                at = a + slot_start(slot, stride_a, A, TOP_K, WIDTH)[:, None] + slot_columns(ca, TOP_K, WIDTH)[None, :]
                left = tl.load(at, live[:, None] & (ca < A)[None, :], other=0.0)
            else:
                left = tl.load(a + rows[:, None].to(tl.int64) * A + ca[None, :], live[:, None] & (ca < A)[None, :], other=0.0)
            at = b + (slot // TOP_K)[:, None].to(tl.int64) * stride_b + cb[None, :]
            if EVEN:
                right = tl.load(at, live[:, None], other=0.0)
            else:
                right = tl.load(at, live[:, None] & (cb < B)[None, :], other=0.0)
            acc = tl.dot(right.T, left, acc, input_precision="ieee", out_dtype=ACC)
        # As the weight is stored.
        if FLIP and BOXED:
            grad.store([e, tile_b * BB, tile_a * BA], tl.reshape(acc.to(grad.dtype), (1, BB, BA)))
        elif BOXED:
            grad.store([e, tile_a * BA, tile_b * BB], tl.reshape(acc.to(grad.dtype).T, (1, BA, BB)))
        elif FLIP:
            store_rows(grad + e.to(tl.int64) * A * B, cb, tile_a * BA, acc, cb < B, A, BA)
        else:
            store_rows(grad + e.to(tl.int64) * A * B, ca, tile_b * BB, acc.T, ca < A, B, BB)


def _windows(a: Tensor, rows: int, columns: int) -> Any:
    """A descriptor of a `rows A` as windows `rows rows' A`: the rows from each row on, of which a box takes `rows` and `columns`.
    The last windows reach past a's end, where no box looks."""
    return TensorDescriptor(a, [len(a), rows, a.shape[1]], [a.stride(0), a.stride(0), 1], [1, rows, columns])


def grad_weight_launch(a: Tensor, b: Tensor, grad: Tensor, flip: bool, args: Args, sizes: Sizes, *, slots: bool = False,
                       width: int = 0) -> None:  # fmt: skip
    """grad `experts A B` = a.T @ b[token] of each expert's rows; flip: `experts B A`. a `rows A`, or slots of such a width."""
    a, b, target = contiguous_last(a) if slots else a, contiguous_last(b), target_of(a.device)
    c = _moe.configure("grad_weight", sizes["tile_rows"], a.element_size(), target)
    c = _moe._by_pointers(c) if slots else _moe.usable(c, a)
    experts, of_a, of_b = grad.mT.shape if flip else grad.shape
    options, boxed = _moe.options(c), c.tma and tma_ready(grad)
    if b.stride(0) % 16 or of_b % 16 or b.data_ptr() % 16:  # then b goes through registers, and a's ring is one deeper
        options["num_stages"] = options["STAGES"] = max(1, c.num_stages - 1)
    block = [c.block_m, c.block_n] if flip else [c.block_n, c.block_m]
    del options["SWAP"], options["BN"]
    _launch(
        _grad_weight_kernel, (_moe.programs(experts * cdiv(of_a, c.block_n) * cdiv(of_b, c.block_m), c, target),),
        (_windows(a, c.block_k, c.block_n) if c.tma else a, b, args["order"], args["offsets"],
         descriptor(grad, [1, *block]) if boxed else grad, experts, of_a, of_b, a.stride(0) if slots else None, b.stride(0)),
        {"TOP_K": sizes["top_k"], "SLOTS": slots, "WIDTH": width, "FLIP": flip, "EVEN": of_b % c.block_m == 0,
         "ACC": accumulator(a), "BA": c.block_n, "BB": c.block_m, "BOXED": boxed, **options},
    )  # fmt: skip


@triton.jit
def _grad_bias_kernel(v, order, weights, offsets, grad, COLS, stride, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
                      BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """grad[e] = the sum of v's rows of e, in order; with weights v is `tokens COLS` and they multiply it, with order alone it has
    slots."""
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
        if weights is None and order is not None:
            slot = tl.load(order + rows, live, other=0)
            at = v + slot_start(slot, stride, COLS, TOP_K, WIDTH)[:, None] + slot_columns(cols, TOP_K, WIDTH)[None, :]
        else:
            at = v + rows[:, None].to(tl.int64) * stride + cols[None, :]
        value = tl.load(at, live[:, None] & (cols < COLS)[None, :], other=0.0).to(ACC)
        if weights is not None:
            value *= tl.load(weights + slot, live, other=0.0).to(ACC)[:, None]
        acc += value
    tl.store(grad + e.to(tl.int64) * COLS + cols, tl.sum(acc, 0).to(grad.dtype.element_ty), cols < COLS)


def grad_bias_launch(v: Tensor, weights: Tensor | None, grad: Tensor, args: Args, sizes: Sizes, *, slots: bool = False,
                     width: int = 0) -> None:  # fmt: skip
    """grad `experts COLS`: of v `rows COLS`, of slots of such a width, or with weights of tokens."""
    experts, cols = grad.shape
    order = None if weights is None and not slots else args["order"]
    _launch(
        _grad_bias_kernel, (cdiv(cols, 64), experts), (v, order, weights, args["offsets"], grad, cols, v.stride(0)),
        {"TOP_K": sizes["top_k"], "WIDTH": width, "BLOCK_R": 32, "BLOCK": 64, "ACC": accumulator(v), "num_warps": 4},
    )  # fmt: skip

"""Softmax attention, backward: the gradients of the bias and of the sinks. Formulas and axes as in attention_backward.py.

Where the grad_q kernel has left the gradients of all logits, they are only summed. Else one program makes one tile of grad_bias:
it walks the batch entries and heads over which the bias is broadcast, and the rows or
keys where the bias has one. One program sums the sink of one head. Both in a fixed order, so equal inputs give equal bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _attention as shared
from ._attention_gradients import bounded, constants, keep_mask, logit_gradient, product, thinned, weights
from ._attention_tiles import load_rows, load_terms, power, row_range
from ._lang import cdiv, tl, triton
from ._launch import launch as _launch
from ._spec import Args, Sizes
from ._target import target_of

SINK_ROWS = 1024
SUM_BLOCK = 1024  # numbers of grad_bias that a program sums: 8 a thread


@triton.jit
def _bias_block(
    total, b, h, m, n, operands, strides, options, prefix, used, block_map, map_strides, left, right, drop, scale, SEQ, CONTEXT,
    HEADS, GROUP,
    D: tl.constexpr, DP: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RIGHT: tl.constexpr, GUARD: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The total plus the gradients of the logits in tile (m, n) of one batch entry and head. GUARD: something hides keys, or what
    is past the last one is summed."""
    q, q2, k, k2, v, grad_out, delta, shift = operands
    q_strides, k_strides, v_strides, g_strides = strides
    mask, mask_strides, bias, bias_strides, slopes, slopes_b, cap = options
    context, broken = bounded(used, b, CONTEXT, b)
    if prefix is not None:
        prefix = tl.load(prefix + b)
    geo = (context - SEQ, context, left, right, prefix)
    if slopes is not None:
        slopes = tl.load(slopes + b * slopes_b + h).to(ACC)
    terms = (mask, mask_strides, bias, bias_strides, slopes, cap)
    loaded = load_terms(terms, b, h, m * BM, n * BN, SEQ, context, BM, BN, True, False)
    rows = m * BM + tl.arange(0, BM)
    cols = n * BN + tl.arange(0, BN)
    qt = load_rows(q, b, h, m * BM, SEQ, q_strides, BM, D, DP, TMA, True)
    gt = load_rows(grad_out, b, h, m * BM, SEQ, g_strides, BM, DV, DVP, TMA, True)
    kt = load_rows(k, b, h // GROUP, n * BN, context, k_strides, BN, D, DP, TMA, True)
    vt = load_rows(v, b, h // GROUP, n * BN, context, v_strides, BN, DV, DVP, TMA, True)
    qt2 = qt
    kt2 = kt
    if D2:
        qt2 = load_rows(q2, b, h, m * BM, SEQ, q_strides, BM, D, D2, TMA, True, DP)
        kt2 = load_rows(k2, b, h // GROUP, n * BN, context, k_strides, BN, D, D2, TMA, True, DP)
    at = (b * HEADS + h).to(tl.int64) * SEQ + rows
    sh = tl.load(shift + at, rows < SEQ, other=float("inf"))
    de = tl.load(delta + at, rows < SEQ, other=0.0)
    s = product(qt, qt2, kt, kt2, D2, PRECISION, ACC)
    dp = product(gt, gt, vt, vt, 0, PRECISION, ACC)
    p, _ = weights(s, sh[:, None], rows[:, None], cols[None, :], geo, terms, loaded, scale, RIGHT, GUARD, True)
    if block_map is not None:
        map_b, map_h, map_row, map_col = map_strides
        entry = b.to(tl.int64) * map_b + h * map_h + (m * BM // 128) * map_row + (n * BN // 128) * map_col
        p = tl.where(tl.load(block_map + entry) != 0, p, 0.0)
    keep = keep_mask(drop, rows[:, None], cols[None, :], b * HEADS + h)
    ds = logit_gradient(p, thinned(dp, keep, drop), de[:, None], p, False, GUARD)
    if used is not None:
        ds = tl.where(broken, float("nan"), ds)
    return total + ds


@triton.jit(do_not_specialize=["left", "right"])
def _bias_kernel(
    q, q2, k, k2, v, grad_out, delta, shift, grad_bias, mask, bias, slopes, block_map, prefix, used, seed,
    scale, cap, dropout_p, left, right, SEQ, CONTEXT, BATCH, HEADS, GROUP, BIAS_BATCH, BIAS_HEADS,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_gb, stride_gs, stride_gh, stride_mb, stride_mh, stride_ms, stride_mk, stride_bb, stride_bh, stride_bs, stride_bk,
    stride_ab, stride_lb, stride_lh, stride_lq, stride_lk,
    D: tl.constexpr, DP: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RIGHT: tl.constexpr, GUARD: tl.constexpr, ONE_ROW: tl.constexpr, ONE_KEY: tl.constexpr, TMA: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    _, scale, gain = constants(scale, dropout_p, True, EXACT, ACC)
    if cap is not None and EXACT is not None:
        cap = tl.full([], EXACT[1], ACC)
    if seed is not None:
        seed = tl.load(seed)
    drop = (seed, dropout_p, gain)
    options = (mask, (stride_mb, stride_mh, stride_ms, stride_mk), bias, (stride_bb, stride_bh, stride_bs, stride_bk), slopes,
               stride_ab, cap)  # fmt: skip
    operands = (q, q2, k, k2, v, grad_out, delta, shift)
    strides = ((stride_qb, stride_qs, stride_qh), (stride_kb, stride_ks, stride_kh), (stride_vb, stride_vs, stride_vh),
               (stride_gb, stride_gs, stride_gh))  # fmt: skip
    map_strides = (stride_lb, stride_lh, stride_lq, stride_lk)
    # This program's tile of the bias, and how many there are of what it walks.
    keys = tl.cdiv(CONTEXT, BN)
    row_tiles = tl.cdiv(SEQ, BM)
    n = pid * 0
    m = pid * 0
    if not ONE_KEY:
        n = pid % keys
        pid = pid // keys
        keys = 1
    if not ONE_ROW:
        m = pid % row_tiles
        pid = pid // row_tiles
        row_tiles = 1
    b = pid // BIAS_HEADS
    h = pid % BIAS_HEADS
    if used is None and prefix is None and not ONE_KEY:  # what hides the keys of this tile is alike everywhere
        low, high = row_range(n * BN, BN, SEQ, (CONTEXT - SEQ, CONTEXT, left, right, None), RIGHT)
        if ONE_ROW:
            m = low // BM
            row_tiles = tl.maximum(tl.cdiv(high, BM) - m, 0)
        else:
            row_tiles = tl.where((m * BM < high) & (m * BM + BM > low), 1, 0)
    heads = HEADS // BIAS_HEADS
    tiles = row_tiles * keys
    total = tl.zeros([BM, BN], ACC)
    for i in tl.range(0, BATCH // BIAS_BATCH * heads * tiles):
        entry = i // tiles
        total = _bias_block(total, b + entry // heads, h + entry % heads, m + i % tiles // keys, n + i % keys, operands, strides,
                            options, prefix, used, block_map, map_strides, left, right, drop, scale, SEQ, CONTEXT, HEADS, GROUP,
                            D, DP, D2, DV, DVP, BM, BN, RIGHT, GUARD, TMA, ACC, PRECISION)  # fmt: skip
    grad_bias += (b * BIAS_HEADS + h).to(tl.int64) * (1 if ONE_ROW else SEQ) * (1 if ONE_KEY else CONTEXT)
    if ONE_ROW and ONE_KEY:
        tl.store(grad_bias, tl.sum(tl.sum(total, 1), 0).to(grad_bias.dtype.element_ty))
    elif ONE_ROW:
        cols = n * BN + tl.arange(0, BN)
        tl.store(grad_bias + cols, tl.sum(total, 0).to(grad_bias.dtype.element_ty), cols < CONTEXT)
    elif ONE_KEY:
        rows = m * BM + tl.arange(0, BM)
        tl.store(grad_bias + rows, tl.sum(total, 1).to(grad_bias.dtype.element_ty), rows < SEQ)
    else:
        rows = m * BM + tl.arange(0, BM)
        cols = n * BN + tl.arange(0, BN)
        at = rows.to(tl.int64)[:, None] * CONTEXT + cols[None, :]
        tl.store(grad_bias + at, total.to(grad_bias.dtype.element_ty), (rows < SEQ)[:, None] & (cols < CONTEXT)[None, :])


@triton.jit
def _sum_kernel(
    logits, grad_bias, NUMBERS, HEADS, BIAS_HEADS, BATCHES, HEADS_EACH, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """HEADS_EACH heads of BATCHES batch entries, of NUMBERS logits each, summed in order."""
    pid = tl.program_id(0)
    tiles = tl.cdiv(NUMBERS, BLOCK)
    bh = pid // tiles
    at = (pid % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = bh // BIAS_HEADS * HEADS + bh % BIAS_HEADS
    total = tl.zeros([BLOCK], ACC)
    for i in range(BATCHES):
        for j in range(HEADS_EACH):
            entry = logits + (first + i * HEADS + j).to(tl.int64) * NUMBERS
            total += tl.load(entry + at, at < NUMBERS, other=0.0).to(ACC)
    tl.store(grad_bias + bh.to(tl.int64) * NUMBERS + at, total.to(grad_bias.dtype.element_ty), at < NUMBERS)


@triton.jit
def _sinks_kernel(
    delta, shift, sinks, grad_sinks, SEQ, HEADS, BATCH, ROWS: tl.constexpr, ADDED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    sink = tl.load(sinks + h).to(ACC)
    if not ADDED:
        sink = sink * 1.4426950408889634
    total = tl.zeros([ROWS], ACC)
    per = tl.cdiv(SEQ, ROWS)
    for i in tl.range(0, BATCH * per):
        row = i % per * ROWS + tl.arange(0, ROWS)
        at = (i // per * HEADS + h).to(tl.int64) * SEQ + row
        sh = tl.load(shift + at, row < SEQ, other=float("inf"))
        de = tl.load(delta + at, row < SEQ, other=0.0)
        # Tokens of no sequence have no sink either, and delta may be NaN there.
        total -= tl.where(sh == float("inf"), 0.0, power(sink - sh, ADDED) * de)
    tl.store(grad_sinks + h, tl.sum(total, 0).to(grad_sinks.dtype.element_ty))


def launch_bias(args: Args, sizes: Sizes, operands: list[Any], delta: Tensor, shift: Tensor, grad_bias: Tensor,
                strides: list[int], config: Any, constexprs: dict[str, Any]) -> None:  # fmt: skip
    """grad_bias, in tiles of config; operands, strides and constexprs as attention_backward.py makes them for it."""
    # One stage. H200, 2026-11-30, triton 3.6: with two or three the gradient of a bias of one row was wrong, and varied.
    box = shared.term_box(target_of(grad_bias.device), config.block_m, config.block_n, 1)
    facts = shared.launch_facts({**args, "block_map": None}, by_key=False, box=box)
    mask, bias, _, slopes, _, _, prefix, used, _, _, _, _, seed = facts.tensors
    batch, heads, rows, keys = grad_bias.shape
    block_map, map_strides = args["block_map"], [0, 0, 0, 0]
    if block_map is not None:
        map_strides = [s if n > 1 else 0 for n, s in zip(block_map.shape, block_map.stride())]
        block_map = block_map.view(torch.uint8)
    seq, context = sizes["seq"], sizes["k_len"]
    one_row, one_key = rows == 1, keys == 1
    hidden = shared.given(args, "mask", "prefix_lens", "seqused_k", "block_map") or max(args["left"], args["right"]) >= 0
    tiles = (1 if one_row else cdiv(seq, config.block_m)) * (1 if one_key else cdiv(context, config.block_n))
    _launch(
        _bias_kernel, (batch * heads * tiles,),
        (*operands, delta, shift, grad_bias, mask, bias, slopes, block_map, prefix, used, seed, *facts.numbers, seq, context,
         sizes["batch"], sizes["heads"], sizes["group"], batch, heads, *strides, *facts.strides[:9], *map_strides),
        {**constexprs, "BM": config.block_m, "BN": config.block_n, "RIGHT": facts.constexprs["RIGHT"],
         "GUARD": hidden or one_key, "ONE_ROW": one_row, "ONE_KEY": one_key, "num_warps": config.num_warps, "num_stages": 1},
    )  # fmt: skip


def sum_logits(logits: Tensor, grad_bias: Tensor, acc: Any) -> None:
    """grad_bias `1|batch 1|heads seq keys`, the sum of logits `batch heads seq keys`."""
    batch, heads, seq, keys = logits.shape
    own = grad_bias.shape[:2]
    _launch(
        _sum_kernel, (own[0] * own[1] * cdiv(seq * keys, SUM_BLOCK),),
        (logits, grad_bias, seq * keys, heads, own[1], batch // own[0], heads // own[1]),
        {"BLOCK": SUM_BLOCK, "ACC": acc, "num_warps": 4},
    )  # fmt: skip


def launch_sinks(sinks: Tensor, delta: Tensor, shift: Tensor, grad_sinks: Tensor, added: bool, acc: Any) -> None:
    batch, heads, seq = delta.shape
    _launch(_sinks_kernel, (heads,), (delta, shift, sinks.contiguous(), grad_sinks, seq, heads, batch),
            {"ROWS": SINK_ROWS, "ADDED": added, "ACC": acc, "num_warps": 4})  # fmt: skip

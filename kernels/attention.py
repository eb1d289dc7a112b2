"""Softmax attention, forward (FlashAttention-2, Dao 2023, arXiv 2307.08691), in portable Triton.

    x = scale * q @ k^T,   x = softcap * tanh(x / softcap),   x += bias + mask - alibi_slope * |p - j|
    out = softmax(x, context) @ v,    lse = log(sum(exp(x), context))

    q, out   batch seq heads head_dim | v_dim     out is bf16 for fp8 inputs
    k, v     batch context kv_heads head_dim | v_dim      heads is a multiple of kv_heads: query head h reads kv head h // group
    lse      batch heads seq                      natural log, fp32 (fp64 for fp64)

and the options of _attention.READS: packed sequences (batch 1, bounded by cu_seqlens), paged keys (block_table), lengths
(seqused_k), mask, bias, sinks (a logit of a further key whose value is 0; lse has it), windows, prefixes, block maps, dropout
and fp8 scales. Query i of a segment stands at key position p = i + context - seq: it sees key j iff p - left <= j <= p + right,
or j < prefix; a negative left or right bounds nothing. A row that attends nothing gives out 0 and lse -inf (the sink's logit).
Keys past the context, keys that no row of a tile sees in a masked block, and pages not in use may hold NaN; a key that some
row of a tile attends must be finite for the other rows of the tile. Lengths that make no sense give NaN rows.

HBM, in elements: reads q, k, v and the options, writes out and lse; the logits never leave the chip.

One program owns BM query rows of one head and walks the keys right to left, so that only the blocks at the edges of what the
rows see are masked. Where programs are small, several of them share an SM, and the softmax of one runs under the products of
another. Where one fills it, Q K^T of the next block is issued before the softmax of the current one ("ahead"). Neither needs warp
specialisation, whose automatic form gives NaN on sm_90 in triton 3.6.

On Hopper the kernel of attention_hopper.py or attention_hopper_short.py runs instead where _attention_skeleton.py says so:
launches there are, with packed sequences, their schedule and with lengths of their own the order of the tiles, then the forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _attention as shared
from . import _attention_reference, _hopper_map, attention_hopper, attention_hopper_short
from . import _attention_tiles as tiles
from ._attention import normalise_mask
from ._attention_skeleton import PORTABLE, skeleton_of
from ._attention_tiles import kept, key_range, load_paged, load_rows, load_terms, planned, power, shape_logits, visible
from ._hopper_check import ready
from ._hopper_schedule import plan_axes
from ._lang import cdiv, tl, triton
from ._launch import descriptor, for_tma, on_device
from ._launch import launch as _launch
from ._spec import FP8, Args, Op, Sizes, Spec, Stage, Write
from ._target import Target, target_of
from .attention_backward import BACKWARD

__all__ = ["CONFIGS", "NAMES", "OP", "SPEC", "Config", "configure", "normalise_mask"]

NAMES = (*shared.READS, *shared.NUMBERS)


def _flops(sizes: Sizes, args: Args) -> int:
    return 2 * sizes["heads"] * (sizes["head_dim"] + sizes["v_dim"]) * shared.pairs(sizes, args)


def _axes(sizes: Sizes, args: Args) -> dict[str, int]:
    found = shared.check("attention", sizes, args)
    if any(isinstance(n, torch.SymInt) for n in sizes.values()):
        return found  # a trace for any length: no result has the axes of scratch
    chosen = skeleton_of(args)
    if chosen.name == "short":
        return {**found, "hopper": 1, "short": 1}
    if chosen.hopper:
        return {**found, "hopper": 1, **plan_axes({**sizes, **found}, args, target_of(args["q"].device))}
    if not shared.given(args, "cu_seqlens_q"):
        return found
    config = _config({**sizes, **found}, args)
    return {**found, "columns": tiles.COLUMNS, "slots": tiles.schedule_slots(sizes["seq"], found["sequences"], config.block_m)}


SPEC = Spec(
    name="attention",
    reads=shared.READS,
    writes={
        "out": Write("batch seq heads v_dim", "result:q"),
        "lse": Write("batch heads seq", "accumulate:q"),
    },
    optional=shared.OPTIONAL,
    any_dtype=shared.OPTIONAL,
    dtypes=shared.DTYPES,
    derive=_axes,
    read_bytes={"k": shared.key_bytes("k"), "v": shared.key_bytes("v")},
    # The table that the Hopper kernel follows for equal lengths is made once for a shape, and not counted: 4 bytes a tile.
    scratch={"schedule": Write("slots columns", "int32"), "table": Write("rounds programs fields", "int32")},
    stages=(
        Stage("attention_schedule", ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"), ("schedule",), lambda s, a: 0),
        Stage("attention_order", ("schedule|seqused_k",), ("table",), lambda s, a: 0),
        Stage("attention", (*shared.READS, "table|schedule"), ("out", "lse"), _flops),
    ),
)


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ahead: bool = False  # Q K^T of the next block before the softmax of this one


# Besides softcap, dropout and fp8, what costs so many registers that smaller tiles are better: tiles of their own, or rows of v
# that have to be zeroed.
_HEAVY = ("mask", "cu_seqlens_q", "seqused_k", "block_table")
SHORT = 512  # keys within a query's reach up to which latency decides, not tensor cores
# (columns of q or v at most, bytes an element at most) -> Config, first match wins. Plain / with an option that costs registers.
TABLE: dict[str, tuple[tuple[int, int, Config, Config], ...]] = {
    # H200, 2026-11-29, bf16, in ms (cuDNN's in brackets). D=128, causal B4 S4096 (0.91): 64x128 w4 s1 0.98, 64x64 w4 s1 1.05,
    # 128x64 w8 s3 ahead 1.20, 128x128 w8 s2 ahead 1.24, 64x64 w4 s2 1.27: three programs an SM hide each other's latency better
    # than any ring, and one stage, in which k and v share a buffer, leaves room for them. 16 packed documents: 64x64 w4 s1 1.64,
    # 128x64 w8 s3 ahead 1.84; softcap 1.77 and 1.82. D=64 (0.63): 64x64 w4 s2 0.64, 64x64 w4 s1 0.79, 128x64 w4 s3 ahead 0.74.
    # D=256 (0.86): 128x64 1.10, 64x64 w4 s1 1.20. D=512: 64x32 w8 s2 2.46, s1 4.55.
    "hopper": (
        (64, 2, Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
        (128, 2, Config(64, 128, 4, 1), Config(64, 64, 4, 1)),
        (256, 2, Config(128, 64, 8, 2, True), Config(128, 32, 8, 2)),
        (1024, 2, Config(64, 32, 8, 2), Config(64, 32, 8, 1)),
        (64, 8, Config(64, 64, 4, 2), Config(64, 32, 4, 1)),
        (128, 8, Config(64, 32, 4, 1), Config(64, 32, 4, 1)),
        (256, 8, Config(32, 16, 4, 1), Config(32, 16, 4, 1)),
        (1024, 8, Config(16, 16, 4, 1), Config(16, 16, 4, 1)),
    ),
    # Not measured: the largest tiles that compile for sm_80 without spilling.
    "ampere": (
        (64, 2, Config(128, 64, 8, 3), Config(128, 32, 8, 2)),
        (128, 2, Config(128, 32, 8, 3), Config(64, 32, 4, 2)),
        (256, 2, Config(64, 32, 4, 2), Config(64, 32, 4, 2)),
        (1024, 2, Config(32, 32, 8, 1), Config(32, 32, 8, 1)),
        (64, 8, Config(64, 32, 4, 1), Config(64, 32, 4, 1)),
        (256, 8, Config(32, 16, 4, 1), Config(32, 16, 4, 1)),
        (1024, 8, Config(16, 16, 4, 1), Config(16, 16, 4, 1)),
    ),
    # Not measured: as above, within the 99 KB of sm_86 and the 64 KB of gfx942.
    "small": (
        (64, 2, Config(128, 64, 8, 2), Config(128, 32, 8, 2)),
        (128, 2, Config(128, 32, 8, 2), Config(64, 32, 4, 2)),
        (256, 2, Config(64, 32, 4, 1), Config(64, 32, 4, 1)),
        (1024, 2, Config(16, 16, 4, 1), Config(16, 16, 4, 1)),
        (64, 8, Config(64, 32, 4, 1), Config(64, 32, 4, 1)),
        (256, 8, Config(32, 16, 4, 1), Config(32, 16, 4, 1)),
        (1024, 8, Config(16, 16, 4, 1), Config(16, 16, 4, 1)),
    ),
}


# The same card and day, D=128, 32k tokens: S64 0.24 (cuDNN 0.37), S128 0.26 (0.19), S256 0.33 (0.24), S512 0.21 (0.18); window of
# 128 at S8192 0.17, other forms 0.19 to 0.34.
_SHORT = Config(64, 64, 4, 1)
# H200, 2026-11-30, a bias of every query and key, D=128 B4 S2048: 128x64 w8 s3 ahead 0.74 (FlexAttention 0.72), 64x128 w4 s1
# 0.76, 64x64 w4 s1 0.81; causal 0.43, 0.40 and 0.58. D=64: 64x64 w4 s2 0.45, the others 0.52 to 0.61.
_BIASED, _BIASED_BOUNDED = Config(128, 64, 8, 3, True), Config(64, 128, 4, 1)


def configure(head_dim: int, itemsize: int, heavy: bool, target: Target, reach: int = SHORT + 1) -> Config:
    """head_dim: the larger of q's and v's; heavy: with options that cost registers; reach: keys that a query sees at most."""
    kind = shared.kind_of(target)
    if not target.batch_invariant and kind == "hopper" and itemsize <= 2 and head_dim <= 128 and reach <= SHORT:
        return _SHORT
    # With batch_invariant the blocks of keys, and so the order of a row's sums, must not tell what comes with them.
    heavy = heavy or target.batch_invariant
    return next((costly if heavy else plain) for d, size, plain, costly in TABLE[kind] if head_dim <= d and itemsize <= size)


def _config(sizes: Sizes, args: Args) -> Config:
    heavy = args["dropout_p"] > 0 or args["softcap"] > 0 or shared.given(args, *_HEAVY) or args["q"].dtype is FP8
    itemsize = max(2, args["q"].element_size())  # fp8 is widened
    target, dim, bias = target_of(args["q"].device), max(sizes["head_dim"], sizes["v_dim"]), args["bias"] is not None
    alone = bias and not heavy and not target.batch_invariant and shared.kind_of(target) == "hopper"
    if alone and itemsize == 2 and 64 < dim <= 128:
        return _BIASED if max(args["left"], args["right"]) < 0 else _BIASED_BOUNDED
    return configure(dim, itemsize, heavy or bias, target, shared.reach(sizes, args))


_LISTED = (config for rows in TABLE.values() for row in rows for config in row[2:])
CONFIGS = tuple(dict.fromkeys([*_LISTED, _SHORT, _BIASED, _BIASED_BOUNDED]))


def reference(*values: Any, **named: Any) -> tuple[Tensor, Tensor]:
    args = {**dict(zip(NAMES, values)), **named}
    sizes = SPEC.axes(args)
    out, lse = SPEC.empty(args, sizes)
    _attention_reference.forward("attention", sizes, args, out, lse)
    return out, lse


@triton.jit
def _keys(
    x, pages, b, h, start, n, context, strides, PAGES,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr, CHECK: tl.constexpr, PAGE: tl.constexpr,
    COL: tl.constexpr,
):  # fmt: skip
    """Block n of keys or values; start: where the sequence begins."""
    if PAGE:
        t = load_paged(x, pages, h, n * BN + tl.arange(0, BN), context, strides, PAGES, PAGE, D, DP, COL)
    else:
        t = load_rows(x, b, h, start + n * BN, start + context, strides, BN, D, DP, TMA, CHECK, COL)
    return t


@triton.jit
def _logits(
    queries, keys, n, rows, geo, terms, scale,
    D: tl.constexpr, DP: tl.constexpr, D2: tl.constexpr, BN: tl.constexpr, RIGHT: tl.constexpr, ADDED: tl.constexpr,
    TMA: tl.constexpr, PAGE: tl.constexpr, CHECK: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits of key block n, unscaled unless ADDED. CHECK: the block may reach past what every row sees."""
    q, q2, h, first, seq = queries
    k, k2, pages, b, kvh, start, strides, PAGES = keys
    context = geo[1]
    loaded = load_terms(terms, b, h, first, n * BN, seq, context, rows.shape[0], BN, CHECK, False)
    kt = _keys(k, pages, b, kvh, start, n, context, strides, PAGES, D, DP, BN, TMA, CHECK, PAGE, 0)
    s = tl.dot(q, kt.T, input_precision=PRECISION, out_dtype=ACC)
    if D2:
        kt = _keys(k2, pages, b, kvh, start, n, context, strides, PAGES, D, D2, BN, TMA, CHECK, PAGE, DP)
        s = tl.dot(q2, kt.T, s, input_precision=PRECISION, out_dtype=ACC)
    cols = n * BN + tl.arange(0, BN)
    s, _ = shape_logits(s, rows[:, None], cols[None, :], geo, terms, loaded, scale, ADDED)
    if CHECK:
        s = tl.where(visible(rows[:, None], cols[None, :], geo, RIGHT), s, float("-inf"))
    return s


@triton.jit
def _accumulate(
    s, values, n, m, l, acc, rows, geo, drop, scale,
    DV: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr, ADDED: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
    PAGE: tl.constexpr, CHECK: tl.constexpr, RAGGED: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One online-softmax step: key block n with logits s into the running maximum m, sum l and output acc.

    m and scale are in natural units if ADDED, in base-2 ones otherwise.

    RAGGED: the block may hold rows of v past the context that are not zero."""
    v, pages, b, h, start, strides, PAGES = values
    seed, first, bh, dropout_p = drop
    # Written out where an operation is fused: left to the compiler, it might differ between the loops, and so a row's bits.
    if ADDED:
        new = tl.maximum(m, tl.max(s, 1))
        p = power(s - new[:, None], ADDED)
    else:
        new = tl.maximum(m, tl.max(s, 1) * scale)
        p = power(tl.fma(s, scale, -new[:, None]), ADDED)
    shrink = power(m - new, ADDED)
    l = tl.fma(l, shrink, tl.sum(p, 1))
    acc = acc * shrink[:, None]
    cols = n * BN + tl.arange(0, BN)
    vt = _keys(v, pages, b, h, start, n, geo[1], strides, PAGES, DV, DVP, BN, TMA, CHECK, PAGE, 0)
    if MASKED:
        vt = tiles.no_nan(vt, tl.max(s, 0) > float("-inf"))
    elif RAGGED:
        vt = tiles.no_nan(vt, cols < geo[1])
    if seed is not None:
        p = tl.where(kept(seed, (first + rows)[:, None], cols[None, :], bh, dropout_p), p, 0.0)
    acc = tl.dot(p.to(vt.dtype), vt, acc, input_precision=PRECISION, out_dtype=ACC)
    return new, l, acc


@triton.jit(do_not_specialize=["BATCH_HEADS", "SECTION", "PAGES", "MAX_PAGES", "left", "right"])
def _forward_kernel(
    q, k, v, q2, k2, mask, bias, sinks, slopes, counts, lists, prefix, used, block_table, q_scale, k_scale, v_scale, seed,
    schedule, out, lse, scale, cap, dropout_p, left, right, SEQ, CONTEXT, HEADS, GROUP, BATCH_HEADS, SECTION, TOGETHER,
    PAGES, MAX_PAGES,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_mb, stride_mh, stride_ms, stride_mk, stride_bb, stride_bh, stride_bs, stride_bk,
    stride_ab, stride_lb, stride_lh, stride_lq, stride_qc, stride_kc, stride_vc,
    D: tl.constexpr, DP: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    NS: tl.constexpr, AHEAD: tl.constexpr, RIGHT: tl.constexpr, ADDED: tl.constexpr, MASKED: tl.constexpr, PAGE: tl.constexpr,
    TMA: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    RAGGED: tl.constexpr = TMA and (schedule is not None or used is not None)
    if schedule is not None:
        bh = pid % BATCH_HEADS
        tile = pid // BATCH_HEADS
    else:
        bh, tile = tiles.section_order(pid, tl.cdiv(SEQ, BM), BATCH_HEADS, SECTION)
    b, h = tiles.entry_of(bh, HEADS, GROUP, TOGETHER)
    bh = b * HEADS + h
    broken = False
    q_start = 0
    k_start = 0
    seq = SEQ
    context = CONTEXT
    if schedule is not None:  # b is 0: packed sequences have one batch entry
        segment, tile, q_start, seq, k_start, context = planned(schedule, tile)
        broken = segment < 0
        if block_table is not None:
            block_table += segment.to(tl.int64) * MAX_PAGES
    else:
        if RIGHT:
            tile = tl.cdiv(SEQ, BM) - 1 - tile  # longest first
        if used is not None:
            context = tl.load(used + b)
            broken = (context < 0) | (context > CONTEXT)
            context = tl.where(broken, 0, context)
        if block_table is not None:
            block_table += b.to(tl.int64) * MAX_PAGES
        if prefix is not None:
            prefix = tl.load(prefix + b)
            broken = (prefix < 0) | broken
    kvh = h // GROUP
    if EXACT is not None:
        scale = tl.full([], EXACT[0], ACC)
        if cap is not None:
            cap = tl.full([], EXACT[1], ACC)
    if q_scale is not None:
        scale = scale * tl.load(q_scale + b * stride_qc + h)
    if k_scale is not None:
        scale = scale * tl.load(k_scale + b * stride_kc + kvh)
    if slopes is not None:
        if schedule is not None:  # tokens of no sequence have no slopes to be read
            slopes = tl.load(slopes + segment * stride_ab + h, context > 0, other=0.0).to(ACC)
        else:
            slopes = tl.load(slopes + b * stride_ab + h).to(ACC)
    if seed is not None:
        seed = tl.load(seed)
    geo = (context - seq, context, left, right, prefix)
    terms = (mask, (stride_mb, stride_mh, stride_ms, stride_mk), bias, (stride_bb, stride_bh, stride_bs, stride_bk), slopes, cap)
    keys = (k, k2, block_table, b, kvh, k_start, (stride_kb, stride_ks, stride_kh), PAGES)
    values = (v, block_table, b, kvh, k_start, (stride_vb, stride_vs, stride_vh), PAGES)
    drop = (seed, q_start, bh, dropout_p)
    rows = tile * BM + tl.arange(0, BM)
    q_strides = (stride_qb, stride_qs, stride_qh)
    qt = load_rows(q, b, h, q_start + tile * BM, q_start + seq, q_strides, BM, D, DP, TMA, True)
    qt2 = qt
    if D2:
        qt2 = load_rows(q2, b, h, q_start + tile * BM, q_start + seq, q_strides, BM, D, D2, TMA, True, DP)
    queries = (qt, qt2, h, tile * BM, seq)
    low, full_low, full_high, high = key_range(tile * BM, BM, geo, RIGHT)
    if schedule is not None:
        high = tl.where(tile * BM < seq, high, 0)  # a slot past the end of its segment
    # Every row sees blocks [full_low, full_high); blocks [begin, end) are seen by some.
    begin = low // BN
    end = tl.maximum(tl.cdiv(high, BN), begin + 1)
    full_high = tl.minimum(tl.maximum(full_high // BN, begin), end)
    full_low = tl.minimum(tl.maximum(tl.cdiv(full_low, BN), begin), full_high)
    # Not -inf: a row that has attended nothing yet would give -inf - -inf. Logits that are not masked lie above it.
    m = tl.full([BM], -3.0e38, ACC)
    l = tl.zeros([BM], ACC)
    acc = tl.zeros([BM, DVP], ACC)
    if lists is not None:
        at = b.to(tl.int64) * stride_lb + h.to(tl.int64) * stride_lh + tile * BM // 128
        lists += at * stride_lq
        for i in tl.range(0, tl.load(counts + at) * (128 // BN), num_stages=NS):
            n = tl.load(lists + i // (128 // BN)) * (128 // BN) + (128 // BN - 1 - i % (128 // BN))
            s = _logits(queries, keys, n, rows, geo, terms, scale, D, DP, D2, BN, RIGHT, ADDED, TMA, PAGE,
                        True, ACC, PRECISION)  # fmt: skip
            m, l, acc = _accumulate(s, values, n, m, l, acc, rows, geo, drop, scale, DV, DVP, BN, ADDED, MASKED,
                                      TMA, PAGE, True, RAGGED, ACC, PRECISION)  # fmt: skip
    elif AHEAD:
        s = _logits(queries, keys, end - 1, rows, geo, terms, scale, D, DP, D2, BN, RIGHT, ADDED, TMA, PAGE,
                    True, ACC, PRECISION)  # fmt: skip
        if RAGGED:
            full_high = tl.maximum(full_high - 1, begin)  # the last block of the context stays out of the loop without checks
            full_low = tl.minimum(full_low, full_high)
        last = tl.minimum(full_high, end - 1)  # the block that s is of, after the first loop
        if RIGHT or RAGGED:
            for i in tl.range(0, end - 1 - last, num_stages=NS):
                n = end - 2 - i
                ahead = _logits(queries, keys, n, rows, geo, terms, scale, D, DP, D2, BN, RIGHT, ADDED, TMA, PAGE,
                                True, ACC, PRECISION)  # fmt: skip
                m, l, acc = _accumulate(s, values, n + 1, m, l, acc, rows, geo, drop, scale, DV, DVP, BN, ADDED, MASKED,
                                          TMA, PAGE, True, RAGGED, ACC, PRECISION)  # fmt: skip
                s = ahead
        full_low = tl.minimum(full_low, last)
        for i in tl.range(0, last - full_low, num_stages=NS):
            n = last - 1 - i
            ahead = _logits(queries, keys, n, rows, geo, terms, scale, D, DP, D2, BN, RIGHT, ADDED, TMA, PAGE,
                            False, ACC, PRECISION)  # fmt: skip
            m, l, acc = _accumulate(s, values, n + 1, m, l, acc, rows, geo, drop, scale, DV, DVP, BN, ADDED, MASKED,
                                      TMA, PAGE, True, False, ACC, PRECISION)  # fmt: skip
            s = ahead
        if left is not None:
            for i in tl.range(0, full_low - begin, num_stages=NS):
                n = full_low - 1 - i
                ahead = _logits(queries, keys, n, rows, geo, terms, scale, D, DP, D2, BN, RIGHT, ADDED, TMA, PAGE,
                                True, ACC, PRECISION)  # fmt: skip
                m, l, acc = _accumulate(s, values, n + 1, m, l, acc, rows, geo, drop, scale, DV, DVP, BN, ADDED, MASKED,
                                          TMA, PAGE, True, False, ACC, PRECISION)  # fmt: skip
                s = ahead
        m, l, acc = _accumulate(s, values, begin, m, l, acc, rows, geo, drop, scale, DV, DVP, BN, ADDED, MASKED,
                                  TMA, PAGE, True, RAGGED, ACC, PRECISION)  # fmt: skip
    else:
        for i in tl.range(0, end - full_high, num_stages=NS):
            n = end - 1 - i
            s = _logits(queries, keys, n, rows, geo, terms, scale, D, DP, D2, BN, RIGHT, ADDED, TMA, PAGE,
                        True, ACC, PRECISION)  # fmt: skip
            m, l, acc = _accumulate(s, values, n, m, l, acc, rows, geo, drop, scale, DV, DVP, BN, ADDED, MASKED,
                                      TMA, PAGE, True, RAGGED, ACC, PRECISION)  # fmt: skip
        for i in tl.range(0, full_high - full_low, num_stages=NS):
            n = full_high - 1 - i
            s = _logits(queries, keys, n, rows, geo, terms, scale, D, DP, D2, BN, RIGHT, ADDED, TMA, PAGE,
                        False, ACC, PRECISION)  # fmt: skip
            m, l, acc = _accumulate(s, values, n, m, l, acc, rows, geo, drop, scale, DV, DVP, BN, ADDED, MASKED,
                                      TMA, PAGE, False, False, ACC, PRECISION)  # fmt: skip
        if left is not None:
            for i in tl.range(0, full_low - begin, num_stages=NS):
                n = full_low - 1 - i
                s = _logits(queries, keys, n, rows, geo, terms, scale, D, DP, D2, BN, RIGHT, ADDED, TMA, PAGE,
                            True, ACC, PRECISION)  # fmt: skip
                m, l, acc = _accumulate(s, values, n, m, l, acc, rows, geo, drop, scale, DV, DVP, BN, ADDED, MASKED,
                                          TMA, PAGE, True, False, ACC, PRECISION)  # fmt: skip
    if not ADDED:
        m = m * 0.6931471805599453
    if sinks is not None:
        sink = tl.load(sinks + h).to(ACC)
        new = tl.maximum(m, sink)
        shrink = power(m - new, True)
        l = l * shrink + power(sink - new, True)
        acc = acc * shrink[:, None]
        m = new
    total = m + tl.math.log2(l) * 0.6931471805599453
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    if seed is not None:
        if EXACT is not None:
            acc = acc / EXACT[2]
        else:
            acc = acc / (1.0 - dropout_p)
    if v_scale is not None:
        acc = acc * tl.load(v_scale + b * stride_vc + kvh)
    if schedule is not None or used is not None or prefix is not None:
        total = tl.where(broken, float("nan"), total)
        acc = tl.where(broken, float("nan"), acc)
    tl.store(lse + bh.to(tl.int64) * SEQ + q_start + rows, total, rows < seq)
    d = tl.arange(0, DVP)
    at = out + ((b.to(tl.int64) * SEQ + q_start + rows) * HEADS + h)[:, None] * DV + d[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), (rows < seq)[:, None] & (d < DV)[None, :])


def launch(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, sinks: Tensor | None, alibi_slopes: Tensor | None,
    block_map: Tensor | None, prefix_lens: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None, block_table: Tensor | None, q_scale: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None,
    seed: Tensor | None, left: int, right: int, softcap: float, scale: float, dropout_p: float, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    args: dict[str, Any] = dict(locals())
    sizes = SPEC.axes(args)
    if "hopper" in sizes and not ready(q.device, "forward"):
        sizes = SPEC.axes({**args, **PORTABLE})
    out, lse = SPEC.empty(args, sizes)
    if out.numel() == 0 or sizes["kv_heads"] == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    if "hopper" in sizes:
        _launch_hopper(args, (out, lse, *(t for t in SPEC.empty_scratch(args, sizes) if t.numel())), "short" in sizes)
        return out, lse
    seq, heads = sizes["seq"], sizes["heads"]
    target = target_of(args["q"].device)
    q, k, v = shared.dense_rows(args["q"], args["k"], args["v"])
    page = sizes["k_len"] if args["block_table"] is not None else 0
    tma = not page and shared.uses_tma(target, q, k, v)
    config = _config(sizes, args)
    bm, bn = config.block_m, config.block_n
    d = shared.dims(sizes["head_dim"], sizes["v_dim"])

    def operand(t: Tensor, rows: int, columns: int) -> Any:
        return None if not columns else descriptor(shared.by_head(t), [1, 1, rows, columns]) if tma else t

    with on_device(q):
        schedule = None
        if args["cu_seqlens_q"] is not None:
            schedule, _ = SPEC.empty_scratch(args, sizes)
            others = sizes["context"]
            tiles.schedule(args["cu_seqlens_q"], args["cu_seqlens_k"], args["seqused_k"], seq, others, bm, schedule)
        facts = shared.launch_facts(args, by_key=False, box=shared.term_box(target, bm, bn, config.num_stages))
        parallel = heads if schedule is not None else sizes["batch"] * heads
        _launch(
            _forward_kernel, ((cdiv(seq, bm) if schedule is None else schedule.shape[0]) * parallel,),
            (operand(q, bm, d["DP"]), operand(k, bn, d["DP"]), operand(v, bn, d["DVP"]), operand(q, bm, d["D2"]),
             operand(k, bn, d["D2"]), *facts.tensors, schedule, out, lse, *facts.numbers, seq, sizes["context"], heads,
             sizes["group"], parallel, *shared.section(sizes, args, target), sizes["k_batch"], sizes.get("max_pages", 0),
             *(stride for t in (q, k, v) for stride in shared.row_strides(t, tma)), *facts.strides),
            {**d, "BM": bm, "BN": bn, "NS": config.num_stages, "AHEAD": config.ahead, **facts.constexprs, "PAGE": page,
             "TMA": tma, **shared.numerics(args, target), "num_warps": config.num_warps, "num_stages": config.num_stages},
        )  # fmt: skip
    return out, lse


def _launch_hopper(args: Args, buffers: tuple[Tensor, ...], short: bool) -> None:
    q, k, v = (for_tma(args[n]) for n in "qkv")
    sinks, used = args["sinks"], args["seqused_k"]
    if args["block_map"] is not None:
        k, v = (_hopper_map.without_hidden(t, q.shape[1], args["left"]) for t in (k, v))
    if used is not None and (k is not args["k"] or v is not args["v"]):  # then their batch entries lie equally far apart
        k, v = k.contiguous(), v.contiguous()
    given = q, k, v, None if sinks is None else sinks.contiguous(), args["left"], args["right"], args["scale"]
    if short:
        attention_hopper_short.launch(*given, buffers[0], buffers[1])
    else:
        attention_hopper.launch(
            *given, args["softcap"], args["cu_seqlens_q"], args["cu_seqlens_k"], None if used is None else used.contiguous(),
            buffers, args["block_map"],
        )  # fmt: skip


OP = Op(SPEC, launch, reference, BACKWARD, no_grad=frozenset({"block_table", "q_scale", "k_scale", "v_scale"}))

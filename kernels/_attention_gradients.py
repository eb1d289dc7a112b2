"""Kernels of the attention backward (launched in attention_backward.py), and what they share: places of tiles, recomputed
weights, gradients of the logits.

`drop` is the tuple (seed, dropout_p, gain); its seed is None without dropout, and `keep` then means nothing. Functions cannot
return None: absent second columns of a tile are some other tile, and D2 is 0.
"""

from __future__ import annotations

from ._attention_tiles import (
    entry_of,
    kept,
    key_range,
    load_rows,
    load_term,
    load_terms,
    no_nan,
    planned,
    power,
    row_range,
    section_order,
    shape_logits,
    visible,
)
from ._lang import tl, triton


@triton.jit
def slot_of(schedule, num_tiles, HEADS, SECTION):
    """(batch entry and head, slot) of a program."""
    pid = tl.program_id(0)
    if schedule is None:
        return section_order(pid, num_tiles, HEADS, SECTION)
    else:
        return pid % HEADS, pid // HEADS


@triton.jit
def place(schedule, slot, b, ROWS, OTHERS, BLOCK: tl.constexpr):
    """(tile, first row, rows, first row of the others, how many others, number of the segment) of a slot.

    Without a schedule every batch entry b is a segment, and the number is b. A tile past the end of its segment has no others to
    visit. A number below 0: the bounds make no sense.
    """
    if schedule is None:
        return slot, 0, ROWS, 0, OTHERS, b
    else:
        segment, tile, first, rows, start, others = planned(schedule, slot)
        return tile, first, rows, start, tl.where(tile * BLOCK < rows, others, 0), segment


@triton.jit
def bounded(used, b, CONTEXT, segment):
    """(keys of batch entry b, whether the lengths make no sense)."""
    if used is None:
        return CONTEXT, segment < 0
    else:
        n = tl.load(used + b)
        broken = (n < 0) | (n > CONTEXT)
        return tl.where(broken, 0, n), broken


@triton.jit
def constants(scale, dropout_p, ADDED: tl.constexpr, EXACT: tl.constexpr, ACC: tl.constexpr):
    """(scale in natural units, in those of the logits, 1 / (1 - dropout_p)) in the accumulator's precision."""
    if EXACT is not None:
        scale = tl.full([], EXACT[0], ACC)
        return scale, scale, tl.full([], 1.0 / EXACT[2], ACC)
    elif ADDED:
        return scale, scale, 1.0 / (1.0 - dropout_p)
    else:
        return scale * 0.6931471805599453, scale, 1.0 / (1.0 - dropout_p)


@triton.jit
def weights(s, shift, row, col, geo, terms, loaded, scale, RIGHT: tl.constexpr, CHECK: tl.constexpr, ADDED: tl.constexpr):
    """(exp(logits - lse), d logit / d product if there is a softcap) of products s; all but s broadcast. shift: lse.

    shift and scale are in natural units if ADDED, in base-2 ones otherwise."""
    s, slope = shape_logits(s, row, col, geo, terms, loaded, scale, ADDED)
    if not ADDED:
        s = s * scale
    p = power(s - shift, ADDED)
    if CHECK:
        p = tl.where(visible(row, col, geo, RIGHT), p, 0.0)
    return p, slope


@triton.jit
def keep_mask(drop, row, col, bh):
    seed, dropout_p, gain = drop
    if seed is None:
        return row
    else:
        return kept(seed, row, col, bh, dropout_p)


@triton.jit
def thinned(x, keep, drop):
    """x after dropout."""
    seed, dropout_p, gain = drop
    if seed is None:
        return x
    else:
        return tl.where(keep, x * gain, 0.0)


@triton.jit
def logit_gradient(p, dp, delta, slope, SOFTCAP: tl.constexpr, GUARD: tl.constexpr):
    """p * (dp - delta), with SOFTCAP times d logit / d product. GUARD: hidden keys may hold NaN."""
    ds = p * (dp - delta)
    if SOFTCAP:
        ds = ds * slope
    if GUARD:
        ds = tl.where(p == 0.0, 0.0, ds)
    return ds


@triton.jit
def store_logit_gradient(x, ds, row, col, seq, CONTEXT, BM: tl.constexpr, BN: tl.constexpr):
    """ds `BM BN` into x, `seq CONTEXT`, from `row` and `col` on."""
    r = row + tl.arange(0, BM)
    c = col + tl.arange(0, BN)
    at = x + r.to(tl.int64)[:, None] * CONTEXT + c[None, :]
    tl.store(at, ds.to(x.dtype.element_ty), (r < seq)[:, None] & (c < CONTEXT)[None, :])


@triton.jit
def attended(p, b, h, col, seen, geo, terms, BN: tl.constexpr, BOUNDS: tl.constexpr):
    """Which keys some row of a tile of weights attends, or may; BOUNDS: `seen` (first, end) bounds them."""
    mask, mask_strides, _, _, _, _ = terms
    low, high = seen
    cols = col + tl.arange(0, BN)
    live = (cols >= low) & (cols < high)
    if mask is not None:
        if mask_strides[2] is None:
            a = load_term(mask, mask_strides, b, h, 0, col, 1, geo[1], 1, BN, True, False).reshape(BN)
            if a.dtype == tl.uint8:
                shown = a != 0
            else:
                shown = a > -2.0e38
        else:
            shown = tl.max(p, 0) > 0.0
        if BOUNDS:
            live = live & shown
        else:
            live = shown
    return live


@triton.jit
def product(a, a2, b, b2, D2: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """a @ b^T, whose columns may come in two tiles."""
    s = tl.dot(a, b.T, input_precision=PRECISION, out_dtype=ACC)
    if D2:
        s = tl.dot(a2, b2.T, s, input_precision=PRECISION, out_dtype=ACC)
    return s


@triton.jit
def added(total, a, b, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """total + a @ b."""
    return tl.dot(a.to(b.dtype), b, total, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def _delta_kernel(
    out, grad_out, lse, delta, shift, SEQ, HEADS, BATCH_HEADS,
    stride_ob, stride_os, stride_oh, stride_gb, stride_gs, stride_gh,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ADDED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    bh = pid % BATCH_HEADS
    row = (pid // BATCH_HEADS) * ROWS
    o = load_rows(out, bh // HEADS, bh % HEADS, row, SEQ, (stride_ob, stride_os, stride_oh), ROWS, D, DP, False, True)
    g = load_rows(grad_out, bh // HEADS, bh % HEADS, row, SEQ, (stride_gb, stride_gs, stride_gh), ROWS, D, DP, False, True)
    rows = row + tl.arange(0, ROWS)
    at = bh.to(tl.int64) * SEQ + rows
    tl.store(delta + at, tl.sum(o.to(ACC) * g.to(ACC), 1), rows < SEQ)
    s = tl.load(lse + at, rows < SEQ, other=0.0)
    if not ADDED:
        s = s * 1.4426950408889634
    # exp2(logits - inf) is 0: what rows that attended nothing need.
    tl.store(shift + at, tl.where(s == float("-inf"), float("inf"), s), rows < SEQ)


@triton.jit
def _kv_block(
    dk, dk2, dv, keys, col, b, h, row, queries, geo, options, drop, scale,
    D: tl.constexpr, DP: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr,
    RIGHT: tl.constexpr, ADDED: tl.constexpr, GUARD: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums plus the part of BM query rows of one head, for the keys from `col` on."""
    kt, kt2, vt = keys
    q, q2, grad_out, delta, shift, segment, first, seq, SEQ, HEADS, q_strides, g_strides = queries
    bh = b * HEADS + h
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, kt.shape[0])
    ok = rows < seq
    at = bh.to(tl.int64) * SEQ + first
    qt = load_rows(q, b, h, first + row, first + seq, q_strides, BM, D, DP, TMA, True)
    gt = load_rows(grad_out, b, h, first + row, first + seq, g_strides, BM, DV, DVP, TMA, True)
    qt2 = qt
    if D2:
        qt2 = load_rows(q2, b, h, first + row, first + seq, q_strides, BM, D, D2, TMA, True, DP)
    sh = tl.load(shift + at + rows, ok, other=float("inf"))
    de = tl.load(delta + at + rows, ok, other=0.0)
    mask, mask_strides, bias, bias_strides, slopes, slopes_b, cap = options
    if slopes is not None:
        slopes = tl.load(slopes + segment * slopes_b + h).to(ACC)
    terms = (mask, mask_strides, bias, bias_strides, slopes, cap)
    loaded = load_terms(terms, b, h, row, col, seq, geo[1], BM, kt.shape[0], True, True)
    s = product(kt, kt2, qt, qt2, D2, PRECISION, ACC)
    CHECK: tl.constexpr = RIGHT > 0 or geo[2] is not None
    p, slope = weights(s, sh[None, :], rows[None, :], cols[:, None], geo, terms, loaded, scale, RIGHT, CHECK, ADDED)
    keep = keep_mask(drop, (first + rows)[None, :], cols[:, None], bh)
    dv = added(dv, thinned(p, keep, drop), gt, PRECISION, ACC)
    dp = thinned(product(vt, vt, gt, gt, 0, PRECISION, ACC), keep, drop)
    ds = logit_gradient(p, dp, de[None, :], slope, cap is not None, GUARD)
    dk = added(dk, ds, qt, PRECISION, ACC)
    if D2:
        dk2 = added(dk2, ds, qt2, PRECISION, ACC)
    return dk, dk2, dv


@triton.jit
def _store_rows(x, total, at, ok, broken, BREAKS: tl.constexpr, COL: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Columns COL on of rows `at` (in units of D); NaN where the lengths make no sense."""
    d = COL + tl.arange(0, DP)
    if BREAKS:
        total = tl.where(broken, float("nan"), total)
    tl.store(x + (at[:, None] * D + d[None, :]), total.to(x.dtype.element_ty), ok[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["SECTION", "left", "right"])
def _kv_kernel(
    q, q2, k, k2, v, grad_out, delta, shift, grad_k, grad_v, mask, bias, slopes, counts, lists, prefix, used, seed, schedule,
    scale, cap, dropout_p, left, right, SEQ, CONTEXT, KV_HEADS, GROUP, BATCH_KV, SECTION, TOGETHER,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_gb, stride_gs, stride_gh, stride_mb, stride_mh, stride_ms, stride_mk, stride_bb, stride_bh, stride_bs, stride_bk,
    stride_ab, stride_lb, stride_lh, stride_lq,
    D: tl.constexpr, DP: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    NS: tl.constexpr, RIGHT: tl.constexpr, ADDED: tl.constexpr, TMA: tl.constexpr, NEED_K: tl.constexpr, NEED_V: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    bh, slot = slot_of(schedule, tl.cdiv(CONTEXT, BN), BATCH_KV, SECTION)  # longest first when causal
    b, kvh = entry_of(bh, KV_HEADS, 1, TOGETHER)
    tile, k_first, context, first, seq, segment = place(schedule, slot, b, CONTEXT, SEQ, BN)
    limit = context  # of the keys to write
    context, broken = bounded(used, b, context, segment)
    natural, scale, gain = constants(scale, dropout_p, ADDED, EXACT, ACC)
    if cap is not None and EXACT is not None:
        cap = tl.full([], EXACT[1], ACC)
    if seed is not None:
        seed = tl.load(seed)
    drop = (seed, dropout_p, gain)
    if prefix is not None:
        prefix = tl.load(prefix + b)
    geo = (context - seq, context, left, right, prefix)
    options = (mask, (stride_mb, stride_mh, stride_ms, stride_mk), bias, (stride_bb, stride_bh, stride_bs, stride_bk), slopes,
               stride_ab, cap)  # fmt: skip
    queries = (q, q2, grad_out, delta, shift, segment, first, seq, SEQ, KV_HEADS * GROUP,
               (stride_qb, stride_qs, stride_qh), (stride_gb, stride_gs, stride_gh))  # fmt: skip
    k_strides = (stride_kb, stride_ks, stride_kh)
    cols = tile * BN + tl.arange(0, BN)
    kt = load_rows(k, b, kvh, k_first + tile * BN, k_first + context, k_strides, BN, D, DP, TMA, True)
    vt = load_rows(v, b, kvh, k_first + tile * BN, k_first + context, (stride_vb, stride_vs, stride_vh), BN, DV, DVP, TMA, True)
    dk = tl.zeros([BN, DP], ACC)
    dk2 = tl.zeros([BN, D2 if D2 else 16], ACC)
    dv = tl.zeros([BN, DVP], ACC)
    kt2 = kt
    if D2:
        kt2 = load_rows(k2, b, kvh, k_first + tile * BN, k_first + context, k_strides, BN, D, D2, TMA, True, DP)
    keys = (kt, kt2, vt)
    GUARD: tl.constexpr = mask is not None or left is not None or lists is not None  # keys that nothing sees may hold NaN
    if lists is None:
        low, high = row_range(tile * BN, BN, seq, geo, RIGHT)
        begin = low // BM
        per = tl.maximum(tl.cdiv(high, BM) - begin, 0)
        for i in tl.range(0, GROUP * per, num_stages=NS):  # one loop over the group's heads, so that loads pipeline across them
            g = i // per
            row = (begin + i - g * per) * BM
            dk, dk2, dv = _kv_block(dk, dk2, dv, keys, tile * BN, b, kvh * GROUP + g, row, queries, geo, options, drop, scale,
                                    D, DP, D2, DV, DVP, BM, RIGHT, ADDED, GUARD, TMA, ACC, PRECISION)  # fmt: skip
    else:
        for g in tl.range(0, GROUP, num_stages=1):
            h = kvh * GROUP + g
            at = b.to(tl.int64) * stride_lb + h.to(tl.int64) * stride_lh + tile * BN // 128
            blocks = lists + at * stride_lq
            for i in tl.range(0, tl.load(counts + at) * (128 // BM), num_stages=NS):
                row = tl.load(blocks + i // (128 // BM)) * 128 + i % (128 // BM) * BM
                dk, dk2, dv = _kv_block(dk, dk2, dv, keys, tile * BN, b, h, row, queries, geo, options, drop, scale,
                                        D, DP, D2, DV, DVP, BM, RIGHT, ADDED, GUARD, TMA, ACC, PRECISION)  # fmt: skip
    if used is not None:  # keys past the context, perhaps NaN
        dk = no_nan(dk, cols < context)
        dv = no_nan(dv, cols < context)
        if D2:
            dk2 = no_nan(dk2, cols < context)
    at = (b.to(tl.int64) * CONTEXT + k_first + cols) * KV_HEADS + kvh
    BREAKS: tl.constexpr = schedule is not None or used is not None
    if NEED_K:
        _store_rows(grad_k, dk * natural, at, cols < limit, broken, BREAKS, 0, D, DP)
        if D2:
            _store_rows(grad_k, dk2 * natural, at, cols < limit, broken, BREAKS, DP, D, D2)
    if NEED_V:
        _store_rows(grad_v, dv, at, cols < limit, broken, BREAKS, 0, DV, DVP)


@triton.jit
def _q_block(
    dq, dq2, n, rows, seen, tiles, keys, geo, terms, drop, scale,
    D: tl.constexpr, DP: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr,
    RIGHT: tl.constexpr, ADDED: tl.constexpr, GUARD: tl.constexpr, TMA: tl.constexpr, CHECK: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums plus the part of key block n. CHECK: the block may reach past what every row sees; seen: what some row sees.
    The gradients of its logits go to the last but one of `tiles` too, if that is not None."""
    qt, qt2, gt, sh, de, h, bh, q_first, row, seq, grads, CONTEXT = tiles
    k, k2, v, b, kvh, first, k_strides, v_strides = keys
    context = geo[1]
    loaded = load_terms(terms, b, h, row, n * BN, seq, context, rows.shape[0], BN, CHECK, False)
    cols = n * BN + tl.arange(0, BN)
    kt = load_rows(k, b, kvh, first + n * BN, first + context, k_strides, BN, D, DP, TMA, CHECK)
    vt = load_rows(v, b, kvh, first + n * BN, first + context, v_strides, BN, DV, DVP, TMA, CHECK)
    kt2 = kt
    if D2:
        kt2 = load_rows(k2, b, kvh, first + n * BN, first + context, k_strides, BN, D, D2, TMA, CHECK, DP)
    s = product(qt, qt2, kt, kt2, D2, PRECISION, ACC)
    dp = product(gt, gt, vt, vt, 0, PRECISION, ACC)
    p, slope = weights(s, sh[:, None], rows[:, None], cols[None, :], geo, terms, loaded, scale, RIGHT, CHECK, ADDED)
    keep = keep_mask(drop, (q_first + rows)[:, None], cols[None, :], bh)
    UNSEEN: tl.constexpr = (GUARD and CHECK) or terms[0] is not None
    dp = thinned(dp, keep, drop)
    ds = logit_gradient(p, dp, de[:, None], slope, terms[5] is not None, UNSEEN)
    if grads is not None:  # of the bias: before softcap
        given = ds if terms[5] is None else logit_gradient(p, dp, de[:, None], slope, False, UNSEEN)
        store_logit_gradient(grads, given, row, n * BN, seq, CONTEXT, rows.shape[0], BN)
    if UNSEEN:
        live = attended(p, b, h, n * BN, seen, geo, terms, BN, GUARD and CHECK)
        kt = no_nan(kt, live)
        if D2:
            kt2 = no_nan(kt2, live)
    dq = added(dq, ds, kt, PRECISION, ACC)
    if D2:
        dq2 = added(dq2, ds, kt2, PRECISION, ACC)
    return dq, dq2


@triton.jit(do_not_specialize=["SECTION", "left", "right"])
def _q_kernel(
    q, q2, k, k2, v, grad_out, delta, shift, grad_q, grads, mask, bias, slopes, counts, lists, prefix, used, seed, schedule,
    scale, cap, dropout_p, left, right, SEQ, CONTEXT, HEADS, GROUP, BATCH_HEADS, SECTION, TOGETHER,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_gb, stride_gs, stride_gh, stride_mb, stride_mh, stride_ms, stride_mk, stride_bb, stride_bh, stride_bs, stride_bk,
    stride_ab, stride_lb, stride_lh, stride_lq,
    D: tl.constexpr, DP: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    NS: tl.constexpr, RIGHT: tl.constexpr, ADDED: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """grads: None, or `batch heads SEQ CONTEXT` for the gradients of the logits, which every program fills for its rows."""
    bh, slot = slot_of(schedule, tl.cdiv(SEQ, BM), BATCH_HEADS, SECTION)
    b, h = entry_of(bh, HEADS, GROUP, TOGETHER)
    bh = b * HEADS + h
    kvh = h // GROUP
    tile, q_first, seq, first, context, segment = place(schedule, slot, b, SEQ, CONTEXT, BM)
    if RIGHT and schedule is None:
        tile = tl.cdiv(SEQ, BM) - 1 - tile  # longest first
    context, broken = bounded(used, b, context, segment)
    natural, scale, gain = constants(scale, dropout_p, ADDED, EXACT, ACC)
    if cap is not None and EXACT is not None:
        cap = tl.full([], EXACT[1], ACC)
    if seed is not None:
        seed = tl.load(seed)
    drop = (seed, dropout_p, gain)
    if prefix is not None:
        prefix = tl.load(prefix + b)
    geo = (context - seq, context, left, right, prefix)
    if slopes is not None:
        slopes = tl.load(slopes + segment * stride_ab + h, context > 0, other=0.0).to(ACC)
    terms = (mask, (stride_mb, stride_mh, stride_ms, stride_mk), bias, (stride_bb, stride_bh, stride_bs, stride_bk), slopes, cap)
    keys = (k, k2, v, b, kvh, first, (stride_kb, stride_ks, stride_kh), (stride_vb, stride_vs, stride_vh))
    q_strides = (stride_qb, stride_qs, stride_qh)
    row = q_first + tile * BM
    rows = tile * BM + tl.arange(0, BM)
    at = bh.to(tl.int64) * SEQ + q_first + rows
    qt = load_rows(q, b, h, row, q_first + seq, q_strides, BM, D, DP, TMA, True)
    gt = load_rows(grad_out, b, h, row, q_first + seq, (stride_gb, stride_gs, stride_gh), BM, DV, DVP, TMA, True)
    dq = tl.zeros([BM, DP], ACC)
    dq2 = tl.zeros([BM, D2 if D2 else 16], ACC)
    qt2 = qt
    if D2:
        qt2 = load_rows(q2, b, h, row, q_first + seq, q_strides, BM, D, D2, TMA, True, DP)
    sh = tl.load(shift + at, rows < seq, other=float("inf"))
    de = tl.load(delta + at, rows < seq, other=0.0)
    if grads is not None:
        grads += bh.to(tl.int64) * SEQ * CONTEXT
    tiles = (qt, qt2, gt, sh, de, h, bh, q_first, tile * BM, seq, grads, CONTEXT)
    # Keys of a masked block that no row of the tile sees may hold NaN.
    RAGGED: tl.constexpr = TMA and used is not None
    GUARD: tl.constexpr = RAGGED or RIGHT == 2 or left is not None or prefix is not None or lists is not None
    low, full_low, full_high, high = key_range(tile * BM, BM, geo, RIGHT)
    seen = (low, high)
    if lists is None:
        # Every row sees blocks [start, full); those of [begin, end) are seen by some.
        begin = low // BN
        end = tl.cdiv(high, BN)
        start = begin
        full = full_high // BN
        EDGES: tl.constexpr = 1 if left is None else NS
        if left is not None:
            start = tl.minimum(tl.cdiv(full_low, BN), end)
            full = tl.maximum(full, start)
            for n in tl.range(begin, start, num_stages=EDGES):
                dq, dq2 = _q_block(dq, dq2, n, rows, seen, tiles, keys, geo, terms, drop, scale,
                                   D, DP, D2, DV, DVP, BN, RIGHT, ADDED, GUARD, TMA, True, ACC, PRECISION)  # fmt: skip
        for n in tl.range(start, full, num_stages=NS):
            dq, dq2 = _q_block(dq, dq2, n, rows, seen, tiles, keys, geo, terms, drop, scale,
                               D, DP, D2, DV, DVP, BN, RIGHT, ADDED, GUARD, TMA, False, ACC, PRECISION)  # fmt: skip
        for n in tl.range(full, end, num_stages=EDGES):
            dq, dq2 = _q_block(dq, dq2, n, rows, seen, tiles, keys, geo, terms, drop, scale,
                               D, DP, D2, DV, DVP, BN, RIGHT, ADDED, GUARD, TMA, True, ACC, PRECISION)  # fmt: skip
        if grads is not None and (RIGHT or left is not None):
            blocks = tl.cdiv(CONTEXT, BN)
            none = tl.zeros([BM, BN], ACC)
            begin = tl.minimum(begin, blocks)
            for n in tl.range(0, begin, num_stages=1):
                store_logit_gradient(grads, none, tile * BM, n * BN, seq, CONTEXT, BM, BN)
            for n in tl.range(tl.maximum(begin, end), blocks, num_stages=1):
                store_logit_gradient(grads, none, tile * BM, n * BN, seq, CONTEXT, BM, BN)
    else:
        in_map = b.to(tl.int64) * stride_lb + h.to(tl.int64) * stride_lh + tile * BM // 128
        blocks = lists + in_map * stride_lq
        for i in tl.range(0, tl.load(counts + in_map) * (128 // BN), num_stages=NS):
            n = tl.load(blocks + i // (128 // BN)) * (128 // BN) + (128 // BN - 1 - i % (128 // BN))
            dq, dq2 = _q_block(dq, dq2, n, rows, seen, tiles, keys, geo, terms, drop, scale,
                               D, DP, D2, DV, DVP, BN, RIGHT, ADDED, GUARD, TMA, True, ACC, PRECISION)  # fmt: skip
    at = (b.to(tl.int64) * SEQ + q_first + rows) * HEADS + h
    BREAKS: tl.constexpr = schedule is not None or used is not None
    _store_rows(grad_q, dq * natural, at, rows < seq, broken, BREAKS, 0, D, DP)
    if D2:
        _store_rows(grad_q, dq2 * natural, at, rows < seq, broken, BREAKS, DP, D, D2)

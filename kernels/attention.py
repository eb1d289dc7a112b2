"""Softmax attention, forward (FlashAttention-2, Dao 2023, arXiv 2307.08691), in portable Triton.

    logits = scale * q @ k^T  (+ mask),    out = softmax(logits, context) @ v,    lse = log(sum(exp(logits), context))

    q, out   batch seq heads head_dim
    k, v     batch context kv_heads head_dim      heads is a multiple of kv_heads: query head h reads kv head h // group
    lse      batch heads seq                      natural log, fp32 (fp64 for fp64)
    mask     1|batch 1|heads 1|seq context        bool (True: attend) or floating (added; at or below MASKED: not attended)

causal is aligned bottom-right: query i attends key j iff j <= i + context - seq. A row that attends nothing gives out 0
and lse -inf. Keys outside the context and keys that a row-independent mask (padding) hides may hold NaN; keys hidden by
causal or by a mask that varies over rows must be finite, since 0 * NaN is NaN.

HBM, in elements: reads q, k, v and the mask, writes out and lse; the logits never leave the chip.

One program owns BM query rows of one head and walks the keys right to left, so that only the first blocks need the causal
and ragged masks. Q K^T of the next block is issued before the softmax of the current one: the tensor cores then run under
the exponentials on every GPU, without warp specialisation (whose automatic form gives NaN on sm_90 in triton 3.6).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from . import _attention as shared
from ._attention import apply_mask, attended, load_rows, normalise_mask
from ._lang import cdiv, next_power_of_2, tl, triton
from ._launch import descriptor, on_device
from ._launch import launch as _launch
from ._spec import Args, Op, Sizes, Spec, Write, accumulate_dtype
from ._target import Target, target_of
from .attention_backward import BACKWARD

__all__ = ["CONFIGS", "OP", "SPEC", "Config", "configure", "normalise_mask"]


def _flops(sizes: Sizes, args: Args) -> int:
    pairs = shared.allowed_pairs(sizes["seq"], sizes["context"], args["causal"])
    return 4 * sizes["batch"] * sizes["heads"] * sizes["head_dim"] * pairs


SPEC = Spec(
    name="attention",
    reads=shared.QKV,
    writes={
        "out": Write("batch seq heads head_dim", "q"),
        "lse": Write("batch heads seq", "accumulate:q"),
    },
    optional=frozenset({"mask"}),
    any_dtype=frozenset({"mask"}),
    derive=lambda sizes, args: shared.check("attention", sizes, args),
    flops=_flops,
)


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ahead: bool = False  # Q K^T of the next block before the softmax of this one


# (DP at most, bytes an element at most) -> Config, first match wins. Without mask / with mask, whose tile costs registers.
TABLE: dict[str, tuple[tuple[int, int, Config, Config], ...]] = {
    # H200, 2026-11-29, bf16 causal and full, S 4096 to 16384: 128x128 w8 s2 was the fastest form (424-497 TFLOP/s at D=128).
    "hopper": (
        (128, 2, Config(128, 128, 8, 2, True), Config(128, 64, 8, 2, True)),
        (256, 2, Config(128, 64, 8, 2, True), Config(64, 64, 4, 2)),
        (64, 8, Config(64, 64, 4, 2), Config(64, 32, 4, 1)),
        (128, 8, Config(64, 32, 4, 1), Config(64, 32, 4, 1)),
        (256, 8, Config(32, 16, 4, 1), Config(32, 16, 4, 1)),
    ),
    # Not measured: the largest tiles that compile for sm_80 without spilling.
    "ampere": (
        (64, 2, Config(128, 64, 8, 3), Config(128, 32, 8, 2)),
        (128, 2, Config(128, 32, 8, 3), Config(64, 32, 4, 2)),
        (256, 2, Config(64, 32, 4, 2), Config(64, 32, 4, 2)),
        (64, 8, Config(64, 32, 4, 1), Config(64, 32, 4, 1)),
        (256, 8, Config(32, 16, 4, 1), Config(32, 16, 4, 1)),
    ),
    # Not measured: as above, within the 99 KB of sm_86 and the 64 KB of gfx942.
    "small": (
        (64, 2, Config(128, 64, 8, 2), Config(128, 32, 8, 2)),
        (128, 2, Config(128, 32, 8, 2), Config(64, 32, 4, 2)),
        (256, 2, Config(64, 32, 4, 1), Config(64, 32, 4, 1)),
        (64, 8, Config(64, 32, 4, 1), Config(64, 32, 4, 1)),
        (256, 8, Config(32, 16, 4, 1), Config(32, 16, 4, 1)),
    ),
}


def configure(head_dim: int, itemsize: int, masked: bool, target: Target) -> Config:
    dp = next_power_of_2(head_dim)
    rows = TABLE[shared.kind_of(target)]
    masked = masked or target.batch_invariant  # the blocks of keys, and so the order of a row's sums, must not tell them apart
    return next((with_mask if masked else plain) for d, size, plain, with_mask in rows if dp <= d and itemsize <= size)


CONFIGS = tuple(dict.fromkeys(config for rows in TABLE.values() for row in rows for config in row[2:]))


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    sizes = SPEC.axes({"q": q, "k": k, "v": v, "mask": mask, "causal": causal, "scale": scale})
    acc = accumulate_dtype(q.dtype)
    logits, hidden = shared.reference_logits(q, k, mask, causal, scale)
    lse = torch.logsumexp(logits, dim=-1) if sizes["context"] else logits.new_full(logits.shape[:-1], float("-inf"))
    p = torch.exp(logits - lse.masked_fill(lse == float("-inf"), 0)[..., None])
    values = rearrange(v, "batch context kv_heads head_dim -> batch kv_heads 1 context head_dim")
    if hidden is not None:
        values = torch.where(hidden, 0, values)
    out = torch.matmul(p.to(v.dtype).to(acc), values.to(acc)).to(q.dtype)
    return (
        rearrange(out, "batch kv_heads group seq head_dim -> batch seq (kv_heads group) head_dim").contiguous(),
        rearrange(lse, "batch kv_heads group seq -> batch (kv_heads group) seq").contiguous(),
    )


@triton.jit
def _logits(
    q, k, mask, b, kvh, n, rows, SEQ, CONTEXT, stride_kb, stride_ks, stride_kh, stride_ms, stride_mk, scale,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PER_ROW: tl.constexpr,
    TMA: tl.constexpr, CHECK: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits of key block n, unscaled (base-2 units if MASK is 2). CHECK: the block may reach past the causal or ragged edge."""
    kt = load_rows(k, b, kvh, n * BN, CONTEXT, stride_kb, stride_ks, stride_kh, BN, D, DP, TMA, CHECK)
    s = tl.dot(q, kt.T, input_precision=PRECISION, out_dtype=ACC)
    cols = n * BN + tl.arange(0, BN)
    if MASK == 2:
        s = s * scale
    if MASK:
        s = apply_mask(s, mask, rows[:, None], cols[None, :], SEQ, CONTEXT, stride_ms, stride_mk, MASK, PER_ROW)
    if CHECK:
        if CAUSAL:  # which also ends the context, for every row inside SEQ
            s = tl.where((rows + (CONTEXT - SEQ))[:, None] >= cols[None, :], s, float("-inf"))
        else:
            s = tl.where((cols < CONTEXT)[None, :], s, float("-inf"))
    return s


@triton.jit
def _accumulate(
    s, v, mask, b, kvh, n, m, l, acc, CONTEXT, stride_vb, stride_vs, stride_vh, stride_mk, scale,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr, PER_ROW: tl.constexpr,
    TMA: tl.constexpr, CHECK: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One online-softmax step: key block n with logits s into the running maximum m (base 2), sum l and output acc."""
    if MASK == 2:
        new = tl.maximum(m, tl.max(s, 1))
    else:
        new = tl.maximum(m, tl.max(s, 1) * scale)
    if MASK == 2:
        p = tl.math.exp2(s - new[:, None])
    else:
        p = tl.math.exp2(s * scale - new[:, None])
    shrink = tl.math.exp2(m - new)
    l = l * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    vt = load_rows(v, b, kvh, n * BN, CONTEXT, stride_vb, stride_vs, stride_vh, BN, D, DP, TMA, CHECK)
    if MASK and not PER_ROW:
        vt = tl.where(attended(mask, n * BN + tl.arange(0, BN), CONTEXT, stride_mk, MASK)[:, None], vt, 0.0)
    acc = tl.dot(p.to(vt.dtype), vt, acc, input_precision=PRECISION, out_dtype=ACC)
    return new, l, acc


@triton.jit(do_not_specialize=["BATCH_HEADS"])
def _forward_kernel(
    q, k, v, mask, out, lse, scale_log2, SEQ, CONTEXT, HEADS, GROUP, BATCH_HEADS,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_mb, stride_mh, stride_ms, stride_mk,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, NS: tl.constexpr, AHEAD: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PER_ROW: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, EXACT_SCALE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    bh = pid % BATCH_HEADS
    tile = pid // BATCH_HEADS
    # Blocks [0, full) need no causal or ragged mask, [full, end) do, and those from end on attend nothing.
    end = tl.cdiv(CONTEXT, BN)
    full = CONTEXT // BN
    if CAUSAL:
        tile = tl.cdiv(SEQ, BM) - 1 - tile  # longest first
        first = tile * BM + CONTEXT - SEQ  # the last key of the tile's first row
        end = tl.maximum(tl.minimum(end, tl.cdiv(first + BM, BN)), 1)
        full = tl.minimum(full, tl.maximum(first + 1, 0) // BN)
    scale = scale_log2
    if EXACT_SCALE is not None:
        scale = tl.full([], EXACT_SCALE, ACC)
    b = bh // HEADS
    h = bh % HEADS
    kvh = h // GROUP
    if MASK:
        mask += b.to(tl.int64) * stride_mb + h.to(tl.int64) * stride_mh
    rows = tile * BM + tl.arange(0, BM)
    qt = load_rows(q, b, h, tile * BM, SEQ, stride_qb, stride_qs, stride_qh, BM, D, DP, TMA, True)
    # Not -inf: a row that has attended nothing yet would give -inf - -inf. Logits that are not masked lie above it.
    m = tl.full([BM], -3.0e38, ACC)
    l = tl.zeros([BM], ACC)
    acc = tl.zeros([BM, DP], ACC)
    if AHEAD:
        s = _logits(qt, k, mask, b, kvh, end - 1, rows, SEQ, CONTEXT, stride_kb, stride_ks, stride_kh, stride_ms, stride_mk,
                    scale, D, DP, BN, CAUSAL, MASK, PER_ROW, TMA, True, ACC, PRECISION)  # fmt: skip
        if CAUSAL:
            for i in tl.range(0, end - 1 - full, num_stages=NS):
                n = end - 2 - i
                ahead = _logits(qt, k, mask, b, kvh, n, rows, SEQ, CONTEXT, stride_kb, stride_ks, stride_kh, stride_ms, stride_mk,
                                scale, D, DP, BN, CAUSAL, MASK, PER_ROW, TMA, True, ACC, PRECISION)  # fmt: skip
                m, l, acc = _accumulate(s, v, mask, b, kvh, n + 1, m, l, acc, CONTEXT, stride_vb, stride_vs, stride_vh, stride_mk,
                                        scale, D, DP, BN, MASK, PER_ROW, TMA, True, ACC, PRECISION)  # fmt: skip
                s = ahead
        last = tl.minimum(full, end - 1)  # the block that s is of
        for i in tl.range(0, last, num_stages=NS):
            n = last - 1 - i
            ahead = _logits(qt, k, mask, b, kvh, n, rows, SEQ, CONTEXT, stride_kb, stride_ks, stride_kh, stride_ms, stride_mk,
                            scale, D, DP, BN, CAUSAL, MASK, PER_ROW, TMA, False, ACC, PRECISION)  # fmt: skip
            m, l, acc = _accumulate(s, v, mask, b, kvh, n + 1, m, l, acc, CONTEXT, stride_vb, stride_vs, stride_vh, stride_mk,
                                    scale, D, DP, BN, MASK, PER_ROW, TMA, True, ACC, PRECISION)  # fmt: skip
            s = ahead
        m, l, acc = _accumulate(s, v, mask, b, kvh, 0, m, l, acc, CONTEXT, stride_vb, stride_vs, stride_vh, stride_mk,
                                scale, D, DP, BN, MASK, PER_ROW, TMA, True, ACC, PRECISION)  # fmt: skip
    else:
        for i in tl.range(0, end - full, num_stages=NS):
            n = end - 1 - i
            s = _logits(qt, k, mask, b, kvh, n, rows, SEQ, CONTEXT, stride_kb, stride_ks, stride_kh, stride_ms, stride_mk,
                        scale, D, DP, BN, CAUSAL, MASK, PER_ROW, TMA, True, ACC, PRECISION)  # fmt: skip
            m, l, acc = _accumulate(s, v, mask, b, kvh, n, m, l, acc, CONTEXT, stride_vb, stride_vs, stride_vh, stride_mk,
                                    scale, D, DP, BN, MASK, PER_ROW, TMA, True, ACC, PRECISION)  # fmt: skip
        for i in tl.range(0, full, num_stages=NS):
            n = full - 1 - i
            s = _logits(qt, k, mask, b, kvh, n, rows, SEQ, CONTEXT, stride_kb, stride_ks, stride_kh, stride_ms, stride_mk,
                        scale, D, DP, BN, CAUSAL, MASK, PER_ROW, TMA, False, ACC, PRECISION)  # fmt: skip
            m, l, acc = _accumulate(s, v, mask, b, kvh, n, m, l, acc, CONTEXT, stride_vb, stride_vs, stride_vh, stride_mk,
                                    scale, D, DP, BN, MASK, PER_ROW, TMA, False, ACC, PRECISION)  # fmt: skip
    tl.store(lse + bh.to(tl.int64) * SEQ + rows, (m + tl.math.log2(l)) * 0.6931471805599453, rows < SEQ)
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    d = tl.arange(0, DP)
    at = out + ((b.to(tl.int64) * SEQ + rows.to(tl.int64)) * HEADS + h)[:, None] * D + d[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), (rows < SEQ)[:, None] & (d < D)[None, :])


def launch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    args = {"q": q, "k": k, "v": v, "mask": mask, "causal": causal, "scale": scale}
    sizes = SPEC.axes(args)
    out, lse = SPEC.empty(args, sizes)
    seq, context, heads, head_dim = (sizes[a] for a in ("seq", "context", "heads", "head_dim"))
    if out.numel() == 0 or context == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    target = target_of(q.device)
    q, k, v = shared.dense_rows(q, k, v)
    tma = shared.uses_tma(target, q, k, v)
    config = configure(head_dim, q.element_size(), mask is not None, target)
    dp, bm, bn = next_power_of_2(head_dim), config.block_m, config.block_n
    mask_arg, mask_strides, mask_constexprs = shared.mask_facts(mask)
    operands = [descriptor(shared.by_head(t), [1, 1, n, dp]) if tma else t for t, n in ((q, bm), (k, bn), (v, bn))]
    batch_heads = sizes["batch"] * heads
    with on_device(q):
        _launch(
            _forward_kernel, (cdiv(seq, bm) * batch_heads,),
            (*operands, mask_arg, out, lse, scale * shared.LOG2E, seq, context, heads, sizes["group"], batch_heads,
             *shared.row_strides(q, tma), *shared.row_strides(k, tma), *shared.row_strides(v, tma), *mask_strides),
            {"D": head_dim, "DP": dp, "BM": bm, "BN": bn, "NS": config.num_stages, "AHEAD": config.ahead, "CAUSAL": causal,
             **mask_constexprs, "TMA": tma, **shared.numerics(scale * shared.LOG2E, q.dtype, target),
             "num_warps": config.num_warps, "num_stages": config.num_stages},
        )  # fmt: skip
    return out, lse


OP = Op(SPEC, launch, reference, BACKWARD)

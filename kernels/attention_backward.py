"""Softmax attention, backward: recomputes the logits (FlashAttention-2, Dao 2023, arXiv 2307.08691), deterministic.

    p = exp(logits - lse)          delta = sum(out * grad_out, head_dim)          ds = p * (grad_out @ v^T - delta)
    grad_q = scale * ds @ k        grad_k = scale * ds^T @ q                      grad_v = p^T @ grad_out

Axes, masks and causal as in attention.py; grad_k and grad_v are summed over the query heads of their group. lse and the mask
get no gradient. Rows that attend nothing get and give zero gradients.

Three launches: delta (and lse in the units of the exponentials), then grad_k and grad_v with one program per key tile, then
grad_q with one program per query tile. Nothing is accumulated in memory, so equal inputs give equal bits; the price is 7
matrix products instead of 5.

HBM, in elements: delta reads out, grad_out and lse and writes delta and shift; each of the others reads q, k, v, the mask,
grad_out, delta and shift and writes its gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import einsum, rearrange
from torch import Tensor

from . import _attention as shared
from ._attention import apply_mask, attended, load_rows
from ._lang import cdiv, next_power_of_2, tl, triton
from ._launch import descriptor, on_device
from ._launch import launch as _launch
from ._spec import Args, Op, Sizes, Spec, Stage, Write, accumulate_dtype, flag
from ._target import Target, target_of

DELTA_ROWS = 32
_ANY = flag("need_q", "need_k", "need_v")
_KV = flag("need_k", "need_v")


def _products(sizes: Sizes, args: Args, count: int) -> int:
    """FLOPs of `count` matrix products over the attended pairs."""
    pairs = shared.allowed_pairs(sizes["seq"], sizes["context"], args["causal"])
    return 2 * count * sizes["batch"] * sizes["heads"] * sizes["head_dim"] * pairs


def _kv_flops(sizes: Sizes, args: Args) -> tuple[int, int]:
    # logits; grad_v; and for grad_k: grad_out @ v^T and ds^T @ q.
    return _products(sizes, args, 1 + bool(args["need_v"]) + 2 * bool(args["need_k"])), _products(sizes, args, 4)


def _q_flops(sizes: Sizes, args: Args) -> tuple[int, int]:
    # One kernel for all three gradients would need the logits and grad_out @ v^T once.
    return _products(sizes, args, 1 if args["need_k"] else 2 if args["need_v"] else 3), _products(sizes, args, 3)


_OPERANDS = ("q", "k", "v", "mask", "grad_out", "delta", "shift")
SPEC = Spec(
    name="attention_backward",
    reads={**shared.QKV, "grad_out": "batch seq heads head_dim", "out": "batch seq heads head_dim", "lse": "batch heads seq"},
    writes={
        "grad_q": Write("batch seq heads head_dim", "q", flag("need_q")),
        "grad_k": Write("batch context kv_heads head_dim", "k", flag("need_k")),
        "grad_v": Write("batch context kv_heads head_dim", "v", flag("need_v")),
    },
    optional=frozenset({"mask"}),
    any_dtype=frozenset({"mask", "lse"}),
    derive=lambda sizes, args: shared.check("attention_backward", sizes, args),
    scratch={
        "delta": Write("batch heads seq", "accumulate:q", _ANY),
        "shift": Write("batch heads seq", "accumulate:q", _ANY),
    },
    stages=(
        Stage("attention_backward_delta", ("out", "grad_out", "lse"), ("delta", "shift"),
              lambda s, a: 2 * s["batch"] * s["heads"] * s["seq"] * s["head_dim"]),
        Stage("attention_backward_kv", _OPERANDS, ("grad_k", "grad_v"), _kv_flops),
        Stage("attention_backward_q", _OPERANDS, ("grad_q",), _q_flops),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Query rows, keys, warps and stages of a tile: of the grad_k and grad_v kernel, or of the grad_q kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (DP at most, bytes an element at most) -> Config, first match wins: (kv, q), (kv with a mask, q with a mask).
Row = tuple[int, int, tuple[Config, Config], tuple[Config, Config]]
TABLE: dict[str, tuple[Row, ...]] = {
    # H200, 2026-11-29, bf16, D=128: kv 64x128 w8 s2 and q 128x64 w8 s3 gave 370-404 TFLOP/s for the whole backward.
    "hopper": (
        (128, 2, (Config(64, 128, 8, 2), Config(128, 64, 8, 3)), (Config(64, 64, 8, 2), Config(128, 64, 8, 2))),
        (256, 2, (Config(32, 64, 8, 2), Config(128, 32, 8, 2)), (Config(32, 64, 8, 2), Config(64, 32, 8, 2))),
        (64, 8, (Config(16, 64, 4, 1), Config(64, 32, 4, 2)), (Config(16, 64, 4, 1), Config(64, 32, 4, 2))),
        (256, 8, (Config(16, 16, 4, 2), Config(16, 16, 4, 2)), (Config(16, 16, 4, 2), Config(16, 16, 4, 2))),
    ),
    # Not measured: the largest tiles that compile for sm_80 without spilling.
    "ampere": (
        (64, 2, (Config(64, 128, 8, 2), Config(64, 64, 8, 2)), (Config(32, 64, 4, 2), Config(64, 32, 8, 2))),
        (128, 2, (Config(64, 64, 8, 2), Config(64, 64, 8, 2)), (Config(32, 64, 8, 2), Config(64, 64, 8, 1))),
        (256, 2, (Config(32, 32, 8, 1), Config(32, 32, 8, 1)), (Config(32, 32, 8, 1), Config(32, 32, 8, 1))),
        (64, 8, (Config(32, 32, 4, 1), Config(32, 32, 4, 1)), (Config(32, 32, 4, 1), Config(32, 32, 4, 1))),
        (256, 8, (Config(16, 16, 4, 1), Config(16, 16, 4, 1)), (Config(16, 16, 4, 1), Config(16, 16, 4, 1))),
    ),
    # Not measured: as above, within the 99 KB of sm_86 and the 64 KB of gfx942.
    "small": (
        (64, 2, (Config(64, 64, 8, 1), Config(64, 64, 8, 1)), (Config(32, 64, 4, 1), Config(64, 32, 8, 1))),
        (128, 2, (Config(32, 64, 8, 1), Config(64, 32, 8, 1)), (Config(32, 64, 8, 1), Config(64, 32, 8, 1))),
        (256, 2, (Config(32, 32, 8, 1), Config(32, 32, 8, 1)), (Config(32, 32, 8, 1), Config(32, 32, 8, 1))),
        (64, 8, (Config(32, 32, 4, 1), Config(32, 32, 4, 1)), (Config(32, 32, 4, 1), Config(32, 32, 4, 1))),
        (256, 8, (Config(16, 16, 4, 1), Config(16, 16, 4, 1)), (Config(16, 16, 4, 1), Config(16, 16, 4, 1))),
    ),
}


def configure(head_dim: int, itemsize: int, masked: bool, target: Target) -> tuple[Config, Config]:
    """Configs of the grad_k and grad_v kernel and of the grad_q kernel."""
    dp = next_power_of_2(head_dim)
    rows = TABLE[shared.kind_of(target)]
    return next((with_mask if masked else plain) for d, size, plain, with_mask in rows if dp <= d and itemsize <= size)


CONFIGS = tuple(dict.fromkeys(pair for rows in TABLE.values() for row in rows for pair in row[2:]))


def reference(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor,
    causal: bool, scale: float, need_q: bool, need_k: bool, need_v: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    acc, kv_heads = accumulate_dtype(q.dtype), k.shape[2]
    logits, hidden = shared.reference_logits(q, k, mask, causal, scale)
    by_group = "batch seq (kv_heads group) head_dim -> batch kv_heads group seq head_dim"
    by_key = "batch context kv_heads head_dim -> batch kv_heads 1 context head_dim"
    rows, grad = (rearrange(t.to(acc), by_group, kv_heads=kv_heads) for t in (q, grad_out))
    keys, values = (rearrange(t.to(acc), by_key) for t in (k, v))
    if hidden is not None:
        keys, values = torch.where(hidden, 0, keys), torch.where(hidden, 0, values)
    shift = rearrange(lse.to(acc), "batch (kv_heads group) seq -> batch kv_heads group seq 1", kv_heads=kv_heads)
    p = torch.exp(logits - shift.masked_fill(shift == float("-inf"), float("inf")))
    delta = einsum(out.to(acc), grad_out.to(acc), "batch seq heads head_dim, batch seq heads head_dim -> batch heads seq")
    delta = rearrange(delta, "batch (kv_heads group) seq -> batch kv_heads group seq 1", kv_heads=kv_heads)
    ds = p * (torch.matmul(grad, values.transpose(-1, -2)) - delta) * scale
    back = "batch kv_heads group seq head_dim -> batch seq (kv_heads group) head_dim"
    to_keys = "batch kv_heads group seq context, batch kv_heads group seq head_dim -> batch context kv_heads head_dim"
    none = q.new_empty(0)
    return (
        rearrange(torch.matmul(ds, keys), back).to(q.dtype).contiguous() if need_q else none,
        einsum(ds, rows, to_keys).to(k.dtype).contiguous() if need_k else none.clone(),
        einsum(p, grad, to_keys).to(v.dtype).contiguous() if need_v else none.clone(),
    )


@triton.jit
def _delta_kernel(
    out, grad_out, lse, delta, shift, SEQ, HEADS, BATCH_HEADS,
    stride_ob, stride_os, stride_oh, stride_gb, stride_gs, stride_gh,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    bh = pid % BATCH_HEADS
    row = (pid // BATCH_HEADS) * ROWS
    o = load_rows(out, bh // HEADS, bh % HEADS, row, SEQ, stride_ob, stride_os, stride_oh, ROWS, D, DP, False, True)
    g = load_rows(grad_out, bh // HEADS, bh % HEADS, row, SEQ, stride_gb, stride_gs, stride_gh, ROWS, D, DP, False, True)
    rows = row + tl.arange(0, ROWS)
    at = bh.to(tl.int64) * SEQ + rows
    tl.store(delta + at, tl.sum(o.to(ACC) * g.to(ACC), 1), rows < SEQ)
    s = tl.load(lse + at, rows < SEQ, other=0.0)
    # exp2(logits - inf) is 0: what rows that attended nothing need.
    tl.store(shift + at, tl.where(s == float("-inf"), float("inf"), s * 1.4426950408889634), rows < SEQ)


@triton.jit
def _kv_kernel(
    q, k, v, mask, grad_out, delta, shift, grad_k, grad_v, scale, SEQ, CONTEXT, KV_HEADS, GROUP, BATCH_KV,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_gb, stride_gs, stride_gh, stride_mb, stride_mh, stride_ms, stride_mk,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, NS: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, PER_ROW: tl.constexpr, TMA: tl.constexpr, NEED_K: tl.constexpr, NEED_V: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, EXACT_SCALE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    n = pid // BATCH_KV  # longest first when causal
    b = pid % BATCH_KV // KV_HEADS
    kvh = pid % KV_HEADS
    if EXACT_SCALE is not None:
        scale = tl.full([], EXACT_SCALE, ACC)
    scale_log2 = scale * 1.4426950408889634
    cols = n * BN + tl.arange(0, BN)
    kt = load_rows(k, b, kvh, n * BN, CONTEXT, stride_kb, stride_ks, stride_kh, BN, D, DP, TMA, True)
    vt = load_rows(v, b, kvh, n * BN, CONTEXT, stride_vb, stride_vs, stride_vh, BN, D, DP, TMA, True)
    dk = tl.zeros([BN, DP], ACC)
    dv = tl.zeros([BN, DP], ACC)
    first = 0
    if CAUSAL:
        first = tl.maximum(n * BN + SEQ - CONTEXT, 0) // BM
    per = tl.cdiv(SEQ, BM) - first
    for i in tl.range(0, GROUP * per, num_stages=NS):  # one loop over the group's heads, so that loads pipeline across them
        g = i // per
        row = (first + i - g * per) * BM
        h = kvh * GROUP + g
        rows = row + tl.arange(0, BM)
        at = (b * KV_HEADS * GROUP + h).to(tl.int64) * SEQ + rows
        qt = load_rows(q, b, h, row, SEQ, stride_qb, stride_qs, stride_qh, BM, D, DP, TMA, True)
        gt = load_rows(grad_out, b, h, row, SEQ, stride_gb, stride_gs, stride_gh, BM, D, DP, TMA, True)
        sh = tl.load(shift + at, rows < SEQ, other=float("inf"))
        de = tl.load(delta + at, rows < SEQ, other=0.0)
        s = tl.dot(kt, qt.T, input_precision=PRECISION, out_dtype=ACC)
        s = s * scale_log2
        if MASK:
            at_head = mask + (b.to(tl.int64) * stride_mb + h.to(tl.int64) * stride_mh)
            s = apply_mask(s, at_head, rows[None, :], cols[:, None], SEQ, CONTEXT, stride_ms, stride_mk, MASK, PER_ROW)
        p = tl.math.exp2(s - sh[None, :])
        if CAUSAL:
            p = tl.where((rows + (CONTEXT - SEQ))[None, :] >= cols[:, None], p, 0.0)
        dv = tl.dot(p.to(gt.dtype), gt, dv, input_precision=PRECISION, out_dtype=ACC)
        dp = tl.dot(vt, gt.T, input_precision=PRECISION, out_dtype=ACC)
        ds = p * (dp - de[None, :])
        if MASK:  # a hidden value may be NaN
            ds = tl.where(p == 0.0, 0.0, ds)
        dk = tl.dot(ds.to(qt.dtype), qt, dk, input_precision=PRECISION, out_dtype=ACC)
    d = tl.arange(0, DP)
    at = ((b.to(tl.int64) * CONTEXT + cols) * KV_HEADS + kvh)[:, None] * D + d[None, :]
    ok = (cols < CONTEXT)[:, None] & (d < D)[None, :]
    if NEED_K:
        tl.store(grad_k + at, (dk * scale).to(grad_k.dtype.element_ty), ok)
    if NEED_V:
        tl.store(grad_v + at, dv.to(grad_v.dtype.element_ty), ok)


@triton.jit
def _q_block(
    qt, gt, sh, de, dq, k, v, mask, b, kvh, n, rows, SEQ, CONTEXT,
    stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_ms, stride_mk, scale_log2,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, PER_ROW: tl.constexpr,
    TMA: tl.constexpr, CHECK: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq plus the part of key block n. CHECK: the block may reach past the causal or ragged edge."""
    cols = n * BN + tl.arange(0, BN)
    kt = load_rows(k, b, kvh, n * BN, CONTEXT, stride_kb, stride_ks, stride_kh, BN, D, DP, TMA, CHECK)
    vt = load_rows(v, b, kvh, n * BN, CONTEXT, stride_vb, stride_vs, stride_vh, BN, D, DP, TMA, CHECK)
    if MASK and not PER_ROW:  # hidden keys may hold NaN
        kt = tl.where(attended(mask, cols, CONTEXT, stride_mk, MASK)[:, None], kt, 0.0)
    s = tl.dot(qt, kt.T, input_precision=PRECISION, out_dtype=ACC)
    dp = tl.dot(gt, vt.T, input_precision=PRECISION, out_dtype=ACC)
    s = s * scale_log2
    if MASK:
        s = apply_mask(s, mask, rows[:, None], cols[None, :], SEQ, CONTEXT, stride_ms, stride_mk, MASK, PER_ROW)
    p = tl.math.exp2(s - sh[:, None])
    if CHECK:
        if CAUSAL:
            p = tl.where((rows + (CONTEXT - SEQ))[:, None] >= cols[None, :], p, 0.0)
        else:
            p = tl.where((cols < CONTEXT)[None, :], p, 0.0)
    ds = p * (dp - de[:, None])
    if MASK:
        ds = tl.where(p == 0.0, 0.0, ds)
    return tl.dot(ds.to(kt.dtype), kt, dq, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def _q_kernel(
    q, k, v, mask, grad_out, delta, shift, grad_q, scale, SEQ, CONTEXT, HEADS, GROUP, BATCH_HEADS,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_gb, stride_gs, stride_gh, stride_mb, stride_mh, stride_ms, stride_mk,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, NS: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, PER_ROW: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    EXACT_SCALE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    bh = pid % BATCH_HEADS
    tile = pid // BATCH_HEADS
    end = tl.cdiv(CONTEXT, BN)
    full = CONTEXT // BN
    if CAUSAL:
        tile = tl.cdiv(SEQ, BM) - 1 - tile  # longest first
        first = tile * BM + CONTEXT - SEQ
        end = tl.maximum(tl.minimum(end, tl.cdiv(first + BM, BN)), 0)
        full = tl.minimum(full, tl.maximum(first + 1, 0) // BN)
    if EXACT_SCALE is not None:
        scale = tl.full([], EXACT_SCALE, ACC)
    scale_log2 = scale * 1.4426950408889634
    b = bh // HEADS
    h = bh % HEADS
    kvh = h // GROUP
    if MASK:
        mask += b.to(tl.int64) * stride_mb + h.to(tl.int64) * stride_mh
    rows = tile * BM + tl.arange(0, BM)
    at = bh.to(tl.int64) * SEQ + rows
    qt = load_rows(q, b, h, tile * BM, SEQ, stride_qb, stride_qs, stride_qh, BM, D, DP, TMA, True)
    gt = load_rows(grad_out, b, h, tile * BM, SEQ, stride_gb, stride_gs, stride_gh, BM, D, DP, TMA, True)
    sh = tl.load(shift + at, rows < SEQ, other=float("inf"))
    de = tl.load(delta + at, rows < SEQ, other=0.0)
    dq = tl.zeros([BM, DP], ACC)
    for n in tl.range(0, full, num_stages=NS):
        dq = _q_block(qt, gt, sh, de, dq, k, v, mask, b, kvh, n, rows, SEQ, CONTEXT,
                      stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_ms, stride_mk, scale_log2,
                      D, DP, BN, CAUSAL, MASK, PER_ROW, TMA, False, ACC, PRECISION)  # fmt: skip
    for n in tl.range(full, end, num_stages=1):
        dq = _q_block(qt, gt, sh, de, dq, k, v, mask, b, kvh, n, rows, SEQ, CONTEXT,
                      stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_ms, stride_mk, scale_log2,
                      D, DP, BN, CAUSAL, MASK, PER_ROW, TMA, True, ACC, PRECISION)  # fmt: skip
    d = tl.arange(0, DP)
    at = ((b.to(tl.int64) * SEQ + rows) * HEADS + h)[:, None] * D + d[None, :]
    tl.store(grad_q + at, (dq * scale).to(grad_q.dtype.element_ty), (rows < SEQ)[:, None] & (d < D)[None, :])


def launch(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor,
    causal: bool, scale: float, need_q: bool, need_k: bool, need_v: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    args = {"q": q, "k": k, "v": v, "mask": mask, "grad_out": grad_out, "out": out, "lse": lse, "causal": causal,
            "scale": scale, "need_q": need_q, "need_k": need_k, "need_v": need_v}  # fmt: skip
    sizes = SPEC.axes(args)
    grad_q, grad_k, grad_v = SPEC.empty(args, sizes)
    batch, seq, heads, context, kv_heads, head_dim = (
        sizes[axis] for axis in ("batch", "seq", "heads", "context", "kv_heads", "head_dim")
    )
    if q.numel() == 0 or context == 0:
        return grad_q.zero_(), grad_k.zero_(), grad_v.zero_()
    if not (need_q or need_k or need_v):
        return grad_q, grad_k, grad_v
    delta, shift = SPEC.empty_scratch(args, sizes)
    q, k, v, grad_out, out = shared.dense_rows(q, k, v, grad_out, out)
    lse = lse.contiguous()
    target = target_of(q.device)
    tma = shared.uses_tma(target, q, k, v, grad_out)
    kv_config, q_config = configure(head_dim, q.element_size(), mask is not None, target)
    dp = next_power_of_2(head_dim)
    mask_arg, mask_strides, mask_constexprs = shared.mask_facts(mask)
    strides = tuple(stride for t in (q, k, v, grad_out) for stride in shared.row_strides(t, tma)) + mask_strides
    shapes = {"D": head_dim, "DP": dp}
    numerics = shared.numerics(scale, q.dtype, target)

    def operands(config: Config) -> list[object]:
        rows = ((q, config.block_m), (k, config.block_n), (v, config.block_n), (grad_out, config.block_m))
        *qkv, grad = [descriptor(shared.by_head(t), [1, 1, n, dp]) if tma else t for t, n in rows]
        return [*qkv, mask_arg, grad, delta, shift]

    def constexprs(config: Config, **more: bool) -> dict[str, object]:
        return {**shapes, "BM": config.block_m, "BN": config.block_n, "NS": config.num_stages, "CAUSAL": causal,
                **mask_constexprs, "TMA": tma, **more, **numerics,
                "num_warps": config.num_warps, "num_stages": config.num_stages}  # fmt: skip

    with on_device(q):
        _launch(
            _delta_kernel, (cdiv(seq, DELTA_ROWS) * batch * heads,),
            (out, grad_out, lse, delta, shift, seq, heads, batch * heads, *out.stride()[:3], *grad_out.stride()[:3]),
            {"ROWS": DELTA_ROWS, **shapes, "ACC": numerics["ACC"], "num_warps": 4},
        )  # fmt: skip
        if need_k or need_v:
            _launch(
                _kv_kernel, (cdiv(context, kv_config.block_n) * batch * kv_heads,),
                (*operands(kv_config), grad_k, grad_v, scale, seq, context, kv_heads, sizes["group"], batch * kv_heads, *strides),
                constexprs(kv_config, NEED_K=need_k, NEED_V=need_v),
            )  # fmt: skip
        if need_q:
            _launch(
                _q_kernel, (cdiv(seq, q_config.block_m) * batch * heads,),
                (*operands(q_config), grad_q, scale, seq, context, heads, sizes["group"], batch * heads, *strides),
                constexprs(q_config),
            )  # fmt: skip
    return grad_q, grad_k, grad_v


BACKWARD = Op(SPEC, launch, reference)

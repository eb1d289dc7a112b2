"""Rotary position embedding of queries and keys in one launch (Su et al. 2021, arXiv 2104.09864), and its backward.

    y[a] = u[a] * cos[i] - u[b] * sin[i]
    y[b] = u[b] * cos[i] + u[a] * sin[i]          for the pairs (a, b) = pair i, i < half_rotary; other features pass

    half split      (a, b) = (i, i + half_rotary)               GPT-NeoX, Llama
    interleaved     (a, b) = (2i, 2i + 1)                       the paper, GPT-J, Cohere

    q          batch seq heads head_dim            k   batch seq kv_heads head_dim
    cos, sin   1|batch seq half_rotary, of any dtype and any strides; 2 * half_rotary <= head_dim

The backward turns the gradients by the opposite angle. The kernel is also the elementwise part of qkv_rope's backward: there
it goes on through the per-head norm, whose statistics it takes again from the values before it:

    rms     u = w * p * rstd                   layer   u = w * (p - mean(p)) * rstd               over head_dim
    grad_p = rstd * (g - xhat * mean(g * xhat) [- mean(g) for layer]),   g = grad_u * w
    grad_w = sum of grad_u * xhat over tokens, as partial sums of each program in a fixed order and a second launch

HBM, in elements: reads q, k, cos, sin once, writes q, k; with the norm also reads the values before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from ._gemm import accumulator, sum_rows_kernel
from ._lang import cdiv, next_power_of_2, tl, triton
from ._launch import contiguous_last, on_device
from ._launch import launch as _launch
from ._spec import Args, Op, ShapeError, Sizes, Spec, Write, accumulate_dtype, flag
from ._target import Target

TABLES = {"cos": "1|batch seq half_rotary", "sin": "1|batch seq half_rotary"}


def check_head_dim(name: str, sizes: Sizes) -> None:
    """head_dim is one that the kernels take, and the tables are not wider than it."""
    head_dim, turned = sizes["head_dim"], 2 * sizes.get("half_rotary", 0)
    if not 16 <= head_dim <= 256 or head_dim % 8:
        raise ValueError(f"{name}: head_dim={head_dim}, expected 16 to 256 in multiples of 8")
    if turned > head_dim:
        raise ShapeError(f"{name}: cos has half_rotary={turned // 2}, expected at most head_dim/2={head_dim // 2}")


def _check(sizes: Sizes, args: Args) -> dict[str, int]:
    check_head_dim("rope", sizes)
    return {}


_HEADS = {"q": "batch seq heads head_dim", "k": "batch seq kv_heads head_dim"}

SPEC = Spec(
    name="rope",
    reads={**_HEADS, **TABLES},
    any_dtype=frozenset(TABLES),
    writes={n: Write(axes, "q") for n, axes in _HEADS.items()},
    derive=_check,
    flops=lambda s, a: s["batch"] * s["seq"] * (s["heads"] + s["kv_heads"]) * 6 * s["half_rotary"],
)


def rotate(u: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """u `batch seq heads head_dim` in the dtype of sums, cos and sin `1|batch seq half_rotary`; of u's dtype and layout."""
    cos, sin = (rearrange(t.to(u.dtype), "batch seq half -> batch seq 1 half") for t in (cos, sin))
    n = 2 * cos.shape[-1]
    pairs = "(half two)" if interleaved else "(two half)"
    a, b = rearrange(u[..., :n], f"batch seq heads {pairs} -> two batch seq heads half", two=2)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin))
    return torch.cat((rearrange(turned, f"two batch seq heads half -> batch seq heads {pairs}"), u[..., n:]), -1)


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    acc = accumulate_dtype(q.dtype)
    return rotate(q.to(acc), cos, sin, interleaved).to(q.dtype), rotate(k.to(acc), cos, sin, interleaved).to(q.dtype)


def strides_of(t: Tensor | None) -> tuple[int, int]:
    """Of a table: batch (0: one for all) and seq."""
    return (0, 0) if t is None else (t.stride(0) if t.shape[0] > 1 else 0, t.stride(1))


def one_step(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor | None, Tensor | None, int]:
    """The tables, and how far the next angle lies in both: 1, or 2 where each is held twice.

    A constant of the kernels: with addresses computed at run time they spill. Tables that differ in it are copied.
    """
    if cos is None or sin is None:
        return None, None, 1
    if cos.stride(2) != sin.stride(2):
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, cos.stride(2)


def pair_distance(head_dim: int, half_rotary: int, interleaved: bool, columns: int) -> int:
    """How far apart the features of a pair lie where a tile of `columns` keeps their order; 0: it has to reorder them."""
    if interleaved:
        return 1
    power = half_rotary == next_power_of_2(half_rotary)
    return half_rotary if power and 0 < 2 * half_rotary <= columns else 0


@triton.jit
def load_table(t, rows, i, M, SEQ, stride_b, stride_s, ONE: tl.constexpr, HR: tl.constexpr, STEP: tl.constexpr,
               ACC: tl.constexpr):  # fmt: skip
    """cos (ONE) or sin of the pairs i of rows: [rows, i]. Pairs that do not turn have the angle 0."""
    at = (rows // SEQ).to(tl.int64) * stride_b + (rows % SEQ).to(tl.int64) * stride_s
    return tl.load(t + at[:, None] + i[None, :] * STEP, (rows < M)[:, None] & (i < HR)[None, :], other=ONE).to(ACC)


@triton.jit
def _load_pairs(src, at, a, b, ok_a, ok_b, ok, HD: tl.constexpr, HP: tl.constexpr, INTERLEAVED: tl.constexpr, ACC: tl.constexpr):
    """The two features of every pair, [rows, HP / 2] each, zero outside."""
    if INTERLEAVED:  # one load of what lies together
        j = tl.arange(0, HP)
        x = tl.load(src + at[:, None] + j[None, :], ok[:, None] & (j < HD)[None, :], other=0.0)
        u, v = tl.split(tl.reshape(x, (at.shape[0], HP // 2, 2)))
    else:
        u = tl.load(src + at[:, None] + a[None, :], ok[:, None] & ok_a[None, :], other=0.0)
        v = tl.load(src + at[:, None] + b[None, :], ok[:, None] & ok_b[None, :], other=0.0)
    return u.to(ACC), v.to(ACC)


@triton.jit
def _store_pairs(dst, at, a, b, ok_a, ok_b, ok, u, v, HD: tl.constexpr, HP: tl.constexpr, INTERLEAVED: tl.constexpr):
    T: tl.constexpr = dst.dtype.element_ty
    if INTERLEAVED:
        j = tl.arange(0, HP)
        x = tl.reshape(tl.join(u.to(T), v.to(T)), (at.shape[0], HP))
        tl.store(dst + at[:, None] + j[None, :], x, ok[:, None] & (j < HD)[None, :])
    else:
        tl.store(dst + at[:, None] + a[None, :], u.to(T), ok[:, None] & ok_a[None, :])
        tl.store(dst + at[:, None] + b[None, :], v.to(T), ok[:, None] & ok_b[None, :])


@triton.jit
def _turn(
    x, pre, weight, out, partial, head, heads, cos, sin, M, SEQ, stride_b, stride_s, stride_h, stride_w,
    cos_b, cos_s, sin_b, sin_s, eps, weight_offset,
    HD: tl.constexpr, HP: tl.constexpr, HR: tl.constexpr, W: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
    KIND: tl.constexpr, STEP: tl.constexpr, BM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One head of this program's rows."""
    HALF: tl.constexpr = HP // 2
    i = tl.arange(0, HALF)
    if W > 0:  # natural order: runs of W features that turn with the W after them
        a = i // W * (2 * W) + i % W
        b = a + W
        ok_a = a < HD
        ok_b = b < HD
    else:
        ok_a = i < HD // 2
        ok_b = ok_a
        a = i
        b = i + HR
        if 2 * HR < HD:  # those that pass, in pairs after the others
            a = tl.where(i < HR, a, i + HR)
            b = tl.where(i < HR, b, i + HD // 2)
    if pre is not None:
        wu = tl.load(weight + head * stride_w + a, ok_a, other=0.0).to(ACC) + weight_offset
        wv = tl.load(weight + head * stride_w + b, ok_b, other=0.0).to(ACC) + weight_offset
        dwu = tl.zeros([HALF], ACC)
        dwv = tl.zeros([HALF], ACC)
    for t in range(tl.program_id(0), tl.cdiv(M, BM), tl.num_programs(0)):
        rows = t * BM + tl.arange(0, BM)
        ok = rows < M
        at = (rows // SEQ).to(tl.int64) * stride_b + (rows % SEQ).to(tl.int64) * stride_s + head * stride_h
        dense = (rows.to(tl.int64) * heads + head) * HD
        u, v = _load_pairs(x, at, a, b, ok_a, ok_b, ok, HD, HP, INTERLEAVED, ACC)
        if cos is not None:
            c = load_table(cos, rows, i, M, SEQ, cos_b, cos_s, 1.0, HR, STEP, ACC)
            s = load_table(sin, rows, i, M, SEQ, sin_b, sin_s, 0.0, HR, STEP, ACC)
            if BACK:
                s = -s
            turned = u * c - v * s
            v = v * c + u * s
            u = turned
        if pre is not None:
            pu, pv = _load_pairs(pre, dense, a, b, ok_a, ok_b, ok, HD, HP, INTERLEAVED, ACC)
            if KIND == "layer":
                mean = tl.sum(pu + pv, 1) / HD
                pu = tl.where(ok_a[None, :], pu - mean[:, None], 0.0)
                pv = tl.where(ok_b[None, :], pv - mean[:, None], 0.0)
            rstd = (1.0 / tl.sqrt(tl.sum(pu * pu + pv * pv, 1) / HD + eps)).to(ACC)[:, None]
            pu = pu * rstd
            pv = pv * rstd
            if partial is not None:
                dwu += tl.sum(u * pu, 0)
                dwv += tl.sum(v * pv, 0)
            u = u * wu[None, :]
            v = v * wv[None, :]
            along = (tl.sum(u * pu + v * pv, 1) / HD)[:, None]
            if KIND == "layer":
                mean = (tl.sum(u + v, 1) / HD)[:, None]
                u = u - mean
                v = v - mean
            u = rstd * (u - pu * along)
            v = rstd * (v - pv * along)
        _store_pairs(out, dense, a, b, ok_a, ok_b, ok, u, v, HD, HP, INTERLEAVED)
    if partial is not None:
        at = (tl.program_id(0) * heads + head).to(tl.int64) * HD
        tl.store(partial + at + a, dwu, ok_a)
        tl.store(partial + at + b, dwv, ok_b)


@triton.jit
def _turn_kernel(
    q, k, pre_q, pre_k, weight_q, weight_k, out_q, out_k, partial_q, partial_k, cos, sin, M, SEQ, HEADS, KV_HEADS,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_wq, stride_wk,
    cos_b, cos_s, sin_b, sin_s, eps, weight_offset,
    HD: tl.constexpr, HP: tl.constexpr, HR: tl.constexpr, W: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
    KIND: tl.constexpr, STEP: tl.constexpr, BM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    if head < HEADS:
        _turn(q, pre_q, weight_q, out_q, partial_q, head, HEADS, cos, sin, M, SEQ, stride_qb, stride_qs, stride_qh, stride_wq,
              cos_b, cos_s, sin_b, sin_s, eps, weight_offset, HD, HP, HR, W, INTERLEAVED, BACK, KIND,
              STEP, BM, ACC)
    else:
        _turn(k, pre_k, weight_k, out_k, partial_k, head - HEADS, KV_HEADS, cos, sin, M, SEQ, stride_kb, stride_ks, stride_kh,
              stride_wk, cos_b, cos_s, sin_b, sin_s, eps, weight_offset,
              HD, HP, HR, W, INTERLEAVED, BACK, KIND,
              STEP, BM, ACC)  # fmt: skip


ROWS = 16  # of one head in a tile


def norm_programs(tokens: int, heads: int, target: Target) -> int:
    """Programs of a head where each leaves a partial sum: as many as fill the GPU."""
    return min(cdiv(tokens, ROWS), max(1, 8 * target.sms // max(1, heads)))


def turn(
    xs: Sequence[Tensor], outs: Sequence[Tensor], cos: Tensor | None, sin: Tensor | None, interleaved: bool, *,
    back: bool = False, pre: Sequence[Tensor | None] = (None, None), norms: Sequence[Tensor | None] = (None, None),
    partials: Sequence[Tensor | None] = (None, None), kind: str = "", eps: float = 0.0, weight_offset: float = 0.0,
) -> None:  # fmt: skip
    """One launch over the heads of both xs `batch seq heads head_dim`, into outs, dense; an x without heads is left out.

    With norms `1|heads head_dim` the turned values go back through the norm of pre, dense; partials `programs heads head_dim`
    get the sums for the gradients of norms.
    """
    batch, seq, _, head_dim = xs[0].shape
    m, heads, half = batch * seq, [x.shape[2] for x in xs], head_dim // 2 if cos is None else cos.shape[2]
    hp, (cos, sin, step) = next_power_of_2(head_dim), one_step(cos, sin)
    xs = [contiguous_last(x) for x in xs]
    weights = [None if w is None else contiguous_last(w) for w in norms]
    of_weights = [w.stride(0) if w is not None and w.shape[0] > 1 else 0 for w in weights]
    summed = next((p for p in partials if p is not None), None)
    programs = cdiv(m, ROWS) if summed is None else summed.shape[0]
    _launch(
        _turn_kernel, (programs, sum(heads)),
        (*xs, *pre, *weights, *outs, *partials, cos, sin, m, seq, *heads, *[n for x in xs for n in x.stride()[:3]], *of_weights,
         *strides_of(cos), *strides_of(sin), eps, weight_offset),
        {"HD": head_dim, "HP": hp, "HR": half, "W": pair_distance(head_dim, half, interleaved, hp), "INTERLEAVED": interleaved,
         "BACK": back, "KIND": kind, "STEP": step, "BM": ROWS, "ACC": accumulator(xs[0]), "num_warps": 4},
    )  # fmt: skip


def sum_partials(partial: Tensor, dw: Tensor) -> None:
    """dw `1|heads head_dim` = sum of partial `programs heads head_dim`, in a fixed order."""
    rows, cols = partial.shape[0] * (partial.shape[1] // dw.shape[0] if dw.shape[0] else 0), dw.shape[0] * dw.shape[1]
    _launch(
        sum_rows_kernel, (cdiv(cols, 16),), (partial, dw, None, rows, cols, cols, cols),
        {"BLOCK_R": 256, "BLOCK": 16, "ACC": accumulator(partial), "num_warps": 4},
    )  # fmt: skip


def launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    args = {"q": q, "k": k, "cos": cos, "sin": sin}
    outs = SPEC.empty(args)
    with on_device(q):
        turn((q, k), outs, cos, sin, interleaved)
    return outs  # type: ignore[return-value]


BACKWARD_SPEC = Spec(
    name="rope_backward",
    reads={"grad_q": _HEADS["q"], "grad_k": _HEADS["k"], **TABLES},
    any_dtype=frozenset(TABLES),
    writes={f"grad_{n}": Write(axes, "grad_q", flag(f"need_{n}")) for n, axes in _HEADS.items()},
    derive=_check,
    flops=lambda s, a: s["batch"] * s["seq"] * 6 * s["half_rotary"] * (
        s["heads"] * a["need_q"] + s["kv_heads"] * a["need_k"]
    ),
)  # fmt: skip


def backward_reference(
    grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, need_q: bool, need_k: bool
) -> tuple[Tensor, Tensor]:
    acc = accumulate_dtype(grad_q.dtype)
    return tuple(
        rotate(g.to(acc), cos, -sin, interleaved).to(g.dtype) if need else g.new_empty(0)
        for g, need in ((grad_q, need_q), (grad_k, need_k))
    )  # type: ignore[return-value]


def backward_launch(
    grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, need_q: bool, need_k: bool
) -> tuple[Tensor, Tensor]:
    args = {"grad_q": grad_q, "grad_k": grad_k, "cos": cos, "sin": sin, "need_q": need_q, "need_k": need_k}
    outs = BACKWARD_SPEC.empty(args)
    grads = [g if need else g[:, :, :0] for g, need in ((grad_q, need_q), (grad_k, need_k))]
    with on_device(grad_q):
        turn(grads, outs, cos, sin, interleaved, back=True)
    return outs  # type: ignore[return-value]


OP = Op(SPEC, launch, reference, Op(BACKWARD_SPEC, backward_launch, backward_reference))

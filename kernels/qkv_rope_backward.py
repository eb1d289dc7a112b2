"""Backward of qkv_rope: one elementwise launch, then the gradient GEMMs.

    turned_q, turned_k = grad_q, grad_k turned back and then back through the per-head norm (rope.py); with neither, as they are
    grad_x             = turned_q @ q_weight + turned_k @ k_weight + grad_v @ v_weight              one launch
    grad_weight        = turned.T @ x                                                               a launch each
    grad_bias          = sum of turned over tokens                                                  a launch each
    grad_q_norm, grad_k_norm                    from the elementwise launch's partial sums          a launch each

Axes are those of qkv_rope. What has no use is not launched: frozen parameters skip their GEMMs.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import einsum, reduce
from torch import Tensor

from ._gemm import grad_input, grad_weight, sum_rows
from ._launch import contiguous_last, on_device
from ._spec import Args, Op, Sizes, Spec, Stage, Write, accumulate_dtype, flag
from ._target import target_of
from .rope import TABLES, check_head_dim, norm_programs, rotate, sum_partials, turn

WEIGHTS = {"q_weight": "heads head_dim hidden", **{f"{n}_weight": "kv_heads head_dim hidden" for n in "kv"}}
BIASES = {"q_bias": "heads head_dim", **{f"{n}_bias": "kv_heads head_dim" for n in "kv"}}
NORMS = {"q_norm": "1|heads head_dim", "k_norm": "1|kv_heads head_dim"}
NORM_KINDS = ("rms", "layer")


def check(name: str, sizes: Sizes, args: Args) -> dict[str, int]:
    """Everything about the arguments that their axes alone do not say."""
    check_head_dim(name, sizes)
    for pair in (TABLES, NORMS):
        (one, a), (other, b) = ((n, "None" if args[n] is None else "a tensor") for n in pair)
        if a != b:
            raise ValueError(f"{name}: {one} is {a}, but {other} is {b}: both or neither")
    if args["q_norm"] is not None and args["norm_kind"] not in NORM_KINDS:
        raise ValueError(f"{name}: norm_kind={args['norm_kind']!r}, expected one of {', '.join(map(repr, NORM_KINDS))}")
    return {f"{n}_heads": 1 if args[n] is None else args[n].shape[0] for n in NORMS}


def _check(sizes: Sizes, args: Args) -> dict[str, int]:
    if args["q_norm"] is not None and args["q_pre"] is None:
        raise ValueError("qkv_rope_backward: q_norm is given, but q_pre is None: the forward did not save")
    derived = check("qkv_rope_backward", sizes, args)
    programs = norm_programs(sizes["batch"] * sizes["seq"], sizes["heads"] + sizes["kv_heads"], target_of(args["x"].device))
    return {**derived, "programs": programs}


def head_flops(sizes: Sizes, args: Args) -> int:
    """Of norm and rotation of one head of one token."""
    norm = 0 if args["q_norm"] is None else sizes["head_dim"] * (4 if args["norm_kind"] == "rms" else 6)
    return norm + 6 * sizes.get("half_rotary", 0)


def _turn_flops(sizes: Sizes, args: Args) -> int:
    """Of the way back through both, of one head of one token."""
    norm = 0 if args["q_norm"] is None else sizes["head_dim"] * (13 if args["norm_kind"] == "rms" else 16)
    return norm + 6 * sizes.get("half_rotary", 0)


def _turns(args: Args) -> bool:
    """Whether the elementwise launch has anything to do."""
    return (args["cos"] is not None or args["q_norm"] is not None) and any(
        args[f"need_{n}"] for n in ("x", "q_weight", "q_bias", "q_norm", "k_weight", "k_bias", "k_norm")
    )


BACKWARD_SPEC = Spec(
    name="qkv_rope_backward",
    reads={"grad_q": "batch seq heads head_dim", "grad_k": "batch seq kv_heads head_dim",
           "grad_v": "batch seq kv_heads head_dim", "x": "batch seq hidden", **WEIGHTS, **TABLES, **NORMS,
           "q_pre": "batch seq heads head_dim", "k_pre": "batch seq kv_heads head_dim"},
    optional=frozenset({*TABLES, *NORMS, "q_pre", "k_pre"}),
    any_dtype=frozenset({*TABLES, *NORMS}),
    writes={
        "grad_x": Write("batch seq hidden", "x", flag("need_x")),
        **{f"grad_{n}": Write(axes, "x", flag(f"need_{n}")) for n, axes in {**WEIGHTS, **BIASES}.items()},
        **{f"grad_{n}": Write(f"{n}_heads head_dim", f"{n}|x", flag(f"need_{n}")) for n in NORMS},
    },
    derive=_check,
    scratch={
        "turned_q": Write("batch seq heads head_dim", "x", _turns),
        "turned_k": Write("batch seq kv_heads head_dim", "x", _turns),
        "partial_q": Write("programs heads head_dim", "accumulate:x", flag("need_q_norm")),
        "partial_k": Write("programs kv_heads head_dim", "accumulate:x", flag("need_k_norm")),
    },
    stages=(
        Stage("qkv_rope_backward", ("grad_q", "grad_k", *TABLES, *NORMS, "q_pre", "k_pre"),
              ("turned_q", "turned_k", "partial_q", "partial_k"),
              lambda s, a: s["batch"] * s["seq"] * (s["heads"] + s["kv_heads"]) * _turn_flops(s, a)),
        *[Stage("sum_rows", (f"partial_{n}",), (f"grad_{n}_norm",),
                lambda s, a, heads=heads: s["programs"] * s[heads] * s["head_dim"])  # type: ignore[misc]
          for n, heads in (("q", "heads"), ("k", "kv_heads"))],
        Stage("grad_input", ("turned_q|grad_q", "turned_k|grad_k", "grad_v", *WEIGHTS), ("grad_x",),
              lambda s, a: 2 * s["batch"] * s["seq"] * (s["heads"] + 2 * s["kv_heads"]) * s["head_dim"] * s["hidden"]),
        *[Stage("grad_weight", (dy, "x"), (f"grad_{w}",),
                lambda s, a, heads=heads: 2 * s["batch"] * s["seq"] * s[heads] * s["head_dim"] * s["hidden"])  # type: ignore[misc]
          for dy, w, heads in (("turned_q|grad_q", "q_weight", "heads"), ("turned_k|grad_k", "k_weight", "kv_heads"),
                               ("grad_v", "v_weight", "kv_heads"))],
        *[Stage("sum_rows", (dy,), (f"grad_{b}",),
                lambda s, a, heads=heads: s["batch"] * s["seq"] * s[heads] * s["head_dim"])  # type: ignore[misc]
          for dy, b, heads in (("turned_q|grad_q", "q_bias", "heads"), ("turned_k|grad_k", "k_bias", "kv_heads"),
                               ("grad_v", "v_bias", "kv_heads"))],
    ),
)  # fmt: skip


def _norm_backward(dy: Tensor, p: Tensor, weight: Tensor, kind: str, eps: float, weight_offset: float) -> tuple[Tensor, Tensor]:
    """Gradients of p `batch seq heads head_dim` and of weight `1|heads head_dim`, in the dtype of sums."""
    if kind == "layer":
        p = p - p.mean(-1, keepdim=True)
    rstd = torch.rsqrt(p.square().mean(-1, keepdim=True) + eps)
    xhat = p * rstd
    g = dy * (weight.to(p.dtype) + weight_offset)
    dp = g - xhat * (g * xhat).mean(-1, keepdim=True)
    if kind == "layer":
        dp = dp - g.mean(-1, keepdim=True)
    heads = "heads" if weight.shape[0] == p.shape[2] else "1"
    return rstd * dp, reduce(dy * xhat, f"batch seq heads head_dim -> {heads} head_dim", "sum")


def backward_reference(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, x: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor,
    cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, q_pre: Tensor | None,
    k_pre: Tensor | None, interleaved: bool, norm_kind: str, eps: float, weight_offset: float,
    need_x: bool, need_q_weight: bool, need_k_weight: bool, need_v_weight: bool, need_q_bias: bool, need_k_bias: bool,
    need_v_bias: bool, need_q_norm: bool, need_k_norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    acc = accumulate_dtype(x.dtype)
    dys, norms = [], []
    for dy, pre, norm, need in ((grad_q, q_pre, q_norm, need_q_norm), (grad_k, k_pre, k_norm, need_k_norm)):
        d = dy.to(acc)
        if cos is not None and sin is not None:
            d = rotate(d, cos, -sin, interleaved)
        norms.append(x.new_empty(0) if norm is None else norm.new_empty(0))  # absent results are apart from one another
        if norm is not None and pre is not None:
            d, dw = _norm_backward(d, pre.to(acc), norm, norm_kind, eps, weight_offset)
            if need:
                norms[-1] = dw.to(norm.dtype)
        dys.append(d.to(x.dtype))
    dys.append(grad_v)
    weights = (q_weight, k_weight, v_weight)
    dx = x.new_empty(0)
    if need_x:
        into = "b s heads d, heads d hidden -> b s hidden"
        dx = sum(einsum(d.to(acc), w.to(acc), into) for d, w in zip(dys, weights)).to(x.dtype)  # type: ignore[union-attr]
    dws = [einsum(d, x, "b s heads d, b s hidden -> heads d hidden") if need else x.new_empty(0)
           for d, need in zip(dys, (need_q_weight, need_k_weight, need_v_weight))]  # fmt: skip
    dbs = [reduce(d, "b s heads d -> heads d", "sum") if need else x.new_empty(0)
           for d, need in zip(dys, (need_q_bias, need_k_bias, need_v_bias))]  # fmt: skip
    return dx, *dws, *dbs, *norms  # type: ignore[return-value]


def backward_launch(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, x: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor,
    cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, q_pre: Tensor | None,
    k_pre: Tensor | None, interleaved: bool, norm_kind: str, eps: float, weight_offset: float,
    need_x: bool, need_q_weight: bool, need_k_weight: bool, need_v_weight: bool, need_q_bias: bool, need_k_bias: bool,
    need_v_bias: bool, need_q_norm: bool, need_k_norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    args: dict[str, Any] = dict(locals())
    sizes = BACKWARD_SPEC.axes(args)
    dx, *grads = BACKWARD_SPEC.empty(args, sizes)
    m, hidden, head_dim = sizes["batch"] * sizes["seq"], sizes["hidden"], sizes["head_dim"]
    rows = contiguous_last(x).reshape(m, hidden)
    turned = [grad_q, grad_k]
    with on_device(x):
        if _turns(args):
            *turned, partial_q, partial_k = BACKWARD_SPEC.empty_scratch(args, sizes)
            partials = [p if need else None for p, need in ((partial_q, need_q_norm), (partial_k, need_k_norm))]
            turn((grad_q, grad_k), turned, cos, sin, interleaved, back=True,
                 pre=[None if p is None else p.contiguous() for p in (q_pre, k_pre)], norms=(q_norm, k_norm),
                 partials=partials, kind=norm_kind, eps=eps, weight_offset=weight_offset)  # fmt: skip
            for partial, dw in zip(partials, grads[6:]):
                if partial is not None:
                    sum_partials(partial, dw)
        dys = [g.contiguous().view(m, g.shape[2] * head_dim) for g in (*turned, grad_v)]
        if need_x:
            grad_input(dys, [w.flatten(0, 1) for w in (q_weight, k_weight, v_weight)], dx.view(m, hidden))
        for dy, dw, need in zip(dys, grads[:3], (need_q_weight, need_k_weight, need_v_weight)):
            if need:
                grad_weight(dy, rows, dw.view(-1, hidden))
        for dy, db, need in zip(dys, grads[3:6], (need_q_bias, need_k_bias, need_v_bias)):
            if need:
                sum_rows(dy, db.view(-1))
    return dx, *grads  # type: ignore[return-value]


BACKWARD = Op(BACKWARD_SPEC, backward_launch, backward_reference)

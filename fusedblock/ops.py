"""The operators: each registered once from its `Op` in kernels/ (registry.py says how), and as a function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedblock.kernels import _target
from fusedblock.kernels import attention as _attention
from fusedblock.kernels import decode_attention as _decode_attention
from fusedblock.kernels import gated_mlp as _gated_mlp
from fusedblock.kernels import linear as _linear
from fusedblock.kernels import moe_experts as _moe_experts
from fusedblock.kernels import moe_index as _moe_index
from fusedblock.kernels import moe_linear as _moe_linear
from fusedblock.kernels import moe_route as _moe_route
from fusedblock.kernels import norm as _norm
from fusedblock.kernels import plain_mlp as _plain_mlp
from fusedblock.kernels import qkv_rope as _qkv_rope
from fusedblock.kernels import rope as _rope
from fusedblock.kernels._attention import READS as _READS
from fusedblock.kernels._attention import normalise_mask
from fusedblock.kernels._attention_choice import Choice, choose
from fusedblock.kernels._attention_skeleton import Skeleton, skeleton
from fusedblock.kernels._graphs import beside
from fusedblock.kernels._launch import capturing
from fusedblock.kernels._math import check_activation, plain_activate
from fusedblock.kernels._moe import CLAMPED, check_gate, choose_tile_rows, form, index_of
from fusedblock.kernels._replay import Fixed
from fusedblock.kernels._router import RouterSpec, check_router
from fusedblock.kernels._spec import ShapeError
from fusedblock.kernels._target import Target, target_of
from fusedblock.kernels.decode_attention import Problem as DecodeProblem
from fusedblock.kernels.decode_attention import launches as decode_launches
from fusedblock.kernels.moe_route import launches as route_launches
from fusedblock.kernels.static_cache import fits as fits_slots
from fusedblock.kernels.static_cache import store as store_slots
from fusedblock.options import current
from fusedblock.registry import (
    COSTS,
    OPS,
    Composite,
    define,
    define_composite,
    direct,
    dispatched,
    empty,
    refuse_gradients,
    register,
)

__all__ = [
    "CLAMPED", "COSTS", "OPS", "Choice", "Composite", "DecodeProblem", "Fixed", "RouterSpec", "ShapeError", "Skeleton", "Target",
    "attention_args", "call_attention", "check_activation", "check_gate", "check_router", "choose", "choose_tile_rows",
    "batch_invariant", "beside", "capturing", "decode_launches", "define", "define_composite", "deterministic", "direct",
    "dispatched", "empty", "fits_slots", "form", "gated_mlp", "layer_norm", "linear", "moe_experts", "moe_index", "moe_linear",
    "moe_route", "normalise_mask", "plain_activate", "plain_mlp", "refuse_gradients", "qkv_rope", "rms_norm", "rope",
    "route_launches", "skeleton", "store_slots", "target_of", "wants_grad",
]  # fmt: skip


@torch.compiler.assume_constant_result  # torch.compile cannot trace it
def batch_invariant() -> bool:
    return current().batch_invariant


@torch.compiler.assume_constant_result
def deterministic() -> bool:
    """By our option or by torch's. An argument of the ops that it matters to: a compiled backward runs under nobody's options."""
    return current().deterministic or torch.are_deterministic_algorithms_enabled()


_target.batch_invariant = batch_invariant
_norm_op = register(_norm.OP)
_linear_op = register(_linear.OP)
_qkv_rope_op = register(_qkv_rope.OP)
_rope_op = register(_rope.OP)
_gated_mlp_op = register(_gated_mlp.OP)
_plain_mlp_op = register(_plain_mlp.OP)
_moe_experts_op = register(_moe_experts.OP)
_attention_op = register(_attention.OP)
_decode_attention_op = register(_decode_attention.OP)
_moe_route_op = register(_moe_route.OP)
_moe_index_op = register(_moe_index.OP)
_moe_linear_op = register(_moe_linear.OP)


def wants_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _rows(name: str, arg: str, x: Tensor) -> Tensor:
    if x.dim() < 1:
        raise ShapeError(f"{name}: {arg} has shape {tuple(x.shape)}, expected (... hidden)")
    return x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(x.shape[:-1].numel(), 0)


def _norm_rows(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, kind: str, eps: float,
               weight_offset: float = 0.0, round_early: bool = False) -> Tensor:  # fmt: skip
    if not 0.0 <= eps < float("inf"):
        raise ValueError(f"{name}: eps={eps}, expected a finite number of at least 0")
    if residual is not None and residual.shape != x.shape:
        raise ShapeError(f"{name}: residual has shape {tuple(residual.shape)}, expected {tuple(x.shape)}")
    r = None if residual is None else _rows(name, "residual", residual)
    dtype = x.dtype if residual is None else residual.dtype
    save = wants_grad(x, weight, bias)
    y, _, _ = _norm_op(_rows(name, "x", x), weight, bias, r, kind, eps, weight_offset, round_early, save, dtype)
    return y.view(x.shape)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6, weight_offset: float = 0.0, round_early: bool = True,
             residual: Tensor | None = None) -> Tensor:  # fmt: skip
    """RMSNorm over the last axis: residual + (weight + weight_offset) * x / sqrt(mean(x**2) + eps)  (Zhang & Sennrich 2019).

    x `... hidden` and weight `hidden`, fp32, fp16 or bf16 each; residual `... hidden`. Returns `... hidden` in the residual's
    dtype, else x's. Statistics are fp32. round_early rounds the normalised x to x's dtype before the weight multiplies it, as
    HF's Llama does; False forms the product in fp32 (OLMo2, gpt-oss; Gemma with weight_offset=1). The product is rounded to
    x's dtype before the residual is added. Raises ShapeError or ValueError naming the argument and both values.
    """
    return _norm_rows("rms_norm", x, weight, None, residual, "rms", eps, weight_offset, round_early)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5,
               residual: Tensor | None = None) -> Tensor:  # fmt: skip
    """LayerNorm over the last axis: residual + weight * (x - mean(x)) / sqrt(var(x) + eps) + bias  (Ba et al. 2016).

    x `... hidden`, weight and bias `hidden` of one dtype, fp32, fp16 or bf16; residual `... hidden`. Returns `... hidden` in
    the residual's dtype, else x's. Statistics are fp32, exact to that for means far larger than the deviation too. What is
    normed is rounded to x's dtype before the residual is added. Raises ShapeError or ValueError naming the argument and both
    values.
    """
    return _norm_rows("layer_norm", x, weight, bias, residual, "layer", eps)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, residual: Tensor | None = None,
           scale: float = 1.0) -> Tensor:  # fmt: skip
    """residual + scale * (x @ weight.T + bias) in one launch.

    x `... in_features`, weight `out_features in_features` (dense rows or dense columns, read in place), bias `out_features`,
    residual `... out_features`; one dtype, but the residual may be fp32 with fp16 or bf16, and the result has its dtype.
    Sums in fp32, rounded once. Raises ShapeError or ValueError naming the argument and both values.
    """
    if not abs(scale) < float("inf"):
        raise ValueError(f"linear: scale={scale}, expected a finite number")
    if residual is not None and residual.shape[:-1] != x.shape[:-1]:
        expected = (*x.shape[:-1], *weight.shape[:1])
        raise ShapeError(f"linear: residual has shape {tuple(residual.shape)}, expected {tuple(expected)}")
    r = None if residual is None else _rows("linear", "residual", residual)
    out, _, _ = _linear_op(_rows("linear", "x", x), weight, bias, r, None, scale)
    return out.view(*x.shape[:-1], weight.shape[0])


def _heads_of(arg: str, t: Tensor | None, head_dim: int) -> Any:
    """A weight `rows hidden` or a bias `rows` as `heads head_dim ...`: a view."""
    if t is None:
        return None
    if t.dim() < 1 or head_dim < 1 or t.shape[0] % head_dim:
        raise ShapeError(f"qkv_rope: {arg} has shape {tuple(t.shape)}, expected a multiple of head_dim={head_dim} rows")
    return t.unflatten(0, (-1, head_dim))


def qkv_rope(x: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor, cos: Tensor | None = None,
             sin: Tensor | None = None, *, head_dim: int, q_bias: Tensor | None = None, k_bias: Tensor | None = None,
             v_bias: Tensor | None = None, interleaved: bool = False, q_norm: Tensor | None = None,
             k_norm: Tensor | None = None, norm_kind: str = "rms", eps: float = 1e-6, weight_offset: float = 0.0,
             round_early: bool = True) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k, v = x @ weight.T + bias, then per-head norm and rotary position embedding (arXiv 2104.09864) on q and k.

    x `batch seq hidden`; q_weight `heads*head_dim hidden`, k_weight and v_weight `kv_heads*head_dim hidden`, biases their
    rows. q_norm `heads head_dim` or `head_dim` and k_norm alike, of any dtype: the norm over head_dim, norm_kind "rms" or
    "layer" (mean-subtracting), with eps, weight_offset and round_early as rms_norm has them. cos and sin
    `batch|1 seq half_rotary`, of any dtype: as rope has them. Weights and tables may be views of any strides. Returns q
    `batch seq heads head_dim`, k and v `batch seq kv_heads head_dim`. All is done on the fp32 sums, before the one rounding.
    Raises ShapeError or ValueError naming the argument and both values.
    """
    weights = [_heads_of(f"{n}_weight", t, head_dim) for n, t in zip("qkv", (q_weight, k_weight, v_weight))]
    biases = [_heads_of(f"{n}_bias", t, head_dim) for n, t in zip("qkv", (q_bias, k_bias, v_bias))]
    norms = [t[None] if t is not None and t.dim() == 1 else t for t in (q_norm, k_norm)]
    save = q_norm is not None and wants_grad(x, *weights, *biases, *norms)
    q, k, v, _, _ = _qkv_rope_op(x, *weights, *biases, cos, sin, None, *norms, interleaved, norm_kind, eps, weight_offset,
                                 round_early, save)  # fmt: skip
    return q, k, v


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of q and k in one launch (RoFormer, arXiv 2104.09864).

    q `batch seq heads head_dim`, k `batch seq kv_heads head_dim`; cos and sin `batch|1 seq half_rotary`, of any dtype and any
    strides: angle i turns feature i with feature i + half_rotary (of HF's tables that is the first half), or with interleaved
    feature 2i with feature 2i + 1. Features from 2 * half_rotary on pass. Returns the two, turned. Raises ShapeError or
    ValueError naming the argument and both values.
    """
    return _rope_op(q, k, cos, sin, interleaved)


def gated_mlp(x: Tensor, gate_weight: Tensor, up_weight: Tensor, *, activation: str = "silu",
              gate_bias: Tensor | None = None, up_bias: Tensor | None = None) -> Tensor:  # fmt: skip
    """activation(x @ gate_weight.T + gate_bias) * (x @ up_weight.T + up_bias)  (GLU variants, arXiv 2002.05202).

    x `... hidden`, weights `ffn hidden`, biases `ffn`; activation "silu", "gelu" (erf), "gelu_tanh", "relu" or "relu2".
    Returns `... ffn`. With gradients wanted the two pre-activations are kept. Raises ShapeError or ValueError naming the
    argument and both values.
    """
    save = wants_grad(x, gate_weight, up_weight, gate_bias, up_bias)
    rows = _rows("gated_mlp", "x", x)
    out, _, _ = _gated_mlp_op(rows, gate_weight, up_weight, gate_bias, up_bias, None, activation, 0.0, save)
    return out.view(*x.shape[:-1], gate_weight.shape[0])


def plain_mlp(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str) -> Tensor:
    """activation(x @ weight.T + bias): the first half of a two-layer MLP in one launch.

    x `... hidden`, weight `ffn hidden` (dense rows or dense columns, read in place), bias `ffn`; activation "silu", "gelu"
    (erf), "gelu_tanh", "relu" or "relu2" (relu squared), on the fp32 sums. Returns `... ffn`. With gradients wanted the
    pre-activation is kept. Raises ShapeError or ValueError naming the argument and both values.
    """
    out, _ = _plain_mlp_op(_rows("plain_mlp", "x", x), weight, bias, activation, wants_grad(x, weight, bias))
    return out.view(*x.shape[:-1], weight.shape[0])


def moe_route(x: Tensor, weight: Tensor, spec: RouterSpec, bias: Tensor | None = None, correction_bias: Tensor | None = None, *,
              tile_rows: int) -> tuple[Tensor, ...]:  # fmt: skip
    """A router's weights and indices `tokens top_k`, logits `tokens experts`, and the index that moe_experts reads: order,
    inverse, offsets and tiles of tile_rows rows (_moe_index.py). x `tokens hidden`, weight `experts hidden`. See moe_route.py."""
    for name, t, given in (("bias", bias, spec.bias), ("correction_bias", correction_bias, spec.correction_bias)):
        if (t is not None) != given:
            raise ValueError(f"moe_route: {name} is {'None' if t is None else 'a tensor'}, but the router has {name}={given}")
    return _moe_route_op(x, weight, bias, correction_bias, *spec.numbers(x.dtype), tile_rows)


def moe_index(indices: Tensor, experts: int, tile_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """order, inverse, offsets and tiles of given choices `tokens top_k`. See kernels/moe_index.py."""
    return _moe_index_op(indices, experts, tile_rows)


def moe_experts(
    x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, weights: Tensor, indices: Tensor, index: Sequence[Tensor], *,
    tile_rows: int, activation: str = "silu", gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    alpha: float = 0.0, limit: float = 0.0, transposed: bool = False, interleaved: bool = False, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The residual and each token of x `tokens hidden` through its experts' gated MLPs, summed by its weights `tokens top_k`.
    indices, index (order, inverse, offsets, tiles): of moe_route or moe_index, for tile_rows. See kernels/moe_experts.py."""
    given = (x, gate_up_weight, down_weight, gate_up_bias, down_bias, weights)
    how = (activation, alpha, limit, transposed, interleaved, tile_rows)
    return _moe_experts_op(*given, indices, *index_of("moe_experts", index), *how, wants_grad(*given), residual)[0]


def moe_linear(
    x: Tensor, weight: Tensor, indices: Tensor, index: Sequence[Tensor], *, tile_rows: int, weights: Tensor | None = None,
    heads: int = 1, transposed: bool = False, bias: Tensor | None = None, out_bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Each token by the matrices of its experts, weight `experts out in` (transposed: `experts in out`), bias `experts out`.

    Without weights: x `tokens in` to every product, `tokens heads*top_k width` with heads * width = out. With weights `tokens
    top_k`: x `tokens heads*top_k width`, heads * width = in, to the sum of its products by them, the residual `tokens out` and
    out_bias `out`: `tokens out`. indices, index (order, inverse, offsets, tiles): of moe_route or moe_index, for tile_rows. A
    slot that has no expert gives 0. Sums in fp32. See kernels/moe_linear.py. Raises ShapeError or ValueError naming the argument.
    """
    reduce = weights is not None
    if reduce and (x.dim() != 3 or x.shape[1] != heads * indices.shape[-1]):
        expected = f"(tokens heads*top_k={heads * indices.shape[-1]} width)"
        raise ShapeError(f"moe_linear: x has shape {tuple(x.shape)}, expected {expected} beside weights")
    given = (weight, bias, weights, out_bias, residual, indices, *index_of("moe_linear", index), transposed, heads, tile_rows)
    out = _moe_linear_op(x.flatten(1) if reduce else x, *given)
    return out if reduce else out.unflatten(1, (heads * indices.shape[1], -1))


def attention_args(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None = None, bias: Tensor | None = None,
                   sinks: Tensor | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
                   left: int = -1, right: int = -1, softcap: float = 0.0) -> tuple[Any, ...]:  # fmt: skip
    """Arguments of the ops attention and decode_attention, in order, where nothing else is given. mask: see normalise_mask."""
    known = {"q": q, "k": k, "v": v, "mask": mask, "bias": bias, "sinks": sinks, "cu_seqlens_q": cu_seqlens_q,
             "cu_seqlens_k": cu_seqlens_k}  # fmt: skip
    return (*(known.get(name) for name in _READS), left, right, softcap, scale, 0.0, deterministic())


def call_attention(op: str, args: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """out and lse of an attention op, for its arguments by name in order."""
    return (_decode_attention_op if op == "decode_attention" else _attention_op)(*args.values())

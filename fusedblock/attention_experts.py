"""Attention whose heads are experts: every token chooses its query and output projections, keys and values are shared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedblock import ops
from fusedblock.attention_functions import Window, as_called, attention, explain_attention
from fusedblock.blocks import Mixed
from fusedblock.blocks.functional import target_of
from fusedblock.cache import KVCache
from fusedblock.kernels._spec import Args, Sizes, Spec
from fusedblock.kernels.rope import check_head_dim

__all__ = ["mixture_of_attention"]


@as_called("mixture_of_attention")
def mixture_of_attention(
    x: Tensor, router_weight: Tensor, q_weight: Tensor, kv_weight: Tensor, o_weight: Tensor, cos: Tensor | None = None,
    sin: Tensor | None = None, *, top_k: int, head_dim: int, scoring: str = "softmax_chosen", renormalise: bool = False,
    bias: Tensor | None = None, residual: Tensor | None = None, causal: bool = True, window: Window = None, softcap: float = 0.0,
    mask: Tensor | None = None, scale: float | None = None, interleaved: bool = False, cache: Any = None, layer_idx: int = 0,
) -> Mixed:  # fmt: skip
    """Mixture of attention heads (Zhang et al. 2022, arXiv 2210.05144; JetMoe's attention): router, q of the chosen experts,
    rotary embedding, attention over shared keys and values, o of the same experts, summed by their weights.

        q[j]  = x @ q_weight[e_j].T            of a token's experts e_1 to e_top_k: kv_heads heads each
        k, v  = x @ kv_weight.T                kv_heads heads; head g of every q[j] attends with head g of these
        out   = sum over j of weights_j * attention(q[j], k, v) @ o_weight[e_j].T + bias + residual

    x and residual `batch seq hidden`; router_weight `experts hidden`; q_weight `experts kv_heads*head_dim hidden`; kv_weight
    `2*kv_heads*head_dim hidden`, rows of keys, then of values; o_weight `experts hidden kv_heads*head_dim`; bias `hidden`; all of
    one dtype, fp32, fp16 or bf16. cos and sin `1|batch seq half_rotary`, any dtype, and interleaved: as `rope` has them; None:
    no rotation. scoring: of the router's logits, "softmax_chosen" (over the chosen ones), "softmax" or "sigmoid" (over all);
    renormalise: weights sum to 1. causal, window, softcap, mask, scale: as `attention` has them; a mask's heads are 1, or
    kv_heads*top_k, of which g*top_k + j is head g of q[j].

    cache: a KVCache, or a cache of transformers (update and get_seq_length), of keys and values of layer_idx; cos and sin are of
    the new tokens, and the mask is of all keys. A cache that drops keys has to keep those which the window sees.

    Queries are never sorted nor keys and values repeated: the first product puts heads that share keys in a row, which attention
    wants, and the last gathers them. Returns Mixed: out `batch seq hidden`, the router's logits `tokens experts`, weights and
    int32 indices `tokens top_k`; out, logits and weights have gradients. Raises TypeError, ShapeError or ValueError naming the
    argument, before any launch, and leaves the cache as it was; but that a cache has dropped keys which the window sees is known,
    and raises ValueError, only after its update.
    """
    given = {"x": x, "router_weight": router_weight, "q_weight": q_weight, "kv_weight": kv_weight, "o_weight": o_weight,
             "cos": cos, "sin": sin, "bias": bias, "residual": residual}  # fmt: skip
    for name, t in given.items():
        if not isinstance(t, Tensor) and not (t is None and name in _SPEC.optional):
            raise TypeError(f"mixture_of_attention: {name} is {type(t).__name__}, expected a tensor")
    for name, flag in (("renormalise", renormalise), ("interleaved", interleaved)):
        if not isinstance(flag, bool):
            raise TypeError(f"mixture_of_attention: {name} is {flag!r} ({type(flag).__name__}), expected True or False")
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None and table.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"mixture_of_attention: {name} requires a gradient, and there is none for it")
    sizes = _SPEC.axes({**given, "head_dim": head_dim})
    batch, seq, experts, kv_heads = (sizes[n] for n in ("batch", "seq", "experts", "kv_heads"))
    router = ops.RouterSpec(top_k, scoring=scoring, renormalise=renormalise)
    ops.check_router("mixture_of_attention", vars(router), experts)
    options: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "mask": mask, "scale": scale}
    past = 0 if cache is None else _past(cache, layer_idx, (batch, kv_heads, seq, head_dim), x)
    if not torch.compiler.is_compiling():  # what attention would say, after the cache has grown
        heads = {"q": (seq, kv_heads * top_k), "k": (past + seq, kv_heads), "v": (past + seq, kv_heads)}
        explain_attention(**{n: x.new_empty(1).expand(batch, *shape, head_dim) for n, shape in heads.items()}, **options)

    rows = x.flatten(0, 1)
    tile_rows = ops.choose_tile_rows(len(rows), top_k, experts, x.dtype.itemsize, target_of(x.device))
    weights, indices, logits, *index = ops.moe_route(rows, router_weight, router, tile_rows=tile_rows)
    q = ops.moe_linear(rows, q_weight, indices, index, tile_rows=tile_rows, heads=kv_heads).unflatten(0, (batch, seq))
    k, v = ops.linear(x, kv_weight).unflatten(-1, (2, kv_heads, head_dim)).unbind(2)
    if cos is not None and sin is not None:
        q, k = ops.rope(q, k, cos, sin, interleaved=interleaved)
    if cache is not None:  # of a fixed length it returns its empty slots too
        k, v = (t[:, :, : past + seq].transpose(1, 2) for t in cache.update(k.transpose(1, 2), v.transpose(1, 2), layer_idx))
        left = None if window is None or window[0] == -1 else window[0]
        needed = seq + (past if left is None else min(past, left))
        if k.shape[1] < needed:
            raise ValueError(f"mixture_of_attention: the cache returned {k.shape[1]} keys, {needed} are needed")
    attended = attention(q, k, v, **options)
    assert isinstance(attended, Tensor)
    out = ops.moe_linear(
        attended.flatten(0, 1), o_weight, indices, index, tile_rows=tile_rows, weights=weights, heads=kv_heads,
        out_bias=bias, residual=None if residual is None else residual.flatten(0, 1),
    )  # fmt: skip
    return Mixed(out.view(x.shape), logits, weights, indices)


def _past(cache: Any, layer_idx: int, shape: tuple[int, int, int, int], x: Tensor) -> int:
    """How many tokens the cache has, once it is known that it takes these keys `batch kv_heads seq head_dim`."""
    if not isinstance(layer_idx, int) or layer_idx < 0:
        raise ValueError(f"mixture_of_attention: layer_idx is {layer_idx!r}, expected an integer from 0 on")
    for name in ("update", "get_seq_length"):
        if not callable(getattr(cache, name, None)):
            raise TypeError(f"mixture_of_attention: cache is a {type(cache).__name__} without {name}")
    if isinstance(cache, KVCache):
        cache.check(shape, x.dtype, x.device, layer_idx)
    return int(cache.get_seq_length(layer_idx))


def _related(sizes: Sizes, args: Args) -> dict[str, int]:
    """kv_heads, and axes that are no others' equal."""
    name, width, head_dim = "mixture_of_attention", sizes["kv_heads*head_dim"], args["head_dim"]
    if not isinstance(head_dim, int):
        raise TypeError(f"{name}: head_dim is {head_dim!r} ({type(head_dim).__name__}), expected an integer")
    if head_dim < 1 or width % head_dim or not width:
        raise ops.ShapeError(f"{name}: q_weight has kv_heads*head_dim={width}, expected a multiple of head_dim={head_dim}")
    if sizes["2*kv_heads*head_dim"] != 2 * width:
        rows = sizes["2*kv_heads*head_dim"]
        raise ops.ShapeError(f"{name}: kv_weight has {rows} rows, expected 2*kv_heads*head_dim={2 * width}")
    if (args["cos"] is None) != (args["sin"] is None):
        kinds = ["None" if args[n] is None else "a tensor" for n in ("cos", "sin")]
        raise ValueError(f"{name}: cos is {kinds[0]}, but sin is {kinds[1]}: both or neither")
    if args["cos"] is not None:
        check_head_dim(name, {**sizes, "head_dim": head_dim})
    return {"kv_heads": width // head_dim}


_SPEC = Spec(
    name="mixture_of_attention",
    reads={
        "x": "batch seq hidden", "router_weight": "experts hidden", "q_weight": "experts kv_heads*head_dim hidden",
        "kv_weight": "2*kv_heads*head_dim hidden", "o_weight": "experts hidden kv_heads*head_dim",
        "cos": "1|batch seq half_rotary", "sin": "1|batch seq half_rotary", "bias": "hidden", "residual": "batch seq hidden",
    },
    optional=frozenset({"cos", "sin", "bias", "residual"}),
    any_dtype=frozenset({"cos", "sin"}),
    writes={},
    derive=_related,
)  # fmt: skip

"""From a bound layer and the arguments of one call to a call of fusedblock.blocks, or to the reason there is none.

Nothing here changes anything, and nothing is ignored: what is not understood is a reason to run the original forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from ..blocks import BlockSpec, BlockWeights, Slots
from ..ops import Fixed
from .binding import PLAIN_TENSORS, Binding, type_name
from .interface import autocast_dtype
from .sparse import Mixture

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Of attention: all that a layer may ask for. OURS takes other masks: see `interface.attention_mask`.
OURS = "fusedblock"
IMPLEMENTATIONS = ("eager", "sdpa", OURS)
# Keywords that change nothing in a layer under these, whatever their value. The last two go to the loss, and
# the models pass them on to their layers as well.
HARMLESS = frozenset({
    "position_ids", "use_cache", "output_hidden_states", "output_router_logits", "num_items_in_batch", "shift_labels",
})  # fmt: skip
# Harmless at one value, which is also the default.
HARMLESS_VALUES = {"output_attentions": False}
# What transformers may record of a model whose layers are fused: what layers return, and what their routers say.
RECORDED = frozenset({"hidden_states", "router_logits"})
# Packed sequences: eager and sdpa attention see them in the mask only, ours here too.
PACKING = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})


_CACHES = "transformers.cache_utils"


class Call(NamedTuple):
    """Arguments of fusedblock.blocks.forward, but hidden_states."""

    spec: BlockSpec
    weights: BlockWeights
    cos: Tensor | None
    sin: Tensor | None
    mask: Tensor | None
    causal: bool
    windowed: bool
    cu_seqlens: tuple[Tensor | None, Tensor | None]
    update: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None
    compute_dtype: torch.dtype | None
    own: Mapping[str, nn.Module]
    kept: Fixed | None = None
    slots: Slots | None = None
    mlp: Mixture | None = None


def prepare(
    binding: Binding, x: Tensor, arguments: Mapping[str, Any], cache_names: tuple[str, ...], collector: Any
) -> Call | str:
    """The fused call for a layer's arguments (None everywhere means absent), or why the original forward has to run.

    x `batch seq hidden`; cache_names: what the layer calls its cache, the current name first; collector: transformers'
    record of what the caller wants to see of the model's inside.
    """
    compiling = torch.compiler.is_compiling()
    mask = cache = embeddings = packing = None
    implementation = implementation_of(binding)  # once: transformers' configs take their time
    ours = implementation == OURS
    for name, value in arguments.items():
        if value is None or name in HARMLESS:
            continue
        if name == "position_embeddings":
            embeddings = value
        elif name == "attention_mask":
            mask = value
        elif name in cache_names:
            if cache is not None:
                return f"both {' and '.join(cache_names)} are given"
            if type(value).__name__ == "EncoderDecoderCache":
                return "an encoder-decoder cache"
            cache = value
        elif name in PACKING:
            packing = name
        elif name == "is_causal":
            if value is not binding.attention.is_causal:
                return f"is_causal={value}"  # sdpa lets it win over the attention's own
        elif name not in HARMLESS_VALUES or value is not HARMLESS_VALUES[name]:
            return f"keyword {name!r} is not understood" if name not in HARMLESS_VALUES else f"{name}={value}"
    if packing is not None and mask is None and not (ours and arguments.get("cu_seq_lens_q") is not None):
        return f"keyword {packing!r} without a mask"
    if collector is not None:
        # A ContextVar cannot be traced; under a trace the collector keeps its value in a plain attribute.
        for wanted in (collector.global_var if compiling else collector.get()) or ():
            if wanted not in RECORDED and not wanted.startswith("_"):
                return f"{wanted} are recorded"
    if not compiling and (hooked := globally_hooked()):
        return hooked
    compute, reason = compute_dtype(binding, x, embeddings)
    if reason:
        return reason

    if reason := attention_refusal(binding, implementation):
        return reason
    attention = binding.attention
    seq = x.shape[1]
    causal, keep = False, None
    bounds: tuple[Tensor | None, Tensor | None] = (None, None)
    if ours:
        bounds, mask, reason = _ours(x, mask, arguments)
        if reason:
            return reason
        keep = mask.shape[1] if mask is not None and mask.dim() == 2 else None
    windowed = ours and (mask is None or mask.dim() == 2)
    if mask is None or windowed:
        # sdpa's rule; eager attention without a mask sees everything.
        causal = implementation != "eager" and (seq > 1 or bounds[0] is not None) and attention.is_causal
        if causal and not ours:
            keep = seq
    if mask is not None:
        mask_reason = _mask(binding, x, mask, implementation, cache is not None)
        if mask_reason:
            return mask_reason
    cos, sin = embeddings if binding.spec.rope else (None, None)  # type: ignore[misc]
    update = None if cache is None else _updater(attention, cache, cache_names, arguments, keep)
    slots = None if cache is None or causal or windowed or compiling else _slots(cache, attention.layer_idx, x, binding.spec)
    return Call(binding.spec, binding.weights, cos, sin, mask, causal, windowed, bounds, update, compute, binding.own,
                binding.fixed, slots, binding.mixture)  # fmt: skip


def implementation_of(binding: Binding) -> str:
    """The attention implementation that the layer's config names: none outside of a model, which is transformers' eager."""
    name: str | None = binding.attention.config._attn_implementation
    return "eager" if name is None else name


def attention_refusal(binding: Binding, implementation: str) -> str:
    """Why calls run the original forward under the attention implementation that the layer's config names, or ""."""
    if implementation not in IMPLEMENTATIONS:
        return f"attention implementation {implementation!r}; use attn_implementation='{OURS}', 'sdpa' or 'eager'"
    if implementation == "sdpa" and binding.spec.softcap:
        return f"sdpa attention has no softcap ({binding.spec.softcap:g}); use attn_implementation='eager' or '{OURS}'"
    if implementation == "sdpa" and binding.weights.sinks is not None:
        return f"sdpa attention has no sinks; use attn_implementation='eager' or '{OURS}'"
    return ""


def mask_comes(implementation: str, causal: bool, window: int | None, seq: int, keys: int) -> bool:
    """Whether transformers hands a layer a mask of 4 axes for `seq` tokens over `keys` keys, without padding.

    window: how many keys a token sees on one side, itself included; None: all. Eager attention always gets a mask if it is
    causal; sdpa if its causal flag cannot say it; ours none.
    """
    if implementation == OURS:
        return False
    if not causal:
        return window is not None and seq >= window - 1
    return implementation == "eager" or seq not in (1, keys) or (window is not None and keys >= window)


def _ours(x: Tensor, mask: Any, arguments: Mapping[str, Any]) -> tuple[tuple[Tensor | None, Tensor | None], Any, str]:
    """(Boundaries of packed sequences, of queries and keys; the mask, if it is one; why neither is understood, or "")."""
    given = arguments.get("cu_seq_lens_q"), arguments.get("cu_seq_lens_k")
    if mask is None:
        if given[0] is not None and (given[1] is None or x.shape[0] != 1):
            return (None, None), None, "cu_seq_lens_q without cu_seq_lens_k, or with a batch"
        return given, None, ""
    if type(mask) in PLAIN_TENSORS and mask.dim() == 2 and mask.dtype is torch.int32:
        return (mask[0], mask[0]), None, ""
    if given[0] is not None and type(mask) in PLAIN_TENSORS and mask.dim() == 2:
        return (None, None), None, "a padding mask and cu_seq_lens_q"
    return (None, None), mask, ""


def compute_dtype(binding: Binding, x: Tensor, embeddings: Any) -> tuple[torch.dtype | None, str | None]:
    """(dtype to multiply in under autocast, else None; why no kernel takes such tensors, or takes them now, else None)."""
    compute, reason = modes(x)
    if reason := reason or _tensors(binding, x, embeddings, compute):
        return None, reason
    for reader, module, rate, path in binding.dropouts:
        if reader.training and getattr(module, rate):
            return None, f"{path}={getattr(module, rate)} in training"
    return compute, None


def globally_hooked() -> str:
    """Why the parts of a module have to be called one by one, or ""."""
    return "global module hooks are registered" if _has_any_global_hook() else ""


def modes(x: Tensor) -> tuple[torch.dtype | None, str | None]:
    """(dtype to multiply in under autocast, else None; a mode of torch that no kernel runs in, else None)."""
    if forward_ad._current_level >= 0:
        return None, "forward-mode differentiation is on"
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return None, "a torch.func transform is on"
    compute = autocast_dtype(x)
    if compute is not None and compute not in (torch.bfloat16, torch.float16):
        return None, f"autocast to {compute}"
    return compute, None


def _tensors(binding: Binding, x: Tensor, embeddings: Any, compute: torch.dtype | None) -> str | None:
    dtype, device = x.dtype, x.device
    if reason := rows_refusal(x, compute):
        return reason
    if x.dim() != 3:
        return f"hidden_states has {x.dim()} axes"
    for tensor in binding.present:
        if tensor.dtype is not dtype:
            return f"a weight is {tensor.dtype}, hidden_states is {dtype}"
    if binding.mixture is not None and (reason := experts_refusal(binding.mixture, x)):
        return reason
    if binding.weights.q.device != device:
        return f"a weight is on {binding.weights.q.device}, hidden_states is on {device}"
    spec = binding.spec
    if not spec.rope:
        return None
    if embeddings is None:
        return "no position_embeddings"
    full = spec.head_dim if spec.tables != "short" else spec.head_dim // 2
    for table in embeddings:
        if table.dim() != 3 or table.shape[0] not in (1, x.shape[0]) or table.shape[1] != x.shape[1]:
            return "position_embeddings are not (1|batch seq rotary)"
        width = table.shape[2]
        if width != full and not (binding.partial and 0 < width < full and width % 2 == 0):
            return f"position_embeddings have {width} columns for head_dim={spec.head_dim}"
        # fp32 tables with other dtypes are Cohere's and OLMo2's; transformers refuses what would not fit.
        if table.dtype not in (dtype, torch.float32) or table.device != device or table.requires_grad:
            return f"position_embeddings are {table.dtype} on {table.device}, requires_grad={table.requires_grad}"
    return None


def rows_refusal(x: Tensor, compute: torch.dtype | None) -> str | None:
    """Why no kernel takes hidden_states x, multiplied in `compute` under autocast, or None."""
    if type(x) not in PLAIN_TENSORS:
        return f"hidden_states is a {type_name(x)}"
    if x.dtype not in DTYPES:
        return f"hidden_states is {x.dtype}"
    if compute is not None and x.dtype is not torch.float32:
        return f"autocast with hidden_states of {x.dtype}"  # where transformers' layers mix dtypes on their own
    return None


def experts_refusal(mixture: Mixture, x: Tensor) -> str | None:
    """Why the mixture does not take rows like x, or None."""
    weight = mixture.weights.gate_up
    if weight.dtype is not x.dtype:
        return f"a weight of the experts is {weight.dtype}, hidden_states is {x.dtype}"
    return None if weight.device == x.device else f"a weight of the experts is on {weight.device}, hidden_states is on {x.device}"


def _mask(binding: Binding, x: Tensor, mask: Any, implementation: str, cached: bool) -> str | None:
    if type(mask) not in PLAIN_TENSORS:
        return f"attention_mask is a {type_name(mask)}"
    if mask.dim() == 2 and implementation == OURS:
        if mask.dtype is not torch.bool or mask.shape[0] not in (1, x.shape[0]) or mask.device != x.device:
            return "attention_mask is not bool (1|batch keys) on the device of hidden_states"
        keys, seq = mask.shape[1], x.shape[1]
        return None if cached or keys == seq else f"attention_mask has {keys} keys for {seq} tokens"
    if mask.dim() != 4:
        return f"attention_mask has {mask.dim()} axes"
    if mask.dtype is torch.bool:
        if implementation == "eager":
            return "bool attention_mask with eager attention"
    elif not mask.is_floating_point():
        return f"attention_mask is {mask.dtype}"
    elif mask.requires_grad:
        return "attention_mask requires gradients"
    batch, heads, seq, context = mask.shape
    if (
        batch not in (1, x.shape[0]) or heads not in (1, binding.spec.heads) or seq not in (1, x.shape[1])
        or (not cached and context != x.shape[1]) or mask.device != x.device
    ):  # fmt: skip
        return "attention_mask is not (1|batch 1|heads 1|seq context) on the device of hidden_states"
    return None


def _updater(
    attention: Any, cache: Any, cache_names: tuple[str, ...], arguments: Mapping[str, Any], keep: int | None
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The cache update of the original attention. keep: how many keys are read, None: all (a StaticCache returns all its slots).
    sdpa reads as many as there are queries where it relies on its causal flag alone: the cache can only have been empty then."""
    extra = {}
    if cache_names[0] == "cache":  # transformers from 5.24 on hands the attention's other keywords to the cache
        extra["kwargs"] = {n: v for n, v in arguments.items() if n not in cache_names + ("attention_mask", "position_embeddings")}

    def update(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = cache.update(k, v, attention.layer_idx, **extra)
        if keep is not None and k.shape[2] > keep:
            k, v = k[:, :, :keep], v[:, :, :keep]
        return k, v

    return update


def _slots(cache: Any, index: int, x: Tensor, spec: BlockSpec) -> Slots | None:
    """The slots of transformers' StaticCache, where its update only fills them; None where it has to run itself."""
    if _name(cache) != "StaticCache" or "update" in cache.__dict__ or cache.offloading or index >= len(cache.layers):
        return None
    layer = cache.layers[index]
    if _name(layer) != "StaticLayer" or "update" in layer.__dict__ or not layer.is_initialized:
        return None
    if not type(cache).update.__module__ == type(layer).update.__module__ == _CACHES:
        return None
    slots = Slots(layer.keys, layer.values, layer.cumulative_length)
    shape, fits = layer.keys.shape, (x.shape[0], spec.kv_heads, spec.head_dim)
    kinds = {(t.shape, t.dtype, t.device, t.stride(3)) for t in slots[:2]}
    right = kinds == {(shape, x.dtype, x.device, 1)} and (shape[0], shape[1], shape[3]) == fits
    return slots if right and slots.length.dtype is torch.int64 and slots.length.device == x.device else None


def _name(value: Any) -> str:
    """The class's name, if it is one of transformers' caches."""
    return type(value).__name__ if type(value).__module__ == _CACHES else ""


def signature_names(cls: type) -> tuple[str, ...]:
    """Names of the positional parameters of the class's forward, after self and hidden_states."""
    parameters = inspect.signature(inspect.unwrap(cls.forward)).parameters.values()  # type: ignore[attr-defined]
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)[2:]


def cache_names(cls: type) -> tuple[str, ...]:
    """What the class's forward calls its cache, the current name first."""
    names = signature_names(cls)
    if "cache" in names:  # transformers 5.24 renamed past_key_values to cache and still takes the old name
        return "cache", "past_key_values"
    return ("layer_past",) if "layer_past" in names else ("past_key_values",)

"""fusedblock.attention as an attention implementation of transformers, for any of its models.

    fusedblock.register_attention()
    model = AutoModel.from_pretrained(path, attn_implementation="fusedblock")

transformers asks for two functions: one that attends, and one that makes the mask its models hand to it. Without the second,
every mask is None, and padding is attended without a word. Importing this module imports no transformers.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

NAME = "fusedblock"
_MASKING = "transformers.masking_utils"
# Keywords of a model that change nothing in attention, whatever their value.
_HARMLESS = frozenset({
    "cache_position", "deterministic", "logits_to_keep", "num_items_in_batch", "output_hidden_states", "output_router_logits",
    "position_embeddings", "position_ids", "return_dict", "shift_labels", "use_cache",
})  # fmt: skip
# Of masking_utils: the functions of a query's and a key's index that attention knows by itself, by what they are.
_KNOWN = {
    "causal_mask_function": "causal",
    "bidirectional_mask_function": "both ways",
    "sliding_window_overlay.<locals>.inner_mask": "window",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": "window",
    "packed_sequence_mask_function.<locals>.inner_mask": "packed",
}
_CONTAINERS = {
    "and_masks.<locals>.and_mask": "mask_functions",
    "remap_positions_for_packed_sequence.<locals>.inner_mask": "mask_function",
}


class _Absent:
    """A model that hands over no window at all, not even None."""


def register_attention() -> None:
    """Register "fusedblock" with transformers as an attention implementation, with its masks: attn_implementation="fusedblock".

    Any model of transformers that asks for its attention by name then runs on `fusedblock.attention`, whether its layers are
    fused or not: causal or not, windows, softcap, sinks, position biases, padded batches, packed sequences (by cu_seq_lens_q, or
    without a cache by position_ids, of models that hand them to their masks), every cache. "paged|fusedblock" is for
    `generate_batch` of the transformers that let it be chosen (before 5.24). What attention does not understand raises and names
    it. Attention weights are never formed: output_attentions raises.

    `fuse` calls this, and so does importing fusedblock where transformers has been imported already (importing transformers
    later registers nothing). Calling it again changes nothing. Raises ImportError if there is no transformers.
    """
    modeling, masking = (importlib.import_module(name) for name in ("transformers.modeling_utils", _MASKING))
    modeling.AttentionInterface.register(NAME, attention_forward)
    modeling.AttentionInterface.register(f"paged|{NAME}", paged_attention_forward)
    masking.AttentionMaskInterface.register(NAME, attention_mask)


def register_if_loaded() -> None:
    """register_attention and register_experts, where transformers is there already and is one that has them by name."""
    from .experts import register_experts

    for register in (register_attention, register_experts):
        if "transformers" in sys.modules:
            with contextlib.suppress(ImportError, AttributeError):  # what else is wanted of us may work without
                register()


def _leaves(function: Any) -> Iterator[tuple[str, Any]]:
    """(kind, function) of what a mask function is made of by intersection; ("", function) for what is not known."""
    name = getattr(function, "__qualname__", "") if getattr(function, "__module__", "") == _MASKING else ""
    if name in _CONTAINERS:
        held = _cell(function, _CONTAINERS[name])
        for part in held if isinstance(held, tuple) else (held,):
            yield from _leaves(part)
    else:
        yield _KNOWN.get(name, ""), function


def _cell(function: Any, name: str) -> Any:
    """The value that a nested function has for a name from outside it, or None."""
    names = function.__code__.co_freevars
    return function.__closure__[names.index(name)].cell_contents if name in names else None


def attention_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None, attention_mask: Tensor | None = None, local_size: int | None = None,
    allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False, use_vmap: bool = False, config: Any = None,
    device: Any = "cpu", **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """The mask that a model of transformers makes for `attention_forward`; transformers' masking_utils says what it is given.

    What attention knows by itself stays out of it, being causal and a window, so that the kernels skip what is hidden:
        None                       all keys count
        bool `batch keys`          which keys are no padding; a cache may return more. The queries are the last of them
        int32 `1 segments+1`       packed: where each sequence begins among all tokens of the batch, and their number
        bool `batch 1 1|seq keys`  the whole truth: anything else
    What was made for a cache of fixed shape keeps one shape from one decoded token to the next, and making it again of itself
    (`generate` does) gives the same.
    """
    compiling = torch.compiler.is_compiling()
    masks = importlib.import_module(_MASKING)

    def whole() -> Any:
        return masks.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size=local_size,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip

    if use_vmap or isinstance(q_offset, Tensor) or isinstance(kv_offset, Tensor):
        return whole()
    if compiling:  # which cannot look into functions
        if local_size is not None or not (allow_is_causal_skip or allow_is_bidirectional_skip):
            return whole()
        kinds = {"causal" if allow_is_causal_skip else "both ways"}
    else:
        leaves = dict(_leaves(mask_function))
        kinds = set(leaves)
        if not kinds <= {*_KNOWN.values()}:
            return whole()
        if "packed" in kinds and "causal" in kinds:
            packed = _cell(leaves["packed"], "packed_sequence_mask")
            types = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
            if attention_mask is not None or q_offset or kv_offset or packed is None or types:
                return whole()
            return _boundaries(packed)
    if not (allow_is_causal_skip if "causal" in kinds else allow_is_bidirectional_skip):
        return whole()  # asked for, or a cache of fixed shape: its filled part grows, its mask does not
    keys = q_offset + q_length - kv_offset if "causal" in kinds else kv_length  # that count: a static cache returns more
    if not 0 < keys <= kv_length:
        return whole()
    if attention_mask is not None and attention_mask.shape[1] > keys:
        # All tokens so far, of which a window's cache has dropped the first; or too short, where it was made here before.
        attention_mask = attention_mask[:, kv_offset:][:, :keys]
    if attention_mask is not None and attention_mask.shape[1] < keys:
        return whole()
    if attention_mask is not None and q_length > 1 and not compiling and bool(attention_mask.all()):
        attention_mask = None  # for one query a look at the mask costs the kernel less than the wait for an answer
    if "causal" in kinds:
        if attention_mask is None and keys < kv_length:
            return torch.ones(batch_size, keys, dtype=torch.bool, device=device)
        return attention_mask
    decoder = getattr(config, "is_causal", True) is False  # a decoder told to see both ways: its attention does not know
    if "window" in kinds and local_size is not None and keys > local_size:
        return whole() if decoder or q_offset or q_length != keys else attention_mask
    if attention_mask is None and decoder:
        attention_mask = torch.ones(1, keys, dtype=torch.bool, device=device)
    return None if attention_mask is None else attention_mask[:, None, None, :]


def _boundaries(packed: Tensor) -> Tensor:
    """int32 `1 segments+1` of the numbers of sequences `batch seq`, which transformers compared on the host a moment ago."""
    starts = torch.ones_like(packed, dtype=torch.bool)
    starts[:, 1:] = packed[:, 1:] != packed[:, :-1]
    found = starts.flatten().nonzero().flatten()
    return torch.cat((found, found.new_full((1,), packed.numel())))[None].to(torch.int32)


def _scope(module: Any, sliding_window: Any, causal: bool, keys: int) -> tuple[int, int]:
    """The window of a layer, (left, right)."""
    config = getattr(module, "config", None)
    size = getattr(config, "sliding_window", None)
    if sliding_window is _Absent:
        # Some models make a mask with a window and do not tell their attention.
        types = getattr(config, "layer_types", None)
        if types is not None:
            sliding_window = size if types[getattr(module, "layer_idx", 0)] == "sliding_attention" else None
        else:
            sliding_window = size
        if sliding_window is not None and not causal and keys > sliding_window:
            raise ValueError(
                f"{NAME} attention: {type(module).__name__} hands over no sliding_window, and its config has "
                f"sliding_window={size}; use attn_implementation='sdpa'"
            )
    if sliding_window is None:
        return -1, -1
    if causal:
        return sliding_window - 1, -1
    # Both ways, transformers' masks hold what is up to config.sliding_window away; the attention is given that, or one more.
    reach = size if size is not None else sliding_window - 1
    return reach, reach


def _refuse(kwargs: dict[str, Any], packed: bool) -> None:
    if kwargs.get("output_attentions"):
        raise ValueError(f"{NAME} attention: output_attentions=True, but it never forms the weights; use 'eager'")
    unknown = [
        name for name, value in kwargs.items()
        if value is not None and name not in _HARMLESS and name != "output_attentions" and not (name == "seq_idx" and packed)
    ]  # fmt: skip
    if unknown:
        raise TypeError(f"{NAME} attention does not understand {', '.join(unknown)}; use attn_implementation='sdpa' or 'eager'")


def autocast_dtype(t: Tensor) -> torch.dtype | None:
    """What autocast casts to on t's device, or None where it is off, or where there is none: torch raises for meta tensors."""
    kind = t.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, sliding_window: Any = _Absent, softcap: float | None = None, s_aux: Tensor | None = None,
    is_causal: bool | None = None, position_bias: Tensor | None = None, cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None, max_length_q: Any = None, max_length_k: Any = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention: query `batch heads seq head_dim`, key `batch kv_heads keys head_dim`, value alike, to
    `batch seq heads head_dim`. attention_mask: what the function of that name made, or a mask of 4 axes, bool or floating."""
    mask = attention_mask
    _refuse(kwargs, mask is not None or cu_seq_lens_q is not None)
    if dtype := autocast_dtype(query):  # which casts for torch's own attention
        query, key, value = (t.to(dtype) for t in (query, key, value))
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    bounds: tuple[Any, ...] = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if mask is not None:
        packed = mask.dim() == 2 and mask.dtype is torch.int32
        if cu_seq_lens_q is not None and not packed:
            kind = "a padding mask" if mask.dim() == 2 else f"a mask of shape {tuple(mask.shape)}"
            raise ValueError(f"{NAME} attention: both {kind} and cu_seq_lens_q are given")
        bounds = (mask[0], mask[0], None, None) if packed else (None,) * 4
        if packed:
            mask = None
        elif mask.dim() == 2:
            if mask.dtype is not torch.bool or mask.shape[1] > key.shape[2]:
                raise ValueError(
                    f"{NAME} attention: attention_mask is {mask.dtype} of shape {tuple(mask.shape)}, expected bool (batch keys) "
                    f"of at most {key.shape[2]} keys"
                )
            key, value = key[:, :, : mask.shape[1]], value[:, :, : mask.shape[1]]
            if position_bias is not None:
                position_bias = position_bias[..., : mask.shape[1]]
    left, right = (-1, -1) if mask is not None and mask.dim() == 4 else _scope(module, sliding_window, causal, key.shape[2])
    options = {
        "causal": causal and not (mask is not None and mask.dim() == 4), "window": (left, right), "softcap": softcap or 0.0,
        "sinks": s_aux, "bias": position_bias, "mask": mask, "scale": scaling, "dropout_p": dropout,
        "deterministic": bool(kwargs.get("deterministic")),
    }  # fmt: skip
    return _attend(query, key, value, bounds, options), None


def _attend(query: Tensor, key: Tensor, value: Tensor, bounds: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    from ..attention_functions import attention  # on first use: it brings the kernels

    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    shape = q.shape[:2]
    if bounds[0] is not None:
        cu_q, cu_k, max_q, max_k = bounds
        options |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_q if cu_k is None else cu_k, "max_seqlen_q": max_q,
                    "max_seqlen_k": max_q if max_k is None else max_k}  # fmt: skip
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    out = attention(q, k, v, **options)
    assert isinstance(out, Tensor)
    return out if bounds[0] is None else out.unflatten(0, shape)


def paged_attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, scaling: float | None = None,
    cache: Any = None, cu_seq_lens_q: Any = None, cu_seq_lens_k: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None,
    read_index: Any = None, write_index: Any = None, sliding_window: Any = _Absent, softcap: float | None = None,
    s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention of continuous batching: query `1 heads tokens head_dim`, the new tokens of many sequences, whose
    earlier keys the paged cache returns."""
    if cache is None:
        raise ValueError(f"paged|{NAME} attention: there is no paged cache; use attn_implementation='{NAME}'")
    if kwargs.get("block_table") is not None:
        raise TypeError(f"paged|{NAME} attention does not understand block_table; transformers gives it to flash attention alone")
    key, value = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, read_index=read_index, write_index=write_index
    )
    key, value = (t.transpose(0, 1)[None] for t in (key, value))
    left, _ = _scope(module, sliding_window, True, key.shape[2])
    if isinstance(cu_seq_lens_k, dict):
        kind = "full_attention" if left < 0 else "sliding_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]
    bounds = (cu_seq_lens_q.to(torch.int32), cu_seq_lens_k.to(torch.int32), int(max_seqlen_q), int(max_seqlen_k))
    options = {"causal": True, "window": (left, -1), "softcap": softcap or 0.0, "sinks": s_aux, "scale": scaling}
    return _attend(query, key, value, bounds, options), None

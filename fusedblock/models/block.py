"""One transformer layer as a module of its own, with no transformers: built from an entry of the table of architectures.

The modules have the places and names of the entry, so that the state dict is that of transformers' layer, and `bind` reads them
as it reads a layer of transformers: there is one way from a layer to the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import blocks
from ..cache import KVCache
from ..ops import ShapeError
from . import table
from .adapter import compute_dtype
from .binding import Binding, bind, is_current
from .block_config import BlockConfig
from .block_parts import build, entry
from .rotary import Rotary
from .routers import ROUTERS
from .swap import FusedLayer, falls_back, refusal


class FusedBlock(nn.Module):
    """One transformer layer on fused kernels, without transformers.

    Its state dict has the names and shapes of transformers' layer of that model_type, so that `load_safetensors(block, path)`
    reads the layer config.layer_idx out of a checkpoint, and `load_state_dict` takes a layer's. It trains (gradients, autocast,
    torch.compile) and serves (caches); there is no fallback, what the kernels cannot take is an error. A layer with experts has
    its router, its experts, stacked, and its shared expert in them.

    Args:
        config: sizes and numerics.
        device, dtype: of the parameters, torch's defaults if None. device="meta" for one that is to be loaded.

    Attributes:
        config: the BlockConfig.
        rotary_emb: position ids to cos and sin, to compute them once for many blocks; None for a layer without rope.

    Raises ValueError for a config that no kernel takes.
    """

    # Not cast when a checkpoint is loaded in another dtype, as in transformers' models of these families; from 5.24 on those of
    # GLM-4 MoE keep the router's weight too.
    _keep_in_fp32_modules_strict = frozenset(r.tensors["correction_bias"] for r in ROUTERS.values() if r.spec.correction_bias)

    def __init__(self, config: BlockConfig, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if not isinstance(config, BlockConfig):
            raise TypeError(f"FusedBlock: config is a {type(config).__name__}, expected a BlockConfig")
        self.config = config
        self._binding: Binding | None = None
        build(self, config, device, dtype)
        self.rotary_emb = Rotary(config, config.spec.tables, device) if config.use_rope else None
        if isinstance(bound := bind(self, entry(config)), str):
            raise ValueError(f"FusedBlock: {bound}")

    @classmethod
    def from_layer(cls, layer: nn.Module) -> FusedBlock:
        """A block with the numerics of a layer of transformers and with its parameters: the same objects, not copies.

        layer: of a class in the table of architectures, fused or not. Raises ValueError with the reason if it cannot be fused, or
        is not what its own config says.
        """
        known = table.known_class(type(layer))
        spec = table.SPECS[known.__name__] if known else None
        why = "" if isinstance(layer, FusedLayer) else refusal(layer, spec)
        if not why and spec is not None:
            why = falls_back(layer, spec)
        theirs = "" if why or spec is None else bind(layer, spec)
        if spec is None or isinstance(theirs, str):
            raise ValueError(f"FusedBlock: {type(layer).__name__} cannot be fused: {why or theirs}")
        attention = layer.get_submodule(spec.attention)
        values = {**attention.config.to_dict(), "model_type": spec.family}  # type: ignore[operator, union-attr]
        config = BlockConfig.from_dict(values, layer_idx=getattr(attention, "layer_idx", None) or 0)
        block = cls(config, device="meta")
        ours = bind(block, entry(config))
        assert isinstance(ours, Binding)
        numerics = [name for name in vars(ours.spec) if name != "wide_router"]  # which is the parameters', not the config's
        facts = {name: (getattr(theirs.spec, name), getattr(ours.spec, name)) for name in numerics}
        if ours.mixture is not None and theirs.mixture is not None:
            said = vars(ours.mixture.spec)
            facts |= {f"the experts' {name}": (getattr(theirs.mixture.spec, name), value) for name, value in said.items()}
        facts["is_causal"] = attention.is_causal, config.causal  # type: ignore[assignment]
        names, expected = set(layer.state_dict(keep_vars=True)), set(block.state_dict(keep_vars=True))
        differing = [f"{name} is {live}, its config gives {said}" for name, (live, said) in facts.items() if live != said]
        differing += [f"it has {name}, its config gives none" for name in sorted(names - expected)]
        differing += [f"it has no {name}" for name in sorted(expected - names)]
        if differing:
            raise ValueError(f"FusedBlock: {type(layer).__name__} is not what its config says: {'; '.join(differing)}")
        for (parameters, name, _), (_, _, tensor) in zip(ours.slots, theirs.slots):
            if tensor is not None:
                parameters[name] = tensor
        for (_, module, rate, _), (_, source_module, source_rate, _) in zip(ours.dropouts, theirs.dropouts):
            setattr(module, rate, getattr(source_module, source_rate))
        if block.rotary_emb is not None:
            block.rotary_emb = Rotary(config, config.spec.tables, theirs.weights.q.device)
        return block.train(layer.training)

    def forward(
        self, hidden_states: Tensor, *, position_ids: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None, attention_mask: Tensor | None = None, cache: Any = None,
        output_router_logits: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """One layer.

        Args:
            hidden_states: `batch seq hidden`, in the dtype of the parameters (under autocast fp32).
            position_ids: `1|batch seq` integers; by default they count on from the tokens in the cache.
            position_embeddings: cos and sin `1|batch seq rotary`, as transformers hands them to its layers, instead of the
                block's own. Layers without rope do not look at them.
            attention_mask: None: all tokens, in a decoder those before and the token itself (of a config with sliding_window, the
                last of them). `batch context` bool or integer, as tokenizers give it: which tokens, of the cache and new, are no
                padding; the rest is as without. `1|batch 1|heads 1|seq context`, bool (True: may be attended) or floating
                (added to the logits): the whole truth, as transformers hands it to its layers.
            cache: of a decoder, a KVCache or a cache of transformers: anything with update(keys, values, layer_idx), and
                get_seq_length(layer_idx) unless positions and a 4-D mask are given. The slot is config.layer_idx.
            output_router_logits: of a layer with experts (config.sparse), return what its router says of every token too, for an
                auxiliary loss: transformers' load_balancing_loss_func takes a tuple of them, of all layers.

        Returns `batch seq hidden` in the dtype of hidden_states; with output_router_logits also `batch*seq experts` in that dtype
        (under autocast in the one it multiplies in), or in fp32 where the family's router computes in it (GLM-4 MoE). Raises,
        before anything is launched, ShapeError, ValueError or TypeError naming the argument and both values.
        """
        bound = self._bound()
        self._check(bound.weights.q.device, hidden_states, position_ids, position_embeddings, attention_mask)
        if cache is not None and not self.config.causal:
            raise ValueError(f"FusedBlock: cache is given, but {self.config.model_type} attends both ways: it has no cache")
        if output_router_logits and bound.mixture is None:
            layer = f"layer {self.config.layer_idx} of {self.config.model_type}"
            raise ValueError(f"FusedBlock: output_router_logits=True, but {layer} has no experts")
        past = self._past(cache, position_ids, position_embeddings, attention_mask)
        if position_embeddings is None and self.rotary_emb is not None:
            counted = position_ids is None
            position_embeddings = (self.rotary_emb.counted(hidden_states, past) if counted
                                   else self.rotary_emb(hidden_states, position_ids))  # fmt: skip
        compute, reason = compute_dtype(bound, hidden_states, position_embeddings)
        if reason:
            hint = "; the kernels draw no random numbers, set it to 0 or call eval()" if reason.endswith("in training") else ""
            raise ValueError(f"FusedBlock: {reason}{hint}")
        mask, needed = self._visible(hidden_states, attention_mask, past, cache)
        whole = mask is not None and mask.dim() == 4  # the truth
        if isinstance(cache, KVCache):
            spec = bound.spec
            shape = (hidden_states.shape[0], spec.kv_heads, hidden_states.shape[1], spec.head_dim)
            cache.check(shape, compute or hidden_states.dtype, hidden_states.device, self.config.layer_idx)
        update = None if cache is None else self._updater(cache, needed, past + hidden_states.shape[1])
        cos, sin = position_embeddings if bound.spec.rope and position_embeddings is not None else (None, None)
        causal = not whole and self.config.causal and hidden_states.shape[1] > 1
        logits: list[Tensor] = []

        def experts(y: Tensor, residual: Tensor) -> Tensor:
            assert bound.mixture is not None
            mixed = bound.mixture.mixed(y, residual)
            logits.append(mixed.logits)
            return mixed.out

        out = blocks.forward(bound.spec, bound.weights, hidden_states, cos, sin, mask=mask, causal=causal, windowed=not whole,
                             update=update, compute_dtype=compute, own=bound.own, kept=bound.fixed,
                             mlp=experts if bound.mixture is not None else None)  # fmt: skip
        return (out, logits[0]) if output_router_logits else out

    def _bound(self) -> Binding:
        known = self._binding
        if torch.compiler.is_compiling() or known is None or not is_current(known, self):
            bound = bind(self, entry(self.config))
            if isinstance(bound, str):
                raise ValueError(f"FusedBlock: {bound}")
            if not torch.compiler.is_compiling():
                self._binding = bound
            return bound
        return known

    def _check(self, device: torch.device, x: Tensor, position_ids: Any, embeddings: Any, mask: Any) -> None:
        for name, value in (("hidden_states", x), ("position_ids", position_ids), ("attention_mask", mask)):
            if not isinstance(value, Tensor) and (value is not None or name == "hidden_states"):
                raise TypeError(f"FusedBlock: {name} is a {type(value).__name__}, expected a tensor")
            if value is not None and value.device != device:
                raise ValueError(f"FusedBlock: {name} is on {value.device}, the weights are on {device}")
        if x.dim() != 3 or x.shape[2] != self.config.hidden_size:
            hidden = self.config.hidden_size
            raise ShapeError(f"FusedBlock: hidden_states has shape {tuple(x.shape)}, expected (batch seq {hidden})")
        batch, seq = x.shape[:2]
        if position_ids is not None:
            if position_ids.is_floating_point() or position_ids.dtype is torch.bool:
                raise ValueError(f"FusedBlock: position_ids are {position_ids.dtype}, expected integers")
            if position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != seq:
                raise ShapeError(f"FusedBlock: position_ids has shape {tuple(position_ids.shape)}, expected (1|{batch} {seq})")
        if embeddings is not None:
            if not self.config.spec.rope:
                raise ValueError(f"FusedBlock: position_embeddings are given, but {self.config.model_type} has no rope")
            if not isinstance(embeddings, (tuple, list)) or len(embeddings) != 2:
                raise TypeError(f"FusedBlock: position_embeddings is a {type(embeddings).__name__}, expected (cos, sin)")
            for name, t in zip(("cos", "sin"), embeddings):
                if not isinstance(t, Tensor):
                    raise TypeError(f"FusedBlock: {name} is a {type(t).__name__}, expected a tensor")
                if t.dim() != 3 or t.shape[0] not in (1, batch) or t.shape[1] != seq:
                    raise ShapeError(f"FusedBlock: {name} has shape {tuple(t.shape)}, expected (1|{batch} {seq} rotary)")

    def _past(self, cache: Any, position_ids: Any, embeddings: Any, mask: Any) -> int:
        """How many tokens the cache has; 0 where nothing depends on it, since for a cache on a device it may be a sync."""
        positioned = self.rotary_emb is None or position_ids is not None or embeddings is not None
        if cache is None or (positioned and mask is not None and mask.dim() == 4 and type(cache) is not KVCache):
            return 0
        if not callable(getattr(cache, "get_seq_length", None)):
            raise TypeError(
                f"FusedBlock: cache is a {type(cache).__name__} without get_seq_length; pass position_ids and a 4-D mask"
            )
        return int(cache.get_seq_length(self.config.layer_idx))

    def _visible(self, x: Tensor, mask: Tensor | None, past: int, cache: Any) -> tuple[Tensor | None, int | None]:
        """The mask for the kernels, and how many keys they read, the last ones; None: as the cache says."""
        batch, seq = x.shape[:2]
        context = past + seq
        if mask is not None and mask.dim() == 4:
            heads, known = self.config.num_attention_heads, cache is None or type(cache) is KVCache
            b, h, s, c = mask.shape
            if b not in (1, batch) or h not in (1, heads) or s not in (1, seq) or (known and c != context):
                expected = context if known else "any"
                raise ShapeError(
                    f"FusedBlock: attention_mask has shape {tuple(mask.shape)}, expected (1|{batch} 1|{heads} 1|{seq} {expected})"
                )
            if mask.dtype is not torch.bool and not mask.is_floating_point():
                raise ValueError(f"FusedBlock: attention_mask is {mask.dtype}, expected bool or floating with 4 axes")
            return mask, None
        if mask is not None:
            if tuple(mask.shape) != (batch, context):
                raise ShapeError(
                    f"FusedBlock: attention_mask has shape {tuple(mask.shape)}, expected ({batch} {context}): {past} tokens "
                    f"in the cache and {seq} new ones; or 4 axes"
                )
            if mask.is_floating_point():
                raise ValueError(f"FusedBlock: attention_mask is {mask.dtype}, expected bool or integers with 2 axes")
            mask = mask.bool()
        window = self.config.window
        needed = context if window is None else min(past, window - 1) + seq
        return (None if mask is None else mask[:, context - needed :]), needed

    def _updater(self, cache: Any, needed: int | None, context: int) -> Any:
        def update(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            k, v = cache.update(k, v, self.config.layer_idx)
            if needed is None:
                return k, v
            held = k.shape[2]
            if held < needed:
                raise ValueError(f"FusedBlock: the cache returned {held} keys, {needed} are needed")
            end = min(held, context)  # a static cache returns its empty slots too
            return k[:, :, end - needed : end], v[:, :, end - needed : end]

        return update

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_binding": None}  # it names the modules of this block, and is made anew in a copy

    def extra_repr(self) -> str:
        return f"{self.config.model_type}, layer_idx={self.config.layer_idx}"

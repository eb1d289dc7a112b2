"""One transformer layer as a module of its own, with no transformers: built from an entry of the table of architectures.

The modules have the places and names of the entry, so that the state dict is that of transformers' layer, and `bind` reads them
as it reads a layer of transformers: there is one way from a layer to the kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import blocks, ops
from ..cache import KVCache
from ..ops import ShapeError
from . import table
from .adapter import compute_dtype
from .binding import Binding, bind, is_current
from .block_config import BlockConfig
from .rotary import Rotary
from .swap import FusedLayer, falls_back, refusal


class Part(nn.Module):
    """A named place for parts of a block. The block computes; its parts only hold."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the parts of a FusedBlock compute together, call the block")


class Norm(nn.Module):
    """RMSNorm, or LayerNorm without a bias, over the last axis."""

    def __init__(self, shape: tuple[int, ...], spec: table.LayerSpec, eps: float, device: Any, dtype: Any) -> None:
        super().__init__()
        self.kind, self.eps, self.weight_offset, self.round_early = spec.norm, eps, spec.weight_offset, spec.round_early
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            return ops.layer_norm(x, self.weight, eps=self.eps)
        return ops.rms_norm(x, self.weight, eps=self.eps, weight_offset=self.weight_offset, round_early=self.round_early)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, kind={self.kind!r}, eps={self.eps}"


class Conv1D(nn.Module):
    """A linear layer whose weight is `in_features out_features`, as GPT-2's are."""

    def __init__(self, in_features: int, out_features: int, bias: bool, device: Any, dtype: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight.t(), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.weight.shape[0]}, out_features={self.weight.shape[1]}, bias={self.bias is not None}"


class ReLUSquaredActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu().square()


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU, "swish": nn.SiLU, "relu": nn.ReLU, "relu2": ReLUSquaredActivation,
    **dict.fromkeys(("gelu", "gelu_python"), nn.GELU),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh"), functools.partial(nn.GELU, approximate="tanh")),
}  # fmt: skip

def _with_our_classes(spec: table.LayerSpec) -> table.LayerSpec:
    norm = spec.norm_class if spec.norm_class.startswith("torch.") else "Norm"
    linear = spec.linear_class if spec.linear_class.startswith("torch.") else f"{__name__}.Conv1D"
    parts = dict.fromkeys(spec.classes, "Part")
    window = spec.window.replace(".config.", ".")  # a Part has no config
    return replace(spec, window=window, module=__name__, classes=parts, norm_class=norm, linear_class=linear, eps="eps")


_ENTRIES = {family: _with_our_classes(spec) for family, spec in table.FAMILIES.items()}


def _put(block: nn.Module, path: str, value: Any) -> None:
    parent, _, name = path.rpartition(".")
    setattr(block.get_submodule(parent), name, value)


def _build(block: nn.Module, config: BlockConfig, device: Any, dtype: Any) -> None:
    """Give the block every module and number that `bind` looks for, at the places of the entry."""
    spec = _ENTRIES[config.model_type]
    hidden, ffn, heads, kv_heads, d = (config.hidden_size, config.intermediate_size, config.num_attention_heads,
                                       config.num_key_value_heads, config.head_dim)  # fmt: skip
    assert ffn is not None and kv_heads is not None and d is not None
    if config.hidden_act not in _ACTIVATIONS:
        raise ValueError(f"FusedBlock: hidden_act={config.hidden_act!r}, expected one of {', '.join(_ACTIVATIONS)}")
    for path in spec.classes:
        _put(block, path, Part())
    _put(block, spec.activation, _ACTIVATIONS[config.hidden_act]())

    n_q, n_kv = heads * d, kv_heads * d
    sizes = {"q": (hidden, n_q + 2 * n_kv if spec.qkv else n_q), "k": (hidden, n_kv), "v": (hidden, n_kv), "o": (n_q, hidden),
             "gate": (hidden, ffn), "up": (hidden, ffn * (2 if spec.mlp == "gated_stacked" else 1)),
             "down": (ffn, hidden)}  # fmt: skip
    linear = Conv1D if spec.linear_class.endswith("Conv1D") else nn.Linear
    for name, path in spec.linears.items():
        bias: Any = spec.biases["qkv" if name in ("q", "k", "v") else "o" if name == "o" else "mlp"]
        bias = getattr(config, bias) if isinstance(bias, str) else bias
        _put(block, path, linear(*sizes[name], bias=bias, device=device, dtype=dtype))

    eps = config.rms_norm_eps if spec.norm == "rms" else config.layer_norm_eps
    assert eps is not None

    biased = spec.biases.get("norm", True)
    biased = getattr(config, biased) if isinstance(biased, str) else biased

    def norm(*shape: int) -> nn.Module:
        if spec.norm_class.startswith("torch."):
            return nn.LayerNorm(shape, eps=eps, bias=biased, device=device, dtype=dtype)
        return Norm(shape, spec, eps, device, dtype)

    for name, path in spec.norms.items():
        if config.layer_idx == 0 and name in spec.first_lacks:
            _put(block, path, nn.Identity())
        elif not (name == "mlp_norm" and spec.shared_norm and config.use_parallel_residual):
            _put(block, path, norm(hidden))
    options = {"qk_norm": spec.qk_norm}
    for path, (option, values) in spec.switches.items():
        value = config.use_rope if option == "rope" else bool(getattr(config, path.rpartition(".")[2]))
        _put(block, path, value)
        options[option] = values[value]
    for name, n in (("q_norm", heads), ("k_norm", kv_heads)):
        if options["qk_norm"]:
            shape = (n * d,) if options["qk_norm"] == "full" else (n, d) if spec.head_weights else (d,)
            _put(block, f"{spec.attention}.{getattr(spec, name)}", norm(*shape))

    attention = {spec.head_dim: d, "scaling": config.scale, "is_causal": config.causal, "layer_idx": config.layer_idx,
                 "num_key_value_groups": heads // kv_heads}  # fmt: skip
    numbers: dict[str, Any] = {f"{spec.attention}.{name}": value for name, value in attention.items()}
    numbers |= {path: getattr(config, word) for path, word in spec.dropouts.items()}
    numbers |= {path: getattr(config, path.rpartition(".")[2]) for path in (*spec.refused, spec.branch_scale) if path}
    numbers |= {spec.window: config.window} if spec.window else {}
    numbers |= {spec.softcap: getattr(config, spec.softcap.rpartition(".")[2])} if spec.softcap else {}
    for path, value in numbers.items():
        _put(block, path, value)


class FusedBlock(nn.Module):
    """One transformer layer on fused kernels, without transformers.

    Its state dict has the names and shapes of transformers' layer of that model_type, so that `load_safetensors(block, path)`
    reads the layer config.layer_idx out of a checkpoint, and `load_state_dict` takes a layer's. It trains (gradients, autocast,
    torch.compile) and serves (caches); there is no fallback, what the kernels cannot take is an error.

    Args:
        config: sizes and numerics.
        device, dtype: of the parameters, torch's defaults if None. device="meta" for one that is to be loaded.

    Attributes:
        config: the BlockConfig.
        rotary_emb: position ids to cos and sin, to compute them once for many blocks; None for a layer without rope.

    Raises ValueError for a config that no kernel takes.
    """

    def __init__(self, config: BlockConfig, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if not isinstance(config, BlockConfig):
            raise TypeError(f"FusedBlock: config is a {type(config).__name__}, expected a BlockConfig")
        self.config = config
        self._binding: Binding | None = None
        _build(self, config, device, dtype)
        self.rotary_emb = Rotary(config, config.spec.tables, device) if config.use_rope else None
        if isinstance(bound := bind(self, _ENTRIES[config.model_type]), str):
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
        ours = bind(block, _ENTRIES[config.model_type])
        assert isinstance(ours, Binding)
        facts = {name: (getattr(theirs.spec, name), getattr(ours.spec, name)) for name in vars(ours.spec)}
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
    ) -> Tensor:  # fmt: skip
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

        Returns `batch seq hidden` in the dtype of hidden_states. Raises, before anything is launched, ShapeError, ValueError or
        TypeError naming the argument and both values.
        """
        bound = self._bound()
        self._check(bound.weights.q.device, hidden_states, position_ids, position_embeddings, attention_mask)
        if cache is not None and not self.config.causal:
            raise ValueError(f"FusedBlock: cache is given, but {self.config.model_type} attends both ways: it has no cache")
        past = self._past(cache, position_ids, position_embeddings, attention_mask)
        if position_embeddings is None and self.rotary_emb is not None:
            counted = position_ids is None
            position_embeddings = (self.rotary_emb.counted(hidden_states, past) if counted
                                   else self.rotary_emb(hidden_states, position_ids))  # fmt: skip
        compute, reason = compute_dtype(bound, hidden_states, position_embeddings)
        if reason:
            hint = "; the kernels have no dropout, set it to 0 or call eval()" if reason.endswith("in training") else ""
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
        return blocks.forward(bound.spec, bound.weights, hidden_states, cos, sin, mask=mask, causal=causal, windowed=not whole,
                              update=update, compute_dtype=compute, own=bound.own)  # fmt: skip

    def _bound(self) -> Binding:
        known = self._binding
        if torch.compiler.is_compiling() or known is None or not is_current(known, self):
            bound = bind(self, _ENTRIES[self.config.model_type])
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

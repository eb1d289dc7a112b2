"""What is measured: copies of layers that share no module with the user's, and the calls that a model makes of them.

A copy is fake (shapes and dtypes, no memory) for counting, or real for timing, where it may share the user's weights.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from fusedblock.models.adapter import cache_names, mask_comes, signature_names
from fusedblock.models.binding import sparse_of
from fusedblock.models.explanation import require_cache as _require_cache
from fusedblock.models.table import LATENT, SPECS, LayerSpec, known_block, known_class, latent_class, supported, waiting

from .routing import Routing, routing_of

PHASES = ("prefill", "decode", "train")
BASELINES = ("eager", "sdpa")
Make = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Workload:
    """batch, seq: tokens of a call; context: keys a token may attend to, itself included, so context - seq are cached before."""

    phase: str
    batch: int
    seq: int
    context: int

    @property
    def training(self) -> bool:
        return self.phase == "train"

    @property
    def cached(self) -> int:
        return self.context - self.seq


def workload(phase: str, batch: int, seq: int, context: int | None) -> Workload:
    """Checked. Raises ValueError naming the argument."""
    if phase not in PHASES:
        raise ValueError(f"measure: phase={phase!r}, expected one of {', '.join(PHASES)}")
    for name, value in (("batch", batch), ("seq", seq), ("context", 1 if context is None else context)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"measure: {name}={value!r}, expected a positive integer")
    if context is None:
        if phase == "decode":
            raise ValueError("measure: phase='decode' needs context=, the number of keys that the new tokens may attend to")
        context = seq
    if context < seq:
        raise ValueError(f"measure: context={context} is less than seq={seq}, whose tokens it includes")
    if phase == "train" and context != seq:
        raise ValueError(f"measure: context={context}, but training has no cache: expected seq={seq}")
    return Workload(phase, batch, seq, context)


def require_cache(work: Workload, layers: Iterable[nn.Module]) -> None:
    """Raises ValueError if the workload has cached keys and a layer attends both ways."""
    for layer in layers:
        _require_cache("measure", work.phase, work.seq, work.context, layer, _attention(layer))


def sdpa_lacks(layers: Iterable[nn.Module]) -> tuple[str, str]:
    """What of a layer's attention sdpa lacks, and which layer has it: transformers refuses it there, or drops it silently. Or two
    empty strings."""
    for layer in layers:
        spec, name = _spec(layer), type(layer).__name__
        if spec.softcap and (softcap := attrgetter(spec.softcap)(layer)):
            return "softcap", f"{name} has softcap={softcap}"
        if spec.sinks:
            return "sinks", f"{name} has {spec.sinks}"
    return "", ""


def require_whole(baseline: str, layers: Iterable[nn.Module]) -> None:
    """Raises ValueError if the attention before lacks something of a layer's."""
    lacks, has = sdpa_lacks(layers) if baseline == "sdpa" else ("", "")
    if lacks:
        raise ValueError(f"measure: baseline='sdpa' has no {lacks}, {has}; use baseline='eager'")


def _known(cls: type) -> type | None:
    """The class that an entry is of: fuse takes all of such a layer, or its experts."""
    return known_class(cls) or latent_class(cls)


def _spec(layer: nn.Module) -> LayerSpec:
    known = _known(type(layer))
    assert known is not None
    return SPECS.get(known.__name__) or LATENT[known.__name__]


def _attention(layer: nn.Module) -> Any:
    return layer.get_submodule(_spec(layer).attention)


def _window(attention: Any) -> int | None:
    """How many keys a token sees, itself included; None: all. Where layers differ in it each has its own."""
    window: int | None = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    return window


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Every layer that fuse knows, or of which it knows the experts, in order. Raises ValueError, with fuse's reason, if there is
    nothing that it fuses."""
    found = _layers(model)
    if not any(known_class(type(module)) or known_block(type(module)) for layer in found for module in layer.modules()):
        waits = next((f"{type(m).__name__}: {why}" for m in model.modules() if (why := waiting(type(m)))), "")
        raise ValueError(f"measure: {type(model).__name__} has no layer that can be fused; {waits or supported()}")
    return found


def _layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if _known(type(module)) is not None]


def beyond_positions(work: Workload, model: Any) -> str:
    """What a reader must know if the workload has more tokens than the model has positions for; or an empty string."""
    limit = getattr(model if hasattr(model, "model_type") else getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(limit, int) or work.context <= limit:
        return ""
    name = "context" if work.context != work.seq else "seq"
    return f"{name}={work.context} is more than the model's max_position_embeddings={limit}"


def groups(layers: Iterable[nn.Module]) -> list[tuple[nn.Module, int]]:
    """(a layer, how many are like it): same class, same parameters but for their values, same hyperparameters of its parts.

    Of the parts' own attributes all but numbers with a fraction count: a scale changes nothing that is measured.
    """
    found: dict[Any, list[nn.Module]] = {}
    for layer in layers:
        tensors = tuple((n, tuple(t.shape), t.dtype, t.requires_grad) for n, t in layer.named_parameters())
        parts = tuple((n, type(m).__name__, m.extra_repr(), _plain_attributes(m)) for n, m in layer.named_modules())
        found.setdefault((tensors, parts), []).append(layer)
    return [(same[0], len(same)) for same in found.values()]


def _plain_attributes(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    own = module.__dict__.items()
    return tuple((n, v) for n, v in own if isinstance(v, (bool, int, str)) and n not in ("layer_idx", "training"))


def layer_of_config(config: Any) -> tuple[nn.Module, int]:
    """One decoder layer, on the meta device, of the model that a transformers config describes, and its index: the first, or the
    first with experts where any has them. Raises ValueError."""
    made, number = _first_layers(config, 1), 1
    while _spec(made[0]).sparse and all(_dense(layer) for layer in made) and number < config.num_hidden_layers:
        number = min(8 * number, config.num_hidden_layers)  # few have more than a few dense layers first
        made = _first_layers(config, number)
    index = next((i for i, layer in enumerate(made) if not _dense(layer)), 0)
    return decoder_layers(made[index])[0], index


def _dense(layer: nn.Module) -> bool:
    return sparse_of(layer, _spec(layer)) is None


def _first_layers(config: Any, number: int) -> list[nn.Module]:
    from transformers import AutoModel

    config = copy.deepcopy(config)
    config.num_hidden_layers = number
    if getattr(config, "layer_types", None):
        config.layer_types = list(config.layer_types)[:number]
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    with torch.device("meta"):
        model = AutoModel.from_config(config, dtype=dtype, attn_implementation="eager")
    return _layers(model) or decoder_layers(model)  # which says why there is none


def copy_module(module: nn.Module, make: Make) -> nn.Module:
    """A copy with `make(tensor)` in the place of each parameter and buffer, and without hooks.

    Ties within the module are kept. Nothing of the original changes. Raises TypeError for parameters of a class of their own
    (quantised or sharded ones), whose kernels nobody here can count.
    """
    memo: dict[int, Any] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if type(tensor) not in (Tensor, nn.Parameter, FakeTensor):
            raise TypeError(f"measure: {name} is a {type(tensor).__name__}; only plain tensors can be measured")
        made = make(tensor)
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    for part in module.modules():
        if "_hf_hook" in part.__dict__:  # accelerate's, which holds weights
            memo[id(part.__dict__["_hf_hook"])] = None
    made_module = copy.deepcopy(module, memo)
    for part in made_module.modules():
        for name in ("forward", "_hf_hook", "_old_forward"):
            part.__dict__.pop(name, None)
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
            hooks.clear()
        if "gradient_checkpointing" in part.__dict__:
            part.__dict__["gradient_checkpointing"] = False
    return made_module


def without_memory(tensor: Tensor) -> Tensor:
    """For `copy_module` inside FakeTensorMode. On the CPU: there SDPA is one kernel also when it is fake."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


class OneKernel(TorchFunctionMode):
    """SDPA as a GPU has it where values are of another size than keys: the CPU has no kernel for them, and composes it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or len(args) != 3 or args[0].shape[-1] == args[2].shape[-1]:
            return func(*args, **kwargs)
        mask = kwargs.get("attn_mask")
        if mask is not None and mask.dtype is torch.bool:
            mask = torch.where(mask, *(torch.scalar_tensor(x, dtype=args[0].dtype) for x in (0.0, float("-inf"))))
        given = (mask, torch.is_grad_enabled(), kwargs.get("dropout_p", 0.0), kwargs.get("is_causal", False))
        return torch.ops.aten._scaled_dot_product_efficient_attention(*args, *given, scale=kwargs.get("scale"))[0]


def on(device: torch.device, fresh: bool = False) -> Make:
    """For `copy_module`: the same memory if it is there already (unless fresh); random values for tensors on meta."""

    def make(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            return made.normal_(0, 0.02) if made.is_floating_point() else made.zero_()
        held = tensor.detach()
        moved = held.to(device)
        return moved.clone() if fresh and moved is held else moved

    return make


class LayerCall:
    """One layer with the inputs of a workload, callable again and again with the same effect.

    attention: what the layer's model would be set to; it decides the mask that the layer receives, as transformers makes it.
    Under FakeTensorMode everything here is fake.
    """

    def __init__(self, layer: nn.Module, work: Workload, attention: str, device: torch.device) -> None:
        known = _known(getattr(type(layer), "_fusedblock_original", type(layer)))  # whose signature says what a layer takes
        assert known is not None
        self.layer, self.work, self.device = layer, work, device
        self.attention = _attention(layer)
        layer.train(work.training)
        for part in layer.modules():
            config: Any = getattr(part, "config", None)
            if config is not None:
                config._attn_implementation = attention
        spec, names = _spec(layer), signature_names(known)
        norms = (layer.get_submodule(path) for path in spec.norms.values())
        weight: Any = next(norm.weight for norm in norms if not isinstance(norm, nn.Identity))
        self.dtype: torch.dtype = weight.dtype
        self.x = self._random(work.batch, work.seq, weight.shape[0]).requires_grad_(work.training)
        self.grad_out = self._random(*self.x.shape) if work.training else None
        self.cache: Any = self._cache(spec) if work.cached else None
        given = {
            "attention_mask": self._mask(attention),
            "position_ids": torch.arange(work.cached, work.context, device=device)[None],
            "position_embeddings": self._tables(known.__module__) if "position_embeddings" in names else None,
            "use_cache": work.cached > 0,
        }
        if self.cache is not None:
            given[cache_names(known)[0]] = self.cache
        self.arguments = {name: value for name, value in given.items() if name in names}
        self.wanted = [self.x, *(p for p in layer.parameters() if p.requires_grad)] if work.training else []

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def _tables(self, home: str) -> Any:
        """cos and sin of the positions, or one complex table, as the rotary embedding that the layer's own module defines has it;
        real where the rest is fake, since some of them look at the positions."""
        rotary = next(part for name, part in vars(sys.modules[home]).items() if name.endswith("RotaryEmbedding"))
        fake: Any
        with unset_fake_temporarily() as fake:
            position = torch.arange(self.work.cached, self.work.context, device=self.device)[None]
            config, like = self.attention.config, torch.empty(1, dtype=self.dtype, device=self.device)
            by_type = "layer_type" in inspect.signature(inspect.unwrap(rotary.forward)).parameters
            kind = (config.layer_types[self.attention.layer_idx],) if by_type else ()
            made = rotary(config).to(self.device)(like, position, *kind)
        return made if fake is None else tree_map(fake.from_tensor, made)

    def _cache(self, spec: LayerSpec) -> Any:
        """A DynamicCache with `cached` tokens in it, of which a layer with a window keeps the last."""
        from transformers import DynamicCache

        work, attention = self.work, self.attention
        if spec.layer_class in LATENT:  # what keys and values are made from, and the part of the keys that is rotated
            heads, sizes = 1, (attention.kv_lora_rank, attention.qk_rope_head_dim)
        else:
            head_dim, o = getattr(attention, spec.head_dim), cast(Tensor, self.layer.get_submodule(spec.o).weight)
            width = o.shape[0 if spec.linear_class.endswith("Conv1D") else 1]
            heads, sizes = width // head_dim // getattr(attention, "num_key_value_groups", 1), (head_dim, head_dim)
        cache = DynamicCache(config=attention.config)
        cache.update(*(self._random(work.batch, heads, work.cached, size) for size in sizes), attention.layer_idx)
        self.filled = dict(vars(cache.layers[self.attention.layer_idx]))
        return cache

    def _mask(self, attention: str) -> Tensor | None:
        """As transformers makes it without padding, where it makes one: additive for eager, bool for sdpa."""
        work, window, causal = self.work, _window(self.attention), self.attention.is_causal
        keys = work.seq + (0 if self.cache is None else self.filled["keys"].shape[2])
        if not mask_comes(attention, causal, window, work.seq, keys):
            return None
        query = torch.arange(work.cached, work.context, device=self.device)[:, None]
        key = torch.arange(work.context - keys, work.context, device=self.device)
        seen = (key <= query) if causal else torch.ones_like(key <= query)
        if window is not None:
            seen &= (key > query - window) & (key < query + window)
        shape = (work.batch, 1, work.seq, keys)
        if attention == "sdpa":
            return seen.expand(shape)
        lowest = torch.full_like(seen, torch.finfo(self.dtype).min, dtype=self.dtype)
        return lowest.masked_fill(seen, 0.0).expand(shape).contiguous()

    def __call__(self) -> Any:
        if self.cache is not None:  # as it was before the last call: an update puts new tensors in the place of those it finds
            vars(self.cache.layers[self.attention.layer_idx]).update(self.filled)
        with torch.set_grad_enabled(self.work.training):
            out = self.layer(self.x, **self.arguments)
            out = out[0] if isinstance(out, tuple) else out
            return torch.autograd.grad(out, self.wanted, self.grad_out) if self.work.training else out

    def routing(self) -> Routing | None:
        """What is expected of the layer's mixture, if it has one."""
        return routing_of(self.layer, _spec(self.layer), self.work.batch * self.work.seq)

    def bytes(self) -> int:
        """Of weights and inputs: what one call brings into the cache, at least."""
        tensors = [*self.layer.parameters(), self.x, *(self.filled.values() if self.cache is not None else [])]
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


class OutsideCall:
    """Embedding, last norm and output projection: the same before and after. Inference needs the last token's logits only."""

    def __init__(self, parts: dict[str, nn.Module], work: Workload) -> None:
        self.parts, self.work = parts, work
        self.ids = torch.zeros(work.batch, work.seq, dtype=torch.int64)

    def __call__(self) -> None:
        training = self.work.training
        with torch.set_grad_enabled(training):
            embedded = self.parts["embedding"](self.ids)
            hidden = embedded.detach().requires_grad_(training)  # stands for what the layers made of it
            out = self.parts["norm"](hidden) if "norm" in self.parts else hidden
            if "head" in self.parts:
                out = self.parts["head"](out if training else out[:, -1:])
            if training:
                after = [self.parts[n] for n in ("norm", "head") if n in self.parts]
                self._backward(out, [hidden, *(p for part in after for p in part.parameters() if p.requires_grad)])
                self._backward(embedded, [p for p in self.parts["embedding"].parameters() if p.requires_grad])

    @staticmethod
    def _backward(out: Tensor, inputs: list[Tensor]) -> None:
        if inputs and out.grad_fn is not None:
            torch.autograd.grad(out, inputs, torch.empty_like(out))


def outside_parts(model: Any) -> nn.ModuleDict:
    """The parts of a transformers model around its layers; empty for anything else. An image model has no table of tokens."""
    parts = nn.ModuleDict()
    if hasattr(model, "get_input_embeddings") and hasattr(model, "base_model"):
        embedding = model.get_input_embeddings()
        if isinstance(embedding, nn.Embedding):
            found = {"embedding": embedding, "norm": _last_norm(model.base_model), "head": model.get_output_embeddings()}
            parts.update({name: part for name, part in found.items() if isinstance(part, nn.Module)})
    return parts


def _last_norm(base: nn.Module) -> nn.Module | None:
    """The child after those that hold the layers whose parameters are all vectors, if there is one."""
    children = list(base.children())
    holding = [i for i, child in enumerate(children) if any(known_class(type(m)) for m in child.modules())]
    for child in children[max(holding, default=len(children)) + 1 :]:
        if {p.dim() for p in child.parameters()} == {1}:
            return child
    return None

"""From a live decoder layer and the arguments of one call to a call of fusedblock.blocks, or to the reason there is none.

Nothing here changes anything, and nothing is ignored: what is not understood is a reason to run the original forward.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from ..blocks import BlockSpec, BlockWeights
from .table import LayerSpec

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
IMPLEMENTATIONS = ("eager", "sdpa")
# Keywords that change nothing in a Llama-like layer under eager or sdpa attention, whatever their value. The last two go
# to the loss, and the models pass them on to their layers as well.
HARMLESS = frozenset({"position_ids", "use_cache", "output_hidden_states", "num_items_in_batch", "shift_labels"})
# Harmless at one value, which is also the default.
HARMLESS_VALUES = {"output_attentions": False}
# Packed sequences: eager and sdpa attention see them in the mask only.
PACKING = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
# The hooks of transformers on attention modules do nothing unless its collector, which `prepare` asks, wants attentions.
_CAPTURING = "transformers.utils.output_capturing"
_PLAIN_TENSORS = (nn.Parameter, Tensor, FakeTensor)


class Child(NamedTuple):
    """A submodule whose forward the fused layer replaces, as it was when the binding was made."""

    parent: nn.Module | None  # None: the layer itself, which a replica of it shares the binding with
    name: str
    module: nn.Module
    type: type
    hooks: tuple[dict[int, Any], ...]  # the module's own dictionaries: live
    hook_ids: tuple[int, ...]
    forward: Any  # instance attribute, if any
    class_forward: Any


class Binding(NamedTuple):
    """A layer's numerics and parameters. Valid while `is_current` says so."""

    spec: BlockSpec
    weights: BlockWeights
    attention: Any
    norms: tuple[nn.Module, nn.Module]
    children: tuple[Child, ...]
    slots: tuple[tuple[dict[str, Any], str, Tensor | None], ...]  # (a module's _parameters, name, parameter)


class Call(NamedTuple):
    """Arguments of fusedblock.blocks.forward, but hidden_states."""

    spec: BlockSpec
    weights: BlockWeights
    cos: Tensor
    sin: Tensor
    mask: Tensor | None
    causal: bool
    update: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None


def activation_of(function: Any) -> str | None:
    """The activation's name in fusedblock.blocks, or None."""
    name = type(function).__name__
    if type(function).__module__ not in ("torch.nn.modules.activation", "transformers.activations"):
        return None
    if name in ("SiLU", "SiLUActivation"):
        return "silu"
    if name == "GELU":
        return {"none": "gelu", "tanh": "gelu_tanh"}[function.approximate]
    return {"GELUActivation": "gelu", "GELUTanh": "gelu_tanh", "NewGELUActivation": "gelu_tanh"}.get(name)


def patched(cls: type) -> str | None:
    """Why the class's forward is not the one that its module defines, or None."""
    forward = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    if forward.__module__ == cls.__module__:
        return None
    return f"{cls.__name__}.forward is {forward.__module__}.{forward.__qualname__}"


def _hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def _shadow(module: nn.Module) -> str | None:
    """Why calling the module would not run its class's forward on its own inputs, or None."""
    forward = module.__dict__.get("forward")
    if forward is None or is_bound(forward, module, type(module).forward):  # accelerate leaves one when it removes its hook
        return None
    hook: Any = module.__dict__.get("_hf_hook")
    if type(hook).__name__ == "AlignDevicesHook" and is_bound(module.__dict__.get("_old_forward"), module, type(module).forward):
        # accelerate with several devices: nothing to do where the parameters already are where the module executes.
        devices = {torch.device(p.device) for p in module.parameters(recurse=False)}
        if not hook.offload and devices <= {_device(hook.execution_device)}:
            return None
        return "is offloaded by accelerate"
    return f"has an instance forward ({type(hook or forward).__name__})"


def _device(device: Any) -> torch.device:
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def is_bound(method: Any, module: nn.Module, function: Any) -> bool:
    return isinstance(method, types.MethodType) and method.__self__ is module and method.__func__ is function


def _refusal(spec: LayerSpec, name: str, module: nn.Module | None) -> str | None:
    """Why the submodule must run itself, or None."""
    linear = name in (spec.q, spec.k, spec.v, spec.o, spec.gate, spec.up, spec.down)
    if linear:
        if type(module) is not nn.Linear:
            return f"{name} is {_type_name(module)}, not torch.nn.Linear"
    elif name != spec.activation:
        expected = {spec.attention: spec.attention_class, spec.mlp: spec.mlp_class}.get(name, spec.norm_class)
        if type(module).__name__ != expected or type(module).__module__ != spec.module:
            return f"{name} is {_type_name(module)}, not {expected}"
    if not isinstance(module, nn.Module):
        return f"{name} is {_type_name(module)}, not a module"
    if name != spec.activation and (reason := patched(type(module))):
        return reason
    shadow = _shadow(module)
    if shadow:
        return f"{name} {shadow}"
    for hooks in _hooks(module):
        for hook in hooks.values():
            if name != spec.attention or getattr(hook, "__module__", None) != _CAPTURING:
                return f"{name} has a hook"
    return None


def _type_name(value: Any) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ in ("builtins", "torch") else f"{cls.__module__}.{cls.__qualname__}"


def unsupported(layer: nn.Module, spec: LayerSpec) -> str | None:
    """Why no kernel exists for the layer's sizes or numerics, or None."""
    head_dim = getattr(getattr(layer, spec.attention), spec.head_dim, 0)
    if not 16 <= head_dim <= 256 or head_dim % 8:
        return f"head_dim={head_dim}, the kernels take multiples of 8 from 16 to 256"
    scale = getattr(getattr(layer, spec.attention), spec.scale, 0.0)
    if not (isinstance(scale, (int, float)) and 0 < scale < float("inf")):
        return f"the softmax scale is {scale}, the kernels take positive finite numbers"
    activation = getattr(getattr(layer, spec.mlp), spec.activation, None)
    if activation_of(activation) is None:
        return f"activation {_type_name(activation)} has no kernel"
    eps, post_eps = (getattr(getattr(layer, norm), spec.eps, None) for norm in (spec.input_norm, spec.post_norm))
    if None not in (eps, post_eps) and eps != post_eps:
        return f"the norms have different epsilons, {eps} and {post_eps}"
    return None


def bind(layer: nn.Module, spec: LayerSpec) -> Binding | str:
    """Read the layer: its numerics, its parameters, and what must stay as it is for them to be right; or why it is not fused."""
    children = []
    parents: dict[str, nn.Module | None] = {"": None}
    for parent, names in (
        ("", (spec.attention, spec.mlp, spec.input_norm, spec.post_norm)),
        (spec.attention, (spec.q, spec.k, spec.v, spec.o)),
        (spec.mlp, (spec.gate, spec.up, spec.down, spec.activation)),
    ):
        holder = layer if parent == "" else parents[parent]
        for name in names:
            module = holder._modules.get(name)  # type: ignore[union-attr]
            refusal = _refusal(spec, name, module)
            if refusal:
                return refusal
            parents[name] = module
            hooks = _hooks(module)  # type: ignore[arg-type]
            ids = tuple(key for group in hooks for key in group)
            children.append(
                Child(parents[parent], name, module, type(module), hooks, ids, module.__dict__.get("forward"),  # type: ignore
                      type(module).forward)  # type: ignore[union-attr]
            )
    attention, mlp, input_norm, post_norm, q, k, v, o, gate, up, down, act = (child.module for child in children)

    slots: list[tuple[dict[str, Any], str, Tensor | None]] = []
    for module in (input_norm, q, k, v, o, post_norm, gate, up, down):
        if not isinstance(module._parameters.get("weight"), Tensor):
            return f"a weight of {type(module).__name__} is not a parameter"
        slots.append((module._parameters, "weight", module._parameters["weight"]))
    for module in (q, k, v, o, gate, up, down):
        slots.append((module._parameters, "bias", module._parameters.get("bias")))
    weights = BlockWeights(*(tensor for _, _, tensor in slots))  # type: ignore[arg-type]
    for tensor in weights:
        if tensor is not None and type(tensor) not in _PLAIN_TENSORS:
            return f"a weight is a {_type_name(tensor)}"

    head_dim, scale = getattr(attention, spec.head_dim), getattr(attention, spec.scale)
    hidden, ffn = weights.q.shape[1], weights.gate.shape[0]
    reason = unsupported(layer, spec)
    if reason:
        return reason
    heads, kv_heads = weights.q.shape[0] // head_dim, weights.k.shape[0] // head_dim
    q_width, kv_width = heads * head_dim, kv_heads * head_dim
    shapes = ((hidden,), (q_width, hidden), (kv_width, hidden), (kv_width, hidden), (hidden, q_width), (hidden,),
              (ffn, hidden), (ffn, hidden), (hidden, ffn))  # fmt: skip
    for field, tensor, shape in zip(BlockWeights._fields, weights[:9], shapes):
        if tuple(tensor.shape) != shape:
            return f"the {field} weight has shape {tuple(tensor.shape)}, expected {shape}"
    if kv_heads == 0 or heads % kv_heads or heads // kv_heads != attention.num_key_value_groups:
        return f"{heads} heads over {kv_heads} key/value heads, but num_key_value_groups={attention.num_key_value_groups}"
    block = BlockSpec(
        hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, head_dim=head_dim, scale=float(scale),
        eps=float(getattr(input_norm, spec.eps)),
        activation=activation_of(act) or "", weight_offset=spec.weight_offset, round_early=spec.round_early,
    )  # fmt: skip
    return Binding(block, weights, attention, (input_norm, post_norm), tuple(children), tuple(slots))


def is_current(binding: Binding, layer: nn.Module, spec: LayerSpec) -> bool:
    """Whether `bind` would give the same binding again. A few microseconds: it is asked at every call."""
    for parent, name, module, cls, hooks, hook_ids, forward, class_forward in binding.children:
        if (layer if parent is None else parent)._modules.get(name) is not module or type(module) is not cls:
            return False
        forward_hooks, pre_hooks, backward_hooks, backward_pre_hooks = hooks
        if forward_hooks or pre_hooks or backward_hooks or backward_pre_hooks:
            if tuple(key for group in hooks for key in group) != hook_ids:
                return False
        if module.__dict__.get("forward") is not forward or cls.forward is not class_forward:
            return False
    for parameters, name, tensor in binding.slots:
        if parameters.get(name) is not tensor:
            return False
    block, attention = binding.spec, binding.attention
    input_norm, post_norm = binding.norms
    return (
        getattr(attention, spec.scale) == block.scale
        and getattr(attention, spec.head_dim) == block.head_dim
        and getattr(input_norm, spec.eps) == block.eps
        and getattr(post_norm, spec.eps) == block.eps
        and activation_of(binding.children[-1].module) == block.activation
        and binding.weights.q.shape[0] == block.heads * block.head_dim
        and binding.weights.k.shape[0] == block.kv_heads * block.head_dim
    )


def prepare(
    binding: Binding, x: Tensor, arguments: Mapping[str, Any], cache_names: tuple[str, ...], collector: Any
) -> Call | str:
    """The fused call for a layer's arguments (None everywhere means absent), or why the original forward has to run.

    x `batch seq hidden`; cache_names: what the layer calls its cache, the current name first; collector: transformers'
    record of what the caller wants to see of the model's inside.
    """
    compiling = torch.compiler.is_compiling()
    mask = cache = embeddings = packing = None
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
            cache = value
        elif name in PACKING:
            packing = name
        elif name == "is_causal":
            if value is not True or binding.attention.is_causal is not True:
                return f"is_causal={value}"  # sdpa lets it win over the attention's own
        elif name not in HARMLESS_VALUES or value is not HARMLESS_VALUES[name]:
            return f"keyword {name!r} is not understood" if name not in HARMLESS_VALUES else f"{name}={value}"
    if packing is not None and mask is None:
        return f"keyword {packing!r} without a mask"
    if collector is not None:
        # A ContextVar cannot be traced; under a trace the collector keeps its value in a plain attribute.
        for wanted in (collector.global_var if compiling else collector.get()) or ():
            if wanted != "hidden_states" and not wanted.startswith("_"):
                return f"{wanted} are recorded"
    if not compiling and _has_any_global_hook():
        return "global module hooks are registered"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is on"
    if not compiling and torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform is on"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast is on"
    tensor_reason = _tensors(binding, x, embeddings)
    if tensor_reason:
        return tensor_reason

    attention = binding.attention
    implementation = attention.config._attn_implementation
    if implementation not in IMPLEMENTATIONS:
        return f"attention implementation {implementation!r}"
    if attention.training and attention.attention_dropout:
        return f"attention_dropout={attention.attention_dropout} in training"
    seq = x.shape[1]
    causal = False
    if mask is None:
        # sdpa's rule; eager attention without a mask sees everything.
        causal = implementation == "sdpa" and seq > 1 and attention.is_causal
    else:
        mask_reason = _mask(binding, x, mask, implementation, cache is not None)
        if mask_reason:
            return mask_reason
    cos, sin = embeddings  # type: ignore[misc]
    update = None if cache is None else _updater(attention, cache, cache_names, arguments, seq if causal else None)
    return Call(binding.spec, binding.weights, cos, sin, mask, causal, update)


def _tensors(binding: Binding, x: Tensor, embeddings: Any) -> str | None:
    dtype, device = x.dtype, x.device
    if type(x) not in _PLAIN_TENSORS:
        return f"hidden_states is a {_type_name(x)}"
    if x.dim() != 3:
        return f"hidden_states has {x.dim()} axes"
    if dtype not in DTYPES:
        return f"hidden_states is {dtype}"
    for tensor in binding.weights:
        if tensor is not None and tensor.dtype is not dtype:
            return f"a weight is {tensor.dtype}, hidden_states is {dtype}"
    if binding.weights.q.device != device:
        return f"a weight is on {binding.weights.q.device}, hidden_states is on {device}"
    if embeddings is None:
        return "no position_embeddings"
    cos, sin = embeddings
    for table in (cos, sin):
        if table.dim() != 3 or table.shape[0] not in (1, x.shape[0]) or table.shape[1:] != (x.shape[1], binding.spec.head_dim):
            return "position_embeddings are not (1|batch seq head_dim)"
        if table.dtype is not dtype or table.device != device or table.requires_grad:
            return f"position_embeddings are {table.dtype} on {table.device}, requires_grad={table.requires_grad}"
    return None


def _mask(binding: Binding, x: Tensor, mask: Any, implementation: str, cached: bool) -> str | None:
    if type(mask) not in _PLAIN_TENSORS:
        return f"attention_mask is a {_type_name(mask)}"
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
    """The cache update of the original attention. keep: how many keys sdpa reads where it relies on its causal flag alone
    (a StaticCache returns all its slots; without a mask it can only have been empty before)."""
    extra = {}
    if cache_names[0] == "cache":  # transformers from 5.24 on hands the attention's other keywords to the cache
        extra["kwargs"] = {n: v for n, v in arguments.items() if n not in cache_names + ("attention_mask", "position_embeddings")}

    def update(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = cache.update(k, v, attention.layer_idx, **extra)
        if keep is not None and k.shape[2] > keep:
            k, v = k[:, :, :keep], v[:, :, :keep]
        return k, v

    return update


def signature_names(cls: type) -> tuple[str, ...]:
    """Names of the positional parameters of the class's forward, after self and hidden_states."""
    parameters = inspect.signature(inspect.unwrap(cls.forward)).parameters.values()  # type: ignore[attr-defined]
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)[2:]

"""A live layer read into its numerics and parameters, or the reason why it is not fused. Nothing here changes anything."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..blocks import BlockSpec, BlockWeights, MoeSpec, MoeWeights, check_mixture, fixed, fixed_mixture, like_rows, wide_router
from ..ops import Fixed
from .experts import COMPUTING, read_gate
from .routers import ROUTERS
from .sparse import Mixture
from .table import LayerSpec, MixtureSpec, Sparse, known_class
from .watch import HOOKS, Child, Fact, Slot, Watch

# The hooks of transformers on attention modules do nothing unless its collector, which `prepare` asks, wants attentions.
_CAPTURING = "transformers.utils.output_capturing"
PLAIN_TENSORS = (nn.Parameter, Tensor, FakeTensor)


class Binding(NamedTuple):
    """A layer's numerics and parameters. Valid while `is_current` says so."""

    spec: BlockSpec
    weights: BlockWeights
    present: tuple[Tensor, ...]  # of the weights
    attention: Any
    slots: tuple[Slot, ...]
    watch: Watch | None  # None while torch.compile traces
    # (module that may be in training, module with the rate, attribute, path): rates that must be 0 then
    dropouts: tuple[tuple[nn.Module, nn.Module, str, str], ...]
    partial: bool  # tables may be narrower than a head
    own: Mapping[str, nn.Module]  # weight -> the module that adapts it, which runs itself
    fixed: Fixed | None = None  # None while torch.compile traces
    mixture: Mixture | None = None


class BlockBinding(NamedTuple):
    """Likewise of a block of experts that is fused alone."""

    mixture: Mixture
    watch: Watch | None


# Activations that are plain functions, called with their defaults.
_FUNCTIONS = ((nn.functional.silu, "silu"), (nn.functional.gelu, "gelu"), (nn.functional.relu, "relu"))
# Where those are from that are modules.
_MODULES = ("torch.nn.modules.activation", "transformers.activations", "fusedblock.models.block_parts")


def activation_of(function: Any) -> str | None:
    """The activation's name in fusedblock.blocks, or None."""
    for known_function, name in _FUNCTIONS:
        if function is known_function:
            return name
    name = type(function).__name__
    if type(function).__module__ not in _MODULES:
        return None
    if name in ("SiLU", "SiLUActivation"):
        return "silu"
    if name == "GELU":
        return {"none": "gelu", "tanh": "gelu_tanh"}[function.approximate]
    known = {"GELUActivation": "gelu", "GELUTanh": "gelu_tanh", "NewGELUActivation": "gelu_tanh", "ReLU": "relu",
             "ReLUSquaredActivation": "relu2"}  # fmt: skip
    return known.get(name)


def patched(cls: type) -> str | None:
    """Why the class's forward is not the one that its module defines, or None."""
    forward = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    if forward.__module__ == cls.__module__:
        return None
    return f"{cls.__name__}.forward is {forward.__module__}.{forward.__qualname__}"


def other_forward(cls: type, known: type) -> str | None:
    """Why the forward of cls is not what the class in the table, which is one of its bases, has in its module; or None."""
    if inspect.unwrap(cls.forward) is not inspect.unwrap(known.forward):  # type: ignore[attr-defined]
        return f"{cls.__name__} overrides the forward of {known.__name__}"
    return patched(known)


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


# An adapter is run where its linear layer would have been, whatever it then does: scale, drop out, be merged or off.
_ADAPTER = "peft.tuners.lora.layer.Linear"
_IDENTITY = "torch.nn.modules.linear.Identity"
# Fields of BlockSpec that the table fixes.
_OPTIONS = ("weight_offset", "round_early", "norm", "residual", "qkv_layout", "qk_norm", "rope", "tables", "mlp")


class Unfit(Exception):
    """Why the layer is not fused, from deep inside `bind`."""


def _at(layer: nn.Module, path: str) -> Any:
    """The attribute at a dotted path, or None."""
    value: Any = layer
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _owner(layer: nn.Module, path: str) -> tuple[Any, str]:
    """(module, or config, that has the attribute, or None for the layer itself; its name there)."""
    parent, _, name = path.rpartition(".")
    return (_at(layer, parent) if parent else None), name


def _dotted(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def type_name(value: Any) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ in ("builtins", "torch") else f"{cls.__module__}.{cls.__qualname__}"


def refusal(path: str, module: Any, expected: str = "", capturing: bool = False) -> str | None:
    """Why the submodule must run itself, or None. expected: the dotted name of its class, "" for any module (an activation)."""
    if not isinstance(module, nn.Module):
        return f"{path} is {type_name(module)}, not a module"
    cls = type(module)
    if expected and _dotted(module) != expected:
        shown = expected.rpartition(".")[2]
        return f"{path} is {type_name(module)}, not {'torch.nn.' if expected.startswith('torch.') else ''}{shown}"
    if reason := patched(cls):
        return reason
    shadow = _shadow(module)
    if shadow:
        return f"{path} {shadow}"
    for hooks in [getattr(module, name) for name in HOOKS]:
        for hook in hooks.values():
            if not capturing or getattr(hook, "__module__", None) != _CAPTURING:
                return f"{path} has a hook"
    return None


def child_of(layer: nn.Module, path: str, expected: str, capturing: bool = False) -> Child:
    parent, name = _owner(layer, path)
    module = (layer if parent is None else parent)._modules.get(name)
    if reason := refusal(path, module, expected, capturing):
        raise Unfit(reason)
    assert module is not None
    return Child(parent, name, module)


def sparse_of(layer: nn.Module, spec: LayerSpec) -> Sparse | None:
    """The entry's mixture, unless the layer has a dense MLP in its place."""
    sparse = spec.sparse
    dense = sparse and spec.classes.get(sparse.block)
    return None if dense and sparse and _dotted(_at(layer, sparse.block)) == f"{spec.home}.{dense}" else sparse


def _parts(spec: LayerSpec, sparse: Sparse | None) -> dict[str, str]:
    """Path -> class of the layer's parts whose arithmetic the fused layer replaces, beside norms and linear layers."""
    return {**spec.classes, **(sparse.classes if sparse else {})}


def classes(layer: nn.Module, spec: LayerSpec) -> list[type]:
    """Of the layer's parts whose arithmetic the fused layer replaces."""
    sparse = sparse_of(layer, spec)
    paths = (*_parts(spec, sparse), *spec.norms.values(), *([sparse.router] if sparse else []))
    return [type(module) for module in (_at(layer, path) for path in paths) if module is not None]


def unsupported(layer: nn.Module, spec: LayerSpec) -> str | None:
    """Why no kernel exists for the layer's sizes or numerics, or None."""
    head_dim = _at(layer, f"{spec.attention}.{spec.head_dim}") or 0
    if not 16 <= head_dim <= 256 or head_dim % 8:
        return f"head_dim={head_dim}, the kernels take multiples of 8 from 16 to 256"
    scale = _at(layer, f"{spec.attention}.{spec.scaling}") if spec.scaling else head_dim**-0.5
    if not (isinstance(scale, (int, float)) and 0 < scale < float("inf")):
        return f"the softmax scale is {scale}, the kernels take positive finite numbers"
    activation = None if (sparse := sparse_of(layer, spec)) else _at(layer, spec.activation)
    if not sparse and activation_of(activation) is None:
        return f"activation {type_name(activation)} has no kernel"
    for name, path in (("window", spec.window), ("softcap", spec.softcap)):
        value = _at(layer, path) if path else None
        whole = name == "window"  # of tokens, itself among them
        if value is not None and not (isinstance(value, int if whole else (int, float)) and 0 < value < float("inf")):
            return f"{path} is {value}, expected a positive {'integer' if whole else 'number'} or None"
    for path, reason in spec.refused.items():
        if _at(layer, path):
            return reason
    places = (*spec.norms.values(), f"{spec.attention}.{spec.q_norm}", f"{spec.attention}.{spec.k_norm}")
    found = [_at(layer, f"{path}.{spec.eps}") for path in places]
    found = [eps for eps in found if eps is not None]  # no such norm, or one of another class, which `bind` refuses
    if other := [eps for eps in found if not isinstance(eps, (int, float))]:
        return f"{spec.eps} of a norm is a {type_name(other[0])}, expected a number"
    if len(set(found)) > 1:
        return f"the norms have different epsilons, {' and '.join(map(str, dict.fromkeys(found)))}"
    return None


def bind(layer: nn.Module, spec: LayerSpec) -> Binding | str:
    """Read the layer: its numerics, its parameters, and what must stay as it is for them to be right; or why it is not fused."""
    try:
        return _bind(layer, spec)
    except Unfit as unfit:
        return str(unfit)


def _bind(layer: nn.Module, spec: LayerSpec) -> Binding:
    check_class(layer, known_class)
    facts: list[Fact] = []
    fact = reader(layer, facts)
    sparse = sparse_of(layer, spec)
    options = {name: getattr(spec, name) for name in _OPTIONS}
    options |= {"mlp": "mixture"} if sparse else {}
    for path, (field, values) in spec.switches.items():
        options[field] = values[bool(fact(path))]
    children = [child_of(layer, path, f"{spec.home}.{name}", path == spec.attention)
                for path, name in _parts(spec, sparse).items()]  # fmt: skip
    norm_class = spec.norm_class if "." in spec.norm_class else f"{spec.home}.{spec.norm_class}"
    # A parallel layer whose branches share one norm does not look at the other, which it may have from before.
    norms = {n: p for n, p in spec.norms.items()
             if not (options["residual"] == "parallel" and n == "mlp_norm" and spec.shared_norm)}  # fmt: skip
    modules: dict[str, nn.Module] = {}
    for name in [n for n in spec.first_lacks if type(_at(layer, norms[n])) is nn.Identity]:
        children.append(child_of(layer, norms.pop(name), _IDENTITY))
    heads = ("q_norm", "k_norm") if options["qk_norm"] else ()
    places = {**norms, **{n: f"{spec.attention}.{getattr(spec, n)}" for n in heads}}
    for name, path in places.items():
        children.append(child_of(layer, path, norm_class))
        modules[name] = children[-1].module
    own: dict[str, nn.Module] = {}
    for name, path in spec.linears.items():
        if sparse and name in ("gate", "up", "down"):
            continue
        if _dotted(_at(layer, path)) == _ADAPTER:
            children.append(child_of(layer, path, _ADAPTER))
            own[name], path = children[-1].module, path + ".base_layer"
        children.append(child_of(layer, path, spec.linear_class))
        modules[name] = children[-1].module
    activation = "" if sparse else read_activation(layer, spec.activation, fact, children)
    attention, dropouts = _at(layer, spec.attention), []
    for path in (*spec.dropouts, *(sparse.noises if sparse else ())):
        owner, name = _owner(layer, path)
        if isinstance(_at(layer, path), nn.Module):
            if type(_at(layer, path)) is nn.Identity:  # for a rate of 0
                children.append(child_of(layer, path, _IDENTITY))
                continue
            children.append(child_of(layer, path, "torch.nn.modules.dropout.Dropout"))
            # Attention takes the rate of its module and asks itself whether it is in training.
            module = children[-1].module
            readers = (module, attention) if path.rpartition(".")[0] == spec.attention else (module,)
            dropouts += [(reader, module, "p", path) for reader in readers]
        else:
            holder = layer if owner is None else owner
            dropouts.append((holder, holder, name, path))
    if reason := unsupported(layer, spec):
        raise Unfit(reason)

    slots = _slots(modules)
    if spec.sinks:
        owner, name = _owner(layer, spec.sinks)
        slots["sinks"] = (owner._parameters, name, _plain(owner._parameters.get(name), spec.sinks))
    for path in spec.refused:
        fact(path)
    if own.keys() & {"q", "k", "v"} and any(p.dim() > 1 for p in (slots[n][2] for n in heads) if p is not None):
        raise Unfit("an adapter before norms with weights for every head")
    weights = BlockWeights(**{name: slot[2] for name, slot in slots.items()})  # type: ignore[arg-type]
    for path in places.values():
        fact(f"{path}.{spec.eps}")
    numbers = _sizes(weights, fact(f"{spec.attention}.{spec.head_dim}"), options, spec)
    groups = fact(f"{spec.attention}.num_key_value_groups") if hasattr(attention, "num_key_value_groups") else 1
    if numbers["heads"] // numbers["kv_heads"] != groups:
        raise Unfit(f"{numbers['heads']} heads over {numbers['kv_heads']} key/value heads, but num_key_value_groups={groups}")
    eps = _at(layer, f"{next(iter(norms.values()))}.{spec.eps}")
    scale = fact(f"{spec.attention}.{spec.scaling}") if spec.scaling else numbers["head_dim"] ** -0.5
    reach = (fact(spec.window) or 0) - 1 if spec.window else -1
    mixture: Mixture | None = None
    places_of: list[Slot] = []
    if sparse:
        mixture, places_of = bind_sparse(layer, spec, sparse, numbers["hidden"], fact, children)
        shared = "" if not sparse.shared else "gated" if sparse.shared_gate else "plain"
        numbers |= {"experts": mixture.weights.router.shape[0], "top_k": mixture.spec.router.top_k, "shared": shared,
                    "wide_router": wide_router(mixture.weights), "experts_transposed": mixture.spec.transposed}  # fmt: skip
    block = BlockSpec(
        **numbers, **options, scale=float(scale), eps=float(eps),
        activation=activation, branch_scale=float(fact(spec.branch_scale)) if spec.branch_scale else 1.0,
        transposed=spec.linear_class.endswith("Conv1D"), norms=" ".join(norms), window_left=reach,
        window_right=-1 if fact(f"{spec.attention}.is_causal") else reach,
        softcap=float(fact(spec.softcap) or 0.0) if spec.softcap else 0.0,
    )  # fmt: skip
    kept = None if torch.compiler.is_compiling() else fixed(block, weights)
    held = (*slots.values(), *places_of)
    return Binding(block, weights, tuple(t for t in weights if t is not None), attention, held,
                   watch(layer, children, held, facts, _at(layer, sparse.experts) if sparse else None),
                   tuple(dropouts), spec.partial, own, kept, mixture)  # fmt: skip


def watch(
    layer: nn.Module, children: Sequence[Child], slots: Sequence[Slot], facts: Sequence[Fact], experts: nn.Module | None = None
) -> Watch | None:
    """Of a layer that is bound, and the experts in it; None while torch.compile traces."""
    if torch.compiler.is_compiling():
        return None
    own = getattr(type(layer), "_fusedblock_original", None)
    return Watch(layer, children, slots, facts, [] if own is None else [own], [] if experts is None else [experts])


def check_class(layer: nn.Module, find: Callable[[type], type | None]) -> None:
    """Raises Unfit where a fused layer's original class has got a forward of its own. find: known_class or known_block."""
    own = getattr(type(layer), "_fusedblock_original", None)
    known = None if own is None else find(own)
    if own is not None and known is not None and (reason := other_forward(own, known)):
        raise Unfit(reason)


def read_activation(layer: nn.Module, path: str, fact: Callable[[str], Any], children: list[Child]) -> str:
    """Its name. Appends to children, and notes what the name was read from."""
    children.append(child_of(layer, path, ""))
    name = activation_of(children[-1].module)
    if name is None:
        raise Unfit(f"activation {type_name(children[-1].module)} has no kernel")
    for attribute in ("approximate", "act"):  # of torch's GELU and of transformers' classes around functions
        if hasattr(children[-1].module, attribute):
            fact(f"{path}.{attribute}")
    return name


def reader(layer: nn.Module, facts: list[Fact]) -> Callable[[str], Any]:
    """A function that reads the attribute at a path, and notes what it was."""

    def fact(path: str) -> Any:
        value, parent = _at(layer, path), path.rpartition(".")[0]
        facts.append((*_owner(layer, path), value))
        holder = _at(layer, parent) if parent else None
        if holder is not None and not isinstance(holder, (nn.Module, Tensor)):  # a config: that it is still this one
            facts.append((*_owner(layer, parent), holder))
        return value

    return fact


def _plain(tensor: Any, path: str) -> Tensor:
    if type(tensor) not in (*PLAIN_TENSORS, nn.Buffer):  # as which torch.compile sees a buffer
        raise Unfit(f"{path} is {'no parameter' if tensor is None else f'a {type_name(tensor)}'}")
    return tensor  # type: ignore[no-any-return]


def bind_sparse(layer: nn.Module, spec: LayerSpec | MixtureSpec, sparse: Sparse, hidden: int, fact: Callable[[str], Any],
                 children: list[Child]) -> tuple[Mixture, list[Slot]]:  # fmt: skip
    """The mixture, and the places of its parameters. Appends what must stay as it is to children."""
    entry, experts = ROUTERS[spec.family], _at(layer, sparse.experts)
    children.append(child_of(layer, sparse.router, f"{spec.home}.{sparse.router_class or entry.layer_class}", capturing=True))
    router = children[-1].module
    numbers = (*entry.live.values(), *(entry.ungrouped[:1] if entry.ungrouped else ()))
    for name in numbers:
        if isinstance(value := fact(f"{sparse.router}.{name}"), Tensor):
            raise Unfit(f"{sparse.router}.{name} is a {type_name(value)}, expected a number")
    for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate", "alpha", "limit",
                 "has_post_expert_norm"):  # fmt: skip
        fact(f"{sparse.experts}.{name}")
    if (how := fact(f"{sparse.experts}.config._experts_implementation")) not in COMPUTING:
        raise Unfit(f"experts implementation {how!r}")
    gate = read_gate(experts)
    if isinstance(gate, str):
        raise Unfit(f"{sparse.experts}: {gate}")
    slots: dict[str, Slot] = {}

    def put(name: str, holder: dict[str, Any], leaf: str, path: str) -> None:
        slots[name] = (holder, leaf, _plain(holder.get(leaf), f"{path}.{leaf}"))
        for laid in ("shape", "dtype"):  # `.data =` and module.to() change them under the parameter
            fact(f"{path}.{leaf}.{laid}")

    for argument, leaf in entry.tensors.items():
        name = {"weight": "router", "bias": "router_bias", "correction_bias": "router_correction"}[argument]
        put(name, router._parameters if leaf in router._parameters else router._buffers, leaf, sparse.router)
    for name, leaf in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
        put(name, experts._parameters, leaf, sparse.experts)
        if experts.has_bias:
            put(f"{name}_bias", experts._parameters, f"{leaf}_bias", sparse.experts)
    if "act_fn" in experts._modules:
        read_activation(layer, f"{sparse.experts}.act_fn", fact, children)
    else:
        fact(f"{sparse.experts}.act_fn")
    found = MoeSpec(entry.read(router), *gate, experts.is_transposed, not experts.is_concatenated)
    linears = {f"shared_{n}": f"{sparse.shared}.{n}_proj" for n in ("gate", "up", "down")} if sparse.shared else {}
    linears |= {"shared_router": sparse.shared_gate} if sparse.shared_gate else {}
    for name, path in linears.items():
        children.append(child_of(layer, path, spec.linear_class))
        put(name, children[-1].module._parameters, "weight", path)
        slots[f"{name}_bias"] = (children[-1].module._parameters, "bias", None)
        if children[-1].module._parameters.get("bias") is not None:
            raise Unfit(f"{path} has a bias")
    if sparse.shared:
        found = replace(found, shared_activation=read_activation(layer, f"{sparse.shared}.act_fn", fact, children))
    weights = MoeWeights(**{name: slot[2] for name, slot in slots.items() if name in MoeWeights._fields})  # type: ignore[arg-type]
    try:
        check_mixture(found, weights, like_rows(found, weights).new_empty(0, hidden))
    except (TypeError, ValueError) as error:
        raise Unfit(str(error)) from None
    kept = None if torch.compiler.is_compiling() else fixed_mixture(found, weights)
    return Mixture(found, weights, router, kept), [*slots.values()]


# Classes whose forward adds a bias: others do not look at one.
_BIASED = ("torch.nn.modules.linear.Linear", "torch.nn.modules.normalization.LayerNorm")


def _slots(modules: Mapping[str, nn.Module]) -> dict[str, Slot]:
    """Field of BlockWeights -> the place of the parameter. A linear layer's or LayerNorm's bias may be None."""
    slots: dict[str, Slot] = {}
    for name, module in modules.items():
        kind, held = type(module).__name__, module._parameters
        biased = _dotted(module) in _BIASED or kind == "Conv1D"
        if not isinstance(held.get("weight"), Tensor) or "weight" in module.__dict__:
            raise Unfit(f"a weight of {kind} is not a parameter")
        if biased and ("bias" not in held or "bias" in module.__dict__):
            raise Unfit(f"the bias of a {kind} is not a parameter")
        known = {"weight", "bias"} if biased else {"weight"}
        if held.keys() - known or (held.get("bias") is not None and name in ("q_norm", "k_norm")):
            raise Unfit(f"{kind} has parameters {', '.join(held)}")
        slots[name] = (held, "weight", held["weight"])
        if name + "_bias" in BlockWeights._fields:
            slots[name + "_bias"] = (held, "bias", held.get("bias"))
    for tensor in (slot[2] for slot in slots.values()):
        if tensor is not None and type(tensor) not in PLAIN_TENSORS:
            raise Unfit(f"a weight is a {type_name(tensor)}")
    return slots


def _sizes(w: BlockWeights, head_dim: int, options: Mapping[str, Any], spec: LayerSpec) -> dict[str, Any]:
    """hidden, ffn, heads, kv_heads, head_dim, having checked that every weight has the shape they give it."""
    transposed = spec.linear_class.endswith("Conv1D")

    def shape(t: Tensor) -> tuple[int, ...]:
        return tuple(t.shape[::-1] if transposed and t.dim() == 2 else t.shape)

    (hidden, q_width), ffn = shape(w.o), 0 if w.down is None else shape(w.down)[1]
    rows = shape(w.q)[0]
    heads = q_width // head_dim
    split = options["qkv_layout"] == "split"
    kv_width = heads * head_dim if options["qkv_layout"] == "per_head" else (
        shape(w.k)[0] if split and w.k is not None else (rows - q_width) // 2)  # fmt: skip
    kv_heads = kv_width // head_dim
    n_up = 2 * ffn if options["mlp"] == "gated_stacked" else ffn
    widths = {"q": q_width if split else q_width + 2 * kv_width, "k": kv_width, "v": kv_width, "o": hidden,
              "gate": ffn, "up": n_up, "down": hidden}  # fmt: skip
    inner = {"o": q_width, "down": ffn}
    for name, tensor in w._asdict().items():
        if tensor is None:
            continue
        base = name.removesuffix("_bias")
        allowed: tuple[tuple[int, ...], ...]
        if name == "sinks":
            allowed = ((heads,),)
        elif name in ("q_norm", "k_norm"):
            n, width = (heads, q_width) if name == "q_norm" else (kv_heads, kv_width)
            allowed = {"head": ((head_dim,), (n, head_dim)), "full": ((width,),)}[options["qk_norm"]]
        elif base.endswith("_norm"):
            allowed = ((hidden,),)
        else:
            allowed = ((widths[base],),) if name.endswith("_bias") else ((widths[base], inner.get(base, hidden)),)
        found = tuple(tensor.shape) if base.endswith("_norm") else shape(tensor)
        if found not in allowed:
            raise Unfit(f"the {name} weight has shape {tuple(tensor.shape)}, expected {' or '.join(map(str, allowed))}")
    if not kv_heads or heads * head_dim != q_width or kv_heads * head_dim != kv_width or heads % kv_heads:
        raise Unfit(f"q and k of widths {q_width} and {kv_width} are no groups of heads of head_dim={head_dim}")
    return {"hidden": hidden, "ffn": ffn, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}


def is_current(binding: Binding, layer: nn.Module) -> bool:
    """Whether `bind` would give the same binding again. A few microseconds: it is asked at every call."""
    block, weights = binding.spec, binding.weights
    rows = weights.o.shape[0 if block.transposed else 1]
    return binding.watch is not None and binding.watch.holds(layer) and rows == block.heads * block.head_dim

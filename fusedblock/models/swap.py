"""The swap: a layer becomes, in place, an instance of a subclass of its own class.

    layer.__class__ = type(original.__name__, (FusedLayer, original), ...)

The object, its children, parameters, hooks and state-dict keys stay what they were; isinstance and names still hold;
`super().forward` is the fallback; and the way back is to put the class back. All state of ours is one entry of the layer's
__dict__, which is neither a module nor a buffer.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import blocks
from . import adapter, alone, table
from .binding import Binding, BlockBinding, bind, classes, is_bound, is_current, other_forward, patched, unsupported
from .interface import register_if_loaded
from .report import BlockRecord, Calls, FusionReport, LayerRecord, ranges

STATE = "_fusedblock"


class _State:
    """What a fused layer knows beyond what its original knew."""

    def __init__(self, name: str, index: int, saved: dict[str, Any] | None = None) -> None:
        self.name, self.index = name, index
        self.saved = saved or {}  # instance attributes that the swap replaced
        self.calls = Calls()
        self.binding: Any = None

    def __reduce__(self) -> tuple[Any, ...]:  # copies count for themselves and bind to their own parameters
        return _State, (self.name, self.index)


class _Fused(nn.Module):
    """Mixin in front of an original class. Each call runs fused, or falls back to the original forward."""

    _fusedblock_original: type[nn.Module]
    _fusedblock_spec: Any

    def _fusedblock_bound(self, read: Any, current: Any) -> Any:
        """read(self, spec), remembered while current(it, self) says so."""
        if torch.compiler.is_compiling():
            # Traced anew, so that the graph is guarded by the module itself and not by what was remembered of it.
            return read(self, self._fusedblock_spec)
        state = self.__dict__[STATE]
        known = state.binding
        if known is not None and current(known, self):
            return known
        bound = read(self, self._fusedblock_spec)
        state.binding = None if isinstance(bound, str) else bound
        return bound

    def _fusedblock_count(self, fallback: str = "") -> None:
        if torch.compiler.is_compiling():
            return
        calls = self.__dict__[STATE].calls
        if fallback:
            calls.fallbacks[fallback] += 1
        else:
            calls.fused += 1

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles name the original class, which can be imported, and are fused again when they are made."""
        if not _is_fused(self):  # a class made from ours, e.g. by FSDP2
            return super().__reduce_ex__(protocol)
        state = self.__dict__[STATE]
        attributes = {name: value for name, value in self.__dict__.items() if name != STATE}
        return _rebuild, (self._fusedblock_original, state.name, state.index), attributes


class FusedLayer(_Fused):
    """Of a layer."""

    _fusedblock_spec: table.LayerSpec
    _fusedblock_arguments: tuple[str, ...]  # after hidden_states, when given by position
    _fusedblock_cache_names: tuple[str, ...]
    _fusedblock_collector: Any

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        named = kwargs if not args else {**dict(zip(self._fusedblock_arguments, args)), **kwargs}
        if len(named) < len(args) + len(kwargs):  # too many, or one given twice: python's own error
            return super().forward(hidden_states, *args, **kwargs)
        call = self._fusedblock_call(hidden_states, named)
        if isinstance(call, str):
            self._fusedblock_count(call)
            return super().forward(hidden_states, *args, **kwargs)
        self._fusedblock_count()
        return blocks.forward(
            call.spec, call.weights, hidden_states, call.cos, call.sin, mask=call.mask, causal=call.causal,
            windowed=call.windowed, cu_seqlens=call.cu_seqlens, update=call.update, compute_dtype=call.compute_dtype,
            own=call.own, kept=call.kept, slots=call.slots, mlp=call.mlp,
        )  # fmt: skip

    def _fusedblock_call(self, hidden_states: Tensor, arguments: dict[str, Any]) -> adapter.Call | str:
        """The fused call for these arguments, or why there is none."""
        bound: Binding | str = self._fusedblock_bound(bind, is_current)
        if isinstance(bound, str):
            return bound
        return adapter.prepare(bound, hidden_states, arguments, self._fusedblock_cache_names, self._fusedblock_collector)


class FusedMixture(_Fused):
    """Of a block of experts in a layer that is not fused."""

    _fusedblock_spec: table.MixtureSpec

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:  # the original takes none: python's own error
            return super().forward(hidden_states, *args, **kwargs)
        bound: BlockBinding | str = self._fusedblock_bound(alone.bind_block, alone.is_current)
        compute, why = (None, bound) if isinstance(bound, str) else alone.prepare(bound, hidden_states)
        if why or isinstance(bound, str):
            self._fusedblock_count(why)
            return super().forward(hidden_states)
        self._fusedblock_count()
        return bound.mixture(hidden_states.to(compute or hidden_states.dtype)).to(hidden_states.dtype)


def _rebuild(original: type[nn.Module], name: str, index: int) -> nn.Module:
    layer = original.__new__(original)
    layer.__dict__[STATE] = _State(name, index)
    layer.__class__ = _fused_class(original)
    return layer


_classes: dict[type, type[_Fused]] = {}


def _fused_class(original: type[nn.Module]) -> type[_Fused]:
    """The subclass of `original` that runs fused; one for each class."""
    if original in _classes:
        return _classes[original]
    namespace: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_fusedblock_original": original,
    }
    if block := table.known_block(original):
        namespace["_fusedblock_spec"] = table.BLOCKS[block.__name__]
        return _classes.setdefault(original, type(original.__name__, (FusedMixture, original), namespace))
    known = table.known_class(original)
    if known is None:
        raise ValueError(f"{original.__name__} is not supported, {table.supported()}")
    try:
        capturing = importlib.import_module("transformers.utils.output_capturing")
    except ImportError:
        capturing = None
    namespace |= {
        "_fusedblock_spec": table.SPECS[known.__name__],
        "_fusedblock_arguments": adapter.signature_names(original),
        "_fusedblock_cache_names": adapter.cache_names(original),
        "_fusedblock_collector": getattr(capturing, "_active_collector", None),
    }
    return _classes.setdefault(original, type(original.__name__, (FusedLayer, original), namespace))


def _is_fused(module: nn.Module) -> bool:
    """Exactly a class of ours, not one made from it."""
    return "_fusedblock_original" in type(module).__dict__


@dataclass(frozen=True)
class _Found:
    """A layer of a model; spec is None where its class is not supported."""

    name: str
    index: int
    layer: nn.Module
    spec: table.LayerSpec | None

    def record(self, status: str, reason: str) -> LayerRecord:
        return LayerRecord(self.name, self.index, type(self.layer).__name__, status, reason)


@dataclass(frozen=True)
class _FoundBlock:
    """A block of experts that is fused alone; the index is its layer's."""

    name: str
    index: int
    layer: nn.Module
    spec: table.MixtureSpec

    def record(self, status: str, reason: str) -> BlockRecord:
        return BlockRecord(self.name, self.index, type(self.layer).__name__, status, reason)


def decoder_layers(model: nn.Module) -> list[_Found]:
    """The model's layers, supported or not, in order. Raises ValueError naming the classes seen if none is supported."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, expected a torch.nn.Module with supported layers")
    found: list[_Found] = []
    seen: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            seen.update(type(item).__name__ for item in module)
        known = table.known_class(type(module))
        if known is not None or any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__):
            tail = name.rpartition(".")[2]
            spec = table.SPECS[known.__name__] if known else None
            found.append(_Found(name, int(tail) if tail.isdecimal() else len(found), module, spec))
    if not any(layer.spec or table.waiting(type(layer.layer)) for layer in found) and not expert_blocks(model):
        seen.update(type(layer.layer).__name__ for layer in found)
        raise ValueError(
            f"{type(model).__name__} has no layer that can be fused: its layers are {', '.join(sorted(seen)) or 'none'}; "
            + table.supported()
        )
    return found


def expert_blocks(model: nn.Module) -> list[_FoundBlock]:
    """The model's blocks of experts that are fused alone, in order, with the indices of their layers."""
    found: list[_FoundBlock] = []
    for name, module in model.named_modules():
        if known := table.known_block(type(module)):
            index = next((int(part) for part in reversed(name.split(".")) if part.isdecimal()), len(found))
            found.append(_FoundBlock(name, index, module, table.BLOCKS[known.__name__]))
    return found


def refusal(layer: nn.Module, spec: table.LayerSpec | table.MixtureSpec | None) -> str:
    """Why the class of the layer, or of the block of experts, is not swapped, or an empty string."""
    cls = type(layer)
    known = table.known_block(cls) if isinstance(spec, table.MixtureSpec) else table.known_class(cls)
    if spec is None or known is None:
        return table.waiting(cls) or f"{cls.__name__} is not supported"
    if reason := other_forward(cls, known):
        return reason
    for part in alone.parts(layer, spec) if isinstance(spec, table.MixtureSpec) else classes(layer, spec):
        if reason := patched(part):
            return reason
    forward = layer.__dict__.get("forward")
    hooked = "_hf_hook" in layer.__dict__ and is_bound(layer.__dict__.get("_old_forward"), layer, cls.forward)
    if forward is not None and not hooked and not is_bound(forward, layer, cls.forward):
        return "an instance attribute 'forward' would shadow the fused one"
    return "" if isinstance(spec, table.MixtureSpec) else unsupported(layer, spec) or ""


def falls_back(layer: nn.Module, spec: table.LayerSpec | table.MixtureSpec) -> str:
    """Why calls of the layer, or block, would fall back as it is now, whatever their arguments; or an empty string."""
    binding = alone.bind_block(layer, spec) if isinstance(spec, table.MixtureSpec) else bind(layer, spec)
    if isinstance(binding, str):
        # FSDP2 shows shards between calls and gathers the weights before a forward.
        sharded = any(base.__name__ == "FSDPModule" for base in type(layer).__mro__) and binding.endswith(".DTensor")
        return "" if sharded else binding
    shadowed = isinstance(layer, _Fused) and "forward" in layer.__dict__ and "_hf_hook" not in layer.__dict__
    return "an instance attribute 'forward' shadows the fused one" if shadowed else ""


def falls_back_now(layer: nn.Module, spec: table.LayerSpec | table.MixtureSpec) -> str:
    """Likewise, or would under the attention implementation that the model has now."""
    if (why := falls_back(layer, spec)) or isinstance(spec, table.MixtureSpec):
        return why
    binding = bind(layer, spec)
    if isinstance(binding, str):  # FSDP2's shards, about which nothing is said
        return ""
    return adapter.attention_refusal(binding, adapter.implementation_of(binding))


def dropouts(layer: nn.Module, spec: table.LayerSpec) -> str:
    """The rates above 0, for which calls in training run the original forward: "attn.attn_dropout=0.1"; or an empty string."""
    binding = bind(layer, spec)
    rates = () if isinstance(binding, str) else binding.dropouts
    return ", ".join(dict.fromkeys(f"{path}={getattr(m, rate)}" for _, m, rate, path in rates if getattr(m, rate)))


def fuse(model: nn.Module, *, strict: bool = False, layers: Iterable[int] | None = None) -> FusionReport:
    """Make the transformer layers of a Hugging Face model run on fused kernels, in place.

    Parameters, state-dict keys, hooks, isinstance and class names stay as they are, so that training, saving, PEFT, FSDP2 and
    generate go on as before. A call that the kernels cannot take runs the original forward, and the report counts it. The
    arithmetic is that of transformers' layer, but rows that may attend to nothing (padding) give 0. Of rotary tables whose
    halves are equal in every rotary module of transformers' family, the first half is read. A layer with experts runs ours
    whatever the model's experts_implementation, and tells transformers' hooks what its router says: router_logits and auxiliary
    losses are there. Of layers that wait for latent attention (DeepSeek V2 and V3) the blocks of experts are fused alone: router,
    experts and shared expert.

    Args:
        model: any module that contains layers of a supported family (`fusedblock families`), or one such layer.
        strict: raise instead of leaving any layer, selected by `layers`, to its original forward, be it for the model's attention
            implementation (sdpa has no softcap and no sinks). Not for a dropout rate above 0, of which the report has a note:
            only calls in training run the original forward for it.
        layers: indices, in the list that holds them, of the layers to fuse, or to fuse the experts of; None: all.

    Returns a FusionReport with one LayerRecord for each layer, and a BlockRecord for each block of experts that is fused alone.
    Raises ValueError, with nothing changed, if the model has no supported layer, `layers` names one that it does not have, or a
    layer cannot be fused under strict.
    """
    found = decoder_layers(model)
    register_if_loaded()
    if layers is not None:
        layers = layers if isinstance(layers, (int, str)) else tuple(layers)
        if not isinstance(layers, tuple) or not all(isinstance(n, int) for n in layers):
            raise TypeError(f"fuse: layers is {layers!r}, expected an iterable of int")
    entries: list[_Found | _FoundBlock] = [*found, *expert_blocks(model)]
    present = {entry.index for entry in entries if entry.spec}
    wanted = present if layers is None else set(layers)
    if not wanted <= present:
        raise ValueError(
            f"fuse: layers has {ranges(wanted - present)}, but the layers of {type(model).__name__} are {ranges(present)}"
        )
    records = []
    for entry in entries:
        if entry.spec is not None and isinstance(entry.layer, _Fused):
            record = entry.record("already fused", falls_back_now(entry.layer, entry.spec))
            record = replace(record, calls=entry.layer.__dict__[STATE].calls)
        elif layers is not None and entry.index not in wanted:
            record = entry.record("skipped", "not in layers")
        elif why := refusal(entry.layer, entry.spec):
            record = entry.record("fallback", why)
        else:
            assert entry.spec is not None
            record = entry.record("fused", falls_back_now(entry.layer, entry.spec))
        if isinstance(entry.spec, table.LayerSpec) and record.status in ("fused", "already fused"):
            record = replace(record, dropout=dropouts(entry.layer, entry.spec))
        records.append(record)
    failed = [f"  {r.name or r.layer_class}: {r.reason}" for r in records if r.reason and r.status != "skipped"]
    if strict and failed:
        what = "layers" if len(entries) == len(found) else "layers and blocks of experts"
        raise ValueError(f"fuse: {len(failed)} of {len(entries)} {what} cannot be fused\n" + "\n".join(failed))
    for entry, record in zip(entries, records):
        if record.status == "fused":
            _swap(entry.layer, record)
    return FusionReport(tuple(records[: len(found)]), tuple(r for r in records[len(found) :] if isinstance(r, BlockRecord)))


def _swap(layer: nn.Module, record: LayerRecord) -> None:
    original, attributes = type(layer), layer.__dict__
    fused = _fused_class(original)
    saved = {}
    for name in ("forward", "_old_forward"):
        # An instance forward hides the class's: accelerate keeps the original's under another name, others leave one behind.
        if is_bound(attributes.get(name), layer, original.forward):
            saved[name] = attributes.pop(name)
    layer.__class__ = fused
    if "_old_forward" in saved:
        attributes["_old_forward"] = types.MethodType(fused.forward, layer)
    state = _State(record.name, record.index, saved)
    state.calls = record.calls
    attributes[STATE] = state


def unfuse(model: nn.Module) -> int:
    """Give every fused layer and block of the model its original class back. Returns how many there were.

    Raises RuntimeError, with nothing changed, if a layer's class was replaced after fuse (FSDP2 does that): undo that first.
    """
    fused = []
    for name, module in model.named_modules():
        if not isinstance(module, _Fused):
            continue
        if not _is_fused(module):
            raise RuntimeError(
                f"unfuse: the class of {name or 'model'} was replaced after fuse, by {type(module).__name__} "
                f"({type(module).__mro__[1].__name__} and others); undo that first"
            )
        fused.append(module)
    for module in fused:
        _restore(module)
    return len(fused)


def _restore(layer: _Fused) -> None:
    fused, original = type(layer), layer._fusedblock_original
    attributes = layer.__dict__
    saved = attributes.pop(STATE).saved
    layer.__class__ = original  # type: ignore[assignment]
    for name in ("forward", "_old_forward"):
        if is_bound(attributes.get(name), layer, fused.forward):  # put there by us, or by accelerate after fuse
            del attributes[name]
            if name == "_old_forward":
                attributes[name] = saved.get(name) or types.MethodType(original.forward, layer)
        if name == "forward" and name in saved:
            attributes.setdefault(name, saved[name])

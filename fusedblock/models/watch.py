"""What a binding was read from, and whether a layer is still that. Asked at every call: loops of C over flat tuples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

from torch import Tensor, nn


class Child(NamedTuple):
    """A submodule whose forward the fused layer replaces."""

    parent: nn.Module | None  # None: the layer itself, which a replica of it shares the binding with
    name: str
    module: nn.Module


Slot = tuple[dict[str, Any], str, Tensor | None]  # (a module's _parameters, name, parameter)
Fact = tuple[Any, str, Any]  # (its owner, or None for the layer; attribute; what the spec was made of)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DICTIONARIES = ("_modules", "_parameters", "_buffers")
_MISSING = object()
_place_of, _hooks_of = attrgetter("__dict__"), itemgetter(*HOOKS)


class Watch:
    """Children, parameters and facts as they were. classes: whose forwards too, beside the children's. closed: modules that get
    no other children."""

    def __init__(
        self, layer: nn.Module, children: Sequence[Child], slots: Sequence[Slot], facts: Sequence[Fact],
        classes: Sequence[type] = (), closed: Sequence[nn.Module] = (),
    ) -> None:  # fmt: skip
        own = [child for child in children if child.parent is None]
        self._own_names, self._own = tuple(c.name for c in own), tuple(c.module for c in own)
        self._modules = tuple(child.module for child in children)
        self._types = tuple(map(type, self._modules))
        self._forwards: tuple[tuple[Any, Any], ...] = tuple({cls: cls.forward for cls in (*self._types, *classes)}.items())  # type: ignore[attr-defined]
        # An attribute more, a forward of the instance or what hides a parameter, makes a dictionary longer.
        self._places = tuple(map(_place_of, self._modules))
        self._sizes = tuple(map(len, self._places))
        self._hookless = tuple(place for place in self._places if not any(_hooks_of(place)))
        self._keys_of = (
            *((place, HOOKS, _keys(_hooks_of(place))) for place in self._places if any(_hooks_of(place))),
            *((module.__dict__, ("_modules",), tuple(module._modules)) for module in closed),
        )
        # Entries of dictionaries: other children, parameters, what a module has already in front of its class's forward.
        entries: list[tuple[dict[str, Any], str]] = [(c.parent._modules, c.name) for c in children if c.parent is not None]
        entries += [(parameters, name) for parameters, name, _ in slots]
        entries += [(place, "forward") for place in self._places if "forward" in place]
        used = {id(dictionary) for dictionary, _ in entries}
        owners = {id(m): m for m in (*self._modules, *(c.parent for c in children if c.parent is not None))}
        entries += [(m.__dict__, name) for m in owners.values() for name in _DICTIONARIES if id(m.__dict__.get(name)) in used]
        self._facts, steps = _grouped(layer, facts, self._modules)
        self._dicts, self._keys = zip(*entries, *steps)
        self._held = tuple(map(dict.get, self._dicts, self._keys, repeat(_MISSING)))

    def holds(self, layer: nn.Module) -> bool:
        """Whether everything is what it was."""
        if not (
            all(map(is_, map(layer._modules.get, self._own_names), self._own))
            and all(map(is_, map(dict.get, self._dicts, self._keys, repeat(_MISSING)), self._held))
            and all(map(is_, map(type, self._modules), self._types))
            and all(map(is_, map(_place_of, self._modules), self._places))
            and tuple(map(len, self._places)) == self._sizes
            and not any(chain.from_iterable(map(_hooks_of, self._hookless)))
        ):
            return False
        for place, names, keys in self._keys_of:
            if _keys([place[name] for name in names]) != keys:
                return False
        for cls, forward in self._forwards:
            if cls.forward is not forward:
                return False
        try:
            for owner, read, values, same in self._facts:
                if not all(map(same, read(layer if owner is None else owner), values)):
                    return False
        except AttributeError:
            return False
        return True


def _keys(dictionaries: Sequence[dict[Any, Any]]) -> tuple[Any, ...]:
    return tuple(chain.from_iterable(dictionaries))


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def _reader(names: Sequence[str]) -> Any:
    """A function that reads attributes, as a tuple."""
    return attrgetter(*names) if len(names) > 1 else lambda owner: (getattr(owner, names[0]),)


def _grouped(
    layer: nn.Module, facts: Sequence[Fact], modules: Sequence[nn.Module]
) -> tuple[tuple[Any, ...], list[tuple[dict[str, Any], str]]]:
    """((owner, a function that reads a tuple, what that gave, how both compare), ...), and entries of dictionaries.

    What is replaced by an equal, by a parameter perhaps, is another. An attribute that a module of `modules` has not got needs no
    look: its dictionary would be longer."""
    watched = {id(module) for module in modules}
    found: list[tuple[Any, Any, Any, Any]] = []
    entries: list[tuple[dict[str, Any], str]] = []
    for key, owner in {id(owner): owner for owner, _, _ in facts}.items():
        known = {name: value for of, name, value in facts if id(of) == key}
        if owner is not None:
            held = [name for name, value in known.items() if getattr(owner, "__dict__", {}).get(name, _MISSING) is value]
            entries += [(owner.__dict__, name) for name in held]
            known = {name: value for name, value in known.items() if name not in held}
        now = layer if owner is None else owner
        present = {name: value for name, value in known.items() if value is not None or hasattr(now, name)}
        stable = all(getattr(now, name) is value for name, value in present.items())
        if present:
            found.append((owner, _reader(tuple(present)), tuple(present.values()), is_ if stable else _equal))
        lacking = [name for name in known if name not in present and id(owner) not in watched]
        found += [(owner, lambda of, name=name: (getattr(of, name, None),), (None,), is_) for name in lacking]
    return tuple(found), entries

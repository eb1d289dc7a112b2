"""What a binding was read from, and whether a layer is still that. Asked at every call: loops of C over flat tuples."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

from torch import Tensor, nn


class Child(NamedTuple):
    """A submodule whose forward the fused layer replaces, as it was when the binding was made."""

    parent: nn.Module | None  # None: the layer itself, which a replica of it shares the binding with
    name: str
    module: nn.Module
    hooks: tuple[dict[int, Any], ...]  # the module's own dictionaries: live
    forward: Any  # instance attribute, if any


Slot = tuple[dict[str, Any], str, Tensor | None]  # (a module's _parameters, name, parameter)
Fact = tuple[Any, str, Any]  # (its owner, or None for the layer; attribute; what the spec was made of)


class Watch:
    """Children, parameters and facts as they were."""

    def __init__(self, children: Sequence[Child], slots: Sequence[Slot], facts: Sequence[Fact]) -> None:
        modules = [child.module for child in children]
        own = [child for child in children if child.parent is None]
        self._own_names, self._own = tuple(c.name for c in own), tuple(c.module for c in own)
        # Entries of dictionaries: other children, parameters, instance attributes that would shadow a class's forward.
        entries: list[tuple[dict[str, Any], str, Any]] = [
            (c.parent._modules, c.name, c.module) for c in children if c.parent is not None
        ]
        entries += [*slots, *((c.module.__dict__, "forward", c.forward) for c in children)]
        self._dicts, self._keys, self._held = zip(*entries)
        self._modules, self._types = tuple(modules), tuple(map(type, modules))
        self._forwards: tuple[tuple[Any, Any], ...] = tuple({type(m): type(m).forward for m in modules}.items())
        hooks = [group for child in children for group in child.hooks]
        self._empty = tuple(group for group in hooks if not group)
        self._hooked = tuple((group, tuple(group)) for group in hooks if group)
        self._facts = tuple(_grouped(facts))

    def holds(self, layer: nn.Module) -> bool:
        """Whether everything is what it was."""
        if not (
            all(map(is_, map(layer._modules.get, self._own_names), self._own))
            and all(map(is_, map(dict.get, self._dicts, self._keys), self._held))
            and all(map(is_, map(type, self._modules), self._types))
            and not any(self._empty)
        ):
            return False
        for group, keys in self._hooked:
            if tuple(group) != keys:
                return False
        for cls, forward in self._forwards:
            if cls.forward is not forward:
                return False
        try:
            for owner, read, values in self._facts:
                if read(layer if owner is None else owner) != values:
                    return False
        except AttributeError:
            return False
        return True


def _grouped(facts: Sequence[Fact]) -> list[tuple[Any, Any, Any]]:
    """(owner, a function that reads what it was asked for, what that gave), one for each owner; apart for what it lacks."""
    owners = {id(owner): owner for owner, _, _ in facts}
    found: list[tuple[Any, Any, Any]] = []
    for key, owner in owners.items():
        known = {name: value for of, name, value in facts if id(of) == key}
        present = {name: value for name, value in known.items() if value is not None}
        if present:
            values = tuple(present.values())
            found.append((owner, attrgetter(*present), values if len(values) > 1 else values[0]))
        found += [(owner, _Lacking(name), None) for name in known if name not in present]
    return found


class _Lacking:
    """Reads an attribute that is None or not there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, owner: Any) -> Any:
        return getattr(owner, self.name, None)

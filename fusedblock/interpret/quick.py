"""What triton's interpreter does again for every value, done once: types, shapes and numpy dtypes. The results are the same.

A program of a kernel makes tens of thousands of blocks of a few shapes. Of the time of an interpreted kernel, two thirds went
into describing them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter as stock

from ..kernels._lang import tl

_FIELDS = {"handle", "type", "dtype", "shape", "numel"}  # of a tl.tensor, from triton 3.6 to 3.9


def _remembering_tensor(make: Callable[..., None]) -> Callable[..., None]:
    """tl.tensor's constructor; blocks of one shape share the tuple that describes it, which nothing changes."""
    shapes: dict[Any, tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        known = shapes.get(type.shape if type.is_block() else ())
        if known is None:
            make(self, handle, type)
            if vars(self).keys() == _FIELDS:
                shapes[type.shape if type.is_block() else ()] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    return init


def _remembering_block_type(make: Callable[..., None]) -> Callable[..., None]:
    types: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        # By its object: a type is equal to another of the same name, and a pointer's name does not say all.
        key = (id(element_ty), *(s.value if isinstance(s, tl.constexpr) else s for s in shape))
        known = types.get(key)
        if known is None:
            make(self, element_ty, shape)
            types[key] = dict(vars(self))  # which keeps element_ty, and so its id
        else:
            vars(self).update(known)

    return init


def _remembering_dtypes(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    dtypes: dict[str, Any] = {}

    def np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = look_up(kind)
        return dtypes[name]

    return np_dtype


def _unwrapping(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    plain = {int, float, str, bool, type(None), tl.tensor, tl.dtype, tl.block_type, tl.pointer_type}

    def unwrapped(o: Any) -> Any:
        kind = type(o)
        return o.value if kind is tl.constexpr else o if kind in plain else unwrap(o)

    return unwrapped


def _equal(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """tl.tuple's ==, mostly of two shapes, without a third tuple."""
    kind, truth = tl.core.tuple, {True: tl.constexpr(True), False: tl.constexpr(False)}
    return lambda self, other: truth[self.values == other.values] if type(other) is kind else compare(self, other)


def changes() -> list[tuple[Any, str, Any]]:
    """(object, attribute, value) to set while kernels are interpreted."""
    return [
        (tl.tensor, "__init__", _remembering_tensor(tl.tensor.__init__)),
        (tl.block_type, "__init__", _remembering_block_type(tl.block_type.__init__)),
        (tl.core.tuple, "__eq__", _equal(tl.core.tuple.__eq__)),
        (stock, "_get_np_dtype", _remembering_dtypes(stock._get_np_dtype)),
        (tl.core, "_unwrap_if_constexpr", _unwrapping(tl.core._unwrap_if_constexpr)),
    ]

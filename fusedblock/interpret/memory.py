"""The memory a launch may touch: its tensor arguments, and what reaches them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Kind = Literal["load", "store", "atomic"]


class OutOfBounds(IndexError):
    """A program reached memory outside every tensor argument of its launch."""


@dataclass
class Region:
    """Bytes [start, stop) behind one tensor argument, or behind several that overlap (views of one buffer).

    valid marks the bytes that belong to an element: a view of every other column owns only those. None means all of them.
    """

    name: str
    start: int
    stop: int
    valid: np.ndarray | None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass
class Access:
    """One load, store or atomic of one program, as far as it reaches one region. Masked-off lanes are left out."""

    launch: Launch
    program: int  # linear program id
    kind: Kind
    region: Region
    offsets: np.ndarray  # byte offset in the region of each element, int64
    itemsize: int


def tensors_of(name: str, argument: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors behind one kernel argument: itself, a descriptor's base, the members of a tuple."""
    if isinstance(argument, Tensor):
        yield name, argument
    elif isinstance(argument, tuple):
        for i, member in enumerate(argument):
            yield from tensors_of(f"{name}[{i}]", member)
    elif isinstance(getattr(argument, "base", None), Tensor):  # TensorDescriptor, or triton.reinterpret's wrapper
        yield name, argument.base


def _extent_bytes(t: Tensor) -> int:
    return (sum((n - 1) * s for n, s in zip(t.shape, t.stride())) + 1) * t.element_size()


def _merge(group: list[tuple[int, str, int, Tensor]]) -> Region:
    """One region for tensors (address, name, stop, tensor) that overlap in memory, by ascending address."""
    start, stop = group[0][0], max(member[2] for member in group)
    dense = any(
        t.numel() * t.element_size() == stop - start and address == start and 0 not in t.stride() for address, _, _, t in group
    )
    valid: np.ndarray | None = None
    if not dense:
        valid = np.zeros(stop - start, bool)
        for address, _, _, t in group:
            size = t.element_size()
            shape, strides = (*t.shape, size), (*(s * size for s in t.stride()), 1)
            np.lib.stride_tricks.as_strided(valid[address - start :], shape, strides)[...] = True
    return Region("|".join(dict.fromkeys(member[1] for member in group)), start, stop, valid)


@dataclass
class Launch:
    """One launch of a kernel: what hooks are given."""

    kernel: str
    grid: tuple[int, int, int]
    arguments: Mapping[str, Any]
    regions: list[Region] = field(init=False)

    def __post_init__(self) -> None:
        spans = []
        for name, argument in self.arguments.items():
            for full_name, t in tensors_of(name, argument):
                if t.device.type != "cpu":
                    raise ValueError(f"{self.kernel}: {full_name} is on {t.device}, but interpretation needs cpu tensors")
                if t.layout is not torch.strided:
                    raise ValueError(f"{self.kernel}: {full_name} has layout {t.layout}, expected torch.strided")
                if t.numel():
                    spans.append((t.data_ptr(), full_name, t.data_ptr() + _extent_bytes(t), t))
        groups: list[list[tuple[int, str, int, Tensor]]] = []
        for span in sorted(spans, key=lambda s: s[0]):
            if groups and span[0] < max(member[2] for member in groups[-1]):
                groups[-1].append(span)
            else:
                groups.append([span])
        order = {name: i for i, (_, name, _, _) in enumerate(spans)}
        groups.sort(key=lambda group: min(order[member[1]] for member in group))  # back to the order of the arguments
        self.regions = [_merge(group) for group in groups]

    def locate(self, pointers: np.ndarray, itemsize: int, what: str) -> list[tuple[Region, np.ndarray]]:
        """Each region that these element addresses (uint64, at least one) reach, and their byte offsets in it.

        Raises OutOfBounds if one of them lies outside every argument. `what` says who asks, for the message.
        """
        found: list[tuple[Region, np.ndarray]] = []
        left: np.ndarray = pointers.astype(np.int64).ravel()
        for region in self.regions:
            inside = (left >= region.start) & (left + itemsize <= region.stop)
            if not inside.any():
                continue
            offsets = left[inside] - region.start
            if region.valid is not None and not region.valid[offsets].all():
                n = int((~region.valid[offsets]).sum())
                raise OutOfBounds(f"{self.kernel}: {what} reaches {n} elements between the rows of {region.name}")
            found.append((region, offsets))
            left = left[~inside]
            if not left.size:
                return found
        near = min(self.regions, key=lambda r: abs(int(left[0]) - r.start), default=None)
        message = f"{self.kernel}: {what} reaches {left.size} elements outside every tensor argument"
        if near is not None:
            message += f"; the first lies {int(left[0]) - near.start} bytes from the start of {near.name} ({near.nbytes} bytes)"
        raise OutOfBounds(message)

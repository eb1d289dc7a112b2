"""Where the values of one tensor of a module come from in a checkpoint: one tensor, or several merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..io import Checkpoint, CheckpointError
from .expert_names import Part

LISTED = 20  # problems, keys or prefixes spelled out in one message


@dataclass(frozen=True)
class Source:
    """The values of one tensor of a module: what their names, shape and dtype are, and how to read them."""

    names: tuple[str, ...]
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def name(self) -> str:
        """The first name, and how many follow."""
        return repr(self.names[0]) + (f" and {len(self.names) - 1} others merged with it" if len(self.names) > 1 else "")

    def copy_to(self, tensor: Tensor) -> None:
        """Fill a tensor of this shape."""
        tensor.copy_(self.read())

    def mismatches(self, expected: tuple[int, ...]) -> list[str]:
        """Why a tensor of this shape cannot be filled."""
        return [] if self.shape == expected else [f"{self.file}: {self.name} has shape {self.shape}, the target {expected}"]


@dataclass(frozen=True)
class _Experts(Source):
    """Stacked experts, each read into its place. parts: (expert, which of ``layers``) -> name in the checkpoint."""

    checkpoint: Checkpoint
    start: str
    layers: tuple[str, ...]
    parts: Mapping[tuple[int, int], str] = field(repr=False)

    def copy_to(self, tensor: Tensor) -> None:
        rows = tensor.shape[1] // len(self.layers)
        for (expert, index), name in self.parts.items():
            tensor[expert, index * rows : (index + 1) * rows].copy_(self.checkpoint.tensor(name))

    def mismatches(self, expected: tuple[int, ...]) -> list[str]:
        if len(expected) != 3:
            return super().mismatches(expected)
        experts, rows, columns = expected
        wanted = {(expert, index) for expert in range(experts) for index in range(len(self.layers))}
        missing = [Part(self.start, expert, self.layers[index]).name for expert, index in sorted(wanted - self.parts.keys())]
        more = [name for place, name in self.parts.items() if place not in wanted]
        ours = f"the target has {experts} experts"
        problems = []
        if missing:
            problems.append(f"{self.checkpoint.path}: {ours}, the checkpoint lacks {listed(missing)}")
        if more:
            problems.append(f"{self.checkpoint.file_of(more[0])}: {ours}, the checkpoint holds {listed(more)} as well")
        shape = rows // len(self.layers), columns
        for name in self.parts.values():
            found, dtype = self.checkpoint.shape(name), self.checkpoint.dtype(name)
            if found != shape:
                text = f"{name!r} has shape {found}, the target {shape} for each expert"
                problems.append(f"{self.checkpoint.file_of(name)}: {text}")
            if dtype != self.dtype:
                text = f"{name!r} has dtype {dtype}, {self.names[0]!r} of the same tensor {self.dtype}"
                problems.append(f"{self.checkpoint.file_of(name)}: {text}")
        return problems


def overlaps(tensor: Tensor) -> bool:
    """Whether elements of a tensor share memory, as an expanded one's do: it cannot hold values of its own for each of them."""
    axes = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1)
    if not tensor.numel():
        return False
    extent, nested = 1, True
    for stride, size in axes:
        nested = nested and stride >= extent  # the axes before lie within one step of this one
        extent += stride * (size - 1)
    if nested or axes[0][0] == 0:
        return not nested
    seen = torch.zeros(extent, dtype=torch.bool)
    seen.as_strided(tensor.shape, tensor.stride()).fill_(True)
    return int(seen.sum()) < tensor.numel()


def plain(checkpoint: Checkpoint, name: str) -> Source:
    """The tensor ``name`` as it is."""
    return Source(
        (name,), checkpoint.file_of(name), checkpoint.shape(name), checkpoint.dtype(name), lambda: checkpoint.tensor(name)
    )


def stacked(checkpoint: Checkpoint, key: str, parts: Mapping[str, Part | None]) -> Source:
    """The experts of the tensor ``key`` of a model, from ``parts``: name -> which matrix of which expert.

    Whether they are complete and fit is told by `Source.mismatches`, when it is known that they are wanted.

    Raises:
        CheckpointError: the names are of more than one layout.
    """
    names = tuple(parts)
    first = parts[names[0]]
    for name, part in parts.items():
        if not first or not part or (part.stacked, part.layers) != (first.stacked, first.layers):
            raise CheckpointError(
                f"{checkpoint.file_of(name)}: {names[0]!r} and {name!r} are both {key!r} of the model, under names of two layouts"
            )
    assert first is not None
    places = {(part.expert, part.layers.index(part.layer)): name for name, part in parts.items() if part}
    places = dict(sorted(places.items()))
    rows, *columns = checkpoint.shape(names[0]) or (0,)
    shape, dtype = (max(places)[0] + 1, len(first.layers) * rows, *columns), checkpoint.dtype(names[0])

    def read() -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        source.copy_to(tensor)
        return tensor

    source = _Experts(names, checkpoint.file_of(names[0]), shape, dtype, read, checkpoint, first.start, first.layers, places)
    return source


def listed(items: Sequence[str]) -> str:
    """The first of them, and how many more."""
    shown = ", ".join(repr(item) for item in items[:LISTED])
    return shown + (f" and {len(items) - LISTED} more" if len(items) > LISTED else "")

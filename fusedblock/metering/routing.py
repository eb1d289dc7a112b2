"""Mixtures of experts on tensors without values: what depends on the experts that tokens choose is what even routing gives.

Every token chooses `top_k` of `experts`, each as likely as the others. Then `tokens` of them are expected to touch
experts * (1 - (1 - top_k / experts) ** tokens) experts, of as many rows each. Fused operators count by the same formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedblock.kernels._moe import expected_experts
from fusedblock.models.binding import sparse_of
from fusedblock.models.table import LayerSpec

aten = torch.ops.aten


@dataclass(frozen=True)
class Routing:
    """Of one mixture: its experts, how many each of the tokens chooses, how transformers' own module multiplies, and the storages
    of that module's parameters."""

    experts: int
    top_k: int
    tokens: int
    implementation: str
    storages: frozenset[int]

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def touched(self) -> float:
        return expected_experts(self.experts, self.top_k, self.tokens)

    def __str__(self) -> str:
        return (f"experts: {self.touched:.4g} of {self.experts} touched, as even routing of {self.tokens} tokens to {self.top_k} "
                f"each gives; before: experts_implementation={self.implementation!r}")  # fmt: skip


def routing_of(layer: nn.Module, spec: LayerSpec, tokens: int) -> Routing | None:
    """Of the layer's mixture; None for a layer that has none, or none of transformers'."""
    sparse = sparse_of(layer, spec)
    if sparse is None:
        return None
    parts: dict[str, Any] = dict(layer.named_modules())
    top_k, weight = getattr(parts.get(sparse.router), "top_k", None), getattr(parts.get(sparse.experts), "gate_up_proj", None)
    if not isinstance(top_k, int) or not isinstance(weight, Tensor):
        return None
    how = getattr(getattr(parts[sparse.experts], "config", None), "_experts_implementation", None)
    storages = frozenset(p.untyped_storage()._cdata for p in parts[sparse.experts].parameters())
    return Routing(weight.shape[0], top_k, tokens, how or "eager", storages)


_current: list[Routing] = []


@contextmanager
def even(routing: Routing | None) -> Iterator[None]:
    """Within FakeTensorMode and outside a TrafficCounter: transformers' experts run, and are counted, as routing says."""
    if routing is None:
        yield
        return
    _current.append(routing)
    try:
        with _Loop(routing):
            yield
    finally:
        _current.pop()


def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor | None) -> Tensor:
    """The result without values, of whatever dtype: torch's own rule for tensors without memory takes bf16 alone."""
    if a.dim() == 2 and b.dim() == 2 and offsets is not None:  # a weight's gradient
        return a.new_empty(offsets.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(*a.shape[:-1], b.shape[-1])


class _Loop(TorchDispatchMode):
    """transformers' eager experts ask for values: which experts are hit, then in turn for the rows of each. As many are hit as
    are expected, to the nearest, and they share the rows evenly."""

    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.begun = False
        self.rows: list[int] = []  # of the experts whose turn is still to come

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args[0] if args else None
        if isinstance(given, FakeTensor):
            if func is aten._grouped_mm.default:
                return _grouped_mm(args[0], args[1], args[2] if len(args) > 2 else (kwargs or {}).get("offs"))
            if func is aten.nonzero.default and given.shape in ((self.routing.experts,), (self.routing.experts + 1,)):
                hit = min(max(round(self.routing.touched), 1), self.routing.rows)
                self.begun = True
                each, more = divmod(self.routing.rows, hit)
                self.rows = [each + (i < more) for i in range(hit)]
                return torch.empty((hit, 1), dtype=torch.int64, device=given.device)
            if func is aten.nonzero.default and self.rows and given.numel() == self.routing.rows:
                return torch.empty((self.rows.pop(0), given.dim()), dtype=torch.int64, device=given.device)
            if func is aten._local_scalar_dense.default and self.begun:  # whether it is the index of none, or which it is
                return False if given.dtype is torch.bool else 0
        return func(*args, **(kwargs or {}))


def expected(weight: Tensor, rows: int) -> float | None:
    """Of how many experts the rows, one for each choice of a token, read this weight under the routing that is on; None where it
    is of none."""
    storage = weight.untyped_storage()._cdata
    return next((r.touched for r in reversed(_current) if storage in r.storages and rows == r.rows), None)

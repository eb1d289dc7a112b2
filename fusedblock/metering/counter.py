"""Counts launches, compulsory HBM bytes and FLOPs of any PyTorch code: fused and plain code by one rule.

The rule: every operator is one launch; it reads each distinct input once and writes each result once. Views, metadata and
allocations are free. An in-place operator reads and writes what it changes; a gather reads, and a scatter writes, only the
rows that it touches, and a grouped product reads the weights of groups that have rows; a broadcast (stride 0) axis is stored
once. A fused operator stands for the launches that `fusedblock.ops.COSTS` gives for it. FLOPs are those of matrix products and
attention; plain elementwise work counts none.

These are the bytes that must move if nothing is kept on chip between two launches, and nothing is fetched twice within one:
what the GPU really moves can be less (L2) or more (re-reads). Real, meta and fake tensors give the same counts, but where values
decide what is touched: without them, it is what even routing to experts is expected to touch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fusedblock.kernels._moe import expected_experts
from fusedblock.kernels._spec import Cost, nbytes
from fusedblock.ops import COSTS

from .routing import expected

aten = torch.ops.aten
# Nothing moves in device memory, or nothing but a scalar.
_FREE = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.detach, aten.alias,
    aten.lift_fresh, aten._unsafe_view, aten._local_scalar_dense, aten.is_same_size, aten.sym_size, aten.sym_numel,
    aten.sym_stride, aten.sym_storage_offset, aten.set_, aten.resize_, aten._conj, torch.ops.prim.device,
}  # fmt: skip
# What these make does not depend on the values they are given.
_WRITE_ONLY = {
    aten.zeros, aten.ones, aten.full, aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones,
    aten.new_full, aten.arange, aten.scalar_tensor, aten.fill_, aten.zero_, aten.normal_, aten.uniform_, aten.randn,
    aten.rand, aten.randn_like, aten.rand_like,
}  # fmt: skip
Bytes = tuple[int, int]  # read, written


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _memory(t: Tensor) -> tuple[Any, ...]:
    """Equal for tensors on the same elements, however their axes are ordered (x and x.T)."""
    axes = sorted((s, n) for n, s in zip(t.shape, t.stride()) if n != 1 and s != 0)
    return _storage(t), t.storage_offset(), t.element_size(), tuple(axes)


def _distinct_bytes(tensors: Iterable[Tensor]) -> int:
    return sum({_memory(t): nbytes(t) for t in tensors}.values())


def _argument(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    for i, a in enumerate(func._schema.arguments):
        if a.name == name:
            return args[i] if i < len(args) else kwargs.get(name, a.default_value)
    raise KeyError(name)


# Operators that touch only some rows of an argument: packet -> bytes(argument by name, result).
Argument = Callable[[str], Any]


def _gather(index: str) -> Callable[[Argument, Any], Bytes]:
    return lambda arg, out: (nbytes(out) + _distinct_bytes(_tensors(arg(index))), nbytes(out))


def _scatter(source: str) -> Callable[[Argument, Any], Bytes]:
    return lambda arg, out: (nbytes(arg("index")) + nbytes(arg(source)), arg(source).numel() * out.element_size())


def _index(arg: Argument, out: Any) -> Bytes:
    """A row that several take is read once, as far as one can know."""
    source, indices = arg("self"), _tensors(arg("indices"))
    read = min(nbytes(source), nbytes(out))
    if len(indices) == 1 and arg("indices")[0] is not None and not indices[0].dtype.is_floating_point:
        rows, (index,) = indices[0].numel(), indices
        if index.dtype in (torch.int64, torch.int32) and rows:
            distinct = int(index.unique().numel()) if _has_values(index) else expected(source, rows)
            read = read if distinct is None else round(distinct * (nbytes(out) // rows))
    return read + _distinct_bytes(indices), nbytes(out)


def _has_values(t: Tensor) -> bool:
    return type(t) is Tensor and not t.is_meta


def _groups(weight: Tensor, offsets: Tensor, rows: int) -> float:
    """Of a grouped product's weights, how many have rows; offsets: where the rows of each end."""
    if _has_values(offsets):
        return int((offsets.diff(prepend=offsets.new_zeros(1)) > 0).sum())
    known = expected(weight, rows)
    return expected_experts(weight.shape[0], 1, rows) if known is None else known


def _grouped(first: str, second: str) -> Callable[[Argument, Any], Bytes]:
    """Rows by group, or the rows of both summed over by group, which leaves a matrix to each."""

    def moved(arg: Argument, out: Any) -> Bytes:
        a, b, offsets, bias = arg(first), arg(second), arg("offs"), _tensors(arg("bias") if first == "self" else None)
        read = _distinct_bytes([*([offsets] if offsets is not None else []), *bias])
        for t, other in ((a, b), (b, a)):
            by_group = t.dim() == 3 and other.dim() == 2  # one matrix a group
            share = _groups(t, offsets, other.shape[0 if t is b else 1]) / t.shape[0] if by_group else 1.0
            read += round(share * nbytes(t))
        return read, nbytes(out)

    return moved


def _index_put(arg: Argument, out: Any) -> Bytes:
    indices = _tensors(arg("indices"))
    rows = 1
    for n in torch.broadcast_shapes(*(i.shape for i in indices)):
        rows *= n
    for n, i in zip(out.shape, [*arg("indices"), *[None] * out.dim()]):
        rows *= n if i is None else 1
    written = rows * out.element_size()
    return _distinct_bytes([*indices, arg("values")]) + (written if arg("accumulate") else 0), written


_ROWS: dict[Any, Callable[[Argument, Any], Bytes]] = {
    aten.embedding: _gather("indices"),
    aten.index_select: _gather("index"),
    aten.gather: _gather("index"),
    aten.index: _index,
    aten.index_copy_: _scatter("source"),
    aten.index_add_: lambda arg, out: (nbytes(arg("index")) + 2 * nbytes(arg("source")), nbytes(arg("source"))),
    aten._grouped_mm: _grouped("self", "mat2"),
    aten.index_put_: _index_put,
    aten.copy_: lambda arg, out: (nbytes(arg("src")), nbytes(out)),
}


def _attention_flops(arg: Argument) -> tuple[int, int]:
    """Two products over the pairs that the causal mask leaves. SDPA's causal is aligned top-left."""
    q, k, v = arg("query"), arg("key"), arg("value")
    seq, context = q.shape[-2], k.shape[-2]
    n = min(seq, context) if arg("is_causal") else 0
    pairs = n * (n + 1) // 2 + (seq - n) * context
    flops = 2 * pairs * q.shape[:-2].numel() * (q.shape[-1] + v.shape[-1])
    return flops, flops


def _attention_backward_flops(arg: Argument) -> tuple[int, int]:
    """Five products to the forward's two: the logits again, and four for the gradients. So count FlashAttention and torch."""
    flops, _ = _attention_flops(arg)
    return flops * 5 // 2, flops * 5 // 2


def _grouped_flops(arg: Argument) -> tuple[int, int]:
    """Every row meets one group's matrix, however many groups there are."""
    a, b = arg("self"), arg("mat2")
    flops = 2 * a.numel() * b.shape[-1] if b.dim() == 3 or a.dim() == 2 else 2 * a.shape[1:].numel() * b.shape[-1]
    return flops, flops


_SDPA = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_FLOPS: dict[Any, Callable[[Argument], tuple[int, int]]] = {}
_FLOPS[aten._grouped_mm] = _grouped_flops
for _name in _SDPA:
    for _suffix, _formula in (("", _attention_flops), ("_backward", _attention_backward_flops)):
        if hasattr(aten, f"_scaled_dot_product_{_name}{_suffix}"):
            _FLOPS[getattr(aten, f"_scaled_dot_product_{_name}{_suffix}")] = _formula


def _flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> tuple[int, int]:
    """(model, executed). Plain operators do what their maths says, no more."""
    packet = func.overloadpacket
    if packet in _FLOPS:
        return _FLOPS[packet](lambda name: _argument(func, args, kwargs, name))
    if packet in flop_registry:
        flops = int(flop_registry[packet](*args, **kwargs, out_val=out))
        return flops, flops
    return 0, 0


def _moved(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Bytes | None:
    """Bytes of one operator call; None if it launches nothing."""
    packet = func.overloadpacket
    if packet in _ROWS:
        return _ROWS[packet](lambda name: _argument(func, args, kwargs, name), out)
    if packet in _FREE or func.is_view:
        return None
    inputs, results = _tensors((args, kwargs)), _tensors(out)
    changed: list[Tensor] = []
    given: list[Tensor] = []  # buffers to write (out=...), which are not read
    for i, a in enumerate(func._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(a.name)
            (given if a.is_out else changed).extend(_tensors(value))
    known = {_storage(t) for t in inputs}
    fresh = [t for t in results if _storage(t) not in known]
    if not fresh and not changed and not given:
        return None  # a result that is its input (contiguous, to, reshape), or no tensors at all
    only_written = {_memory(t) for t in given}
    read = [] if packet in _WRITE_ONLY else [t for t in inputs if _memory(t) not in only_written]
    return _distinct_bytes(read), _distinct_bytes([*fresh, *changed, *given])


@dataclass(frozen=True)
class Totals:
    """Sums over launches. Bytes are compulsory; flops those of the maths, executed_flops with recomputation."""

    launches: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    flops: int = 0
    executed_flops: int = 0

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.written_bytes

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(a + b for a, b in zip(astuple(self), astuple(other))))

    @staticmethod
    def of(costs: Iterable[Cost]) -> Totals:
        costs = list(costs)
        return Totals(
            len(costs),
            sum(c.read_bytes for c in costs),
            sum(c.written_bytes for c in costs),
            sum(c.flops for c in costs),
            sum(c.executed_flops for c in costs),
        )


class TrafficCounter(TorchDispatchMode):
    """Context manager; `launches` holds one Cost per launch inside it, in order, forward and backward alike.

        with TrafficCounter() as counter:
            layer(x)
        counter.total().bytes

    Inside torch.compile'd code nothing is seen: count the code before it is compiled.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Cost] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):  # a higher-order operator, such as a wrapped Triton kernel
            self.launches.append(Cost(str(func), _distinct_bytes(_tensors((args, kwargs))), _distinct_bytes(_tensors(out)), 0, 0))
        elif func.namespace == "fusedblock":
            name = func.overloadpacket.__name__
            self.launches += [
                Cost(c.name if c.name.startswith("fusedblock.") else f"fusedblock.{c.name}", c.read_bytes, c.written_bytes,
                     c.flops, c.executed_flops)
                for c in COSTS[name](*args, **kwargs)
            ]  # fmt: skip
        elif (moved := _moved(func, args, kwargs, out)) is not None:
            self.launches.append(Cost(str(func.overloadpacket), *moved, *_flops(func, args, kwargs, out)))
        return out

    def total(self) -> Totals:
        return Totals.of(self.launches)

    def by_op(self) -> dict[str, Totals]:
        """Totals by operator name, in the order of first launch."""
        groups: dict[str, list[Cost]] = {}
        for cost in self.launches:
            groups.setdefault(cost.name, []).append(cost)
        return {name: Totals.of(costs) for name, costs in groups.items()}

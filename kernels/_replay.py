"""Record the launches of a composition once, then replay them for tensors of the same layout.

Choosing configs, checking shapes and binding arguments costs the host some 20 us an op, which is more than a decode launch
takes. All of it depends only on the inputs' layout: shapes, strides, dtypes, alignment. A Program keeps what it led to: the
compiled kernels, grids and arguments, with every address as (input or buffer, byte offset). Replaying allocates one workspace
and the results, and enqueues.

Only compositions that do nothing but launch kernels are kept: one that copied or filled, or whose inputs alias, runs op by op
every time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import _driver, _gluon, _launch, _target
from ._lang import TensorDescriptor

_ALIGN = 256  # bytes, as torch's allocator gives
MAX_PROGRAMS = 512  # layouts kept; a server's batch and length pairs, with room


@dataclass(frozen=True)
class _Address:
    """A tensor argument: `offset` bytes into slot `slot`; slots are the inputs, then the results, then the workspace."""

    slot: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _Box:
    """A tensor descriptor argument: triton's, or Gluon's where it has a layout. pair: the tensor whose distance from the base is
    the first stride (see stacked())."""

    base: _Address
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    padding: str
    pair: _Address | None
    layout: Any = None


class _Pointer:
    """Stands for a tensor where a launcher only asks for its address."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class _HostDescriptor:
    """What triton's launcher reads of a TensorDescriptor, without its checks: they passed when the program was recorded."""

    __slots__ = ("base", "shape", "strides", "padding")

    def __init__(self, base: Any, shape: list[int], strides: list[int], padding: str) -> None:
        self.base, self.shape, self.strides, self.padding = base, shape, strides, padding


@dataclass(frozen=True)
class _Step:
    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]  # values, _Address for tensors, _Box for descriptors; constants of the device as they are
    constexprs: dict[str, Any]
    compiled: Any  # None off the direct GPU path
    tail: tuple[Any, ...]


@dataclass(frozen=True)
class Program:
    steps: tuple[_Step, ...]
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    workspace_bytes: int

    @functools.cached_property
    def _pairs(self) -> tuple[_Box, ...]:
        return tuple(a for step in self.steps for a in step.args if isinstance(a, _Box) and a.pair is not None)

    @functools.cached_property
    def _constants(self) -> tuple[Tensor, ...]:
        return tuple(a for step in self.steps for a in step.args if isinstance(a, Tensor) and _launch.is_constant(a))

    @functools.cached_property
    def _block(self) -> _driver.Block | None:
        return _driver.prepare(self.steps)

    @functools.cached_property
    def _buffers(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]:
        """Shape, strides, dtype of what a run allocates: the results, then the workspace."""
        made = [(shape, tuple(prod(shape[i + 1 :]) for i in range(len(shape))), dtype) for shape, dtype in self.results]
        return (*made, ((self.workspace_bytes,), (1,), torch.uint8)) if self.workspace_bytes else tuple(made)

    def run(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """inputs: the tensors, in the order they were recorded. None, and nothing launched, where these addresses do not fit."""
        if self.steps[0].compiled is not None:
            return self.enqueue([t.data_ptr() for t in inputs], inputs[0].device)
        made = tuple(torch.empty_strided(*size, dtype=dtype, device=inputs[0].device) for *size, dtype in self._buffers)
        slots = [*inputs, *made]
        base = [t.data_ptr() for t in slots]
        if not self._fits(base):
            return None
        with _launch.on_device(inputs[0].device):
            for step in self.steps:
                args = [_rebuilt(slots, base, a) if type(a) in (_Address, _Box) else a for a in step.args]
                _launch.launch(step.kernel, step.grid, args, step.constexprs)
        return made[: len(self.results)]

    def enqueue(self, base: list[int], device: torch.device) -> tuple[Tensor, ...] | None:
        """run() of compiled kernels, given the addresses of the inputs, all on `device`. Appends to base."""
        with _launch.on_device(device):
            made = [_launch.allocate(shape, strides, dtype, device) for shape, strides, dtype in self._buffers]
            base.extend([t.data_ptr() for t in made])
            if self._pairs and not self._fits(base):
                return None
            if self._constants and _launch.capturing(device):
                _launch.keep_for_graphs(*self._constants)
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            block, done = self._block, 0
            if block is not None and not _launch.hooked():
                done = block.run(base, stream)
            for step in self.steps[done:]:
                args = [_address(base, a) if type(a) in (_Address, _Box) else a for a in step.args]
                _launch.run_compiled(step.compiled, step.grid, (*args, *step.tail), stream)
        return tuple(made[: len(self.results)])

    def _fits(self, base: Sequence[int]) -> bool:
        return all(valid_distance(_distance(base, box)) for box in self._pairs)


def valid_distance(bytes_: int) -> bool:
    """Whether a tensor map takes this as a stride."""
    return 0 < bytes_ < 2**40 and bytes_ % 16 == 0


def _distance(base: Sequence[int], box: _Box) -> int:
    assert box.pair is not None
    return base[box.pair.slot] + box.pair.offset - base[box.base.slot] - box.base.offset


def _strides(base: list[int], box: _Box) -> list[int]:
    return box.strides if box.pair is None else [_distance(base, box) // box.base.dtype.itemsize, *box.strides[1:]]


def _address(base: list[int], a: _Address | _Box) -> Any:
    """An argument for a compiled kernel's launcher."""
    if isinstance(a, _Address):
        return base[a.slot] + a.offset
    return _HostDescriptor(_Pointer(base[a.base.slot] + a.base.offset), a.shape, _strides(base, a), a.padding)


def _rebuilt(slots: list[Tensor], base: list[int], a: _Address | _Box) -> Any:
    """An argument for triton's own launcher (and the interpreter's)."""
    if isinstance(a, _Address):
        return _tensor(slots[a.slot], a)
    t = _tensor(slots[a.base.slot], a.base)
    if a.layout is not None:
        return _gluon.TensorDescriptor(t, a.shape, _strides(base, a), a.block_shape, a.layout, a.padding)
    return TensorDescriptor(t, a.shape, _strides(base, a), a.block_shape, a.padding)


def _tensor(slot: Tensor, a: _Address) -> Tensor:
    start = slot.storage_offset() * slot.element_size() + a.offset
    return torch.empty(0, dtype=a.dtype, device=slot.device).set_(
        slot.untyped_storage(), start // a.dtype.itemsize, a.shape, a.stride
    )


def _extent(t: Tensor) -> int:
    """Bytes from t's first element past its last."""
    return (sum((n - 1) * s for n, s in zip(t.shape, t.stride())) + 1) * t.element_size() if t.numel() else 0


class _OnlyAllocates(TorchDispatchMode):
    """Notes whether anything but allocation and views happened."""

    def __init__(self) -> None:
        super().__init__()
        self.clean = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func._schema.name not in ("aten::empty", "aten::empty_strided", "aten::_unsafe_view"):
            self.clean = False
        return func(*args, **(kwargs or {}))


def record(compose: Callable[[], Any], inputs: Sequence[Tensor]) -> tuple[Any, Program | None]:
    """compose()'s result, and the program that replays it, or None where it cannot be replayed."""
    launches: list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []
    with _OnlyAllocates() as watch:
        before = _launch.recording.hook

        def note(kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constexprs: Mapping[str, Any]) -> None:
            launches.append((kernel, grid, tuple(args), dict(constexprs)))

        _launch.recording.hook = note
        try:
            out = compose()
        finally:
            _launch.recording.hook = before
    results = (out,) if isinstance(out, Tensor) else tuple(out)
    return out, _program(launches, list(inputs), results) if watch.clean and launches else None


def _program(launches: list[Any], inputs: list[Tensor], results: tuple[Tensor, ...]) -> Program | None:
    bounds = [(t.data_ptr(), t.data_ptr() + _extent(t)) for t in (*inputs, *results)]
    if any(a[0] < b[1] and b[0] < a[1] and a != b for i, a in enumerate(bounds) for b in bounds[:i]):
        return None  # overlapping inputs: an address would not say which of them it belongs to
    if not all(t.is_contiguous() for t in results):
        return None
    workspace = len(bounds)
    placed: dict[int, int] = {}  # storage address -> offset in the workspace
    size = 0
    steps = []

    def place(t: Tensor) -> _Address:
        nonlocal size
        at = t.data_ptr()
        slot = next((i for i, (low, high) in enumerate(bounds) if low <= at < high), None)
        if slot is not None:
            offset = at - bounds[slot][0]
        else:
            storage = t.untyped_storage()
            if storage.data_ptr() not in placed:
                placed[storage.data_ptr()] = size
                size += -(-storage.nbytes() // _ALIGN) * _ALIGN
            slot, offset = workspace, placed[storage.data_ptr()] + at - storage.data_ptr()
        return _Address(slot, offset, t.dtype, tuple(t.shape), tuple(t.stride()))

    def bind(arg: Any) -> Any:
        if hasattr(arg, "block_shape"):
            pair = getattr(arg, "pair", None)
            return _Box(place(arg.base), list(arg.shape), list(arg.strides), list(arg.block_shape), arg.padding,
                        None if pair is None else place(pair), getattr(arg, "layout", None))  # fmt: skip
        if isinstance(arg, Tensor) and _launch.is_constant(arg):
            return arg
        # An absent result is an empty tensor: never read or written.
        return place(arg) if isinstance(arg, Tensor) and arg.numel() else arg

    for kernel, grid, args, constexprs in launches:
        bound = [bind(arg) for arg in args]
        compiled, tail = None, ()
        if _launch.current_mode() is None:
            found = _launch.find_compiled(kernel, args, constexprs)
            if found is None:
                return None
            compiled, tail = found
        steps.append(_Step(kernel, grid, tuple(bound), constexprs, compiled, tail))
    return Program(tuple(steps), tuple((tuple(t.shape), t.dtype) for t in results), size)


_programs: dict[Any, Any] = {}  # layout -> Program, or None where it cannot be replayed
_layouts: dict[Any, object] = {}  # layout of fixed arguments -> what stands for it in a key
_UNKNOWN = object()
_TENSOR = object()
_NO_OVERRIDE = torch._C._disabled_torch_function_impl


def layout(t: Tensor, address: int) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device, address % 16 == 0


def _guard(tensors: Sequence[Tensor]) -> Any:
    """Compares types, sizes, strides, dtypes and devices in one call: what torch.compile guards its graphs with."""
    return torch._C._dynamo.guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(t.shape) for t in tensors],  # type: ignore[misc]
        dynamic_dims_strides=[list(t.stride()) for t in tensors],  # type: ignore[misc]
    )


class _Last:
    """The program of a layer's last call, and once that was the same twice, what tells a third without its key.

    facts: all of the key but the layouts of the given tensors, which `guard` knows. Their addresses are multiples of 16, and no
    two of the program's inputs are the same.
    """

    def __init__(self, program: Program, facts: tuple[Any, ...] = (), guard: Any = None) -> None:
        self.program, self.facts, self.guard = program, facts, guard

    def fits(self, facts: tuple[Any, ...], tensors: Sequence[Tensor]) -> bool:
        return self.guard is not None and self.facts == facts and self.guard.check(*tensors)


class Fixed:
    """Arguments that are the same objects call after call, a layer's parameters and numbers, and what a key needs of them.

    facts(args): what else choices depend on, besides the layout. An object outlives its memory: module.to() and `.data =` put
    another address and layout under a parameter. So both are looked at in every call, and read in full where either changed.
    """

    def __init__(self, args: Sequence[Any], facts: Callable[[tuple[Any, ...]], Any]) -> None:
        self.args, self.facts = tuple(args), facts
        self.tensors = tuple(a for a in args if isinstance(a, Tensor))
        # Tensors and parameters proper: what has an own __torch_function__ sees operators, and would miss them.
        self.plain = all(type(t) is Tensor or type(t).__torch_function__ is _NO_OVERRIDE for t in self.tensors)
        self._known: tuple[list[int], Any, object] | None = None  # one value: threads may read and replace it
        self.last: dict[str, _Last] = {}  # of each composition

    def current(self) -> tuple[object, list[int]]:
        """(what stands for the layout in a key, the tensors' addresses)."""
        addresses = list(map(Tensor.data_ptr, self.tensors))
        known = self._known
        if known is None or known[0] != addresses or not known[1].check(*self.tensors):
            known = self._known = self._read(addresses)
        return known[2], addresses

    def _read(self, addresses: list[int]) -> tuple[list[int], Any, object]:
        guard, at = _guard(self.tensors), iter(addresses)
        key = (self.facts(self.args), *[layout(a, next(at)) if isinstance(a, Tensor) else a for a in self.args])
        if len(_layouts) >= MAX_PROGRAMS:
            _layouts.clear()
        return addresses, guard, _layouts.setdefault(key, object())


def replayed(name: str, compose: Callable[[], Any], given: Sequence[Any], fixed: Fixed) -> Any:
    """compose() for these arguments: replayed where the same layout was recorded before, else run (and recorded).

    given: the arguments of this call, a tensor first; the fixed ones follow them.
    """
    if not _launch.replays(given[0]):
        return compose()
    static, addresses = fixed.current()
    tensors = [a for a in given if isinstance(a, Tensor)]
    base = list(map(Tensor.data_ptr, tensors))
    facts = (static, *_target.asked(), *[_TENSOR if isinstance(a, Tensor) else a for a in given])
    plain = not reduce(or_, base) % 16 and len({*base, *addresses}) == len(base) + len(addresses)
    last = fixed.last.get(name)
    if plain and last is not None and last.fits(facts, tensors):
        made = last.program.enqueue(base + addresses, given[0].device)
        if made is not None:
            return made[0] if len(made) == 1 else made
    key: tuple[Any, ...] = (name, *facts, *map(layout, tensors, base))
    base += addresses
    if not plain and len(set(base)) < len(base):
        key += (tuple(map(base.index, base)),)  # which are one and the same: x and its rows, tied weights
    program = _programs.get(key, _UNKNOWN)  # one look-up: another thread may clear the table
    if program is not _UNKNOWN:
        if program is not None and plain:
            again = last is not None and last.program is program
            fixed.last[name] = _Last(program, facts, _guard(tensors)) if again else _Last(program)
        made = None if program is None else program.enqueue(base, given[0].device)
        if made is None:
            return compose()
        return made[0] if len(made) == 1 else made
    out, program = record(compose, [*[a for a in given if isinstance(a, Tensor)], *fixed.tensors])
    if len(_programs) >= MAX_PROGRAMS:
        _programs.clear()
    _programs[key] = program
    if program is not None and program.steps[0].compiled is not None:
        program._block  # noqa: B018  # made here, with what it loads, so that the second call is as quick as the rest
    return out

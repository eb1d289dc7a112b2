"""Gluon kernels on the CPU: their own source, on the model of a Hopper SM in machine.py.

Arithmetic is triton.language's, as for other kernels; layouts are not looked at. What differs is here: shared memory, TMA,
wgmma, barriers and partitions. One program runs after the other, so programs that wait for one another are not modelled; nor are
clusters, tensor memory, and the order of accesses to global memory inside a program (a TMA store writes at any time
until the program ends).
"""

from __future__ import annotations

import ast
import ctypes
import functools
import inspect
import operator
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from triton._C.libtriton import ir
from triton.runtime import interpreter as stock
from triton.runtime.interpreter import TensorHandle
from triton.runtime.jit import JITFunction

from ..kernels import _gluon
from ..kernels._gluon import gl, mbarrier
from ..kernels._lang import tl
from .builder import builder, decode, encode
from .language import Rewriter, assigned, compiled_from_source
from .machine import Machine, Operation
from .shared import Barriers, MBarrier, ProtocolError, View

_machine: Machine | None = None


def _sm() -> Machine:
    assert _machine is not None, "no Gluon kernel is running"
    return _machine


def run_program(function: Callable[..., Any], values: dict[str, Any], seed: str, name: str, warps: int) -> None:
    """One program of a launch, whose turns are drawn from seed."""
    global _machine
    _machine = Machine(seed, name, warps)
    try:
        function(**values)
        _machine.finish()
    finally:
        _machine = None


def changes() -> list[tuple[Any, str, Any]]:
    """Attributes of triton.language that a launch of a Gluon kernel replaces, beside those of language()."""
    return [(tl.block_type, "layout", property(lambda self: gl.AutoLayout()))]


def _constant(value: Any) -> int:
    """An argument that a compiled kernel must know. What it assigns to a variable it does not, short of gl.constexpr."""
    if isinstance(value, tl.tensor):
        raise TypeError("a value of the kernel's run time where a constant must be; declare the variable as gl.constexpr")
    return operator.index(value)


def _tensor(data: np.ndarray, dtype: Any) -> Any:
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))


# ---- shared memory -----------------------------------------------------------------------------------------------------


class Shared:
    """gl.shared_memory_descriptor."""

    def __init__(self, view: View, layout: Any) -> None:
        self.view, self.layout, self.dtype = view, layout, view.dtype
        self.shape = list(view.data.shape)
        self.rank, self.numel = len(self.shape), view.data.size
        self.type = types.SimpleNamespace(shape=self.shape, element_ty=self.dtype, layout=layout)

    def index(self, index: Any) -> Shared:
        return Shared(self.view.part(0, operator.index(index), 1, keep=False), self.layout)

    def slice(self, start: Any, length: Any, dim: Any = 0) -> Shared:
        return Shared(self.view.part(_constant(dim), _constant(start), _constant(length)), self.layout)

    def reshape(self, shape: Sequence[Any]) -> Shared:
        return Shared(self.view.reshape(tuple(map(_constant, shape))), self.layout)

    def permute(self, order: Sequence[Any]) -> Shared:
        return Shared(self.view.permute(tuple(map(_constant, order))), self.layout)

    def load(self, layout: Any = None) -> Any:
        return _tensor(_sm().read(self.view), self.dtype)

    def store(self, value: Any) -> None:
        if list(value.shape) != self.shape or value.dtype.scalar != self.dtype:
            raise ProtocolError(f"{value.dtype}{list(value.shape)} stored to {self.view}, {self.dtype}{self.shape}")
        _sm().write(self.view, value.handle.data)

    def _keep_alive(self) -> None:
        pass


def _allocate(element_ty: Any, shape: Sequence[Any], layout: Any, value: Any = None) -> Any:
    sizes = tuple(map(_constant, shape))
    if isinstance(layout, mbarrier.MBarrierLayout):
        barriers = Barriers(sizes[0])
        return barriers if len(sizes) > 1 else barriers.members[0]
    memory = Shared(_sm().allocate(np.empty(sizes, stock._get_np_dtype(element_ty)), element_ty), layout)
    if value is not None:
        memory.store(value)
    return memory


def _named(value: Any, name: str) -> Any:
    """Give memory and barriers the name of the variable they are first assigned to, for messages."""
    if isinstance(value, Shared) and value.view.whole():
        value.view.allocation.name = name
    elif isinstance(value, (Barriers, MBarrier)):
        array = value if isinstance(value, Barriers) else value.array
        array.name = array.name if array is not value and len(array.members) > 1 else name
    return value


# ---- TMA ---------------------------------------------------------------------------------------------------------------


class Descriptor:
    """A tensor descriptor inside a kernel."""

    def __init__(self, base: Any, shape: Any, strides: Any, block: Any, layout: Any, padding: str = "zero") -> None:
        self.shape, self.strides, self.block_shape = ([operator.index(n) for n in sizes] for sizes in (shape, strides, block))
        self.layout, self.dtype = layout, base.dtype.element_ty
        self.block_type = tl.block_type(self.dtype, self.block_shape)
        self._address = int(base.handle.data.item())
        self._numpy = np.dtype(stock._get_np_dtype(self.dtype))
        self._fill = np.frombuffer((b"\xff" if padding == "nan" else b"\0") * self._numpy.itemsize, self._numpy)[0]

    def _inside(self, kind: Any, corner: list[int]) -> tuple[np.ndarray, tuple[slice, ...]]:
        """The part of the block at corner that exists: memory, and where it lies in the block."""
        low = [max(c, 0) for c in corner]
        high = [max(a, min(c + b, n)) for a, c, b, n in zip(low, corner, self.block_shape, self.shape)]
        sizes = [h - a for a, h in zip(low, high)]
        part = tuple(slice(a - c, h - c) for a, h, c in zip(low, high, corner))
        if 0 in sizes:
            return np.empty(sizes, self._numpy), part
        steps = [s * self._numpy.itemsize for s in self.strides]
        start = (self._address + sum(a * s for a, s in zip(low, steps))) % 2**64  # as in hardware
        offsets = sum(np.arange(n).reshape(-1, *[1] * (len(sizes) - 1 - i)) * s for i, (n, s) in enumerate(zip(sizes, steps)))
        pointers = TensorHandle((start + np.asarray(offsets)).astype(np.uint64), tl.pointer_type(self.dtype))
        builder.check_access(kind, pointers, None)
        span = sum((n - 1) * s for n, s in zip(sizes, steps)) + self._numpy.itemsize
        buffer = (ctypes.c_char * span).from_address(start)
        return np.ndarray(sizes, self._numpy, buffer, strides=steps), part

    def fetch(self, corner: list[int]) -> np.ndarray:
        block: np.ndarray = np.full(self.block_shape, self._fill, self._numpy)
        memory, part = self._inside("load", corner)
        block[part] = memory
        return block

    def put(self, corner: list[int], block: np.ndarray) -> None:
        memory, part = self._inside("store", corner)
        memory[...] = block[part]

    def add(self, corner: list[int], block: np.ndarray) -> None:
        memory, part = self._inside("atomic", corner)
        bf16 = self.dtype.is_bf16()
        memory[...] = encode(decode(memory) + decode(block[part])) if bf16 else memory + block[part]


def descriptor(value: Any) -> Descriptor:
    """A host's TensorDescriptor as the kernel has it."""
    return Descriptor(
        stock._implicit_cvt(value.base), value.shape, value.strides, value.block_shape, value.layout, value.padding
    )


def _make_descriptor(
    base: Any, shape: Any, strides: Any, block_shape: Any, layout: Any, padding_option: str = "zero", **_: Any
) -> Descriptor:
    return Descriptor(base, shape, strides, block_shape, layout, padding_option)


def _block(desc: Descriptor, coord: Sequence[Any], memory: Shared) -> list[int]:
    """The corner of the block to copy. Raises where the memory is not one."""
    if memory.shape != desc.block_shape or memory.dtype != desc.dtype:
        raise ProtocolError(
            f"TMA between {memory.view}, {memory.dtype}{memory.shape}, and blocks of {desc.dtype}{desc.block_shape}"
        )
    return [operator.index(c) for c in coord]


def _tma_load(desc: Descriptor, coord: Any, barrier: MBarrier, result: Shared, pred: Any = True, **_: Any) -> None:
    corner = _block(desc, coord, result)
    if pred:
        _sm().tma_load(result.view, barrier, lambda: desc.fetch(corner))


def _tma_store(desc: Descriptor, coord: Any, src: Shared, **_: Any) -> None:
    corner = _block(desc, coord, src)
    _sm().tma_store(src.view, lambda data: desc.put(corner, data))


def _tma_add(desc: Descriptor, coord: Any, src: Shared) -> None:
    corner = _block(desc, coord, src)
    _sm().tma_store(src.view, lambda data: desc.add(corner, data))


def _copy_rows(memory: Shared, pointers: Any, mask: Any) -> None:
    if list(pointers.shape) != memory.shape:
        raise ProtocolError(f"{pointers.shape} copied to {memory.view}, {memory.shape}")
    _sm().copy(memory.view, tl.load(pointers, mask=mask, other=0.0).handle.data)


# ---- wgmma -------------------------------------------------------------------------------------------------------------


class Accumulator:
    """The result of an asynchronous wgmma, of no use but to warpgroup_mma_wait and as the accumulator of the next one."""

    result: TensorHandle
    operation: Operation

    def __init__(self, type: Any) -> None:
        self.type, self.shape, self.dtype = type, type.shape, type.element_ty

    @property
    def handle(self) -> TensorHandle:
        raise ProtocolError(f"the result of {self.operation.name} is used before warpgroup_mma_wait")


def _mma(
    a: Any, b: Shared, acc: Any, *, use_acc: Any = True, precision: Any = None, max_num_imprecise_acc: Any = None,
    is_async: Any = False,
) -> Any:  # fmt: skip
    if [*a.shape[:1], *b.shape[1:]] != list(acc.shape) or a.shape[1] != b.shape[0] or a.dtype.scalar != b.dtype:
        raise ProtocolError(f"wgmma of {a.dtype}{list(a.shape)} and {b.dtype}{b.shape} into {list(acc.shape)}")
    start, result = acc, Accumulator(acc.type)
    if not use_acc:
        start = _tensor(np.zeros(acc.shape, stock._get_np_dtype(acc.type.element_ty)), acc.type.element_ty)
    rounding = getattr(ir.INPUT_PRECISION, (precision or "tf32").upper())

    def compute() -> None:
        left, right = (TensorHandle(x.view.data, x.dtype) if isinstance(x, Shared) else x.handle for x in (a, b))
        before = start.result if isinstance(start, Accumulator) else start.handle
        result.result = builder.create_dot(left, right, before, rounding, 0)

    result.operation = _sm().mma([x.view for x in (a, b) if isinstance(x, Shared)], compute)
    return result if is_async else _mma_wait(0, (result,))


def _mma_wait(num_outstanding: Any = 0, deps: Sequence[Any] = ()) -> Any:
    sm = _sm()
    sm.mma_wait(_constant(num_outstanding))
    flying = sm.current.mmas
    results = [
        tl.tensor(d.result, d.type) if isinstance(d, Accumulator) and d.operation not in flying else d for d in deps
    ]
    return results[0] if len(results) == 1 else tuple(results)


# ---- barriers and partitions -------------------------------------------------------------------------------------------


def _wait(barrier: MBarrier, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    if pred:
        _sm().wait(barrier, operator.index(phase))


def _arrive(barrier: MBarrier, *, count: Any = 1, pred: Any = True, **_: Any) -> None:
    if pred:
        _sm().arrive(barrier, _constant(count))


def _expect(barrier: MBarrier, bytes_per_cta: Any = 0, pred: Any = True, **_: Any) -> None:
    if pred:
        _sm().arrive(barrier, 1, _constant(bytes_per_cta))


def _named_barrier(block: bool) -> Callable[..., None]:
    return lambda barrier, threads: _sm().named_barrier(operator.index(barrier), _constant(threads), block)


def _specialize(functions_and_args: Any, worker_num_warps: Any, worker_num_regs: Any = None) -> Any:
    names = [f"partition {i} ({function.fn.__name__})" for i, (function, _) in enumerate(functions_and_args)]
    calls = [functools.partial(python_function(function), *args) for function, args in functions_and_args]
    return _sm().specialize(names, calls, [_constant(n) for n in worker_num_warps])


def _add_four(pointers: Any, values: Any) -> None:
    at = TensorHandle(pointers.handle.data.astype(np.uint64), tl.pointer_type(tl.float32))
    every = TensorHandle(np.ones(at.data.shape, bool), tl.int1)
    builder.create_atomic_rmw(ir.ATOMIC_OP.FADD, at, values.handle, every, ir.MEM_SEMANTIC.RELAXED, None)


def _saturated(x: Any) -> Any:
    return tl.where(x > 0.0, tl.minimum(x, 1.0), 0.0)


# Inline assembly that kernels use, and what it does to its inputs.
_ASSEMBLY: list[tuple[str, Callable[..., Any]]] = [
    (r"bar\.sync \$1, (\d+);", lambda found, barrier: _named_barrier(True)(barrier, int(found[1]))),
    (r"bar\.arrive \$1, (\d+);", lambda found, barrier: _named_barrier(False)(barrier, int(found[1]))),
    (r"red\.relaxed\.gpu\.global\.add\.v4\.f32 ", lambda found, pointers, values: _add_four(pointers, values)),
    (r"{ \.reg \.pred p; .* @p st\.shared", lambda found, x: None),  # _gluon.hold: the model's order is the program's
    (r"ex2\.approx(?:\.ftz)?\.f32 \$0, \$1;", lambda found, x: tl.exp2(x)),
    (r"rcp\.approx\.ftz\.f32 \$0, \$1;", lambda found, x: 1.0 / x),
    (r"{ \.reg \.f32 y; neg\.f32 y, \$1; fma\.rn\.sat\.f32 \$0, y, \$1, 0f3F800000; }", lambda found, x: _saturated(1.0 - x * x)),
]


def _inline_assembly(asm: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: Any, pack: Any) -> Any:
    for pattern, effect in _ASSEMBLY:
        if found := re.match(pattern, asm.strip()):
            return effect(found, *args)
    raise NotImplementedError(f"inline assembly that the model does not know: {asm}")


def _like(name: str) -> Callable[..., Any]:
    """The function of triton.language with that name, as it is while a kernel runs."""
    return lambda *args, **kwargs: getattr(tl, name)(*args, **kwargs)


_MODEL: dict[str, Callable[..., Any]] = {
    "allocate_shared_memory": _allocate,
    "arange": lambda start, end, layout=None: tl.arange(start, end),
    "zeros": lambda shape, dtype, layout=None: tl.zeros(shape, dtype),
    "full": lambda shape, value, dtype, layout=None: tl.full(shape, value, dtype),
    "full_like": lambda input, value, shape=None, dtype=None, layout=None: tl.full(
        shape or input.shape, value, dtype or input.dtype.scalar
    ),
    "convert_layout": lambda value, layout, assert_trivial=False: value,
    "set_auto_layout": lambda value, layout: value,
    "static_range": _like("static_range"),
    "to_tensor": assigned,
    "num_warps": lambda: _sm().current.warps,
    "num_ctas": lambda: 1,
    "warp_specialize": _specialize,
    "barrier": lambda cluster=False: _sm().pause(),
    "thread_barrier": lambda: _sm().pause(),
    "inline_asm_elementwise": _inline_assembly,
    "bar_sync": _named_barrier(True),
    "bar_arrive": _named_barrier(False),
    "init": lambda barrier, count: barrier.init(_constant(count)),
    "invalidate": lambda barrier: barrier.invalidate(),
    "wait": _wait,
    "arrive": _arrive,
    "expect": _expect,
    "copy_rows": _copy_rows,
    "copy_rows_arrive": lambda barrier: _sm().copies_arrive(barrier),
    "fence_async_shared": lambda cluster=False: _sm().fence(),
    "warpgroup_mma": _mma,
    "warpgroup_mma_wait": _mma_wait,
    "warpgroup_mma_init": lambda value: value,
    "async_copy_global_to_shared": _tma_load,
    "async_load": _tma_load,
    "async_copy_shared_to_global": _tma_store,
    "async_store": _tma_store,
    "tma_add": _tma_add,
    "async_atomic_add": _tma_add,
    "store_wait": lambda pendings, read_only=True: _sm().store_wait(_constant(pendings)),
    "make_tensor_descriptor": _make_descriptor,
}


# ---- names in a kernel's source ----------------------------------------------------------------------------------------


class _Namespace:
    """A module of Gluon's, or kernels/_gluon.py, as a running kernel sees it."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return _modelled(getattr(self._module, name))


def _modelled(value: Any) -> Any:
    """What stands for this value of a name in a kernel while it runs."""
    if isinstance(value, types.ModuleType):
        return _Namespace(value) if value is _gluon or value.__name__.startswith("triton.experimental.gluon") else value
    of_triton = isinstance(value, JITFunction) and value.is_gluon() and value.fn.__module__.startswith("triton.")
    name = getattr(value.fn if of_triton else value, "__name__", "")
    if not (of_triton or getattr(value, "__triton_builtin__", False) or name == "static_range"):
        return value
    if name in _MODEL:
        return _MODEL[name]
    if not hasattr(tl, name):
        raise NotImplementedError(f"Gluon's {name} is not modelled")
    return _like(name)


class _Rewriter(Rewriter):
    """Also tells allocations the names of the variables that hold them."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        call = isinstance(node.value, ast.Call)
        super().visit_Assign(node)
        target = node.targets[0]
        if call and isinstance(target, ast.Name):
            node.value = self._call("_interpreted_named", node.value, ast.Constant(target.id))
        return node


# Keyed by id, as language.python_function's.
_functions: dict[int, tuple[JITFunction, Callable[..., Any]]] = {}


def python_function(kernel: JITFunction) -> Callable[..., Any]:
    """A Gluon kernel as a Python function: its names of Gluon stand for the model's."""
    if id(kernel) not in _functions:
        fn = kernel.fn
        names = {name: fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__}
        names |= inspect.getclosurevars(fn).nonlocals
        stands = {name: _modelled(value) for name, value in names.items()}
        cells = {name: value for name, value in stands.items() if value is not names[name]}
        _functions[id(kernel)] = kernel, compiled_from_source(kernel, _Rewriter, {"_interpreted_named": _named, **cells})
    return _functions[id(kernel)][1]

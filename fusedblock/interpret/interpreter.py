"""Run @triton.jit and @gluon.jit kernels on CPU tensors, one program after the other, for as long as a context is open.

Triton ships an interpreter, but it is chosen for a whole process by TRITON_INTERPRET (such a process cannot compile), it
computes bf16 sums and products on the raw bits, and it lets through what a GPU would not do. Here its builder (numpy per
tl operation) is kept and the rest is ours:

* per call: JITFunction.run is redirected while a context is open, the language while a launch runs. Neither a kernel nor
  its module is changed, so the same JITFunction compiles before, after and between interpretations;
* bf16 arithmetic, dots, reductions and atomics are computed in fp32 and rounded to nearest even; fp32 dots round their
  operands to TF32 unless the kernel asks for "ieee", as tensor cores do;
* kernels see the types a compiled kernel sees: loop variables and float arguments are tensors, an integer argument equal
  to 1 is a compile-time constant, `and`, `or`, `not`, min and max act on tensors, a block has no truth value;
* every access is checked against the launch's tensor arguments;
* Gluon kernels, which synchronise their parts themselves, run on a model of the hardware that does so (machine.py).

For gradcheck, a launch with a float64 tensor has its float scalars in float64 too (compiled, they would be float32).

What interpretation cannot show: limits of shared memory and registers, tile minimums, races inside a program (other than in
a Gluon kernel's shared memory), layouts.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction

from ..kernels import _gluon, _launch, _target
from ..kernels._lang import TensorDescriptor, tl
from . import gluon
from .builder import AccessHook, access_hooks, builder, scalar, semantic
from .language import language, python_function
from .memory import Launch, tensors_of

LaunchHook = Callable[[Launch], None]
_launch_hooks: list[LaunchHook] = []
_open_contexts = 0
_seed = 0

_MISSING = object()


@contextmanager
def _patched(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set (object, attribute, value) and put back what was there, also where the attribute was inherited."""
    undo = []
    try:
        for owner, name, value in changes:
            undo.append((owner, name, owner.__dict__.get(name, _MISSING)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(undo):
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _argument(value: Any, specialize: bool) -> Any:
    """A run-time argument as the compiled kernel has it."""
    if isinstance(value, bool):
        return scalar(value, tl.int1)
    if isinstance(value, int):
        return value if value == 1 and specialize else stock._implicit_cvt(value)
    if isinstance(value, float):
        return scalar(value, builder.float_type)
    if isinstance(value, tuple):
        members = [_argument(member, specialize) for member in value]
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    if isinstance(value, TensorDescriptor):
        strides = [*(stock._implicit_cvt(s) for s in value.strides[:-1]), tl.constexpr(value.strides[-1])]
        descriptor = semantic.make_tensor_descriptor(
            stock._implicit_cvt(value.base),
            [stock._implicit_cvt(n) for n in value.shape],
            strides,
            [tl.constexpr(n) for n in value.block_shape],
            padding_option=value.padding,
        )
        if hasattr(value, "round_f32_to_tf32"):  # triton 3.9
            descriptor.handle.round_f32_to_tf32 = value.round_f32_to_tf32
        return descriptor
    if _gluon.AVAILABLE and isinstance(value, _gluon.TensorDescriptor):
        return gluon.descriptor(value)
    return stock._implicit_cvt(value)  # tensors become pointers, None and the like stay


def _run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """JITFunction.run while a context is open."""
    if warmup:
        return
    for pre_run_hook in self.pre_run_hooks:
        pre_run_hook(*args, **kwargs)
    function = _function(self)
    names = self.signature.parameters
    bound = self.signature.bind(*args, **{name: value for name, value in kwargs.items() if name in names})  # the rest: options
    bound.apply_defaults()
    arguments = bound.arguments
    size = tuple(int(n) for n in (grid(arguments) if callable(grid) else grid))
    if not 1 <= len(size) <= 3:
        raise ValueError(f"{self.fn.__name__}: grid {size} has {len(size)} axes, expected 1 to 3")
    gx, gy, gz = (*size, 1, 1)[:3]
    launch = Launch(self.fn.__name__, (gx, gy, gz), arguments)
    for hook in _launch_hooks:
        hook(launch)
    tensors = [t for name, value in arguments.items() for _, t in tensors_of(name, value)]
    builder.float_type = tl.float64 if any(t.dtype is torch.float64 for t in tensors) else tl.float32
    builder.set_grid_dim(gx, gy, gz)
    changes = [*language(), *(gluon.changes() if self.is_gluon() else ())]
    with _patched(changes), np.errstate(all="ignore"):  # a GPU has no floating-point exceptions
        values = {
            p.name: arguments[p.name] if p.is_constexpr else _argument(arguments[p.name], not p.do_not_specialize)
            for p in self.params
        }
        builder.launch = launch
        try:
            for z in range(gz):
                for y in range(gy):
                    for x in range(gx):
                        builder.set_grid_idx(x, y, z)
                        if self.is_gluon():
                            seed = f"{_seed} {x} {y} {z}"
                            gluon.run_program(function, values, seed, launch.kernel, kwargs.get("num_warps", 4))
                        else:
                            function(**values)
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(f"in program {builder.grid_idx} of {launch.grid} of {launch.kernel}")
            raise
        finally:
            builder.launch = None


def _call(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
    """JITFunction.__call__ while a context is open: one kernel calls another."""
    return _function(self)(*args, **kwargs)


def _function(kernel: JITFunction) -> Callable[..., Any]:
    return gluon.python_function(kernel) if kernel.is_gluon() else python_function(kernel)


# ---- the context -------------------------------------------------------------------------------------------------------


def _poisoned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        t = make(*args, **kwargs)
        if type(t) is Tensor and t.device.type == "cpu" and t.dtype.is_floating_point and not torch.compiler.is_compiling():
            # All bits set is a NaN in every floating dtype. Not fill_: a dispatch mode that counts operations would see it.
            ctypes.memset(t.untyped_storage().data_ptr(), 0xFF, t.untyped_storage().nbytes())
        return t

    return made


# torch keeps, from the first time it is asked, the functions that a device context changes: they must not be the poisoned ones.
with torch.device("cpu"):
    torch.empty(0)


def _poison_changes() -> list[tuple[Any, str, Any]]:
    makers = {torch: ("empty", "empty_like", "empty_strided"), Tensor: ("new_empty", "new_empty_strided")}
    return [(owner, name, _poisoned(getattr(owner, name))) for owner, names in makers.items() for name in names]


@contextmanager
def interpret(
    target: _target.Target | None = None,
    *,
    poison: bool = True,
    seed: int = 0,
    on_launch: Sequence[LaunchHook] = (),
    on_access: Sequence[AccessHook] = (),
) -> Iterator[None]:
    """Inside, ops and kernels launched on CPU tensors run their Triton and Gluon kernels in this interpreter.

    target     choose kernels and configs for this GPU, e.g. TARGETS["sm_80"] (pointer kernels) or TARGETS["sm_90"]
               (tensor descriptors); None: as for any CPU tensor
    poison     fill buffers from torch.empty, empty_like, empty_strided, new_empty and new_empty_strided with NaN (floating
               dtypes), so that an element no program writes is seen
    seed       for Gluon kernels: in what order partitions, copies and wgmmas go on, see machine.py
    on_launch  called with each Launch before its first program
    on_access  called with each Access (a load, store or atomic of one program)

    Raises from a launch: OutOfBounds where a program reaches memory outside the launch's tensor arguments; ValueError for
    tensors that are not on the CPU; a ProtocolError (Race, Deadlock, BarrierMisuse, Unwritten) where a Gluon kernel would hang
    or could go wrong. An error names the program it occurred in. Contexts nest; not thread-safe.
    """
    global _open_contexts, _seed
    with ExitStack() as stack:
        if _open_contexts == 0:
            stack.enter_context(_patched([(JITFunction, "run", _run), (JITFunction, "__call__", _call)]))
        if poison:
            stack.enter_context(_patched(_poison_changes()))
        stack.enter_context(_launch.mode("interpret"))
        if target is not None:
            stack.enter_context(_target.override(target))
        before = list(_launch_hooks), list(access_hooks), _seed
        _launch_hooks.extend(on_launch)
        access_hooks.extend(on_access)
        _open_contexts += 1
        _seed = seed
        try:
            yield
        finally:
            _open_contexts -= 1
            _launch_hooks[:], access_hooks[:], _seed = before

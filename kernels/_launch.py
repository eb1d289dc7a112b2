"""The only launch path. No run-time search: a config comes from a pure function, a compiled kernel from a cache.

Triton's own launcher binds and specialises every argument in Python (20 to 50 us a call). Here the same facts make the key
of a dictionary and the compiled kernel is called directly, which keeps eager decode from being bound by the host. A sequence
of launches can also be recorded and replayed (_replay.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import _lang
from ._lang import TensorDescriptor

# How the kernels run when the tensors are not on a GPU: None (they do not: the reference does), "interpret" or "compile".
_mode: str | None = None
_compiled: dict[Any, Any] = {}
# CompiledKernel.run(*launch, *args) is checked on NVIDIA GPUs with these versions only; others take triton's own launcher
# (on AMD it also specialises on tensors under 2 GB, which _fact does not tell).
_DIRECT = _lang.VERSION in ((3, 6),) and torch.version.hip is None


class _Recording(threading.local):
    """hook: called with (kernel, grid, args, constexprs) of every launch of this thread while a sequence is recorded."""

    hook: Callable[[Any, tuple[int, ...], Sequence[Any], Mapping[str, Any]], None] | None = None


recording = _Recording()


@contextmanager
def mode(name: str) -> Iterator[None]:
    """Inside, ops run their kernels whatever the device: the caller has redirected triton's launcher."""
    global _mode
    before, _mode = _mode, name
    try:
        yield
    finally:
        _mode = before


def current_mode() -> str | None:
    return _mode


def runs_kernels(x: Tensor) -> bool:
    """Kernel or plain-torch reference for tensors like x. fp64 exists for gradcheck: on a GPU it takes the reference."""
    if _mode is not None:
        return True
    return x.is_cuda and _lang.AVAILABLE and x.dtype is not torch.float64


def replays(x: Tensor) -> bool:
    """Whether launches for x go straight to compiled kernels, so that recording them pays."""
    return _DIRECT and _mode is None and runs_kernels(x)


def _fact(arg: Any) -> Any:
    """What triton specialises a kernel on, for one argument."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if type(arg) is int:
        return arg if arg == 1 else (arg % 16 == 0, -(2**31) <= arg < 2**31)
    if isinstance(arg, float):
        return float
    if hasattr(arg, "block_shape"):  # a tensor descriptor, triton's or Gluon's
        return arg.base.dtype, tuple(arg.block_shape), getattr(arg, "layout", None)
    return arg


def launch(kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constexprs: Mapping[str, Any]) -> None:
    """kernel[grid](*args, **constexprs); args are the run-time parameters in order, constexprs come after them.

    constexprs may hold num_warps, num_stages, maxnreg and other compile options too. An empty grid launches nothing.
    """
    if 0 in grid:
        return
    if recording.hook is not None:
        recording.hook(kernel, grid, args, constexprs)
    if _mode is not None or not _DIRECT:
        kernel[grid](*args, **constexprs)
        return
    device = torch.cuda.current_device()
    key = (id(kernel), device, tuple(constexprs.values()), *map(_fact, args))
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*args, **constexprs)
        _compiled[key] = compiled, tuple(constexprs[name] for name in kernel.arg_names[len(args) :])
        return
    compiled, tail = found
    run_compiled(compiled, grid, (*args, *tail), torch._C._cuda_getCurrentRawStream(device))


def find_compiled(kernel: Any, args: Sequence[Any], constexprs: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]] | None:
    """(compiled kernel, constexpr arguments) of a launch that has run before, on GPUs whose direct path is in use."""
    return _compiled.get((id(kernel), torch.cuda.current_device(), tuple(constexprs.values()), *map(_fact, args)))


def hooked() -> bool:
    """Whether someone (a profiler) wants to hear of every launch. Knobs of versions that know no chains are always asked."""
    knobs = _lang.triton.knobs.runtime
    return any(getattr(hook, "calls", hook) for hook in (knobs.launch_enter_hook, knobs.launch_exit_hook))


def run_compiled(compiled: Any, grid: tuple[int, ...], args: Sequence[Any], stream: int) -> None:
    """Enqueue a compiled kernel; args are all its parameters, tensors possibly as addresses."""
    enter = leave = metadata = None
    if hooked():
        knobs = _lang.triton.knobs.runtime
        enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
        metadata = compiled.launch_metadata(grid, stream, *args)
    x, y, z = (*grid, 1, 1)[:3]
    compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, metadata, enter, leave, *args)


def launched_variants() -> int:
    """How many compiled variants this process holds (tests count recompilations with it)."""
    return len(_compiled)


def tma_ready(*tensors: Tensor) -> bool:
    """Tensor descriptors need 16-byte aligned bases, a dense last axis and all other strides multiples of 16 bytes, not 0."""
    return all(t.numel() and not t.data_ptr() % 16 and strides_suit_tma(t) for t in tensors)


def for_tma(t: Tensor) -> Tensor:
    """t, or a copy where TMA does not take its rows or its address."""
    return t if tma_ready(t) else t.clone(memory_format=torch.contiguous_format)


def strides_suit_tma(t: Tensor) -> bool:
    size = t.element_size()
    if t.stride(-1) != 1:
        return False
    return not any(n > 1 and (s * size % 16 or s <= 0) for n, s in zip(t.shape[:-1], t.stride()[:-1]))


# Tensors of the device that a launch reads and that are nobody's argument: the same bytes wherever the layout is the same.
_CONSTANT = "_fusedblock_constant"
_in_graphs: dict[int, Tensor] = {}


def constant(t: Tensor) -> Tensor:
    """Mark t as what a recorded launch may keep as it is. It must have been filled when this returns, for every stream."""
    setattr(t, _CONSTANT, True)
    return t


def is_constant(t: Tensor) -> bool:
    return hasattr(t, _CONSTANT)


def capturing(device: torch.device) -> bool:
    """Whether launches on device go into a CUDA graph now: nothing may wait, copy from the host or be kept from its memory."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def keep_for_graphs(*tensors: Tensor) -> None:
    """Never free these: a CUDA graph reads them, and nothing tells when it is gone."""
    _in_graphs.update({id(t): t for t in tensors})


def tma_strides(t: Tensor) -> list[int]:
    """t's strides, but for axes of size 1, which may carry any stride that TMA would refuse."""
    strides = list(t.stride())
    row = t.shape[-1] * t.element_size()
    for axis, n in enumerate(t.shape[:-1]):
        if n == 1:
            strides[axis] = max(row + (-row) % 16, 16) // t.element_size()
    return strides


def descriptor(t: Tensor, block: Sequence[int]) -> Any:
    """A host tensor descriptor of t for boxes of `block`."""
    return TensorDescriptor(t, list(t.shape), tma_strides(t), list(block))


def dense_last(t: Tensor) -> bool:
    """Whether t's last axis is dense."""
    return t.stride(-1) == 1 or t.shape[-1] <= 1 and t.is_contiguous()


def contiguous_last(t: Tensor) -> Tensor:
    """t itself where its last axis is dense, else a dense copy (expanded and transposed inputs stay legal)."""
    return t if dense_last(t) else t.contiguous()


class _Here:
    """The context manager that does nothing, without contextlib's cost."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


_HERE = _Here()


def on_device(x: Tensor | torch.device) -> Any:
    """A context in which x's device is current for the launches inside; free where it already is."""
    device = x if isinstance(x, torch.device) else x.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return _HERE


# What inductor's code allocates with: a third of torch.empty's time. It takes the current device, and no mode sees it.
_empty_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def allocate(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor on `device`, which is current."""
    if device.type == "cuda" and _empty_cuda is not None:
        return _empty_cuda(shape, strides, dtype)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)

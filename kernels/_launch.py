"""The only launch path. No run-time search: a config comes from a pure function, a compiled kernel from a cache.

Triton's own launcher binds and specialises every argument in Python (20 to 50 us a call). Here the same facts make the key
of a dictionary and the compiled kernel is called directly, which keeps eager decode from being bound by the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import _lang
from ._lang import TensorDescriptor

# How the kernels run when the tensors are not on a GPU: None (they do not: the reference does), "interpret" or "compile".
_mode: str | None = None
_compiled: dict[Any, Any] = {}
# CompiledKernel[grid](*args) is checked on a GPU with these versions only; others take triton's own launcher.
_DIRECT = _lang.VERSION in ((3, 6),)


@contextmanager
def mode(name: str) -> Iterator[None]:
    """Inside, ops run their kernels whatever the device: the caller has redirected triton's launcher."""
    global _mode
    before, _mode = _mode, name
    try:
        yield
    finally:
        _mode = before


def runs_kernels(x: Tensor) -> bool:
    """Kernel or plain-torch reference for tensors like x. fp64 exists for gradcheck: on a GPU it takes the reference."""
    if _mode is not None:
        return True
    return x.is_cuda and _lang.AVAILABLE and x.dtype is not torch.float64


def _fact(arg: Any) -> Any:
    """What triton specialises a kernel on, for one argument."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if type(arg) is int:
        return arg if arg == 1 else (arg % 16 == 0, -(2**31) <= arg < 2**31)
    if isinstance(arg, float):
        return float
    if TensorDescriptor is not None and isinstance(arg, TensorDescriptor):
        return arg.base.dtype, tuple(arg.block_shape)
    return arg


def launch(kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constexprs: Mapping[str, Any]) -> None:
    """kernel[grid](*args, **constexprs); args are the run-time parameters in order, constexprs come after them.

    constexprs may hold num_warps, num_stages, maxnreg and other compile options too. An empty grid launches nothing.
    """
    if 0 in grid:
        return
    if _mode is not None or not _DIRECT:
        kernel[grid](*args, **constexprs)
        return
    key = (id(kernel), torch.cuda.current_device(), tuple(constexprs.values()), *map(_fact, args))
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*args, **constexprs)
        _compiled[key] = compiled, tuple(constexprs[name] for name in kernel.arg_names[len(args) :])
        return
    compiled, tail = found
    compiled[(*grid, 1, 1)[:3]](*args, *tail)


def launched_variants() -> int:
    """How many compiled variants this process holds (tests count recompilations with it)."""
    return len(_compiled)


def tma_ready(*tensors: Tensor) -> bool:
    """Tensor descriptors need 16-byte aligned bases, a contiguous last axis and all other strides multiples of 16 bytes, not 0."""
    for t in tensors:
        size = t.element_size()
        if t.numel() == 0 or t.data_ptr() % 16 or t.stride(-1) != 1:
            return False
        for n, s in zip(t.shape[:-1], t.stride()[:-1]):
            if n > 1 and (s * size % 16 or s <= 0):
                return False
    return True


def descriptor(t: Tensor, block: Sequence[int]) -> Any:
    """A host tensor descriptor of t for boxes of `block`; axes of size 1 may carry any stride, which TMA would refuse."""
    strides = list(t.stride())
    row = t.shape[-1] * t.element_size()
    for axis, n in enumerate(t.shape[:-1]):
        if n == 1:
            strides[axis] = max(row + (-row) % 16, 16) // t.element_size()
    return TensorDescriptor(t, list(t.shape), strides, list(block))


def contiguous_last(t: Tensor) -> Tensor:
    """t itself where its last axis is dense, else a dense copy (expanded and transposed inputs stay legal)."""
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 and t.is_contiguous() else t.contiguous()


@contextmanager
def on_device(t: Tensor) -> Iterator[None]:
    """Make t's device current for the launches inside; free where it already is."""
    if t.is_cuda and t.device.index != torch.cuda.current_device():
        with torch.cuda.device(t.device):
            yield
    else:
        yield

"""Compile what an op would launch, for any GPU, on a machine without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from ..kernels import _launch
from ..kernels._target import Target, override


class _Driver:
    """All that compiling asks of a driver. `meta` tensors and host tensors alike are only asked for their alignment."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> Any:
        return ("aot", self.target.backend, self.target.arch)  # a key of JITFunction's caches, apart from real devices

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextmanager
def compile_only(target: Target) -> Iterator[list[Any]]:
    """Inside, a launch compiles for target as the JIT would specialise it, and runs nothing.

    Ops choose kernels and configs for target. Yields the list of compiled kernels (triton's CompiledKernel), one per launch
    in launch order; outputs of the ops hold no results.
    """
    from triton.runtime import driver

    kernels: list[Any] = []
    run = JITFunction.run

    def compile_instead(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernels.append(kernel)
        return kernel

    active = driver._active
    driver.set_active(_Driver(GPUTarget(target.backend, target.arch, 64 if target.backend == "hip" else 32)))
    JITFunction.run = compile_instead
    try:
        with _launch.mode("compile"), override(target):
            yield kernels
    finally:
        JITFunction.run = run
        driver._active = active

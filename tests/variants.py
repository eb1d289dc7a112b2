"""Which variants of the kernels a workload makes triton compile, counted without compiling or running any."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton

from fusedblock.kernels._target import Target

from . import aot

# Of the constexprs, those that a config table decides.
_TILES = ("BM", "BN", "BK", "ROWS", "BLOCK", "NS", "SPLIT", "STAGES", "TMA")


@contextmanager
def counted(target: Target) -> Iterator[dict[str, dict[Any, set[str]]]]:
    """Inside, a launch on CPU or meta tensors only asks triton which variant it would compile for target.

    Yields kernel -> tile config -> the keys under which triton keeps variants: constexprs, compile options, and what it
    specialises arguments on.
    """
    found: dict[str, dict[Any, set[str]]] = {}

    def instead_of_compiling(*, key: str, fn: Any, compile: Any, **_: Any) -> bool:
        values = {fn.jit_function.arg_names[path[0]]: value for path, value in compile["constants"].items()}
        tile = *((n, values[n]) for n in _TILES if n in values), compile["num_warps"]
        found.setdefault(f"{fn.module}.{fn.name}", {}).setdefault(tile, set()).add(key)
        return True

    before = triton.knobs.runtime.jit_cache_hook
    kernels = [f for m in list(sys.modules.values()) if getattr(m, "__name__", "").startswith("fusedblock.kernels.")
               for f in vars(m).values() if isinstance(f, triton.JITFunction)]  # fmt: skip
    for kernel in kernels:  # triton asks for nothing that an earlier test has made it compile
        kernel.device_caches.clear()
    triton.knobs.runtime.jit_cache_hook = instead_of_compiling
    try:
        with aot.compile_only(target):
            yield found
    finally:
        triton.knobs.runtime.jit_cache_hook = before

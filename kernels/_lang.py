"""The only `import triton`. Without it (macOS, Windows) every kernel file still imports; only a launch raises."""

from __future__ import annotations

from typing import Any


class Stub:
    """Stands for a language where a kernel file is only read: decorators give an object that cannot launch, for this reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getitem__(self, grid: Any) -> Any:
        raise ImportError(f"fusedblock: {self.reason}")


try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.tools.tensor_descriptor import TensorDescriptor

    AVAILABLE = True
    VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
except ImportError:  # pragma: no cover - exercised by tests/test_import.py in a process without triton
    triton = tl = libdevice = Stub("this kernel needs triton, which is not installed here")  # type: ignore[assignment]
    TensorDescriptor = None  # type: ignore[assignment,misc]
    AVAILABLE = False
    VERSION = (0, 0)


def tma_dtype(element: int) -> int:
    """The driver's code of a tensor map's element type, of the code that a compiled kernel names it by."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    return TMA_DTYPE_DEVICE_TO_HOST[element]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, int(n) - 1).bit_length()

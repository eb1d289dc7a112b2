"""Fixtures for every test. Set before torch and numpy load: the interpreter's small numpy calls lose to BLAS threads."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays: every full collection would go through it again, most of a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Result and scratch buffers start as NaN, so that an element no kernel wrote cannot pass for a right one."""
    from fusedblock.kernels._spec import Spec

    allocate = Spec._buffer

    def poisoned(self, write, sizes, args):
        buffer = allocate(self, write, sizes, args)
        # Fake and meta tensors hold no values.
        if type(buffer) is torch.Tensor and buffer.is_floating_point() and not buffer.is_meta:
            with _disable_current_modes():  # unseen by whatever counts or records
                buffer.fill_(float("nan"))
        return buffer

    monkeypatch.setattr(Spec, "_buffer", poisoned)


@pytest.fixture(autouse=True)
def modes_as_before() -> Iterator[None]:
    """A test that leaves a mode of torch's on or off behind fails itself, and not whichever comes after it."""
    yield
    with torch.device("meta"):
        assert torch.empty(0).is_meta, "torch's device contexts have no effect any more"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules of the kernels that this thread launches, by name."""
    from fusedblock.kernels import _launch

    names: list[str] = []
    monkeypatch.setattr(_launch.recording, "hook", lambda kernel, *rest: names.append(kernel.__module__.rsplit(".", 1)[1]))
    return names

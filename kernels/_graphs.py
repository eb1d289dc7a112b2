"""Recorded launches at addresses that come again and again, as one CUDA graph: one call of the driver for all of them.

A layer's parameters stay where they are, and torch's allocator hands out the same memory in the same order, so that in steady
serving a program runs at a few sets of addresses. Each launch takes the host some 4 us; a graph takes about as long as two.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

AFTER = 4  # runs at the same addresses before a graph is made of them, which takes as long as it saves in some ten
MOST = 1024  # graphs in all; and addresses that a program counts
_NON_BLOCKING, _RELAXED = 1, 2  # CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_RELAXED


@functools.cache
def _cuda() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuGraphLaunch.argtypes = [ctypes.c_void_p] * 2
    return library


@functools.cache
def _stream(device: int) -> ctypes.c_void_p:
    """A stream that nothing runs on: launches are captured there, of one thread at a time."""
    stream = ctypes.c_void_p()
    _check(_cuda().cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING))
    return stream


class _Refused(Exception):
    """By the driver."""


def _check(error: int) -> None:
    if error:
        raise _Refused(error)


def _capture(enqueue: Callable[[int], bool]) -> ctypes.c_void_p:
    """An executable graph of what enqueue(stream) launches; it returns whether the driver took everything."""
    cuda, graph, made = _cuda(), ctypes.c_void_p(), ctypes.c_void_p()
    stream = _stream(torch.cuda.current_device())
    # Other threads may be capturing, and a stricter mode would let what follows break theirs.
    mode = ctypes.c_int(_RELAXED)
    _check(cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    try:
        _check(cuda.cuStreamBeginCapture_v2(stream, _RELAXED))
        whole = False
        try:
            whole = enqueue(stream.value or 0)
        finally:
            error = cuda.cuStreamEndCapture(stream, ctypes.byref(graph))
        _check(error if whole else 1)
        _check(cuda.cuGraphInstantiateWithFlags(ctypes.byref(made), graph, ctypes.c_ulonglong(0)))
    finally:
        if graph:
            cuda.cuGraphDestroy(graph)
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    return made


def watched() -> bool:
    """Whether launches have to come one by one: into a CUDA graph of the caller's, or before a profiler."""
    return torch._C._cuda_isCurrentStreamCapturing() or torch._C._autograd._profiler_enabled()


_existing = 0
_lock = threading.Lock()


def _destroy(known: dict[tuple[int, ...], Any]) -> None:
    """Graphs that still run are freed by the driver when they are through."""
    global _existing
    for found in known.values():
        if type(found) is not int:
            _existing -= 1
            _cuda().cuGraphExecDestroy(found)
    known.clear()


class Graphs:
    """Of one program. Not for two threads at a time."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Any] = {}  # addresses -> how often they came, or the graph
        self._usable = True
        weakref.finalize(self, _destroy, self._known).atexit = False

    def run(self, addresses: tuple[int, ...], stream: int) -> bool:
        """Enqueue the graph of these addresses, if there is one; else count them."""
        if not self._usable:
            return False
        found = self._known.get(addresses, 0)
        if type(found) is int:
            if found == 0 and len(self._known) >= MOST:
                _destroy(self._known)
            self._known[addresses] = found + 1
            return False
        if watched():
            return False
        self._usable = not _cuda().cuGraphLaunch(found, stream)
        return self._usable

    def keep(self, addresses: tuple[int, ...], enqueue: Callable[[int], bool]) -> None:
        """Make a graph of what enqueue(stream) launches, where these addresses came often enough."""
        global _existing
        came = self._known.get(addresses)
        if not self._usable or type(came) is not int or came < AFTER or _existing >= MOST or watched():
            return
        try:
            with _lock:
                self._known[addresses] = _capture(enqueue)
            _existing += 1
        except _Refused:
            self._usable = False

"""Recorded launches at addresses that come again and again, as one CUDA graph: one call of the driver for all of them.

A layer's parameters stay where they are, and torch's allocator hands out the same memory in the same order, so that in steady
serving a program runs at a few sets of addresses. Each launch takes the host some 4 us; a graph takes about as long as two.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

AFTER = 4  # runs at the same addresses before a graph is made of them, which takes as long as it saves in some ten
MOST = 256  # graphs of one program, and addresses that it counts: the latest
TOTAL = 2048  # graphs in all
PATIENCE = 4  # times in a row that the driver refuses (a thread without a context, say) before a program makes do without
_NON_BLOCKING, _RELAXED = 1, 2  # CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_RELAXED


@functools.cache
def _cuda() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuGraphLaunch.argtypes = [ctypes.c_void_p] * 2
    return library


@functools.cache
def _stream(device: int) -> ctypes.c_void_p:
    """A stream that nothing runs on: launches are captured there, of one thread at a time."""
    return _new_stream()


def _new_stream() -> ctypes.c_void_p:
    """On the current device. Nobody else has it, as somebody may have one of torch's pool."""
    stream = ctypes.c_void_p()
    _check(_cuda().cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING))
    return stream


@functools.cache
def beside(device: int, stream: int) -> torch.cuda.ExternalStream:
    """A stream for what goes beside the work of `stream`. A capture takes it in: it must not be another thread's."""
    with torch.cuda.device(device), _relaxed():
        made = _new_stream()
    return torch.cuda.ExternalStream(made.value or 0, device=device)


class _Refused(Exception):
    """By the driver."""


def _check(error: int) -> None:
    if error:
        raise _Refused(error)


@contextmanager
def _relaxed() -> Iterator[None]:
    """Other threads may be capturing, and a stricter mode would let what happens inside break theirs."""
    mode = ctypes.c_int(_RELAXED)
    refused = _cuda().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        if not refused:
            _cuda().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _capture(enqueue: Callable[[int], bool]) -> ctypes.c_void_p:
    """An executable graph of what enqueue(stream) launches; it returns whether the driver took everything."""
    cuda, graph, made = _cuda(), ctypes.c_void_p(), ctypes.c_void_p()
    stream = _stream(torch.cuda.current_device())
    _check(cuda.cuStreamBeginCapture_v2(stream, _RELAXED))
    whole = False
    try:
        whole = enqueue(stream.value or 0)
    finally:
        error = cuda.cuStreamEndCapture(stream, ctypes.byref(graph))
    try:
        _check(error if whole else 1)
        _check(cuda.cuGraphInstantiateWithFlags(ctypes.byref(made), graph, ctypes.c_ulonglong(0)))
    finally:
        if graph:
            cuda.cuGraphDestroy(graph)
    return made


def watched() -> bool:
    """Whether launches have to come one by one: into a CUDA graph of the caller's, or before a profiler."""
    return torch._C._cuda_isCurrentStreamCapturing() or torch._C._autograd._profiler_enabled()


_lock = threading.RLock()  # also of a finalizer that comes while it is held
_existing = 0
_programs: weakref.WeakSet[Graphs] = weakref.WeakSet()
_clock = itertools.count(1)


def _destroy(made: dict[Any, Any], most: int = TOTAL) -> None:
    """The oldest of these. Graphs that still run are freed by the driver when they are through."""
    global _existing
    if not made:
        return
    with _lock, _relaxed():
        for addresses in [*made][:most]:
            _cuda().cuGraphExecDestroy(made.pop(addresses))
            _existing -= 1


class Graphs:
    """Of one program. lock: held by whoever calls."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock, self._refused, self._used = lock, 0, 0
        self._came: dict[tuple[int, ...], int] = {}  # addresses -> how often they did, the latest last
        self._made: dict[tuple[int, ...], Any] = {}  # addresses -> the graph, likewise
        weakref.finalize(self, _destroy, self._made).atexit = False
        with _lock:
            _programs.add(self)

    def run(self, addresses: tuple[int, ...], stream: int) -> bool:
        """Enqueue the graph of these addresses, if there is one; else count them."""
        if self._refused >= PATIENCE or watched():
            return False
        graph = self._made.pop(addresses, None)
        if graph is None:
            self._came[addresses] = self._came.pop(addresses, 0) + 1
            if len(self._came) > MOST:
                del self._came[next(iter(self._came))]
            return False
        self._made[addresses], self._used = graph, next(_clock)
        self._refused = self._refused + 1 if _cuda().cuGraphLaunch(graph, stream) else 0
        return self._refused == 0

    def keep(self, addresses: tuple[int, ...], enqueue: Callable[[int], bool]) -> None:
        """Make a graph of what enqueue(stream) launches, where these addresses came often enough."""
        global _existing
        if self._refused >= PATIENCE or self._came.get(addresses, 0) < AFTER or watched():
            return
        try:
            with _lock, _relaxed():
                self._make_room()
                self._made[addresses] = _capture(enqueue)
                del self._came[addresses]
                _existing += 1
        except _Refused:
            self._refused += 1

    def _make_room(self) -> None:
        """For one more: without the oldest of this program, or those of the program that has not run for the longest."""
        if len(self._made) >= MOST:
            _destroy(self._made, 1)
        if _existing < TOTAL:
            return
        idle = min((g for g in _programs if g._made and g is not self), key=lambda g: g._used, default=None)
        if idle is None or not idle._lock.acquire(False):
            _destroy(self._made, 1)
            return
        try:
            _destroy(idle._made)
        finally:
            idle._lock.release()

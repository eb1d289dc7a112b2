"""The one timing protocol: every time that fusedblock reports comes from here.

Device time: warm up; calls rotate over enough input sets that none is still in the L2 cache when its turn comes again; a
CUDA graph of several calls is replayed, so that gaps between launches are not counted (a call too long to be bound by
launches, or one that cannot be captured, is queued instead); all implementations take turns in shuffled rounds, so that
throttling and neighbours hit all alike; the median and the quartiles are kept.

Host time: how long a call keeps the CPU busy, without waiting for the device. Eager decode is bound by it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Protocol

import torch

Call = Callable[[], Any]
MOST_CALLS = 64  # of one implementation in one sample; as many again may lead in to it


@dataclass(frozen=True)
class Timing:
    """Of one call, in milliseconds: the median over the samples, the quartiles, how many samples, and how they were taken."""

    median_ms: float
    low_ms: float
    high_ms: float
    samples: int
    method: str  # "graph", "queue" or "host"

    @property
    def spread(self) -> float:
        """Distance of the quartiles relative to the median."""
        return (self.high_ms - self.low_ms) / self.median_ms if self.median_ms else 0.0


def summarize(samples: Sequence[float], method: str) -> Timing:
    if not samples:
        raise ValueError("summarize: no samples")
    low, _, high = quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else (samples[0],) * 3
    return Timing(median(samples), low, high, len(samples), method)


def input_sets(bytes_per_set: int, l2_bytes: int, most: int = 64) -> int:
    """How many input sets to rotate over so that together they exceed three times the L2 cache."""
    return max(1, min(most, -(-3 * l2_bytes // max(bytes_per_set, 1))))


class Prepared(Protocol):
    """Calls made ready to be sampled; `method` says how."""

    method: str

    def sample(self) -> float:
        """Milliseconds of one call, averaged over the calls of this sample."""
        ...


class Timer(Protocol):
    def prepare(self, calls: Sequence[Call], before: Call | None) -> Prepared: ...

    def clock(self) -> float:
        """Seconds, for the budget."""
        ...


def interleave(
    implementations: Mapping[str, Sequence[Call]],
    *,
    timer: Timer | None = None,
    before: Mapping[str, Call] | None = None,
    rounds: int = 20,
    budget_s: float = 10.0,
    seed: int = 0,
) -> dict[str, Timing]:
    """Time implementations against each other: name -> its calls, one for each input set, rotated over.

    before: name -> a call made before each sample of that implementation, outside the measured time (it resets a cache, say).
    Stops after `rounds` samples each, or, once each has three, when budget_s seconds are used. Raises ValueError on no calls.
    """
    for name, calls in implementations.items():
        if not calls:
            raise ValueError(f"interleave: {name!r} has no calls")
    timer = timer or default_timer()
    start = timer.clock()
    prepared = {name: timer.prepare(calls, (before or {}).get(name)) for name, calls in implementations.items()}
    samples: dict[str, list[float]] = {name: [] for name in prepared}
    order, shuffle = list(prepared), random.Random(seed)
    for done in range(rounds):
        if done >= 3 and timer.clock() - start > budget_s:
            break
        shuffle.shuffle(order)
        for name in order:
            samples[name].append(prepared[name].sample())
    return {name: summarize(samples[name], prepared[name].method) for name in implementations}


def host_time(call: Call, *, before: Call | None = None, calls: int = 20, rounds: int = 7, sync: Call | None = None) -> Timing:
    """Wall time that one call keeps the host for; the device runs behind and is waited for outside the measured time.

    calls: how many between two waits, few enough that the launch queue (about a thousand) never fills.
    """
    if sync is None:
        sync = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    samples = []
    for i in range(rounds + 1):
        if before is not None:
            before()
        sync()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        elapsed = time.perf_counter() - start
        sync()
        if i:  # the first is the warm-up
            samples.append(elapsed * 1e3 / calls)
    return summarize(samples, "host")


def default_timer() -> Timer:
    return CudaTimer() if torch.cuda.is_available() else CpuTimer()


class CpuTimer:
    """Plain wall time. For tests and dry runs: a CPU runs the reference, whose speed says nothing about the kernels."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock

    def prepare(self, calls: Sequence[Call], before: Call | None) -> Prepared:
        for call in calls:
            if before is not None:
                before()
            call()
        return _Wall(calls, before, self.clock)


class _Wall:
    method = "queue"

    def __init__(self, calls: Sequence[Call], before: Call | None, clock: Callable[[], float]) -> None:
        self.calls, self.before, self.clock = calls, before, clock

    def sample(self) -> float:
        if self.before is not None:
            self.before()
        start = self.clock()
        for call in self.calls:
            call()
        return (self.clock() - start) * 1e3 / len(self.calls)


class CudaTimer:
    """CUDA events around graph replays.

    sample_ms: a sample holds at least as many calls as fill this time. graph_below_ms: longer calls are queued, since their
    launch gaps hide behind the work and a captured copy of their memory would stay allocated.
    """

    clock = staticmethod(time.perf_counter)

    def __init__(
        self, sample_ms: float = 2.0, graph_below_ms: float = 30.0, most_calls: int = MOST_CALLS, warmup: int = 3
    ) -> None:
        self.sample_ms, self.graph_below_ms, self.most_calls, self.warmup = sample_ms, graph_below_ms, most_calls, warmup
        # One pool for all graphs: none of their results is ever read, so one may overwrite another's.
        self.pool = torch.cuda.graph_pool_handle()

    def prepare(self, calls: Sequence[Call], before: Call | None) -> Prepared:
        for _ in range(self.warmup):
            _run(before)
            _each(calls)()
        _run(before)
        once = _events(_each(calls)) / len(calls)
        repeats = max(1, round(self.sample_ms / max(once * len(calls), 1e-3)))
        repeats = max(1, min(repeats, self.most_calls // len(calls)))
        sequence = list(calls) * repeats
        if once < self.graph_below_ms:
            try:
                return _Events(self._capture(sequence, before), len(sequence), before, "graph", once < self.sample_ms)
            except Exception:  # what cannot be captured (a copy to the host, say) raises many kinds of error
                torch.cuda.synchronize()
                self.pool = torch.cuda.graph_pool_handle()
        return _Events(_each(sequence), len(sequence), before, "queue", once < self.sample_ms)

    def _capture(self, sequence: Sequence[Call], before: Call | None) -> Call:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # lazily made handles and workspaces of this stream must exist before the capture
            _run(before)
            sequence[0]()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=stream):
            _each(sequence)()
        _run(before)
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay


class _Events:
    def __init__(self, run: Call, calls: int, before: Call | None, method: str, lead_in: bool) -> None:
        self.run, self.calls, self.before, self.method, self.lead_in = run, calls, before, method, lead_in

    def sample(self) -> float:
        _run(self.before)
        # While the lead-in runs, the host queues what is measured: short work is not charged for the way to an idle GPU.
        return _events(self.run, self.run if self.lead_in else None) / self.calls


def _each(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()  # its result is dropped at once, so that the next call can have its memory

    return run


def _run(call: Call | None) -> None:
    if call is not None:
        call()


def _events(run: Call, lead_in: Call | None = None) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    _run(lead_in)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)

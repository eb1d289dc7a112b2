"""Check, then time: how every benchmark treats the implementations of one case."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusedblock.metering import timing

from .rows import Row, Stamp

# An implementation may be this much farther from the reference than the plain one in the same dtype.
TOLERANCE = 1.5


@dataclass
class Candidate:
    """One implementation, ready to run. calls: one for each input set; each returns a tensor or several, which are checked.

    before: called ahead of every sample, outside the time (it rewinds a cache). check_before: the same ahead of the check.
    checked: False for one that computes only a part, timed for comparison.
    """

    calls: list[Callable[[], Any]]
    before: Callable[[], Any] | None = None
    check_before: Callable[[], Any] | None = None
    checked: bool = True


@dataclass
class Case:
    """implementations: name -> builder, the yardstick first: the others' errors are held to its. reference: results in higher
    precision, in the order in which the calls return them; built when first needed. yardstick: results that errors are held to
    instead of the first implementation's. host: how many calls in a row to time the host with, 0 not to; host_only: not the
    device.
    """

    bench: str
    name: str
    implementations: Mapping[str, Callable[[], Candidate]]
    reference: Callable[[], list[Tensor]]
    flops: int
    bytes: Callable[[], int]
    model: str = "llama"
    host: int = 0
    host_only: bool = False
    yardstick: Callable[[], list[Tensor]] | None = None


@dataclass
class Settings:
    stamp: Stamp
    device: torch.device
    seconds: float  # for the timing of one case
    rounds: int
    deadline: float  # by time.monotonic()
    timer: Callable[[], timing.Timer] = timing.default_timer
    log: Callable[[str], None] = print
    rows: list[Row] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def errors(results: list[Tensor], reference: list[Tensor]) -> list[float]:
    """norm(a - ref) / norm(ref) of each; NaN if a holds one. Raises ValueError if there are more or fewer, or of other shapes."""
    if [tuple(r.shape) for r in results] != [tuple(r.shape) for r in reference]:
        raise ValueError(f"shapes {[tuple(r.shape) for r in results]}, expected {[tuple(r.shape) for r in reference]}")
    found = []
    for a, b in zip(results, reference):
        a, b = a.detach().to(b.dtype), b.detach()
        found.append(float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b)))
    return found


def verdict(found: list[float], allowed: list[float] | None) -> str:
    """ "ok", or what is wrong. allowed: errors of the yardstick; None for the yardstick itself, which must be finite."""
    for i, error in enumerate(found):
        if not error < float("inf"):
            return f"wrong: result {i} has error {error}"
        if allowed is not None and error > TOLERANCE * allowed[i]:
            return f"wrong: result {i} has error {error:.2e}, the yardstick {allowed[i]:.2e}"
    return "ok"


def run(case: Case, settings: Settings) -> list[Row]:
    """Rows for every implementation; those that fail to build, or are wrong, get one that says so and are not timed."""
    started = time.monotonic()
    good: dict[str, Candidate] = {}
    facts: dict[str, dict[str, Any]] = {}
    reference: list[Tensor] | None = None
    allowed: list[float] | None = None
    for name, build in case.implementations.items():
        fact: dict[str, Any] = {"status": "ok"}
        facts[name] = fact
        if settings.left < 0:
            fact["status"] = "skipped: out of time"
            continue
        try:
            candidate = build()
            if reference is None:
                reference = case.reference()
                if case.yardstick is not None:
                    allowed = errors(case.yardstick(), reference)
            _call(candidate.check_before)
            results = tensors(candidate.calls[0]())
            if candidate.checked:
                found = errors(results, reference)
                fact["max_rel_error"] = max(found)
                fact["status"] = verdict(found, allowed)
                allowed = allowed or found
            del results
            if fact["status"] == "ok":
                fact["peak_mib"] = _peak_mib(candidate, settings)
                fact["launches"] = _launches(candidate, settings)
                good[name] = candidate
        except ModuleNotFoundError as error:
            fact["status"] = f"not installed: {error.name}"
        except Exception as error:  # of any library: one failing peer must not end the run
            fact["status"] = f"failed: {reason(error)}"
            if settings.on_gpu:
                torch.cuda.synchronize()
        where = ", ".join(filter(None, (case.model, case.bench, case.name, name)))
        settings.log(f"  {where}: {fact['status']} ({time.monotonic() - started:.0f} s)")
    del reference
    times = _times(case, good, facts, settings)
    if case.host:
        for name, candidate in good.items():
            t = times[name] if case.host_only else _host(case, candidate, settings)
            facts[name]["host_us"] = t and round(t.median_ms * 1e3, 2)
    rows = [_row(case, name, facts[name], t, settings) for name, t in times.items()]
    settings.rows += rows
    good.clear()
    _free(settings)
    return rows


def _free(settings: Settings) -> None:
    """What the last case or candidate left of the device's memory."""
    if settings.on_gpu:
        gc.collect()
        torch.cuda.empty_cache()


def _times(
    case: Case, good: dict[str, Candidate], facts: dict[str, dict[str, Any]], settings: Settings
) -> dict[str, timing.Timing | None]:
    found: dict[str, timing.Timing | None] = dict.fromkeys(case.implementations)
    if not good:
        return found
    _free(settings)
    while good:
        try:
            return {**found, **_interleave(case, good, settings)}
        except Exception as error:
            torch.cuda.empty_cache()
            broken = {name: why for name, c in good.items() if (why := _fails(case, name, c, settings))}
            for name, why in (broken or dict.fromkeys(good, reason(error))).items():
                facts[name]["status"] = f"failed while timed: {why}"
                del good[name]
    return found


def _interleave(case: Case, good: dict[str, Candidate], settings: Settings) -> dict[str, timing.Timing]:
    if case.host_only:
        return {name: _host(case, c, settings) for name, c in good.items()}
    return timing.interleave(
        {name: c.calls for name, c in good.items()},
        timer=settings.timer(),
        before={name: c.before for name, c in good.items() if c.before is not None},
        rounds=settings.rounds,
        budget_s=max(0.0, min(settings.seconds, settings.left)),
    )


def _host(case: Case, candidate: Candidate, settings: Settings) -> timing.Timing:
    return timing.host_time(candidate.calls[0], before=candidate.before, calls=case.host, rounds=settings.rounds)


def _fails(case: Case, name: str, candidate: Candidate, settings: Settings) -> str | None:
    try:
        _interleave(case, {name: candidate}, dataclasses.replace(settings, rounds=1))
    except Exception as error:
        return reason(error)
    return None


def reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def _row(case: Case, name: str, fact: dict[str, Any], t: timing.Timing | None, settings: Settings) -> Row:
    stamp = settings.stamp
    return Row(
        case.bench, case.name, name,
        ms=t and round(t.median_ms, 6),
        tflops=None if t is None or case.host_only else round(case.flops / t.median_ms / 1e9, 3),
        gbps=None if t is None or case.host_only else round(case.bytes() / t.median_ms / 1e6, 2),
        peak_mib=fact.get("peak_mib"),
        max_rel_error=_finite(fact.get("max_rel_error")),
        spread=t and round(t.spread, 4),
        launches=fact.get("launches"),
        method=t and t.method,
        status=fact["status"],
        device=stamp.device, versions=stamp.versions, commit=stamp.commit, date=stamp.date,
        model=case.model, host_us=fact.get("host_us"),
    )  # fmt: skip


def _finite(error: float | None) -> float | None:
    return error if error is not None and error < float("inf") else None


def _call(function: Callable[[], Any] | None) -> None:
    if function is not None:
        function()


def _peak_mib(candidate: Candidate, settings: Settings) -> float | None:
    if not settings.on_gpu:
        return None
    _call(candidate.check_before)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    candidate.calls[0]()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def _launches(candidate: Candidate, settings: Settings) -> int | None:
    """What the GPU runs for one call: the kernels, copies and fills in its CUDA graph. None if it cannot be captured.

    Not by the profiler, which slows down every launch after it.
    """
    if not settings.on_gpu:
        return None
    _call(candidate.check_before)
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            candidate.calls[0]()
        return _work_nodes(graph.raw_cuda_graph())
    except Exception:
        torch.cuda.synchronize()
        return None


def _work_nodes(graph: int) -> int:
    driver, handle, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph), ctypes.c_size_t()
    if driver.cuGraphGetNodes(handle, None, ctypes.byref(count)):
        raise RuntimeError("cuGraphGetNodes failed")
    nodes = (ctypes.c_void_p * count.value)()
    if driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)):
        raise RuntimeError("cuGraphGetNodes failed")
    kind, found = ctypes.c_int(), 0
    for node in nodes:
        if driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)):
            raise RuntimeError("cuGraphNodeGetType failed")
        found += kind.value in (0, 1, 2)  # CU_GRAPH_NODE_TYPE_KERNEL, MEMCPY, MEMSET
    return found

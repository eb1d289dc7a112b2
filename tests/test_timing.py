"""The timing protocol, with a clock that the test winds, so that every number is known."""

from __future__ import annotations

import pytest
import torch

from fusedblock.metering.device import Ceilings, describe, measure_ceilings, versions
from fusedblock.metering.timing import CpuTimer, host_time, input_sets, interleave, summarize


class Clock:
    """Seconds that pass only when a call says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def work(clock: Clock, seconds: float, log: list[str] | None = None, name: str = ""):
    def call() -> None:
        clock.now += seconds
        if log is not None:
            log.append(name)

    return call


def test_summary_is_median_and_quartiles() -> None:
    t = summarize([4.0, 1.0, 2.0, 3.0, 100.0], "graph")
    assert (t.median_ms, t.low_ms, t.high_ms, t.samples, t.method) == (3.0, 2.0, 4.0, 5, "graph")
    assert t.spread == pytest.approx(2 / 3)
    one = summarize([5.0], "queue")
    assert (one.median_ms, one.low_ms, one.high_ms, one.spread) == (5.0, 5.0, 5.0, 0.0)
    with pytest.raises(ValueError, match="no samples"):
        summarize([], "queue")


@pytest.mark.parametrize(
    "size, l2, most, sets",
    [(10, 60, 64, 18), (180, 60, 64, 1), (181, 60, 64, 1), (179, 60, 64, 2), (1, 60, 64, 64), (0, 60, 8, 8)],
)
def test_input_sets_exceed_three_times_the_cache(size: int, l2: int, most: int, sets: int) -> None:
    assert input_sets(size, l2, most) == sets


def test_a_sample_is_the_mean_over_the_input_sets() -> None:
    clock = Clock()
    calls = [work(clock, 0.001), work(clock, 0.003)]
    t = interleave({"a": calls, "b": [work(clock, 0.010)]}, timer=CpuTimer(clock), rounds=5)
    assert t["a"].median_ms == pytest.approx(2.0) and t["b"].median_ms == pytest.approx(10.0)
    assert list(t) == ["a", "b"] and t["a"].samples == 5 and t["a"].spread == pytest.approx(0.0)


def test_rounds_are_interleaved_and_shuffled() -> None:
    clock, log = Clock(), []
    names = ["a", "b", "c", "d"]
    interleave({n: [work(clock, 0.001, log, n)] for n in names}, timer=CpuTimer(clock), rounds=10)
    rounds = [log[i : i + 4] for i in range(4, len(log), 4)]  # the first four are the warm-up
    assert len(rounds) == 10 and all(sorted(r) == names for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1


def test_throttling_hits_all_alike() -> None:
    """A machine that slows down threefold after six rounds must not change the ratio of two implementations."""
    clock, log = Clock(), []

    def call(seconds: float, name: str):
        def run() -> None:
            log.append(name)
            clock.now += seconds * (1 if len(log) <= 2 + 2 * 6 else 3)

        return run

    t = interleave({"a": [call(0.001, "a")], "b": [call(0.002, "b")]}, timer=CpuTimer(clock), rounds=21)
    assert t["b"].median_ms / t["a"].median_ms == pytest.approx(2.0)
    assert (t["a"].low_ms, t["a"].high_ms) == (pytest.approx(1.0), pytest.approx(3.0))


def test_before_runs_once_a_sample_and_is_not_measured() -> None:
    clock, log = Clock(), []
    reset = work(clock, 7.0, log, "reset")
    t = interleave({"a": [work(clock, 0.001, log, "call")]}, before={"a": reset}, timer=CpuTimer(clock), rounds=4, budget_s=1e9)
    assert t["a"].median_ms == pytest.approx(1.0)
    assert log == ["reset", "call"] * 5  # the warm-up and four samples


def test_budget_stops_after_three_rounds() -> None:
    clock = Clock()
    t = interleave({"a": [work(clock, 10.0)]}, timer=CpuTimer(clock), rounds=50, budget_s=5.0)
    assert t["a"].samples == 3


def test_no_calls_is_an_error() -> None:
    with pytest.raises(ValueError, match="'a' has no calls"):
        interleave({"a": []}, timer=CpuTimer())


def test_host_time_leaves_the_wait_out() -> None:
    waited = []
    t = host_time(lambda: None, calls=3, rounds=4, sync=lambda: waited.append(1))
    assert t.method == "host" and t.samples == 4 and t.median_ms < 1.0
    assert len(waited) == 2 * 5


def test_floor_is_the_longer_of_bytes_and_flops() -> None:
    c = Ceilings(copy_gbps=1000.0, read_gbps=2000.0, gemm_tflops=100.0, source="test")
    assert c.floor_ms(5 * 10**8, 5 * 10**8, 0) == pytest.approx(1.0)  # 1 GB at the copy rate
    assert c.floor_ms(2 * 10**9, 0, 0) == pytest.approx(1.0)  # 2 GB at the read rate
    assert c.floor_ms(10, 10, 10**12) == pytest.approx(10.0)


def test_describe_and_versions() -> None:
    assert describe("cpu")["type"] == "cpu" and describe("cpu")["name"]
    found = versions()
    assert found["torch"] == torch.__version__ and found["python"] and {"triton", "transformers", "fusedblock"} <= set(found)


def test_ceilings_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="CUDA"):
        measure_ceilings()


@pytest.mark.gpu
@pytest.mark.alone
def test_ceilings_on_this_gpu() -> None:
    c = measure_ceilings()
    assert 100 < c.copy_gbps <= c.read_gbps < 20000 and 10 < c.gemm_tflops < 5000


@pytest.mark.gpu
@pytest.mark.alone
def test_graphs_and_queue_agree_on_a_long_kernel() -> None:
    from fusedblock.metering.timing import CudaTimer

    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    graph = interleave({"a": [lambda: a @ a]}, timer=CudaTimer())["a"]
    queue = interleave({"a": [lambda: a @ a]}, timer=CudaTimer(graph_below_ms=0.0))["a"]
    assert (graph.method, queue.method) == ("graph", "queue")
    assert graph.median_ms == pytest.approx(queue.median_ms, rel=0.3)

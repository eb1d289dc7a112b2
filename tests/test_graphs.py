"""Recorded launches at the same addresses again and again become one CUDA graph: what the driver is asked, without a GPU."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import pytest
import torch
from test_driver import ARGS, SIGNATURE, W, X, _made, _step

from fusedblock.kernels import _driver, _graphs

PRIVATE = 0x77  # the stream of the captures
HERE, THERE = [0x10000, 0x20000], [0x10000, 0x30000]


class Driver:
    """Stands for libcuda: notes launches, (stream, addresses of the kernel), and keeps what was captured under a handle."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, int]] = []
        self.graphs: dict[int, list[int]] = {}
        self.destroyed: list[int] = []
        self.captured: list[int] | None = None
        self.mode = 0
        self.refuse = ""

    def enqueue(self, config: int, function: int, params: int, extra: Any) -> int:
        stream = _driver._Config.from_address(config).stream
        x = ctypes.c_uint64.from_address(ctypes.c_uint64.from_address(params + 8).value).value  # the second parameter
        if stream == PRIVATE:
            assert self.captured is not None and self.mode == 2
            self.captured.append(x)
        else:
            self.launched.append((stream, x))
        return 0

    def cuStreamCreate(self, stream: Any, flags: int) -> int:
        stream._obj.value = PRIVATE
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def cuStreamBeginCapture_v2(self, stream: Any, mode: int) -> int:
        assert stream.value == PRIVATE and mode == 2
        self.captured = []
        return self.refuse == "begin"

    def cuStreamEndCapture(self, stream: Any, graph: Any) -> int:
        graph._obj.value = 0x100
        return self.refuse == "end"

    def cuGraphInstantiateWithFlags(self, made: Any, graph: Any, flags: Any) -> int:
        made._obj.value = handle = 0x1000 + len(self.graphs)
        assert self.captured is not None
        self.graphs[handle], self.captured = self.captured, None
        return self.refuse == "instantiate"

    def cuGraphDestroy(self, graph: Any) -> int:
        return 0

    def cuGraphExecDestroy(self, made: Any) -> int:
        self.destroyed.append(made.value)
        return 0

    def cuGraphLaunch(self, made: Any, stream: int) -> int:
        if self.refuse == "launch":
            return 1
        self.launched += [(-stream, x) for x in self.graphs[made.value]]  # minus: by a graph
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(_graphs, "_cuda", lambda: made)
    monkeypatch.setattr(_driver, "_enqueue", lambda: made.enqueue)
    monkeypatch.setattr(_graphs, "watched", lambda: False)
    monkeypatch.setattr(_graphs, "_existing", 0)
    monkeypatch.setattr(_graphs, "_programs", weakref.WeakSet())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    _graphs._stream.cache_clear()
    yield made
    _graphs._stream.cache_clear()


def block() -> _driver.Block:
    return _made(_step(ARGS, SIGNATURE), _step((X, W, *ARGS[2:]), SIGNATURE, grid=(5,), function=0x6000))


def run(made: _driver.Block, driver: Driver, base: list[int], stream: int = 7) -> list[tuple[int, int]]:
    driver.launched.clear()
    assert made.run(base, stream) == 2
    return list(driver.launched)


def test_the_same_addresses_become_a_graph(driver: Driver) -> None:
    made = block()
    for _ in range(_graphs.AFTER):
        assert run(made, driver, HERE) == [(7, 0x20080), (7, 0x20080)]
    assert list(driver.graphs.values()) == [[0x20080, 0x20080]] and driver.mode == 0
    assert run(made, driver, HERE) == [(-7, 0x20080)] * 2
    assert run(made, driver, HERE, 9) == [(-9, 0x20080)] * 2  # on whatever stream
    assert run(made, driver, THERE) == [(7, 0x30080)] * 2  # other addresses, one by one, and on their own stream
    for _ in range(_graphs.AFTER):
        run(made, driver, THERE)
    assert run(made, driver, THERE) == [(-7, 0x30080)] * 2 and run(made, driver, HERE) == [(-7, 0x20080)] * 2


def test_addresses_that_change_make_none(driver: Driver) -> None:
    made = block()
    for n in range(3 * _graphs.AFTER):
        assert run(made, driver, [0x10000, 0x20000 + 256 * n]) == [(7, 0x20080 + 256 * n)] * 2
    assert not driver.graphs


def test_launches_come_one_by_one_where_someone_looks(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture of the caller's or a profiler, before a graph is made and after."""
    made = block()
    monkeypatch.setattr(_graphs, "watched", lambda: True)
    for _ in range(2 * _graphs.AFTER):
        assert run(made, driver, HERE) == [(7, 0x20080)] * 2
    assert not driver.graphs
    monkeypatch.setattr(_graphs, "watched", lambda: False)
    for _ in range(_graphs.AFTER):
        run(made, driver, HERE)
    assert run(made, driver, HERE) == [(-7, 0x20080)] * 2
    monkeypatch.setattr(_graphs, "watched", lambda: True)
    assert run(made, driver, HERE) == [(7, 0x20080)] * 2


@pytest.mark.parametrize("call", ["begin", "end", "instantiate", "launch"])
def test_what_the_driver_refuses_is_launched_one_by_one(call: str, driver: Driver) -> None:
    """Once is forgiven: a thread without a context, say. Again and again is not."""
    made = block()
    for _ in range(_graphs.AFTER - 1):
        run(made, driver, HERE)
    driver.refuse = "" if call == "launch" else call
    run(made, driver, HERE)
    driver.refuse = call
    assert run(made, driver, HERE) == [(7, 0x20080)] * 2
    driver.refuse = ""
    run(made, driver, HERE)
    assert run(made, driver, HERE) == [(-7, 0x20080)] * 2
    driver.refuse = call
    for _ in range(_graphs.AFTER + _graphs.PATIENCE):
        assert run(made, driver, HERE if call == "launch" else THERE) == [(7, 0x20080 if call == "launch" else 0x30080)] * 2
    driver.refuse = ""
    assert driver.mode == 0
    assert run(made, driver, HERE) == [(7, 0x20080)] * 2 and made._graphs._refused >= _graphs.PATIENCE


def test_a_launch_that_fails_in_the_capture_leaves_no_graph(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    made = block()
    taken = driver.enqueue

    def enqueue(config: int, *rest: Any) -> int:
        return taken(config, *rest) or _driver._Config.from_address(config).stream == PRIVATE

    monkeypatch.setattr(_driver, "_enqueue", lambda: enqueue)
    for _ in range(2 * _graphs.AFTER):
        assert run(made, driver, HERE) == [(7, 0x20080)] * 2
    assert not driver.graphs and driver.mode == 0


def reach(made: _driver.Block, driver: Driver, n: int) -> bool:
    """Runs at the n-th addresses until they would have a graph; whether they have."""
    base = [0x10000, 0x20000 + 256 * n]
    for _ in range(_graphs.AFTER):
        run(made, driver, base)
    return run(made, driver, base)[0][0] < 0


def test_the_latest_graphs_stay_and_all_are_freed(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_graphs, "MOST", 3)
    made = block()
    for n in range(3):
        assert reach(made, driver, n)
    assert run(made, driver, [0x10000, 0x20000])[0][0] == -7  # the first again
    for n in range(3, 5):
        assert reach(made, driver, n)
    assert driver.destroyed == [0x1001, 0x1002] and _graphs._existing == 3
    assert run(made, driver, [0x10000, 0x20000])[0][0] == -7
    for n in range(100, 200):  # seen once each
        run(made, driver, [0x10000, 0x20000 + 256 * n])
    assert len(made._graphs._came) <= 3 and run(made, driver, [0x10000, 0x20000])[0][0] == -7
    del made
    gc.collect()
    assert sorted(driver.destroyed) == sorted(driver.graphs) and _graphs._existing == 0


def test_a_program_that_runs_takes_the_place_of_one_that_does_not(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_graphs, "TOTAL", 4)
    old, older = block(), block()
    assert reach(older, driver, 0) and reach(older, driver, 1) and reach(old, driver, 0) and reach(old, driver, 1)
    young = block()
    assert reach(young, driver, 0) and driver.destroyed == [0x1000, 0x1001]
    assert run(old, driver, [0x10000, 0x20000])[0][0] == -7 and run(older, driver, [0x10000, 0x20000])[0][0] == 7
    assert reach(young, driver, 1) and _graphs._existing == 4
    with old._lock:  # it runs just now
        assert reach(young, driver, 2) and driver.destroyed == [0x1000, 0x1001, 0x1004]
    assert run(old, driver, [0x10000, 0x20000])[0][0] == -7


def test_nothing_is_counted_or_freed_while_someone_looks(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    made = block()
    monkeypatch.setattr(_graphs, "watched", lambda: True)
    for n in range(9):
        run(made, driver, [0x10000, 0x20000 + 256 * n])
    assert not made._graphs._came

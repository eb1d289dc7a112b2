"""The asynchronous part of a Hopper SM, as one program sees it: partitions, shared memory, barriers, and what is in flight.

Partitions and operations in flight (copies, wgmmas) take turns. Whose turn it is changes at every operation that
synchronises or touches shared memory, and is drawn from a seed: everyone has a priority, the highest that can go on does,
and priorities are drawn again now and then. So one partition may run far ahead, and a copy may land at once or at the last
moment that anything waits for it. The same seed gives the same run.

Whether two accesses to shared memory are ordered does not depend on luck: every partition carries a vector clock that
barriers and waits pass on, and an access that no barrier orders after an earlier one it conflicts with is a Race, however
the turns fell.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .shared import Access, Allocation, BarrierMisuse, Clock, Deadlock, MBarrier, NamedBarrier, ProtocolError, View, join

SWITCH = 0.15  # chance that one who just had a turn gets a new priority


class _Stopped(BaseException):
    """Ends the thread of a partition after another one has failed."""


def _always() -> bool:
    return True


# ---- who takes turns ---------------------------------------------------------------------------------------------------


class Partition:
    """Some warps that run one function."""

    def __init__(self, name: str, warps: int, clock: Clock, priority: float) -> None:
        self.name, self.warps, self.priority = name, warps, priority
        self.clock: Clock = {**clock, self: 1}
        self.ready: Callable[[], bool] = _always
        self.waits: Callable[[], str] = str
        self.gate = threading.Semaphore(0)
        self.done = False
        self.mmas: list[Operation] = []  # issued and not waited for, oldest first
        self.stores: list[Operation] = []
        self.copies: list[tuple[View, Access, np.ndarray]] = []  # by cp.async, of which no barrier hears yet
        self.issued = {"wgmma": 0, "TMA store": 0}

    def __str__(self) -> str:
        return self.name


class Operation:
    """Something in flight: `run` does it, once, at some time after `after` was done."""

    def __init__(self, name: str, run: Callable[[], None], priority: float, after: Operation | None = None) -> None:
        self.name, self.run, self.priority, self.after = name, run, priority, after
        self.done = False

    def ready(self) -> bool:
        return self.after is None or self.after.done


class Machine:
    """One program's SM. `current` is the partition whose turn it is."""

    def __init__(self, seed: str, name: str, warps: int) -> None:
        self.random = random.Random(seed)
        self.current = Partition(name, warps, {}, self.random.random())
        self.partitions = [self.current]
        self.operations: list[Operation] = []
        self.loads: list[Access] = []  # of TMA and cp.async
        self.allocations: list[Allocation] = []
        self.named: dict[int, NamedBarrier] = {}
        self.error: BaseException | None = None

    # -- turns

    def _next(self) -> Partition | Operation:
        able = [p for p in self.partitions if not p.done and p.ready()] + [o for o in self.operations if o.ready()]
        if not able:
            raise Deadlock("no partition can go on:\n" + "\n".join(f"  {self._state(p)}" for p in self.partitions))
        chosen = max(able, key=lambda one: one.priority)
        if self.random.random() < SWITCH:
            chosen.priority = self.random.random()
        return chosen

    @staticmethod
    def _state(p: Partition) -> str:
        return f"{p} has ended" if p.done else f"{p} waits for {p.waits()}"

    def _next_partition(self) -> Partition:
        """Let operations finish until a partition is next."""
        while isinstance(agent := self._next(), Operation):
            self.operations.remove(agent)
            agent.run()
            agent.done = True
        return agent

    def pause(self, ready: Callable[[], bool] = _always, waits: Callable[[], str] = str) -> None:
        """Let others go on, and the current partition only once ready() holds. waits() says what for."""
        me = self.current
        me.ready, me.waits = ready, waits
        agent = self._next_partition()
        if agent is not me:
            self.current = agent
            agent.gate.release()
            me.gate.acquire()
            if self.error is not None:
                raise _Stopped
        me.ready = _always

    def start(self, name: str, run: Callable[[], None], after: Operation | None = None) -> Operation:
        operation = Operation(name, run, self.random.random(), after)
        self.operations.append(operation)
        return operation

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            if hasattr(error, "add_note") and not isinstance(error, Deadlock):
                error.add_note(f"in {self.current}")
        for p in self.partitions:
            p.gate.release()

    def specialize(self, names: list[str], functions: Sequence[Callable[[], Any]], warps: list[int]) -> Any:
        """Run functions[0] in the current partition and the others in new ones of so many warps; the first one's result."""
        main = self.current
        if len(self.partitions) > 1:
            raise ProtocolError("warp_specialize inside a partition")
        own_name, main.name = main.name, names[0]
        workers = [Partition(name, n, main.clock, self.random.random()) for name, n in zip(names[1:], warps)]
        main.clock[main] += 1
        self.partitions += workers

        def body(worker: Partition, function: Callable[[], Any]) -> None:
            worker.gate.acquire()
            if self.error is not None:
                return
            try:
                with np.errstate(all="ignore"):
                    function()
                self._ends(worker)
                worker.done = True
                agent = self._next_partition()
            except _Stopped:
                return
            except BaseException as error:
                self._fail(error)
            else:
                self.current = agent
                agent.gate.release()

        threads = [threading.Thread(target=body, args=pair, daemon=True) for pair in zip(workers, functions[1:])]
        for thread in threads:
            thread.start()
        try:
            result = functions[0]()
            self._ends(main)
            self.pause(lambda: all(w.done for w in workers), lambda: "the worker partitions")
        except _Stopped:
            pass
        except BaseException as error:
            self._fail(error)
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        for worker in workers:
            join(main.clock, worker.clock)
        self.partitions, main.name = [main], own_name
        return result

    def _ends(self, p: Partition) -> None:
        for left in (*p.mmas, *p.stores):
            raise ProtocolError(f"{p} ends without waiting for {left.name}")
        for _, copy, _ in p.copies:
            raise ProtocolError(f"{p} ends, and no barrier hears of {copy.who}")

    def finish(self) -> None:
        """The program has ended: nothing may be left that still uses its shared memory."""
        main = self.current
        self._ends(main)
        for load in self.loads:
            if not load.before(main.clock):
                raise ProtocolError(f"the program ends, and nobody has waited for {load.who}")
        while self.operations:
            self._next_operation().run()

    def _next_operation(self) -> Operation:
        operation = max((o for o in self.operations if o.ready()), key=lambda o: o.priority)
        self.operations.remove(operation)
        operation.done = True
        return operation

    # -- shared memory

    def allocate(self, data: np.ndarray, dtype: Any) -> View:
        data.view(np.uint8)[...] = 0xFF  # NaN in every floating dtype
        allocation = Allocation(data)
        self.allocations.append(allocation)
        return View(allocation, data, allocation.written, tuple((0, n) for n in data.shape), tuple(range(data.ndim)), dtype)

    def read(self, view: View) -> np.ndarray:
        """What an ordinary load sees."""
        self.pause()
        me = self.current
        access = Access(False, f"a load of {me} from {view}", me, me.clock[me], view.box)
        view.access(me.clock, access)
        return view.content(access.who).copy()

    def write(self, view: View, data: np.ndarray) -> None:
        self.pause()
        me = self.current
        view.access(me.clock, Access(True, f"a store of {me} to {view}", me, me.clock[me], view.box, unfenced=True))
        view.data[...] = data
        view.written[...] = True

    def fence(self) -> None:
        """Hand what ordinary stores wrote, as far as this partition knows of it, to TMA and wgmma."""
        for allocation in self.allocations:
            for access in allocation.accesses:
                if access.unfenced and access.before(self.current.clock):
                    access.unfenced = False

    # -- cp.async

    def copy(self, view: View, data: np.ndarray) -> None:
        """Start a copy into view, as if by stores. The view is poison until it lands, whenever before the arrival after it."""
        self.pause()
        me = self.current
        access = Access(True, f"a copy of {me} into {view}", (me, "copy"), float("inf"), view.box, unfenced=True)
        view.access(me.clock, access)
        view.poison()
        self.loads.append(access)
        me.copies.append((view, access, data))

    def copies_arrive(self, barrier: MBarrier) -> None:
        """Every thread arrives once, when the copies so far have landed."""
        self.pause()
        me = self.current
        name = f"copies of {me}"
        barrier.check_usable(f"an arrival of {name}")
        copies, me.copies = me.copies, []

        def land() -> None:
            for view, access, data in copies:
                view.data[...] = data
                view.written[...] = True
                access.component, access.epoch = barrier, barrier.phases + 1
            barrier.arrive(32 * me.warps, 0, {}, name)

        self.start(name, land)

    # -- TMA

    def tma_load(self, view: View, barrier: MBarrier, fetch: Callable[[], np.ndarray]) -> None:
        """Start a copy of what fetch() gives into view. The view is poison until then."""
        self.pause()
        me = self.current
        barrier.check_usable(f"a TMA load of {me}")
        access = Access(True, f"a TMA load of {me} into {view}", barrier, float("inf"), view.box)
        view.access(me.clock, access, asynchronous=True)
        view.poison()
        self.loads.append(access)

        def land() -> None:
            view.data[...] = fetch()
            view.written[...] = True
            access.epoch = barrier.phases + 1
            barrier.complete(view.data.nbytes, access.who)

        self.start(access.who, land)

    def tma_store(self, view: View, put: Callable[[np.ndarray], None]) -> None:
        """Start a copy of view to memory; put(data) ends it."""
        self.pause()
        me = self.current
        key = "TMA store"
        me.issued[key] += 1
        access = Access(False, f"TMA store {me.issued[key]} of {me} from {view}", (me, key), me.issued[key], view.box)
        view.access(me.clock, access, asynchronous=True)

        def leave() -> None:
            data = view.content(access.who).copy()
            self.start(access.who, lambda: put(data))

        me.stores.append(self.start(access.who, leave))

    def store_wait(self, pending: int) -> None:
        """Wait until all but the latest `pending` stores have read their shared memory."""
        self._wait_for(self.current.stores, "TMA store", pending)

    def _wait_for(self, issued: list[Operation], key: str, pending: int) -> None:
        me = self.current
        waited = issued[: max(0, len(issued) - pending)]
        self.pause(lambda: all(o.done for o in waited), lambda: f"{len(waited)} {key}s")
        del issued[: len(waited)]
        me.clock[me, key] = me.issued[key] - len(issued)

    # -- wgmma

    def mma(self, operands: list[View], compute: Callable[[], None]) -> Operation:
        """Start compute(), which reads the operands, after the wgmmas that this partition has started before."""
        self.pause()
        me = self.current
        if me.warps % 4:
            raise ProtocolError(f"a wgmma in {me}, which has {me.warps} warps and no warpgroup")
        key = "wgmma"
        me.issued[key] += 1
        name = f"wgmma {me.issued[key]} of {me}"
        reads = [(view, Access(False, f"{name} on {view}", (me, key), me.issued[key], view.box)) for view in operands]
        for view, access in reads:
            view.access(me.clock, access, asynchronous=True)

        def run() -> None:
            for view, access in reads:
                view.content(access.who)
            compute()

        operation = self.start(name, run, after=me.mmas[-1] if me.mmas else None)
        me.mmas.append(operation)
        return operation

    def mma_wait(self, pending: int) -> None:
        self._wait_for(self.current.mmas, "wgmma", pending)

    # -- barriers

    def wait(self, barrier: MBarrier, parity: int) -> None:
        me = self.current
        barrier.check_usable(f"a wait of {me}")
        self.pause(lambda: barrier.phases & 1 != parity & 1, lambda: f"{barrier.state()} (parity {parity & 1})")
        join(me.clock, barrier.clock)

    def arrive(self, barrier: MBarrier, count: int, nbytes: int = 0) -> None:
        self.pause()
        me = self.current
        barrier.arrive(count, nbytes, me.clock, str(me))
        me.clock[me] += 1

    def named_barrier(self, number: int, threads: int, block: bool) -> None:
        self.pause()
        me = self.current
        taken = len(self.partitions) + 1
        if not taken <= number < 16:
            raise BarrierMisuse(f"{me} uses named barrier {number}: the kernel's own are {taken} to 15, the others are triton's")
        barrier = self.named.setdefault(number, NamedBarrier(number))
        generation = len(barrier.opened)
        barrier.arrive(32 * me.warps, threads, me.clock, str(me))
        me.clock[me] += 1
        if block:
            self.pause(lambda: len(barrier.opened) > generation, barrier.state)
            join(me.clock, barrier.opened[generation])

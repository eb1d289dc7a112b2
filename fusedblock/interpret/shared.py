"""Shared memory of a Hopper SM and the barriers that order accesses to it.

Every partition carries a vector clock, which barriers pass on: what a partition's clock does not reach, it has not waited for.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

Clock = dict[Hashable, int]


class ProtocolError(RuntimeError):
    """A kernel breaks the rules of asynchronous execution: it would hang or give wrong results on some GPU, some time."""


class Race(ProtocolError):
    """Two accesses to the same shared memory, one of them a write, that no barrier or wait orders."""


class Deadlock(ProtocolError):
    """No partition can go on and nothing is in flight."""


class BarrierMisuse(ProtocolError):
    """More arrivals or bytes than a barrier was told to expect, or a barrier that is not initialised."""


class Unwritten(ProtocolError):
    """Shared memory is read that holds nothing."""


def join(into: Clock, other: Clock) -> None:
    for key, n in other.items():
        if n > into.get(key, 0):
            into[key] = n


# ---- shared memory -----------------------------------------------------------------------------------------------------

Box = tuple[tuple[int, int], ...]
NOWHERE = -1  # the axis of an allocation that an axis made by reshape stands for: added, of one element, or joined of several


@dataclass(eq=False)
class Access:
    """One access to part of an allocation. Who has reached `epoch` of `component` comes after it."""

    writes: bool
    who: str
    component: Hashable
    epoch: float  # infinite: in flight
    box: Box
    unfenced: bool = False  # an ordinary write that TMA and wgmma may not see yet

    def before(self, clock: Clock) -> bool:
        return clock.get(self.component, 0) >= self.epoch


class Allocation:
    def __init__(self, data: np.ndarray) -> None:
        self.name = "shared memory"
        self.written: np.ndarray = np.zeros(data.shape, bool)
        self.accesses: list[Access] = []


class View:
    """Part of an allocation: a box of it, its axes in any order."""

    def __init__(
        self, allocation: Allocation, data: np.ndarray, written: np.ndarray, box: Box, axes: tuple[int, ...], dtype: Any
    ) -> None:
        self.allocation, self.data, self.written, self.box, self.axes, self.dtype = allocation, data, written, box, axes, dtype

    def __str__(self) -> str:
        whole = self.allocation.written.shape
        parts = [f"{lo}" if hi - lo == 1 < n else ":" if hi - lo == n else f"{lo}:{hi}" for (lo, hi), n in zip(self.box, whole)]
        while parts and parts[-1] == ":":
            parts.pop()
        return self.allocation.name + (f"[{', '.join(parts)}]" if parts else "")

    def whole(self) -> bool:
        return self.data.size == self.allocation.written.size

    def part(self, axis: int, start: int, length: int, keep: bool = True) -> View:
        """Elements start to start + length of an axis, which goes where not kept."""
        n = self.data.shape[axis]
        if not 0 <= start <= start + length <= n:
            raise ProtocolError(f"{self} has {n} elements on axis {axis}, not {start}:{start + length}")
        at = (slice(None),) * axis + (slice(start, start + length) if keep else start,)
        box = list(self.box)
        if self.axes[axis] != NOWHERE:
            low = box[self.axes[axis]][0] + start
            box[self.axes[axis]] = low, low + length
        axes = self.axes if keep else self.axes[:axis] + self.axes[axis + 1 :]
        return View(self.allocation, self.data[at], self.written[at], tuple(box), axes, self.dtype)

    def reshape(self, shape: tuple[int, ...]) -> View:
        """Add or drop axes of one element, or join neighbours. Others keep their order."""
        mine = [(n, axis) for axis, n in zip(self.axes, self.data.shape) if n != 1]
        axes: list[int] = []
        for n in shape:
            joined: list[tuple[int, int]] = []
            while n != 1 and mine and math.prod(m for m, _ in joined) < n:
                joined.append(mine.pop(0))
            if math.prod(m for m, _ in joined) != n:
                raise NotImplementedError(f"{self} of shape {self.data.shape} reshaped to {shape}: axes are only joined")
            # A joined axis stands for none: its parts count as the whole.
            axes.append(joined[0][1] if len(joined) == 1 else NOWHERE)
        data, written = self.data.reshape(shape), self.written.reshape(shape)
        if mine or not np.shares_memory(data, self.data):
            raise NotImplementedError(f"{self} of shape {self.data.shape} reshaped to {shape}: not the same memory")
        return View(self.allocation, data, written, self.box, tuple(axes), self.dtype)

    def permute(self, order: tuple[int, ...]) -> View:
        axes = tuple(self.axes[i] for i in order)
        return View(self.allocation, self.data.transpose(order), self.written.transpose(order), self.box, axes, self.dtype)

    def access(self, clock: Clock, new: Access, asynchronous: bool = False) -> None:
        """Note an access made by who has this clock. Raises Race where an earlier one is neither before it nor harmless."""
        for old in self.allocation.accesses:
            if not (old.writes or new.writes) or not all(a < d and c < b for (a, b), (c, d) in zip(old.box, new.box)):
                continue
            if not old.before(clock):
                flight = ", which is in flight" if old.epoch == float("inf") else ""
                raise Race(f"nothing orders {new.who} after {old.who}{flight}")
            if asynchronous and old.unfenced:
                raise Race(f"no fence_async_shared between {old.who} and {new.who}")

        def replaced(old: Access) -> bool:
            inside = all(c <= a and b <= d for (a, b), (c, d) in zip(old.box, new.box))
            return inside and (new.writes or (not old.writes and old.component == new.component))

        self.allocation.accesses = [old for old in self.allocation.accesses if not replaced(old)] + [new]

    def content(self, who: str) -> np.ndarray:
        if not self.written.all():
            raise Unwritten(f"{who}: {int((~self.written).sum())} elements hold nothing")
        return self.data

    def poison(self) -> None:
        self.written[...] = False
        self.data[...] = np.frombuffer(b"\xff" * self.data.itemsize, self.data.dtype)[0]


# ---- barriers ----------------------------------------------------------------------------------------------------------


class MBarrier:
    """A barrier in shared memory: a phase ends after so many arrivals and once all expected bytes have come."""

    def __init__(self, array: Barriers, index: int) -> None:
        self.array, self.index = array, index
        self.count: int | None = None
        self.pending = self.bytes = self.phases = 0
        self.clock: Clock = {}
        self._arriving: Clock = {}
        self._arrived: list[str] = []

    def __str__(self) -> str:
        return f"{self.array.name}[{self.index}]"

    def check_usable(self, who: str) -> None:
        if self.count is None:
            raise BarrierMisuse(f"{who} uses {self}, which is not initialised")

    def init(self, count: int) -> None:
        if self.count is not None:
            raise BarrierMisuse(f"{self} is initialised twice")
        self.count = self.pending = count

    def invalidate(self) -> None:
        self.count = None

    def arrive(self, count: int, nbytes: int, clock: Clock, who: str) -> None:
        self.check_usable(f"an arrival of {who}")
        if count > self.pending:
            others = ", ".join(self._arrived) or "nobody"
            raise BarrierMisuse(
                f"{self} expects {self.count} arrivals in phase {self.phases} and gets more: {count} from {who} after {others}"
            )
        self.pending -= count
        self.bytes += nbytes
        self._arrived.append(who)
        join(self._arriving, clock)
        self._flip()

    def complete(self, nbytes: int, who: str) -> None:
        self.bytes -= nbytes
        if self.bytes < 0:
            raise BarrierMisuse(f"{self}: {who} brings {nbytes} bytes, {-self.bytes} more than expected")
        self._flip()

    def _flip(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            assert self.count is not None
            self.phases += 1
            self.pending = self.count
            join(self.clock, self._arriving)
            self.clock[self] = self.phases
            self._arriving, self._arrived = {}, []

    def state(self) -> str:
        came = f" (from {', '.join(self._arrived)})" if self._arrived else ""
        missing = f"{self.pending} of {self.count} arrivals missing{came}"
        return f"{self}, which is in phase {self.phases}: {missing}, {self.bytes} bytes still to come"


class Barriers:
    """An array of mbarriers."""

    def __init__(self, n: int) -> None:
        self.name = "mbarrier"
        self.members = [MBarrier(self, i) for i in range(n)]

    def index(self, index: Any) -> MBarrier:
        i = operator.index(index)
        if not 0 <= i < len(self.members):
            raise BarrierMisuse(f"{self.name} has {len(self.members)} barriers, and none at {i}")
        return self.members[i]


class NamedBarrier:
    """One of the 16 barriers of a block: opens when as many threads have arrived as every arrival names."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.arrived = self.threads = 0
        self.opened: list[Clock] = []  # what the arrivals before each opening knew
        self._arriving: Clock = {}
        self._who: list[str] = []

    def arrive(self, own: int, threads: int, clock: Clock, who: str) -> None:
        if self.arrived and threads != self.threads:
            raise BarrierMisuse(f"{who} expects {threads} threads at named barrier {self.number}, {self._who[-1]} {self.threads}")
        self.threads = threads
        self.arrived += own
        self._who.append(who)
        join(self._arriving, clock)
        if self.arrived > threads:
            raise BarrierMisuse(
                f"{self.arrived} threads arrive at named barrier {self.number} for {threads}: from {', '.join(self._who)}"
            )
        if self.arrived == threads:
            self.opened.append(self._arriving)
            self.arrived, self._arriving, self._who = 0, {}, []

    def state(self) -> str:
        return f"named barrier {self.number}: {self.arrived} of {self.threads} threads are there (from {', '.join(self._who)})"

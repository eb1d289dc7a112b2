"""Bytes that launches request and touch, per tensor argument, read off the interpreter. Masked-off lanes do not count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from ..kernels._target import Target
from .interpreter import interpret
from .memory import Access, Launch


@dataclass
class ArgumentTraffic:
    """What one launch does to one tensor argument (or to several that overlap, named "q|k|v"). An atomic reads and writes.

    read_bytes, written_bytes     distinct bytes: what HBM must move if each byte moves once
    issued_*_bytes                bytes as programs ask for them, repeats counted: what the caches see
    atomic_bytes                  the part of each issued count that atomics make
    write_races                   elements that a program stored to after another program had stored to them
    read_write_races              elements that a program loaded after another had stored to them, or the other way round.
                                  Stores are none for a program that came to an atomic after they were made and after their
                                  program had come to the same one: atomics order programs (acquire and release, whatever
                                  their `sem`; an atomic itself is no race).
    """

    name: str
    nbytes: int
    read_bytes: int = 0
    written_bytes: int = 0
    issued_read_bytes: int = 0
    issued_written_bytes: int = 0
    atomic_bytes: int = 0
    write_races: int = 0
    read_write_races: int = 0


@dataclass
class LaunchTraffic:
    """Traffic of one launch; `arguments` holds every tensor argument by name, touched or not."""

    kernel: str
    grid: tuple[int, int, int]
    arguments: dict[str, ArgumentTraffic]

    def argument(self, name: str) -> ArgumentTraffic:
        """The traffic of argument `name`, also where it overlaps others. Raises KeyError where no tensor has that name."""
        for joined, traffic in self.arguments.items():
            if name in joined.split("|"):
                return traffic
        raise KeyError(f"{self.kernel} has no tensor argument {name}, only {', '.join(self.arguments)}")

    def total(self, name: str) -> int:
        """Sum of one ArgumentTraffic field over the arguments."""
        return sum(getattr(argument, name) for argument in self.arguments.values())

    @property
    def read_bytes(self) -> int:
        return self.total("read_bytes")

    @property
    def written_bytes(self) -> int:
        return self.total("written_bytes")


@dataclass
class Traffic:
    """Traffic of every launch inside a count_traffic context, in order. Totals sum over launches: no cache between them."""

    launches: list[LaunchTraffic] = field(default_factory=list)

    def total(self, name: str) -> int:
        """Sum of one ArgumentTraffic field over launches and arguments."""
        return sum(launch.total(name) for launch in self.launches)

    @property
    def read_bytes(self) -> int:
        return self.total("read_bytes")

    @property
    def written_bytes(self) -> int:
        return self.total("written_bytes")

    def table(self) -> str:
        """One line per launch and argument."""
        head = f"{'kernel':24}{'argument':16}{'bytes':>12}{'read':>12}{'issued':>12}{'written':>12}{'issued':>12}"
        head += f"{'atomic':>10}{'races':>7}"
        rows = [
            f"{launch.kernel:24}{a.name:16}{a.nbytes:12}{a.read_bytes:12}{a.issued_read_bytes:12}{a.written_bytes:12}"
            f"{a.issued_written_bytes:12}{a.atomic_bytes:10}{a.write_races + a.read_write_races:7}"
            for launch in self.launches
            for a in launch.arguments.values()
        ]
        return "\n".join([head, *rows])


_NOBODY, _SEVERAL = -1, -2


class _Order:
    """What each program of a launch knows of the others: of each, how many of its atomics came before."""

    def __init__(self) -> None:
        self.known: dict[int, dict[int, int]] = {}  # by program; of itself, how many it has made
        self.left: dict[tuple[int, int], dict[int, int]] = {}  # by address: what those who came there knew

    def at_atomic(self, access: Access) -> None:
        mine = self.known.setdefault(access.program, {access.program: 0})
        places = [(id(access.region), int(offset)) for offset in np.unique(access.offsets)]
        for place in places:
            for program, count in self.left.get(place, {}).items():
                mine[program] = max(mine.get(program, 0), count)
        mine[access.program] += 1
        for place in places:
            self.left.setdefault(place, {}).update(mine)

    def now(self, program: int) -> int:
        return self.known.get(program, {}).get(program, 0)

    def unknown(self, program: int, writer: np.ndarray, when: np.ndarray) -> np.ndarray:
        """Which stores, by these programs after so many atomics of theirs, this one has not been told of."""
        known = self.known.get(program, {})
        writers, which = np.unique(writer, return_inverse=True)
        return np.array([known.get(int(w), 0) for w in writers], dtype=np.int64)[which] <= when


class _Bytes:
    """Who read and wrote each byte of one region. Programs are noted at the first byte of an element."""

    def __init__(self, nbytes: int, traffic: ArgumentTraffic, order: _Order) -> None:
        self.traffic, self.order = traffic, order
        self.read: np.ndarray = np.zeros(nbytes, bool)
        self.written: np.ndarray = np.zeros(nbytes, bool)
        self.reader: np.ndarray = np.full(nbytes, _NOBODY, np.int64)  # the one program that loaded it, or _SEVERAL
        self.writer: np.ndarray = np.full(nbytes, _NOBODY, np.int64)  # the last program that stored it
        self.when: np.ndarray = np.zeros(nbytes, np.int64)  # after how many of its atomics

    def add(self, access: Access) -> None:
        t, at, me = self.traffic, access.offsets, access.program
        issued = at.size * access.itemsize
        if access.kind != "store":
            t.issued_read_bytes += issued
            t.read_bytes += self._mark(self.read, access)
        if access.kind != "load":
            t.issued_written_bytes += issued
            t.written_bytes += self._mark(self.written, access)
        if access.kind == "atomic":
            t.atomic_bytes += issued
            self.order.at_atomic(access)
            return
        writer, reader = self.writer[at], self.reader[at]
        foreign = (writer != _NOBODY) & (writer != me)
        if foreign.any():
            foreign[foreign] = self.order.unknown(me, writer[foreign], self.when[at][foreign])
        if access.kind == "load":
            t.read_write_races += int(foreign.sum())
            self.reader[at] = np.where((reader == _NOBODY) | (reader == me), me, _SEVERAL)
        else:
            t.write_races += int(foreign.sum())
            t.read_write_races += int(((reader != _NOBODY) & (reader != me)).sum())
            self.writer[at], self.when[at] = me, self.order.now(me)

    @staticmethod
    def _mark(seen: np.ndarray, access: Access) -> int:
        """Mark the access's bytes in `seen`; how many were new."""
        new = 0
        for byte in range(access.itemsize):
            at: np.ndarray = access.offsets + byte
            fresh = at[~seen[at]]
            seen[fresh] = True
            # Lanes may repeat an address: count it once.
            new += fresh.size if fresh.size < 2 or np.all(fresh[1:] > fresh[:-1]) else np.unique(fresh).size
        return new


class _Counter:
    def __init__(self) -> None:
        self.traffic = Traffic()
        self.bytes: dict[int, _Bytes] = {}

    def on_launch(self, launch: Launch) -> None:
        arguments = [ArgumentTraffic(region.name, region.nbytes) for region in launch.regions]
        order = _Order()
        self.bytes = {id(region): _Bytes(region.nbytes, a, order) for region, a in zip(launch.regions, arguments)}
        self.traffic.launches.append(LaunchTraffic(launch.kernel, launch.grid, {a.name: a for a in arguments}))

    def on_access(self, access: Access) -> None:
        self.bytes[id(access.region)].add(access)


@contextmanager
def count_traffic(target: Target | None = None, *, poison: bool = True) -> Iterator[Traffic]:
    """interpret(), and a Traffic that fills as kernels are launched. Arguments and errors are interpret's."""
    counter = _Counter()
    with interpret(target, poison=poison, on_launch=[counter.on_launch], on_access=[counter.on_access]):
        yield counter.traffic

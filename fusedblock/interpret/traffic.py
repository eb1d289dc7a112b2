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
                                  Both kinds are races only if the kernel does not order the programs by atomics.
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


class _Bytes:
    """Who read and wrote each byte of one region. Programs are noted at the first byte of an element."""

    def __init__(self, nbytes: int, traffic: ArgumentTraffic) -> None:
        self.traffic = traffic
        self.read: np.ndarray = np.zeros(nbytes, bool)
        self.written: np.ndarray = np.zeros(nbytes, bool)
        self.reader: np.ndarray = np.full(nbytes, _NOBODY, np.int64)  # the one program that loaded it, or _SEVERAL
        self.writer: np.ndarray = np.full(nbytes, _NOBODY, np.int64)  # the last program that stored it

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
            return
        writer, reader = self.writer[at], self.reader[at]
        foreign = (writer != _NOBODY) & (writer != me)
        if access.kind == "load":
            t.read_write_races += int(foreign.sum())
            self.reader[at] = np.where((reader == _NOBODY) | (reader == me), me, _SEVERAL)
        else:
            t.write_races += int(foreign.sum())
            t.read_write_races += int(((reader != _NOBODY) & (reader != me)).sum())
            self.writer[at] = me

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
        self.bytes = {id(region): _Bytes(region.nbytes, a) for region, a in zip(launch.regions, arguments)}
        self.traffic.launches.append(LaunchTraffic(launch.kernel, launch.grid, {a.name: a for a in arguments}))

    def on_access(self, access: Access) -> None:
        self.bytes[id(access.region)].add(access)


@contextmanager
def count_traffic(target: Target | None = None, *, poison: bool = True) -> Iterator[Traffic]:
    """interpret(), and a Traffic that fills as kernels are launched. Arguments and errors are interpret's."""
    counter = _Counter()
    with interpret(target, poison=poison, on_launch=[counter.on_launch], on_access=[counter.on_access]):
        yield counter.traffic

"""Triton kernels on the CPU: `with interpret(): op(cpu_tensors)`, and the bytes they move: `with count_traffic() as traffic`.
Gluon kernels too, on a model of a Hopper SM that finds races and deadlocks: `with interpret(seed=3): op(cpu_tensors)`.
Or compiled for a GPU that is not here: `with compile_only(target) as kernels`.

Needs triton, which exists for Linux only: import this room where it is used, not where fusedblock is imported.
"""

from __future__ import annotations

from ..kernels import _lang

if not _lang.AVAILABLE:
    raise ImportError("fusedblock.interpret needs triton, which is not installed here")

from .ahead import compile_only
from .interpreter import interpret
from .memory import Access, Launch, OutOfBounds, Region
from .shared import BarrierMisuse, Deadlock, ProtocolError, Race, Unwritten
from .traffic import ArgumentTraffic, LaunchTraffic, Traffic, count_traffic

__all__ = [
    "Access",
    "ArgumentTraffic",
    "BarrierMisuse",
    "Deadlock",
    "Launch",
    "LaunchTraffic",
    "OutOfBounds",
    "ProtocolError",
    "Race",
    "Region",
    "Traffic",
    "Unwritten",
    "compile_only",
    "count_traffic",
    "interpret",
]

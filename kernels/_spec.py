"""What an op reads and writes, said once.

A Spec is data. From it come the shape check, the output buffers, the fake kernel for torch.compile, and the bytes and
FLOPs of the report. An op of several launches names them as stages; each stage's compulsory traffic is every distinct
tensor it reads once and every tensor it writes once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

Args = Mapping[str, Any]
Sizes = dict[str, int]


class ShapeError(ValueError):
    """An argument's shape contradicts the op's spec."""


@dataclass(frozen=True)
class DType:
    """One row per dtype the kernels take. `accumulate` is the dtype of sums and statistics."""

    dtype: torch.dtype
    accumulate: torch.dtype


DTYPES = {
    d.dtype: d
    for d in (
        DType(torch.float32, torch.float32),
        DType(torch.float16, torch.float32),
        DType(torch.bfloat16, torch.float32),
        DType(torch.float64, torch.float64),  # gradcheck; on a GPU the reference path
    )
}


FP8 = torch.float8_e4m3fn  # of the ops that name it in their spec's `dtypes`: inputs only, results are bf16


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype is FP8 else DTYPES[dtype].accumulate


def nbytes(t: Tensor) -> int:
    """Bytes of memory behind t: broadcast (stride 0) axes are stored once."""
    return t.element_size() * prod(n if s != 0 or n == 0 else 1 for n, s in zip(t.shape, t.stride()))


@dataclass(frozen=True)
class Cost:
    """Of one launch: compulsory HBM bytes, FLOPs of the maths (model) and FLOPs the kernel executes (recomputation counted)."""

    name: str
    read_bytes: int
    written_bytes: int
    flops: int
    executed_flops: int


@dataclass(frozen=True)
class Write:
    """A result or scratch buffer: axes, dtype (an argument's name, "accumulate:ARG" or a torch dtype's name), when it exists.
    "result:ARG" is the argument's dtype, or bf16 for fp8. "ARG|OTHER": the first of them that is given. The argument may be a
    torch.dtype itself. inside: results, "A|B", in whose memory scratch lies, in the first that exists and is large enough: it is
    last read before they are first written. Its bytes are moved, and counted, all the same."""

    axes: str
    dtype: str
    when: Callable[[Args], bool] = lambda args: True
    inside: str = ""


def flag(*names: str) -> Callable[[Args], bool]:
    """Exists if any of these arguments is true or given."""
    return lambda args: any(args[n] is not None and args[n] is not False for n in names)


@dataclass(frozen=True)
class Stage:
    """One launch of an op, made where something that it reads and something that it writes exist, and the scratch `beside`, and
    where `when` says so of the axes. Names are arguments, results or scratch ("A|B": the first of them that exists);
    flops(sizes, args) -> model FLOPs or (model, executed)."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    flops: Callable[[Sizes, Args], int | tuple[int, int]]
    beside: str = ""
    when: Callable[[Sizes], bool] = lambda sizes: True


_ABSENT = torch.empty(0, device="cpu")


def _bound(write: Write, sizes: Sizes) -> bool:
    return all(axis in sizes for axis in write.axes.split())


@dataclass(frozen=True)
class Spec:
    name: str
    reads: Mapping[str, str]  # tensor argument -> axes, e.g. "batch seq hidden"; "1|batch" may be 1 or batch
    writes: Mapping[str, Write]
    flops: Callable[[Sizes, Args], int | tuple[int, int]] = lambda sizes, args: 0
    optional: frozenset[str] = frozenset()  # reads that may be None
    any_dtype: frozenset[str] = frozenset()  # reads whose dtype is their own (masks, fp32 statistics); the rest agree
    dtypes: tuple[torch.dtype, ...] = tuple(DTYPES)  # that the first read may have
    # Reads of which the op touches what their values or lengths say: bytes, or None for the whole tensor.
    read_bytes: Mapping[str, Callable[[Sizes, Args], int | None]] = field(default_factory=dict)
    derive: Callable[[Sizes, Args], Mapping[str, int]] = lambda sizes, args: {}  # further axes, and checks of values
    scratch: Mapping[str, Write] = field(default_factory=dict)  # absent too where derive names not all of its axes
    stages: tuple[Stage, ...] = ()  # empty: one launch that reads and writes everything

    def axes(self, args: Args) -> Sizes:
        """Bind the axes, checking shape, dtype and device of every tensor before anything runs."""
        sizes: Sizes = {}
        first: tuple[str, Tensor] | None = None
        for arg, names in self.reads.items():
            t = args[arg]
            if t is None:
                if arg in self.optional:
                    continue
                raise ValueError(f"{self.name}: {arg} is None, expected a tensor ({names})")
            shape, axes = tuple(t.shape), names.split()
            if len(shape) != len(axes):
                raise ShapeError(f"{self.name}: {arg} has shape {shape}, expected ({names})")
            for axis, size in zip(axes, shape):
                if axis.startswith("1|"):
                    if size == 1:
                        continue
                    axis = axis[2:]
                if sizes.setdefault(axis, size) != size:
                    raise ShapeError(f"{self.name}: {arg} ({names}) has {axis}={size}, but {axis}={sizes[axis]} so far")
            if first is None:
                first = arg, t
                if t.dtype not in self.dtypes:
                    known = ", ".join(map(str, self.dtypes))
                    raise ValueError(f"{self.name}: {arg} has dtype {t.dtype}, expected one of {known}")
            if t.device != first[1].device:
                raise ValueError(f"{self.name}: {arg} is on {t.device}, but {first[0]} is on {first[1].device}")
            if arg not in self.any_dtype and t.dtype != first[1].dtype:
                raise ValueError(f"{self.name}: {arg} has dtype {t.dtype}, but {first[0]} has {first[1].dtype}")
        sizes.update(self.derive(sizes, args))
        return sizes

    def dtype(self, write: Write, args: Args) -> torch.dtype:
        kind, _, names = write.dtype.rpartition(":")
        arg = next((n for n in names.split("|") if args.get(n) is not None), names)
        if isinstance(args.get(arg), torch.dtype):
            return args[arg]
        if arg in self.reads:
            dtype = args[arg].dtype
            if kind == "accumulate":
                return accumulate_dtype(dtype)
            return torch.bfloat16 if kind == "result" and dtype is FP8 else dtype
        return getattr(torch, arg)

    def _buffer(self, write: Write, sizes: Sizes, args: Args) -> Tensor:
        like = next(args[a] for a in self.reads if args[a] is not None)
        # An absent result is an empty tensor: operator schemas have no optional results.
        shape = [sizes[a] for a in write.axes.split()] if write.when(args) else [0]
        return torch.empty(shape, dtype=self.dtype(write, args), device=like.device)

    def empty(self, args: Args, sizes: Sizes | None = None) -> tuple[Tensor, ...]:
        """Every result buffer, in order. Launchers get theirs here and nowhere else, so no write goes uncounted."""
        sizes = self.axes(args) if sizes is None else sizes
        return tuple(self._buffer(w, sizes, args) for w in self.writes.values())

    def empty_scratch(self, args: Args, sizes: Sizes, results: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """results: those of `empty`, for scratch that lies inside one of them."""
        made, buffers = dict(zip(self.writes, results)), []
        for w in self.scratch.values():
            if not _bound(w, sizes):
                buffers.append(_ABSENT)
                continue
            host = self._host(w, sizes, args, made) if w.inside and w.when(args) else None
            buffers.append(self._buffer(w, sizes, args) if host is None else host)
        return tuple(buffers)

    def _host(self, write: Write, sizes: Sizes, args: Args, made: Mapping[str, Tensor]) -> Tensor | None:
        """The scratch in the memory of a result, None where none takes it."""
        shape, dtype = [sizes[a] for a in write.axes.split()], self.dtype(write, args)
        fits = (t for t in map(made.get, write.inside.split("|")) if t is not None and t.numel() >= prod(shape))
        host = next((t for t in fits if t.dtype is dtype), None)
        return None if host is None else host.view(-1)[: prod(shape)].view(shape)

    def costs(self, args: Args) -> tuple[Cost, ...]:
        """One Cost per launch these arguments cause."""
        sizes = self.axes(args)
        made = {n: w for n, w in self.writes.items() if w.when(args)}
        made |= {n: w for n, w in self.scratch.items() if w.when(args) and _bound(w, sizes)}

        def found(names: tuple[str, ...]) -> list[str]:
            first = (next((n for n in name.split("|") if n in made or args.get(n) is not None), None) for name in names)
            return [name for name in first if name is not None]

        def size_of(name: str) -> int:
            if name in made:
                w = made[name]
                return prod(sizes[a] for a in w.axes.split()) * self.dtype(w, args).itemsize
            some = self.read_bytes[name](sizes, args) if name in self.read_bytes else None
            return some if some is not None else nbytes(args[name]) if isinstance(args[name], Tensor) else 0

        costs = []
        for stage in self.stages or (Stage(self.name, tuple(self.reads), tuple(self.writes), self.flops),):
            reads, writes = found(stage.reads), [n for n in found(stage.writes) if n in made]
            if not reads or not writes or not stage.when(sizes):
                continue
            if stage.beside and stage.beside not in made:
                continue
            flops = stage.flops(sizes, args)
            model, executed = flops if isinstance(flops, tuple) else (flops, flops)
            costs.append(Cost(stage.name, sum(map(size_of, reads)), sum(map(size_of, writes)), model, executed))
        return tuple(costs)


@dataclass(frozen=True)
class Op:
    """One fused op, whole: what it is, how it runs, what it must equal, and how it differentiates.

    launch and reference share one signature and return the spec's results in order. `backward` is an Op whose parameters
    are named after this op's inputs, results, "grad_<result>" and "need_<input>", and whose results are "grad_<input>":
    autograd is wired by these names. passthrough: inputs whose gradient is a result's gradient itself. no_grad: inputs
    for which there is no backward; giving one where gradients are wanted is an error.
    """

    spec: Spec
    launch: Callable[..., tuple[Tensor, ...]]
    reference: Callable[..., tuple[Tensor, ...]]
    backward: Op | None = None
    passthrough: Mapping[str, str] = field(default_factory=dict)
    no_grad: frozenset[str] = frozenset()

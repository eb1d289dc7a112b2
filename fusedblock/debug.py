"""The checks of `options(debug=True)`. Each of them waits for the device, so that none is made otherwise."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .kernels._spec import Spec
from .options import current

# -inf means something in these: a key that is hidden, a row that attends to nothing.
_MAY_BE_INFINITE = frozenset({"mask", "bias", "sinks", "lse"})
# Rows of slots without an expert are never written, nor read.
_MAY_BE_UNWRITTEN = frozenset({"gate_up"})
# Some rows of q, and of keys and values, may be read by nobody if any of these is given.
_HIDE = {"q": ("cu_seqlens_q",), **dict.fromkeys("kv", ("mask", "block_map", "cu_seqlens_k", "seqused_k", "block_table"))}
_reported: set[str] = set()


@torch.compiler.assume_constant_result  # torch.compile cannot trace it
def _on() -> bool:
    return current().debug


def watching(t: Tensor) -> bool:
    """Whether to check work on t: debug is on, and its values can be read now (no trace, no capture of a CUDA graph)."""
    if not _on() or torch.compiler.is_compiling() or t.is_meta:
        return False
    return not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def check_inputs(spec: Spec, args: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Raises FloatingPointError naming the operator and the argument. Keys and values that a mask may hide are not judged.

    Lengths of sequences that contradict the tensors raise ValueError, and so does an experts' index that points outside of them.
    """
    if "seqused_k" in spec.reads:
        from .kernels._attention_reference import check_lengths  # here, since most operators have none

        check_lengths(spec.name, dict(sizes), args)
    if "tiles" in spec.reads:
        from .kernels._moe_index import check_index

        check_index(spec.name, dict(sizes), args)
    for name in spec.reads:
        if name in _MAY_BE_UNWRITTEN:
            continue
        hidden = any(args.get(other) is not None for other in _HIDE.get(name, ()))
        if args[name] is not None and not hidden:
            _finite(f"{spec.name}: {name}", name, args[name], "")


def check_results(spec: Spec, results: tuple[Tensor, ...]) -> None:
    """Raises FloatingPointError naming the operator and the result; warns once of queries that may attend to nothing."""
    for name, result in zip(spec.writes, results):
        if name in _MAY_BE_UNWRITTEN:
            continue
        _finite(f"{spec.name}: the result {name}", name, result, ", though its inputs have none")
        if name == "lse":
            _attending(spec.name, result)


def _finite(what: str, name: str, t: Tensor, more: str) -> None:
    if not t.is_floating_point() or not t.numel():
        return
    t = t.float() if t.dtype.itemsize == 1 else t  # fp8 has few operators
    bad = t.isnan() if name in _MAY_BE_INFINITE else ~t.isfinite()
    if bad.any():
        count, at = int(bad.sum()), tuple(bad.nonzero()[0].tolist())
        kind = "NaN" if name in _MAY_BE_INFINITE else "not finite"
        found = f"{count} of {t.numel()} values that are {kind}{more}; the first, at {at}, is {float(t[at])}"
        raise FloatingPointError(f"{what} has {found}")


def _attending(op: str, lse: Tensor) -> None:
    nothing = lse == float("-inf")
    if "lse" not in _reported and nothing.any():
        _reported.add("lse")
        batch, head, row = nothing.nonzero()[0].tolist()
        warnings.warn(
            f"{op}: {int(nothing.sum())} of {lse.numel()} rows may attend to nothing and give 0, the first is query {row} of "
            f"head {head} of sequence {batch}. Padding does that; if there is none, look at the mask. This is said once.",
            stacklevel=2,
        )


def check_tables(cos: Tensor, sin: Tensor, tables: str) -> None:
    """Raises ValueError where rotary tables are not what the layer reads them as.

    cos and sin `batch|1 seq rotary`; tables: "halves" (the second half repeats the first), "repeat" (features 2i and 2i + 1
    are equal) or "short" (one value an angle; nothing to compare).
    """
    if tables == "short":
        return
    for name, t in (("cos", cos), ("sin", sin)):
        a, b = t.chunk(2, dim=-1) if tables == "halves" else (t[..., 0::2], t[..., 1::2])
        if not torch.equal(a, b):
            at = tuple((a != b).nonzero()[0].tolist())
            parts = "halves" if tables == "halves" else "neighbouring features"
            raise ValueError(
                f"rotary tables: {name} `batch seq rotary` has {parts} that differ, at {at} {float(a[at])} and {float(b[at])}; "
                "the fused layer reads the first of them only"
            )

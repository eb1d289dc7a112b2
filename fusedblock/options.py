"""Process-wide and scoped switches: debug, deterministic, batch_invariant.

The environment gives the defaults (FUSEDBLOCK_DEBUG, FUSEDBLOCK_DETERMINISTIC, FUSEDBLOCK_BATCH_INVARIANT: 1/0, true/false,
yes/no, on/off), read when the first operator runs; `options(...)` overrides them for a block of code, in the current thread or
task only.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace

_WORDS = {"1": True, "true": True, "yes": True, "on": True, "": False, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Options:
    """What is in force; see `options` for what each of them promises."""

    debug: bool = False
    deterministic: bool = False
    batch_invariant: bool = False


_scoped: ContextVar[Options | None] = ContextVar("fusedblock_options", default=None)


def _flag(variable: str) -> bool:
    value = os.environ.get(variable, "")
    try:
        return _WORDS[value.strip().lower()]
    except KeyError:
        raise ValueError(f"{variable}={value!r}, expected one of {', '.join(word for word in _WORDS if word)}") from None


def from_environment() -> Options:
    """The defaults as the environment has them now. Raises ValueError if a variable holds anything but a yes or a no."""
    return Options(**{option.name: _flag(f"FUSEDBLOCK_{option.name.upper()}") for option in fields(Options)})


# Kept: reading three variables takes longer than a launch, and `current` is asked for every one.
_defaults = functools.cache(from_environment)


def current() -> Options:
    """The options in force here: those of the innermost `options` block, else the environment's.

    Raises ValueError if an environment variable holds anything but a yes or a no.
    """
    scoped = _scoped.get()
    return _defaults() if scoped is None else scoped


@contextmanager
def options(
    debug: bool | None = None, deterministic: bool | None = None, batch_invariant: bool | None = None
) -> Iterator[Options]:
    """Set options inside a `with` block; None leaves one as it is. Yields the options in force.

    Args:
        debug: check what costs a device synchronisation, with an error that names the operator and the argument: inputs and
            results that are not finite, rotary tables that are not what the layer takes them for. Queries that may attend to
            nothing are reported once, as a warning. Nothing is checked while a CUDA graph is captured.
        deterministic: equal bits from run to run, for equal inputs on one GPU, forward and backward. Of the kernels only the
            backward of attention for Hopper, which is quicker, adds in any order: another runs instead. So it does under
            torch.use_deterministic_algorithms(True).
        batch_invariant: the result of a row (a token) of an operator or a fused layer has the same bits whatever else is
            computed with it: alone or in a batch, in a prefill of any length or in decode steps, where it attends to the same
            keys at the same places. Not promised: gradients; equal bits across GPUs, versions or dtypes; equal bits with left
            padding, which moves the keys; or between calls with an additive mask and calls with a bool mask or none (HF's eager
            and SDPA attention). What a model computes outside of its fused layers, such as lm_head, is torch's. It costs
            time: one tile size whatever the number of rows, no split keys in decode, no norm inside a GEMM.

    A function compiled by torch.compile keeps the launches it was traced with: trace and call it under the same options.
    The backward of an operator runs under the options of its forward. Raises TypeError for a value of another type.
    """
    given = {"debug": debug, "deterministic": deterministic, "batch_invariant": batch_invariant}
    for name, value in given.items():
        if value is not None and not isinstance(value, bool):  # "no" would be true
            raise TypeError(f"options: {name} is {value!r:.60} ({type(value).__name__}), expected True, False or None")
    with under(replace(current(), **{name: value for name, value in given.items() if value is not None})) as chosen:
        yield chosen


@contextmanager
def under(chosen: Options) -> Iterator[Options]:
    """Inside, exactly these options: for work of one block that another thread does, as autograd's."""
    token = _scoped.set(chosen)
    try:
        yield chosen
    finally:
        _scoped.reset(token)

"""Process-wide and scoped switches.

The environment gives the defaults (FUSEDBLOCK_DEBUG, FUSEDBLOCK_DETERMINISTIC: 1/0, true/false, yes/no, on/off) and
`options(...)` overrides them for a block of code, in the current thread or task only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

_WORDS = {"1": True, "true": True, "yes": True, "on": True, "": False, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Options:
    """What an operator with such a choice reads; one without it ignores them.

    debug: extra checks that may synchronise the device. deterministic: the same bits from run to run, where it costs time.
    """

    debug: bool = False
    deterministic: bool = False


_scoped: ContextVar[Options | None] = ContextVar("fusedblock_options", default=None)


def _flag(variable: str) -> bool:
    value = os.environ.get(variable, "")
    try:
        return _WORDS[value.strip().lower()]
    except KeyError:
        raise ValueError(f"{variable}={value!r}, expected one of {', '.join(word for word in _WORDS if word)}") from None


def current() -> Options:
    """The options in force here: those of the innermost `options` block, else the environment's.

    Raises ValueError if an environment variable holds anything but a yes or a no.
    """
    scoped = _scoped.get()
    if scoped is not None:
        return scoped
    return Options(debug=_flag("FUSEDBLOCK_DEBUG"), deterministic=_flag("FUSEDBLOCK_DETERMINISTIC"))


@contextmanager
def options(debug: bool | None = None, deterministic: bool | None = None) -> Iterator[Options]:
    """Set options inside a `with` block; None leaves one as it is. Yields the options in force."""
    given = {"debug": debug, "deterministic": deterministic}
    token = _scoped.set(replace(current(), **{name: bool(value) for name, value in given.items() if value is not None}))
    try:
        yield current()
    finally:
        _scoped.reset(token)

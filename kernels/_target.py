"""What a config is chosen for: a value, asked of a device once and never at import."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Target:
    """A GPU as the config tables see it."""

    backend: str  # "cuda" or "hip"
    arch: int | str  # 80, 86, 90, 100, ... or "gfx942"
    sms: int
    smem_bytes: int  # per program, after opt-in
    l2_bytes: int
    batch_invariant: bool = False  # choose nothing by the number of rows: see fusedblock.options
    skeleton: str = ""  # a name of _attention_skeleton.py's: attention's, wherever it can run; "": by the tables there
    broken: str = ""  # why no Gluon kernel may run here: a failed self-test

    @property
    def capability(self) -> int:
        """90 for sm_90; 0 on AMD."""
        return self.arch if isinstance(self.arch, int) else 0

    @property
    def name(self) -> str:
        return f"sm_{self.capability}" if self.capability else str(self.arch)

    @property
    def tma(self) -> bool:
        """Tensor descriptors are hardware (below sm_90 the compiler rewrites them to pointers and spills)."""
        return self.capability >= 90

    @property
    def family(self) -> str:
        """Whose configs it takes: "gfx942", "sm_100", "sm_90", "sm_80", or "sm_86" for all with less shared memory than that."""
        if self.backend == "hip":
            return "gfx942"
        newer = next((n for n in (100, 90) if self.capability >= n), None)
        return f"sm_{newer}" if newer else "sm_80" if self.smem_bytes >= 160 * _KB else "sm_86"


_KB, _MB = 1024, 1024 * 1024
TARGETS = {
    "sm_80": Target("cuda", 80, 108, 163 * _KB, 40 * _MB),  # A100
    "sm_86": Target("cuda", 86, 84, 99 * _KB, 6 * _MB),  # A6000
    "sm_89": Target("cuda", 89, 128, 99 * _KB, 72 * _MB),  # 4090
    "sm_90": Target("cuda", 90, 132, 227 * _KB, 60 * _MB),  # H200
    "sm_100": Target("cuda", 100, 148, 227 * _KB, 126 * _MB),  # B200
    "gfx942": Target("hip", "gfx942", 304, 64 * _KB, 32 * _MB),  # MI300X
}

_override: list[Target] = []
# Whether batch_invariant is asked for here and now. Set by ops.py: options are a matter of the layers above.
batch_invariant: Callable[[], bool] = lambda: False
failures: dict[int, str] = {}  # CUDA device -> Target.broken, for the life of the process: see _hopper_check.py


@contextmanager
def override(target: Target) -> Iterator[None]:
    """Choose configs for `target` whatever the tensors' device (tests, explain, ahead-of-time compilation)."""
    _override.append(target)
    try:
        yield
    finally:
        _override.pop()


@functools.cache
def _of_cuda(index: int) -> Target:
    p = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        name = p.gcnArchName.split(":")[0]
        return Target("hip", name, p.multi_processor_count, 64 * _KB, p.L2_cache_size)
    smem = p.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stubs lack it
    return Target("cuda", p.major * 10 + p.minor, p.multi_processor_count, smem, p.L2_cache_size)


@functools.cache
def _changed(target: Target, **changes: Any) -> Target:
    return replace(target, **changes)


def asked() -> tuple[Any, ...]:
    """What else than the device decides what target_of says here and now, for the keys of what is kept."""
    return batch_invariant(), len(failures), _override[-1].skeleton if _override else ""


def target_of(device: torch.device) -> Target:
    """The target for tensors on `device`; a CPU answers as an H200, the first target, so that plans can be read without one."""
    if _override:
        target = _override[-1]
    elif device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        target = _of_cuda(index)
        if index in failures:
            target = _changed(target, broken=failures[index])
    else:
        target = TARGETS["sm_90"]
    return _changed(target, batch_invariant=True) if batch_invariant() else target

"""What the present machine is, and how fast it can move bytes and multiply matrices: the ceilings that a report is held to."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusedblock import __version__


@dataclass(frozen=True)
class Ceilings:
    """Rates that a GPU reaches, as measured, not as advertised.

    copy_gbps: a large device-to-device copy, bytes read plus bytes written; read_gbps: reading only. 10**9 bytes a second.
    gemm_tflops: a large bf16 matrix product on random data, dense, fp32 sums. source: "table" or "measured", and when.
    """

    copy_gbps: float
    read_gbps: float
    gemm_tflops: float
    source: str

    def floor_ms(self, read_bytes: int, written_bytes: int, flops: int) -> float:
        """The least time one launch can take: moving its bytes, or its arithmetic, whichever is longer."""
        moved = read_bytes + written_bytes
        # Writes slow the memory down once they are more than a tenth of the traffic.
        gbps = self.read_gbps if written_bytes * 10 <= moved else self.copy_gbps
        return max(moved / gbps / 1e6, flops / self.gemm_tflops / 1e9)


# By the name that torch gives the GPU. Adding one: run `measure_ceilings()` on it, cold and alone, and say when.
CEILINGS = {
    "NVIDIA H200": Ceilings(4250.0, 4460.0, 790.0, "table, 2026-11-29"),
}


def ceilings(device: torch.device | str = "cuda") -> Ceilings:
    """Those of the table where the GPU is in it, else measured now (under two seconds, once a process)."""
    name = torch.cuda.get_device_name(device)
    return CEILINGS[name] if name in CEILINGS else measure_ceilings(device)


def measure_ceilings(device: torch.device | str = "cuda") -> Ceilings:
    """Measure the three rates on this GPU; under two seconds, once a process and GPU. Raises RuntimeError without a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("measure_ceilings needs a CUDA device, and torch sees none")
    index = torch.device(device).index
    return _measured(torch.cuda.current_device() if index is None else index)


@functools.cache
def _measured(index: int) -> Ceilings:
    with torch.cuda.device(index), torch.no_grad():
        device = torch.device("cuda", index)
        free, _ = torch.cuda.mem_get_info(index)
        size = min(2**31, free // 4) // 4096 * 4096
        source = torch.empty(size // 4, dtype=torch.int32, device=device).random_()
        target = torch.empty_like(source)
        copy = 2 * size / _best_ms(target.copy_, source) / 1e6
        # max() of rows: one read of everything, a negligible result. Few rows a program keep many loads in flight.
        read = size / _best_ms(source.view(-1, 1024).amax, 1) / 1e6
        del source, target
        n = 8192 if free > 2**31 else 2048
        a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        gemm = 2 * n**3 / _best_ms(torch.matmul, a, b) / 1e9
        return Ceilings(round(copy, 1), round(max(read, copy), 1), round(gemm, 1), f"measured, {time.strftime('%Y-%m-%d')}")


def _best_ms(run: Callable[..., Any], *args: Any, repeats: int = 12, warmup: int = 3) -> float:
    """A ceiling is what can be reached, so the least of several, unlike the medians of timing.py."""
    times = []
    for i in range(warmup + repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run(*args)
        end.record()
        torch.cuda.synchronize()
        if i >= warmup:
            times.append(start.elapsed_time(end))
    return min(times)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _driver() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0] if found else None


def versions() -> dict[str, str | None]:
    """Of everything that a result depends on; None where it is not there."""
    found: dict[str, str | None] = {"fusedblock": __version__, "torch": torch.__version__}
    found.update({name: _version(name) for name in ("triton", "transformers")})
    found.update(python=platform.python_version(), cuda=torch.version.cuda, hip=torch.version.hip, driver=None)
    if torch.cuda.is_available():
        found["driver"] = _driver()
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def describe(device: torch.device | str | None = None) -> dict[str, Any]:
    """The device as data: type and name; for a GPU also compute capability, SMs, memory and L2 in bytes."""
    device = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda":
        return {"type": device.type, "name": _cpu_name(), "threads": torch.get_num_threads()}
    p = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": p.name,
        "capability": f"{p.major}.{p.minor}",
        "sms": p.multi_processor_count,
        "memory_bytes": p.total_memory,
        "l2_bytes": p.L2_cache_size,
    }


@functools.cache
def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            found = re.search(r"^model name\s*:\s*(.+)$", info.read(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()

"""Compile the kernels an op would launch, for any GPU, on a machine without one, and read what the compiler made of them.

    with aot.compile_only(TARGETS["sm_90"]) as kernels:
        op(*cpu_or_meta_tensors)
    assert aot.problems(kernels, TARGETS["sm_90"], wgmma=True) == []

A kernel that compiles is not yet one that runs well or at all: too much shared or tensor memory, spills and a dot that was
optimised away all compile.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import triton

from fusedblock.interpret import compile_only as compile_only
from fusedblock.kernels import _lang
from fusedblock.kernels._target import Target

MAX_TMEM_COLUMNS = 512

# Matrix instructions by the name reports use; in PTX, or in AMD assembly.
_MMA = {
    "wgmma": re.compile(r"wgmma\.mma_async"),
    "tcgen05.mma": re.compile(r"tcgen05\.mma"),
    "mma.sync": re.compile(r"(?<!g)mma\.sync"),
    "mfma": re.compile(r"v_s?mfmac?_"),
}
# A dot whose operands matrix units take in 16 or 8 bits, in Triton's or Gluon's IR.
_NARROW_DOT = re.compile(r"(?:tt\.dot|warp_group_dot|tc_gen5_mma|warp_group_mma)\b[^\n]*?<[0-9x]*x(?:bf16|f16|f8\w+)\b")


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel needs. Registers and spills are per thread; tmem in columns of a Blackwell SM."""

    name: str
    registers: int
    spill_bytes: int  # stores and loads together
    shared_bytes: int
    num_warps: int
    tmem: int
    mma: str  # "wgmma", "tcgen05.mma", "mma.sync", "mfma", or "" where no matrix instruction is


def _assembly(kernel: Any) -> str:
    return kernel.asm["amdgcn" if kernel.metadata.target.backend == "hip" else "ptx"]


def _run_tool(path: str, *args: str, content: bytes, suffix: str) -> str:
    """Output and diagnostics of an assembler tool on a file of `content`, named in the arguments by {}."""
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(content)
        file.flush()
        done = subprocess.run([path, *(a.format(file.name) for a in args)], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


@functools.cache
def _nvidia_tool(name: str) -> str | None:
    """Path of a CUDA tool that triton brings (or that TRITON_<NAME>_PATH names), None where there is none."""
    try:
        tool = getattr(triton.knobs.nvidia, name)
        return tool.path if tool is not None else None
    except (AttributeError, RuntimeError):
        return None


@functools.lru_cache(maxsize=256)
def _ptxas_report(arch: int, ptx: str) -> tuple[int, int]:
    """Registers and spill bytes as ptxas reports them; triton runs it too, but drops the report."""
    from triton.backends.nvidia.compiler import get_ptxas

    name = f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}"
    report = _run_tool(get_ptxas(arch).path, "-v", name, "{}", "-o", os.devnull, content=ptx.encode(), suffix=".ptx")
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", report)]
    return max(registers), sum(spills)


def resources(kernel: Any) -> Resources:
    """Registers, spills, memory and matrix instruction of one compiled kernel."""
    target, meta, assembly = kernel.metadata.target, kernel.metadata, _assembly(kernel)
    if target.backend == "hip":

        def note(name: str) -> int:
            found = re.search(rf"\.{name}:\s+(\d+)", assembly)
            return int(found[1]) if found else 0

        registers, spill_bytes = note("vgpr_count"), 4 * note("vgpr_spill_count")
    else:
        registers, spill_bytes = _nvidia_registers(kernel, target.arch)
    return Resources(
        name=kernel.name,
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=meta.shared,
        num_warps=meta.num_warps,
        tmem=getattr(meta, "tmem_size", 0) or 0,
        mma=next((name for name, pattern in _MMA.items() if pattern.search(assembly)), ""),
    )


def _nvidia_registers(kernel: Any, arch: int) -> tuple[int, int]:
    cuobjdump = _nvidia_tool("cuobjdump")
    if cuobjdump is not None:  # faster than ptxas, but it knows the stack, not how much of it is spills
        usage = _run_tool(cuobjdump, "-res-usage", "{}", content=kernel.asm["cubin"], suffix=".cubin")
        registers, stack, local = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
        if stack + local == 0:
            return registers, 0
    return _ptxas_report(arch, kernel.asm["ptx"])


def sass(kernel: Any) -> str | None:
    """The machine code of a CUDA kernel as text; None on AMD, or where triton brings no disassembler."""
    if kernel.metadata.target.backend == "hip":
        return None
    nvdisasm, cuobjdump = _nvidia_tool("nvdisasm"), _nvidia_tool("cuobjdump")
    if nvdisasm is not None:
        return _run_tool(nvdisasm, "-c", "{}", content=kernel.asm["cubin"], suffix=".cubin")
    if cuobjdump is not None:
        return _run_tool(cuobjdump, "-sass", "{}", content=kernel.asm["cubin"], suffix=".cubin")
    return None


def has_narrow_dot(kernel: Any) -> bool:
    """Does the source hold a dot of 16- or 8-bit floats?"""
    source = kernel.asm.get("ttir") or kernel.asm.get("ttgir") or ""
    return _NARROW_DOT.search(source) is not None


def spills(most: int) -> int:
    """max_spill_bytes of a gate that holds for triton 3.6, whose ptxas the target machine runs; other versions may spill."""
    return most if _lang.VERSION == (3, 6) else 1 << 30


def problems(kernels: Iterable[Any], target: Target, *, wgmma: bool = False, max_spill_bytes: int = 0) -> list[str]:
    """What would keep these compiled kernels from running well, or at all, on target: one line each, none if all is well.

    Shared memory beyond target.smem_bytes; more than 512 columns of tensor memory; spills beyond max_spill_bytes; a dot of
    16-bit floats without a matrix instruction (with wgmma: without wgmma, on sm_90); warp_specialize without effect.
    fp32 and fp64 dots may become plain multiply-adds.
    """
    found = []
    for kernel in kernels:
        used = resources(kernel)
        if used.shared_bytes > target.smem_bytes:
            found.append(f"{used.name}: {used.shared_bytes} bytes of shared memory, {target.smem_bytes} exist")
        if used.tmem > MAX_TMEM_COLUMNS:
            found.append(f"{used.name}: {used.tmem} columns of tensor memory, {MAX_TMEM_COLUMNS} exist")
        if used.spill_bytes > max_spill_bytes:
            found.append(f"{used.name}: {used.spill_bytes} bytes of spills at {used.registers} registers")
        if has_narrow_dot(kernel):
            if not used.mma:
                found.append(f"{used.name}: a dot of 16-bit floats, but no matrix instruction")
            elif wgmma and target.capability == 90 and used.mma != "wgmma":
                found.append(f"{used.name}: {used.mma} where wgmma was expected")
        asked = re.search(r'"ttg\.num-warps" = (\d+)', kernel.asm.get("ttgir", ""))
        if "warp_specialize" in kernel.asm.get("ttir", "") and asked and used.num_warps == int(asked[1]):
            found.append(f"{used.name}: warp_specialize had no effect")
    return found

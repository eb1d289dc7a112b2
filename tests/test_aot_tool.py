"""The compile-only tool finds what it is there to find: spills, a missing matrix instruction, too much memory."""

from __future__ import annotations

from dataclasses import replace

import aot
import pytest
import torch
import triton
import triton.language as tl

from fusedblock.kernels import _launch
from fusedblock.kernels._target import TARGETS, target_of


@triton.jit
def copy_kernel(x, y, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i) * 2)


@triton.jit
def dot_kernel(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m = tl.arange(0, M)[:, None]
    n = tl.arange(0, N)[None, :]
    k = tl.arange(0, K)
    tl.store(c + m * N + n, tl.dot(tl.load(a + m * K + k[None, :]), tl.load(b + k[:, None] * N + n)))


@triton.jit
def ieee_dot_kernel(a, b, c, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(c + i, tl.dot(tl.load(a + i), tl.load(b + i), input_precision="ieee"))


def compile_dot(target: str, size: int = 64, **options: int) -> list:
    a, c = torch.empty(size, size, dtype=torch.bfloat16, device="meta"), torch.empty(size, size, device="meta")
    with aot.compile_only(TARGETS[target]) as kernels:
        dot_kernel[(1,)](a, a, c, size, size, size, **options)
    return kernels


def test_launches_compile_and_nothing_runs():
    x, y = torch.ones(64), torch.zeros(64)
    with aot.compile_only(TARGETS["sm_86"]) as kernels:
        assert _launch.runs_kernels(x)
        assert target_of(x.device) == TARGETS["sm_86"]
        _launch.launch(copy_kernel, (2,), (x, y), {"BLOCK": 32, "num_warps": 2})
        copy_kernel[(1,)](x.bfloat16(), y, BLOCK=64)
    assert [k.name for k in kernels] == ["copy_kernel", "copy_kernel"]
    assert aot.resources(kernels[0]).num_warps == 2
    assert "sm_86" in kernels[0].asm["ptx"]
    assert aot.problems(kernels, TARGETS["sm_86"]) == []
    assert y.count_nonzero() == 0
    assert not _launch.runs_kernels(x)
    with pytest.raises(RuntimeError, match="active drivers"):
        copy_kernel[(1,)](x, y, BLOCK=64)


def test_a_spilling_kernel_is_found():
    """Accumulators alone take 32 registers a thread: with 32 in all, something must spill."""
    kernels = compile_dot("sm_80", maxnreg=32) + compile_dot("sm_80")
    spilling, fitting = map(aot.resources, kernels)
    assert spilling.spill_bytes > 0
    assert spilling.registers == 32
    assert fitting.spill_bytes == 0
    assert 32 < fitting.registers <= 255
    (problem,) = aot.problems(kernels, TARGETS["sm_80"])
    assert problem == f"dot_kernel: {spilling.spill_bytes} bytes of spills at 32 registers"
    assert aot.problems(kernels, TARGETS["sm_80"], max_spill_bytes=spilling.spill_bytes) == []


@pytest.mark.parametrize(
    ("target", "mma"), [("sm_80", "mma.sync"), ("sm_90", "wgmma"), ("sm_100", "tcgen05.mma"), ("gfx942", "mfma")]
)
def test_the_matrix_instruction_of_each_target(target, mma):
    kernels = compile_dot(target)
    used = aot.resources(kernels[0])
    assert used.mma == mma
    assert (used.tmem > 0) == (target == "sm_100")
    assert aot.problems(kernels, TARGETS[target], wgmma=True) == []


class Stripped:
    """A compiled kernel whose assembly lost its matrix instructions, as when the compiler drops a dot or does not see one."""

    def __init__(self, kernel, replacement: str):
        self.name, self.metadata = kernel.name, kernel.metadata
        self.asm = {**kernel.asm, "ptx": kernel.asm["ptx"].replace("wgmma.mma_async", replacement)}


def test_a_missing_matrix_instruction_is_found():
    (kernel,) = compile_dot("sm_90")
    target = TARGETS["sm_90"]
    assert aot.problems([Stripped(kernel, "fma.rn")], target) == ["dot_kernel: a dot of 16-bit floats, but no matrix instruction"]
    assert aot.problems([Stripped(kernel, "mma.sync")], target) == []
    assert aot.problems([Stripped(kernel, "mma.sync")], target, wgmma=True) == ["dot_kernel: mma.sync where wgmma was expected"]


def test_a_dot_of_fp32_may_be_multiply_adds():
    """input_precision="ieee" has no matrix instruction: PTX holds fused multiply-adds, and that is no problem."""
    a = torch.empty(16, 16, device="meta")
    with aot.compile_only(TARGETS["sm_80"]) as kernels:
        ieee_dot_kernel[(1,)](a, a, a, 16)
    assert "tt.dot" in kernels[0].asm["ttir"]
    assert aot.resources(kernels[0]).mma == ""
    assert aot.problems(kernels, TARGETS["sm_80"]) == []


def test_too_much_shared_memory_is_found():
    kernels = compile_dot("sm_80")
    used = aot.resources(kernels[0]).shared_bytes
    assert used >= 64 * 64 * 2  # at least one operand passes through it
    (problem,) = aot.problems(kernels, replace(TARGETS["sm_80"], smem_bytes=used - 1))
    assert problem == f"dot_kernel: {used} bytes of shared memory, {used - 1} exist"
    assert aot.problems(kernels, replace(TARGETS["sm_80"], smem_bytes=used)) == []


def test_machine_code_names_the_instruction():
    text = aot.sass(compile_dot("sm_80")[0])
    if text is None:  # triton brings no disassembler
        assert aot._nvidia_tool("nvdisasm") is None
        assert aot._nvidia_tool("cuobjdump") is None
    else:
        assert "HMMA.16816.F32.BF16" in text
    assert aot.sass(compile_dot("gfx942")[0]) is None

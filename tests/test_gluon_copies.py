"""cp.async on the CPU model of an SM: rows that a table names, multiplied by what TMA brings; wrong kernels are caught."""

from __future__ import annotations

import aot
import pytest
import torch

from fusedblock.interpret import BarrierMisuse, ProtocolError, Race, Unwritten, interpret
from fusedblock.kernels._gluon import (
    allocate_barriers,
    copy_rows,
    copy_rows_arrive,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from fusedblock.kernels._target import TARGETS

BF16 = torch.bfloat16


@gluon.jit
def _gather(x, table, y, x_s, y_s, full, n, WIDTH: gl.constexpr, FAULT: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    column = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    rows = gl.load(table + gl.arange(0, 64, gl.SliceLayout(1, layout)))
    for i in range(n):
        mbarrier.expect(full.index(i), y.block_type.nbytes)
        tma_load(y, [i * 64, 0], full.index(i), y_s.index(i))
        copy_rows(x_s.index(i), x + rows[:, None] * WIDTH + i * 64 + column, column < WIDTH - i * 64)
        if FAULT != "no arrival":
            copy_rows_arrive(full.index(i))


@gluon.jit
def _sum_products(out, x_s, y_s, full, n, FAULT: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc = gl.zeros([64, 64], gl.float32, layout)
    for i in range(n):
        if FAULT != "no wait":
            mbarrier.wait(full.index(i), 0)
        if FAULT != "no fence":
            fence_async_shared()
        acc = warpgroup_mma_wait(0, deps=(warpgroup_mma(x_s.index(i), y_s.index(i), acc, is_async=True),))
    at = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    gl.store(out + at, acc)


@gluon.jit
def gather_kernel(x, table, y, out, n, COUNT: gl.constexpr, WIDTH: gl.constexpr, FAULT: gl.constexpr):
    x_s = gl.allocate_shared_memory(y.dtype, [2, 64, 64], y.layout)
    y_s = gl.allocate_shared_memory(y.dtype, [2, 64, 64], y.layout)
    full = allocate_barriers(2, COUNT)
    gl.warp_specialize(
        [(_sum_products, (out, x_s, y_s, full, n, FAULT)), (_gather, (x, table, y, x_s, y_s, full, n, WIDTH, FAULT))], [4], [64]
    )


def launch_gather(count: int = 129, fault: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(90, 120).to(BF16), torch.randn(120, 64).to(BF16)
    table, out = torch.randint(90, (64,), dtype=torch.int32), torch.empty(64, 64)
    gather_kernel[(1,)](x, table, descriptor(y, [64, 64]), out, 2, COUNT=count, WIDTH=120, FAULT=fault, maxnreg=168)
    return out, x[table.long()].double() @ y.double()


def test_gathered_rows():
    """Past the columns there are zeros, as in what TMA brings; the memory beside x is never read."""
    for seed in range(12):
        with interpret(seed=seed):
            torch.testing.assert_close(*launch_gather(), rtol=1e-5, atol=1e-4, check_dtype=False)
    with aot.compile_only(TARGETS["sm_90"]) as kernels:
        launch_gather()
    assert aot.problems(kernels, TARGETS["sm_90"], wgmma=True) == []
    assert "cp.async.mbarrier.arrive.noinc" in kernels[0].asm["ptx"]


@pytest.mark.parametrize("fault, count, error, message", [
    ("no wait", 129, (Race, Unwritten), r"nothing orders (wgmma|a copy|a TMA load)|hold nothing"),
    ("no fence", 129, Race, r"no fence_async_shared between a copy of partition 1 \(_gather\) into x_s\[0\] and wgmma 1"),
    ("no arrival", 129, ProtocolError, r"no barrier hears of a copy of partition 1 \(_gather\) into x_s\[0\]"),
    ("no arrival", 1, ProtocolError, r"nothing orders wgmma 1|hold nothing|no barrier hears of a copy"),
    ("", 33, BarrierMisuse, r"expects 33 arrivals in phase 0 and gets more: 128 from copies of partition 1"),
    ("", 128, BarrierMisuse, r"expects 128 arrivals in phase 0 and gets more"),
])  # fmt: skip
def test_faults_of_gathered_rows(fault: str, count: int, error: type, message: str):
    for seed in range(6):
        with interpret(seed=seed), pytest.raises(error, match=message):
            launch_gather(count, fault)

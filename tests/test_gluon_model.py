"""The CPU model of Gluon's asynchronous machine: right kernels give right values in every order, wrong ones are caught."""

from __future__ import annotations

import aot
import pytest
import torch

from fusedblock.interpret import BarrierMisuse, Deadlock, ProtocolError, Race, Unwritten, count_traffic, interpret
from fusedblock.interpret.shared import Access
from fusedblock.kernels import _gluon
from fusedblock.kernels._gluon import (
    add_four,
    allocate_barriers,
    bar_arrive,
    bar_sync,
    block_barrier,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_add,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from fusedblock.kernels._target import TARGETS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SEEDS = range(12)

# ---- a GEMM with a ring of stages: one producer warp, two consumer warpgroups of 64 rows ------------------------------------


@gluon.jit
def _take(empty, s, i, STAGES: gl.constexpr, NAMED: gl.constexpr, FAULT: gl.constexpr):
    if NAMED:
        if i >= STAGES:
            bar_sync(8 + s, 256 if FAULT == "few threads" else 288)
    else:
        mbarrier.wait(empty.index(s), ((i // STAGES) & 1) ^ 1)


@gluon.jit
def _give_back(empty, s, NAMED: gl.constexpr, FAULT: gl.constexpr):
    if NAMED:
        bar_arrive(2 + s if FAULT == "taken id" else 8 + s, 288)
    else:
        mbarrier.arrive(empty.index(s), count=3 if FAULT == "three arrivals" else 1)


@gluon.jit
def producer(a, b, a_s, b_s, full, empty, m, n, STAGES: gl.constexpr, NAMED: gl.constexpr, FAULT: gl.constexpr):
    for i in range(n):
        s = i % STAGES
        if FAULT != "full ring":
            _take(empty, s, i, STAGES, NAMED, FAULT)
        more: gl.constexpr = -128 if FAULT == "too few bytes" else 128 if FAULT == "too many bytes" else 0
        mbarrier.expect(full.index(s), 2 * a.block_type.nbytes + b.block_type.nbytes + more)
        for c in gl.static_range(2):
            tma_load(a, [m + c * 64, i * 64], full.index(s), a_s.index(s * 2 + c))
        tma_load(b, [i * 64, 0], full.index(s), b_s.index(s))
    if NAMED:
        for c in gl.static_range(STAGES):
            if n > c:
                bar_sync(8 + c, 288)


@gluon.jit
def consumer(CID: gl.constexpr, c, a_s, b_s, c_s, full, empty, m, n, STAGES: gl.constexpr, LAG: gl.constexpr,
             NAMED: gl.constexpr, FAULT: gl.constexpr):  # fmt: skip
    acc = gl.zeros([64, 128], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
    for i in range(n):
        s = i % STAGES
        ph = (i // STAGES) & 1
        if FAULT == "other phase":
            ph ^= 1
        if FAULT != "no wait for the load":
            mbarrier.wait(full.index(s), ph)
        acc = warpgroup_mma(a_s.index(s * 2 + CID), b_s.index(s), acc, is_async=True)
        if FAULT == "early release":
            _give_back(empty, s, NAMED, FAULT)
        acc = warpgroup_mma_wait(LAG, deps=(acc,))
        if FAULT != "early release" and FAULT != "no arrival":
            if LAG and FAULT != "release without lag":
                if i > 0:
                    _give_back(empty, (i - 1) % STAGES, NAMED, FAULT)
            else:
                _give_back(empty, s, NAMED, FAULT)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    if LAG:
        if FAULT != "release without lag":
            _give_back(empty, (n - 1) % STAGES, NAMED, FAULT)
    c_s.index(CID).store(acc.to(c.dtype))
    if FAULT != "no fence":
        fence_async_shared()
    tma_store(c, [m + CID * 64, 0], c_s.index(CID))
    if FAULT != "no wait for the store":
        tma_store_wait(0)


@gluon.jit
def gemm_kernel(a, b, c, n, STAGES: gl.constexpr, LAG: gl.constexpr, NAMED: gl.constexpr, FAULT: gl.constexpr):
    a_s = gl.allocate_shared_memory(a.dtype, [2 * STAGES, 64, 64], a.layout)
    b_s = gl.allocate_shared_memory(b.dtype, [STAGES, 64, 128], b.layout)
    c_s = gl.allocate_shared_memory(c.dtype, [2, 64, 128], c.layout)
    full = allocate_barriers(STAGES, 1)
    empty = allocate_barriers(STAGES, 2)
    m = gl.program_id(0) * 128
    gl.warp_specialize(
        [
            (consumer, (0, c, a_s, b_s, c_s, full, empty, m, n, STAGES, LAG, NAMED, FAULT)),
            (consumer, (1, c, a_s, b_s, c_s, full, empty, m, n, STAGES, LAG, NAMED, FAULT)),
            (producer, (a, b, a_s, b_s, full, empty, m, n, STAGES, NAMED, FAULT)),
        ],
        [4, 1],
        [240, 24],
    )


def launch_gemm(dtype: torch.dtype = BF16, m: int = 130, steps: int = 5, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of the model and in float64. K is 8 less than a multiple of the block, M anything: TMA fills with zeros."""
    generator = torch.Generator().manual_seed(0)
    k = 64 * steps - 8
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k), (k, 128)))
    c = torch.full((m, 128), float("nan"), dtype=dtype)
    options = {"STAGES": 2, "LAG": 0, "NAMED": False, "FAULT": "", **options}
    operands = descriptor(a, [64, 64]), descriptor(b, [64, 128]), descriptor(c, [64, 128])
    gemm_kernel[(-(-m // 128),)](*operands, steps, **options, num_warps=4, maxnreg=168)
    return c, a.double() @ b.double()


def assert_product(c: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(c.double(), expected, rtol=8e-3 if c.dtype is BF16 else 1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"NAMED": True}, {"LAG": 1}, {"LAG": 1, "NAMED": True, "STAGES": 3}], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gemm_is_right_in_every_order(dtype: torch.dtype, options: dict):
    for seed in SEEDS:
        with interpret(seed=seed):
            assert_product(*launch_gemm(dtype, **options))


def test_the_same_kernel_compiles_for_the_gpu():
    with aot.compile_only(TARGETS["sm_90"]) as kernels:
        launch_gemm()
        launch_gemm(LAG=1, NAMED=True)
    assert aot.problems(kernels, TARGETS["sm_90"], wgmma=True) == []
    assert ["bar.arrive" in kernel.asm["ptx"] for kernel in kernels] == [False, True]
    assert all("setmaxnreg" in kernel.asm["ptx"] for kernel in kernels)


P0, P2 = r"partition [01] \(consumer\)", r"partition 2 \(producer\)"
LOAD, MMA = rf"a TMA load of {P2} into [ab]_s\[\d\]", rf"wgmma \d of {P0} on [ab]_s\[\d\]"
READ_EARLY = rf"nothing orders {MMA} after {LOAD}|{MMA}: \d+ elements hold nothing"
WRITTEN_EARLY = rf"nothing orders {LOAD} after {MMA}"
# What is wrong -> options of the kernel, and what the model says; orders may differ in what comes first.
FAULTS = {
    "no wait for the load": ({}, (Race, Unwritten), f"{READ_EARLY}|{WRITTEN_EARLY}"),
    "other phase": ({}, (Race, Unwritten, Deadlock), rf"{READ_EARLY}|waits for full\[0\], which is in phase 1: .*\(parity 1\)"),
    "early release": ({}, Race, WRITTEN_EARLY),
    "release without lag": ({"LAG": 1}, Race, WRITTEN_EARLY),
    "full ring": ({}, (Race, BarrierMisuse), rf"nothing orders {LOAD} after|full\[0\] expects 1 arrivals .* and gets more"),
    "no arrival": ({}, Deadlock, rf"{P2} waits for empty\[0\], which is in phase 0: 2 of 2 arrivals missing"),
    "three arrivals": ({}, BarrierMisuse, rf"empty\[0\] expects 2 arrivals in phase 0 and gets more: 3 from {P0} after nobody"),
    "too few bytes": ({}, BarrierMisuse, rf"full\[\d\]: {LOAD} brings \d+ bytes, 128 more than expected"),
    "too many bytes": ({}, Deadlock, rf"{P0} waits for full\[0\], which is in phase 0: 0 of 1 .*, 128 bytes still to come"),
    "no fence": ({}, Race, rf"no fence_async_shared between a store of {P0} to c_s\[\d\] and TMA store 1 of {P0} from c_s\[\d\]"),
    "no wait for the store": ({}, ProtocolError, rf"{P0} ends without waiting for TMA store 1"),
    "few threads": ({"NAMED": True}, BarrierMisuse, "named barrier 8"),
    "taken id": ({"NAMED": True}, BarrierMisuse, "named barrier 2: the kernel's own are 4 to 15"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_caught_in_every_order(fault: str):
    options, errors, message = FAULTS[fault]
    for seed in SEEDS:
        with interpret(seed=seed), pytest.raises(errors, match=f"(?s){message}"):
            launch_gemm(FAULT=fault, **options)


def test_a_lost_arrival_at_a_named_barrier_is_a_deadlock():
    with interpret(), pytest.raises(Deadlock, match=r"producer\) waits for named barrier 8: 32 of 288 threads are there"):
        launch_gemm(FAULT="no arrival", NAMED=True)


@pytest.mark.parametrize("fault", ["no wait for the load", "early release"])
def test_turns_are_bad_enough_to_spoil_values_too(fault: str, monkeypatch: pytest.MonkeyPatch):
    """Without the clocks, delays and poison alone make most orders go wrong."""
    monkeypatch.setattr(Access, "before", lambda self, clock: True)
    wrong = 0
    for seed in SEEDS:
        try:
            with interpret(seed=seed):
                assert_product(*launch_gemm(FAULT=fault))
        except (Unwritten, AssertionError):
            wrong += 1
        except BarrierMisuse:
            pass
    assert wrong > len(SEEDS) // 2


def test_a_seed_fixes_the_order():
    def order(seed: int) -> list:
        seen = []
        with interpret(seed=seed, on_access=[lambda access: seen.append((access.kind, access.region.name, access.offsets[0]))]):
            launch_gemm(m=256)
        return seen

    orders = [order(seed) for seed in (0, 0, 1, 2, 3)]
    assert orders[0] == orders[1]
    assert len({str(one) for one in orders}) == 4


def test_traffic_of_tma():
    with count_traffic() as traffic:
        c, _ = launch_gemm(m=130)
    a, b, c_traffic = (traffic.launches[0].argument(name) for name in "abc")
    assert a.read_bytes == a.issued_read_bytes == a.nbytes
    assert (b.read_bytes, b.issued_read_bytes) == (b.nbytes, 2 * b.nbytes)
    assert c_traffic.written_bytes == c_traffic.issued_written_bytes == c.numel() * 2


# ---- one partition: copies through a ring, edges, adds -----------------------------------------------------------------------


@gluon.jit
def copy_kernel(x, y, n, row, column, FAULT: gl.constexpr):
    buffers = gl.allocate_shared_memory(x.dtype, [2, 32, 64], x.layout)
    full = allocate_barriers(2, 1)
    for i in range(n):
        s = i % 2
        if FAULT != "buffer in use":
            tma_store_wait(1)
        mbarrier.expect(full.index(s), x.block_type.nbytes)
        tma_load(x, [row + 32 * i, column], full.index(s), buffers.index(s))
        if FAULT != "no wait":
            mbarrier.wait(full.index(s), (i // 2) & 1)
        tma_store(y, [32 * i, 0], buffers.index(s))
    tma_store_wait(0)


@pytest.mark.parametrize("row, column", [(0, 0), (-5, 8), (7, -16), (500, 0)])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_copies_fill_with_zeros_outside(dtype: torch.dtype, row: int, column: int):
    x = torch.randn(90, 56).to(dtype)
    expected = torch.zeros(100, 64, dtype=dtype)
    for i in range(100):
        for j in range(64):
            if 0 <= i + row < 90 and 0 <= j + column < 56:
                expected[i, j] = x[i + row, j + column]
    for seed in range(5):
        y = torch.full((100, 64), float("nan"), dtype=dtype)
        with interpret(seed=seed):
            copy_kernel[(1,)](descriptor(x, [32, 64]), descriptor(y, [32, 64]), 4, row, column, FAULT="")
        assert torch.equal(y, expected)


@pytest.mark.parametrize("fault, message", [
    ("buffer in use", r"nothing orders a TMA load of copy_kernel into buffers\[0\] after TMA store 1 of copy_kernel"),
    ("no wait", r"nothing orders TMA store 1 of copy_kernel from buffers\[0\] after a TMA load of copy_kernel into buffers"),
])  # fmt: skip
def test_faults_of_copies(fault: str, message: str):
    x = torch.randn(128, 64, dtype=BF16)
    for seed in range(4):
        with interpret(seed=seed), pytest.raises(Race, match=message):
            copy_kernel[(1,)](descriptor(x, [32, 64]), descriptor(x.clone(), [32, 64]), 4, 0, 0, FAULT=fault)


@gluon.jit
def add_kernel(x, y, totals, BY_TMA: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    rows = gl.arange(0, 32, gl.SliceLayout(1, layout))[:, None]
    offsets = rows * 64 + gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    values = gl.load(x + gl.program_id(0) * 2048 + offsets)
    if BY_TMA:
        memory = gl.allocate_shared_memory(y.dtype, [32, 64], y.layout)
        memory.store(values)
        fence_async_shared()
        block_barrier()
        tma_add(y, [16, 0], memory)
        tma_store_wait(0)
    else:
        add_four(totals + 16 * 64 + offsets, values)


@pytest.mark.parametrize("by_tma", [True, False])
def test_adds(by_tma: bool):
    x, y = torch.randn(5, 32, 64), torch.randn(40, 64)
    expected = y.double()
    expected[16:] += x.double().sum(0)[:24]
    totals = torch.cat([y, torch.zeros(8, 64)])
    with interpret():
        add_kernel[(5,)](x, descriptor(y, [32, 64], swizzle=False), totals, BY_TMA=by_tma)
    torch.testing.assert_close((y if by_tma else totals[:40]).double(), expected, rtol=1e-5, atol=1e-5)


def test_adds_compile_for_the_gpu():
    x = torch.empty(5, 32, 64)
    with aot.compile_only(TARGETS["sm_90"]) as kernels:
        for by_tma in (True, False):
            add_kernel[(5,)](x, descriptor(x[0], [32, 64], swizzle=False), x, BY_TMA=by_tma)
    assert aot.problems(kernels, TARGETS["sm_90"]) == []
    for kernel, instruction in zip(kernels, ("cp.reduce.async.bulk.tensor.2d", "red.relaxed.gpu.global.add.v4.f32")):
        assert instruction in kernel.asm["ptx"]


def test_bf16_adds_round_each_time():
    x, y = torch.full((2, 32, 64), 2**-8, dtype=BF16), torch.ones(32, 64, dtype=BF16)
    before = torch.cat([y, y])
    with interpret():
        add_kernel[(2,)](x, descriptor(before, [32, 64]), x, BY_TMA=True)
    assert torch.equal(before[16:48], torch.ones(32, 64, dtype=BF16))  # 1 + 2**-8 is a tie, to even, twice


# ---- shared memory between partitions ----------------------------------------------------------------------------------------


@gluon.jit
def _half(CID: gl.constexpr, out, shared, x, FAULT: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 128, layout)
    shared.slice(CID * 128, 128).store(gl.load(x + CID * 128 + i))
    if FAULT != "no barrier":
        bar_sync(8, 256)
    gl.store(out + CID * 128 + i, shared.slice(128 - CID * 128, 128).load(layout))


@gluon.jit
def _nothing(shared):
    pass


@gluon.jit
def swap_kernel(x, out, FAULT: gl.constexpr):
    shared = gl.allocate_shared_memory(gl.float32, [256], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if FAULT == "one half":
        gl.warp_specialize([(_half, (0, out, shared, x, "no barrier")), (_nothing, (shared,))], [4], [64])
    else:
        gl.warp_specialize([(_half, (0, out, shared, x, FAULT)), (_half, (1, out, shared, x, FAULT))], [4], [64])


def test_two_partitions_share_memory():
    x = torch.randn(256)
    for seed in SEEDS:
        out = torch.full_like(x, float("nan"))
        with interpret(seed=seed):
            swap_kernel[(1,)](x, out, FAULT="")
        assert torch.equal(out, x.roll(128))


def test_unordered_stores_and_loads_are_a_race():
    for seed in SEEDS:
        with interpret(seed=seed), pytest.raises((Race, Unwritten)) as caught:
            swap_kernel[(1,)](torch.randn(256), torch.zeros(256), FAULT="no barrier")
        if caught.type is Race:
            assert "partition 0 (_half)" in str(caught.value) and "partition 1 (_half)" in str(caught.value)


def test_memory_nobody_wrote_is_not_read():
    message = r"a load of partition 0 \(_half\) from shared\[128:256\]: 128 elements hold nothing"
    with interpret(), pytest.raises(Unwritten, match=message):
        swap_kernel[(1,)](torch.randn(256), torch.zeros(256), FAULT="one half")


# ---- the language ------------------------------------------------------------------------------------------------------------


@gluon.jit
def _scaled(x, BY: gl.constexpr = 3):
    if BY > 2 and not BY == 4:
        x = x * BY
    return x, gl.cdiv(BY, 2)


@gluon.jit
def language_kernel(x, y, n, count, ROWS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, 16, layout=gl.SliceLayout(0, layout))
    at = rows[:, None] * 16 + columns[None, :]
    a = gl.load(x + at, mask=(rows < n)[:, None], other=0.0)
    a, two = _scaled(a)
    low, high = gl.split(a.reshape([ROWS, 8, 2]))
    b = gl.convert_layout(gl.join(high, low).reshape([ROWS, 16]), layout)
    b = gl.where(b > 0, gl.exp2(-b), gl.maximum(b, -1.5)) + gl.full_like(b, 0.25) + gl.zeros([ROWS, 16], gl.float32, layout)
    b += gl.sum(a, 1)[:, None] - gl.max(a, axis=0)[None, :]
    gl.store(y + at, b.to(y.dtype.element_ty), mask=columns[None, :] < 15)
    gl.atomic_add(count, two * gl.num_warps() + gl.to_tensor(ROWS) + _gluon.gl.num_programs(0))
    gl.static_assert(ROWS >= 16)


def test_language():
    x, y, count = torch.randn(32, 16), torch.full((32, 16), 7.0, dtype=BF16), torch.zeros(1, dtype=torch.int32)
    with interpret():
        language_kernel[(1,)](x, y, 20, count, ROWS=32)
    a = torch.where(torch.arange(32)[:, None] < 20, x, 0.0) * 3
    b = a.reshape(32, 8, 2).flip(-1).reshape(32, 16)
    b = torch.where(b > 0, torch.exp2(-b), b.clamp(min=-1.5)) + 0.25
    expected = (b + a.sum(1, keepdim=True) - a.amax(0)).to(BF16)
    expected[:, 15] = 7.0
    torch.testing.assert_close(y, expected)
    assert count.item() == 2 * 4 + 32 + 1
    with aot.compile_only(TARGETS["sm_90"]) as kernels:
        language_kernel[(1,)](x, y, 20, count, ROWS=32)
    assert aot.problems(kernels, TARGETS["sm_90"]) == []


@gluon.jit
def constant_kernel(x, bytes):
    bars = allocate_barriers(1, 1)
    mbarrier.expect(bars.index(0), bytes)


def test_what_must_be_a_constant_is_one():
    with interpret(), pytest.raises(TypeError, match="declare the variable as gl.constexpr"):
        constant_kernel[(1,)](torch.zeros(1), 64)


@gluon.jit
def assembly_kernel(x, y, ASM: gl.constexpr):
    at = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    values = gl.inline_asm_elementwise(ASM, "=f,f", [gl.load(x + at)], dtype=gl.float32, is_pure=True, pack=1)
    gl.store(y + at, values)


def test_inline_assembly():
    x, y = torch.randn(128), torch.empty(128)
    with interpret():
        assembly_kernel[(1,)](x, y, ASM="ex2.approx.ftz.f32 $0, $1;")
        torch.testing.assert_close(y, torch.exp2(x))
        with pytest.raises(NotImplementedError, match="the model does not know: sin.approx.f32"):
            assembly_kernel[(1,)](x, y, ASM="sin.approx.f32 $0, $1;")


# ---- barriers and ends -------------------------------------------------------------------------------------------------------


@gluon.jit
def end_kernel(x, FAULT: gl.constexpr):
    memory = gl.allocate_shared_memory(x.dtype, [2, 64, 64], x.layout)
    if FAULT == "not initialised":
        bars = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    else:
        bars = allocate_barriers(1, 1)
    if FAULT == "initialised twice":
        mbarrier.init(bars.index(0), count=1)
    mbarrier.expect(bars.index(0), x.block_type.nbytes)
    tma_load(x, [0, 0], bars.index(0), memory.index(2 if FAULT == "no such buffer" else 0))
    if FAULT != "load not waited for":
        mbarrier.wait(bars.index(0), 0)
        acc = gl.zeros([64, 64], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
        other = memory.index(1 if FAULT == "empty buffer" else 0)
        warpgroup_mma(memory.index(0), other, acc, is_async=True)
        if FAULT != "wgmma not waited for":
            warpgroup_mma_wait(0, deps=(acc,))


@pytest.mark.parametrize("fault, error, message", [
    ("not initialised", BarrierMisuse, r"bars\[0\], which is not initialised"),
    ("initialised twice", BarrierMisuse, r"bars\[0\] is initialised twice"),
    ("no such buffer", ProtocolError, "memory has 2 elements on axis 0, not 2:3"),
    ("load not waited for", ProtocolError, r"nobody has waited for a TMA load of end_kernel into memory\[0\]"),
    ("empty buffer", Unwritten, r"wgmma 1 of end_kernel on memory\[1\]: 4096 elements hold nothing"),
    ("wgmma not waited for", ProtocolError, "end_kernel ends without waiting for wgmma 1"),
])  # fmt: skip
def test_ends_and_barriers(fault: str, error: type, message: str):
    with interpret(), pytest.raises(error, match=message):
        end_kernel[(1,)](descriptor(torch.randn(64, 64, dtype=BF16), [64, 64]), FAULT=fault)


def test_end_kernel_without_a_fault_passes():
    with interpret():
        end_kernel[(1,)](descriptor(torch.randn(64, 64, dtype=BF16), [64, 64]), FAULT="")

"""Every access of a kernel is checked and counted: bytes per argument by hand, out of bounds, races between programs."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedblock.interpret import OutOfBounds, count_traffic, interpret

BF16 = torch.bfloat16


@triton.jit
def masked_copy_kernel(x, y, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < N - 3, other=7.0), mask=i < N)


@triton.jit
def atomic_kernel(x, out, index, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(out + tl.load(index + i), tl.load(x + i), mask=i < 12, sem="relaxed")


@pytest.mark.parametrize("context", [interpret, count_traffic])
def test_out_of_bounds_raises(context):
    whole, y = torch.zeros(256), torch.zeros(128)
    with context(), pytest.raises(OutOfBounds, match="load reaches 4 elements outside every tensor argument") as error:
        masked_copy_kernel[(2,)](whole[:60], y, 128 + 3, BLOCK=64)
    assert "program (0, 0, 0)" in "".join(getattr(error.value, "__notes__", ["program (0, 0, 0)"]))
    with context(), pytest.raises(OutOfBounds, match="store reaches 28 elements"):
        masked_copy_kernel[(4,)](torch.zeros(128), y[:100], 128, BLOCK=32)


def test_reading_between_the_rows_of_a_view_raises():
    x = torch.zeros(8, 16)[:, :12]
    with interpret(), pytest.raises(OutOfBounds, match="between the rows of x"):
        masked_copy_kernel[(1,)](x, torch.zeros(64), 64, BLOCK=64)


def test_tensors_elsewhere_are_an_error():
    with interpret(), pytest.raises(ValueError, match="y is on meta"):
        masked_copy_kernel[(1,)](torch.zeros(8), torch.zeros(8, device="meta"), 8, BLOCK=8)


@triton.jit
def racy_kernel(x, y, STEP: tl.constexpr):
    i = tl.program_id(0) * STEP + tl.arange(0, 4)
    tl.store(y + i, tl.load(x + i))


def test_write_races_between_programs_are_counted():
    x, y = torch.zeros(16), torch.zeros(16)
    with count_traffic() as traffic:
        racy_kernel[(3,)](x, y, STEP=4)  # disjoint
        racy_kernel[(3,)](x, y, STEP=3)  # each overlaps the one before by an element
        racy_kernel[(2,)](x, x, STEP=4)  # each reads what it writes
        racy_kernel[(2,)](x, x, STEP=3)  # the second reads and writes an element of the first
    assert [launch.total("write_races") for launch in traffic.launches] == [0, 2, 0, 1]
    assert [launch.total("read_write_races") for launch in traffic.launches] == [0, 0, 0, 2]


@triton.jit
def sum_when_last_kernel(x, y, counters, EARLY: tl.constexpr):
    """The last program sums what all have stored; EARLY: each counts itself before it has stored."""
    p = tl.program_id(0)
    if EARLY:
        before = tl.atomic_add(counters, 1)
        tl.store(y + p, p + 1)
    else:
        tl.store(y + p, p + 1)
        before = tl.atomic_add(counters, 1)
    if before == tl.num_programs(0) - 1:
        tl.store(x, tl.sum(tl.load(y + tl.arange(0, 4)), 0))
        tl.store(y, 0)
    elif p == 0:
        tl.atomic_add(counters + 1, 1)  # another counter tells the others nothing


def test_atomics_order_programs():
    """Of stores before its atomic whoever comes there later knows, of those after it nobody."""
    for early, races in ((False, (0, 0)), (True, (1, 3))):
        x, y, counters = torch.zeros(1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        with count_traffic() as traffic:
            sum_when_last_kernel[(4,)](x, y, counters, EARLY=early)
        assert (x.item(), y.tolist()) == (10, [0, 2, 3, 4])
        assert (traffic.total("write_races"), traffic.total("read_write_races")) == races


def test_traffic_of_a_copy():
    x, y = torch.zeros(100, dtype=BF16), torch.zeros(100)
    with count_traffic() as traffic:
        masked_copy_kernel[(4,)](x, y, 100, BLOCK=32)
    (launch,) = traffic.launches
    assert list(launch.arguments) == ["x", "y"]
    assert (launch.read_bytes, launch.written_bytes) == (97 * 2, 100 * 4)
    assert (launch.total("issued_read_bytes"), launch.total("issued_written_bytes")) == (97 * 2, 100 * 4)
    assert traffic.total("atomic_bytes") == 0
    assert "masked_copy_kernel" in traffic.table()


@triton.jit
def matmul_kernel(a, b, c, M, N, K, TILE: tl.constexpr):
    m = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    acc = tl.zeros([TILE, TILE], tl.float32)
    for k0 in range(0, K, TILE):
        k = k0 + tl.arange(0, TILE)
        left = tl.load(a + m * K + k[None, :], mask=(m < M) & (k < K)[None, :], other=0.0)
        right = tl.load(b + k[:, None] * N + n, mask=(k < K)[:, None] & (n < N), other=0.0)
        acc = tl.dot(left, right, acc)
    tl.store(c + m * N + n, acc.to(c.dtype.element_ty), mask=(m < M) & (n < N))


@triton.jit
def matmul_box_kernel(a, b, c, K, TILE: tl.constexpr):
    m = tl.program_id(0) * TILE
    n = tl.program_id(1) * TILE
    acc = tl.zeros([TILE, TILE], tl.float32)
    for k in range(0, K, TILE):
        acc = tl.dot(a.load([m, k]), b.load([k, n]), acc)
    c.store([m, n], acc.to(c.dtype))


@pytest.mark.parametrize("boxes", [False, True])
def test_traffic_of_a_matmul(boxes):
    """Issued by hand: each of the ceil(N/32) column tiles reads a again, each of the ceil(M/32) row tiles b."""
    torch.manual_seed(0)
    m, n, k = 40, 72, 48
    a, b, c = torch.randint(-8, 8, (m, k)).to(BF16), torch.randint(-8, 8, (k, n)).to(BF16), torch.empty(m, n, dtype=BF16)
    with count_traffic() as traffic:
        if boxes:
            box = [TensorDescriptor.from_tensor(t, [32, 32]) for t in (a, b, c)]
            matmul_box_kernel[(2, 3)](*box, k, TILE=32)
        else:
            matmul_kernel[(2, 3)](a, b, c, m, n, k, TILE=32)
    assert torch.equal(c, (a.float() @ b.float()).to(BF16))
    arguments = traffic.launches[0].arguments
    assert {name: (x.read_bytes, x.written_bytes) for name, x in arguments.items()} == {
        "a": (2 * m * k, 0), "b": (2 * k * n, 0), "c": (0, 2 * m * n),
    }  # fmt: skip
    assert (arguments["a"].issued_read_bytes, arguments["b"].issued_read_bytes) == (3 * 2 * m * k, 2 * 2 * k * n)
    assert arguments["c"].issued_written_bytes == 2 * m * n


def test_traffic_of_atomics_and_of_overlapping_arguments():
    x, index, out = torch.ones(16), torch.arange(16) % 5, torch.zeros(5)
    with count_traffic() as traffic:
        atomic_kernel[(2,)](x, out, index, BLOCK=16)
        both = torch.zeros(12)
        racy_kernel[(1,)](both[:8], both[4:], STEP=4)
    atomic, overlapping = traffic.launches
    out_traffic = atomic.arguments["out"]
    assert (out_traffic.read_bytes, out_traffic.written_bytes) == (5 * 4, 5 * 4)
    assert (out_traffic.atomic_bytes, out_traffic.issued_read_bytes) == (2 * 12 * 4, 2 * 12 * 4)
    assert atomic.total("write_races") == 0
    assert list(overlapping.arguments) == ["x|y"]
    assert overlapping.argument("y") is overlapping.arguments["x|y"]
    with pytest.raises(KeyError, match="no tensor argument z"):
        overlapping.argument("z")
    assert (overlapping.read_bytes, overlapping.written_bytes) == (16, 16)

"""The interpreter gives a kernel's numbers as a GPU would, and leaves kernels compilable."""

from __future__ import annotations

import warnings

import aot
import pytest
import torch
import triton
import triton.language as tl
from einops import einsum
from test_house import run_python
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedblock.interpret import interpret
from fusedblock.kernels import _launch
from fusedblock.kernels._target import TARGETS, target_of

BF16 = torch.bfloat16


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


# ---- bf16 --------------------------------------------------------------------------------------------------------------


@triton.jit
def block_and_scalar_mask_kernel(x, M, N, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, 1.0, (i < M) & (tl.program_id(0) * BLOCK < N))


def test_mask_of_a_block_and_a_scalar():
    x = torch.zeros(32)
    with interpret():
        block_and_scalar_mask_kernel[(1,)](x, 20, 32, BLOCK=32)
    assert x.tolist() == [1.0] * 20 + [0.0] * 12


@triton.jit
def arithmetic_kernel(x, y, out, N, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, a + b)
    tl.store(out + N + i, a - b)
    tl.store(out + 2 * N + i, a * b)
    tl.store(out + 3 * N + i, a / b)
    tl.store(out + 4 * N + i, tl.maximum(a, b))
    tl.store(out + 5 * N + i, -a)
    tl.store(out + 6 * N + i, tl.abs(a))
    tl.store(out + 7 * N + i, tl.where(a > b, a, b * 0.5))
    tl.store(out + 8 * N + i, tl.full([BLOCK], 0.3, tl.bfloat16) + a)


def test_bf16_arithmetic_equals_torch():
    torch.manual_seed(0)
    x, y = torch.randn(2, 1024, dtype=BF16) * 3
    out = torch.zeros(9, 1024, dtype=BF16)
    with interpret():
        arithmetic_kernel[(1,)](x, y, out, 1024, BLOCK=1024)
    third = torch.tensor(0.3, dtype=BF16)
    expected = [x + y, x - y, x * y, x / y, torch.maximum(x, y), -x, x.abs(), torch.where(x > y, x, y * 0.5), third + x]
    same(out, torch.stack(expected))


@triton.jit
def cast_kernel(x, y, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


def all_bf16_patterns() -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(BF16)


def near_bf16_patterns() -> torch.Tensor:
    """Every bf16 value as fp32, and with low halves just below, at and just above the middle to the next one."""
    high = torch.arange(2**16, dtype=torch.int64) << 16
    bits = torch.stack([high + low for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).flatten()
    return bits.to(torch.uint32).view(torch.float32)


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        pytest.param(near_bf16_patterns(), BF16, id="fp32-bf16"),
        pytest.param(all_bf16_patterns(), torch.float32, id="bf16-fp32"),
        pytest.param(all_bf16_patterns(), torch.float16, id="bf16-fp16"),
        pytest.param(all_bf16_patterns().double(), BF16, id="fp64-bf16"),
        pytest.param(all_bf16_patterns().view(torch.float16), BF16, id="fp16-bf16"),
        pytest.param(torch.arange(-(2**15), 2**15, dtype=torch.int32) * 77, BF16, id="int32-bf16"),
    ],
)
def test_casts_round_to_nearest_even(x, dtype):
    y = torch.zeros(x.shape, dtype=dtype)
    with interpret():
        cast_kernel[(x.numel() // 2**14,)](x, y, BLOCK=2**14)
    same(y, x.to(dtype))


@triton.jit
def dot_kernel(a, b, c, K: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, SIZE: tl.constexpr):
    m = tl.arange(0, SIZE)[:, None]
    n = tl.arange(0, SIZE)[None, :]
    k = tl.arange(0, K)
    acc = tl.zeros([SIZE, SIZE], ACC)
    acc = tl.dot(
        tl.load(a + m * K + k[None, :]), tl.load(b + k[:, None] * SIZE + n), acc, input_precision=PRECISION, out_dtype=ACC
    )
    tl.store(c + m * SIZE + n, acc.to(c.dtype.element_ty))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64])
def test_dot_of_integers_is_exact(dtype):
    """Small integers: every product and partial sum is exact, so no order of summation excuses a difference."""
    torch.manual_seed(0)
    a, b = torch.randint(-128, 128, (2, 32, 64)).to(dtype)
    b = b.T.contiguous()
    acc = torch.float64 if dtype is torch.float64 else torch.float32
    c = torch.empty(32, 32, dtype=acc)
    with interpret():
        dot_kernel[(1,)](a, b, c, 64, tl.float64 if acc is torch.float64 else tl.float32, "ieee", 32)
    same(c, einsum(a.to(acc), b.to(acc), "m k, k n -> m n"))


def test_fp64_dot_and_fp32_precisions():
    torch.manual_seed(0)
    a, b = torch.randn(2, 32, 32, dtype=torch.float64)
    c = torch.empty(32, 32, dtype=torch.float64)
    with interpret():
        dot_kernel[(1,)](a, b, c, 32, tl.float64, "ieee", 32)
    torch.testing.assert_close(c, a @ b, rtol=1e-13, atol=1e-13)
    # 1 + 2**-12 needs 12 mantissa bits: TF32 keeps 10.
    a32, b32, c32 = torch.full((32, 32), 1 + 2.0**-12), torch.eye(32), torch.empty(32, 32)
    with interpret():
        dot_kernel[(1,)](a32, b32, c32, 32, tl.float32, "ieee", 32)
        same(c32, a32)
        dot_kernel[(1,)](a32, b32, c32, 32, tl.float32, "tf32", 32)
        same(c32, torch.ones(32, 32))


@triton.jit
def reduce_kernel(x, out, scanned, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.arange(0, ROWS)
    i = r[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    v = tl.load(x + i)
    tl.store(out + r, tl.sum(v, 1))
    tl.store(out + ROWS + r, tl.max(v, 1))
    tl.store(out + 2 * ROWS + r, tl.min(v, 1))
    tl.store(out + 3 * ROWS + r, tl.argmax(v, 1).to(tl.float32))
    tl.store(scanned + i, tl.cumsum(v, 1))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64])
def test_reductions_and_scans(dtype):
    torch.manual_seed(0)
    x = torch.stack([torch.randperm(64)[:16] for _ in range(8)]).sub(32).to(dtype)
    out, scanned = torch.empty(4, 8), torch.empty(8, 16, dtype=dtype)
    with interpret():
        reduce_kernel[(1,)](x, out, scanned, 8, 16)
    f = x.float()
    same(out, torch.stack([f.sum(1), f.amax(1), f.amin(1), f.argmax(1).float()]))
    same(scanned, f.cumsum(1).to(dtype))


@triton.jit
def max_kernel(x, y, BLOCK: tl.constexpr):
    v = tl.load(x + tl.arange(0, BLOCK))
    tl.store(y, tl.max(v, 0))
    tl.store(y + 1, tl.sum(tl.maximum(v, 0.0), 0))


def test_nan_in_min_max_and_no_floating_point_warnings():
    x, y = torch.tensor([float("nan"), 3.0, -1.0, float("nan")]), torch.empty(2)
    with warnings.catch_warnings(), interpret():
        warnings.simplefilter("error")
        max_kernel[(1,)](x, y, BLOCK=4)
        same(y, torch.tensor([3.0, 3.0]))
        max_kernel[(1,)](torch.full((4,), float("nan")), y, BLOCK=4)
        same(y, torch.tensor([float("nan"), 0.0]))
        max_kernel[(1,)](torch.full((4,), float("-inf")), y, BLOCK=4)
        same(y, torch.tensor([float("-inf"), 0.0]))


@triton.jit
def atomic_kernel(x, out, index, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(out + tl.load(index + i), tl.load(x + i), mask=i < 12, sem="relaxed")


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float64])
def test_atomic_add_with_repeated_addresses(dtype):
    x, index, out = torch.arange(16).to(dtype), torch.arange(16) % 5, torch.zeros(5, dtype=dtype)
    with interpret():
        atomic_kernel[(2,)](x, out, index, BLOCK=16)
    expected = torch.zeros(5, dtype=torch.float64).index_add(0, index[:12], x[:12].double()) * 2
    same(out, expected.to(dtype))


# ---- float64, for gradcheck ---------------------------------------------------------------------------------------------


@triton.jit
def functions_kernel(x, out, scale, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    third = 0.3333333333333333
    tl.store(out + i, tl.exp2(v))
    tl.store(out + N + i, tl.exp(v) * scale)
    tl.store(out + 2 * N + i, tl.log2(tl.abs(v)) + third)
    tl.store(out + 3 * N + i, tl.erf(v))
    tl.store(out + 4 * N + i, libdevice.tanh(v))
    tl.store(out + 5 * N + i, tl.rsqrt(tl.abs(v)))
    tl.store(out + 6 * N + i, tl.sigmoid(v))
    tl.store(out + 7 * N + i, libdevice.erf(v))
    tl.store(out + 8 * N + i, libdevice.fast_dividef(1.0, v))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_functions_in_full_precision(dtype, tolerance):
    torch.manual_seed(0)
    x, out, scale = torch.randn(64, dtype=dtype), torch.empty(9, 64, dtype=dtype), 0.1
    with interpret():
        functions_kernel[(1,)](x, out, scale, N=64)
    d = x.double()
    expected = [d.exp2(), d.exp() * scale, d.abs().log2() + 1 / 3, d.erf(), d.tanh(), d.abs().rsqrt(), d.sigmoid(), d.erf(),
                d.reciprocal()]  # fmt: skip
    torch.testing.assert_close(out.double(), torch.stack(expected), rtol=tolerance, atol=tolerance)


# ---- masks and descriptors ------------------------------------------------------------------------------------------------


@triton.jit
def masked_copy_kernel(x, y, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < N - 3, other=7.0), mask=i < N)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_masks(dtype):
    x, y = torch.arange(100).to(dtype), torch.full((128,), -1.0, dtype=dtype)
    with interpret():
        masked_copy_kernel[(4,)](x, y, 100, BLOCK=32)
    same(y, torch.cat([x[:97], torch.full((3,), 7.0, dtype=dtype), torch.full((28,), -1.0, dtype=dtype)]))


@triton.jit
def box2_kernel(x, y, row, col):
    y.store([0, 0], x.load([row, col]))


@triton.jit
def box3_kernel(x, y, row, col):
    y.store([0, 0], x.load([1, row, col]).reshape(8, 16) + 1)


@triton.jit
def box4_kernel(x, y, row, col):
    y.store([0, 0], x.load([1, row, 2, col]).reshape(8, 16) + 1)


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize(("row", "col"), [(0, 0), (5, 16), (-3, 0), (64, 16)])
def test_host_descriptors_fill_with_zeros_and_clip(dtype, rank, row, col):
    torch.manual_seed(0)
    shape = {2: (10, 24), 3: (2, 10, 24), 4: (2, 10, 3, 24)}[rank]
    block = {2: [8, 16], 3: [1, 8, 16], 4: [1, 8, 1, 16]}[rank]
    x = torch.randn(shape).to(dtype)
    y = torch.full((6, 16), -1.0).to(dtype)  # two rows fewer than the box: they are clipped
    kernel = {2: box2_kernel, 3: box3_kernel, 4: box4_kernel}[rank]
    with interpret():
        kernel[(1,)](TensorDescriptor.from_tensor(x, block), TensorDescriptor.from_tensor(y, [8, 16]), row, col)
    plane = x if rank == 2 else x[1] if rank == 3 else x[1, :, 2]
    expected = torch.zeros(8, 16, dtype=dtype)
    for i in range(8):
        for j in range(16):
            if 0 <= row + i < 10 and col + j < 24:
                expected[i, j] = plane[row + i, col + j]
    same(y, (expected + (rank > 2))[:6])


@triton.jit
def pipelined_kernel(x, y, N, BLOCK: tl.constexpr):
    """Loop hints, and a loop variable that is a tensor, as it is when compiled."""
    acc = tl.zeros([16, BLOCK], tl.float32)
    for i in tl.range(0, N, BLOCK, num_stages=3, flatten=True):
        acc += x.load([0, i]).to(tl.float32) * (i // BLOCK + 1).to(tl.float32)
    for i in range(2):
        acc += i.to(tl.float32)
    tl.store(y + tl.arange(0, 16)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], acc)


def test_range_with_hints():
    x, y = torch.randn(16, 64).to(BF16), torch.empty(16, 16)
    with interpret():
        pipelined_kernel[(1,)](TensorDescriptor.from_tensor(x, [16, 16]), y, 64, 16)
    a, b, c, d = x.float().split(16, dim=1)
    same(y, a + 2 * b + 3 * c + 4 * d + 1)


# ---- Python as the compiler reads it ------------------------------------------------------------------------------------


@triton.jit
def double(x, ON: tl.constexpr = True):
    return x * 2 if ON else x


@triton.jit
def twice_double(x):
    y = double(x)
    return double(y) + double(x, ON=False)


@triton.jit
def logic_kernel(x, y, LIMIT, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    inside = i < LIMIT
    low = i > 1
    keep = inside and low
    v = tl.load(x + i)
    v = twice_double(v)
    if LIMIT > 2 and not LIMIT > 100:
        v += 1
    size = min(tl.program_id(0) + 5, LIMIT)
    tl.store(y + i, v + max(size, 0), mask=keep or not inside)


def test_nested_helpers_and_logic_on_tensors():
    x, y = torch.arange(16.0), torch.full((16,), -1.0)
    with interpret():
        logic_kernel[(1,)](x, y, 8, BLOCK=16)
    expected = 5 * x + 1 + 5
    expected[:2] = -1
    same(y, expected)


def test_kernels_and_helpers_defined_in_a_function():
    offset = tl.constexpr(3)

    @triton.jit
    def helper(x):
        return x + offset

    @triton.jit
    def kernel(y):
        tl.store(y, helper(1.0))

    y = torch.zeros(1)
    with interpret():
        kernel[(1,)](y)
    assert y.item() == 4


@triton.jit
def one_kernel(y, N):
    tl.store(y, N.to(tl.int64))


@triton.jit
def block_truth_kernel(y, N):
    if tl.arange(0, 4) < N:
        tl.store(y, 1)


@triton.jit
def chained_kernel(y, N):
    tl.store(y, 1, mask=0 < N < 9)


@pytest.mark.parametrize(
    ("kernel", "n", "error", "message"),
    [
        (one_kernel, 1, AttributeError, "to"),  # an argument equal to 1 is a constant when compiled
        (block_truth_kernel, 3, ValueError, "truth value"),
        (chained_kernel, 3, SyntaxError, "chained"),
    ],
)
def test_what_does_not_compile_is_not_interpreted_either(kernel, n, error, message):
    y = torch.zeros(1, dtype=torch.int64)
    with interpret(), pytest.raises(error, match=message):
        kernel[(1,)](y, n)


def test_an_argument_above_one_is_a_tensor():
    y = torch.zeros(1, dtype=torch.int64)
    with interpret():
        one_kernel[(1,)](y, 2**40)
    assert y.item() == 2**40


@triton.jit
def float_argument_kernel(x, y, scale):
    tl.store(y, tl.load(x) * scale)


def test_a_float_argument_is_fp32():
    """bf16 * fp32 is fp32 when compiled; a Python number would have become bf16."""
    x, y = torch.tensor([3.0], dtype=BF16), torch.zeros(1)
    with interpret():
        float_argument_kernel[(1,)](x, y, 0.1)
    same(y, torch.tensor([3.0]) * 0.1)


# ---- the context --------------------------------------------------------------------------------------------------------


def test_the_same_kernel_compiles_before_and_after(monkeypatch):
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    x, y = torch.arange(16.0), torch.full((16,), -1.0)
    names = dict(logic_kernel.fn.__globals__)

    def compiled() -> str:
        logic_kernel.device_caches.clear()
        with warnings.catch_warnings(), aot.compile_only(TARGETS["sm_80"]) as kernels:
            warnings.simplefilter("ignore")  # triton's own, on `and` between blocks
            logic_kernel[(1,)](x, y, 8, BLOCK=16)
        return kernels[0].asm["ptx"]

    before = compiled()
    with interpret():
        logic_kernel[(1,)](x, y, 8, BLOCK=16)
    assert compiled() == before
    assert "st.global" in before
    assert logic_kernel.fn.__globals__ == names, "interpreting added names to the kernel's module"


def test_mode_and_target_hold_inside_and_end_with_the_context():
    x, load, empty = torch.zeros(1), tl.load, torch.empty
    assert not _launch.runs_kernels(x)
    with interpret(TARGETS["sm_80"]):
        assert _launch.runs_kernels(x)
        assert target_of(x.device) == TARGETS["sm_80"]
        with interpret(TARGETS["sm_86"]):
            assert target_of(x.device) == TARGETS["sm_86"]
        assert target_of(x.device) == TARGETS["sm_80"]
    with pytest.raises(ZeroDivisionError), interpret():
        1 / 0  # noqa: B018
    assert not _launch.runs_kernels(x)
    assert target_of(x.device) == TARGETS["sm_90"]
    assert tl.load is load
    assert torch.empty is empty
    assert "new_empty" not in torch.Tensor.__dict__
    with pytest.raises(RuntimeError, match="active drivers"):
        masked_copy_kernel[(1,)](x, x, 1, BLOCK=32)


def test_device_contexts_work_after_their_first_use_inside():
    """In a process of its own: torch looks at its functions once."""
    use = "with torch.device('meta'):\n        assert torch.empty(0).is_meta"
    run_python(f"import torch\nfrom fusedblock.interpret import interpret\nwith interpret():\n    {use}\nif True:\n    {use}")



@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64])
def test_poison_shows_unwritten_elements(dtype):
    x = torch.ones(16, dtype=dtype)
    with interpret():
        for made in (
            torch.empty(16, dtype=dtype),
            torch.empty_like(x),
            torch.empty_strided((4, 4), (4, 1), dtype=dtype),
            x.new_empty(16),
            x.new_empty_strided((4, 4), (8, 1)),
        ):
            assert made.isnan().all()
        y = torch.empty(16, dtype=dtype)
        masked_copy_kernel[(1,)](x, y, 10, BLOCK=16)
        assert y.isnan().tolist() == [False] * 10 + [True] * 6
        assert torch.empty(0, dtype=dtype).numel() == 0
        assert torch.empty(3, dtype=torch.int32).dtype is torch.int32
        assert torch.empty(3, device="meta").is_meta


def test_launch_hooks_and_grids():
    seen = []
    x, y = torch.zeros(100), torch.zeros(100)
    with interpret(on_launch=[seen.append]):
        masked_copy_kernel[lambda meta: (triton.cdiv(meta["N"], meta["BLOCK"]),)](x, y, 100, BLOCK=32)
        with interpret():
            masked_copy_kernel[(1, 1, 1)](x, y, N=20, BLOCK=32)
    assert [(launch.kernel, launch.grid, launch.arguments["N"]) for launch in seen] == [
        ("masked_copy_kernel", (4, 1, 1), 100),
        ("masked_copy_kernel", (1, 1, 1), 20),
    ]

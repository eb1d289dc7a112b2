"""Equal bits where an option promises them: batch_invariant (whatever is computed beside a row) and deterministic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import op_cases
import pytest
import torch
from layer_cases import LLAMA, LLAMA_8B, VARIANTS, make_weights
from layer_cases import inputs as layer_inputs
from op_cases import DTYPES, randn, recording, rotary_tables
from torch import Tensor

import fusedblock
from fusedblock import blocks
from fusedblock.blocks import BlockSpec, BlockWeights
from fusedblock.interpret import interpreter
from fusedblock.interpret.memory import Access
from fusedblock.kernels import _gemm
from fusedblock.kernels._target import TARGETS, Target, override, target_of

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, ROWS = 136, 72, 4, 2, 32, 300
# (first row, rows): alone, a few, across tiles, all.
PIECES = ((0, 1), (69, 1), (299, 1), (4, 3), (131, 70), (0, ROWS))
Rows = Callable[[Tensor], tuple[Tensor, ...]]


def row_ops(dtype: torch.dtype, device: str = "cpu") -> dict[str, tuple[Tensor, Rows]]:
    """Operator -> 300 rows, and a function of any of them that returns results `rows ...`."""
    g = torch.Generator().manual_seed(0)

    def rand(*shape: int, scale: float = 1.0) -> Tensor:
        return randn(*shape, dtype=dtype, generator=g, scale=scale).to(device)

    x = rand(ROWS, HIDDEN)
    # A row tells its own position and residual, so that a piece of the rows has the same.
    q_width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    weights = [rand(n, HIDDEN, scale=HIDDEN**-0.5) for n in (FFN, FFN, q_width, kv_width, kv_width)]
    bias, gamma = rand(FFN), rand(HIDDEN)
    cos, sin = (t[..., : HEAD_DIM // 2].to(device) for t in rotary_tables(1, ROWS, HEAD_DIM, dtype))

    def qkv(rows: Tensor) -> tuple[Tensor, ...]:
        at = [int((x == row).all(1).nonzero()[0]) for row in rows]
        q, k, v = fusedblock.qkv_rope(rows[None], *weights[2:], cos[:, at], sin[:, at], head_dim=HEAD_DIM)
        return q[0], k[0], v[0]

    return {
        "linear": (x, lambda rows: (fusedblock.linear(rows, weights[0], bias, residual=rows[:, :FFN]),)),
        "gated_mlp": (x, lambda rows: (fusedblock.gated_mlp(rows, *weights[:2]),)),
        "rms_norm": (x, lambda rows: (fusedblock.rms_norm(rows, gamma),)),
        "qkv_rope": (x, qkv),
    }  # fmt: skip


@pytest.mark.parametrize("target", ["sm_90", pytest.param("sm_80", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["linear", "gated_mlp", "rms_norm", "qkv_rope"])
def test_a_token_has_the_same_bits_alone_and_in_a_batch(op: str, dtype: torch.dtype, target: str) -> None:
    x, function = row_ops(dtype)[op]
    with torch.no_grad(), fusedblock.options(batch_invariant=True), recording(TARGETS[target]):
        whole = function(x)
        for first, count in PIECES:
            for got, want in zip(function(x[first : first + count]), whole):
                assert torch.equal(got, want[first : first + count]), (first, count)


def attention_inputs(dtype: torch.dtype, seq: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    q = randn(2, seq, HEADS, HEAD_DIM, dtype=dtype, generator=g)
    return q, *(randn(2, seq, KV_HEADS, HEAD_DIM, dtype=dtype, generator=g) for _ in range(2))


@pytest.mark.parametrize("target", ["sm_90", "sm_80"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_prefill_and_in_decode(dtype: torch.dtype, target: str) -> None:
    q, k, v = attention_inputs(dtype)
    seen = torch.ones(2, q.shape[1], dtype=torch.bool)
    with torch.no_grad(), fusedblock.options(batch_invariant=True), recording(TARGETS[target]) as launches:
        whole = fusedblock.attention(q, k, v, causal=True)
        for i, causal in ((0, True), (63, False), (64, True), (199, False)):  # decode: one query over the keys so far
            got = fusedblock.attention(q[:, i : i + 1], k[:, : i + 1], v[:, : i + 1], causal=causal)
            assert torch.equal(got, whole[:, i : i + 1]), i
        alone = fusedblock.attention(q[1:, 99:100], k[1:, :100], v[1:, :100], mask=seen[1:, :100])
        assert torch.equal(alone, whole[1:, 99:100])
        chunk = fusedblock.attention(q[:, 131:], k, v, causal=True, mask=seen)
        assert torch.equal(chunk, whole[:, 131:])
    assert {launch.kernel for launch in launches} == {"_forward_kernel"}


class Cache:
    """Keys and values `batch kv_heads context head_dim` so far, as HF's."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def update(self, *new: Tensor) -> tuple[Tensor, ...]:
        self.kept = [torch.cat((old, t), 2) for old, t in zip(self.kept, new)] if self.kept else list(new)
        return tuple(self.kept)


def check_layer(spec: BlockSpec, dtype: torch.dtype, device: str, seq: int, prompt: int) -> None:
    """A layer's prefill of two sequences beside each of them alone, and beside a shorter prefill with decode steps after it."""
    weights = BlockWeights(*(None if t is None else t.to(device) for t in make_weights(spec, dtype)))
    x, *tables = (t.to(device) for t in layer_inputs(spec, dtype, 2, seq))

    def run(first: int, end: int, item: slice = slice(None), cache: Cache | None = None) -> Tensor:
        update = cache.update if cache else None
        cut = [t[:, first:end] for t in tables]
        return blocks.forward(spec, weights, x[item, first:end], *cut, causal=end - first > 1, update=update)

    with torch.no_grad(), fusedblock.options(batch_invariant=True):
        whole = run(0, seq)
        for item in (slice(0, 1), slice(1, 2)):
            assert torch.equal(run(0, seq, item), whole[item])
        cache = Cache()
        assert torch.equal(run(0, prompt, cache=cache), whole[:, :prompt])
        for i in range(prompt, seq):
            assert torch.equal(run(i, i + 1, cache=cache), whole[:, i : i + 1]), i


@pytest.mark.parametrize("spec", [LLAMA, VARIANTS["conv1d"], VARIANTS["norms_after"]], ids=["llama", "conv1d", "norms_after"])
def test_a_server_gives_a_layer_the_same_bits_whatever_it_batches(spec: BlockSpec) -> None:
    with recording(TARGETS["sm_90"]):
        check_layer(spec, torch.bfloat16, "cpu", 70, 67)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", [LLAMA, VARIANTS["conv1d"], LLAMA_8B], ids=["llama", "conv1d", "8B"])
def test_a_server_gives_a_layer_the_same_bits_on_a_gpu(spec: BlockSpec, dtype: torch.dtype) -> None:
    check_layer(spec, dtype, "cuda", 300, 290)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["linear", "gated_mlp", "rms_norm", "qkv_rope"])
def test_a_token_has_the_same_bits_alone_and_in_a_batch_on_a_gpu(op: str, dtype: torch.dtype) -> None:
    x, function = row_ops(dtype, "cuda")[op]
    with torch.no_grad(), fusedblock.options(batch_invariant=True):
        whole = function(x)
        for first, count in PIECES:
            for got, want in zip(function(x[first : first + count]), whole):
                assert torch.equal(got, want[first : first + count]), (first, count)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_the_option_bits_depend_on_the_batch(dtype: torch.dtype) -> None:
    """So that the tests above could fail: other tiles for few rows, and other bits somewhere."""
    x, function = row_ops(dtype)["linear"]
    q, k, v = attention_inputs(dtype)
    with torch.no_grad(), recording(TARGETS["sm_90"]) as launches:
        function(x[:1]), function(x)
        assert len({tuple(launch.arguments[n] for n in ("BM", "BN", "BK")) for launch in launches}) == 2
        decode = fusedblock.attention(q[:, -1:], k, v)
        assert not torch.equal(decode, fusedblock.attention(q, k, v, causal=True)[:, -1:])
    with torch.no_grad(), fusedblock.options(batch_invariant=True), recording(TARGETS["sm_90"]) as launches:
        function(x[:1]), function(x)
        assert len({tuple(launch.arguments[n] for n in ("BM", "BN", "BK")) for launch in launches}) == 1


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_one_tile_of_64_rows_for_every_row_count(itemsize: int, target: Target) -> None:
    with fusedblock.options(batch_invariant=True):
        with override(target):
            asked = target_of(torch.device("cpu"))
    assert asked.batch_invariant and not target.batch_invariant
    for kind in ("nt", "pair", "nn"):
        (config,) = {_gemm.configure(m, itemsize, asked, kind) for m in (1, 16, 17, 64, 65, 300, 5000, 1 << 20)}
        assert config.block_m >= 64 and not config.tma
        shipped = [c for _, c in _gemm.tables(itemsize, target)[kind]]
        assert config in {form for c in shipped for form in (c, _gemm.usable(c, torch.empty(0)))}  # compiled in test_gemm_aot
        assert config.smem_bytes(itemsize) <= target.smem_bytes


def test_a_backward_runs_under_the_options_of_its_forward() -> None:
    x = torch.randn(5, 24, requires_grad=True)
    with recording(TARGETS["sm_90"]) as launches:
        with fusedblock.options(batch_invariant=True):
            y = fusedblock.linear(x.bfloat16(), torch.randn(40, 24).bfloat16())
        torch.autograd.grad(y.sum(), x)
    assert [int(launch.arguments["BM"]) for launch in launches] == [64, 64]


# ---- deterministic


@contextmanager
def last_program_first() -> Iterator[None]:
    """The interpreter's programs in the reverse order."""
    builder = interpreter.builder
    place = builder.set_grid_idx

    def reverse(*at: int) -> None:
        place(*(n - 1 - i for n, i in zip(builder.grid_dim, at)))

    builder.set_grid_idx = reverse
    try:
        yield
    finally:
        del builder.set_grid_idx


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", op_cases.SMALL, ids=lambda case: case.id)
def test_results_and_gradients_repeat_whatever_program_comes_first(case: op_cases.Case, dtype: torch.dtype) -> None:
    """A GPU runs the programs of a launch in any order: neither order may show in a single bit. Atomics only count."""
    args = case.arguments(dtype)
    added_to: set[str] = set()

    def note(access: Access) -> None:
        if access.kind == "atomic":
            added_to.add(access.region.name)

    with fusedblock.options(deterministic=True):
        with op_cases.interpret(op_cases.FEW_SMS["sm_90"], on_access=[note]):
            first = op_cases.with_gradients(case.op, args)
        with op_cases.interpret(op_cases.FEW_SMS["sm_90"]), last_program_first():
            second = op_cases.with_gradients(case.op, args)
    assert added_to <= {"arrived"}
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_the_reverse_order_is_one() -> None:
    seen: list[int] = []
    x, weight = torch.randn(3, 32), torch.randn(192, 32)  # three tiles of 64 columns
    with op_cases.interpret(TARGETS["sm_80"], on_access=[lambda access: seen.append(access.program)]), last_program_first():
        fusedblock.linear(x, weight)
    assert list(dict.fromkeys(seen)) == [2, 1, 0]

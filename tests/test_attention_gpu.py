"""The cases of attention_cases.py on a GPU, and what only a GPU shows: no sync, streams, equal bits, memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attention_cases import FP8, Case, alone, by_op, check, exact, head_dims, pairs, public, sizes, with_gradients
from test_attention_variants import IMPOSSIBLE, head_major, impossible, last_major, sliced

import fusedblock
from fusedblock.kernels import _launch
from fusedblock.kernels._attention_skeleton import forced

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
SIZE = {"seq": 200, "context": 300, "head_dim": 64, "lengths": ((130, 70), (0, 5), (1, 1), (33, 200), (140, 140))}
FEW = {**SIZE, "seq": 3, "context": 2000, "lengths": ((1, 900), (1, 0), (1, 17), (1, 1)), "forward": True}


def cases(values: list[Case]):
    return pytest.mark.parametrize("case", values, ids=[f"{n}-{c}" for n, c in enumerate(values)])


@pytest.fixture(scope="module", autouse=True)
def exact_products():
    """Plain torch runs on the CPU here; fp64 takes the reference on the GPU."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(autouse=True)
def portable() -> Iterator[None]:
    """On a GPU as in the interpreter; test_attention_hopper_gpu.py is for the others."""
    with forced("portable", torch.device("cuda")) if torch.cuda.is_available() else contextlib.nullcontext():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@cases(alone(**SIZE))
def test_alone(case, dtype):
    check(case if case.dtype is FP8 else replace(case, dtype=dtype), "cuda")


@cases(pairs(every=False, **SIZE, dtype=BF16))
def test_pairs(case):
    check(case, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@cases([c for c in alone(**FEW) if not c.block_map])
def test_few_queries(case, dtype):
    check(case if case.dtype is FP8 else replace(case, dtype=dtype), "cuda")


@cases([c for c in alone(**SIZE, dtype=BF16) if c.forward_only])
def test_tiles_without_gradients(case):
    check(case, "cuda", by_op())


@cases([*sizes(dtype=BF16, head_dim=64), *head_dims(seq=150, context=300), *head_dims(torch.float16, seq=150, context=300),
        *head_dims(torch.float32, seq=60, context=130)])  # fmt: skip
def test_sizes(case):
    check(case, "cuda")


@pytest.mark.parametrize("layout", [head_major, last_major, sliced])
@cases([Case(**SIZE, dtype=BF16, layout=layout) for layout in ("batched", "packed", "paged")])
def test_strides(case, layout):
    check(case, "cuda", layout=layout)


@cases([Case(**SIZE, layout="packed", sinks=True), Case(**SIZE, layout="paged"), Case(**SIZE, bias="row", dropout=0.2)])
def test_float64_takes_the_reference(case):
    before = _launch.launched_variants()
    check(replace(case, dtype=torch.float64), "cuda")
    assert _launch.launched_variants() == before


def on_gpu(x):
    return x.changed(lambda t: t.cuda())


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_lengths(name):
    arg, x = impossible(name)
    x = on_gpu(x)
    got = with_gradients(public, x)
    broken = slice(None) if arg.startswith("cu_seqlens") else 1 if name.endswith("negative") else 0
    assert all(t[broken].isnan().all() for n, t in got.items() if n in ("out", "grad_q", "grad_k", "grad_v"))
    torch.cuda.synchronize()
    with fusedblock.options(debug=True), pytest.raises(ValueError, match=arg):
        public(x)


ONE_EACH = Case(**{**SIZE, "lengths": ((1, 90), (1, 0), (1, 17))}, layout="packed-paged")


@cases([*(Case(**SIZE, dtype=BF16, **more) for more in (
    {"layout": "packed", "causal": True, "dropout": 0.1}, {"layout": "paged"}, {"block_map": "heads"},
    {"seqused": True, "sinks": True, "bias": "row"},
)), ONE_EACH])  # fmt: skip
def test_no_sync(case):
    x = on_gpu(case.inputs())
    run = lambda y: fusedblock.attention(y.q, y.k, y.v, **y.keywords(), return_lse=True)
    with_gradients(run, x)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        with_gradients(run, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("used", [(1, 1, 1), (1, 0, 1)])
def test_one_packed_query_each(used):
    case = replace(ONE_EACH, lengths=tuple(zip(used, (90, 40, 17))), sinks=True)
    x = on_gpu(case.inputs())
    x.q = x.q[:3]
    keywords = {**x.keywords(), "max_seqlen_q": 1}
    assert fusedblock.explain_attention(x.q, x.k, x.v, **keywords).splits
    out = fusedblock.attention(x.q, x.k, x.v, **keywords)
    torch.testing.assert_close(out[: sum(used)].cpu().double(), exact(case)["out"][: sum(used)], rtol=1e-5, atol=1e-5)
    assert (out[sum(used) :] == 0).all()


@cases([Case(**SIZE, layout="packed", causal=True, dtype=BF16), Case(**SIZE, bias="both", sinks=True, dropout=0.1, dtype=BF16)])
def test_equal_bits_over_a_hundred_runs(case):
    x = on_gpu(case.inputs())
    first = with_gradients(public, x)
    for _ in range(100):
        again = with_gradients(public, x)
        assert all(torch.equal(again[n], first[n]) for n in first)


def test_side_stream():
    x = on_gpu(Case(**SIZE, layout="packed", dtype=BF16).inputs())
    want = with_gradients(public, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = with_gradients(public, x)
    stream.synchronize()
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device():
    case = Case(**SIZE, layout="packed", dtype=BF16)
    want, got = (with_gradients(public, case.inputs().changed(lambda t, d=d: t.to(d))) for d in ("cuda:0", "cuda:1"))
    assert all(torch.equal(got[n].cpu(), want[n].cpu()) for n in want)


def peak(seq: int, **more: object) -> int:
    x = [torch.randn(1, seq, 4, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fusedblock.attention(*x, causal=True, **more).sum().backward()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("more", [{}, {"window": (128, 0)}, {"softcap": 20.0, "dropout_p": 0.1}], ids=str)
def test_memory_grows_with_the_length_alone(more):
    peak(1024, **more)
    small, large = peak(8192, **more), peak(32768, **more)
    assert large < 4.2 * small and small < 8192 * 8192


def test_packed_tokens_beyond_32_bits():
    """The last sequences of so many tokens that 32 bits cannot address them, against the same sequences alone."""
    length, heads, head_dim = 64, 8, 128
    sequences = 2**31 // (length * heads * head_dim) + 8
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of free GPU memory")
    g = torch.Generator("cuda").manual_seed(0)
    shape = (sequences * length, heads, head_dim)
    q, grad = (torch.randn(*shape, generator=g, device="cuda", dtype=BF16) for _ in range(2))
    k, v = (torch.randn(shape[0], 1, head_dim, generator=g, device="cuda", dtype=BF16) for _ in range(2))
    assert q.numel() > 2**31

    def run(n: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *leaves, grad_out = (t.detach().requires_grad_() for t in tensors)
        cu = torch.arange(0, (n + 1) * length, length, device="cuda", dtype=torch.int32)
        out = fusedblock.attention(*leaves, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)
        return out.detach(), *torch.autograd.grad(out, leaves, grad_out.detach())

    whole = run(sequences, q, k, v, grad)
    part = run(2, *(t[-2 * length :].clone() for t in (q, k, v, grad)))
    assert all(torch.equal(a[-2 * length :], b) for a, b in zip(whole, part))

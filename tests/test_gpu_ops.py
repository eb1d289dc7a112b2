"""The norm and GEMM ops and whole layers on a GPU, against float64 there: what the interpreter cannot show."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import gpu_jobs
import pytest
import torch
from gpu_jobs import JOBS, SHAPES
from layer_cases import GEMMA, LLAMA, LLAMA_8B, VARIANTS, in_float64, inputs, make_weights, plain_layer, run
from op_cases import SMALL, assert_accurate, backward_arguments, error, to
from torch import Tensor

from fusedblock import blocks, ops
from fusedblock.blocks import BlockSpec
from fusedblock.kernels import _graphs, _launch
from fusedblock.ops import OPS

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def compiled() -> Iterator[None]:
    # Plain torch, which sets the allowed error, gets no slack either.
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32, matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_tf32 = matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = False
    with gpu_jobs.compiled_ahead():
        yield
    matmul.allow_tf32, matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = before


@pytest.fixture
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN, also in the workspace of replayed launches."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(4, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.id)
def test_op(job):
    job.check("cuda")


@pytest.mark.parametrize("case", [c for c in SMALL if c.op != "attention"], ids=lambda c: c.id)
def test_float64_takes_the_reference(case):
    """fp64 exists for gradcheck on a CPU: on a GPU no kernel is compiled for it."""
    args = to(case.arguments(torch.float64), device="cuda")
    before = _launch.launched_variants()
    out = getattr(torch.ops.fusedblock, case.op).default(*args.values())
    for got, want in zip((out,) if isinstance(out, Tensor) else out, OPS[case.op].reference(**args), strict=True):
        assert torch.equal(got, want)
    assert _launch.launched_variants() == before


@pytest.mark.parametrize("job", [j for j in JOBS if j.gradients and j.config is None and j.dtype is BF16], ids=lambda job: job.id)
def test_backward_gives_equal_bits(job):
    backward = OPS[job.case.op].backward
    args = backward_arguments(job.case.op, job.arguments("cuda"))
    first = backward.launch(**args)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, backward.launch(**args), strict=True))


# ---- compiled kernels are found by the right facts ---------------------------------------------------------------------------


def test_calls_of_other_alignment_and_strides_between_equal_ones():
    """Each layout finds or compiles a kernel of its own, and none is used for another's addresses."""
    g = torch.Generator().manual_seed(0)
    values = torch.randn(150, 264, generator=g).to("cuda", BF16)
    weight = (torch.randn(136, 264, generator=g) / 16).to("cuda", BF16)
    wide = torch.zeros(150, 300, device="cuda", dtype=BF16)
    flat = torch.zeros(150 * 264 + 8, device="cuda", dtype=BF16)

    def padded(offset: int) -> Tensor:
        wide.fill_(float("nan"))
        return wide[:, offset : offset + 264].copy_(values)

    def shifted(offset: int) -> Tensor:
        return flat[offset : offset + 150 * 264].view(150, 264).copy_(values)

    layouts: list[Callable[[], Tensor]] = [
        values.clone, lambda: padded(8), lambda: padded(4), lambda: padded(3), lambda: shifted(1), lambda: shifted(8),
        lambda: values.t().contiguous().t(), lambda: values[:, :263].contiguous(), lambda: values[:16].clone(),
        lambda: values[:1].clone(),
    ]  # fmt: skip
    variants = []
    for _ in range(3):
        for layout in layouts:
            x = layout()
            want = x.double() @ weight[:, : x.shape[1]].double().t()
            assert error(ops.linear(x, weight[:, : x.shape[1]]), want) < 4e-3
            assert error(ops.rms_norm(x, weight[0, : x.shape[1]], round_early=False), norm64(x, weight[0, : x.shape[1]])) < 4e-3
        variants.append(_launch.launched_variants())
    assert variants[0] == variants[1] == variants[2]


def norm64(x: Tensor, w: Tensor) -> Tensor:
    x, w = x.double(), w.double()
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w


def test_gate_and_up_wherever_they_lie():
    """Their distance is the stride of one descriptor: new allocations in either order, beside one another and far apart."""
    g = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(*s, generator=g).to("cuda", BF16) for s in ((300, 136), (264, 136), (264, 136)))
    want = torch.nn.functional.silu(x.double() @ a.double().t()) * (x.double() @ b.double().t())
    buffer = torch.zeros(2**30, device="cuda", dtype=BF16)
    size = a.numel()
    for gate_at, up_at in ((0, size), (size, 0), (0, 2**30 - size), (2**30 - size, 0), (0, size + 8), (0, size + 4)):
        gate, up = (buffer[at : at + size].view(264, 136).copy_(t) for at, t in ((gate_at, a), (up_at, b)))
        assert error(ops.gated_mlp(x, gate, up), want) < 6e-3
    same = torch.nn.functional.silu(x.double() @ a.double().t()) * (x.double() @ a.double().t())
    assert error(ops.gated_mlp(x, a, a), same) < 6e-3


# ---- streams and sizes -------------------------------------------------------------------------------------------------------


def on_side_stream(produce: Callable[[], Tensor], consume: Callable[[Tensor], Tensor]) -> Tensor:
    """consume() right behind a producer that the GPU has not finished, both on a stream of their own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        out = consume(produce())
    torch.cuda.current_stream().wait_stream(stream)
    return out


@pytest.mark.parametrize("tokens", [13, 300])
def test_ops_run_on_the_current_stream(tokens):
    g = torch.Generator().manual_seed(0)
    x, w, u = (torch.randn(*s, generator=g).to("cuda", BF16) for s in ((tokens, 136), (264, 136), (264, 136)))
    buffer = torch.full_like(x, float("nan"))

    def double() -> Tensor:
        return torch.mul(x, 2, out=buffer)

    for op in (lambda t: ops.linear(t, w), lambda t: ops.gated_mlp(t, w, u), lambda t: ops.rms_norm(t, w[0])):
        want = op(x * 2)
        torch.cuda.synchronize()
        for _ in range(2):  # compiled and cached launches alike
            assert torch.equal(on_side_stream(double, op), want)
            buffer.fill_(float("nan"))


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 60 << 30, reason="needs 60 GB of GPU memory")
def test_more_than_two_to_the_31_elements():
    g = torch.Generator().manual_seed(0)
    x, w, u = (torch.randn(*s, generator=g).to("cuda", BF16) / 8 for s in ((70_001, 64), (32_768, 64), (32_768, 64)))
    last = x[-300:].double()
    out = ops.linear(x, w)
    assert out.numel() > 2**31
    assert error(out[-300:], last @ w.double().t()) < 4e-3
    del out
    out = ops.gated_mlp(x, w, u)
    assert error(out[-300:], torch.nn.functional.silu(last @ w.double().t()) * (last @ u.double().t())) < 6e-3
    weight = torch.randn(32_768, generator=g).to("cuda", BF16)
    normed = ops.rms_norm(out, weight, round_early=False)
    assert error(normed[-300:], norm64(out[-300:], weight)) < 4e-3
    del normed
    (grad,) = torch.autograd.grad(ops.rms_norm(out.requires_grad_(), weight, round_early=False), out, out.detach())
    rows = out[-300:].detach().double().requires_grad_()
    (want,) = torch.autograd.grad(norm64(rows, weight), rows, rows.detach())
    assert error(grad[-300:], want) < 8e-3


# ---- layers ------------------------------------------------------------------------------------------------------------------


def moved(value, device: str = "cuda"):
    return (
        type(value)(*[None if t is None else t.to(device) for t in value])
        if hasattr(value, "_fields")
        else tuple(t.to(device) for t in value)
    )


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_layer_of_llama_8b(dtype, gradients):
    w, given = moved(make_weights(LLAMA_8B, dtype)), moved(inputs(LLAMA_8B, dtype, 1, 300))
    got = run(blocks.forward, LLAMA_8B, w, given, gradients)
    want = run(plain_layer, LLAMA_8B, in_float64(w), tuple(map(in_float64, given)), gradients)
    assert_accurate(got, want, run(plain_layer, LLAMA_8B, w, given, gradients), dtype)


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_of_a_variant(name):
    spec = VARIANTS[name]
    w, given = moved(make_weights(spec, BF16)), moved(inputs(spec, BF16, 2, 75))
    got = run(blocks.forward, spec, w, given, True)
    want = run(plain_layer, spec, in_float64(w), tuple(map(in_float64, given)), True)
    assert_accurate(got, want, run(plain_layer, spec, w, given, True), BF16)


LAYOUTS = [
    *((spec, *shape) for spec in (LLAMA, GEMMA) for shape in SHAPES),
    *((spec, 2, 75) for spec in VARIANTS.values()),
]
NAMES = {LLAMA: "llama", GEMMA: "gemma", **{spec: name for name, spec in VARIANTS.items()}}


@pytest.mark.parametrize(("spec", "batch", "seq"), LAYOUTS, ids=lambda v: NAMES.get(v) if isinstance(v, BlockSpec) else None)
def test_layer_recorded_and_replayed(spec, batch, seq, poisoned):
    """The second run of a layout replays the first one's launches: equal bits, also for new tensors and on another stream."""
    w, given = moved(make_weights(spec, BF16)), moved(inputs(spec, BF16, batch, seq))
    first = run(blocks.forward, spec, w, given, False)["out"]
    want = run(plain_layer, spec, in_float64(w), tuple(map(in_float64, given)), False)["out"]
    plain = run(plain_layer, spec, w, given, False)["out"]
    assert_accurate({"out": first}, {"out": want}, {"out": plain}, BF16)
    for _ in range(3):
        assert torch.equal(run(blocks.forward, spec, w, given, False)["out"], first)
    again = tuple(t.clone() for t in given)
    assert torch.equal(run(blocks.forward, spec, w, again, False)["out"], first)
    x = given[0] / 2
    buffer = torch.full_like(x, float("nan"))
    torch.cuda.synchronize()
    replayed = on_side_stream(
        lambda: torch.mul(x, 2, out=buffer), lambda t: run(blocks.forward, spec, w, (t, *given[1:]), False)["out"]
    )
    assert torch.equal(replayed, first)


def test_calls_at_the_same_addresses_become_a_cuda_graph():
    """It gives what launches one by one give: for other values, on another stream, and inside of a graph of the caller's."""
    w, given = moved(make_weights(LLAMA, BF16)), moved(inputs(LLAMA, BF16, 2, 75))

    def layer(*tensors: Tensor) -> Tensor:
        return run(blocks.forward, LLAMA, w, tensors, False)["out"]

    first, before = layer(*given), _graphs._existing
    for _ in range(3 * _graphs.AFTER):
        assert torch.equal(layer(*given), first)
    assert _graphs._existing > before
    for factor in (2, -1):
        given[0].mul_(factor)
        elsewhere = layer(*[t.clone() for t in given])
        assert torch.equal(layer(*given), elsewhere) and not torch.equal(elsewhere, first)
    buffer = torch.full_like(given[0], float("nan"))
    for _ in range(2 * _graphs.AFTER):
        buffer.fill_(float("nan"))
        torch.cuda.synchronize()
        assert torch.equal(on_side_stream(lambda: buffer.copy_(given[0]), lambda t: layer(t, *given[1:])), elsewhere)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(*given)
    for factor in (1, 2):
        given[0].mul_(factor)
        graph.replay()
        assert torch.equal(out, layer(*given))


def test_replay_follows_values_and_weights():
    """Replayed launches read the tensors of their own call."""
    given = moved(inputs(LLAMA, BF16, 1, 37))
    for seed in range(3):
        w = moved(make_weights(LLAMA, BF16, seed=seed))
        got = run(blocks.forward, LLAMA, w, given, False)["out"]
        want = run(plain_layer, LLAMA, in_float64(w), tuple(map(in_float64, given)), False)["out"]
        plain = run(plain_layer, LLAMA, w, given, False)["out"]
        assert_accurate({"out": got}, {"out": want}, {"out": plain}, BF16)
        swapped = w._replace(gate=w.up, up=w.gate)  # the other order in memory
        got = run(blocks.forward, LLAMA, swapped, given, False)["out"]
        want = run(plain_layer, LLAMA, in_float64(swapped), tuple(map(in_float64, given)), False)["out"]
        assert_accurate({"out": got}, {"out": want}, {"out": run(plain_layer, LLAMA, swapped, given, False)["out"]}, BF16)


def test_gradients_of_a_layer_have_equal_bits(poisoned):
    w, given = moved(make_weights(LLAMA, BF16)), moved(inputs(LLAMA, BF16, 2, 75))
    first = run(blocks.forward, LLAMA, w, given, True)
    for _ in range(20):
        again = run(blocks.forward, LLAMA, w, given, True)
        assert all(torch.equal(first[n], again[n]) for n in first)


def test_layer_in_a_cuda_graph():
    w, given = moved(make_weights(LLAMA, BF16)), moved(inputs(LLAMA, BF16, 1, 37))
    x = given[0].clone()

    def layer() -> Tensor:
        return run(blocks.forward, LLAMA, w, (x, *given[1:]), False)["out"]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer()
        layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for factor in (1, 2, -1):
        x.copy_(given[0] * factor)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, layer())

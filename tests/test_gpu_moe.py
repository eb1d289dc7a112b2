"""The whole block of a mixture on a GPU: recorded and replayed, in a CUDA graph, with gradients, of few tokens, many and none;
and attention whose heads are experts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.engine import errors, verdict
from benchmarks.moe_forms import ours
from benchmarks.moe_problem import Inputs, Problem, make_inputs, make_weights, plain
from fusedblock import mixture_of_attention, ops, options
from fusedblock.blocks.moe import MoeSpec, MoeWeights, mixture
from fusedblock.ops import RouterSpec

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
BLOCK = partial(Problem, experts=12, top_k=4, hidden=136, ffn=72, model="qwen3_moe")
# Vectors; `down` and its sums in one launch, of 16 rows and of 32; three launches, of 64 rows and of 128; some with two experts
# that every token chooses.
PROBLEMS = [BLOCK(1), BLOCK(5), BLOCK(33), BLOCK(45, hot=2), BLOCK(130), BLOCK(1100), BLOCK(1100, hot=2),
            BLOCK(1, transposed=True), BLOCK(45, transposed=True), BLOCK(1100, transposed=True, model="mixtral")]  # fmt: skip


def name(p: Problem) -> str:
    return f"T{p.tokens}" + "-skewed" * bool(p.hot) + "-transposed" * p.transposed


def made(p: Problem, backward: bool = False, seed: int = 0) -> Inputs:
    return make_inputs(p, DEVICE, make_weights(p, DEVICE, backward), seed, backward)


def assert_right(p: Problem, given: Inputs, results: list[Tensor]) -> None:
    exact = plain(p, given, torch.float64)
    assert verdict(errors(results, exact), errors(plain(p, given, torch.bfloat16), exact)) == "ok"


def run(p: Problem, given: Inputs) -> Tensor:
    with torch.no_grad():
        return ours(p, given.weights)(given)


@pytest.mark.parametrize("p", PROBLEMS, ids=name)
def test_recorded_and_replayed(p: Problem) -> None:
    """Equal bits from the launches that are replayed, and right for other tokens, which choose other experts."""
    for seed in range(3):
        given = made(p, seed=seed)
        first = run(p, given)
        assert_right(p, given, [first])
        assert all(torch.equal(run(p, given), first) for _ in range(3))


@pytest.mark.parametrize("p", PROBLEMS, ids=name)
def test_gradients(p: Problem) -> None:
    """Of one token eight times: the gradient of its router is a few numbers, whose error says nothing alone."""

    def step(given: Inputs) -> list[Tensor]:
        out = ours(p, given.weights)(given)
        return [out.detach(), *torch.autograd.grad(out, given.leaves(), given.grad_out)]

    inputs = [made(p, backward=True, seed=seed) for seed in range(8 if p.tokens == 1 else 1)]
    firsts = [step(given) for given in inputs]
    found, exact, rounded = (
        [torch.stack(t) for t in zip(*each)]
        for each in (firsts, *([plain(p, given, dtype) for given in inputs] for dtype in (torch.float64, torch.bfloat16)))
    )
    assert verdict(errors(found, exact), errors(rounded, exact)) == "ok"
    for given, first in zip(inputs, firsts):
        assert all(torch.equal(a, b) for a, b in zip(step(given), first))


@pytest.mark.parametrize("p", PROBLEMS[:6], ids=name)
def test_in_a_cuda_graph(p: Problem) -> None:
    """The graph routes anew: other tokens in the same memory."""
    given, others = made(p), [made(p, seed=seed) for seed in range(1, 4)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(p, given)
        run(p, given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(p, given)
    for other in others:
        given.x.copy_(other.x)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, run(p, other))
        assert_right(p, other, [out])


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("tokens", [1, 45, 512, 513])
def test_a_shared_expert_goes_beside_in_a_cuda_graph(tokens: int, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two layers, one after the other, so that memory is used again; equal bits to the same launch by launch."""
    p, forks = BLOCK(tokens), list[int]()
    given, w = made(p), make_weights(p, DEVICE)
    g = torch.Generator(DEVICE).manual_seed(tokens)
    own = [torch.randn(*s, generator=g, device=DEVICE, dtype=torch.bfloat16) * s[-1] ** -0.5
           for s in ((200, 136), (200, 136), (136, 200), (1, 136))]  # fmt: skip
    weights = MoeWeights(w.router, w.gate_up, w.down, None, None, None, None, *own[:3], own[3] if gated else None)
    spec, fork = MoeSpec(RouterSpec(p.top_k, renormalise=True)), ops.beside
    monkeypatch.setattr(ops, "beside", lambda *a: forks.append(1) or fork(*a))

    @torch.no_grad()
    def layers(x: Tensor) -> Tensor:
        x = mixture(spec, weights, x).out
        return mixture(spec, weights, x, residual=x).out

    layers(given.x)
    assert not forks
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers(given.x)
    assert len(forks) == (2 if tokens <= 512 else 0)
    for seed in range(1, 6):
        other = made(p, seed=seed).x
        given.x.copy_(other)
        graph.replay()
        assert torch.equal(out, layers(other))


def test_a_token_has_equal_bits_beside_any_others() -> None:
    p, whole = BLOCK(1100), made(BLOCK(1100))
    with options(batch_invariant=True):
        out = run(p, whole)
        assert_right(p, whole, [out])
        for first, count in ((0, 1), (7, 33), (500, 45), (3, 700)):
            some = Inputs(whole.x[first : first + count].clone(), whole.weights, 0)
            assert torch.equal(run(BLOCK(count), some), out[first : first + count])


def test_no_tokens() -> None:
    p = BLOCK(0)
    given = made(p, backward=True)
    assert run(p, given).shape == (0, 136)
    out = ours(p, given.weights)(given)
    grads = torch.autograd.grad(out, given.leaves(), given.grad_out)
    assert [g.shape for g in grads] == [t.shape for t in given.leaves()] and not any(g.any() for g in grads)


@pytest.mark.parametrize("seq", [2, 45, 550])
def test_attention_experts(seq: int) -> None:
    """Beside the same function in plain torch on the CPU, and equal bits again. All experts are chosen: none by rounding."""
    g = torch.Generator().manual_seed(seq)
    sizes = {"x": (2, seq, 136), "router": (6, 136), "q": (6, 192, 136), "kv": (384, 136), "o": (6, 136, 192), "bias": (136,)}
    given = {n: torch.randn(*s, generator=g) * (1 if n == "x" else s[-1] ** -0.5) for n, s in sizes.items()}
    upstream = torch.randn(2, seq, 136, generator=g)
    angles = torch.outer(torch.arange(float(seq)), 10000.0 ** -(torch.arange(32) / 32))[None]

    def step(dtype: torch.dtype, device: str) -> list[Tensor]:
        leaves = [t.to(torch.bfloat16).to(device, dtype).requires_grad_() for t in given.values()]
        tables = [t.to(device, torch.float64 if dtype is torch.float64 else torch.float32) for t in (angles.cos(), angles.sin())]
        *weights, bias = leaves
        made = mixture_of_attention(*weights, *tables, top_k=6, head_dim=64, bias=bias)
        grads = torch.autograd.grad(made.out, leaves, upstream.to(torch.bfloat16).to(device, dtype))
        return [t.detach().cpu() for t in (made.out, *grads)]

    exact, rounded = step(torch.float64, "cpu"), step(torch.bfloat16, "cpu")
    first, second = step(torch.bfloat16, "cuda"), step(torch.bfloat16, "cuda")
    assert verdict(errors(first, exact), errors(rounded, exact)) == "ok"
    assert all(map(torch.equal, first, second))

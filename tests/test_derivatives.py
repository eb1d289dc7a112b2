"""Derivatives that do not exist raise, and those that are easily lost arrive."""

from __future__ import annotations

import pytest
import torch
from llama import CACHE, prompt, tiny
from torch import Tensor
from transformers import DynamicCache

import fusedblock
from fusedblock.interpret import interpret
from fusedblock.kernels._target import TARGETS


@pytest.mark.parametrize("kernels", [False, True])
def test_double_backward_raises(kernels: bool) -> None:
    x, w = torch.randn(3, 16, requires_grad=True), torch.randn(5, 16, requires_grad=True)

    def run() -> None:
        (g,) = torch.autograd.grad(fusedblock.linear(x, w).pow(2).sum(), x, create_graph=True)
        torch.autograd.grad(g.pow(2).sum(), [x, w])

    with pytest.raises(NotImplementedError, match=r"linear: no double backward"):
        if kernels:
            with interpret(TARGETS["sm_90"]):
                run()
        else:
            run()


def test_forward_mode_raises() -> None:
    x, w = torch.randn(3, 16), torch.randn(5, 16)
    with pytest.raises(NotImplementedError, match="linear: fusedblock operators have no forward-mode derivative"):
        torch.func.jvp(lambda t: fusedblock.linear(t, w), (x,), (x,))


def test_tables_that_want_gradients_are_refused() -> None:
    weights = [torch.randn(16, 32) for _ in range(3)]
    cos = torch.randn(1, 2, 8, requires_grad=True)
    with pytest.raises(ValueError, match="qkv_rope: cos requires a gradient"):
        fusedblock.qkv_rope(torch.randn(1, 2, 32), *weights, cos, torch.randn(1, 2, 8), head_dim=16)


def test_a_composite_op_refuses_gradients() -> None:
    model = tiny(num_hidden_layers=1)
    layer = model.model.layers[0]
    fusedblock.fuse(model)
    x = torch.randn(1, 3, 64)
    with torch.no_grad():
        binding = model(prompt()[0]) and layer.__dict__["_fusedblock"].binding
    from fusedblock.blocks import functional as core

    table = torch.randn(1, 3, binding.spec.head_dim)
    block, numbers = torch.ops.fusedblock.block.default, core._numbers(binding.spec)
    y = block(x.requires_grad_(), table, table, None, -1, 0, None, None, *binding.weights, *numbers)
    with pytest.raises(NotImplementedError, match="block: no gradients"):
        y.sum().backward()


def test_learned_keys_and_values_get_gradients() -> None:
    """Prefix tuning: frozen weights, and a cache that holds parameters."""
    model = tiny(num_hidden_layers=1)
    model.requires_grad_(False)
    attention = model.model.layers[0].self_attn
    shape = (2, attention.k_proj.weight.shape[0] // attention.head_dim, 4, attention.head_dim)

    def gradients() -> list[Tensor]:
        g = torch.Generator().manual_seed(0)
        learned = [torch.randn(shape, generator=g).requires_grad_() for _ in range(2)]
        cache = DynamicCache()
        cache.update(*learned, 0)
        model(prompt(seq=5)[0], **{CACHE: cache}).logits.square().mean().backward()
        return [t.grad for t in learned]

    want = gradients()
    report = fusedblock.fuse(model)
    with interpret(TARGETS["sm_90"]):
        got = gradients()
    assert report.fused_calls == 1
    for value, reference in zip(got, want):
        assert (value - reference).norm() < 1e-5 * reference.norm()


def test_torch_func_and_forward_mode_fall_back() -> None:
    model = tiny(num_hidden_layers=1, attn_implementation="eager")  # sdpa has no forward mode on a CPU
    report = fusedblock.fuse(model)
    embeds = torch.randn(2, 3, 64)

    def loss(e: Tensor) -> Tensor:
        return model(inputs_embeds=e, use_cache=False).logits.square().sum()

    got = torch.func.grad(loss)(embeds)
    tangent = torch.func.jvp(loss, (embeds,), (torch.ones_like(embeds),))[1]
    assert set(report.fallbacks) == {"a torch.func transform is on", "forward-mode differentiation is on"}
    fusedblock.unfuse(model)
    assert torch.equal(got, torch.func.grad(loss)(embeds))
    assert torch.equal(tangent, torch.func.jvp(loss, (embeds,), (torch.ones_like(embeds),))[1])


def test_autocast_does_not_reach_into_an_operator() -> None:
    x, w = torch.randn(3, 16, requires_grad=True), torch.randn(5, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = fusedblock.linear(x, w)
    assert y.dtype is torch.float32
    y.sum().backward()
    assert (x.grad - w.detach().sum(0)).abs().max() < 1e-5

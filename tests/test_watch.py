"""What a fused layer remembers of its parts: every kind of change is noticed at the next call, and so is its end."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from llama import tiny
from mixtures import build
from torch import nn

from fusedblock.models import alone, table
from fusedblock.models.binding import Binding, BlockBinding, bind, is_current
from fusedblock.models.watch import Watch

Change = Callable[[nn.Module], Any]


@contextmanager
def put(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute, or an entry of a dictionary, for a while."""
    place = owner if isinstance(owner, dict) else owner.__dict__
    had, before = name in place, place.get(name)
    place[name] = value
    yield
    if had:
        place[name] = before
    else:
        del place[name]


@contextmanager
def hooked(register: Callable[[Any], Any]) -> Iterator[None]:
    handle = register(lambda *args: None)
    yield
    handle.remove()


@contextmanager
def of_class(module: nn.Module, cls: type) -> Iterator[None]:
    before = type(module)
    module.__class__ = cls
    yield
    module.__class__ = before


@contextmanager
def patched(cls: type) -> Iterator[None]:
    before = cls.forward
    cls.forward = lambda self, *args: before(self, *args)
    yield
    cls.forward = before


CHANGES: dict[str, Change] = {
    "a child of the layer": lambda m: put(m._modules, "mlp", nn.Identity()),
    "a child of a child": lambda m: put(m.self_attn._modules, "k_proj", nn.Linear(64, 32, bias=False)),
    "a child that is gone": lambda m: put(m.mlp._modules, "up_proj", None),
    "a parameter": lambda m: put(m.mlp.down_proj._parameters, "weight", nn.Parameter(torch.zeros(64, 96))),
    "a bias where none was": lambda m: put(m.self_attn.q_proj._parameters, "bias", nn.Parameter(torch.zeros(64))),
    "a forward hook": lambda m: hooked(m.mlp.register_forward_hook),
    "a forward pre-hook": lambda m: hooked(m.self_attn.o_proj.register_forward_pre_hook),
    "a backward hook": lambda m: hooked(m.input_layernorm.register_full_backward_hook),
    "a backward pre-hook": lambda m: hooked(m.mlp.act_fn.register_full_backward_pre_hook),
    "an instance's forward": lambda m: put(m.mlp, "forward", types.MethodType(lambda self, x: x, m.mlp)),
    "a class's forward": lambda m: patched(type(m.input_layernorm)),
    "the class of a child": lambda m: of_class(m.post_attention_layernorm, nn.LayerNorm),
    "a number": lambda m: put(m.post_attention_layernorm, "variance_epsilon", 0.5),
    "a number of the attention": lambda m: put(m.self_attn, "scaling", 0.125),
    "a flag": lambda m: put(m.self_attn, "is_causal", False),
}


def watch(binding: Binding | BlockBinding | str) -> Watch:
    assert not isinstance(binding, str), binding
    assert binding.watch is not None
    return binding.watch


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_seen(name: str) -> None:
    layer = tiny().model.layers[0]
    kept = watch(bind(layer, table.SPECS["LlamaDecoderLayer"]))
    assert kept.holds(layer)
    with CHANGES[name](layer):
        assert not kept.holds(layer)
    assert kept.holds(layer)


def test_hooks_that_were_there_may_stay_but_not_go() -> None:
    """transformers' own hooks are there when a layer is bound."""
    from fusedblock.models import binding as module

    layer = tiny().model.layers[0]

    def capture(*args: Any) -> None: ...

    capture.__module__ = module._CAPTURING
    handle = layer.self_attn.register_forward_hook(capture)
    kept = watch(bind(layer, table.SPECS["LlamaDecoderLayer"]))
    assert kept.holds(layer)
    with hooked(layer.self_attn.register_forward_hook):
        assert not kept.holds(layer)
    assert kept.holds(layer)
    handle.remove()
    assert not kept.holds(layer)


def test_an_attribute_that_is_gone_is_seen() -> None:
    layer = tiny().model.layers[0]
    kept = watch(bind(layer, table.SPECS["LlamaDecoderLayer"]))
    del layer.self_attn.scaling
    assert not kept.holds(layer)


def test_which_gelu_is_seen() -> None:
    layer = tiny(hidden_act="gelu").model.layers[0]
    layer.mlp.act_fn = nn.GELU()
    bound = bind(layer, table.SPECS["LlamaDecoderLayer"])
    assert isinstance(bound, Binding) and bound.spec.activation == "gelu"
    layer.mlp.act_fn.approximate = "tanh"
    assert not is_current(bound, layer)
    bound = bind(layer, table.SPECS["LlamaDecoderLayer"])
    assert isinstance(bound, Binding) and bound.spec.activation == "gelu_tanh" and is_current(bound, layer)


EXPERTS: dict[str, Change] = {
    "experts": lambda m: put(m.experts._parameters, "down_proj", nn.Parameter(m.experts.down_proj.detach().clone())),
    "the router's number": lambda m: put(m.gate, "top_k", 1),
    "the router": lambda m: put(m._modules, "gate", nn.Identity()),
    "a hook on the router": lambda m: hooked(m.gate.register_forward_hook),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_each_change_of_a_mixture_is_seen(name: str) -> None:
    layer = build("mixtral").model.layers[0]
    kept = watch(bind(layer, table.SPECS["MixtralDecoderLayer"]))
    assert kept.holds(layer)
    with EXPERTS[name](layer.mlp):
        assert not kept.holds(layer)
    assert kept.holds(layer)
    layer.mlp.experts.config._experts_implementation = "other"
    assert not kept.holds(layer)


def test_a_block_of_experts_that_is_fused_alone() -> None:
    block = build("deepseek_v3").model.layers[1].mlp
    bound = alone.bind_block(block, table.BLOCKS["DeepseekV3MoE"])
    assert watch(bound).holds(block) and not isinstance(bound, str)
    block.shared_experts.up_proj.weight = nn.Parameter(torch.zeros_like(block.shared_experts.up_proj.weight))
    assert not alone.is_current(bound, block)

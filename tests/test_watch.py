"""What a fused layer remembers of its parts: every kind of change is noticed at the next call, and so is its end."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from llama import tiny
from mixtures import build
from tiny_models import SIZES
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

import fusedblock
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


def other_config(module: nn.Module, **changes: Any) -> AbstractContextManager[None]:
    config = copy.deepcopy(module.config)
    for name, value in changes.items():
        setattr(config, name, value)
    return put(module, "config", config)


def replaced(module: nn.Module, name: str) -> AbstractContextManager[None]:
    """A dictionary of the module's by its copy."""
    return put(module, name, copy.copy(getattr(module, name)))


@contextmanager
def replaced_attributes(module: nn.Module) -> Iterator[None]:
    before = module.__dict__
    object.__setattr__(module, "__dict__", dict(before))
    yield
    object.__setattr__(module, "__dict__", before)


@contextmanager
def without(owner: dict[str, Any], name: str) -> Iterator[None]:
    before = dict(owner)
    del owner[name]
    yield
    owner.clear()
    owner.update(before)


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
    "children in another dictionary": lambda m: replaced(m.self_attn, "_modules"),
    "parameters in another dictionary": lambda m: replaced(m.mlp.up_proj, "_parameters"),
    "attributes in another dictionary": lambda m: replaced_attributes(m.mlp.gate_proj),
    "a bias that is no parameter any more": lambda m: without(m.self_attn.o_proj._parameters, "bias"),
    "a weight that is hidden": lambda m: put(m.self_attn.o_proj, "weight", torch.zeros(64, 64)),
    "a number that is a parameter": lambda m: put(m.self_attn, "scaling", nn.Parameter(torch.tensor(m.self_attn.scaling))),
    "a number for each head": lambda m: put(m.self_attn, "scaling", torch.ones(1, 4, 1, 1)),
    "an epsilon for each column": lambda m: put(m.input_layernorm, "variance_epsilon", torch.ones(64)),
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


def test_hooks_of_a_new_dictionary_are_seen() -> None:
    """`module._forward_hooks = OrderedDict()`, to be rid of all hooks, and one more after it."""
    layer = tiny().model.layers[0]
    kept = watch(bind(layer, table.SPECS["LlamaDecoderLayer"]))
    layer.mlp.down_proj._forward_hooks = OrderedDict()
    assert kept.holds(layer)
    layer.mlp.down_proj.register_forward_hook(lambda *args: None)
    assert not kept.holds(layer)


def test_a_patched_activation_is_seen_and_refused() -> None:
    layer = tiny().model.layers[0]
    kept = watch(bind(layer, table.SPECS["LlamaDecoderLayer"]))
    with patched(type(layer.mlp.act_fn)):
        assert not kept.holds(layer)
        refused = bind(layer, table.SPECS["LlamaDecoderLayer"])
        assert isinstance(refused, str) and "SiLUActivation.forward is " in refused
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
    "another child of the experts": lambda m: put(m.experts._modules, "post_expert_norm", nn.RMSNorm(64)),
    "an activation that is a function": lambda m: put(m.experts._modules, "act_fn", nn.GELU()),
    "a factor for each expert": lambda m: put(m.gate, "top_k", torch.ones(2)),
    "the experts' config": lambda m: other_config(m.experts, _experts_implementation="other"),
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


def pair(model: nn.Module) -> tuple[nn.Module, nn.Module, fusedblock.FusionReport]:
    """A model that is fused and has run, and its twin that is not."""
    twin = copy.deepcopy(model)
    report = fusedblock.fuse(model)
    logits(model)
    assert report.fused_calls and not report.fallback_calls
    return model, twin, report


def logits(model: nn.Module) -> torch.Tensor:
    return model(torch.arange(3, 12)[None]).logits


def bias(kind: Callable[[torch.Tensor], Any], path: str) -> Change:
    def change(model: nn.Module) -> None:
        module = model.model.layers[0].get_submodule(path)
        if "bias" in module._parameters:
            del module.bias
        made = kind(torch.full((64,), 0.7))
        if made is None:
            module.register_buffer("bias", torch.full((64,), 0.7))
        else:
            module.bias = made

    return change


def short_window(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.self_attn.config = copy.deepcopy(layer.self_attn.config)
        layer.self_attn.config.sliding_window = 3


def per_head(model: nn.Module) -> None:
    model.model.layers[0].self_attn.scaling = torch.full((1, 4, 1, 1), 0.3)


def per_column(model: nn.Module) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = torch.linspace(0.1, 3, 64)


LATE: dict[str, Change] = {
    "a bias that is a plain attribute": bias(lambda t: t, "self_attn.q_proj"),
    "a bias that is a buffer": bias(lambda t: None, "self_attn.q_proj"),
    "a bias that an RMSNorm does not look at": bias(nn.Parameter, "input_layernorm"),
    "a scale for each head": per_head,
    "an epsilon for each column": per_column,
}


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("before", [True, False])
def test_what_a_model_computes_is_what_it_says(name: str, before: bool) -> None:
    """Changed before it is fused, and after."""
    made = tiny(attn_implementation="eager")
    if before:
        LATE[name](made)
        model, twin = made, copy.deepcopy(made)
        fusedblock.fuse(model)
    else:
        model, twin, _ = pair(made)
        LATE[name](model)
        LATE[name](twin)
    torch.testing.assert_close(logits(model), logits(twin), atol=2e-5, rtol=1e-5)


def test_a_patched_layer_class_is_not_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin, report = pair(tiny())
    cls = type(twin.model.layers[0])
    before = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, x, *args, **kwargs: before(self, x, *args, **kwargs) * 0.5)
    torch.testing.assert_close(logits(model), logits(twin), atol=2e-5, rtol=1e-5)
    assert any("LlamaDecoderLayer.forward is " in reason for record in report.layers for reason in record.calls.fallbacks)
    monkeypatch.undo()
    torch.testing.assert_close(logits(model), logits(pair(tiny())[1]), atol=2e-5, rtol=1e-5)


def test_a_parameter_in_a_numbers_place_gets_its_gradient() -> None:
    model, twin, _ = pair(tiny(attn_implementation="eager"))
    for one in (model, twin):
        attention = one.model.layers[0].self_attn
        attention.scaling = nn.Parameter(torch.tensor(attention.scaling))
        logits(one).square().sum().backward()
    grads = [one.model.layers[0].self_attn.scaling.grad for one in (model, twin)]
    assert grads[0] is not None and grads[1] is not None
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-4)


def test_another_config_is_read() -> None:
    """Its window, where ours is the attention that reads it, and what the experts run under."""
    config = MistralConfig(**{**SIZES, "hidden_size": 64}, sliding_window=6)
    torch.manual_seed(0)
    model = MistralForCausalLM._from_config(config, attn_implementation="fusedblock").eval()
    model, twin, _ = pair(model)
    before = logits(model)
    for one in (model, twin):
        short_window(one)
    torch.testing.assert_close(logits(model), logits(twin), atol=2e-5, rtol=1e-5)
    assert (logits(model) - before).abs().max() > 1e-3


def test_an_activation_of_the_experts_that_is_a_function() -> None:
    model, twin, _ = pair(build("mixtral"))
    for one in (model, twin):
        experts = one.model.layers[0].mlp.experts
        del experts.act_fn
        experts.act_fn = nn.functional.silu
        logits(one)
        experts.act_fn = nn.functional.gelu
    torch.testing.assert_close(logits(model), logits(twin), atol=2e-5, rtol=1e-5)


def test_fuse_says_at_once_that_every_call_falls_back() -> None:
    """Not only after the first call: transformers 5.17 loads Gemma 2 with sdpa, which has no softcap (5.24 refuses to)."""
    config = Gemma2Config(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                          intermediate_size=96, vocab_size=97)  # fmt: skip
    model = Gemma2ForCausalLM._from_config(config, attn_implementation="eager").eval()
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="model.layers.0: sdpa attention has no softcap"):
        fusedblock.fuse(model, strict=True)
    report = fusedblock.fuse(model)
    assert "0-1: fused, but sdpa attention has no softcap (50); use attn_implementation='eager' or 'fusedblock'" in str(report)
    model.config._attn_implementation = "eager"
    logits(model)
    assert report.fused_calls == 2 and not report.fallback_calls

"""What is changed in a family's own parts after fuse, or before it, counts as it does in transformers' layers."""

from __future__ import annotations

import copy

import families
import pytest
import torch
from llama import relative_error
from torch import Tensor, nn

import fusedblock


def outputs(name: str, model: nn.Module) -> Tensor:
    with torch.no_grad():
        return families.values(model(**families.inputs(name, model, 0)[0]))


def pair(name: str, **changes: object) -> tuple[nn.Module, nn.Module]:
    """A plain model and a fused one, which has run once, of the same weights."""
    plain = families.build(name, **changes)
    fused = copy.deepcopy(plain)
    assert fusedblock.fuse(fused, strict=True).fused
    outputs(name, fused)
    return plain, fused


@pytest.mark.parametrize("part", ("q_norm", "k_norm"))
@pytest.mark.parametrize("name", ("qwen3", "olmo2", "cohere-qk_norm"))
def test_epsilon_of_the_norms_of_heads(name: str, part: str) -> None:
    plain, fused = pair(name)
    before = outputs(name, plain)
    for model in (plain, fused):
        getattr(model.model.layers[1].self_attn, part).variance_epsilon = 0.3
    want = outputs(name, plain)
    assert relative_error(want, before) > 0.01
    assert relative_error(outputs(name, fused), want) < 1e-5
    assert "the norms have different epsilons, " in str(fusedblock.fuse(fused).fallbacks)


def test_a_layer_made_parallel_does_not_look_at_its_second_norm() -> None:
    plain, fused = pair("stablelm")
    before = outputs("stablelm", plain)
    for model in (plain, fused):
        model.model.layers[1].use_parallel_residual = True
    want = outputs("stablelm", plain)
    assert relative_error(want, before) > 0.01
    assert relative_error(outputs("stablelm", fused), want) < 1e-5
    assert not fusedblock.fuse(fused).fallbacks


@pytest.mark.parametrize("implementation", ("sdpa", "eager"))
@pytest.mark.parametrize("name", ("bert", "roberta", "gpt2"))
def test_attention_drops_in_training_though_its_dropout_module_is_in_eval(name: str, implementation: str) -> None:
    """Attention takes its module's rate and asks itself about training: people who freeze dropout modules still get it."""
    word = "attn_pdrop" if name == "gpt2" else "attention_probs_dropout_prob"
    plain, fused = pair(name, implementation=implementation, **{word: 0.5})
    still = outputs(name, plain)
    for model in (plain, fused):
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.eval()
    made = []
    for model in (plain, fused):
        torch.manual_seed(0)
        made.append(outputs(name, model))
    assert relative_error(made[0], still) > 0.01
    assert relative_error(made[1], made[0]) < 1e-5


@pytest.mark.parametrize("name", ("llama", "gpt2", "vit"))
def test_an_argument_too_many_or_given_twice_is_an_error(name: str) -> None:
    layer = next(m for m in pair(name)[1].modules() if isinstance(m, fusedblock.models.swap.FusedLayer))
    x, before_mask = torch.zeros(1, 2, 64), (None,) if name == "gpt2" else ()
    with pytest.raises(TypeError, match="positional arguments"):
        layer(x, *[None] * 20)
    with pytest.raises(TypeError, match="multiple values for argument 'attention_mask'"):
        layer(x, *before_mask, None, attention_mask=torch.zeros(1, 1, 2, 2))

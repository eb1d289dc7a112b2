"""What only looks like transformers' Llama is left alone, and what changes after fuse is seen."""

from __future__ import annotations

import pytest
import torch
from llama import prompt, tiny
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

import fusedblock


class LlamaDecoderLayer(nn.Module):
    """A stranger of the same name, as remote code has them."""

    def forward(self, hidden_states: Tensor, **kwargs: object) -> Tensor:
        return hidden_states * 2


class LlamaRMSNorm(modeling_llama.LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class SiLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


def test_a_layer_of_the_same_name_is_not_fused() -> None:
    model = nn.Sequential(LlamaDecoderLayer())
    with pytest.raises(ValueError, match="no layer that can be fused"):
        fusedblock.fuse(model)


@pytest.mark.parametrize("part", ["norm", "activation"])
def test_a_part_of_the_same_name_is_not_fused(part: str) -> None:
    model = tiny(num_hidden_layers=1)
    layer = model.model.layers[0]
    if part == "norm":
        layer.input_layernorm = LlamaRMSNorm(64)
    else:
        layer.mlp.act_fn = SiLU()
    ids = prompt()[0]
    want = model(ids).logits
    report = fusedblock.fuse(model)
    assert torch.equal(model(ids).logits, want) and report.fused_calls == 0


def _patch_mlp(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: self.down_proj(self.up_proj(x)))


def _change_activation(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    model.model.layers[0].mlp.act_fn.approximate = "tanh"


def _negate_scale(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    model.model.layers[0].self_attn.scaling = -0.5


def _prune_heads(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = model.model.layers[0].self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight.data = projection.weight.data[: projection.weight.shape[0] // 2]
    attention.o_proj.weight.data = attention.o_proj.weight.data[:, : attention.o_proj.weight.shape[1] // 2]


@pytest.mark.parametrize("change", [_patch_mlp, _change_activation, _negate_scale, _prune_heads])
def test_a_change_after_the_first_call_is_seen(change: object, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = tiny(num_hidden_layers=1), tiny(num_hidden_layers=1)
    for each in (model, plain):
        each.model.layers[0].mlp.act_fn = nn.GELU()
    fusedblock.fuse(model)
    ids = prompt()[0]
    with torch.no_grad():
        model(ids)
        for each in (model, plain):
            change(each, monkeypatch)  # type: ignore[operator]
        want, got = plain(ids).logits, model(ids).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_is_causal_beside_an_attention_that_is_not() -> None:
    model = tiny(num_hidden_layers=1)
    layer = model.model.layers[0]
    layer.self_attn.is_causal = False
    x = torch.randn(1, 7, 64)
    tables = model.model.rotary_emb(x, torch.arange(7)[None])
    want = layer(x, position_embeddings=tables, is_causal=True)
    report = fusedblock.fuse(model)
    assert torch.equal(layer(x, position_embeddings=tables, is_causal=True), want)
    assert report.fallbacks == {"is_causal=True": 1}


@pytest.mark.parametrize("model", [None, "path", 3])
def test_fuse_wants_a_module(model: object) -> None:
    with pytest.raises(TypeError, match="expected a torch.nn.Module"):
        fusedblock.fuse(model)  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [5, "0", ["0"]])
def test_fuse_wants_integers(layers: object) -> None:
    with pytest.raises(TypeError, match="expected an iterable of int"):
        fusedblock.fuse(tiny(), layers=layers)  # type: ignore[arg-type]

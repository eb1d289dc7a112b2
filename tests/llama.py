"""Tiny Llama models with weights that make every part of a layer matter, and the comparisons that the tests share."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

PAD, EOS = 0, 96
CACHE = "cache" if hasattr(__import__("transformers.cache_utils", fromlist=["x"]), "DummyLayer") else "past_key_values"


def tiny(seed: int = 0, **config: Any) -> LlamaForCausalLM:
    """An fp32 model in eval mode. Norm weights and biases are not the trivial ones of initialisation."""
    implementation = config.pop("attn_implementation", "sdpa")
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": PAD, "bos_token_id": 1,
             "eos_token_id": EOS}  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM._from_config(LlamaConfig(**{**sizes, **config}), attn_implementation=implementation)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif parameter.dim() == 1:
                parameter.copy_(0.1 * torch.randn_like(parameter))
            else:
                scale = 0.5 if "embed" in name else 0.7 * parameter.shape[-1] ** -0.5
                parameter.copy_(scale * torch.randn_like(parameter))
    return model.eval()


def twin(model: LlamaForCausalLM, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """An independent copy in another dtype."""
    return copy.deepcopy(model).to(dtype)


def prompt(batch: int = 2, seq: int = 9, pad: int = 0, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask `batch seq`; the last sequence has `pad` padding tokens on its left."""
    ids = torch.randint(2, EOS, (batch, seq), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    ids[-1, :pad], mask[-1, :pad] = PAD, 0
    return ids, mask


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in float64, over all elements."""
    got = got.detach().double()
    want = want.detach().to(got.device, torch.float64)
    return ((got - want).norm() / want.norm()).item()


def by_kind(model: nn.Module) -> dict[str, Tensor]:
    """The gradients that a backward has left, those of one kind of parameter in all layers as one vector."""
    kinds: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            kind = ".".join(part for part in name.split(".") if not part.isdecimal())
            kinds.setdefault(kind, []).append(parameter.grad.detach().flatten())
    return {kind: torch.cat(grads) for kind, grads in kinds.items()}


def root_mean_square(errors: dict[str, float]) -> float:
    return (sum(e * e for e in errors.values()) / len(errors)) ** 0.5


Outcome = tuple[Tensor, dict[str, Tensor]]  # an output, and gradients by kind


def assert_rule(got: Outcome, want: Outcome, base: Outcome, kinds: Iterable[str], dtype: torch.dtype) -> None:
    """fp32 within 1e-5 of float64; fp16 and bf16 at most 1.5 times as far from it as plain torch in the same dtype, which `base`
    is; of the gradients, those of `kinds`."""
    errors, plain = ({n: relative_error(o[1][n], want[1][n]) for n in kinds} for o in (got, base))
    if dtype is torch.float32:
        assert relative_error(got[0], want[0]) < 1e-5
        assert {n: e for n, e in errors.items() if not e < 1e-5} == {}
    else:
        assert relative_error(got[0], want[0]) <= 1.5 * relative_error(base[0], want[0])
        # Over all parameters: of some twenty small vectors, one is farther off than its plain twin by chance.
        assert root_mean_square(errors) <= 1.5 * root_mean_square(plain)


def assert_same_tokens(model: LlamaForCausalLM, want: Tensor, got: Tensor, mask: Tensor) -> None:
    """Greedy tokens `batch seq` are equal, or differ first where the model's two best logits are closer than 1e-4."""
    assert got.shape == want.shape
    for row in (got != want).any(1).nonzero().flatten().tolist():
        at = (got[row] != want[row]).nonzero()[0].item()
        valid = torch.cat((mask[row], torch.ones(at - mask.shape[1], dtype=mask.dtype, device=mask.device)))[None]
        positions = (valid.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(want[row : row + 1, :at], attention_mask=valid, position_ids=positions).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        print(f"sequence {row} differs first at token {at}: the best logits are {first} and {second}")
        assert first - second < 1e-4

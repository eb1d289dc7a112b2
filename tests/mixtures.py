"""Tiny mixtures of experts of transformers' families, with weights that make every part of a layer matter."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from families import SIZES
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import fusedblock

_LATENT = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
           "qk_nope_head_dim": 16}  # fmt: skip
_CHOSEN = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
# What a family needs beside SIZES so that its own numerics take part: experts of no power of two, a dense layer where it has one.
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {**_CHOSEN, "num_experts": 6, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {**_CHOSEN, "num_experts": 6, "head_dim": 16, "norm_topk_prob": True},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 6,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "glm4_moe": {**_CHOSEN, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "head_dim": 16, "routed_scaling_factor": 1.5},
    "deepseek_v2": {**_LATENT, **_CHOSEN, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "n_shared_experts": 2,
                    "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
    "deepseek_v3": {**_LATENT, **_CHOSEN, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1},
}  # fmt: skip
AUXILIARY = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")  # whose models give router_logits and an auxiliary loss


def build(family: str, experts: str = "eager", seed: int = 0, **changes: Any) -> nn.Module:
    """An fp32 model in eval mode, by default with transformers' plain experts."""
    fusedblock.register_experts()
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SIZES, **CONFIGS[family], **changes})
    how = {"attn_implementation": "eager", "experts_implementation": experts}
    model = AutoModelForCausalLM.from_config(config, **how, dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.2 * torch.randn_like(p))
            elif p.dim() == 1 or "bias" in name:
                p.copy_(0.2 * torch.randn_like(p))
            else:
                # Of transposed experts too the side that is summed over.
                transposed = p.dim() == 3 and family == "gpt_oss"
                p.copy_(0.8 * p.shape[-2 if transposed else -1] ** -0.5 * torch.randn_like(p))
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.copy_(0.2 * torch.randn_like(buffer))
    return model.eval()


def in_double(model: nn.Module) -> nn.Module:
    """A copy in float64; its attention too, where transformers' eager one takes the softmax of a masked row in fp32."""
    double = copy.deepcopy(model).double()
    if model.config.model_type != "gpt_oss":  # whose sinks "plain" has not, and whose rows are never masked whole
        double.set_attn_implementation("plain")
    return double


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "is_concatenated")]


@contextmanager
def choices(model: nn.Module) -> Iterator[list[Tensor]]:
    """The experts that each call of an experts module is told, sorted."""
    found: list[Tensor] = []
    hooks = [m.register_forward_pre_hook(lambda _, args: found.append(args[1].sort(-1).values)) for m in experts_of(model)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()

"""Tiny models with random weights, and the bits of what they hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "max_position_embeddings": 128,
}  # fmt: skip


def llama(seed: int = 0, tied: bool = False, dtype: torch.dtype = torch.float32, **changes) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied, **changes)).eval()
    for parameter in model.parameters():  # RoPE frequencies stay float32, as in from_pretrained
        parameter.data = parameter.data.to(dtype)
    return model


def on_meta(model: PreTrainedModel) -> PreTrainedModel:
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config)).eval()


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def state(module: nn.Module) -> dict[str, tuple]:
    """Every parameter and buffer bit for bit, also the buffers that no state dict holds."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {key: bits(tensor) for key, tensor in tensors}


def clones(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def file_bits(path: Path) -> dict[str, tuple]:
    return {key: bits(value) for file in path.glob("*.safetensors") for key, value in load_file(file).items()}


def tokens(model: PreTrainedModel) -> torch.Tensor:
    prompt = torch.tensor([[1, 17, 42, 5]])
    return model.generate(prompt, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(prompt))


GEMMA = {**SIZES, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
DEEPSEEK = {**SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}  # fmt: skip
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=12)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=12, moe_intermediate_size=16)),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK)),
}

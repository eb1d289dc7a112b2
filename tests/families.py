"""A tiny model of every family in the table, with weights that make every part of a layer matter."""

from __future__ import annotations

import copy
from typing import Any

import torch
from llama import EOS, PAD, prompt
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": EOS}
# What a family needs beside SIZES so that its own numerics take part. Two entries: two variants of it.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"head_dim": 24, "sliding_window": 6}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma": ("gemma", {"head_dim": 16}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 6}),
    "gpt2": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5, "hidden_act": "gelu"}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False, "hidden_act": "gelu_new"}),
    "starcoder2": ("starcoder2", {"sliding_window": 6}),
    "olmo2": ("olmo2", {}),
    "cohere": ("cohere", {}),
    "cohere-qk_norm": ("cohere", {"use_qk_norm": True}),
    "granite": ("granite", {"residual_multiplier": 0.3, "attention_multiplier": 0.11}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "glm": ("glm", {"head_dim": 16, "attention_bias": True}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "bert": ("bert", {}),
    "roberta": ("roberta", {}),
    "vit": ("vit", {"image_size": 16, "patch_size": 4}),
}
ENCODERS = ("bert", "roberta", "vit")
DECODERS = tuple(name for name, (family, _) in CONFIGS.items() if family not in ENCODERS)
NO_DROPOUT = {name: 0.0 for name in (
    "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout",
    "hidden_dropout", "residual_dropout", "embedding_dropout",
)}  # fmt: skip


def config(name: str, **changes: Any) -> Any:
    family, own = CONFIGS[name]
    if family == "gpt2":
        names = {"hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
                 "num_attention_heads": "n_head", "max_position_embeddings": "n_positions"}  # fmt: skip
        sizes = {names.get(n, n): value for n, value in SIZES.items() if n != "num_key_value_heads"}
        changes = {names.get(n, n): value for n, value in changes.items()}
    else:
        sizes = SIZES
    return AutoConfig.for_model(family, **{**sizes, **NO_DROPOUT, **own, **changes})


def build(name: str, implementation: str = "sdpa", seed: int = 0, **changes: Any) -> nn.Module:
    """An fp32 model in eval mode. No norm weight, bias or projection is trivial."""
    torch.manual_seed(seed)
    made = config(name, **changes)
    kind = AutoModel if CONFIGS[name][0] in ENCODERS else AutoModelForCausalLM
    model = kind.from_config(made, attn_implementation=implementation, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name.lower() or "ln_" in parameter_name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.dim() == 1:
                parameter.copy_(0.1 * torch.randn_like(parameter))
            else:
                wide = "embed" in parameter_name or "wte" in parameter_name or "wpe" in parameter_name
                parameter.copy_((0.5 if wide else 0.7 * parameter.shape[-1] ** -0.5) * torch.randn_like(parameter))
    return model.eval()


def twin(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    return copy.deepcopy(model).to(dtype)


def inputs(name: str, model: nn.Module, pad: int, seq: int = 9) -> tuple[dict[str, Tensor], Tensor | None]:
    """What the model takes, and which of its outputs `batch seq` are not padding."""
    device, dtype = next((p.device, p.dtype) for p in model.parameters())
    if CONFIGS[name][0] == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        return {"pixel_values": pixels.to(device, dtype)}, None
    ids, mask = (t.to(device) for t in prompt(seq=seq, pad=pad))
    return {"input_ids": ids, **({"attention_mask": mask} if pad else {})}, mask.bool() if pad else None


def values(output: Any) -> Tensor:
    return output.logits if "logits" in output else output.last_hidden_state

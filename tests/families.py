"""A tiny model of every family in the table, with weights that make every part of a layer matter."""

from __future__ import annotations

import copy
from typing import Any

import torch
from llama import EOS, PAD, prompt
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.masking_utils import sdpa_mask

import fusedblock

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": EOS}
_MODERNBERT = {"local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": None, "sep_token_id": None}
# What a family needs beside SIZES so that its own numerics take part. Two entries: two variants of it.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"head_dim": 24, "sliding_window": 6}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0}),
    "gemma3_text": ("gemma3_text", {"head_dim": 16, "sliding_window": 6, "sliding_window_pattern": 2,
                                    "query_pre_attn_scalar": 10}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 6}),
    "gpt2": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5, "hidden_act": "gelu"}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False, "hidden_act": "gelu_new"}),
    "starcoder2": ("starcoder2", {"sliding_window": 6}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 6}),
    "cohere": ("cohere", {}),
    "cohere-qk_norm": ("cohere", {"use_qk_norm": True}),
    "cohere2": ("cohere2", {"sliding_window": 6, "sliding_window_pattern": 2}),
    "granite": ("granite", {"residual_multiplier": 0.3, "attention_multiplier": 0.11}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "glm": ("glm", {"head_dim": 16, "attention_bias": True}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "bert": ("bert", {}),
    "roberta": ("roberta", {}),
    "vit": ("vit", {"image_size": 16, "patch_size": 4}),
    "modernbert": ("modernbert", _MODERNBERT),
    "modernbert-biases": ("modernbert", {**_MODERNBERT, "norm_bias": True, "mlp_bias": True, "attention_bias": True}),
}
_LATENT = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
           "qk_nope_head_dim": 16}  # fmt: skip
_CHOSEN = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
# Families with experts: experts of no power of two, a dense layer where it has one.
EXPERTS: dict[str, dict[str, Any]] = {
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
# Those of them whose layers are fused.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, words) for name, words in EXPERTS.items() if not name.startswith("deepseek")},
    "qwen2_moe-dense": ("qwen2_moe", {**EXPERTS["qwen2_moe"], "mlp_only_layers": [0], "use_sliding_window": True,
                                      "sliding_window": 6, "max_window_layers": 1}),
    "qwen3_moe-dense": ("qwen3_moe", {**EXPERTS["qwen3_moe"], "decoder_sparse_step": 2, "norm_topk_prob": False,
                                      "use_sliding_window": True, "sliding_window": 6}),
    "glm4_moe-qk_norm": ("glm4_moe", {**EXPERTS["glm4_moe"], "use_qk_norm": True, "attention_bias": True,
                                      "first_k_dense_replace": 0}),
}  # fmt: skip
ENCODERS = ("bert", "roberta", "vit", "modernbert")
IMPLEMENTATIONS = ("eager", "sdpa", "fusedblock")
DECODERS = tuple(name for name, (family, _) in CONFIGS.items() if family not in ENCODERS)
ALL = {**CONFIGS, **MIXTURES}
# Weights with which half precision chooses the experts that float64 does, and with weights off by a hundredth too: another choice
# is no rounding error.
SEEDS = {"mixtral": 24, "qwen2_moe": 16, "qwen3_moe": 86, "olmoe": 6, "gpt_oss": 5, "glm4_moe": 4, "qwen2_moe-dense": 11,
         "qwen3_moe-dense": 4, "glm4_moe-qk_norm": 4}  # fmt: skip
NO_DROPOUT = {name: 0.0 for name in (
    "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout",
    "hidden_dropout", "residual_dropout", "embedding_dropout", "mlp_dropout",
)}  # fmt: skip


def config(name: str, **changes: Any) -> Any:
    family, own = ALL[name]
    if family == "gpt2":
        names = {"hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
                 "num_attention_heads": "n_head", "max_position_embeddings": "n_positions"}  # fmt: skip
        sizes = {names.get(n, n): value for n, value in SIZES.items() if n != "num_key_value_heads"}
        changes = {names.get(n, n): value for n, value in changes.items()}
    else:
        sizes = SIZES
    return AutoConfig.for_model(family, **{**sizes, **NO_DROPOUT, **own, **changes})


def implementations(name: str) -> tuple[str, ...]:
    """The attentions that have all of the family's numerics: sdpa has no softcap and no sinks."""
    return tuple(which for which in IMPLEMENTATIONS if which != "sdpa" or ALL[name][0] not in ("gemma2", "gpt_oss"))


def plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float,
    softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention "plain" of transformers' models, in the dtype it is given: eager attention takes its softmax in fp32."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    logits = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    if s_aux is not None:
        logits = torch.cat((logits, s_aux[:, None, None].expand(*logits.shape[:3], 1)), -1)
    return (logits.softmax(-1).nan_to_num(0.0)[..., : value.shape[2]] @ value).transpose(1, 2).contiguous(), None


def _plain_mask(*args: Any, **kwargs: Any) -> Tensor:
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


AttentionInterface.register("plain", plain_attention)
AttentionMaskInterface.register("plain", _plain_mask)


def build(name: str, implementation: str = "", seed: int | None = None, **changes: Any) -> nn.Module:
    """An fp32 model in eval mode, by default with sdpa attention where that has all its numerics. No norm weight, bias or
    projection is trivial."""
    fusedblock.register_attention()
    implementation = implementation or ("sdpa" if "sdpa" in implementations(name) else "eager")
    torch.manual_seed(SEEDS.get(name, 0) if seed is None else seed)
    made = config(name, **changes)
    kind = AutoModel if ALL[name][0] in ENCODERS else AutoModelForCausalLM
    plain = {"experts_implementation": "eager"} if name in MIXTURES else {}
    model = kind.from_config(made, attn_implementation=implementation, dtype=torch.float32, **plain)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name.lower() or "ln_" in parameter_name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.dim() == 1:
                parameter.copy_(0.1 * torch.randn_like(parameter))
            else:
                wide = "embed" in parameter_name or "wte" in parameter_name or "wpe" in parameter_name
                parameter.copy_((0.5 if wide else 0.7 * parameter.shape[-1] ** -0.5) * torch.randn_like(parameter))
        for buffer_name, buffer in model.named_buffers():
            if "correction_bias" in buffer_name:
                buffer.copy_(0.2 * torch.randn_like(buffer))
    return model.eval()


def twin(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    return copy.deepcopy(model).to(dtype)


def inputs(name: str, model: nn.Module, pad: int, seq: int = 9) -> tuple[dict[str, Tensor], Tensor | None]:
    """What the model takes, and which of its outputs `batch seq` are not padding."""
    device, dtype = next((p.device, p.dtype) for p in model.parameters())
    if ALL[name][0] == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        return {"pixel_values": pixels.to(device, dtype)}, None
    ids, mask = (t.to(device) for t in prompt(seq=seq, pad=pad))
    return {"input_ids": ids, **({"attention_mask": mask} if pad else {})}, mask.bool() if pad else None


def values(output: Any) -> Tensor:
    return output.logits if "logits" in output else output.last_hidden_state

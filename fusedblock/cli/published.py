"""Published models by name: the fields of their config.json files that decide shapes and arithmetic. Data only."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]


def _sizes(vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int | None = None) -> Fields:
    made: Fields = dict(vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
                        num_attention_heads=heads)  # fmt: skip
    return made if kv_heads is None else {**made, "num_key_value_heads": kv_heads}


def _rope(theta: float, **more: Any) -> Fields:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


def _ropes(full: Fields, sliding: Fields) -> Fields:
    """By layer type."""
    return {"rope_parameters": {f"{kind}_attention": fields["rope_parameters"] for kind, fields in
                                (("full", full), ("sliding", sliding))}}  # fmt: skip


def _latent(mscale: float) -> Fields:
    """DeepSeek's attention."""
    rope = _rope(10000.0, rope_type="yarn", factor=40.0, beta_fast=32.0, beta_slow=1.0, mscale=mscale, mscale_all_dim=mscale,
                 original_max_position_embeddings=4096)  # fmt: skip
    return {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, **rope}  # fmt: skip


def _llama3(factor: float) -> Fields:
    rope = _rope(500000.0, rope_type="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
                 original_max_position_embeddings=8192)  # fmt: skip
    return {"model_type": "llama", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, **rope}


# Without "architectures": the causal language model of the type.
PRESETS: dict[str, Fields] = {
    "smollm2-135m": dict(_sizes(49152, 576, 1536, 30, 9, 3), model_type="llama", max_position_embeddings=8192, rms_norm_eps=1e-5,
                         tie_word_embeddings=True, **_rope(100000.0)),
    "llama-2-7b": dict(_sizes(32000, 4096, 11008, 32, 32, 32), model_type="llama", max_position_embeddings=4096,
                       rms_norm_eps=1e-5),
    "llama-3.1-8b": _sizes(128256, 4096, 14336, 32, 32, 8) | _llama3(8.0),
    "llama-3.1-70b": _sizes(128256, 8192, 28672, 80, 64, 8) | _llama3(8.0),
    "llama-3.2-1b": dict(_sizes(128256, 2048, 8192, 16, 32, 8), head_dim=64, tie_word_embeddings=True, **_llama3(32.0)),
    "llama-3.2-3b": dict(_sizes(128256, 3072, 8192, 28, 24, 8), head_dim=128, tie_word_embeddings=True, **_llama3(32.0)),
    "mistral-7b": dict(_sizes(32768, 4096, 14336, 32, 32, 8), model_type="mistral", max_position_embeddings=32768,
                       rms_norm_eps=1e-5, sliding_window=None, **_rope(1000000.0)),
    "qwen2.5-7b": dict(_sizes(152064, 3584, 18944, 28, 28, 4), model_type="qwen2", max_position_embeddings=131072,
                       rms_norm_eps=1e-6, use_sliding_window=False, **_rope(1000000.0)),
    "qwen3-8b": dict(_sizes(151936, 4096, 12288, 36, 32, 8), model_type="qwen3", head_dim=128, max_position_embeddings=40960,
                     rms_norm_eps=1e-6, **_rope(1000000.0)),
    "gemma-7b": dict(_sizes(256000, 3072, 24576, 28, 16, 16), model_type="gemma", head_dim=256, max_position_embeddings=8192,
                     rms_norm_eps=1e-6, hidden_act="gelu_pytorch_tanh", **_rope(10000.0)),
    "gemma-2-9b": dict(_sizes(256000, 3584, 14336, 42, 16, 8), model_type="gemma2", head_dim=256, max_position_embeddings=8192,
                       rms_norm_eps=1e-6, sliding_window=4096, query_pre_attn_scalar=256, attn_logit_softcapping=50.0,
                       **_rope(10000.0)),
    "gemma-3-1b": dict(_sizes(262144, 1152, 6912, 26, 4, 1), model_type="gemma3_text", head_dim=256,
                       max_position_embeddings=32768, rms_norm_eps=1e-6, sliding_window=512, query_pre_attn_scalar=256,
                       **_ropes(_rope(1000000.0), _rope(10000.0))),
    "phi-3-mini": dict(_sizes(32064, 3072, 8192, 32, 32, 32), model_type="phi3", max_position_embeddings=4096,
                       rms_norm_eps=1e-5, sliding_window=2047, **_rope(10000.0)),
    "gpt2": dict(model_type="gpt2", vocab_size=50257, n_embd=768, n_layer=12, n_head=12, n_positions=1024),
    "pythia-6.9b": dict(_sizes(50432, 4096, 16384, 32, 32), model_type="gpt_neox", max_position_embeddings=2048,
                        hidden_act="gelu", use_parallel_residual=True, **_rope(10000.0, partial_rotary_factor=0.25)),
    "starcoder2-7b": dict(_sizes(49152, 4608, 18432, 32, 36, 4), model_type="starcoder2", max_position_embeddings=16384,
                          norm_epsilon=1e-5, use_bias=True, hidden_act="gelu_pytorch_tanh", sliding_window=4096,
                          bos_token_id=0, eos_token_id=0, **_rope(1000000.0)),
    "olmo-2-7b": dict(_sizes(100352, 4096, 11008, 32, 32, 32), model_type="olmo2", max_position_embeddings=4096,
                      rms_norm_eps=1e-6, **_rope(500000.0)),
    "olmo-3-7b": dict(_sizes(100278, 4096, 11008, 32, 32, 32), model_type="olmo3", max_position_embeddings=65536,
                      rms_norm_eps=1e-6, sliding_window=4096, eos_token_id=100257, pad_token_id=100277,
                      **_ropes(_rope(500000.0, rope_type="yarn", factor=8.0, original_max_position_embeddings=8192),
                               _rope(500000.0))),
    "command-r-35b": dict(_sizes(256000, 8192, 22528, 40, 64, 64), model_type="cohere", max_position_embeddings=131072,
                          layer_norm_eps=1e-5, logit_scale=0.0625, use_qk_norm=False, **_rope(8000000.0)),
    "command-r7b": dict(_sizes(256000, 4096, 14336, 32, 32, 8), model_type="cohere2", max_position_embeddings=8192,
                        layer_norm_eps=1e-5, logit_scale=0.25, sliding_window=4096, **_rope(50000.0)),
    "granite-3.0-8b": dict(_sizes(49155, 4096, 12800, 40, 32, 8), model_type="granite", max_position_embeddings=4096,
                           rms_norm_eps=1e-5, attention_multiplier=0.0078125, embedding_multiplier=12.0, logits_scaling=16.0,
                           residual_multiplier=0.22, tie_word_embeddings=True, **_rope(10000.0)),
    "smollm3-3b": dict(_sizes(128256, 2048, 11008, 36, 16, 4), model_type="smollm3", max_position_embeddings=65536,
                       rms_norm_eps=1e-6, no_rope_layer_interval=4, tie_word_embeddings=True, **_rope(5000000.0)),
    "glm-4-9b": dict(_sizes(151552, 4096, 13696, 40, 32, 2), model_type="glm", head_dim=128, max_position_embeddings=131072,
                     rms_norm_eps=1.5625e-7, attention_bias=True, **_rope(10000.0, partial_rotary_factor=0.5)),
    "stablelm-2-1.6b": dict(_sizes(100352, 2048, 5632, 24, 32, 32), model_type="stablelm", max_position_embeddings=4096,
                            layer_norm_eps=1e-5, use_qkv_bias=True, **_rope(10000.0, partial_rotary_factor=0.25)),
    "mixtral-8x7b": dict(_sizes(32000, 4096, 14336, 32, 32, 8), model_type="mixtral", num_local_experts=8, num_experts_per_tok=2,
                         max_position_embeddings=32768, rms_norm_eps=1e-5, sliding_window=None, **_rope(1000000.0)),
    "qwen1.5-moe-a2.7b": dict(_sizes(151936, 2048, 5632, 24, 16, 16), model_type="qwen2_moe", num_experts=60,
                              num_experts_per_tok=4, moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
                              max_position_embeddings=8192, rms_norm_eps=1e-6, norm_topk_prob=False, **_rope(1000000.0)),
    "qwen3-30b-a3b": dict(_sizes(151936, 2048, 6144, 48, 32, 4), model_type="qwen3_moe", head_dim=128, num_experts=128,
                          num_experts_per_tok=8, moe_intermediate_size=768, max_position_embeddings=40960, rms_norm_eps=1e-6,
                          norm_topk_prob=True, **_rope(1000000.0)),
    "olmoe-1b-7b": dict(_sizes(50304, 2048, 1024, 16, 16, 16), model_type="olmoe", num_experts=64, num_experts_per_tok=8,
                        max_position_embeddings=4096, rms_norm_eps=1e-5, norm_topk_prob=False, **_rope(10000.0)),
    "gpt-oss-20b": dict(_sizes(201088, 2880, 2880, 24, 64, 8), model_type="gpt_oss", head_dim=64, num_local_experts=32,
                        num_experts_per_tok=4, sliding_window=128, max_position_embeddings=131072, rms_norm_eps=1e-5,
                        **_rope(150000.0, rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                                original_max_position_embeddings=4096)),
    "glm-4.5-air": dict(_sizes(151552, 4096, 10944, 46, 96, 8), model_type="glm4_moe", head_dim=128, n_routed_experts=128,
                        num_experts_per_tok=8, moe_intermediate_size=1408, n_shared_experts=1, first_k_dense_replace=1,
                        n_group=1, topk_group=1, routed_scaling_factor=1.0, norm_topk_prob=True, attention_bias=True,
                        use_qk_norm=False, max_position_embeddings=131072, rms_norm_eps=1e-5,
                        **_rope(1000000.0, partial_rotary_factor=0.5)),
    "deepseek-v2-lite": dict(_sizes(102400, 2048, 10944, 27, 16, 16), model_type="deepseek_v2", q_lora_rank=None,
                             n_routed_experts=64, num_experts_per_tok=6, moe_intermediate_size=1408, n_shared_experts=2,
                             first_k_dense_replace=1, n_group=1, topk_group=1, topk_method="greedy", routed_scaling_factor=1.0,
                             norm_topk_prob=False, **_latent(0.707)),
    "deepseek-v3": dict(_sizes(129280, 7168, 18432, 61, 128, 128), model_type="deepseek_v3", q_lora_rank=1536,
                        n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1,
                        first_k_dense_replace=3, n_group=8, topk_group=4, routed_scaling_factor=2.5, norm_topk_prob=True,
                        **_latent(1.0)),
    "bert-base": dict(_sizes(30522, 768, 3072, 12, 12), model_type="bert", architectures=["BertModel"]),
    "roberta-base": dict(_sizes(50265, 768, 3072, 12, 12), model_type="roberta", architectures=["RobertaModel"],
                         max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5),
    "minilm-l6": dict(_sizes(30522, 384, 1536, 6, 12), model_type="bert", architectures=["BertModel"]),
    "modernbert-base": dict(_sizes(50368, 768, 1152, 22, 12), model_type="modernbert", architectures=["ModernBertModel"],
                            max_position_embeddings=8192, local_attention=128),
    "vit-base": dict(model_type="vit", architectures=["ViTModel"], hidden_size=768, intermediate_size=3072,
                     num_hidden_layers=12, num_attention_heads=12, image_size=224, patch_size=16),
}  # fmt: skip

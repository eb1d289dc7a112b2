"""Read the weights of one decoder layer out of a checkpoint, without the rest of the model, and run that layer fused.

    python examples/load_one_layer.py
"""

from __future__ import annotations

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import fusedblock

LAYER = 1


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",  # as loaded from a checkpoint; with it, no mask means causal
    )
    model = LlamaForCausalLM(config).eval()
    hidden = torch.randn(1, 16, config.hidden_size)
    position_embeddings = model.model.rotary_emb(hidden, torch.arange(16)[None])

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # stands for a downloaded checkpoint
        layer = LlamaDecoderLayer(config, LAYER).eval()
        fusedblock.load_safetensors(layer, folder, prefix=f"model.layers.{LAYER}.")

    same = all(torch.equal(p, q) for p, q in zip(layer.parameters(), model.model.layers[LAYER].parameters(), strict=True))
    print(f"layer {LAYER} holds the checkpoint's weights: {same}")

    with torch.no_grad():
        expected = model.model.layers[LAYER](hidden, position_embeddings=position_embeddings)
        report = fusedblock.fuse(layer)
        output = layer(hidden, position_embeddings=position_embeddings)
    print(report)
    print(f"relative difference from the model's own layer: {(output - expected).norm() / expected.norm():.1e}")


if __name__ == "__main__":
    main()

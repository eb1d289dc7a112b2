"""Read one decoder layer out of a sharded checkpoint and run it fused: no transformers, no other shard, no rest of the model.

    python examples/load_one_layer.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

import fusedblock
from fusedblock import BlockConfig, FusedBlock, KVCache

LAYER = 1
CONFIG = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
          "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}  # fmt: skip


def write_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Stands for a downloaded checkpoint: config.json, shards and their index. Returns what layer LAYER has in it."""
    torch.manual_seed(0)
    layers = [FusedBlock(BlockConfig.from_dict(CONFIG, layer_idx=i)).state_dict() for i in range(CONFIG["num_hidden_layers"])]
    weights = {f"model.layers.{i}.{name}": tensor for i, layer in enumerate(layers) for name, tensor in layer.items()}
    fusedblock.save_safetensors(weights, folder, max_shard_size="250KB")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return layers[LAYER]


def forget_other_shards(folder: Path) -> int:
    """Delete the shards that hold nothing of layer LAYER, as if they had not been downloaded. Returns how many."""
    where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in where.items() if name.startswith(f"model.layers.{LAYER}.")}
    others = set(where.values()) - needed
    for file in others:
        (folder / file).unlink()
    return len(others)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saved = write_checkpoint(folder)
        print(f"shards deleted, since layer {LAYER} is not in them: {forget_other_shards(folder)}")

        block = FusedBlock(BlockConfig.from_pretrained(folder, layer_idx=LAYER), device="meta").eval()
        fusedblock.load_safetensors(block, folder)  # finds the prefix: model.layers.1
    same = all(torch.equal(tensor, saved[key]) for key, tensor in block.state_dict().items())
    print(f"layer {LAYER} holds the checkpoint's weights: {same}")
    print(block)

    hidden = torch.randn(1, 16, block.config.hidden_size)
    with torch.no_grad():
        at_once = block(hidden)
        cache = KVCache(max_length=16)
        prompt, *tokens = hidden.split([12, 1, 1, 1, 1], dim=1)
        steps = [block(prompt, cache=cache), *(block(token, cache=cache) for token in tokens)]
    difference = (torch.cat(steps, dim=1) - at_once).norm() / at_once.norm()
    print(f"relative difference of a prompt and 4 decode steps from one forward: {difference:.1e}")

    block.train()
    loss = block(hidden).square().mean()
    loss.backward()
    print(f"parameters with a gradient: {sum(p.grad is not None for p in block.parameters())} of {len(saved)}")


if __name__ == "__main__":
    main()

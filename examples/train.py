"""Train a fused model as any other: mixed precision, gradient checkpointing, a frozen part, and a checkpoint at the end.

    python examples/train.py                       a tiny model with random weights, on the CPU
    python examples/train.py --device cuda --autocast --checkpointing
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fusedblock

TINY = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--autocast", action="store_true", help="bf16 products on fp32 parameters")
    parser.add_argument("--checkpointing", action="store_true", help="keep no activations, compute them again in the backward")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch sees no GPU here")

    torch.manual_seed(0)
    model = LlamaForCausalLM(TINY).to(args.device).train()
    report = fusedblock.fuse(model)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.model.embed_tokens.requires_grad_(False)  # what is frozen costs no gradient
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)

    text = torch.arange(64, device=args.device).repeat(2)  # a sequence that can be learnt
    batch = torch.stack([text[i : i + 48] for i in range(8)])
    losses = []
    for _ in range(args.steps):
        with torch.autocast(args.device, torch.bfloat16, enabled=args.autocast):
            loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(report)
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {args.steps} steps")

    with tempfile.TemporaryDirectory() as folder:
        fusedblock.save_safetensors(model, Path(folder) / "model.safetensors")
        again = LlamaForCausalLM(TINY).to(args.device)
        fusedblock.load_safetensors(again, folder)
        same = all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
    print(f"the saved weights, loaded into original layers, are the same: {same}")


if __name__ == "__main__":
    main()

"""Swap the transformer layers of a Hugging Face language model, generate, compare with the original layers, and swap back.

    python examples/swap_and_generate.py                      a tiny Llama with random weights, on the CPU
    python examples/swap_and_generate.py PATH --device cuda   a checkpoint on disk, in bfloat16
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

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
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, help="a checkpoint's directory (default: a tiny random Llama)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--tokens", type=int, default=16)
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch sees no GPU here")

    if args.path is not None and not (args.path / "config.json").is_file():
        parser.error(f"{args.path}: expected a checkpoint's directory, with a config.json in it")

    tokenizer = None
    if args.path is None:
        torch.manual_seed(0)
        model = LlamaForCausalLM(TINY)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.path, dtype=torch.bfloat16)
        if any((args.path / name).is_file() for name in TOKENIZER_FILES):
            tokenizer = AutoTokenizer.from_pretrained(args.path)
    if tokenizer:
        prompt = tokenizer(args.prompt, return_tensors="pt").input_ids
    else:
        prompt = torch.randint(0, model.config.vocab_size, (1, 12))
    model = model.eval().to(args.device)
    prompt = prompt.to(args.device)

    def generate() -> torch.Tensor:
        return model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=args.tokens, do_sample=False, pad_token_id=0
        )

    with torch.no_grad():
        logits_before, tokens_before = model(prompt).logits, generate()
        report = fusedblock.fuse(model)
        logits, tokens = model(prompt).logits, generate()
        fusedblock.unfuse(model)
        logits_after = model(prompt).logits

    print(report)
    error = (logits - logits_before).norm() / logits_before.norm()
    print(f"relative difference of the logits, fused against original layers: {error:.1e}")
    print(f"same {args.tokens} greedy tokens: {torch.equal(tokens, tokens_before)}")
    print(f"the same bits again after unfuse: {torch.equal(logits_after, logits_before)}")
    print(tokenizer.decode(tokens[0]) if tokenizer else tokens[0, prompt.shape[1] :].tolist())


if __name__ == "__main__":
    main()

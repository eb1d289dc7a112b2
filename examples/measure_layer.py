"""Launches, memory traffic and time of one layer, before and after the swap.

    python examples/measure_layer.py                       a small layer; without a GPU: launches and bytes, no times
    python examples/measure_layer.py --device cuda --hidden 4096 --batch 4 --seq 2048 --plot pictures
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import fusedblock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64, the width of a head")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--phases", nargs="+", default=["prefill", "decode", "train"], choices=["prefill", "decode", "train"])
    parser.add_argument("--plot", type=Path, help="a folder for one picture a phase (needs matplotlib)")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch sees no GPU here")
    if args.hidden < 64 or args.hidden % 64:
        parser.error(f"--hidden {args.hidden}: expected a multiple of 64, the width of a head")

    torch.manual_seed(0)
    heads = args.hidden // 64
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4 if heads % 4 == 0 else heads,
    )
    layer = LlamaDecoderLayer(config, 0).to(args.device, torch.bfloat16)
    for phase in args.phases:
        if phase == "decode":  # one new token on a context of `seq`
            report = fusedblock.measure(layer, batch=args.batch, seq=1, phase=phase, context=args.seq, device=args.device)
        else:
            report = fusedblock.measure(layer, batch=args.batch, seq=args.seq, phase=phase, device=args.device)
        print(report, end="\n\n")
        if args.plot:
            args.plot.mkdir(parents=True, exist_ok=True)
            report.plot(args.plot / f"{phase}.png")
            print(f"picture: {args.plot / phase}.png", end="\n\n")


if __name__ == "__main__":
    main()

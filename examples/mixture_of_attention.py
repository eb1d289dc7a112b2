"""Attention whose heads are experts: JetMoe's layer by transformers and by fusedblock, the numbers and what they launch and move.

    python examples/mixture_of_attention.py                     a small layer with random weights, on the CPU
    python examples/mixture_of_attention.py --device cuda --seq 2048 --hidden 2048 --heads 16 --width 128
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from transformers import JetMoeConfig
from transformers.models.jetmoe.modeling_jetmoe import JetMoeAttention, JetMoeRotaryEmbedding

import fusedblock
from fusedblock.metering import TrafficCounter


def theirs(layer: JetMoeAttention, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), device=x.device, dtype=x.dtype).triu(1)[None, None]
    return layer(x, mask, (cos, sin))[0]


def ours(layer: JetMoeAttention, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same parameters where they lie; cos and sin hold every angle twice, of which the first half will do."""
    experts, half = layer.experts, layer.head_dim // 2
    return fusedblock.mixture_of_attention(
        x,
        experts.router.layer.weight,
        experts.input_linear.weight,
        layer.kv_proj.weight,
        experts.output_linear.weight,
        cos[..., :half],
        sin[..., :half],
        top_k=layer.top_k,
        head_dim=layer.head_dim,
        bias=experts.bias,
    ).out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4, help="of keys and values, and of every expert")
    parser.add_argument("--width", type=int, default=32, help="of a head")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch sees no GPU here")

    torch.manual_seed(0)
    config = JetMoeConfig(
        hidden_size=args.hidden,
        num_key_value_heads=args.heads,
        kv_channels=args.width,
        num_attention_heads=args.heads * args.top_k,
        num_local_experts=args.experts,
        num_experts_per_tok=args.top_k,
        attn_implementation="sdpa",
    )
    layer = JetMoeAttention(config, layer_idx=0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    layer = layer.to(args.device)
    x = torch.randn(args.batch, args.seq, args.hidden, device=args.device)
    upstream = torch.randn_like(x)
    cos, sin = JetMoeRotaryEmbedding(config).to(args.device)(x, torch.arange(args.seq, device=args.device)[None])

    outs, grads = [], []
    for name, run in (("transformers", theirs), ("fusedblock", ours)):
        with TrafficCounter() as forward:
            out = run(layer, x, cos, sin)
        with TrafficCounter() as backward:
            grads.append(torch.cat([g.flatten() for g in torch.autograd.grad(out, [*layer.parameters()], upstream)]))
        outs.append(out.detach())
        for phase, counter in (("forward", forward), ("backward", backward)):
            total = counter.total()
            print(f"{name:12} {phase:8} {total.launches:4} launches {total.bytes / 1e6:9.2f} MB")
    for what, (want, got) in (("output", outs), ("gradients", grads)):
        difference = (got - want).norm() / want.norm()
        print(f"relative difference of the {what}, fusedblock against transformers: {difference:.1e}")


if __name__ == "__main__":
    main()

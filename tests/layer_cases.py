"""Decoder layers to test with: sizes, weights, inputs, and the same layer written plainly from torch's own functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from op_cases import randn, rotary_tables
from torch import Tensor
from torch.nn import functional as F

from fusedblock.blocks import BlockSpec, BlockWeights

LLAMA = BlockSpec(hidden=64, ffn=136, heads=4, kv_heads=2, head_dim=16, scale=0.25, eps=1e-5)
GEMMA = replace(
    LLAMA, hidden=40, ffn=72, heads=3, kv_heads=1, head_dim=24, activation="gelu_tanh", weight_offset=1.0, round_early=False
)
LLAMA_8B = BlockSpec(hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, scale=128**-0.5, eps=1e-5)
QWEN = replace(LLAMA, kv_heads=1, activation="gelu")


def shapes(spec: BlockSpec) -> list[tuple[int, ...]]:
    """Of the weights, then of the biases, in the order of BlockWeights."""
    q, kv, h, f = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.hidden, spec.ffn
    return [(h,), (q, h), (kv, h), (kv, h), (h, q), (h,), (f, h), (f, h), (h, f), *((n,) for n in (q, kv, kv, h, f, f, h))]


def make_weights(spec: BlockSpec, dtype: torch.dtype, biases: bool = False, seed: int = 0) -> BlockWeights:
    g = torch.Generator().manual_seed(seed)
    used = shapes(spec)[: None if biases else 9]
    return BlockWeights(*[randn(*s, dtype=dtype, generator=g, scale=s[-1] ** -0.5 if len(s) == 2 else 1.0) for s in used])


def inputs(spec: BlockSpec, dtype: torch.dtype, batch: int, seq: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    x = randn(batch, seq, spec.hidden, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return x, *rotary_tables(1, seq, spec.head_dim, dtype)


def plain_layer(spec: BlockSpec, w: BlockWeights, x: Tensor, cos: Tensor, sin: Tensor, *, mask: Tensor | None = None,
                causal: bool = True, update: Any = None) -> Tensor:  # fmt: skip
    """What transformers computes for a pre-norm layer, in x's dtype."""

    def norm(t: Tensor, weight: Tensor) -> Tensor:
        accurate = t if t.dtype is torch.float64 else t.float()
        return F.rms_norm(accurate, t.shape[-1:], None, spec.eps).to(t.dtype) * (weight + spec.weight_offset)

    def heads(t: Tensor) -> Tensor:
        return t.unflatten(-1, (-1, spec.head_dim)).transpose(1, 2)

    def rotate(t: Tensor) -> Tensor:
        a, b = t.chunk(2, -1)
        return t * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]

    y = norm(x, w.input_norm)
    q, k, v = heads(F.linear(y, w.q, w.q_bias)), heads(F.linear(y, w.k, w.k_bias)), heads(F.linear(y, w.v, w.v_bias))
    q, k = rotate(q), rotate(k)
    if update is not None:
        k, v = update(k, v)
    group = spec.heads // spec.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = q @ k.transpose(-1, -2) * spec.scale
    seq, context = logits.shape[-2:]
    visible = torch.ones(seq, context, dtype=torch.bool, device=x.device)
    if causal:
        visible = visible.tril(context - seq)
    if mask is not None and mask.dtype is torch.bool:
        visible = visible & (mask[:, None, None] if mask.dim() == 2 else mask)
    elif mask is not None:
        logits = logits + mask.to(logits.dtype)
    p = logits.masked_fill(~visible, float("-inf")).softmax(-1).nan_to_num(0.0)  # a row that sees nothing gives 0
    h = x + F.linear((p @ v).transpose(1, 2).flatten(2), w.o, w.o_bias)
    y = norm(h, w.post_norm)
    gate, up = F.linear(y, w.gate, w.gate_bias), F.linear(y, w.up, w.up_bias)
    gate = (
        F.silu(gate)
        if spec.activation == "silu"
        else F.gelu(gate, approximate="tanh" if spec.activation == "gelu_tanh" else "none")
    )
    return h + F.linear(gate * up, w.down, w.down_bias)


def in_float64(value: Any) -> Any:
    if isinstance(value, BlockWeights):
        return BlockWeights(*map(in_float64, value))
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


class Cache:
    """Keys and values from before, then the new ones: what HF's caches return."""

    def __init__(self, spec: BlockSpec, dtype: torch.dtype, batch: int, past: int) -> None:
        g = torch.Generator().manual_seed(9)
        self.k, self.v = (randn(batch, spec.kv_heads, past, spec.head_dim, dtype=dtype, generator=g) for _ in "kv")
        self.calls = 0

    def __call__(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return torch.cat((self.k.to(k.dtype), k), 2), torch.cat((self.v.to(v.dtype), v), 2)


def run(
    layer: Any, spec: BlockSpec, w: BlockWeights, given: tuple[Tensor, ...], gradients: bool, **options: Any
) -> dict[str, Tensor]:
    """The layer's result, and with gradients those of x and of every weight, by name."""
    if not gradients:
        with torch.no_grad():
            return {"out": layer(spec, w, *given, **options)}
    w = BlockWeights(*[None if t is None else t.detach().clone().requires_grad_() for t in w])
    x = given[0].detach().clone().requires_grad_()
    out = layer(spec, w, x, *given[1:], **options)
    leaves = {"x": x, **{n: t for n, t in w._asdict().items() if t is not None}}
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(out.device, out.dtype)
    return {
        "out": out.detach(),
        **{f"grad_{n}": g for n, g in zip(leaves, torch.autograd.grad(out, [*leaves.values()], upstream))},
    }

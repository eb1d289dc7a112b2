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
# One layer for each option of BlockSpec, by what is particular to it.
VARIANTS = {
    "layer_norm": replace(LLAMA, norm="layer", mlp="plain", activation="gelu_tanh"),
    "conv1d": replace(LLAMA, norm="layer", mlp="plain", kv_heads=4, qkv_layout="stacked", transposed=True, rope=""),
    "parallel": replace(LLAMA, norm="layer", mlp="plain", kv_heads=4, qkv_layout="per_head", residual="parallel",
                        activation="relu2"),
    "shared_norm": replace(LLAMA, norm="layer", residual="parallel", norms="attn_norm", qk_norm="head", rope="interleaved",
                           tables="repeat"),
    "qk_norm": replace(LLAMA, qk_norm="head"),
    "norms_after": replace(LLAMA, norms="attn_out_norm mlp_out_norm", round_early=False, qk_norm="full"),
    "sandwich": replace(LLAMA, norms="attn_norm attn_out_norm mlp_norm mlp_out_norm", round_early=False, weight_offset=1.0),
    "post_norm": replace(LLAMA, norm="layer", mlp="plain", residual="post", norms="attn_out_norm mlp_out_norm", rope="",
                         activation="gelu"),
    "branch_scale": replace(LLAMA, branch_scale=0.3),
    "fused_weights": replace(LLAMA, qkv_layout="stacked", mlp="gated_stacked", rope="interleaved"),
    "short_tables": replace(LLAMA, tables="short"),
}  # fmt: skip
ROTARY = {"fused_weights": 8}  # columns of the tables, where only a part of a head turns


def shapes(spec: BlockSpec, biases: bool = False) -> dict[str, tuple[int, ...]]:
    """Of the weights, by their names in BlockWeights."""
    q, kv, h, f = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.hidden, spec.ffn
    found = {"q": (q, h), "k": (kv, h), "v": (kv, h)} if spec.qkv_layout == "split" else {"q": (q + 2 * kv, h)}
    found |= {"o": (h, q), "down": (h, f), "up": (2 * f if spec.mlp == "gated_stacked" else f, h)}
    found |= {"gate": (f, h)} if spec.mlp == "gated" else {}
    named = {name: (rows,) for name, (rows, _) in found.items()}
    if spec.transposed:
        found = {name: shape[::-1] for name, shape in found.items()}
    norms = spec.norms.split()
    found |= {name: (h,) for name in norms}
    if spec.qk_norm == "full":
        found |= {"q_norm": (q,), "k_norm": (kv,)}
    elif spec.qk_norm:
        per_head = spec.norm == "layer"  # Cohere's
        found |= {n + "_norm": (heads, spec.head_dim) if per_head else (spec.head_dim,)
                  for n, heads in (("q", spec.heads), ("k", spec.kv_heads))}  # fmt: skip
    if biases:
        found |= {f"{name}_bias": shape for name, shape in named.items()}
        found |= {f"{name}_bias": (h,) for name in norms if spec.norm == "layer"}
    return found


def make_weights(spec: BlockSpec, dtype: torch.dtype, biases: bool = False, seed: int = 0, sinks: bool = False) -> BlockWeights:
    g = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes(spec, biases).items():
        matrix = len(shape) == 2 and "norm" not in name
        inner = shape[0 if spec.transposed else 1] if matrix else 1
        made[name] = randn(*shape, dtype=dtype, generator=g, scale=inner**-0.5)
    if sinks:
        made["sinks"] = randn(spec.heads, dtype=dtype, generator=g)
    return BlockWeights(**made)


def inputs(spec: BlockSpec, dtype: torch.dtype, batch: int, seq: int, seed: int = 1) -> tuple[Tensor, ...]:
    """x, cos and sin; without rope x alone."""
    x = randn(batch, seq, spec.hidden, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    if not spec.rope:
        return (x,)
    rotary = next((n for name, n in ROTARY.items() if VARIANTS[name] == spec), spec.head_dim)
    tables = rotary_tables(1, seq, rotary, dtype)
    if spec.tables == "short":
        return x, *(t[..., : rotary // 2].contiguous() for t in tables)
    if spec.tables == "repeat":
        return x, *(t[..., : rotary // 2].repeat_interleave(2, -1) for t in tables)
    return x, *tables


def plain_layer(spec: BlockSpec, w: BlockWeights, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, *,
                mask: Tensor | None = None, causal: bool = True, windowed: bool = True, cu_seqlens: Any = (None, None),
                update: Any = None) -> Tensor:  # fmt: skip
    """What transformers computes for such a layer, in x's dtype."""

    def norm(t: Tensor, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        weight, bias = getattr(w, name), getattr(w, name + "_bias", None)
        if weight is None:
            return t
        accurate = t if t.dtype is torch.float64 else t.float()
        if spec.norm == "layer":
            y = F.layer_norm(accurate, t.shape[-1:], None, None, spec.eps) * weight.to(accurate.dtype)
            return (y if bias is None else y + bias).to(t.dtype)
        return F.rms_norm(accurate, t.shape[-1:], None, spec.eps).to(t.dtype) * (weight + spec.weight_offset)

    def project(t: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(t, weight.T if spec.transposed else weight, bias)

    def heads(t: Tensor) -> Tensor:
        return t.unflatten(-1, (-1, spec.head_dim))

    def rotate(t: Tensor) -> Tensor:
        if not spec.rope:
            return t
        n = cos.shape[-1] // (1 if spec.tables == "short" else 2)
        c, s = (u[:, :, None, ::2] if spec.tables == "repeat" else u[:, :, None, :n] for u in (cos, sin))
        turned, rest = t[..., : 2 * n], t[..., 2 * n :]
        pairs = turned.unflatten(-1, (2, n) if spec.rope == "half" else (n, 2))
        a, b = pairs.unbind(-2 if spec.rope == "half" else -1)
        out = torch.stack((a * c - b * s, b * c + a * s), -2 if spec.rope == "half" else -1).flatten(-2)
        return torch.cat((out, rest), -1)

    y = norm(x, "attn_norm")
    if spec.qkv_layout == "split":
        q, k, v = project(y, w.q, w.q_bias), project(y, w.k, w.k_bias), project(y, w.v, w.v_bias)
    else:
        qkv, q_width, kv_width = project(y, w.q, w.q_bias), spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        if spec.qkv_layout == "stacked":
            q, k, v = qkv.split((q_width, kv_width, kv_width), -1)
        else:
            q, k, v = (t.flatten(-2) for t in qkv.unflatten(-1, (spec.heads, 3, spec.head_dim)).unbind(-2))
    if spec.qk_norm == "full":
        q, k = norm(q, "q_norm"), norm(k, "k_norm")
    q, k, v = heads(q), heads(k), heads(v)
    if spec.qk_norm == "head":
        q, k = norm(q, "q_norm"), norm(k, "k_norm")
    q, k, v = (t.transpose(1, 2) for t in (rotate(q), rotate(k), v))
    if update is not None:
        k, v = update(k, v)
    group = spec.heads // spec.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = q @ k.transpose(-1, -2) * spec.scale
    seq, context = logits.shape[-2:]
    visible = torch.ones(seq, context, dtype=torch.bool, device=x.device)
    if causal:
        visible = visible.tril(context - seq)
    if windowed and spec.window_left >= 0:
        visible = visible.triu(context - seq - spec.window_left)
    if windowed and spec.window_right >= 0:
        visible = visible.tril(context - seq + spec.window_right)
    if cu_seqlens[0] is not None:  # of one batch
        places = (torch.bucketize(torch.arange(n), b, right=True) for n, b in zip((seq, context), cu_seqlens))
        visible = visible & torch.eq(*(p[:, None] if i == 0 else p for i, p in enumerate(places)))
    if spec.softcap:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    if mask is not None and mask.dtype is torch.bool:
        visible = visible & (mask[:, None, None] if mask.dim() == 2 else mask)
    elif mask is not None:
        logits = logits + mask.to(logits.dtype)
    logits = logits.masked_fill(~visible, float("-inf"))
    if w.sinks is not None:
        logits = torch.cat((logits, w.sinks.view(-1, 1, 1).expand(len(x), -1, seq, -1)), -1)
    p = logits.softmax(-1).nan_to_num(0.0)[..., :context]  # a row that sees nothing gives 0
    attended = project((p @ v).transpose(1, 2).flatten(2), w.o, w.o_bias)

    def add(residual: Tensor, branch: Tensor, name: str) -> Tensor:
        if spec.residual == "post":
            return norm(residual + branch, name)
        return residual + norm(branch, name) * spec.branch_scale

    h = add(x, attended, "attn_out_norm")
    if spec.residual == "parallel":
        z = y if w.mlp_norm is None else norm(x, "mlp_norm")
    else:
        z = norm(h, "mlp_norm")
    act = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"), "relu": F.relu,
           "relu2": lambda t: F.relu(t).square()}[spec.activation]  # fmt: skip
    first = project(z, w.up, w.up_bias)
    if spec.mlp == "plain":
        inner = act(first)
    else:
        gate, up = first.chunk(2, -1) if spec.mlp == "gated_stacked" else (project(z, w.gate, w.gate_bias), first)
        inner = act(gate) * up
    return add(h, project(inner, w.down, w.down_bias), "mlp_out_norm")


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
    grads = dict(zip(leaves, torch.autograd.grad(out, [*leaves.values()], upstream)))
    # As one vector: that of a key bias is 0 or nearly so (softmax ignores it), and alone all rounding.
    biases = [grads.pop(n).flatten() for n in leaves if n.endswith("_bias")]
    grads |= {"biases": torch.cat(biases)} if biases else {}
    return {"out": out.detach(), **{f"grad_{n}": g for n, g in grads.items()}}

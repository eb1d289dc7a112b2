"""The operators of the layer, each beside what torch has for it: where the layer's time goes, and what there is to win."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import fusedblock
from fusedblock.metering.timing import input_sets

from .engine import Candidate, Case, tensors

Form = Callable[..., Any]


@dataclass
class Operator:
    """make() -> inputs, fresh at each call; forms: name -> function of the inputs, the yardstick first. differentiable: places
    of the inputs that get gradients in training. other: forms that compute something else, whose results are not checked;
    inference: forms without a backward. training: FLOPs of forward and backward together, in those of the forward."""

    name: str
    make: Callable[[], tuple[Tensor, ...]]
    forms: dict[str, Form]
    flops: int
    differentiable: tuple[int, ...]
    other: dict[str, Form] = field(default_factory=dict)
    inference: dict[str, Form] = field(default_factory=dict)
    training: float = 3.0


def operators(config: LlamaConfig, batch: int, seq: int, context: int, device: torch.device) -> list[Operator]:
    """Those of one layer call on x `batch seq hidden` over context keys, in the layer's order."""
    generator = torch.Generator(device).manual_seed(2)

    def random(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        made = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return made * scale + shift

    hidden, ffn, heads, kv_heads = (
        config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads
    )  # fmt: skip
    head_dim, eps, tokens = hidden // heads, config.rms_norm_eps, batch * seq
    kv = kv_heads * head_dim
    angle = torch.rand(1, seq, head_dim // 2, generator=generator, device=device) * 6
    cos, sin = (torch.cat([t, t], -1).bfloat16() for t in (angle.cos(), angle.sin()))

    def weight(out_features: int, in_features: int) -> Tensor:
        return random(out_features, in_features, scale=0.02)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    def qkv_rope(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (F.linear(x, w).view(batch, seq, -1, head_dim).transpose(1, 2) for w in (wq, wk, wv))
        q, k = apply_rotary_pos_emb(q, k, cos.to(x.dtype), sin.to(x.dtype))
        return tuple(t.transpose(1, 2) for t in (q, k, v))

    def fused_qkv_rope(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> tuple[Tensor, ...]:
        half = head_dim // 2
        return fusedblock.qkv_rope(x, wq, wk, wv, cos[..., :half], sin[..., :half], head_dim=head_dim)

    def sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None = None) -> Tensor:
        call = partial(F.scaled_dot_product_attention, is_causal=seq > 1, enable_gqa=heads != kv_heads)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if backend is None:
            return call(q, k, v).transpose(1, 2)
        with sdpa_kernel(backend):
            return call(q, k, v).transpose(1, 2)

    def projection(name: str, width: int) -> Operator:
        gamma = random(hidden, scale=0.1, shift=1.0)
        return Operator(
            name,
            lambda: (random(tokens, width), weight(hidden, width), random(tokens, hidden)),
            {
                "torch": lambda x, w, r: r + F.linear(x, w),
                "cublas, addmm": lambda x, w, r: torch.addmm(r, x, w.T),
                "fusedblock": lambda x, w, r: fusedblock.linear(x, w, residual=r),
            },
            2 * tokens * hidden * width,
            (0, 1, 2),
            inference={
                "fusedblock, with row sums": lambda x, w, r: torch.ops.fusedblock.linear(x, w, None, r, gamma.to(x.dtype), 1.0)[0]
            },
        )

    pairs = seq * (2 * context - seq + 1) // 2 if seq > 1 else context
    return [
        Operator(
            "norm",
            lambda: (random(tokens, hidden), random(hidden, scale=0.1, shift=1.0)),
            {
                "transformers": norm,
                "torch": lambda x, w: F.rms_norm(x, (hidden,), w, eps),
                "fusedblock": lambda x, w: fusedblock.rms_norm(x, w, eps=eps),
            },
            4 * tokens * hidden,
            (0, 1),
        ),
        Operator(
            "qkv_rope",
            lambda: (random(batch, seq, hidden), weight(hidden, hidden), weight(kv, hidden), weight(kv, hidden)),
            {"transformers": qkv_rope, "fusedblock": fused_qkv_rope},
            2 * tokens * hidden * (hidden + 2 * kv),
            (0, 1, 2, 3),
            {"cublas, three products alone": lambda x, wq, wk, wv: tuple(F.linear(x, w) for w in (wq, wk, wv))},
        ),
        Operator(
            "attention",
            lambda: (
                random(batch, seq, heads, head_dim),
                random(batch, context, kv_heads, head_dim),
                random(batch, context, kv_heads, head_dim),
            ),
            {
                "sdpa": sdpa,
                "sdpa, cudnn": partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
                "sdpa, flash": partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
                "fusedblock": lambda q, k, v: fusedblock.attention(q, k, v, causal=seq > 1),
            },
            4 * batch * heads * head_dim * pairs,
            (0, 1, 2),
            training=3.5,  # two products forward, five backward
        ),
        projection("o", hidden),
        Operator(
            "gated_mlp",
            lambda: (random(tokens, hidden), weight(ffn, hidden), weight(ffn, hidden)),
            {
                "transformers": lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u),
                "fusedblock": lambda x, g, u: fusedblock.gated_mlp(x, g, u),
            },
            4 * tokens * hidden * ffn,
            (0, 1, 2),
            {"cublas, two products alone": lambda x, g, u: (F.linear(x, g), F.linear(x, u))},
        ),
        projection("down", ffn),
    ]


def cases(
    config: LlamaConfig, batch: int, seq: int, context: int, train: bool, device: torch.device, l2_bytes: int
) -> list[Case]:
    where = f"B{batch} S{seq}" if context == seq else f"B{batch} KV{context}"
    phase = "forward+backward" if train else "forward"
    return [_case(op, f"{op.name} {phase} {where}", train, l2_bytes) for op in operators(config, batch, seq, context, device)]


def _case(op: Operator, name: str, train: bool, l2_bytes: int) -> Case:
    """Inputs are made when the first form is built, and all forms run on the same."""
    sets: list[tuple[Tensor, ...]] = []

    def inputs() -> list[tuple[Tensor, ...]]:
        if not sets:
            sets.append(op.make())
            moved = sum(t.numel() * t.element_size() for t in sets[0])
            sets.extend(op.make() for _ in range(input_sets(moved, l2_bytes, most=16) - 1))
            if train:
                for one in sets:
                    for i in op.differentiable:
                        one[i].requires_grad_(True)
        return sets

    def call(form: Form, given: tuple[Tensor, ...]) -> Callable[[], Any]:
        wanted = [given[i] for i in op.differentiable]

        def run() -> Any:
            with torch.set_grad_enabled(train):
                out = form(*given)
                if not train:
                    return out
                outs = tensors(out)
                grads = [_gradient(t) for t in outs]
                return (*(t.detach() for t in outs), *torch.autograd.grad(outs, wanted, grads))

        return run

    def build(form: Form, checked: bool) -> Candidate:
        return Candidate([call(form, given) for given in inputs()], checked=checked)

    def reference() -> list[Tensor]:
        given = tuple(t.detach().double().requires_grad_(train and i in op.differentiable) for i, t in enumerate(inputs()[0]))
        return [t.detach() for t in tensors(call(next(iter(op.forms.values())), given)())]

    def moved() -> int:
        first = inputs()[0]
        taken = sum(t.numel() * t.element_size() for t in first)
        with torch.no_grad():
            made = sum(t.numel() * t.element_size() for t in tensors(next(iter(op.forms.values()))(*first)))
        # Backward reads the inputs again and the gradients of the results, and writes those of the inputs.
        return taken + made + (2 * taken + made if train else 0)

    forms = {**op.forms, **({} if train else op.inference)}
    builders = {n: partial(build, form, True) for n, form in forms.items()}
    builders |= {n: partial(build, form, False) for n, form in op.other.items()}
    return Case("operator", name, builders, reference, round(op.flops * op.training) if train else op.flops, moved)


_gradients: dict[Any, Tensor] = {}


def _gradient(like: Tensor) -> Tensor:
    """The same random gradient for every result of a shape, rounded to bf16 also where a reference wants it in float64."""
    key = tuple(like.shape), like.device
    if key not in _gradients:
        generator = torch.Generator(like.device).manual_seed(3)
        _gradients[key] = torch.randn(like.shape, generator=generator, device=like.device, dtype=torch.bfloat16)
    return _gradients[key].to(like.dtype)

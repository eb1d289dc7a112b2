"""Rotary position embedding of queries and keys in one launch (Su et al. 2021, arXiv 2104.09864), and its backward.

    y[a] = u[a] * cos[i] - u[b] * sin[i]
    y[b] = u[b] * cos[i] + u[a] * sin[i]          for the pairs (a, b) = pair i, i < half_rotary; other features pass

    half split      (a, b) = (i, i + half_rotary)               GPT-NeoX, Llama
    interleaved     (a, b) = (2i, 2i + 1)                       the paper, GPT-J, Cohere

    q          batch seq heads head_dim            k   batch seq kv_heads head_dim
    cos, sin   1|batch seq half_rotary, of any dtype and any strides; 2 * half_rotary <= head_dim

The backward turns the gradients by the opposite angle. The kernel is also the elementwise part of qkv_rope's backward: there
it goes on through the per-head norm, whose statistics it takes again from the values before it:

    rms     u = w * p * rstd                   layer   u = w * (p - mean(p)) * rstd               over head_dim
    grad_p = rstd * (g - xhat * mean(g * xhat) [- mean(g) for layer]),   g = grad_u * w
    grad_w = sum of grad_u * xhat over tokens, as partial sums of each program in a fixed order and a second launch

HBM, in elements: reads q, k, cos, sin once, writes q, k; with the norm also reads the values before it.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ._gemm import accumulator
from ._lang import cdiv, next_power_of_2, tl, triton
from ._launch import contiguous_last, on_device
from ._launch import launch as _launch
from ._spec import Args, Op, ShapeError, Sizes, Spec, Write, accumulate_dtype, flag

TABLES = {"cos": "1|batch seq half_rotary", "sin": "1|batch seq half_rotary"}


def check_head_dim(name: str, sizes: Sizes) -> None:
    """head_dim is one that the kernels take, and the tables are not wider than it."""
    head_dim, turned = sizes["head_dim"], 2 * sizes.get("half_rotary", 0)
    if not 16 <= head_dim <= 256 or head_dim % 8:
        raise ValueError(f"{name}: head_dim={head_dim}, expected 16 to 256 in multiples of 8")
    if turned > head_dim:
        raise ShapeError(f"{name}: cos has half_rotary={turned // 2}, expected at most head_dim/2={head_dim // 2}")


def _check(sizes: Sizes, args: Args) -> dict[str, int]:
    check_head_dim("rope", sizes)
    return {}


_HEADS = {"q": "batch seq heads head_dim", "k": "batch seq kv_heads head_dim"}

SPEC = Spec(
    name="rope",
    reads={**_HEADS, **TABLES},
    any_dtype=frozenset(TABLES),
    writes={n: Write(axes, "q") for n, axes in _HEADS.items()},
    derive=_check,
    flops=lambda s, a: s["batch"] * s["seq"] * (s["heads"] + s["kv_heads"]) * 6 * s["half_rotary"],
)


def rotate(u: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """u `batch seq heads head_dim` in the dtype of sums, cos and sin `1|batch seq half_rotary`; of u's dtype and layout."""
    cos, sin = (rearrange(t.to(u.dtype), "batch seq half -> batch seq 1 half") for t in (cos, sin))
    n = 2 * cos.shape[-1]
    pairs = "(half two)" if interleaved else "(two half)"
    a, b = rearrange(u[..., :n], f"batch seq heads {pairs} -> two batch seq heads half", two=2)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin))
    return torch.cat((rearrange(turned, f"two batch seq heads half -> batch seq heads {pairs}"), u[..., n:]), -1)


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    acc = accumulate_dtype(q.dtype)
    return rotate(q.to(acc), cos, sin, interleaved).to(q.dtype), rotate(k.to(acc), cos, sin, interleaved).to(q.dtype)


def launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("rope")


BACKWARD_SPEC = Spec(
    name="rope_backward",
    reads={"grad_q": _HEADS["q"], "grad_k": _HEADS["k"], **TABLES},
    any_dtype=frozenset(TABLES),
    writes={f"grad_{n}": Write(axes, "grad_q", flag(f"need_{n}")) for n, axes in _HEADS.items()},
    derive=_check,
    flops=lambda s, a: s["batch"] * s["seq"] * 6 * s["half_rotary"] * (
        s["heads"] * a["need_q"] + s["kv_heads"] * a["need_k"]
    ),
)  # fmt: skip


def backward_reference(
    grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, need_q: bool, need_k: bool
) -> tuple[Tensor, Tensor]:
    acc = accumulate_dtype(grad_q.dtype)
    return tuple(
        rotate(g.to(acc), cos, -sin, interleaved).to(g.dtype) if need else g.new_empty(0)
        for g, need in ((grad_q, need_q), (grad_k, need_k))
    )  # type: ignore[return-value]


def backward_launch(
    grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, need_q: bool, need_k: bool
) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("rope_backward")


OP = Op(SPEC, launch, reference, Op(BACKWARD_SPEC, backward_launch, backward_reference))

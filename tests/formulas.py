"""The formula of every op, in whatever dtype the arguments have: float64.

They are written from the papers, share nothing with the ops' own references, and are differentiated by autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from einops import einsum, repeat
from moe_formula import moe_index, moe_route
from torch import Tensor

Args = dict[str, Any]


def _norm(a: Args) -> dict[str, Tensor]:
    mean = a["x"].mean(-1)
    centred = a["x"] - mean[:, None] if a["kind"] == "layer" else a["x"]
    rstd = (centred**2).mean(-1).add(a["eps"]) ** -0.5
    y = (a["weight"] + a["weight_offset"]) * centred * rstd[:, None]
    for name in ("bias", "residual"):
        y = y if a[name] is None else y + a[name]
    return {"y": y, "mean": mean, "rstd": rstd}


def _project(a: Args, x: Tensor, name: str) -> Tensor:
    y = einsum(x, a[f"{name}_weight" if name else "weight"], "... hidden, out hidden -> ... out")
    if a.get("sumsq") is not None:
        y = y / (a["sumsq"].sum(-1, keepdim=True) / x.shape[-1] + a["eps"]).sqrt()
    b = a[f"{name}_bias" if name else "bias"]
    return y if b is None else y + b


def _linear(a: Args) -> dict[str, Tensor]:
    out = a["scale"] * _project(a, a["x"], "")
    if a["residual"] is not None:
        out = out + a["residual"]
    if a["norm_weight"] is None:
        return {"out": out}
    return {"out": out, "scaled": out * a["norm_weight"], "sumsq": (out**2).sum(-1)}


def _turned(u: Tensor, a: Args) -> Tensor:
    """The two features of a pair as one complex number, turned by its angle; u `batch seq heads d`."""
    n = 2 * a["cos"].shape[-1]
    part = u[..., :n]
    pairs = part.unflatten(-1, (-1, 2)) if a["interleaved"] else part.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * torch.complex(a["cos"], a["sin"])[:, :, None, :])
    return torch.cat(((turned if a["interleaved"] else turned.transpose(-1, -2)).flatten(-2), u[..., n:]), -1)


def _rope(a: Args) -> dict[str, Tensor]:
    return {n: _turned(a[n], a) for n in "qk"}


def _qkv_rope(a: Args) -> dict[str, Tensor]:
    flat = {n: t.flatten(0, 1) if n.endswith("weight") else t.flatten() for n, t in a.items()
            if isinstance(t, Tensor) and n.endswith(("_weight", "_bias"))}  # fmt: skip
    pre = {n: _project({**a, **flat}, a["x"], n).unflatten(-1, a[f"{n}_weight"].shape[:2]) for n in "qkv"}
    out = dict(pre)
    for n in "qk":
        if a["q_norm"] is not None:
            u = pre[n] - pre[n].mean(-1, keepdim=True) if a["norm_kind"] == "layer" else pre[n]
            out[n] = (a[f"{n}_norm"] + a["weight_offset"]) * u / ((u**2).mean(-1, keepdim=True) + a["eps"]) ** 0.5
        if a["cos"] is not None:
            out[n] = _turned(out[n], a)
    return out if a["q_norm"] is None else {**out, "q_pre": pre["q"], "k_pre": pre["k"]}


def activation(x: Tensor, name: str) -> Tensor:
    if name == "silu":
        return x / (1 + torch.exp(-x))
    if name == "gelu":
        return x / 2 * (1 + torch.erf(x / 2**0.5))
    if name == "relu":
        return (x + x.abs()) / 2
    if name == "relu2":
        return (x**2 + x * x.abs()) / 2
    return x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _gated_mlp(a: Args) -> dict[str, Tensor]:
    gate, up = _project(a, a["x"], "gate"), _project(a, a["x"], "up")
    return {"out": activation(gate, a["activation"]) * up, "gate": gate, "up": up}


def _plain_mlp(a: Args) -> dict[str, Tensor]:
    pre = _project(a, a["x"], "")
    return {"out": activation(pre, a["activation"]), "pre": pre}


def _attention(a: Args) -> dict[str, Tensor]:
    seq, context = a["q"].shape[1], a["k"].shape[1]
    group = a["q"].shape[2] // a["k"].shape[2]
    k, v = (repeat(a[n], "batch context heads d -> batch context (heads group) d", group=group) for n in "kv")
    logits = a["scale"] * einsum(a["q"], k, "batch i heads d, batch j heads d -> batch heads i j")
    if a["softcap"]:
        logits = a["softcap"] * torch.tanh(logits / a["softcap"])
    if a["bias"] is not None:
        logits = logits + a["bias"]
    visible = torch.ones(seq, context, dtype=torch.bool)
    if a["right"] >= 0:
        visible = visible.tril(context - seq + a["right"])
    if a["left"] >= 0:
        visible = visible.triu(context - seq - a["left"])
    logits = logits.masked_fill(~visible, float("-inf"))
    if a["sinks"] is not None:  # a key of value 0
        logits = torch.cat((logits, a["sinks"].view(1, -1, 1, 1).expand(*logits.shape[:3], 1)), -1)
    out = einsum(logits.softmax(-1)[..., :context], v, "batch heads i j, batch j heads d -> batch i heads d")
    return {"out": out, "lse": logits.logsumexp(-1)}


def _moe_experts(a: Args) -> dict[str, Tensor]:
    """Every token through all experts, and what it did not choose times 0: no index but the experts' numbers."""
    wu, wd = (w.mT if a["transposed"] else w for w in (a["gate_up_weight"], a["down_weight"]))
    both = einsum(a["x"], wu, "tokens hidden, experts out hidden -> experts tokens out")
    if a["gate_up_bias"] is not None:
        both = both + a["gate_up_bias"][:, None]
    ffn = both.shape[-1] // 2
    gate, up = (both[..., 0::2], both[..., 1::2]) if a["interleaved"] else (both[..., :ffn], both[..., ffn:])
    if a["activation"] == "clamped_swish":
        gate, up = gate.minimum(torch.tensor(a["limit"])), up.clip(-a["limit"], a["limit"])
        h = (up + 1) * gate / (1 + torch.exp(-a["alpha"] * gate))
    else:
        h = activation(gate, a["activation"]) * up
    y = einsum(h, wd, "experts tokens ffn, experts hidden ffn -> tokens experts hidden")
    if a["down_bias"] is not None:
        y = y + a["down_bias"]
    choice = torch.nn.functional.one_hot(a["indices"].long(), wu.shape[0]).to(y)
    out = einsum(y, choice, a["weights"], "tokens experts hidden, tokens k experts, tokens k -> tokens hidden")
    out = out if a["residual"] is None else out + a["residual"]
    token = torch.arange(a["x"].shape[0], device=y.device).repeat_interleave(a["indices"].shape[1])
    expert = a["indices"].flatten().long()
    by_row = sorted(range(expert.numel()), key=lambda slot: (int(expert[slot]), slot))
    return {"out": out, "gate_up": both[expert, token][by_row]}


def _moe_linear(a: Args) -> dict[str, Tensor]:
    """Every slot through all experts, and what it did not choose times 0."""
    w, (tokens, top_k) = a["weight"].mT if a["transposed"] else a["weight"], a["indices"].shape
    choice = torch.nn.functional.one_hot(a["indices"].long() + 1, w.shape[0] + 1)[..., 1:].to(w)  # -1: none of them
    if a["weights"] is None:
        x = repeat(a["x"], "tokens inner -> tokens k inner", k=top_k)
    else:
        x = a["x"].reshape(tokens, a["heads"], top_k, -1).transpose(1, 2).reshape(tokens, top_k, -1)
    y = einsum(x, w, choice, "tokens k inner, experts out inner, tokens k experts -> tokens k out")
    if a["bias"] is not None:
        y = y + einsum(choice, a["bias"], "tokens k experts, experts out -> tokens k out")
    if a["weights"] is None:
        return {"out": y.reshape(tokens, top_k, a["heads"], -1).transpose(1, 2).reshape(tokens, -1)}
    out = einsum(y, a["weights"], "tokens k out, tokens k -> tokens out")
    for name in ("residual", "out_bias"):
        out = out if a[name] is None else out + a[name]
    return {"out": out}


FORMULAS: dict[str, Callable[[Args], dict[str, Tensor]]] = {
    "norm": _norm, "linear": _linear, "qkv_rope": _qkv_rope, "rope": _rope, "gated_mlp": _gated_mlp, "plain_mlp": _plain_mlp,
    "attention": _attention, "decode_attention": _attention, "moe_route": moe_route, "moe_index": moe_index,
    "moe_experts": _moe_experts, "moe_linear": _moe_linear,
}  # fmt: skip

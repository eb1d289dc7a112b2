"""The implementations that attention is measured beside, each from a case to a function of its inputs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusedblock
from fusedblock.kernels import attention, attention_backward, attention_hopper_backward
from fusedblock.kernels._attention_skeleton import forced

from .attention_problem import BLOCK, Inputs, Problem

Form = Callable[[Inputs], Tensor]  # -> `batch seq heads head_dim`


def ours(p: Problem, first: Inputs, compiled: bool, contiguous: bool = False) -> Form:
    """contiguous: on q, k, v as the others take them, where the case has pages or fp8."""
    fixed: dict[str, Any] = {"causal": p.causal}
    if p.left >= 0:
        fixed["window"] = (p.left, 0 if p.causal else -1)
    if p.softcap:
        fixed["softcap"] = p.softcap
    if p.documents:
        fixed |= {"max_seqlen_q": max(p.documents), "max_seqlen_k": max(p.documents)}

    def run(given: Inputs) -> Tensor:
        words: dict[str, Any] = {"q": given.q, "k": given.k, "v": given.v, **fixed}
        if not contiguous:
            words |= given.ours
        for name in ("sinks", "alibi_slopes", "bias"):
            if (t := getattr(given, name)) is not None:
                words[name] = t
        if p.documents:
            words |= {name: words[name][0] for name in ("q", "k", "v")}
        q, k, v = (words.pop(name) for name in ("q", "k", "v"))
        out: Tensor = fusedblock.attention(q, k, v, **words)
        return out[None] if p.documents else out

    return run


def sdpa(p: Problem, first: Inputs, compiled: bool, backend: SDPBackend, masked: bool = False) -> Form:
    """masked: by a tensor of all pairs, made ahead, or by the bias. The memory-efficient backend and the formula take no groups
    of heads: k and v are repeated for them, as transformers does. Not compiled, as on a CPU, the formula may stand in for a
    backend."""
    repeat = p.heads // p.kv_heads if backend in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH) else 1
    mask: Tensor | None = None
    if masked and not p.bias:
        left, end = (t[: 1 if not p.prefix else None, :, None].to(first.q.device) for t in p.spans())
        key = torch.arange(p.keys, device=first.q.device)
        mask = ((key >= left) & (key < end))[:, None]
    causal = p.causal and not masked and p.seq == p.keys
    backends = [backend] if compiled else [backend, SDPBackend.MATH]

    def run(given: Inputs) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (given.q, given.k, given.v))
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        bias = given.bias.expand(p.batch, -1, -1, -1) if given.bias is not None else mask
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
            ).transpose(1, 2)

    return run


def padded(p: Problem, first: Inputs, compiled: bool) -> Form:
    """Documents as a batch padded to the longest, causal, so that no query meets padding; padding and its removal are counted."""
    longest, count = max(p.documents), len(p.documents)
    places = torch.cat([torch.arange(n) + i * longest for i, n in enumerate(p.documents)]).to(first.q.device)

    def run(given: Inputs) -> Tensor:
        q, k, v = (
            t.new_zeros(count * longest, *t.shape[2:]).index_copy(0, places, t[0]).unflatten(0, (count, longest)).transpose(1, 2)
            for t in (given.q, given.k, given.v)
        )
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=p.causal, enable_gqa=p.heads != p.kv_heads)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, places)[None]

    return run


def varlen(p: Problem, first: Inputs, compiled: bool) -> Form:
    """torch.nn.attention.varlen, under the arguments it has in this release."""
    from torch.nn.attention.varlen import varlen_attn

    lengths = torch.tensor(p.documents or (p.seq,) * p.batch)
    offsets = F.pad(lengths.cumsum(0), (1, 0)).int().to(first.q.device)
    known = inspect.signature(varlen_attn).parameters
    words: dict[str, Any] = {"enable_gqa": p.heads != p.kv_heads} if "enable_gqa" in known else {}
    if "window_size" in known:
        words["window_size"] = (p.left, 0 if p.causal else -1)
    elif p.left < 0:
        words["is_causal"] = p.causal
    else:
        raise NotImplementedError("varlen_attn of this torch has no windows")
    longest = int(lengths.max())

    def run(given: Inputs) -> Tensor:
        q, k, v = (t.flatten(0, 1) for t in (given.q, given.k, given.v))
        out: Tensor = varlen_attn(q, k, v, offsets, offsets, longest, longest, **words)
        return out.view(given.q.shape)

    return run


def _block_mask(p: Problem, device: torch.device, compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    if p.block_map:  # all of whole blocks, about whose pairs only the formula asks
        blocks = p.blocks().to(device)
        form = None if compiled else lambda b, h, i, j: blocks[i // BLOCK, j // BLOCK]
        count, order = (t[None, None].int() for t in (blocks.sum(-1), blocks.int().argsort(stable=True, descending=True)))
        return BlockMask.from_kv_blocks(torch.zeros_like(count), order, count, order, BLOCK_SIZE=BLOCK, mask_mod=form)
    if p.prefix:
        prefix = torch.tensor(p.prefix, device=device)
        return create_block_mask(lambda b, h, i, j: (j <= i) | (j < prefix[b]), p.batch, None, p.seq, p.keys, device=device)
    if p.documents:
        lengths = torch.tensor(p.documents, device=device)
        document = torch.arange(len(p.documents), device=device).repeat_interleave(lengths)
        form = lambda b, h, i, j: (j <= i) & (document[i] == document[j])
    elif p.left >= 0:
        form = lambda b, h, i, j: (j <= i) & (i - j <= p.left)
    elif p.causal:
        form = lambda b, h, i, j: j <= i
    else:
        return None
    return create_block_mask(form, None, None, p.seq, p.keys, device=device)


def flex(p: Problem, first: Inputs, compiled: bool) -> Form:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    mask = _block_mask(p, first.q.device, compiled)
    softcap = p.softcap

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, slopes: Tensor | None) -> Tensor:
        def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if softcap:
                score = softcap * torch.tanh(score / softcap)
            if slopes is not None:
                score = score - slopes[h] * (i - j)
            if bias is not None:
                score = score + bias[0, h, i, j]
            return score

        changed = softcap or slopes is not None or bias is not None
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        words: dict[str, Any] = {"block_mask": mask, "enable_gqa": q.shape[1] != k.shape[1]}
        if changed:
            words["score_mod"] = change
        if sinks is None:
            return flex_attention(q, k, v, **words).transpose(1, 2)
        out, sums = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **words)
        return (out * torch.sigmoid(sums.lse - sinks[:, None])[..., None].to(out.dtype)).transpose(1, 2)

    if compiled:
        from torch._functorch import config

        torch._dynamo.reset()  # else the cases count as recompilations of one function, which are limited
        config.donated_buffer = False  # so that a backward can run again on the same forward
        run = torch.compile(run, dynamic=False, fullgraph=True)
    else:
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    return lambda g: run(g.q, g.k, g.v, g.bias, g.sinks, g.alibi_slopes)


def fa4(p: Problem, first: Inputs, compiled: bool) -> Form:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    words: dict[str, Any] = {"causal": p.causal}
    if p.left >= 0:
        words["window_size"] = (p.left, 0)
    if p.softcap:
        words["softcap"] = p.softcap
    if p.documents:
        offsets, longest = first.ours["cu_seqlens_q"], max(p.documents)
        words |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}

    def run(given: Inputs) -> Tensor:
        if given.sinks is not None:
            words["learnable_sink"] = given.sinks
        if p.documents:
            out = flash_attn_varlen_func(given.q[0], given.k[0], given.v[0], **words)
        else:
            out = flash_attn_func(given.q, given.k, given.v, **words)
        out = out[0] if isinstance(out, tuple) else out
        return out[None] if p.documents else out

    return run


def standard(p: Problem, first: Inputs, compiled: bool) -> Form:
    """In three steps that pass the logits through memory, as transformers' eager attention does."""
    group = p.heads // p.kv_heads

    def run(given: Inputs) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (given.q, given.k, given.v))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        logits = (q * p.scale) @ k.mT
        return (torch.softmax(logits, -1, dtype=torch.float32).to(v.dtype) @ v).transpose(1, 2)

    return run


@dataclass(frozen=True)
class Way:
    """How else fusedblock could compute a case: the kernels, what is set in their modules, in which direction that tells ("": in
    both)."""

    skeleton: str
    settings: dict[tuple[Any, str], Any] = field(default_factory=dict)
    direction: str = ""


def _tiles(module: Any, config: Any, direction: str) -> tuple[str, Way]:
    return f"fusedblock, {_sizes(config)}", Way("portable", {(module, "configure"): lambda *_, **__: config}, direction)


def _sizes(config: Any) -> str:
    if isinstance(config, tuple):
        return ", ".join(f"{name} {_sizes(one)}" for name, one in zip(("kv", "q"), config))
    ahead = " ahead" if getattr(config, "ahead", False) else ""
    return f"{config.block_m}x{config.block_n} w{config.num_warps} s{config.num_stages}{ahead}"


# Of a bias for every query and key: what the compiler makes without spills, in rows, keys, warps and stages.
_KV, _Q = ((64, 64, 4, 2), (32, 64, 4, 3), (64, 64, 4, 1)), ((64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 2))
BIAS_TILES = dict([
    *(_tiles(attention, attention.Config(*config), "forward") for config in (
        (64, 128, 4, 1), (128, 64, 8, 3, True), (128, 64, 8, 4, True), (64, 64, 4, 1), (64, 64, 4, 2))),
    *(_tiles(attention_backward, tuple(attention_backward.Config(*config) for config in pair), "backward")
      for pair in (*((kv, _Q[0]) for kv in _KV), *((_KV[0], q) for q in _Q[1:]))),
])  # fmt: skip
_PARTS = (attention_hopper_backward, "PARTS")
WAYS = {
    "fusedblock, portable": Way("portable"),
    "fusedblock, Hopper": Way("hopper"),
    "fusedblock, short": Way("short", direction="forward"),
    "fusedblock, dP in two products": Way("hopper", {_PARTS: {64: 32, 128: 64}}, "backward"),
    "fusedblock, dP in one product": Way("hopper", {_PARTS: {}}, "backward"),
    **BIAS_TILES,
}

# compiled: as it is timed; else as far as it can run on a CPU.
FORMS: dict[str, Callable[[Problem, Inputs, bool], Form]] = {
    "sdpa, cudnn": partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "sdpa, flash": partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "sdpa, efficient": partial(sdpa, backend=SDPBackend.EFFICIENT_ATTENTION),
    "sdpa, formula": partial(sdpa, backend=SDPBackend.MATH),
    "sdpa, mask": partial(sdpa, backend=SDPBackend.EFFICIENT_ATTENTION, masked=True),
    "sdpa, padded": padded,
    "varlen_attn": varlen,
    "flex": flex,
    "fa4": fa4,
    "standard": standard,
    "fusedblock": ours,
    "fusedblock, contiguous bf16": partial(ours, contiguous=True),
    **dict.fromkeys(WAYS, ours),  # inside `within`
}
# Those that compile something for every case, which `ahead` does in many processes at once.
COMPILED = ("fusedblock", "fusedblock, contiguous bf16", "flex", "fa4", *WAYS)


def within(name: str, call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """A call, forward or backward, as the form of this name is to be run."""
    if name not in WAYS:
        return call
    way = WAYS[name]

    def run() -> Any:
        with forced(way.skeleton, device), ExitStack() as changed:
            for (module, attribute), value in way.settings.items():
                changed.enter_context(patch.object(module, attribute, value))
            return call()

    return run

"""Attention in plain torch: what the kernels must equal, and what runs where there is no GPU.

One segment at a time, with the whole matrix of logits. Formulas and axes as in attention.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor

from ._attention import MASKED
from ._attention_tiles import MAP_BLOCK
from ._spec import FP8, Args, Sizes, accumulate_dtype

_ROUND_A, _ROUND_B, _KEY_A, _KEY_B, _WORD = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, 0xFFFFFFFF


def philox(seed: int, c0: Tensor, c1: Tensor, c2: Tensor) -> Tensor:
    """First word of Philox4x32-10 (Salmon et al. 2011) for counters (c0, c1, c2, 0), as int64; counters broadcast."""
    c0, c1, c2 = torch.broadcast_tensors(c0.long() & _WORD, c1.long() & _WORD, c2.long() & _WORD)
    c3, k0, k1 = torch.zeros_like(c0), seed & _WORD, seed >> 32 & _WORD
    for _ in range(10):  # products of two words overflow int64 in the sign only
        a, b = _ROUND_A * c0, _ROUND_B * c2
        c0, c1, c2, c3 = (b >> 32 & _WORD) ^ c1 ^ k0, b & _WORD, (a >> 32 & _WORD) ^ c3 ^ k1, a & _WORD
        k0, k1 = k0 + _KEY_A & _WORD, k1 + _KEY_B & _WORD
    return c0


def kept(seed: Tensor, rows: Tensor, cols: Tensor, heads: Tensor, dropout_p: float) -> Tensor:
    """Which weights dropout keeps, `heads rows cols`; heads: batch * all heads + head, rows: of the tensor q."""
    words = philox(int(seed), cols[None, None, :], rows[None, :, None], heads[:, None, None])
    return (words >> 8).float() * 2.0**-24 >= torch.tensor(dropout_p, dtype=torch.float32, device=words.device)


@dataclass(frozen=True)
class Segment:
    """Batch entries that share lengths: where their queries lie, and their keys and values `batch context kv_heads ...`."""

    batch: slice
    rows: slice
    cols: slice
    k: Tensor
    v: Tensor
    number: int  # of the sequence


def _bounds(arg: str, t: Tensor, tokens: int, op: str) -> list[int]:
    found: list[int] = t.tolist()
    if found[0] != 0 or any(b < a for a, b in zip(found, found[1:])) or found[-1] > tokens:
        rule = f"must begin with 0, never decrease and end at or below the {tokens} tokens there are"
        raise ValueError(f"{op}: {arg}={found} {rule}")
    return found


def check_lengths(op: str, sizes: Sizes, args: Args) -> None:
    """Raises ValueError naming the argument where lengths contradict the tensors. Waits for the device."""
    for arg, tokens in (("cu_seqlens_q", sizes["seq"]), ("cu_seqlens_k", sizes["k_len"])):
        if args.get(arg) is not None:
            _bounds(arg, args[arg], tokens, op)
    used, table = args.get("seqused_k"), args.get("block_table")
    for n in [] if used is None else used.tolist():
        if not 0 <= n <= sizes["context"]:
            raise ValueError(f"{op}: seqused_k has a length of {n}, expected 0 to {sizes['context']}")
    if table is not None and used is not None:
        pages = used.div(sizes["k_len"], rounding_mode="floor") + (used % sizes["k_len"] > 0)
        live = torch.arange(table.shape[1], device=table.device) < pages[:, None]
        wrong = table[live & ((table < 0) | (table >= sizes["k_batch"]))]
        if wrong.numel():
            raise ValueError(f"{op}: block_table names page {int(wrong[0])}, expected 0 to {sizes['k_batch'] - 1}")
    prefix = args.get("prefix_lens")
    if prefix is not None and bool((prefix < 0).any()):
        raise ValueError(f"{op}: prefix_lens={prefix.tolist()}, expected lengths of at least 0")


def segments(op: str, sizes: Sizes, args: Args) -> Iterator[Segment]:
    """The sequences of the arguments, all at once where they have equal lengths."""
    check_lengths(op, sizes, args)
    k, v, used, table = args["k"], args["v"], args.get("seqused_k"), args.get("block_table")
    whole = slice(None)
    if args.get("cu_seqlens_q") is None and used is None:
        yield Segment(whole, whole, whole, k, v, 0)
        return
    cu_q = None if args.get("cu_seqlens_q") is None else args["cu_seqlens_q"].tolist()
    cu_k = None if args.get("cu_seqlens_k") is None else args["cu_seqlens_k"].tolist()
    for i in range(sizes["sequences"]):
        batch = slice(i, i + 1) if cu_q is None else slice(0, 1)
        rows = whole if cu_q is None else slice(cu_q[i], cu_q[i + 1])
        if table is not None and used is not None:
            n = int(used[i])
            pages = table[i, : -(-n // k.shape[1])].long()
            keys, values = (t[pages].flatten(0, 1)[None, :n] for t in (k, v))
            cols = slice(0, n)
        else:
            cols = slice(0, int(args["seqused_k"][i])) if cu_k is None else slice(cu_k[i], cu_k[i + 1])
            keys, values = k[batch, cols], v[batch, cols]
        yield Segment(batch, rows, cols, keys, values, i)


def _outer(t: Tensor, axis: int, kv_heads: int) -> Tensor:
    """An axis of `1|heads` as two, `kv_heads group` or `1 1`."""
    n = kv_heads if t.shape[axis] > 1 else 1
    return t.unflatten(axis, (n, t.shape[axis] // n)) if t.shape[axis] else t.unflatten(axis, (0, 1))


def _of(t: Tensor | None, segment: Segment) -> Tensor | None:
    """The part of a `1|batch ...` tensor."""
    return t if t is None or t.shape[0] == 1 else t[segment.batch]


def _dequantised(t: Tensor, scale: Tensor | None, acc: torch.dtype) -> Tensor:
    t = t.to(acc)
    return t if scale is None else t * scale[:, None, :, None].to(acc)


@dataclass(frozen=True)
class Logits:
    """x `batch kv_heads group seq context`, -inf where hidden; slope: its derivative by the product (softcap), or None."""

    x: Tensor
    slope: Tensor | None
    q: Tensor  # batch kv_heads group seq head_dim, dequantised
    k: Tensor  # batch kv_heads 1 context head_dim, and zero where nothing attends
    v: Tensor
    keep: Tensor | None  # what dropout keeps


def logits(segment: Segment, args: Args) -> Logits:
    acc = accumulate_dtype(args["q"].dtype)
    q = args["q"][segment.batch, segment.rows]
    kv_heads, heads, seq, context = segment.k.shape[2], q.shape[2], q.shape[1], segment.k.shape[1]
    q = _dequantised(q, _of(args.get("q_scale"), segment), acc)
    k = _dequantised(segment.k, _of(args.get("k_scale"), segment), acc)
    v = _dequantised(segment.v, _of(args.get("v_scale"), segment), acc)
    rows = rearrange(q, "batch seq (kv_heads group) head_dim -> batch kv_heads group seq head_dim", kv_heads=kv_heads)
    keys, values = (rearrange(t, "batch context kv_heads dim -> batch kv_heads 1 context dim") for t in (k, v))
    x = torch.matmul(rows, keys.mT) * args["scale"]
    slope = None
    if args["softcap"]:
        t = torch.tanh(x / args["softcap"])
        x, slope = args["softcap"] * t, 1 - t * t
    place = torch.arange(seq, device=q.device)[:, None] + (context - seq)
    col = torch.arange(context, device=q.device)
    slopes = args.get("alibi_slopes")
    bias, mask = (_of(args.get(n), segment) for n in ("bias", "mask"))
    if slopes is not None:
        own = segment.batch if args.get("cu_seqlens_q") is None else slice(segment.number, segment.number + 1)
        slopes = slopes if slopes.shape[0] == 1 else slopes[own]
        x = x - _outer(slopes.to(acc), 1, kv_heads)[..., None, None] * (place - col).abs()
    if bias is not None:
        bias = bias if bias.shape[3] == 1 else bias[..., segment.cols]
        x = x + _outer(bias.to(acc), 1, kv_heads)
    shown = torch.ones(1, 1, 1, seq, context, dtype=torch.bool, device=q.device)
    if mask is not None:
        mask = _outer(mask[..., segment.cols], 1, kv_heads)
        if mask.dtype is torch.bool:
            shown = shown & mask
        else:
            live = mask.to(acc) > MASKED
            shown, x = shown & live, x + mask.to(acc).masked_fill(~live, 0)
    block_map, prefix = _of(args.get("block_map"), segment), args.get("prefix_lens")
    if block_map is not None:
        full = repeat(block_map, "b h i j -> b h (i m) (j n)", m=MAP_BLOCK, n=MAP_BLOCK)
        shown = shown & _outer(full[:, :, :seq, segment.cols][..., :context], 1, kv_heads)
    if args["right"] >= 0:
        near = col <= place + args["right"]
        if prefix is not None:
            near = near | (col < prefix[segment.batch, None, None, None, None])
        shown = shown & near
    if args["left"] >= 0:
        shown = shown & (col >= place - args["left"])
    x = x.masked_fill(~shown, float("-inf"))
    slope = slope if slope is None else slope.masked_fill(~shown, 0)  # of hidden keys it may be NaN
    nothing = torch.zeros((), dtype=torch.bool, device=q.device)
    live = (x != float("-inf")).any(2, keepdim=True).any(3)[..., None] if seq else nothing
    keep = None
    if args["dropout_p"]:
        start = segment.rows.start or 0
        first = (segment.batch.start or 0) * heads
        at = [torch.arange(n, device=q.device) for n in (seq, context, q.shape[0] * heads)]
        keep = kept(args["seed"], at[0] + start, at[1], at[2] + first, args["dropout_p"])
        keep = rearrange(keep, "(batch kv_heads group) i j -> batch kv_heads group i j", batch=q.shape[0], kv_heads=kv_heads)
    # Keys that nothing attends may be NaN, and 0 * NaN is NaN.
    return Logits(x, slope, rows, torch.where(live, keys, 0), torch.where(live, values, 0), keep)


def forward(op: str, sizes: Sizes, args: dict[str, Any], out: Tensor, lse: Tensor) -> None:
    """Fill out and lse."""
    out.zero_()
    sinks, kv_heads = args.get("sinks"), sizes["kv_heads"]
    # Of rows that no sequence has, as of those that attend nothing.
    lse.copy_(torch.full_like(lse, float("-inf")) if sinks is None else sinks[None, :, None].expand(lse.shape))
    for segment in segments(op, sizes, args):
        found = logits(segment, args)
        x, dtype = found.x, segment.v.dtype
        if sinks is not None:  # a key more
            sink = _outer(sinks.to(x.dtype), 0, kv_heads)[None, :, :, None, None]
            x = torch.cat((x, sink.expand(*x.shape[:-1], 1)), -1)
        total = torch.logsumexp(x, dim=-1) if x.shape[-1] else x.new_full(x.shape[:-1], float("-inf"))
        # Not exp(x - total): of large logits, total is rounded as coarsely as they are.
        p = torch.softmax(x, -1).masked_fill((total == float("-inf"))[..., None], 0)[..., : found.x.shape[-1]]
        if found.keep is not None:
            p = p * found.keep / (1 - args["dropout_p"])
        # The kernels multiply weights in v's dtype, and fp8 values as bf16.
        p = p.to(torch.bfloat16 if dtype is FP8 else dtype).to(x.dtype)
        y = rearrange(torch.matmul(p, found.v), "batch kv_heads group seq dim -> batch seq (kv_heads group) dim")
        out[segment.batch, segment.rows] = y.to(out.dtype)
        lse[segment.batch, :, segment.rows] = rearrange(total, "batch kv_heads group seq -> batch (kv_heads group) seq")


def backward(op: str, sizes: Sizes, args: dict[str, Any], grads: dict[str, Tensor]) -> None:
    """Fill the gradients that are not empty."""
    for t in grads.values():
        t.zero_()
    kv_heads, keep_share = sizes["kv_heads"], 1 - args["dropout_p"]
    by_group = "batch seq (kv_heads group) ... -> batch kv_heads group seq ..."
    summed = {n: grads[n] for n in ("grad_bias", "grad_sinks")}
    sums = {n: torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for n, t in summed.items()}
    for segment in segments(op, sizes, args):
        found = logits(segment, args)
        x = found.x
        at = segment.batch, segment.rows
        grad, out = (rearrange(args[n][at].to(x.dtype), by_group, kv_heads=kv_heads) for n in ("grad_out", "out"))
        lse = _outer(args["lse"][segment.batch, :, segment.rows].to(x.dtype), 1, kv_heads)[..., None]
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))  # of rows that attend to nothing: all weights are 0
        p = torch.exp(x - lse)
        delta = (out * grad).sum(-1, keepdim=True)
        dp = torch.matmul(grad, found.v.mT)
        dropped = p
        if found.keep is not None:
            dp, dropped = dp * found.keep / keep_share, p * found.keep / keep_share
        ds = p * (dp - delta)
        if sums["grad_bias"].numel():
            every = rearrange(ds, "batch kv_heads group i j -> batch (kv_heads group) i j")
            _add_bias(sums["grad_bias"], args["bias"], segment, every)
        if sums["grad_sinks"].numel():
            sink = _outer(args["sinks"].to(x.dtype), 0, kv_heads)[None, :, :, None, None]
            sums["grad_sinks"] -= (torch.exp(sink - lse) * delta).sum((0, 3, 4)).flatten()
        ds = ds * args["scale"] if found.slope is None else ds * args["scale"] * found.slope
        back = "batch kv_heads group seq dim -> batch seq (kv_heads group) dim"
        to_keys = "batch kv_heads group seq context, batch kv_heads group seq dim -> batch context kv_heads dim"
        if grads["grad_q"].numel():
            grads["grad_q"][at] = rearrange(torch.matmul(ds, found.k), back).to(grads["grad_q"].dtype)
        if grads["grad_k"].numel():
            grads["grad_k"][segment.batch, segment.cols] = einsum(ds, found.q, to_keys).to(grads["grad_k"].dtype)
        if grads["grad_v"].numel():
            grads["grad_v"][segment.batch, segment.cols] = einsum(dropped, grad, to_keys).to(grads["grad_v"].dtype)
    for name, total in sums.items():
        grads[name].copy_(total)


def _add_bias(total: Tensor, bias: Tensor, segment: Segment, ds: Tensor) -> None:
    """Add ds `batch heads seq context`, summed over the axes in which the bias is one, at its place."""
    part = total if total.shape[0] == 1 else total[segment.batch]
    part = part if bias.shape[3] == 1 else part[..., segment.cols]
    axes = [axis for axis, n in enumerate(part.shape) if n == 1 and ds.shape[axis] != 1]
    part += ds.sum(axes, keepdim=True) if axes else ds  # a sum over no axes is one over all

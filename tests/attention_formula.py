"""The attention formula, sequence by sequence and head by head, apart from the package's reference.

In float64 it is the truth (gradients by autograd); in the dtype of the inputs it is plain torch, whose error is the yardstick of
fp16, bf16 and fp8. Inputs are those of attention_cases.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from attention_cases import Inputs

BLOCK = 128  # of a block map


def philox(seed: int, key: np.ndarray, row: np.ndarray, head: int) -> np.ndarray:
    """First word of Philox4x32-10 for the counter (key, row, head, 0), in 64-bit unsigned integers."""
    u, low = np.uint64, np.uint64(0xFFFFFFFF)
    shape = np.broadcast_shapes(key.shape, row.shape)
    x = [*(np.broadcast_to(n, shape).astype(u) for n in (key, row)), np.full(shape, head, u), np.zeros(shape, u)]
    keys = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        a, b = x[0] * u(0xD2511F53), x[2] * u(0xCD9E8D57)
        x = [(b >> u(32)) ^ x[1] ^ u(keys[0]), b & low, (a >> u(32)) ^ x[3] ^ u(keys[1]), a & low]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return x[0]


def kept(seed: int, rows: int, cols: int, first_row: int, head: int, dropout: float) -> Tensor:
    """Which weights dropout keeps, `rows cols`; head counts over the batch."""
    words = philox(seed, np.arange(cols)[None, :], (first_row + np.arange(rows))[:, None], head)
    return torch.from_numpy((words >> np.uint64(8)).astype(np.float64) * 2.0**-24 >= np.float32(dropout))


@dataclass
class Part:
    """One sequence's queries, keys and values `rows heads dim`, and where it lies."""

    q: Tensor
    k: Tensor
    v: Tensor
    number: int
    first: int  # row of q
    batch: int


def sequences(x: Inputs) -> Iterator[Part]:
    c, o = x.case, x.options
    first_q = first_k = 0
    for n, (queries, keys) in enumerate(c.sequences):
        q = x.q[first_q : first_q + queries] if c.packed else x.q[n]
        if c.paged:
            pages = o["block_table"][n, : -(-keys // c.page)].tolist()
            k, v = (torch.cat([t[p] for p in pages])[:keys] if pages else t[0][:0] for t in (x.k, x.v))
        elif c.packed:
            k, v = x.k[first_k : first_k + keys], x.v[first_k : first_k + keys]
        else:
            k, v = x.k[n, :keys], x.v[n, :keys]
        batch = 0 if c.packed else n
        q, k, v = (scaled(t, o.get(f"{name}_scale"), batch) for name, t in (("q", q), ("k", k), ("v", v)))
        yield Part(q, k, v, n, first_q, batch)
        first_q, first_k = first_q + queries * c.packed, first_k + keys


def scaled(t: Tensor, scale: Tensor | None, batch: int) -> Tensor:
    return t if scale is None else t * scale[batch if scale.shape[0] > 1 else 0, :, None].to(t.dtype)


def in_window(x: Inputs, s: Part) -> Tensor:
    """Which keys each query may attend by its place, query by query."""
    c, o, rows, cols = x.case, x.options, s.q.shape[0], s.k.shape[0]
    left, right = (-1, -1) if c.window is None else c.window
    right = 0 if c.causal else right
    ok = torch.zeros(rows, cols, dtype=torch.bool)
    prefix = int(o["prefix_lens"][s.number]) if c.prefix else 0
    for i in range(rows):
        place = i + cols - rows
        start = 0 if left < 0 else max(0, place - left)
        end = cols if right < 0 else min(cols, max(place + right + 1, prefix))
        ok[i, start : max(start, end)] = True
    return ok


def allowed(x: Inputs, s: Part, head: int, ok: Tensor) -> Tensor:
    """Those of them that a mask and a block map leave."""
    c, o, rows, cols = x.case, x.options, s.q.shape[0], s.k.shape[0]
    if c.mask:
        mask = o["mask"][:, None, None] if o["mask"].dim() == 2 else o["mask"]
        mask = at(mask, s.batch, head, rows, cols)
        ok = ok & (mask if mask.dtype is torch.bool else mask > -1e38)
    if c.block_map:
        whole = at(o["block_map"], s.batch, head, None, None)
        ok = ok & whole.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :cols]
    return ok


def at(t: Tensor, batch: int, head: int, rows: int | None, cols: int | None) -> Tensor:
    """The part of a tensor `1|batch 1|heads rows cols` that one head sees."""
    t = t[batch if t.shape[0] > 1 else 0, head if t.shape[1] > 1 else 0]
    return t if rows is None else t[:, :cols].expand(rows, cols)


def formula(x: Inputs) -> tuple[Tensor, Tensor]:
    """out and lse in the dtype of q; rows that attend nothing: 0 and -inf. Softmax in fp32, as plain torch has it."""
    c, o = x.case, x.options
    dtype, group = x.q.dtype, c.heads // c.kv_heads
    wide = torch.promote_types(dtype, torch.float32)
    scale = c.head_dim**-0.5 if c.scale is None else c.scale
    outs, lses = [], []
    for s in sequences(x):
        rows, cols = s.q.shape[0], s.k.shape[0]
        place = torch.arange(rows)[:, None] + (cols - rows)
        near = in_window(x, s)
        y, z = [], []
        for h in range(c.heads):
            ok = allowed(x, s, h, near)
            live = ok.any(0)[:, None]
            k, v = (torch.where(live, t[:, h // group], 0) for t in (s.k, s.v))
            logits = s.q[:, h] @ k.T * scale
            if c.softcap:
                logits = c.softcap * torch.tanh(logits / c.softcap)
            if c.alibi:
                slopes = o["alibi_slopes"]
                slope = slopes[h] if slopes.dim() == 1 else slopes[s.number, h]
                logits = logits - (slope * (place - torch.arange(cols)).abs()).to(dtype)
            if c.bias:
                logits = logits + at(o["bias"], s.batch, h, rows, cols).to(dtype)
            if c.mask.endswith("added"):
                logits = logits + at(o["mask"], s.batch, h, rows, cols).to(dtype).masked_fill(~ok, 0)
            logits = logits.to(wide).masked_fill(~ok, -math.inf)
            sink = o["sinks"][h].to(wide).reshape(1, 1).expand(rows, 1) if c.sinks else logits.new_zeros(rows, 0)
            logits = torch.cat((logits, sink), 1)
            dead = (logits == -math.inf).all(1, keepdim=True)
            logits = torch.where(dead, 0, logits)
            weights = (torch.softmax(logits, 1) * ~dead)[:, :cols].to(dtype)
            if c.dropout:
                keep = kept(x.seed, rows, cols, s.first, s.batch * c.heads + h, c.dropout)
                weights = weights * keep / (1 - c.dropout)
            y.append(weights @ v)
            total = logits.logsumexp(1) if logits.shape[1] else logits.new_zeros(rows)
            z.append(total.masked_fill(dead[:, 0], -math.inf))
        outs.append(torch.stack(y, 1))
        lses.append(torch.stack(z))
    if not c.packed:
        return (torch.stack(outs), torch.stack(lses)) if outs else (x.q.new_zeros(0, c.seq, c.heads, c.out_dim),
                                                                    x.q.new_zeros(0, c.heads, c.seq, dtype=wide))  # fmt: skip
    tail = x.q.shape[0] - sum(n for n, _ in c.lengths)
    outs.append(x.q.new_zeros(tail, c.heads, c.out_dim))
    nothing = x.q.new_full((c.heads, 1), -math.inf, dtype=wide) if not c.sinks else o["sinks"].to(wide)[:, None]
    lses.append(nothing.expand(-1, tail))
    return torch.cat(outs), torch.cat(lses, 1)

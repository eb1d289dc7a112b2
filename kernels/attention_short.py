"""Softmax attention, forward, for contexts of at most 256 keys on sm_90 in Triton: keys and values stay in shared memory.

    out = softmax(scale * q @ k^T, context) @ v,    lse = log(sum(exp(scale * q @ k^T), context))

    q, out   batch seq heads head_dim          bf16 or fp16, head_dim 64 or 128
    k, v     batch context kv_heads head_dim   heads is a multiple of kv_heads; context 1 to 256
    sinks    heads                             None, or the logit of a further key whose value is 0, any floating dtype
    lse      batch heads seq                   natural log, fp32, with the sink

Query i stands at p = i + context - seq and sees key j iff p - left <= j <= p + right; a negative one bounds nothing. A row that
sees nothing gives out 0 and lse -inf (the sink's logit). Lengths may be anything: a TMA copy fills with zeros past the end of a
sequence and a store stops there, so what lies beside a sequence is never read, be it NaN. Every key and value must be finite.

HBM, in elements: reads q, k, v and sinks, writes out and lse.

Why a kernel of its own: the general one (attention.py) loads k and v again for every tile of 64 rows of every head. At 32k tokens
in sequences of 256 with 32 heads of 128 that is 1.3 GB from the L2 beside 0.7 GB from HBM. Here one program owns a key head of a
batch entry, or a part of its rows: it loads k and v once, and a loop over (tile of rows, head of the group) has the copies of the
next q under way. All logits of a row are in registers at once, so the softmax is a plain one: no running maximum, no rescaling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._attention import by_head
from ._attention_tiles import LOG2E
from ._lang import cdiv, tl, triton
from ._launch import descriptor, on_device, tma_ready
from ._launch import launch as _launch
from ._target import Target, target_of

LONGEST = 256  # keys: their logits are half of the registers
SHARE = 16  # tiles a program at most: beyond, loading k and v again costs little, and shorter programs end more evenly


@dataclass(frozen=True)
class Config:
    """skip: with causal and as many queries as keys, a loop for every tile of rows, over the blocks of keys that it sees only.
    per_sm: programs that an SM holds, from the compiler's registers and shared memory."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    skip: bool
    per_sm: int


# (columns of a head, keys at most) -> Config with causal / without. Not measured: the fewest instructions a row among what keeps
# two programs on an SM, or two warpgroups where only one fits.
TABLE: dict[tuple[int, int], tuple[Config, Config]] = {
    (64, 64): (Config(64, 64, 4, 3, False, 4), Config(64, 64, 4, 3, False, 4)),
    (64, 128): (Config(64, 64, 4, 2, True, 3), Config(64, 128, 4, 2, False, 3)),
    (64, 256): (Config(64, 64, 4, 2, True, 2), Config(64, 256, 4, 2, False, 2)),
    (128, 64): (Config(64, 64, 4, 3, False, 2), Config(64, 64, 4, 3, False, 2)),
    (128, 128): (Config(64, 64, 4, 2, True, 2), Config(64, 128, 4, 2, False, 2)),
    (128, 256): (Config(128, 128, 8, 2, True, 1), Config(128, 128, 8, 2, False, 1)),
}


def configure(head_dim: int, context: int, causal: bool) -> Config:
    keys = next(n for d, n in TABLE if d == head_dim and context <= n)
    return TABLE[head_dim, keys][0 if causal else 1]


@triton.jit
def _masked(s, row, col, low, high, CONTEXT, LEFT: tl.constexpr, RIGHT: tl.constexpr, CHECK: tl.constexpr):
    """Logits of rows from `row` and keys from `col` on, -inf where a row does not see the key.

    Cut into an axis of registers and one of threads, so that a thread compares constants with a few numbers of its own: as
    plain rows and columns, the compiler holds every column in a register through all loops, and spills.
    """
    BM: tl.constexpr = s.shape[0]
    BN: tl.constexpr = s.shape[1]
    y = s.reshape(BM, BN // 8, 8)
    key = col + tl.arange(0, BN // 8)[None, :, None] * 8
    one = tl.arange(0, 8)[None, None, :]
    place = row + tl.arange(0, BM)[:, None, None] - one
    if RIGHT:
        y = tl.where(key <= place + high, y, float("-inf"))
    if LEFT:
        y = tl.where(key >= place + low, y, float("-inf"))
    if CHECK:
        y = tl.where(key < CONTEXT - one, y, float("-inf"))
    return y.reshape(BM, BN)


@triton.jit
def _tile(
    q, keys, values, sinks, out, lse, b, h, row, scale, low, high, SEQ, CONTEXT, HEADS,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, CHECK: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """Rows from `row` on of head h against the blocks of keys. TILE: row // BM where the tile sees no key after its last row."""
    SEEN: tl.constexpr = BLOCKS if TILE is None else min((TILE * BM + BM + BN - 1) // BN, BLOCKS)
    # Blocks before PLAIN need no mask.
    ALL: tl.constexpr = 0 if LEFT or RIGHT else BLOCKS - 1 if CHECK else BLOCKS
    PLAIN: tl.constexpr = ALL if TILE is None else 0 if LEFT else TILE * BM // BN
    qt = q.load([b, h, row, 0]).reshape(BM, D)
    logits: tl.tuple = ()
    for j in tl.static_range(SEEN):
        s = tl.dot(qt, keys[j].T)
        if j >= PLAIN:
            s = _masked(s, row, j * BN, low, high, CONTEXT, LEFT, RIGHT, CHECK)
        logits = logits + (s,)
    m = tl.max(logits[0], 1)
    for j in tl.static_range(1, SEEN):
        m = tl.maximum(m, tl.max(logits[j], 1))
    m = m * scale
    if EMPTY:
        m = tl.maximum(m, -1.0e30)  # not -inf - -inf
    l = tl.zeros([BM], tl.float32)
    weights: tl.tuple = ()
    for j in tl.static_range(SEEN):
        p = tl.math.exp2(tl.fma(logits[j], scale, -m[:, None]))
        l += tl.sum(p, 1)
        weights = weights + (p.to(values[j].dtype),)
    acc = tl.zeros([BM, D], tl.float32)
    for j in tl.static_range(SEEN):
        acc = tl.dot(weights[j], values[j], acc)
    inverse = 1.0 / l
    if sinks is not None:
        sink = tl.load(sinks + h).to(tl.float32) * 1.4426950408889634
        new = tl.maximum(m, sink)
        shrink = tl.math.exp2(m - new)
        l = l * shrink + tl.math.exp2(sink - new)
        inverse = shrink / l
        m = new
    if EMPTY:
        inverse = tl.where(l == 0.0, 0.0, inverse)
    rows = row + tl.arange(0, BM)
    at = lse + (b.to(tl.int64) * HEADS + h) * SEQ + rows
    tl.store(at, (m + tl.math.log2(l)) * 0.6931471805599453, rows < SEQ)
    acc = acc * inverse[:, None]
    out.store([b, h, row, 0], acc.to(out.dtype).reshape(1, 1, BM, D))


@triton.jit(do_not_specialize=["low", "high", "SEQ", "CONTEXT", "HEADS", "GROUP", "PARTS", "EACH", "ITEMS"])
def _short_kernel(
    q, k, v, sinks, out, lse, scale, low, high, SEQ, CONTEXT, HEADS, GROUP, PARTS, EACH, ITEMS,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BLOCKS: tl.constexpr, TILES: tl.constexpr, NS: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CHECK: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """scale: of base-2 logits. low and high: keys that row 0 sees, first and last. ITEMS: (tile, head of the group) pairs of a
    key head, of which each of its PARTS programs has EACH. TILES: tiles with a loop of their own each, 0: one loop for all."""
    pid = tl.program_id(0)
    kv = pid // PARTS
    part = pid - kv * PARTS
    kv_heads = HEADS // GROUP
    b = kv // kv_heads
    kv = kv - b * kv_heads
    keys: tl.tuple = ()
    values: tl.tuple = ()
    for j in tl.static_range(BLOCKS):
        keys = keys + (k.load([b, kv, j * BN, 0]).reshape(BN, D),)
    for j in tl.static_range(BLOCKS):
        values = values + (v.load([b, kv, j * BN, 0]).reshape(BN, D),)
    begin = part * EACH
    end = tl.minimum(begin + EACH, ITEMS)
    if TILES:
        for t in tl.static_range(TILES):
            for i in tl.range(tl.maximum(begin, t * GROUP), tl.minimum(end, t * GROUP + GROUP), num_stages=NS):
                # i // GROUP is t; as a constant, masks would be made before the loop and held in registers through it.
                _tile(q, keys, values, sinks, out, lse, b, kv * GROUP + i - t * GROUP, i // GROUP * BM, scale, low, high, SEQ,
                      CONTEXT, HEADS, D, BM, BN, BLOCKS, t, LEFT, RIGHT, CHECK, EMPTY)  # fmt: skip
    else:
        for i in tl.range(begin, end, num_stages=NS):
            t = i // GROUP
            _tile(q, keys, values, sinks, out, lse, b, kv * GROUP + i - t * GROUP, t * BM, scale, low, high, SEQ, CONTEXT, HEADS,
                  D, BM, BN, BLOCKS, None, LEFT, RIGHT, CHECK, EMPTY)  # fmt: skip


# ---- the host ----------------------------------------------------------------------------------------------------------------


def refusal(q: Tensor, k: Tensor, v: Tensor, target: Target) -> str:
    """Why this kernel cannot take these arguments on target, or "" where it can."""
    if target.capability != 90:
        return f"{target.name} is not sm_90"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"q is {q.dtype}, not bfloat16 or float16"
    if q.shape[-1] not in (64, 128) or v.shape[-1] != q.shape[-1]:
        return f"head_dim={q.shape[-1]} and v_dim={v.shape[-1]}, not both 64 or 128"
    if k.shape[1] > LONGEST:
        return f"context={k.shape[1]} is more than {LONGEST}"
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not tma_ready(t):
            return f"{name} of shape {tuple(t.shape)} and strides {t.stride()} is not what TMA takes"
    return ""


def share(items: int, pairs: int, programs: int) -> tuple[int, int]:
    """(programs, items of each) for one of `pairs` key heads with `items` items, so that `programs` fit in one wave."""
    parts = max(cdiv(items, SHARE), min(items, programs // pairs))
    each = cdiv(items, parts)
    return cdiv(items, each), each


def launch(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, left: int, right: int, scale: float, out: Tensor, lse: Tensor,
    config: Config | None = None,
) -> None:  # fmt: skip
    """Write out and lse, both contiguous. q, k, v: what refusal() lets pass."""
    batch, seq, heads, head_dim = q.shape
    context, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    target = target_of(q.device)
    config = config or configure(head_dim, context, right >= 0)
    bm, bn = config.block_m, config.block_n
    tiles = cdiv(seq, bm)
    items = tiles * group
    parts, each = share(items, batch * kv_heads, target.sms * config.per_sm)
    offset = context - seq
    blocks = [descriptor(by_head(t), [1, 1, rows, head_dim]) for t, rows in ((q, bm), (k, bn), (v, bn), (out, bm))]
    with on_device(q):
        _launch(
            _short_kernel, (batch * kv_heads * parts,),
            (*blocks[:3], None if sinks is None else sinks.contiguous(), blocks[3], lse, scale * LOG2E, offset - left,
             offset + right, seq, context, heads, group, parts, each, items),
            {"D": head_dim, "BM": bm, "BN": bn, "BLOCKS": cdiv(context, bn),
             "TILES": tiles if config.skip and right == 0 and offset == 0 else 0, "NS": config.num_stages, "LEFT": left >= 0,
             "RIGHT": right >= 0, "CHECK": right != 0 and context % bn > 0, "EMPTY": right >= 0 and context + right < seq,
             "num_warps": config.num_warps, "num_stages": config.num_stages},
        )  # fmt: skip

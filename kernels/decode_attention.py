"""Attention of a few queries over a long context: split-KV, deterministic, forward only (Flash-Decoding, Dao et al. 2023).

    the keys of a sequence are cut into `splits` runs; for each run    part_lse = log2(sum(exp2(logits)))
                                                                       part_out = softmax(logits) @ v
    then   out = sum_s 2**(part_lse_s - lse2) * part_out_s,   lse2 = log2(sum_s 2**part_lse_s)

    arguments and results as in attention.py; scratch, fp32:
    part_out   batch kv_heads splits rows head_dim            part_lse   batch kv_heads splits rows

rows = seq * group: the queries of all heads that share a key/value head form the rows of one tile, so that K and V are read
once.

HBM, in elements: reads q, k, v and the mask, writes out and lse; the parts are written and read once.
Values that no row of a tile attends (padding, unused cache slots) may hold NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import _attention as shared
from . import attention
from ._lang import cdiv, next_power_of_2, tl, triton
from ._launch import launch as _launch
from ._launch import on_device
from ._spec import Args, Op, Sizes, Stage, Write
from ._target import Target, target_of

MAX_ROWS = 64  # queries times the heads of a group; beyond, the tiles of attention.py are as full
MAX_SPLITS = 128


@dataclass(frozen=True)
class Config:
    block_n: int
    num_warps: int
    num_stages: int


def configure(rows: int, head_dim: int, itemsize: int, per_row: bool, target: Target, sequences: int = 1) -> Config:
    """The largest ring of K and V blocks that fits shared memory and registers; per_row: a mask that varies over the rows.

    sequences: batch times key/value heads. With more of them than SMs, several small rings an SM read on while one program ends
    and the next begins: 512 sequences of 4096 keys take 265 us on an H200 (SDPA 251), with a ring of 196 KB 379 (2026-11-29).
    """
    dp = next_power_of_2(head_dim)
    if sequences > target.sms and rows <= 16 and itemsize <= 2 and not per_row:
        return Config(max(16, min(4096 // dp, 64)), 4, 4 if target.smem_bytes >= 160 * 1024 else 2)
    reserve = 2 * rows * dp * itemsize + 8192  # q, and what the dots stage
    most = (128 if rows <= 16 else 64) // (2 if per_row else 1) // (1 if itemsize <= 2 else 4)
    for block_n in (128, 64, 32, 16):
        for stages in (3, 2):
            ring = stages * 2 * block_n * dp * itemsize
            if block_n <= most and ring + reserve <= target.smem_bytes and block_n * dp * itemsize <= 32768:
                return Config(block_n, 4, stages)
    return Config(16, 4, 1)


def split_length(sequences: int, context: int, config: Config, target: Target) -> int:
    """Keys of one split, a multiple of the block: what gives an SM the fewest blocks in a row, in the fewest splits that do."""
    blocks = cdiv(context, config.block_n)
    if sequences > target.sms:
        return config.block_n * blocks
    lengths = range(blocks, max(0, cdiv(blocks, MAX_SPLITS) - 1), -1)  # in blocks
    # A split costs about as much as a block more.
    return config.block_n * min(lengths, key=lambda n: cdiv(sequences * cdiv(blocks, n), target.sms) * (n + 1))


def _per_row(mask: Tensor | None) -> bool:
    return mask is not None and any(n > 1 and s != 0 for n, s in zip(mask.shape[1:3], mask.stride()[1:3]))


def _shape(sizes: Sizes, args: Args) -> tuple[Config, int, int]:
    """(config, keys of a split, splits)."""
    target = target_of(args["q"].device)
    rows = max(16, next_power_of_2(sizes["seq"] * sizes["heads"] // sizes["kv_heads"]))
    sequences = max(1, sizes["batch"] * sizes["kv_heads"])
    config = configure(rows, sizes["head_dim"], args["q"].element_size(), _per_row(args["mask"]), target, sequences)
    length = split_length(sequences, max(1, sizes["context"]), config, target)
    return config, length, cdiv(max(1, sizes["context"]), length)


def _axes(sizes: Sizes, args: Args) -> dict[str, int]:
    found = shared.check("decode_attention", sizes, args)
    rows = sizes["seq"] * found["group"]
    if rows > MAX_ROWS:
        queries = f"seq={sizes['seq']} queries of {found['group']} heads"
        raise ValueError(f"decode_attention: {queries} make {rows} rows, at most {MAX_ROWS}")
    found = {**found, "rows": rows}
    if any(isinstance(n, torch.SymInt) for n in sizes.values()):
        return found  # a trace for any length: counting the splits would tie it to this one, and no result has them
    return {**found, "splits": _shape(sizes, args)[2]}


SPEC = replace(
    attention.SPEC,
    name="decode_attention",
    derive=_axes,
    scratch={
        "part_out": Write("batch kv_heads splits rows head_dim", "accumulate:q"),
        "part_lse": Write("batch kv_heads splits rows", "accumulate:q"),
    },
    stages=(
        Stage("decode_attention", tuple(shared.QKV), ("part_out", "part_lse"), attention.SPEC.flops),
        Stage("decode_attention_combine", ("part_out", "part_lse"), ("out", "lse"),
              lambda s, a: 2 * s["batch"] * s["kv_heads"] * s["splits"] * s["rows"] * s["head_dim"]),
    ),
)  # fmt: skip


@triton.jit(do_not_specialize=["CONTEXT", "SPLIT"])
def _split_kernel(
    q, k, v, mask, part_out, part_lse, scale_log2, SEQ, CONTEXT, SPLIT, KV_HEADS,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_mb, stride_mh, stride_ms, stride_mk,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, NS: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PER_ROW: tl.constexpr, ACC: tl.constexpr, EXACT_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0)  # the axis without a limit of 65535
    split = tl.program_id(1)
    b = (bh // KV_HEADS).to(tl.int64)
    kvh = bh % KV_HEADS
    scale = scale_log2
    if EXACT_SCALE is not None:
        scale = tl.full([], EXACT_SCALE, ACC)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    row = r // GROUP  # the query, and which head of the group
    head = kvh * GROUP + r % GROUP
    live = row < SEQ
    at = b * stride_qb + row.to(tl.int64) * stride_qs + head.to(tl.int64) * stride_qh
    qt = tl.load(q + at[:, None] + d[None, :], live[:, None] & (d < D)[None, :], other=0.0)
    if MASK:
        mask += b * stride_mb
    m_row = row.to(tl.int64) * stride_ms + head.to(tl.int64) * stride_mh
    k += b * stride_kb + kvh.to(tl.int64) * stride_kh
    v += b * stride_vb + kvh.to(tl.int64) * stride_vh
    # Not -inf: a row that has attended nothing yet would give -inf - -inf. Logits that are not masked lie above it.
    m = tl.full([ROWS], -3.0e38, ACC)
    l = tl.zeros([ROWS], ACC)
    acc = tl.zeros([ROWS, DP], ACC)
    low = split * SPLIT
    high = tl.minimum(low + SPLIT, CONTEXT)
    for n in tl.range(low, high, BN, num_stages=NS):
        col = n + tl.arange(0, BN)
        inside = col < high
        load = inside[:, None] & (d < D)[None, :]
        kt = tl.load(k + col[:, None].to(tl.int64) * stride_ks + d[None, :], load, other=0.0)
        s = tl.dot(qt, kt.T, input_precision=PRECISION, out_dtype=ACC) * scale
        ok = live[:, None] & inside[None, :]
        if CAUSAL:
            ok = ok & (row[:, None] + (CONTEXT - SEQ) >= col[None, :])
        if MASK:
            if PER_ROW:
                given = tl.load(mask + m_row[:, None] + col[None, :].to(tl.int64) * stride_mk, ok, other=0)
            else:
                given = tl.load(mask + col.to(tl.int64) * stride_mk, inside, other=0)[None, :]
            if MASK == 1:
                ok = ok & (given != 0)
            else:
                given = given.to(ACC)
                ok = ok & (given > -2.0e38)
                s = s + given * 1.4426950408889634
        s = tl.where(ok, s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - new[:, None])
        shrink = tl.math.exp2(m - new)
        l = l * shrink + tl.sum(p, 1)
        vt = tl.load(v + col[:, None].to(tl.int64) * stride_vs + d[None, :], load, other=0.0)
        if MASK:
            vt = tl.where((tl.max(s, 0) > float("-inf"))[:, None], vt, 0.0)  # 0 * NaN is NaN
        acc = tl.dot(p.to(vt.dtype), vt, acc * shrink[:, None], input_precision=PRECISION, out_dtype=ACC)
        m = new
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    packed = SEQ * GROUP
    at = (bh.to(tl.int64) * tl.num_programs(1) + split) * packed + r
    tl.store(part_lse + at, m + tl.math.log2(l), live)
    tl.store(part_out + at[:, None] * D + d[None, :], acc, live[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["SPLITS"])
def _combine_kernel(
    part_out, part_lse, out, lse, SEQ, SPLITS, KV_HEADS,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1)
    packed = SEQ * GROUP
    d = tl.arange(0, DP)
    # The logarithms of all parts at once, the parts a block at a time: one variant, and registers, for any number of them.
    every = tl.arange(0, MOST)
    parts = tl.load(part_lse + (bh * SPLITS + every) * packed + r, every < SPLITS, other=float("-inf"))
    top = tl.max(parts, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.math.exp2(parts - top), 0)
    y = tl.zeros([DP], ACC)
    for first in range(0, SPLITS, BLOCK):
        s = first + tl.arange(0, BLOCK)
        at = (bh * SPLITS + s) * packed + r
        w = tl.math.exp2(tl.load(part_lse + at, s < SPLITS, other=float("-inf")) - top)
        values = tl.load(part_out + at[:, None] * D + d[None, :], (s < SPLITS)[:, None] & (d < D)[None, :], other=0.0)
        y += tl.sum(values * w[:, None], 0)
    y = y / tl.where(total == 0.0, 1.0, total)
    b = bh // KV_HEADS
    head = bh % KV_HEADS * GROUP + r % GROUP
    row = r // GROUP
    heads = KV_HEADS * GROUP
    tl.store(out + ((b * SEQ + row) * heads + head) * D + d, y.to(out.dtype.element_ty), d < D)
    tl.store(lse + (b * heads + head) * SEQ + row, (top + tl.math.log2(total)) * 0.6931471805599453)


def launch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    args = {"q": q, "k": k, "v": v, "mask": mask, "causal": causal, "scale": scale}
    sizes = SPEC.axes(args)
    out, lse = SPEC.empty(args, sizes)
    if out.numel() == 0 or sizes["context"] == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    part_out, part_lse = SPEC.empty_scratch(args, sizes)
    q, k, v = shared.dense_rows(q, k, v)
    config, length, splits = _shape(sizes, args)
    head_dim, group, rows, kv_heads = (sizes[a] for a in ("head_dim", "group", "rows", "kv_heads"))
    mask_arg, mask_strides, mask_constexprs = shared.mask_facts(mask)
    mask_constexprs["PER_ROW"] = _per_row(mask)
    facts = shared.numerics(scale * shared.LOG2E, q.dtype, target_of(q.device))
    dp, sequences = next_power_of_2(head_dim), sizes["batch"] * kv_heads
    with on_device(q):
        _launch(
            _split_kernel, (sequences, splits),
            (q, k, v, mask_arg, part_out, part_lse, scale * shared.LOG2E, sizes["seq"], sizes["context"], length, kv_heads,
             *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *mask_strides),
            {"GROUP": group, "ROWS": max(16, next_power_of_2(rows)), "D": head_dim, "DP": dp, "BN": config.block_n,
             "NS": config.num_stages, "CAUSAL": causal and sizes["seq"] > 1, **mask_constexprs, **facts,
             "num_warps": config.num_warps, "num_stages": config.num_stages},
        )  # fmt: skip
        _launch(
            _combine_kernel, (sequences, rows), (part_out, part_lse, out, lse, sizes["seq"], splits, kv_heads),
            {"GROUP": group, "D": head_dim, "DP": dp, "MOST": MAX_SPLITS, "BLOCK": 16, "ACC": facts["ACC"], "num_warps": 4},
        )  # fmt: skip
    return out, lse


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    SPEC.axes({"q": q, "k": k, "v": v, "mask": mask, "causal": causal, "scale": scale})
    return attention.reference(q, k, v, mask, causal, scale)


OP = Op(SPEC, launch, reference)

"""Attention of a few queries over a long context: split-KV, deterministic, forward only (Flash-Decoding, Dao et al. 2023).

    the keys that a sequence's queries see are cut into `splits` runs; for each run, logits in base 2,

        part_max = max(logits),    part_sum = sum(p),    part_out = p @ v    with p = exp2(logits - part_max)

    then, with w_s = exp2(part_max_s - top), top = max_s part_max_s,

        out = sum_s w_s * part_out_s / total,    lse = (top + log2(total)) / log2(e),    total = sum_s w_s * part_sum_s

    arguments and results as in attention.py, without block maps, dropout and packed sequences; scratch, fp32:
    part_out   batch kv_heads splits rows v_dim               part_max, part_sum   batch kv_heads splits rows

A logarithm for a part would round: of logits near -6e4 it is known to 0.4% of the weights.

rows = seq * group: the queries of all heads that share a key/value head form the rows of one tile, so that K and V are read
once. One run needs no parts and no second launch: the first writes out and lse. A sink is in the first run.

HBM, in elements: reads q, the keys and values that some query sees, and the options, writes out and lse; the parts are written
and read once. Values that no row of a tile attends (padding, unused cache slots and pages) may hold NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import _attention as shared
from . import _attention_reference
from ._attention_choice import DECODE_ROWS
from ._attention_tiles import power, shape_logits, visible
from ._lang import cdiv, next_power_of_2, tl, triton
from ._launch import contiguous_last, on_device
from ._launch import launch as _launch
from ._spec import Args, Op, Sizes, Spec, Stage, Write
from ._target import Target, target_of

MAX_SPLITS = 128


@dataclass(frozen=True)
class Config:
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Problem:
    """What the config and the number of splits are chosen for. per_row: how many of mask and bias vary over the rows of a tile.

    left: of the window, -1 for none. page: rows of a page, 0 where keys are not paged."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    context: int
    head_dim: int
    v_dim: int
    itemsize: int
    per_row: int = 0
    left: int = -1
    page: int = 0

    @property
    def rows(self) -> int:
        return self.seq * self.heads // self.kv_heads

    @property
    def block_rows(self) -> int:
        """Of a program. In fp32, products in three parts take registers and shared memory for several times the rows."""
        most = DECODE_ROWS if self.itemsize <= 2 else max(16, 4096 // next_power_of_2(max(self.head_dim, self.v_dim)))
        return min(max(16, next_power_of_2(self.rows)), most)

    @property
    def sequences(self) -> int:
        """Programs of one split."""
        return max(1, self.batch * self.kv_heads * cdiv(self.rows, self.block_rows))

    @property
    def keys(self) -> int:
        """That some query of a sequence sees, at most."""
        return self.context if self.left < 0 else min(self.context, self.seq + self.left)


def _dims(head_dim: int, v_dim: int) -> dict[str, int]:
    return shared.dims(head_dim, v_dim, split=head_dim > 128)


@functools.lru_cache(maxsize=1024)
def configure(p: Problem, target: Target) -> Config:
    """The largest ring of K and V blocks that fits shared memory and registers.

    With more sequences than SMs, several small rings an SM read on while one program ends and the next begins: 512 sequences
    of 4096 keys take 265 us on an H200 (SDPA 251), with a ring of 196 KB 379 (2026-11-29).
    """
    d = _dims(p.head_dim, p.v_dim)
    rows, key, value = p.block_rows, d["DP"] + d["D2"], d["DVP"]
    costly = p.per_row > 0 or p.page > 0 or p.itemsize > 2
    warps = 8 if rows * value >= (8192 if costly else 16384) else 4
    if p.sequences > target.sms and rows <= 16 and p.itemsize <= 2 and not p.per_row:
        block_n = max(16, min(8192 // next_power_of_2(key + value), 64))
        return Config(_in_page(block_n, p.page), warps, 4 if target.smem_bytes >= 160 * 1024 else 2)
    reserve = min(2 * rows * key * p.itemsize, 65536) + 8192  # q, and what the dots stage
    most = (128 if rows <= 16 else 64) // 2**p.per_row // (1 if p.itemsize <= 2 else 4)
    for block_n in (128, 64, 32, 16):
        block = block_n * (key + value) * p.itemsize
        for stages in (3, 2):
            if block_n <= most and stages * block + reserve <= target.smem_bytes and block * max(2 // p.itemsize, 1) <= 73728:
                return Config(_in_page(block_n, p.page), warps, stages)
    return Config(16, warps, 1)


def _in_page(block_n: int, page: int) -> int:
    """A block that lies in one page looks that page up once; shorter ones than 32 keys are not worth it."""
    return min(block_n, page & -page) if page & -page >= 32 else block_n


@functools.lru_cache(maxsize=1024)
def splits(p: Problem, target: Target) -> int:
    """Runs of keys a sequence: what gives an SM the fewest blocks in a row, in the fewest splits that do."""
    blocks = cdiv(max(1, p.keys), configure(p, target).block_n)
    if p.sequences > target.sms:
        return 1
    lengths = range(blocks, max(0, cdiv(blocks, MAX_SPLITS) - 1), -1)  # in blocks
    # A split costs about as much as a block more.
    return cdiv(blocks, min(lengths, key=lambda n: cdiv(p.sequences * cdiv(blocks, n), target.sms) * (n + 1)))


def launches(p: Problem, target: Target) -> int:
    """Of a call: a second one joins the parts, where there are several."""
    return 2 if splits(p, target) > 1 else 1


def _per_row(t: Tensor | None, group: int) -> bool:
    axes = (1, 2) if group > 1 else (2,)
    return t is not None and any(t.shape[a] > 1 and t.stride(a) != 0 for a in axes)


def _problem(args: Args) -> Problem:
    (batch, seq, heads, head_dim), (_, k_len, kv_heads, v_dim) = args["q"].shape, args["v"].shape
    page = k_len if args["block_table"] is not None else 0
    group = heads // kv_heads
    return Problem(
        batch, seq, heads, kv_heads, page * args["block_table"].shape[1] if page else k_len, head_dim, v_dim,
        args["q"].element_size(), sum(_per_row(args[n], group) for n in ("mask", "bias")), args["left"], page,
    )  # fmt: skip


def _splits(args: Args) -> int:
    return splits(_problem(args), target_of(args["q"].device))


def _axes(sizes: Sizes, args: Args) -> dict[str, int]:
    found = shared.check("decode_attention", sizes, args)
    for name in ("block_map", "cu_seqlens_q"):
        if args[name] is not None:
            raise ValueError(f"decode_attention: {name} is given; only attention takes it")
    if args["dropout_p"]:
        raise ValueError(f"decode_attention: dropout_p={args['dropout_p']}; only attention drops weights")
    rows = sizes["seq"] * found["group"]
    if rows > DECODE_ROWS:
        queries = f"seq={sizes['seq']} queries of {found['group']} heads"
        raise ValueError(f"decode_attention: {queries} make {rows} rows, at most {DECODE_ROWS}")
    found = {**found, "rows": rows}
    if any(isinstance(n, torch.SymInt) for n in sizes.values()):
        return found  # a trace for any length: counting the splits would tie it to this one, and no result has them
    return {**found, "splits": _splits(args)}


def _seen(sizes: Sizes, args: Args) -> list[tuple[int, int]]:
    """First and end of the keys that queries of each sequence see."""
    left, seq = args["left"], sizes["seq"]
    return [(max(0, n - seq - left) if left >= 0 else 0, n) for _, n in shared.lengths(sizes, args)]


def _key_bytes(arg: str) -> Callable[[Sizes, Args], int | None]:
    def count(sizes: Sizes, args: Args) -> int | None:
        if args["left"] < 0 and args["seqused_k"] is None:
            return None
        t = args[arg]
        return sum(end - low for low, end in _seen(sizes, args)) * sizes["kv_heads"] * t.shape[-1] * t.element_size()

    return count


def _table_bytes(sizes: Sizes, args: Args) -> int | None:
    if not sizes["k_len"]:
        return 0
    return 4 * sum(cdiv(end, sizes["k_len"]) - low // sizes["k_len"] for low, end in _seen(sizes, args))


def _flops(sizes: Sizes, args: Args) -> int:
    return 2 * sizes["heads"] * (sizes["head_dim"] + sizes["v_dim"]) * shared.pairs(sizes, args)


SPEC = Spec(
    name="decode_attention",
    reads=shared.READS,
    writes={"out": Write("batch seq heads v_dim", "result:q"), "lse": Write("batch heads seq", "accumulate:q")},
    optional=shared.OPTIONAL,
    any_dtype=shared.OPTIONAL,
    dtypes=shared.DTYPES,
    derive=_axes,
    read_bytes={"k": _key_bytes("k"), "v": _key_bytes("v"), "block_table": _table_bytes},
    scratch={
        "part_out": Write("batch kv_heads splits rows v_dim", "accumulate:q", lambda args: _splits(args) > 1),
        "part_max": Write("batch kv_heads splits rows", "accumulate:q", lambda args: _splits(args) > 1),
        "part_sum": Write("batch kv_heads splits rows", "accumulate:q", lambda args: _splits(args) > 1),
    },
    stages=(
        Stage("decode_attention", tuple(shared.READS), ("part_out|out", "part_max|lse", "part_sum"), _flops),
        Stage("decode_attention_combine", ("part_out", "part_max", "part_sum"), ("out", "lse"),
              lambda s, a: 2 * s["batch"] * s["kv_heads"] * s["splits"] * s["rows"] * s["v_dim"]),
    ),
)  # fmt: skip


@triton.jit
def _load(x, at, ok, D: tl.constexpr, DP: tl.constexpr, COL: tl.constexpr):
    """Rows of x that begin at elements `at`, columns [COL, COL + DP); zero past D and where not ok. fp8 comes as bf16."""
    d = COL + tl.arange(0, DP)
    t = tl.load(x + at[:, None] + d[None, :], ok[:, None] & (d < D)[None, :], other=0.0)
    if t.dtype == tl.float8e4nv:
        t = t.to(tl.bfloat16)
    return t


@triton.jit
def _term(x, stride_row, stride_col, row, col, rows, context):
    """A mask or bias of the queries `row` and the keys `col`, zero past its ends; one row where all rows are alike."""
    if x is None:
        return 0
    elif stride_row is None:
        return tl.load(x + col.to(tl.int64) * stride_col, col < context, other=0.0)
    else:
        at = x + row.to(tl.int64)[:, None] * stride_row + col.to(tl.int64) * stride_col
        return tl.load(at, (row < rows)[:, None] & (col < context), other=0.0)


# What says nothing about the alignment of large loads makes no new variant.
@triton.jit(do_not_specialize=["CONTEXT", "PAGES", "MAX_PAGES", "left", "right", "stride_mb", "stride_mh", "stride_bb",
                               "stride_bh"])  # fmt: skip
def _split_kernel(
    q, k, v, mask, bias, sinks, slopes, prefix, used, block_table, q_scale, k_scale, v_scale, out, lse, sums, scale, cap,
    left, right, SEQ, CONTEXT, KV_HEADS, PAGES, MAX_PAGES,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_mb, stride_mh, stride_ms, stride_mk, stride_bb, stride_bh, stride_bs, stride_bk, stride_ab, stride_qc, stride_kc,
    stride_vc,
    GROUP: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, D2: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr, NS: tl.constexpr, RIGHT: tl.constexpr, PAGE: tl.constexpr,
    WHOLE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """WHOLE: one split; out and lse are the results, otherwise parts and their maxima, beside `sums`.

    TILES: of ROWS rows, that a sequence has."""
    bh = tl.program_id(0) // TILES  # the axis without a limit of 65535
    split = tl.program_id(1)
    b = (bh // KV_HEADS).to(tl.int64)
    kvh = bh % KV_HEADS
    r = tl.program_id(0) % TILES * ROWS + tl.arange(0, ROWS)
    row = r // GROUP  # the query, and which head of the group
    head = kvh * GROUP + r % GROUP
    live = row < SEQ
    context = CONTEXT
    broken = False
    if used is not None:
        context = tl.load(used + b)
        broken = (context < 0) | (context > CONTEXT)
        context = tl.where(broken, 0, context)
    if EXACT is not None:
        scale = tl.full([], EXACT[0], ACC)
        if cap is not None:
            cap = tl.full([], EXACT[1], ACC)
    if k_scale is not None:
        scale = scale * tl.load(k_scale + b * stride_kc + kvh)
    if q_scale is not None:
        scale = (scale * tl.load(q_scale + b * stride_qc + head))[:, None]
    if slopes is not None:
        slopes = tl.load(slopes + b * stride_ab + head).to(ACC)[:, None]
    if mask is not None:
        mask += b * stride_mb
        if stride_ms is not None:
            mask += (head.to(tl.int64) * stride_mh)[:, None]
        else:
            mask += kvh.to(tl.int64) * GROUP * stride_mh
    if bias is not None:
        bias += b * stride_bb
        if stride_bs is not None:
            bias += (head.to(tl.int64) * stride_bh)[:, None]
        else:
            bias += kvh.to(tl.int64) * GROUP * stride_bh
    if prefix is not None:
        prefix = tl.load(prefix + b)
        broken = (prefix < 0) | broken
    geo = (context - SEQ, context, left, right, prefix)
    terms = (mask, None, bias, None, slopes, cap)
    at = b * stride_qb + row.to(tl.int64) * stride_qs + head.to(tl.int64) * stride_qh
    qt = _load(q, at, live, D, DP, 0)
    if D2:
        qt2 = _load(q, at, live, D, D2, DP)
    k += kvh.to(tl.int64) * stride_kh
    v += kvh.to(tl.int64) * stride_vh
    if PAGE:
        block_table += b * MAX_PAGES
    else:
        k += b * stride_kb
        v += b * stride_vb
    # Not -inf: a row that has attended nothing yet would give -inf - -inf. Logits that are not masked lie above it.
    m = tl.full([ROWS], -3.0e38, ACC)
    l = tl.zeros([ROWS], ACC)
    if sinks is not None:
        sink = tl.load(sinks + head).to(ACC)
        none = (sink < -3.0e38) | (split > 0)
        m = tl.where(none, m, sink)
        l = tl.where(none, 0.0, l + 1.0)
    acc = tl.zeros([ROWS, DVP], ACC)
    # This program's keys, of those that some query sees.
    low = 0
    if left is not None:
        low = tl.maximum(context - SEQ - left, 0)
    begin = low
    ALIGNED: tl.constexpr = PAGE > 0 and PAGE % BN == 0  # a block lies in one page
    if ALIGNED:
        begin = low // BN * BN
    length = tl.cdiv(tl.cdiv(context - begin, BN), tl.num_programs(1)) * BN
    begin = begin + split * length
    high = tl.minimum(begin + length, context)
    if PAGE:  # the pages of a block are looked up one block ahead, or the loads of K and V would wait for them
        after = begin
        if not ALIGNED:
            after = begin + tl.arange(0, BN)
        ahead = tl.load(block_table + after // PAGE, after < high, other=0)
    for n in tl.range(begin, high, BN, num_stages=NS):
        col = n + tl.arange(0, BN)
        inside = col < high
        if PAGE:
            if ALIGNED:
                slot = n % PAGE + tl.arange(0, BN)
                after = n + BN
                if left is not None:
                    inside = inside & (col >= low)
            else:
                slot = col % PAGE
                after = col + BN
            page = ahead
            ahead = tl.load(block_table + after // PAGE, after < high, other=0)
            known = (page >= 0) & (page < PAGES)
            page = tl.where(known, page, 0).to(tl.int64)
            k_at = page * stride_kb + slot.to(tl.int64) * stride_ks
            v_at = page * stride_vb + slot.to(tl.int64) * stride_vs
        else:
            k_at = col.to(tl.int64) * stride_ks
            v_at = col.to(tl.int64) * stride_vs
        kt = _load(k, k_at, inside, D, DP, 0)
        s = tl.dot(qt, kt.T, input_precision=PRECISION, out_dtype=ACC)
        if D2:
            kt = _load(k, k_at, inside, D, D2, DP)
            s = tl.dot(qt2, kt.T, s, input_precision=PRECISION, out_dtype=ACC)
        # col[None, :] would cost registers, and spill
        shown = _term(mask, stride_ms, stride_mk, row, col, SEQ, context)
        more = _term(bias, stride_bs, stride_bk, row, col, SEQ, context)
        s, _ = shape_logits(s, row[:, None], col, geo, terms, (shown, more), scale, True)
        if PAGE:
            if ALIGNED:
                s = tl.where(known, s, float("nan"))
            else:
                s = tl.where(known[None, :], s, float("nan"))
        ok = live[:, None] & inside[None, :]
        if RIGHT or left is not None:
            ok = ok & visible(row[:, None], col[None, :], geo, RIGHT)
        s = tl.where(ok, s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        p = power(s - new[:, None], True)
        shrink = power(m - new, True)
        l = l * shrink + tl.sum(p, 1)
        vt = _load(v, v_at, inside, DV, DVP, 0)
        if mask is not None or bias is not None:
            vt = tl.where((tl.max(s, 0) > float("-inf"))[:, None], vt, 0.0)  # 0 * NaN is NaN
        acc = tl.dot(p.to(vt.dtype), vt, acc * shrink[:, None], input_precision=PRECISION, out_dtype=ACC)
        m = new
    if v_scale is not None:
        acc = acc * tl.load(v_scale + b * stride_vc + kvh)
    if used is not None or prefix is not None:
        l = tl.where(broken, float("nan"), l)
    d = tl.arange(0, DVP)
    if WHOLE:
        heads = KV_HEADS * GROUP
        tl.store(lse + (b * heads + head) * SEQ + row, m + tl.math.log2(l) * 0.6931471805599453, live)
        acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
        at = ((b * SEQ + row) * heads + head) * DV
        tl.store(out + at[:, None] + d[None, :], acc.to(out.dtype.element_ty), live[:, None] & (d < DV)[None, :])
    else:
        at = (bh.to(tl.int64) * tl.num_programs(1) + split) * (SEQ * GROUP) + r
        tl.store(lse + at, m, live)
        tl.store(sums + at, l, live)
        if used is not None:
            live = live & ((begin < high) | (split == 0))  # the other parts of no keys are not read
        tl.store(out + at[:, None] * DV + d[None, :], acc, live[:, None] & (d < DV)[None, :])


@triton.jit(do_not_specialize=["SPLITS"])
def _combine_kernel(
    part_out, part_max, part_sum, out, lse, SEQ, SPLITS, KV_HEADS, GROUP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    MOST: tl.constexpr, BLOCK: tl.constexpr, SOME: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """SOME: parts may have no keys, and then no values."""
    bh = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1)
    packed = SEQ * GROUP
    d = tl.arange(0, DVP)
    # The sums of all parts at once, the parts a block at a time: one variant, and registers, for any number of them.
    every = tl.arange(0, MOST)
    at = (bh * SPLITS + every) * packed + r
    maxima = tl.load(part_max + at, every < SPLITS, other=-3.0e38)
    top = tl.max(maxima, 0)
    total = tl.sum(power(maxima - top, True) * tl.load(part_sum + at, every < SPLITS, other=0.0), 0)
    y = tl.zeros([DVP], ACC)
    for first in range(0, SPLITS, BLOCK):
        s = first + tl.arange(0, BLOCK)
        there = s < SPLITS
        part = (bh * SPLITS + s) * packed + r
        w = power(tl.load(part_max + part, there, other=-3.0e38) - top, True)
        if SOME:
            there = tl.load(part_sum + part, there, other=0.0) > 0.0
        values = tl.load(part_out + part[:, None] * DV + d[None, :], there[:, None] & (d < DV)[None, :], other=0.0)
        y += tl.sum(values * w[:, None], 0)
    y = y / tl.where(total == 0.0, 1.0, total)
    b = bh // KV_HEADS
    head = bh % KV_HEADS * GROUP + r % GROUP
    row = r // GROUP
    heads = KV_HEADS * GROUP
    tl.store(out + ((b * SEQ + row) * heads + head) * DV + d, y.to(out.dtype.element_ty), d < DV)
    tl.store(lse + (b * heads + head) * SEQ + row, top + tl.math.log2(total) * 0.6931471805599453)


def launch(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, sinks: Tensor | None, alibi_slopes: Tensor | None,
    block_map: Tensor | None, prefix_lens: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None, block_table: Tensor | None, q_scale: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None,
    seed: Tensor | None, left: int, right: int, softcap: float, scale: float, dropout_p: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    args = dict(locals())
    sizes = SPEC.axes(args)
    out, lse = SPEC.empty(args, sizes)
    if out.numel() == 0:
        return out, lse
    target, problem, count = target_of(q.device), _problem(args), sizes["splits"]
    config = configure(problem, target)
    seq, context, kv_heads, group = (sizes[a] for a in ("seq", "context", "kv_heads", "group"))
    sequences, row_tiles = sizes["batch"] * kv_heads, cdiv(sizes["rows"], problem.block_rows)
    dims, numerics = _dims(sizes["head_dim"], sizes["v_dim"]), shared.numerics(args, target)
    with on_device(q):
        facts = shared.launch_facts(args, by_key=False)
        *options, _, _, prefix, used, pages, q_scale, k_scale, v_scale, _ = facts.tensors
        strides = list(facts.strides)
        for at, t in ((2, mask), (6, bias)):
            strides[at] = strides[at] or (0 if _per_row(t, group) else None)
        near = 0 <= right < seq - 1  # otherwise every query sees the end of the context
        q, k, v = map(contiguous_last, (q, k, v))
        parts = SPEC.empty_scratch(args, sizes) if count > 1 else (out, lse, None)
        _launch(
            _split_kernel, (sequences * row_tiles, count),
            (q, k, v, *options, prefix, used, pages, q_scale, k_scale, v_scale, *parts, scale, softcap or None,
             left if 0 <= left < context else None, right if near else None, seq, context, kv_heads, sizes["k_batch"],
             sizes.get("max_pages", 0), *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *strides[:9], *strides[12:]),
            {"GROUP": group, "ROWS": problem.block_rows, "TILES": row_tiles, **dims, "BN": config.block_n,
             "NS": config.num_stages, "RIGHT": facts.constexprs["RIGHT"] if near else 0, "PAGE": problem.page,
             "WHOLE": count == 1, **numerics, "num_warps": config.num_warps, "num_stages": config.num_stages},
        )  # fmt: skip
        if count > 1:
            _launch(
                _combine_kernel, (sequences, sizes["rows"]), (*parts, out, lse, seq, count, kv_heads),
                {"GROUP": group, "DV": dims["DV"], "DVP": dims["DVP"], "MOST": MAX_SPLITS, "BLOCK": 16,
                 "SOME": used is not None, "ACC": numerics["ACC"], "num_warps": 4},
            )  # fmt: skip
    return out, lse


def reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, sinks: Tensor | None, alibi_slopes: Tensor | None,
    block_map: Tensor | None, prefix_lens: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None, block_table: Tensor | None, q_scale: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None,
    seed: Tensor | None, left: int, right: int, softcap: float, scale: float, dropout_p: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    args = dict(locals())
    sizes = SPEC.axes(args)
    out, lse = SPEC.empty(args, sizes)
    _attention_reference.forward("decode_attention", sizes, args, out, lse)
    return out, lse


OP = Op(SPEC, launch, reference)

"""The experts' products that forward and backward share: the gathered gate-up product, rows by experts' matrices, and the sum of
a token's rows. See moe_experts.py for the maths.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import _moe, _moe_hopper
from ._gemm import accumulator, halves
from ._hopper_check import ready
from ._lang import cdiv, next_power_of_2, tl, triton
from ._launch import contiguous_last, descriptor
from ._launch import launch as _launch
from ._math import last_of
from ._moe import (
    boxed,
    clear_slots,
    expert_pointers,
    gated,
    multiply,
    row_pointers,
    slot_start,
    store_rows,
    store_slots,
    sums,
    take,
    take_expert,
    take_heads,
    tile_at,
)
from ._spec import Args, Sizes
from ._target import Target, target_of

READS = {
    "x": "tokens hidden", "gate_up_weight": "experts gate_up_rows gate_up_columns",
    "down_weight": "experts down_rows down_columns", "gate_up_bias": "experts gate_up_out", "down_bias": "experts down_out",
    "weights": "tokens top_k", **_moe.INDEX,
}  # fmt: skip


def expert_bytes(name: str) -> Any:
    """For a spec: the bytes of the experts that have a row."""

    def count(sizes: Sizes, args: Args) -> int:
        t = args[name]
        return round(_moe.touched(sizes, args) * t[0].numel()) * t.element_size()

    return count


def tile_bytes(sizes: Sizes, args: Args) -> int:
    """Three numbers of every valid tile, and how many these are."""
    return 4 + 12 * _moe.valid_tiles(sizes, args) if sizes["max_tiles"] else 0


EXPERT_BYTES = {n: expert_bytes(n) for n in ("gate_up_weight", "down_weight", "gate_up_bias", "down_bias")}


def _by_hopper(c: _moe.Config, target: Target, sizes: Sizes, k: int, n: int, columns: int, x: Tensor, w: Tensor) -> bool:
    """Whether _moe_hopper.py takes these and has passed its test, which only those who need it wait for."""
    return _moe_hopper.fits(c, target, sizes, k, n, columns, x, w) and ready(x.device, "experts")


def gate_up_flops(s: Sizes, args: Args) -> int:
    return s["rows"] * (2 * s["hidden"] + 4) * s["gate_up"]


# ---- gate and up ---------------------------------------------------------------------------------------------------------------


@triton.jit
def _pair_columns(n, N, BN: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The columns of gate_up of tile n, BN of them: gate's half, then up's, or in turn; and which exist."""
    j = tl.arange(0, BN)
    if INTERLEAVED:
        c = n * BN + j
        return c, c < 2 * N
    else:
        f = n * (BN // 2) + j % (BN // 2)
        return tl.where(j < BN // 2, f, N + f), f < N


@triton.jit
def _gate_up_kernel(
    x, w, bias, order, tiles, h, saved, arrived, COUNTERS, N, K, stride_x, stride_e, stride_w, alpha, limit,
    TOP_K: tl.constexpr, ACT: tl.constexpr, T: tl.constexpr, INTERLEAVED: tl.constexpr, EVEN: tl.constexpr, ACC: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, SWAP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """arrived [COUNTERS]: set to 0 for the next launch, where it counts."""
    if arrived is not None:
        for i in range(tl.program_id(0) * BM, COUNTERS, tl.num_programs(0) * BM):
            tl.store(arrived + i + tl.arange(0, BM), tl.zeros([BM], tl.int32), i + tl.arange(0, BM) < COUNTERS)
    HN: tl.constexpr = BN // 2
    num_m = tl.load(tiles + 3)
    num_n = tl.cdiv(N, HN)
    for t in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=TMA):
        e, first, end, n = tile_at(tiles, t, num_m, num_n, GROUP)
        rows = first + tl.arange(0, BM)
        # Rows past the end repeat the last one: always of this expert, never stored.
        token = tl.load(order + tl.minimum(rows, end - 1)) // TOP_K
        left = row_pointers(x, token.to(tl.int64) * stride_x, BK)
        c, ok = _pair_columns(n, N, BN, INTERLEAVED)
        if not TMA:
            right = expert_pointers(w, e, c, stride_e, stride_w, BK, T)
        both = sums(BM, BN, SWAP, ACC)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            a = take(left, k, K, BK, EVEN)
            if not TMA:
                b = take_expert(right, ok, k, K, stride_w, BK, T)
            elif INTERLEAVED:
                b = boxed(w, e, n * BN, k, BN, BK, T)
            else:
                b = tl.reshape(w.load([e, 0, n * HN, k]), (BN, BK))
            both = multiply(a, b, both, SWAP, ACC)
        if SWAP:
            both = both.T
        live = rows < end
        if bias is not None:
            both += tl.load(bias + e * 2 * N + c, ok, other=0.0).to(ACC)[None, :]
        if INTERLEAVED:
            if saved is not None:
                store_rows(saved, rows, n * BN, both, live, 2 * N, BN)
            g, u = tl.split(tl.reshape(both, (BM, HN, 2)))
        else:
            g, u = halves(both, BM, BN)
            if saved is not None:
                at = saved + rows[:, None].to(tl.int64) * (2 * N) + (n * HN + tl.arange(0, HN))[None, :]
                ok = live[:, None] & (n * HN + tl.arange(0, HN) < N)[None, :]
                tl.store(at, g.to(saved.dtype.element_ty), ok)
                tl.store(at + N, u.to(saved.dtype.element_ty), ok)
        if h is not None:
            store_rows(h, rows, n * HN, gated(g, u, alpha, limit, ACT), live, N, HN)


def gate_up_launch(args: Args, sizes: Sizes, h: Tensor | None, saved: Tensor | None, arrived: Tensor | None = None) -> None:
    """h and saved `gate_up`, each where it is given, of all rows; zeros to arrived."""
    x, transposed, interleaved, tile_rows = args["x"], args["transposed"], args["interleaved"], sizes["tile_rows"]
    x, w = contiguous_last(x), contiguous_last(args["gate_up_weight"])
    n, k = sizes["ffn"], sizes["hidden"]
    target = target_of(x.device)
    c = _moe.configure("gate_up", tile_rows, x.element_size(), target)
    plain = arrived is None and not (transposed or interleaved)
    if plain and _by_hopper(c, target, sizes, k, n, _moe_hopper.COLUMNS // 2, x, w):
        return _moe_hopper.gate_up_hopper_launch(x, w, h, saved, args, sizes)
    c = _moe.usable(c, w) if interleaved or not transposed else _moe._by_pointers(c)
    if c.tma and not interleaved:
        c = _moe.usable(c, w.unflatten(1, (2, n)))
    bias = args["gate_up_bias"]
    _launch(
        _gate_up_kernel, (_moe.programs(sizes["max_tiles"] * cdiv(n, c.block_n // 2), c, target),),
        (x, _moe.pair_operand(w, c, transposed, interleaved), None if bias is None else bias.contiguous(), args["order"],
         args["tiles"], h, saved, arrived, None if arrived is None else len(arrived), n, k, x.stride(0), w.stride(0), w.stride(1),
         *_moe.clamp_numbers(args)),
        {"TOP_K": sizes["top_k"], "ACT": args["activation"], "T": transposed, "INTERLEAVED": interleaved,
         "EVEN": k % c.block_k == 0, "ACC": accumulator(x), "BM": tile_rows, **_moe.options(c)},
    )  # fmt: skip


# ---- rows by experts' matrices, and their sums ---------------------------------------------------------------------------------


@triton.jit
def gather_sum(y, inverse, weights, token, cols, ok, H, TOP_K: tl.constexpr, ACC: tl.constexpr):
    """[tokens, columns]: the sum of each token's rows, by its weights if there are any, in the order of its slots."""
    acc = tl.zeros([token.shape[0], cols.shape[0]], ACC)
    for j in tl.static_range(TOP_K):
        slot = token.to(tl.int64) * TOP_K + j
        r = tl.load(inverse + slot, ok, other=-1)
        found = r >= 0
        at = y + r[:, None].to(tl.int64) * H + cols[None, :]
        v = tl.load(at, found[:, None] & (cols < H)[None, :], other=0.0).to(ACC)
        if weights is not None:
            v *= tl.load(weights + slot, found, other=0.0).to(ACC)[:, None]
        acc += v
    return acc


@triton.jit
def plus(acc, residual, token, cols, ok, H):
    """acc [tokens, columns] and these rows and columns of the residual `tokens hidden`, if there is one."""
    if residual is not None:
        at = residual + token.to(tl.int64)[:, None] * H + cols[None, :]
        acc += tl.load(at, ok[:, None] & (cols < H)[None, :], other=0.0).to(acc.dtype)
    return acc


@triton.jit
def _sum_columns(y, inverse, weights, residual, out, n0, TOKENS, N, TOP_K: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
                 ACC: tl.constexpr):  # fmt: skip
    """Columns [n0, n0 + BN) of out: all tokens' sums of their rows, in the order of their slots; BT tokens at a time."""
    cols = n0 + tl.arange(0, BN)
    for t in range(0, TOKENS, BT):
        token = t + tl.arange(0, BT)
        total = gather_sum(y, inverse, weights, token, cols, token < TOKENS, N, TOP_K, ACC)
        store_rows(out, token, n0, plus(total, residual, token, cols, token < TOKENS, N), token < TOKENS, N, BN)


@triton.jit(do_not_specialize=["TOKENS"])
def _rows_kernel(
    a, w, bias, order, tiles, inverse, y, arrived, weights, residual, out, TOKENS, N, K, stride_a, stride_e, stride_w,
    FROM: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, T: tl.constexpr, EVEN: tl.constexpr, ACC: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, SWAP: tl.constexpr,
    STAGES: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """y = a @ w[expert].T + bias[expert], row by row; w `experts N K` or, with T, `experts K N`. a has what FROM says: "rows K";
    "tokens": of each row its token's; "slots": its slot's (see slot_start). inverse: y has slots, those without a row are 0; or,
    with arrived, of the programs of a column tile, of which there are as many for each, the last to end sums y's rows to out."""
    num_m = tl.load(tiles + 3)
    num_n = tl.cdiv(N, BN)
    start = tl.program_id(0)
    stop = num_m * num_n
    step = tl.num_programs(0)
    if arrived is not None:
        own = start % num_n
        start = start // num_n
        stop = num_m
        step = step // num_n
    for t in tl.range(start, stop, step, flatten=TMA):
        if arrived is None:
            e, first, end, n = tile_at(tiles, t, num_m, num_n, GROUP)
        else:
            e, first, end, n = tl.load(tiles + t * 4), tl.load(tiles + t * 4 + 1), tl.load(tiles + t * 4 + 2), own
        rows = first + tl.arange(0, BM)
        cols = n * BN + tl.arange(0, BN)
        if order is not None:
            slot = tl.load(order + tl.minimum(rows, end - 1))
        if not TMA:
            matrix = expert_pointers(w, e, cols, stride_e, stride_w, BK, T)
        if FROM == "tokens":
            pointers = row_pointers(a, (slot // TOP_K).to(tl.int64) * stride_a, BK)
        elif FROM == "slots" and WIDTH > 0:
            heads = a + slot_start(slot, stride_a, K, TOP_K, WIDTH)[:, None]
        elif FROM == "slots":
            pointers = row_pointers(a, slot_start(slot, stride_a, K, TOP_K, WIDTH), BK)
        elif not TMA:
            pointers = row_pointers(a, tl.minimum(rows, end - 1).to(tl.int64) * K, BK)
        acc = sums(BM, BN, SWAP, ACC)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            if FROM == "slots" and WIDTH > 0:
                left = take_heads(heads, k, K, TOP_K, WIDTH, BK, EVEN)
            elif TMA and FROM == "rows":
                left = a.load([first, k])
            else:
                left = take(pointers, k, K, BK, EVEN)
            if TMA:
                right = boxed(w, e, n * BN, k, BN, BK, T)
            else:
                right = take_expert(matrix, cols < N, k, K, stride_w, BK, T)
            acc = multiply(left, right, acc, SWAP, ACC)
        if SWAP:
            acc = acc.T
        if bias is not None:
            acc += tl.load(bias + e * N + cols, cols < N, other=0.0).to(ACC)[None, :]
        if (inverse is not None) and (arrived is None):
            at = slot_start(slot, TOP_K * N, N, TOP_K, WIDTH)
            if BN > 128:  # less is in registers at once
                lower, upper = halves(acc, BM, BN)
                store_slots(y, at, n * BN, lower, rows < end, N, TOP_K, WIDTH, BN // 2)
                store_slots(y, at, n * BN + BN // 2, upper, rows < end, N, TOP_K, WIDTH, BN // 2)
            else:
                store_slots(y, at, n * BN, acc, rows < end, N, TOP_K, WIDTH, BN)
        else:
            store_rows(y, rows, n * BN, acc, rows < end, N, BN)
    if arrived is not None:
        if last_of(arrived + own, step):
            _sum_columns(y, inverse, weights, residual, out, own * BN, TOKENS, N, TOP_K, BN, BT, ACC)
    elif inverse is not None:
        clear_slots(y, inverse, TOKENS, N, TOP_K, WIDTH, 64)


def rows_launch(kind: str, a: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, args: Args, sizes: Sizes, by_columns: bool, *,
                source: str = "rows", to_slots: bool = False, width: int = 0,
                sums_to: tuple[Tensor, Tensor, Tensor] | None = None) -> None:  # fmt: skip
    """y `rows N` = a `rows K` by the experts' matrices, stored `N K` or, by_columns, `K N`. source: what a has instead of rows,
    "tokens" or "slots"; to_slots: so has y. width: of the heads of slots, 0: they have none. sums_to: out `tokens N`, the weights
    of its sums of y's rows, and a counter for each column tile, 0."""
    tile_rows, target = sizes["tile_rows"], target_of(a.device)
    n, k = (w.shape[2], w.shape[1]) if by_columns else w.shape[1:]
    w, alone = contiguous_last(w), source == "rows"
    a = a if alone else contiguous_last(a)
    c = _moe.configure(kind, tile_rows, a.element_size(), target)
    plain = alone and not to_slots and sums_to is None
    if plain and _by_hopper(c, target, sizes, k, n, _moe_hopper.COLUMNS, a, w):
        return _moe_hopper.rows_hopper_launch(a, w, bias, y, args, sizes, by_columns)
    c = _moe.usable(c, *((a, w) if alone else (w,)))
    out, weights, arrived = sums_to or (None, None, None)
    by_token = to_slots or sums_to is not None
    columns = cdiv(n, c.block_n)
    if sums_to:
        programs = columns * max(1, min(sizes["max_tiles"], target.sms * c.per_sm // columns))
    else:
        programs = _moe.programs(sizes["max_tiles"] * columns, c, target)
    _launch(
        _rows_kernel, (programs,),
        (descriptor(a, [tile_rows, c.block_k]) if c.tma and alone else a,
         _moe.expert_operand(w, c.block_n, c.block_k, c, by_columns), None if bias is None else bias.contiguous(),
         None if alone and not to_slots else args["order"], args["tiles"], args["inverse"] if by_token else None, y,
         arrived, weights, args["residual"] if sums_to else None, out, sizes["tokens"] if by_token else None, n, k,
         None if alone else a.stride(0), w.stride(0), w.stride(1)),
        {"FROM": source, "TOP_K": 1 if alone and not by_token else sizes["top_k"], "WIDTH": width, "T": by_columns,
         "EVEN": k % c.block_k == 0, "ACC": accumulator(a), "BM": tile_rows, "BT": 32 if c.tma else 8,
         **_moe.options(c)},
    )  # fmt: skip


@triton.jit(do_not_specialize=["TOKENS"])
def _combine_kernel(y, inverse, weights, residual, out_bias, out, TOKENS, H, TOP_K: tl.constexpr, BT: tl.constexpr,
                    BH: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    cols = tl.program_id(1) * BH + tl.arange(0, BH)
    acc = gather_sum(y, inverse, weights, token, cols, token < TOKENS, H, TOP_K, ACC)
    acc = plus(acc, residual, token, cols, token < TOKENS, H)
    if out_bias is not None:
        acc += tl.load(out_bias + cols, cols < H, other=0.0).to(ACC)[None, :]
    store_rows(out, token, tl.program_id(1) * BH, acc, token < TOKENS, H, BH)


def combine_launch(y: Tensor, inverse: Tensor, weights: Tensor | None, residual: Tensor | None, out: Tensor, top_k: int,
                   out_bias: Tensor | None = None) -> None:  # fmt: skip
    """out `tokens hidden` = the sum of each token's rows of y, by weights `tokens top_k` if given, and the residual and out_bias
    `hidden` if given."""
    tokens, hidden = out.shape
    block = min(2048, next_power_of_2(hidden))
    _launch(
        _combine_kernel, (tokens, cdiv(hidden, block)), (y, inverse, weights, residual, out_bias, out, tokens, hidden),
        {"TOP_K": top_k, "BT": 1, "BH": block, "ACC": accumulator(out), "num_warps": 8 if block >= 2048 else 4},
    )  # fmt: skip

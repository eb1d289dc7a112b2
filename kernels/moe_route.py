"""The router of a mixture of experts: logits, scores, the choice of top_k experts, their weights, and the token-to-expert index.

    logits  = x @ weight.T + bias                              rounded to logits_dtype
    scores  = softmax(logits) | sigmoid(logits) | logits       by `scoring`: "softmax", "sigmoid", "softmax_chosen"
    choice  = scores + correction_bias                         decides who is chosen, not with what weight
              groups > 1: experts of the topk_groups groups of highest group score only, which is the highest choice in the
              group ("max") or the sum of the two highest ("top2")
    indices = the top_k of highest choice, best first          ties to the lower index, NaN above all
    weights = scores[indices], with "softmax_chosen" the softmax over the chosen logits;
              renormalise: divided by their sum + eps; times scale; rounded to weights_dtype

    x           tokens hidden            weight  experts hidden     bias  experts     of one dtype
    correction_bias  experts             of any floating dtype
    weights     tokens top_k             indices tokens top_k, int32            logits  tokens experts
    order, inverse, offsets, tiles       see _moe_index.py

Scores are fp32 from the logits as they were rounded. Where the scores of all chosen experts underflow, weights are 0, not 0/0.
A token with NaN gets weights of NaN and some experts, distinct as every token's are, so that the index stays right.

HBM, in elements: reads x, weight, bias and correction_bias once; writes weights, indices, logits and the index. Few tokens: the
logits in parts of hidden, fp32 [splits, tokens, experts], then the choice, whose last program makes the index. More: a launch
each. Many: the choice in the epilogue of the GEMM, then the index. The backward is in moe_route_backward.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import moe_route_backward
from ._gemm import accumulator, load_tile
from ._lang import cdiv, tl, triton
from ._launch import contiguous_last, on_device
from ._launch import launch as _launch
from ._math import last_of
from ._moe_choice import choose
from ._moe_index import (
    INDEX_WARPS,
    height,
    index_all,
    index_axes,
    index_block,
    index_once,
    index_reads,
    index_reference,
    launch_index,
    warps_for,
)
from ._router import check_router
from ._spec import Args, Op, ShapeError, Sizes, Spec, Stage, Write, accumulate_dtype
from ._target import Target, target_of


@dataclass(frozen=True)
class Config:
    block_tokens: int  # of a tile that is chosen for at once
    last: bool  # of the programs that choose the last also makes the index
    fused: bool  # the programs that multiply also choose
    gemm_tokens: int
    gemm_experts: int
    splits: int  # of hidden
    block_k: int
    num_stages: int


def configure(tokens: int, experts: int, itemsize: int, target: Target) -> Config:
    """Parts of hidden keep a router of few tokens, whose weight is read by few programs otherwise, from being bound by one SM.

    Which launches there are, and the tile heights for more than 64 tokens, are those of a prototype on an H200 (2026-11; E 128,
    hidden 2048 and E 8, hidden 4096); the number of parts, and tiles for more than 128 experts, are chosen by registers and
    shared memory.
    """
    ep = index_block(experts)
    most = max(16, 8192 // ep)  # a matrix [block_tokens, experts] of 16 warps, of which a program holds several

    def split(block: int, last: bool, rows: int, cols: int, splits: int) -> Config:
        return Config(block, last, False, rows, min(ep, cols), splits, *_ring(rows + min(ep, cols), itemsize, target))

    if target.batch_invariant or tokens > 1024:  # the order of the sums over hidden must not depend on the tokens
        block = min(most, 64 if target.batch_invariant or tokens > 4096 else 32)
        if ep > 128:  # a tile of all experts would be too low for the GEMM
            return split(block, False, 128 if itemsize < 4 else 64, 128 if itemsize < 4 else 64, 1)
        return Config(block, False, True, block, ep, 1, *_ring(block + ep, itemsize, target))
    if tokens <= 64:
        tile = next(t for t in (16, 32, 64) if tokens <= t)
        # A token a warp: no maximum over its experts waits for another warp.
        return split(1 if tokens == 1 else INDEX_WARPS, True, tile, 16, 8 if tokens <= 16 else 4)
    return split(min(16, most), False, 64, 64, 4)


def launches(tokens: int, experts: int, itemsize: int, target: Target) -> int:
    """GPU launches of one call: product and choice, together or not, and the index where the choice has not made it."""
    c = configure(tokens, experts, itemsize, target)
    return 2 if c.last or c.fused else 3


def _ring(rows: int, itemsize: int, target: Target) -> tuple[int, int]:
    """block_k and stages of the deepest ring of operand tiles that fits."""
    choices = [(64, 3), (64, 2), (32, 3), (32, 2), (16, 2)][2 if itemsize >= 4 else 0 :]
    return next((c for c in choices if rows * c[0] * c[1] * itemsize <= target.smem_bytes * 3 // 4), (16, 1))


def _axes(sizes: Sizes, args: Args) -> dict[str, int]:
    x, tokens, experts, top_k = args["x"], sizes["tokens"], sizes["experts"], args["top_k"]
    _check(args, experts)
    found = {**index_axes("moe_route", tokens, top_k, experts, args["tile_rows"]), "top_k": top_k}
    if not isinstance(tokens, int):
        return found  # a trace for any length: no result has the axes of scratch
    c = configure(tokens, experts, x.element_size(), target_of(x.device))
    token_tiles = cdiv(tokens, c.block_tokens)
    more = {"arrivals": 1} if c.last else {"token_tiles": token_tiles}
    if not c.fused:
        more["splits"] = c.splits
    return {**found, **more}


def _check(args: Args, experts: int) -> None:
    x = args["x"]
    wide = accumulate_dtype(x.dtype)
    check_router("moe_route", args, experts)
    for name in ("logits_dtype", "weights_dtype"):
        if args[name] not in (x.dtype, wide):
            raise ValueError(f"moe_route: {name}={args[name]}, expected x's {x.dtype} or {wide}")
    correction_bias = args["correction_bias"]
    if correction_bias is not None and not correction_bias.is_floating_point():
        raise ValueError(f"moe_route: correction_bias has dtype {correction_bias.dtype}, expected a floating one")
    if x.shape[1] < 1:
        raise ShapeError("moe_route: hidden=0, expected at least 1")


_INDEX = ("order", "inverse", "offsets", "tiles")


def _gemm_flops(s: Sizes, a: Args) -> int:
    return 2 * s["tokens"] * s["experts"] * s["hidden"]


def _choice_flops(s: Sizes, a: Args) -> int:
    return s["tokens"] * s["experts"] * (4 + a["top_k"])


SPEC = Spec(
    name="moe_route",
    reads={"x": "tokens hidden", "weight": "experts hidden", "bias": "experts", "correction_bias": "experts"},
    optional=frozenset({"bias", "correction_bias"}),
    any_dtype=frozenset({"correction_bias"}),
    writes={
        "weights": Write("tokens top_k", "weights_dtype"),
        "indices": Write("tokens top_k", "int32"),
        "logits": Write("tokens experts", "logits_dtype"),
        "order": Write("rows", "int32"),
        "inverse": Write("tokens top_k", "int32"),
        "offsets": Write("experts+1", "int32"),
        "tiles": Write("max_tiles 4", "int32"),
    },
    scratch={"partial": Write("splits tokens experts", "accumulate:x"), "arrived": Write("arrivals", "int32"),
             "counts": Write("token_tiles experts", "int32")},
    derive=_axes,
    stages=(
        Stage("moe_logits", ("x", "weight"), ("partial", "arrived"), _gemm_flops),
        Stage("moe_choice", ("partial", "bias", "correction_bias", "arrived", "indices"),
              ("weights", "indices", "logits", "arrived", *_INDEX), _choice_flops, "arrived"),
        Stage("moe_choice", ("partial", "bias", "correction_bias"), ("weights", "indices", "logits", "counts"), _choice_flops,
              when=lambda s: "token_tiles" in s and "splits" in s),
        Stage("moe_route", ("x", "weight", "bias", "correction_bias"), ("weights", "indices", "logits", "counts"),
              lambda s, a: _gemm_flops(s, a) + _choice_flops(s, a), when=lambda s: "splits" not in s),
        Stage("moe_index", ("indices", "counts"), _INDEX, lambda s, a: s["rows"], beside="counts"),
    ),
)  # fmt: skip


def scores_reference(logits: Tensor, scoring: str) -> Tensor:
    return logits if scoring == "softmax_chosen" else logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)


def _descending(t: Tensor) -> Tensor:
    """Indices from the highest down; ties in order, which torch.topk does not promise."""
    return torch.sort(t, dim=-1, descending=True, stable=True).indices


def choose_reference(choice: Tensor, top_k: int, groups: int, topk_groups: int, group_score: str) -> Tensor:
    """Indices `tokens top_k` of the highest of choice `tokens experts`."""
    if groups > 1:
        grouped = choice.unflatten(-1, (groups, -1))
        highest = grouped.gather(-1, _descending(grouped)[..., : 2 if group_score == "top2" else 1]).sum(-1)
        rank = _descending(_descending(highest).neg())  # of every group, 0 for the best
        allowed = (rank < topk_groups).repeat_interleave(choice.shape[-1] // groups, -1)
        # By position, not by a fill value: -inf may be a score too.
        by_choice = _descending(choice)
        best_first = by_choice.gather(-1, _descending(allowed.gather(-1, by_choice).int()))
        return best_first[..., :top_k]
    return _descending(choice)[..., :top_k]


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, correction_bias: Tensor | None, scoring: str, top_k: int, groups: int,
    topk_groups: int, group_score: str, renormalise: bool, eps: float, scale: float, logits_dtype: torch.dtype,
    weights_dtype: torch.dtype, tile_rows: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    acc, dtype = accumulate_dtype(x.dtype), logits_dtype
    given = None if bias is None else bias.to(dtype)
    logits = torch.nn.functional.linear(x.to(dtype), weight.to(dtype), given)
    scores = scores_reference(logits.to(acc), scoring)
    choice = scores if correction_bias is None else scores + correction_bias.to(acc)
    indices = choose_reference(choice, top_k, groups, topk_groups, group_score)
    weights = scores.gather(-1, indices)
    if scoring == "softmax_chosen":
        weights = weights.softmax(-1)
    if renormalise:
        total = weights.sum(-1, keepdim=True) + eps
        weights = weights / torch.where(total == 0, 1, total)
    index = index_reference(indices, weight.shape[0], tile_rows)
    return (weights * scale).to(weights_dtype), indices.int(), logits, *index


@triton.jit
def _product(x, weight, row, col, start, end, T, E, stride_x, stride_w, BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
             STAGES: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """[BT, BE] of x @ weight.T over hidden from start to end."""
    acc = tl.zeros([BT, BE], ACC)
    for k in tl.range(start, end, BK, num_stages=STAGES):
        a = load_tile(x, row, k, T, end, stride_x, BT, BK, False)
        b = load_tile(weight, col, k, E, end, stride_w, BE, BK, False)
        acc = tl.dot(a, b.T, acc, input_precision="ieee", out_dtype=ACC)
    return acc


@triton.jit(do_not_specialize=["T"])
def _logits_kernel(
    x, weight, partial, arrived, T, E, H, SPAN, stride_x, stride_w,
    BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Grid (token tiles, expert tiles, parts of SPAN columns of hidden). arrived: for those who count themselves there next."""
    if arrived is not None and (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        tl.store(arrived, 0)
    row = tl.program_id(0) * BT
    col = tl.program_id(1) * BE
    part = tl.program_id(2)
    start = part * SPAN
    acc = _product(x, weight, row, col, start, tl.minimum(start + SPAN, H), T, E, stride_x, stride_w, BT, BE, BK, STAGES, ACC)
    token = row + tl.arange(0, BT)
    expert = col + tl.arange(0, BE)
    at = partial + (part.to(tl.int64) * T + token)[:, None] * E + expert[None, :]
    tl.store(at, acc, (token < T)[:, None] & (expert < E)[None, :])


@triton.jit
def _sum_parts(partial, token, live, T, E, SPLITS: tl.constexpr, BT: tl.constexpr, EP: tl.constexpr, ACC: tl.constexpr):
    expert = tl.arange(0, EP)
    acc = tl.zeros([BT, EP], ACC)
    for s in range(SPLITS):
        at = partial + (token + T.to(tl.int64) * s)[:, None] * E + expert[None, :]
        acc += tl.load(at, live[:, None] & (expert < E)[None, :], other=0.0)
    return acc


@triton.jit(do_not_specialize=["T", "MAX_TILES"])
def _choice_kernel(
    partial, bias, correction, weights, indices, logits, counts, arrived, order, inverse, offsets, tiles, T, E, K, MAX_TILES,
    groups, topk_groups, eps, scale, SPLITS: tl.constexpr, SCORING: tl.constexpr, GROUPED: tl.constexpr, SIZE: tl.constexpr,
    TOP2: tl.constexpr, RENORMALISE: tl.constexpr, BT: tl.constexpr, EP: tl.constexpr, ACC: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, ONE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Grid (token tiles). Either leaves the counts for the launch that makes the index, or counts itself in `arrived`, and the
    last one makes it, BLOCK tokens at a time; TILE, ONE, AT_ONCE: see index_all."""
    numbers = (groups, topk_groups, eps, scale)
    program = tl.program_id(0)
    token = program * BT + tl.arange(0, BT)
    expert = tl.arange(0, EP)
    acc = _sum_parts(partial, token, token < T, T, E, SPLITS, BT, EP, ACC)
    slots = choose(acc, token, token < T, bias, correction, weights, indices, logits, E, K, numbers, SCORING, GROUPED, SIZE, TOP2,
                   RENORMALISE, BT, EP)  # fmt: skip
    if arrived is None:
        tl.store(counts + program.to(tl.int64) * E + expert, tl.sum((slots >= 0).to(tl.int32), 0), expert < E)
    else:
        if BT == 1:  # of one token there is one program
            tl.debug_barrier()
            index_all(indices, order, inverse, offsets, tiles, T, E, K, MAX_TILES, True, TILE, BLOCK, ONE, AT_ONCE, EP)
        elif last_of(arrived, tl.num_programs(0)):
            index_all(indices, order, inverse, offsets, tiles, T, E, K, MAX_TILES, True, TILE, BLOCK, ONE, AT_ONCE, EP)


@triton.jit(do_not_specialize=["T"])
def _route_kernel(
    x, weight, bias, correction, weights, indices, logits, counts, T, E, K, H, stride_x, stride_w, groups, topk_groups, eps,
    scale, BK: tl.constexpr, STAGES: tl.constexpr, SCORING: tl.constexpr, GROUPED: tl.constexpr, SIZE: tl.constexpr,
    TOP2: tl.constexpr, RENORMALISE: tl.constexpr, BT: tl.constexpr, EP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Grid (token tiles): the whole logits of a tile, and the choice."""
    numbers = (groups, topk_groups, eps, scale)
    program = tl.program_id(0)
    token = program * BT + tl.arange(0, BT)
    expert = tl.arange(0, EP)
    acc = _product(x, weight, program * BT, 0, 0, H, T, E, stride_x, stride_w, BT, EP, BK, STAGES, ACC)
    slots = choose(acc, token, token < T, bias, correction, weights, indices, logits, E, K, numbers, SCORING, GROUPED, SIZE, TOP2,
                   RENORMALISE, BT, EP)  # fmt: skip
    tl.store(counts + program.to(tl.int64) * E + expert, tl.sum((slots >= 0).to(tl.int32), 0), expert < E)


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, correction_bias: Tensor | None, scoring: str, top_k: int, groups: int,
    topk_groups: int, group_score: str, renormalise: bool, eps: float, scale: float, logits_dtype: torch.dtype,
    weights_dtype: torch.dtype, tile_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    args = {"x": x, "weight": weight, "bias": bias, "correction_bias": correction_bias, "scoring": scoring, "top_k": top_k,
            "groups": groups, "topk_groups": topk_groups, "group_score": group_score, "renormalise": renormalise, "eps": eps,
            "scale": scale, "logits_dtype": logits_dtype, "weights_dtype": weights_dtype, "tile_rows": tile_rows}  # fmt: skip
    sizes = SPEC.axes(args)
    weights, indices, logits, *index = SPEC.empty(args, sizes)
    order, inverse, offsets, tiles = index
    partial, arrived, counts = SPEC.empty_scratch(args, sizes)
    tokens, experts, hidden = sizes["tokens"], sizes["experts"], sizes["hidden"]
    if not tokens:
        return weights, indices, logits, order, inverse, offsets.zero_(), tiles.zero_()
    x, weight = contiguous_last(x), contiguous_last(weight)
    bias, correction_bias = (None if t is None else t.contiguous() for t in (bias, correction_bias))
    target = target_of(x.device)
    c = configure(tokens, experts, x.element_size(), target)
    ring = {"BK": c.block_k, "STAGES": c.num_stages}
    how = {
        "SCORING": scoring, "GROUPED": groups > 1, "SIZE": experts // groups, "TOP2": group_score == "top2",
        "RENORMALISE": renormalise, "BT": c.block_tokens, "EP": index_block(experts), "ACC": accumulator(x),
    }  # fmt: skip
    token_tiles, warps = cdiv(tokens, c.block_tokens), warps_for(c.block_tokens, experts)
    given = (bias, correction_bias, weights, indices, logits)
    rule = (groups, topk_groups, eps, None if scale == 1.0 else scale)
    with on_device(x):
        if c.fused:
            _launch(
                _route_kernel, (token_tiles,),
                (x, weight, *given, counts, tokens, experts, top_k, hidden, x.stride(0), weight.stride(0), *rule),
                {**ring, **how, "num_warps": max(4, warps // 2), "num_stages": c.num_stages},
            )  # fmt: skip
        else:
            span = cdiv(cdiv(hidden, c.splits), c.block_k) * c.block_k
            _launch(
                _logits_kernel, (cdiv(tokens, c.gemm_tokens), cdiv(experts, c.gemm_experts), c.splits),
                (x, weight, partial, arrived if c.last else None, tokens, experts, hidden, span, x.stride(0), weight.stride(0)),
                {"BT": c.gemm_tokens, "BE": c.gemm_experts, **ring, "ACC": accumulator(x),
                 "num_warps": 8 if c.gemm_tokens * c.gemm_experts > 8192 else 4, "num_stages": c.num_stages},
            )  # fmt: skip
            own = (None, arrived, *index) if c.last else (counts, *[None] * 5)
            most = 1 if tokens == 1 else c.gemm_tokens
            reads = index_reads(top_k, index_once(most, experts), experts)
            whole = {"TILE": height(tokens, top_k, experts, tile_rows), "BLOCK": reads["BT"], "ONE": reads["BT"] == most,
                     "AT_ONCE": reads["AT_ONCE"]}  # fmt: skip
            _launch(
                _choice_kernel, (token_tiles,), (partial, *given, *own, tokens, experts, top_k, tiles.shape[0], *rule),
                {"SPLITS": c.splits, **how, **(whole if c.last else dict.fromkeys(whole, 0)),
                 "num_warps": c.block_tokens if c.last else warps},
            )  # fmt: skip
        if not c.last:
            launch_index(indices, counts, tuple(index), experts, tile_rows, c.block_tokens, True, target)
    return weights, indices, logits, order, inverse, offsets, tiles


OP = Op(SPEC, launch, reference, moe_route_backward.OP)

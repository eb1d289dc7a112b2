"""The router of a mixture of experts: logits, scores, the choice of top_k experts, their weights, and the token-to-expert index.

    logits  = x @ weight.T + bias                              rounded to logits_dtype
    scores  = softmax(logits) | sigmoid(logits) | logits       by `scoring`: "softmax", "sigmoid", "softmax_chosen"
    choice  = scores + correction_bias                         decides who is chosen, not with what weight
              groups > 1: experts of the topk_groups groups of highest group score only, which is the highest choice in the
              group ("max") or the sum of the two highest ("top2")
    indices = the top_k of highest choice, best first          ties to the lower index, NaN above all
    weights = scores[indices], with "softmax_chosen" the softmax over the chosen logits;
              renormalise: divided by their sum + eps; times scale; rounded to weights_dtype

    x           tokens hidden            weight  experts hidden     of x's dtype, or of the sums' beside logits of that
    bias, correction_bias  experts       of any dtype
    weights     tokens top_k             indices tokens top_k, int32            logits  tokens experts
    order, inverse, offsets, tiles       see _moe_index.py

Scores are fp32 from the logits as they were rounded. Where the scores of all chosen experts underflow, weights are 0, not 0/0.
A token with NaN gets weights of NaN and some experts, distinct as every token's are, so that the index stays right.

HBM, in elements: reads x, weight, bias and correction_bias once; writes weights, indices, logits and the index. Few tokens: the
logits in parts of hidden, fp32 [splits, tokens, experts], then choice and index in one program. More: a launch each. Many: the
choice in the epilogue of the GEMM, then the index. The backward is in moe_route_backward.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _moe_index
from ._gemm import accumulator, load_tile
from ._lang import cdiv, next_power_of_2, tl, triton
from ._launch import contiguous_last, on_device
from ._launch import launch as _launch
from ._math import sigmoid
from ._moe_index import index_axes, index_block, index_reference, launch_index, warps_for
from ._spec import Args, Op, ShapeError, Sizes, Spec, Stage, Write, accumulate_dtype
from ._target import Target, target_of

SCORINGS = ("softmax", "sigmoid", "softmax_chosen")
GROUP_SCORES = ("max", "top2")


@dataclass(frozen=True)
class Config:
    block_tokens: int  # of a program that chooses
    single: bool  # it is the only one, and makes the index too
    gemm_tokens: int
    gemm_experts: int
    splits: int  # of hidden; 1: the program that multiplies also chooses
    block_k: int
    num_stages: int


def configure(tokens: int, experts: int, itemsize: int, target: Target) -> Config:
    """Parts of hidden keep a router of few tokens, whose weight is read by few programs otherwise, from being bound by one SM.

    Tile heights are those of a prototype on an H200 (2026-11; E 128, hidden 2048 and E 8, hidden 4096); the number of parts is
    not measured yet.
    """
    ep = index_block(experts)
    tile = max(16, next_power_of_2(tokens))
    most = max(16, 8192 // ep)
    if target.batch_invariant or tokens > 1024:  # the order of the sums over hidden must not depend on the tokens
        block = min(most, 64 if target.batch_invariant or tokens > 4096 else 32)
        return Config(block, False, block, ep, 1, *_ring(block + ep, itemsize, target))
    if tile <= min(64, 2 * most):
        narrow = min(ep, 16)
        return Config(tile, True, tile, narrow, 8 if tokens <= 16 else 4, *_ring(tile + narrow, itemsize, target))
    wide = min(ep, 64)
    return Config(min(most, 16), False, 64, wide, 4, *_ring(64 + wide, itemsize, target))


def _ring(rows: int, itemsize: int, target: Target) -> tuple[int, int]:
    """block_k and stages of the deepest ring of operand tiles that fits."""
    choices = ((64, 3), (64, 2), (32, 3), (32, 2), (16, 2))
    if itemsize >= 4:
        choices = choices[2:]
    return next((c for c in choices if rows * c[0] * c[1] * itemsize <= target.smem_bytes * 3 // 4), (16, 1))


def _axes(sizes: Sizes, args: Args) -> dict[str, int]:
    x, tokens, experts, top_k = args["x"], sizes["tokens"], sizes["experts"], args["top_k"]
    _check(args, experts)
    c = configure(tokens, experts, x.element_size(), target_of(x.device))
    more = {} if c.single else {"token_tiles": cdiv(tokens, c.block_tokens)}
    if c.splits > 1:
        more["splits"] = c.splits
    return {**index_axes("moe_route", tokens, top_k, experts, args["tile_rows"]), **more, "top_k": top_k}


def _check(args: Args, experts: int) -> None:
    x, weight, groups = args["x"], args["weight"], args["groups"]
    wide = accumulate_dtype(x.dtype)
    if args["scoring"] not in SCORINGS:
        raise ValueError(f"moe_route: scoring={args['scoring']!r}, expected one of {', '.join(SCORINGS)}")
    if not 1 <= args["top_k"] <= experts:
        raise ValueError(f"moe_route: top_k={args['top_k']}, expected 1 to experts={experts}")
    for name in ("logits_dtype", "weights_dtype"):
        if args[name] not in (x.dtype, wide):
            raise ValueError(f"moe_route: {name}={args[name]}, expected x's {x.dtype} or {wide}")
    if weight.dtype != x.dtype and (weight.dtype, args["logits_dtype"]) != (wide, wide):
        raise ValueError(f"moe_route: weight has dtype {weight.dtype}, but x has {x.dtype}; "
                         f"logits_dtype={args['logits_dtype']}, expected {wide} beside weights of {wide}")  # fmt: skip
    if groups < 1 or experts % groups:
        raise ValueError(f"moe_route: groups={groups}, expected a divisor of experts={experts}")
    if not 1 <= args["topk_groups"] <= groups:
        raise ValueError(f"moe_route: topk_groups={args['topk_groups']}, expected 1 to groups={groups}")
    size = experts // groups
    if size * args["topk_groups"] < args["top_k"]:
        raise ValueError(f"moe_route: top_k={args['top_k']}, but topk_groups={args['topk_groups']} groups of {size} experts")
    if args["group_score"] not in GROUP_SCORES:
        raise ValueError(f"moe_route: group_score={args['group_score']!r}, expected one of {', '.join(GROUP_SCORES)}")
    if groups > 1 and args["group_score"] == "top2" and size < 2:
        raise ValueError(f"moe_route: groups={groups} of experts={experts}, expected two in a group with group_score='top2'")
    if not 0.0 <= args["eps"] < math.inf:
        raise ValueError(f"moe_route: eps={args['eps']}, expected a finite number of at least 0")
    if not abs(args["scale"]) < math.inf:
        raise ValueError(f"moe_route: scale={args['scale']}, expected a finite number")
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
    any_dtype=frozenset({"weight", "bias", "correction_bias"}),
    writes={
        "weights": Write("tokens top_k", "weights_dtype"),
        "indices": Write("tokens top_k", "int32"),
        "logits": Write("tokens experts", "logits_dtype"),
        "order": Write("rows", "int32"),
        "inverse": Write("tokens top_k", "int32"),
        "offsets": Write("experts+1", "int32"),
        "tiles": Write("max_tiles 4", "int32"),
    },
    scratch={"partial": Write("splits tokens experts", "accumulate:x"), "counts": Write("token_tiles experts", "int32")},
    derive=_axes,
    stages=(
        Stage("moe_logits", ("x", "weight"), ("partial",), _gemm_flops),
        Stage("moe_choice", ("partial", "bias", "correction_bias"), ("weights", "indices", "logits", *_INDEX), _choice_flops,
              beside="partial", unless="counts"),
        Stage("moe_choice", ("partial", "bias", "correction_bias"), ("weights", "indices", "logits", "counts"), _choice_flops,
              beside="partial counts"),
        Stage("moe_route", ("x", "weight", "bias", "correction_bias"), ("weights", "indices", "logits", "counts"),
              lambda s, a: _gemm_flops(s, a) + _choice_flops(s, a), beside="counts", unless="partial"),
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
def _mirrored(bits):
    """Bits of a float <-> an integer of the same order; its own inverse."""
    if bits.dtype == tl.int64:
        return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _ordered(x):
    """x as an integer that orders as torch.topk does: NaN above all, -0 equal to 0. The lowest two integers are nobody's."""
    x = tl.where(x == 0.0, 0.0, x)
    if x.dtype == tl.float64:
        return tl.where(x != x, 0x7FFFFFFFFFFFFFFF, _mirrored(x.to(tl.int64, bitcast=True)))
    else:
        return tl.where(x != x, 0x7FFFFFFF, _mirrored(x.to(tl.int32, bitcast=True)))


@triton.jit
def _value(key):
    """The float of an integer of _ordered."""
    if key.dtype == tl.int64:
        return _mirrored(key).to(tl.float64, bitcast=True)
    else:
        return _mirrored(key).to(tl.float32, bitcast=True)


@triton.jit
def _best(key, index):
    """(highest key, lowest index that has it) of each row; index [columns]."""
    best = tl.max(key, 1)
    return best, tl.min(tl.where(key == best[:, None], index[None, :], 1 << 30), 1)


@triton.jit
def _limit_groups(key, GROUPS: tl.constexpr, TOPK: tl.constexpr, SIZE: tl.constexpr, TOP2: tl.constexpr, EP: tl.constexpr,
                  LOWEST: tl.constexpr):  # fmt: skip
    """key [tokens, EP], next to lowest outside the TOPK groups of SIZE experts that score highest."""
    expert = tl.arange(0, EP)
    group = expert // SIZE
    score = key * 0 + LOWEST
    for g in range(GROUPS):
        own = tl.where((group == g)[None, :], key, LOWEST)
        highest, at = _best(own, expert)
        if TOP2:
            second = tl.max(tl.where(expert[None, :] == at[:, None], LOWEST, own), 1)
            highest = _ordered(_value(highest) + _value(second))
        score = tl.where((group == g)[None, :], highest[:, None], score)
    allowed = key != key
    for _ in range(TOPK):
        _, g = _best(score, group)
        hit = group[None, :] == g[:, None]
        allowed = allowed | hit
        score = tl.where(hit, LOWEST, score)
    return tl.where(allowed | (key == LOWEST), key, LOWEST + 1)


@triton.jit
def scores_of(logits, real, SCORING: tl.constexpr):
    """Scores [tokens, EP] of logits; 0 where not `real` (padding, or who was not chosen)."""
    if SCORING == "sigmoid":
        return tl.where(real, sigmoid(logits), 0.0)
    else:
        logits = tl.where(real, logits, float("-inf"))
        e = tl.exp(logits - tl.max(logits, 1)[:, None])
        return e / tl.sum(e, 1)[:, None]


@triton.jit
def _choose(
    logits, token, live, bias, correction, weights, indices, logits_out, E, eps, scale,
    SCORING: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr,
    SIZE: tl.constexpr, TOP2: tl.constexpr, RENORMALISE: tl.constexpr, BT: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """Finish the logits [BT, EP] of one token tile. Returns (experts [BT, KP], which [BT, EP] are among them)."""
    ACC: tl.constexpr = logits.dtype
    LOWEST: tl.constexpr = -0x8000000000000000 if ACC == tl.float64 else -0x80000000
    expert = tl.arange(0, EP)
    slot = tl.arange(0, KP)
    real = (expert < E)[None, :]
    if bias is not None:
        logits += tl.load(bias + expert, expert < E, other=0.0).to(ACC)[None, :]
    logits = logits.to(logits_out.dtype.element_ty)
    tl.store(logits_out + token[:, None].to(tl.int64) * E + expert[None, :], logits, live[:, None] & real)
    logits = logits.to(ACC)
    scores = logits if SCORING == "softmax_chosen" else scores_of(logits, real, SCORING)
    choice = scores
    if correction is not None:
        choice += tl.load(correction + expert, expert < E, other=0.0).to(ACC)[None, :]
    key = tl.where(real, _ordered(choice), LOWEST)
    if GROUPS > 1:
        key = _limit_groups(key, GROUPS, TOPK_GROUPS, SIZE, TOP2, EP, LOWEST)
    left = key
    chosen = tl.full([BT, KP], -1, tl.int32)
    weight = tl.zeros([BT, KP], ACC)
    for j in range(K):
        best, e = _best(left, expert)
        hit = expert[None, :] == e[:, None]
        left = tl.where(hit, LOWEST, left)
        w = _value(best) if correction is None else tl.sum(tl.where(hit, scores, 0.0), 1)
        chosen = tl.where((slot == j)[None, :], e[:, None], chosen)
        weight = tl.where((slot == j)[None, :], w[:, None], weight)
    inside = (slot < K)[None, :]
    if SCORING == "softmax_chosen":
        weight = scores_of(weight, inside, SCORING)
    if RENORMALISE:
        total = tl.sum(weight, 1) + eps
        weight = weight / tl.where(total == 0.0, 1.0, total)[:, None]
    if scale is not None:
        weight *= scale
    at = token[:, None].to(tl.int64) * K + slot[None, :]
    tl.store(weights + at, weight.to(weights.dtype.element_ty), live[:, None] & inside)
    tl.store(indices + at, chosen, live[:, None] & inside)
    return chosen, ((left != key) & live[:, None]).to(tl.int32)


@triton.jit
def _product(x, weight, row, col, start, end, T, E, stride_x, stride_w, BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
             STAGES: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """[BT, BE] of x @ weight.T over hidden from start to end."""
    acc = tl.zeros([BT, BE], ACC)
    for k in tl.range(start, end, BK, num_stages=STAGES):
        a = load_tile(x, row, k, T, end, stride_x, BT, BK, False)
        b = load_tile(weight, col, k, E, end, stride_w, BE, BK, False)
        if a.dtype != b.dtype:
            a = a.to(ACC)
            b = b.to(ACC)
        acc = tl.dot(a, b.T, acc, input_precision="ieee", out_dtype=ACC)
    return acc


@triton.jit(do_not_specialize=["T"])
def _logits_kernel(
    x, weight, partial, T, E, H, SPAN, stride_x, stride_w,
    BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Grid (token tiles, expert tiles, parts of SPAN columns of hidden)."""
    row = tl.program_id(0) * BT
    col = tl.program_id(1) * BE
    part = tl.program_id(2)
    start = part * SPAN
    acc = _product(x, weight, row, col, start, tl.minimum(start + SPAN, H), T, E, stride_x, stride_w, BT, BE, BK, STAGES, ACC)
    token = row + tl.arange(0, BT)
    expert = col + tl.arange(0, BE)
    at = partial + (part.to(tl.int64) * T + token)[:, None] * E + expert[None, :]
    tl.store(at, acc, (token < T)[:, None] & (expert < E)[None, :])


@triton.jit(do_not_specialize=["T", "MAX_TILES"])
def _choice_kernel(
    partial, bias, correction, weights, indices, logits, counts, order, inverse, offsets, tiles, T, E, MAX_TILES, eps, scale,
    SPLITS: tl.constexpr, TILE: tl.constexpr, SCORING: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP2: tl.constexpr, RENORMALISE: tl.constexpr, BT: tl.constexpr,
    EP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Grid (token tiles). Without counts there is one, and it makes the index."""
    program = tl.program_id(0)
    token = program * BT + tl.arange(0, BT)
    expert = tl.arange(0, EP)
    live = token < T
    acc = tl.zeros([BT, EP], ACC)
    for s in range(SPLITS):
        at = partial + (s * T + token)[:, None].to(tl.int64) * E + expert[None, :]
        acc += tl.load(at, live[:, None] & (expert < E)[None, :], other=0.0)
    chosen, selected = _choose(acc, token, live, bias, correction, weights, indices, logits, E, eps, scale, SCORING, K, KP,
                               GROUPS, TOPK_GROUPS, SIZE, TOP2, RENORMALISE, BT, EP)  # fmt: skip
    total = tl.sum(selected, 0)
    if counts is not None:
        tl.store(counts + program * E + expert, total, expert < E)
    else:
        _moe_index.place(chosen, selected, tl.zeros([EP], tl.int32), total, token, live, order, inverse, E, K, KP, EP)
        _moe_index.tabulate(total, offsets, tiles, 0, 1, E, MAX_TILES, TILE, EP)


@triton.jit(do_not_specialize=["T"])
def _route_kernel(
    x, weight, bias, correction, weights, indices, logits, counts, T, E, H, stride_x, stride_w, eps, scale,
    BK: tl.constexpr, STAGES: tl.constexpr, SCORING: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP2: tl.constexpr, RENORMALISE: tl.constexpr, BT: tl.constexpr,
    EP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Grid (token tiles): the whole logits of a tile, and the choice."""
    program = tl.program_id(0)
    token = program * BT + tl.arange(0, BT)
    expert = tl.arange(0, EP)
    acc = _product(x, weight, program * BT, 0, 0, H, T, E, stride_x, stride_w, BT, EP, BK, STAGES, ACC)
    _, selected = _choose(acc, token, token < T, bias, correction, weights, indices, logits, E, eps, scale, SCORING, K, KP,
                          GROUPS, TOPK_GROUPS, SIZE, TOP2, RENORMALISE, BT, EP)  # fmt: skip
    tl.store(counts + program.to(tl.int64) * E + expert, tl.sum(selected, 0), expert < E)


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
    partial, counts = SPEC.empty_scratch(args, sizes)
    tokens, experts, hidden = sizes["tokens"], sizes["experts"], sizes["hidden"]
    if not tokens:
        return weights, indices, logits, order, inverse, offsets.zero_(), tiles
    x, weight = contiguous_last(x), contiguous_last(weight)
    bias, correction_bias = (None if t is None else t.contiguous() for t in (bias, correction_bias))
    target = target_of(x.device)
    c = configure(tokens, experts, x.element_size(), target)
    factor = None if scale == 1.0 else scale
    ring = {"BK": c.block_k, "STAGES": c.num_stages}
    how = {
        "SCORING": scoring, "K": top_k, "KP": next_power_of_2(top_k), "GROUPS": groups, "TOPK_GROUPS": topk_groups,
        "SIZE": experts // groups, "TOP2": group_score == "top2", "RENORMALISE": renormalise, "BT": c.block_tokens,
        "EP": index_block(experts), "ACC": accumulator(x), "num_warps": warps_for(c.block_tokens, experts),
    }  # fmt: skip
    token_tiles = cdiv(tokens, c.block_tokens)
    with on_device(x):
        if c.splits > 1:
            span = cdiv(cdiv(hidden, c.splits), c.block_k) * c.block_k
            _launch(
                _logits_kernel, (cdiv(tokens, c.gemm_tokens), cdiv(experts, c.gemm_experts), c.splits),
                (x, weight, partial, tokens, experts, hidden, span, x.stride(0), weight.stride(0)),
                {"BT": c.gemm_tokens, "BE": c.gemm_experts, **ring, "ACC": accumulator(x), "num_warps": 4,
                 "num_stages": c.num_stages},
            )  # fmt: skip
            many: list[Any] = [None, *index] if c.single else [counts, None, None, None, None]
            _launch(
                _choice_kernel, (token_tiles,),
                (partial, bias, correction_bias, weights, indices, logits, *many, tokens, experts, tiles.shape[0], eps, factor),
                {"SPLITS": c.splits, "TILE": tile_rows, **how},
            )  # fmt: skip
        else:
            _launch(
                _route_kernel, (token_tiles,),
                (x, weight, bias, correction_bias, weights, indices, logits, counts, tokens, experts, hidden, x.stride(0),
                 weight.stride(0), eps, factor),
                {**ring, **how, "num_stages": c.num_stages},
            )  # fmt: skip
        if not c.single:
            launch_index(indices, counts, tuple(index), experts, tile_rows, c.block_tokens, target)
    return weights, indices, logits, order, inverse, offsets, tiles

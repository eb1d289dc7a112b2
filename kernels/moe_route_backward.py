"""Backward of moe_route: from the gradients of weights and logits to those of x, weight and bias.

With S the scores (0 outside the chosen with "softmax_chosen"), g the gradient of weights at the chosen experts:

    D        = sum(S, chosen) + eps      with renormalise, else 1
    dS       = scale * (g - sum(g * S, chosen) / D) / D  with renormalise, else scale * g          at the chosen, else 0
    d_logits = S * (dS - sum(S * dS, experts))    softmax,    or    S * (1 - S) * dS    sigmoid,    plus grad_logits
    grad_x = d_logits @ weight,   grad_weight = d_logits.T @ x,   grad_bias = sum(d_logits, tokens)

Nothing is saved but logits and indices: the scores are computed again. d_logits has the dtype of the logits; where that is fp32
beside operands of 16 bits, it is multiplied as the sum of two bf16 numbers, 16 bits of mantissa. Where D is 0, so are its
gradients. grad_x is a product of the launch that makes d_logits, but for fp32 operands, which do not fit its registers.

HBM, in elements: reads logits, indices, their gradients, x, weight and, for the weight, d_logits once; writes the gradients,
and d_logits. grad_weight and grad_bias are sums over parts of the tokens in a fixed order: equal bits from run to run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._gemm import accumulator, grad_input, load_tile, store_tile, sum_rows
from ._lang import cdiv, tl, triton
from ._launch import contiguous_last, on_device
from ._launch import launch as _launch
from ._moe_choice import scores_of
from ._moe_index import index_block
from ._spec import Args, Op, Sizes, Spec, Stage, Write, accumulate_dtype, flag
from ._target import Target, target_of

_WEIGHTS = flag("need_weight", "need_bias")


def _input_config(experts: int, itemsize: int, target: Target) -> tuple[int, int, int]:
    """(tokens, columns of hidden, warps) of a tile of grad_x. Not measured: a program holds several [tokens, experts]."""
    ep = index_block(experts)
    tokens = max(16, min(64, 4096 // ep))
    cols = next((n for n in (64, 32) if ep * n * itemsize * 2 <= target.smem_bytes // 2), 16)
    return tokens, cols, max(4, min(16, tokens * ep // 512))


def _weight_config(sizes: Sizes, wide: bool, target: Target) -> tuple[int, int, int, int]:
    """(experts, columns of hidden, tokens of a step, parts of the tokens) of grad_weight: about a program an SM. Not measured."""
    block = 64 if wide else 128
    rows = min(index_block(sizes["experts"]), 64 if wide else 128)
    programs = cdiv(sizes["experts"], rows) * cdiv(sizes["hidden"], block)
    parts = max(1, min(target.sms // programs, cdiv(sizes["tokens"], 256)))
    return rows, block, 32, parts


def _wide(args: Args) -> bool:
    return max(args["x"].element_size(), args["logits"].element_size()) >= 4


def _inline(args: Args) -> bool:
    """Whether grad_x is made where d_logits is."""
    return args["x"].element_size() < 4


def _axes(sizes: Sizes, args: Args) -> dict[str, int]:
    if not isinstance(sizes["tokens"], int):
        return {}  # a trace for any length: no result has the axes of scratch
    parts = _weight_config(sizes, _wide(args), target_of(args["x"].device))[3]
    columns = args["need_weight"] * sizes["hidden"] + args["need_bias"]
    return {"columns": columns, "inline": int(_inline(args)), **({"parts": parts} if parts > 1 and columns else {})}


def _own_flops(s: Sizes, a: Args) -> int:
    return 12 * s["tokens"] * s["experts"]


def _gemm_flops(s: Sizes, a: Args) -> int:
    return 2 * s["tokens"] * s["experts"] * s["hidden"]


SPEC = Spec(
    name="moe_route_backward",
    reads={"x": "tokens hidden", "weight": "experts hidden", "logits": "tokens experts", "indices": "tokens top_k",
           "grad_weights": "tokens top_k", "grad_logits": "tokens experts"},
    optional=frozenset({"grad_weights", "grad_logits"}),
    any_dtype=frozenset({"logits", "indices", "grad_weights", "grad_logits"}),
    read_bytes={
        "weight": lambda s, a: None if a["need_x"] else 0,
        "x": lambda s, a: None if a["need_weight"] else 0,
        "logits": lambda s, a: None if a["grad_weights"] is not None else 0,
        "indices": lambda s, a: None if a["grad_weights"] is not None else 0,
    },
    writes={
        "grad_x": Write("tokens hidden", "x", flag("need_x")),
        "grad_weight": Write("experts hidden", "weight", flag("need_weight")),
        "grad_bias": Write("experts", "weight", flag("need_bias")),
    },
    scratch={
        "d_logits": Write("tokens experts", "logits", lambda args: _WEIGHTS(args) or args["need_x"] and not _inline(args)),
        "partial": Write("parts experts columns", "accumulate:x", _WEIGHTS),
    },
    derive=_axes,
    stages=(
        Stage("moe_route_grad_input", ("logits", "indices", "grad_weights", "grad_logits", "weight"), ("grad_x", "d_logits"),
              lambda s, a: _own_flops(s, a) + (_gemm_flops(s, a) if a["need_x"] else 0), when=lambda s: s["inline"] == 1),
        Stage("moe_route_grad_logits", ("logits", "indices", "grad_weights", "grad_logits"), ("d_logits",), _own_flops,
              when=lambda s: s["inline"] == 0),
        Stage("grad_input", ("d_logits", "weight"), ("grad_x",), _gemm_flops, when=lambda s: s["inline"] == 0),
        Stage("moe_route_grad_weight", ("d_logits", "x"), ("partial",), _gemm_flops, when=lambda s: "parts" in s),
        Stage("moe_route_grad_weight", ("d_logits", "x"), ("grad_weight", "grad_bias"), _gemm_flops,
              when=lambda s: "parts" not in s),
        Stage("sum_rows", ("partial",), ("grad_weight", "grad_bias"), lambda s, a: s["parts"] * s["experts"] * s["columns"]),
    ),
)  # fmt: skip


def reference(
    grad_weights: Tensor | None, grad_logits: Tensor | None, x: Tensor, weight: Tensor, logits: Tensor, indices: Tensor,
    scoring: str, renormalise: bool, eps: float, scale: float, need_x: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    acc = accumulate_dtype(x.dtype)
    chosen, wide = indices.long(), logits.to(acc)
    d = torch.zeros_like(wide) if grad_logits is None else grad_logits.to(acc)
    if grad_weights is not None:
        if scoring == "softmax_chosen":
            inside = torch.zeros_like(wide, dtype=torch.bool).scatter(-1, chosen, True)
            scores = torch.where(inside, wide, float("-inf")).softmax(-1)
        else:
            scores = wide.sigmoid() if scoring == "sigmoid" else wide.softmax(-1)
        g, own = grad_weights.to(acc), scores.gather(-1, chosen)
        if renormalise:
            total = own.sum(-1, keepdim=True) + eps
            total = torch.where(total == 0, float("inf"), total)
            g = (g - (g * own).sum(-1, keepdim=True) / total) / total
        d_scores = torch.zeros_like(wide).scatter(-1, chosen, scale * g)
        if scoring == "sigmoid":
            d = d + scores * (1 - scores) * d_scores
        else:
            d = d + scores * (d_scores - (scores * d_scores).sum(-1, keepdim=True))
    d = d.to(logits.dtype)
    dx = (d @ weight.to(d.dtype)).to(x.dtype) if need_x else x.new_empty(0)
    dw = (d.t() @ x.to(d.dtype)).to(weight.dtype) if need_weight else weight.new_empty(0)
    return dx, dw, d.to(acc).sum(0).to(weight.dtype) if need_bias else weight.new_empty(0)


@triton.jit
def _times(a, b, acc, ACC: tl.constexpr):
    """acc + a @ b; a may be fp32 where b has 16 bits."""
    if a.dtype == b.dtype:
        return tl.dot(a, b, acc, input_precision="ieee", out_dtype=ACC)
    else:
        high = a.to(tl.bfloat16)
        low = (a - high.to(tl.float32)).to(tl.bfloat16)
        whole = b.to(tl.bfloat16)
        acc = tl.dot(low, whole, acc)
        if b.dtype == tl.float16:  # exact in two bf16 numbers
            acc = tl.dot(high, (b.to(tl.float32) - whole.to(tl.float32)).to(tl.bfloat16), acc)
        return tl.dot(high, whole, acc)


@triton.jit
def _logits_gradient(
    logits, indices, grad_weights, grad_logits, token, live, E, K, eps, scale,
    SCORING: tl.constexpr, RENORMALISE: tl.constexpr, BT: tl.constexpr, EP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """[BT, EP], 0 where there is no token or expert."""
    expert = tl.arange(0, EP)
    real = live[:, None] & (expert < E)[None, :]
    at = token[:, None].to(tl.int64) * E + expert[None, :]
    d = tl.zeros([BT, EP], ACC)
    if grad_weights is not None:
        own = tl.zeros([BT, EP], tl.int32)
        g = tl.zeros([BT, EP], ACC)
        for j in range(K):
            slot = token.to(tl.int64) * K + j
            e = tl.load(indices + slot, live, other=-1)
            hit = expert[None, :] == e[:, None]
            own += hit.to(tl.int32)
            g = tl.where(hit, tl.load(grad_weights + slot, live, other=0.0).to(ACC)[:, None], g)
        chosen = own > 0
        scores = tl.load(logits + at, real, other=0.0).to(ACC)
        scores = scores_of(scores, chosen if SCORING == "softmax_chosen" else (expert < E)[None, :], SCORING)
        if RENORMALISE:
            mine = tl.where(chosen, scores, 0.0)
            total = tl.sum(mine, 1) + eps
            total = tl.where(total == 0.0, float("inf"), total)[:, None]
            g = tl.where(chosen, (g - tl.sum(g * mine, 1)[:, None] / total) / total, 0.0)
        if scale is not None:
            g *= scale
        if SCORING == "sigmoid":
            d = tl.where(chosen, scores * (1.0 - scores) * g, 0.0)
        else:
            d = scores * (g - tl.sum(scores * g, 1)[:, None])
        d = tl.where(real, d, 0.0)  # without a token there are no chosen, whose softmax is 0/0
    if grad_logits is not None:
        d += tl.load(grad_logits + at, real, other=0.0).to(ACC)
    return d


@triton.jit(do_not_specialize=["T"])
def _input_kernel(
    logits, indices, grad_weights, grad_logits, weight, d_logits, grad_x, T, E, K, H, SPAN, stride_w, eps, scale,
    SCORING: tl.constexpr, RENORMALISE: tl.constexpr, NEED_X: tl.constexpr, NEED_D: tl.constexpr, BT: tl.constexpr,
    BH: tl.constexpr, EP: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Grid (token tiles, parts of SPAN columns of hidden); the first part writes d_logits."""
    row = tl.program_id(0) * BT
    token = row + tl.arange(0, BT)
    d = _logits_gradient(logits, indices, grad_weights, grad_logits, token, token < T, E, K, eps, scale, SCORING, RENORMALISE,
                         BT, EP, ACC).to(logits.dtype.element_ty)  # fmt: skip
    if NEED_D:
        if tl.program_id(1) == 0:
            store_tile(d_logits, row, 0, d, T, E, E, BT, EP, False)
    if NEED_X:
        start = tl.program_id(1) * SPAN
        for h in tl.range(start, tl.minimum(start + SPAN, H), BH, num_stages=STAGES):
            w = load_tile(weight, 0, h, E, H, stride_w, EP, BH, False)
            store_tile(grad_x, row, h, _times(d, w, tl.zeros([BT, BH], ACC), ACC), T, H, H, BT, BH, False)


@triton.jit(do_not_specialize=["T", "SPAN"])
def _weight_kernel(
    d_logits, x, grad_weight, grad_bias, T, E, H, SPAN, stride_x, stride_part,
    NEED_W: tl.constexpr, NEED_B: tl.constexpr, BE: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Grid (expert tiles, tiles of hidden, parts of SPAN tokens), each part to results of its own."""
    row = tl.program_id(0) * BE
    col = tl.program_id(1) * BH
    part = tl.program_id(2)
    start = part * SPAN
    end = tl.minimum(start + SPAN, T)
    acc = tl.zeros([BE, BH], ACC)
    bias = tl.zeros([BE], ACC)
    for t in tl.range(start, end, BK, num_stages=STAGES):
        d = load_tile(d_logits, t, row, end, E, E, BK, BE, False)
        if NEED_W:
            acc = _times(d.T, load_tile(x, t, col, end, H, stride_x, BK, BH, False), acc, ACC)
        if NEED_B:
            bias += tl.sum(d.to(ACC), 0)
    offset = part.to(tl.int64) * stride_part
    if NEED_W:
        store_tile(grad_weight + offset, row, col, acc, E, H, H, BE, BH, False)
    if NEED_B:
        if tl.program_id(1) == 0:
            expert = row + tl.arange(0, BE)
            tl.store(grad_bias + offset + expert, bias.to(grad_bias.dtype.element_ty), expert < E)


def launch(
    grad_weights: Tensor | None, grad_logits: Tensor | None, x: Tensor, weight: Tensor, logits: Tensor, indices: Tensor,
    scoring: str, renormalise: bool, eps: float, scale: float, need_x: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    args = {"grad_weights": grad_weights, "grad_logits": grad_logits, "x": x, "weight": weight, "logits": logits,
            "indices": indices, "scoring": scoring, "need_x": need_x, "need_weight": need_weight,
            "need_bias": need_bias}  # fmt: skip
    sizes = SPEC.axes(args)
    grad_x, grad_weight, grad_bias = SPEC.empty(args, sizes)
    d_logits, partial = SPEC.empty_scratch(args, sizes)
    tokens, experts, hidden = sizes["tokens"], sizes["experts"], sizes["hidden"]
    if not tokens:
        return grad_x, grad_weight.zero_(), grad_bias.zero_()
    x, weight, logits, indices = contiguous_last(x), contiguous_last(weight), logits.contiguous(), indices.contiguous()
    grad_weights, grad_logits = (None if g is None else g.contiguous() for g in (grad_weights, grad_logits))
    target, acc = target_of(x.device), accumulator(x)
    block, cols, warps = _input_config(experts, weight.element_size(), target)
    token_tiles = cdiv(tokens, block)
    # Few token tiles share the columns out among the SMs; each recomputes the small d_logits.
    inline = need_x and _inline(args)
    parts = max(1, min(target.sms // token_tiles, cdiv(hidden, cols))) if inline else 1
    span = cdiv(cdiv(hidden, parts), cols) * cols
    with on_device(x):
        if need_x or need_weight or need_bias:
            _launch(
                _input_kernel, (token_tiles, cdiv(hidden, span)),
                (logits, indices, grad_weights, grad_logits, weight, d_logits, grad_x, tokens, experts, sizes["top_k"], hidden,
                 span, weight.stride(0), eps, None if scale == 1.0 else scale),
                {"SCORING": scoring, "RENORMALISE": renormalise, "NEED_X": inline, "NEED_D": d_logits.numel() > 0, "BT": block,
                 "BH": cols, "EP": index_block(experts), "STAGES": 2, "ACC": acc, "num_warps": warps, "num_stages": 2},
            )  # fmt: skip
        if need_x and not inline:
            grad_input([d_logits], [weight], grad_x)
        if need_weight or need_bias:
            rows, cols, step, parts = _weight_config(sizes, _wide(args), target)
            whole = need_weight * experts * hidden
            flat = partial.view(parts, -1) if parts > 1 else partial
            to = (flat, flat[:, whole:]) if parts > 1 else (grad_weight, grad_bias)
            span = cdiv(cdiv(tokens, parts), step) * step
            _launch(
                _weight_kernel, (cdiv(experts, rows), cdiv(hidden, cols) if need_weight else 1, parts),
                (d_logits, x, *to, tokens, experts, hidden, span, x.stride(0), whole + need_bias * experts),
                {"NEED_W": need_weight, "NEED_B": need_bias, "BE": rows, "BH": cols, "BK": step, "STAGES": 3, "ACC": acc,
                 "num_warps": 4 if rows * cols <= 8192 else 8, "num_stages": 3},
            )  # fmt: skip
            if parts > 1:
                sum_rows(flat, *(t.view(-1) for t, needed in ((grad_weight, need_weight), (grad_bias, need_bias)) if needed))
    return grad_x, grad_weight, grad_bias


OP = Op(SPEC, launch, reference)

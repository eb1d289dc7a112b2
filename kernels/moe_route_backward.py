"""Backward of moe_route: from the gradients of weights and logits to those of x, weight and bias.

With S the scores (0 outside the chosen with "softmax_chosen"), g the gradient of weights at the chosen experts:

    D        = sum(S, chosen) + eps      with renormalise, else 1
    dS       = scale * (g - sum(g * S, chosen) / D) / D  with renormalise, else scale * g          at the chosen, else 0
    d_logits = S * (dS - sum(S * dS, experts))    softmax,    or    S * (1 - S) * dS    sigmoid,    plus grad_logits
    grad_x = d_logits @ weight,   grad_weight = d_logits.T @ x,   grad_bias = sum(d_logits, tokens)

Nothing is saved but logits and indices: the scores are computed again. d_logits has the dtype of the logits; where that is fp32
beside operands of 16 bits, it is multiplied as the sum of two bf16 numbers, 16 bits of mantissa. Where D is 0, so are its
gradients. grad_x is a product of the launch that makes d_logits, but for fp32 operands and many experts, which do not fit its
registers.

HBM, in elements: reads logits, indices, their gradients, x, weight and, for the weight, d_logits once; writes the gradients,
and d_logits. grad_weight and grad_bias are sums over parts of the tokens in a fixed order: equal bits from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._gemm import accumulator, grad_input, load_tile, store_tile, sum_rows
from ._lang import cdiv, tl, triton
from ._launch import contiguous_last, descriptor, on_device, tma_ready
from ._launch import launch as _launch
from ._moe_choice import scores_of
from ._moe_index import index_block
from ._spec import Args, Op, Sizes, Spec, Stage, Write, accumulate_dtype, flag
from ._target import Target, target_of

_WEIGHTS = flag("need_weight", "need_bias")


@dataclass(frozen=True)
class _Input:
    """How grad_x is made: tokens and columns of a tile, its warps, the ring of the weight's tiles, how many programs an SM shall
    hold, and for that the most registers a thread, if it would take more."""

    tokens: int
    cols: int
    warps: int
    stages: int = 2
    per_sm: int = 1
    registers: int | None = None
    tma: bool = False


def _input_config(experts: int, itemsize: int, products: int, tma: bool, target: Target) -> _Input:
    """products: of 16-bit operands, see _times; tma: whether weight and grad_x suit it. A program makes d_logits once and then
    walks along hidden. On sm_90 tiles of 64 tokens are wgmma's, the ring and the store go by TMA, and a second program on the SM
    runs while one waits; but rows of d_logits that no 16 bytes divide take too many registers. H200, 2026-12-01, E 128,
    hidden 2048: 47 us for 16384 tokens, 18 for 4096. Other sizes are not measured."""
    ep = index_block(experts)
    if target.capability == 90 and itemsize == 2 and tma and (ep <= 64 or experts % 16 == 0):
        if ep <= 128:
            # Without the bound d_logits of 128 experts takes 140 registers and more; as three products it would spill.
            cols, stages = (128, 2) if products == 1 else (64, 3)
            return _Input(64, cols, 8, stages, 2, 128 if ep == 128 and products < 3 else None, True)
        if ep == 256:
            return _Input(64, 64, 16, 3, tma=True)
    tokens = max(16, min(64, 4096 // ep))
    cols = next((n for n in (64, 32) if ep * n * itemsize * 2 <= target.smem_bytes // 2), 16)
    return _Input(tokens, cols, max(4, min(16, tokens * ep // 512)))


def _weight_config(sizes: Sizes, args: Args, target: Target) -> tuple[int, int, int, int, int]:
    """(experts, columns of hidden, tokens of a step, steps of the ring, parts of the tokens) of grad_weight: about a program an
    SM, which must have some 40 KB of x on its way to read at the memory's pace. H200, 2026-12-01, E 128, hidden 2048:
    29 us for 16384 tokens, 11 for 4096. Other sizes are not measured."""
    wide = _wide(args)
    block = 64 if wide else 128
    rows = min(index_block(sizes["experts"]), 64 if wide else 128)
    programs = cdiv(sizes["experts"], rows) * cdiv(sizes["hidden"], block)
    parts = max(1, min(target.sms // programs, cdiv(sizes["tokens"], 256)))
    deep = args["x"].element_size() == 2 and target.smem_bytes >= 160 * 1024
    step, stages = (64, 4) if deep and rows >= 64 else (32, 6 if deep else 3)
    return rows, block, step, stages, parts


def _wide(args: Args) -> bool:
    return max(args["x"].element_size(), args["logits"].element_size()) >= 4


def _inline(args: Args) -> bool:
    """Whether grad_x is made where d_logits is. Of many experts a program has few tokens, and all would read the weight again."""
    x, logits = args["x"], args["logits"]
    return x.element_size() < 4 and (logits.shape[1] <= 256 or logits.dtype is not x.dtype)


def _axes(sizes: Sizes, args: Args) -> dict[str, int]:
    if not isinstance(sizes["tokens"], int):
        return {}  # a trace for any length: no result has the axes of scratch
    parts = _weight_config(sizes, args, target_of(args["x"].device))[-1]
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
    logits, indices, grad_weights, grad_logits, live, at, real, E, K, eps, scale,
    SCORING: tl.constexpr, RENORMALISE: tl.constexpr, BT: tl.constexpr, EP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """[BT, EP], of use where there are a token and an expert; 0 in a token's other columns. The tensors begin at the tile's first
    token; live, real: what exists of the tokens and of the tile."""
    expert = tl.arange(0, EP)
    d = tl.zeros([BT, EP], ACC)
    if grad_weights is not None:
        scores = tl.load(logits + at, real, other=0.0).to(ACC)
        # One number of an expert goes round the loop: the bits of its gradient, or those of a NaN that no arithmetic makes. Made
        # from the logits, they lie among the threads as those do, of a few rows each: else each would load for all rows.
        BITS: tl.constexpr = tl.int64 if ACC == tl.float64 else tl.int32
        found = (scores > float("inf")).to(BITS) - 2
        for j in range(K):
            slot = tl.arange(0, BT) * K + j
            e = tl.load(indices + slot, live, other=-1)
            own = tl.load(grad_weights + slot, live, other=0.0).to(ACC).to(BITS, bitcast=True)
            found = tl.where(expert[None, :] == e[:, None], own[:, None], found)
        chosen = found != -2
        g = tl.where(chosen, found.to(ACC, bitcast=True), 0.0)
        scores = scores_of(scores, chosen if SCORING == "softmax_chosen" else (expert < E)[None, :], SCORING)
        if RENORMALISE:
            total = tl.sum(tl.where(chosen, scores, 0.0), 1) + eps
            total = tl.where(total == 0.0, float("inf"), total)
            mean = tl.sum(tl.where(chosen, scores * g, 0.0), 1) / total
            g = tl.where(chosen, (g - mean[:, None]) / total[:, None], 0.0)
        if scale is not None:
            g *= scale
        if SCORING == "sigmoid":
            d = tl.where(chosen, scores * (1.0 - scores) * g, 0.0)
        else:
            d = scores * (g - tl.sum(scores * g, 1)[:, None])
    if grad_logits is not None:
        d += tl.load(grad_logits + at, real, other=0.0).to(ACC)
    return d


@triton.jit(do_not_specialize=["T"])
def _input_kernel(
    logits, indices, grad_weights, grad_logits, weight, d_logits, grad_x, T, E, K, H, SPAN, stride_w, eps, scale,
    SCORING: tl.constexpr, RENORMALISE: tl.constexpr, NEED_X: tl.constexpr, NEED_D: tl.constexpr, BT: tl.constexpr,
    BH: tl.constexpr, EP: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Grid (token tiles, parts of SPAN columns of hidden); the first part writes d_logits."""
    row = tl.program_id(0) * BT
    first = row.to(tl.int64)
    live = row + tl.arange(0, BT) < T
    at = tl.arange(0, BT)[:, None] * E + tl.arange(0, EP)[None, :]
    real = live[:, None] & (tl.arange(0, EP) < E)[None, :]
    if grad_weights is not None:
        grad_weights += first * K
    if grad_logits is not None:
        grad_logits += first * E
    d = _logits_gradient(logits + first * E, indices + first * K, grad_weights, grad_logits, live, at, real, E, K, eps, scale,
                         SCORING, RENORMALISE, BT, EP, ACC).to(logits.dtype.element_ty)  # fmt: skip
    if NEED_D:
        if tl.program_id(1) == 0:
            tl.store(d_logits + first * E + at, d, real)
    if NEED_X:
        start = tl.program_id(1) * SPAN
        for h in tl.range(start, tl.minimum(start + SPAN, H), BH, num_stages=STAGES):
            w = load_tile(weight, 0, h, E, H, stride_w, EP, BH, TMA)
            store_tile(grad_x, row, h, _times(d, w, tl.zeros([BT, BH], ACC), ACC), T, H, H, BT, BH, TMA)


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
    products = 1 if logits.dtype is x.dtype else 3 if x.dtype is torch.float16 else 2
    # Few token tiles share the columns out among the SMs; each recomputes the small d_logits.
    inline = need_x and _inline(args)
    c = _input_config(experts, weight.element_size(), products, inline and tma_ready(weight, grad_x), target)
    token_tiles, block = cdiv(tokens, c.tokens), index_block(experts)
    parts = max(1, min(target.sms * c.per_sm // token_tiles, cdiv(hidden, c.cols))) if inline else 1
    span = cdiv(cdiv(hidden, parts), c.cols) * c.cols
    with on_device(x):
        if need_x or need_weight or need_bias:
            _launch(
                _input_kernel, (token_tiles, cdiv(hidden, span)),
                (logits, indices, grad_weights, grad_logits, descriptor(weight, [block, c.cols]) if c.tma else weight, d_logits,
                 descriptor(grad_x, [c.tokens, c.cols]) if c.tma else grad_x, tokens, experts, sizes["top_k"], hidden, span,
                 weight.stride(0), eps, None if scale == 1.0 else scale),
                {"SCORING": scoring, "RENORMALISE": renormalise, "NEED_X": inline, "NEED_D": d_logits.numel() > 0, "BT": c.tokens,
                 "BH": c.cols, "EP": block, "TMA": c.tma, "STAGES": c.stages, "ACC": acc, "num_warps": c.warps,
                 "num_stages": c.stages, **({"maxnreg": c.registers} if c.registers else {})},
            )  # fmt: skip
        if need_x and not inline:
            grad_input([d_logits], [weight], grad_x)
        if need_weight or need_bias:
            rows, cols, step, stages, parts = _weight_config(sizes, args, target)
            whole = need_weight * experts * hidden
            flat = partial.view(parts, -1) if parts > 1 else partial
            to = (flat, flat[:, whole:]) if parts > 1 else (grad_weight, grad_bias)
            span = cdiv(cdiv(tokens, parts), step) * step
            _launch(
                _weight_kernel, (cdiv(experts, rows), cdiv(hidden, cols) if need_weight else 1, parts),
                (d_logits, x, *to, tokens, experts, hidden, span, x.stride(0), whole + need_bias * experts),
                {"NEED_W": need_weight, "NEED_B": need_bias, "BE": rows, "BH": cols, "BK": step, "STAGES": stages, "ACC": acc,
                 "num_warps": 4 if rows * cols <= 8192 else 8, "num_stages": stages},
            )  # fmt: skip
            if parts > 1:
                sum_rows(flat, *(t.view(-1) for t, needed in ((grad_weight, need_weight), (grad_bias, need_bias)) if needed))
    return grad_x, grad_weight, grad_bias


OP = Op(SPEC, launch, reference)

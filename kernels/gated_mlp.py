"""The first half of a gated MLP in one launch: both products and the activation.

    gate, up = rstd * (x @ gate_weight.T) + gate_bias, rstd * (x @ up_weight.T) + up_bias
    out      = activation(gate) * up                     GLU variants (Shazeer 2020, arXiv 2002.05202)

    x                       tokens hidden
    gate_weight, up_weight  ffn hidden                   two pointers: the weights stay where the model keeps them
    sumsq                   tokens tiles: x is then `scaled` of the linear op, rstd comes from these sums (no gradient)
    out, gate, up           tokens ffn                   gate and up only with save: the backward reads them

activation: silu, gelu (erf), gelu_tanh, relu or relu2 (relu squared), applied to the fp32 sums.
HBM, in elements: reads x, weights and biases once; writes out, with save also gate and up.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import einsum, reduce
from torch import Tensor

from ._gemm import (
    Config,
    accumulator,
    configure,
    grad_input,
    grad_weight,
    halves,
    load_tile,
    operand,
    options,
    programs,
    row_scale,
    store_tile,
    sum_rows,
    triton_dtype,
    usable,
)  # fmt: skip
from ._lang import TensorDescriptor, cdiv, next_power_of_2, tl, triton
from ._launch import contiguous_last, on_device
from ._launch import launch as _launch
from ._math import activate, activate_grad, check_activation, plain_activate, plain_activate_backward, tile_order
from ._replay import valid_distance
from ._spec import Args, Op, Sizes, Spec, Stage, Write, accumulate_dtype, flag
from ._target import target_of


def _check(sizes: Sizes, args: Args) -> dict[str, int]:
    check_activation("gated_mlp", args["activation"])
    return {}


SPEC = Spec(
    name="gated_mlp",
    reads={"x": "tokens hidden", "gate_weight": "ffn hidden", "up_weight": "ffn hidden", "gate_bias": "ffn", "up_bias": "ffn",
           "sumsq": "tokens tiles"},
    optional=frozenset({"gate_bias", "up_bias", "sumsq"}),
    any_dtype=frozenset({"sumsq"}),
    writes={
        "out": Write("tokens ffn", "x"),
        "gate": Write("tokens ffn", "x", flag("save")),
        "up": Write("tokens ffn", "x", flag("save")),
    },
    derive=_check,
    flops=lambda s, a: s["tokens"] * s["ffn"] * (4 * s["hidden"] + 5),
)  # fmt: skip


def reference(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    sumsq: Tensor | None, activation: str, eps: float, save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    acc = accumulate_dtype(x.dtype)
    pre = []
    for w, b in ((gate_weight, gate_bias), (up_weight, up_bias)):
        y = torch.nn.functional.linear(x, w, None if sumsq is not None else b)
        if sumsq is not None:
            y = y.to(acc) * torch.rsqrt(reduce(sumsq, "tokens tiles -> tokens 1", "sum") / x.shape[-1] + eps)
            y = (y if b is None else y + b).to(x.dtype)
        pre.append(y)
    out = plain_activate(pre[0], activation) * pre[1]
    return (out, *pre) if save else (out, out.new_empty(0), out.new_empty(0))  # type: ignore[return-value]


@triton.jit(do_not_specialize=["M"])
def _kernel(
    x, w_gate, w_up, b_gate, b_up, sumsq, out, gate, up, M, N, K, TILES, stride_x, stride_wg, stride_wu, inv_hidden, eps,
    ACT: tl.constexpr, SAVE: tl.constexpr, STACKED: tl.constexpr, TILES_P: tl.constexpr, OUT: tl.constexpr, ACC: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    HN: tl.constexpr = BN // 2  # columns of each product in a tile
    num_m = tl.cdiv(M, BM)
    num_n = tl.cdiv(N, HN)
    for t in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=TMA):
        m, n = tile_order(t, num_m, num_n, GROUP)
        row0, col0 = m * BM, n * HN
        if STACKED:
            both = tl.zeros([BM, BN], ACC)
            for k in tl.range(0, K, BK, num_stages=STAGES):
                a = x.load([row0, k])
                b = tl.reshape(w_gate.load([0, col0, k]), (BN, BK))
                both = tl.dot(a, b.T, both, input_precision="ieee", out_dtype=ACC)
            g, u = halves(both, BM, BN)
            if STACKED == 2:
                g, u = u, g
        else:
            g = tl.zeros([BM, HN], ACC)
            u = tl.zeros([BM, HN], ACC)
            for k in tl.range(0, K, BK, num_stages=STAGES):
                a = load_tile(x, row0, k, M, K, stride_x, BM, BK, TMA)
                bg = load_tile(w_gate, col0, k, N, K, stride_wg, HN, BK, TMA)
                bu = load_tile(w_up, col0, k, N, K, stride_wu, HN, BK, TMA)
                g = tl.dot(a, bg.T, g, input_precision="ieee", out_dtype=ACC)
                u = tl.dot(a, bu.T, u, input_precision="ieee", out_dtype=ACC)
        if sumsq is not None:
            r = row_scale(sumsq, row0, M, TILES, inv_hidden, eps, BM, TILES_P).to(ACC)
            g = g * r[:, None]
            u = u * r[:, None]
        cols = col0 + tl.arange(0, HN)
        if b_gate is not None:
            g += tl.load(b_gate + cols, cols < N, other=0.0).to(ACC)[None, :]
        if b_up is not None:
            u += tl.load(b_up + cols, cols < N, other=0.0).to(ACC)[None, :]
        if SAVE:
            store_tile(gate, row0, col0, g.to(OUT), M, N, N, BM, HN, TMA)
            store_tile(up, row0, col0, u.to(OUT), M, N, N, BM, HN, TMA)
        store_tile(out, row0, col0, (activate(g, ACT) * u).to(OUT), M, N, N, BM, HN, TMA)


def _stack(gate: Tensor, up: Tensor, config: Config) -> tuple[int, Any]:
    """(0, None), or both weights as one descriptor [2, ffn, hidden] and which comes first: 1 gate, 2 up.

    The axis of 2 has the distance between the two allocations as its stride, so that one box fetches the rows of both and one
    wide MMA multiplies them (two of half the width reached 72 % of its rate on an H200) without packing the weights.
    """
    low, high = (gate, up) if gate.data_ptr() <= up.data_ptr() else (up, gate)
    distance = high.data_ptr() - low.data_ptr() if gate.device.type != "meta" else gate.numel() * gate.element_size()
    if not config.tma or gate.stride() != up.stride() or not valid_distance(distance):
        return 0, None
    strides = [distance // gate.element_size(), low.stride(0), 1]
    box = [2, config.block_n // 2, config.block_k]
    both = TensorDescriptor(low, [2, *gate.shape], strides, box)
    both.pair = high  # a replay takes the stride from the addresses of its own tensors
    return (1 if low is gate else 2), both


def launch(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    sumsq: Tensor | None, activation: str, eps: float, save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    args = {"x": x, "gate_weight": gate_weight, "up_weight": up_weight, "gate_bias": gate_bias, "up_bias": up_bias,
            "sumsq": sumsq, "activation": activation, "save": save}  # fmt: skip
    sizes = SPEC.axes(args)
    out, gate, up = SPEC.empty(args, sizes)
    x, wg, wu = contiguous_last(x), contiguous_last(gate_weight), contiguous_last(up_weight)
    m, n, k = sizes["tokens"], sizes["ffn"], sizes["hidden"]
    target = target_of(x.device)
    c = usable(configure(m, x.element_size(), target, "pair"), x, wg, wu, out)
    half = c.block_n // 2
    tiles = cdiv(m, c.block_m) * cdiv(n, half)
    n_sums = sizes.get("tiles", 1)
    results = [operand(t, c.block_m, half, c) for t in ((out, gate, up) if save else (out, out, out))]
    stacked, both = _stack(wg, wu, c)
    # Stacked, the second pointer is not read; it stays an argument so that whoever counts traffic knows its extent.
    weights = [both, wu if stacked == 1 else wg] if stacked else [operand(w, half, c.block_k, c) for w in (wg, wu)]
    with on_device(x):
        _launch(
            _kernel, (programs(tiles, c, target),),
            (operand(x, c.block_m, c.block_k, c), *weights,
             *[None if t is None else t.contiguous() for t in (gate_bias, up_bias, sumsq)], *results,
             m, n, k, n_sums, x.stride(0), wg.stride(0), wu.stride(0), 1.0 / max(k, 1), eps),
            {"ACT": activation, "SAVE": save, "STACKED": stacked, "TILES_P": next_power_of_2(n_sums),
             "OUT": triton_dtype(x.dtype), "ACC": accumulator(x), **options(c)},
        )  # fmt: skip
    return out, gate, up


def _gemm_flops(s: Sizes, args: Args) -> int:
    return 2 * s["tokens"] * s["ffn"] * s["hidden"]


_NEEDS = ("need_x", "need_gate_weight", "need_up_weight", "need_gate_bias", "need_up_bias")
BACKWARD_SPEC = Spec(
    name="gated_mlp_backward",
    reads={"grad_out": "tokens ffn", "x": "tokens hidden", "gate_weight": "ffn hidden", "up_weight": "ffn hidden",
           "gate": "tokens ffn", "up": "tokens ffn"},
    writes={
        "grad_x": Write("tokens hidden", "x", flag("need_x")),
        "grad_gate_weight": Write("ffn hidden", "x", flag("need_gate_weight")),
        "grad_up_weight": Write("ffn hidden", "x", flag("need_up_weight")),
        "grad_gate_bias": Write("ffn", "x", flag("need_gate_bias")),
        "grad_up_bias": Write("ffn", "x", flag("need_up_bias")),
    },
    derive=_check,
    scratch={"d_gate": Write("tokens ffn", "x"), "d_up": Write("tokens ffn", "x")},
    stages=(
        Stage("gated_mlp_backward", ("grad_out", "gate", "up"), ("d_gate", "d_up"), lambda s, a: 12 * s["tokens"] * s["ffn"]),
        Stage("grad_input", ("d_gate", "d_up", "gate_weight", "up_weight"), ("grad_x",), lambda s, a: 2 * _gemm_flops(s, a)),
        Stage("grad_weight", ("d_gate", "x"), ("grad_gate_weight",), _gemm_flops),
        Stage("grad_weight", ("d_up", "x"), ("grad_up_weight",), _gemm_flops),
        Stage("sum_rows", ("d_gate",), ("grad_gate_bias",), lambda s, a: s["tokens"] * s["ffn"]),
        Stage("sum_rows", ("d_up",), ("grad_up_bias",), lambda s, a: s["tokens"] * s["ffn"]),
    ),
)  # fmt: skip


def backward_reference(
    grad_out: Tensor, x: Tensor, gate_weight: Tensor, up_weight: Tensor, gate: Tensor, up: Tensor, activation: str,
    need_x: bool, need_gate_weight: bool, need_up_weight: bool, need_gate_bias: bool, need_up_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    acc = accumulate_dtype(x.dtype)
    g, u, dy = gate.to(acc), up.to(acc), grad_out.to(acc)
    dg, du = plain_activate_backward(dy * u, g, activation).to(x.dtype), (dy * plain_activate(g, activation)).to(x.dtype)
    dx = x.new_empty(0)  # absent results are apart from one another: an operator's results must not alias
    if need_x:
        terms = [einsum(d.to(acc), w.to(acc), "tokens ffn, ffn hidden -> tokens hidden")
                 for d, w in ((dg, gate_weight), (du, up_weight))]  # fmt: skip
        dx = (terms[0] + terms[1]).to(x.dtype)
    dws = [einsum(d, x, "tokens ffn, tokens hidden -> ffn hidden") if need else x.new_empty(0)
           for d, need in ((dg, need_gate_weight), (du, need_up_weight))]  # fmt: skip
    dbs = [reduce(d, "tokens ffn -> ffn", "sum") if need else x.new_empty(0)
           for d, need in ((dg, need_gate_bias), (du, need_up_bias))]  # fmt: skip
    return dx, *dws, *dbs  # type: ignore[return-value]


@triton.jit
def _act_backward_kernel(grad_out, gate, up, d_gate, d_up, n, ACT: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < n
    dy = tl.load(grad_out + at, ok, other=0.0).to(ACC)
    g = tl.load(gate + at, ok, other=0.0).to(ACC)
    u = tl.load(up + at, ok, other=0.0).to(ACC)
    tl.store(d_gate + at, (dy * u * activate_grad(g, ACT)).to(d_gate.dtype.element_ty), ok)
    tl.store(d_up + at, (dy * activate(g, ACT)).to(d_up.dtype.element_ty), ok)


def backward_launch(
    grad_out: Tensor, x: Tensor, gate_weight: Tensor, up_weight: Tensor, gate: Tensor, up: Tensor, activation: str,
    need_x: bool, need_gate_weight: bool, need_up_weight: bool, need_gate_bias: bool, need_up_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    args: dict[str, Any] = dict(locals())
    sizes = BACKWARD_SPEC.axes(args)
    dx, dwg, dwu, dbg, dbu = BACKWARD_SPEC.empty(args, sizes)
    dg, du = BACKWARD_SPEC.empty_scratch(args, sizes)
    with on_device(x):
        _launch(
            _act_backward_kernel, (cdiv(dg.numel(), 2048),),
            (*[t.contiguous() for t in (grad_out, gate, up)], dg, du, dg.numel()),
            {"ACT": activation, "BLOCK": 2048, "ACC": accumulator(x), "num_warps": 8},
        )  # fmt: skip
        if need_x:
            grad_input([dg, du], [gate_weight, up_weight], dx)
        for d, dw, need in ((dg, dwg, need_gate_weight), (du, dwu, need_up_weight)):
            if need:
                grad_weight(d, x, dw)
        for d, db, need in ((dg, dbg, need_gate_bias), (du, dbu, need_up_bias)):
            if need:
                sum_rows(d, db)
    return dx, dwg, dwu, dbg, dbu


OP = Op(SPEC, launch, reference, Op(BACKWARD_SPEC, backward_launch, backward_reference), no_grad=frozenset({"sumsq"}))

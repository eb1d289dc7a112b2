"""What an op makes of its inputs: clear errors before anything runs, any strides, empty and single rows, frozen parameters."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from op_cases import (
    EPS,
    FORWARD_ONLY,
    PATHS,
    SMALL,
    Args,
    Case,
    backward_arguments,
    call,
    check,
    differentiable,
    error,
    layer_norm_case,
    linear_case,
    mlp_case,
    norm_case,
    plain_mlp_case,
    qkv_case,
    recording,
    rope_case,
    rotary_tables,
    to,
    with_gradients,
)
from torch import Tensor

from fusedblock import ops
from fusedblock.kernels import norm
from fusedblock.kernels._spec import ShapeError
from fusedblock.ops import OPS

BF16 = torch.bfloat16
# Attention's own rules are tested with it.
OWN = tuple(c for c in SMALL if c.op != "attention")
FIRST = {case.op: case for case in reversed(SMALL)}
NORM, LINEAR, QKV, ROPE, MLP, PLAIN_MLP = (
    FIRST[op] for op in ("norm", "linear", "qkv_rope", "rope", "gated_mlp", "plain_mlp")
)  # fmt: skip
QKV_NORM = qkv_case(2, 3, 24, 16, 1, 2, tables="repeat", rope="interleaved", part=0.5, norm="late")
QKV_PLAIN = qkv_case(1, 3, 24, 16, 2, 1, bias=True, rope="", layout="stacked")
SCALED = linear_case(5, 24, 40, "bias residual columns", 0.25)
LAYER_NORM = layer_norm_case(5, 24, "bias residual")

# ---- errors ----------------------------------------------------------------------------------------------------------------


def changed(case: Case, **changes: object) -> Args:
    args = case.arguments(torch.float32)
    assert changes.keys() <= args.keys()
    return {**args, **changes}


ERRORS = [
    (changed(NORM, weight=torch.ones(23)), "norm", ShapeError, "norm: weight (hidden) has hidden=23, but hidden=24 so far"),
    (changed(NORM, x=torch.ones(24)), "norm", ShapeError, "norm: x has shape (24,), expected (tokens hidden)"),
    (changed(NORM, bias=torch.ones(25)), "norm", ShapeError, "norm: bias (hidden) has hidden=25, but hidden=24 so far"),
    (changed(NORM, residual=torch.ones(4, 24)), "norm", ShapeError,
     "norm: residual (tokens hidden) has tokens=4, but tokens=5 so far"),
    (changed(NORM, weight=torch.ones(24, dtype=torch.int32)), "norm", ValueError,
     "norm: weight has dtype torch.int32, expected one of torch.float32, torch.float16, torch.bfloat16, torch.float64"),
    (changed(NORM, bias=torch.ones(24, dtype=BF16)), "norm", ValueError,
     "norm: bias has dtype torch.bfloat16, but weight has torch.float32"),
    (changed(NORM, residual=torch.ones(5, 24, dtype=BF16)), "norm", ValueError,
     "norm: residual has dtype torch.bfloat16, but the result has dtype=torch.float32"),
    (changed(NORM, dtype=torch.int8), "norm", ValueError,
     "norm: dtype=torch.int8, expected one of torch.float32, torch.float16, torch.bfloat16, torch.float64"),
    (changed(NORM, kind="group"), "norm", ValueError, "norm: kind='group', expected one of rms, layer"),
    (changed(NORM, x=torch.ones(5, 24, dtype=torch.int32)), "norm", ValueError,
     "norm: x has dtype torch.int32, expected one of torch.float32, torch.float16, torch.bfloat16, torch.float64"),
    (changed(NORM, weight=torch.ones(24, device="meta")), "norm", ValueError, "norm: weight is on meta, but x is on cpu"),
    (changed(NORM, x=torch.ones(1, 65537), weight=torch.ones(65537)), "norm", ValueError,
     "norm: hidden=65537 exceeds the largest supported, 65536"),
    (changed(LINEAR, weight=torch.ones(40, 23)), "linear", ShapeError,
     "linear: weight (out_features in_features) has in_features=23, but in_features=24 so far"),
    (changed(LINEAR, bias=torch.ones(39)), "linear", ShapeError,
     "linear: bias (out_features) has out_features=39, but out_features=40 so far"),
    (changed(LINEAR, residual=torch.ones(4, 40)), "linear", ShapeError,
     "linear: residual (tokens out_features) has tokens=4, but tokens=5 so far"),
    (changed(LINEAR, residual=torch.ones(5, 40, dtype=BF16)), "linear", ValueError,
     "linear: residual has dtype torch.bfloat16, but x has torch.float32"),
    (to(changed(LINEAR, residual=None, norm_weight=torch.ones(40)), BF16) | {"residual": torch.ones(5, 40)}, "linear", ValueError,
     "linear: residual has dtype torch.float32, but x has torch.bfloat16: not beside norm_weight"),
    (changed(LINEAR, weight=torch.ones(24, 40).t()[:, 1:]), "linear", ShapeError,
     "linear: weight (out_features in_features) has in_features=23, but in_features=24 so far"),
    (changed(QKV, v_weight=torch.ones(2, 16, 24)), "qkv_rope", ShapeError,
     "qkv_rope: v_weight (kv_heads head_dim hidden) has kv_heads=2, but kv_heads=1 so far"),
    (changed(QKV, k_weight=torch.ones(1, 24, 24)), "qkv_rope", ShapeError,
     "qkv_rope: k_weight (kv_heads head_dim hidden) has head_dim=24, but head_dim=16 so far"),
    ({**qkv_case(1, 3, 24, 264, 1, 1).arguments(torch.float32)}, "qkv_rope", ValueError,
     "qkv_rope: head_dim=264, expected 16 to 256 in multiples of 8"),
    (changed(QKV, q_bias=torch.ones(32)), "qkv_rope", ShapeError, "qkv_rope: q_bias has shape (32,), expected (heads head_dim)"),
    (changed(QKV, cos=torch.ones(2, 3, 16)), "qkv_rope", ShapeError,
     "qkv_rope: sin (1|batch seq half_rotary) has half_rotary=8, but half_rotary=16 so far"),
    (changed(QKV, cos=torch.ones(2, 3, 16), sin=torch.ones(2, 3, 16)), "qkv_rope", ShapeError,
     "qkv_rope: cos has half_rotary=16, expected at most head_dim/2=8"),
    (changed(QKV, cos=torch.ones(3, 3, 8)), "qkv_rope", ShapeError,
     "qkv_rope: cos (1|batch seq half_rotary) has batch=3, but batch=2 so far"),
    (changed(QKV, sin=torch.ones(1, 4, 8)), "qkv_rope", ShapeError,
     "qkv_rope: sin (1|batch seq half_rotary) has seq=4, but seq=3 so far"),
    (changed(QKV, sin=None), "qkv_rope", ValueError, "qkv_rope: cos is a tensor, but sin is None: both or neither"),
    (changed(QKV_NORM, k_norm=None), "qkv_rope", ValueError, "qkv_rope: q_norm is a tensor, but k_norm is None: both or neither"),
    (changed(QKV_NORM, norm_kind="batch"), "qkv_rope", ValueError,
     "qkv_rope: norm_kind='batch', expected one of 'rms', 'layer'"),
    (changed(QKV_NORM, q_norm=torch.ones(3, 16)), "qkv_rope", ShapeError,
     "qkv_rope: q_norm (1|heads head_dim) has heads=3, but heads=2 so far"),
    (changed(ROPE, k=torch.ones(2, 4, 1, 16)), "rope", ShapeError,
     "rope: k (batch seq kv_heads head_dim) has seq=4, but seq=3 so far"),
    (changed(ROPE, cos=torch.ones(1, 3, 9), sin=torch.ones(1, 3, 9)), "rope", ShapeError,
     "rope: cos has half_rotary=9, expected at most head_dim/2=8"),
    ({**rope_case(1, 3, 12, 1, 1).arguments(torch.float32)}, "rope", ValueError,
     "rope: head_dim=12, expected 16 to 256 in multiples of 8"),
    (changed(ROPE, k=torch.ones(2, 3, 1, 16, dtype=BF16)), "rope", ValueError,
     "rope: k has dtype torch.bfloat16, but q has torch.float32"),
    (changed(MLP, up_weight=torch.ones(39, 24)), "gated_mlp", ShapeError,
     "gated_mlp: up_weight (ffn hidden) has ffn=39, but ffn=40 so far"),
    (changed(MLP, activation="tanh"), "gated_mlp", ValueError,
     "gated_mlp: activation='tanh', expected one of silu, gelu, gelu_tanh, relu, relu2"),
    (changed(PLAIN_MLP, activation="swish"), "plain_mlp", ValueError,
     "plain_mlp: activation='swish', expected one of silu, gelu, gelu_tanh, relu, relu2"),
    (changed(PLAIN_MLP, weight=torch.ones(40, 23)), "plain_mlp", ShapeError,
     "plain_mlp: weight (ffn hidden) has hidden=23, but hidden=24 so far"),
    (changed(PLAIN_MLP, bias=torch.ones(40, dtype=BF16)), "plain_mlp", ValueError,
     "plain_mlp: bias has dtype torch.bfloat16, but x has torch.float32"),
    (changed(MLP, sumsq=torch.ones(6, 1)), "gated_mlp", ShapeError,
     "gated_mlp: sumsq (tokens tiles) has tokens=6, but tokens=5 so far"),
]  # fmt: skip


@pytest.mark.parametrize("interpreted", [True, False], ids=["kernels", "reference"])
@pytest.mark.parametrize(("args", "op", "kind", "message"), ERRORS, ids=[e[3] for e in ERRORS])
def test_errors_name_the_argument_and_both_values(args, op, kind, message, interpreted):
    """The same before kernels as before the plain reference, with no launch made."""
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        if interpreted:
            with recording("sm_90") as launches:
                call(op, args)
        else:
            call(op, args)
    assert not interpreted or not launches


@pytest.mark.parametrize("args,op,kind,message", ERRORS, ids=[e[3] for e in ERRORS])
def test_fake_tensors_raise_the_same(args, op, kind, message):
    """Under torch.compile the mistake is found while tracing."""
    moved = {n: torch.empty_like(v, device="meta") if isinstance(v, Tensor) else v for n, v in args.items()}
    if "is on meta" not in message:
        with pytest.raises(kind, match=re.escape(message)):
            call(op, moved)


def test_the_largest_hidden_is_accepted():
    x = torch.ones(1, norm.MAX_HIDDEN)
    with recording("sm_90"):
        assert error(ops.rms_norm(x, x[0], eps=0.0), x.double()) < 1e-6
        x = torch.tensor([[999.0, 1001.0]]).expand(32768, 2).reshape(1, -1)
        assert error(ops.layer_norm(x, x[0] - 1000, eps=0.0), torch.ones(1, norm.MAX_HIDDEN).double()) < 1e-6


def test_public_functions_check_leading_axes():
    x, w = torch.ones(2, 3, 24), torch.ones(40, 24)
    with pytest.raises(ShapeError, match=re.escape("linear: residual has shape (3, 2, 40), expected (2, 3, 40)")):
        ops.linear(x, w, residual=torch.ones(3, 2, 40))
    with pytest.raises(ShapeError, match=re.escape("rms_norm: x has shape (), expected (... hidden)")):
        ops.rms_norm(torch.ones(()), torch.ones(1))
    with pytest.raises(ShapeError, match=re.escape("layer_norm: residual has shape (3, 2, 24), expected (2, 3, 24)")):
        ops.layer_norm(x, x[0, 0], residual=torch.ones(3, 2, 24))


@pytest.mark.parametrize(
    ("op", "args", "name"),
    [
        ("linear", FORWARD_ONLY[0].arguments(torch.float32), "norm_weight"),
        ("qkv_rope", FORWARD_ONLY[1].arguments(torch.float32), "sumsq"),
        ("gated_mlp", FORWARD_ONLY[2].arguments(torch.float32), "sumsq"),
    ],
)
def test_arguments_without_a_backward_are_an_error_when_gradients_are_wanted(op, args, name):
    args["x"].requires_grad_()
    with pytest.raises(ValueError, match=f"{op}: {name} is given, but gradients are wanted and there is no backward for it"):
        call(op, args)
    with torch.no_grad():
        call(op, args)


# ---- strides ---------------------------------------------------------------------------------------------------------------


def transposed(t: Tensor) -> Tensor:
    """The same values, first axis dense."""
    return t.movedim(0, -1).contiguous().movedim(-1, 0)


def every_other(t: Tensor) -> Tensor:
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"), dtype=t.dtype)
    wide[..., ::2] = t
    return wide[..., ::2]


def padded_rows(t: Tensor) -> Tensor:
    """Rows 16-byte aligned with NaN between them: what a descriptor could step into."""
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 16), float("nan"), dtype=t.dtype)
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


def unaligned(t: Tensor) -> Tensor:
    flat = torch.full((t.numel() + 1,), float("nan"), dtype=t.dtype)
    flat[1:] = t.flatten()
    return flat[1:].view(t.shape)


def expanded(t: Tensor) -> Tensor:
    """Every row the first one, with stride 0."""
    return t[:1].expand(t.shape)


STRIDED = (norm_case(19, 40), layer_norm_case(19, 40, "bias residual"),
           linear_case(70, 40, 24, "bias residual"), qkv_case(2, 35, 40, 16, 1, 2, bias=True, tables="each"),
           qkv_case(2, 35, 40, 16, 1, 2, norm="layer", rope="interleaved"), rope_case(2, 35, 16, 1, 2, tables="each"),
           mlp_case(70, 40, 24, bias=True), plain_mlp_case(70, 40, 24, "gelu", "bias"))  # fmt: skip


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("layout", [transposed, every_other, padded_rows, unaligned, expanded])
@pytest.mark.parametrize("case", STRIDED, ids=lambda c: c.op)
def test_any_strides(case, layout, target):
    """Inputs laid out otherwise give what dense ones give, within a rounding (descriptors and pointers may use other tiles)."""
    args = {n: layout(v) if isinstance(v, Tensor) else v for n, v in case.arguments(BF16).items()}
    dense = {n: v.contiguous() if isinstance(v, Tensor) else v for n, v in args.items()}
    with recording(target):
        got, want = call(case.op, args), call(case.op, dense)
    for name in want:
        assert error(got[name], want[name].double()) < 2.0**-9, name


@pytest.mark.parametrize("layout", [transposed, every_other, padded_rows, unaligned, expanded])
@pytest.mark.parametrize("case", STRIDED, ids=lambda c: c.op)
def test_any_strides_in_the_backward(case, layout):
    """Gradients arrive expanded (from a sum) or strided, saved inputs as they were given."""
    args = backward_arguments(case.op, case.arguments(BF16))
    backward = OPS[case.op].backward
    strided = {n: layout(v) if isinstance(v, Tensor) else v for n, v in args.items()}
    dense = {n: v.contiguous() if isinstance(v, Tensor) else v for n, v in strided.items()}
    with recording("sm_90"):
        got, want = backward.launch(**strided), backward.launch(**dense)
    for name, a, b in zip(backward.spec.writes, got, want, strict=True):
        assert error(a, b.double()) < 2.0**-8, name


@pytest.mark.parametrize("case", OWN, ids=lambda c: c.id)
def test_zero_stride_gradients(case):
    """out.sum().backward(): every element of the incoming gradient is one number in memory."""
    args = case.arguments(torch.float32)
    names = differentiable(case.op, args)

    def gradients() -> list[Tensor]:
        leaves = {n: args[n].detach().clone().requires_grad_() for n in names}
        results = call(case.op, {**args, **leaves})
        kept = [t for n, t in results.items() if t.requires_grad and n not in ("rstd", "gate", "up")]
        return [*torch.autograd.grad(sum(t.sum() for t in kept), [*leaves.values()])]

    plain = gradients()
    with recording("sm_90"):
        got = gradients()
    for name, a, b in zip(names, got, plain, strict=True):
        assert error(a, b.double()) < 2e-5, name


def test_a_result_without_a_gradient_counts_as_zero():
    """Only q of q, k, v is used."""
    args = QKV.arguments(torch.float32)
    leaves = {n: args[n].requires_grad_() for n in ("x", "q_weight", "k_weight")}
    with recording("sm_80"):
        call("qkv_rope", args)["q"].sum().backward()
    assert leaves["k_weight"].grad.count_nonzero() == 0
    assert leaves["q_weight"].grad.count_nonzero() > 0
    assert leaves["x"].grad.count_nonzero() > 0


# ---- few rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize(
    "case", [norm_case(0, 24), layer_norm_case(0, 24, "bias residual"),
             linear_case(0, 24, 40, "bias residual"), qkv_case(0, 3, 24, 16, 1, 2, bias=True),
             qkv_case(2, 0, 24, 16, 1, 2), mlp_case(0, 24, 40, bias=True), plain_mlp_case(0, 24, 40, "relu", "bias columns"),
             linear_case(0, 24, 40, "bias residual wide", 0.5)], ids=lambda c: c.id,
)  # fmt: skip
def test_no_rows(case, target):
    """Empty results of the right shape; weights get gradients of zero, not of garbage."""
    args = case.arguments(BF16)
    with recording(target):
        got = with_gradients(case.op, args)
    plain = with_gradients(case.op, args)
    assert [*got] == [*plain]
    for name, t in plain.items():
        assert got[name].shape == t.shape
        assert got[name].dtype == t.dtype
        assert torch.equal(got[name], torch.zeros_like(t)), name


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize(
    "case", [norm_case(1, 24), layer_norm_case(1, 24, "bias residual"),
             linear_case(1, 24, 40, "bias residual"), qkv_case(1, 1, 24, 16, 1, 2, bias=True),
             mlp_case(1, 24, 40, bias=True), plain_mlp_case(1, 24, 40, "gelu", "bias columns")], ids=lambda c: c.id,
)  # fmt: skip
def test_one_row(case, target):
    check(case, torch.float32, target)


def test_empty_leading_axes_of_the_public_functions():
    with recording("sm_90") as launches:
        assert ops.rms_norm(torch.ones(2, 0, 24), torch.ones(24)).shape == (2, 0, 24)
        assert ops.linear(torch.ones(0, 3, 24), torch.ones(40, 24), residual=torch.ones(0, 3, 40)).shape == (0, 3, 40)
        assert ops.gated_mlp(torch.ones(0, 24), torch.ones(40, 24), torch.ones(40, 24)).shape == (0, 40)
        cos, sin = (t[..., :8] for t in rotary_tables(1, 0, 16, torch.float32))
        q, k, _ = ops.qkv_rope(
            torch.ones(2, 0, 24), torch.ones(32, 24), torch.ones(16, 24), torch.ones(16, 24), cos, sin, head_dim=16
        )
        assert (q.shape, k.shape) == ((2, 0, 2, 16), (2, 0, 1, 16))
    assert not launches


def test_no_input_features():
    """An empty sum is zero: what remains is residual + bias."""
    for given in ("bias", "residual", "bias residual norm_weight"):
        check(linear_case(5, 0, 24, given), torch.float32, "sm_90", gradients=False)
    with recording("sm_90"):
        assert torch.equal(ops.linear(torch.ones(5, 0), torch.ones(24, 0)), torch.zeros(5, 24))


# ---- what is frozen, what is kept --------------------------------------------------------------------------------------------


def launched(case: Case, frozen: set[str]) -> Counter[str]:
    args = case.arguments(torch.float32)
    for name in differentiable(case.op, args):
        args[name].requires_grad_(name not in frozen)
    with recording("sm_80") as launches:
        results = call(case.op, args)
        launches.clear()
        next(iter(results.values())).sum().backward()
    for name in differentiable(case.op, args):
        assert (args[name].grad is None) == (name in frozen)
    return Counter(launch.kernel for launch in launches)


@pytest.mark.parametrize(
    ("case", "frozen", "kernels"),
    [
        (NORM, set(), {"_backward_kernel": 1, "sum_rows_kernel": 1}),
        (NORM, {"weight"}, {"_backward_kernel": 1}),
        (NORM, {"x"}, {"_backward_kernel": 1, "sum_rows_kernel": 1}),
        (LAYER_NORM, set(), {"_backward_kernel": 1, "sum_rows_kernel": 1}),
        (LAYER_NORM, {"x", "weight"}, {"_backward_kernel": 1, "sum_rows_kernel": 1}),
        (LAYER_NORM, {"weight", "bias"}, {"_backward_kernel": 1}),
        (LAYER_NORM, {"x", "weight", "bias"}, {}),  # the residual's gradient is the result's own
        (LINEAR, set(), {"grad_input_kernel": 1, "grad_weight_kernel": 1, "sum_rows_kernel": 1}),
        (LINEAR, {"weight"}, {"grad_input_kernel": 1, "sum_rows_kernel": 1}),
        (LINEAR, {"x", "bias"}, {"grad_weight_kernel": 1}),
        (LINEAR, {"x", "weight", "bias"}, {}),  # the residual's gradient is the result's own
        (QKV_NORM, set(), {"_turn_kernel": 1, "grad_input_kernel": 1, "grad_weight_kernel": 3, "sum_rows_kernel": 2}),
        (QKV_NORM, {"q_norm", "k_norm", "k_weight", "x"}, {"_turn_kernel": 1, "grad_weight_kernel": 2}),
        (QKV_NORM, {"q_norm", "q_weight", "k_weight", "v_weight", "x"}, {"_turn_kernel": 1, "sum_rows_kernel": 1}),
        (QKV_PLAIN, {"k_bias"}, {"grad_input_kernel": 1, "grad_weight_kernel": 3, "sum_rows_kernel": 2}),
        (QKV, {"x", "q_weight", "k_weight", "q_bias", "k_bias"}, {"grad_weight_kernel": 1, "sum_rows_kernel": 1}),
        (ROPE, set(), {"_turn_kernel": 1}),
        (ROPE, {"k"}, {"_turn_kernel": 1}),
        (QKV, set(), {"_turn_kernel": 1, "grad_input_kernel": 1, "grad_weight_kernel": 3, "sum_rows_kernel": 3}),
        (
            QKV,
            {"q_weight", "k_weight", "v_weight", "q_bias", "k_bias", "v_bias"},
            {"_turn_kernel": 1, "grad_input_kernel": 1},
        ),
        (QKV, {"x", "k_weight", "q_bias"}, {"_turn_kernel": 1, "grad_weight_kernel": 2, "sum_rows_kernel": 2}),
        (PLAIN_MLP, set(), {"_act_backward_kernel": 1, "grad_input_kernel": 1, "grad_weight_kernel": 1, "sum_rows_kernel": 1}),
        (PLAIN_MLP, {"weight", "bias"}, {"_act_backward_kernel": 1, "grad_input_kernel": 1}),
        (PLAIN_MLP, {"x", "weight"}, {"_act_backward_kernel": 1, "sum_rows_kernel": 1}),
        (SCALED, set(), {"_rescale_kernel": 1, "grad_input_kernel": 1, "grad_weight_kernel": 1, "sum_rows_kernel": 1}),
        (SCALED, {"weight", "bias"}, {"_rescale_kernel": 1, "grad_input_kernel": 1}),
        (SCALED, {"x", "weight", "bias"}, {}),
        (MLP, set(), {"_act_backward_kernel": 1, "grad_input_kernel": 1, "grad_weight_kernel": 2, "sum_rows_kernel": 2}),
        (MLP, {"gate_weight", "up_weight", "gate_bias", "up_bias"}, {"_act_backward_kernel": 1, "grad_input_kernel": 1}),
        (MLP, {"x", "up_weight", "up_bias"}, {"_act_backward_kernel": 1, "grad_weight_kernel": 1, "sum_rows_kernel": 1}),
    ],
    ids=lambda v: v.op if isinstance(v, Case) else ("+".join(sorted(v)) or "none") if isinstance(v, set) else "",
)
def test_frozen_parameters_skip_their_launches(case, frozen, kernels):
    assert launched(case, frozen) == kernels


@pytest.mark.parametrize("case", OWN, ids=lambda c: c.id)
def test_nothing_is_saved_where_no_gradient_is_wanted(case):
    args = case.arguments(torch.float32)
    with recording("sm_90"):
        assert all(t.grad_fn is None and not t.requires_grad for t in call(case.op, args).values())
    x, w = torch.randn(5, 24), torch.ones(24)
    for kind in norm.KINDS:
        _, *saved = torch.ops.fusedblock.norm.default(x, w, None, None, kind, EPS, 0.0, True, False, torch.float32)
        assert [t.shape for t in saved] == [(0,), (0,)]


@pytest.mark.parametrize("interpreted", [True, False], ids=["kernels", "reference"])
@pytest.mark.parametrize("case", [*SMALL, *FORWARD_ONLY], ids=lambda c: c.id)
def test_inputs_are_never_written(case, interpreted):
    """Neither values nor versions change, forward or backward; nothing lands in .grad."""
    args = case.arguments(BF16)
    tensors = {n: v for n, v in args.items() if isinstance(v, Tensor)}
    before = {n: (v.clone(), v._version) for n, v in tensors.items()}

    def run() -> None:
        call(case.op, args)
        if case in SMALL:
            taken = backward_arguments(case.op, args)
            kept = {n: v.clone() for n, v in taken.items() if isinstance(v, Tensor)}
            getattr(torch.ops.fusedblock, OPS[case.op].backward.spec.name).default(*taken.values())
            for n, v in kept.items():
                assert torch.equal(taken[n], v), n

    if interpreted:
        with recording("sm_90"):
            run()
    else:
        run()
    for n, (value, version) in before.items():
        assert torch.equal(tensors[n], value), n
        assert tensors[n]._version == version
        assert tensors[n].grad is None


@pytest.mark.parametrize("case", OWN, ids=lambda c: c.id)
def test_results_are_new_memory(case):
    args = to(case.arguments(torch.float32), torch.float32)
    given = {v.untyped_storage().data_ptr() for v in args.values() if isinstance(v, Tensor)}
    for interpreted in (True, False):
        with recording("sm_90") if interpreted else torch.no_grad():
            made = [t.untyped_storage().data_ptr() for t in call(case.op, args).values()]
        assert not given & {*made}
        assert interpreted is False or len({*made}) == len(made)


@pytest.mark.parametrize("case", [c for c in OWN if c.op != "moe_route"], ids=lambda c: c.id)  # which has a test of its own
def test_nan_in_one_row_stays_in_it(case):
    """Rows are independent: a NaN (or what padding holds) touches no other."""
    args = case.arguments(torch.float32)
    dirty_args = dict(args)
    for name in ("q", "k") if case.op == "rope" else ("x",):
        shape = args[name].shape
        rows = args[name].reshape(shape[:2].numel() if len(shape) > 2 else shape[0], -1).clone()
        rows[-1] = float("nan")
        dirty_args[name] = rows.view(shape)
    with recording("sm_90"):
        clean, dirty = call(case.op, args), call(case.op, dirty_args)
    clean.pop("gate_up", None)  # in the order of the experts: see test_moe_experts.py
    for name, value in clean.items():
        flat = [t.reshape(rows.shape[0], -1) for t in (value, dirty[name])]
        assert torch.equal(flat[0][:-1], flat[1][:-1]), name
        assert flat[1][-1].isnan().all(), name


@pytest.mark.parametrize("value", [-1e-6, float("nan"), float("inf")])
def test_an_epsilon_or_a_scale_that_is_no_number_to_compute_with(value: float) -> None:
    x, w = torch.randn(2, 8), torch.randn(8)
    for function in (ops.rms_norm, ops.layer_norm):
        with pytest.raises(ValueError, match=f"{function.__name__}: eps={value}, expected a finite number of at least 0"):
            function(x, w, eps=value)
    if value != value or value > 1:
        with pytest.raises(ValueError, match=f"linear: scale={value}, expected a finite number"):
            ops.linear(x, torch.randn(3, 8), scale=value)

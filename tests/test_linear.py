"""linear and the MLPs beyond plain weights: by columns, scaled, beside an fp32 residual, each activation, halves of a weight."""

from __future__ import annotations

import pytest
import torch
from formulas import activation
from op_cases import (
    DTYPES,
    HALVES,
    Args,
    by_columns,
    call,
    check,
    error,
    linear_case,
    mlp_case,
    only_config,
    plain_mlp_case,
    recording,
)
from test_ops import cases, runs

from fusedblock import ops
from fusedblock.kernels import _gemm
from fusedblock.kernels._math import ACTIVATIONS

BF16 = torch.bfloat16


@runs(
    [linear_case(1, 264, 40, "columns"), linear_case(37, 72, 96, "bias residual columns"),
     linear_case(37, 72, 96, "bias residual", 0.22), linear_case(19, 40, 24, "", -3.0),
     linear_case(37, 72, 96, "bias residual wide columns", 0.5), linear_case(5, 40, 24, "residual wide")],
    [linear_case(150, 136, 264, "residual wide columns", 0.5), linear_case(300, 73, 131, "columns"),
     linear_case(300, 136, 131, "bias residual wide columns"), linear_case(300, 72, 264, "residual wide", 2.0)],
)  # fmt: skip
def test_linear(case, dtype, target):
    check(case, dtype, target)


def test_a_wide_tile_with_an_fp32_residual_is_finished_in_quarters():
    """Else the staging of result and residual would not fit beside the operands."""
    launches = check(linear_case(1100, 72, 392, "bias residual wide columns", 0.5), BF16, "sm_90")
    forward = launches[0].arguments
    assert (forward["BN"], forward["SPLIT"], forward["TMA"], forward["T"]) == (256, 4, True, True)
    assert [launch.kernel for launch in launches] == [
        "_kernel", "_rescale_kernel", "grad_input_kernel", "grad_weight_kernel", "sum_rows_kernel"
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES)
def test_the_result_has_the_dtype_of_the_residual(dtype):
    """As under autocast: products in half precision, the stream in fp32, and no rounding of the sum to the former."""
    args = linear_case(37, 72, 96, "bias residual wide").arguments(dtype)
    with recording("sm_90"):
        out = call("linear", args)["out"]
    assert out.dtype == torch.float32
    exact = args["x"].double() @ args["weight"].double().t() + args["bias"].double() + args["residual"].double()
    assert error(out, exact) < 1e-6
    assert error(out.to(dtype), exact) > 1e-4


def test_gradients_beside_an_fp32_residual_keep_their_dtypes():
    args = linear_case(19, 40, 24, "bias residual wide columns", 0.5).arguments(BF16)
    leaves = {n: args[n].requires_grad_() for n in ("x", "weight", "bias", "residual")}
    with recording("sm_90"):
        call("linear", args)["out"].sum().backward()
    assert {n: t.grad.dtype for n, t in leaves.items()} == {n: t.dtype for n, t in leaves.items()}
    assert torch.equal(leaves["residual"].grad, torch.ones(19, 24))


# ---- weights by columns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["linear", "plain_mlp"])
def test_a_weight_by_columns_is_read_in_place(op):
    """No copy, forward or backward: every kernel that reads it gets its own address."""
    case = linear_case(150, 136, 264, "columns") if op == "linear" else plain_mlp_case(150, 136, 264, "gelu", "columns")
    args = case.arguments(BF16)
    for name in ("x", "weight"):
        args[name].requires_grad_()
    with recording("sm_80") as launches:
        call(op, args)["out"].sum().backward()
    taken = [launch.arguments["weight" if launch.kernel == "_kernel" else "w0"] for launch in launches
             if launch.kernel in ("_kernel", "grad_input_kernel")]  # fmt: skip
    assert [t.data_ptr() for t in taken] == 2 * [args["weight"].data_ptr()]
    with recording("sm_90") as launches:
        call(op, args)["out"].sum().backward()
    read = [launch.arguments for launch in launches if launch.kernel in ("_kernel", "grad_input_kernel")]
    assert [(a["T"], a["TMA"]) for a in read] == 2 * [(True, True)]


@pytest.mark.parametrize("target", ["sm_90", "sm_80"])
def test_segments_of_mixed_layouts(target):
    """grad_input takes weights by rows and by columns at once."""
    g = torch.Generator().manual_seed(0)
    dys = [torch.randn(70, n, generator=g).to(BF16) for n in (40, 24, 72)]
    weights = [torch.randn(n, 136, generator=g).to(BF16) for n in (40, 24, 72)]
    want = sum(d.double() @ w.double() for d, w in zip(dys, weights))
    for layouts in ((True, True, True), (True, False, True), (False, False, False)):
        dx = torch.empty(70, 136, dtype=BF16)
        with recording(target) as launches:
            _gemm.grad_input(dys, [by_columns(w) if c else w for w, c in zip(weights, layouts)], dx)
        assert error(dx, want) < 4e-3
        assert launches[0].arguments["T"] is all(layouts)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("columns", [1, 2])
def test_weights_of_one_row_or_column(rows, columns):
    """Their layout is both, or neither is told by the strides."""
    for given in ("", "columns"):
        check(linear_case(70, columns, rows, given), torch.float32, "sm_90")
    for stride in ((1, 1), (5, 1), (1, 5), (5, 3)):
        w = torch.randn(100).as_strided((rows, columns), stride)
        x = torch.randn(3, columns)
        with recording("sm_90"):
            assert error(ops.linear(x, w), x.double() @ w.double().t()) < 1e-6


# ---- the plain MLP and its activations -------------------------------------------------------------------------------------


@runs(
    [*(plain_mlp_case(37, 72, 40, name, "bias") for name in ACTIVATIONS), plain_mlp_case(5, 136, 72, "gelu", "columns")],
    [plain_mlp_case(150, 136, 264, "gelu", "bias columns"), plain_mlp_case(100, 73, 131, "relu2", "bias columns"),
     plain_mlp_case(300, 72, 131, "gelu_tanh"), plain_mlp_case(300, 136, 264, "relu", "bias")],
)  # fmt: skip
def test_plain_mlp(case, dtype, target):
    check(case, dtype, target)


def test_plain_mlp_in_column_halves():
    launches = check(plain_mlp_case(1100, 72, 392, "gelu", "bias"), BF16, "sm_90")
    forward = launches[0].arguments
    assert (forward["BN"], forward["SPLIT"], forward["TMA"]) == (256, 2, True)
    assert [launch.kernel for launch in launches] == [
        "_kernel", "_act_backward_kernel", "grad_input_kernel", "grad_weight_kernel", "sum_rows_kernel"
    ]  # fmt: skip
    with only_config(_gemm.Config(128, 128, 64, 4, 4, tma=True)):
        launches = check(plain_mlp_case(150, 72, 264, "gelu", "bias"), BF16, "sm_90", gradients=False)
    assert launches[0].arguments["SPLIT"] == 2


@runs([mlp_case(37, 72, 40, "relu", bias=True), mlp_case(19, 72, 40, "relu2")], [mlp_case(150, 136, 200, "relu2", bias=True)])
def test_gated_mlp(case, dtype, target):
    check(case, dtype, target)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_transformers(name):
    """By the names a config.json gives them; and far from zero, where a formula may overflow."""
    from transformers.activations import ACT2FN  # imported here: it takes seconds

    x = torch.cat((torch.linspace(-8, 8, 257), torch.tensor([-1e4, -60.0, -0.0, 60.0, 1e4]))).view(-1, 1).requires_grad_()
    want = ACT2FN["gelu_pytorch_tanh" if name == "gelu_tanh" else name](x)
    (want_grad,) = torch.autograd.grad(want.sum(), x)
    with recording("sm_90"):
        got = ops.plain_mlp(x, torch.ones(1, 1), activation=name)
        (got_grad,) = torch.autograd.grad(got.sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_and_infinity_pass_the_activation(name):
    x = torch.tensor([[float("nan")], [float("inf")], [1.0]])
    with recording("sm_90"):
        got = ops.plain_mlp(x.requires_grad_(), torch.ones(1, 1), activation=name)
        (grad,) = torch.autograd.grad(got.sum(), x)
    assert got[0].isnan() and got[1] == float("inf") and got[2].isfinite()
    assert grad[0].isnan() and grad[2].isfinite()


# ---- halves of one weight --------------------------------------------------------------------------------------------------


def _halved(a: Args, up_first: bool) -> Args:
    """gate and up as the two halves of one weight (and bias), as Phi-3's and GLM's checkpoints have them."""

    def halves(kind: str) -> tuple[torch.Tensor, ...]:
        parts = [a[f"gate_{kind}"], a[f"up_{kind}"]]
        low, high = torch.cat(parts[::-1] if up_first else parts).chunk(2)
        return (high, low) if up_first else (low, high)

    return {**a, **{f"{n}_{kind}": t for kind in ("weight", "bias") for n, t in zip(("gate", "up"), halves(kind))}}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("up_first", [False, True])
@cases(mlp_case(100, 72, 96, bias=True, save=False), mlp_case(29, 72, 40, "gelu", bias=True, save=False))
def test_halves_of_one_weight(case, up_first, dtype):
    (launch,) = check(case, dtype, "sm_90", gradients=False, args=_halved(case.arguments(dtype), up_first))
    tma = dtype in HALVES and case.id.startswith("gated_mlp-100")
    assert (launch.arguments["TMA"], launch.arguments["STACKED"]) == (tma, (1 + up_first) * tma)


@pytest.mark.parametrize("up_first", [False, True])
def test_gradient_of_a_weight_whose_halves_are_gate_and_up(up_first):
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*s, generator=g).requires_grad_() for s in ((37, 72), (80, 72)))
    low, high = w.chunk(2)
    gate, up = (high, low) if up_first else (low, high)
    grad = torch.randn(37, 40, generator=g)
    with recording("sm_90"):
        got = torch.autograd.grad(ops.gated_mlp(x, gate, up, activation="gelu"), (x, w), grad)
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    products = (x64 @ w64.t()).chunk(2, -1)
    out = activation(products[up_first], "gelu") * products[not up_first]
    for a, b in zip(got, torch.autograd.grad(out, (x64, w64), grad.double())):
        assert error(a, b) < 1e-5

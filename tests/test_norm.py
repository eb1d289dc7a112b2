"""RMSNorm and LayerNorm against float64: both kinds, every optional argument, mixed dtypes, means far from zero, short rows."""

from __future__ import annotations

import pytest
import torch
from op_cases import (
    DTYPES,
    EPS,
    FEW_SMS,
    HALVES,
    Case,
    backward_arguments,
    check,
    error,
    formula,
    layer_norm_case,
    norm_case,
    recording,
    to,
)
from torch import Tensor

from fusedblock import ops
from fusedblock.interpret import interpret
from fusedblock.kernels import norm

BF16 = torch.bfloat16


def cases(*given: Case):
    return pytest.mark.parametrize("case", given, ids=lambda c: c.id)


@pytest.mark.parametrize("dtype", DTYPES)
@cases(
    norm_case(37, 96), norm_case(37, 96, 1.0), norm_case(37, 96, 0.0, False), norm_case(37, 96, 1.0, False), norm_case(3, 4096),
    norm_case(13, 131), norm_case(1, 40), norm_case(9, 1, eps=0.5), norm_case(5, 40, 1.0, given="bias residual"),
    norm_case(37, 384, given="residual wide"), norm_case(19, 40, given="accurate"),
    layer_norm_case(37, 96), layer_norm_case(3, 4096, "bias"), layer_norm_case(13, 131, "residual"), layer_norm_case(1, 40),
    layer_norm_case(9, 7), layer_norm_case(37, 384, "bias residual wide"), layer_norm_case(19, 40, "bias accurate"),
    layer_norm_case(150, 24, "bias wide"), norm_case(5, 40, 1.0, False, kind="layer", given="bias"),
)  # fmt: skip
def test_norm(case, dtype):
    launches = check(case, dtype, "sm_90")
    assert [launch.kernel for launch in launches] == ["_forward_kernel", "_backward_kernel", "sum_rows_kernel"]
    tokens, hidden = case.arguments(dtype)["x"].shape
    rows = [launch.arguments["ROWS"] for launch in launches[:2]]
    assert launches[0].grid[0] == -(-tokens // rows[0])
    assert launches[1].grid[0] == min(-(-tokens // rows[1]), 12)  # above 12 tiles a program has several
    assert (rows[0] > 1) == (hidden < 4096)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@cases(norm_case(14, 9000), layer_norm_case(14, 9000, "bias residual"), layer_norm_case(1, 16384, "bias", 100.0))
def test_rows_that_the_backward_reads_twice(case, dtype):
    launches = check(case, dtype, "sm_90")
    assert [launch.kernel for launch in launches] == ["_forward_kernel", "_long_backward_kernel", "sum_rows_kernel"]


@pytest.mark.parametrize("wanted", [{"x"}, {"weight"}, {"bias"}, {"x", "bias"}])
def test_some_gradients_of_long_rows(wanted):
    a = backward_arguments("norm", layer_norm_case(3, 9000, "bias").arguments(torch.float32))
    every = {n: t for n, t in zip(("x", "weight", "bias"), norm.backward_reference(**a))}
    with recording("sm_90") as launches:
        grads = norm.backward_launch(**{**a, **{f"need_{n}": n in wanted for n in every}})
    assert len(launches) == 1 + (wanted != {"x"})
    for (name, value), got in zip(every.items(), grads):
        assert error(got, value.double()) < 1e-5 if name in wanted else got.numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@cases(layer_norm_case(37, 96, "bias", 1000.0), layer_norm_case(3, 4096, "residual", -1000.0), layer_norm_case(5, 40, mean=1e4))
def test_a_mean_far_larger_than_the_deviation(case, dtype):
    """Neither results nor gradients lose a digit: fp32 still within 1e-5."""
    check(case, dtype, "sm_90")


def test_a_mean_far_larger_than_the_deviation_of_fp32_rows_and_bf16_results():
    check(layer_norm_case(37, 96, "bias accurate", 1000.0), BF16, "sm_90")


def test_rms_norm_rounds_where_it_says():
    """Two roundings or one: in bf16 they differ at many elements, and each form gives its own."""
    g = torch.Generator().manual_seed(3)
    x, w = torch.randn(8, 64, generator=g).to(BF16), torch.randn(64, generator=g).to(BF16)
    xhat = x.float() / (x.float().square().mean(-1, keepdim=True) + EPS).sqrt()
    early, late = (xhat.to(BF16) * w).float(), (xhat * w.float()).to(BF16).float()
    assert (early != late).any()
    with recording("sm_90"):
        got = [ops.rms_norm(x, w, eps=EPS, round_early=r).float() for r in (True, False)]
    # rstd may differ from torch's in its last bit, which moves few roundings.
    for value, same, other in ((got[0], early, late), (got[1], late, early)):
        assert (value == same).float().mean() > 0.99
        assert (value != other).float().mean() > 0.05


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("interpreted", [True, False], ids=["kernels", "reference"])
def test_what_is_normed_is_rounded_before_the_residual_is_added(dtype, interpreted):
    """As a norm and an addition of their own: bf16 rounding of the norm stays visible in an fp32 sum."""
    g = torch.Generator().manual_seed(4)
    x, w, r = torch.randn(8, 64, generator=g).to(dtype), torch.randn(64, generator=g).to(dtype), torch.randn(8, 64, generator=g)

    def both() -> tuple[Tensor, Tensor]:
        return ops.layer_norm(x, w), ops.layer_norm(x, w, residual=r)

    if interpreted:
        with recording("sm_90"):
            y, total = both()
    else:
        y, total = both()
    assert (y.dtype, total.dtype) == (dtype, torch.float32)
    assert torch.equal(total, r + y.float())


@pytest.mark.parametrize("interpreted", [True, False], ids=["kernels", "reference"])
@pytest.mark.parametrize("residual", [False, True])
def test_layer_norm_is_that_of_torch(residual, interpreted):
    g = torch.Generator().manual_seed(5)
    x, r = (torch.randn(2, 7, 96, generator=g) + 2 for _ in range(2))
    w, b = torch.randn(96, generator=g), torch.randn(96, generator=g)
    want = torch.nn.functional.layer_norm(x.double(), (96,), w.double(), b.double(), 1e-5) + (r.double() if residual else 0)

    def call() -> Tensor:
        return ops.layer_norm(x, w, b, residual=r if residual else None)

    if interpreted:
        with recording("sm_90"):
            got = call()
    else:
        got = call()
    assert error(got, want) < 1e-6


@pytest.mark.parametrize("hidden", [24, 384, 4096])
@pytest.mark.parametrize("kind", norm.KINDS)
def test_a_row_has_the_same_bits_alone_and_among_others(kind, hidden):
    """The rows of a program do not touch one another, and its shape depends on their length only."""
    a = norm_case(19, hidden, kind=kind, given="bias residual").arguments(BF16)
    run = lambda rows: norm.launch(**{**a, "x": a["x"][rows], "residual": a["residual"][rows]})
    with recording("sm_90"):
        everything = run(slice(None))
        for i in (0, 7, 18):
            for one, every in zip(run(slice(i, i + 1)), everything):
                assert one.shape[0] in (0, 1)
                assert torch.equal(one, every[i : i + 1])


def test_configure():
    """Short rows share a program, long ones have more warps; rows and warps depend on the width alone."""
    assert norm.configure(128, 2) == (32, 4)
    assert norm.configure(384, 2) == (8, 4)  # ViT-S, MiniLM
    assert norm.configure(4096, 2) == (1, 4)
    assert norm.configure(5120, 2) == norm.configure(8192, 2) == (1, 8)
    assert norm.configure(norm.MAX_HIDDEN, 4) == (1, 16)
    assert norm.configure(1, 2) == norm.configure(64, 2) == (64, 4)


def test_partial_sums_of_every_program_count():
    """More programs than rows for the last of them: their partial sums are zero, not garbage."""
    case = layer_norm_case(700, 24, "bias")
    with interpret(FEW_SMS["sm_90"]):
        a = case.arguments(torch.float32)
        y, mean, rstd = norm.launch(**a)
        grads = norm.backward_launch(torch.ones_like(y), a["x"], a["weight"], mean, rstd, "layer", 0.0, False, True, True)
    exact = to(a, torch.float64)
    exact["weight"].requires_grad_()
    (want,) = torch.autograd.grad(formula("norm", exact)["y"].sum(), exact["weight"])
    assert error(grads[1], want) < 1e-5
    assert torch.equal(grads[2], torch.full((24,), 700.0))

"""Attention where numbers are unusual: NaN that nothing sees, scales of any sign."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from attention_cases import FP8, OPTIONS, Case, at_target, error, public, with_gradients
from attention_formula import formula

import fusedblock
from fusedblock.ops import ShapeError

PATHS = ("sm_90", "sm_80")
BF16 = torch.bfloat16


@pytest.mark.parametrize("target", [*PATHS, "hopper", "short", "cpu"])
@pytest.mark.parametrize("option", ["", "bias-full", "mask-bool", "sinks"])
def test_nan_before_every_window_does_not_spread(option, target):
    """The keys that no query sees, beside others of a block."""
    given = {**OPTIONS[option]} if option else {}
    case = Case(seq=20, context=100, head_dim=64, heads=2, kv_heads=1, batch=1, window=(3, 0), dtype=BF16, **given)
    if target in ("hopper", "short") and option not in ("", "sinks"):
        case = replace(case, heads=4)  # not theirs: the portable kernels run
    x = case.inputs()
    hidden = x.with_(k=x.k.clone(), v=x.v.clone())
    for t in (hidden.k, hidden.v):
        t[:, : 100 - 20 - 3] = math.nan
    with at_target(target):
        got, want = with_gradients(public, hidden), with_gradients(public, x)
    for name in want:
        if name == "grad_q" and target in ("hopper", "short"):  # summed in any order
            torch.testing.assert_close(got[name], want[name], rtol=1e-2, atol=1e-2)
        else:
            assert torch.equal(got[name], want[name]), name
    assert (got["grad_k"][:, : 100 - 20 - 3] == 0).all() and not got["out"].isnan().any()


# by the configuration's own patch: undone by pytest's, a setting is gone for every test after
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
def test_a_window_over_keys_whose_number_comes_from_data():
    q, k, v = (torch.randn(1, n, h, 16) for n, h in ((1, 2), (40, 1), (40, 1)))
    keep = torch.arange(40) < 20

    def by_index(keep):
        i = keep.nonzero().squeeze(1)
        return fusedblock.attention(q, k[:, i], v[:, i], window=(7, 0))

    def by_length(n):
        m = n.item()
        torch._check(m >= 2)
        torch._check(m <= 40)
        return fusedblock.attention(q, k[:, :m], v[:, :m], window=(7, 0))

    want = fusedblock.attention(q, k[:, :20], v[:, :20], window=(7, 0))
    for run, given in ((by_index, keep), (by_length, torch.tensor(20))):
        torch.testing.assert_close(torch.compile(run, backend="aot_eager", fullgraph=True)(given), want)


@pytest.mark.parametrize("shape", [(), (12,), (1, 1, 12)])
def test_a_bias_of_other_axes_is_told_as_it_was_given(shape):
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 12, 1, 16)
    with pytest.raises(ShapeError, match=re.escape(f"bias has shape {shape}")):
        fusedblock.attention(q, k, k, window=(3, 0), bias=torch.zeros(shape))


@pytest.mark.parametrize("target", [*PATHS, "cpu"])
@pytest.mark.parametrize("dtype", [FP8, BF16])
@pytest.mark.parametrize("seq", [70, 1])
def test_scales_of_any_sign(seq, dtype, target):
    """A head of zeros has scale 0."""
    case = Case(seq=seq, context=80, head_dim=16, causal=True, dtype=dtype, forward=True)
    x = case.inputs()
    scales = {"q_scale": torch.tensor([[0.0, 1.0, -1.5, 2.0]]), "k_scale": torch.tensor([[1.0, -0.5], [0.0, 2.0]]),
              "v_scale": torch.tensor([[1.0, -3.0]])}  # fmt: skip
    x = replace(x, options={**x.options, **scales})
    want, _ = formula(x.changed(lambda t: t.double()))
    with at_target("sm_89" if target == "sm_80" and dtype is FP8 else target), torch.no_grad():
        got, _ = public(x)
    assert error(got, want) < 2**-8

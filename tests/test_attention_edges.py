"""Attention where numbers are unusual: NaN that nothing sees, scales of any sign."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from attention_cases import FP8, OPTIONS, Case, at_target, error, public, with_gradients
from attention_formula import formula

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

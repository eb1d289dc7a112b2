"""The interpreted kernels' gradients against finite differences, in float64, on two ragged shapes of each op."""

from __future__ import annotations

import pytest
import torch
from op_cases import SMALL, differentiable, recording
from torch import Tensor

from fusedblock.ops import OPS


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.id)
def test_gradcheck(case):
    args = case.arguments(torch.float64)
    names = differentiable(case.op, args)
    takes = OPS[case.op].backward.spec.reads
    differentiable_results = [i for i, result in enumerate(OPS[case.op].spec.writes) if f"grad_{result}" in takes]

    def call(*leaves: Tensor) -> tuple[Tensor, ...]:
        out = getattr(torch.ops.fusedblock, case.op).default(*{**args, **dict(zip(names, leaves))}.values())
        out = (out,) if isinstance(out, Tensor) else out
        return tuple(out[i] for i in differentiable_results)

    with recording("sm_90") as launches:
        # fast_mode: along random directions, since a call takes milliseconds and every element would be two.
        assert torch.autograd.gradcheck(call, [args[n].requires_grad_() for n in names], fast_mode=True, atol=1e-7, rtol=1e-5)
    assert {a.dtype for launch in launches for a in launch.arguments.values() if isinstance(a, Tensor)} == {torch.float64}

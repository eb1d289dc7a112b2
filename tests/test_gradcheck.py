"""The interpreted kernels' gradients against finite differences, in float64, on two ragged shapes of each op."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import GRADIENTS, TENSORS, Case
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
    tensors = [a for launch in launches for a in launch.arguments.values() if isinstance(a, Tensor)]
    assert {t.dtype for t in tensors} - {torch.int32} == {torch.float64}  # int32: of an index


SMALL_ATTENTION = Case(seq=5, context=7, heads=2, kv_heads=1, batch=1, lengths=((3, 4), (2, 2)), dtype=torch.float64)
ATTENTION = {
    **{f"bias-{kind}": {"bias": kind} for kind in ("full", "row")},
    "bias-both": {"bias": "both", "batch": 2},
    "bias-column": {"bias": "column", "sinks": True, "batch": 2},
    "softcap": {"softcap": 0.8},
    "window": {"window": (2, 1)},
    "alibi": {"alibi": "batch", "causal": True, "batch": 2},
    "dropout": {"dropout": 0.3},
    "prefix": {"prefix": True, "causal": True, "batch": 2},
    "packed": {"layout": "packed", "causal": True, "sinks": True},
    "block_map": {"block_map": "heads", "context": 140, "head_dim": 8},
    "seqused_k": {"seqused": True, "batch": 2},
    "values": {"v_dim": 24, "mask": "bool"},
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_gradcheck_of_attention(name):
    """Every option with a fixed seed of dropout; hidden keys are NaN, whose gradients are 0 as the differences are."""
    x = replace(SMALL_ATTENTION, **ATTENTION[name]).inputs()
    args = dict(zip(("q", "k", "v", *TENSORS), x.op_args()))
    rest = x.op_args()[len(args) :]
    names = [n for n in GRADIENTS if args[n] is not None]

    def call(*leaves: Tensor) -> Tensor:
        return torch.ops.fusedblock.attention.default(*{**args, **dict(zip(names, leaves))}.values(), *rest)[0]

    with recording("sm_90") as launches:
        leaves = [args[n].detach().requires_grad_() for n in names]
        assert torch.autograd.gradcheck(call, leaves, fast_mode=True, atol=1e-7, rtol=1e-5)
    assert launches

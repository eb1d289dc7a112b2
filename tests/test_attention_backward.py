"""The attention backward's kernels, on descriptors (sm_90) and pointers (sm_80), against the float64 formula's gradients.

out and lse come from that formula, so that nothing here depends on the forward's kernel.
"""

from __future__ import annotations

from typing import Any

import attention_cases as cases
import pytest
import torch
from attention_cases import Case, Inputs
from torch import Tensor

from fusedblock.kernels import attention_backward

PATHS = ("sm_90", "sm_80")
WANTED = ("q", "k", "v", "bias", "sinks")


def arguments(x: Inputs, out: Tensor, lse: Tensor, need: tuple[str, ...] = WANTED) -> dict[str, Any]:
    """Of the op attention_backward, for out and lse `batch heads seq` of the formula."""
    names = (*attention_backward.shared.READS, *attention_backward.shared.NUMBERS)
    known = dict(zip(names, x.op_args()))
    packed = x.case.packed
    known["grad_out"] = x.grad[None] if packed else x.grad
    known["out"] = (out[None] if packed else out).to(x.q.dtype)
    known["lse"] = (lse[None] if packed else lse).to(torch.promote_types(x.q.dtype, torch.float32))
    for n in WANTED:
        known[f"need_{n}"] = n in need and known[n] is not None
    return {n: known[n] for n in attention_backward.NAMES}


def gradients(case: Case, target: str, layout=lambda t: t, need: tuple[str, ...] = WANTED, **changes: Any) -> dict[str, Tensor]:
    want, x = cases.exact(case), case.inputs().changed(layout)
    args = {**arguments(x, want["out"], want["lse"], need), **changes}
    with cases.at_target(target):
        run = attention_backward.reference if target == "cpu" else attention_backward.launch
        grads = dict(zip((f"grad_{n}" for n in WANTED), run(**args)))
    return {n: t[0] if case.packed and n in ("grad_q", "grad_k", "grad_v") else t for n, t in grads.items() if t.numel()}


def check(case: Case, target: str) -> None:
    want, got = cases.exact(case), gradients(case, target)
    assert list(got) == [n for n, t in want.items() if n.startswith("grad_") and t.numel()]
    for name, t in got.items():
        assert t.dtype == case.inputs().tensor(name.removeprefix("grad_")).dtype, name
        error, limit = cases.error(t, want[name]), cases.limit(case, name, want[name])
        assert error <= limit, f"{name} of {case}: error {error:.2e}, at most {limit:.2e}"


def differentiable(found: list[Case]) -> list[Case]:
    return [case for case in found if not case.forward_only]


ALONE = dict.fromkeys([Case(), *differentiable(cases.alone())])


@pytest.mark.parametrize("target", (*PATHS, "cpu"))
@pytest.mark.parametrize("case", ALONE, ids=str)
def test_each_option(case, target):
    check(case, target)


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("case", differentiable(cases.alone(dtype=torch.bfloat16, causal=True)), ids=str)
def test_each_option_in_bf16(case, target):
    check(case, target)

"""The experts' gradients where TMA does not take the weights, of more than one tile of columns: then tiles are narrower, and the
routing weights' gradient is a sum over more parts."""

from __future__ import annotations

import pytest
import torch
from op_cases import Case, assert_accurate, check, formula, moe_case, moe_linear_case, recording, to, with_gradients
from torch import Tensor

BF16 = torch.bfloat16
SIZES = {"tokens": 150, "experts": 3, "top_k": 2, "tile_rows": 128}
ODD = [
    moe_case(**SIZES, hidden=36, ffn=300), moe_case(**SIZES, hidden=73, ffn=131, bias=True),
    moe_case(**SIZES, hidden=36, ffn=136, laid="transposed"), moe_case(**SIZES, hidden=36, ffn=300, laid="interleaved"),
    moe_linear_case(**SIZES, inner=300, outer=72, sums=True),
    moe_linear_case(**SIZES, inner=136, outer=36, sums=True, given="transposed"),
]  # fmt: skip
EVEN = [moe_case(**SIZES, hidden=72, ffn=136), moe_linear_case(**SIZES, inner=136, outer=72, sums=True)]


@pytest.mark.parametrize("case", ODD, ids=lambda c: c.id)
def test_odd_sizes(case: Case) -> None:
    check(case, BF16, "sm_90")


def shifted(t: Tensor) -> Tensor:
    """A view one element into its storage."""
    return torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape)


def elsewhere(t: Tensor) -> Tensor:
    """The whole of a storage that begins at an odd address."""
    memory = bytearray(t.numel() * 2 + 16)
    first = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 16 + 2
    found = torch.frombuffer(memory, dtype=t.dtype, offset=first, count=t.numel()).view(t.shape)
    assert found.data_ptr() % 16 == 2 and found.storage_offset() == 0
    return found.copy_(t)


@pytest.mark.parametrize("move", [shifted, elsewhere])
@pytest.mark.parametrize("case", EVEN, ids=lambda c: c.op)
def test_weights_at_odd_addresses(case: Case, move: object) -> None:
    args = case.arguments(BF16)
    name = "down_weight" if case.op == "moe_experts" else "weight"
    moved = {**args, name: move(args[name])}  # type: ignore[operator]
    with recording("sm_90"):
        got = with_gradients(case.op, moved)
    want = with_gradients(case.op, to(args, torch.float64), formula)
    assert_accurate(got, {n: t for n, t in want.items() if n in got}, with_gradients(case.op, args), BF16)

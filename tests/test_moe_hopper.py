"""The Hopper products of the experts: their values on the model of an SM, and what the compiler makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from moe_cases import make_index
from torch import Tensor

from fusedblock.interpret import interpret
from fusedblock.kernels import _moe, _moe_hopper
from fusedblock.kernels._target import TARGETS

BF16, FP16 = torch.bfloat16, torch.float16
HOPPER = TARGETS["sm_90"]
FEW = replace(HOPPER, sms=3)  # so that a program has several tiles
CONFIG = _moe.Config(256, 64, 8, 4, tma=True, hopper=True)


@dataclass(frozen=True)
class Case:
    """counts: rows of each expert."""

    counts: tuple[int, ...]
    hidden: int = 136
    ffn: int = 72
    dtype: torch.dtype = BF16
    top_k: int = 2
    activation: str = "silu"
    bias: bool = False
    save: bool = True
    claims: bool = True

    def __str__(self) -> str:
        words = "".join(f"-{name}" for name in ("bias", "save", "claims") if getattr(self, name))
        counts = ".".join(map(str, self.counts))
        return f"{counts}-{self.hidden}x{self.ffn}-{str(self.dtype)[6:]}-{self.activation}{words}"

    def make(self) -> dict[str, Any]:
        g = torch.Generator().manual_seed(sum(self.counts))
        experts, rows = len(self.counts), sum(self.counts)
        expert = torch.repeat_interleave(torch.arange(experts), torch.tensor(self.counts))[torch.randperm(rows, generator=g)]

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=g) * scale).to(self.dtype)

        return {
            "x": draw(rows // self.top_k, self.hidden + 8)[:, : self.hidden],
            "gate_up_weight": draw(experts, 2 * self.ffn, self.hidden, scale=self.hidden**-0.5),
            "gate_up_bias": draw(experts, 2 * self.ffn) if self.bias else None,
            "activation": self.activation, "alpha": 1.702, "limit": 1.5,
            **make_index(expert.int().view(-1, self.top_k), experts, 128),
        }  # fmt: skip

    def sizes(self, args: dict[str, Any]) -> dict[str, int]:
        return {"ffn": self.ffn, "hidden": self.hidden, "top_k": self.top_k, "max_tiles": len(args["tiles"])}

    def counter(self) -> Tensor | None:
        return torch.zeros(1, dtype=torch.int32) if self.claims else None


def activated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if activation == _moe.CLAMPED:
        gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return {"silu": torch.nn.functional.silu, "relu2": lambda x: x.relu() ** 2}[activation](gate) * up


def by_expert(a: Tensor, w: Tensor, bias: Tensor | None, counts: tuple[int, ...]) -> Tensor:
    """a @ w[e].T + bias[e] in float64, row by row."""
    parts = [rows.double() @ w[e].double().T for e, rows in enumerate(a.split(counts))]
    return torch.cat([p if bias is None else p + bias[e].double() for e, p in enumerate(parts)])


def close(found: Tensor, expected: Tensor) -> None:
    unit = 2.0**-8 if found.dtype is BF16 else 2.0**-11
    assert ((found.double() - expected).abs() <= unit * expected.abs() + 1e-5).all()


def check_gate_up(case: Case, seed: int, launch: Any = None, target: Any = FEW) -> None:
    args = case.make()
    rows = sum(case.counts)
    h, saved = (torch.full((rows + 1, n), float("nan"), dtype=case.dtype) for n in (case.ffn, 2 * case.ffn))
    with interpret(target, seed=seed):
        (launch or _moe_hopper.gate_up_hopper_launch)(
            args["x"], args["gate_up_weight"], h[:rows], saved[:rows] if case.save else None, args, case.sizes(args), 8,
            case.counter(),
        )  # fmt: skip
    expected = by_expert(args["x"][args["order"].long() // case.top_k], args["gate_up_weight"], args["gate_up_bias"], case.counts)
    close(h[:rows], activated(*expected.chunk(2, 1), case.activation))
    if case.save:
        close(saved[:rows], expected)
    assert h[rows:].isnan().all() and saved[rows:].isnan().all()


def check_rows(case: Case, seed: int, by_columns: bool = False, launch: Any = None, target: Any = FEW) -> None:
    args, rows = case.make(), sum(case.counts)
    g = torch.Generator().manual_seed(1)
    a = torch.randn(rows, case.ffn, generator=g).to(case.dtype)
    w = (torch.randn(len(case.counts), case.hidden, case.ffn, generator=g) * case.ffn**-0.5).to(case.dtype)
    bias = torch.randn(len(case.counts), case.hidden, generator=g).to(case.dtype) if case.bias else None
    y = torch.full((rows + 1, case.hidden), float("nan"), dtype=case.dtype)
    stored = w.mT.contiguous() if by_columns else w
    with interpret(target, seed=seed):
        (launch or _moe_hopper.rows_hopper_launch)(
            a, stored, bias, y[:rows], args, case.sizes(args), by_columns, 8, case.counter()
        )  # fmt: skip
    close(y[:rows], by_expert(a, w, bias, case.counts))
    assert y[rows:].isnan().all()


TAILS = (1, 63, 64, 65, 127, 128)
QUICK = [
    Case(TAILS, save=False),
    Case((0, 130, 0, 192, 0, 2), ffn=200, hidden=64, bias=True, dtype=FP16, activation=_moe.CLAMPED),
    Case((384, 40), hidden=520, ffn=128, top_k=1, claims=False),
    Case((0, 300), hidden=8, ffn=8, activation="relu2", bias=True),
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_gate_up(case: Case) -> None:
    for seed in range(2):
        check_gate_up(case, seed)


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_rows(case: Case, by_columns: bool) -> None:
    for seed in range(2):
        check_rows(case, seed, by_columns)

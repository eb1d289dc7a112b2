"""The Hopper products of the experts: their values on the model of an SM, and what the compiler makes of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aot
import mutants
import pytest
import torch
from moe_cases import make_index
from torch import Tensor

from fusedblock.interpret import count_traffic, interpret
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

    def __str__(self) -> str:
        words = "".join(f"-{name}" for name in ("bias", "save") if getattr(self, name))
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
            args["x"], args["gate_up_weight"], h[:rows], saved[:rows] if case.save else None, args, case.sizes(args)
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
            a, stored, bias, y[:rows], args, case.sizes(args), by_columns
        )  # fmt: skip
    close(y[:rows], by_expert(a, w, bias, case.counts))
    assert y[rows:].isnan().all()


TAILS = (1, 63, 64, 65, 127, 128)
QUICK = [
    Case(TAILS, save=False),
    Case((0, 130, 0, 192, 0, 2), ffn=200, hidden=64, bias=True, dtype=FP16, activation=_moe.CLAMPED),
    Case((384, 40), hidden=520, ffn=128, top_k=1),
    Case((0, 300), hidden=8, ffn=8, activation="relu2", bias=True),
    Case((1, 130, 200, 64, 0, 65, 257, 33) * 3, hidden=264, ffn=136, save=False),
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


@pytest.mark.parametrize("sms", [1, 2, 7, 99])
def test_programs(sms: int) -> None:
    """Every tile is some program's; of either kind none has two more than another; who has one more: first ones, or last ones."""
    case = Case((40, 130, 300, 64, 0, 129, 257, 128, 1, 150), hidden=520, ffn=64, top_k=1)
    args, found = case.make(), []
    rows = sum(case.counts)
    a, w, y = torch.zeros(rows, 64, dtype=BF16), torch.zeros(10, 520, 64, dtype=BF16), torch.ones(rows, 520, dtype=BF16)
    with interpret(replace(HOPPER, sms=sms), on_access=[lambda access: found.append((access.program, access.region.name))]):
        _moe_hopper.rows_hopper_launch(a, w, None, y, args, case.sizes(args), False)
    assert (y == 0).all()
    programs = range(min(sms, 3 * len(args["tiles"])))
    both = [found.count((p, "w")) for p in programs]  # of one step of K: one block of weights a tile, one or two of rows
    full = [found.count((p, "a")) - n for p, n in zip(programs, both)]
    short = [n - f for n, f in zip(both, full)]
    assert (sum(full), sum(short)) == (3 * 8, 3 * 8)
    assert full == sorted(full, reverse=True) and full[0] - full[-1] <= 1
    assert short == sorted(short) and short[-1] - short[0] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 10))
def test_more_orders(seed: int) -> None:
    for case in QUICK[:2]:
        check_gate_up(case, seed)
        check_rows(case, seed)


# It leaves no barrier half full at the end: no result depends on it.
FREE = {"_producer: bar_sync(8 + c, THREADS)"}


@pytest.mark.parametrize("name, line", mutants.statements(_moe_hopper))
def test_a_kernel_without_one_of_its_synchronisations_fails(name: str, line: int, tmp_path: Path) -> None:
    # Of more steps than stages, and of one step: then the numbers of tiles are posted as fast as they are taken.
    cases = [Case((192, 60, 130), hidden=328, ffn=328, save=False), Case((64, 130, 1, 1), hidden=64, ffn=64, save=False)]
    one = replace(HOPPER, sms=1)
    with mutants.without(_moe_hopper, line, tmp_path) as mutant, mutants.fails(name not in FREE):
        for seed in range(2 if name in FREE else 6):
            for case in cases:
                check_gate_up(case, seed, mutant.gate_up_hopper_launch, one)
                check_rows(case, seed, launch=mutant.rows_hopper_launch, target=one)


def test_a_tail_reads_half() -> None:
    """Rows past the first 64 of a tile are read where it has more, weights once for every tile."""
    case = Case((64, 65, 127), hidden=64, ffn=128)
    args = case.make()
    a, y = torch.zeros(256, 128, dtype=BF16), torch.empty(256, 64, dtype=BF16)
    w = torch.zeros(3, 64, 128, dtype=BF16)
    with count_traffic(FEW) as traffic:
        _moe_hopper.rows_hopper_launch(a, w, None, y, args, case.sizes(args), False)
    (launch,) = traffic.launches
    assert launch.argument("a").issued_read_bytes == (64 + 128 + 127) * 256
    assert launch.argument("w").issued_read_bytes == w.nbytes
    assert launch.argument("y").issued_written_bytes == y.nbytes


def test_nothing_to_do() -> None:
    """Without a tile, and with an expert that the last tile does not need."""
    case = Case((0, 0, 2))
    args = case.make()
    args["tiles"] = torch.zeros_like(args["tiles"])
    h = torch.full((2, case.ffn), float("nan"), dtype=BF16)
    with interpret(FEW):
        _moe_hopper.gate_up_hopper_launch(args["x"], args["gate_up_weight"], h, None, args, case.sizes(args))
    assert h.isnan().all()


@pytest.mark.parametrize("change, expected", [
    ({}, True), ({"config": replace(CONFIG, hopper=False)}, False), ({"config": replace(CONFIG, tma=False)}, False),
    ({"target": TARGETS["sm_100"]}, False), ({"target": replace(HOPPER, broken="a test")}, False), ({"k": 60}, False),
    ({"n": 60}, False), ({"dtype": torch.float32}, False), ({"wide": 68}, False),
    # More than 12 tiles of columns want 512 rows of an expert on average.
    ({"n": 12 * 256, "rows": 511}, True), ({"n": 12 * 256 + 8, "rows": 511}, False), ({"n": 12 * 256 + 8, "rows": 512}, True),
])  # fmt: skip
def test_what_fits(change: dict[str, Any], expected: bool) -> None:
    known = {"config": CONFIG, "target": HOPPER, "k": 64, "n": 64, "dtype": BF16, "wide": 64, "rows": 9, **change}
    sizes = {"rows": 3 * known["rows"], "experts": 3}
    a = torch.empty(4, known["wide"], dtype=known["dtype"])[:, :64]
    assert _moe_hopper.fits(known["config"], known["target"], sizes, known["k"], known["n"], 256, a) is expected


# ---- what the compiler makes of it -------------------------------------------------------------------------------------------


def compiled(kind: str, bias: bool = False, save: bool = False, dtype: torch.dtype = BF16) -> Any:
    """Of sizes like Qwen3-30B-A3B's, but for K and N that are multiples of 8 alone."""
    case = Case((0,) * 128, 2040, 760, dtype, top_k=8, bias=bias)

    def meta(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    rows, experts = 4096 * 8, 128
    args = {"order": meta(rows, of=torch.int32), "tiles": meta(384, 4, of=torch.int32), "activation": "silu"}
    args["gate_up_bias"] = meta(experts, 2 * case.ffn) if bias else None
    with aot.compile_only(HOPPER) as kernels:
        if kind == "gate_up":
            h, saved = meta(rows, case.ffn), meta(rows, 2 * case.ffn)
            w = meta(experts, 2 * case.ffn, case.hidden)
            _moe_hopper.gate_up_hopper_launch(
                meta(4096, case.hidden), w, h, saved if save else None, args, case.sizes(args)
            )  # fmt: skip
        else:
            w = meta(experts, *((case.ffn, case.hidden) if kind == "by_columns" else (case.hidden, case.ffn)))
            b, y = meta(experts, case.hidden) if bias else None, meta(rows, case.hidden)
            _moe_hopper.rows_hopper_launch(
                meta(rows, case.ffn), w, b, y, args, case.sizes(args), kind == "by_columns"
            )  # fmt: skip
    (kernel,) = kernels
    return kernel


later = lambda *values: pytest.param(*values, marks=pytest.mark.slow)  # noqa: E731


@pytest.mark.parametrize("kind, bias, save, dtype", [
    ("gate_up", False, True, BF16), ("rows", False, False, BF16), later("gate_up", False, False, BF16),
    later("gate_up", True, True, FP16), later("rows", True, False, FP16), later("by_columns", False, False, BF16),
])  # fmt: skip
def test_machine_code(kind: str, bias: bool, save: bool, dtype: torch.dtype) -> None:
    kernel = compiled(kind, bias, save, dtype)
    assert aot.problems([kernel], HOPPER, wgmma=True, max_spill_bytes=aot.spills(0)) == []
    used = aot.resources(kernel)
    assert (used.registers, used.num_warps) == (168, 12)
    ptx, gathered = kernel.asm["ptx"], kind == "gate_up"
    # A stage is full after TMA's arrival and those of the 128 threads that copy rows; a number is taken by two consumers.
    counts = [int(n) for n in re.findall(r"mbarrier\.init\.shared::cta\.b64 \[%r\d+\], (\d+);", ptx)]
    assert counts == [129 if gathered else 1] * 4 + [1, 1, 2, 2]
    assert len(re.findall(r"cp\.async\.mbarrier\.arrive\.noinc", ptx)) == gathered
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?, 0x(\d+),", ptx)
    assert copies == ["10"] * (8 * gathered)
    assert set(re.findall(r"st\.global(\S*)", ptx)) == {".v4.b32"}
    code = aot.sass(kernel)
    if code is None:
        pytest.skip("triton brings no disassembler here")
    assert "USETMAXREG" in code and not re.search(r"\bHMMA\b", code)
    assert aot.spills(0) or not re.search(r"\b(LDL|STL)\b", code)
    # The loop of each consumer: its four products are issued before those of the step before are waited for.
    loops = [block for block in re.split(r"^\.L_x_\d+:", code, flags=re.MULTILINE) if "BAR.ARV" in block and "HGMMA" in block]
    assert len(loops) == 2
    for loop in loops:
        assert re.findall(r"HGMMA|gsb0, 0x\d|BAR\.ARV", loop) == ["HGMMA"] * 4 + ["gsb0, 0x1", "BAR.ARV"]

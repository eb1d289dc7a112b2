"""The Hopper forward of attention with lengths that the device alone knows: its values, its schedule, its machine code."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import aot
import pytest
import torch
from test_attention_hopper import BF16, FEW, FP16, HOPPER, Case, compare, formula, later, machine_code, slow
from torch import Tensor

from fusedblock.interpret import interpret
from fusedblock.kernels import _attention_tiles, _hopper_schedule, attention_hopper


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def bounds(lengths: list[int]) -> Tensor:
    return ints([sum(lengths[:i]) for i in range(len(lengths) + 1)])


@dataclass(frozen=True)
class Packed:
    """Sequences of a case's kind, whose queries and keys lie one after the other."""

    case: Case  # its seq and context do not count
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    rest: tuple[int, int] = (0, 0)  # queries and keys after the last boundary

    def __str__(self) -> str:
        return f"{','.join(map(str, self.queries))}-of-{','.join(map(str, self.keys))}-{str(self.case).split('-', 1)[1]}"

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = replace(self.case, seq=sum(self.queries) + self.rest[0], context=sum(self.keys) + self.rest[1]).inputs()
        for t in (k, v):
            t[:, sum(self.keys) :] = float("nan")  # nobody's
        return q, k, v

    def formula(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
        lse = torch.full((1, q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float64)
        sinks = self.case.sink_logits()
        if sinks is not None:
            lse[:] = sinks.double()[:, None]
        row = key = 0
        for n, m in zip(self.queries, self.keys):
            at, to = slice(row, row + n), slice(key, key + m)
            if n:
                out[:, at], lse[:, :, at] = formula(replace(self.case, seq=n, context=m), q[:, at], k[:, to], v[:, to])
            row, key = row + n, key + m
        return out, lse


def launch(packed: Packed, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> tuple[Tensor, Tensor]:
    case = packed.case
    return attention_hopper.launch(
        q, k, v, case.sink_logits(q.device), *case.bounds, case.head_dim**-0.5, case.softcap, cu_q, cu_k
    )  # fmt: skip


def check(packed: Packed, seed: int) -> None:
    q, k, v = packed.inputs()
    with interpret(FEW, seed=seed):
        out, lse = launch(packed, q, k, v, bounds(list(packed.queries)), bounds(list(packed.keys)))
    compare(packed.case, out, lse, *packed.formula(q, k, v))


ONE = Case(0, 0)
CASES = [
    Packed(ONE, (130, 0, 1, 70), (130, 0, 1, 70)),
    Packed(ONE, (200, 5), (90, 300), rest=(150, 40)),
    Packed(replace(ONE, causal=False, dtype=FP16), (60, 129, 3), (200, 0, 7), rest=(2, 2)),
    Packed(replace(ONE, window=(40, 0), sinks=True), (150, 30, 1), (150, 190, 40), rest=(1, 0)),
    Packed(replace(ONE, window=(-1, 20), dtype=FP16), (40, 200), (1, 100)),
    Packed(replace(ONE, softcap=1.0, head_dim=128, heads=4, kv_heads=2), (128, 33), (128, 33)),
    Packed(replace(ONE, head_dim=256), (70, 100), (100, 70)),
    Packed(replace(ONE, head_dim=192, v_dim=128, sinks=True), (130, 3, 0, 40), (150, 0, 30, 200), rest=(5, 2)),
    Packed(ONE, (0, 0), (0, 0), rest=(3, 3)),
    Packed(ONE, (1,) * 9, (1, 5, 0, 2, 64, 128, 129, 3, 7)),
]


@pytest.mark.parametrize("packed", [*CASES[:5], *slow(CASES[5:])], ids=str)
def test_values(packed: Packed):
    check(packed, 0)


def test_values_where_the_table_has_gaps(monkeypatch: pytest.MonkeyPatch):
    packed = Packed(replace(ONE, heads=3, kv_heads=3), (300, 0, 1, 128), (300, 0, 1, 128))
    q, k, v = packed.inputs()
    tables = []
    order = attention_hopper.order
    monkeypatch.setattr(attention_hopper, "order", lambda *args: tables.append(args[5]) or order(*args))
    with interpret(replace(FEW, l2_bytes=1)):  # which holds no two heads: one comes after the other
        out, lse = launch(packed, q, k, v, bounds(list(packed.queries)), bounds(list(packed.keys)))
    entries = tables[0][..., 0]
    assert ((entries[1:] >= 0) & (entries[:-1] < 0)).any()
    compare(packed.case, out, lse, *packed.formula(q, k, v))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("packed", CASES, ids=str)
def test_values_in_more_orders(packed: Packed, seed: int):
    check(packed, seed)


@pytest.mark.parametrize("cu_q, cu_k", [
    ([0, 100, 90, 200], [0, 50, 60, 70]), ([0, 100, 150, 201], [0, 50, 60, 70]), ([0, 100, 150, 200], [0, 80, 60, 70]),
    ([0, 100, 150, 200], [0, 50, 60, 71]), ([1, 100, 150, 200], [0, 50, 60, 70]), ([0, 10, 20, -5], [0, 50, 60, 70]),
])  # fmt: skip
def test_impossible_boundaries(cu_q: list[int], cu_k: list[int]):
    packed = Packed(Case(0, 0), (200,), (70,))
    with interpret(FEW):
        out, lse = launch(packed, *packed.inputs(), ints(cu_q), ints(cu_k))
    assert out.isnan().all() and lse.isnan().all()


def test_keys_in_use():
    case = Case(70, 200, batch=5, kv_heads=2, softcap=2.0)
    q, k, v = case.inputs()
    q = q.contiguous()
    used = [200, 0, 64, 201, 130]
    for b, n in enumerate(used):
        for t in (k, v):
            t[b, n:] = float("nan")
    assert attention_hopper.unfit(FEW, q.dtype, 64, 64) == _hopper_schedule.unfit_rows(q, k, v) == ""
    with interpret(FEW, seed=1):
        out, lse = attention_hopper.launch(
            q, k, v, None, *case.bounds, case.head_dim**-0.5, case.softcap, seqused_k=ints(used)
        )  # fmt: skip
    for b, n in enumerate(used):
        if n > 200:
            assert out[b].isnan().all() and lse[b].isnan().all()
        else:
            one = replace(case, batch=1, context=n)
            at = slice(b, b + 1)
            compare(one, out[at], lse[at], *formula(one, q[at], k[at, :n], v[at, :n]))


def test_refusal_of_keys_in_use():
    q, k, v = Case(70, 200, batch=2).inputs()
    odd = torch.empty(70 * 600 + 8 + 600 * 70).as_strided((2, 70, 2, 64), (70 * 600 + 8, 600, 64, 1)).to(BF16)
    odd = odd.new_empty(2 * (70 * 600 + 8)).as_strided(odd.shape, (70 * 600 + 8, 600, 64, 1))
    assert attention_hopper.unfit(HOPPER, q.dtype, 64, 64) == ""
    message = _hopper_schedule.unfit_rows(odd, k, v)
    assert message == f"q has strides {odd.stride()} with seqused_k, which are not those of one sequence after the other"
    cache = torch.empty(2, 300, 1, 64, dtype=BF16)[:, :200]
    message = _hopper_schedule.unfit_rows(q.contiguous(), k, cache)
    apart = "their sequences are not equally far apart"
    assert message == f"k has strides {k.stride()} with seqused_k and v {cache.stride()}: {apart}"


def test_keys_in_use_of_one_sequence():
    case = Case(70, 200)
    q, k, v = case.inputs()
    assert attention_hopper.unfit(FEW, q.dtype, 64, 64) == _hopper_schedule.unfit_rows(q, k, v) == ""
    with interpret(FEW, seed=1):
        found = attention_hopper.launch(q, k, v, None, *case.bounds, 0.125, seqused_k=ints([130]))
    compare(case, *found, *formula(replace(case, context=130), q, k[:, :130], v[:, :130]))


# ---- the table of tiles ------------------------------------------------------------------------------------------------------


def columns(lengths: list[int], heads: int, section: int, programs: int, left: int = -1, right: int = 0) -> list[list[list[int]]]:
    """The rows of each program."""
    cu, tokens = bounds(lengths), sum(lengths)
    slots = _attention_tiles.schedule_slots(tokens, len(lengths), 128)
    rounds, programs = _hopper_schedule.plan_shape(slots, heads, section, programs)
    planned = torch.empty(slots, 6, dtype=torch.int32)
    table = torch.full((rounds, programs, _hopper_schedule.FIELDS), 99, dtype=torch.int32)
    seen = _hopper_schedule.Bounds(left, right, 128, tokens, 0, tokens)
    with interpret():
        _attention_tiles.schedule(cu, cu, None, tokens, tokens, 128, planned)
        _hopper_schedule.order(planned, None, seen, heads, section, table, 1)
    assert (table[-1, :, 0] == -1).all() and (table[..., 0] < heads).all()
    return [[row for row in column if row[0] >= 0] for column in table[..., :6].transpose(0, 1).tolist()]


def blocks(row: list[int], left: int = -1) -> int:
    first = row[1] + row[5] - row[3]
    return -(-min(row[5], first + 128) // 128) - (max(first - left, 0) // 128 if left >= 0 else 0)


@pytest.mark.parametrize("left", [-1, 200])
def test_plan_has_every_tile_once(left: int):
    lengths = [300, 0, 1, 128, 129, 700]
    found = sorted(row for column in columns(lengths, 3, 2, 4, left) for row in column)
    starts = bounds(lengths).tolist()
    expected = [
        [head, row, start, n, start, n] for head in range(3) for start, n in zip(starts, lengths) for row in range(0, n, 128)
    ]  # fmt: skip
    assert found == sorted(expected)


@pytest.mark.parametrize("lengths, worst", [
    ([4000, 900, 2300, 120, 1700, 64, 3100, 600], 1.03), pytest.param([6000] + [50] * 40, 1.02, marks=pytest.mark.slow),
])  # fmt: skip
def test_plan_is_balanced(lengths: list[int], worst: float):
    programs = 12
    table = columns(lengths, 8, 2, programs)
    work = [sum(blocks(row) + 1.5 for row in column) for column in table]
    assert max(work) <= worst * sum(work) / programs
    for column in table:
        sections = [row[0] // 2 for row in column]
        assert sections == sorted(sections)  # heads that share the L2 run together
        for section in range(4):
            sizes = [blocks(row) for row in column if row[0] // 2 == section]
            assert sizes == sorted(sizes, reverse=True)


# ---- what the compiler makes of it ---------------------------------------------------------------------------------------------


# With their bytes of spills.
AOT_CASES = [
    (Case(32768, 32768, head_dim=64), 0),
    (Case(32768, 32768, head_dim=128), 0),
    (Case(32768, 32768, head_dim=256), 0),
    (Case(32768, 32768, head_dim=128, causal=False, dtype=FP16), 0),
    (Case(32768, 32768, head_dim=64, window=(127, 0), sinks=True), 0),
    (Case(32768, 32768, head_dim=128, window=(127, 0), sinks=True), 0),
    (Case(32768, 32768, head_dim=128, softcap=30.0), 0),
    (Case(32768, 32768, head_dim=128, softcap=30.0, window=(4095, 0)), 80),
    (Case(32768, 32768, head_dim=256, softcap=30.0, window=(4095, 0)), 0),
    (Case(32768, 32768, head_dim=192, v_dim=128), 0),
    (Case(32768, 32768, head_dim=192, v_dim=128, causal=False, dtype=FP16), 0),
    (Case(32768, 32768, head_dim=192, v_dim=128, sinks=True, softcap=30.0), 0),
    (Case(32768, 32768, head_dim=192, v_dim=128, window=(1023, 0)), 96),
]


@pytest.mark.parametrize("case, spills", [*map(later, AOT_CASES)], ids=str)
def test_machine_code(case: Case, spills: int):
    case = replace(case, heads=32, kv_heads=8)
    cu = torch.empty(17, dtype=torch.int32, device="meta")
    with aot.compile_only(HOPPER) as kernels:
        launch(Packed(case, (), ()), *case.inputs("meta"), cu, cu)
    assert [kernel.name for kernel in kernels] == ["_schedule_kernel", "_order_kernel", "_forward_kernel"]
    assert aot.problems(kernels[2:], HOPPER, wgmma=True, max_spill_bytes=aot.spills(spills)) == []
    code = machine_code(kernels[2])
    if spills == 0:
        assert not re.search(r"\b(LDL|STL)\b", code)

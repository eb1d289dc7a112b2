"""The Hopper attention kernels with a block map: on the model of an SM, and what the compiler makes of them."""

from __future__ import annotations

import math
from dataclasses import replace

import aot
import pytest
import torch
from attention_cases import HOPPER, Case, check, error, exact, limit, public, with_gradients
from attention_formula import formula
from test_attention_hopper import Case as Shape
from test_attention_hopper import machine_code
from test_attention_skeletons import BF16, FP16, named, rows
from torch import Tensor

import fusedblock
from fusedblock.interpret import count_traffic, interpret
from fusedblock.kernels import _hopper_map, attention_hopper, attention_hopper_backward
from fusedblock.kernels._attention_skeleton import skeleton_of
from fusedblock.kernels._target import override


def slow(cases: list) -> list:
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


# ---- values ------------------------------------------------------------------------------------------------------------------

SMALL = {"seq": 140, "context": 270, "head_dim": 64, "dtype": BF16, "heads": 2, "kv_heads": 1, "batch": 1}
GROUPS = {**SMALL, "seq": 300, "context": 420, "heads": 4, "kv_heads": 2, "batch": 2}
QUICK = [
    Case(**SMALL, block_map="heads"),
    Case(**{**SMALL, "head_dim": 128}, block_map="heads", causal=True),
    Case(**{**GROUPS, "batch": 3, "seq": 70, "context": 150}, block_map="full", window=(30, 20), sinks=True),
]
CASES = [
    Case(**GROUPS, block_map="full"), Case(**{**GROUPS, "dtype": FP16}, block_map="both", causal=True),
    Case(**{**GROUPS, "head_dim": 128}, block_map="full", softcap=0.7),
    Case(**{**GROUPS, "head_dim": 128, "seq": 420, "context": 300}, block_map="heads", causal=True, sinks=True),
    Case(**{**GROUPS, "head_dim": 128}, block_map="full", window=(150, 20)), Case(**GROUPS, block_map="heads", window=(128, -1)),
    Case(**{**GROUPS, "context": 900}, block_map="both", window=(100, 0), softcap=1.0),
    Case(**{**SMALL, "head_dim": 256}, block_map="heads", causal=True), Case(**{**SMALL, "head_dim": 256}, block_map="heads"),
    Case(**{**SMALL, "head_dim": 256, "context": 400}, block_map="heads", window=(100, 10), sinks=True),
    Case(**{**SMALL, "head_dim": 192, "v_dim": 128}, block_map="heads", causal=True),
    Case(**{**GROUPS, "head_dim": 192, "v_dim": 128, "batch": 1}, block_map="both", window=(150, 20)),
    Case(**{**SMALL, "seq": 1, "context": 1}, block_map="heads"),
    Case(**{**SMALL, "seq": 256, "context": 128}, block_map="heads"),
]  # fmt: skip


@pytest.mark.parametrize("case", [*QUICK, *slow(CASES)], ids=str)
def test_values(case: Case, launched: list[str]):
    check(case, "hopper")
    assert launched.count("attention_hopper") == 1 and "attention_backward" not in launched
    assert {"attention_hopper_backward", "_attention_hopper_parts"} <= set(launched)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("case", [QUICK[0], QUICK[1], CASES[4], CASES[7]], ids=str)
def test_values_in_more_orders(case: Case, seed: int):
    with interpret(HOPPER, seed=seed):
        got = with_gradients(public, case.inputs())
    for name, want in exact(case).items():
        assert error(got[name], want) <= limit(case, name, want), name


def test_values_of_forms_that_are_not_chosen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(attention_hopper_backward.PARTS, 128, 64)
    check(QUICK[1], "hopper")


HAND_MADE = torch.tensor([
    [[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1]],  # the second block of queries sees nothing, nobody the second of keys
    [[0, 0, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]],  # and of the other key head nobody the last
]).bool()  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 128, *slow([256])])
@pytest.mark.parametrize("option", [
    {"context": 512}, {"causal": True}, {"window": (9, 4)}, *slow([{}, {"sinks": True}, {"window": (128, 128)}])
], ids=str)  # fmt: skip
def test_queries_that_see_nothing_and_keys_that_nobody_sees(head_dim: int, option: dict):
    """NaN in the keys and values of blocks that no query sees reaches nothing."""
    case = Case(**{**SMALL, "seq": 300, "context": 428, "kv_heads": 2, "head_dim": head_dim, **option})
    x = case.inputs()
    k, v = x.k.clone(), x.v.clone()
    for t in (k, v):
        t[:, 128:256], t[:, 384:, 1] = math.nan, math.nan
    case = replace(case, block_map="heads")
    x = replace(x, case=case).with_(k=k, v=v, block_map=HAND_MADE[None])
    want = with_gradients(formula, x.changed(lambda t: t.double() if t.is_floating_point() else t))
    with interpret(HOPPER):
        got = with_gradients(public, x)
    for name, t in want.items():
        assert error(got[name], t) < (1e-5 if name == "lse" else 1e-2), name
    assert (got["out"][:, 128:256, 0] == 0).all() and (got["grad_q"][:, 128:256, 0] == 0).all()
    assert (got["grad_k"][:, 128:256] == 0).all() and (got["grad_v"][:, 384:, 1] == 0).all()


@pytest.mark.parametrize("head_dim", [64, *slow([256])])
def test_nan_before_every_window(head_dim: int):
    """In a block whose other keys count."""
    case = Case(**{**SMALL, "head_dim": head_dim}, block_map="heads", window=(3, 0))
    x = case.inputs().with_(block_map=torch.ones(1, 2, 2, 3, dtype=torch.bool))
    hidden = x.with_(k=x.k.clone(), v=x.v.clone())
    for t in (hidden.k, hidden.v):
        t[:, : 270 - 140 - 3] = math.nan
    with interpret(HOPPER):
        got, want = with_gradients(public, hidden), with_gradients(public, x)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-2, atol=1e-2)  # grad_q is summed in any order
    assert (got["grad_k"][:, : 270 - 140 - 3] == 0).all()


def test_blocks_that_the_map_leaves_out_are_not_read():
    case = Case(**{**SMALL, "seq": 384, "context": 512}, block_map="both")
    x = case.inputs()
    block_map = torch.zeros(1, 1, 3, 4, dtype=torch.bool)
    block_map[0, 0, 1, 1:3] = block_map[0, 0, 2, 3] = True
    with count_traffic(HOPPER) as traffic:
        out, lse = attention_hopper.launch(x.q, x.k, x.v, None, -1, -1, 0.125, block_map=block_map)
        attention_hopper_backward.launch(x.q, x.k, x.v, out, lse, x.grad, None, None, -1, -1, 0.125, block_map=block_map)
    forward, _, products, _ = traffic.launches
    for name in "kv":
        assert forward.argument(name).read_bytes == 3 * 128 * 64 * 2
        assert forward.argument(name).issued_read_bytes == 2 * 3 * 128 * 64 * 2  # both heads
    assert products.argument("q").read_bytes == 2 * 2 * 128 * 64 * 2
    assert products.argument("q").issued_read_bytes == 2 * 3 * 128 * 64 * 2


# ---- lists -------------------------------------------------------------------------------------------------------------------


def pairs(block_map: Tensor, seq: int, context: int, left: int, right: int) -> Tensor:
    """Which key each query sees, "batch heads seq context"."""
    seen = block_map.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :seq, :context].clone()
    for i in range(seq):
        place = i + context - seq
        if right >= 0:
            seen[:, :, i, max(place + right + 1, 0) :] = False
        if left >= 0:
            seen[:, :, i, : max(place - left, 0)] = False
    return seen


def tiles_of(seen: Tensor, rows: int, columns: int) -> list[list[list[set[int]]]]:
    """For every batch entry, head and tile of rows the tiles of columns that one of them sees."""
    return [[[{j // columns for j in part.any(0).nonzero().flatten().tolist()} for part in head.split(rows)] for head in entry]
            for entry in seen]  # fmt: skip


@pytest.mark.parametrize("seq, context", [(300, 420), (420, 300), (128, 128), (1, 129)])
@pytest.mark.parametrize("left, right", [(-1, -1), (-1, 0), (9, 4), (128, -1), (0, 200)])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_lists(shape: tuple[int, int], left: int, right: int, seq: int, context: int):
    generator = torch.Generator().manual_seed(seq)
    block_map = torch.rand(*shape, -(-seq // 128), -(-context // 128), generator=generator) < 0.5
    seen = pairs(block_map, seq, context, left, right)
    for columns in (64, 128):
        lists = _hopper_map.keys_of_queries(block_map, 128, columns, seq, context, left, right)
        end = -(-context // columns)
        assert lists.dtype is torch.int32 and lists.shape == (*shape, -(-seq // 128), end + 1)
        want = [[[sorted(tile, reverse=True) or [end] for tile in h] for h in b] for b in tiles_of(seen, 128, columns)]
        assert [[[row[: row[-1]] for row in h] for h in b] for b in lists.tolist()] == want
    # For keys, over the heads of a group.
    for columns in (64, 128):
        lists = _hopper_map.queries_of_keys(block_map, 64, columns, seq, context, left, right, 2)
        tiles = -(-seq // 64)
        every = tiles_of(seen.expand(-1, 4 if shape[1] == 4 else 2, -1, -1).mT, columns, 64)
        for b, entry in enumerate(lists.tolist()):
            for h, head in enumerate(entry):
                for n, row in enumerate(head):
                    want = sorted(g * tiles + m for g in range(2) for m in every[b][2 * h + g][n])
                    start = n * columns // 64 % max(len(want), 1)  # programs that run at once begin with queries of their own
                    assert row[: row[-1]] == want[start:] + want[:start]
                    assert all(0 <= tile < 2 * tiles for tile in row[:-1])  # which a walk may look at one of too many


def test_long_lists_come_first():
    g = torch.Generator().manual_seed(0)
    block_map = torch.rand(1, 3, 40, 70, generator=g) < torch.rand(1, 3, 40, 1, generator=g)
    lists = _hopper_map.keys_of_queries(block_map, 128, 128, 40 * 128, 70 * 128, -1, -1)
    tiles = _hopper_map.order(lists, 2, 3, 3).tolist()
    assert sorted(tiles) == list(range(2 * 3 * 40))
    found = [(int(lists[0, tile // 40 % 3, tile % 40, -1]), tile // 40) for tile in tiles]
    assert found == sorted(found, key=lambda x: (-x[0].bit_length(), x[1] // 3, -x[0]))


# ---- the choice --------------------------------------------------------------------------------------------------------------


def test_choice():
    q, k = rows(2, 1024, 4, 64), rows(2, 1024, 2, 64)
    given = named(q, k, k, block_map=rows(1, 1, 8, 8, dtype=torch.bool))
    with override(HOPPER):
        for backward in (False, True):
            assert skeleton_of({**given, "deterministic": False}, backward).hopper
            both = skeleton_of({**given, "seqused_k": torch.empty(2, dtype=torch.int32)}, backward)
            assert "seqused_k" in both.why and not both.hopper
        assert "deterministic" in skeleton_of({**given, "deterministic": True}, True).why
        assert fusedblock.explain_attention(q, k, k, block_map=given["block_map"]).engine == "gluon"


# ---- what the compiler makes of it ---------------------------------------------------------------------------------------------

# Bytes of spills with triton 3.6, forward and backward; they may only shrink.
FULL = Shape(8192, 8192, causal=False, head_dim=128, heads=8, kv_heads=8)
SPILLS = [
    (FULL, 0, 8),
    (replace(FULL, causal=True), 0, 88),
    (replace(FULL, window=(1023, 0)), 0, 108),
    (replace(FULL, softcap=30.0), 0, 132),
    (replace(FULL, head_dim=64), 0, 0),
    (replace(FULL, head_dim=64, causal=True), 0, 0),
    (replace(FULL, head_dim=64, window=(1023, 0)), 0, 0),
    (replace(FULL, head_dim=192, v_dim=128), 0, 0),
    (replace(FULL, head_dim=192, v_dim=128, causal=True), 0, 0),
    (replace(FULL, head_dim=256), 0, 272),
    (replace(FULL, head_dim=256, causal=True), 28, 268),
    (replace(FULL, head_dim=256, window=(1023, 0)), 28, 280),
]


@pytest.mark.parametrize("case, ahead, behind", [
    SPILLS[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in SPILLS[1:])
], ids=str)  # fmt: skip
def test_machine_code(case: Shape, ahead: int, behind: int):
    q, k, v = case.inputs("meta")
    out, lse = q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(1, case.heads, case.seq, dtype=torch.float32)
    block_map = torch.empty(1, case.heads, 64, 64, dtype=torch.bool, device="meta")
    with aot.compile_only(replace(HOPPER, sms=132)) as kernels:
        attention_hopper.launch(q, k, v, None, *case.bounds, 0.1, case.softcap, block_map=block_map)
        attention_hopper_backward.launch(
            q, k, v, out, lse, out, None, None, *case.bounds, 0.1, case.softcap, block_map=block_map
        )  # fmt: skip
    forward, prepare, products, finish = kernels
    assert aot.problems([prepare, finish], HOPPER) == []
    assert aot.problems([forward], HOPPER, wgmma=True, max_spill_bytes=aot.spills(ahead)) == []
    assert aot.problems([products], HOPPER, wgmma=True, max_spill_bytes=aot.spills(behind)) == []
    assert machine_code(forward) and machine_code(products)

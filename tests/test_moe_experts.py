"""The experts' op against float64, results and gradients, in every layout, form and tile height; its edges and its errors."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_cases import GPT_OSS, RUNS, Experts, make_index
from op_cases import (
    FEW_SMS,
    Case,
    assert_accurate,
    backward_arguments,
    call,
    check,
    error,
    formula,
    recording,
    to,
    with_gradients,
)
from torch import Tensor

import fusedblock
from fusedblock import ops
from fusedblock.kernels import _moe, _replay
from fusedblock.kernels._moe import CLAMPED, choose_tile_rows, form
from fusedblock.kernels._target import TARGETS
from fusedblock.ops import COSTS, OPS

BF16 = torch.bfloat16
OP = "moe_experts"


def case_of(experts: Experts) -> Case:
    return Case(OP, experts.id, experts.make)


def kernels(launches: list) -> list[str]:
    return [launch.kernel for launch in launches]


# Every number of tokens, of experts and layout at which something changes; in each all is ragged against the tiles.
CASES = [
    Experts(tokens=31, routing="holes"),
    Experts(tokens=33, experts=3, top_k=1, activation="gelu", weights=torch.float32),
    Experts(tokens=45, experts=6, top_k=6, activation="gelu_tanh", laid="transposed"),
    Experts(tokens=45, routing="one", tile_rows=32, laid="interleaved", bias=True),
    Experts(tokens=33, experts=4, top_k=3, routing="last", tile_rows=64, **GPT_OSS),
    Experts(tokens=1, experts=7, top_k=4, weights=torch.float32),
    Experts(tokens=1, experts=130, top_k=6, hidden=40, laid="transposed", bias=True, activation="relu2"),
    Experts(tokens=1, experts=7, top_k=4, hidden=72, laid="interleaved", activation="gelu"),
    Experts(tokens=1, experts=4, top_k=4, **GPT_OSS),
    Experts(tokens=70, experts=12, top_k=3, routing="holes", hidden=73, ffn=41),
    Experts(tokens=66, experts=3, top_k=2, tile_rows=128, laid="interleaved", activation="relu"),
    *(Experts(tokens=tokens, experts=5, routing="holes", residual=True) for tokens in (1, 19, 67)),
]
WIDE = [
    Experts(tokens=150, hidden=136, ffn=72, experts=3, tile_rows=128),
    Experts(tokens=150, hidden=72, ffn=136, experts=3, tile_rows=64, **GPT_OSS),
    Experts(tokens=200, hidden=72, ffn=136, experts=4, tile_rows=128, routing="one", laid="transposed", bias=True),
    Experts(tokens=150, hidden=136, ffn=136, experts=5, tile_rows=128, routing="last", save=False, **GPT_OSS),
    Experts(tokens=100, hidden=264, ffn=72, experts=9, top_k=3, tile_rows=32, laid="interleaved"),
]


@pytest.mark.parametrize(("dtype", "target"), RUNS)
@pytest.mark.parametrize("experts", CASES, ids=lambda e: e.id)
def test_against_float64(experts: Experts, dtype: torch.dtype, target: str) -> None:
    check(case_of(experts), dtype, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "sm_80"])
@pytest.mark.parametrize("experts", WIDE, ids=lambda e: e.id)
def test_many_tiles_against_float64(experts: Experts, target: str) -> None:
    check(case_of(experts), BF16, target)


@pytest.mark.parametrize("save", [True, False])
def test_clamps_cut_where_the_formula_cuts(save: bool) -> None:
    """A limit that most values exceed, in fp32: nothing rounds across it. Without save gate and up are computed again."""
    experts = Experts(tokens=33, limit=0.6, save=save, **GPT_OSS)
    check(case_of(experts), torch.float32, "sm_90")
    both = formula(OP, to(case_of(experts).arguments(torch.float32), torch.float64))["gate_up"]
    assert (both[:, 0::2] > 0.6).any() and (both[:, 1::2] > 0.6).any() and (both[:, 1::2] < -0.6).any()


def test_clamps_in_half_precision() -> None:
    check(case_of(Experts(tokens=33, limit=0.6, **GPT_OSS)), BF16, "sm_90", gradients=False)


# ---- forms and launches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "laid"), [(1, ""), (1, "transposed"), (2, ""), (64, ""), (65, ""), (300, "")])
def test_launches_of_a_forward(tokens: int, laid: str) -> None:
    """Two up to 64 tokens, then three: with a router of two or three, four and six. Sums over rows want them dense."""
    experts = Experts(tokens=tokens, hidden=16, ffn=16, experts=9, top_k=3, laid=laid)
    rows = choose_tile_rows(tokens, 3, 9, 2, TARGETS["sm_90"])
    args = case_of(replace(experts, tile_rows=rows)).arguments(BF16)
    with recording("sm_90") as launches:
        call(OP, args)
    up, down = ("_gate_up_hopper_kernel", "_rows_hopper_kernel") if rows == 128 else ("_gate_up_kernel", "_rows_kernel")
    grouped = [up, down] if tokens <= 64 else [up, down, "_combine_kernel"]
    assert kernels(launches) == (["_gate_up_vector_kernel", "_down_vector_kernel"] if tokens == 1 and not laid else grouped)


def test_tile_rows_follow_the_rows_of_an_expert() -> None:
    h200 = TARGETS["sm_90"]
    qwen3 = {t: choose_tile_rows(t, 8, 128, 2, h200) for t in (1, 16, 64, 512, 4096, 16384)}
    assert qwen3 == {1: 16, 16: 16, 64: 16, 512: 64, 4096: 128, 16384: 128}
    mixtral = {t: choose_tile_rows(t, 2, 8, 2, h200) for t in (1, 16, 64, 512, 4096)}
    assert mixtral == {1: 16, 16: 16, 64: 32, 512: 128, 4096: 128}
    assert choose_tile_rows(64, 8, 8, 2, h200) == 64  # no expert has more rows than there are tokens
    assert choose_tile_rows(4096, 8, 128, 4, h200) == 64
    assert {choose_tile_rows(t, 8, 128, 2, replace(h200, batch_invariant=True)) for t in (1, 64, 4096)} == {64}


def test_a_token_has_the_same_bits_alone_and_in_a_batch() -> None:
    experts = Experts(tokens=90, hidden=72, ffn=40, tile_rows=64, bias=True, save=False)
    args = case_of(experts).arguments(BF16)
    with fusedblock.options(batch_invariant=True), recording("sm_90"):
        assert form(1, 64, False, replace(TARGETS["sm_90"], batch_invariant=True)) == "grouped"
        whole = call(OP, args)["out"]
        for first, count in ((0, 1), (41, 1), (3, 30), (20, 70)):
            piece = {n: args[n][first : first + count] for n in ("x", "weights", "indices")}
            piece |= make_index(piece["indices"], experts.experts, 64)
            assert torch.equal(call(OP, {**args, **piece})["out"], whole[first : first + count])


@pytest.mark.parametrize("tokens", [1, 40, pytest.param(70, marks=pytest.mark.slow)])
def test_only_experts_with_a_token_are_read(tokens: int) -> None:
    """The bytes that the spec states are those that the kernels read, in every form and for any routing."""
    from test_costs import bytes_of, counted, stated

    for words in ({}, GPT_OSS):
        args = case_of(Experts(tokens=tokens, experts=9, top_k=2, routing="holes", **words)).arguments(BF16)
        assert counted(OP, args, "sm_80") == bytes_of(stated(OP, args, "sm_80"))
        taken = backward_arguments(OP, args)
        assert counted("moe_experts_backward", taken, "sm_80") == bytes_of(stated("moe_experts_backward", taken, "sm_80"))
        touched = args["indices"].unique().numel()
        assert touched < 9
        weights = 2 * sum(args[n][0].numel() for n in ("gate_up_weight", "down_weight")) * touched
        costs = stated(OP, args, "sm_80")
        assert weights < sum(c.read_bytes for c in costs) < weights * 9 / touched


@pytest.mark.parametrize(("tokens", "tile_rows"), [(1, 16), (20, 16), (70, 64)])
@pytest.mark.parametrize("words", [{}, GPT_OSS], ids=["", "gpt_oss"])
def test_launches_can_be_replayed(tokens: int, tile_rows: int, words: dict[str, Any]) -> None:
    """Recorded for one routing, right for another: the host knows nothing of it."""
    cases = [Experts(tokens=tokens, tile_rows=tile_rows, routing=r, save=False, **words) for r in ("even", "one")]
    first, second = (case_of(c).arguments(BF16, seed) for seed, c in enumerate(cases))
    tensors = [n for n, v in first.items() if isinstance(v, Tensor)]
    with recording("sm_90"):
        out, program = _replay.record(lambda: OPS[OP].launch(**first)[0], [first[n] for n in tensors])
        assert program is not None and len(program.steps) == (3 if tokens > 64 else 2)
        for args in (first, second):
            assert torch.equal(program.run([args[n] for n in tensors])[0], OPS[OP].launch(**args)[0])
        assert not torch.equal(out, OPS[OP].launch(**second)[0])


def test_costs_of_fake_tensors_expect_even_routing() -> None:
    """40 tokens choose 2 of 9 experts: an expert is left out by all of them with (7/9)**40."""
    args = case_of(Experts(tokens=40, experts=9, top_k=2, hidden=64, ffn=64)).arguments(BF16)
    cost = COSTS[OP](*to(args, device="meta").values())[0]
    weights = round(9 * (1 - (7 / 9) ** 40) * 2 * 64 * 64) * 2
    assert cost.read_bytes == 2 * 40 * 64 + weights + 4 * 80 + 4 + 12 * 9  # x, weights, order, nine tiles
    assert cost.flops == 80 * (2 * 64 + 4) * 128


def test_debug_takes_rows_that_nobody_writes() -> None:
    args = case_of(Experts(tokens=20)).arguments(torch.float32)
    marked = args["indices"].clone()
    marked[3, 0] = 5
    given = {**args, "indices": marked, **make_index(marked, 5, 16)}
    with fusedblock.options(debug=True), recording("sm_90"):
        got = with_gradients(OP, given)
        assert got["gate_up"][-1].isnan().all()
        with pytest.raises(FloatingPointError, match="moe_experts: x has"):
            call(OP, {**given, "x": given["x"] * float("inf")})


INDEX_ERRORS = [
    ("offsets", 0, 1, "offsets has 1 at (0,), expected rows from 0 to at most 40 that do not decrease"),
    ("offsets", 5, 41, "offsets has 41 at (5,), expected rows from 0 to at most 40 that do not decrease"),
    ("offsets", 2, -1, "offsets has -1 at (2,), expected rows"),
    ("order", 7, 40, "order has 40 at (7,), expected slots from 0 to 39"),
    ("order", 0, -1, "order has -1 at (0,), expected slots from 0 to 39"),
    ("inverse", (3, 1), 40, "inverse has 40 at (3, 1), expected rows from 0 to 39, or -1"),
    ("inverse", (0, 0), -2, "inverse has -2 at (0, 0), expected rows from 0 to 39, or -1"),
    ("indices", (19, 1), 5, "indices has 5 at (19, 1), expected experts from 0 to 4 where inverse has a row"),
    ("tiles", (0, 0), 5, "tiles has 5 at (0, 0), expected experts from 0 to 4"),
    ("tiles", (1, 1), -1, "tiles has -1 at (1, 1), expected rows of the tile's expert, at most 16"),
    ("tiles", (1, 2), 41, "tiles has 41 at (1, 2), expected rows of the tile's expert, at most 16"),
    ("tiles", (0, 3), 8, "tiles has 8 at (0, 3), expected one number of tiles, from 0 to 7"),
    ("tiles", (2, 3), 0, "tiles has 0 at (2, 3), expected one number of tiles, from 0 to 7"),
]


@pytest.mark.parametrize("interpreted", [True, False])
@pytest.mark.parametrize(("name", "at", "value", "message"), INDEX_ERRORS, ids=[e[3][:40] for e in INDEX_ERRORS])
def test_debug_names_an_index_that_points_outside(name: str, at: Any, value: int, message: str, interpreted: bool) -> None:
    args = case_of(Experts(tokens=20)).arguments(torch.float32)
    wrong = args[name].clone()
    wrong[at] = value
    with recording("sm_90") if interpreted else torch.enable_grad():
        with fusedblock.options(debug=True):
            call(OP, args)
            with pytest.raises(ValueError, match="^" + re.escape(f"moe_experts: {message}")):
                call(OP, {**args, name: wrong})
            with pytest.raises(ValueError, match="^" + re.escape(f"moe_experts_backward: {message}")):
                ops.direct("moe_experts_backward", *{**backward_arguments(OP, args), name: wrong}.values())


# ---- edges ---------------------------------------------------------------------------------------------------------------------


def test_no_tokens() -> None:
    args = case_of(Experts(tokens=0, bias=True)).arguments(torch.float32)
    for interpreted in (True, False):
        with recording("sm_90") if interpreted else torch.enable_grad():
            got = with_gradients(OP, args)
        assert got["out"].shape == (0, 24)
        for name in ("gate_up_weight", "down_weight", "gate_up_bias", "down_bias"):
            assert got[f"grad_{name}"].shape == args[name].shape and not got[f"grad_{name}"].any()


def test_experts_without_a_token_have_no_gradient() -> None:
    args = case_of(Experts(tokens=40, routing="holes", bias=True)).arguments(BF16)
    idle = [e for e in range(5) if e not in args["indices"]]
    assert {1, 3} < {*idle} or idle == [1, 3]
    with recording("sm_90"):
        got = with_gradients(OP, args)
    for name in ("gate_up_weight", "down_weight", "gate_up_bias", "down_bias"):
        assert not got[f"grad_{name}"][idle].any()
        assert got[f"grad_{name}"][[e for e in range(5) if e not in idle]].flatten(1).any(1).all()


@pytest.mark.parametrize("tokens", [1, 40, pytest.param(70, marks=pytest.mark.slow)])
@pytest.mark.parametrize("words", [{}, GPT_OSS], ids=["", "gpt_oss"])
def test_slots_without_an_expert_add_nothing(tokens: int, words: dict[str, Any]) -> None:
    """The number of experts as an index, as expert parallelism has it: as if its weight were 0, and its own gradient is 0."""
    args = case_of(Experts(tokens=tokens, top_k=3, **words)).arguments(torch.float32)
    gone = torch.zeros_like(args["indices"], dtype=torch.bool)
    gone[::2, 1] = True
    marked = args["indices"].masked_fill(gone, 5)
    given = {**args, "indices": marked, **make_index(marked, 5, 16), "save": False}
    plain = with_gradients(OP, {**args, "weights": args["weights"].masked_fill(gone, 0.0), "save": False})
    for interpreted in (True, False):
        with recording("sm_90") if interpreted else torch.enable_grad():
            got = with_gradients(OP, given)
        assert not got["grad_weights"][gone].any()
        for name, value in plain.items():
            want = value.masked_fill(gone, 0.0) if name == "grad_weights" else value
            assert error(got[name], want.double()) < 1e-5, name


@pytest.mark.parametrize("interpreted", [True, False])
@pytest.mark.parametrize("tokens", [1, 20, 66])
def test_the_weight_of_a_slot_without_an_expert_is_not_read(tokens: int, interpreted: bool) -> None:
    args = case_of(Experts(tokens=tokens, top_k=2, bias=True)).arguments(torch.float32)
    gone = torch.zeros_like(args["indices"], dtype=torch.bool)
    gone[::2, 1] = True
    marked = args["indices"].masked_fill(gone, -1)
    given = {**args, "indices": marked, **make_index(marked, 5, 16)}
    found = []
    for value in (0.0, float("inf"), float("nan")):
        with recording("sm_90") if interpreted else torch.enable_grad():
            found.append(with_gradients(OP, {**given, "weights": args["weights"].masked_fill(gone, value)}))
    for name, value in found[0].items():
        if name != "gate_up":  # rows of slots without an expert are nobody's
            assert value.isfinite().all() and all(torch.equal(value, other[name]) for other in found[1:]), name


@pytest.mark.parametrize("tokens", [1, 40, pytest.param(66, marks=pytest.mark.slow)])
def test_nan_in_one_token_stays_there(tokens: int) -> None:
    """No other token's result or gradient has it, and no weight's gradient of experts that the token did not choose."""
    args = case_of(Experts(tokens=tokens, experts=6, bias=True, tile_rows=32)).arguments(BF16)
    row = tokens // 2
    for name in ("x", "grad_out"):
        with recording("sm_90"):
            out, gate_up = call(OP, args).values()
            dirty = {**args, "x": args["x"].clone()}
            if name == "x":
                dirty["x"][row] = float("nan")
            taken = {**backward_arguments(OP, args), "gate_up": gate_up}
            grads = dict(zip(OPS[OP].backward.spec.writes, OPS[OP].backward.launch(**taken)))
            bad_out, bad_gate_up = call(OP, dirty).values()
            if name == "grad_out":
                taken["grad_out"] = taken["grad_out"].clone()
                taken["grad_out"][row] = float("nan")
            bad = OPS[OP].backward.launch(**{**taken, "x": dirty["x"], "gate_up": bad_gate_up})
        chosen = args["indices"][row].tolist()
        others, rest = [t for t in range(tokens) if t != row], [e for e in range(6) if e not in chosen]
        assert torch.equal(bad_out[others], out[others]) and bad_out[row].isnan().all() == (name == "x")
        for (result, clean), value in zip(grads.items(), bad):
            kept = others if result in ("grad_x", "grad_weights") else rest
            assert torch.equal(value[kept], clean[kept]), result
        assert bad[0][row].isnan().all() and bad[1][chosen].isnan().any() and bad[2][chosen].isnan().any()


@pytest.mark.parametrize("tokens", [1, 20, pytest.param(66, marks=pytest.mark.slow)])
def test_strides_and_expanded_tensors(tokens: int) -> None:
    """Rows apart from one another, weights that are parts of larger tensors, columns that are dense, an expanded x."""
    for words in ({}, GPT_OSS):
        args = case_of(Experts(tokens=tokens, experts=3, **words)).arguments(torch.float32)
        moved = dict(args)
        for name in ("x", "gate_up_weight", "down_weight", "gate_up_bias", "down_bias", "weights"):
            if args[name] is not None:
                wide = torch.full((*args[name].shape[:-1], args[name].shape[-1] + 3), float("nan"))
                wide[..., : args[name].shape[-1]] = args[name]
                moved[name] = wide[..., : args[name].shape[-1]]
        moved["indices"], moved["inverse"] = (args[n].t().contiguous().t() for n in ("indices", "inverse"))
        with recording("sm_90"):
            want, got = with_gradients(OP, args), with_gradients(OP, moved)
        for name, value in want.items():
            assert error(got[name], value.double()) < 1e-6, name
        columns = {**args, "x": args["x"].t().contiguous().t(), "down_weight": args["down_weight"].mT.contiguous().mT}
        expanded = {**args, "x": args["x"][:1].expand(tokens, -1)}
        for given in (columns, expanded):
            with recording("sm_90"):
                got = call(OP, given)
            for name, value in formula(OP, to(given, torch.float64)).items():
                assert error(got[name], value) < 1e-5


@pytest.mark.parametrize("interpreted", [True, False])
def test_gradients_of_stride_zero(interpreted: bool) -> None:
    args = case_of(Experts(tokens=20, bias=True)).arguments(torch.float32)
    x = args["x"].requires_grad_()
    with recording("sm_90") if interpreted else torch.enable_grad():
        out, _ = torch.ops.fusedblock.moe_experts.default(*args.values())
        (summed,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        (ones,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert torch.equal(summed, ones)


def test_offsets_past_two_to_the_31st() -> None:
    """Tokens and experts that lie more than 2**31 elements apart: one storage, of which little is ever touched."""
    storage = torch.empty(2**31 + 2**20, dtype=BF16)
    for tokens, words in ((1, {}), (20, {}), (66, GPT_OSS)):
        experts = Experts(tokens=tokens, hidden=16, ffn=16, experts=3, top_k=3, **words)
        args = case_of(experts).arguments(BF16)
        far, at = dict(args), 0
        for name in ("gate_up_weight", "down_weight", "x"):
            t = args[name]
            step = (2**31 + 2**16) // max(t.shape[0] - 1, 1) // 64 * 64
            far[name] = storage.as_strided(t.shape, (step, *t.stride()[1:]), at)
            far[name].copy_(t)
            at += 8192
        taken, moved = backward_arguments(OP, args), backward_arguments(OP, args) | {n: far[n] for n in ("x", "down_weight")}
        moved["gate_up_weight"] = far["gate_up_weight"]
        with recording("sm_80"):
            for got, want in zip(OPS[OP].launch(**far), OPS[OP].launch(**args)):
                assert torch.equal(got, want)
            backward = OPS[OP].backward.launch
            for got, want in zip(backward(**moved), backward(**taken)):
                assert torch.equal(got, want)


# ---- what is wanted ------------------------------------------------------------------------------------------------------------

NAMES = ("x", "gate_up_weight", "down_weight", "gate_up_bias", "down_bias", "weights")


@pytest.mark.parametrize("words", [{}, GPT_OSS], ids=["", "gpt_oss"])
def test_each_gradient_alone_is_the_same(words: dict[str, Any]) -> None:
    args = case_of(Experts(tokens=20, **{"bias": True, **words})).arguments(torch.float32)
    backward = OPS[OP].backward
    with recording("sm_90"):
        together = backward.launch(**backward_arguments(OP, args))
        for i, name in enumerate(NAMES):
            alone = backward.launch(**backward_arguments(OP, args, {n: n == name for n in args}))
            assert torch.equal(alone[i], together[i]), name
            assert not any(g.numel() for j, g in enumerate(alone) if j != i)


@pytest.mark.parametrize("tokens", [12, 20, 30])
@pytest.mark.parametrize("words", [{}, {"laid": "transposed"}, GPT_OSS], ids=["", "transposed", "gpt_oss"])
def test_the_rows_of_grad_x_lie_in_a_weights_gradient(tokens: int, words: dict[str, Any]) -> None:
    """In the first that is wanted and as large, with the bits that each has alone; only else in memory of their own."""
    args, backward = case_of(Experts(tokens=tokens, ffn=8, experts=3, **words)).arguments(BF16), OPS[OP].backward
    with recording("sm_90") as launches:
        alone = [backward.launch(**backward_arguments(OP, args, {n: n == name for n in args}))[i] for i, name in enumerate(NAMES)]
        launches.clear()
        for wanted in (("x",), NAMES, ("x", "gate_up_weight"), ("x", "down_weight", "weights")):
            taken = backward_arguments(OP, args, {n: n in wanted for n in args})
            got = dict(zip(NAMES, backward.launch(**taken)))
            (y,) = (launch.arguments["y"] for launch in launches if launch.kernel == "_rows_kernel")
            launches.clear()
            fit = [n for n in ("gate_up_weight", "down_weight") if n in wanted and got[n].numel() >= 2 * tokens * 24]
            shared = [n for n in NAMES if got[n].untyped_storage().data_ptr() == y.untyped_storage().data_ptr()]
            assert shared == fit[:1]
            assert all(torch.equal(got[n], want) for n, want in zip(NAMES, alone) if n in wanted)


@pytest.mark.parametrize("tokens", [1, 20, pytest.param(70, marks=pytest.mark.slow)])
def test_computing_again_gives_the_same(tokens: int) -> None:
    args = case_of(Experts(tokens=tokens, bias=True)).arguments(BF16)
    with recording("sm_90") as launches:
        kept = with_gradients(OP, args)
        before = len(launches)
        again = with_gradients(OP, {**args, "save": False})
    assert len(launches) - before == before + 1
    assert "gate_up" not in again
    for name, value in again.items():
        same = torch.equal(value, kept[name])
        assert same or tokens == 1 and error(value, kept[name].double()) < 5e-3, name  # one token's sums have another order


def test_what_is_saved_is_one_tensor_of_the_rows() -> None:
    """Beside the arguments: gate and up of every row, or nothing."""
    for save in (True, False):
        args = case_of(Experts(tokens=20, save=save)).arguments(torch.float32)
        args["x"].requires_grad_()
        node = call(OP, args)["out"].grad_fn
        given = {v.data_ptr() for v in args.values() if isinstance(v, Tensor)}
        assert [t.shape for t in node.saved_tensors if t.data_ptr() not in given] == ([(40, 80)] if save else [])


# ---- errors --------------------------------------------------------------------------------------------------------------------

ERRORS = [
    ({"gate_up_weight": torch.ones(5, 80, 23)},
     "gate_up_weight has shape (5, 80, 23), expected (experts gate_up hidden) with hidden=24 and an even gate_up"),
    ({"gate_up_weight": torch.ones(5, 81, 24)},
     "gate_up_weight has shape (5, 81, 24), expected (experts gate_up hidden) with hidden=24 and an even gate_up"),
    ({"transposed": True}, "gate_up_weight has shape (5, 80, 24), expected (experts hidden gate_up) with hidden=24"),
    ({"down_weight": torch.ones(5, 24, 39)},
     "down_weight has shape (5, 24, 39), expected (experts hidden ffn) with hidden=24 and ffn=40"),
    ({"down_weight": torch.ones(4, 24, 40)}, "down_weight (experts down_rows down_columns) has experts=4, but experts=5 so far"),
    ({"gate_up_bias": torch.ones(5, 40)}, "gate_up_bias has shape (5, 40), expected (experts 80)"),
    ({"down_bias": torch.ones(5, 25)}, "down_bias has shape (5, 25), expected (experts 24)"),
    ({"weights": torch.ones(6, 2)}, "weights (tokens top_k) has tokens=6, but tokens=7 so far"),
    ({"weights": torch.ones(7, 2, dtype=torch.int32)}, "weights has dtype torch.int32, expected a floating one"),
    ({"indices": torch.zeros(7, 2, dtype=torch.int64)}, "indices has dtype torch.int64, expected torch.int32"),
    ({"order": torch.zeros(13, dtype=torch.int32)}, "order has 13 rows, expected tokens * top_k = 14"),
    ({"offsets": torch.zeros(5, dtype=torch.int32)}, "offsets has 5 elements, expected experts + 1 = 6"),
    ({"tiles": torch.zeros(6, 4, dtype=torch.int32)}, "tiles has shape (6, 4), expected (5, 4) for tile_rows=16"),
    ({"tiles": torch.zeros(5, 3, dtype=torch.int32)}, "tiles has shape (5, 3), expected (5, 4) for tile_rows=16"),
    ({"tile_rows": 24}, "tile_rows=24, expected one of (16, 32, 64, 128)"),
    ({"activation": "swish"}, "activation='swish', expected one of silu, gelu, gelu_tanh, relu, relu2, clamped_swish"),
    ({"limit": float("nan")}, "limit=nan, expected a finite number"),
    ({"limit": 0.0, "activation": CLAMPED}, "limit=0.0, expected a positive number for clamped_swish"),
    ({"x": torch.ones(7, 24, dtype=BF16)}, "gate_up_weight has dtype torch.float32, but x has torch.bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(("changes", "message"), ERRORS, ids=[m[:40] for _, m in ERRORS])
def test_errors_name_the_argument(changes: dict[str, Any], message: str, kernels: bool) -> None:
    args = case_of(Experts()).arguments(torch.float32)
    with recording("sm_90") as launches, pytest.raises(ValueError) as raised:
        if kernels:
            call(OP, {**args, **changes})
        else:
            OPS[OP].spec.empty({**args, **changes})
    assert message in str(raised.value) and str(raised.value).startswith("moe_experts: ")
    assert not launches


# ---- every config --------------------------------------------------------------------------------------------------------------


def shipped() -> list[Any]:
    found = []
    for name, dtype in (*((n, BF16) for n in ("sm_90", "sm_80", "sm_86", "sm_100", "gfx942")), ("sm_90", torch.float32)):
        for rows in _moe.TILE_ROWS:
            for tokens in (1, 40, 70) if rows < 128 else (70,):
                found.append(pytest.param(name, dtype, rows, tokens, id=f"{name}-{str(dtype)[6:]}-{rows}-{tokens}"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "rows", "tokens"), shipped())
@pytest.mark.parametrize("words", [{}, GPT_OSS], ids=["", "gpt_oss"])
def test_every_shipped_config(name: str, dtype: torch.dtype, rows: int, tokens: int, words: dict[str, Any]) -> None:
    experts = Experts(tokens=tokens, hidden=136, ffn=136, experts=3, tile_rows=rows, **words)
    launches = check(case_of(experts), dtype, FEW_SMS[name])
    tables = _moe.table(dtype.itemsize, TARGETS[name])
    used = {launch.kernel: launch.arguments for launch in launches if "_vector" not in launch.kernel}
    if tables["gate_up"][rows].hopper and not words:
        assert "_gate_up_hopper_kernel" in used and "_rows_hopper_kernel" in used
    elif tokens > 1:
        assert (used["_gate_up_kernel"]["BM"], used["_gate_up_kernel"]["BN"]) == (rows, tables["gate_up"][rows].block_n)
        assert used["_gate_up_kernel"]["TMA"] == tables["gate_up"][rows].tma


def test_reference_is_the_formula() -> None:
    for experts in CASES:
        args = case_of(experts).arguments(torch.float64)
        got, want = with_gradients(OP, args), with_gradients(OP, args, formula)
        assert_accurate(got, {n: want[n] for n in got}, got, torch.float64)



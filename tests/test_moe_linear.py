"""Linear layers chosen by token against float64, results and gradients, to slots and to sums; edges and errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_cases import RUNS, Projections, make_index
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

import fusedblock
from fusedblock import ops
from fusedblock.kernels import _moe
from fusedblock.kernels._target import TARGETS
from fusedblock.ops import COSTS, OPS

BF16 = torch.bfloat16
OP = "moe_linear"
SUM = {"sums": True, "given": "bias out_bias residual"}


def case_of(words: Projections) -> Case:
    return Case(OP, words.id, words.make)


# Heads whose width divides a step along K and heads whose does not, ragged everywhere; one choice, and all.
CASES = [
    Projections(tokens=31, routing="holes", heads=5, given="bias"),
    Projections(tokens=33, inner=73, outer=96, experts=3, top_k=1, heads=2, given="transposed"),
    Projections(tokens=19, experts=6, top_k=6, routing="one", tile_rows=32),
    Projections(tokens=1, experts=7, top_k=4, heads=4),
    Projections(tokens=31, routing="holes", heads=3, **SUM),
    Projections(tokens=33, inner=96, outer=41, experts=3, top_k=1, heads=2, sums=True, given="transposed wide bias"),
    Projections(tokens=19, experts=6, top_k=6, routing="one", tile_rows=32, sums=True),
    Projections(tokens=1, experts=7, top_k=4, heads=8, sums=True, given="wide out_bias"),
]
BOTH = [Projections(tokens=20, heads=4, given="bias"), Projections(tokens=20, heads=4, **SUM)]
both = pytest.mark.parametrize("words", BOTH, ids=["slots", "sum"])


@pytest.mark.parametrize(("dtype", "target"), RUNS)
@pytest.mark.parametrize("words", CASES, ids=lambda w: w.id)
def test_against_float64(words: Projections, dtype: torch.dtype, target: str) -> None:
    check(case_of(words), dtype, target)


def shipped() -> list[Any]:
    runs = [*((name, BF16) for name in ("sm_90", "sm_80", "sm_86", "sm_100", "gfx942")), ("sm_90", torch.float32)]
    found = [(name, dtype, rows) for name, dtype in runs for rows in _moe.TILE_ROWS]
    return [pytest.param(*run, id=f"{run[0]}-{str(run[1])[6:]}-{run[2]}") for run in found]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "rows"), shipped())
@pytest.mark.parametrize("sums", [False, True])
def test_every_shipped_config(name: str, dtype: torch.dtype, rows: int, sums: bool) -> None:
    words = Projections(tokens=36, inner=72, outer=72, experts=2, heads=2, tile_rows=rows, sums=sums, given="bias")
    launches = check(case_of(words), dtype, FEW_SMS[name])
    config = _moe.table(dtype.itemsize, TARGETS[name])["down" if sums else "gate_up"][rows]
    used = launches[0].arguments
    assert (used["BM"], used["BN"], used["TMA"]) == (rows, config.block_n, config.tma)


# ---- what is launched and read -------------------------------------------------------------------------------------------------


def test_one_launch_to_slots_and_two_to_sums() -> None:
    for words, names in zip(BOTH, (["_rows_kernel"], ["_rows_kernel", "_combine_kernel"])):
        with recording("sm_90") as launches:
            call(OP, case_of(words).arguments(BF16))
        assert [launch.kernel for launch in launches] == names


def test_costs_of_fake_tensors_expect_even_routing() -> None:
    """40 tokens choose 2 of 9 experts: an expert is left out by all of them with (7/9)**40."""
    args = case_of(Projections(tokens=40, inner=64, outer=96, experts=9, heads=3)).arguments(BF16)
    (cost,) = COSTS[OP](*to(args, device="meta").values())
    weights = round(9 * (1 - (7 / 9) ** 40) * 96 * 64) * 2
    assert cost.read_bytes == 2 * 40 * 64 + weights + 2 * 4 * 80 + 4 + 12 * 9  # x, weights, order and inverse, nine tiles
    assert (cost.written_bytes, cost.flops) == (2 * 80 * 96, 2 * 80 * 64 * 96)


@both
def test_equal_bits_over_repeats(words: Projections) -> None:
    args = case_of(words).arguments(BF16)
    with recording("sm_90"):
        first, second = with_gradients(OP, args), with_gradients(OP, args)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@both
def test_a_token_has_the_same_bits_alone_and_in_a_batch(words: Projections) -> None:
    args = case_of(replace(words, tokens=70, inner=72, tile_rows=64)).arguments(BF16)
    with fusedblock.options(batch_invariant=True), recording("sm_90"):
        whole = call(OP, args)["out"]
        for first, count in ((0, 1), (3, 30)):
            named = ("x", "weights", "residual", "indices")
            piece = {n: None if args[n] is None else args[n][first : first + count] for n in named}
            piece |= make_index(piece["indices"], words.experts, 64)
            assert torch.equal(call(OP, {**args, **piece})["out"], whole[first : first + count])


# ---- edges ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interpreted", [True, False])
@both
def test_slots_without_an_expert_give_zeros(words: Projections, interpreted: bool) -> None:
    """As expert parallelism has them: no row, and nothing of what they hold is read."""
    args = case_of(replace(words, tokens=75)).arguments(torch.float32)
    marked = args["indices"].clone()
    marked[::2, 1] = -1
    marked[5] = -1
    gone = marked < 0
    given = {**args, "indices": marked, **make_index(marked, words.experts, 16)}
    want = with_gradients(OP, to(given, torch.float64), formula)
    if words.sums:
        slots = given["x"].clone().view(75, words.heads, 2, -1)
        slots.masked_fill_(gone[:, None, :, None], float("nan"))
        given |= {"x": slots.view(75, -1), "weights": given["weights"].masked_fill(gone, float("inf"))}
    with recording("sm_90") if interpreted else torch.enable_grad():
        got = with_gradients(OP, given)
    for name, value in want.items():
        assert error(got[name], value) < 1e-5, name
    by_slot = got["grad_x" if words.sums else "out"].view(75, words.heads, 2, -1).transpose(1, 2)
    assert not by_slot[gone].any() and (not words.sums or not got["grad_weights"][gone].any())


@pytest.mark.parametrize("interpreted", [True, False])
@both
def test_no_expert_of_anyone_and_no_tokens(words: Projections, interpreted: bool) -> None:
    args = case_of(words).arguments(torch.float32)
    nobody = torch.full_like(args["indices"], -1)
    none = case_of(replace(words, tokens=0)).arguments(torch.float32)
    with recording("sm_90") if interpreted else torch.enable_grad():
        got = with_gradients(OP, {**args, "indices": nobody, **make_index(nobody, words.experts, 16)})
        empty = with_gradients(OP, none)
    want = args["residual"] + args["out_bias"] if words.sums else torch.zeros_like(got["out"])
    assert torch.equal(got["out"], want)
    assert empty["out"].shape == (0, got["out"].shape[1]) and empty["grad_x"].shape == none["x"].shape
    for found in (got, empty):
        names = ("grad_weight", "grad_bias") if found is got else ("grad_weight", "grad_bias", *("grad_out_bias",) * words.sums)
        assert not any(found[name].any() for name in names) and found["grad_weight"].shape == args["weight"].shape


@both
def test_nan_in_one_token_stays_there(words: Projections) -> None:
    args = case_of(replace(words, experts=6)).arguments(torch.float32)
    dirty = {**args, "x": args["x"].clone()}
    dirty["x"][7] = float("nan")
    with recording("sm_90"):
        clean, bad = with_gradients(OP, args), with_gradients(OP, dirty)
    others, chosen = [t for t in range(20) if t != 7], args["indices"][7].tolist()
    rest = [e for e in range(6) if e not in chosen]
    for name in ("out", "grad_x", *("grad_weights",) * words.sums):
        assert torch.equal(bad[name][others], clean[name][others]), name
    for name in ("grad_weight", "grad_bias"):
        assert torch.equal(bad[name][rest], clean[name][rest]), name
    assert bad["out"][7].isnan().all() and bad["grad_weight"][chosen].isnan().any()


@both
def test_strides_and_expanded_tensors(words: Projections) -> None:
    """Rows apart from one another, weights that are parts of larger tensors, dense columns, an expanded x."""
    args = case_of(words).arguments(torch.float32)
    moved = dict(args)
    for name in ("x", "weight", "bias", "weights", "out_bias", "residual"):
        if args[name] is not None:
            wide = torch.full((*args[name].shape[:-1], args[name].shape[-1] + 3), float("nan"))
            wide[..., : args[name].shape[-1]] = args[name]
            moved[name] = wide[..., : args[name].shape[-1]]
    moved["indices"], moved["inverse"] = (args[n].t().contiguous().t() for n in ("indices", "inverse"))
    columns = {**args, "x": args["x"].t().contiguous().t(), "weight": args["weight"].mT.contiguous().mT}
    with recording("sm_90"):
        want, *found = (with_gradients(OP, given) for given in (args, moved, columns))
        expanded = {**args, "x": args["x"][:1].expand(20, -1)}
        got = call(OP, expanded)["out"]
    for each in found:
        assert all(error(each[name], value.double()) < 1e-6 for name, value in want.items())
    assert error(got, formula(OP, to(expanded, torch.float64))["out"]) < 1e-5


@pytest.mark.parametrize("interpreted", [True, False])
@both
def test_gradients_of_stride_zero(words: Projections, interpreted: bool) -> None:
    args = case_of(words).arguments(torch.float32)
    leaves = [args[n].requires_grad_() for n in ("x", "weight", "bias")]
    with recording("sm_90") if interpreted else torch.enable_grad():
        out = torch.ops.fusedblock.moe_linear.default(*args.values())
        summed = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
        ones = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert all(map(torch.equal, summed, ones))


@both
def test_each_gradient_alone_is_the_same(words: Projections) -> None:
    args, backward = case_of(words).arguments(torch.float32), OPS[OP].backward
    with recording("sm_90"):
        together = backward.launch(**backward_arguments(OP, args))
        for i, result in enumerate(backward.spec.writes):
            needs = {n: n == result.removeprefix("grad_") for n in args}
            alone = backward.launch(**backward_arguments(OP, args, needs))
            assert torch.equal(alone[i], together[i]), result
            assert not any(g.numel() for j, g in enumerate(alone) if j != i)


@pytest.mark.parametrize("tokens", [20, 120])
def test_the_rows_of_grad_x_lie_in_the_weights_gradient(tokens: int) -> None:
    """Where it is wanted and as large: 5 * 40 rows."""
    args, backward = case_of(Projections(tokens=tokens)).arguments(BF16), OPS[OP].backward
    for need in (True, False):
        taken = backward_arguments(OP, args, {n: n == "x" or need for n in args})
        with recording("sm_90") as launches:
            got = backward.launch(**taken)
        (y,) = (launch.arguments["y"] for launch in launches if launch.kernel == "_rows_kernel")
        assert (got[1].untyped_storage().data_ptr() == y.untyped_storage().data_ptr()) == (need and tokens == 20)
        assert all(error(g, w.double()) < 6e-3 for g, w in zip(got[: 1 + need], backward.reference(**taken)))


def test_reference_is_the_formula() -> None:
    for words in CASES:
        args = case_of(words).arguments(torch.float64)
        got, want = with_gradients(OP, args), with_gradients(OP, args, formula)
        assert_accurate(got, {n: want[n] for n in got}, got, torch.float64)


# ---- errors --------------------------------------------------------------------------------------------------------------------

ERRORS = [
    (0, {"x": torch.ones(20, 23)}, "x has shape (20, 23), expected (tokens in=24) for a weight of in=24"),
    (1, {"x": torch.ones(20, 24)}, "x has shape (20, 24), expected (tokens top_k*in=48) for a weight of in=24"),
    (0, {"transposed": True}, "x has shape (20, 24), expected (tokens in=40) for a weight of in=40"),
    (0, {"heads": 3}, "heads=3, expected a divisor of out=40"),
    (1, {"heads": 5}, "heads=5, expected a divisor of in=24"),
    (1, {"heads": 0}, "heads=0, expected a divisor of in=24"),
    (0, {"bias": torch.ones(5, 24)}, "bias has shape (5, 24), expected (experts out=40)"),
    (0, {"bias": torch.ones(4, 40)}, "bias (experts bias_out) has experts=4, but experts=5 so far"),
    (1, {"out_bias": torch.ones(24)}, "out_bias has shape (24,), expected a last axis of out=40"),
    (1, {"residual": torch.ones(20, 24)}, "residual has shape (20, 24), expected a last axis of out=40"),
    (0, {"residual": torch.ones(20, 40)}, "residual is given, but weights is None: slots have none"),
    (0, {"out_bias": torch.ones(40)}, "out_bias is given, but weights is None: slots have none"),
    (1, {"weights": torch.ones(20, 2, dtype=torch.int32)}, "weights has dtype torch.int32, expected a floating one"),
    (0, {"indices": torch.zeros(20, 2, dtype=torch.int64)}, "indices has dtype torch.int64, expected torch.int32"),
    (0, {"order": torch.zeros(39, dtype=torch.int32)}, "order has 39 rows, expected tokens * top_k = 40"),
    (0, {"tile_rows": 24}, "tile_rows=24, expected one of (16, 32, 64, 128)"),
    (0, {"weight": torch.ones(5, 40, 24, dtype=BF16)}, "weight has dtype torch.bfloat16, but x has torch.float32"),
]


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(("which", "changes", "message"), ERRORS, ids=[m[:40] for _, _, m in ERRORS])
def test_errors_name_the_argument(which: int, changes: dict[str, Any], message: str, kernels: bool) -> None:
    args = {**case_of(BOTH[which]).arguments(torch.float32), **changes}
    with recording("sm_90") as launches, pytest.raises(ValueError) as raised:
        call(OP, args) if kernels else OPS[OP].spec.empty(args)
    assert str(raised.value) == f"moe_linear: {message}" and not launches


def test_the_function_names_an_x_of_other_axes_and_an_index_that_is_none() -> None:
    args = case_of(BOTH[1]).arguments(torch.float32)
    index = [args[n] for n in ("order", "inverse", "offsets", "tiles")]
    with pytest.raises(ops.ShapeError, match=r"x has shape \(20, 48\), expected \(tokens heads\*top_k=8 width\) beside weights"):
        ops.moe_linear(args["x"], args["weight"], args["indices"], index, tile_rows=16, weights=args["weights"], heads=4)
    with pytest.raises(TypeError, match="moe_linear: index is a list of 3"):
        ops.moe_linear(args["x"].view(20, 8, 6), args["weight"], args["indices"], index[:3], tile_rows=16,
                       weights=args["weights"], heads=4)  # fmt: skip

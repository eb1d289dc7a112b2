"""The router beside loops over tokens in float64: every score, every launch that sizes choose, ties, NaN, and its index."""

from __future__ import annotations

import re

import moe_formula
import pytest
import torch
from op_cases import (
    Args,
    backward_arguments,
    call,
    check,
    error,
    formula,
    index_case,
    recording,
    route_case,
    with_gradients,
)
from test_costs import bytes_of, counted, stated
from test_ops import runs
from torch import Tensor

import fusedblock
from fusedblock import ops
from fusedblock.kernels import _moe_index, _router, moe_route
from fusedblock.kernels._router import RouterSpec
from fusedblock.kernels._spec import DTYPES, ShapeError
from fusedblock.kernels._target import TARGETS
from fusedblock.ops import OPS

BF16 = torch.bfloat16
INDEX = ("order", "inverse", "offsets", "tiles")
ONE_OF = {"x": torch.ones(1, 8), "weight": torch.ones(8, 8), "bias": None, "correction_bias": None, "scoring": "softmax",
          "top_k": 2, "groups": 1, "topk_groups": 1, "group_score": "max", "renormalise": False, "eps": 0.0, "scale": 1.0,
          "logits_dtype": torch.float32, "weights_dtype": torch.float32, "tile_rows": 16}  # fmt: skip


def arguments(x: Tensor, weight: Tensor, **options: object) -> Args:
    assert options.keys() <= ONE_OF.keys()
    return {**ONE_OF, "x": x, "weight": weight, "logits_dtype": x.dtype, "weights_dtype": x.dtype, **options}


@runs(
    [route_case(1, 72, 8, 2, "softmax", "renormalise"), route_case(33, 40, 20, 3, "softmax_chosen", "bias"),
     route_case(45, 72, 12, 4, "sigmoid", "correction_bias renormalise wide", groups=(4, 2, "top2"), eps=1e-20, scale=2.5),
     route_case(31, 40, 20, 3, "softmax", "wide", groups=(5, 2, "max"), scale=16.0)],
    [route_case(70, 136, 40, 3, "softmax", "renormalise"), route_case(150, 73, 20, 2, "softmax_chosen", "bias"),
     route_case(1100, 40, 12, 2, "sigmoid", "correction_bias renormalise wide", groups=(4, 2, "top2"), eps=1e-20),
     route_case(40, 40, 270, 2, "softmax", "wide"), route_case(70, 200, 100, 4, "softmax", "renormalise wide"),
     route_case(70, 136, 150, 4, "sigmoid", "renormalise"), route_case(70, 40, 270, 2)],
)  # fmt: skip
def test_route(case, dtype, target):
    check(case, dtype, target)


def kernels(launches: list) -> list[str]:
    return [launch.kernel for launch in launches]


@pytest.mark.parametrize("experts", [8, 128, 270])
def test_launches(experts, monkeypatch):
    """Two up to 64 tokens, whatever the experts; the choice rides on the GEMM where all experts are one tile of it."""
    few, some = ["_logits_kernel", "_choice_kernel"], ["_logits_kernel", "_choice_kernel", "index_kernel"]
    many = ["_route_kernel", "index_kernel"] if experts <= 128 else some
    names: list[str] = []
    for module in (moe_route, _moe_index):
        monkeypatch.setattr(module, "_launch", lambda kernel, *rest: names.append(kernel.__name__))
    for tokens, expected in {1: few, 64: few, 65: some, 1024: some, 1025: many, 16384: many}.items():
        OPS["moe_route"].launch(**arguments(torch.zeros(tokens, 8), torch.zeros(experts, 8)))
        assert names == expected
        names.clear()


@pytest.mark.slow
@pytest.mark.parametrize("case", [route_case(1040, 16, 8, 2), route_case(1030, 24, 150, 2)], ids=lambda c: c.id)
def test_many_tokens(case):
    check(case, torch.float32, "sm_90")


@pytest.mark.parametrize("tokens", [0, 1, 31, 33, 45])
@pytest.mark.parametrize(("experts", "top_k"), [(7, 1), (7, 7), (1, 1), (130, 2)])
def test_few_tokens_one_expert_all_experts(tokens, experts, top_k):
    g = torch.Generator().manual_seed(tokens)
    a = arguments(torch.randn(tokens, 24, generator=g), torch.randn(experts, 24, generator=g), top_k=top_k)
    with recording("sm_90") as launches:
        got = with_gradients("moe_route", a)
    want = with_gradients("moe_route", {**a, "x": a["x"].double(), "weight": a["weight"].double()}, formula)
    for name, t in want.items():
        assert got[name].shape == t.shape, name
        assert torch.equal(got[name].long(), t) if name in ("indices", *INDEX) else error(got[name], t) < 1e-5, name
    assert bool(launches) == (tokens > 0)


@pytest.mark.parametrize("tokens", [5, 64, 200, 1100])
def test_all_tokens_to_one_expert(tokens):
    """Every other expert has no row, the last one's end is where all begins or ends."""
    x = torch.ones(tokens, 8)
    weight = torch.zeros(13, 8)
    for expert in (0, 6, 12):
        with recording("sm_90"):
            got = call("moe_route", arguments(x, weight.index_fill(0, torch.tensor(expert), 1.0), top_k=1))
        assert (got["indices"] == expert).all()
        want = moe_formula.index(got["indices"], 13, 16)
        assert all(torch.equal(got[n].long(), want[n]) for n in INDEX)
        assert want["tiles"][0].tolist() == [expert, 0, min(16, tokens), -(-tokens // 16)]


@pytest.mark.parametrize("tokens", [33, 100, 1030])
@pytest.mark.parametrize(
    ("scoring", "options"),
    [("softmax", {}), ("softmax_chosen", {}), ("sigmoid", {"correction_bias": torch.arange(12.0) % 3 - 1}),
     ("softmax_chosen", {"groups": 4, "topk_groups": 2, "group_score": "top2", "top_k": 5}),
     ("sigmoid", {"groups": 4, "topk_groups": 3, "top_k": 5}),
     ("softmax", {"groups": 3, "topk_groups": 2, "top_k": 6})],
)  # fmt: skip
def test_ties_go_to_the_lower_index(tokens, scoring, options):
    """Logits of few small integers, in every arithmetic the same: most choices are ties."""
    g = torch.Generator().manual_seed(0)
    a = arguments(torch.randint(-1, 2, (tokens, 4), generator=g).float(), torch.randint(-1, 2, (12, 4), generator=g).float(),
                  **{"scoring": scoring, "top_k": 4, **options})  # fmt: skip
    logits = a["x"] @ a["weight"].t()
    # softmax and sigmoid keep the order of the logits; beside a correction, equal sums are those of fp32.
    choice = logits if a["correction_bias"] is None else logits.sigmoid() + a["correction_bias"]
    want = moe_formula.choose(choice, a)
    with recording("sm_90"):
        got = call("moe_route", a)
    assert torch.equal(got["indices"].long(), want)
    assert torch.equal(call("moe_route", a)["indices"].long(), want)


@pytest.mark.parametrize("scoring", _router.SCORINGS)
@pytest.mark.parametrize("level", [-200.0, 200.0, -1e30])
def test_scores_that_underflow_make_no_nan(scoring, level):
    """All logits -200: sigmoid and, against one of 0, softmax are 0 in fp32. Weights and gradients stay numbers."""
    x = torch.full((5, 1), 1.0, dtype=BF16)
    weight = torch.full((6, 1), level, dtype=BF16)
    weight[2] = 0.0
    for top_k in (1, 3, 6):
        for eps in (0.0, 1e-20):
            a = arguments(x, weight, scoring=scoring, top_k=top_k, renormalise=True, eps=eps)
            only = arguments(x, weight[3:], scoring=scoring, top_k=min(top_k, 3), renormalise=True, eps=eps)
            for given in (a, only):
                with recording("sm_90"):
                    got = with_gradients("moe_route", given)
                plain = with_gradients("moe_route", given)
                for name in ("weights", "grad_x", "grad_weight"):
                    assert got[name].isfinite().all() and plain[name].isfinite().all(), name
                assert torch.equal(got["weights"], plain["weights"])
                if level < 0 and scoring == "sigmoid" and given is only:
                    assert not got["weights"].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tokens", [7, 50, 100])
@pytest.mark.parametrize(
    "case", [route_case(10, 24, 12, 3, "softmax", "renormalise"), route_case(10, 24, 12, 3, "softmax_chosen", "bias"),
             route_case(10, 24, 12, 4, "sigmoid", "correction_bias renormalise", groups=(4, 2, "top2"), eps=1e-20)],
    ids=lambda c: c.id,
)  # fmt: skip
def test_nan_in_one_token_stays_there(case, tokens, value):
    """It gets experts like any other, so that the rows of all others are where they would be."""
    a = case.arguments(torch.float32)
    clean = {**a, "x": torch.randn(tokens, 24, generator=torch.Generator().manual_seed(3))}
    dirty = {**clean, "x": clean["x"].clone()}
    dirty["x"][tokens // 2] = value
    others = torch.arange(tokens) != tokens // 2
    with recording("sm_90"):
        want, got = with_gradients("moe_route", clean), with_gradients("moe_route", dirty)
    for name in ("weights", "indices", "logits", "grad_x"):
        assert torch.equal(got[name][others], want[name][others]), name
    assert got["logits"][tokens // 2].isnan().any()
    if value != value:
        assert got["weights"][tokens // 2].isnan().all()
    its = got["indices"][tokens // 2].tolist()
    assert len({*its}) == len(its) and all(0 <= e < 12 for e in its)
    index = moe_formula.index(got["indices"], 12, a["tile_rows"])
    assert all(torch.equal(got[n].long(), index[n]) for n in INDEX)


def test_nan_in_one_token_of_many():
    """Where the choice rides on the GEMM."""
    g = torch.Generator().manual_seed(0)
    a = arguments(torch.randn(1030, 16, generator=g), torch.randn(6, 16, generator=g))
    dirty = {**a, "x": a["x"].clone()}
    dirty["x"][700] = float("nan")
    with recording("sm_90"):
        want, got = call("moe_route", a), call("moe_route", dirty)
    others = torch.arange(1030) != 700
    assert all(torch.equal(got[n][others], want[n][others]) for n in ("weights", "indices", "logits"))
    index = moe_formula.index(got["indices"], 6, a["tile_rows"])
    assert all(torch.equal(got[n].long(), index[n]) for n in INDEX)


def test_any_strides():
    case = route_case(40, 40, 12, 3, "softmax", "bias")
    a = case.arguments(torch.float32)
    strided = {**a, **{n: a[n].t().contiguous().t() for n in ("x", "weight")}, "bias": a["bias"][:1].expand(12)}
    dense = {n: t.contiguous() if isinstance(t, Tensor) else t for n, t in strided.items()}
    with recording("sm_90"):
        got, want = with_gradients("moe_route", strided), with_gradients("moe_route", dense)
    for name, t in want.items():
        assert torch.equal(got[name], t), name
    taken = backward_arguments("moe_route", a)
    taken |= {n: taken[n][:1].expand(taken[n].shape) for n in ("grad_weights", "grad_logits")}
    solid = {n: t.contiguous() if isinstance(t, Tensor) else t for n, t in taken.items()}
    with recording("sm_90"):
        pairs = zip(OPS["moe_route_backward"].launch(**taken), OPS["moe_route_backward"].launch(**solid))
    assert all(torch.equal(p, q) for p, q in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_rows_of_a_batch_invariant_router_do_not_depend_on_their_number(dtype):
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(1100, 264, generator=g).to(dtype), torch.randn(12, 264, generator=g).to(dtype)
    with fusedblock.options(batch_invariant=True), recording("sm_90"):
        parts = [call("moe_route", arguments(x[:n], weight)) for n in (1, 40, 200, 1100)]
    for n, part in zip((1, 40, 200), parts):
        for name in ("weights", "indices", "logits"):
            assert torch.equal(part[name], parts[-1][name][:n])


# ---- gradients -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("used", ["weights", "logits"])
def test_a_result_without_a_gradient_is_not_read(used, dtype):
    """Most training uses the weights alone; nothing is filled with zeros for the other."""
    a = route_case(45, 40, 12, 3, "sigmoid", "renormalise wide", eps=1e-20).arguments(dtype)
    leaves = {n: a[n].requires_grad_() for n in ("x", "weight")}
    g = torch.randn(call("moe_route", a)[used].shape, generator=torch.Generator().manual_seed(1)).double()
    with recording("sm_90") as launches:
        result = call("moe_route", a)[used]
        launches.clear()
        got = torch.autograd.grad(result, [*leaves.values()], g.to(result.dtype))
    absent = {"weights": "grad_logits", "logits": "grad_weights"}[used]
    assert launches[0].kernel == "_input_kernel" and launches[0].arguments[absent] is None
    taken = {**backward_arguments("moe_route", a), absent: None}
    assert counted("moe_route_backward", taken, "sm_90") == bytes_of(stated("moe_route_backward", taken, "sm_90"))
    exact = {**a, **{n: t.detach().double().requires_grad_() for n, t in leaves.items()}}
    want = torch.autograd.grad(formula("moe_route", exact)[used], [exact["x"], exact["weight"]], g)
    for p, q in zip(got, want):
        assert error(p, q) < (1e-5 if dtype is torch.float32 else 3e-3)


@pytest.mark.parametrize(
    ("dtype", "frozen", "names"),
    [
        (BF16, "", ["_input_kernel", "_weight_kernel", "sum_rows_kernel"]),
        (BF16, "x", ["_input_kernel", "_weight_kernel", "sum_rows_kernel"]),
        (BF16, "weight bias", ["_input_kernel"]),
        (BF16, "x weight", ["_input_kernel", "_weight_kernel", "sum_rows_kernel"]),
        (torch.float32, "", ["_input_kernel", "grad_input_kernel", "_weight_kernel", "sum_rows_kernel"]),
        (torch.float32, "weight bias", ["_input_kernel", "grad_input_kernel"]),
        (torch.float32, "x", ["_input_kernel", "_weight_kernel", "sum_rows_kernel"]),
    ],
)
def test_frozen_parameters_skip_their_launches_and_their_bytes(dtype, frozen, names):
    a = route_case(600, 40, 12, 3, "softmax_chosen", "bias").arguments(dtype)
    needs = {n: n in ("x", "weight", "bias") and n not in frozen.split() for n in a}
    taken = backward_arguments("moe_route", a, needs)
    results = OPS["moe_route_backward"].launch
    with recording("sm_80") as launches:
        made = dict(zip(("x", "weight", "bias"), results(**taken)))
    assert kernels(launches) == names
    assert counted("moe_route_backward", taken, "sm_80") == bytes_of(stated("moe_route_backward", taken, "sm_80"))
    want = dict(zip(("x", "weight", "bias"), OPS["moe_route_backward"].reference(**taken)))
    for n, t in made.items():
        assert bool(t.numel()) == needs[n]
        assert not needs[n] or error(t, want[n].double()) < (1e-5 if dtype is torch.float32 else 4e-3)


def test_no_tokens_have_gradients_of_zero():
    a = route_case(3, 24, 6, 2, "softmax", "bias").arguments(BF16)
    with recording("sm_90") as launches:
        got = with_gradients("moe_route", {**a, "x": a["x"][:0]})
    assert not launches
    assert got["grad_x"].shape == (0, 24) and not got["grad_weight"].any() and not got["grad_bias"].any()


def test_a_correction_bias_has_no_gradient():
    a = route_case(3, 24, 6, 2, "softmax", "correction_bias").arguments(torch.float32)
    a["correction_bias"].requires_grad_()
    with pytest.raises(ValueError, match="moe_route: correction_bias requires a gradient, and the op has none for it"):
        call("moe_route", a)


# ---- the index of given choices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 31, 33, 45, 64, 200])
@pytest.mark.parametrize(("top_k", "experts", "tile_rows"), [(2, 5, 16), (1, 130, 8), (8, 8, 64), (3, 70, 256), (2, 1, 16)])
def test_index(tokens, top_k, experts, tile_rows):
    a = index_case(tokens, top_k, experts, tile_rows).arguments(BF16)
    if experts == 1:  # named twice
        a["indices"] = torch.zeros(tokens, 2, dtype=torch.int32)
    assert_index(a)


@pytest.mark.parametrize("tokens", [45, 300])
def test_index_of_choices_that_are_no_experts_or_named_twice(tokens):
    g = torch.Generator().manual_seed(0)
    assert_index({"indices": torch.randint(-1, 7, (tokens, 4), generator=g), "experts": 5, "tile_rows": 16})
    assert_index({"indices": torch.full((tokens, 4), 5), "experts": 5, "tile_rows": 16})


@pytest.mark.parametrize("tokens", [45, 300])
@pytest.mark.parametrize("experts", [1, 5])
def test_index_of_choices_beyond_int32(tokens, experts):
    """Their lower halves are experts; they are none."""
    g = torch.Generator().manual_seed(0)
    indices = torch.randint(0, experts, (tokens, 4), generator=g)
    indices[::3, 1] += 2**32
    indices[1::3, 2] -= 2**32
    indices[::7, 0] = 2**63 - 1
    assert_index({"indices": indices, "experts": experts, "tile_rows": 16})


def assert_index(a: Args) -> None:
    want = moe_formula.index(**a)
    plain = call("moe_index", a)
    with recording("sm_90") as launches:
        got = call("moe_index", a)
    tokens, most = len(a["indices"]), 64 if a["experts"] <= 128 else 32
    assert len(launches) == (0 if not tokens else 1 if tokens <= most else 2)
    for name, t in want.items():
        for made in (got, plain):
            assert made[name].dtype == torch.int32
            assert torch.equal(made[name][: len(t)].long(), t), name
    assert len(got["order"]) == a["indices"].numel()
    assert len(got["tiles"]) == _moe_index.max_tiles(a["indices"].numel(), a["experts"], a["tile_rows"])


def test_few_programs_place_many_token_tiles():
    """With 3 SMs, six programs of several tiles each."""
    a = index_case(900, 3, 20).arguments(BF16)
    with recording("sm_90") as launches:
        call("moe_index", a)
    assert launches[1].grid[0] == 5 and launches[1].arguments["PER"] == 3
    assert_index(a)


# ---- what does not fit -----------------------------------------------------------------------------------------------------

ERRORS = [
    ({"weight": torch.ones(8, 7)}, ShapeError, "weight (experts hidden) has hidden=7, but hidden=8 so far"),
    ({"weight": torch.ones(8, 8, dtype=BF16)}, ValueError, "weight has dtype torch.bfloat16, but x has torch.float32"),
    ({"bias": torch.ones(7)}, ShapeError, "bias (experts) has experts=7, but experts=8 so far"),
    ({"correction_bias": torch.ones(9)}, ShapeError, "correction_bias (experts) has experts=9, but experts=8 so far"),
    ({"scoring": "relu"}, ValueError, "scoring='relu', expected one of softmax, sigmoid, softmax_chosen"),
    ({"group_score": "mean"}, ValueError, "group_score='mean', expected one of max, top2"),
    ({"top_k": 0}, ValueError, "top_k=0, expected 1 to experts=8"),
    ({"top_k": 9}, ValueError, "top_k=9, expected 1 to experts=8"),
    ({"groups": 3}, ValueError, "groups=3, expected a divisor of experts=8"),
    ({"groups": 4, "topk_groups": 5}, ValueError, "topk_groups=5, expected 1 to groups=4"),
    ({"groups": 8, "topk_groups": 1}, ValueError, "top_k=2, but topk_groups=1 groups of 1 experts may be chosen"),
    ({"groups": 8, "topk_groups": 2, "group_score": "top2"}, ValueError,
     "groups=8 of experts=8, expected two experts a group with group_score='top2'"),
    ({"eps": -1.0}, ValueError, "eps=-1.0, expected a finite number of at least 0"),
    ({"scale": float("inf")}, ValueError, "scale=inf, expected a finite number"),
    ({"logits_dtype": BF16}, ValueError, "logits_dtype=torch.bfloat16, expected x's torch.float32 or torch.float32"),
    ({"weights_dtype": torch.int32}, ValueError, "weights_dtype=torch.int32, expected x's torch.float32 or torch.float32"),
    ({"tile_rows": 0}, ValueError, "tile_rows=0, expected one of (8, 16, 32, 64, 128, 256)"),
    ({"tile_rows": 17}, ValueError, "tile_rows=17, expected one of (8, 16, 32, 64, 128, 256)"),
    ({"tile_rows": 512}, ValueError, "tile_rows=512, expected one of (8, 16, 32, 64, 128, 256)"),
    *[({"correction_bias": torch.ones(8, dtype=t)}, ValueError, f"correction_bias has dtype {t}, expected a floating one")
      for t in (torch.int32, torch.bool, torch.complex64)],
    ({"x": torch.ones(1, 8, dtype=torch.int32)}, ValueError,
     f"x has dtype torch.int32, expected one of {', '.join(map(str, DTYPES))}"),
    ({"x": torch.ones(1, 0), "weight": torch.ones(8, 0)}, ShapeError, "hidden=0, expected at least 1"),
    ({"weight": torch.ones(1025, 8)}, ShapeError, "experts=1025, expected 1 to 1024"),
]  # fmt: skip


@pytest.mark.parametrize("interpreted", [True, False], ids=["kernels", "reference"])
@pytest.mark.parametrize(("changes", "kind", "message"), ERRORS, ids=[e[2] for e in ERRORS])
def test_errors_name_the_argument_and_both_values(changes, kind, message, interpreted):
    launches: list = []
    with pytest.raises(kind, match=f"^{re.escape('moe_route: ' + message)}$"):
        if interpreted:
            with recording("sm_90") as launches:
                call("moe_route", {**ONE_OF, **changes})
        else:
            call("moe_route", {**ONE_OF, **changes})
    assert not launches


def test_errors_of_the_index():
    with pytest.raises(ShapeError, match=re.escape("moe_index: tokens=1073741824 times top_k=2 is 2147483648, expected")):
        call("moe_index", {"indices": torch.zeros(1, 1, dtype=torch.int32).expand(2**30, 2), "experts": 4, "tile_rows": 16})
    with pytest.raises(ValueError, match="moe_index: indices has dtype torch.float32, expected one of torch.int32, torch.int64"):
        call("moe_index", {"indices": torch.zeros(1, 1), "experts": 4, "tile_rows": 16})
    with pytest.raises(ValueError, match=re.escape("moe_index: tile_rows=17, expected one of (8, 16, 32, 64, 128, 256)")):
        call("moe_index", {"indices": torch.zeros(1, 1, dtype=torch.int32), "experts": 4, "tile_rows": 17})


def test_an_index_that_is_none_is_named():
    chosen = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32)
    index = ops.moe_index(chosen, 3, 16)
    given = (torch.randn(2, 8), torch.randn(3, 8, 8), torch.randn(3, 8, 4), torch.rand(2, 2), chosen)
    assert ops.moe_experts(*given, list(index), tile_rows=16).shape == (2, 8)
    three, one = "Tensor, Tensor, Tensor", index[0]
    for bad, found in (
        (index[:3], f"tuple of 3: {three}"), ((*index, one), f"tuple of 5: {three}, Tensor, Tensor"), (one, "Tensor"),
        ([*index[:3], None], f"list of 4: {three}, NoneType"), (None, "NoneType"), ("four", "str"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"^moe_experts: index is a {found}; expected the tensors {', '.join(INDEX)}$"):
            ops.moe_experts(*given, bad, tile_rows=16)


# ---- what is chosen for a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("experts", [8, 60, 128, 160, 256, 512, 1024])
def test_configs_fit(name, experts):
    for tokens in (1, 16, 33, 64, 65, 1024, 1025, 4096, 16384, 1 << 18):
        for itemsize in (2, 4):
            c = moe_route.configure(tokens, experts, itemsize, TARGETS[name])
            ring = c.num_stages * (c.gemm_tokens + c.gemm_experts) * c.block_k * itemsize
            assert ring <= TARGETS[name].smem_bytes
            assert c.last == (tokens <= 64)
            assert not c.fused or c.gemm_experts >= experts and c.splits == 1 and c.gemm_tokens == c.block_tokens


def test_public_call_takes_a_spec():
    spec = RouterSpec(2, scoring="sigmoid", renormalise=True, eps=1e-20, round_logits=False, round_weights=False)
    x, weight = torch.randn(5, 16).to(BF16), torch.randn(6, 16).to(BF16)
    weights, indices, logits, *index = ops.moe_route(x, weight, spec, tile_rows=16)
    assert (weights.dtype, logits.dtype, len(index)) == (torch.float32, torch.float32, 4)
    torch.testing.assert_close(weights.sum(-1), torch.ones(5))
    for dtype in (torch.int32, torch.bool, torch.complex64):
        with pytest.raises(ValueError, match=f"^moe_route: x has dtype {dtype}, expected one of torch.float32, "):
            ops.moe_route(x.to(dtype), weight.to(dtype), spec, tile_rows=16)
    with pytest.raises(ValueError, match="moe_route: bias is None, but the router has bias=True"):
        ops.moe_route(x, weight, RouterSpec(2, bias=True), tile_rows=16)

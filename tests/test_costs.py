"""One cost model: the bytes and launches an op's spec states are those the interpreter counts while its kernels run."""

from __future__ import annotations

import itertools

import pytest
import torch
from op_cases import (
    FEW_SMS,
    FORWARD_ONLY,
    PATHS,
    SMALL,
    backward_arguments,
    differentiable,
    index_case,
    layer_norm_case,
    linear_case,
    mlp_case,
    norm_case,
    plain_mlp_case,
    qkv_case,
    rope_case,
    route_case,
    to,
)

from fusedblock.interpret import count_traffic
from fusedblock.kernels._spec import Cost
from fusedblock.kernels._target import override
from fusedblock.ops import COSTS, OPS

BF16 = torch.bfloat16
RAGGED = (
    norm_case(37, 131, save=False),
    layer_norm_case(37, 384, "residual wide"),
    layer_norm_case(700, 131, "bias"),
    linear_case(150, 73, 264, "bias residual norm_weight"),
    linear_case(150, 136, 264, "residual norm_weight"),
    qkv_case(2, 75, 72, 64, 1, 3, bias=True, tables="one"),
    qkv_case(1, 75, 40, 24, 1, 1, tables="view"),
    qkv_case(2, 75, 72, 64, 2, 1, tables="each", norm="early", part=0.25, layout="per_head"),
    qkv_case(1, 75, 40, 80, 1, 2, tables="repeat", rope="interleaved", norm="layer", layout="columns"),
    rope_case(2, 75, 80, 1, 2, tables="view", part=0.4),
    mlp_case(150, 136, 264, bias=True),
    linear_case(150, 136, 264, "bias residual wide columns", 0.5),
    plain_mlp_case(150, 73, 264, "gelu", "bias columns"),
    route_case(60, 73, 270, 2),  # each way to launch it
    route_case(150, 73, 20, 3, "softmax_chosen", "bias wide"),
    route_case(1100, 40, 12, 2, "sigmoid", "correction_bias"),
    index_case(900, 3, 20),
)

# With several gradients each, none of them a passthrough alone.
SEVERAL = [*{case.op: case for case in reversed(SMALL) if case.op not in ("attention", "rope", "moe_route")}.values()]
SEVERAL += [qkv_case(1, 5, 24, 16, 1, 2, norm="late")]
SEVERAL += [layer_norm_case(5, 24, "bias"), linear_case(5, 24, 40, "bias wide residual", 0.5)]


def counted(op: str, args: dict, target: str) -> list[tuple[int, int]]:
    with count_traffic(FEW_SMS[target]) as traffic:
        OPS[op].launch(**args)
    assert traffic.total("write_races") == traffic.total("read_write_races") == 0
    return [(launch.read_bytes, launch.written_bytes) for launch in traffic.launches]


def stated(op: str, args: dict, target: str) -> tuple[Cost, ...]:
    with override(FEW_SMS[target]):
        return COSTS[op](*args.values())


def bytes_of(costs: tuple[Cost, ...]) -> list[tuple[int, int]]:
    return [(c.read_bytes, c.written_bytes) for c in costs]


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("case", [*SMALL, *FORWARD_ONLY, *RAGGED], ids=lambda c: c.id)
def test_bytes_of_the_forward(case, target):
    args = case.arguments(BF16)
    assert counted(case.op, args, target) == bytes_of(stated(case.op, args, target))


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("case", [*SMALL, *RAGGED[2:3], *RAGGED[7:9], *RAGGED[11:-1]], ids=lambda c: c.id)
def test_bytes_of_the_backward(case, target):
    args = backward_arguments(case.op, case.arguments(BF16))
    backward = OPS[case.op].backward.spec.name
    assert counted(backward, args, target) == bytes_of(stated(backward, args, target))


@pytest.mark.parametrize("case", SEVERAL, ids=lambda c: c.id)
def test_a_gradient_that_is_not_wanted_costs_nothing(case):
    """Every one, and every pair, left out: its launch is gone and its bytes with it."""
    forward = case.arguments(BF16)
    backward = OPS[case.op].backward.spec.name
    names = [n for n in differentiable(case.op, forward) if n not in OPS[case.op].passthrough]
    full = len(stated(backward, backward_arguments(case.op, forward), "sm_80"))
    for left_out in itertools.chain(itertools.combinations(names, 1), itertools.combinations(names, 2)):
        args = backward_arguments(case.op, forward, {n: n in names and n not in left_out for n in forward})
        costs = stated(backward, args, "sm_80")
        assert counted(backward, args, "sm_80") == bytes_of(costs)
        if case.op == "norm":  # all gradients share a launch; those of weight and bias have one more
            wanted = {*names} - {*left_out}
            assert len(costs) == (len(wanted) > 0) + (len(wanted - {"x"}) > 0)
        elif case.op == "moe_experts":  # down_bias alone needs nothing of what the others share; x has a sum besides
            wanted = {*names} - {*left_out}
            assert len(costs) == len(wanted) + ("x" in wanted) + (len(wanted - {"down_bias"}) > 0)
        elif case.op == "moe_linear":  # of a sum: x's is made where the weights' are begun and what weight's reads
            wanted = {*names} - {*left_out}
            assert len(costs) == len(wanted - {"x"}) + (len(wanted & {"x", "weight", "weights"}) > 0)
        else:
            assert len(costs) == full - len(left_out)


def test_broadcast_inputs_are_read_once():
    """An expanded residual lies in memory once."""
    args = linear_case(37, 72, 96, "residual").arguments(BF16)
    dense = stated("linear", args, "sm_80")
    args["residual"] = args["residual"][:1].expand(37, 96)
    (cost,) = stated("linear", args, "sm_80")
    assert counted("linear", args, "sm_80") == [(cost.read_bytes, cost.written_bytes)]
    assert dense[0].read_bytes - cost.read_bytes == 36 * 96 * 2


@pytest.mark.parametrize("case", [*SMALL, *FORWARD_ONLY], ids=lambda c: c.id)
def test_costs_need_shapes_only(case):
    """Fake and meta tensors give what real ones give."""
    from torch._subclasses import FakeTensorMode

    args = case.arguments(BF16)
    real = COSTS[case.op](*args.values())
    assert real
    assert all(c.flops > 0 and c.executed_flops >= c.flops for c in real)
    assert COSTS[case.op](*to(args, device="meta").values()) == real
    mode = FakeTensorMode()
    with mode:
        fake = {n: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for n, v in args.items()}
        assert COSTS[case.op](*fake.values()) == real


def test_bytes_by_hand():
    """Every tensor once: 150 rows of 136 by 264 rows of 136, plus residual, gamma and results."""
    args = linear_case(150, 136, 264, "residual norm_weight").arguments(BF16)
    (cost,) = stated("linear", args, "sm_90")
    tiles = 3  # of 128 columns
    assert cost.read_bytes == 2 * (150 * 136 + 264 * 136 + 150 * 264 + 264)
    assert cost.written_bytes == 2 * (150 * 264 * 2) + 4 * 150 * tiles
    assert cost.flops == 2 * 150 * 136 * 264

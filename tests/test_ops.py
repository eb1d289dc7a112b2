"""Every op against float64: results and gradients, each dtype, descriptors and pointers, ragged shapes; and its registration."""

from __future__ import annotations

import op_cases
import pytest
import torch
from formulas import FORMULAS
from op_cases import (
    DTYPES,
    EPS,
    FORWARD_ONLY,
    HALVES,
    PATHS,
    SMALL,
    Args,
    Case,
    assert_accurate,
    backward_arguments,
    check,
    linear_case,
    mlp_case,
    only_config,
    plain_mlp_case,
    qkv_case,
    recording,
    rope_case,
    to,
)
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import fusedblock
from fusedblock import ops
from fusedblock.kernels import _gemm
from fusedblock.kernels._target import TARGETS
from fusedblock.ops import COSTS, OPS

BF16 = torch.bfloat16
# fp32 has one table for all targets, and no larger tiles for more rows.
WIDE = [(BF16, "sm_90"), (BF16, "sm_80")]
RUNS = [(torch.float32, "sm_90"), (torch.float16, "sm_90"), *WIDE]


def cases(*given: Case):
    return pytest.mark.parametrize("case", given, ids=lambda c: c.id)


def runs(small: list[Case], wide: list[Case]):
    """Small cases in every dtype, those of many tiles in bf16: on a target with descriptors and one without."""
    chosen = [(c, *r) for c in small for r in RUNS] + [(c, *r) for c in wide for r in WIDE]
    return pytest.mark.parametrize(
        ("case", "dtype", "target"), chosen, ids=[f"{c.id}-{str(d).removeprefix('torch.')}-{t}" for c, d, t in chosen]
    )


# ---- linear ----------------------------------------------------------------------------------------------------------------


@runs(
    [linear_case(1, 264, 40), linear_case(37, 72, 96, "bias residual")],
    [linear_case(150, 136, 264, "residual"), linear_case(300, 73, 131)],
)
def test_linear(case, dtype, target):
    check(case, dtype, target)


@runs(
    [linear_case(3, 264, 40, "norm_weight"), linear_case(37, 72, 96, "bias residual norm_weight")],
    [linear_case(150, 136, 264, "residual norm_weight"), linear_case(300, 73, 131, "bias norm_weight")],
)
def test_linear_with_row_statistics(case, dtype, target):
    check(case, dtype, target, gradients=False)


def test_linear_in_column_halves():
    """The widest tile is finished in two halves, each with a partial sum of its own."""
    (launch,) = check(linear_case(1100, 72, 392, "bias residual norm_weight"), BF16, "sm_90", gradients=False)
    assert (launch.arguments["BN"], launch.arguments["SPLIT"], launch.arguments["TMA"]) == (256, 2, True)


def test_operands_that_descriptors_cannot_hold_take_pointers():
    for inner, outer, tma in ((72, 96, True), (73, 96, False), (72, 97, False)):
        (launch,) = check(linear_case(150, inner, outer), BF16, "sm_90", gradients=False)
        assert launch.arguments["TMA"] is tma


# ---- the row scale of a norm that was never launched -----------------------------------------------------------------------


def _norm_then(consumer: str, a: Args, h: Tensor, gamma: Tensor) -> dict[str, Tensor]:
    given = {"bias": None, "residual": None, "kind": "rms", "eps": EPS, "weight_offset": 0.0}
    y = FORMULAS["norm"]({"x": h, "weight": gamma, **given})["y"]
    return FORMULAS[consumer]({**a, "x": y.view(a["x"].shape), "sumsq": None})


@pytest.mark.parametrize(("dtype", "target"), [(torch.float32, "sm_90"), (BF16, "sm_90"), (BF16, "sm_80")])
@pytest.mark.parametrize("consumer", ["qkv_rope", "gated_mlp"])
def test_row_statistics_equal_a_norm(consumer, dtype, target):
    """linear's (scaled, sumsq) into the next GEMM's row scale = norm, then the GEMM."""
    producer = linear_case(75, 40, 264, "residual norm_weight").arguments(dtype)
    case = qkv_case(1, 75, 264, 16, 1, 2, bias=True) if consumer == "qkv_rope" else mlp_case(75, 264, 72, bias=True, save=False)
    a = case.arguments(dtype, seed=1)

    def fused() -> dict[str, Tensor]:
        _, scaled, sumsq = op_cases.call("linear", producer).values()
        shape = a["x"].shape[:-1]
        return op_cases.call(consumer, {**a, "x": scaled.view(*shape, -1), "sumsq": sumsq.view(*shape, -1)})

    with recording(target) as launches:
        got = fused()
    assert len(launches) == 2
    h = FORMULAS["linear"](to(producer, torch.float64))["out"]
    want = _norm_then(consumer, to(a, torch.float64), h, producer["norm_weight"].double())
    h = op_cases.call("linear", {**producer, "norm_weight": None})["out"]
    y, _, _ = OPS["norm"].reference(h, producer["norm_weight"], None, None, "rms", EPS, 0.0, True, False, dtype)
    plain = op_cases.call(consumer, {**a, "x": y.view(a["x"].shape)})
    assert_accurate(got, {n: want[n] for n in got}, plain, dtype)


# ---- QKV and rotary embedding ----------------------------------------------------------------------------------------------

QKV_SMALL = [
    qkv_case(2, 19, 40, 16, 3, 1, bias=True, tables="each"),
    qkv_case(1, 37, 72, 24, 1, 3, tables="view"),
    qkv_case(2, 19, 40, 32, 1, 3, tables="repeat", rope="interleaved", norm="layer"),
    qkv_case(1, 21, 40, 80, 2, 1, bias=True, part=0.4, norm="early", layout="per_head"),
    qkv_case(1, 21, 72, 24, 1, 2, bias=True, tables="repeat", rope="interleaved", part=0.5, norm="late", layout="columns"),
    qkv_case(2, 19, 40, 16, 3, 1, rope="", layout="stacked"),
]
QKV_WIDE = [
    qkv_case(2, 70, 72, 64, 1, 7, tables="one"),
    qkv_case(2, 70, 73, 64, 1, 1, bias=True, tables="one"),
    qkv_case(1, 150, 40, 96, 1, 3, bias=True),
    qkv_case(3, 50, 72, 128, 1, 1, tables="view"),
    qkv_case(1, 19, 40, 256, 1, 3, tables="view"),
    qkv_case(2, 70, 72, 128, 1, 2, norm="early", bias=True),
    qkv_case(2, 70, 72, 64, 2, 1, norm="layer", rope="interleaved", tables="repeat"),
    qkv_case(2, 70, 72, 64, 3, 1, part=0.25, bias=True, layout="per_head"),
    qkv_case(2, 70, 72, 64, 3, 1, rope="", bias=True, layout="columns"),
    qkv_case(1, 150, 40, 80, 1, 2, norm="late", part=0.5, layout="columns"),
    qkv_case(1, 150, 40, 96, 2, 1, part=0.25, norm="layer", bias=True, layout="per_head"),
    qkv_case(1, 150, 72, 128, 1, 2, part=0.75, layout="stacked"),
    qkv_case(1, 150, 72, 256, 1, 1, norm="early", part=0.5),
]
BY_DESCRIPTORS = (True, False, False, True, False, True, True, True, True, False, False, False, False)


@runs(QKV_SMALL, QKV_WIDE)
def test_qkv_rope(case, dtype, target):
    check(case, dtype, target)


@pytest.mark.parametrize(("case", "tma"), [*zip(QKV_WIDE, BY_DESCRIPTORS, strict=True)], ids=lambda v: getattr(v, "id", v))
def test_qkv_rope_by_descriptors(case, tma):
    """Rows of 16 byte multiples and heads that fill a tile's columns, pairs a power of two apart; else pointers."""
    (launch,) = check(case, BF16, "sm_90", gradients=False)
    assert launch.arguments["TMA"] is tma


@pytest.mark.parametrize(
    ("case", "tile"),
    [(qkv_case(1, 1030, 40, 128, 1, 1, tables="view"), (256, 2)), (qkv_case(1, 1030, 40, 128, 1, 1, norm="early"), (128, 1)),
     (qkv_case(1, 1030, 40, 64, 2, 1, rope="", bias=True, layout="per_head"), (256, 2))], ids=lambda v: getattr(v, "id", v),
)  # fmt: skip
def test_qkv_rope_in_column_halves(case, tile):
    """The widest tile is finished in two halves; with fp32 tables and a norm it would spill."""
    (launch,) = check(case, BF16, "sm_90", gradients=False)
    assert (launch.arguments["BN"], launch.arguments["SPLIT"]) == tile


def test_narrow_tables():
    """bf16 tables, as HF makes them: the widest tile whole, or in halves with the norm."""
    for norm, split in (("", 1), ("early", 2)):
        case = qkv_case(1, 1030, 40, 128, 1, 1, tables="view", norm=norm)
        a = case.arguments(BF16)
        a = {**a, **{n: a[n].to(BF16) for n in ("cos", "sin")}}
        (launch,) = check(case, BF16, "sm_90", gradients=False, args=a)
        assert (launch.arguments["BN"], launch.arguments["SPLIT"]) == (256, split)


ROPE = [
    rope_case(2, 19, 64, 1, 3, tables="each"), rope_case(1, 37, 24, 2, 1, tables="view"),
    rope_case(2, 19, 32, 3, 1, tables="repeat", interleaved=True), rope_case(1, 37, 80, 1, 2, part=0.4, heads_first=True),
    rope_case(2, 5, 96, 1, 1, part=0.25), rope_case(1, 21, 40, 1, 2, tables="view", interleaved=True, part=0.5),
    rope_case(1, 9, 256, 2, 1, part=0.75),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@cases(*ROPE)
def test_rope(case, dtype):
    """One launch each way, whatever the strides."""
    assert [launch.kernel for launch in check(case, dtype, "sm_90")] == ["_turn_kernel"] * 2


def test_rope_and_its_backward_are_inverse():
    a = rope_case(2, 9, 24, 1, 2, tables="repeat", interleaved=True, part=0.5).arguments(torch.float64)
    q, k = (a[n].requires_grad_() for n in "qk")
    with recording("sm_90"):
        turned = ops.rope(q, k, a["cos"], a["sin"], interleaved=True)
        back = torch.autograd.grad(turned, [q, k], turned)
    for given, again in zip((q, k), back):
        torch.testing.assert_close(again, given.detach())


@runs([qkv_case(2, 19, 72, 32, 1, 2, tables="each", normed=True)], [qkv_case(2, 70, 72, 64, 1, 1, bias=True, normed=True)])
def test_qkv_rope_with_a_row_scale(case, dtype, target):
    check(case, dtype, target, gradients=False)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_that_of_transformers(interleaved):
    if interleaved:
        from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb  # imported here: it takes seconds
    else:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    a = qkv_case(2, 9, 40, 24, 2, 3, tables="each", rope="interleaved" if interleaved else "half").arguments(torch.float32)
    plain = op_cases.call("qkv_rope", {**a, "cos": None, "sin": None})
    cos, sin = (a[n].repeat_interleave(2, -1) if interleaved else torch.cat((a[n], a[n]), -1) for n in ("cos", "sin"))
    want = apply_rotary_pos_emb(plain["q"].transpose(1, 2), plain["k"].transpose(1, 2), cos, sin)
    turned = dict(zip("qk", ops.rope(plain["q"], plain["k"], a["cos"], a["sin"], interleaved=interleaved)))
    for got in (op_cases.call("qkv_rope", a), turned):
        for name, value in zip("qk", want):
            torch.testing.assert_close(got[name].transpose(1, 2), value)


def test_head_norm_is_that_of_transformers():
    """Qwen3's q_norm: over head_dim, rounded before the weight."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    a = qkv_case(2, 9, 40, 16, 2, 3, norm="early", rope="").arguments(BF16)
    norm = Qwen3RMSNorm(16, eps=EPS)
    norm.weight.data = a["q_norm"][0]
    got = op_cases.call("qkv_rope", a)
    torch.testing.assert_close(got["q"], norm(got["q_pre"]))


@pytest.mark.parametrize("target", PATHS)
def test_one_table_of_several_batch_items_beside_one_for_all(target):
    """cos for all batch items, sin of each: axes bind one by one, so both must be read by their own."""
    a = qkv_case(3, 5, 40, 16, 1, 2, tables="each").arguments(torch.float32)
    for one in ("cos", "sin"):
        mixed = {**a, one: a[one][1:2].contiguous()}
        check(Case("qkv_rope", "mixed", lambda *_, mixed=mixed: mixed), torch.float32, target)


# ---- gated MLP -------------------------------------------------------------------------------------------------------------


@runs(
    [mlp_case(37, 72, 40, "silu", bias=True), mlp_case(19, 72, 40, "gelu"), mlp_case(5, 136, 72, "gelu_tanh")],
    [mlp_case(150, 136, 200, "silu"), mlp_case(100, 73, 131, "gelu_tanh", bias=True)],
)
def test_gated_mlp(case, dtype, target):
    check(case, dtype, target)


@runs(
    [mlp_case(37, 72, 40, bias=True, normed=True, save=False)],
    [mlp_case(150, 136, 200, "gelu", normed=True, save=False)],
)
def test_gated_mlp_with_a_row_scale(case, dtype, target):
    check(case, dtype, target, gradients=False)


def _placed(a: Args, layout: str) -> Args:
    """gate and up in one buffer, in either order, or as one and the same tensor, or with row strides of their own."""
    ffn, hidden = a["gate_weight"].shape
    buffer = torch.zeros(2 * ffn + 8, hidden + 8, dtype=a["x"].dtype)
    if layout == "same":
        return {**a, "up_weight": a["gate_weight"]}
    low, high = buffer[:ffn, :hidden], buffer[ffn + 8 :, :hidden]
    if layout == "interleaved":
        low, high = buffer[0 : 2 * ffn : 2, :hidden], buffer[1 : 2 * ffn : 2, :hidden]
    if layout == "strides":
        high = torch.zeros(ffn, hidden + 16, dtype=a["x"].dtype)[:, :hidden]
    gate, up = (high, low) if layout == "up first" else (low, high)
    return {**a, "gate_weight": gate.copy_(a["gate_weight"]), "up_weight": up.copy_(a["up_weight"])}


@pytest.mark.parametrize(
    ("layout", "stacked"), [("gate first", 1), ("up first", 2), ("interleaved", 1), ("same", 0), ("strides", 0)]
)
def test_gate_and_up_by_one_descriptor(layout, stacked):
    """Two allocations are one box of a descriptor whose stride is their distance, whichever lies lower in memory."""
    case = mlp_case(100, 72, 96, bias=True, save=False)
    (launch,) = check(case, BF16, "sm_90", gradients=False, args=_placed(case.arguments(BF16), layout))
    assert (launch.arguments["TMA"], launch.arguments["STACKED"]) == (True, stacked)


def test_one_row_of_gate_and_up():
    """A descriptor refuses odd row strides, even where there is one row."""
    case = mlp_case(100, 64, 1, save=False)
    a = case.arguments(BF16)
    for name in ("gate_weight", "up_weight"):
        a[name] = torch.cat((a[name], torch.zeros(1, 9, dtype=BF16)), 1)[:, :64]
    check(case, BF16, "sm_90", gradients=False, args=a)


# ---- every shipped config --------------------------------------------------------------------------------------------------


def shipped(itemsize: int) -> list[tuple[str, str, _gemm.Config]]:
    """(target, kind, config), each config once per kind, with the pointer forms that descriptor configs fall back to."""
    found = {}
    for name, target in TARGETS.items():
        for kind, rows in _gemm.tables(itemsize, target).items():
            for _, config in rows:
                forms = [config] + [_gemm.usable(config, torch.empty(0))] * config.tma
                for form in forms:
                    found.setdefault((kind, form), name)
    return [(name, kind, config) for (kind, config), name in found.items()]


OF_KIND = {
    "nt": [linear_case(150, 136, 264, "bias residual norm_weight"), linear_case(150, 136, 264, "residual wide columns", 0.5),
           plain_mlp_case(150, 136, 264, "gelu", "bias"), qkv_case(2, 75, 72, 64, 1, 3, bias=True, normed=True)],
    "pair": [mlp_case(150, 136, 168, normed=True)],
    "nn": [linear_case(150, 136, 264), linear_case(150, 136, 264, "columns")],
    "tn": [linear_case(150, 136, 264)],
}


SHIPPED = [(d, *row, case) for d in DTYPES for row in shipped(d.itemsize) for case in OF_KIND[row[1]]]


def _shipped_id(dtype: torch.dtype, name: str, kind: str, c: _gemm.Config, case: Case) -> str:
    tile = f"{c.block_m}x{c.block_n}x{c.block_k}-w{c.num_warps}-s{c.num_stages}"
    return f"{str(dtype).removeprefix('torch.')}-{kind}-{case.op}-{tile}-{'descriptors' if c.tma else 'pointers'}"


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "name", "kind", "config", "case"), SHIPPED, ids=[_shipped_id(*row) for row in SHIPPED])
def test_every_shipped_config(dtype, name, kind, config, case):
    with only_config(config):
        launches = check(case, dtype, name if config.tma else "sm_80", gradients=kind in ("nn", "tn"))
    index = {"nt": 0, "pair": 0, "nn": 1, "tn": 2}[kind]
    assert launches[index].arguments["BM"] == config.block_m
    assert launches[index].arguments["TMA"] == config.tma


# ---- registration ----------------------------------------------------------------------------------------------------------


@cases(*SMALL, *FORWARD_ONLY)
def test_opcheck(case):
    args = case.arguments(torch.float32)
    if case in SMALL:
        for name in op_cases.differentiable(case.op, args):
            args[name].requires_grad_()
    torch.library.opcheck(getattr(torch.ops.fusedblock, case.op).default, tuple(args.values()))


@cases(*SMALL)
def test_opcheck_of_the_backward_op(case):
    backward = OPS[case.op].backward
    args = backward_arguments(case.op, case.arguments(BF16))
    torch.library.opcheck(getattr(torch.ops.fusedblock, backward.spec.name).default, tuple(args.values()))


def test_every_op_is_checked():
    """A new op must get a case."""
    named = {c.op for c in (*SMALL, *FORWARD_ONLY)}
    assert {*OPS} == named | {op.backward.spec.name for op in map(OPS.get, named) if op.backward}
    assert {*OPS} <= {*COSTS}


def public(op: str):
    """A call of the public function with every tensor as an argument."""
    if op == "rms_norm":
        return lambda x, w: ops.rms_norm(x, w, eps=EPS), [(2, 3, 24), (24,)]
    if op == "layer_norm":
        return lambda x, w, b, r: ops.layer_norm(x, w, b, residual=r), [(2, 3, 24), (24,), (24,), (2, 3, 24)]
    if op == "linear":
        return lambda x, w, b, r: ops.linear(x, w, b, residual=r), [(2, 3, 24), (40, 24), (40,), (2, 3, 40)]
    if op == "plain_mlp":
        return lambda x, w, b: ops.plain_mlp(x, w, b, activation="relu2"), [(2, 3, 24), (40, 24), (40,)]
    if op == "gated_mlp":
        call = lambda x, g, u, a, b: ops.gated_mlp(x, g, u, activation="gelu", gate_bias=a, up_bias=b)
        return call, [(2, 3, 24), (40, 24), (40, 24), (40,), (40,)]
    if op == "rope":
        cos, sin = (t[..., :4] for t in op_cases.rotary_tables(1, 3, 16, torch.float32))
        return lambda q, k: ops.rope(q, k, cos, sin, interleaved=True), [(2, 3, 2, 16), (2, 3, 1, 16)]
    if op == "qkv_norm_rope":
        cos, sin = (t[..., :8] for t in op_cases.rotary_tables(1, 3, 16, torch.float32))
        call = lambda x, q, k, v, b, c: ops.qkv_rope(x, q, k, v, cos, sin, head_dim=16, q_norm=b, k_norm=c, norm_kind="layer")
        return call, [(2, 3, 24), (32, 24), (16, 24), (16, 24), (2, 16), (16,)]
    if op == "qkv_rope":
        cos, sin = (t[..., :8] for t in op_cases.rotary_tables(1, 3, 16, torch.float32))
        return lambda x, q, k, v: ops.qkv_rope(x, q, k, v, cos, sin, head_dim=16), [(2, 3, 24), (32, 24), (16, 24), (16, 24)]
    return lambda q, k, v: fusedblock.attention(q, k, v, causal=True), [(2, 3, 2, 16), (2, 5, 1, 16), (2, 5, 1, 16)]


PUBLIC = ("rms_norm", "layer_norm", "linear", "qkv_rope", "qkv_norm_rope", "rope", "gated_mlp", "plain_mlp", "attention")


def run_public(call, shapes) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    leaves = [torch.randn(s, generator=g).requires_grad_() for s in shapes]
    out = call(*leaves)
    out = out if isinstance(out, tuple) else (out,)
    return [*out, *torch.autograd.grad(out, leaves, [op_cases.result_gradient("", t) for t in out])]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", PUBLIC)
def test_compile_without_graph_breaks(op, backend):
    call, shapes = public(op)
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for got, want in zip(run_public(compiled, shapes), run_public(call, shapes), strict=True):
        torch.testing.assert_close(got, want)
    with torch.no_grad():
        inputs = [torch.randn(s, generator=torch.Generator().manual_seed(1)) for s in shapes]
        torch.testing.assert_close(compiled(*inputs), call(*inputs))


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "linear", "gated_mlp", "plain_mlp"])
@pytest.mark.parametrize("lead", [(), (1,), (4, 2, 3)])
def test_leading_axes(op, lead):
    """`... hidden` is any number of leading axes, none too: the same rows come out."""
    call, shapes = public(op)
    g = torch.Generator().manual_seed(0)
    rows = [torch.randn(s if len(s) < 3 else (24, s[-1]), generator=g) for s in shapes]
    want = call(*rows)
    n = int(torch.tensor(lead).prod()) if lead else 1
    shaped = [r if len(s) < 3 else r[:n].reshape(*lead, -1) for r, s in zip(rows, shapes)]
    got = call(*shaped)
    assert got.shape == (*lead, want.shape[-1])
    torch.testing.assert_close(got.reshape(n, -1), want[:n])


# ---- FLOPs -----------------------------------------------------------------------------------------------------------------


def flops(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_flops_are_those_of_the_plain_products():
    """torch counts two per multiply-add of a GEMM; the fused ops add what their epilogues do."""
    g = torch.Generator().manual_seed(0)
    x, w, u = (torch.randn(*s, generator=g).requires_grad_() for s in ((6, 24), (40, 24), (40, 24)))
    one = flops(lambda: torch.nn.functional.linear(x, w))
    assert one == 2 * 6 * 24 * 40
    assert flops(lambda: ops.linear(x, w)) == one
    plain = flops(lambda: torch.nn.functional.linear(x, w).sum().backward())
    assert flops(lambda: ops.linear(x, w).sum().backward()) == plain == 3 * one
    pointwise = flops(lambda: ops.gated_mlp(x, w, u)) - 2 * one
    assert pointwise == 5 * 6 * 40  # activation and product
    # Two products forward, two for x, one for each weight; 12 per element of the activation's backward.
    assert flops(lambda: ops.gated_mlp(x, w, u).sum().backward()) == 6 * one + pointwise + 12 * 6 * 40
    assert flops(lambda: ops.plain_mlp(x, w, activation="gelu")) == one + 4 * 6 * 40
    assert flops(lambda: ops.plain_mlp(x, w, activation="gelu").sum().backward()) == 3 * one + 12 * 6 * 40
    cos, sin = (t[..., :8] for t in op_cases.rotary_tables(1, 3, 16, torch.float32))
    q, kv = torch.randn(32, 24), torch.randn(16, 24)
    with torch.no_grad():
        assert flops(lambda: ops.qkv_rope(x.view(2, 3, 24), q, kv, kv, cos, sin, head_dim=16)) == 2 * 6 * 24 * 64 + 3 * 6 * 48


def test_flops_of_meta_tensors_without_running():
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        ops.linear(torch.empty(4096, 4096, device="meta"), torch.empty(14336, 4096, device="meta"))
    assert counter.get_total_flops() == 2 * 4096 * 4096 * 14336


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
@cases(
    *QKV_WIDE, linear_case(150, 136, 264, "bias residual"), linear_case(300, 73, 131), mlp_case(150, 72, 96, "gelu", bias=True)
)
def test_gradients_in_half_precision_on_both_paths(case, dtype):
    for target in PATHS:
        check(case, dtype, target)

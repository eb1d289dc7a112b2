"""Which skeleton computes attention and why, and the op on the Hopper kernels, on the model of an SM."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import HOPPER, SKELETONS, Case, at_target, by_op, check, results
from torch import Tensor

import fusedblock
from fusedblock import blocks, ops
from fusedblock.interpret import count_traffic, interpret
from fusedblock.kernels import (
    _attention_skeleton,
    _gluon,
    _hopper_schedule,
    _launch,
    _replay,
    attention,
    attention_backward,
)
from fusedblock.kernels._attention_skeleton import skeleton, skeleton_of
from fusedblock.kernels._target import TARGETS, override

BF16, FP16 = torch.bfloat16, torch.float16
H200 = TARGETS["sm_90"]
SHAPE = {"target": H200, "dtype": BF16, "head_dim": 128, "v_dim": 128, "queries": 4096, "keys": 4096}


# ---- the choice --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change, why", [
    ({}, ""), ({"backward": True}, ""), ({"dtype": FP16}, ""), ({"head_dim": 64, "v_dim": 64}, ""),
    ({"options": frozenset({"softcap", "sinks"})}, ""), ({"queries": 1}, ""), ({"keys": 513}, ""),
    ({"target": TARGETS["sm_80"]}, "sm_80 is not sm_90"), ({"target": TARGETS["sm_100"]}, "sm_100 is not sm_90"),
    ({"target": TARGETS["gfx942"]}, "gfx942 is not sm_90"), ({"dtype": torch.float32}, "q is torch.float32"),
    ({"head_dim": 96, "v_dim": 96}, "head_dim=96"), ({"head_dim": 64}, "v_dim=128"),
    ({"target": replace(H200, broken="out is off")}, "out is off"),
    ({"target": replace(H200, batch_invariant=True)}, "batch_invariant"),
    ({"options": frozenset({"deterministic"}), "backward": True}, "deterministic"),
    *(({"options": frozenset({name})}, f"{name} is given") for name in _attention_skeleton._REFUSED),
    ({"options": frozenset({"seqused_k"}), "backward": True}, "seqused_k is given"),
    ({"options": frozenset({"block_map", "seqused_k"})}, "block_map is given with seqused_k"),
    ({"head_dim": 192, "backward": True}, ""), ({"rows": "q is crooked"}, "q is crooked"),
    ({"queries": 0}, "nothing to attend"), ({"keys": 0}, "nothing to attend"), ({"keys": 511}, "511 keys a sequence"),
    ({"keys": 512}, ""), ({"head_dim": 64, "v_dim": 64, "keys": 512}, "512 keys a sequence"),
    ({"keys": 128, "backward": True}, ""), ({"keys": 127, "backward": True}, "127 keys a sequence"),
    ({"interpreted": True}, "in the interpreter"), ({"target": replace(H200, skeleton="portable")}, "asked for"),
])  # fmt: skip
def test_choice(change: dict, why: str):
    chosen = skeleton(**{**SHAPE, **change})
    assert chosen.hopper == (not why)
    assert why in chosen.why and chosen.why in str(chosen)


def test_what_is_asked_for_goes_before_the_table_but_not_before_a_refusal():
    asked = replace(H200, skeleton="hopper")
    assert skeleton(**{**SHAPE, "keys": 20, "target": asked}).hopper
    assert skeleton(**{**SHAPE, "target": asked, "interpreted": True}).hopper
    assert not skeleton(**{**SHAPE, "target": replace(asked, batch_invariant=True)}).hopper


@pytest.mark.parametrize("change, name", [
    ({}, "short"), ({"keys": 1, "queries": 4000}, "short"), ({"keys": 256, "options": frozenset({"sinks"})}, "short"),
    ({"head_dim": 64, "v_dim": 64}, "short"), ({"backward": True}, "hopper"), ({"context": 257}, "portable"),
    ({"keys": 128, "context": 256}, "short"), ({"head_dim": 256, "v_dim": 256}, "portable"),
    *(({"options": frozenset({option})}, "portable") for option in ("softcap", "cu_seqlens_q", "seqused_k", "mask")),
    ({"target": replace(H200, batch_invariant=True)}, "portable"), ({"interpreted": True}, "portable"),
    ({"target": replace(H200, skeleton="portable")}, "portable"), ({"target": replace(H200, skeleton="hopper")}, "hopper"),
    ({"target": replace(H200, skeleton="short")}, "short"), ({"target": replace(H200, skeleton="short"), "keys": 257}, "hopper"),
    ({"target": TARGETS["sm_100"]}, "portable"),
])  # fmt: skip
def test_choice_for_few_keys(change: dict, name: str):
    assert skeleton(**{**SHAPE, "queries": 200, "keys": 200, **change}).name == name


def test_without_gluon(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_gluon, "REASON", "the Gluon of triton 4.0 is not known here")
    assert skeleton(**SHAPE).why == "the Gluon of triton 4.0 is not known here"


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_width_has_a_crossover(direction: str):
    rows = _attention_skeleton.CROSSOVERS[direction]
    assert [row[0] for row in rows] == sorted({row[0] for row in rows}) and rows[-1][0] >= 256


def named(q: Tensor, k: Tensor, v: Tensor, **options: object) -> dict:
    args = dict(zip(attention.NAMES, ops.attention_args(q, k, v, scale=0.1)))
    return {**args, **options}


def rows(*shape: int, device: str = "meta", dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_choice_for_tensors():
    q, k = rows(2, 1024, 4, 64), rows(2, 1024, 2, 64)
    assert skeleton_of(named(q, k, k)).hopper
    assert "512 keys" in skeleton_of(named(q, k[:, :512], k[:, :512])).why
    assert "128 keys" in skeleton_of(named(q, k, k, left=127, right=0)).why
    few = named(q, k[:, :256], k[:, :256])
    assert skeleton_of(few).name == skeleton_of({**few, "left": 20, "right": 0}).name == "short"
    assert skeleton_of({**few, "softcap": 2.0}).name == "portable"
    assert "dropout_p is given" in skeleton_of(named(q, k, k, dropout_p=0.1)).why
    assert skeleton_of(named(q, k, k, softcap=1.0)).hopper
    # Packed sequences by their average.
    one = rows(1, 4096, 4, 64), rows(1, 4096, 2, 64), rows(1, 4096, 2, 64)
    assert skeleton_of(named(*one, cu_seqlens_q=ints(0, 1, 4096), cu_seqlens_k=ints(0, 1, 4096))).hopper
    bounds = ints(*range(0, 4097, 256))
    assert "256 keys" in skeleton_of(named(*one, cu_seqlens_q=bounds, cu_seqlens_k=bounds)).why
    # Rows: a fused projection's, those of a dense copy to come, crooked ones, and with lengths of their own.
    fused = rows(2, 1024, 8, 64)
    assert skeleton_of(named(fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:])).hopper
    assert skeleton_of(named(q.mT.contiguous().mT, k, k)).hopper
    assert "q has rows that TMA" in skeleton_of(named(rows(2, 1024, 4, 68)[..., :64], k, k)).why
    assert "k has rows that TMA" in skeleton_of(named(q, k[:1].expand(2, -1, -1, -1), k)).why
    assert "v has rows that TMA" in skeleton_of(named(q, k, rows(2 * 1024 * 2 * 64 + 1, device="cpu")[1:].view(k.shape))).why
    assert skeleton_of(named(q, k, k, seqused_k=ints(3, 4))).hopper
    assert "with seqused_k" in skeleton_of(named(fused[:, :1000, :4], k, k, seqused_k=ints(3, 4))).why
    with override(replace(H200, skeleton="portable")):
        assert skeleton_of(named(q, k, k)).why == "asked for"
    with fusedblock.options(batch_invariant=True):
        assert "batch_invariant" in skeleton_of(named(q, k, k)).why
    assert "CUDA graph" in skeleton_of({**named(q, k, k), **_attention_skeleton.PORTABLE}).why


# ---- the op on the Hopper kernels --------------------------------------------------------------------------------------------

TINY = {"seq": 150, "context": 170, "head_dim": 64, "dtype": BF16, "heads": 2, "kv_heads": 1, "batch": 1}
PACKED = {**TINY, "layout": "packed", "lengths": ((130, 70), (0, 5), (1, 1), (20, 40))}
CASES = [
    Case(**TINY, causal=True, sinks=True), Case(**{**PACKED, "dtype": FP16}, causal=True),
    Case(**PACKED, window=(40, 10), sinks=True), Case(**{**TINY, "seq": 20, "batch": 4}, seqused=True),
]  # fmt: skip
MORE = [
    Case(**{**TINY, "head_dim": 128, "batch": 2}), Case(**{**TINY, "head_dim": 256}, causal=True), Case(**TINY, softcap=0.7),
    Case(**{**PACKED, "head_dim": 128}), Case(**{**TINY, "head_dim": 192, "v_dim": 128}, causal=True),
    Case(**{**TINY, "context": 70}, causal=True), Case(**TINY, window=(30, -1), scale=0.3),
]  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(c, marks=pytest.mark.slow) for c in MORE)], ids=str)
def test_values(case: Case, launched: list[str]):
    check(case, "hopper")
    assert "attention_hopper" in launched and "attention" not in launched
    assert ("attention_hopper_backward" in launched) == (not case.seqused)


@pytest.mark.parametrize("case", [
    Case(**{**TINY, "batch": 3}, causal=True, sinks=True), Case(**TINY, window=(40, 10)),
    pytest.param(Case(**{**TINY, "head_dim": 128, "context": 250}), marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_values_over_few_keys(case: Case, launched: list[str]):
    check(case, "short")
    assert launched.count("attention_hopper_short") == 1 and "attention_hopper" not in launched


def test_costs_over_few_keys():
    x = Case(**{**TINY, "seq": 128, "context": 192, "heads": 4, "kv_heads": 2, "batch": 2}, sinks=True).inputs()
    args = dict(zip(attention.NAMES, x.op_args()))
    args["sinks"] = args["sinks"].float()
    target = SKELETONS["short"]
    with count_traffic(target) as traffic:
        attention.launch(**args)
    with override(target):
        (cost,) = attention.SPEC.costs(args)
    (launch,) = traffic.launches
    assert launch.kernel == "_short_kernel"
    assert (cost.read_bytes, cost.written_bytes) == (launch.read_bytes, launch.written_bytes)


def test_a_gradient_without_strides():
    """As out.sum() gives it: one number for all of out."""
    x = Case(**TINY, causal=True).inputs()
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    grads = []
    for target in (HOPPER, replace(HOPPER, skeleton="portable")):
        with interpret(target):
            grads.append(torch.autograd.grad(fusedblock.attention(*leaves, causal=True).sum(), leaves))
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("needs", ["q", "kv", "sinks"])
def test_only_wanted_gradients(needs: str):
    """Their values, and that their launches are those that the spec states."""
    x = Case(**TINY, sinks=True).inputs()
    args = dict(zip(attention.NAMES, x.op_args()))
    args["sinks"] = args["sinks"].float()
    with count_traffic(HOPPER) as traffic:
        out, lse = attention.launch(**args)
        full = attention_backward.launch(**backward_args(args, x.grad, out, lse))
        before = len(traffic.launches)
        wanted = {"need_q": needs == "q", "need_k": needs == "kv", "need_v": needs == "kv", "need_sinks": needs == "sinks"}
        some = backward_args(args, x.grad, out, lse) | wanted
        got = attention_backward.launch(**some)
    for name, a, b in zip(attention_backward.SPEC.writes, got, full):
        if some["need_" + name.removeprefix("grad_")]:
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
        else:
            assert a.shape == (0,)
    with override(HOPPER):
        costs = attention_backward.SPEC.costs(some)
    names = {"q": ["prepare", "products", "finish"], "kv": ["prepare", "products"], "sinks": ["prepare", "sinks"]}[needs]
    assert [c.name.removeprefix("attention_backward_") for c in costs] == names
    assert [launch.kernel for launch in traffic.launches[before:]] == [f"_{name}_kernel" for name in names]


@pytest.mark.parametrize("asked", ["option", "argument", "torch"])
def test_deterministic_takes_the_portable_backward(asked: str, launched: list[str]):
    x = Case(**{**TINY, "seq": 20, "context": 30}).inputs()
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    with interpret(HOPPER):
        torch.use_deterministic_algorithms(asked == "torch")
        try:
            with fusedblock.options(deterministic=asked == "option"):
                out = fusedblock.attention(*leaves, deterministic=asked == "argument")
            out.backward(x.grad)
        finally:
            torch.use_deterministic_algorithms(False)
    assert "attention_hopper" in launched and "attention_hopper_backward" not in launched


@pytest.mark.parametrize("empty", [{"batch": 0}, {"seq": 0}, {"context": 0}])
def test_empty(empty: dict):
    check(Case(**{**TINY, **empty}), "hopper")


def test_packed_tokens_beyond_32_bits():
    """Rows 2**24 elements apart: row 128 begins where 32 bits end. The pages between are never touched."""
    x = Case(**{**PACKED, "lengths": ((20, 20), (130, 130)), "heads": 1}, causal=True).inputs()
    args = dict(zip(attention.NAMES, x.op_args()))
    shape = x.grad[None].shape
    far = torch.empty(shape[1] * 2**24, dtype=BF16).as_strided(shape, (shape[1] * 2**24, 2**24, 64, 1))
    found = []
    with interpret(HOPPER):
        out, lse = attention.launch(**args)
        for t in (x.grad[None], far.copy_(x.grad[None])):
            found.append(attention_backward.launch(**backward_args(args, t, out, lse))[:3])
    for name, a, b in zip("qkv", *found):
        if name == "q":  # summed in any order
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
        else:
            assert torch.equal(a, b), name


@pytest.mark.parametrize("name", ["q", "k", "v", "grad"])
def test_addresses_that_tma_does_not_take(name: str):
    """An element into a buffer; of a parameter the choice does not see it, of grad_out it does not ask."""
    x = Case(**TINY, causal=True).inputs()

    def run(**changed: Tensor) -> list[Tensor]:
        given = {"q": x.q, "k": x.k, "v": x.v, "grad": x.grad, **changed}
        leaves = [torch.nn.Parameter(given[n]) for n in "qkv"]
        with interpret(HOPPER):
            out = fusedblock.attention(*leaves, causal=True)
            return [out.detach(), *torch.autograd.grad(out, leaves, given["grad"])]

    t = getattr(x, name)
    moved = torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t)
    assert moved.data_ptr() % 16
    for a, b in zip(run(**{name: moved}), run()):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)  # grad_q is summed in any order


@pytest.mark.parametrize("crooked", ["k", "v", "q", "kv"])
def test_rows_of_their_own_length_without_a_dense_last_axis(crooked: str):
    """What TMA does not take is copied, which changes how far apart batch entries are."""
    x = Case(**{**TINY, "seq": 20, "batch": 4}, seqused=True).inputs()
    given = {}
    for n, t in zip("qkv", (x.q, x.k, x.v)):
        step = 1 + (n in crooked)
        wide = torch.zeros(t.shape[0], 200, t.shape[2], 64 * step, dtype=BF16)
        given[n] = wide[:, : t.shape[1], :, ::step].copy_(t)
    if "q" not in crooked:
        given["q"] = x.q
    with torch.no_grad(), interpret(HOPPER):
        got = fusedblock.attention(**given, **x.options)
        want = fusedblock.attention(x.q, x.k, x.v, **x.options)
    assert torch.equal(got, want)


def test_impossible_boundaries():
    x = Case(**PACKED, causal=True).inputs()
    x.options["cu_seqlens_k"] = ints(0, 90, 80, 81, 121)
    with interpret(HOPPER):
        leaves = [t.nan_to_num().requires_grad_() for t in (x.q, x.k, x.v)]
        out, lse = fusedblock.attention(*leaves, causal=True, **x.options, return_lse=True)
        grads = torch.autograd.grad(out, leaves, x.grad)
    assert all(t.isnan().all() for t in (out, lse, *grads))


@pytest.mark.parametrize("target", ["hopper", "sm_90"])
@pytest.mark.parametrize("boundaries", [[0], [0, 0], [0, 17, 40], [0, 40, 40]], ids=str)
def test_boundaries_of_few_sequences_and_of_any_strides(boundaries: list[int], target: str):
    """Tokens of no sequence, and every other number of a longer tensor."""
    strided = torch.full((2 * len(boundaries),), 7, dtype=torch.int32)[::2]
    strided.copy_(ints(*boundaries))
    q = torch.randn(40, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = []
    with at_target(target):
        for cu in (strided, ints(*boundaries)):
            leaves = [t.detach().requires_grad_() for t in (q, q[:, :1], q[:, :1])]
            out = fusedblock.attention(*leaves, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)
            found.append((out.detach(), *torch.autograd.grad(out, leaves, q)))
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
        assert torch.isfinite(a).all() and (a[boundaries[-1] :] == 0).all()
        assert a[: boundaries[-1]].any() or not boundaries[-1]


# ---- what it costs -----------------------------------------------------------------------------------------------------------


def backward_args(args: dict, grad: Tensor, out: Tensor, lse: Tensor) -> dict:
    given = {"grad_out": grad, "out": out, "lse": lse, "need_q": True, "need_k": True, "need_v": True,
             "need_sinks": args["sinks"] is not None}  # fmt: skip
    return {n: given[n] if n in given else args.get(n, False) for n in attention_backward.NAMES}


def test_costs_are_what_the_kernels_move():
    x = Case(**{**TINY, "seq": 128, "context": 192, "heads": 4, "kv_heads": 2}, sinks=True).inputs()
    args = dict(zip(attention.NAMES, x.op_args()))
    args["sinks"] = args["sinks"].float()
    with count_traffic(HOPPER) as traffic:
        out, lse = attention.launch(**args)
        again = backward_args(args, x.grad, out, lse)
        attention_backward.launch(**again)
    with override(HOPPER):
        costs = (*attention.SPEC.costs(args), *attention_backward.SPEC.costs(again))
    assert [launch.kernel for launch in traffic.launches] == [
        "_forward_kernel", "_prepare_kernel", "_products_kernel", "_finish_kernel", "_sinks_kernel"
    ]  # fmt: skip
    table = traffic.launches[0].argument("table").read_bytes  # not counted
    found = [(launch.read_bytes - table * (n == 0), launch.written_bytes) for n, launch in enumerate(traffic.launches)]
    assert [(c.read_bytes, c.written_bytes) for c in costs] == found
    assert costs[2].flops == costs[2].executed_flops == 2.5 * costs[0].flops


def test_costs_of_packed_sequences():
    x = Case(**PACKED).inputs()
    args = dict(zip(attention.NAMES, x.op_args()))
    with count_traffic(HOPPER) as traffic:
        out, lse = attention.launch(**args)
        again = backward_args(args, x.grad[None], out, lse)
        attention_backward.launch(**again)
    with override(HOPPER):
        costs = (*attention.SPEC.costs(args), *attention_backward.SPEC.costs(again))
    backward = [f"backward_{n}" for n in ("q_schedule", "k_schedule", "prepare", "products", "finish")]
    assert [c.name.removeprefix("attention_") for c in costs] == ["schedule", "order", "attention", *backward]
    assert [launch.kernel for launch in traffic.launches] == [
        "_schedule_kernel", "_order_kernel", "_forward_kernel", "_schedule_kernel", "_schedule_kernel", "_prepare_kernel",
        "_products_kernel", "_finish_kernel",
    ]  # fmt: skip
    with override(replace(HOPPER, skeleton="portable")):
        assert [c.name for c in attention.SPEC.costs(args)] == ["attention_schedule", "attention"]


# ---- tables, graphs, replay --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequences, heads, programs, left, right", [(6, 2, 4, -1, 0), (5, 3, 4, 200, 0), (3, 3, 132, -1, -1)])
def test_a_graph_makes_its_own_table(sequences, heads, programs, left, right, monkeypatch: pytest.MonkeyPatch):
    bounds = _hopper_schedule.Bounds(left, right, 128, 900, 0, 700)
    programs = min(programs, sequences * 6)
    kept = _hopper_schedule.equal_table(bounds, sequences, heads, programs, torch.device("cpu"))
    assert kept is _hopper_schedule.equal_table(bounds, sequences, heads, programs, torch.device("cpu"))
    monkeypatch.setattr(_hopper_schedule, "capturing", lambda device: True)
    monkeypatch.setattr(_launch, "_in_graphs", {})
    assert _hopper_schedule.equal_table(bounds, sequences, heads, programs, torch.device("cpu")) is kept
    assert list(_launch._in_graphs.values()) == [kept]
    monkeypatch.setattr(_hopper_schedule, "_tables", {})
    with interpret():
        made = _hopper_schedule.equal_table(bounds, sequences, heads, programs, torch.device("cpu"))
    assert not _hopper_schedule._tables and not _launch.is_constant(made)
    for table in (made, kept):
        assert (table[-1] == -1).all() and table.shape[1] == programs
        assert sorted(table[table >= 0].tolist()) == list(range(sequences * 6))
        for column in table.T.tolist():  # heads that share the L2 run together
            sections = [tile // 6 // heads for tile in column if tile >= 0]
            assert sections == sorted(sections)


def test_tables_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_hopper_schedule, "_tables", {})
    monkeypatch.setattr(_hopper_schedule, "_MOST", 3)
    for n in range(1, 9):
        _hopper_schedule.equal_table(_hopper_schedule.Bounds(-1, 0, 128, n, 0, n), 2, 2, 2, torch.device("cpu"))
    assert 0 < len(_hopper_schedule._tables) <= 3


@pytest.mark.parametrize("case", [Case(**TINY, causal=True), Case(**PACKED, causal=True, forward=True)], ids=str)
def test_replay(case: Case):
    """Descriptors of Gluon and the table that is kept, in launches that are replayed for other tensors."""

    def run(seed: int) -> tuple[list[Tensor], object]:
        args = case.inputs(seed).op_args()
        return [t for t in args if isinstance(t, Tensor)], lambda: attention.launch(*args)

    with interpret(HOPPER):
        inputs, compose = run(0)
        _, program = _replay.record(compose, inputs)
        assert program is not None and len(program.steps) == (3 if case.packed else 1)
        assert len(program._constants) == (not case.packed)
        for seed in (0, 1):
            inputs, compose = run(seed)
            got = program.run(inputs)
            assert got is not None
            assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(got, compose()))


# ---- what is said of it -------------------------------------------------------------------------------------------------------


def test_explanations_name_the_kernels_and_what_would_change_them():
    q, k = rows(2, 2048, 8, 128), rows(2, 2048, 2, 128)
    choice = fusedblock.explain_attention(q, k, k, causal=True)
    assert choice.engine == "gluon" and "forward: Gluon kernels for Hopper: sm_90" in choice.why and "backward" not in choice.why
    assert "forward: portable Triton kernels for fewer than 512 keys or a mask" in choice.changes
    leaves = [t.requires_grad_() for t in (q, k)]
    choice = fusedblock.explain_attention(*leaves, k, causal=True, seqused_k=ints(2048, 7).to("meta"))
    assert choice.engine == "gluon" and "backward: portable Triton kernels: seqused_k is given" in choice.why
    assert "backward: Gluon kernels for Hopper without seqused_k" in choice.changes
    choice = fusedblock.explain_attention(*leaves, k, causal=True, deterministic=True)
    assert "backward: portable Triton kernels: deterministic" in choice.why
    few = fusedblock.explain_attention(q, k[:, :200], k[:, :200], causal=True)
    assert "forward: the Gluon kernel for short contexts on Hopper" in few.why and "other kernels for 257 keys" in few.changes
    choice = fusedblock.explain_attention(q, k, k, mask=rows(2, 2048, dtype=torch.bool))
    assert choice.engine == "triton" and "mask is given" in choice.why
    with override(TARGETS["sm_80"]):
        choice = fusedblock.explain_attention(q, k, k)
        assert choice.engine == "triton" and "sm_80 is not sm_90" in choice.why and "Hopper" not in choice.changes
    double = rows(1, 1024, 2, 64, dtype=torch.float64)
    assert "kernels" not in fusedblock.explain_attention(double, double, double).why


def test_plans_name_the_kernels():
    spec = blocks.BlockSpec(hidden=512, ffn=512, heads=8, kv_heads=2, head_dim=64, scale=0.125, eps=1e-5)

    def attends(**more: object) -> blocks.Launch:
        usual = {"batch": 1, "seq": 1024, "context": 1024, "dtype": BF16, "training": True, "target": H200}
        found = blocks.plan(spec, **{**usual, **more})
        return next(step for step in found.launches if step.op == "attention")

    assert attends().engine == "gluon" and "backward: Gluon" in attends().why and attends().kernels == 1
    assert "backward: portable Triton kernels: deterministic" in attends(deterministic=True).why
    assert attends(seq=300, context=300).engine == "triton"
    assert (attends(packed=True).kernels, attends(packed=True, target=TARGETS["sm_80"]).kernels) == (3, 2)


def test_what_is_not_ready_runs_portable(monkeypatch: pytest.MonkeyPatch, launched: list[str]):
    for module in (attention, attention_backward):
        monkeypatch.setattr(module, "ready", lambda *a, **k: False)
    check(Case(**{**TINY, "seq": 20, "context": 30}, causal=True), "hopper")
    assert "attention_hopper" not in launched and "attention" in launched
    results(Case(**{**PACKED, "lengths": ((5, 9), (3, 3))}), "hopper", by_op())
    assert "attention_hopper" not in launched

"""The attention backward's kernels, on descriptors (sm_90) and pointers (sm_80), against the float64 formula's gradients.

out and lse come from that formula, so that nothing here depends on the forward's kernel.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import attention_cases as cases
import attention_formula as formula
import pytest
import torch
from attention_cases import Case, Inputs
from torch import Tensor

from fusedblock.kernels import attention_backward

PATHS = ("sm_90", "sm_80")
FIRST = ("sm_90", pytest.param("sm_80", marks=pytest.mark.slow))  # of the long walks, which path `make test` takes
WANTED = ("q", "k", "v", "bias", "sinks")


def arguments(x: Inputs, out: Tensor, lse: Tensor, need: tuple[str, ...] = WANTED) -> dict[str, Any]:
    """Of the op attention_backward, for out and lse `batch heads seq` of the formula."""
    names = (*attention_backward.shared.READS, *attention_backward.shared.NUMBERS)
    known = dict(zip(names, x.op_args()))
    packed = x.case.packed
    known["grad_out"] = x.grad[None] if packed else x.grad
    known["out"] = (out[None] if packed else out).to(x.q.dtype)
    known["lse"] = (lse[None] if packed else lse).to(torch.promote_types(x.q.dtype, torch.float32))
    for n in WANTED:
        known[f"need_{n}"] = n in need and known[n] is not None
    return {n: known[n] for n in attention_backward.NAMES}


def gradients(case: Case, target: str, layout=lambda t: t, need: tuple[str, ...] = WANTED, **changes: Any) -> dict[str, Tensor]:
    want, x = cases.exact(case), case.inputs().changed(layout)
    args = {**arguments(x, want["out"], want["lse"], need), **changes}
    with cases.at_target(target):
        run = attention_backward.reference if target == "cpu" else attention_backward.launch
        grads = dict(zip((f"grad_{n}" for n in WANTED), run(**args)))
    return {n: t[0] if case.packed and n in ("grad_q", "grad_k", "grad_v") else t for n, t in grads.items() if t.numel()}


def check(case: Case, target: str) -> None:
    want, got = cases.exact(case), gradients(case, target)
    assert list(got) == [n for n, t in want.items() if n.startswith("grad_") and t.numel()]
    for name, t in got.items():
        assert t.dtype == case.inputs().tensor(name.removeprefix("grad_")).dtype, name
        error, limit = cases.error(t, want[name]), cases.limit(case, name, want[name])
        assert error <= limit, f"{name} of {case}: error {error:.2e}, at most {limit:.2e}"


def differentiable(found: list[Case]) -> list[Case]:
    return [case for case in found if not case.forward_only]


ALONE = dict.fromkeys([Case(), *differentiable(cases.alone())])


@pytest.mark.parametrize("target", (*FIRST, "cpu"))
@pytest.mark.parametrize("case", ALONE, ids=str)
def test_each_option(case, target):
    check(case, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("case", differentiable(cases.alone(dtype=torch.bfloat16, causal=True)), ids=str)
def test_each_option_in_bf16(case, target):
    check(case, target)


COMBINED = [
    Case(causal=True, softcap=0.7, sinks=True, alibi="heads", bias="batch", mask="bool", dropout=0.3),
    Case(window=(9, 4), softcap=0.7, sinks=True, bias="row", mask="padding", seqused=True, batch=4),
    Case(window=(30, 5), alibi="batch", bias="full", mask="added", head_dim=24, v_dim=40, dropout=0.2),
    Case(layout="packed", causal=True, window=(6, 0), softcap=0.7, sinks=True, alibi="heads", dropout=0.3),
    Case(layout="packed", window=(5, 3), head_dim=48, v_dim=16, heads=6, kv_heads=1),
    Case(layout="packed", lengths=((300, 300), (70, 129), (64, 64), (1, 200)), causal=True, heads=2, kv_heads=1),
    Case(layout="packed", lengths=((0, 0), (0, 3)), causal=True),
    Case(prefix=True, causal=True, softcap=0.7, bias="both", mask="padding-added", dropout=0.1),
    Case(prefix=True, window=(-1, 3), sinks=True, bias="column", seqused=True, batch=4),
    Case(140, 270, block_map="heads", causal=True, bias="heads", softcap=0.7, seqused=True, batch=2, heads=2, kv_heads=1),
    Case(140, 270, block_map="full", window=(100, 20), mask="bool", sinks=True, dropout=0.2, heads=2, kv_heads=1),
    Case(1, 200, window=(20, 0), sinks=True),  # the older keys are seen by nothing
    Case(70, 20, causal=True, sinks=True, bias="row"),  # the first queries see nothing
]


@pytest.mark.parametrize("target", (*FIRST, "cpu"))
@pytest.mark.parametrize("case", COMBINED, ids=str)
def test_combinations(case, target):
    check(case, target)


@pytest.mark.parametrize("target", FIRST)
@pytest.mark.parametrize("case", (Case(), *COMBINED[:5], *COMBINED[7:9]), ids=str)
def test_double_precision_is_exact(case, target):
    check(replace(case, dtype=torch.float64), target)


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", differentiable(cases.head_dims()), ids=str)
def test_head_dims(case, dtype, target):
    check(replace(case, dtype=dtype), target)


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("case", cases.sizes(dtype=torch.float16), ids=str)
def test_sizes(case, target):
    check(case, target)


@pytest.mark.slow
@pytest.mark.parametrize("n", range(len(attention_backward.CONFIGS)))
@pytest.mark.parametrize("case, target", [
    (Case(140, 150, heads=1, kv_heads=1, batch=1, dtype=torch.float16, window=(90, 0), mask="bool", bias="heads"), "sm_90"),
    (Case(layout="packed", lengths=((140, 150), (9, 70)), heads=2, kv_heads=1, dtype=torch.float16, softcap=0.7), "sm_90"),
    (Case(140, 150, heads=1, kv_heads=1, batch=1, dtype=torch.float16, causal=True, block_map="both"), "sm_80"),
], ids=["sm_90", "packed-sm_90", "map-sm_80"])  # fmt: skip
def test_every_config(n, case, target, monkeypatch):
    monkeypatch.setattr(attention_backward, "configure", lambda *a: attention_backward.CONFIGS[n])
    check(case, target)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert list(a) == list(b) and a
    for name in a:
        assert torch.equal(a[name], b[name]), name


LAYOUTS = {
    "wider-rows": lambda t: torch.cat((t, t.new_full((*t.shape[:-1], 2), math.nan)), -1)[..., :-2],
    "head-major": lambda t: t.transpose(-3, -2).contiguous().transpose(-3, -2),
    "dim-major": lambda t: t.transpose(-3, -1).contiguous().transpose(-3, -1),
}


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [
    Case(dtype=torch.float16, causal=True, sinks=True, bias="batch", mask="bool"), Case(dtype=torch.float16, layout="packed")
], ids=str)  # fmt: skip
def test_layouts(case, layout, target):
    def moved(t: Tensor) -> Tensor:
        return LAYOUTS[layout](t) if t.dim() > 2 else t

    x = case.inputs()
    assert not moved(x.q).is_contiguous() and torch.equal(moved(x.grad), x.grad)
    equal(gradients(case, target, moved), gradients(case, target))


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("case", [Case(causal=True), Case(layout="packed", window=(9, 0))], ids=str)
def test_gradients_without_strides(case, target):
    """As out.sum() makes them; and keys and values of one projection."""
    shape = case.inputs().grad.shape
    one = torch.ones(()).expand((1, *shape) if case.packed else shape)
    assert set(one.stride()) == {0}
    equal(gradients(case, target, grad_out=one), gradients(case, target, grad_out=one.contiguous()))
    x = case.inputs()
    kv = torch.cat((x.k, x.v), -1)
    k, v = (t[None] if case.packed else t for t in kv.chunk(2, -1))
    equal(gradients(case, target, k=k, v=v), gradients(case, target))


@pytest.mark.parametrize("target", PATHS)
def test_only_what_is_wanted(target):
    case = Case(causal=True, sinks=True, bias="batch", layout="batched")
    whole = gradients(case, target)
    for wanted in (("q",), ("k",), ("v", "bias"), ("sinks",), ("bias",), ()):
        got = gradients(case, target, need=wanted)
        assert list(got) == [f"grad_{n}" for n in wanted]
        assert all(torch.equal(t, whole[n]) for n, t in got.items())


@pytest.mark.parametrize("case", [COMBINED[0], COMBINED[3]], ids=str)
def test_equal_bits(case):
    first = gradients(case, "sm_90")
    for _ in range(3):
        equal(gradients(case, "sm_90"), first)


@pytest.mark.parametrize("target", PATHS)
def test_nan_in_what_nothing_sees_does_not_spread(target):
    """Keys before every window or hidden by a mask from every query, and tokens behind the last sequence."""
    for case, hidden in ((Case(5, 90, window=(20, 0)), slice(0, 65)), (Case(40, 90, causal=True, mask="bool"), slice(30, 40))):
        changes: dict[str, Any] = {}
        if case.mask:
            changes["mask"] = case.inputs().op_args()[3].clone()
            changes["mask"][..., hidden] = False
        x = case.inputs().with_(**changes)
        out, lse = cases.formula(x)
        k, v = x.k.clone(), x.v.clone()
        k[:, hidden], v[:, hidden] = math.nan, math.nan
        clean = gradients(case, target, out=out, lse=lse, **changes)
        equal(gradients(case, target, out=out, lse=lse, k=k, v=v, **changes), clean)
        assert (clean["grad_k"][:, hidden] == 0).all() and (clean["grad_v"][:, hidden] == 0).all()
    case = Case(layout="packed", causal=True)
    grad = case.inputs().grad[None].clone()
    grad[:, -3:] = math.nan
    equal(gradients(case, target, grad_out=grad), gradients(case, target))


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("name", ["q", "grad_out", "k", "v"])
def test_nan_in_one_sequence_stays_there(name, target):
    case = Case(layout="packed", lengths=((20, 20), (60, 60), (30, 30)), causal=True, head_dim=16, dtype=torch.bfloat16)
    x = case.inputs()
    t = {"q": x.q, "k": x.k, "v": x.v, "grad_out": x.grad}[name][None].clone()
    t[:, 20:80] = math.nan
    got, want = gradients(case, target, **{name: t}), gradients(case, target)
    for n in ("grad_q", "grad_k", "grad_v"):
        for part in (slice(0, 20), slice(80, None)):
            assert torch.equal(got[n][part], want[n][part]), n


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("wrong", [(0, 30, 20, 60), (0, 10, 20, 999), (3, 10, 20, 60)])
@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_k"])
def test_impossible_boundaries_give_nan(which, wrong, target):
    case = Case(layout="packed", lengths=((20, 20), (0, 20), (40, 20)), causal=True)
    got = gradients(case, target, **{which: torch.tensor(wrong, dtype=torch.int32)})
    assert all(t.isnan().all() for t in got.values())


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("wrong", [-1, 54])
def test_impossible_lengths_give_nan_in_their_sequence(wrong, target):
    case = Case(seqused=True, bias="full", batch=2)
    used = case.inputs().options["seqused_k"].clone()
    used[1] = wrong
    got, good = gradients(case, target, seqused_k=used), gradients(case, target)
    for name, t in got.items():
        assert t[1].isnan().all() and torch.equal(t[0], good[name][0]), name


@pytest.mark.parametrize("target", ("cpu", *PATHS))
def test_sinks_of_no_weight(target):
    """A sink of -inf has the gradient 0, also of rows that attend to nothing, whose lse is -inf."""
    x = Case(mask="bool", sinks=True).inputs()
    sinks = x.options["sinks"].index_fill(0, torch.tensor([1]), -math.inf)
    wide = x.with_(sinks=sinks).changed(lambda t: t.double() if t.is_floating_point() else t)
    want = cases.with_gradients(cases.formula, wide)
    assert want["grad_sinks"][1] == 0 and want["lse"][:, 1].isinf().any() and all(want["grad_sinks"][[0, 2, 3]] != 0)
    got = gradients(x.case, target, out=want["out"].float(), lse=want["lse"].float(), sinks=sinks)
    assert got["grad_sinks"][1] == 0
    for name, t in got.items():
        assert cases.error(t, want[name]) < 1e-5, name


def test_dims_without_gradients():
    with pytest.raises(ValueError, match="head_dim=512 with v_dim=256"):
        gradients(Case(5, 9, head_dim=512, v_dim=512), "sm_90", v=torch.zeros(2, 9, 2, 256), out=torch.zeros(2, 5, 4, 256),
                  grad_out=torch.zeros(2, 5, 4, 256))  # fmt: skip


@pytest.mark.parametrize("case", [
    Case(causal=True), Case(window=(9, 4), head_dim=24, v_dim=40), Case(layout="packed", causal=True), Case(seqused=True, batch=4)
], ids=str)  # fmt: skip
def test_flops(case):
    x = case.inputs()
    seen = sum(int(formula.in_window(x, s).sum()) for s in formula.sequences(x))
    args = arguments(x, *(cases.exact(case)[n] for n in ("out", "lse")))
    found = {c.name.removeprefix("attention_backward_"): c for c in attention_backward.SPEC.costs(args)}
    d, v, one = case.head_dim, case.out_dim, 2 * case.heads * seen
    assert (found["kv"].flops, found["kv"].executed_flops) == (one * (2 * d + 2 * v), one * (2 * d + 2 * v))
    assert (found["q"].flops, found["q"].executed_flops) == (one * d, one * (2 * d + v))
    assert ("k_schedule" in found) == ("q_schedule" in found) == case.packed

"""The Hopper backward of attention: its values on the model of an SM, and what the compiler makes of it."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import aot
import mutants
import pytest
import torch
from test_attention_hopper import BF16, FP16, HOPPER, Case, machine_code
from test_attention_hopper import later as slow
from torch import Tensor

from fusedblock.interpret import count_traffic, interpret
from fusedblock.kernels import _attention_hopper_wide, _lang, attention_hopper_backward


def inputs(case: Case, given: tuple[Tensor, ...] | None = None) -> tuple[tuple[Tensor | None, ...], list[Tensor]]:
    """Arguments of a launch up to sinks, and the gradients in float64; of q, k, v and grad_out where these are given."""
    if given is None:
        q, k, v = case.inputs()
        grad_out = torch.randn(*q.shape[:3], v.shape[-1], generator=torch.Generator().manual_seed(1)).to(case.dtype)
    else:
        q, k, v, grad_out = given
    sinks = case.sink_logits()
    leaves = [t.double().requires_grad_() for t in (q, k, v, *([] if sinks is None else [sinks]))]
    out, lse = gradient_formula(case, *leaves)
    gradients = list(torch.autograd.grad(out, leaves, grad_out.double()))
    out, lse = out.detach(), lse.detach()
    rounded = out.to(case.dtype)
    if sinks is not None:  # delta is made of the rounded out, and the sum over all rows keeps what that does to it
        rounding = torch.einsum("bqhd,bqhd->bhq", rounded - out, grad_out.double())
        gradients[3] -= (torch.exp(sinks.double()[:, None] - lse) * rounding).sum((0, 2))
    return (q, k, v, rounded, lse.float(), grad_out, sinks), gradients


def gradient_formula(case: Case, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out and lse in float64, of all heads at once, for autograd; rows that see nothing give 0 and -inf."""
    left, right = case.bounds
    group = case.heads // case.kv_heads
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * case.head_dim**-0.5
    if case.softcap:
        s = case.softcap * torch.tanh(s / case.softcap)
    apart = torch.arange(case.context) - torch.arange(case.seq)[:, None] - (case.context - case.seq)
    far = case.context + case.seq
    seen = (apart <= (right if right >= 0 else far)) & (apart >= (-left if left >= 0 else -far))
    weights = torch.exp(s.masked_fill(~seen, -torch.inf))
    total = weights.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks)[:, None]
    out = torch.einsum("bhqk,bkhd->bqhd", weights / torch.where(total > 0, total, 1.0)[..., None], v)
    return out, torch.log(total)


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    # P, ds, out and the gradients are each rounded to the dtype, whose unit in the last place is 2**-8 or 2**-11.
    unit = 2.0**-8 if dtype is BF16 else 2.0**-11
    assert ((got.double() - want).norm() <= unit * want.norm() + 1e-6).item()
    assert ((got.double() - want).abs() <= 4 * unit * (want.abs().max() + 1e-6)).all()


def check(case: Case, seed: int, module=attention_hopper_backward) -> None:
    args, expected = inputs(case)
    with interpret(seed=seed):
        *found, grad_sinks = module.launch(*args, None, *case.bounds, case.head_dim**-0.5, case.softcap)
    for got, want, like in zip(found, expected, args):
        assert (got.dtype, got.shape) == (case.dtype, like.shape)
        assert_close(got, want, case.dtype)
    assert (grad_sinks is None) == (not case.sinks)
    if case.sinks:
        torch.testing.assert_close(grad_sinks, expected[3].float(), rtol=1e-5, atol=1e-5)


QUICK = [
    Case(130, 200, head_dim=128, heads=4, kv_heads=2),
    Case(190, 133, causal=False, head_dim=128, dtype=FP16),
    Case(77, 300, dtype=FP16),
    Case(129, 2, causal=False, batch=2),
    Case(200, 70),
    Case(200, 200, window=(60, 0), sinks=True),
    Case(100, 300, window=(10, 7), head_dim=128, sinks=True),
    Case(130, 200, window=(5, 0)),
    Case(100, 130, head_dim=256),
    Case(100, 130, softcap=0.5, sinks=True),
    Case(130, 70, softcap=1.0, head_dim=128, causal=False, dtype=FP16),
    Case(130, 100, head_dim=192, v_dim=128),
    Case(70, 150, head_dim=192, v_dim=128, causal=False, heads=4, kv_heads=2, dtype=FP16, sinks=True),
]
LONG = [
    Case(256, 256, head_dim=128, heads=4, kv_heads=2),
    Case(256, 256, causal=False, head_dim=128),
    Case(320, 320, dtype=FP16),
    Case(256, 256, causal=False, heads=3, kv_heads=3, batch=2, dtype=FP16),
    Case(200, 200, head_dim=128, batch=2, kv_heads=2),
    Case(130, 461, head_dim=128, dtype=FP16),
    Case(190, 333, causal=False, head_dim=128, dtype=FP16),
    Case(300, 128, causal=False),
    Case(65, 65, batch=2),
    Case(1, 257),
    Case(300, 100, head_dim=128, sinks=True),
    Case(256, 256, sinks=True),
    Case(512, 512, window=(127, 0), sinks=True),
    Case(400, 400, window=(128, 0), head_dim=128),
    Case(150, 400, window=(-1, 50), dtype=FP16),
    Case(150, 300, window=(-1, 50), head_dim=128),
    Case(200, 330, window=(100, -1)),
    Case(150, 300, window=(100, -1), head_dim=128, dtype=FP16),
    Case(300, 130, window=(30, 20), sinks=True),
    Case(200, 200, window=(1000, 1000)),
    Case(190, 190, head_dim=256, heads=4, kv_heads=2, sinks=True),
    Case(150, 170, causal=False, head_dim=256, batch=2, dtype=FP16),
    Case(150, 300, window=(60, 20), head_dim=256),
    Case(150, 80, head_dim=256),
    Case(100, 140, softcap=1.0, head_dim=256, dtype=FP16),
    Case(130, 300, softcap=0.7, head_dim=128, window=(60, 20), heads=4, kv_heads=2, sinks=True),
    Case(200, 100, softcap=30.0),
    Case(70, 200, softcap=2.0, causal=False, dtype=FP16),
    Case(200, 90, head_dim=192, v_dim=128, batch=2, dtype=FP16),
    Case(150, 300, head_dim=192, v_dim=128, window=(60, 20), softcap=1.0, sinks=True),
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_values(case: Case):
    check(case, 0)


@pytest.mark.parametrize("case", [QUICK[0], QUICK[3], QUICK[10]], ids=str)
def test_values_with_dp_in_two_products(case: Case, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(attention_hopper_backward.PARTS, case.head_dim, case.head_dim // 2)
    check(case, 0)


NEEDS = [
    pytest.param(case, need, marks=() if quick else pytest.mark.slow, id=f"{case}-{''.join(map(str, map(int, need)))}")
    for case in (
        Case(130, 200, head_dim=128, sinks=True),
        Case(130, 200, causal=False),
        Case(130, 100, head_dim=256, softcap=1.0),
        Case(70, 90, head_dim=192, v_dim=128),
    )
    for need in itertools.product((False, True), repeat=3)
    for quick in [case.head_dim == 128 and sum(need) != 3 or sum(need) == 1]
]


@pytest.mark.parametrize("case, need", NEEDS)
def test_only_what_is_needed(case: Case, need: tuple[bool, ...]):
    """The same gradients, and no memory for, product with or launch of what is not."""
    args, expected = inputs(case)
    need = (*need, case.sinks and not need[2])
    with count_traffic(HOPPER) as traffic:
        found = attention_hopper_backward.launch(*args, None, *case.bounds, case.head_dim**-0.5, case.softcap, *need)
    assert [t is not None for t in found] == list(need)
    for got, want in zip(found[:3], expected):
        if got is not None:
            assert_close(got, want, case.dtype)
    if need[3]:
        torch.testing.assert_close(found[3], expected[3].float(), rtol=1e-5, atol=1e-5)
    kernels = ["_prepare_kernel"] + ["_products_kernel"] * any(need[:3]) + ["_finish_kernel"] * need[0]
    assert [launch.kernel for launch in traffic.launches] == kernels + ["_sinks_kernel"] * need[3]


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG, ids=str)
def test_more_values(case: Case):
    for seed in range(2):
        check(case, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("case", [
    Case(192, 256, causal, head_dim) for causal in (True, False) for head_dim in (64, 128, 256)
] + [Case(192, 256, window=(70, 10), head_dim=head_dim) for head_dim in (64, 128, 256)], ids=str)  # fmt: skip
def test_values_in_more_orders(case: Case, seed: int):
    check(case, seed)


@pytest.mark.parametrize("packed", [False, True])
def test_strides(packed: bool):
    """out and grad_out with the heads before the rows, and as slices of something wider: whatever TMA takes."""
    case = Case(100, 130, batch=1 if packed else 2, heads=4, kv_heads=2)
    (q, k, v, out, lse, grad_out, _), expected = inputs(case)
    bounds = (torch.tensor([0, 100], dtype=INT32), torch.tensor([0, 130], dtype=INT32)) if packed else None
    by_head = grad_out.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((*q.shape[:3], 72), torch.nan, dtype=case.dtype)[..., :64]
    for given_out, given in ((out, by_head), (torch.empty_like(by_head).copy_(out), wide.copy_(grad_out))):
        with interpret():
            found = attention_hopper_backward.launch(q, k, v, given_out, lse, given, None, bounds, -1, 0, 0.125)[:3]
        for got, want in zip(found, expected):
            assert_close(got, want, case.dtype)


def test_keys_past_the_end_do_not_overflow():
    """Logits far below 0: exp(0 - lse) of a key that TMA has filled with zeros is infinite."""
    case = Case(64, 100, causal=False)
    q, k, v = case.inputs()
    q, k = torch.full_like(q, 8.0), torch.full_like(k, -8.0)
    args = q, k, v, v[:, :64].expand(q.shape).contiguous(), torch.full((1, 2, 64), -512.0), torch.ones_like(q)
    with interpret():
        found = attention_hopper_backward.launch(*args, None, None, -1, -1, 0.125)[:3]
    assert all(torch.isfinite(t).all() for t in found)


def test_a_window_reads_only_the_queries_in_it():
    case = Case(512, 512, window=(63, 0), heads=1)
    args, _ = inputs(case)
    with count_traffic(HOPPER) as traffic:
        attention_hopper_backward.launch(*args, None, *case.bounds, 0.125)
    (products,) = (launch for launch in traffic.launches if launch.kernel == "_products_kernel")
    assert products.argument("q").issued_read_bytes == (3 + 3 + 3 + 2) * 64 * 64 * 2  # tiles of 128 keys, at the end of the last


# ---- packed sequences --------------------------------------------------------------------------------------------------------

INT32 = torch.int32
# Queries and keys of each sequence, and tokens of none after the last.
PACKS = {
    "self": ([(70, 70), (1, 1), (64, 64), (130, 130)], (0, 0)),
    "cross": ([(70, 140), (0, 50), (40, 0), (0, 0), (90, 30), (65, 129)], (37, 150)),
}


def packed_inputs(case: Case, pack: str):
    """Arguments of a launch up to the boundaries, with NaN in tokens of no sequence, and the gradients in float64."""
    lengths, after = PACKS[pack]
    counts = torch.tensor([(0, 0), *lengths]).cumsum(0)
    bounds = tuple(n.to(INT32) for n in counts.unbind(1))
    whole = replace(case, seq=int(counts[-1, 0]) + after[0], context=int(counts[-1, 1]) + after[1])
    q, k, v = (t.clone() for t in whole.inputs())
    for t, n in zip((q, k, v), (after[0], after[1], after[1])):
        t[:, t.shape[1] - n :] = torch.nan
    grad_out = torch.randn(*q.shape[:3], v.shape[-1], generator=torch.Generator().manual_seed(1)).to(case.dtype)
    grad_out[:, q.shape[1] - after[0] :] = torch.nan
    out, lse = torch.zeros_like(grad_out), torch.full((1, case.heads, whole.seq), -torch.inf)
    grads = [torch.zeros(t.shape, dtype=torch.float64) for t in (q, k, v)]
    if case.sinks:
        grads.append(torch.zeros(case.heads, dtype=torch.float64))
    for (a, b), (c, d) in zip(zip(bounds[0].tolist(), bounds[0][1:].tolist()), zip(bounds[1].tolist(), bounds[1][1:].tolist())):
        part = replace(case, seq=b - a, context=d - c)
        if part.seq == 0:
            continue
        rows = q[:, a:b], k[:, c:d], v[:, c:d], grad_out[:, a:b]
        (*_, out[:, a:b], lse[..., a:b], _, _), found = inputs(part, rows)
        grads[0][:, a:b], grads[1][:, c:d], grads[2][:, c:d] = found[:3]
        if case.sinks:
            grads[3] += found[3]
    return (q, k, v, out, lse, grad_out, case.sink_logits(), bounds), grads


def check_packed(case: Case, pack: str, seed: int) -> None:
    args, expected = packed_inputs(case, pack)
    with interpret(seed=seed):
        *found, grad_sinks = attention_hopper_backward.launch(*args, *case.bounds, case.head_dim**-0.5, case.softcap)
    for got, want, after in zip(found, expected, (*PACKS[pack][1], PACKS[pack][1][1])):
        assert_close(got, want, case.dtype)
        assert (got[:, got.shape[1] - after :] == 0).all()
    if case.sinks:
        torch.testing.assert_close(grad_sinks, expected[3].float(), rtol=1e-5, atol=1e-5)


PACKED_CASES = [
    (Case(0, 0, head_dim=128, sinks=True), "cross"),
    (Case(0, 0, causal=False, sinks=True), "cross"),
    (Case(0, 0), "self"),
    (Case(0, 0, causal=False, head_dim=128, dtype=FP16), "self"),
    (Case(0, 0, window=(20, 0)), "cross"),
    (Case(0, 0, window=(10, 15), head_dim=128, dtype=FP16), "cross"),
    (Case(0, 0, head_dim=256, sinks=True), "cross"),
    (Case(0, 0, causal=False, head_dim=256, dtype=FP16), "self"),
    (Case(0, 0, head_dim=192, v_dim=128, sinks=True), "cross"),
    (Case(0, 0, causal=False, head_dim=192, v_dim=128, dtype=FP16), "self"),
]


@pytest.mark.parametrize("case, pack", [*PACKED_CASES[:2], *map(slow, PACKED_CASES[2:])], ids=str)
def test_packed_values(case: Case, pack: str):
    check_packed(case, pack, 0)


@pytest.mark.slow
@pytest.mark.parametrize("case, pack", PACKED_CASES, ids=str)
def test_packed_values_in_more_orders(case: Case, pack: str):
    for seed in range(1, 4):
        check_packed(case, pack, seed)


@pytest.mark.parametrize("bounds", [
    ([0, 70, 60, 100], [0, 30, 60, 100]),
    ([0, 30, 60, 100], [0, 70, 60, 100]),
    ([0, 30, 60, 101], [0, 30, 60, 100]),
    ([0, 30, 60, 90], [0, 30, 60, 2000000000]),
    ([-5, 30, 60, 90], [0, 30, 60, 90]),
])  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, *map(slow, [(128,), (256,)])])
def test_impossible_boundaries_give_nan(bounds: tuple[list[int], list[int]], head_dim: int):
    case = Case(100, 100, head_dim=head_dim, sinks=True)
    args, _ = inputs(case)
    with interpret():  # which raises where an access leaves a tensor
        found = attention_hopper_backward.launch(*args, tuple(torch.tensor(b, dtype=INT32) for b in bounds), -1, 0, 0.125)
    assert all(t is not None and t.isnan().all() for t in found)


@pytest.mark.parametrize("name, line", mutants.statements(attention_hopper_backward))
def test_a_kernel_without_one_of_its_synchronisations_fails(name: str, line: int, tmp_path: Path):
    with mutants.without(attention_hopper_backward, line, tmp_path) as mutant, mutants.fails(True):
        for seed in range(6):
            check(Case(192, 256, head_dim=128), seed, mutant)


WIDE_CASES = [Case(130, 130, head_dim=256), Case(130, 130, head_dim=192, v_dim=128)]


@pytest.mark.parametrize("case", [WIDE_CASES[0], pytest.param(WIDE_CASES[1], marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name, line", mutants.statements(_attention_hopper_wide))
def test_a_consumer_without_one_of_its_synchronisations_fails(name: str, line: int, case: Case, tmp_path: Path, monkeypatch):
    with mutants.without(_attention_hopper_wide, line, tmp_path) as mutant, mutants.fails(True):
        monkeypatch.setattr(attention_hopper_backward, "wide_consumer", mutant.wide_consumer)
        for seed in range(6):
            check(case, seed)


# Bytes of spills with triton 3.6, most of them around the loops; they may only shrink. At 256 one consumer loads some 15
# descriptors of operands again in every block.
PLAIN = [
    (Case(4096, 4096, causal, head_dim, dtype, 2, 32, 8), False, spills[not causal])
    for dtype in (BF16, FP16)
    for head_dim, spills in ((64, (0, 0)), (128, (68, 16)), (256, (224, 224)))
    for causal in (True, False)
]  # fmt: skip
WIDE = Case(8192, 8192, head_dim=64, heads=32, kv_heads=8)
OTHERS = [
    (replace(WIDE, head_dim=head_dim, **change), packed, spills.get(head_dim, 0))
    for head_dim in (64, 128, 256)
    for change, packed, spills in (
        ({"window": (127, 0), "sinks": True}, False, {128: 104, 256: 232}),
        ({"window": (127, 20)}, False, {128: 80, 256: 260}),
        ({}, True, {128: 128, 256: 284}),
        ({"causal": False}, True, {128: 84, 256: 304}),
        ({"window": (127, 0), "sinks": True}, True, {128: 156, 256: 304}),
        ({"softcap": 30.0}, False, {128: 156, 256: 224}),
        ({"softcap": 30.0, "causal": False}, False, {128: 92, 256: 224}),
        ({"softcap": 30.0, "window": (1023, 0)}, False, {128: 188, 256: 232}),
        ({"softcap": 30.0, "window": (1023, 0)}, True, {128: 244, 256: 304}),
    )
]
LATENT = replace(WIDE, kv_heads=32, head_dim=192, v_dim=128)
OTHERS += [
    (replace(LATENT, **change), packed, 0)
    for change in ({}, {"causal": False, "dtype": FP16}, {"window": (127, 20), "sinks": True}, {"softcap": 30.0})
    for packed in (False, True)
]


def compiled(case: Case, packed: bool, *need: bool) -> list:
    q, k, v = case.inputs("meta")
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = torch.empty(case.batch, case.heads, case.seq, dtype=torch.float32, device="meta")
    cu_seqlens = torch.empty(17, dtype=INT32, device="meta")
    with aot.compile_only(HOPPER) as kernels:
        attention_hopper_backward.launch(
            q, k, v, out, lse, out, case.sink_logits("meta"), (cu_seqlens, cu_seqlens) if packed else None, *case.bounds, 0.1,
            case.softcap, *need,
        )  # fmt: skip
    return kernels


@pytest.mark.parametrize("case, packed, spills", [*PLAIN[:4:2], *map(slow, (*PLAIN[1:4:2], *PLAIN[4:], *OTHERS))], ids=str)
def test_machine_code(case: Case, packed: bool, spills: int):
    kernels = compiled(case, packed)
    names = ["_schedule_kernel"] * (2 * packed) + ["_prepare_kernel", "_products_kernel", "_finish_kernel"]
    assert [kernel.name for kernel in kernels] == names + ["_sinks_kernel"] * case.sinks
    products = kernels[names.index("_products_kernel")]
    assert aot.problems([kernel for kernel in kernels if kernel is not products], HOPPER) == []
    assert aot.problems([products], HOPPER, wgmma=True, max_spill_bytes=aot.spills(spills)) == []
    code = machine_code(products)
    assert bool(re.search(r"\bUTMAREDG\b", code)) == (case.head_dim == 128)
    assert bool(re.search(r"\bREDG?\.E\.ADD\.F32", code)) == (case.head_dim != 128)


@pytest.mark.skipif(_lang.VERSION != (3, 6), reason="holds for the ptxas that the measured version had")
@pytest.mark.parametrize("case", [PLAIN[2][0], slow((OTHERS[9][0],))], ids=str)
def test_order_in_the_main_loop(case: Case):
    """Of each consumer at head_dim 128 under a bound: half of dP, exponentials of the logits while it runs, the other half, which
    runs under the rest of them (all of dP before the exponentials was 1 to 3 % slower), and P^T dO last."""
    products = next(kernel for kernel in compiled(case, False) if kernel.name == "_products_kernel")
    found = re.findall(r"HGMMA|MUFU\.EX2|gsb0, 0x", machine_code(products))
    marks = "".join({"H": "P", "M": "E", "g": "W"}[mark[0]] for mark in found)
    loops = re.findall(r"PPPP(E{12}[PE]*)W", marks)
    assert len(loops) == 2
    for loop in loops:
        assert loop.endswith("PPPP") and loop.count("P") == 8 and loop.count("E") == 32


@pytest.mark.slow
@pytest.mark.parametrize("head_dim, softcap", [(64, 0.0), (128, 0.0), (128, 30.0), (192, 0.0), (256, 0.0), (256, 30.0)])
@pytest.mark.parametrize("need", list(itertools.product((False, True), repeat=3))[1:-1], ids=str)
def test_machine_code_of_what_is_needed(head_dim: int, softcap: float, need: tuple[bool, ...]):
    parts, v_dim = (2, 128) if head_dim == 192 else (1, head_dim)  # of q and k
    kernels = compiled(replace(WIDE, head_dim=head_dim, v_dim=v_dim, softcap=softcap), False, *need)
    spills = {128: 108, 256: 108}.get(head_dim, 0) if softcap and need == (False, True, True) else 0
    assert aot.problems(kernels, HOPPER, wgmma=True, max_spill_bytes=aot.spills(spills)) == []
    code = aot.sass(kernels[1])
    if code is None:
        pytest.skip("triton brings no disassembler here")
    assert bool(re.search(r"\bUTMASTG\b", code)) == (need[1] or need[2])
    assert bool(re.search(r"\bUTMAREDG\b", code)) == (need[0] and head_dim == 128)
    assert bool(re.search(r"\bREDG?\.E\.ADD\.F32", code)) == (need[0] and head_dim != 128)
    # 64 rows by 16 of what is summed over, of each consumer: S of the first block, then S, and what is needed alone.
    s, dp = head_dim // 16, v_dim // 16
    per_block = s + need[0] * 4 * (2 if head_dim <= 128 else parts) + need[1] * 4 * parts + need[2] * 4
    if any(need[:2]):
        assert code.count("HGMMA") == 2 * (s + per_block + dp)
    else:  # nobody uses dP, most of which ptxas drops
        assert code.count("HGMMA") <= 2 * (s + per_block + dp)

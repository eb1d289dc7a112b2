"""flash_attn_func and flash_attn_varlen_func: flash-attn's arguments, shapes and meanings, on the CPU and (gpu) on a GPU."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from attention_cases import Case, exact, with_gradients
from attention_formula import formula
from torch import Tensor

import fusedblock
from fusedblock import flash_attn_func, flash_attn_varlen_func

# flash_attn.flash_attn_func and flash_attn_varlen_func of flash-attn 2.8, name and default of every parameter.
REST = [("dropout_p", 0.0), ("softmax_scale", None), ("causal", False), ("window_size", (-1, -1)), ("softcap", 0.0),
        ("alibi_slopes", None), ("deterministic", False), ("return_attn_probs", False)]  # fmt: skip
NEEDED = inspect.Parameter.empty
BOUNDS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
SIGNATURES = {
    flash_attn_func: [*((n, NEEDED) for n in "qkv"), *REST],
    flash_attn_varlen_func: [*((n, NEEDED) for n in (*"qkv", *BOUNDS)), *REST, ("block_table", None)],
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_signature(function):
    parameters = inspect.signature(function).parameters.values()
    assert [(p.name, p.default) for p in parameters] == SIGNATURES[function]
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-5)


def flash(case: Case, device: str, **more: object):
    """The case by flash-attn's functions."""
    x = case.inputs()
    x = x.changed(lambda t: t.to(device))
    options = {"causal": case.causal, "softcap": case.softcap, "softmax_scale": case.scale, **more}
    options |= {"window_size": case.window or (-1, -1), "alibi_slopes": x.options.get("alibi_slopes")}

    def run(y):
        if not case.packed:
            return flash_attn_func(y.q, y.k, y.v, **options, return_attn_probs=True)[:2]
        keys = x.options.get("cu_seqlens_k")
        if keys is None:
            keys = torch.nn.functional.pad(x.options["seqused_k"].cumsum(0), (1, 0)).int()
            options["block_table"] = x.options["block_table"]
        longest = (max(n[i] for n in case.lengths) for i in range(2))
        bounds = (x.options["cu_seqlens_q"], keys, *longest)
        return flash_attn_varlen_func(y.q, y.k, y.v, *bounds, **options, return_attn_probs=True)[:2]

    return with_gradients(run, x)


FLASH = [
    Case(), Case(causal=True), Case(seq=60, context=20, causal=True), Case(window=(7, 0)), Case(window=(-1, 4), causal=True),
    Case(softcap=2.0), Case(alibi="heads", causal=True), Case(alibi="batch"), Case(scale=0.1), Case(heads=6, kv_heads=1),
    Case(layout="packed", causal=True), Case(layout="packed", window=(5, 3), softcap=1.5), Case(layout="packed", alibi="heads"),
    Case(layout="packed", alibi="batch"), Case(layout="packed-paged", lengths=((1, 9), (1, 0), (1, 40)), alibi="batch"),
    Case(layout="packed-paged", causal=True), Case(layout="packed-paged", lengths=((1, 9), (1, 0), (1, 40)), window=(8, 0)),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", FLASH, ids=str)
def test_results_and_gradients(case, device):
    got, want = flash(case, device), exact(case)
    assert got.keys() == want.keys()
    for name, value in want.items():
        close(got[name], value)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("head_dim", [10, 59, 111])
def test_head_dims_between_multiples_of_8(head_dim, packed):
    case = Case(head_dim=head_dim, causal=True, layout="packed" if packed else "batched")
    got, want = flash(case, "cpu"), exact(case)
    for name, value in want.items():
        close(got[name], value)


def of_dims(packed: bool, q: int, k: int, v: int, more: tuple[int, ...] = (2,)):
    """A call of tensors of these columns."""
    lead = (6,) if packed else (1, 6)
    given = {n: torch.zeros(*lead, *more, d) for n, d in (("q", q), ("k", k), ("v", v))}
    if not packed:
        return flash_attn_func(**given)
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    return flash_attn_varlen_func(**given, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=4, max_seqlen_k=4)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dims, message", [
    ((60, 64, 64), "k has head_dim=64, but q has head_dim=60"), ((64, 60, 60), "k has head_dim=60, but q has head_dim=64"),
    ((57, 63, 60), "k has head_dim=63, but q has head_dim=57"), ((64, 128, 64), "k has head_dim=128, but q has head_dim=64"),
    ((257, 257, 257), "head_dim=257 of q and k, expected 1 to 256, 512 or 576"),
    ((264, 264, 60), "head_dim=264 of q and k, expected 1 to 256"), ((511, 511, 8), "head_dim=511 of q and k, expected 1 to 256"),
    ((60, 60, 257), "v_dim=257 of v, expected 1 to 256 or 512"), ((60, 60, 576), "v_dim=576 of v, expected 1 to 256 or 512"),
    ((60, 60, 0), "v_dim=0 of v, expected 1 to 256"),
], ids=str)  # fmt: skip
def test_head_dims_are_named_as_they_were_given(dims, message, packed):
    name = "flash_attn_varlen_func" if packed else "flash_attn_func"
    with pytest.raises(ValueError, match=f"^{name}: {message}"):
        of_dims(packed, *dims)
    with pytest.raises(ValueError, match=rf"^{name}: q has shape \([16, ]*, 60\), expected "):
        of_dims(packed, 60, 60, 60, more=())
    assert of_dims(packed, 60, 60, 100).shape[-1] == 100


def test_dims_without_gradients_are_named_as_they_were_given():
    q, v = torch.zeros(1, 4, 2, 512, requires_grad=True), torch.zeros(1, 4, 2, 100)
    with pytest.raises(ValueError, match="^flash_attn_func: head_dim=512 and v_dim=100 have no backward"):
        flash_attn_func(q, q, v)


def test_what_comes_back():
    x, y = Case(seq=3, context=5).inputs(), Case(layout="packed", lengths=((3, 5), (2, 2))).inputs()
    cu = y.options["cu_seqlens_q"], y.options["cu_seqlens_k"], 3, 5
    assert isinstance(flash_attn_func(x.q, x.k, x.v), Tensor) and isinstance(flash_attn_varlen_func(y.q, y.k, y.v, *cu), Tensor)
    out, lse, probabilities = flash_attn_func(x.q, x.k, x.v, return_attn_probs=True)
    assert out.shape == x.q.shape and lse.shape == (2, 4, 3) and lse.dtype is torch.float32 and probabilities is None
    out, lse, probabilities = flash_attn_varlen_func(y.q, y.k, y.v, *cu, return_attn_probs=True)
    assert out.shape == y.q.shape and lse.shape == (4, 8) and lse.dtype is torch.float32 and probabilities is None
    q = x.q.requires_grad_()
    _, lse, _ = flash_attn_func(q, x.k, x.v, return_attn_probs=True)
    assert not lse.requires_grad
    assert torch.equal(flash_attn_func(q, x.k, x.v, deterministic=True), flash_attn_func(q, x.k, x.v))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True])
def test_dropped_probabilities(packed, device):
    """S_dmask holds the probabilities of the call, negative where dropped: out follows from it."""
    case = Case(causal=True, layout="packed" if packed else "batched", heads=2, kv_heads=2)
    x = case.inputs().changed(lambda t: t.to(device))
    p = 0.25
    if packed:
        longest = (max(n[i] for n in case.lengths) for i in range(2))
        out, lse, signed = flash_attn_varlen_func(
            x.q, x.k, x.v, x.options["cu_seqlens_q"], x.options["cu_seqlens_k"], *longest, p, causal=True, return_attn_probs=True
        )
        assert signed.shape == (len(case.lengths), 2, 40, 40) and signed.dtype == x.q.dtype
    else:
        out, lse, signed = flash_attn_func(x.q, x.k, x.v, p, causal=True, return_attn_probs=True)
        assert signed.shape == (2, 2, case.seq, case.context)
    close(lse, exact(case)["lse"])
    dropped = int(torch.signbit(signed).sum())
    first_q = first_k = seen = 0
    for n, (queries, keys) in enumerate(case.sequences):
        q = slice(first_q, first_q + queries) if packed else slice(None)
        v = x.v[first_k : first_k + keys] if packed else x.v[n]
        o = out[q] if packed else out[n]
        weights = signed[n, :, :queries, :keys].double()
        total = weights.abs().sum(-1)
        torch.testing.assert_close(total[total > 0], torch.ones_like(total[total > 0]), rtol=1e-5, atol=1e-5)
        want = torch.einsum("hij,jhd->ihd", weights.clamp(min=0) / (1 - p), v.double())
        torch.testing.assert_close(o.double(), want, rtol=1e-5, atol=1e-5)
        seen += int((weights != 0).sum())
        first_q, first_k = first_q + queries, first_k + keys
    assert abs(int((signed < 0).sum()) / seen - p) < 4 * math.sqrt(p * (1 - p) / seen)
    assert dropped >= int((signed < 0).sum()) > 0


def test_the_seed_is_torchs():
    x = Case().inputs()
    torch.manual_seed(11)
    first = flash_attn_func(x.q, x.k, x.v, 0.3)
    torch.manual_seed(11)
    assert torch.equal(flash_attn_func(x.q, x.k, x.v, 0.3), first)
    torch.manual_seed(11)
    assert torch.equal(fusedblock.attention(x.q, x.k, x.v, dropout_p=0.3), first)


PAGED = Case(layout="packed-paged").inputs()
PACKED = Case(layout="packed").inputs()


@pytest.mark.parametrize(
    "x, more, message",
    [
        (PACKED, {"alibi_slopes": torch.ones(5, 4)}, "alibi_slopes has 5 sequences, but q has 6"),
        (PACKED, {"dropout_p": 1.0}, "flash_attn_varlen_func: dropout_p=1.0"),
        (PACKED, {"max_seqlen_q": 39}, "flash_attn_varlen_func: max_seqlen_q=39.*40"),
        (PACKED, {"max_seqlen_k": 39}, "flash_attn_varlen_func: max_seqlen_k=39.*40"),
        (PACKED, {"window_size": (1, 2, 3)}, r"flash_attn_varlen_func: window_size=\(1, 2, 3\)"),
        (PACKED, {"cu_seqlens_q": torch.tensor([0, 9, 8, 10, 11, 12, 13], dtype=torch.int32)}, "cu_seqlens_q=.*never decrease"),
        (PAGED, {"q": PAGED.q.clone().requires_grad_()}, "block_table is given, but gradients"),
        (PAGED, {"block_table": PAGED.options["block_table"].long()}, "block_table has dtype torch.int64"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_refused(x, more, message):
    used = x.options.get("seqused_k")
    keys = x.options["cu_seqlens_k"] if used is None else torch.nn.functional.pad(used.cumsum(0), (1, 0)).int()
    given = {"q": x.q, "k": x.k, "v": x.v, "cu_seqlens_q": x.options["cu_seqlens_q"], "cu_seqlens_k": keys, "max_seqlen_q": 40,
             "max_seqlen_k": 40, "block_table": x.options.get("block_table")}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(**{**given, **more})


def test_the_formula_gives_what_torch_gives():
    """The oracle itself, beside torch's own attention."""
    x = Case(causal=True, seq=53, dtype=torch.float64).inputs()
    want = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (x.q, x.k, x.v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(formula(x)[0], want.transpose(1, 2))

"""Tiles of a mask or bias in the attention kernels, by TMA and by pointers, and the gradient of a bias by each of its kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from attention_cases import Case, Inputs, at_target, check, error, exact, limit, public, with_gradients
from attention_formula import formula
from torch import Tensor

from fusedblock.kernels import _attention as shared
from fusedblock.kernels import _launch, attention, attention_backward
from fusedblock.kernels._target import TARGETS

BF16 = torch.bfloat16
SIZE = {"seq": 37, "context": 64, "heads": 2, "kv_heads": 1}  # rows of the mask or bias that TMA takes, in any dtype


@contextmanager
def path(tma: bool) -> Iterator[list[tuple[torch.dtype, list[int]]]]:
    """Inside, masks and biases come by TMA wherever it takes them, or never; yields (dtype, box) of their descriptors."""
    made: list[tuple[torch.dtype, list[int]]] = []

    def descriptor(t: Tensor, block: list[int]):
        made.append((t.dtype, block))
        return _launch.descriptor(t, block)

    def box(target, rows: int, keys: int, stages: int):
        return (rows, keys) if tma else None

    with mock.patch.object(shared, "descriptor", descriptor), mock.patch.object(shared, "term_box", box):
        yield made


@contextmanager
def tiles_of(rows: int, keys: int) -> Iterator[None]:
    """Inside, tiles of the forward and the backward have this many rows and keys."""
    pair = (attention_backward.Config(rows, keys, 4, 2),) * 2
    with (
        mock.patch.object(attention, "configure", lambda *args: attention.Config(rows, keys, 4, 2)),
        mock.patch.object(attention_backward, "configure", lambda *args: pair),
    ):
        yield


CASES = [
    *(Case(**SIZE, bias=b) for b in ("full", "batch", "heads", "both")),
    *(Case(**SIZE, mask=m) for m in ("bool", "added")),
    Case(**SIZE, bias="batch", mask="bool", causal=True),
    Case(**SIZE, bias="full", window=(27, 4), softcap=0.7),
    Case(**SIZE, bias="heads", alibi="heads", sinks=True),
    Case(**SIZE, bias="full", prefix=True, causal=True, dropout=0.3),
    Case(**SIZE, bias="both", seqused=True),
]


@pytest.mark.parametrize("tma", [True, False], ids=["tma", "pointers"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_paths(case, dtype, tma):
    """Tiles of 128 keys: their rows are wide enough for TMA in any dtype."""
    with path(tma) as made, tiles_of(16, 128):
        check(replace(case, dtype=dtype), "sm_90")
    kinds = {dtype for dtype, _ in made}
    wanted = {*([dtype] if case.bias else []), *([torch.uint8] if case.mask == "bool" else [])}
    wanted |= {torch.float32} if case.mask == "added" else set()
    assert kinds == (wanted if tma else set()) and all(block[:2] == [1, 1] for _, block in made)


@pytest.mark.parametrize("tma", [True, False], ids=["tma", "pointers"])
@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32], ids=str)
def test_a_bias_of_another_dtype(dtype, tma):
    """bf16 queries; numbers that every dtype of the bias holds."""
    case = Case(**SIZE, bias="batch", dtype=BF16, head_dim=32)
    x = case.inputs()
    bias = (x.options["bias"] * 8).round() / 8
    want = with_gradients(formula, x.with_(bias=bias).changed(lambda t: t.double()))
    with path(tma) as made, at_target("sm_90"):
        got = with_gradients(public, x.with_(bias=bias.to(dtype)))
    assert {kind for kind, _ in made} == ({dtype} if tma else set())
    assert got["grad_bias"].dtype is dtype
    for name, value in want.items():
        assert error(got[name], value) <= limit(case, name, value), name


def test_narrow_and_misaligned_rows_take_pointers():
    """Rows of a box below 128 bytes, rows 53 elements apart, an address off by one element, no dense axis."""
    def off(t: Tensor) -> Tensor:
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) if t.dim() == 4 and t.shape[1] == 2 else t

    def turned(t: Tensor) -> Tensor:
        return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() == 4 and t.shape[1] == 2 else t

    with path(tma=True) as made:
        with tiles_of(16, 16):
            check(Case(**SIZE, bias="full", mask="bool"), "sm_90")
        with tiles_of(16, 128):
            check(Case(**{**SIZE, "context": 53}, bias="full", mask="bool"), "sm_90")
            check(Case(**SIZE, bias="full"), "sm_90", layout=off)
            check(Case(**SIZE, bias="full"), "sm_90", layout=turned)
            check(Case(**SIZE, bias="row", mask="padding"), "sm_90")  # one row: a vector
            assert made == []
            check(Case(**SIZE, bias="full"), "sm_90")
            assert made


def test_where_tma_is_meant_to_be():
    """By the configs as they are: with stages and 16 bits, on a GPU that has it."""
    one, two = TARGETS["sm_90"], TARGETS["sm_80"]
    assert shared.term_box(one, 64, 64, 2) == (64, 64)
    assert shared.term_box(one, 64, 64, 1) is None and shared.term_box(two, 64, 64, 2) is None


@pytest.mark.parametrize("tma", [True, False], ids=["tma", "pointers"])
def test_expanded_and_dense_are_alike(tma):
    """A bias of stride 0 over batch and heads, and over its rows, and its copy: equal bits."""
    x = Case(**SIZE, bias="both", sinks=True).inputs()
    one = x.options["bias"]
    for bias in (one.expand(2, 2, -1, -1), one[:, :, :1].expand(2, 2, 37, -1)):
        with path(tma) as made, at_target("sm_90"):
            got = with_gradients(public, x.with_(bias=bias))
            narrow = bool(made)
            want = with_gradients(public, x.with_(bias=bias.contiguous()))
        assert narrow == (tma and bias.stride(2) != 0)
        assert all(torch.equal(got[n], want[n]) for n in ("out", "lse", "grad_q", "grad_k", "grad_v", "grad_bias"))


@pytest.mark.parametrize("tma", [True, False], ids=["tma", "pointers"])
def test_past_a_sequence_a_bias_may_hold_nan(tma):
    case = Case(**SIZE, bias="full", seqused=True)
    x = case.inputs()
    bias = x.options["bias"].clone()
    for b, (_, keys) in enumerate(case.sequences):
        bias[b, :, :, keys:] = math.nan
    assert bias.isnan().any()
    with path(tma), at_target("sm_90"):
        got = with_gradients(public, x.with_(bias=bias))
    for name, value in exact(case).items():
        assert error(got[name], value) <= 1e-5, name


# ---- the gradient of a bias: by the kernel of grad_q, summed from what it writes, or by its own ------------------------------

SEVERAL = {"seq": 70, "context": 136, "heads": 2, "kv_heads": 1, "batch": 2, "dtype": BF16, "head_dim": 64}
HIDING = [{}, {"causal": True}, {"window": (20, 3)}, {"prefix": True, "causal": True},
          {"seq": 136, "context": 70, "causal": True}]  # fmt: skip


def sizes_of(case: Case, wanted: tuple[str, ...] = ("q", "bias"), change: Callable[[Inputs], Inputs] = lambda x: x) -> dict:
    args = dict(zip(attention.NAMES, change(case.inputs()).op_args()))
    q, v = args["q"], args["v"]
    out = q.new_empty(*q.shape[:3], v.shape[3])
    given = {**args, "grad_out": out, "out": out, "lse": torch.empty(q.shape[0], q.shape[2], q.shape[1])}
    given |= {f"need_{n}": True for n in wanted}
    return attention_backward.SPEC.axes({n: given.get(n, False) for n in attention_backward.NAMES})


@pytest.mark.parametrize("hiding", HIDING, ids=str)
@pytest.mark.parametrize("bias", ["full", "batch", "heads"])
def test_gradient_of_a_bias(bias, hiding):
    """Tiles that nothing of a row attends, before and behind what it does, have gradient 0."""
    check(Case(**{**SEVERAL, **hiding}, bias=bias), "sm_90")


@pytest.mark.parametrize("option", [{"softcap": 0.7}, {"dropout": 0.3}, {"mask": "bool"}, {"block_map": "heads"}], ids=str)
@pytest.mark.parametrize("bias", ["full", "both"])
def test_gradient_of_a_bias_with_options(bias, option):
    check(Case(**{**SIZE, "dtype": torch.float32}, bias=bias, **option), "sm_90")


@pytest.mark.parametrize("bias", ["batch", "both"])
def test_more_logits_than_scratch_is_given(bias, monkeypatch):
    """Then a kernel of its own makes the gradient, and its values are as good."""
    case = Case(**SEVERAL, bias=bias, causal=True)
    monkeypatch.setattr(attention_backward, "MOST_LOGITS", 2 * 2 * 70 * 136 * 2 - 1)
    assert "logits_batch" not in sizes_of(case)
    check(case, "sm_90")
    monkeypatch.setattr(attention_backward, "MOST_LOGITS", 2 * 2 * 70 * 136 * 2)
    assert sizes_of(case)["logits_batch"] == 2


def test_who_makes_the_gradient_of_a_bias():
    def maker(bias: str, wanted: tuple[str, ...] = ("q", "bias"), change=lambda x: x, **more) -> str:
        sizes = sizes_of(Case(**{**SIZE, "dtype": BF16, **more}, bias=bias), wanted, change)
        assert not {"bias_by_q", "logits_batch"} <= sizes.keys()
        return "q" if "bias_by_q" in sizes else "sum" if "logits_batch" in sizes else "own"

    assert maker("full") == "q"
    assert [maker(b) for b in ("batch", "heads", "both")] == ["sum"] * 3
    assert [maker(b) for b in ("row", "column")] == ["own"] * 2
    assert maker("full", ("bias",)) == maker("batch", ("k", "v", "bias")) == "own"
    assert maker("full", seqused=True) == maker("full", block_map="both") == "own"
    # Sums of 16 bits would not be what a gradient in fp32 is asked for.
    assert maker("batch", change=lambda x: x.with_(bias=x.options["bias"].float())) == "own"
    assert maker("full", change=lambda x: x.with_(bias=x.options["bias"].float())) == "q"

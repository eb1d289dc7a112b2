"""Split-KV decode attention against float64 softmax attention."""

from __future__ import annotations

from dataclasses import replace

import aot
import pytest
import torch
from torch import Tensor

from fusedblock.interpret import count_traffic, interpret
from fusedblock.kernels import decode_attention as decode
from fusedblock.kernels._attention import normalise_mask
from fusedblock.kernels._target import TARGETS

# batch, seq, heads, kv_heads, head_dim, context: one token, GQA groups 1, 3, 4, 7, several queries, short and ragged contexts
CASES = [(1, 1, 4, 2, 64, 300), (2, 1, 7, 1, 96, 129), (1, 5, 6, 2, 16, 40), (2, 3, 3, 3, 128, 2), (1, 16, 4, 1, 24, 200)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
MASKS = ["none", "padding", "bool", "added"]


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Plain attention in the dtype of the arguments: out `batch seq heads head_dim`, lse `batch heads seq`."""
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    logits = torch.einsum("bshd,bchd->bhsc", q, k) * scale
    if causal:
        seq, context = logits.shape[-2:]
        i, j = (torch.arange(n, device=q.device) for n in (seq, context))
        hidden = j[None] > i[:, None] + context - seq
        logits = logits.masked_fill(hidden, float("-inf"))
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else logits + mask.to(logits.dtype)
    lse = logits.logsumexp(-1)
    p = (logits - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("bhsc,bchd->bshd", p, v), lse


def make(
    case: tuple[int, ...], dtype: torch.dtype, kind: str, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    batch, seq, heads, kv_heads, head_dim, context = case
    g = torch.Generator().manual_seed(sum(case))

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device, dtype)

    q, k, v = rand(batch, seq, heads, head_dim), *(rand(batch, context, kv_heads, head_dim) for _ in range(2))
    mask: Tensor | None = None
    if kind == "padding":
        mask = torch.ones(batch, context, dtype=torch.bool, device=device)
        mask[0, : context // 2] = False
    elif kind == "bool":
        mask = torch.rand(batch, 1, seq, context, generator=g).to(device) > 0.3
        mask[0, 0, 0] = False  # a row that attends to nothing
    elif kind == "added":
        keep = torch.rand(batch, heads, seq, context, generator=g) > 0.3
        mask = torch.where(keep, torch.randn(keep.shape, generator=g), torch.finfo(torch.float32).min).to(device)
    return q, k, v, normalise_mask(mask, q, k)


def check(case: tuple[int, ...], dtype: torch.dtype, kind: str, causal: bool, device: str = "cpu") -> None:
    q, k, v, mask = make(case, dtype, kind, device)
    scale = case[4] ** -0.5
    infinite = mask if mask is None or mask.dtype is torch.bool else mask.double().masked_fill(mask < -1e38, float("-inf"))
    want, want_lse = exact(q.double(), k.double(), v.double(), infinite, causal, scale)
    if kind == "padding":  # unused slots may hold anything
        k[0, : case[5] // 2] = v[0, : case[5] // 2] = float("nan")
    out, lse = decode.launch(q, k, v, mask, causal, scale)
    seen = want_lse.isfinite()
    error = (out.double() - want).norm()
    if dtype in (torch.float16, torch.bfloat16):
        rounded = infinite if infinite is None or infinite.dtype is torch.bool else infinite.to(dtype)
        plain = exact(q, k.nan_to_num(), v.nan_to_num(), rounded, causal, scale)[0]
        assert error <= 1.5 * (plain.double() - want).norm()
    else:
        assert error <= (1e-5 if dtype is torch.float32 else 1e-12) * want.norm()
    assert torch.equal(lse == float("-inf"), ~seen)
    assert torch.allclose(lse[seen].double(), want_lse[seen], rtol=0, atol=1e-2 if dtype.itemsize == 2 else 1e-5)
    assert (out.movedim(1, 2)[~seen] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(dtype: torch.dtype, kind: str, causal: bool) -> None:
    for case in CASES:
        with interpret(TARGETS["sm_90"]):
            check(case, dtype, kind, causal)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_more_sequences_than_sms(dtype: torch.dtype) -> None:
    few = replace(TARGETS["sm_90"], sms=1)
    with interpret(few):
        for case in CASES:
            for kind in MASKS:
                check(case, dtype, kind, False)
    assert decode.configure(16, 128, 2, False, few, 2) == decode.Config(32, 4, 4)


def test_strided_keys_and_few_splits() -> None:
    q, k, v, _ = make((2, 1, 4, 2, 32, 150), torch.float32, "none")
    cached = torch.stack((k, v)).transpose(2, 3).contiguous().transpose(2, 3)  # HF's cache layout, seen as batch context heads
    with interpret(TARGETS["gfx942"]):
        out, lse = decode.launch(q, cached[0], cached[1], None, False, 0.2)
    want, want_lse = exact(q.double(), k.double(), v.double(), None, False, 0.2)
    assert (out.double() - want).norm() < 1e-5 * want.norm() and (lse.double() - want_lse).abs().max() < 1e-5


def test_empty_and_refused() -> None:
    q, k, v, _ = make((2, 1, 4, 2, 32, 8), torch.float32, "none")
    with interpret(TARGETS["sm_90"]):
        out, lse = decode.launch(q, k[:, :0], v[:, :0], None, False, 0.2)
        assert (out == 0).all() and (lse == float("-inf")).all()
        assert decode.launch(q[:0], k[:0], v[:0], None, False, 0.2)[0].shape == (0, 1, 4, 32)
        with pytest.raises(ValueError, match="seq=33 queries of 2 heads make 66 rows, at most 64"):
            decode.launch(q[:, :1].expand(-1, 33, -1, -1), k, v, None, False, 0.2)


@pytest.mark.parametrize("kind", MASKS)
def test_costs_are_the_bytes_moved(kind: str) -> None:
    q, k, v, mask = make((2, 1, 4, 2, 64, 300), torch.float32, kind)
    if kind == "padding":
        mask = None if mask is None else torch.ones_like(mask)
    with count_traffic(TARGETS["sm_90"]) as traffic:
        decode.launch(q, k, v, mask, False, 0.2)
    costs = decode.SPEC.costs({"q": q, "k": k, "v": v, "mask": mask, "causal": False, "scale": 0.2})
    assert [(c.read_bytes, c.written_bytes) for c in costs] == [(t.read_bytes, t.written_bytes) for t in traffic.launches]


def test_splits_fill_the_gpu() -> None:
    target, config = TARGETS["sm_90"], decode.Config(128, 4, 3)
    assert decode.split_length(8, 4096, config, target) == 256  # 16 splits of 8 sequences: 128 programs on 132 SMs
    assert decode.split_length(132, 4096, config, target) == 4096  # enough sequences: not split
    assert decode.split_length(512, 4096, config, target) == 4096  # nor many more: 32 splits would fill the SMs no better
    assert decode.split_length(1, 1 << 20, config, target) == 64 * 128  # at most MAX_SPLITS
    assert decode.split_length(1, 100, config, target) == 128


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_compiles_without_spills(name: str, head_dim: int) -> None:
    target = TARGETS[name]

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    with aot.compile_only(target) as kernels:
        for batch in (1, 64):  # fewer sequences than SMs, and more
            k = meta(batch, 4096, 8, head_dim)
            for mask in (None, meta(1, 1, 1, 4096, dtype=torch.bool)):
                decode.launch(meta(batch, 1, 32, head_dim), k, k, mask, False, 0.1)
    assert len(kernels) in (6, 8) and aot.problems(kernels, target) == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_gpu_against_float64(dtype: torch.dtype) -> None:
    for case in [*CASES, (2, 1, 32, 8, 128, 4096), (1, 2, 32, 8, 128, 1000), (1, 1, 8, 8, 256, 513), (9, 1, 16, 16, 128, 700)]:
        for kind in MASKS:
            check(case, dtype, kind, False, "cuda")
    check(CASES[-1], dtype, "none", True, "cuda")


@pytest.mark.gpu
def test_gpu_bits_repeat() -> None:
    q, k, v, _ = make((4, 1, 32, 8, 128, 4000), torch.bfloat16, "none", "cuda")
    first = decode.launch(q, k, v, None, False, 0.1)
    for _ in range(20):
        again = decode.launch(q, k, v, None, False, 0.1)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])

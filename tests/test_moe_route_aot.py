"""The router's kernels compiled ahead of time at the sizes of published models: they fit, and hardly anything spills."""

from __future__ import annotations

from typing import Any

import aot
import pytest
import torch
from torch import Tensor

from fusedblock.kernels._router import RouterSpec
from fusedblock.kernels._target import TARGETS
from fusedblock.ops import OPS

BF16 = torch.bfloat16
_GROUPED = {"groups": 8, "round_logits": False, "round_weights": False}
# Hidden, experts, router: few wide experts, many, all options, a number of experts that is no power of two, and the most.
MODELS = {
    "8": (4096, 8, RouterSpec(2, renormalise=True)),
    "128": (2048, 128, RouterSpec(8, renormalise=True)),
    "128-chosen": (2880, 128, RouterSpec(4, scoring="softmax_chosen", bias=True)),
    "128-wide": (4096, 128, RouterSpec(8, scoring="sigmoid", renormalise=True, eps=1e-20, scale=2.5, correction_bias=True,
                                       round_logits=False, round_weights=False)),
    "160-groups": (5120, 160, RouterSpec(6, topk_groups=3, scale=16.0, **_GROUPED)),
    "256-groups": (7168, 256, RouterSpec(8, scoring="sigmoid", topk_groups=4, group_score="top2", renormalise=True, eps=1e-20,
                                         scale=2.5, correction_bias=True, **_GROUPED)),
    "512": (2048, 512, RouterSpec(10, renormalise=True)),
}  # fmt: skip
TOKENS = (16, 32, 64, 512, 2048, 16384)  # each way to launch, each tile
# A few bytes: ptxas takes 72 or 80 registers for two of sm_90's, and 99 KB of shared memory shorten the ring of sm_86.
SPILLS = {"sm_80": 16, "sm_86": 28, "sm_90": 16, "sm_100": 56, "gfx942": 0}


def meta(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def forward(target: str, dtype: torch.dtype, model: str, tokens: int) -> list[Any]:
    hidden, experts, spec = MODELS[model]
    bias = meta(dtype, experts) if spec.bias else None
    correction = meta(torch.float32, experts) if spec.correction_bias else None
    x, weight = meta(dtype, tokens, hidden), meta(dtype, experts, hidden)
    with aot.compile_only(TARGETS[target]) as kernels:
        OPS["moe_route"].launch(x, weight, bias, correction, *spec.numbers(dtype), 64)
    return kernels


def backward(target: str, dtype: torch.dtype, model: str, tokens: int) -> list[Any]:
    hidden, experts, spec = MODELS[model]
    scoring, top_k, *_, renormalise, eps, scale, logits_dtype, weights_dtype = spec.numbers(dtype)
    logits, weights = meta(logits_dtype, tokens, experts), meta(weights_dtype, tokens, top_k)
    with aot.compile_only(TARGETS[target]) as kernels:
        OPS["moe_route_backward"].launch(
            weights, logits, meta(dtype, tokens, hidden), meta(dtype, experts, hidden), logits, meta(torch.int32, tokens, top_k),
            scoring, renormalise, eps, scale, True, True, spec.bias,
        )  # fmt: skip
    return kernels


def rows(quick: bool) -> list[Any]:
    """Every model in bf16 on sm_90, the largest elsewhere; fp16 differs from it in its types alone: one model; in fp32 two."""
    found = []
    for target in SPILLS:
        for dtype in (BF16, torch.float16, torch.float32):
            every = tuple(MODELS) if target == "sm_90" else ("128", "128-chosen", "256-groups", "512")
            for model in {BF16: every, torch.float16: ("128-chosen",), torch.float32: ("128", "128-chosen")}[dtype]:
                is_quick = dtype is BF16 and (target == "sm_90" or model in ("128", "256-groups"))
                if is_quick == quick:
                    found.append(pytest.param(target, dtype, model, id=f"{target}-{str(dtype).removeprefix('torch.')}-{model}"))
    return found


def check(target: str, dtype: torch.dtype, model: str) -> None:
    most = aot.spills(SPILLS[target])
    if target == "gfx942" and dtype is torch.float16:
        most = aot.spills(468)  # three products of bf16 for one of fp32 and fp16
    if dtype is torch.float32 and target != "sm_90":
        most = 1 << 30  # multiply-adds in registers; nobody's training
    for tokens in TOKENS:
        found = aot.problems(forward(target, dtype, model, tokens), TARGETS[target], max_spill_bytes=most)
        assert not found, tokens
    for tokens in (512, 16384):
        found = aot.problems(backward(target, dtype, model, tokens), TARGETS[target], max_spill_bytes=most)
        assert not found, tokens


@pytest.mark.slow
@pytest.mark.parametrize(("target", "dtype", "model"), rows(quick=True))
def test_bf16_of_published_sizes(target, dtype, model):
    check(target, dtype, model)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "dtype", "model"), rows(quick=False))
def test_every_target_and_dtype(target, dtype, model):
    check(target, dtype, model)


def test_the_gemm_of_many_tokens_is_wgmma():
    for model in ("128", "256-groups"):
        first = forward("sm_90", BF16, model, 16384)[0]
        assert aot.resources(first).mma == "wgmma"
    # Two programs an SM: with one it took 1.6 times as long. Other versions' ptxas takes more.
    assert aot.resources(forward("sm_90", BF16, "128", 16384)[0]).registers <= aot.spills(128)


@pytest.mark.parametrize("tile_rows", [8, 16, 128])
@pytest.mark.parametrize("tokens", [64, 16384])
def test_the_index_of_given_choices(tokens, tile_rows):
    """Both widths of integers that a router may give."""
    for dtype in (torch.int32, torch.int64):
        with aot.compile_only(TARGETS["sm_90"]) as kernels:
            OPS["moe_index"].launch(meta(dtype, tokens, 8), 128, tile_rows)
        assert len(kernels) == (1 if tokens == 64 else 2)
        assert not aot.problems(kernels, TARGETS["sm_90"], max_spill_bytes=aot.spills(0))


def test_tokens_compile_no_variants():
    """Fifty numbers of tokens: a variant for each tile height and no more."""
    hashes = {kernel.hash for tokens in range(17, 65, 3) for kernel in forward("sm_90", BF16, "128", tokens)}
    assert len(hashes) == 4  # two launches, tiles of 32 and of 64 tokens
    hashes = {kernel.hash for tokens in range(66, 1024, 40) for kernel in forward("sm_90", BF16, "128", tokens)}
    assert len(hashes) == 3


@pytest.mark.parametrize("tokens", [1, 100, 2000])
def test_sizes_of_one(tokens):
    """A launcher makes constants of arguments that are 1: one expert, one choice, one column of hidden."""
    for hidden, experts in ((1, 1), (1, 3), (16, 1)):
        x, weight, vector = meta(BF16, tokens, hidden), meta(BF16, experts, hidden), meta(BF16, experts)
        logits, weights, indices = meta(BF16, tokens, experts), meta(BF16, tokens, 1), meta(torch.int32, tokens, 1)
        rule = ("sigmoid", True, 0.0, 2.0)
        spec = RouterSpec(1, scoring="sigmoid", groups=experts, topk_groups=1, renormalise=True, scale=2.0)
        with aot.compile_only(TARGETS["sm_90"]) as kernels:
            OPS["moe_route"].launch(x, weight, vector, vector, *spec.numbers(BF16), 8)
            OPS["moe_route_backward"].launch(weights, logits, x, weight, logits, indices, *rule, True, True, True)
            OPS["moe_index"].launch(indices, experts, 8)
        assert not aot.problems(kernels, TARGETS["sm_90"], max_spill_bytes=aot.spills(8))

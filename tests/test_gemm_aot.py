"""Every shipped config compiled ahead of time for GPUs that are not here: it fits, uses matrix units, and does not spill.

spills_gemm.json holds the spill bytes that are known and tolerated. An entry may shrink or go; a new or larger one is a bug.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import aot
import pytest
import torch
from op_cases import only_config
from torch import Tensor

from fusedblock.kernels import _gemm, norm
from fusedblock.kernels._target import TARGETS
from fusedblock.ops import OPS

SPILLS: dict[str, int] = json.loads((Path(__file__).parent / "spills_gemm.json").read_text())
HALVES = (torch.bfloat16, torch.float16)
# Sizes of an 8B Llama; a row count that is no multiple of anything.
TOKENS, HIDDEN, FFN, HEAD_DIM = 4099, 4096, 14336, 128


def meta(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def qkv_arguments(form: str, dtype: torch.dtype) -> dict[str, Any]:
    """Plain with fp32 tables; "full" with bias and row scale; "norm" and "layer" per head as Qwen3 and Cohere have them; fused
    weights of GPT-NeoX ("heads": q, k, v of each together, a quarter turns) and GPT-2 ("columns", nothing turns)."""
    heads = {"heads": (64, 64, 64), "columns": (32, 32, 32)}.get(form, (32, 8, 8))
    head_dim = 64 if form == "heads" else HEAD_DIM
    per_head = form == "layer"

    def weight(n: int) -> Tensor:
        if form == "heads":
            return meta(dtype, n, 3, head_dim, HIDDEN)[:, 1]
        if form == "columns":
            return meta(dtype, HIDDEN, n * head_dim).t().unflatten(0, (n, head_dim))
        return meta(dtype, n, head_dim, HIDDEN)

    def table() -> Tensor | None:
        if form in ("heads", "norm"):
            return meta(dtype, 1, TOKENS, HEAD_DIM)[..., : 8 if form == "heads" else 64]
        wide = meta(torch.float32, 1, TOKENS, HEAD_DIM)
        return None if form == "columns" else wide[..., ::2] if form == "layer" else wide[..., :64]

    return {
        "x": meta(dtype, 1, TOKENS, HIDDEN), **dict(zip(("q_weight", "k_weight", "v_weight"), map(weight, heads))),
        **{f"{name}_bias": meta(dtype, n, head_dim) if form in ("full", "heads", "columns", "layer") else None
           for name, n in zip("qkv", heads)},
        "cos": table(), "sin": table(), "sumsq": meta(torch.float32, 1, TOKENS, 32) if form == "full" else None,
        **{f"{name}_norm": meta(dtype, n if per_head else 1, head_dim) if form in ("norm", "layer") else None
           for name, n in zip("qk", heads)},
        "interleaved": form == "layer", "norm_kind": "layer" if form == "layer" else "rms", "eps": 1e-5, "weight_offset": 0.0,
        "round_early": form == "norm", "save": True,
    }  # fmt: skip


def launch(form: str, dtype: torch.dtype) -> None:
    """One launch of each form a kernel is used in, with all its optional arguments or none."""
    x, wide, vector = meta(dtype, TOKENS, HIDDEN), meta(dtype, FFN, HIDDEN), meta(dtype, HIDDEN)
    sums = meta(torch.float32, TOKENS, 32)
    if form == "linear":
        OPS["linear"].launch(x, meta(dtype, HIDDEN, HIDDEN), None, x, None, 1.0)
    elif form in ("linear-full", "linear-scaled"):
        OPS["linear"].launch(x, meta(dtype, HIDDEN, HIDDEN), vector, x, vector, 1.0 if form == "linear-full" else 0.5)
    elif form.startswith("linear-wide"):
        w = meta(dtype, HIDDEN, HIDDEN)
        OPS["linear"].launch(x, w.t() if "columns" in form else w, vector, meta(torch.float32, TOKENS, HIDDEN), None, 0.5)
    elif form == "linear-columns":
        OPS["linear"].launch(x, meta(dtype, HIDDEN, HIDDEN).t(), vector, x, None, 1.0)
    elif form.startswith("plain_mlp"):
        w = meta(dtype, HIDDEN, FFN).t() if "columns" in form else wide
        OPS["plain_mlp"].launch(x, w, wide[:, 0], "gelu_tanh" if "tanh" in form else "gelu", "save" in form)
    elif form.startswith("qkv_rope"):
        OPS["qkv_rope"].launch(**qkv_arguments(form.partition("-")[2], dtype))
    elif form == "gated_mlp":
        OPS["gated_mlp"].launch(x, wide, wide, None, None, None, "silu", 1e-5, False)
    elif form == "gated_mlp-save":
        OPS["gated_mlp"].launch(x, wide, wide, None, None, None, "gelu_tanh", 1e-5, True)
    elif form == "gated_mlp-full":
        OPS["gated_mlp"].launch(x, wide, wide, wide[:, 0], wide[:, 0], sums, "gelu", 1e-5, False)
    elif form == "grad_input":
        _gemm.grad_input([x], [meta(dtype, HIDDEN, HIDDEN)], x)
    elif form == "grad_input-columns":
        _gemm.grad_input([x, x, x], [meta(dtype, HIDDEN, HIDDEN).t()] * 3, x)
    elif form == "grad_input-three":
        narrow, kv = meta(dtype, TOKENS, HIDDEN // 4), meta(dtype, HIDDEN // 4, HIDDEN)
        _gemm.grad_input([x, narrow, narrow], [meta(dtype, HIDDEN, HIDDEN), kv, kv], x)
    else:
        _gemm.grad_weight(x, x, meta(dtype, HIDDEN, HIDDEN))


FORMS = {
    "nt": ("linear-full", "qkv_rope", "linear", "qkv_rope-full", "linear-wide", "linear-columns", "linear-wide-columns",
           "plain_mlp-save", "plain_mlp", "plain_mlp-tanh", "plain_mlp-tanh-columns-save",
           "qkv_rope-norm", "qkv_rope-layer", "qkv_rope-heads", "qkv_rope-columns", "linear-scaled"),
    "pair": ("gated_mlp-save", "gated_mlp-full", "gated_mlp"),
    "nn": ("grad_input-three", "grad_input", "grad_input-columns"),
    "tn": ("grad_weight",),
}


HEAVY = ("qkv_rope-layer", "qkv_rope-columns", "gated_mlp-full")
QUICK = ("qkv_rope", "qkv_rope-norm", "linear-columns", "plain_mlp-save", "grad_input-columns")


def configs(name: str, itemsize: int) -> dict[str, list[_gemm.Config]]:
    """Of each kind, as the table has them and in the pointer form that descriptors fall back to."""
    return {
        kind: list(dict.fromkeys(form for _, c in rows for form in (c, _gemm.usable(c, torch.empty(0)))))
        for kind, rows in _gemm.tables(itemsize, TARGETS[name]).items()
    }


def key(name: str, dtype: torch.dtype, form: str, c: _gemm.Config) -> str:
    tile = f"{c.block_m}x{c.block_n}x{c.block_k} w{c.num_warps} s{c.num_stages}"
    return f"{name} {str(dtype).removeprefix('torch.')} {form} {tile} {'descriptors' if c.tma else 'pointers'}"


def rows(quick: bool) -> list[Any]:
    """bf16 in every form on the two targets that must not spill, a few on the others. fp16 differs in its types alone: one
    form of a kind; fp32 a few. Quick: a few in bf16 on sm_90."""
    found = []
    for name in ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942"):
        for dtype in (*HALVES, torch.float32):
            for kind, shipped in configs(name, dtype.itemsize).items():
                for i, form in enumerate(FORMS[kind]):
                    few = i == 0 or form in QUICK and dtype is not torch.float16
                    wanted = few or dtype is torch.bfloat16 and (name in ("sm_80", "sm_90") or form in HEAVY)
                    is_quick = name == "sm_90" and dtype is torch.bfloat16 and few
                    if is_quick == quick and wanted:
                        found += [pytest.param(name, dtype, form, c, id=key(name, dtype, form, c)) for c in shipped]
    return found


def compiled(name: str, dtype: torch.dtype, form: str, config: _gemm.Config) -> list[Any]:
    with only_config(config), aot.compile_only(TARGETS[name]) as kernels:
        launch(form, dtype)
    assert len(kernels) == 1
    return kernels


def check(name: str, dtype: torch.dtype, form: str, config: _gemm.Config) -> None:
    kernels = compiled(name, dtype, form, config)
    tolerated = SPILLS.get(key(name, dtype, form, config), 0)
    assert tolerated == 0 or name not in ("sm_80", "sm_90") or dtype is torch.float32
    found = aot.problems(kernels, TARGETS[name], wgmma=config.block_m >= 64, max_spill_bytes=tolerated)
    assert not found
    assert aot.has_narrow_dot(kernels[0]) == (dtype in HALVES)
    if TARGETS[name].backend == "cuda":
        assert (".tensormap" in kernels[0].asm["ptx"] or "cp.async.bulk.tensor" in kernels[0].asm["ptx"]) == config.tma


@pytest.mark.parametrize(("name", "dtype", "form", "config"), rows(quick=True))
def test_chosen_targets(name, dtype, form, config):
    check(name, dtype, form, config)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "form", "config"), rows(quick=False))
def test_every_target_form_and_dtype(name, dtype, form, config):
    check(name, dtype, form, config)


def test_tolerated_spills_are_of_shipped_configs():
    """An entry whose config has gone must go too."""
    existing = {p.id for quick in (True, False) for p in rows(quick)}
    existing |= {norm_key(name, "layer-autocast", hidden) for name in NORM_TARGETS for hidden in NORM_SIZES}
    assert {*SPILLS} <= existing
    assert all(bytes_ > 0 for bytes_ in SPILLS.values())


NORM_TARGETS = ("sm_80", "sm_90")
NORM_SIZES = (64, 1000, 4096, 8192, 16384)


def norm_key(name: str, form: str, hidden: int) -> str:
    return f"{name} norm {form} {hidden} _long_backward_kernel"


# Rows of up to 16384 (Llama-3.1-405B's) stay in registers, but not those of fp32, 64 KB, beside their two sums.
@pytest.mark.parametrize("form", ["rms", "rms-residual", "layer", "layer-full", "layer-autocast"])
@pytest.mark.parametrize("hidden", [pytest.param(n, marks=pytest.mark.slow if n == 8192 else ()) for n in NORM_SIZES])
@pytest.mark.parametrize("name", NORM_TARGETS)
def test_norm(name, hidden, form):
    forward, backward, sums = norm_kernels(name, hidden, form)
    assert aot.problems([forward, sums], TARGETS[name]) == []
    assert aot.problems([backward], TARGETS[name], max_spill_bytes=SPILLS.get(norm_key(name, form, hidden), 0)) == []


def norm_kernels(name: str, hidden: int, form: str) -> list[Any]:
    kind, _, rest = form.partition("-")
    half, accurate = meta(torch.bfloat16, TOKENS, hidden), meta(torch.float32, TOKENS, hidden)
    x = accurate if rest == "autocast" else half
    bias = x[0] if rest == "full" or rest == "autocast" else None
    residual = half if rest in ("full", "residual") else None
    mean, rstd = meta(torch.float64, TOKENS) if kind == "layer" else None, meta(torch.float32, TOKENS)
    with aot.compile_only(TARGETS[name]) as kernels:
        norm.launch(x, x[0], bias, residual, kind, 1e-5, 0.0, True, True, torch.bfloat16)
        norm.backward_launch(half, x, x[0], mean, rstd, kind, 0.0, True, True, bias is not None)
    return kernels


@pytest.mark.slow
@pytest.mark.parametrize("form", ["rms", "layer-full"])
@pytest.mark.parametrize("hidden", [384, 4096, norm.MAX_HIDDEN])
@pytest.mark.parametrize("name", ["sm_86", "sm_100", "gfx942"])
def test_norm_compiles_everywhere(name, hidden, form):
    """Larger rows may spill, but they run: shared memory fits."""
    kernels = norm_kernels(name, hidden, form)
    assert aot.problems(kernels, TARGETS[name], max_spill_bytes=0 if hidden < norm.MAX_HIDDEN else 1 << 20) == []


@pytest.mark.parametrize("name", ["sm_80", "sm_90"])
def test_the_other_kernels(name):
    """Elementwise and column sums: no dot, no spill."""
    x, w = meta(torch.bfloat16, TOKENS, 4096), meta(torch.bfloat16, 8192, 4096)
    with aot.compile_only(TARGETS[name]) as kernels:
        for activation in ("silu", "gelu", "gelu_tanh"):
            g = meta(torch.bfloat16, TOKENS, 8192)
            OPS["gated_mlp_backward"].launch(g, x, w, w, g, g, activation, False, False, False, True, False)
        for form in ("", "norm", "layer", "heads"):
            given = qkv_arguments(form, torch.bfloat16)
            states = [meta(torch.bfloat16, 1, TOKENS, *given[f"{n}_weight"].shape[:2]) for n in "qkv"]
            known = {**given, **{f"grad_{n}": t for n, t in zip("qkv", states)}}
            known |= {f"{n}_pre": t if form in ("norm", "layer") else None for n, t in zip("qk", states)}
            known |= {f"need_{n}": n == "q_bias" or n.endswith("norm") and t is not None for n, t in given.items()}
            backward = OPS["qkv_rope"].backward.launch
            backward(*[known[n] for n in inspect.signature(backward).parameters])
    assert sorted({k.name for k in kernels}) == ["_act_backward_kernel", "_turn_kernel", "sum_rows_kernel"]
    assert aot.problems(kernels, TARGETS[name]) == []
    assert not any(map(aot.has_narrow_dot, kernels))


def test_config_knows_its_shared_memory():
    """The estimate a table row was chosen by is not below what the compiler takes, but for its few barriers."""
    for config in configs("sm_90", 2)["nt"]:
        used = aot.resources(compiled("sm_90", torch.bfloat16, "linear", config)[0]).shared_bytes
        assert used <= config.smem_bytes(2) + 256

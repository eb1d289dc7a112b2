"""What the compiler makes of the portable attention kernels for each GPU, without one: spills, matrix instructions, memory.

Where spills are allowed their bytes are in spills_attention.json and may only shrink; `python tests/test_attention_aot.py`
measures them again.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import aot
import pytest
import torch

from fusedblock import ops
from fusedblock.kernels import attention, attention_backward
from fusedblock.kernels._target import TARGETS

TABLE = Path(__file__).with_name("spills_attention.json")
MASKS = ("none", "padding", "padding-added", "bool", "added")
GATED = ("sm_80", "sm_90")  # head_dim <= 128 in 16 bits: no spill at all
RECORDED = ("sm_86", "sm_100", "gfx942")


def inputs(head_dim: int, dtype: torch.dtype, mask: str) -> tuple:
    batch, seq, heads, kv_heads = 2, 4096, 32, 8

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    masks = {
        "none": None,
        "padding": empty(batch, 1, 1, seq, dtype=torch.bool),
        "padding-added": empty(batch, 1, 1, seq, dtype=torch.float32),
        "bool": empty(batch, 1, seq, seq, dtype=torch.bool),
        "added": empty(batch, 1, seq, seq),
    }
    q, k = empty(batch, seq, heads, head_dim), empty(batch, seq, kv_heads, head_dim)
    return q, k, k, masks[mask], empty(batch, heads, seq, dtype=torch.float32)


def compiled(target: str, head_dim: int, dtype: torch.dtype, mask: str, causal: bool) -> list:
    q, k, v, m, lse = inputs(head_dim, dtype, mask)
    args = dict(zip(attention.NAMES, ops.attention_args(q, k, v, mask=m, right=0 if causal else -1, scale=head_dim**-0.5)))
    needs = {f"need_{name}": True for name in "qkv"}
    given = {**args, "grad_out": q, "out": q, "lse": lse, **needs}
    with aot.compile_only(replace(TARGETS[target], skeleton="portable")) as kernels:
        attention.launch(*args.values())
        attention_backward.launch(*(given.get(name, False) for name in attention_backward.NAMES))
    return kernels


def key(target: str, head_dim: int, dtype: torch.dtype, mask: str, causal: bool, kernel: str) -> str:
    return f"{target} {head_dim} {str(dtype)[6:]} {mask} {'causal' if causal else 'full'} {kernel}"


def gated(target: str, head_dim: int, dtype: torch.dtype) -> bool:
    return target in GATED and head_dim <= 128 and dtype.itemsize == 2


def check(target: str, head_dim: int, dtype: torch.dtype, mask: str, causal: bool) -> None:
    case = target, head_dim, dtype, mask, causal
    kernels = compiled(*case)
    assert [k.name for k in kernels] == ["_forward_kernel", "_delta_kernel", "_kv_kernel", "_q_kernel"]
    allowed = {} if gated(*case[:3]) else json.loads(TABLE.read_text())
    for kernel in kernels:
        limit = aot.spills(allowed.get(key(*case, kernel.name), 0))
        assert aot.problems([kernel], TARGETS[target], wgmma=True, max_spill_bytes=limit) == []
    if TARGETS[target].tma and dtype.itemsize == 2:
        assert all("cp.async.bulk.tensor" in k.asm["ptx"] for k in kernels if k.name != "_delta_kernel")


_slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("mask, causal", [_slow("none", False), ("none", True), _slow("padding", True), ("added", True)])
@pytest.mark.parametrize("head_dim", [_slow(64), 128])
@pytest.mark.parametrize("target", GATED)
def test_no_spills(target: str, head_dim: int, mask: str, causal: bool):
    check(target, head_dim, torch.bfloat16, mask, causal)


GATED_CASES = [  # fp16 differs from bf16 in its types alone: at the width with the most registers
    *itertools.product(GATED, (64, 128), (torch.bfloat16,), MASKS, (True,)),
    *itertools.product(GATED, (128,), (torch.bfloat16,), MASKS[1:], (False,)),
    *itertools.product(GATED, (16, 96), (torch.bfloat16,), MASKS, (True,)),
    *itertools.product(GATED, (128,), (torch.float16,), ("padding", "added"), (True,)),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", GATED_CASES, ids=lambda c: key(*c, ""))
def test_no_spills_in_any_mask_mode(case: tuple):
    check(*case)


RECORDED_CASES = [
    *itertools.product(RECORDED, (64, 128), (torch.bfloat16,), ("none", "padding", "added"), (True,)),
    *itertools.product((*GATED, *RECORDED), (256,), (torch.bfloat16,), ("none", "added"), (True,)),
    *itertools.product((*GATED, *RECORDED), (64,), (torch.float32,), ("none",), (True,)),
    *itertools.product(GATED, (256,), (torch.float32,), ("none",), (True,)),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", RECORDED_CASES, ids=lambda c: key(*c, ""))
def test_recorded_spills_only_shrink(case: tuple):
    check(*case)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_bias_of_every_query_and_key(head_dim: int, causal: bool):
    """On sm_90: no spill, tiles by TMA where there are stages, and logits that stay in the layout of the products."""
    q, k, v, _, _ = inputs(head_dim, torch.bfloat16, "none")
    q, k, v = (t[:, :2048] for t in (q, k, v))
    bias, lse = torch.empty(1, 32, 2048, 2048, dtype=q.dtype, device="meta"), torch.empty(2, 32, 2048, device="meta")
    args = dict(zip(attention.NAMES, ops.attention_args(q, k, v, bias=bias, right=0 if causal else -1, scale=head_dim**-0.5)))
    given = {**args, "grad_out": q, "out": q, "lse": lse, **{f"need_{name}": True for name in ("q", "k", "v", "bias")}}
    with aot.compile_only(TARGETS["sm_90"]) as kernels:
        attention.launch(*args.values())
        attention_backward.launch(*(given.get(name, False) for name in attention_backward.NAMES))
    by_name = {k.name: k for k in kernels}
    assert list(by_name) == ["_forward_kernel", "_delta_kernel", "_kv_kernel", "_q_kernel", "_sum_kernel"]
    assert aot.problems(kernels, TARGETS["sm_90"], wgmma=True, max_spill_bytes=aot.spills(0)) == []
    for name in ("_kv_kernel", "_q_kernel"):
        assert re.search(r"%bias: !tt.tensordesc", by_name[name].asm["ttir"]), name
    if aot.spills(0) == 0:  # which layout wins is the compiler's choice, known for triton 3.6
        assert not re.search(r"convert_layout .*tensor<64x64xf32", by_name["_forward_kernel"].asm["ttgir"])


@pytest.mark.parametrize("target", TARGETS)
def test_unaligned_rows_take_the_pointer_path(target: str):
    q, k, v, _, _ = inputs(64, torch.bfloat16, "none")
    odd = torch.empty(*q.shape[:3], 68, dtype=q.dtype, device="meta")[..., :64]
    with aot.compile_only(TARGETS[target]) as (kernels):
        attention.launch(*ops.attention_args(odd, k, v, right=0, scale=0.125))
    assert "cp.async.bulk.tensor" not in kernels[0].asm.get("ptx", "")
    assert aot.problems(kernels, TARGETS[target], max_spill_bytes=1 << 30) == []


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("head_dim", range(16, 257, 8))
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_shape_has_a_config(target, head_dim: int, itemsize: int):
    for masked in (False, True):
        assert attention.configure(head_dim, itemsize, masked, target) in attention.CONFIGS
    for level in attention_backward.LEVELS:
        assert attention_backward.configure(head_dim, itemsize, level, target) in attention_backward.CONFIGS


if __name__ == "__main__":
    spills = {}
    for case in RECORDED_CASES:
        for kernel in compiled(*case):
            used = aot.resources(kernel)
            print(key(*case, used.name), used, flush=True)
            if used.spill_bytes:
                spills[key(*case, used.name)] = used.spill_bytes
    TABLE.write_text(json.dumps(spills, indent=0, sort_keys=True) + "\n")

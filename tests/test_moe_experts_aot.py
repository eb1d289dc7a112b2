"""The experts' kernels compiled ahead of time for GPUs that are not here: they fit, use matrix units, and do not spill."""

from __future__ import annotations

import inspect
import re
from typing import Any

import aot
import pytest
import torch
from torch import Tensor

from fusedblock.kernels import _moe
from fusedblock.kernels._target import TARGETS
from fusedblock.ops import OPS

BF16 = torch.bfloat16
# experts, top_k, hidden, ffn of Qwen3-30B-A3B, Mixtral-8x7B and gpt-oss-20b; the last transposed, interleaved and with biases.
SIZES = {"qwen3": (128, 8, 2048, 768), "mixtral": (8, 2, 4096, 14336), "gpt_oss": (32, 4, 2880, 2880)}
GATHERED = ("_gate_up_kernel", "_gate_up_hopper_kernel", "_grad_hidden_kernel")


def arguments(model: str, tokens: int, tile_rows: int, dtype: torch.dtype, save: bool = True) -> dict[str, Any]:
    experts, top_k, hidden, ffn = SIZES[model]
    odd, rows = model == "gpt_oss", tokens * top_k

    def meta(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    def index(*shape: int) -> Tensor:
        return meta(*shape, of=torch.int32)

    up, down = ((hidden, 2 * ffn), (ffn, hidden)) if odd else ((2 * ffn, hidden), (hidden, ffn))
    return {
        "x": meta(tokens, hidden), "gate_up_weight": meta(experts, *up), "down_weight": meta(experts, *down),
        "gate_up_bias": meta(experts, 2 * ffn) if odd else None, "down_bias": meta(experts, hidden) if odd else None,
        "weights": meta(tokens, top_k, of=torch.float32 if model == "mixtral" else dtype), "indices": index(tokens, top_k),
        "order": index(rows), "inverse": index(tokens, top_k), "offsets": index(experts + 1),
        "tiles": index(_moe.max_tiles(rows, experts, tile_rows), 4), "activation": _moe.CLAMPED if odd else "silu",
        "alpha": 1.702, "limit": 7.0, "transposed": odd, "interleaved": odd, "tile_rows": tile_rows, "save": save,
        "residual": meta(tokens, hidden),
    }  # fmt: skip


def compiled(name: str, model: str, tokens: int, tile_rows: int, dtype: torch.dtype = BF16, save: bool = True) -> list[Any]:
    """A forward and a backward with every gradient."""
    args = arguments(model, tokens, tile_rows, dtype, save)
    known = {**args, "grad_out": args["x"], **{f"need_{n}": t is not None for n, t in args.items()}}
    with aot.compile_only(TARGETS[name]) as kernels:
        _, gate_up = OPS["moe_experts"].launch(**args)
        backward = OPS["moe_experts_backward"].launch
        known["gate_up"] = gate_up if save else None
        backward(*[known[n] for n in inspect.signature(backward).parameters])
    return kernels


def check(kernels: list[Any], name: str, tile_rows: int, dtype: torch.dtype) -> None:
    for kernel in kernels:
        assert aot.problems([kernel], TARGETS[name], wgmma=True, max_spill_bytes=aot.spills(0)) == []
        products = re.search("_gate_up_(hopper_)?kernel|_rows|_grad_hidden|_grad_weight_kernel", kernel.name) is not None
        assert aot.has_narrow_dot(kernel) == (products and dtype is BF16)


QUICK = [("sm_90", "qwen3", 4099, 128), ("sm_90", "gpt_oss", 515, 64), ("sm_90", "qwen3", 37, 16), ("sm_90", "qwen3", 1, 16)]
HEIGHTS = ((4099, 128), (1027, 64), (515, 32), (515, 16), (64, 64), (64, 32), (37, 16), (1, 16))
NAMES = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")
# Mixtral's, beside Qwen3's of other sizes and with the choices' weights in fp32, for the measured target alone.
ALL = [(name, model, *height) for name in NAMES for model in SIZES for height in HEIGHTS if model != "mixtral" or name == "sm_90"]


@pytest.mark.parametrize(("name", "model", "tokens", "tile_rows"), QUICK)
def test_chosen_target(name: str, model: str, tokens: int, tile_rows: int) -> None:
    check(compiled(name, model, tokens, tile_rows), name, tile_rows, BF16)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model", "tokens", "tile_rows"), [row for row in ALL if row not in QUICK])
def test_every_target_and_height(name: str, model: str, tokens: int, tile_rows: int) -> None:
    check(compiled(name, model, tokens, tile_rows), name, tile_rows, BF16)
    if name == "sm_90":
        check(compiled(name, model, tokens, tile_rows, save=False), name, tile_rows, BF16)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm_90", "sm_86", "gfx942"])
def test_fp32_fits_everywhere(name: str) -> None:
    for tokens, rows in ((515, 64), (515, 16), (37, 16), (1, 16)):
        kernels = compiled(name, "gpt_oss", tokens, rows, torch.float32)
        assert aot.problems(kernels, TARGETS[name], max_spill_bytes=512) == []


@pytest.mark.parametrize("sizes", [(12, 4, 136, 72), (5, 2, 68, 36), (9, 3, 200, 2056)])
def test_sizes_that_16_does_not_divide_fit(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """They spill: what is elsewhere copied to shared memory goes through registers. Its place there must suffice all the same."""
    monkeypatch.setitem(SIZES, "odd", sizes)
    for tokens, rows in ((1100, 128), (130, 64), (45, 16), (1, 16)):
        assert aot.problems(compiled("sm_90", "odd", tokens, rows), TARGETS["sm_90"], max_spill_bytes=2**16) == []


@pytest.mark.parametrize(("tokens", "rows"), [(4099, 128), (1027, 64), (37, 16)])
def test_gathered_rows_are_prefetched(tokens: int, rows: int) -> None:
    """Rows that an index names come by cp.async into a ring as deep as the weights': a plain load would wait for memory."""
    kernels = {k.name: k for k in compiled("sm_90", "qwen3", tokens, rows)}
    found = [k for n, k in kernels.items() if n in GATHERED]
    assert len(found) == 2
    for kernel in found:
        ring = kernel.asm["ttgir"]
        assert "ttg.async_copy_global_to_local" in ring
        # What is left of plain loads in the loop is no operand: nothing of two axes and 16 bits goes through registers to a dot.
        assert not re.search(r"ttg\.local_alloc %\w+ : \(tensor<\d+x\d+xbf16", ring)

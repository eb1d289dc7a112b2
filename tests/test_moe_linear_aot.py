"""Linear layers chosen by token, compiled ahead of time for GPUs that are not here: they fit, use matrix units, do not spill."""

from __future__ import annotations

import inspect
from typing import Any

import aot
import pytest
import torch
from torch import Tensor

from fusedblock.kernels import _moe
from fusedblock.kernels._target import TARGETS
from fusedblock.ops import OPS

# experts, top_k, hidden, kv_heads, head_dim: JetMoe-8B's, and a layer whose heads are no power of two.
JETMOE, ODD = (8, 2, 2048, 16, 128), (32, 4, 1536, 8, 80)


def compiled(name: str, sizes: tuple[int, ...], tokens: int, tile_rows: int, sums: bool,
             dtype: torch.dtype = torch.bfloat16) -> list[Any]:  # fmt: skip
    """A forward and a backward with every gradient."""
    experts, top_k, hidden, heads, head_dim = sizes
    n, k = (hidden, heads * head_dim) if sums else (heads * head_dim, hidden)
    rows, transposed = tokens * top_k, sizes is ODD

    def meta(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    index = {"indices": (tokens, top_k), "order": (rows,), "inverse": (tokens, top_k), "offsets": (experts + 1,),
             "tiles": (_moe.max_tiles(rows, experts, tile_rows), 4)}  # fmt: skip
    args = {
        "x": meta(tokens, k * (top_k if sums else 1)), "weight": meta(experts, *((k, n) if transposed else (n, k))),
        "bias": meta(experts, n), "weights": meta(tokens, top_k) if sums else None, "out_bias": meta(n) if sums else None,
        "residual": meta(tokens, n) if sums else None, **{name: meta(*shape, of=torch.int32) for name, shape in index.items()},
        "transposed": transposed, "heads": heads, "tile_rows": tile_rows,
    }  # fmt: skip
    with aot.compile_only(TARGETS[name]) as kernels:
        (out,) = OPS["moe_linear"].launch(**args)
        known = {**args, "grad_out": out, **{f"need_{n}": t is not None for n, t in args.items()}}
        backward = OPS["moe_linear_backward"].launch
        backward(*[known[n] for n in inspect.signature(backward).parameters])
    return kernels


def check(kernels: list[Any], name: str) -> None:
    for kernel in kernels:
        assert aot.problems([kernel], TARGETS[name], wgmma=True, max_spill_bytes=aot.spills(0)) == []
        products = ("_rows_kernel", "_grad_hidden_kernel", "_grad_weight_kernel")
        assert aot.has_narrow_dot(kernel) == (kernel.name in products)


@pytest.mark.parametrize("sums", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_chosen_target(sums: bool) -> None:
    """And rows that an index names come by cp.async, whatever heads they have: a plain load would wait for memory."""
    kernels = compiled("sm_90", JETMOE, 4099, 128, sums)
    check(kernels, "sm_90")
    gathered = [k for k in kernels if k.name in ("_rows_kernel", "_grad_hidden_kernel", "_grad_weight_kernel")]
    assert len(gathered) == 3
    assert all("ttg.async_copy_global_to_local" in k.asm["ttgir"] for k in gathered)


HEIGHTS = ((1027, 64), (515, 32), (37, 16))
ALL = [("sm_90", JETMOE, *height) for height in HEIGHTS] + [("sm_90", ODD, 4099, 128)]
ALL += [(name, JETMOE, 4099, 128) for name in ("sm_80", "sm_86", "sm_100", "gfx942")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes", "tokens", "tile_rows"), ALL)
def test_every_target_and_height(name: str, sizes: tuple[int, ...], tokens: int, tile_rows: int) -> None:
    for sums in (False, True):
        check(compiled(name, sizes, tokens, tile_rows, sums), name)


@pytest.mark.slow
def test_fp32_fits() -> None:
    kernels = compiled("sm_90", JETMOE, 515, 64, True, torch.float32)
    assert aot.problems(kernels, TARGETS["sm_90"], max_spill_bytes=512) == []

"""How many variants of each kernel random batches and lengths compile. A phase may use several tile configs of a kernel, chosen
by its number of rows or sequences; within one of them there are at most two variants."""

from __future__ import annotations

import inspect
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusedblock import ops
from fusedblock.blocks import BlockSpec, BlockWeights
from fusedblock.blocks import functional as core
from fusedblock.kernels._moe import choose_tile_rows, max_tiles
from fusedblock.kernels._target import TARGETS

from .variants import counted

SPEC = BlockSpec(hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, scale=128**-0.5, eps=1e-5)  # Llama-3.1-8B
TARGET_NAMES = ["sm_90", "sm_80"]


def _pairs() -> list[tuple[int, int]]:
    rng = random.Random(0)
    return [(rng.randint(1, 16), rng.randint(2, 4096)) for _ in range(50)]


def _empty(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def _weights() -> BlockWeights:
    s = SPEC
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    return BlockWeights(
        q=_empty(q, s.hidden), k=_empty(kv, s.hidden), v=_empty(kv, s.hidden), o=_empty(s.hidden, q),
        gate=_empty(s.ffn, s.hidden), up=_empty(s.ffn, s.hidden), down=_empty(s.hidden, s.ffn),
        attn_norm=_empty(s.hidden), mlp_norm=_empty(s.hidden),
    )  # fmt: skip


def _table(seq: int) -> Tensor:
    return _empty(1, seq, SPEC.head_dim)


def _prefill(w: BlockWeights, batch: int, seq: int) -> None:
    core._compose_block(ops.direct, SPEC, w, _empty(batch, seq, SPEC.hidden), _table(seq), _table(seq), None, -1, 0, None, None)


def _decode(w: BlockWeights, batch: int, context: int) -> None:
    x = _empty(batch, 1, SPEC.hidden)
    q, *_, rows = core._front(ops.direct, SPEC, w, x, _table(1), _table(1), False)
    cache = _empty(batch, SPEC.kv_heads, context, SPEC.head_dim).transpose(1, 2)
    mask = torch.empty(batch, 1, 1, context, dtype=torch.bool, device="meta")
    core._compose_back(ops.direct, SPEC, w, x, rows, q, cache, cache, mask, -1, -1, None, None)


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_prefill(target: str) -> None:
    w = _weights()
    with counted(TARGETS[target]) as found:
        for batch, seq in _pairs():
            _prefill(w, batch, seq)
    assert {name.split(".")[-2] for name in found} >= {"norm", "qkv_rope", "attention", "linear", "gated_mlp"}
    for name, tiles in found.items():
        assert max(map(len, tiles.values())) <= 2, name
        assert len(tiles) <= 6, name  # the rows of a config table


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_decode(target: str) -> None:
    w = _weights()
    with counted(TARGETS[target]) as found:
        for batch, context in _pairs():
            _decode(w, batch, context)
    assert {name.split(".")[-2] for name in found} == {"norm", "qkv_rope", "decode_attention", "linear", "gated_mlp"}
    for name, tiles in found.items():
        assert max(map(len, tiles.values())) <= 2, name
        assert len(tiles) <= 2, name  # more sequences than SMs, or fewer


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_experts(target: str) -> None:
    """Forward and backward: a product that both have, of two shapes, is two variants."""
    experts, top_k, hidden, ffn = 128, 8, 2048, 768  # Qwen3-30B-A3B

    def index(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    with counted(TARGETS[target]) as found:
        for tokens in (1, *(batch * (seq if seq > 2048 else 1) for batch, seq in _pairs())):
            rows = tokens * top_k
            height = choose_tile_rows(tokens, top_k, experts, 2, TARGETS[target])
            known = {
                "x": _empty(tokens, hidden), "gate_up_weight": _empty(experts, 2 * ffn, hidden),
                "down_weight": _empty(experts, hidden, ffn), "gate_up_bias": None, "down_bias": None,
                "weights": _empty(tokens, top_k), "indices": index(tokens, top_k), "order": index(rows),
                "inverse": index(tokens, top_k), "offsets": index(experts + 1),
                "tiles": index(max_tiles(rows, experts, height), 4), "activation": "silu", "alpha": 0.0, "limit": 0.0,
                "transposed": False, "interleaved": False, "tile_rows": height, "save": True,
                "residual": None,
            }  # fmt: skip
            _, known["gate_up"] = ops.direct("moe_experts", *known.values())
            known |= {"grad_out": known["x"], **{f"need_{n}": known[n] is not None for n in known}}
            backward = ops.OPS["moe_experts_backward"].launch
            ops.direct("moe_experts_backward", *[known[n] for n in inspect.signature(backward).parameters])
    assert len(found) == (10 if target == "sm_90" else 8)  # two for tiles of 128 rows
    for name, tiles in found.items():
        assert max(map(len, tiles.values())) <= 2, name
        assert len(tiles) <= 8, name  # four heights, each of two products


def test_the_count_sees_what_triton_specialises_on() -> None:
    """The lengths of attention, whose kernel triton compiles anew for multiples of 16."""
    w = _weights()
    with counted(replace(TARGETS["sm_90"], skeleton="portable")) as found:
        for seq in (1008, 1024):
            _prefill(w, 1, seq)
        (one,) = found["fusedblock.kernels.attention._forward_kernel"].values()
        assert len(one) == 1
        _prefill(w, 1, 1009)
        (two,) = found["fusedblock.kernels.attention._forward_kernel"].values()
        assert len(two) == 2

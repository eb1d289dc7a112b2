"""The one launch that fills slots of a cache, beside what transformers' StaticCache does."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, StaticCache

from fusedblock.interpret import interpret
from fusedblock.kernels import _replay, static_cache
from fusedblock.kernels._target import TARGETS

SLOTS = 12


def _cache(batch: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> StaticCache:
    config = LlamaConfig(hidden_size=kv_heads * head_dim, num_attention_heads=kv_heads, num_key_value_heads=kv_heads,
                         num_hidden_layers=1)  # fmt: skip
    cache = StaticCache(config=config, max_cache_len=SLOTS)
    generator = torch.Generator().manual_seed(1)
    cache.update(*[torch.randn(batch, kv_heads, 3, head_dim, generator=generator).to(dtype) for _ in range(2)], 0)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("batch", "seq", "kv_heads", "head_dim"), [(1, 1, 2, 16), (3, 1, 5, 24), (2, 4, 3, 16)])
def test_slots_are_those_of_transformers(batch: int, seq: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    want, got = (_cache(batch, kv_heads, head_dim, dtype) for _ in range(2))
    layer = got.layers[0]
    with interpret(TARGETS["sm_90"]):
        for step in range(2):
            # Views of one result, as parts of a fused projection would be.
            both = torch.randn(batch, seq, 2 * kv_heads, head_dim, generator=torch.Generator().manual_seed(step)).to(dtype)
            k, v = both.split(kv_heads, dim=2)
            want.update(k.transpose(1, 2), v.transpose(1, 2), 0)
            static_cache.store(k, v, layer.keys, layer.values, layer.cumulative_length)
            assert torch.equal(layer.keys, want.layers[0].keys)
            assert torch.equal(layer.values, want.layers[0].values)
            assert layer.cumulative_length.item() == want.layers[0].cumulative_length.item() == 3 + (step + 1) * seq


@pytest.mark.parametrize("seq", [2, 3, 20])
def test_a_full_cache_is_seen_in_the_result(seq: int) -> None:
    """Nothing past the end is written; the last value slot is NaN, where torch's index_copy_ would raise."""
    cache = _cache(2, 2, 16, torch.float32)
    layer = cache.layers[0]
    layer.cumulative_length.fill_(SLOTS - 1)
    keys, values = layer.keys.clone(), layer.values.clone()
    k, v = torch.randn(2, seq, 2, 16), torch.randn(2, seq, 2, 16)
    with interpret(TARGETS["sm_90"]):
        static_cache.store(k, v, layer.keys, layer.values, layer.cumulative_length)
    keys[:, :, -1] = k[:, 0]
    assert torch.equal(layer.keys, keys)
    assert torch.equal(layer.values[:, :, :-1], values[:, :, :-1]) and layer.values[:, :, -1].isnan().all()
    assert layer.cumulative_length.item() == SLOTS - 1 + seq


def test_a_replay_fills_the_cache_it_is_given() -> None:
    caches = [_cache(2, 2, 16, torch.float32).layers[0] for _ in range(2)]
    new = [torch.randn(2, 1, 2, 16) for _ in range(4)]

    def run(i: int) -> torch.Tensor:
        k, v = new[2 * i : 2 * i + 2]
        static_cache.store(k, v, caches[i].keys, caches[i].values, caches[i].cumulative_length)
        return torch.empty(1)

    def inputs(i: int) -> list[torch.Tensor]:
        return [*new[2 * i : 2 * i + 2], caches[i].keys, caches[i].values, caches[i].cumulative_length]

    with interpret(TARGETS["sm_90"]):
        _, program = _replay.record(lambda: run(0), inputs(0))
        assert program is not None
        assert program.run(inputs(1)) is not None
    for i, layer in enumerate(caches):
        assert layer.cumulative_length.item() == 4
        assert torch.equal(layer.keys[:, :, 3], new[2 * i][:, 0])
        assert torch.equal(layer.values[:, :, 3], new[2 * i + 1][:, 0])

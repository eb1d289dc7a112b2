"""A decode step that fills a static cache itself gives what the cache's own update between two compositions gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, StaticCache

from fusedblock import ops
from fusedblock.blocks import functional as core
from fusedblock.interpret import interpret
from fusedblock.kernels import _replay
from fusedblock.kernels._target import TARGETS

from .test_replay import SPEC, _tensors


@pytest.mark.parametrize(("masked", "mixture"), [(False, False), (True, False), (True, True)])
def test_slots_are_filled_and_attended(masked: bool, mixture: bool) -> None:
    """mixture: up to the rows that experts would read."""
    spec = replace(SPEC, mlp="mixture", experts=8, top_k=2) if mixture else SPEC
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
    caches = [StaticCache(config=config, max_cache_len=40) for _ in range(3)]
    past = [torch.randn(2, 2, 30, 16).bfloat16() for _ in range(2)]
    for cache in caches:
        cache.update(*past, 0)
    mask = (torch.arange(40) < 31).expand(2, 1, 1, 40) if masked else None
    w, _ = _tensors(0, True)
    x, cos, sin = torch.randn(2, 1, 64).bfloat16(), torch.randn(1, 1, 16).bfloat16(), torch.randn(1, 1, 16).bfloat16()

    def slots(i: int) -> list[torch.Tensor]:
        layer = caches[i].layers[0]
        return [layer.keys, layer.values, layer.cumulative_length]

    def compose(i: int) -> torch.Tensor:
        return core._compose_slots(ops.direct, spec, w, x, cos, sin, mask, *slots(i))

    def inputs(i: int) -> list[torch.Tensor]:
        return [x, cos, sin, *([mask] if masked else []), *slots(i), *[t for t in w if t is not None]]

    with interpret(TARGETS["sm_90"]), torch.no_grad():
        q, k, v = core._compose_front(ops.direct, spec, w, x, cos, sin)
        keys, values = (t.transpose(1, 2) for t in caches[0].update(k.transpose(1, 2), v.transpose(1, 2), 0))
        scope = ops.normalise_mask(mask, q, keys), -1, -1, None, None
        want = core._compose_back(ops.direct, spec, w, x, None, q, keys, values, *scope)
        got, program = _replay.record(lambda: compose(1), inputs(1))
        want, got = (t if mixture else (t,) for t in (want, got))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert program is not None and len(program.steps) == (6 if mixture else 7)  # keys are not split
        again = program.run(inputs(2))
        assert again is not None and all(torch.equal(a, b) for a, b in zip(again, want, strict=True))
    for i in (1, 2):
        assert all(torch.equal(a, b) for a, b in zip(slots(i), slots(0)))

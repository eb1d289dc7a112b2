"""The Gluon form of attention over short contexts: values on the model of an SM, and what the compiler makes of it."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aot
import mutants
import pytest
import torch
from attention_cases import Case, Inputs, check, exact, limit, results
from attention_cases import error as relative_error
from test_attention_short import BF16, FP16, HOPPER, short
from torch import Tensor

from fusedblock.interpret import interpret
from fusedblock.kernels import attention_short_hopper
from fusedblock.kernels.attention_short_hopper import Config

FEW = replace(HOPPER, sms=3)  # so that a program has several problems
ONE = replace(HOPPER, sms=1)


def run(x: Inputs, target=FEW, seed: int = 0, config: Config | None = None, module: Any = attention_short_hopper):
    c = x.case
    left, right = (-1, -1) if c.window is None else c.window
    assert attention_short_hopper.refusal(x.q, x.k, x.v, HOPPER) == ""
    out = torch.full(x.q.shape, math.nan, dtype=x.q.dtype)
    lse = torch.full((c.batch, c.heads, c.seq), math.nan)
    with interpret(target, seed=seed):
        module.launch(x.q, x.k, x.v, x.options.get("sinks"), left, 0 if c.causal else right, c.head_dim**-0.5, out, lse, config)
    return out, lse


def holds(case: Case, **options: Any) -> None:
    check(case, "cpu", lambda x: run(x, **options))


QUICK = [
    short(256, 256, causal=True, batch=2, heads=4, kv_heads=2),
    short(200, 200, head_dim=128, batch=4, dtype=FP16),
    short(128, 128, causal=True, batch=7, heads=1),
    short(40, 70, causal=True, batch=5, heads=6, sinks=True),
    short(90, 20, causal=True, batch=2),
    short(100, 150, window=(10, 30), sinks=True, dtype=FP16),
    short(250, 250, window=(100, 0), head_dim=128),
    short(300, 77, batch=4),
    short(1, 1, causal=True, batch=9),
]
CASES = [
    *(short(n, n, causal=causal, head_dim=d, heads=h, kv_heads=kv, batch=3, sinks=sinks)
      for n in (1, 17, 64, 65, 100, 128, 200, 256) for causal in (False, True)
      for d, h, kv, sinks in ((64, 3, 3, False), (128, 4, 1, True), (64, 8, 1, False))),
    *(short(s, t, causal=causal, batch=3) for s, t in ((17, 200), (200, 17), (256, 129), (129, 256)) for causal in (False, True)),
    *(short(s, t, window=window, sinks=True, dtype=FP16)
      for s, t in ((200, 200), (256, 100), (100, 256)) for window in ((0, 0), (63, 64), (-1, 40), (130, -1), (70, 0))),
    short(700, 256, causal=True, heads=8),
]  # fmt: skip


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_values(case: Case):
    holds(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_more_values(case: Case):
    holds(case)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_values_in_other_orders(case: Case, stages: int, seed: int):
    holds(case, seed=seed, target=ONE if seed % 2 else FEW, config=Config(stages))


@pytest.mark.parametrize("target", [ONE, HOPPER], ids=["one", "many"])
@pytest.mark.parametrize("causal", [False, True])
def test_parts_of_a_key_head(target, causal: bool):
    """Alone on a GPU, a key head's tiles are shared among programs: with causal some of them see none of the last block."""
    holds(short(200, 200, causal=causal, heads=3), target=target)


# A tile's row in lse and out depends on these only where a buffer is written again, which the model sees as any other.
FREE: set[str] = set()


@pytest.mark.slow
@pytest.mark.parametrize("name, line", mutants.statements(attention_short_hopper))
def test_a_kernel_without_one_of_its_synchronisations_fails(name: str, line: int, tmp_path: Path):
    case = short(128, 128, causal=True, heads=4, batch=3)
    x, want = case.inputs(), exact(case)
    with mutants.without(attention_short_hopper, line, tmp_path) as mutant, mutants.fails(name not in FREE):
        for seed in range(6):
            for stages in (1, 2):
                out, _ = run(x, target=ONE, seed=seed, config=Config(stages), module=mutant)
                assert relative_error(out, want["out"]) <= limit(case, "out", want["out"])

"""Attention over short contexts on Hopper: values on the model of an SM, and what the compiler makes of it."""

from __future__ import annotations

import functools
import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import aot
import mutants
import pytest
import torch
from attention_cases import Case, Inputs, check, error, exact, limit
from test_attention_hopper import BF16, FP16, HOPPER, machine_code

from fusedblock.interpret import count_traffic, interpret
from fusedblock.kernels import attention_hopper_short
from fusedblock.kernels.attention_hopper_short import Config

FEW = replace(HOPPER, sms=3)  # so that a program has several problems
ONE = replace(HOPPER, sms=1)


def short(seq: int, context: int, **options) -> Case:
    return Case(**{"seq": seq, "context": context, "heads": 2, "kv_heads": 1, "head_dim": 64, "dtype": BF16, "batch": 1,
                   "forward": True, **options})  # fmt: skip


def run(x: Inputs, target=FEW, seed: int = 0, config: Config | None = None, module: Any = attention_hopper_short):
    c = x.case
    left, right = (-1, -1) if c.window is None else c.window
    assert attention_hopper_short.unfit(c.head_dim, c.out_dim, c.context) == ""
    out = torch.full(x.q.shape, math.nan, dtype=x.q.dtype)
    lse = torch.full((c.batch, c.heads, c.seq), math.nan)
    with interpret(target, seed=seed):
        scale = c.head_dim**-0.5 if c.scale is None else c.scale
        module.launch(x.q, x.k, x.v, x.options.get("sinks"), left, 0 if c.causal else right, scale, out, lse, config)
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


@pytest.mark.parametrize("causal", [False, True])
def test_extreme_logits(causal: bool):
    """Products near -6e4, and as far apart as fp32 has exponents: neither overflows nor loses a row."""
    case = short(65, 65, causal=causal, head_dim=64, scale=1.0)
    x = case.inputs()
    for q_size, k_size in ((-30.0, 30.0), (1e3, 1e3)):
        q, k = torch.full_like(x.q, q_size), torch.full_like(x.k, k_size)
        k[:, ::2] *= 1 + 2**-7
        out, lse = run(x.with_(q=q, k=k))
        s = torch.einsum("bihd,bjd->bhij", q.double(), k[:, :, 0].double())
        if causal:
            s = s.masked_fill(torch.ones(65, 65, dtype=torch.bool).triu(1), -math.inf)
        want = torch.einsum("bhij,bjd->bihd", s.softmax(-1), x.v[:, :, 0].double())
        torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=2**-8)
        torch.testing.assert_close(lse.double(), s.logsumexp(-1), rtol=1e-6, atol=0)


def test_rows_that_see_nothing():
    case = short(90, 20, causal=True, sinks=True)
    x = case.inputs()
    for sinks in (None, x.options["sinks"], torch.full((2,), -math.inf)):
        options = {} if sinks is None else {"sinks": sinks}
        out, lse = run(replace(x, options=options))
        assert (out[:, :70] == 0).all() and out[:, 70:].isfinite().all() and lse[..., 70:].isfinite().all()
        nothing = torch.full((2,), -math.inf) if sinks is None else sinks.float()
        torch.testing.assert_close(lse[..., :70], nothing[None, :, None].expand(1, 2, 70), rtol=1e-6, atol=0)


def test_nan_beside_a_sequence_does_not_spread():
    """q, k and v as a slice of the tokens of one projection, with NaN on either side of every sequence."""
    case = short(70, 70, heads=4, kv_heads=2, batch=2)
    x = case.inputs()
    wide = torch.full((2, 130, 4 + 2 + 2, 64), math.nan, dtype=BF16)
    parts = wide[:, 30:100].split((4, 2, 2), 2)
    for part, t in zip(parts, (x.q, x.k, x.v)):
        part.copy_(t)
    got, want = run(x.with_(**dict(zip("qkv", parts)))), run(x)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("sizes, message", [
    ((64, 64, 1), ""), ((128, 128, 256), ""),
    ((256, 256, 64), "head_dim=256 and v_dim=256, not both 64 or 128"),
    ((64, 128, 64), "head_dim=64 and v_dim=128, not both 64 or 128"),
    ((64, 64, 257), "context=257, not 1 to 256"), ((64, 64, 0), "context=0, not 1 to 256"),
])  # fmt: skip
def test_what_it_takes(sizes: tuple[int, int, int], message: str):
    assert attention_hopper_short.unfit(*sizes) == message


@pytest.mark.slow
@pytest.mark.parametrize("name, line", mutants.statements(attention_hopper_short))
def test_a_kernel_without_one_of_its_synchronisations_fails(name: str, line: int, tmp_path: Path):
    # In the second, a consumer has no tile of one of the classes; in the third, whole parts have none.
    cases = [short(128, 128, causal=True, heads=heads, batch=3) for heads in (4, 1, 40)]
    with mutants.without(attention_hopper_short, line, tmp_path) as mutant, mutants.fails(True):
        for case, seed, stages in itertools.product(cases, range(6), (1, 2)):
            out, _ = run(case.inputs(), target=ONE, seed=seed, config=Config(stages), module=mutant)
            want = exact(case)["out"]
            assert error(out, want) <= limit(case, "out", want)


def test_traffic():
    """Every program of a key head reads its k and v once."""
    case = short(256, 256, causal=True, heads=4, kv_heads=2, batch=2)
    x = case.inputs()
    for target, parts in ((FEW, 1), (HOPPER, 4)):
        with count_traffic(target) as traffic:
            attention_hopper_short.launch(x.q, x.k, x.v, None, -1, 0, 0.125, torch.empty_like(x.q), torch.empty(2, 4, 256))
        (launch,) = traffic.launches
        assert launch.argument("q").issued_read_bytes == x.q.nbytes
        for name, t in (("k", x.k), ("v", x.v)):
            assert launch.argument(name).issued_read_bytes == parts * t.nbytes
        assert launch.argument("out").issued_written_bytes == x.q.nbytes
        assert launch.argument("lse").issued_written_bytes == 2 * 4 * 256 * 4


# ---- what the compiler makes of it ---------------------------------------------------------------------------------------------


@functools.cache
def compiled(seq: int, context: int, head_dim: int, left: int, right: int, dtype: torch.dtype, sinks: bool) -> Any:
    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    q, k = empty(128, seq, 32, head_dim), empty(128, context, 8, head_dim)
    lse = empty(128, 32, seq, dtype=torch.float32)
    with aot.compile_only(HOPPER) as kernels:
        attention_hopper_short.launch(q, k, k, empty(32) if sinks else None, left, right, 0.1, q, lse)
    return kernels[0]


def loops(code: str) -> list[list[str]]:
    """The instructions of the innermost loops with products: one for each class of tiles and consumer."""
    places: dict[str, int] = {}
    code_lines: list[str] = []
    spans = []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            places[label[1]] = len(code_lines)
        elif re.match(r"\s+(/\*\w+\*/)?\s+[@A-Z]", line):
            code_lines.append(line)
            back = re.search(r"\bBRA\b.*(\.L_x_\d+)", line)
            if back and back[1] in places and any("HGMMA" in text for text in code_lines[places[back[1]] :]):
                spans.append((places[back[1]], len(code_lines)))
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return [code_lines[start:end] for start, end in inner]


def check_machine_code(seq: int, context: int, head_dim: int, left: int, right: int, dtype: torch.dtype, sinks: bool) -> None:
    kernel = compiled(seq, context, head_dim, left, right, dtype, sinks)
    wide = head_dim == 128 and context > 64
    # Scalars, most of them between the loops; the producer has 24 registers.
    assert aot.problems([kernel], HOPPER, wgmma=True, max_spill_bytes=aot.spills(300 if wide else 8)) == []
    used = aot.resources(kernel)
    assert (used.registers, used.num_warps) == (168, 12)
    found = loops(machine_code(kernel))
    assert len(found) >= 2 * (-(-context // 64) if right == 0 and seq == context else 1)
    for loop in found:
        products = [n for n, line in enumerate(loop) if "HGMMA" in line]
        assert sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in loop) <= aot.spills(10 if wide else 0)
        # P V of a block runs under the exponentials of the next: some lie between the last products.
        blocks = len(products) // (head_dim // 16 + 4)
        between = sum("MUFU.EX2" in line for line in loop[products[-4 * blocks] : products[-1]])
        assert between >= 16 * (blocks - 1), (blocks, between)


@pytest.mark.parametrize("length, head_dim, causal", [(256, 128, True)])
def test_machine_code(length: int, head_dim: int, causal: bool):
    check_machine_code(length, length, head_dim, -1, 0 if causal else -1, BF16, False)


AOT_CASES = [
    (256, 256, 128, -1, -1, BF16, True), (256, 256, 64, -1, 0, FP16, True), (250, 253, 128, 40, 20, BF16, True),
    (250, 253, 128, -1, 0, FP16, False), (255, 200, 64, -1, -1, BF16, False), (128, 128, 128, -1, 0, BF16, False),
    (128, 100, 128, -1, -1, FP16, False), (64, 64, 128, -1, 0, BF16, False), (64, 64, 64, -1, -1, BF16, False),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", AOT_CASES, ids=str)
def test_more_machine_code(case: tuple):
    check_machine_code(*case)

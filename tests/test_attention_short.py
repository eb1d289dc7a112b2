"""Attention over short contexts: values through the interpreter against the float64 formula, and the machine code."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import aot
import pytest
import torch
from attention_cases import Case, Inputs, check
from torch import Tensor

from fusedblock.interpret import count_traffic, interpret
from fusedblock.kernels import attention_short
from fusedblock.kernels._target import TARGETS
from fusedblock.kernels.attention_short import Config

BF16, FP16 = torch.bfloat16, torch.float16
HOPPER = TARGETS["sm_90"]
CONFIGS = list(dict.fromkeys(config for pair in attention_short.TABLE.values() for config in pair))


def short(seq: int, context: int, **options) -> Case:
    return Case(**{"seq": seq, "context": context, "heads": 2, "kv_heads": 1, "head_dim": 64, "dtype": BF16, "batch": 1,
                   "forward": True, **options})  # fmt: skip


def by_kernel(config: Config | None = None) -> Callable[[Inputs], tuple[Tensor, Tensor]]:
    def run(x: Inputs) -> tuple[Tensor, Tensor]:
        c = x.case
        left, right = (-1, -1) if c.window is None else c.window
        assert attention_short.refusal(x.q, x.k, x.v, HOPPER) == ""
        out = torch.full(x.q.shape, math.nan, dtype=x.q.dtype)
        lse = torch.full((c.batch, c.heads, c.seq), math.nan)
        scale = c.head_dim**-0.5 if c.scale is None else c.scale
        sinks, right = x.options.get("sinks"), 0 if c.causal else right
        attention_short.launch(x.q, x.k, x.v, sinks, left, right, scale, out, lse, config)
        return out, lse

    return run


LENGTHS = (1, 17, 64, 65, 100, 128, 200, 256)
QUICK = [
    *(short(n, n, causal=True) for n in LENGTHS),
    *(short(n, n, dtype=FP16) for n in LENGTHS),
    short(128, 128, head_dim=128, heads=8, kv_heads=2, causal=True, batch=2, sinks=True),
    short(256, 256, head_dim=128, heads=1, causal=True),
    short(200, 256, head_dim=128, heads=1),
    short(40, 70, heads=8, causal=True),
    short(100, 30, heads=4, kv_heads=4, causal=True, sinks=True),
    short(300, 77),
    short(90, 20, causal=True, dtype=FP16),
    short(100, 100, window=(20, 0)),
    short(100, 150, window=(10, 30), sinks=True, dtype=FP16),
    short(150, 100, window=(-1, 7)),
    short(100, 250, window=(5, -1), head_dim=128),
]
CASES = [
    *(short(s, t, causal=causal, heads=4, kv_heads=2, sinks=causal, head_dim=d)
      for (s, t), causal, d in itertools.product(
          itertools.permutations((1, 17, 65, 128, 200, 256), 2), (False, True), (64, 128))),
    *(short(n, n, causal=causal, head_dim=d, heads=h, kv_heads=kv, batch=3, dtype=FP16 if d == 64 else BF16)
      for n, causal, d, (h, kv) in itertools.product(LENGTHS, (False, True), (64, 128), ((1, 1), (4, 1), (8, 1), (6, 2)))),
    *(short(s, t, window=window, sinks=s > t, head_dim=64)
      for (s, t), window in itertools.product(
          ((200, 200), (256, 256), (100, 200), (200, 100), (65, 129)),
          ((0, 0), (20, 0), (63, 64), (-1, 40), (130, -1), (300, 300)))),
    short(700, 256, causal=True), short(1000, 77, head_dim=128), short(600, 130, window=(50, 0), sinks=True),
]  # fmt: skip


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_values(case: Case):
    check(case, "sm_90", by_kernel())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_more_values(case: Case):
    check(case, "sm_90", by_kernel())


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_config_takes_every_length(config: Config):
    for case in (short(200, 200, causal=True), short(130, 70, sinks=True), short(70, 250, window=(40, 10))):
        check(case, "sm_90", by_kernel(config))


@pytest.mark.parametrize("causal", [False, True])
def test_extreme_logits(causal: bool):
    """Products near -6e4, and as far apart as fp32 has exponents: neither overflows nor loses a row."""
    case = short(65, 65, causal=causal, head_dim=64, scale=1.0)
    x = case.inputs()
    for q_size, k_size in ((-30.0, 30.0), (1e3, 1e3)):
        q, k = torch.full_like(x.q, q_size), torch.full_like(x.k, k_size)
        k[:, ::2] *= 1 + 2**-7
        with interpret(HOPPER):
            out, lse = by_kernel()(x.with_(q=q, k=k))
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
        with interpret(HOPPER):
            out, lse = by_kernel()(replace(x, options=options))
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
    with interpret(HOPPER):
        got, want = by_kernel()(x.with_(**dict(zip("qkv", parts)))), by_kernel()(x)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_empty():
    for case in (short(20, 20, batch=0), short(0, 20)):
        x = case.inputs()
        assert "is not what TMA takes" in attention_short.refusal(x.q, x.k, x.v, HOPPER)


@pytest.mark.parametrize("change, message", [
    ({"target": TARGETS["sm_100"]}, "sm_100 is not sm_90"),
    ({"dtype": torch.float32}, "q is torch.float32, not bfloat16 or float16"),
    ({"head_dim": 256}, "head_dim=256 and v_dim=256, not both 64 or 128"),
    ({"v_dim": 128}, "head_dim=64 and v_dim=128, not both 64 or 128"),
    ({"context": 257}, "context=257 is more than 256"),
    ({"context": 0}, "k of shape (1, 0, 1, 64) and strides (64, 64, 64, 1) is not what TMA takes"),
])  # fmt: skip
def test_refusals(change: dict, message: str):
    target = change.pop("target", HOPPER)
    x = replace(short(64, 64), **change).inputs()
    assert attention_short.refusal(x.q, x.k, x.v, target) == message


# ---- which program does what -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [1, 8, 100, 2000])
@pytest.mark.parametrize("items", [1, 3, 4, 16, 17, 64, 1000])
def test_share(items: int, pairs: int):
    """As many programs as fit at once, or as are needed to have at most SHARE items each, and none without an item."""
    for programs in (132, 264):
        parts, each = attention_short.share(items, pairs, programs)
        most = max(programs // pairs, -(-items // attention_short.SHARE))
        assert each == next(n for n in range(1, items + 1) if -(-items // n) <= most)
        assert (parts - 1) * each < items <= parts * each


@pytest.mark.parametrize("sms", [1, 7, 500])
@pytest.mark.parametrize("causal", [False, True])
def test_values_do_not_depend_on_the_programs(sms: int, causal: bool):
    case = short(200, 200, heads=6, kv_heads=2, causal=causal)
    with interpret(replace(HOPPER, sms=sms)):
        got = by_kernel()(case.inputs())
    with interpret(HOPPER):
        want = by_kernel()(case.inputs())
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("context", [128, 200])
def test_keys_and_values_are_read_once(context: int):
    case = short(context, context, heads=4, kv_heads=2, causal=True, batch=2)
    x = case.inputs()
    with count_traffic(replace(HOPPER, sms=1)) as traffic:
        by_kernel()(x)
    (launch,) = traffic.launches
    for name, t in (("q", x.q), ("k", x.k), ("v", x.v)):
        assert launch.argument(name).issued_read_bytes == t.nbytes
    assert launch.argument("out").issued_written_bytes == x.q.nbytes
    assert launch.argument("lse").issued_written_bytes == 2 * 4 * context * 4


# ---- what the compiler makes of it ---------------------------------------------------------------------------------------------


@functools.cache
def compiled(seq: int, context: int, head_dim: int, left: int, right: int, dtype: torch.dtype, sinks: bool, config: Config):
    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    q, k = empty(128, seq, 32, head_dim), empty(128, context, 8, head_dim)
    lse = empty(128, 32, seq, dtype=torch.float32)
    with aot.compile_only(HOPPER) as kernels:
        attention_short.launch(q, k, k, empty(32) if sinks else None, left, right, 0.1, q, lse, config)
    return kernels[0]


def check_machine_code(seq: int, context: int, head_dim: int, left: int, right: int, dtype: torch.dtype, sinks: bool) -> None:
    config = attention_short.configure(head_dim, context, right >= 0)
    kernel = compiled(seq, context, head_dim, left, right, dtype, sinks, config)
    assert aot.problems([kernel], HOPPER, wgmma=True, max_spill_bytes=aot.spills(0)) == []
    used = aot.resources(kernel)
    # As many programs on an SM as the table says: each takes 1 KB more of its 228, and registers come by 8 a thread.
    registers = -(-used.registers // 8) * 8 * 32 * used.num_warps
    assert min(228 * 1024 // (used.shared_bytes + 1024), 2**16 // registers) >= config.per_sm
    ptx = kernel.asm["ptx"]
    assert "ldmatrix" not in ptx and "cp.async.bulk.tensor.4d.global.shared" in ptx


@pytest.mark.parametrize("length, head_dim, causal", [(128, 128, True), (256, 128, True)])
def test_machine_code(length: int, head_dim: int, causal: bool):
    check_machine_code(length, length, head_dim, -1, 0 if causal else -1, BF16, False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, sinks", [(BF16, False), (FP16, True)])
@pytest.mark.parametrize("length, head_dim, causal", list(itertools.product((64, 128, 256), (64, 128), (False, True))))
def test_more_machine_code(length: int, head_dim: int, causal: bool, sinks: bool, dtype: torch.dtype):
    for seq, context, left in (
        (length, length, -1),
        (length, length, 40),
        (length + 3, length - 3, -1),
        (length - 3, length, 40),
    ):
        check_machine_code(seq, context, head_dim, left, 0 if causal else -1, dtype, sinks)

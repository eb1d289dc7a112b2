"""The Hopper forward of attention: its values on the model of an SM, and what the compiler makes of it."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path

import aot
import mutants
import pytest
import torch
from torch import Tensor

from fusedblock.interpret import count_traffic, interpret
from fusedblock.kernels import _hopper_schedule, _lang, attention_hopper
from fusedblock.kernels._target import TARGETS

BF16, FP16 = torch.bfloat16, torch.float16
HOPPER = TARGETS["sm_90"]
FEW = replace(HOPPER, sms=3)  # so that a program has several tiles


@dataclass(frozen=True)
class Case:
    seq: int
    context: int
    causal: bool = True
    head_dim: int = 64
    dtype: torch.dtype = BF16
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    window: tuple[int, int] | None = None  # left and right, instead of causal
    sinks: bool = False
    softcap: float = 0.0
    v_dim: int = 0  # where it is not head_dim

    @property
    def bounds(self) -> tuple[int, int]:
        return self.window or (-1, 0 if self.causal else -1)

    def __str__(self) -> str:
        left, right = self.bounds
        seen = f"{left},{right}" if self.window else "causal" if self.causal else "full"
        v = f"v{self.v_dim}" if self.v_dim else ""
        name = f"{self.seq}x{self.context}-{seen}-d{self.head_dim}{v}-{str(self.dtype)[6:]}"
        return f"{name}-b{self.batch}h{self.heads}kv{self.kv_heads}{'-sinks' * self.sinks}{'-cap' * (self.softcap > 0)}"

    def inputs(self, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as slices of one tensor per sequence length, as a fused projection leaves them."""
        generator = torch.Generator().manual_seed(self.seq)
        widths = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * (self.v_dim or self.head_dim)

        def draw(tokens: int, width: int) -> Tensor:
            if device == "meta":
                return torch.empty(self.batch, tokens, width, dtype=self.dtype, device=device)
            return torch.randn(self.batch, tokens, width, generator=generator).to(self.dtype)

        rows = draw(self.seq, sum(widths)).split(widths, -1)[0].unflatten(-1, (self.heads, self.head_dim))
        keys, values = (t.unflatten(-1, (self.kv_heads, -1)) for t in draw(self.context, sum(widths)).split(widths, -1)[1:])
        return rows, keys, values

    def sink_logits(self, device: str = "cpu") -> Tensor | None:
        return torch.linspace(-1, 3, self.heads, device=device) if self.sinks else None


def formula(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse in float64, head by head. Rows that see nothing: 0 and -inf."""
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    lse = torch.empty(case.batch, case.heads, case.seq, dtype=torch.float64)
    left, right = case.bounds
    for b in range(case.batch):
        for h in range(case.heads):
            kv = h // (case.heads // case.kv_heads)
            s = q[b, :, h].double() @ k[b, :, kv].double().T * case.head_dim**-0.5
            if case.softcap:
                s = case.softcap * torch.tanh(s / case.softcap)
            for i in range(case.seq):
                place = i + case.context - case.seq
                if right >= 0:
                    s[i, max(0, place + right + 1) :] = -torch.inf
                if left >= 0:
                    s[i, : max(0, place - left)] = -torch.inf
            if case.sinks:
                s = torch.cat([s, case.sink_logits()[h].double().expand(case.seq, 1)], 1)
            out[b, :, h] = torch.softmax(s, -1).nan_to_num(0.0)[:, : case.context] @ v[b, :, kv].double()
            lse[b, h] = torch.logsumexp(s, -1)
    return out, lse


def compare(case: Case, out: Tensor, lse: Tensor, expected: Tensor, expected_lse: Tensor) -> None:
    assert (out.dtype, out.shape) == (case.dtype, expected.shape)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=2e-5)
    # P and out are rounded to the dtype, whose unit in the last place is 2**-8 or 2**-11.
    unit = 2.0**-8 if case.dtype is BF16 else 2.0**-11
    assert ((out.double() - expected).norm() <= unit * expected.norm()).item()
    assert ((out.double() - expected).abs() <= unit * (1 + expected.abs())).all()


def check(case: Case, seed: int) -> None:
    q, k, v = case.inputs()
    assert attention_hopper.unfit(FEW, case.dtype, q.shape[-1], v.shape[-1]) == ""
    with interpret(FEW, seed=seed):
        out, lse = attention_hopper.launch(
            q, k, v, case.sink_logits(), *case.bounds, case.head_dim**-0.5, case.softcap
        )  # fmt: skip
    compare(case, out, lse, *formula(case, q, k, v))


QUICK = [
    Case(200, 200, head_dim=128, batch=2, heads=4, kv_heads=2),
    Case(77, 300, dtype=FP16),
    Case(300, 128, causal=False),
    Case(1, 1, batch=2),
    Case(300, 100, window=(50, 20), head_dim=128, sinks=True),
    Case(140, 140, head_dim=256, causal=False, dtype=FP16, softcap=1.0),
    Case(130, 100, head_dim=256),
    Case(200, 300, softcap=0.5),
    Case(130, 200, softcap=3.0, causal=False, dtype=FP16),
    Case(200, 300, head_dim=192, v_dim=128),
    Case(130, 180, head_dim=192, v_dim=128, causal=False, heads=4, kv_heads=2, dtype=FP16, sinks=True),
]
CASES = [
    Case(384, 500, window=(10, 7), sinks=True, head_dim=128),
    Case(384, 384, head_dim=128, heads=4, kv_heads=2),
    Case(384, 384, causal=False, head_dim=128),
    Case(384, 384, dtype=FP16),
    Case(256, 256, causal=False, heads=3, kv_heads=3, batch=2, dtype=FP16),
    Case(130, 461, head_dim=128, dtype=FP16),
    Case(300, 333, causal=False, head_dim=128, dtype=FP16),
    Case(1, 257),
    Case(129, 1, causal=False),
    Case(300, 300, sinks=True),
    Case(300, 170, causal=False, sinks=True, head_dim=128),
    Case(512, 512, window=(127, 0), sinks=True),
    Case(512, 512, window=(128, 0), head_dim=128),
    Case(384, 500, window=(100, 0), dtype=FP16),
    Case(200, 500, window=(300, -1), sinks=True),
    Case(300, 300, window=(-1, 50), dtype=FP16),
    Case(300, 300, window=(-1, 128)),
    Case(300, 700, window=(0, 0)),
    Case(130, 700, window=(260, 140), sinks=True),
    Case(256, 256, window=(1000, 1000)),
    Case(300, 170),
    Case(256, 1, window=(-1, 0)),
    Case(200, 200, head_dim=256, heads=4, kv_heads=2),
    Case(200, 331, head_dim=256, window=(70, 0), sinks=True),
    Case(300, 300, softcap=20.0, head_dim=128, window=(100, 0), sinks=True),
    Case(300, 170, head_dim=192, v_dim=128, batch=2, dtype=FP16),
    Case(384, 384, head_dim=192, v_dim=128, causal=False),
    Case(384, 500, head_dim=192, v_dim=128, window=(100, 7), sinks=True),
    Case(200, 400, head_dim=192, v_dim=128, softcap=3.0, kv_heads=2),
]


def slow(cases: list) -> list:
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("case", [*QUICK, *slow(CASES)], ids=str)
def test_values(case: Case):
    check(case, 0)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*QUICK, *CASES], ids=str)
def test_values_in_another_order(case: Case):
    check(case, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
@pytest.mark.parametrize("causal", [True, False])
def test_values_in_more_orders(causal: bool, seed: int):
    check(Case(256, 384, causal), seed)


# They decide who goes first, and leave no barrier half full at the end: no result depends on them.
FREE = {"_take_turn: bar_sync(8 + CID, 256)", "_producer: bar_sync(10 + c, 288)", "_producer: bar_sync(13 + c, 288)"}


@pytest.mark.parametrize("name, line", mutants.statements(attention_hopper))
def test_a_kernel_without_one_of_its_synchronisations_fails(name: str, line: int, tmp_path: Path):
    # Of two and of one block of keys a tile.
    cases = [(case, *case.inputs()) for case in (Case(256, 256), Case(128, 128, batch=6))]
    with mutants.without(attention_hopper, line, tmp_path) as mutant, mutants.fails(name not in FREE):
        for seed in range(2 if name in FREE else 6):  # the first will do for all but a lost turn, which decides only some orders
            for case, q, k, v in cases:
                with interpret(replace(HOPPER, sms=1), seed=seed):
                    out, _ = mutant.launch(q, k, v, None, *case.bounds, 0.125)
                torch.testing.assert_close(out.double(), formula(case, q, k, v)[0], rtol=2e-2, atol=2e-2)


def test_traffic():
    case = Case(256, 256, causal=False, heads=2, kv_heads=1)
    q, k, v = (t.contiguous() for t in case.inputs())
    with count_traffic(FEW) as traffic:
        attention_hopper.launch(q, k, v, None, *case.bounds, 0.125)
    (launch,) = traffic.launches
    assert launch.argument("q").issued_read_bytes == q.nbytes
    for name in "kv":
        assert launch.argument(name).read_bytes == k.nbytes
        assert launch.argument(name).issued_read_bytes == 4 * k.nbytes  # two tiles of two heads
    assert launch.argument("out").issued_written_bytes == q.nbytes
    assert launch.argument("lse").issued_written_bytes == 2 * 256 * 4


# ---- the table of tiles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (16, 64, 32, 132), (5, 7, 3, 4), (64, 8, 8, 132)])
def test_schedule(sizes: tuple[int, ...]):
    row_tiles, sequences, heads, programs = sizes
    steps = tuple(range(1, row_tiles + 1))
    table = _hopper_schedule.schedule(row_tiles, sequences, heads, programs, steps, torch.device("cpu"))
    assert table.shape[1] == programs and (table[-1] == -1).all()
    assert sorted(table[table >= 0].tolist()) == list(range(row_tiles * sequences))
    work = []
    for column in table.T.tolist():
        tiles = [t for t in column if t >= 0]
        assert column == tiles + [-1] * (len(column) - len(tiles))
        chunks = [t // row_tiles // heads for t in tiles]
        assert chunks == sorted(chunks)  # heads that share the L2 run together
        work.append(sum(steps[t % row_tiles] + 1.5 for t in tiles))
    assert max(work) - min(work) <= row_tiles + 1.5  # within one tile


@pytest.mark.parametrize("change, message", [
    ({"target": TARGETS["sm_100"]}, "sm_100 is not sm_90"),
    ({"dtype": torch.float32}, "q is torch.float32, not bfloat16 or float16"),
    ({"head_dim": 96}, "head_dim=96 and v_dim=96, neither 192 and 128 nor both 64, 128 or 256"),
    ({"head_dim": 128, "v_dim": 64}, "head_dim=128 and v_dim=64, neither 192 and 128 nor both 64, 128 or 256"),
])  # fmt: skip
def test_refusals(change: dict, message: str):
    target = change.pop("target", HOPPER)
    q, _, v = replace(Case(128, 128), **change).inputs()
    assert attention_hopper.unfit(target, q.dtype, q.shape[-1], v.shape[-1]) == message


# ---- what the compiler makes of it ---------------------------------------------------------------------------------------------


def machine_code(kernel) -> str:
    """SASS of a kernel that runs on wgmma and TMA, with registers of its partitions' own."""
    code = aot.sass(kernel)
    if code is None:
        pytest.skip("triton brings no disassembler here")
    assert all(re.search(rf"\b{name}\b", code) for name in ("HGMMA", "USETMAXREG", "UTMALDG", "UTMASTG"))
    assert not re.search(r"\bHMMA\b", code)
    return code


@functools.cache
def compiled(case: Case):
    with aot.compile_only(HOPPER) as kernels:
        attention_hopper.launch(
            *case.inputs("meta"), case.sink_logits("meta"), *case.bounds, case.head_dim**-0.5, case.softcap
        )  # fmt: skip
    (kernel,) = kernels
    return kernel


# With the bytes of spills with triton 3.6, which may only shrink: a few loads and stores a tile, none in a loop without masks
# (test_order_in_the_main_loops). To find the tile in the table again instead would cost a hundred instructions.
PLAIN = Case(4096, 4096, batch=2, heads=32, kv_heads=8)
LATENT = replace(PLAIN, kv_heads=32, head_dim=192, v_dim=128)
QUICK_AOT = [(replace(PLAIN, head_dim=128), 0)]
AOT_CASES = [
    (Case(8192, 8192, head_dim=128, heads=64, kv_heads=8, window=(127, 0), sinks=True), 0),
    (PLAIN, 0),
    (replace(PLAIN, causal=False, context=4000), 0),
    (replace(PLAIN, head_dim=128, context=5000), 0),
    (replace(PLAIN, head_dim=128, context=2000), 0),
    (replace(PLAIN, head_dim=128, causal=False), 0),
    (replace(PLAIN, head_dim=128, causal=False, dtype=FP16, context=5000), 0),
    (replace(PLAIN, head_dim=128, window=(127, 20)), 16),
    (replace(PLAIN, head_dim=256), 0),
    (replace(PLAIN, head_dim=256, causal=False, context=5000), 0),
    (replace(PLAIN, head_dim=256, window=(4095, 0)), 76),
    (replace(PLAIN, head_dim=256, softcap=30.0, window=(4095, 0)), 60),
    (replace(PLAIN, softcap=30.0), 0),
    (replace(PLAIN, head_dim=128, softcap=30.0), 0),
    (replace(PLAIN, head_dim=128, softcap=30.0, window=(1023, 0)), 0),
    (replace(PLAIN, head_dim=128, softcap=30.0, window=(127, 20)), 16),
    (Case(8192, 8192, head_dim=64, heads=64, kv_heads=8, window=(127, 0), sinks=True), 0),
    (LATENT, 0),
    (replace(LATENT, causal=False, dtype=FP16), 0),
    (replace(LATENT, sinks=True, softcap=30.0), 0),
    (replace(LATENT, window=(1023, 0)), 32),
    (replace(LATENT, window=(127, 20)), 32),
    (replace(LATENT, window=(-1, 20)), 24),
    (replace(LATENT, window=(127, -1)), 60),
]


def later(case: tuple[object, ...]):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize("case, spills", [*QUICK_AOT, *map(later, AOT_CASES)], ids=str)
def test_machine_code(case: Case, spills: int):
    kernel = compiled(case)
    assert aot.problems([kernel], HOPPER, wgmma=True, max_spill_bytes=aot.spills(spills)) == []
    used = aot.resources(kernel)
    assert (used.registers, used.num_warps) == (168, 12)
    code = machine_code(kernel)
    if spills == 0:
        assert not re.search(r"\b(LDL|STL)\b", code)


@pytest.mark.skipif(_lang.VERSION != (3, 6), reason="holds for the ptxas that the measured version had")
@pytest.mark.parametrize(
    "case", [QUICK_AOT[0][0], *slow([case for case, _ in AOT_CASES if case.dtype is BF16])], ids=str
)
def test_order_in_the_main_loops(case: Case):
    code = machine_code(compiled(case))
    loops = [block for block in re.split(r"^\.L_x_\d+:", code, flags=re.MULTILINE) if "gsb0, 0x1" in block]
    # One for each consumer, and one more where a second block of keys needs a mask, and where a window ends on the left.
    left, right = case.bounds
    block_n = attention_hopper.configure(case.head_dim, right >= 0).block_n
    second = right >= 0 and (block_n < 128 or (case.context - case.seq + right) % block_n > 0)
    assert len(loops) == 2 * (1 + second + (left >= 0))
    assert sum(not re.search(r"\b(LDL|STL)\b", loop) for loop in loops) >= 2 * (1 + (left >= 0))  # all but the masked first
    for loop in loops:
        marks = re.findall(r"HGMMA|MUFU\.EX2|gsb0, 0x[01]", loop)
        scores, values = marks.index("gsb0, 0x1"), marks.index("gsb0, 0x0")
        # Both products are issued before the first is waited for: P V runs under the maximum, whatever ptxas does below.
        assert set(marks[:scores]) == {"HGMMA"} and "HGMMA" not in marks[scores:]
        # block_n / 2 logits a thread (each twice with a softcap) and the factors of its two rows. A wait for P V behind all of
        # them cost 7 to 8 %; where in them it comes is up to ptxas, and varied between 0 and 62 with changes that should not
        # matter.
        assert marks.count("MUFU.EX2") == block_n // 2 * (1 + (case.softcap > 0)) + 2
        assert marks[values + 1 :].count("MUFU.EX2") > 0

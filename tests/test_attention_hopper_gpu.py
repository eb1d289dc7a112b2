"""The op attention on the Hopper kernels of an H200: the cases of attention_cases.py that they take, what only a GPU shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from attention_cases import Case, alone, check, exact, limit, pairs, public, with_gradients
from attention_cases import error as relative
from test_attention_gpu import BF16, SIZE, cases, on_gpu
from test_attention_variants import IMPOSSIBLE, head_major, impossible, last_major, sliced

import fusedblock
from fusedblock import BlockConfig, FusedBlock
from fusedblock.kernels import _hopper_check, _hopper_schedule, _replay
from fusedblock.kernels._attention_skeleton import forced, skeleton
from fusedblock.kernels._target import TARGETS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"),
]
CUDA = torch.device("cuda")


def takes(case: Case, backward: bool = False) -> bool:
    given = {"mask": case.mask, "bias": case.bias, "alibi_slopes": case.alibi, "block_map": case.block_map,
             "prefix_lens": case.prefix, "block_table": case.paged, "dropout_p": case.dropout, "softcap": case.softcap,
             "seqused_k": case.seqused}  # fmt: skip
    return skeleton(
        target=replace(TARGETS["sm_90"], skeleton="hopper"), dtype=case.dtype, head_dim=case.head_dim, v_dim=case.out_dim,
        queries=case.seq, keys=case.context, backward=backward, options=frozenset(name for name in given if given[name]),
    ).hopper  # fmt: skip


def of(dim: int, dtype: torch.dtype = BF16, every: Callable[..., list[Case]] = alone, backward: bool = False) -> list[Case]:
    values = every(**{**SIZE, "head_dim": dim, "dtype": dtype})
    return [case for case in values if takes(case, backward)]


@pytest.fixture(autouse=True)
def hopper(launched: list[str]) -> Iterator[list[str]]:
    """Every test on the Hopper kernels; what this thread launches: all but autograd's."""
    with forced("hopper", CUDA):
        yield launched


@pytest.fixture(scope="module", autouse=True)
def tested() -> None:
    assert all(_hopper_check.ready(CUDA, part) for part in _hopper_check.PARTS), _hopper_check.state(CUDA)


@cases([*of(64), *of(128), *of(256), *of(128, torch.float16)])
def test_alone(case: Case, hopper: list[str]):
    check(case, "cuda")
    assert "attention_hopper" in hopper and "attention" not in hopper


@cases([*of(64, every=partial(pairs, False)), *of(128, every=partial(pairs, False), backward=True)])
def test_pairs(case: Case, hopper: list[str]):
    check(case, "cuda")
    assert "attention_hopper" in hopper and "attention" not in hopper


def few_keys(dim: int, dtype: torch.dtype) -> list[Case]:
    values = alone(**{**SIZE, "context": 250, "head_dim": dim, "dtype": dtype})
    other = lambda c: c.packed or c.softcap or c.seqused or c.v_dim or c.block_map or c.dtype is not dtype
    found = [c for c in values if takes(c) and not other(c)]
    shapes = [(1, 1), (64, 64), (65, 65), (128, 128), (256, 256), (400, 77), (3, 256), (256, 3)]
    more = [Case(seq=s, context=t, head_dim=dim, dtype=dtype, causal=True, batch=5) for s, t in shapes]
    many = Case(seq=130, context=130, head_dim=dim, dtype=dtype, causal=True, batch=300, heads=2, kv_heads=1, forward=True)
    return [*found, *more, many]


@cases([*few_keys(64, BF16), *few_keys(128, torch.float16)])
def test_few_keys(case: Case, hopper: list[str]):
    with forced("short", CUDA):
        check(case, "cuda")
    assert hopper.count("attention_hopper_short") == 1 and "attention_hopper" not in hopper


@pytest.mark.parametrize("layout", [head_major, last_major, sliced])
@cases([Case(**SIZE, dtype=BF16, layout=layout) for layout in ("batched", "packed")])
def test_strides(case: Case, layout):
    check(case, "cuda", layout=layout)


@pytest.mark.parametrize("name", [name for name in IMPOSSIBLE if "cu_seqlens" in name])
def test_impossible_lengths(name: str, hopper: list[str]):
    _, x = impossible(name)
    x = on_gpu(x)
    wide = lambda t: torch.nn.functional.pad(t, (0, 64 - t.shape[-1])).bfloat16()
    case = replace(x.case, head_dim=64, v_dim=0, dtype=BF16)
    x = replace(x, case=case, q=wide(x.q), k=wide(x.k), v=wide(x.v), grad=wide(x.grad))
    got = with_gradients(public, x)
    assert all(got[n].isnan().all() for n in ("out", "grad_q", "grad_k", "grad_v"))
    assert not x.options.keys() & {"bias", "mask"} and "attention_hopper" in hopper


DETERMINISTIC = [
    Case(**SIZE, layout="packed", causal=True, dtype=BF16, deterministic=True),
    Case(**SIZE, causal=True, sinks=True, dtype=BF16, deterministic=True),
]


@cases(DETERMINISTIC)
def test_equal_bits_over_a_hundred_runs(case: Case):
    x = on_gpu(case.inputs())
    first = with_gradients(public, x)
    for _ in range(100):
        again = with_gradients(public, x)
        assert all(torch.equal(again[n], first[n]) for n in first)


@cases([Case(**SIZE, dtype=BF16, causal=True), Case(**SIZE, dtype=BF16, layout="packed", causal=True, sinks=True),
        Case(**SIZE, dtype=BF16, seqused=True, batch=4, forward=True), Case(**SIZE, dtype=BF16, block_map="full")])  # fmt: skip
def test_no_sync_and_a_side_stream(case: Case):
    x = on_gpu(case.inputs())
    run = lambda y: fusedblock.attention(y.q, y.k, y.v, **y.keywords(), return_lse=True)
    want = with_gradients(run, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            got = with_gradients(run, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    for name, t in got.items():
        assert relative(t, want[name].double()) < 1e-2  # grad_q is summed in any order


@pytest.mark.parametrize("known", [True, False], ids=["table kept", "table of its own"])
@cases([Case(**SIZE, dtype=BF16, causal=True), Case(**SIZE, dtype=BF16, layout="packed", causal=True),
        Case(**SIZE, dtype=BF16, block_map="heads")])  # fmt: skip
def test_cuda_graph(case: Case, known: bool, monkeypatch: pytest.MonkeyPatch):
    """Captured, then replayed on other numbers after eager calls of many other shapes; held to the formula."""
    x, other = on_gpu(case.inputs()), on_gpu(case.inputs(1))
    leaves = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v)]
    keywords = x.keywords()

    def step() -> tuple[torch.Tensor, ...]:
        out, lse = fusedblock.attention(*leaves, **keywords, return_lse=True)
        return out, lse, *torch.autograd.grad(out, leaves, x.grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    if not known:
        monkeypatch.setattr(_hopper_schedule, "_tables", {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    assert known or not _hopper_schedule._tables
    with torch.no_grad():
        for seq in range(600, 1000, 50):
            small = torch.randn(1, seq, 2, 64, device="cuda", dtype=BF16)
            fusedblock.attention(small, small, small, causal=True)
        for t, value in zip((*leaves, x.grad), (other.q, other.k, other.v, other.grad)):
            t.copy_(value)
        if case.block_map:
            keywords["block_map"].copy_(other.options["block_map"])
    _hopper_schedule._tables.clear()
    filler = torch.full((64, 2**20), 7, dtype=torch.int32, device="cuda")  # over whatever was freed
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    del filler
    want = exact(case, 1)
    for name, t in zip(("out", "lse", "grad_q", "grad_k", "grad_v"), results):
        assert relative(t.cpu(), want[name]) <= 1.3 * limit(case, name, want[name]), name  # of other inputs than limit's


def test_a_table_that_is_kept_is_not_of_a_graphs_pool():
    """torch.compile's warm-ups allocate from the pool of a graph to come, which takes back what it does not know of."""
    q = torch.randn(1, 777, 2, 64, device="cuda", dtype=BF16)
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        fusedblock.attention(q, q, q, causal=True)
        inside = torch.empty(2**22, device="cuda")

    def pool(t: torch.Tensor) -> tuple[int, int]:
        found = [s for s in torch.cuda.memory_snapshot() if 0 <= t.data_ptr() - s["address"] < s["total_size"]]
        return tuple(found[0]["segment_pool_id"])

    (table,) = [t for key, t in _hopper_schedule._tables.items() if key[0].seq == 777]
    assert pool(table) == (0, 0) != pool(inside)


@pytest.mark.parametrize("where", ["batched", "packed", "block map"])
def test_both_skeletons_agree_on_a_long_context(where: str):
    """What each computes is far closer to the other than either needs to be: 4096 keys, both directions mixed."""
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (torch.randn(1, 4096, h, 128, generator=g, device="cuda", dtype=BF16) for h in (8, 2, 2, 8))
    options = {"causal": True}
    if where == "packed":
        cu = torch.tensor([0, 1000, 1001, 3700, 4096], dtype=torch.int32, device="cuda")
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        q, k, v, grad = (t[0] for t in (q, k, v, grad))
    if where == "block map":  # from no keys to all
        share = torch.linspace(0, 1, 32, device="cuda")[:, None]
        options["block_map"] = torch.rand(1, 8, 32, 32, generator=g, device="cuda") < share
    found = []
    for ahead, behind in (("hopper", "hopper"), ("hopper", "portable"), ("portable", "hopper"), ("portable", "portable")):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with forced(ahead, CUDA):
            out = fusedblock.attention(*leaves, **options)
        with forced(behind, CUDA) if ahead != behind else contextlib.nullcontext():
            found.append((out.detach(), *torch.autograd.grad(out, leaves, grad)))
    for one in found[1:]:
        for a, b in zip(one, found[0]):
            assert relative(a, b.double()) < 1e-2


def test_a_layer_is_replayed_from_the_first_layout_of_a_process_on(monkeypatch: pytest.MonkeyPatch):
    """The self-test then runs inside of the call that is recorded."""
    monkeypatch.setattr(_hopper_check, "_passed", set())
    monkeypatch.setattr(_replay, "_programs", {})
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    block = FusedBlock(BlockConfig(model_type="llama", **sizes), device=CUDA, dtype=BF16).eval()
    x = torch.randn(1, 600, 128, device=CUDA, dtype=BF16)
    with torch.no_grad():
        assert torch.equal(block(x), block(x))
    assert _hopper_check._passed and _replay._programs and None not in _replay._programs.values()

"""Split-KV decode attention against float64 softmax attention."""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from typing import Any

import aot
import attention_cases
import pytest
import torch
from attention_cases import FP8, Case, at_target, by_op, error, exact, limit
from torch import Tensor

from fusedblock import ops
from fusedblock.interpret import count_traffic, interpret
from fusedblock.kernels import decode_attention as decode
from fusedblock.kernels._target import TARGETS, Target

H100 = TARGETS["sm_90"]
SMALL = {"seq": 3, "context": 150, "head_dim": 16}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class Forward(Case):
    """A case of which nothing has gradients."""

    forward_only = True


def forward(case: Case) -> Case:
    return Forward(**{f.name: getattr(case, f.name) for f in fields(case)})


def taken(cases: list[Case]) -> list[Case]:
    return [forward(case) for case in cases if not (case.packed or case.block_map or case.dropout)]


def check(case: Case, target: str | Target = "sm_90") -> None:
    """out and lse of the kernels for a target, or on the GPU ("cuda"), of a case and its float64 formula."""
    x, want = case.inputs(), exact(case)
    if target == "cuda":
        x = x.changed(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda").copy_(t))
    with at_target(target) if isinstance(target, str) else interpret(target), torch.no_grad():
        got = dict(zip(("out", "lse"), by_op("decode_attention")(x)))
    for name, t in got.items():
        most, found = limit(case, name, want[name]), error(t.cpu(), want[name])
        assert found <= most, f"{name} of {case}: error {found:.2e}, at most {most:.2e}"


# ---- every option ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [pytest.param(TARGETS["sm_89"], marks=pytest.mark.slow), replace(H100, sms=1)],
                         ids=["split", "one split"])  # fmt: skip
def test_every_option(target: Target) -> None:
    for case in taken(attention_cases.alone(**SMALL)):
        check(case, target)


@pytest.mark.slow
def test_every_two_options() -> None:
    for i, case in enumerate(taken(attention_cases.pairs(**SMALL))):
        check(case, replace(H100, sms=1) if i % 2 else H100)


TOGETHER = [
    {"causal": True, "softcap": 0.7, "sinks": True, "alibi": "batch", "bias": "full", "mask": "bool", "seqused": True},
    {"window": (40, 1), "softcap": 0.7, "sinks": True, "alibi": "heads", "layout": "paged", "batch": 4, "page": 24},
    {"window": (70, -1), "sinks": True, "bias": "batch", "mask": "padding", "v_dim": 40},
    {"causal": True, "prefix": True, "sinks": True, "layout": "paged", "batch": 4, "page": 64, "dtype": FP8},
]


@pytest.mark.parametrize("options", TOGETHER, ids=lambda o: "-".join(o))
@pytest.mark.parametrize("target", ["sm_90", "sm_89", "gfx942"])
def test_options_together(target: str, options: dict[str, Any]) -> None:
    check(forward(Case(**{**SMALL, **options})), target)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, FP8], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    for options in ({}, {"causal": True, "softcap": 0.7, "alibi": "heads", "sinks": True}, {"mask": "added", "bias": "full"}):
        check(forward(Case(**{**SMALL, **options}, dtype=dtype)))


@pytest.mark.parametrize(("head_dim", "v_dim"), [(d, v) for d, v in attention_cases.HEAD_DIMS if d != 128 or v], ids=str)
def test_head_dims(head_dim: int, v_dim: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        check(forward(Case(seq=2, context=70, batch=1, head_dim=head_dim, v_dim=v_dim, dtype=dtype, causal=True)))


@pytest.mark.parametrize(("seq", "heads", "kv_heads"), [(1, 7, 1), (5, 6, 2), (2, 3, 3), (16, 4, 1), (1, 64, 1), (9, 7, 1)])
@pytest.mark.parametrize("context", [1, 2, 129, 300])
def test_queries_groups_and_contexts(seq: int, heads: int, kv_heads: int, context: int) -> None:
    """Also fewer keys than queries, whose first rows attend nothing; and rows of fp32 that take several programs."""
    sizes = {"seq": seq, "heads": heads, "kv_heads": kv_heads, "context": context}
    for options in ({"dtype": torch.bfloat16, "causal": True}, {"sinks": True, "causal": True, "head_dim": 136}):
        check(forward(Case(**sizes, **options)))


# ---- pages, lengths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [8, 24, 64, 256])
@pytest.mark.parametrize("window", [None, (100, 0)])
def test_pages(page: int, window: tuple[int, int] | None) -> None:
    """In any order, NaN in those not in use and past the lengths: 400, 133, 0 and 1 keys."""
    case = Case(seq=2, context=400, head_dim=16, heads=2, kv_heads=1, layout="paged", page=page, batch=4, window=window)
    check(forward(case), "sm_90")
    check(forward(case), replace(H100, sms=1))


def call(q: Tensor, k: Tensor, v: Tensor, *, left: int = -1, right: int = -1, softcap: float = 0.0, dropout_p: float = 0.0,
         **options: Tensor) -> dict[str, Any]:  # fmt: skip
    """The op's arguments by name."""
    names = list(decode.SPEC.reads)[3:]
    assert set(options) <= set(names)
    numbers = {"left": left, "right": right, "softcap": softcap, "scale": 0.2, "dropout_p": dropout_p, "deterministic": False}
    return {"q": q, "k": k, "v": v, **{n: options.get(n) for n in names}, **numbers}


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


@pytest.mark.parametrize("sms", [1, 132])
def test_impossible_lengths_and_pages_give_nan(sms: int) -> None:
    q, k = randn(4, 1, 4, 16), randn(4, 200, 2, 16)
    prefix, two = torch.tensor([0, -1, -7, 300], dtype=torch.int32), randn(4, 2, 4, 16)
    used = torch.tensor([200, 201, -1, 7], dtype=torch.int32)
    pages, table = randn(8, 100, 2, 16), torch.tensor([[7, 0], [8, 1], [2, -3], [5, 2**30]], dtype=torch.int32)
    with interpret(replace(H100, sms=sms)):
        lengths = decode.launch(**call(q, k, k, seqused_k=used))
        paged = decode.launch(**call(q, pages, pages, block_table=table, seqused_k=torch.tensor([200, 150, 101, 100]).int()))
        prefixes = [decode.launch(**call(x, k, k, prefix_lens=prefix, right=right)) for x, right in ((q, 0), (q, -1), (two, 0))]
    for out, lse in (lengths, paged, *prefixes):
        for b, broken in enumerate((False, True, True, False)):
            assert bool(out[b].isnan().all()) == bool(lse[b].isnan().all()) == broken
            assert broken or bool(out[b].isfinite().all() and lse[b].isfinite().all())


def test_no_keys() -> None:
    q, k = randn(2, 1, 4, 32), randn(2, 8, 2, 32)
    with interpret(H100):
        out, lse = decode.launch(**call(q, k[:, :0], k[:, :0]))
        assert (out == 0).all() and (lse == float("-inf")).all()
        out, lse = decode.launch(**call(q, k[:, :0], k[:, :0], sinks=torch.arange(4.0)))
        assert (out == 0).all() and (lse == torch.arange(4.0)[:, None]).all()
        out, lse = decode.launch(**call(q, k[:, :0], k[:, :0], sinks=torch.full((4,), float("-inf"))))
        assert (out == 0).all() and (lse == float("-inf")).all()
        assert decode.launch(**call(q[:0], k[:0], k[:0]))[0].shape == (0, 1, 4, 32)
        nothing = call(q, k, k, block_table=torch.zeros(2, 0).int(), seqused_k=torch.zeros(2).int())
        assert (decode.launch(**nothing)[1] == float("-inf")).all()


def test_logits_of_any_size() -> None:
    """All near -6e4, where exp gives 0; and one far above the rest."""
    q, k, v = torch.ones(1, 1, 2, 16), torch.ones(1, 300, 2, 16), randn(1, 300, 2, 16)
    with interpret(H100):
        out, lse = decode.launch(**{**call(-q, k, v), "scale": 3750.0})
        assert torch.allclose(out, v.mean(1, keepdim=True), atol=1e-6) and torch.allclose(lse, lse.new_tensor(-6e4), rtol=1e-3)
        k[:, 200] = 2
        out, lse = decode.launch(**{**call(q, k, v), "scale": 3750.0})
        assert torch.allclose(out, v[:, 200:201]) and torch.allclose(lse, lse.new_tensor(1.2e5))


def test_strides() -> None:
    """HF's cache layout seen as batch context heads, a slice of a fused projection, expanded keys and a last axis not dense."""
    layouts = [
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() == 4 else t,
        lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]] if t.dim() == 4 and t.is_floating_point() else t,
        lambda t: torch.stack((t, t), -1)[..., 0] if t.dim() == 4 and t.is_floating_point() else t,
    ]
    for layout in layouts:
        for options in ({}, {"layout": "paged", "batch": 4}, {"mask": "added", "bias": "heads"}):
            case = forward(Case(**{**SMALL, **options}))
            attention_cases.check(case, "sm_90", by_op("decode_attention"), layout)
    q, k = randn(4, 1, 4, 16), randn(1, 150, 1, 16).expand(4, 150, 2, 16)
    with interpret(H100):
        got = decode.launch(**call(q, k, k))
        want = decode.launch(**call(q, k.contiguous(), k.contiguous()))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_refused() -> None:
    q, k = randn(2, 1, 4, 32), randn(2, 8, 2, 32)
    refused: list[tuple[str, dict[str, Any]]] = [
        ("seq=33 queries of 2 heads make 66 rows, at most 64", call(q.expand(-1, 33, -1, -1), k, k)),
        ("block_map is given; only attention takes it", call(q, k, k, block_map=torch.ones(1, 1, 1, 1, dtype=torch.bool))),
        ("dropout_p=0.5; only attention", call(q, k, k, dropout_p=0.5, seed=torch.zeros(1, dtype=torch.int64))),
        ("cu_seqlens_q is given; only attention", call(q[:1], k[:1], k[:1], cu_seqlens_q=torch.tensor([0, 1]).int(),
                                                        cu_seqlens_k=torch.tensor([0, 8]).int())),
        ("block_table is given; it needs seqused_k", call(q, k, k, block_table=torch.zeros(2, 1).int())),
        ("head_dim=20", call(q[..., :20], k[..., :20], k)),
    ]  # fmt: skip
    for run in (decode.launch, decode.reference):
        for words, args in refused:
            with pytest.raises(ValueError, match=words):
                run(**args)
    wrong = call(q, k, k, seqused_k=torch.tensor([8, 9]).int())
    with pytest.raises(ValueError, match="has a length of 9, expected 0 to 8"):
        decode.reference(**wrong)


# ---- launches, bytes, configs ------------------------------------------------------------------------------------------------


COSTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"right": 0},
    "window": {"left": 99, "right": 0},
    "mask": {"mask": torch.ones(2, 1, 1, 1, dtype=torch.bool).expand(2, 1, 1, 300)},
    "rows": {"mask": torch.zeros(2, 1, 3, 300)},
    "terms": {"bias": torch.zeros(1, 4, 3, 300), "sinks": torch.zeros(4), "alibi_slopes": torch.ones(2, 4)},
    "lengths": {"seqused_k": torch.tensor([300, 40]).int()},
    "one split": {"seqused_k": torch.tensor([300, 0]).int(), "sms": 1},
}


@pytest.mark.parametrize("options", COSTED.values(), ids=COSTED)
def test_costs_are_the_bytes_moved(options: dict[str, Any]) -> None:
    target = replace(H100, sms=options.get("sms", 132))
    k = randn(2, 300, 2, 64)
    args = call(randn(2, 3, 4, 64), k, k.clone(), **{n: t for n, t in options.items() if n != "sms"})
    with count_traffic(target) as traffic:
        decode.launch(**args)
        costs = decode.SPEC.costs(args)
    if "lengths" not in options and options.get("seqused_k") is None:  # parts of no keys are written and read in part
        assert [(c.read_bytes, c.written_bytes) for c in costs] == [(t.read_bytes, t.written_bytes) for t in traffic.launches]
    assert [c.read_bytes for c in costs][:1] == [t.read_bytes for t in traffic.launches][:1]
    assert len(costs) == len(traffic.launches) == (1 if "sms" in options else 2)


@pytest.mark.parametrize("left", [-1, 60])
def test_costs_of_pages(left: int) -> None:
    table = torch.randperm(8, generator=torch.Generator().manual_seed(0)).reshape(2, 4).int()
    k = randn(8, 64, 2, 64)
    args = call(randn(2, 1, 4, 64), k, k.clone(), block_table=table, seqused_k=torch.tensor([256, 100]).int(), left=left)
    with count_traffic(H100) as traffic:
        decode.launch(**args)
        costs = decode.SPEC.costs(args)
    assert costs[0].read_bytes == traffic.launches[0].read_bytes
    seen = 356 if left < 0 else 2 * 61
    assert costs[0].flops == 4 * 4 * 64 * seen


PLAIN = decode.Problem(batch=1, seq=1, heads=32, kv_heads=8, context=4096, head_dim=128, v_dim=128, itemsize=2)


def test_splits_fill_the_gpu() -> None:
    def splits(target: Target = H100, **changes: Any) -> int:
        return decode.splits(replace(PLAIN, **changes), target)

    assert decode.configure(PLAIN, H100) == decode.Config(128, 4, 3)
    assert splits() == 16  # runs of 256 keys: 128 programs on 132 SMs
    assert splits(batch=17) == 1  # enough sequences: not split
    assert splits(batch=64) == 1  # nor many more: 32 splits would fill the SMs no better
    assert splits(heads=4, kv_heads=1, context=1 << 20) == 128  # at most MAX_SPLITS
    assert splits(heads=4, kv_heads=1, context=100) == 1
    assert splits(context=1 << 20, left=1023) == splits(context=1024)  # the window's keys alone
    assert decode.launches(PLAIN, H100) == 2 and decode.launches(replace(PLAIN, batch=64), H100) == 1


def test_configs() -> None:
    """Those measured; and blocks that lie in one page."""
    assert decode.configure(replace(PLAIN, batch=64), H100) == decode.Config(32, 4, 4)
    assert decode.configure(replace(PLAIN, page=64), H100).block_n == 64
    assert decode.configure(replace(PLAIN, page=16), H100).block_n == 128  # too short: keys look their pages up one by one
    assert replace(PLAIN, heads=512).block_rows == 64 and replace(PLAIN, heads=512, itemsize=4).block_rows == 32


# ---- compiled ahead ----------------------------------------------------------------------------------------------------------


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def compiled(target: Target, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, v_dim: int, page: int = 0,
             dtype: torch.dtype = torch.bfloat16, **options: Any) -> list[Any]:  # fmt: skip
    shape = (batch * 4096 // page, page) if page else (batch, 4096)
    k, v = (meta(*shape, kv_heads, d, dtype=dtype) for d in (head_dim, v_dim))
    if page:
        options |= {"block_table": meta(batch, 4096 // page, dtype=torch.int32), "seqused_k": meta(batch, dtype=torch.int32)}
    with aot.compile_only(target) as kernels:
        decode.launch(**call(meta(batch, seq, heads, head_dim, dtype=dtype), k, v, **options))
    return kernels


def everything(batch: int, heads: int, seq: int) -> dict[str, Any]:
    return {"mask": meta(batch, 1, seq, 4096, dtype=torch.float32), "bias": meta(1, heads, seq, 4096), "sinks": meta(heads),
            "alibi_slopes": meta(1, heads, dtype=torch.float32), "seqused_k": meta(batch, dtype=torch.int32), "left": 1000,
            "right": 0, "softcap": 30.0}  # fmt: skip


AHEAD = ["sm_90", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sm_80", "sm_86", "sm_100", "gfx942"))]


@pytest.mark.parametrize("name", AHEAD)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_compiles_without_spills(name: str, head_dim: int) -> None:
    go = functools.partial(compiled, TARGETS[name], head_dim=head_dim, v_dim=head_dim, kv_heads=8)
    kernels = []
    for batch in (1, 64):  # fewer sequences than SMs, and more
        for options in ({}, {"mask": meta(1, 1, 1, 4096, dtype=torch.bool)}, {"page": 16}, {"page": 256}):
            kernels += go(batch=batch, seq=1, heads=32, **options)
    assert sum("combine" in k.name for k in kernels) in (4, 8)
    assert aot.problems(kernels, TARGETS[name], max_spill_bytes=aot.spills(0)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_no_form_spills(name: str, dtype: torch.dtype) -> None:
    for head_dim, seq in ((64, 4), (128, 4), (128, 16)):
        sizes = {"seq": seq, "heads": 32, "kv_heads": 8, "head_dim": head_dim, "v_dim": head_dim}
        go = functools.partial(compiled, TARGETS[name], dtype=dtype, **sizes)
        for batch in (1, 64):
            kernels = [*go(batch=batch), *go(batch=batch, **everything(batch, 32, seq)), *go(batch=batch, page=16, right=0)]
            assert aot.problems(kernels, TARGETS[name], max_spill_bytes=aot.spills(0)) == []


@pytest.mark.parametrize("name", AHEAD)
def test_wide_heads_fit(name: str) -> None:
    """Keys of 576 columns with values of 512: spills of a few bytes are allowed, too much shared memory is not."""
    for rows in (16, 32, 64):
        kernels = compiled(TARGETS[name], 1, 1, rows, 1, 576, 512)
        assert aot.problems(kernels, TARGETS[name], max_spill_bytes=aot.spills(16)) == []


# ---- on the GPU --------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, FP8], ids=str)
def test_gpu_every_option(dtype: torch.dtype) -> None:
    for case in taken(attention_cases.alone(**SMALL)):
        check(forward(replace(case, dtype=dtype)), "cuda")
    for options in TOGETHER:
        check(forward(Case(**{**SMALL, **options, "dtype": dtype})), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gpu_sizes(dtype: torch.dtype) -> None:
    for sizes in ((2, 1, 32, 8, 128, 4096), (1, 2, 32, 8, 128, 1000), (1, 1, 8, 8, 256, 513), (9, 1, 16, 16, 128, 700)):
        batch, seq, heads, kv_heads, head_dim, context = sizes
        case = Case(batch=batch, seq=seq, heads=heads, kv_heads=kv_heads, head_dim=head_dim, context=context, dtype=dtype)
        paged: list[dict[str, Any]] = [{"layout": "paged", "page": page} for page in (16, 256)]
        for options in [{}, {"causal": True, "mask": "padding"}, *paged]:
            check(forward(replace(case, **options)), "cuda")
    for head_dim, v_dim in attention_cases.HEAD_DIMS:
        check(forward(Case(seq=2, context=700, heads=32, kv_heads=1, head_dim=head_dim, v_dim=v_dim, dtype=dtype)), "cuda")


@pytest.mark.gpu
def test_gpu_bits_repeat() -> None:
    q, k, v = (randn(4, n, h, 128, dtype=torch.bfloat16, device="cuda") for n, h in ((1, 32), (4000, 8), (4000, 8)))
    args = ops.attention_args(q, k, v, scale=0.1)
    first = ops.direct("decode_attention", *args)
    for _ in range(20):
        again = ops.direct("decode_attention", *args)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])

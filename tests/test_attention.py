"""Attention through the interpreter, on descriptors (sm_90) and pointers (sm_80), against a float64 formula."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from einops import einsum, rearrange, repeat
from torch import Tensor

from fusedblock import attention as attend
from fusedblock import ops
from fusedblock.interpret import count_traffic, interpret
from fusedblock.kernels import _attention as shared
from fusedblock.kernels import attention, attention_backward
from fusedblock.kernels._attention_skeleton import forced
from fusedblock.kernels._spec import ShapeError
from fusedblock.kernels._target import TARGETS

PATHS = ("sm_90", "sm_80")
HALVES = (torch.float16, torch.bfloat16)
MASKS = ("padding", "padding-added", "bool", "added")
NAMES = ("out", "lse", "grad_q", "grad_k", "grad_v")


@pytest.fixture(autouse=True)
def portable() -> Iterator[None]:
    """On a GPU as in the interpreter; test_attention_hopper_gpu.py is for the others."""
    with forced("portable", torch.device("cuda")) if torch.cuda.is_available() else contextlib.nullcontext():
        yield


@dataclass(frozen=True)
class Case:
    seq: int = 37
    context: int = 53
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    causal: bool = True
    mask: str = ""
    batch: int = 2

    def __str__(self) -> str:
        mode = "-causal" * self.causal + f"-{self.mask}" * bool(self.mask)
        return f"{self.batch}x{self.seq}:{self.context}-d{self.head_dim}-{self.heads}:{self.kv_heads}{mode}"

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """q, k, v, mask and the gradient of out."""
        g = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

        q, grad = (randn(self.batch, self.seq, self.heads, self.head_dim) for _ in range(2))
        k, v = (randn(self.batch, self.context, self.kv_heads, self.head_dim) for _ in range(2))
        return q, k, v, self.make_mask(g), grad

    def make_mask(self, g: torch.Generator) -> Tensor | None:
        batch, heads, seq, context = self.batch, self.heads, self.seq, self.context
        if not self.mask:
            return None
        if self.mask == "padding":  # left padding; nothing is left of the last batch entry
            return torch.arange(context) >= torch.linspace(context // 3, context, batch).long()[:, None]
        if self.mask == "padding-added":
            hidden = torch.rand(batch, 1, 1, context, generator=g) < 0.4
            return torch.zeros(batch, 1, 1, context).masked_fill(hidden, torch.finfo(torch.float32).min)
        allowed = torch.rand(batch, heads, seq, context, generator=g) < 0.6
        allowed[:, :, seq // 2] = False  # a row that attends nothing
        if self.mask == "bool":
            return allowed
        return torch.randn(1, 1, seq, context, generator=g).masked_fill(~allowed[:1, :1], -math.inf)


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse as the formula says, in the dtype of its arguments; rows that attend nothing: 0 and -inf."""
    seq, context, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (repeat(t, "b j heads d -> b j (heads group) d", group=group) for t in (k, v))
    logits = einsum(q, k, "b i h d, b j h d -> b h i j") * scale
    allowed = torch.ones(logits.shape, dtype=torch.bool)
    if causal:
        allowed &= torch.arange(context) <= torch.arange(seq)[:, None] + (context - seq)
    if mask is not None:
        mask = mask[:, None, None] if mask.ndim == 2 else mask
        if mask.dtype is torch.bool:
            allowed &= mask
        else:
            allowed &= mask > -1e38
            logits = logits + mask.to(logits.dtype).masked_fill(mask <= -1e38, 0)
    dead = ~allowed.any(-1)
    weights = logits.masked_fill(~allowed, -math.inf).masked_fill(dead[..., None], 0)
    lse = weights.logsumexp(-1).masked_fill(dead, -math.inf)
    out = einsum(weights.softmax(-1) * ~dead[..., None], v, "b h i j, b j h d -> b i h d")
    return out, lse


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The plain torch path of HF models in the arguments' dtype: the yardstick of fp16 and bf16 errors."""
    seq, context, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (repeat(t, "b s h d -> b (h g) s d", g=g) for t, g in ((q, 1), (k, group), (v, group)))
    allowed = torch.ones(seq, context, dtype=torch.bool).tril(context - seq) if causal else torch.ones(1, 1, dtype=torch.bool)
    added = torch.zeros(1, 1, 1, 1, dtype=q.dtype)
    if mask is not None:
        mask = mask[:, None, None] if mask.ndim == 2 else mask
        if mask.dtype is torch.bool:
            allowed = allowed & mask
        else:
            added = mask.clamp(min=torch.finfo(q.dtype).min).to(q.dtype)
    added = torch.where(allowed, added, torch.finfo(q.dtype).min)
    logits = q @ k.mT * scale + added
    weights = torch.softmax(logits, -1, dtype=torch.float32).to(q.dtype)
    weights = weights * (added > torch.finfo(q.dtype).min).any(-1, keepdim=True)
    return rearrange(weights @ v, "b h s d -> b s h d"), logits.float().logsumexp(-1)


def with_gradients(run, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> dict[str, Tensor]:
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = run(*leaves)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad))))


def kernels(target: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, grad: Tensor) -> dict[str, Tensor]:
    """Results and gradients by the kernels: interpreted for a target, or on the GPU ("cuda") with the same strides."""
    if target == "cuda":
        q, k, v, grad = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda").copy_(t) for t in (q, k, v, grad))
        mask = None if mask is None else mask.cuda()
    with contextlib.nullcontext() if target == "cuda" else interpret(TARGETS[target]):
        got = with_gradients(lambda *t: attend(*t, causal=causal, mask=mask, return_lse=True), q, k, v, grad)
    return {name: t.cpu() for name, t in got.items()}


def error(got: Tensor, want: Tensor) -> float:
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite)
    difference = torch.linalg.vector_norm((got.double() - want)[finite])
    return float(difference / torch.linalg.vector_norm(want[finite])) if difference else 0.0


def check(case: Case, dtype: torch.dtype, target: str, layout=lambda t: t) -> None:
    q, k, v, mask, grad = case.inputs(dtype)
    scale = case.head_dim**-0.5
    got = kernels(target, *map(layout, (q, k, v)), mask, case.causal, layout(grad))
    double = [t.double() for t in (q, k, v, grad)]
    want = with_gradients(lambda *t: exact(*t, mask, case.causal, scale), *double)
    plain = with_gradients(lambda *t: eager(*t, mask, case.causal, scale), q, k, v, grad) if dtype in HALVES else {}
    for name in NAMES:
        assert got[name].dtype == (dtype if name != "lse" else torch.float64 if dtype is torch.float64 else torch.float32)
        limit = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 1e-5 if name == "lse" else 0.0)
        if not limit:
            limit = 1.5 * error(plain[name], want[name])
            assert limit < 0.05
        assert error(got[name], want[name]) <= limit, name


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_dtypes(dtype, causal, target):
    check(Case(seq=40, context=70, heads=2, kv_heads=1, head_dim=32, causal=causal, batch=1), dtype, target)


SHAPES = [
    Case(1, 17), Case(1, 130, causal=False), Case(17, 5, causal=False), Case(64, 64), Case(3, 260, batch=1),
    *(Case(*size, heads=1, batch=1) for size in ((130, 200), (200, 130), (128, 128), (200, 17))),
    Case(130, 130, heads=1, batch=1, causal=False), Case(heads=3), Case(heads=6, kv_heads=2, batch=1), Case(heads=7, batch=1),
    Case(heads=2, kv_heads=2), *(Case(20, 150, heads=1, batch=1, head_dim=d) for d in (24, 64, 80, 96, 128, 192, 256)),
    *(Case(80, 20, heads=1, batch=1, head_dim=d, causal=False) for d in (40, 112, 256)),
]  # fmt: skip


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_shapes(case, target):
    check(case, torch.float16, target)


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks(mask, causal, dtype, target):
    check(Case(40, 140, mask=mask, causal=causal), dtype, target)


FORWARD_CONFIGS = list(attention.CONFIGS)
BACKWARD_CONFIGS = list(attention_backward.CONFIGS)


@pytest.mark.parametrize("n", range(max(len(FORWARD_CONFIGS), len(BACKWARD_CONFIGS))))
@pytest.mark.parametrize("mask, target", [("", "sm_90"), pytest.param("bool", "sm_80", marks=pytest.mark.slow)])
def test_every_config(n, mask, target, monkeypatch):
    monkeypatch.setattr(attention, "configure", lambda *a: FORWARD_CONFIGS[n % len(FORWARD_CONFIGS)])
    monkeypatch.setattr(attention_backward, "configure", lambda *a: BACKWARD_CONFIGS[n % len(BACKWARD_CONFIGS)])
    check(Case(140, 150, heads=1, mask=mask, batch=1), torch.float16, target)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name in NAMES:
        assert torch.equal(a[name], b[name]), name


def unaligned(t: Tensor) -> Tensor:
    """Rows 2 elements further apart than a 16-byte multiple: no descriptor can address them."""
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + 2), math.nan)
    wide[..., :-2] = t
    return wide[..., :-2]


LAYOUTS = {
    "head-major": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "dim-major": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
    "slice": lambda t: torch.cat((t * math.nan, t, t * math.nan), 1)[:, t.shape[1] : 2 * t.shape[1]],
    "unaligned": unaligned,
    "reversed-batch-strides": lambda t: rearrange(rearrange(t, "b s h d -> s h b d").contiguous(), "s h b d -> b s h d"),
}  # fmt: skip


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, target):
    q, k, v, _, grad = Case(heads=4, kv_heads=2).inputs(torch.float16)
    moved = [LAYOUTS[layout](t) for t in (q, k, v, grad)]
    assert not any(t.is_contiguous() for t in moved) and all(torch.equal(a, b) for a, b in zip(moved, (q, k, v, grad)))
    same(kernels(target, *moved[:3], None, True, moved[3]), kernels(target, q, k, v, None, True, grad))


@pytest.mark.parametrize("target", PATHS)
def test_one_packed_projection(target):
    qkv = torch.randn(2, 37, 3 * 2 * 16, generator=torch.Generator().manual_seed(0)).half()
    q, k, v = rearrange(qkv, "b s (three h d) -> three b s h d", three=3, h=2)
    assert q.data_ptr() == qkv.data_ptr()
    grad = torch.ones_like(q)
    same(kernels(target, q, k, v, None, True, grad), kernels(target, *(t.contiguous() for t in (q, k, v)), None, True, grad))


@pytest.mark.parametrize("target", PATHS)
def test_expanded_inputs_and_gradients(target):
    q, k, v, mask, grad = Case(mask="bool").inputs(torch.float16)
    expanded = [t[:1].expand(2, -1, -1, -1) for t in (q, k, v, mask, grad)]
    whole = [t.contiguous() for t in expanded]
    same(kernels(target, *expanded[:4], False, expanded[4]), kernels(target, *whole[:4], False, whole[4]))
    one = torch.tensor(0.5, dtype=q.dtype).expand(q.shape)
    assert one.stride() == (0, 0, 0, 0)
    same(kernels(target, q, k, v, mask, True, one), kernels(target, q, k, v, mask, True, one.contiguous()))
    rows = mask[:1, :1, :, :1].expand(2, 2, -1, 53)  # one answer for all keys
    same(kernels(target, q, k, v, rows, True, grad), kernels(target, q, k, v, rows.contiguous(), True, grad))


@pytest.mark.parametrize("target", PATHS)
def test_rows_that_attend_nothing(target):
    q, k, v, _, grad = Case(90, 20).inputs(torch.float32)
    got = kernels(target, q, k, v, None, True, grad)
    assert (got["out"][:, :70] == 0).all() and (got["lse"][..., :70] == -math.inf).all()
    assert (got["grad_q"][:, :70] == 0).all() and got["lse"][..., 70:].isfinite().all()
    for mask in (torch.zeros(2, 20, dtype=torch.bool), torch.full((1, 1, 1, 1), -math.inf), torch.full((1, 1, 90, 20), -3.4e38)):
        got = kernels(target, q, k, v, mask, False, grad)
        assert (got.pop("lse") == -math.inf).all()
        assert all((t == 0).all() for t in got.values())


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("mask", ["padding", "padding-added"])
@pytest.mark.parametrize("causal", [False, True])
def test_nan_in_padding_does_not_spread(mask, causal, target):
    q, k, v, m, grad = Case(40, 140, mask=mask).inputs(torch.float16)
    hidden = ~m if m.dtype is torch.bool else m[:, 0, 0] < -1
    clean = [t.masked_fill(hidden[..., None, None], 0) for t in (k, v)]
    spoilt = [t.masked_fill(hidden[..., None, None], math.nan) for t in (k, v)]
    got = kernels(target, q, *spoilt, m, causal, grad)
    same(got, kernels(target, q, *clean, m, causal, grad))
    assert all((got[n].masked_select(hidden[..., None, None]) == 0).all() for n in ("grad_k", "grad_v"))
    # The reference, which runs where there is no GPU, holds the same.
    reference = with_gradients(lambda *t: attend(*t, causal=causal, mask=m, return_lse=True), q, *spoilt, grad)
    assert all(t.isfinite().all() for n, t in reference.items() if n != "lse")


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("empty", [{"batch": 0}, {"seq": 0}, {"context": 0}])
def test_empty(empty, target):
    case = replace(Case(), **empty)
    q, k, v, _, grad = case.inputs(torch.float32)
    reference = with_gradients(lambda *t: attend(*t, causal=True, return_lse=True), q, k, v, grad)
    for got in (kernels(target, q, k, v, None, True, grad), reference):
        assert got["out"].shape == q.shape and (got["out"] == 0).all()
        assert got["lse"].shape == (case.batch, 2, case.seq) and (got["lse"] == -math.inf).all()
        assert all(got[f"grad_{n}"].shape == t.shape and (got[f"grad_{n}"] == 0).all() for n, t in zip("qkv", (q, k, v)))


@pytest.mark.parametrize("target", PATHS)
def test_one_key_is_its_value(target):
    q, k, v, _, grad = Case(17, 1, heads=4, kv_heads=2, causal=False).inputs(torch.float32)
    got = kernels(target, q, k, v, None, False, grad)
    assert torch.equal(got["out"], repeat(v, "b 1 h d -> b s (h g) d", s=17, g=2))
    assert error(got["grad_v"], rearrange(grad, "b s (h g) d -> b s h g d", g=2).double().sum((1, 3))[:, None]) < 1e-6
    assert all(got[f"grad_{n}"].abs().max() < 1e-5 for n in "qk")
    check(Case(17, 2, causal=False), torch.float32, target)


@pytest.mark.parametrize("target", PATHS)
def test_offsets_beyond_32_bits(target):
    """Heads 2**30 elements apart: the third begins where 32 bits end. The pages between are never touched."""
    q, k, v, _, grad = Case(5, 5, heads=3, kv_heads=3, batch=1).inputs(torch.float16)
    far = torch.empty(2**31 + 2**12, dtype=torch.float16).as_strided(q.shape, (5 * 16, 16, 2**30, 1))
    far.copy_(q)
    same(kernels(target, far, k, v, None, True, grad), kernels(target, q, k, v, None, True, grad))
    same(kernels(target, q, far, v, None, True, grad), kernels(target, q, q, v, None, True, grad))


@pytest.mark.parametrize("case", [Case(3, 5, heads=2, batch=1), Case(6, 4, heads=3, head_dim=24, batch=1, mask="added")], ids=str)
def test_gradcheck(case):
    q, k, v, mask, _ = case.inputs(torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    with interpret(TARGETS["sm_80"]):
        run = lambda *t: attend(*t, causal=True, mask=mask, scale=0.3)
        # Fast mode projects the Jacobian; test_dtypes holds every gradient in float64 to 1e-12.
        assert torch.autograd.gradcheck(run, leaves, eps=1e-6, atol=1e-5, fast_mode=True)


def named(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> dict:
    """The op's arguments by name."""
    given = ops.attention_args(q, k, v, mask=mask, right=0 if causal else -1, scale=scale)
    return dict(zip(attention.NAMES, given, strict=True))


def backward(args: dict, grad: Tensor, out: Tensor, lse: Tensor, needs: Sequence[bool]) -> tuple[dict, tuple[Tensor, ...]]:
    """Arguments and results of the backward op; needs: of q, k, v."""
    given = {"grad_out": grad, "out": out, "lse": lse, **{f"need_{n}": need for n, need in zip("qkv", needs)}}
    found = {n: given[n] if n in given else args.get(n, False) for n in attention_backward.NAMES}
    return found, attention_backward.launch(*found.values())


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
def test_only_wanted_gradients(needs):
    q, k, v, _, grad = Case().inputs(torch.float32)
    args = named(q, k, v, None, True, 0.25)
    with interpret(TARGETS["sm_90"]):
        out, lse = attention.launch(*args.values())
        full, got = (backward(args, grad, out, lse, which)[1] for which in ((True, True, True), needs))
    for need, g, f in zip(needs, got, full):
        assert torch.equal(g, f) if need else g.shape == (0,)


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("mask, causal", [("", True), ("padding", True), ("bool", False), ("added", False)])
def test_costs_are_what_the_kernels_move(mask, causal, target):
    q, k, v, m, grad = Case(70, 90, heads=4, kv_heads=2, head_dim=24, mask=mask).inputs(torch.float16)
    m = attention.normalise_mask(m, q, k)
    args = named(q, k, v, m, causal, 0.2)
    with count_traffic(TARGETS[target]) as traffic:
        out, lse = attention.launch(*args.values())
        again, _ = backward(args, grad, out, lse, (True, True, True))
    costs = (*attention.SPEC.costs(args), *attention_backward.SPEC.costs(again))
    assert [(c.read_bytes, c.written_bytes) for c in costs] == [(t.read_bytes, t.written_bytes) for t in traffic.launches]
    pairs = sum(max(0, min(90, i + 1 + 20)) if causal else 90 for i in range(70)) * 2 * 4
    assert costs[0].flops == 4 * pairs * 24
    assert sum(c.flops for c in costs[2:]) == 2.5 * costs[0].flops
    assert sum(c.executed_flops for c in costs[2:]) == 3.5 * costs[0].flops


@pytest.mark.parametrize("seq, context", [(1, 1), (5, 9), (9, 5), (0, 3), (3, 0)])
def test_allowed_pairs(seq, context):
    counted = sum(1 for i in range(seq) for j in range(context) if j <= i + context - seq)
    assert shared.allowed_pairs(seq, context, -1, 0) == counted
    assert shared.allowed_pairs(seq, context, -1, -1) == seq * context
    for left, right, prefix in ((2, 0, 0), (0, 3, 0), (-1, 1, 0), (-1, 0, 2), (1, -1, 0)):
        places = [(i + context - seq, j) for i in range(seq) for j in range(context)]
        seen = [(p, j) for p, j in places if right < 0 or j <= p + right or j < prefix]
        counted = sum(1 for p, j in seen if left < 0 or j >= p - left)
        assert shared.allowed_pairs(seq, context, left, right, prefix) == counted


@pytest.mark.parametrize("case", [Case(), Case(20, 9), *(Case(mask=m, causal=c) for m in MASKS for c in (False, True))], ids=str)
def test_references(case):
    q, k, v, mask, grad = case.inputs(torch.float64)
    got = with_gradients(lambda *t: attend(*t, causal=case.causal, mask=mask, return_lse=True), q, k, v, grad)
    want = with_gradients(lambda *t: exact(*t, mask, case.causal, 0.25), q, k, v, grad)
    assert all(error(got[n], want[n]) <= 1e-12 for n in NAMES)
    assert all(got[n].is_contiguous() for n in NAMES)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"heads": 3, "kv_heads": 2}, "heads=3.*kv_heads=2"),
        ({"head_dim": 20}, "head_dim=20"),
        ({"head_dim": 4}, "head_dim=4.*8 to 256"),
        ({"head_dim": 264}, "head_dim=264"),
    ],
)
def test_refused_shapes(change, message):
    q, k, v, _, _ = replace(Case(), **change).inputs(torch.float32)
    with pytest.raises(ValueError, match=message):
        attend(q, k, v)


@pytest.mark.parametrize(
    "mask, scale, kind, message",
    [
        (torch.ones(2, 52, dtype=torch.bool), None, ShapeError, "context=52.*context=53"),
        (torch.ones(3, 1, 37, 53), None, ShapeError, "batch=3.*batch=2"),
        (torch.ones(53, dtype=torch.bool), None, ShapeError, r"\(53,\)"),
        (torch.ones(2, 53), None, ValueError, "torch.float32"),
        (torch.ones(2, 53, dtype=torch.int64), None, ValueError, "torch.int64"),
        (None, -1.0, ValueError, "scale=-1.0"),
        (None, math.inf, ValueError, "scale=inf"),
    ],
)
def test_refused_values(mask, scale, kind, message):
    q, k, v, _, _ = Case().inputs(torch.float32)
    with pytest.raises(kind, match=message):
        attend(q, k, v, mask=mask, scale=scale)


def test_a_row_mask_of_two_axes_is_a_view():
    q, k, _, _, _ = Case().inputs(torch.float32)
    mask = torch.rand(2, 53) < 0.5
    view = attention.normalise_mask(mask, q, k)
    assert view.shape == (2, 1, 1, 53) and view.data_ptr() == mask.data_ptr()
    assert attention.normalise_mask(mask[:1, :1], q, k).shape == (1, 1, 1, 53)
    assert attention.normalise_mask(None, q, k) is None


# ---- on a GPU ----------------------------------------------------------------------------------------------------------------

gpu = pytest.mark.gpu


@gpu  # with fp16 and other masks and sizes in test_attention_gpu.py
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["", "bool", "added"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_modes(dtype, mask, causal, head_dim):
    check(Case(300, 517, heads=4, kv_heads=2, head_dim=head_dim, causal=causal, mask=mask), dtype, "cuda")


@gpu
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_gpu_shapes(case):
    check(case, torch.float16, "cuda")


@gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_layouts(layout):
    check(Case(200, 300, heads=4, kv_heads=2, head_dim=64, mask="bool"), torch.bfloat16, "cuda", LAYOUTS[layout])


@gpu
@pytest.mark.parametrize("head_dim, mask", [(64, "bool"), (128, "")])
@pytest.mark.parametrize("n", range(max(len(FORWARD_CONFIGS), len(BACKWARD_CONFIGS))))
def test_gpu_every_config(n, head_dim, mask, monkeypatch):
    forward, backward = FORWARD_CONFIGS[n % len(FORWARD_CONFIGS)], BACKWARD_CONFIGS[n % len(BACKWARD_CONFIGS)]
    monkeypatch.setattr(attention, "configure", lambda *a: forward)
    monkeypatch.setattr(attention_backward, "configure", lambda *a: backward)
    check(Case(300, 517, head_dim=head_dim, mask=mask), torch.bfloat16, "cuda")


@gpu
@pytest.mark.parametrize("mask", ["", "padding", "added"])
def test_gpu_same_bits_every_time(mask):
    q, k, v, m, grad = Case(1000, 1000, heads=8, kv_heads=2, head_dim=128, mask=mask).inputs(torch.bfloat16)
    first = kernels("cuda", q, k, v, m, True, grad)
    for _ in range(20):
        same(kernels("cuda", q, k, v, m, True, grad), first)


@gpu
def test_gpu_more_than_2_to_the_31_elements():
    """The last batch entries of a tensor whose end 32 bits cannot address, against the same entries alone."""
    batch, shape = 16400, (128, 8, 128)
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of free GPU memory")
    g = torch.Generator("cuda").manual_seed(0)
    q, grad = (torch.randn(batch, *shape, generator=g, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(batch, 128, 1, 128, generator=g, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert q.numel() > 2**31

    def run(*t: Tensor) -> dict[str, Tensor]:
        return with_gradients(lambda *qkv: attend(*qkv, causal=True, return_lse=True), *t)

    whole = run(q, k, v, grad)
    part = run(*(t[-2:].clone() for t in (q, k, v, grad)))
    same({n: t[-2:] for n, t in whole.items()}, part)

"""Attention in every form: cases, their inputs, and how any implementation is held to the float64 formula."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from attention_formula import BLOCK, formula
from torch import Tensor

from fusedblock.interpret import interpret
from fusedblock.kernels._target import TARGETS

HALVES = (torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
GRADIENTS = ("q", "k", "v", "bias", "sinks")
MASKS = ("padding", "padding-added", "bool", "added")
BIASES = ("full", "batch", "heads", "both", "row", "column")
PACKED = ((17, 29), (0, 5), (1, 1), (40, 40), (20, 3), (7, 0))
# In the order of the kernels' arguments.
TENSORS = ("mask", "bias", "sinks", "alibi_slopes", "block_map", "prefix_lens", "cu_seqlens_q", "cu_seqlens_k", "seqused_k",
           "block_table", "q_scale", "k_scale", "v_scale")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What to attend to, and how. layout: batched, packed (`lengths` of queries and keys), paged, packed-paged."""

    seq: int = 37
    context: int = 53
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    v_dim: int = 0  # 0: head_dim
    batch: int = 2
    dtype: torch.dtype = torch.float32
    layout: str = "batched"
    lengths: tuple[tuple[int, int], ...] = PACKED
    page: int = 16
    causal: bool = False
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    sinks: bool = False
    alibi: str = ""  # heads: a slope for each head; batch: for each of each batch entry or sequence
    bias: str = ""  # full; or one over batch, heads, both; row: one row for all queries; column: one number for all keys
    mask: str = ""
    block_map: str = ""  # both: one map; heads: one for each head; full: for each batch entry, too
    prefix: bool = False
    seqused: bool = False  # always true when paged
    dropout: float = 0.0
    scale: float | None = None
    forward: bool = False  # no gradients are wanted
    deterministic: bool = False

    def __str__(self) -> str:
        plain = Case()
        shown = [f"{self.batch}x{self.seq}:{self.context}-{self.heads}:{self.kv_heads}-d{self.head_dim}-{str(self.dtype)[6:]}"]
        if self.v_dim:
            shown.append(f"v{self.v_dim}")
        for f in fields(self)[8:]:
            value = getattr(self, f.name)
            if f.name == "lengths" and not self.packed or f.name == "page" and not self.paged or value == getattr(plain, f.name):
                continue
            text = value if f.name == "layout" else f.name if value is True else f"{f.name}={value}"
            shown.append(str(text).replace(" ", ""))
        return "-".join(shown)

    @property
    def packed(self) -> bool:
        return self.layout.startswith("packed")

    @property
    def paged(self) -> bool:
        return self.layout.endswith("paged")

    @property
    def forward_only(self) -> bool:
        """Whether no gradients are to be had."""
        wide = max(self.head_dim, self.v_dim) > 256 and self.v_dim not in (0, self.head_dim)
        return self.forward or self.paged or self.dtype is FP8 or wide

    @property
    def out_dim(self) -> int:
        return self.v_dim or self.head_dim

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """(queries, keys) of each."""
        if self.packed:
            return list(self.lengths)
        if not (self.seqused or self.paged):
            return [(self.seq, self.context)] * self.batch
        used = [self.context, self.context // 3, 0, 5]
        return [(self.seq, min(self.context, used[b % 4])) for b in range(self.batch)]

    def inputs(self, seed: int = 0) -> Inputs:
        return _inputs(self, torch.Generator().manual_seed(seed))


@dataclass
class Inputs:
    """q, k, v as the public function takes them, the gradient of out, and the options that are tensors."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    options: dict[str, Tensor] = field(default_factory=dict)
    seed: int = 0x1234_5678_9ABC

    def tensor(self, name: str) -> Tensor | None:
        return getattr(self, name) if name in ("q", "k", "v") else self.options.get(name)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        q, k, v, grad = (change(t) for t in (self.q, self.k, self.v, self.grad))
        return replace(self, q=q, k=k, v=v, grad=grad, options={n: change(t) for n, t in self.options.items()})

    def with_(self, **tensors: Tensor) -> Inputs:
        own = {n: t for n, t in tensors.items() if n in ("q", "k", "v")}
        return replace(self, **own, options={**self.options, **{n: t for n, t in tensors.items() if n not in own}})

    def keywords(self) -> dict[str, Any]:
        """Of the public function."""
        c = self.case
        found = {**self.options, "causal": c.causal, "window": c.window, "softcap": c.softcap, "dropout_p": c.dropout,
                 "deterministic": c.deterministic}  # fmt: skip
        if c.packed:
            found["max_seqlen_q"], found["max_seqlen_k"] = (max((n[i] for n in c.lengths), default=0) for i in range(2))
        return {**found, "scale": c.scale}

    def op_args(self) -> tuple[Any, ...]:
        """Positional arguments of the ops `attention` and `decode_attention`."""
        c, o = self.case, dict(self.options)
        q = self.q[None] if c.packed else self.q
        k, v = (t[None] if c.layout == "packed" else t for t in (self.k, self.v))
        mask = o.get("mask")
        if mask is not None:
            mask = mask[:, None, None] if mask.dim() == 2 else mask
            o["mask"] = mask.expand(-1, -1, -1, k.shape[1])
        if "alibi_slopes" in o and o["alibi_slopes"].dim() == 1:
            o["alibi_slopes"] = o["alibi_slopes"][None]
        left, right = (-1, -1) if c.window is None else c.window
        right = 0 if c.causal else right
        seed = torch.tensor([self.seed], device=q.device) if c.dropout else None
        scale = c.head_dim**-0.5 if c.scale is None else c.scale
        return (q, k, v, *(o.get(n) for n in TENSORS), seed, left, right, c.softcap, scale, c.dropout, c.deterministic)


def _inputs(c: Case, g: torch.Generator) -> Inputs:
    used = c.seqused or c.paged

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32)

    options: dict[str, Tensor] = {}
    lengths, dims = c.sequences, (c.head_dim, c.out_dim)
    n, seq, k_len = len(lengths), c.seq, c.context
    if c.packed:  # tokens follow the last sequence, that none may read
        queries, keys = ([0, *np.cumsum([s[i] for s in lengths]).tolist()] for i in range(2))
        q, grad = (randn(queries[-1] + 3, c.heads, d) for d in dims)
        q[queries[-1] :] = math.nan
        options["cu_seqlens_q"] = ints(queries)
        if not c.paged:
            k, v = (randn(keys[-1] + 5, c.kv_heads, d) for d in dims)
            k[keys[-1] :], v[keys[-1] :] = math.nan, math.nan
            options["cu_seqlens_k"] = ints(keys)
    else:
        q, grad = (randn(c.batch, seq, c.heads, d) for d in dims)
        if not c.paged:
            k, v = (randn(c.batch, k_len, c.kv_heads, d) for d in dims)
            for b, (_, length) in enumerate(lengths):
                k[b, length:], v[b, length:] = math.nan, math.nan
    if used:
        options["seqused_k"] = ints([length for _, length in lengths])
    if c.paged:
        most = max(1, max((-(-length // c.page) for _, length in lengths), default=1))
        pages = n * most + 2
        order = torch.randperm(pages, generator=g)[: n * most].reshape(n, most)
        k, v = (torch.full((pages, c.page, c.kv_heads, d), math.nan, dtype=torch.float64) for d in dims)
        table = torch.full((n, most + 1), 2**30)  # past a sequence's pages: nonsense that none may follow
        for b, (_, length) in enumerate(lengths):
            for j in range(-(-length // c.page)):
                rows = min(c.page, length - j * c.page)
                table[b, j] = order[b, j]
                for t, d in zip((k, v), dims):
                    t[order[b, j], :rows] = randn(rows, c.kv_heads, d)
        options["block_table"] = table.int()
    if c.mask:
        options["mask"] = mask = _mask(c, g)
        if c.mask.startswith("padding"):
            hidden = ~mask if c.mask == "padding" else mask[:, 0, 0] < -1
            k, v = (t.masked_fill(hidden[..., None, None].expand(t.shape[0], -1, 1, 1), math.nan) for t in (k, v))
    if c.bias:
        shape = [c.batch, c.heads, seq, k_len]
        for axis in {"full": (), "batch": (0,), "heads": (1,), "both": (0, 1), "row": (2,), "column": (3,)}[c.bias]:
            shape[axis] = 1
        options["bias"] = randn(*shape).to(c.dtype)
    if c.sinks:
        # Weighty beside a number for all keys, which would change nothing but for the sink.
        options["sinks"] = (randn(c.heads) + 3 * (c.bias == "column")).to(torch.float32 if c.dtype is FP8 else c.dtype)
    if c.alibi:
        # Distances times slopes of a few units at most: half precision keeps no more of a logit.
        slopes = torch.rand(c.heads if c.alibi == "heads" else (n, c.heads), generator=g) * min(1, 50 / max(c.context, 1))
        options["alibi_slopes"] = slopes.reshape(-1) if c.alibi == "heads" else slopes
    if c.block_map:
        shape = [1 if c.block_map != "full" else c.batch, 1 if c.block_map == "both" else c.heads]
        options["block_map"] = torch.rand(*shape, -(-seq // BLOCK), -(-k_len // BLOCK), generator=g) < 0.6
    if c.prefix:
        options["prefix_lens"] = ints([(0, k_len // 2, k_len + 3, 1)[(b + 1) % 4] for b in range(n)])
    if c.dtype is FP8:
        for name, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)):
            options[f"{name}_scale"] = torch.rand(1 if c.packed else c.batch, heads, generator=g) + 0.25
    return Inputs(c, q.to(c.dtype), k.to(c.dtype), v.to(c.dtype), grad.to(torch.bfloat16 if c.dtype is FP8 else c.dtype), options)


def _mask(c: Case, g: torch.Generator) -> Tensor:
    if c.mask == "padding":  # left padding; nothing is left of the last batch entry
        return torch.arange(c.context) >= torch.linspace(c.context // 3, c.context, c.batch).long()[:, None]
    if c.mask == "padding-added":
        hidden = torch.rand(c.batch, 1, 1, c.context, generator=g) < 0.4
        return torch.zeros(c.batch, 1, 1, c.context).masked_fill(hidden, torch.finfo(torch.float32).min)
    allowed = torch.rand(c.batch, c.heads, c.seq, c.context, generator=g) < 0.6
    allowed[:, :, c.seq // 2 : c.seq // 2 + 1] = False  # a row that attends nothing
    if c.mask == "bool":
        return allowed
    return torch.randn(1, 1, c.seq, c.context, generator=g).masked_fill(~allowed[:1, :1], -math.inf)


def with_gradients(run: Callable[[Inputs], Any], x: Inputs) -> dict[str, Tensor]:
    """out, lse and, where the case has them, the gradients of everything that has one."""
    if x.case.forward_only:
        with torch.no_grad():
            out, lse = run(x)
        return {"out": out, "lse": lse}
    leaves = {n: t.detach().requires_grad_() for n in GRADIENTS if (t := x.tensor(n)) is not None}
    out, lse = run(x.with_(**leaves))
    if out.requires_grad:
        grads = torch.autograd.grad(out, list(leaves.values()), x.grad)
    else:  # the formula has nothing to compute
        grads = tuple(torch.zeros_like(t) for t in leaves.values())
    return {"out": out.detach(), "lse": lse.detach(), **{f"grad_{n}": g for n, g in zip(leaves, grads)}}


@functools.lru_cache(maxsize=64)
def exact(case: Case, seed: int = 0) -> dict[str, Tensor]:
    """What the formula gives in float64."""

    def double(t: Tensor) -> Tensor:
        return t.double() if t.is_floating_point() else t

    return with_gradients(formula, case.inputs(seed).changed(double))


@functools.lru_cache(maxsize=64)
def plain(case: Case, seed: int = 0) -> dict[str, Tensor]:
    """What plain torch gives in the dtype of the case; fp8 as bf16."""
    return with_gradients(formula, case.inputs(seed).changed(lambda t: t.bfloat16() if t.dtype is FP8 else t))


# ---- holding an implementation to it -----------------------------------------------------------------------------------------


def public(x: Inputs) -> tuple[Tensor, Tensor]:
    """fusedblock.attention on the inputs, with their seed."""
    import fusedblock
    from fusedblock import attention_functions

    def seed(device: torch.device) -> Tensor:
        return torch.tensor([x.seed], device=device)

    with mock.patch.object(attention_functions, "draw_seed", seed):
        return fusedblock.attention(x.q, x.k, x.v, **x.keywords(), return_lse=True)


def by_op(name: str = "attention") -> Callable[[Inputs], tuple[Tensor, Tensor]]:
    """The registered op itself, past the public function."""

    def run(x: Inputs) -> tuple[Tensor, Tensor]:
        from fusedblock import ops

        out, lse = ops.dispatched(name, *x.op_args())
        return (out[0], lse[0]) if x.case.packed else (out, lse)

    return run


# The Hopper kernels on the model of an SM; three of them, so that a program has several tiles.
HOPPER = replace(TARGETS["sm_90"], sms=3, skeleton="hopper")
SKELETONS = {"hopper": HOPPER, "short": replace(HOPPER, skeleton="short")}


def at_target(target: str) -> contextlib.AbstractContextManager[Any]:
    if target in SKELETONS:
        return interpret(SKELETONS[target])
    return interpret(TARGETS[target]) if target in TARGETS else contextlib.nullcontext()


def results(case: Case, target: str, run: Callable[[Inputs], Any] = public, layout=lambda t: t) -> dict[str, Tensor]:
    """By the kernels interpreted for a target or as one of SKELETONS, on the GPU ("cuda", same strides), or by the reference
    ("cpu")."""
    x = case.inputs().changed(layout)
    if target == "cuda":
        x = x.changed(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda").copy_(t))
    with at_target("sm_89" if target == "sm_80" and case.dtype is FP8 else target):  # the oldest that has fp8
        got = with_gradients(run, x)
    return {n: t.cpu() for n, t in got.items()}


def error(got: Tensor, want: Tensor) -> float:
    """Relative, over the tensor (of zeros: the root of the mean square); what is not finite must be the same."""
    assert got.shape == want.shape
    got, finite = got.double(), want.isfinite()
    assert torch.equal(got[~finite], want[~finite]), "the places that are not finite differ"
    assert got[finite].isfinite().all(), "not finite where it should be"
    difference = torch.linalg.vector_norm((got - want)[finite])
    size = torch.linalg.vector_norm(want[finite]) if want[finite].any() else want.numel() ** 0.5
    return float(difference / size) if difference else 0.0


def limit(case: Case, name: str, want: Tensor) -> float:
    """fp64 1e-12, fp32 1e-5; fp16 and bf16 1.5 times what plain torch errs, or one rounding of the result where that is more."""
    if case.dtype is torch.float64:
        return 1e-12
    if case.dtype is torch.float32 or name == "lse":
        return 1e-5
    # A gradient of a few numbers is a draw of a lottery: there, the largest error over some inputs.
    seeds = range(5) if want.numel() < 64 else (0,)
    errors = [error(plain(case, seed)[name], exact(case, seed)[name]) for seed in seeds]
    allowed = max(1.5 * max(errors), torch.finfo(plain(case)[name].dtype).eps / 2)
    assert allowed < 0.06, f"{name}: plain torch itself is too wrong to compare with"
    return allowed


def check(case: Case, target: str = "cpu", run: Callable[[Inputs], Any] = public, layout=lambda t: t) -> None:
    """Asserts dtype and values of out, lse and every gradient."""
    x, want = case.inputs(), exact(case)
    got = results(case, target, run, layout)
    assert list(got) == list(want)
    half = torch.bfloat16 if case.dtype is FP8 else case.dtype
    dtypes = {"out": half, "lse": torch.promote_types(half, torch.float32)}
    for name, value in want.items():
        own = x.tensor(name.removeprefix("grad_"))
        assert got[name].dtype == (dtypes[name] if name in dtypes else own.dtype), name
        most, found = limit(case, name, value), error(got[name], value)
        assert found <= most, f"{name} of {case}: error {found:.2e}, at most {most:.2e}"


# ---- lists -------------------------------------------------------------------------------------------------------------------

# One option each, by name; what two of them name apart goes together unless `meaningful` says otherwise.
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (9, 4)},
    "left": {"window": (12, 0)},
    "right": {"window": (-1, 3)},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": True},
    "alibi": {"alibi": "heads"},
    "alibi-batch": {"alibi": "batch"},
    **{f"bias-{b}": {"bias": b} for b in BIASES[:-1]},
    "bias-column": {"bias": "column", "sinks": True},  # without sinks, one number for all keys changes nothing
    **{f"mask-{m}": {"mask": m} for m in MASKS},
    **{f"block-map-{m}": {"block_map": m, "seq": 140, "context": 270} for m in ("both", "heads", "full")},
    "prefix": {"prefix": True, "causal": True},
    "seqused": {"seqused": True, "batch": 4},
    "dropout": {"dropout": 0.3},
    "packed": {"layout": "packed"},
    "paged": {"layout": "paged", "batch": 4},
    "packed-paged": {"layout": "packed-paged"},
    "v-wider": {"head_dim": 24, "v_dim": 40},
    "v-narrower": {"head_dim": 48, "v_dim": 16},
    "mha": {"heads": 2, "kv_heads": 2},
    "mqa": {"heads": 6, "kv_heads": 1},
    "scale": {"scale": 0.1},
    "fp8": {"dtype": FP8},
}
# Of one kind only: two of them are not an option each.
KINDS = ("bias", "mask", "block-map", "alibi", "v-")
# Forms of an option that one other stands for in the short walk of the pairs: they differ in strides alone.
ALIKE = {"left", "alibi-batch", "bias-full", "bias-heads", "bias-both", "bias-column", "mask-padding-added", "block-map-both",
         "block-map-full", "v-narrower", "mha", "scale"}  # fmt: skip
# Small enough to interpret hundreds of.
TINY = {"seq": 20, "context": 35, "heads": 2, "kv_heads": 1, "page": 8,
        "lengths": ((5, 9), (0, 3), (1, 1), (12, 12), (8, 2), (3, 0))}  # fmt: skip


def meaningful(case: Case) -> bool:
    """Whether the combination is one that the function takes; the others raise (REFUSED has one of each)."""
    if (case.packed or case.paged) and (case.mask or case.bias or case.block_map):
        return False
    if case.packed and (case.prefix or case.alibi == "batch" or case.seqused and not case.paged):
        return False
    return not (case.prefix and case.window is not None and case.window[0] >= 0)


def alone(**common: Any) -> list[Case]:
    return [Case(**{**common, **option}) for option in OPTIONS.values()]


def pairs(every: bool = True, **common: Any) -> list[Case]:
    """Two options that go together, each pair once; every: of all options, else without those ALIKE others."""
    found = {}
    names = [name for name in OPTIONS if every or name not in ALIKE]
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            if any(a.startswith(kind) and b.startswith(kind) for kind in KINDS):
                continue
            one, other = OPTIONS[a], OPTIONS[b]
            if any(one[n] != other[n] for n in one.keys() & other.keys() - {"batch", "causal"}):
                continue
            case = Case(**{**common, **one, **other})
            if meaningful(case):
                found[case] = None
    return list(found)


HEAD_DIMS = [
    *((d, 0) for d in (8, 40, 64, 80, 96, 128, 256, 512)), *((192, 128), (576, 512), (8, 256), (128, 64))
]  # fmt: skip
SIZES = [(1, 1), (1, 127), (127, 1), (1, 300), (127, 129), (129, 127), (128, 128), (17, 5), (200, 60), (60, 200)]


def head_dims(dtype: torch.dtype = torch.bfloat16, **common: Any) -> list[Case]:
    return [Case(**{"seq": 20, "context": 70, "batch": 1, "heads": 2, "kv_heads": 1, "causal": True, "head_dim": d, "v_dim": v,
                    "dtype": dtype, **common}) for d, v in HEAD_DIMS]  # fmt: skip


def sizes(**common: Any) -> list[Case]:
    """Odd numbers of queries and keys, causal and not; causal with more queries than keys leaves rows that attend nothing."""
    plain = {"batch": 1, "heads": 2, "kv_heads": 1, **common}
    return [Case(seq=s, context=t, causal=causal, **plain) for s, t in SIZES for causal in (False, True)]

"""Inputs for every op, and the ways to run them beside the formulas they are held to (formulas.py).

A case makes the arguments of one op by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import einsum, repeat
from formulas import FORMULAS, Args
from moe_cases import GPT_OSS, Experts, Projections
from moe_formula import choice_of, choose
from torch import Tensor

from fusedblock.interpret import Launch, interpret
from fusedblock.kernels import _gemm
from fusedblock.kernels._spec import accumulate_dtype
from fusedblock.kernels._target import TARGETS, Target
from fusedblock.ops import OPS

Results = Mapping[str, Tensor]
Make = Callable[[torch.dtype, torch.Generator], Args]
HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALVES)
# Descriptors and masked pointers: the two ways a GEMM reads its operands. With so few SMs every program has several tiles.
PATHS = ("sm_90", "sm_80")
FEW_SMS = {name: replace(target, sms=3) for name, target in TARGETS.items()}
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    op: str
    id: str
    make: Make

    def arguments(self, dtype: torch.dtype, seed: int = 0) -> Args:
        return self.make(dtype, torch.Generator().manual_seed(seed))


def randn(*shape: int, dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def rotary_tables(batch: int, seq: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin `batch seq head_dim`, two equal halves as HF makes them; every batch item has positions of its own."""
    inverse = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    positions = torch.arange(seq, dtype=torch.float64)[None, :] + 3 * torch.arange(batch, dtype=torch.float64)[:, None]
    angles = einsum(positions, inverse, "batch seq, half -> batch seq half")
    angles = repeat(angles, "batch seq half -> batch seq (two half)", two=2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def norm_case(tokens: int, hidden: int, weight_offset: float = 0.0, round_early: bool = True, save: bool = True,
              eps: float = EPS, kind: str = "rms", given: str = "", mean: float = 0.0) -> Case:  # fmt: skip
    """given: the optional arguments; "accurate" makes all but the result fp32 (autocast), "wide" all but x. mean: of x, beside a
    deviation of 1."""

    def make(dtype: torch.dtype, g: torch.Generator) -> Args:
        words, wide = given.split(), accumulate_dtype(dtype)
        x_dtype = wide if "accurate" in words else dtype
        own = wide if "accurate" in words or "wide" in words else dtype
        y_dtype = wide if "wide" in words and "residual" in words else dtype
        x = mean + randn(tokens, hidden, dtype=torch.float64, generator=g)
        return {
            "x": x.to(x_dtype), "weight": randn(hidden, dtype=own, generator=g),
            "bias": randn(hidden, dtype=own, generator=g) if "bias" in words else None,
            "residual": randn(tokens, hidden, dtype=y_dtype, generator=g) if "residual" in words else None,
            "kind": kind, "eps": eps, "weight_offset": weight_offset, "round_early": round_early, "save": save, "dtype": y_dtype,
        }  # fmt: skip

    rounds = f"-offset{weight_offset:g}-{'early' if round_early else 'late'}" if kind == "rms" else f"-mean{mean:g}"
    return Case("norm", f"norm-{kind}-{tokens}x{hidden}{rounds}" + "-" * bool(given) + given.replace(" ", "+"), make)


def layer_norm_case(tokens: int, hidden: int, given: str = "", mean: float = 0.0, save: bool = True) -> Case:
    return norm_case(tokens, hidden, kind="layer", given=given, mean=mean, save=save)


def by_columns(w: Tensor) -> Tensor:
    """The same values, columns dense: the transpose of a Conv1D weight."""
    return w.t().contiguous().t()


def weight(outer: int, inner: int, dtype: torch.dtype, g: torch.Generator, given: str = "") -> Tensor:
    w = randn(outer, inner, dtype=dtype, generator=g, scale=max(inner, 1) ** -0.5)
    return by_columns(w) if "columns" in given.split() else w


def linear_case(tokens: int, inner: int, outer: int, given: str = "", scale: float = 1.0) -> Case:
    """given: the optional arguments; "columns" lays the weight out by them, "wide" gives the residual in fp32."""

    def make(dtype: torch.dtype, g: torch.Generator) -> Args:
        def optional(name: str, *shape: int) -> Tensor | None:
            t = randn(*shape, dtype=dtype, generator=g)
            if name == "residual" and "wide" in given.split():
                t = randn(*shape, dtype=accumulate_dtype(dtype), generator=g)
            return t if name in given.split() else None

        return {
            "x": randn(tokens, inner, dtype=dtype, generator=g),
            "weight": weight(outer, inner, dtype, g, given),
            "bias": optional("bias", outer), "residual": optional("residual", tokens, outer),
            "norm_weight": optional("norm_weight", outer), "scale": scale,
        }  # fmt: skip

    name = f"linear-{tokens}x{inner}x{outer}-{given.replace(' ', '+') or 'plain'}"
    return Case("linear", name + f"-scale{scale:g}" * (scale != 1), make)


def plain_mlp_case(tokens: int, hidden: int, ffn: int, activation: str, given: str = "", save: bool = True) -> Case:
    """given: "bias", and "columns" for a weight laid out by them."""

    def make(dtype: torch.dtype, g: torch.Generator) -> Args:
        return {
            "x": randn(tokens, hidden, dtype=dtype, generator=g), "weight": weight(ffn, hidden, dtype, g, given),
            "bias": randn(ffn, dtype=dtype, generator=g) if "bias" in given.split() else None,
            "activation": activation, "save": save,
        }  # fmt: skip

    name = f"plain_mlp-{tokens}x{hidden}x{ffn}-{activation}"
    return Case("plain_mlp", name + "-" * bool(given) + given.replace(" ", "+"), make)


def qkv_case(batch: int, seq: int, hidden: int, head_dim: int, kv_heads: int, group: int, *, bias: bool = False,
             tables: str = "one", normed: bool = False, rope: str = "half", part: float = 1.0, norm: str = "",
             layout: str = "split") -> Case:  # fmt: skip
    """tables: "one" for all batch items, one for "each", or views of full-width tables as HF's: "view" (two halves, the first)
    or "repeat" (every angle twice). rope: "half", "interleaved" or "", of a part of the head. norm per head: "early" and "late"
    rounded rms (late with an offset), "layer" with weights of each head. layout: of one fused weight, see fused."""
    half = int(head_dim * part) // 2

    def make(dtype: torch.dtype, g: torch.Generator) -> Args:
        heads = {"q": kv_heads * group, "k": kv_heads, "v": kv_heads}
        x = randn(batch, seq, hidden, dtype=dtype, generator=g)
        full = rotary_tables(batch if tables == "each" else 1, seq, 2 * half, accurate(dtype))
        cos, sin = (table_view(t, tables) for t in full)
        weights = [randn(n, head_dim, hidden, dtype=dtype, generator=g, scale=hidden**-0.5) for n in heads.values()]
        biases = [randn(n, head_dim, dtype=dtype, generator=g) for n in heads.values()]
        scales = [randn(n if norm == "layer" else 1, head_dim, dtype=dtype, generator=g) for n in (kv_heads * group, kv_heads)]
        return {
            "x": x,
            **dict(zip(("q_weight", "k_weight", "v_weight"), fused(weights, layout))),
            **dict(zip(("q_bias", "k_bias", "v_bias"), fused(biases, layout) if bias else [None] * 3)),
            **({"cos": cos, "sin": sin} if rope else {"cos": None, "sin": None}),
            "sumsq": sums_of_squares(x, g) if normed else None,
            **dict(zip(("q_norm", "k_norm"), scales if norm else [None] * 2)),
            "interleaved": rope == "interleaved", "norm_kind": "layer" if norm == "layer" else "rms", "eps": EPS,
            "weight_offset": 1.0 if norm == "late" else 0.0, "round_early": norm == "early", "save": bool(norm),
        }  # fmt: skip

    name = f"qkv_rope-{batch}x{seq}x{hidden}-d{head_dim}-{kv_heads * group}:{kv_heads}-{tables}" + "-bias" * bias
    marks = [rope * (rope != "half") or "unturned" * (not rope), f"{part:g}" * (part != 1), norm, layout * (layout != "split")]
    return Case("qkv_rope", "-".join([name + "-normed" * normed, *filter(None, marks)]), make)


def accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def table_view(table: Tensor, kind: str) -> Tensor:
    """cos or sin of two equal halves as `batch seq half`, laid out as kind says."""
    half = table.shape[-1] // 2
    if kind == "repeat":
        return repeat(table[..., :half], "batch seq half -> batch seq (half two)", two=2)[..., ::2]
    return table[..., :half] if kind == "view" else table[..., :half].contiguous()


def fused(tensors: list[Tensor], layout: str) -> list[Tensor]:
    """q, k, v `heads head_dim ...` as views of one tensor: "stacked" one after the other, "per_head" q, k, v of each head in
    turn, "columns" stacked and stored `hidden rows` (of two axes: as stacked); "split": as they are."""
    if layout == "split":
        return tensors
    if layout == "per_head":
        return [*torch.stack(tensors, 1).unbind(1)]
    rows = torch.cat(tensors)
    if layout == "columns" and rows.dim() == 3:
        rows = rows.flatten(0, 1).t().contiguous().t().unflatten(0, rows.shape[:2])
    return [*rows.split([t.shape[0] for t in tensors])]


def rope_case(batch: int, seq: int, head_dim: int, kv_heads: int, group: int, *, tables: str = "one", interleaved: bool = False,
              part: float = 1.0, heads_first: bool = False) -> Case:  # fmt: skip
    """heads_first: q and k are views of `batch heads seq head_dim`."""
    half = int(head_dim * part) // 2

    def make(dtype: torch.dtype, g: torch.Generator) -> Args:
        def states(heads: int) -> Tensor:
            t = randn(batch, seq, heads, head_dim, dtype=dtype, generator=g)
            return t.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else t

        full = rotary_tables(batch if tables == "each" else 1, seq, 2 * half, accurate(dtype))
        cos, sin = (table_view(t, tables) for t in full)
        return {"q": states(kv_heads * group), "k": states(kv_heads), "cos": cos, "sin": sin, "interleaved": interleaved}

    name = f"rope-{batch}x{seq}-d{head_dim}-{kv_heads * group}:{kv_heads}-{tables}" + "-interleaved" * interleaved
    return Case("rope", name + f"-{part:g}" * (part != 1) + "-heads_first" * heads_first, make)


def mlp_case(tokens: int, hidden: int, ffn: int, activation: str = "silu", *, bias: bool = False, normed: bool = False,
             save: bool = True) -> Case:  # fmt: skip
    def make(dtype: torch.dtype, g: torch.Generator) -> Args:
        x = randn(tokens, hidden, dtype=dtype, generator=g)
        return {
            "x": x,
            **{f"{n}_weight": randn(ffn, hidden, dtype=dtype, generator=g, scale=hidden**-0.5) for n in ("gate", "up")},
            **{f"{n}_bias": randn(ffn, dtype=dtype, generator=g) if bias else None for n in ("gate", "up")},
            "sumsq": sums_of_squares(x, g) if normed else None, "activation": activation, "eps": EPS, "save": save,
        }  # fmt: skip

    return Case("gated_mlp", f"gated_mlp-{tokens}x{hidden}x{ffn}-{activation}" + "-bias" * bias + "-normed" * normed, make)


def attention_case(batch: int, seq: int, context: int, kv_heads: int, group: int, head_dim: int, causal: bool,
                   op: str = "attention", shaped: bool = False) -> Case:  # fmt: skip
    """shaped: with a window, softcap, sinks and a bias; attention_cases.py has every option."""

    def make(dtype: torch.dtype, g: torch.Generator) -> Args:
        heads = kv_heads * group
        given = {
            "q": randn(batch, seq, heads, head_dim, dtype=dtype, generator=g),
            **{n: randn(batch, context, kv_heads, head_dim, dtype=dtype, generator=g) for n in "kv"},
            "left": -1, "right": 0 if causal else -1, "softcap": 0.0, "scale": head_dim**-0.5, "dropout_p": 0.0,
            "deterministic": False,
        }  # fmt: skip
        if shaped:
            left = context // 2 if op == "attention" else -1  # split keys are read from where the window begins
            given |= {"left": left, "softcap": 1.5, "sinks": randn(heads, dtype=dtype, generator=g),
                      "bias": randn(1, heads, seq, context, dtype=dtype, generator=g)}  # fmt: skip
        return {n: given.get(n) for n in inspect.signature(OPS[op].launch).parameters}

    name = f"{op}-{batch}x{seq}:{context}-d{head_dim}-{kv_heads * group}:{kv_heads}"
    return Case(op, name + "-causal" * causal + "-shaped" * shaped, make)


def route_case(tokens: int, hidden: int, experts: int, top_k: int, scoring: str = "softmax", given: str = "", *,
               groups: tuple[int, int, str] = (1, 1, "max"), eps: float = 0.0, scale: float = 1.0,
               tile_rows: int = 16) -> Case:  # fmt: skip
    """given: "bias", "correction_bias", "renormalise", and "wide" for logits and weights of fp32. groups: their number, of how
    many experts are chosen, and what a group scores. No token's choice turns on what half precision cannot tell apart."""
    words = given.split()

    def make(dtype: torch.dtype, g: torch.Generator) -> Args:
        out = accumulate_dtype(dtype) if "wide" in words else dtype
        a = {
            "x": randn(100 + 4 * tokens, hidden, dtype=dtype, generator=g),
            "weight": randn(experts, hidden, dtype=dtype, generator=g, scale=1.5 * hidden**-0.5),
            "bias": randn(experts, dtype=dtype, generator=g) if "bias" in words else None,
            "correction_bias": randn(experts, dtype=accurate(dtype), generator=g, scale=0.2) if "correction" in given else None,
            "scoring": scoring, "top_k": top_k, **dict(zip(("groups", "topk_groups", "group_score"), groups)),
            "renormalise": "renormalise" in words, "eps": eps, "scale": scale, "logits_dtype": out, "weights_dtype": out,
            "tile_rows": tile_rows,
        }  # fmt: skip
        logits = a["x"].double() @ a["weight"].double().t() + (0 if a["bias"] is None else a["bias"].double())
        steady = torch.arange(len(logits))
        calm = choose(choice_of(logits, scoring, a["correction_bias"])[1], a)
        for _ in range(20):
            disturbed = logits[steady] + 0.08 * (torch.rand(len(steady), experts, generator=g, dtype=torch.float64) - 0.5)
            found = choose(choice_of(disturbed, scoring, a["correction_bias"])[1], a)
            steady = steady[(found == calm[steady]).all(1)]
        assert len(steady) >= tokens
        return {**a, "x": a["x"][steady][:tokens].contiguous()}

    name = f"moe_route-{tokens}x{hidden}-{top_k}of{experts}-{scoring}" + "-" * bool(given) + given.replace(" ", "+")
    return Case("moe_route", name + f"-{groups[1]}of{groups[0]}{groups[2]}" * (groups[0] > 1), make)


def index_case(tokens: int, top_k: int, experts: int, tile_rows: int = 16, dtype: torch.dtype = torch.int64) -> Case:
    def make(_: torch.dtype, g: torch.Generator) -> Args:
        indices = torch.rand(tokens, experts, generator=g).argsort(1)[:, :top_k].to(dtype)
        return {"indices": indices, "experts": experts, "tile_rows": tile_rows}

    return Case("moe_index", f"moe_index-{tokens}-{top_k}of{experts}-{str(dtype).removeprefix('torch.')}", make)


def moe_case(**words: Any) -> Case:
    """words: of moe_cases.Experts."""
    experts = Experts(**words)
    return Case("moe_experts", experts.id, experts.make)


def moe_linear_case(**words: Any) -> Case:
    """words: of moe_cases.Projections."""
    projections = Projections(**words)
    return Case("moe_linear", projections.id, projections.make)


def sums_of_squares(x: Tensor, g: torch.Generator) -> Tensor:
    """Partial sums of squares in three tiles, not those of x itself: a kernel that recomputed them would be found out."""
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    return x.shape[-1] * (0.2 + torch.rand(*x.shape[:-1], 3, generator=g, dtype=torch.float64)).to(dtype)


# Small and ragged, every argument given somewhere: for what needs one pass over all ops.
SMALL = (
    norm_case(5, 24),
    norm_case(3, 40, 1.0, False),
    linear_case(5, 24, 40, "bias residual"),
    linear_case(19, 40, 24),
    qkv_case(2, 3, 24, 16, 1, 2, bias=True, tables="each"),
    qkv_case(1, 5, 40, 24, 1, 1),
    qkv_case(2, 3, 24, 16, 1, 2, tables="repeat", rope="interleaved", part=0.5, norm="late"),
    qkv_case(1, 5, 24, 24, 2, 1, bias=True, tables="view", part=0.25, norm="layer", layout="per_head"),
    qkv_case(2, 3, 40, 16, 2, 2, rope="", norm="early", layout="columns"),
    qkv_case(1, 3, 24, 16, 2, 1, bias=True, rope="", layout="stacked"),
    rope_case(2, 3, 16, 1, 2, tables="each"),
    rope_case(1, 5, 24, 2, 1, tables="repeat", interleaved=True, part=0.5, heads_first=True),
    mlp_case(5, 24, 40, "silu", bias=True),
    mlp_case(19, 40, 24, "gelu_tanh"),
    attention_case(2, 5, 7, 1, 2, 16, True),
    attention_case(1, 3, 9, 2, 1, 24, False),
    attention_case(2, 4, 7, 1, 2, 16, True, shaped=True),
    linear_case(19, 40, 24, "bias residual wide columns", 0.25),
    plain_mlp_case(5, 24, 40, "gelu", "bias"),
    plain_mlp_case(19, 40, 24, "relu2", "columns"),
    layer_norm_case(5, 24, "bias residual"),
    layer_norm_case(3, 40, mean=3.0),
    norm_case(3, 40, 1.0, False, given="residual wide"),
    route_case(5, 24, 6, 2, "softmax", "bias", scale=1.5),
    route_case(19, 40, 12, 3, "sigmoid", "correction_bias renormalise wide", groups=(4, 2, "top2"), eps=1e-20, scale=2.5),
    # Every token chooses every expert: shapes alone tell what is read.
    moe_case(tokens=5, experts=3, top_k=3, bias=True, weights=torch.float32),
    moe_case(tokens=1, experts=3, top_k=3, **GPT_OSS),
    moe_linear_case(tokens=5, experts=3, top_k=3, heads=2, sums=True, given="bias out_bias residual wide"),
    moe_linear_case(tokens=5, experts=3, top_k=3, heads=5, given="bias transposed"),
)
# Those whose arguments have no gradients.
FORWARD_ONLY = (
    linear_case(19, 40, 24, "bias residual norm_weight"),
    qkv_case(2, 3, 24, 16, 1, 2, normed=True),
    mlp_case(19, 40, 24, normed=True, save=False),
    attention_case(2, 3, 150, 2, 2, 24, True, "decode_attention"),
    attention_case(2, 2, 150, 1, 4, 24, True, "decode_attention", shaped=True),
    plain_mlp_case(19, 40, 24, "relu", "bias columns", save=False),
    layer_norm_case(3, 40, "bias accurate", save=False),
    index_case(19, 3, 12),
    index_case(150, 2, 5, dtype=torch.int32),
)


# ---- running ---------------------------------------------------------------------------------------------------------------


def to(args: Args, dtype: torch.dtype | None = None, device: Any = None) -> Args:
    """args with every floating tensor in dtype, on device; values as they were rounded before."""

    def move(v: Any) -> Any:
        if not isinstance(v, Tensor):
            return v
        return v.to(device=device, dtype=dtype if v.is_floating_point() else None)

    return {n: move(v) for n, v in args.items()}


def differentiable(op: str, args: Args) -> list[str]:
    """Names of the given arguments that the op has gradients for."""
    backward = OPS[op].backward
    assert backward is not None
    names = [*(w.removeprefix("grad_") for w in backward.spec.writes), *OPS[op].passthrough]
    return [n for n in names if args[n] is not None]


def call(op: str, args: Args) -> dict[str, Tensor]:
    """Results by name, through the dispatcher; those that are absent left out."""
    out = getattr(torch.ops.fusedblock, op).default(*args.values())
    results = dict(zip(OPS[op].spec.writes, (out,) if isinstance(out, Tensor) else out))
    return {n: t for n, t in results.items() if OPS[op].spec.writes[n].when(args)}


def result_gradient(name: str, result: Tensor, seed: int = 7) -> Tensor:
    """What comes back for a result: the same values whatever its dtype, once they are rounded to fp16 and bf16 alike."""
    g = torch.Generator().manual_seed(seed + len(name))
    values = (torch.randn(result.shape, generator=g, dtype=torch.float64) * 32).round() / 32
    return values.to(dtype=result.dtype, device=result.device)


def with_gradients(op: str, args: Args, run: Callable[[str, Args], dict[str, Tensor]] = call) -> dict[str, Tensor]:
    """Results and the gradients of differentiable arguments, as "grad_<argument>"."""
    names = differentiable(op, args)
    leaves = {n: args[n].detach().requires_grad_() for n in names}
    results = run(op, {**args, **leaves})
    wanted = {n: t for n, t in results.items() if t.requires_grad and f"grad_{n}" in _backward_takes(op)}
    grads = torch.autograd.grad([*wanted.values()], [*leaves.values()], [result_gradient(n, t) for n, t in wanted.items()])
    return {n: t.detach() for n, t in results.items()} | {f"grad_{n}": g for n, g in zip(names, grads)}


def _backward_takes(op: str) -> Mapping[str, str]:
    backward = OPS[op].backward
    assert backward is not None
    return backward.spec.reads


def formula(op: str, args: Args) -> dict[str, Tensor]:
    return FORMULAS[op](args)


def backward_arguments(op: str, args: Args, needs: bool | Mapping[str, bool] = True) -> Args:
    """Arguments of op's backward op, from a forward by the op's reference; needs: which gradients are wanted."""
    backward = OPS[op].backward
    assert backward is not None
    results = dict(zip(OPS[op].spec.writes, OPS[op].reference(**args)))
    results = {n: t if OPS[op].spec.writes[n].when(args) else None for n, t in results.items()}
    known = {**args, **results, **{f"grad_{n}": result_gradient(n, t) for n, t in results.items() if t is not None}}
    for n, given in args.items():
        known[f"need_{n}"] = given is not None and (needs if isinstance(needs, bool) else needs[n])
    return {n: known[n] for n in inspect.signature(backward.launch).parameters}


def comparable(results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Partial sums have as many tiles as the config has: their total is what counts."""
    return {n: t.double().sum(-1) if n == "sumsq" and t.dim() == 2 else t for n, t in results.items()}


def error(got: Tensor, want: Tensor) -> float:
    """Relative error in the 2-norm."""
    assert got.shape == want.shape
    difference = torch.linalg.vector_norm(got.double() - want)
    return float(difference / torch.linalg.vector_norm(want.double())) if difference else 0.0


def assert_accurate(got: Results, want: Results, plain: Results, dtype: torch.dtype) -> None:
    """fp32 within 1e-5 of float64; fp16 and bf16 at most 1.5 times as far from it as plain torch in the same dtype."""
    got, plain = comparable(got), comparable(plain)
    assert [*got] == [*want]
    for name, value in want.items():
        limit = {torch.float64: 1e-12}.get(dtype, 1e-5)
        e = error(got[name], value)
        if dtype in HALVES:  # statistics are fp32 there too: their own rounding stays within fp32's limit
            allowed = 1.5 * error(plain[name], value)
            assert allowed < 0.1, f"{name}: plain torch itself is off by {allowed / 1.5:.2g}"
            limit = allowed if got[name].dtype == dtype else max(limit, allowed)
        assert e <= limit, f"{name}: error {e:.3g}, allowed {limit:.3g}"


@contextmanager
def recording(target: str | Target) -> Iterator[list[Launch]]:
    """Interpret for target, and list the launches."""
    launches: list[Launch] = []
    with interpret(FEW_SMS[target] if isinstance(target, str) else target, on_launch=[launches.append]):
        yield launches


def check(case: Case, dtype: torch.dtype, target: str, gradients: bool = True, args: Args | None = None) -> list[Launch]:
    """Compare every result (and gradient) of the interpreted kernels with float64. Returns the launches."""
    args = case.arguments(dtype) if args is None else args
    run = with_gradients if gradients else (lambda op, a, run=call: run(op, a))
    with recording(target) as launches:
        got = run(case.op, args)
    want = run(case.op, to(args, torch.float64), formula)
    plain = run(case.op, args)
    want = {n: t for n, t in want.items() if n in got}
    assert_accurate(got, want, plain, dtype)
    assert launches, "no kernel ran"
    return launches


@contextmanager
def only_config(config: _gemm.Config) -> Iterator[None]:
    """Every GEMM uses this config, whatever its size."""
    before = _gemm.tables
    _gemm.tables = lambda itemsize, target: {kind: ((1 << 62, config),) for kind in ("nt", "pair", "nn", "tn")}
    try:
        yield
    finally:
        _gemm.tables = before

"""The launches of a layer, chosen by a pure function.

The layer executes the plan, `explain` prints it and `measure` costs what it launches: there is no second description.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from fusedblock.ops import (
    Choice,
    DecodeProblem,
    Skeleton,
    Target,
    choose,
    choose_tile_rows,
    decode_launches,
    form,
    route_launches,
    skeleton,
)

# Up to this many rows the second norm rides on its neighbours' epilogues. Beyond, its own launch is cheaper: at 4096 rows of an
# 8B layer it takes 19 us on an H200, the statistics in the epilogues 90 us (2026-11-29).
STATISTICS_ROWS = 64


@dataclass(frozen=True)
class BlockSpec:
    """Sizes and numerics of a transformer layer. No tensors, no model names.

    hidden, ffn: widths. heads, kv_heads, head_dim: attention. scale: of the logits. eps: of all norms.
    activation: "silu", "gelu", "gelu_tanh", "relu" or "relu2".
    norm: "rms" or "layer"; weight_offset and round_early: see fusedblock.rms_norm.
    residual: "sequential" (x + attention, then + MLP of the sum), "parallel" (both branches read x) or "post" (the norms after
    a branch follow the addition; otherwise they precede it). branch_scale multiplies both branches.
    qkv_layout: "split", or one weight of rows "stacked" (q, k, v) or "per_head" (heads, then q, k, v of each).
    transposed: weights are `in_features out_features`.
    qk_norm: "", "head" (each head by itself) or "full" (all heads together), before rope.
    rope: "", "half" or "interleaved". tables: how cos and sin repeat columns: "halves", "repeat" (each twice), "short" (no).
    mlp: "gated", "gated_stacked" (one weight, rows of gate, then of up), "plain" (two layers) or "mixture" (of `experts`, of
    which every token has `top_k`; shared: "", "plain" or "gated", the expert that all have; wide_router: the router is in fp32,
    whatever the rest; experts_transposed: their weights are): the layer is then sequential, its numbers beside these are a
    MoeSpec's, and ffn is 0.
    norms: those of attn_norm, attn_out_norm, mlp_norm and mlp_out_norm that the layer has, in this order.
    softcap: the logits are softcap * tanh(logits / softcap); 0: as they are.
    window_left, window_right: how many keys before and after its own a query sees; -1: all. A causal call has none after.
    """

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    eps: float
    activation: str = "silu"
    weight_offset: float = 0.0
    round_early: bool = True
    norm: str = "rms"
    residual: str = "sequential"
    branch_scale: float = 1.0
    qkv_layout: str = "split"
    transposed: bool = False
    qk_norm: str = ""
    rope: str = "half"
    tables: str = "halves"
    mlp: str = "gated"
    norms: str = "attn_norm mlp_norm"
    softcap: float = 0.0
    window_left: int = -1
    window_right: int = -1
    experts: int = 0
    top_k: int = 0
    shared: str = ""
    wide_router: bool = False
    experts_transposed: bool = False


@dataclass(frozen=True)
class Launch:
    """One step of a layer: the registered op, its part in the layer, what runs it, why it was chosen, what would change that."""

    op: str
    role: str
    engine: str
    why: str
    kernels: int = 1  # GPU launches it makes
    changes: str = ""


@dataclass(frozen=True)
class Plan:
    launches: tuple[Launch, ...]
    row_statistics: bool  # the second norm rides on its neighbours' epilogues
    decode: bool  # split-KV attention

    @property
    def kernels(self) -> int:
        """GPU launches of one forward."""
        return sum(step.kernels for step in self.launches)

    def __str__(self) -> str:
        width = max(len(step.role) for step in self.launches)
        lines = []
        for s in self.launches:
            lines.append(f"{s.role:{width}}  {s.op:16} {s.engine:6}  {s.why}")
            if s.changes:
                lines.append(f"{'':{width}}  otherwise: {s.changes}")
        return "\n".join(lines)


def _why_apart(spec: BlockSpec, rows: int, dtype: torch.dtype, training: bool, autocast: bool, own: tuple[str, ...],
               target: Target) -> str | None:  # fmt: skip
    """Why the norm before the MLP is a launch of its own; None where it rides on its neighbours' epilogues."""
    if spec.norm != "rms" or spec.residual != "sequential" or spec.norms != "attn_norm mlp_norm" or (
        spec.mlp in ("plain", "mixture")
    ):
        return "row sums ride only on a pre-norm layer with RMSNorm and a gated MLP"
    if target.batch_invariant:
        return "batch_invariant"
    if training:
        return "training keeps the normalised rows for the weight gradients"
    if own:
        return "a linear layer runs itself"
    if autocast:
        return "autocast: the residual stream has another dtype"
    if dtype is torch.float16:
        return "fp16 range"  # out * norm_weight has no bounded range
    if spec.weight_offset:
        return "weight offset"
    return f"more than {STATISTICS_ROWS} rows" if rows > STATISTICS_ROWS else None


def _attention(spec: BlockSpec, choice: Choice, masked: bool, kernels: int) -> Launch:
    kind = f", softcap {spec.softcap:g}" if spec.softcap else ""
    if spec.window_left >= 0 or spec.window_right >= 0:
        sides = [f"{n} {side}" for n, side in ((spec.window_left, "before"), (spec.window_right, "after")) if n >= 0]
        kind += f", keys up to {' and '.join(sides)}" + (" if no mask of 4 axes says so" if masked else ": the rest is not read")
    return Launch(choice.op, "attention", choice.engine, choice.why + kind, kernels=kernels, changes=choice.changes)


def _skeleton(spec: BlockSpec, seq: int, context: int, dtype: torch.dtype, target: Target, masked: bool, packed: bool,
              backward: bool = False, deterministic: bool = False) -> Skeleton:  # fmt: skip
    """What runs attention where its rows suit TMA, as those of a layer do."""
    keys = context if spec.window_left < 0 else min(context, spec.window_left + 1 + max(spec.window_right, 0))
    given = {"mask": masked, "softcap": spec.softcap, "cu_seqlens_q": packed, "deterministic": backward and deterministic}
    options = frozenset(name for name, value in given.items() if value)
    return skeleton(target=target, dtype=dtype, head_dim=spec.head_dim, v_dim=spec.head_dim, queries=seq, keys=keys,
                    context=context, backward=backward, options=options)  # fmt: skip


_FORMS = {
    "vector": "sums over rows of the chosen experts' weights",
    "few": "the second product also sums over a token's experts",
    "grouped": "two products by expert, then the sum over a token's experts",
}


def plan_mixture(
    experts: int, top_k: int, shared: str, wide_router: bool, transposed: bool, *, tokens: int, dtype: torch.dtype,
    target: Target,
) -> Plan:
    """What a mixture launches that is a module of its own: see `BlockSpec` for the numbers."""
    return Plan(tuple(_mixture(experts, top_k, shared, wide_router, transposed, tokens, dtype, target, "")), False, False)


def _mixture(experts: int, top_k: int, shared: str, wide_router: bool, transposed: bool, tokens: int, dtype: torch.dtype,
             target: Target, adds: str) -> list[Launch]:  # fmt: skip
    """Router, experts and shared expert. adds: what the experts' sum is added to besides."""
    tile_rows = choose_tile_rows(tokens, top_k, experts, dtype.itemsize, target)
    how = form(tokens, tile_rows, transposed, target)
    router = route_launches(tokens, experts, 4 if wide_router else dtype.itemsize, target)
    steps = [Launch("module", "router's rows", "torch", "to fp32, in which the router is")] if wide_router else []
    steps += [
        Launch("moe_route", "router", "triton", f"{top_k} of {experts} experts, and the index of their tokens", router),
        Launch("moe_experts", "experts", "triton", _FORMS[how] + adds, 3 if how == "grouped" else 2),
    ]
    if shared:
        steps.append(Launch("gated_mlp", "shared expert", "triton", "both products and the activation"))
        if shared == "gated":
            steps += [Launch("linear", "shared expert's gate", "triton", "one number a token"),
                      Launch("module", "shared expert's gate", "torch", "sigmoid, and its product", kernels=2)]  # fmt: skip
        steps.append(Launch("linear", "shared expert's down", "triton", "adds the experts' sum"))
    return steps


@functools.lru_cache(maxsize=4096)
def plan(
    spec: BlockSpec, *, batch: int, seq: int, context: int, dtype: torch.dtype, training: bool, target: Target,
    masked: bool = False, packed: bool = False, autocast: bool = False, own: tuple[str, ...] = (), deterministic: bool = False,
) -> Plan:  # fmt: skip
    """What one layer launches for x `batch seq hidden` over `context` keys.

    training: gradients are wanted. masked: an explicit mask comes with the call. packed: boundaries of sequences do. autocast:
    the residual stream is of another dtype than the products. own: weights of the linear layers that run themselves (adapters).
    deterministic: gradients of equal bits are wanted. Pure: equal arguments give an equal plan.
    """
    symbolic = torch.compiler.is_compiling() or any(isinstance(n, torch.SymInt) for n in (batch, seq, context))
    forward = None if symbolic else _skeleton(spec, seq, context, dtype, target, masked, packed)
    backward = None
    if training and not symbolic:
        backward = _skeleton(spec, seq, context, dtype, target, masked, packed, True, deterministic)
    choice = choose(seq=seq, group=spec.heads // spec.kv_heads, target=target, dtype=dtype, training=training, packed=packed,
                    masked=masked, forward=forward, backward=backward)  # fmt: skip
    alone = _why_apart(spec, batch * seq, dtype, training, autocast, own, target)
    statistics = alone is None
    rows = "one row a program, statistics in fp32"
    norms = spec.norms.split()

    def norm(role: str, why: str = rows, changes: str = "") -> Launch:
        return Launch("norm", role, "triton", why, changes=changes)

    def modules(role: str, why: str, *names: str) -> list[Launch]:
        """The linear layers that run themselves, and those beside them that therefore run unfused."""
        found = [name for name in names if name in own]
        return [Launch("module", role, "torch", f"{' and '.join(found)} with an adapter: {why}", kernels=len(names))]

    def output(role: str, name: str, out_norm: str, sums: str = "") -> list[Launch]:
        """The linear layer that ends a branch, and the norm that follows it."""
        if name in own:
            last = [norm(f"norm after {role}")] if out_norm in norms else []
            return modules(role, "then the residual", name) + last
        if out_norm not in norms:
            return [Launch("linear", role, "triton", "adds the residual" + sums)]
        if spec.residual == "post":
            return [Launch("linear", role, "triton", "adds the residual"), norm(f"norm after {role}")]
        after = norm(f"norm after {role}", "adds the residual to the normalised row")
        return [Launch("linear", role, "triton", "rounds once"), after]

    steps = [norm("input norm")] if "attn_norm" in norms else []
    parts = ", norm of each head" if spec.qk_norm == "head" else ""
    turns = " and rotary embedding" if spec.rope and spec.qk_norm != "full" else ""
    weights = {"split": "no packed weight copy", "stacked": "one weight", "per_head": "one weight, rows by head"}[spec.qkv_layout]
    apart = spec.qk_norm == "full"
    if any(name in own for name in ("q", "k", "v")):
        names = ("q", "k", "v") if spec.qkv_layout == "split" else ("q",)
        steps += modules("q, k, v", "projections by themselves", *names)
        apart = True
    else:
        steps.append(Launch("qkv_rope", "q, k, v", "triton", f"three projections{parts}{turns}, {weights}"))
    if apart and spec.qk_norm:
        over = "over all heads" if spec.qk_norm == "full" else "over each head"
        steps += [norm("q norm", over), norm("k norm", over)]
    if apart and spec.rope:
        steps.append(Launch("rope", "rotary embedding", "triton", "q and k in one launch"))
    kernels = 1
    if packed and not choice.splits:
        kernels = 3 if choice.engine == "gluon" else 2  # with their tables of tiles
    elif choice.splits and symbolic:
        kernels = 2  # a trace for any length: counting the splits would tie it to this one
    elif choice.splits:
        p = DecodeProblem(batch, seq, spec.heads, spec.kv_heads, context, spec.head_dim, spec.head_dim, dtype.itemsize,
                          per_row=int(masked and seq > 1), left=spec.window_left)  # fmt: skip
        kernels = decode_launches(p, target)
    steps.append(_attention(spec, choice, masked, kernels))
    steps += output("attention output", "o", "attn_out_norm", "; leaves the second norm's row sums" if statistics else "")
    if "mlp_norm" in norms and not statistics:
        rides = "" if spec.mlp in ("plain", "mixture") or spec.norm != "rms" else (
            f"without gradients, in bf16 or fp32, {STATISTICS_ROWS} rows or fewer: a row scale in the next epilogue")  # fmt: skip
        steps.append(norm("MLP norm", f"{rows} (not in an epilogue: {alone})", rides))
    if spec.mlp == "mixture":
        tokens = 1024 if symbolic else batch * seq  # a trace for any length has the launches of many
        steps += _mixture(spec.experts, spec.top_k, spec.shared, spec.wide_router and not autocast, spec.experts_transposed,
                          tokens, dtype, target, "" if autocast else ", and the residual")  # fmt: skip
        steps += [Launch("module", "residual", "torch", "autocast: it has another dtype")] if autocast else []
        return Plan(tuple(steps), statistics, choice.splits)
    if "gate" in own or "up" in own:
        steps += modules("MLP", "then the activation", *(("gate", "up") if spec.mlp == "gated" else ("up",)))
    elif spec.mlp == "plain":
        steps.append(Launch("plain_mlp", "first MLP layer", "triton", "the activation in the epilogue"))
    else:
        scale = "the norm is a row scale in its epilogue; " if statistics else ""
        steps.append(Launch("gated_mlp", "gate and up", "triton", scale + "both products and the activation"))
    steps += output("down", "down", "mlp_out_norm")
    return Plan(tuple(steps), statistics, choice.splits)

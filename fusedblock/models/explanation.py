"""Which kernels a model's layers would launch for a workload, why those, and what would change it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .. import blocks
from ..ops import deterministic, target_of
from .adapter import OURS, implementation_of, mask_comes
from .alone import bind_block
from .binding import Binding, BlockBinding, bind
from .report import Explanation, LayerExplanation
from .swap import STATE, FusedLayer, FusedMixture, decoder_layers, dropouts, expert_blocks, falls_back, falls_back_now, refusal

PHASES = ("prefill", "decode", "train")
_UNFUSED = "not fused; call fusedblock.fuse(model) first"


@dataclass(frozen=True)
class Workload:
    """One call of a model: `batch` sequences of `seq` new tokens, `context` keys to attend to each."""

    phase: str
    batch: int
    seq: int
    context: int

    def __str__(self) -> str:
        name = "training" if self.phase == "train" else self.phase
        over = f" over {self.context}" if self.seq != self.context else ""
        return f"{name}, {self.batch} x {self.seq}{over}"

    def keys(self, window: int | None) -> int:
        """How many of the keys the call has before it: a cache of a layer with a window has dropped those that none sees."""
        return self.context if window is None or self.seq == self.context else min(self.context, window - 1 + self.seq)


def workloads(phase: str | None, batch: int, seq: int | None, context: int) -> list[Workload]:
    """The workload of a phase, or of each for None. Raises ValueError naming the argument."""
    if phase is not None and phase not in PHASES:
        raise ValueError(f"explain: phase is {phase!r}, expected one of {', '.join(PHASES)}, or None for all")
    for name, value in (("batch", batch), ("seq", seq), ("context", context)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"explain: {name} is {value!r}, expected a positive integer")
    made = []
    for name in (phase,) if phase else PHASES:
        tokens = seq or (1 if name == "decode" else context)
        if tokens > context or (name == "train" and tokens != context):
            expected = f"seq {context}, as many as the context" if name == "train" else f"at most the context, {context}"
            raise ValueError(f"explain: seq is {tokens}, {name} expects {expected}")
        made.append(Workload(name, batch, tokens, context))
    return made


def require_cache(caller: str, phase: str, seq: int, context: int, layer: nn.Module, attention: Any) -> None:
    """Raises ValueError if the workload has cached keys and the layer attends both ways."""
    if (context > seq or phase == "decode") and not attention.is_causal:
        where = "phase='decode'" if phase == "decode" else f"context={context} with seq={seq}"
        raise ValueError(f"{caller}: {where}, but {type(layer).__name__} attends both ways: it has no cache")


def explain(model: nn.Module, *, batch: int = 1, seq: int | None = None, context: int = 2048,
            phase: str | None = None) -> Explanation:  # fmt: skip
    """Which kernels each fused layer launches for a workload, why, and what would change it; what falls back, and why.

    Args:
        model: a fused model, or one fused layer; of layers that are not fused it says only why, or to fuse them. Plans are for
            the device of its parameters; on the CPU, for an H200. They follow the options in force (batch_invariant).
        batch: sequences.
        seq: tokens of each in one call; None: context, in decode 1.
        context: keys to attend to.
        phase: "prefill", "decode", "train", or None for each of them but an encoder's decode.

    What a cache launches to take the new keys and values is the cache's own and not counted. A dropout rate above 0 means that
    training runs the original forward: the explanation names it and has no plan for training. The attention implementation is
    the one that the layer's config names: under another than "fusedblock", windows and what else transformers says by masks
    come as masks (those of calls without padding are told), and where it lacks something the original forward runs. Raises
    ValueError naming the argument, for cached keys in a layer that attends both ways, or if the model has no supported layer.
    """
    wanted = workloads(phase, batch, seq, context)
    explanations, target = [], None
    for entry in decoder_layers(model):
        attention = dict(entry.layer.named_modules()).get(entry.spec.attention) if entry.spec else None
        asked = wanted
        if not getattr(attention, "is_causal", True):
            asked = [w for w in wanted if phase or w.phase != "decode"]
            for w in asked:
                require_cache("explain", w.phase, w.seq, w.context, entry.layer, attention)
        fused = isinstance(entry.layer, FusedLayer)
        record = entry.record("fused" if fused else "fallback", "")
        bound: Binding | str = ""
        if entry.spec is None or not fused:
            reason = refusal(entry.layer, entry.spec) or _UNFUSED
        else:
            reason = falls_back_now(entry.layer, entry.spec)
            if not reason:
                bound = bind(entry.layer, entry.spec)
            record = replace(record, calls=entry.layer.__dict__[STATE].calls)
        record = replace(record, status="fallback" if reason else "fused", reason=reason)
        plans: tuple[tuple[str, blocks.Plan], ...] = ()
        training = mask = ""
        if entry.spec and not reason and not isinstance(bound, str):
            target = target_of(bound.weights.q.device)
            record = replace(record, dropout=dropouts(entry.layer, entry.spec))
            if record.dropout and any(w.phase == "train" for w in asked):
                training, asked = record.dropout, [w for w in asked if w.phase != "train"]
            plans = tuple(_plans(bound, asked, target))
            mask = _masked(bound, asked)
        explanations.append(LayerExplanation(record, plans, training, mask))
    alone = []
    for found in expert_blocks(model):
        fused = isinstance(found.layer, FusedMixture)
        reason = falls_back(found.layer, found.spec) if fused else refusal(found.layer, found.spec) or _UNFUSED
        block = reason or bind_block(found.layer, found.spec)
        entered = found.record("fallback" if reason else "fused", reason)
        if fused:
            entered = replace(entered, calls=found.layer.__dict__[STATE].calls)
        made: tuple[tuple[str, blocks.Plan], ...] = ()
        if isinstance(block, BlockBinding):
            target = target_of(block.mixture.weights.router.device)
            made = tuple(_block_plans(block, wanted, target))
        alone.append(LayerExplanation(entered, made))
    name = "" if target is None else target.name + (", batch_invariant" if target.batch_invariant else "")
    return Explanation(tuple(explanations), name, tuple(alone))


def _attention(bound: Binding) -> tuple[str, int | None]:
    """(The attention implementation that the layer's config names; its window, the token itself included, or None.)"""
    window = bound.spec.window_left
    return implementation_of(bound), window + 1 if window >= 0 else None


def _mask_comes(bound: Binding, w: Workload) -> bool:
    implementation, window = _attention(bound)
    return mask_comes(implementation, bound.attention.is_causal, window, w.seq, w.keys(window))


def _masked(bound: Binding, asked: list[Workload]) -> str:
    """In which of the workloads a mask comes, and what that costs; or ""."""
    implementation, window = _attention(bound)
    masked = [w for w in asked if _mask_comes(bound, w)]
    if not masked:
        return ""
    phases = " and ".join("training" if w.phase == "train" else w.phase for w in masked)
    if window is not None and any(w.keys(window) > window for w in masked):  # a cache hands over no more than are in reach
        what = f"the window comes as a mask, and the keys it hides are read; attn_implementation='{OURS}' skips them"
    else:
        what = f"a mask comes with the call; attn_implementation='{OURS}' needs none without padding"
    return f"under {implementation} attention, in {phases}: {what}"


def _plans(bound: Binding, asked: list[Workload], target: Any) -> Iterator[tuple[str, blocks.Plan]]:
    dtype = bound.weights.q.dtype
    implementation, window = _attention(bound)
    spec = bound.spec if implementation == OURS else replace(bound.spec, window_left=-1, window_right=-1)  # the mask has it
    for w in asked:
        yield f"{w}, {str(dtype).removeprefix('torch.')}", blocks.plan(
            spec, batch=w.batch, seq=w.seq, context=w.keys(window), dtype=dtype, training=w.phase == "train", target=target,
            masked=_mask_comes(bound, w), own=tuple(bound.own), deterministic=deterministic(),
        )  # fmt: skip


def _block_plans(bound: BlockBinding, asked: list[Workload], target: Any) -> Iterator[tuple[str, blocks.Plan]]:
    spec, weights = bound.mixture.spec, bound.mixture.weights
    dtype, shared = weights.gate_up.dtype, "plain" if weights.shared_gate is not None else ""
    for w in asked:
        yield f"{w}, {str(dtype).removeprefix('torch.')}", blocks.plan_mixture(
            weights.router.shape[0], spec.router.top_k, shared, blocks.wide_router(weights), spec.transposed,
            tokens=w.batch * w.seq, dtype=dtype, target=target)  # fmt: skip

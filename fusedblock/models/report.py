"""What `fuse` did, and what the fused layers have done since: values that print themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..blocks import Plan


@dataclass
class Calls:
    """Calls of one fused layer. They go on while the model runs; calls inside a graph of torch.compile are not counted.

    Attributes:
        fused: calls that ran the kernels.
        fallbacks: reason -> calls that ran the original forward.
    """

    fused: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class LayerRecord:
    """What `fuse` did to one layer.

    Attributes:
        name: its path in the model.
        index: its place in the list of layers that holds it.
        layer_class: name of its original class.
        status: "fused"; "already fused" by an earlier call; "fallback": it keeps its original forward; or "skipped" on request.
        reason: why it is not fused; or, of a fused layer, why its calls would fall back as it is now; else empty.
        calls: its calls since it was fused.
        dropout: of a fused layer, the rates above 0 ("attn.attn_dropout=0.1"): its calls in training run the original forward.
    """

    name: str
    index: int
    layer_class: str
    status: str
    reason: str
    calls: Calls = field(default_factory=Calls)
    dropout: str = ""


@dataclass(frozen=True)
class BlockRecord(LayerRecord):
    """Likewise of a block of experts that is fused alone, in a layer that is not: name and layer_class are the block's, index the
    layer's."""


def ranges(indices: Iterable[int]) -> str:
    """Of 0, 1, 2, 3, 7: "0-3, 7"."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _counts(records: Iterable[LayerRecord]) -> list[str]:
    records = list(records)
    reasons: Counter[str] = Counter()
    for record in records:
        reasons.update(record.calls.fallbacks)
    lines = [f"calls: {sum(r.calls.fused for r in records)} fused, {sum(reasons.values())} fallback"]
    lines += [f"    {count} x {reason}" for reason, count in reasons.most_common()]
    return lines


@dataclass(frozen=True)
class FusionReport:
    """What `fuse` did to each layer, and to blocks of experts in layers that wait for something else. Prints as a summary, with
    the calls made until then."""

    layers: tuple[LayerRecord, ...]
    blocks: tuple[BlockRecord, ...] = ()

    def having(self, *status: str) -> tuple[LayerRecord, ...]:
        """The layers of these statuses."""
        return tuple(record for record in self.layers if record.status in status)

    @property
    def fused(self) -> int:
        """Layers that are fused now, by this call or an earlier one."""
        return len(self.having("fused", "already fused"))

    @property
    def fused_blocks(self) -> int:
        """Blocks of experts that are fused alone now."""
        return sum(record.status in ("fused", "already fused") for record in self.blocks)

    @property
    def records(self) -> tuple[LayerRecord, ...]:
        """Of layers, then of blocks."""
        return (*self.layers, *self.blocks)

    @property
    def fused_calls(self) -> int:
        """Calls of any layer or block that ran the kernels, until now."""
        return sum(record.calls.fused for record in self.records)

    @property
    def fallback_calls(self) -> int:
        """Calls of any layer or block that ran the original forward, until now."""
        return sum(self.fallbacks.values())

    @property
    def fallbacks(self) -> Counter[str]:
        """Reason -> calls of any layer or block that ran the original forward for it."""
        found: Counter[str] = Counter()
        for record in self.records:
            found.update(record.calls.fallbacks)
        return found

    @property
    def counts(self) -> str:
        """How many layers, and blocks of experts alone, are fused now, in words."""
        alone = f", and {self.fused_blocks} of {len(self.blocks)} blocks of experts alone" if self.blocks else ""
        return f"{self.fused} of {len(self.layers)} layers fused{alone}"

    def __str__(self) -> str:
        lines = [self.counts]
        groups: dict[tuple[str, str, str, str], list[int]] = {}
        for record in self.records:
            groups.setdefault((record.layer_class, record.status, record.reason, record.dropout), []).append(record.index)
        for (layer_class, status, reason, dropout), indices in groups.items():
            why = f", {'but ' if 'fused' in status else ''}{reason}" if reason else ""
            lines.append(f"  {layer_class} {ranges(indices)}: {status}{why}")
            if dropout:
                lines.append(f"    training calls run the original forward: {dropout}")
        lines += [f"  {line}" for line in _counts(self.records)]
        return "\n".join(lines)


@dataclass(frozen=True)
class LayerExplanation:
    """One layer as it is now (record.reason: why the original forward runs) and the plan of each workload, if fused.

    training: the dropout rates for which training runs the original forward, and has no plan; "" if it was not asked for.
    mask: what comes to the layer as a mask because its config names another attention than "fusedblock", or "".
    """

    record: LayerRecord
    plans: tuple[tuple[str, Plan], ...]
    training: str = ""
    mask: str = ""


@dataclass(frozen=True)
class Explanation:
    """Which kernels run in each layer and why; what falls back, why, and how often it did. Prints itself."""

    layers: tuple[LayerExplanation, ...]
    target: str  # the GPU that the plans are for
    blocks: tuple[LayerExplanation, ...] = ()  # of experts, that are fused alone

    def __str__(self) -> str:
        groups: dict[tuple[str, str, str, str, tuple[tuple[str, Plan], ...]], list[LayerRecord]] = {}
        for layer in (*self.layers, *self.blocks):
            key = (layer.record.layer_class, layer.record.reason, layer.training, layer.mask, layer.plans)
            groups.setdefault(key, []).append(layer.record)
        lines = []
        for (layer_class, reason, training, mask, plans), records in groups.items():
            lines.append(f"{layer_class} {ranges(record.index for record in records)}")
            if reason:
                lines.append(f"  original forward: {reason}")
            if training:
                lines.append(f"  original forward in training: {training}; set {'them' if ', ' in training else 'it'} to 0")
            if mask:
                lines.append(f"  {mask}")
            for workload, plan in plans:
                what = "block" if isinstance(records[0], BlockRecord) else "layer"
                cache = "; the cache's own update is not counted" if workload.startswith("decode") and what == "layer" else ""
                lines.append(f"  {workload}: {plan.kernels} launches a {what}'s forward on {self.target}{cache}")
                lines += [f"    {line}" for line in str(plan).splitlines()]
            if any(record.calls.fused or record.calls.fallbacks for record in records):
                lines += [f"  {line}" for line in _counts(records)]
        return "\n".join(lines)

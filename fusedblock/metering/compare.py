"""`measure`: one workload of a model or layer, before the swap and after it."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedblock.kernels._spec import Cost
from fusedblock.kernels._target import override, target_of
from fusedblock.models.adapter import OURS
from fusedblock.models.report import FusionReport
from fusedblock.models.swap import fuse, unfuse
from fusedblock.models.table import waiting

from . import device as machine
from . import timing
from .counter import Totals, TrafficCounter
from .report import OpRow, Report, Side
from .routing import even
from .workload import (
    BASELINES,
    LayerCall,
    OneKernel,
    OutsideCall,
    Workload,
    beyond_positions,
    copy_module,
    decoder_layers,
    groups,
    layer_of_config,
    on,
    outside_parts,
    require_cache,
    require_whole,
    sdpa_lacks,
    without_memory,
    workload,
)

_CPU = torch.device("cpu")
_WHOLE, _EXPERTS = "fused", "blocks of experts fused alone"  # what `fuse` does with a layer


def measure(
    model: Any, *, batch: int, seq: int, phase: str = "prefill", context: int | None = None, baseline: str = "sdpa",
    device: torch.device | str | None = None,
) -> Report:  # fmt: skip
    """Launches, compulsory HBM bytes, FLOPs and, on a GPU, time of one workload, before and after the layers are fused.

    Both sides are counted by one rule (fusedblock.metering.counter), on tensors without memory, so that any size can be
    counted anywhere. Of equal layers one is measured and the numbers are multiplied. Times are medians of CUDA-graph
    replays of the layers, taken in turns; embedding, last norm and output projection are counted, not timed. The model does
    not change: copies are measured, which share its weights where it is on the GPU.

    model: a transformers model or layer, fused or not, with weights or on the meta device; or a transformers config,
        of which one layer is measured: the first, or the first with experts where those before it have none. What experts read is
        what even routing is expected to touch; before, they are multiplied as experts_implementation says.
    batch, seq: sequences, and tokens of each in one call.
    phase: "prefill": forward, no cache unless context says so. "decode": forward of seq new tokens (1 as a rule) on a
        DynamicCache. "train": forward and backward.
    context: keys that a token may attend to, itself included; decode needs it, prefill and train have seq.
    baseline: the attention of the layer before: "eager" or "sdpa", which is refused for a layer with a softcap or sinks. After,
        the layer is called as under "fusedblock"; a layer whose calls would fall back has the same numbers after as before, and a
        note says why. A layer of which the experts alone are fused keeps the attention from before.
    device: where to time; a CPU only counts, for the kernels that an H200 would run. None: where the model's weights are; for
        a config or a model on meta the GPU if there is one.

    Raises ValueError naming the argument; TypeError for quantised or sharded weights; RuntimeError for a GPU that is not there.
    """
    work = workload(phase, batch, seq, context)
    if baseline not in BASELINES:
        raise ValueError(f"measure: baseline={baseline!r}, expected one of {', '.join(BASELINES)}")
    subject, source = _source(model)
    layers = decoder_layers(source)
    require_cache(work, layers)
    require_whole(baseline, layers)
    where = _device(layers[0], device)
    dtype = next(layers[0].parameters()).dtype

    notes = ["bytes are compulsory: each launch reads its distinct inputs once and writes its results once"]
    if len(layers) > 1:
        notes.append(f"{len(groups(layers))} of {len(layers)} layers measured, the numbers multiplied")
    if beyond := beyond_positions(work, model):
        notes.append(beyond)
    rows: tuple[dict[str, Totals], dict[str, Totals]] = ({}, {})
    floors, samples, fused = [0.0, 0.0], [], set[str]()
    ceilings = machine.ceilings(where) if where.type == "cuda" else None
    with _Progress() as progress:
        for layer, count in groups(layers):
            progress("counting")
            *counted, attention, how = _count_layer(layer, work, baseline, where, notes)
            fused.add(how)
            for side, launches in enumerate(counted):
                _add(rows[side], launches, count)
                if ceilings:
                    floors[side] += count * sum(_floor(ceilings, c) for c in launches)
            if ceilings:
                progress(f"timing on {torch.cuda.get_device_name(where)}")
                try:
                    samples.append((count, _time_layer(layer, work, baseline, attention, bool(how), where)))
                except torch.OutOfMemoryError:
                    notes.append("no times: a layer with its inputs does not fit into the memory of the GPU")
                    ceilings, samples = None, []
                torch.cuda.empty_cache()  # the graphs are gone; their memory is the model's again
        outside = _count_outside(source, work)
    timings: list[timing.Timing | None] = [None, None]
    if ceilings:
        timings = [_sum([(count, pair[side]) for count, pair in samples]) for side in (0, 1)]
        if any(t is not None and t.method != "graph" for t in timings):
            notes.append("times are of queued calls, which a CUDA graph did not replay: gaps between launches count")
        if dtype not in (torch.bfloat16, torch.float16):
            notes.append("the ceiling of matrix products is that of bf16")
    plain = f"transformers, {baseline} attention"
    labels = (plain, _WHOLE if _WHOLE in fused else f"{plain}: {_EXPERTS if _EXPERTS in fused else 'nothing is fused'}")
    before, after = (
        Side(labels[i], (*_rows(rows[i], "layers"), *_rows(outside, "outside")), timings[i], floors[i] if ceilings else None)
        for i in (0, 1)
    )
    return Report(
        subject,
        phase,
        batch,
        seq,
        work.context,
        str(dtype).removeprefix("torch."),
        len(layers),
        baseline,
        before,
        after,
        machine.describe(where),
        machine.versions(),
        ceilings,
        time.strftime("%Y-%m-%d"),
        tuple(dict.fromkeys(notes)),
    )


def default_baseline(model: Any) -> tuple[str, str]:
    """("sdpa", "") for what measure takes; or "eager" where sdpa lacks something of it, and what."""
    lacks, has = sdpa_lacks(decoder_layers(_source(model)[1]))
    return ("eager", f"sdpa has no {lacks}, {has}") if lacks else ("sdpa", "")


def _source(model: Any) -> tuple[str, nn.Module]:
    """(What is measured, in words; the module). Raises ValueError for what is neither a module nor a config."""
    if isinstance(model, nn.Module):
        return type(model).__name__, model
    if hasattr(model, "model_type") and hasattr(model, "num_hidden_layers"):
        layer, index = layer_of_config(model)
        kind = model.model_type
        return f"layer {index} of {kind}, the first with experts" if index else f"one layer of {kind}", layer
    raise ValueError(f"measure: model is a {type(model).__name__}, expected a torch.nn.Module or a transformers config")


def _device(layer: nn.Module, device: torch.device | str | None) -> torch.device:
    held = next(layer.parameters()).device
    if device is None:
        device = held if held.type != "meta" else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"measure: device={str(device)!r}, expected a CPU or a CUDA device")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(f"measure: device={str(device)!r}, but torch sees no GPU here")
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def _count_layer(
    layer: nn.Module, work: Workload, baseline: str, where: torch.device, notes: list[str]
) -> tuple[list[Cost], list[Cost], str, str]:
    """The launches of one call, before and after; the attention after: ours, or the baseline where the layer is not fused whole;
    and how it is fused, "" for not."""

    def count(attention: str, swap: bool) -> tuple[list[Cost], LayerCall, FusionReport | None]:
        with FakeTensorMode(), override(target_of(where)):
            made = copy_module(layer, without_memory)
            _trainable(made, work)
            unfuse(made)
            swapped = fuse(made) if swap else None
            call = LayerCall(made, work, attention, _CPU)
            routing = call.routing()
            with even(routing), OneKernel(), TrafficCounter() as counter:
                call()
        if routing is not None:
            notes.append(str(routing))
        return counter.launches, call, swapped

    waits = waiting(type(layer))  # its own attention runs, then, and is the same before and after
    attention = baseline if waits else OURS
    before, plain, _ = count(baseline, False)
    after, _, swapped = count(attention, True)
    assert swapped is not None
    records = swapped.blocks if waits else swapped.layers
    reasons = {r.reason for r in records if r.reason} | set(swapped.fallbacks)
    if work.training and (rates := {r.dropout for r in records if r.dropout}):  # all of them, not the first one met
        reasons = {r.reason for r in records if r.reason} | {f"{rate} in training; set to 0, it fuses" for rate in rates}
    if not records:
        reasons = {f"{waits}, and the MLP has no experts"}
    if reasons:  # our attention in the original forward would be no gain of fuse
        notes += [f"not fused, after is as before: {reason}" for reason in sorted(reasons)]
        return before, before, baseline, ""
    if waits:
        notes.append(f"of {type(layer).__name__} the block of experts alone is fused: {waits}")
        return before, after, baseline, _EXPERTS
    if plain.arguments.get("attention_mask") is not None:
        note = "after: called as under attn_implementation='fusedblock', which needs no mask in memory without padding"
        lacks, _ = sdpa_lacks([layer])
        falls = f"; under 'sdpa' calls fall back, for its {lacks}" if lacks else ""
        notes.append(f"{note}; set it, fuse alone does not{falls}")
    return before, after, OURS, _WHOLE


def _count_outside(model: nn.Module, work: Workload) -> dict[str, Totals]:
    found: dict[str, Totals] = {}
    parts = outside_parts(model)
    if len(parts):
        with FakeTensorMode():
            made = copy_module(parts, without_memory)
            assert isinstance(made, nn.ModuleDict)
            _trainable(made, work)
            call = OutsideCall(dict(made.items()), work)
            with TrafficCounter() as counter:
                call()
        _add(found, counter.launches, 1)
    return found


def _trainable(module: nn.Module, work: Workload) -> None:
    """Frozen parameters stay frozen, unless all are: then the model is loaded for inference, and training it means all."""
    if work.training and not any(p.requires_grad for p in module.parameters()):
        module.requires_grad_(True)


def _time_layer(
    layer: nn.Module, work: Workload, baseline: str, attention: str, swap: bool, device: torch.device
) -> list[timing.Timing]:
    """Before and after, in turns, over as many sets of weights and inputs as it takes to leave the L2 cache.

    attention: after; layers that are fused whole have ours. swap: whether anything is fused.
    """
    with torch.cuda.device(device), torch.random.fork_rng([device.index]):
        calls: dict[str, list[LayerCall]] = {"before": [], "after": []}
        sets = 1
        while len(calls["before"]) < sets:
            fresh = len(calls["before"]) > 0
            weights = copy_module(layer, on(device, fresh))
            _trainable(weights, work)
            unfuse(weights)
            fused = copy_module(weights, on(device))
            if swap:
                fuse(fused)
            calls["before"].append(LayerCall(weights, work, baseline, device))
            calls["after"].append(LayerCall(fused, work, attention, device))
            sets = timing.input_sets(calls["before"][0].bytes(), target_of(device).l2_bytes)
        times = timing.interleave(calls, timer=timing.CudaTimer())
        return [times["before"], times["after"]]


def _floor(ceilings: machine.Ceilings, cost: Cost) -> float:
    return ceilings.floor_ms(cost.read_bytes, cost.written_bytes, cost.executed_flops)


def _sum(parts: list[tuple[int, timing.Timing]]) -> timing.Timing:
    low, mid, high = (sum(n * getattr(t, name) for n, t in parts) for name in ("low_ms", "median_ms", "high_ms"))
    method = "graph" if all(t.method == "graph" for _, t in parts) else "queue"
    return timing.Timing(mid, low, high, min(t.samples for _, t in parts), method)


def _add(rows: dict[str, Totals], launches: list[Cost], count: int) -> None:
    by_name: dict[str, list[Cost]] = {}
    for cost in launches:
        by_name.setdefault(cost.name, []).extend([cost] * count)
    for name, costs in by_name.items():
        rows[name] = rows.get(name, Totals()) + Totals.of(costs)


def _rows(totals: dict[str, Totals], where: str) -> list[OpRow]:
    return [
        OpRow(_plain_name(name), where, t.launches, t.read_bytes, t.written_bytes, t.flops, t.executed_flops)
        for name, t in totals.items()
    ]


def _plain_name(name: str) -> str:
    """SDPA is counted through its CPU operator, which stands for whichever kernel a GPU takes."""
    name = name.removeprefix("aten.")
    if name.startswith("_scaled_dot_product_"):
        return "scaled_dot_product_attention" + ("_backward" if name.endswith("_backward") else "")
    return name


class _Progress:
    """Says on stderr what goes on, once it has gone on for two seconds."""

    def __enter__(self) -> _Progress:
        self.stage, self.shown = "", False
        self.timer = threading.Timer(2.0, self._show)
        self.timer.daemon = True
        self.timer.start()
        return self

    def __call__(self, stage: str) -> None:
        changed, self.stage = stage != self.stage, stage
        if self.shown and changed:
            self._show()

    def _show(self) -> None:
        self.shown = True
        print(f"fusedblock.measure: {self.stage} ...", file=sys.stderr, flush=True)

    def __exit__(self, *error: object) -> None:
        self.timer.cancel()

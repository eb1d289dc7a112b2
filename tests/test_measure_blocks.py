"""`measure` of DeepSeek's layers, of which the experts alone are fused: the rest of a layer is the same before and after."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
from llama import relative_error
from mixtures import build
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import fusedblock
from fusedblock.kernels._target import TARGETS, override
from fusedblock.metering import TrafficCounter, measure
from fusedblock.metering.counter import Totals
from fusedblock.metering.report import OpRow, Side
from fusedblock.metering.routing import even, routing_of
from fusedblock.metering.workload import LayerCall, copy_module, layer_of_config, on, without_memory, workload
from fusedblock.models.table import LATENT

WAITS = "multi-head latent attention has no kernel yet"
BF16 = 2
H, E, K, FFN, HEADS, KEY, VALUE = 64, 6, 2, 48, 4, 24, 16  # of tests/families.py
PHASES: dict[str, dict[str, Any]] = {"prefill": {"seq": 16}, "chunk": {"seq": 4, "context": 16},
                                     "decode": {"seq": 1, "context": 16, "phase": "decode"},
                                     "train": {"seq": 16, "phase": "train"}}  # fmt: skip


def config(family: str, how: str = "grouped_mm", **changes: Any) -> Any:
    made = AutoConfig.for_model(family, **{**families.SIZES, **families.EXPERTS[family], **changes})
    made.dtype, made._experts_implementation = torch.bfloat16, how
    return made


def rows(side: Side) -> dict[str, OpRow]:
    return {r.name: r for r in side.rows if r.where == "layers"}


def numbers(total: OpRow | Totals) -> list[int]:
    return [total.launches, total.bytes, total.flops]


def block_alone(family: str, phase: str, tokens: int, how: str, fuse: bool) -> Totals:
    """Of a layer of the config, its block of experts alone, counted without the rest."""
    layer, _ = layer_of_config(config(family, how))
    with FakeTensorMode(), override(TARGETS["sm_90"]):
        layer = copy_module(layer, without_memory).train(phase == "train")
        block = layer.get_submodule("mlp")
        if fuse:
            fusedblock.fuse(block)
        x = torch.empty(2, tokens // 2, H, dtype=torch.bfloat16, requires_grad=phase == "train")
        routing = routing_of(layer, LATENT[type(layer).__name__], tokens)
        with even(routing), TrafficCounter() as counter, torch.set_grad_enabled(phase == "train"):
            out = block(x)
            if phase == "train":
                torch.autograd.grad(out, [x, *block.parameters()], torch.empty_like(out))
    return counter.total()


@pytest.mark.parametrize(("family", "phase", "how"), (
    ("deepseek_v2", "prefill", "grouped_mm"), ("deepseek_v2", "decode", "eager"), ("deepseek_v2", "train", "grouped_mm"),
    ("deepseek_v3", "prefill", "eager"), ("deepseek_v3", "chunk", "grouped_mm"), ("deepseek_v3", "decode", "grouped_mm"),
))  # fmt: skip
def test_what_changes_is_the_block_of_experts(family: str, phase: str, how: str) -> None:
    work = PHASES[phase]
    report = measure(config(family, how), batch=2, **work)
    plain, fused = (numbers(block_alone(family, phase, 2 * work["seq"], how, swap)) for swap in (False, True))
    before, after = (numbers(side.total()) for side in (report.before, report.after))
    assert [b - a for b, a in zip(before, after)] == [b - a for b, a in zip(plain, fused)]
    assert after[0] < before[0] and after[1] < before[1]
    assert report.after.label == "transformers, sdpa attention: blocks of experts fused alone"
    name = "DeepseekV2" if family == "deepseek_v2" else "DeepseekV3"
    assert f"of {name}DecoderLayer the block of experts alone is fused: {WAITS}" in report.notes
    (experts,) = (note for note in report.notes if note.startswith("experts: "))
    assert experts.endswith(f"before: experts_implementation={how!r}")


@pytest.mark.parametrize(("family", "phase"), (
    ("deepseek_v2", "prefill"), ("deepseek_v2", "decode"), ("deepseek_v3", "chunk")))  # fmt: skip
def test_before_is_what_a_real_layer_does(family: str, phase: str) -> None:
    """As its model calls it. Every token chooses every expert, so that no number depends on values."""
    work = PHASES[phase]
    every = {"n_routed_experts": 3, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1}
    model = build(family, "grouped_mm", **every).bfloat16()
    report = measure(model, batch=2, **work, baseline="eager")
    counter, ids = TrafficCounter(), torch.zeros(2, work.get("context", work["seq"]), dtype=torch.int64)
    for layer in model.model.layers:
        original = layer.forward

        def counted(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            with counter:
                return original(*args, **kwargs)

        layer.forward = counted
    with torch.no_grad():
        cache = DynamicCache(config=model.config) if "context" in work else None
        if cache is not None:
            model(ids[:, : -work["seq"]], past_key_values=cache)
            counter.launches.clear()
        model(ids[:, -work["seq"] :], past_key_values=cache, use_cache=cache is not None)
    assert numbers(report.before.total("layers")) == numbers(counter.total())


def test_a_model_with_weights_counts_as_its_config() -> None:
    """Of two layers the first is dense: the same before and after."""
    # In the types that transformers gives its parameters.
    model = AutoModelForCausalLM.from_config(build("deepseek_v3").config, dtype=torch.bfloat16)
    model.config._experts_implementation = "grouped_mm"
    report, one = (measure(m, batch=2, seq=16) for m in (model, config("deepseek_v3")))
    assert (report.layers, one.layers) == (2, 1) and one.subject == "layer 1 of deepseek_v3, the first with experts"
    whole, single = ([numbers(side.total("layers")) for side in (r.before, r.after)] for r in (report, one))
    before, after = ([a - b for a, b in zip(*pair)] for pair in zip(whole, single))  # what the dense layer adds
    assert min(before) > 0 and before == after
    said = f"not fused, after is as before: {WAITS}, and the MLP has no experts"
    assert said in report.notes and said not in one.notes
    fusedblock.fuse(model)
    assert measure(model, batch=2, seq=16).after.rows == report.after.rows


@pytest.mark.parametrize("tokens", (1, 16))
def test_experts_after_read_the_weights_that_are_expected(tokens: int) -> None:
    """And the block launches what `explain` says of it."""
    made = config("deepseek_v3")
    report = measure(made, batch=1, seq=tokens)
    after = rows(report.after)
    touched = E * (1 - (1 - K / E) ** tokens)
    assert f"experts: {touched:.4g} of 6 touched, as even routing of {tokens} tokens to 2 each gives" in str(report)
    sums = H if tokens > 1 else 0  # over a token's choices: of more than one token from rows that the same launch has written
    down = touched * H * FFN * BF16 + tokens * K * (FFN + sums) * BF16
    assert down < after["fusedblock.moe_down"].read_bytes < down + 400  # and the choices, their weights, and the index
    layer, _ = layer_of_config(made)
    fusedblock.fuse(layer)
    explanation = fusedblock.explain(layer, phase="prefill", seq=tokens, context=tokens)
    ((_, planned),) = explanation.blocks[0].plans
    assert sum(row.launches for name, row in after.items() if name.startswith("fusedblock.")) == sum(
        step.kernels for step in planned.launches if step.engine != "torch")  # fmt: skip
    (entry,) = explanation.layers
    assert entry.record.reason == WAITS and not entry.plans


def test_attention_with_values_of_another_size_is_one_kernel() -> None:
    """On a CPU torch composes it of products and a softmax in fp32, which no GPU does."""
    found = rows(measure(config("deepseek_v3"), batch=2, seq=16, phase="train").before)
    row, pairs = found["scaled_dot_product_attention"], 2 * HEADS * 16 * 17 // 2
    assert row.launches == 1 and row.flops == 2 * pairs * (KEY + VALUE)
    assert row.read_bytes == 2 * 16 * HEADS * (2 * KEY + VALUE) * BF16
    backward = found["scaled_dot_product_attention_backward"]
    assert backward.launches == 1 and backward.flops == row.flops * 5 // 2
    assert not {"_safe_softmax", "_softmax", "bmm"} & found.keys()


def test_a_block_that_is_not_fused_says_why() -> None:
    report = measure(config("deepseek_v2", hidden_act="tanh"), batch=1, seq=8)
    assert report.after.rows == report.before.rows and report.after.label.endswith("attention: nothing is fused")
    assert any(note.startswith("not fused, after is as before: ") and "Tanh has no kernel" in note for note in report.notes)
    with pytest.raises(ValueError, match=f"no layer that can be fused; DeepseekV3DecoderLayer: {WAITS}"):
        measure(config("deepseek_v3", first_k_dense_replace=2), batch=1, seq=8)


@pytest.mark.parametrize("family", ("deepseek_v2", "deepseek_v3"))
def test_calls_that_would_be_timed_compute_the_same(family: str) -> None:
    """Again and again, on the same latent keys."""
    layer, found = build(family).model.layers[1], []
    for fuse in (False, True):
        torch.manual_seed(0)
        made = copy_module(layer, on(torch.device("cpu")))
        if fuse:
            assert fusedblock.fuse(made).fused_blocks == 1
        call = LayerCall(made, workload("decode", 2, 1, 9), "sdpa", torch.device("cpu"))
        found += [call(), call()]
    assert found[0].shape == (2, 1, H) and torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
    assert relative_error(found[2], found[0]) < 1e-5

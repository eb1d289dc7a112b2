"""`explain` under each attention implementation: masks and plans are those of the calls that transformers makes."""

from __future__ import annotations

import functools
from typing import Any

import families
import pytest
import torch
from llama import CACHE

import fusedblock
from fusedblock import blocks
from fusedblock.blocks import functional

CALLS = (("prefill", 17, 17), ("prefill", 5, 5), ("prefill", 4, 16), ("decode", 1, 16), ("decode", 1, 4))


def recording(monkeypatch: pytest.MonkeyPatch, home: Any) -> list[tuple[int, int, bool]]:
    """Fills with (queries, keys, masked) of every plan that `home` makes from now on."""
    made: list[tuple[int, int, bool]] = []
    original = blocks.plan

    @functools.wraps(original)
    def plan(spec: Any, **given: Any) -> Any:
        made.append((given["seq"], given["context"], given["masked"]))
        return original(spec, **given)

    monkeypatch.setattr(home, "plan", plan)
    return made


@pytest.mark.parametrize(("name", "implementation"), [
    ("llama", "eager"), ("llama", "sdpa"), ("mistral", "eager"), ("mistral", "sdpa"), ("gemma2", "eager"), ("olmo3", "sdpa"),
    ("modernbert", "eager"), ("modernbert", "sdpa"), ("mistral", "fusedblock"), ("gemma2", "fusedblock"), ("olmo3", "fusedblock"),
    ("modernbert", "fusedblock"),
])  # fmt: skip
def test_plans_are_for_the_masks_and_keys_that_come(name: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build(name, implementation)
    report = fusedblock.fuse(model)
    for phase, seq, context in CALLS if name in families.DECODERS else CALLS[:2]:
        ids = torch.randint(3, 90, (1, context), generator=torch.Generator().manual_seed(0))
        with torch.no_grad(), monkeypatch.context() as patch:
            arguments = {}
            if name in families.DECODERS and context > seq:
                arguments = {CACHE: model(ids[:, :-seq], use_cache=True)[CACHE], "use_cache": True}
            called = recording(patch, functional)
            model(ids[:, -seq:], **arguments)
            told = recording(patch, blocks)
            explanation = fusedblock.explain(model, phase=phase, seq=seq, context=context)
        assert told == called and len(called) == 2
        for layer, (_, _, masked) in zip(explanation.layers, called, strict=True):
            assert bool(layer.mask) == masked
            assert not masked or f"  under {implementation} attention, in {phase}: " in str(explanation)
    assert not report.fallbacks


def test_windows_and_softcap_are_told_as_the_attention_has_them() -> None:
    for name, said in (("gemma2", "softcap 2, keys up to 5 before: the rest is not read"),
                       ("modernbert", "keys up to 3 before and 3 after: the rest is not read")):  # fmt: skip
        model = families.build(name, "eager")
        fusedblock.fuse(model)

        def shown(model: Any = model) -> str:
            return str(fusedblock.explain(model, context=64, phase="prefill"))

        masked = "in prefill: the window comes as a mask, and the keys it hides are read; attn_implementation='fusedblock' skips"
        assert shown().count(f"under eager attention, {masked}") == 1 and "keys up to" not in shown()
        model.set_attn_implementation("fusedblock")
        assert shown().count(said) == 1 and shown().count("keys up to") == 1  # the other layer sees all
        assert "under" not in shown()


def test_a_window_that_hides_nothing_is_not_said_to_be_read() -> None:
    """A cache hands over the last keys of the window only."""
    model = families.build("mistral", "sdpa")
    fusedblock.fuse(model)
    said = str(fusedblock.explain(model, phase="decode", context=16))
    assert "under sdpa attention, in decode: a mask comes with the call" in said and "hides" not in said


def test_what_an_attention_lacks_runs_the_original_forward() -> None:
    model = families.build("gemma2", "eager")
    fusedblock.fuse(model)
    for implementation, reason in (
        ("sdpa", "sdpa attention has no softcap (2); use attn_implementation='eager' or 'fusedblock'"),
        ("plain", "attention implementation 'plain'; use attn_implementation='fusedblock', 'sdpa' or 'eager'"),
    ):
        model.config._attn_implementation = implementation
        explanation = fusedblock.explain(model)
        assert f"Gemma2DecoderLayer 0-1\n  original forward: {reason}" in str(explanation)
        assert not any(layer.plans or layer.mask for layer in explanation.layers)
    model.set_attn_implementation("fusedblock")
    assert "original forward" not in str(fusedblock.explain(model))

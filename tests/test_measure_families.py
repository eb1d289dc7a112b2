"""`measure` for every family of the table: counted on fake tensors as transformers calls the layer, and fewer after the swap."""

from __future__ import annotations

import copy
from typing import Any

import families
import pytest
import torch
from llama import CACHE
from torch import nn

from fusedblock.metering import TrafficCounter, measure
from fusedblock.metering.compare import default_baseline
from fusedblock.metering.counter import Totals
from fusedblock.metering.workload import decoder_layers, groups, layer_of_config

# phase, seq, context, attention before. The windows of families.CONFIGS are 6 wide: only one workload is shorter than that.
WORKLOADS = (("prefill", 17, None, "eager"), ("prefill", 4, 16, "sdpa"), ("decode", 1, 16, "sdpa"), ("train", 16, None, "sdpa"))
MORE = (("prefill", 17, None, "sdpa"), ("prefill", 4, 16, "eager"), ("decode", 1, 16, "eager"), ("decode", 1, 4, "sdpa"),
        ("train", 16, None, "eager"))  # fmt: skip
CASES = [
    pytest.param(name, *work, marks=[pytest.mark.slow] if work in MORE else [], id="-".join(map(str, (name, *work))))
    for name in families.CONFIGS
    for work in WORKLOADS + MORE
    if (work[2] is None or name in families.DECODERS) and work[3] in families.implementations(name)
]


def counted(name: str, model: nn.Module, seq: int, context: int | None) -> Totals:
    """What the layers of the model launch while transformers itself runs the workload."""
    counters = []
    for layer in decoder_layers(model):
        counter, original = TrafficCounter(), layer.forward

        def forward(*args: Any, counter: TrafficCounter = counter, original: Any = original, **kwargs: Any) -> Any:
            with counter:
                return original(*args, **kwargs)

        layer.__dict__["forward"] = forward
        counters.append(counter)
    ids = torch.randint(3, 90, (2, context or seq))
    with torch.no_grad():
        if context is None:
            arguments, _ = families.inputs(name, model, pad=0, seq=seq)
            model(**arguments, **({"use_cache": False} if name in families.DECODERS else {}))
        else:
            cache = model(ids[:, :-seq], use_cache=True).past_key_values
            for counter in counters:
                counter.launches.clear()
            model(ids[:, -seq:], use_cache=True, **{CACHE: cache})
    return Totals.of(launch for counter in counters for launch in counter.launches)


@pytest.mark.parametrize(("name", "phase", "seq", "context", "baseline"), CASES)
def test_counts_are_those_of_the_model_and_fewer_after(
    name: str, phase: str, seq: int, context: int | None, baseline: str
) -> None:
    model = families.twin(families.build(name, baseline), torch.bfloat16)
    report = measure(model, batch=2, seq=seq, phase=phase, context=context, baseline=baseline)
    before, after = report.before.total("layers"), report.after.total("layers")
    assert not [note for note in report.notes if note.startswith("not fused")]
    assert after.launches < before.launches and after.bytes < before.bytes
    assert any(row.name.startswith("fusedblock.") for row in report.after.rows)
    if phase != "train":
        real = counted(name, model, seq, context)
        assert (real.launches, real.bytes, real.flops) == (before.launches, before.bytes, before.flops)


@pytest.mark.parametrize("name", families.CONFIGS)
def test_of_a_config(name: str) -> None:
    config = families.config(name, num_hidden_layers=1)
    config.dtype = torch.float32
    model = families.build(name, num_hidden_layers=1)
    which = next(which for which in ("sdpa", "eager") if which in families.implementations(name))
    whole, one = (measure(subject, batch=2, seq=17, baseline=which) for subject in (model, config))
    assert one.layers == 1 and one.before.rows == tuple(r for r in whole.before.rows if r.where == "layers")
    assert one.after.rows == tuple(r for r in whole.after.rows if r.where == "layers")


@pytest.mark.parametrize("name", families.ENCODERS)
@pytest.mark.parametrize(("phase", "seq"), [("decode", 1), ("prefill", 4)])
def test_an_encoder_has_no_cache(name: str, phase: str, seq: int) -> None:
    cls = type(decoder_layers(families.build(name))[0]).__name__
    with pytest.raises(ValueError, match=f"{cls} attends both ways: it has no cache"):
        measure(families.build(name), batch=1, seq=seq, phase=phase, context=16)


@pytest.mark.parametrize(("name", "lacks"), (
    ("gemma2", "softcap, Gemma2DecoderLayer has softcap=2.0"), ("gpt_oss", "sinks, GptOssDecoderLayer has self_attn.sinks"),
))  # fmt: skip
def test_what_sdpa_lacks_is_not_measured_under_it(name: str, lacks: str) -> None:
    model = families.config(name)
    with pytest.raises(ValueError, match=f"measure: baseline='sdpa' has no {lacks}; use baseline='eager'"):
        measure(model, batch=1, seq=4)
    assert default_baseline(model) == ("eager", f"sdpa has no {lacks}")
    report = measure(model, batch=1, seq=4, phase="train" if name == "gpt_oss" else "prefill", baseline="eager")
    assert report.after.label == "fused"
    assert any(f"under 'sdpa' calls fall back, for its {lacks.partition(',')[0]}" in note for note in report.notes)


def test_outside_counts_the_last_norm_whatever_its_name() -> None:
    """Its weight, and its bias where it has one, are read once; encoders that norm within the layers have none after them."""
    for name, norm in (("llama", "mul"), ("gpt2", "native_layer_norm"), ("gpt_neox", "native_layer_norm")):
        outside = [row for row in measure(families.build(name), batch=1, seq=17).before.rows if row.where == "outside"]
        assert {"embedding", norm, "mm"} <= {row.name for row in outside}
    bert, vit = (measure(families.build(name), batch=1, seq=17).before.rows for name in ("bert", "vit"))
    assert [row.name for row in bert if row.where == "outside"] == ["embedding"]
    assert not [row for row in vit if row.where == "outside"]


def test_layers_of_one_model_that_attend_differently_are_apart() -> None:
    """One of Qwen2's has a window, one of SmolLM3's no rotary embedding; GPT-2's differ in a scale, which costs nothing."""
    for name, apart in (("qwen2", 2), ("smollm3", 2), ("gemma2", 2), ("cohere2", 2), ("gpt2", 1), ("llama", 1)):
        assert len(groups(decoder_layers(families.build(name)))) == apart
    config = families.config("vit")
    kept = copy.deepcopy(config.to_dict())
    assert len(groups([layer_of_config(config)[0]] * 3)) == 1 and config.to_dict() == kept

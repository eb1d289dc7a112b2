"""What fuse and unfuse do to a model around its arithmetic: nothing that anyone else can see."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from llama import prompt, relative_error, tiny, twin
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

import fusedblock


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(prompt()[0], use_cache=False).logits


def is_fused(layer: nn.Module) -> bool:
    return type(layer) is not LlamaDecoderLayer and isinstance(layer, LlamaDecoderLayer)


def snapshot(layer: nn.Module) -> dict:
    """The instance dictionary with its containers copied, for comparison after."""
    return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}


def test_unfuse_restores_everything() -> None:
    model = tiny()
    before, want = [snapshot(layer) for layer in model.model.layers], logits(model)
    tensors = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    fusedblock.fuse(model)
    assert all(map(is_fused, model.model.layers))
    logits(model)
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == tensors
    assert fusedblock.unfuse(model) == 2
    assert [type(layer) for layer in model.model.layers] == [LlamaDecoderLayer] * 2
    assert [snapshot(layer) for layer in model.model.layers] == before
    assert torch.equal(logits(model), want)
    assert fusedblock.unfuse(model) == 0


def test_nothing_shows() -> None:
    model = tiny()
    keys, modules = list(model.state_dict()), [name for name, _ in model.named_modules()]
    text, values = str(model), [value.clone() for value in model.state_dict().values()]
    fusedblock.fuse(model)
    layer = model.model.layers[0]
    logits(model)
    assert list(model.state_dict()) == keys and [name for name, _ in model.named_modules()] == modules
    assert all(map(torch.equal, model.state_dict().values(), values))
    assert str(model) == text
    assert type(layer).__name__ == "LlamaDecoderLayer" in model._no_split_modules
    assert type(layer).__module__ == LlamaDecoderLayer.__module__ and type(layer).__qualname__ == "LlamaDecoderLayer"
    assert type(model.model.layers[1]) is type(layer)  # one class, not one per layer


def test_report_counts_as_the_model_runs() -> None:
    model = tiny()
    report = fusedblock.fuse(model)
    assert [(r.name, r.index, r.status, r.reason) for r in report.layers] == [
        ("model.layers.0", 0, "fused", ""),
        ("model.layers.1", 1, "fused", ""),
    ]
    assert (report.fused, report.fused_calls, report.fallback_calls) == (2, 0, 0)
    model(prompt()[0])
    model(prompt()[0], output_attentions=True)
    model.set_attn_implementation("eager")
    model(prompt()[0], output_attentions=True)
    assert (report.fused_calls, report.fallback_calls) == (2, 4)
    assert report.fallbacks == {"output_attentions=True": 4}
    assert report.layers[1].calls.fused == 1
    lines = str(report).splitlines()
    assert lines[0] == "2 of 2 layers fused"
    assert "  LlamaDecoderLayer 0-1: fused" in lines and "  calls: 2 fused, 4 fallback" in lines
    assert "      4 x output_attentions=True" in lines


def test_fuse_twice_is_once() -> None:
    model = tiny()
    first = fusedblock.fuse(model)
    classes = [type(layer) for layer in model.model.layers]
    second = fusedblock.fuse(model)
    assert [type(layer) for layer in model.model.layers] == classes
    assert [record.status for record in second.layers] == ["already fused"] * 2
    assert [record.status for record in first.layers] == ["fused"] * 2
    logits(model)
    assert first.fused_calls == second.fused_calls == 2 and second.fused == 2
    assert fusedblock.unfuse(model) == 2


def test_some_layers() -> None:
    model = tiny(num_hidden_layers=4)
    want = logits(model)
    report = fusedblock.fuse(model, layers=[1, 3])
    assert [is_fused(layer) for layer in model.model.layers] == [False, True, False, True]
    assert [record.status for record in report.layers] == ["skipped", "fused", "skipped", "fused"]
    assert "LlamaDecoderLayer 0, 2: skipped" in str(report)
    assert relative_error(logits(model), want) < 1e-5 and report.fused_calls == 2
    assert [r.status for r in fusedblock.fuse(model, strict=True).layers] == ["fused", "already fused"] * 2
    with pytest.raises(ValueError, match="layers has 4, 7, but the layers of LlamaForCausalLM are 0-3"):
        fusedblock.fuse(model, layers=(0, 4, 7))


def test_one_layer_alone() -> None:
    layer = tiny().model.layers[1]
    assert fusedblock.fuse(layer).fused == 1 and is_fused(layer)
    assert fusedblock.unfuse(layer) == 1 and not is_fused(layer)


class TransformerLayer(nn.Module):
    pass


def test_no_supported_layer() -> None:
    model = nn.Sequential(nn.ModuleList([TransformerLayer(), TransformerLayer()]))
    for call in (fusedblock.fuse, fusedblock.explain):
        with pytest.raises(ValueError, match="layers are TransformerLayer; supported are the families bert, .* vit .`fused"):
            call(model)
    with pytest.raises(ValueError, match="Linear has no layer .* its layers are none"):
        fusedblock.fuse(nn.Linear(2, 2))


class OtherDecoderLayer(LlamaDecoderLayer):
    """Has arithmetic of its own."""

    def forward(self, hidden_states: Tensor, **kwargs: object) -> Tensor:
        return 2 * super().forward(hidden_states, **kwargs)


class UntouchedDecoderLayer(LlamaDecoderLayer):
    """Has none."""


def replaced(model: LlamaForCausalLM, index: int, cls: type[nn.Module]) -> LlamaForCausalLM:
    layer = cls(model.config, index)
    layer.load_state_dict(model.model.layers[index].state_dict())
    model.model.layers[index] = layer.eval()
    return model


def test_strict_changes_nothing_when_it_raises() -> None:
    model = replaced(tiny(), 1, OtherDecoderLayer)
    want = logits(model)
    with pytest.raises(ValueError, match="1 of 2 .*\n  model.layers.1: OtherDecoderLayer overrides the forward"):
        fusedblock.fuse(model, strict=True)
    assert [type(layer) for layer in model.model.layers] == [LlamaDecoderLayer, OtherDecoderLayer]
    report = fusedblock.fuse(model)
    assert [record.status for record in report.layers] == ["fused", "fallback"] and report.fused == 1
    assert relative_error(logits(model), want) < 1e-5
    fusedblock.unfuse(model)
    model.model.layers[1].mlp.up_proj = nn.Identity()
    with pytest.raises(ValueError, match="OtherDecoderLayer overrides"):
        fusedblock.fuse(model, strict=True)
    assert fusedblock.fuse(model, strict=True, layers=[0]).fused == 1


def test_subclass_without_a_forward_of_its_own_is_fused() -> None:
    model = replaced(tiny(), 0, UntouchedDecoderLayer)
    want = logits(model)
    report = fusedblock.fuse(model, strict=True)
    assert relative_error(logits(model), want) < 1e-5 and report.fused_calls == 2
    fusedblock.unfuse(model)
    assert type(model.model.layers[0]) is UntouchedDecoderLayer


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"head_dim": 8}, "head_dim=8, the kernels take multiples of 8 from 16 to 256"),
        ({"head_dim": 20}, "head_dim=20"),
        ({"head_dim": 264}, "head_dim=264"),
        ({"hidden_act": "relu6"}, "activation torch.nn.modules.activation.ReLU6 has no kernel"),
    ],
)
def test_no_kernel_for_the_layer(config: dict, reason: str) -> None:
    model = tiny(**config)
    with pytest.raises(ValueError, match=reason):
        fusedblock.fuse(model, strict=True)
    report = fusedblock.fuse(model)
    assert all(record.status == "fallback" and reason in record.reason for record in report.layers)
    assert type(model.model.layers[0]) is LlamaDecoderLayer
    assert reason in str(fusedblock.explain(model))


def test_explain() -> None:
    model = tiny()
    before = fusedblock.explain(model)
    assert "original forward: not fused; call fusedblock.fuse(model) first" in str(before) and before.layers[0].plans == ()
    fusedblock.fuse(model)
    logits(model)
    model(prompt()[0], output_attentions=True)
    explanation = fusedblock.explain(model)
    workloads = dict(explanation.layers[0].plans)
    assert [name.split(",")[0] for name in workloads] == ["prefill", "decode", "training"]
    counted = [line for line in str(explanation).splitlines() if "the cache's own update is not counted" in line]
    assert [line.split(",")[0] for line in counted] == ["  decode"]
    for plan in workloads.values():
        assert {"qkv_rope", "gated_mlp", "linear"} <= {launch.op for launch in plan.launches}
        for launch in plan.launches:
            assert launch.role in str(explanation) and launch.why in str(explanation)
    assert "calls: 2 fused, 2 fallback" in str(explanation) and "2 x output_attentions=True" in str(explanation)
    model.model.layers[1].mlp.up_proj = nn.Sequential(model.model.layers[1].mlp.up_proj)
    text = str(fusedblock.explain(model))
    assert "LlamaDecoderLayer 1\n  original forward: mlp.up_proj is torch.nn.modules.container.Sequential" in text


def test_a_dropout_rate_is_named_by_report_and_explanation() -> None:
    """Without a change of status: calls in eval mode run fused."""
    model = tiny(attention_dropout=0.25)
    report = fusedblock.fuse(model, strict=True)
    assert [(r.status, r.reason, r.dropout) for r in report.layers] == [("fused", "", "self_attn.attention_dropout=0.25")] * 2
    note = "training calls run the original forward: self_attn.attention_dropout=0.25"
    assert f"LlamaDecoderLayer 0-1: fused\n    {note}\n" in str(report)
    assert note in str(fusedblock.fuse(model))  # already fused
    logits(model)
    model.train()
    model(prompt()[0], use_cache=False)
    assert report.fused_calls == 2 and report.fallbacks == {"self_attn.attention_dropout=0.25 in training": 2}
    line = "  original forward in training: self_attn.attention_dropout=0.25; set it to 0"
    for phase, planned in ((None, ["prefill", "decode"]), ("train", []), ("prefill", ["prefill"])):
        explanation = fusedblock.explain(model, phase=phase)
        assert [name.split(",")[0] for name, _ in explanation.layers[0].plans] == planned
        assert (line in str(explanation).splitlines()) == (phase != "prefill")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    assert "dropout" not in str(fusedblock.fuse(model)).split("calls:")[0]
    assert [name.split(",")[0] for name, _ in fusedblock.explain(model, phase="train").layers[0].plans] == ["training"]


@pytest.mark.parametrize("tied", (False, True))
def test_save_and_reload(tmp_path: Path, tied: bool) -> None:
    model = tiny(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "original")
    fusedblock.fuse(model)
    logits(model)
    model.save_pretrained(tmp_path / "fused")
    want, got = (load_file(tmp_path / name / "model.safetensors") for name in ("original", "fused"))
    assert list(want) == list(got) and all(torch.equal(want[name], got[name]) for name in want)
    assert (tmp_path / "original" / "config.json").read_text() == (tmp_path / "fused" / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "fused")
    fusedblock.fuse(again)
    assert torch.equal(logits(again), logits(model))
    other = tiny(seed=5, tie_word_embeddings=tied)
    other.load_state_dict(model.state_dict(), assign=True)
    fusedblock.fuse(other)
    assert torch.equal(logits(other), logits(model))


def test_new_values_are_seen() -> None:
    """load_state_dict, also with assign, and steps in place reach the next call."""
    model, other = tiny(), tiny(seed=3)
    report = fusedblock.fuse(model)
    logits(model)
    for assign in (False, True):
        model.load_state_dict({name: value.clone() for name, value in other.state_dict().items()}, assign=assign)
        assert relative_error(logits(model), logits(other)) < 1e-5
        with torch.no_grad():
            for candidate in (model, other):
                candidate.model.layers[0].self_attn.q_proj.weight.mul_(-1.5)
        assert relative_error(logits(model), logits(other)) < 1e-5
    for candidate in (model, other):
        candidate.model.layers[0].self_attn.scaling = 0.6
        candidate.model.layers[1].input_layernorm.variance_epsilon = 0.1
        candidate.model.layers[1].post_attention_layernorm.variance_epsilon = 0.1
        candidate.model.layers[1].mlp.act_fn = nn.GELU()
    assert relative_error(logits(model), logits(other)) < 1e-5
    assert report.fallback_calls == 0


def test_moved_to_another_dtype_after_fuse() -> None:
    model = tiny()
    report = fusedblock.fuse(model)
    logits(model)
    expected = twin(tiny(), torch.bfloat16)
    fusedblock.fuse(expected)
    assert torch.equal(logits(model.to(torch.bfloat16)), logits(expected))
    assert torch.equal(logits(model.half()), logits(twin(expected, torch.float16)))
    logits(model.double())
    assert report.fused_calls == 6 and report.fallbacks == {"hidden_states is torch.float64": 2}


def test_set_attn_implementation_after_fuse() -> None:
    model = tiny()
    report = fusedblock.fuse(model)
    want = logits(model)
    model.set_attn_implementation("eager")
    assert relative_error(logits(model), want) < 1e-5 and report.fused_calls == 4


def test_deepcopy() -> None:
    model = tiny()
    report = fusedblock.fuse(model)
    want = logits(model)
    other = copy.deepcopy(model)
    assert all(map(is_fused, other.model.layers)) and torch.equal(logits(other), want)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(2)
    assert not torch.equal(logits(other), want) and torch.equal(logits(model), want)
    assert report.fused_calls == 4 and fusedblock.fuse(other).fused_calls == 4  # each counts for itself
    assert fusedblock.unfuse(other) == 2 and all(map(is_fused, model.model.layers))


def test_deepcopy_of_a_class_made_from_ours() -> None:
    model = tiny()
    fusedblock.fuse(model)
    layer = model.model.layers[0]
    layer.__class__ = type("WrappedLlamaDecoderLayer", (type(layer),), {})
    want = logits(model)
    other = copy.deepcopy(model)
    assert type(other.model.layers[0]) is type(layer) and torch.equal(logits(other), want)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(2)
    assert not torch.equal(logits(other), want) and torch.equal(logits(model), want)


def test_pickle() -> None:
    """Rule 4: the dynamic class cannot be imported, so the original class is named and the copy is fused again."""
    model = tiny()
    fusedblock.fuse(model)
    want = logits(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (torch.load(buffer, weights_only=False), pickle.loads(pickle.dumps(model.model.layers))):
        layers = getattr(other, "model", None).layers if isinstance(other, LlamaForCausalLM) else other
        assert all(map(is_fused, layers)) and type(layers[0]) is type(model.model.layers[0])
        assert [key for key in vars(layers[0]) if key not in vars(model.model.layers[0])] == []
        if other is not layers:
            assert torch.equal(logits(other), want)
            assert fusedblock.unfuse(other) == 2 and relative_error(logits(other), want) < 1e-5


@pytest.mark.parametrize("before", (False, True))
def test_output_hidden_states(before: bool) -> None:
    model = tiny()
    other = twin(model)
    if before:  # transformers installs its hooks at the first such call, attention modules included
        other(prompt()[0], output_hidden_states=True)
    report = fusedblock.fuse(other)
    want = model(prompt()[0], output_hidden_states=True).hidden_states
    got = other(prompt()[0], output_hidden_states=True).hidden_states
    assert len(got) == len(want) == 3 and report.fused_calls == 2
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(got, want))


@pytest.mark.parametrize("through_config", (False, True))
def test_output_attentions(through_config: bool) -> None:
    model = tiny(attn_implementation="eager")
    other = twin(model)
    report = fusedblock.fuse(other)
    kwargs = {} if through_config else {"output_attentions": True}
    for candidate in (model, other):
        candidate.config.output_attentions = through_config
    want, got = (candidate(prompt()[0], **kwargs).attentions for candidate in (model, other))
    assert len(got) == len(want) == 2 and all(map(torch.equal, got, want))
    assert report.fallback_calls == 2
    for candidate in (model, other):
        candidate.config.output_attentions = False
    logits(other)  # the hooks that transformers has left on the attention do not keep the layer from its kernels
    assert report.fused_calls == 2


def test_forward_hooks_on_the_layer_run() -> None:
    model = tiny()
    fusedblock.fuse(model)
    seen = []
    model.model.layers[1].register_forward_hook(lambda module, args, output: seen.append((type(module).__name__, output.shape)))
    logits(model)
    assert seen == [("LlamaDecoderLayer", (2, 9, 64))]


@pytest.mark.parametrize("training", (False, True))
def test_compile_without_graph_breaks(training: bool) -> None:
    torch._dynamo.reset()
    model = tiny().train(training)
    other = twin(model).train(training)
    report = fusedblock.fuse(other)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    ids, mask = prompt(pad=2)
    with torch.set_grad_enabled(training):
        want = model(ids, labels=ids, attention_mask=mask, use_cache=False)
        got = compiled(ids, labels=ids, attention_mask=mask, use_cache=False)
    valid = mask.bool()
    assert relative_error(got.logits[valid], want.logits[valid]) < 1e-5
    if training:
        want.logits[valid].square().sum().backward()
        got.logits[valid].square().sum().backward()
        for (name, a), b in zip(model.named_parameters(), other.parameters()):
            assert relative_error(b.grad, a.grad) < 1e-5, name
    assert (report.fused_calls, report.fallback_calls) == (0, 0)  # graphs are not counted


def test_compile_sees_a_replaced_child() -> None:
    torch._dynamo.reset()
    model = tiny(num_hidden_layers=1)
    fusedblock.fuse(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(logits(compiled), logits(model))
    mlp = model.model.layers[0].mlp
    mlp.up_proj = nn.Sequential(mlp.up_proj, nn.Tanh())
    assert torch.equal(logits(compiled), logits(model))


def test_compiled_generation_with_a_static_cache() -> None:
    torch._dynamo.reset()
    model = tiny()
    ids, mask = prompt(pad=2)
    arguments = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    want = model.generate(ids, **arguments)
    fusedblock.fuse(model)
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    got = model.generate(ids, cache_implementation="static", disable_compile=True, **arguments)
    assert torch.equal(got, want)


def test_attention_class_is_found_for_capture() -> None:
    """The children are the originals: what looks for them by class finds them."""
    model = tiny()
    fusedblock.fuse(model)
    assert all(type(layer.self_attn) is LlamaAttention for layer in model.model.layers)


@pytest.mark.parametrize("masked", [False, True])
def test_a_layer_of_no_model_runs_as_with_eager_attention(masked: bool) -> None:
    """Nobody has named an implementation to its config: transformers then takes the module's own, eager."""
    model = tiny()
    layer = LlamaDecoderLayer(LlamaConfig(**{**model.config.to_dict(), "attn_implementation": None}), 0).eval()
    layer.load_state_dict(model.model.layers[0].state_dict())
    assert layer.self_attn.config._attn_implementation is None
    x = torch.randn(2, 9, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    given = {"position_embeddings": model.model.rotary_emb(x, torch.arange(9)[None])}
    if masked:
        given["attention_mask"] = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        want = layer(x, **given)
        report = fusedblock.fuse(nn.ModuleList([layer]), strict=True)
        got = layer(x, **given)
    assert report.fused_calls == 1 and not report.fallbacks
    assert relative_error(got, want) < 1e-5

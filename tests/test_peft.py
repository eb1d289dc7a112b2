"""LoRA adapters of PEFT on a fused model, as people use them: what the same adapters do to transformers' own layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from llama import prompt, relative_error
from torch import Tensor, nn

import fusedblock
from fusedblock.interpret import interpret

peft = pytest.importorskip("peft", reason="make test installs it")

# What people aim at: two projections, every linear layer, the Conv1D of GPT-2, one fused projection.
TARGETS: dict[str, list[str] | str] = {
    "llama": ["q_proj", "v_proj"], "qwen3": "all-linear", "gpt2": ["c_attn", "c_proj", "c_fc"], "olmo2": ["k_proj", "down_proj"],
    "phi3": ["qkv_proj", "gate_up_proj"], "gpt_neox": ["query_key_value", "dense"], "granite": ["o_proj", "down_proj"],
    "cohere": "all-linear", "glm": ["gate_up_proj", "o_proj"], "bert": ["query", "value", "output.dense"],
    "starcoder2": ["c_fc", "q_proj"], "stablelm": ["up_proj", "k_proj"],
}  # fmt: skip


def lora(name: str, **options: Any) -> Any:
    """Not at PEFT's start, where B is zero and the adapter does nothing."""
    given = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS[name], "init_lora_weights": False, **options}
    return peft.LoraConfig(fan_in_fan_out=name == "gpt2", **given)


def adapted(name: str, fuse: str = "", **options: Any) -> Any:
    """A model with an adapter; fuse: "", or "before" or "after" the adapter is injected. Equal arguments give equal weights."""
    model = families.build(name)
    if fuse == "before":
        fusedblock.fuse(model, strict=True)
        outputs(name, model)  # bound to the plain layers
    torch.manual_seed(5)
    model = peft.get_peft_model(model, lora(name, **options)).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "magnitude" in parameter_name:  # DoRA's starts where it does nothing
                parameter.mul_(1.2)
    if fuse == "after":
        fusedblock.fuse(model, strict=True)
    return model


def outputs(name: str, model: nn.Module) -> Tensor:
    with torch.no_grad():
        return families.values(model(**families.inputs(name, model, 0)[0]))


def report(model: nn.Module) -> Any:
    return fusedblock.fuse(model)  # again: that of before, with its counts


def trained(name: str, model: nn.Module, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs in training mode and the gradients of a random combination of them, of the adapters alone."""
    torch.manual_seed(seed)
    model.train().zero_grad()
    out = families.values(model(**families.inputs(name, model, 0)[0]))
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.eval()
    return out.detach(), grads


def assert_trains_alike(name: str, got: nn.Module, want: nn.Module) -> None:
    (a, grads_a), (b, grads_b) = trained(name, got), trained(name, want)
    assert relative_error(a, b) < 1e-5
    assert grads_a.keys() == grads_b.keys() and all("lora_" in n for n in grads_a)
    assert {n: e for n in grads_a if not (e := relative_error(grads_a[n], grads_b[n])) < 1e-5} == {}


@pytest.mark.parametrize("order", ("before", "after"))
@pytest.mark.parametrize("name", TARGETS)
def test_fine_tune_with_lora(name: str, order: str) -> None:
    """Injected into a fused model, or the adapted model fused: the layers stay fused, the adapted projections run themselves."""
    want, got, base = adapted(name), adapted(name, order), families.build(name)
    assert relative_error(outputs(name, want), outputs(name, base)) > 0.01  # the adapter matters
    assert relative_error(outputs(name, got), outputs(name, want)) < 1e-5
    assert_trains_alike(name, got, want)
    assert report(got).fused_calls == (6 if order == "before" else 4) and not report(got).fallbacks


@pytest.mark.parametrize("name", ("llama", "gpt2"))
def test_merge_and_unmerge_an_adapter(name: str) -> None:
    want, got = adapted(name), adapted(name, "after")
    base = outputs(name, got.get_base_model())
    for step in ("merge_adapter", "unmerge_adapter"):
        for model in (want, got):
            getattr(model, step)()
        assert relative_error(outputs(name, got), outputs(name, want)) < 1e-5
    unloaded, reference = got.merge_and_unload(), want.merge_and_unload()
    assert relative_error(outputs(name, unloaded), outputs(name, reference)) < 1e-5
    assert relative_error(outputs(name, unloaded), base) < 1e-5
    assert not report(unloaded).fallbacks and "adapter" not in str(fusedblock.explain(unloaded))


def test_turn_an_adapter_off_and_on() -> None:
    model = adapted("llama", "after")
    with model.disable_adapter():
        off = outputs("llama", model)
    assert relative_error(off, outputs("llama", families.build("llama"))) < 1e-5
    assert relative_error(outputs("llama", model), outputs("llama", adapted("llama"))) < 1e-5
    assert not report(model).fallbacks


def test_save_an_adapter_and_load_it_onto_a_fused_model(tmp_path: Path) -> None:
    want = outputs("qwen3", adapted("qwen3"))
    adapted("qwen3", "after").save_pretrained(tmp_path)
    plain, fused = families.build("qwen3"), families.build("qwen3")
    fusedblock.fuse(fused)
    for model in (plain, fused):
        assert relative_error(outputs("qwen3", peft.PeftModel.from_pretrained(model, tmp_path).eval()), want) < 1e-5


def test_switch_between_adapters_and_use_two_at_once() -> None:
    want, got = adapted("llama"), adapted("llama", "after")
    for model in (want, got):
        torch.manual_seed(6)
        model.add_adapter("second", lora("llama", target_modules=["q_proj", "down_proj"]))
    seen = [outputs("llama", got)]
    for active in ("second", ["default", "second"]):
        for model in (want, got):
            model.base_model.set_adapter(active)
        seen.append(outputs("llama", got))
        assert relative_error(seen[-1], outputs("llama", want)) < 1e-5
        assert_trains_alike("llama", got, want)
    assert min(relative_error(a, b) for i, a in enumerate(seen) for b in seen[:i]) > 0.01
    assert not report(got).fallbacks


def test_an_adapter_for_each_sequence_of_a_batch() -> None:
    """PEFT then hooks the projections: the layer says so and runs unfused."""
    want, got = adapted("llama"), adapted("llama", "after")
    ids = prompt()[0]
    with torch.no_grad():
        results = [model(ids, adapter_names=["default", "__base__"]).logits for model in (want, got)]
    assert relative_error(results[1], results[0]) < 1e-5
    assert [reason for reason in report(got).fallbacks] == ["self_attn.q_proj has a hook"]


@pytest.mark.parametrize(("name", "options"), [
    ("llama", {"use_dora": True}), ("gpt2", {"use_dora": True}), ("llama", {"use_rslora": True}), ("gpt2", {"lora_bias": True}),
], ids=str)  # fmt: skip
def test_train_a_variant_of_lora(name: str, options: dict[str, Any]) -> None:
    want, got = adapted(name, **options), adapted(name, "after", **options)
    assert relative_error(outputs(name, want), outputs(name, adapted(name))) > 1e-4  # the variant matters
    assert_trains_alike(name, got, want)
    assert not report(got).fallbacks


def test_train_with_adapter_dropout() -> None:
    """The modules drop out in transformers' order: equal seeds give equal results."""
    want, got = (adapted("llama", order, target_modules="all-linear", lora_dropout=0.3) for order in ("", "after"))
    assert_trains_alike("llama", got, want)
    assert relative_error(trained("llama", got, seed=1)[0], trained("llama", got)[0]) > 1e-3  # it does drop out
    assert not report(got).fallbacks


@pytest.mark.parametrize("reentrant", (True, False))
def test_train_an_adapter_with_gradient_checkpointing(reentrant: bool) -> None:
    want, got = adapted("llama"), adapted("llama", "after")
    got.enable_input_require_grads()
    got.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_trains_alike("llama", got, want)
    assert report(got).fused_calls == 4 and not report(got).fallbacks


def test_train_fp32_adapters_on_a_bf16_model() -> None:
    """PEFT keeps the adapters of a half-precision model in fp32. The numerics rule against float64."""
    want, got, exact = (adapted("llama", order, target_modules="all-linear") for order in ("", "after", ""))
    for model in (want, got):
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(torch.float32 if "lora_" in name else torch.bfloat16)
    exact.load_state_dict(want.state_dict())
    exact.double()
    (out, grads), (plain, plain_grads), (right, right_grads) = (trained("llama", model) for model in (got, want, exact))
    assert relative_error(out, right) <= 1.5 * relative_error(plain, right)
    errors, base = (
        sum(relative_error(found[n], right_grads[n]) ** 2 for n in right_grads) ** 0.5 for found in (grads, plain_grads)
    )
    assert errors <= 1.5 * base and {g.dtype for g in grads.values()} == {torch.float32}
    assert not report(got).fallbacks


def test_generate_with_an_adapter() -> None:
    want, got = adapted("llama", target_modules="all-linear"), adapted("llama", "after", target_modules="all-linear")
    ids, mask = prompt(pad=3)
    for kwargs in ({}, {"cache_implementation": "static", "disable_compile": True}):
        arguments = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, **kwargs}
        assert torch.equal(got.generate(input_ids=ids, **arguments), want.generate(input_ids=ids, **arguments))
    assert not report(got).fallbacks


def test_compile_a_model_with_an_adapter() -> None:
    torch._dynamo.reset()
    want, got = adapted("llama"), adapted("llama", "after")
    compiled = torch.compile(got, backend="aot_eager", fullgraph=True)
    ids = prompt()[0]
    with torch.no_grad():
        assert relative_error(compiled(ids, use_cache=False).logits, outputs("llama", want)) < 1e-5


def test_copy_a_model_with_an_adapter() -> None:
    model = adapted("llama", "after")
    want = outputs("llama", model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    assert relative_error(outputs("llama", other), outputs("llama", families.build("llama"))) < 1e-5
    assert torch.equal(outputs("llama", model), want)


def test_explain_names_the_adapted_projections() -> None:
    text = str(fusedblock.explain(adapted("llama", "after"), phase="prefill", context=128))
    assert "q and v with an adapter" in text and "gated_mlp" in text and "qkv_rope" not in text


def test_norms_with_weights_for_every_head_fall_back_beside_an_adapter() -> None:
    model = families.build("cohere-qk_norm")
    want = adapted_like(model)
    got = copy.deepcopy(want)
    found = fusedblock.fuse(got)
    assert torch.equal(outputs("cohere", got), outputs("cohere", want))
    assert list(found.fallbacks) == ["an adapter before norms with weights for every head"]


def adapted_like(model: nn.Module) -> Any:
    torch.manual_seed(5)
    return peft.get_peft_model(model, lora("cohere", target_modules=["v_proj"])).eval()


@pytest.mark.parametrize("name", ("llama", "phi3", "gpt_neox"))
def test_adapters_beside_the_kernels_in_the_interpreter(name: str) -> None:
    want, got = adapted(name), adapted(name, "after")
    with interpret():
        assert relative_error(outputs(name, got), outputs(name, want)) < 1e-5
        assert_trains_alike(name, got, want)

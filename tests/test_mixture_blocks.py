"""Blocks of experts that are fused alone, in DeepSeek's layers, whose attention waits for a kernel: beside transformers' own."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import mixtures
import pytest
import torch
import transformers
from families import SIZES
from llama import assert_rule, assert_same_tokens, by_kind, prompt, relative_error
from mixtures import run
from op_cases import recording
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import fusedblock
from fusedblock.models import BlockRecord
from fusedblock.models.swap import FusedMixture

WAITS = "multi-head latent attention has no kernel yet"
# Two layers each; of V3's the first is dense. As in families: weights with which half precision chooses what float64 does.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "v2": ("deepseek_v2", 0, {}),
    "v2-greedy": ("deepseek_v2", 0, {"topk_method": "greedy"}),
    "v3": ("deepseek_v3", 2, {}),
    "v3-sums": ("deepseek_v3", 2, {"norm_topk_prob": False, "first_k_dense_replace": 0, "routed_scaling_factor": 0.7}),
    "v3-one_group": ("deepseek_v3", 2, {"n_group": 1, "topk_group": 1, "n_shared_experts": 2}),
}


def build(name: str, **changes: Any) -> nn.Module:
    family, seed, words = CASES[name]
    return mixtures.build(family, seed=seed, **{**words, **changes})


def pair(name: str, **changes: Any) -> tuple[Any, Any, fusedblock.models.FusionReport]:
    """transformers' model and a copy with fused blocks."""
    model = build(name, **changes)
    fused = copy.deepcopy(model)
    return model, fused, fusedblock.fuse(fused)


def outcome(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    out = run(model, 0, use_cache=False).logits
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    model.zero_grad()
    (out * weights).sum().backward()
    return out, by_kind(model)


def kinds(grads: dict[str, Tensor]) -> list[str]:
    scale = max(grad.norm().item() for grad in grads.values())
    return [name for name, grad in grads.items() if grad.norm() > 1e-6 * scale]


def test_the_report_names_what_the_layers_wait_for_and_what_is_fused() -> None:
    model, fused, report = pair("v3", num_hidden_layers=3)
    assert [type(layer.mlp).__name__ for layer in fused.model.layers] == ["DeepseekV3MLP", "DeepseekV3MoE", "DeepseekV3MoE"]
    assert [isinstance(layer.mlp, FusedMixture) for layer in fused.model.layers] == [False, True, True]
    assert isinstance(fused.model.layers[1].mlp, type(model.model.layers[1].mlp))
    assert [(r.name, r.index, r.layer_class, r.status, r.reason) for r in report.blocks] == [
        (f"model.layers.{i}.mlp", i, "DeepseekV3MoE", "fused", "") for i in (1, 2)]  # fmt: skip
    assert all(isinstance(r, BlockRecord) for r in report.blocks)
    assert [(r.status, r.reason) for r in report.layers] == [("fallback", WAITS)] * 3
    run(fused)
    assert (report.fused, report.fused_blocks, report.fused_calls, report.fallback_calls) == (0, 2, 2, 0)
    assert str(report).splitlines() == [
        "0 of 3 layers fused, and 2 of 2 blocks of experts alone", f"  DeepseekV3DecoderLayer 0-2: fallback, {WAITS}",
        "  DeepseekV3MoE 1-2: fused", "  calls: 2 fused, 0 fallback"]  # fmt: skip
    again = fusedblock.fuse(fused)
    assert [r.status for r in again.blocks] == ["already fused"] * 2 and again.blocks[0].calls is report.blocks[0].calls


def test_which_blocks() -> None:
    model = build("v3", num_hidden_layers=3)
    names = list(model.state_dict())
    with pytest.raises(ValueError, match=f"3 of 5 layers and blocks of experts cannot be fused\n  model.layers.0: {WAITS}"):
        fusedblock.fuse(model, strict=True)
    with pytest.raises(ValueError, match="layers has 0, but the layers of DeepseekV3ForCausalLM are 1-2"):
        fusedblock.fuse(model, layers=[0])
    with pytest.raises(ValueError, match=f"1 of 5 layers and blocks of experts cannot be fused\n  model.layers.2: {WAITS}$"):
        fusedblock.fuse(model, strict=True, layers=[2])  # of those selected
    assert not any(isinstance(m, FusedMixture) for m in model.modules())
    report = fusedblock.fuse(model, layers=[2])
    assert [(r.index, r.status, r.reason) for r in report.blocks] == [(1, "skipped", "not in layers"), (2, "fused", "")]
    assert [r.status for r in report.layers] == ["skipped", "skipped", "fallback"]
    assert fusedblock.unfuse(model) == 1 and list(model.state_dict()) == names
    block: Any = model.model.layers[1].mlp
    alone = fusedblock.fuse(block, strict=True)
    assert (alone.layers, alone.fused_blocks) == ((), 1) and [r.name for r in alone.blocks] == [""]
    assert fusedblock.unfuse(block) == 1 and type(block).__mro__[1] is nn.Module


@pytest.mark.parametrize("implementation", ("eager", "sdpa", "fusedblock"))
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name: str, implementation: str) -> None:
    model, fused, report = pair(name)
    for which in (model, fused):
        which.set_attn_implementation(implementation)
    (want, want_grads), (got, got_grads) = outcome(model), outcome(fused)
    assert relative_error(got, want) < 1e-5 and got_grads.keys() == want_grads.keys()
    for part in ("mlp.gate.weight", "mlp.experts.down_proj", "mlp.shared_experts.up_proj.weight"):
        assert any(kind.endswith(part) for kind in kinds(want_grads))
    assert all(relative_error(got_grads[kind], want_grads[kind]) < 1e-5 for kind in kinds(want_grads))
    with torch.no_grad():
        a, b = (run(which, 3, output_hidden_states=True) for which in (model, fused))
        assert all(relative_error(y, x) < 1e-5 for x, y in zip(a.hidden_states, b.hidden_states, strict=True))
        assert fusedblock.unfuse(fused) and torch.equal(run(fused).logits, a.logits)
    assert not report.fallbacks and report.fused_calls == 2 * len(report.blocks)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), (
    ("v2", torch.float32), ("v3", torch.float32),
    *(pytest.param(name, torch.bfloat16, marks=pytest.mark.slow) for name in ("v2", "v3", "v3-one_group")),
))  # fmt: skip
def test_by_the_kernels(name: str, dtype: torch.dtype, launched: list[str]) -> None:
    """Beside transformers' own in the same type and in float64."""
    model = build(name)
    double, original = mixtures.in_double(model), model.to(dtype)
    fused = copy.deepcopy(original)
    fusedblock.fuse(fused)
    want, base = outcome(double), outcome(original)
    with recording("sm_90"):
        got = outcome(fused)
        with torch.no_grad():
            inference = run(fused, 0).logits
    assert {"moe_route", "_moe_products", "_moe_gradients"} <= set(launched)
    for out in (got[0], inference):
        assert_rule((out, got[1]), want, base, kinds(want[1]), dtype)


@pytest.mark.parametrize("name", ("v2", "v3"))
def test_the_router_is_in_fp32_and_hears_its_correction(name: str) -> None:
    """A block in bf16 chooses and weighs as transformers' router does: by products in fp32."""
    model, fused, _ = pair(name)
    block, ours = (which.model.layers[1].mlp.bfloat16() for which in (model, fused))
    if name == "v3":
        for which in (block, ours):
            which.gate.e_score_correction_bias = which.gate.e_score_correction_bias.float()
    x = torch.randn(1, 70, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    heard: list[Any] = []
    hook = block.gate.register_forward_hook(lambda _, args, out: heard.append(out))
    with torch.no_grad():
        block(x)
        hook.remove()
        with mixtures.our_choices() as chosen:
            ours(x)
        assert torch.equal(chosen[0], heard[0][2].sort(-1).values.int())
        if name == "v3":
            for which in (block, ours):
                which.gate.e_score_correction_bias[1] += 3.0  # in place: from now on expert 1 of the group is always chosen
            with mixtures.our_choices() as chosen:
                got, want = ours(x), block(x)
            assert (chosen[0] == 1).any(-1).all() and relative_error(got, want) < 1e-2


@pytest.mark.parametrize("name", ("v2", "v3"))
def test_generate(name: str, launched: list[str]) -> None:
    model, fused, report = pair(name)
    ids, mask = prompt(pad=3)
    kwargs = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    assert_same_tokens(model, model.generate(ids, **kwargs), fused.generate(ids, **kwargs), mask)
    ids, mask = prompt(batch=1)
    kwargs["attention_mask"] = mask
    with recording("sm_90"):
        got = fused.generate(ids, **kwargs)
    assert_same_tokens(model, model.generate(ids, **kwargs), got, mask)
    assert {"moe_route", "_moe_vector"} <= set(launched) and not report.fallbacks


@pytest.mark.parametrize("name", ("v2", "v3"))
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model, fused, _ = pair(name)
    model.save_pretrained(tmp_path / "theirs")
    fused.save_pretrained(tmp_path / "ours")
    (theirs,), (ours,) = ([*(tmp_path / which).glob("*.safetensors")] for which in ("theirs", "ours"))
    assert theirs.read_bytes() == ours.read_bytes()
    with torch.no_grad():
        want = run(fused, 0).logits
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager", dtype=torch.float32).eval()
        report = fusedblock.fuse(loaded)
        assert torch.equal(run(loaded, 0).logits, want) and report.fused_calls == len(report.blocks)
        other = mixtures.build(CASES[name][0], seed=9)
        fusedblock.fuse(other)
        assert not torch.equal(run(other, 0).logits, want)
        fusedblock.load_safetensors(other, tmp_path / "ours")
        assert torch.equal(run(other, 0).logits, want)
        for copied in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
            assert isinstance(copied.model.layers[1].mlp, FusedMixture) and torch.equal(run(copied, 0).logits, want)


@pytest.mark.parametrize("tokens", (1, 16, 65))
@pytest.mark.parametrize("name", ("v2", "v3"))
def test_the_plan_is_what_a_block_launches(name: str, tokens: int) -> None:
    _, fused, _ = pair(name)
    block = fused.model.layers[1].mlp
    with torch.no_grad(), recording("sm_90") as launches:
        block(torch.randn(1, tokens, 64, generator=torch.Generator().manual_seed(0)))
        explanation = fusedblock.explain(block, phase="prefill", seq=tokens, context=tokens)
    (_, planned), = explanation.blocks[0].plans
    assert len(launches) == planned.kernels and not explanation.layers
    assert [step.op for step in planned.launches] == ["moe_route", "moe_experts", "gated_mlp", "linear"]


def test_explain_names_the_blocks() -> None:
    model = build("v3")
    assert "DeepseekV3MoE 1\n  original forward: not fused; call fusedblock.fuse(model) first" in str(fusedblock.explain(model))
    fusedblock.fuse(model)
    text = str(fusedblock.explain(model, phase="decode", context=64))
    lines = text.splitlines()
    assert lines[:3] == ["DeepseekV3DecoderLayer 0-1", f"  original forward: {WAITS}", "DeepseekV3MoE 1"]
    assert lines[3].startswith("  decode, 1 x 1 over 64, float32: ")
    assert "launches a block's forward on sm_90" in text and "shared expert's down" in text and "the cache" not in text


def _set(path: str, value: Any) -> Any:
    def change(block: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        setattr(block.get_submodule(owner), name, value)

    return change


class _Double(nn.Module):
    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return 2 * x


REASONS = [
    ("v3", _set("experts", _Double()), "_Double, not DeepseekV3Experts"),
    ("v3", _set("gate.top_k", 1), ""),
    ("v3", _set("gate.norm_topk_prob", False), ""),
    ("v3", _set("gate.routed_scaling_factor", 0.25), ""),
    ("v3", _set("gate.topk_group", 1), ""),
    ("v3", _set("gate.e_score_correction_bias", nn.Buffer(torch.arange(6.0))), ""),
    ("v3", _set("gate.weight", nn.Parameter(torch.linspace(-1, 1, 6 * 64).view(64, 6).t().contiguous())), ""),
    ("v2", _set("gate.topk_method", "greedy"), ""),
    ("v2", _set("gate.num_group", 2), ""),
    ("v2", _set("experts.act_fn", nn.Tanh()), "Tanh has no kernel"),
    ("v2", _set("shared_experts.act_fn", nn.Tanh()), "Tanh has no kernel"),
    ("v2", _set("shared_experts.up_proj", nn.Linear(64, 96)), "shared_experts.up_proj has a bias"),
    ("v2", lambda block: block.gate.register_forward_hook(lambda *_: None), "gate has a hook"),
    ("v3", lambda block: block.shared_experts.register_forward_hook(lambda *_: None), "shared_experts has a hook"),
    ("v3", lambda block: block.register_forward_hook(lambda *_: None), ""),
    ("v3", lambda block: block.experts.to(torch.float64), "mixture: gate_up has dtype torch.float64"),
    ("v3", _set("experts.config", transformers.PretrainedConfig(_experts_implementation="mine")), "implementation 'mine'"),
    ("v3", lambda block: block.__dict__.update(forward=lambda x: 2 * x), "an instance attribute 'forward'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "why"), REASONS, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(REASONS)])
def test_what_changes_is_seen(name: str, change: Any, why: str) -> None:
    """Before fuse, and after a first call: the reason to fall back, or the right values."""
    for late in (False, True):
        model = build(name)
        fused = copy.deepcopy(model)
        report = fusedblock.fuse(fused) if late else None
        if late:
            run(fused)
        for which in (model, fused):
            change(which.model.layers[1].mlp)
        report = report or fusedblock.fuse(fused)
        found = [b.record.reason for b in fusedblock.explain(fused).blocks if b.record.reason]
        assert any(why in reason for reason in found) if why else not found, found
        if "dtype" in why or "_Double" in why or "mine" in why:
            continue  # no computation of theirs either, or not one worth the name
        with torch.no_grad():
            want, got = (run(which, 0).logits for which in (model, fused))
        assert relative_error(got, want) < 1e-5
        calls = report.blocks[-1].calls
        fallbacks = int(bool(why) and "instance" not in why)  # which runs itself
        assert (calls.fused, sum(calls.fallbacks.values())) == (late + (not why), fallbacks)


def test_calls_that_run_the_original_forward() -> None:
    model, fused, report = pair("v3")
    block, ours = (which.model.layers[1].mlp for which in (model, fused))
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = ours.double()(x.double())
        assert relative_error(block.double()(x.double()), want) == 0.0
        block.float(), ours.float()
        with torch.nn.modules.module.register_module_forward_hook(lambda *_: None):
            assert torch.equal(ours(x), block(x))
        assert relative_error(ours(x[0]), want[0]) < 1e-5  # without an axis for the batch
        with pytest.raises(TypeError, match="positional argument"):
            ours(x, x)
    assert dict(report.fallbacks) == {"hidden_states is torch.float64": 1, "global module hooks are registered": 1}
    assert report.fused_calls == 1


@pytest.mark.parametrize("parameters", (True, False), ids=("experts", "attention"))
def test_lora(parameters: bool) -> None:
    report = mixtures.check_lora(lambda: build("v3"), None if parameters else "o_proj")
    assert report.fused_calls == int(not parameters)
    assert all(reason.startswith("experts is peft.") for reason in report.fallbacks) and bool(report.fallbacks) == parameters


@pytest.mark.parametrize("name", ("v2", "v3"))
def test_autocast(name: str) -> None:
    model, fused, report = pair(name)
    want = outcome(mixtures.in_double(model))
    with torch.autocast("cpu", torch.bfloat16):
        base, got = outcome(model), outcome(fused)
    assert not report.fallbacks and report.fused_calls == len(report.blocks)
    assert got[0].dtype is base[0].dtype and all(got[1][n].dtype is base[1][n].dtype for n in base[1])
    assert_rule(got, want, base, kinds(want[1]), torch.bfloat16)


def test_gradient_checkpointing() -> None:
    model, fused, report = pair("v3-sums")
    found = []
    for which in (model, fused):
        which.train()
        which.gradient_checkpointing_enable()
        found.append(outcome(which)[1])
    assert report.fused_calls == 4 and not report.fallbacks
    assert all(relative_error(found[1][kind], found[0][kind]) < 2e-5 for kind in kinds(found[0]))


@pytest.mark.parametrize("grad", (False, True))
def test_compiled(grad: bool) -> None:
    model, fused, _ = pair("v3")
    torch._dynamo.reset()
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(3))
    a, b = (x.clone().requires_grad_(grad) for _ in range(2))
    block = fused.model.layers[1].mlp
    want, got = model.model.layers[1].mlp(a), torch.compile(lambda x: block(x), backend="aot_eager", fullgraph=True)(b)
    assert relative_error(got, want) < 1e-5
    if grad:
        want.square().sum().backward()
        got.square().sum().backward()
        assert relative_error(b.grad, a.grad) < 1e-5


def test_every_block_of_the_table_is_one_of_a_family_that_waits() -> None:
    from fusedblock.models import table

    assert {spec.family for spec in table.BLOCKS.values()} == {family for family, *_ in CASES.values()}
    assert all(table.waiting_family(spec.family) and spec.family not in table.FAMILIES for spec in table.BLOCKS.values())
    assert SIZES["num_hidden_layers"] == 2

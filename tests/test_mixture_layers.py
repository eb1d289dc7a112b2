"""What fused layers with experts have beside those of test_families: routers that are heard, reasons to fall back, plans."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import families
import mixtures
import pytest
import torch
import transformers
from llama import assert_rule, assert_same_tokens, by_kind, prompt, relative_error
from mixtures import run
from op_cases import recording
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import fusedblock
from fusedblock import ops
from fusedblock.blocks import BlockSpec, plan

HEARD = tuple(name for name, (family, _) in families.MIXTURES.items() if family in mixtures.AUXILIARY)


def pair(name: str, implementation: str = "eager", **changes: Any) -> tuple[nn.Module, nn.Module, fusedblock.FusionReport]:
    """transformers' model and a fused copy."""
    model = families.build(name, implementation, **changes)
    fused = families.twin(model)
    return model, fused, fusedblock.fuse(fused, strict=True)


@pytest.mark.parametrize("implementation", ("eager", "fusedblock"))
@pytest.mark.parametrize("name", HEARD)
def test_router_logits_and_the_auxiliary_loss(name: str, implementation: str) -> None:
    """With their gradients, which reach the routers' weights by way of the auxiliary loss alone too."""
    model, fused, report = pair(name, implementation, router_aux_loss_coef=0.3)
    if implementation == "fusedblock":
        model.set_attn_implementation("eager")
    labels, mask = prompt(pad=3)
    labels[-1, :4] = -100  # of which the logits are a padding token's
    for alone in (False, True):
        found = []
        for which in (model, fused):
            which.zero_grad()
            out = run(which, labels=labels, output_router_logits=True, output_hidden_states=True, use_cache=False)
            (out.aux_loss if alone else out.loss).backward()
            found.append((out, by_kind(which)))
        (want, want_grads), (got, got_grads) = found
        sparse = sum(n.endswith("experts.down_proj") for n, _ in model.named_parameters())
        assert len(got.router_logits) == len(want.router_logits) == sparse
        valid = mask.bool()
        for a, b in zip(want.router_logits, got.router_logits):
            assert a.dtype is b.dtype and a.shape == b.shape and relative_error(b[valid.flatten()], a[valid.flatten()]) < 1e-5
        for a, b in zip(want.hidden_states, got.hidden_states, strict=True):
            assert relative_error(b[valid], a[valid]) < 1e-5
        assert relative_error(got.aux_loss, want.aux_loss) < 1e-5 and relative_error(got.loss, want.loss) < 1e-5
        assert got_grads.keys() == want_grads.keys()
        scale = max(grad.norm() for grad in want_grads.values())
        routers = [kind for kind in want_grads if "gate.weight" in kind or "router.weight" in kind]
        assert routers and all(want_grads[kind].norm() > 1e-3 * scale for kind in routers)
        for kind, grad in want_grads.items():
            assert grad.norm() < 1e-6 * scale or relative_error(got_grads[kind], grad) < 2e-5, kind
    assert not report.fallbacks and report.fused_calls == 4


@pytest.mark.parametrize("name", ("mixtral", "qwen2_moe-dense", "gpt_oss"))
def test_router_logits_without_gradients_and_in_half_precision(name: str) -> None:
    model = families.build(name, "eager").to(torch.bfloat16)
    fused = copy.deepcopy(model)
    fusedblock.fuse(fused)
    with torch.no_grad():
        want, got = (run(which, 0, output_router_logits=True) for which in (model, fused))
    assert len(want.router_logits) == len(got.router_logits)
    for a, b in zip(want.router_logits, got.router_logits):
        assert a.dtype is b.dtype is torch.bfloat16 and a.shape == b.shape and relative_error(b, a) < 2e-2
    fusedblock.unfuse(fused)
    with torch.no_grad():
        again = run(fused, 0, output_router_logits=True)
    assert all(torch.equal(a, b) for a, b in zip(want.router_logits, again.router_logits))
    assert torch.equal(again.logits, want.logits)


@pytest.mark.parametrize("name", families.MIXTURES)
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model, fused, _ = pair(name)
    model.save_pretrained(tmp_path / "theirs")
    fused.save_pretrained(tmp_path / "ours")
    (theirs,), (ours,) = ([*(tmp_path / which).glob("*.safetensors")] for which in ("theirs", "ours"))
    assert theirs.read_bytes() == ours.read_bytes()
    with torch.no_grad():
        want = run(fused, 0).logits
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager", dtype=torch.float32).eval()
        report = fusedblock.fuse(loaded, strict=True)
        assert torch.equal(run(loaded, 0).logits, want) and not report.fallbacks
        other = families.build(name, "eager", seed=9)
        fusedblock.fuse(other)
        assert not torch.equal(run(other, 0).logits, want)
        fusedblock.load_safetensors(other, tmp_path / "ours")
        assert torch.equal(run(other, 0).logits, want)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), (
    ("mixtral", torch.float32), ("gpt_oss", torch.float32), ("qwen2_moe", torch.float32), ("glm4_moe", torch.float32),
    *(pytest.param(name, torch.bfloat16, marks=pytest.mark.slow) for name in ("mixtral", "gpt_oss")),
))  # fmt: skip
def test_by_the_kernels(name: str, dtype: torch.dtype, launched: list[str]) -> None:
    """Outputs and gradients, beside transformers' own in the same type and in float64."""
    original = families.build(name, "eager").to(dtype)
    double, fused = families.twin(original, torch.float64), families.twin(original, dtype)
    double.set_attn_implementation("plain")
    fusedblock.fuse(fused, strict=True)

    def outcome(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        out = run(model, 0, use_cache=False).logits
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
        (out * weights).sum().backward()
        return out, by_kind(model)

    want, base = outcome(double), outcome(original)
    with recording("sm_90"):
        got = outcome(fused)
        with torch.no_grad():
            inference = run(fused, 0).logits
    assert {"moe_route", "_moe_products", "_moe_gradients"} <= set(launched)
    scale = max(grad.norm().item() for grad in want[1].values())
    kinds = [n for n, grad in want[1].items() if grad.norm() > 1e-6 * scale]
    for out in (got[0], inference):
        assert_rule((out, got[1]), want, base, kinds, dtype)


@pytest.mark.parametrize("tokens", (1, 16, 65))
@pytest.mark.parametrize("name", ("mixtral", "qwen2_moe", "glm4_moe-qk_norm"))
def test_the_plan_is_what_a_layer_launches(name: str, tokens: int) -> None:
    model, _, _ = pair(name, num_hidden_layers=1)
    fusedblock.fuse(model)
    ids = torch.randint(3, 90, (1, tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), recording("sm_90") as launches:
        model(ids, use_cache=False)
        # With few SMs the keys are never split: an attention is one launch.
        explanation = fusedblock.explain(model, phase="prefill", seq=tokens, context=tokens)
    (_, planned), = explanation.layers[0].plans
    assert len(launches) == sum(step.kernels for step in planned.launches if step.engine != "torch")
    assert {"moe_route", "moe_experts"} <= {step.op for step in planned.launches}


@pytest.mark.parametrize("seq", (5, 70))
def test_a_router_in_fp32_beside_bf16(seq: int) -> None:
    """As transformers, from 5.24 on, loads GLM-4 MoE: it is fused, and the plan says that its rows are converted."""
    original = families.build("glm4_moe", "eager").bfloat16()
    models = original, families.twin(original, torch.float64), families.twin(original, torch.bfloat16)
    for model in (original, models[2]):
        for layer in model.model.layers[1:]:
            layer.mlp.gate.weight.data = layer.mlp.gate.weight.data.float()
    report = fusedblock.fuse(models[2], strict=True)
    ids = torch.randint(3, 90, (1, seq), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), recording("sm_90") as launches:
        plain, want, got = (model(ids, use_cache=False).logits for model in models)
        explanation = fusedblock.explain(models[2], phase="prefill", seq=seq, context=seq)
    assert not report.fallbacks and report.fused_calls == len(original.model.layers)
    assert relative_error(got, want) <= 1.5 * relative_error(plain, want)
    steps = [step for layer in explanation.layers for step in layer.plans[0][1].launches]
    assert len(launches) == sum(step.kernels for step in steps if step.engine != "torch")
    assert "router's rows" in {step.role for step in steps}


@pytest.mark.parametrize("experts", (8, 128))
@pytest.mark.parametrize(("tokens", "most"), ((1, 4), (64, 4), (512, 6), (4096, 6)))
def test_launches_of_the_mixture(tokens: int, most: int, experts: int) -> None:
    """Router, index and experts, which add the residual."""
    spec = BlockSpec(256, 0, 4, 4, 64, 0.125, 1e-6, activation="", mlp="mixture", experts=experts, top_k=2)
    made = plan(spec, batch=1, seq=tokens, context=tokens, dtype=torch.bfloat16, training=False,
                target=ops.target_of(torch.device("cpu")))  # fmt: skip
    assert sum(step.kernels for step in made.launches if step.op.startswith("moe")) <= most


def _set(path: str, value: Any) -> Any:
    def change(layer: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        target: Any = layer
        for part in owner.split(".") if owner else ():
            target = getattr(target, part)
        setattr(target, name, value)

    return change


def _first(experts: int, *names: str) -> Any:
    """The first experts alone, of these parameters of the MLP: other data under the same parameter."""

    def change(layer: nn.Module) -> None:
        for name in names:
            parameter = layer.mlp.get_parameter(name)
            parameter.data = parameter.data[:experts].clone()

    return change


class _Double(nn.Module):
    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return 2 * x


REASONS = [
    ("olmoe", {"clip_qkv": 0.5}, None, "clip_qkv has no kernel"),
    ("olmoe", {}, _set("self_attn.config.clip_qkv", 0.5), "clip_qkv has no kernel"),
    ("mixtral", {}, _set("mlp.experts", _Double()), "_Double, not MixtralExperts"),
    ("mixtral", {}, _set("mlp.gate.top_k", 1), ""),
    ("mixtral", {}, _set("mlp.gate.top_k", "2"), "mixture: top_k is '2' (str), expected an integer"),
    ("glm4_moe", {}, _set("mlp.gate.routed_scaling_factor", None), "mixture: scale is None (NoneType), expected a number"),
    ("mixtral", {}, _set("mlp.experts.act_fn", nn.Tanh()), "Tanh has no kernel"),
    ("mixtral", {}, lambda layer: layer.mlp.gate.register_forward_hook(lambda *_: None), "mlp.gate has a hook"),
    ("mixtral", {}, lambda layer: layer.mlp.register_forward_hook(lambda *_: None), "mlp has a hook"),
    ("mixtral", {}, lambda layer: layer.mlp.experts.to(torch.float64), "mixture: gate_up has dtype torch.float64"),
    ("mixtral", {}, _first(4, "gate.weight"), "mixture: router (experts hidden) has experts=4, but experts=6 so far"),
    ("mixtral", {}, _first(4, "gate.weight", "experts.gate_up_proj", "experts.down_proj"), ""),
    ("gpt_oss", {}, _set("mlp.experts.limit", 0.0), "limit=0.0, expected a positive number"),
    ("gpt_oss", {}, _set("mlp.experts.limit", 0.5), ""),
    ("gpt_oss", {}, _set("self_attn.sinks", nn.Parameter(torch.ones(5))), "the sinks weight has shape (5,), expected (4,)"),
    ("qwen2_moe", {}, _set("mlp.shared_expert.act_fn", nn.Tanh()), "Tanh has no kernel"),
    ("qwen2_moe", {}, _set("mlp.shared_expert.up_proj", nn.Linear(64, 40)), "mlp.shared_expert.up_proj has a bias"),
    ("qwen2_moe", {}, _set("mlp.experts.config", transformers.PretrainedConfig(_experts_implementation="mine")),
     "experts implementation 'mine'"),
    ("glm4_moe", {}, _set("mlp.gate.routed_scaling_factor", 0.25), ""),
    ("qwen3_moe", {}, _set("mlp.gate.norm_topk_prob", False), ""),
    ("qwen3_moe", {"num_experts": 1025}, None, "experts=1025, expected 1 to 1024"),
    ("glm4_moe", {"n_group": 3, "topk_group": 1, "num_experts_per_tok": 3}, None, "topk_groups=1 groups of 2 experts may be"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "words", "change", "why"), REASONS, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(REASONS)])
def test_what_changes_is_seen(name: str, words: dict[str, Any], change: Any, why: str) -> None:
    """Before fuse, and after a first call: the reason to fall back, or the right values."""
    for late in (False, True):
        model = families.build(name, "eager", **words)
        fused = families.twin(model)
        report = fusedblock.fuse(fused) if late else None
        if late:
            run(fused)
        for which in (model, fused) if change else ():
            change(which.model.layers[1])
        report = report or fusedblock.fuse(fused)
        found = [*(r.reason for r in fusedblock.explain(fused).layers for r in (r.record,) if r.reason)]
        assert any(why in reason for reason in found) if why else not found, found
        if "shape" in why or "dtype" in why or "_Double" in why or ", expected a" in why or "mine" in why or "limit=0" in why:
            continue  # no computation of theirs either, or not one worth the name
        with torch.no_grad():
            want, got = (run(which, 0).logits for which in (model, fused))
        assert relative_error(got, want) < 1e-5
        assert bool(report.fallbacks) == (bool(why) and any(r.status == "fused" for r in report.layers if r.index == 1))


def test_sdpa_has_no_sinks() -> None:
    model = families.build("gpt_oss", "eager")
    report = fusedblock.fuse(model)
    model.config._attn_implementation = "sdpa"
    with torch.no_grad():
        run(model)
    assert list(report.fallbacks) == ["sdpa attention has no sinks; use attn_implementation='eager' or 'fusedblock'"]


def test_jitter_in_training_is_transformers_own() -> None:
    model, fused, report = pair("mixtral", router_jitter_noise=0.1)
    assert "mlp.jitter_noise=0.1" in str(report)
    found = []
    for which in (model, fused):
        torch.manual_seed(5)
        found.append(run(which.train()).logits)
        which.eval()
    assert torch.equal(*found) and list(report.fallbacks) == ["mlp.jitter_noise=0.1 in training"]
    run(fused)
    assert report.fused_calls == 2


@pytest.mark.parametrize("parameters", (True, False), ids=("experts", "attention"))
def test_lora(parameters: bool) -> None:
    """On experts the layer falls back; beside them, only the adapted projections run themselves."""
    report = mixtures.check_lora(lambda: families.build("mixtral", "eager"), None if parameters else "q_proj")
    if parameters:
        assert report.fused_calls == 0 and all(reason.startswith("mlp.experts is peft.") for reason in report.fallbacks)
    else:
        assert report.fused_calls == 2 and not report.fallbacks


@pytest.mark.parametrize("trained", ("experts", "gate.weight", "self_attn"))
def test_some_parameters_alone_are_trained(trained: str) -> None:
    found = []
    for which in pair("qwen3_moe")[:2]:
        for n, p in which.named_parameters():
            p.requires_grad_(trained in n)
        run(which, 0, use_cache=False).logits.square().sum().backward()
        found.append(by_kind(which))
    want, got = found
    assert want.keys() == got.keys() and want
    assert all(relative_error(got[kind], want[kind]) < 1e-5 for kind in want)


@pytest.mark.parametrize("name", ("mixtral", "gpt_oss", "glm4_moe"))
def test_autocast(name: str) -> None:
    model = families.build(name, "eager")
    double, fused = families.twin(model, torch.float64), families.twin(model)
    double.set_attn_implementation("plain")
    report = fusedblock.fuse(fused)

    def outcome(which: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        out = run(which, 0, use_cache=False).logits
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
        (out * weights).sum().backward()
        return out, by_kind(which)

    want = outcome(double)
    with torch.autocast("cpu", torch.bfloat16):
        base, got = outcome(model), outcome(fused)
    assert not report.fallbacks and report.fused_calls == 2
    assert got[0].dtype is base[0].dtype and all(got[1][n].dtype is base[1][n].dtype for n in base[1])
    assert_rule(got, want, base, [n for n in want[1] if "k_proj.bias" not in n], torch.bfloat16)


def test_gradient_checkpointing() -> None:
    model, fused, report = pair("qwen2_moe")
    found = []
    for which in (model, fused):
        which.train()
        which.gradient_checkpointing_enable()
        out = run(which, 0, use_cache=False, output_router_logits=True)
        (out.logits.square().mean() + 0.1 * out.aux_loss).backward()
        found.append(by_kind(which))
    assert report.fused_calls == 4 and not report.fallbacks
    assert all(relative_error(found[1][kind], grad) < 2e-5 for kind, grad in found[0].items())


@pytest.mark.parametrize("name", ("mixtral", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt_oss", "glm4_moe"))))
@pytest.mark.parametrize("grad", (False, True))
def test_compiled(name: str, grad: bool) -> None:
    """One graph, router logits too."""
    model, fused, _ = pair(name, "eager")
    layer: Any = fused.model.layers[1]
    torch._dynamo.reset()
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(3))
    position = model.model.rotary_emb(x, torch.arange(9)[None])

    def call(which: Any, x: Tensor) -> Tensor:
        return which(x, position_embeddings=position)  # type: ignore[no-any-return]

    compiled = torch.compile(lambda x: call(layer, x), backend="aot_eager", fullgraph=True)
    a, b = (x.clone().requires_grad_(grad) for _ in range(2))
    want, got = call(model.model.layers[1], a), compiled(b)
    assert relative_error(got, want) < 1e-5
    if grad:
        want.square().sum().backward()
        got.square().sum().backward()
        assert relative_error(b.grad, a.grad) < 1e-5


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


@torch.no_grad()
def test_exported_for_any_length() -> None:
    model, fused, _ = pair("mixtral", "eager")
    ids = torch.randint(0, 60, (1, 70), generator=torch.Generator().manual_seed(4))
    length = ({1: torch.export.Dim("tokens", max=4096)},)
    exported = torch.export.export(Logits(fused), (ids[:, :7],), dynamic_shapes=length, strict=False)
    assert {n.target for n in exported.graph.nodes} >= {torch.ops.fusedblock.mixture.default}
    for tokens in (3, 17, 70):
        got, want = exported.module()(ids[:, :tokens]), model(input_ids=ids[:, :tokens]).logits
        assert relative_error(got, want) < 1e-5


def test_generate_by_the_kernels(launched: list[str]) -> None:
    model, fused, report = pair("qwen3_moe")
    ids, mask = prompt(batch=1)
    kwargs = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    for cache in ({}, {"cache_implementation": "static", "disable_compile": True}):
        with recording("sm_90"):
            got = fused.generate(ids, **kwargs, **cache)
        assert_same_tokens(model, model.generate(ids, **kwargs, **cache), got, mask)
    assert {"moe_route", "_moe_vector"} <= set(launched) and not report.fallbacks

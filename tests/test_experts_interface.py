"""experts_implementation="fusedblock" as people set it, beside transformers' own experts."""

from __future__ import annotations

import copy
import importlib
import types
from collections.abc import Callable
from typing import Any

import families
import mixtures
import peft
import pytest
import torch
import transformers
from llama import assert_rule, assert_same_tokens, by_kind, prompt, relative_error
from op_cases import recording
from test_house import run_python
from torch import Tensor, nn

import fusedblock
from fusedblock.models import experts

fusedblock.register_experts()  # another test's module may have imported fusedblock before transformers

DTYPES = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)


def outcome(model: nn.Module, seq: int, pad: int) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
    """Logits that are not padding, the gradients of a random combination of them by kind of parameter, and who was chosen."""
    ids, mask = prompt(seq=seq, pad=pad)
    valid = mask.bool()
    model.zero_grad()
    with mixtures.choices(model) as chosen:
        out = model(ids, attention_mask=mask, use_cache=False).logits[valid]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    (out * weights).sum().backward()
    return out, by_kind(model), [c[valid.flatten()] for c in chosen]


# Weights with which half precision chooses the experts that float64 does: another choice is no rounding error.
SEEDS = {"olmoe": 2, "gpt_oss": 2}


def check(family: str, dtype: torch.dtype, seq: int, pad: int, kernels: bool = False) -> None:
    """The numerics rule for outputs and gradients, plain torch being transformers' eager experts."""
    base = mixtures.build(family, seed=SEEDS.get(family, 0)).to(dtype)
    double, ours = mixtures.in_double(base), copy.deepcopy(base)
    ours.set_experts_implementation("fusedblock")
    want, plain = (outcome(model, seq, pad) for model in (double, base))
    if kernels:
        with recording("sm_90"):
            got = outcome(ours, seq, pad)
    else:
        got = outcome(ours, seq, pad)
    assert got[1].keys() == want[1].keys() and any("experts" in kind for kind in want[1])
    for a, b, c in zip(want[2], plain[2], got[2], strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    # A gradient that is zero but for rounding (of a key bias under softmax) has no relative error.
    scale = max(grad.norm().item() for grad in want[1].values())
    kinds = [n for n, grad in want[1].items() if grad.norm() > 1e-6 * scale]
    assert_rule(got[:2], want[:2], plain[:2], kinds, dtype)


@pytest.mark.parametrize("pad", (0, 3), ids=("whole", "padded"))
@DTYPES
@pytest.mark.parametrize("family", families.EXPERTS)
def test_outputs_and_gradients(family: str, dtype: torch.dtype, pad: int) -> None:
    check(family, dtype, 9, pad)


@pytest.mark.parametrize(("dtype", "seq"), (
    (torch.float32, 9), (torch.bfloat16, 9), pytest.param(torch.float32, 34, marks=pytest.mark.slow),
))  # fmt: skip
@pytest.mark.parametrize("family", ("mixtral", "gpt_oss"))
def test_outputs_and_gradients_by_the_kernels(family: str, dtype: torch.dtype, seq: int, launched: list[str]) -> None:
    """Of 18 tokens and of 68: two ways to run."""
    check(family, dtype, seq, 3, kernels=True)
    assert {"moe_index", "_moe_products", "_moe_gradients"} <= set(launched)


@pytest.mark.parametrize("family", families.EXPERTS)
def test_generate(family: str) -> None:
    """Greedy tokens, cache dynamic and static."""
    model = mixtures.build(family)
    ours = copy.deepcopy(model)
    ours.set_experts_implementation("fusedblock")
    ids, mask = prompt(pad=3)
    for kwargs in ({}, {"cache_implementation": "static", "disable_compile": True}):
        kwargs |= {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
        assert_same_tokens(model, model.generate(ids, **kwargs), ours.generate(ids, **kwargs), mask)


def test_generate_by_the_kernels(launched: list[str]) -> None:
    """One token at a time: the experts' products with a vector."""
    model = mixtures.build("qwen3_moe")
    ours = copy.deepcopy(model)
    ours.set_experts_implementation("fusedblock")
    ids, mask = prompt(batch=1)
    kwargs = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    with recording("sm_90"):
        got = ours.generate(ids, **kwargs)
    assert {"moe_index", "_moe_vector"} <= set(launched)
    assert_same_tokens(model, model.generate(ids, **kwargs), got, mask)


@pytest.mark.parametrize("family", mixtures.AUXILIARY)
def test_router_logits_and_the_auxiliary_loss(family: str) -> None:
    """With their gradients, padding masked."""
    ids, mask = prompt(pad=3)
    found = []
    for which in ("eager", "fusedblock"):
        model = mixtures.build(family, which, router_aux_loss_coef=0.3)
        out = model(ids, attention_mask=mask, labels=ids, output_router_logits=True)
        out.loss.backward()
        found.append((out, by_kind(model)))
    (want, want_grads), (got, got_grads) = found
    assert len(got.router_logits) == len(want.router_logits) == model.config.num_hidden_layers
    for a, b in zip(want.router_logits, got.router_logits):
        assert relative_error(b, a) < 1e-5
    assert want.aux_loss > 1 and relative_error(got.aux_loss, want.aux_loss) < 1e-5
    assert relative_error(got.loss, want.loss) < 1e-5
    routers = [kind for kind in want_grads if "gate.weight" in kind or "router.weight" in kind]
    assert routers
    for kind in routers:
        assert relative_error(got_grads[kind], want_grads[kind]) < 1e-5, kind


@pytest.mark.parametrize("family", ("mixtral", "gpt_oss"))
def test_autocast(family: str) -> None:
    model = mixtures.build(family, seed=SEEDS.get(family, 0))
    want = outcome(mixtures.in_double(model), 9, 0)
    found = []
    for which in ("eager", "fusedblock"):
        model.set_experts_implementation(which)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(outcome(model, 9, 0))
    plain, got = found
    for a, b in zip(plain[2], got[2], strict=True):
        assert torch.equal(a, b)
    kinds = [kind for kind in want[1] if "experts" in kind]
    assert got[0].dtype is plain[0].dtype and all(got[1][kind].dtype is torch.float32 for kind in kinds)
    assert_rule(got[:2], want[:2], plain[:2], kinds, torch.bfloat16)


@pytest.mark.parametrize("family", ("mixtral", "gpt_oss"))
def test_lora_on_the_experts(family: str) -> None:
    """PEFT adapts the 3-D weights as they are read."""
    model = mixtures.build(family)
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=parameters))
    ids, mask = prompt(pad=3)
    before = adapted(input_ids=ids, attention_mask=mask).logits.detach()
    g = torch.Generator().manual_seed(6)
    for name, p in adapted.named_parameters():
        if "lora_" in name:
            p.data = 0.1 * torch.randn(p.shape, generator=g)
    found = []
    for which in ("eager", "fusedblock"):
        model.set_experts_implementation(which)
        adapted.zero_grad()
        out = adapted(input_ids=ids, attention_mask=mask).logits
        out[mask.bool()].square().sum().backward()
        found.append([out.detach(), *by_kind(adapted).values()])
    assert relative_error(found[0][0], before) > 0.1 and len(found[0]) > 4
    for want, got in zip(*found, strict=True):
        assert relative_error(got, want) < 1e-5


# ---- experts modules by themselves -----------------------------------------------------------------------------------------


def module(family: str, name: str, **words: Any) -> nn.Module:
    """An experts module of 5 experts in fp32, which runs on our kernels' reference."""
    package = f"transformers.models.{family}"
    configuration = importlib.import_module(f"{package}.configuration_{family}")
    modeling = importlib.import_module(f"{package}.modeling_{family}")
    made = getattr(configuration, f"{name}Config")(**words)
    made._experts_implementation = "fusedblock"
    found = getattr(modeling, f"{name.removesuffix('Text')}Experts")(made)
    g = torch.Generator().manual_seed(0)
    for p in found.parameters():
        p.data = 0.3 * torch.randn(p.shape, generator=g)
    return found


SMALL = {"hidden_size": 24, "intermediate_size": 40}


def results(experts_module: nn.Module, which: str, indices: Tensor, weights: Tensor) -> list[Tensor]:
    """out, and the gradients of x, the weights and every parameter."""
    experts_module.config._experts_implementation = which
    g = torch.Generator().manual_seed(1)
    x, grad = (2 * torch.randn(len(indices), 24, generator=g) for _ in range(2))
    leaves = [x.requires_grad_(), weights.detach().clone().requires_grad_(), *experts_module.parameters()]
    out = experts_module(x, indices, leaves[1])
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def routed(tokens: int = 11, top_k: int = 2) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    return torch.rand(tokens, 5, generator=g).topk(top_k).indices, 0.1 + torch.rand(tokens, top_k, generator=g)


@pytest.mark.parametrize(
    ("family", "name", "words"),
    (
        ("openai_privacy_filter", "OpenAIPrivacyFilter", {"num_local_experts": 5}),
        ("minimax_m3_vl", "MiniMaxM3VLText", {"num_local_experts": 5, "swiglu_alpha": 1.3, "swiglu_limit": 1.5}),
        ("gpt_oss", "GptOss", {"num_local_experts": 5}),
        ("mixtral", "Mixtral", {"num_local_experts": 5, "hidden_act": "relu"}),
        ("mixtral", "Mixtral", {"num_local_experts": 5, "hidden_act": "gelu_pytorch_tanh"}),
        ("mixtral", "Mixtral", {"num_local_experts": 5, "hidden_act": "relu2"}),
        ("lfm2_moe", "Lfm2Moe", {"num_experts": 5, "moe_intermediate_size": 40}),
    ),
)  # fmt: skip
def test_gates_and_layouts(family: str, name: str, words: dict[str, Any]) -> None:
    """The numbers of a gate are read from the live module."""
    made = module(family, name, **SMALL, **words)
    if hasattr(made, "limit"):
        made.limit = 1.5
    for want, got in zip(results(made, "eager", *routed()), results(made, "fusedblock", *routed()), strict=True):
        assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("family", ("mixtral", "gpt_oss"))
@pytest.mark.parametrize("kernels", (False, True))
@pytest.mark.parametrize("other", (5, 2**32 + 1, -(2**32)))
def test_slots_of_other_ranks_have_no_part(family: str, kernels: bool, other: int) -> None:
    """In expert parallelism their index is the number of experts: as if their weight were 0, with no gradient for it. So it is
    for any other index that is no expert's, even where its lower 32 bits are."""
    made = module(family, {"mixtral": "Mixtral", "gpt_oss": "GptOss"}[family], **SMALL, num_local_experts=5)
    indices, weights = routed()
    away = torch.rand(indices.shape, generator=torch.Generator().manual_seed(3)) < 0.4
    away[2] = True
    want = results(made, "eager", indices, weights.masked_fill(away, 0.0))
    want[2] = want[2].masked_fill(away, 0.0)
    args = (made, "fusedblock", indices.masked_fill(away, other), weights)
    if kernels:
        with recording("sm_90") as launches:
            got = results(*args)
        assert launches
    else:
        got = results(*args)
    assert got[0][2].eq(0).all()
    for a, b in zip(want, got, strict=True):
        assert relative_error(b, a) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", (1, 11, 70))
@pytest.mark.parametrize(("family", "name"), (("mixtral", "Mixtral"), ("gpt_oss", "GptOss")))
def test_the_host_waits_for_nothing(family: str, name: str, tokens: int) -> None:
    """Forward and backward, once everything is compiled."""
    made = module(family, name, **SMALL, num_local_experts=5)
    want = results(made, "eager", *routed(tokens))
    g = torch.Generator().manual_seed(1)
    x, grad = (2 * torch.randn(tokens, 24, generator=g) for _ in range(2))
    made.cuda().config._experts_implementation = "fusedblock"
    x, grad, indices, weights = (t.cuda() for t in (x, grad, *routed(tokens)))
    leaves = [x.requires_grad_(), weights.requires_grad_(), *made.parameters()]

    def run() -> list[Tensor]:
        out = made(x, indices, weights)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(want, got, strict=True):
        assert relative_error(b.cpu(), a) < 1e-5


def test_no_tokens_and_views() -> None:
    made = module("mixtral", "Mixtral", **SMALL, num_local_experts=5)
    out = made(torch.zeros(0, 24), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2))
    assert out.shape == (0, 24)
    indices, weights = routed(12)
    x = torch.randn(24, 12, generator=torch.Generator().manual_seed(4)).t()
    want = made(x.contiguous(), indices, weights)
    assert torch.equal(made(x, indices.t().contiguous().t(), weights.t().contiguous().t()), want)
    assert torch.equal(made(x.unflatten(0, (3, 4)), indices, weights), want.unflatten(0, (3, 4)))


class Odd(nn.Module):
    """An activation of somebody's own."""


@pytest.mark.parametrize(
    ("family", "name", "words", "why"),
    (
        ("nemotron_h", "NemotronH", {"n_routed_experts": 5, "mlp_hidden_act": "relu2"}, "its experts have no gate"),
        ("deepseek_v4", "DeepseekV4", {"num_local_experts": 5}, r"its gate, .*DeepseekV4Experts._apply_gate, has no kernel"),
        ("mixtral", "Mixtral", {"num_local_experts": 5, "hidden_act": "mish"}, "activation .*Mish.* has no kernel"),
    ),
)  # fmt: skip
def test_what_has_no_kernel_raises_by_name(family: str, name: str, words: dict[str, Any], why: str) -> None:
    made = module(family, name, **SMALL, **words)
    with pytest.raises(ValueError, match=f"fusedblock experts: {name}Experts: {why}; use experts_implementation='grouped_mm'"):
        made(torch.zeros(11, 24), *routed())


def test_a_part_that_is_not_known_raises_by_name() -> None:
    made = module("mixtral", "Mixtral", **SMALL, num_local_experts=5)
    made.post_expert_norm = nn.LayerNorm(24)
    with pytest.raises(ValueError, match="MixtralExperts: its experts have post_expert_norm too; use"):
        made(torch.zeros(11, 24), *routed())
    made = module("mixtral", "Mixtral", **SMALL, num_local_experts=5)
    made.act_fn = Odd()
    with pytest.raises(ValueError, match="MixtralExperts: activation Odd has no kernel"):
        made(torch.zeros(11, 24), *routed())
    with pytest.raises(ValueError, match="gate_up_weight has dtype torch.float32"):
        module("mixtral", "Mixtral", **SMALL, num_local_experts=5)(torch.zeros(11, 24).half(), *routed())


@pytest.mark.parametrize("which", ("gelu", "relu", "silu"))
def test_activations_that_are_functions(which: str) -> None:
    made = module("mixtral", "Mixtral", **SMALL, num_local_experts=5)
    del made.act_fn
    made.act_fn = getattr(nn.functional, which)
    for want, got in zip(results(made, "eager", *routed()), results(made, "fusedblock", *routed()), strict=True):
        assert relative_error(got, want) < 1e-5
    made.act_fn = nn.functional.mish
    with pytest.raises(ValueError, match="MixtralExperts: activation mish has no kernel"):
        made(torch.zeros(11, 24), *routed())


def test_what_is_hung_on_an_instance_raises_by_name() -> None:
    def give(change: Callable[[nn.Module], object], why: str) -> None:
        made = module("mixtral", "Mixtral", **SMALL, num_local_experts=5)
        change(made)
        with pytest.raises(ValueError, match=f"fusedblock experts: MixtralExperts: {why}; use experts_implementation="):
            made(torch.zeros(11, 24), *routed())

    def gate(self: nn.Module, gate_up: Tensor) -> Tensor:
        return gate_up.chunk(2, dim=-1)[0]

    give(lambda m: m.act_fn.register_forward_hook(lambda mod, args, out: 2 * out), "act_fn has a hook")
    give(lambda m: m.act_fn.register_forward_pre_hook(lambda mod, args: None), "act_fn has a hook")
    give(lambda m: m.act_fn.register_full_backward_hook(lambda mod, given, got: None), "act_fn has a hook")
    give(lambda m: setattr(m.act_fn, "forward", torch.tanh), "act_fn has an instance forward .*")
    give(lambda m: setattr(m, "_apply_gate", types.MethodType(gate, m)), "it has an instance _apply_gate")


@pytest.mark.parametrize(("family", "name"), (("mixtral", "Mixtral"), ("gpt_oss", "GptOss")))
def test_on_the_meta_device(family: str, name: str) -> None:
    made = module(family, name, **SMALL, num_local_experts=5).to("meta")
    x, indices, weights = (t.to("meta") for t in (torch.zeros(11, 24), *routed()))
    with torch.autocast("cpu", torch.bfloat16):
        out = made(x, indices, weights)
    assert out.is_meta and out.shape == x.shape and out.dtype is torch.float32


# ---- registration, and compiled --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_importing_fusedblock_after_transformers_registers() -> None:
    known = "\nfrom transformers.integrations.moe import ExpertsInterface as E\nfound = 'fusedblock' in E()\n"
    run_python(f"import transformers, fusedblock{known}assert found")
    late = f"import sys, fusedblock\nassert 'transformers' not in sys.modules{known}assert not found\n"
    run_python(f"{late}fusedblock.register_experts(){known}assert found")


def test_registering_again_changes_nothing() -> None:
    for _ in range(2):
        fusedblock.register_experts()
    assert transformers.integrations.moe.ExpertsInterface()["fusedblock"] is experts.experts_forward
    assert mixtures.build("mixtral", "fusedblock").config._experts_implementation == "fusedblock"


@pytest.mark.parametrize("family", ("mixtral", pytest.param("gpt_oss", marks=pytest.mark.slow)))
def test_compiled_decoding_with_a_static_cache(family: str) -> None:
    """As many graphs as with transformers' own experts, which a window's cache makes more than one."""
    model = mixtures.build(family)
    ids, mask = prompt(pad=3)
    kwargs = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    want, graphs = model.generate(ids, **kwargs, disable_compile=True), []
    for which in ("batched_mm", "fusedblock"):
        model.set_experts_implementation(which)
        compiling = transformers.CompileConfig(backend="aot_eager", fullgraph=True, mode=None, dynamic=False)
        compiling._compile_all_devices = True
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        got = model.generate(ids, **kwargs, compile_config=compiling)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    model.set_experts_implementation("eager")
    assert_same_tokens(model, want, got, mask)
    assert graphs[1] == graphs[0] > 0


@pytest.mark.parametrize(("family", "name"), (("mixtral", "Mixtral"), ("gpt_oss", "GptOss"), ("lfm2_moe", "Lfm2Moe")))
def test_compiled_for_any_number_of_tokens(family: str, name: str) -> None:
    """One graph for every length, whatever ways there are to run it."""
    made = module(family, name, **SMALL, num_local_experts=5, num_experts=5, moe_intermediate_size=40)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda *args: made(*args), backend="aot_eager", fullgraph=True, dynamic=True)
    g = torch.Generator().manual_seed(5)
    for tokens in (3, 7, 11, 16, 17, 30, 33, 47, 64, 65, 90, 128, 129, 200, 333, 500):
        x = torch.randn(tokens, 24, generator=g)
        assert relative_error(compiled(x, *routed(tokens)), made(x, *routed(tokens))) < 1e-6
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1

    class Exported(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made = made

        def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
            return self.made(x, indices, weights)

    length = {0: torch.export.Dim("tokens")}
    args = (torch.randn(7, 24, generator=g), *routed(7))
    exported = torch.export.export(Exported(), args, dynamic_shapes=(length,) * 3, strict=False).module()
    for tokens in (2, 64, 200):
        x = torch.randn(tokens, 24, generator=g)
        assert relative_error(exported(x, *routed(tokens)), made(x, *routed(tokens))) < 1e-6

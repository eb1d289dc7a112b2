"""The rules of the swap, each of which was once a silent wrong answer, and every reason for a call to fall back."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from llama import CACHE, prompt, relative_error, tiny, twin
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.utils import parametrize
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import fusedblock


def logits(model: nn.Module, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(prompt()[0], use_cache=False, **kwargs).logits


def arguments(model: LlamaForCausalLM, seq: int = 5) -> tuple[Tensor, dict[str, Any]]:
    """hidden_states and keywords as the model hands them to a layer."""
    x = torch.randn(2, seq, 64, generator=torch.Generator().manual_seed(4)).to(model.dtype)
    positions = torch.arange(seq)[None]
    return x, {"position_ids": positions, "position_embeddings": model.model.rotary_emb(x, positions), "use_cache": False}


# Rule 1: the class keeps its name; specs are found along the MRO; unfuse refuses a class that is no longer ours.


def wrapped_like_fsdp(layer: nn.Module) -> None:
    layer.__class__ = type(f"FSDP{type(layer).__name__}", (type(layer),), {})


def test_rule_1_layer_of_a_wrapper_class_is_fused() -> None:
    model = tiny()
    want = logits(model)
    for layer in model.model.layers:
        wrapped_like_fsdp(layer)
    report = fusedblock.fuse(model, strict=True)
    assert [record.layer_class for record in report.layers] == ["FSDPLlamaDecoderLayer"] * 2
    assert relative_error(logits(model), want) < 1e-5 and report.fused_calls == 2
    assert fusedblock.unfuse(model) == 2 and type(model.model.layers[0]).__name__ == "FSDPLlamaDecoderLayer"


def test_rule_1_unfuse_refuses_a_class_made_from_ours() -> None:
    model = tiny()
    want = logits(model)
    report = fusedblock.fuse(model)
    wrapped_like_fsdp(model.model.layers[1])
    assert relative_error(logits(model), want) < 1e-5 and report.fused_calls == 2
    with pytest.raises(RuntimeError, match="class of model.layers.1 was replaced after fuse, by FSDPLlamaDecoderLayer"):
        fusedblock.unfuse(model)
    assert type(model.model.layers[0]) is not LlamaDecoderLayer  # nothing is half undone


@pytest.mark.parametrize("order", ("shard, fuse", "fuse, shard"))
def test_rule_1_fsdp2(order: str) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model = tiny().train()
    other = twin(model).train()
    ids = prompt()[0]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        if order == "fuse, shard":
            report = fusedblock.fuse(other, strict=True)
        for layer in (*other.model.layers, other):
            fully_shard(layer, mesh=dist.init_device_mesh("cpu", (1,)))
        if order == "shard, fuse":
            report = fusedblock.fuse(other, strict=True)
        optimizers = [torch.optim.SGD(candidate.parameters(), lr=0.1) for candidate in (model, other)]
        for _ in range(3):
            losses = [candidate(ids, labels=ids).loss for candidate in (model, other)]
            assert abs(losses[0].item() - losses[1].item()) < 1e-5
            for loss, optimizer in zip(losses, optimizers):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        assert report.fused_calls == 6 and report.fallback_calls == 0
        if order == "shard, fuse":
            assert fusedblock.unfuse(other) == 2
        else:
            with pytest.raises(RuntimeError, match="FSDPLlamaDecoderLayer"):
                fusedblock.unfuse(other)
    finally:
        dist.destroy_process_group()


# Rule 2: a forward in the instance's __dict__ hides the class's.


def test_rule_2_bound_original_forward() -> None:
    model = tiny()
    for layer in model.model.layers:
        layer.forward = layer.forward
    before = [dict(vars(layer)) for layer in model.model.layers]
    report = fusedblock.fuse(model)
    logits(model)
    assert report.fused_calls == 2
    fusedblock.unfuse(model)
    assert [dict(vars(layer)) for layer in model.model.layers] == before


def test_rule_2_foreign_forward_is_not_hidden() -> None:
    model = tiny()
    model.model.layers[0].forward = lambda hidden_states, **kwargs: hidden_states
    want = logits(model)
    report = fusedblock.fuse(model)
    assert report.layers[0].status == "fallback" and "would shadow" in report.layers[0].reason
    assert relative_error(logits(model), want) < 1e-5 and report.fused_calls == 1
    model.model.layers[1].forward = lambda hidden_states, **kwargs: hidden_states  # after fuse: explain says it
    assert "LlamaDecoderLayer 1\n  original forward: an instance attribute 'forward' shadows" in str(fusedblock.explain(model))


@pytest.mark.parametrize("order", ("dispatch, fuse", "fuse, dispatch"))
def test_rule_2_accelerate_dispatch(order: str) -> None:
    from accelerate import dispatch_model
    from accelerate.hooks import remove_hook_from_submodules

    model = tiny(num_hidden_layers=3)
    want = logits(model)
    report = None
    if order == "fuse, dispatch":
        report = fusedblock.fuse(model)
    names = ("model.embed_tokens", "model.layers.0", "model.layers.2", "model.norm", "model.rotary_emb", "lm_head")
    with tempfile.TemporaryDirectory() as folder:
        devices = {**dict.fromkeys(names, "cpu"), "model.layers.1": "disk"}
        model = dispatch_model(model, devices, main_device="cpu", offload_dir=folder, force_hooks=True)
        report = report or fusedblock.fuse(model)
        assert relative_error(logits(model), want) < 1e-5
        # The layer on disk has its weights on meta until accelerate's own forward has run.
        assert [record.calls.fused for record in report.layers] == [1, 0, 1]
        assert "offloaded by accelerate" in str(report)
        assert fusedblock.unfuse(model) == 3
        assert relative_error(logits(model), want) < 1e-5 and report.fused_calls == 2
        report = fusedblock.fuse(model)
        remove_hook_from_submodules(model)
    assert relative_error(logits(model), want) < 1e-5 and report.fused_calls == 3
    assert fusedblock.unfuse(model) == 3
    assert torch.equal(logits(model), want)
    assert not any("_old_forward" in vars(layer) for layer in model.model.layers)


# Rule 3: every call is checked. What the kernels do not know runs as it always did, and the report says why.


class Adapter(nn.Module):
    """What an adapter library puts where a Linear was; it shows the inner weight as its own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.delta = nn.Linear(base.in_features, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.delta(x)


class Tagged(Tensor):
    """A tensor subclass, as DTensor and the tensors of quantisation libraries are."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = function(*args, **(kwargs or {}))
        return out.as_subclass(cls) if function is Tensor.detach else out  # a Parameter of it needs that; results are plain


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parent_of(model: LlamaForCausalLM, name: str) -> tuple[nn.Module, str]:
    layer = model.model.layers[0]
    return (layer.self_attn if name[:2] in ("q_", "k_", "v_", "o_") else layer.mlp if name.endswith("_proj") else layer), name


def child(model: LlamaForCausalLM, name: str) -> nn.Module:
    return getattr(*parent_of(model, name))


def adapt(model: LlamaForCausalLM, name: str) -> None:
    torch.manual_seed(5)
    parent, name = parent_of(model, name)
    setattr(parent, name, Adapter(getattr(parent, name)))


def tag(model: LlamaForCausalLM, name: str) -> None:
    module = child(model, name)
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Tagged))


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CHANGES: dict[str, tuple[Callable[[LlamaForCausalLM], Any], str]] = {
    **{f"adapter-{n}": (functools.partial(adapt, name=n), f"{n} is {__name__}.Adapter, not torch.nn") for n in PROJECTIONS},
    "parametrized": (
        lambda model: parametrize.register_parametrization(child(model, "up_proj"), "weight", Doubled()),
        "up_proj is torch.nn.utils.parametrize.ParametrizedLinear",
    ),
    "linear-subclass": (
        lambda model: setattr(child(model, "v_proj"), "__class__", type("Linear4bit", (nn.Linear,), {})),
        f"v_proj is {__name__}.Linear4bit",
    ),
    "tensor-subclass": (functools.partial(tag, name="k_proj"), f"a weight is a {__name__}.Tagged"),
    "forward-hook": (lambda m: child(m, "o_proj").register_forward_hook(lambda m, a, out: 2 * out), "o_proj has a hook"),
    "norm-hook": (lambda m: child(m, "input_layernorm").register_forward_hook(lambda m, a, out: 2 * out), "layernorm has a hook"),
    "attention-hook": (
        lambda m: m.model.layers[0].self_attn.register_forward_hook(lambda m, a, out: (2 * out[0], None)),
        "self_attn has a hook",
    ),
    "forward-pre-hook": (lambda m: child(m, "gate_proj").register_forward_pre_hook(lambda m, a: (2 * a[0],)), "gate_proj has a"),
    "backward-hook": (lambda m: child(m, "q_proj").register_full_backward_hook(lambda m, a, b: None), "q_proj has a hook"),
    "backward-pre-hook": (lambda m: child(m, "q_proj").register_full_backward_pre_hook(lambda m, a: None), "q_proj has a hook"),
    "instance-forward": (
        lambda m: setattr(child(m, "down_proj"), "forward", lambda x: torch.ones(*x.shape[:-1], 64)),
        "down_proj has an instance forward",
    ),
    "other-norm": (
        lambda m: setattr(m.model.layers[0], "post_attention_layernorm", nn.LayerNorm(64)),
        "post_attention_layernorm is torch.nn.modules.normalization.LayerNorm, not LlamaRMSNorm",
    ),
    "epsilons": (lambda m: setattr(child(m, "input_layernorm"), "variance_epsilon", 0.3), "different epsilons, 0.3 and 1e-06"),
    "activation": (lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.ELU()), "has no kernel"),
}  # fmt: skip


@pytest.mark.parametrize("when", ("before fuse", "before the first call", "after a call"))
@pytest.mark.parametrize("change", CHANGES)
def test_rule_3_changed_child(change: str, when: str) -> None:
    apply, reason = CHANGES[change]
    model = tiny()
    plain = logits(model)
    other = twin(model)
    apply(other)
    want = logits(other)
    assert "backward" in change or "subclass" in change or relative_error(plain, want) > 1e-4  # the change matters
    if when == "before fuse":
        apply(model)
    report = fusedblock.fuse(model)
    if when == "after a call":
        assert relative_error(logits(model), plain) < 1e-5 and report.fused_calls == 2
    if when != "before fuse":
        apply(model)
    fused_before = report.layers[1].calls.fused
    assert relative_error(logits(model), want) < 1e-5
    assert report.layers[1].calls.fused == fused_before + 1  # the untouched layer
    if report.layers[0].status == "fallback":
        assert when == "before fuse" and reason in report.layers[0].reason
    else:
        assert [(reason in found, count) for found, count in report.layers[0].calls.fallbacks.items()] == [(True, 1)]
    if when == "before fuse":
        assert reason in report.layers[0].reason and reason in str(report)
        fusedblock.unfuse(model)
        with pytest.raises(ValueError, match="model.layers.0: "):
            fusedblock.fuse(model, strict=True)


def test_rule_3_adapter_that_goes_away() -> None:
    """merge_and_unload puts Linears back: the layer is fused again without being told."""
    model = tiny()
    report = fusedblock.fuse(model)
    adapt(model, "q_proj")
    logits(model)
    model.model.layers[0].self_attn.q_proj = model.model.layers[0].self_attn.q_proj.base
    logits(model)
    assert report.layers[0].calls.fused == 1 and report.layers[0].calls.fallbacks.total() == 1


def whole(model: LlamaForCausalLM, seq: int) -> Tensor:
    return torch.zeros(2, 1, seq, seq, dtype=model.dtype)


CALLS: dict[str, tuple[Callable[[LlamaForCausalLM], dict[str, Any]], str]] = {
    "output_attentions": (lambda m: {"output_attentions": True}, "output_attentions=True"),
    "not causal": (lambda m: {"is_causal": False}, "is_causal=False"),
    "unknown keyword": (lambda m: {"fancy_bias": torch.zeros(1)}, "keyword 'fancy_bias' is not understood"),
    "packing without a mask": (lambda m: {"cu_seq_lens_q": torch.tensor([0, 2, 5])}, "keyword 'cu_seq_lens_q' without a mask"),
    "2-D mask": (lambda m: {"attention_mask": torch.ones(5, 5, dtype=torch.bool).tril()}, "attention_mask has 2 axes"),
    "integer mask": (lambda m: {"attention_mask": whole(m, 5).long()}, "attention_mask is torch.int64"),
    "block mask": (
        lambda m: {"attention_mask": create_block_mask(lambda b, h, i, j: i >= j, 2, None, 5, 5, device="cpu")},
        "attention_mask is a torch.nn.attention.flex_attention.BlockMask",
    ),
    "mask with gradient": (lambda m: {"attention_mask": whole(m, 5).requires_grad_()}, "attention_mask requires gradients"),
    "mask of one column": (lambda m: {"attention_mask": whole(m, 5)[..., :1]}, "attention_mask is not (1|batch"),
    "fp64 tables": (
        lambda m: {"position_embeddings": tuple(t.double() for t in arguments(m)[1]["position_embeddings"])},
        "position_embeddings are torch.float64",
    ),
    "partial tables": (
        lambda m: {"position_embeddings": tuple(t[..., :8] for t in arguments(m)[1]["position_embeddings"])},
        "position_embeddings have 8 columns for head_dim=16",
    ),
    "no tables": (lambda m: {"position_embeddings": None}, "no position_embeddings"),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_rule_3_unsupported_arguments(call: str) -> None:
    """The original forward gets exactly what was given: its result or its error."""
    make, reason = CALLS[call]
    model = tiny()
    fused = twin(model).model.layers[0]
    report = fusedblock.fuse(fused)
    x, kwargs = arguments(model)
    kwargs.update(make(model))

    def attempt(layer: nn.Module) -> Any:
        try:
            return layer(x, **kwargs)
        except Exception as error:
            return repr(error)

    want, got = attempt(model.model.layers[0]), attempt(fused)
    assert torch.equal(got, want) if isinstance(want, Tensor) else got == want
    assert report.fused_calls == 0
    assert [(reason in found, count) for found, count in report.fallbacks.items()] == [(True, 1)]


def test_rule_3_harmless_arguments() -> None:
    model = tiny()
    fused = twin(model).model.layers[0]
    report = fusedblock.fuse(fused)
    x, kwargs = arguments(model)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    harmless = {"fancy_bias": None, "output_attentions": False, "is_causal": True, "num_items_in_batch": torch.tensor(3)}
    packed = {"attention_mask": mask, "cu_seq_lens_q": torch.tensor([0, 5]), "max_length_q": 5}
    for extra in ({}, harmless, packed):
        assert relative_error(fused(x, **kwargs, **extra), model.model.layers[0](x, **kwargs)) < 1e-5
    positional = (kwargs["position_ids"], None, False, kwargs["position_embeddings"])
    assert torch.equal(fused(x, mask, *positional), fused(x, **kwargs, attention_mask=mask))
    assert torch.equal(fused(hidden_states=x, **kwargs), fused(x, **kwargs))
    assert report.fused_calls == 7 and report.fallback_calls == 0


def twice(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return 2 * ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)[0], None


AttentionInterface.register("twice", twice)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.double(), "hidden_states is torch.float64"),
        (lambda m: m.model.layers[0].to(torch.bfloat16), "hidden_states is torch.float32"),
        (lambda m: setattr(m.model.layers[0].self_attn, "is_causal", False), None),
        (
            lambda m: m.set_attn_implementation("twice"),
            "attention implementation 'twice'; use attn_implementation='fusedblock', 'sdpa' or 'eager'",
        ),
    ],
)
def test_rule_3_changed_model(change: Callable[[LlamaForCausalLM], Any], reason: str | None) -> None:
    model = tiny(num_hidden_layers=1)
    other = twin(model)
    report = fusedblock.fuse(other)
    change(model)
    change(other)
    ids = prompt()[0]
    results = []
    for candidate in (model, other):
        try:
            results.append(candidate(ids, use_cache=False).logits.detach())
        except Exception as error:
            results.append(str(error))
    want, got = results
    assert got == want if isinstance(want, str) else relative_error(got, want) < 1e-5
    assert report.fused_calls == (reason is None)
    assert [reason in found for found in report.fallbacks] == ([] if reason is None else [True])


@pytest.mark.parametrize("context", (lambda: torch.autocast("cpu", enabled=False), nullcontext))
def test_rule_3_no_autocast(context: Callable[[], Any]) -> None:
    model = tiny()
    other = twin(model)
    report = fusedblock.fuse(other)
    with context():
        want, got = logits(model), logits(other)
    assert not report.fallbacks and relative_error(got, want) < 1e-5


def test_rule_3_attention_dropout() -> None:
    model = tiny(attention_dropout=0.5).train()
    other = twin(model).train()
    report = fusedblock.fuse(other)
    results = []
    for candidate in (model, other):
        torch.manual_seed(0)
        results.append(logits(candidate))
    assert torch.equal(*results) and report.fallbacks == {"self_attn.attention_dropout=0.5 in training": 2}
    assert relative_error(logits(other.eval()), logits(model.eval())) < 1e-5 and report.fused_calls == 2


def test_rule_3_global_hooks() -> None:
    model = tiny()
    report = fusedblock.fuse(model)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(type(module).__name__))
    try:
        logits(model)
    finally:
        handle.remove()
    assert seen.count("LlamaRMSNorm") == 5 and report.fallbacks == {"global module hooks are registered": 2}


def test_rule_3_both_names_of_the_cache() -> None:
    """The layer's cache is known by the name that this transformers gives it; any other name is an unknown keyword."""
    model = tiny()
    fused = model.model.layers[0]
    report = fusedblock.fuse(fused)
    x, kwargs = arguments(model)
    calls = []

    class Recorder:
        def update(self, k: Tensor, v: Tensor, index: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
            calls.append((tuple(k.shape), index, sorted(kwargs)))
            return k, v

    fused(x, **kwargs, **{CACHE: Recorder()})
    assert calls == [((2, 2, 5, 16), 0, ["kwargs"] if CACHE == "cache" else [])]
    assert report.fused_calls == 1
    if CACHE == "cache":
        fused(x, **kwargs, past_key_values=Recorder())
        assert len(calls) == 2 and report.fused_calls == 2
    else:
        fused(x, **kwargs, cache=Recorder())
        assert len(calls) == 1 and report.fallbacks == {"keyword 'cache' is not understood": 1}


# Rule 4, copies and pickles: tests/test_swap.py. Rule 5: no tensor and no module of ours is in the module tree.


def test_rule_5_state_is_no_part_of_the_module_tree() -> None:
    model = tiny()
    before = [{name: list(value) for name, value in vars(m).items() if isinstance(value, dict)} for m in model.modules()]
    fusedblock.fuse(model)
    model(prompt()[0], labels=prompt()[0]).loss.backward()
    assert [{name: list(value) for name, value in vars(m).items() if isinstance(value, dict)} for m in model.modules()] == before
    added = set(vars(model.model.layers[0])) - set(vars(tiny().model.layers[0]))
    assert added == {"_fusedblock"}
    assert not isinstance(vars(model.model.layers[0])["_fusedblock"], (Tensor, nn.Module, dict))


# Rule 6: every layer is in the report, with the reason if it is not fused.


def test_rule_6_mixed_model() -> None:
    model = tiny(num_hidden_layers=3)

    class GradientCheckpointingLayer(nn.Module):
        pass

    class EncoderLayer(GradientCheckpointingLayer):
        pass

    model.encoder = nn.ModuleList([EncoderLayer()])
    report = fusedblock.fuse(model)
    assert [(r.layer_class, r.status, r.reason) for r in report.layers] == [
        *[("LlamaDecoderLayer", "fused", "")] * 3, ("EncoderLayer", "fallback", "EncoderLayer is not supported"),
    ]  # fmt: skip
    assert str(report).startswith("3 of 4 layers fused")
    assert "EncoderLayer 0: fallback, EncoderLayer is not supported" in str(report)
    with pytest.raises(ValueError, match="encoder.0: EncoderLayer is not supported"):
        fusedblock.fuse(model, strict=True)


def test_data_parallel_replicas_use_their_own_weights() -> None:
    """A replica shares the original's __dict__ entries but not its parameters."""
    model = tiny(num_hidden_layers=1)
    report = fusedblock.fuse(model)
    logits(model)
    layer = model.model.layers[0]
    replica = layer._replicate_for_data_parallel()
    other = tiny(seed=7, num_hidden_layers=1).model.layers[0]
    replica._modules = dict(other._modules)
    x, kwargs = arguments(model)
    assert relative_error(replica(x, **kwargs), other(x, **kwargs)) < 1e-5 and report.fused_calls == 2
    assert relative_error(layer(x, **kwargs), other(x, **kwargs)) > 1e-2

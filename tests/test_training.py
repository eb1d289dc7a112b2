"""What people do when they train: autocast, gradient checkpointing, frozen parameters, torch.compile. Over the families."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import families
import pytest
import torch
from llama import CACHE, prompt, relative_error, root_mean_square
from op_cases import recording
from test_families import outcome
from test_llama_numerics import IMPLEMENTATIONS
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fusedblock
from fusedblock.interpret import interpret

HALVES = (torch.bfloat16, torch.float16)
# RMSNorm, QK-norm, Conv1D with LayerNorm, norms after the branches, parallel branches, an encoder, partial rotation.
NAMES = ("llama", "qwen3", "gpt2", "olmo2", "cohere", "cohere-qk_norm", "bert", "gpt_neox")
DECODERS = tuple(name for name in NAMES if name != "bert")


def layers(model: nn.Module) -> nn.ModuleList:
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


def compiled_outcome(name: str, model: nn.Module, pad: int, seq: int) -> tuple[Tensor, dict[str, Tensor]]:
    out, grads = outcome(name, model, pad, seq)
    return out, {n.removeprefix("_orig_mod."): grad for n, grad in grads.items()}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """Gradients that are not zero but for rounding (a key bias's under softmax) agree."""
    scale = max(grad.norm().item() for grad in want.values())
    telling = [n for n, grad in want.items() if grad.norm() > 1e-6 * scale]
    assert {n: e for n in telling if not (e := relative_error(got[n], want[n])) < tolerance} == {}


def assert_within_rule(want: Any, base: Any, got: Any) -> None:
    """Outputs and gradients (as of `outcome`): at most 1.5 times transformers' own distance from float64."""
    scale = max(grad.norm().item() for grad in want[1].values())
    telling = [n for n, grad in want[1].items() if grad.norm() > 1e-6 * scale]  # the others are zero but for rounding
    errors, plain = ({n: relative_error(g[n], want[1][n]) for n in telling} for _, g in (got, base))
    assert relative_error(got[0], want[0]) <= 1.5 * relative_error(base[0], want[0])
    assert root_mean_square(errors) <= 1.5 * root_mean_square(plain)


def check_autocast(name: str, model: nn.Module, dtype: torch.dtype, pad: int, context: AbstractContextManager[Any]) -> None:
    """fp32 parameters, products in dtype; gradients and the residual stream are fp32, as transformers keeps them."""
    device = next(model.parameters()).device.type
    exact = families.twin(model, torch.float64)
    exact.set_attn_implementation("sdpa")
    fused = families.twin(model)
    report = fusedblock.fuse(fused, strict=True)
    streams = []
    for layer in layers(fused):
        layer.register_forward_hook(lambda module, args, output: streams.append((args[0].dtype, output.dtype)))
    want = outcome(name, exact, pad, 9)
    with torch.autocast(device, dtype):
        base = outcome(name, model, pad, 9)
        with context:
            got = outcome(name, fused, pad, 9)
    assert report.fused_calls == len(streams) and not report.fallbacks
    assert set(streams) == {(torch.float32, torch.float32)}
    assert {p.grad.dtype for p in fused.parameters() if p.grad is not None} == {torch.float32}
    assert got[0].dtype == base[0].dtype
    assert_within_rule(want, base, got)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_train_under_autocast(name: str, dtype: torch.dtype, implementation: str) -> None:
    check_autocast(name, families.build(name, implementation), dtype, 3, nullcontext())


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.float16), ("qwen3", torch.bfloat16)],
                         ids=str)  # fmt: skip
def test_train_under_autocast_in_the_interpreter(name: str, dtype: torch.dtype) -> None:
    check_autocast(name, families.build(name, num_hidden_layers=1), dtype, 0, interpret())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, dtype", [*((name, torch.bfloat16) for name in families.CONFIGS), ("llama", torch.float16), ("gpt2", torch.float16)]
)
def test_gpu_train_under_autocast(name: str, dtype: torch.dtype) -> None:
    with torch.device("cuda"):
        model = families.build(name)
    check_autocast(name, model, dtype, 3, nullcontext())


@torch.no_grad()
def stepwise(model: nn.Module, chunks: list[tuple[int, torch.dtype | None]]) -> Tensor:
    """Logits of a prompt read in chunks through a cache, each (tokens, dtype of autocast)."""
    ids, logits, cache, at = prompt()[0], [], None, 0
    for tokens, dtype in chunks:
        with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
            out = model(ids[:, at : at + tokens], use_cache=True, **{CACHE: cache})
        logits.append(out.logits.double())
        cache, at = out.past_key_values, at + tokens
    return torch.cat(logits, 1)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", DECODERS)
def test_decode_under_autocast(name: str, dtype: torch.dtype) -> None:
    """A prompt and three tokens through a dynamic cache, then one outside autocast; and the other way round."""
    model = families.build(name)
    fused, exact = families.twin(model), families.twin(model, torch.float64)
    report = fusedblock.fuse(fused)
    want = stepwise(exact, [(9, None)])
    for chunks in ([(5, dtype), (1, dtype), (1, dtype), (1, dtype), (1, None)], [(5, None), (3, dtype), (1, dtype)]):
        got, base = stepwise(fused, chunks), stepwise(model, chunks)
        assert relative_error(got, want) <= 1.5 * relative_error(base, want)
    assert report.fused_calls == 16 and not report.fallbacks


@pytest.mark.parametrize("name", DECODERS)
def test_generate_under_autocast(name: str) -> None:
    """With a static cache, too, where transformers' own rotary layers fail: it makes the cache fp32, and values are bf16."""
    fused = families.build(name)
    report = fusedblock.fuse(fused)
    ids, mask = prompt(pad=3)
    made = []
    with torch.autocast("cpu", torch.bfloat16):
        for kwargs in ({}, {"cache_implementation": "static", "disable_compile": True}):
            made.append(fused.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, **kwargs))
    assert made[0].shape == (2, 17) and torch.equal(*made) and report.fused_calls == 32 and not report.fallbacks


def test_a_bf16_model_under_autocast_falls_back() -> None:
    """Its layers mix dtypes by rules of their own."""
    model = families.build("llama").to(torch.bfloat16)
    fused = families.twin(model, torch.bfloat16)
    report = fusedblock.fuse(fused)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        results = [m(prompt()[0]).logits for m in (model, fused)]
    assert torch.equal(*results) and dict(report.fallbacks) == {"autocast with hidden_states of torch.bfloat16": 2}


def test_compile_under_autocast() -> None:
    torch._dynamo.reset()
    model = families.build("llama")
    fusedblock.fuse(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        want, got = outcome("llama", families.twin(model), 0, 9), compiled_outcome("llama", compiled, 0, 9)
    assert torch.equal(got[0], want[0])
    assert_close(got[1], want[1], 1e-6)


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama"])
def test_train_with_gradient_checkpointing(name: str, reentrant: bool) -> None:
    model = families.build(name).train()
    report = fusedblock.fuse(model)
    want, want_grads = outcome(name, model, 3, 9)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    got, got_grads = outcome(name, model, 3, 9)
    assert relative_error(got, want) < 1e-6 and got_grads.keys() == want_grads.keys()  # reentrant: a first pass without gradients
    assert_close(got_grads, want_grads, 1e-5)
    assert report.fused_calls == 2 + 4 and not report.fallbacks  # each layer runs again in the backward pass


def test_train_with_gradient_checkpointing_under_autocast() -> None:
    model = families.build("qwen3").train()
    report = fusedblock.fuse(model)
    with torch.autocast("cpu", torch.bfloat16):
        want = outcome("qwen3", model, 3, 9)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        got = outcome("qwen3", model, 3, 9)
    assert torch.equal(got[0], want[0]) and all(torch.equal(got[1][n], grad) for n, grad in want[1].items())
    assert report.fused_calls == 6 and not report.fallbacks


# What stays trainable -> the weight-gradient products that this takes in a layer of each family.
TRAINED = {
    ("llama", "q_proj norm"): 1, ("llama", "q_proj v_proj"): 2, ("llama", "mlp"): 3, ("llama", "norm"): 0, ("llama", ""): 7,
    ("gpt2", "ln_"): 0, ("gpt2", "c_attn"): 3, ("gpt2", "c_fc c_proj"): 3, ("gpt_neox", "query_key_value"): 3,
    ("phi3", "qkv_proj"): 3, ("phi3", "gate_up_proj"): 2, ("olmo2", "k_proj norm"): 1, ("bert", "intermediate LayerNorm"): 1,
}  # fmt: skip


@pytest.mark.parametrize(("name", "kept"), TRAINED, ids=str)
def test_frozen_parameters_skip_their_products(name: str, kept: str) -> None:
    """The gradients that remain are those of a model with nothing frozen."""
    models = [families.build(name, num_hidden_layers=1) for _ in range(2)]
    for model in models:
        fusedblock.fuse(model)
    trained = {n for n, _ in models[0].named_parameters() if ".0." in n and (not kept or any(k in n for k in kept.split()))}
    for n, parameter in models[1].named_parameters():
        parameter.requires_grad_(n in trained)
    outcome(name, models[0], 0, 9)
    with recording("sm_80") as launches:
        outcome(name, models[1], 0, 9)
    every = dict(models[0].named_parameters())
    for n, parameter in models[1].named_parameters():
        assert (parameter.grad is None) == (n not in trained)
        assert parameter.grad is None or relative_error(parameter.grad, every[n].grad) < 1e-5, n
    assert [launch.kernel for launch in launches].count("grad_weight_kernel") == TRAINED[name, kept]


def fused_ops(counter: CompileCounterWithBackend) -> set[str]:
    """Of the graph that was compiled last."""
    names = {str(node.target) for node in counter.graphs[-1].graph.nodes}
    return {name.removeprefix("fusedblock.").partition(".")[0] for name in names if name.startswith("fusedblock.")}


slow = pytest.mark.slow


@pytest.mark.parametrize(("name", "when"), [
    ("gpt2", "before"), ("llama", "after"),
    *(pytest.param(name, "before", marks=slow) for name in ("llama", "bert", "qwen3", "olmo2")),
])  # fmt: skip
def test_compile_and_fuse(name: str, when: str) -> None:
    """In one graph, whichever came first: a graph of the plain layers is not used for fused ones, nor the other way round."""
    torch._dynamo.reset()
    model = families.build(name, num_hidden_layers=1).train()
    want, want_grads = outcome(name, model, 3, 9)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    if when == "before":
        compiled_outcome(name, compiled, 3, 9)
        assert not fused_ops(counter)
    fusedblock.fuse(model)
    got, got_grads = compiled_outcome(name, compiled, 3, 9)
    assert {"attention", "linear"} <= fused_ops(counter)
    assert relative_error(got, want) < 1e-5 and got_grads.keys() >= want_grads.keys()  # of a pooler unused: zeros
    assert_close(got_grads, want_grads, 1e-5)
    fusedblock.unfuse(model)
    compiled_outcome(name, compiled, 3, 9)
    assert counter.frame_count == 2 and (when == "before" or not fused_ops(counter))  # before: the first graph again


@pytest.mark.parametrize(("name", "training"), [
    ("llama", False), ("gpt2", True),
    *(pytest.param(*case, marks=slow) for case in (("llama", True), ("qwen3", False), ("gpt2", False), ("bert", False))),
])  # fmt: skip
def test_compile_for_any_length(name: str, training: bool) -> None:
    """Lengths after the first share a graph."""
    torch._dynamo.reset()
    model = families.build(name, num_hidden_layers=1).train(training)
    fusedblock.fuse(model)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    kwargs = {} if name == "bert" else {"use_cache": False}
    for seq in (9, 12, 17, 30):
        ids = prompt(seq=seq)[0]
        with torch.set_grad_enabled(training):
            got, want = (families.values(m(ids, **kwargs)) for m in (compiled, model))
        assert relative_error(got, want) < 1e-6
        if training:
            got.square().mean().backward()
    assert counter.frame_count == 2


@pytest.mark.parametrize("name", ("llama", pytest.param("qwen3", marks=slow)))
def test_compile_each_layer(name: str) -> None:
    """Each layer compiled by itself, as large models are: one graph serves all."""
    torch._dynamo.reset()
    model = families.build(name, num_hidden_layers=2).train()
    want, want_grads = outcome(name, model, 3, 9)
    report = fusedblock.fuse(model)
    counter = CompileCounterWithBackend("aot_eager")
    for layer in layers(model):
        layer.compile(backend=counter, fullgraph=True)
    got, got_grads = outcome(name, model, 3, 9)
    assert relative_error(got, want) < 1e-5 and {"attention", "linear"} <= fused_ops(counter)
    assert_close(got_grads, want_grads, 1e-5)
    assert not report.fallbacks and counter.frame_count == 1

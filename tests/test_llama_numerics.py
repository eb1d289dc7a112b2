"""A fused Llama against transformers' own: logits, gradients and generated tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from llama import CACHE, assert_rule, assert_same_tokens, by_kind, prompt, relative_error, tiny, twin
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

import fusedblock

# heads, key/value heads, head_dim and the rest
CONFIGS = {
    "group1": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
    "group3-d64-tied": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64, "hidden_size": 96,
                        "tie_word_embeddings": True},
    "group7-d16": {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 16, "hidden_size": 56},
    "group2-d96": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 96, "rms_norm_eps": 1e-5},
    "biases": {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    "biases-tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu"},
}  # fmt: skip
IMPLEMENTATIONS = ("eager", "sdpa")


def outcome(model: LlamaForCausalLM, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits at the tokens that are not padding, and the gradients of a random combination of them, by kind of parameter."""
    model.zero_grad()
    out = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    logits = out if mask is None else out[mask.bool()]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(logits)
    (logits * weights).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    return logits, by_kind(model)


def check(model: LlamaForCausalLM, dtype: torch.dtype, pad: int, seq: int = 9) -> None:
    """The numerics rule for logits and gradients of a fused copy of the model."""
    ids, mask = (t.to(model.device) for t in prompt(seq=seq, pad=pad))
    original = twin(model, dtype)
    reference = twin(original, torch.float64)
    reference.set_attn_implementation("sdpa")  # eager attention takes its softmax in fp32
    fused = twin(original, dtype)
    report = fusedblock.fuse(fused, strict=True)
    argument = mask if pad else None
    want, got, base = (outcome(candidate, ids, argument) for candidate in (reference, fused, original))
    assert report.fused_calls == model.config.num_hidden_layers and report.fallback_calls == 0
    assert_rule(got, want, base, [*want[1]], dtype)


@pytest.mark.parametrize("pad", (0, 3), ids=("whole", "padded"))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_logits_and_gradients(config: str, dtype: torch.dtype, implementation: str, pad: int) -> None:
    check(tiny(attn_implementation=implementation, **CONFIGS[config]), dtype, pad)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("pad", (0, 3), ids=("whole", "padded"))
@pytest.mark.parametrize("config", ("group1", "group3-d64-tied", "biases"))
def test_generate(config: str, pad: int, implementation: str) -> None:
    model = tiny(attn_implementation=implementation, **CONFIGS[config])
    fused = twin(model)
    report = fusedblock.fuse(fused)
    ids, mask = prompt(pad=pad)
    for kwargs in ({}, {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 3}):
        arguments = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, **kwargs}
        want, got = model.generate(ids, **arguments), fused.generate(ids, **arguments)
        if "num_beams" in kwargs:
            assert torch.equal(got, want)
        else:
            assert_same_tokens(model, want, got, mask)
    assert report.fused_calls > 3 * 12 and report.fallback_calls == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("static", (False, True), ids=("dynamic", "static"))
def test_chunked_prefill(static: bool, implementation: str) -> None:
    """A prompt in chunks through the cache: the same logits, and the same keys and values in the cache."""
    model = tiny(attn_implementation=implementation)
    fused = twin(model)
    report = fusedblock.fuse(fused)
    ids, _ = prompt(seq=12)
    found = []
    for candidate in (model, fused):
        cache = StaticCache(candidate.config, max_cache_len=16) if static else DynamicCache()
        with torch.no_grad():
            logits = [candidate(chunk, use_cache=True, **{CACHE: cache}).logits for chunk in ids.split((5, 1, 6), 1)]
        found.append((torch.cat(logits, 1), *(layer.keys for layer in cache.layers), *(layer.values for layer in cache.layers)))
    for want, got in zip(*found):
        assert got.shape == want.shape and relative_error(got, want) < 1e-5
    assert report.fused_calls == 6 and report.fallback_calls == 0


def test_packed_sequences() -> None:
    """Position ids that start again: the model makes a block-diagonal mask of them."""
    model = tiny()
    fused = twin(model)
    report = fusedblock.fuse(fused)
    ids, _ = prompt(batch=1, seq=9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with torch.no_grad():
        want = model(ids, position_ids=positions, use_cache=False).logits
        got = fused(ids, position_ids=positions, use_cache=False).logits
        apart = [model(part, use_cache=False).logits for part in ids.split((4, 5), 1)]
    assert relative_error(got, want) < 1e-5 and relative_error(got, torch.cat(apart, 1)) < 1e-5
    assert report.fused_calls == 2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("seq", (1, 6))
def test_no_mask(implementation: str, causal: bool, seq: int) -> None:
    """A layer called without a mask: sdpa attention is causal if its module says so, eager attention sees everything."""
    model = tiny(attn_implementation=implementation)
    layer = model.model.layers[0]
    layer.self_attn.is_causal = causal
    fused = twin(model).model.layers[0]
    report = fusedblock.fuse(fused)
    x = torch.randn(2, seq, 64)
    tables = model.model.rotary_emb(x, torch.arange(seq)[None])
    with torch.no_grad():
        assert relative_error(fused(x, position_embeddings=tables), layer(x, position_embeddings=tables)) < 1e-5
    assert report.fused_calls == 1


@pytest.mark.parametrize("values", (torch.bool, torch.float32), ids=str)
def test_own_mask(values: torch.dtype) -> None:
    """A mask of the caller's own for each head, with sdpa."""
    model = tiny()
    layer, fused = model.model.layers[0], twin(model).model.layers[0]
    report = fusedblock.fuse(fused)
    x = torch.randn(2, 6, 64)
    tables = model.model.rotary_emb(x, torch.arange(6)[None])
    mask = torch.rand(2, 4, 6, 6) < 0.7
    mask[..., 0] = True
    if values.is_floating_point:
        mask = torch.where(mask, torch.randn(2, 4, 6, 6), float("-inf"))
    with torch.no_grad():
        want = layer(x, attention_mask=mask, position_embeddings=tables)
        got = fused(x, attention_mask=mask, position_embeddings=tables)
    assert relative_error(got, want) < 1e-5 and report.fused_calls == 1


def test_rows_that_see_nothing_are_finite() -> None:
    """Left padding: its own rows attend to nothing. What they give must not reach the others as NaN."""
    for implementation in IMPLEMENTATIONS:
        fused = tiny(attn_implementation=implementation)
        fusedblock.fuse(fused)
        ids, mask = prompt(pad=4)
        logits = fused(ids, attention_mask=mask).logits
        assert logits.isfinite().all()
        logits.square().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in fused.parameters())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("reentrant", (False, True))
def test_gradient_checkpointing(implementation: str, reentrant: bool) -> None:
    model = tiny(attn_implementation=implementation).train()
    fused = twin(model).train()
    report = fusedblock.fuse(fused)
    ids, mask = prompt(pad=3)
    want, want_grads = outcome(model, ids, mask)
    fused.gradient_checkpointing_enable({"use_reentrant": reentrant})
    got, got_grads = outcome(fused, ids, mask)
    assert relative_error(got, want) < 1e-5
    assert all(relative_error(got_grads[name], want_grads[name]) < 1e-5 for name in want_grads)
    assert report.fused_calls == 4 and report.fallback_calls == 0  # each layer runs again in the backward pass


def test_training_step_with_the_default_cache() -> None:
    """Models make a cache in training too unless told otherwise; SGD then moves both to the same weights."""
    model = tiny().train()
    fused = twin(model).train()
    report = fusedblock.fuse(fused)
    ids, _ = prompt()
    for candidate in (model, fused):
        optimizer = torch.optim.SGD(candidate.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            candidate(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    for want, got in zip(model.state_dict().values(), fused.state_dict().values()):
        assert relative_error(got, want) < 1e-5
    assert report.fused_calls == 6 and report.fallback_calls == 0


def test_tied_weights_stay_one_tensor() -> None:
    fused = tiny(tie_word_embeddings=True)
    fusedblock.fuse(fused)
    assert fused.lm_head.weight is fused.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("sdpa", torch.float32), ("eager", torch.bfloat16), pytest.param("sdpa", torch.float16, marks=pytest.mark.slow)],
)
def test_kernels_in_the_interpreter(implementation: str, dtype: torch.dtype) -> None:
    """The kernels themselves, run on the CPU: the numerics rule for logits and gradients."""
    interpret = pytest.importorskip("fusedblock.interpret", exc_type=ImportError).interpret
    model = tiny(attn_implementation=implementation, num_hidden_layers=1, attention_bias=True, mlp_bias=True)
    with interpret():
        check(model, dtype, 3)


@pytest.mark.parametrize("kwargs", ({}, {"cache_implementation": "static", "disable_compile": True}), ids=("dynamic", "static"))
def test_generate_in_the_interpreter(kwargs: dict) -> None:
    interpret = pytest.importorskip("fusedblock.interpret", exc_type=ImportError).interpret
    model = tiny(num_attention_heads=3, num_key_value_heads=1, head_dim=24, hidden_size=96)
    fused = twin(model)
    fusedblock.fuse(fused)
    ids, mask = prompt(pad=2)
    arguments = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, **kwargs}
    want = model.generate(ids, **arguments)
    with interpret():
        assert_same_tokens(model, want, fused.generate(ids, **arguments), mask)


# One layer of Llama-3.1-8B.
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
         "num_hidden_layers": 1}  # fmt: skip


GPU_CASES = [*((config, dtype) for config in (*CONFIGS, "large") for dtype in (torch.float32, torch.bfloat16)),
             ("large", torch.float16)]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("pad", (0, 5), ids=("whole", "padded"))
@pytest.mark.parametrize("config, dtype", GPU_CASES, ids=str)
def test_gpu_logits_and_gradients(config: str, dtype: torch.dtype, pad: int) -> None:
    with torch.device("cuda"):
        model = tiny(**(LARGE if config == "large" else CONFIGS[config]))
    for implementation in IMPLEMENTATIONS:
        model.set_attn_implementation(implementation)
        for seq in (37, 160):
            check(model, dtype, pad, seq)


@pytest.mark.gpu
@pytest.mark.parametrize("static", (False, True), ids=("dynamic", "static"))
@pytest.mark.parametrize("config, dtype", GPU_CASES, ids=str)
def test_gpu_decode(config: str, static: bool, dtype: torch.dtype) -> None:
    """A prefill and single tokens after it, with no gradients: the numerics rule for the logits of every step."""
    ids = prompt(seq=40)[0].cuda()
    with torch.device("cuda"):
        model = tiny(**(LARGE if config == "large" else CONFIGS[config]))
    original = twin(model, dtype)
    fused = twin(original, dtype)
    report = fusedblock.fuse(fused)

    def steps(candidate: LlamaForCausalLM) -> Tensor:
        cache = StaticCache(candidate.config, max_cache_len=64) if static else DynamicCache()
        with torch.no_grad():
            return torch.cat([candidate(part, **{CACHE: cache}).logits for part in ids.split((33, *[1] * 7), 1)], 1)

    want, base, got = steps(twin(original, torch.float64)), steps(original), steps(fused)
    error = relative_error(got, want)
    assert error < 1e-5 if dtype is torch.float32 else error <= 1.5 * relative_error(base, want)
    assert report.fused_calls == 8 * model.config.num_hidden_layers and report.fallback_calls == 0


@pytest.mark.gpu
@pytest.mark.parametrize("pad", (0, 3), ids=("whole", "padded"))
@pytest.mark.parametrize("config", CONFIGS)
def test_gpu_generate(config: str, pad: int) -> None:
    model = tiny(**CONFIGS[config]).cuda()
    fused = twin(model)
    report = fusedblock.fuse(fused)
    ids, mask = (t.cuda() for t in prompt(pad=pad))
    for kwargs in ({}, {"cache_implementation": "static", "disable_compile": True}):
        arguments = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, **kwargs}
        assert_same_tokens(model, model.generate(ids, **arguments), fused.generate(ids, **arguments), mask)
    assert report.fallback_calls == 0


@pytest.mark.gpu
def test_gpu_deepcopy_and_side_stream_give_the_same_bits() -> None:
    model = tiny(**{**LARGE, "intermediate_size": 2048, "hidden_size": 1024, "num_hidden_layers": 2}).to("cuda", torch.bfloat16)
    fusedblock.fuse(model)
    ids = prompt(seq=130)[0].cuda()
    other = copy.deepcopy(model)
    with torch.no_grad():
        want = model(ids).logits
        assert torch.equal(other(ids).logits, want)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got = [model(ids).logits for _ in range(3)]
        torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(value, want) for value in got)

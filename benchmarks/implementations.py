"""One decoder layer with seeded weights, and every implementation of it that is compared."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config, Starcoder2Config, StaticCache

import fusedblock
from fusedblock.metering.timing import MOST_CALLS
from fusedblock.metering.workload import copy_module, on
from fusedblock.models.adapter import cache_names
from fusedblock.models.table import SPECS

from .engine import Candidate

LLAMA_8B = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=1,
    vocab_size=128, rms_norm_eps=1e-5, max_position_embeddings=131072,
    rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                     "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
)  # fmt: skip
# LayerNorms and linear layers with biases, a plain MLP with tanh-GELU, keys for every head: Starcoder2's layer, at other sizes.
LAYERNORM = Starcoder2Config(
    hidden_size=4096, intermediate_size=16384, num_attention_heads=32, num_key_value_heads=32, num_hidden_layers=1,
    vocab_size=128, norm_epsilon=1e-5, use_bias=True, hidden_act="gelu_pytorch_tanh", sliding_window=None,
    max_position_embeddings=131072, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
QWEN3_8B = Qwen3Config(
    hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128, num_hidden_layers=1,
    vocab_size=128, rms_norm_eps=1e-6, max_position_embeddings=40960,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
)  # fmt: skip
_SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 128}
TINY = LlamaConfig(**_SMALL, num_key_value_heads=2)


@dataclass(frozen=True)
class Model:
    """A layer under test. tiny: the same numerics for a dry run. peers: implementations beside HF's, torch.compile's and ours."""

    title: str
    config: Any
    tiny: Any
    peers: tuple[str, ...] = ("liger",)


MODELS = {
    "llama": Model("Llama-3.1-8B: hidden 4096, 32/8 heads, ffn 14336", LLAMA_8B, TINY),
    "layernorm": Model(
        "pre-LayerNorm, biases, plain tanh-GELU MLP: hidden 4096, 32 heads, ffn 16384", LAYERNORM,
        Starcoder2Config(**_SMALL, num_key_value_heads=4, use_bias=True, sliding_window=None, bos_token_id=0, eos_token_id=0), (),
    ),
    "qwen3": Model(
        "Qwen3-8B: QK-norm, hidden 4096, 32/8 heads, ffn 12288", QWEN3_8B,
        Qwen3Config(**_SMALL, num_key_value_heads=2, head_dim=16),
    ),
}  # fmt: skip


def _home(config: Any) -> tuple[Any, str]:
    """transformers' module of the config's layer, and the layer's class."""
    spec = next(spec for spec in SPECS.values() if spec.family == config.model_type)
    return importlib.import_module(spec.home), spec.layer_class


def make_layer(config: Any, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A layer with transformers' initial weights (normal, 0.02), norm weights around 1 and no bias at 0."""
    home, name = _home(config)
    with device:
        layer: nn.Module = getattr(home, name)(config, 0).to(dtype)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            norm = "norm" in name and name.endswith("weight")
            p.normal_(1.0, 0.1, generator=generator) if norm else p.normal_(0.0, 0.02, generator=generator)
    return layer


def clone(layer: nn.Module, attention: str) -> nn.Module:
    """The same parameters in modules of their own, under this attention implementation."""
    made = copy_module(layer, on(next(layer.parameters()).device))
    made.self_attn.config._attn_implementation = attention  # type: ignore[union-attr]
    return made


@dataclass
class Inputs:
    """x, grad_out `batch seq hidden`; cos, sin `1 seq head_dim`; keys, values `batch kv_heads context head_dim` of a call with a
    cache, the last of whose positions are the new tokens'."""

    x: Tensor
    cos: Tensor
    sin: Tensor
    grad_out: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None

    @property
    def context(self) -> int:
        return self.x.shape[1] if self.keys is None else self.keys.shape[2]


def make_inputs(layer: nn.Module, batch: int, seq: int, *, train: bool = False, context: int | None = None) -> Inputs:
    weight: Tensor = next(layer.parameters())
    config, device, dtype = layer.self_attn.config, weight.device, weight.dtype  # type: ignore[union-attr]
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    x = random(batch, seq, config.hidden_size)
    position = torch.arange((context or seq) - seq, context or seq, device=device)[None]
    rotary = next(part for name, part in vars(_home(config)[0]).items() if name.endswith("RotaryEmbedding"))
    cos, sin = rotary(config).to(device)(x, position)
    made = Inputs(x, cos, sin, random(*x.shape) if train else None)
    if context:
        head_dim = layer.self_attn.head_dim  # type: ignore[union-attr]
        made.keys, made.values = (random(batch, config.num_key_value_heads, context, head_dim) for _ in range(2))
    return made


class Step:
    """One call of a layer: forward, or forward and backward (results: out, then the gradients of x and of the parameters)."""

    def __init__(self, layer: nn.Module, run: Callable[..., Tensor], inputs: Inputs, mask: Tensor | None, cache: Any) -> None:
        self.run, self.grad_out = run, inputs.grad_out
        self.train = inputs.grad_out is not None
        self.x = inputs.x.detach().requires_grad_(self.train)
        self.wanted = [self.x, *layer.parameters()]
        self.arguments = {
            "attention_mask": mask,
            "position_embeddings": (inputs.cos, inputs.sin),
            "position_ids": torch.arange(inputs.context - inputs.x.shape[1], inputs.context, device=inputs.x.device)[None],
        }
        if cache is not None:
            self.arguments[cache_names(getattr(type(layer), "_fusedblock_original", type(layer)))[0]] = cache

    def __call__(self) -> Any:
        with torch.set_grad_enabled(self.train):
            out = self.run(self.x, **self.arguments)
            return (out.detach(), *torch.autograd.grad(out, self.wanted, self.grad_out)) if self.train else out


class Cache:
    """A StaticCache full of keys, whose write position is set back before each sample: decode steps write near its end, a prefill
    fills it."""

    def __init__(self, config: Any, inputs: Inputs) -> None:
        assert inputs.keys is not None and inputs.values is not None
        self.context, self.seq = inputs.context, inputs.x.shape[1]
        self.cache = StaticCache(config=config, max_cache_len=self.context)
        self.cache.update(inputs.keys, inputs.values, 0)
        self.position: Tensor = self.cache.layers[0].cumulative_length

    def last(self) -> None:
        """The next tokens are the last that fit, as in the reference."""
        self.position.fill_(self.context - self.seq)

    def rewind(self) -> None:
        """Room for the calls of one sample, and for those that lead in to it."""
        self.position.fill_(max(0, self.context - (2 * MOST_CALLS + 1) * self.seq))


def additive_mask(inputs: Inputs) -> Tensor:
    """What transformers hands to eager attention."""
    batch, seq, context = inputs.x.shape[0], inputs.x.shape[1], inputs.context
    full = torch.full((seq, context), torch.finfo(inputs.x.dtype).min, dtype=inputs.x.dtype, device=inputs.x.device)
    return full.triu(context - seq + 1).expand(batch, 1, seq, context).contiguous()


def implementations(layer: nn.Module, given: Callable[[], Inputs], backend: str) -> dict[str, Callable[[], Candidate]]:
    """Name -> builder, the yardstick (transformers with SDPA) first. given: makes the inputs once. backend: of torch.compile."""
    shared: list[Cache | None] = []

    def candidate(made: nn.Module, attention: str, run: Callable[..., Tensor] | None = None) -> Candidate:
        inputs = given()
        if not shared:
            shared.append(None if inputs.keys is None else Cache(layer.self_attn.config, inputs))  # type: ignore[union-attr]
        cache, mask = shared[0], None
        if attention == "eager":
            mask = additive_mask(inputs)
        elif cache is not None and inputs.x.shape[1] == 1:
            # With a StaticCache a decode step has a mask under SDPA as well; a prefill without padding has none.
            mask = torch.ones(inputs.x.shape[0], 1, 1, inputs.context, dtype=torch.bool, device=inputs.x.device)
        made.train(inputs.grad_out is not None)
        step = Step(made, made if run is None else run, inputs, mask, cache and cache.cache)
        return Candidate([step]) if cache is None else Candidate([step], cache.rewind, cache.last)

    def fused() -> Candidate:
        made = clone(layer, "sdpa")
        report = fusedblock.fuse(made, strict=True)
        built = candidate(made, "sdpa")
        step = built.calls[0]

        def first() -> Any:  # the call that is checked: a layer that fell back must not pass for a fused one
            out = step()
            if report.fallback_calls:
                raise RuntimeError(f"fell back: {', '.join(report.fallbacks)}")
            built.calls[0] = step
            return out

        built.calls[0] = first
        return built

    def compiled() -> Candidate:
        torch._dynamo.reset()
        made = clone(layer, "sdpa")
        return candidate(made, "sdpa", torch.compile(made, dynamic=False, backend=backend))

    return {
        "hf-sdpa": lambda: candidate(clone(layer, "sdpa"), "sdpa"),
        "hf-eager": lambda: candidate(clone(layer, "eager"), "eager"),
        "torch.compile": compiled,
        "liger": lambda: candidate(with_liger(clone(layer, "sdpa")), "sdpa"),
        "fusedblock": fused,
    }


def with_liger(layer: nn.Module) -> nn.Module:
    """Liger's RMSNorm, SwiGLU and RoPE in this layer alone. Raises ModuleNotFoundError where liger_kernel is not installed.

    Liger itself replaces the rotary embedding in transformers' module, for every layer in the process.
    """
    from liger_kernel.transformers import LigerSwiGLUMLP, liger_rotary_pos_emb
    from liger_kernel.transformers.monkey_patch import _patch_rms_norm_module, _patch_swiglu_module

    for module in layer.modules():
        if type(module).__name__.endswith("RMSNorm"):
            _patch_rms_norm_module(module)
    _patch_swiglu_module(layer.mlp, LigerSwiGLUMLP)
    attention: Any = layer.self_attn
    original = inspect.unwrap(type(attention).forward)
    names = {**original.__globals__, "apply_rotary_pos_emb": liger_rotary_pos_emb}
    forward = types.FunctionType(original.__code__, names, original.__name__, original.__defaults__, original.__closure__)
    forward.__kwdefaults__ = original.__kwdefaults__
    attention.forward = types.MethodType(forward, attention)
    return layer


def reference(layer: nn.Module, inputs: Inputs) -> list[Tensor]:
    """transformers' eager layer on float64 weights and inputs, one sequence at a time (its norms and softmax are float32)."""
    double = copy_module(layer, lambda t: t.detach().double())
    double.self_attn.config._attn_implementation = "eager"  # type: ignore[union-attr]
    outs, grad_x, grads = [], [], []
    for b in range(inputs.x.shape[0]):

        def part(t: Tensor | None, b: int = b) -> Any:
            return None if t is None else t[b : b + 1].double()

        one = Inputs(
            part(inputs.x),
            inputs.cos.double(),
            inputs.sin.double(),
            part(inputs.grad_out),
            part(inputs.keys),
            part(inputs.values),
        )
        cache = None
        if one.keys is not None and one.values is not None:
            cache = Cache(double.self_attn.config, one)  # type: ignore[union-attr, arg-type]
            cache.last()
        result = Step(double, double, one, additive_mask(one), cache and cache.cache)()
        if one.grad_out is None:
            outs.append(result)
            continue
        out, dx, *dw = result
        outs.append(out)
        grad_x.append(dx)
        grads = [a + b for a, b in zip(grads, dw)] if grads else dw
    return [torch.cat(outs), *([torch.cat(grad_x)] if grad_x else []), *grads]

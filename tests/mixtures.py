"""Tiny mixtures of experts of transformers' families, with weights that make every part of a layer matter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
from families import EXPERTS, SIZES
from llama import prompt, relative_error
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import fusedblock
from fusedblock import blocks

AUXILIARY = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")  # whose models give router_logits and an auxiliary loss


def build(family: str, experts: str = "eager", seed: int = 0, **changes: Any) -> nn.Module:
    """An fp32 model in eval mode, by default with transformers' plain experts."""
    fusedblock.register_experts()
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SIZES, **EXPERTS[family], **changes})
    how = {"attn_implementation": "eager", "experts_implementation": experts}
    model = AutoModelForCausalLM.from_config(config, **how, dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.2 * torch.randn_like(p))
            elif p.dim() == 1 or "bias" in name:
                p.copy_(0.2 * torch.randn_like(p))
            else:
                # Of transposed experts too the side that is summed over.
                transposed = p.dim() == 3 and family == "gpt_oss"
                p.copy_(0.8 * p.shape[-2 if transposed else -1] ** -0.5 * torch.randn_like(p))
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.copy_(0.2 * torch.randn_like(buffer))
    return model.eval()


def in_double(model: nn.Module) -> nn.Module:
    """A copy in float64; its attention too, where transformers' eager one takes the softmax of a masked row in fp32."""
    double = copy.deepcopy(model).double()
    if model.config.model_type != "gpt_oss":  # whose sinks "plain" has not, and whose rows are never masked whole
        double.set_attn_implementation("plain")
    return double


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "is_concatenated")]


@contextmanager
def our_choices() -> Iterator[list[Tensor]]:
    """Likewise of every mixture that a fused layer runs."""
    found: list[Tensor] = []
    original = blocks.mixture

    def mixture(*args: Any, **kwargs: Any) -> blocks.Mixed:
        mixed = original(*args, **kwargs)
        found.append(mixed.indices.sort(-1).values)
        return mixed

    blocks.mixture = mixture
    try:
        yield found
    finally:
        blocks.mixture = original


@contextmanager
def choices(model: nn.Module) -> Iterator[list[Tensor]]:
    """The experts that each call of an experts module is told, sorted."""
    found: list[Tensor] = []
    hooks = [m.register_forward_pre_hook(lambda _, args: found.append(args[1].sort(-1).values)) for m in experts_of(model)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def run(model: Any, pad: int = 3, **arguments: Any) -> Any:
    ids, mask = prompt(pad=pad)
    return model(ids, attention_mask=mask, **arguments)


def check_lora(make: Callable[[], nn.Module], target: str | None) -> fusedblock.FusionReport:
    """The same logits and gradients of the model, fused or not, with adapters on the experts or, given, on this module; what was
    fused."""
    found = []
    for fuse in (False, True):
        model = make()
        report = fusedblock.fuse(model) if fuse else None
        config: dict[str, Any] = {"target_modules": [target]}
        if target is None:
            config = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **config))
        out = run(adapted, 0, use_cache=False).logits
        out.square().sum().backward()
        found.append((out, {n: p.grad for n, p in adapted.named_parameters() if p.grad is not None}))
    (want, want_grads), (got, got_grads) = found
    assert relative_error(got, want) < 1e-5 and got_grads.keys() == want_grads.keys()
    assert all(relative_error(got_grads[n], grad) < 1e-4 for n, grad in want_grads.items())
    assert report is not None
    return report

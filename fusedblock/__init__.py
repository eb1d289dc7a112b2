"""Fused transformer-block operators in Triton, and the layer swap that puts them under HuggingFace-style models.

    fuse, unfuse, explain                        swap the layers of a model; undo; which kernels run and why
    FusedBlock, BlockConfig, KVCache             one layer as a module of its own, without transformers
    load_safetensors, save_safetensors           weights, under their original names
    measure                                      launches, HBM bytes, FLOPs and time before and after fusion
    register_attention, register_experts         "fusedblock" as an attention and an experts implementation of transformers
    options                                      debug checks, equal bits from run to run, equal bits whatever the batch
    attention, flash_attn_func, flash_attn_varlen_func, explain_attention       attention in every form; which kernels, and why
    mixture_of_attention                         attention whose heads are experts that every token chooses
    rms_norm, layer_norm, qkv_rope, rope, linear, gated_mlp, plain_mlp          the other operators
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from .options import options as options  # here, since importing the module later would put it in the function's place

__version__ = "0.1.0"

# Public name -> module that holds it. Resolved on first use: importing fusedblock costs nothing beyond torch.
_PUBLIC = {
    "attention": "attention_functions", "explain_attention": "attention_functions", "flash_attn_func": "attention_functions",
    "flash_attn_varlen_func": "attention_functions", "mixture_of_attention": "attention_experts",
    "gated_mlp": "ops", "layer_norm": "ops", "linear": "ops", "plain_mlp": "ops", "qkv_rope": "ops",
    "rms_norm": "ops", "rope": "ops",
    "BlockConfig": "models", "FusedBlock": "models", "KVCache": "cache",
    "explain": "models", "fuse": "models", "unfuse": "models",
    "load_safetensors": "models", "save_safetensors": "models",
    "measure": "metering", "register_attention": "models", "register_experts": "models",
}  # fmt: skip

__all__ = sorted([*_PUBLIC, "options"])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fusedblock' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fusedblock.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])


if sys.modules.get("transformers") is not None:  # else `register_attention`, `register_experts` or `fuse`
    from .models.interface import register_if_loaded

    register_if_loaded()

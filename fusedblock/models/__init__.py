"""HuggingFace-style models: the layer swap, and weights under their original names. Imports no transformers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .block import FusedBlock
    from .block_config import BlockConfig
    from .experts import register_experts
    from .explanation import explain
    from .interface import register_attention
    from .loading import CheckpointError, LoadReport, load_safetensors, save_safetensors
    from .report import BlockRecord, Calls, Explanation, FusionReport, LayerExplanation, LayerRecord
    from .swap import fuse, unfuse

# Public name -> module that holds it. Resolved on first use: the table of architectures alone needs no torch.
_PUBLIC = {
    "BlockConfig": "block_config", "FusedBlock": "block",
    "CheckpointError": "loading", "LoadReport": "loading", "load_safetensors": "loading", "save_safetensors": "loading",
    "BlockRecord": "report", "Calls": "report", "Explanation": "report", "FusionReport": "report", "LayerExplanation": "report",
    "LayerRecord": "report",
    "register_attention": "interface", "register_experts": "experts", "explain": "explanation", "fuse": "swap", "unfuse": "swap",
}  # fmt: skip

__all__ = [
    "BlockConfig",
    "BlockRecord",
    "Calls",
    "CheckpointError",
    "Explanation",
    "FusedBlock",
    "FusionReport",
    "LayerExplanation",
    "LayerRecord",
    "LoadReport",
    "explain",
    "fuse",
    "load_safetensors",
    "register_attention",
    "register_experts",
    "save_safetensors",
    "unfuse",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fusedblock.models' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fusedblock.models.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value

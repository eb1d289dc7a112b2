"""HuggingFace-style models: the layer swap, and weights under their original names. Imports no transformers."""

from __future__ import annotations

from .explain import explain
from .loading import CheckpointError, LoadReport, load_safetensors, save_safetensors
from .report import Calls, Explanation, FusionReport, LayerExplanation, LayerRecord
from .swap import fuse, unfuse

__all__ = [
    "Calls",
    "CheckpointError",
    "Explanation",
    "FusionReport",
    "LayerExplanation",
    "LayerRecord",
    "LoadReport",
    "explain",
    "fuse",
    "load_safetensors",
    "save_safetensors",
    "unfuse",
]

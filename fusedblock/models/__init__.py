"""HuggingFace-style models: the layer swap, and weights under their original names. Imports no transformers."""

from __future__ import annotations

from .block import FusedBlock
from .block_config import BlockConfig
from .explain import explain
from .loading import CheckpointError, LoadReport, load_safetensors, save_safetensors
from .report import Calls, Explanation, FusionReport, LayerExplanation, LayerRecord
from .swap import fuse, unfuse

__all__ = [
    "BlockConfig",
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
    "save_safetensors",
    "unfuse",
]

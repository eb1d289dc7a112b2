"""Models by name or by directory, as transformers configs and as modules on the meta device: sizes without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .checkpoints import quiet_transformers

_LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192}  # fmt: skip
_LLAMA3 = {"vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}

# The fields of the published config.json files that decide shapes and arithmetic.
PRESETS: dict[str, dict[str, Any]] = {
    "smollm2-135m": dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                         num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
                         rope_parameters={"rope_type": "default", "rope_theta": 100000.0}),
    "llama-2-7b": dict(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
                       num_key_value_heads=32, max_position_embeddings=4096, rms_norm_eps=1e-5),
    "llama-3.1-8b": dict(_LLAMA3, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                         num_key_value_heads=8, rope_parameters={**_LLAMA3_ROPE, "factor": 8.0}),
    "llama-3.1-70b": dict(_LLAMA3, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
                          num_key_value_heads=8, rope_parameters={**_LLAMA3_ROPE, "factor": 8.0}),
    "llama-3.2-1b": dict(_LLAMA3, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
                         num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
                         rope_parameters={**_LLAMA3_ROPE, "factor": 32.0}),
    "llama-3.2-3b": dict(_LLAMA3, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
                         num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
                         rope_parameters={**_LLAMA3_ROPE, "factor": 32.0}),
}  # fmt: skip


def config_of(model: str) -> Any:
    """The transformers config of a preset, or of the directory of a checkpoint; only its config.json is read.

    Raises ValueError naming what was expected.
    """
    from transformers import LlamaConfig

    if model in PRESETS:
        return LlamaConfig(**PRESETS[model], dtype=torch.bfloat16)
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise ValueError(f"{model!r} is neither a directory with a config.json nor a preset ({', '.join(PRESETS)})")
    return read_config(folder)


def read_config(folder: Path) -> Any:
    """The config of a checkpoint's directory. Raises ValueError naming the file: its values are the user's."""
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers and huggingface_hub each have exceptions of their own for a bad value
        raise ValueError(f"{folder / 'config.json'}: {error}") from error


def named_class(config: Any) -> Any:
    """The class of transformers that wrote a checkpoint, with its heads, by the config; None where it names none."""
    import transformers

    names = getattr(config, "architectures", None) or ()
    return next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)


def _auto(config: Any) -> Any:
    from transformers import AutoModel, AutoModelForCausalLM

    return AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModel


def from_pretrained(folder: Path, dtype: torch.dtype) -> Any:
    """A checkpoint as transformers loads it, by the class that wrote it. Raises ValueError naming the file."""
    config = read_config(folder)
    with quiet_transformers():
        return (named_class(config) or _auto(config)).from_pretrained(folder, dtype=dtype).eval()


def on_meta(config: Any, dtype: torch.dtype | None = None) -> Any:
    """The model of a config without memory behind its weights. dtype: None takes the config's, bf16 if it has none."""
    dtype = dtype or getattr(config, "dtype", None) or torch.bfloat16
    named = named_class(config)
    try:
        with quiet_transformers(), torch.device("meta"):
            return (named._from_config if named else _auto(config).from_config)(config, dtype=dtype).eval()
    except ZeroDivisionError as error:
        raise ValueError(f"no model can be made of this config: {error} (is num_attention_heads 0?)") from error

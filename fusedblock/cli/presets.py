"""Models by name or by directory, as transformers configs and as modules on the meta device: sizes without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .checkpoints import quiet_transformers
from .published import PRESETS


def config_of(model: str) -> Any:
    """The transformers config of a preset, or of the directory of a checkpoint; only its config.json is read.

    Raises ValueError naming what was expected.
    """
    from transformers import AutoConfig

    if model in PRESETS:
        fields = dict(PRESETS[model])
        return AutoConfig.for_model(fields.pop("model_type"), **fields, dtype=torch.bfloat16)
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise ValueError(f"{model!r} is neither a directory with a config.json nor a preset ({', '.join(PRESETS)})")
    return read_config(folder)


def title(model: str, subject: Any) -> str:
    """What a command works on, for its first line. subject: the module or config made of `model`."""
    kind = f"one layer of {subject.model_type}" if hasattr(subject, "model_type") else type(subject).__name__
    return f"{model} ({kind}, {'a preset: sizes only' if model in PRESETS else 'by its config.json'})"


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
    """The model of a config without memory behind its weights: of the class that the config names, of the causal language models
    if it names none of its kind. dtype: None takes the config's, bf16 if it has none."""
    import transformers

    dtype = dtype or getattr(config, "dtype", None) or torch.bfloat16
    named: Any = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    try:
        with quiet_transformers(), torch.device("meta"):
            if getattr(named, "config_class", None) is type(config):
                return named._from_config(config, dtype=dtype).eval()
            return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    except ZeroDivisionError as error:
        raise ValueError(f"no model can be made of this config: {error} (is num_attention_heads 0?)") from error

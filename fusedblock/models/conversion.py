"""Names and layouts in a checkpoint against those of the running module.

transformers 5 runs some weights in another layout than checkpoints hold them (``mlp.experts.gate_up_proj`` of Mixtral is merged
from ``block_sparse_moe.experts.N.w1`` and ``w3``) and keeps the rules as data. They are applied here lazily, one tensor of the
module at a time. Models without rules, such as Llama, pass through; nothing is imported unless transformers already is.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..io import Checkpoint, CheckpointError


@dataclass(frozen=True)
class Source:
    """Where the values of one tensor of a module come from: one tensor of a checkpoint, or several merged."""

    names: tuple[str, ...]
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def name(self) -> str:
        """The first name, and how many follow."""
        return repr(self.names[0]) + (f" and {len(self.names) - 1} others merged with it" if len(self.names) > 1 else "")


def sources_of(target: nn.Module, keys: Collection[str], checkpoint: Checkpoint) -> dict[str, Source]:
    """The tensors of ``checkpoint`` by the names they have in the running model.

    Args:
        target: the module to be filled, or a part of it.
        keys: its state-dict keys; a checkpoint name among them is taken as it is.
        checkpoint: an open checkpoint.

    Raises:
        CheckpointError: two names mean the same tensor, or a merge is impossible (an expert lacks a weight).
    """
    rules = _rules(target)
    if not rules:
        return {name: _plain(checkpoint, name) for name in checkpoint}
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    parts: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
    for name in sorted(checkpoint, key=dot_natural_key):  # experts are merged in this order
        renamed, pattern = (name, None) if name in keys else rename_source_key(name, renamings, converters)
        parts[renamed].append((name, pattern))

    sources: dict[str, Source] = {}
    for renamed, pairs in parts.items():
        names = tuple(name for name, _ in pairs)
        first, pattern = pairs[0]
        if pattern is None:
            if len(pairs) > 1:
                raise CheckpointError(
                    f"{checkpoint.file_of(names[1])}: {names[0]!r} and {names[1]!r} are both {renamed!r} of the model"
                )
            sources[renamed] = _plain(checkpoint, first)
            continue

        def merge(read: Callable[[str], Tensor], renamed: str = renamed, pairs: Any = pairs) -> dict[str, Tensor]:
            converter = deepcopy(by_pattern[pairs[0][1]])
            for name, pattern in pairs:
                converter.add_tensor(renamed, name, pattern, read(name))
            try:
                merged = converter.convert(renamed, model=target, config=_config(target))
            except Exception as error:  # whatever a rule raises, the checkpoint does not have what it needs
                raise CheckpointError(
                    f"{checkpoint.file_of(pairs[0][0])}: cannot merge {len(pairs)} tensors, the first {pairs[0][0]!r} of shape "
                    f"{checkpoint.shape(pairs[0][0])}, into {renamed!r}: {error}"
                ) from error
            return {key: value[0] if isinstance(value, list) else value for key, value in merged.items()}

        def on_meta(name: str) -> Tensor:
            return torch.empty(checkpoint.shape(name), dtype=checkpoint.dtype(name), device="meta")

        for key, value in merge(on_meta).items():
            sources[key] = Source(
                names,
                checkpoint.file_of(first),
                tuple(value.shape),
                value.dtype,
                lambda key=key, merge=merge: merge(checkpoint.tensor)[key],  # type: ignore[misc]
            )
    return sources


def has_other_names(target: nn.Module) -> bool:
    """Whether names in checkpoints of the target's model may differ from the module's own."""
    return bool(_rules(target))


def original_state(model: nn.Module, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """``state`` under the names and in the layout of the model's checkpoints, as ``save_pretrained`` writes them."""
    if not _is_pretrained(model):
        return state
    from transformers.core_model_loading import revert_weight_conversion

    with torch.no_grad():
        return revert_weight_conversion(model, dict(state))


def _plain(checkpoint: Checkpoint, name: str) -> Source:
    return Source(
        (name,), checkpoint.file_of(name), checkpoint.shape(name), checkpoint.dtype(name), lambda: checkpoint.tensor(name)
    )


def _is_pretrained(module: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def _config(target: nn.Module) -> Any:
    return next((module.config for module in target.modules() if hasattr(getattr(module, "config", None), "model_type")), None)


def _rules(target: nn.Module) -> list[Any]:
    """The rules of the model that ``target`` is or is a layer of."""
    if _is_pretrained(target):
        from transformers.conversion_mapping import get_model_conversion_mapping

        return get_model_conversion_mapping(target, add_legacy=False)
    config = _config(target)
    if config is None or "transformers" not in sys.modules:
        return []
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    return get_checkpoint_conversion_mapping(config.model_type) or []

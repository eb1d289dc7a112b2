"""Names and layouts in a checkpoint against those of the running module.

transformers 5 runs some weights in another layout than checkpoints hold them (``mlp.experts.gate_up_proj`` of Mixtral is merged
from ``block_sparse_moe.experts.N.w1`` and ``w3``) and keeps the rules as data. They are applied here lazily, one tensor of the
module at a time. Models without rules, such as Llama, pass through; nothing is imported unless transformers already is.

The old names of the layers in the table of architectures are data there, so that a FusedBlock needs no transformers.
"""

from __future__ import annotations

import re
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
from . import table
from .block_config import BlockConfig


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
    rules, rename, listed = _rules(target), renamer(target, keys), list(checkpoint)
    by_pattern: dict[str, Any] = {}
    if rules:
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        listed.sort(key=dot_natural_key)  # experts are merged in this order
    parts: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
    for name in listed:
        renamed, pattern = rename(name), None
        if rules and renamed not in keys:
            renamed, pattern = rename_source_key(name, renamings, converters)
            renamed = rename(renamed)
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


def renamer(target: nn.Module, keys: Collection[str]) -> Callable[[str], str]:
    """The function from a name in a checkpoint, under any prefix, to what the target calls it under the same prefix.

    It knows the old names of the table of architectures. Of a HuggingFace model it also adds the prefix of the base model to
    names that lack it, as ``from_pretrained`` does. A name that it does not know stays as it is.
    """
    old = _old_names(target, keys)
    for key in keys:
        old |= {key.removesuffix(ours) + theirs: key for theirs, ours in table.OLD_PARAMETERS.items() if key.endswith(ours)}
    base = f"{base_prefix(target)}." if base_prefix(target) else ""

    def rename(name: str) -> str:
        for given in (name, base + name):
            if given in keys or given in old:
                return old.get(given, given)
        for end in tails(name):
            if name[end:] in keys:
                return name
            if name[end:] in old:
                return name[:end] + old[name[end:]]
        return name

    return rename


def tails(name: str) -> list[int]:
    """Where the parts of a dotted name begin, all but the first."""
    return [i + 1 for i, character in enumerate(name) if character == "."]


def base_prefix(target: nn.Module) -> str:
    """The name under which a HuggingFace model with a head holds the model below, or an empty string."""
    return str(target.base_model_prefix or "") if _is_pretrained(target) else ""


def ignored_patterns(target: nn.Module) -> list[str]:
    """What the names of tensors match that a checkpoint may hold and the target need not have."""
    specs = {spec.family: spec for spec in map(_spec, target.modules()) if spec}
    patterns = [rf"(^|\.){re.escape(name)}$" for spec in specs.values() for name in spec.old_buffers]
    if any(name.endswith("position_ids") for name, _ in target.named_buffers()):  # was once in every file
        patterns.append(r"(^|\.)position_ids$")
    return [*patterns, *(getattr(target, "_keys_to_ignore_on_load_unexpected", None) or ())]


def _spec(module: nn.Module) -> table.LayerSpec | None:
    """The entry of a FusedBlock or of a layer of transformers, fused or not."""
    if isinstance(config := getattr(module, "config", None), BlockConfig):
        return config.spec
    known = table.known_class(type(module))
    return table.SPECS[known.__name__] if known else None


def _old_names(target: nn.Module, keys: Collection[str]) -> dict[str, str]:
    """Name of a checkpoint -> key, for the renamed modules of every layer in the target."""
    old: dict[str, str] = {}
    for path, spec in ((path, _spec(module)) for path, module in target.named_modules()):
        start = f"{path}." if path else ""
        for theirs, ours in spec.old_names.items() if spec else ():
            module = f"{start}{ours}."
            old |= {f"{start}{theirs}.{key.removeprefix(module)}": key for key in keys if key.startswith(module)}
    return old


def has_rules(target: nn.Module) -> bool:
    """Whether transformers has rules for checkpoints of the target's model."""
    return bool(_rules(target))


def original_state(model: nn.Module, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """``state`` under the names and in the layout of the model's checkpoints, as ``save_pretrained`` writes them.

    A FusedBlock's under those that its layer has in a checkpoint of transformers. Other modules have no names but their own.
    """
    if isinstance(getattr(model, "config", None), BlockConfig):
        theirs = {key: name for name, key in _old_names(model, state).items()}
        return {theirs.get(key, key): value for key, value in state.items()}
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
    if config is None or isinstance(config, BlockConfig) or "transformers" not in sys.modules:
        return []
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    return get_checkpoint_conversion_mapping(config.model_type) or []

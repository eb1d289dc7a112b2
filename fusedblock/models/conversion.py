"""Names and layouts in a checkpoint against those of the running module.

transformers 5 runs some weights in another layout than checkpoints hold them and keeps the rules as data. They are applied here
lazily, one tensor of the module at a time. Models without rules, such as Llama, pass through; nothing is imported unless
transformers already is.

The experts of a mixture (``mlp.experts.gate_up_proj`` of Mixtral is merged from ``block_sparse_moe.experts.N.w1`` and ``w3``) are
merged here for every module that stacks them, whether transformers has rules for it or not: see `expert_names`. The old names of
the layers in the table of architectures are data there. So neither a FusedBlock nor any other module needs transformers.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ..io import Checkpoint, CheckpointError
from . import expert_names, sources, table
from .block_config import BlockConfig
from .expert_names import Part
from .sources import Source

Shapes = Mapping[str, Sequence[int]]


def sources_of(target: nn.Module, keys: Shapes, checkpoint: Checkpoint) -> dict[str, Source]:
    """The tensors of ``checkpoint`` by the names they have in the running model.

    Args:
        target: the module to be filled, or a part of it.
        keys: its state-dict keys with the shapes of their tensors; a checkpoint name among them is taken as it is.
        checkpoint: an open checkpoint.

    Raises:
        CheckpointError: two names mean the same tensor, or a merge by a rule of transformers is impossible.
    """
    rules, rename, listed = _rules(target), renamer(target, keys), list(checkpoint)
    experts: dict[str, dict[str, Part | None]] = defaultdict(dict)
    by_pattern: dict[str, Any] = {}
    if rules:
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        listed.sort(key=dot_natural_key)  # experts are merged in this order
    parts: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
    for name in listed:
        (renamed, part), pattern = rename(name), None
        if rules and renamed not in keys:
            if expert_names.part_of(name):
                renamed, part = rename(rename_source_key(name, renamings, [])[0])
            if part is None:
                renamed, pattern = rename_source_key(name, renamings, converters)
                renamed, _ = rename(renamed)
        parts[renamed].append((name, pattern))
        if part:
            experts[renamed][name] = expert_names.part_of(name)

    found: dict[str, Source] = {}
    for renamed, pairs in parts.items():
        if renamed in experts:
            of = experts[renamed]
            found[renamed] = sources.stacked(checkpoint, renamed, {name: of.get(name) for name, _ in pairs})
            continue
        names = tuple(name for name, _ in pairs)
        first, pattern = pairs[0]
        if pattern is None:
            if len(pairs) > 1:
                raise CheckpointError(
                    f"{checkpoint.file_of(names[1])}: {names[0]!r} and {names[1]!r} are both {renamed!r} of the model"
                )
            found[renamed] = sources.plain(checkpoint, first)
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
            found[key] = Source(
                names,
                checkpoint.file_of(first),
                tuple(value.shape),
                value.dtype,
                lambda key=key, merge=merge: merge(checkpoint.tensor)[key],  # type: ignore[misc]
            )
    return found


def renamer(target: nn.Module, keys: Shapes) -> Callable[[str], tuple[str, Part | None]]:
    """The function from a name in a checkpoint, under any prefix, to what the target calls it under the same prefix.

    It knows the old names of the table of architectures, and the names of experts: if the target has them stacked, the second
    value says which part of the tensor is meant. Of a HuggingFace model it also adds the prefix of the base model to
    names that lack it, as ``from_pretrained`` does. A name that it does not know stays as it is.
    """
    stacked = expert_names.stacked_keys(keys)
    old = expert_names.old_block_names(keys, stacked) | _old_names(target, keys)
    for key in keys:
        old |= {key.removesuffix(ours) + theirs: key for theirs, ours in table.OLD_PARAMETERS.items() if key.endswith(ours)}
    base = f"{base_prefix(target)}." if base_prefix(target) else ""

    def current(name: str) -> str:
        for given in (name, base + name):
            if given in keys or given in old:
                return old.get(given, given)
        for end in tails(name):
            if name[end:] in keys:
                return name
            if name[end:] in old:
                return name[:end] + old[name[end:]]
        return name

    def rename(name: str) -> tuple[str, Part | None]:
        if stacked and (part := expert_names.part_of(name)):
            renamed = current(part.stacked)
            if any(renamed[start:] in stacked for start in (0, *tails(renamed))):
                return renamed, part
        return current(name), None

    return rename


def tails(name: str) -> list[int]:
    """Where the parts of a dotted name begin, all but the first."""
    return [i + 1 for i, character in enumerate(name) if character == "."]


def base_prefix(target: nn.Module) -> str:
    """The name under which a HuggingFace model with a head holds the model below, or an empty string."""
    return str(target.base_model_prefix or "") if is_pretrained(target) else ""


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

    A FusedBlock's under those that its layer has in a checkpoint of transformers, its experts one by one where they lie there so.
    Other modules have no names but their own.
    """
    if isinstance(config := getattr(model, "config", None), BlockConfig):
        theirs = {key: name for name, key in _old_names(model, state).items()}
        named = {theirs.get(key, key): value for key, value in state.items()}
        return expert_names.split(named, config.model_type) if config.sparse else named
    if not is_pretrained(model):
        return state
    from transformers.core_model_loading import revert_weight_conversion

    with torch.no_grad():
        return revert_weight_conversion(model, dict(state))


def is_pretrained(module: nn.Module) -> bool:
    """Whether it is a HuggingFace model, which knows the names in its checkpoints."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def _config(target: nn.Module) -> Any:
    return next((module.config for module in target.modules() if hasattr(getattr(module, "config", None), "model_type")), None)


def _rules(target: nn.Module) -> list[Any]:
    """The rules of the model that ``target`` is or is a layer of."""
    if is_pretrained(target):
        from transformers.conversion_mapping import get_model_conversion_mapping

        return get_model_conversion_mapping(target, add_legacy=False)
    config = _config(target)
    if config is None or isinstance(config, BlockConfig) or "transformers" not in sys.modules:
        return []
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    return get_checkpoint_conversion_mapping(config.model_type) or []

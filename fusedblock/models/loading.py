"""Weights of a module from and to safetensors checkpoints, under the names HuggingFace gives them."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..io import Checkpoint, CheckpointError, names_of, write_checkpoint
from . import expert_names as names_of_experts
from .conversion import base_prefix, has_rules, ignored_patterns, is_pretrained, original_state, renamer, sources_of, tails
from .sources import LISTED, Source, listed, overlaps

__all__ = ["CheckpointError", "LoadReport", "load_safetensors", "save_safetensors"]

# Llama checkpoints of 2023 hold the RoPE frequencies of every layer; transformers ignores them as well.
_LEGACY_KEYS = (r"rotary_emb\.inv_freq$",)


@dataclass(frozen=True)
class LoadReport:
    """What `load_safetensors` did. As a string, how many keys, and which are missing or unexpected.

    Attributes:
        loaded: state-dict keys of the target that have the checkpoint's values now, tied ones under each of their names.
        missing: keys of the target that the checkpoint lacks; their tensors were left as they were.
        unexpected: names in the checkpoint, under the prefix, for which the target has no tensor.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def __str__(self) -> str:
        counts = f"{len(self.loaded)} loaded, {len(self.missing)} missing, {len(self.unexpected)} unexpected"
        named = {"missing": self.missing, "unexpected": self.unexpected}
        return "\n".join([counts, *(f"{kind}: {listed(keys)}" for kind, keys in named.items() if keys)])


@dataclass(frozen=True)
class _Slot:
    """A tensor of the target and the dictionary of its module, ``_parameters`` or ``_buffers``, that holds it as ``leaf``."""

    key: str
    tensor: Tensor
    holder: dict[str, Tensor | None]  # empty if a state_dict hook renamed the key
    leaf: str


@dataclass(frozen=True)
class _Load:
    """The slots that share one tensor, and the source and final dtype of its values."""

    slots: tuple[_Slot, ...]
    source: Source
    dtype: torch.dtype


@torch.inference_mode(False)
@torch.no_grad()
def load_safetensors(
    target: nn.Module,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    strict: bool = True,
    prefix: str | None = None,
) -> LoadReport:
    """Fill ``target`` with the weights of a safetensors checkpoint, read through memory-mapped files.

    Everything is checked first: files, keys, shapes, dtypes. A load that raises leaves the target as it was.

    Tensors that have storage are filled in place: Parameters stay the same objects, optimizers keep working, fused layers stay
    fused. Tensors on the meta device are replaced by new ones on ``device``, with ``requires_grad`` and ties kept, and
    non-persistent buffers on meta (RoPE frequencies) are computed by the model's own ``_init_weights`` (or, for a module outside
    a HuggingFace model, its ``reset_parameters``). Tied tensors are one tensor: the checkpoint may hold any or all of the names.

    Args:
        target: a HuggingFace model, one of its layers, or any module.
        path: a ``.safetensors`` file, ``model.safetensors.index.json``, or a directory with either.
        dtype: floating-point dtype to convert to; integer and bool tensors never change. The tensors of a target that has
            storage must already have it. None converts nothing: a target on meta takes the dtypes of the files, any other must
            have them. Modules a HuggingFace model keeps in float32 become float32, as in ``from_pretrained``.
        device: for a target on meta, where to put the weights; CPU by default. A target that has storage must be there.
        strict: raise if a key is missing or unexpected, instead of saying so in the report. A missing tensor keeps its values,
            or stays on meta.
        prefix: the part of the checkpoint that belongs to the target, such as ``"model.layers.3"``; names outside it are not
            looked at, and shards without any name under it are not opened. None: the whole checkpoint if it has any of the
            target's own keys, else the one prefix under which it has all of them. For a layer with a ``layer_idx``, as in
            HuggingFace models and FusedBlock, that is the layer of this index. For a HuggingFace model, its
            ``base_model_prefix`` may be missing from the names, or be there too much.

    Experts that the target has stacked, ``mlp.experts.gate_up_proj`` [expert, 2 * ffn, hidden] and ``down_proj`` [expert, hidden,
    ffn], are read from the same tensors or from one matrix per expert and linear layer, ``mlp.experts.N.gate_proj.weight`` or
    ``block_sparse_moe.experts.N.w1.weight``, each straight into its place, with or without transformers.

    Names that transformers has changed since, and buffers that its layers no longer have, are known for every family in the
    table of architectures, without transformers. Of a HuggingFace model, what its class says of unexpected and missing keys is
    no error either; a missing one keeps its values, so on meta it is one all the same.

    Returns:
        The keys loaded, missing and unexpected.

    Raises:
        FileNotFoundError: no checkpoint at ``path``.
        CheckpointError: a damaged checkpoint; missing, unexpected or contradicting keys; a shape or dtype that differs from the
            target's; no or several prefixes that fit. Names file, key and both values. It is a ValueError.
        ValueError: ``dtype`` or ``device`` contradict the target, or a buffer would stay on meta.
        TypeError: ``dtype`` is none; the target holds sharded, quantised or other tensors of a class of their own.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r} is a {type(dtype).__name__}, expected a torch.dtype")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype}: weights can only be converted to a floating-point dtype")
    target = _unwrapped(target)
    slots = _slots(target)
    _check_slots(slots, device)
    groups = _tied_groups(slots)
    where = torch.device("cpu" if device is None else device)
    prefix = prefix.removesuffix(".") + "." if prefix else prefix
    keys = {slot.key: slot.tensor.shape for slot in slots}
    rules = has_rules(target)  # then what a name becomes may depend on all of it, prefix and all
    if prefix is None and not rules:
        rename = renamer(target, keys)
        prefix = _find_prefix(target, groups, {rename(name)[0] for name in names_of(path)}, Path(path))
    with Checkpoint(path, "" if rules else prefix or "") as checkpoint:
        sources = sources_of(target, keys, checkpoint)
        if prefix is None:
            prefix = _find_prefix(target, groups, sources, checkpoint.path)
        sources = {name[len(prefix) :]: source for name, source in sources.items() if name.startswith(prefix)}
        loads, report = _plan(target, groups, sources, dtype, strict, checkpoint.path, prefix)
        buffers = _initial_buffers(target, where)
        fresh = [_new_tensor(load, where) for load in loads]
        # from here on the target changes
        for load, tensor in zip(loads, fresh):
            if tensor is None:
                load.source.copy_to(load.slots[0].tensor)
                continue
            for slot in load.slots:
                slot.holder[slot.leaf] = tensor
        for holder, leaf, buffer in buffers:
            holder[leaf] = buffer
    return report


def save_safetensors(
    source: nn.Module | Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    expert_names: str | None = None,
) -> list[Path]:
    """Write weights as a safetensors checkpoint, bit for bit, under their own names.

    A HuggingFace model's are those that ``save_pretrained`` writes; a FusedBlock's those that its layer has in such a file,
    without the prefix: they differ from its state dict for the model_type "vit", and where it has experts.

    Args:
        source: a module, fused or not, whose state dict is written, or tensors by name. Of the tied tensors of a module, the
            first name is written, as HuggingFace does, and a load fills all of them; of a mapping, every name is written.
        path: a directory (for a HuggingFace model the one with its ``config.json``), or one ``.safetensors`` file.
        max_shard_size: bytes, or a string such as ``"5GB"`` (10^9 bytes); more than that makes shards and an index, and for a
            single file is an error.
        expert_names: a model_type such as "mixtral" or "qwen3_moe": stacked experts, ``mlp.experts.gate_up_proj`` [expert,
            2 * ffn, hidden] and ``down_proj`` [expert, hidden, ffn], are written one by one under the names of its checkpoints.
            None leaves them stacked, which transformers reads too, but for a FusedBlock's, which has names of its own. Not for a
            HuggingFace model, which has them too.

    Returns:
        The files written, the index last.

    Raises:
        ValueError: ``expert_names`` is unknown, or ``source`` is a HuggingFace model or has no such experts.
        TypeError, ValueError: see `fusedblock.io.write_checkpoint`, which also says what an interrupted save leaves behind.
    """
    if isinstance(source, nn.Module):
        source = _unwrapped(source)
        state = source.state_dict(keep_vars=True)
        first: dict[object, str] = {}
        for key, value in state.items():
            first.setdefault(_identity(value) if isinstance(value, Tensor) else key, key)
        if expert_names is not None and is_pretrained(source):
            raise ValueError(f"expert_names={expert_names!r}: a HuggingFace model has the names of its own model_type")
        own = {key: state[key] for key in first.values()}
        source = own if expert_names is not None else original_state(source, own)
    if expert_names is not None:
        source = names_of_experts.split(source, expert_names)
    return write_checkpoint(source, path, max_shard_size)


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module itself; ``torch.compile`` puts it into a wrapper, under other names."""
    return getattr(module, "_orig_mod", module)


def _identity(tensor: Tensor) -> object:
    """Equal for two tensors of a module exactly if they are tied: the same object, or the same memory read the same way."""
    if tensor.is_meta or tensor.numel() == 0 or type(tensor.data) is not Tensor or tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _slots(target: nn.Module) -> list[_Slot]:
    holders: dict[str, tuple[dict[str, Tensor | None], str]] = {}
    for path, module in target.named_modules(remove_duplicate=False):
        for holder in (module._parameters, module._buffers):
            holders |= {f"{path}.{leaf}" if path else leaf: (holder, leaf) for leaf in holder}  # type: ignore[dict-item]
    slots = []
    for key, tensor in target.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{key!r} of the target is no tensor but {type(tensor).__name__}; it has no place in a checkpoint")
        slots.append(_Slot(key, tensor, *holders.get(key, ({}, ""))))
    return slots


def _check_slots(slots: list[_Slot], device: torch.device | str | int | None) -> None:
    where = None if device is None else torch.device(device)
    for slot in slots:
        tensor = slot.tensor
        if type(tensor.data) is not Tensor or tensor.is_quantized:
            raise TypeError(
                f"{slot.key!r} of the target is a {type(tensor.data).__name__}; only plain tensors can be loaded into"
            )
        if tensor.is_inference() and not tensor.is_meta:
            raise ValueError(f"{slot.key!r} of the target was made in torch.inference_mode and cannot be changed outside of it")
        if tensor.is_meta and not slot.holder:
            raise TypeError(f"{slot.key!r} is on meta and is the name of no parameter or buffer of the target: cannot replace it")
        if where is not None and not tensor.is_meta:
            if where.type != tensor.device.type or where.index not in (None, tensor.device.index):
                raise ValueError(
                    f"device={str(where)!r}, but {slot.key!r} of the target is on {str(tensor.device)!r}; "
                    "device is for targets on meta, move others with target.to()"
                )


def _tied_groups(slots: list[_Slot]) -> list[tuple[_Slot, ...]]:
    groups = defaultdict(list)
    for slot in slots:
        groups[_identity(slot.tensor)].append(slot)
    return [tuple(group) for group in groups.values()]


def _find_prefix(target: nn.Module, groups: list[tuple[_Slot, ...]], names: Collection[str], path: Path) -> str:
    def fits(prefix: str) -> int:
        return sum(any(prefix + slot.key in names for slot in group) for group in groups)

    whole, base = len(groups), base_prefix(target)
    own = fits("")
    if 2 * own >= whole and own:
        return ""
    _check_not_lacking(groups, names, path)
    if own:
        return ""
    if base and fits(base + "."):
        return base + "."
    found: dict[str, int] = defaultdict(int)
    for group in groups:
        endings = tuple("." + slot.key for slot in group)
        prefixes = {
            name[: -len(ending) + 1] for name in names if name.endswith(endings) for ending in endings if name.endswith(ending)
        }
        for prefix in prefixes:
            found[prefix] += 1
    if not found:  # nothing fits: every key will be missing
        return ""
    complete = sorted(prefix for prefix, count in found.items() if count == whole)
    fitting, near = complete, sorted(found)
    indices = {module.layer_idx for module in target.modules() if isinstance(getattr(module, "layer_idx", None), int)}
    index = str(indices.pop()) if len(indices) == 1 else None
    if index is not None:
        # "layers.3." is the place of layer 3; a prefix without a number, as in "decoder.", says nothing about it
        numbers = {prefix: next(filter(str.isdigit, prefix.split(".")), None) for prefix in found}
        fitting = [prefix for prefix in complete if numbers[prefix] in (None, index)]
        near = [prefix for prefix in near if numbers[prefix] == index]
    if not fitting:
        text = ""
        if near:
            best = max(near, key=found.__getitem__)
            lacking = [group[0].key for group in groups if not any(best + slot.key in names for slot in group)]
            text = f"; {best!r} comes nearest and lacks {listed(lacking)}"
        if complete:
            text = f"the target is layer {index}, but its keys are only under {listed(complete)}{text}"
        elif near:
            text = f"no prefix has all keys of the target{text}"
        else:
            text = f"the target is layer {index}, and no prefix has all its keys, nor any of that layer: {listed(sorted(found))}"
        raise CheckpointError(f"{path}: {text}. Pass prefix= to load {'one of them' if complete or not near else 'it'}")
    if len(fitting) > 1:
        raise CheckpointError(
            f"{path}: the keys of the target are under several prefixes: {listed(fitting)}. Pass one as prefix="
        )
    return fitting[0]


def _check_not_lacking(groups: list[tuple[_Slot, ...]], names: Collection[str], path: Path) -> None:
    """Most keys of the target would be in the file, were they not under a prefix that the file's lack."""
    lacking: dict[str, int] = defaultdict(int)
    for group in groups:
        for prefix in {slot.key[:end] for slot in group for end in tails(slot.key) if slot.key[end:] in names}:
            lacking[prefix] += 1
    prefix = max(sorted(lacking), key=lacking.__getitem__, default="")
    if 2 * lacking[prefix] > len(groups):
        raise CheckpointError(
            f"{path}: the checkpoint's keys lack the prefix {prefix!r} that the target's have; load them into its part "
            f"{prefix.removesuffix('.')!r}"
        )


def _plan(
    target: nn.Module,
    groups: list[tuple[_Slot, ...]],
    sources: Mapping[str, Source],
    dtype: torch.dtype | None,
    strict: bool,
    path: Path,
    prefix: str,
) -> tuple[list[_Load], LoadReport]:
    problems: list[str] = []
    loads: list[_Load] = []
    missing: list[str] = []
    for group in groups:
        found = [sources[slot.key] for slot in group if slot.key in sources]
        if not found:
            missing += [slot.key for slot in group]
            continue
        shape = tuple(group[0].tensor.shape)
        wrong = [text for source in found for text in source.mismatches(shape)] or _contradiction(found)
        if not group[0].tensor.is_meta and overlaps(group[0].tensor):
            strides = group[0].tensor.stride()
            wrong.append(f"elements of the target's {group[0].key!r}, of shape {shape} and strides {strides}, share memory")
        wanted = _wanted_dtype(target, group[0], found[0], dtype)
        if isinstance(wanted, str):
            wrong = wrong or [wanted]
        elif not wrong:
            loads.append(_Load(group, found[0], wanted))
        problems += wrong

    keys = {slot.key for group in groups for slot in group}
    extra = [(key, source) for key, source in sources.items() if key not in keys]
    if strict:
        on_meta = {slot.key for group in groups for slot in group if slot.tensor.is_meta}
        optional = getattr(target, "_keys_to_ignore_on_load_missing", None) or ()
        problems += [
            f"{path}: the checkpoint lacks {prefix + key!r}"
            for key in missing
            if key in on_meta or not any(re.search(pattern, key) for pattern in optional)
        ]
        ignored = [*_LEGACY_KEYS, *ignored_patterns(target)]
        problems += [
            f"{source.file}: unexpected key {source.name}, the target has no {key!r}"
            for key, source in extra
            if not any(re.search(pattern, key) for pattern in ignored)
        ]
    if problems:
        more = [f"and {len(problems) - LISTED} more"] if len(problems) > LISTED else []
        raise CheckpointError("\n".join(problems[:LISTED] + more))
    loaded = tuple(slot.key for load in loads for slot in load.slots)
    return loads, LoadReport(loaded, tuple(missing), tuple(name for _, source in extra for name in source.names))


def _contradiction(sources: list[Source]) -> list[str]:
    """The names of one tied tensor must agree, else which of them wins would be a matter of chance."""
    first = sources[0]
    for other in sources[1:]:
        if (first.shape, first.dtype) != (other.shape, other.dtype):
            difference = f"have shapes {first.shape} and {other.shape}, dtypes {first.dtype} and {other.dtype}"
        elif not _same_bits(first.read(), other.read()):
            difference = "hold different values"
        else:
            continue
        return [f"{other.file}: {first.name} and {other.name} are one tensor in the target, but {difference}"]
    return []


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8))


def _wanted_dtype(target: nn.Module, slot: _Slot, source: Source, dtype: torch.dtype | None) -> torch.dtype | str:
    """The dtype to fill ``slot`` in, or what is wrong."""
    here, asked = slot.tensor.dtype, dtype
    floating = here.is_floating_point and source.dtype.is_floating_point
    if not floating:
        if source.dtype == here:
            return here
        return f"{source.file}: {source.name} has dtype {source.dtype}, the target {here}; only floating-point dtypes convert"
    if dtype is not None and _kept_in_float32(target, slot.key, dtype) and (slot.tensor.is_meta or here == torch.float32):
        dtype = torch.float32
    if slot.tensor.is_meta:
        return source.dtype if dtype is None else dtype
    if asked is None and source.dtype != here:
        return f"{source.file}: {source.name} has dtype {source.dtype}, the target {here}; dtype={here} converts"
    if dtype is not None and dtype != here:
        return f"{source.file}: {source.name} was to be loaded with dtype={asked}, but the target has {here}"
    return here


def _kept_in_float32(target: nn.Module, key: str, dtype: torch.dtype) -> bool:
    """HuggingFace's two lists: the first counts for float16, the strict one for bfloat16 as well."""
    names: set[str] = set()
    if dtype == torch.float16:
        names |= set(getattr(target, "_keep_in_fp32_modules", None) or ())
    if dtype in (torch.float16, torch.bfloat16):
        names |= set(getattr(target, "_keep_in_fp32_modules_strict", None) or ())
    return any(re.search(rf"(^|\.){name}($|\.)", key) for name in names)


def _new_tensor(load: _Load, device: torch.device) -> Tensor | None:
    """The tensor to replace one on meta, None for one that has storage.

    Always a copy: a tensor that is a piece of the mapped file is not aligned and would depend on the file.
    """
    old = load.slots[0].tensor
    if not old.is_meta:
        return None
    new = torch.empty(load.source.shape, dtype=load.dtype, device=device)
    load.source.copy_to(new)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


def _initial_buffers(target: nn.Module, device: torch.device) -> list[tuple[dict[str, Tensor | None], str, Tensor]]:
    """Values for the non-persistent buffers on meta, which no checkpoint holds.

    Each module's own initialisation runs on a shadow of the module, so nothing of the target changes.
    """
    modules = dict(target.named_modules())
    result: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    for path, module in modules.items():
        on_meta = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        names = [name for name in on_meta if name in module._non_persistent_buffers_set]
        if not names:
            continue
        shadow = _shadow(module, device)
        before = {name: (buffer, buffer._version) for name, buffer in shadow._buffers.items() if buffer is not None}
        owner: Any = next((o for o in _enclosing(modules, path) if callable(getattr(o, "_init_weights", None))), None)
        with torch.device("cpu"):  # where from_pretrained computes them: the same bits on every device
            if owner is not None:
                owner._init_weights(shadow)
            elif callable(reset := getattr(shadow, "reset_parameters", None)):
                reset()
        for name in names:
            value = shadow._buffers[name]
            old, version = before[name]
            if value is None or (value is old and value._version == version):
                raise ValueError(
                    f"buffer {f'{path}.{name}'.lstrip('.')!r} is on meta and in no checkpoint (persistent=False); neither the "
                    "model's _init_weights nor its module's reset_parameters sets it; build the module off meta"
                )
            result.append((module._buffers, name, value.to(device)))
    return result


def _enclosing(modules: Mapping[str, nn.Module], path: str) -> Iterator[nn.Module]:
    while path:
        yield modules[path]
        path = path.rpartition(".")[0]
    yield modules[""]


def _shadow(module: nn.Module, device: torch.device) -> nn.Module:
    """The module with buffers of its own on ``device`` and all parameters on meta, where initialising them costs nothing."""
    shadow = object.__new__(type(module))
    shadow.__dict__.update(module.__dict__)
    shadow.__dict__["_parameters"] = {
        name: None if value is None else nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False)
        for name, value in module._parameters.items()
    }
    shadow.__dict__["_buffers"] = {
        name: None if value is None else torch.zeros_like(value, device=device) for name, value in module._buffers.items()
    }
    shadow.__dict__["_modules"] = {
        name: None if child is None else _shadow(child, device) for name, child in module._modules.items()
    }
    return shadow

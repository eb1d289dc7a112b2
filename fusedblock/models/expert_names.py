"""What checkpoints call the experts of a mixture, as data, and the same weights as the running module stacks them.

A file holds one matrix per expert and linear layer, ``mlp.experts.7.up_proj.weight`` [ffn, hidden]. The module, as transformers
has it since version 5, holds two tensors: ``mlp.experts.gate_up_proj`` [expert, 2 * ffn, hidden], gate's rows before up's, and
``mlp.experts.down_proj`` [expert, hidden, ffn]. No values change from one to the other.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

GATE_UP, DOWN = "gate_up_proj", "down_proj"
_BLOCK = "mlp"  # the running module that has the router and the experts


@dataclass(frozen=True)
class ExpertNames:
    """layers: stacked tensor -> the linear layers whose weights are its rows, in this order; without any, files hold it stacked.
    block: what files call the layer's ``mlp``."""

    layers: Mapping[str, tuple[str, ...]]
    block: str = _BLOCK


_PROJECTIONS = ExpertNames({GATE_UP: ("gate_proj", "up_proj"), DOWN: ("down_proj",)})
_NUMBERED = ExpertNames({GATE_UP: ("w1", "w3"), DOWN: ("w2",)}, "block_sparse_moe")
# model_type -> the names in its checkpoints.
FAMILIES: dict[str, ExpertNames] = {
    **dict.fromkeys(("mixtral", "minimax"), _NUMBERED),
    **dict.fromkeys(
        ("qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "flex_olmo", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite",
         "dots1", "cohere2_moe"),
        _PROJECTIONS,
    ),
    "gpt_oss": ExpertNames({}),  # transposed, interleaved and with biases, in files as in the module
}  # fmt: skip

# Linear layer -> the stacked tensor that has its weights among its rows, and the layers of all these rows.
_ROWS = {layer: (stacked, layers) for names in FAMILIES.values() for stacked, layers in names.layers.items() for layer in layers}
_OLD_BLOCKS = sorted({names.block for names in FAMILIES.values()} - {_BLOCK})
# The experts' own module has no "experts." before its keys.
_PART = re.compile(rf"((?:.*\.)?experts\.|)(0|[1-9]\d*)\.({'|'.join(_ROWS)})\.weight")


@dataclass(frozen=True)
class Part:
    """The weight of linear layer ``layer`` of expert number ``expert``; ``start`` is what names have before the number."""

    start: str
    expert: int
    layer: str

    @property
    def stacked(self) -> str:
        """Name of the stacked tensor it belongs to."""
        return self.start + _ROWS[self.layer][0]

    @property
    def layers(self) -> tuple[str, ...]:
        """The linear layers that this tensor holds of each expert."""
        return _ROWS[self.layer][1]

    @property
    def name(self) -> str:
        """Its own name."""
        return f"{self.start}{self.expert}.{self.layer}.weight"


def part_of(name: str) -> Part | None:
    """What a name in a checkpoint says of itself, None if it is not of one expert."""
    found = _PART.fullmatch(name)
    return Part(found[1], int(found[2]), found[3]) if found else None


def stacked_keys(shapes: Mapping[str, Sequence[int]]) -> set[str]:
    """The keys of stacked experts in the layout above. Of transposed ones, as in gpt-oss, the two shapes do not agree."""
    keys: set[str] = set()
    for key, shape in shapes.items():
        down = key.removesuffix(GATE_UP) + DOWN
        if re.fullmatch(rf"(?:.*\.)?{GATE_UP}", key) and len(shape) == 3 and down in shapes:
            experts, rows, hidden = shape
            if rows % 2 == 0 and tuple(shapes[down]) == (experts, hidden, rows // 2):
                keys |= {key, down}
    return keys


def old_block_names(keys: Collection[str], stacked: Collection[str]) -> dict[str, str]:
    """Name in a file -> key, for the keys of every ``mlp`` with stacked experts that files call otherwise."""
    return {_in_block(key, old): key for key in _block_keys(keys, stacked) for old in _OLD_BLOCKS}


def split(state: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """``state`` under the names that checkpoints of the model_type ``family`` have: views of the stacked tensors.

    Raises:
        ValueError: no such model_type in `FAMILIES`; no stacked experts in ``state``, or ones with biases, of another layout or
            under a name that no load would find; two tensors that would have one name.
    """
    if family not in FAMILIES:
        raise ValueError(f"expert_names={family!r} is none of {sorted(FAMILIES)}")
    names = FAMILIES[family]
    if not names.layers:
        return dict(state)
    stacked = stacked_keys({key: value.shape for key, value in state.items()})
    if not stacked:
        raise ValueError(
            f"expert_names={family!r}: there is no pair of {GATE_UP!r} [expert, 2 * ffn, hidden] and {DOWN!r} "
            "[expert, hidden, ffn] to take apart"
        )
    in_block = _block_keys(state, stacked)
    result: dict[str, Tensor] = {}
    origins: dict[str, str] = {}

    def add(name: str, key: str, value: Tensor) -> None:
        if name in result:
            raise ValueError(f"expert_names={family!r}: {origins[name]!r} and {key!r} would both be {name!r}")
        result[name], origins[name] = value, key

    for key, value in state.items():
        name = _in_block(key, names.block) if key in in_block else key
        if key not in stacked:
            if value.dim() == 3 and key.rpartition(".")[2] in (GATE_UP, DOWN):
                raise ValueError(
                    f"expert_names={family!r}: {key!r} of shape {tuple(value.shape)} is not of a pair of {GATE_UP!r} [expert, "
                    f"2 * ffn, hidden] and {DOWN!r} [expert, hidden, ffn], as others are"
                )
            add(name, key, value)
            continue
        if f"{key}_bias" in state:
            raise ValueError(f"expert_names={family!r}: {f'{key}_bias'!r} has no name in such checkpoints")
        start, dot, leaf = name.rpartition(".")
        start, layers = start + dot, names.layers[leaf]
        if part_of(Part(start, 0, layers[0]).name) is None:
            raise ValueError(f"expert_names={family!r}: {key!r} is not in a module called 'experts', where a load looks for it")
        for expert in range(len(value)):
            for layer, rows in zip(layers, value[expert].chunk(len(layers)), strict=True):
                add(Part(start, expert, layer).name, key, rows)
    return result


def _block_keys(keys: Collection[str], stacked: Collection[str]) -> set[str]:
    """The keys under the modules called ``mlp`` that hold experts."""
    ending = f"experts.{GATE_UP}"
    starts = tuple({key.removesuffix(ending) for key in stacked if re.fullmatch(rf"(.*\.)?{_BLOCK}\.{ending}", key)})
    return {key for key in keys if starts and key.startswith(starts)}


def _in_block(key: str, block: str) -> str:
    """``key`` with its last ``mlp`` called ``block``."""
    parts = key.split(".")
    parts[len(parts) - 1 - parts[::-1].index(_BLOCK)] = block
    return ".".join(parts)

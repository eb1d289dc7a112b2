"""Loads that cannot be right: named in full, and the target as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import clones, llama, on_meta, state
from torch import nn

from fusedblock.io import CheckpointError
from fusedblock.models.loading import load_safetensors, save_safetensors


def test_conversion_is_never_implicit(tmp_path: Path) -> None:
    save_safetensors(llama(0), tmp_path)
    target = llama(1, dtype=torch.bfloat16)
    before = state(target)
    name = r"'model\.embed_tokens\.weight'"
    with pytest.raises(CheckpointError, match=rf"s: {name} has dtype torch\.float32, the target torch\.bfloat16; dtype=torch\.b"):
        load_safetensors(target, tmp_path)
    with pytest.raises(CheckpointError, match=rf"{name} was to be loaded with dtype=torch\.float16.*has torch\.bfloat16"):
        load_safetensors(target, tmp_path, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"dtype=torch\.int8"):
        load_safetensors(target, tmp_path, dtype=torch.int8)
    assert state(target) == before


def test_integers_are_never_converted(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2, dtype=torch.int32)}, tmp_path / "i.safetensors")
    for device in ("cpu", "meta"):
        with pytest.raises(CheckpointError, match=r"'weight' has dtype torch\.int32, the target torch\.float32; only floating"):
            load_safetensors(nn.Linear(2, 2, bias=False, device=device), tmp_path / "i.safetensors", dtype=torch.float32)


@pytest.mark.parametrize("change", [lambda w: w + 1, lambda w: w[1:], lambda w: w.half()], ids=["values", "shape", "dtype"])
def test_tied_names_that_contradict_each_other(tmp_path: Path, change: Callable) -> None:
    model = llama(0, tied=True)
    tensors = clones(model)
    tensors["lm_head.weight"] = change(tensors["lm_head.weight"]).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    target = llama(1, tied=True)
    before = state(target)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*lm_head\.weight'"):
        load_safetensors(target, tmp_path)
    assert state(target) == before


def damage(kind: str, path: Path) -> str:
    """Spoil the checkpoint in one way; the expected message."""
    index = path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    key = "model.layers.1.mlp.up_proj.weight"
    file = path / weight_map[key]
    tensors = load_file(file)
    other = next(name for name in weight_map.values() if name != file.name)
    match kind:
        case "truncated":
            file.write_bytes(file.read_bytes()[:-1])
            return rf"{file.name}: truncated: '.*' ends at byte \d+, the file has \d+ bytes"
        case "header":
            file.write_bytes(file.read_bytes()[:8] + b"#" + file.read_bytes()[9:])
            return rf"{file.name}: its header is not JSON"
        case "shard":
            file.unlink()
            return rf"index\.json: '.*' is in shard '{file.name}', which does not exist"
        case "index":
            index.write_text(json.dumps({"weight_map": weight_map | {key: other}}))
            return rf"index\.json: .*'{key}'.*'{other}'"
        case "duplicate":
            save_file(load_file(path / other) | {key: tensors[key]}, path / other)
            return rf"duplicate key '{key}', in '{other}' and in '{file.name}'"
        case "shape":
            save_file(tensors | {key: torch.ones(32, 48)}, file)
            return rf"{file.name}: '{key}' has shape \(32, 48\), the target \(48, 32\)"
        case "dtype":
            save_file(tensors | {key: tensors[key].half()}, file)
            return rf"{file.name}: '{key}' has dtype torch\.float16, the target torch\.float32"
        case "missing":
            del tensors[key], weight_map[key]
            save_file(tensors, file)
            index.write_text(json.dumps({"weight_map": weight_map}))
            return rf"the checkpoint lacks '{key}'"
        case "extra":
            save_file(tensors | {"model.layers.9.extra": torch.ones(1)}, file)
            index.write_text(json.dumps({"weight_map": weight_map | {"model.layers.9.extra": file.name}}))
            return rf"{file.name}: unexpected key 'model\.layers\.9\.extra'"
    raise AssertionError(kind)


KINDS = ["truncated", "header", "shard", "index", "duplicate", "shape", "dtype", "missing", "extra"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("meta", [False, True])
def test_a_load_that_fails_changes_nothing(tmp_path: Path, kind: str, meta: bool) -> None:
    model = llama(0)
    save_safetensors(model, tmp_path, max_shard_size="20KB")
    message = damage(kind, tmp_path)
    target = on_meta(model) if meta else llama(1)
    if kind == "dtype" and meta:  # a target on meta takes the dtype of the file
        load_safetensors(target, tmp_path)
        assert {parameter.dtype for parameter in target.parameters()} == {torch.float16, torch.float32}
        return
    objects = {id(tensor) for tensor in (*target.parameters(), *target.buffers())}
    before = None if meta else state(target)
    with pytest.raises(CheckpointError, match=message):
        load_safetensors(target, tmp_path)
    assert {id(tensor) for tensor in (*target.parameters(), *target.buffers())} == objects
    assert meta or state(target) == before


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    save_file({"0.weight": torch.ones(3, 2), "0.bias": torch.ones(2).half(), "more": torch.ones(1)}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), tmp_path / "m.safetensors")
    lines = str(caught.value).splitlines()
    assert len(lines) == 5 and all("m.safetensors: " in line for line in lines)
    assert [part in line for part, line in zip(["0.weight", "0.bias", "1.weight", "1.bias", "more"], lines)] == [True] * 5


def test_a_prefix_is_never_guessed(tmp_path: Path) -> None:
    model, target = llama(0), llama(1)
    file = tmp_path / "m.safetensors"
    save_safetensors(model, file)
    before = state(target)
    with pytest.raises(CheckpointError, match=r"several prefixes: 'model\.layers\.0\.mlp\.', 'model\.layers\.1\.mlp\.', 'model"):
        load_safetensors(target.model.layers[0].mlp, file)
    tensors = load_file(file)
    save_file({key: value for key, value in tensors.items() if "layers.1.mlp.up" not in key}, file)
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_safetensors(target.model.layers[1], file, prefix="model.layers.1.")
    with pytest.raises(CheckpointError, match=r"target is layer 1.*only under 'model\.layers\.0\.', 'model\.layers\.2\.'"):
        load_safetensors(target.model.layers[1], file)
    save_file({key: value for key, value in tensors.items() if "mlp.up" not in key}, file)
    with pytest.raises(CheckpointError, match=r"no prefix has all.*'model\.layers\.0\.' comes nearest and lacks 'mlp\.up_proj"):
        load_safetensors(target.model.layers[0], file)
    save_file(tensors | {"model.layers.1.self_attn.q_norm.weight": torch.ones(8)}, file)
    with pytest.raises(CheckpointError, match=r"unexpected key 'model\.layers\.1\.self_attn\.q_norm\.weight'"):
        load_safetensors(target.model.layers[1], file)
    assert state(target) == before
    report = load_safetensors(target.model.layers[1], file, strict=False)
    assert report.unexpected == ("model.layers.1.self_attn.q_norm.weight",)


class Extra(nn.Linear):
    def get_extra_state(self) -> dict:
        return {"scale": 1}

    def set_extra_state(self, state: dict) -> None:
        pass


def test_targets_and_sources_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, file)
    with pytest.raises(TypeError, match="dtype='bf16' is a str, expected a torch.dtype"):
        load_safetensors(nn.Linear(2, 2), file, dtype="bf16")
    with pytest.raises(TypeError, match="'_extra_state' of the target is no tensor but dict"):
        load_safetensors(Extra(2, 2), file)
    with pytest.raises(TypeError, match="'_extra_state' is no tensor but dict"):
        save_safetensors(Extra(2, 2), tmp_path / "new.safetensors")
    with pytest.raises(ValueError, match="'weight' of shape .* is on the meta device"):
        save_safetensors(nn.Linear(2, 2, device="meta"), tmp_path / "new.safetensors")
    with pytest.raises(ValueError, match="device='meta', but 'weight' of the target is on 'cpu'"):
        load_safetensors(nn.Linear(2, 2), file, device="meta")
    with torch.inference_mode():
        target = nn.Linear(2, 2)
        fresh = nn.Linear(2, 2, device="meta")
        load_safetensors(fresh, file)
    assert torch.equal(fresh.weight, torch.ones(2, 2)) and not fresh.weight.is_inference()
    with pytest.raises(ValueError, match="'weight' of the target was made in torch.inference_mode"):
        load_safetensors(target, file)
    assert not (tmp_path / "new.safetensors").exists()
    with pytest.raises(FileNotFoundError, match="absent"):
        load_safetensors(fresh, tmp_path / "absent")

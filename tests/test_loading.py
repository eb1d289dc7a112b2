"""Weights of modules to and from safetensors, bit for bit. References: save_pretrained, from_pretrained, safetensors itself."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, bits, clones, file_bits, llama, on_meta, state, tokens
from torch import nn
from transformers import DeepseekV3ForCausalLM, LlamaForCausalLM, PreTrainedModel

from fusedblock.io import CheckpointError
from fusedblock.models.loading import load_safetensors, save_safetensors


def save_both(model: PreTrainedModel, path: Path, **options) -> Path:
    save_safetensors(model, path, **options)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    return path


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("limit", ["5GB", "20KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_we_read_save_pretrained(tmp_path: Path, tied: bool, limit: str, dtype: torch.dtype) -> None:
    model = llama(0, tied, dtype)
    model.save_pretrained(tmp_path, max_shard_size=limit)
    assert (tmp_path / "model.safetensors.index.json").exists() == (limit == "20KB")
    target = llama(1, tied, dtype)
    objects = dict(target.named_parameters())
    assert state(target) != state(model)
    report = load_safetensors(target, tmp_path)
    assert state(target) == state(model)
    assert dict(target.named_parameters()).keys() == objects.keys()
    assert all(parameter is objects[key] for key, parameter in target.named_parameters()), "filled in place"
    assert set(report.loaded) == set(target.state_dict()) and (report.missing, report.unexpected) == ((), ())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("limit", ["5GB", "20KB", 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_pretrained_reads_ours(tmp_path: Path, tied: bool, limit: int | str, dtype: torch.dtype) -> None:
    model = llama(0, tied, dtype)
    save_both(model, tmp_path, max_shard_size=limit)
    loaded, info = LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    assert state(loaded) == state(model)
    model.save_pretrained(tmp_path / "reference", max_shard_size=limit)
    assert file_bits(tmp_path) == file_bits(tmp_path / "reference")
    if limit != "5GB":
        ours, theirs = (
            json.loads((path / "model.safetensors.index.json").read_text()) for path in (tmp_path, tmp_path / "reference")
        )
        assert ours["weight_map"] == theirs["weight_map"]
        assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_on_meta_generates_the_same_tokens(tmp_path: Path, tied: bool) -> None:
    model = llama(0, tied, rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                                            "high_freq_factor": 4.0, "original_max_position_embeddings": 32})  # fmt: skip
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    target = on_meta(model)
    target.model.norm.weight.requires_grad_(False)
    report = load_safetensors(target, tmp_path)
    assert state(target) == state(model)
    assert set(report.loaded) == set(model.state_dict()) and report.missing == report.unexpected == ()
    assert (target.lm_head.weight is target.model.embed_tokens.weight) == tied
    frozen = {key for key, parameter in target.named_parameters() if not parameter.requires_grad}
    assert frozen == {"model.norm.weight"}
    assert all(type(parameter) is nn.Parameter for parameter in target.parameters())
    assert all(parameter.data_ptr() % 16 == 0 for parameter in target.parameters())
    assert torch.equal(tokens(target), tokens(model))


def test_a_loaded_model_does_not_depend_on_the_files(tmp_path: Path) -> None:
    model = llama()
    save_safetensors(model, tmp_path)
    target = on_meta(model)
    load_safetensors(target, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert state(target) == state(model)


def test_random_state_is_left_alone(tmp_path: Path) -> None:
    model = llama()
    save_safetensors(model, tmp_path)
    target = on_meta(model)
    before = torch.get_rng_state()
    load_safetensors(target, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_under_their_original_names(tmp_path: Path, family: str) -> None:
    """Merged experts, several RoPE tables, buffers with weights: into a model on meta and one with storage, and back."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    for target in (on_meta(model), FAMILIES[family]().eval()):
        load_safetensors(target, tmp_path / "theirs")
        assert state(target) == state(model)
        assert torch.equal(tokens(target), tokens(model))
    save_both(target, tmp_path / "ours", max_shard_size="20KB")
    assert file_bits(tmp_path / "ours") == file_bits(tmp_path / "theirs")
    loaded, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()) and state(loaded) == state(model)


def test_one_layer_of_merged_experts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = FAMILIES["mixtral"](), FAMILIES["mixtral"]()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    load_safetensors(other.model.layers[1], tmp_path)
    assert state(other.model.layers[1]) == state(model.model.layers[1]) != state(other.model.layers[0])
    save_safetensors(other.model.layers[1], tmp_path / "layer.safetensors")
    third = FAMILIES["mixtral"]()
    load_safetensors(third.model.layers[2], tmp_path / "layer.safetensors")
    assert state(third.model.layers[2]) == state(model.model.layers[1])


def test_conversion(tmp_path: Path) -> None:
    model = llama(0)
    save_safetensors(model, tmp_path)
    expected = copy.deepcopy(model).to(torch.bfloat16)
    for target in (on_meta(model), llama(1, dtype=torch.bfloat16)):
        load_safetensors(target, tmp_path, dtype=torch.bfloat16)
        parameters = {key: bits(parameter) for key, parameter in target.named_parameters()}
        assert parameters == {key: bits(parameter) for key, parameter in expected.named_parameters()}
    target = llama(1)
    save_safetensors(expected, tmp_path)
    load_safetensors(target, tmp_path, dtype=torch.float32)
    parameters = {key: bits(parameter) for key, parameter in target.named_parameters()}
    assert parameters == {key: bits(parameter.float()) for key, parameter in expected.named_parameters()}


def test_modules_kept_in_float32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = FAMILIES["deepseek_v3"]()
    model.save_pretrained(tmp_path)
    reference = DeepseekV3ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    target = on_meta(model)
    load_safetensors(target, tmp_path, dtype=torch.bfloat16)
    assert state(target) == state(reference)
    assert {tensor.dtype for tensor in target.state_dict().values()} == {torch.bfloat16, torch.float32}
    again = copy.deepcopy(reference)
    load_safetensors(again, tmp_path, dtype=torch.bfloat16)
    assert state(again) == state(reference)


class Everything(nn.Module):
    """One tensor of each kind."""

    def __init__(self, fill: int) -> None:
        super().__init__()
        dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
        for dtype in dtypes:
            self.register_parameter(f"of_{str(dtype)[6:]}", nn.Parameter(torch.full((2, 16), float(fill)).to(dtype)))
        self.codes = nn.Parameter(torch.full((4,), fill, dtype=torch.int8), requires_grad=False)
        self.register_buffer("steps", torch.tensor(fill))
        self.register_buffer("mask", torch.full((3,), bool(fill % 2)))
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("none", None)


@pytest.mark.parametrize("meta", [False, True])
def test_every_kind_of_tensor(tmp_path: Path, meta: bool) -> None:
    source = Everything(3)
    save_safetensors(source, tmp_path / "all.safetensors")
    with torch.device("meta" if meta else "cpu"):
        target = Everything(2)
    load_safetensors(target, tmp_path / "all.safetensors")
    assert state(target) == state(source)
    with torch.device("meta" if meta else "cpu"):
        target = Everything(2).to(torch.float32)
    load_safetensors(target, tmp_path / "all.safetensors", dtype=torch.float32)
    assert state(target) == state(copy.deepcopy(source).to(torch.float32))
    assert target.codes.dtype == torch.int8 and target.steps.dtype == torch.int64


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("names", [(EMBED,), (HEAD,), (EMBED, HEAD)])
@pytest.mark.parametrize("meta", [False, True])
def test_tied_weights_from_any_of_their_names(tmp_path: Path, names: tuple[str, ...], meta: bool) -> None:
    model = llama(0, tied=True)
    tensors = {key: value.clone() for key, value in model.state_dict().items() if "embed" not in key and "lm_head" not in key}
    save_file(tensors | {name: model.lm_head.weight.detach().clone() for name in names}, tmp_path / "model.safetensors")
    target = on_meta(model) if meta else llama(1, tied=True)
    load_safetensors(target, tmp_path)
    assert target.lm_head.weight is target.model.embed_tokens.weight
    assert state(target) == state(model)


def test_parameters_that_share_memory_count_as_tied(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight.data = module[0].weight.data
    save_safetensors(module, tmp_path / "m.safetensors")
    assert set(load_file(tmp_path / "m.safetensors")) == {"0.weight", "0.bias", "1.bias"}
    target = copy.deepcopy(module)
    target.apply(lambda m: [nn.init.zeros_(p) for p in m.parameters(recurse=False)])
    target[1].weight.data = target[0].weight.data
    load_safetensors(target, tmp_path / "m.safetensors")
    assert state(target) == state(module)


def test_not_strict(tmp_path: Path) -> None:
    model = llama(0)
    tensors = clones(model)
    del tensors["model.norm.weight"]
    save_file(tensors | {"extra": torch.ones(1)}, tmp_path / "model.safetensors")
    target = llama(1)
    nn.init.constant_(target.model.norm.weight, 7)
    report = load_safetensors(target, tmp_path, strict=False)
    assert report.missing == ("model.norm.weight",) and report.unexpected == ("extra",)
    assert set(report.loaded) == set(model.state_dict()) - {"model.norm.weight"}
    assert torch.equal(target.model.norm.weight, torch.full((32,), 7.0))
    target.model.norm.weight.data.copy_(model.model.norm.weight)
    assert state(target) == state(model)
    target = on_meta(model)
    load_safetensors(target, tmp_path, strict=False)
    assert [key for key, value in target.state_dict().items() if value.is_meta] == ["model.norm.weight"]
    save_file(tensors | {"lm_head.weight": torch.ones(3, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' has shape \(3, 3\), the target \(64, 32\)"):
        load_safetensors(target, tmp_path, strict=False)


def test_rope_frequencies_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    model, extra = llama(0), "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(clones(model) | {extra: torch.ones(4)}, tmp_path / "model.safetensors")
    target = llama(1)
    assert load_safetensors(target, tmp_path).unexpected == (extra,)
    assert state(target) == state(model)


@pytest.mark.parametrize("meta", [False, True])
def test_one_layer(tmp_path: Path, meta: bool) -> None:
    model, target = llama(0), llama(1)
    save_safetensors(model, tmp_path, max_shard_size="20KB")
    if meta:
        target.model.layers[2] = on_meta(model).model.layers[2]
    report = load_safetensors(target.model.layers[2], tmp_path)
    assert state(target.model.layers[2]) == state(model.model.layers[2])
    assert state(target.model.layers[0]) != state(model.model.layers[0])
    assert set(report.loaded) == set(target.model.layers[2].state_dict()) and report.unexpected == ()
    load_safetensors(target.model.layers[0].mlp, tmp_path, prefix="model.layers.1.mlp")
    assert state(target.model.layers[0].mlp) == state(model.model.layers[1].mlp)
    load_safetensors(target.model.layers[0].self_attn, tmp_path)
    assert state(target.model.layers[0].self_attn) == state(model.model.layers[0].self_attn)
    load_safetensors(target.model, tmp_path)  # the only prefix that has all of it is "model."
    assert state(target.model) == state(model.model) and state(target.lm_head) != state(model.lm_head)


def test_any_module(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 3), nn.BatchNorm1d(3))

    source, target = build(), build()
    source[3].running_mean.fill_(2), source[3].num_batches_tracked.fill_(5)
    save_safetensors(source, tmp_path, max_shard_size=200)
    load_safetensors(target, tmp_path)
    assert state(target) == state(source)
    with torch.device("meta"):
        target = build()
    load_safetensors(target, tmp_path / "model.safetensors.index.json", device="cpu")
    assert state(target) == state(source)
    load_safetensors(torch.compile(target), tmp_path)  # compiled lazily: the wrapper's own names do not count
    save_safetensors(torch.compile(target), tmp_path / "compiled.safetensors")
    assert set(load_file(tmp_path / "compiled.safetensors")) == set(source.state_dict())


def test_a_mapping_is_saved_as_it_is(tmp_path: Path) -> None:
    model = llama(0, tied=True)
    save_safetensors(model.state_dict(), tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(model.state_dict())
    target = llama(1, tied=True)
    load_safetensors(target, tmp_path)
    assert state(target) == state(model)


def test_an_optimizer_goes_on(tmp_path: Path) -> None:
    target = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(target.parameters(), lr=1.0)
    save_safetensors({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, tmp_path / "m.safetensors")
    version = target.weight._version
    load_safetensors(target, tmp_path / "m.safetensors")
    assert target.weight._version > version, "autograd sees the change"
    target(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(target.weight, torch.zeros(2, 3)) and torch.equal(target.bias, -torch.ones(2))


class Tables(nn.Module):
    def __init__(self, resets: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        if resets:
            self.reset_parameters = lambda: None  # does nothing: the buffer must be named all the same


class ResetTables(Tables):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        self.table.copy_(torch.arange(4.0))


def test_buffers_that_no_checkpoint_holds(tmp_path: Path) -> None:
    save_file({"0.weight": torch.full((3,), 5.0)}, tmp_path / "m.safetensors")
    with torch.device("meta"):
        good, bad, idle = nn.Sequential(ResetTables(False)), nn.Sequential(Tables(False)), nn.Sequential(Tables(True))
        load_safetensors(good, tmp_path / "m.safetensors")  # the surrounding default device does not matter
    assert torch.equal(good[0].table, torch.arange(4.0)) and torch.equal(good[0].weight, torch.full((3,), 5.0))
    for target in (bad, idle):
        with pytest.raises(ValueError, match=r"buffer '0\.table' is on meta"):
            load_safetensors(target, tmp_path / "m.safetensors")
        assert target[0].weight.is_meta and target[0].table.is_meta
    half = nn.Sequential(ResetTables(False))
    half[0].table = half[0].table.to("meta")
    half[0].weight.data.fill_(3)
    save_file({"other": torch.ones(1)}, tmp_path / "m.safetensors")
    load_safetensors(half, tmp_path / "m.safetensors", strict=False)
    assert torch.equal(half[0].table, torch.arange(4.0))
    assert torch.equal(half[0].weight, torch.full((3,), 3.0)), "setting the buffer does not reset the weights"


def test_loading_imports_no_transformers() -> None:
    import subprocess

    import fusedblock

    root = Path(fusedblock.__file__).parents[1]
    code = f"""
import sys; sys.path.insert(0, {str(root)!r}); sys.modules["transformers"] = None
import torch
from fusedblock.models.loading import load_safetensors, save_safetensors
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

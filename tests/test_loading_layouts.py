"""Checkpoints as the hub has them: names that transformers changed since, buffers no layer has now, a prefix less or too much.

References: the layer of the model that was saved, and from_pretrained.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import families
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_house import BLOCK, run_python
from tiny_models import clones, llama, on_meta, state
from torch import Tensor, nn
from transformers import (
    BertForMaskedLM,
    BertForPreTraining,
    BertModel,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaForCausalLM,
    PreTrainedModel,
    ViTForImageClassification,
    conversion_mapping,
)

from fusedblock import BlockConfig, FusedBlock
from fusedblock.io import CheckpointError
from fusedblock.models.loading import LoadReport, load_safetensors, save_safetensors
from fusedblock.models.table import known_class

LOAD_ALL = BLOCK + """
import pathlib, sys
from safetensors.torch import save_file
from fusedblock import BlockConfig, FusedBlock, load_safetensors, save_safetensors
for path in sorted(pathlib.Path({path!r}).iterdir()):
    block = FusedBlock(BlockConfig.from_pretrained(path, layer_idx=1), device="meta")
    report = load_safetensors(block, path)
    assert report.missing == report.unexpected == (), report
    save_file(block.state_dict(), path / "block.safetensors")
    save_safetensors(block, path / "saved.safetensors")
    again = FusedBlock(block.config, device="meta")
    load_safetensors(again, path / "saved.safetensors")
    save_file(again.state_dict(), path / "again.safetensors")
assert sys.modules.get("transformers") is None
"""


def layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if known_class(type(module))]


def test_a_block_reads_what_transformers_writes_of_every_family_without_it(tmp_path: Path) -> None:
    wanted = {}
    for name in families.ALL:
        model = families.build(name)
        model.save_pretrained(tmp_path / name)
        wanted[name] = layers(model)[1].state_dict()
    run_python(LOAD_ALL.format(names={"transformers"}, path=str(tmp_path)))
    for name, want in wanted.items():
        for file in ("block", "again"):
            got = load_file(tmp_path / name / f"{file}.safetensors")
            assert got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in want), (name, file)
        saved = load_file(tmp_path / name / "saved.safetensors")
        theirs = load_file(tmp_path / name / "model.safetensors")
        place = re.compile(r"\D*\.1\.")  # no expert's number
        second = {place.sub("", key, count=1): value for key, value in theirs.items() if place.match(key)}
        assert saved.keys() == second.keys() and all(torch.equal(saved[key], second[key]) for key in second), name


def test_the_rules_of_transformers_are_not_asked_for_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build("vit")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    names = {file: load_file(file).keys() for file in tmp_path.glob("model-*.safetensors")}
    for file in (file for file, held in names.items() if not any(".layer.1." in name for name in held)):
        file.unlink()  # a shard that is not needed is not opened under the old names either

    def never(*args: object) -> None:
        raise AssertionError("transformers' rules were asked")

    monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", never)
    block = FusedBlock(BlockConfig.from_pretrained(tmp_path, layer_idx=1), device="meta")
    load_safetensors(block, tmp_path)
    assert state(block) == state(layers(model)[1])


@pytest.mark.parametrize("prefix", ["", "vit."])
def test_a_layer_of_vit_and_the_whole_of_it(tmp_path: Path, prefix: str) -> None:
    torch.manual_seed(0)
    model = families.build("vit") if not prefix else ViTForImageClassification(families.config("vit")).eval()
    model.save_pretrained(tmp_path)
    assert f"{prefix}encoder.layer.1.attention.attention.query.weight" in load_file(tmp_path / "model.safetensors")
    target = families.build("vit", seed=1)
    load_safetensors(layers(target)[1], tmp_path, prefix=f"{prefix}encoder.layer.1")
    assert state(layers(target)[1]) == state(layers(model)[1]) != state(layers(target)[0])
    whole = ViTForImageClassification(families.config("vit"))
    report = load_safetensors(whole, tmp_path, strict=bool(prefix))
    assert report.missing == (() if prefix else ("classifier.weight", "classifier.bias")), report
    reference = ViTForImageClassification.from_pretrained(tmp_path)
    assert {k: v for k, v in state(whole).items() if "vit." in k} == {k: v for k, v in state(reference).items() if "vit." in k}


def gpt2_of_the_hub(path: Path) -> PreTrainedModel:
    model = families.build("gpt2")
    tensors = {key.removeprefix("transformer."): value for key, value in clones(model).items() if "lm_head" not in key}
    for i in range(2):
        tensors[f"h.{i}.attn.bias"] = torch.ones(128, 128).tril()[None, None]
        tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    model.config.save_pretrained(path)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return model


def test_gpt2_without_its_prefix_and_with_its_masks(tmp_path: Path) -> None:
    model = gpt2_of_the_hub(tmp_path)
    block = FusedBlock(BlockConfig.from_pretrained(tmp_path, layer_idx=1), device="meta")
    report = load_safetensors(block, tmp_path)
    assert state(block) == state(model.transformer.h[1])
    assert set(report.unexpected) == {"h.1.attn.bias", "h.1.attn.masked_bias"}
    reference = GPT2LMHeadModel.from_pretrained(tmp_path)
    for target in (GPT2LMHeadModel(model.config), on_meta(model)):
        load_safetensors(target, tmp_path)
        assert state(target) == state(model) == state(reference)
        assert target.lm_head.weight is target.transformer.wte.weight
    base = GPT2Model(model.config)
    load_safetensors(base, tmp_path)
    assert state(base) == state(model.transformer)
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks 'transformer\.ln_f\.bias'$"):
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["ln_f.bias"]
        save_file(tensors, tmp_path / "less.safetensors")
        load_safetensors(target, tmp_path / "less.safetensors")


def test_masks_of_gpt_neox(tmp_path: Path) -> None:
    model = families.build("gpt_neox")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("bias", "masked_bias", "rotary_emb.inv_freq"):
        tensors[f"gpt_neox.layers.1.attention.{name}"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    block = FusedBlock(BlockConfig.from_pretrained(tmp_path, layer_idx=1), device="meta")
    assert len(load_safetensors(block, tmp_path).unexpected) == 3
    want = layers(model)[1].state_dict()
    assert all(torch.equal(value, want[key]) for key, value in block.state_dict().items()) and want
    tensors["gpt_neox.layers.1.attention.rank_bias"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"^[^\n]*unexpected key 'gpt_neox\.layers\.1\.attention\.rank_bias'[^\n]*$"):
        load_safetensors(block, tmp_path)


def bert_of_the_hub(path: Path, keep: Callable[[str], bool] = lambda name: True) -> BertForPreTraining:
    torch.manual_seed(0)
    model = BertForPreTraining(families.config("bert")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    tensors: dict[str, Tensor] = {"bert.embeddings.position_ids": torch.arange(128)[None]}
    for key, value in clones(model).items():
        key = key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        if keep(key) and not key.startswith("cls.predictions.decoder"):
            tensors[key] = value
    model.config.save_pretrained(path)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return model


def test_bert_with_gamma_and_beta(tmp_path: Path) -> None:
    model = bert_of_the_hub(tmp_path)
    block = FusedBlock(BlockConfig.from_pretrained(tmp_path, layer_idx=1), device="meta")
    assert load_safetensors(block, tmp_path).unexpected == ()
    assert state(block) == state(model.bert.encoder.layer[1])
    layer = BertModel(model.config).encoder.layer[0]
    load_safetensors(layer, tmp_path, prefix="bert.encoder.layer.1")
    assert state(layer) == state(block)
    for target, source in ((BertModel(model.config), model.bert), (BertForPreTraining(model.config), model)):
        load_safetensors(target, tmp_path)
        assert state(target) == state(source) == state(type(target).from_pretrained(tmp_path))
    masked = BertForMaskedLM(model.config)
    with pytest.raises(CheckpointError, match=r"unexpected key 'cls\.seq_relationship\.weight'"):
        load_safetensors(masked, tmp_path)
    report = load_safetensors(masked, tmp_path, strict=False)
    assert report.missing == () and "cls.seq_relationship.bias" in report.unexpected
    assert state(masked) == state(BertForMaskedLM.from_pretrained(tmp_path))


def test_bert_without_a_pooler_or_without_its_prefix(tmp_path: Path) -> None:
    model = bert_of_the_hub(tmp_path, lambda name: "pooler" not in name)
    target = BertModel(model.config)
    before = state(target)
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(target, tmp_path)
    lines = str(caught.value).splitlines()
    assert [line.partition(": ")[2] for line in lines] == [
        "the checkpoint lacks 'bert.pooler.dense.weight'", "the checkpoint lacks 'bert.pooler.dense.bias'"
    ]  # fmt: skip
    assert state(target) == before
    report = load_safetensors(target, tmp_path, strict=False)
    assert report.missing == ("pooler.dense.weight", "pooler.dense.bias")
    assert state(target.encoder) == state(model.bert.encoder) and state(target.embeddings) == state(model.bert.embeddings)
    bare = BertModel(model.config, add_pooling_layer=False)
    load_safetensors(bare, tmp_path)
    assert state(bare.encoder) == state(model.bert.encoder)

    tensors = {k.removeprefix("bert."): v for k, v in load_file(tmp_path / "model.safetensors").items() if k[:4] == "bert"}
    save_file(tensors, tmp_path / "base.safetensors")
    masked = BertForMaskedLM(model.config)
    report = load_safetensors(masked, tmp_path / "base.safetensors", strict=False)
    assert state(masked.bert) == state(bare) and all(key.startswith("cls.") for key in report.missing)
    with pytest.raises(CheckpointError, match="the checkpoint lacks 'cls.predictions.bias'"):
        load_safetensors(masked, tmp_path / "base.safetensors")


def test_two_names_of_one_norm_are_refused(tmp_path: Path) -> None:
    model = bert_of_the_hub(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "bert.encoder.layer.1.output.LayerNorm"
    save_file(tensors | {f"{name}.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"'{name}\.(gamma|weight)' and '{name}\.(gamma|weight)' are both "):
        load_safetensors(BertForPreTraining(model.config), tmp_path)


class Lenient(LlamaForCausalLM):
    _keys_to_ignore_on_load_missing = [r"model\.norm\."]
    _keys_to_ignore_on_load_unexpected = [r"^extra\."]


def test_what_a_model_says_of_its_own_keys(tmp_path: Path) -> None:
    model = llama(0)
    tensors = clones(model)
    del tensors["model.norm.weight"]
    save_file(tensors | {"extra.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    target = Lenient(model.config)
    nn.init.constant_(target.model.norm.weight, 7.0)
    report = load_safetensors(target, tmp_path)
    assert report.missing == ("model.norm.weight",) and report.unexpected == ("extra.weight",)
    assert torch.equal(target.model.norm.weight, torch.full((32,), 7.0))
    assert state(target.model.layers) == state(model.model.layers)
    with torch.device("meta"):
        empty = Lenient(model.config)
    with pytest.raises(CheckpointError, match=r"^[^\n]*the checkpoint lacks 'model\.norm\.weight'$"):
        load_safetensors(empty, tmp_path)


def test_the_nearest_prefix_is_of_the_layer_that_is_asked_for(tmp_path: Path) -> None:
    model = llama(0)
    tensors = {key: value for key, value in clones(model).items() if "mlp.up" not in key}
    save_file({key: value for key, value in tensors.items() if "layers.2.mlp" not in key}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no prefix has all.*; 'model\.layers\.2\.' comes nearest and lacks 'mlp\.g"):
        load_safetensors(model.model.layers[2], tmp_path)
    save_file({key: value for key, value in tensors.items() if "layers.2." not in key}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"the target is layer 2, and no .* that layer: 'model\.layers\.0\.', 'model\.lay"):
        load_safetensors(model.model.layers[2], tmp_path)


def test_a_prefix_that_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    def part() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))

    source = part()
    save_safetensors(source, tmp_path / "m.safetensors")
    target = nn.ModuleDict({"body": nn.ModuleDict({"inner": part()}), "head": nn.Linear(2, 2, bias=False)})
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"m\.safetensors: the checkpoint's keys lack the prefix 'body\.inner\.' that"):
            load_safetensors(target, tmp_path / "m.safetensors", strict=strict)
    load_safetensors(target["body"]["inner"], tmp_path / "m.safetensors")
    assert state(target["body"]["inner"]) == state(source)


def test_a_report_as_a_string_is_short() -> None:
    report = LoadReport(tuple(f"layers.{i}.weight" for i in range(300)), ("norm.weight",), ("a.bias", "b.bias"))
    assert str(report) == "300 loaded, 1 missing, 2 unexpected\nmissing: 'norm.weight'\nunexpected: 'a.bias', 'b.bias'"
    assert str(LoadReport(("x",), (), ())) == "1 loaded, 0 missing, 0 unexpected"
    assert str(LoadReport((), tuple("abcdefghijklmnopqrstuvw"), ())).endswith("'t' and 3 more")

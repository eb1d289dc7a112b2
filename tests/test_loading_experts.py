"""Checkpoints with one matrix per expert, and modules that stack them: names, bits, and what cannot be right.

References: the files that save_pretrained writes, the state dict of the model that was saved, and from_pretrained.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_house import BLOCK, run_python
from tiny_models import DEEPSEEK, SIZES, bits, file_bits, on_meta, state
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

from fusedblock.io import Checkpoint, CheckpointError
from fusedblock.models import expert_names
from fusedblock.models.loading import load_safetensors, save_safetensors
from fusedblock.models.sources import overlaps

MOE = {**SIZES, "moe_intermediate_size": 16}
WORDS: dict[str, dict] = {
    "mixtral": {**SIZES, "num_local_experts": 12},
    "qwen2_moe": {**MOE, "num_experts": 12, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
    "qwen3_moe": {**MOE, "num_experts": 12, "decoder_sparse_step": 2},
    "olmoe": {**SIZES, "num_experts": 12},
    "glm4_moe": {**MOE, "n_routed_experts": 12, "first_k_dense_replace": 1, "num_experts_per_tok": 2, "head_dim": 8},
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# One file, or shards so small that an expert's matrices lie in several.
LIMITS = {"single": "5GB", "sharded": "8KB"}
LAYER = "model.layers.1."


def build(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **WORDS[family]), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # some start as zeros or ones
            parameter.copy_(torch.randn(parameter.shape))
        for module in model.modules():  # stays float32, as in from_pretrained
            if "e_score_correction_bias" in module._buffers:
                module.e_score_correction_bias = torch.randn(module.e_score_correction_bias.shape)
    return model


def plain(tensors: dict[str, Tensor], device: str = "meta") -> nn.Module:
    """A module of nothing but parameters, with these keys in its state dict."""
    root = nn.Module()
    for key, tensor in tensors.items():
        *path, leaf = key.split(".")
        module = root
        for name in path:
            if name not in module._modules:
                module.add_module(name, nn.Module())
            module = module.get_submodule(name)
        module.register_parameter(leaf, nn.Parameter(torch.zeros_like(tensor, device=device), requires_grad=False))
    return root


def of_layer(tensors: dict[str, Tensor], prefix: str = LAYER) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(bits(left[key]) == bits(right[key]) for key in left)


WITHOUT = (
    BLOCK
    + """
import pathlib
from safetensors.torch import load_file, save_file
import torch
from torch import nn
from fusedblock import load_safetensors, save_safetensors
{plain}
for path in sorted(pathlib.Path({path!r}).iterdir()):
    family, _, limit = path.name.split("-")
    names = load_file(path / "running" / "names.safetensors")
    for device in ("meta", "cpu"):
        module = plain(names, device)
        report = load_safetensors(module, path / "theirs")
        assert report.missing == report.unexpected == () and set(report.loaded) == set(names), report
    save_file(module.state_dict(), path / "running" / "loaded.safetensors")
    save_safetensors(module, path / "ours", max_shard_size={limits!r}[limit], expert_names=family)
    save_safetensors(dict(module.state_dict()), path / "mapping", expert_names=family)
    save_safetensors(module, path / "stacked")
assert sys.modules.get("transformers") is None
"""
)


def test_a_plain_module_reads_and_writes_every_family_without_transformers(tmp_path: Path) -> None:
    models = {}
    for family in WORDS:
        for dtype, limit in (("fp32", "single"), ("bf16", "sharded")):
            path = tmp_path / f"{family}-{dtype}-{limit}"
            models[path] = model = build(family, DTYPES[dtype])
            model.save_pretrained(path / "theirs", max_shard_size=LIMITS[limit])
            assert (len(list((path / "theirs").glob("*.safetensors"))) > 1) == (limit == "sharded")
            (path / "running").mkdir()
            tensors = {key: torch.empty_like(value) for key, value in model.state_dict().items()}
            save_file(tensors, path / "running" / "names.safetensors")
    source = f"Tensor = torch.Tensor\n{inspect.getsource(plain)}"
    run_python(WITHOUT.format(names={"transformers"}, path=str(tmp_path), plain=source, limits=LIMITS))
    for path, model in models.items():
        assert same(load_file(path / "running" / "loaded.safetensors"), dict(model.state_dict())), path.name
        theirs = file_bits(path / "theirs")
        assert file_bits(path / "ours") == file_bits(path / "mapping") == theirs, path.name
        per_expert = any(re.search(r"\.experts\.\d+\.", name) for name in theirs)
        assert per_expert == ("gpt_oss" not in path.name) == (file_bits(path / "stacked") != theirs), path.name
        for files in ("ours", "stacked"):
            model.config.save_pretrained(path / files)
            dtype = next(model.parameters()).dtype
            loaded, info = type(model).from_pretrained(path / files, output_loading_info=True, dtype=dtype)
            assert not any(info.values()) and state(loaded) == state(model), (path.name, files)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", WORDS)
def test_a_model_of_transformers_and_back(tmp_path: Path, family: str, dtype: str, limit: str) -> None:
    model = build(family, DTYPES[dtype])
    model.save_pretrained(tmp_path / "theirs", max_shard_size=LIMITS[limit])
    for target in (on_meta(model), build(family, DTYPES[dtype])):
        if target.device.type == "cpu":
            for parameter in target.parameters():
                parameter.data.zero_()
        load_safetensors(target, tmp_path / "theirs")
        assert state(target) == state(model)
    save_safetensors(target, tmp_path / "ours", max_shard_size=LIMITS[limit])
    model.config.save_pretrained(tmp_path / "ours")
    assert file_bits(tmp_path / "ours") == file_bits(tmp_path / "theirs")
    loaded, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True, dtype=DTYPES[dtype])
    assert not any(info.values()) and state(loaded) == state(model)


@pytest.mark.parametrize("family", [family for family in expert_names.FAMILIES if family != "gpt_oss"])
def test_the_names_are_those_of_transformers(family: str) -> None:
    """For every family in the table, in the rules by which transformers merges and renames."""
    rules = get_checkpoint_conversion_mapping(family)
    names = expert_names.FAMILIES[family]
    merges = {
        rule.target_patterns[0].rpartition(".")[2]: tuple(pattern.split(".")[-2] for pattern in rule.source_patterns)
        for rule in rules
        if isinstance(rule, WeightConverter)
    }
    assert merges == names.layers
    renamed = {rule.source_patterns[0].strip(".") for rule in rules if isinstance(rule, WeightRenaming)}
    assert renamed == ({names.block} - {"mlp"})


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("part", ["", "mlp.", "mlp.experts."])
def test_a_layer_its_mixture_and_its_experts_alone(tmp_path: Path, family: str, part: str) -> None:
    model = build(family)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    block = expert_names.FAMILIES[family].block
    prefix = LAYER + part.replace("mlp", block)
    want = of_layer(model.state_dict(), LAYER + part)
    target = plain(want)
    load_safetensors(target, tmp_path, prefix=prefix)
    assert same(dict(target.state_dict()), want)
    theirs = build(family).get_submodule((LAYER + part).removesuffix("."))
    for parameter in theirs.parameters():
        parameter.data.zero_()
    load_safetensors(theirs, tmp_path, prefix=LAYER + part)
    assert same(dict(theirs.state_dict()), want)

    save_safetensors(target, tmp_path / "part.safetensors", expert_names=family)
    whole = {key: value for file in tmp_path.glob("model-*.safetensors") for key, value in load_file(file).items()}
    assert same(load_file(tmp_path / "part.safetensors"), of_layer(whole, prefix))
    save_safetensors(theirs, tmp_path / "theirs.safetensors", expert_names=family)
    assert same(load_file(tmp_path / "theirs.safetensors"), of_layer(whole, prefix))
    for again in (plain(want, "cpu"), theirs):
        for parameter in again.parameters():
            parameter.data.zero_()
        load_safetensors(again, tmp_path / "part.safetensors")
        assert same(dict(again.state_dict()), want)


def test_the_prefix_is_found_and_only_what_is_needed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3_moe")  # only layer 1 has experts
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    names = {file: load_file(file).keys() for file in tmp_path.glob("model-*.safetensors")}
    needless = [file for file, held in names.items() if not any(name.startswith(LAYER) for name in held)]
    for file in needless:
        file.unlink()
    assert needless and len(needless) < len(names)
    read: list[str] = []
    tensor = Checkpoint.tensor
    monkeypatch.setattr(Checkpoint, "tensor", lambda self, key: read.append(key) or tensor(self, key))
    want = of_layer(model.state_dict())
    target = plain(want)
    load_safetensors(target, tmp_path)
    assert same(dict(target.state_dict()), want)
    assert sorted(read) == sorted(name for held in names.values() for name in held if name.startswith(LAYER))

    read.clear()
    router = plain({"gate.weight": want["mlp.gate.weight"]})
    load_safetensors(router, tmp_path, prefix=f"{LAYER}mlp", strict=False)
    assert read == [f"{LAYER}mlp.gate.weight"] and same(dict(router.state_dict()), {"gate.weight": want["mlp.gate.weight"]})


def test_conversion_and_gradients(tmp_path: Path) -> None:
    """Into a tensor of another dtype when asked, in place, without a trace in autograd."""
    model = build("mixtral")
    save_safetensors(model, tmp_path)
    want = of_layer(model.state_dict())
    target = plain({key: value.bfloat16() for key, value in want.items()}, "cpu").requires_grad_()
    before = dict(target.named_parameters())
    with pytest.raises(CheckpointError, match=r"has dtype torch\.float32, the target torch\.bfloat16; dtype="):
        load_safetensors(target, tmp_path, prefix=LAYER)
    load_safetensors(target, tmp_path, prefix=LAYER, dtype=torch.bfloat16)
    assert same(dict(target.state_dict()), {key: value.bfloat16() for key, value in want.items()})
    after = dict(target.named_parameters())
    assert all(after[key] is value and value.is_leaf and value.requires_grad for key, value in before.items())


def stacked(tensors: dict[str, Tensor], layer: int) -> Tensor:
    """gate_up_proj of a layer of Mixtral's, from its file."""
    start = f"model.layers.{layer}.block_sparse_moe.experts."
    return torch.stack([torch.cat([tensors[f"{start}{e}.w1.weight"], tensors[f"{start}{e}.w3.weight"]]) for e in range(12)])


EXPERTS = f"{LAYER}block_sparse_moe.experts."
Change = Callable[[dict[str, Tensor]], object]
WRONG: dict[str, tuple[Change, str]] = {
    "one matrix less": (
        lambda t: t.pop(f"{EXPERTS}3.w1.weight"), rf"has 12 experts, the checkpoint lacks '{EXPERTS}3\.w1\.weight'$"
    ),
    "an expert less": (
        lambda t: [t.pop(f"{EXPERTS}11.{w}.weight") for w in ("w1", "w2", "w3")],
        rf"lacks '{EXPERTS}11\.w1\.weight', '{EXPERTS}11\.w3\.weight'\n.*12 experts, .* lacks '{EXPERTS}11\.w2\.weight'$",
    ),
    "no expert": (
        lambda t: [t.pop(key) for key in list(t) if key.startswith(EXPERTS)],
        rf"lacks '{LAYER}mlp\.experts\.gate_up_proj'\n.*lacks '{LAYER}mlp\.experts\.down_proj'$",
    ),
    "an expert more": (
        lambda t: t.update({f"{EXPERTS}12.w2.weight": t[f"{EXPERTS}1.w2.weight"].clone()}),
        rf"has 12 experts, the checkpoint holds '{EXPERTS}12\.w2\.weight' as well$",
    ),
    "another shape": (
        lambda t: t.update({f"{EXPERTS}5.w3.weight": torch.ones(32, 48)}),
        rf"'{EXPERTS}5\.w3\.weight' has shape \(32, 48\), the target \(48, 32\) for each expert$",
    ),
    "a number": (lambda t: t.update({f"{EXPERTS}0.w1.weight": torch.ones(())}), rf"'{EXPERTS}0\.w1\.weight' has shape \(\), the"),
    "another dtype": (
        lambda t: t.update({f"{EXPERTS}5.w3.weight": torch.ones(48, 32, dtype=torch.bfloat16)}),
        rf"'{EXPERTS}5\.w3\.weight' has dtype torch\.bfloat16, '{EXPERTS}0\.w1\.weight' of the same tensor torch\.float32$",
    ),
    "both layouts": (
        lambda t: t.update({f"{LAYER}mlp.experts.gate_up_proj": stacked(t, 1)}),
        rf"'{LAYER}\S+' and '{LAYER}\S+' are both '{LAYER}mlp\.experts\.gate_up_proj' of the model, under names of two layouts$",
    ),
    "both families' modules": (
        lambda t: t.update({f"{LAYER}mlp.experts.7.w1.weight": t.pop(f"{EXPERTS}7.w1.weight")}),
        r"\.w1\.weight' and '\S+7\.w1\.weight' are both '\S+gate_up_proj' of the model, under names of two layouts$",
    ),
    "both families' names": (
        lambda t: t.update({f"{EXPERTS}7.gate_proj.weight": t.pop(f"{EXPERTS}7.w1.weight")}),
        r"\.w1\.weight' and '\S+7\.gate_proj\.weight' are both '\S+gate_up_proj' of the model, under names of two layouts$"
        r"|7\.gate_proj\.weight' and '\S+\.w1\.weight' are both '\S+gate_up_proj' of the model, under names of two layouts$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["model", "meta", "module"])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_right_is_named_and_changes_nothing(tmp_path: Path, wrong: str, kind: str) -> None:
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change, message = WRONG[wrong]
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    target: nn.Module = {"model": model, "meta": on_meta(model), "module": plain(dict(model.state_dict()), "cpu")}[kind]
    before = dict(target.state_dict(keep_vars=True))
    for value in before.values():
        value.data.zero_()
    for strict in (True, False) if wrong != "no expert" else (True,):
        with pytest.raises(CheckpointError, match=message):
            load_safetensors(target, tmp_path, strict=strict)
        after = target.state_dict(keep_vars=True)
        assert all(after[key] is value and (value.is_meta or not value.any()) for key, value in before.items())


def test_what_is_wrong_in_another_layer_is_no_matter(tmp_path: Path) -> None:
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.block_sparse_moe.experts.3.w1.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    want = of_layer(model.state_dict())
    target = plain(want)
    load_safetensors(target, tmp_path, prefix=LAYER)
    assert same(dict(target.state_dict()), want)


def test_stacked_checkpoints_are_read_as_they_are(tmp_path: Path) -> None:
    model = build("mixtral")
    save_safetensors(dict(model.state_dict()), tmp_path)
    assert same(load_file(tmp_path / "model.safetensors"), dict(model.state_dict()))
    for target in (on_meta(model), plain(dict(model.state_dict()), "cpu")):
        load_safetensors(target, tmp_path)
        assert same(dict(target.state_dict()), dict(model.state_dict()))


def test_each_tensor_may_have_its_own_layout(tmp_path: Path) -> None:
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{LAYER}mlp.experts.gate_up_proj"] = stacked(tensors, 1)
    for name in [name for name in tensors if re.match(rf"{re.escape(EXPERTS)}\d+\.w[13]", name)]:
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    for target in (on_meta(model), plain(dict(model.state_dict()))):
        load_safetensors(target, tmp_path)
        assert same(dict(target.state_dict()), dict(model.state_dict()))


def test_a_module_that_holds_its_experts_one_by_one_keeps_them(tmp_path: Path) -> None:
    model = build("qwen2_moe")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    mixed = {**of_layer(tensors, "model.layers."), **of_layer(model.state_dict(), "model.layers.")}
    mixed = {key: value for key, value in mixed.items() if ("experts." in key) and (key[0] == "1") == (".weight" not in key)}
    assert mixed.keys() > {"1.mlp.experts.gate_up_proj", "2.mlp.experts.11.up_proj.weight"} and len(mixed) == 38
    for want, prefix in ((tensors, ""), (mixed, "model.layers")):
        target = plain(want)
        load_safetensors(target, tmp_path, prefix=prefix, strict=not prefix)
        assert same(dict(target.state_dict()), want)


def test_transposed_experts_are_not_filled_from_names_that_are_not_theirs(tmp_path: Path) -> None:
    """gate_up_proj [expert, hidden, 2 * ffn], here with equal sizes: from its shape alone it could be the other layout."""
    tensors = {f"experts.{e}.{w}.weight": torch.ones(16, 32) for e in range(4) for w in ("gate_proj", "up_proj")}
    tensors |= {f"experts.{e}.down_proj.weight": torch.ones(32, 16) for e in range(4)}
    save_file(tensors, tmp_path / "m.safetensors")
    target = plain({"experts.gate_up_proj": torch.empty(4, 32, 32), "experts.down_proj": torch.empty(4, 16, 32)}, "cpu")
    with pytest.raises(CheckpointError, match=r"lacks 'experts\.gate_up_proj'\n[\s\S]*unexpected key 'experts\.0\.down_proj"):
        load_safetensors(target, tmp_path / "m.safetensors")
    assert not any(value.any() for value in target.state_dict().values())


@pytest.mark.parametrize("strict", [True, False])
def test_experts_that_share_memory_are_refused(tmp_path: Path, strict: bool) -> None:
    """Each would overwrite the one before; nothing is written, of the other tensors neither."""
    tensors = {f"experts.{e}.{w}.weight": torch.randn(24, 32) for e in range(4) for w in ("gate_proj", "up_proj")}
    tensors |= {f"experts.{e}.down_proj.weight": torch.randn(32, 24) for e in range(4)}
    save_file(tensors, tmp_path / "m.safetensors")
    dense = {"experts.gate_up_proj": torch.zeros(4, 48, 32), "experts.down_proj": torch.zeros(4, 32, 24)}
    memory = torch.zeros(4 * 48 * 32)
    for shared in (torch.zeros(1, 48, 32).expand(4, -1, -1), memory.as_strided((4, 48, 32), (32, 32, 1)),
                   memory.as_strided((4, 48, 32), (1, 33, 1))):  # fmt: skip
        target = plain(dense, "cpu")
        target.experts.gate_up_proj = nn.Parameter(shared, requires_grad=False)
        strides = re.escape(str(shared.stride()))
        name = r"'experts\.gate_up_proj'"
        message = rf"^elements of the target's {name}, of shape \(4, 48, 32\) and strides {strides}, share memory$"
        with pytest.raises(CheckpointError, match=message):
            load_safetensors(target, tmp_path / "m.safetensors", strict=strict)
        assert not any(value.any() for value in target.state_dict().values())
    for apart in (memory.as_strided((4, 48, 32), (1, 128, 4)), torch.zeros(32, 48, 8)[..., ::2].permute(2, 1, 0)):
        target = plain(dense, "cpu")
        target.experts.gate_up_proj = nn.Parameter(apart, requires_grad=False)
        load_safetensors(target, tmp_path / "m.safetensors", strict=strict)
        gate = torch.stack([tensors[f"experts.{e}.gate_proj.weight"] for e in range(4)])
        up = torch.stack([tensors[f"experts.{e}.up_proj.weight"] for e in range(4)])
        assert torch.equal(target.experts.gate_up_proj, torch.cat([gate, up], 1))


def test_which_tensors_share_memory() -> None:
    memory = torch.zeros(100)
    cases = {((3, 2), (3, 2)): False, ((3, 3), (2, 3)): False, ((4, 3), (2, 3)): True, ((0, 4), (0, 1)): False,
             ((1, 4), (0, 1)): False, ((2, 4), (0, 1)): True, ((), ()): False, ((4, 5), (5, 1)): False,
             ((4, 5), (4, 1)): True}  # fmt: skip
    for (shape, strides), want in cases.items():
        places = memory.new_tensor(range(100)).as_strided(shape, strides).flatten().tolist()
        assert overlaps(memory.as_strided(shape, strides)) == want == (len(set(places)) < len(places)), (shape, strides)


def test_layers_that_share_their_experts(tmp_path: Path) -> None:
    model = build("qwen2_moe")
    experts = dict(model.model.layers[1].mlp.experts.state_dict())
    place = {f"experts.{key}": value for key, value in experts.items()}
    source, target = (nn.ModuleDict({name: plain(place) for name in "ab"}) for _ in range(2))
    for tree in (source, target):
        tree["b"].experts = tree["a"].experts
    source["a"].experts.load_state_dict(experts, assign=True)
    save_safetensors(source, tmp_path / "m.safetensors", expert_names="qwen2_moe")
    tensors = load_file(tmp_path / "m.safetensors")
    assert len(tensors) == 36 and all(name.startswith("a.experts.") for name in tensors)
    load_safetensors(target, tmp_path / "m.safetensors")
    assert target["b"].experts.gate_up_proj is target["a"].experts.gate_up_proj
    assert same(dict(target["b"].experts.state_dict()), experts)
    both = tensors | {name.replace("a.", "b.", 1): value.clone() for name, value in tensors.items()}
    save_file(both, tmp_path / "m.safetensors")
    load_safetensors(target, tmp_path / "m.safetensors")
    both["b.experts.11.up_proj.weight"][0, 0] += 1
    save_file(both, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"are one tensor in the target, but hold different values"):
        load_safetensors(target, tmp_path / "m.safetensors")


def test_names_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    model = build("mixtral")
    with pytest.raises(ValueError, match=r"^expert_names='mistral' is none of \['cohere2_moe', .*'qwen3_moe'"):
        save_safetensors(dict(model.state_dict()), path, expert_names="mistral")
    with pytest.raises(ValueError, match=r"^expert_names='mixtral': a HuggingFace model has the names of its own model_type$"):
        save_safetensors(model, path, expert_names="mixtral")
    with pytest.raises(ValueError, match=r"^expert_names='mixtral': there is no pair of 'gate_up_proj' \[expert, 2 \* ffn,"):
        save_safetensors(nn.Linear(2, 2), path, expert_names="mixtral")
    with pytest.raises(ValueError, match=r"^expert_names='mixtral': there is no pair of 'gate_up_proj'"):
        save_safetensors(build("gpt_oss").model.layers[0], path, expert_names="mixtral")
    experts = of_layer(model.state_dict(), f"{LAYER}mlp.")
    biases = {"experts.gate_up_proj_bias": torch.ones(12, 96)}
    with pytest.raises(ValueError, match=r"^expert_names='olmoe': 'experts\.gate_up_proj_bias' has no name in such checkpoints$"):
        save_safetensors({**experts, **biases}, path, expert_names="olmoe")
    ours = {"experts.gate_up_proj": torch.ones(4, 48, 32), "experts.down_proj": torch.ones(4, 32, 24)}
    bare = {key.replace("experts.", "moe."): value for key, value in ours.items()}
    with pytest.raises(ValueError, match=r"^expert_names='olmoe': 'moe\.gate_up_proj' is not in a module called 'experts'"):
        save_safetensors(plain(bare, "cpu"), path, expert_names="olmoe")
    taken = {"experts.3.up_proj.weight": torch.zeros(24, 32)}
    with pytest.raises(ValueError, match=r": 'experts\.gate_up_proj' and \S+ would both be 'experts\.3\.up_proj\.weight'$"):
        save_safetensors({**ours, **taken}, path, expert_names="olmoe")
    with pytest.raises(ValueError, match=r": \S+ and 'experts\.gate_up_proj' would both be 'experts\.3\.up_proj\.weight'$"):
        save_safetensors({**taken, **ours}, path, expert_names="olmoe")
    renamed = {"block_sparse_moe.gate.weight": torch.zeros(12, 32), **{f"mlp.{key}": value for key, value in experts.items()}}
    message = r": 'block_sparse_moe\.gate\.weight' and 'mlp\.gate\.weight' would both be 'block_sparse_moe\.gate\.weight'$"
    with pytest.raises(ValueError, match=message):
        save_safetensors(renamed, path, expert_names="mixtral")
    beside = {"b.experts.gate_up_proj": torch.ones(4, 32, 48), "b.experts.down_proj": torch.ones(4, 24, 32)}
    with pytest.raises(ValueError, match=r": 'b\.experts\.gate_up_proj' of shape \(4, 32, 48\) is not of a pair"):
        save_safetensors({**ours, **beside}, path, expert_names="olmoe")
    assert list(tmp_path.iterdir()) == []

"""BlockConfig: a layer's sizes and numerics in the words of config.json files, against transformers' own config classes."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fusedblock import BlockConfig
from fusedblock.models import rotary
from fusedblock.models.rotary import Rotary, frequencies
from fusedblock.models.table import FAMILIES

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


def llama(**words: Any) -> BlockConfig:
    return BlockConfig(model_type="llama", **{**SIZES, **words})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_word_left_out_has_the_value_that_transformers_gives_it(family: str) -> None:
    assert_words_are_those_of_transformers(family)


def assert_words_are_those_of_transformers(family: str) -> None:
    theirs = AutoConfig.for_model(family)
    width, rest = divmod(theirs.hidden_size, theirs.num_attention_heads)
    ours = BlockConfig.from_dict(
        {"model_type": family, "hidden_size": theirs.hidden_size, "num_attention_heads": theirs.num_attention_heads,
         "intermediate_size": getattr(theirs, "intermediate_size", None),
         **({"head_dim": width} if rest and not FAMILIES[family].words.get("head_dim") else {})}  # of GLM-4 MoE's defaults
    )  # fmt: skip
    other_names = {word: name for name, word in FAMILIES[family].aliases.items()}
    checked = 0
    assert FAMILIES[family].config_words.keys() <= {field.name for field in dataclasses.fields(ours)}
    for field in dataclasses.fields(ours):
        name = other_names.get(field.name, field.name)
        name = name if hasattr(theirs, name) else field.name
        elsewhere = ("rope_parameters", "max_position_embeddings", "layer_types", "no_rope_layers")
        known = field.name in FAMILIES[family].config_words or field.name == "intermediate_size"
        if field.name == "sliding_window_pattern" and known:  # which transformers' configs only make their layer_types of
            types = [dataclasses.replace(ours, layer_idx=i).layer_type for i in range(theirs.num_hidden_layers)]
            assert types == list(theirs.layer_types)
        if field.name in elsewhere or not known or not hasattr(theirs, name):
            continue
        want, got = getattr(theirs, name), getattr(ours, field.name)
        want = tuple(want) if isinstance(want, list) else want
        if field.name == "head_dim" and want is None:
            want = theirs.hidden_size // theirs.num_attention_heads
        if field.name == "intermediate_size" and want is None:
            want = 4 * theirs.hidden_size
        if field.name == "sliding_window" and getattr(theirs, "use_sliding_window", None) is False:
            assert ours.window is None  # transformers forgets the width that is not used
        else:
            assert got == want, field.name
            checked += 1
    assert checked >= 5
    if FAMILIES[family].rope:
        rope = theirs.rope_parameters
        for index in range(theirs.num_hidden_layers if FAMILIES[family].thetas else 1):
            kind = theirs.layer_types[index] if FAMILIES[family].thetas else None
            want = rope[kind] if kind else rope
            want = {word: value for word, value in want.items() if word != "partial_rotary_factor"}
            assert dataclasses.replace(ours, layer_idx=index).rope == want
        assert (ours.partial_rotary_factor or 1.0) == rope.get("partial_rotary_factor", 1.0)


@pytest.mark.parametrize("name", families.ALL)
def test_reading_a_saved_config(name: str, tmp_path: Path) -> None:
    theirs = families.config(name)
    theirs.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        ours = BlockConfig.from_pretrained(path, layer_idx=1)
        assert ours == BlockConfig.from_dict(theirs.to_dict(), layer_idx=1)
    assert (ours.model_type, ours.hidden_size, ours.num_attention_heads) == (theirs.model_type, 64, 4)
    grouped = "num_key_value_heads" in FAMILIES[theirs.model_type].config_words
    assert ours.num_key_value_heads == (theirs.num_key_value_heads if grouped else 4)


def test_gpt2s_own_names() -> None:
    old = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_inner": None, "n_layer": 2, "activation_function": "relu",
           "layer_norm_epsilon": 1e-4, "scale_attn_by_inverse_layer_idx": True}  # fmt: skip
    config = BlockConfig.from_dict(old, layer_idx=1)
    assert config == BlockConfig(model_type="gpt2", hidden_size=64, num_attention_heads=4, hidden_act="relu", layer_norm_eps=1e-4,
                                 scale_attn_by_inverse_layer_idx=True, layer_idx=1)  # fmt: skip
    assert config.intermediate_size == 256 and config.scale == 16**-0.5 / 2


def test_rope_words_of_earlier_configs() -> None:
    old = {"model_type": "llama", **SIZES, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert BlockConfig.from_dict(old) == llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})
    neox = BlockConfig.from_dict({"model_type": "gpt_neox", **SIZES, "rotary_pct": 0.5, "rotary_emb_base": 500})
    assert (neox.partial_rotary_factor, neox.rope_theta) == (0.5, 500)


def test_layers_differ_by_their_index() -> None:
    smollm3 = BlockConfig(model_type="smollm3", **SIZES)
    assert [dataclasses.replace(smollm3, layer_idx=i).use_rope for i in range(5)] == [True, True, True, False, True]
    qwen = BlockConfig(model_type="qwen2", **SIZES, num_key_value_heads=4, use_sliding_window=True, sliding_window=7,
                       max_window_layers=1)  # fmt: skip
    assert [dataclasses.replace(qwen, layer_idx=i).window for i in range(3)] == [None, 7, 7]
    mistral = BlockConfig(model_type="mistral", **SIZES, num_key_value_heads=4)
    assert (mistral.window, dataclasses.replace(mistral, sliding_window=None).window) == (4096, None)
    bert = BlockConfig(model_type="modernbert", **SIZES)
    assert [dataclasses.replace(bert, layer_idx=i).window for i in range(4)] == [None, 65, 65, None]  # of 128: 64 and itself
    null = {"model_type": "mistral", **SIZES, "num_key_value_heads": 4, "sliding_window": None}
    assert BlockConfig.from_dict(null).window is None


def experts(family: str, **words: Any) -> BlockConfig:
    return BlockConfig(model_type=family, **{**SIZES, "num_key_value_heads": 2, **words})


def test_which_layers_have_experts() -> None:
    def sparse(config: BlockConfig) -> list[bool]:
        return [dataclasses.replace(config, layer_idx=i).sparse for i in range(5)]

    for family in ("qwen2_moe", "qwen3_moe"):
        assert sparse(experts(family)) == [True] * 5
        assert sparse(experts(family, num_experts=0)) == [False] * 5
        assert sparse(experts(family, decoder_sparse_step=2, mlp_only_layers=[3])) == [False, True, False, False, False]
    assert sparse(experts("glm4_moe", first_k_dense_replace=3)) == [False, False, False, True, True]
    assert sparse(experts("glm4_moe")) == [False, True, True, True, True]
    for family in ("mixtral", "olmoe", "gpt_oss"):
        assert sparse(experts(family)) == [True] * 5
    assert sparse(llama()) == [False] * 5


def test_windows_of_families_with_experts() -> None:
    """As their configs make layer_types, in which transformers gives every second layer one."""
    def windows(config: BlockConfig) -> list[int | None]:
        return [dataclasses.replace(config, layer_idx=i).window for i in range(5)]

    for family, words in (("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 7}),
                          ("qwen2_moe", {"max_window_layers": 3, "sliding_window": 7}), ("gpt_oss", {})):  # fmt: skip
        theirs = AutoConfig.for_model(family, **SIZES, num_key_value_heads=2, num_hidden_layers=5, **words)
        wide = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
        assert windows(experts(family, **words)) == windows(BlockConfig.from_dict(theirs.to_dict())) == wide
    assert windows(experts("qwen3_moe", use_sliding_window=True, sliding_window=7)) == [7] * 5
    assert windows(experts("qwen3_moe")) == windows(experts("mixtral")) == windows(experts("olmoe")) == [None] * 5


def test_rope_by_layer_type() -> None:
    """As transformers writes it now and wrote it before: the layers that see far may be scaled, the others have a theta."""
    far, near = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, {"rope_type": "default", "rope_theta": 1e4}
    gemma = {"model_type": "gemma3_text", **SIZES}
    nested = {**gemma, "rope_parameters": {"full_attention": far, "sliding_attention": near}}
    flat = {**gemma, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}}
    for layer, want in ((4, near), (5, far)):
        assert [BlockConfig.from_dict(words, layer_idx=layer).rope for words in (nested, flat)] == [want, want]
    assert dataclasses.replace(BlockConfig.from_dict(nested), layer_idx=5).rope == far
    with pytest.raises(ValueError, match="have factor beside layer types"):
        BlockConfig.from_dict({**gemma, "rope_parameters": {"full_attention": far, "factor": 2.0}})


def test_a_config_is_a_value() -> None:
    config = llama(rope_parameters={"rope_type": "linear", "factor": 2.0})
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == dataclasses.replace(config) == config
    assert hash(config) == hash(copy.deepcopy(config)) and config != llama()
    assert repr(llama(mlp_bias=True)).startswith("BlockConfig(model_type='llama', hidden_size=64, ")
    assert "mlp_bias=True" in repr(llama(mlp_bias=True)) and "None" not in repr(llama())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1  # type: ignore[misc]


MISTRAL = {"model_type": "mistral", "num_key_value_heads": 4}
MIXTRAL = {"model_type": "mixtral", "num_key_value_heads": 4}
QWEN = {"model_type": "qwen3_moe"}
GLM = {"model_type": "glm4_moe", "num_key_value_heads": 4, "layer_idx": 1}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown family": ({"model_type": "mamba"}, "model_type='mamba', expected one of llama, .*vit"),
    "word of another family": ({"use_qk_norm": True}, "use_qk_norm=True, but model_type='llama' has no such word; .*mlp_bias"),
    "group size": ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
    "default group size": ({"model_type": "mistral"}, "num_key_value_heads=8, the default of mistral"),
    "width": ({"num_attention_heads": 3}, "hidden_size=64 is no multiple of num_attention_heads=3, and no head_dim is given"),
    "heads of gpt2": ({"model_type": "gpt2", "num_key_value_heads": 2}, "num_key_value_heads=2, but .*'gpt2'.*=4 it is 4"),
    "no size": ({"intermediate_size": None}, "intermediate_size=None, expected a positive integer"),
    "negative": ({"hidden_size": -64}, "hidden_size=-64, expected a positive integer"),
    "eps": ({"rms_norm_eps": 0.0}, "rms_norm_eps=0.0, expected a positive number"),
    "index": ({"layer_idx": -1}, "layer_idx=-1, expected a layer's number"),
    "no index": ({"layer_idx": "1"}, "layer_idx='1', expected a layer's number"),
    "index of types": ({"model_type": "qwen2", "layer_types": ["full_attention"], "layer_idx": -1}, "layer_idx=-1, expected a"),
    "no activation": ({"hidden_act": {"silu": 1}}, "hidden_act={'silu': 1}, expected a name"),
    "two thetas": ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, "rope_theta=5.0, but rope_parameters have .*6.0"),
    "two types": ({"rope_parameters": {"rope_type": "yarn", "type": "linear"}}, "rope_type='yarn' and type='linear'"),
    "no factor": ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters of rope_type='linear' lack factor"),
    "foreign key": ({"rope_parameters": {"rope_type": "linear", "factor": 2, "beta_fast": 1}}, "have beta_fast, .*takes factor"),
    "factor": ({"rope_parameters": {"rope_type": "linear", "factor": -2}}, "factor=-2, expected a positive number"),
    "word as factor": ({"rope_parameters": {"rope_type": "linear", "factor": "4"}}, "factor='4', expected a finite number"),
    "no dictionary": ({"rope_parameters": "linear"}, "rope_parameters='linear', expected a dictionary"),
    "no window": ({**MISTRAL, "sliding_window": 0}, "sliding_window=0, expected a positive integer"),
    "part of a window": ({**MISTRAL, "sliding_window": 2.5}, "sliding_window=2.5, expected an integer"),
    "word as number": ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6', expected a finite number"),
    "no number": ({"model_type": "granite", "residual_multiplier": float("nan")}, "residual_multiplier=nan, expected a finite"),
    "word as truth": ({"attention_bias": "false"}, "attention_bias='false', expected true or false"),
    "layer type": (
        {**MISTRAL, "model_type": "qwen2", "layer_types": ["chunked_attention"]},
        "layer_types has 'chunked_attention' for layer 0, expected full_attention or sliding_attention",
    ),
    "experts of none": ({"num_experts": 4}, "num_experts=4, but model_type='llama' has no such word"),
    "no experts": ({**MIXTRAL, "num_local_experts": 0}, "num_local_experts=0, expected a positive integer"),
    "their name": ({**MIXTRAL, "num_experts": 4}, "num_experts=4, but model_type='mixtral' .*num_local_experts"),
    "too many": ({**QWEN, "num_experts": 4}, "num_experts_per_tok=8, but num_experts=4"),
    "none chosen": ({**QWEN, "num_experts_per_tok": 0}, "num_experts_per_tok=0, expected a positive integer"),
    "no width": ({**QWEN, "moe_intermediate_size": -1}, "moe_intermediate_size=-1, expected a positive integer"),
    "no shared": ({**GLM, "n_shared_experts": 0}, "n_shared_experts=0, expected a positive integer"),
    "step": ({**QWEN, "decoder_sparse_step": 0}, "decoder_sparse_step=0, expected a positive integer"),
    "dense layer": ({**QWEN, "mlp_only_layers": 3}, "mlp_only_layers=3, expected a list"),
    "dense layers": ({**QWEN, "mlp_only_layers": ["0"]}, r"mlp_only_layers=\('0',\), expected layers' numbers"),
    "groups": ({**GLM, "n_group": 3}, "n_group=3 is no divisor of n_routed_experts=128"),
    "groups chosen": ({**GLM, "topk_group": 2}, "topk_group=2, but n_group=1"),
    "in the groups": ({**GLM, "n_group": 32}, "num_experts_per_tok=8, but topk_group=1 of n_group=32 groups have 4 of .*=128"),
    "scale": ({**GLM, "routed_scaling_factor": "2"}, "routed_scaling_factor='2', expected a finite number"),
    "partial": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5, but a head of llama turns as a"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused_by_name(case: str) -> None:
    words, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        BlockConfig(**{"model_type": "llama", **SIZES, **words})


@pytest.mark.parametrize(("index", "layers", "message"), (
    ("1", 2, "layer_idx='1', expected a layer's number"), (0, "2", "num_hidden_layers='2', expected an integer"),
    (2, 2, "layer_idx=2, but num_hidden_layers=2"), (-1, 2, "layer_idx=-1, expected a layer's number"),
))  # fmt: skip
def test_the_index_of_a_layer_that_the_config_has_not(index: Any, layers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"BlockConfig: {message}"):
        BlockConfig.from_dict({"model_type": "llama", **SIZES, "num_hidden_layers": layers}, layer_idx=index)


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(TypeError, match="hidden_sise"):
        BlockConfig(model_type="llama", **SIZES, hidden_sise=1)  # type: ignore[call-arg]


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(FileNotFoundError, match="config.json: no such file"):
        BlockConfig.from_pretrained(file)
    for text, message in {
        "{": "is no JSON", "[]": "holds a list", "{}": "has no model_type",
        '{"model_type": "bloom"}': "model_type='bloom', expected one of",
        '{"model_type": "mixtral", "hidden_size": 64}': "'mixtral' lacks intermediate_size, num_attention_heads",
        json.dumps({"model_type": "olmoe", **SIZES, "num_experts": 4, "num_local_experts": 5}): "experts=5, but num_experts=4",
        '{"model_type": "llama", "hidden_size": 64}': "'llama' lacks intermediate_size, num_attention_heads",
        json.dumps({"model_type": "gpt2", "n_embd": 64, "hidden_size": 32, "n_head": 4}): "hidden_size=32, but n_embd=64",
        json.dumps({"model_type": "llama", **SIZES, "num_hidden_layers": 2}): "layer_idx=2, but num_hidden_layers=2",
    }.items():  # fmt: skip
        file.write_text(text)
        with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
            BlockConfig.from_pretrained(tmp_path, layer_idx=2)


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "llama3 of the whole context": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn, every key": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16,
                        "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False},
    "yarn, its own temperature": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512,
                                  "attention_factor": 1.5},
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_rotary_tables_are_those_of_transformers(name: str) -> None:
    """Bit for bit."""
    theirs = AutoConfig.for_model("llama", **SIZES, head_dim=64, max_position_embeddings=2048, rope_parameters={**ROPES[name]})
    ours = BlockConfig.from_dict(theirs.to_dict())
    positions = torch.stack((torch.arange(100), 3 * torch.arange(100) + 1500))
    x = torch.zeros(2, 100, 64, dtype=torch.bfloat16)
    reference, tables = LlamaRotaryEmbedding(theirs), Rotary(ours, "halves")
    assert torch.equal(frequencies(ours)[0], reference.inv_freq)
    for got, want in zip(tables(x, positions), reference(x, positions)):
        assert torch.equal(got, want)
    if name != "default":
        plain = Rotary(dataclasses.replace(ours, rope_parameters=None), "halves")
        assert not torch.equal(tables(x, positions)[0], plain(x, positions)[0])


def test_the_short_tables_of_gpt_oss() -> None:
    """One column for each angle, by the scaling that its config has without rope_parameters."""
    theirs = AutoConfig.for_model("gpt_oss", **SIZES, head_dim=64, num_key_value_heads=4)
    ours = BlockConfig.from_dict({**theirs.to_dict(), "rope_parameters": None})
    positions = torch.stack((torch.arange(100), 3 * torch.arange(100) + 1500))
    x = torch.zeros(2, 100, 64, dtype=torch.bfloat16)
    for got, want in zip(Rotary(ours, ours.spec.tables)(x, positions), GptOssRotaryEmbedding(theirs)(x, positions), strict=True):
        assert torch.equal(got, want) and got.shape == (2, 100, 32)


def test_frequencies_keep_their_dtype_and_leave_meta() -> None:
    config = llama(rope_parameters={"rope_type": "linear", "factor": 4.0})
    tables = Rotary(config, "halves", device="meta").to_empty(device="cpu").to(torch.bfloat16)
    assert torch.equal(tables.inv_freq, frequencies(config)[0]) and not tables.state_dict()


def test_tables_of_positions_that_count_are_made_once_for_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    forward = Rotary.forward
    monkeypatch.setattr(Rotary, "forward", lambda self, x, ids: made.append(int(ids[0, 0])) or forward(self, x, ids))
    monkeypatch.setattr(rotary, "_recent", {})
    first, second, other = (Rotary(llama(rope_theta=theta), "halves") for theta in (1e4, 1e4, 2e4))
    x = torch.zeros(2, 5, 64)
    for start in (0, 5):
        with torch.inference_mode(start == 0):
            got = first.counted(x, start)
        assert second.counted(x, start) is got and not got[0].is_inference()
        for t, want in zip(got, forward(first, x, torch.arange(start, start + 5)[None])):
            assert torch.equal(t, want)
    assert made == [0, 5]
    assert not torch.equal(other.counted(x, 5)[0], got[0])
    assert first.counted(x.bfloat16(), 5)[0].dtype is torch.bfloat16
    assert first.counted(x[:, :4], 5)[0].shape == (1, 4, 16)
    assert made == [0, 5, 5, 5, 5]
    for start in range(9):
        first.counted(x, start)
    assert len(rotary._recent) == 4


def test_tables_of_another_kind_must_be_given() -> None:
    tables = Rotary(llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "halves")
    with pytest.raises(ValueError, match="no tables for rope_type='dynamic', .*yarn; pass position_embeddings"):
        tables(torch.zeros(1, 2, 64), torch.arange(2)[None])

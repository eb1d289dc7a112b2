"""What a FusedBlock is made of, in the words of transformers' config.json, read without transformers."""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from . import table

_DERIVED = ("num_key_value_heads", "head_dim")
_SIZES = ("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "layer_idx")
_OLD_WORDS = {"rope_scaling": "rope_parameters"}
# The keys of rope_parameters that each kind of scaling reads.
ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim", "truncate"),
}  # fmt: skip
_ROPE_REQUIRED = {**ROPE_KEYS, "yarn": ("factor", "original_max_position_embeddings")}
_KINDS = {"bool | None": (bool, "true or false"), "int | None": (numbers.Integral, "an integer"),
          "float | None": (numbers.Real, "a finite number"), "Mapping[str, Any] | None": (Mapping, "a dictionary"),
          "str | None": (str, "a name"),
          **dict.fromkeys(("tuple[int, ...] | None", "tuple[str, ...] | None"), ((list, tuple), "a list"))}  # fmt: skip
_LAYER_TYPES = ("full_attention", "sliding_attention")
_THETAS = dict(zip(_LAYER_TYPES, ("rope_theta", "rope_local_base_freq")))
# Words whose null in a config.json says something. Any other null means the default.
_NULLABLE = frozenset({"num_key_value_heads", "head_dim", "sliding_window", "intermediate_size", "attn_logit_softcapping"})


def _of_kind(name: str, value: Any, kind: Any, expected: str) -> None:
    right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not right or (kind is numbers.Real and not math.isfinite(value)):
        raise ValueError(f"BlockConfig: {name}={value!r}, expected {expected}")


def _check_index(layer_idx: Any) -> None:
    if not isinstance(layer_idx, int) or isinstance(layer_idx, bool) or layer_idx < 0:
        raise ValueError(f"BlockConfig: layer_idx={layer_idx!r}, expected a layer's number, from 0 on")


def _unknown(model_type: Any) -> ValueError:
    waits = table.waiting_family(model_type) if isinstance(model_type, str) else ""
    return ValueError(f"BlockConfig: model_type={model_type!r}, {waits or 'expected one of ' + ', '.join(table.FAMILIES)}")


class _Default:
    def __repr__(self) -> str:
        return "<transformers' default>"

    def __reduce__(self) -> str:
        return "DEFAULT"


DEFAULT: Any = _Default()


@dataclass(frozen=True, kw_only=True, repr=False)
class BlockConfig:
    """Sizes and numerics of one transformer layer, in the words of transformers' configs.

    A word left out has the value that transformers gives it for this model_type; the object shows the values in force. Words
    that the model_type does not have are None, and giving one is an error.

    Args:
        model_type: "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox",
            "starcoder2", "olmo2", "olmo3", "cohere", "cohere2", "granite", "smollm3", "glm", "stablelm", "bert", "roberta",
            "vit", "modernbert", or with experts "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss" or "glm4_moe".
        hidden_size, intermediate_size, num_attention_heads: sizes.
        layer_idx: which layer of the model it is. It decides the slot in a cache, the layer that `load_safetensors` looks for,
            and in some families numerics: layers without rope (SmolLM3), windows, GPT-2's scaling by layer, experts (see
            `sparse`).
        num_key_value_heads, head_dim: None means num_attention_heads and hidden_size // num_attention_heads, which are also the
            defaults of most families.
        hidden_act: "silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu" or "relu2", also under transformers' other names.
        rms_norm_eps, layer_norm_eps: whichever norm the family has.
        rope_theta, partial_rotary_factor, rope_parameters: rope_parameters is a dictionary with "rope_type" ("default", "linear",
            "llama3" or "yarn"; with others, position_embeddings must be given to the block) and what that type takes.
            By layer type ("full_attention", "sliding_attention") in families whose layers differ in it.
        sliding_window: how many tokens a token sees, itself among them; None: all before it. In an encoder half of it to each
            side (ModernBERT's local_attention).
        attn_logit_softcapping: bound of the logits, softcap * tanh(logits / softcap); None: none.
        num_experts, num_local_experts, n_routed_experts: how many experts there are, whichever the family calls it; of them each
            token has num_experts_per_tok.
        moe_intermediate_size: width of an expert, where intermediate_size is that of a dense layer (of Mixtral, OLMoE and gpt-oss
            intermediate_size is an expert's).
        shared_expert_intermediate_size, n_shared_experts: width of the expert that all tokens have, or how many others'.
        mlp_only_layers, decoder_sparse_step, first_k_dense_replace: which layers are dense, see `sparse`.
        norm_topk_prob, n_group, topk_group, routed_scaling_factor: of the router.
        router_jitter_noise: must be 0 in training.

    The other words are transformers' too. Raises ValueError naming the word and what contradicts it.
    """

    model_type: str
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int | None = DEFAULT
    layer_idx: int = 0
    num_key_value_heads: int | None = DEFAULT
    head_dim: int | None = DEFAULT
    hidden_act: str | None = DEFAULT
    rms_norm_eps: float | None = DEFAULT
    layer_norm_eps: float | None = DEFAULT
    attention_bias: bool | None = DEFAULT
    attention_out_bias: bool | None = DEFAULT
    mlp_bias: bool | None = DEFAULT
    norm_bias: bool | None = DEFAULT
    qkv_bias: bool | None = DEFAULT
    use_bias: bool | None = DEFAULT
    use_qkv_bias: bool | None = DEFAULT
    use_qk_norm: bool | None = DEFAULT
    qk_layernorm: bool | None = DEFAULT
    use_parallel_residual: bool | None = DEFAULT
    residual_multiplier: float | None = DEFAULT
    attention_multiplier: float | None = DEFAULT
    query_pre_attn_scalar: float | None = DEFAULT
    attn_logit_softcapping: float | None = DEFAULT
    scale_attn_weights: bool | None = DEFAULT
    scale_attn_by_inverse_layer_idx: bool | None = DEFAULT
    is_decoder: bool | None = DEFAULT
    use_bidirectional_attention: bool | None = DEFAULT
    rope_theta: float | None = DEFAULT
    rope_local_base_freq: float | None = DEFAULT
    partial_rotary_factor: float | None = DEFAULT
    rope_parameters: Mapping[str, Any] | None = field(default=DEFAULT, hash=False)
    max_position_embeddings: int | None = DEFAULT
    no_rope_layers: tuple[int, ...] | None = DEFAULT
    no_rope_layer_interval: int | None = DEFAULT
    sliding_window: int | None = DEFAULT
    use_sliding_window: bool | None = DEFAULT
    max_window_layers: int | None = DEFAULT
    layer_types: tuple[str, ...] | None = DEFAULT
    sliding_window_pattern: int | None = DEFAULT
    attention_dropout: float | None = DEFAULT
    hidden_dropout: float | None = DEFAULT
    mlp_dropout: float | None = DEFAULT
    residual_dropout: float | None = DEFAULT
    attn_pdrop: float | None = DEFAULT
    resid_pdrop: float | None = DEFAULT
    hidden_dropout_prob: float | None = DEFAULT
    attention_probs_dropout_prob: float | None = DEFAULT
    num_experts: int | None = DEFAULT
    num_local_experts: int | None = DEFAULT
    n_routed_experts: int | None = DEFAULT
    num_experts_per_tok: int | None = DEFAULT
    moe_intermediate_size: int | None = DEFAULT
    shared_expert_intermediate_size: int | None = DEFAULT
    n_shared_experts: int | None = DEFAULT
    mlp_only_layers: tuple[int, ...] | None = DEFAULT
    decoder_sparse_step: int | None = DEFAULT
    first_k_dense_replace: int | None = DEFAULT
    norm_topk_prob: bool | None = DEFAULT
    n_group: int | None = DEFAULT
    topk_group: int | None = DEFAULT
    routed_scaling_factor: float | None = DEFAULT
    router_jitter_noise: float | None = DEFAULT
    clip_qkv: float | None = DEFAULT

    def __post_init__(self) -> None:
        spec = table.FAMILIES.get(self.model_type) if isinstance(self.model_type, str) else None
        if spec is None:
            raise _unknown(self.model_type)
        _check_index(self.layer_idx)
        words = spec.config_words
        for name, kind in ((f.name, f.type) for f in fields(self)):
            value = getattr(self, name)
            if value is not DEFAULT and value is not None and kind in _KINDS:
                _of_kind(name, value, *_KINDS[kind])  # type: ignore[index]
            if isinstance(value, list):
                self._set(name, tuple(value))
            if name in _SIZES or (name in _DERIVED and name not in words and value is not DEFAULT):
                continue
            if name not in words and value not in (None, DEFAULT):
                raise ValueError(
                    f"BlockConfig: {name}={value!r}, but model_type={self.model_type!r} has no such word; it has "
                    f"{', '.join(sorted(words))}"
                )
            if value is DEFAULT or (value is None and name not in _NULLABLE):
                self._set(name, words.get(name))
        if self.intermediate_size in (None, DEFAULT):
            self._set("intermediate_size", spec.ffn_ratio * self.hidden_size or None)
        for name in ("hidden_size", "intermediate_size", "num_attention_heads"):
            self._positive(name)
        self._heads(words)
        for name in ("layer_types", "no_rope_layers"):
            listed = getattr(self, name)
            if listed is not None and self.layer_idx >= len(listed):
                raise ValueError(f"BlockConfig: layer_idx={self.layer_idx}, but {name} has {len(listed)} entries")
        if spec.period:
            self._positive("sliding_window_pattern")
        if self.layer_type not in _LAYER_TYPES:
            expected = " or ".join(_LAYER_TYPES)
            raise ValueError(f"BlockConfig: layer_types has {self.layer_type!r} for layer {self.layer_idx}, expected {expected}")
        if spec.rope:
            self._ropes(words)
        for name in ("rms_norm_eps", "layer_norm_eps", *_THETAS.values(), "query_pre_attn_scalar", "attn_logit_softcapping"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"BlockConfig: {name}={value!r}, expected a positive number")
        if self._sliding:
            self._positive("sliding_window")
        if spec.sparse:
            self._experts(spec.sparse)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _positive(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"BlockConfig: {name}={value!r}, expected a positive integer")

    def _heads(self, words: Mapping[str, Any]) -> None:
        heads = self.num_attention_heads
        if self.num_key_value_heads is None:
            self._set("num_key_value_heads", heads)
        if self.head_dim is None:
            if self.hidden_size % heads:
                raise ValueError(
                    f"BlockConfig: hidden_size={self.hidden_size} is no multiple of num_attention_heads={heads}"
                    + (", and no head_dim is given" if "head_dim" in words else "")
                )
            self._set("head_dim", self.hidden_size // heads)
        for name in _DERIVED:
            self._positive(name)
        for name, value in zip(_DERIVED, (heads, self.hidden_size // heads)):
            if name not in words and getattr(self, name) != value:
                raise ValueError(
                    f"BlockConfig: {name}={getattr(self, name)}, but with model_type={self.model_type!r}, "
                    f"hidden_size={self.hidden_size} and num_attention_heads={heads} it is {value}"
                )
        if heads % self.num_key_value_heads:  # type: ignore[operator]
            default = words.get("num_key_value_heads") == self.num_key_value_heads
            raise ValueError(
                f"BlockConfig: num_attention_heads={heads} is no multiple of num_key_value_heads={self.num_key_value_heads}"
                + (f", the default of {self.model_type}" if default else "")
            )

    def _experts(self, sparse: table.Sparse) -> None:
        if any(not isinstance(n, int) for n in self.mlp_only_layers or ()):
            raise ValueError(f"BlockConfig: mlp_only_layers={self.mlp_only_layers!r}, expected layers' numbers")
        if self.decoder_sparse_step is not None:
            self._positive("decoder_sparse_step")
        if not self.sparse:
            return
        groups = ("n_group", "topk_group") if self.n_group is not None else ()
        for name in (sparse.number, sparse.ffn, *sparse.shared_ffn, "num_experts_per_tok", *groups):
            self._positive(name)
        number, chosen = getattr(self, sparse.number), self.num_experts_per_tok or 0
        if chosen > number:
            raise ValueError(f"BlockConfig: num_experts_per_tok={chosen}, but {sparse.number}={number}")
        if not groups:
            return
        n_group, topk_group = self.n_group or 1, self.topk_group or 1
        if number % n_group:
            raise ValueError(f"BlockConfig: n_group={n_group} is no divisor of {sparse.number}={number}")
        if topk_group > n_group:
            raise ValueError(f"BlockConfig: topk_group={topk_group}, but n_group={n_group}")
        if chosen > (eligible := number // n_group * topk_group):
            raise ValueError(
                f"BlockConfig: num_experts_per_tok={chosen}, but topk_group={topk_group} of n_group={n_group} groups have "
                f"{eligible} of {sparse.number}={number}"
            )

    def _ropes(self, words: Mapping[str, Any]) -> None:
        given = dict(self.rope_parameters or {})
        if not self.spec.thetas:
            self._set("rope_parameters", self._rope(given, words, "rope_theta"))
            return
        if not given.keys() & set(_LAYER_TYPES):  # scaling, where it is given for all, is meant for the layers that see far
            given = {"full_attention": given}
        if unknown := given.keys() - set(_LAYER_TYPES):
            raise ValueError(f"BlockConfig: rope_parameters have {', '.join(sorted(unknown))} beside layer types")
        each = {kind: self._rope(dict(given.get(kind) or {}), words, word) for kind, word in _THETAS.items()}
        self._set("rope_parameters", each)

    def _rope(self, given: dict[str, Any], words: Mapping[str, Any], theta: str) -> dict[str, Any]:
        """Out of the parameters what are fields of their own, and check the rest by its type. theta: where rope_theta goes."""
        kinds = [given.pop(word) for word in ("rope_type", "type") if word in given]
        if len(set(kinds)) > 1:
            raise ValueError(f"BlockConfig: rope_parameters have rope_type={kinds[0]!r} and type={kinds[1]!r}")
        for name in ("rope_theta", "partial_rotary_factor"):
            if name not in given:
                continue
            word = theta if name == "rope_theta" else name
            inner, outer = given.pop(name), getattr(self, word)
            if word not in words:
                if inner not in (None, 1.0):
                    raise ValueError(f"BlockConfig: {name}={inner!r}, but a head of {self.model_type} turns as a whole")
            elif outer not in (inner, words[word]):
                raise ValueError(f"BlockConfig: {word}={outer!r}, but rope_parameters have {name}={inner!r}")
            elif inner is not None:
                self._set(word, inner)
        kind = kinds[0] if kinds else "default"
        kind = self.spec.rope_kinds.get(kind, kind)
        if kind in ROPE_KEYS:
            given = {name: value for name, value in given.items() if value is not None}
            if kind in ("llama3", "yarn") and self.max_position_embeddings is not None:
                given.setdefault("original_max_position_embeddings", self.max_position_embeddings)
            if unknown := given.keys() - ROPE_KEYS[kind]:
                raise ValueError(
                    f"BlockConfig: rope_parameters have {', '.join(sorted(unknown))}, but rope_type={kind!r} takes "
                    f"{', '.join(ROPE_KEYS[kind]) or 'nothing more'}"
                )
            if kind == "yarn" and self.max_position_embeddings is not None:
                given.setdefault("factor", self.max_position_embeddings / given["original_max_position_embeddings"])
            if missing := [name for name in _ROPE_REQUIRED[kind] if name not in given]:
                raise ValueError(f"BlockConfig: rope_parameters of rope_type={kind!r} lack {', '.join(missing)}")
            for name in _ROPE_REQUIRED[kind]:
                _of_kind(f"rope_parameters' {name}", given[name], numbers.Real, "a finite number")
                if not given[name] > 0:
                    raise ValueError(f"BlockConfig: rope_parameters' {name}={given[name]!r}, expected a positive number")
        if self.partial_rotary_factor is not None and not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(f"BlockConfig: partial_rotary_factor={self.partial_rotary_factor!r}, expected above 0 and up to 1")
        return {"rope_type": kind, **given}

    def __repr__(self) -> str:
        shown = ((f.name, getattr(self, f.name)) for f in fields(self))
        return f"BlockConfig({', '.join(f'{name}={value!r}' for name, value in shown if value is not None)})"

    @property
    def spec(self) -> table.LayerSpec:
        """The entry of the table of architectures."""
        return table.FAMILIES[self.model_type]

    @property
    def sparse(self) -> bool:
        """Whether this layer has experts. In families with experts others may have a dense MLP: those in mlp_only_layers, those
        before first_k_dense_replace, and all but every decoder_sparse_step-th."""
        if self.spec.sparse is None or self.layer_idx in (self.mlp_only_layers or ()):
            return False
        if self.decoder_sparse_step is not None:
            return bool(self.num_experts) and (self.layer_idx + 1) % self.decoder_sparse_step == 0
        return self.first_k_dense_replace is None or self.layer_idx >= self.first_k_dense_replace

    @property
    def use_rope(self) -> bool:
        """Whether this layer turns its queries and keys."""
        if not self.spec.rope:
            return False
        if any(option == "rope" and path == self.spec.window for path, (option, _) in self.spec.switches.items()):
            return self._sliding
        if self.no_rope_layers is not None:
            return bool(self.no_rope_layers[self.layer_idx])
        return not self.no_rope_layer_interval or (self.layer_idx + 1) % self.no_rope_layer_interval != 0

    @property
    def rope(self) -> dict[str, Any]:
        """The rope_parameters of this layer, rope_theta among them."""
        every, word = dict(self.rope_parameters or {}), "rope_theta"
        if self.spec.thetas:
            every, word = every[self.layer_type], _THETAS[self.layer_type]
        return {**every, "rope_theta": getattr(self, word)}

    @property
    def causal(self) -> bool:
        """Whether a token sees only itself and those before it."""
        causal = self.spec.causal
        return (bool(getattr(self, causal)) if isinstance(causal, str) else causal) and not self.use_bidirectional_attention

    @property
    def scale(self) -> float:
        """Of the logits, before the softmax."""
        assert self.head_dim is not None
        scale = self.head_dim**-0.5
        if self.spec.scale:
            scale = float(getattr(self, self.spec.scale)) ** self.spec.scale_power
        if self.scale_attn_weights is False:
            scale = 1.0
        return scale / (self.layer_idx + 1) if self.scale_attn_by_inverse_layer_idx else scale

    @property
    def layer_type(self) -> str:
        """"full_attention" or "sliding_attention"; families whose layers do not differ have the first."""
        if self.layer_types is not None:
            return self.layer_types[self.layer_idx]
        every, index = self.sliding_window_pattern, self.layer_idx
        windowed = every and (index + self.spec.period_start) % every and self.use_sliding_window is not False
        beyond = self.max_window_layers is not None and index >= self.max_window_layers
        return "sliding_attention" if windowed and not beyond else "full_attention"

    @property
    def _sliding(self) -> bool:
        """Whether sliding_window holds in this layer."""
        if self.use_sliding_window is False or self.sliding_window is None:
            return False
        if self.layer_types is not None or self.sliding_window_pattern:
            return self.layer_type == "sliding_attention"
        if self.max_window_layers is not None and self.layer_idx < self.max_window_layers:
            return False
        return self.no_rope_layer_interval is None or not self.use_rope

    @property
    def window(self) -> int | None:
        """How many tokens a token of this layer sees, itself among them, of those before it and in an encoder also of those after
        it; None: all."""
        if not self._sliding or self.sliding_window is None:
            return None
        return self.sliding_window if self.causal else self.sliding_window // 2 + 1

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, layer_idx: int = 0) -> BlockConfig:
        """Read the contents of a config.json.

        Words that say nothing of a layer of this model_type are passed over, as transformers does. Raises ValueError if a word is
        missing that has no default, if two contradict each other, or for a model_type that is not supported.
        """
        if "model_type" not in config:
            raise ValueError(f"BlockConfig: the config has no model_type, only {', '.join(map(str, config)) or 'nothing'}")
        spec = table.FAMILIES.get(config["model_type"])
        if spec is None:
            raise _unknown(config["model_type"])
        known = {*_SIZES, *spec.config_words, "num_hidden_layers"}
        values: dict[str, Any] = {}
        origin: dict[str, str] = {}
        for name, value in config.items():
            word = spec.aliases.get(name, _OLD_WORDS.get(name, name))
            if word not in known or (value is None and word not in _NULLABLE):
                continue
            if word in values and values[word] != value:
                raise ValueError(f"BlockConfig: {name}={value!r}, but {origin[word]}={values[word]!r}")
            values[word], origin[word] = value, name
        layers = values.pop("num_hidden_layers", None)
        _check_index(layer_idx)
        if layers is not None:
            _of_kind("num_hidden_layers", layers, numbers.Integral, "an integer")
        if layers is not None and layer_idx >= layers:
            raise ValueError(f"BlockConfig: layer_idx={layer_idx}, but num_hidden_layers={layers}")
        missing = [n for n in ("hidden_size", "intermediate_size", "num_attention_heads") if values.get(n) is None]
        if missing and not (missing == ["intermediate_size"] and spec.ffn_ratio):
            raise ValueError(f"BlockConfig: the config of model_type={spec.family!r} lacks {', '.join(missing)}")
        return cls(**{**values, "layer_idx": layer_idx})

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], *, layer_idx: int = 0) -> BlockConfig:
        """Read a folder's config.json, or that file. Raises FileNotFoundError, or ValueError naming the file and the word."""
        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file; expected a folder with config.json, or that file")
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file}: is no JSON: {error}") from error
        if not isinstance(config, dict):
            raise ValueError(f"{file}: holds a {type(config).__name__}, expected an object")
        try:
            return cls.from_dict(config, layer_idx=layer_idx)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

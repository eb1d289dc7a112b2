"""Architectures as data: where a layer keeps its parts, and the numerics that its code (not its config) fixes.

One entry covers one layer class of transformers. Sizes, epsilons, the softmax scale and the activation are not here: they
are read from the live module, so that a change to it is seen. Paths are dotted and start at the layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_TORCH_NORM = "torch.nn.modules.normalization.LayerNorm"
_CONV1D = "transformers.pytorch_utils.Conv1D"


@dataclass(frozen=True)
class LayerSpec:
    """Paths and numerics of one layer class. The options are those of fusedblock.blocks.BlockSpec.

    family, module, layer_class: as transformers names them. classes: path -> exact name of the class, defined in `module`, whose
    arithmetic the fused layer replaces. norm_class and linear_class: of its norms and linear layers, in `module` unless dotted.
    norm paths: "" where the architecture has none; attn_out_norm and mlp_out_norm follow a branch. qkv: the one fused projection,
    instead of q, k, v. gate "": an MLP of two layers, or with mlp "gated_stacked" the gate is the first half of `up`.
    q_norm, k_norm: names in the attention, for layers that have them. dropouts: modules or numbers that must be zero in training.
    switches: what live attributes decide: path -> (field of BlockSpec, {value: field's value}). refused: path of an attribute ->
    why no kernel exists if it is true. partial: the tables may be narrower than a head.
    """

    family: str
    layer_class: str
    classes: Mapping[str, str]
    norm_class: str
    module: str = ""  # default: transformers.models.<family>.modeling_<family>
    linear_class: str = "torch.nn.modules.linear.Linear"
    attention: str = "self_attn"
    attn_norm: str = "input_layernorm"
    attn_out_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = ""
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str = ""
    o: str = "self_attn.o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    activation: str = "mlp.act_fn"
    eps: str = "variance_epsilon"
    head_dim: str = "head_dim"
    dropouts: tuple[str, ...] = ("self_attn.attention_dropout",)
    branch_scale: str = ""
    switches: Mapping[str, tuple[str, Mapping[bool, str]]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    norm: str = "rms"
    weight_offset: float = 0.0
    round_early: bool = True
    residual: str = "sequential"
    qkv_layout: str = "split"
    qk_norm: str = ""
    rope: str = "half"
    tables: str = "halves"
    partial: bool = False
    mlp: str = "gated"

    @property
    def home(self) -> str:
        """The module of transformers that defines the layer."""
        return self.module or f"transformers.models.{self.family}.modeling_{self.family}"

    @property
    def norms(self) -> dict[str, str]:
        """Weight of BlockWeights -> path, of the norms the architecture has."""
        every = {n: getattr(self, n) for n in ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm")}
        return {name: path for name, path in every.items() if path}

    @property
    def linears(self) -> dict[str, str]:
        """Weight of BlockWeights -> path, of the linear layers."""
        every = {"q": self.qkv or self.q, "k": "" if self.qkv else self.k, "v": "" if self.qkv else self.v,
                 "o": self.o, "gate": self.gate, "up": self.up, "down": self.down}  # fmt: skip
        return {name: path for name, path in every.items() if path}


def _decoder(family: str, name: str, **options: object) -> LayerSpec:
    """A decoder layer with Llama's names; its classes start with `name`."""
    classes = {"self_attn": f"{name}Attention", "mlp": f"{name}MLP"}
    given = {"layer_class": f"{name}DecoderLayer", "norm_class": f"{name}RMSNorm", "classes": classes, **options}
    return LayerSpec(family, **given)  # type: ignore[arg-type]


_LLAMA = _decoder("llama", "Llama")
_PLAIN_MLP = {"mlp": "plain", "gate": ""}
_FUSED_GATE_UP = {"mlp": "gated_stacked", "gate": "", "up": "mlp.gate_up_proj", "activation": "mlp.activation_fn"}
_LAYER_NORM = {"norm": "layer", "norm_class": _TORCH_NORM, "eps": "eps"}
_BERT = LayerSpec(
    "bert", "BertLayer",
    {"attention": "BertAttention", "attention.self": "BertSelfAttention", "attention.output": "BertSelfOutput",
     "intermediate": "BertIntermediate", "output": "BertOutput"},
    attention="attention.self", attn_norm="", attn_out_norm="attention.output.LayerNorm", mlp_norm="",
    mlp_out_norm="output.LayerNorm", q="attention.self.query", k="attention.self.key", v="attention.self.value",
    o="attention.output.dense", up="intermediate.dense", down="output.dense", activation="intermediate.intermediate_act_fn",
    head_dim="attention_head_size", dropouts=("attention.self.dropout", "attention.output.dropout", "output.dropout"),
    residual="post", rope="", **_PLAIN_MLP, **_LAYER_NORM,
)  # fmt: skip

_ENTRIES = (
    _LLAMA,
    _decoder("mistral", "Mistral"),
    _decoder("qwen2", "Qwen2"),
    _decoder("qwen3", "Qwen3", qk_norm="head"),
    _decoder("gemma", "Gemma", eps="eps", weight_offset=1.0, round_early=False),
    _decoder(
        "phi3", "Phi3", qkv="self_attn.qkv_proj", qkv_layout="stacked", partial=True, **_FUSED_GATE_UP,
        dropouts=("self_attn.attention_dropout", "resid_attn_dropout", "resid_mlp_dropout"),
    ),  # fmt: skip
    LayerSpec(
        "gpt2", "GPT2Block", {"attn": "GPT2Attention", "mlp": "GPT2MLP"}, linear_class=_CONV1D, attention="attn",
        attn_norm="ln_1", mlp_norm="ln_2", qkv="attn.c_attn", qkv_layout="stacked", o="attn.c_proj", up="mlp.c_fc",
        down="mlp.c_proj", activation="mlp.act", rope="", dropouts=("attn.attn_dropout", "attn.resid_dropout", "mlp.dropout"),
        **_PLAIN_MLP, **_LAYER_NORM,
    ),
    LayerSpec(
        "gpt_neox", "GPTNeoXLayer", {"attention": "GPTNeoXAttention", "mlp": "GPTNeoXMLP"}, attention="attention",
        qkv="attention.query_key_value", qkv_layout="per_head", o="attention.dense", up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h", activation="mlp.act", head_dim="head_size", partial=True,
        switches={"use_parallel_residual": ("residual", {True: "parallel", False: "sequential"})},
        dropouts=("attention.attention_dropout", "post_attention_dropout", "post_mlp_dropout"), **_PLAIN_MLP, **_LAYER_NORM,
    ),
    _decoder(
        "starcoder2", "Starcoder2", up="mlp.c_fc", down="mlp.c_proj", activation="mlp.act",
        dropouts=("self_attn.attention_dropout", "self_attn.residual_dropout", "mlp.residual_dropout"),
        **_PLAIN_MLP, **_LAYER_NORM,
    ),
    _decoder(
        "olmo2", "Olmo2", attn_norm="", attn_out_norm="post_attention_layernorm", mlp_norm="",
        mlp_out_norm="post_feedforward_layernorm", round_early=False, qk_norm="full",
    ),
    _decoder(
        "cohere", "Cohere", norm_class="CohereLayerNorm", norm="layer", mlp_norm="", residual="parallel", rope="interleaved",
        tables="repeat", switches={"self_attn.use_qk_norm": ("qk_norm", {True: "head", False: ""})},
    ),
    _decoder("granite", "Granite", branch_scale="residual_multiplier"),
    _decoder("smollm3", "SmolLM3", switches={"self_attn.use_rope": ("rope", {True: "half", False: ""})}),
    _decoder("glm", "Glm", rope="interleaved", partial=True, **_FUSED_GATE_UP),
    _decoder(
        "stablelm", "StableLm", partial=True, dropouts=("self_attn.attention_dropout", "dropout"),
        switches={"use_parallel_residual": ("residual", {True: "parallel", False: "sequential"})},
        refused={"self_attn.qk_layernorm": "a LayerNorm of its own for every head has no kernel"}, **_LAYER_NORM,
    ),
    _BERT,
    replace(
        _BERT, family="roberta", layer_class="RobertaLayer",
        classes={path: name.replace("Bert", "Roberta") for path, name in _BERT.classes.items()},
    ),
    LayerSpec(
        "vit", "ViTLayer", {"attention": "ViTAttention", "mlp": "ViTMLP"}, attention="attention", attn_norm="layernorm_before",
        mlp_norm="layernorm_after", q="attention.q_proj", k="attention.k_proj", v="attention.v_proj", o="attention.o_proj",
        up="mlp.fc1", down="mlp.fc2", activation="mlp.activation_fn", rope="",
        dropouts=("attention.attention_dropout", "dropout"), **_PLAIN_MLP, **_LAYER_NORM,
    ),
)  # fmt: skip
SPECS = {spec.layer_class: spec for spec in _ENTRIES}

# Layers that transformers has and no kernel takes yet: module under transformers.models -> class -> what is missing.
WAITING = {
    "Gemma2DecoderLayer": "attention logit softcapping has no kernel yet",
    "Gemma3DecoderLayer": "attention windows have no kernel yet",
    "Cohere2DecoderLayer": "attention windows have no kernel yet",
    "Olmo3DecoderLayer": "attention windows have no kernel yet",
    "ModernBertEncoderLayer": "attention windows have no kernel yet",
    "GptOssDecoderLayer": "attention sinks and experts have no kernel yet",
    "MixtralDecoderLayer": "experts (MoE) have no kernel yet",
    "Qwen2MoeDecoderLayer": "experts (MoE) have no kernel yet",
    "Qwen3MoeDecoderLayer": "experts (MoE) have no kernel yet",
    "OlmoeDecoderLayer": "experts (MoE) have no kernel yet",
    "Glm4MoeDecoderLayer": "experts (MoE) have no kernel yet",
    "DeepseekV2DecoderLayer": "multi-head latent attention has no kernel yet",
    "DeepseekV3DecoderLayer": "multi-head latent attention has no kernel yet",
}


def known_class(cls: type) -> type | None:
    """The class of the MRO that has an entry. Wrappers such as FSDP2's put a class of another name in front of it."""
    return next((b for b in cls.__mro__ if b.__name__ in SPECS and b.__module__ == SPECS[b.__name__].home), None)


def waiting(cls: type) -> str:
    """Why no kernel takes a layer class of transformers that has no entry yet, or an empty string."""
    ours = (b for b in cls.__mro__ if b.__module__.startswith("transformers.models."))
    return next((WAITING[b.__name__] for b in ours if b.__name__ in WAITING), "")

"""Architectures as data: where a layer keeps its parts, and the numerics that its code (not its config) fixes.

One entry covers one layer class of transformers. Sizes, epsilons, the softmax scale and the activation are not here: they
are read from the live module, so that a change to it is seen. Paths are dotted and start at the layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

_ATTENTION_BIAS: dict[str, str | bool] = {"qkv": "attention_bias", "o": "attention_bias", "mlp": False}
_TORCH_NORM = "torch.nn.modules.normalization.LayerNorm"
_CONV1D = "transformers.pytorch_utils.Conv1D"


@dataclass(frozen=True)
class Sparse:
    """Where a layer keeps a mixture of experts, and of what class its parts are; its router is the family's in `routers`.

    classes: path -> class, the block first, then what it has beside the router and linear layers. experts, shared, shared_gate:
    paths, the last two "" where there is none; a shared expert has gate_proj, up_proj, down_proj and act_fn. noises: numbers that
    must be zero in training, and the word of the config that sets them. router_class: "" for that of the family's router.

    The rest is for FusedBlock. number, ffn: the words for how many experts there are and for their width; shared_ffn: those whose
    product is the width of the shared expert. transposed, interleaved: how the experts' weights lie; biased: whether they have
    biases. clamp: alpha and limit of a clamped gate; None: the gate is the config's activation.
    """

    classes: Mapping[str, str]
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    shared: str = ""
    shared_gate: str = ""
    noises: Mapping[str, str] = field(default_factory=dict)
    router_class: str = ""
    number: str = "num_experts"
    ffn: str = "moe_intermediate_size"
    shared_ffn: tuple[str, ...] = ()
    transposed: bool = False
    interleaved: bool = False
    biased: bool = False
    clamp: tuple[float, float] | None = None

    @property
    def block(self) -> str:
        """Path of the module that a layer without experts has a dense MLP in the place of."""
        return next(iter(self.classes))


@dataclass(frozen=True)
class MixtureSpec:
    """The block of experts of a layer that waits for a kernel: the block is fused alone. Paths in sparse start at the block, of
    whose own class its `classes` say nothing. The rest is as in LayerSpec."""

    family: str
    block_class: str
    sparse: Sparse
    linear_class: str = "torch.nn.modules.linear.Linear"

    @property
    def home(self) -> str:
        """The module of transformers that defines the block."""
        return f"transformers.models.{self.family}.modeling_{self.family}"


@dataclass(frozen=True)
class LayerSpec:
    """Paths and numerics of one layer class. The options are those of fusedblock.blocks.BlockSpec.

    family, module, layer_class: as transformers names them. classes: path -> exact name of the class, defined in `module`, whose
    arithmetic the fused layer replaces. norm_class and linear_class: of its norms and linear layers, in `module` unless dotted.
    norm paths: "" where the architecture has none; attn_out_norm and mlp_out_norm follow a branch. qkv: the one fused projection,
    instead of q, k, v. gate "": an MLP of two layers, or with mlp "gated_stacked" the gate is the first half of `up`.
    q_norm, k_norm: names in the attention, for layers that have them. dropouts: modules or numbers that must be zero in training,
    and the word of the config that sets them.
    scaling: the attention's softmax scale, "" for head_dim**-0.5. window: path of how many tokens a token sees to one side,
    itself among them; softcap: of the bound of the logits. first_lacks: norms that the first layer has torch.nn.Identity for.
    switches: what live attributes decide: path -> (field of BlockSpec, {value: field's value}). refused: path of an attribute ->
    why no kernel exists if it is true. partial: the tables may be narrower than a head. sinks: path of the parameter. sparse: the
    mixture of a layer whose MLP is not of the class in `classes`, which names none where every layer has experts.

    The rest is for FusedBlock, which builds the layer without transformers. words: words of its config.json beside those that
    `config_words` derives, and the values transformers gives them where they are absent. aliases: other names of words. biases:
    which of the linear layers and LayerNorms have one, or the word that decides. scale: the word for the softmax scale, "" for
    head_dim**-0.5; scale_power: what to raise it to. period: without layer_types, after how many layers with a window one has
    none, and from max_window_layers on all; period_start: the index of the first layer that counts. thetas: layer type ->
    rope_theta where layers differ in it. causal: whether a query sees earlier keys only, or the word that decides. head_weights:
    q_norm and k_norm have weights for every head. shared_norm: with parallel branches there is no mlp_norm. ffn_ratio:
    intermediate_size by hidden_size where the config gives none. rope_kinds: what the family takes a rope_type for.

    For files: old_names: module -> the module of the layer whose weights a checkpoint holds under that name, because transformers
    has renamed it and writes the old name still. old_buffers: what checkpoints hold and no layer has any more.
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
    dropouts: Mapping[str, str] = field(default_factory=lambda: {"self_attn.attention_dropout": "attention_dropout"})
    branch_scale: str = ""
    scaling: str = "scaling"
    window: str = ""
    softcap: str = ""
    first_lacks: tuple[str, ...] = ()
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
    sinks: str = ""
    sparse: Sparse | None = None
    words: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    biases: Mapping[str, str | bool] = field(default_factory=lambda: {**_ATTENTION_BIAS})
    scale: str = ""
    scale_power: float = 1.0
    period: int = 0
    period_start: int = 1
    thetas: Mapping[str, float] = field(default_factory=dict)
    causal: str | bool = True
    head_weights: bool = False
    shared_norm: bool = False
    ffn_ratio: int = 0
    rope_kinds: Mapping[str, str] = field(default_factory=dict)
    old_names: Mapping[str, str] = field(default_factory=dict)
    old_buffers: tuple[str, ...] = ()

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

    @property
    def config_words(self) -> dict[str, Any]:
        """Every word of the config that the layer reads, beside its sizes -> value where it is absent."""
        words: dict[str, Any] = {"hidden_act": "silu"}
        words |= {"rms_norm_eps": 1e-6} if self.norm == "rms" else {"layer_norm_eps": 1e-5}
        if self.rope:
            words |= {"rope_theta": 10000.0, "rope_parameters": None, "max_position_embeddings": None}
        if self.partial:
            words["partial_rotary_factor"] = 1.0
        words |= {word: False for word in self.biases.values() if isinstance(word, str)}
        words |= {word: 0.0 for word in (*self.dropouts.values(), *(self.sparse.noises.values() if self.sparse else ()))}
        words |= {path.rpartition(".")[2]: False for path in self.refused}
        if self.period:
            words |= {"sliding_window": 4096, "layer_types": None, "sliding_window_pattern": self.period}
        if self.thetas:
            words |= {"rope_theta": self.thetas["full_attention"], "rope_local_base_freq": self.thetas["sliding_attention"]}
        if isinstance(self.causal, str):
            words[self.causal] = False
        return words | dict(self.words)


def _decoder(family: str, name: str, **options: object) -> LayerSpec:
    """A decoder layer with Llama's names; its classes start with `name`."""
    classes = {"self_attn": f"{name}Attention", "mlp": f"{name}MLP"}
    names = {"layer_class": f"{name}DecoderLayer", "norm_class": f"{name}RMSNorm", "classes": classes}
    given = {**names, "words": _GROUPS, **options}
    return LayerSpec(family, **given)  # type: ignore[arg-type]


def _mixture(family: str, name: str, block: str, dense: bool = False, shared: str = "", **options: Any) -> LayerSpec:
    """A decoder layer whose MLP is a mixture, the class `name` + `block`; dense: not in all layers. options: Sparse's too."""
    classes = {"self_attn": f"{name}Attention", **({"mlp": f"{name}MLP"} if dense else {})}
    own = {f.name: options.pop(f.name) for f in fields(Sparse) if f.name in options}
    parts = {"mlp": name + block, "mlp.experts": f"{name}Experts", **({shared: f"{name}MLP"} if shared else {})}
    return _decoder(family, name, classes=classes, sparse=Sparse(parts, shared=shared, **own), **options)


_GROUPS = {"num_key_value_heads": None, "head_dim": None}
_WINDOWS = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28, "layer_types": None}
_QWEN_EXPERTS = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": ()}
_OWN_WINDOW = "self_attn.sliding_window"
_MODEL_WINDOW = "self_attn.config.sliding_window"
_BIASES = {"qkv": True, "o": True, "mlp": True}
_NO_BIASES = dict.fromkeys(_BIASES, False)
_LLAMA_BIASES = {**_ATTENTION_BIAS, "mlp": "mlp_bias"}
_LLAMA = _decoder("llama", "Llama", biases=_LLAMA_BIASES)
_PLAIN_MLP: dict[str, Any] = {"mlp": "plain", "gate": ""}
_FUSED_GATE_UP: dict[str, Any] = {"mlp": "gated_stacked", "gate": "", "up": "mlp.gate_up_proj", "activation": "mlp.activation_fn"}
_GEMMA = {"num_key_value_heads": 4, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
          "use_bidirectional_attention": None}  # fmt: skip
_SANDWICH: dict[str, Any] = {
    "attn_out_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm", "eps": "eps", "weight_offset": 1.0, "round_early": False,
    "scale": "query_pre_attn_scalar", "scale_power": -0.5, "aliases": {"hidden_activation": "hidden_act"},
}  # fmt: skip
_LAYER_NORM: dict[str, Any] = {"norm": "layer", "norm_class": _TORCH_NORM, "eps": "eps"}
_ENCODER = {"hidden_act": "gelu", "layer_norm_eps": 1e-12}
_BERT = LayerSpec(
    "bert", "BertLayer",
    {"attention": "BertAttention", "attention.self": "BertSelfAttention", "attention.output": "BertSelfOutput",
     "intermediate": "BertIntermediate", "output": "BertOutput"},
    attention="attention.self", attn_norm="", attn_out_norm="attention.output.LayerNorm", mlp_norm="",
    mlp_out_norm="output.LayerNorm", q="attention.self.query", k="attention.self.key", v="attention.self.value",
    o="attention.output.dense", up="intermediate.dense", down="output.dense", activation="intermediate.intermediate_act_fn",
    head_dim="attention_head_size", residual="post", rope="", biases=_BIASES, causal="is_decoder",
    words={**_ENCODER, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    dropouts={"attention.self.dropout": "attention_probs_dropout_prob", "attention.output.dropout": "hidden_dropout_prob",
              "output.dropout": "hidden_dropout_prob"},
    **_PLAIN_MLP, **_LAYER_NORM,
)  # fmt: skip

_ENTRIES = (
    _LLAMA,
    _decoder(
        "mistral", "Mistral", window=_MODEL_WINDOW, biases=_NO_BIASES,
        words={**_GROUPS, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    _decoder(
        "qwen2", "Qwen2", window=_OWN_WINDOW, biases={**_NO_BIASES, "qkv": True},
        words={**_GROUPS, "num_key_value_heads": 32, **_WINDOWS},
    ),
    _decoder(
        "qwen3", "Qwen3", window=_OWN_WINDOW, qk_norm="head", words={"num_key_value_heads": 32, "head_dim": 128, **_WINDOWS},
    ),
    _decoder(
        "gemma", "Gemma", eps="eps", weight_offset=1.0, round_early=False,
        words={"num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
               "use_bidirectional_attention": None},
    ),
    _decoder(
        "gemma2", "Gemma2", window=_OWN_WINDOW, softcap="self_attn.attn_logit_softcapping", period=2, **_SANDWICH,
        words={**_GEMMA, "attn_logit_softcapping": 50.0},
    ),
    _decoder(
        "gemma3_text", "Gemma3", module="transformers.models.gemma3.modeling_gemma3", window=_OWN_WINDOW, qk_norm="head",
        period=6, thetas={"full_attention": 1e6, "sliding_attention": 1e4}, **_SANDWICH,
        words={**_GEMMA, "use_bidirectional_attention": False},
    ),
    _decoder(
        "phi3", "Phi3", window=_MODEL_WINDOW, qkv="self_attn.qkv_proj", qkv_layout="stacked", partial=True,
        biases=_NO_BIASES, **_FUSED_GATE_UP,
        dropouts={"self_attn.attention_dropout": "attention_dropout", "resid_attn_dropout": "resid_pdrop",
                  "resid_mlp_dropout": "resid_pdrop"},
        words={**_GROUPS, "rms_norm_eps": 1e-5, "sliding_window": None}, rope_kinds={"su": "longrope", "yarn": "longrope"},
    ),  # fmt: skip
    LayerSpec(
        "gpt2", "GPT2Block", {"attn": "GPT2Attention", "mlp": "GPT2MLP"}, linear_class=_CONV1D, attention="attn",
        attn_norm="ln_1", mlp_norm="ln_2", qkv="attn.c_attn", qkv_layout="stacked", o="attn.c_proj", up="mlp.c_fc",
        down="mlp.c_proj", activation="mlp.act", rope="", biases=_BIASES, ffn_ratio=4,
        dropouts={"attn.attn_dropout": "attn_pdrop", "attn.resid_dropout": "resid_pdrop", "mlp.dropout": "resid_pdrop"},
        words={"hidden_act": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
               "attn_pdrop": 0.1, "resid_pdrop": 0.1},
        aliases={"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_inner": "intermediate_size",
                 "n_layer": "num_hidden_layers", "activation_function": "hidden_act", "layer_norm_epsilon": "layer_norm_eps"},
        old_buffers=("attn.bias", "attn.masked_bias"), **_PLAIN_MLP, **_LAYER_NORM,
    ),
    LayerSpec(
        "gpt_neox", "GPTNeoXLayer", {"attention": "GPTNeoXAttention", "mlp": "GPTNeoXMLP"}, attention="attention",
        qkv="attention.query_key_value", qkv_layout="per_head", o="attention.dense", up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h", activation="mlp.act", head_dim="head_size", partial=True,
        switches={"use_parallel_residual": ("residual", {True: "parallel", False: "sequential"})},
        dropouts={"attention.attention_dropout": "attention_dropout", "post_attention_dropout": "hidden_dropout",
                  "post_mlp_dropout": "hidden_dropout"},
        biases={**_ATTENTION_BIAS, "mlp": True}, aliases={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        words={"hidden_act": "gelu", "attention_bias": True, "use_parallel_residual": True, "partial_rotary_factor": 0.25},
        old_buffers=("attention.bias", "attention.masked_bias"), **_PLAIN_MLP, **_LAYER_NORM,
    ),
    _decoder(
        "starcoder2", "Starcoder2", window=_MODEL_WINDOW, up="mlp.c_fc", down="mlp.c_proj", activation="mlp.act",
        dropouts={"self_attn.attention_dropout": "attention_dropout", "self_attn.residual_dropout": "residual_dropout",
                  "mlp.residual_dropout": "residual_dropout"},
        biases=dict.fromkeys(_BIASES, "use_bias"), aliases={"norm_epsilon": "layer_norm_eps"},
        words={**_GROUPS, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": None},
        **_PLAIN_MLP, **_LAYER_NORM,
    ),
    _decoder(
        "olmo2", "Olmo2", attn_norm="", attn_out_norm="post_attention_layernorm", mlp_norm="",
        mlp_out_norm="post_feedforward_layernorm", round_early=False, qk_norm="full", words={**_GROUPS, "rms_norm_eps": 1e-5},
    ),
    _decoder(
        "olmo3", "Olmo3", attn_norm="", attn_out_norm="post_attention_layernorm", mlp_norm="",
        mlp_out_norm="post_feedforward_layernorm", round_early=False, qk_norm="full", window=_OWN_WINDOW, period=4,
        thetas=dict.fromkeys(("full_attention", "sliding_attention"), 500000.0), words={**_GROUPS, "rms_norm_eps": 1e-5},
    ),
    _decoder(
        "cohere", "Cohere", norm_class="CohereLayerNorm", norm="layer", mlp_norm="", residual="parallel", rope="interleaved",
        tables="repeat", switches={"self_attn.use_qk_norm": ("qk_norm", {True: "head", False: ""})}, head_weights=True,
        words={**_GROUPS, "use_qk_norm": False, "rope_theta": 500000.0},
    ),
    _decoder(
        "cohere2", "Cohere2", norm_class="Cohere2LayerNorm", norm="layer", mlp_norm="", residual="parallel", rope="interleaved",
        tables="repeat", window=_OWN_WINDOW, switches={_OWN_WINDOW: ("rope", {True: "interleaved", False: ""})}, period=4,
    ),
    _decoder(
        "granite", "Granite", branch_scale="residual_multiplier", scale="attention_multiplier", biases=_LLAMA_BIASES,
        words={**_GROUPS, "residual_multiplier": 1.0, "attention_multiplier": 1.0},
    ),
    _decoder(
        "smollm3", "SmolLM3", window=_OWN_WINDOW, switches={"self_attn.use_rope": ("rope", {True: "half", False: ""})},
        biases=_LLAMA_BIASES,
        words={**_GROUPS, "num_key_value_heads": 4, "rope_theta": 2000000.0, "no_rope_layers": None, "no_rope_layer_interval": 4,
               "sliding_window": None, "use_sliding_window": False, "layer_types": None},
    ),
    _decoder(
        "glm", "Glm", rope="interleaved", partial=True, biases={**_NO_BIASES, "qkv": "attention_bias"}, **_FUSED_GATE_UP,
        words={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5,
               "attention_bias": True},
    ),
    _decoder(
        "stablelm", "StableLm", partial=True, shared_norm=True, biases={**_NO_BIASES, "qkv": "use_qkv_bias"},
        dropouts={"self_attn.attention_dropout": "attention_dropout", "dropout": "hidden_dropout"},
        words={"num_key_value_heads": 32, "use_parallel_residual": False, "partial_rotary_factor": 0.25},
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
        up="mlp.fc1", down="mlp.fc2", activation="mlp.activation_fn", rope="", causal=False,
        dropouts={"attention.attention_dropout": "attention_probs_dropout_prob", "dropout": "hidden_dropout_prob"},
        biases={**_BIASES, "qkv": "qkv_bias"}, words={**_ENCODER, "qkv_bias": True}, **_PLAIN_MLP, **_LAYER_NORM,
        old_names={"attention.attention.query": "attention.q_proj", "attention.attention.key": "attention.k_proj",
                   "attention.attention.value": "attention.v_proj", "attention.output.dense": "attention.o_proj",
                   "intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2"},
    ),
    LayerSpec(
        "modernbert", "ModernBertEncoderLayer", {"attn": "ModernBertAttention", "mlp": "ModernBertMLP"}, attention="attn",
        attn_norm="attn_norm", mlp_norm="mlp_norm", first_lacks=("attn_norm",), qkv="attn.Wqkv", qkv_layout="stacked",
        o="attn.Wo", gate="", up="mlp.Wi", down="mlp.Wo", mlp="gated_stacked", activation="mlp.act", scaling="",
        window="attn.sliding_window", causal=False, period=3, period_start=0,
        dropouts={"attn.attention_dropout": "attention_dropout", "attn.out_drop": "attention_dropout", "mlp.drop": "mlp_dropout"},
        biases={**_ATTENTION_BIAS, "mlp": "mlp_bias", "norm": "norm_bias"}, words={"hidden_act": "gelu", "sliding_window": 128},
        thetas={"full_attention": 160000.0, "sliding_attention": 10000.0},
        aliases={"hidden_activation": "hidden_act", "norm_eps": "layer_norm_eps", "local_attention": "sliding_window",
                 "global_attn_every_n_layers": "sliding_window_pattern", "global_rope_theta": "rope_theta",
                 "local_rope_theta": "rope_local_base_freq"},
        **_LAYER_NORM,
    ),
    _mixture(
        "mixtral", "Mixtral", "SparseMoeBlock", window=_MODEL_WINDOW, noises={"mlp.jitter_noise": "router_jitter_noise"},
        number="num_local_experts", ffn="intermediate_size", biases=_NO_BIASES, aliases={"num_experts": "num_local_experts"},
        words={**_GROUPS, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None,
               "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    _mixture(
        "qwen2_moe", "Qwen2Moe", "SparseMoeBlock", dense=True, shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate",
        window=_OWN_WINDOW, shared_ffn=("shared_expert_intermediate_size",), biases={**_NO_BIASES, "qkv": "qkv_bias"}, period=2,
        words={**_GROUPS, "num_key_value_heads": 16, "qkv_bias": True, "use_sliding_window": False, "max_window_layers": 28,
               **_QWEN_EXPERTS, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
               "shared_expert_intermediate_size": 5632},
    ),
    _mixture(
        "qwen3_moe", "Qwen3Moe", "SparseMoeBlock", dense=True, window=_OWN_WINDOW, qk_norm="head",
        aliases={"num_local_experts": "num_experts"},
        words={**_GROUPS, "num_key_value_heads": 4, "sliding_window": 4096, "use_sliding_window": False,
               **_QWEN_EXPERTS, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    _mixture(
        "olmoe", "Olmoe", "SparseMoeBlock", window=_MODEL_WINDOW, qk_norm="full", ffn="intermediate_size",
        refused={"self_attn.config.clip_qkv": "clip_qkv has no kernel"}, aliases={"num_local_experts": "num_experts"},
        words={**_GROUPS, "rms_norm_eps": 1e-5, "clip_qkv": None, "num_experts": 64, "num_experts_per_tok": 8,
               "norm_topk_prob": False},
    ),
    _mixture(
        "gpt_oss", "GptOss", "MLP", router="mlp.router", window=_OWN_WINDOW, round_early=False, tables="short",
        sinks="self_attn.sinks", number="num_local_experts", ffn="intermediate_size", transposed=True, interleaved=True,
        biased=True, clamp=(1.702, 7.0), period=2, aliases={"num_experts": "num_local_experts"},
        words={"num_key_value_heads": 8, "head_dim": 64, "attention_bias": True, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
               "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                                   "original_max_position_embeddings": 4096},
               "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4},
    ),
    _mixture(
        "glm4_moe", "Glm4Moe", "MoE", dense=True, shared="mlp.shared_experts", partial=True, number="n_routed_experts",
        shared_ffn=("moe_intermediate_size", "n_shared_experts"), biases={**_NO_BIASES, "qkv": "attention_bias"},
        switches={"self_attn.use_qk_norm": ("qk_norm", {True: "head", False: ""})},
        aliases={"num_local_experts": "n_routed_experts"},
        words={**_GROUPS, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "use_qk_norm": False,
               "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
               "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
    ),
)  # fmt: skip
# Names of parameters in checkpoints that were once TensorFlow's, of any family.
OLD_PARAMETERS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
SPECS = {spec.layer_class: spec for spec in _ENTRIES}
FAMILIES = {spec.family: spec for spec in _ENTRIES}

# Layers of transformers whose attention waits for a kernel, and where they keep what does not.
LATENT = {spec.layer_class: spec for spec in (
    _mixture("deepseek_v2", "DeepseekV2", "Moe", dense=True, shared="mlp.shared_experts"),
    _mixture("deepseek_v3", "DeepseekV3", "MoE", dense=True, shared="mlp.shared_experts"),
)}  # fmt: skip
# Layers of transformers that wait for something: class -> for what.
WAITING = dict.fromkeys(LATENT, "multi-head latent attention has no kernel yet")


def _alone(spec: LayerSpec) -> MixtureSpec:
    """The block of experts of a layer, with paths that start at it."""
    assert spec.sparse is not None
    sparse, start = spec.sparse, f"{spec.sparse.block}."
    parts = {path.removeprefix(start): name for path, name in sparse.classes.items() if path != sparse.block}
    router, experts, shared = (path.removeprefix(start) for path in (sparse.router, sparse.experts, sparse.shared))
    return MixtureSpec(spec.family, sparse.classes[sparse.block], Sparse(parts, router, experts, shared))


# Blocks of experts in them that do not: class -> where it keeps its parts.
BLOCKS = {spec.block_class: spec for spec in map(_alone, LATENT.values())}


def known_class(cls: type) -> type | None:
    """The class of the MRO that has an entry. Wrappers such as FSDP2's put a class of another name in front of it."""
    return next((b for b in cls.__mro__ if b.__name__ in SPECS and b.__module__ == SPECS[b.__name__].home), None)


def latent_class(cls: type) -> type | None:
    """Likewise of the layers of which the block of experts alone is fused."""
    return next((b for b in cls.__mro__ if b.__name__ in LATENT and b.__module__ == LATENT[b.__name__].home), None)


def known_block(cls: type) -> type | None:
    """And of these blocks."""
    return next((b for b in cls.__mro__ if b.__name__ in BLOCKS and b.__module__ == BLOCKS[b.__name__].home), None)


def waiting(cls: type) -> str:
    """Why no kernel takes a layer class of transformers that has no entry yet, or an empty string."""
    ours = (b for b in cls.__mro__ if b.__module__.startswith("transformers.models."))
    return next((WAITING[b.__name__] for b in ours if b.__name__ in WAITING), "")


def waiting_family(model_type: str) -> str:
    """What `waiting` says of the layers of a model_type. Their classes are named after it: gpt_oss, GptOssDecoderLayer."""
    name = model_type.removesuffix("_text").replace("_", "")
    return next((why for cls, why in WAITING.items() if re.sub("(De|En)coderLayer$", "", cls).lower() == name), "")


def supported() -> str:
    """What can be fused, for messages that name what cannot."""
    families = ", ".join(sorted(spec.family for spec in SPECS.values()))
    return f"supported are the families {families} (`fusedblock families` lists their layers)"

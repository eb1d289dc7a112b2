"""Architectures as data: where a decoder layer keeps its parts, and the numerics that its code (not its config) fixes.

One entry covers one layer class of transformers. Sizes, epsilons, the softmax scale and the activation are not here: they
are read from the live module, so that a change to it is seen.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerSpec:
    """A pre-norm decoder layer with RMSNorm, rotary attention in half-split form and a gated MLP.

    The ``*_class`` fields are the exact names of the classes whose arithmetic the fused layer replaces; all others are
    attribute names on the layer, on its attention or on its MLP. weight_offset and round_early: see fusedblock.ops.rms_norm.
    """

    module: str  # where the classes are defined: a name alone may be anybody's
    layer_class: str
    attention_class: str
    mlp_class: str
    norm_class: str
    attention: str = "self_attn"
    mlp: str = "mlp"
    input_norm: str = "input_layernorm"
    post_norm: str = "post_attention_layernorm"
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    activation: str = "act_fn"
    eps: str = "variance_epsilon"
    scale: str = "scaling"
    head_dim: str = "head_dim"
    weight_offset: float = 0.0
    round_early: bool = True


_LLAMA = LayerSpec(
    "transformers.models.llama.modeling_llama", "LlamaDecoderLayer", "LlamaAttention", "LlamaMLP", "LlamaRMSNorm"
)
SPECS = {spec.layer_class: spec for spec in (_LLAMA,)}


def known_class(cls: type) -> type | None:
    """The class of the MRO that has an entry. Wrappers such as FSDP2's put a class of another name in front of it."""
    return next((b for b in cls.__mro__ if b.__name__ in SPECS and b.__module__ == SPECS[b.__name__].module), None)

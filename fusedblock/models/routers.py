"""Routers of mixtures of experts as data: what each family's code fixes, and where its live module keeps the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..ops import RouterSpec

# Attribute of a router -> the word of the config that sets it, where the two differ.
_WORDS = {"top_k": "num_experts_per_tok", "num_group": "n_group"}
_TOP_K = {"top_k": "top_k"}
_NORMED = {**_TOP_K, "renormalise": "norm_topk_prob"}
_GROUPED = {"groups": "num_group", "topk_groups": "topk_group", "scale": "routed_scaling_factor"}


@dataclass(frozen=True)
class Router:
    """layer_class: the router module's class, in transformers.models.<family>.modeling_<family>. spec: what its code fixes.
    live: field of the spec -> attribute of the module that holds it. tensors: argument of moe_route -> attribute.
    ungrouped: attribute and the value with which its groups have no effect."""

    layer_class: str
    spec: RouterSpec
    live: Mapping[str, str]
    tensors: Mapping[str, str] = field(default_factory=lambda: {"weight": "weight"})
    ungrouped: tuple[str, str] | None = None

    @property
    def words(self) -> dict[str, str]:
        """Attribute of the module that `live` names -> the word of the config that sets it."""
        return {attribute: _WORDS.get(attribute, attribute) for attribute in self.live.values()}

    def read(self, module: Any) -> RouterSpec:
        """The spec of a live router."""
        found = {name: getattr(module, attribute) for name, attribute in self.live.items()}
        if self.ungrouped and getattr(module, self.ungrouped[0]) == self.ungrouped[1]:
            found |= {"groups": 1, "topk_groups": 1}
        return replace(self.spec, **found)


def _softmax(layer_class: str, live: Mapping[str, str] = _NORMED, **fixed: Any) -> Router:
    return Router(layer_class, RouterSpec(1, **fixed), live)


def _corrected(layer_class: str) -> Router:
    spec = RouterSpec(1, scoring="sigmoid", group_score="top2", eps=1e-20, round_logits=False, round_weights=False,
                      correction_bias=True)  # fmt: skip
    return Router(layer_class, spec, {**_NORMED, **_GROUPED}, {"weight": "weight", "correction_bias": "e_score_correction_bias"})


ROUTERS = {
    "mixtral": _softmax("MixtralTopKRouter", _TOP_K, renormalise=True, round_weights=False),
    "qwen2_moe": _softmax("Qwen2MoeTopKRouter"),
    "qwen3_moe": _softmax("Qwen3MoeTopKRouter"),
    "qwen3_next": _softmax("Qwen3NextTopKRouter"),
    "olmoe": _softmax("OlmoeTopKRouter"),
    "gpt_oss": Router("GptOssTopKRouter", RouterSpec(1, scoring="softmax_chosen", bias=True), _TOP_K,
                      {"weight": "weight", "bias": "bias"}),
    "deepseek_v2": Router("DeepseekV2TopkRouter", RouterSpec(1, round_logits=False, round_weights=False), {**_TOP_K, **_GROUPED},
                          ungrouped=("topk_method", "greedy")),
    "deepseek_v3": _corrected("DeepseekV3TopkRouter"),
    "glm4_moe": _corrected("Glm4MoeTopkRouter"),
}  # fmt: skip

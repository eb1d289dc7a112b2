"""fusedblock's grouped GEMMs as an experts implementation of transformers, for any of its mixtures of experts.

    fusedblock.register_experts()
    model = AutoModel.from_pretrained(path, experts_implementation="fusedblock")

A model's router stays its own: its experts module hands over the tokens, their experts and their weights, and
`experts_forward` reads the module's 3-D parameters in place. Importing this module imports no transformers.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from .interface import NAME, autocast_dtype

_MODULE = "transformers.integrations.moe"
_OURS = "fusedblock.models.block_parts"
_PLAIN = (f"{_MODULE}._default_apply_gate", f"{_OURS}.Experts._apply_gate")  # act_fn(gate) * up
_MODELS = "transformers.models"
# Gates of a class's own that are ops.CLAMPED, and the attributes that hold its alpha and limit.
_CLAMPED = {
    f"{_MODELS}.gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate": ("alpha", "limit"),
    f"{_MODELS}.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLExperts._apply_gate": ("swiglu_alpha", "swiglu_limit"),
    f"{_MODELS}.openai_privacy_filter.modeling_openai_privacy_filter.OpenAIPrivacyFilterExperts._apply_gate": ("alpha", "limit"),
    f"{_OURS}.ClampedExperts._apply_gate": ("alpha", "limit"),
}
# Values of config._experts_implementation under which the experts compute what they say: transformers' own, and ours.
COMPUTING = (None, "eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe", NAME)
# What an experts module holds; weights that are adapted or unpacked on reading are still read by their names.
_CHILDREN = frozenset({"act_fn", "parametrizations"})


def register_experts() -> None:
    """Register "fusedblock" with transformers as an experts implementation: experts_implementation="fusedblock".

    The experts of any mixture of transformers that asks for them by name then run as an index made on the device and grouped
    GEMMs that read the weights where they are: gate and up rows halved or interleaved, transposed or not, with biases or
    without; silu, gelu, its tanh form, relu and its square, and gpt-oss's clamped gate; fp32, fp16 and bf16, forward and
    backward. Slots whose expert is of another rank (expert parallelism) have no row. Experts that compute something else raise
    ValueError, which names it, in their forward.

    `fuse` calls this, and so does importing fusedblock where transformers has been imported already (importing transformers
    later registers nothing). Calling it again changes nothing. Raises ImportError if there is no transformers.
    """
    importlib.import_module(_MODULE).ExpertsInterface.register(NAME, experts_forward)


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts: hidden_states `... hidden`, top_k_index and top_k_weights `tokens top_k`, to `... hidden`."""
    from .. import ops  # on first use: it brings the kernels

    activation, alpha, limit = _gate(module)
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    dtype = autocast_dtype(x)  # as torch's own products have it
    x, gate_up, down = (t if dtype is None else t.to(dtype) for t in (x, module.gate_up_proj, module.down_proj))
    gate_up_bias = down_bias = None
    if module.has_bias:
        biases = module.gate_up_proj_bias, module.down_proj_bias
        gate_up_bias, down_bias = biases if dtype is None else (t.to(dtype) for t in biases)
    tokens, top_k, experts = x.shape[0], top_k_index.shape[-1], gate_up.shape[0]
    tile_rows = ops.choose_tile_rows(tokens, top_k, experts, x.dtype.itemsize, ops.target_of(x.device))
    index = ops.moe_index(top_k_index, experts, tile_rows)  # int64 too: of slots that it gives no row nothing else is read
    out = ops.moe_experts(
        x, gate_up, down, top_k_weights, top_k_index.to(torch.int32), index, tile_rows=tile_rows, activation=activation,
        gate_up_bias=gate_up_bias, down_bias=down_bias, alpha=alpha, limit=limit, transposed=module.is_transposed,
        interleaved=not module.is_concatenated,
    )  # fmt: skip
    return out.view(hidden_states.shape).to(hidden_states.dtype)


def _gate(module: Any) -> tuple[str, float, float]:
    """(activation of ops.moe_experts, alpha, limit) of an experts module. Raises ValueError for another computation."""
    gate = read_gate(module)
    if isinstance(gate, str):
        raise _refused(module, gate)
    return gate


def read_gate(module: Any) -> tuple[str, float, float] | str:
    """(activation of ops.moe_experts, alpha, limit) of an experts module, or why its computation is another."""
    from ..ops import CLAMPED
    from .binding import activation_of, refusal

    if not module.has_gate:
        return "its experts have no gate"
    more = sorted(name for name in module._modules if name not in _CHILDREN)
    if more:
        return f"its experts have {', '.join(more)} too"
    if "_apply_gate" in module.__dict__:
        return "it has an instance _apply_gate"
    gate = _gate_of(type(module))
    if gate in _PLAIN:
        activation = activation_of(module.act_fn)
        if activation is None:
            name = getattr(module.act_fn, "__name__", type(module.act_fn).__name__)
            return f"activation {name} has no kernel"
        if isinstance(module.act_fn, torch.nn.Module) and (why := refusal("act_fn", module.act_fn)):
            return why
        return activation, 0.0, 0.0
    if gate not in _CLAMPED:
        return f"its gate, {gate}, has no kernel"
    alpha, limit = (float(getattr(module, attribute)) for attribute in _CLAMPED[gate])
    return CLAMPED, alpha, limit


@torch.compiler.assume_constant_result  # it cannot look at a function's name
def _gate_of(kind: type) -> str:
    function = kind._apply_gate  # type: ignore[attr-defined]
    return f"{function.__module__}.{function.__qualname__}"


def _refused(module: Any, why: str) -> ValueError:
    return ValueError(
        f"{NAME} experts: {type(module).__name__}: {why}; use experts_implementation='grouped_mm', 'batched_mm' or 'eager'"
    )

"""The modules of a FusedBlock: what `bind` looks for, at the places of an entry of the table of architectures."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from . import table
from .block_config import BlockConfig
from .routers import ROUTERS


class Part(nn.Module):
    """A named place for parts and parameters of a block. The block computes; its parts only hold."""

    def hold(self, name: str, shape: tuple[int, ...], device: Any, dtype: Any) -> None:
        """A parameter."""
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))

    def reset_parameters(self) -> None:
        """Biases to zero, and the rest as transformers' models begin."""
        for name, parameter in self._parameters.items():
            if parameter is not None and name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter is not None:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the parts of a FusedBlock compute together, call the block")

    def extra_repr(self) -> str:
        return ", ".join(f"{name} {tuple(parameter.shape)}" for name, parameter in self.named_parameters(recurse=False))


class Norm(nn.Module):
    """RMSNorm, or LayerNorm without a bias, over the last axis."""

    def __init__(self, shape: tuple[int, ...], spec: table.LayerSpec, eps: float, device: Any, dtype: Any) -> None:
        super().__init__()
        self.kind, self.eps, self.weight_offset, self.round_early = spec.norm, eps, spec.weight_offset, spec.round_early
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            return ops.layer_norm(x, self.weight, eps=self.eps)
        return ops.rms_norm(x, self.weight, eps=self.eps, weight_offset=self.weight_offset, round_early=self.round_early)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, kind={self.kind!r}, eps={self.eps}"


class Conv1D(nn.Module):
    """A linear layer whose weight is `in_features out_features`, as GPT-2's are."""

    def __init__(self, in_features: int, out_features: int, bias: bool, device: Any, dtype: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight.t(), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.weight.shape[0]}, out_features={self.weight.shape[1]}, bias={self.bias is not None}"


class Router(Part):
    """Of a mixture: weight `experts hidden`, and of some families biases `experts`, one of which corrects the choice only."""

    def __init__(self, config: BlockConfig, experts: int, device: Any, dtype: Any) -> None:
        super().__init__()
        known = ROUTERS[config.model_type]
        self.corrected = known.tensors.get("correction_bias", "")
        for argument, name in known.tensors.items():
            if name != self.corrected:
                self.hold(name, (experts, config.hidden_size) if argument == "weight" else (experts,), device, dtype)
        if self.corrected:
            self.register_buffer(self.corrected, torch.empty(experts, device=device, dtype=torch.float32))
        for attribute, word in known.words.items():
            setattr(self, attribute, getattr(config, word))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.corrected:
            nn.init.zeros_(self._buffers[self.corrected])  # type: ignore[arg-type]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """The correction keeps its dtype whatever the layer is cast to, as in checkpoints: rounded, it would choose others."""
        before = self._buffers.get(self.corrected)
        super()._apply(fn, recurse)
        after = self._buffers.get(self.corrected)
        if before is not None and after is not None and after.dtype is not before.dtype:
            self._buffers[self.corrected] = before.to(after.device)
        return self


class Experts(Part):
    """Stacked: gate_up_proj `experts 2*ffn hidden`, gate's rows before up's, and down_proj `experts hidden ffn`; or transposed
    `experts hidden 2*ffn`, interleaved, and `experts ffn hidden`. Biases `experts 2*ffn` and `experts hidden`."""

    has_gate = True

    def __init__(self, config: BlockConfig, sparse: table.Sparse, device: Any, dtype: Any) -> None:
        super().__init__()
        self.has_bias, self.is_transposed, self.is_concatenated = sparse.biased, sparse.transposed, not sparse.interleaved
        experts, ffn, hidden = getattr(config, sparse.number), getattr(config, sparse.ffn), config.hidden_size
        for name, n, k in (("gate_up_proj", 2 * ffn, hidden), ("down_proj", hidden, ffn)):
            self.hold(name, (experts, k, n) if sparse.transposed else (experts, n, k), device, dtype)
            if sparse.biased:
                self.hold(f"{name}_bias", (experts, n), device, dtype)
        self.reset_parameters()

    def _apply_gate(self, gate_up: Tensor) -> Tensor:  # by its name it is known for act_fn(gate) * up
        return self.forward(gate_up)  # type: ignore[no-any-return]


class ClampedExperts(Experts):
    """With alpha and limit of a clamped gate, for an activation."""

    def __init__(self, config: BlockConfig, sparse: table.Sparse, device: Any, dtype: Any) -> None:
        super().__init__(config, sparse, device, dtype)
        self.alpha, self.limit = sparse.clamp or (0.0, 0.0)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:  # likewise
        return self.forward(gate_up)  # type: ignore[no-any-return]


class ReLUSquaredActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu().square()


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU, "swish": nn.SiLU, "relu": nn.ReLU, "relu2": ReLUSquaredActivation,
    **dict.fromkeys(("gelu", "gelu_python"), nn.GELU),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh"), functools.partial(nn.GELU, approximate="tanh")),
}  # fmt: skip

def _with_our_classes(spec: table.LayerSpec, sparse: bool) -> table.LayerSpec:
    """The entry of a layer of ours, with experts or without."""
    norm = spec.norm_class if spec.norm_class.startswith("torch.") else "Norm"
    linear = spec.linear_class if spec.linear_class.startswith("torch.") else f"{__name__}.Conv1D"
    parts, mixture = dict.fromkeys(spec.classes, "Part"), spec.sparse if sparse else None
    if mixture is not None:
        parts.pop(mixture.block, None)
        held = {**dict.fromkeys(mixture.classes, "Part"), mixture.experts: _experts_class(mixture).__name__}
        mixture = replace(mixture, classes=held, router_class=Router.__name__)
    window = spec.window.replace(".config.", ".")  # a Part has no config
    refused = {path.replace(".config.", "."): why for path, why in spec.refused.items()}
    return replace(spec, window=window, refused=refused, module=__name__, classes=parts, norm_class=norm, linear_class=linear,
                   eps="eps", sparse=mixture)  # fmt: skip


def _experts_class(sparse: table.Sparse) -> type[Experts]:
    return ClampedExperts if sparse.clamp else Experts


_ENTRIES = {
    (family, sparse): _with_our_classes(spec, sparse) for family, spec in table.FAMILIES.items() for sparse in (False, True)
}


def entry(config: BlockConfig) -> table.LayerSpec:
    """Where the block has its parts, as `bind` reads it."""
    return _ENTRIES[config.model_type, config.sparse]


def _put(block: nn.Module, path: str, value: Any) -> None:
    parent, _, name = path.rpartition(".")
    setattr(block.get_submodule(parent), name, value)


def build(block: nn.Module, config: BlockConfig, device: Any, dtype: Any) -> None:
    """Give the block every module and number that `bind` looks for, at the places of the entry. Raises ValueError."""
    spec = entry(config)
    hidden, ffn, heads, kv_heads, d = (config.hidden_size, config.intermediate_size, config.num_attention_heads,
                                       config.num_key_value_heads, config.head_dim)  # fmt: skip
    assert ffn is not None and kv_heads is not None and d is not None
    if config.hidden_act not in _ACTIVATIONS:
        raise ValueError(f"FusedBlock: hidden_act={config.hidden_act!r}, expected one of {', '.join(_ACTIVATIONS)}")
    for path in spec.classes:
        _put(block, path, Part())
    if spec.sparse:
        _build_mixture(block, config, spec.sparse, device, dtype)
    else:
        _put(block, spec.activation, _ACTIVATIONS[config.hidden_act]())

    n_q, n_kv = heads * d, kv_heads * d
    sizes = {"q": (hidden, n_q + 2 * n_kv if spec.qkv else n_q), "k": (hidden, n_kv), "v": (hidden, n_kv), "o": (n_q, hidden),
             "gate": (hidden, ffn), "up": (hidden, ffn * (2 if spec.mlp == "gated_stacked" else 1)),
             "down": (ffn, hidden)}  # fmt: skip
    linear = Conv1D if spec.linear_class.endswith("Conv1D") else nn.Linear
    for name, path in spec.linears.items():
        if spec.sparse and name in ("gate", "up", "down"):
            continue
        bias: Any = spec.biases["qkv" if name in ("q", "k", "v") else "o" if name == "o" else "mlp"]
        bias = getattr(config, bias) if isinstance(bias, str) else bias
        _put(block, path, linear(*sizes[name], bias=bias, device=device, dtype=dtype))

    eps = config.rms_norm_eps if spec.norm == "rms" else config.layer_norm_eps
    assert eps is not None

    biased = spec.biases.get("norm", True)
    biased = getattr(config, biased) if isinstance(biased, str) else biased

    def norm(*shape: int) -> nn.Module:
        if spec.norm_class.startswith("torch."):
            return nn.LayerNorm(shape, eps=eps, bias=biased, device=device, dtype=dtype)
        return Norm(shape, spec, eps, device, dtype)

    for name, path in spec.norms.items():
        if config.layer_idx == 0 and name in spec.first_lacks:
            _put(block, path, nn.Identity())
        elif not (name == "mlp_norm" and spec.shared_norm and config.use_parallel_residual):
            _put(block, path, norm(hidden))
    options = {"qk_norm": spec.qk_norm}
    for path, (option, values) in spec.switches.items():
        value = config.use_rope if option == "rope" else bool(getattr(config, path.rpartition(".")[2]))
        _put(block, path, value)
        options[option] = values[value]
    for name, n in (("q_norm", heads), ("k_norm", kv_heads)):
        if options["qk_norm"]:
            shape = (n * d,) if options["qk_norm"] == "full" else (n, d) if spec.head_weights else (d,)
            _put(block, f"{spec.attention}.{getattr(spec, name)}", norm(*shape))

    attention = {spec.head_dim: d, "scaling": config.scale, "is_causal": config.causal, "layer_idx": config.layer_idx,
                 "num_key_value_groups": heads // kv_heads}  # fmt: skip
    numbers: dict[str, Any] = {f"{spec.attention}.{name}": value for name, value in attention.items()}
    numbers |= {path: getattr(config, word) for path, word in spec.dropouts.items()}
    numbers |= {path: getattr(config, path.rpartition(".")[2]) for path in (*spec.refused, spec.branch_scale) if path}
    numbers |= {spec.window: config.window} if spec.window else {}
    numbers |= {spec.softcap: getattr(config, spec.softcap.rpartition(".")[2])} if spec.softcap else {}
    for path, value in numbers.items():
        _put(block, path, value)
    if spec.sinks:
        held, _, name = spec.sinks.rpartition(".")
        part: Any = block.get_submodule(held)
        part.hold(name, (heads,), device, dtype)
        part.reset_parameters()


def _build_mixture(block: nn.Module, config: BlockConfig, sparse: table.Sparse, device: Any, dtype: Any) -> None:
    """Likewise of the experts, in the place of a dense MLP."""
    hidden, activation = config.hidden_size, _ACTIVATIONS[config.hidden_act or ""]
    for path in sparse.classes:
        _put(block, path, _experts_class(sparse)(config, sparse, device, dtype) if path == sparse.experts else Part())
    if not sparse.clamp:
        _put(block, f"{sparse.experts}.act_fn", activation())
    _put(block, sparse.router, Router(config, getattr(config, sparse.number), device, dtype))
    if sparse.shared:
        width = math.prod(getattr(config, word) for word in sparse.shared_ffn)
        for name, n, k in (("gate_proj", width, hidden), ("up_proj", width, hidden), ("down_proj", hidden, width)):
            _put(block, f"{sparse.shared}.{name}", nn.Linear(k, n, bias=False, device=device, dtype=dtype))
        _put(block, f"{sparse.shared}.act_fn", activation())
    if sparse.shared_gate:
        _put(block, sparse.shared_gate, nn.Linear(hidden, 1, bias=False, device=device, dtype=dtype))
    for path, word in sparse.noises.items():
        _put(block, path, getattr(config, word))

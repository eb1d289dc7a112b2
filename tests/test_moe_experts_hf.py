"""The experts' op beside transformers' own modules, on their parameters as they lie: results and gradients in every layout."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from moe_cases import make_index, make_indices
from op_cases import HALVES, error, recording
from torch import Tensor, nn

from fusedblock.kernels._moe import CLAMPED

Run = Callable[..., Tensor]
EXPERTS, TOP_K, HIDDEN, FFN = 5, 2, 24, 40


@dataclass(frozen=True)
class Family:
    """A module of transformers, and its activation for the op. words: of its config beside the sizes."""

    module: str
    name: str
    activation: str = "silu"
    ffn: str = "moe_intermediate_size"
    experts: str = "num_experts"
    words: tuple[tuple[str, object], ...] = ()


FAMILIES = (
    Family("mixtral", "Mixtral", ffn="intermediate_size", experts="num_local_experts"),
    Family("qwen2_moe", "Qwen2Moe"),
    Family("qwen3_moe", "Qwen3Moe", "gelu", words=(("hidden_act", "gelu"),)),
    Family("qwen3_next", "Qwen3Next"),
    Family("olmoe", "Olmoe", ffn="intermediate_size"),
    Family("gpt_oss", "GptOss", CLAMPED, "intermediate_size", "num_local_experts"),
    Family("glm4_moe", "Glm4Moe", experts="n_routed_experts"),
    Family("deepseek_v2", "DeepseekV2", "gelu_tanh", experts="n_routed_experts", words=(("hidden_act", "gelu_pytorch_tanh"),)),
    Family("deepseek_v3", "DeepseekV3", experts="n_routed_experts"),
)


def make(family: Family) -> nn.Module:
    """In float64, with values that every dtype holds."""
    configuration = importlib.import_module(f"transformers.models.{family.module}.configuration_{family.module}")
    modeling = importlib.import_module(f"transformers.models.{family.module}.modeling_{family.module}")
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": 2, family.ffn: FFN, family.experts: EXPERTS, **dict(family.words)}
    config = getattr(configuration, f"{family.name}Config")(**sizes)
    config._experts_implementation = "eager"
    module = getattr(modeling, f"{family.name}Experts")(config).double()
    g = torch.Generator().manual_seed(0)
    for name, p in module.named_parameters():
        scale = 1.0 if "bias" in name else 0.2
        p.data = (torch.randn(p.shape, generator=g) * scale).to(torch.bfloat16).double()
    return module


def ours(module: nn.Module, x: Tensor, indices: Tensor, weights: Tensor, activation: str, save: bool) -> Tensor:
    biases = (getattr(module, f"{n}_proj_bias", None) for n in ("gate_up", "down"))
    alpha, limit = getattr(module, "alpha", 0.0), getattr(module, "limit", 0.0)
    given = indices.to(torch.int32)
    return torch.ops.fusedblock.moe_experts(
        x, module.gate_up_proj, module.down_proj, *biases, weights, given, *make_index(given, EXPERTS, 16).values(), activation,
        alpha, limit, module.is_transposed, not module.is_concatenated, 16, save, None,
    )[0]  # fmt: skip


def results(module: nn.Module, run: Run, dtype: torch.dtype, tokens: int, seed: int) -> dict[str, Tensor]:
    """out, and the gradients of x, the weights and every parameter."""
    module = module.to(dtype)
    g = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(tokens, HIDDEN, generator=g).to(torch.bfloat16).to(dtype) for _ in range(2))
    indices = make_indices(tokens, EXPERTS, TOP_K, "holes", g).long()
    weights = (0.1 + torch.rand(tokens, TOP_K, generator=g)).to(torch.bfloat16).to(dtype)
    leaves = {"x": x.requires_grad_(), "weights": weights.requires_grad_(), **dict(module.named_parameters())}
    out = run(module, x, indices, weights)
    return {"out": out.detach(), **dict(zip(leaves, torch.autograd.grad(out, [*leaves.values()], grad)))}


def runs() -> list[object]:
    """Every family in fp32; of those whose modules differ in more than the name every form and dtype. The rest is slow."""
    quick = ("mixtral", "gpt_oss")
    rows = [(f, tokens, dtype) for f in FAMILIES for tokens in (1, 33, 66) for dtype in (torch.float32, torch.bfloat16)]
    often = [tokens < 66 and (f.module in quick or (tokens, dtype) == (33, torch.float32)) for f, tokens, dtype in rows]
    return [
        pytest.param(*row, id=f"{row[0].module}-{row[1]}-{str(row[2])[6:]}", marks=() if now else pytest.mark.slow)
        for row, now in zip(rows, often)
    ]


@pytest.mark.parametrize(("family", "tokens", "dtype"), runs())
def test_experts_equal_transformers(family: Family, tokens: int, dtype: torch.dtype) -> None:
    module = make(family)
    # Two routing weights of one token are no sample of rounding errors: several tokens, one at a time.
    seeds = range(4 if tokens == 1 and dtype in HALVES else 1)

    def run(call: Run, dtype: torch.dtype) -> dict[str, Tensor]:
        each = [results(module, call, dtype, tokens, seed) for seed in seeds]
        assert all(t.dtype is dtype for found in each for t in found.values())
        return {name: torch.stack([found[name] for found in each]) for name in each[0]}

    want, plain = (run(lambda m, *given: m(*given), d) for d in (torch.float64, dtype))
    for save in (True, False) if tokens == 33 else (True,):
        call = functools.partial(ours, activation=family.activation, save=save)
        with recording("sm_90") as launches:
            got = run(call, dtype)
        assert launches
        for name, value in want.items():
            limit = 1.5 * error(plain[name], value) if dtype in HALVES else 1e-5
            assert error(got[name], value) <= limit, f"{name}: {error(got[name], value):.3g}, allowed {limit:.3g}"


def test_gradients_lie_as_the_parameters_do() -> None:
    """Of transposed weights too: autograd has nothing to copy."""
    module = make(FAMILIES[5])
    got = results(module, functools.partial(ours, activation=CLAMPED, save=True), torch.float32, 33, 1)
    for name, p in module.named_parameters():
        assert got[name].shape == p.shape and got[name].is_contiguous()

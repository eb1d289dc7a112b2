"""The table of routers: what each computes beside transformers' own module, from tiny configs, forward and gradients."""

from __future__ import annotations

import importlib
from dataclasses import asdict

import pytest
import torch
from moe_formula import index, moe_route
from op_cases import error, recording
from torch import Tensor

from fusedblock import ops
from fusedblock.models.routers import ROUTERS

BF16 = torch.bfloat16
_DEEPSEEK = {"n_routed_experts": 12, "num_local_experts": 12, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
WORDS = {
    "mixtral": {"num_local_experts": 12}, "qwen2_moe": {"num_experts": 12, "norm_topk_prob": False},
    "qwen3_moe": {"num_experts": 12, "norm_topk_prob": True}, "qwen3_next": {"num_experts": 12},
    "olmoe": {"num_experts": 12, "norm_topk_prob": True}, "gpt_oss": {"num_local_experts": 12},
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "group_limited_greedy"}, "deepseek_v3": _DEEPSEEK,
    "glm4_moe": {**_DEEPSEEK, "norm_topk_prob": True},
    "deepseek_v2-greedy": {**_DEEPSEEK, "topk_method": "greedy"}, "deepseek_v3-sums": {**_DEEPSEEK, "norm_topk_prob": False},
    "qwen2_moe-normed": {"num_experts": 12, "norm_topk_prob": True}, "olmoe-sums": {"num_experts": 12, "norm_topk_prob": False},
    "glm4_moe-one_group": {**_DEEPSEEK, "n_group": 1, "topk_group": 1},
}  # fmt: skip


def router(name: str, dtype: torch.dtype) -> tuple[str, torch.nn.Module]:
    """transformers' module with weights of few bits: every logit is exact in fp32, however it is summed."""
    from transformers import AutoConfig  # imported here: it takes seconds

    family = name.partition("-")[0]
    config = AutoConfig.for_model(family, hidden_size=32, num_experts_per_tok=3, **WORDS[name])
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    made = getattr(module, ROUTERS[family].layer_class)(config).to(dtype)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for attribute in ROUTERS[family].tensors.values():
            t = getattr(made, attribute)
            scale = 1 / 256 if "correction" in attribute else 1 / 64
            t.copy_(torch.randint(-63, 64, t.shape, generator=g) * scale)
    return family, made


def inputs(dtype: torch.dtype) -> Tensor:
    return torch.randint(-1, 2, (200, 32), generator=torch.Generator().manual_seed(2)).to(dtype)


def ours(family: str, module: torch.nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    entry = ROUTERS[family]
    spec = entry.read(module)
    given = {name: getattr(module, attribute) for name, attribute in entry.tensors.items()}
    weights, indices, logits, *rest = ops.moe_route(x, spec=spec, tile_rows=16, **given)
    return logits, weights, indices, *rest


def dense(weights: Tensor, indices: Tensor, experts: int = 12) -> Tensor:
    """Weight of every expert: some of transformers' routers give the chosen in any order."""
    return weights.new_zeros(len(weights), experts).scatter(1, indices.long(), weights)


def untied(logits: Tensor) -> Tensor:
    """Tokens without two equal logits, whose order torch.topk leaves open."""
    ordered = logits.sort(-1).values
    return (ordered.diff(dim=-1) != 0).all(-1)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", WORDS)
def test_router_equals_transformers(name, dtype):
    family, module = router(name, dtype)
    x = inputs(dtype).requires_grad_()
    want_logits, want_weights, want_indices = module(x)
    keep = untied(want_logits)
    assert keep.sum() > 20
    parameters = [x, *module.parameters()]
    upstream = torch.randint(-16, 17, (200, 12), generator=torch.Generator().manual_seed(3)) / 16 * keep[:, None]

    def gradients(logits: Tensor, weights: Tensor, indices: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        loss = (dense(weights, indices) * upstream.to(weights.dtype)).sum() + (logits * upstream.to(logits.dtype)).sum()
        return torch.autograd.grad(loss, leaves)

    wanted = gradients(want_logits, want_weights, want_indices, parameters)
    with recording("sm_90") as launches:
        logits, weights, indices, *made = ours(family, module, x)
        got = gradients(logits, weights, indices, parameters)
    assert launches
    assert torch.equal(logits, want_logits) and weights.dtype == want_weights.dtype
    a, b = dense(weights, indices)[keep], dense(want_weights, want_indices)[keep]
    assert torch.equal(a > 0, b > 0)
    torch.testing.assert_close(a, b, rtol=2e-6 if weights.dtype == torch.float32 else 2.0**-7, atol=1e-7)
    leaves = [t.detach().double().requires_grad_() for t in parameters]
    exact = formula_of(family, module, *leaves)
    exact_grads = gradients(exact["logits"], exact["weights"], exact["indices"], leaves)
    for p, q, r in zip(got, wanted, exact_grads):
        assert p.dtype == q.dtype
        assert error(p, r) < (1e-5 if dtype is torch.float32 else 1.5 * error(q, r))
    for name, t in index(indices, 12, 16).items():
        assert torch.equal(made[("order", "inverse", "offsets", "tiles").index(name)].long(), t), name


def formula_of(family: str, module: torch.nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> dict[str, Tensor]:
    """In float64, where the leaves are."""
    spec, entry = ROUTERS[family].read(module), ROUTERS[family]
    correction = getattr(module, entry.tensors["correction_bias"]).double() if spec.correction_bias else None
    return moe_route({**asdict(spec), "x": x, "weight": weight, "bias": bias, "correction_bias": correction, "tile_rows": 16})


@pytest.mark.parametrize("name", WORDS)
def test_plain_torch_equals_transformers(name):
    """Without kernels, in fp32."""
    family, module = router(name, torch.float32)
    x = inputs(torch.float32)
    want_logits, want_weights, want_indices = module(x)
    logits, weights, indices, *_ = ours(family, module, x)
    keep = untied(want_logits)
    assert torch.equal(logits, want_logits)
    torch.testing.assert_close(dense(weights, indices)[keep], dense(want_weights, want_indices)[keep], rtol=2e-6, atol=1e-8)


def test_options_are_those_of_the_live_module():
    for name in WORDS:
        family, module = router(name, torch.float32)
        spec = ROUTERS[family].read(module)
        assert spec.top_k == 3
        assert spec.scale == WORDS[name].get("routed_scaling_factor", 1.0)
        grouped = WORDS[name].get("n_group", 1) if "greedy" not in name.partition("-")[2] else 1
        assert spec.groups == grouped
        if "norm_topk_prob" in WORDS[name]:
            assert spec.renormalise == WORDS[name]["norm_topk_prob"]
    module.top_k = 2
    assert ROUTERS[family].read(module).top_k == 2

"""How many launches the forward of a block of experts is, router included: by the meter on tensors without memory, and as run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_cases import Experts
from op_cases import FEW_SMS, recording
from test_mixture import HIDDEN, make, read
from test_moe_experts import case_of
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from fusedblock.blocks import MoeSpec, MoeWeights, mixture
from fusedblock.cli import presets
from fusedblock.kernels._moe import CLAMPED
from fusedblock.kernels._target import TARGETS, Target, override
from fusedblock.metering import TrafficCounter, measure
from fusedblock.models.experts import register_experts
from fusedblock.models.routers import ROUTERS
from fusedblock.ops import OPS

SIZES = {"qwen3-30b-a3b": (2048, 768, 128, 8), "mixtral-8x7b": (4096, 14336, 8, 2)}  # hidden, ffn, experts, chosen ones
FEW, MANY = (1, 2, 16, 64), (512, 2048, 32768)
GROUPED = ("deepseek_v2", "deepseek_v3", "glm4_moe")


def most(tokens: int) -> int:
    """Router and experts: what is promised."""
    return 4 if tokens <= 64 else 6


def of_size(family: str, name: str) -> tuple[MoeSpec, MoeWeights]:
    """The family's router before experts of a published model, without a shared one."""
    hidden, ffn, experts, top_k = SIZES[name]
    groups = {"groups": 4, "topk_groups": 2} if family in GROUPED else {}
    router = replace(ROUTERS[family].spec, top_k=top_k, **groups)
    empty = lambda *shape: torch.empty(shape, dtype=torch.bfloat16)
    if family == "gpt_oss":
        spec = MoeSpec(router, CLAMPED, 1.702, 7.0, transposed=True, interleaved=True)
        weights = (empty(experts, hidden), empty(experts, hidden, 2 * ffn), empty(experts, ffn, hidden))
        return spec, MoeWeights(*weights, empty(experts), None, empty(experts, 2 * ffn), empty(experts, hidden))
    correction = torch.empty(experts) if router.correction_bias else None
    weights = (empty(experts, hidden), empty(experts, 2 * ffn, hidden), empty(experts, hidden, ffn))
    return MoeSpec(router), MoeWeights(*weights, None, correction)


def counted(spec: MoeSpec, weights: MoeWeights, tokens: int, target: Target) -> list[str]:
    """Launches by the meter; weights on meta or fake."""
    x = torch.empty(tokens, weights.router.shape[1], dtype=weights.router.dtype, device=weights.router.device)
    with override(target), TrafficCounter() as counter:
        mixture(spec, weights, x)
    return [cost.name for cost in counter.launches]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("family", ROUTERS)
def test_router_and_experts_of_published_sizes(family: str, name: str) -> None:
    for device in ("meta", "fake"):
        with torch.device("meta") if device == "meta" else FakeTensorMode():
            given = of_size(family, name)
            for tokens in (*FEW, *MANY):
                launches = counted(*given, tokens, TARGETS["sm_90"])
                assert 0 < len(launches) <= most(tokens), (device, tokens, launches)
                assert all(launch.startswith("fusedblock.moe_") for launch in launches)


@pytest.mark.parametrize("name", SIZES)
def test_in_a_layer(name: str) -> None:
    """Where the residual is added as well."""
    for tokens in (64, 512):
        after = measure(presets.config_of(name), batch=1, seq=tokens, device="cpu").after
        assert 0 < sum(row.launches for row in after.rows if row.name.startswith("fusedblock.moe_")) <= most(tokens)


@pytest.mark.parametrize(("name", "module"), (("qwen3-30b-a3b", Qwen3MoeExperts), ("mixtral-8x7b", MixtralExperts)))
def test_behind_a_models_own_router(name: str, module: Any) -> None:
    """experts_implementation="fusedblock": an index of what it has decided is made here, and its numbers of experts are cast. The
    router itself stays transformers' own, plain operators that are not counted."""
    register_experts()
    config = presets.config_of(name)
    config._experts_implementation = "fusedblock"
    with torch.device("meta"), torch.no_grad(), override(TARGETS["sm_90"]):
        experts = module(config).bfloat16()
        for tokens in (*FEW, *MANY):
            x = torch.empty(tokens, config.hidden_size, dtype=torch.bfloat16)
            chosen = torch.empty(tokens, config.num_experts_per_tok, dtype=torch.int64)
            weights = torch.empty(chosen.shape, dtype=torch.bfloat16)
            with TrafficCounter() as counter:
                experts(x, chosen, weights)
            launches = [cost.name.removeprefix("fusedblock.") for cost in counter.launches]
            assert {"moe_index", "moe_gate_up", "moe_down"} <= {*launches} and len(launches) <= most(tokens), (tokens, launches)


# Of a shared expert: gate and up in one launch, down; with a gate of its own that too, a sigmoid, and a multiplication.
SHARED = {"deepseek_v2": 2, "deepseek_v3": 2, "glm4_moe": 2, "qwen2_moe": 5, "qwen3_next": 5}


@pytest.mark.parametrize(("tokens", "families"), (
    (1, ("mixtral", "qwen2_moe", "deepseek_v3")), (65, ("mixtral",)),
    *(pytest.param(tokens, tuple(ROUTERS), marks=pytest.mark.slow) for tokens in (1, 64, 65)),
    pytest.param(512, ("mixtral", "deepseek_v3"), marks=pytest.mark.slow),
))  # fmt: skip
def test_the_kernels_that_run_are_those_counted(tokens: int, families: tuple[str, ...]) -> None:
    """By Triton's interpreter, at a small size. What a shared expert launches comes on top."""
    for family in families:
        spec, weights = read(family, make(family).bfloat16())
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
        with torch.no_grad(), recording("sm_90") as launches:
            mixture(spec, weights, x)
        on_meta = MoeWeights(*(None if t is None else t.to("meta") for t in weights))
        names = counted(spec, on_meta, tokens, FEW_SMS["sm_90"])
        plain = [name for name in names if name.startswith("aten.")]  # of which the recorder sees nothing
        assert len(launches) == len(names) - len(plain), (family, names)
        own = [name for name in names if name.startswith("fusedblock.moe_")]
        assert len(own) <= most(tokens) and len(names) - len(own) == SHARED.get(family, 0), (family, names)


@pytest.mark.parametrize(("hidden", "ffn"), [(8, 0), (0, 8)])
def test_no_features(hidden: int, ffn: int) -> None:
    """What is launched for gate and up sets the next launch's counters: not where nothing is."""
    for tokens in (1, 2, 64, 70):
        args = case_of(Experts(tokens=tokens, hidden=hidden, ffn=ffn, bias=True)).arguments(torch.float32)
        with recording("sm_90"):
            out = OPS["moe_experts"].launch(**args)[0]
        torch.testing.assert_close(out, OPS["moe_experts"].reference(**args)[0])

"""fusedblock.blocks.mixture beside transformers' sparse blocks of the nine families that have a router in the table."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
from typing import Any

import pytest
import torch
from llama import relative_error, root_mean_square
from op_cases import recording
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from fusedblock import ops
from fusedblock.blocks import Mixed, MoeSpec, MoeWeights, fixed_mixture, mixture, moe
from fusedblock.kernels import _math, _moe_index, _replay
from fusedblock.models.experts import _gate
from fusedblock.models.routers import ROUTERS

HIDDEN, EXPERTS = 32, 6
_GROUPS = {"n_routed_experts": EXPERTS, "num_local_experts": EXPERTS, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5,
           "moe_intermediate_size": 40}  # fmt: skip
_SHARED = {"num_experts": EXPERTS, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 24}
BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralSparseMoeBlock", {"num_local_experts": EXPERTS, "intermediate_size": 40}),
    "qwen2_moe": ("Qwen2MoeSparseMoeBlock", _SHARED),
    "qwen3_moe": ("Qwen3MoeSparseMoeBlock", {"num_experts": EXPERTS, "moe_intermediate_size": 40}),
    "qwen3_next": ("Qwen3NextSparseMoeBlock", _SHARED),
    "olmoe": ("OlmoeSparseMoeBlock", {"num_experts": EXPERTS, "intermediate_size": 40}),
    "gpt_oss": ("GptOssMLP", {"num_local_experts": EXPERTS, "intermediate_size": 40}),
    "glm4_moe": ("Glm4MoeMoE", _GROUPS),
    "deepseek_v2": ("DeepseekV2Moe", {**_GROUPS, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3MoE", _GROUPS),
}


def make(family: str) -> nn.Module:
    """transformers' block in float64, with values that every dtype holds."""
    name, words = BLOCKS[family]
    config = AutoConfig.for_model(family, hidden_size=HIDDEN, num_experts_per_tok=2, **words)
    config._experts_implementation = "eager"
    block = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)(config).double()
    g = torch.Generator().manual_seed(3)
    for name, t in [*block.named_parameters(), *block.named_buffers()]:
        scale = 0.3 if "bias" in name else t.shape[-2 if t.dim() == 3 and family == "gpt_oss" else -1] ** -0.5
        t.data = (torch.randn(t.shape, generator=g) * scale).to(torch.bfloat16).double()
    return block.eval()


def read(family: str, block: nn.Module) -> tuple[MoeSpec, MoeWeights]:
    router, experts = getattr(block, "gate", None) or block.router, block.experts
    shared = getattr(block, "shared_experts", None) or getattr(block, "shared_expert", None)
    activation, alpha, limit = _gate(experts)
    spec = MoeSpec(ROUTERS[family].read(router), activation, alpha, limit, experts.is_transposed, not experts.is_concatenated)
    given = {
        "router": router.weight, "router_bias": getattr(router, "bias", None),
        "router_correction": getattr(router, "e_score_correction_bias", None), "gate_up": experts.gate_up_proj,
        "down": experts.down_proj, "gate_up_bias": getattr(experts, "gate_up_proj_bias", None),
        "down_bias": getattr(experts, "down_proj_bias", None),
    }  # fmt: skip
    if shared is not None:
        given |= {"shared_gate": shared.gate_proj.weight, "shared_up": shared.up_proj.weight,
                  "shared_down": shared.down_proj.weight}  # fmt: skip
    if hasattr(block, "shared_expert_gate"):
        given["shared_router"] = block.shared_expert_gate.weight
    return spec, MoeWeights(**given)


def run_theirs(family: str, block: nn.Module, x: Tensor) -> Mixed:
    """Their result, and what their router says, experts in order of their number."""
    logits, weights, indices = (getattr(block, "gate", None) or block.router)(x.view(-1, HIDDEN))
    out = block(x)
    return sort(Mixed(out[0] if isinstance(out, tuple) else out, logits, weights, indices))


def sort(mixed: Mixed) -> Mixed:
    by_number = mixed.indices.argsort(-1)
    return mixed._replace(weights=mixed.weights.gather(-1, by_number), indices=mixed.indices.gather(-1, by_number).long())


def run_ours(family: str, block: nn.Module, x: Tensor) -> Mixed:
    return sort(mixture(*read(family, block), x))


def inputs(dtype: torch.dtype, seq: int) -> Tensor:
    x = torch.randn(2, seq, HIDDEN, generator=torch.Generator().manual_seed(4))
    return x.to(torch.bfloat16).to(dtype)


def in_dtype(block: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy; a router that `check` made wide is in fp32 at least."""
    made = copy.deepcopy(block).to(dtype)
    if getattr(block, "wide", False) and dtype.itemsize < 4:
        made.gate.weight.data = block.gate.weight.data.float()
    return made


def outcome(run: Any, family: str, block: nn.Module, dtype: torch.dtype, seq: int, keep: Tensor) -> dict[str, Tensor]:
    """out without gradients and with them, and the gradients of a combination of the out of `keep`, by parameter."""
    block, x = in_dtype(block, dtype), inputs(dtype, seq)
    with torch.no_grad():
        inference = run(family, block, x.clone()).out
    leaves = {"x": x.requires_grad_(), **dict(block.named_parameters())}
    out = run(family, block, x).out
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16) * keep[..., None]
    grads = torch.autograd.grad(out, [*leaves.values()], upstream.to(dtype))
    return {"inference": inference[keep], "out": out[keep].detach(), **dict(zip(leaves, grads))}


def check(family: str, dtype: torch.dtype, seq: int, kernels: bool = False, wide: bool = False) -> None:
    block = make(family)
    if wide:  # with bits that only fp32 has
        noise = torch.randn(block.gate.weight.shape, generator=torch.Generator().manual_seed(8))
        block.gate.weight.data, block.wide = (block.gate.weight + 0.01 * noise).float().double(), True
        want = run_theirs(family, block, inputs(torch.float64, seq)).logits
        got = run_ours(family, in_dtype(block, dtype), inputs(dtype, seq)).logits
        assert got.dtype is torch.float32 and relative_error(got, want) < 1e-5

    def chosen(run: Any, dtype: torch.dtype) -> Tensor:
        return run(family, in_dtype(block, dtype), inputs(dtype, seq)).indices.view(2, seq, 2)

    # Tokens that theirs routes in this dtype as it does in float64: there ours must too.
    right = chosen(run_theirs, torch.float64)
    keep = (chosen(run_theirs, dtype) == right).all(-1)
    assert keep.sum() >= 2 * seq - 2
    assert torch.equal(chosen(run_ours, dtype)[keep], right[keep])
    want, plain = (outcome(run_theirs, family, block, d, seq, keep) for d in (torch.float64, dtype))
    if kernels:
        with recording("sm_90") as launches:
            got = outcome(run_ours, family, block, dtype, seq, keep)
        assert launches
    else:
        got = outcome(run_ours, family, block, dtype, seq, keep)
    errors, base = ({n: relative_error(o[n], want[n]) for n in want} for o in (got, plain))
    assert all(got[n].dtype is plain[n].dtype and got[n].shape == plain[n].shape for n in want)
    if dtype is torch.float32:
        assert {n: e for n, e in errors.items() if not e < 1e-5} == {}
    else:
        assert all(errors[n] <= 1.5 * base[n] for n in ("inference", "out"))
        assert root_mean_square(errors) <= 1.5 * root_mean_square(base)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("family", BLOCKS)
def test_mixture_equals_transformers(family: str, dtype: torch.dtype) -> None:
    check(family, dtype, 9)


@pytest.mark.parametrize("kernels", (False, True))
@pytest.mark.parametrize("family", ("deepseek_v3", "glm4_moe"))
def test_a_router_in_fp32_beside_bf16(family: str, kernels: bool) -> None:
    """As transformers, from 5.24 on, loads them."""
    check(family, torch.bfloat16, 9, kernels, wide=True)


def test_a_router_in_another_dtype_than_it_may_have() -> None:
    """Whose logits are rounded, or in 16 bits: a layer with it is transformers' own."""
    or_fp32 = ", expected the same or torch.float32$"
    for family, router, rest, said in (("mixtral", torch.float32, torch.bfloat16, "but x has torch.bfloat16$"),
                                       ("glm4_moe", torch.bfloat16, torch.float32, or_fp32),
                                       ("glm4_moe", torch.float16, torch.bfloat16, or_fp32)):  # fmt: skip
        block = make(family).to(rest)
        block.gate.weight.data = block.gate.weight.data.to(router)
        for grad in (False, True):
            with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=f"^mixture: router has dtype {router}.*{said}"):
                mixture(*read(family, block), inputs(rest, 3))


def _by_kernels() -> list[object]:
    """Mixtral, a plain and a gated shared expert and gpt-oss's layout in every form; the others once. bf16 is slow."""
    often = ("mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3")
    rows = [(f, d, seq) for f in BLOCKS for d in (torch.float32, torch.bfloat16) for seq in (9, 34)]
    quick = [(f in often and seq == 9 and d is torch.float32) for f, d, seq in rows]
    return [pytest.param(*row, marks=() if now else pytest.mark.slow) for row, now in zip(rows, quick)]


@pytest.mark.parametrize(("family", "dtype", "seq"), _by_kernels())
def test_mixture_by_the_kernels(family: str, dtype: torch.dtype, seq: int) -> None:
    check(family, dtype, seq, kernels=True)


@pytest.mark.parametrize(("family", "seq", "most"), (("mixtral", 1, 4), ("deepseek_v3", 16, 4 + 2), ("deepseek_v3", 256, 6 + 2)))
def test_launches_of_a_mixture(family: str, seq: int, most: int) -> None:
    """Router and experts, of 2, 32 and 512 tokens; a shared expert is two more."""
    spec, weights = read(family, make(family).float())
    x = torch.randn(2, seq, HIDDEN, generator=torch.Generator().manual_seed(6))
    with torch.no_grad(), recording("sm_90") as launches:
        mixture(spec, weights, x)
    assert 4 <= len(launches) <= most


@pytest.mark.parametrize(("family", "tokens", "steps"), (("mixtral", 1, 4), ("deepseek_v3", 18, 6), ("gpt_oss", 70, 6)))
def test_launches_of_a_mixture_can_be_replayed(family: str, tokens: int, steps: int) -> None:
    """Recorded for some tokens, right for others, which choose other experts."""
    spec, weights = read(family, make(family).to(torch.bfloat16))
    weights = MoeWeights(*(None if t is None else t.detach() for t in weights))
    first, second = (torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (7, 8))
    rest = fixed_mixture(spec, weights).args
    given = [t for t in weights if t is not None]
    with recording("sm_90"):
        _, program = _replay.record(lambda: moe._compose(ops.direct, first, None, *rest), [first, *given])
        assert program is not None and len(program.steps) == steps
        for x in (first, second):
            want, got = moe._compose(ops.direct, x, None, *rest), Mixed(*program.run([x, *given]))
            assert all(torch.equal(a, b) for a, b in zip(want, got))
    assert not torch.equal(want.indices, moe._compose(ops.direct, first, None, *rest).indices)


@pytest.mark.parametrize("family", ("mixtral", "deepseek_v3", "gpt_oss"))
def test_opcheck(family: str) -> None:
    spec, weights = read(family, make(family).float().requires_grad_(False))
    args = fixed_mixture(spec, weights).args
    x = inputs(torch.float32, 9).view(-1, HIDDEN)
    for residual in (None, 2 * x):
        torch.library.opcheck(torch.ops.fusedblock.mixture.default, (x, residual, *args))


@pytest.mark.parametrize("family", ("mixtral", "qwen2_moe", "deepseek_v3"))
def test_what_the_router_said_is_given(family: str) -> None:
    block, x = make(family).float(), inputs(torch.float32, 9)
    spec, weights = read(family, block)
    with torch.no_grad():
        want = run_theirs(family, block, x)
        for kept in (None, fixed_mixture(spec, weights)):
            got = sort(mixture(spec, weights, x, kept=kept))
            assert torch.equal(got.indices, want.indices)
            assert all(relative_error(getattr(got, n), getattr(want, n)) < 1e-5 for n in ("out", "logits", "weights"))
    logits = mixture(spec, weights, x).logits
    (gradient,) = torch.autograd.grad(logits.square().sum(), block.gate.weight)
    (wanted,) = torch.autograd.grad(run_theirs(family, block, x).logits.square().sum(), block.gate.weight)
    assert relative_error(gradient, wanted) < 1e-5


@pytest.mark.parametrize("family", ("mixtral", "qwen2_moe", "deepseek_v3"))
@pytest.mark.parametrize("grad", (False, True))
def test_compiled_and_counted(family: str, grad: bool) -> None:
    """One graph whatever the length; FLOPs of the chosen experts."""
    spec, weights = read(family, make(family).float().requires_grad_(grad))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: mixture(spec, weights, x), backend="aot_eager", fullgraph=True, dynamic=True)
    for seq in (9, 10):
        for got, want in zip(compiled(inputs(torch.float32, seq)), mixture(spec, weights, inputs(torch.float32, seq))):
            torch.testing.assert_close(got, want)
    with FlopCounterMode(display=False) as counter:
        mixture(spec, weights, inputs(torch.float32, 9))
    assert counter.get_total_flops() >= 18 * 2 * 3 * 2 * HIDDEN * 40


def of_shared(weights: MoeWeights, shared: str) -> MoeWeights:
    """Experts alone, with a plain shared one, or as they are: with a gated one."""
    names = {"none": ("gate", "up", "down", "router"), "plain": ("router",), "gated": ()}[shared]
    return weights._replace(**{f"shared_{name}": None for name in names})


LENGTHS = (2, 3, 17, 64, 65, 200)


@pytest.mark.parametrize("grad", (False, True))
@pytest.mark.parametrize("shared", ("plain", *(pytest.param(s, marks=pytest.mark.slow) for s in ("none", "gated"))))
def test_one_graph_for_any_length(shared: str, grad: bool) -> None:
    """Whichever way the experts run, with their gradients: the rows of a tile are no matter of the graph."""
    spec, weights, _ = small()
    weights = of_shared(weights, shared)
    leaves = [t.requires_grad_(grad) for t in weights if t is not None]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda x: mixture(spec, weights, x), backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in LENGTHS:
        x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(tokens))
        got, want = compiled(x), mixture(spec, weights, x)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        if grad:
            grads = [torch.autograd.grad(m.out.square().sum() + m.logits.sum(), leaves) for m in (got, want)]
            assert all(relative_error(a, b) < 1e-6 for a, b in zip(*grads, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Exported(nn.Module):
    def __init__(self, spec: MoeSpec, weights: MoeWeights) -> None:
        super().__init__()
        self.spec = spec
        self.given = [name for name, t in weights._asdict().items() if t is not None]
        for name in self.given:
            self.register_buffer(name, getattr(weights, name))

    def forward(self, x: Tensor) -> Tensor:
        return mixture(self.spec, MoeWeights(**{n: getattr(self, n) for n in self.given}), x).out


@pytest.mark.parametrize("strict", (False, True))
@pytest.mark.parametrize("shared", ("none", "plain", "gated"))
def test_exported_for_any_length(shared: str, strict: bool) -> None:
    spec, weights, x = small()
    module = Exported(spec, of_shared(weights, shared))
    exported = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("tokens")},), strict=strict).module()
    for tokens in LENGTHS[::2]:
        x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(tokens))
        assert torch.equal(exported(x), module(x))


_QUICK = [(most, tokens, False) for most in (64, 128) for tokens in (0, 1, 3, 17, 64, 65, 300)] + [(128, 1, True), (64, 17, True)]
_SLOW = [pytest.param(most, tokens, True, marks=pytest.mark.slow) for most, tokens in ((64, 65), (64, 300), (128, 300))]


@pytest.mark.parametrize(("most", "tokens", "kernels"), [*_QUICK, *_SLOW])
def test_rows_of_tiles_chosen_where_the_ops_run(most: int, tokens: int, kernels: bool) -> None:
    """Results and gradients are those of the number that choose_tile_rows gives; of tiles there is room for any choice."""
    spec, w, _ = small()
    g = torch.Generator().manual_seed(tokens)
    x, up = (torch.randn(tokens, 32, generator=g) for _ in range(2))
    known = _moe_index.by_length(tokens, 2, 8, most)

    def run(tile_rows: int) -> tuple[list[Tensor], list[Tensor]]:
        leaves = [t.detach().clone().requires_grad_() for t in (x, w.router, w.gate_up, w.down)]
        weights, indices, _, *index = ops.moe_route(leaves[0], leaves[1], spec.router, tile_rows=tile_rows)
        out = ops.moe_experts(leaves[0], *leaves[2:], weights, indices, index, tile_rows=tile_rows)
        again = ops.moe_index(indices, 8, tile_rows)
        assert all(torch.equal(a, b) for a, b in zip(index, again, strict=True))
        return index, [out.detach(), *torch.autograd.grad(out, leaves, up)]

    with recording("sm_90") if kernels else contextlib.nullcontext():
        (wanted, want), (index, got) = run(known), run(-most)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(index[:3], wanted[:3], strict=True))
    n = len(wanted[3])
    assert torch.equal(index[3][:n], wanted[3]) and len(index[3]) == 2 * tokens // 16 + 8
    assert index[3][n:, :3].eq(0).all()


def test_no_tokens() -> None:
    for family in ("mixtral", "qwen2_moe", "deepseek_v3"):
        spec, weights = read(family, make(family).float())
        x = torch.zeros(2, 0, HIDDEN, requires_grad=True)
        mixed = mixture(spec, weights, x)
        assert mixed.out.shape == x.shape and mixed.logits.shape == (0, EXPERTS)
        (grad,) = torch.autograd.grad(mixed.out.sum(), weights.down)
        assert grad.eq(0).all()


def test_what_does_not_fit_is_named() -> None:
    spec, weights = read("deepseek_v3", make("deepseek_v3").float())
    x = inputs(torch.float32, 3)
    for changes, why in (
        ({"router_correction": None}, "router_correction is None, but the router has it: True"),
        ({"router_bias": torch.zeros(EXPERTS)}, "router_bias is a tensor, but the router has it: False"),
        ({"shared_up": None}, "the shared expert has no shared_up"),
        ({"router": torch.zeros(EXPERTS + 1, HIDDEN)}, r"router \(experts hidden\) has experts=7, but experts=6 so far"),
        ({"down": torch.zeros(EXPERTS, HIDDEN, 41)}, r"down has ffn=41, but gate_up has 2\*ffn=80"),
    ):
        with pytest.raises(ValueError, match=why):
            mixture(spec, weights._replace(**changes), x)
    with pytest.raises(ops.ShapeError, match=r"x has shape \(\)"):
        mixture(spec, weights, torch.zeros(()))
    with pytest.raises(NotImplementedError, match="mixture: no gradients"):
        args = (*weights._replace(shared_router=None), *fixed_mixture(spec, weights).args[len(weights) :])
        torch.ops.fusedblock.mixture(x.view(-1, HIDDEN), None, *args)[0].sum().backward()


def small() -> tuple[MoeSpec, MoeWeights, Tensor]:
    """8 experts and a gated shared one, 5 tokens."""
    g = torch.Generator().manual_seed(9)

    def t(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g) * shape[-1] ** -0.5

    shared = {"shared_gate": t(16, 32), "shared_up": t(16, 32), "shared_down": t(32, 16), "shared_router": t(1, 32)}
    return MoeSpec(ops.RouterSpec(2)), MoeWeights(t(8, 32), t(8, 48, 32), t(8, 32, 24), **shared), 6 * t(5, 32)


_OF = r"\(experts hidden\)"
_MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"shared_router": torch.zeros(16, 32)}, r"shared_router has shape \(16, 32\), expected \(1, 32\)"),
    ({"shared_router": torch.zeros(32)}, r"shared_router has shape \(32,\), expected"),
    ({"shared_router": torch.zeros(1, 31)}, r"shared_router \(one hidden\) has hidden=31, but hidden=32"),
    ({"shared_router": torch.zeros(1, 32).half()}, "shared_router has dtype torch.float16, but x has torch.float32"),
    ({"shared_router": torch.zeros(1, 32, device="meta")}, "shared_router is on meta, but x is on cpu"),
    ({"router": torch.zeros(9, 32)}, rf"router {_OF} has experts=9, but experts=8"),
    ({"router_bias": torch.zeros(9), "bias": True}, r"router_bias \(experts\) has experts=9, but experts=8"),
    ({"gate_up": None}, "gate_up is None, expected a tensor"),
    ({"router": None}, "router is None, expected a tensor"),
    ({"gate_up": torch.zeros(8, 47, 32)}, r"down has ffn=24, but gate_up has 2\*ffn=47"),
    ({"down": torch.zeros(8, 32, 25)}, r"down has ffn=25, but gate_up has 2\*ffn=48"),
    ({"down": torch.zeros(8, 31, 24)}, r"down \(experts hidden ffn\) has hidden=31, but hidden=32"),
    ({"transposed": True}, r"gate_up \(experts hidden 2\*ffn\) has hidden=48, but hidden=32"),
    ({"gate_up_bias": torch.zeros(8, 24)}, r"gate_up_bias \(experts 2\*ffn\) has 2\*ffn=24, but 2\*ffn=48"),
    ({"down_bias": torch.zeros(8, 32).half()}, "down_bias has dtype torch.float16, but x has torch.float32"),
    ({"shared_up": torch.zeros(15, 32)}, r"shared_up \(shared_ffn hidden\) has shared_ffn=15, but shared_ffn=16"),
    ({"shared_down": torch.zeros(32, 17)}, r"shared_down \(hidden shared_ffn\) has shared_ffn=17, but shared_ffn=16"),
    ({"activation": "mish"}, "activation='mish', expected one of silu"),
    ({"activation": ops.CLAMPED}, "limit=0.0, expected a positive number for clamped_swish"),
    ({"alpha": float("nan")}, "alpha=nan, expected a finite number"),
    ({"shared_activation": ops.CLAMPED}, "shared_activation='clamped_swish', expected one of silu"),
]


@pytest.mark.parametrize("grad", (False, True))
@pytest.mark.parametrize(("changes", "why"), _MISFITS, ids=["-".join(changes) for changes, _ in _MISFITS])
def test_nothing_runs_before_what_does_not_fit(changes: dict[str, Any], why: str, grad: bool) -> None:
    spec, weights, x = small()
    router = dataclasses.replace(spec.router, bias=changes.get("bias", False))
    own = {n: v for n, v in changes.items() if hasattr(spec, n) and n not in weights._fields}
    spec = dataclasses.replace(spec, router=router, **own)
    weights = weights._replace(**{n: v for n, v in changes.items() if n in weights._fields})
    with recording("sm_90") as launches, pytest.raises(ValueError, match=f"^mixture: {why}"):
        mixture(spec, weights, x.requires_grad_(grad))
    assert launches == []


@pytest.mark.parametrize("name, more", [("activation", (ops.CLAMPED,)), ("shared_activation", ())])
def test_activations_are_the_kernels(name: str, more: tuple[str, ...]) -> None:
    spec, weights, x = small()
    with pytest.raises(ValueError) as refused:
        mixture(dataclasses.replace(spec, **{name: "?"}), weights, x)
    assert str(refused.value) == f"mixture: {name}='?', expected one of {', '.join((*_math.ACTIVATIONS, *more))}"


def test_tokens_of_no_width() -> None:
    spec, weights, _ = small()
    with pytest.raises(ops.ShapeError, match="has hidden=32, but hidden=0 so far"):
        mixture(spec, weights, torch.zeros(5, 0))


def test_one_token_without_an_axis() -> None:
    spec, weights, x = small()
    assert relative_error(mixture(spec, weights, x[0]).out, mixture(spec, weights, x).out[0]) < 1e-6


@pytest.mark.parametrize("kernels", (False, True))
@pytest.mark.parametrize("tokens", (1, 5, 70))
def test_the_residual_is_added_by_the_last_launch(tokens: int, kernels: bool) -> None:
    """With its gradient; of plain experts no launch more."""
    spec, weights, _ = small()
    plain = weights._replace(shared_gate=None, shared_up=None, shared_down=None, shared_router=None)
    x, residual, upstream = torch.randn(3, tokens, 32, generator=torch.Generator().manual_seed(11)).unbind()
    for w in (weights, plain):
        with torch.no_grad():
            want = residual + mixture(spec, w, x).out
        with recording("sm_90") if kernels else contextlib.nullcontext() as launches:
            with torch.no_grad():
                inference = mixture(spec, w, x, residual=residual).out
            leaf = residual.clone().requires_grad_()
            trained = mixture(spec, w, x, residual=leaf).out
        assert w is weights or not kernels or len(launches) == 2 * (4 if tokens < 65 else 6)
        assert relative_error(inference, want) < 1e-6 and relative_error(trained, want) < 1e-6
        assert torch.equal(torch.autograd.grad(trained, leaf, upstream)[0], upstream)
    for bad in (residual[:, :31], residual.half()):
        with pytest.raises(ops.ShapeError, match="^mixture: residual is "):
            mixture(spec, weights, x, residual=bad)


def test_on_the_meta_device() -> None:
    spec, weights, x = small()
    with torch.device("meta"):
        mixed = mixture(spec, MoeWeights(*(None if t is None else t.to("meta") for t in weights)), x.to("meta"))
    assert mixed.out.is_meta and mixed.out.shape == x.shape


@pytest.mark.parametrize("kernels", (False, True))
def test_autocast_changes_nothing(kernels: bool) -> None:
    """Neither the result nor a gradient: of fp32 weights the products are fp32, the shared expert's gate among them."""
    spec, weights, x = small()
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(10))

    def run() -> list[Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in (x, *weights) if t is not None]
        given = iter(leaves[1:])
        w = MoeWeights(*(None if t is None else next(given) for t in weights))
        with torch.no_grad():
            inference = mixture(spec, w, leaves[0]).out
        out = mixture(spec, w, leaves[0]).out
        return [inference, out.detach(), *torch.autograd.grad(out, leaves, upstream)]

    with recording("sm_90") if kernels else contextlib.nullcontext():
        want = run()
        with torch.autocast("cpu", torch.bfloat16):
            got = run()
    assert all(a.dtype is torch.float32 and torch.equal(a, b) for a, b in zip(got, want, strict=True))

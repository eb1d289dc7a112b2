"""The blocks that a mixture is measured beside, and how else fusedblock could compute one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import fusedblock
from fusedblock import ops
from fusedblock.blocks import moe
from fusedblock.blocks.moe import MoeSpec, MoeWeights, fixed_mixture, mixture
from fusedblock.kernels import _moe, _moe_hopper, moe_route
from fusedblock.kernels._moe_index import index_block
from fusedblock.kernels._target import Target

from .moe_problem import Inputs, Problem, Weights

Form = Callable[[Inputs], Any]  # -> out `tokens hidden`, or a router's (weights, logits)


def _spec(p: Problem) -> ops.RouterSpec:
    return ops.RouterSpec(p.top_k, renormalise=True, round_weights=p.round_weights)


def ours(p: Problem, w: Weights) -> Form:
    """The block as a caller has it who keeps what is the same in every call."""
    shared = dict(zip(("shared_gate", "shared_up", "shared_down"), w.shared))
    spec, weights = MoeSpec(_spec(p), transposed=p.transposed), MoeWeights(w.router, w.gate_up, w.down, **shared)
    kept = fixed_mixture(spec, weights)
    return lambda given: mixture(spec, weights, given.x, kept=kept).out


def launched(p: Problem, w: Weights, rows: int = 0) -> Form:
    """The block's two operators one after the other: nothing recorded is replayed, so that what is set in a module counts. rows:
    the index's tile_rows, 0 for those that are chosen."""

    def run(given: Inputs) -> Tensor:
        x = given.x
        tile_rows = rows or ops.choose_tile_rows(p.tokens, p.top_k, p.experts, x.element_size(), ops.target_of(x.device))
        weights, indices, _, *index = ops.moe_route(x, w.router, _spec(p), tile_rows=tile_rows)
        return ops.moe_experts(x, w.gate_up, w.down, weights, indices, index, tile_rows=tile_rows, transposed=p.transposed)

    return run


def routed(p: Problem, w: Weights) -> Form:
    """The router alone. Not of its results are the indices and the index: the tests hold those."""
    return lambda given: ops.moe_route(given.x, w.router, _spec(p), tile_rows=64)[:3:2]


def transformers(p: Problem, w: Weights, implementation: str) -> Form:
    """transformers' own block of the problem's model, on these parameters."""
    if p.model == "mixtral":
        from transformers.models.mixtral.configuration_mixtral import MixtralConfig as Config
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as Block

        sizes = {"num_local_experts": p.experts, "intermediate_size": p.ffn}
    else:
        from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig as Config
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Block

        sizes = {"num_experts": p.experts, "moe_intermediate_size": p.ffn, "norm_topk_prob": True}
    if implementation == "fusedblock":
        fusedblock.register_experts()
    config = Config(hidden_size=p.hidden, num_experts_per_tok=p.top_k, experts_implementation=implementation, **sizes)
    with torch.device("meta"):
        block: Any = Block(config)
    block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj = w.router, w.gate_up, w.down

    def run(given: Inputs) -> Tensor:
        if implementation == "eager" and given.x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("it waits for the device: no CUDA graph")  # ahead of what would spoil the capture
        return block(given.x[None])[0]

    return run


@dataclass(frozen=True)
class Way:
    """How else fusedblock could compute a case: what is set in its modules, tile_rows of the index, and by which form."""

    settings: dict[tuple[Any, str], Any] = field(default_factory=dict)
    rows: int = 0
    form: Callable[..., Form] | None = None  # None: launched, which has rows


def _config(kind: str, *numbers: Any, **words: Any) -> tuple[str, Way]:
    """Config(*numbers, **words) for one kind of product, at whatever tile rows."""
    chosen, config = _moe.configure, _moe.Config(*numbers, **words)

    def configure(asked: str, *rest: Any) -> _moe.Config:
        return config if asked == kind else chosen(asked, *rest)

    rows = f"{config.block_m}x" if config.block_m else ""
    name = f"{kind} {rows}{config.block_n}x{config.block_k} w{config.num_warps} s{config.num_stages}"
    name += "".join(f" {what} {n}" for what, n in (("split", config.split), ("per SM", config.per_sm)) if n > 1)
    name += " swap" if config.swap else ""
    name += " unrolled" * config.unrolled
    return name, Way({(_moe, "configure"): configure})


def _fused(block: int) -> tuple[str, Way]:
    def configure(tokens: int, experts: int, itemsize: int, target: Target) -> moe_route.Config:
        ep = index_block(experts)
        return moe_route.Config(block, False, True, block, ep, 1, *moe_route._ring(block + ep, itemsize, target))

    return f"router fused {block}", Way({(moe_route, "configure"): configure}, form=routed)


def _split(name: str, block: int, rows: int, columns: int, parts: int, last: bool = False) -> tuple[str, Way]:
    def configure(tokens: int, experts: int, itemsize: int, target: Target) -> moe_route.Config:
        cols = min(columns, index_block(experts))
        return moe_route.Config(block, last, False, rows, cols, parts, *moe_route._ring(rows + cols, itemsize, target))

    return f"router {name} {block}, {rows}x{columns} in {parts}", Way({(moe_route, "configure"): configure}, form=routed)


def _form(name: str) -> Way:
    return Way({(_moe, "form"): lambda *_: name})


FORM_WAYS = {name: _form(name) for name in ("vector", "few", "grouped")}
ROW_WAYS = {f"rows {rows}": Way(rows=rows) for rows in _moe.TILE_ROWS}
_T, _S = {"tma": True}, {"tma": True, "swap": True}
_TWO = {**_T, "per_sm": 2}  # as many as registers and shared memory let be there at once
# What the compiler makes for sm_90 without spills: of what is chosen at 16, 32, 64 and 128 rows.
CONFIGS = {
    "gate_up 16": (_config("gate_up", 64, 128, 4, 4, **_S, per_sm=2), _config("gate_up", 128, 64, 4, 6, **_S, per_sm=2),
                   _config("gate_up", 256, 64, 4, 4, **_S, per_sm=2), _config("gate_up", 64, 256, 4, 3, **_S, per_sm=2)),
    "gate_up 64": (_config("gate_up", 128, 64, 4, 4, **_TWO), _config("gate_up", 128, 128, 4, 3, **_TWO),
                   _config("gate_up", 256, 64, 4, 4, **_T), _config("gate_up", 128, 128, 8, 3, **_T)),
    "gate_up 128": (_config("gate_up", 128, 64, 4, 4, **_T), _config("gate_up", 256, 64, 8, 3, **_T),
                    _config("gate_up", 128, 128, 8, 3, **_T), _config("gate_up", 256, 128, 8, 2, **_T)),
    "down 16": (_config("down", 128, 128, 4, 3, **_S, per_sm=2), _config("down", 64, 256, 4, 3, **_S)),
    "down 64": (_config("down", 128, 64, 4, 4, **_TWO), _config("down", 256, 64, 8, 4, **_T),
                _config("down", 256, 64, 4, 4, **_T), _config("down", 128, 128, 8, 3, **_T)),
    "down 128": (_config("down", 128, 64, 4, 4, **_T), _config("down", 256, 64, 8, 3, **_T),
                 _config("down", 128, 128, 8, 3, **_T), _config("down", 256, 128, 8, 2, **_T)),
    "vector": (*(_config("vector", *numbers) for numbers in ((4, 512, 4, 4), (8, 256, 4, 4))),
               *(_config("vector", *numbers, unrolled=True) for numbers in ((2, 512, 4, 4), (2, 1024, 4, 4), (8, 512, 8, 4)))),
    "vector_down": tuple(_config("vector_down", *numbers, unrolled=True) for numbers in (
        (4, 2048, 8, 3), (2, 2048, 4, 3), (4, 1024, 4, 4), (8, 2048, 8, 3), (8, 1024, 4, 4), (2, 4096, 4, 3))),
    "grad_rows": (_config("grad_rows", 128, 64, 4, 4, **_T), _config("grad_rows", 256, 64, 8, 4, **_T)),
    "grad_hidden": (
        _config("grad_hidden", 128, 64, 8, 3, **_T, split=4), _config("grad_hidden", 64, 64, 8, 4, **_T, split=2),
        _config("grad_hidden", 128, 128, 8, 3, **_T, split=4), _config("grad_hidden", 128, 64, 8, 4, **_T, split=4)),
    "grad_weight": (
        _config("grad_weight", 128, 64, 4, 4, **_TWO, block_m=128), _config("grad_weight", 256, 64, 8, 4, **_T, block_m=128),
        _config("grad_weight", 128, 64, 8, 5, **_T, block_m=256)),
}  # fmt: skip
CONFIG_WAYS = dict(way for ways in CONFIGS.values() for way in ways)
ROUTERS = {
    "few": tuple(_split("few", block, 16, 16, parts, True) for block, parts in ((8, 4), (8, 16))),
    "some": (*(_split("split", 16, 64, 64, parts) for parts in (2, 8)), _split("split", 32, 64, 64, 4),
             _split("split", 16, 32, 64, 4), _fused(16), _fused(32)),
    "many": (_fused(16), _fused(32), _fused(64), _split("split", 32, 128, 128, 1), _split("split", 32, 64, 64, 2)),
}  # fmt: skip
ROUTER_WAYS = dict(way for ways in ROUTERS.values() for way in ways)
WAYS: dict[str, Way] = {
    "shared after": Way({(moe, "_apart"): lambda *_: False}, form=ours),  # the shared expert, on one stream with the others
    "portable": Way({(_moe_hopper, "fits"): lambda *_: False}),  # none of the Hopper products
    **FORM_WAYS, **ROW_WAYS, **CONFIG_WAYS, **ROUTER_WAYS,
}  # fmt: skip

FORMS: dict[str, Callable[[Problem, Weights], Form]] = {
    **{f"hf {name}": partial(transformers, implementation=name) for name in ("grouped_mm", "batched_mm", "eager")},
    "fusedblock experts": partial(transformers, implementation="fusedblock"),  # in transformers' block, with its router
    "fusedblock": ours,
    "fusedblock, as chosen": launched,
    "router, as chosen": routed,
    **{name: way.form or partial(launched, rows=way.rows) for name, way in WAYS.items()},  # inside `within`
}
# Those that compile something for every case, which `ahead` does in many processes at once.
COMPILED = tuple(name for name in FORMS if not name.startswith("hf "))


def within(name: str, call: Callable[[], Any]) -> Callable[[], Any]:
    """A call as the form of this name is to be run."""
    if name not in WAYS:
        return call
    way = WAYS[name]

    def run() -> Any:
        with ExitStack() as changed:
            for (module, attribute), value in way.settings.items():
                changed.enter_context(patch.object(module, attribute, value))
            return call()

    return run

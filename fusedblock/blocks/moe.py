"""The MLP of a mixture of experts: its numbers (MoeSpec), its weights, and one composition of router, experts and shared expert.

    routed = sum over the token's experts e of weight * down[e](gated(x @ gate_up[e].T))      chosen and weighted by the router
    out    = residual + routed + shared_down(act(shared_gate(x)) * shared_up(x)) * sigmoid(x @ shared_router.T), if shared

Run two ways: through the dispatcher, where autograd records it, and behind one registered op where no gradient is wanted.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedblock import ops
from fusedblock.blocks.functional import Call, target_of


@dataclass(frozen=True)
class MoeSpec:
    """Numerics of a mixture's MLP. No tensors, no model names.

    router: how experts are chosen and weighted. activation: "silu", "gelu", "gelu_tanh", "relu", "relu2", or ops.CLAMPED with
    its alpha and limit. transposed, interleaved: how the experts' weights lie, see kernels/moe_experts.py.
    shared_activation: of the shared expert.
    """

    router: ops.RouterSpec
    activation: str = "silu"
    alpha: float = 0.0
    limit: float = 0.0
    transposed: bool = False
    interleaved: bool = False
    shared_activation: str = "silu"


class MoeWeights(NamedTuple):
    """The live parameters, never copies. None: there is none.

    router `experts hidden`; router_bias and router_correction `experts`; gate_up `experts 2*ffn hidden` and down
    `experts hidden ffn`, or transposed `experts hidden 2*ffn` and `experts ffn hidden`; their biases `experts 2*ffn` and
    `experts hidden`. shared_gate, shared_up `shared_ffn hidden`, shared_down `hidden shared_ffn`, shared_router `1 hidden`.
    """

    router: Tensor
    gate_up: Tensor
    down: Tensor
    router_bias: Tensor | None = None
    router_correction: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    shared_gate: Tensor | None = None
    shared_up: Tensor | None = None
    shared_down: Tensor | None = None
    shared_router: Tensor | None = None


class Mixed(NamedTuple):
    """out `... hidden`; the router's logits `tokens experts`, and the weights and int32 indices `tokens top_k` of the chosen."""

    out: Tensor
    logits: Tensor
    weights: Tensor
    indices: Tensor


def wide_router(w: MoeWeights) -> bool:
    """Whether the router is of another dtype than the experts: transformers, from 5.24 on, keeps those of GLM-4 MoE and
    DeepSeek-V3 in fp32. Its rows are then converted, which no launch of ours does, and nothing is replayed."""
    router, experts = (getattr(t, "dtype", None) for t in (w.router, w.gate_up))  # check_mixture names one that is missing
    return router is not experts


def _routed(call: Call, spec: MoeSpec, w: MoeWeights, x: Tensor, residual: Tensor | None, training: bool) -> Mixed:
    """x `tokens hidden` through its experts, and the residual."""
    tokens, experts = x.shape[0], w.gate_up.shape[0]
    tile_rows = ops.choose_tile_rows(tokens, spec.router.top_k, experts, x.dtype.itemsize, target_of(x.device))
    rows = x.to(w.router.dtype) if wide_router(w) else x
    weights, indices, logits, *index = call(
        "moe_route", rows, w.router, w.router_bias, w.router_correction, *spec.router.numbers(rows.dtype), tile_rows
    )
    out = call(
        "moe_experts", x, w.gate_up, w.down, w.gate_up_bias, w.down_bias, weights, indices, *index, spec.activation, spec.alpha,
        spec.limit, spec.transposed, spec.interleaved, tile_rows, training, residual,
    )[0]  # fmt: skip
    return Mixed(out, logits, weights, indices)


def _shared(call: Call, spec: MoeSpec, w: MoeWeights, x: Tensor, training: bool) -> Tensor:
    """Of the shared expert all but the last product, which adds what the others have made."""
    g, _, _ = call("gated_mlp", x, w.shared_gate, w.shared_up, None, None, None, spec.shared_activation, 0.0, training)
    if w.shared_router is not None:  # one number a token: as well before the last product as after it
        (logit, *_) = call("linear", x, w.shared_router, None, None, None, 1.0)  # by our op: autocast does not see it
        g = g * torch.sigmoid(logit)
    return g


def _plus_shared(call: Call, w: MoeWeights, g: Tensor, routed: Tensor) -> Tensor:
    return call("linear", g, w.shared_down, None, routed, None, 1.0)[0]


def _whole(call: Call, spec: MoeSpec, w: MoeWeights, x: Tensor, residual: Tensor | None, training: bool) -> Mixed:
    """Router, experts and shared expert; in a CUDA graph of few tokens the shared one beside the others."""
    if not training and _apart(w, x):
        here = torch.cuda.current_stream(x.device)
        side = ops.beside(x.device.index, here.cuda_stream)
        side.wait_stream(here)
        try:
            with torch.cuda.stream(side):
                g = _shared(call, spec, w, x, training)
            mixed = _routed(call, spec, w, x, residual, training)
        finally:
            here.wait_stream(side)  # also after an error: a capture with work that nobody has joined cannot end
    else:
        mixed = _routed(call, spec, w, x, residual, training)
        if w.shared_gate is None:
            return mixed
        g = _shared(call, spec, w, x, training)
    return mixed._replace(out=_plus_shared(call, w, g, mixed.out))


# H200, 2026-12-01, us, the shared expert after the others and beside them: qwen2_moe T1 56 and 48, T64 303 and 289, T512 365 and
# 345; GLM-4.5-Air T1 103 and 92, T64 1067 and 1045, T512 1193 and 1156; DeepSeek-V3 T1 211 and 195, T64 4571 and 4528, T512 5445
# and 5384. With 4096 tokens each fills the GPU by itself: 1096 and 1068, 2748 and 2783, 10260 and 10193.
_APART = 512


def _apart(w: MoeWeights, x: Tensor) -> bool:
    """Whether the shared expert goes to a stream of its own. Only into a CUDA graph: launch by launch the host is what takes the
    time, and two streams take it more."""
    if w.shared_gate is None or torch.compiler.is_compiling():
        return False
    return ops.capturing(x.device) and x.shape[:-1].numel() <= _APART


def _compose(call: Call, x: Tensor, residual: Tensor | None, *args: Any) -> Mixed:
    """The registered op: launches of kernels and nothing else, so that they can be replayed."""
    n, m = len(MoeWeights._fields), len(_ROUTER)
    w, spec = MoeWeights(*args[:n]), MoeSpec(ops.RouterSpec(*args[n : n + m]), *args[n + m :])
    check_mixture(spec, w, x)  # where launches are replayed their key says all that this looks at
    return _whole(call, spec, w, x, residual, False)


_ROUTER = list(typing.get_type_hints(ops.RouterSpec).items())
_OWN = [(name, kind) for name, kind in typing.get_type_hints(MoeSpec).items() if name != "router"]
_WEIGHTS = [(n, Tensor | None if n in MoeWeights._field_defaults else Tensor) for n in MoeWeights._fields]
_NUMBERS = [*((f"route_{name}", kind) for name, kind in _ROUTER), *_OWN]


def _facts(args: tuple[Any, ...]) -> bool:
    """Of weights and numbers: what decides how gated_mlp stacks two weights."""
    w = MoeWeights(*args[: len(_WEIGHTS)])
    return w.shared_gate is not None and w.shared_up is not None and w.shared_gate.data_ptr() < w.shared_up.data_ptr()


_GIVEN = [("x", Tensor), ("residual", Tensor | None)]
_mixture = ops.define_composite("mixture", [*_GIVEN, *_WEIGHTS, *_NUMBERS], 4, _compose, _facts, len(_GIVEN))
ops.refuse_gradients("mixture", "mixture: no gradients; fusedblock.blocks.mixture takes other ops where they are wanted")


def _numbers(spec: MoeSpec) -> tuple[Any, ...]:
    own = tuple(getattr(spec, name) for name, _ in _OWN)
    return (*(getattr(spec.router, name) for name, _ in _ROUTER), *own)


def fixed_mixture(spec: MoeSpec, weights: MoeWeights) -> ops.Fixed:
    """What is the same in every call: who keeps it saves `mixture` from reading the layout of every weight anew."""
    return ops.Fixed((*_inside(weights), *_numbers(spec)), _facts)


def _inside(w: MoeWeights) -> MoeWeights:
    """What the registered op takes: of a gated shared expert nothing, whose elementwise steps no launch replays."""
    if w.shared_router is None:
        return w
    return w._replace(shared_gate=None, shared_up=None, shared_down=None, shared_router=None)


def mixture(
    spec: MoeSpec, weights: MoeWeights, x: Tensor, *, residual: Tensor | None = None, kept: ops.Fixed | None = None
) -> Mixed:
    """The MLP of a mixture, x `... hidden`, of the weights' dtype, added to the residual if one is given, like x.

    The weights of the experts are read where they are, and of few tokens only those that were chosen. Without gradients router,
    experts and a shared expert that is not gated are one registered op. A router whose logits are not rounded may be in fp32
    beside weights in 16 bits. kept: fixed_mixture(spec, weights) of an earlier call.
    Raises ShapeError, ValueError or TypeError naming the argument.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"mixture: x is {type(x).__name__}, expected a tensor")
    training = ops.wants_grad(x, residual, *weights)
    by_steps = training or wide_router(weights) or _apart(weights, x)
    if by_steps or weights.shared_router is not None or x.dim() < 1:  # else the registered op does
        check_mixture(spec, weights, x)
    rows = _as_rows(x)
    if residual is not None and (residual.shape, residual.dtype, residual.device) != (x.shape, x.dtype, x.device):
        like = f"{tuple(residual.shape)} {residual.dtype} on {residual.device}"
        raise ops.ShapeError(f"mixture: residual is {like}, expected x's {tuple(x.shape)} {x.dtype} on {x.device}")
    add = None if residual is None else residual.reshape(rows.shape)
    if by_steps:
        mixed = _whole(ops.dispatched, spec, weights, rows, add, training)
    elif torch.compiler.is_compiling():
        mixed = Mixed(*_mixture.op(rows, add, *_inside(weights), *_numbers(spec)))
    else:
        mixed = Mixed(*_mixture.straight((rows, add), kept or fixed_mixture(spec, weights)))
    out = mixed.out
    if weights.shared_router is not None and not by_steps:
        out = _plus_shared(ops.dispatched, weights, _shared(ops.dispatched, spec, weights, rows, training), out)
    return mixed._replace(out=out.view(x.shape))


def _spec(transposed: bool) -> Any:
    """Axes of x and the weights, for weights of the experts that lie so. Only its check is used: the op is a composition."""
    reads = {
        "x": "tokens hidden", "gate_up": "experts hidden 2*ffn" if transposed else "experts 2*ffn hidden",
        "down": "experts ffn hidden" if transposed else "experts hidden ffn", "router": "experts hidden",
        "router_bias": "experts", "router_correction": "experts", "gate_up_bias": "experts 2*ffn", "down_bias": "experts hidden",
        "shared_gate": "shared_ffn hidden", "shared_up": "shared_ffn hidden", "shared_down": "hidden shared_ffn",
        "shared_router": "one hidden",
    }  # fmt: skip
    return replace(
        ops.OPS["moe_route"].spec, name="mixture", reads=reads, optional=frozenset(MoeWeights._field_defaults),
        any_dtype=frozenset({"router", "router_bias", "router_correction"}), derive=_related, writes={}, scratch={}, stages=(),
    )  # fmt: skip


def _related(sizes: dict[str, int], args: Mapping[str, Any]) -> dict[str, int]:
    """Axes that are no others' equal."""
    if sizes["2*ffn"] != 2 * sizes["ffn"]:
        raise ops.ShapeError(f"mixture: down has ffn={sizes['ffn']}, but gate_up has 2*ffn={sizes['2*ffn']}")
    if sizes.get("one", 1) != 1:
        shape = tuple(args["shared_router"].shape)
        raise ops.ShapeError(f"mixture: shared_router has shape {shape}, expected (1, {sizes['hidden']})")
    return {}


_SPECS = {transposed: _spec(transposed) for transposed in (False, True)}


def _as_rows(x: Tensor) -> Tensor:
    """x `... hidden` as `tokens hidden`."""
    return x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 1 else x[None]


def like_rows(spec: MoeSpec, w: MoeWeights) -> Tensor:
    """The weight whose dtype a mixture's rows have: the router, but where it is in fp32 beside 16 bits and may be."""
    return w.gate_up if w.gate_up.dtype.itemsize == 2 and not spec.router.round_logits else w.router


def check_mixture(spec: MoeSpec, w: MoeWeights, x: Tensor) -> None:
    """Raises, before any of the operators runs, what each of them would about its own arguments, x `... hidden`."""
    if x.dim() < 1:
        raise ops.ShapeError(f"mixture: x has shape {tuple(x.shape)}, expected (... hidden)")
    router = spec.router
    for name, wanted, t in (("bias", router.bias, w.router_bias), ("correction", router.correction_bias, w.router_correction)):
        if wanted != (t is not None):
            raise ValueError(f"mixture: router_{name} is {'None' if t is None else 'a tensor'}, but the router has it: {wanted}")
    shared = {name: getattr(w, name) is not None for name in ("shared_gate", "shared_up", "shared_down")}
    if len({*shared.values()}) > 1 or (w.shared_router is not None and not any(shared.values())):
        missing = ", ".join(name for name, given in shared.items() if not given)
        raise ValueError(f"mixture: the shared expert has no {missing}")
    ops.check_gate("mixture", spec.activation, spec.alpha, spec.limit)
    ops.check_activation("mixture", spec.shared_activation, "shared_activation")
    rows = _as_rows(x)
    _SPECS[bool(spec.transposed)].axes({"x": rows, **w._asdict()})
    if wide_router(w) and (router.round_logits or w.router.dtype is not torch.float32):
        wide = "" if router.round_logits else ", expected the same or torch.float32"
        raise ValueError(f"mixture: router has dtype {w.router.dtype}, but x has {x.dtype}{wide}")
    if w.router_bias is not None and w.router_bias.dtype is not w.router.dtype:
        raise ValueError(f"mixture: router_bias has dtype {w.router_bias.dtype}, but router has {w.router.dtype}")
    ops.check_router("mixture", vars(router), w.router.shape[0])

"""Kernels as PyTorch operators: the only module that touches torch.library.

Every op is registered once, from its `Op` in kernels/: schema from the launcher's signature, fake kernel and costs from the
spec, autograd from the names of its backward op's parameters. On a GPU an op launches its kernels; elsewhere it computes
its plain-torch reference; inside `fusedblock.interpret.interpret()` the kernels run on the CPU.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import register_flop_formula

from fusedblock.kernels import attention as _attention
from fusedblock.kernels import decode_attention as _decode_attention
from fusedblock.kernels import gated_mlp as _gated_mlp
from fusedblock.kernels import linear as _linear
from fusedblock.kernels import norm as _norm
from fusedblock.kernels import qkv_rope as _qkv_rope
from fusedblock.kernels._attention import normalise_mask
from fusedblock.kernels._launch import runs_kernels
from fusedblock.kernels._replay import replayed
from fusedblock.kernels._spec import Cost, Op, ShapeError
from fusedblock.kernels._target import Target, override, target_of

__all__ = [
    "COSTS", "OPS", "ShapeError", "DECODE_ROWS", "Target", "attention",
    "define", "define_composite", "direct", "dispatched", "empty",
    "gated_mlp", "linear", "normalise_mask", "refuse_gradients", "qkv_rope", "rms_norm", "target_of",
]  # fmt: skip

# Queries times heads of a group up to this many take the split-KV kernel: a tile of them leaves most of the GPU idle.
DECODE_ROWS = _decode_attention.MAX_ROWS

_LIBRARY = torch.library.Library("fusedblock", "DEF")
OPS: dict[str, Op] = {}
# Op name -> its launches and their costs for given arguments; holds the composite ops of blocks/ too.
COSTS: dict[str, Callable[..., tuple[Cost, ...]]] = {}


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    hints = typing.get_type_hints(function)
    signature = inspect.signature(function)
    return signature.replace(parameters=[p.replace(annotation=hints[n]) for n, p in signature.parameters.items()])


def _schema(signature: inspect.Signature, results: int) -> str:
    def prototype() -> None: ...

    prototype.__signature__ = signature.replace(return_annotation=Tensor)  # type: ignore[attr-defined]
    arguments = torch.library.infer_schema(prototype, mutates_args=()).rpartition(" -> ")[0]
    return f"{arguments} -> " + ("Tensor" if results == 1 else "(" + ", ".join(["Tensor"] * results) + ")")


def define(name: str, signature: inspect.Signature, results: int, run: Callable[..., Any], fake: Callable[..., Any],
           costs: Callable[..., tuple[Cost, ...]]) -> Any:  # fmt: skip
    """Register fusedblock::name. run and fake return a tensor, or a tuple where results > 1; costs takes the same arguments."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0:  # torch would drop the tangents without a word
            raise NotImplementedError(f"{name}: fusedblock operators have no forward-mode derivative")
        return run(*args, **kwargs)

    _LIBRARY.define(name + _schema(signature, results))
    _LIBRARY.impl(name, checked, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusedblock::{name}", fake, lib=_LIBRARY)
    packet = getattr(torch.ops.fusedblock, name)
    register_flop_formula(packet, get_raw=True)(
        lambda *args, out_val=None, **kwargs: sum(cost.flops for cost in costs(*args, **kwargs))
    )
    COSTS[name] = costs
    return packet.default


def _register(op: Op) -> Any:
    spec, signature = op.spec, _signature(op.launch)
    names, results = list(signature.parameters), list(spec.writes)
    single = len(results) == 1

    def bound(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {**dict(zip(names, args)), **kwargs}

    def run(*args: Any, **kwargs: Any) -> Any:
        first = next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        if runs_kernels(first):
            out = op.launch(*args, **kwargs)
        else:
            spec.axes(bound(args, kwargs))
            with torch.autocast(first.device.type, enabled=False):  # kernels compute in the dtype they are given
                out = op.reference(*args, **kwargs)
        return out[0] if single else out

    def fake(*args: Any, **kwargs: Any) -> Any:
        out = spec.empty(bound(args, kwargs))
        return out[0] if single else out

    default = define(spec.name, signature, len(results), run, fake, lambda *a, **k: spec.costs(bound(a, k)))
    OPS[spec.name] = op
    if op.backward is not None:
        _autograd(op, names, results, _register(op.backward))
        refuse_gradients(op.backward.spec.name, f"{spec.name}: no double backward (create_graph=True)")
    return default


def refuse_gradients(name: str, why: str) -> None:
    """Differentiating fusedblock::name raises: without this, torch gives zeros and warns once."""

    def refuse(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(why)

    torch.library.register_autograd(f"fusedblock::{name}", refuse, lib=_LIBRARY)


def _autograd(op: Op, names: list[str], results: list[str], backward: Any) -> None:
    """Wire autograd by names: what the backward takes is saved, what it returns goes to the inputs of those names."""
    assert op.backward is not None
    takes, gives = list(_signature(op.backward.launch).parameters), list(op.backward.spec.writes)
    differentiable = [r for r in results if f"grad_{r}" in takes]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = (output,) if isinstance(output, Tensor) else output
        known = {**dict(zip(names, inputs)), **dict(zip(results, outputs))}
        for name in op.no_grad:
            if known[name] is not None:
                raise ValueError(f"{op.spec.name}: {name} is given, but gradients are wanted and there is no backward for it")
        for name, needed in zip(names, ctx.needs_input_grad):
            if needed and f"grad_{name}" not in gives and name not in op.passthrough:
                raise ValueError(f"{op.spec.name}: {name} requires a gradient, and the op has none for it")
        ctx.mark_non_differentiable(*(known[r] for r in results if r not in differentiable))
        ctx.set_materialize_grads(False)  # else autograd fills a zero gradient for every result that has none
        ctx.like = [(known[r].shape, known[r].dtype, known[r].device) for r in differentiable]
        kept = {n: known[n] for n in takes if n in known}
        ctx.tensors = [n for n, v in kept.items() if isinstance(v, Tensor)]
        ctx.others = {n: v for n, v in kept.items() if not isinstance(v, Tensor)}
        ctx.save_for_backward(*(kept[n] for n in ctx.tensors))

    def run_backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        need = dict(zip(names, ctx.needs_input_grad))
        given = dict(zip(results, grads))
        for r, (shape, dtype, device) in zip(differentiable, ctx.like):
            if given[r] is None:
                given[r] = torch.zeros(shape, dtype=dtype, device=device)
        known = {**dict(zip(ctx.tensors, ctx.saved_tensors)), **ctx.others}
        known.update({f"grad_{r}": g for r, g in given.items()})
        known.update({f"need_{n}": wanted for n, wanted in need.items()})
        made: dict[str, Any] = {}
        if any(need[g.removeprefix("grad_")] for g in gives):
            out = backward(*(known[n] for n in takes))
            made = dict(zip(gives, (out,) if isinstance(out, Tensor) else out))
        for name, grad in op.passthrough.items():
            made[f"grad_{name}"] = known[grad]
        return tuple(made.get(f"grad_{n}") if need[n] else None for n in names)

    torch.library.register_autograd(f"fusedblock::{op.spec.name}", run_backward, setup_context=setup_context, lib=_LIBRARY)


def dispatched(name: str, *args: Any) -> tuple[Any, ...]:
    """The results of a registered op through the dispatcher, where autograd sees it."""
    out = getattr(torch.ops.fusedblock, name).default(*args)
    return (out,) if isinstance(out, Tensor) else out


def direct(name: str, *args: Any) -> tuple[Tensor, ...]:
    """The results of an op without the dispatcher: kernels or reference, as run does."""
    op = OPS[name]
    if runs_kernels(args[0]):
        return op.launch(*args)
    op.spec.axes(_bound(op, args))
    return op.reference(*args)


def _bound(op: Op, args: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(inspect.signature(op.launch).parameters, args))


def empty(name: str, *args: Any) -> tuple[Tensor, ...]:
    """An op's results, not computed."""
    return OPS[name].spec.empty(_bound(OPS[name], args))


def _shape_only(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def define_composite(name: str, parameters: list[tuple[str, Any]], results: int, compose: Callable[..., Any],
                     facts: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Any:  # fmt: skip
    """Register fusedblock::name, a composition of ops for calls without gradients; parameters are (name, type).

    compose(call, *args) makes every step by call(op name, *op args): run, faked or costed by what `call` is. Its launches are
    replayed for arguments of a layout seen before; facts(args) is what else its choices depend on.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(n, kind, annotation=t) for n, t in parameters])

    def run(*args: Any) -> Any:
        return replayed(name, lambda: compose(direct, *args), args, facts(args))

    def fake(*args: Any) -> Any:
        return compose(empty, *args)

    def costs(*args: Any) -> tuple[Cost, ...]:
        found: list[Cost] = []

        def record(op_name: str, *op_args: Any) -> tuple[Tensor, ...]:
            bound = _bound(OPS[op_name], op_args)
            found.extend(OPS[op_name].spec.costs(bound))
            return OPS[op_name].spec.empty(bound)

        device = next(a.device for a in args if isinstance(a, Tensor))
        # Shapes only: on the meta device, whatever mode is counting or faking around this call.
        with _disable_current_modes(), override(target_of(device)):
            compose(record, *[_shape_only(a) if isinstance(a, Tensor) else a for a in args])
        return tuple(found)

    return define(name, signature, results, run, fake, costs)


_rms_norm_op = _register(_norm.OP)
_linear_op = _register(_linear.OP)
_qkv_rope_op = _register(_qkv_rope.OP)
_gated_mlp_op = _register(_gated_mlp.OP)
_attention_op = _register(_attention.OP)
_decode_attention_op = _register(_decode_attention.OP)


def _wants_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _rows(name: str, arg: str, x: Tensor) -> Tensor:
    if x.dim() < 1:
        raise ShapeError(f"{name}: {arg} has shape {tuple(x.shape)}, expected (... hidden)")
    return x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(x.shape[:-1].numel(), 0)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6, weight_offset: float = 0.0, round_early: bool = True) -> Tensor:
    """RMSNorm over the last axis: (weight + weight_offset) * x / sqrt(mean(x**2) + eps)  (Zhang & Sennrich 2019).

    x `... hidden`, weight `hidden`, of one dtype (fp32, fp16, bf16); returns `... hidden`. Statistics are fp32. round_early
    rounds the normalised x to x's dtype before the weight multiplies it, as HF's Llama does; False forms the product in
    fp32 (OLMo2, gpt-oss; Gemma with weight_offset=1). Raises ShapeError or ValueError naming the argument and both values.
    """
    y, _ = _rms_norm_op(_rows("rms_norm", "x", x), weight, eps, weight_offset, round_early, _wants_grad(x, weight))
    return y.view(x.shape)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, residual: Tensor | None = None) -> Tensor:
    """residual + x @ weight.T + bias in one launch.

    x `... in_features`, weight `out_features in_features`, bias `out_features`, residual `... out_features`; one dtype.
    Sums in fp32, rounded once. Raises ShapeError or ValueError naming the argument and both values.
    """
    if residual is not None and residual.shape[:-1] != x.shape[:-1]:
        expected = (*x.shape[:-1], *weight.shape[:1])
        raise ShapeError(f"linear: residual has shape {tuple(residual.shape)}, expected {tuple(expected)}")
    r = None if residual is None else _rows("linear", "residual", residual)
    out, _, _ = _linear_op(_rows("linear", "x", x), weight, bias, r, None)
    return out.view(*x.shape[:-1], weight.shape[0])


def qkv_rope(x: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor, cos: Tensor, sin: Tensor, *, head_dim: int,
             q_bias: Tensor | None = None, k_bias: Tensor | None = None, v_bias: Tensor | None = None,
             ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k, v = x @ weight.T + bias, then half-split rotary position embedding on q and k (RoFormer, arXiv 2104.09864).

    x `batch seq hidden`; q_weight `heads*head_dim hidden`, k_weight and v_weight `kv_heads*head_dim hidden`, biases their
    rows; cos and sin `batch|1 seq head_dim/2`, the angle of feature i turning it with feature i + head_dim/2 (the first half
    of HF's tables). Returns q `batch seq heads head_dim`, k and v `batch seq kv_heads head_dim`. The rotation is done on the
    fp32 sums, before the one rounding. Raises ShapeError or ValueError naming the argument and both values.
    """
    return _qkv_rope_op(x, q_weight, k_weight, v_weight, q_bias, k_bias, v_bias, cos, sin, None, head_dim, 0.0)


def gated_mlp(x: Tensor, gate_weight: Tensor, up_weight: Tensor, *, activation: str = "silu",
              gate_bias: Tensor | None = None, up_bias: Tensor | None = None) -> Tensor:  # fmt: skip
    """activation(x @ gate_weight.T + gate_bias) * (x @ up_weight.T + up_bias)  (GLU variants, arXiv 2002.05202).

    x `... hidden`, weights `ffn hidden`, biases `ffn`; activation "silu", "gelu" (erf) or "gelu_tanh". Returns `... ffn`.
    With gradients wanted the two pre-activations are kept. Raises ShapeError or ValueError naming the argument and both values.
    """
    save = _wants_grad(x, gate_weight, up_weight, gate_bias, up_bias)
    rows = _rows("gated_mlp", "x", x)
    out, _, _ = _gated_mlp_op(rows, gate_weight, up_weight, gate_bias, up_bias, None, activation, 0.0, save)
    return out.view(*x.shape[:-1], gate_weight.shape[0])


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None, scale: float | None = None,
              return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale * q @ k.T + mask) @ v, never forming the matrix (FlashAttention-2, arXiv 2307.08691).

    q `batch seq heads head_dim`, k and v `batch context kv_heads head_dim`, heads a multiple of kv_heads, head_dim 16 to 256
    in multiples of 8; any strides. causal is aligned bottom-right: query i sees keys up to i + context - seq. mask: bool
    `batch context` or `batch|1 heads|1 seq context` (True: may be attended), or floating `batch|1 heads|1 seq context`
    added to the logits (no gradient). scale defaults to head_dim**-0.5. Returns out `batch seq heads head_dim`, with
    return_lse also the natural log-sum-exp `batch heads seq` in fp32 (no gradient). A row that may attend to nothing gives 0
    and lse -inf. The backward recomputes and is deterministic. Raises ShapeError or ValueError naming the argument and both
    values.
    """
    m = normalise_mask(mask, q, k)
    few = k.dim() == 4 and k.shape[2] and q.shape[1] * q.shape[2] <= DECODE_ROWS * k.shape[2] and not _wants_grad(q, k, v)
    op = _decode_attention_op if few else _attention_op
    out, lse = op(q, k, v, m, causal, q.shape[-1] ** -0.5 if scale is None else scale)
    return (out, lse) if return_lse else out

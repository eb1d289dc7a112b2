"""The functional core: one composition of a layer, run four ways.

`call(op, *args)` is the only thing that differs: through the dispatcher, where autograd records it; straight to the kernels
inside one registered op when no gradient is wanted (host time of an eager decode step); to empty results for the fake
kernel; to costs for the report.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedblock import ops
from fusedblock.blocks.plan import BlockSpec, Plan, plan

Call = Callable[..., Any]


class BlockWeights(NamedTuple):
    """The live parameters of a layer, never copies: norms `hidden`; q `heads*head_dim hidden`; k, v `kv_heads*head_dim hidden`;
    o `hidden heads*head_dim`; gate, up `ffn hidden`; down `hidden ffn`; biases by their rows."""

    input_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    post_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@torch.compiler.assume_constant_result
def _target_of(device: torch.device) -> Any:
    """The target, which torch.compile cannot trace: it asks the device."""
    return ops.target_of(device)


def _plan(spec: BlockSpec, x: Tensor, context: int, training: bool, masked: bool) -> Plan:
    target, (batch, seq) = _target_of(x.device), x.shape[:2]
    # Sizes that torch.compile keeps symbolic have no hash, and it warns of caches.
    symbolic = any(isinstance(n, torch.SymInt) for n in (batch, seq, context))
    choose = plan.__wrapped__ if symbolic or torch.compiler.is_compiling() else plan
    return choose(spec, batch=batch, seq=seq, context=context, dtype=x.dtype, training=training, target=target, masked=masked)


def _front(call: Call, spec: BlockSpec, w: BlockWeights, x: Tensor, cos: Tensor, sin: Tensor,
           training: bool) -> tuple[Tensor, ...]:  # fmt: skip
    """q `batch seq heads head_dim`, k and v `batch seq kv_heads head_dim`, rotated."""
    y, _, _ = call("norm", x.reshape(-1, spec.hidden), w.input_norm, None, None, "rms", spec.eps, spec.weight_offset,
                   spec.round_early, training, x.dtype)  # fmt: skip
    half = spec.head_dim // 2
    weights = [t.unflatten(0, (-1, spec.head_dim)) for t in (w.q, w.k, w.v)]
    biases = [None if t is None else t.unflatten(0, (-1, spec.head_dim)) for t in (w.q_bias, w.k_bias, w.v_bias)]
    q, k, v, _, _ = call("qkv_rope", y.view(x.shape), *weights, *biases, cos[..., :half], sin[..., :half], None, None, None, False,
                         "rms", 0.0, 0.0, False, False)  # fmt: skip
    return q, k, v


def _back(call: Call, spec: BlockSpec, w: BlockWeights, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
          causal: bool, training: bool) -> Tensor:  # fmt: skip
    steps = _plan(spec, x, k.shape[1], training, mask is not None)
    rows = x.reshape(-1, spec.hidden)
    attend = "decode_attention" if steps.decode else "attention"
    a, _ = call(attend, q, k, v, mask, causal, spec.scale)
    gamma = w.post_norm if steps.row_statistics else None
    h, y, sumsq = call("linear", a.reshape(rows.shape[0], spec.heads * spec.head_dim), w.o, w.o_bias, rows, gamma, 1.0)
    if not steps.row_statistics:
        y, _, _ = call("norm", h, w.post_norm, None, None, "rms", spec.eps, spec.weight_offset, spec.round_early, training,
                       h.dtype)  # fmt: skip
        sumsq = None
    g, _, _ = call("gated_mlp", y, w.gate, w.up, w.gate_bias, w.up_bias, sumsq, spec.activation, spec.eps, training)
    out, _, _ = call("linear", g, w.down, w.down_bias, h, None, 1.0)
    # Not a view to autograd: hooks on the layer's result (FSDP2's) and in-place operations after it then mean this tensor.
    return torch.ops.aten._unsafe_view.default(out, x.shape)


# The composite ops: the same composition behind one registered op each, for calls without gradients.
_T, _O = Tensor, Tensor | None
_WEIGHTS = [(n, _T if n in BlockWeights._fields[:9] else _O) for n in BlockWeights._fields]
_NUMBERS = [("hidden", int), ("ffn", int), ("heads", int), ("kv_heads", int), ("head_dim", int), ("scale", float), ("eps", float),
            ("activation", str), ("weight_offset", float), ("round_early", bool)]  # fmt: skip
_N_WEIGHTS, _N_NUMBERS = len(_WEIGHTS), len(_NUMBERS)


def _composite(name: str, extra: list[tuple[str, Any]], results: int, compose: Callable[..., Any]) -> Any:
    n = len(extra)

    def composed(call: Call, *args: Any) -> Any:
        return compose(call, BlockSpec(*args[n + _N_WEIGHTS :]), BlockWeights(*args[n : n + _N_WEIGHTS]), *args[:n])

    gate, up = (n + BlockWeights._fields.index(field) for field in ("gate", "up"))

    def facts(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[gate].data_ptr() < args[up].data_ptr(),)  # decides how gated_mlp stacks the two weights

    return ops.define_composite(name, [*extra, *_WEIGHTS, *_NUMBERS], results, composed, facts)


def _compose_front(call: Call, spec: BlockSpec, w: BlockWeights, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return _front(call, spec, w, x, cos, sin, False)


def _compose_back(call: Call, spec: BlockSpec, w: BlockWeights, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
                  causal: bool) -> Any:  # fmt: skip
    return _back(call, spec, w, x, q, k, v, mask, causal, False)


def _compose_block(call: Call, spec: BlockSpec, w: BlockWeights, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None,
                   causal: bool) -> Any:  # fmt: skip
    q, k, v = _front(call, spec, w, x, cos, sin, False)
    return _back(call, spec, w, x, q, k, v, mask, causal, False)


_block_front = _composite("block_front", [("x", _T), ("cos", _T), ("sin", _T)], 3, _compose_front)
_block_back = _composite(  # fmt: skip
    "block_back", [("x", _T), ("q_states", _T), ("k_states", _T), ("v_states", _T), ("mask", _O), ("causal", bool)], 1,
    _compose_back,
)
_block = _composite("block", [("x", _T), ("cos", _T), ("sin", _T), ("mask", _O), ("causal", bool)], 1, _compose_block)


for _name in ("block_front", "block_back", "block"):
    ops.refuse_gradients(_name, f"{_name}: no gradients; fusedblock.blocks.forward takes other ops where they are wanted")


def _numbers(spec: BlockSpec) -> tuple[Any, ...]:
    return tuple(getattr(spec, n) for n, _ in _NUMBERS)


def forward(
    spec: BlockSpec, weights: BlockWeights, x: Tensor, cos: Tensor, sin: Tensor, *, mask: Tensor | None = None,
    causal: bool = True,
    update: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> Tensor:  # fmt: skip
    """One decoder layer: x + o(attention(norm(x))), then h + down(act(gate(norm(h))) * up(norm(h))).

    x `batch seq hidden`; cos and sin `batch|1 seq head_dim` as HF makes them (two equal halves; the first is read); mask and
    causal as in fusedblock.ops.attention. update, if given, receives the new keys and values in HF's cache layout
    `batch kv_heads seq head_dim` and returns all keys and values to attend to in that layout. Returns `batch seq hidden`.
    Without gradients the layer is one registered op (two around update). Raises ShapeError or ValueError naming the argument.
    """
    if torch.is_grad_enabled() and (x.requires_grad or any(t is not None and t.requires_grad for t in weights)):
        q, k, v = _front(ops.dispatched, spec, weights, x, cos, sin, True)
        k, v = _through(update, k, v)
        m = ops.normalise_mask(mask, q, k)
        return _back(ops.dispatched, spec, weights, x, q, k, v, m, causal, True)
    if update is None:
        m = mask if mask is None or mask.dim() == 4 else mask[:, None, None, :]
        return _block(x, cos, sin, m, causal, *weights, *_numbers(spec))
    q, k, v = _block_front(x, cos, sin, *weights, *_numbers(spec))
    k, v = _through(update, k, v)
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):  # learned keys and values: prefix tuning
        return _back(ops.dispatched, spec, weights, x, q, k, v, ops.normalise_mask(mask, q, k), causal, True)
    return _block_back(x, q, k, v, ops.normalise_mask(mask, q, k), causal, *weights, *_numbers(spec))


def _through(update: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """HF caches hold `batch kv_heads seq head_dim`: views in, views out."""
    if update is None:
        return k, v
    k, v = update(k.transpose(1, 2), v.transpose(1, 2))
    return k.transpose(1, 2), v.transpose(1, 2)

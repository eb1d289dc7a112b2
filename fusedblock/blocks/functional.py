"""The functional core: one composition of a layer, run four ways.

`call(op, *args)` is the only thing that differs: through the dispatcher, where autograd records it; straight to the kernels
inside one registered op when no gradient is wanted (host time of an eager decode step); to empty results for the fake
kernel; to costs for the report.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedblock import debug, ops
from fusedblock.blocks.plan import BlockSpec, Plan, plan

Call = Callable[..., Any]
# Weight's name -> the linear layer itself, `tokens in_features` to `tokens out_features`, where it is not the plain product.
Own = Mapping[str, Callable[[Tensor], Tensor]]
Mlp = Callable[[Tensor, Tensor], Tensor]  # (normalised rows, residual), `batch seq hidden`, to what the layer returns
_NONE: Own = {}


class BlockWeights(NamedTuple):
    """The live parameters of a layer, never copies or views. None: the layer has none.

    q `heads*head_dim hidden`; k, v `kv_heads*head_dim hidden`; o `hidden heads*head_dim`; gate, up `ffn hidden`; down
    `hidden ffn`; all the other way round with BlockSpec.transposed. With a fused qkv_layout, q is the one weight of all three;
    with mlp "gated_stacked", up is gate and up; with "mixture" there is no MLP here. Norms `hidden`; q_norm, k_norm
    `head_dim`, `heads head_dim` or, for qk_norm "full", `heads*head_dim`. Biases by their rows. sinks `heads`: a logit of one
    more key, whose value is 0.
    """

    q: Tensor
    o: Tensor
    up: Tensor | None = None
    down: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    gate: Tensor | None = None
    attn_norm: Tensor | None = None
    attn_out_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    attn_norm_bias: Tensor | None = None
    attn_out_norm_bias: Tensor | None = None
    mlp_norm_bias: Tensor | None = None
    mlp_out_norm_bias: Tensor | None = None
    sinks: Tensor | None = None


class Scope(NamedTuple):
    """Which keys a query sees: a mask that the operators take; how many before and after its own, -1: all; int32 boundaries of
    sequences, `segments+1`, among the queries and among the keys of the whole batch."""

    mask: Tensor | None
    left: int
    right: int
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None


class Slots(NamedTuple):
    """A cache of fixed length: keys, values `batch kv_heads slots head_dim`; length, an int64 tensor (): how many are filled."""

    keys: Tensor
    values: Tensor
    length: Tensor


# Norms multiply in the dtype they are kept in, sinks are a logit; everything else is cast to the compute dtype under autocast.
_KEPT = frozenset(n for n in BlockWeights._fields if "_norm" in n or n == "sinks")


@torch.compiler.assume_constant_result
def target_of(device: torch.device) -> Any:
    """The target, which torch.compile cannot trace: it asks the device."""
    return ops.target_of(device)


def _plan(spec: BlockSpec, x: Tensor, context: int, training: bool, scope: Scope, compute: torch.dtype, own: Own) -> Plan:
    target, (batch, seq) = target_of(x.device), x.shape[:2]
    # Sizes that torch.compile keeps symbolic have no hash, and it warns of caches.
    symbolic = any(isinstance(n, torch.SymInt) for n in (batch, seq, context))
    choose = plan.__wrapped__ if symbolic or torch.compiler.is_compiling() else plan
    return choose(spec, batch=batch, seq=seq, context=context, dtype=compute, training=training, target=target,
                  masked=scope.mask is not None, packed=scope.cu_seqlens_q is not None, autocast=compute is not x.dtype,
                  own=tuple(own))  # fmt: skip


def _norm(call: Call, spec: BlockSpec, w: BlockWeights, name: str, x: Tensor, training: bool, *,
          residual: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    """x `tokens hidden` normalised by the weights of that name, plus the residual, in dtype."""
    dtype = residual.dtype if residual is not None else dtype or x.dtype
    y, _, _ = call("norm", x, getattr(w, name), getattr(w, name + "_bias", None), residual, spec.norm, spec.eps,
                   spec.weight_offset, spec.round_early, training, dtype)  # fmt: skip
    return y


def _matrix(spec: BlockSpec, w: Tensor | None) -> Tensor:
    assert w is not None
    return w.t() if spec.transposed else w


def _heads(spec: BlockSpec, fused: Tensor | None, *split: Tensor | None) -> list[Tensor | None]:
    """q, k, v as `heads head_dim ...` views, of weights `rows hidden` or biases `rows`."""
    if spec.qkv_layout == "split" or fused is None:
        return [None if t is None else t.unflatten(0, (-1, spec.head_dim)) for t in (fused, *split)]
    return list(_parts(spec, fused, 0))


def _parts(spec: BlockSpec, fused: Tensor, axis: int) -> Sequence[Tensor]:
    """q, k, v out of what is fused along an axis, which becomes heads and head_dim."""
    d = spec.head_dim
    if spec.qkv_layout == "per_head":
        return fused.unflatten(axis, (spec.heads, 3, d)).unbind(axis + 1)
    sizes = [spec.heads * d, spec.kv_heads * d, spec.kv_heads * d]
    return [t.unflatten(axis, (-1, d)) for t in fused.split(sizes, axis)]


def _table(spec: BlockSpec, t: Tensor | None) -> Tensor | None:
    """`1|batch seq half_rotary`: one column for each angle."""
    if t is None or not spec.rope:
        return None
    return t if spec.tables == "short" else t[..., ::2] if spec.tables == "repeat" else t[..., : t.shape[-1] // 2]


def _front(call: Call, spec: BlockSpec, w: BlockWeights, x: Tensor, cos: Tensor | None, sin: Tensor | None, training: bool,
           own: Own = _NONE) -> tuple[Tensor, ...]:  # fmt: skip
    """q `batch seq heads head_dim`, k and v `batch seq kv_heads head_dim`, and the rows that they were made of."""
    compute = w.q.dtype
    y = x.reshape(-1, spec.hidden)
    if w.attn_norm is not None:
        y = _norm(call, spec, w, "attn_norm", y, training, dtype=compute)
    y = y.to(compute)
    cos, sin = _table(spec, cos), _table(spec, sin)
    apart = spec.qk_norm == "full" or _takes_own(own, "q", "k", "v")
    if _takes_own(own, "q", "k", "v"):
        q, k, v = _own_heads(spec, w, y, own, x.shape[:2])
    else:
        matrices = _heads(spec, _matrix(spec, w.q), *[None if t is None else _matrix(spec, t) for t in (w.k, w.v)])
        biases = _heads(spec, w.q_bias, w.k_bias, w.v_bias)
        turn = (None, None) if apart else (cos, sin)
        norms = (None, None) if apart or w.q_norm is None else (_per_head(w.q_norm, spec), _per_head(w.k_norm, spec))
        save = training and norms[0] is not None
        q, k, v, _, _ = call("qkv_rope", y.view(x.shape), *matrices, *biases, *turn, None, *norms, spec.rope == "interleaved",
                             spec.norm, spec.eps, spec.weight_offset, spec.round_early, save)  # fmt: skip
    if apart and w.q_norm is not None:
        width_q, width_k = (n * spec.head_dim if spec.qk_norm == "full" else spec.head_dim for n in (spec.heads, spec.kv_heads))
        q, k = (_norm(call, spec, w, name, t.reshape(-1, width), training).view(t.shape)
                for name, t, width in (("q_norm", q, width_q), ("k_norm", k, width_k)))  # fmt: skip
    if apart and cos is not None:
        q, k = call("rope", q, k, cos, sin, spec.rope == "interleaved")
    return q, k, v, y


def _takes_own(own: Own, *names: str) -> bool:
    return any(name in own for name in names)


def _linear(spec: BlockSpec, w: BlockWeights, name: str, x: Tensor, own: Own) -> Tensor:
    """A linear layer beside one that runs itself: it too is a product of its own."""
    if name in own:
        return own[name](x)
    return torch.nn.functional.linear(x, _matrix(spec, getattr(w, name)), getattr(w, name + "_bias"))


def _own_heads(spec: BlockSpec, w: BlockWeights, y: Tensor, own: Own, shape: Sequence[int]) -> Sequence[Tensor]:
    """q, k, v before norm and rotation, `batch seq heads head_dim`, of y `tokens hidden`."""
    names = ("q", "k", "v") if spec.qkv_layout == "split" else ("q",)
    made = [_linear(spec, w, name, y, own).view(*shape, -1) for name in names]
    return [t.unflatten(2, (-1, spec.head_dim)) for t in made] if spec.qkv_layout == "split" else _parts(spec, made[0], 2)


def _own_mlp(spec: BlockSpec, w: BlockWeights, y: Tensor, own: Own) -> Tensor:
    """What the last linear layer of the MLP reads, of y `tokens hidden`."""
    if spec.mlp == "plain":
        return ops.plain_activate(_linear(spec, w, "up", y, own), spec.activation)
    if spec.mlp == "gated_stacked":
        gate, up = _linear(spec, w, "up", y, own).chunk(2, -1)
    else:
        gate, up = (_linear(spec, w, name, y, own) for name in ("gate", "up"))
    return ops.plain_activate(gate, spec.activation) * up


def _per_head(w: Tensor | None, spec: BlockSpec) -> Tensor:
    assert w is not None
    return w if w.dim() == 2 else w.view(1, spec.head_dim)


def _branch(call: Call, spec: BlockSpec, w: BlockWeights, x: Tensor, matrix: str, out_norm: str, residual: Tensor,
            training: bool, own: Own, gamma: Tensor | None = None) -> tuple[Tensor, ...]:  # fmt: skip
    """The end of a branch: its last linear layer, added to the residual, and the norm before or after the addition."""
    after = getattr(w, out_norm) is not None
    inside = after and spec.residual != "post"
    scale = 1.0 if inside else spec.branch_scale
    if matrix in own:
        made = own[matrix](x)
        out: tuple[Tensor, ...] = (made if inside else residual + (made if scale == 1.0 else made * scale),)
    else:
        out = call("linear", x, _matrix(spec, getattr(w, matrix)), getattr(w, matrix + "_bias"), None if inside else residual,
                   gamma, scale)  # fmt: skip
    if not after:
        return out
    return (_norm(call, spec, w, out_norm, out[0], training, residual=residual if inside else None),)


def _attend(call: Call, op: str, spec: BlockSpec, w: BlockWeights, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
    """`batch seq heads head_dim`, or with packed sequences `1 tokens heads head_dim`."""
    if scope.cu_seqlens_q is not None:
        q, k, v = (t.reshape(1, -1, *t.shape[2:]) for t in (q, k, v))
    return call(op, *ops.attention_args(q, k, v, scale=spec.scale, sinks=w.sinks, softcap=spec.softcap, **scope._asdict()))[0]


def _back(call: Call, spec: BlockSpec, w: BlockWeights, x: Tensor, rows: Tensor, q: Tensor, k: Tensor, v: Tensor,
          scope: Scope, training: bool, own: Own = _NONE) -> Any:  # fmt: skip
    """The layer's result `batch seq hidden`; with mlp "mixture" the two that its MLP adds up: the stream `batch seq hidden`, and
    the normalised rows `tokens hidden` that the experts read."""
    compute = w.q.dtype
    steps = _plan(spec, x, k.shape[1], training, scope, compute, own)
    stream = x.reshape(-1, spec.hidden)
    a = _attend(call, "decode_attention" if steps.decode else "attention", spec, w, q, k, v, scope)
    a = a.reshape(stream.shape[0], spec.heads * spec.head_dim)
    gamma = w.mlp_norm if steps.row_statistics else None
    h, *statistics = _branch(call, spec, w, a, "o", "attn_out_norm", stream, training, own, gamma)
    sumsq = None
    if steps.row_statistics:
        y, sumsq = statistics
    elif w.mlp_norm is not None:
        y = _norm(call, spec, w, "mlp_norm", stream if spec.residual == "parallel" else h, training, dtype=compute)
    else:
        y = rows if spec.residual == "parallel" else h.to(compute)
    if spec.mlp == "mixture":
        return h.view(x.shape), y
    if _takes_own(own, "gate", "up"):
        g = _own_mlp(spec, w, y, own)
    elif spec.mlp == "plain":
        g, _ = call("plain_mlp", y, _matrix(spec, w.up), w.up_bias, spec.activation, training)
    else:
        stacked = spec.mlp == "gated_stacked"
        gate, up = _matrix(spec, w.up).split(spec.ffn) if stacked else (w.gate, w.up)
        gate_bias, up_bias = w.up_bias.split(spec.ffn) if stacked and w.up_bias is not None else (w.gate_bias, w.up_bias)
        g, _, _ = call("gated_mlp", y, gate, up, gate_bias, up_bias, sumsq, spec.activation, spec.eps, training)
    out = _branch(call, spec, w, g, "down", "mlp_out_norm", h, training, own)[0]
    # Not a view to autograd: hooks on the layer's result (FSDP2's) and in-place operations after it then mean this tensor.
    return torch.ops.aten._unsafe_view.default(out, x.shape)


# The composite ops: the same composition behind one registered op each, for calls without gradients.
_T, _O = Tensor, Tensor | None
_WEIGHTS = [(n, _O if n in BlockWeights._field_defaults else _T) for n in BlockWeights._fields]
_NUMBERS = list(typing.get_type_hints(BlockSpec).items())
_N_WEIGHTS = len(_WEIGHTS)


def _composed(compose: Callable[..., Any], n: int) -> Callable[..., Any]:
    """compose(call, spec, weights, *given) as a function of n arguments given, then the weights, then the numbers."""

    def composed(call: Call, *args: Any) -> Any:
        return compose(call, BlockSpec(*args[n + _N_WEIGHTS :]), BlockWeights(*args[n : n + _N_WEIGHTS]), *args[:n])

    return composed


def _composite(name: str, extra: list[tuple[str, Any]], results: int, compose: Callable[..., Any]) -> ops.Composite:
    n = len(extra)
    return ops.define_composite(name, [*extra, *_WEIGHTS, *_NUMBERS], results, _composed(compose, n), _facts, n)


def _facts(args: tuple[Any, ...]) -> bool:
    """Of weights and numbers: what decides how gated_mlp stacks two weights."""
    w = BlockWeights(*args[:_N_WEIGHTS])
    return w.gate is not None and w.up is not None and w.gate.data_ptr() < w.up.data_ptr()


def fixed(spec: BlockSpec, weights: BlockWeights) -> ops.Fixed:
    """What is the same in every call of a layer. Who keeps it saves `forward` from reading the layout of every weight anew."""
    return ops.Fixed((*weights, *_numbers(spec)), _facts)


def _run(composite: ops.Composite, spec: BlockSpec, weights: BlockWeights, kept: ops.Fixed | None, *given: Any) -> Any:
    if torch.compiler.is_compiling():
        return composite.op(*given, *weights, *_numbers(spec))
    return composite.straight(given, kept or fixed(spec, weights))


def _compose_front(call: Call, spec: BlockSpec, w: BlockWeights, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Any:
    return _front(call, spec, w, x, cos, sin, False)[:3]


def _compose_front_rows(call: Call, spec: BlockSpec, w: BlockWeights, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Any:
    return _front(call, spec, w, x, cos, sin, False)


def _shares_rows(spec: BlockSpec) -> bool:
    """Whether the MLP reads the normalised rows that attention read."""
    return spec.residual == "parallel" and spec.norms == "attn_norm"


def _compose_back(call: Call, spec: BlockSpec, w: BlockWeights, x: Tensor, rows: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
                  *scope: Any) -> Any:  # fmt: skip
    return _back(call, spec, w, x, x.reshape(-1, spec.hidden) if rows is None else rows, q, k, v, Scope(*scope), False)


def _compose_block(call: Call, spec: BlockSpec, w: BlockWeights, x: Tensor, cos: Tensor | None, sin: Tensor | None,
                   *scope: Any) -> Any:  # fmt: skip
    q, k, v, rows = _front(call, spec, w, x, cos, sin, False)
    return _back(call, spec, w, x, rows, q, k, v, Scope(*scope), False)


def _compose_slots(call: Call, spec: BlockSpec, w: BlockWeights, x: Tensor, cos: Tensor | None, sin: Tensor | None,
                   mask: Tensor | None, keys: Tensor, values: Tensor, length: Tensor) -> Any:  # fmt: skip
    q, k, v, rows = _front(call, spec, w, x, cos, sin, False)
    ops.store_slots(k, v, keys, values, length)
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    return _back(call, spec, w, x, rows, q, k, v, Scope(ops.normalise_mask(mask, q, k), -1, -1), False)


# No operator: it writes into its arguments, and who looks on sees the cache's own update instead.
_block_slots = ops.Composite("block_slots", None, _composed(_compose_slots, 7))
_SCOPE = [("mask", _O), ("left", int), ("right", int), ("cu_seqlens_q", _O), ("cu_seqlens_k", _O)]
_FRONT = [("x", _T), ("cos", _O), ("sin", _O)]
_block_front = _composite("block_front", _FRONT, 3, _compose_front)
_block_front_rows = _composite("block_front_rows", _FRONT, 4, _compose_front_rows)
_block_back = _composite(  # fmt: skip
    "block_back",
    [("x", _T), ("rows", _O), ("q_states", _T), ("k_states", _T), ("v_states", _T), *_SCOPE], 1, _compose_back,
)
_block = _composite("block", [*_FRONT, *_SCOPE], 1, _compose_block)
# Of layers with a mixture: up to the rows that the experts read.
_block_back_open = _composite(  # fmt: skip
    "block_back_open",
    [("x", _T), ("rows", _O), ("q_states", _T), ("k_states", _T), ("v_states", _T), *_SCOPE], 2, _compose_back,
)
_block_open = _composite("block_open", [*_FRONT, *_SCOPE], 2, _compose_block)


for _name in ("block_front", "block_front_rows", "block_back", "block", "block_back_open", "block_open"):
    ops.refuse_gradients(_name, f"{_name}: no gradients; fusedblock.blocks.forward takes other ops where they are wanted")


def _numbers(spec: BlockSpec) -> tuple[Any, ...]:
    return tuple(getattr(spec, field.name) for field in dataclasses.fields(spec))


def _cast(w: BlockWeights, dtype: torch.dtype) -> BlockWeights:
    """Matrices and biases in dtype, norms and sinks as they are. To autograd the casts are steps of their own."""
    cast: list[Any] = [t if t is None or n in _KEPT else t.to(dtype) for n, t in zip(w._fields, w)]
    return BlockWeights(*cast)


def forward(
    spec: BlockSpec, weights: BlockWeights, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, *,
    mask: Tensor | None = None, causal: bool = True, windowed: bool = True,
    cu_seqlens: tuple[Tensor | None, Tensor | None] = (None, None),
    update: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None, compute_dtype: torch.dtype | None = None,
    own: Own = _NONE, kept: ops.Fixed | None = None, slots: Slots | None = None, mlp: Mlp | None = None,
) -> Tensor:  # fmt: skip
    """One transformer layer: h = x + o(attention(norm(x))), then h + down(act(gate(norm(h))) * up(norm(h))), or the variation of
    it that spec says.

    x `batch seq hidden`; cos and sin `batch|1 seq rotary` (None without rope), their columns repeated as spec.tables says; mask
    and causal as in fusedblock.attention. windowed: whether the window of spec holds, beside the mask. cu_seqlens: int32
    `segments+1` each, the boundaries of packed sequences among all queries and all keys of the batch. update, if given, receives
    the new keys and values in HF's cache layout `batch kv_heads seq head_dim` and returns all keys and values to attend to in
    that layout. compute_dtype: multiply in this dtype while x, the residual stream and the norms keep theirs, as under autocast.
    own: linear layers, by their weight's name, that are more than a product (adapters): functions of `batch seq in_features` that
    return `batch seq out_features`; their weights are then read for sizes only. kept: fixed(spec, weights), of an earlier call.
    slots: what update would fill, and return, if that is all that it does. mlp: the end of a layer with a mixture, and of
    no other. Returns `batch seq hidden`.
    Without gradients the layer is one registered op (two around update), and a mixture is one more. Raises ShapeError or
    ValueError naming the argument.
    """
    if (mlp is None) != (spec.mlp != "mixture") or (mlp and (spec.residual, spec.branch_scale) != ("sequential", 1.0)):
        given = "None" if mlp is None else "given"
        raise ValueError(f"forward: mlp is {given}, but the layer is {spec.residual} with mlp={spec.mlp!r}; only a sequential "
                         "layer with mlp='mixture' takes one, and it must")  # fmt: skip
    out = _forward(spec, weights, x, cos, sin, mask, causal, windowed, cu_seqlens, update, compute_dtype, own, kept, slots)
    if mlp is None:
        return out
    h, y = out
    return mlp(y.view(x.shape), h)


def _forward(
    spec: BlockSpec, weights: BlockWeights, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None, causal: bool,
    windowed: bool, cu_seqlens: tuple[Tensor | None, Tensor | None], update: Any, compute_dtype: torch.dtype | None, own: Own,
    kept: ops.Fixed | None, slots: Slots | None,
) -> Any:  # fmt: skip
    """What `_back` says."""
    if spec.rope and cos is not None and sin is not None and debug.watching(x):
        debug.check_tables(cos, sin, spec.tables)
    left, right = (spec.window_left, spec.window_right) if windowed else (-1, -1)
    if causal:
        right = 0
    grad = torch.is_grad_enabled() and (x.requires_grad or any(t is not None and t.requires_grad for t in weights))
    if own:  # 3-D as without us: what an adapter does may depend on the position
        own = {name: _by_rows(function, x.shape[:2]) for name, function in own.items()}
        grad = torch.is_grad_enabled()
    if grad or own or compute_dtype not in (None, x.dtype):
        w = weights if compute_dtype is None else _cast(weights, compute_dtype)
        q, k, v, rows = _front(ops.dispatched, spec, w, x, cos, sin, grad, own)
        k, v = (t.to(w.q.dtype) for t in _through(update, k, v))  # a cache may be older than autocast
        learned = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
        scope = Scope(ops.normalise_mask(mask, q, k), left, right, *cu_seqlens)
        return _back(ops.dispatched, spec, w, x, rows, q, k, v, scope, grad or learned, own)
    if update is None:
        m = mask if mask is None or mask.dim() == 4 else mask[:, None, None, :]
        whole_block = _block_open if spec.mlp == "mixture" else _block
        return _run(whole_block, spec, weights, kept, x, cos, sin, m, left, right, *cu_seqlens)
    whole = left < 0 and right < 0 and cu_seqlens[0] is None  # what the mask lets be seen
    if slots is not None and whole and not torch.compiler.is_compiling():
        known, given = kept or fixed(spec, weights), (x, cos, sin, mask, *slots)
        if ops.fits_slots(x.shape[0] * x.shape[1] * spec.kv_heads * spec.head_dim) and _block_slots.unseen(given, known):
            return _block_slots.replay(given, known)
    front = _block_front_rows if _shares_rows(spec) else _block_front
    q, k, v, *rest = _run(front, spec, weights, kept, x, cos, sin)
    k, v = _through(update, k, v)
    scope = Scope(ops.normalise_mask(mask, q, k), left, right, *cu_seqlens)
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):  # learned keys and values: prefix tuning
        rows = rest[0] if rest else x.reshape(-1, spec.hidden)
        return _back(ops.dispatched, spec, weights, x, rows, q, k, v, scope, True)
    back = _block_back_open if spec.mlp == "mixture" else _block_back
    return _run(back, spec, weights, kept, x, rest[0] if rest else None, q, k, v, *scope)


def _through(update: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """HF caches hold `batch kv_heads seq head_dim`: views in, views out."""
    if update is None:
        return k, v
    k, v = update(k.transpose(1, 2), v.transpose(1, 2))
    return k.transpose(1, 2), v.transpose(1, 2)


def _by_rows(function: Callable[[Tensor], Tensor], shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
    return lambda rows: function(rows.view(*shape, -1)).flatten(0, 1)

"""Attention as functions: one with every option, two with flash-attn's names and arguments, and which kernels a call takes."""

from __future__ import annotations

import contextlib
import functools
import numbers
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from fusedblock import debug
from fusedblock.kernels import _attention as shared
from fusedblock.kernels import _attention_reference as plain
from fusedblock.kernels._attention_choice import Choice, choose, why_tiles
from fusedblock.kernels._attention_skeleton import skeleton_of
from fusedblock.kernels._launch import runs_kernels
from fusedblock.kernels._spec import FP8
from fusedblock.kernels.attention import SPEC as ATTENTION
from fusedblock.ops import ShapeError, batch_invariant, call_attention, normalise_mask, target_of, wants_grad
from fusedblock.ops import deterministic as default_deterministic

__all__ = ["attention", "explain_attention", "flash_attn_func", "flash_attn_varlen_func"]

Window = Sequence[int | None] | None
P = ParamSpec("P")
T = TypeVar("T")


def as_called(name: str, **renamed: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Errors name the function that was called, whichever op found them, and arguments as that function has them."""
    argument = re.compile(rf"\b({'|'.join(renamed)})\b" if renamed else "(?!)")

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except (TypeError, ValueError, FloatingPointError, NotImplementedError) as error:
                by, _, what = str(error).partition(": ")
                if by in (name, "attention", "decode_attention") and not torch.compiler.is_compiling():
                    error.args = (f"{name}: {argument.sub(lambda found: renamed[found[0]], what)}",)
                raise

        return called

    return decorate


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # of a whole number or a fraction beyond 2**1024
        return float("inf") if value > 0 else -float("inf")


def _number(value: Any) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):  # a tensor's would have to be waited for
        raise TypeError
    return _float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or isinstance(value, Tensor) and value.dtype is torch.bool:
        raise TypeError
    return operator.index(value)


def _surely(condition: bool | torch.SymBool) -> bool:
    """Whether it is known to hold: of a length that torch.compile has from a tensor, nothing is."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # here, since it imports sympy

    return guard_or_false(condition)


_NONE = type(None)
_TENSOR, _MAYBE_TENSOR = (Tensor,), (_NONE, Tensor)
_SWITCH = (bool, torch.SymBool)
_PAIR = (_NONE, tuple, list)
_WHOLE, _NUMBER = (int, torch.SymInt), (float, int, torch.SymFloat, torch.SymInt)
_MAYBE_WHOLE, _MAYBE_NUMBER = (_NONE, *_WHOLE), (_NONE, *_NUMBER)
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys("qkv", _TENSOR), **dict.fromkeys(shared.OPTIONAL - {"seed"}, _MAYBE_TENSOR), "causal": _SWITCH,
    "window": _PAIR, "softcap": _NUMBER, "scale": _MAYBE_NUMBER, "dropout_p": _NUMBER, "max_seqlen_q": _MAYBE_WHOLE,
    "max_seqlen_k": _MAYBE_WHOLE, "deterministic": _SWITCH,
}  # fmt: skip
# What flash-attn has no default for.
_FLASH_TYPES = _TYPES | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), _TENSOR)
_FLASH_TYPES |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), _WHOLE)
# What to call them, and what takes a value that is as good as one of them, or raises TypeError.
_EXPECTED: dict[tuple[type, ...], tuple[str, Callable[[Any], Any] | None]] = {
    _TENSOR: ("a tensor", None), _MAYBE_TENSOR: ("a tensor or None", None), _SWITCH: ("True or False", None),
    _PAIR: ("(left, right) or None", tuple), _WHOLE: ("a whole number", _whole), _NUMBER: ("a number", _number),
    _MAYBE_WHOLE: ("a whole number or None", _whole), _MAYBE_NUMBER: ("a number or None", _number),
}  # fmt: skip


def _typed(name: str, given: dict[str, Any], types: dict[str, tuple[type, ...]] = _TYPES) -> dict[str, Any]:
    """The arguments, each of its type. Raises TypeError for those that are not."""
    for arg, value in given.items():
        if not isinstance(value, types[arg]) or type(value) is bool and bool not in types[arg]:  # True is an int
            given[arg] = _converted(f"{name}: {arg}", value, *_EXPECTED[types[arg]])
    return given


def _converted(what: str, value: Any, expected: str, convert: Callable[[Any], Any] | None) -> Any:
    if convert is not None:
        with contextlib.suppress(TypeError):
            return convert(value)
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60} ({type(value).__name__})"
    raise TypeError(f"{what} is {shown}, expected {expected}")


@as_called("attention")
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Window = None, softcap: float = 0.0,
    sinks: Tensor | None = None, alibi_slopes: Tensor | None = None, bias: Tensor | None = None, mask: Tensor | None = None,
    block_map: Tensor | None = None, prefix_lens: Tensor | None = None, block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, seqused_k: Tensor | None = None, q_scale: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, scale: float | None = None, dropout_p: float = 0.0,
    deterministic: bool = False, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(logits) @ v with logits = softcap(scale * q @ k.T) + bias - alibi, never forming the matrix (FlashAttention-2,
    arXiv 2307.08691; split keys for few queries, Flash-Decoding).

    q `batch seq heads head_dim`, k `batch context kv_heads head_dim`, v `batch context kv_heads v_dim`, heads a multiple of
    kv_heads; or, with cu_seqlens, packed: `tokens heads head_dim` and `key_tokens kv_heads ...`; or, with block_table, k and v
    in pages: `pages page_size kv_heads ...`. Any strides; fp32 (products as exact as fp32's), fp16, bf16, or fp8 (e4m3, forward
    only, out in bf16); float64 in plain torch. head_dim 8 to 256 in multiples of 8, 512, or 576 with v_dim 512; v_dim alike.

    Which keys: query i of a sequence stands at i + context - seq among its keys (bottom-right) and sees key j unless an option
    hides it.
        causal        no key after its own place
        window        (left, right): at most so many keys before and after its place; -1 or None unbounded
        prefix_lens   `batch` int32: the first keys are seen by every query, beside what causal or a right window leaves
        mask          bool `batch context` or `1|batch 1|heads 1|seq 1|context` (True: may be attended), or floating of the
                      latter, added to the logits (no gradient)
        block_map     bool `1|batch 1|heads ceil(seq/128) ceil(context/128)`: a False block is neither read nor attended
        cu_seqlens_q, cu_seqlens_k   int32 `sequences+1`: where packed sequences begin and end; tokens past the last give 0.
                      max_seqlen_q, max_seqlen_k: the longest, at least; optional
        seqused_k     int32 `batch` (or `sequences`): how many of the keys each sequence has; its other slots may hold NaN
        block_table   int32 `batch max_pages`: key j lies in page block_table[b, j // page_size]; takes seqused_k
    Which logits:
        scale         head_dim**-0.5 unless given; 2**-126 to 2**126
        softcap       softcap * tanh(logits / softcap); 2**-126 to 2**100, or 0: none
        alibi_slopes  fp32 `heads`, or `batch heads` (packed: `sequences heads`): minus slope times the distance
                      (arXiv 2108.12409)
        bias          floating `1|batch 1|heads 1|seq 1|context`, added; has a gradient. It is a number, not a mask: beyond
                      2e38 it overflows
        sinks         floating `heads`: the logit of one more key of value 0 (arXiv 2309.17453); has a gradient
        q_scale `1|batch heads`, k_scale and v_scale `1|batch kv_heads`: fp32, what fp8 inputs are multiples of
    dropout_p drops weights by a seed drawn from torch's generator of the device. deterministic: gradients of equal bits from run
    to run, as options(deterministic=True) has it; out and lse have them always.

    Returns out `batch seq heads v_dim` (or `tokens heads v_dim`), with return_lse also the natural log-sum-exp
    `batch heads seq` (or `heads tokens`) in fp32, of sinks too, without gradient. A row that may attend to nothing gives 0 and
    lse -inf (the sink), and gradients 0. NaN in keys and values that are hidden from every query (padding, unused slots and
    pages; with equal lengths, no dropout and no torch.compile, keys before every window) does not spread. NaN in a key that
    some query attends may also reach queries from which it is hidden (causal, a window, a mask): many are computed together,
    and 0 times NaN is NaN.

    Raises TypeError, ShapeError or ValueError before any launch, naming the argument and both values, for what is no such
    thing, contradicts itself, or has no kernel (on this GPU). Values of tensors on a GPU are read only under
    options(debug=True): lengths that make no sense give rows of NaN otherwise.
    """
    given = {
        "q": q, "k": k, "v": v, "causal": causal, "window": window, "softcap": softcap, "sinks": sinks,
        "alibi_slopes": alibi_slopes, "bias": bias, "mask": mask, "block_map": block_map, "prefix_lens": prefix_lens,
        "block_table": block_table, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k, "seqused_k": seqused_k, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale,
        "scale": scale, "dropout_p": dropout_p, "deterministic": deterministic,
    }  # fmt: skip
    out, lse = _computed(_call("attention", **_typed("attention", given)))
    return (out, lse) if return_lse else out


def explain_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Choice:
    """Which op `attention` takes for these arguments, which kernels run it, and why; nothing is computed. Tensors may be on the
    meta device.

    Takes the arguments of `attention` and raises as it does. Print the result, or read its op, why and changes.
    """
    given = {name: value for name, value in options.items() if name != "return_lse"}
    if unknown := given.keys() - _TYPES.keys():
        raise TypeError(f"explain_attention: attention has no argument {', '.join(sorted(unknown))}")
    call = _call("attention", **_typed("attention", {"q": q, "k": k, "v": v, **given}))
    a = call.args
    _sizes(a)
    backward = skeleton_of(a, backward=True) if call.training else None
    return choose(seq=call.seq, group=a["q"].shape[2] // a["k"].shape[2], target=target_of(q.device), dtype=q.dtype,
                  masked=a["mask"] is not None, forward=skeleton_of(a), backward=backward, **call.facts)  # fmt: skip


_FLASH_NAMES = {"scale": "softmax_scale", "window": "window_size", "seqused_k": "cu_seqlens_k"}


@as_called("flash_attn_func", **_FLASH_NAMES)
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """flash_attn.flash_attn_func, argument for argument (flash-attn 2).

    q `batch seq heads head_dim`, k and v `batch context kv_heads head_dim`, of one dtype, fp32, fp16 or bf16; any head_dim up
    to 256 (padded to a multiple of 8, which copies, as flash-attn does). causal and window_size are aligned bottom-right;
    alibi_slopes fp32 `heads` or `batch heads`. deterministic: gradients of equal bits from run to run. Returns out, or with
    return_attn_probs (out, softmax_lse `batch heads seq` in fp32, S_dmask): None without dropout, else the
    probabilities `batch heads seq context` in q's dtype, negative where dropped; that matrix is for tests only. Only out has
    gradients. What flash-attn lacks is taken as `attention` takes it: head_dim 512, and v of another head_dim.

    Raises TypeError, ShapeError or ValueError naming the argument and both values, before any launch, where `attention` does;
    so, unlike flash-attn, for a softmax_scale of 0 or less, a side of window_size below -1 and slopes that want a gradient.
    """
    given = {"q": q, "k": k, "v": v, "scale": softmax_scale, "causal": causal, "window": window_size, "softcap": softcap,
             "alibi_slopes": alibi_slopes, "dropout_p": dropout_p, "deterministic": deterministic}  # fmt: skip
    return _flash("flash_attn_func", given, return_attn_probs)


@as_called("flash_attn_varlen_func", **_FLASH_NAMES)
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """flash_attn.flash_attn_varlen_func, argument for argument (flash-attn 2).

    q `tokens heads head_dim`, k and v `key_tokens kv_heads head_dim`, bounded by cu_seqlens int32 `sequences+1`; with
    block_table int32 `sequences max_pages`, k and v are `pages page_size kv_heads head_dim`, forward only, and cu_seqlens_k
    says how many keys each sequence has. alibi_slopes fp32 `heads` or `sequences heads`. The rest as in flash_attn_func;
    softmax_lse is `heads tokens`, S_dmask `sequences heads max_seqlen_q max_seqlen_k`. max_seqlen_q and max_seqlen_k may be
    tensors of one whole number, which are waited for.

    Raises as flash_attn_func does; also where gradients are wanted with block_table, for cu_seqlens or block_table that are
    not int32, and where lengths that are read (on a CPU, under options(debug=True), for S_dmask) contradict the tensors or
    max_seqlen_q and max_seqlen_k.
    """
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q,
             "max_seqlen_k": max_seqlen_k, "scale": softmax_scale, "causal": causal, "window": window_size, "softcap": softcap,
             "alibi_slopes": alibi_slopes, "dropout_p": dropout_p, "block_table": block_table,
             "deterministic": deterministic}  # fmt: skip
    return _flash("flash_attn_varlen_func", given, return_attn_probs)


def _flash(name: str, given: dict[str, Any], probabilities: bool) -> Any:
    _typed(name, given, _FLASH_TYPES)
    v = given["v"]
    if given.get("block_table") is not None:
        ends = given.pop("cu_seqlens_k")
        if ends.dim() != 1:
            raise ShapeError(f"{name}: cu_seqlens_k has shape {tuple(ends.shape)}, expected (boundaries)")
        given["seqused_k"] = ends.diff()
    call = _call(name, **given, any_width=True)
    out, lse = _computed(call)
    out = out[..., : v.shape[-1]] if v.shape[-1] % 8 else out
    if not probabilities:
        return out
    if not call.args["dropout_p"]:
        return out, lse, None
    shape = (given["max_seqlen_q"], given["max_seqlen_k"]) if call.packed else None
    if shape is not None:
        _check_longest(name, {**call.args, "seed": None}, *shape)  # which else only debug or a CPU does
    return out, lse, _signed_probabilities(call, lse, shape)


class _Call(NamedTuple):
    """A call of the op: its arguments by name and in order, and what the choice depends on besides."""

    args: dict[str, Any]
    training: bool
    packed: bool
    one_each: bool  # every sequence has one query, and pages of keys
    seq: int  # queries of a sequence, at most

    @property
    def facts(self) -> dict[str, Any]:
        return {"training": self.training, "packed": self.packed, "one_each": self.one_each,
                "block_map": self.args["block_map"] is not None, "dropout": self.args["dropout_p"] > 0}  # fmt: skip


def draw_seed(device: torch.device) -> Tensor:
    """A seed of dropout from torch's generator of the device, where it stays: no sync."""
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)


_AXES = {
    "batched": ("batch seq heads head_dim", "batch context kv_heads head_dim", "batch context kv_heads v_dim"),
    "packed": ("tokens heads head_dim", "key_tokens kv_heads head_dim", "key_tokens kv_heads v_dim"),
    "paged": ("batch seq heads head_dim", "pages page_size kv_heads head_dim", "pages page_size kv_heads v_dim"),
}


def _call(
    name: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Window = None, softcap: float = 0.0,
    sinks: Tensor | None = None, alibi_slopes: Tensor | None = None, bias: Tensor | None = None, mask: Tensor | None = None,
    block_map: Tensor | None = None, prefix_lens: Tensor | None = None, block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, seqused_k: Tensor | None = None, q_scale: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, scale: float | None = None, dropout_p: float = 0.0,
    deterministic: bool = False, any_width: bool = False,
) -> _Call:  # fmt: skip
    """The arguments of `attention` as the op takes them, checked where the op does not or would only after a launch.

    any_width: pad rows of q, k and v to a multiple of 8, as flash-attn does; the result has v's columns and zeros.
    """
    packed, paged = cu_seqlens_q is not None, block_table is not None
    layouts = ("packed" if packed else "batched", *("paged" if paged else "packed" if packed else "batched" for _ in "kv"))
    for n, (arg, t, layout) in enumerate(zip("qkv", (q, k, v), layouts)):
        if t.is_nested:
            raise ValueError(f"{name}: {arg} is a nested tensor, expected all tokens as one axis, and cu_seqlens_q")
        if t.dim() != len(_AXES[layout][n].split()):
            decides = "block_table is given" if layout == "paged" else "cu_seqlens_q is " + ("given" if packed else "not given")
            raise ShapeError(f"{name}: {arg} has shape {tuple(t.shape)}, expected ({_AXES[layout][n]}); {decides}")
    left, right = _window(name, causal, window)
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k, "block_table": block_table}
    shared.refuse_together(name, {"mask": mask, "bias": bias, "block_map": block_map, "prefix_lens": prefix_lens, **lengths})
    softcap, dropout_p = _float(softcap), _float(dropout_p)
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else _float(scale)
    shared.check_dropout(name, dropout_p)
    tokens = q.shape[0] if packed else q.shape[1]
    if packed:
        q = q[None]
        k, v = (k, v) if paged else (k[None], v[None])
    if alibi_slopes is not None and alibi_slopes.dim() == 1:
        alibi_slopes = alibi_slopes[None]
    training = wants_grad(q, k, v, bias, sinks, mask, alibi_slopes)
    if training:
        _refuse_gradients(name, q, v, {"block_table": block_table, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale},
                          {"mask": mask, "alibi_slopes": alibi_slopes})  # fmt: skip
    if any_width:
        q, k, v = _padded(name, q, k, v)
    args = {
        "q": q, "k": k, "v": v, "mask": normalise_mask(mask, q, k), "bias": bias, "sinks": sinks, "alibi_slopes": alibi_slopes,
        "block_map": block_map, "prefix_lens": prefix_lens, **lengths, "q_scale": q_scale, "k_scale": k_scale,
        "v_scale": v_scale, "seed": None, "left": left, "right": right, "softcap": softcap, "scale": scale,
        "dropout_p": dropout_p, "deterministic": bool(deterministic) or default_deterministic(),
    }  # fmt: skip
    for arg, most in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if most is not None and (not packed or _surely(most < 0)):
            raise ValueError(f"{name}: {arg}={most}, expected " + ("at least 0" if packed else "None where cu_seqlens_q is"))
    if packed and _values_are_checked(q):
        _check_longest(name, args, max_seqlen_q, max_seqlen_k)
    tables = 0 if block_table is None or block_table.dim() < 1 else block_table.shape[0]
    one_each = packed and block_table is not None and max_seqlen_q is not None and tokens == tables
    one_each = one_each and _surely(max_seqlen_q == 1)
    most = tokens if max_seqlen_q is None else max_seqlen_q
    return _Call(_within_reach(args), training, packed, one_each, most)


def _within_reach(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments without the keys before the first query's window, which no query sees: a block of keys may hold some of them
    beside others that count, and 0 times NaN is NaN."""
    apart = ("cu_seqlens_q", "seqused_k", "block_table", "block_map")
    if args["left"] < 0 or args["dropout_p"] or shared.given(args, *apart):  # dropout goes by the number of a key
        return args
    if torch.compiler.is_compiling():  # a graph must not depend on which of the lengths is more
        return args
    context = args["k"].shape[1]
    hidden = context - args["q"].shape[1] - args["left"]
    given = {n: t for n in ("mask", "bias") if (t := args[n]) is not None}
    if hidden <= 0 or args["v"].shape[1] != context or any(t.dim() != 4 for t in given.values()):
        return args  # the op raises where shapes do not fit
    by_key = {n: t for n, t in given.items() if t.shape[-1] != 1}
    if any(t.shape[-1] != context for t in by_key.values()):
        return args
    return {**args, "k": args["k"][:, hidden:], "v": args["v"][:, hidden:], **{n: t[..., hidden:] for n, t in by_key.items()}}


def _padded(name: str, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Of a multiple of 8 columns each, once the callers' are checked; zeros change no logit."""
    if q.shape[-1] != k.shape[-1]:
        raise ShapeError(f"{name}: k has head_dim={k.shape[-1]}, but q has head_dim={q.shape[-1]}")
    shared.check_widths(name, q, v, step=1)
    return [torch.nn.functional.pad(t, (0, -t.shape[-1] % 8)) if t.shape[-1] % 8 else t for t in (q, k, v)]


def _window(name: str, causal: bool, window: Window) -> tuple[int, int]:
    """(left, right) of the op, which causal bounds on the right."""
    if window is None:
        return -1, 0 if causal else -1
    try:
        left, right = [-1 if n is None else _whole(n) for n in window]
    except (TypeError, ValueError):
        left = right = -2
    if left < -1 or right < -1:
        whole = "a whole number of at least 0, or -1 or None for no bound"
        raise ValueError(f"{name}: window={window}, expected (left, right), each {whole}")
    right = 0 if causal else right
    return -1 if left >= shared.UNBOUNDED else left, -1 if right >= shared.UNBOUNDED else right


def _refuse_gradients(name: str, q: Tensor, v: Tensor, forward_only: dict[str, Any], constant: dict[str, Any]) -> None:
    """Raises ValueError for what has no backward, and for arguments that have no gradient."""
    for arg, t in forward_only.items():
        if t is not None:
            raise ValueError(f"{name}: {arg} is given, but gradients are wanted and there is no backward for it")
    for arg, t in constant.items():
        if t is not None and t.requires_grad:
            raise ValueError(f"{name}: {arg} requires a gradient, and there is none for it")
    if q.dtype is FP8:
        raise ValueError(f"{name}: q has dtype {q.dtype}, but gradients are wanted and there is no backward for it")
    head_dim, v_dim = q.shape[-1], v.shape[-1]
    if max(head_dim, v_dim) > 256 and head_dim != v_dim:
        raise ValueError(f"{name}: head_dim={head_dim} and v_dim={v_dim} have no backward, and gradients are wanted")
    shared.check_target(name, q, v_dim, backward=True)


def _values_are_checked(q: Tensor) -> bool:
    """Lengths are read where that is asked for, and where it costs nothing: on a CPU, if no kernel is interpreted."""
    if debug.watching(q):
        return True
    return q.device.type == "cpu" and type(q) is Tensor and not torch.compiler.is_compiling() and not runs_kernels(q)


def _sizes(args: dict[str, Any]) -> dict[str, int]:
    """The axes of a call that has no seed yet, with every check of shapes and dtypes."""
    return ATTENTION.axes({**args, "dropout_p": 0.0})


def _check_longest(name: str, args: dict[str, Any], max_q: int | None, max_k: int | None) -> None:
    """Raises ValueError where a sequence is longer than it was said to be at most."""
    sizes = _sizes(args)
    plain.check_lengths(name, sizes, args)
    found = shared.lengths(sizes, args)
    for arg, most, side in (("max_seqlen_q", max_q, 0), ("max_seqlen_k", max_k, 1)):
        longest = max((n[side] for n in found), default=0)
        if most is not None and longest > most:
            raise ValueError(f"{name}: {arg}={most}, but the longest sequence has {longest}")


def _computed(call: _Call) -> tuple[Tensor, Tensor]:
    args = call.args
    if (args["dropout_p"] or call.one_each) and not torch.compiler.is_compiling():
        _sizes(args)  # an error before the generator moves, and before anything else is made of the arguments
    if args["dropout_p"]:
        args["seed"] = draw_seed(args["q"].device)
    q, kv_heads = args["q"], args["k"].shape[2]
    rows = (1 if call.one_each else q.shape[1]) * (q.shape[2] // max(kv_heads, 1))
    if why_tiles(rows, invariant=batch_invariant(), **call.facts) is not None or not kv_heads:
        out, lse = call_attention("attention", args)
    elif call.one_each:
        out, lse = call_attention("decode_attention", _one_query_each(args))
        return out[:, 0], lse[:, :, 0].T
    else:
        out, lse = call_attention("decode_attention", args)
    return (out[0], lse[0]) if call.packed else (out, lse)


def _one_query_each(args: dict[str, Any]) -> dict[str, Any]:
    """Packed sequences with at most one query each and as many tokens, as a batch of tokens: each reads its sequence's pages.

    A token past the last boundary gets no keys; boundaries that make no sense give lengths that make none.
    """
    cu, used, table, slopes = (args[n] for n in ("cu_seqlens_q", "seqused_k", "block_table", "alibi_slopes"))
    tokens = table.shape[0]
    token = torch.arange(tokens, dtype=torch.int32, device=cu.device)
    sequence = torch.searchsorted(cu[1:], token, right=True).clamp(max=max(tokens - 1, 0))
    step = cu.diff()
    sound = ((step >= 0) & (step <= 1)).all() & (cu[0] == 0)
    length = torch.where(token < cu[-1], used[sequence], 0)
    length = torch.where(sound, length, -1)
    if slopes is not None and slopes.shape[0] > 1:
        slopes = slopes[sequence]
    return {**args, "q": args["q"].transpose(0, 1), "cu_seqlens_q": None, "seqused_k": length, "block_table": table[sequence],
            "alibi_slopes": slopes}  # fmt: skip


def _signed_probabilities(call: _Call, lse: Tensor, shape: tuple[int, int] | None) -> Tensor:
    """The probabilities `batch|sequences heads seq context`, negative where dropout drops them. Quadratic, in plain torch."""
    args = {n: t.detach() if isinstance(t, Tensor) else t for n, t in call.args.items()}
    sizes = _sizes(args)
    seq, context = (sizes["seq"], sizes["k_len"]) if shape is None else shape
    n = sizes["sequences"] if call.packed else sizes["batch"]
    signed = args["q"].new_zeros(n, sizes["heads"], seq, context)
    lse = lse[None] if call.packed else lse
    for part in plain.segments("attention", sizes, args):
        found = plain.logits(part, args)
        total = lse[part.batch, :, part.rows].unflatten(1, (sizes["kv_heads"], -1))[..., None].to(found.x.dtype)
        p = torch.exp(found.x - total.masked_fill(total == float("-inf"), 0))
        assert found.keep is not None
        p = torch.where(found.keep, p, -p).flatten(1, 2)
        at = slice(part.number, part.number + 1) if call.packed else part.batch
        signed[at, :, : p.shape[2], : p.shape[3]] = p.to(signed.dtype)
    return signed

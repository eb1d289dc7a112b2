"""Softmax attention, backward: recomputes the logits (FlashAttention-2, Dao 2023, arXiv 2307.08691), deterministic.

    p = exp(logits - lse)          delta = sum(out * grad_out, v_dim)             ds = p * (grad_out @ v^T - delta)
    grad_q = scale * dx @ k        grad_k = scale * dx^T @ q                      grad_v = p^T @ grad_out
    grad_bias = ds, summed over the axes in which the bias is one        grad_sinks = -sum(exp(sink - lse) * delta, batch seq)

dx is ds times the derivative of softcap; with dropout p in grad_v and grad_out @ v^T are thinned as the forward was. Axes,
options and what hides a key as in attention.py; grad_k and grad_v are summed over the query heads of their group. lse and the
mask get no gradient. Rows that attend nothing get and give zero gradients; so do tokens past the last boundary and keys past
seqused_k. Lengths that make no sense give NaN gradients.

Launches: delta (and shift, lse in the units of the logits), then grad_k and grad_v with one program per key tile, then
grad_q with one program per query tile, then those of attention_bias_backward.py. Nothing is accumulated in memory, so equal
inputs give equal bits; the price is 7 matrix products instead of 5. The grad_q kernel writes grad_bias too where that has every
axis, and where only batch or heads are one and the scratch is not too much, what is summed to it.

HBM, in elements: delta reads out, grad_out and lse and writes delta and shift; each of the others reads q, k, v, the options,
grad_out, delta and shift and writes its gradients; sinks reads delta, shift and the sinks.

On Hopper the kernels of attention_hopper_backward.py run instead where _attention_skeleton.py says so, which deterministic
forbids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _attention as shared
from . import _attention_reference, _hopper_map, attention_hopper_backward
from . import _attention_tiles as tiles
from ._attention_gradients import _delta_kernel, _kv_kernel, _q_kernel
from ._attention_skeleton import PORTABLE, skeleton_of
from ._hopper_check import ready
from ._lang import cdiv
from ._launch import contiguous_last, descriptor, for_tma, on_device
from ._launch import launch as _launch
from ._spec import Args, Op, Sizes, Spec, Stage, Write, flag
from ._target import Target, target_of
from .attention_bias_backward import launch_bias, launch_sinks, sum_logits

DELTA_ROWS = 32
# Bytes of scratch for the gradients of all logits, which are then summed to that of a bias. More are summed by a kernel that
# computes them once more.
MOST_LOGITS = 2**30
_ANY = flag("need_q", "need_k", "need_v", "need_bias", "need_sinks")
# The forward's arguments that a backward takes, in order; all of the op's.
_TAKES = tuple(n for n in shared.READS if n not in ("block_table", "q_scale", "k_scale", "v_scale"))
_NEEDS = ("need_q", "need_k", "need_v", "need_bias", "need_sinks")
NAMES = ("grad_out", *_TAKES, "out", "lse", *shared.NUMBERS, *_NEEDS)
READS = {
    **{n: shared.READS[n] for n in _TAKES},
    "grad_out": "batch seq heads v_dim", "out": "batch seq heads v_dim", "lse": "batch heads seq",
}  # fmt: skip


def _products(sizes: Sizes, args: Args, keys: int, values: int) -> int:
    """FLOPs of `keys` matrix products over head_dim and `values` over v_dim, of the attended pairs."""
    return 2 * sizes["heads"] * (keys * sizes["head_dim"] + values * sizes["v_dim"]) * shared.pairs(sizes, args)


def _kv_flops(sizes: Sizes, args: Args) -> tuple[int, int]:
    # logits; grad_v; and for grad_k: grad_out @ v^T and ds^T @ q.
    need_k, need_v = bool(args["need_k"]), bool(args["need_v"])
    return _products(sizes, args, 1 + need_k, need_v + need_k), _products(sizes, args, 2, 2)


def _q_flops(sizes: Sizes, args: Args) -> tuple[int, int]:
    # One kernel for all gradients would need the logits and grad_out @ v^T once.
    made = args["need_k"] or args["need_v"]
    return _products(sizes, args, 1 + (not made), int(not args["need_k"])), _products(sizes, args, 2, 1)


def _bias_flops(sizes: Sizes, args: Args) -> tuple[int, int]:
    made = args["need_q"] or args["need_k"]
    return _products(sizes, args, int(not made and not args["need_v"]), int(not made)), _products(sizes, args, 1, 1)


def _hopper_flops(sizes: Sizes, args: Args) -> tuple[int, int]:
    # The logits, grad_q and grad_k; grad_out @ v^T and grad_v.
    need_q, need_k, need_v = (bool(args[n]) for n in ("need_q", "need_k", "need_v"))
    return (_products(sizes, args, 1 + need_q + need_k, (need_q or need_k) + need_v),) * 2


def _schedules(sizes: Sizes, args: Args) -> dict[str, int]:
    kv, q = _configs(sizes, args)
    n = sizes["sequences"]
    return {"columns": tiles.COLUMNS, "k_slots": tiles.schedule_slots(sizes["k_len"], n, kv.block_n),
            "q_slots": tiles.schedule_slots(sizes["seq"], n, q.block_m)}  # fmt: skip


def _axes(sizes: Sizes, args: Args) -> dict[str, int]:
    found = shared.check("attention_backward", sizes, args)
    head_dim, v_dim = sizes["head_dim"], sizes["v_dim"]
    if max(head_dim, v_dim) > 256 and head_dim != v_dim:
        raise ValueError(f"attention_backward: head_dim={head_dim} with v_dim={v_dim} has no gradients, only 512 with 512 has")
    if args["bias"] is not None:
        found.update(zip(("bias_batch", "bias_heads", "bias_rows", "bias_keys"), args["bias"].shape))
    if any(isinstance(n, torch.SymInt) for n in sizes.values()):
        return found  # in a trace for any length no result has the axes of scratch
    found.update(_logit_gradients({**sizes, **found}, args))
    packed = args["cu_seqlens_q"] is not None
    if skeleton_of(args, backward=True).hopper:
        axes = attention_hopper_backward.buffer_axes({**sizes, **found}, packed)
        for name in ("q_slots", "k_slots"):
            if name in axes:
                axes[f"hopper_{name}"] = axes.pop(name)
        return {**found, **axes}
    found["delta_rows"] = sizes["seq"]
    return {**found, **_schedules({**sizes, **found}, args)} if packed else found


def _logit_gradients(sizes: Sizes, args: Args) -> dict[str, int]:
    """Axes that tell how grad_bias is made: by the grad_q kernel ("bias_by_q"), from what that kernel writes of every logit
    ("logits_batch"), or, without any, by a kernel of its own."""
    bias, itemsize = args["bias"], args["q"].element_size()
    if not (args["need_bias"] and args["need_q"]) or bias is None or shared.given(args, "block_map", "seqused_k"):
        return {}
    batch, heads, seq, keys = (sizes[axis] for axis in ("batch", "heads", "seq", "k_len"))
    if tuple(bias.shape[2:]) != (seq, keys):
        return {}
    if tuple(bias.shape[:2]) == (batch, heads):
        return {"bias_by_q": 1}
    if bias.element_size() > itemsize or batch * heads * seq * keys * itemsize > MOST_LOGITS:
        return {}
    return {"logits_batch": batch}


_BOUNDS = ("cu_seqlens_q", "cu_seqlens_k")
_OPERANDS = (*(n for n in _TAKES if n != "sinks"), "grad_out", "delta", "shift")
SPEC = Spec(
    name="attention_backward",
    reads=READS,
    writes={
        "grad_q": Write("batch seq heads head_dim", "q", flag("need_q")),
        "grad_k": Write("k_batch k_len kv_heads head_dim", "k", flag("need_k")),
        "grad_v": Write("k_batch k_len kv_heads v_dim", "v", flag("need_v")),
        "grad_bias": Write("bias_batch bias_heads bias_rows bias_keys", "bias|q", flag("need_bias")),
        "grad_sinks": Write("heads", "sinks|q", flag("need_sinks")),
    },
    optional=shared.OPTIONAL & frozenset(READS),
    any_dtype=shared.OPTIONAL & frozenset(READS) | {"lse"},
    derive=_axes,
    read_bytes={"k": shared.key_bytes("k"), "v": shared.key_bytes("v")},
    scratch={
        "delta": Write("batch heads delta_rows", "accumulate:q", _ANY),
        "shift": Write("batch heads delta_rows", "accumulate:q", _ANY),
        "k_schedule": Write("k_slots columns", "int32", flag("need_k", "need_v")),
        "q_schedule": Write("q_slots columns", "int32", flag("need_q")),
        "stats": Write("stats_numbers", "float32"),
        "sums": Write("sums_rows sums_columns", "float32", flag("need_q")),
        "q_plan": Write("hopper_q_slots columns", "int32"),
        "k_plan": Write("hopper_k_slots columns", "int32"),
        "logits": Write("logits_batch heads seq k_len", "q", flag("need_bias")),
    },
    stages=(
        Stage("attention_backward_q_schedule", _BOUNDS, ("q_plan",), lambda s, a: 0),
        Stage("attention_backward_k_schedule", _BOUNDS, ("k_plan",), lambda s, a: 0),
        Stage("attention_backward_prepare", ("out", "grad_out", "lse", "q_plan"), ("stats", "sums"),
              lambda s, a: 2 * s["batch"] * s["heads"] * s["seq"] * s["v_dim"]),
        Stage("attention_backward_products", ("q", "k", "v", "grad_out", "stats", "sums", "k_plan"),
              ("grad_k", "grad_v", "sums"), _hopper_flops, "stats"),
        Stage("attention_backward_finish", ("sums", "q_plan"), ("grad_q",), lambda s, a: 0, "stats"),
        Stage("attention_backward_delta", ("out", "grad_out", "lse"), ("delta", "shift"),
              lambda s, a: 2 * s["batch"] * s["heads"] * s["seq"] * s["v_dim"]),
        Stage("attention_backward_k_schedule", _BOUNDS, ("k_schedule",), lambda s, a: 0),
        Stage("attention_backward_kv", (*_OPERANDS, "k_schedule"), ("grad_k", "grad_v"), _kv_flops, "delta"),
        Stage("attention_backward_q_schedule", _BOUNDS, ("q_schedule",), lambda s, a: 0),
        Stage("attention_backward_q", (*_OPERANDS, "q_schedule"), ("grad_q", "logits"), _q_flops, "delta",
              lambda s: "bias_by_q" not in s),
        Stage("attention_backward_q", _OPERANDS, ("grad_q", "grad_bias"), _q_flops, "delta", lambda s: "bias_by_q" in s),
        Stage("attention_backward_bias", _OPERANDS, ("grad_bias",), _bias_flops, "",
              lambda s: not {"bias_by_q", "logits_batch"} & s.keys()),
        Stage("attention_backward_bias", ("logits",), ("grad_bias",),
              lambda s, a: s["batch"] * s["heads"] * s["seq"] * s["k_len"], "logits"),
        Stage("attention_backward_sinks", ("sinks", "stats|delta", "shift"), ("grad_sinks",),
              lambda s, a: 3 * s["batch"] * s["heads"] * s["seq"]),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Query rows, keys, warps and stages of a tile: of the grad_k and grad_v kernel, or of the grad_q kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# What a kernel's registers have to hold besides the plain form, from little to much.
LEVELS = ("plain", "bounded", "segments", "shaped", "biased", "tiled", "costly")
Pair = tuple[Config, Config]
Numbers = tuple[int, int, int, int]
# (columns of q or v at most, bytes an element at most, configs of the kv and of the q kernel by level); first match wins.
Row = tuple[int, int, dict[str, Pair]]


def _row(columns: int, itemsize: int, **pairs: tuple[Numbers, Numbers]) -> Row:
    """A level without an entry has that of the level before."""
    found: dict[str, Pair] = {}
    for level in LEVELS:
        if level in pairs:
            kv, q = pairs[level]
            last = Config(*kv), Config(*q)
        found[level] = last
    return columns, itemsize, found


TABLE: dict[str, tuple[Row, ...]] = {
    # H200, 2026-11-29, bf16, causal, in ms (cuDNN's whole backward in brackets). D=128, B4 S4096 (2.81): kv 64x64 w4 s2 1.98,
    # 32x64 w4 s3 2.23, 64x128 w8 2.48, 64x64 w4 s1 2.82, 64x64 w8 5.15; q 128x64 w8 s3 1.46, 64x64 w4 s2 1.50, 128x64 w8 s2 1.87.
    # D=64 (1.83): kv 64x64 w4 1.52, 64x128 w8 1.83; q 64x64 w4 s3 0.72, 128x64 w8 s3 0.74. D=256, 16 heads (3.58): kv 32x64 w8
    # 5.95, 64x64 w8 6.07; q 64x64 w4 1.90, 128x32 w8 2.23. What spills has smaller tiles; with options they are not measured.
    "hopper": (
        _row(64, 2, plain=((64, 64, 4, 2), (64, 64, 4, 3))),
        _row(128, 2, plain=((64, 64, 4, 2), (128, 64, 8, 3)), segments=((32, 64, 4, 3), (128, 64, 8, 3)),
             biased=((64, 64, 4, 2), (64, 64, 4, 2)),
             tiled=((32, 64, 4, 3), (128, 32, 8, 2)), costly=((32, 64, 4, 3), (64, 32, 4, 2))),
        _row(256, 2, plain=((32, 64, 8, 2), (64, 64, 4, 2)), bounded=((32, 64, 8, 2), (64, 32, 8, 2))),
        _row(512, 2, plain=((16, 32, 8, 1), (64, 32, 8, 1))),  # spills around its loops
        _row(64, 8, plain=((16, 64, 4, 1), (64, 32, 4, 2))),
        _row(256, 8, plain=((16, 16, 4, 2), (16, 16, 4, 2))),
        _row(512, 8, plain=((16, 16, 8, 1), (16, 16, 8, 1))),
    ),
    # Not measured: the largest tiles that compile for sm_80 without spilling.
    "ampere": (
        _row(32, 2, plain=((64, 128, 8, 2), (64, 64, 8, 2)), shaped=((32, 64, 4, 2), (64, 32, 8, 2)),
             tiled=((32, 64, 4, 2), (64, 64, 8, 1)), costly=((32, 32, 4, 1), (64, 32, 8, 2))),
        _row(64, 2, plain=((64, 128, 8, 2), (64, 64, 8, 2)), bounded=((64, 128, 8, 2), (64, 64, 8, 1)),
             segments=((32, 64, 4, 1), (64, 32, 8, 2)), shaped=((32, 64, 4, 1), (64, 32, 8, 2)),
             costly=((32, 32, 4, 1), (64, 32, 8, 2))),
        _row(128, 2, plain=((64, 64, 8, 2), (64, 64, 8, 2)), bounded=((64, 64, 8, 1), (64, 64, 8, 2)),
             shaped=((32, 64, 8, 2), (64, 64, 8, 1)), tiled=((32, 64, 8, 1), (32, 64, 8, 1)),
             costly=((32, 64, 8, 1), (32, 32, 8, 1))),
        _row(256, 2, plain=((32, 32, 8, 1), (32, 32, 8, 1))),
        _row(512, 2, plain=((16, 16, 8, 1), (16, 16, 8, 1))),
        _row(64, 8, plain=((32, 32, 4, 1), (32, 32, 4, 1))),
        _row(256, 8, plain=((16, 16, 4, 1), (16, 16, 4, 1))),
        _row(512, 8, plain=((16, 16, 8, 1), (16, 16, 8, 1))),
    ),
    # Not measured: as above, within the 99 KB of sm_86 and the 64 KB of gfx942.
    "small": (
        _row(64, 2, plain=((64, 64, 8, 1), (64, 64, 8, 1)), shaped=((32, 64, 4, 1), (64, 32, 8, 1))),
        _row(128, 2, plain=((32, 64, 8, 1), (64, 32, 8, 1))),
        _row(256, 2, plain=((32, 32, 8, 1), (32, 32, 8, 1))),
        _row(512, 2, plain=((16, 16, 8, 1), (16, 16, 8, 1))),
        _row(64, 8, plain=((32, 32, 4, 1), (32, 32, 4, 1))),
        _row(256, 8, plain=((16, 16, 4, 1), (16, 16, 4, 1))),
        _row(512, 8, plain=((16, 16, 8, 1), (16, 16, 8, 1))),
    ),
}  # fmt: skip


def configure(head_dim: int, itemsize: int, level: str, target: Target) -> Pair:
    """Configs of the grad_k and grad_v kernel and of the grad_q kernel. head_dim: the larger of q's and v's; level: of LEVELS."""
    rows = TABLE[shared.kind_of(target)]
    return next(pairs[level] for d, size, pairs in rows if head_dim <= d and itemsize <= size)


def level_of(args: Args, target: Target) -> str:
    """bounded: by more than causal; segments: packed or a block map; shaped: one option that changes logits; biased: it is a bias
    for every query and key, of 16 bits, that TMA loads; tiled: another number for every query and key; costly: several, or
    dropout."""
    shaping = [args[n] for n in ("mask", "bias", "alibi_slopes") if args[n] is not None]
    n = len(shaping) + (args["softcap"] > 0) + (args["block_map"] is not None)
    if args["dropout_p"] > 0 or n > 1:
        return "costly"
    if not shaping and not args["softcap"]:
        if shared.given(args, "cu_seqlens_q", "block_map"):
            return "segments"
        return "bounded" if args["left"] >= 0 or shared.given(args, "seqused_k", "prefix_lens") else "plain"
    if not any(t.dim() == 4 and t.shape[2] > 1 for t in shaping):
        return "shaped"
    bias = args["bias"]
    by_tma = target.tma and bias is not None and bias.element_size() == 2 and shared.takes_tma(bias)
    return "biased" if by_tma else "tiled"


def _configs(sizes: Sizes, args: Args) -> Pair:
    target = target_of(args["q"].device)
    return configure(max(sizes["head_dim"], sizes["v_dim"]), args["q"].element_size(), level_of(args, target), target)


CONFIGS = tuple(dict.fromkeys(pair for rows in TABLE.values() for row in rows for pair in row[2].values()))


def reference(*values: Any, **named: Any) -> tuple[Tensor, ...]:
    args = {**dict(zip(NAMES, values)), **named}
    sizes = SPEC.axes(args)
    grads = SPEC.empty(args, sizes)
    _attention_reference.backward("attention_backward", sizes, args, dict(zip(SPEC.writes, grads)))
    return grads


def _operands(tensors: list[Tensor], config: Config, d: dict[str, int], tma: bool) -> list[Any]:
    """q, its second columns, k, likewise, v and grad_out as the kernels take them."""
    q, k, v, grad_out = tensors
    m, n = config.block_m, config.block_n
    boxes = (q, m, "DP"), (q, m, "D2"), (k, n, "DP"), (k, n, "D2"), (v, n, "DVP"), (grad_out, m, "DVP")
    return [
        None if not d[name] else descriptor(shared.by_head(t), [1, 1, rows, d[name]]) if tma else t for t, rows, name in boxes
    ]


def launch(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    alibi_slopes: Tensor | None, block_map: Tensor | None, prefix_lens: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, seqused_k: Tensor | None, seed: Tensor | None, out: Tensor, lse: Tensor,
    left: int, right: int, softcap: float, scale: float, dropout_p: float, deterministic: bool,
    need_q: bool, need_k: bool, need_v: bool, need_bias: bool, need_sinks: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    args: dict[str, Any] = dict(locals())
    sizes = SPEC.axes(args)
    if "stats_numbers" in sizes and not ready(q.device, "backward"):
        sizes = SPEC.axes({**args, **PORTABLE})
    grads = SPEC.empty(args, sizes)
    if q.numel() == 0 or k.numel() == 0:
        return tuple(t.zero_() for t in grads)
    if not _ANY(args):
        return grads
    grad_q, grad_k, grad_v, grad_bias, grad_sinks = grads
    scratch = SPEC.empty_scratch(args, sizes)
    if "stats_numbers" in sizes:
        _launch_hopper(args, (grad_q, grad_k, grad_v, grad_sinks), scratch[4:8])
        return grads
    delta, shift, k_schedule, q_schedule, *_, logits = scratch
    by_q = grad_bias if "bias_by_q" in sizes else logits if "logits_batch" in sizes else None
    batch, seq, heads, kv_heads, context = (sizes[axis] for axis in ("batch", "seq", "heads", "kv_heads", "k_len"))
    *tensors, out = shared.dense_rows(q, k, v, grad_out, out)
    target = target_of(q.device)
    packed = cu_seqlens_q is not None
    # TMA knows no end of a segment: what it would read of the next one, be it NaN, reaches every product.
    tma = not packed and shared.uses_tma(target, *tensors)
    configs = dict(zip(("kv", "q"), _configs(sizes, args)))
    d = shared.dims(sizes["head_dim"], sizes["v_dim"])
    numerics, added = shared.numerics(args, target), shared.adds(args)
    strides = [stride for t in tensors for stride in shared.row_strides(t, tma)]

    def go(kernel: Any, which: str, results: tuple[Any, ...], schedule: Tensor | None, grid: int, counts: tuple[int, ...],
           **more: bool) -> None:  # fmt: skip
        config = configs[which]
        box = shared.term_box(target, config.block_m, config.block_n, config.num_stages)
        facts = shared.launch_facts(args, by_key=which == "kv", box=box)
        mask_, bias_, _, slopes, numbers, lists, prefix, used, _, _, _, _, seed_ = facts.tensors
        _launch(
            kernel, (grid,),
            (*_operands(tensors, config, d, tma), delta, shift, *results, mask_, bias_, slopes, numbers, lists, prefix, used,
             seed_, schedule, *facts.numbers, seq, context, *counts, *strides, *facts.strides[:12]),
            {**d, "BM": config.block_m, "BN": config.block_n, "NS": config.num_stages, "RIGHT": facts.constexprs["RIGHT"],
             "ADDED": added, "TMA": tma, **more, **numerics, "num_warps": config.num_warps, "num_stages": config.num_stages},
        )  # fmt: skip

    with on_device(q):
        _launch(
            _delta_kernel, (cdiv(seq, DELTA_ROWS) * batch * heads,),
            (out, tensors[3], lse.contiguous(), delta, shift, seq, heads, batch * heads,
             *out.stride()[:3], *tensors[3].stride()[:3]),
            {"ROWS": DELTA_ROWS, "D": d["DV"], "DP": d["DVP"], "ADDED": added, "ACC": numerics["ACC"], "num_warps": 4},
        )  # fmt: skip
        if need_k or need_v:
            if cu_seqlens_q is not None and cu_seqlens_k is not None:
                tiles.schedule(cu_seqlens_k, cu_seqlens_q, None, context, seq, configs["kv"].block_n, k_schedule)
            slots = k_schedule.shape[0] if packed else cdiv(context, configs["kv"].block_n)
            go(_kv_kernel, "kv", (grad_k, grad_v), k_schedule if packed else None, slots * batch * kv_heads,
               (kv_heads, sizes["group"], batch * kv_heads, *shared.section(sizes, args, target, by_key=True)),
               NEED_K=need_k, NEED_V=need_v)  # fmt: skip
        if need_q:
            if cu_seqlens_q is not None and cu_seqlens_k is not None:
                tiles.schedule(cu_seqlens_q, cu_seqlens_k, None, seq, context, configs["q"].block_m, q_schedule)
            slots = q_schedule.shape[0] if packed else cdiv(seq, configs["q"].block_m)
            go(_q_kernel, "q", (grad_q, by_q), q_schedule if packed else None, slots * batch * heads,
               (heads, sizes["group"], batch * heads, *shared.section(sizes, args, target)))  # fmt: skip
        if "logits_batch" in sizes:
            sum_logits(logits, grad_bias, numerics["ACC"])
        elif need_bias and by_q is None:
            launch_bias(args, sizes, _operands(tensors, configs["q"], d, tma), delta, shift, grad_bias, strides, configs["q"],
                        {**d, "TMA": tma, **numerics})  # fmt: skip
        if need_sinks and sinks is not None:
            launch_sinks(sinks, delta, shift, grad_sinks, added, numerics["ACC"])
    return grads


def _launch_hopper(args: Args, grads: tuple[Tensor, Tensor, Tensor, Tensor], scratch: tuple[Tensor, ...]) -> None:
    q, k, v, grad_out = (for_tma(args[n]) for n in ("q", "k", "v", "grad_out"))
    if args["block_map"] is not None:
        k, v = (_hopper_map.without_hidden(t, q.shape[1], args["left"]) for t in (k, v))
    cu, sinks = (args["cu_seqlens_q"], args["cu_seqlens_k"]), args["sinks"]
    needs = args["need_q"], args["need_k"], args["need_v"], args["need_sinks"] and sinks is not None
    grad_q, grad_k, grad_v, grad_sinks = (t if need else None for t, need in zip(grads, needs))
    sums, q_plan, k_plan = (t if t.numel() else None for t in scratch[1:])
    attention_hopper_backward.launch(
        q, k, v, contiguous_last(args["out"]), args["lse"].contiguous(), grad_out, None if sinks is None else sinks.contiguous(),
        None if cu[0] is None else cu, args["left"], args["right"], args["scale"], args["softcap"], *needs,
        (grad_q, grad_k, grad_v, grad_sinks), (scratch[0], sums, q_plan, k_plan), args["block_map"],
    )  # fmt: skip


BACKWARD = Op(SPEC, launch, reference)

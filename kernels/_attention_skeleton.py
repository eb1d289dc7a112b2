"""Which kernels compute the op `attention`: the Gluon ones for Hopper or the portable Triton ones; forward and backward apart.

A pure function of sizes, dtype, options and target, and what a call's tensors are to it. Both skeletons take and give the same
out and lse, so that either backward follows either forward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import _gluon, attention_hopper, attention_hopper_short
from ._hopper_schedule import unfit_rows
from ._lang import cdiv
from ._launch import current_mode, strides_suit_tma
from ._spec import Args
from ._target import Target, override, target_of

# ---- measured crossovers -----------------------------------------------------------------------------------------------------
# (columns of q or v at most, least keys) of a sequence from which on the Hopper kernels are ahead; first row that is wide enough.
# Keys are those within a query's reach; of packed sequences they are an average.
# H200, 2026-11-30, causal, bf16, ms, portable and hopper. Forward D=128: S512 0.204 and 0.183, S2048 0.55 and 0.44, S8192 1.82
# and 1.57; a window of 128 at S8192 0.165 and 0.183, with D=64 and sinks 0.26 and 0.32. D=64 S4096 0.64 and 0.60, D=256 S4096
# 1.11 and 0.80. Between 128 and 512 keys nothing was measured. Backward D=128: S512 0.80 and 0.68, S8192 6.9 and 5.1; a window
# of 128 0.75 and 0.59, with D=64 and sinks 0.91 and 0.65; D=256 S4096 7.3 and 3.5. A block map at S65536: forward 3.7 and 2.9,
# backward 16.3 and 9.0.
CROSSOVERS: dict[str, tuple[tuple[int, int], ...]] = {"forward": ((64, 513), (256, 512)), "backward": ((256, 128),)}

# Options of the op that no Hopper kernel takes, and those that only the forward takes.
_REFUSED = ("mask", "bias", "alibi_slopes", "prefix_lens", "block_table", "q_scale", "k_scale", "v_scale", "dropout_p")
_FORWARD_ONLY = ("seqused_k",)
# Beside a call's arguments: no Gluon kernels, as _hopper_check.py says just now.
PORTABLE = {"portable": True}
_NAMES = {
    "hopper": "Gluon kernels for Hopper", "short": "the Gluon kernel for short contexts on Hopper",
    "portable": "portable Triton kernels",
}  # fmt: skip


@dataclass(frozen=True)
class Skeleton:
    """name: "hopper", "short" (a forward over few keys on Hopper) or "portable"; why, and what would make it another, "" where
    nothing on this GPU would."""

    name: str
    why: str
    changes: str

    @property
    def hopper(self) -> bool:
        return self.name != "portable"

    @property
    def otherwise(self) -> str:
        others = {"hopper": _NAMES["portable"], "portable": _NAMES["hopper"], "short": "other kernels"}
        return f"{others[self.name]} {self.changes}"

    def __str__(self) -> str:
        return f"{_NAMES[self.name]}: {self.why}"


def _refusal(target: Target, dtype: torch.dtype, head_dim: int, v_dim: int, backward: bool, options: frozenset[str],
             rows: str) -> tuple[str, str]:  # fmt: skip
    """Why the Hopper kernels cannot run or must not, and what would change that; empty where they can."""
    if why := attention_hopper.unfit(target, dtype, head_dim, v_dim):
        return why, "" if target.capability != 90 else "in bfloat16 or float16, with rows that they take"
    if why := target.broken or _gluon.REASON:
        return why, "where they can be tested and pass" if target.broken else "with triton 3.6 to 3.9"
    if target.batch_invariant:
        return "batch_invariant: a row's bits must not tell its kernel", "without batch_invariant"
    if "deterministic" in options:
        return "deterministic: they add to grad_q in any order", "without deterministic"
    refused = (*_REFUSED, *_FORWARD_ONLY) if backward else _REFUSED
    if found := sorted(options.intersection(refused)):
        return f"{found[0]} is given", f"without {' and '.join(found)}"
    if {"block_map", "seqused_k"} <= options:
        return "block_map is given with seqused_k", "without one of them"
    if rows:
        return rows, "with other strides"
    return "", ""


def skeleton(
    *, target: Target, dtype: torch.dtype, head_dim: int, v_dim: int, queries: int, keys: int, context: int | None = None,
    backward: bool = False, options: frozenset[str] = frozenset(), rows: str = "", interpreted: bool = False,
) -> Skeleton:  # fmt: skip
    """What runs a call's forward or its backward.

    queries and keys of a sequence, keys as CROSSOVERS counts them; context: all of them, within reach or not (None: as many).
    options: names of the op's arguments that are given (dropout_p and softcap: that are not 0), for a backward also
    "deterministic". rows: what keeps TMA from the tensors. interpreted: the kernels run on a CPU, where a model of the SM takes
    its time.
    Pure: equal arguments give an equal choice.
    """
    why, changes = _refusal(target, dtype, head_dim, v_dim, backward, options, rows)
    if not why and (queries == 0 or keys == 0):
        why, changes = "there is nothing to attend to", "with queries and keys"
    if why:
        return Skeleton("portable", why, changes)
    context = keys if context is None else context
    short = not backward and not options - {"sinks"} and not attention_hopper_short.unfit(head_dim, v_dim, context)
    if target.skeleton:
        return Skeleton("hopper" if target.skeleton == "short" and not short else target.skeleton, "asked for",
                        "where it is asked for")  # fmt: skip
    if interpreted:
        return Skeleton("portable", "in the interpreter", "on a GPU")
    if short:  # H200, 2026-11-30: 1.1 to 2.2 times as fast as the portable kernel at 64, 128 and 256 keys, D=64 and 128
        few = attention_hopper_short.LONGEST
        return Skeleton("short", f"{context} keys a sequence, which stay in shared memory",
                        f"for {few + 1} keys or more, a mask, a bias and the like")  # fmt: skip
    table = CROSSOVERS["backward" if backward else "forward"]
    wide = max(head_dim, v_dim)
    least = next((n for columns, n in table if wide <= columns), None)
    assert least is not None, f"no row of CROSSOVERS for head_dim={head_dim} and v_dim={v_dim}"
    if keys < least:
        return Skeleton("portable", f"{keys} keys a sequence, where latency decides", f"from {least} keys on")
    others = f"for fewer than {least} keys or a mask, a bias and the like"
    return Skeleton("hopper", "sm_90, a shape and options that they take", others)


@contextmanager
def forced(name: str, device: torch.device) -> Iterator[None]:
    """Inside, calls on device run this skeleton wherever it can, in every thread: to compare the two."""
    with override(replace(target_of(device), skeleton=name)):
        yield


_known = functools.lru_cache(maxsize=4096)(skeleton)  # every call of the op asks
_TOO = (*_REFUSED, *_FORWARD_ONLY, "block_map")
_ASKED = {False: (*_TOO, "softcap", "cu_seqlens_q"), True: (*_TOO, "deterministic")}


def skeleton_of(args: Args, backward: bool = False) -> Skeleton:
    """The same for the arguments of the op attention or attention_backward, which have been checked."""
    q, k, v, left, right = args["q"], args["k"], args["v"], args["left"], args["right"]
    target = target_of(q.device)
    if "portable" in args and not target.broken:
        target = replace(target, broken="they are not tested yet, and a CUDA graph is captured")
    options = [n for n in _ASKED[backward] if (value := args.get(n)) is not None and (isinstance(value, Tensor) or value)]
    (batch, seq, heads, head_dim), context, kv_heads = q.shape, k.shape[1], k.shape[2]
    if args["cu_seqlens_q"] is not None:
        sequences = max(args["cu_seqlens_q"].shape[0] - 1, 1)
        seq, context = cdiv(seq, sequences), cdiv(context, sequences)
    if batch == 0 or heads == 0 or kv_heads == 0:
        seq = 0
    keys = min(context, left + 1 + right) if left >= 0 and right >= 0 else context
    able = target.capability == 90 and q.element_size() == 2
    return _known(
        target=target, dtype=q.dtype, head_dim=head_dim, v_dim=v.shape[3], queries=seq, keys=keys, context=context,
        backward=backward, options=frozenset(options), rows=_rows_refusal(q, k, v, args["seqused_k"]) if able else "",
        interpreted=current_mode() == "interpret",
    )  # fmt: skip


def _rows_refusal(q: Tensor, k: Tensor, v: Tensor, used: Tensor | None) -> str:
    for name, t in (("q", q), ("k", k), ("v", v)):
        # What has no dense last axis is copied. Addresses are looked at where there are any: a plan is made of shapes too.
        apart = type(t) is Tensor and t.data_ptr() % 16
        if t.numel() and t.stride(-1) == 1 and (apart or not strides_suit_tma(t)):
            return f"{name} has rows that TMA does not take (strides {tuple(t.stride())} of {t.element_size()} bytes)"
    return unfit_rows(q, k, v) if used is not None else ""

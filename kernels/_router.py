"""A router's options as data, and the check of their numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ._moe_index import MAX_EXPERTS
from ._spec import DTYPES, ShapeError, accumulate_dtype

SCORINGS = ("softmax", "sigmoid", "softmax_chosen")
GROUP_SCORES = ("max", "top2")
_KINDS = (
    (("top_k", "groups", "topk_groups"), (int, torch.SymInt), "an integer"),
    (("eps", "scale"), (int, float, torch.SymInt, torch.SymFloat), "a number"),
)


@dataclass(frozen=True)
class RouterSpec:
    """How a token's experts are chosen and weighted: see moe_route.py, whose arguments these are."""

    top_k: int
    scoring: str = "softmax"  # | "sigmoid" | "softmax_chosen": of the logits of those chosen only
    groups: int = 1  # of experts; only those in the topk_groups best may be chosen
    topk_groups: int = 1
    group_score: str = "max"  # of the choices in a group | "top2": the sum of the two highest
    renormalise: bool = False  # weights are divided by their sum + eps
    eps: float = 0.0
    scale: float = 1.0  # of the weights, at last
    round_logits: bool = True  # to the dtype of the hidden states; else they are fp32
    round_weights: bool = True  # likewise
    bias: bool = False  # added to the logits
    correction_bias: bool = False  # added to the scores for the choice, not for the weights

    def numbers(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """moe_route's arguments between the tensors and tile_rows, for hidden states of `dtype`."""
        wide = accumulate_dtype(dtype) if dtype in DTYPES else dtype  # the op's own check refuses x of another dtype
        return (self.scoring, self.top_k, self.groups, self.topk_groups, self.group_score, self.renormalise, self.eps, self.scale,
                dtype if self.round_logits else wide, dtype if self.round_weights else wide)  # fmt: skip


def check_router(op: str, args: Mapping[str, Any], experts: int) -> None:
    """Raises ValueError naming the number that does not fit `experts` or the others, TypeError for what is no number, ShapeError
    for experts no index takes."""
    for names, kinds, expected in _KINDS:
        for name in names:
            if not isinstance(args[name], kinds):
                raise TypeError(f"{op}: {name} is {args[name]!r} ({type(args[name]).__name__}), expected {expected}")
    if not 1 <= experts <= MAX_EXPERTS:
        raise ShapeError(f"{op}: experts={experts}, expected 1 to {MAX_EXPERTS}")
    top_k, groups, topk_groups = args["top_k"], args["groups"], args["topk_groups"]
    for name, known in (("scoring", SCORINGS), ("group_score", GROUP_SCORES)):
        if args[name] not in known:
            raise ValueError(f"{op}: {name}={args[name]!r}, expected one of {', '.join(known)}")
    if not 1 <= top_k <= experts:
        raise ValueError(f"{op}: top_k={top_k}, expected 1 to experts={experts}")
    if groups < 1 or experts % groups:
        raise ValueError(f"{op}: groups={groups}, expected a divisor of experts={experts}")
    if not 1 <= topk_groups <= groups:
        raise ValueError(f"{op}: topk_groups={topk_groups}, expected 1 to groups={groups}")
    size = experts // groups
    if size * topk_groups < top_k:
        raise ValueError(f"{op}: top_k={top_k}, but topk_groups={topk_groups} groups of {size} experts may be chosen")
    if groups > 1 and args["group_score"] == "top2" and size < 2:
        raise ValueError(f"{op}: groups={groups} of experts={experts}, expected two experts a group with group_score='top2'")
    if not 0.0 <= args["eps"] < math.inf:
        raise ValueError(f"{op}: eps={args['eps']}, expected a finite number of at least 0")
    if not abs(args["scale"]) < math.inf:
        raise ValueError(f"{op}: scale={args['scale']}, expected a finite number")

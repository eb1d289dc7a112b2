"""A router and its index written with loops over tokens and experts: what moe_route and moe_index are held to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def choice_of(logits: Tensor, scoring: str, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores `tokens experts`, and what the choice is made by."""
    if scoring == "softmax":
        scores = torch.exp(logits - torch.logsumexp(logits, -1, keepdim=True))
    else:
        scores = 1 / (1 + torch.exp(-logits)) if scoring == "sigmoid" else logits
    return scores, scores if correction is None else scores + correction


def chosen(choice: list[float], top_k: int, groups: int, topk_groups: int, group_score: str) -> list[int]:
    """The experts of one token, best first, lower index first among equals."""
    size = len(choice) // groups

    def value(group: int) -> float:
        return sum(sorted(choice[group * size : (group + 1) * size])[-2 if group_score == "top2" else -1 :])

    best = sorted(range(groups), key=lambda g: (-value(g), g))[:topk_groups]
    allowed = [e for e in range(len(choice)) if e // size in best]
    return sorted(allowed, key=lambda e: (-choice[e], e))[:top_k]


def choose(choice: Tensor, a: dict[str, Any]) -> Tensor:
    rules = (a["top_k"], a["groups"], a["topk_groups"], a["group_score"])
    rows = [chosen(row, *rules) for row in choice.tolist()]
    return torch.tensor(rows, dtype=torch.int64, device=choice.device).view(-1, a["top_k"])


def index(indices: Tensor, experts: int, tile_rows: int) -> dict[str, Tensor]:
    """order up to the last slot that has an expert, inverse, offsets and tiles."""
    slots = [(e, slot) for slot, e in enumerate(indices.flatten().tolist()) if 0 <= e < experts]
    rows = [slot for _, slot in sorted(slots)]
    inverse = [-1] * indices.numel()
    for row, slot in enumerate(rows):
        inverse[slot] = row
    offsets = [sum(e < n for e, _ in slots) for n in range(experts + 1)]
    firsts = [(e, r) for e in range(experts) for r in range(offsets[e], offsets[e + 1], tile_rows)]
    tiles = [(e, r, min(r + tile_rows, offsets[e + 1])) for e, r in firsts]
    most = indices.numel() // tile_rows + min(experts, indices.numel())
    table = [(*t, len(tiles)) for t in tiles + [(0, 0, 0)] * (most - len(tiles))]
    made = {"order": rows, "inverse": inverse, "offsets": offsets, "tiles": table}
    tensors = {name: torch.tensor(values, dtype=torch.int64, device=indices.device) for name, values in made.items()}
    return {**tensors, "inverse": tensors["inverse"].view(indices.shape), "tiles": tensors["tiles"].view(-1, 4)}


def moe_route(a: dict[str, Any]) -> dict[str, Tensor]:
    logits = a["x"] @ a["weight"].t()
    if a["bias"] is not None:
        logits = logits + a["bias"]
    scores, choice = choice_of(logits, a["scoring"], a["correction_bias"])
    indices = choose(choice, a)
    weights = torch.stack([row[i] for row, i in zip(scores, indices)]) if len(scores) else scores[:, : a["top_k"]]
    if a["scoring"] == "softmax_chosen":
        weights = torch.exp(weights) / torch.exp(weights).sum(-1, keepdim=True)
    if a["renormalise"]:
        weights = weights / (weights.sum(-1, keepdim=True) + a["eps"])
    made = {"weights": weights * a["scale"], "indices": indices, "logits": logits}
    return made | index(indices, a["weight"].shape[0], a["tile_rows"])


def moe_index(a: dict[str, Any]) -> dict[str, Tensor]:
    return index(a["indices"], a["experts"], a["tile_rows"])

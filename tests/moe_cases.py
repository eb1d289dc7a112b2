"""Inputs of the experts' ops and their index, made in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from formulas import Args
from torch import Tensor

from fusedblock.kernels._moe import CLAMPED, choose_tile_rows, max_tiles
from fusedblock.kernels._target import TARGETS

# dtype and target of a kernel's values
RUNS = [(torch.float32, "sm_90"), (torch.bfloat16, "sm_90")]
RUNS += [pytest.param(*run, marks=pytest.mark.slow) for run in ((torch.float16, "sm_90"), (torch.bfloat16, "sm_80"))]


def _randn(*shape: int, dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def make_index(indices: Tensor, experts: int, tile_rows: int) -> dict[str, Tensor]:
    """order, inverse, offsets and tiles of indices `tokens top_k`; what is no expert's number has no row (inverse -1)."""
    expert = indices.flatten().tolist()
    order = [slot for e in range(experts) for slot in range(len(expert)) if expert[slot] == e]
    inverse = [-1] * len(expert)
    for row, slot in enumerate(order):
        inverse[slot] = row
    bounds = [0]
    for e in range(experts):
        bounds.append(bounds[-1] + expert.count(e))
    starts = [(e, r) for e in range(experts) for r in range(bounds[e], bounds[e + 1], tile_rows)]
    tiles, count = [[e, r, min(r + tile_rows, bounds[e + 1])] for e, r in starts], len(starts)
    tiles = [[*t, count] for t in tiles] + [[0, 0, 0, count]] * (max_tiles(len(expert), experts, tile_rows) - count)
    order += [1 << 30] * (len(expert) - len(order))  # never to be read
    found = {"order": order, "inverse": inverse, "offsets": bounds, "tiles": tiles}
    made = {n: torch.tensor(v, dtype=torch.int32) for n, v in found.items()}
    return {**made, "inverse": made["inverse"].view(indices.shape), "tiles": made["tiles"].view(-1, 4)}


def make_indices(tokens: int, experts: int, top_k: int, kind: str, g: torch.Generator) -> Tensor:
    """tokens top_k, distinct in a token. "one": expert 1 has every token; "holes": odd experts and the last have none, where
    there are enough others; "last": the last has none."""
    score = torch.rand(tokens, experts, generator=g)
    if kind == "one":
        score[:, 1] += 1
    elif kind == "holes":
        score[:, 1::2] -= 1
        score[:, -1] -= 1
    elif kind == "last":
        score[:, -1] -= 1
    return score.topk(top_k, dim=1).indices.to(torch.int32)


@dataclass(frozen=True)
class Experts:
    """A case's words; laid: "transposed", "interleaved"; bias on both products; weights: their dtype, None for x's."""

    tokens: int = 7
    hidden: int = 24
    ffn: int = 40
    experts: int = 5
    top_k: int = 2
    routing: str = "even"
    activation: str = "silu"
    laid: str = ""
    bias: bool = False
    weights: torch.dtype | None = None
    tile_rows: int = 16
    save: bool = True
    limit: float = 20.0
    residual: bool = False

    @property
    def id(self) -> str:
        shape = f"moe_experts-{self.tokens}x{self.hidden}x{self.ffn}-{self.experts}:{self.top_k}-{self.routing}-{self.activation}"
        wide = "" if self.weights is None else "-" + str(self.weights).removeprefix("torch.")
        words = (self.laid + " residual" * self.residual).strip().replace(" ", "+")
        return shape + "-" * bool(words) + words + "-bias" * self.bias + wide + f"-{self.tile_rows}" + "-again" * (not self.save)

    def make(self, dtype: torch.dtype, g: torch.Generator) -> Args:
        transposed, interleaved = "transposed" in self.laid, "interleaved" in self.laid
        e, h, f = self.experts, self.hidden, self.ffn
        up, down = ((e, h, 2 * f), (e, f, h)) if transposed else ((e, 2 * f, h), (e, h, f))
        indices = make_indices(self.tokens, e, self.top_k, self.routing, g)
        weights = 0.1 + torch.rand(self.tokens, self.top_k, generator=g, dtype=torch.float64)
        kind = self.weights if self.weights is not None and dtype is not torch.float64 else dtype
        return {
            "x": _randn(self.tokens, h, dtype=dtype, generator=g),
            "gate_up_weight": _randn(*up, dtype=dtype, generator=g, scale=max(h, 1) ** -0.5),
            "down_weight": _randn(*down, dtype=dtype, generator=g, scale=max(f, 1) ** -0.5),
            "gate_up_bias": _randn(e, 2 * f, dtype=dtype, generator=g) if self.bias else None,
            "down_bias": _randn(e, h, dtype=dtype, generator=g) if self.bias else None,
            "weights": weights.to(kind), "indices": indices, **make_index(indices, e, self.tile_rows),
            "activation": self.activation, "alpha": 1.702, "limit": self.limit, "transposed": transposed,
            "interleaved": interleaved, "tile_rows": self.tile_rows, "save": self.save,
            "residual": _randn(self.tokens, h, dtype=dtype, generator=g) if self.residual else None,
        }  # fmt: skip


@dataclass(frozen=True)
class Projections:
    """A case's words of moe_linear; sums: with weights. given: "bias", "out_bias", "residual", "transposed", "wide" weights."""

    tokens: int = 7
    inner: int = 24
    outer: int = 40
    experts: int = 5
    top_k: int = 2
    heads: int = 1
    sums: bool = False
    routing: str = "even"
    given: str = ""
    tile_rows: int = 16

    @property
    def id(self) -> str:
        shape = f"{'sum' if self.sums else 'slots'}-{self.tokens}x{self.inner}x{self.outer}-{self.experts}:{self.top_k}"
        words = "-" * bool(self.given) + self.given.replace(" ", "+")
        return f"moe_linear-{shape}-{self.routing}-h{self.heads}{words}-{self.tile_rows}"

    def make(self, dtype: torch.dtype, g: torch.Generator) -> Args:
        words, (e, k, n) = self.given.split(), (self.experts, self.inner, self.outer)
        indices = make_indices(self.tokens, e, self.top_k, self.routing, g)
        weights = 0.1 + torch.rand(self.tokens, self.top_k, generator=g, dtype=torch.float64)
        wide = torch.float32 if "wide" in words and dtype is not torch.float64 else dtype
        shapes = {"bias": (e, n), "out_bias": (n,), "residual": (self.tokens, n)}
        more = {name: _randn(*shape, dtype=dtype, generator=g) if name in words else None for name, shape in shapes.items()}
        return {
            "x": _randn(self.tokens, k * (self.top_k if self.sums else 1), dtype=dtype, generator=g),
            "weight": _randn(e, *((k, n) if "transposed" in words else (n, k)), dtype=dtype, generator=g, scale=k**-0.5),
            "bias": more["bias"], "weights": weights.to(wide) if self.sums else None, "out_bias": more["out_bias"],
            "residual": more["residual"], "indices": indices, **make_index(indices, e, self.tile_rows),
            "transposed": "transposed" in words, "heads": self.heads, "tile_rows": self.tile_rows,
        }  # fmt: skip


GPT_OSS = {"activation": CLAMPED, "laid": "transposed interleaved", "bias": True}


def chosen(case: Experts, dtype: torch.dtype, target: str) -> Experts:
    """With the tile rows that the tables choose."""
    rows = choose_tile_rows(case.tokens, case.top_k, case.experts, dtype.itemsize, TARGETS[target])
    return replace(case, tile_rows=rows)

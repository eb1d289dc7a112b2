"""The mixture of a bound layer, as the layer runs it: the MLP of its normalised rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import blocks
from ..blocks import Mixed, MoeSpec, MoeWeights
from ..ops import Fixed


@dataclass(frozen=True, eq=False)
class Mixture:
    """Numerics and parameters of a mixture, the router that they are of, and what is the same in every call."""

    spec: MoeSpec
    weights: MoeWeights
    router: nn.Module
    kept: Fixed | None  # None while torch.compile traces

    def __call__(self, y: Tensor, residual: Tensor | None = None) -> Tensor:
        """y `... hidden` through router, experts and shared expert, in y's dtype, and the residual, like y but for its dtype."""
        mixed = self.mixed(y, residual)
        # The router's own forward does not run. Of hooks on it there are none but transformers', which record what it says.
        for hook in self.router._forward_hooks.values():
            hook(self.router, (y,), (mixed.logits, mixed.weights, mixed.indices))
        return mixed.out

    def mixed(self, y: Tensor, residual: Tensor | None = None) -> Mixed:
        """Likewise, and what the router says."""
        weights, kept = self.weights, self.kept
        if weights.gate_up.dtype is not y.dtype:  # autocast, under which transformers' products are of y's dtype as well
            kept, weights = None, _cast(weights, y.dtype)
        add = residual if residual is not None and residual.dtype is y.dtype else None
        mixed = blocks.mixture(self.spec, weights, y, residual=add, kept=kept)
        return mixed if residual is None or add is not None else mixed._replace(out=residual + mixed.out)


def _cast(w: MoeWeights, dtype: torch.dtype) -> MoeWeights:
    """All but what only decides who is chosen. To autograd the casts are steps of their own."""
    cast = [t if t is None or n == "router_correction" else t.to(dtype) for n, t in zip(w._fields, w)]
    return MoeWeights(*cast)  # type: ignore[arg-type]

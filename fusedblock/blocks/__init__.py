"""One decoder layer as a few launches: its numbers (BlockSpec), its plan, and the functional core that executes the plan; and the
MLP of a mixture of experts likewise (MoeSpec, mixture)."""

from fusedblock.blocks.functional import BlockWeights, Slots, fixed, forward
from fusedblock.blocks.moe import Mixed, MoeSpec, MoeWeights, check_mixture, fixed_mixture, like_rows, mixture, wide_router
from fusedblock.blocks.plan import BlockSpec, Launch, Plan, plan, plan_mixture

__all__ = [
    "BlockSpec", "BlockWeights", "Launch", "Mixed", "MoeSpec", "MoeWeights", "Plan", "Slots", "check_mixture", "fixed",
    "fixed_mixture", "forward", "like_rows", "mixture", "plan", "plan_mixture", "wide_router",
]  # fmt: skip

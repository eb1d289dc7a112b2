"""One decoder layer as a few launches: its numbers (BlockSpec), its plan, and the functional core that executes the plan."""

from fusedblock.blocks.functional import BlockWeights, Slots, fixed, forward
from fusedblock.blocks.plan import BlockSpec, Launch, Plan, plan

__all__ = ["BlockSpec", "BlockWeights", "Launch", "Plan", "Slots", "fixed", "forward", "plan"]

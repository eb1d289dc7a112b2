"""A block of experts that is fused alone, in a layer whose attention waits for a kernel: its binding, and the call of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .adapter import experts_refusal, globally_hooked, modes, rows_refusal
from .binding import BlockBinding, Unfit, bind_sparse, check_class, child_of, reader, watch
from .table import MixtureSpec, known_block
from .watch import Fact


def parts(block: nn.Module, spec: MixtureSpec) -> list[type]:
    """Classes of the block's parts whose arithmetic the fused block replaces."""
    return [type(part) for n, part in block.named_modules() if n in (*spec.sparse.classes, spec.sparse.router)]


def bind_block(block: nn.Module, spec: MixtureSpec) -> BlockBinding | str:
    """Read the block: its numerics, its parameters, and what must stay as it is; or why it is not fused."""
    facts: list[Fact] = []
    try:
        check_class(block, known_block)
        children = [child_of(block, path, f"{spec.home}.{name}") for path, name in spec.sparse.classes.items()]
        hidden = getattr(getattr(getattr(block, spec.sparse.router, None), "weight", None), "shape", (0,))[-1]
        mixture, slots = bind_sparse(block, spec, spec.sparse, hidden, reader(block, facts), children)
    except Unfit as unfit:
        return str(unfit)
    return BlockBinding(mixture, watch(block, children, slots, facts, block.get_submodule(spec.sparse.experts)))


def is_current(binding: BlockBinding, block: nn.Module) -> bool:
    """Whether `bind_block` would give the same binding again."""
    return binding.watch is not None and binding.watch.holds(block)


def prepare(binding: BlockBinding, x: Tensor) -> tuple[torch.dtype | None, str]:
    """(dtype to multiply x `... hidden` in under autocast, else None; why the original forward has to run, or "")."""
    if not torch.compiler.is_compiling() and (hooked := globally_hooked()):
        return None, hooked
    compute, reason = modes(x)
    reason = reason or rows_refusal(x, compute) or experts_refusal(binding.mixture, x)
    hidden = binding.mixture.weights.router.shape[1]
    if not reason and (x.dim() < 2 or x.shape[-1] != hidden):
        reason = f"hidden_states has shape {tuple(x.shape)}, the router takes {hidden} columns"
    return compute, reason or ""

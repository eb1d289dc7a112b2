"""Which op computes an attention call, and why: a pure function of sizes, dtype, what is given and the target."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._attention_skeleton import Skeleton
from ._target import Target

# Queries times heads of a group up to this many take split keys: a tile of them leaves most of the GPU idle.
DECODE_ROWS = 64


@dataclass(frozen=True)
class Choice:
    """op: "attention" (tiles of queries) or "decode_attention" (split keys); engine: "triton", "gluon" (of the forward) or
    "torch"."""

    op: str
    engine: str
    why: str
    changes: str  # what would change it

    @property
    def splits(self) -> bool:
        return self.op == "decode_attention"

    def __str__(self) -> str:
        return f"{self.op} ({self.engine}): {self.why}\n  otherwise: {self.changes}"


def why_tiles(rows: int, *, training: bool = False, invariant: bool = False, packed: bool = False, one_each: bool = False,
              block_map: bool = False, dropout: bool = False) -> str | None:  # fmt: skip
    """What keeps a call from splitting its keys; None: nothing does. rows: queries of a sequence times heads of a group.

    packed: the queries of several sequences are one axis; one_each: each of them has one query, and pages of keys.
    """
    if training:
        return "gradients are wanted"
    if invariant:
        return "batch_invariant: split keys are summed in an order of their own"
    if dropout:
        return "dropout"
    if block_map:
        return "a block map"
    if packed and not one_each:
        return "packed sequences"
    if torch.compiler.is_exporting():  # its only graph; torch.compile makes another for the queries that a guard leaves out
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # brings sympy

        return None if statically_known_true(rows <= DECODE_ROWS) else "perhaps more queries than that"
    return "more queries than that" if rows > DECODE_ROWS else None


def choose(*, seq: int, group: int, target: Target, dtype: torch.dtype = torch.bfloat16, training: bool = False,
           packed: bool = False, one_each: bool = False, block_map: bool = False, dropout: bool = False,
           masked: bool = False, forward: Skeleton | None = None, backward: Skeleton | None = None) -> Choice:  # fmt: skip
    """The op for sequences of `seq` queries with `group` heads a key head; the rest as in why_tiles.

    masked: a mask comes with the call. forward, backward: what runs them where the op is attention, as far as it is known.
    Pure: equal arguments give an equal choice.
    """
    seq = 1 if one_each else seq
    why = why_tiles(seq * group, training=training, invariant=target.batch_invariant, packed=packed, one_each=one_each,
                    block_map=block_map, dropout=dropout)  # fmt: skip
    engine = "torch" if dtype is torch.float64 and target.backend == "cuda" else "triton"
    note = "; in float64 a GPU runs plain torch, for comparisons" if engine == "torch" else ""
    if why is None:
        parts = f"{seq} {'query' if seq == 1 else 'queries'} a sequence: heads of a group packed, keys split over the GPU where "
        parts += "the sequences do not fill it (a second launch joins the parts)"
        changes = f"gradients, batch_invariant, or more than {DECODE_ROWS} queries times heads of a group: tiles of queries"
        return Choice("decode_attention", engine, parts + note, changes)
    parts = "tiles of queries, the logits never leave the SM" + (", mask read by tile" if masked else "")
    parts += ", blocks that the map leaves out are not read" if block_map else ""
    changes = f"without gradients, at most {DECODE_ROWS} queries times heads of a group: keys split over the GPU"
    if why != "more queries than that":
        changes += f" (here: {why})"
    if engine == "torch":
        forward = backward = None
    for name, skeleton in (("forward", forward), ("backward", backward)):
        if skeleton is not None:
            parts += f"; {name}: {skeleton}"
            changes += f"; {name}: {skeleton.otherwise}" if skeleton.changes else ""
    engine = "gluon" if forward is not None and forward.hopper else engine
    return Choice("attention", engine, parts + note, changes)

"""The plan of a layer: pure, hashable, the same for every GPU, and readable."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from fusedblock.blocks import BlockSpec, Launch, Plan, plan
from fusedblock.kernels._target import TARGETS
from fusedblock.ops import OPS

SPEC = BlockSpec(hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, scale=128**-0.5, eps=1e-5)
H200 = TARGETS["sm_90"]


def of(spec: BlockSpec = SPEC, batch: int = 1, seq: int = 4096, context: int = 4096, dtype: torch.dtype = torch.bfloat16,
       training: bool = False, target=H200, masked: bool = False) -> Plan:  # fmt: skip
    return plan(spec, batch=batch, seq=seq, context=context, dtype=dtype, training=training, target=target, masked=masked)


def ops_of(p: Plan) -> list[str]:
    return [launch.op for launch in p.launches]


FUSED = ["norm", "qkv_rope", "attention", "linear", "gated_mlp", "linear"]
APART = ["norm", "qkv_rope", "attention", "linear", "norm", "gated_mlp", "linear"]


def test_launches_of_prefill_and_training():
    assert ops_of(of(seq=40, context=40)) == FUSED
    assert ops_of(of()) == APART
    assert ops_of(of(seq=40, context=40, training=True)) == APART
    assert ops_of(of(training=True)) == APART


def test_decode_attends_with_keys_split():
    for seq, context in ((1, 4096), (4, 100)):
        assert ops_of(of(batch=2, seq=seq, context=context)) == [*FUSED[:2], "decode_attention", *FUSED[3:]]
        why = next(launch.why for launch in of(seq=seq, context=context).launches if launch.op == "decode_attention")
        assert why.startswith("1 query a sequence: " if seq == 1 else f"{seq} queries a sequence: ")
    assert of(seq=1, context=64).decode
    assert not of(seq=1, context=64, training=True).decode
    assert not of(seq=17, context=64).decode


def test_split_keys_are_joined_by_a_launch_of_their_own():
    for batch, context, launches in ((1, 4096, 7), (1, 64, 6), (64, 4096, 6)):  # of 64 sequences the GPU is full without
        assert of(batch=batch, seq=1, context=context).kernels == launches


@pytest.mark.parametrize(
    ("reason", "p"),
    [
        ("fp16 range", of(seq=40, context=40, dtype=torch.float16)),
        ("weight offset", of(dataclasses.replace(SPEC, weight_offset=1.0), seq=40, context=40)),
        ("training keeps the normalised rows", of(seq=40, context=40, training=True)),
        ("more than 64 rows", of(batch=2, seq=33, context=33)),
    ],
)
def test_a_norm_of_its_own_says_why(reason, p):
    assert ops_of(p) == APART
    assert not p.row_statistics
    (step,) = (s for s in p.launches if s.role == "MLP norm")
    assert reason in step.why
    assert reason in str(p)


def test_pure_and_hashable():
    """Equal arguments give an equal plan, also computed anew; plans and specs are keys of dictionaries."""
    a, b = of(), plan.__wrapped__(
        SPEC, batch=1, seq=4096, context=4096, dtype=torch.bfloat16, training=False, target=H200, masked=False
    )  # fmt: skip
    assert a == b
    assert hash(a) == hash(b)
    assert {a: 1}[b] == 1
    assert of(training=True) != a
    assert hash(SPEC) == hash(dataclasses.replace(SPEC))
    for frozen in (SPEC, a, a.launches[0]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, dataclasses.fields(frozen)[0].name, None)


def test_every_gpu_runs_the_same_launches():
    shapes = itertools.product((1, 4), (1, 40, 4096), (torch.bfloat16, torch.float16, torch.float32), (False, True))
    for batch, seq, dtype, training in shapes:
        plans = [
            of(batch=batch, seq=seq, dtype=dtype, training=training, target=TARGETS[t])
            for t in ("sm_80", "sm_86", "sm_90", "sm_100")
        ]
        # Which kernel runs attention is a matter of the GPU (test_attention_skeletons.py).
        others = {dataclasses.replace(p, launches=tuple(s for s in p.launches if s.op != "attention")) for p in plans}
        assert len(others) == 1
        assert len({(p.kernels, *((s.op, s.role, s.kernels) for s in p.launches)) for p in plans}) == 1


def test_bounds():
    """Never more than seven launches, each a registered op with a reason."""
    for batch, seq, training, masked in itertools.product((1, 64), (1, 16, 17, 64, 65, 8192), (False, True), (False, True)):
        p = of(batch=batch, seq=seq, context=seq, training=training, masked=masked)
        assert 6 <= len(p.launches) <= 7
        assert len(p.launches) == 7 - p.row_statistics
        assert p.kernels == len(p.launches)  # the keys are one block: nothing to split
        for step in p.launches:
            assert isinstance(step, Launch)
            assert step.op in OPS
            assert step.engine in ("triton", "torch", "gluon" if step.op == "attention" else "triton")
            assert step.why
        assert any(step.changes for step in p.launches)


def test_text_has_a_line_for_every_launch():
    for p in (of(), of(seq=1), of(training=True, masked=True)):
        lines = str(p).splitlines()
        for step in p.launches:
            line = lines.pop(0)
            assert line.split("  ")[0].strip() == step.role
            assert all(part in line for part in (step.op, step.engine, step.why))
            if step.changes:
                assert lines.pop(0).strip() == f"otherwise: {step.changes}"
        assert lines == []
    assert "mask read by tile" in str(of(masked=True))
    assert "mask read by tile" not in str(of())

"""Recorded launches, replayed for other tensors of the same layout, give what running op by op gives."""

from __future__ import annotations

import dataclasses
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import fusedblock
from fusedblock import ops
from fusedblock.blocks import BlockSpec, BlockWeights
from fusedblock.blocks import functional as core
from fusedblock.interpret import interpret
from fusedblock.kernels import _launch, _replay, norm
from fusedblock.kernels._target import TARGETS

SPEC = BlockSpec(hidden=64, ffn=136, heads=4, kv_heads=2, head_dim=16, scale=0.25, eps=1e-5)


def _tensors(seed: int, gate_first: bool) -> tuple[BlockWeights, list[Tensor]]:
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).bfloat16()

    pair = rand(2, 136, 64)
    gate, up = (pair[0], pair[1]) if gate_first else (pair[1], pair[0])
    w = BlockWeights(
        attn_norm=rand(64), q=rand(64, 64), k=rand(32, 64), v=rand(32, 64), o=rand(64, 64), mlp_norm=rand(64), gate=gate, up=up,
        down=rand(64, 136),
    )  # fmt: skip
    return w, [rand(2, 150, 64), rand(1, 150, 16), rand(1, 150, 16)]


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return norm.launch(x, weight, None, None, "rms", 1e-5, 0.0, True, False, x.dtype)[0]


def _compose(w: BlockWeights, given: list[Tensor]) -> Tensor:
    return core._compose_block(ops.direct, SPEC, w, *given, None, -1, 0, None, None)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("gate_first", [True, False])
def test_replay_equals_composition(target: str, gate_first: bool) -> None:
    w, given = _tensors(0, gate_first)
    inputs = [*given, *[t for t in w if t is not None]]
    with interpret(TARGETS[target]):
        out, program = _replay.record(lambda: _compose(w, given), inputs)
        assert program is not None and len(program.steps) == 7
        for seed in (0, 1):
            w2, given2 = _tensors(seed, gate_first)
            got = program.run([*given2, *[t for t in w2 if t is not None]])
            assert got is not None and torch.equal(got[0], _compose(w2, given2))
            assert torch.equal(got[0], out) == (seed == 0)


LAYOUTS = {
    "stacked": {"qkv_layout": "stacked", "mlp": "gated_stacked"},
    "per head": {"qkv_layout": "per_head", "mlp": "plain", "norm": "layer", "residual": "parallel", "activation": "gelu"},
    "by columns": {"qkv_layout": "stacked", "mlp": "plain", "norm": "layer", "transposed": True, "rope": "",
                   "activation": "relu"},
    "repeated tables": {"rope": "interleaved", "tables": "repeat"},
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("seq", [3, 150])
def test_parts_of_one_weight_are_found_in_another(name: str, seq: int) -> None:
    """A launch takes addresses inside of a parameter; so must its replay, of the parameter it is given."""
    options = {**LAYOUTS[name], "ffn": 128}
    spec = dataclasses.replace(SPEC, **options, kv_heads=4 if name == "per head" else 2)
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    split = spec.qkv_layout == "split"

    def made(seed: int) -> tuple[BlockWeights, list[Tensor]]:
        g = torch.Generator().manual_seed(seed)

        def rand(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=g) * 0.2).bfloat16()

        def matrix(rows: int, columns: int) -> Tensor:
            return rand(columns, rows) if spec.transposed else rand(rows, columns)

        biases = {} if split else {"q_bias": rand(q + 2 * kv), "attn_norm_bias": rand(64), "mlp_norm_bias": rand(64)}
        w = BlockWeights(
            q=matrix(q if split else q + 2 * kv, 64), k=matrix(kv, 64) if split else None, v=matrix(kv, 64) if split else None,
            o=matrix(64, q), gate=matrix(128, 64) if spec.mlp == "gated" else None,
            up=matrix(256 if spec.mlp == "gated_stacked" else 128, 64), down=matrix(64, 128),
            attn_norm=rand(64), mlp_norm=rand(64), **biases if spec.norm == "layer" else {},
        )  # fmt: skip
        return w, [rand(2, seq, 64), *([rand(1, seq, 16), rand(1, seq, 16)] if spec.rope else [])]

    def compose(w: BlockWeights, given: list[Tensor]) -> Tensor:
        x, cos, sin = given if spec.rope else (*given, None, None)
        return core._compose_block(ops.direct, spec, w, x, cos, sin, None, -1, 0, None, None)

    def tensors(w: BlockWeights, given: list[Tensor]) -> list[Tensor]:
        return [*given, *[t for t in w if t is not None]]

    with interpret(TARGETS["sm_90"]):
        first, second = made(0), made(1)
        _, program = _replay.record(lambda: compose(*first), tensors(*first))
        assert program is not None
        kept, got = [second], program.run(tensors(*second))
        while got is None and len(kept) < 50:  # gate and up lie in the other order
            kept.append(second := made(len(kept) + 1))
            got = program.run(tensors(*second))
        assert got is not None and torch.equal(got[0], compose(*second))


def test_launches_of_another_thread_are_not_recorded() -> None:
    x, weight = torch.randn(4, 32), torch.randn(32)

    def elsewhere() -> None:
        _norm(torch.randn(4, 32), weight)

    def run() -> Tensor:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return _norm(x, weight)

    with interpret(TARGETS["sm_80"]):
        out, program = _replay.record(run, [x, weight])
        assert program is not None and len(program.steps) == 1
        again = program.run([x, weight])
        assert again is not None and torch.equal(again[0], out)


def test_weights_in_the_other_order_are_not_replayed() -> None:
    w, given = _tensors(0, True)
    with interpret(TARGETS["sm_90"]):
        _, program = _replay.record(lambda: _compose(w, given), [*given, *[t for t in w if t is not None]])
        assert program is not None
        w2, given2 = _tensors(0, False)
        assert program.run([*given2, *[t for t in w2 if t is not None]]) is None


def test_what_cannot_be_replayed_is_not_recorded() -> None:
    x, weight = torch.randn(4, 32), torch.randn(32)
    with interpret(TARGETS["sm_80"]):

        def run(t: Tensor, w: Tensor) -> Tensor:
            return _norm(t, w)

        assert _replay.record(lambda: run(x, weight), [x, weight])[1] is not None
        strided = torch.randn(32, 4).t()
        assert _replay.record(lambda: run(strided, weight), [strided, weight])[1] is None  # it copies
        assert _replay.record(lambda: run(x, x[0]), [x, x[0]])[1] is None  # inputs overlap


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """What `replayed` enqueues: (number of the program, addresses). Nothing is launched, and every layout can be replayed."""
    seen: list[tuple[int, list[int]]] = []
    made: list[object] = []

    class Fake:
        steps = (SimpleNamespace(compiled=None),)

        def enqueue(self, base: list[int], device: torch.device) -> tuple[Tensor, ...]:
            seen.append((made.index(self), list(base)))
            return (torch.empty(0),)

    def record(compose: object, inputs: list[Tensor]) -> tuple[Tensor, Fake]:
        made.append(Fake())
        seen.append((len(made) - 1, [t.data_ptr() for t in inputs]))
        return torch.empty(0), made[-1]

    monkeypatch.setattr(_launch, "replays", lambda t: True)
    monkeypatch.setattr(_replay, "record", record)
    monkeypatch.setattr(_replay, "_programs", {})
    return seen


def test_a_layers_next_call_finds_what_its_key_would(chosen: list[tuple[int, list[int]]]) -> None:
    """Calls of every kind, each a few times in a row: a layer that remembers its last call against one that never has."""
    weights = [torch.randn(8, 8), torch.randn(8)]
    remembers = _replay.Fixed((*weights, 3), lambda args: True)
    x = torch.randn(64)
    other = x.clone()

    def given() -> list[tuple[object, ...]]:
        a, b = x[:32].view(4, 8), x[32:].view(4, 8)
        return [
            (a, b, None, 1), (b, a, None, 1), (other[:32].view(4, 8), b, None, 1), (a, b, None, 2), (a, b, b[:1], 1),
            (a, a, None, 1), (a, None, b, 1), (a[:2], b, None, 1), (a, x[33:41].view(1, 8), None, 1),
            (a, x[34:42].view(1, 8), None, 1), (a, b.t(), None, 1), (a, b.view(torch.int32), None, 1), (a.double(), b, None, 1),
            (weights[1].view(1, 8), b, None, 1),
        ]  # fmt: skip

    for args in [args for args in given() for _ in range(4)] + given() * 2:
        for name in ("front", "back"):
            fresh = _replay.Fixed(remembers.args, remembers.facts)
            _replay.replayed(name, lambda: None, args, fresh)
            _replay.replayed(name, lambda: None, args, remembers)
            (expected, base), (found, addresses) = chosen[-2:]
            assert found == expected and addresses == base == [t.data_ptr() for t in (*args, *weights) if isinstance(t, Tensor)]
    assert len({n for n, _ in chosen}) == 2 * 11  # of each name; three of the fourteen differ from another in addresses alone


def test_a_layers_next_call_sees_options_and_parameters(chosen: list[tuple[int, list[int]]]) -> None:
    weight, x = torch.nn.Parameter(torch.randn(8, 8)), torch.randn(4, 8)
    fixed = _replay.Fixed((weight,), lambda args: True)

    def program() -> int:
        for _ in range(3):
            _replay.replayed("block", lambda: None, (x, 1), fixed)
        assert len({n for n, _ in chosen[-3:]}) == 1
        return chosen[-1][0]

    first = program()
    with fusedblock.options(batch_invariant=True):
        assert program() != first
    assert program() == first
    old, weight.data = weight.data, torch.randn(8, 16)[:, :8]
    assert program() != first
    weight.data = old
    assert program() == first

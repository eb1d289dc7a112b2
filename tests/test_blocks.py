"""A whole layer against a plain layer in float64, written here from torch's own functions, with and without gradients."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from layer_cases import GEMMA, LLAMA, QWEN, VARIANTS, Cache, in_float64, inputs, make_weights, plain_layer, run
from op_cases import FEW_SMS, PATHS, assert_accurate, error, randn, recording
from torch import Tensor

from fusedblock import blocks
from fusedblock.blocks import BlockSpec
from fusedblock.interpret import count_traffic
from fusedblock.kernels._spec import ShapeError
from fusedblock.kernels._target import override
from fusedblock.ops import COSTS

BF16 = torch.bfloat16


def compare(spec: BlockSpec, dtype: torch.dtype, target: str, *, batch: int = 1, seq: int = 37, biases: bool = False,
            past: int | None = None, gradients: bool = False, sinks: bool = False,
            **options: Any) -> dict[str, Tensor]:  # fmt: skip
    w, given = make_weights(spec, dtype, biases, sinks=sinks), inputs(spec, dtype, batch, seq)
    if past is not None:
        options["update"] = Cache(spec, dtype, batch, past)
    with recording(target) as launches:
        got = run(blocks.forward, spec, w, given, gradients, **options)
    assert launches
    exact = {n: in_float64(v) for n, v in options.items()}
    want = run(plain_layer, spec, in_float64(w), tuple(map(in_float64, given)), gradients, **exact)
    plain = run(plain_layer, spec, w, given, gradients, **options)
    assert_accurate(got, want, plain, dtype)
    return got


RUNS = [(torch.float32, "sm_90"), (torch.float16, "sm_90"), (BF16, "sm_90"), (BF16, "sm_80")]
runs = pytest.mark.parametrize(("dtype", "target"), RUNS, ids=lambda v: str(v).removeprefix("torch."))
SPECS = {"llama": (LLAMA, False), "gemma": (GEMMA, False), "biases": (QWEN, True),
         **{name: (spec, spec.norm == "layer") for name, spec in VARIANTS.items()}}  # fmt: skip


@runs
@pytest.mark.parametrize("name", SPECS)
def test_forward(name, dtype, target):
    """37 rows: where the dtype allows, the second norm rides on its neighbours."""
    spec, biases = SPECS[name]
    compare(spec, dtype, target, biases=biases)


@runs
def test_forward_of_many_rows(dtype, target):
    compare(LLAMA, dtype, target, batch=2, seq=75)


@runs
@pytest.mark.parametrize("name", SPECS)
def test_gradients(name, dtype, target):
    spec, biases = SPECS[name]
    compare(spec, dtype, target, biases=biases, gradients=True)


def masks(batch: int, seq: int, context: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(4)
    padding = torch.ones(batch, context, dtype=torch.bool)
    padding[0, : context // 3] = False
    blocked = torch.rand(batch, 1, seq, context, generator=g) < 0.7
    blocked[..., 0] = True
    return {
        "padding": padding,
        "rows": blocked,
        "heads": torch.rand(1, 4, seq, context, generator=g) < 0.7,
        "additive": torch.randn(1, 1, seq, context, generator=g).masked_fill(~blocked[:1], float("-inf")),
    }


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize("kind", ["padding", "rows", "heads", "additive"])
def test_masks(kind, target, gradients):
    compare(LLAMA, torch.float32, target, batch=2, seq=19, gradients=gradients, mask=masks(2, 19, 19)[kind])


def test_without_causality():
    compare(LLAMA, torch.float32, "sm_90", seq=19, causal=False)


WINDOW = dataclasses.replace(LLAMA, window_left=6, softcap=1.5)
BOTH_WAYS = dataclasses.replace(LLAMA, window_left=4, window_right=4)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("target", PATHS)
def test_windows_softcap_and_sinks(target, gradients):
    options = {"target": target, "batch": 2, "seq": 19, "gradients": gradients}
    compare(WINDOW, torch.float32, sinks=True, **options)
    compare(WINDOW, torch.float32, sinks=True, mask=masks(2, 19, 19)["padding"], **options)
    compare(BOTH_WAYS, torch.float32, causal=False, **options)
    compare(WINDOW, torch.float32, windowed=False, **options)


@pytest.mark.parametrize("seq", [1, 5])
def test_windows_softcap_and_sinks_after_a_cache(seq):
    compare(WINDOW, BF16, "sm_90", batch=2, seq=seq, past=20, sinks=True)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("spec", "causal"), [(WINDOW, True), (BOTH_WAYS, False)], ids=["causal", "both ways"])
def test_packed_sequences(spec, causal, gradients):
    bounds = torch.tensor([0, 4, 4, 13, 19], dtype=torch.int32)
    compare(spec, torch.float32, "sm_90", seq=19, causal=causal, cu_seqlens=(bounds, bounds), gradients=gradients)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("seq", "past"), [(19, 0), (19, 11), (1, 37), (3, 5)])
def test_with_a_cache(seq, past, gradients):
    """Prefill, a second chunk, one token: causal counts from the end of the context."""
    compare(LLAMA, torch.float32, "sm_90", batch=2, seq=seq, past=past, gradients=gradients)


def test_a_cache_and_padding():
    compare(LLAMA, BF16, "sm_90", batch=2, seq=3, past=20, mask=masks(2, 3, 23)["padding"])


def test_update_is_called_once_in_the_layout_of_transformers():
    w, given = make_weights(LLAMA, BF16), inputs(LLAMA, BF16, 2, 5)
    seen = []

    def update(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((k.shape, v.shape))
        return k, v

    with torch.no_grad():
        cached = blocks.forward(LLAMA, w, *given, update=update)
        assert torch.equal(cached, blocks.forward(LLAMA, w, *given))
    assert seen == [((2, 2, 5, 16), (2, 2, 5, 16))]


@pytest.mark.parametrize("interpreted", [False, True])
def test_paths_with_and_without_gradients_agree(interpreted):
    w, given = make_weights(LLAMA, torch.float32), inputs(LLAMA, torch.float32, 1, 37)
    with recording("sm_90") if interpreted else torch.no_grad():
        without = run(blocks.forward, LLAMA, w, given, False)["out"]
        with torch.enable_grad():
            with_ = run(blocks.forward, LLAMA, w, given, True)["out"]
    assert error(with_, without.double()) < 2e-6


def test_frozen_weights_take_the_path_without_gradients():
    """Grad mode is on, yet nothing wants a gradient."""
    w, given = make_weights(LLAMA, torch.float32), inputs(LLAMA, torch.float32, 1, 37)
    with recording("sm_90") as launches:
        out = blocks.forward(LLAMA, w, *given)
    assert out.grad_fn is None
    assert len(launches) == 6


def test_frozen_weights_skip_their_gemms():
    """Only x wants a gradient (an adapter below): no weight gradient is computed."""
    w, given = make_weights(LLAMA, torch.float32), inputs(LLAMA, torch.float32, 1, 19)
    x = given[0].requires_grad_()
    with recording("sm_80") as launches:
        blocks.forward(LLAMA, w, *given).sum().backward()
    kernels = [launch.kernel for launch in launches]
    assert kernels.count("grad_input_kernel") == 4
    assert "grad_weight_kernel" not in kernels
    assert "sum_rows_kernel" not in kernels
    assert x.grad is not None
    assert all(t.grad is None for t in w if t is not None)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("batch", "seq"), [(0, 5), (2, 0), (1, 1)])
def test_empty_and_single(batch, seq, gradients):
    w, given = make_weights(LLAMA, BF16), inputs(LLAMA, BF16, batch, seq)
    with recording("sm_90"):
        got = run(blocks.forward, LLAMA, w, given, gradients)
    assert got["out"].shape == (batch, seq, LLAMA.hidden)
    if batch * seq == 0 and gradients:
        assert all(torch.equal(g, torch.zeros_like(g)) for n, g in got.items())
    else:
        want = run(plain_layer, LLAMA, in_float64(w), tuple(map(in_float64, given)), gradients)
        assert all(error(got[n].double(), want[n]) < 0.05 for n in got)


@pytest.mark.parametrize("gradients", [False, True])
def test_inputs_are_never_written(gradients):
    w, given = make_weights(GEMMA, BF16, True), inputs(GEMMA, BF16, 2, 19)
    every = [t for t in (*w, *given) if t is not None]
    kept = [t.clone() for t in every]
    with recording("sm_90"):
        run(blocks.forward, GEMMA, w, given, gradients)
    assert all(torch.equal(a, b) for a, b in zip(every, kept))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("interpreted", [False, True])
def test_a_wrong_weight_is_named(interpreted, gradients):
    given = inputs(LLAMA, BF16, 1, 5)
    w = make_weights(LLAMA, BF16)._replace(up=torch.ones(135, 64, dtype=BF16))
    message = "gated_mlp: up_weight (ffn hidden) has ffn=135, but ffn=136 so far"
    with (
        recording("sm_90") if interpreted else torch.no_grad(),
        pytest.raises(ShapeError, match=re.escape(message)),
        torch.enable_grad(),
    ):
        run(blocks.forward, LLAMA, w, given, gradients)


# ---- the composite ops -----------------------------------------------------------------------------------------------------


def composite_arguments(name: str, dtype: torch.dtype, batch: int = 2, seq: int = 19, masked: bool = False,
                        spec: BlockSpec = LLAMA) -> tuple[Any, ...]:  # fmt: skip
    w, numbers = make_weights(spec, dtype), dataclasses.astuple(spec)
    x, cos, sin = inputs(spec, dtype, batch, seq)
    mask = masks(batch, seq, seq)["rows"] if masked else None
    if name in ("block_front", "block_front_rows"):
        return (x, cos, sin, *w, *numbers)
    if name == "block":
        return (x, cos, sin, mask, -1, 0, None, None, *w, *numbers)
    g = torch.Generator().manual_seed(3)
    q, k, v = (randn(batch, seq, n, 16, dtype=dtype, generator=g) for n in (4, 2, 2))
    rows = randn(batch * seq, spec.hidden, dtype=dtype, generator=g) if spec.norms == "attn_norm" else None
    return (x, rows, q, k, v, mask, -1, 0, None, None, *w, *numbers)


COMPOSITES = ("block", "block_front", "block_back")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", COMPOSITES)
def test_opcheck(name, masked):
    torch.library.opcheck(getattr(torch.ops.fusedblock, name).default, composite_arguments(name, torch.float32, masked=masked))


@pytest.mark.parametrize("name", ["block_front_rows", "block_back"])
def test_opcheck_of_a_layer_whose_branches_share_a_norm(name):
    args = composite_arguments(name, torch.float32, spec=VARIANTS["shared_norm"])
    torch.library.opcheck(getattr(torch.ops.fusedblock, name).default, args)


@pytest.mark.parametrize("target", PATHS)
@pytest.mark.parametrize(("dtype", "batch", "seq"), [(BF16, 1, 37), (BF16, 2, 75), (torch.float16, 1, 37), (BF16, 2, 3)])
@pytest.mark.parametrize("name", COMPOSITES)
def test_costs_of_a_composite_are_those_of_its_launches(name, dtype, batch, seq, target):
    args = composite_arguments(name, dtype, batch, seq)
    with override(FEW_SMS[target]):
        costs = COSTS[name](*args)
        steps = blocks.plan(LLAMA, batch=batch, seq=seq, context=seq, dtype=dtype, training=False, target=FEW_SMS[target])
    with count_traffic(FEW_SMS[target]) as traffic:
        getattr(torch.ops.fusedblock, name).default(*args)
    assert [(c.read_bytes, c.written_bytes) for c in costs] == [(t.read_bytes, t.written_bytes) for t in traffic.launches]
    planned = [step.op for step in steps.launches]
    assert len(planned) <= 7
    if steps.decode:
        assert planned[2] == "decode_attention"
        if steps.launches[2].kernels == 2:
            planned.insert(3, "decode_attention_combine")
    assert [c.name for c in costs] == {"block": planned, "block_front": planned[:2], "block_back": planned[2:]}[name]


def test_costs_of_training_are_those_of_its_launches():
    """The differentiable composition launches what the plan for training says."""
    w, (x, cos, sin) = make_weights(LLAMA, BF16), inputs(LLAMA, BF16, 1, 37)
    with count_traffic(FEW_SMS["sm_90"]) as traffic:
        blocks.forward(LLAMA, w, x.requires_grad_(), cos, sin)
    steps = blocks.plan(LLAMA, batch=1, seq=37, context=37, dtype=BF16, training=True, target=FEW_SMS["sm_90"])
    assert len(traffic.launches) == len(steps.launches) == 7


def compiled_runs(backend: str) -> None:
    w, given = make_weights(LLAMA, torch.float32), inputs(LLAMA, torch.float32, 2, 5)
    for options in (
        {},
        {"mask": masks(2, 5, 5)["padding"]},
        {"update": lambda k, v: (torch.cat((k, k), 2), torch.cat((v, v), 2))},
    ):
        for gradients in (False, True):
            torch._dynamo.reset()
            compiled = torch.compile(blocks.forward, fullgraph=True, backend=backend)
            got = run(compiled, LLAMA, w, given, gradients, **options)
            want = run(blocks.forward, LLAMA, w, given, gradients, **options)
            assert got.keys() == want.keys()
            for name in want:
                torch.testing.assert_close(got[name], want[name])


@pytest.mark.slow
def test_compile_for_any_length():
    """With dynamic shapes one graph serves two lengths."""
    w = make_weights(LLAMA, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(blocks.forward, fullgraph=True, backend="aot_eager", dynamic=True)
    for gradients in (False, True):
        for seq in (21, 30):
            given = inputs(LLAMA, torch.float32, 2, seq)
            got, want = (run(layer, LLAMA, w, given, gradients) for layer in (compiled, blocks.forward))
            for name in want:
                torch.testing.assert_close(got[name], want[name])


def test_compile_without_graph_breaks():
    compiled_runs("aot_eager")


@pytest.mark.slow
def test_compile_with_inductor():
    compiled_runs("inductor")

"""Recorded launches as the driver gets them: the parameter blocks, without a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_cases import HOPPER, Case

from fusedblock.interpret import compile_only, interpret
from fusedblock.kernels import _driver, _graphs, _launch, _replay, attention
from fusedblock.kernels._replay import _Address, _Box, _Step

BF16 = torch.bfloat16
X = _Address(0, 0, BF16, (4, 64), (64, 1))
W = _Address(1, 128, BF16, (64, 64), (64, 1))  # half of a fused weight: 128 bytes into the parameter
META = {"swizzle": 3, "elem_size": 2, "elem_type": 9, "block_size": [16, 64], "fp4_padded": False}


def _compiled(signature: dict[str, str], function: int = 0x5000, maps: tuple[Any, ...] = (), **more: Any) -> Any:
    meta = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, "global_scratch_size": 0,
            "profile_scratch_size": 0, "tensordesc_meta": maps, **more}  # fmt: skip
    return SimpleNamespace(metadata=SimpleNamespace(**meta), packed_metadata=(4, meta["num_ctas"], 1024), function=function,
                           src=SimpleNamespace(signature=signature))  # fmt: skip


def _step(args: tuple[Any, ...], signature: dict[str, str], grid: tuple[int, ...] = (3, 2), **more: Any) -> _Step:
    return _Step(None, grid, args, {}, _compiled(signature, **more), (64,))


SIGNATURE = {"x": "*bf16", "w": "*bf16", "absent": "constexpr", "n": "i32", "one": "constexpr", "long": "i64", "eps": "fp32",
             "flag": "u1", "BLOCK": "constexpr"}  # fmt: skip
ARGS = (X, W, None, 4096, 1, 2**40, 1e-5, True)
FORMATS = ("Q", "Q", "i", "q", "f", "B", "Q", "Q")  # of the parameters, the two scratch pointers last


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each call of the stand-in for cuLaunchKernelEx finds behind its pointers: (config, function, parameters)."""
    seen: list[Any] = []

    def enqueue(config: int, function: int, params: int, extra: Any) -> int:
        assert extra is None
        formats = seen_formats.get(function, FORMATS)
        at = (ctypes.c_void_p * len(formats)).from_address(params)
        values = [struct.unpack(f, ctypes.string_at(p, struct.calcsize(f)))[0] for f, p in zip(formats, at)]
        seen.append((struct.unpack("7I4xQQI", ctypes.string_at(config, 52)), function, values))
        return refused.get(len(seen), 0)

    monkeypatch.setattr(_driver, "_enqueue", lambda: enqueue)
    monkeypatch.setattr(_graphs, "watched", lambda: False)
    seen_formats.clear()
    refused.clear()
    return seen


seen_formats: dict[int, tuple[str, ...]] = {}
refused: dict[int, int] = {}  # launch -> the driver's error


def _made(*steps: _Step) -> _driver.Block:
    block = _driver.prepare(steps)
    assert block is not None
    return block


def test_parameters_are_in_place(launched: list[Any]) -> None:
    assert _made(_step(ARGS, SIGNATURE)).run([0x10000, 0x20000], stream=7) == 1
    ((config, function, values),) = launched
    assert config == (3, 2, 1, 128, 1, 1, 1024, 7, 0, 0)
    assert function == 0x5000
    assert values == [0x10000, 0x20080, 4096, 2**40, pytest.approx(1e-5), 1, 0, 0]


def test_addresses_and_stream_are_those_of_each_run(launched: list[Any]) -> None:
    block = _made(_step(ARGS, SIGNATURE), _step((W, X, *ARGS[2:]), SIGNATURE, grid=(5,), function=0x6000))
    for base, stream in (([0x10000, 0x20000], 7), ([0x30000, 0x40000], 7), ([0x10000, 0x50000], 9)):
        launched.clear()
        assert block.run(base, stream) == 2
        assert [(f, values[:2]) for _, f, values in launched] == [
            (0x5000, [base[0], base[1] + 128]), (0x6000, [base[1] + 128, base[0]])
        ]  # fmt: skip
        assert [config[:3] + config[7:8] for config, _, _ in launched] == [(3, 2, 1, stream), (5, 1, 1, stream)]


def test_an_absent_result_is_no_address(launched: list[Any]) -> None:
    _made(_step((torch.empty(0), *ARGS[1:]), SIGNATURE)).run([0, 0x20000], 7)
    assert launched[0][2][:2] == [0, 0x20080]


def test_maps_are_encoded_once_for_an_address(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Any] = []
    kept = []

    def encode(address: int, meta: Any, shape: list[int], strides: list[int], padding: str) -> tuple[Any, int]:
        encoded.append((address, shape, strides))
        kept.append(ctypes.c_uint64(address))
        return kept[-1], ctypes.addressof(kept[-1])

    monkeypatch.setattr(_driver, "_tensor_map", encode)
    seen_formats[0x5000] = ("Q", "i", "i", "q", "q", "Q", "i", "i", "i", "q", "q", "q", "Q", "Q")
    plain = _Box(W, [64, 64], [64, 1], [16, 64], "zero", None)
    low, high = _Address(0, 0, BF16, (64, 64), (64, 1)), _Address(2, 256, BF16, (64, 64), (64, 1))
    stacked = _Box(low, [2, 64, 64], [999, 64, 1], [2, 16, 64], "zero", high)
    signature = {"w": "tensordesc<bf16[16, 64]>", "both": "tensordesc<bf16[2, 16, 64]>", "BLOCK": "constexpr"}
    block = _made(_step((plain, stacked), signature, maps=(META, {**META, "block_size": [2, 16, 64]})))
    runs = ([0x10000, 0x20000, 0x40000], [0x10000, 0x20000, 0x60000], [0x10000, 0x30000, 0x40000], [0x10000, 0x20000, 0x40000])
    for base in runs:
        assert block.run(base, 7) == 1
        distance = (base[2] + 256 - base[0]) // 2
        values = launched[-1][2]
        # The map's first word stands for it; shapes and strides follow.
        assert values == [base[1] + 128, 64, 64, 64, 1, base[0], 2, 64, 64, distance, 64, 1, 0, 0]
    assert [(address, strides) for address, _, strides in encoded] == [
        (0x20080, [64, 1]), (0x10000, [(0x40100 - 0x10000) // 2, 64, 1]),
        (0x10000, [(0x60100 - 0x10000) // 2, 64, 1]), (0x30080, [64, 1]),
    ]  # fmt: skip


def test_maps_that_are_kept_are_bounded(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    value = ctypes.c_uint64(0)
    monkeypatch.setattr(_driver, "_tensor_map", lambda *a: (value, ctypes.addressof(value)))
    monkeypatch.setattr(_driver, "_MAPS", 3)
    box = _Box(X, [4, 64], [64, 1], [16, 64], "zero", None)
    block = _made(_step((box, W), {"x": "tensordesc<bf16[16, 64]>", "w": "*bf16", "BLOCK": "constexpr"}, maps=(META,)))
    seen_formats[0x5000] = ("Q",)
    for i in range(20):
        block.run([0x10000 * (i + 1), 0x20000], 7)
    assert len(launched) == 20
    assert max(len(m.known) for m in block._maps) <= 3


def test_what_the_driver_refuses_is_left_to_the_caller(launched: list[Any]) -> None:
    block = _made(*[_step(ARGS, SIGNATURE, function=0x5000 + i) for i in range(3)])
    refused[2] = 201
    assert block.run([0x10000, 0x20000], 7) == 1
    assert [f for _, f, _ in launched] == [0x5000, 0x5001]
    refused.clear()
    assert block.run([0x10000, 0x20000], 7) == 3


def test_a_block_in_use_is_left_alone(launched: list[Any]) -> None:
    block = _made(_step(ARGS, SIGNATURE))
    with block._lock:
        assert block.run([0x10000, 0x20000], 7) == 0
    assert not launched
    assert block.run([0x10000, 0x20000], 7) == 1


@pytest.mark.parametrize(
    "more",
    [{"num_ctas": 2}, {"launch_cooperative_grid": True}, {"launch_pdl": True}, {"global_scratch_size": 8},
     {"profile_scratch_size": 8}],
)  # fmt: skip
def test_what_only_tritons_launcher_does(more: dict[str, Any]) -> None:
    assert _driver.prepare([_step(ARGS, SIGNATURE)]) is not None
    assert _driver.prepare([_step(ARGS, SIGNATURE), _step(ARGS, SIGNATURE, **more)]) is None


@pytest.mark.parametrize(
    "signature",
    [{**SIGNATURE, "n": "fp16"}, {**SIGNATURE, "n": "*i32"}, {"x": "*bf16"}, {**SIGNATURE, "x": "tensordesc<bf16[16, 64]>"}],
)
def test_arguments_that_are_not_understood(signature: dict[str, str]) -> None:
    assert _driver.prepare([_step(ARGS, signature)]) is None


@pytest.mark.parametrize("packed", [False, True])
def test_a_recorded_gluon_kernel(packed: bool, launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hopper forward, recorded in the interpreter, with what the compiler says of it: maps, strides, the kept table."""
    case = Case(seq=150, context=170, heads=2, kv_heads=1, head_dim=64, batch=1, dtype=BF16, causal=True, forward=True,
                layout="packed" if packed else "batched", lengths=((100, 90), (30, 60)))  # fmt: skip
    args = case.inputs().op_args()
    tensors = [t for t in args if isinstance(t, torch.Tensor)]
    with interpret(HOPPER):
        _, program = _replay.record(lambda: attention.launch(*args), tensors)
    with compile_only(HOPPER) as kernels:
        attention.launch(*args)
    assert program is not None and len(program.steps) == len(kernels)
    steps = []
    for step, kernel in zip(program.steps, kernels):
        plain = SimpleNamespace(metadata=kernel.metadata, packed_metadata=kernel.packed_metadata, src=kernel.src, function=0x5000)
        tail = tuple(step.constexprs[name] for name in step.kernel.arg_names[len(step.args) :])
        steps.append(dataclasses.replace(step, compiled=plain, tail=tail))
    seen: list[Any] = []

    def encode(address: int, meta: Any, shape: list[int], strides: list[int], padding: str) -> tuple[Any, int]:
        seen.append((address, meta["swizzle"], meta["elem_size"], meta["block_size"], shape, strides, padding))
        word = ctypes.c_uint64(address)
        return word, ctypes.addressof(word)

    monkeypatch.setattr(_driver, "_tensor_map", encode)
    block = _driver.prepare(steps)
    assert block is not None
    rank, q, k = 4 + packed, tensors[0], tensors[1]
    each = ["Q", *"i" * rank, *"q" * rank]
    seen_formats[0x5000] = (*each * 4, "Q", "Q", "f", *"iiiiiiii", "Q", "Q")
    steps_before = len(steps) - 1
    for n in range(steps_before):  # not looked at here
        block._calls[n] = (block._calls[n][0], 0x6000, block._calls[n][2])
    seen_formats[0x6000] = ("Q",)
    base = [0x100000 * (n + 1) for n in range(len(tensors) + 3)]
    assert block.run(base, 7) == len(steps)
    config, _, values = launched[-1]
    assert config[3] == 32 * 12 and config[6] == kernels[-1].metadata.shared  # with the warps of every partition
    row = 2 * 64
    assert [s[:4] for s in seen[:2]] == [(base[0], 3, 2, [1, 1, 64, 1, 64][-rank:]), (base[1], 3, 2, [1, 1, 128, 1, 64][-rank:])]
    if packed:
        assert seen[0][4:6] == ([0x7FFF0000, 0x7FFF0000, 2**30, 2, 64], [2**34 - row, row, row, 64, 1])
    else:
        assert seen[0][4:6] == (list(q.shape), _launch.tma_strides(q)) and seen[1][4] == list(k.shape)
    at = [values[n * (1 + 2 * rank) : (n + 1) * (1 + 2 * rank)] for n in range(4)]
    assert all(found == [s[0], *s[4], *s[5]] for found, s in zip(at, seen))
    lse, table, scale = values[4 * (1 + 2 * rank) :][:3]
    workspace = len(tensors) + 2
    assert lse == base[len(tensors) + 1] and scale == pytest.approx(64**-0.5 * 1.4426950408889634)
    (kept,) = [t.data_ptr() for t in program._constants] or [None]
    assert table == kept if not packed else base[workspace] <= table < base[workspace] + program.workspace_bytes

"""The launch path: what makes a compiled kernel fit a call, when descriptors may be used, and modes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedblock.kernels import _launch
from fusedblock.kernels._launch import contiguous_last, descriptor, launch, mode, on_device, runs_kernels, tma_ready
from fusedblock.kernels._target import TARGETS, override, target_of

BF16 = torch.bfloat16


# ---- descriptors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("t", "ready"),
    [
        (torch.empty(4, 64, dtype=BF16), True),
        (torch.empty(4, 72, dtype=BF16)[:, :64], True),
        (torch.empty(4, 72, dtype=BF16)[:, 8:], True),
        (torch.empty(4, 72, dtype=BF16)[:, 4:68], False),  # base 8 bytes off
        (torch.empty(4, 68, dtype=BF16)[:, :64], False),  # rows of 136 bytes
        (torch.empty(4, 68, dtype=torch.float32)[:, :64], True),  # 272 bytes
        (torch.empty(1, 68, dtype=BF16)[:, :64], True),  # one row has no stride
        (torch.empty(64, 4, dtype=BF16).t(), False),  # last axis not dense
        (torch.empty(1, 64, dtype=BF16).expand(4, 64), False),  # stride 0
        (torch.empty(0, 64, dtype=BF16), False),
        (torch.empty(2, 3, 64, dtype=BF16), True),
        (torch.empty(2, 3, 64, dtype=BF16).transpose(0, 1), True),
    ],
)
def test_tma_ready(t, ready):
    assert tma_ready(t) is ready
    assert tma_ready(torch.empty(4, 64, dtype=BF16), t) is ready
    if ready:
        TensorDescriptor(t, list(t.shape), list(descriptor(t, [1] * (t.dim() - 1) + [16]).strides), [1] * (t.dim() - 1) + [16])


def test_descriptor_of_one_row_has_a_legal_stride():
    row = torch.empty(1, 68, dtype=BF16)[:, :64]
    made = descriptor(row, [16, 64])
    assert (made.shape, made.block_shape) == ([1, 64], [16, 64])
    assert made.strides[0] * 2 % 16 == 0
    assert made.strides[0] >= 64
    tall = descriptor(torch.empty(5, 72, dtype=BF16)[:, :64], [16, 64])
    assert tall.strides == [72, 1]


def test_contiguous_last_copies_only_what_it_must():
    x = torch.randn(4, 6)
    for t in (x, x[:, 1:4], x[::2], x[:1].expand(4, 6), torch.randn(4, 1)):
        assert contiguous_last(t) is t
    for t in (x.t(), x[:, ::2], torch.randn(4, 6)[:, :1].expand(4, 6)):
        made = contiguous_last(t)
        assert made.stride(-1) == 1
        assert made.data_ptr() != t.data_ptr()
        assert torch.equal(made, t)


# ---- the cache of compiled kernels, without a GPU ----------------------------------------------------------------------------


@dataclass
class FakeKernel:
    """Counts what the launcher asks of triton: kernel[grid](...) compiles; run_compiled() only runs."""

    arg_names: tuple[str, ...] = ("x", "n", "BLOCK")
    compiled: list[Any] = field(default_factory=list)

    def __getitem__(self, grid: Any) -> Any:
        def compile_and_run(*args: Any, **constexprs: Any) -> str:
            self.compiled.append((grid, args, constexprs))
            return f"variant {len(self.compiled)}"

        return compile_and_run


@pytest.fixture
def direct(monkeypatch):
    """The direct path as on a GPU; yields the list of (variant, grid, args) that ran without triton's launcher."""
    ran: list[Any] = []
    monkeypatch.setattr(_launch, "_DIRECT", True)
    monkeypatch.setattr(_launch, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(_launch, "run_compiled", lambda compiled, grid, args, stream: ran.append((compiled, grid, args, stream)))
    return ran


def test_the_same_facts_run_the_same_variant(direct):
    kernel, x, y = FakeKernel(), torch.empty(64), torch.empty(80)
    for t, n, grid in ((x, 32, (3,)), (y, 48, (5, 2)), (x, 32, (3,))):
        launch(kernel, grid, (t, n), {"BLOCK": 16, "num_warps": 4})
    assert len(kernel.compiled) == 1
    assert _launch.launched_variants() == 1
    # Constexprs of the signature follow the arguments, compile options do not.
    assert [(variant, grid, len(args), args[1:], stream) for variant, grid, args, stream in direct] == [
        ("variant 1", (5, 2), 3, (48, 16), 7),
        ("variant 1", (3,), 3, (32, 16), 7),
    ]
    assert direct[0][2][0] is y


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ((torch.empty(64), 32), (torch.empty(64)[1:], 32), False),  # alignment of the address
        ((torch.empty(64), 32), (torch.empty(64)[4:], 32), True),
        ((torch.empty(64), 32), (torch.empty(64, dtype=BF16), 32), False),
        ((torch.empty(64), 32), (torch.empty(64), 33), False),  # divisible by 16
        ((torch.empty(64), 33), (torch.empty(64), 35), True),
        ((torch.empty(64), 33), (torch.empty(64), 1), False),  # 1 is a constant
        ((torch.empty(64), 0), (torch.empty(64), 16), True),
        ((torch.empty(64), 33), (torch.empty(64), 2**31 + 1), False),  # int64
        ((torch.empty(64), 2**31 - 1), (torch.empty(64), 33), True),
        ((torch.empty(64), 0.5), (torch.empty(64), 0.25), True),
        ((torch.empty(64), 0.5), (torch.empty(64), 1), False),
        ((torch.empty(64), None), (torch.empty(64), 33), False),
        ((torch.empty(64), True), (torch.empty(64), False), False),
        ((None, 32), (torch.empty(64), 32), False),
        ((TensorDescriptor(torch.empty(8, 64), [8, 64], [64, 1], [8, 16]), 32),
         (TensorDescriptor(torch.empty(4, 32), [4, 32], [32, 1], [8, 16]), 32), True),
        ((TensorDescriptor(torch.empty(8, 64), [8, 64], [64, 1], [8, 16]), 32),
         (TensorDescriptor(torch.empty(8, 64), [8, 64], [64, 1], [8, 32]), 32), False),
        ((TensorDescriptor(torch.empty(8, 64), [8, 64], [64, 1], [8, 16]), 32),
         (TensorDescriptor(torch.empty(8, 64, dtype=BF16), [8, 64], [64, 1], [8, 16]), 32), False),
        ((TensorDescriptor(torch.empty(8, 64), [8, 64], [64, 1], [8, 16]), 32), (torch.empty(8, 64), 32), False),
    ],
)  # fmt: skip
def test_what_makes_another_variant(direct, first, second, same):
    kernel = FakeKernel()
    launch(kernel, (1,), first, {"BLOCK": 16})
    launch(kernel, (1,), second, {"BLOCK": 16})
    assert len(kernel.compiled) == (1 if same else 2)
    launch(kernel, (1,), second, {"BLOCK": 32})
    launch(FakeKernel(), (1,), second, {"BLOCK": 32})
    assert _launch.launched_variants() == (1 if same else 2) + 2


def test_devices_have_variants_of_their_own(direct, monkeypatch):
    kernel = FakeKernel()
    launch(kernel, (1,), (torch.empty(64), 32), {"BLOCK": 16})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch(kernel, (1,), (torch.empty(64), 32), {"BLOCK": 16})
    assert len(kernel.compiled) == 2


def test_an_empty_grid_launches_nothing(direct):
    kernel = FakeKernel()
    for grid in ((0,), (3, 0), (0, 2, 1)):
        launch(kernel, grid, (torch.empty(64), 32), {"BLOCK": 16})
    assert not kernel.compiled
    assert not direct


def test_other_versions_take_tritons_own_launcher(direct, monkeypatch):
    kernel = FakeKernel()
    monkeypatch.setattr(_launch, "_DIRECT", False)
    for _ in range(2):
        launch(kernel, (1,), (torch.empty(64), 32), {"BLOCK": 16})
    assert len(kernel.compiled) == 2
    assert _launch.launched_variants() == 0


# ---- modes, targets, devices -------------------------------------------------------------------------------------------------


def test_kernels_run_on_a_cpu_only_inside_a_mode():
    x = torch.empty(4)
    assert not runs_kernels(x)
    with mode("interpret"):
        assert runs_kernels(x)
        with mode("compile"):
            assert _launch.current_mode() == "compile"
        assert _launch.current_mode() == "interpret"
    assert _launch.current_mode() is None
    with pytest.raises(KeyError), mode("interpret"):
        raise KeyError
    assert not runs_kernels(x)


def test_targets_can_be_overridden_and_come_back():
    cpu = torch.device("cpu")
    assert target_of(cpu) == TARGETS["sm_90"]
    with override(TARGETS["sm_86"]):
        with override(TARGETS["gfx942"]):
            assert target_of(cpu) == TARGETS["gfx942"]
        assert target_of(cpu) == TARGETS["sm_86"]
    assert target_of(cpu) == TARGETS["sm_90"]
    assert [n for n, t in TARGETS.items() if t.tma] == ["sm_90", "sm_100"]
    assert TARGETS["gfx942"].capability == 0


def test_a_cpu_tensor_needs_no_device_switch():
    with on_device(torch.empty(1)) as entered:
        assert entered is None

"""Compositions called past the dispatcher: what a call costs the host, counted, and when it must go through the operator."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import fusedblock
from fusedblock import ops, registry
from fusedblock.kernels import _driver, _graphs, _launch, _replay

HIDDEN, FFN = 64, 128


class Device:
    """A GPU that runs nothing: counts what reaches it. launched: the first pointer-sized parameters of every launch."""

    def __init__(self) -> None:
        self.compiled = self.recorded = self.read = 0
        self.launched: list[list[int]] = []

    def counts(self) -> tuple[int, int, int, int]:
        return self.compiled, self.recorded, self.read, len(self.launched)


def _signature(names: list[str], values: list[Any], runtime: int) -> dict[str, str]:
    def kind(value: Any) -> str:
        if isinstance(value, Tensor):
            return "*bf16"
        if isinstance(value, TensorDescriptor):
            return "tensordesc<bf16[16, 64]>"
        if value is None or (type(value) is int and value == 1):
            return "constexpr"
        return "fp32" if isinstance(value, float) else "i64"

    return {n: kind(v) if i < runtime else "constexpr" for i, (n, v) in enumerate(zip(names, values))}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    address = ctypes.c_uint64()

    def compiled(self: JITFunction, *args: Any, grid: Any, warmup: bool, **constexprs: Any) -> Any:
        made.compiled += 1
        values = [*args, *(constexprs[n] for n in self.arg_names[len(args) :])]
        maps = [{"fp4_padded": False} for a in args if isinstance(a, TensorDescriptor)]
        meta = SimpleNamespace(num_ctas=1, launch_cooperative_grid=False, launch_pdl=False, global_scratch_size=0,
                               profile_scratch_size=0, tensordesc_meta=maps)  # fmt: skip
        return SimpleNamespace(metadata=meta, packed_metadata=(4, 1, 0), function=1, run=lambda *a: None,
                               src=SimpleNamespace(signature=_signature(self.arg_names, values, len(args))))  # fmt: skip

    def enqueue(config: int, function: int, params: int, extra: Any) -> int:
        made.launched.append([ctypes.c_uint64.from_address(p).value for p in (ctypes.c_void_p * 3).from_address(params)])
        return 0

    record, read = _replay.record, _replay.Fixed._read

    def counting_record(*args: Any) -> Any:
        made.recorded += 1
        return record(*args)

    def counting_read(*args: Any) -> Any:
        made.read += 1
        return read(*args)

    monkeypatch.setattr(_launch, "_DIRECT", True)
    monkeypatch.setattr(_launch, "_compiled", {})
    monkeypatch.setattr(_launch, "runs_kernels", lambda x: True)
    monkeypatch.setattr(registry, "runs_kernels", lambda x: True)
    monkeypatch.setattr(_replay, "_programs", {})
    monkeypatch.setattr(_replay, "record", counting_record)
    monkeypatch.setattr(_replay.Fixed, "_read", counting_read)
    monkeypatch.setattr(_driver, "_enqueue", lambda: enqueue)
    monkeypatch.setattr(_graphs, "watched", lambda: True)  # launches one by one, which are counted
    monkeypatch.setattr(_driver, "_tensor_map", lambda *args: (address, ctypes.addressof(address)))
    monkeypatch.setattr(JITFunction, "run", compiled)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    with torch.no_grad():
        yield made


def _compose(call: Any, x: Tensor, up: Tensor, down: Tensor, eps: float) -> Tensor:
    """Two products with halves of a fused weight, a third back; launches: three."""
    first, second = up.split(FFN)
    a, _, _ = call("linear", x, first, None, None, None, 1.0)
    b, _, _ = call("linear", x, second, None, a, None, 1.0)
    out, _, _ = call("linear", b, down, None, x, None, 1.0)
    return out


class Operator:
    """In the place of the registered operator: counts its calls."""

    calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return args[0]


def _composite() -> ops.Composite:
    return ops.Composite("test_straight", Operator(), _compose)


def _fixed(dtype: torch.dtype = torch.bfloat16) -> tuple[ops.Fixed, nn.Parameter, nn.Parameter]:
    up, down = nn.Parameter(torch.randn(2 * FFN, HIDDEN, dtype=dtype)), nn.Parameter(torch.randn(HIDDEN, FFN, dtype=dtype))
    return ops.Fixed((up, down, 1e-5), lambda args: None), up, down


def _x(rows: int = 5) -> Tensor:
    return torch.randn(rows, HIDDEN, dtype=torch.bfloat16)


def test_a_known_layout_is_three_launches_and_nothing_else(device: Device) -> None:
    composite, (fixed, up, down) = _composite(), _fixed()
    composite.straight((_x(),), fixed)
    assert device.counts() == (3, 1, 1, 0) or device.counts() == (2, 1, 1, 0)  # compiled by the first call, as recorded
    before = device.counts()
    seen = []
    for _ in range(5):
        x = _x()
        device.launched.clear()
        out = composite.straight((x,), fixed)
        assert out.shape == x.shape
        seen.append(out.data_ptr())
        assert device.counts() == (*before[:3], 3)
        addresses = {a for launch in device.launched for a in launch}
        assert {x.data_ptr(), up.data_ptr(), up.data_ptr() + FFN * HIDDEN * 2, down.data_ptr()} <= addresses
        del x
    assert composite.op.calls == 0


def test_results_of_two_calls_are_apart(device: Device) -> None:
    composite, (fixed, *_) = _composite(), _fixed()
    x = _x()
    outs = [composite.straight((x,), fixed) for _ in range(4)]
    assert len({t.data_ptr() for t in outs}) == 4
    assert all(type(t) is Tensor and t.is_contiguous() and not t.requires_grad for t in outs)


def test_another_layout_is_recorded_once(device: Device) -> None:
    composite, (fixed, *_) = _composite(), _fixed()
    for rows in (5, 6, 5, 6, 6):
        composite.straight((_x(rows),), fixed)
    assert device.recorded == 2
    composite.straight((torch.randn(5, 2 * HIDDEN).bfloat16()[:, :HIDDEN],), fixed)  # strides
    assert device.recorded == 3
    composite.straight((torch.randn(5 * HIDDEN + 1).bfloat16()[1:].view(5, HIDDEN),), fixed)  # alignment
    assert device.recorded == 4
    assert device.read == 1


def test_layers_of_one_layout_share_a_program(device: Device) -> None:
    composite = _composite()
    (first, *_), (second, up, _) = _fixed(), _fixed()
    composite.straight((_x(),), first)
    composite.straight((_x(),), second)
    assert device.recorded == 1
    assert up.data_ptr() in {a for launch in device.launched for a in launch}


@pytest.mark.parametrize(
    ("change", "records"),
    [
        (lambda p: p.data.clone(), 1),  # module.to(), FSDP: the object stays, its memory does not
        (lambda p: p.data.half(), 2),
        (lambda p: p.data.view(HIDDEN, 2 * FFN).t(), 2),  # the same address, shape and dtype, other strides
        (lambda p: torch.randn(2 * FFN * HIDDEN + 1).bfloat16()[1:].view(2 * FFN, HIDDEN), 2),  # not aligned
    ],
)
def test_memory_put_under_a_parameter_is_seen(device: Device, change: Callable[[Tensor], Tensor], records: int) -> None:
    composite, (fixed, up, down) = _composite(), _fixed()
    for _ in range(2):
        composite.straight((_x(),), fixed)
    before = up.data  # kept, or something else may come to lie where it was
    old = before.data_ptr()
    up.data = kept = change(up)
    if up.dtype is not torch.bfloat16:
        down.data = down.data.half()
    x = _x().to(up.dtype)
    composite.straight((x,), fixed)
    device.launched.clear()
    composite.straight((x,), fixed)
    assert (device.recorded, device.read) == (records, 2)
    addresses = {a for launch in device.launched for a in launch}
    assert kept.data_ptr() in addresses or kept.stride(1) != 1  # read by columns it may have been copied
    assert old == kept.data_ptr() or old not in addresses


def test_frozen_and_trained_parameters_share_a_program(device: Device) -> None:
    composite, (fixed, up, _) = _composite(), _fixed()
    for wanted in (True, False, True):
        up.requires_grad_(wanted)
        composite.straight((_x(),), fixed)
    assert device.recorded == 1


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


WATCHERS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[Tensor], Tensor]]] = {
    "a dispatch mode": (Dispatch, lambda x: x),
    "a function mode": (Function, lambda x: x),
    "a profiler": (lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), lambda x: x),
    "forward-mode derivatives": (forward_ad.dual_level, lambda x: x),
    "gradients wanted": (torch.enable_grad, lambda x: x.requires_grad_()),
    "a subclass": (nullcontext, lambda x: x.as_subclass(Subclass)),
    "debug checks": (lambda: fusedblock.options(debug=True), lambda x: x),
}


@pytest.mark.parametrize("name", WATCHERS)
def test_who_looks_on_sees_the_operator(device: Device, name: str) -> None:
    composite, (fixed, *_) = _composite(), _fixed()
    composite.straight((_x(),), fixed)
    (context, change), before = WATCHERS[name], device.counts()
    with context():
        composite.straight((change(_x()),), fixed)
    assert composite.op.calls == 1
    assert device.counts() == before
    composite.straight((_x(),), fixed)
    assert composite.op.calls == 1


def test_a_transform_and_a_trace_see_the_operator(device: Device) -> None:
    composite, (fixed, *_) = _composite(), _fixed()
    torch.func.vmap(lambda x: composite.straight((x,), fixed))(torch.stack([_x(), _x()]))
    assert composite.op.calls == 1
    torch.jit.trace(lambda x: composite.straight((x,), fixed) + 0, (_x(),), check_trace=False)
    assert composite.op.calls == 2
    assert not device.launched


def test_off_the_gpu_it_is_the_operator() -> None:
    composite, (fixed, *_) = _composite(), _fixed()
    with torch.no_grad():
        composite.straight((_x(),), fixed)
    assert composite.op.calls == 1


def test_inference_mode_gives_inference_tensors(device: Device) -> None:
    composite, (fixed, *_) = _composite(), _fixed()
    with torch.inference_mode():
        outs = [composite.straight((_x(),), fixed) for _ in range(3)]
    assert all(t.is_inference() for t in outs)
    assert device.recorded == 1


def test_hooks_of_a_launch_profiler_are_called(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    composite, (fixed, *_) = _composite(), _fixed()
    composite.straight((_x(),), fixed)
    monkeypatch.setattr(_launch, "hooked", lambda: True)
    monkeypatch.setattr(_launch, "run_compiled", lambda *args: ran.append(args))
    composite.straight((_x(),), fixed)
    assert len(ran) == 3
    assert not device.launched


def test_two_inputs_may_be_one(device: Device) -> None:
    """x and its rows, as a layer hands them on; apart they are another layout."""

    def compose(call: Any, x: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        return call("linear", rows, weight, None, x.view(rows.shape), None, 1.0)[0]

    weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN, dtype=torch.bfloat16))
    composite, fixed = ops.Composite("test_two_inputs", Operator(), compose), ops.Fixed((weight,), lambda args: None)
    for apart in (False, True, False, True):
        x = torch.randn(1, 5, HIDDEN, dtype=torch.bfloat16)
        rows = _x() if apart else x.view(5, HIDDEN)
        device.launched.clear()
        composite.straight((x, rows), fixed)
        for launch in device.launched:
            assert launch[0] == rows.data_ptr()
            assert launch[2] == x.data_ptr()
    assert device.recorded == 2
    assert device.launched

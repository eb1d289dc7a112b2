"""The self-test before the first use of the Hopper kernels."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from attention_cases import HOPPER
from test_attention_skeletons import H200, SHAPE
from test_moe_hopper import Case

import fusedblock
from fusedblock.interpret import interpret
from fusedblock.kernels import (
    _hopper_check,
    _moe,
    _moe_hopper,
    _moe_products,
    _replay,
    _target,
    attention_hopper,
    attention_hopper_backward,
)
from fusedblock.kernels._attention_skeleton import skeleton

CPU = torch.device("cpu")


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hopper_check, "_passed", set())
    monkeypatch.setattr(_target, "failures", {})


@pytest.mark.parametrize("part", _hopper_check.PARTS)
def test_self_test_passes(part: _hopper_check.Part, launched: list[str]):
    with interpret(HOPPER), fusedblock.options(debug=True), _replay._OnlyAllocates() as watch:
        assert _hopper_check._found_wrong(CPU, part) == ""
    # Who records a layer's launches sees nothing of it: else the first layout of a process would never be replayed.
    assert not launched and watch.clean


def raises(*a: object) -> None:
    raise RuntimeError("ptxas died\nin many lines")


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_self_test_finds_wrong_numbers_and_errors(part: _hopper_check.Part, monkeypatch: pytest.MonkeyPatch):
    backward = part == "backward"
    module = attention_hopper_backward if backward else attention_hopper
    launch = module.launch
    monkeypatch.setattr(module, "launch", lambda *a: (r := launch(*a), r[1].mul_(1.02))[0])
    with interpret(HOPPER):
        assert ("grad_k" if backward else "lse") + " is off by 0.02" in _hopper_check._found_wrong(CPU, part)
        monkeypatch.setattr(module, "launch", lambda *a: (r := launch(*a), r[0][0, 0, 0].fill_(torch.nan))[0])
        assert ("grad_q" if backward else "out") + " is off by nan" in _hopper_check._found_wrong(CPU, part)
        monkeypatch.setattr(module, "launch", raises)
        assert _hopper_check._found_wrong(CPU, part) == "RuntimeError: ptxas died"


# Name of a result -> the launch that makes it, where it is among the launch's arguments, and whether a launch makes it.
EXPERTS = {
    "h": ("gate_up_hopper_launch", 2, lambda *a: True), "gate_up": ("gate_up_hopper_launch", 3, lambda *a: True),
    "rows": ("rows_hopper_launch", 3, lambda *a: not a[-1]), "rows by columns": ("rows_hopper_launch", 3, lambda *a: a[-1]),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERTS)
def test_self_test_finds_a_wrong_row_of_experts(name: str, monkeypatch: pytest.MonkeyPatch):
    """The first expert's last row, and one that is nobody's."""
    kernel, at, makes = EXPERTS[name]
    launch = getattr(_moe_hopper, kernel)

    def wrong(*a):
        launch(*a)
        if makes(*a):
            a[at][row] *= factor

    monkeypatch.setattr(_moe_hopper, kernel, wrong)
    with interpret(HOPPER):
        row, factor = _hopper_check.ROWS[0] - 1, 1.02
        assert f"{name} is off by 0.02" in _hopper_check._found_wrong(CPU, "experts")
        row, factor = sum(_hopper_check.ROWS), torch.nan
        assert _hopper_check._found_wrong(CPU, "experts") == f"{name} is off by nan, relatively"


@pytest.mark.parametrize("kernel", ["gate_up_hopper_launch", "rows_hopper_launch"])
def test_self_test_finds_errors_of_experts(kernel: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_moe_hopper, kernel, raises)
    with interpret(HOPPER):
        assert _hopper_check._found_wrong(CPU, "experts") == "RuntimeError: ptxas died"


@pytest.mark.parametrize("passed", [True, False])
def test_products_of_experts_wait_for_the_self_test(passed: bool, monkeypatch: pytest.MonkeyPatch, launched: list[str]):
    asked: list[object] = []
    monkeypatch.setattr(_moe_products, "ready", lambda *a: asked.append(a) or passed)
    case = Case((130, 40))
    args = {**case.make(), "transposed": False, "interleaved": False}
    sizes = {**case.sizes(args), "tile_rows": 128, "rows": 170, "experts": 2}
    w, h, y = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((2, 136, 72), (170, 72), (170, 136)))

    def products(target: _target.Target) -> set[str]:
        launched.clear()
        with interpret(target):
            _moe_products.gate_up_launch(args, sizes, h, None)
            for kind, by_columns in (("down", False), ("grad_rows", True)):
                _moe_products.rows_launch(kind, h, w.mT.contiguous() if by_columns else w, None, y, args, sizes, by_columns)
        return set(launched)

    assert products(HOPPER) == {"_moe_hopper" if passed else "_moe_products"}
    assert asked == [(CPU, "experts")] * 3
    # Where they are not to run, nothing is tested.
    assert products(replace(HOPPER, broken="a test")) == products(_target.TARGETS["sm_80"]) == {"_moe_products"}
    assert len(asked) == 3


@pytest.mark.parametrize("part", _hopper_check.PARTS)
def test_a_failure_is_for_the_life_of_the_process(part: _hopper_check.Part, untested: None, monkeypatch: pytest.MonkeyPatch):
    """And all parts are off then."""
    gpu, calls = torch.device("cuda", 1), []
    monkeypatch.setattr(_hopper_check, "_found_wrong", lambda *a: calls.append(a) or "out is off by 3")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: graph[0])
    monkeypatch.setattr(_target, "_of_cuda", lambda index: H200)
    graph = [True]
    assert not _hopper_check.ready(gpu, part) and not calls  # nothing can be tested
    assert _hopper_check.state(gpu) == "not tested yet"
    graph[0] = False
    with pytest.warns(RuntimeWarning, match=f"cuda:1: the self-test of the Hopper {part} failed: out is off by 3; the portable"):
        assert not _hopper_check.ready(gpu, part)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not any(_hopper_check.ready(gpu, other) for other in _hopper_check.PARTS)
    assert calls == [(gpu, part)]
    assert "failed: out is off by 3" in _hopper_check.state(gpu)
    broken = _target.target_of(gpu)
    assert "out is off by 3" in skeleton(**{**SHAPE, "target": broken}).why
    products = _moe.configure("down", 128, 2, broken), broken, {"rows": 1024, "experts": 8}, 64, 64, 256
    x = torch.empty(4, 64, dtype=torch.bfloat16)
    assert not _moe_hopper.fits(*products, x)
    other = _target.target_of(torch.device("cuda", 0))
    assert skeleton(**{**SHAPE, "target": other}).hopper and _moe_hopper.fits(products[0], other, *products[2:], x)


def test_success_is_remembered(untested: None, monkeypatch: pytest.MonkeyPatch):
    gpu, calls = torch.device("cuda", 0), []
    monkeypatch.setattr(_hopper_check, "_found_wrong", lambda *a: calls.append(a) or "")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert all(_hopper_check.ready(gpu, "forward") for _ in range(2)) and len(calls) == 1
    assert _hopper_check.state(gpu) == "self-test passed: forward"
    assert _hopper_check.ready(gpu, "backward") and len(calls) == 2
    assert _hopper_check.ready(gpu, "experts") and len(calls) == 3
    assert _hopper_check.state(gpu) == "self-test passed: forward, backward, experts"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert all(_hopper_check.ready(gpu, part) for part in _hopper_check.PARTS) and len(calls) == 3

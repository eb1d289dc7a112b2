"""The self-test before the first use of the Hopper attention kernels."""

from __future__ import annotations

import warnings

import pytest
import torch
from attention_cases import HOPPER
from test_attention_skeletons import H200, SHAPE

import fusedblock
from fusedblock.interpret import interpret
from fusedblock.kernels import _hopper_check, _replay, _target, attention_hopper, attention_hopper_backward
from fusedblock.kernels._attention_skeleton import skeleton

CPU = torch.device("cpu")


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hopper_check, "_passed", set())
    monkeypatch.setattr(_target, "failures", {})


@pytest.mark.parametrize("backward", [False, True])
def test_self_test_passes(backward: bool, launched: list[str]):
    with interpret(HOPPER), fusedblock.options(debug=True), _replay._OnlyAllocates() as watch:
        assert _hopper_check._found_wrong(CPU, backward) == ""
    # Who records a layer's launches sees nothing of it: else the first layout of a process would never be replayed.
    assert not launched and watch.clean


@pytest.mark.parametrize("backward", [False, True])
def test_self_test_finds_wrong_numbers_and_errors(backward: bool, monkeypatch: pytest.MonkeyPatch):
    module = attention_hopper_backward if backward else attention_hopper
    launch = module.launch
    monkeypatch.setattr(module, "launch", lambda *a: (r := launch(*a), r[1].mul_(1.02))[0])
    with interpret(HOPPER):
        assert ("grad_k" if backward else "lse") + " is off by 0.02" in _hopper_check._found_wrong(CPU, backward)
        monkeypatch.setattr(module, "launch", lambda *a: (r := launch(*a), r[0][0, 0, 0].fill_(torch.nan))[0])
        assert ("grad_q" if backward else "out") + " is off by nan" in _hopper_check._found_wrong(CPU, backward)

        def raises(*a: object) -> None:
            raise RuntimeError("ptxas died\nin many lines")

        monkeypatch.setattr(module, "launch", raises)
        assert _hopper_check._found_wrong(CPU, backward) == "RuntimeError: ptxas died"


def test_a_failure_is_for_the_life_of_the_process(untested: None, monkeypatch: pytest.MonkeyPatch):
    gpu, calls = torch.device("cuda", 1), []
    monkeypatch.setattr(_hopper_check, "_found_wrong", lambda *a: calls.append(a) or "out is off by 3")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: graph[0])
    monkeypatch.setattr(_target, "_of_cuda", lambda index: H200)
    graph = [True]
    assert not _hopper_check.ready(gpu) and not calls  # nothing can be tested
    assert _hopper_check.state(gpu) == "not tested yet"
    graph[0] = False
    with pytest.warns(RuntimeWarning, match="cuda:1: the self-test of the Hopper forward failed: out is off by 3; the portable"):
        assert not _hopper_check.ready(gpu)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not _hopper_check.ready(gpu) and not _hopper_check.ready(gpu, backward=True)
    assert len(calls) == 1
    assert "failed: out is off by 3" in _hopper_check.state(gpu)
    broken = _target.target_of(gpu)
    assert "out is off by 3" in skeleton(**{**SHAPE, "target": broken}).why
    assert skeleton(**{**SHAPE, "target": _target.target_of(torch.device("cuda", 0))}).hopper


def test_success_is_remembered(untested: None, monkeypatch: pytest.MonkeyPatch):
    gpu, calls = torch.device("cuda", 0), []
    monkeypatch.setattr(_hopper_check, "_found_wrong", lambda *a: calls.append(a) or "")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert all(_hopper_check.ready(gpu) for _ in range(2)) and len(calls) == 1
    assert _hopper_check.state(gpu) == "self-test passed: forward"
    assert _hopper_check.ready(gpu, backward=True) and len(calls) == 2
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert _hopper_check.ready(gpu)

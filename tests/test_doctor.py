"""`fusedblock doctor`: what it finds, and that each finding can be bad."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_cli import ROOT, run
from torch.utils._python_dispatch import TorchDispatchMode

from fusedblock.cli import doctor
from fusedblock.kernels import _gluon, _hopper_check, _launch, _target
from fusedblock.kernels._target import TARGETS
from fusedblock.ops import OPS


@pytest.mark.slow
def test_a_user_asks_whether_it_works_here():
    result = run("doctor")
    assert result.exit_code == 0, result.output
    for name in doctor._cases():
        compiled, tested = (line for line in result.output.splitlines() if f" {name}, fp32 " in line or f" {name} " in line)
        assert " ok " in compiled and "KiB of shared memory" in compiled
        assert " ok " in tested and "gradients" in tested
    assert "compiled for sm_90, ahead of time" in result.output
    assert "batch_invariant=" in result.output and "all is well" in result.output


def test_doctor_runs_the_kernels_of_every_operator():
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "fusedblock":
                seen.add(func._schema.name.removeprefix("fusedblock::"))
            return func(*args, **(kwargs or {}))

    seen: set[str] = set()
    for function, shapes in doctor._cases().values():
        with Names():
            doctor._results(function, [torch.randn(shape) for shape in shapes.values()], torch.float32, "cpu")
    assert seen == set(OPS)


def test_doctor_finds_kernels_that_do_not_compile_or_fit(monkeypatch):
    good, bad = doctor._cases()["rms_norm"], doctor._cases()["attention"]

    def broken(x):
        raise RuntimeError("no such instruction\nmore")

    monkeypatch.setattr(doctor, "_cases", lambda: {"good": good, "large": bad, "broken": (broken, {"x": (3, 8)})})
    small = dataclasses.replace(TARGETS["sm_90"], smem_bytes=8192)
    checks = {check.name: check for check, _ in doctor.compilation(small)}
    assert [check.passed for check in checks.values()] == [True, False, False]
    assert checks["large"].wanted == "at most 8 KiB"
    assert checks["broken"].found == "RuntimeError: no such instruction"


def test_doctor_finds_a_bad_variable(monkeypatch):
    monkeypatch.setenv("FUSEDBLOCK_DEBUG", "maybe")
    monkeypatch.setattr(doctor, "_cases", dict)
    result = run("doctor")
    assert result.exit_code == 1 and "FUSEDBLOCK_DEBUG='maybe'" in result.output


@pytest.mark.parametrize(
    ("package", "version", "status"),
    [
        ("torch", "2.10.0+cu128", "ok"), ("torch", "2.9.1", "problem"),
        ("triton", "3.6.0", "ok"), ("triton", "3.9.1", "ok"), ("triton", "3.10.0", "problem"), ("triton", "3.5.1", "problem"),
        ("transformers", "5.17.0", "ok"), ("transformers", "6.0.0", "problem"), ("transformers", None, "note"),
    ],
)  # fmt: skip
def test_doctor_knows_the_supported_versions(package, version, status):
    found = {"python": "3.12.1", "torch": "2.11.0", "triton": "3.6.0", "transformers": "5.17.0", package: version}
    findings = {f.subject: f for f in doctor.version_findings(found)}
    assert findings[package].status == status
    assert (findings[package].hint != "") == (status != "ok")


def test_doctor_supports_what_the_package_requires():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 brings it")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["hf"]]
    for package, (low, high) in doctor.SUPPORTED.items():
        expected = f"{package}>={low}" + (f",<{high}" if high else "")
        assert expected in {requirement.split(";")[0].strip() for requirement in requirements}


def test_self_test_finds_wrong_and_broken_kernels(monkeypatch):
    def right(x):
        return x.sin()

    def wrong(x):
        return x.sin() * (1.001 if _launch._mode else 1)

    def broken(x):
        if _launch._mode:
            raise RuntimeError("out of resource: shared memory\nmore")
        return x.sin()

    monkeypatch.setattr(doctor, "_cases", lambda: {f.__name__: (f, {"x": (3, 5)}) for f in (right, wrong, broken)})
    checks = {check.name: check for check, _ in doctor.self_test("cpu")}
    assert [check.passed for check in checks.values()] == [True, False, False]
    assert "output: error 1.0e-03" in checks["wrong, fp32"].found and "gradient of x" in checks["wrong, fp32"].found
    assert checks["broken, fp32"].found == "RuntimeError: out of resource: shared memory"


@pytest.mark.parametrize("wrong", ["", "out is off by 3"])
def test_doctor_tests_the_hopper_kernels(wrong, monkeypatch):
    monkeypatch.setattr(_hopper_check, "_passed", set())
    monkeypatch.setattr(_target, "failures", {})
    monkeypatch.setattr(_hopper_check, "_found_wrong", lambda *a: wrong)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    (finding,) = doctor.hopper_findings(TARGETS["sm_90"])
    if wrong:
        assert finding.status == "problem" and "failed: out is off by 3" in finding.found
    else:
        assert finding.status == "ok"
        assert finding.found == "in use for attention and experts; self-test passed: forward, backward, experts"
    assert doctor.hopper_findings(TARGETS["sm_80"]) == []
    monkeypatch.setattr(_gluon, "REASON", "another triton")
    (finding,) = doctor.hopper_findings(TARGETS["sm_90"])
    assert finding.status == "note" and "another triton" in finding.hint

"""Two gloo processes train a fused model as one process trains transformers' own on the whole batch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import distributed_worker
import families
import pytest
import torch
from llama import prompt, relative_error

PARALLEL = [(name, kind, fuse, False) for name in ("llama", "gpt2") for kind in ("ddp", "fsdp2") for fuse in ("before", "after")]
CHECKPOINTED = [("llama", kind, "after", True) for kind in ("ddp", "fsdp2")]
MIXED = [("llama", "fsdp2-bf16", fuse, False) for fuse in ("", "before", "after")]
LIMIT = 300  # seconds; with six other test processes on two cores it took 66

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("distributed")
    arguments = (str(folder), PARALLEL + CHECKPOINTED + MIXED)
    processes = torch.multiprocessing.spawn(distributed_worker.main, arguments, nprocs=2, join=False)
    end = time.monotonic() + LIMIT
    try:
        while not processes.join(timeout=1):
            assert time.monotonic() < end, f"the processes did not end within {LIMIT} s"
    finally:
        for process in processes.processes:
            process.kill()
    return torch.load(Path(folder) / "results", weights_only=False)


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """What one process gets, unfused, in fp32."""
    found = {}
    for name in ("llama", "gpt2"):
        model = families.build(name).train()
        losses = distributed_worker.train(model, prompt()[0])
        found[name] = {"losses": torch.tensor(losses), "parameters": dict(model.named_parameters())}
    return found


def assert_equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert ((got["losses"] - want["losses"]) / want["losses"]).abs().max() < 1e-6
    assert got["parameters"].keys() == want["parameters"].keys()
    errors = {n: relative_error(got["parameters"][n], parameter) for n, parameter in want["parameters"].items()}
    assert {n: e for n, e in errors.items() if not e < 1e-6} == {}


@pytest.mark.parametrize("case", [case for case in PARALLEL if case[1] == "ddp"], ids=str)
def test_train_with_ddp(case: Any, results: Any, alone: Any) -> None:
    assert_equal(results[case], alone[case[0]])
    assert results[case]["calls"] == (6, {})  # two layers, three steps


@pytest.mark.parametrize("case", [case for case in PARALLEL if case[1] == "fsdp2"], ids=str)
def test_train_with_fsdp2(case: Any, results: Any, alone: Any) -> None:
    assert_equal(results[case], alone[case[0]])
    assert results[case]["calls"] == (6, {})


@pytest.mark.parametrize("case", CHECKPOINTED, ids=str)
def test_train_together_with_gradient_checkpointing(case: Any, results: Any, alone: Any) -> None:
    assert_equal(results[case], alone["llama"])
    assert results[case]["calls"] == (12, {})


@pytest.mark.parametrize("case", MIXED[1:], ids=str)
def test_train_with_fsdp2_in_bf16(case: Any, results: Any, alone: Any) -> None:
    """Parameters and activations in bf16, reduced in fp32: no farther from fp32 than transformers' layers under that policy."""
    assert results[case]["calls"] == (6, {})
    plain, want = results[MIXED[0]], alone["llama"]
    for part in (lambda r: r["losses"], lambda r: torch.cat([p.detach().flatten() for p in r["parameters"].values()])):
        assert relative_error(part(results[case]), part(want)) <= 1.5 * relative_error(part(plain), part(want))

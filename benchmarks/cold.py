"""The first calls of a fused layer in a new process that has compiled nothing yet, and the calls after them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import fusedblock

from .engine import Settings
from .implementations import MODELS, Cache, Step, clone, make_inputs, make_layer
from .rows import ROOT, Row

STEADY = 20  # calls after the second, whose median is the steady time
CALLS = ("first call", "second call", "steady call")


def run(name: str, settings: Settings) -> list[Row]:
    """Rows for a prefill, and for a decode step after it in the same process; wall time of a call and of the GPU's work in it."""
    if settings.left < 0:
        found: list[dict[str, Any]] = [{"case": "new process", "status": "skipped: out of time"}]
    else:
        command = [sys.executable, "-m", "benchmarks.cold", name, *([] if settings.on_gpu else ["--dry"])]
        with tempfile.TemporaryDirectory() as cache:
            env = {**os.environ, "TRITON_CACHE_DIR": cache}
            try:
                done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=150)
                lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["no output"]
                found = json.loads(lines[-1]) if done.returncode == 0 else [
                    {"case": "new process", "status": f"failed: {lines[-1][:200]}"}]  # fmt: skip
            except subprocess.TimeoutExpired as error:
                found = [{"case": "new process", "status": f"failed: {error.timeout:.0f} s were not enough"}]
    stamp = dataclasses.asdict(settings.stamp)
    rows = [_row(name, one["case"], f"fusedblock, {call}", one, one.get(call), stamp) for one in found for call in CALLS]
    settings.rows += rows
    settings.log(f"  {name}, cold: {rows[0].status}")
    return rows


def _row(model: str, case: str, impl: str, one: dict[str, Any], ms: float | None, stamp: dict[str, Any]) -> Row:
    return Row(
        "layer cold", case, impl, ms=ms, tflops=None, gbps=None, peak_mib=None, max_rel_error=None, spread=None, launches=None,
        method=None if ms is None else "wall", status=one["status"], model=model, **stamp,
    )  # fmt: skip


def measure(name: str, device: torch.device, tiny: bool) -> list[dict[str, Any]]:
    """case, status and milliseconds of CALLS, for B1 S512 and then for B1 KV4096 (tiny: shorter)."""
    config = MODELS[name].tiny if tiny else MODELS[name].config
    layer = make_layer(config, device)
    fused = clone(layer, "sdpa")
    report = fusedblock.fuse(fused, strict=True)
    found = []
    for seq, context in ((8, None), (1, 80)) if tiny else ((512, None), (1, 4096)):
        inputs = make_inputs(layer, 1, seq, context=context)
        cache = Cache(config, inputs) if context else None
        # As transformers calls a layer with a StaticCache: a decode step has a mask.
        mask = torch.ones(1, 1, 1, context, dtype=torch.bool, device=device) if context else None
        step = Step(fused, fused, inputs, mask, cache and cache.cache)
        times = [_timed(step, cache and cache.last, device) for _ in range(2 + STEADY)]
        case = f"B1 KV{context}, after that" if context else f"B1 S{seq}, new process"
        status = f"fell back: {', '.join(report.fallbacks)}" if report.fallback_calls else "ok"
        found.append({"case": case, "status": status, **dict(zip(CALLS, (*times[:2], median(times[2:]))))})
    return found


def _timed(call: Callable[[], Any], before: Callable[[], Any] | None, device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    if before is not None:
        before()
    wait()
    start = time.perf_counter()
    call()
    wait()
    return round((time.perf_counter() - start) * 1e3, 4)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold", description="The first calls of a fused layer, as JSON.")
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    print(json.dumps(measure(args.model, torch.device("cpu" if args.dry else "cuda"), args.dry)))


if __name__ == "__main__":
    main()

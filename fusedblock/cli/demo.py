"""`fusedblock demo`: swap a real model, check that it computes the same, and show what the swap changes."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import fusedblock
from fusedblock.metering.device import describe, versions
from fusedblock.metering.report import bytes_text

from . import checkpoints, presets
from .compare import (
    Check,
    LayerCase,
    error_check,
    greedy,
    greedy_check,
    load_ours,
    load_plain,
    logits,
    prompts,
    token_errors,
)  # fmt: skip
from .console import Steps

SCHEMA = "fusedblock.demo/1"
TOKENS = 16
SEQ = 4096  # of the measurements


def run(console: Console, *, random: bool, report: Path) -> bool:
    """The whole demo; whether every check passed. Writes report.json and one PNG per measurement into `report`.

    random: a small model with random weights, without asking for the real one.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = Steps(console, 6)
    machine, found = describe(device), versions()
    console.print(f"fusedblock {fusedblock.__version__} on {machine['name']}: python {found['python']}, torch {found['torch']}, "
                  f"triton {found['triton']}, transformers {found['transformers']}", highlight=False)  # fmt: skip
    report.mkdir(parents=True, exist_ok=True)  # fail now, not after the work
    with ExitStack() as stack:
        # A token of a small model is milliseconds of matrix-vector products. Threads save little of that, and on a busy
        # machine waiting for each other costs ten times as much.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        steps.step("A checkpoint")
        folder, name = _checkpoint(steps, stack, random)

        steps.step("Hugging Face: load it, continue three prompts greedily")
        plain = load_plain(folder, torch.float32, device)
        asked, tokenizer = prompts(folder, plain.config.vocab_size)
        expected = [greedy(plain, prompt, TOKENS) for prompt in asked]
        plain_logits = [logits(plain, ids) for ids in expected]
        texts = [_text(tokenizer, ids) for ids in expected]
        for text in texts:
            steps.say(text)

        steps.step("fusedblock: load it from safetensors into a model without memory, swap all layers, do the same")
        model = load_ours(folder, torch.float32, device)
        fusion = fusedblock.fuse(model)
        if device == "cpu":
            steps.say("no GPU here: fused layers compute each operator's plain PyTorch reference (step 5 runs the kernels)")
        fused = [greedy(model, prompt, TOKENS) for prompt in asked]
        fused_logits = [logits(model, ids) for ids in expected]
        steps.say(str(fusion))

        steps.step("Compare")
        layers = model.config.num_hidden_layers
        steps.check(Check("layers fused", str(fusion.fused), str(layers), fusion.fused == layers))
        steps.check(Check("calls that fell back", str(fusion.fallback_calls), "0 of more than 0",
                          fusion.fallback_calls == 0 < fusion.fused_calls))  # fmt: skip
        exact = load_plain(folder, torch.float64)
        for i in range(len(asked)):
            steps.check(greedy_check(f"prompt {i + 1}, {TOKENS} greedy tokens", fused[i], expected[i], plain, exact))
        exact_logits = torch.cat([logits(exact, ids) for ids in expected])
        del exact
        errors = [token_errors(torch.cat(found), exact_logits) for found in (fused_logits, plain_logits)]
        title = f"fp32 logits of {len(exact_logits)} tokens against float64"
        steps.check(error_check(title, torch.float32, *errors, whole_model=True))
        fusedblock.unfuse(model)
        same = all(torch.equal(logits(model, ids), before) for ids, before in zip(expected, plain_logits))
        steps.check(Check("logits after unfuse", "the same bits" if same else "other bits", "the bits of Hugging Face", same))
        del model

        index = layers // 2
        steps.step(f"One layer's kernels, {'on the GPU' if device == 'cuda' else 'in the interpreter'}, against float64")
        case = LayerCase.of(plain, index, torch.cat([prompt.ids for prompt in asked], 1))
        del plain
        if device == "cpu" and not _interpreter():
            steps.say("skipped: the interpreter needs Triton, which is not installed here")
        else:
            for dtype in (torch.float32, torch.bfloat16):
                backward = device == "cuda" or random or dtype is torch.bfloat16  # interpreted, fp32 would take as long again
                steps.check(*case.check(dtype, backward=backward, device=device))

        steps.step("What the swap changes")
        reports = {}
        for label, subject in ((name, presets.on_meta(presets.config_of(str(folder)), torch.bfloat16)),
                               ("llama-3.1-8b", presets.config_of("llama-3.1-8b"))):  # fmt: skip
            seq = min(SEQ, getattr(subject, "config", subject).max_position_embeddings)
            measured = fusedblock.measure(subject, batch=1, seq=seq, phase="prefill", baseline="sdpa", device=device)
            reports[label] = dataclasses.replace(measured, subject=f"{label} ({measured.subject})")
            console.print(f"\n{reports[label]}", markup=False, highlight=False, soft_wrap=True)
            before, after = measured.before.total("layers"), measured.after.total("layers")
            found_text = (f"{before.launches} to {after.launches} launches, "
                          f"{bytes_text(before.bytes)} to {bytes_text(after.bytes)}")  # fmt: skip
            fewer = after.launches < before.launches and after.bytes < before.bytes
            steps.check(Check(f"{label}: the layers' launches and bytes", found_text, "fewer of both", fewer))

    _write(report, steps, reports, {
        "schema": SCHEMA, "date": time.strftime("%Y-%m-%d"), "checkpoint": name, "device": machine, "versions": found,
        "fusion": str(fusion), "texts": texts,
    })  # fmt: skip
    passed = steps.summary()
    console.print(f"report: {report}", markup=False, highlight=False, soft_wrap=True)
    return passed


def _checkpoint(steps: Steps, stack: ExitStack, random: bool) -> tuple[Path, str]:
    if not random:
        try:
            folder = checkpoints.smollm2(steps.say)
        except checkpoints.Unavailable as reason:
            steps.say(f"{reason}\nwithout it: a small model with random weights, as under --random")
        else:
            return folder, "SmolLM2-135M"
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fusedblock-")))
    steps.say("a Llama with random weights: 4 layers, hidden 128, 4 heads over 2 key/value heads")
    return checkpoints.random_checkpoint(folder), "random Llama"


def _text(tokenizer: Any, ids: torch.Tensor) -> str:
    if tokenizer is None:
        return str(ids.tolist())
    with checkpoints.quiet_transformers():
        return repr(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _interpreter() -> bool:
    from fusedblock.kernels._lang import AVAILABLE

    return AVAILABLE


def _write(folder: Path, steps: Steps, reports: dict[str, Any], about: dict[str, Any]) -> None:
    """report.json, and a picture of each measurement where matplotlib is installed."""
    measured = {label: json.loads(report.to_json()) for label, report in reports.items()}
    everything = {**about, "checks": [dataclasses.asdict(check) for check in steps.checks], "measurements": measured}
    (folder / "report.json").write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    for label, report in reports.items():
        try:
            report.plot(folder / f"{label.lower().replace(' ', '-')}.png")
        except ModuleNotFoundError as error:
            steps.say(f"no picture: {error}")
            return

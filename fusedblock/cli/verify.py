"""`fusedblock verify`: a checkpoint, fused, against the same checkpoint in Hugging Face's own code."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import fusedblock

from .compare import (
    Check,
    Prompt,
    error_check,
    greedy,
    greedy_check,
    load_ours,
    load_plain,
    logits,
    name_of,
    prompts,
    reference_dtype,
    relative_error,
)  # fmt: skip
from .console import Steps, table


def run(console: Console, folder: Path, *, dtype: torch.dtype = torch.float32, tokens: int = 16, gradients: bool = False,
        device: str | None = None) -> bool:  # fmt: skip
    """Compare and print; whether every check passed. Needs memory for two models, the reference at twice the bytes.

    Raises ValueError if there is no checkpoint in `folder` or it holds no Llama; OSError if it cannot be read.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{str(folder)!r} is not a checkpoint's directory: it has no config.json")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    steps = Steps(console, 3)
    higher = reference_dtype(dtype)
    steps.step(f"Load {folder} twice: by fusedblock in {name_of(dtype)}, by transformers in {name_of(higher)} as the reference")
    # One model is fused and unfused: what it computes in between has the same weights.
    model = load_ours(folder, dtype, device)
    reference = load_plain(folder, higher, device)
    asked, _ = prompts(folder, model.config.vocab_size)

    steps.step("Run the original layers, then the fused ones")
    before = [_run(model, prompt, tokens, gradients) for prompt in asked]
    report = fusedblock.fuse(model)
    after = [_run(model, prompt, tokens, gradients) for prompt in asked]
    steps.say(str(report))
    fusedblock.unfuse(model)

    steps.step("Compare")
    total = len(report.layers)
    steps.checks.append(Check("layers fused", str(report.fused), str(total), report.fused == total))
    steps.checks.append(Check("calls that fell back", str(report.fallback_calls), "0 of more than 0",
                              report.fallback_calls == 0 < report.fused_calls))  # fmt: skip
    for i, prompt in enumerate(asked):
        name = f"prompt {i + 1}" + (f" {prompt.text!r}" if prompt.text else "")
        exact = _run(reference, prompt, 0, gradients)
        steps.checks.append(error_check(f"{name}: logits", after[i].logits, before[i].logits, exact.logits))
        steps.checks.append(greedy_check(f"{name}: {tokens} greedy tokens", after[i].tokens, before[i].tokens, model, reference))
        if gradients:
            steps.checks.append(_worst_gradient(f"{name}: gradients", after[i], before[i], exact))
    console.print(table(("", "check", "found", "wanted"),
                        [("ok" if c.passed else "FAIL", c.name, c.found, c.wanted) for c in steps.checks]))  # fmt: skip
    return steps.summary()


@dataclasses.dataclass(frozen=True)
class _Result:
    logits: Tensor
    tokens: Tensor
    gradients: dict[str, Tensor]


def _run(model: Any, prompt: Prompt, tokens: int, gradients: bool) -> _Result:
    made = greedy(model, prompt, tokens) if tokens else torch.empty(0)
    found: dict[str, Tensor] = {}
    if gradients:
        model.zero_grad()
        ids = prompt.ids.to(model.device)
        model(ids, labels=ids, use_cache=False).loss.backward()
        found = {name: weight.grad.cpu() for name, weight in model.named_parameters() if weight.grad is not None}
        model.zero_grad()
    return _Result(logits(model, prompt), made, found)


def _worst_gradient(name: str, fused: _Result, plain: _Result, exact: _Result) -> Check:
    """The weight with the largest error, or, if any fails the rule, the worst of those."""
    checks = {
        weight: error_check(name, fused.gradients[weight], plain.gradients[weight], reference, tokens=False)
        for weight, reference in exact.gradients.items()
    }
    worst = max(checks, key=lambda w: (not checks[w].passed, relative_error(fused.gradients[w], exact.gradients[w])))
    return dataclasses.replace(checks[worst], found=f"{checks[worst].found} ({worst}, the worst of {len(checks)})")

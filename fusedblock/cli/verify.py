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
    token_errors,
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
    model = load_ours(folder, dtype, device)
    reference = load_plain(folder, higher, device)
    asked, _ = prompts(folder, model.config.vocab_size)

    steps.step("Run the original layers, then the fused ones")
    # One model is fused and unfused: what it computes in between has the same weights. Errors are those of the prompts with
    # the plain model's continuations.
    continued = [greedy(model, prompt, tokens) for prompt in asked]
    before = [_run(model, ids, gradients) for ids in continued]
    report = fusedblock.fuse(model)
    fused = [greedy(model, prompt, tokens) for prompt in asked]
    after = [_run(model, ids, gradients) for ids in continued]
    steps.say(str(report))
    fusedblock.unfuse(model)

    steps.step("Compare")
    total, fell_back = len(report.layers), report.fallback_calls
    checks = [
        Check("layers fused", str(report.fused), str(total), report.fused == total),
        Check("calls that fell back", str(fell_back), "0 of more than 0", fell_back == 0 < report.fused_calls),
    ]
    exact = [_run(reference, ids, gradients) for ids in continued]

    def errors(results: list[_Result]) -> Tensor:
        return torch.cat([token_errors(r.logits, e.logits) for r, e in zip(results, exact)])

    count = sum(map(len, continued))
    checks.append(error_check(f"logits of {count} tokens", dtype, errors(after), errors(before), whole_model=True))
    for i, prompt in enumerate(asked):
        name = f"{tokens} greedy tokens after {'prompt ' + str(i + 1) if prompt.text is None else repr(prompt.text)}"
        checks.append(greedy_check(name, fused[i], continued[i], model, reference))
    if gradients:

        def gradient_errors(results: list[_Result]) -> Tensor:
            pairs = [(r.gradients[name], g) for r, e in zip(results, exact) for name, g in e.gradients.items()]
            return torch.cat([relative_error(value, reference) for value, reference in pairs])

        name = f"gradients of {len(exact[0].gradients)} weights"
        checks.append(error_check(name, dtype, gradient_errors(after), gradient_errors(before), whole_model=True))
    steps.checks += checks
    console.print(table(("", "check", "found", "wanted"),
                        [("ok" if c.passed else "FAIL", c.name, c.found, c.wanted) for c in checks]))  # fmt: skip
    return steps.summary()


@dataclasses.dataclass(frozen=True)
class _Result:
    logits: Tensor
    gradients: dict[str, Tensor]


def _run(model: Any, ids: Tensor, gradients: bool) -> _Result:
    """Logits of token ids `seq` and, of their language-modelling loss, the gradient of every weight."""
    found: dict[str, Tensor] = {}
    if gradients:
        model.zero_grad()
        batch = ids[None].to(model.device)
        model(batch, labels=batch, use_cache=False).loss.backward()
        found = {name: weight.grad.cpu() for name, weight in model.named_parameters() if weight.grad is not None}
        model.zero_grad()
    return _Result(logits(model, ids), found)

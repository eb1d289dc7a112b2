"""`fusedblock verify`: a checkpoint, fused, against the same checkpoint in Hugging Face's own code.

Outputs without gradients, greedy tokens where the model generates, the gradient of every weight, and the weights that the fused
model saves. For any architecture of the table: language models by their prompts, encoders of images by a random one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import cross_entropy

import fusedblock
from fusedblock.models import FusionReport
from fusedblock.models.swap import decoder_layers

from .checkpoints import quiet_transformers
from .compare import (
    Check,
    Prompt,
    error_check,
    greedy,
    greedy_check,
    load_ours,
    load_plain,
    name_of,
    prompts,
    reference_dtype,
    relative_error,
    rule,
    token_errors,
)  # fmt: skip
from .console import Steps, table
from .presets import from_pretrained, on_meta, read_config

Inputs = Mapping[str, Tensor]
# A gradient this much smaller than the largest is nothing but rounding (of a key's bias under softmax): it has no relative error.
NEGLIGIBLE = 1e-6


def run(console: Console, folder: Path, *, dtype: torch.dtype = torch.float32, tokens: int = 16, gradients: bool = True,
        device: str | None = None) -> bool:  # fmt: skip
    """Compare and print; whether every check passed. Needs memory for two models, the reference at twice the bytes, and as
    much space for temporary files as the model takes in dtype.

    Raises ValueError if there is no checkpoint in `folder` or no layer of it can be fused; OSError if it cannot be read.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{str(folder)!r} is not a checkpoint's directory: it has no config.json")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    refuse_unless_it_fuses(folder, dtype)
    steps = Steps(console, 3)
    higher = reference_dtype(dtype)
    steps.step(f"Load {folder} twice: by fusedblock in {name_of(dtype)}, by transformers in {name_of(higher)} as the reference")
    model = load_ours(folder, dtype, device)
    reference = load_plain(folder, higher, device)
    for made in (model, reference):
        if any(layer.spec and layer.spec.softcap for layer in decoder_layers(made)):
            made.set_attn_implementation("eager")  # transformers' default, sdpa, has no softcap
    if any(layer.spec and layer.spec.sparse for layer in decoder_layers(reference)):
        reference.set_experts_implementation("eager")  # of transformers' others, grouped_mm takes no float64
    generates = model.can_generate()
    asked, inputs = _inputs(folder, model)

    steps.step("Run the original layers, then the fused ones")
    # One model is fused and unfused: what it computes in between has the same weights. Errors are those of the prompts with
    # the plain model's continuations.
    continued: list[Tensor] = []
    if generates:
        continued = [greedy(model, prompt, tokens) for prompt in asked]
        inputs = [{"input_ids": ids[None]} for ids in continued]
    before = [outputs(model, given) for given in inputs]
    before_gradients = [weight_gradients(model, given) for given in inputs] if gradients else []
    report = fusedblock.fuse(model)
    fused = [greedy(model, prompt, tokens) for prompt in asked] if generates else []
    after = [outputs(model, given) for given in inputs]
    after_gradients = [weight_gradients(model, given) for given in inputs] if gradients else []
    saved = saved_check(model, reference, dtype)
    steps.say(str(report))
    fusedblock.unfuse(model)

    steps.step("Compare")
    total = len(report.layers)
    checks = [
        Check("layers fused", str(report.fused), str(total), report.fused == total),
        calls_check(report),
    ]
    exact = [outputs(reference, given) for given in inputs]

    def errors(results: list[Tensor]) -> Tensor:
        return torch.cat([token_errors(result, right) for result, right in zip(results, exact)])

    name = f"{'logits' if generates else 'outputs'} of {len(errors(exact))} tokens"
    checks.append(error_check(name, dtype, errors(after), errors(before), whole_model=True))
    for i, (prompt, got, want) in enumerate(zip(asked, fused, continued)):
        name = f"{tokens} greedy tokens after {'prompt ' + str(i + 1) if prompt.text is None else repr(prompt.text)}"
        checks.append(greedy_check(name, got, want, model, reference))
    if gradients:
        exact_gradients = [weight_gradients(reference, given) for given in inputs]
        checks.append(gradient_check(dtype, after_gradients, before_gradients, exact_gradients))
    checks.append(saved)
    steps.checks += checks
    console.print(table(("", "check", "found", "wanted"),
                        [("ok" if c.passed else "FAIL", c.name, c.found, c.wanted) for c in checks]))  # fmt: skip
    steps.say(rule(dtype))
    return steps.summary()


def refuse_unless_it_fuses(folder: Path, dtype: torch.dtype) -> None:
    """Raises ValueError with fuse's reasons if no layer of the checkpoint's model can be fused. Reads its config.json only."""
    report = fusedblock.fuse(on_meta(read_config(folder), dtype))
    if not report.fused:
        reasons = dict.fromkeys(f"{r.layer_class}: {r.reason}" for r in report.layers)
        raise ValueError(f"{folder}: no layer can be fused; {'; '.join(reasons)}")


def calls_check(report: FusionReport) -> Check:
    """That layers were called, and every call ran fused."""
    ran, fell_back = report.fused_calls, report.fallback_calls
    reasons = "; ".join(f"{count} x {reason}" for reason, count in report.fallbacks.most_common())
    found = f"{fell_back} of {ran + fell_back}" + (f": {reasons}" if reasons else "")
    if not ran:
        why = dict.fromkeys(r.reason for r in report.layers if r.reason)
        found = f"no call was fused: {reasons or '; '.join(why) or 'no fused layer was called'}"
    return Check("calls that fell back", found, "0, and some calls fused", fell_back == 0 < ran)


def _inputs(folder: Path, model: Any) -> tuple[list[Prompt], list[Inputs]]:
    """Prompts, and what the model is called with; none of the first for a model of images."""
    if model.main_input_name == "input_ids":
        asked, _ = prompts(folder, model.config.vocab_size)
        return asked, [{"input_ids": prompt.ids} for prompt in asked]
    if model.main_input_name == "pixel_values":
        size = model.config.image_size
        sides = (size, size) if isinstance(size, int) else tuple(size)
        generator = torch.Generator().manual_seed(0)
        return [], [{"pixel_values": torch.randn(2, model.config.num_channels, *sides, generator=generator)}]
    raise ValueError(f"{type(model).__name__} takes {model.main_input_name}, expected input_ids or pixel_values")


def _call(model: Any, inputs: Inputs) -> Tensor:
    """The model's first output, `batch ... features`: logits or hidden states."""
    given = {n: t.to(model.device, model.dtype if t.is_floating_point() else None) for n, t in inputs.items()}
    return model(**given, **({"use_cache": False} if model.can_generate() else {}))[0]


@torch.no_grad()
def outputs(model: Any, inputs: Inputs) -> Tensor:
    """`tokens features`, on the CPU."""
    return _call(model, inputs).flatten(0, -2).cpu()


def weight_gradients(model: Any, inputs: Inputs) -> dict[str, Tensor]:
    """The gradient of every weight: of the language-modelling loss, or of a fixed random combination of the outputs."""
    model.zero_grad()
    out = _call(model, inputs)
    if model.can_generate():
        out = out.to(torch.promote_types(out.dtype, torch.float32))
        loss = cross_entropy(out[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten().to(out.device))
    else:
        generator = torch.Generator().manual_seed(1)
        loss = (out * torch.randn(out.shape, generator=generator).to(out)).sum()
    loss.backward()
    found = {name: weight.grad.cpu() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


def gradient_check(dtype: torch.dtype, fused: list[dict[str, Tensor]], plain: list[dict[str, Tensor]],
                   exact: list[dict[str, Tensor]]) -> Check:  # fmt: skip
    """The rule for the gradients of every weight; each list holds those of one input after the other."""
    name = f"gradients of {len(exact[0])} weights"
    if [set(found) for found in fused] != [set(found) for found in exact]:
        different = sorted(set(fused[0]) ^ set(exact[0]))
        return Check(name, f"only one of the two has {', '.join(different[:3])}", "the same weights have one", False)

    def errors(found: list[dict[str, Tensor]]) -> Tensor:
        pairs = []
        for ours, right in zip(found, exact):
            largest = max(float(gradient.norm()) for gradient in right.values())
            pairs += [(ours[n], gradient) for n, gradient in right.items() if float(gradient.norm()) > NEGLIGIBLE * largest]
        return torch.cat([relative_error(value, reference) for value, reference in pairs])

    return error_check(name, dtype, errors(fused), errors(plain), whole_model=True)


def saved_check(model: Any, reference: Any, dtype: torch.dtype) -> Check:
    """What the fused model saves, loaded by transformers, against the reference: the same names and bits."""
    wanted = reference.state_dict()
    with tempfile.TemporaryDirectory(prefix="fusedblock-verify-") as folder:
        with quiet_transformers():
            model.save_pretrained(folder)
        found = from_pretrained(Path(folder), dtype).state_dict()
    different = [n for n in sorted({*wanted, *found}) if n not in wanted or n not in found or not _same(found[n], wanted[n])]
    text = f"{len(different)} differ: {', '.join(different[:3])}" if different else "the same bits"
    return Check(f"{len(wanted)} weights saved by the fused model", text, "the same bits", not different)


def _same(found: Tensor, wanted: Tensor) -> bool:
    return torch.equal(found.cpu(), wanted.to("cpu", found.dtype))

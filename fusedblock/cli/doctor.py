"""`fusedblock doctor`: what is here, whether it works together, and what to do where it does not.

The kernels of every operator are compiled, for the GPU here or ahead of time for an H200, and run on a small case beside plain
PyTorch: on the GPU, or in the interpreter.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

import fusedblock
from fusedblock.extras import install
from fusedblock.kernels import _gluon, _hopper_check, _lang
from fusedblock.kernels._target import Target, target_of
from fusedblock.metering.device import describe, versions
from fusedblock.ops import RouterSpec, moe_experts, moe_index, moe_linear, moe_route
from fusedblock.options import from_environment

from . import checkpoints
from .compare import Check, error_check, kernels_on, name_of, relative_error
from .console import table

# Package -> versions it works with, [from, below).
SUPPORTED = {"torch": ("2.10", None), "triton": ("3.6", "3.10"), "transformers": ("5.17", "6")}
Shapes = dict[str, tuple[int, ...]]
OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report; a hint says what to do."""

    subject: str
    found: str
    status: str = OK
    hint: str = ""


def run(console: Console) -> bool:
    """Print the findings and the self-test; whether nothing is wrong."""
    findings = [*version_findings(), *device_findings(), *environment_findings()]
    marks = {OK: "[green]ok[/]", NOTE: "[yellow]note[/]", PROBLEM: "[bold red]problem[/]"}
    console.print(table(("", "what", "found", "hint"), [(marks[f.status], f.subject, f.found, f.hint) for f in findings]))
    passed = all(finding.status != PROBLEM for finding in findings)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not _lang.AVAILABLE:
        console.print("no self-test of the kernels: they need Triton. Operators compute their plain PyTorch reference here.")
        return passed
    where = "compiled, on the GPU" if device == "cuda" else "in the interpreter"
    target = target_of(torch.device(device))
    here = "" if device == "cuda" else ", ahead of time: no GPU is here"
    console.print(f"\nkernels of each operator, forward and backward in bf16, compiled for {target.name}{here}", highlight=False)
    rows = []
    for check, seconds in compilation(target):
        passed &= check.passed
        rows.append((_mark(check), check.name, escape(check.found), check.wanted, f"{seconds:.1f} s"))
    console.print(table(("", "operator", "found", "wanted", "time"), rows))
    console.print(f"\nself-test: each operator's kernels, forward and backward, {where}, against float64", highlight=False)
    rows = []
    for check, seconds in self_test(device):
        passed &= check.passed
        rows.append((_mark(check), check.name, escape(check.found), check.wanted, f"{seconds:.2f} s"))
    console.print(table(("", "operator", "found", "wanted", "time"), rows))
    console.print("[bold green]all is well[/]" if passed else "[bold red]something is wrong, see above[/]")
    return passed


def _mark(check: Check) -> str:
    return "[green]ok[/]" if check.passed else "[bold red]FAIL[/]"


def version_findings(found: dict[str, str | None] | None = None) -> list[Finding]:
    """Python and the libraries against what this version supports; found: as `fusedblock.metering.device.versions` gives."""
    found = versions() if found is None else found
    findings = [Finding("fusedblock", fusedblock.__version__), Finding("python", found["python"] or "?")]
    for package, (low, high) in SUPPORTED.items():
        wanted = f">={low}" + (f",<{high}" if high else "")
        version = found[package]
        if version is None:
            hint = {
                "triton": "kernels need it; Linux only. Without it operators compute their plain PyTorch reference",
                "transformers": f"to fuse models: {install('hf')}",
            }.get(package, f"pip install '{package}{wanted}'")
            status = NOTE if package == "transformers" or (package == "triton" and platform.system() != "Linux") else PROBLEM
            findings.append(Finding(package, "not installed", status, hint))
        elif _number(version) < _number(low) or (high and _number(version) >= _number(high)):
            findings.append(Finding(package, version, PROBLEM, f"fusedblock supports {package}{wanted}"))
        else:
            findings.append(Finding(package, version))
    return findings


def device_findings() -> list[Finding]:
    """The GPU as the kernels see it, or that there is none."""
    device = describe()
    if device["type"] != "cuda":
        findings = [Finding("device", device["name"], NOTE, "no GPU that torch can use: fused layers compute plain PyTorch here")]
        if shutil.which("nvidia-smi") and torch.version.cuda is None:
            findings.append(Finding("torch", torch.__version__, PROBLEM, "there is an NVIDIA driver, but this torch is built "
                                    "without CUDA: install a CUDA build (pytorch.org/get-started)"))  # fmt: skip
        return findings
    target, found = target_of(torch.device("cuda")), versions()
    old = target.backend == "cuda" and target.capability < 80
    hint = "kernels need sm_80 (Ampere) or newer" if old else ""
    built = f"CUDA {found['cuda']}" if found["cuda"] else f"HIP {found['hip']}"
    return [
        Finding("device", f"{device['name']} ({target.name})", PROBLEM if old else OK, hint),
        Finding("driver", f"{found['driver'] or '?'}, torch built for {built}"),
        Finding("memory", f"{device['memory_bytes'] / 2**30:.0f} GiB, L2 {target.l2_bytes / 2**20:.0f} MiB"),
        Finding("shared memory", f"{target.smem_bytes / 1024:.0f} KiB per program, {target.sms} SMs"),
        *hopper_findings(target),
    ]


def hopper_findings(target: Target) -> list[Finding]:
    """On sm_90, whether the Gluon kernels of attention and experts are in use; they are tested if they were not yet."""
    if target.capability != 90:
        return []
    name = "Hopper kernels"
    if _gluon.REASON:
        return [Finding(name, "not in use", NOTE, f"{_gluon.REASON}; the portable kernels run instead")]
    device = torch.device("cuda", torch.cuda.current_device())
    with warnings.catch_warnings(record=True):
        passed = all(_hopper_check.ready(device, part) for part in _hopper_check.PARTS)
    found = _hopper_check.state(device)
    if passed:
        return [Finding(name, f"in use for attention and experts; {found}")]
    return [Finding(name, f"not in use: {found}", PROBLEM, "the portable kernels run instead; please report this")]


def environment_findings() -> list[Finding]:
    """Variables and folders that decide how things run."""
    findings = []
    try:
        chosen = from_environment()
        found = ", ".join(f"{option.name}={getattr(chosen, option.name)}" for option in fields(chosen))
        findings.append(Finding("options", found))
    except ValueError as error:
        findings.append(Finding("options", str(error), PROBLEM, "correct or unset the variable"))
    if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on"):
        hint = "unset it: with it Triton cannot compile, and fusedblock has an interpreter of its own"
        findings.append(Finding("TRITON_INTERPRET", os.environ["TRITON_INTERPRET"], PROBLEM, hint))
    if torch.cuda.is_available() and not (os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))):
        findings.append(Finding("C compiler", "none", PROBLEM, "Triton builds its launchers with one: install gcc, or set CC"))
    cache = checkpoints.cache_dir()
    nearest = next(folder for folder in (cache, *cache.parents) if folder.exists())
    writable = os.access(nearest, os.W_OK)
    hint = "" if writable else "not writable: set FUSEDBLOCK_CACHE to a folder that is, for the demo's weights"
    findings.append(Finding("cache", str(cache), OK if writable else NOTE, hint))
    try:
        findings.append(Finding("demo weights", checkpoints.find_smollm2().name))
    except checkpoints.Unavailable as reason:
        findings.append(Finding("demo weights", "not here", NOTE, str(reason)))
    return findings


def _number(version: str) -> tuple[int, ...]:
    """"2.11.0+cu128" -> (2, 11)"""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _cases() -> dict[str, tuple[Callable[..., Tensor], Shapes]]:
    """Operator -> a function of its inputs, and their shapes: none a multiple of a tile, all that a layer uses included."""
    angle = torch.outer(torch.arange(19.0), 10000.0 ** -(torch.arange(16) / 16))[None]

    def tables(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.to(x.device, x.dtype) for t in (angle.cos(), angle.sin()))

    def flat(*results: Tensor) -> Tensor:
        return torch.cat([t.flatten(2) for t in results], -1)

    def qkv(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flat(*fusedblock.qkv_rope(x, q, k, v, *tables(x), head_dim=32))

    def normed(x: Tensor, q: Tensor, k: Tensor, v: Tensor, q_norm: Tensor, k_norm: Tensor) -> Tensor:
        return flat(*fusedblock.qkv_rope(x, q, k, v, *tables(x), head_dim=32, q_norm=q_norm, k_norm=k_norm, interleaved=True))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = fusedblock.attention(q, k, v, causal=True)
        assert isinstance(out, Tensor)
        return out.flatten(2)

    def route(x: Tensor, weight: Tensor) -> Tensor:
        """All experts are chosen: in what order, half precision may not tell, but for the rows of each."""
        spec = RouterSpec(12, scoring="sigmoid", renormalise=True)
        weights, indices, logits, *_ = moe_route(x.flatten(0, 1), weight, spec, tile_rows=16)
        _, _, offsets, _ = moe_index(indices, 12, 16)
        return torch.cat((weights.sort(-1).values, logits, (offsets / offsets.numel()).expand(len(logits), -1)), -1)

    def experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
        """Token t goes to experts t, t+2 and t+4 of 7, and none to the last."""
        indices = (torch.arange(len(x), device=x.device)[:, None] + torch.tensor((0, 2, 4), device=x.device)) % 6
        indices = indices.to(torch.int32)
        return moe_experts(x, gate_up, down, weights, indices, moe_index(indices, 7, 16), tile_rows=16)

    def projections(x: Tensor, q: Tensor, o: Tensor, weights: Tensor) -> Tensor:
        """To slots of two heads and back, by experts t and t+2 of 5 for token t."""
        indices = ((torch.arange(len(x), device=x.device)[:, None] + torch.tensor((0, 2), device=x.device)) % 5).to(torch.int32)
        index = moe_index(indices, 5, 16)
        slots = moe_linear(x, q, indices, index, tile_rows=16, heads=2)
        return moe_linear(slots, o, indices, index, tile_rows=16, heads=2, weights=weights)

    x, kv = (2, 19, 96), (2, 45, 2, 32)
    expert_weights = {"gate_up": (7, 80, 96), "down": (7, 96, 40)}
    qkv_weights = {"q": (128, 96), "k": (64, 96), "v": (64, 96)}
    return {
        "rms_norm": (fusedblock.rms_norm, {"x": x, "weight": (96,)}),
        "layer_norm": (fusedblock.layer_norm, {"x": x, "weight": (96,), "bias": (96,)}),
        "rope": (lambda q, k: flat(*fusedblock.rope(q, k, *tables(q))), {"q": (2, 19, 4, 32), "k": (2, 19, 2, 32)}),
        "qkv_rope": (qkv, {"x": x, **qkv_weights}),
        "qkv_rope, head norms": (normed, {"x": x, **qkv_weights, "q_norm": (32,), "k_norm": (32,)}),
        "attention": (attend, {"q": (2, 45, 4, 32), "k": kv, "v": kv}),
        "attention, decode": (attend, {"q": (2, 1, 4, 32), "k": kv, "v": kv}),
        "linear": (lambda x, w, b, r: fusedblock.linear(x, w, b, residual=r),
                   {"x": x, "w": (80, 96), "b": (80,), "r": (2, 19, 80)}),
        "gated_mlp": (fusedblock.gated_mlp, {"x": x, "gate_weight": (80, 96), "up_weight": (80, 96)}),
        "plain_mlp": (lambda x, w, b: fusedblock.plain_mlp(x, w, b, activation="gelu"), {"x": x, "w": (80, 96), "b": (80,)}),
        "moe_route": (route, {"x": x, "weight": (12, 96)}),
        "moe_linear": (projections, {"x": (66, 96), "q": (5, 80, 96), "o": (5, 96, 80), "weights": (66, 2)}),
        **{
            f"moe_experts{words}": (experts, {"x": (tokens, 96), **expert_weights, "weights": (tokens, 3)})
            for words, tokens in (("", 66), (", few tokens", 19), (", one token", 1))
        },
    }  # fmt: skip


def compilation(target: Target) -> Iterator[tuple[Check, float]]:
    """The kernels of each operator compiled for target, whether they fit its shared memory, and the seconds it took."""
    from fusedblock.interpret import compile_only

    for name, (function, shapes) in _cases().items():
        started = time.perf_counter()
        wanted = f"at most {target.smem_bytes / 1024:.0f} KiB"
        try:
            with compile_only(target) as kernels:
                _results(function, [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes.values()], torch.bfloat16, "cpu")
            used = max(kernel.metadata.shared for kernel in kernels)
            different = {kernel.hash for kernel in kernels}
            check = Check(name, f"{len(different)} kernels, up to {used / 1024:.0f} KiB of shared memory", wanted,
                          used <= target.smem_bytes)  # fmt: skip
        except Exception as error:  # whatever a compiler raises is what the user came to see
            check = _raised(name, error)
        yield check, time.perf_counter() - started


def _raised(name: str, error: Exception) -> Check:
    first = (str(error).strip().splitlines() or [""])[0]
    return Check(name, f"{type(error).__name__}: {first}", "no error", False)


def self_test(device: str) -> Iterator[tuple[Check, float]]:
    """Each operator on small inputs: its kernels' result and gradients against its reference in float64, with the seconds.

    A kernel that cannot be compiled or run is a failed check that says why.
    """
    dtypes = (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,)
    for name, (function, shapes) in _cases().items():
        for dtype in dtypes:
            started = time.perf_counter()
            title = f"{name}, {name_of(dtype)}"
            try:
                check = _check(title, function, shapes, dtype, device)
            except Exception as error:  # whatever a compiler or driver raises is what the user came to see
                check = _raised(title, error)
            yield check, time.perf_counter() - started


def _check(title: str, function: Callable[..., Tensor], shapes: Shapes, dtype: torch.dtype, device: str) -> Check:
    generator = torch.Generator().manual_seed(0)
    inputs = [(torch.randn(shape, generator=generator) * shape[-1] ** -0.25).to(dtype) for shape in shapes.values()]
    exact = _results(function, inputs, torch.float64, "cpu")
    plain = _results(function, inputs, dtype, "cpu")
    with kernels_on(device):
        kernels = _results(function, inputs, dtype, device)
    checks = [
        error_check(title, dtype, relative_error(k, e), relative_error(p, e)) for k, p, e in zip(kernels, plain, exact)
    ]
    names = ["output", "output in training", *(f"gradient of {name}" for name in shapes)]
    failed = [f"{name}: {check.found}, wanted {check.wanted}" for name, check in zip(names, checks) if not check.passed]
    if failed:
        return Check(title, "; ".join(failed), checks[0].wanted, False)
    return Check(title, f"output {checks[0].found}, {len(checks) - 2} gradients", checks[0].wanted, True)


def _results(function: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype, device: str) -> list[Any]:
    leaves = [t.detach().to(device, dtype).requires_grad_() for t in inputs]
    with torch.no_grad():
        inference = function(*leaves)
    out = function(*leaves)
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(out.shape, generator=generator).to(inputs[0].dtype).to(device, dtype)
    return [inference, out, *torch.autograd.grad(out, leaves, upstream)]

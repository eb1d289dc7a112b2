"""The commands and their options."""

from __future__ import annotations

import enum
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fusedblock.extras import install

from .published import PRESETS

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, pretty_exceptions_enable=False, help=(
    "Fused Triton kernels under Hugging Face layers: see them work, measure them, check them."))  # fmt: skip


class Phase(str, enum.Enum):
    prefill = "prefill"
    decode = "decode"
    train = "train"


class Baseline(str, enum.Enum):
    eager = "eager"
    sdpa = "sdpa"


class DType(str, enum.Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


MODEL = typer.Argument(help=f"A checkpoint's directory, or a preset (sizes only): {', '.join(PRESETS)}.")
FOLDER = typer.Argument(help="The directory of a Hugging Face checkpoint.", show_default=False)


def console() -> Console:
    """Wide enough for the tables where the output is no terminal."""
    made = Console()
    return made if made.is_terminal else Console(width=160)


def _needs(*modules: str, extra: str, what: str = "this command") -> None:
    from importlib.util import find_spec

    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        typer.echo(f"fusedblock: {what} needs {' and '.join(missing)}: {install(extra)}", err=True)
        raise typer.Exit(2)


def _refuse(error: Exception) -> typer.Exit:
    typer.echo(f"fusedblock: {error}", err=True)
    return typer.Exit(2)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from fusedblock import __version__

        typer.echo(__version__)
        raise typer.Exit()


@app.command()
def demo(
    random: Annotated[bool, typer.Option("--random", help="A small random model: no weights, no tokenizer.")] = False,
    report: Annotated[Path, typer.Option(help="The directory for report.json and the pictures.")] = Path("fusedblock-report"),
) -> None:
    """Fuse SmolLM2-135M, check the results, and show what changed."""
    _needs("transformers", extra="demo")
    from .demo import run

    try:
        passed = run(console(), random=random, report=report)
    except OSError as error:  # the cache or the report cannot be written
        raise _refuse(error) from error
    raise typer.Exit(0 if passed else 1)


@app.command()
def measure(
    model: Annotated[str, MODEL] = "llama-3.1-8b",
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens of each in one call.  [default: 4096; decode: 1]")] = None,
    phase: Annotated[Phase, typer.Option(help="What the layers do.")] = Phase.prefill,
    context: Annotated[int | None, typer.Option(min=1, help="Keys to attend to.  [default: --seq; decode: 4096]")] = None,
    baseline: Annotated[
        Baseline | None,
        typer.Option(help="Hugging Face's attention before the swap.  [default: sdpa; with a softcap or sinks: eager]"),
    ] = None,
    layer: Annotated[bool, typer.Option("--layer", help="One layer, the first (with experts), instead of the model.")] = False,
    dtype: Annotated[DType | None, typer.Option(help="Of weights and activations.  [default: the checkpoint's]")] = None,
    device: Annotated[str | None, typer.Option(help="Where to time: cuda, cuda:1; cpu only counts.  [default: a GPU]")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
    png: Annotated[
        Path | None, typer.Option(help=f"Draw the report here; needs matplotlib: {install('demo')}.")
    ] = None,
) -> None:
    """Launches, memory traffic and time of a model, before and after.

    Needs no weights; times need a GPU.
    """
    _needs("transformers", extra="hf")
    if png is not None:
        _needs("matplotlib", extra="demo", what="--png")
    import fusedblock
    from fusedblock.metering.compare import default_baseline

    from . import presets
    from .compare import DTYPES

    decode = phase is Phase.decode
    seq = seq or (1 if decode else 4096)
    context = context or (max(seq, 4096) if decode else None)
    try:
        config = presets.config_of(model)
        chosen = DTYPES[dtype.value] if dtype else None
        if chosen is not None:
            config.dtype = chosen
        subject: Any = config if layer else presets.on_meta(config, chosen)
        before, why = (baseline.value, "") if baseline else default_baseline(subject)
        report = fusedblock.measure(subject, batch=batch, seq=seq, phase=phase.value, context=context, baseline=before,
                                    device=device)  # fmt: skip
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:
        raise _refuse(ValueError(re.sub(r"\bbaseline='(\w+)'", r"--baseline \1", str(error)))) from error
    head = [presets.title(model, subject), *([f"--baseline {before}: {why}"] if why else []), ""]
    console().print("\n".join([*head, str(report)]), markup=False, highlight=False, soft_wrap=True)
    try:
        if json is not None:
            report.to_json(json)
        if png is not None:
            report.plot(png)
    except (OSError, ModuleNotFoundError, ValueError) as error:
        raise _refuse(error) from error


def _check_device(name: str | None) -> None:
    """Raises ValueError unless tensors can be put on the device."""
    import torch

    try:
        kind = torch.device(name or "cpu").type
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"device {name!r}: expected cuda, cuda:1 or cpu")
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r}: {str(error).splitlines()[0]}") from error


@app.command()
def verify(
    model: Annotated[Path, FOLDER],
    dtype: Annotated[DType, typer.Option(help="Arithmetic to check.")] = DType.fp32,
    tokens: Annotated[int, typer.Option(min=1, help="Greedy tokens to compare.")] = 16,
    gradients: Annotated[bool, typer.Option(help="Also the gradient of every weight.")] = True,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu.  [default: a GPU if there is one]")] = None,
) -> None:
    """Check a checkpoint, fused, against Hugging Face.

    Outputs, greedy tokens, gradients and saved weights. Exits 1 if any check fails.
    """
    _needs("transformers", extra="hf")
    from .compare import DTYPES
    from .verify import run

    try:
        _check_device(device)
        passed = run(console(), model, dtype=DTYPES[dtype.value], tokens=tokens, gradients=gradients, device=device)
    except (ValueError, OSError) as error:
        raise _refuse(error) from error
    raise typer.Exit(0 if passed else 1)


@app.command()
def explain(
    model: Annotated[str, MODEL] = "llama-3.1-8b",
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens of each.  [default: --context; decode: 1]")] = None,
    context: Annotated[int, typer.Option(min=1, help="Keys to attend to.")] = 2048,
    phase: Annotated[Phase | None, typer.Option(help="What the layers do.  [default: all three]")] = None,
    target: Annotated[str | None, typer.Option(help="sm_90, sm_80, gfx942, ...  [default: the GPU here, or sm_90]")] = None,
    dtype: Annotated[DType | None, typer.Option(help="Of weights and activations.  [default: the checkpoint's]")] = None,
) -> None:
    """Which layers fuse, and what one of them launches, and why.

    Needs no weights and no GPU.
    """
    _needs("transformers", extra="hf")
    from .compare import DTYPES
    from .explain import text

    try:
        found = text(model, batch=batch, seq=seq, context=context, phase=phase.value if phase else None, target=target,
                     dtype=DTYPES[dtype.value] if dtype else None)  # fmt: skip
    except ValueError as error:
        raise _refuse(error) from error
    console().print(found, markup=False, highlight=False, soft_wrap=True)


@app.command()
def doctor() -> None:
    """GPU, versions, and a test of every operator. Exits 1 if anything is wrong, with a hint at what to do."""
    from .doctor import run

    raise typer.Exit(0 if run(console()) else 1)


@app.command()
def families(markdown: Annotated[bool, typer.Option("--markdown", help="As the table of the README.")] = False) -> None:
    """The architectures whose layers can be fused."""
    from fusedblock.models.families import HEADER, rows
    from fusedblock.models.families import markdown as as_markdown

    if markdown:
        typer.echo(as_markdown())
        return
    from .console import table

    console().print(table(HEADER, rows()))

"""The `fusedblock` command. Its libraries are an extra, so this module imports none of them."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from fusedblock.extras import install


def main() -> None:
    """Run the command line; exits 2, naming the extra, where its libraries are not installed."""
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        print(
            f"fusedblock: the command line needs {' and '.join(missing)}, not installed here: {install('cli')}, "
            "or '.[demo]' for everything `fusedblock demo` uses",
            file=sys.stderr,
        )
        raise SystemExit(2)
    # Before numpy loads: the kernels' interpreter makes many small numpy calls, and BLAS threads only get into each other's way.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from .app import app

    app(prog_name="fusedblock")

"""Gluon kernels with one synchronising statement taken out: the model must find each of them missing."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType

import pytest

from fusedblock.interpret import ProtocolError

SYNCHRONISES = ("mbarrier.", "bar_sync", "bar_arrive", "fence_async_shared", "tma_store_wait", "_take_turn", "_pass_turn",
                "copy_rows_arrive")  # fmt: skip


def statements(module: ModuleType) -> list[tuple[str, int]]:
    """("function: statement", line) of everything in a kernel's module that synchronises and has no result."""
    assert module.__file__ is not None
    functions = [f for f in ast.parse(Path(module.__file__).read_text()).body if isinstance(f, ast.FunctionDef)]
    return [
        (f"{function.name}: {ast.unparse(node)}", node.lineno)
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Expr) and ast.unparse(node).startswith(SYNCHRONISES)
    ]


@contextmanager
def without(module: ModuleType, line: int, folder: Path) -> Iterator[ModuleType]:
    """The module with `pass` for the statement on a line."""
    assert module.__file__ is not None
    lines = Path(module.__file__).read_text().splitlines()
    lines[line - 1] = re.sub(r"\S.*", "pass", lines[line - 1])
    path = folder / "mutant.py"  # a file, because triton and the model read the source
    path.write_text("\n".join(lines))
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_{line}", path)
    assert spec is not None and spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = mutant
    try:
        spec.loader.exec_module(mutant)
        yield mutant
    finally:
        del sys.modules[spec.name]


def fails(expected: bool) -> AbstractContextManager[object]:
    return pytest.raises(ProtocolError) if expected else nullcontext()

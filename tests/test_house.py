"""The house rules that a machine can hold: who imports whom, what an import costs, file length, lint, types, the wheel."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TREES = ("fusedblock", "kernels", "tests", "examples", "benchmarks")

# Room -> the rooms of ours that it may import. `options` is open to every room but kernels.
ARROWS: dict[str, set[str]] = {
    "kernels": set(),
    "options": set(),
    "extras": set(),
    "debug": {"kernels"},
    "registry": {"kernels", "debug"},
    "ops": {"registry", "kernels"},
    "attention_functions": {"ops", "kernels", "debug"},
    "interpret": {"kernels"},
    "io": set(),
    "cache": {"ops"},
    "blocks": {"ops", "cache", "debug"},
    "attention_experts": {"attention_functions", "blocks", "cache", "ops", "kernels"},
    "models": {"blocks", "ops", "io", "cache", "attention_functions"},
    "metering": {"models", "blocks", "ops", "kernels", "interpret", "extras"},
    "cli": {"extras", "kernels", "ops", "interpret", "io", "cache", "blocks", "models", "metering"},
    "__main__": {"cli"},
}
ARROWS["__init__"] = set(ARROWS) - {"__main__"}
for _room in set(ARROWS) - {"kernels", "options"}:
    ARROWS[_room].add("options")


def python_files(root: Path, *trees: str) -> list[Path]:
    """Every .py below these trees once: fusedblock/kernels is a link to kernels, which is walked itself."""
    linked = root / "fusedblock" / "kernels"
    found = [path for tree in trees for path in (root / tree).rglob("*.py")]
    return sorted(path for path in found if linked not in path.parents)


def imported_names(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str, bool]]:
    """(line, absolute dotted name, written relatively) of every import in a module of `package`, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, False
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{stem}.{alias.name}", node.level > 0
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            if node.args and isinstance(node.args[0], ast.Constant):
                name = str(node.args[0].value)
                yield node.lineno, ".".join(package) + name if name.startswith(".") else name, name.startswith(".")


def attribute_chains(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, "a.b.c") of every dotted expression, whole chains only."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    inner = {id(node.value) for node in attributes}
    for node in attributes:
        if id(node) not in inner:
            yield node.lineno, ast.unparse(node)


def below(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def violations(root: Path) -> list[str]:
    """Every import under root's fusedblock/ and kernels/ that the arrows do not allow."""
    bad = []
    for path in python_files(root, "fusedblock", "kernels"):
        parts = path.relative_to(root).with_suffix("").parts
        dotted = ["fusedblock", *(parts if parts[0] == "kernels" else parts[1:])]
        room, tree = dotted[1], ast.parse(path.read_text())

        def say(line: int, what: str, path: Path = path) -> None:
            bad.append(f"{path.relative_to(root)}:{line}: {what}")

        if room not in ARROWS:
            say(1, f"{room} is not a room of the table")
            continue
        for line, name, relative in imported_names(tree, dotted[:-1]):
            names = name.split(".")
            if names[0] == "fusedblock" and len(names) > 1:
                if names[1] in ARROWS and names[1] not in {room, *ARROWS[room]}:
                    say(line, f"{room} imports {names[1]}")
                if room == "kernels" and not relative:
                    say(line, f"kernels imports {name} absolutely")
            if names[0] == "kernels":
                say(line, "imports the top-level name kernels, which is Hugging Face's")
            languages = (["kernels", "_lang"], ["kernels", "_gluon"])
            if below(name, "triton") and room != "interpret" and dotted[1:] not in languages:
                say(line, f"{room} imports {name}: only kernels/_lang.py, kernels/_gluon.py and interpret do")
            if room == "kernels" and below(name, "torch.nn", "torch.library"):
                say(line, f"kernels imports {name}")
        if room == "kernels":
            for line, chain in attribute_chains(tree):
                # torch.nn.functional holds plain functions, which references use; modules and registration stay out.
                if below(chain, "torch.nn", "torch.library") and not below(chain, "torch.nn.functional"):
                    say(line, f"kernels uses {chain}")
    return sorted(set(bad))


def test_import_arrows() -> None:
    assert violations(ROOT) == []


PLANTED = {
    "kernels/norm.py": ("from ..ops import rms_norm", "kernels imports ops"),
    "kernels/linear.py": ("from fusedblock.kernels._spec import Spec", "absolutely"),
    "kernels/attention.py": ("import triton.language as tl", "kernels imports triton.language"),
    "kernels/gated_mlp.py": ("from torch.nn import functional as F", "kernels imports torch.nn.functional"),
    "kernels/qkv_rope.py": ("import torch\nclass A(torch.nn.Module): pass", "kernels uses torch.nn.Module"),
    "kernels/moe.py": ("def f():\n    from torch import library", "kernels imports torch.library"),
    "kernels/mla.py": ("from ..options import current", "kernels imports options"),
    "fusedblock/ops.py": ("from . import blocks", "ops imports blocks"),
    "fusedblock/io.py": ("from .ops import linear", "io imports ops"),
    "fusedblock/cache.py": ("from .kernels import norm", "cache imports kernels"),
    "fusedblock/blocks/plan.py": ("from ..models.llama import fuse", "blocks imports models"),
    "fusedblock/blocks/functional.py": ("from .. import io", "blocks imports io"),
    "fusedblock/models/swap.py": ("import fusedblock.metering.report", "models imports metering"),
    "fusedblock/models/load.py": ("import kernels", "top-level name kernels"),
    "fusedblock/metering/counter.py": ("from ..cli import main", "metering imports cli"),
    "fusedblock/metering/timing.py": ("import triton", "metering imports triton"),
    "fusedblock/options.py": ("from importlib import import_module\nimport_module('.ops', __package__)", "options imports ops"),
    "fusedblock/helpers.py": ("", "helpers is not a room"),
    "fusedblock/__main__.py": ("from .ops import linear", "__main__ imports ops"),
}
ALLOWED = {
    "kernels/_lang.py": "import triton",
    "kernels/_gluon.py": "from triton.experimental import gluon",
    "kernels/_math.py": "from ._lang import tl\nfrom . import _spec\nimport torch\nx = torch.nn.functional.silu(torch.ones(1))",
    "fusedblock/__init__.py": "from . import ops, models, metering\nfrom .options import options",
    "fusedblock/interpret/__init__.py": "from ..kernels import _launch\nimport triton\nfrom .runtime import run",
    "fusedblock/metering/report.py": "from ..models import fuse\nfrom ..kernels._spec import Cost\nfrom ..options import current",
    "fusedblock/cli.py": "from . import io, interpret, metering\nimport torch.nn",
}


def test_arrow_check_finds_what_is_planted(tmp_path: Path) -> None:
    for name, source in {**ALLOWED, **{name: source for name, (source, _) in PLANTED.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source + "\n")
    (tmp_path / "fusedblock" / "kernels").symlink_to("../kernels")
    found = violations(tmp_path)
    for name, (_, expected) in PLANTED.items():
        assert any(line.startswith(name + ":") and expected in line for line in found), (name, expected, found)
    assert {line.split(":")[0] for line in found} == set(PLANTED)


def test_kernels_directory_is_a_link_and_no_package() -> None:
    link = ROOT / "fusedblock" / "kernels"
    assert link.is_symlink() and link.resolve() == ROOT / "kernels"
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_transformers_does_not_take_our_directory_for_its_kernels_package() -> None:
    """With the repository root on sys.path, `kernels` can be found; transformers must still not believe it has that package."""
    code = "from transformers.utils import is_kernels_available as available; print(available())"
    with_root = run_python(f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}")
    assert with_root == run_python(code, cwd=ROOT / "tests")


def test_files_are_short() -> None:
    long = {path: n for path in python_files(ROOT, *TREES) if (n := len(path.read_text().splitlines())) > 500}
    assert long == {}


def test_no_file_names_a_place_on_someones_machine_or_a_registry() -> None:
    place = re.compile(r"/(?:work|root|home|opt|Users)/|[A-Z]:\\|pypi\.org|pythonhosted\.org|npmjs\.org")
    texts = [path for tree in TREES for pattern in ("*.md", "*.py", "*.json", "*.csv") for path in (ROOT / tree).rglob(pattern)]
    texts += [path for path in ROOT.iterdir() if path.is_file()] + [ROOT / ".ci" / "run"]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted(set(texts))
        for number, line in enumerate(path.read_text(errors="ignore").splitlines(), 1)
        if place.search(line)
    ]
    assert found == []


def run_python(code: str, cwd: Path = ROOT) -> str:
    """Standard output of a fresh interpreter that sees this checkout."""
    code = f"import sys; sys.path.append({str(ROOT)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


BLOCK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""
OPTIONAL = {"triton", "transformers", "accelerate", "typer", "rich", "matplotlib", "gguf", "peft", "pytest"}


def handed_on(source: str) -> list[str]:
    """Names that a tile of a flattened loop hands to the next: assigned in its body, and before it or as parameters."""
    found = []
    for function in (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)):
        names = lambda node: {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for loop in (n for n in ast.walk(function) if isinstance(n, ast.For) and isinstance(n.iter, ast.Call)):
            if any(word.arg == "flatten" for word in loop.iter.keywords):
                inside = set().union(*map(names, loop.body))
                earlier = [n for n in ast.walk(function) if isinstance(n, ast.stmt) and (n.end_lineno or 0) < loop.lineno]
                before = {a.arg for a in function.args.args}.union(*map(names, earlier))
                found += [f"{function.name}: {name}" for name in sorted(inside & before)]
    return found


def test_tiles_of_flattened_loops_hand_nothing_on() -> None:
    """Triton 3.6 moves on after every step of the inner loop what one turn of a flattened loop hands to the next: wrong on a GPU
    alone, the interpreter knows no flattening."""
    assert {p.name: handed_on(p.read_text()) for p in (ROOT / "kernels").glob("*.py") if handed_on(p.read_text())} == {}
    planted = "def f(e, n):\n    a = 0\n    for t in tl.range(0, n, flatten=True):\n        b = e + a\n        e, a = b, b\n"
    assert handed_on(planted) == ["f: a", "f: e"]


def test_import_needs_only_the_dependencies() -> None:
    """macOS and Windows have no triton; transformers and the command line's libraries are extras."""
    code = BLOCK.format(names=OPTIONAL) + "import fusedblock; print(sorted({n.split('.')[0] for n in sys.modules} & %r))"
    assert run_python(code % OPTIONAL) == "[]"


def test_swap_works_without_triton() -> None:
    code = BLOCK.format(names={"triton"}) + """
import runpy
sys.argv = ["swap_and_generate.py"]
runpy.run_path("examples/swap_and_generate.py", run_name="__main__")
assert "triton" not in sys.modules
"""
    output = run_python(code)
    assert "same 16 greedy tokens: True" in output and " 0 fallback" in output


def test_import_leaves_heavy_libraries_alone() -> None:
    heavy = {"transformers", "matplotlib", "rich", "typer", "accelerate"}
    code = "import torch, sys; before = set(sys.modules); import fusedblock; new = set(sys.modules) - before; "
    code += "print(sorted({name.split('.')[0] for name in new} & %r))"
    assert run_python(code % heavy) == "[]"


def test_import_time() -> None:
    code = "import time, torch; start = time.perf_counter(); import fusedblock; print(time.perf_counter() - start)"
    assert min(float(run_python(code)) for _ in range(3)) < 1.0


def test_public_names_exist_and_have_docstrings() -> None:
    code = """
import fusedblock, json
public = {name: getattr(fusedblock, name) for name in fusedblock.__all__}
print(json.dumps([[name for name, value in public.items() if callable(value) and not value.__doc__], sorted(public)]))
"""
    undocumented, public = json.loads(run_python(code))
    assert undocumented == []
    assert {"fuse", "unfuse", "explain", "load_safetensors", "save_safetensors", "measure"} <= set(public)
    assert {"rms_norm", "qkv_rope", "attention", "linear", "gated_mlp"} <= set(public)


def tool(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff() -> None:
    tool("ruff", "check", "--quiet", *(tree for tree in TREES if (ROOT / tree).is_dir()))


def test_mypy() -> None:
    tool("mypy")


@pytest.mark.slow
def test_wheel_holds_the_kernels_and_takes_no_other_name(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("fusedblock", "kernels"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    tool("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source))
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    expected = {"fusedblock/py.typed"} | {
        "fusedblock/" + path.relative_to(ROOT / ("fusedblock" if path.is_relative_to(ROOT / "fusedblock") else ".")).as_posix()
        for path in python_files(ROOT, "fusedblock", "kernels")
    }
    assert {name for name in names if ".dist-info/" not in name} == expected

"""kernels/_gluon.py gives Gluon's names on every known triton, and says why where it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusedblock.kernels import _gluon, _lang

ROOT = Path(__file__).resolve().parent.parent

KERNEL = """
from fusedblock.kernels import _gluon
from fusedblock.kernels._gluon import *
from fusedblock.kernels._gluon import gl, gluon, mbarrier, tma_load, warpgroup_mma, bar_sync, allocate_barriers, descriptor

@gluon.jit(do_not_specialize=["n"])
def kernel(x, n, BLOCK: gl.constexpr):
    pass

print(_gluon.AVAILABLE, _gluon.REASON)
try:
    kernel[(1,)](0, 1, BLOCK=2)
except ImportError as error:
    print(error)
"""
NO_TRITON = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""
NEWER = "import triton; triton.__version__ = '3.12.1'"
OTHER = "import triton.experimental.gluon.language.nvidia.hopper as hopper; del hopper.warpgroup_mma"


def test_available_here():
    assert (_gluon.AVAILABLE, _gluon.REASON) == (True, "")
    assert _lang.VERSION in _gluon.VERSIONS


@pytest.mark.parametrize("before, reason", [
    (NO_TRITON, "triton is not installed here"),
    (NEWER, "the Gluon of triton 3.12 is not known here, only that of 3.6 to 3.9"),
    (OTHER, "has another Gluon than expected: cannot import name 'warpgroup_mma'"),
])  # fmt: skip
def test_a_reason_where_kernels_cannot_be_compiled(before: str, reason: str):
    code = f"import sys; sys.path.append({str(ROOT)!r})\n{before}\n{KERNEL}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said, error = done.stdout.strip().splitlines()
    assert said.startswith("False ") and reason in said
    assert error == f"fusedblock: this kernel needs Gluon: {said.removeprefix('False ')}"


@pytest.mark.parametrize("dtype, bits", [(torch.bfloat16, 16), (torch.float32, 32), (torch.float8_e4m3fn, 8)])
def test_descriptors(dtype: torch.dtype, bits: int):
    t = torch.empty(100, 256, dtype=dtype)
    made = _gluon.descriptor(t, [64, 1024 // bits])
    assert (made.block_shape, made.layout.element_bitwidth, made.layout.swizzle_byte_width) == ([64, 1024 // bits], bits, 128)
    assert _gluon.descriptor(t, (8, 128), swizzle=False).layout.swizzle_byte_width == 0

"""What the interpreter remembers about types and shapes is what triton says of them each time."""

from __future__ import annotations

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.interpreter import TensorHandle

from fusedblock.interpret import quick
from fusedblock.interpret.interpreter import _patched

_SCALARS = [tl.float32, tl.bfloat16, tl.int1, tl.int64, tl.float8e4nv, tl.pointer_type(tl.float16), tl.pointer_type(tl.int8)]


def _described(scalar, shape):
    """All that triton says of a block, or of a scalar without axes."""
    kind = tl.block_type(scalar, list(shape)) if shape else scalar
    t = tl.tensor(TensorHandle(np.zeros(shape or 1, stock._get_np_dtype(kind)), scalar), kind)
    block = (kind.shape, kind.numel, kind.element_ty) if shape else ()
    return {"fields": sorted(vars(t)), "shape": [s.value for s in t.shape], "numel": t.numel.value, "dtype": t.dtype,
            "type": kind, "name": str(kind), "numpy": t.handle.data.dtype, "block": block, "text": str(t)}  # fmt: skip


@pytest.mark.parametrize("shape", [(), (8,), (4, 8), (8, 4)])
def test_types_and_shapes_are_as_triton_describes_them(shape):
    """Twice, the second time from memory; types of one name but other objects, and pointers, among them."""
    expected = [_described(scalar, shape) for scalar in _SCALARS]
    with _patched(quick.changes()):
        for _ in range(2):
            for scalar, said in zip(_SCALARS, expected):
                found = _described(scalar, [tl.constexpr(n) for n in shape])
                assert found == said and found["dtype"] is scalar
    assert [_described(scalar, shape) for scalar in _SCALARS] == expected


def test_equality_of_shapes_and_constants():
    numbers = [tl.constexpr(4), 4, [tl.constexpr(4), 2], (tl.constexpr(1), 2), "4", None]
    shapes = [tl.core.tuple([tl.constexpr(n) for n in shape]) for shape in ((4, 8), (4,))]
    pairs = [(a, b) for a in shapes for b in (*shapes, tl.core.tuple([8, 4]), (4, 8), [4], tl.constexpr((4, 8)))]
    unwrapped, equal = [tl.core._unwrap_if_constexpr(n) for n in numbers], [(a == b).value for a, b in pairs]
    assert len(set(equal)) == 2
    with _patched(quick.changes()):
        assert [tl.core._unwrap_if_constexpr(n) for n in numbers] == unwrapped
        assert [(a == b).value for a, b in pairs] == equal

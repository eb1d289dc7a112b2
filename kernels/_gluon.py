"""The only import of Gluon, whose names change with every minor version of triton: here they are the same from 3.6 to 3.9.

Kernels take all of it from here: `gluon.jit`, the language `gl`, `mbarrier` (init, expect, arrive, wait, MBarrierLayout),
`warpgroup_mma`, `warpgroup_mma_wait`, `fence_async_shared`, and under names of ours what was renamed or is missing:

    tma_load, tma_store, tma_add, tma_store_wait    async_copy_*, then async_load, async_store, async_atomic_add
    copy_rows, copy_rows_arrive                     cp.async of a block by pointers, and the arrival of a thread's at an mbarrier
    block_barrier                                   thread_barrier, then barrier
    bar_sync, bar_arrive                            named barriers, which Gluon does not have
    add_four, reciprocal, one_less_square           vector adds to memory and instructions of arithmetic, likewise
    allocate_barriers                               an array of mbarriers, initialised
    ragged_rows                                     rows of a segment, for TMA that ends with it

AVAILABLE says whether Gluon kernels can be compiled here. Where they cannot, REASON says why and every name is a stub.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from . import _lang
from ._launch import tma_strides

VERSIONS = ((3, 6), (3, 7), (3, 8), (3, 9))
REASON = ""

if not _lang.AVAILABLE:
    REASON = "triton is not installed here"
elif _lang.VERSION not in VERSIONS:
    REASON = f"the Gluon of triton {'.'.join(map(str, _lang.VERSION))} is not known here, only that of 3.6 to 3.9"
else:
    try:
        from triton._C.libtriton import ir
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
        from triton.experimental.gluon.language.nvidia.hopper import (
            async_copy,
            fence_async_shared,
            mbarrier,
            tma,
            warpgroup_mma,
            warpgroup_mma_wait,
        )
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        if _lang.VERSION >= (3, 8):
            tma_load, tma_store, tma_add = tma.async_load, tma.async_store, tma.async_atomic_add
        else:
            tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

            @builtin
            def tma_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
                """Add a block of shared memory to global memory, where it lies inside; like tma_store otherwise."""
                coord = _semantic._convert_to_ir_values(coord, require_i64=False)
                _semantic.builder.create_async_tma_reduce(
                    ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle
                )

        tma_store_wait = tma.store_wait
        block_barrier = gl.barrier if _lang.VERSION >= (3, 7) else gl.thread_barrier
    except (ImportError, AttributeError) as error:
        REASON = f"triton {_lang.triton.__version__} has another Gluon than expected: {error}"

AVAILABLE = not REASON
if not AVAILABLE:
    gluon = gl = mbarrier = tma = builtin = _lang.Stub(f"this kernel needs Gluon: {REASON}")
    tma_load = tma_store = tma_add = tma_store_wait = block_barrier = gl
    async_copy = fence_async_shared = warpgroup_mma = warpgroup_mma_wait = TensorDescriptor = gl


def _named_barrier(verb: str, barrier: Any, threads: Any, semantic: Any) -> None:
    asm = f"bar.{verb} $1, {_unwrap_if_constexpr(threads)}; mov.u32 $0, 0;"
    operand = semantic.to_tensor(barrier)
    gl.inline_asm_elementwise(asm, "=r,r", [operand], dtype=gl.int32, is_pure=False, pack=1, _semantic=semantic)


@builtin
def bar_sync(barrier: Any, threads: Any, _semantic: Any = None) -> None:
    """Wait at named barrier `barrier` (an int, or a scalar) until `threads` threads (a constant) are there, these included.

    Triton takes the low ids: one for the block and one for each worker partition of warp_specialize, and one more.
    """
    _named_barrier("sync", barrier, threads, _semantic)


@builtin
def bar_arrive(barrier: Any, threads: Any, _semantic: Any = None) -> None:
    """Arrive as bar_sync does, but go on at once: cheaper than mbarrier.arrive, before which triton synchronises a partition."""
    _named_barrier("arrive", barrier, threads, _semantic)


@builtin
def copy_rows(memory: Any, pointers: Any, mask: Any, _semantic: Any = None) -> None:
    """Start to copy a block, zeros where not masked in. It lands as a thread's own stores do: wgmma needs a fence after it."""
    copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
    copy(memory, pointers, mask, _semantic=_semantic)


@builtin
def copy_rows_arrive(barrier: Any, _semantic: Any = None) -> None:
    """Every thread of the partition arrives once, when all that it has copied so far has landed."""
    async_copy.mbarrier_arrive(barrier, increment_count=False, _semantic=_semantic)


@gluon.jit
def reciprocal(x):
    """1 / x in one instruction, to within a unit in the last place; 0 where x is infinite."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def one_less_square(x):
    """1 - x * x, but at least 0, in one instruction; 0 where x is NaN."""
    asm: gl.constexpr = "{ .reg .f32 y; neg.f32 y, $1; fma.rn.sat.f32 $0, y, $1, 0f3F800000; }"
    return gl.inline_asm_elementwise(asm, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def hold(x):
    """Products that come after this are issued after x, which is fp32, not negative, and held by a thread in fours: ptxas moves
    them past all but a store. This store never happens, which ptxas does not know."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; or.b32 t, $4, $5; or.b32 t, t, $6; or.b32 t, t, $7; setp.lt.s32 p, t, 0;"
        " @p st.shared.u32 [t], t; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; }",
        "=r,=r,=r,=r,f,f,f,f",
        [x],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def add_four(pointers, values):
    """Add fp32 values to memory in whatever order. A thread must hold them in groups of four with adjacent addresses."""
    addresses = pointers.to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11};"
        "mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f",
        [addresses, values],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def allocate_barriers(N: gl.constexpr, COUNT: gl.constexpr):
    """N mbarriers (take one by .index) that each complete a phase after COUNT arrivals.

    One array for one kind: triton puts a barrier of the partition between two waits on barriers of the same allocation.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def ragged_rows(start, length, row):
    """Where row `row` of rows [start, start + length) lies along the first three axes of a ragged descriptor: what a block there
    would have past the last of them lies outside of the tensor."""
    return 1073741824, start + length, 1073741824 - length + row


@functools.lru_cache(maxsize=256)
def _layout(block: tuple[int, ...], name: str, swizzle: bool) -> Any:
    dtype = getattr(gl, {"float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5"}.get(name, name))
    if swizzle:
        return gl.NVMMASharedLayout.get_default_for(list(block), dtype)
    return gl.NVMMASharedLayout(0, dtype.primitive_bitwidth, len(block))


def descriptor(t: torch.Tensor, block: Sequence[int], swizzle: bool = True, ragged: bool = False) -> Any:
    """A TensorDescriptor that moves blocks of this shape, with the widest swizzle they allow, or none.

    t: last axis contiguous, other strides and the address multiples of 16 bytes (asserted by triton).
    ragged: of t `batch rows ...` whose rows lie one after the other, for blocks (1, *block) at corners (*ragged_rows(...), ...).
    Addresses are modulo 2**64, and 2**30 along the first axis takes away what 2**30 rows along the third add (as
    triton.tools.ragged_tma does it).
    """
    block, shape, strides = list(block), list(t.shape), tma_strides(t)
    if ragged:
        block = [1, *block]
        shape = [0x7FFF0000, 0x7FFF0000, 2**30, *shape[2:]]
        strides = [2**34 - strides[1], strides[1], *strides[1:]]
    return TensorDescriptor(t, shape, strides, block, _layout(tuple(block), str(t.dtype)[6:], swizzle))

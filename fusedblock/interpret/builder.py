"""Triton's numpy builder (one method per operation of the IR) with numbers and memory as on a GPU.

bf16 is held as its 16 bits and computed in fp32; fp32 dots round their operands to TF32 unless the kernel asks for "ieee";
min and max skip NaN; every access is checked against the tensor arguments of the launch and shown to the access hooks.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from triton._C.libtriton import ir
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as stock
from triton.runtime.interpreter import TensorHandle

from ..kernels._lang import tl
from .memory import Access, Kind, Launch

AccessHook = Callable[[Access], None]
access_hooks: list[AccessHook] = []


def decode(data: np.ndarray) -> np.ndarray:
    """bf16 bits -> fp32."""
    return (data.astype(np.uint32) << 16).view(np.float32)


def encode(data: np.ndarray) -> np.ndarray:
    """Numbers -> bf16 bits, to nearest even."""
    values = np.ascontiguousarray(data, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).reshape(np.shape(data))


def _to_tf32(data: np.ndarray) -> np.ndarray:
    """fp32 -> the nearest value with TF32's 10 mantissa bits."""
    bits = np.ascontiguousarray(data).view(np.uint32)
    rounded = ((bits + 0x0FFF + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(data), rounded, data)


def _is_bf16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar.is_bf16()


def wide(handle: TensorHandle) -> np.ndarray:
    """The numbers a handle stands for, bf16 as fp32."""
    return decode(handle.data) if _is_bf16(handle) else handle.data


def _handle(data: np.ndarray, dtype: Any) -> TensorHandle:
    """data, in the precision it was computed in, as a tensor of dtype."""
    if dtype.is_bf16() and data.dtype != np.bool_:
        data = encode(data)
    return TensorHandle(data, dtype)


def _as_bool(mask: Any) -> Any:
    """A mask as numpy bools: triton 3.9 computes `block & scalar` of int1 in a wider integer and then refuses it."""
    if isinstance(mask, TensorHandle) and mask.data.dtype != np.bool_:
        return TensorHandle(mask.data.astype(np.bool_), tl.int1)
    return mask


class Builder(stock.InterpreterBuilder):
    """Triton's numpy builder with bf16, rounding, NaN rules and memory accesses as on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        precisions = ("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6")
        # Without debug, triton's check of sums and products for overflow computes its condition and then drops it.
        self.options: Any = dataclasses.replace(
            stock.InterpreterOptions(), allowed_dot_input_precisions=precisions, sanitize_overflow=False
        )
        self.float_type: Any = tl.float32  # of float arguments and constants
        self.launch: Launch | None = None

    # -- numbers

    def get_bf16(self, value: float) -> TensorHandle:
        return _handle(np.array([value], np.float32), tl.bfloat16)

    def cast_impl(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        if dst_type.scalar.is_bf16():
            return _handle(wide(src), tl.bfloat16)
        if _is_bf16(src):
            src = TensorHandle(decode(src.data), tl.float32)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: TensorHandle, dst_type: Any, rounding_mode: Any) -> TensorHandle:
        plain = all(t.scalar.name in ("bf16", "fp16", "fp32", "fp64") for t in (src.dtype, dst_type))
        if plain and rounding_mode != ir.ROUNDING_MODE.RTZ:  # the stock rounding is half up, not half to even
            return self.cast_impl(src, dst_type)
        return super().create_fp_to_fp(src, dst_type, rounding_mode)

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Any) -> TensorHandle:
        if _is_bf16(lhs):
            return _handle(op(decode(lhs.data), decode(rhs.data)), tl.bfloat16)
        return super().binary_op(lhs, rhs, op)

    def unary_op(self, arg: TensorHandle, op: Any) -> TensorHandle:
        return _handle(op(wide(arg)), arg.dtype.scalar)

    # Without PROPAGATE_NAN a GPU's min and max return the operand that is a number.
    def create_maxnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_minnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_clampf(self, arg: TensorHandle, lo: TensorHandle, hi: TensorHandle, propagate_nans: Any) -> TensorHandle:
        number = propagate_nans == ir.PROPAGATE_NAN.NONE
        low, high = (np.fmax, np.fmin) if number else (np.maximum, np.minimum)
        return self.binary_op(self.binary_op(arg, lo, low), hi, high)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        return _handle(wide(x) * wide(y) + wide(z), z.dtype.scalar)

    def create_dot(self, a: TensorHandle, b: TensorHandle, d: TensorHandle, input_precision: Any, *rest: Any) -> TensorHandle:
        if a.dtype.primitive_bitwidth == 8:
            return super().create_dot(a, b, d, input_precision, *rest)
        left, right = wide(a), wide(b)
        if a.dtype.is_fp32() and input_precision == ir.INPUT_PRECISION.TF32:
            left, right = _to_tf32(left), _to_tf32(right)
        # Summed in fp64: BLAS takes the rows at the edge of a block in another order (by the CPU), and equal rows would get
        # other bits by where they stand in a tile, which on matrix units they do not.
        sums = np.matmul(left.astype(np.float64), right.astype(np.float64)) + wide(d)
        return _handle(sums.astype(np.float32 if d.dtype.is_bf16() else d.data.dtype), d.dtype.scalar)

    # -- memory

    def check_access(self, kind: Kind, ptrs: TensorHandle, mask: Any) -> None:
        """Check an access and tell the hooks. mask: a handle, a bool array or None."""
        launch = self.launch
        if launch is None:
            return
        live = np.asarray(ptrs.data)
        if mask is not None:
            live, keep = np.broadcast_arrays(live, mask.data if isinstance(mask, TensorHandle) else mask)
            live = live[keep.astype(bool)]
        if live.size == 0:
            return
        itemsize = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        x, y, z = self.grid_idx
        for region, offsets in launch.locate(live, itemsize, kind):
            if access_hooks:
                program = (z * launch.grid[1] + y) * launch.grid[0] + x
                access = Access(launch, program, kind, region, offsets, itemsize)
                for hook in access_hooks:
                    hook(access)

    # Loads and stores, plain and through descriptors, all end here; the trailing arguments differ between versions.
    def create_masked_load(self, ptrs: TensorHandle, mask: Any, *rest: Any, **options: Any) -> TensorHandle:
        self.check_access("load", ptrs, mask)
        return super().create_masked_load(ptrs, _as_bool(mask), *rest, **options)

    def create_masked_store(self, ptrs: TensorHandle, value: TensorHandle, mask: Any, *rest: Any, **options: Any) -> Any:
        self.check_access("store", ptrs, mask)
        return super().create_masked_store(ptrs, value, _as_bool(mask), *rest, **options)

    def create_atomic_cas(self, ptr: TensorHandle, *rest: Any) -> TensorHandle:
        self.check_access("atomic", ptr, None)
        return super().create_atomic_cas(ptr, *rest)

    def create_atomic_rmw(self, op: Any, ptr: TensorHandle, val: TensorHandle, mask: Any, sem: Any, scope: Any) -> TensorHandle:
        self.check_access("atomic", ptr, mask)
        if not (_is_bf16(val) and op == ir.ATOMIC_OP.FADD):
            return super().create_atomic_rmw(op, ptr, val, mask, sem, scope)
        addresses, addends, keep = np.broadcast_arrays(ptr.data, decode(val.data), mask.data)
        before = np.zeros(addresses.shape, np.uint16)
        for i in zip(*np.nonzero(keep)):  # one by one: an address may occur twice
            cell = np.frombuffer((ctypes.c_uint16 * 1).from_address(int(addresses[i])), np.uint16)
            before[i] = cell[0]
            cell[:] = encode(decode(cell) + addends[i])
        return TensorHandle(before, tl.bfloat16)

    def create_descriptor_reduce(
        self, kind: Any, desc: Any, value: TensorHandle, indices: Sequence[TensorHandle]
    ) -> TensorHandle:
        ptrs, mask = desc.materialize_pointers(indices)
        name = str(kind).rpartition(".")[2].upper()
        if name == "ADD" and value.dtype.scalar.is_floating():
            name = "FADD"
        keep = mask if isinstance(mask, TensorHandle) else TensorHandle(mask, tl.int1)
        return self.create_atomic_rmw(getattr(ir.ATOMIC_OP, name), ptrs, value, keep, ir.MEM_SEMANTIC.RELAXED, None)


builder = Builder()
semantic = TritonSemantic(builder)


class _FloatRules:
    """Reductions and scans: bf16 in fp32, NaN as a GPU's min and max treat it."""

    _NUMPY = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}

    def min_max(self, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        # The same result as nanmax and nanmin, but an all-NaN row (a masked one) is no warning.
        return super().min_max(input, self._NUMPY.get(val_reduce_op, val_reduce_op), idx_reduce_op)  # type: ignore[misc]

    def apply_impl(self, input: tuple[Any, ...]) -> Any:
        if not any(t.dtype.is_bf16() for t in input):
            return super().apply_impl(input)  # type: ignore[misc]
        results = super().apply_impl(tuple(_cast(t, tl.float32) if t.dtype.is_bf16() else t for t in input))  # type: ignore[misc]
        if not isinstance(results, (list, tuple)):
            return _cast(results, tl.bfloat16)
        return [_cast(r, tl.bfloat16) if t.dtype.is_bf16() else r for r, t in zip(results, input)]


class Reduce(_FloatRules, stock.ReduceOps):
    pass


class Scan(_FloatRules, stock.ScanOps):
    pass


def _cast(t: Any, dtype: Any) -> Any:
    kind = tl.block_type(dtype, list(t.shape)) if t.type.is_block() else dtype
    return tl.tensor(builder.cast_impl(t.handle, dtype), kind)


def scalar(value: Any, dtype: Any) -> Any:
    """A number as a tl.tensor without axes."""
    return tl.tensor(TensorHandle(np.array([value], stock._get_np_dtype(dtype)), dtype), dtype)

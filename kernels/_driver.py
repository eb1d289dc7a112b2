"""Recorded launches as the CUDA driver takes them: parameters packed once, addresses patched at every run.

triton's launcher parses every argument of every launch and calls two hooks in Python, some 5 us a launch. Launches that were
recorded differ from run to run in nothing but addresses. These lie side by side in one table, the rest beside them, and the
driver is given pointers into both.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from operator import add, itemgetter
from typing import Any

from . import _lang
from ._graphs import Graphs

# Formats of struct for triton's types of scalar arguments; bf16 and fp16 scalars do not occur.
_SCALARS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
            "fp32": "f", "f32": "f", "fp64": "d"}  # fmt: skip
_MAPS = 1024  # tensor maps kept for one argument: a model's layers share a program, each with its own weights


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((n, ctypes.c_uint) for n in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("attribute_count", ctypes.c_uint),
    )  # fmt: skip


@functools.cache
def _enqueue() -> Callable[..., int]:
    """cuLaunchKernelEx(config, function, parameters, extra)."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = [ctypes.c_void_p] * 4
    function.restype = ctypes.c_int
    return function


def _tensor_map(address: int, meta: dict[str, Any], shape: list[int], strides: list[int], padding: str) -> tuple[Any, int]:
    """An encoded CUtensorMap: its owner, and where it lies (the last 128 bytes of triton's object)."""
    utils = _lang.triton.runtime.driver.active.utils
    owner = utils.fill_tma_descriptor(
        address, meta["swizzle"], meta["elem_size"], _lang.tma_dtype(meta["elem_type"]), meta["block_size"], shape,
        strides, 1 if padding == "nan" else 0,
    )  # fmt: skip
    return owner, id(owner) + type(owner).__basicsize__ - 128


class _Map:
    """A descriptor argument: parameter `index` of `params` points to its tensor map; `stride`, if any, is its first stride."""

    def __init__(self, box: Any, meta: dict[str, Any], params: Any, index: int, stride: Any) -> None:
        self.slot, self.offset, self.itemsize = box.base.slot, box.base.offset, box.base.dtype.itemsize
        self.pair = None if box.pair is None else (box.pair.slot, box.pair.offset)
        self.box, self.meta, self.params, self.index, self.stride = box, meta, params, index, stride
        self.known: dict[Any, tuple[Any, int]] = {}

    def fill(self, base: Sequence[int]) -> None:
        key = address = base[self.slot] + self.offset
        strides = self.box.strides
        if self.pair is not None:
            distance = (base[self.pair[0]] + self.pair[1] - address) // self.itemsize
            strides, key = [distance, *strides[1:]], (address, distance)
            self.stride.value = distance
        found = self.known.get(key)
        if found is None:
            if len(self.known) >= _MAPS:
                self.known.clear()
            found = self.known[key] = _tensor_map(address, self.meta, self.box.shape, strides, self.box.padding)
        self.params[self.index] = found[1]


class Block:
    """The launches of a program, ready for the driver. Make it with `prepare`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stream: int | None = None
        self._places: dict[tuple[int, int], int] = {}  # (slot, offset) -> row of the table
        self._configs: list[_Config] = []
        self._calls: list[tuple[int, int, int]] = []
        self._maps: list[_Map] = []
        self._kept: list[Any] = []
        self._graphs = Graphs(self._lock)

    def _add(self, step: Any, table: Any) -> bool:
        """Take one more launch; False where it needs what only triton's launcher does."""
        compiled = step.compiled
        meta, signature = compiled.metadata, list(compiled.src.signature.values())
        values = (*step.args, *step.tail)
        plain = meta.num_ctas == 1 and not meta.launch_cooperative_grid and not meta.launch_pdl
        if not plain or meta.global_scratch_size or meta.profile_scratch_size or len(signature) != len(values):
            return False
        boxes = list(getattr(meta, "tensordesc_meta", None) or ())
        params: list[int] = []
        maps: list[tuple[Any, Any, int, Any]] = []

        def keep(form: str, value: Any) -> Any:
            held = ctypes.create_string_buffer(struct.pack(form, value), 8)
            self._kept.append(held)
            params.append(ctypes.addressof(held))
            return held

        for kind, value in zip(signature, values):
            if kind == "constexpr":
                continue
            if kind.startswith("tensordesc"):
                if not boxes or boxes[0].get("fp4_padded"):
                    return False
                params.append(0)
                at = len(params) - 1
                for n in value.shape:
                    keep("i", n)
                strides = [keep("q", n) for n in value.strides]
                maps.append((value, boxes.pop(0), at, ctypes.c_int64.from_buffer(strides[0])))
            elif kind[0] != "*" and kind in _SCALARS:
                keep(_SCALARS[kind], value)
            elif kind[0] == "*" and hasattr(value, "slot"):
                row = self._places.setdefault((value.slot, value.offset), len(self._places))
                params.append(ctypes.addressof(table) + 8 * row)
            elif kind[0] == "*" and hasattr(value, "data_ptr"):
                keep("Q", value.data_ptr())  # an absent tensor, or a constant, which the step keeps alive
            else:
                return False
        for _ in range(2):  # no scratch
            keep("Q", 0)
        array = (ctypes.c_void_p * len(params))(*params)
        warps, _, shared = compiled.packed_metadata
        config = _Config(*(*step.grid, 1, 1)[:3], 32 * warps, 1, 1, shared)
        self._configs.append(config)
        self._maps += [_Map(box, info, array, at, stride) for box, info, at, stride in maps]
        self._kept.append(array)
        self._calls.append((ctypes.addressof(config), compiled.function, ctypes.addressof(array)))
        return True

    def _seal(self, table: Any) -> None:
        slots, self._offsets = [slot for slot, _ in self._places], [offset for _, offset in self._places]
        self._table = table
        # itemgetter of one index gives a bare value.
        self._slots = itemgetter(*slots) if len(slots) > 1 else lambda base: [base[slot] for slot in slots]
        self._pack = struct.Struct(f"{len(slots)}Q").pack_into

    def run(self, base: Sequence[int], stream: int) -> int:
        """Enqueue on `stream` with the slots at these addresses; how many launches were: the rest are the caller's to make.

        None are while another thread is at it, and the driver may refuse one (a thread without a context, or a real error,
        both of which triton's launcher knows how to handle).
        """
        if not self._lock.acquire(False):
            return 0
        try:
            addresses = tuple(base)
            if self._graphs.run(addresses, stream):
                return len(self._calls)
            self._pack(self._table, 0, *map(add, self._slots(base), self._offsets))
            for box in self._maps:
                box.fill(base)
            done = self._launch(stream)
            if done == len(self._calls):
                self._graphs.keep(addresses, lambda on: self._launch(on) == done)
            return done
        finally:
            self._lock.release()

    def _launch(self, stream: int) -> int:
        if stream != self._stream:
            self._stream = None  # if this is interrupted
            for config in self._configs:
                config.stream = stream
            self._stream = stream
        enqueue, done = _enqueue(), 0
        for config_at, function, params in self._calls:
            if enqueue(config_at, function, params, None):
                break
            done += 1
        return done


def prepare(steps: Sequence[Any]) -> Block | None:
    """The steps of a program as a block; None where triton's own launcher has to make them."""
    addresses = sum(len(step.args) for step in steps)  # at most
    table = (ctypes.c_uint64 * max(addresses, 1))()
    block = Block()
    if not all(block._add(step, table) for step in steps):
        return None
    block._seal(table)
    return block

"""What the experts' kernels share: the index's arguments, gated activations, grouped tiles, and the table of configs.

A slot is (token, j), j < top_k; a row is a slot in the order of the experts. The index, int32, made on the device:

    indices  tokens top_k      expert of a slot            order    rows           flat slot of a row: token * top_k + j
    inverse  tokens top_k      row of a slot, -1: none      offsets  experts+1      first row of an expert; the last: end of rows
    tiles    max_tiles four    expert, first row, end row, number of valid tiles: of at most tile_rows rows of one expert
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ._lang import tl, triton
from ._launch import descriptor, tma_ready
from ._math import activate, activate_grad, check_activation, plain_activate, plain_activate_backward, sigmoid, tile_order
from ._moe_index import BY_LENGTH, FEW_TOKENS, by_length, height, max_tiles
from ._spec import Args, ShapeError, Sizes
from ._target import Target

INDEX = {"indices": "tokens top_k", "order": "rows", "inverse": "tokens top_k", "offsets": "bounds", "tiles": "max_tiles four"}
CLAMPED = "clamped_swish"  # (up + 1) * gate * sigmoid(alpha * gate), gate <= limit, -limit <= up <= limit


def check(op: str, sizes: Sizes, args: Args) -> dict[str, int]:
    """The further axes of an experts' op: ffn, gate_up = 2 * ffn; and of tokens whose number is known tile_rows as chosen, and
    max_tiles of these. Raises naming the argument that does not fit the others."""
    transposed = args["transposed"]
    hidden, (gate_up, k) = sizes["hidden"], sides(sizes, "gate_up", transposed)
    n, ffn = sides(sizes, "down", transposed)
    laid = "experts hidden gate_up" if transposed else "experts gate_up hidden"
    if k != hidden or gate_up % 2:
        shape = tuple(args["gate_up_weight"].shape)
        raise ShapeError(f"{op}: gate_up_weight has shape {shape}, expected ({laid}) with hidden={hidden} and an even gate_up")
    if n != hidden or 2 * ffn != gate_up:
        shape = tuple(args["down_weight"].shape)
        laid = "experts ffn hidden" if transposed else "experts hidden ffn"
        raise ShapeError(f"{op}: down_weight has shape {shape}, expected ({laid}) with hidden={hidden} and ffn={gate_up // 2}")
    for name, axis, width in (("gate_up_bias", "gate_up_out", gate_up), ("down_bias", "down_out", hidden)):
        if sizes.get(axis, width) != width:
            raise ShapeError(f"{op}: {name} has shape {tuple(args[name].shape)}, expected (experts {width})")
    check_gate(op, args["activation"], args["alpha"], args["limit"])
    return {"ffn": ffn, "gate_up": gate_up, **check_rows(op, sizes, args)}


def check_rows(op: str, sizes: Sizes, args: Args) -> dict[str, int]:
    """Of tokens whose number is known tile_rows as chosen, and max_tiles of these. Raises naming the argument of the index, or
    the weights, that does not fit the others."""
    rows, tile_rows = sizes["tokens"] * sizes["top_k"], args["tile_rows"]
    if sizes["rows"] != rows:
        raise ShapeError(f"{op}: order has {sizes['rows']} rows, expected tokens * top_k = {rows}")
    if sizes["bounds"] != sizes["experts"] + 1:
        raise ShapeError(f"{op}: offsets has {sizes['bounds']} elements, expected experts + 1 = {sizes['experts'] + 1}")
    if tile_rows not in TILE_ROWS and tile_rows not in BY_LENGTH:
        raise ValueError(f"{op}: tile_rows={tile_rows}, expected one of {TILE_ROWS}")
    most = max_tiles(rows, sizes["experts"], tile_rows)
    if (sizes["max_tiles"], sizes["four"]) != (most, 4):
        shape = tuple(args["tiles"].shape)
        raise ShapeError(f"{op}: tiles has shape {shape}, expected {(most, 4)} for tile_rows={tile_rows}")
    for name in INDEX:
        if name in args and args[name].dtype is not torch.int32:
            raise ValueError(f"{op}: {name} has dtype {args[name].dtype}, expected torch.int32")
    weights = args["weights"]
    if weights is not None and not weights.is_floating_point():
        raise ValueError(f"{op}: weights has dtype {weights.dtype}, expected a floating one")
    if not isinstance(rows, int):
        return {}
    tile_rows = height(sizes["tokens"], sizes["top_k"], sizes["experts"], tile_rows)
    return {"tile_rows": tile_rows, "max_tiles": max_tiles(rows, sizes["experts"], tile_rows)}


def index_of(op: str, index: Any) -> tuple[Tensor, ...]:
    """The tensors of an index. Raises TypeError if it is anything else."""
    parts, several = tuple(INDEX)[1:], isinstance(index, (tuple, list))
    if not several or len(index) != len(parts) or not all(isinstance(t, Tensor) for t in index):
        of = f" of {len(index)}: {', '.join(type(t).__name__ for t in index)}" if several else ""
        raise TypeError(f"{op}: index is a {type(index).__name__}{of}; expected the tensors {', '.join(parts)}")
    return tuple(index)


def check_gate(op: str, activation: str, alpha: float, limit: float) -> None:
    """Raises ValueError naming the number of the gate that no kernel takes."""
    check_activation(op, activation, more=(CLAMPED,))
    for name, number in (("alpha", alpha), ("limit", limit)):
        if not abs(number) < float("inf"):  # which torch.compile traces, unlike math.isfinite
            raise ValueError(f"{op}: {name}={number}, expected a finite number")
    if activation == CLAMPED and limit <= 0:
        raise ValueError(f"{op}: limit={limit}, expected a positive number for {CLAMPED}")


def sides(sizes: Sizes, name: str, transposed: bool) -> tuple[int, int]:
    """(out, in) features of a weight stored `experts out in`, or transposed `experts in out`."""
    a, b = sizes[f"{name}_rows"], sizes[f"{name}_columns"]
    return (b, a) if transposed else (a, b)


def touched(sizes: Sizes, args: Args) -> float:
    """Experts with a row: counted in the index, or where it has no values their expectation for even routing."""
    counts = _rows_per_expert(args)
    if counts is not None:
        return int((counts > 0).sum())
    return expected_experts(sizes["experts"], sizes["top_k"], sizes["tokens"])


def expected_experts(experts: int, top_k: int, tokens: int) -> float:
    """How many experts have a token, on average, where each is as likely to be among a token's top_k."""
    return experts * (1.0 - (1.0 - top_k / max(experts, 1)) ** tokens)


def valid_tiles(sizes: Sizes, args: Args) -> int:
    """Likewise the tiles that have rows."""
    counts, rows = _rows_per_expert(args), sizes["tile_rows"]
    if counts is not None:
        return int(((counts + rows - 1) // rows).sum())
    return round(max(touched(sizes, args), sizes["rows"] / rows))


def _rows_per_expert(args: Args) -> Tensor | None:
    offsets = args["offsets"]
    return offsets.diff() if type(offsets) is Tensor and not offsets.is_meta else None


# ---- configs -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Of a grouped product; the tile's rows are the index's tile_rows.

    swap: the weight is the operand whose rows wgmma wants 64 of; the other may then have as few as 16.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool = False  # operands whose rows lie together come by descriptors; then persistent, per_sm programs an SM
    swap: bool = False
    split: int = 1  # the epilogue runs in this many parts of the columns
    per_sm: int = 1
    group: int = 8
    block_m: int = 0  # of the weight gradients only
    unrolled: bool = False  # of one token only: the loop over the long axis, where it is short
    hopper: bool = False  # by _moe_hopper.py, where that takes the operands


TILE_ROWS = (16, 32, 64, 128)
# Kinds: "gate_up" (block_n counts gate and up together), "down" and "grad_rows" (grad of x's rows), "grad_hidden" (through the
# down product and the activation); and, whatever the tile rows, "grad_weight" (block_m of the gathered operand) and, for one
# token, "vector" (gate and up; block_k of the long axis) and "vector_down" (block_k of it and of the slots together).
Table = dict[str, Any]
# H200, 2026-12-01, CUDA graphs, whole block with its router, ms beside the best of transformers' experts: E128 k8 H2048 I768
# T16384 2.11 (6.61), T4096 0.67 (1.94), T512 0.333 (0.629), T64 0.31 (0.54), T16 0.194 (0.375), T1 0.0292 (0.099); E8 k2 H4096
# I14336 T16384 16.4 (24.9), T4096 4.32 (6.44), T512 0.982 (1.59), T64 0.671 (1.14), T1 0.171 (0.403). With the backward T16384
# 6.7 (17.8) and 59.1 (72), T4096 2.39 (5.29) and 14.1 (18.9). Other tiles that were timed:
# benchmarks/results/moe-choices-*.json. Programmatic dependent launch was tried: 1 % quicker with 2 to 512 tokens of the first,
# 4 % slower with one and 1 to 3 % with the second's.
_VECTOR: Table = {
    "vector": Config(4, 512, 4, 4, unrolled=True), "vector_down": Config(4, 2048, 4, 4, unrolled=True),
}
_SM90: Table = {
    "gate_up": {
        16: Config(128, 128, 4, 3, tma=True, swap=True, per_sm=2), 32: Config(128, 128, 4, 3, tma=True, swap=True, per_sm=2),
        64: Config(256, 64, 8, 4, tma=True), 128: Config(256, 64, 8, 4, tma=True, hopper=True),
    },
    "down": {
        16: Config(64, 128, 4, 4, tma=True, swap=True, per_sm=2), 32: Config(64, 128, 4, 4, tma=True, swap=True, per_sm=2),
        64: Config(128, 128, 4, 3, tma=True, per_sm=2), 128: Config(256, 64, 8, 4, tma=True, hopper=True),
    },
    "grad_rows": {
        16: Config(64, 64, 4, 4, swap=True), 32: Config(64, 64, 4, 4, swap=True), 64: Config(128, 64, 4, 4, tma=True, per_sm=2),
        128: Config(256, 64, 8, 4, tma=True, hopper=True),
    },
    "grad_hidden": {
        16: Config(64, 64, 4, 4, swap=True), 32: Config(64, 64, 4, 4, swap=True), 64: Config(128, 64, 4, 4, tma=True, split=4),
        128: Config(256, 64, 8, 4, tma=True, split=8),
    },
    # Of these stages, one level is the index's: three buffers of operands.
    "grad_weight": Config(256, 64, 8, 5, tma=True, block_m=128),
    **_VECTOR,
}  # fmt: skip
# A100: not measured, chosen by registers and shared memory (a "vector" of 4 rows spills).
_SM80: Table = {
    "gate_up": {16: Config(64, 128, 4, 4), 32: Config(64, 64, 4, 4), 64: Config(128, 64, 4, 3), 128: Config(128, 32, 8, 4)},
    "down": {16: Config(64, 128, 4, 4), 32: Config(64, 64, 4, 4), 64: Config(128, 64, 4, 3), 128: Config(128, 32, 8, 4)},
    "grad_rows": {16: Config(64, 64, 4, 4), 32: Config(64, 64, 4, 4), 64: Config(128, 64, 4, 3), 128: Config(128, 32, 8, 4)},
    "grad_hidden": {16: Config(64, 64, 4, 4), 32: Config(64, 64, 4, 4, split=2), 64: Config(64, 64, 4, 3, split=2),
                    128: Config(64, 32, 8, 4, split=2)},
    "grad_weight": Config(128, 32, 8, 4, block_m=128),
    "vector": Config(2, 512, 4, 4), "vector_down": Config(2, 2048, 4, 3),
}  # fmt: skip


def _changed(table: Table, **most: int) -> Table:
    """The table with no value above `most`."""

    def cut(c: Config) -> Config:
        return replace(c, **{name: min(getattr(c, name), value) for name, value in most.items()})

    return {k: {m: cut(c) for m, c in v.items()} if isinstance(v, dict) else cut(v) for k, v in table.items()}


_SM86 = {**_changed(_SM80, num_stages=3, block_k=64), **_VECTOR}  # 99 KB
_SM100 = {**_changed(_SM80, block_k=64), **_VECTOR}
_GFX942 = {**_changed(_SM80, num_stages=2, block_k=64), **_changed(_VECTOR, num_stages=2)}
# fp32 runs on the FMA pipes (no tf32): small tiles, few registers.
_FP32: Table = {
    **dict.fromkeys(("gate_up", "down", "grad_rows", "grad_hidden"), {
        m: Config(64, 32, 8 if m >= 64 else 4, 2) for m in TILE_ROWS
    }),
    "grad_weight": Config(64, 32, 8, 2, block_m=64),
    "vector": Config(4, 256, 4, 2), "vector_down": Config(2, 1024, 4, 2),
}  # fmt: skip
_TABLES = {"sm_80": _SM80, "sm_86": _SM86, "sm_90": _SM90, "sm_100": _SM100, "gfx942": _GFX942}


def table(itemsize: int, target: Target) -> Table:
    """The configs that itemsize and target choose from."""
    return _FP32 if itemsize >= 4 else _TABLES[target.family]


def choose_tile_rows(tokens: int, top_k: int, experts: int, itemsize: int, target: Target) -> int:
    """The tile_rows to ask the index for; in a trace one that leaves the choice to the ops."""
    if target.batch_invariant:
        return 64
    most = 64 if itemsize >= 4 else 128
    if torch.compiler.is_compiling() or isinstance(tokens, torch.SymInt):
        return -most
    return by_length(tokens, top_k, experts, most)


def configure(kind: str, tile_rows: int, itemsize: int, target: Target) -> Config:
    found = table(itemsize, target)[kind]
    c = found[tile_rows] if isinstance(found, dict) else found
    return _by_pointers(c) if target.batch_invariant else c


def form(tokens: int, tile_rows: int, transposed: bool, target: Target) -> str:
    """How the forward runs: "vector" (one token, two launches), "few" (two), "grouped" (three)."""
    if target.batch_invariant or tokens > FEW_TOKENS or tile_rows > 64:
        return "grouped"
    return "vector" if tokens == 1 and not transposed else "few"  # sums over rows want them dense


def usable(c: Config, *operands: Tensor) -> Config:
    """c, or its pointer form where an operand's address or strides rule descriptors out."""
    return _by_pointers(c) if c.tma and not tma_ready(*operands) else c


def _by_pointers(c: Config) -> Config:
    return replace(c, tma=False, block_n=min(c.block_n, 128), per_sm=1) if c.tma else c


def options(c: Config) -> dict[str, Any]:
    """The constexprs and compile options that every grouped kernel takes from its config."""
    return {"BN": c.block_n, "BK": c.block_k, "GROUP": c.group, "TMA": c.tma, "SWAP": c.swap, "STAGES": c.num_stages,
            "num_warps": c.num_warps, "num_stages": c.num_stages}  # fmt: skip


def programs(tiles: int, c: Config, target: Target) -> int:
    return min(tiles, target.sms * c.per_sm) if c.tma else tiles


def pair_operand(weight: Tensor, c: Config, transposed: bool, interleaved: bool) -> Any:
    """gate_up_weight as _gate_up_kernel takes it; a descriptor's box fetches the gate and up rows of a tile together."""
    if not c.tma:
        return weight
    if interleaved:
        return expert_operand(weight, c.block_n, c.block_k, c, transposed)
    halves = weight.unflatten(1, (2, weight.shape[1] // 2))
    return descriptor(halves, [1, 2, c.block_n // 2, c.block_k])


def expert_operand(weight: Tensor, rows: int, columns: int, c: Config, transposed: bool = False) -> Any:
    """`experts rows columns` for boxes of one expert; transposed: stored `experts columns rows`."""
    return descriptor(weight, [1, columns, rows] if transposed else [1, rows, columns]) if c.tma else weight


# ---- gated activations ---------------------------------------------------------------------------------------------------------


def plain_halves(gate_up: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """gate and up of `... gate_up`: views."""
    if interleaved:
        return gate_up[..., 0::2], gate_up[..., 1::2]
    return gate_up.chunk(2, -1)  # type: ignore[return-value]


def plain_join(gate: Tensor, up: Tensor, interleaved: bool) -> Tensor:
    return torch.stack((gate, up), -1).flatten(-2) if interleaved else torch.cat((gate, up), -1)


def plain_gated(gate: Tensor, up: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    if activation != CLAMPED:
        return plain_activate(gate, activation) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def plain_gated_backward(
    d: Tensor, gate: Tensor, up: Tensor, activation: str, alpha: float, limit: float
) -> tuple[Tensor, Tensor]:
    """d times the derivatives with respect to gate and up."""
    if activation != CLAMPED:
        return plain_activate_backward(d * up, gate, activation), d * plain_activate(gate, activation)
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
    s = torch.sigmoid(alpha * g)
    d_gate = d * (u + 1) * s * (1 + alpha * g * (1 - s))
    return torch.where(gate > limit, 0.0, d_gate), torch.where(up.abs() > limit, 0.0, d * g * s)


def clamp_numbers(args: Args) -> tuple[float | None, float | None]:
    """alpha and limit, where the activation has them."""
    return (args["alpha"], args["limit"]) if args["activation"] == CLAMPED else (None, None)


def plain_groups(offsets: Tensor) -> list[tuple[int, slice]]:
    """(expert, its rows) of the experts that have some. Waits for the device."""
    bounds = offsets.tolist()
    return [(e, slice(a, b)) for e, (a, b) in enumerate(zip(bounds, bounds[1:])) if a < b]


def plain_combine(y: Tensor, weights: Tensor | None, inverse: Tensor) -> Tensor:
    """Sum of each token's rows, by its weights; y `rows hidden`."""
    picked = y[inverse.clamp(min=0)]
    picked = picked if weights is None else picked * weights[..., None]
    return torch.where((inverse >= 0)[..., None], picked, 0.0).sum(1)  # of slots without a row not even an infinite weight counts


@triton.jit
def _clamped(x, limit):
    """min(x, limit); NaN stays."""
    return tl.where(x > limit, limit, x)


@triton.jit
def gated(gate, up, alpha, limit, ACT: tl.constexpr):
    if ACT == "clamped_swish":
        g = _clamped(gate, limit)
        u = -_clamped(-_clamped(up, limit), limit)
        return (u + 1.0) * g * sigmoid(alpha * g)
    else:
        return activate(gate, ACT) * up


@triton.jit
def gated_grad(d, gate, up, alpha, limit, ACT: tl.constexpr):
    """(gated(gate, up), d times its derivative by gate, by up)."""
    if ACT == "clamped_swish":
        g = _clamped(gate, limit)
        u = -_clamped(-_clamped(up, limit), limit)
        s = sigmoid(alpha * g)
        gs = g * s
        by_gate = tl.where(gate > limit, 0.0, d * (u + 1.0) * (s + alpha * gs * (1.0 - s)))
        by_up = tl.where((up > limit) | (up < -limit), 0.0, d * gs)
        return (u + 1.0) * gs, by_gate, by_up
    else:
        a = activate(gate, ACT)
        return a * up, d * up * activate_grad(gate, ACT), d * a


# ---- grouped tiles -------------------------------------------------------------------------------------------------------------


@triton.jit
def tile_at(tiles, t, num_m, num_n, GROUP: tl.constexpr):
    """(expert, first row, end row, column tile) of tile number t."""
    m, n = tile_order(t, num_m, num_n, GROUP)
    at = tiles + m * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), n


@triton.jit
def row_pointers(base, offset, BK: tl.constexpr):
    """To the first BK columns of rows at these offsets: made ahead of the loop over columns, else nothing prefetches them."""
    return base + offset[:, None] + tl.arange(0, BK)[None, :]


@triton.jit
def take(pointers, k, COLS, BK: tl.constexpr, EVEN: tl.constexpr):
    """Columns [k, k + BK) of rows, zero from COLS on."""
    if EVEN:
        return tl.load(pointers + k)
    else:
        return tl.load(pointers + k, (k + tl.arange(0, BK) < COLS)[None, :], other=0.0)


@triton.jit
def slot_start(slot, stride, COLS, TOP_K: tl.constexpr, WIDTH: tl.constexpr):
    """Where a slot's first column lies in `tokens top_k COLS` or, with a WIDTH, `tokens heads top_k WIDTH`; stride: of tokens."""
    return (slot // TOP_K).to(tl.int64) * stride + slot % TOP_K * (WIDTH if WIDTH > 0 else COLS)


@triton.jit
def slot_columns(c, TOP_K: tl.constexpr, WIDTH: tl.constexpr):
    """How far a slot's columns c lie from its first."""
    if WIDTH > 0:
        return c + c // WIDTH * ((TOP_K - 1) * WIDTH)
    else:
        return c


@triton.jit
def take_heads(at, k, COLS, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):
    """take, of slots whose columns lie in heads; at [slots, 1]: their first."""
    c = k + tl.arange(0, BK)
    if EVEN:
        return tl.load(at + slot_columns(c, TOP_K, WIDTH)[None, :])
    else:
        return tl.load(at + slot_columns(c, TOP_K, WIDTH)[None, :], (c < COLS)[None, :], other=0.0)


@triton.jit
def store_slots(y, at, col0, value, live, COLS, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr):
    """value [BM, BN] to columns from col0 on of the slots at `at` of y (see slot_start), where live."""
    c = col0 + tl.arange(0, BN)
    at = (y + at)[:, None] + slot_columns(c, TOP_K, WIDTH)[None, :]
    tl.store(at, value.to(y.dtype.element_ty), live[:, None] & (c < COLS)[None, :])


@triton.jit
def clear_slots(y, inverse, TOKENS, COLS, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros, of this program's share, to the slots of a dense y that have no row."""
    for s in range(tl.program_id(0) * BLOCK, TOKENS * TOP_K, tl.num_programs(0) * BLOCK):
        slot = s + tl.arange(0, BLOCK)
        gone = tl.load(inverse + slot, slot < TOKENS * TOP_K, other=0) < 0
        if tl.max(gone.to(tl.int32), 0) > 0:
            at = y + slot_start(slot, TOP_K * COLS, COLS, TOP_K, WIDTH)
            for c0 in range(0, COLS, BLOCK):
                c = c0 + tl.arange(0, BLOCK)
                zeros = tl.zeros([BLOCK, BLOCK], y.dtype.element_ty)
                tl.store(at[:, None] + slot_columns(c, TOP_K, WIDTH)[None, :], zeros, gone[:, None] & (c < COLS)[None, :])


@triton.jit
def expert_pointers(w, e, columns, stride_e, stride_w, BK: tl.constexpr, T: tl.constexpr):
    """To these columns of an expert's product and its first BK of K: [columns, BK], or T, stored `K N`: [BK, columns]."""
    kk = tl.arange(0, BK).to(tl.int64)
    at = w + e.to(tl.int64) * stride_e
    if T:
        return at + (kk[:, None] * stride_w + columns[None, :])
    else:
        return at + (columns.to(tl.int64)[:, None] * stride_w + kk[None, :])


@triton.jit
def take_expert(pointers, ok, k, K, stride_w, BK: tl.constexpr, T: tl.constexpr):
    """[columns, BK] of an expert's matrix at k, zero outside of K and where not ok."""
    inside = k + tl.arange(0, BK) < K
    if T:
        return tl.load(pointers + k.to(tl.int64) * stride_w, inside[:, None] & ok[None, :], other=0.0).T
    else:
        return tl.load(pointers + k, ok[:, None] & inside[None, :], other=0.0)


@triton.jit
def boxed(w, e, n0, k, BN: tl.constexpr, BK: tl.constexpr, T: tl.constexpr):
    """[BN, BK] of expert e's matrix by its descriptor; T: stored `K N`."""
    if T:
        return tl.reshape(w.load([e, k, n0]), (BK, BN)).T
    else:
        return tl.reshape(w.load([e, n0, k]), (BN, BK))


@triton.jit
def multiply(a, b, acc, SWAP: tl.constexpr, ACC: tl.constexpr):
    """acc + a @ b.T; SWAP: acc is the transpose."""
    if SWAP:
        return tl.dot(b, a.T, acc, input_precision="ieee", out_dtype=ACC)
    else:
        return tl.dot(a, b.T, acc, input_precision="ieee", out_dtype=ACC)


@triton.jit
def sums(BM: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr, ACC: tl.constexpr):
    if SWAP:
        return tl.zeros([BN, BM], ACC)
    else:
        return tl.zeros([BM, BN], ACC)


@triton.jit
def store_rows(dst, rows, col0, value, live, COLS, BN: tl.constexpr):
    """value [BM, BN] to columns from col0 on of these rows of a dense matrix [., COLS], where live."""
    c = col0 + tl.arange(0, BN)
    at = dst + rows[:, None].to(tl.int64) * COLS + c[None, :]
    tl.store(at, value.to(dst.dtype.element_ty), live[:, None] & (c < COLS)[None, :])

"""What the GEMM ops share: tile loads, config tables, and the two gradient products every one of them needs.

    forward      out[M, N] = x[M, K] @ w[N, K].T          (torch Linear layout; its kernels are in the ops)
    grad_input   dx[M, K]  = sum over up to three segments of dy_i[M, N_i] @ w_i[N_i, K]
    grad_weight  dw[N, K]  = dy[M, N].T @ x[M, K]

A weight is read where it lies, by rows or by columns (T: the transpose of a Conv1D weight). On targets with TMA the operands
come through host tensor descriptors, which zero-fill what lies outside; elsewhere through masked pointers. Accumulation is
in ACC (fp32, fp64 for fp64 inputs); fp32 operands are multiplied in full fp32, not tf32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._lang import cdiv, tl, triton
from ._launch import contiguous_last, descriptor, launch, tma_ready
from ._math import tile_order
from ._target import Target, target_of


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 8
    tma: bool = False
    split: int = 1  # the epilogue runs in this many parts of the columns (1, 2; linear also 4): smaller staging buffers

    def smem_bytes(self, itemsize: int) -> int:
        """Operand ring plus the descriptor staging of result and residual."""
        ring = self.num_stages * (self.block_m + self.block_n) * self.block_k * itemsize
        return ring + (2 * self.block_m * self.block_n // self.split * itemsize if self.tma else 0)


# (largest M, config), first that fits. Tables by target family and kind; kinds: "nt" forward with one accumulator,
# "pair" forward with two accumulators of block_n / 2 columns (gate and up), "nn" grad_input, "tn" grad_weight.
_BIG = 1 << 62
# H200, 2026-11-29, beside cuBLAS at Llama-3.1-8B's widths: M 4096 128x256x64 w8 s3 (o 726, down 718, qkv 748 TFLOP/s; cuBLAS
# 769, 700, 775; gate-up 673, 681), M 512 128x128x64 w4 s4 (605; 684), M 1 and 16 16x16x256 w2 s4 (o 12.5, down 32.3 us;
# 14.0, 33.3) and for pairs 16x64x256 w4 s3 (59.0; 62.2).
_SM90 = {
    "nt": (
        (16, Config(16, 16, 256, 2, 4)),
        (32, Config(32, 32, 128, 4, 4)),
        (128, Config(64, 64, 128, 4, 4)),
        (256, Config(64, 128, 64, 4, 4, tma=True)),
        (1024, Config(128, 128, 64, 4, 4, tma=True)),
        (_BIG, Config(128, 256, 64, 8, 3, tma=True, split=2)),
    ),
    "pair": (
        (16, Config(16, 64, 256, 4, 3)),
        (32, Config(32, 64, 64, 4, 4)),
        (64, Config(64, 256, 64, 4, 4, tma=True)),
        (_BIG, Config(128, 256, 64, 8, 3, tma=True)),
    ),
    "nn": ((64, Config(64, 64, 64, 4, 4)), (_BIG, Config(128, 256, 64, 8, 3, tma=True))),
    "tn": ((_BIG, Config(128, 256, 64, 8, 3, tma=True)),),
}
# A100: cp.async ring, mma.sync; not measured, chosen by registers and shared memory.
_SM80 = {
    "nt": ((16, Config(16, 64, 128, 4, 4)), (64, Config(64, 64, 64, 4, 4)), (_BIG, Config(128, 128, 32, 8, 4))),
    "pair": ((16, Config(16, 64, 128, 4, 4)), (64, Config(64, 64, 64, 4, 4)), (_BIG, Config(64, 128, 32, 4, 4))),
    "nn": ((_BIG, Config(128, 128, 32, 8, 4)),),
    "tn": ((_BIG, Config(128, 128, 32, 8, 4)),),
}
# The same with a shorter ring: 99 KB.
_SM86 = {
    kind: tuple((m, Config(c.block_m, c.block_n, min(c.block_k, 64), c.num_warps, 3)) for m, c in rows)
    for kind, rows in _SM80.items()
}
_SM100 = {
    "nt": ((16, Config(16, 64, 128, 4, 4)), (64, Config(64, 64, 128, 4, 4)), (_BIG, Config(128, 128, 64, 4, 4, tma=True))),
    "pair": ((16, Config(16, 64, 128, 4, 4)), (64, Config(64, 64, 128, 4, 4)), (_BIG, Config(128, 256, 64, 8, 3, tma=True))),
    "nn": ((_BIG, Config(128, 128, 64, 4, 4, tma=True)),),
    "tn": ((_BIG, Config(128, 128, 64, 4, 4, tma=True)),),
}
_GFX942 = {kind: ((16, Config(16, 64, 128, 4, 2)), (_BIG, Config(128, 128, 32, 8, 2))) for kind in _SM80}
# fp32 runs on the FMA pipes (no tf32): small tiles, few registers.
_FP32 = {kind: ((16, Config(16, 64, 32, 4, 2)), (_BIG, Config(64, 64, 32, 8, 2))) for kind in _SM80}
_TABLES: Mapping[str, Mapping[str, tuple[tuple[int, Config], ...]]] = {
    "sm_80": _SM80, "sm_86": _SM86, "sm_90": _SM90, "sm_100": _SM100, "gfx942": _GFX942,
}  # fmt: skip


def tables(itemsize: int, target: Target) -> Mapping[str, tuple[tuple[int, Config], ...]]:
    """The config rows that itemsize and target choose from."""
    return _FP32 if itemsize >= 4 else _TABLES[target.family]


def configure(m: int, itemsize: int, target: Target, kind: str) -> Config:
    """Config for M rows; depends on nothing else, so that 50 shapes compile few variants.

    For a batch_invariant target not even on M: the smallest tile of 64 rows or more (wgmma takes no fewer), by pointers, since
    descriptors are refused to some row counts. grad_weight sums over the rows: its m is another axis.
    """
    rows = tables(itemsize, target)[kind]
    if target.batch_invariant and kind != "tn":
        return _by_pointers(next(c for _, c in rows if c.block_m >= 64))
    return next(c for limit, c in rows if m <= limit)


def accumulator(x: Tensor) -> Any:
    return tl.float64 if x.dtype is torch.float64 else tl.float32


def triton_dtype(dtype: torch.dtype) -> Any:
    return getattr(tl, str(dtype).removeprefix("torch."))


def programs(tiles: int, config: Config, target: Target) -> int:
    """Persistent over tiles where operands come by TMA (the next tile's loads run under the epilogue), else one each."""
    return min(tiles, target.sms) if config.tma else tiles


def options(config: Config) -> dict[str, Any]:
    """The constexprs and compile options every GEMM kernel takes from its config."""
    return {
        "BM": config.block_m, "BN": config.block_n, "BK": config.block_k, "GROUP": config.group, "TMA": config.tma,
        "SPLIT": config.split, "STAGES": config.num_stages, "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip


def usable(config: Config, *operands: Tensor) -> Config:
    """config, or its pointer form where an operand's address or strides rule descriptors out."""
    return _by_pointers(config) if config.tma and not tma_ready(*operands) else config


def _by_pointers(config: Config) -> Config:
    n = min(config.block_n, 128)
    warps = 8 if config.block_m * n >= 128 * 128 else config.num_warps  # addresses and masks take registers
    return Config(config.block_m, n, config.block_k, warps, config.num_stages, config.group)


def layout(w: Tensor) -> tuple[Tensor, bool]:
    """(matrix with dense rows, whether it is w transposed): w itself, its transpose where columns are dense, else a copy."""
    if w.stride(-1) != 1 and w.stride(-2) == 1:
        return w.mT, True
    return contiguous_last(w), False


def operand(t: Tensor, rows: int, cols: int, config: Config, transposed: bool = False) -> Any:
    """A matrix with dense rows as the kernels take it: a descriptor, or itself. rows, cols: of a tile as the kernel sees it."""
    return descriptor(t, [cols, rows] if transposed else [rows, cols]) if config.tma else t


@triton.jit
def load_tile(src, row0, col0, ROWS, COLS, stride, BR: tl.constexpr, BC: tl.constexpr, TMA: tl.constexpr,
              T: tl.constexpr = False):  # fmt: skip
    """[BR, BC] of a matrix [ROWS, COLS], zero outside. T: src is its transpose. stride: of src's rows."""
    if T:
        return load_tile(src, col0, row0, COLS, ROWS, stride, BC, BR, TMA).T
    elif TMA:
        return src.load([row0, col0])
    else:
        r = row0 + tl.arange(0, BR)
        c = col0 + tl.arange(0, BC)
        return tl.load(src + r[:, None].to(tl.int64) * stride + c[None, :], (r < ROWS)[:, None] & (c < COLS)[None, :], other=0.0)


@triton.jit
def store_tile(dst, row0, col0, value, ROWS, COLS, stride, BR: tl.constexpr, BC: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        dst.store([row0, col0], value.to(dst.dtype))
    else:
        r = row0 + tl.arange(0, BR)
        c = col0 + tl.arange(0, BC)
        at = dst + r[:, None].to(tl.int64) * stride + c[None, :]
        tl.store(at, value.to(dst.dtype.element_ty), (r < ROWS)[:, None] & (c < COLS)[None, :])


@triton.jit
def product(x, w, m, n, M, N, K, stride_x, stride_w, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
            TMA: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """Tile (m, n) of x @ w.T."""
    acc = tl.zeros([BM, BN], ACC)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        a = load_tile(x, m * BM, k, M, K, stride_x, BM, BK, TMA)
        b = load_tile(w, n * BN, k, N, K, stride_w, BN, BK, TMA, T)
        acc = tl.dot(a, b.T, acc, input_precision="ieee", out_dtype=ACC)
    return acc


@triton.jit
def halves(x, BM: tl.constexpr, BN: tl.constexpr):
    """The left and right halves of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(x, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def row_scale(sumsq, row0, M, TILES, inv_hidden, eps, BM: tl.constexpr, TILES_P: tl.constexpr):
    """rstd of BM rows from the partial sums of squares their producer left: [M, TILES]."""
    r = row0 + tl.arange(0, BM)
    t = tl.arange(0, TILES_P)
    part = tl.load(sumsq + r[:, None].to(tl.int64) * TILES + t[None, :], (r < M)[:, None] & (t < TILES)[None, :], other=0.0)
    return 1.0 / tl.sqrt(tl.sum(part, 1) * inv_hidden + eps)


@triton.jit
def _segment(acc, dy, w, row0, col0, M, N, K, stride_dy, stride_w, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
             TMA: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    for n in tl.range(0, N, BK, num_stages=STAGES):
        a = load_tile(dy, row0, n, M, N, stride_dy, BM, BK, TMA)
        b = load_tile(w, n, col0, N, K, stride_w, BK, BN, TMA, T)
        acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=ACC)
    return acc


@triton.jit
def grad_input_kernel(
    dy0, dy1, dy2, w0, w1, w2, dx, M, K, N0, N1, N2,
    stride_dy0, stride_dy1, stride_dy2, stride_w0, stride_w1, stride_w2, stride_dx,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, T: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    num_m = tl.cdiv(M, BM)
    num_n = tl.cdiv(K, BN)
    for t in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        m, n = tile_order(t, num_m, num_n, GROUP)
        acc = tl.zeros([BM, BN], ACC)
        acc = _segment(acc, dy0, w0, m * BM, n * BN, M, N0, K, stride_dy0, stride_w0, BM, BN, BK, TMA, T, STAGES, ACC)
        if dy1 is not None:
            acc = _segment(acc, dy1, w1, m * BM, n * BN, M, N1, K, stride_dy1, stride_w1, BM, BN, BK, TMA, T, STAGES, ACC)
        if dy2 is not None:
            acc = _segment(acc, dy2, w2, m * BM, n * BN, M, N2, K, stride_dy2, stride_w2, BM, BN, BK, TMA, T, STAGES, ACC)
        if SPLIT == 2:
            left, right = halves(acc, BM, BN)
            store_tile(dx, m * BM, n * BN, left, M, K, stride_dx, BM, BN // 2, TMA)
            store_tile(dx, m * BM, n * BN + BN // 2, right, M, K, stride_dx, BM, BN // 2, TMA)
        else:
            store_tile(dx, m * BM, n * BN, acc, M, K, stride_dx, BM, BN, TMA)


@triton.jit
def grad_weight_kernel(
    dy, x, dw, M, N, K, stride_dy, stride_x, stride_dw,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    num_n = tl.cdiv(N, BM)
    num_k = tl.cdiv(K, BN)
    for t in tl.range(tl.program_id(0), num_n * num_k, tl.num_programs(0)):
        n, k = tile_order(t, num_n, num_k, GROUP)
        acc = tl.zeros([BM, BN], ACC)
        for m in tl.range(0, M, BK, num_stages=STAGES):
            a = load_tile(dy, m, n * BM, M, N, stride_dy, BK, BM, TMA)
            b = load_tile(x, m, k * BN, M, K, stride_x, BK, BN, TMA)
            acc = tl.dot(a.T, b, acc, input_precision="ieee", out_dtype=ACC)
        if SPLIT == 2:
            left, right = halves(acc, BM, BN)
            store_tile(dw, n * BM, k * BN, left, N, K, stride_dw, BM, BN // 2, TMA)
            store_tile(dw, n * BM, k * BN + BN // 2, right, N, K, stride_dw, BM, BN // 2, TMA)
        else:
            store_tile(dw, n * BM, k * BN, acc, N, K, stride_dw, BM, BN, TMA)


@triton.jit(do_not_specialize=["ROWS"])
def sum_rows_kernel(x, out, second, ROWS, COLS, OUT, stride, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """out[c] = sum over rows of x[r, c], in a fixed order; columns beyond the first OUT go to second."""
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, BLOCK_R)
    acc = tl.zeros([BLOCK_R, BLOCK], ACC)
    for r in range(0, ROWS, BLOCK_R):
        at = (r + row)[:, None].to(tl.int64) * stride + col[None, :]
        acc += tl.load(x + at, (r + row < ROWS)[:, None] & (col < COLS)[None, :], other=0.0).to(ACC)
    total = tl.sum(acc, 0).to(out.dtype.element_ty)
    tl.store(out + col, total, col < OUT)
    if second is not None:
        tl.store(second + (col - OUT), total, (col >= OUT) & (col < COLS))


def sum_rows(x: Tensor, out: Tensor, second: Tensor | None = None) -> None:
    """out = sum of x's rows, its further columns to second. x `rows (out second)`."""
    rows, cols = x.shape
    constexprs = {"BLOCK_R": 32, "BLOCK": 64, "ACC": accumulator(x), "num_warps": 4}
    launch(sum_rows_kernel, (cdiv(cols, 64),), (x, out, second, rows, cols, out.shape[0], x.stride(0)), constexprs)


def grad_input(dys: Sequence[Tensor], weights: Sequence[Tensor], dx: Tensor) -> None:
    """dx = sum(dy @ w): one launch over up to three segments; dy `tokens out_i`, w `out_i hidden`, dx `tokens hidden`."""
    dys, laid = [contiguous_last(t) for t in dys], [layout(w) for w in weights]
    transposed = all(t for _, t in laid)
    weights = [w for w, _ in laid] if transposed else [contiguous_last(w) for w in weights]
    m, k = dx.shape
    target = target_of(dx.device)
    c = usable(configure(m, dx.element_size(), target, "nn"), *dys, *weights, dx)
    pad = [None] * (3 - len(dys))
    a = [operand(t, c.block_m, c.block_k, c) for t in dys] + pad
    b = [operand(t, c.block_k, c.block_n, c, transposed) for t in weights] + pad
    zeros = [0] * len(pad)
    strides = [t.stride(0) for t in dys] + zeros + [t.stride(0) for t in weights] + zeros
    tiles = cdiv(m, c.block_m) * cdiv(k, c.block_n)
    out = operand(dx, c.block_m, c.block_n // c.split, c)
    args = (*a, *b, out, m, k, *[t.shape[1] for t in dys], *zeros, *strides, dx.stride(0))
    launch(grad_input_kernel, (programs(tiles, c, target),), args, {**options(c), "T": transposed, "ACC": accumulator(dx)})


def grad_weight(dy: Tensor, x: Tensor, dw: Tensor) -> None:
    """dw = dy.T @ x; dy `tokens out`, x `tokens hidden`, dw `out hidden`."""
    dy, x = contiguous_last(dy), contiguous_last(x)
    (m, n), k = dy.shape, x.shape[1]
    if not m:
        dw.zero_()
        return
    target = target_of(dw.device)
    c = usable(configure(n, dw.element_size(), target, "tn"), dy, x, dw)
    tiles = cdiv(n, c.block_m) * cdiv(k, c.block_n)
    args = (
        operand(dy, c.block_k, c.block_m, c), operand(x, c.block_k, c.block_n, c),
        operand(dw, c.block_m, c.block_n // c.split, c),
        m, n, k, dy.stride(0), x.stride(0), dw.stride(0),
    )  # fmt: skip
    launch(grad_weight_kernel, (programs(tiles, c, target),), args, {**options(c), "ACC": accumulator(dw)})

"""What the GPU tests run of ops and layers: as data, so that worker processes can compile it all beforehand.

Compiling is serial in one process and takes a second or so a kernel; triton's cache on disk is shared between processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from layer_cases import GEMMA, LLAMA, LLAMA_8B, VARIANTS, inputs, run, shapes
from moe_cases import GPT_OSS
from op_cases import (
    Args,
    Case,
    assert_accurate,
    backward_arguments,
    call,
    differentiable,
    formula,
    index_case,
    layer_norm_case,
    linear_case,
    mlp_case,
    moe_case,
    norm_case,
    only_config,
    plain_mlp_case,
    qkv_case,
    rope_case,
    route_case,
    to,
    with_gradients,
)
from torch import Tensor

from fusedblock import blocks
from fusedblock.blocks import BlockSpec, BlockWeights
from fusedblock.kernels import _gemm
from fusedblock.kernels._target import TARGETS
from fusedblock.ops import OPS

WORKERS = 12


@dataclass(frozen=True)
class Job:
    case: Case
    dtype: torch.dtype
    gradients: bool
    config: _gemm.Config | None = None  # None: whatever configure chooses

    @property
    def id(self) -> str:
        name = f"{self.case.id}-{str(self.dtype).removeprefix('torch.')}"
        if self.config is None:
            return name
        c = self.config
        return (
            f"{name}-{c.block_m}x{c.block_n}x{c.block_k}-w{c.num_warps}-s{c.num_stages}-{'descriptors' if c.tma else 'pointers'}"
        )

    def arguments(self, device: str) -> Args:
        return to(self.case.arguments(self.dtype), device=device)

    def run(self, args: Args) -> dict[str, Tensor]:
        with only_config(self.config) if self.config else contextlib.nullcontext():
            return with_gradients(self.case.op, args) if self.gradients else call(self.case.op, args)

    def check(self, device: str) -> None:
        """Every result and gradient against float64, fp16 and bf16 beside plain torch's own error."""
        args = self.arguments(device)
        got = self.run(args)
        exact = to(args, torch.float64)
        want = with_gradients(self.case.op, exact, formula) if self.gradients else formula(self.case.op, exact)
        assert_accurate(got, {n: t for n, t in want.items() if n in got}, plain(self.case.op, args, self.gradients), self.dtype)


def plain(op: str, args: Args, gradients: bool) -> dict[str, Tensor]:
    """By plain torch: the references of the op and of its backward."""
    results = dict(zip(OPS[op].spec.writes, OPS[op].reference(**args)))
    if not gradients:
        return {n: t for n, t in results.items() if OPS[op].spec.writes[n].when(args)}
    taken, backward = backward_arguments(op, args), OPS[op].backward
    assert backward is not None
    grads = dict(zip(backward.spec.writes, backward.reference(**taken)))
    grads |= {f"grad_{n}": taken[grad] for n, grad in OPS[op].passthrough.items()}
    kept = {n: t for n, t in results.items() if OPS[op].spec.writes[n].when(args)}
    return kept | {f"grad_{n}": grads[f"grad_{n}"] for n in differentiable(op, args)}


# One case for each row of the tables that an H200 chooses from, ragged against every tile; fp32 has two rows.
FORWARD_AND_BACKWARD = (
    norm_case(37, 96), norm_case(700, 131, 1.0, False), norm_case(3, 4096, 1.0), norm_case(9, 1, eps=0.5),
    norm_case(37, 384, given="residual wide"), layer_norm_case(37, 96, "bias residual", 1000.0),
    layer_norm_case(700, 131, "bias"), layer_norm_case(3, 4096, "bias accurate"), layer_norm_case(5, 16384, "bias residual wide"),
    linear_case(13, 264, 72, "bias residual"), linear_case(300, 136, 264, "residual"), linear_case(150, 73, 131),
    qkv_case(2, 19, 72, 24, 1, 3, bias=True, tables="each"), qkv_case(2, 150, 136, 64, 2, 3), qkv_case(2, 70, 73, 128, 1, 1),
    mlp_case(13, 136, 72, "gelu", bias=True), mlp_case(300, 136, 264, "silu"), mlp_case(150, 73, 131, "gelu_tanh"),
    linear_case(13, 264, 72, "bias residual wide columns", 0.5), linear_case(300, 136, 264, "bias residual wide", 0.5),
    linear_case(300, 136, 264, "columns"), linear_case(150, 73, 131, "residual columns", 0.5),
    plain_mlp_case(13, 136, 72, "gelu", "bias"), plain_mlp_case(300, 136, 264, "relu2", "columns"),
    plain_mlp_case(150, 73, 131, "gelu_tanh", "bias columns"), mlp_case(13, 136, 72, "relu2"),
    qkv_case(2, 19, 72, 128, 1, 2, tables="view", norm="early"), qkv_case(2, 150, 136, 64, 2, 3, bias=True, norm="late"),
    qkv_case(2, 70, 136, 128, 1, 2, tables="repeat", rope="interleaved", norm="layer"),
    qkv_case(2, 70, 136, 64, 3, 1, bias=True, part=0.25, layout="per_head"), qkv_case(1, 150, 72, 96, 1, 2, part=0.25),
    qkv_case(2, 70, 136, 64, 3, 1, bias=True, rope="", layout="columns"),
    qkv_case(2, 3, 72, 80, 1, 1, part=0.4, layout="stacked"), rope_case(2, 19, 64, 1, 3, tables="each"),
    rope_case(1, 300, 80, 1, 2, part=0.4, heads_first=True),
    rope_case(2, 19, 128, 3, 1, tables="repeat", interleaved=True),
    route_case(1, 72, 8, 2, "softmax", "renormalise"), route_case(60, 136, 128, 3, "softmax_chosen", "bias"),
    route_case(40, 136, 256, 4, "sigmoid", "correction_bias renormalise wide", groups=(8, 4, "top2"), eps=1e-20, scale=2.5),
    route_case(300, 136, 160, 3, "softmax", "wide", groups=(8, 3, "max")), route_case(1100, 136, 60, 2, "softmax", "renormalise"),
    route_case(1100, 136, 136, 2, "sigmoid", "correction_bias renormalise wide", groups=(8, 4, "top2"), eps=1e-20),
    moe_case(tokens=37, routing="holes", bias=True), moe_case(tokens=300, hidden=136, ffn=72, experts=9, top_k=3, tile_rows=64),
    moe_case(tokens=1, experts=7, top_k=6), moe_case(tokens=70, hidden=72, ffn=136, **GPT_OSS),
    moe_case(tokens=1, hidden=136, experts=7, top_k=6, **GPT_OSS),
    # One expert has every token: more than a tile of rows in each form.
    moe_case(tokens=45, hidden=72, experts=9, top_k=3, routing="one"), moe_case(tokens=33, ffn=72, routing="one", tile_rows=32),
    moe_case(tokens=1100, hidden=72, ffn=136, routing="one", tile_rows=64),
)  # fmt: skip
FORWARD = (
    linear_case(300, 136, 264, "residual norm_weight"), qkv_case(2, 70, 136, 64, 1, 3, bias=True, normed=True),
    mlp_case(150, 136, 264, "silu", normed=True, save=False), index_case(60, 8, 128), index_case(5000, 4, 60, 64),
)  # fmt: skip
# bf16 alone: further rows of the tables and head sizes.
FURTHER = (
    linear_case(29, 264, 136), linear_case(61, 264, 136), linear_case(200, 264, 136),
    linear_case(1100, 264, 392, "bias residual"),
    linear_case(1100, 264, 392, "bias residual wide columns", 0.5), plain_mlp_case(29, 264, 136, "silu"),
    plain_mlp_case(1100, 264, 392, "gelu", "bias"), plain_mlp_case(1100, 264, 392, "relu", "bias columns"),
    mlp_case(29, 264, 136), mlp_case(61, 264, 136),
    qkv_case(1, 1100, 264, 128, 2, 1), qkv_case(1, 75, 72, 256, 1, 3), qkv_case(1, 75, 72, 96, 1, 1),
    qkv_case(7, 1, 136, 16, 1, 7),
    *[qkv_case(1, m, 264, 128, 2, 2, tables="view", norm="early", bias=True) for m in (1, 29, 61, 1100)],
    qkv_case(1, 1100, 264, 64, 3, 1, bias=True, part=0.25, layout="per_head"), qkv_case(1, 75, 72, 256, 1, 1, norm="late"),
    qkv_case(1, 1100, 264, 64, 3, 1, bias=True, rope="", layout="columns"), qkv_case(1, 1100, 72, 256, 1, 1, norm="early"),
    qkv_case(1, 1100, 264, 128, 1, 1, tables="repeat", rope="interleaved", norm="layer", bias=True),
    *[moe_case(tokens=t, hidden=264, ffn=392, experts=6, routing="holes", tile_rows=rows, save=save, **words)
      for t, rows in ((1100, 128), (1100, 64), (300, 32), (300, 16), (61, 64), (61, 32), (29, 16))
      for save, words in ((True, {}), (False, GPT_OSS))],
    *[moe_case(tokens=1, hidden=264, ffn=392, experts=9, top_k=6, routing="holes", save=save, **words)
      for save, words in ((True, {}), (False, GPT_OSS))],
    moe_case(tokens=1100, hidden=264, ffn=392, tile_rows=128, routing="one", laid="interleaved", activation="gelu", bias=True),
    moe_case(tokens=1100, hidden=264, ffn=392, tile_rows=128, laid="transposed", activation="gelu_tanh", weights=torch.float32),
    moe_case(tokens=700, hidden=73, ffn=131, tile_rows=128),
)  # fmt: skip


def _every_config() -> Iterator[Job]:
    """Each row an H200 can choose and the pointer form it falls back to, whatever shape would choose it."""
    cases = {
        "nt": (linear_case(150, 136, 264, "bias residual norm_weight"), linear_case(150, 136, 264, "residual wide columns", 0.5),
               plain_mlp_case(150, 136, 264, "gelu", "bias"), qkv_case(2, 75, 136, 64, 1, 3),
               qkv_case(2, 75, 136, 64, 1, 3, norm="early", bias=True)),
        "pair": (mlp_case(150, 136, 264, normed=True),),
        "nn": (linear_case(150, 136, 264), linear_case(150, 136, 264, "columns")),
        "tn": (linear_case(150, 136, 264),),
    }
    for kind, rows in _gemm.tables(2, TARGETS["sm_90"]).items():
        for config in dict.fromkeys(form for _, c in rows for form in (c, _gemm.usable(c, torch.empty(0)))):
            for case in cases[kind]:
                yield Job(case, torch.bfloat16, kind in ("nn", "tn"), config)


JOBS = (
    *(Job(case, dtype, True) for dtype in (torch.float32, torch.bfloat16) for case in FORWARD_AND_BACKWARD),
    *(Job(case, dtype, False) for dtype in (torch.float32, torch.bfloat16) for case in FORWARD),
    *(Job(case, torch.float16, True) for case in FORWARD_AND_BACKWARD[::4]),  # the code of bf16 with another type in it
    *(Job(case, torch.bfloat16, True) for case in FURTHER),
    *_every_config(),
)


@dataclass(frozen=True)
class Layer:
    spec: BlockSpec
    dtype: torch.dtype
    batch: int
    seq: int
    gradients: bool = False

    def warm(self) -> None:
        make = lambda *shape: torch.zeros(shape, dtype=self.dtype, device="cuda")
        weights = BlockWeights(**{name: make(*shape) for name, shape in shapes(self.spec).items()})
        given = tuple(torch.zeros_like(t, device="cuda") for t in inputs(self.spec, self.dtype, self.batch, self.seq))
        run(blocks.forward, self.spec, weights, given, self.gradients)


SHAPES = ((1, 1), (3, 1), (1, 37), (2, 75), (1, 1100))
LAYERS = (
    *(Layer(LLAMA_8B, dtype, 1, 300, gradients) for dtype in (torch.bfloat16, torch.float16) for gradients in (False, True)),
    *(Layer(spec, torch.bfloat16, *shape) for spec in (LLAMA, GEMMA) for shape in SHAPES),
    Layer(LLAMA, torch.bfloat16, 2, 75, True),
    *(Layer(spec, torch.bfloat16, 2, 75, gradients) for spec in VARIANTS.values() for gradients in (False, True)),
)
# The longest first.
WORK: tuple[Job | Layer, ...] = (*LAYERS, *JOBS)


def warm(index: int) -> None:
    """Compile what one piece of work launches. Its test reports what goes wrong."""
    with contextlib.suppress(Exception):
        WORK[index].warm()
        torch.cuda.synchronize()


@contextmanager
def compiled_ahead() -> Iterator[None]:
    if "PYTEST_XDIST_WORKER" in os.environ:  # many processes run tests: each compiles what its own need
        yield
        return
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        pool.map(warm, range(len(WORK)), chunksize=1)
    yield

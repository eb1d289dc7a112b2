"""One of two processes that train tiny models together; test_distributed.py starts them and looks at what they saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import torch
import torch.distributed as dist
from llama import prompt
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedblock

STEPS = 3


def layers(model: nn.Module) -> nn.ModuleList:
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


def train(model: nn.Module, ids: Tensor) -> list[float]:
    """Losses of STEPS steps of SGD."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def wrap(model: nn.Module, kind: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if kind == "fsdp2-bf16" else MixedPrecisionPolicy()
    mesh = dist.init_device_mesh("cpu", (2,))
    for module in (*layers(model), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def together(name: str, kind: str, fuse: str, checkpointing: bool) -> dict[str, Any]:
    """Losses and final parameters. fuse: "", or "before" or "after" wrapping."""
    model = families.build(name).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    report = fusedblock.fuse(model, strict=True) if fuse == "before" else None
    wrapped = wrap(model, kind)
    if fuse == "after":
        report = fusedblock.fuse(wrapped, strict=True)
    losses = torch.tensor(train(wrapped, prompt()[0][dist.get_rank()][None]), dtype=torch.float64)
    dist.all_reduce(losses)
    full = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
    calls = (report.fused_calls, dict(report.fallbacks)) if report else None
    return {"losses": losses / 2, "parameters": {n: p.detach().clone() for n, p in full.items()}, "calls": calls}


def main(rank: int, folder: str, cases: list[tuple[str, str, str, bool]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        results = {case: together(*case) for case in cases}
    finally:
        dist.destroy_process_group()
    if rank == 0:
        torch.save(results, Path(folder) / "results")

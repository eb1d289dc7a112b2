"""Whether the Gluon kernels run right here: a tiny forward and backward of attention, and tiny products of experts, each beside
float64 once a process and GPU.

What is wrong is found before a result is, and the portable kernels run instead. What this cannot find is a kernel that hangs.
"""

from __future__ import annotations

import threading
import warnings
from typing import Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import _launch, _moe_hopper, _target, attention_hopper, attention_hopper_backward, attention_hopper_short
from ._hopper_schedule import Bounds, order

Part = Literal["forward", "backward", "experts"]  # the first two: attention's
PARTS: tuple[Part, ...] = ("forward", "backward", "experts")
SEQ, CONTEXT, HEADS, HEAD_DIM, SCALE = 200, 300, 2, 64, 0.125  # two tiles of queries, keys that end inside of a block
SHORT = 250  # of them, for attention_hopper_short.py
ROWS = (300, 0, 64, 40)  # of each expert: tiles that are full, half full and less, and an expert without any
HIDDEN, FFN = 264, 136  # two tiles of columns each, the last of 8, and steps that end inside of a block
SPARE = 128  # rows after the last expert's, which are nobody's and stay as they are
ALLOWED = 2.0**-7  # relative, of bf16 results
_lock = threading.RLock()
_passed: set[tuple[int, Part]] = set()


def ready(device: torch.device, part: Part) -> bool:
    """Whether this part of the Hopper kernels may be launched on device; tests it first, which waits for the device.

    Always off a GPU. While a CUDA graph is captured nothing can be tested: False, unless it was before.
    """
    if device.type != "cuda" or _launch.current_mode() is not None:
        return True
    index = torch.cuda.current_device() if device.index is None else device.index
    if (index, part) in _passed:
        return True
    if index in _target.failures or _launch.capturing(device):
        return False
    with _lock:
        if (index, part) not in _passed and index not in _target.failures:
            _test(torch.device("cuda", index), part)
    return (index, part) in _passed


def state(device: torch.device) -> str:
    """What is known of `device`, in words; tests nothing."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if index in _target.failures:
        return _target.failures[index]
    done = [part for part in PARTS if (index, part) in _passed]
    return f"self-test passed: {', '.join(done)}" if done else "not tested yet"


def _test(device: torch.device, part: Part) -> None:
    index = device.index
    wrong = _found_wrong(device, part)
    if not wrong:
        _passed.add((index, part))
        return
    _target.failures[index] = f"the self-test of the Hopper {part} failed: {wrong}"
    what = "the portable kernels run instead, of attention and of experts, in this process; please report it"
    warnings.warn(f"fusedblock: {device}: {_target.failures[index]}; {what}", RuntimeWarning, stacklevel=2)


def _found_wrong(device: torch.device, part: Part) -> str:
    """What is wrong, or ""."""
    hook, _launch.recording.hook = _launch.recording.hook, None  # the caller's launches are recorded, these are not
    cuda = device.type == "cuda"
    axis = -1 if part == "experts" else None  # row by row: of all rows' norm the few of a small expert are too little
    mode = torch.cuda.get_sync_debug_mode() if cuda else 0
    try:
        if cuda:
            torch.cuda.set_sync_debug_mode(0)
        with _disable_current_modes(), torch.no_grad(), _launch.on_device(device):
            found, wanted = _experts(device) if part == "experts" else _attention(device, part)
            for name, got in found.items():
                difference = ((got.double() - wanted[name]).norm(dim=axis) / wanted[name].norm(dim=axis)).max()
                if not difference <= ALLOWED:
                    return f"{name} is off by {float(difference):.2g}, relatively"
        return ""
    except Exception as error:  # whatever a compiler or driver raises
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    finally:
        _launch.recording.hook = hook
        if cuda:
            torch.cuda.set_sync_debug_mode(mode)


def _randn(*shape: int, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu") * scale).bfloat16()


def _attention(device: torch.device, part: Part) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results by name, of the kernels and of the formula."""
    g = torch.Generator().manual_seed(0)
    q, grad = _randn(1, SEQ, HEADS, HEAD_DIM, generator=g), _randn(1, SEQ, HEADS, HEAD_DIM, generator=g)
    k, v = _randn(1, CONTEXT, 1, HEAD_DIM, generator=g), _randn(1, CONTEXT, 1, HEAD_DIM, generator=g)
    exact = dict(zip(("out", "lse", "grad_q", "grad_k", "grad_v"), _formula(q, k, v, grad)))
    short = _formula(q, k[:, -SHORT:], v[:, -SHORT:], grad)[:2]
    q, k, v, grad = (t.to(device) for t in (q, k, v, grad))
    made: dict[str, Tensor] = {}
    if part == "forward":
        made["out"], made["lse"] = attention_hopper.launch(q, k, v, None, -1, 0, SCALE)
        few = k[:, -SHORT:].contiguous(), v[:, -SHORT:].contiguous()
        exact["short out"], exact["short lse"] = short
        made["short out"], made["short lse"] = torch.empty_like(q), torch.empty_like(made["lse"])
        attention_hopper_short.launch(q, *few, None, -1, 0, SCALE, made["short out"], made["short lse"])
        for block_n in (64, 128):  # the table that a CUDA graph makes of its own: also so that its kernel is loaded by then
            table = torch.empty(3, 2, dtype=torch.int32, device=device)
            order(None, None, Bounds(-1, 0, block_n, CONTEXT, 0, SEQ), HEADS, HEADS, table, 1)
            tiles = torch.tensor([-1, -1, 0, 1, 2, 3], device="cpu").double()
            made[f"table {block_n}"], exact[f"table {block_n}"] = table.flatten().sort().values, tiles
    else:
        out, lse = exact["out"].to(device, torch.bfloat16), exact["lse"].to(device, torch.float32)
        grads = attention_hopper_backward.launch(q, k, v, out, lse, grad, None, None, -1, 0, SCALE)
        made.update((f"grad_{n}", t) for n, t in zip("qkv", grads) if t is not None)
    return {name: t.cpu() for name, t in made.items()}, exact


def _formula(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """out, lse and the gradients of causal attention in float64, of heads that share one head of keys."""
    q, k, v, grad = (t.double() for t in (q, k, v, grad))
    s = torch.einsum("bihd,bjkd->bhij", q, k) * SCALE
    s = s.masked_fill(torch.ones(SEQ, k.shape[1], dtype=torch.bool, device="cpu").triu(k.shape[1] - SEQ + 1), -torch.inf)
    p = torch.softmax(s, -1)
    dp = torch.einsum("bihd,bjkd->bhij", grad, v)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * SCALE
    return (
        torch.einsum("bhij,bjkd->bihd", p, v), torch.logsumexp(s, -1), torch.einsum("bhij,bjkd->bihd", ds, k),
        torch.einsum("bhij,bihd->bjd", ds, q)[:, :, None], torch.einsum("bhij,bihd->bjd", p, grad)[:, :, None],
    )  # fmt: skip


def _experts(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Likewise of the experts' products: of gathered tokens with their activation, and of rows by matrices of either layout."""
    g, rows, experts = torch.Generator().manual_seed(0), sum(ROWS), len(ROWS)
    x, a = _randn(rows // 2, HIDDEN, generator=g), _randn(rows, FFN, generator=g)
    gate_up = _randn(experts, 2 * FFN, HIDDEN, generator=g, scale=HIDDEN**-0.5)
    down = _randn(experts, HIDDEN, FFN, generator=g, scale=FFN**-0.5)
    order = torch.randperm(rows, generator=g, device="cpu")
    both, y = _by_expert(x[order // 2], gate_up), _by_expert(a, down)
    gate, up = both.chunk(2, 1)
    exact = {"h": gate * torch.sigmoid(gate) * up, "gate_up": both, "rows": y, "rows by columns": y}
    exact = {name: torch.cat((t, t.new_ones(SPARE, t.shape[1]))) for name, t in exact.items()}
    ends = [sum(ROWS[: e + 1]) for e in range(experts)]
    tiles = [(e, row, min(row + 128, end)) for e, end in enumerate(ends) for row in range(end - ROWS[e], end, 128)]
    index = {"order": order, "tiles": torch.tensor([(*tile, len(tiles)) for tile in tiles], device="cpu")}
    args = {n: t.to(device, torch.int32) for n, t in index.items()} | {"gate_up_bias": None, "activation": "silu"}
    sizes = {"ffn": FFN, "hidden": HIDDEN, "top_k": 2, "max_tiles": 1}  # 1: so few programs that each has several
    x, a, gate_up, down = (t.to(device) for t in (x, a, gate_up, down))
    made = {name: torch.ones(t.shape, dtype=torch.bfloat16, device=device) for name, t in exact.items()}
    _moe_hopper.gate_up_hopper_launch(x, gate_up, made["h"], made["gate_up"], args, sizes)
    _moe_hopper.rows_hopper_launch(a, down, None, made["rows"], args, sizes, False)
    _moe_hopper.rows_hopper_launch(a, down.mT.contiguous(), None, made["rows by columns"], args, sizes, True)
    return {name: t.cpu() for name, t in made.items()}, exact


def _by_expert(a: Tensor, w: Tensor) -> Tensor:
    """a @ w[expert].T in float64, row by row."""
    return torch.cat([rows.double() @ w[e].double().T for e, rows in enumerate(a.split(ROWS))])

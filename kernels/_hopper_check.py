"""Whether the Gluon attention kernels run right here: a tiny forward and a tiny backward beside float64, once a process and GPU.

What is wrong is found before a result is, and the portable kernels run instead. What this cannot find is a kernel that hangs.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import _launch, _target, attention_hopper, attention_hopper_backward, attention_hopper_short
from ._hopper_schedule import Bounds, order

SEQ, CONTEXT, HEADS, HEAD_DIM, SCALE = 200, 300, 2, 64, 0.125  # two tiles of queries, keys that end inside of a block
SHORT = 250  # of them, for attention_hopper_short.py
ALLOWED = 2.0**-7  # relative, of bf16 results
_lock = threading.RLock()
_passed: set[tuple[int, bool]] = set()


def ready(device: torch.device, backward: bool = False) -> bool:
    """Whether the Hopper forward (or backward) may be launched on device; tests it first, which waits for the device.

    Always off a GPU. While a CUDA graph is captured nothing can be tested: False, unless it was before.
    """
    if device.type != "cuda" or _launch.current_mode() is not None:
        return True
    index = torch.cuda.current_device() if device.index is None else device.index
    if (index, backward) in _passed:
        return True
    if index in _target.failures or _launch.capturing(device):
        return False
    with _lock:
        if (index, backward) not in _passed and index not in _target.failures:
            _test(torch.device("cuda", index), backward)
    return (index, backward) in _passed


def state(device: torch.device) -> str:
    """What is known of `device`, in words; tests nothing."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if index in _target.failures:
        return _target.failures[index]
    done = [name for name, backward in (("forward", False), ("backward", True)) if (index, backward) in _passed]
    return f"self-test passed: {' and '.join(done)}" if done else "not tested yet"


def _test(device: torch.device, backward: bool) -> None:
    index = device.index
    wrong = _found_wrong(device, backward)
    if not wrong:
        _passed.add((index, backward))
        return
    _target.failures[index] = f"the self-test of the Hopper {'backward' if backward else 'forward'} failed: {wrong}"
    what = "the portable kernels compute attention instead, in this process; please report it"
    warnings.warn(f"fusedblock: {device}: {_target.failures[index]}; {what}", RuntimeWarning, stacklevel=2)


def _found_wrong(device: torch.device, backward: bool) -> str:
    """What is wrong, or ""."""
    hook, _launch.recording.hook = _launch.recording.hook, None  # the caller's launches are recorded, these are not
    cuda = device.type == "cuda"
    mode = torch.cuda.get_sync_debug_mode() if cuda else 0
    try:
        if cuda:
            torch.cuda.set_sync_debug_mode(0)
        with _disable_current_modes(), torch.no_grad(), _launch.on_device(device):
            found, wanted = _computed(device, backward)
            for name, got in found.items():
                difference = (got.double() - wanted[name]).norm() / wanted[name].norm()
                if not difference <= ALLOWED:
                    return f"{name} is off by {float(difference):.2g}, relatively"
        return ""
    except Exception as error:  # whatever a compiler or driver raises
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    finally:
        _launch.recording.hook = hook
        if cuda:
            torch.cuda.set_sync_debug_mode(mode)


def _computed(device: torch.device, backward: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results by name, of the kernels and of the formula."""
    generator = torch.Generator().manual_seed(0)
    randn: Callable[..., Tensor] = lambda *shape: torch.randn(
        *shape, generator=generator, dtype=torch.float32, device="cpu"
    ).bfloat16()
    q, grad = randn(1, SEQ, HEADS, HEAD_DIM), randn(1, SEQ, HEADS, HEAD_DIM)
    k, v = randn(1, CONTEXT, 1, HEAD_DIM), randn(1, CONTEXT, 1, HEAD_DIM)
    exact = dict(zip(("out", "lse", "grad_q", "grad_k", "grad_v"), _formula(q, k, v, grad)))
    short = _formula(q, k[:, -SHORT:], v[:, -SHORT:], grad)[:2]
    q, k, v, grad = (t.to(device) for t in (q, k, v, grad))
    made: dict[str, Tensor] = {}
    if not backward:
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

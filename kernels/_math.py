"""What two or more kernels compute: @triton.jit helpers, and the activations in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ._lang import libdevice, tl, triton

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


def check_activation(op: str, activation: str, name: str = "activation", more: tuple[str, ...] = ()) -> None:
    if activation not in (*ACTIVATIONS, *more):
        raise ValueError(f"{op}: {name}={activation!r}, expected one of {', '.join((*ACTIVATIONS, *more))}")


def plain_activate(x: Tensor, activation: str) -> Tensor:
    f = torch.nn.functional
    if activation == "silu":
        return f.silu(x)
    if activation.startswith("relu"):
        return f.relu(x).square() if activation == "relu2" else f.relu(x)
    return f.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def plain_activate_backward(dy: Tensor, x: Tensor, activation: str) -> Tensor:
    """dy times the derivative at x. Not autograd: below a dispatch mode (a FLOP counter, opcheck) nothing is recorded here."""
    if activation == "silu":
        return torch.ops.aten.silu_backward(dy, x)
    if activation.startswith("relu"):
        dy = 2 * x * dy if activation == "relu2" else dy
        return torch.ops.aten.threshold_backward(dy, x, 0)
    return torch.ops.aten.gelu_backward(dy, x, approximate="tanh" if activation == "gelu_tanh" else "none")


@triton.jit
def tile_order(t, num_m, num_n, GROUP: tl.constexpr):
    """Tile number -> (row tile, column tile): GROUP row tiles share one pass over the columns, so L2 keeps their operands."""
    per_group = GROUP * num_n
    first = (t // per_group) * GROUP
    rows = tl.minimum(num_m - first, GROUP)
    r = t % per_group
    return first + r % rows, r // rows


@triton.jit
def last_of(counter, number):
    """Whether this program is the last of `number` to come here: it may read all that the others wrote. counter: an int32 that an
    earlier launch set to 0."""
    tl.debug_barrier()  # every thread's writes are made before the program says so
    return tl.atomic_add(counter, 1) == number - 1


@triton.jit
def sigmoid(x):
    # As the hardware does it: with numbers too small for fp32's normal range looked after, it is twice as many instructions, and
    # epilogues are bound by theirs. The quotient is off by at most 2 units in the last place, 0 where it is below 2**-126.
    return libdevice.fast_dividef(1.0, 1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def tanh(x):
    # tanh(x) = 2*sigmoid(2x) - 1 keeps full relative accuracy only away from 0; the odd series is not needed: gelu adds 1 to it.
    return 2.0 * sigmoid(2.0 * x) - 1.0


@triton.jit
def activate(x, ACT: tl.constexpr):
    """One of ACTIVATIONS of x, in x's dtype: fp32, in the interpreter also fp64. NaN stays NaN."""
    if ACT == "silu":
        return x * sigmoid(x)
    elif ACT == "relu":
        return tl.where(x <= 0.0, 0.0, x)
    elif ACT == "relu2":
        return tl.where(x <= 0.0, 0.0, x * x)
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def activate_grad(x, ACT: tl.constexpr):
    """d activate(x) / dx."""
    if ACT == "silu":
        s = sigmoid(x)
        return s + x * s * (1.0 - s)
    elif ACT == "relu":
        return tl.where(x <= 0.0, 0.0, tl.where(x > 0.0, 1.0, x))
    elif ACT == "relu2":
        return tl.where(x <= 0.0, 0.0, 2.0 * x)
    elif ACT == "gelu":
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x)

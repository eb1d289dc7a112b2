"""What is computed in a case of the benchmark of mixtures: weights, tokens routed as the case says, and the exact result."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Problem:
    """hot: experts that every token chooses, which have hot / top_k of the slots; the rest are drawn evenly. model: of
    transformers, whose block computes it ("": none). transposed: the experts' weights are stored `experts in out`. shared: the
    width of an expert that every token has besides; forward only."""

    tokens: int
    experts: int
    top_k: int
    hidden: int
    ffn: int
    model: str
    hot: int = 0
    transposed: bool = False
    shared: int = 0

    @property
    def round_weights(self) -> bool:
        """Mixtral's router leaves its weights in fp32."""
        return self.model != "mixtral"

    def __str__(self) -> str:
        shared = f" shared {self.shared}" if self.shared else ""
        return f"E{self.experts} k{self.top_k} H{self.hidden} I{self.ffn}{shared} T{self.tokens}"

    def tiny(self) -> Problem:
        """The same in a size for a CPU."""
        top_k = min(self.top_k, 4)
        return dataclasses.replace(
            self, tokens=min(self.tokens, 40), experts=8 if self.experts > 8 else 4, top_k=top_k, hidden=64, ffn=32,
            hot=min(self.hot, top_k // 2), shared=min(self.shared, 48),
        )  # fmt: skip

    def flops(self, backward: bool) -> int:
        """Three products of every slot and the router's; backward twice that again."""
        forward = 2 * self.tokens * self.hidden * (3 * self.top_k * self.ffn + 3 * self.shared + self.experts)
        return 3 * forward if backward else forward

    def bytes(self, backward: bool, touched: int) -> int:
        """What any implementation must move where `touched` experts have a token: forward their weights, the router's, tokens and
        results; backward the weights again, the gradients of all weights, of results and of tokens."""
        expert, router, tokens = 3 * self.ffn * self.hidden, self.experts * self.hidden, 2 * self.tokens * self.hidden
        forward = touched * expert + 3 * self.shared * self.hidden + router + tokens
        return 2 * (2 * forward + self.experts * expert + router if backward else forward)


@dataclass
class Weights:
    """bf16: router `experts hidden`, gate_up `experts 2*ffn hidden` (gate, then up), down `experts hidden ffn`; or transposed.
    shared: gate and up `shared hidden`, down `hidden shared`, if there is one."""

    router: nn.Parameter
    gate_up: nn.Parameter
    down: nn.Parameter
    shared: tuple[nn.Parameter, ...] = ()


@dataclass
class Inputs:
    """x and grad_out `tokens hidden`, bf16; touched: how many experts have a token."""

    x: Tensor
    weights: Weights
    touched: int
    grad_out: Tensor | None = None

    def leaves(self) -> list[Tensor]:
        """What gets gradients."""
        return [self.x, self.weights.router, self.weights.gate_up, self.weights.down]


def make_weights(p: Problem, device: torch.device, backward: bool = False) -> Weights:
    """So that logits, activations and results are of the order of 1."""
    generator = torch.Generator(device).manual_seed(1234)

    def normal(scale: float, *shape: int) -> nn.Parameter:
        t = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
        return nn.Parameter(t.mul_(scale), requires_grad=backward)

    wide, narrow = (p.hidden, 2 * p.ffn), (p.ffn, p.hidden)
    return Weights(
        normal(p.hidden**-0.5, p.experts, p.hidden),
        normal(p.hidden**-0.5, p.experts, *(wide if p.transposed else wide[::-1])),
        normal(2 * p.ffn**-0.5, p.experts, *(narrow if p.transposed else narrow[::-1])),
        tuple(normal(shape[1] ** -0.5, *shape) for shape in ((p.shared, p.hidden), (p.shared, p.hidden), (p.hidden, p.shared)))
        if p.shared else (),
    )  # fmt: skip


def make_inputs(p: Problem, device: torch.device, weights: Weights, seed: int = 0, backward: bool = False) -> Inputs:
    """Tokens that choose the experts drawn for them: normal ones moved along the router's rows until their logits are at least 2
    for the chosen and at most 1 for the rest. No rounding of logits changes a choice, so every implementation has the same."""
    generator = torch.Generator(device).manual_seed(seed)
    double: dict[str, object] = {"dtype": torch.float64, "device": device}
    draw = torch.rand(p.tokens, p.experts, generator=generator, **double)  # type: ignore[call-overload]
    draw[:, : p.hot] += 1
    chosen = draw.topk(p.top_k).indices
    wanted = torch.randn(p.tokens, p.experts, generator=generator, **double).mul_(0.5).clamp_(max=1.0)  # type: ignore[call-overload]
    above = torch.rand(p.tokens, p.top_k, generator=generator, **double)  # type: ignore[call-overload]
    wanted.scatter_(1, chosen, 2 + above)
    x = torch.randn(p.tokens, p.hidden, generator=generator, **double)  # type: ignore[call-overload]
    router = weights.router.detach().double()
    x += (wanted - x @ router.T) @ torch.linalg.solve(router @ router.T, router)
    grad_out = torch.randn(x.shape, dtype=torch.bfloat16, device=device, generator=generator) if backward else None
    return Inputs(x.bfloat16().requires_grad_(backward), weights, int(chosen.unique().numel()), grad_out)


def plain(p: Problem, given: Inputs, dtype: torch.dtype) -> list[Tensor]:
    """[out] or, where there is a grad_out, [out, gradients of Inputs.leaves()], by the formula in this dtype: an expert at a time
    with autograd over its rows alone, sums of rows in the dtype, as in transformers' eager experts. Of all tokens and weights, in
    float64 too: the largest case, Mixtral's 16384 tokens forward and backward, is 35 TFLOP and 11 GB of gradients.
    """
    w, grad_out, wide = given.weights, given.grad_out, torch.float64 if dtype is torch.float64 else torch.float32
    x, router = given.x.detach().to(dtype), w.router.detach().to(dtype)
    logits = (x @ router.T).to(wide).requires_grad_()
    top, chosen = logits.softmax(-1).topk(p.top_k)
    weights = top / top.sum(-1, keepdim=True)
    weights = weights.to(dtype) if p.round_weights else weights
    out, grads = torch.zeros_like(x), [torch.zeros_like(t, dtype=dtype) for t in given.leaves()] if grad_out is not None else []
    grad_weights = torch.zeros_like(weights)
    for e in range(p.experts):
        token, slot = (chosen == e).nonzero(as_tuple=True)
        if not len(token):
            continue
        expert = [x[token], weights.detach()[token, slot], w.gate_up.detach()[e].to(dtype), w.down.detach()[e].to(dtype)]
        own = [t.requires_grad_(grad_out is not None) for t in expert]
        gate_up, down = (t.T if p.transposed else t for t in own[2:])
        gate, up = F.linear(own[0], gate_up).chunk(2, -1)
        y = (F.linear(F.silu(gate) * up, down) * own[1][:, None]).to(dtype)
        out.index_add_(0, token, y.detach())
        if grad_out is not None:
            grad_x, grad_weights[token, slot], grads[2][e], grads[3][e] = torch.autograd.grad(y, own, grad_out[token].to(dtype))
            grads[0].index_add_(0, token, grad_x)
    if p.shared:
        gate, up, down = (t.detach().to(dtype) for t in w.shared)
        out += F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    if grad_out is not None:
        (grad_logits,) = torch.autograd.grad(weights, logits, grad_weights)
        grad_logits = grad_logits.to(dtype)
        grads[0] += grad_logits @ router
        grads[1] = grad_logits.T @ x
    return [out, *grads]


def plain_router(p: Problem, given: Inputs, dtype: torch.dtype) -> list[Tensor]:
    """[weights `tokens top_k`, best first; logits `tokens experts`]."""
    logits = given.x.detach().to(dtype) @ given.weights.router.detach().to(dtype).T
    top = logits.to(torch.float64 if dtype is torch.float64 else torch.float32).softmax(-1).topk(p.top_k).values
    weights = top / top.sum(-1, keepdim=True)
    return [weights.to(dtype) if p.round_weights else weights, logits]

"""What is computed in a case of the attention benchmark: inputs, the exact result, and what it must cost."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from einops import rearrange
from torch import Tensor

BLOCK = 128  # of a block map
CHUNK = 2**27  # logits at once, where attention is computed by the formula
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Problem:
    """Query i stands at key position i + keys - seq. left: how many keys before its own it attends, -1 for all; prefix: keys of
    each sequence that all its queries attend; documents: lengths of those packed into one sequence; page: keys of a page, 0 for
    keys in a row."""

    batch: int
    seq: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    context: int = 0  # keys, where they are not as many as the queries
    causal: bool = True
    left: int = -1
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    bias: bool = False
    prefix: tuple[int, ...] = ()
    documents: tuple[int, ...] = ()
    block_map: bool = False
    page: int = 0
    fp8: bool = False

    @property
    def keys(self) -> int:
        return self.context or self.seq

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def __str__(self) -> str:
        size = f"KV{self.context}" if self.context else f"S{self.seq}"
        return f"H{self.heads}/{self.kv_heads} D{self.head_dim} B{self.batch} {size}"

    def tiny(self) -> Problem:
        """The same in a size for a CPU."""
        group = min(self.heads // self.kv_heads, 2)
        made = dataclasses.replace(
            self, batch=min(self.batch, 2), seq=min(self.seq, 40), heads=2 * group, kv_heads=2, head_dim=self.head_dim // 8,
            context=min(self.context, 64), left=min(self.left, 7), page=min(self.page, 16),
            prefix=tuple(n // 256 for n in self.prefix), documents=tuple(max(n // 256, 1) for n in self.documents),
        )  # fmt: skip
        seq = sum(made.documents) or (4 * BLOCK if self.block_map else made.seq)
        return dataclasses.replace(made, seq=seq)

    def blocks(self) -> Tensor:
        """The block map, `seq_blocks key_blocks`: a band around the diagonal, and first blocks that all attend and that attend
        all; of 512 blocks a row, 51."""
        n = self.seq // BLOCK
        near, everywhere = n // 25, max(1, n // 51)
        i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
        return ((i - j).abs() <= near) | (i < everywhere) | (j < everywhere)

    def spans(self) -> tuple[Tensor, Tensor]:
        """(first, end), `batch seq`: query i attends keys first to end - 1, less what the block map leaves out."""
        at = torch.arange(self.seq) + self.keys - self.seq
        end = at + 1 if self.causal else torch.full_like(at, self.keys)
        first = (at - self.left).clamp(min=0) if self.left >= 0 else torch.zeros_like(at)
        if self.documents:
            lengths = torch.tensor(self.documents)
            stop = lengths.cumsum(0)
            first = torch.maximum(first, (stop - lengths).repeat_interleave(lengths))
            end = torch.minimum(end, stop.repeat_interleave(lengths))
        prefix = torch.tensor(self.prefix or (0,) * self.batch)
        return first.expand(self.batch, -1), torch.maximum(end, prefix[:, None])

    def pairs(self) -> int:
        """Of a query and a key it attends, over the batch, for one head."""
        first, end = self.spans()
        return self.batch * int(self.blocks().sum()) * BLOCK**2 if self.block_map else int((end - first).sum())

    def flops(self, backward: bool) -> int:
        """Two products of every pair forward, five backward."""
        return 4 * self.heads * self.head_dim * self.pairs() * (5 if backward else 2) // 2

    def bytes(self, backward: bool) -> int:
        """What any implementation must move: forward the inputs and the result; backward these, the gradient of the result, and
        the gradients."""
        queries = self.batch * self.seq * self.heads * self.head_dim
        keys = self.batch * self.keys * self.kv_heads * self.head_dim
        bias = 2 * self.heads * self.seq * self.keys if self.bias else 0
        given = (1 if self.fp8 else 2) * (queries + 2 * keys) + bias
        return given + 2 * queries + (given + 2 * queries if backward else 0)

    def standard_bytes(self) -> int:
        """HBM bytes of `standard` at the least: per logit 2 written by the first product, 2 read and 4 written by the softmax, 4
        read and 2 written by the cast, 2 read by the second product; q scaled, k and v copied for every head."""
        queries = 2 * self.batch * self.seq * self.heads * self.head_dim
        keys = 2 * self.batch * self.keys * self.kv_heads * self.head_dim
        copied = 2 * self.batch * self.keys * self.heads * self.head_dim
        return 16 * self.batch * self.heads * self.seq * self.keys + 4 * queries + 2 * (keys + 2 * copied)


@dataclass
class Inputs:
    """q `batch seq heads head_dim`, k and v `batch keys kv_heads head_dim`, bf16; what else a case has: sinks, alibi_slopes
    `heads`, bias `1 heads seq keys`. ours: the arguments of fusedblock.attention that are made ahead, some instead of q, k, v."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    ours: dict[str, Tensor] = field(default_factory=dict)

    def leaves(self) -> list[Tensor]:
        """What gets gradients."""
        return [t for t in (self.q, self.k, self.v, self.bias, self.sinks) if t is not None]

    def fresh(self) -> Inputs:
        """The same data, for a graph of its own."""
        names = ("q", "k", "v", "bias", "sinks")
        own = {n: t.detach().requires_grad_(True) for n in names if (t := getattr(self, n)) is not None}
        return dataclasses.replace(self, **own)


def make_inputs(p: Problem, device: torch.device, seed: int = 0, backward: bool = False) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    made = Inputs(
        random(p.batch, p.seq, p.heads, p.head_dim),
        random(p.batch, p.keys, p.kv_heads, p.head_dim),
        random(p.batch, p.keys, p.kv_heads, p.head_dim),
    )
    if backward:
        made.grad_out = random(*made.q.shape)
    if p.sinks:
        made.sinks = random(p.heads)
    if p.alibi:
        made.alibi_slopes = 2.0 ** (-8.0 * torch.arange(1, p.heads + 1, device=device) / p.heads)
    if p.bias:
        made.bias = random(1, p.heads, p.seq, p.keys)
    if p.prefix:
        made.ours["prefix_lens"] = torch.tensor(p.prefix, dtype=torch.int32, device=device)
    if p.documents:
        offsets = torch.tensor([0, *accumulate(p.documents)], dtype=torch.int32, device=device)
        made.ours |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    if p.block_map:
        made.ours["block_map"] = p.blocks().to(device)[None, None]
    if p.page:
        pages = p.keys // p.page
        table = torch.randperm(p.batch * pages, generator=generator, device=device)
        for name in ("k", "v"):
            paged = torch.empty(p.batch * pages, p.page, p.kv_heads, p.head_dim, device=device, dtype=torch.bfloat16)
            rows = rearrange(getattr(made, name), "batch (pages page) heads dim -> (batch pages) page heads dim", page=p.page)
            made.ours[name] = paged.index_copy_(0, table, rows)
        made.ours["block_table"] = table.int().view(p.batch, pages)
        made.ours["seqused_k"] = torch.full((p.batch,), p.keys, dtype=torch.int32, device=device)
    if p.fp8:
        for name in ("q", "k", "v"):
            wide: Tensor = getattr(made, name)
            # Powers of two: what the fp8 values stand for is then exact in bf16 too. 2**-6 leaves |x| < 7 below the largest.
            scale = 2.0 ** (-6.0 + torch.arange(wide.shape[2], device=device) % 2)
            small = (wide.float() / scale[:, None]).to(FP8)
            made.ours |= {name: small, f"{name}_scale": scale.expand(p.batch, -1).contiguous()}
            setattr(made, name, (small.float() * scale[:, None]).bfloat16())
    return made


def plain(p: Problem, given: Inputs, dtype: torch.dtype) -> list[Tensor]:
    """By the formula in dtype, softmax in fp32 (fp64 for fp64), some rows at a time: out, or the gradients of given.leaves()
    where given has one of the result. In float64 the reference; in bf16 what plain torch makes of it, the yardstick of errors."""
    wide, train, device = torch.promote_types(dtype, torch.float32), given.grad_out is not None, given.q.device
    first, end = p.spans()
    limits = first.to(device), end.to(device)
    at = torch.arange(p.seq, device=device) + p.keys - p.seq
    step = BLOCK if p.block_map else max(1, CHUNK // (p.heads * p.keys))
    blocks = p.blocks() if p.block_map else None
    leaves = given.leaves()
    made = [torch.zeros(t.shape, dtype=wide, device=device) for t in (leaves if train else [given.q])]
    for b in range(p.batch):
        for start in range(0, p.seq, step):
            rows = slice(start, min(start + step, p.seq))
            if blocks is None:
                columns = torch.arange(int(first[b, rows].min()), int(end[b, rows].max()))
            else:
                columns = (blocks[start // BLOCK].nonzero() * BLOCK + torch.arange(BLOCK)).flatten()
            columns = columns.to(device)
            allowed = (columns >= limits[0][b, rows, None]) & (columns < limits[1][b, rows, None])
            distance = (at[rows, None] - columns).abs()
            parts: list[Tensor | None] = [given.q[b, rows], given.k[b, columns], given.v[b, columns], None, given.sinks]
            if given.bias is not None:
                parts[3] = given.bias[0, :, rows].index_select(2, columns)
            parts = [None if t is None else t.detach().to(dtype).requires_grad_(train) for t in parts]
            with torch.set_grad_enabled(train):
                out = _attend(p, *parts, given.alibi_slopes, allowed, distance, wide)  # type: ignore[arg-type]
            if given.grad_out is None:
                made[0][b, rows] = out.to(wide)
                continue
            grads = [g.to(wide) for g in torch.autograd.grad(out, [t for t in parts if t is not None],
                                                             given.grad_out[b, rows].to(dtype))]  # fmt: skip
            made[0][b, rows] = grads.pop(0)
            made[1][b].index_add_(0, columns, grads.pop(0))
            made[2][b].index_add_(0, columns, grads.pop(0))
            if given.bias is not None:
                made[3][0, :, rows].index_add_(2, columns, grads.pop(0))
            if given.sinks is not None:
                made[-1] += grads.pop(0)
    return [t.to(dtype) for t in made]


def _attend(p: Problem, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, slopes: Tensor | None,
            allowed: Tensor, distance: Tensor, wide: torch.dtype) -> Tensor:  # fmt: skip
    """q `rows heads head_dim`, k and v `columns kv_heads head_dim`, bias `heads rows columns` -> `rows heads head_dim`."""
    rows = q.shape[0]
    q, k, v = rearrange(q, "r (h g) d -> h (g r) d", h=p.kv_heads), rearrange(k, "c h d -> h d c"), rearrange(v, "c h d -> h c d")
    logits = rearrange(q @ k, "h (g r) c -> (h g) r c", r=rows).to(wide) * p.scale
    if p.softcap:
        logits = p.softcap * torch.tanh(logits / p.softcap)
    if slopes is not None:
        logits = logits - slopes.to(wide)[:, None, None] * distance
    if bias is not None:
        logits = logits + bias.to(wide)
    logits = logits.masked_fill(~allowed, float("-inf"))
    if p.fp8 and wide is torch.float32:  # weights rounded as fp8 tensor cores take them; their sum is not
        weight = torch.exp(logits - logits.amax(-1, keepdim=True))
        whole = rearrange(weight.sum(-1), "h r -> r h 1")
        rounded = rearrange(weight.to(FP8).to(v.dtype), "(h g) r c -> h (g r) c", h=p.kv_heads)
        return (rearrange(rounded @ v, "h (g r) d -> r (h g) d", r=rows) / whole).to(v.dtype)
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(wide)[:, None, None].expand(-1, rows, 1)], -1)
    weight = torch.softmax(logits, -1)[..., : k.shape[2]].to(v.dtype)
    return rearrange(rearrange(weight, "(h g) r c -> h (g r) c", h=p.kv_heads) @ v, "h (g r) d -> r (h g) d", r=rows)

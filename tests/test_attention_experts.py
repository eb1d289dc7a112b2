"""Attention whose heads are experts beside transformers' JetMoe and beside a formula in float64; caches, graphs and errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from einops import einsum
from llama import relative_error
from op_cases import recording
from torch import Tensor, nn
from transformers import DynamicCache, JetMoeConfig, MistralConfig, StaticCache
from transformers.models.jetmoe.modeling_jetmoe import JetMoeAttention, JetMoeRotaryEmbedding

import fusedblock
from fusedblock import KVCache
from fusedblock.blocks import Mixed

BF16 = torch.bfloat16
HIDDEN, KV_HEADS, HEAD_DIM, EXPERTS, TOP_K, SEQ = 40, 3, 16, 5, 2, 11
CONFIG = JetMoeConfig(
    hidden_size=HIDDEN, num_key_value_heads=KV_HEADS, kv_channels=HEAD_DIM, num_attention_heads=KV_HEADS * TOP_K,
    num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, num_hidden_layers=1, attn_implementation="eager",
)  # fmt: skip


def make(seed: int = 3) -> JetMoeAttention:
    """transformers' module in float64, with values that every dtype holds."""
    module, g = JetMoeAttention(CONFIG, 0).double(), torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        scale = 0.3 if "bias" in name else 2.0 * p.shape[-1] ** -0.5 if "router" in name else p.shape[-1] ** -0.5
        p.data = (torch.randn(p.shape, generator=g) * scale).to(BF16).double()
    return module


def inputs(dtype: torch.dtype, seq: int = SEQ) -> Tensor:
    return torch.randn(2, seq, HIDDEN, generator=torch.Generator().manual_seed(4)).to(BF16).to(dtype)


def tables(dtype: torch.dtype, first: int = 0, seq: int = SEQ) -> tuple[Tensor, Tensor]:
    cos, sin = JetMoeRotaryEmbedding(CONFIG)(torch.empty(0), torch.arange(first, first + seq)[None])
    return cos.to(dtype), sin.to(dtype)


def padding(pad: int) -> Tensor:
    """`batch seq`: the last sequence has `pad` padding tokens on its left."""
    mask = torch.ones(2, SEQ, dtype=torch.bool)
    mask[-1, :pad] = False
    return mask


def run_theirs(module: JetMoeAttention, x: Tensor, pad: int = 0) -> tuple[Tensor, Tensor]:
    seen = padding(pad)[:, None, None, :] & torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    mask = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, -1e30)
    out, _, logits = module(x, mask, tables(x.dtype))
    return out, logits


def weights_of(module: JetMoeAttention) -> dict[str, Tensor]:
    experts = module.experts
    return {"router_weight": experts.router.layer.weight, "q_weight": experts.input_linear.weight,
            "kv_weight": module.kv_proj.weight, "o_weight": experts.output_linear.weight, "bias": experts.bias}  # fmt: skip


def run_ours(module: JetMoeAttention, x: Tensor, pad: int = 0, first: int = 0, **more: Any) -> Mixed:
    cos, sin = (t[..., : HEAD_DIM // 2] for t in tables(x.dtype, first, x.shape[1]))
    given = {"top_k": TOP_K, "head_dim": HEAD_DIM, "mask": padding(pad) if pad else None, **weights_of(module), **more}
    return fusedblock.mixture_of_attention(x, cos=cos, sin=sin, **given)


def outcome(run: Any, module: nn.Module, dtype: torch.dtype, pad: int, keep: Tensor) -> dict[str, Tensor]:
    """out and logits of the tokens to keep, and gradients of a combination of them, by parameter."""
    module, x = copy.deepcopy(module).to(dtype), inputs(dtype).requires_grad_()
    out, logits = run(module, x, pad)[:2]
    g = torch.Generator().manual_seed(5)
    upstream, of_logits = (torch.randn(t.shape, generator=g).to(BF16) for t in (out, logits))
    leaves = {"x": x, **dict(module.named_parameters())}
    upstream = (upstream * keep[..., None]).to(dtype), (of_logits * keep.view(-1, 1)).to(logits.dtype)
    grads = torch.autograd.grad((out, logits), [*leaves.values()], upstream)
    return {"out": out[keep].detach(), "logits": logits[keep.flatten()].detach(), **dict(zip(leaves, grads))}


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("pad", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_jetmoe(dtype: torch.dtype, pad: int, kernels: bool) -> None:
    """A token's result hangs on no other's choice, so those count that every dtype routes alike."""
    module = make()
    chosen = [run_theirs(copy.deepcopy(module).to(d), inputs(d))[1].topk(TOP_K).indices for d in (torch.float64, dtype)]
    keep = (chosen[0] == chosen[1]).all(1).view(2, SEQ) & padding(pad)
    assert keep.sum() >= 2 * SEQ - pad - 2
    want, plain = (outcome(run_theirs, module, d, pad, keep) for d in (torch.float64, dtype))
    with recording("sm_90") if kernels else torch.enable_grad():
        got = outcome(run_ours, module, dtype, pad, keep)
    for name, value in want.items():
        limit = 1e-5 if dtype is torch.float32 else 1.5 * relative_error(plain[name], value)
        assert relative_error(got[name], value) <= limit, name


# ---- beside a formula ----------------------------------------------------------------------------------------------------------


def dense(x: Tensor, router: Tensor, q: Tensor, kv: Tensor, o: Tensor, bias: Tensor, residual: Tensor, cos: Tensor,
          sin: Tensor) -> Tensor:  # fmt: skip
    """Every token through all experts, by weights that are 0 for what it did not choose."""
    logits = x @ router.T
    gone = logits < logits.topk(TOP_K).values[..., -1:]
    gate = logits.masked_fill(gone, float("-inf")).softmax(-1)
    queries = einsum(x, q.unflatten(1, (-1, HEAD_DIM)), "b s h, e g d h -> b e g s d")
    k, v = einsum(x, kv.unflatten(0, (2, -1, HEAD_DIM)), "b s h, two g d h -> two b g s d")

    def turn(t: Tensor) -> Tensor:
        a, b = t.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    scores = einsum(turn(queries), turn(k), "b e g s d, b g t d -> b e g s t") * HEAD_DIM**-0.5
    p = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), float("-inf")).softmax(-1)
    a = einsum(p, v, "b e g s t, b g t d -> b e s g d").flatten(3)
    return einsum(a, o, gate, "b e s c, e h c, b s e -> b s h") + bias + residual


def arguments(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves, and cos and sin."""
    weights, x = weights_of(make()), inputs(torch.float64, 6)
    leaves = (x, *weights.values(), x.flip(0))
    return [t.detach().to(dtype).requires_grad_() for t in leaves], [t[..., : HEAD_DIM // 2] for t in tables(dtype, 0, 6)]


def public(*given: Tensor) -> Tensor:
    x, router, q, kv, o, bias, residual, cos, sin = given
    return fusedblock.mixture_of_attention(x, router, q, kv, o, cos, sin, top_k=TOP_K, head_dim=HEAD_DIM, bias=bias,
                                           residual=residual).out  # fmt: skip


@pytest.mark.parametrize("interpreted", [True, False])
def test_formula_in_float64(interpreted: bool) -> None:
    given, angles = arguments(torch.float64)
    with recording("sm_90") if interpreted else torch.enable_grad():
        got = public(*given, *angles)
        upstream = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
        grads = torch.autograd.grad(got, given, upstream)
    want = dense(*given, *angles)
    assert relative_error(got, want) < 1e-12
    for ours, theirs in zip(grads, torch.autograd.grad(want, given, upstream)):
        assert relative_error(ours, theirs) < 1e-11


def test_equal_bits_over_repeats_and_what_is_launched() -> None:
    module, x = make().to(BF16), inputs(BF16)
    with recording("sm_90") as launches, torch.no_grad():
        first = run_ours(module, x)
    # Router, its index with the choice, q's experts, keys and values, rotation, attention, o's experts, their sums.
    assert [launch.kernel for launch in launches] == [
        "_logits_kernel", "_choice_kernel", "_rows_kernel", "_kernel", "_turn_kernel", "_split_kernel", "_rows_kernel",
        "_combine_kernel",
    ]  # fmt: skip
    with recording("sm_90"), torch.no_grad():
        assert all(map(torch.equal, run_ours(module, x), first))


def test_compiled() -> None:
    given, angles = arguments(torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(public, fullgraph=True, backend="aot_eager")
    outs = [f(*given, *angles) for f in (public, compiled)]
    results = [(out.detach(), *torch.autograd.grad(out.square().sum(), given)) for out in outs]
    for want, got in zip(*results):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("interpreted", [True, False])
def test_no_tokens(interpreted: bool) -> None:
    given, angles = arguments(torch.float32)
    with recording("sm_90") if interpreted else torch.enable_grad():
        for batch, seq in ((2, 0), (0, 6)):
            x, residual = (given[i][:batch, :seq] for i in (0, 6))
            out = public(x, *given[1:6], residual, *(t[:, :seq] for t in angles))
            assert out.shape == x.shape
            grads = torch.autograd.grad(out, given[:6], torch.ones_like(out))
            assert all(not g.any() and g.shape == t.shape for g, t in zip(grads, given))


# ---- caches --------------------------------------------------------------------------------------------------------------------

CACHES = {
    "growing": lambda: KVCache(), "fixed": lambda: KVCache(max_length=SEQ), "dynamic": lambda: DynamicCache(config=CONFIG),
    "static": lambda: StaticCache(config=CONFIG, max_cache_len=SEQ + 3),
}  # fmt: skip


@pytest.mark.parametrize("kind", CACHES)
@torch.no_grad()
def test_a_prompt_and_single_tokens_are_the_whole(kind: str) -> None:
    module, x, cache = make().float(), inputs(torch.float32), CACHES[kind]()
    whole, at = run_ours(module, x), 0
    parts = []
    for part in x.split([SEQ - 3, 1, 1, 1], 1):
        parts.append(run_ours(module, part, first=at, cache=cache).out)
        at += part.shape[1]
    assert relative_error(torch.cat(parts, 1), whole.out) < 1e-6


@torch.no_grad()
def test_a_cache_that_drops_keys() -> None:
    """It is right where the window needs no others, and refused where it does: a sliding layer keeps the last three."""
    words = {"hidden_size": HIDDEN, "num_attention_heads": KV_HEADS, "num_hidden_layers": 1}
    config = MistralConfig(**words, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, sliding_window=4)
    module, x = make().float(), inputs(torch.float32)
    first, rest = x.split([SEQ - 3, 3], 1)
    for window, keys in (((3, 0), 0), ((4, 0), 7), ((-1, 0), SEQ), (None, SEQ)):
        cache = DynamicCache(config=config)
        run_ours(module, first, cache=cache, window=window)
        if keys:
            with pytest.raises(ValueError, match=f"^mixture_of_attention: the cache returned 6 keys, {keys} are needed$"):
                run_ours(module, rest, first=SEQ - 3, cache=cache, window=window)
        else:
            got = run_ours(module, rest, first=SEQ - 3, cache=cache, window=window).out
            assert relative_error(got, run_ours(module, x, window=window).out[:, -3:]) < 1e-6


# ---- errors --------------------------------------------------------------------------------------------------------------------

ERRORS = [
    ({"x": torch.ones(2, 40)}, ValueError, "x has shape (2, 40), expected (batch seq hidden)"),
    ({"x": None}, TypeError, "x is NoneType, expected a tensor"),
    ({"bias": 1.0}, TypeError, "bias is float, expected a tensor"),
    ({"head_dim": 20}, ValueError, "q_weight has kv_heads*head_dim=48, expected a multiple of head_dim=20"),
    ({"kv_weight": torch.ones(48, 40)}, ValueError, "kv_weight has 48 rows, expected 2*kv_heads*head_dim=96"),
    ({"o_weight": torch.ones(5, 48, 40)}, ValueError,
     "o_weight (experts hidden kv_heads*head_dim) has hidden=48, but hidden=40 so far"),
    ({"o_weight": torch.ones(4, 40, 48)}, ValueError,
     "o_weight (experts hidden kv_heads*head_dim) has experts=4, but experts=5 so far"),
    ({"bias": torch.ones(41)}, ValueError, "bias (hidden) has hidden=41, but hidden=40 so far"),
    ({"residual": torch.ones(2, 10, 40)}, ValueError, "residual (batch seq hidden) has seq=10, but seq=11 so far"),
    ({"q_weight": torch.ones(5, 48, 40, dtype=BF16)}, ValueError, "q_weight has dtype torch.bfloat16, but x has torch.float32"),
    ({"sin": None}, ValueError, "cos is a tensor, but sin is None: both or neither"),
    ({"head_dim": 12}, ValueError, "head_dim=12, expected 16 to 256 in multiples of 8"),
    ({"top_k": 6}, ValueError, "top_k=6, expected 1 to experts=5"),
    ({"top_k": "2"}, TypeError, "top_k is '2' (str), expected an integer"),
    ({"top_k": 2.0}, TypeError, "top_k is 2.0 (float), expected an integer"),
    ({"head_dim": "24"}, TypeError, "head_dim is '24' (str), expected an integer"),
    ({"head_dim": 24.0}, TypeError, "head_dim is 24.0 (float), expected an integer"),
    ({"scoring": "relu"}, ValueError, "scoring='relu', expected one of softmax, sigmoid, softmax_chosen"),
    ({"cache": object()}, TypeError, "cache is a object without update"),
    ({"mask": torch.ones(2, 9, dtype=torch.bool)}, ValueError,
     "mask of shape (2, 1, 1, 9) has context=9, but q and k have context=11"),
    ({"layer_idx": -1}, ValueError, "layer_idx is -1, expected an integer from 0 on"),
    ({"layer_idx": "0"}, ValueError, "layer_idx is '0', expected an integer from 0 on"),
    ({"renormalise": None}, TypeError, "renormalise is None (NoneType), expected True or False"),
    ({"interleaved": "no"}, TypeError, "interleaved is 'no' (str), expected True or False"),
    ({"cos": torch.ones(1, 11, HEAD_DIM // 2, requires_grad=True)}, ValueError,
     "cos requires a gradient, and there is none for it"),
    ({"softcap": -1.0}, ValueError, "softcap=-1.0"),
    ({"window": (1, 2, 3)}, ValueError, "window=(1, 2, 3)"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "message"), ERRORS, ids=[m[:40] for _, _, m in ERRORS])
def test_errors_come_before_any_launch_and_leave_the_cache(changes: dict[str, Any], kind: type, message: str) -> None:
    module, cache = make().float(), KVCache()
    cos, sin = (t[..., : HEAD_DIM // 2] for t in tables(torch.float32))
    given = {"x": inputs(torch.float32), "cos": cos, "sin": sin, "top_k": TOP_K, "head_dim": HEAD_DIM, "cache": cache,
             **weights_of(module)}  # fmt: skip
    with recording("sm_90") as launches, pytest.raises(kind) as raised:
        fusedblock.mixture_of_attention(**{**given, **changes})
    assert str(raised.value).startswith(f"mixture_of_attention: {message}")
    assert not launches and cache.get_seq_length() == 0

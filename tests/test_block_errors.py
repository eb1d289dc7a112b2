"""What FusedBlock and KVCache refuse, by name and before anything is launched, and what a cache keeps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from llama import relative_error
from torch import nn

import fusedblock
from fusedblock import BlockConfig, FusedBlock, KVCache
from fusedblock.ops import ShapeError

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
LLAMA = BlockConfig(model_type="llama", **SIZES)
X = torch.zeros(2, 3, 64)
IDS = torch.zeros(1, 3, dtype=torch.long)
ONES = torch.ones(2, 3, 3, 3)
BAD: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "width": (ShapeError, r"hidden_states has shape \(2, 3, 63\), expected \(batch seq 64\)", {"hidden_states": X[..., :63]}),
    "axes": (ShapeError, r"hidden_states has shape \(3, 64\), expected \(batch seq 64\)", {"hidden_states": X[0]}),
    "dtype": (ValueError, "hidden_states is torch.float64", {"hidden_states": X.double()}),
    "half": (ValueError, "a weight is torch.float32, hidden_states is torch.float16", {"hidden_states": X.half()}),
    "device": (ValueError, "hidden_states is on meta, the weights are on cpu", {"hidden_states": X.to("meta")}),
    "position device": (ValueError, "position_ids is on meta, the weights are on cpu", {"position_ids": IDS.to("meta")}),
    "positions": (ShapeError, r"shape \(1, 2\), expected \(1\|2 3\)", {"position_ids": IDS[:, :2]}),
    "position dtype": (ValueError, "position_ids are torch.float32, expected integers", {"position_ids": IDS.float()}),
    "tables": (ShapeError, r"sin has shape \(1, 2, 64\), expected \(1\|2 3 rotary\)", {"position_embeddings": (X, X[:1, :2])}),
    "table width": (ValueError, "position_embeddings have 64 columns for head_dim=16", {"position_embeddings": (X, X)}),
    "nothing": (TypeError, "hidden_states is a NoneType, expected a tensor", {"hidden_states": None}),
    "no tables": (TypeError, "cos is a int, expected a tensor", {"position_embeddings": (1, 2)}),
    "one table": (TypeError, r"position_embeddings is a Tensor, expected \(cos, sin\)", {"position_embeddings": X}),
    "mask": (ShapeError, r"shape \(2, 2\), expected \(2 3\): 0 tokens in the cache", {"attention_mask": ONES[0, 0, :2, :2] > 0}),
    "mask dtype": (ValueError, "attention_mask is torch.float32, expected bool or integers", {"attention_mask": ONES[0, 0, :2]}),
    "4-D mask": (ShapeError, r"\(2, 3, 3, 3\), expected \(1\|2 1\|4 1\|3 3\)", {"attention_mask": ONES > 0}),
    "4-D dtype": (ValueError, "attention_mask is torch.int64, expected bool or floating", {"attention_mask": ONES[:, :1].long()}),
    "no tensor": (TypeError, "attention_mask is a list, expected a tensor", {"attention_mask": [[True] * 3] * 2}),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_named_before_anything_is_launched(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error, message, given = BAD[case]
    block = FusedBlock(LLAMA).eval()
    monkeypatch.setattr(fusedblock.models.block.blocks, "forward", lambda *args, **kwargs: pytest.fail("it was launched"))
    with pytest.raises(error, match=message):
        block(**{"hidden_states": X, **given})


@pytest.mark.parametrize("family", ("bert", "roberta", "vit"))
def test_an_encoder_takes_no_cache(family: str) -> None:
    block = FusedBlock(BlockConfig(model_type=family, hidden_size=64, intermediate_size=96, num_attention_heads=4)).eval()
    with pytest.raises(ValueError, match=f"cache is given, but {family} attends both ways: it has no cache"):
        block(torch.randn(1, 3, 64), cache=KVCache())


def test_a_full_or_foreign_cache_is_refused_before_anything_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    block = FusedBlock(LLAMA).eval()
    cache = KVCache(max_length=4)
    with torch.no_grad():
        block(X, cache=cache)
        monkeypatch.setattr(fusedblock.models.block.blocks, "forward", lambda *args, **kwargs: pytest.fail("it was launched"))
        with pytest.raises(ValueError, match="max_length=4, layer 0 has 3 tokens and gets 3 more"):
            block(X, cache=cache)
        with pytest.raises(ValueError, match=r"holds keys of \(batch, kv_heads, head_dim\) \(2, 4, 16\), and gets \(1, 4, 16\)"):
            block(X[:1, :1], cache=cache)
        with pytest.raises(ValueError, match="holds keys of dtype torch.float32, and gets torch.bfloat16"):
            block.to(torch.bfloat16)(X[:, :1].bfloat16(), cache=cache)


@pytest.mark.parametrize("length", (None, 8))
@pytest.mark.parametrize("positioned", (False, True))
def test_a_mask_of_another_context_leaves_the_cache_as_it_was(length: int | None, positioned: bool) -> None:
    block = FusedBlock(LLAMA).eval()
    cache, x = KVCache(length), torch.randn(2, 3, 64)
    given = {"position_ids": torch.tensor([[3]])} if positioned else {}
    with torch.no_grad():
        block(x, cache=cache)
        with pytest.raises(ShapeError, match=r"shape \(2, 1, 1, 9\), expected \(1\|2 1\|4 1\|1 4\)"):
            block(x[:, :1], cache=cache, attention_mask=torch.ones(2, 1, 1, 9) > 0, **given)
        assert cache.get_seq_length() == 3
        want = block(x[:, :1], cache=copy.deepcopy(cache))
        got = block(x[:, :1], cache=cache, attention_mask=torch.ones(2, 1, 1, 4) > 0, **given)
        assert relative_error(got, want) < 1e-6 and cache.get_seq_length() == 4


def test_a_config_without_a_kernel_is_refused() -> None:
    for words, message in (
        ({"hidden_act": "mish"}, "hidden_act='mish', expected one of silu"),
        ({"num_attention_heads": 8}, "head_dim=8, the kernels take multiples of 8 from 16 to 256"),
        ({"model_type": "stablelm", "num_key_value_heads": 4, "qk_layernorm": True}, "for every head has no kernel"),
    ):
        with pytest.raises(ValueError, match=message):
            FusedBlock(BlockConfig(**{"model_type": "llama", **SIZES, **words}))
    with pytest.raises(TypeError, match="config is a dict, expected a BlockConfig"):
        FusedBlock(SIZES)


def test_a_cache_for_training_grows() -> None:
    """Gradients flow through a growing cache (prefix tuning); one with buffers says that it keeps none."""
    block = FusedBlock(LLAMA)
    x = torch.randn(2, 5, 64)
    cache = KVCache()
    out = torch.cat([block(part, cache=cache) for part in x.split([3, 2], dim=1)], dim=1)
    out.square().sum().backward()
    got = {name: p.grad.clone() for name, p in block.named_parameters()}
    block.zero_grad()
    block(x).square().sum().backward()
    for name, parameter in block.named_parameters():
        assert relative_error(got[name], parameter.grad) < 1e-5, name
    with pytest.raises(ValueError, match="require gradients cannot be kept with max_length"):
        block(x, cache=KVCache(max_length=8))


def test_a_cache_is_used_again() -> None:
    block = FusedBlock(LLAMA).eval()
    x = torch.randn(1, 4, 64)
    for cache in (KVCache(), KVCache(max_length=6)):
        with torch.no_grad():
            want = block(x, cache=cache)
            assert cache.get_seq_length() == 4 and cache.get_seq_length(1) == 0 and "tokens=4" in repr(cache)
            cache.reset()
            assert cache.get_seq_length() == 0 and torch.equal(block(x, cache=cache), want)
    for length in (0, 2.5, True):
        with pytest.raises(ValueError, match=f"max_length={length}, expected a positive number"):
            KVCache(max_length=length)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"keys have shape \(1, 2\), values \(1, 2\), expected one shape \(batch"):
        KVCache().update(x[:, :2, 0], x[:, :2, 0], 0)


def test_dropout_in_training_is_refused() -> None:
    block = FusedBlock(BlockConfig(model_type="gpt2", hidden_size=64, num_attention_heads=4))
    with pytest.raises(ValueError, match=r"attn.attn_dropout=0.1 in training; the kernels draw no random numbers, set it to 0"):
        block(torch.randn(1, 3, 64))
    assert block.eval()(torch.randn(1, 3, 64)).shape == (1, 3, 64)


def test_a_replaced_part_is_seen_or_refused() -> None:
    block = FusedBlock(LLAMA)
    x = torch.randn(1, 3, 64)
    with torch.no_grad():
        before = block(x)
        block.mlp.up_proj.weight = nn.Parameter(2 * block.mlp.up_proj.weight)
        assert not torch.equal(block(x), before)
        block.mlp.up_proj = nn.Sequential(block.mlp.up_proj)
        with pytest.raises(ValueError, match="FusedBlock: mlp.up_proj is .*Sequential, not torch.nn.Linear"):
            block(x)
    with pytest.raises(NotImplementedError, match="call the block"):
        block.mlp(x)

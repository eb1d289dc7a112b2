"""FusedBlock as people use it: in the place of a layer, with caches, in training, loaded from a shard, copied, compiled.

References: transformers' own layers, as their models call them.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from llama import relative_error
from op_cases import recording
from test_house import BLOCK, OPTIONAL, run_python
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

import fusedblock
from fusedblock import BlockConfig, FusedBlock, KVCache
from fusedblock.models.table import known_class

SOME = ("llama", "qwen3", "gpt2", "gpt_neox", "olmo2", "cohere-qk_norm", "smollm3", "bert")
SPARSE = ("qwen2_moe", "gpt_oss", "glm4_moe")
SEQ = 9
CACHED = (*families.DECODERS, *families.MIXTURES)


def layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if known_class(type(module))]


def recorded(name: str, model: nn.Module, pad: int = 0) -> list[tuple[nn.Module, Tensor, dict[str, Any], Tensor]]:
    """(layer, its input, what else the model gives it, its output) of every layer in one forward of the model."""
    seen: list[tuple[nn.Module, Tensor, dict[str, Any], Tensor]] = []

    def record(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen.append((layer, args[0], {**kwargs, "_args": args[1:]}, output[0] if isinstance(output, tuple) else output))

    hooks = [layer.register_forward_hook(record, with_kwargs=True) for layer in layers(model)]
    arguments, _ = families.inputs(name, model, pad, SEQ)
    with torch.no_grad():
        model(**arguments, **({"use_cache": False} if name in CACHED else {}))
    for hook in hooks:
        hook.remove()
    assert len(seen) == 2
    return seen


def block_of(model: nn.Module, index: int, **kwargs: Any) -> FusedBlock:
    """A block with copies of the layer's weights."""
    config = BlockConfig.from_dict(json.loads(json.dumps(model.config.to_dict())), layer_idx=index)
    block = FusedBlock(config, **kwargs)
    block.load_state_dict(layers(model)[index].state_dict())
    return block.eval()


def tokens_mask(pad: int) -> Tensor | None:
    """2-D: the second of two sequences begins with padding."""
    if not pad:
        return None
    mask = torch.ones(2, SEQ, dtype=torch.long)
    mask[1, :pad] = 0
    return mask


@pytest.mark.parametrize("name", families.ALL)
def test_state_dict_is_that_of_the_layer(name: str) -> None:
    model = families.build(name)
    for index, layer in enumerate(layers(model)):
        block = FusedBlock(BlockConfig.from_dict(model.config.to_dict(), layer_idx=index))
        want = {key: (value.shape, value.dtype) for key, value in layer.state_dict().items()}
        assert {key: (value.shape, value.dtype) for key, value in block.state_dict().items()} == want
        assert {key for key, _ in block.named_parameters()} == {key for key, _ in layer.named_parameters()}
        assert block.config.sparse == ("mlp.experts.down_proj" in want)


@pytest.mark.parametrize("pad", (0, 3), ids=("whole", "padded"))
@pytest.mark.parametrize("name", families.ALL)
def test_in_the_place_of_the_models_layers(name: str, pad: int) -> None:
    """Its own rotary tables, masks, windows and positions give what the model's give the layer. fp32, within 1e-5."""
    assert_in_the_place_of_the_models_layers(name, families.build(name), 0 if name == "vit" else pad)


def assert_in_the_place_of_the_models_layers(name: str, model: nn.Module, pad: int) -> None:
    mask = tokens_mask(pad)
    valid = slice(None) if mask is None else mask.bool()
    for index, (_, x, _, want) in enumerate(recorded(name, model, pad)):
        with torch.no_grad():
            got = block_of(model, index)(x, attention_mask=mask)
        assert relative_error(got[valid], want[valid]) < 1e-5


@pytest.mark.parametrize("name", families.ALL)
def test_half_precision_within_the_rule(name: str) -> None:
    """bf16: at most 1.5 times the error that transformers' layer makes, on the model's own arguments."""
    original = families.build(name)
    model = families.twin(original, torch.bfloat16)
    for index, (layer, x, given, base) in enumerate(recorded(name, model)):
        args = given.pop("_args")
        if given.get("position_embeddings") is not None:
            given["position_embeddings"] = tuple(t.double() for t in given["position_embeddings"])
        with torch.no_grad():
            want = copy.deepcopy(layer).double()(x.double(), *args, **given)
            got = block_of(model, index, dtype=torch.bfloat16)(x)
        want = want[0] if isinstance(want, tuple) else want
        assert got.dtype is torch.bfloat16
        assert relative_error(got, want) <= 1.5 * relative_error(base, want)


@pytest.mark.parametrize("name", families.ALL)
def test_gradients_are_those_of_the_layer(name: str) -> None:
    model, index = families.build(name), int(name in families.MIXTURES)  # the second layer of all of these has experts
    layer, x, given, _ = recorded(name, model)[index]
    args = given.pop("_args")
    block = block_of(model, index)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    theirs = layer(inputs[0], *args, **given)
    outs = (theirs[0] if isinstance(theirs, tuple) else theirs, block(inputs[1]))
    weights = torch.randn(outs[0].shape, generator=torch.Generator().manual_seed(3))
    for module, out in zip((layer, block), outs):
        module.zero_grad()
        (out * weights).sum().backward()
    want, got = ({n: p.grad for n, p in module.named_parameters()} for module in (layer, block))
    assert got.keys() == want.keys() and all(grad is not None for grad in got.values())
    scale = max(grad.norm() for grad in want.values())
    for key in [n for n in want if want[n].norm() > 1e-6 * scale]:  # a key bias's is zero but for rounding
        assert relative_error(got[key], want[key]) < 1e-5, key
    assert relative_error(inputs[1].grad, inputs[0].grad) < 1e-5


class Operators(TorchDispatchMode, list[str]):
    """The operators that were dispatched while it was open."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", SOME)
def test_serving_is_one_operator_on_our_kernels(name: str) -> None:
    """Without gradients: one registered op, and in it the kernels, which agree with plain torch."""
    block = block_of(families.build(name), 0)
    x = torch.randn(2, SEQ, 64)
    with torch.no_grad():
        want = block(x)
        with Operators() as ops:
            block(x)
        with recording("sm_90") as launches:
            got = block(x)
    assert [op for op in ops if op.startswith("fusedblock")] == ["fusedblock.block.default"]
    assert not {op.split(".")[1] for op in ops} & {"mm", "addmm", "matmul", "native_layer_norm", "_softmax"}
    assert len(launches) >= 5
    assert relative_error(got, want) < 1e-5


CACHES: dict[str, Callable[[Any], Any]] = {
    "growing": lambda config: KVCache(),
    "preallocated": lambda config: KVCache(max_length=12),
    "DynamicCache": lambda config: DynamicCache(config=config),
    "StaticCache": lambda config: StaticCache(config=config, max_cache_len=12),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", CACHED)
def test_decoding_with_a_cache_equals_one_forward(name: str, cache: str) -> None:
    """A prompt of 4 tokens, 2 more at once, then one by one; the windows of 6 are left behind."""
    model = families.build(name)
    held = CACHES[cache](model.config)
    x = torch.randn(2, SEQ, 64, generator=torch.Generator().manual_seed(4))
    for index in range(2):
        block = block_of(model, index)
        with torch.no_grad():
            want = block(x)
            parts = [block(part, cache=held) for part in x.split([4, 2, 1, 1, 1], dim=1)]
        assert relative_error(torch.cat(parts, dim=1), want) < 1e-5
        assert held.get_seq_length(index) == SEQ


@pytest.mark.parametrize("name", ("llama", "mistral", "gpt2"))
def test_decoding_with_padding(name: str) -> None:
    model = families.build(name)
    block, mask = block_of(model, 0), tokens_mask(3)
    x = torch.randn(2, SEQ, 64, generator=torch.Generator().manual_seed(4))
    cache = KVCache(max_length=SEQ)
    with torch.no_grad():
        want = block(x, attention_mask=mask)
        parts = [block(x[:, :7], attention_mask=mask[:, :7], cache=cache)]
        parts += [block(x[:, i : i + 1], attention_mask=mask[:, : i + 1].bool(), cache=cache) for i in (7, 8)]
        alone = block(x[1:, 3:], position_ids=torch.arange(3, SEQ)[None])
    assert relative_error(torch.cat(parts, dim=1)[mask.bool()], want[mask.bool()]) < 1e-5
    assert relative_error(want[1:, 3:], alone) < 1e-5


def test_the_models_own_mask_and_tables_and_a_cache_without_a_length() -> None:
    """What transformers hands its layers works as it is, also with a cache that says nothing of itself."""

    class Bare:
        def update(self, k: Tensor, v: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
            return k, v

    model = families.build("mistral", "eager")
    _, x, given, want = recorded("mistral", model, 3)[1]
    assert given["attention_mask"].dtype is torch.float32 and given["attention_mask"].dim() == 4
    passed = {"attention_mask": given["attention_mask"], "position_embeddings": given["position_embeddings"]}
    valid = tokens_mask(3).bool()
    with torch.no_grad():
        for extra in ({}, {"cache": Bare()}):
            assert relative_error(block_of(model, 1)(x, **passed, **extra)[valid], want[valid]) < 1e-5
        with pytest.raises(TypeError, match="cache is a Bare without get_seq_length; pass position_ids and a 4-D mask"):
            block_of(model, 1)(x, cache=Bare())


def test_one_table_for_many_blocks() -> None:
    model = families.build("smollm3")
    blocks = [block_of(model, index) for index in range(2)]
    assert blocks[1].rotary_emb is None  # SmolLM3 has layers without rope
    x = torch.randn(2, SEQ, 64)
    tables = blocks[0].rotary_emb(x, torch.arange(SEQ)[None])
    with torch.no_grad():
        for block in blocks:
            assert torch.equal(block(x, position_embeddings=tables), block(x))


@pytest.mark.parametrize("fused", (False, True), ids=("original", "fused"))
@pytest.mark.parametrize("name", (*SOME, *SPARSE))
def test_from_layer_shares_the_parameters(name: str, fused: bool) -> None:
    model = families.build(name)
    layer, x, _, want = recorded(name, model)[1]
    expected = dict(layer.named_parameters())
    if fused:
        fusedblock.fuse(model)
    block = FusedBlock.from_layer(layer)
    assert dict(block.named_parameters()).keys() == expected.keys()
    assert all(parameter is expected[key] for key, parameter in block.named_parameters())
    assert block.training is layer.training is False and block.config.layer_idx == (0 if name == "vit" else 1)
    with torch.no_grad():
        assert relative_error(block(x), want) < 1e-5
        list(layer.parameters())[-1].mul_(1.5)  # of a norm, or a bias: what no norm hides
        assert relative_error(block(x), want) > 1e-3


def test_from_layer_says_why_not() -> None:
    with pytest.raises(ValueError, match="Linear cannot be fused: Linear is not supported"):
        FusedBlock.from_layer(nn.Linear(2, 2))
    layer = layers(families.build("llama"))[0]
    layer.mlp.act_fn = nn.Tanh()
    with pytest.raises(ValueError, match="LlamaDecoderLayer cannot be fused: activation .*Tanh has no kernel"):
        FusedBlock.from_layer(layer)
    layer = layers(families.build("llama"))[0]
    layer.mlp.up_proj.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match="mlp.up_proj has a hook"):
        FusedBlock.from_layer(layer)
    layer = layers(families.build("llama"))[0]
    layer.self_attn.scaling = 0.3
    with pytest.raises(ValueError, match="is not what its config says: scale is 0.3, its config gives 0.25"):
        FusedBlock.from_layer(layer)
    layer = layers(families.build("llama"))[0]
    layer.self_attn.q_proj.bias = nn.Parameter(torch.zeros(64))
    with pytest.raises(ValueError, match="it has self_attn.q_proj.bias, its config gives none"):
        FusedBlock.from_layer(layer)


def sharded(name: str, path: Path) -> tuple[nn.Module, str, list[Path]]:
    """A model saved in many shards; the prefix of its second layer; the files that hold nothing of that layer."""
    model = families.build(name)
    model.save_pretrained(path, max_shard_size="20KB")
    weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    keys = layers(model)[1].state_dict()
    prefix = next(n.removesuffix(key) for key in keys for n in weight_map if n.endswith(f".1.{key}"))
    needed = {file for n, file in weight_map.items() if n.startswith(prefix)}
    others = [path / file for file in sorted(set(weight_map.values()) - needed)]
    assert len(others) >= 2
    return model, prefix, others


@pytest.mark.parametrize("name", ("llama", "gpt2", "gpt_neox", "phi3", "bert", "vit", "mixtral", *SPARSE))
def test_one_layer_of_a_checkpoint_from_meta_without_the_other_shards(name: str, tmp_path: Path) -> None:
    model, prefix, others = sharded(name, tmp_path)
    others[0].unlink()
    for file in others[1:]:
        file.write_bytes(b"no safetensors file")
    for given in (None, prefix, prefix.removesuffix(".")):
        block = FusedBlock(BlockConfig.from_pretrained(tmp_path, layer_idx=1), device="meta").eval()
        report = fusedblock.load_safetensors(block, tmp_path, prefix=given)
        assert set(report.loaded) == set(block.state_dict()) and report.missing == report.unexpected == ()
        for key, value in layers(model)[1].state_dict().items():
            assert torch.equal(block.state_dict()[key], value)
    _, x, _, want = recorded(name, model)[1]
    with torch.no_grad():
        assert relative_error(block(x), want) < 1e-5  # the rotary tables left meta too
    half = FusedBlock(block.config, device="meta")
    fusedblock.load_safetensors(half, tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert name not in ("llama",) or half.rotary_emb.inv_freq.dtype is torch.float32


def test_a_load_that_cannot_be_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    model, prefix, others = sharded("llama", tmp_path)
    block = block_of(model, 0)
    before = {key: value.clone() for key, value in block.state_dict().items()}
    shards = {path.name: path for path in tmp_path.glob("model-*.safetensors") if path not in others}
    name, needed = next(iter(shards.items()))
    kept = needed.read_bytes()
    needed.unlink()
    with pytest.raises(fusedblock.models.CheckpointError, match=f"is in shard '{name}', which does not exist"):
        fusedblock.load_safetensors(block, tmp_path, prefix=prefix)
    needed.write_bytes(kept[:-1])
    with pytest.raises(fusedblock.models.CheckpointError, match=name):
        fusedblock.load_safetensors(block, tmp_path, prefix=prefix)
    needed.write_bytes(kept)
    with pytest.raises(fusedblock.models.CheckpointError, match="the checkpoint lacks 'model.layers.7.self_attn.q_proj.weight'"):
        fusedblock.load_safetensors(block, tmp_path, prefix="model.layers.7")
    far = FusedBlock(BlockConfig.from_dict({**model.config.to_dict(), "num_hidden_layers": 9}, layer_idx=5))
    with pytest.raises(fusedblock.models.CheckpointError, match="the target is layer 5, but its keys are only under"):
        fusedblock.load_safetensors(far, tmp_path)
    with pytest.raises(fusedblock.models.CheckpointError, match=r"unexpected key '.*q_proj.bias'|the checkpoint lacks '.*bias'"):
        biased = BlockConfig.from_dict({**model.config.to_dict(), "attention_bias": True})
        fusedblock.load_safetensors(FusedBlock(biased), tmp_path, prefix="model.layers.0")
    assert all(torch.equal(value, before[key]) for key, value in block.state_dict().items())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "autocast"))
def test_training(dtype: torch.dtype) -> None:
    """Two blocks learn a target, as the layers they were made of do; under autocast parameters and stream stay fp32."""
    model = families.build("llama")
    blocks = nn.ModuleList(block_of(model, index) for index in range(2)).train()
    originals = nn.ModuleList(copy.deepcopy(layers(model))).train()
    x, target = torch.randn(2, 2, SEQ, 64, generator=torch.Generator().manual_seed(5)).unbind(0)
    tables = blocks[0].rotary_emb(x, torch.arange(SEQ)[None])

    def losses(modules: nn.ModuleList) -> list[float]:
        optimizer = torch.optim.AdamW(modules.parameters(), lr=1e-2)
        history = []
        for _ in range(4):
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                out = x
                for module in modules:
                    out = module(out, position_embeddings=tables)
                assert out.dtype is torch.float32
                loss = (out - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            assert {p.grad.dtype for p in modules.parameters()} == {torch.float32}
            optimizer.step()
            history.append(loss.item())
        return history

    got, want = losses(blocks), losses(originals)
    assert got[-1] < 0.9 * got[0]
    assert got == pytest.approx(want, rel=1e-4 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("name", (*SOME, *SPARSE))
def test_copies(name: str) -> None:
    """deepcopy, pickle and torch.save give a block of its own, after a call too."""
    block = block_of(families.build(name), 1)
    x = torch.randn(2, SEQ, 64)
    with torch.no_grad():
        want = block(x)
        file = io.BytesIO()
        torch.save(block, file)
        file.seek(0)
        for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block)), torch.load(file, weights_only=False)):
            assert torch.equal(other(x), want)
            next(other.parameters()).zero_()
            assert not torch.equal(other(x), want) and torch.equal(block(x), want)


def test_casts_keep_the_rotary_tables() -> None:
    block = block_of(families.build("llama"), 0)
    frequencies = block.rotary_emb.inv_freq.clone()
    half = copy.deepcopy(block).to(torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert torch.equal(half.rotary_emb.inv_freq, frequencies)
    with pytest.raises(ValueError, match="a weight is torch.bfloat16, hidden_states is torch.float32"):
        half(torch.randn(1, 3, 64))
    assert torch.equal(copy.deepcopy(half).float().rotary_emb.inv_freq, frequencies)


def test_it_prints_what_it_is() -> None:
    text = repr(block_of(families.build("gpt2"), 1))
    assert text.startswith("FusedBlock(\n  gpt2, layer_idx=1\n")
    assert "(c_attn): Conv1D(in_features=64, out_features=192, bias=True)" in text


@pytest.mark.parametrize("training", (False, True), ids=("serving", "training"))
@pytest.mark.parametrize("name", ("llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mistral", "gpt2", "bert"))))
def test_compile_without_graph_breaks(name: str, training: bool) -> None:
    torch._dynamo.reset()
    block = block_of(families.build(name), 0).train(training)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for seq in (5, SEQ):
        x = torch.randn(2, seq, 64)
        with torch.set_grad_enabled(training):
            want, got = block(x), compiled(x)
        assert relative_error(got, want) < 1e-6
        if training:
            want.square().sum().backward()
            grads = [p.grad.clone() for p in block.parameters()]
            block.zero_grad()
            got.square().sum().backward()
            scale = max(grad.norm() for grad in grads)
            assert all((p.grad - g).norm() < 1e-5 * scale for p, g in zip(block.parameters(), grads))
            block.zero_grad()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", families.ALL)
def test_gpu_in_the_place_of_the_models_layers(name: str, dtype: torch.dtype) -> None:
    """Within the rule in a forward; token by token with both caches as in one forward."""
    with torch.device("cuda"):
        original = families.build(name)
    model = families.twin(original, dtype)
    for index, (layer, x, given, base) in enumerate(recorded(name, model)):
        args = given.pop("_args")
        if given.get("position_embeddings") is not None:
            given["position_embeddings"] = tuple(t.double() for t in given["position_embeddings"])
        block = block_of(model, index, dtype=dtype, device="cuda")
        with torch.no_grad():
            want = copy.deepcopy(layer).double()(x.double(), *args, **given)
            want = want[0] if isinstance(want, tuple) else want
            outs = [block(x)]
            if name in CACHED:
                for cache in (KVCache(), KVCache(max_length=SEQ)):
                    outs.append(torch.cat([block(part, cache=cache) for part in x.split([5, 1, 1, 2], dim=1)], dim=1))
        bound = 1e-5 if dtype is torch.float32 else 1.5 * relative_error(base, want)
        assert all(relative_error(out, want) <= bound for out in outs)


def test_a_block_needs_no_transformers() -> None:
    code = BLOCK.format(names=OPTIONAL) + """
import runpy
runpy.run_path("examples/load_one_layer.py", run_name="__main__")
assert "transformers" not in sys.modules
"""
    assert "holds the checkpoint's weights: True" in run_python(code)


def test_on_the_meta_device() -> None:
    """Shapes without a value, its own tables of positions among them."""
    config = BlockConfig(model_type="llama", hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1)
    out = FusedBlock(config).to("meta")(torch.zeros(2, 5, 32, device="meta"))
    assert out.is_meta and out.shape == (2, 5, 32)

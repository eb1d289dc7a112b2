"""What a FusedBlock with experts has beside those of test_block_module: a router that is heard, checkpoints, what it refuses.

References: transformers' own layers.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from llama import relative_error
from op_cases import recording
from safetensors.torch import load_file
from test_block_module import SEQ, Operators, block_of, layers, recorded
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import fusedblock
from fusedblock import BlockConfig, FusedBlock, KVCache
from fusedblock.models.routers import ROUTERS
from fusedblock.models.table import FAMILIES

FEW = ("mixtral", "gpt_oss", "qwen2_moe", "glm4_moe")  # between them every part of a mixture
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


def router_of(layer: nn.Module) -> nn.Module:
    return next(m for m in layer.modules() if hasattr(m, "top_k") and "weight" in m._parameters)


def second(name: str, **changes: Any) -> tuple[Any, FusedBlock, Tensor, dict[str, Any]]:
    """transformers' second layer, which has experts; a block with its weights; what its model gives it."""
    model = families.build(name, **changes)
    layer, x, given, _ = recorded(name, model)[1]
    given.pop("_args")
    return layer, block_of(model, 1), x, given


@pytest.mark.parametrize("name", families.MIXTURES)
def test_router_logits_and_their_gradients(name: str) -> None:
    layer, block, x, given = second(name)
    heard: list[Tensor] = []
    router_of(layer).register_forward_hook(lambda _, args, out: heard.append(out[0]))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    want = layer(inputs[0], **given)
    got, logits = block(inputs[1], output_router_logits=True)
    assert relative_error(got, want) < 1e-5 and torch.equal(got, block(x))
    assert logits.shape == heard[0].shape == (2 * SEQ, 6) and logits.dtype is heard[0].dtype
    assert relative_error(logits, heard[0]) < 1e-5
    top_k = block.config.num_experts_per_tok
    for module, out, said in ((layer, want, heard[0]), (block, got, logits)):
        module.zero_grad()
        (load_balancing_loss_func((said,), 6, top_k) + 0.1 * out.square().mean()).backward()
    grads = {n: p.grad for n, p in block.named_parameters()}
    scale = max(p.grad.norm() for p in layer.parameters())
    for key, parameter in layer.named_parameters():
        assert parameter.grad.norm() < 1e-6 * scale or relative_error(grads[key], parameter.grad) < 2e-5, key
    assert relative_error(inputs[1].grad, inputs[0].grad) < 2e-5


def test_router_logits_of_a_layer_without_a_router_are_refused() -> None:
    x, cache = torch.zeros(1, 3, 64), KVCache()
    dense = {"mlp_only_layers": [2], "layer_idx": 2}
    for family, words, layer in (("llama", {}, "layer 0 of llama"), ("qwen2_moe", dense, "layer 2 of qwen2_moe")):
        block = FusedBlock(BlockConfig(model_type=family, **SIZES, **words))
        with pytest.raises(ValueError, match=f"FusedBlock: output_router_logits=True, but {layer} has no experts"):
            block(x, cache=cache, output_router_logits=True)
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("name", FEW)
def test_autocast(name: str) -> None:
    """bf16 products on fp32 parameters: at most 1.5 times the error of transformers' layer under it; the logits likewise."""
    layer, block, x, given = second(name)
    double = copy.deepcopy(layer).double()
    heard: list[Tensor] = []
    for module in (layer, double):
        router_of(module).register_forward_hook(lambda _, args, out: heard.append(out[0]))
    wide = {**given, "position_embeddings": tuple(t.double() for t in given["position_embeddings"])}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        base = layer(x, **given)
        got, logits = block(x, output_router_logits=True)
    with torch.no_grad():
        want = double(x.double(), **wide)
    assert got.dtype is base.dtype is torch.float32
    assert logits.dtype is (torch.float32 if name == "glm4_moe" else heard[0].dtype)  # as it is computed, also under autocast
    assert relative_error(got, want) <= 1.5 * relative_error(base, want)
    assert relative_error(logits, heard[1]) <= 1.5 * relative_error(heard[0], heard[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ("mixtral", "gpt_oss", "glm4_moe"))
def test_serving_is_two_operators_on_our_kernels(name: str) -> None:
    """Without gradients: attention with its norms, and the mixture. qwen2_moe's gated shared expert is more."""
    _, block, x, _ = second(name)
    x = x[:, :2]
    with torch.no_grad():
        want = block(x)
        with Operators() as ops:
            block(x)
        with recording("sm_90") as launches:
            got = block(x)
    assert [op for op in ops if op.startswith("fusedblock")] == ["fusedblock.block_open.default", "fusedblock.mixture.default"]
    assert not {op.split(".")[1] for op in ops} & {"mm", "addmm", "matmul", "_softmax", "topk"}
    assert len(launches) >= 6 and relative_error(got, want) < 1e-5


@pytest.mark.parametrize("option", ("deterministic", "batch_invariant", "debug"))
@pytest.mark.parametrize("name", ("mixtral", "qwen2_moe"))
def test_options(name: str, option: str) -> None:
    _, block, x, _ = second(name)
    with torch.no_grad():
        want = block(x)
        with fusedblock.options(**{option: True}):
            got = [block(x), block(x)]
            alone = block(x[1:])
    assert torch.equal(*got) and relative_error(got[0], want) < 1e-5 and relative_error(alone, want[1:]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "training"), (("gpt_oss", False), ("gpt_oss", True), ("qwen2_moe", True), ("glm4_moe", False))
)
def test_compile_without_graph_breaks(name: str, training: bool) -> None:
    """One graph, router logits in it."""
    torch._dynamo.reset()
    _, block, x, _ = second(name)
    block.train(training)
    compiled = torch.compile(lambda x: block(x, output_router_logits=True), backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled(training):
        wants, gots = block(x, output_router_logits=True), compiled(x)
    for want, got in zip(wants, gots, strict=True):
        assert relative_error(got, want) < 1e-6
    if training:
        found = []
        for out, logits in (wants, gots):
            block.zero_grad()
            (out.square().sum() + logits.square().mean()).backward()
            found.append([p.grad.clone() for p in block.parameters()])
        scale = max(grad.norm() for grad in found[0])
        assert all((a - b).norm() < 1e-5 * scale for a, b in zip(*found, strict=True))


def test_jitter_is_refused_in_training() -> None:
    config = BlockConfig(model_type="mixtral", **SIZES, num_local_experts=4, router_jitter_noise=0.1)
    block = FusedBlock(config)
    with pytest.raises(ValueError, match=r"mlp.jitter_noise=0.1 in training; the kernels draw no random numbers, set it to 0 or"):
        block(torch.randn(1, 3, 64))
    assert block.eval()(torch.randn(1, 3, 64)).shape == (1, 3, 64)


@pytest.mark.parametrize("name", FEW)
def test_from_layer_shares_buffers_and_says_what_its_config_does_not(name: str) -> None:
    layer = layers(families.build(name))[1]
    block = FusedBlock.from_layer(layer)
    state = block.state_dict(keep_vars=True)
    assert state.keys() == layer.state_dict().keys()
    assert all(state[key] is value for key, value in layer.state_dict(keep_vars=True).items())
    router_of(layer).top_k = 3
    with pytest.raises(ValueError, match="what its config says: top_k is 3, its config gives 2; the experts' router is Router"):
        FusedBlock.from_layer(layer)
    layer.mlp.experts.to(torch.float64)
    with pytest.raises(ValueError, match="cannot be fused: mixture: gate_up has dtype torch.float64"):
        FusedBlock.from_layer(layer)


def test_what_a_live_expert_has_of_its_own_is_no_config() -> None:
    layer = layers(families.build("gpt_oss"))[1]
    layer.mlp.experts.limit = 0.5
    with pytest.raises(ValueError, match="the experts' limit is 0.5, its config gives 7.0"):
        FusedBlock.from_layer(layer)
    block = block_of(families.build("gpt_oss"), 1)
    block.mlp.router.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="FusedBlock: mlp.router has a hook"):
        block(torch.zeros(1, 3, 64))
    with pytest.raises(NotImplementedError, match="call the block"):
        block.mlp.experts(torch.zeros(3, 64))


def test_what_no_kernel_takes_is_refused_before_it_is_built() -> None:
    for family, words, message in (("olmoe", {"clip_qkv": 0.5}, "clip_qkv has no kernel"),
                                   ("mixtral", {"num_local_experts": 1025}, "experts=1025, expected 1 to 1024"),
                                   ("mixtral", {"hidden_act": "mish"}, "hidden_act='mish', expected one of silu")):  # fmt: skip
        with pytest.raises(ValueError, match=f"FusedBlock: .*{message}"):
            FusedBlock(BlockConfig(model_type=family, **SIZES, **words), device="meta")


@pytest.mark.parametrize("family", [family for family, spec in FAMILIES.items() if spec.sparse])
def test_how_it_begins(family: str) -> None:
    """Weights small and random, so that no two experts are alike; biases and the correction zero. On meta without a value."""
    spec = FAMILIES[family]
    words = {"layer_idx": 1, "num_experts_per_tok": 2, "head_dim": 16, spec.sparse.number: 6, spec.sparse.ffn: 48}
    config = BlockConfig(model_type=family, **{**SIZES, **words})
    block = FusedBlock(config)
    for key, value in block.state_dict().items():
        if key.startswith("mlp.") and key.endswith("bias"):
            assert not value.any(), key
        elif key.startswith(("mlp.experts.", f"{spec.sparse.router}.")) or key.endswith("sinks"):
            assert value.unique().numel() > 0.9 * value.numel() and value.abs().max() < 0.2, key
            assert value.numel() < 100 or 0.015 < value.std() < 0.025, key
    meta = FusedBlock(config, device="meta")
    assert {p.device.type for p in meta.parameters()} == {"meta"}
    assert meta(torch.zeros(2, 3, 64, device="meta")).shape == (2, 3, 64)
    text = repr(block)
    assert f"{family}, layer_idx=1" in text and "gate_up_proj (6, " in text


def test_the_correction_of_the_choice_stays_fp32(tmp_path: Path) -> None:
    """Whatever the block is cast to, and whatever dtype a checkpoint is loaded in, as in transformers."""
    model = families.build("glm4_moe")
    (name,) = (argument for argument in ROUTERS["glm4_moe"].tensors.values() if argument != "weight")
    block = block_of(model, 1)
    want = getattr(block.mlp.gate, name).clone()
    assert want.std() > 0.05 and not torch.equal(want.bfloat16().float(), want)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    loaded = FusedBlock(BlockConfig.from_pretrained(tmp_path, layer_idx=1), device="meta")
    fusedblock.load_safetensors(loaded, tmp_path, dtype=torch.bfloat16)
    again = FusedBlock(block.config, dtype=torch.bfloat16)
    fusedblock.load_safetensors(again, tmp_path, dtype=torch.bfloat16)
    for half in (copy.deepcopy(block).to(torch.bfloat16), copy.deepcopy(block).half().bfloat16(), loaded, again):
        assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
        assert torch.equal(getattr(half.mlp.gate, name), want)
        assert half(torch.zeros(1, 3, 64, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_experts_of_another_dtype_are_refused_before_the_cache_is_filled() -> None:
    """Also where the block has run already."""
    block, x, cache = block_of(families.build("mixtral"), 1), torch.randn(1, 3, 64), KVCache()
    block(x)
    block.mlp.experts.half()
    with pytest.raises(ValueError, match="FusedBlock: mixture: gate_up has dtype torch.float16, but x has torch.float32"):
        block(x, cache=cache)
    assert cache.get_seq_length(1) == 0
    block.mlp.experts.float()
    assert block(x, cache=cache).isfinite().all() and cache.get_seq_length(1) == 3


@pytest.mark.parametrize("name", ("mixtral", "gpt_oss"))
def test_files_of_a_block(name: str, tmp_path: Path) -> None:
    """Under the names that transformers writes its layer by; stacked, or under another family's, where that is asked for."""
    model = families.build(name)
    model.save_pretrained(tmp_path / "theirs")
    whole, prefix = load_file(tmp_path / "theirs/model.safetensors"), "model.layers.1."
    theirs = {key.removeprefix(prefix): value for key, value in whole.items() if key.startswith(prefix)}
    block = block_of(model, 1)
    named = {"own": {}, "olmoe": {"expert_names": "olmoe"}, "mixtral": {"expert_names": "mixtral"}}
    if name == "gpt_oss":  # has biases, for which those have no names
        with pytest.raises(ValueError, match="expert_names='olmoe': there is no pair"):
            fusedblock.save_safetensors(block, tmp_path / "olmoe", **named["olmoe"])
        named = {"own": {}}
    for file, words in named.items():
        fusedblock.save_safetensors(block, tmp_path / file, max_shard_size="30KB", **words)
    fusedblock.save_safetensors(block.state_dict(), tmp_path / "stacked")
    read = {f: {k: v for part in (tmp_path / f).glob("*.safetensors") for k, v in load_file(part).items()} for f in named}
    assert read["own"].keys() == theirs.keys() and all(torch.equal(read["own"][key], value) for key, value in theirs.items())
    assert name == "gpt_oss" or "mlp.experts.5.up_proj.weight" in read["olmoe"]
    assert load_file(tmp_path / "stacked/model.safetensors").keys() == block.state_dict().keys()
    for file in (*named, "stacked"):
        for device in ("meta", "cpu"):
            target = FusedBlock(block.config, device=device)
            report = fusedblock.load_safetensors(target, tmp_path / file)
            assert report.missing == report.unexpected == ()
            assert all(torch.equal(target.state_dict()[key], value) for key, value in block.state_dict().items())


def test_a_checkpoint_with_other_experts_changes_nothing(tmp_path: Path) -> None:
    model = families.build("qwen3_moe")
    model.save_pretrained(tmp_path)
    words = json.loads((tmp_path / "config.json").read_text())
    assert "num_local_experts" in words
    block = FusedBlock(BlockConfig.from_dict({**words, "num_local_experts": 8}, layer_idx=1))
    before = {key: value.clone() for key, value in block.state_dict().items()}
    lacks = "the target has 8 experts, the checkpoint lacks .*experts.6.gate_proj"
    with pytest.raises(fusedblock.models.CheckpointError, match=lacks):
        fusedblock.load_safetensors(block, tmp_path)
    assert all(torch.equal(value, before[key]) for key, value in block.state_dict().items())

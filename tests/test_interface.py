"""attn_implementation="fusedblock" as people set it: on models that have no entry in the table, with the masks it asks for."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
import transformers
from llama import CACHE, EOS, PAD, assert_same_tokens, prompt, relative_error, tiny
from test_house import run_python
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask, create_sliding_window_causal_mask

import fusedblock
from fusedblock.models import interface

fusedblock.register_attention()  # another test's module may have imported fusedblock before transformers

MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {**MOE, "sliding_window": 6},
    "gpt_oss": {**MOE, "head_dim": 16, "sliding_window": 6},
    "qwen3_moe": {**MOE, "head_dim": 16},
    # Whose masks have a window that their attention is not told of.
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 48, "use_sliding_window": True, "sliding_window": 6,
                  "max_window_layers": 1},
    "deepseek_v3": {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
                    "qk_nope_head_dim": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 48},
    "llama4_text": {**MOE, "head_dim": 16, "attention_chunk_size": 4, "intermediate_size_mlp": 96, "num_experts_per_tok": 1},
    "exaone4": {"sliding_window": 6, "sliding_window_pattern": 2},
}  # fmt: skip


def build(family: str) -> nn.Module:
    """An fp32 model with eager attention whose parts all matter."""
    torch.manual_seed(0)
    made = AutoConfig.for_model(family, **{**families.SIZES, **MODELS.get(family, {})})
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.7 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
            parameter.copy_(scale * torch.randn_like(parameter) + (parameter.dim() == 1) * parameter)
    return model.eval()


def logits(model: nn.Module, implementation: str, *args: Any, **kwargs: Any) -> Tensor:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(*args, **kwargs).logits


@pytest.mark.parametrize("family", MODELS)
def test_a_model_without_an_entry(family: str) -> None:
    """No mask, all ones, padding to the left and to the right; gradients too."""
    model = build(family)
    ids, left = prompt(seq=13, pad=3)
    for mask in (None, torch.ones_like(left), left, left.flip(1)):
        valid = torch.ones_like(ids).bool() if mask is None else mask.bool()
        want, got = (logits(model, which, ids, attention_mask=mask)[valid] for which in ("eager", "fusedblock"))
        assert relative_error(got, want) < 1e-5
    grads = []
    for which in ("eager", "fusedblock"):
        model.set_attn_implementation(which)
        model.zero_grad()
        out = model(ids, attention_mask=left, use_cache=False).logits[left.bool()]
        (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    scale = max(grad.norm() for grad in grads[0].values())
    for name, grad in grads[0].items():
        if grad.norm() > 1e-6 * scale:
            assert relative_error(grads[1][name], grad) < 1e-5, name


OLD = transformers.__version__ == "5.17.0"
# Of which 5.17.0 cannot make the masks of Llama 4's chunks.
CACHES = [(f, c) for f in MODELS for c in ("dynamic", "static") if not (OLD and (f, c) == ("llama4_text", "static"))]


@pytest.mark.parametrize("pad", (0, 3), ids=("whole", "padded"))
@pytest.mark.parametrize(("family", "cache"), CACHES)
def test_generate_without_an_entry(family: str, pad: int, cache: str) -> None:
    model, ids_mask = build(family), prompt(pad=pad)
    kwargs = {"attention_mask": ids_mask[1], "max_new_tokens": 12, "do_sample": False}
    kwargs |= {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    tokens = []
    for which in ("eager", "fusedblock"):
        model.set_attn_implementation(which)
        tokens.append(model.generate(ids_mask[0], **kwargs))
    model.set_attn_implementation("eager")
    assert_same_tokens(model, *tokens, ids_mask[1])


# Of which some do not hand the positions to their masks, and Llama 4 counted its chunks over all sequences.
NOT_BY_POSITIONS = {"gpt_oss", "opt", *(["llama4_text"] if OLD else [])}


@pytest.mark.parametrize("family", [*MODELS, "opt"])
def test_packed_sequences_without_an_entry(family: str) -> None:
    """Those that README names are wrong by position_ids, so that it is corrected where a later transformers is better."""
    model, bounds = build(family), torch.tensor([0, 5, 13, 14, 20], dtype=torch.int32)
    ids, _ = prompt(batch=1, seq=20)
    pieces = [ids[:, a:b] for a, b in zip(bounds, bounds[1:])]
    want = torch.cat([logits(model, "eager", piece) for piece in pieces], dim=1)
    positions = torch.cat([torch.arange(piece.shape[1]) for piece in pieces])[None]
    packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 8, "max_length_k": 8}
    by_positions = relative_error(logits(model, "fusedblock", ids, position_ids=positions, use_cache=False), want)
    assert by_positions > 1e-2 if family in NOT_BY_POSITIONS else by_positions < 1e-5
    if family == "llama4_text":  # whose chunks are a mask, which knows of no boundaries
        with pytest.raises(ValueError, match="both a mask of shape .* and cu_seq_lens_q are given"):
            logits(model, "fusedblock", ids, position_ids=positions, **packed)
    else:
        assert relative_error(logits(model, "fusedblock", ids, position_ids=positions, **packed), want) < 1e-5


# ---- masks -----------------------------------------------------------------------------------------------------------------


def mask_of(make: Any, seq: int, attention_mask: Tensor | None = None, past: int = 0, **kwargs: Any) -> Any:
    """What a Mistral of window 6 would hand to its layers, after `past` tokens in a cache if there are any."""
    config = AutoConfig.for_model("mistral", **families.SIZES, sliding_window=kwargs.pop("window", 6))
    config._attn_implementation = kwargs.pop("implementation", "fusedblock")
    if cache := kwargs.pop("cache", None):
        cache = cache(config=config, **({"max_cache_len": 24} if cache is StaticCache else {}))
        if past:
            cache.update(*torch.zeros(2, 2, 2, past, 16), 0)
    x = torch.zeros(2, seq, 64)
    return make(config=config, inputs_embeds=x, attention_mask=attention_mask, **{CACHE: cache}, **kwargs)


def described(mask: Any) -> Any:
    return mask if mask is None else (mask.dtype, tuple(mask.shape))


LEFT = torch.ones(2, 9, dtype=torch.long)
LEFT[1, :3] = 0
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(2, -1)


def test_masks_hold_what_attention_does_not_know_by_itself() -> None:
    """Being causal and windows are left to the kernels."""
    plain, window, both = create_causal_mask, create_sliding_window_causal_mask, create_bidirectional_mask
    for make in (plain, window):
        assert mask_of(make, 9) is None and mask_of(make, 9, torch.ones_like(LEFT)) is None
        assert torch.equal(mask_of(make, 9, LEFT), LEFT.bool())
        assert mask_of(make, 4, cache=DynamicCache, past=5) is None
        packed = mask_of(make, 9, position_ids=POSITIONS)
        assert packed.tolist() == [[0, 4, 9, 13, 18]] and packed.dtype is torch.int32
    assert described(mask_of(both, 9, LEFT)) == (torch.bool, (2, 1, 1, 9)) and mask_of(both, 9) is None
    # A window's cache has dropped the first tokens.
    whole = torch.cat((LEFT, torch.ones(2, 11, dtype=torch.long)), 1)
    assert torch.equal(mask_of(window, 1, whole, cache=DynamicCache, past=19), torch.ones(2, 6, dtype=torch.bool))


def test_masks_of_a_static_cache_count_what_is_filled() -> None:
    """Before the first token: as many columns as tokens. Later one shape, since the count is on the device."""
    config = {"cache": StaticCache, "window": None}
    assert described(mask_of(create_causal_mask, 9, **config)) == (torch.bool, (2, 9))
    assert torch.equal(mask_of(create_causal_mask, 9, LEFT, **config), LEFT.bool())
    for seq in (1, 3):
        longer = torch.cat((LEFT, torch.ones(2, seq, dtype=torch.long)), 1)
        made, want = (mask_of(create_causal_mask, seq, longer, past=9, implementation=which, **config) for which in
                      ("fusedblock", "sdpa"))  # fmt: skip
        assert made.shape == (2, 1, seq, 24) and torch.equal(made, want)


@pytest.mark.parametrize("cache", (None, DynamicCache, StaticCache))
@pytest.mark.parametrize("make", (create_causal_mask, create_sliding_window_causal_mask, create_bidirectional_mask))
def test_a_mask_made_of_a_mask_is_that_mask(make: Any, cache: Any) -> None:
    """generate makes them before the model does."""
    given = {"cache": cache, "window": 12 if make is create_sliding_window_causal_mask else None}
    for seq, past in ((9, 0), (1, 0 if make is create_bidirectional_mask or cache is None else 8)):
        once = mask_of(make, seq, LEFT[:, : seq + past], past=past, **given)
        assert torch.equal(mask_of(make, seq, once, past=past, **given), once)


def test_overlays_are_kept_as_they_are() -> None:
    """Blocks of an image see themselves both ways; a mask of 4 axes is the truth."""
    blocks = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, -1]]).expand(2, -1)
    for given in ({"block_sequence_ids": blocks}, {"and_mask_function": lambda b, h, q, k: k != 4}):
        for make in (create_causal_mask, create_sliding_window_causal_mask):
            made, want = (mask_of(make, 9, LEFT, implementation=which, **given) for which in ("fusedblock", "sdpa"))
            assert made.dim() == 4 and torch.equal(made, want)
    model = tiny(attn_implementation="eager")
    ids, _ = prompt()
    mask = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(3)) < 0.6
    mask |= torch.eye(9, dtype=torch.bool)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    want = logits(model, "eager", ids, attention_mask=additive)
    for given_mask in (mask, additive):
        assert relative_error(logits(model, "fusedblock", ids, attention_mask=given_mask), want) < 1e-5


def test_gemma3_whose_images_see_themselves_both_ways() -> None:
    config = transformers.Gemma3Config(
        text_config={**families.SIZES, "head_dim": 16, "sliding_window": 6,
                     "layer_types": ["sliding_attention", "full_attention"]},
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 16, "patch_size": 4},
        mm_tokens_per_image=4, image_token_index=90,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(2, 80, (1, 16), generator=torch.Generator().manual_seed(1))
    types = torch.zeros_like(ids)
    types[:, 3:7] = 1
    ids[:, 3:7] = 90
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    given = {"pixel_values": pixels, "token_type_ids": types}
    want = logits(model, "eager", ids, **given)
    assert relative_error(logits(model, "eager", ids, **{**given, "token_type_ids": torch.zeros_like(ids)}), want) > 1e-3
    assert relative_error(logits(model, "fusedblock", ids, **given), want) < 1e-5
    report = fusedblock.fuse(model)
    assert relative_error(logits(model, "fusedblock", ids, **given), want) < 1e-5
    assert report.fused_calls == 2 and not report.fallbacks


# ---- what it says ----------------------------------------------------------------------------------------------------------


def test_what_attention_does_not_understand_raises_by_name() -> None:
    model = tiny(attn_implementation="fusedblock")
    ids, mask = prompt(pad=3)
    with pytest.raises(TypeError, match="fusedblock attention does not understand head_weights; use"):
        model(ids, head_weights=torch.ones(4))
    with pytest.raises(ValueError, match="output_attentions=True, but it never forms the weights; use 'eager'"):
        model(ids, output_attentions=True)
    bounds = torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(ValueError, match="both a padding mask and cu_seq_lens_q are given"):
        model(ids, attention_mask=mask, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    query = torch.zeros(1, 2, 4, 16)
    with pytest.raises(ValueError, match=r"attention_mask is torch.int64 of shape \(1, 4\), expected bool \(batch keys\)"):
        interface.attention_forward(nn.Module(), query, query, query, torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="there is no paged cache; use attn_implementation='fusedblock'"):
        interface.paged_attention_forward(nn.Module(), query, query, query)


def test_position_biases_of_t5() -> None:
    """Additive, learned, in encoder, decoder and across."""
    made = AutoConfig.for_model("t5", vocab_size=97, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.0,
                                pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=PAD)  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(made, attn_implementation="eager").eval()
    ids, mask = prompt(pad=3)
    made_of: list[tuple[Tensor, Tensor]] = []
    for which in ("eager", "fusedblock"):
        model.set_attn_implementation(which)
        model.zero_grad()
        out = model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, 2:], use_cache=False).logits
        out.square().sum().backward()
        bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        made_of.append((out.detach(), bias.grad.clone()))
    for want, got in zip(*made_of):
        assert relative_error(got, want) < 1e-5


# ---- registration ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_importing_fusedblock_imports_no_transformers_and_after_transformers_registers() -> None:
    known = """
from transformers import AttentionInterface as A, AttentionMaskInterface as M
found = ["fusedblock" in A(), "fusedblock" in M(), "paged|fusedblock" in A()]
"""
    run_python(f"import transformers, fusedblock{known}assert found == [True] * 3")
    late = f"import sys, fusedblock\nassert 'transformers' not in sys.modules{known}assert found == [False] * 3\n"
    run_python(f"{late}fusedblock.register_attention(){known}assert found == [True] * 3")


def test_registering_again_changes_nothing() -> None:
    for _ in range(2):
        fusedblock.register_attention()
    assert transformers.AttentionInterface()["fusedblock"] is interface.attention_forward
    assert transformers.AttentionMaskInterface()["fusedblock"] is interface.attention_mask


# ---- compiled, and in batches that never stop ------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", (False, True))
def test_compiled_decoding_with_a_static_cache_is_one_graph(fuse: bool) -> None:
    """transformers compiles decoding by itself for such a cache on a GPU; here the same on the CPU."""
    model = tiny(attn_implementation="sdpa")
    ids, mask = prompt(pad=3)
    kwargs = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "cache_implementation": "static"}
    want = model.generate(ids, **kwargs, disable_compile=True)
    if fuse:
        fusedblock.fuse(model)
    model.set_attn_implementation("fusedblock")
    compiling = transformers.CompileConfig(backend="aot_eager", fullgraph=True, mode=None, dynamic=False)
    compiling._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    got = model.generate(ids, **kwargs, compile_config=compiling)
    assert_same_tokens(model, want, got, mask)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", ("llama", pytest.param("gemma3_text", marks=pytest.mark.slow)))
def test_continuous_batching(name: str) -> None:
    """Later transformers refuse other attention than their own there, by name."""
    prompts = [[5, 6, 7, 8, 9], [10, 11, 12], [20, 21, 22, 23, 24, 25, 26]]
    model = families.build(name)
    generation = transformers.GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=EOS, pad_token_id=PAD)
    want = [model.generate(torch.tensor([p]), generation_config=generation)[0, len(p) :].tolist() for p in prompts]
    for fuse in (False, True):
        if fuse:
            fusedblock.fuse(model)
        model.set_attn_implementation("paged|fusedblock" if OLD else "fusedblock")
        if not OLD:
            with pytest.raises(ValueError, match="fusedblock is not supported for continuous batching"):
                model.generate_batch(inputs=prompts, generation_config=generation, progress_bar=False)
            continue
        out = model.generate_batch(inputs=prompts, generation_config=generation, progress_bar=False)
        assert [r.generated_tokens for r in out.values()] == want


@pytest.mark.parametrize("how", ("interface", "fused"))
def test_on_the_meta_device(how: str) -> None:
    """Shapes without a value, where torch has no autocast to ask about."""
    model = build("llama")
    if how == "fused":
        assert "2 of 2 layers fused" in str(fusedblock.fuse(model))
    else:
        model.set_attn_implementation("fusedblock")
    model.to("meta")
    out = model(torch.zeros(2, 5, dtype=torch.long, device="meta")).logits
    assert out.is_meta and out.shape == (2, 5, model.config.vocab_size)

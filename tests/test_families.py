"""Every family of the table against transformers' own: outputs, gradients, generated tokens. One test over every entry."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import families
import mixtures
import pytest
import torch
from llama import assert_rule, assert_same_tokens, by_kind, prompt, relative_error
from test_block_config import assert_words_are_those_of_transformers
from test_block_module import assert_in_the_place_of_the_models_layers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import fusedblock
from fusedblock.models import block_parts, table
from fusedblock.models.families import markdown

DECODERS = (*families.DECODERS, *families.MIXTURES)
ROOT = Path(__file__).resolve().parent.parent


def outcome(name: str, model: nn.Module, pad: int, seq: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The outputs that are not padding, and the gradients of a random combination of them, by kind of parameter."""
    arguments, valid = families.inputs(name, model, pad, seq)
    model.zero_grad()
    out = families.values(model(**arguments, **({"use_cache": False} if name in DECODERS else {})))
    out = out if valid is None else out[valid]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    (out * weights).sum().backward()
    return out, by_kind(model)


def check(name: str, model: nn.Module, dtype: torch.dtype, pad: int, seq: int = 9) -> None:
    """The numerics rule for the outputs and gradients of a fused copy of the model, and under our attention for those of one
    that is not fused."""
    original = families.twin(model, dtype)
    reference = families.twin(original, torch.float64)
    reference.set_attn_implementation("plain")
    fused = families.twin(original, dtype)
    report = fusedblock.fuse(fused, strict=True)
    candidates = [fused]
    if model.config._attn_implementation == "fusedblock":
        candidates.append(families.twin(original, dtype))
        original.set_attn_implementation("eager")
    if name in families.MIXTURES:
        assert_same_experts(name, (reference, original), fused, pad, seq)
    before = report.fused_calls
    want, base, *gots = (outcome(name, candidate, pad, seq) for candidate in (reference, original, *candidates))
    assert report.fused_calls - before == model.config.num_hidden_layers and not report.fallbacks
    # A gradient that is zero but for rounding (of a key bias under softmax) has no relative error.
    scale = max(grad.norm().item() for grad in want[1].values())
    for got in gots:
        assert got[1].keys() == want[1].keys()
        assert_rule(got, want, base, [n for n, grad in want[1].items() if grad.norm() > 1e-6 * scale], dtype)


def assert_same_experts(name: str, theirs: tuple[nn.Module, ...], fused: nn.Module, pad: int, seq: int) -> None:
    """In all of the models, for what is not padding: so that a difference is rounding."""
    chosen = []
    for model in (*theirs, fused):
        arguments, valid = families.inputs(name, model, pad, seq)
        with mixtures.our_choices() if model is fused else mixtures.choices(model) as found, torch.no_grad():
            model(**arguments)
        chosen.append([c if valid is None else c[valid.flatten()] for c in found])
    assert chosen[0] and all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*chosen, strict=True))


def test_every_entry_of_the_table_is_tested() -> None:
    assert {spec.family for spec in table.SPECS.values()} == {family for family, _ in families.ALL.values()}


def test_the_table_of_the_readme_is_the_registry() -> None:
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    shown = readme.split("<!-- families: begin")[1].split("<!-- families: end -->")[0]
    assert shown.partition("\n")[2].strip() == markdown()


def attentions(names: Iterable[str], *slow: str) -> Any:
    """Every name with each attention that takes it; those named are slow tests."""
    cases = [pytest.param(name, which, marks=[pytest.mark.slow] if which in slow else []) for name in names
             for which in families.implementations(name)]  # fmt: skip
    return pytest.mark.parametrize(("name", "implementation"), cases)


@pytest.mark.parametrize("pad", (0, 3), ids=("whole", "padded"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@attentions(families.ALL)
def test_outputs_and_gradients(name: str, dtype: torch.dtype, implementation: str, pad: int) -> None:
    check(name, families.build(name, implementation), dtype, pad)


@pytest.mark.parametrize("pad", (0, 3), ids=("whole", "padded"))
@attentions(DECODERS, "eager")
def test_generate(name: str, pad: int, implementation: str) -> None:
    """Greedy tokens with a dynamic and a static cache, 16 of them so that windows are left behind."""
    model = families.build(name, implementation)
    fused = families.twin(model)
    if implementation == "fusedblock":
        model.set_attn_implementation("eager")
    report = fusedblock.fuse(fused)
    ids, mask = prompt(pad=pad)
    for kwargs in ({}, {"cache_implementation": "static", "disable_compile": True}):
        arguments = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False, **kwargs}
        assert_same_tokens(model, model.generate(ids, **arguments), fused.generate(ids, **arguments), mask)
    assert report.fused_calls > 16 and not report.fallbacks


PACKED = ((0, 4), (4, 11), (11, 12), (12, 20))


@pytest.mark.parametrize(("name", "given"), [
    (name, given) for name in DECODERS for given in ("position_ids", "cu_seq_lens")
    if families.ALL[name][0] not in {"position_ids": ("stablelm", "gpt_oss"), "cu_seq_lens": ("stablelm",)}[given]
])  # fmt: skip
def test_packed_sequences_are_as_they_are_alone(name: str, given: str) -> None:
    """StableLM's and gpt-oss's models do not hand the positions to their masks. In fp32, fused and not, windows left behind."""
    model = families.build(name, "eager")
    ids, _ = prompt(batch=1, seq=20)
    with torch.no_grad():
        want = torch.cat([families.values(model(ids[:, a:b], use_cache=False)) for a, b in PACKED], dim=1)
    arguments: dict[str, Any] = {"position_ids": torch.cat([torch.arange(b - a) for a, b in PACKED])[None], "use_cache": False}
    if given == "cu_seq_lens":
        bounds = torch.tensor([0, *(b for _, b in PACKED)], dtype=torch.int32)
        arguments |= {"use_cache": True, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds.clone(), "max_length_q": 8,
                      "max_length_k": 8}  # fmt: skip
    model.set_attn_implementation("fusedblock")
    for fuse in (False, True):
        report = fusedblock.fuse(model) if fuse else None
        with torch.no_grad():
            assert relative_error(families.values(model(ids, **arguments)), want) < 1e-5
    assert report is not None and report.fused_calls == 2 and not report.fallbacks


def test_sdpa_without_softcap_is_not_taken_for_gemma2() -> None:
    """transformers before 5.24 runs it and drops the softcap, later ones refuse; the layers do as theirs and say why."""
    model = families.build("gemma2", "eager")
    report = fusedblock.fuse(model)
    model.config._attn_implementation = "sdpa"
    try:
        model(prompt()[0])
    except ValueError as refusal:
        assert "softcap" in str(refusal)
    assert not report.fused_calls and report.fallbacks
    assert "sdpa attention has no softcap (2); use attn_implementation='eager' or 'fusedblock'" in report.fallbacks


def test_the_worked_example_of_contributing_adds_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    patterns = (r"^_decoder\((?:.|\n)*?^\),$", r"^\"seed_oss\": .*$")
    (entry,), (config,) = (re.findall(pattern, text, re.M) for pattern in patterns)
    longest = max(len(line) for line in (*entry.splitlines(), config)) + 4  # indented, as in the files they go to
    limit = re.search(r"^line-length = (\d+)$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert limit and longest <= int(limit.group(1))
    (spec,) = eval(f"({entry})", vars(table))
    monkeypatch.setitem(table.SPECS, spec.layer_class, spec)
    monkeypatch.setitem(table.FAMILIES, spec.family, spec)
    monkeypatch.setitem(block_parts._ENTRIES, (spec.family, False), block_parts._with_our_classes(spec, False))
    for known in (families.CONFIGS, families.ALL):
        monkeypatch.setitem(known, *eval(f"{{{config}}}").popitem())
    for implementation, pad in (("sdpa", 3), ("eager", 0)):
        model = families.build("seed_oss", implementation, attention_bias=True)
        check("seed_oss", model, torch.float32, pad)
    assert_words_are_those_of_transformers("seed_oss")
    assert_in_the_place_of_the_models_layers("seed_oss", model, 3)


WAITING = {
    "deepseek_v3": {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
                    "qk_nope_head_dim": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 48},
}  # fmt: skip


@pytest.mark.parametrize("family", WAITING)
def test_a_family_that_waits_runs_as_before_and_says_why(family: str) -> None:
    made = AutoConfig.for_model(family, **{**families.SIZES, **WAITING[family]})
    model = AutoModelForCausalLM.from_config(made).eval()
    ids, _ = prompt()
    with torch.no_grad():
        want = families.values(model(ids))
        report = fusedblock.fuse(model)
        found = families.values(model(ids))
    if any(record.status == "fused" for record in report.blocks):  # its experts alone
        assert relative_error(found, want) < 1e-5
    else:
        assert torch.equal(found, want)
    assert report.fused == 0 and len(report.layers) == 2
    assert all(record.status == "fallback" and record.reason in table.WAITING.values() for record in report.layers)
    reason = report.layers[0].reason
    with pytest.raises(ValueError, match=re.escape(reason)):
        fusedblock.fuse(model, strict=True)
    for subject in (model, made):
        with pytest.raises(ValueError, match=re.escape(reason)):
            fusedblock.measure(subject, batch=1, seq=4)
    with pytest.raises(ValueError, match=f"model_type='{family}', {re.escape(reason)}"):
        fusedblock.BlockConfig(model_type=family, hidden_size=64, num_attention_heads=4)


def test_a_waiting_family_is_known_by_its_model_type() -> None:
    types = ("deepseek_v2", "deepseek_v3")
    assert {table.waiting_family(name) for name in types} == set(table.WAITING.values())
    assert [name for name in types if not table.waiting_family(name)] == []
    assert [name for name in (*table.FAMILIES, "bloom", "gemma4") if table.waiting_family(name)] == []


@pytest.mark.gpu
@pytest.mark.parametrize("pad", (0, 3), ids=("whole", "padded"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", families.ALL)
def test_gpu_outputs_and_gradients(name: str, dtype: torch.dtype, pad: int) -> None:
    model = families.build(name).to("cuda")  # the CPU's weights: it is for them that SEEDS are chosen, and for 9 tokens
    for implementation in families.implementations(name):
        model.set_attn_implementation(implementation)
        check(name, model, dtype, pad, seq=9 if name in families.MIXTURES else 37)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DECODERS)
def test_gpu_generate(name: str) -> None:
    with torch.device("cuda"):
        model = families.build(name)
    fused = families.twin(model)
    report = fusedblock.fuse(fused)
    ids, mask = (t.cuda() for t in prompt(pad=3))
    static = {"cache_implementation": "static", "disable_compile": True}
    for which, kwargs in itertools.product((model.config._attn_implementation, "fusedblock"), ({}, static)):
        fused.set_attn_implementation(which)
        arguments = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False, **kwargs}
        assert_same_tokens(model, model.generate(ids, **arguments), fused.generate(ids, **arguments), mask)
    assert not report.fallbacks

"""`measure` of mixtures of experts: what the arithmetic of an even routing demands, written out, and what real values touch."""

from __future__ import annotations

import copy
from typing import Any

import families
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from fusedblock.metering import TrafficCounter, measure
from fusedblock.metering.report import OpRow, Side

E, K, H, F = 6, 2, 64, 96  # experts, of which a token chooses, hidden, ffn: of Mixtral in tests/families.py
BF16 = 2
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


def config(family: str = "mixtral", how: str = "grouped_mm", **changes: Any) -> Any:
    made = AutoConfig.for_model(family, **{**families.SIZES, **families.EXPERTS[family], **changes})
    made.dtype, made._experts_implementation = torch.bfloat16, how
    return made


def rows(side: Side) -> dict[str, OpRow]:
    return {r.name: r for r in side.rows if r.where == "layers"}


def expected(tokens: int, experts: int = E, top_k: int = K) -> float:
    """Each of the experts is missed by all tokens with probability (1 - top_k / experts) ** tokens."""
    return sum(1 - (1 - top_k / experts) ** tokens for _ in range(experts))


def products(rows: int) -> int:
    """FLOPs of all experts: two products, gate and up in one."""
    return 2 * rows * H * 2 * F + 2 * rows * F * H


@pytest.mark.parametrize("phase", ("prefill", "train"))
@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_flops_of_the_experts_do_not_depend_on_what_multiplies_them(how: str, phase: str) -> None:
    tokens = 2 * 16
    report = measure(config(how=how), batch=2, seq=16, phase=phase)
    before, after = rows(report.before), rows(report.after)
    times = 3 if phase == "train" else 1  # rows and weights have gradients
    dense = times * 2 * tokens * H * (H + 2 * (H // 2) + H + E)  # q, k and v of half the heads, o, router
    counted = sum(r.flops for n, r in before.items() if n in ("mm", "bmm", "_grouped_mm"))
    assert counted == dense + times * products(tokens * K)
    ours = ("moe_gate_up", "moe_down", "moe_grad_hidden", "moe_grad_rows", "moe_grad_weight")
    more = sum(after[f"fusedblock.{n}"].flops for n in ours if f"fusedblock.{n}" in after) / (times * products(tokens * K))
    assert 1 < more < 1.03  # the activation's arithmetic counts too
    assert report.after.label == "fused" and report.after.total("layers").launches < report.before.total("layers").launches


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("tokens", (1, 3, 16))
def test_grouped_products_read_the_weights_that_are_expected(tokens: int, dtype: torch.dtype) -> None:
    """In every dtype that transformers multiplies in; a tensor without memory has a rule for bf16 alone."""
    s, touched, size = tokens * K, expected(tokens), dtype.itemsize
    given = config()
    given.dtype = dtype
    found = {phase: measure(given, batch=1, seq=tokens, phase=phase).before for phase in ("prefill", "train")}
    row = rows(found["prefill"])["_grouped_mm"]
    weights = touched * (2 * F * H + H * F) * size
    read = s * (H + F) * size + weights + 2 * 4 * E  # rows, weights, int32 ends of the experts' rows
    assert row.launches == 2 and row.flops == products(s)
    assert row.read_bytes == pytest.approx(read, abs=2) and row.written_bytes == s * (2 * F + H) * size
    trained = rows(found["train"])["_grouped_mm"]
    assert trained.launches == 6 and trained.flops == 3 * products(s)


@pytest.mark.parametrize("tokens", (1, 3, 16))
def test_batched_products_copy_weights_for_every_row(tokens: int) -> None:
    s, touched = tokens * K, expected(tokens)
    found = rows(measure(config(how="batched_mm"), batch=1, seq=tokens).before)
    weight = (2 * F * H + H * F) * BF16
    assert found["index"].read_bytes == pytest.approx(touched * weight + 2 * 8 * s, abs=2)  # and the int64 ids, twice
    assert found["index"].written_bytes == s * weight
    assert found["bmm"].read_bytes == s * weight + s * (H + F) * BF16 and found["bmm"].flops == products(s)


@pytest.mark.parametrize("how", ("grouped_mm", "batched_mm"))
def test_as_many_tokens_as_experts_are_no_experts(how: str) -> None:
    """Rows of tokens, each taken by two, are all read: that they are six, as the experts are, is by chance."""
    found = rows(measure(config(how=how), batch=1, seq=E).before)
    if how == "grouped_mm":  # every token once, then Mixtral's weights of the choices in fp32, and the rows that they multiply
        s = E * K
        want = (E * H * BF16 + 8 * s) + (s * 4 + 8 * s) + (s * H * 4 + 8 * s)
        assert found["index"].read_bytes == want
    else:
        assert found["index"].read_bytes == pytest.approx(expected(E) * (2 * F * H + H * F) * BF16 + 2 * 8 * E * K, abs=2)


@pytest.mark.parametrize(("tokens", "hit"), ((1, 2), (2, 3), (3, 4), (16, 6)))
def test_eager_experts_run_one_by_one(tokens: int, hit: int) -> None:
    """Of 6 experts 2, 3.33, 4.22 and 5.99 are expected: that many, to the nearest, each with its two products."""
    assert round(expected(tokens)) == hit
    s = tokens * K
    found = rows(measure(config(how="eager"), batch=1, seq=tokens).before)
    few = rows(measure(config(how="grouped_mm"), batch=1, seq=tokens).before)["mm"]  # of the rest of the layer
    mm = found["mm"]
    assert mm.launches - few.launches == 2 * hit and mm.flops - few.flops == products(s)
    assert mm.read_bytes - few.read_bytes == hit * (2 * F * H + H * F) * BF16 + s * (H + F) * BF16
    assert mm.written_bytes - few.written_bytes == s * (2 * F + H) * BF16
    assert found["index_add_"].launches == hit and found["nonzero"].launches == 1 + hit
    assert found["index_add_"].written_bytes == s * H * BF16


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_a_model_with_weights_counts_as_its_config(how: str) -> None:
    made = config(how=how)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16, experts_implementation=how)
    report, one = (measure(m, batch=1, seq=1, phase="decode", context=8) for m in (model, made))
    for side in ("before", "after"):
        both, single = (getattr(r, side).total("layers") for r in (report, one))
        assert (both.launches, both.bytes, both.flops) == (2 * single.launches, 2 * single.bytes, 2 * single.flops)
    (said,) = (note for note in report.notes if note.startswith("experts: "))
    touched = "experts: 2 of 6 touched, as even routing of 1 tokens to 2 each gives"
    assert said == f"{touched}; before: experts_implementation={how!r}"


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_experts_touched_are_read_from_the_data_where_there_is_data(how: str) -> None:
    """All of nine tokens choose experts 1 and 4; then each its own."""
    torch.manual_seed(0)
    experts = MixtralExperts(config(how=how)).bfloat16()
    for p in experts.parameters():
        torch.nn.init.normal_(p)
    x, weights = torch.randn(9, H, dtype=torch.bfloat16), torch.full((9, K), 0.5, dtype=torch.bfloat16)
    one = (2 * F * H + H * F) * BF16
    for index, touched in ((torch.tensor([[1, 4]] * 9), 2), (torch.tensor([[i % 5, 5] for i in range(9)]), 6)):
        with torch.no_grad(), TrafficCounter() as counter:
            experts(x, index, weights)
        found = counter.by_op()
        if how == "batched_mm":
            assert found["aten.index"].read_bytes == touched * one + 2 * 8 * 9 * K
            continue
        product = found["aten.mm" if how == "eager" else "aten._grouped_mm"]
        ends = 0 if how == "eager" else 2 * 4 * E
        assert product.read_bytes == touched * one + 9 * K * (H + F) * BF16 + ends and product.flops == products(9 * K)
        assert how != "eager" or product.launches == 2 * touched


@pytest.mark.parametrize("phase", ("prefill", "train"))
def test_the_expectation_is_the_truth_where_every_expert_is_chosen(phase: str) -> None:
    """Products of the eager experts without values, and with them: every token chooses all of three experts."""
    made = config(how="eager", num_local_experts=3, num_experts_per_tok=3)
    row = rows(measure(made, batch=1, seq=8, phase=phase).before)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16, experts_implementation="eager").train(phase == "train")
    layer = model.model.layers[0]
    x = torch.randn(1, 8, H, dtype=torch.bfloat16, requires_grad=phase == "train")
    position = model.model.rotary_emb(x, torch.arange(8)[None])
    with torch.set_grad_enabled(phase == "train"), TrafficCounter() as counter:
        out = layer(x, position_embeddings=position)
        if phase == "train":
            torch.autograd.grad(out, [x, *layer.parameters()], torch.randn_like(out))
    mm, index_add = (counter.by_op()[f"aten.{name}"] for name in ("mm", "index_add_"))
    assert (mm.launches, mm.bytes, mm.flops) == (row["mm"].launches, row["mm"].bytes, row["mm"].flops)
    assert (index_add.launches, index_add.bytes) == (row["index_add_"].launches, row["index_add_"].bytes)


@pytest.mark.parametrize("family", ("gpt_oss", "olmoe", "qwen2_moe", "qwen3_moe", "glm4_moe"))
@pytest.mark.parametrize("how", ("eager", "grouped_mm"))
def test_every_family(family: str, how: str) -> None:
    ours = measure(config(family, how), batch=1, seq=8, baseline="eager" if family == "gpt_oss" else "sdpa")  # its sinks
    assert ours.after.label == "fused" and {"fusedblock.moe_gate_up", "fusedblock.moe_down"} <= rows(ours.after).keys()
    assert 1 < ours.after.total("layers").flops / ours.before.total("layers").flops < 1.04


@pytest.mark.parametrize("how", ("eager", "grouped_mm"))
def test_a_layer_with_experts_that_falls_back(how: str) -> None:
    report = measure(config("olmoe", how, clip_qkv=1.0), batch=1, seq=8)
    assert report.after.rows == report.before.rows and any("clip_qkv has no kernel" in note for note in report.notes)


@pytest.mark.parametrize(("family", "words", "subject"), (
    ("glm4_moe", {"first_k_dense_replace": 1, "num_hidden_layers": 3}, "layer 1 of glm4_moe, the first with experts"),
    ("glm4_moe", {"first_k_dense_replace": 9, "num_hidden_layers": 12}, "layer 9 of glm4_moe, the first with experts"),
    ("glm4_moe", {"first_k_dense_replace": 0}, "one layer of glm4_moe"),
    ("glm4_moe", {"first_k_dense_replace": 2}, "one layer of glm4_moe"),  # of two
    ("qwen2_moe", {"mlp_only_layers": [0]}, "layer 1 of qwen2_moe, the first with experts"),
    ("qwen3_moe", {"decoder_sparse_step": 3, "num_hidden_layers": 4}, "layer 2 of qwen3_moe, the first with experts"),
))  # fmt: skip
def test_of_a_config_the_first_layer_with_experts_is_measured(family: str, words: dict[str, Any], subject: str) -> None:
    made = config(family, **words)
    kept = copy.deepcopy(made.to_dict())
    report = measure(made, batch=1, seq=8)
    assert report.subject == subject and subject in str(report) and made.to_dict() == kept
    dense = words.get("first_k_dense_replace") == 2
    assert ("_grouped_mm" in rows(report.before)) != dense and ("topk" in rows(report.before)) != dense
    decoded = measure(made, batch=1, seq=1, phase="decode", context=8)
    assert decoded.subject == subject and decoded.after.label == "fused"

"""`measure`: totals against what the arithmetic of a layer demands, the report's forms, and the user's model left alone."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, GPT2Config, LlamaConfig, LlamaForCausalLM, MistralConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import fusedblock
from fusedblock.metering import Report, compare, measure
from fusedblock.metering.report import OpRow, Side, _plain_table, bytes_text, flops_text, table
from fusedblock.metering.timing import Timing
from fusedblock.metering.workload import LayerCall, copy_module, on, workload

SMALL = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
)
LLAMA_8B = dict(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL)).eval()


def rows(side: Side, where: str = "layers") -> dict[str, OpRow]:
    return {r.name: r for r in side.rows if r.where == where}


def gb(side: Side) -> float:
    return side.total().bytes / 1e9


class Llama8B:
    """A layer's traffic from its sizes alone: bf16, one sequence of 4096 tokens."""

    tokens, hidden, ffn, q, kv, heads = 4096, 4096, 14336, 4096, 1024, 32
    x = 2 * tokens * hidden
    weights = 2 * (hidden * (q + 2 * kv) + q * hidden + 3 * hidden * ffn)
    qkv, wide, lse = 2 * tokens * (q + 2 * kv), 2 * tokens * ffn, 4 * tokens * heads
    products = 2 * tokens * (weights // 2)
    causal = 4 * heads * 128 * (tokens * (tokens + 1) // 2)
    # one read and write of every tensor between five launches: qkv, attention, o, gate and up, down
    least = weights + 2 * qkv + lse + x + (x + 2 * x) + x + 2 * wide + (x + x) + x


def test_llama_8b_prefill() -> None:
    config = LlamaConfig(**LLAMA_8B)
    eager = measure(config, batch=1, seq=4096, baseline="eager")
    sdpa = measure(config, batch=1, seq=4096)
    assert sdpa.baseline == "sdpa"
    assert eager.layers == 1 and eager.dtype == "bfloat16" and eager.before.timing is None
    assert eager.before.total().launches == pytest.approx(47, abs=1) and gb(eager.before) == pytest.approx(21.0, rel=0.02)
    assert sdpa.before.total().launches == pytest.approx(38, abs=1) and gb(sdpa.before) == pytest.approx(3.65, rel=0.02)
    assert eager.after.rows == sdpa.after.rows
    after = sdpa.after.total()
    assert after.launches <= 7 and Llama8B.least <= after.bytes <= 1.2 * Llama8B.least
    assert sum(r.flops for r in sdpa.before.rows) == Llama8B.products + Llama8B.causal
    assert after.flops == pytest.approx(Llama8B.products + Llama8B.causal, rel=1e-3)
    # eager attention computes the whole square
    assert eager.before.total().flops == Llama8B.products + 2 * Llama8B.causal * 4096 // 4097


def test_llama_8b_decode() -> None:
    report = measure(LlamaConfig(**LLAMA_8B), batch=1, seq=1, phase="decode", context=4096, baseline="sdpa")
    keys = 2 * 2 * 1024 * 4096
    assert rows(report.before)["scaled_dot_product_attention"].read_bytes == keys + 2 * 4096
    # DynamicCache: what was cached and the new token are read, and all of it is written anew. Both sides do it.
    cats = [rows(side)["cat"] for side in (report.before, report.after)]
    assert all(c.bytes >= 2 * keys for c in cats) and cats[1].bytes == 2 * keys and cats[1].launches == 2
    weights = Llama8B.weights
    for side in (report.before, report.after):
        assert weights + 3 * keys < side.total().bytes < 1.01 * (weights + 3 * keys)
    assert report.after.total().launches < report.before.total().launches / 4


def test_llama_8b_training() -> None:
    report = measure(LlamaConfig(**LLAMA_8B), batch=1, seq=4096, phase="train", baseline="sdpa")
    assert gb(report.before) == pytest.approx(11.3, rel=0.02)
    for side in (report.before, report.after):
        # each product once forward and twice backward; attention's two once, and five to go back
        assert side.total().flops == pytest.approx(3 * Llama8B.products + 3.5 * Llama8B.causal, rel=0.01)
    assert report.after.total().launches < report.before.total().launches / 2
    assert report.after.total().bytes < report.before.total().bytes / 2


@pytest.mark.parametrize(
    "phase, seq, context", [("prefill", 16, None), ("prefill", 4, 16), ("decode", 1, 16), ("train", 16, None)]
)
def test_real_meta_config_and_layer_agree(model: LlamaForCausalLM, phase: str, seq: int, context: int | None) -> None:
    def run(subject: object) -> Report:
        return measure(subject, batch=2, seq=seq, phase=phase, context=context, baseline="sdpa")

    whole, one = run(model), run(model.model.layers[1])
    with torch.device("meta"):
        meta = LlamaForCausalLM(LlamaConfig(**SMALL))
    assert run(meta).before.rows == whole.before.rows and run(meta).after.rows == whole.after.rows
    config = LlamaConfig(**SMALL, dtype=torch.float32)
    assert run(config).before.rows == one.before.rows and run(config).after.rows == one.after.rows
    assert whole.layers == 3 and one.layers == 1
    for side in ("before", "after"):
        many, single = getattr(whole, side).total("layers"), getattr(one, side).total()
        assert (many.launches, many.bytes, many.flops) == (3 * single.launches, 3 * single.bytes, 3 * single.flops)


@pytest.mark.parametrize("baseline", ["eager", "sdpa"])
@pytest.mark.parametrize("phase, seq, context", [("prefill", 16, None), ("prefill", 4, 16), ("decode", 1, 16)])
def test_count_is_that_of_the_real_layer(
    model: LlamaForCausalLM, baseline: str, phase: str, seq: int, context: int | None
) -> None:
    """Counted on fake tensors by measure, and here on the model itself while it runs as transformers runs it."""
    model.set_attn_implementation(baseline)
    report = measure(model, batch=2, seq=seq, phase=phase, context=context, baseline=baseline)
    counter, ids = fusedblock.metering.TrafficCounter(), torch.zeros(2, context or seq, dtype=torch.int64)
    layer = model.model.layers[0]
    original = layer.forward

    def counted(*args, **kwargs):
        with counter:
            return original(*args, **kwargs)

    with torch.no_grad():
        if context is None:
            layer.forward = counted
            model(ids, use_cache=False)
        else:
            cache = model(ids[:, :-seq], use_cache=True).past_key_values
            layer.forward = counted
            model(ids[:, -seq:], past_key_values=cache)
    one = report.before.total("layers")
    total = counter.total()
    assert (3 * total.launches, 3 * total.flops) == (one.launches, one.flops)
    assert 3 * total.bytes == one.bytes


def test_outside_counts_embedding_norm_and_head(model: LlamaForCausalLM) -> None:
    report = measure(model, batch=2, seq=16)
    outside = rows(report.before, "outside")
    assert outside == rows(report.after, "outside")
    tokens, hidden, vocab = 32, 64, 64
    assert outside["embedding"].bytes == 4 * 2 * tokens * hidden + 8 * tokens
    assert outside["mm"].flops == 2 * 2 * hidden * vocab  # logits of the last token of each sequence
    assert outside["mm"].bytes == 4 * (2 * hidden + hidden * vocab + 2 * vocab)
    assert "embedding" not in rows(report.before)
    train = rows(measure(model, batch=2, seq=16, phase="train").before, "outside")
    assert train["mm"].flops == 3 * 2 * tokens * hidden * vocab and train["embedding_dense_backward"].launches == 1


def test_layers_that_differ_are_measured_apart(model: LlamaForCausalLM) -> None:
    same = measure(model, batch=1, seq=8)
    wide = LlamaConfig(**{**SMALL, "intermediate_size": 192})
    model.model.layers[1] = LlamaDecoderLayer(wide, 1)
    report = measure(model, batch=1, seq=8)
    more = 3 * 2 * 8 * 64 * 96  # three products of twice the width
    assert report.before.total("layers").flops - same.before.total("layers").flops == more
    assert any("2 of 3 layers measured" in note for note in report.notes)


def state(model: nn.Module) -> tuple:
    return (
        {n: (t.clone(), t.data_ptr(), t._version) for n, t in model.state_dict().items()},
        {n: (id(p), p.requires_grad, p.grad) for n, p in model.named_parameters()},
        {n: (id(m), type(m), m.training, sorted(m.__dict__)) for n, m in model.named_modules()},
        model.config.to_dict() if hasattr(model, "config") else None,
        model.config._attn_implementation if hasattr(model, "config") else None,
    )


def same(a: tuple, b: tuple) -> bool:
    tensors = all(torch.equal(a[0][n][0], b[0][n][0]) and a[0][n][1:] == b[0][n][1:] for n in a[0])
    return a[0].keys() == b[0].keys() and tensors and a[1:] == b[1:]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode", "train"])
def test_model_is_left_as_it_was(model: LlamaForCausalLM, phase: str, fused: bool) -> None:
    if fused:
        fusedblock.fuse(model)
    model.train(phase == "prefill")
    seen: list[object] = []
    model.model.layers[0].register_forward_hook(lambda *a: seen.append(a))
    before, random = state(model), torch.get_rng_state()
    report = measure(model, batch=1, seq=1 if phase == "decode" else 8, phase=phase, context=8)
    assert same(before, state(model)) and seen == [] and torch.equal(random, torch.get_rng_state())
    assert "mul" in rows(report.before) and "fusedblock.linear" in rows(report.after)


@pytest.mark.parametrize("step", ["fuse", "unfuse", "_count_outside"])
def test_model_is_left_as_it_was_by_a_failure(model: LlamaForCausalLM, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("broken on purpose")

    fusedblock.fuse(model)
    before = state(model)
    monkeypatch.setattr(compare, step, broken)
    with pytest.raises(RuntimeError, match="on purpose"):
        measure(model, batch=1, seq=8)
    assert same(before, state(model))


def test_a_layer_that_falls_back_says_so(model: LlamaForCausalLM) -> None:
    model.model.layers[0].self_attn.q_proj = type("Custom", (nn.Linear,), {})(64, 64, bias=False)
    report = measure(model.model.layers[0], batch=1, seq=8, baseline="sdpa")
    assert report.after.rows == report.before.rows and report.after.label == "transformers, sdpa attention: nothing is fused"
    assert any("not fused, after is as before" in note and "q_proj" in note for note in report.notes)
    both = measure(model, batch=1, seq=8, baseline="sdpa").after  # the other two layers are fused
    assert both.label == "fused" and {"mm", "fusedblock.gated_mlp"} <= {row.name for row in both.rows}


def test_training_with_dropout_has_no_gain_and_names_the_rates() -> None:
    """The original forward runs: ours as its attention would be no gain of fuse."""
    config = GPT2Config(n_layer=1, n_embd=64, n_head=4, attn_pdrop=0.25)  # the other rates are 0.1
    rates = "attn.attn_dropout=0.25, attn.resid_dropout=0.1, mlp.dropout=0.1 in training; set to 0, it fuses"
    trained = measure(config, batch=1, seq=32, phase="train")
    assert trained.after.rows == trained.before.rows and f"not fused, after is as before: {rates}" in trained.notes
    prefill = measure(config, batch=1, seq=32)
    assert prefill.after.total().launches < prefill.before.total().launches and prefill.after.label == "fused"
    config.attn_pdrop = config.resid_pdrop = 0.0
    trained = measure(config, batch=1, seq=32, phase="train")
    assert trained.after.total().launches < trained.before.total().launches
    assert not any("not fused" in note for note in trained.notes)


def test_a_note_says_under_which_attention_after_is_called_where_that_matters() -> None:
    said = "after: called as under attn_implementation='fusedblock', which needs no mask in memory without padding; set it, fuse"
    windowed, capped = MistralConfig(**SMALL, sliding_window=6), Gemma2Config(**SMALL, head_dim=16)
    for subject, work, baseline, noted in (
        (windowed, {"seq": 16}, "sdpa", True), (windowed, {"seq": 5}, "sdpa", False), (windowed, {"seq": 5}, "eager", True),
        (LlamaConfig(**SMALL), {"seq": 16}, "sdpa", False), (LlamaConfig(**SMALL), {"seq": 4, "context": 16}, "sdpa", True),
        (capped, {"seq": 16}, "eager", True),
    ):  # fmt: skip
        notes = measure(subject, batch=1, **work, baseline=baseline).notes
        assert any(note.startswith(said) for note in notes) == noted, (subject.model_type, work, baseline)
        fallen = any("under 'sdpa' calls fall back, for its softcap" in note for note in notes)
        assert fallen == (subject is capped)


@pytest.mark.parametrize(
    "options, expected",
    [
        (dict(batch=0, seq=4), "batch=0"),
        (dict(batch=1, seq=-1), "seq=-1"),
        (dict(batch=1, seq=2.0), "seq=2.0"),
        (dict(batch=1, seq=4, phase="generate"), "phase='generate'"),
        (dict(batch=1, seq=4, baseline="flash"), "baseline='flash'"),
        (dict(batch=1, seq=1, phase="decode"), "context="),
        (dict(batch=1, seq=4, context=3), "context=3 is less than seq=4"),
        (dict(batch=1, seq=4, phase="train", context=8), "context=8"),
        (dict(batch=1, seq=4, device="meta"), "device='meta'"),
    ],
)
def test_bad_arguments(model: LlamaForCausalLM, options: dict, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        measure(model, **options)


def test_bad_models() -> None:
    with pytest.raises(ValueError, match="Linear has no layer that can be fused; supported are the families bert, "):
        measure(nn.Linear(2, 2), batch=1, seq=1)
    with pytest.raises(ValueError, match="model is a str"):
        measure("llama", batch=1, seq=1)


def test_more_tokens_than_positions_are_noted() -> None:
    config = LlamaConfig(**SMALL, max_position_embeddings=16)
    for subject in (config, LlamaForCausalLM(config)):
        within, seq = (measure(subject, batch=1, seq=n).notes for n in (16, 17))
        context = measure(subject, batch=1, seq=1, phase="decode", context=20).notes
        assert not any("max_position_embeddings" in note for note in within)
        assert "seq=17 is more than the model's max_position_embeddings=16" in seq
        assert "context=20 is more than the model's max_position_embeddings=16" in context


def test_no_gpu(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no GPU"):
        measure(model, batch=1, seq=4, device="cuda")


@pytest.fixture
def report(model: LlamaForCausalLM) -> Report:
    return measure(model, batch=1, seq=8, baseline="sdpa")


def test_json_round_trip(report: Report, tmp_path: Path) -> None:
    text = report.to_json(tmp_path / "report.json")
    assert json.loads(text)["schema"] == "fusedblock.report/1"
    assert Report.from_json(tmp_path / "report.json") == report == Report.from_json(text)
    timed = Side("x", report.before.rows, Timing(2.0, 1.5, 2.5, 9, "graph"), 1.0)
    full = Report(**{**report.__dict__, "before": timed})
    assert Report.from_json(full.to_json()) == full
    with pytest.raises(ValueError, match="report/2"):
        Report.from_json(text.replace("report/1", "report/2"))


def test_rates_are_of_the_layers_alone() -> None:
    layer = OpRow("mm", "layers", 2, 3 * 10**9, 10**9, 8 * 10**12, 9 * 10**12)
    other = OpRow("mm", "outside", 1, 10**9, 10**9, 10**12, 10**12)
    side = Side("x", (layer, other), Timing(4.0, 3.0, 5.0, 9, "graph"), 3.0)
    assert (side.gbps, side.tflops, side.share) == (1000.0, 2000.0, 0.75)
    assert side.total().launches == 3 and layer.intensity == 9 * 10**12 / (4 * 10**9)


def test_text_has_both_sides_and_the_totals(report: Report) -> None:
    text = str(report)
    for expected in ("prefill", "batch 1, 8 tokens", "3 layers", "launches", "fusedblock.gated_mlp", "silu", "before / after"):
        assert expected in text
    assert str(report.before.total().launches) in text and bytes_text(report.after.total().bytes) in text
    assert "\x1b" not in text


def test_plain_table_says_what_the_rich_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [("a", "1", "2 kB"), ("bb", "10", "[x]")]
    plain = _plain_table("t", ("op", "n", "bytes"), cells)
    assert plain.splitlines() == ["t", "op   n  bytes", "--  --  -----", "a    1   2 kB", "bb  10    [x]"]
    for row in cells:
        for cell in row:
            assert cell in table("t", ("op", "n", "bytes"), cells)
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert table("t", ("op", "n", "bytes"), cells) == plain


@pytest.mark.parametrize(
    "n, text", [(0, "0 B"), (999, "999 B"), (1536000, "1.54 MB"), (21_026_258_944, "21 GB"), (2.5e12, "2.5 TB")]
)
def test_bytes_text(n: float, text: str) -> None:
    assert bytes_text(n) == text


def test_flops_text() -> None:
    assert flops_text(0) == "-" and flops_text(1.787e12) == "1.79 TFLOP" and flops_text(12) == "12 FLOP"


def test_plot_writes_a_png(report: Report, tmp_path: Path) -> None:
    report.plot(tmp_path / "report.png")
    data = (tmp_path / "report.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert width > 800 and height > 300


def test_plot_without_matplotlib(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="pip install"):
        report.plot(tmp_path / "report.png")


def test_progress_is_shown_after_two_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    import time

    with compare._Progress() as progress:
        progress("counting")
        assert capsys.readouterr().err == ""
        time.sleep(2.3)
        progress("timing")
    assert capsys.readouterr().err == "fusedblock.measure: counting ...\nfusedblock.measure: timing ...\n"


@pytest.mark.parametrize("phase", ["prefill", "decode", "train"])
def test_a_call_can_be_repeated(model: LlamaForCausalLM, phase: str) -> None:
    """What is timed: real tensors that share the model's weights, before and after; the same result each time."""
    layer = model.model.layers[1]
    work = workload(phase, 2, 1 if phase == "decode" else 8, 8)
    shared = copy_module(layer, on(torch.device("cpu")))
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(layer.parameters(), shared.parameters()))
    apart = copy_module(layer, on(torch.device("cpu"), fresh=True))
    assert all(a.data_ptr() != b.data_ptr() and torch.equal(a, b) for a, b in zip(layer.parameters(), apart.parameters()))
    call = LayerCall(shared, work, "sdpa", torch.device("cpu"))
    first, second = call(), call()
    for a, b in zip(*(x if work.training else (x,) for x in (first, second))):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    fused = LayerCall(copy_module(shared, on(torch.device("cpu"))), work, "sdpa", torch.device("cpu"))
    fusedblock.fuse(fused.layer)
    fused.x, fused.grad_out, fused.arguments = call.x, call.grad_out, call.arguments
    fused.wanted[:1] = [call.x] if work.training else []
    if work.cached:
        fused.filled, fused.cache = call.filled, call.cache
    for a, b in zip(*(x if work.training else (x,) for x in (first, fused()))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert all(p.grad is None for p in layer.parameters())


def test_config_is_not_changed() -> None:
    config = LlamaConfig(**SMALL)
    kept = copy.deepcopy(config.to_dict())
    measure(config, batch=1, seq=8)
    assert config.to_dict() == kept


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("phase", ["prefill", "decode", "train"])
def test_times_on_a_gpu(phase: str) -> None:
    config = LlamaConfig(**{**SMALL, "hidden_size": 512, "intermediate_size": 1024})
    gpu = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    before = state(gpu)
    report = measure(gpu, batch=2, seq=1 if phase == "decode" else 256, phase=phase, context=256, baseline="sdpa")
    assert same(before, state(gpu))
    for side in (report.before, report.after):
        assert side.timing is not None and side.timing.samples >= 3 and 0 < side.timing.median_ms < 100
        assert side.gbps and side.tflops and 0 < side.share < 1.05
    counted = measure(gpu, batch=2, seq=report.seq, phase=phase, context=256, baseline="sdpa", device="cpu")
    assert counted.before == Side(report.before.label, report.before.rows)
    assert Report.from_json(report.to_json()) == report and "TFLOP/s" in str(report)

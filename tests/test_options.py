"""Where options come from, how long they hold, and what debug checks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from llama import prompt, tiny
from op_cases import recording
from torch import Tensor

import fusedblock
from fusedblock import debug
from fusedblock.options import Options, current, from_environment, options

VARIABLES = ("FUSEDBLOCK_DEBUG", "FUSEDBLOCK_DETERMINISTIC", "FUSEDBLOCK_BATCH_INVARIANT")


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "_reported", set())


def test_environment_gives_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert from_environment() == Options(debug=False, deterministic=False, batch_invariant=False)
    monkeypatch.setenv("FUSEDBLOCK_DEBUG", "1")
    monkeypatch.setenv("FUSEDBLOCK_DETERMINISTIC", "Off")
    monkeypatch.setenv("FUSEDBLOCK_BATCH_INVARIANT", "yes")
    assert from_environment() == Options(debug=True, deterministic=False, batch_invariant=True)
    monkeypatch.setenv("FUSEDBLOCK_DETERMINISTIC", "maybe")
    with pytest.raises(ValueError, match="FUSEDBLOCK_DETERMINISTIC='maybe'"):
        from_environment()


def in_a_process(code: str, **environment: str) -> str:
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_user_sets_the_environment_before_the_first_call() -> None:
    code = """
import os, torch, fusedblock
os.environ["FUSEDBLOCK_DETERMINISTIC"] = "1"  # after the import, before the first operator
from fusedblock.options import current
fusedblock.linear(torch.ones(2, 3), torch.ones(4, 3))
with fusedblock.options(debug=True):
    print(current())
"""
    found = in_a_process(code, FUSEDBLOCK_BATCH_INVARIANT="on")
    assert found == str(Options(debug=True, deterministic=True, batch_invariant=True))


def test_blocks_nest_and_end() -> None:
    before = current()
    with options(deterministic=True) as outer:
        assert outer == current() == Options(before.debug, True, before.batch_invariant)
        with pytest.raises(RuntimeError, match="inside"), options(deterministic=False, batch_invariant=True):
            assert current() == Options(before.debug, False, True)
            raise RuntimeError("inside")
        assert current() == outer
    assert current() == before


@pytest.mark.parametrize("name", ["debug", "deterministic", "batch_invariant"])
@pytest.mark.parametrize("value, shown", [("no", r"'no' \(str\)"), (1, r"1 \(int\)"), (0.0, r"0.0 \(float\)"),
                                          (torch.tensor(True), r"tensor\(True\) \(Tensor\)")])  # fmt: skip
def test_values_that_are_no_switch(name: str, value: object, shown: str) -> None:
    before = current()
    message = f"^options: {name} is {shown}, expected True, False or None$"
    with pytest.raises(TypeError, match=message), options(**{name: value}):  # type: ignore[arg-type]
        raise AssertionError("the block ran")
    assert current() == before


def test_a_block_holds_in_its_own_thread_only() -> None:
    seen = []
    before = current()
    with options(deterministic=not before.deterministic):
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
    assert seen == [before]


# ---- debug


@pytest.fixture
def debugging() -> Iterator[None]:
    with fusedblock.options(debug=True):
        yield


X, WEIGHT = torch.randn(5, 24), torch.randn(40, 24)


def spoiled(t: Tensor, at: tuple[int, ...], value: float) -> Tensor:
    t = t.clone()
    t[at] = value
    return t


@pytest.mark.parametrize("interpreted", [False, True])
def test_a_user_looks_for_the_first_nan(debugging: None, interpreted: bool) -> None:
    with recording("sm_90") if interpreted else nullcontext():
        assert torch.isfinite(fusedblock.linear(X, WEIGHT)).all()
        with pytest.raises(FloatingPointError, match=r"linear: x has 1 of 120 values that are not finite; .* \(3, 7\), is nan"):
            fusedblock.linear(spoiled(X, (3, 7), float("nan")), WEIGHT)
        with pytest.raises(FloatingPointError, match=r"linear: weight .* at \(0, 1\), is -inf"):
            fusedblock.linear(X, spoiled(WEIGHT, (0, 1), -float("inf")))
        with pytest.raises(FloatingPointError, match=r"linear: the result out has 1 of 1 .* though its inputs have none.*inf"):
            fusedblock.linear(torch.full((1, 24), 60000.0).half(), torch.ones(1, 24).half())


def test_a_user_looks_for_the_first_nan_of_a_backward(debugging: None) -> None:
    x = X.clone().requires_grad_()
    y = fusedblock.linear(x, WEIGHT)
    with pytest.raises(FloatingPointError, match=r"linear_backward: grad_out has 1 of 200 .* at \(2, 3\), is inf"):
        y.backward(spoiled(torch.ones(5, 40), (2, 3), float("inf")))


def test_a_wrong_shape_is_said_first(debugging: None) -> None:
    with pytest.raises(ValueError, match="in_features"):
        fusedblock.linear(torch.full((5, 23), float("nan")), WEIGHT)


def test_without_debug_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError("a check ran")

    monkeypatch.setattr(debug, "check_inputs", never)
    monkeypatch.setattr(debug, "check_results", never)
    with fusedblock.options(debug=False):
        assert fusedblock.linear(spoiled(X, (3, 7), float("nan")), WEIGHT)[3].isnan().all()
        with fusedblock.options(debug=True), pytest.raises(AssertionError, match="a check ran"):
            fusedblock.linear(X, WEIGHT)


def attend(mask: Tensor | None, k: Tensor | None = None) -> Tensor:
    q, kv = torch.randn(2, 3, 2, 16), torch.randn(2, 6, 1, 16)
    out = fusedblock.attention(q, kv if k is None else k, kv, mask=mask)
    assert isinstance(out, Tensor)
    return out


def test_a_user_masks_a_whole_row(debugging: None) -> None:
    """Said once in a process, not for every layer and step."""
    mask = torch.ones(2, 1, 3, 6, dtype=torch.bool)
    mask[1, 0, 2] = False
    with pytest.warns(UserWarning, match="2 of 12 rows may attend to nothing.* query 2 of head 0 of sequence 1"):
        out = attend(mask)
    assert not out[1, 2].any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(mask)
        attend(None)


def test_keys_that_a_mask_hides_may_be_anything(debugging: None) -> None:
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[:, 5] = False
    k = spoiled(torch.randn(2, 6, 1, 16), (0, 5), float("nan"))
    assert torch.isfinite(attend(mask, k)).all()
    with pytest.raises(FloatingPointError, match="attention: k has 16 of 192"):
        attend(None, k)
    with pytest.raises(FloatingPointError, match="the result out"):  # a key that is seen
        attend(mask, spoiled(k, (1, 2), float("nan")))
    with pytest.raises(FloatingPointError, match="attention: mask has 1 of .* NaN"):
        attend(spoiled(torch.zeros(2, 1, 3, 6), (0, 0, 0, 0), float("nan")))


def test_a_compiled_function_is_traced_without_the_checks_and_runs_with_them(debugging: None) -> None:
    compiled = torch.compile(lambda x: fusedblock.linear(x, WEIGHT).relu(), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X), fusedblock.linear(X, WEIGHT).relu())
    with pytest.raises(FloatingPointError, match="linear: x"):
        compiled(spoiled(X, (0, 0), float("nan")))


def test_nothing_is_looked_at_while_a_graph_is_captured(debugging: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        is_cuda, is_meta = True, False

    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda value=capturing: value)
        assert debug.watching(OnGpu()) is not capturing  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_a_user_brings_rotary_tables_of_another_layout(name: str) -> None:
    half = torch.randn(2, 5, 4)
    tables = {"halves": torch.cat([half, half], -1), "repeat": half.repeat_interleave(2, -1), "short": half}
    for layout, right in tables.items():
        debug.check_tables(right, right, layout)
        for other in {*tables} - {layout} if layout != "short" else ():
            pair = {"cos": right, "sin": right, name: tables[other]}
            with pytest.raises(ValueError, match=f"rotary tables: {name} .* that differ, at"):
                debug.check_tables(pair["cos"], pair["sin"], layout)


def test_a_user_looks_for_the_first_nan_of_a_fused_model(debugging: None) -> None:
    model = tiny()
    fusedblock.fuse(model)
    ids, _ = prompt()
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()
        model.model.layers[1].mlp.down_proj.weight[5, 7] = float("nan")
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients), pytest.raises(FloatingPointError, match=r"linear: weight .* at \(5, 7\), is nan"):
            model(ids)
    with fusedblock.options(debug=False):
        assert model(ids).logits.isnan().all()


def test_a_user_gives_a_fused_layer_rotary_tables_of_its_own(debugging: None) -> None:
    model = tiny()
    fusedblock.fuse(model)
    layer, x = model.model.layers[0], torch.randn(1, 5, model.config.hidden_size)
    cos, sin = model.model.rotary_emb(x, torch.arange(5)[None])
    wrong = spoiled(cos, (0, 3, -1), 0.5)
    layer(x, position_embeddings=(cos, sin))
    with pytest.raises(ValueError, match="rotary tables: cos .* halves that differ, at .* and 0.5;"):
        layer(x, position_embeddings=(wrong, sin))
    compiled = torch.compile(layer, fullgraph=True, backend="eager")  # the check is left out of the trace
    compiled(x, position_embeddings=(wrong, sin))

from __future__ import annotations

import threading

import pytest

from fusedblock.options import Options, current, options


def test_environment_gives_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("FUSEDBLOCK_DEBUG", "FUSEDBLOCK_DETERMINISTIC"):
        monkeypatch.delenv(variable, raising=False)
    assert current() == Options(debug=False, deterministic=False)
    monkeypatch.setenv("FUSEDBLOCK_DEBUG", "1")
    monkeypatch.setenv("FUSEDBLOCK_DETERMINISTIC", "Off")
    assert current() == Options(debug=True, deterministic=False)
    monkeypatch.setenv("FUSEDBLOCK_DETERMINISTIC", "maybe")
    with pytest.raises(ValueError, match="FUSEDBLOCK_DETERMINISTIC='maybe'"):
        current()


def test_blocks_nest_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDBLOCK_DEBUG", "1")
    monkeypatch.delenv("FUSEDBLOCK_DETERMINISTIC", raising=False)
    before = current()
    with options(deterministic=True) as outer:
        assert outer == current() == Options(debug=True, deterministic=True)
        with pytest.raises(RuntimeError, match="inside"), options(debug=False):
            assert current() == Options(debug=False, deterministic=True)
            raise RuntimeError("inside")
        assert current() == outer
    assert current() == before


def test_a_block_holds_in_its_own_thread_only() -> None:
    seen = []
    before = current()
    with options(deterministic=not before.deterministic):
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
    assert seen == [before]

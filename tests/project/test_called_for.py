"""Which long runs changed files call for."""

from __future__ import annotations

from pathlib import Path

import called_for
import pytest
from repository import ROOT


@pytest.fixture
def one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that concerns one folder, which has passed."""
    folder = tmp_path / "layer"
    folder.mkdir()
    (folder / "source.py").write_text("1")
    monkeypatch.setattr(called_for, "ROOT", tmp_path)
    monkeypatch.setattr(called_for, "PASSED", tmp_path / "passed.json")
    monkeypatch.setattr(called_for, "RUNS", {"modes": called_for.LongRun(5, ("layer",))})
    assert list(called_for.called_for()) == ["modes"]
    called_for.note_passed("modes")
    return folder


def test_nothing_is_called_for_where_nothing_has_changed(one_run: Path) -> None:
    (one_run / "source.pyc").write_text("made")
    assert called_for.called_for() == {}


@pytest.mark.parametrize("change", ["content", "name", "new"])
def test_a_change_calls_for_the_run(one_run: Path, change: str) -> None:
    source = one_run / "source.py"
    if change == "content":
        source.write_text("2")
    elif change == "name":
        source.rename(one_run / "other.py")
    else:
        (one_run / "new.py").touch()
    assert list(called_for.called_for()) == ["modes"]


def test_words_do_not_call_for_a_run(one_run: Path) -> None:
    (one_run / "source.py").write_text('"""A docstring."""\n\n1  # a comment\n')
    assert called_for.called_for() == {}


def test_what_does_not_fit_is_named(one_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (one_run / "source.py").write_text("2")
    assert called_for.run_within(4) == 0
    assert "make modes: called for, but left out" in capsys.readouterr().out


def test_a_failed_run_is_a_failure(one_run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (one_run / "source.py").write_text("2")
    (one_run.parent / "Makefile").write_text("modes:\n\tfalse\n")
    assert called_for.run_within(5) == 1
    assert "failed: modes" in capfd.readouterr().err


def test_its_own_arguments_are_not_passed_on(
    one_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under ``make long-runs ARGS="--minutes 5"``."""
    (one_run / "source.py").write_text("2")
    (one_run.parent / "Makefile").write_text("modes:\n\ttest -z '$(ARGS)'\n")
    monkeypatch.setenv("MAKEFLAGS", r" -- ARGS=--minutes\ 5")
    assert called_for.run_within(5) == 0


def test_each_is_a_target_and_concerns_files_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for name, run in called_for.RUNS.items():
        assert f"\n{name}:" in makefile or f" {name}:" in makefile, name
        assert list(run.paths()), name

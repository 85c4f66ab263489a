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
    monkeypatch.setattr(called_for, "_git", lambda *_: "3")
    (tmp_path / "Makefile").write_text("TORCH ?= 2.13.0\nmodes:\n\tfalse\n")
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


def test_another_torch_calls_for_it(one_run: Path) -> None:
    makefile = one_run.parent / "Makefile"
    makefile.write_text(makefile.read_text().replace("2.13.0", "2.14.1"))
    called_for._made_with.cache_clear()
    assert list(called_for.called_for()) == ["modes"]
    called_for._made_with.cache_clear()


def test_what_it_imports_of_the_tests_calls_for_it(
    one_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(called_for, "TESTS", one_run.parent)
    (one_run.parent / "support").mkdir()
    (one_run.parent / "support" / "helper.py").write_text("x = 1")
    (one_run.parent / "support" / "shared.py").write_text("from helper import x")
    (one_run / "source.py").write_text("import shared")
    called_for.note_passed("modes")
    assert called_for.called_for() == {}
    (one_run.parent / "support" / "helper.py").write_text("x = 2")
    assert list(called_for.called_for()) == ["modes"]


@pytest.mark.parametrize(("age", "status"), [("3", 0), ("300", 1), ("infinite", 1)])
def test_what_does_not_fit_is_named(
    age: str,
    status: int,
    one_run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What has not passed for long fails."""
    (one_run / "source.py").write_text("2")
    if age == "infinite":
        (one_run.parent / "passed.json").unlink()
    monkeypatch.setattr(called_for, "_git", lambda *_: age)
    assert called_for.run_within(4) == status
    assert "make modes: called for, but left out" in capsys.readouterr().out


def test_a_failed_run_is_a_failure(one_run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (one_run / "source.py").write_text("2")
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
        assert run.paths(), name

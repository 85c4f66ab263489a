"""The long runs: which of them changed files call for; and the tables of PyTorch's own tests."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import called_for
import pytest
from distributed_suite import SUITES, problems
from repository import ROOT, TESTS
from source_code import CPP_SUFFIXES, code_of

# ---- which are called for ------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("name", "text", "runs"),
    [
        ("source.pyc", "made", []),
        ("source.py", '"""A docstring."""\n\n1  # a comment\n', []),
        ("source.py", "2", ["modes"]),
        ("new.py", "", ["modes"]),
    ],
)
def test_a_change_of_code_calls_for_the_run(
    one_run: Path, name: str, text: str, runs: list[str]
) -> None:
    (one_run / name).write_text(text)
    assert list(called_for.called_for()) == runs


def test_another_name_calls_for_it(one_run: Path) -> None:
    (one_run / "source.py").rename(one_run / "other.py")
    assert list(called_for.called_for()) == ["modes"]


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
    support = one_run.parent / "support"
    support.mkdir()
    (support / "helper.py").write_text("x = 1")
    (support / "shared.py").write_text("from helper import x")
    (one_run / "source.py").write_text("import shared")
    called_for.note_passed("modes")
    assert called_for.called_for() == {}
    (support / "helper.py").write_text("x = 2")
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


# ---- what is code, and what is comment -----------------------------------------------------------

PYTHON = """
'''A module.'''

def call(x):
    return "# no comment"
"""
CPP = """
auto url = "http://x";  // said
auto raw = R"py(// code "x" )" )py";
auto count = 1'000'000 + '"' + 'c';
"""


@pytest.mark.parametrize(
    ("suffix", "text", "old", "new", "is_code"),
    [
        (".py", PYTHON, "A module.", "Another.", False),
        (".py", PYTHON, "(x):\n", "(x):  # a comment\n\n", False),
        (".md", "A text.", "A text", "Another", False),
        (".cpp", CPP, "// said", "/* said\nanew */", False),
        (".cu", CPP, "auto count", "  // a count\n\n  auto count", False),
        (".py", PYTHON, "# no comment", "# none", True),
        (".cpp", CPP, "//x", "//y", True),
        (".cpp", CPP, "// code", "// text", True),
        (".cpp", CPP, """'"' + 'c'""", """'"' + 'd'""", True),
        (".json", "[1] // 1", "// 1", "// 2", True),
    ],
)
def test_words_are_no_code_and_literals_are(
    tmp_path: Path, suffix: str, text: str, old: str, new: str, is_code: bool
) -> None:
    assert old in text
    found = []
    for version in (text, text.replace(old, new)):
        path = tmp_path / f"source{suffix}"
        path.write_text(version)
        found.append(code_of(path))
    assert (found[0] != found[1]) is is_code


def test_all_of_the_library_is_understood() -> None:
    """Where a literal's end is not found, comments stay in the code, or braces leave it."""
    sources = [path for folder in ("csrc", "cuda") for path in (ROOT / folder).rglob("*")]
    read = [code_of(path).decode() for path in sources if path.suffix in CPP_SUFFIXES]
    assert len(read) > 200
    for code in read:
        assert "//" not in code and "/*" not in code
        assert code.count("{") == code.count("}")


# ---- PyTorch's own distributed tests -------------------------------------------------------------


def row(suite: str, case: str, plain: str, changed: str, **more: Any) -> dict[str, Any]:
    return {"case": case, "plain": plain, suite: changed, "groups": 1, **more}


@pytest.mark.parametrize("suite", SUITES)
def test_what_is_wrong(suite: str) -> None:
    known = [row(suite, name, "passed", "failed") for name in SUITES[suite].known]
    assert problems(SUITES[suite], [row(suite, "good", "passed", "passed"), *known]) == []
    both = row(suite, "both", "failed", "failed")
    assert problems(SUITES[suite], [row(suite, "bad", "passed", "failed"), both, *known]) == [
        "bad passes plain"
    ]
    for i, each in enumerate(known):
        others = known[:i] + known[i + 1 :]
        assert problems(SUITES[suite], others) == [f"{each['case']} no longer differs"]


def test_wrapped_groups_are_called() -> None:
    suite = SUITES["wrapper"]
    rows = [row("wrapper", name, "passed", "failed") for name in suite.known]
    rows.append(row("wrapper", "alone", "passed", "passed", groups=0))
    assert problems(suite, rows) == ["alone wraps no group"]


# ---- PyTorch's other tests -----------------------------------------------------------------------

NAME = re.compile(r"test_\w+\.py::\w+")


def _table(suite: str) -> dict[str, dict[str, dict[str, str]]]:
    """By file of PyTorch's: the tests that express each of its tests, or why none does."""
    return json.loads(next(TESTS.glob(f"*/{suite}.json")).read_text())


def _expressing(suite: str) -> set[str]:
    groups = _table(suite)["expressed"].values()
    return {name for tests in groups for ours in tests.values() for name in ours.split()}


def _in_reasons(suite: str) -> list[list[str]]:
    """File and name of each test that a reason names."""
    groups = _table(suite)["not_expressed"].values()
    reasons = [reason for tests in groups for reason in tests.values()]
    return [name.split("::") for reason in reasons for name in NAME.findall(reason)]


def _tests_in(file: Path) -> list[str]:
    tree = ast.parse(file.read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("suite", ["autograd_suite", "process_group_suite"])
def test_tests_of_pytorch_are_expressed_by_tests_that_there_are_or_not_at_all(suite: str) -> None:
    """Each by tests of one file alone, or with a reason."""
    folder = next(TESTS.glob(f"*/{suite}.json")).parent
    defined = Counter(name for file in folder.glob("test_*.py") for name in _tests_in(file))
    expressed = _expressing(suite)
    assert expressed
    assert {name: defined[name] for name in expressed if defined[name] != 1} == {}
    named = _in_reasons(suite)
    assert [each for each in named if each[1] not in _tests_in(folder / each[0])] == []
    table = _table(suite)
    assert all(ours for tests in table["expressed"].values() for ours in tests.values())
    for group, tests in table["not_expressed"].items():
        assert all(tests.values())
        assert not tests.keys() & table["expressed"].get(group, {}).keys()


def test_each_test_of_the_process_group_suite_is_named() -> None:
    files = list(TESTS.glob("*/test_process_group_suite_*.py"))
    assert files
    tests = {name for file in files for name in _tests_in(file) if name.startswith("test_")}
    named = {name for _, name in _in_reasons("process_group_suite")}
    assert tests - _expressing("process_group_suite") - named == set()

"""The choice of ``make check``, and the stored durations of the test cases."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import check
import durations
import pytest
import torch
from cases import Cases
from check import Plan, Sources
from durations import Durations
from repository import ROOT
from train_processes import finished

SOURCES = Sources()


# ---- areas ---------------------------------------------------------------------------------------


def test_a_layer_uses_those_below_it() -> None:
    assert SOURCES.layers["codecs"] == {"codecs", "native", "wording"}
    assert {"hooks", "collectives", "codecs"} < SOURCES.layers["attachment"]
    assert "attachment" not in SOURCES.layers["hooks"]


@pytest.mark.parametrize(
    ("path", "areas"),
    [
        ("torch_commhook/hooks/policy.py", {"hooks"}),
        ("torch_commhook/spans.py", {"spans"}),
        ("csrc/runtime/reducer/reducer.cpp", {"reducer"}),
        ("csrc/ops/codecs/sign.cpp", {"codecs", "ops", "cuda"}),
        ("cuda/sign.cu", {"cuda"}),
        ("docs/hooks.md", {"docs"}),
        ("tests/hooks/test_hooks.py", {"tests/hooks/test_hooks.py", "tests"}),
        ("tests/cuda/test_cuda_places.cpp", {"tests/cuda/test_cuda_partition.py"}),
        ("tests/support/staged_steps.py", {"helper:staged_steps"}),
        ("benchmarks/bench_wan.py", {"helper:bench_wan"}),
        (".gitignore", set()),
        # What all share, and what is unknown.
        *((path, {"everything"}) for path in ("setup.py", "Makefile", ".ci/run")),
        *((f"tests/{path}.py", {"everything"}) for path in ("conftest", "support/rank_pool")),
        ("torch_commhook/native/runtime.py", {"everything"}),
        ("torch_commhook/__init__.py", {"everything"}),
        ("csrc/include/commhook/hook.h", {"everything"}),
        ("csrc/runtime/bindings/module.cpp", {"everything"}),
        ("something/new.txt", {"everything"}),
    ],
)
def test_areas_of_a_path(path: str, areas: set[str]) -> None:
    assert SOURCES.areas(path) == areas


def test_each_folder_of_native_code_is_known_or_shared() -> None:
    shared = {"csrc/ops/check", "csrc/ops/cpu", "csrc/runtime/bindings", "csrc/runtime/hooks"}
    shared |= {"csrc/runtime/python", "csrc/include/commhook"}
    files = [path.relative_to(ROOT) for path in (ROOT / "csrc").glob("*/*/*") if path.is_file()]
    folders = {str(path.parent) for path in files}
    assert {f"{each}/" for each in folders - shared} == check.NATIVE.keys()


def test_only_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments and docstrings belong to the documents."""
    layer = tmp_path / "torch_commhook" / "hooks"
    layer.mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    for path in (layer / "__init__.py", layer / "policy.py", layer / "clip.py"):
        path.write_text('"""Hooks."""\nx = 1\n')

    def git(*command: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *command], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    (layer / "policy.py").write_text('"""Other hooks."""\nx = 1  # one\n')
    (layer / "clip.py").write_text('"""Hooks."""\nx = 2\n')
    (layer / "new.py").touch()
    (layer / "__init__.py").unlink()
    monkeypatch.setattr(check, "ROOT", tmp_path)
    sources = Sources(tmp_path)
    sources.__dict__["layers"] = {"hooks": frozenset({"hooks"})}
    sources.__dict__["shared"] = frozenset()
    assert check.changed_files(sources, "HEAD") == {
        "torch_commhook/hooks/__init__.py": {"hooks"},
        "torch_commhook/hooks/clip.py": {"hooks"},
        "torch_commhook/hooks/new.py": {"hooks"},
        "torch_commhook/hooks/policy.py": {"docs"},
    }


# ---- the choice ----------------------------------------------------------------------------------


def chosen(*areas: str, number: int = 0) -> Plan:
    return Plan(SOURCES, set(areas), number, "2.15.0")


def test_a_layer_calls_for_its_tests_and_those_above() -> None:
    files = chosen("collectives").cases.short
    assert {"collectives/test_exchange.py", "hooks/test_powersgd.py"} <= set(files)
    assert "attachment/test_modes.py" in files
    assert "codecs/test_codec_topk.py" not in files


def test_a_file_of_tests_uses_what_it_imports_from_other_layers() -> None:
    """Tests of hooks attach them."""
    assert "attachment" in SOURCES.uses("hooks/test_powersgd.py")
    assert "hooks/test_powersgd.py" in chosen("attachment").cases.short


def test_helpers_are_followed() -> None:
    users = [test for test in SOURCES.tests if "helper:elastic_history" in SOURCES.uses(test)]
    assert "elastic/test_histories.py" in users
    # It imports a module that imports this one.
    assert "helper:virtual_world" in SOURCES.uses("elastic/test_histories.py")


def test_tables_of_tests_are_checked_where_tests_change() -> None:
    files = chosen(*SOURCES.areas("tests/autograd/test_finite_check.py")).cases.short
    assert {"autograd/test_finite_check.py", "project/test_long_runs.py"} <= set(files)


def test_documents_call_for_few_tests() -> None:
    plan = chosen("docs")
    assert plan.on_torch.short == []
    assert "project/test_readme.py" in plan.cases.short
    assert len(plan.cases.short) < 30
    assert not any(command[0] == "test-integrations" for command, _ in plan.runs)


def test_everything_leaves_out_nothing_short() -> None:
    plan = chosen("everything")
    missing = [test for test in SOURCES.tests if test not in plan.cases.short]
    assert all(test.startswith("integrations/") for test in missing)
    assert {command[0] for command, _ in plan.runs} >= {"test", "test-integrations", "test-torch"}


def test_each_long_case_has_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    long = {f"test_it[{i}]": 100.0 for i in range(50)}
    known = {f"{folder}/test_{folder}.py": Durations(1.0, long) for folder in ("hooks", "codecs")}
    monkeypatch.setattr(durations, "load", lambda: known)
    run: set[str] = set()
    for number in range(16 * 3):
        plan = chosen("hooks", number=number)
        of_hooks = [each for each in plan.cases.long if "hooks" in each]
        assert 0 < sum(plan.cases.long[each] for each in of_hooks) < 2000
        run |= plan.cases.long.keys()
    assert len(run) == 100


def test_files_for_another_torch_exist() -> None:
    assert set(check.ON_ANOTHER_TORCH) <= SOURCES.tests.keys()


def test_an_unreadable_change_means_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert check._changed(SOURCES, "no-such-commit") == {"everything"}
    assert "the change cannot be read" in capsys.readouterr().out


def test_another_torch_runs_what_has_changed_since_it_passed() -> None:
    plan = Plan(SOURCES, {"cli"}, 0, "2.15.0", on_torch={"collectives"})
    assert "attachment/test_modes.py" in plan.on_torch.short
    assert "attachment/test_modes.py" not in plan.cases.short
    assert not Plan(SOURCES, {"docs"}, 0, "2.15.0", on_torch={"everything"}).on_torch.short


def test_the_torch_that_has_not_passed_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "CACHE", tmp_path)
    for seconds, longest_ago in enumerate(["2.11.0", "2.15.0", "2.11.0"]):
        assert check._longest_ago() == longest_ago
        check.passed_on(longest_ago).touch()
        os.utime(check.passed_on(longest_ago), (seconds, seconds + 1))


@pytest.mark.parametrize(
    ("status", "uncommitted", "is_noted"), [(0, "", True), (0, "setup.py\n", False), (1, "", False)]
)
def test_the_commit_that_another_torch_has_passed(
    status: int, uncommitted: str, is_noted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(SOURCES, {"cli"}, 0, "2.15.0")
    monkeypatch.setattr(check, "CACHE", tmp_path)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    git = {"rev-parse": "c0ffee\n", "diff": uncommitted}
    monkeypatch.setattr(check, "git", lambda command, *_: git[command])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=status))
    check.passed_on("2.15.0").touch()  # as if it had been interrupted
    assert check._changed_since_passed(SOURCES, "2.15.0") == {"everything"}
    assert plan.run() == status
    assert check.passed_on("2.15.0").read_text() == ("c0ffee\n" if is_noted else "")


def test_the_copy_of_the_tree_for_another_torch(tmp_path: Path) -> None:
    """It has the tree's files and its own build; files that are the same keep their times."""
    tree, copy = tmp_path / "tree", tmp_path / "torches" / "tree-2.15.0"
    command = ["make", "-f", ROOT / "Makefile", "test-torch", "TORCH=2.15.0", "ARGS=-x"]
    command += [f"TORCH_VENVS={copy.parent}"]
    old = {"Makefile": "test:", "same": "1", "other": "1", "gone": "1", "a b/c d": "1", "e": "1"}
    new = {"Makefile": "test:", "same": "1", "other": "2", "a b": "1", "e/new": "1"}

    def write(files: dict[str, str]) -> None:
        for path in tree.glob("[!.]*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name, text in files.items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(text)

    write(old)
    finished("git", "init", folder=tree)
    finished("git", "add", ".", folder=tree)
    finished(*command, folder=tree)
    for name in ("build/object", "own.so"):
        (copy / name).write_text("1")
    before = {name: (copy / name).stat().st_mtime_ns for name in ("build/object", "own.so", "same")}
    write(new)
    finished(*command, folder=tree)
    shutil.rmtree(tree / ".git")
    finished(*command, folder=tree, code=2)
    found = {str(path.relative_to(copy)): path for path in copy.rglob("*") if path.is_file()}
    assert found.keys() - {"build/all", "build/index"} == {*new, "build/object", "own.so"}
    assert all((copy / name).read_text() == text for name, text in new.items())
    assert before == {name: found[name].stat().st_mtime_ns for name in before}


def test_checks_run_in_a_clone_that_keeps_its_builds(tmp_path: Path) -> None:
    """A run of everything and one after a run that was killed build anew."""
    tree, cache = tmp_path / "tree", tmp_path / "torch_commhook"
    files = {
        ".ci/run": (ROOT / ".ci/run").read_text(),
        ".gitignore": "/build",
        "Makefile": "check:\n\techo $(BASE) $(ALL) >> build; cp build ../said; test -e source",
        "source": "",
        "tests/long_runs/called_for.py": "",
    }
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    finished("git", "init", folder=tree)
    of_make = ("ALL", "BASE", "HAS_LOCK", "MAKEFLAGS")  # which may run this test

    def run(code: int = 0, **settings: str) -> str:
        """What make check was asked for, since the build that it found."""
        finished("git", "add", ".", folder=tree)
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        finished("git", *who, "commit", "--allow-empty", "-m", "a change", folder=tree)
        environment = {k: v for k, v in os.environ.items() if k not in of_make} | settings
        environment |= {"XDG_CACHE_HOME": str(tmp_path)}
        finished("bash", tree / ".ci/run", code=code, environment=environment)
        return (cache / "said").read_text()

    def passed() -> str:
        return (cache / "passed").read_text()

    assert run() == "none\n"
    first = passed()
    assert run(BASE="c0ffee") == "none\nc0ffee\n"
    second = passed()
    assert first != second
    (tree / "source").unlink()
    assert run(code=2) == f"none\nc0ffee\n{second}"
    assert passed() == second
    (tree / "source").touch()
    (cache / "running").touch()  # as a run that was killed leaves it
    assert run() == second
    assert run(ALL="1", BASE="") == "none 1\n"
    assert not (cache / "running").exists()


def test_it_says_what_runs_and_what_does_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "git", lambda *command: "1" * 40 if "rev-parse" in command else "")
    assert check.main(["--base", "HEAD", "--torch", "", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "runs:\n  make lint: always\n" in text
    assert "leaves out:\n" in text and "make test-torch: no other torch was given" in text


# ---- durations -----------------------------------------------------------------------------------


def _report(name: str, when: str, seconds: float, **keywords: int) -> SimpleNamespace:
    return SimpleNamespace(nodeid=f"tests/{name}", when=when, duration=seconds, keywords=keywords)


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cases]:
    def make(**stored: Durations) -> Cases:
        monkeypatch.setattr("cases.load", lambda: stored)
        options = {"--store-durations": True, "--chosen": None}
        return Cases(SimpleNamespace(getoption=options.get, option=SimpleNamespace()))  # type: ignore[arg-type]

    return make


def test_durations_of_a_run(cases: Callable[..., Cases], tmp_path: Path) -> None:
    made = cases(b=Durations(2.0), a=Durations(1.0, {"x[1]": 1.5, "y": 1.5, "gone": 9.0}))
    for name, seconds in (("x[1]", 0.8), ("x[2]", 0.8), ("y", 0.5), ("z[a]", 1.23456), ("z[b]", 7)):
        made.pytest_runtest_logreport(_report(f"a::{name}", "setup", 0.1))  # type: ignore[arg-type]
        made.pytest_runtest_logreport(_report(f"a::{name}", "call", seconds))  # type: ignore[arg-type]
    made.pytest_runtest_logreport(_report("a::marked", "call", 0.2, long=1))  # type: ignore[arg-type]
    want = {"x[1]": 0.8, "z[a]": 1.2, "z[b]": 7.0, "marked": 0.2}
    assert made.updated() == {"a": Durations(1.8, want), "b": Durations(2.0)}
    durations.save(made.updated(), tmp_path / "stored.json")
    assert durations.load(tmp_path / "stored.json") == made.updated()


def test_stored_long_cases_are_there(request: pytest.FixtureRequest) -> None:
    """A renamed one would be short without a word."""
    assert durations.load().keys() <= SOURCES.tests.keys()
    if torch.__version__ < "2.13":
        pytest.skip("older releases lack features of fully_shard, and so cases of these tests")
    (plugin,) = (
        each for each in request.config.pluginmanager.get_plugins() if isinstance(each, Cases)
    )
    assert plugin.unknown == []

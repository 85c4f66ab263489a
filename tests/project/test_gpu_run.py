"""benchmarks/gpu without a GPU: parts store what they have, and go on after crashes and hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gpu_runs import items, part_of, running, stored
from repository import ROOT
from train_processes import wait_for

from benchmarks.gpu import carried, counters, parts
from benchmarks.gpu.__main__ import main, parse, resumed
from benchmarks.gpu.commands import Ended
from benchmarks.gpu.plant import VARIABLE
from benchmarks.gpu.run import Part, Run, do_parts

# ---- parts that fail -----------------------------------------------------------------------------


def test_smoke_stores_each_case_beside_those_that_crash(
    gpu_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_run.document["library"]["cases"] = ["flatten", "unflatten", "fp8(): decode"]
    monkeypatch.setenv(VARIABLE, "smoke/flatten=abort;smoke/unflatten=wrong")
    do_parts(gpu_run, [part_of("smoke")])
    found = {item["name"]: item for item in stored(gpu_run)["parts"]["smoke"]["items"]}
    assert {name: item["passed"] for name, item in found.items()} == {
        **{"flatten": False, "unflatten": False, "fp8(): decode": True},
    }
    assert "SIGABRT" in found["flatten"]["text"]
    assert "differ from the CPU" in found["unflatten"]["text"]
    assert stored(gpu_run)["parts"]["smoke"]["passed"] is False


def test_times_go_on_without_a_work_that_crashes(
    gpu_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "times/8/blockwise(): decode=error")
    do_parts(gpu_run, [part_of("times")])
    culprit = "targeted: 7x1000, 8 shards: blockwise(): decode"
    assert items(gpu_run, "times") == {culprit: False, "targeted: 7x1000, 8 shards": True}
    works = {row["work"] for row in stored(gpu_run)["times"]}
    assert {"copy", "blockwise(): encode", "blockwise(): reduce"} <= works
    assert "blockwise(): decode" not in works and "flatten" not in works


def test_a_part_that_hangs_leaves_time_for_the_next_one(
    gpu_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_run.patience = 1.0
    monkeypatch.setattr(counters, "COUNTED", (("flatten", 1), ("unflatten", 1)))
    monkeypatch.setenv(VARIABLE, "counters/flatten=hang")

    def raises(run: Run) -> None:
        raise OSError("the disk is full")

    def goes_on(run: Run) -> None:
        run.item("last", True, 0.0, "done")

    others = [Part("raises", raises, 5, 0), Part("goes on", goes_on, 5, 0)]
    do_parts(gpu_run, [part_of("counters", most=4.0), *others])
    assert items(gpu_run, "counters") == {"flatten, 1 shards": False, "unflatten, 1 shards": None}
    assert items(gpu_run, "raises") == {"the run itself": False}
    assert items(gpu_run, "goes on") == {"last": True}
    passed = {name: part["passed"] for name, part in stored(gpu_run)["parts"].items()}
    assert passed == {"counters": False, "raises": False, "goes on": True}

    # A later run tries again what there was no time for.
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(carried, "sources_digest", lambda: gpu_run.document["sources"])
    again = ["--dry-run", "--resume", str(gpu_run.store.state)]
    gpu_run.store.document = resumed(parse(again))
    do_parts(gpu_run, [part_of("counters"), *others])
    assert items(gpu_run, "counters") == {"flatten, 1 shards": True, "unflatten, 1 shards": True}
    assert items(gpu_run, "raises") == {"the run itself": False}


def test_a_library_that_does_not_load(gpu_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "library=abort")
    do_parts(gpu_run, [part_of("build"), part_of("smoke"), part_of("tests")])
    assert items(gpu_run, "build")["library"] is False
    assert stored(gpu_run)["parts"]["tests"]["text"] == "the library does not load"

    # A later run builds it again, and does what needs it.
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(carried, "sources_digest", lambda: gpu_run.document["sources"])
    gpu_run.store.document = resumed(parse(["--dry-run", "--resume", str(gpu_run.store.state)]))
    do_parts(gpu_run, [part_of("build")])
    gpu_run.document["library"]["cases"] = ["flatten"]
    do_parts(gpu_run, [part_of("smoke")])
    assert list(stored(gpu_run)["parts"]) == ["build", "smoke", "tests"]
    assert items(gpu_run, "build")["library"] is True
    assert items(gpu_run, "smoke")["flatten"] is True


def test_parts_leave_time_for_those_after_them(gpu_run: Run) -> None:
    ends: list[float] = []

    def note(run: Run) -> None:
        ends.append(run.left())

    gpu_run.end, gpu_run.patience = time.monotonic() + 100, 1.0
    do_parts(gpu_run, [Part("a", note, 500, 0), Part("b", note, 500, 30), Part("c", note, 20, 40)])
    assert ends == pytest.approx([30, 60, 20], abs=2)
    gpu_run.end = time.monotonic() + 1
    do_parts(gpu_run, [Part("d", note, 500, 0)])
    assert len(ends) == 3 and stored(gpu_run)["parts"]["d"]["text"] == "no time was left"
    assert stored(gpu_run)["parts"]["d"]["finished"] is False  # so that a later run does it


# ---- tests in processes of their own -------------------------------------------------------------

CRASHES = """
import os, time, pytest
pytestmark = pytest.mark.cuda
def test_passes(): pass
def test_crashes(): os.abort()
def test_hangs(): time.sleep(60)
def test_fails(): assert 1 == 2
def test_skips(): pytest.skip("no reason")
def test_is_last(): pass
"""
#: A torch whose context is lost, as after an illegal access.
LOST = """
import sys, types, pytest
pytestmark = pytest.mark.cuda
def is_lost(): raise RuntimeError("an illegal memory access was encountered")
def test_loses_the_context():
    cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=is_lost)
    sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
    assert False
def test_later(): assert "torch" not in sys.modules
"""
WRITTEN = {
    "test_a.py": CRASHES,
    "test_b.py": LOST,
    "test_c.py": "import absent  # mark.cuda\n",
    "test_d.py": "import pytest\n@pytest.mark.cuda\ndef test_d(): pass\n",
    "test_streams.py": "import pytest\n@pytest.mark.cuda\ndef test_streams(): pass\n",
    "test_other.py": "def test_without_a_mark(): assert False\n",
}


def plant_tests(folder: Path, names: list[str] | None = None) -> None:
    folder.mkdir()
    for name in names or WRITTEN:
        (folder / name).write_text(WRITTEN[name])


def test_each_file_of_tests_survives_the_others(
    gpu_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu_run.tests is not None
    plant_tests(gpu_run.tests)
    again: dict[str, list[bool]] = {}
    item = gpu_run.item

    def note(name: str, *arguments: Any, **more: Any) -> None:
        again.setdefault(name, []).append(more.get("again", False))
        item(name, *arguments, **more)

    monkeypatch.setattr(gpu_run, "item", note)
    do_parts(gpu_run, [part_of("tests"), part_of("streams")])
    # A run that is killed between two processes of a file leaves tests of it to a later run.
    assert again["test_a.py"] == [True, True, False] and again["test_d.py"] == [False]
    found = {item["name"]: item for item in stored(gpu_run)["parts"]["tests"]["items"]}
    outcomes = {
        name: {test.partition("::")[2]: word for test, word in item["tests"].items()}
        for name, item in found.items()
    }
    assert outcomes["test_a.py"] == {
        **{"test_passes": "passed", "test_crashes": "crashed", "test_hangs": "crashed"},
        **{"test_fails": "failed", "test_skips": "skipped", "test_is_last": "passed"},
    }
    assert outcomes["test_b.py"] == {"test_loses_the_context": "failed", "test_later": "passed"}
    texts = {
        test.partition("::")[2]: text
        for item in found.values()
        for test, text in item["texts"].items()
    }
    assert "Fatal Python error: Aborted" in texts["test_crashes"]
    assert "in test_hangs" in texts["test_hangs"] and "Timeout" in texts["test_hangs"]
    assert "assert 1 == 2" in texts["test_fails"]
    assert "No module named 'absent'" in texts[""]
    passed = {name: item["passed"] for name, item in found.items()}
    assert passed == {
        **{"test_a.py": False, "test_b.py": False, "test_c.py": False, "test_d.py": True},
    }
    assert items(gpu_run, "streams") == {"test_streams.py": True}


@pytest.mark.parametrize(
    ("outcomes", "status", "finished", "passed"),
    [
        ({"a": "passed", "b": "skipped"}, 0, True, True),
        ({"a": "skipped"}, 0, True, None),
        ({}, 5, True, None),
        ({"a": "passed", "b": "crashed"}, 1, False, False),
        ({"a": "passed"}, None, False, False),  # its time was over between two tests
        ({"a": "passed"}, 3, True, False),  # an error of pytest itself
        ({}, 4, False, False),
    ],
)
def test_whether_a_file_of_tests_passed(
    outcomes: dict[str, str], status: int | None, finished: bool, passed: bool | None
) -> None:
    assert parts.verdict(outcomes, Ended(status, 2.0, ""), finished)[0] is passed


def test_tests_of_a_gpu_are_found(gpu_run: Run, request: pytest.FixtureRequest) -> None:
    gpu_run.tests = None
    found = {parts.shown(path) for path in parts.test_files(gpu_run)}
    assert {"tests/cuda/test_cuda_bucket.py", "tests/cuda/test_cuda_collectives.py"} <= found
    assert not {"tests/hooks/test_bucket.py", "tests/cuda/test_cuda_partition.py"} & found
    # All that were collected, where all of the tests gpu_run.
    marked = [item for item in request.session.items if item.get_closest_marker("cuda")]
    assert {str(item.path.relative_to(ROOT)) for item in marked} <= found


# ---- the whole run -------------------------------------------------------------------------------


def test_a_killed_run_leaves_its_results_and_a_later_one_goes_on(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    plant_tests(planted, ["test_d.py", "test_streams.py"])
    slow = "import time, pytest\n@pytest.mark.cuda\ndef test_z(): time.sleep(51.77)\n"
    (planted / "test_z.py").write_text(slow)
    state, out = tmp_path / "document.json", tmp_path / "out"
    own = ["--dry-run", "--parts", "tests", "streams", "--tests", str(planted)]
    own += ["--build", str(tmp_path), "--results", str(tmp_path / "results"), "--commit", "abc"]
    own += ["--patience", "10"]
    command = [sys.executable, "-m", "benchmarks.gpu", *own]
    environment = {**os.environ, "OUT": str(out)}
    with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
        try:
            wait_for(
                lambda: any("test_d.py" in path.read_text() for path in out.glob("*.json")),
                "test_d.py is not stored",
            )
        finally:
            process.kill()
    [path] = out.glob("*.json")
    assert json.loads(path.read_text())["commit"] == "abc"
    assert path.with_suffix(".md").exists()
    # Nothing outlives it. The test would end by itself, but later.
    wait_for(lambda: not running(f"pytest.*{planted}"), "its tests go on", 20)

    (planted / "test_z.py").unlink()
    (planted / "test_d.py").write_text("does not parse")  # and is not looked at again
    resumed = [*command, "--resume", str(state)]
    assert subprocess.run(resumed, cwd=ROOT, env=environment).returncode == 0
    done = json.loads(state.read_text())["parts"]
    assert done["tests"]["finished"] and done["streams"]["passed"]
    [item] = done["tests"]["items"]
    assert item["name"] == "test_d.py" and item["passed"] is True


def test_no_gpu_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["--build", str(tmp_path), "--results", str(tmp_path)]) == 2
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert "no CUDA device" in capsys.readouterr().out

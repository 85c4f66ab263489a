"""benchmarks/gpu without a GPU: parts store what they have, and go on after crashes and hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu_runs import document, items, part_of, running, stored
from repository import ROOT
from train_processes import wait_for

from benchmarks.gpu import carried, counters, parts, times
from benchmarks.gpu.__main__ import main, parse, resumed
from benchmarks.gpu.cases import Work
from benchmarks.gpu.commands import Ended, Task, read_lines, run_task, run_tasks, write_line
from benchmarks.gpu.document import page, targets
from benchmarks.gpu.plant import VARIABLE
from benchmarks.gpu.run import Part, Run, do_parts


def resume(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on from what a run has stored, as a later one does, without a planted fault."""
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(carried, "sources_digest", lambda: run.document["sources"])
    run.store.document = resumed(parse(["--dry-run", "--resume", str(run.store.state)]))


# ---- commands ------------------------------------------------------------------------------------


def test_a_command_that_hangs_ends_with_its_group(tmp_path: Path) -> None:
    # It also ignores SIGTERM, and its child would live on.
    child = f"sleep 7100.{os.getpid()}"  # a command that no other run of this test has
    text = f"trap '' TERM; echo begun; {child} & {child}"
    how = run_task(Task("slow", ["sh", "-c", text], 1), logs=tmp_path, end=time.monotonic() + 6000)
    assert how.status is None and how.text.endswith("begun") and not how.is_cut_off
    # And not by itself.
    wait_for(lambda: not running(f"^{child}$"), "its child goes on", 20)


def test_how_commands_end(tmp_path: Path) -> None:
    endings: dict[str, Ended] = {}

    def ended(task: Task, how: Ended) -> list[Task]:
        endings[task.name] = how
        return [Task("after", ["echo", "next"], 20)] if task.name == "fails" else []

    commands = {"good": "echo fine", "fails": "echo bad; exit 3", "crashes": "kill -ABRT $$"}
    commands["absent"] = "exec /does/not/exist"
    tasks = [Task(name, ["sh", "-c", text], 20) for name, text in commands.items()]
    end = time.monotonic() + 60
    run_tasks(tasks, logs=tmp_path, end=end, ended=ended, at_once=2)
    statuses = {"good": 0, "fails": 3, "crashes": -signal.SIGABRT, "absent": 127, "after": 0}
    assert {name: how.status for name, how in endings.items()} == statuses
    assert endings["crashes"].text.startswith("ended by SIGABRT")
    late = run_task(Task("late", ["echo"], 20), logs=tmp_path, end=time.monotonic())
    assert late.status is None and late.text == "no time was left" and late.is_cut_off
    short = run_task(Task("short", ["sleep", "30"], 20), logs=tmp_path, end=time.monotonic() + 1.5)
    assert short.status is None and "the part's time was over" in short.text


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "record"
    write_line(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"b": ')
    assert read_lines(path) == [{"a": 1}]
    assert read_lines(tmp_path / "none") == []


# ---- parts that fail -----------------------------------------------------------------------------


def test_smoke_stores_each_case_beside_those_that_crash(
    gpu_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_run.document["library"]["cases"] = ["flatten", "unflatten", "fp8(): decode"]
    monkeypatch.setenv(VARIABLE, "smoke/flatten=abort;smoke/unflatten=wrong")
    do_parts(gpu_run, [part_of("smoke")])
    found = {item["name"]: item for item in stored(gpu_run)["parts"]["smoke"]["items"]}
    passed = {"flatten": False, "unflatten": False, "fp8(): decode": True}
    assert items(gpu_run, "smoke") == passed
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
    resume(gpu_run, monkeypatch)
    do_parts(gpu_run, [part_of("counters"), *others])
    assert items(gpu_run, "counters") == {"flatten, 1 shards": True, "unflatten, 1 shards": True}
    assert items(gpu_run, "raises") == {"the run itself": False}


def test_a_library_that_does_not_load(gpu_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "library=abort")
    do_parts(gpu_run, [part_of("build"), part_of("smoke"), part_of("tests")])
    assert items(gpu_run, "build")["library"] is False
    assert stored(gpu_run)["parts"]["tests"]["text"] == "the library does not load"

    # A later run builds it again, and does what needs it.
    resume(gpu_run, monkeypatch)
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

    def by_test(name: str, kind: str) -> dict[str, str]:
        return {test.partition("::")[2]: each for test, each in found[name][kind].items()}

    assert by_test("test_a.py", "tests") == {
        **{"test_passes": "passed", "test_crashes": "crashed", "test_hangs": "crashed"},
        **{"test_fails": "failed", "test_skips": "skipped", "test_is_last": "passed"},
    }
    lost = {"test_loses_the_context": "failed", "test_later": "passed"}
    assert by_test("test_b.py", "tests") == lost
    texts = by_test("test_a.py", "texts")
    assert "Fatal Python error: Aborted" in texts["test_crashes"]
    assert "in test_hangs" in texts["test_hangs"] and "Timeout" in texts["test_hangs"]
    assert "assert 1 == 2" in texts["test_fails"]
    assert "No module named 'absent'" in by_test("test_c.py", "texts")[""]
    passed = {"test_a.py": False, "test_b.py": False, "test_c.py": False, "test_d.py": True}
    assert items(gpu_run, "tests") == passed
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


# ---- libraries that are carried ------------------------------------------------------------------


def test_carried_libraries_must_fit(tmp_path: Path) -> None:
    assert carried.obstacle(tmp_path) == "no libraries were carried"
    library = tmp_path / "_ops.abi3.so"
    library.write_bytes(b"code")
    about = {**carried.stamp(), "libraries": {library.name: carried.digest_of(library)}}
    (tmp_path / carried.STAMP).write_text(json.dumps(about))
    assert carried.obstacle(tmp_path) is None
    for name in carried.stamp():
        (tmp_path / carried.STAMP).write_text(json.dumps({**about, name: "another"}))
        assert f"{name} another" in (carried.obstacle(tmp_path) or "")
    (tmp_path / carried.STAMP).write_text(json.dumps(about))
    library.write_bytes(b"other code")
    assert "is not the one" in (carried.obstacle(tmp_path) or "")


@pytest.mark.parametrize(
    ("obstacle", "loads"), [(None, True), (None, False), ("no libraries were carried", False)]
)
def test_a_card_uses_what_was_carried_or_builds(
    gpu_run: Run, monkeypatch: pytest.MonkeyPatch, obstacle: str | None, loads: bool
) -> None:
    taken = []
    gpu_run.device = "cuda"
    monkeypatch.setattr(carried, "obstacle", lambda: obstacle)
    monkeypatch.setattr(carried, "take", lambda: taken.append(True))

    def library_loads(run: Run) -> bool:
        run.item("library", loads, 0.0, "")
        return loads

    broken = Task("build", ["sh", "-c", "echo no nvcc; exit 1"], 20)
    monkeypatch.setattr(parts, "library_loads", library_loads)
    monkeypatch.setattr(parts, "build_task", lambda run: broken)
    gpu_run.document["library"]["cases"] = []
    do_parts(gpu_run, [part_of("build"), part_of("smoke")])
    assert items(gpu_run, "build") == {"build": loads, "library": loads}
    assert bool(taken) == (obstacle is None)
    if not loads:
        found = stored(gpu_run)["parts"]["build"]["items"]
        [text] = [item["text"] for item in found if item["name"] == "build"]
        assert "no nvcc" in text and (obstacle or "do not load") in text
        assert stored(gpu_run)["parts"]["smoke"]["text"] == "the library does not load"


def test_a_stamp_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("setup.py", "build_support.py", "pyproject.toml", "cuda/a.cu", "csrc/ops/b.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(carried, "ROOT", tmp_path)
    before = carried.sources_digest()
    (tmp_path / "cuda/README.md").write_text("no source")
    assert carried.sources_digest() == before
    (tmp_path / "cuda/a.cu").write_text("x")
    assert carried.sources_digest() != before


# ---- tools ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "status", "passed"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0, True),
        ("========= ERROR SUMMARY: 3 errors", 0, False),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, True),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)", 0, False),
        ("========= ERROR SUMMARY: 0 errors", 1, False),
        ("the same as on the CPU", 0, False),  # the tool has said nothing
        ("========= Error: Device not supported", 255, None),
        ("========= ERROR SUMMARY: 0 errors", None, False),
    ],
)
def test_a_sanitizer_must_have_found_nothing(
    log: str, status: int | None, passed: bool | None
) -> None:
    assert parts.sanitized(Ended(status, 2.0, log))[0] is passed


COUNTED = """==PROF== Connected to process 12
"ID","Process ID","Kernel Name","dram__bytes_read.sum","gpu__time_duration.sum"
"","","","byte","ns"
"0","12","void encode_kernel<BlockwiseBlock>(Arguments)","26,214,400","12,345.5"
"1","12","other_kernel","n/a","1000"
==PROF== Disconnected
"""


def test_counters_are_read() -> None:
    first, second = counters.rows_of(COUNTED)
    assert first["dram_read"] == 26214400 and first["nanoseconds"] == 12345.5
    assert "encode_kernel" in first["kernel"] and first["registers"] is None
    assert second["dram_read"] is None
    assert list(counters.rows_of("==ERROR== no permission")) == []
    command = counters.command("ncu", ["a", "b"])
    assert command[command.index("--clock-control") + 1] == "none"  # the card is left alone


@pytest.fixture
def plant_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a shell script in place of a tool."""

    def plant(name: str, text: str) -> None:
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")

    return plant


def test_a_profiler_without_some_of_the_metrics(
    gpu_run: Run, plant_tool: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""case "$*" in
*decode*) kill -SEGV $$ ;;
*issue_active*) echo "==ERROR== Failed to find metric"; exit 1 ;;
*) cat <<'END'
{COUNTED}END
esac"""
    plant_tool("ncu", script)
    monkeypatch.setattr(counters, "COUNTED", (("sign(): decode", 2), ("flatten", 1)))
    do_parts(gpu_run, [part_of("counters")])
    passed = {"sign(): decode, 2 shards": False, "flatten, 1 shards": True}
    assert items(gpu_run, "counters") == passed
    rows = stored(gpu_run)["counters"]
    read = [(row["work"], row["dram_read"]) for row in rows]
    assert read == [("flatten", 26214400.0), ("flatten", None)]
    assert "encode_kernel<BlockwiseBlock>" in page(gpu_run.document)

    # A later run that counts a work again replaces its rows.
    gpu_run.document["parts"]["counters"] |= {"finished": False, "items": []}
    do_parts(gpu_run, [part_of("counters")])
    assert stored(gpu_run)["counters"] == rows


def test_a_machine_that_refuses_counters_is_asked_once(
    gpu_run: Run, plant_tool: Callable[..., None], tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    script = f"""echo call >> {calls}
echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access the counters'
exit 1"""
    plant_tool("ncu", script)
    do_parts(gpu_run, [part_of("counters")])
    assert items(gpu_run, "counters") == {"counters": None}
    assert calls.read_text() == "call\n"


def test_a_sanitizer_that_crashes(gpu_run: Run, plant_tool: Callable[..., None]) -> None:
    script = """case "$*" in
*memcheck*) kill -SEGV $$ ;;
*) echo "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" ;;
esac"""
    plant_tool("compute-sanitizer", script)
    do_parts(gpu_run, [part_of("sanitizers")])
    assert items(gpu_run, "sanitizers") == {
        f"{tool}, {part}": tool == "racecheck" for tool in parts.TOOLS for part in parts.SANITIZED
    }


# ---- times on a card -----------------------------------------------------------------------------


class FakeCuda:
    """A card whose kernels take 3 us each, and that refuses to capture a graph or does not."""

    def __init__(self, captures: bool) -> None:
        self.captures, self.now, self.in_graph = captures, 0.0, 0
        self.CUDAGraph = lambda: SimpleNamespace(replay=self.replay)

    def kernel(self) -> None:
        self.in_graph += 1
        self.now += 3e-3

    def replay(self) -> None:
        self.now += 3e-3 * self.in_graph

    @contextmanager
    def graph(self, graph: object) -> Iterator[None]:
        if not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.in_graph = 0
        yield

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda end: end.at - event.at
        return event

    def synchronize(self) -> None:
        pass

    def _sleep(self, cycles: int) -> None:
        self.now += cycles / 2e6


@pytest.mark.parametrize(("captures", "how"), [(True, "graph"), (False, "backlog")])
def test_a_call_takes_its_share_of_a_graph(
    captures: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(captures)
    monkeypatch.setattr(times, "torch", SimpleNamespace(cuda=cuda))
    timed = times.Timed("work", [Work(cuda.kernel, [], 8) for _ in range(4)])
    times.prepare_on_gpu(timed)
    assert timed.how == how and len(timed.calls) % 4 == 0
    assert len(timed.host_seconds) == times.HOST_SAMPLES
    assert times.sample_on_gpu(timed) == pytest.approx(3e-6)


# ---- the document --------------------------------------------------------------------------------


def time_row(**values: Any) -> dict[str, Any]:
    return {
        **{"group": "161x40704", "shards": 8, "works": "targeted"},
        **{"work": "flatten", "seconds": 1e-5},
        **{"first_quartile": 0.9e-5, "third_quartile": 1.1e-5, "samples": 30, "how": "graph"},
        **{"host_seconds": 16e-6, "nbytes": 10**7, "of_copy": 0.85, "least": 0.9},
        **{"most_host_seconds": 15e-6, **values},
    }


def test_targets_are_met_or_missed() -> None:
    rows = [
        time_row(),
        time_row(work="copy", of_copy=1.0, least=None, most_host_seconds=None),
        time_row(work="blockwise(): encode", of_copy=0.95, most_host_seconds=None),
    ]
    found = targets(document(dry_run=False, times=rows))
    assert [(each["what"].split(",")[0], each["wanted"], each["met"]) for each in found] == [
        ("flatten", "at least 0.9", False),
        ("flatten", "at most 15", False),
        ("blockwise(): encode", "at least 0.9", True),
    ]
    assert found[1]["reached"] == "16.0 us of the host"
    assert targets(document(times=rows)) == []  # of a dry run


def test_the_page_shows_what_was_found() -> None:
    own = {"passed": False, "finished": True, "seconds": 3.0, "text": "1 failed"}
    failed = {"name": "flatten", "passed": False, "seconds": 1.0, "text": "ended by SIGABRT"}
    count = {"kernel": "void encode_kernel<A>(B)", "nanoseconds": 12000.0, "dram_read": 8e6}
    count |= {"dram_written": 4e6, "nbytes": 10**7, "numel": 10**6, "warp_instructions": 781250.0}
    count |= {"issue_active": 0.5, "work": "flatten", "shards": 1}
    text = page(
        document(
            dry_run=False,
            clocks=[{"after": "smoke", "clocks.sm": "1980 MHz"}],
            machine={"card": "A Card"},
            parts={"smoke": {**own, "items": [failed]}},
            times=[time_row(), time_row(works="rest", work="copy", seconds=2e-5)],
            counters=[count],
        )
    )
    assert "- smoke: flatten: ended by SIGABRT" in text
    assert "| flatten, 161x40704, 8 shards | 0.850 x the copy | at least 0.9 | **no** |" in text
    assert "| 10.00 | 9.00 to 11.00 | 30 | graph | 16.0 | 1000 | 0.850 |" in text
    found = [text.index(f"\n{each}") for each in ("| flatten | 10.00 |", "| copy | 20.00 |")]
    assert found[0] < text.index("8 shards, without targets\n") < found[1]
    assert "| 12.0 | 1.20 | 0.50 | 25.0 |" in text
    assert "| smoke | 1980 MHz |" in text


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

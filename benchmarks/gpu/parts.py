"""The parts of a run, in order: the most informative first."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import carried, counters
from .commands import ROOT, Ended, Task, write_line
from .run import Part, Run

# ---- 1: the build --------------------------------------------------------------------------------


def build(run: Run) -> None:
    """Uses the libraries that were carried here, or builds in place; then loads them."""
    obstacle = carried.obstacle()
    if run.dry:
        run.item("build", None, 0.0, "a dry run uses the build in place")
    elif obstacle is None:
        carried.take()
        run.item("build", True, 0.0, "took the carried libraries")
        if library_loads(run):
            return
        obstacle = "the carried libraries do not load"
    if not run.dry:
        how = run.one(build_task(run))
        run.command_item("build", how)
        run.part["items"][-1]["text"] += f" ({obstacle})"
    run.library_loads = library_loads(run)


def build_task(run: Run) -> Task:
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    variables = {"COMMHOOK_CUDA": "1", "MAX_JOBS": str(run.cores)}
    capability = run.document["machine"].get("capability")
    if capability:
        variables["TORCH_CUDA_ARCH_LIST"] = capability
    return Task("build", command, 300 * run.patience, variables)


def library_loads(run: Run) -> bool:
    how = run.one(run.module("library", "facts", "--library", seconds=60))
    for line in run.told("library"):
        run.document["library"] |= line
    run.command_item("library", how)
    return how.status == 0


# ---- 2: smoke ------------------------------------------------------------------------------------


def smoke(run: Run) -> None:
    """Each operator on small tensors, in its own process."""
    cases = [case for case in run.document["library"].get("cases", ()) if not run.has(case)]
    names = {f"smoke-{file_name(case)}": case for case in cases}
    tasks = [run.module(name, "smoke", case, seconds=30) for name, case in names.items()]

    def ended(task: Task, how: Ended) -> Iterable[Task]:
        run.command_item(names[task.name], how)
        return ()

    run.each(tasks, ended, at_once=min(12, run.cores))


def file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")


# ---- 3: times ------------------------------------------------------------------------------------

#: Buckets and shards, the most demanding first.
TIMED = (
    ("161x40704", 1),
    ("161x40704", 8),
    ("161x40704", 2),
    ("resnet50", 1),
    ("resnet50", 8),
    ("resnet50", 2),
    ("gpt2", 8),
)
TIMED_REST = (("161x40704", 8), ("resnet50", 1))
TIMED_DRY = (("7x1000", 1), ("7x1000", 8), ("7x1000", 2))
#: So many works may crash a process before the rest of their group is given up.
MOST_RESTARTS = 3


def times(run: Run) -> None:
    """The card's own copy, and the works with targets for comparison."""
    time_groups(run, TIMED_DRY if run.dry else TIMED, "targeted")


def time_groups(run: Run, groups: Iterable[tuple[str, int]], works: str) -> None:
    """Each group in a process. If a work ends the process, another continues without that work."""
    groups = [group for group in groups if not run.has(group_name(works, *group))]
    names = {file_name(group_name(works, *group)): group for group in groups}
    without: dict[str, list[str]] = {name: [] for name in names}

    def task_of(name: str) -> Task:
        shapes, shards = names[name]
        left_out = [f"--without={work}" for work in without[name]]
        own = ["--shapes", shapes, "--shards", str(shards), "--works", works, *left_out]
        seconds = "0.2" if run.dry else "5"
        return run.module(name, "times", *own, "--seconds", seconds, seconds=30)

    def absorb() -> None:
        for name in names:
            for line in run.told(name):
                if "row" in line:
                    keep_row(run.document["times"], line["row"])
        run.store.save()

    def ended(task: Task, how: Ended) -> Iterable[Task]:
        absorb()
        name = group_name(works, *names[task.name])
        begun = [line["begun"] for line in run.told(task.name) if "begun" in line]
        culprit = begun[-1] if begun and how.status != 0 else None
        if culprit is None or culprit == "copy" or how.is_cut_off:
            run.command_item(name, how)
            return ()
        without[task.name].append(culprit)
        run.item(f"{name}: {culprit}", False, how.seconds, how.text)
        if len(without[task.name]) > MOST_RESTARTS:
            run.item(name, False, how.seconds, "given up")
            return ()
        return (task_of(task.name),)

    run.each(map(task_of, names), ended, tick=absorb)


def group_name(works: str, shapes: str, shards: int) -> str:
    return f"{works}: {shapes}, {shards} shards"


def keep_row(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Adds a row, or replaces an earlier one of the same work and group of works."""
    key = ("group", "shards", "works", "work")
    place = next((i for i, each in enumerate(rows) if all(each[k] == row[k] for k in key)), None)
    if place is None:
        rows.append(row)
    else:
        rows[place] = row


# ---- 4 and 6: tests ------------------------------------------------------------------------------

#: Names of files with tests on streams, graphs and groups of ranks, which form their own part.
STREAMS = re.compile(r"stream|captur|graph|collective|nccl|symm|step|group")
#: A file with tests for a GPU contains this.
FOR_A_GPU = re.compile(r"mark\.cuda\b|\bkernel_device\b|\bcuda_kernels\b|\bON_GPU\b")
#: The most processes for a file with tests that crash.
MOST_PROCESSES = 6
FILE_SECONDS = 120.0


def test_files(run: Run) -> list[Path]:
    """The files with tests for a GPU. The host's tests would take time to load."""
    return [
        path
        for path in sorted((run.tests or ROOT / "tests").rglob("test_*.py"))
        if FOR_A_GPU.search(path.read_text(errors="replace"))
    ]


def tests(run: Run) -> None:
    """Files of tests, each in its own process."""
    run_tests(run, [path for path in test_files(run) if not STREAMS.search(path.stem)])


def streams(run: Run) -> None:
    """The tests on streams, graph capture and collectives."""
    run_tests(run, [path for path in test_files(run) if STREAMS.search(path.stem)])


def run_tests(run: Run, paths: Iterable[Path]) -> None:
    files = {f"tests-{path.stem}": path for path in paths if not run.has(shown(path))}
    processes = dict.fromkeys(files, 0)

    def task_of(name: str) -> Task:
        record, path = run.record(name), files[name]
        if processes[name] == 0:
            record.unlink(missing_ok=True)
        processes[name] += 1
        own = ["-p", "benchmarks.gpu.recorder", "-p", "no:cacheprovider", "-m", "cuda", "-v"]
        command = [sys.executable, "-m", "pytest", *own, "-rfEs", "--tb=short", path]
        if run.tests is not None:
            command += ["--rootdir", path.parent, "-c", os.devnull]
        variables = {
            "COMMHOOK_GPU_RECORD": str(record),
            "COMMHOOK_GPU_SKIP": str(record),
            "COMMHOOK_GPU_TEST_SECONDS": str(run.test_seconds),
        }
        seconds = FILE_SECONDS * run.patience
        return Task(f"{name}-{processes[name]}", command, seconds, variables)

    def ended(task: Task, how: Ended) -> Iterable[Task]:
        name = task.name.rpartition("-")[0]
        lines = run.told(name)
        finished = bool(lines) and "finished" in lines[-1]
        for test, word in outcomes_of(lines)[0].items():
            if word == "begun":  # it has ended its process
                crash = {"test": test, "outcome": "crashed", "text": crash_text(how.log)}
                write_line(run.record(name), crash)
        outcomes, texts = outcomes_of(run.told(name))
        # Another process runs the tests that a crash has left.
        is_left = not finished and bool(outcomes) and how.status is not None
        is_left = is_left and processes[name] < MOST_PROCESSES
        passed, text = verdict(outcomes, how, finished)
        bad = {test: texts[test] for test, word in outcomes.items() if word in BAD}
        run.item(
            shown(files[name]),
            passed,
            how.seconds,
            text,
            again=how.is_cut_off or is_left,
            tests=outcomes,
            texts=bad,
            processes=processes[name],
        )
        return (task_of(name),) if is_left and run.left() > 5 else ()

    run.each(map(task_of, files), ended, at_once=max(2, min(8, run.cores // 2)))


BAD = ("failed", "error", "crashed")


def crash_text(log: str) -> str:
    """The stacks that Python's fault handler has written to a log; its end if there are none."""
    found = re.search(r"Fatal Python error|Timeout \(", log)
    return log[found.start() :][:3000] if found else log[-3000:]


def outcomes_of(lines: list[dict[str, Any]]) -> tuple[dict[str, str], dict[str, str]]:
    """The last outcome of each test, with its text."""
    outcomes, texts = {}, {}
    for line in lines:
        if "test" in line:
            outcomes[line["test"]] = line["outcome"]
            texts[line["test"]] = line.get("text", "")
    return outcomes, texts


def verdict(outcomes: dict[str, str], how: Ended, finished: bool) -> tuple[bool | None, str]:
    """Whether a file passed, with a line on it. A file with only skipped tests did not run."""
    words = list(outcomes.values())
    text = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    if any(word in BAD for word in words):
        return False, text
    if not finished:
        return (None if how.seconds == 0 else False), f"{text} {how.text}".strip()
    if how.status not in (0, 5):  # 5: pytest found no tests
        return False, f"{text} {how.text}".strip()
    return (True if "passed" in words else None), text or "no tests"


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


# ---- 5: counters ---------------------------------------------------------------------------------


def count(run: Run) -> None:
    """Hardware counters of a few kernels."""
    ncu = counters.find_tool("ncu")
    if ncu is None and not run.dry:
        run.item("counters", None, 0.0, "ncu is not installed")
        return
    for case, shards in counters.COUNTED:
        name = f"{case}, {shards} shards"
        if run.has(name):
            continue
        how = count_one(run, ncu, case, shards, list(counters.METRICS))
        rows = list(counters.rows_of(how.log))
        if counters.REFUSED.search(how.log):
            run.item("counters", None, how.seconds, "ncu may not read counters here")
            return
        if not rows and how.status is not None and ncu is not None and run.left() > 5:
            how = count_one(run, ncu, case, shards, list(counters.FEWEST))
            rows = list(counters.rows_of(how.log))
        told = run.told(f"counters-{file_name(name)}")
        own = {"work": case, "shards": shards, **(told[-1] if told else {})}
        others = [
            row
            for row in run.document["counters"]
            if (row["work"], row["shards"]) != (case, shards)  # of a run that was cut off
        ]
        run.document["counters"] = others + [{**own, **row} for row in rows]
        if ncu is not None and how.status == 0 and not rows:
            run.item(name, False, how.seconds, "ncu has counted no kernel")
        else:
            run.command_item(name, how)


def count_one(run: Run, ncu: str | None, case: str, shards: int, metrics: list[str]) -> Ended:
    shapes = "7x1000" if run.dry else counters.SHAPES
    name = f"counters-{file_name(f'{case}, {shards} shards')}"
    own = ["--shards", str(shards), "--shapes", shapes]
    task = run.module(name, "counters", case, *own, seconds=40)
    if ncu is None:
        return run.one(task)
    command = [*counters.command(ncu, metrics), *task.command]
    return run.one(Task(task.name, command, task.seconds))


# ---- 7: sanitizers -------------------------------------------------------------------------------

#: Functions that torch calls at its start may be missing in the driver, which is not an error.
TOOLS = {
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": (),
}


#: The parts of the program, in parallel processes.
SANITIZED = ("codecs", "kernels", "buckets")


def sanitize(run: Run) -> None:
    """Small tensors under each tool."""
    sanitizer = counters.find_tool("compute-sanitizer")
    if sanitizer is None:
        run.item("sanitizers", None, 0.0, "compute-sanitizer is not installed")
        return
    names = [f"{tool}, {part}" for part in SANITIZED for tool in TOOLS]

    def task_of(name: str) -> Task:
        tool, _, part = name.partition(", ")
        program = [sys.executable, "tests/long_runs/cuda_sanitized.py", part]
        # Without the caching allocator, a tensor's bounds are the bounds of its memory.
        return Task(
            file_name(name),
            [sanitizer, "--tool", tool, *TOOLS[tool], *program],
            140 * run.patience,
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )

    tasks = {task_of(name).name: name for name in names if not run.has(name)}

    def ended(task: Task, how: Ended) -> Iterable[Task]:
        run.item(tasks[task.name], *sanitized(how), again=how.is_cut_off)
        return ()

    run.each(map(task_of, tasks.values()), ended, at_once=max(1, min(len(names), run.cores // 2)))


def sanitized(how: Ended) -> tuple[bool | None, float, str]:
    """Passed only if the program ended, and the tool's own summary counts no error."""
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", how.log)
    if re.search(r"Device not supported|not supported on this device", how.log):
        return None, how.seconds, "refuses this device"
    if how.status is None:
        return (None if how.seconds == 0 else False), how.seconds, how.text
    clean = re.search(r": 0 (errors|hazards)", summary[-1]) if summary else None
    text = summary[-1] if summary else how.text
    return how.status == 0 and clean is not None, how.seconds, text


# ---- 8: the rest ---------------------------------------------------------------------------------


def rest(run: Run) -> None:
    """The codecs without targets, then the benchmarks that also run on the CPU."""
    time_groups(run, TIMED_DRY[:1] if run.dry else TIMED_REST, "rest")
    for name in ("bucket", "codec"):
        if run.has(f"bench_{name}"):
            continue
        out = run.folder / f"bench_{name}.json"
        out.unlink(missing_ok=True)
        script = ROOT / "benchmarks" / f"bench_{name}.py"
        own = ["--quick", "--rounds", "1"] if run.dry else ["--device", "cuda", "--seconds", "4"]
        how = run.one(
            Task(f"bench_{name}", [sys.executable, script, *own, "--out", out], run.left() * 0.6)
        )
        if out.exists():  # with the groups that had time
            run.document["benchmarks"][name] = json.loads(out.read_text())
        run.command_item(f"bench_{name}", how)


PARTS = (
    Part("build", build, most=330, kept=10, needs_library=False),
    Part("smoke", smoke, most=75, kept=25),
    Part("times", times, most=100, kept=50),
    Part("tests", tests, most=180, kept=60),
    Part("counters", count, most=90, kept=30),
    Part("streams", streams, most=90, kept=25),
    Part("sanitizers", sanitize, most=150, kept=60),
    Part("rest", rest, most=150, kept=15),
)

"""Commands of benchmarks/gpu: how they end, and what they leave."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from gpu_runs import running
from train_processes import wait_for

from benchmarks.gpu.commands import Ended, Task, read_lines, run_task, run_tasks, write_line


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

    commands = {
        "good": "echo fine",
        "fails": "echo bad; exit 3",
        "crashes": "kill -ABRT $$",
    }
    tasks = [Task(name, ["sh", "-c", text], 20) for name, text in commands.items()]
    tasks.append(Task("absent", ["sh", "-c", "exec /does/not/exist"], 20))
    end = time.monotonic() + 60
    run_tasks(tasks, logs=tmp_path, end=end, ended=ended, at_once=2)
    assert {name: how.status for name, how in endings.items()} == {
        **{"good": 0, "fails": 3, "crashes": -signal.SIGABRT, "absent": 127, "after": 0},
    }
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

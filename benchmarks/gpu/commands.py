"""Runs commands with time limits. A command that hangs or crashes does not affect others."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

#: Seconds for a killed command to disappear. A process that waits for a kernel on the GPU can
#: outlive SIGKILL; the run continues without it.
SECONDS_TO_DIE = 10.0
_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


@dataclass(frozen=True)
class Task:
    """A command to run.

    Attributes:
        name: names its log.
        command: the program and its arguments.
        seconds: its time limit.
        variables: environment variables, in addition to this process's.
    """

    name: str
    command: Sequence[str | Path]
    seconds: float
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        status: its exit status; negative for a signal, None after its time limit.
        seconds: how long it ran; 0 if there was no time to start it.
        log: its output.
        is_cut_off: whether the time for all commands ended before its own.
    """

    status: int | None
    seconds: float
    log: str
    is_cut_off: bool = False

    @property
    def text(self) -> str:
        """How it ended, and the last line that it printed."""
        lines = [line.strip() for line in self.log.splitlines() if line.strip()]
        last = lines[-1][-200:] if lines else "no output"
        if self.status == 0:
            return last
        if self.status is None:
            how = f"ended after {self.seconds:.0f} s" if self.seconds else "no time was left"
            if self.seconds and self.is_cut_off:
                how += ", when the part's time was over"
        elif self.status < 0:
            how = f"ended by {signal.Signals(-self.status).name}"
        else:
            how = f"exit status {self.status}"
        return f"{how}: {last}" if self.seconds else how


def _begin_group() -> None:
    """In the child: makes a process group, which does not outlive this process."""
    os.setpgid(0, 0)
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Running:
    """A command in its own process group, with its output in a log."""

    def __init__(self, task: Task, logs: Path, end: float) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.task = task
        self.path = logs / f"{task.name}.log"
        self.begun = time.monotonic()
        self.end = min(self.begun + task.seconds, end)
        self.is_short = end < self.begun + task.seconds
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            **task.variables,
        }
        with self.path.open("w") as log:
            self.process = subprocess.Popen(
                [str(part) for part in task.command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_begin_group,
                env=environment,
            )

    def ended(self) -> Ended | None:
        """How it ended; None while it runs. Also ends the rest of its group."""
        status = self.process.poll()
        if status is None and time.monotonic() < self.end:
            return None
        self.kill()
        return Ended(
            status,
            time.monotonic() - self.begun,
            self.path.read_text(errors="replace"),
            is_cut_off=status is None and self.is_short,
        )

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        try:
            self.process.wait(SECONDS_TO_DIE)
        except subprocess.TimeoutExpired:
            pass


def run_tasks(
    tasks: Iterable[Task],
    *,
    logs: Path,
    end: float,
    ended: Callable[[Task, Ended], Iterable[Task]],
    at_once: int = 1,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Runs commands, up to ``at_once`` at a time, in their order.

    Args:
        logs: the folder for the logs.
        end: the ``time.monotonic()`` at which all are killed. Tasks that have not begun then do not
            run.
        ended: called with each task that has ended; returns the tasks to run next.
        tick: called a few times a second.
    """
    waiting, running = deque(tasks), list[Running]()
    ticked = 0.0
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                task = waiting.popleft()
                if time.monotonic() < end - 1:
                    running.append(Running(task, logs, end))
                else:
                    waiting.extendleft(ended(task, Ended(None, 0.0, "", is_cut_off=True)))
            for each in list(running):
                how = each.ended()
                if how is not None:
                    running.remove(each)
                    waiting.extendleft(reversed(list(ended(each.task, how))))
            if time.monotonic() - ticked > 0.5:
                tick()
                ticked = time.monotonic()
            time.sleep(0.02)
    finally:
        for each in running:
            each.kill()


def run_task(task: Task, *, logs: Path, end: float) -> Ended:
    """Runs one command."""
    result: list[Ended] = []

    def ended(task: Task, how: Ended) -> Iterable[Task]:
        result.append(how)
        return ()

    run_tasks([task], logs=logs, end=end, ended=ended)
    return result[0]


# ---- results of commands -------------------------------------------------------------------------


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one JSON object per line, without a line that was cut off."""
    lines = []
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


def write_line(path: Path, line: dict[str, Any]) -> None:
    """Appends an object. It is in the file when this returns, even if the process crashes later."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that a reader, or a crash, finds either the old or the new text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)

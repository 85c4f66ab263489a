"""The processes of an elastic training on the hosts of a lab, and their logs."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import elastic_rank
from elastic_figures import Line, Log
from elastic_rank import Plan
from netlab import Lab, LabError

from torch_commhook.cli.text_model import TextData

#: If no step ends for so many seconds, the training hangs.
HANG = 60.0
_POLL = 0.02


class HangError(LabError):
    """No rank has done a step for too long."""


@dataclass
class Process:
    """A rank's process.

    Attributes:
        number: unique among the processes of the training.
        host: its host.
        pid: its process id.
        log: the steps that have been read from its log.
        has_ended: whether the process has ended.
    """

    number: int
    host: int
    pid: int
    log: Log
    has_ended: bool = False
    read: int = 0  # bytes of its log that have been read


class Training:
    """The processes of one training, on the hosts of a lab.

    Args:
        lab: the hosts; the last one has the store.
        plan: the training's.
        data: the training data.
    """

    def __init__(self, lab: Lab, plan: Plan, data: TextData) -> None:
        self.lab = lab
        self.plan = plan
        self.folder = Path(plan.folder)
        self.processes: list[Process] = []
        #: Processes that have ended without a fault: host and error.
        self.unexpected: list[tuple[int, str]] = []
        self._data = data
        self._last_new = time.monotonic()
        self.folder.mkdir()

    def start(self, host: int) -> Process:
        """Start a rank on a host."""
        number = len(self.processes)
        pid = elastic_rank.start(self.plan, self._data, self.lab.namespace(host), host, number)
        process = Process(number, host, pid, Log(host))
        self.processes.append(process)
        return process

    def of_host(self, host: int) -> Process:
        """The last process of a host."""
        return [each for each in self.processes if each.host == host][-1]

    @property
    def logs(self) -> list[Log]:
        """The logs of all processes."""
        return [process.log for process in self.processes]

    def training(self) -> list[Process]:
        """The processes that take part."""
        return [each for each in self.processes if not each.has_ended and each.log.lines]

    def poll(self) -> None:
        """Read new lines of the logs.

        Raises:
            HangError: there was none for too long.
        """
        for process in self.processes:
            if self._read(process):
                self._last_new = time.monotonic()
            if not process.has_ended:
                ended, _ = os.waitpid(process.pid, os.WNOHANG)
                process.has_ended = ended != 0
        if time.monotonic() - self._last_new > HANG:
            self.dump()
            raise HangError(f"bench_elastic: no step for {HANG:g} s; see {self.folder}")

    def _read(self, process: Process) -> bool:
        with suppress(FileNotFoundError):
            with elastic_rank.log_of(self.folder, process.number).open("rb") as file:
                file.seek(process.read)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            process.read += len(whole)
            process.log.lines += [Line(*json.loads(line)) for line in whole.splitlines()]
            return bool(whole)
        return False

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until a condition holds, at most so many seconds; returns whether it does."""
        deadline = time.monotonic() + seconds
        while True:
            self.poll()
            if condition():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL)

    def said(self, process: Process) -> str:
        """The reason that a process has given for its end."""
        with suppress(FileNotFoundError):
            return elastic_rank.said_of(self.folder, process.number).read_text()
        return ""

    def stacks(self, process: Process) -> str:
        """The stacks of a rank's threads, after it has printed them."""
        text = (self.folder / f"stderr-{process.number}").read_text(errors="replace")
        return text[max(0, text.find("Thread 0x")) :]

    def dump(self) -> None:
        """Make all ranks print the stacks of their threads."""
        for process in self.processes:
            if not process.has_ended:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
                    os.kill(process.pid, elastic_rank.DUMP_SIGNAL)
        time.sleep(2.0)

    def end_at(self, step: int) -> None:
        """Make all ranks end after a step that none has reached yet."""
        path = self.folder / elastic_rank.END
        part = path.with_name(f"{path.name}.part")
        part.write_text(str(step))
        part.replace(path)

    def restart_ended(self, spared: int | None = None) -> None:
        """Restart ranks that have ended without a fault.

        Args:
            spared: a host whose rank the caller handles.
        """
        for host in range(self.plan.ranks):
            process = self.of_host(host)
            if process.has_ended and host != spared:
                said = self.said(process) or "killed"
                print(f"  host {host}: ended by itself: {said}", flush=True)
                self.unexpected.append((host, said))
                self.start(host)

    def kill_all(self) -> None:
        """Kill the processes that still run."""
        for process in self.processes:
            if not process.has_ended:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                    os.waitpid(process.pid, 0)
                process.has_ended = True

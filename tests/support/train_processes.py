"""Commands as a user starts them: in marked processes, under torchrun, with errors and reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from torch_commhook.cli import launcher
from torch_commhook.cli.main import main

#: A model that does hundreds of steps a second.
TINY = ("--layers", "1", "--dim", "32", "--heads", "2", "--seq", "32", "--data-cap-mb", "1")
#: The longest wait of a single test for a process.
LIMIT_SECONDS = 300.0
_MARK = "COMMHOOK_TEST_MARK"


def wait_for(condition: Callable[[], bool], what: str, seconds: float = LIMIT_SECONDS) -> None:
    """Wait until a condition holds; fail with ``what`` after this many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def finished(
    *command: str | Path,
    folder: Path = ROOT,
    code: int | None = 0,
    environment: dict[str, str] | None = None,
    seconds: float = LIMIT_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """A command that has ended with this exit code, or with any."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done


def hooks_file(folder: Path, source: str) -> Path:
    path = folder / "my_hooks.py"
    path.write_text(f"import torch\nimport torch.distributed as dist\n{source}")
    return path


class TrainProcess:
    """A command of this Python, in a separate process group.

    The end of the ``with`` block kills its remaining processes, so that a failed test leaves none.
    """

    def __init__(self, *arguments: str | Path, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        }
        paths = [str(ROOT), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        environment[_MARK] = self.mark
        environment["TMPDIR"] = str(folder)  # a killed launcher leaves its folder
        self.stdout_path, self.stderr_path = folder / "stdout", folder / "stderr"
        with open(self.stdout_path, "wb") as stdout, open(self.stderr_path, "wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def __enter__(self) -> TrainProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        for pid in self.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait(LIMIT_SECONDS)

    @property
    def stdout(self) -> str:
        return self.stdout_path.read_text()

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def wait(self, seconds: float = LIMIT_SECONDS) -> int:
        return self.process.wait(seconds)

    def wait_for_steps(self, metrics: Path, count: int = 1) -> None:
        """Waits until ``metrics`` has ``count`` lines."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < count:
            assert self.process.poll() is None, f"it ended: {self.stderr}"
            assert time.monotonic() < deadline, f"no step within the limit: {self.stderr}"
            time.sleep(0.05)

    def alive(self) -> dict[int, dict[str, str]]:
        """The environments of all running processes with the mark, by process id."""
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                raw = (folder / "environ").read_bytes().decode(errors="replace")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:  # the process has ended
                continue
            environment = dict(item.split("=", 1) for item in raw.split("\0") if "=" in item)
            if environment.get(_MARK) == self.mark and state != "Z":
                found[int(folder.name)] = environment
        return found

    def rank_pid(self, rank: int) -> int:
        pids = [pid for pid, env in self.alive().items() if env.get("RANK") == str(rank)]
        assert len(pids) == 1, f"rank {rank} has the processes {pids}"
        return pids[0]

    def assert_all_end(self, seconds: float = 5.0) -> None:
        """Fails unless all processes with the mark end within ``seconds``."""
        wait_for(lambda: not self.alive(), f"processes of {self.mark} are left", seconds)


def start_train(*arguments: str | Path, folder: Path) -> TrainProcess:
    """``python -m torch_commhook train`` with the results in ``folder/out``."""
    folder.mkdir(exist_ok=True)
    arguments = ("-m", "torch_commhook", "train", *TINY, "--out", folder / "out", *arguments)
    return TrainProcess(*arguments, folder=folder)


def trained(*arguments: str | Path, folder: Path) -> TrainProcess:
    """A run of :func:`start_train` that has succeeded, and left no process."""
    with start_train(*arguments, folder=folder) as run:
        assert run.wait() == 0, run.stderr
        run.assert_all_end()
    return run


def read_metrics(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def forbid_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a command starts ranks or this process becomes one; no launcher is there."""

    def launch(*arguments: object) -> int:
        raise AssertionError("a wrong command line must not start ranks")

    monkeypatch.setattr(launcher, "launch", launch)
    for name in ("watch_parent", "end_on_signals"):
        monkeypatch.setattr(launcher, name, launch)
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for name in (*ranks, "MASTER_ADDR", "MASTER_PORT", "COMMHOOK_LAUNCHER_PID"):
        monkeypatch.delenv(name, raising=False)


def error_of(command: str, arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command prints for these arguments; it must exit with code 2."""
    with pytest.raises(SystemExit) as ended:
        main([command, *arguments])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"commhook {command}: error: ")
    assert printed.err.count("\n") == 1
    return printed.err


train_error = partial(error_of, "train")


RANKS = 2

#: With torch 2.13 a script with DDP over Gloo may abort when Python ends, also without this
#: library: in 1 of 20 runs on a busy machine.
EXIT_DEFECT = "terminate called without an active exception"


def run_alone(folder: Path, script: str) -> str:
    """What the script prints without a launcher."""
    return _run(folder, script, [sys.executable])


def run_on_ranks(folder: Path, script: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", "--redirects=1", f"--log-dir={folder / 'logs'}"]
    _run(folder, script, command)
    runs = sorted((folder / "logs").glob("*/attempt_0"), key=lambda run: run.stat().st_mtime)
    return [(runs[-1] / str(rank) / "stdout.log").read_text() for rank in range(RANKS)]


def _run(folder: Path, script: str, launcher: list[str]) -> str:
    (folder / "train.py").write_text(script)
    for _ in range(3):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = finished(*launcher, "train.py", folder=folder, code=None, environment=environment)
        if EXIT_DEFECT not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    return done.stdout


def report(
    capsys: pytest.CaptureFixture[str], checks: str, *options: str, code: int = 0
) -> dict[str, Any]:
    """Runs some checks of doctor in this process, which must exit with ``code``."""
    capsys.readouterr()
    got = main(["doctor", "--json", "--only", checks, *options])
    output = capsys.readouterr().out
    assert got == code, output
    return json.loads(output)


def finding(report: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [each for each in report["findings"] if each["name"] == name]
    return dict(found)

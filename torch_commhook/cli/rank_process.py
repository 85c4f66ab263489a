"""Ends a rank's process at once after its launcher's death, a signal or a failure.

A rank that waits in a collective cannot run Python's signal handlers. So threads react to signals
and to the launcher's death. The destructors of a broken process group may wait for peers that have
ended. So a rank ends by ``os._exit``.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

#: The variable with the launcher's process id, in the ranks that it starts.
LAUNCHER_PID = "COMMHOOK_LAUNCHER_PID"
#: The variable with the launcher's temporary folder, for the rendezvous file and failures.
LAUNCHER_FOLDER = "COMMHOOK_LAUNCHER_FOLDER"

_PR_SET_PDEATHSIG = 1
_WATCH_SECONDS = 0.5
#: From SIGTERM to the end of this process, in seconds: torchrun sends SIGKILL after 30 s.
_END_WITHIN = 25.0
_stops_in_order = threading.Event()
_is_asked = threading.Event()
# Errors of Gloo, NCCL, the store and the library's transport if another rank has ended or does not
# answer.
_PEER_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|closed by peer"
    r"|timed? ?out|remote process exited|failed to recv|its process has ended|no sign of its host"
    r"|has left the group|counts this process as lost",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """The failure of a rank, as the rank reports it to its launcher.

    Attributes:
        seconds: the time of the failure, in seconds since the epoch.
        summary: a description in one line.
        peer: whether the rank failed only because another rank had ended.
    """

    seconds: float
    summary: str
    peer: bool


def tie_to_launcher(launcher_pid: int) -> None:
    """From now on, end this process when its launcher ends, even if the launcher is killed."""
    if sys.platform == "linux":
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            tied = libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0
        except (OSError, AttributeError):
            tied = False
    else:
        tied = False
    if os.getppid() != launcher_pid:  # the launcher has already ended
        os._exit(1)
    if not tied:
        watch_parent()


def watch_parent() -> None:
    """From now on, end this process within a second after its parent has ended.

    Unlike PR_SET_PDEATHSIG, this also fits a parent that starts ranks from a thread: the signal
    comes when that thread ends.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def stop_in_order() -> None:
    """From now on, the first SIGTERM only makes :func:`is_asked_to_stop` return True.

    For a command that ends after its step then. If it has not ended when ``_END_WITHIN`` is over,
    the signal ends it at once. Has no effect without :func:`end_on_signals`.
    """
    _stops_in_order.set()


def end_on_signals(rank: int, command: str = "train") -> None:
    """From now on, SIGINT and SIGTERM end this process at once, also within a collective.

    All ranks get the same signal. Only local rank 0 prints a line. See :func:`stop_in_order` for
    the exception.

    Args:
        rank: the rank of this process.
        command: the subcommand, which the line begins with.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)  # the wakeup fd needs a handler; the thread reacts
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def end(number: int) -> NoReturn:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            show_cursor()
            name = signal.Signals(number).name
            line = f"commhook {command}: rank {rank} stopped by {name}"
            print(line, file=sys.stderr, flush=True)
        os._exit(128 + number)

    def wait_for_signal() -> None:
        while True:
            number = os.read(reader, 1)[0]
            if number not in (signal.SIGINT, signal.SIGTERM):
                continue
            if number == signal.SIGINT or not _stops_in_order.is_set():
                end(number)
            if not _is_asked.is_set():  # launchers send SIGTERM more than once
                _is_asked.set()
                timer = threading.Timer(_END_WITHIN, end, [number])
                timer.daemon = True
                timer.start()

    threading.Thread(target=wait_for_signal, daemon=True).start()


def _ignore(number: int, frame: object) -> None:
    """A handler that does nothing."""


def show_cursor() -> None:
    """Show the terminal's cursor, which the live line hides."""
    if sys.stdout.isatty():
        sys.stdout.write("\r\x1b[?25h\n")
        sys.stdout.flush()


def describe(error: BaseException) -> Failure:
    """Describe ``error`` as a failure of this rank, now."""
    text = " ".join(str(error).split()) or "no message"
    summary = f"{type(error).__name__}: {text}"
    return Failure(time.time(), summary[:600], _is_lost_peer(error))


def _is_lost_peer(error: BaseException | None) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # Errors of C++ are exactly RuntimeErrors, or types of torch.distributed.
        distributed = type(error).__module__.startswith("torch")
        if (type(error) is RuntimeError or distributed) and _PEER_LOST.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def finish() -> NoReturn:
    """End this process without the interpreter's shutdown.

    The exit code is 0, or 143 if SIGTERM has asked it to stop.

    A thread of Gloo may need the GIL to drop its last reference to a tensor. If it asks for the GIL
    during the shutdown, the process aborts (seen on torch 2.13).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(128 + signal.SIGTERM if _is_asked.is_set() else 0)


def fail(error: BaseException, rank: int, command: str = "train") -> NoReturn:
    """End this process with exit code 1, after a report to the launcher or on stderr.

    Args:
        error: the error that ended the rank's work.
        rank: the rank of this process.
        command: the subcommand, which the line begins with.
    """
    failure = describe(error)
    folder = os.environ.get(LAUNCHER_FOLDER)
    if folder is not None:
        traceback.print_exception(error)  # the launcher writes this process's stderr to a log
        _write_failure(Path(folder), rank, failure)
    elif failure.peer:
        show_cursor()
        line = f"commhook {command}: rank {rank} lost another rank: {failure.summary}"
        print(line, file=sys.stderr)
    else:
        show_cursor()
        traceback.print_exception(error)
        print(f"commhook {command}: rank {rank} failed: {failure.summary}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def tell_first_step() -> None:
    """Tell the launcher that this run has results, and looks for requests to stop."""
    folder = os.environ.get(LAUNCHER_FOLDER)
    if folder is not None:
        try:
            _first_step_path(Path(folder)).touch()
        except OSError:
            pass  # the launcher only reports less


def told_first_step(folder: Path) -> bool:
    """Whether a rank has called :func:`tell_first_step`."""
    return _first_step_path(folder).exists()


def ask_to_stop(folder: Path) -> None:
    """Ask the ranks with this launcher's folder to end the run after the current step."""
    _stop_path(folder).touch()


def is_asked_to_stop() -> bool:
    """Whether the launcher has called :func:`ask_to_stop`, or SIGTERM has come."""
    if _is_asked.is_set():
        return True
    folder = os.environ.get(LAUNCHER_FOLDER)
    return folder is not None and _stop_path(Path(folder)).exists()


def _stop_path(folder: Path) -> Path:
    return folder / "stop"


def _first_step_path(folder: Path) -> Path:
    return folder / "first-step"


def _failure_path(folder: Path, rank: int) -> Path:
    return folder / f"failure-{rank}.json"


def _write_failure(folder: Path, rank: int, failure: Failure) -> None:
    path = _failure_path(folder, rank)
    temporary = path.with_suffix(".part")
    try:
        temporary.write_text(json.dumps(vars(failure)))
        os.replace(temporary, path)
    except OSError:
        pass  # the launcher still has the exit code and the log


def read_failure(folder: Path, rank: int) -> Failure | None:
    """The failure that a rank has reported to its launcher; None if it has reported none."""
    try:
        return Failure(**json.loads(_failure_path(folder, rank).read_text()))
    except (OSError, ValueError, TypeError):
        return None

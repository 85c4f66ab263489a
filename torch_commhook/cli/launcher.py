"""Starts the ranks of a run on this machine, and ends them together.

The launcher ends all ranks if one fails, or if it gets a signal. The ranks end themselves if the
launcher ends.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from torch_commhook.cli.interrupt import add_no_line
from torch_commhook.cli.outputs import log_name

# ---- ends a rank's process at once after its launcher's death, a signal or a failure -------------
#
# A rank that waits in a collective cannot run Python's signal handlers. So threads react to signals
# and to the launcher's death. The destructors of a broken process group may wait for peers that
# have ended. So a rank ends by ``os._exit``.


#: The variable with the launcher's process id, in the ranks that it starts.
LAUNCHER_PID = "COMMHOOK_LAUNCHER_PID"
#: The variable with the launcher's temporary folder, for the rendezvous file and the ranks' logs.
LAUNCHER_FOLDER = "COMMHOOK_LAUNCHER_FOLDER"
#: A file in this folder that a rank makes after its first step.
_FIRST_STEP = "first-step"

#: The exit code of a rank that SIGTERM has stopped in order.
_STOPPED = 128 + signal.SIGTERM
_WATCH_SECONDS = 0.5
#: From SIGTERM to the end of this process, in seconds, under another launcher: torchrun sends
#: SIGKILL after 30 s.
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
#: The reason of a rank that failed only because another rank had ended begins so.
_LOST = "lost another rank"
_MOST_SHOWN = 600


def watch_parent(parent: int | None = None) -> None:
    """From now on, end this process within a second after its parent has ended.

    The parent is a process id; None stands for the process that is the parent now.
    PR_SET_PDEATHSIG does not fit a parent that starts ranks from a thread: the signal comes when
    that thread ends.
    """
    expected = os.getppid() if parent is None else parent
    if os.getppid() != expected:
        os._exit(1)

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def stop_in_order() -> None:
    """From now on, the first SIGTERM only makes :func:`is_asked_to_stop` return True.

    For a command that ends after its step then. Under another launcher, it must end within
    ``_END_WITHIN`` seconds. Has no effect without :func:`end_on_signals`.
    """
    _stops_in_order.set()


def end_on_signals(rank: int, command: str = "train") -> None:
    """From now on, SIGINT and SIGTERM end this process at once, also within a collective.

    All ranks get the same signal. Only local rank 0 prints a line, which begins with the command.
    See :func:`stop_in_order` for the exception.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in (signal.SIGINT, signal.SIGTERM):
        # The wakeup fd needs a handler; the thread reacts.
        signal.signal(number, lambda number, frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def end(number: int) -> NoReturn:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _say(command, f"rank {rank} stopped by {signal.Signals(number).name}")
        os._exit(128 + number)

    def wait_for_signal() -> None:
        while True:
            number = os.read(reader, 1)[0]
            if number not in (signal.SIGINT, signal.SIGTERM):
                continue
            if number == signal.SIGINT or not _stops_in_order.is_set():
                end(number)
            if _is_asked.is_set():  # launchers send SIGTERM more than once
                continue
            _is_asked.set()
            if LAUNCHER_PID not in os.environ:
                timer = threading.Timer(_END_WITHIN, end, [number])
                timer.daemon = True
                timer.start()

    threading.Thread(target=wait_for_signal, daemon=True).start()


def describe(error: BaseException) -> str:
    """The end of a sentence about a rank that fails, after its number."""
    text = " ".join(str(error).split()) or "no message"
    how = _LOST if _is_lost_peer(error) else "failed"
    return f"{how}: {type(error).__name__}: {text}"[:_MOST_SHOWN]


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
    os._exit(_STOPPED if _is_asked.is_set() else 0)


def fail(error: BaseException, rank: int, command: str = "train") -> NoReturn:
    """End this process with exit code 1; the last line on stderr has the command and the reason."""
    reason = describe(error)
    if LAUNCHER_FOLDER in os.environ or not reason.startswith(_LOST):
        traceback.print_exception(error)  # our launcher writes it to a log
    _say(command, f"rank {rank} {reason}")
    sys.stdout.flush()
    os._exit(1)


def tell_first_step() -> None:
    """Tell the launcher that this run has results, and looks for requests to stop."""
    folder = os.environ.get(LAUNCHER_FOLDER)
    if folder is not None:
        with suppress(OSError):  # the launcher only reports less
            (Path(folder) / _FIRST_STEP).touch()


def is_asked_to_stop() -> bool:
    """Whether SIGTERM has asked this process to end after its step."""
    return _is_asked.is_set()


# ---- starts the ranks of a run on this machine, and ends them together ---------------------------


_POLL_SECONDS = 0.05
#: Time to notice other ranks that fail of the same cause, after the first one has failed.
_SETTLE_SECONDS = 0.3
#: The most time for the last step, a checkpoint and the results, after a signal.
_STOP_SECONDS = 60.0
_LOG_LINES = 5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


#: The process of each rank, by its number.
_Ranks = list[subprocess.Popen[bytes]]


def launch(
    command: Sequence[str],
    ranks: int,
    out: Path,
    threads: int,
    *,
    timeout: float = _STOP_SECONDS,
    name: str = "train",
) -> int:
    """Run ``command`` in ``ranks`` processes on this machine, and wait for their end.

    After a signal, ranks that have done a step finish the current step and write their results. A
    second signal ends the ranks at once, and so does the end of a minute.

    Each process gets its place by RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
    COMMHOOK_LAUNCHER_PID and COMMHOOK_LAUNCHER_FOLDER. Its stderr goes to ``out``, the folder of
    the results, if not empty.

    Args:
        timeout: the timeout of the ranks' collectives, in seconds; also limits the time after a
            signal.
        name: the subcommand, which messages begin with.

    Returns:
        The exit code: 0 if all ranks end with 0, 128 + n after signal n, else 1. A message on
        stderr says why a run fails.
    """
    with _caught_signals() as received, tempfile.TemporaryDirectory(prefix="commhook-") as path:
        folder = Path(path)
        started: _Ranks = []
        try:
            while len(started) < ranks and not received:
                try:
                    started.append(_start(command, len(started), ranks, threads, folder))
                except OSError as error:  # the machine takes no more processes
                    _end_all(started)
                    reason = f"can't be started: {error}; the others have ended"
                    _say(name, f"rank {len(started)} of {ranks} {reason}")
                    return 1
            ended = _wait(started, received, folder)
            if received and (folder / _FIRST_STEP).exists():
                for process in started:
                    process.terminate()
                _say(
                    name,
                    f"{_signal_text(received)}: the ranks finish their step and save their "
                    "results; a second signal ends them at once",
                )
                ended = _wait(started, received, folder, min(timeout, _STOP_SECONDS))
            _end_all(started)
            return _report(len(started), ended, received, folder, out, name)
        finally:
            _end_all(started)


# ---- starting ------------------------------------------------------------------------------------


def _start(
    command: Sequence[str], number: int, ranks: int, threads: int, folder: Path
) -> subprocess.Popen[bytes]:
    """Start a rank, whose stderr goes to a log in ``folder``.

    Ctrl-C reaches the whole foreground group, so the rank starts with SIGINT blocked, and keeps it
    blocked. This process gets a SIGINT of that time afterwards.
    """
    environment = os.environ | {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        LAUNCHER_PID: str(os.getpid()),
        LAUNCHER_FOLDER: str(folder),
    }
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    if Path("/sys/class/net/lo").exists():  # otherwise Gloo resolves the host's name, maybe slowly
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with open(folder / log_name(number), "wb") as log:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            stdin = subprocess.DEVNULL
            return subprocess.Popen(command, env=environment, stdin=stdin, stderr=log)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collect the signals that end a run in a list, in order."""
    received: list[int] = []
    with ExitStack() as stack:
        for number in _SIGNALS:
            before = signal.getsignal(number)
            # Background jobs of a script ignore SIGINT, but an explicit SIGINT still counts.
            if before is signal.SIG_IGN and number not in (signal.SIGINT, signal.SIGTERM):
                continue  # nohup has started this process
            signal.signal(number, lambda number, frame: received.append(number))
            stack.callback(signal.signal, number, before or signal.SIG_DFL)
        yield received


# ---- waiting and ending --------------------------------------------------------------------------


def _wait(
    ranks: _Ranks, received: list[int], folder: Path, seconds: float = math.inf
) -> dict[int, int]:
    """Wait until all ranks have ended, one has failed, a further signal comes, or time is up.

    Returns:
        The exit codes by rank number, negative for a signal. Empty after a signal or a timeout.
    """
    before, end = len(received), time.monotonic() + seconds
    deadline: float | None = None
    while len(received) == before and time.monotonic() < end:
        codes = {number: process.poll() for number, process in enumerate(ranks)}
        ended = {number: code for number, code in codes.items() if code is not None}
        if len(ended) == len(ranks):
            return ended
        stops_in_order = bool(received) or (folder / _FIRST_STEP).exists()
        fine = {0, _STOPPED} if stops_in_order else {0}
        if deadline is None and not fine.issuperset(ended.values()):
            deadline = time.monotonic() + _SETTLE_SECONDS
        if deadline is not None and time.monotonic() >= deadline:
            return ended
        time.sleep(_POLL_SECONDS)
    return {}


def _end_all(ranks: _Ranks) -> None:
    for process in ranks:
        process.kill()
    for process in ranks:
        process.wait()


# ---- the report ----------------------------------------------------------------------------------


def _report(
    ranks: int, ended: dict[int, int], received: list[int], folder: Path, out: Path, name: str
) -> int:
    """Print how the run has ended, and keep the ranks' logs; returns the exit code."""
    fine = {0, _STOPPED, -signal.SIGTERM} if received else {0}  # the launcher sends SIGTERM
    failed = {number: code for number, code in ended.items() if code not in fine}
    logs = {} if received and not failed else _keep_logs(ranks, folder, out)
    if failed:
        number = _first_cause(folder, failed)
        code, reason = failed[number], _reason(folder, number)
        failure = f"rank {number} {_end_text(code, reason)}"
    if received:
        kept = f"; the steps so far are in {out}" if (folder / _FIRST_STEP).exists() else ""
        who = f"all {ranks} ranks" if ranks != 1 else "the rank"
        if kept and len(ended) < ranks:
            kept += ", without checkpoint and summary of the last one"
        if failed:
            kept += f"; {failure}"
        _say(name, f"{_signal_text(received)}, {who} ended{kept}")
        add_no_line()  # the same signal may come again
        return 128 + received[0]
    if not failed:
        for number, log in logs.items():
            print(f"warnings of rank {number}: {log}", file=sys.stderr)
        return 0
    others = ranks - 1
    if others:
        failure += f"; the other {others} ended too" if others > 1 else "; the other ended too"
    if number in logs:
        if reason is None and code != -signal.SIGKILL:  # otherwise the log adds nothing
            lines = logs[number].read_text(errors="replace").splitlines()
            last = [line.rstrip() for line in lines if line.strip()][-_LOG_LINES:]
            failure += "".join(f"\n  {line}" for line in last)
        failure += f"\n  full output: {logs[number]}"
    _say(name, failure)
    return 1


def _signal_text(received: Sequence[int]) -> str:
    number = signal.Signals(received[0])
    return "interrupted (Ctrl-C)" if number == signal.SIGINT else f"stopped by {number.name}"


def _reason(folder: Path, number: int) -> str | None:
    """The reason for a rank's failure, which :func:`fail` has written; None if it has not."""
    text = (folder / log_name(number)).read_text(errors="replace")
    # Not only in the last line: other threads write, too.
    found = re.findall(rf"^commhook \w+: rank {number} (.*)", text, re.MULTILINE)
    return found[-1] if found else None


def _end_text(code: int, reason: str | None) -> str:
    """The end of a sentence about a rank that failed, after its number."""
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (9) (if nobody did that, the machine may lack memory)"
    if code < 0:
        with suppress(ValueError):  # a real-time signal has no name
            return f"was killed by {signal.Signals(-code).name} ({-code})"
        return f"was killed by signal {-code}"
    if code == _STOPPED:
        return "was stopped by SIGTERM (15)"
    return reason or f"ended with exit code {code}"


def _first_cause(folder: Path, failed: dict[int, int]) -> int:
    """The rank that caused the end of the others: killed by a signal, or the first to fail."""

    def order(number: int) -> tuple[bool, bool, bool, int, int]:
        is_peer = (_reason(folder, number) or "").startswith(_LOST)
        log = (folder / log_name(number)).stat()
        return failed[number] > 0, is_peer, log.st_size == 0, log.st_mtime_ns, number

    return min(failed, key=order)


def _keep_logs(ranks: int, folder: Path, out: Path) -> dict[int, Path]:
    """Copy the stderr of ranks to ``out``, if not empty; returns the files by rank number."""
    kept: dict[int, Path] = {}
    for number in range(ranks):
        log, path = folder / log_name(number), out / log_name(number)
        with suppress(OSError):
            path.unlink(missing_ok=True)  # of an earlier run
            if log.stat().st_size > 0:
                out.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(log, path)
                kept[number] = path
    return kept


def _say(name: str, message: str) -> None:
    # The live line hides the cursor. Our launcher shows it for its ranks.
    if sys.stdout.isatty() and LAUNCHER_PID not in os.environ:
        print("\r\x1b[?25h", flush=True)
    print(f"commhook {name}: {message}", file=sys.stderr, flush=True)

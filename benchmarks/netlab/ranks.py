"""The ranks' processes, one in each namespace: their output and their end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from .signals import undisturbed
from .tools import LabError

#: The exit status after a timeout, as in timeout(1).
TIMED_OUT = 124
#: From a rank's failure to the end of the others, which may print more about it.
GRACE_SECONDS = 5.0
_TERMINATE_SECONDS = 2.0  # from SIGTERM to SIGKILL
_POLL_SECONDS = 0.02
_OUTPUT_SECONDS = 5.0

#: Called with (rank, whether it is stderr, line).
Output = Callable[[int, bool, bytes], None]


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    readers: list[threading.Thread]


def run_ranks(
    command: Sequence[str],
    places: Sequence[tuple[str, Mapping[str, str]]],
    *,
    timeout: float | None,
    grace: float,
    output: Output | None,
) -> int:
    """Run ``command`` once in each place, a namespace and an environment; see ``Lab.run``."""
    if not command:
        raise ValueError("Lab.run: command must name a program, got an empty one")
    if shutil.which(command[0]) is None:
        raise LabError(f"Lab.run: there is no program {command[0]}")
    ranks: list[_Rank] = []
    try:
        for number, (namespace, environment) in enumerate(places):
            ranks.append(_start(number, command, namespace, environment, output or print_line))
        status = _wait(ranks, timeout, grace)
    finally:
        with undisturbed():
            _end(ranks)
    for rank in ranks:
        for reader in rank.readers:  # a process that outlives its rank may hold the pipe
            reader.join(_OUTPUT_SECONDS)
    return status


def _start(
    number: int,
    command: Sequence[str],
    namespace: str,
    environment: Mapping[str, str],
    output: Output,
) -> _Rank:
    entered = ["ip", "netns", "exec", namespace, *command]
    if shutil.which("setpriv") is not None:  # so that no rank outlives a killed lab
        entered = ["setpriv", "--pdeathsig", "KILL", *entered]
    process = subprocess.Popen(
        entered,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # only the lab gets Ctrl-C, and ends the ranks in order
    )
    readers = []
    for stream, is_error in ((process.stdout, False), (process.stderr, True)):
        reader = threading.Thread(
            target=_forward, args=(number, stream, is_error, output), daemon=True
        )
        reader.start()
        readers.append(reader)
    return _Rank(number, process, readers)


def _forward(number: int, stream: IO[bytes], is_error: bool, output: Output) -> None:
    with stream:
        for line in stream:
            output(number, is_error, line)


_printing = threading.Lock()


def print_line(rank: int, is_error: bool, line: bytes) -> None:
    """Write a rank's line to stdout or stderr, with its number."""
    text = line.decode(errors="replace").rstrip("\n")
    with _printing, suppress(BrokenPipeError):
        print(f"[{rank}] {text}", file=sys.stderr if is_error else sys.stdout, flush=True)


def _wait(ranks: Sequence[_Rank], timeout: float | None, grace: float) -> int:
    """Wait until all have ended, or the grace after the first failure or the timeout is over."""
    deadline = None if timeout is None else time.monotonic() + timeout
    failed: int | None = None
    while True:
        running = []
        for rank in ranks:
            code = rank.process.poll()
            if code is None:
                running.append(rank)
            elif code != 0 and failed is None:
                failed = code if code > 0 else 128 - code
                after = time.monotonic() + grace
                deadline = after if deadline is None else min(deadline, after)
        if not running:
            return failed or 0
        if deadline is not None and time.monotonic() >= deadline:
            return TIMED_OUT if failed is None else failed
        time.sleep(_POLL_SECONDS)


def _end(ranks: Sequence[_Rank]) -> None:
    """End the remaining ranks, and the processes that they have started: SIGTERM, then SIGKILL."""
    running = [rank for rank in ranks if rank.process.poll() is None]
    for rank in running:
        _signal(rank, signal.SIGTERM)
    deadline = time.monotonic() + _TERMINATE_SECONDS
    for rank in running:
        with suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(0.0, deadline - time.monotonic()))
    for rank in ranks:
        _signal(rank, signal.SIGKILL)
        rank.process.wait()


def _signal(rank: _Rank, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.process.pid, number)

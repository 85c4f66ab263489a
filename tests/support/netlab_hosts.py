"""Programs on netlab's hosts, for its tests: their output, a transfer over TCP, remaining hosts."""

from __future__ import annotations

import os
import sys

import pytest

from benchmarks.netlab import Lab, LabError, lab, why_impossible
from benchmarks.netlab.distance import check_compiler

LIMIT_SECONDS = 60.0

# Rank 1 sends bytes to rank 0, which prints two rates in bits per second: from the first bytes on,
# and of the second half.
_TRANSFER = """
import os, socket, sys, time
address, count = (os.environ["MASTER_ADDR"], 5000), int(sys.argv[1])
if os.environ["RANK"] == "0":
    with socket.create_server(address) as server:
        connection, _ = server.accept()
    got, marks = 0, []
    while part := connection.recv(1 << 20):
        got += len(part)
        marks.append((time.perf_counter(), got))
    ended = time.perf_counter()
    assert got == count, got
    half = [mark for mark in marks if mark[1] > count // 2]
    print((got - marks[0][1]) * 8 / (ended - marks[0][0]))
    print((got - half[0][1]) * 8 / (half[-1][0] - half[0][0]))
elif os.environ["RANK"] == "1":
    while True:
        try:
            connection = socket.create_connection(address, timeout=10)
            break
        except OSError:
            time.sleep(0.05)
    connection.sendall(bytes(count))
    connection.close()
"""


def lines_of(hosts: Lab, program: str, *arguments: str) -> list[str]:
    """Runs a Python program on the hosts; returns the lines that its ranks print."""
    lines: list[str] = []

    def keep(rank: int, is_error: bool, line: bytes) -> None:
        lines.append(line.decode().strip())

    command = [sys.executable, "-c", program, *arguments]
    assert hosts.run(command, timeout=LIMIT_SECONDS, output=keep) == 0, lines
    return lines


def transfer(hosts: Lab, count: int) -> tuple[float, float]:
    """Sends ``count`` bytes from host 1 to host 0; bits per second, also in the second half."""
    of_all, of_half = map(float, lines_of(hosts, _TRANSFER, str(count)))
    return of_all, of_half


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Skips the test, with the reason, if hosts cannot be made."""
    reason = why_impossible()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def far_hosts(namespaces: None) -> None:
    """Skips the test, with the reason, if distant hosts cannot be made."""
    try:
        check_compiler()
    except LabError as error:
        pytest.skip(str(error))


def left(pid: int | None = None) -> set[str]:
    """The names of a process's hosts, by default this process's."""
    space = os.stat("/proc/self/ns/pid").st_ino
    return set(lab._namespaces(f"netlab-{space}-{pid or os.getpid()}-"))

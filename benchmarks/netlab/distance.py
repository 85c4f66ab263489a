"""A switch with distant ports: a separate process forwards the frames."""

from __future__ import annotations

import math
import os
import select
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .tools import LabError, call

_SOURCE = Path(__file__).with_name("forwarder.c")
_ANSWER_SECONDS = 10.0
_END_SECONDS = 2.0
#: Seconds for a frame, each way.
MOST_DELAY = 10.0


class Forwarder:
    """A process in a namespace that forwards frames from each of its ports to the others.

    It ends with :meth:`close`, or when this process ends in any way.

    Args:
        namespace: the namespace with the ports.
        ports: interfaces, with the Ethernet address of the host behind each.
        delay: from a frame's arrival at a port to its departure at another, in seconds.
        loss: share of frames to drop at random, from 0 to 1.

    Raises:
        LabError: there is no C compiler, or the process does not start.
    """

    def __init__(
        self, namespace: str, ports: Sequence[tuple[str, str]], delay: float, loss: float
    ) -> None:
        arguments = [word for port in ports for word in port]
        with tempfile.TemporaryDirectory(prefix="netlab-") as folder:
            program = _compile(Path(folder))
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", namespace, program, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # only the lab gets Ctrl-C, and ends this process in order
            )
            try:
                self.set(delay, loss)  # its answer shows that it has started, so the file may go
            except BaseException:
                self.close()
                raise

    def set(self, delay: float, loss: float) -> None:
        """Change the delay and the loss of frames that arrive from now on.

        Raises:
            LabError: the process has ended.
        """
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(f"{round(delay * 1e9)} {loss!r}\n".encode())
            process.stdin.flush()
            if select.select([process.stdout], [], [], _ANSWER_SECONDS)[0]:
                if process.stdout.readline() == b"ok\n":
                    return
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        self.check()
        raise LabError("netlab: the forwarder of frames does not answer")

    def check(self) -> None:
        """Raise LabError if the process has ended, with its reason."""
        if self._process.poll() is not None:
            assert self._process.stderr is not None
            said = " ".join(self._process.stderr.read().decode(errors="replace").split())
            said = said or f"exit status {self._process.returncode}"
            raise LabError(f"netlab: the forwarder of frames has ended: {said}")

    def close(self) -> None:
        """End the process."""
        process = self._process
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def check_compiler() -> None:
    """Raise LabError if this machine has no C compiler."""
    if shutil.which(_compiler()[0]) is None:
        raise LabError(
            f"netlab needs a C compiler for --delay and --loss, and there is no {_compiler()[0]}: "
            "install one (apt-get install gcc libc6-dev), or name it in CC"
        )


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "")) or ["cc"]


def _compile(folder: Path) -> str:
    """Compiles the program in a folder; returns its path."""
    check_compiler()
    program = str(folder / "forwarder")
    call(*_compiler(), "-O2", "-o", program, str(_SOURCE))
    return program


def check_distance(delay: float | None, loss: float) -> None:
    """Raise ValueError if a delay in seconds or a share of lost frames is out of range."""
    if delay is not None and not 0 <= delay <= MOST_DELAY:
        raise ValueError(f"Lab: delay must be 0 to {MOST_DELAY:g} seconds, got {delay:g}")
    if not 0 <= loss < 1:
        raise ValueError(f"Lab: loss must be at least 0 and below 1, got {loss:g}")


# ---- TCP over such a distance --------------------------------------------------------------------

_BUFFERS = ("tcp_rmem", "tcp_wmem")
_MOST_BUFFER = 1 << 28
#: A connection's buffers hold the data in flight, the data that is sent again after a loss, and the
#: kernel's own records. The last count as half of a receiver's buffer.
_BUFFERED_ROUND_TRIPS = 4


def buffer_limit(bits_per_second: float, round_trip: float) -> int:
    """The bytes that a connection's buffers must be able to hold.

    Args:
        bits_per_second: of the link.
        round_trip: in seconds, including the wait of packets in queues.
    """
    needed = math.ceil(_BUFFERED_ROUND_TRIPS * bits_per_second / 8 * round_trip)
    return min(needed, _MOST_BUFFER)


def raise_buffers(namespace: str, limit: int) -> None:
    """Raise the limit of TCP's buffers in a namespace to ``limit`` bytes, unless it is higher."""
    for name in _BUFFERS:
        path = f"/proc/sys/net/ipv4/{name}"
        least, default, most = call("ip", "netns", "exec", namespace, "cat", path).split()
        if int(most) < limit:
            text = f"{least} {default} {limit}"
            call("ip", "netns", "exec", namespace, "tee", path, stdin=text)

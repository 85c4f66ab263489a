"""Calls ``ip`` and ``tc``, and explains their failures in plain words."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

#: A call takes milliseconds; one that hangs must not block the clean-up.
_SECONDS = 30.0
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
# Messages of the tools, and their meanings.
_MEANINGS = (
    ("qdisc kind is unknown", "the kernel has no token bucket: it needs CONFIG_NET_SCH_TBF"),
    ("unknown device type", "the kernel lacks a type of link: it needs CONFIG_VETH, CONFIG_BRIDGE"),
    ("operation not permitted", "this process may not make network namespaces here"),
    ("permission denied", "this process may not make network namespaces here"),
)


class LabError(RuntimeError):
    """Hosts or links cannot be made or read; the message says what is needed."""


def check_prerequisites() -> None:
    """Raise LabError if this process cannot make hosts; the message says what is missing."""
    if sys.platform != "linux":
        raise LabError(f"netlab needs Linux's network namespaces, and this is {sys.platform}")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LabError(
            f"netlab needs the program{'s' * (len(missing) > 1)} {' and '.join(missing)}: "
            "install iproute2 (apt-get install iproute2)"
        )
    held = _effective_capabilities()
    lacking = [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]
    if lacking:
        raise LabError(
            f"netlab needs {' and '.join(lacking)} to make network namespaces: run it as root, "
            "in a container with --privileged, or in a user namespace (see benchmarks/README.md)"
        )


def _effective_capabilities() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def call(*command: str, stdin: str | None = None) -> str:
    """Run ``command``; returns its output.

    Raises:
        LabError: it failed, or did not end in time.
    """
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"netlab: {' '.join(command)} failed: {error}") from error
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        meaning = next((text for sign, text in _MEANINGS if sign in said.lower()), None)
        raise LabError(
            f"netlab: {' '.join(command)} failed: {said}" + (f" ({meaning})" if meaning else "")
        )
    return done.stdout

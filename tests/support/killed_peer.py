"""Runs a program on two ranks, of which the second is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path


def first_says(program: str, folder: Path, argument: object = "") -> str:
    """What rank 0 prints.

    Args:
        program: Python code that kills rank 1. Its arguments are the rank, ``argument`` and the
            path of a ``FileStore``.
        folder: an empty folder.
        argument: of the program.
    """
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(argument), folder / "store"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said, _ = ranks[0].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[1].returncode == -signal.SIGKILL
    return said

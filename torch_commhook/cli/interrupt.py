"""Ends a command on Ctrl-C with one line and exit code 130, without a traceback.

This module imports little, so that it takes effect before the import of torch, which takes seconds.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

#: The exit code after Ctrl-C. As in a shell, it is 128 + the signal's number.
INTERRUPTED = 130

_said = False


def runs_the_command() -> bool:
    """Whether this process was started as ``commhook`` or ``python -m torch_commhook``.

    The answer is also right while Python imports the package.
    """
    program = sys.argv[0] if sys.argv else ""
    if program != "-m":  # Python sets "-m" until it has found the module
        return os.path.basename(program) == "commhook"
    return sys.orig_argv[-len(sys.argv)].removeprefix("-m") == "torch_commhook"


def end_on_interrupt() -> None:
    """From now on, SIGINT ends this process at once, with one line and exit code 130.

    The launcher, and ranks of other launchers, later install their own handlers.
    """
    signal.signal(signal.SIGINT, _end)


def ignore_interrupts() -> None:
    """From now on, SIGINT does nothing: for a process that already ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def add_no_line() -> None:
    """From now on, SIGINT ends this process without a line: it has already printed the reason."""
    global _said
    _said = True


def _end(number: int, frame: object) -> NoReturn:
    ignore_interrupts()  # a second Ctrl-C must not print a second line
    try:
        # All ranks of this machine get the signal; only one prints the line.
        if not _said and os.environ.get("LOCAL_RANK", "0") == "0":
            os.write(2, b"commhook: interrupted (Ctrl-C)\n")
    finally:
        os._exit(INTERRUPTED)

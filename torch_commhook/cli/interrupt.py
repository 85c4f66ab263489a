"""Ctrl-C before a command has anything to end: one line and exit code 130, never a traceback.

Imports next to nothing, so that it can be in force before torch is imported, which takes seconds.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

#: The exit code of a process that Ctrl-C ended, by the shell's rule 128 + signal number.
INTERRUPTED = 130

_said = False


def runs_the_command() -> bool:
    """Whether this process was started as ``commhook`` or ``python -m torch_commhook``.

    It can be asked while the package is being imported.
    """
    program = sys.argv[0] if sys.argv else ""
    if program != "-m":  # which stands there until Python has found the module of -m
        return os.path.basename(program) == "commhook"
    return sys.orig_argv[-len(sys.argv)].removeprefix("-m") == "torch_commhook"


def end_on_interrupt() -> None:
    """From now on SIGINT ends this process at once, with one line and exit code 130.

    The launcher and the ranks of other launchers put their own handling in place of this.
    """
    signal.signal(signal.SIGINT, _end)


def ignore_interrupts() -> None:
    """From now on SIGINT does nothing: for a process that is at its end already."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def add_no_line() -> None:
    """From now on SIGINT ends this process without a line: why it ends has been said."""
    global _said
    _said = True


def _end(number: int, frame: object) -> NoReturn:
    ignore_interrupts()  # a second Ctrl-C must not give a second line
    try:
        # The other ranks of a world get the signal as well: one speaks for all.
        if not _said and os.environ.get("LOCAL_RANK", "0") == "0":
            os.write(2, b"commhook: interrupted (Ctrl-C)\n")
    finally:
        os._exit(INTERRUPTED)

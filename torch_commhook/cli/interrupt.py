"""What a command does before torch is imported: it ends on Ctrl-C, and prints its version.

This module imports little, since the import of torch takes seconds.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from torch_commhook.native.stamp import operator_library, read_built_for

# ---- ends a command on Ctrl-C with one line and exit code 130, without a traceback ---------------


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


# ---- --version: prints the version of the package, and of the torch that it was built for --------


def version_text() -> str:
    """Return ``torch_commhook 0.1.0, built for torch 2.13.0+cpu``, without importing torch."""
    import torch_commhook

    library = operator_library()
    built_for = None if library is None else read_built_for(library)
    build = "not built" if library is None else f"built for torch {built_for or 'unknown'}"
    return f"torch_commhook {torch_commhook.__version__}, {build}"


def end_after_version() -> None:
    """If ``--version`` is the only argument, print the version and end, before torch loads."""
    if sys.argv[1:] == ["--version"]:
        print(version_text())
        sys.exit()

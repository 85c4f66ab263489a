"""Runs the subcommand that the command line names, and returns its exit code."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from torch_commhook.cli.interrupt import (
    INTERRUPTED,
    end_on_interrupt,
    ignore_interrupts,
    version_text,
)

#: The subcommands, each a module of this package with ``main(argv) -> exit code``.
COMMANDS = {
    "bench": "measure the link between ranks, and a step with each hook over it",
    "doctor": "check whether hooks can run here, and name a solution if they cannot",
    "plan": "recommend a hook for a link, and predict a step with each hook",
    "store": "run the store through which the ranks of an elastic training meet",
    "train": "train a byte-level transformer on real text with a communication hook",
}


_python_format = warnings.formatwarning


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser that ends on errors with one line and exit code 2, without the usage."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # A number with a unit, such as -5mbit, is no option: the option before it refuses it.
        self._negative_number_matcher = re.compile(r"-[.\d]")

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: error: {line} (options: {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``argv`` names.

    Args:
        argv: the arguments. None stands for ``sys.argv[1:]``, in a process that runs only this
            command. Ctrl-C then ends the process at once, until the subcommand installs its own
            handling. After the subcommand has ended, Ctrl-C does nothing.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong arguments, 128 + n ended by signal n.
    """
    if argv is not None:
        return _run(list(argv))
    end_on_interrupt()
    warnings.formatwarning = _format_warning
    try:
        return _run(sys.argv[1:])
    finally:
        ignore_interrupts()  # Ctrl-C while Python ends must not change the exit code


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Format a warning for the user of a command as one line, without its place in the source."""
    if category in (UserWarning, RuntimeWarning):
        return f"commhook: warning: {message}\n"
    return _python_format(message, category, filename, lineno, line)


def _run(arguments: list[str]) -> int:
    listing = "\n".join(f"  {name:8} {text}" for name, text in COMMANDS.items())
    parser = OneLineParser(
        prog="commhook",
        description="Gradient communication hooks for PyTorch.",
        epilog=f"commands:\n{listing}\n\ncommhook COMMAND --help shows a command's options",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=version_text())
    parser.add_argument("command", choices=sorted(COMMANDS), metavar="COMMAND")
    command = parser.parse_args(arguments[:1]).command
    try:
        module = importlib.import_module(f"torch_commhook.cli.{command}")
        code: int = module.main(arguments[1:])
        return code
    except KeyboardInterrupt:
        print(f"commhook {command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the pipe has ended, as in `commhook ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1

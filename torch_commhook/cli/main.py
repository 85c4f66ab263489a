"""Chooses the subcommand, and ends it in one way whatever happens."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

#: name: (module with ``main(argv) -> exit code``, what it does). A new subcommand is a line here.
COMMANDS = {
    "train": (
        "torch_commhook.cli.train",
        "train a byte-level transformer on real text with a communication hook",
    ),
}

#: The exit code of a process that Ctrl-C ended, by the shell's rule 128 + signal number.
INTERRUPTED = 130


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line and exit code 2, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: error: {line} (options: {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``argv`` names (``sys.argv[1:]`` where it is None).

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong arguments, 128 + n ended by signal n.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    listing = "\n".join(f"  {name:8} {text}" for name, (_, text) in COMMANDS.items())
    parser = OneLineParser(
        prog="commhook",
        description="Gradient communication hooks for PyTorch.",
        epilog=f"commands:\n{listing}\n\ncommhook COMMAND --help shows a command's options",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=sorted(COMMANDS), metavar="COMMAND")
    command = parser.parse_args(arguments[:1]).command
    try:
        module = importlib.import_module(COMMANDS[command][0])
        return module.main(arguments[1:])
    except KeyboardInterrupt:
        print(f"commhook {command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has gone, as in `commhook ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1

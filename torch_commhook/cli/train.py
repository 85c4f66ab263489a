"""``train``: trains a small transformer. The process launches the ranks, or is one of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch_commhook.cli.place import Place, RankedCommand
from torch_commhook.cli.train_options import TrainOptions, build_parser, parse_options


def main(argv: Sequence[str]) -> int:
    """Run ``train argv``; returns the exit code. See :meth:`RankedCommand.run`."""
    command = RankedCommand(
        "train", build_parser, parse_options, _launch, _run_rank, print_notes=_print_notes
    )
    return command.run(argv)


def _launch(argv: Sequence[str], options: TrainOptions) -> int:
    from torch_commhook.cli.launcher import launch

    command = [sys.executable, "-m", "torch_commhook", "train", *argv, "--out", str(options.out)]
    return launch(
        command, options.config.ranks, options.out, options.threads, timeout=options.timeout
    )


def _run_rank(options: TrainOptions, place: Place) -> None:
    from torch_commhook.cli.train_rank import train_rank

    train_rank(options, place)


def _print_notes(options: TrainOptions) -> None:
    for note in options.notes:
        print(f"commhook train: note: {note}", file=sys.stderr)

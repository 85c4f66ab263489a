"""``train``: launches the ranks, or is one of them."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from torch_commhook.cli import rank_process
from torch_commhook.cli.place import Place, PlaceError, read_place
from torch_commhook.cli.slurm import slurm_variables
from torch_commhook.cli.train_options import TrainOptions, parse_options
from torch_commhook.cli.train_parser import build_parser


def main(argv: Sequence[str]) -> int:
    """Run ``train argv``; returns the exit code.

    A process without a described world launches its own ranks and waits for them. A rank of ours
    finds COMMHOOK_LAUNCHER_PID in its environment, and a rank of torchrun (or of anything else
    that sets RANK, WORLD_SIZE and MASTER_ADDR) joins the world that is there. So does one of
    several tasks of Slurm's srun.
    """
    try:
        os.environ.update(slurm_variables(os.environ))
        place = read_place(os.environ)
    except PlaceError as error:
        build_parser().error(str(error))
    if place is not None:
        if place.launcher_pid is not None:
            rank_process.tie_to_launcher(place.launcher_pid)
        else:
            rank_process.end_on_signals(place.rank)
            rank_process.watch_parent()
        _run_rank(argv, place)
    from torch_commhook.cli.launcher import launch

    options = parse_options(argv)
    _print_notes(options)
    command = [sys.executable, "-m", "torch_commhook", "train", *argv, "--out", str(options.out)]
    return launch(
        command, options.config.ranks, options.out, options.threads, timeout=options.timeout
    )


def _run_rank(argv: Sequence[str], place: Place) -> NoReturn:
    if place.rank == 0:
        options = parse_options(argv, place)
        if place.launcher_pid is None:  # else the launcher has said them already
            _print_notes(options)
    else:  # rank 0 speaks for all
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            options = parse_options(argv, place)
    try:
        faulthandler.enable()
        from torch_commhook.cli.train_rank import train_rank

        train_rank(options, place)
    except BaseException as error:
        rank_process.fail(error, place.rank)
    rank_process.finish()


def _print_notes(options: TrainOptions) -> None:
    for note in options.notes:
        print(f"commhook train: note: {note}", file=sys.stderr)

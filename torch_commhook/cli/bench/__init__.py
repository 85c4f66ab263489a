"""``bench``: measures the link between ranks, and what collectives, codecs and hooks take."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from torch_commhook.cli import rank_process
from torch_commhook.cli.bench.options import build_parser, parse_options
from torch_commhook.cli.place import Place, PlaceError, read_place
from torch_commhook.cli.slurm import slurm_variables

_NAME = "bench"


def main(argv: Sequence[str]) -> int:
    """Run ``bench argv``; returns the exit code.

    As ``train``, a process that nobody has launched starts its own ranks, even a single one.
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
            rank_process.end_on_signals(place.rank, _NAME)
            rank_process.watch_parent()
        _run_rank(argv, place)
    from torch_commhook.cli.launcher import launch

    options = parse_options(argv)
    logs = Path(tempfile.gettempdir()) / f"commhook-bench-{os.getpid()}"
    command = [sys.executable, "-m", "torch_commhook", _NAME, *argv]
    return launch(
        command, options.ranks, logs, options.threads, timeout=options.timeout, name=_NAME
    )


def _run_rank(argv: Sequence[str], place: Place) -> NoReturn:
    if place.rank == 0:
        options = parse_options(argv, place)
    else:  # rank 0 speaks for all
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            options = parse_options(argv, place)
    try:
        faulthandler.enable()
        from torch_commhook.cli.bench.rank import run_rank

        run_rank(options, place)
    except BaseException as error:
        rank_process.fail(error, place.rank, _NAME)
    rank_process.finish()

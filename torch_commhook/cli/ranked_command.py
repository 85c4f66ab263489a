"""Runs a subcommand on ranks: the process launches the ranks, or is one of them."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, Protocol, TypeVar

from torch_commhook.cli import rank_process
from torch_commhook.cli.place import Place, PlaceError, read_place
from torch_commhook.cli.slurm import slurm_variables

_Options = TypeVar("_Options", covariant=True)
_T = TypeVar("_T")


class ParseOptions(Protocol[_Options]):
    """Parses and checks a command line; ends the process with a message if an option is wrong."""

    def __call__(self, argv: Sequence[str], place: Place | None = None) -> _Options: ...


def _say_nothing(options: object) -> None:
    pass


@dataclass(frozen=True)
class RankedCommand(Generic[_T]):
    """A subcommand that runs on ranks.

    Attributes:
        name: the subcommand's name.
        build_parser: makes its parser.
        parse_options: parses its options, for a rank if a place is given.
        launch: starts ranks and waits for them; returns the exit code.
        run_rank: runs a rank.
        print_notes: prints remarks on the options, once for all ranks.
    """

    name: str
    build_parser: Callable[[], argparse.ArgumentParser]
    parse_options: ParseOptions[_T]
    launch: Callable[[Sequence[str], _T], int]
    run_rank: Callable[[_T, Place], object]
    print_notes: Callable[[_T], object] = _say_nothing

    def run(self, argv: Sequence[str]) -> int:
        """Run the subcommand; returns the exit code.

        The process joins the world that the environment describes: by COMMHOOK_LAUNCHER_PID for
        our own launcher, by RANK, WORLD_SIZE and MASTER_ADDR for torchrun and others, or by the
        variables of Slurm's srun for one of several tasks. Otherwise the process launches its own
        ranks and waits for them.
        """
        try:
            os.environ.update(slurm_variables(os.environ))
            place = read_place(os.environ)
        except PlaceError as error:
            self.build_parser().error(str(error))
        if place is not None:
            if place.launcher_pid is not None:
                rank_process.tie_to_launcher(place.launcher_pid)
            else:
                rank_process.end_on_signals(place.rank, self.name)
                rank_process.watch_parent()
            self._be_rank(argv, place)
        options = self.parse_options(argv)
        self.print_notes(options)
        return self.launch(argv, options)

    def _be_rank(self, argv: Sequence[str], place: Place) -> NoReturn:
        if place.rank == 0:
            options = self.parse_options(argv, place)
            if place.launcher_pid is None:  # our launcher has already printed them
                self.print_notes(options)
        else:  # rank 0 prints the errors, which are the same on all ranks
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
                options = self.parse_options(argv, place)
        try:
            faulthandler.enable()
            self.run_rank(options, place)
        except BaseException as error:
            rank_process.fail(error, place.rank, self.name)
        rank_process.finish()

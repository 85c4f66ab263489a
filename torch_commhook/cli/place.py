"""Reads this process's place among the ranks from the environment variables of a launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch_commhook.cli.rank_process import LAUNCHER_PID

_WORLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


class PlaceError(ValueError):
    """An environment variable is missing or wrong. The message is one sentence that names it."""


@dataclass(frozen=True)
class Place:
    """A rank's place among the ranks.

    Attributes:
        rank: 0 to ``size - 1``.
        size: the number of ranks.
        local_rank: the rank among those of this machine.
        local_size: the number of ranks on this machine.
        launcher_pid: the process id of our launcher; None under another launcher.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher_pid: int | None = None


def checks_outputs(place: Place | None) -> bool:
    """Whether this process checks the files that a command will write.

    One process does: the one that launches the ranks, or rank 0 of another launcher.

    Args:
        place: this process's place; None if it launches the ranks.
    """
    return place is None or (place.rank == 0 and place.launcher_pid is None)


def read_place(environment: Mapping[str, str]) -> Place | None:
    """Read this process's place; returns None if no launcher has started the process.

    Our launcher sets COMMHOOK_LAUNCHER_PID. Others, such as torchrun, set RANK, WORLD_SIZE and
    MASTER_ADDR.

    Raises:
        PlaceError: a variable is missing, no whole number, too small or too large.
    """
    launcher_pid = None
    if LAUNCHER_PID in environment:
        launcher_pid = _number(environment, LAUNCHER_PID, 1)
    elif not all(name in environment for name in _WORLD):
        return None
    else:
        _number(environment, "MASTER_PORT", 0, 65535)  # only checked: torch reads it
    size = _number(environment, "WORLD_SIZE", 1)
    rank = _number(environment, "RANK", 0, size - 1)
    local_size = _number(environment, "LOCAL_WORLD_SIZE", 1, default=size)
    local_rank = _number(environment, "LOCAL_RANK", 0, default=rank)
    return Place(rank, size, local_rank, local_size, launcher_pid)


def _number(
    environment: Mapping[str, str],
    name: str,
    lowest: int,
    highest: int | None = None,
    default: int | None = None,
) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        value = int(text or "")
        if lowest <= value and (highest is None or value <= highest):
            return value
    except ValueError:
        pass
    limit = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"
    got = "nothing" if text is None else repr(text)
    raise PlaceError(f"environment variable {name}: must be a whole number {limit}, got {got}")

"""This process's place among the ranks, as a launcher describes it by environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch_commhook.cli.rank_process import LAUNCHER_PID

_WORLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


class PlaceError(ValueError):
    """An environment variable that describes no place, in one sentence that names it."""


@dataclass(frozen=True)
class Place:
    """A rank's place.

    Attributes:
        rank: 0 to ``size - 1``.
        size: the ranks.
        local_rank: among the ranks of this machine.
        local_size: the ranks of this machine.
        launcher_pid: the process id of the launcher, None where it is not ours.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher_pid: int | None = None


def read_place(environment: Mapping[str, str]) -> Place | None:
    """The place that ``environment`` describes; None where nothing has launched this process.

    ``train`` sets COMMHOOK_LAUNCHER_PID for the ranks that it starts; torchrun, or anything else
    that launches ranks, sets RANK, WORLD_SIZE and MASTER_ADDR.

    Raises:
        PlaceError: a variable is missing, no whole number, or too small or large.
    """
    launcher_pid = None
    if LAUNCHER_PID in environment:
        launcher_pid = _number(environment, LAUNCHER_PID, 1)
    elif not all(name in environment for name in _WORLD):
        return None
    else:
        _number(environment, "MASTER_PORT", 0, 65535)  # torch reads it
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

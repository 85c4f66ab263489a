"""The settings of the checks of ``doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_commhook.cli.place import Place

if TYPE_CHECKING:
    from torch_commhook.cli.doctor.meeting import Meeting


@dataclass(frozen=True)
class Settings:
    """The settings of all checks.

    Attributes:
        timeout: the seconds for ranks to come and to connect.
        backend: the backend to describe a group of, or None.
        place: this rank's place, or None if no launcher has started it.
        meeting: the meeting with the other ranks, or None if this process is alone.
    """

    timeout: float
    backend: str | None = None
    place: Place | None = None
    meeting: Meeting | None = None

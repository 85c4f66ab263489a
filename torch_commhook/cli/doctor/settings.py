"""What the checks of ``doctor`` are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_commhook.cli.place import Place

if TYPE_CHECKING:
    from torch_commhook.cli.doctor.meeting import Meeting


@dataclass(frozen=True)
class Settings:
    """How to check.

    Attributes:
        timeout: seconds that ranks have to come and to connect.
        backend: what the training gives ``init_process_group``, or None.
        place: this rank's place, or None if no launcher has started it.
        meeting: with the other ranks, or None if this process is alone.
    """

    timeout: float
    backend: str | None = None
    place: Place | None = None
    meeting: Meeting | None = None

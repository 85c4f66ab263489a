"""The interface of what finds out which hook a model is to have."""

from __future__ import annotations

from typing import Protocol


class Choosing(Protocol):
    """Finds out in the first steps of a model which hook it is to have, on all ranks alike."""

    def before_step(self) -> None:
        """A step has begun on all ranks, and no bucket is sent yet.

        Raises:
            RuntimeError: a collective has failed.
        """

    def before_capture(self) -> None:
        """A compiler takes in a backward: the hook is to be known now. No step is open.

        Raises:
            RuntimeError: a collective has failed.
        """

    def step_repeats(self) -> None:
        """The step that is open has failed, and is taken again."""

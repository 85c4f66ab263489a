"""The interface through which a step chooses a model's hook."""

from __future__ import annotations

from typing import Protocol


class Choosing(Protocol):
    """Chooses a model's hook in its first steps, the same one on all ranks."""

    def before_step(self) -> None:
        """Called when a step has begun on all ranks, before the first bucket is sent.

        Raises:
            RuntimeError: a collective failed.
        """

    def before_capture(self) -> None:
        """Called between steps, before a compiler captures a backward: the hook must be known now.

        Raises:
            RuntimeError: a collective failed.
        """

    def step_repeats(self) -> None:
        """Called when the current step has failed and repeats."""

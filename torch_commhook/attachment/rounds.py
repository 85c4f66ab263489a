"""The schedule in which a model's fragments are exchanged."""

from __future__ import annotations

from typing import Any


class Round:
    """The position in a round of ``H`` steps, in which each fragment is exchanged once.

    A fragment's turn comes ``H / fragments`` steps after the previous one. The last turn ends the
    round. A failed turn is repeated after the next step. Later turns keep their steps, but wait
    while an exchange is running. The next round is late if the last turn is late.

    Args:
        H: the number of steps in a round.
        fragments: the number of fragments.

    Attributes:
        steps: the number of steps since the last fragment's exchange began.
        turn: the fragment that is exchanged next.
    """

    def __init__(self, H: int, fragments: int) -> None:  # noqa: N803 (as the papers call it)
        self._H = H
        self._fragments = fragments
        self.steps = 0
        self.turn = 0

    @property
    def is_due(self) -> bool:
        """Whether the next exchange is due."""
        return self.steps >= (self.turn + 1) * self._H // self._fragments

    def next_turn(self) -> None:
        """Note that an exchange has begun, or has run at once."""
        self.turn += 1
        if self.turn == self._fragments:
            self.reset()

    def repeat(self, turn: int, steps: int) -> None:
        """Note that an exchange has failed.

        Args:
            turn: its fragment.
            steps: the number of steps since the round in which it began.
        """
        self.turn, self.steps = turn, steps

    def before(self, turn: int, steps: int) -> Round:
        """The position after :meth:`repeat`, as a new object."""
        place = Round(self._H, self._fragments)
        place.repeat(turn, steps)
        return place

    def reset(self) -> None:
        """Begin a round."""
        self.turn = self.steps = 0

    @property
    def fragment_before(self) -> int:
        """The fragment of the last turn."""
        return (self.turn - 1) % self._fragments

    def began_at(self, steps_ago: int) -> int:
        """The number of steps in its round after which the last turn began, if known."""
        return self._H if self.turn == 0 else self.steps - steps_ago

    def position(self, in_flight: int) -> dict[str, Any]:
        """The position in the form of a state.

        Args:
            in_flight: the number of steps since a running exchange began; -1 if none is running.
        """
        return {
            "steps_of_round": self.steps,
            "fragments": self._fragments,
            "fragment": self.turn,
            "steps_in_flight": in_flight,
        }

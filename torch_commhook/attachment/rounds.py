"""When the fragments of a model are exchanged."""

from __future__ import annotations

from typing import Any


class Round:
    """The place in a round of ``H`` steps, in which each fragment has its turn.

    A fragment's turn comes ``H / fragments`` steps after the previous one. The last turn ends the
    round. A turn that failed comes again after the next step. Later turns keep their steps, but
    wait while an exchange is under way; the next round is late if the last turn is.

    Args:
        H: steps of a round.
        fragments: their number.

    Attributes:
        steps: since the last fragment's exchange began.
        turn: the fragment whose exchange begins next.
    """

    def __init__(self, H: int, fragments: int) -> None:  # noqa: N803 (as the papers call it)
        self._H = H
        self._fragments = fragments
        self.steps = 0
        self.turn = 0

    @property
    def is_due(self) -> bool:
        """Whether the next exchange is to begin."""
        return self.steps >= (self.turn + 1) * self._H // self._fragments

    def next_turn(self) -> None:
        """An exchange has begun, or has been done at once."""
        self.turn += 1
        if self.turn == self._fragments:
            self.reset()

    def repeat(self, turn: int, steps: int) -> None:
        """An exchange has failed.

        Args:
            turn: whose it was.
            steps: since the round that it began in.
        """
        self.turn, self.steps = turn, steps

    def before(self, turn: int, steps: int) -> Round:
        """Another place, after :meth:`repeat`."""
        place = Round(self._H, self._fragments)
        place.repeat(turn, steps)
        return place

    def reset(self) -> None:
        """Begin a round."""
        self.turn = self.steps = 0

    @property
    def fragment_before(self) -> int:
        """The fragment whose turn was the last."""
        return (self.turn - 1) % self._fragments

    def began_at(self, steps_ago: int) -> int:
        """After how many steps of its round the last turn began, as far as can be told."""
        return self._H if self.turn == 0 else self.steps - steps_ago

    def position(self, in_flight: int) -> dict[str, Any]:
        """What a state has of it.

        Args:
            in_flight: steps since an exchange began that has not ended; -1 where none is under way.
        """
        return {
            "steps_of_round": self.steps,
            "fragments": self._fragments,
            "fragment": self.turn,
            "steps_in_flight": in_flight,
        }

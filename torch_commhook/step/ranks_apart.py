"""The interface by which a step brings ranks together that a hook keeps apart."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class CheckedState(NamedTuple):
    """A state that is to be loaded.

    Attributes:
        parameters: this rank's, and what they are to be.
        position: where in a round training is.
        rest: what the hook remembers.
        means: mean distances by parameter name, of an exchange under way; None where none is.
    """

    parameters: list[tuple[Tensor, Tensor]]
    position: dict[str, Any]
    rest: dict[str, Any]
    means: dict[str, Tensor] | None = None


class RanksApart(Protocol):
    """Counts the steps of a model that a hook keeps apart, and brings the ranks together.

    It stands on optimizers and models, and so above the steps of a hook: see
    ``torch_commhook/attachment/local_steps.py``.
    """

    def note_backward(self) -> None:
        """A backward begins whose gradients a step is to use, or ends where ranks have shards."""

    def synchronize(self) -> None:
        """Have the ranks together, with nothing that is not sent."""

    def let_go(self) -> None:
        """Keep no parameter."""

    def close(self) -> None:
        """Count no more."""

    def handle_gone(self) -> None:
        """The hook's handle is no more."""

    def place(self) -> tuple[int, int, int]:
        """The place in a round, for :meth:`begin_at` on a new rank."""

    def begin_at(self, place: tuple[int, int, int]) -> None:
        """Begin where another rank is. The hook's memory is loaded. Writes the parameters."""

    def state_dict(self) -> dict[str, Any]:
        """What the hook remembers, with the rank's parameters."""

    def check_state(self, state: Any) -> CheckedState:
        """What of a :meth:`state_dict` is what; raises ValueError where it does not fit."""

    def take_state(self, checked: CheckedState) -> None:
        """Go on from what :meth:`check_state` gave."""

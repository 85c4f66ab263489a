"""The interface for exchanges between ranks that a hook keeps apart."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class CheckedState(NamedTuple):
    """A checked state that is to be loaded.

    Attributes:
        parameters: this rank's parameters, and their new values.
        position: the position in a round.
        rest: the hook's memory.
        means: the mean distances of a running exchange, by parameter name; None if none is running.
    """

    parameters: list[tuple[Tensor, Tensor]]
    position: dict[str, Any]
    rest: dict[str, Any]
    means: dict[str, Tensor] | None = None


class RanksApart(Protocol):
    """Counts the steps of a model whose hook keeps ranks apart, and runs the exchanges.

    The implementation uses optimizers and models, in a layer above: see
    ``torch_commhook/attachment/local_steps.py``.
    """

    def note_backward(self) -> None:
        """Note a backward: at its begin, or on sharded models at its end."""

    def synchronize(self) -> None:
        """Give all ranks the same parameters, with nothing unsent."""

    def let_go(self) -> None:
        """Release the parameters."""

    def close(self) -> None:
        """Stop counting."""

    def handle_gone(self) -> None:
        """Note that the hook's handle is gone."""

    def place(self) -> tuple[int, int, int, bool]:
        """The position in a round, for :meth:`begin_at` on a new rank."""

    def begin_at(self, place: tuple[int, int, int, bool]) -> None:
        """Begin at another rank's position. The hook's memory is loaded. Writes the parameters."""

    def state_dict(self) -> dict[str, Any]:
        """Return the hook's memory and the rank's parameters."""

    def check_state(self, state: Any) -> CheckedState:
        """Split a :meth:`state_dict` into its parts; raises ValueError if it does not fit."""

    def take_state(self, checked: CheckedState) -> None:
        """Continue from the result of :meth:`check_state`."""

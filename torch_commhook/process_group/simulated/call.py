"""One rank's part in a simulated collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torch_commhook.process_group.simulated.data import Reduction


@dataclass
class Call:
    """One rank's part in a collective.

    Attributes:
        operation: the name of the group's method.
        key: properties that must be the same on all ranks.
        text: a description for messages.
        inputs, outputs: the tensors that are read and written.
        returned: the value of its Future.
        root: the root's rank in the group, if there is one.
        bytes_sent: the bytes that this rank sends.
    """

    operation: str
    key: tuple[Any, ...]
    text: Callable[[], str]
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    returned: Sequence[Tensor] = ()
    reduction: Reduction | None = None
    root: int = 0
    input_splits: Sequence[int] = ()
    output_splits: Sequence[int] = ()
    bytes_sent: int = 0

    def __str__(self) -> str:
        details = self.text()
        return f"{self.operation} of {details}" if details else self.operation


def named_ranks(ranks: Sequence[int]) -> str:
    """A text such as ``ranks 0, 3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

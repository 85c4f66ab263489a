"""The base of a rank's side of a simulated group: it issues collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from torch_commhook.process_group import operations
from torch_commhook.process_group.base import ProcessGroup
from torch_commhook.process_group.simulated import data
from torch_commhook.process_group.simulated.arguments import tensors_of
from torch_commhook.process_group.simulated.call import Call
from torch_commhook.process_group.simulated.data import Reduction
from torch_commhook.process_group.simulated.link import Link
from torch_commhook.process_group.simulated.work import SimulatedWork

Tensors = Sequence[Tensor]


class IssuingProcessGroup(ProcessGroup):
    """One rank's side of a group, without its collectives, which a subclass defines.

    Args:
        link: the state that the group's ranks share.
        rank: this side's rank in the group.
    """

    def __init__(self, link: Link, rank: int) -> None:
        super().__init__(rank, len(link.members))
        self._link = link
        self._rank = rank
        self._size = len(link.members)
        self._coalescing: list[SimulatedWork] | None = None
        self._is_shut_down = False

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent on the group.

        Each collective counts the bytes of an algorithm that sends the fewest: an all-reduce
        ``2 (W - 1) / W`` of its tensor, with W ranks. Bytes that only some ranks must send are
        divided among all ranks, as in :mod:`torch_commhook.collectives`.
        """
        return self._link.bytes_sent[self._rank]

    # ---- around collectives ----------------------------------------------------------------------

    def _get_sequence_number_for_group(self) -> int:
        return self._link.sequence[self._rank]

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: all ranks count from 1."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: there is no timeout."""

    def shutdown(self) -> None:
        """Accept no more collectives."""
        self._is_shut_down = True

    def abort(self) -> None:
        """Same as :meth:`shutdown`."""
        self.shutdown()

    # ---- issuing ---------------------------------------------------------------------------------

    def _issue(
        self,
        run: Callable[..., data.Results],
        operation: str,
        inputs: Tensors,
        outputs: Tensors,
        *,
        key: tuple[Any, ...],
        text: Callable[[], str],
        reduction: Reduction | None = None,
        root: int = 0,
        splits: tuple[list[int], list[int]] = ([], []),
    ) -> SimulatedWork:
        if self._is_shut_down:
            raise RuntimeError(f"{operation}: {self._link} has been destroyed")
        call = Call(
            operation,
            (operation, *key),
            text,
            inputs,
            outputs,
            outputs,
            reduction,
            root,
            splits[1],
            splits[0],
            self._bytes_sent(operation, inputs, root, splits[1]),
        )
        return self._noted(self._link.join(self._rank, call, run))

    def _noted(self, work: SimulatedWork) -> SimulatedWork:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _at_root(
        self, operation: str, name: str, value: Any, root: int, count: int
    ) -> list[Tensor]:
        """Tensors that only the root gives."""
        if self._rank == root:
            return tensors_of(operation, name, value, count=count)
        return []

    def _bytes_sent(
        self, operation: str, inputs: Tensors, root: int = -1, splits: Sequence[int] = ()
    ) -> int:
        call = operations.Call(operation, None, list(inputs), [], root, splits=splits)
        return call.bytes_sent(self._rank, self._size)

    def _named(self, rank: int) -> str:
        return f"rank {self._link.members[rank]}"

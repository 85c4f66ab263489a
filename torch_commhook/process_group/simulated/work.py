"""The Work of simulated collectives."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from torch_commhook.native.dynamo import left_to_python
from torch_commhook.process_group.simulated.call import Call, named_ranks
from torch_commhook.process_group.work import Work


class RunScheduler(Protocol):
    """Switches between the ranks of a run; ``enter`` returns its object for the calling rank."""

    def enter(self, owner: int, what: str) -> Any:
        """Begin an operation of a rank's group."""

    def is_on_thread_of(self, owner: int) -> bool:
        """Whether this thread belongs to a rank."""

    def switch(self, rank: Any) -> None:
        """Let another rank run, if the seed says so."""

    def wait(self, rank: Any, awaited: SimulatedWork) -> None:
        """Let others run until the awaited work is done."""

    def ask(self, rank: Any, awaited: SimulatedWork) -> None:
        """Let others run until the awaited work is done, or until none can continue."""

    def poll(self, rank: Any, awaited: SimulatedWork) -> bool:
        """Whether the awaited work is done; if not, others run first."""

    def complete(self, awaited: SimulatedWork) -> None:
        """Note that work is done which a rank may be waiting for."""

    def fail(self, error: BaseException) -> None:
        """End the run."""


class IssuingLink(Protocol):
    """The interface of the link on which a work was issued."""

    @property
    def scheduler(self) -> RunScheduler:
        """The scheduler of the run."""

    def missing(self, work: SimulatedWork) -> list[int]:
        """The ranks of the run that the work still needs."""


class _Future(torch.futures.Future[list[Tensor]]):
    """A Future whose ``wait()`` lets the other ranks run."""

    def __init__(self, work: SimulatedWork) -> None:
        super().__init__()
        self._work = work

    @left_to_python
    def wait(self) -> list[Tensor]:
        if not self.done():
            self._work.wait()
        return super().wait()


class _WaitedFor(Work):
    """Work that cannot fail; a wait synchronizes it."""

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()


class SimulatedWork(_WaitedFor):
    """A collective that a rank has issued, until all ranks have."""

    def __init__(self, link: IssuingLink, owner: int, call: Call, number: int | None) -> None:
        super().__init__()
        self.is_done = False
        self.owner = owner
        self.call = call
        self.number = number
        self.source = -1  # the sender's rank in the group
        self._link = link
        self._future: _Future | None = None

    # ---- the interface for torch.distributed -----------------------------------------------------

    def wait(self, timeout: object = None) -> bool:
        """Let other ranks run until it is done. There is no timeout."""
        if not self._is_done_elsewhere():
            self._link.scheduler.wait(self._enter("wait"), self)
        return True

    def is_completed(self) -> bool:
        if self._is_done_elsewhere():
            return True
        return self._link.scheduler.poll(self._enter("is_completed"), self)

    def is_success(self) -> bool:
        return self.is_done

    def result(self) -> list[Tensor]:
        self.wait()
        return list(self.call.returned)

    def source_rank(self) -> int:
        return self.source

    def get_sequence_number(self) -> int:
        return self.number or 0

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a Future. Lets others run first, so that it is complete if possible.

        A wait for a Future in C++ is invisible here, and no other rank would run.
        """
        rank = None if self._is_done_elsewhere() else self._enter("get_future")
        if self._future is None:
            self._future = _Future(self)
            if self.is_done:
                self.deliver()
        if rank is not None:
            self._link.scheduler.ask(rank, self)
        return self._future

    def _is_done_elsewhere(self) -> bool:
        """Whether another thread calls, such as one that collects a rank's results."""
        return self.is_done and not self._link.scheduler.is_on_thread_of(self.owner)

    def _enter(self, method: str) -> Any:
        return self._link.scheduler.enter(self.owner, f"Work.{method} of {self.call.operation}")

    # ---- the interface for the scheduler ---------------------------------------------------------

    def describe(self) -> str:
        operation = self.call.operation
        if self.number is not None:
            operation = f"{operation} {self.number}"
        text = f"{operation} on {self._link}"
        if details := self.call.text():
            text += f": {details}"
        missing = self._link.missing(self)
        if missing:
            text += f"; not there: {named_ranks(missing)}"
        return text

    def is_hopeless(self, ended: Collection[int]) -> bool:
        return any(rank in ended for rank in self._link.missing(self))

    def deliver(self) -> None:
        if self._future is not None and not self._future.done():
            with suppress(RuntimeError):  # another thread has done so, when a run ends
                self._future.set_result(list(self.call.returned))


class CoalescedWork(_WaitedFor):
    """Several collectives as one."""

    def __init__(self, works: Sequence[SimulatedWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: object = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all([work.is_completed() for work in self._works])

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a Future of all results; waits for them first."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self.result())
        return future

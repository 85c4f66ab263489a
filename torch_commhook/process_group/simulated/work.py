"""What a simulated collective gives back."""

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
    """Hands over between the ranks of a run; ``enter`` gives what it knows the calling rank by."""

    def enter(self, owner: int, what: str) -> Any:
        """Begin an operation of a rank's group."""

    def is_on_thread_of(self, owner: int) -> bool:
        """Whether this is the thread of a rank."""

    def switch(self, rank: Any) -> None:
        """Let another rank run, perhaps."""

    def wait(self, rank: Any, awaited: SimulatedWork) -> None:
        """Let others run until it is done."""

    def ask(self, rank: Any, awaited: SimulatedWork) -> None:
        """Let others run until it is done, or until none can go on."""

    def poll(self, rank: Any, awaited: SimulatedWork) -> bool:
        """Whether it is done; if not, others run first."""

    def complete(self, awaited: SimulatedWork) -> None:
        """What a rank may be waiting for is done."""

    def fail(self, error: BaseException) -> None:
        """End the run."""


class IssuingLink(Protocol):
    """What a work asks of the link that it was issued on."""

    @property
    def scheduler(self) -> RunScheduler:
        """Hands over between the ranks of the run."""

    def missing(self, work: SimulatedWork) -> list[int]:
        """The ranks of the run without which the work cannot be done."""


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
    """Work that cannot fail, and is synchronized by waiting for it."""

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
        self.source = -1  # of what was received, a rank of the group
        self._link = link
        self._future: _Future | None = None

    # ---- what torch.distributed asks for ---------------------------------------------------------

    def wait(self, timeout: object = None) -> bool:
        """Let other ranks run until it is done. There is no time that could run out."""
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
        """A Future, complete if that can be had by letting others run.

        Who waits for a Future in C++ does so unseen, and no other rank would run.
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
        """Whether another thread asks, such as that which gets a rank's results, and need not."""
        return self.is_done and not self._link.scheduler.is_on_thread_of(self.owner)

    def _enter(self, method: str) -> Any:
        return self._link.scheduler.enter(self.owner, f"Work.{method} of {self.call.operation}")

    # ---- what the scheduler asks for -------------------------------------------------------------

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
            with suppress(RuntimeError):  # another thread has, when a run ends
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
        """Complete when all are, which is waited for."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self.result())
        return future

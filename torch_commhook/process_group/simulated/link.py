"""The state that the ranks of a simulated process group share, and the Works of its collectives."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_commhook.native.runtime import skip_dynamo
from torch_commhook.process_group.operations import Traffic, traffic_of
from torch_commhook.process_group.simulated.data import Call, Collective, write
from torch_commhook.process_group.simulated.scheduler import ASKS, Awaited, Rank, Scheduler
from torch_commhook.process_group.work import Work

# ---- the Work of simulated collectives -----------------------------------------------------------


class _Future(torch.futures.Future[list[Tensor]]):
    """A Future whose ``wait()`` lets the other ranks run."""

    def __init__(self, work: SimulatedWork) -> None:
        super().__init__()
        self._work = work

    @skip_dynamo
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


class SimulatedWork(_WaitedFor, Awaited):
    """A collective that a rank has issued, until all ranks have."""

    def __init__(self, link: Link, owner: int, call: Call, number: int | None) -> None:
        super().__init__()
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
            self._link.scheduler.wait(rank, self, ASKS)
        return self._future

    def _is_done_elsewhere(self) -> bool:
        """Whether another thread calls, such as one that collects a rank's results."""
        return self.is_done and not self._link.scheduler.is_on_thread_of(self.owner)

    def _enter(self, method: str) -> Rank:
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
            plural = "s" if len(missing) > 1 else ""
            text += f"; not there: rank{plural} {', '.join(map(str, missing))}"
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


# ---- the state that the ranks of a simulated process group share: its running collectives --------


class MismatchedCollectiveError(RuntimeError):
    """Two ranks' collectives on a group do not match. The message describes both.

    Example:
        >>> run_ranks(lambda rank: dist.all_reduce(torch.ones(2 + rank)), 2)
        Traceback (most recent call last):
            ...
        torch_commhook.process_group.simulated.link.MismatchedCollectiveError: collective 1 ...
    """


@dataclass(frozen=True)
class Issued:
    """A call that a rank has made.

    Attributes:
        group: the group's name.
        traffic: the call's load on the rank's link.
    """

    group: str
    traffic: Traffic

    def scaled(self, factor: float) -> Issued:
        """The same call on tensors that are ``factor`` times as large."""
        return Issued(self.group, self.traffic.scaled(factor))


@dataclass
class _Message:
    """A send or a receive. The peer of a receive from any rank is -1."""

    work: SimulatedWork
    rank: int
    peer: int
    tag: int

    @property
    def is_send(self) -> bool:
        return bool(self.work.call.inputs)

    def fits(self, other: _Message) -> bool:
        """Whether one is the other's counterpart."""
        return (
            self.is_send != other.is_send
            and self.tag == other.tag
            and self.peer in (other.rank, -1)
            and other.peer in (self.rank, -1)
        )


class Link:
    """The ranks of one group; ``members`` has the rank in the run of each."""

    def __init__(self, links: Links, name: str, members: Sequence[int]) -> None:
        self.links = links
        self.scheduler = links.scheduler
        self.name = name
        self.members = members
        self.sequence = [0] * len(members)
        self.bytes_sent = [0] * len(members)
        # For each collective that some ranks have reached, their works, in the order of arrival.
        self._reached: dict[int, dict[int, SimulatedWork]] = {}
        self._messages: list[_Message] = []  # without a counterpart

    def __str__(self) -> str:
        return f"group '{self.name}'"

    def _begin(self, rank: int, call: Call, number: int | None) -> tuple[Rank, SimulatedWork]:
        """Begin a rank's call: count it, and keep it if somebody asked for it."""
        member, size = self.members[rank], len(self.members)
        me = self.scheduler.enter(member, call.operation)
        if call.operation != "send" or call.root != rank:
            self.bytes_sent[rank] += call.bytes_sent(rank, size)
        if member in self.links.issued:
            self.links.issued[member].append(Issued(self.name, traffic_of(call, rank, size)))
        return me, SimulatedWork(self, member, call, number)

    # ---- collectives -----------------------------------------------------------------------------

    def join(self, rank: int, call: Call, run: Collective) -> SimulatedWork:
        """Enter one rank's next collective; the last rank carries it out."""
        number = self.sequence[rank] + 1
        me, work = self._begin(rank, call, number)
        self.sequence[rank] = number
        works = self._reached.setdefault(number, {})
        if works:
            first, other = next(iter(works.items()))
            if other.call.key != call.key:
                self._mismatch(number, (first, other.call), (rank, call))
        works[rank] = work
        if len(works) == len(self.members):
            del self._reached[number]
            self._carry_out(number, [each for _, each in sorted(works.items())], run)
        self.scheduler.switch(me)
        return work

    def _carry_out(self, number: int, works: list[SimulatedWork], run: Collective) -> None:
        calls = [work.call for work in works]
        if calls[0].splits:
            for sender, sent in enumerate(calls):
                for receiver, received in enumerate(calls):
                    if sent.splits[receiver] != received.gets[sender]:
                        self._mismatch(number, (sender, sent), (receiver, received))
        with torch.no_grad():
            for call, values in zip(calls, run(calls), strict=True):
                for output, value in zip(call.outputs, values, strict=False):
                    write(output, value)
        for work in works:
            self.scheduler.complete(work)

    def _mismatch(self, number: int | None, one: tuple[int, Call], other: tuple[int, Call]) -> None:
        numbered = "" if number is None else f"collective {number} "
        sides = "; ".join(
            f"rank {self.members[rank]}: {call}"
            for rank, call in sorted((one, other), key=lambda side: self.members[side[0]])
        )
        error = MismatchedCollectiveError(f"{numbered}on {self} is not the same: {sides}")
        self.scheduler.fail(error)
        raise error

    def missing(self, work: SimulatedWork) -> list[int]:
        """The ranks of the run that the work still needs."""
        if work.number is not None:
            works = self._reached.get(work.number)
            absent = () if works is None else set(range(len(self.members))) - works.keys()
            return [self.members[rank] for rank in sorted(absent)]
        return [
            self.members[message.peer]
            for message in self._messages
            if message.work is work and message.peer >= 0
        ]

    # ---- messages --------------------------------------------------------------------------------

    def message(self, rank: int, call: Call, tag: int) -> SimulatedWork:
        """Send or receive on one rank; the work is done when the counterpart has come.

        The root of the call is the peer; -1 if that may be any rank.
        """
        me, work = self._begin(rank, call, None)
        own = _Message(work, rank, call.root, tag)
        other = next(filter(own.fits, self._messages), None)
        if other is None:
            self._messages.append(own)
        else:
            self._messages.remove(other)
            self._transfer(*((own, other) if own.is_send else (other, own)))
        self.scheduler.switch(me)
        return work

    def _transfer(self, send: _Message, receive: _Message) -> None:
        sent, received = send.work.call, receive.work.call
        if sent.key != received.key:
            self._mismatch(None, (send.rank, sent), (receive.rank, received))
        with torch.no_grad():
            write(received.outputs[0], sent.inputs[0].clone())
        receive.work.source = send.rank
        self.scheduler.complete(send.work)
        self.scheduler.complete(receive.work)


class Links:
    """All groups of a run.

    Args:
        scheduler: the run's scheduler.

    Attributes:
        issued: for each rank of the run that has an entry, its calls since the entry was made.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.issued: dict[int, list[Issued]] = {}
        self.all: list[Link] = []
        self._links: dict[tuple[str, tuple[int, ...], int], Link] = {}
        self._counts: dict[tuple[str, tuple[int, ...], int], int] = {}

    def get(self, name: str, members: Sequence[int], rank: int) -> Link:
        """The link of a group that a rank makes.

        A name may be used again for another group once the first one has been destroyed: the ranks'
        n-th groups of a name belong together.
        """
        own = (name, tuple(members), rank)
        count = self._counts[own] = self._counts.get(own, 0) + 1
        key = (name, tuple(members), count)
        link = self._links.get(key)
        if link is None:
            link = self._links[key] = Link(self, name, members)
            self.all.append(link)
        return link

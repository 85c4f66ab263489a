"""The state that the ranks of a simulated process group share: its running collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from torch_commhook.process_group import operations
from torch_commhook.process_group.gloo_messages import Traffic, traffic_of
from torch_commhook.process_group.simulated.call import Call
from torch_commhook.process_group.simulated.data import Results, write
from torch_commhook.process_group.simulated.work import RunScheduler, SimulatedWork


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
class _Round:
    """A collective that some ranks have reached."""

    first: int
    works: list[SimulatedWork | None]
    count: int = 0


@dataclass
class _Message:
    """A send or a receive without its counterpart."""

    work: SimulatedWork
    here: int
    there: int | None
    tag: int


@dataclass
class Link:
    """The ranks of one group.

    Args:
        links: the groups of the run, with its scheduler.
        name: the group's name.
        members: the rank in the run of each of the group's ranks.
    """

    links: Links
    name: str
    members: Sequence[int]
    sequence: list[int] = field(default_factory=list)
    bytes_sent: list[int] = field(default_factory=list)
    _rounds: dict[int, _Round] = field(default_factory=dict)
    _sends: list[_Message] = field(default_factory=list)
    _receives: list[_Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sequence = [0] * len(self.members)
        self.bytes_sent = [0] * len(self.members)

    @property
    def scheduler(self) -> RunScheduler:
        return self.links.scheduler

    def __str__(self) -> str:
        return f"group '{self.name}'"

    def _note(self, rank: int, call: Call) -> None:
        """Count a rank's call, and keep it if somebody asked for it."""
        self.bytes_sent[rank] += call.bytes_sent
        issued = self.links.issued.get(self.members[rank])
        if issued is not None:
            tensors = list(call.inputs), list(call.outputs)
            made = operations.Call(
                call.operation, None, *tensors, call.root, splits=call.input_splits
            )
            issued.append(Issued(self.name, traffic_of(made, rank, len(self.members))))

    # ---- collectives -----------------------------------------------------------------------------

    def join(
        self, rank: int, call: Call, run: Callable[[Sequence[Call]], Results]
    ) -> SimulatedWork:
        """Enter one rank's next collective; the last rank carries it out.

        Raises:
            MismatchedCollectiveError: another rank has entered a different one.
        """
        me = self.scheduler.enter(self.members[rank], call.operation)
        self.sequence[rank] += 1
        self._note(rank, call)
        number = self.sequence[rank]
        work = SimulatedWork(self, self.members[rank], call, number)
        current = self._rounds.get(number)
        if current is None:
            current = self._rounds[number] = _Round(rank, [None] * len(self.members))
        first = current.works[current.first]
        if first is not None and first.call.key != call.key:
            self._mismatch(number, (current.first, first.call), (rank, call))
        current.works[rank] = work
        current.count += 1
        if current.count == len(self.members):
            del self._rounds[number]
            works = [work for work in current.works if work is not None]
            self._carry_out(number, works, run)
        self.scheduler.switch(me)
        return work

    def _carry_out(
        self, number: int, works: list[SimulatedWork], run: Callable[[Sequence[Call]], Results]
    ) -> None:
        calls = [work.call for work in works]
        self._check_splits(number, calls)
        with torch.no_grad():
            for call, values in zip(calls, run(calls), strict=True):
                for output, value in zip(call.outputs, values, strict=False):
                    write(output, value)
        for work in works:
            self.scheduler.complete(work)

    def _check_splits(self, number: int, calls: Sequence[Call]) -> None:
        if not calls[0].input_splits:
            return
        for sender, sent in enumerate(calls):
            for receiver, received in enumerate(calls):
                if sent.input_splits[receiver] != received.output_splits[sender]:
                    self._mismatch(number, (sender, sent), (receiver, received))

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
            current = self._rounds.get(work.number)
            if current is None:
                return []
            return [self.members[rank] for rank, there in enumerate(current.works) if there is None]
        for message in (*self._sends, *self._receives):
            if message.work is work and message.there is not None:
                return [self.members[message.there]]
        return []

    # ---- messages --------------------------------------------------------------------------------

    def send(self, rank: int, call: Call, destination: int, tag: int) -> SimulatedWork:
        """Send from one rank; the work is done when the other one receives."""
        me = self.scheduler.enter(self.members[rank], call.operation)
        self._note(rank, call)
        work = SimulatedWork(self, self.members[rank], call, None)
        message = _Message(work, rank, destination, tag)
        for receive in self._receives:
            if receive.here == destination and receive.tag == tag and receive.there in (rank, None):
                self._receives.remove(receive)
                self._transfer(message, receive)
                break
        else:
            self._sends.append(message)
        self.scheduler.switch(me)
        return work

    def receive(self, rank: int, call: Call, source: int | None, tag: int) -> SimulatedWork:
        """Receive on one rank; a source of None means any rank."""
        me = self.scheduler.enter(self.members[rank], call.operation)
        self._note(rank, call)
        work = SimulatedWork(self, self.members[rank], call, None)
        message = _Message(work, rank, source, tag)
        for send in self._sends:
            if send.there == rank and send.tag == tag and source in (send.here, None):
                self._sends.remove(send)
                self._transfer(send, message)
                break
        else:
            self._receives.append(message)
        self.scheduler.switch(me)
        return work

    def _transfer(self, send: _Message, receive: _Message) -> None:
        sent, received = send.work.call, receive.work.call
        if sent.key != received.key:
            self._mismatch(None, (send.here, sent), (receive.here, received))
        with torch.no_grad():
            write(received.outputs[0], sent.inputs[0].clone())
        receive.work.source = send.here
        self.scheduler.complete(send.work)
        self.scheduler.complete(receive.work)


class Links:
    """All groups of a run.

    Args:
        scheduler: the run's scheduler.

    Attributes:
        issued: for each rank of the run that has an entry, its calls since the entry was made.
    """

    def __init__(self, scheduler: RunScheduler) -> None:
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

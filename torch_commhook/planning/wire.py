"""Messages on the wire: their order in a step, and how they are measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.collectives.gloo_groups import exchanges, lacks_cpu, resolve_group
from torch_commhook.collectives.issuing import issue_all_to_all, place_in
from torch_commhook.process_group.operations import (
    Traffic,
    has_a_thread,
    merged,
    messages_of,
    on_transport,
)
from torch_commhook.process_group.simulated.link import Issued
from torch_commhook.process_group.throttled import GlooGroup, SlowLink

# ---- predicts when the collectives of a step end, over a link of given rate and delay ------------
#
# The model is that of :class:`torch_commhook.process_group.ThrottledProcessGroup`.


#: The share of an Ethernet frame that is not headers (Ethernet, IP and TCP).
PAYLOAD = 1448 / 1514
#: The most messages of a collective's part that the model follows one by one: over all buckets, and
#: the least for a bucket.
_MOST_FOLLOWED = 50_000
_LEAST_FOLLOWED = 4
#: Gloo's threads in a group of init_process_group.
_DDP_THREADS = 2
#: Of the library's own groups, which have no threads: as many as there are buckets.
_MOST_UNDER_WAY = 1 << 20


def through_seconds(
    chains: Sequence[Sequence[Issued]],
    agreement: Sequence[Issued],
    *,
    ready: Sequence[float],
    shares: Sequence[float],
    computed: float = 0.0,
    bits_per_second: float,
    latency: float,
    is_ddp: bool = False,
) -> float:
    """The time at which a step's last collective ends, in seconds.

    All chains of a bucket begin at once. In a chain, each collective waits for the one before it.
    At the end the ranks agree.

    Args:
        chains: the calls of a rank with all gradients in one bucket.
        agreement: the calls at the end of a step.
        ready: the time at which each bucket is full, in seconds.
        shares: each bucket's share of the gradients.
        computed: the time at which the step's computing ends, in seconds.
        bits_per_second: the rate of the link, each way.
        latency: the delay of a message, one way, in seconds.
        is_ddp: whether DDP issues the calls itself, on a group with two Gloo threads. None then has
            a place.
    """
    link = SlowLink(bits_per_second, latency)
    most = max(_LEAST_FOLLOWED, _MOST_FOLLOWED // len(ready))
    groups: dict[str, GlooGroup] = {}
    end = computed

    def go_on(chain: Sequence[Issued], when: float) -> None:
        nonlocal end
        if not chain:
            end = max(end, when)
            return
        (name, traffic), rest = (chain[0].group, chain[0].traffic), chain[1:]
        group = groups.get(name)
        if group is None:
            group = groups[name] = GlooGroup(link, _DDP_THREADS if is_ddp else _MOST_UNDER_WAY)
        parts = merged(messages_of(traffic), most)
        group.issue(when, parts, partial(go_on, rest), has_thread=has_a_thread(traffic))

    for when, share in zip(ready, shares, strict=True):
        for issued in chains:
            chain = scaled(issued, share)
            link.at(when, partial(go_on, chain if is_ddp else with_places(chain)))
    link.finish()
    link.at(end, partial(go_on, agreement))
    link.finish()
    return end


def scaled(calls: Sequence[Issued], factor: float) -> tuple[Issued, ...]:
    """The calls for ``factor`` times as many gradients."""
    return tuple(each.scaled(factor) for each in calls)


def with_places(calls: Sequence[Issued]) -> list[Issued]:
    """The calls over the library's transport, where hooks' collectives have places."""
    return [replace(each, traffic=on_transport(each.traffic)) for each in calls]


def round_trips(
    chains: Sequence[Sequence[Issued]],
    agreement: Sequence[Issued],
    shares: Sequence[float],
    *,
    is_ddp: bool = False,
) -> float:
    """The number of consecutive round trips in a step, if all buckets are full at the same time.

    Args:
        chains, agreement, shares, is_ddp: as for :func:`through_seconds`.
    """
    return through_seconds(
        chains,
        agreement,
        ready=[0.0] * len(shares),
        shares=shares,
        bits_per_second=float("inf"),
        latency=0.5,
        is_ddp=is_ddp,
    )


def agreement_of(world_size: int) -> list[Issued]:
    """The calls of a rank at the end of a step, by which all ranks agree that it succeeded."""
    if world_size == 1:
        return []
    return [Issued("", on_transport(Traffic("allreduce", world_size, 1, 0.0)))]


# ---- times messages between all ranks of a group -------------------------------------------------
#
# All ranks send to all others at once, as hooks do. Ranks base their decisions on shared numbers
# (:meth:`Wire.shared`), so they issue the same messages.


class Wire:
    """Sends messages between the ranks of a group, and times them.

    Each rank creates one, and all call the same methods in the same order.

    Args:
        group: two or more ranks; None for the default group.
        device: the messages' device; None for the CPU if the group has a backend for it, else CUDA.

    Attributes:
        flows: the group whose connections carry the messages of :meth:`arrivals`.

    Raises:
        RuntimeError, TypeError: as :func:`torch_commhook.collectives.resolve_group`.
        ValueError: as there, or the group has one rank.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None
    ) -> None:
        self.group = resolve_group(group)
        self.ranks: int = self.group.size()
        if self.ranks < 2:
            raise ValueError(
                f"measure_link: group must have two or more ranks, got {self.ranks}: one rank has "
                "no link"
            )
        if device is None:
            device = "cuda" if lacks_cpu(self.group) else "cpu"
        self.device = torch.device(device)
        self.flows = self.group
        self._rank: int = self.group.rank()
        self._memory: dict[str, Tensor] = {}

    def seconds(self, nbytes: int) -> float:
        """The seconds in which this rank sends a message to each other rank and receives theirs.

        That is the time of the bytes and one to two delays: ranks begin at times that differ by up
        to a delay.

        Args:
            nbytes: the bytes of each message.
        """
        total = nbytes * (self.ranks - 1)
        sent, received = self._bytes("sent", total), self._bytes("received", total)
        splits = [nbytes] * self.ranks
        splits[self._rank] = 0
        self.shared(0.0)  # all ranks begin
        begun = time.perf_counter()
        issue_all_to_all(sent, splits, splits, received, self.group).wait()
        self._synchronize()
        return time.perf_counter() - begun

    def trip(self, first: int, second: int, quiet_seconds: float) -> float:
        """The seconds in which a byte goes from ``first`` to ``second`` and back; 0 on other ranks.

        Args:
            first, second: the two ranks.
            quiet_seconds: the time for which the others sleep, since they may share processors.
        """
        ways = [{first: second}, {second: first}]
        if self.device.type == "cpu" and not exchanges(self.group):
            ways = [{first: second, second: first}]  # Gloo's receivers ask for each message
        sent, received = self._bytes("sent", 1), self._bytes("received", 1)
        self.shared(0.0)
        begun = time.perf_counter()
        for way in ways:
            sends = [int(way.get(self._rank) == rank) for rank in range(self.ranks)]
            gets = [int(way.get(rank) == self._rank) for rank in range(self.ranks)]
            issue_all_to_all(
                sent[: sum(sends)], sends, gets, received[: sum(gets)], self.group
            ).wait()
            self._synchronize()
        if self._rank == first:
            return time.perf_counter() - begun
        if self._rank != second:
            time.sleep(quiet_seconds)
        return 0.0

    def arrivals(self, nbytes: int, count: int) -> list[float]:
        """The arrival times of many messages that are under way at once, in order.

        Each rank sends to the opposite rank, which is on another host if consecutive ranks share
        hosts. If ranks exchange messages, there is memory for all of them beforehand.

        Args:
            nbytes: the bytes of each message.
            count: the number of messages that this rank sends, and receives. They take turns on the
                connections.

        Returns:
            Seconds on this rank since a common beginning, which is uncertain by the delay.
        """
        sent = self._bytes("sent", nbytes)
        received = list(self._bytes("received", nbytes * count).view(count, nbytes))
        if self.device.type == "cpu" and exchanges(self.group):
            return self._exchanged(sent, received)
        sends, gets = [0] * self.ranks, [0] * self.ranks
        sends[self._opposite(1)] = gets[self._opposite(-1)] = nbytes
        self.shared(0.0)
        begun = time.perf_counter()
        futures = [issue_all_to_all(sent, sends, gets, row, self.group) for row in received]
        found = []
        for future in futures:
            future.wait()
            self._synchronize()
            found.append(time.perf_counter() - begun)
        return found

    def shared(self, *values: float) -> Tensor:
        """The numbers of all ranks, on each rank: a float64 tensor of shape ``[ranks, values]``."""
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        every = own.new_empty((self.ranks, len(values)))
        rows = [len(values)] * self.ranks
        sent = own.repeat(self.ranks)
        issue_all_to_all(sent, rows, rows, every.flatten(), self.group).wait()
        return every.cpu()

    def _bytes(self, name: str, count: int) -> Tensor:
        """A buffer that later calls use again, so that no message waits for new pages."""
        found = self._memory.get(name)
        if found is None or found.numel() < count:
            self._memory.pop(name, None)  # frees the old buffer first
            found = torch.zeros(count, dtype=torch.uint8, device=self.device)
            self._memory[name] = found
        return found[:count]

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _opposite(self, sign: int) -> int:
        """With ``sign`` 1 the rank that receives this one's flows; with -1 the rank that sends."""
        return (self._rank + sign * (self.ranks // 2)) % self.ranks

    def _exchanged(self, sent: Tensor, received: Sequence[Tensor]) -> list[float]:
        """The arrival times of messages that have an exchange each, in order."""
        none = sent[:0]
        issued = []
        for row in received:
            inputs, outputs = [none] * self.ranks, [none] * self.ranks
            inputs[self._opposite(1)], outputs[self._opposite(-1)] = sent, row
            place = place_in(self.flows)
            place.expect(0, outputs)
            issued.append((place, inputs, outputs))
        self.shared(0.0)  # all ranks have said so, and begin
        found: list[float] = []
        begun = time.perf_counter()

        def came(future: torch.futures.Future[Tensor]) -> None:
            found.append(time.perf_counter() - begun)
            future.value()  # raises if it failed

        futures = [
            place.exchange(0, inputs, outputs, none).then(came) for place, inputs, outputs in issued
        ]
        torch.futures.wait_all(futures)
        return sorted(found)

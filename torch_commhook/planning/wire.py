"""Messages between all ranks of a group, timed.

All ranks send to all others at once, as hooks do. What ranks decide follows from numbers that all
of them know (:meth:`Wire.shared`), so that they issue the same messages.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.collectives.exchange import exchanges, place_in
from torch_commhook.collectives.gloo_groups import lacks_cpu
from torch_commhook.collectives.issuing import issue_all_to_all
from torch_commhook.collectives.plain import resolve_group


class Wire:
    """The ranks of a group, and what they send each other to time it.

    All ranks make one, and call the same methods in the same order.

    Args:
        group: two or more ranks; None for the default group.
        device: of the messages; None for the CPU if the group has a backend for it, else CUDA.

    Attributes:
        groups: over whose connections the messages of :meth:`arrivals` go: the group's, and others
            that are added.

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
        self.groups = [self.group]
        self._rank: int = self.group.rank()
        self._memory: dict[str, Tensor] = {}

    @property
    def others(self) -> int:
        """To how many ranks each one sends."""
        return self.ranks - 1

    @property
    def is_asked(self) -> bool:
        """Whether a receiver asks for each message, which takes the delay once more."""
        return self.device.type == "cpu"

    def seconds(self, nbytes: int) -> float:
        """How long a message to each other rank and one from each take, on this rank.

        On the CPU a receiver asks for its messages first. So this is a round trip, and the time of
        the bytes. It does not matter which rank begins first, if that is by less than the delay.

        Args:
            nbytes: of each message.
        """
        sent, received = self._buffers(nbytes, 1)
        self.shared(0.0)  # all ranks begin
        begun = time.perf_counter()
        self._issue(sent, received[0], [nbytes] * self.ranks).wait()
        self._synchronize()
        return time.perf_counter() - begun

    def trip(self, first: int, second: int, quiet_seconds: float) -> float:
        """How long the smallest message takes from each of two ranks to the other.

        Others send nothing, and get 0.

        Args:
            first, second: ranks.
            quiet_seconds: that the others do nothing, since they may share processors.
        """
        sent, received = self._buffers(1, 1)
        splits = [0] * self.ranks
        if self._rank in (first, second):
            splits[first + second - self._rank] = 1
        count = sum(splits)
        self.shared(0.0)
        begun = time.perf_counter()
        self._issue(sent[:count], received[0][:count], splits).wait()
        self._synchronize()
        if not count:
            time.sleep(quiet_seconds)
            return 0.0
        return time.perf_counter() - begun

    def arrivals(self, nbytes: int, count: int) -> list[float]:
        """When each of many messages has come that are under way at once, in order.

        They go to the opposite rank, which is on another host if consecutive ranks share hosts, and
        come from one. Where ranks exchange messages, receivers have asked for all of them before.

        Args:
            nbytes: of each message.
            count: messages that this rank sends, and gets. They take turns on the connections.

        Returns:
            Seconds on this rank from a common beginning, which is uncertain by the delay.
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
        """A row of numbers from each rank, the same on all: ``[ranks, values]`` in float64."""
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        every = own.new_empty((self.ranks, len(values)))
        rows = [len(values)] * self.ranks
        sent = own.repeat(self.ranks)
        issue_all_to_all(sent, rows, rows, every.flatten(), self.group).wait()
        return every.cpu()

    def _bytes(self, name: str, count: int) -> Tensor:
        """Memory that is kept, so that no message waits for pages."""
        found = self._memory.get(name)
        if found is None or found.numel() < count:
            self._memory.pop(name, None)  # not both at once
            found = torch.zeros(count, dtype=torch.uint8, device=self.device)
            self._memory[name] = found
        return found[:count]

    def _buffers(self, nbytes: int, count: int) -> tuple[Tensor, list[Tensor]]:
        """What goes to the other ranks, and where comes what comes from them, so many times."""
        total = nbytes * self.others
        received = self._bytes("received", total * count).view(count, total)
        return self._bytes("sent", total), list(received)

    def _issue(
        self, sent: Tensor, received: Tensor, splits: list[int]
    ) -> torch.futures.Future[Tensor]:
        """Send so many bytes to each other rank, and get as many from it."""
        splits[self._rank] = 0
        return issue_all_to_all(sent, splits, splits, received, self.group)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _opposite(self, sign: int) -> int:
        """The rank that flows go to, or with -1 the one that they come from."""
        return (self._rank + sign * (self.ranks // 2)) % self.ranks

    def _exchanged(self, sent: Tensor, received: Sequence[Tensor]) -> list[float]:
        """Seconds until each message has come, of which each has an exchange of its own."""
        none = sent[:0]
        issued = []
        for number, row in enumerate(received):
            inputs, outputs = [none] * self.ranks, [none] * self.ranks
            inputs[self._opposite(1)], outputs[self._opposite(-1)] = sent, row
            place = place_in(self.groups[number % len(self.groups)])
            place.expect(0, outputs)
            issued.append((place, inputs, outputs))
        self.shared(0.0)  # all ranks have asked, and begin
        found: list[float] = []
        begun = time.perf_counter()

        def came(future: torch.futures.Future[Tensor]) -> None:
            found.append(time.perf_counter() - begun)
            future.value()  # raises what has failed

        futures = [
            place.exchange(0, inputs, outputs, none).then(came) for place, inputs, outputs in issued
        ]
        torch.futures.wait_all(futures)
        return sorted(found)

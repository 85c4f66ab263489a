"""Messages between all ranks of a group, timed.

All ranks send to all others at once, as hooks do. What ranks decide follows from numbers that all
of them know (:meth:`Wire.shared`), so that they issue the same messages.
"""

from __future__ import annotations

import time

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
        return self._timed(nbytes, 1, asks_before=False)[0]

    def arrivals(self, nbytes: int, count: int) -> list[float]:
        """When each of many messages has come that are under way at once.

        Args:
            nbytes: of each message.
            count: messages to each other rank, and from each.

        Returns:
            Seconds on this rank from a common beginning, which is uncertain by the delay.
        """
        return self._timed(nbytes, count, asks_before=True)

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

    def _timed(self, nbytes: int, count: int, *, asks_before: bool) -> list[float]:
        """Seconds until each of so many messages of all ranks has come."""
        splits = [nbytes] * self.ranks
        splits[self._rank] = 0
        sent = self._bytes("sent", sum(splits))
        received = list(self._bytes("received", sum(splits) * count).view(count, -1))
        places = []
        if asks_before and self.device.type == "cpu" and exchanges(self.group):
            places = [place_in(self.group) for _ in received]
            for place, row in zip(places, received, strict=True):
                place.expect(0, row.split(splits))
        self.shared(0.0)  # all ranks begin
        begun = time.perf_counter()
        if places:
            futures = [
                place.exchange(0, sent.split(splits), row.split(splits), row)
                for place, row in zip(places, received, strict=True)
            ]
        else:
            futures = [issue_all_to_all(sent, splits, splits, row, self.group) for row in received]
        found = []
        for future in futures:
            future.wait()
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            found.append(time.perf_counter() - begun)
        return found

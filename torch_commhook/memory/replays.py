"""Steps that CUDA graphs replay, invisible to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_commhook.collectives.streams import has_streams, is_capturing


class Replays:
    """Counts the steps of a hook that CUDA graphs have run.

    A replayed step runs no Python code. So the captured step adds 1 to a tensor on the device, and
    the host reads it when needed.
    """

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._counter: Tensor | None = None
        self._has_captured = False
        self._before = 0  # of graphs whose captured memory is no longer in use
        # Their counters, the values that these must keep, and the memory that replays still write.
        self._stale: list[tuple[Tensor, int, object]] = []

    def prepare(self, device: torch.device) -> None:
        """Create the tensor, outside of captures: a graph must not own it."""
        if self._counter is None and has_streams(device):
            self._device = device
            with torch.inference_mode(False):
                self._counter = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def is_capturing(self) -> bool:
        """Whether a graph captures the current stream."""
        return self._device is not None and is_capturing(self._device)

    def capture(self) -> None:
        """Let the graph that captures the current stream count each replay.

        Raises:
            RuntimeError: the hook was not prepared for captures.
        """
        if self._counter is None:
            raise RuntimeError(
                "torch_commhook: a CUDA graph can capture a hook only once it is attached; run a "
                "step before the capture"
            )
        self._counter += 1
        self._has_captured = True

    def count(self) -> int:
        """Return the number of replays. Waits for the device if a graph has captured a step.

        Raises:
            RuntimeError: a graph writes memory that the hook no longer uses.
        """
        for counter, value, _ in self._stale:
            if int(counter) != value:
                raise RuntimeError(
                    "torch_commhook: a CUDA graph was replayed that had captured the hook's memory "
                    "before a state was loaded or buckets were rebuilt; the present memory "
                    "misses those steps. Capture the graph again"
                )
        if self._counter is None or not self._has_captured:
            return self._before
        return self._before + int(self._counter)

    def memory_loaded(self, before: object) -> None:
        """Note that memory of another training was loaded; earlier replays do not belong to it.

        Args:
            before: the object with the old memory's tensors.
        """
        self.memory_replaced(before)
        self._stale = [(counter, int(counter), kept) for counter, _, kept in self._stale]

    def memory_replaced(self, before: object) -> None:
        """Note that the hook uses other tensors from now on: graphs must be captured again.

        Args:
            before: the object with the old tensors. Captured graphs may still be replayed, so these
                tensors stay.
        """
        if self._counter is None or not self._has_captured:
            return
        counter, value = self._counter, int(self._counter)
        self._stale.append((counter, value, before))
        self._before += value
        self._counter, self._has_captured = None, False
        if self._device is not None:
            self.prepare(self._device)


def cannot_be_captured(what: str, why: str) -> RuntimeError:
    """The error of a hook whose steps change with a count on the host."""
    return RuntimeError(
        f"{what}: a CUDA graph cannot capture its steps: {why}, and replays run nothing on the host"
    )

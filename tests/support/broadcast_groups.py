"""Process groups that count broadcasts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_commhook import ProcessGroup, Work
from torch_commhook.process_group import WrapperProcessGroup


class Counting(WrapperProcessGroup):
    """Wraps another group; records its broadcasts, and how many are in flight."""

    def __init__(self, parent: dist.ProcessGroup) -> None:
        super().__init__(parent)
        self.sent: list[tuple[torch.dtype, int]] = []
        self.places: list[int] = []
        self.in_flight = self.most_in_flight = 0

    def change_arguments(self, operation: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        assert operation == "broadcast", operation
        ((tensor,), _) = arguments
        assert tensor.dim() == 1 and tensor.is_contiguous() and not tensor.requires_grad
        self.sent.append((tensor.dtype, tensor.numel()))
        self.places.append(tensor.data_ptr())
        return arguments

    def wrap_work(self, operation: str, arguments: tuple[Any, ...], work: Any) -> Any:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return _CountedWork(self, work)

    def bytes_sent(self) -> list[int]:
        return [numel * dtype.itemsize for dtype, numel in self.sent]


class _CountedWork(Work):
    def __init__(self, group: Counting, work: Any) -> None:
        super().__init__()
        self._group = group
        self._work = work

    def wait(self, timeout: timedelta) -> bool:
        done = self._work.wait()
        self._group.in_flight -= 1
        return done


class Alone(ProcessGroup):
    """Broadcasts do nothing; those with numbers in `failing` fail: at once, or in wait."""

    def __init__(self, size: int = 1, failing: dict[int, str] | None = None) -> None:
        super().__init__(0, size)
        self.failing = failing or {}
        self.started = self.waited = 0

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        number = self.started
        if self.failing.get(number) == "start":
            raise KeyError(f"broadcast {number}")
        self.started += 1
        return _AloneWork(self, number)


class _AloneWork(Work):
    def __init__(self, group: Alone, number: int) -> None:
        super().__init__()
        self._group = group
        self._number = number

    def wait(self, timeout: timedelta) -> bool:
        self._group.waited += 1
        if self._group.failing.get(self._number) == "wait":
            raise KeyError(f"wait {self._number}")
        return True

"""A process group behind a link of given bandwidth and latency."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
import torch.distributed as dist

from torch_commhook import _C
from torch_commhook.metrics import tensor_bytes
from torch_commhook.process_group.completion import on_completion
from torch_commhook.process_group.operations import Call, describe
from torch_commhook.process_group.timers import Timers
from torch_commhook.process_group.work import Work, WrapperWork
from torch_commhook.process_group.wrapper import WrapperProcessGroup

_TIMERS = Timers("commhook-throttle")


def link_bytes(call: Call, rank: int, world_size: int) -> int:
    """Bytes that a rank's link carries for an operation, in the direction that carries more."""
    if world_size == 1:
        return 0
    if call.operation in ("broadcast", "reduce", "recv", "recv_anysource"):
        return call.nbytes  # which each rank sends or receives at least once
    if call.operation in ("gather", "gather_single"):
        return call.nbytes * (world_size - 1 if rank == call.root else 1)
    if call.operation == "scatter" and rank != call.root:
        return sum(tensor_bytes(tensor) for tensor in call.outputs)
    return call.bytes_sent(rank, world_size)


def link_messages(call: Call, world_size: int) -> int:
    """Messages that follow one another in an operation, each of which takes the latency."""
    if world_size == 1:
        return 0
    if call.operation.startswith("allreduce"):
        return 2 * (world_size - 1)  # around a ring, twice
    if call.operation.startswith(("allgather", "all_gather", "reduce_scatter")):
        return world_size - 1
    if call.operation in ("broadcast", "reduce", "barrier", "monitored_barrier"):
        return math.ceil(math.log2(world_size))  # down a tree
    return 1 if call.inputs or call.outputs else 0


class ThrottledProcessGroup(WrapperProcessGroup):
    """Leaves everything to another group, and completes as late as a slow link would let it.

    For planning: what a training costs over a link that is not there, without being root. A rank
    has one link, which its operations use one after the other, in the order in which the other
    group completes them; each takes its bytes through the bandwidth and then the latency of its
    messages. So the time of the other group comes on top, and does not matter where that is fast
    (Gloo between processes of a machine).

    A ring is assumed for all-reduce, all-gather and reduce-scatter, and a tree for broadcast,
    reduce and barriers.

    Args:
        parent: the process group that does the work.
        bandwidth: of the link, each way, in bits per second: ``200e6`` for 200 Mbit/s.
        latency: of one message, one way, in seconds.

    Raises:
        TypeError: no process group; no numbers.
        ValueError: a bandwidth that is not positive, or a negative latency.
    """

    def __init__(
        self, parent: dist.ProcessGroup, *, bandwidth: float, latency: float = 0.0
    ) -> None:
        super().__init__(parent)
        for name, value in (("bandwidth", bandwidth), ("latency", latency)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(
                    f"{type(self).__name__}: {name} must be a number, got {_C.type_name(value)}"
                )
        if not bandwidth > 0:
            raise ValueError(
                f"{type(self).__name__}: bandwidth must be above 0 bits per second, got {bandwidth}"
            )
        if not 0 <= latency < math.inf:
            raise ValueError(
                f"{type(self).__name__}: latency must be at least 0 seconds, got {latency}"
            )
        self.bandwidth = float(bandwidth)
        self.latency = float(latency)
        self._lock = threading.Lock()
        self._link_is_free = 0.0

    def run_collective(
        self, operation: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        call = describe(operation, arguments, keywords)
        work = super().run_collective(operation, arguments, keywords)
        if call is None:
            return work
        work = _C.as_work(work)
        carried = link_bytes(call, self.rank(), self.size())
        delay = self.latency * link_messages(call, self.size())
        throttled = _ThrottledWork(self, carried, delay)
        throttled.follow(work, [*call.inputs, *call.outputs])
        if not isinstance(work, dist.Work):  # monitored_barrier has completed
            throttled.wait()
            return work
        return throttled

    def _through_link(self, now: float, nbytes: int) -> float:
        """When so many bytes, ready now, have passed the link, in seconds."""
        with self._lock:
            start = max(now, self._link_is_free)
            self._link_is_free = start + nbytes * 8 / self.bandwidth
            return self._link_is_free


class _ThrottledWork(Work):
    """Complete when the parent's Work is, and the link has carried its bytes."""

    def __init__(self, group: ThrottledProcessGroup, nbytes: int, delay: float) -> None:
        super().__init__()
        self._group, self._nbytes, self._delay = group, nbytes, delay
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._work: Any = None
        self._has_future = True

    def follow(self, work: Any, tensors: list[torch.Tensor]) -> None:
        """Be complete after the parent's Work, where it has one."""
        self._work = work
        observed = on_completion(work, tensors, self._sent)
        if observed is not work:  # which tells when it is waited for
            self._work, self._has_future = observed, False

    def _sent(self, end: float, error: BaseException | None) -> None:
        if error is not None:
            self._complete(error)
            return
        due = self._group._through_link(end, self._nbytes) + self._delay
        if due <= end:
            self._complete()
        else:
            _TIMERS.call_at(due, self._complete)

    def _complete(self, error: BaseException | None = None) -> None:
        if error is not None:
            self._future.set_exception(error)
        elif self._has_future and isinstance(self._work, dist.Work):
            self._future.set_result(self._work.get_future().value())
        else:
            self._future.set_result(None)

    def wait(self, *timeout: Any) -> bool:
        if not self._has_future:
            self._work.wait(*timeout)
        work: dist.Work = _C.as_work(self._future)
        return work.wait(*timeout)

    def source_rank(self) -> int:
        return WrapperWork(self._work).source_rank()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future if self._has_future else self._work.get_future()

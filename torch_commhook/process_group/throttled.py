"""A process group behind a link of given bandwidth and latency.

``ThrottledProcessGroup`` and ``commhook plan`` share one model of a link's cost.
``process_group/operations.py`` lists the messages of each collective of Gloo, and
``process_group/throttled.py`` computes when they arrive. The group runs the model in real time. The
command (``planning/wire.py``) runs it in simulated time, on the calls that a hook makes on a
simulated group. Ranks send messages over the library's transport, which a simulated group cannot
do. So the command replaces these calls by the transport's. Among more than 16 ranks, or on several
nodes, the calls follow from formulas (``planning/formulas.py``); tests compare these with the calls
of simulated ranks, and the numbers of messages and connections with those of processes.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.collectives.gloo_groups import is_gloo, is_gloo_or_own
from torch_commhook.collectives.issuing import FEW_RANKS, Place, issue_unseen
from torch_commhook.metrics import tensor_bytes
from torch_commhook.process_group.operations import (
    EXCHANGE,
    Messages,
    Traffic,
    describe,
    has_a_thread,
    messages_of,
    on_transport,
    traffic_of,
)
from torch_commhook.process_group.work import Timers, Work, WrapperWork, on_completion
from torch_commhook.process_group.wrapper import WrapperProcessGroup
from torch_commhook.wording import check_type

# ---- the times at which Gloo's collectives end on a link of given bandwidth and latency ----------


#: Called with the time of the event, in seconds.
Event = Callable[[float], object]


class SlowLink:
    """A rank's link, which carries one message after another.

    The caller gives the time, in seconds of any clock. Events happen only in :meth:`advance`.

    Args:
        bandwidth: bits per second, each way.
        latency: the latency of a message, one way, in seconds.
        burst: bytes that it carries at once after a sufficient pause.
    """

    def __init__(self, bandwidth: float, latency: float, burst: float = 0.0) -> None:
        self.bandwidth = bandwidth
        self.latency = latency
        self.burst = burst
        #: All events up to this time have happened.
        self.now = 0.0
        #: When the last byte sent so far leaves.
        self.is_free = 0.0
        self._would_be_free = 0.0  # without bursts
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = itertools.count()

    def at(self, when: float, event: Event) -> None:
        """Let :meth:`advance` call ``event(when)``."""
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def next_event(self) -> float | None:
        """The time of the next event, or None."""
        return self._events[0][0] if self._events else None

    def advance(self, until: float) -> None:
        """Call the events up to and including a time."""
        while self._events and self._events[0][0] <= until:
            when, _, event = heapq.heappop(self._events)
            self.now = max(self.now, when)
            event(when)
        self.now = max(self.now, until)

    def finish(self) -> None:
        """Call all events, including those that events add."""
        while self._events:
            self.advance(self._events[0][0])

    def carry(self, when: float, nbytes: float) -> float:
        """Send bytes behind all earlier ones. Returns the time when the last byte leaves."""
        self._would_be_free = max(when, self._would_be_free) + nbytes * 8 / self.bandwidth
        self.is_free = max(when, self._would_be_free - self.burst * 8 / self.bandwidth)
        return self.is_free


class GlooGroup:
    """A group of ranks over Gloo, seen from one rank.

    Args:
        link: this rank's link. Other groups may use it too.
        threads: the number of collectives that run at once; others wait in order.
    """

    def __init__(self, link: SlowLink, threads: int) -> None:
        self.link = link
        self.threads = threads
        self._running = 0
        self._waiting: deque[tuple[Sequence[Messages], Event]] = deque()

    def issue(
        self, when: float, parts: Sequence[Messages], done: Event, *, has_thread: bool = True
    ) -> None:
        """Begin a collective at a time that :meth:`SlowLink.advance` has not passed.

        ``done`` is called with the time of its end; that is ``when`` if there are no parts.
        """
        if has_thread:
            self._waiting.append((parts, done))
            self._begin_next(when)
        else:
            _Collective(self.link, parts, done).begin(when)

    def _begin_next(self, when: float) -> None:
        while self._waiting and self._running < self.threads:
            parts, done = self._waiting.popleft()
            self._running += 1
            _Collective(self.link, parts, self._ended(done)).begin(when)

    def _ended(self, done: Event) -> Event:
        def ended(when: float) -> None:
            self._running -= 1
            self._begin_next(when)
            done(when)

        return ended


class _Collective:
    """The messages of one collective."""

    def __init__(self, link: SlowLink, parts: Sequence[Messages], done: Event) -> None:
        self._link = link
        self._parts = deque(parts)
        self._done = done

    def begin(self, when: float) -> None:
        """Begin the next part, or end."""
        while self._parts and self._parts[0].count == 0:
            self._parts.popleft()
        if not self._parts:
            self._link.at(when, self._done)
            return
        self._part = self._parts.popleft()
        self._latency = self._part.latencies * self._link.latency
        self._begun = self._ended = 0
        for _ in range(min(self._part.at_once, self._part.count)):
            self._request(when)

    def _request(self, when: float) -> None:
        self._begun += 1
        if not self._part.is_requested:
            self._link.at(when, self._send)
            return
        leaves = when
        if self._part.shares_connection:
            leaves = max(when, self._link.is_free)
        self._link.at(leaves + self._latency, self._send)

    def _send(self, when: float) -> None:
        leaves = self._link.carry(when, self._part.nbytes)
        self._link.at(leaves + self._latency, self._arrive)

    def _arrive(self, when: float) -> None:
        self._ended += 1
        if self._begun < self._part.count:
            self._request(when)
        elif self._ended == self._part.count:
            self.begin(when)


# ---- a process group behind a link of given bandwidth and latency --------------------------------


_TIMERS = Timers("commhook-throttle")


class _ClockedLink:
    """A :class:`SlowLink` in real time: a timer runs its next event when it is due."""

    def __init__(self, bandwidth: float, latency: float, burst: float) -> None:
        self.link = SlowLink(bandwidth, latency, burst)
        self._lock = threading.Lock()
        self._ended: list[Callable[[], object]] = []
        #: The times of the timers that are set, the next one last. No timer is set for a later time
        #: than an earlier one, so the earliest runs first.
        self._wakes = [math.inf]

    def issue(
        self, group: GlooGroup, when: float, traffic: Traffic, done: Callable[[], object]
    ) -> None:
        """Call ``done()`` once the link has carried bytes that were ready at a time, in seconds."""
        with self._lock:
            start = max(when, self.link.now)
            self.link.advance(start)
            parts, end = messages_of(traffic), lambda _: self._ended.append(done)
            group.issue(start, parts, end, has_thread=has_a_thread(traffic))
        self._go_on()

    def _go_on(self) -> None:
        with self._lock:
            self.link.advance(max(_C.steady_seconds(), self.link.now))
            ended, self._ended = self._ended, []
            due = self.link.next_event()
            if due is not None and due < self._wakes[-1]:
                self._wakes.append(due)
                _TIMERS.call_at(due, self._wake)
        for each in ended:  # may issue more
            try:
                each()
            except Exception as error:  # others wait for the rest
                _C.report_unraisable(error, each)

    def _wake(self) -> None:
        with self._lock:
            self._wakes.pop()
        self._go_on()


class ThrottledProcessGroup(WrapperProcessGroup):
    """A process group around another one that completes as late as over a slow link.

    Use it to plan: it shows the time of a training over a link that you do not have, without root
    rights. Each rank has one link. Operations start on it in the order in which the parent
    completes them, and take as long as Gloo's do. Each message of a collective puts its bytes on
    the link, then takes the latency, and waits for the messages that Gloo waits for
    (``operations.py``). At most as many collectives run at once as the group has threads. The
    parent's own time comes on top; it is negligible if the parent is fast (Gloo between processes
    of one machine).

    Hooks treat a group around Gloo's as they treat Gloo's own, and the ranks agree at the end of
    each step.

    Args:
        parent: the process group that does the work.
        bandwidth: the link's bandwidth each way, in bits per second: ``200e6`` for 200 Mbit/s.
        latency: the latency of one message, one way, in seconds: half of a round trip.
        burst: bytes that the link carries at once after a pause, like a link with a token bucket. 0
            for a wire.
        threads: the number of collectives that run at once. None means that of a Gloo group, or two
            around other groups.

    Raises:
        TypeError: ``parent`` is not a process group, or another argument no number.
        ValueError: ``bandwidth`` or ``threads`` is not positive, or ``latency`` or ``burst`` is
            negative.

    Example:
        >>> def reduce(rank):
        ...     world = dist.group.WORLD
        ...     group = process_group.ThrottledProcessGroup(world, bandwidth=1e9, latency=0.001)
        ...     values = torch.ones(2)
        ...     group.allreduce([values]).wait()
        ...     return values
        >>> run_ranks(reduce, 2)[0]
        tensor([2., 2.])
    """

    def __init__(
        self,
        parent: dist.ProcessGroup,
        *,
        bandwidth: float,
        latency: float = 0.0,
        burst: float = 0.0,
        threads: int | None = None,
    ) -> None:
        super().__init__(parent)
        where = f"{type(self).__name__}:"
        for name, value in (("bandwidth", bandwidth), ("latency", latency), ("burst", burst)):
            check_type(f"{where} {name}", value, "a number", int, float)
        if not bandwidth > 0:
            raise ValueError(f"{where} bandwidth must be above 0 bits per second, got {bandwidth}")
        for name, value, unit in (("latency", latency, "seconds"), ("burst", burst, "bytes")):
            if not 0 <= value < math.inf:
                raise ValueError(f"{where} {name} must be at least 0 {unit}, got {value}")
        check_type(f"{where} threads", threads, "an int or None", int, NoneType)
        if threads is not None and threads < 1:
            raise ValueError(f"{where} threads must be at least 1, got {threads}")
        try:
            self.bandwidth, self.latency, self.burst = map(float, (bandwidth, latency, burst))
        except OverflowError:
            contract = "bandwidth, latency and burst must fit into a float"
            raise ValueError(f"{where} {contract}") from None
        self.threads = _threads_of(parent) if threads is None else threads
        self._use(_ClockedLink(self.bandwidth, self.latency, self.burst))
        if is_gloo_or_own(parent):
            # As for the parent itself; see StepGroup.
            self._commhook_agrees = self._commhook_shares_used = True
            self._commhook_has_places = True

    def _settings_text(self) -> str:
        text = f"bandwidth={self.bandwidth:g}, latency={self.latency:g}"
        return f"{text}, burst={self.burst:g}" if self.burst else text

    def _use(self, link: _ClockedLink) -> None:
        self._link = link
        self._model = GlooGroup(link.link, self.threads)

    def run_collective(
        self, operation: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        call = describe(operation, arguments, keywords)
        device = call.tensors[0].device if call.tensors else torch.device("cpu")
        issue = super().run_collective
        work = issue_unseen(lambda: issue(operation, arguments, keywords), device)
        work = _C.as_work(work)
        traffic = traffic_of(call, self.rank(), self.size())
        throttled = _ThrottledWork(self._link, self._model, traffic, work, call.tensors)
        if not isinstance(work, dist.Work):  # monitored_barrier has completed
            throttled.wait()
            return work
        return throttled

    def _commhook_place(self, order: int) -> Place:
        """See :func:`torch_commhook.collectives.issuing.place_in`."""
        return _ThrottledPlace(self, order)


class _ThrottledPlace(Place):
    """A place in an order of the parent, whose messages also take time on the link."""

    def __init__(self, group: ThrottledProcessGroup, order: int) -> None:
        super().__init__(group.parent, order)
        self._link, self._model = group._link, group._model
        self._ranks: int = group.size()

    def exchange(
        self, stage: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor], result: Tensor
    ) -> torch.futures.Future[Tensor]:
        nbytes = sum(tensor_bytes(tensor) for tensor in inputs)
        sent = nbytes - tensor_bytes(inputs[self.rank])
        received = sum(tensor_bytes(tensor) for tensor in outputs)
        received -= tensor_bytes(outputs[self.rank])
        traffic = Traffic(EXCHANGE, self._ranks, nbytes, max(sent, received))
        return self._throttled(traffic, super().exchange(stage, inputs, outputs, result), result)

    def gather(
        self, own: Tensor, outputs: Sequence[Tensor], result: Tensor
    ) -> torch.futures.Future[Tensor]:
        gathered = super().gather(own, outputs, result)
        if self._ranks <= FEW_RANKS:  # an exchange
            return gathered
        traffic = Traffic("all_gather_single", self._ranks, tensor_bytes(own), 0.0)
        return self._throttled(on_transport(traffic), gathered, result)

    def reduce(
        self, tensor: Tensor, *, takes_maximum: bool = False
    ) -> torch.futures.Future[Tensor]:
        traffic = on_transport(Traffic("allreduce", self._ranks, tensor_bytes(tensor), 0.0))
        reduced = super().reduce(tensor, takes_maximum=takes_maximum)
        return self._throttled(traffic, reduced, tensor)

    def _throttled(
        self, traffic: Traffic, future: torch.futures.Future[Tensor], result: Tensor
    ) -> torch.futures.Future[Tensor]:
        work = _C.as_work(future)
        return _ThrottledWork(self._link, self._model, traffic, work, [result]).get_future()


#: The library's own groups run any number of collectives at once.
_MANY = 1 << 20


def _threads_of(group: dist.ProcessGroup) -> int:
    """The number of collectives that a group runs at once; 2 if it is unknown."""
    if not is_gloo(group):
        return _MANY if is_gloo_or_own(group) else 2
    options: Any = group._get_backend(torch.device("cpu")).options
    return int(getattr(options, "_threads", _MANY))


class _ThrottledWork(Work):
    """Completes when the parent's Work has completed and the link has carried its bytes."""

    def __init__(
        self, link: _ClockedLink, model: GlooGroup, traffic: Traffic, work: Any, tensors: Any
    ) -> None:
        super().__init__()
        self._link, self._model, self._traffic = link, model, traffic
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._work, self._has_future = work, True
        observed = on_completion(work, tensors, self._sent)
        if observed is not work:  # it reports completion only when it is waited for
            self._work, self._has_future = observed, False

    def _sent(self, end: float, error: BaseException | None) -> None:
        if error is not None:
            self._complete(error)
            return
        self._link.issue(self._model, end, self._traffic, self._complete)

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

"""ThrottledProcessGroup: works complete when the link would have carried them, and not before.

Round trips of Gloo's messages are those that were measured over links of 100 ms between namespaces.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_doubles import DoneWork, completed, wait_until
from mode_cases import backward_step, equal, small_model
from on_ranks import on_processes
from torch.nn.parallel import DistributedDataParallel as DDP

import torch_commhook
from torch_commhook.collectives.issuing import place_in
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.process_group import ProcessGroup, ThrottledProcessGroup, register, throttled
from torch_commhook.process_group.operations import (
    COLLECTIVES,
    EXCHANGE,
    SUM,
    Messages,
    Traffic,
    describe,
    has_a_thread,
    link_bytes,
    merged,
    messages_of,
    traffic_of,
)
from torch_commhook.process_group.throttled import GlooGroup, SlowLink

MEGABYTE = torch.zeros(250_000)  # 8 Mbit


class Parent(ProcessGroup):
    def __init__(self, size: int = 2) -> None:
        super().__init__(0, size)
        self.error: Exception | None = None

    def _done(self, tensors: Any, opts: Any = None) -> Any:
        if self.error is None:
            return completed(tensors)
        future: torch.futures.Future = torch.futures.Future()
        future.set_exception(self.error)
        return future

    allreduce = broadcast = _done

    def barrier(self, opts: Any = None) -> Any:
        return self._done([])

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        return DoneWork()

    def monitored_barrier(self, *arguments: Any) -> None:
        pass


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@pytest.mark.parametrize("by_future", [False, True])
def test_bandwidth(by_future: bool) -> None:
    group = ThrottledProcessGroup(Parent(), bandwidth=80e6)
    start = time.perf_counter()
    work = group.allreduce([MEGABYTE])
    _ = work.get_future().wait() if by_future else work.wait()
    assert time.perf_counter() - start >= 0.09  # 8 Mbit at 80 Mbit/s
    assert work.is_completed() and work.is_success()
    assert work.get_future().value()[0] is MEGABYTE


def test_contention() -> None:
    """Two at once take as long as one after the other."""
    group = ThrottledProcessGroup(Parent(), bandwidth=160e6)
    start = time.perf_counter()
    works = [group.allreduce([MEGABYTE]) for _ in range(3)]
    works[2].wait()
    assert time.perf_counter() - start >= 0.14  # 3 times 50 ms
    assert all(work.is_completed() for work in works)


def test_latency_of_messages() -> None:
    group = ThrottledProcessGroup(Parent(size=4), bandwidth=1e15, latency=0.01)
    # 6 messages around a ring, each with a request
    assert seconds(lambda: group.allreduce([torch.zeros(1)]).wait()) >= 0.119
    assert seconds(lambda: group.barrier().wait()) >= 0.039
    assert seconds(group.monitored_barrier) >= 0.059


def test_work_without_a_future() -> None:
    group = ThrottledProcessGroup(Parent(), bandwidth=160e6)
    assert seconds(lambda: group.recv([MEGABYTE], 1, 0).wait()) >= 0.045


def test_it_is_not_completed_before() -> None:
    work = ThrottledProcessGroup(Parent(), bandwidth=8e3).allreduce([MEGABYTE])  # 1000 s
    assert not work.is_completed()


def test_errors_come_at_once() -> None:
    parent = Parent()
    parent.error = OSError("cable")
    work = ThrottledProcessGroup(parent, bandwidth=1.0).allreduce([MEGABYTE])
    with pytest.raises(OSError, match="cable"):
        work.wait()
    assert work.is_completed() and not work.is_success()


def test_a_timeout_is_kept() -> None:
    group = ThrottledProcessGroup(Parent(), bandwidth=8e6)
    work = group.allreduce([MEGABYTE])
    with pytest.raises(TimeoutError):
        work.wait(timedelta(seconds=0.02))
    assert work.wait()


def test_a_wait_beyond_all_limits_stops_no_other() -> None:
    """Python's own limit for a wait is an OverflowError."""
    never = ThrottledProcessGroup(Parent(), bandwidth=1e-6).allreduce([MEGABYTE])
    assert ThrottledProcessGroup(Parent(), bandwidth=800e6).allreduce([MEGABYTE]).wait()
    assert not never.is_completed()
    for _, number, _ in list(throttled._TIMERS._pending):  # or the thread would stay
        throttled._TIMERS.cancel(number)


def test_timers_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of a thousand seconds has one timer, however many small ones come meanwhile."""
    now, timers, numbers = 0.0, [], itertools.count()

    def call_at(when: float, function: Callable[[], object]) -> None:
        heapq.heappush(timers, (when, next(numbers), function))

    monkeypatch.setattr(throttled, "_C", SimpleNamespace(steady_seconds=lambda: now))
    monkeypatch.setattr(throttled, "_TIMERS", SimpleNamespace(call_at=call_at))
    link = throttled._ClockedLink(8e3, 0.01, 0.0)  # 1000 bytes a second
    group = GlooGroup(link.link, 2)
    ended: list[int] = []
    for number in range(100):
        now = 0.1 * number
        nbytes = 1.0 if number else 1e6
        link.issue(group, now, Traffic("send", 3, nbytes, nbytes), lambda: ended.append(1))
        while timers and timers[0][0] <= now + 0.05:
            now, _, function = heapq.heappop(timers)
            function()
    assert len(timers) == 1
    while timers:
        now, _, function = heapq.heappop(timers)
        function()
        assert len(timers) <= 1
    assert len(ended) == 100


def test_no_thread_stays() -> None:
    ThrottledProcessGroup(Parent(), bandwidth=800e6).allreduce([MEGABYTE]).wait()
    wait_until(lambda: not any(t.name == "commhook-throttle" for t in threading.enumerate()))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_bytes_on_the_link(size: int) -> None:
    """What any rank must send or receive, whichever is more."""
    x, all_of_it = torch.zeros(8), torch.zeros(8 * size)

    def carried(operation: str, *arguments: Any, rank: int = 0) -> int:
        call = describe(operation, arguments, {})
        assert call is not None
        return link_bytes(call, rank, size)

    others = size - 1
    root = dist.GatherOptions()
    root.rootRank = 0
    assert carried("allreduce", [x], None) == round(2 * 32 * others / size)
    assert carried("all_gather_single", all_of_it, x) == 32 * others
    assert carried("reduce_scatter_single", x, all_of_it) == 32 * others
    assert carried("broadcast", [x]) == (32 if size > 1 else 0)
    assert carried("gather", [[x] * size], [x], root) == 32 * others
    assert carried("gather", [], [x], root, rank=size - 1) == (32 if others else 0)
    assert carried("all_to_all_single", x, x, [], []) == 32 * others // size
    assert carried("barrier") == 0


@pytest.mark.parametrize(
    "options, error",
    [
        ({"bandwidth": 0}, "bandwidth must be above 0 bits per second, got 0"),
        ({"bandwidth": float("nan")}, "bandwidth must be above 0"),
        ({"bandwidth": "1"}, "bandwidth must be a number, got str"),
        ({"bandwidth": 1, "latency": -1}, "latency must be at least 0 seconds, got -1"),
        ({"bandwidth": 1, "burst": -1}, "burst must be at least 0 bytes, got -1"),
        ({"bandwidth": 1, "threads": 0}, "threads must be at least 1, got 0"),
        ({"bandwidth": 1, "threads": 2.0}, "threads must be an int or None, got float"),
    ],
)
def test_bad_arguments(options: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"ThrottledProcessGroup: {error}"):
        ThrottledProcessGroup(Parent(), **options)


# ---- hooks over it -------------------------------------------------------------------------------


class _Noting(throttled._ClockedLink):
    def __init__(self) -> None:
        super().__init__(1e12, 1e-5, 0.0)
        self.issued: list[tuple[GlooGroup, Traffic]] = []

    def issue(
        self, group: GlooGroup, when: float, traffic: Traffic, done: Callable[[], object]
    ) -> None:
        self.issued.append((group, traffic))
        super().issue(group, when, traffic, done)


def _throttled(parent: Any) -> tuple[ThrottledProcessGroup, _Noting]:
    group = ThrottledProcessGroup(parent, bandwidth=1e12, latency=1e-5)
    link = _Noting()
    group._use(link)
    register(group, "throttled")
    return group, link


@on_processes
@pytest.mark.parametrize(
    ("text", "has_seconds"),
    [
        ("allreduce()", False),
        ("topk(0.1)", False),
        ("blockwise()", True),
        ("error_feedback(blockwise(bits=4))", True),
        ("powersgd(rank=1)", True),
    ],
)
def test_stages_are_on_one_link(rank: int, text: str, has_seconds: bool) -> None:
    """Ranks exchange messages as over Gloo, which has a thread for none of them."""
    parent = dist.new_group()
    group, link = _throttled(parent)
    found = []
    for process_group in (group, parent):
        model = small_model(process_group=process_group)
        handle = torch_commhook.attach(model, parse_hook(text))
        for _ in range(3):
            begun = len(link.issued)
            gradients = backward_step(model, rank)
        found.append(gradients)
        if process_group is group:
            issued = [traffic.operation for _, traffic in link.issued[begun:]]
            assert group._model.threads == 2  # as PyTorch's groups have
        handle.remove()
    assert equal(*found)
    assert issued.pop() == SUM  # last the ranks agree
    sums = text in ("allreduce()", "powersgd(rank=1)")
    assert set(issued) == ({SUM} if sums else {EXCHANGE})
    buckets, left = divmod(len(issued), 2 if has_seconds else 1)
    assert buckets > 1 and not left


@on_processes
def test_large_messages_are_exchanged(rank: int) -> None:
    parent = dist.new_group()
    group, link = _throttled(parent)
    gradients = []
    for process_group in (group, parent):
        torch.manual_seed(0)
        layer = torch.nn.Linear(600, 600, bias=False)
        model = DDP(layer, process_group=process_group)
        handle = torch_commhook.attach(model, parse_hook("blockwise()"))
        model(torch.randn(4, 600, generator=torch.Generator().manual_seed(rank))).sum().backward()
        gradients.append(layer.weight.grad)
        handle.remove()
    assert torch.equal(*gradients)
    operations = [traffic.operation for _, traffic in link.issued[-3:]]
    assert operations == [EXCHANGE, EXCHANGE, SUM]


@on_processes
def test_an_uneven_exchange_takes_its_longer_direction(rank: int) -> None:
    """Rank 0 sends 10 bytes and gets 1000."""
    group, link = _throttled(dist.new_group())
    sizes = (10, 1000) if rank == 0 else (1000, 10)
    sent, received = (torch.zeros(size, dtype=torch.uint8) for size in sizes)
    kept = torch.zeros(5, dtype=torch.uint8)
    inputs, outputs = [sent, sent], [received, received]
    inputs[rank] = outputs[rank] = kept
    place_in(group).exchange(0, inputs, outputs, received).wait()
    ((_, traffic),) = link.issued
    assert (traffic.ranks, traffic.nbytes, traffic.carried) == (2, 5 + sizes[0], 1000)


# ---- messages of Gloo's collectives, in simulated time -------------------------------------------


SMALL = 8192.0
#: A round trip in half-seconds, so that times are counts of round trips.
HALF = 0.5


def call(operation: str, ranks: int, nbytes: float = SMALL, is_root: bool = True) -> Traffic:
    return Traffic(operation, ranks, nbytes, nbytes * (ranks - 1) / ranks, is_root)


def latencies(parts: Sequence[Messages]) -> float:
    """How often a collective of small messages waits for the latency: twice in a round trip."""
    return sum(
        math.ceil(each.count / each.at_once) * each.latencies * (1 + each.is_requested)
        for each in parts
    )


def elapsed(
    chains: Sequence[Sequence[Traffic]],
    *,
    threads: int = 2,
    bandwidth: float = math.inf,
    latency: float = HALF,
) -> float:
    """Seconds until all chains are through; in each, calls follow one another."""
    link = SlowLink(bandwidth, latency)
    first, second = (GlooGroup(link, threads) for _ in range(2))
    ends: list[float] = []

    def go_on(when: float, chain: Sequence[Traffic], group: GlooGroup) -> None:
        if not chain:
            ends.append(when)
            return
        parts, has_thread = messages_of(chain[0]), has_a_thread(chain[0])
        group.issue(when, parts, lambda end: go_on(end, chain[1:], second), has_thread=has_thread)

    for chain in chains:
        go_on(0.0, chain, first)
    link.finish()
    assert len(ends) == len(chains)
    return max(ends)


@pytest.mark.parametrize(
    ("operation", "round_trips"),
    [
        ("allreduce", {2: 2, 3: 4, 4: 6, 8: 14}),
        ("allreduce_coalesced", {2: 2, 4: 6}),
        ("reduce_scatter_single", {2: 2, 4: 6}),
        ("reduce", {2: 2, 4: 4}),
        ("all_gather_single", {2: 1, 3: 2, 4: 3, 8: 7}),
        ("allgather", {2: 1, 4: 3}),
        ("all_to_all_single", {2: 1, 4: 1, 8: 1}),
        (EXCHANGE, {2: 0.5, 4: 0.5}),
        ("alltoall", {2: 1, 8: 1}),
        ("broadcast", {2: 1, 3: 1.5, 4: 1.5, 8: 2}),
        ("gather", {2: 1, 4: 1}),
        ("scatter", {2: 1, 4: 1}),
        ("barrier", {2: 1, 3: 2, 4: 2, 8: 3}),
        ("monitored_barrier", {2: 1, 4: 3}),
        ("send", {2: 1, 8: 1}),
        ("recv", {2: 1, 8: 1}),
    ],
)
def test_round_trips(operation: str, round_trips: dict[int, float]) -> None:
    for ranks, expected in round_trips.items():
        assert elapsed([[call(operation, ranks)]]) == expected
        assert latencies(messages_of(call(operation, ranks))) == 2 * expected
        assert elapsed([[call(operation, ranks, is_root=False)]]) == expected


def test_an_all_reduce_of_a_byte_goes_around_once() -> None:
    for ranks in (2, 4, 8):
        assert elapsed([[call("allreduce", ranks, 1.0)]]) == ranks - 1


def test_alone_nothing_travels() -> None:
    for operation in COLLECTIVES:
        assert messages_of(call(operation, 1)) == []


def test_every_collective_has_messages() -> None:
    unknown = {each for each in COLLECTIVES if not messages_of(call(each, 2))}
    assert unknown == {"end_coalescing"}


@pytest.mark.parametrize(
    ("ranks", "ddp", "blockwise", "topk", "powersgd"), [(2, 26, 14, 13, 28), (8, 182, 92, 91, 196)]
)
def test_a_step_of_25_buckets(
    ranks: int, ddp: int, blockwise: int, topk: int, powersgd: int
) -> None:
    """Two collectives at a time in a group; those that follow have another one."""
    of_all, gathered = call("allreduce", ranks), call("all_gather_single", ranks)
    exchanged = call("all_to_all_single", ranks)
    assert elapsed([[of_all]] * 25) == ddp
    assert elapsed([[exchanged, gathered]] * 25) == blockwise
    assert elapsed([[gathered]] * 25) == topk
    assert elapsed([[of_all, of_all]] * 25) == powersgd


@pytest.mark.parametrize(("threads", "round_trips"), [(1, 50), (2, 26), (8, 8), (25, 2)])
def test_as_many_collectives_at_once_as_threads(threads: int, round_trips: int) -> None:
    assert elapsed([[call("allreduce", 2)]] * 25, threads=threads) == round_trips


def test_messages_between_two_ranks_take_no_thread() -> None:
    for operation, round_trips in (("send", 1), (EXCHANGE, 0.5)):
        assert elapsed([[call(operation, 4)]] * 25, threads=1) == round_trips


@pytest.mark.parametrize("operation", ["allreduce", "all_gather_single", "all_to_all_single"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_without_latency_only_bytes_count(operation: str, ranks: int) -> None:
    tensor, out = torch.zeros(3_000_000 * ranks), torch.zeros(1)
    if operation == "all_gather_single":
        tensor, out = tensor[:3_000_000], tensor
    arguments = ([tensor],) if operation == "allreduce" else (out, tensor)
    described = describe(operation, arguments, {})
    assert described is not None
    traffic = traffic_of(described, 0, ranks)
    expected = 3 * traffic.carried * 8 / 1e9
    found = elapsed([[traffic]] * 3, bandwidth=1e9, latency=0.0)
    assert found == pytest.approx(expected, rel=1e-6)


def test_large_messages_hide_round_trips_of_others() -> None:
    """An all-reduce of 16 MiB on two ranks has two rounds of 8 segments of 1 MiB, two at a time."""
    large = call("allreduce", 2, 16 * (1 << 20))
    assert [each.count for each in messages_of(large)] == [8, 8]
    assert elapsed([[large]]) == 8  # without a rate, a round trip for two segments
    segment = 0.25
    rate = (1 << 20) * 8 / segment
    # 16 segments. Before two each request comes alone, behind those segments that are on their way.
    alone = elapsed([[large]], bandwidth=rate, latency=0.1)
    assert alone == pytest.approx(16 * segment + 2 * (2 * 0.1) + 2 * 3 * 0.1)
    # Of two at a time, each one's requests wait while the other one's segments travel.
    both = elapsed([[large]] * 2, bandwidth=rate, latency=0.1)
    assert 32 * segment < both < 32 * segment + 10 * 0.1


def test_messages_of_many_ranks_are_merged() -> None:
    for traffic in (call("allreduce", 1000, 1e9), call("all_to_all_single", 1000, 1e9)):
        parts = messages_of(traffic)
        fewer = merged(parts, 10)
        assert all(each.count == max(10, each.at_once) for each in fewer)
        assert latencies(fewer) == pytest.approx(latencies(parts))
        for one, other in zip(parts, fewer, strict=True):
            assert one.count * one.nbytes == pytest.approx(other.count * other.nbytes)
        times = []
        for each in (parts, fewer):
            link = SlowLink(1e9, 0.05)
            GlooGroup(link, 2).issue(0.0, each, times.append)
            link.finish()
        assert times[1] == pytest.approx(times[0], rel=0.05)
        assert merged(parts, 10_000) == parts


def test_messages_follow_their_requests() -> None:
    """Three ranks' requests travel beside their messages; those of two ranks behind them."""
    ends: list[float] = []
    for shares_connection in (False, True):
        parts = [Messages(4, 125.0, at_once=2, shares_connection=shares_connection)]
        link = SlowLink(1000.0, 0.25)  # a message takes a second
        GlooGroup(link, 1).issue(0.0, parts, ends.append)
        link.finish()
    # Messages end at 1.5 and 2.5. The third is asked for at 1.5, and begins at 2.5 at the latest,
    # but where its request is behind the second, which is on the link until then.
    assert ends == [0.5 + 4 + 0.0, 0.5 + 4 + 0.25]


def test_collectives_of_two_ranks_share_a_connection() -> None:
    for ranks in (2, 3):
        for operation in ("allreduce", "reduce", "broadcast", "all_to_all_single", "send"):
            parts = messages_of(call(operation, ranks))
            assert {each.shares_connection for each in parts} == {ranks == 2}
        (exchanged,) = messages_of(call(EXCHANGE, ranks))
        assert not exchanged.shares_connection


def test_a_pause_lets_a_burst_follow() -> None:
    link = SlowLink(8.0, 0.0, burst=3.0)  # a byte takes a second
    assert link.carry(10.0, 2.0) == 10.0
    assert link.carry(10.0, 2.0) == 11.0  # three of four bytes were the burst
    assert link.carry(12.0, 4.0) == 15.0  # since when one more has come together
    assert link.carry(100.0, 5.0) == 102.0
    assert SlowLink(8.0, 0.0).carry(100.0, 5.0) == 105.0


def test_a_collective_begins_when_one_has_ended() -> None:
    link = SlowLink(math.inf, 1.0)
    group = GlooGroup(link, 1)
    ends: list[float] = []
    one = [Messages(1, 0.0)]
    group.issue(0.0, one, ends.append)
    group.issue(0.0, one, ends.append)
    assert link.next_event() == 1.0
    link.advance(1.0)
    assert ends == [] and link.now == 1.0
    link.advance(2.0)
    assert ends == [2.0]
    link.advance(3.5)
    assert (ends, link.now, link.next_event()) == ([2.0], 3.5, 4.0)
    group.issue(3.5, [], ends.append)
    link.finish()
    assert ends == [2.0, 4.0, 4.0]
    assert link.next_event() is None

"""The messages of Gloo's collectives, and a link in simulated time: counts and times, exactly.

Round trips are those that were measured over links of 100 ms between namespaces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from torch_commhook.process_group.gloo_messages import (
    EXCHANGE,
    EXPECTED,
    Messages,
    Traffic,
    has_a_thread,
    merged,
    messages_of,
    traffic_of,
)
from torch_commhook.process_group.operations import COLLECTIVES, describe
from torch_commhook.process_group.slow_link import GlooGroup, SlowLink

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
        issue = group.issue if has_a_thread(chain[0]) else group.send
        issue(when, messages_of(chain[0]), lambda end: go_on(end, chain[1:], second))

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
        (EXCHANGE, {2: 1, 4: 1}),
        (EXPECTED, {2: 0.5, 4: 0.5}),
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
    ("ranks", "ddp", "blockwise", "topk", "powersgd"),
    [(2, 26, 14, 13, 28), (8, 182, 92, 91, 196)],
)
def test_a_step_of_25_buckets(
    ranks: int, ddp: int, blockwise: int, topk: int, powersgd: int
) -> None:
    """Two collectives at a time in a group, and a group for second stages."""
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
    for operation, round_trips in (("send", 1), (EXCHANGE, 1), (EXPECTED, 0.5)):
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
        for operation in (EXCHANGE, EXPECTED):
            (exchanged,) = messages_of(call(operation, ranks))
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

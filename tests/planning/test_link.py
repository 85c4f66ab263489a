"""Measured links, of made-up times and of a throttled group; the file that ``bench`` writes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import of_all_ranks, on_processes, on_ranks
from wire_ranks import WireRanks

from torch_commhook import MeasuredLink, measure_link
from torch_commhook.collectives.gloo_groups import state_of
from torch_commhook.planning import LinkFile
from torch_commhook.planning.link_file import CodecSpeed, CollectiveTime, HookTime, Message
from torch_commhook.process_group import ThrottledProcessGroup
from torch_commhook.step import link as step_link
from torch_commhook.step.link import (
    Flow,
    Link,
    Wire,
    is_steady,
    measure,
    measure_rate,
    measure_round_trip,
    pairs_of,
    steady_rate,
)
from torch_commhook.testing import run_ranks

PAYLOAD = 1448 / 1514
RATE = 1e6  # bytes per second
NBYTES = 10_000


def arrivals(delay: float, burst: int = 0, count: int = 40) -> list[float]:
    """When messages come over a link of ``RATE``, of which the first are there at once."""
    return [delay + max(0, number + 1 - burst) * NBYTES / RATE for number in range(count)]


# ---- made-up times -------------------------------------------------------------------------------


SLOW_START = [0.02 * number for number in range(5)]
PAUSE = [when + 0.01 if number == 20 else when for number, when in enumerate(arrivals(0.0))]


@pytest.mark.parametrize(
    ("times", "round_trip", "tolerance"),
    [
        *((arrivals(delay), 2 * delay, 1e-6) for delay in (0.0, 0.002, 0.02)),
        (arrivals(0.01, burst=8), 0.1, 0.05),
        (SLOW_START + [when + 0.08 for when in arrivals(0.0, count=200)], 0.01, 0.03),
        (PAUSE, 0.1, 0.02),
    ],
    ids=["no delay", "2 ms", "20 ms", "burst", "slow start", "pause of one message"],
)
def test_a_rate_is_that_of_the_link(
    times: list[float], round_trip: float, tolerance: float
) -> None:
    assert Flow(NBYTES, times).rate(round_trip) == pytest.approx(RATE, rel=tolerance)


def test_a_rank_that_did_not_run_sees_no_faster_link() -> None:
    """All that has come in half of the time is there at once when it runs again."""
    first, *others = arrivals(0.005)
    late = [first, *(max(when, 0.2) for when in others)]
    late = [when + 1e-4 * number for number, when in enumerate(late)]
    assert Flow(NBYTES, late).rate(0.01) < 1.05 * RATE


@pytest.mark.parametrize("times", [[0.01], [0.01, 0.01], [0.0] * 40, [0.01] * 40])
def test_messages_that_come_at_once_have_a_finite_rate(times: list[float]) -> None:
    assert 0 < Flow(NBYTES, times).rate(0.0) < math.inf


@pytest.mark.parametrize(
    ("rates", "steady"),
    [
        ([1.0, 1.0, 1.0], False),  # too few
        ([1.0, 1.0, 1.0, 1.0], True),
        ([1.0, 2.0, 4.0, 8.0], False),
        ([1.0, 2.0, 4.0, 8.0, 8.1, 8.0, 7.9], True),
        ([8.0, 1.0, 1.0, 1.0], True),  # others disturb it
    ],
)
def test_a_flow_goes_on_while_its_rate_grows(rates: list[float], steady: bool) -> None:
    assert is_steady(rates) is steady


def test_slow_flows_do_not_count() -> None:
    assert steady_rate([1.0, 5.0, 9.5, 10.0, 9.8, 3.0]) == 9.8


class MadeUpWire(Wire):
    """Ranks over a link of ``RATE`` whose flow grows for a while, with times of its own."""

    def __init__(self, delay: float, ranks: int = 2, slow_flows: int = 0) -> None:
        self.ranks, self.delay, self.slow_flows = ranks, delay, slow_flows
        self.device = torch.device("cpu")
        self.flows, self.distances = 0, [1]

    def trip(self, first: int, others: Sequence[int], quiet_seconds: float) -> float:
        return 2 * self.delay

    def arrivals(self, nbytes: int, count: int) -> list[float]:
        self.flows += 1
        rate = RATE * min(1.0, (self.flows + 1) / (self.slow_flows + 1))
        each = nbytes / rate
        return [self.delay + each * (number + 1) for number in range(count)]

    def shared(self, *values: float) -> torch.Tensor:
        return torch.tensor([values] * self.ranks, dtype=torch.float64)


@pytest.mark.parametrize(
    ("delay", "ranks", "slow_flows"),
    [(0.0, 2, 0), (0.005, 3, 0), (0.5, 8, 0), (0.0, 8, 0), (0.001, 2, 6)],
)
def test_headers_are_in_the_rate_of_a_link(delay: float, ranks: int, slow_flows: int) -> None:
    """And it is taken when it no longer grows."""
    found = measure_rate(MadeUpWire(delay, ranks, slow_flows), 2 * delay, 5.0)
    assert found == pytest.approx(RATE * 8 / PAYLOAD, rel=1e-3)


def test_a_flow_ends_in_time() -> None:
    wire = MadeUpWire(0.001)
    measure_rate(wire, 0.002, 1e-9)
    assert wire.flows == 2


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 9, 64])
def test_each_rank_is_tried_with_another(ranks: int) -> None:
    found = pairs_of(ranks)
    assert len(found) <= 2 * ranks and len(set(found)) == len(found)
    assert {rank for pair in found for rank in pair} == set(range(ranks))
    assert all(first != second and max(first, second) < ranks for first, second in found)
    assert (0, ranks // 2) in found


class FarWire(MadeUpWire):
    """One on which rank 2 is far, and each other try is disturbed."""

    def __init__(self) -> None:
        super().__init__(0.001, 3)
        self.tries = 0

    def trip(self, first: int, others: Sequence[int], quiet_seconds: float) -> float:
        self.tries += 1
        return (0.05 if 2 in (first, *others) else 0.002) * (1 + self.tries % 2)


def test_a_round_trip_is_that_of_the_two_farthest_ranks() -> None:
    assert measure_round_trip(FarWire(), 0.1) == 0.05


class UnevenWire(MadeUpWire):
    """One whose second rank sees half of each number."""

    def shared(self, *values: float) -> torch.Tensor:
        found = super().shared(*values)
        found[1] /= 2
        return found


def test_the_slowest_rank_counts() -> None:
    wire = UnevenWire(0.001)
    assert measure_rate(wire, 0.002, 5.0) == pytest.approx(RATE / 2 * 8 / PAYLOAD, rel=1e-3)
    assert measure_round_trip(wire, 0.1) == pytest.approx(0.002, rel=0.05)


@pytest.mark.parametrize("delay", [0.0001, 0.025])
def test_a_round_trip_is_the_least(delay: float) -> None:
    assert measure_round_trip(MadeUpWire(delay), 0.1) == pytest.approx(2 * delay, rel=0.05)


@pytest.mark.parametrize("apart", [0.0, 0.02])
def test_a_round_trip_is_twice_the_way(apart: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far apart ranks begin."""
    # torch.distributed does not know these groups.
    monkeypatch.setattr(step_link, "resolve_group", lambda group: group)
    delay = 0.02
    world = WireRanks(2, delay=delay)

    def run(rank: int) -> tuple[float, float]:
        group = world.groups[rank]
        state_of(group).own_backend = world.backends[rank]
        time.sleep(apart * rank)
        wire = Wire(group)
        return measure_round_trip(wire, 0.1), measure_round_trip(wire, 0.0, is_brief=True)

    for found in world.each(run):
        assert min(found) >= 2 * delay
    world.close()


# ---- what comes out ------------------------------------------------------------------------------


@pytest.mark.parametrize(("many", "connections"), [(1.2e8, 1), (1.4e8, 4), (None, 1)])
def test_a_link_has_the_connections_that_attach_takes(many: float | None, connections: int) -> None:
    rates = {1: 1e8} if many is None else {1: 1e8, 4: many}
    figures = Link(0.05, rates)
    assert figures.connections == connections
    assert figures.measured == MeasuredLink(rates[connections], 0.025)


@pytest.mark.parametrize(
    ("rate", "delay", "message"),
    [
        *((rate, 0.0, "bits_per_second must be positive") for rate in (0.0, math.nan, math.inf)),
        *((1e6, delay, "delay_seconds must be at least 0") for delay in (-1.0, math.nan)),
        *((rate, 0.0, "bits_per_second must be a number") for rate in ("1", None, True, 1j)),
    ],
)
def test_what_is_no_link(rate: Any, delay: float, message: str) -> None:
    error = TypeError if "a number" in message else ValueError
    with pytest.raises(error, match=f"^MeasuredLink: {message}( and finite)?, got "):
        MeasuredLink(rate, delay)


@on_ranks(1)
def test_one_rank_has_no_link(rank: int) -> None:
    with pytest.raises(ValueError, match=r"^measure_link: group must have two or more ranks"):
        measure_link()


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, math.inf])
def test_seconds_are_positive(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"^measure_link: seconds must be positive and finite"):
        measure(MadeUpWire(0.001), seconds)


def test_all_ranks_get_the_same_link() -> None:
    first, *others = run_ranks(lambda rank: measure_link(seconds=0.1), 3)
    assert others == [first, first]


# ---- real ranks ----------------------------------------------------------------------------------


@pytest.mark.real_time
@on_processes
@pytest.mark.parametrize(("rate", "delay"), [(20e6, 0.0), (20e6, 0.025)])
def test_a_throttled_link(rank: int, rate: float, delay: float) -> None:
    group = ThrottledProcessGroup(dist.group.WORLD, bandwidth=rate, latency=delay)
    figures = measure(Wire(group), 1.0)
    link = figures.measured
    assert of_all_ranks((link, figures.connections)) == [(link, 1)] * 2
    # A busy machine makes a link slower, and never faster: the group does not count headers.
    assert rate / PAYLOAD * 0.5 < link.bits_per_second < rate / PAYLOAD * 1.1
    assert delay <= link.delay_seconds < delay + 0.02


@on_processes
def test_more_connections_are_tried_and_go_again(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_commhook.step.link._FAR_SECONDS", 0.0)
        found = measure(Wire(), 0.2)
    total = torch.ones(4)
    dist.all_reduce(total)  # the group is as it was
    assert (list(found.rates), int(total[0])) == ([1, 4], 2)


# ---- the file of bench ---------------------------------------------------------------------------

FULL = LinkFile(
    ranks=2,
    backend="gloo",
    device="cpu",
    link=MeasuredLink(200e6, 0.025),
    messages=[Message(1024, 0.05), Message(1 << 26, 2.7)],
    collectives=[CollectiveTime("all_reduce", 1 << 20, 0.1)],
    codecs=[CodecSpeed("fp8()", 3.9, 1e9, 2e9, 1.5, 0.9)],
    hooks=[HookTime("allreduce()", 1.5, 1e8, 1.0), HookTime("mine.py:hook", 1.5, None, 1.0)],
    machine={"torch": "2.13", "threads": 1},
)


@pytest.mark.parametrize("found", [FULL, LinkFile(1, "gloo", "cpu")])
def test_what_is_written_is_read(tmp_path: Path, found: LinkFile) -> None:
    path = tmp_path / "link.json"
    found.write(path)
    assert LinkFile.read(path) == found
    assert LinkFile.read(str(path)) == found


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    FULL.write(tmp_path / "link.json")
    document = json.loads((tmp_path / "link.json").read_text())
    assert document["format"] == "commhook bench 1"
    assert document["link"] == {"bits_per_second": 200e6, "delay_seconds": 0.025}
    assert document["messages"][0] == {"bytes": 1024, "seconds": 0.05}


def changed(**values: Any) -> str:
    return json.dumps({**json.loads(FULL.text()), **values})


def changed_link(rate: float, delay: float = 0) -> str:
    return changed(link={"bits_per_second": rate, "delay_seconds": delay})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is not valid JSON (Expecting value: line 1 column 1 (char 0))"),
        ("{", "it is not valid JSON"),
        ("[" * 100_000, "it is nested too deeply"),
        ("[]", "it must be an object, got []"),
        ("{}", 'its format must be "commhook bench 1", got null'),
        (changed(format="commhook bench 2"), 'its format must be "commhook bench 1", got "commh'),
        (changed(ranks="2"), 'its ranks must be a whole number, got "2"'),
        (changed(ranks=0), "its ranks must be a whole number, got 0"),
        (changed(ranks=True), "its ranks must be a whole number, got true"),
        (changed(backend=1), "its backend must be a string, got 1"),
        (changed(link=3), "its link must be an object, got 3"),
        (changed(link={}), "its link.bits_per_second must be a number, got nothing"),
        (
            changed_link(0),
            "its link is not valid (MeasuredLink: bits_per_second must be positive and finite, got "
            "0.0)",
        ),
        (changed_link(math.nan), "its link.bits_per_second must be a number, got NaN"),
        (changed_link(10**400), "its link.bits_per_second must be a number, got 1000"),
        (changed_link(1, -1), "its link.delay_seconds must be a number, got -1"),
        (changed(messages={}), "its messages must be a list, got {}"),
        (changed(messages=[1]), "its messages[0] must be an object, got 1"),
        (changed(messages=[{"bytes": 1.5, "seconds": 1}]), "its messages[0].bytes must be a whole"),
        (changed(hooks=[{"hook": "a"}]), "its hooks[0].seconds must be a number, got nothing"),
        (changed(machine=[]), "its machine must be an object, got []"),
    ],
)
def test_what_is_no_file_of_bench(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "link.json"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        LinkFile.read(path)
    assert str(raised.value).startswith(f"{path} is not a file of commhook bench --out: {reason}")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "link.png"
    path.write_bytes(b"\x89PNG\xff")
    with pytest.raises(ValueError, match=r"is not a file of commhook bench --out: it is not text$"):
        LinkFile.read(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"link.json: No such file or directory$"):
        LinkFile.read(tmp_path / "link.json")
    with pytest.raises(ValueError, match=r": Is a directory$"):
        LinkFile.read(tmp_path)

"""What a step with a hook takes over a link, as ``plan`` computes it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from torch_commhook.planning import Measured, measure, plan
from torch_commhook.process_group.gloo_messages import Traffic
from torch_commhook.process_group.simulated.link import Issued

PAYLOAD = 1448 / 1514


def sending(seconds: float, compute_seconds: float = 0.0, **more: Any) -> Measured:
    """A hook of two ranks, whose only message takes so many seconds at 8 Mbit/s."""
    carried = 1e6 * seconds * PAYLOAD
    issued = (Issued("", Traffic("all_to_all_single", 2, 2 * carried, carried)),)
    return Measured("a", carried, compute_seconds, issued=issued, **more)


def test_what_follows_the_optimizer_is_hidden_by_nothing() -> None:
    hooks = [sending(1.0, 0.5, overlaps=overlaps) for overlaps in (True, False)]
    hidden, open_ = plan(hooks, bits_per_second=8e6, compute_seconds=3.0, buckets=[1] * 100)
    assert hidden.step_seconds == pytest.approx(3.51, rel=0.01)
    assert open_.step_seconds == pytest.approx(4.5)


def test_headers_are_on_the_wire_too() -> None:
    hook = sending(1.514)
    assert hook.bytes_sent == pytest.approx(1_448_000)
    (cost,) = plan([hook], bits_per_second=8e6)
    assert cost.wire_seconds == pytest.approx(1.514)
    assert cost.step_seconds == pytest.approx(1.514)
    assert cost.ratio == 1.0


@pytest.mark.parametrize(
    ("wire", "hook", "buckets", "step"),
    [
        (0.0, 0.0, 4, 3.0),
        (0.0, 0.6, 4, 3.6),
        (5.0, 0.0, 1, 3.0 + 5.0),  # nothing to hide it
        (5.0, 0.0, 2, 1.0 + 1.0 + 5.0),  # what is computed of the second is hidden
        (1.0, 0.0, 2, 3.0 + 0.5),  # the first is hidden
        (8.0, 0.8, 4, 1.0 + 0.7 + 8.0),
    ],
)
def test_buckets_travel_while_others_are_computed(
    wire: float, hook: float, buckets: int, step: float
) -> None:
    """A step of 3 seconds: 1 of forward, 2 of backward."""
    hooks = [Measured("none", 0, 0.0), sending(wire, hook)]
    first, cost = plan(hooks, bits_per_second=8e6, compute_seconds=3.0, buckets=[1] * buckets)
    assert first.step_seconds == pytest.approx(3.0)
    assert cost.step_seconds == pytest.approx(step)
    assert cost.ratio == pytest.approx(step / 3.0)


def test_a_small_first_bucket_is_on_its_way_early() -> None:
    far = {"bits_per_second": 8e6, "compute_seconds": 3.0}
    # A tenth is computed when the first is full; all is sent after that.
    (cost,) = plan([sending(8.0)], **far, buckets=[1, 9])
    assert cost.step_seconds == pytest.approx(1.0 + 2.0 + 0.9 * 8.0)  # waits for the second
    (cost,) = plan([sending(8.0)], **far, buckets=[2, 8])
    assert cost.step_seconds == pytest.approx(1.0 + 0.4 + 8.0)


#: Of a step of 25 buckets, the agreement included. All but the first takes half a round trip.
ROUND_TRIPS = {
    "none": {2: 26, 8: 182},  # as bench_round_trips measures DDP
    "allreduce()": {2: 1.5, 8: 2},
    "blockwise()": {2: 2, 8: 2},
    "topk(0.01)": {2: 1.5, 8: 1.5},
    "chunk_topk()": {2: 1.5, 8: 1.5},
    "powersgd(rank=2)": {2: 2, 8: 2},
}


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_step_takes_its_round_trips(ranks: int) -> None:
    found = measure(list(ROUND_TRIPS), elements=480_000, world_size=ranks)
    costs = plan(
        [replace(each, compute_seconds=0.0) for each in found],
        bits_per_second=1e15,
        delay_seconds=0.025,
        buckets=[1] * 25,
    )
    assert {cost.hook: cost.round_trips for cost in costs} == {
        hook: counts[ranks] for hook, counts in ROUND_TRIPS.items()
    }
    for cost in costs:
        assert cost.step_seconds == pytest.approx(cost.round_trips * 0.05, rel=1e-3)


def test_round_trips_of_one_bucket_hide_behind_the_backward_of_the_next() -> None:
    (found,) = measure(["allreduce()"], elements=10_000, world_size=2)
    found = replace(found, compute_seconds=0.0)
    far = {"bits_per_second": 1e15, "delay_seconds": 0.025, "buckets": [1, 1]}
    (cost,) = plan([found], compute_seconds=3.0, **far)
    # After the last bucket one round trip, and half of one in which the ranks agree.
    assert cost.step_seconds == pytest.approx(3.0 + 1.5 * 0.05, rel=1e-3)
    (apart,) = plan([replace(found, overlaps=False, every=10)], compute_seconds=3.0, **far)
    assert apart.step_seconds == pytest.approx(3.0 + 1.5 * 0.05 / 10, rel=1e-3)
    assert apart.round_trips == pytest.approx(1.5 / 10)


def test_few_ranks_exchange_messages() -> None:
    """So that a step takes a round trip and a half; more ranks go around a ring."""
    few, many = (
        replace(measure(["blockwise()"], elements=20_000, world_size=ranks)[0], agreement=())
        for ranks in (16, 17)
    )
    costs = plan([few, many], bits_per_second=1e9, buckets=[1] * 10)
    assert [cost.round_trips for cost in costs] == [1.5, 1 + 16]


@pytest.mark.parametrize(("elements", "round_trips"), [(5_000, 1), (1 << 20, 1.5), (1 << 21, 6)])
def test_large_sums_take_more_round_trips(elements: int, round_trips: float) -> None:
    (found,) = measure(["allreduce()"], elements=elements, world_size=3)
    (cost,) = plan([replace(found, agreement=())], bits_per_second=1e9)
    assert cost.round_trips == round_trips


def test_many_buckets_and_ranks_are_planned_in_few_messages() -> None:
    found = replace(measure(["allreduce()"], elements=10_000, world_size=2)[0], compute_seconds=0.0)
    many = tuple(
        Issued(each.group, replace(each.traffic, ranks=1024, nbytes=4e10)) for each in found.issued
    )
    (cost,) = plan(
        [replace(found, issued=many)],
        bits_per_second=1e15,
        delay_seconds=0.01,
        buckets=[1] * 10_000,
    )
    # 10,000 all-reduces of 4 MB, 32 at a time, and the agreement of two ranks.
    assert cost.round_trips == pytest.approx(math.ceil(10_000 / 32) * 2 * 1023 + 0.5)


# ---- exchanges in the background -----------------------------------------------------------------


def test_an_exchange_in_the_background_is_hidden_by_its_steps() -> None:
    def step(seconds: float, **more: Any) -> float:
        hook = sending(seconds, overlaps=False, every=10, **more)
        return plan([hook], bits_per_second=8e6, compute_seconds=1.0)[0].step_seconds

    assert step(4.0) == pytest.approx(1.4)
    assert step(4.0, delay=3) == pytest.approx(1.1)
    assert step(4.0, delay=5) == pytest.approx(1.0)
    # Two halves, of which each waits for what two steps do not hide.
    assert step(8.0, delay=2, fragments=2) == pytest.approx(1.0 + 2 * (4.0 - 2.0) / 10)


def test_local_sgd_in_the_background() -> None:
    text = "local_sgd(10, fragments=2, delay=4, mix=0.5, hook=error_feedback(blockwise(bits=4)))"
    (found,) = measure([text], elements=50_000, world_size=2)
    assert (found.every, found.fragments, found.delay, found.overlaps) == (10, 2, 4, False)
    (cost,) = plan([found], bits_per_second=1e9, delay_seconds=0.01)
    assert cost.round_trips == pytest.approx(2 * 2 / 10)

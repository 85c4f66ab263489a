"""benchmarks/bench_measured_link.py: which links are measured, and when a figure is near enough."""

from __future__ import annotations

from types import SimpleNamespace

import bench_measured_link as bench
import pytest


@pytest.mark.parametrize(
    ("round_trip", "rates", "trips", "holds"),
    [
        (50.0, [109e6, 91e6], [54.9, 45.1], True),
        (50.0, [111e6, 100e6], [50.0, 50.0], False),
        (50.0, [100e6, 89e6], [50.0, 50.0], False),
        (50.0, [100e6, 100e6], [50.0, 55.1], False),
        (0.0, [100e6], [0.9], True),
        (0.0, [100e6], [1.1], False),
    ],
)
def test_all_runs_must_be_near_the_truth(
    round_trip: float, rates: list[float], trips: list[float], holds: bool
) -> None:
    row = bench.Row(2, 100_000_000, round_trip, rates, trips)
    assert row.holds is holds


def test_the_worst_run_is_shown() -> None:
    row = bench.Row(4, 200_000_000, 10.0, [199e6, 170e6], [10.1, 9.5])
    assert bench.cells(vars(row)) == [
        "4",
        "200mbit",
        "199.0, 170.0 Mbit/s (-15.0%)",
        "10 ms",
        "10.10, 9.50 ms (-0.50 ms)",
        "**no**",
    ]


def test_many_hosts_have_slow_links_alone() -> None:
    options = SimpleNamespace(hosts=[2, 8], rates=[10**8, 10**9], round_trips=[0.0, 50.0])
    found = [(case.hosts, case.rate, case.round_trip_ms) for case in bench.cases(options)]
    assert found == [
        (2, 10**8, 0.0),
        (2, 10**8, 50.0),
        (2, 10**9, 0.0),
        (2, 10**9, 50.0),
        (8, 10**8, 0.0),
        (8, 10**8, 50.0),
    ]

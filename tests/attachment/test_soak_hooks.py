"""A few of the runs that ``make soak-hooks`` makes."""

from __future__ import annotations

import json

import pytest
from rank_pool import RankPool
from soak_hooks import RUNS, TABLE, check, hook_names, soak

#: Hooks of all kinds.
SOME = [
    "plain blockwise()",
    "plain blockwise(rounding='stochastic')",
    "feedback sign()",
    "powersgd",
    "policy",
    "after",
]


@pytest.mark.parametrize("name", SOME)
def test_on_two_ranks(two_ranks: RankPool, name: str) -> None:
    row = soak(two_ranks, name, 5, 1000)
    assert row["wrong"] == [] and row["runs_with_a_failure"] == 2


@pytest.mark.parametrize("name", ["feedback blockwise()", "policy"])
def test_on_three_ranks(three_ranks: RankPool, name: str) -> None:
    row = soak(three_ranks, name, 4, 2000)
    assert row["wrong"] == [] and row["runs_with_a_failure"] == 1


def test_what_counts_as_wrong() -> None:
    good = {
        "gradients": "a",
        "calm": "a",
        "outcomes": ["done"],
        "expected": ["done"],
        "failed": False,
        "buckets": 3,
    }
    name = "feedback sign()"
    assert check(name, [good, good]) == []
    assert len(check(name, [good, {**good, "gradients": "b"}])) == 2
    assert len(check(name, [{**good, "gradients": "b"}] * 2)) == 2
    assert check(name, [{**good, "gradients": "b", "failed": True}] * 2) == []
    assert len(check("plain sign()", [{**good, "gradients": "b", "failed": True}] * 2)) == 2
    assert len(check(name, [good, {**good, "calm": "b"}])) == 2
    assert len(check(name, [good, {**good, "outcomes": ["peer", "done"]}])) == 1
    assert len(check(name, [{**good, "buckets": 2}, good])) == 1


def test_the_long_run() -> None:
    """What ``make soak-hooks`` has stored is of all hooks that it has now."""
    table = json.loads(TABLE.read_text())
    assert table["good"]
    assert {(row["hook"], row["ranks"]) for row in table["rows"]} == {
        (name, ranks) for name in hook_names() for ranks in (2, 3)
    }
    assert all(row["runs"] == RUNS and row["wrong"] == [] for row in table["rows"])

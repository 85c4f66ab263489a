"""A few of the histories that ``make balance`` runs: error feedback must lose nothing."""

from __future__ import annotations

import pytest
from balance import Road, cases, out_of_balance
from local_balance import CASES, run_local_history
from rank_pool import RankPool

#: In ``make test``, one in nine of them compiled. Each is another pair of a hook and a road.
SOME = cases(50)


@pytest.mark.parametrize("case", SOME, ids=lambda case: " ".join(map(str, case)))
def test_history(two_ranks: RankPool, case: tuple[str, Road, int]) -> None:
    assert out_of_balance(two_ranks, case) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_local_history(two_ranks: RankPool, case: tuple[str, Road, int]) -> None:
    assert out_of_balance(two_ranks, case, run_local_history) == []

"""Fixtures for tests of sharded models."""

from __future__ import annotations

import pytest
from rank_pool import RankPool


@pytest.fixture
def ranks(
    request: pytest.FixtureRequest, two_ranks: RankPool, three_ranks: RankPool, four_ranks: RankPool
) -> RankPool:
    """The pool for a mesh's name: of so many ranks as it ends with."""
    number = int(request.getfixturevalue("place").rpartition("-")[2])
    return {2: two_ranks, 3: three_ranks, 4: four_ranks}[number]

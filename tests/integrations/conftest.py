"""Ranks as torchrun starts them, for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from launched_ranks import LaunchedRanks


@pytest.fixture(scope="module")
def launched() -> Iterator[LaunchedRanks]:
    pool = LaunchedRanks(2)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def one_launched() -> Iterator[LaunchedRanks]:
    pool = LaunchedRanks(1)
    yield pool
    pool.stop()

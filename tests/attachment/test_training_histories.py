"""A few of the histories that ``make training-histories`` runs, and those that find faults."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator

import pytest
import training_history
from training_faults import FAULTS
from training_histories import TABLE
from training_history import draw, problems

#: The smallest histories that find a planted fault.
FOUND = {row["fault"]: row for row in json.loads(TABLE.read_text())["planted"]}


@pytest.fixture(autouse=True)
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("seed", range(20))
def test_history(seed: int) -> None:
    assert problems(draw(seed)) == [], draw(seed)


def test_a_seed_is_one_history() -> None:
    assert draw(3) == draw(3) != draw(4)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault(fault: str) -> None:
    """The history that found it still does, and passes without the fault."""
    history = eval(FOUND[fault]["history"], vars(training_history))
    assert problems(history) == []
    with FAULTS[fault]():
        assert problems(history) != []

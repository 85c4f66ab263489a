"""A few of the histories that ``make training-histories`` runs, and those that find faults."""

from __future__ import annotations

import json

import pytest
import training_histories
from training_histories import FAULTS, TABLE, planted, problem, search

pytestmark = pytest.mark.filterwarnings("ignore")
FOUND = {row["fault"]: row for row in json.loads(TABLE.read_text())["planted"]}


@pytest.mark.parametrize("seed", range(5))
def test_histories(seed: int) -> None:
    assert search("", seed, count=5)[1] == {"fault": ""}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault(fault: str) -> None:
    """The history that found it still does, and passes without the fault."""
    history = eval(FOUND[fault]["history"], vars(training_histories))
    assert problem(history) == ""
    with planted(fault):
        assert problem(history) != ""

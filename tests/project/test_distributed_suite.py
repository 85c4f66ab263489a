"""The tables of PyTorch's own distributed tests: no case fails with us for no known reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from distributed_suite import SUITES, TABLES, contents, is_regression

by_suite = pytest.mark.parametrize("name", SUITES)


def _table(name: str) -> dict[str, Any]:
    return json.loads(TABLES[name].read_text())


@by_suite
def test_the_summary_is_that_of_the_cases(name: str) -> None:
    table = _table(name)
    expected = contents(SUITES[name], table["cases"]) | {"torch": table["torch"]}
    assert json.loads(json.dumps(expected)) == table


@by_suite
def test_no_case_fails_with_us_alone(name: str) -> None:
    cases = _table(name)["cases"]
    assert [row["case"] for row in cases if is_regression(SUITES[name], row)] == []


@by_suite
def test_each_known_reason_is_needed(name: str) -> None:
    table = _table(name)
    differing = {row["case"] for row in table["cases"] if row["plain"] != row[name]}
    assert SUITES[name].known.keys() - differing == set()


def test_wrapped_groups_are_called() -> None:
    cases = _table("wrapper")["cases"]
    assert all(row["groups"] > 0 for row in cases if row["wrapper"] == "passed")
    used = {operation for row in cases for operation in row.get("calls", {})}
    assert used >= {"allgather", "allreduce", "barrier", "broadcast", "recv", "send", "scatter"}

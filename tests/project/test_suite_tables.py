"""The tables of PyTorch's own tests name tests of ours that there are."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import pytest
from repository import TESTS

NAME = re.compile(r"test_\w+\.py::\w+")
of_each_suite = pytest.mark.parametrize("suite", ["autograd_suite", "process_group_suite"])


def _table(suite: str) -> dict[str, dict[str, dict[str, Any]]]:
    """By file of PyTorch's: where each of its tests is expressed, or the reason why it is not."""
    return json.loads(next(TESTS.glob(f"*/{suite}.json")).read_text())


def _tests_in(file: str) -> set[str]:
    tree = ast.parse(next(TESTS.glob(f"*/{file}")).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@of_each_suite
def test_each_test_that_the_table_names_exists(suite: str) -> None:
    table = _table(suite)
    expressed = {
        name for tests in table["expressed"].values() for ours in tests.values() for name in ours
    }
    reasons = [reason for tests in table["not_expressed"].values() for reason in tests.values()]
    named = expressed | {name for reason in reasons for name in NAME.findall(reason)}
    assert named
    parts = [name.partition("::") for name in sorted(named)]
    assert [(file, test) for file, _, test in parts if test not in _tests_in(file)] == []


@of_each_suite
def test_a_test_is_expressed_or_not(suite: str) -> None:
    table = _table(suite)
    for group, tests in table["not_expressed"].items():
        assert all(tests.values())
        assert not tests.keys() & table["expressed"].get(group, {}).keys()
    assert all(ours for tests in table["expressed"].values() for ours in tests.values())


def test_each_test_of_the_process_group_suite_expresses_something() -> None:
    table = str(_table("process_group_suite"))
    files = [path.name for path in TESTS.glob("*/test_process_group_suite_*.py")]
    tests = [(file, test) for file in files for test in _tests_in(file) if test[:5] == "test_"]
    assert [each for each in tests if "::".join(each) not in table] == []

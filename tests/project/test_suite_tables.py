"""The tables of PyTorch's own tests name tests of ours that there are."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from repository import TESTS

NAME = re.compile(r"test_\w+\.py::\w+")
of_each_suite = pytest.mark.parametrize("suite", ["autograd_suite", "process_group_suite"])


def _table(suite: str) -> dict[str, dict[str, dict[str, str]]]:
    """By file of PyTorch's: the tests that express each of its tests, or why none does."""
    return json.loads(next(TESTS.glob(f"*/{suite}.json")).read_text())


def _expressing(suite: str) -> set[str]:
    """The names of the tests that express some."""
    groups = _table(suite)["expressed"].values()
    return {name for tests in groups for ours in tests.values() for name in ours.split()}


def _in_reasons(suite: str) -> list[list[str]]:
    """File and name of each test that a reason names."""
    groups = _table(suite)["not_expressed"].values()
    reasons = [reason for tests in groups for reason in tests.values()]
    return [name.split("::") for reason in reasons for name in NAME.findall(reason)]


def _tests_in(file: Path) -> list[str]:
    tree = ast.parse(file.read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


@of_each_suite
def test_each_test_that_the_table_names_exists(suite: str) -> None:
    """In one file of the folder alone."""
    folder = next(TESTS.glob(f"*/{suite}.json")).parent
    defined = Counter(name for file in folder.glob("test_*.py") for name in _tests_in(file))
    expressed = _expressing(suite)
    assert expressed
    assert {name: defined[name] for name in expressed if defined[name] != 1} == {}
    named = _in_reasons(suite)
    assert [each for each in named if each[1] not in _tests_in(folder / each[0])] == []


@of_each_suite
def test_a_test_is_expressed_or_not(suite: str) -> None:
    table = _table(suite)
    for group, tests in table["not_expressed"].items():
        assert all(tests.values())
        assert not tests.keys() & table["expressed"].get(group, {}).keys()
    assert all(ours for tests in table["expressed"].values() for ours in tests.values())


def test_each_test_of_the_process_group_suite_is_named() -> None:
    files = list(TESTS.glob("*/test_process_group_suite_*.py"))
    assert files
    tests = {name for file in files for name in _tests_in(file) if name.startswith("test_")}
    named = {name for _, name in _in_reasons("process_group_suite")}
    assert tests - _expressing("process_group_suite") - named == set()

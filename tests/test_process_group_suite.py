"""The table of PyTorch's own tests of groups in Python names tests of ours that there are."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = json.loads((TESTS / "process_group_suite.json").read_text())
NAME = re.compile(r"test_\w+\.py::\w+")


def _tests_in(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_test_that_the_table_names_exists() -> None:
    expressed = {
        name for tests in TABLE["expressed"].values() for ours in tests.values() for name in ours
    }
    reasons = [reason for tests in TABLE["not_expressed"].values() for reason in tests.values()]
    named = expressed | {name for reason in reasons for name in NAME.findall(reason)}
    missing = []
    for name in sorted(named):
        file, _, test = name.partition("::")
        if test not in _tests_in(file):
            missing.append(name)
    assert named
    assert missing == []


def test_a_test_is_expressed_or_not() -> None:
    for group, tests in TABLE["not_expressed"].items():
        assert all(tests.values())
        assert not tests.keys() & TABLE["expressed"].get(group, {}).keys()
    assert all(ours for tests in TABLE["expressed"].values() for ours in tests.values())


def test_each_test_of_the_suite_expresses_something() -> None:
    expressed = str(TABLE)
    idle = [
        f"{path.name}::{test}"
        for path in TESTS.glob("test_process_group_suite_*.py")
        for test in sorted(_tests_in(path.name))
        if test.startswith("test_") and f"{path.name}::{test}" not in expressed
    ]
    assert idle == []

"""The table of PyTorch's own hook tests names tests of ours that there are."""

from __future__ import annotations

import ast
import json
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = json.loads((TESTS / "autograd_suite.json").read_text())


def _tests_in(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_test_that_the_table_names_exists() -> None:
    groups = TABLE["expressed"].values()
    named = {name for tests in groups for ours in tests.values() for name in ours}
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

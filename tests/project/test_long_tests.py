"""The list of long tests names tests that are there."""

from __future__ import annotations

import pytest
import torch
from long_tests import LONG_TESTS, UNKNOWN_LONG_TESTS
from repository import ROOT


def test_their_files() -> None:
    files = {name.partition("::")[0] for name in LONG_TESTS}
    assert [name for name in sorted(files) if not (ROOT / "tests" / name).is_file()] == []


def test_their_names(request: pytest.FixtureRequest) -> None:
    if torch.__version__ < "2.13":
        pytest.skip("older releases lack features of fully_shard, and so cases of these tests")
    if request.config.args != request.config.getini("testpaths"):
        pytest.skip("needs all tests to be collected")
    assert request.config.stash[UNKNOWN_LONG_TESTS] == set()

"""Test cases that take seconds; other cases of the same tests check the same."""

from __future__ import annotations

from pathlib import Path

import pytest

#: Beginnings of the cases' names, relative to tests/.
LONG_TESTS = Path(__file__).with_suffix(".txt").read_text().splitlines()
#: Names without a test, in the collected files.
UNKNOWN_LONG_TESTS = pytest.StashKey[set[str]]()

"""Cases that take seconds, while others of the same test try the same."""

from __future__ import annotations

from pathlib import Path

import pytest

#: Beginnings of their names, below tests/.
LONG_TESTS = Path(__file__).with_suffix(".txt").read_text().splitlines()
#: Those that no test has, of the files that were collected.
UNKNOWN_LONG_TESTS = pytest.StashKey[set[str]]()

"""Every hook in every mode: what ``make test`` tries of that in part.

Run with ``make modes``; arguments go to pytest. Without arguments it writes ``all_modes.json``
beside this file. Exits as pytest does.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

import pytest
import torch
from machine import as_lines
from repository import TESTS

TABLE = Path(__file__).with_suffix(".json")


class Counts:
    """A plugin that counts outcomes."""

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1


def main(arguments: list[str]) -> int:
    os.environ["COMMHOOK_ALL_MODES"] = "1"
    counts, begun = Counts(), time.monotonic()
    tests = str(TESTS / "attachment" / "test_modes.py")
    # Also those that are marked long.
    status = int(pytest.main(["-m", "", tests, *arguments], plugins=[counts]))
    if not arguments:
        result = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "seconds": round(time.monotonic() - begun),
            "outcomes": counts.outcomes,
        }
        TABLE.write_text(as_lines(result))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Every hook in every mode: what ``make test`` tries of that in part.

Run with ``make modes``; arguments go to pytest. Without arguments it writes ``all_modes.json``
beside this file. Exits as pytest does.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from long_run_results import store
from repository import TESTS

TABLE = Path(__file__).with_suffix(".json")


class Counts:
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        names = ("passed", "failed", "error", "skipped")
        counts = {name: len(terminalreporter.stats.get(name, [])) for name in names}
        self.outcomes = {name: count for name, count in counts.items() if count}


def main(arguments: list[str]) -> int:
    os.environ["COMMHOOK_ALL_MODES"] = "1"
    counts, begun = Counts(), time.monotonic()
    tests = str(TESTS / "attachment" / "test_modes.py")
    # Also those that are marked long.
    status = int(pytest.main(["-m", "", tests, *arguments], plugins=[counts]))
    if not arguments:
        store(TABLE, begun, outcomes=counts.outcomes)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

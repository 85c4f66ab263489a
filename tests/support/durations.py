"""How long the test cases take: ``tests/durations.json``, which ``make durations`` writes.

A case that takes over a second is long: ``make test`` leaves it out, and ``make check`` runs those
that a change calls for and some of the others in turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

DURATIONS = Path(__file__).resolve().parents[1] / "durations.json"
#: Seconds beyond which a case is long, and below which one that was long is short again.
LONG, SHORT_AGAIN = 1.0, 0.7


@dataclass
class Durations:
    short: float = 0.0  # seconds of all its short cases, with its fixtures
    # seconds of each long case, by its name in the file (``test_x[a]``)
    long: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.short + sum(self.long.values())


def load(path: Path = DURATIONS) -> dict[str, Durations]:
    """The stored durations by file, relative to tests/."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    found = {}
    for file, tests in stored.items():
        long = {
            f"{test}{case}": s for test, cases in tests["long"].items() for case, s in cases.items()
        }
        found[file] = Durations(tests["short"], long)
    return found


def save(durations: Mapping[str, Durations], path: Path = DURATIONS) -> None:
    """Store durations, with a line for each file."""

    def lines() -> Iterator[str]:
        for file, each in sorted(durations.items()):
            long: dict[str, dict[str, float]] = {}
            for name, seconds in sorted(each.long.items()):
                test, bracket, rest = name.partition("[")
                long.setdefault(test, {})[bracket + rest] = seconds
            yield f"{json.dumps(file)}: {json.dumps({'short': each.short, 'long': long})}"

    path.write_text("{\n" + ",\n".join(lines()) + "\n}\n")

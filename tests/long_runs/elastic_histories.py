"""10,000 random histories of elastic training in virtual time, after each of which all is checked.

Processes end, stop, leave, join and start anew, hooks raise, networks split, hosts lose the store.
What decides is the library's own code; ``tests/support/virtual_elastic.py`` says what is a double.

Run with ``make elastic-histories ARGS="[--count N] [--first SEED]"``. Exits with 1 where a history
has a problem. Without arguments it writes ``elastic_histories.json`` beside this file.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from elastic_history import run_histories
from long_run_results import store

TABLE = Path(__file__).with_suffix(".json")
COUNT = 10_000
#: So many histories a process runs before it gives their figures.
_PART = 250


def run_some(seeds: range) -> tuple[dict[str, Counter[str]], list[dict[str, Any]]]:
    """Sums over some histories, and what is wrong in them."""
    sums: dict[str, Counter[str]] = {name: Counter() for name in ("", "processes_ended", "faults")}
    wrong = []
    for history in run_histories(seeds):
        sums["faults"] += history.faults
        sums["processes_ended"] += history.ended
        sums[""]["views"] += history.views
        sums[""]["steps_counted"] += history.steps
        sums[""]["steps_repeated"] += history.repeated
        sums[""]["trained_to_the_end"] += history.reached_end
        sums[""]["virtual_seconds"] += round(history.seconds)
        if history.problems:
            wrong.append({"seed": history.seed, "problems": history.problems})
            print(f"seed {history.seed}: {'; '.join(history.problems)}", flush=True)
    return sums, wrong


def summed_up(seeds: range) -> dict[str, Any]:
    """The figures of some histories, of which two processes run a part each at a time."""
    sums: dict[str, Counter[str]] = {}
    wrong: list[dict[str, Any]] = []
    parts = [seeds[first : first + _PART] for first in range(0, len(seeds), _PART)]
    with ProcessPoolExecutor(2) as pool:
        for of_part, wrong_in_part in pool.map(run_some, parts):
            for name, counts in of_part.items():
                sums[name] = sums.get(name, Counter()) + counts
            wrong += wrong_in_part
    return {
        "histories": len(seeds),
        "wrong": wrong,
        **sums.pop(""),
        **{name: dict(sorted(counts.items())) for name, counts in sums.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=COUNT, help="%(default)s")
    parser.add_argument("--first", type=int, default=0, help="seed (%(default)s)")
    options = parser.parse_args()
    begun = time.monotonic()
    found = summed_up(range(options.first, options.first + options.count))
    print(
        f"{found['histories']:,} histories, {sum(found['faults'].values()):,} faults, "
        f"{found['views']:,} views, {found['steps_repeated']:,} steps repeated: "
        f"{len(found['wrong'])} wrong"
    )
    if len(sys.argv) == 1:
        store(TABLE, begun, **found)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

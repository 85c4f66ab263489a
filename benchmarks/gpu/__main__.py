"""Runs all checks that need a GPU: smoke, times, tests, counters, sanitizers, benchmarks.

    python -m benchmarks.gpu [--minutes 9] [--parts smoke times ...] [--resume] [--dry-run]

Needs no network. Uses the installed Python, torch and nvcc. After each step it stores
``<card>-<date>.json`` and ``.md`` in ``benchmarks/results/gpu`` and in the folder that the variable
``OUT`` names. So a part that crashes or hangs, or a killed run, loses no earlier results. Exits
with 1 if something failed. Logs go to ``build/gpu``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import carried
from .commands import ROOT
from .document import Store, targets
from .facts import smi
from .parts import PARTS, library_loads
from .run import Run, do_parts

BUILD = ROOT / "build" / "gpu"
RESULTS = ROOT / "benchmarks" / "results" / "gpu"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--minutes", type=float, default=9.0, help="time for the whole run (default: %(default)s)")
    add("--parts", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    add(
        "--resume",
        type=Path,
        nargs="?",
        const=BUILD / "document.json",
        metavar="FILE",
        help="continue an earlier run's document (default: this machine's last one)",
    )
    add(
        "--dry-run",
        nargs="?",
        const="cpu",
        choices=("cpu", "host"),
        help="run without a GPU; host: smoke runs the CUDA kernels on the CPU",
    )
    add("--commit", help="the commit of this tree, if git cannot tell")
    add(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="folder for results in place of benchmarks/results/gpu",
    )
    add("--build", type=Path, default=BUILD, metavar="FOLDER", help="folder for logs and states")
    add("--tests", type=Path, metavar="FOLDER", help="test files in place of this tree's")
    add("--test-seconds", type=float, default=60.0, help="limit for one test")
    add("--patience", type=float, default=1.0, help="a factor for the time of parts and commands")
    return parser.parse_args(arguments)


def empty_document(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "dry_run": arguments.dry_run is not None,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": arguments.commit or "unknown",
        "sources": carried.sources_digest(),
        "minutes": arguments.minutes,
        "machine": {},
        "library": {},
        "clocks": [],
        "parts": {},
        "times": [],
        "counters": [],
        "benchmarks": {},
    }


def resumed(arguments: argparse.Namespace) -> dict[str, Any]:
    """The document to continue: an earlier one of the same sources, or an empty one."""
    new = empty_document(arguments)
    if arguments.resume is None:
        return new
    try:
        old: dict[str, Any] = json.loads(arguments.resume.read_text())
    except (OSError, json.JSONDecodeError) as error:
        print(f"cannot go on with {arguments.resume}: {error}")
        return new
    for name in ("sources", "dry_run"):
        if old.get(name) != new[name]:
            print(f"begins anew: {arguments.resume} is of other {name}")
            return new
    if "build" in old["parts"] and "build" in arguments.parts:
        # Libraries belong to this machine: build and load them again.
        old["parts"]["build"] |= {"finished": False, "passed": None, "items": []}
    for part in old["parts"].values():
        if any(item.get("again") for item in part["items"]):
            part["finished"] = False
    return old


def main(arguments: list[str] | None = None) -> int:
    begun = time.monotonic()
    parsed = parse(arguments)
    # So that no command outlives this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    document = resumed(parsed)
    dry = parsed.dry_run is not None
    if parsed.resume is None:
        shutil.rmtree(parsed.build / "logs", ignore_errors=True)
    folders = [parsed.results or (parsed.build / "results" if dry else RESULTS)]
    if os.environ.get("OUT"):
        folders.append(Path(os.environ["OUT"]))
    store = Store(document, folders, parsed.build / "document.json")
    end = begun + 60 * parsed.minutes
    run = Run(
        store=store,
        device=parsed.dry_run or "cuda",
        folder=parsed.build,
        end=end,
        cores=len(os.sched_getaffinity(0)),
        tests=parsed.tests,
        test_seconds=parsed.test_seconds,
        patience=parsed.patience,
        part={"items": []},
        part_end=end,
    )
    if not describe(run, parsed.commit):
        print("no CUDA device is available")
        return 2
    if "build" not in parsed.parts:
        run.library_loads = library_loads(run)
    do_parts(run, [part for part in PARTS if part.name in parsed.parts])
    for target in targets(document):
        if not target["met"]:
            print(f"missed: {target['what']}: {target['reached']}, {target['wanted']}")
    parts = [document["parts"][name] for name in parsed.parts]
    return 1 if any(part["passed"] is False for part in parts) else 0


def describe(run: Run, commit: str | None) -> bool:
    """Stores facts of the machine; returns false if it has no card that torch can use."""
    how = run.one(run.module("facts", "facts", seconds=90))
    told: dict[str, Any] = {}
    for line in run.told("facts"):
        told |= line
    run.document["commit"] = commit or told.pop("commit", run.document["commit"])
    for name in ("commit", "date"):
        told.pop(name, None)
    run.document["machine"] = {**told, **smi()}
    if how.status != 0:
        print(how.log[-2000:])
    return run.dry or "card" in told


if __name__ == "__main__":
    sys.exit(main())

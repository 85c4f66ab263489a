"""PyTorch's own distributed tests, as they are and with something of this library in their place.

torch carries the cases itself (``torch.testing._internal.distributed.distributed_test``). Each runs
on two ranks over Gloo on the CPU, first as it is, then with the change of a suite:

- ``hook``: cases about DDP, with ``attach(ddp, hooks.allreduce())`` on each DDP model as soon as it
  is made (``distributed_suite_hook.py``);
- ``wrapper``: all cases, with each process group replaced by a ``WrapperProcessGroup`` around it
  (``distributed_suite_wrapper.py``). Cases that need more ranks have four.

No case may pass plain and fail with the change. Many cases are written for GPUs, though few need
what only a GPU does: there the CPU stands in for every GPU, both times. What cannot work so fails
plain and tells nothing.

Run with ``make distributed-suite`` or ``make wrapper-suite``; ``ARGS="PART_OF_A_NAME ..."`` takes
some cases. Where all run, the results go to ``distributed_suite.json`` or
``distributed_suite_wrapper.json`` beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import distributed_suite_hook
import distributed_suite_wrapper
import torch
from distributed_suite_cases import Suite, case_names, environment, make_cases, run_case
from machine import as_lines

import torch_commhook

SUITES = {
    "hook": Suite(
        name="hook",
        changed=repr(torch_commhook.hooks.allreduce()),
        change=distributed_suite_hook.Attacher,
        is_selected=distributed_suite_hook.is_selected,
        ranks=(2,),
        counted="steps",
        known=distributed_suite_hook.KNOWN,
    ),
    "wrapper": Suite(
        name="wrapper",
        changed="WrapperProcessGroup",
        change=distributed_suite_wrapper.Wrapping,
        is_selected=lambda name, case: True,
        ranks=(2, 4),
        counted="calls",
        known=distributed_suite_wrapper.KNOWN,
    ),
}
TABLES = {
    "hook": Path(__file__).with_name("distributed_suite.json"),
    "wrapper": Path(__file__).with_name("distributed_suite_wrapper.json"),
}
TOO_FEW_RANKS = re.compile("world size", re.IGNORECASE)


def compare(suite: Suite, cases: type[Any], name: str, work: Path) -> dict[str, Any]:
    """Run a case plain and with the change; one row of the table."""
    plain = run_case(suite, cases, name, work, changing=False)
    row = {"case": name, "plain": plain["result"]}
    if plain["result"] == "skipped":
        return row | {suite.name: "skipped", "reason": plain["reason"]}
    changed = run_case(suite, cases, name, work, changing=True)
    for told in (plain, changed):
        if told["details"]:
            print(told["details"], file=sys.stderr)
    return row | changed["record"] | {suite.name: changed["result"], "reason": plain["reason"]}


def is_regression(suite: Suite, row: dict[str, Any]) -> bool:
    """Whether a case passes plain and not with the change, for no known reason."""
    passed = (row["plain"] == "passed", row[suite.name] == "passed")
    return passed == (True, False) and row["case"] not in suite.known


def problems(suite: Suite, rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with a whole table."""
    found = [f"{row['case']} passes plain" for row in rows if is_regression(suite, row)]
    differing = {row["case"] for row in rows if row["plain"] != row[suite.name]}
    found += [f"{name} no longer differs" for name in sorted(suite.known.keys() - differing)]
    if suite.counted == "calls":
        passed = (row for row in rows if row[suite.name] == "passed")
        found += [f"{row['case']} wraps no group" for row in passed if not row["groups"]]
    return found


def summarize(suite: Suite, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The table: how many cases pass both times, and the others by the reason."""
    both = [row for row in rows if (row["plain"], row[suite.name]) == ("passed", "passed")]
    others: dict[str, dict[str, list[str]]] = {"failed": {}, "skipped": {}}
    for row in rows:
        if row["plain"] in others:
            others[row["plain"]].setdefault(row["reason"], []).append(row["case"])
    differing = [row["case"] for row in rows if row["plain"] != row[suite.name]]
    return {
        "torch": torch.__version__,
        "backend": environment(suite.ranks[0])["BACKEND"],
        "ranks": suite.ranks[0],
        suite.name: suite.changed,
        "cases": len(rows),
        "passed_both": len(both),
        f"passed_both_with_{suite.counted}": sum(bool(row.get(suite.counted)) for row in both),
        "differing": {name: suite.known.get(name, "unknown") for name in differing},
        "failed_plain": others["failed"],
        "skipped": others["skipped"],
    }


def run(suite: Suite, parts: list[str], table: Path | None) -> list[dict[str, Any]]:
    """Run the cases whose names hold one of the parts, all where there is none; the table's rows.

    A case that is skipped because there are too few ranks is run again with more, where the suite
    has more.
    """
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TMPDIR"] = tempfile.tempdir = directory  # for all that the cases leave
        for ranks in suite.ranks:
            cases = make_cases(suite, Path(directory), ranks)
            for name in case_names(suite, cases):
                if parts and not any(part in name for part in parts):
                    continue
                if name in rows and not TOO_FEW_RANKS.search(rows[name].get("reason", "")):
                    continue
                row = rows[name] = compare(suite, cases, name, Path(directory))
                print(f"{row['plain']:8} {row[suite.name]:8} {name}", flush=True)
                if table:
                    told = summarize(suite, [rows[name] for name in sorted(rows)])
                    table.write_text(as_lines(told))
        tempfile.tempdir = None
    return [rows[name] for name in sorted(rows)]


def main() -> int:
    """Run the cases; 1 where one passes plain and fails with the change."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", help="parts of names; all cases where none is given")
    parser.add_argument("--suite", choices=SUITES, default="hook", help="default: %(default)s")
    parser.add_argument("--table", type=Path, help="where the table goes")
    arguments = parser.parse_args()
    # So that ranks and files go when this process is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    suite = SUITES[arguments.suite]
    table = arguments.table or (None if arguments.parts else TABLES[suite.name])
    rows = run(suite, arguments.parts, table)
    print(json.dumps(summarize(suite, rows), indent=1))
    wrong = [row["case"] for row in rows if is_regression(suite, row)]
    if not arguments.parts:
        wrong = problems(suite, rows)
    if wrong:
        print(f"with the {suite.name} these are wrong:", *wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Chooses and orders the cases of a run, and measures them: a plugin of pytest."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from durations import LONG, SHORT_AGAIN, Durations, load, save
from repository import ROOT


class Cases:
    def __init__(self, config: pytest.Config) -> None:
        self.stored = load()
        self.stores = config.getoption("--store-durations")
        self.is_worker = hasattr(config, "workerinput")
        chosen = config.getoption("--chosen")
        #: The files whose short cases run, and the long cases that run.
        self.chosen: tuple[set[str], set[str]] | None = None
        if chosen is not None:
            found = json.loads(chosen.read_text())
            self.chosen = set(found["short"]), set(found["long"])
            self.files = self.chosen[0] | {case.partition("::")[0] for case in self.chosen[1]}
        if self.stores or self.chosen is not None:
            config.option.markexpr = ""
        #: Those that a mark makes long.
        self.marked: set[str] = set()
        #: Stored long cases of the collected files that are not there.
        self.unknown: list[str] = []
        self.measured: dict[str, dict[str, float]] = {}
        #: Seconds of the fixtures of a case, which are the first one's if several have them.
        self.fixtures: Counter[str] = Counter()

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if self.chosen is None or collection_path.is_dir():
            return None
        return str(collection_path.relative_to(ROOT)) not in self.files or None

    @pytest.hookimpl(tryfirst=True)  # before they are chosen by marks
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        files: dict[str, set[str]] = {}
        for item in items:
            file, name = _parts(item.nodeid)
            files.setdefault(file, set()).add(name)
            if name in self._of(file).long and not self.stores:
                item.add_marker(pytest.mark.long)
        for file, names in files.items():
            self.unknown += [f"{file}::{each}" for each in self._of(file).long.keys() - names]
        if self.chosen is not None:
            left_out = [item for item in items if not self._is_chosen(item)]
            items[:] = [item for item in items if self._is_chosen(item)]
            config.hook.pytest_deselected(items=left_out)
        # The longest file first, so that no process waits for another one at the end.
        items.sort(key=lambda item: -self._of(_parts(item.nodeid)[0]).seconds)

    def _of(self, file: str) -> Durations:
        return self.stored.get(file) or Durations()

    def _is_chosen(self, item: pytest.Item) -> bool:
        assert self.chosen is not None
        short, long = self.chosen
        if item.get_closest_marker("real_time") is not None:
            return False
        if item.get_closest_marker("long") is not None:
            return item.nodeid in long
        return item.nodeid.partition("::")[0] in short

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, name = _parts(report.nodeid)
        if report.when != "call":
            self.fixtures[report.nodeid] += report.duration
            return
        self.measured.setdefault(file, {})[name] = report.duration
        if "long" in report.keywords:
            self.marked.add(report.nodeid)

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int
    ) -> None:
        if self.stores and not self.is_worker and exitstatus == pytest.ExitCode.OK:
            save(self.updated())

    def updated(self) -> dict[str, Durations]:
        """The durations after a run of all cases of some files."""
        new = dict(self.stored)
        for file, cases in self.measured.items():
            before = self._of(file).long
            found = Durations()
            for name, seconds in cases.items():
                nodeid = f"tests/{file}::{name}"
                whole = seconds + self.fixtures[nodeid]
                if nodeid in self.marked:
                    found.long[name] = float(f"{whole:.2g}")
                elif seconds > (SHORT_AGAIN if name in before else LONG):
                    found.long[name] = float(f"{seconds:.2g}")
                    found.short += self.fixtures[nodeid]
                else:
                    found.short += whole
            found.short = round(found.short, 2)
            new[file] = found
        return new


def _parts(nodeid: str) -> tuple[str, str]:
    """The file relative to tests/, and the name in it."""
    file, _, name = nodeid.removeprefix("tests/").partition("::")
    return file, name

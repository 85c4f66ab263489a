"""A pytest plugin that writes the outcome of each test at once, for processes that may crash.

    pytest -p benchmarks.gpu.recorder tests/cuda/test_cuda_check.py

Environment variables: ``COMMHOOK_GPU_RECORD`` names the file to append JSON objects to.
``COMMHOOK_GPU_SKIP`` names such a file of an earlier process; its tests are skipped.
``COMMHOOK_GPU_TEST_SECONDS`` is a test's limit; after it, the process ends with the stacks of its
threads.

After an error that makes all later CUDA calls fail, such as an illegal access, the process ends at
once. The next one continues with the remaining tests.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .commands import read_lines, write_line

RECORD = Path(os.environ["COMMHOOK_GPU_RECORD"])
SKIP = os.environ.get("COMMHOOK_GPU_SKIP")
SECONDS = float(os.environ.get("COMMHOOK_GPU_TEST_SECONDS", "60"))
#: Exit status of a process that has lost its CUDA context.
LOST = 86
#: The most characters that are kept of a failure's text.
LONGEST = 3000

#: Saved before pytest redirects it.
_stderr = os.dup(2)
_failures: dict[str, str] = {}
_outcomes: dict[str, str] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SKIP is None:
        return
    begun = {line["test"] for line in read_lines(Path(SKIP)) if "test" in line}
    left = [item for item in items if item.nodeid not in begun]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in begun])
    items[:] = left


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        text = report.longreprtext[-LONGEST:]
        write_line(RECORD, {"test": report.nodeid, "outcome": "error", "text": text})


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    write_line(RECORD, {"test": item.nodeid, "outcome": "begun"})
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=_stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid
    if report.failed:
        outcome = "failed" if report.when == "call" else "error"
        _outcomes[name] = outcome
        _failures[name] = report.longreprtext[-LONGEST:]
    elif report.skipped:
        _outcomes.setdefault(name, "skipped")
        if isinstance(report.longrepr, tuple):
            _failures.setdefault(name, str(report.longrepr[2]))
    if report.when == "teardown":
        outcome = _outcomes.pop(name, "passed")
        line = {"test": name, "outcome": outcome, "text": _failures.pop(name, "")}
        write_line(RECORD, line)
        if outcome in ("failed", "error") and context_is_lost():
            write_line(RECORD, {"lost_by": name})
            os._exit(LOST)


def context_is_lost() -> bool:
    """Whether all later CUDA calls of this process will fail."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def pytest_sessionfinish(exitstatus: int) -> None:
    write_line(RECORD, {"finished": int(exitstatus)})

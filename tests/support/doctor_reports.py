"""Reports of ``doctor`` from ``--json``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torch_commhook.cli.main import main


def report(
    capsys: pytest.CaptureFixture[str], checks: str, *options: str, code: int = 0
) -> dict[str, Any]:
    """Runs checks of doctor in this process.

    Args:
        checks: for ``--only``.
        options: more of doctor's.
        code: the expected exit code.
    """
    capsys.readouterr()
    got = main(["doctor", "--json", "--only", checks, *options])
    output = capsys.readouterr().out
    assert got == code, output
    found: dict[str, Any] = json.loads(output)
    return found


def finding(report: dict[str, Any], name: str) -> dict[str, Any]:
    """The finding with a name."""
    (found,) = [each for each in report["findings"] if each["name"] == name]
    return dict(found)

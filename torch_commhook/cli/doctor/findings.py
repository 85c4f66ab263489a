"""The findings of ``doctor``, and their text and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from torch_commhook.wording import pluralize

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """A fact about this machine.

    Attributes:
        group: the check that found it; a name in ``doctor --only``.
        name: the name of the fact.
        value: the fact.
        level: ``"ok"``, ``"warning"`` or ``"error"``. Only an error changes the exit code.
        advice: the solution, in one sentence; empty if the level is ``"ok"``.
        rank: the rank that found it, if it is not the rank that prints.
    """

    group: str
    name: str
    value: str
    level: Level = "ok"
    advice: str = ""
    rank: int | None = None


def count(findings: Sequence[Finding], level: Level) -> int:
    """The number of findings with a level."""
    return sum(finding.level == level for finding in findings)


def as_json(findings: Sequence[Finding]) -> str:
    """The findings as a JSON object with the keys ``findings``, ``errors`` and ``warnings``."""
    report = {
        "findings": [asdict(finding) for finding in findings],
        "errors": count(findings, "error"),
        "warnings": count(findings, "warning"),
    }
    return json.dumps(report, indent=1)


def as_text(findings: Sequence[Finding]) -> str:
    """The findings as lines, one or two for each, and a line that counts errors and warnings."""
    lines = []
    for finding in findings:
        place = "" if finding.rank is None else f"rank {finding.rank}: "
        lines.append(f"{finding.level:<9}{place}{finding.name}: {finding.value}")
        if finding.advice:
            lines.append(f"{'':<9}-> {finding.advice}")
    errors, warnings = count(findings, "error"), count(findings, "warning")
    lines.append(f"doctor: {pluralize(errors, 'error')}, {pluralize(warnings, 'warning')}")
    return "\n".join(lines)


def first_line(error: BaseException) -> str:
    """The first line of an error's text: PyTorch adds a stack of C++."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

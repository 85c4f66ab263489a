"""The tutorial's script runs at each of its stages, and sends the bytes that the text says."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from repository import ROOT
from train_processes import run_alone, run_on_ranks

TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
SCRIPT, ATTACH, STATS, FEEDBACK, COMPILE, LOCAL, SYNCHRONIZE = re.findall(
    r"^```python\n(.*?)^```$", TUTORIAL, re.M | re.S
)
IMPORT, ATTACH = ATTACH.split("\n\n")

#: For each stage the lines after the line with DDP, and those at the end of ``train``.
STAGES = {
    "DDP": ("", ""),
    "one line": (ATTACH, STATS),
    "error feedback": (FEEDBACK, STATS),
    "compiled": (FEEDBACK + COMPILE, STATS),
    "local steps": (LOCAL, SYNCHRONIZE + STATS + "print('steps', stats.steps)\n"),
}


def _script(stage: str) -> str:
    """The script as the tutorial has it at a stage."""
    attach, end = STAGES[stage]
    lines = SCRIPT.splitlines(keepends=True)
    wrapped = next(number for number, line in enumerate(lines, 1) if "DDP(" in line)
    printed = next(number for number, line in enumerate(lines, 1) if "loss.item()" in line)
    added = [textwrap.indent(each, " " * 4) for each in (attach, end)]
    parts = [*lines[:wrapped], added[0], *lines[wrapped:printed], added[1], *lines[printed:]]
    return IMPORT + "\n" + "".join(parts)


def _sent(text: str) -> list[str]:
    return re.findall(r"rank 0: ([\d,]+) bytes a step, ([\d.]+) times fewer", text)


def test_alone(tmp_path: Path) -> None:
    assert 20 <= len([line for line in SCRIPT.splitlines() if line]) <= 30
    assert re.fullmatch(r"rank 0: loss \d\.\d+\n", run_alone(tmp_path, _script("DDP")))


@pytest.mark.parametrize("stage", STAGES)
def test_on_two_ranks(tmp_path: Path, stage: str) -> None:
    printed = run_on_ranks(tmp_path, _script(stage))[0]
    loss = re.search(r"rank 0: loss ([\d.]+)", printed)
    assert loss is not None and float(loss[1]) < 0.2
    shown = dict(zip(["one line", "error feedback"], _sent(TUTORIAL), strict=True))
    shown["compiled"] = shown["error feedback"]
    if stage in shown:
        assert _sent(printed) == [shown[stage]]
    if stage == "local steps":
        assert "steps 20" in printed

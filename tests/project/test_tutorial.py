"""The tutorial's script runs at each of its stages, and sends the bytes that the text says."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torchrun_logs
from repository import ROOT

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

#: With torch 2.13 a script with DDP over Gloo may abort when Python ends, also without this
#: library: in 1 of 20 runs on a busy machine.
EXIT_DEFECT = "terminate called without an active exception"


def _script(stage: str) -> str:
    """The script as the tutorial has it at a stage."""
    attach, end = STAGES[stage]
    lines = SCRIPT.splitlines(keepends=True)
    wrapped = next(number for number, line in enumerate(lines, 1) if "DDP(" in line)
    printed = next(number for number, line in enumerate(lines, 1) if "loss.item()" in line)
    added = [textwrap.indent(each, " " * 4) for each in (attach, end)]
    parts = [*lines[:wrapped], added[0], *lines[wrapped:printed], added[1], *lines[printed:]]
    return IMPORT + "\n" + "".join(parts)


def _run(folder: Path, stage: str, launcher: list[str]) -> str:
    path = folder / "train.py"
    path.write_text(_script(stage))
    for _ in range(3):
        done = subprocess.run([*launcher, str(path)], capture_output=True, text=True, timeout=300)
        if EXIT_DEFECT not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    return done.stdout


def _sent(text: str) -> list[str]:
    return re.findall(r"rank 0: ([\d,]+) bytes a step, ([\d.]+) times fewer", text)


def test_the_script_is_short() -> None:
    assert 20 <= len([line for line in SCRIPT.splitlines() if line]) <= 30


def test_alone(tmp_path: Path) -> None:
    assert re.fullmatch(r"rank 0: loss \d\.\d+\n", _run(tmp_path, "DDP", [sys.executable]))


@pytest.mark.parametrize("stage", STAGES)
def test_on_two_ranks(tmp_path: Path, stage: str) -> None:
    _run(tmp_path, stage, torchrun_logs.launcher(tmp_path))
    printed = torchrun_logs.printed(tmp_path)[0]
    loss = re.search(r"rank 0: loss ([\d.]+)", printed)
    assert loss is not None and float(loss[1]) < 0.2
    shown = dict(zip(["one line", "error feedback"], _sent(TUTORIAL), strict=True))
    shown["compiled"] = shown["error feedback"]
    if stage in shown:
        assert _sent(printed) == [shown[stage]]
    if stage == "local steps":
        assert "steps 20" in printed

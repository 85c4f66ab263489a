"""The tutorial's script, and the examples that record a training, do what their texts say."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT
from train_processes import finished, run_alone, run_on_ranks

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


# ---- examples that record a training -------------------------------------------------------------


def _record(folder: Path, program: str, *options: str) -> tuple[str, list[dict[str, Any]]]:
    """What an example prints, and the events that it records. It must also draw them."""
    trace, picture = folder / "trace.json", folder / "trace.png"
    command = [sys.executable, str(ROOT / "examples" / program), str(trace)]
    command += ["--picture", str(picture), *options]
    printed = finished(*command).stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    return printed, json.loads(trace.read_text())["traceEvents"]


def test_what_passes_is_recorded(tmp_path: Path) -> None:
    options = ("--mbit-per-s", "2000", "--codec", "bfloat16", "--steps", "2")
    printed, events = _record(tmp_path, "trace_training.py", *options)
    assert "allreduce" in printed
    reduced = [event for event in events if event["name"] == "allreduce"]
    assert {event["pid"] for event in reduced} == {0, 1}
    assert {event["args"]["dtype"] for event in reduced} == {"bfloat16"}


def test_the_spans_of_a_hook_are_drawn(tmp_path: Path) -> None:
    _, events = _record(tmp_path, "profile_training.py", "--width", "64", "--steps", "1")
    name = "commhook::wire (bucket 1, error_feedback(blockwise(bits=4)))"
    assert name in {event["name"] for event in events}

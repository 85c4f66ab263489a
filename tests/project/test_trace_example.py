"""The examples that record a training: they run as their documentation says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from repository import ROOT
from train_processes import finished


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

"""The examples that record a training: they run as their documentation says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from repository import ROOT

EXAMPLES = ROOT / "examples"


def test_what_passes_is_recorded(tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "trace.png"
    command = [
        sys.executable,
        str(EXAMPLES / "trace_training.py"),
        str(trace),
        "--picture",
        str(picture),
    ]
    options = ["--mbit-per-s", "2000", "--codec", "bfloat16", "--steps", "2"]
    ran = subprocess.run([*command, *options], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert "allreduce" in ran.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    reduced = [event for event in events if event["name"] == "allreduce"]
    assert {event["pid"] for event in reduced} == {0, 1}
    assert {event["args"]["dtype"] for event in reduced} == {"bfloat16"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_spans_of_a_hook_are_drawn(tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "profile.png"
    program = str(EXAMPLES / "profile_training.py")
    options = ["--picture", str(picture), "--width", "64", "--steps", "1"]
    command = [sys.executable, program, str(trace), *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert "commhook::wire (bucket 1, error_feedback(blockwise(bits=4)))" in names
    assert picture.read_bytes().startswith(b"\x89PNG")

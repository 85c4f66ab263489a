"""The example that records a training: it runs as its documentation says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from repository import ROOT

EXAMPLE = ROOT / "examples" / "trace_training.py"


def test_it_runs(tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "trace.png"
    command = [sys.executable, str(EXAMPLE), str(trace), "--picture", str(picture)]
    options = ["--mbit-per-s", "2000", "--codec", "bfloat16", "--steps", "2"]
    ran = subprocess.run([*command, *options], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert "allreduce" in ran.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    reduced = [event for event in events if event["name"] == "allreduce"]
    assert {event["pid"] for event in reduced} == {0, 1}
    assert {event["args"]["dtype"] for event in reduced} == {"bfloat16"}
    assert picture.read_bytes().startswith(b"\x89PNG")

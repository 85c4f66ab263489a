"""The README's script runs as it stands, alone and under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torchrun_logs
from repository import ROOT

README = ROOT / "README.md"
_SECONDS = 120


def _script() -> str:
    (script,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.M | re.S)
    return str(script)


def _run(folder: Path, launcher: list[str]) -> str:
    (folder / "train.py").write_text(_script())
    done = subprocess.run(
        [*launcher, "train.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_alone(tmp_path: Path) -> None:
    printed = _run(tmp_path, [sys.executable])
    assert "rank 0: loss " in printed
    assert printed.count("100 steps on 1 rank: this rank sent") == 1


def test_under_torchrun(tmp_path: Path) -> None:
    _run(tmp_path, torchrun_logs.launcher(tmp_path))
    for rank, printed in enumerate(torchrun_logs.printed(tmp_path)):
        assert f"rank {rank}: loss " in printed
        assert printed.count("100 steps on 2 ranks: this rank sent") == 1
        assert "7.8 times less than plain all-reduces" in printed


def test_the_script_is_short() -> None:
    assert len(_script().splitlines()) <= 25

"""The README's script runs as it stands, alone and under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

README = ROOT / "README.md"
_SECONDS = 120


def _script() -> str:
    (script,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.M | re.S)
    return str(script)


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ([sys.executable], 1),
        ([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], 2),
    ],
    ids=["alone", "torchrun"],
)
def test_the_script(tmp_path: Path, command: list[str], ranks: int) -> None:
    (tmp_path / "train.py").write_text(_script())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "train.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        assert f"rank {rank}: loss " in done.stdout
    said = f"100 steps on {ranks} ranks: this rank sent"
    assert done.stdout.count(said) == ranks
    if ranks == 2:
        assert "7.8 times less than plain all-reduces" in done.stdout


def test_the_script_is_short() -> None:
    assert len(_script().splitlines()) <= 25

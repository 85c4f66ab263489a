"""The README's script runs as it stands, alone and under torchrun."""

from __future__ import annotations

import re
from pathlib import Path

from repository import ROOT
from train_processes import run_alone, run_on_ranks

(SCRIPT,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)


def test_alone(tmp_path: Path) -> None:
    assert SCRIPT.count("\n") <= 25
    printed = run_alone(tmp_path, SCRIPT)
    assert "rank 0: loss " in printed
    assert printed.count("100 steps on 1 rank: this rank sent") == 1


def test_under_torchrun(tmp_path: Path) -> None:
    for rank, printed in enumerate(run_on_ranks(tmp_path, SCRIPT)):
        assert f"rank {rank}: loss " in printed
        assert printed.count("100 steps on 2 ranks: this rank sent") == 1
        assert "7.8 times less than plain all-reduces" in printed

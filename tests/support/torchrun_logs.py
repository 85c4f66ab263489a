"""Runs a document's script alone and under torchrun, where the lines of ranks mix in one stream."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from train_processes import finished

RANKS = 2

#: With torch 2.13 a script with DDP over Gloo may abort when Python ends, also without this
#: library: in 1 of 20 runs on a busy machine.
EXIT_DEFECT = "terminate called without an active exception"


def run_alone(folder: Path, script: str) -> str:
    """What the script prints without a launcher."""
    return _run(folder, script, [sys.executable])


def run_on_ranks(folder: Path, script: str) -> list[str]:
    """What each of two ranks prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", "--redirects=1", f"--log-dir={folder / 'logs'}"]
    _run(folder, script, command)
    runs = sorted((folder / "logs").glob("*/attempt_0"), key=lambda run: run.stat().st_mtime)
    return [(runs[-1] / str(rank) / "stdout.log").read_text() for rank in range(RANKS)]


def _run(folder: Path, script: str, launcher: list[str]) -> str:
    (folder / "train.py").write_text(script)
    for _ in range(3):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = finished(*launcher, "train.py", folder=folder, code=None, environment=environment)
        if EXIT_DEFECT not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    return done.stdout

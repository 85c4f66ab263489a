"""Separates the output of ranks under torchrun: in one stream their lines mix."""

from __future__ import annotations

import sys
from pathlib import Path

RANKS = 2


def launcher(folder: Path) -> list[str]:
    """The command that starts a script on two ranks; :func:`printed` reads their lines."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, f"--nproc-per-node={RANKS}", "--redirects=1", f"--log-dir={folder / 'logs'}"]


def printed(folder: Path) -> list[str]:
    """The lines of each rank in the last run with :func:`launcher`."""
    runs = sorted((folder / "logs").glob("*/attempt_0"), key=lambda run: run.stat().st_mtime)
    return [(runs[-1] / str(rank) / "stdout.log").read_text() for rank in range(RANKS)]

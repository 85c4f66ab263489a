"""What each rank under torchrun prints, apart: in one stream their lines run into each other."""

from __future__ import annotations

import sys
from pathlib import Path

RANKS = 2


def launcher(folder: Path) -> list[str]:
    """The command that starts a script on two ranks whose lines :func:`printed` reads."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, f"--nproc-per-node={RANKS}", "--redirects=1", f"--log-dir={folder / 'logs'}"]


def printed(folder: Path) -> list[str]:
    """The lines of each rank's last run with :func:`launcher`."""
    runs = sorted((folder / "logs").glob("*/attempt_0"), key=lambda run: run.stat().st_mtime)
    return [(runs[-1] / str(rank) / "stdout.log").read_text() for rank in range(RANKS)]

"""``bench``: measures the link between ranks, collectives, codecs, and a step with each hook."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch_commhook.cli import launcher
from torch_commhook.cli.bench.options import BenchOptions, parse_options
from torch_commhook.cli.bench.rank import run_rank
from torch_commhook.cli.launch_environment import run_ranked


def main(argv: Sequence[str]) -> int:
    """Run ``bench argv``; returns the exit code. See :func:`run_ranked`."""
    return run_ranked("bench", argv, parse_options, _launch, run_rank)


def _launch(argv: Sequence[str], options: BenchOptions) -> int:
    logs = Path(tempfile.gettempdir()) / f"commhook-bench-{os.getpid()}"
    command = [sys.executable, "-m", "torch_commhook", "bench", *argv]
    return launcher.launch(
        command, options.ranks, logs, options.threads, timeout=options.timeout, name="bench"
    )

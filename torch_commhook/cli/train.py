"""``train``: trains a small transformer. The process launches the ranks, or is one of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch_commhook.cli import launcher
from torch_commhook.cli.launch_environment import run_ranked
from torch_commhook.cli.train_options import TrainOptions, parse_options
from torch_commhook.cli.train_rank import train_rank


def main(argv: Sequence[str]) -> int:
    """Run ``train argv``; returns the exit code. See :func:`run_ranked`."""
    return run_ranked("train", argv, parse_options, _launch, train_rank)


def _launch(argv: Sequence[str], options: TrainOptions) -> int:
    command = [sys.executable, "-m", "torch_commhook", "train", *argv, "--out", str(options.out)]
    return launcher.launch(
        command, options.config.ranks, options.out, options.threads, timeout=options.timeout
    )

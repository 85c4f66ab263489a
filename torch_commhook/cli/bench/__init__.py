"""``bench``: measures the link between ranks, collectives, codecs, and a step with each hook."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch_commhook.cli.bench.options import BenchOptions, build_parser, parse_options
from torch_commhook.cli.place import Place, RankedCommand

_NAME = "bench"


def main(argv: Sequence[str]) -> int:
    """Run ``bench argv``; returns the exit code. See :meth:`RankedCommand.run`."""
    return RankedCommand(_NAME, build_parser, parse_options, _launch, _run_rank).run(argv)


def _launch(argv: Sequence[str], options: BenchOptions) -> int:
    from torch_commhook.cli.launcher import launch

    logs = Path(tempfile.gettempdir()) / f"commhook-bench-{os.getpid()}"
    command = [sys.executable, "-m", "torch_commhook", _NAME, *argv]
    return launch(
        command, options.ranks, logs, options.threads, timeout=options.timeout, name=_NAME
    )


def _run_rank(options: BenchOptions, place: Place) -> None:
    from torch_commhook.cli.bench.rank import run_rank

    run_rank(options, place)

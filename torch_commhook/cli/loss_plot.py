"""Draws the loss of runs against the steps and against the bytes sent."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_commhook.cli.report import RunResult

#: What to say where there is nothing to draw with.
HOW_TO_GET_MATPLOTLIB = "no loss.png: matplotlib is missing (pip install torch-commhook[train])"

_LABEL_CHARACTERS = 44


def draw_loss(path: Path, results: Sequence[RunResult]) -> bool:
    """Write a PNG with a curve for each run.

    Returns:
        False where matplotlib is not installed, and nothing is written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: that would look for a display
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for number, result in enumerate(results):
        losses = [record.loss for record in result.records]
        # Curves that agree lie on each other: through the dashes the first one shows.
        line = "-" if number == 0 else (0, (3, 2))
        style: dict[str, Any] = {"label": _wrapped(result.hook), "linestyle": line}
        by_step.plot([record.step for record in result.records], losses, **style)
        if all(record.bytes_sent is not None for record in result.records):
            sent = [(record.bytes_sent or 0) / 1e6 for record in result.records]
            by_bytes.plot(sent, losses, **style)
    by_step.set(xlabel="step", ylabel="loss (nats per byte)")
    by_bytes.set(xlabel="sent by rank 0 for gradients (MB)")
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.3)
    by_step.legend()
    figure.savefig(path, dpi=120)
    return True


def _wrapped(hook: str) -> str:
    """A hook in lines that leave room for the curves."""
    return "\n".join(textwrap.wrap(hook, _LABEL_CHARACTERS))

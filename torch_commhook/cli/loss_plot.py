"""Draws the loss of runs by step, by bytes sent and by time."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_commhook.cli.outputs import has_matplotlib
from torch_commhook.cli.report import RunResult, StepRecord, format_bytes
from torch_commhook.cli.train_config import is_no_hook

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The colours of runs with hooks. Most people with colour blindness can tell them apart.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c564b", "#6a3d9a")
_DASHES = ("-", "--", "-.", ":")
#: The colour of the run without a hook. Its curve lies below the others.
_GREY = "#7f7f7f"
#: Smoothing averages over this share of the steps before, and as many after, each step.
_SMOOTHED_SHARE = 0.025
_INCHES = 4.2
#: The characters in a row of the legend, per panel.
_LABEL_CHARACTERS = 44
#: If the largest number of bytes is less than this many times the smallest, the axis has ticks
#: between powers of ten.
_FEW_TICKS = 10.0


@dataclass(frozen=True)
class _Panel:
    title: str
    label: str
    place: Callable[[StepRecord], float | None]


_STEPS = _Panel("by step", "step", lambda record: record.step)
_BYTES = _Panel(
    "by bytes sent", "sent by rank 0 for gradients", lambda record: record.bytes_sent or None
)
_TIME = _Panel("by time", "time of the steps (s)", lambda record: record.seconds)


def draw_loss(path: Path, results: Sequence[RunResult], title: str = "") -> bool:
    """Write a PNG with two curves for each run: the loss, and the smoothed loss.

    Args:
        path: the path of the picture.
        results: the results of the runs.
        title: the title of the picture.

    Returns:
        Whether matplotlib is installed. If not, the function writes nothing.
    """
    if not has_matplotlib():
        return False
    loss_figure(results, title).savefig(path, dpi=120)
    return True


def loss_figure(results: Sequence[RunResult], title: str) -> Figure:
    """The picture of :func:`draw_loss`: a panel for each kind of axis, above a legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sends = any(_BYTES.place(record) for result in results for record in result.records)
    panels = (_STEPS, _BYTES, _TIME) if sends else (_STEPS, _TIME)
    figure = Figure(figsize=(_INCHES * len(panels), 4.8), layout="constrained")
    FigureCanvasAgg(figure)  # unlike pyplot, it needs no display
    figure.suptitle(title)
    all_axes = figure.subplots(1, len(panels), sharey=True)
    styles = _styles(results)
    for panel, axes in zip(panels, all_axes, strict=True):
        for result, style in zip(results, styles, strict=True):
            _draw_curve(axes, result, panel, style)
        axes.set(title=f"loss {panel.title}", xlabel=panel.label)
        axes.grid(alpha=0.3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if panel is _BYTES:
            _count_bytes(axes)
    all_axes[0].set_ylabel("loss (nats per byte)")
    lines, labels = all_axes[0].get_legend_handles_labels()
    width = _LABEL_CHARACTERS * len(panels)
    columns = max(1, min(len(labels), width // max(map(len, labels), default=1)))
    figure.legend(
        lines,
        [_wrapped(label, width // columns) for label in labels],
        loc="outside lower center",  # where it covers no curve
        ncols=columns,
        frameon=False,
    )
    return figure


def _styles(results: Sequence[RunResult]) -> list[dict[str, Any]]:
    """The style of each curve: a colour for each hook, then dashed colours; grey for no hook."""
    kinds = ({"color": color, "linestyle": dash} for dash in cycle(_DASHES) for color in _COLORS)
    plain = {"color": _GREY, "linestyle": "-", "linewidth": 3.0, "zorder": 1.5}
    return [
        plain if is_no_hook(result.hook) else {**next(kinds), "linewidth": 1.5, "zorder": 2.0}
        for result in results
    ]


def _draw_curve(axes: Axes, result: RunResult, panel: _Panel, style: dict[str, Any]) -> None:
    places = [panel.place(record) for record in result.records]
    losses = [record.loss for record in result.records]
    smooth = smoothed(losses)
    shown = [i for i, place in enumerate(places) if place is not None]
    x = [place for place in places if place is not None]
    label = "no hook" if is_no_hook(result.hook) else result.hook
    raw = {"color": style["color"], "linewidth": 0.8, "alpha": 0.3, "zorder": 1.0}
    axes.plot(x, [losses[i] for i in shown], **raw)
    axes.plot(x, [smooth[i] for i in shown], label=label, **style)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbours, of which there are fewer at both ends.

    At the beginning, where losses fall fast, a mean has as many values after its centre as before.
    """
    most = round(_SMOOTHED_SHARE * len(values))
    sums = [0.0, *accumulate(values)]
    found = []
    for i in range(len(values)):
        before = min(most, i)
        first, end = i - before, min(i + before + 1, len(values))
        found.append((sums[end] - sums[first]) / (end - first))
    return found


def _count_bytes(axes: Axes) -> None:
    """Make the horizontal axis logarithmic, with a few ticks for any range of bytes."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_xscale("log")
    least, most = axes.get_xlim()
    is_short = most < _FEW_TICKS * least
    axes.xaxis.set_major_locator(MaxNLocator(4) if is_short else LogLocator(numticks=6))
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _tick(count: float, place: int | None = None) -> str:
    """Format bytes without trailing zeros: ``10 MB``."""
    number, unit = format_bytes(count).split()
    return f"{float(number):g} {unit}"


def _wrapped(hook: str, characters: int) -> str:
    """Break a hook into lines of the legend's width."""
    return "\n".join(textwrap.wrap(hook, characters))

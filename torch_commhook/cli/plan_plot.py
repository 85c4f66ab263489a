"""Draws what a step with each hook takes over links of any rate."""

from __future__ import annotations

import colorsys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_commhook.cli.plan_numbers import format_rate

#: Bits per second: two in each factor of ten, and the ends of a scale.
RATES = (*(base * 10**power for power in range(7, 11) for base in (1, 3)), 10**11)
#: Tell apart for most who do not see all colours.
_COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c564b", "#7f7f7f"),
    *("#6a3d9a", "#b8860b", "#800000", "#17becf", "#556b2f", "#ff7f9f", "#191970", "#a0a000"),
)
_LABEL_CHARACTERS = 90


def draw_rates(
    path: Path,
    seconds: Mapping[str, Sequence[float]],
    *,
    rates: Sequence[float] = RATES,
    asked: float,
    title: str,
) -> None:
    """Write a PNG with a line for each hook, each in a colour of its own.

    Args:
        path: of the picture.
        seconds: of a step with each hook, for each rate.
        rates: of links, in bits per second.
        asked: the rate that the table is for, which a vertical line shows.
        title: of the picture.

    Raises:
        OSError: it can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    labels = ["\n".join(textwrap.wrap(hook, _LABEL_CHARACTERS)) for hook in seconds]
    lines = sum(label.count("\n") + 1 for label in labels)
    figure = Figure(figsize=(8, 5 + 0.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: that would look for a display
    axes: Any = figure.subplots()
    colors = line_colors(len(labels))
    for label, times, color in zip(labels, seconds.values(), colors, strict=True):
        axes.plot(rates, times, label=label, color=color, marker="o", markersize=3)
    axes.axvline(asked, color="0.6", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="rate of the link", ylabel="step (s)")
    tens = [rate for rate in rates if str(round(rate))[0] == "1"]
    axes.set_xticks(tens, [format_rate(rate) for rate in tens], minor=False)
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3, which="both")
    axes.set_title("\n".join(textwrap.wrap(title, _LABEL_CHARACTERS)), fontsize="medium")
    # Under the axes, where it hides nothing.
    figure.legend(loc="outside lower left", fontsize="small", frameon=False)
    figure.savefig(path, format="png", dpi=110)


def line_colors(count: int) -> list[str]:
    """So many colours, of which no two are the same."""
    found = list(_COLORS[:count])
    more = count - len(found)
    for number in range(more):
        parts = colorsys.hsv_to_rgb(number / more, 0.9, 0.45)
        found.append("#" + "".join(f"{round(255 * part):02x}" for part in parts))
    return found

"""Draws the time of a step with each hook over links of different rates."""

from __future__ import annotations

import colorsys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_commhook.cli.plan_numbers import format_rate

#: The rates in bits per second: 10 Mbit/s to 100 Gbit/s, two in each factor of ten.
RATES = (*(base * 10**power for power in range(7, 11) for base in (1, 3)), 10**11)
#: Most people with colour blindness can tell the first ones apart.
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
    """Write a PNG with a line for each hook, in different colours.

    Args:
        path: the path of the picture.
        seconds: the time of a step with each hook, in seconds, at each rate.
        rates: the rates of links, in bits per second.
        asked: the rate of the table. A vertical line marks it.
        title: the title of the picture.

    Raises:
        OSError: the file can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    labels = ["\n".join(textwrap.wrap(hook, _LABEL_CHARACTERS)) for hook in seconds]
    lines = sum(label.count("\n") + 1 for label in labels)
    figure = Figure(figsize=(8, 5 + 0.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)  # unlike pyplot, it needs no display
    axes: Any = figure.subplots()
    colors = line_colors(len(labels))
    for label, times, color in zip(labels, seconds.values(), colors, strict=True):
        axes.plot(rates, times, label=label, color=color, marker="o", markersize=3)
    axes.axvline(asked, color="0.6", linewidth=0.8, label=f"the given rate, {format_rate(asked)}")
    axes.set(xscale="log", yscale="log", xlabel="rate of the link", ylabel="step (s)")
    tens = [rate for rate in rates if str(round(rate))[0] == "1"]
    axes.set_xticks(tens, [format_rate(rate) for rate in tens], minor=False)
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3, which="both")
    axes.set_title("\n".join(textwrap.wrap(title, _LABEL_CHARACTERS)), fontsize="medium")
    # Below the axes, where it covers no line.
    figure.legend(loc="outside lower left", fontsize="small", frameon=False)
    figure.savefig(path, format="png", dpi=110)


def line_colors(count: int) -> list[str]:
    """Return ``count`` different colours."""
    found = list(_COLORS[:count])
    more = count - len(found)
    for number in range(more):
        parts = colorsys.hsv_to_rgb(number / more, 0.9, 0.45)
        found.append("#" + "".join(f"{round(255 * part):02x}" for part in parts))
    return found

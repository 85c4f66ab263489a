"""Draws the pictures of stored results, and defines the style of all pictures of results.

``python benchmarks/pictures.py`` redraws the pictures of stored runs.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import FOLDER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = FOLDER.parent / "docs" / "images"
RESULTS = FOLDER / "results"
#: The curves on the front page, the slowest first.
FRONT = {
    "DDP": "DDP",
    "cast()": "bfloat16",
    "blockwise()": "8 bits",
    "error_feedback(blockwise(bits=4))": "4 bits, error feedback",
    "powersgd(rank=2)": "PowerSGD, rank 2",
    "no communication": "no communication",
}
#: Most people with colour blindness can distinguish these colours. In print the dashes help.
_COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c564b"),
    *("#6a3d9a", "#b8860b", "#800000", "#17becf", "#556b2f", "#ff7f9f", "#191970", "#a0a000"),
)
_DASHES = ("-", "--", "-.", ":")
#: The baseline's line: wide, below the others.
PLAIN_STYLE = {"color": "#9a9a9a", "linestyle": "-", "linewidth": 3.5, "zorder": 1.5}
#: The widths of the first and the last line of a picture in which lines cover each other.
_WIDEST, _NARROWEST = 5.0, 1.2
#: The most characters of a legend side by side.
_CHARACTERS = 90


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure with one pair of axes, only for files: it needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # pyplot would look for a display
    axes: Axes = figure.subplots()
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def styles(count: int) -> list[dict[str, Any]]:
    """Colours and dashes of ``count`` lines; no two lines share both."""
    dashes = cycle(_DASHES)
    found: list[dict[str, Any]] = []
    while len(found) < count:
        dash = next(dashes)
        found += [{"color": color, "linestyle": dash} for color in _COLORS]
    return found[:count]


def styles_over_each_other(count: int) -> list[dict[str, Any]]:
    """Colours of ``count`` lines that run over each other: each second one is dashed, on top."""
    found = styles(count)
    for each in found[1::2]:
        each |= {"linestyle": (0, (4, 3)), "zorder": 2.5}
    return found


def legend_below(figure: Figure, columns: int) -> None:
    """A legend under the axes, where it hides nothing. Long names have several lines."""
    width = _CHARACTERS // columns
    lines, names = figure.axes[0].get_legend_handles_labels()
    wrapped = ["\n".join(textwrap.wrap(name, width)) for name in names]
    place = "outside lower center"
    figure.legend(lines, wrapped, loc=place, ncols=columns, fontsize="small", frameon=False)


def save(figure: Figure, path: Path) -> None:
    """Write a picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


# ---- steps over links ----------------------------------------------------------------------------


def draw_rates(times: Mapping[str, Sequence[float]], rates: Sequence[float], path: Path) -> None:
    """Draw the time of a step over the rate of links, with a line for each job.

    Args:
        times: the seconds for each rate, by job.
        rates: the links' rates, in bits per second.
        path: the picture's file.
    """
    figure, axes = new_figure(8, 7)
    order = sorted(range(len(rates)), key=lambda i: rates[i])
    mbits = [rates[i] / 1e6 for i in order]
    narrower = (_WIDEST - _NARROWEST) / max(1, len(times) - 1)
    for number, ((job, seconds), style) in enumerate(
        zip(times.items(), styles(len(times)), strict=True)
    ):
        width = _WIDEST - number * narrower
        style |= {"linewidth": width, "markersize": width + 3}
        axes.plot(mbits, [seconds[i] for i in order], label=job, marker="o", **style)
    _rates_and_seconds(axes, mbits)
    axes.set_title("time of a training step, two ranks")
    legend_below(figure, 1)
    save(figure, path)


def draw_front(times: Mapping[str, Sequence[float]], rates: Sequence[float], path: Path) -> None:
    """Draw :func:`draw_rates` for the front page: few lines, with their names at their ends."""
    figure, axes = new_figure(8, 4.5)
    order = sorted(range(len(rates)), key=lambda i: rates[i])
    mbits = [rates[i] / 1e6 for i in order]
    ends = []
    for (job, name), style in zip(FRONT.items(), styles(len(FRONT)), strict=True):
        seconds = [times[job][i] for i in order]
        style["linestyle"] = ":" if job == "no communication" else "-"
        axes.plot(mbits, seconds, marker="o", linewidth=2, **style)
        ends.append((seconds[0], name, style["color"]))
    _rates_and_seconds(axes, mbits)
    place = 0.0
    for seconds, name, color in sorted(ends):
        place = max(seconds, place * 1.14)  # so that no name covers another
        axes.annotate(
            name,
            (mbits[0], place),
            xytext=(-10, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            color=color,
            annotation_clip=False,
        )
    axes.spines["left"].set_visible(False)
    axes.yaxis.tick_right()
    axes.yaxis.set_label_position("right")
    axes.set_title("time of a training step: 10.8 million parameters, two ranks")
    save(figure, path)


def _rates_and_seconds(axes: Axes, rates: Sequence[float]) -> None:
    axes.set(xscale="log", yscale="log", xlabel="rate of the link (Mbit/s)", ylabel="step (s)")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates], minor=False)
    axes.set_xticks([], minor=True)
    ticks = (0.2, 0.3, 0.5, 1.0, 2.0, 4.0)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.set_yticks([], minor=True)


def times_of(rows: Sequence[Mapping[str, Any]], tables: int) -> dict[str, list[float]]:
    """The seconds of each job of ``bench_link``, for the first ``tables`` links."""
    first: dict[str, list[float]] = {}
    for row in rows:
        seconds = first.setdefault(row["job"], [])
        if len(seconds) < tables:
            seconds.append(row["seconds"])
    return first


def main() -> None:
    from bench_loss import draw as draw_losses
    from bench_wan import draw_stored as draw_wan

    draw_wan()
    draw_losses(json.loads((RESULTS / "bench_loss.json").read_text())["runs"])
    stored = json.loads((RESULTS / "bench_link.json").read_text())
    rates = stored["options"]["rates"]
    times = times_of(stored["rows"], len(rates))
    draw_rates(times, rates, PICTURES / "link.png")
    draw_front(times, rates, PICTURES / "step_time.png")


if __name__ == "__main__":
    main()

"""Draws the measurements of ``bench``: the rate of messages by size, and a step with each hook."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_commhook.cli.bench.hooks import ALONE
from torch_commhook.cli.bench.tables import format_rate, format_size, message_rate
from torch_commhook.planning.link_file import HookTime, LinkFile
from torch_commhook.wording import pluralize

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LABEL_CHARACTERS = 30
_SMALLER, _LARGER = "#0072b2", "#7f7f7f"


def draw(path: Path, found: LinkFile) -> None:
    """Write a PNG with a panel for messages and a panel for hooks, if they were measured.

    Args:
        path: the path of the picture.
        found: the measurements.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [bool(found.messages), bool(found.hooks)]
    rows = max(len(found.hooks), 8) if panels[1] else 8
    figure = Figure(figsize=(1 + 5.5 * max(sum(panels), 1), 1.5 + 0.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)  # unlike pyplot, it needs no display
    ranks = pluralize(found.ranks, "rank")
    figure.suptitle(f"{ranks} over {found.backend} on {found.device.upper()}")
    axes: list[Any] = list(figure.subplots(1, max(sum(panels), 1), squeeze=False)[0])
    for each in axes:
        for side in ("top", "right"):
            each.spines[side].set_visible(False)
    if panels[0]:
        _draw_messages(axes.pop(0), found)
    if panels[1]:
        _draw_hooks(axes.pop(0), found.hooks)
    if axes:
        axes[0].set_axis_off()
        axes[0].text(0.5, 0.5, "neither a link nor hooks were measured", ha="center")
    figure.savefig(path, format="png", dpi=120)


def _draw_messages(axes: Axes, found: LinkFile) -> None:
    sizes = [each.bytes for each in found.messages]
    rates = [message_rate(each, found.ranks) / 1e6 for each in found.messages]
    axes.plot(sizes, rates, marker="o", color=_SMALLER, label="messages, with their round trip")
    if found.link is not None:
        rate = found.link.bits_per_second
        trip = 2e3 * found.link.delay_seconds
        label = f"link: {format_rate(rate)} Mbit/s with headers, round trip {trip:.3g} ms"
        axes.axhline(rate / 1e6, linestyle="--", color=_LARGER, label=label)
    axes.set(xscale="log", yscale="log", xlabel="message", ylabel="Mbit/s each way")
    axes.set_xticks(sizes, [format_size(size) for size in sizes], rotation=30, ha="right")
    axes.set_xticks([], minor=True)
    axes.set_title("rate of messages")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), fontsize="small", frameon=False)


def _draw_hooks(axes: Axes, hooks: Sequence[HookTime]) -> None:
    names = [_wrapped(each.hook) for each in hooks]
    seconds = [each.seconds for each in hooks]
    colors = [_LARGER if each.hook == ALONE else _SMALLER for each in hooks]
    bars = axes.barh(range(len(hooks)), seconds, color=colors)
    labels = [
        f"{each.seconds * 1e3:.4g} ms"
        + ("" if each.hook == ALONE else f" ({each.to_allreduce:.2f})")
        for each in hooks
    ]
    axes.bar_label(bars, labels, padding=4, fontsize="small")
    axes.set_yticks(range(len(hooks)), names, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, max(seconds) * 1.3)
    axes.set(xlabel="step (s), and its ratio to allreduce()")
    axes.set_title("steps with each hook")


def _wrapped(hook: str) -> str:
    """Break a hook into short lines, after brackets and commas."""
    lines, line = [], ""
    for piece in re.split(r"(?<=[(,])", hook):
        if line and len(line) + len(piece) > _LABEL_CHARACTERS:
            lines.append(line)
            line = ""
        line += piece.lstrip() if not line else piece
    return "\n".join([*lines, line])

"""Runs one rank of ``bench``: it measures part after part, and writes tables and pictures."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torch_commhook.cli.bench.measurements import (
    ALONE,
    LinkPart,
    measure_codecs,
    measure_collectives,
    measure_hooks,
    measure_link_part,
)
from torch_commhook.cli.bench.options import BenchOptions
from torch_commhook.cli.launch_environment import LaunchEnvironment
from torch_commhook.cli.report import format_bytes
from torch_commhook.cli.world import World, join_world
from torch_commhook.planning.link_file import (
    CodecSpeed,
    CollectiveTime,
    HookTime,
    LinkFile,
    Message,
)
from torch_commhook.step.link import MANY, Wire
from torch_commhook.wording import align_columns, pluralize

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# ---- formats the measurements of bench as text ---------------------------------------------------


#: The text of the part ``link`` on one rank.
NO_LINK = "one rank has no link; --ranks 2, or bench under torchrun, measures one"


def link_text(part: LinkPart, ranks: int) -> str:
    """The rate, the round trip, the rate of more connections, and a row for each message."""
    figures = part.figures
    lines = [
        f"link: {format_rate(figures.measured.bits_per_second)} Mbit/s each way with headers, "
        f"round trip {_milliseconds(figures.round_trip)} ms"
    ]
    if MANY in figures.rates:
        one, many = (format_rate(figures.rates[count]) for count in (1, MANY))
        taken = "takes" if figures.connections == MANY else "would not take"
        lines.append(
            f"one connection carries {one} Mbit/s, {MANY} carry {many}: attach() {taken} {MANY}"
        )
    others = ranks - 1
    to_each = "" if others == 1 else f" to each of {others} ranks"
    header = [f"message{to_each}", "ms", "Mbit/s each way"]
    rows = [
        [
            format_size(each.bytes),
            _milliseconds(each.seconds),
            format_rate(message_rate(each, ranks)),
        ]
        for each in part.messages
    ]
    lines += ["", *align_columns(header, rows)]
    lines += [f"{format_size(size)}: left out, {why}" for size, why in part.left_out.items()]
    return "\n".join(lines)


def message_rate(message: Message, ranks: int) -> float:
    """The bits per second that each rank sends, without headers; the time has the round trip."""
    return message.bytes * (ranks - 1) * 8 / message.seconds


def collectives_text(found: Sequence[CollectiveTime]) -> str:
    """A row for each collective, a column for each size."""
    sizes = list(dict.fromkeys(each.bytes for each in found))
    names = list(dict.fromkeys(each.name for each in found))
    times = {(each.name, each.bytes): f"{_milliseconds(each.seconds)} ms" for each in found}
    header = ["collective", *map(format_size, sizes)]
    rows = [[name, *(times.get((name, size), "") for size in sizes)] for name in names]
    return "\n".join(align_columns(header, rows))


def codecs_text(found: Sequence[CodecSpeed]) -> str:
    """A row for each codec."""
    header = ["codec", "smaller by", "encode GB/s", "x copy", "decode GB/s", "x copy"]
    rows = [
        [
            each.codec,
            f"{each.ratio:.1f}",
            f"{each.encode_bytes_per_second / 1e9:.2f}",
            f"{each.encode_to_copy:.2f}",
            f"{each.decode_bytes_per_second / 1e9:.2f}",
            f"{each.decode_to_copy:.2f}",
        ]
        for each in found
    ]
    return "\n".join(align_columns(header, rows))


def hooks_text(found: Sequence[HookTime], description: str) -> str:
    """A row for each hook."""
    header = ["hook", "step ms", "x allreduce()", "sent per step"]
    rows = [
        [
            each.hook,
            _milliseconds(each.seconds),
            f"{each.to_allreduce:.2f}",
            "" if each.bytes == 0 else format_bytes(each.bytes),
        ]
        for each in found
    ]
    title = f"steps that average {description}, and compute next to nothing"
    return "\n".join([title, *align_columns(header, rows)])


def format_size(nbytes: int) -> str:
    """Format bytes in binary units: ``64 KiB``."""
    value = float(nbytes)
    for unit in ("B", "KiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} MiB"


def _milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def format_rate(bits_per_second: float) -> str:
    """Format a rate in Mbit/s, without the unit."""
    value = bits_per_second / 1e6
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


# ---- draws the measurements of bench -------------------------------------------------------------


_LABEL_CHARACTERS = 30
_SMALLER, _LARGER = "#0072b2", "#7f7f7f"


def draw(path: Path, found: LinkFile) -> None:
    """Write a PNG with a panel for messages and a panel for hooks, if they were measured."""
    from matplotlib.figure import Figure  # unlike pyplot, it needs no display

    panels = [bool(found.messages), bool(found.hooks)]
    rows = max(len(found.hooks), 8) if panels[1] else 8
    figure = Figure(figsize=(1 + 5.5 * max(sum(panels), 1), 1.5 + 0.4 * rows), layout="constrained")
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


# ---- runs one rank of bench: joins the others, and measures one part after another ---------------


def run_rank(options: BenchOptions, place: LaunchEnvironment) -> None:
    """Measure all parts. Rank 0 prints, draws and writes the measurements."""
    world = join_world(options, place)
    found = LinkFile(
        ranks=world.size,
        backend=world.backend,
        device=world.device.type,
        machine=_machine(options),
    )

    def say(text: str) -> None:
        if world.rank == 0 and not options.json:
            print(f"{text}\n", flush=True)

    ranks = pluralize(found.ranks, "rank")
    where = "CUDA" if found.device == "cuda" else pluralize(options.threads, "thread")
    torch_version = torch.__version__
    say(f"commhook bench: {ranks} over {found.backend}, {where} each, torch {torch_version}")
    for part in options.parts:
        found = _with_part(part, found, world, options, say)
    if world.rank == 0:
        _write(found, options)
    dist.barrier()
    dist.destroy_process_group()


def _with_part(
    part: str, found: LinkFile, world: World, options: BenchOptions, say: Callable[[str], None]
) -> LinkFile:
    """Measure a part; returns ``found`` with its measurements."""
    device, seconds = world.device, options.seconds_of(part)
    if part == "link":
        if world.size == 1:
            say(NO_LINK)
            return found
        measured = measure_link_part(Wire(), seconds)
        say(link_text(measured, world.size))
        return replace(found, link=measured.figures.measured, messages=measured.messages)
    if part == "collectives":
        if world.size == 1:
            return found
        collectives = measure_collectives(device, seconds)
        say(collectives_text(collectives))
        return replace(found, collectives=collectives)
    if part == "codecs":
        elements = sum(map(math.prod, options.shapes))
        codecs = measure_codecs(device, elements, seconds)
        say(codecs_text(codecs))
        return replace(found, codecs=codecs)
    hooks = measure_hooks(options.hooks, options.shapes, device, seconds)
    say(hooks_text(hooks, options.description))
    return replace(found, hooks=hooks)


def _machine(options: BenchOptions) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
        "threads": options.threads,
        "gradients": options.description,
        "elements": sum(map(math.prod, options.shapes)),
    }


def _write(found: LinkFile, options: BenchOptions) -> None:
    for path in (options.out, options.plot):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if options.out is not None:
        found.write(options.out)
    if options.plot is not None:
        draw(options.plot, found)
    if options.json:
        print(found.text(), end="", flush=True)

"""Formats the measurements of ``bench`` as text."""

from __future__ import annotations

from collections.abc import Sequence

from torch_commhook.cli.bench.link import LinkPart
from torch_commhook.cli.formatting import align_columns
from torch_commhook.cli.report import format_bytes
from torch_commhook.planning.link import MANY
from torch_commhook.planning.link_file import (
    CodecSpeed,
    CollectiveTime,
    HookTime,
    LinkFile,
    Message,
)
from torch_commhook.wording import pluralize

#: The text of the part ``link`` on one rank.
NO_LINK = "one rank has no link; --ranks 2, or bench under torchrun, measures one"


def heading(found: LinkFile, threads: int, torch_version: str) -> str:
    """The first line: the ranks, their backend and their device."""
    ranks = pluralize(found.ranks, "rank")
    where = "CUDA" if found.device == "cuda" else pluralize(threads, "thread")
    return f"commhook bench: {ranks} over {found.backend}, {where} each, torch {torch_version}"


def link_text(part: LinkPart, ranks: int) -> str:
    """The rate, the round trip, the rate of more connections, and a row for each message."""
    figures = part.figures
    lines = [
        f"link: {format_rate(figures.link.bits_per_second)} Mbit/s each way with headers, "
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

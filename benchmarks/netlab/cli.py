"""The command line: makes hosts and links while one command runs on them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .lab import Lab, Link
from .ranks import GRACE_SECONDS
from .signals import Stopped, stopped_by_signals
from .tools import LabError
from .units import format_rate, parse_rate


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="netlab",
        usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]",
        description=(
            "Run a command as one rank on each of several hosts, which are network namespaces "
            "joined by links of a given rate. Needs root and iproute2, and a C compiler for "
            "--delay and --loss."
        ),
        epilog=(
            "Exit status: that of the command (of the first rank that failed), 124 after the "
            "timeout, 2 wrong arguments or no hosts, 130 Ctrl-C, 143 SIGTERM."
        ),
    )
    add = parser.add_argument
    add("--hosts", type=int, default=2, help="number of hosts, 2 to 250 (default: 2)")
    add(
        "--rate",
        type=_rate,
        default="200mbit",
        help="rate of each link, each way, such as 200mbit or 1gbit (default: 200mbit)",
    )
    add(
        "--burst",
        type=int,
        metavar="BYTES",
        help="bytes that may pass at once after a pause (default: those of 5 ms, at least 128 KiB)",
    )
    add(
        "--queue-ms",
        type=float,
        default=50.0,
        metavar="MS",
        help="how long a packet waits before it is dropped (default: 50)",
    )
    add(
        "--delay",
        type=float,
        metavar="MS",
        help="delay of each frame, each way: a round trip takes twice that (default: none)",
    )
    add(
        "--loss",
        type=float,
        default=0.0,
        metavar="PERCENT",
        help="share of frames to drop at random (default: 0)",
    )
    add(
        "--congestion",
        metavar="NAME",
        help="TCP's congestion control, such as reno (default: the system's)",
    )
    add(
        "--timeout",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="limit after which all ranks are ended (default: 3600)",
    )
    add(
        "--grace",
        type=float,
        default=GRACE_SECONDS,
        metavar="SECONDS",
        help=f"end the others so long after a rank has failed (default: {GRACE_SECONDS:g})",
    )
    add("command", nargs="+", metavar="COMMAND", help="command to run on each host, after --")
    return parser


def _rate(text: str) -> int:
    try:
        return parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    for name in ("timeout", "grace"):
        if not getattr(options, name) > 0:
            parser.error(f"argument --{name}: must be above 0, got {getattr(options, name):g}")
    try:
        lab = Lab(
            options.hosts,
            options.rate,
            burst=options.burst,
            queue_seconds=options.queue_ms / 1e3,
            congestion=options.congestion,
            delay=None if options.delay is None else options.delay / 1e3,
            loss=options.loss / 100,
        )
    except ValueError as error:
        parser.error(str(error))
    try:
        with stopped_by_signals(), lab:
            status = lab.run(options.command, timeout=options.timeout, grace=options.grace)
            print(describe_links(lab.rate, lab.link_bytes()), file=sys.stderr)
            if status == 124:
                print(f"netlab: ended after {options.timeout:g} s", file=sys.stderr)
            return status
    except LabError as error:
        print(error, file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(f"netlab: stopped by {stopped}, all ranks ended", file=sys.stderr)
        return 128 + stopped.number


def describe_links(rate: int, links: Sequence[Link]) -> str:
    """A line for each host, with the bytes that its link has carried."""
    lines = [f"links of {format_rate(rate)} each way:"]
    for host, link in enumerate(links):
        lines.append(f"  host {host}: sent {link.sent:,} bytes, received {link.received:,}")
    return "\n".join(lines)

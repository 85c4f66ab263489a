"""Shared by benchmarks on links: their options, and the way that they run and end."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from harness import Report
from link_rank import LINK, WARM_UP, link_file
from machine import FOLDER
from netlab import Lab, LabError, Stopped, format_rate, parse_rate, stopped_by_signals
from netlab.distance import MOST_DELAY, check_distance
from netlab.ranks import print_line

from torch_commhook.hooks.expressions import HookExpressionError, check_hook

Found = TypeVar("Found")
ThePlan = TypeVar("ThePlan")
#: A link's rate, in bits per second, and its delay each way, in seconds. None: no forwarder.
Link = tuple[int, float | None]


def rate_argument(text: str) -> int:
    """The rate of a link, in bits per second, for argparse."""
    try:
        return parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def delay_argument(text: str) -> float:
    """For argparse: the delay of a link each way, given in milliseconds, as seconds."""
    try:
        seconds = float(text) / 1e3
        check_distance(seconds, 0.0)
    except ValueError as error:
        most = f"{MOST_DELAY * 1e3:g}"
        raise argparse.ArgumentTypeError(f"must be 0 to {most} ms, got {text}") from error
    return seconds


def add_links(
    options: argparse.ArgumentParser, rates: Sequence[str], delays: Sequence[float] | None
) -> None:
    """Add the options for rates and delays of links: a table for each of both.

    Args:
        options: the parser.
        rates: the default rates, such as ``"200mbit"``.
        delays: the default delays each way, in milliseconds; None: none.
    """
    of_default = "none" if delays is None else " ".join(f"{delay:g}" for delay in delays)
    options.add_argument(
        "--rates",
        type=rate_argument,
        nargs="+",
        default=[parse_rate(rate) for rate in rates],
        help=f"rates of the links, each way (default: {' '.join(rates)})",
    )
    options.add_argument(
        "--delay",
        type=delay_argument,
        nargs="+",
        metavar="MS",
        default=None if delays is None else [delay / 1e3 for delay in delays],
        help=f"delays of the links, each way, with each rate (default: {of_default})",
    )


def format_link(rate: int, delay: float | None) -> str:
    """For example ``200mbit``, or ``200mbit and 25 ms``."""
    return format_rate(rate) + ("" if delay is None else f" and {delay * 1e3:g} ms")


def parse_link(text: str) -> tuple[int, float | None]:
    """The rate and the delay in a text of :func:`format_link`."""
    rate, _, delay = text.partition(" and ")
    return parse_rate(rate), float(delay.removesuffix(" ms")) / 1e3 if delay else None


def use_one_thread(options: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Refuse devices and numbers of threads that a rank does not have."""
    if parsed.device != "cpu" or parsed.threads not in ([1], [1, 2]):
        options.error("each rank has one thread, on the CPU")
    parsed.threads = [1]


def runs_as_rank(parsed: argparse.Namespace, run_rank: Callable[[Path], object]) -> bool:
    """Run a rank if the command line gives a plan; returns whether it does.

    Args:
        parsed: the command line. Its ``plan`` is removed.
        run_rank: called with the path of the plan.
    """
    plan = vars(parsed).pop("plan")
    if plan is not None:
        run_rank(plan)
    return plan is not None


def check_hooks(
    options: argparse.ArgumentParser, hooks: Sequence[str], argument: str = "--hooks"
) -> None:
    """Report an argument's error at the first text that is not a hook expression."""
    for hook in hooks:
        try:
            check_hook(hook)
        except HookExpressionError as error:
            options.error(f"argument {argument}: {error}")


def congestion_control() -> str:
    """The kernel's congestion control algorithm."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def run_ranks(lab: Lab, folder: Path, program: str, plan: Any, **options: Any) -> Any:
    """Run a program of this folder on all ranks of a lab.

    Args:
        lab: the hosts.
        folder: for files of the run.
        program: its file's name; called with the name of a file with the plan, as JSON.
        plan: a dataclass.
        options: as in ``Lab.run``.

    Returns:
        The contents of ``figures.json``, which rank 0 has written next to the plan.

    Raises:
        LabError: a rank has failed, and has printed the reason.
    """
    path = folder / "plan.json"
    path.write_text(json.dumps(asdict(plan)))
    command = [sys.executable, str(FOLDER / program), str(path)]
    # The hosts have no names; c10d would warn of this.
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
    status = lab.run(command, environment=environment, **options)
    if status != 0:
        raise LabError(f"{program}: the ranks ended with exit status {status}")
    return json.loads((folder / "figures.json").read_text())


def measure_as_rank(
    path: Path,
    make_plan: Callable[..., ThePlan],
    measure: Callable[[ThePlan, Path], object],
    limit: timedelta,
) -> None:
    """Run a rank of :func:`run_ranks` with Gloo and one thread.

    Args:
        path: of the plan.
        make_plan: the plan's dataclass.
        measure: called with the plan and the folder; what rank 0 returns goes to
            ``figures.json``.
        limit: the timeout of collectives.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=limit)
    found = measure(make_plan(**json.loads(path.read_text())), path.parent)
    write_figures(path, found)
    dist.destroy_process_group()


def write_figures(path: Path, found: object) -> None:
    """Write what rank 0 has found to ``figures.json``, while the other ranks wait.

    Args:
        path: of the plan.
        found: the contents, as JSON takes them.
    """
    if dist.get_rank() == 0:
        path.with_name("figures.json").write_text(json.dumps(found))
    dist.barrier()


def run_on_links(
    lab: Lab,
    folder: Path,
    program: str,
    plan: Any,
    change: Callable[[int], object],
    timeout: float,
) -> Any:
    """Run a program with ranks that request other links by ``link_rank.set_link``.

    Args:
        lab, folder, program, plan: as in :func:`run_ranks`.
        change: called with an index in the plan, or ``WARM_UP``; sets the links to it.
        timeout: the ranks' limit, in seconds.

    Returns:
        As :func:`run_ranks`, with the same errors.
    """

    def take(rank: int, is_error: bool, line: bytes) -> None:
        if rank == 0 and line.startswith(LINK):
            number = int(line.removeprefix(LINK))
            change(number)
            link_file(folder, number).touch()
        else:
            print_line(rank, is_error, line)

    return run_ranks(lab, folder, program, plan, timeout=timeout, output=take)


def run_on_each(
    hosts: int,
    links: Sequence[Link],
    program: str,
    plan: Any,
    *,
    warm_up: Link,
    timeout: float = 3600.0,
) -> Any:
    """:func:`run_on_links` in a new lab, for links of different rates and delays.

    Args:
        hosts: the number of hosts.
        links: the links, all with or all without a delay.
        program, plan, timeout: as in :func:`run_on_links`, with indices in ``links``.
        warm_up: the link at the beginning, and for ``WARM_UP``.

    Returns:
        As :func:`run_ranks`, with the same errors.
    """
    rate, delay = warm_up
    with tempfile.TemporaryDirectory() as name, Lab(hosts, rate, delay=delay) as lab:

        def change(number: int) -> None:
            rate, delay = warm_up if number == WARM_UP else links[number]
            if rate != lab.rate:
                lab.set_rate(rate)
            if delay is not None:
                lab.set_delay(delay)

        return run_on_links(lab, Path(name), program, plan, change, timeout)


def run_on_delays(hosts: int, rate: str, program: str, plan: Any, delays: Sequence[float]) -> Any:
    """:func:`run_on_each` for links of one rate. Ranks warm up on links without a delay.

    Args:
        rate: the rate of all links.
        delays: of the links, each way, in seconds.
    """
    bits = parse_rate(rate)
    links = [(bits, delay) for delay in delays]
    return run_on_each(hosts, links, program, plan, warm_up=(bits, 0.0))


def finish(name: str, run: Callable[[], Found], then: Callable[[Found], int]) -> int:
    """Run a benchmark that needs links.

    Args:
        name: the benchmark's.
        run: runs it.
        then: called with its result; returns the exit status.

    Returns:
        The exit status: from ``then``, 1 if this machine cannot make links, or that of a signal.
    """
    try:
        with stopped_by_signals():
            found = run()
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(f"{name}: stopped by {stopped}", file=sys.stderr)
        return 128 + stopped.number
    return then(found)


def finish_run(
    name: str, run: Callable[[], Report], draw: Callable[[Report], None] | None = None
) -> int:
    """Run a benchmark on links that makes a report.

    Args:
        name: the benchmark's.
        run: runs it.
        draw: draws a picture of the report, or None.

    Returns:
        As :func:`finish`; 0 after success.
    """

    def then(report: Report) -> int:
        if draw is not None:
            draw(report)
        report.finish()
        return 0

    return finish(name, run, then)

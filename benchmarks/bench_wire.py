"""Compares the library's own transport with a plain TCP stream and with Gloo.

``python benchmarks/bench_wire.py --help`` shows the options; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import Against, Job, Report, Samples, parse, parser
from lab_bench import (
    Link,
    add_links,
    finish_run,
    format_link,
    run_on_each,
    use_one_thread,
    write_figures,
)
from link_rank import WARM_UP, goes_on, set_link

from torch_commhook.collectives import wire

PLAIN, GLOO, OURS, CUT = "plain TCP", "Gloo", "commhook", "commhook, cut"
PARTS = ("message", "small", "collectives", "break", "links")
MESSAGE, SMALL = 64_000_000, 1024
#: Bytes of each rank's tensor, and numbers of ranks.
ALL_REDUCE, ALL_GATHER, RANKS = (4_096, 1_000_000, 64_000_000), 1_000_000, (2, 4)
RATE_AT_LEAST, CPU_AT_MOST, SMALL_AT_MOST = 0.95, 1.3, 1.2
#: The link on which a connection is cut.
BREAK: Link = (2 * 10**8, 0.025)
#: A message over a link is as long as the link carries in this time, and at most MESSAGE.
LINK_SECONDS = 0.7
#: A turn of a call: TCP is slow after a pause.
UNTIMED, TIMED = 1, 2
#: Calls that take less are repeated for so long.
SAMPLE_SECONDS = 0.05
LEAST_ROUNDS = 2
_LIMIT = timedelta(minutes=5)

#: By name, in the order of the table.
Calls = dict[str, Callable[[], object]]
Times = dict[str, list[float]]
Baselines = dict[str, Against]
Details = dict[str, dict[str, float]]
#: "seconds" on the slowest rank, and "cpu": seconds of all processors.
Found = dict[str, Times]


@dataclass(frozen=True)
class Plan:
    """What to measure: a part, over links if there are any, in rounds until a time is over."""

    part: str
    links: list[Link]
    rounds: int
    seconds: float


# ---- a rank --------------------------------------------------------------------------------------


class Stream:
    """A plain TCP connection between ranks 0 and 1: blocking, in Python, without the GIL."""

    def __init__(self) -> None:
        host, port = os.environ["MASTER_ADDR"], torch.zeros(1, dtype=torch.int64)
        if dist.get_rank() == 0:
            with socket.create_server((host, 0)) as listener:
                dist.broadcast(port.fill_(listener.getsockname()[1]), 0)
                self._socket, _ = listener.accept()
        else:
            dist.broadcast(port, 0)
            self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, memory: memoryview) -> None:
        self._socket.sendall(memory)

    def receive(self, memory: memoryview) -> None:
        while memory.nbytes > 0:
            count = self._socket.recv_into(memory)
            if count == 0:
                raise EOFError("the other rank has closed its connection")
            memory = memory[count:]


def message_calls(size: int, *, is_answered: bool) -> Calls:
    """Ways to send a message of so many bytes from rank 0, over new connections."""
    rank, memory, stream = dist.get_rank(), bytearray(size), Stream()
    tensor = torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    groups = {GLOO: dist.new_group(backend="gloo"), OURS: dist.group.WORLD}
    sends: Calls = {PLAIN: functools.partial(stream.send, memoryview(memory))}
    receives: Calls = {PLAIN: functools.partial(stream.receive, memoryview(memory))}
    for name, group in groups.items():
        sends[name] = functools.partial(dist.send, tensor, 1 - rank, group=group)
        receives[name] = functools.partial(dist.recv, tensor, 1 - rank, group=group)
    first, second = (sends, receives) if rank == 0 else (receives, sends)
    if not is_answered:
        return first
    return {name: lambda name=name: (first[name](), second[name]()) for name in first}  # type: ignore[misc]


def break_calls(size: int) -> Calls:
    """A message, and one whose connection is cut in its middle."""
    send, took = message_calls(size, is_answered=False)[OURS], [0.0]

    def whole() -> None:
        started = time.perf_counter()
        send()
        took[0] = time.perf_counter() - started

    def cut() -> None:
        timer = threading.Timer(took[0] / 2, wire.endpoint().cut)
        timer.start()
        send()
        timer.join()

    return {OURS: whole, CUT: cut if dist.get_rank() == 0 else send}


def collective_calls() -> Calls:
    """Collectives, each with both backends."""
    calls: Calls = {}
    groups = {GLOO: dist.new_group(backend="gloo"), OURS: dist.group.WORLD}
    for size in ALL_REDUCE:
        for name, group in groups.items():
            calls[f"all_reduce of {format_size(size)}, {name}"] = functools.partial(
                dist.all_reduce, torch.zeros(size // 4), group=group
            )
    own, every = (torch.zeros(n * ALL_GATHER // 4) for n in (1, dist.get_world_size()))
    for name, group in groups.items():
        calls[f"all_gather of {format_size(ALL_GATHER)}, {name}"] = functools.partial(
            dist.all_gather_into_tensor, every, own, group=group
        )
    return calls


class Clock:
    """Times calls that begin at the same moment on all ranks: these share a clock."""

    def __init__(self, delay: float) -> None:
        self._group = dist.new_group(backend="gloo")  # not one that is measured
        self._pause = 0.005 + 4 * delay

    def measure(self, call: Callable[[], object], count: int) -> tuple[float, float]:
        """Seconds, and processor seconds of all ranks, for each of so many calls."""
        begin = torch.tensor([time.perf_counter() + self._pause], dtype=torch.float64)
        dist.broadcast(begin, 0, group=self._group)
        cpu = time.process_time()
        time.sleep(max(0.0, begin.item() - time.perf_counter()))
        for _ in range(count):
            call()
        end = torch.tensor([time.perf_counter()], dtype=torch.float64)
        dist.all_reduce(end, op=dist.ReduceOp.MAX, group=self._group)
        used = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
        dist.all_reduce(used, group=self._group)
        return (end - begin).item() / count, used.item() / count


def measure_rank(plan: Plan, size: int, delay: float) -> Found:
    """Measures the calls of a part in turn, in another order each round."""
    if plan.part == "collectives":
        calls = collective_calls()
    elif plan.part == "break":
        calls = break_calls(size)
    else:
        calls = message_calls(size, is_answered=plan.part == "small")
    clock = Clock(delay)
    found: Found = {kind: {name: [] for name in calls} for kind in ("seconds", "cpu")}
    counts = {}
    for name, call in calls.items():  # connects, and chooses the calls of a sample
        took = [clock.measure(call, 1)[0] for _ in range(2)][1]
        is_short = plan.part in ("small", "collectives")
        counts[name] = max(1, min(500, int(SAMPLE_SECONDS / took))) if is_short else 1
    order, shuffle = list(calls), random.Random(0).shuffle  # the same on all ranks
    end = time.perf_counter() + plan.seconds
    for number in range(plan.rounds):
        if not goes_on(dist.get_rank(), number < LEAST_ROUNDS or time.perf_counter() < end):
            break
        shuffle(order)
        for name in order:
            turn = [clock.measure(calls[name], counts[name]) for _ in range(UNTIMED + TIMED)]
            for seconds, cpu in turn[UNTIMED:]:
                found["seconds"][name].append(seconds)
                found["cpu"][name].append(cpu)
    return found


def run_rank(path: Path) -> None:
    """Runs a rank."""
    plan = Plan(**json.loads(path.read_text()))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # other names of PyTorch's
    wire.register_backend()
    dist.init_process_group("commhook", timeout=_LIMIT)
    found = []
    if not plan.links:
        found.append(measure_rank(plan, SMALL if plan.part == "small" else MESSAGE, 0.0))
    for number, (rate, delay) in enumerate(plan.links):
        set_link(number, path.parent)
        wire.endpoint().cut()  # new connections: the old ones have learned another link
        found.append(measure_rank(plan, message_size(rate), delay or 0.0))
        set_link(WARM_UP, path.parent)
    write_figures(path, found)
    dist.destroy_process_group()


def run_on_loopback(rank: int, ranks: int, port: int, path: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    run_rank(path)


# ---- tables --------------------------------------------------------------------------------------


def format_size(size: int) -> str:
    return f"{size / 1e6:g} MB" if size >= 1_000_000 else f"{size / 1024:g} KB"


def message_size(rate: int) -> int:
    return min(MESSAGE, int(rate / 8 * LINK_SECONDS))


def measure(plan: Plan, ranks: int = 2) -> list[Found]:
    """Runs ranks on this machine, or on hosts with links; the figures of each link."""
    if plan.links:
        program, warm_up = Path(__file__).name, (10**9, 0.0)
        found: list[Found] = run_on_each(ranks, plan.links, program, plan, warm_up=warm_up)
    else:
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "plan.json"
            path.write_text(json.dumps(asdict(plan)))
            with socket.create_server(("", 0)) as free:
                port = free.getsockname()[1]
            mp.spawn(run_on_loopback, args=(ranks, port, path), nprocs=ranks)
            found = json.loads(path.with_name("figures.json").read_text())
    return found


def add_table(
    report: Report,
    title: str,
    times: Times,
    against: Baselines,
    size: int = 0,
    more: Details | None = None,
) -> None:
    """Adds a table of times, or of rates if there is a size, with the ratio to Gloo's as well."""
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    jobs = [Job(name, lambda: None, size or None, against.get(name)) for name in times]
    samples = {}
    for name, median in medians.items():
        details = dict((more or {}).get(name, {}))
        if size > 0:
            details["Mbit/s"] = 8e-6 * size / median
        if GLOO in times:
            details["to Gloo"] = (median / medians[GLOO]) ** (-1 if size > 0 else 1)
        samples[name] = Samples(seconds=times[name], details=details)
    report.add(title, jobs, samples, f"{title}; ratios are of {'rates' if size else 'times'}")


def run_part(report: Report, part: str, options: argparse.Namespace) -> None:
    """Measures a part, and adds its tables."""

    def found_in(
        part: str, links: list[Link], ranks: int = 2
    ) -> list[tuple[str, int, Times, Times]]:
        found = measure(Plan(part, links, options.rounds, options.seconds), ranks)
        places = [(format_link(*link), message_size(link[0])) for link in links]
        places = places or [("loopback", MESSAGE)]
        return [
            (*place, each["seconds"], each["cpu"])
            for place, each in zip(places, found, strict=True)
        ]

    if part == "collectives":
        for ranks in RANKS:
            ((where, _, seconds, cpu),) = found_in(part, [], ranks)
            ours = [name for name in seconds if name.endswith(OURS)]
            against = {name: Against(name.replace(OURS, GLOO), times=True) for name in ours}
            more = {name: {"CPU ms": 1e3 * statistics.median(of)} for name, of in cpu.items()}
            title = f"collectives of {ranks} ranks, {where}"
            add_table(report, title, seconds, against, more=more)
    elif part == "small":
        ((where, _, seconds, cpu),) = found_in(part, [])
        half = {name: [each / 2 for each in of] for name, of in seconds.items()}
        small = {GLOO: Against(PLAIN, times=True), OURS: Against(PLAIN, at_most=SMALL_AT_MOST)}
        title = f"message of {format_size(SMALL)}, one way, {where}"
        add_table(report, title, half, small)
    elif part == "break":
        for where, size, seconds, _ in found_in(part, []) + found_in(part, [BREAK]):
            extra = statistics.median(seconds[CUT]) - statistics.median(seconds[OURS])
            title, more = f"cut in {format_size(size)}, {where}", {CUT: {"ms more": 1e3 * extra}}
            add_table(report, title, seconds, {CUT: Against(OURS, times=True)}, more=more)
    else:
        links = [(rate, delay) for rate in options.rates for delay in options.delay]
        for where, size, seconds, cpu in found_in("message", links if part == "links" else []):
            against = {GLOO: Against(PLAIN), OURS: Against(PLAIN, at_least=RATE_AT_LEAST)}
            title = f"message of {format_size(size)}, {where}"
            add_table(report, title, seconds, against, size)
            if part == "message":  # the forwarder of frames has no part in it
                a_gb = {name: [1e9 / size * each for each in of] for name, of in cpu.items()}
                most = {GLOO: Against(PLAIN, times=True), OURS: Against(PLAIN, at_most=CPU_AT_MOST)}
                title = f"processor time of both ranks for a GB, {where}"
                add_table(report, title, a_gb, most)


def run(options: argparse.Namespace) -> Report:
    torch.set_num_threads(1)  # like each rank; rows record it
    report = Report("bench_wire", options)
    for part in options.only:
        run_part(report, part, options)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(rounds=12, seconds=15.0)
    add = options.add_argument
    add("--only", choices=PARTS, nargs="+", default=list(PARTS), help="what to measure")
    add_links(options, ["100mbit", "200mbit", "1gbit"], [0, 5, 25, 50])
    add("plan", type=Path, nargs="?", help=argparse.SUPPRESS)
    parsed = parse(options, arguments)
    if parsed.plan is not None:
        run_rank(parsed.plan)
        return 0
    del parsed.plan
    use_one_thread(options, parsed)
    return finish_run("bench_wire", lambda: run(parsed))


if __name__ == "__main__":
    sys.exit(main())

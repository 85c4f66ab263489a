"""ThrottledProcessGroup against a link: the same operations and steps over both.

``python benchmarks/bench_throttle.py --help`` shows the options; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from harness import Against, Job, Report, Samples, parse, parser
from lab_bench import delay_argument, finish_run, format_link, rate_argument
from netlab import Lab, LabError, parse_rate
from torch.nn.parallel import DistributedDataParallel as DDP

import torch_commhook
from torch_commhook.cli.hook_expression import NO_HOOK, parse_hook
from torch_commhook.process_group import ThrottledProcessGroup, register

MEGABYTES = (1, 8)
HOOKS = (
    NO_HOOK,
    "blockwise()",
    "error_feedback(blockwise(bits=4))",
    "topk(0.01)",
    "powersgd(rank=2)",
)
#: Layers, each a bucket, and their width.
MODELS = ((25, 256), (5, 750))
#: How much longer or shorter a step may be through the group than over the link.
MOST_OFF = 0.15
#: Calls in a turn: after a pause TCP begins slowly.
UNTIMED, TIMED = 1, 2
LEAST_ROUNDS = 2
_LIMIT = timedelta(minutes=5)
_PLAN = "plan.json"

#: By call: its seconds over the link, and through the group.
Times = dict[str, tuple[list[float], list[float]]]
Calls = dict[str, Callable[[], object]]


def operations(group: dist.ProcessGroup, megabytes: int) -> Calls:
    """The operations that are compared, on tensors of so many megabytes."""
    ranks = group.size()
    whole = torch.ones(megabytes * 250_000)
    part = torch.ones(whole.numel() // ranks)
    calls: Calls = {
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "all-gather": lambda: dist.all_gather(list(whole.chunk(ranks)), part, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "all-to-all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
    }
    return {f"{name}, {megabytes} MB": call for name, call in calls.items()}


def steps(group: dist.ProcessGroup, layers: int, width: int) -> Calls:
    """Backwards that are compared, of a model whose layers are a bucket each."""

    def step_of(text: str) -> Callable[[], object]:
        made = [torch.nn.Linear(width, width, bias=False) for _ in range(layers)]
        # From the last layer on, as they become ready.
        megabytes = width * width * 4 / (1 << 20)
        model = DDP(
            torch.nn.Sequential(*made),
            process_group=group,
            bucket_cap_mb=megabytes,
            gradient_as_bucket_view=True,
        )
        hook = parse_hook(text)
        if hook is not None:
            torch_commhook.attach(model, hook)
        batch = torch.randn(1, width)
        for _ in range(3):  # DDP makes its buckets anew after the first
            model(batch).sum().backward()
        return lambda: model(batch).sum().backward()

    return {
        f"{layers} buckets, {'DDP' if text == NO_HOOK else text}": step_of(text) for text in HOOKS
    }


def all_calls(group: dist.ProcessGroup, interface: str) -> Calls:
    """What is compared, over a group of one interface."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface  # of groups that hooks make
    calls: Calls = {}
    for megabytes in MEGABYTES:
        calls |= operations(group, megabytes)
    for layers, width in MODELS:
        calls |= steps(group, layers, width)
    return calls


def time_turn(call: Callable[[], object]) -> list[float]:
    """The seconds of some calls on the slowest rank."""
    dist.barrier()
    found = []
    for _ in range(UNTIMED + TIMED):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    took = torch.tensor(found[UNTIMED:])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.tolist()


def link_rank(folder: Path) -> None:
    """A rank on a host, which has a link and a network that is near."""
    plan = json.loads((folder / _PLAN).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_LIMIT)
    link = all_calls(dist.group.WORLD, os.environ["GLOO_SOCKET_IFNAME"])
    os.environ["GLOO_SOCKET_IFNAME"] = plan["near"]
    parent = dist.new_group(timeout=_LIMIT)
    group = ThrottledProcessGroup(parent, bandwidth=plan["rate"], latency=plan["delay"])
    register(group, "throttled")
    throttled = all_calls(group, plan["near"])
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in link}
    end = time.perf_counter() + plan["seconds"]
    for number in range(plan["rounds"]):
        late = torch.tensor([number >= LEAST_ROUNDS and time.perf_counter() > end])
        dist.broadcast(late, 0)
        if late.item():
            break
        for name in link:  # one beside the other, whatever else the machine does
            for calls, found in zip((link, throttled), times[name], strict=True):
                found += time_turn(calls[name])
    if dist.get_rank() == 0:
        (folder / "times.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def measure(hosts: int, rate: int, delay: float, options: argparse.Namespace) -> Times:
    """Call to its seconds over the link, and through the group."""
    with tempfile.TemporaryDirectory() as name, Lab(hosts, rate, delay=delay or None) as lab:
        folder = Path(name)
        plan = {"rate": rate, "delay": delay, "near": lab.add_near_network()}
        plan |= {"rounds": options.rounds, "seconds": options.seconds}
        (folder / _PLAN).write_text(json.dumps(plan))
        command = [sys.executable, str(Path(__file__).resolve()), "--as-rank", str(folder)]
        # The hosts have no names, of which c10d would warn.
        environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
        status = lab.run(command, timeout=1800.0, environment=environment)
        if status != 0:
            raise LabError(f"bench_throttle: the ranks ended with exit status {status}")
        return json.loads((folder / "times.json").read_text())


def compare(report: Report, options: argparse.Namespace, hosts: int, delay: float) -> None:
    """Add the tables of a link's rates and one delay to a report."""
    for rate in options.rates:
        jobs, samples = [], {}
        for call, seconds in measure(hosts, rate, delay, options).items():
            names = f"{call}, link", f"{call}, throttled"
            for job, found in zip(names, seconds, strict=True):
                against = None if job == names[0] else Against(names[0], times=True)
                jobs.append(Job(job, lambda: None, against=against))
                samples[job] = Samples(seconds=found)
        where = f"{format_link(rate, delay or None)}, {hosts} ranks"
        report.add(where, jobs, samples, f"operations and steps at {where}; ratios are of times")


def run(options: argparse.Namespace) -> Report:
    torch.set_num_threads(1)
    report = Report("bench_throttle", options)
    for hosts in options.hosts:
        for delay in options.delay:
            compare(report, options, hosts, delay)
    ratios = [row.ratio for row in report.rows if " buckets, " in row.job and row.ratio]
    near = sum(abs(ratio - 1) <= MOST_OFF for ratio in ratios)
    report.note(f"{near} of {len(ratios)} steps are within {MOST_OFF:.0%} of those over the link.")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(rounds=4, seconds=150.0)
    add = options.add_argument
    add("--hosts", type=int, nargs="+", default=[2, 4], help="of the labs (default: 2 4)")
    add(
        "--rates",
        type=rate_argument,
        nargs="+",
        default=[parse_rate("200mbit")],
        help="of the links, each way (default: 200mbit)",
    )
    add(
        "--delay",
        type=delay_argument,
        nargs="+",
        default=[0.0, 0.025],
        metavar="MS",
        help="of the links, each way (default: 0 25)",
    )
    add("--as-rank", type=Path, help=argparse.SUPPRESS)
    parsed = parse(options, arguments)
    if parsed.device != "cpu":
        options.error("only --device cpu is there")
    if parsed.as_rank is not None:
        link_rank(parsed.as_rank)
        return 0
    del parsed.as_rank
    parsed.threads = [1]
    return finish_run("bench_throttle", lambda: run(parsed))


if __name__ == "__main__":
    sys.exit(main())

"""ThrottledProcessGroup against a link: the same operations over both, at the same rate.

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
import torch.multiprocessing as mp
from harness import MIN_ROUNDS, Against, Job, Report, Samples, parse, parser
from lab_bench import finish_run
from netlab import Lab, LabError, format_rate, parse_rate

from torch_commhook.process_group import ThrottledProcessGroup, register

HOSTS = 2
MEGABYTES = (1, 8)
_LIMIT = timedelta(minutes=5)
_PLAN = "plan.json"

Times = dict[str, list[float]]


def operations(group: dist.ProcessGroup, megabytes: int) -> dict[str, Callable[[], object]]:
    """The operations that are compared, on tensors of so many megabytes."""
    whole = torch.ones(megabytes * 250_000)
    part = torch.ones(whole.numel() // HOSTS)
    return {
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "all-gather": lambda: dist.all_gather(list(whole.chunk(HOSTS)), part, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "all-to-all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
    }


def measure(group: dist.ProcessGroup, plan: dict[str, float]) -> Times:
    """Operation to the seconds until the last rank is through, of each round."""
    calls = {
        f"{operation}, {megabytes} MB": call
        for megabytes in MEGABYTES
        for operation, call in operations(group, megabytes).items()
    }
    times: Times = {name: [] for name in calls}
    end = time.perf_counter() + plan["seconds"]
    for number in range(1 + int(plan["rounds"])):
        late = torch.tensor([number > MIN_ROUNDS and time.perf_counter() > end])
        dist.broadcast(late, 0)
        if late.item():
            break
        for name, call in calls.items():
            dist.barrier()
            started = time.perf_counter()
            call()
            took = torch.tensor([time.perf_counter() - started])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if number > 0:  # the first one connects
                times[name].append(took.item())
    return times


def link_rank(folder: Path) -> None:
    """A rank on a host."""
    plan = json.loads((folder / _PLAN).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_LIMIT)
    times = measure(dist.group.WORLD, plan)
    _finish(times, folder)


def throttled_rank(rank: int, folder: Path) -> None:
    """A rank of this machine, whose operations are held back."""
    plan = json.loads((folder / _PLAN).read_text())
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=HOSTS, timeout=_LIMIT)
    parent = dist.new_group(timeout=_LIMIT)
    group = ThrottledProcessGroup(parent, bandwidth=plan["rate"])
    register(group, "throttled")
    times = measure(group, plan)
    _finish(times, folder)


def _finish(times: Times, folder: Path) -> None:
    if dist.get_rank() == 0:
        (folder / "times.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def over_link(folder: Path, rate: int) -> Times:
    with Lab(HOSTS, rate) as lab:
        command = [sys.executable, str(Path(__file__).resolve()), "--as-rank", str(folder)]
        # The hosts have no names, of which c10d would warn.
        environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
        status = lab.run(command, timeout=1800.0, environment=environment)
    if status != 0:
        raise LabError(f"bench_throttle: the ranks ended with exit status {status}")
    return json.loads((folder / "times.json").read_text())


def over_group(folder: Path) -> Times:
    mp.spawn(throttled_rank, args=(folder,), nprocs=HOSTS)
    return json.loads((folder / "times.json").read_text())


def run(options: argparse.Namespace) -> Report:
    torch.set_num_threads(1)
    report = Report("bench_throttle", options)
    for rate in options.rates:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            plan = {"rate": rate, "rounds": options.rounds, "seconds": options.seconds}
            (folder / _PLAN).write_text(json.dumps(plan))
            link, throttled = over_link(folder, rate), over_group(folder)
        jobs, samples = [], {}
        for operation in link:
            names = f"{operation}, link", f"{operation}, throttled"
            for job, times in zip(names, (link, throttled), strict=True):
                against = None if times is link else Against(names[0], times=True)
                jobs.append(Job(job, lambda: None, against=against))
                samples[job] = Samples(seconds=times[operation])
        where = f"{format_rate(rate)}, {HOSTS} ranks"
        report.add(where, jobs, samples, f"operations at {where}; ratios are of times")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(rounds=15)
    options.add_argument(
        "--rates",
        type=parse_rate,
        nargs="+",
        default=[parse_rate("200mbit"), parse_rate("1gbit")],
        help="of the links, each way (default: 200mbit 1gbit)",
    )
    options.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
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

"""Measures process groups: collectives of groups in Python, and broadcast_coalesced.

Collectives on one rank measure only the call of the group. broadcast_coalesced on real shapes runs
on one rank through a group that sends nothing, which measures the copies, and on two ranks.
``python benchmarks/bench_process_group.py --help`` shows the options; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import Against, Job, Report, measure, parse, parser
from model_shapes import read_shapes
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future

from torch_commhook import ProcessGroup, broadcast_coalesced
from torch_commhook.process_group import RecordingProcessGroup, WrapperProcessGroup, register

RANKS = 2
MODELS = ("resnet50", "gpt2")
#: In MiB: DDP's buffer when it broadcasts a model, and the size of its first bucket.
BUFFER_SIZES = (250, 1)
BROADCAST_AT_MOST = 0.7
WRAPPER_AT_MOST = 20e-6  # seconds more than Gloo
OPTIONS = dist.AllreduceOptions()


# ---- groups --------------------------------------------------------------------------------------


class Silent(ProcessGroup):
    """A group of one rank that sends nothing."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(tensors)
        return future


def together(call: Callable[[], object]) -> Callable[[], object]:
    """Calls ``call``, then waits for the slowest rank."""

    def run() -> None:
        call()
        dist.barrier()

    return run


class Measuring:
    """Measures jobs on one rank, or on all ranks; the first one reports."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.report = Report("bench_process_group", options) if dist.get_rank() == 0 else None

    def on_one_rank(self, group: str, make: Callable[[], Sequence[Job]], title: str) -> None:
        if self.report is not None:
            self.report.run(group, make(), title)

    def on_all_ranks(self, group: str, jobs: Sequence[Job], title: str) -> None:
        """Measures on all ranks. Each job needs ``prepare``: a sample is one call on every rank."""
        # All ranks must run equally many rounds.
        limit, self.options.seconds = self.options.seconds, float("inf")
        if self.report is not None:
            self.report.run(group, jobs, title)
        else:
            rounds, device = self.options.rounds, torch.device(self.options.device)
            measure(jobs, rounds=rounds, seconds=float("inf"), device=device)
        self.options.seconds = limit


# ---- broadcast_coalesced -------------------------------------------------------------------------


def parameters(model: str, *, contiguous: bool = True) -> list[Tensor]:
    """Tensors with a model's shapes; if not contiguous, with a gap after each row of memory."""
    torch.manual_seed(0)
    shapes = read_shapes(model)
    if contiguous:
        return [torch.randn(shape) for shape in shapes]
    return [torch.randn(*shape[:-1], shape[-1] + 1)[..., :-1] for shape in shapes]


def broadcast_jobs(
    tensors: list[Tensor],
    group: Any,
    around: Callable[[Callable[[], object]], Callable[[], object]] | None = None,
) -> list[Job]:
    jobs = []
    for mib in BUFFER_SIZES:
        size = mib << 20
        baseline = f"PyTorch, {mib} MiB"
        ways: list[tuple[str, Callable[[], object], Against | None]] = [
            (
                baseline,
                lambda size=size: dist._broadcast_coalesced(group, tensors, size, 0),  # type: ignore[misc]
                None,
            ),
            (
                f"ours, {mib} MiB",
                lambda size=size: broadcast_coalesced(group, tensors, size),  # type: ignore[misc]
                Against(baseline, at_most=BROADCAST_AT_MOST),
            ),
        ]
        for name, call, against in ways:
            if around is None:
                jobs.append(Job(name, call, against=against))
            else:
                jobs.append(Job(name, around(call), against=against, prepare=dist.barrier))
    return jobs


def bench_broadcast_copies(measuring: Measuring) -> None:
    """Measures only the copies into and out of buffers: nothing is sent."""
    options = measuring.options
    for threads in options.threads:
        torch.set_num_threads(threads)
        for model in options.models:
            for contiguous in (True, False):
                layout = "" if contiguous else ", not contiguous"
                measuring.on_one_rank(
                    f"broadcast_coalesced, copies, {model}{layout}",
                    lambda model=model, contiguous=contiguous: broadcast_jobs(  # type: ignore[misc]
                        parameters(model, contiguous=contiguous), Silent()
                    ),
                    f"broadcast_coalesced, copies alone, {model}{layout}, "
                    f"{threads} thread{'s' if threads > 1 else ''}",
                )


def bench_broadcast(measuring: Measuring) -> None:
    torch.set_num_threads(1)
    for model in measuring.options.models:
        measuring.on_all_ranks(
            f"broadcast_coalesced, {RANKS} ranks, {model}",
            broadcast_jobs(parameters(model), dist.group.WORLD, together),
            f"broadcast_coalesced, {RANKS} ranks on Gloo, {model}; until the slower is through",
        )


# ---- collectives ---------------------------------------------------------------------------------


def completed(tensors: list[Tensor]) -> torch.futures.Future:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(tensors)
    return future


class PyTorchs(dist.ProcessGroup):
    """A Python group of PyTorch's kind."""

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return _create_work_from_future(completed(tensors))

    def getBackendName(self) -> str:  # noqa: N802
        return "custom"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self.known_as = name

    def getGroupName(self) -> str:  # noqa: N802
        return self.known_as


class Ours(ProcessGroup):
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return _create_work_from_future(completed(tensors))


def functional_all_reduce(tensor: Tensor, name: str) -> Callable[[], object]:
    """Calls the functional all-reduce as DDP and compiled code do, from C++, and waits for it."""
    operators = torch.ops._c10d_functional
    return lambda: operators.wait_tensor(operators.all_reduce(tensor, "sum", name))


def bench_python_groups(measuring: Measuring) -> None:
    """Measures a collective that does nothing, through a Python group."""
    torch.set_num_threads(1)

    def jobs() -> list[Job]:
        x, made = torch.ones(16), {"PyTorch": PyTorchs(0, 1), "ours": Ours(0, 1)}
        for name, group in made.items():
            register(group, f"bench {name}")
        found = []
        ways: dict[str, Callable[[Any], Callable[[], object]]] = {
            "from C++": lambda group: functional_all_reduce(x, group.group_name),
            "dist.all_reduce": lambda group: lambda: dist.all_reduce(x, group=group),
            "its method": lambda group: lambda: group.allreduce([x], OPTIONS).wait(),
        }
        for way, make in ways.items():
            for name, group in made.items():
                call = make(group)
                against = None if name == "PyTorch" else Against(f"PyTorch, {way}", at_most=1.0)
                found.append(Job(f"{name}, {way}", call, against=against))
        return found

    measuring.on_one_rank(
        "collective, group in Python", jobs, "all_reduce through a group in Python, with wait()"
    )


def bench_wrapper(measuring: Measuring) -> None:
    """Measures the time that a wrapper adds to a call of Gloo's."""
    torch.set_num_threads(1)
    alone = [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]

    def microseconds_more(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            until = time.perf_counter() + WRAPPER_AT_MOST
            while time.perf_counter() < until:
                pass
            call()

        return run

    def jobs() -> list[Job]:
        x = torch.ones(16)
        groups = {
            "Gloo": alone,
            "wrapper": WrapperProcessGroup(alone),
            "recording": RecordingProcessGroup(alone, limit=1000),
        }
        found = []
        for way in ("from C++", "in Python"):
            for name, group in groups.items():
                if name != "Gloo" and way == "from C++":
                    register(group, f"bench {name}")
                call = (
                    functional_all_reduce(x, group.group_name)
                    if way == "from C++"
                    else lambda group=group: group.allreduce([x], OPTIONS).wait()
                )
                limit = f"Gloo and {WRAPPER_AT_MOST * 1e6:.0f} us, {way}"
                if name == "Gloo":
                    found.append(Job(f"Gloo, {way}", call))
                    found.append(Job(limit, microseconds_more(call)))
                else:
                    target = 1.0 if name == "wrapper" else None
                    against = Against(limit, at_most=target)
                    found.append(Job(f"{name}, {way}", call, against=against))
        return found

    measuring.on_one_rank(
        "collective, wrapper", jobs, "all_reduce on Gloo of one rank, and through a wrapper"
    )


SECTIONS: tuple[Callable[[Measuring], None], ...] = (
    bench_python_groups,
    bench_wrapper,
    bench_broadcast_copies,
    bench_broadcast,
)


# ---- the command line ----------------------------------------------------------------------------


def rank_main(rank: int, options: argparse.Namespace, store: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(hours=2),  # while one rank measures alone, the others wait
    )
    try:
        measuring = Measuring(options)
        for section in SECTIONS:
            section(measuring)
            dist.barrier()
        if measuring.report is not None:
            measuring.report.finish()
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parsed = parse(options, arguments)
    if parsed.device != "cpu":
        options.error("only --device cpu is there")
    if parsed.quick:
        parsed.models = parsed.models[:1]
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        mp.spawn(rank_main, args=(parsed, store), nprocs=RANKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())

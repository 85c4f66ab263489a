"""A host that is cut off for five seconds within a step: the same bits, and no failed step."""

from __future__ import annotations

import sys
import threading
import time

import pytest
from netlab_hosts import namespaces  # noqa: F401

from benchmarks.netlab import Lab

SECONDS = 5.0
HOOKS = (
    "allreduce()",
    "cast(bfloat16)",
    "error_feedback(blockwise(bits=4))",
    "error_feedback(fp8())",
    "error_feedback(topk(0.1))",
    "powersgd(rank=8)",
    "local_sgd(2, hook=blockwise())",
    "local_sgd(3, fragments=2, delay=1)",
)

# Two steps without a cut, and how long the second took. Then rank 0 asks for a cut in each of four
# parts of a step.
_RANKS = """
import os, sys, time, torch, torch.distributed as dist
from torch import nn
from torch_commhook import attach
from torch_commhook.hooks.expressions import parse_hook

dist.init_process_group("gloo")
rank = dist.get_rank()

def steps(cuts):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 400))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = attach(model, parse_hook(sys.argv[1]), bucket_cap_mb=0.7)
    took = []
    for number in range(12):
        begun = time.monotonic()
        if number in cuts and rank == 0:
            print(f"cut {cuts[number]}", flush=True)
        optimizer.zero_grad()
        inputs = torch.randn(4, 400, generator=torch.Generator().manual_seed(10 * number + rank))
        model(inputs).square().sum().backward()
        optimizer.step()
        took.append(time.monotonic() - begun)
    handle.remove()
    return took, [parameter.detach().clone() for parameter in model.parameters()]

took, wanted = steps({})
step = sorted(took[2:])[len(took) // 2]
took, found = steps({2 * part + 3: step * (0.1 + 0.25 * part) for part in range(4)})
assert all(map(torch.equal, found, wanted))
if rank == 0:
    print(f"took {sum(took)}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("hook", HOOKS)
def test_a_cut_costs_its_time_and_no_step(hook: str) -> None:
    lines: list[str] = []
    cuts: list[threading.Thread] = []
    with Lab(hosts=3, rate="10mbit") as hosts:

        def cut(delay: float) -> None:
            time.sleep(delay)
            hosts.set_link(1, up=False)
            try:
                time.sleep(SECONDS)
            finally:
                hosts.set_link(1, up=True)

        def keep(rank: int, is_error: bool, line: bytes) -> None:
            lines.append(line.decode().strip())
            if lines[-1].startswith("cut "):
                cuts.append(threading.Thread(target=cut, args=(float(lines[-1][4:]),)))
                cuts[-1].start()

        command = [sys.executable, "-c", _RANKS, hook]
        try:
            assert hosts.run(command, timeout=300, output=keep) == 0, lines
        finally:
            for each in cuts:
                each.join()
    assert len(cuts) == 4
    assert float(lines[-1].removeprefix("took ")) >= 4 * SECONDS - 1

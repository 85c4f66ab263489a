"""A hook's connections over a far link: several where one cannot fill it."""

from __future__ import annotations

import sys

import pytest
from netlab_hosts import lines_of, skip_without_far_hosts

from benchmarks.netlab import Lab
from benchmarks.netlab.tools import call

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")

_ATTACH = """
import torch, torch.distributed as dist
from torch_commhook import attach, hooks
from torch_commhook.step.step_group import groups_by_name
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
attach(model, hooks.blockwise())
model(torch.ones(1, 4)).sum().backward()
(group,) = groups_by_name.values()
link = group.connections.link(group.group)
print("link", link.connections, link.round_trip, link.rate / 1e6, link.rate_of_many / 1e6)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def _possible() -> None:
    skip_without_far_hosts()


def _attached(buffers: str | None) -> list[tuple[float, ...]]:
    """For each rank: connections, round trip, and the rates of one connection and of four."""
    with Lab(2, "200mbit", delay=0.02) as lab:
        for host in range(lab.hosts) if buffers else ():
            path = "/proc/sys/net/ipv4/tcp_wmem"
            call("ip", "netns", "exec", lab.namespace(host), "tee", path, stdin=buffers)
        lines = lines_of(lab, _ATTACH)
    return [tuple(map(float, line.split()[1:])) for line in lines if line.startswith("link ")]


@pytest.mark.usefixtures("_possible")
def test_one_that_fills_the_link() -> None:
    found = []
    while len(found) < 3 and not (found and found[-1][0] == 1):  # others may need the machine
        found.append(_attached(None)[0])
    count, round_trip, rate, _ = found[-1]
    assert count == 1, found
    assert 0.04 <= round_trip < 0.2
    assert rate > 100


@pytest.mark.usefixtures("_possible")
def test_several_where_buffers_are_small() -> None:
    """128 KiB in a round trip of 40 ms are 26 Mbit/s."""
    for count, _, rate, rate_of_many in _attached("4096 16384 131072"):
        assert count == 4
        assert rate < 60 and rate_of_many > 1.2 * rate

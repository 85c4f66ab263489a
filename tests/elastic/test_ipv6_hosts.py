"""Ranks on two hosts that have IPv6 alone: two network namespaces with a link between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from repository import ROOT

ADDRESSES = "fd00::1", "fd00::2"
SECONDS = 120

_TRAIN = """
import sys, torch
from torch import nn
from torch_commhook import Elastic, attach, hooks
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
settings = Elastic(
    name="run", min_ranks=2, ranks=2, grace=8.0, timeout=60.0, state=[optimizer], store=sys.argv[1]
)
with attach(model, hooks.error_feedback(hooks.blockwise(8)), elastic=settings) as handle:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((1, 4), float(sys.argv[2]))).sum().backward()
        optimizer.step()
print([round(value, 5) for value in model.weight.flatten().tolist()])
"""


def _why_impossible() -> str:
    if os.geteuid() or shutil.which("ip") is None:
        return "needs root and iproute2"
    name = f"commhook{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "no network namespaces here"
    shown = ["ip", "-n", name, "link", "set", "lo", "up"], ["ip", "-n", name, "-6", "addr"]
    found = [subprocess.run(each, capture_output=True, text=True).stdout for each in shown]
    subprocess.run(["ip", "netns", "del", name], check=True)
    return "" if "::1" in found[1] else "no IPv6 here"


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    reason = _why_impossible()
    if reason:
        pytest.skip(reason)
    names = [f"commhook{os.getpid()}-{number}" for number in range(2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "del", "127.0.0.1/8", "dev", "lo")
        ip("link", "add", "v6", "netns", names[0], "type", "veth", "peer", "v6", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "link", "set", "v6", "up")
            ip("-n", name, "addr", "add", f"{address}/64", "dev", "v6", "nodad")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _start(host: str, *arguments: str, interface: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    environment = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if interface:
        environment["GLOO_SOCKET_IFNAME"] = interface
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("count", [1, 2], ids=["one host, loopback", "two hosts"])
def test_training(hosts: list[str], count: int) -> None:
    interface = "v6" if count == 2 else ""
    address = ADDRESSES[0] if count == 2 else "::1"
    listens = "-m", "torch_commhook", "store", "--port", "0", "--host", address
    server = _start(hosts[0], *listens, interface="")
    ranks = []
    try:
        assert server.stdout is not None
        port = server.stdout.readline().split()[-1]
        ranks = [
            _start(
                hosts[rank % count],
                "-c",
                _TRAIN,
                f"[{address}]:{port}",
                str(rank + 1),
                interface=interface,
            )
            for rank in range(2)
        ]
        outputs = [each.communicate(timeout=SECONDS) for each in ranks]
        assert [each.returncode for each in ranks] == [0, 0], outputs
        assert outputs[0][0] and outputs[0][0] == outputs[1][0]
    finally:
        for each in (server, *ranks):
            each.kill()
            each.communicate()

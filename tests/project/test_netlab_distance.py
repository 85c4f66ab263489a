"""Hosts of netlab that are far apart: round trips, TCP, lost frames, connections, the end."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from netlab_hosts import (  # noqa: F401
    LIMIT_SECONDS,
    far_hosts,
    left,
    lines_of,
    namespaces,
    transfer,
)
from repository import ROOT
from train_processes import wait_for

from benchmarks.netlab import Lab, LabError, lab, why_impossible
from benchmarks.netlab.distance import buffer_limit, check_compiler
from benchmarks.netlab.tools import call

DELAY = 0.02

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")


def test_it_says_that_it_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(LabError, match=r"needs a C compiler .* there is no no-such-compiler"):
        check_compiler()


def test_buffers_hold_several_round_trips() -> None:
    assert buffer_limit(200e6, 0.1) == 4 * 2_500_000
    assert buffer_limit(1e12, 10) == 1 << 28


# ---- hosts ---------------------------------------------------------------------------------------


needs_namespaces = pytest.mark.usefixtures("far_hosts")


# Each rank pings the next one, as ping(8) does; prints the seconds of each round trip.
_PING = """
import os, socket, struct, sys, time
rank, size, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[1])
address = sys.argv[2] + str((rank + 1) % size + 1)
with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as pinging:
    pinging.settimeout(10)
    for number in range(-1, count):  # the first also asks for the other's Ethernet address
        checked = struct.pack("!BBHHh", 8, 0, 0, rank, number)
        total = sum(struct.unpack("!4H", checked))
        total = ~(total + (total >> 16)) & 0xFFFF
        sent = time.perf_counter()
        pinging.sendto(struct.pack("!BBHHh", 8, 0, total, rank, number), (address, 0))
        while True:
            answer = pinging.recv(1000)[20:]
            if answer[0] == 0 and struct.unpack("!Hh", answer[4:8]) == (rank, number):
                break
        if number >= 0:
            print(time.perf_counter() - sent)
"""


@pytest.mark.real_time
@needs_namespaces
@pytest.mark.parametrize("hosts", [2, 8])
def test_a_round_trip_takes_twice_the_delay(hosts: int) -> None:
    with Lab(hosts, "1gbit", delay=DELAY) as far:
        for delay in (DELAY, DELAY / 4):
            far.set_delay(delay)
            for _ in range(5):  # on a busy machine, who pings is late
                found = [float(line) for line in lines_of(far, _PING, "9", "10.77.0.")]
                assert len(found) == 9 * hosts
                assert min(found) >= 2 * delay
                if statistics.median(found) < 1.05 * 2 * delay:
                    break
            assert statistics.quantiles(found)[0] < 1.05 * 2 * delay
    assert left() == set()


@pytest.mark.real_time
@needs_namespaces
def test_a_second_network_is_near() -> None:
    with Lab(3, "1mbit", delay=1.0) as far:
        assert far.add_near_network() == "eth1"
        found = [float(line) for line in lines_of(far, _PING, "5", "10.78.0.")]
        assert len(found) == 15
        assert statistics.median(found) < 0.5
        assert all(link.sent < 1000 for link in far.link_bytes())
    assert left() == set()


@pytest.mark.real_time
@needs_namespaces
@pytest.mark.parametrize("hosts", [2, 3])
def test_tcp_reaches_the_rate_at_a_distance(hosts: int) -> None:
    with Lab(hosts, "200mbit", delay=DELAY) as far:
        rates: list[float] = []
        # Others may need the machine: a host that waits reads late, and then too fast.
        while len(rates) < 3 and not (rates and 180e6 <= rates[-1] < 1.05 * 200e6):
            rates.append(transfer(far, 16_000_000)[1])
        assert 180e6 <= rates[-1] < 1.05 * 200e6, rates


# Rank 1 sends datagrams. Before, it asks for host 0's Ethernet address until an answer arrives.
_SEND = """
import os, socket, sys, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
    if os.environ["RANK"] == "1":
        while " 0x2 " not in open("/proc/net/arp").read():
            sending.sendto(b"", (os.environ["MASTER_ADDR"], 5000))
            time.sleep(0.05)
        for number in range(int(sys.argv[1])):
            sending.sendto(bytes(1000), (os.environ["MASTER_ADDR"], 5000))
            if number % 50 == 0:
                time.sleep(0.005)  # or the link drops some
"""


@needs_namespaces
def test_frames_are_lost() -> None:
    with Lab(2, "1gbit", loss=0.1) as lossy:
        lines_of(lossy, _SEND, "4000")
        first, second = lossy.link_bytes()
        assert second.sent > 4000 * 1000
        # Of 4000 the standard deviation is 0.5%.
        assert first.received / second.sent == pytest.approx(0.9, abs=0.025)


@needs_namespaces
def test_packets_of_tcp_are_lost_one_by_one() -> None:
    with Lab(2, "200mbit", delay=0.001, loss=0.002) as lossy:
        transfer(lossy, 4_000_000)
        sent = lossy._shown(1)["stats64"]["tx"]
        assert sent["bytes"] > 4_000_000
        assert sent["bytes"] / sent["packets"] < 1515


@needs_namespaces
def test_buffers_may_grow_on_the_hosts_alone() -> None:
    setting = Path("/proc/sys/net/ipv4/tcp_wmem")
    before = setting.read_text()
    with Lab(2, "1gbit", delay=0.1) as far:
        for rate, limit in (("1gbit", 125_000_000), ("2gbit", 250_000_000)):
            far.set_rate(rate)
            for name in ("tcp_rmem", "tcp_wmem"):
                path = f"/proc/sys/net/ipv4/{name}"
                shown = call("ip", "netns", "exec", far.namespace(1), "cat", path)
                assert int(shown.split()[2]) == limit
    assert setting.read_text() == before


@needs_namespaces
def test_buffers_are_asked_for_when_they_must_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(lab, "raise_buffers", lambda namespace, limit: asked.append(limit))
    with Lab(2, "100mbit", delay=0.01) as far:
        first, second = (buffer_limit(rate, 0.02 + far.queue_seconds) for rate in (100e6, 200e6))
        far.set_delay(0.0)
        far.set_rate("50mbit")
        far.set_delay(0.01)
        assert asked == [first] * 2
        far.set_rate("200mbit")
        assert asked == [first] * 2 + [second] * 2


@needs_namespaces
def test_a_lab_that_is_near_stays_near() -> None:
    with Lab(2, "1gbit", loss=0.5) as near, pytest.raises(LabError, match="made with a delay"):
        near.set_delay(0.01)


# ---- a hook's connections: several where one cannot fill a far link ------------------------------

_ATTACH = """
import torch, torch.distributed as dist
from torch_commhook import attach, hooks
from torch_commhook.step.step_group import step_groups
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
attach(model, hooks.blockwise())
model(torch.ones(1, 4)).sum().backward()
(group,) = step_groups()
link = group.connections.link(group.group)
print("link", link.connections, link.round_trip, link.rates[1] / 1e6, link.rates[4] / 1e6)
dist.barrier()
dist.destroy_process_group()
"""


def _attached(buffers: str | None) -> list[tuple[float, ...]]:
    """For each rank: connections, round trip, and the rates of one connection and of four."""
    with Lab(2, "200mbit", delay=0.02) as far:
        for host in range(far.hosts) if buffers else ():
            path = "/proc/sys/net/ipv4/tcp_wmem"
            call("ip", "netns", "exec", far.namespace(host), "tee", path, stdin=buffers)
        lines = lines_of(far, _ATTACH)
    return [tuple(map(float, line.split()[1:])) for line in lines if line.startswith("link ")]


@needs_namespaces
def test_one_that_fills_the_link() -> None:
    found = []
    while len(found) < 3 and not (found and found[-1][0] == 1):  # others may need the machine
        found.append(_attached(None)[0])
    count, round_trip, rate, _ = found[-1]
    assert count == 1, found
    assert 0.04 <= round_trip < 0.2
    assert rate > 100


@needs_namespaces
def test_several_where_buffers_are_small() -> None:
    """128 KiB in a round trip of 40 ms are 26 Mbit/s."""
    for count, _, rate, rate_of_many in _attached("4096 16384 131072"):
        assert count == 4
        assert rate < 60 and rate_of_many > 1.2 * rate


# ---- nothing stays -------------------------------------------------------------------------------


def _pid_in(namespace: str) -> int:
    (pid,) = call("ip", "netns", "pids", namespace).split()
    return int(pid)


@needs_namespaces
def test_a_forwarder_that_has_ended_is_an_error() -> None:
    with Lab(2, "1gbit", delay=0.0) as far:
        forwarder = _pid_in(far._switch)
        os.kill(forwarder, signal.SIGKILL)
        wait_for(lambda: lab._started(forwarder) is None, "the forwarder goes on")
        with pytest.raises(LabError, match="the forwarder of frames has ended: exit status -9"):
            far.run(["true"])
        with pytest.raises(LabError, match="the forwarder of frames has ended"):
            far.set_delay(0.1)
    assert left() == set()


@needs_namespaces
def test_nothing_stays_where_the_forwarder_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nprintf "#!/bin/sh\\necho too late >&2" > $3; chmod +x $3\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    refused = Lab(2, "1gbit", delay=0.1)
    with pytest.raises(LabError, match="the forwarder of frames has ended: too late"), refused:
        pass
    assert left() == set()


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_forwarder_ends_with_the_program(number: signal.Signals, tmp_path: Path) -> None:
    started = tmp_path / "started"
    command = [sys.executable, "-m", "benchmarks.netlab", "--delay", "1", "--"]
    command += ["sh", "-c", f"test $RANK = 1 || touch {started}; sleep 60"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(
                lambda: started.exists() or process.poll() is not None, "the ranks do not start"
            )
            (switch,) = (name for name in left(process.pid) if name.endswith("-switch"))
            forwarder = _pid_in(switch)
            process.send_signal(number)
            process.wait(LIMIT_SECONDS)
            wait_for(lambda: lab._started(forwarder) is None, "the forwarder goes on")
        finally:
            process.kill()
    assert why_impossible() is None  # which removes what the killed one has left
    assert left(process.pid) == set()

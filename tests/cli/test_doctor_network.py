"""``doctor`` on networks: the address that Gloo takes, and ranks that do not reach each other."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from launched_ranks import free_port
from netlab_hosts import namespaces  # noqa: F401
from repository import ROOT
from train_processes import finding, finished, report

from benchmarks.netlab.lab import Lab
from torch_commhook.addresses import interfaces, with_port
from torch_commhook.cli.doctor import network
from torch_commhook.cli.doctor.meeting import Finding, Meeting, Settings
from torch_commhook.cli.doctor.network import (
    GlooAddress,
    NoAddressError,
    check_network,
    failed_connections,
    gloo_address,
)
from torch_commhook.cli.launch_environment import LaunchEnvironment
from torch_commhook.cli.main import main

SECONDS = 120

# ---- the address --------------------------------------------------------------------------------


def test_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "127.0.0.1" in interfaces()["lo"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert gloo_address() == GlooAddress("127.0.0.1", "on lo, by GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with pytest.raises(NoAddressError, match="names eth7, which has no address"):
        gloo_address({"lo": ["127.0.0.1"], "eth7": []})
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    found = gloo_address()
    assert found.is_loopback
    assert "no-such-host.invalid resolves to no address of this host" in found.reason


@pytest.mark.parametrize("names", ["lo,none0", "none0"])
def test_a_missing_interface(
    names: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
    found = finding(report(capsys, "network", code=1), "Gloo listens at")
    assert found["value"] == "GLOO_SOCKET_IFNAME names none0, and this host has no such interface"
    assert found["advice"].startswith("Set GLOO_SOCKET_IFNAME to an interface that other hosts")
    with pytest.raises(RuntimeError, match="none0"):  # Gloo agrees
        dist.ProcessGroupGloo.create_device(interface="none0")


def test_encryption(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMMHOOK_TOKEN_FILE", raising=False)
    found = finding(report(capsys, "network"), "encryption")
    assert found["value"] == "none, since COMMHOOK_TOKEN_FILE is not set"
    path = tmp_path / "token"
    monkeypatch.setenv("COMMHOOK_TOKEN_FILE", str(path))
    path.write_text("short")
    found = finding(report(capsys, "network", code=1), "encryption")
    assert found["level"] == "error" and "16 or more bytes" in found["value"]
    path.write_text("0123456789abcdef")
    found = finding(report(capsys, "network"), "encryption")
    assert found["value"].startswith("TLS 1.3 with the token in COMMHOOK_TOKEN_FILE, by OpenSSL 3")


def test_two_processes_and_a_missing_interface(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    found = report(capsys, "ranks", code=1)["findings"]
    assert [each["level"] for each in found] == ["error", "error"]
    for each, (rank, peer) in zip(found, [(0, 1), (1, 0)], strict=True):
        assert f"rank {rank} cannot connect to rank {peer}" in each["name"]
        assert "GLOO_SOCKET_IFNAME names none0" in each["value"]
        assert each["advice"].startswith("Set GLOO_SOCKET_IFNAME to an interface of this host")


def test_a_host_with_ipv6_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    monkeypatch.setattr("torch_commhook.addresses.can_listen", lambda address: ":" in address)
    (found,) = [each for each in check_network(Settings(1.0)) if each.name == "Gloo listens at"]
    assert found.value.endswith("which has IPv6 alone, and GLOO_SOCKET_IFNAME is not set")
    assert found.level == "error" and "unset" not in found.advice


@pytest.mark.parametrize(
    ("host", "text"), [("::1", "[::1]:80"), ("[::1]", "[::1]:80"), ("a", "a:80")]
)
def test_the_text_of_a_host_and_a_port(host: str, text: str) -> None:
    assert with_port(host, 80) == text


@pytest.mark.parametrize(("local_size", "is_error"), [(2, False), (1, True)])
def test_loopback_among_several_hosts(
    local_size: int, is_error: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    settings = Settings(1.0, place=LaunchEnvironment(0, 2, 0, local_size))
    (found,) = [each for each in check_network(settings) if each.name == "Gloo listens at"]
    assert (found.level == "error") == is_error
    assert "ranks on other hosts cannot reach it" in found.value


# ---- ranks --------------------------------------------------------------------------------------


def _of_threads(size: int, prepare: Callable[[int], None]) -> list[dict[int, str]]:
    """The failed connections of ranks that are threads."""
    store = dist.HashStore()
    failed: list[dict[int, str]] = [{} for _ in range(size)]

    def run(rank: int) -> None:
        prepare(rank)
        failed[rank] = failed_connections(Meeting(store, rank, size, 3.0), 3.0)

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(run, range(size)))
    return failed


def test_ranks_that_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert _of_threads(4, lambda rank: None) == [{}] * 4


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("port", "at 127.0.0.1 port {port}, which is loopback of its own host: Connection refused"),
        ("token", "another program answers"),
        ("address", "it listens nowhere: no address"),
    ],
)
def test_a_rank_that_nobody_reaches(
    fault: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()  # nobody listens there
    number = threading.local()

    class Faulty(network.Listener):
        def __init__(self, address: str) -> None:
            if number.rank == 1 and fault == "address":
                raise OSError("no address")
            super().__init__(address)
            if number.rank == 1:
                self.place |= {"port": port} if fault == "port" else {"token": "00"}

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(network, "Listener", Faulty)
    failed = _of_threads(3, lambda rank: setattr(number, "rank", rank))
    assert [set(each) for each in failed] == [{1}, set(), {1}]
    assert all(reason.format(port=port) in failed[rank][1] for rank in (0, 2))


def _alone(rank: int, port: int) -> dict[str, Any]:
    """What doctor reports on one of two ranks, where the other one is missing."""
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch_commhook", "doctor", "--only", "ranks", "--json"]
    done = finished(*command, "--timeout", "1", code=1, environment={**os.environ, **place})
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_rank_that_does_not_come() -> None:
    (one,) = _alone(0, free_port())["findings"]
    assert (one["name"], one["value"]) == ("rank 1", "it has not come within 1 s")
    assert "MASTER_ADDR" in one["advice"]


def test_a_store_that_is_not_there() -> None:
    port = free_port()
    one = finding(_alone(1, port), "this rank")
    assert f"rank 1 cannot reach the store at 127.0.0.1:{port}: " in one["value"]
    assert one["advice"].startswith("Start rank 0, and let this host connect to port")


def test_a_launcher_that_says_too_little(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": "3", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--only", "versions"]) == 1
    assert "error    this rank: environment variable RANK: must be" in capsys.readouterr().out


class _GoneStore:
    """A store whose host has ended since all ranks came."""

    def set(self, key: str, value: str) -> None:
        if not key.startswith("came"):
            raise RuntimeError("Connection reset by peer")

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_goes(rank: int) -> None:
    meeting = Meeting(_GoneStore(), rank, 2, 1.0)  # type: ignore[arg-type]
    mine = [Finding("shared memory", "none", "error", "Mount it.", group="host")]
    assert meeting.share(mine) == mine
    meeting.leave()


def test_torchrun() -> None:
    """Rank 0 reports for all ranks, and prints the findings of another rank."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    checks = "build,network,ranks,group"
    # Rank 1 has no compiler.
    script = (
        f'[ $RANK = 1 ] && export CXX=none; exec {sys.executable} -m torch_commhook doctor "$@"'
    )
    program = ["sh", "-c", script, "doctor", "--json", "--only", checks]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = ("--no-python", "--nproc-per-node", "3")
    found = json.loads(finished(*torchrun, *ranks, *program, environment=environment).stdout)
    assert finding(found, "connections")["value"] == "all 3 pairs of ranks connect"
    for name in ("all-reduce over Gloo", "hook allreduce over Gloo"):
        assert finding(found, name)["value"] == "works"
    assert "ranks agree on each step over gloo" in finding(found, "init_process_group()")["value"]
    compilers = [each for each in found["findings"] if each["name"] == "C++ compiler"]
    assert [(each["rank"], each["level"]) for each in compilers] == [(None, "ok"), (1, "warning")]


# ---- hosts --------------------------------------------------------------------------------------


def _on_hosts(lab: Lab, before: str = "") -> tuple[int, dict[str, Any]]:
    """Run doctor on all hosts, after a command of the shell."""
    lines: list[bytes] = []
    doctor = f"{sys.executable} -m torch_commhook doctor --only network,ranks --json"
    status = lab.run(
        ["sh", "-c", f"{before}\nexec {doctor}"],
        timeout=SECONDS,
        environment={**os.environ, "PYTHONPATH": str(ROOT)},
        output=lambda rank, is_error, line: None if is_error else lines.append(line),
    )
    return status, json.loads(b"".join(lines))


@pytest.mark.usefixtures("namespaces")
def test_two_hosts_that_do_not_reach_each_other() -> None:
    with Lab(hosts=3, rate="1gbit") as lab:
        status, well = _on_hosts(lab)
        assert status == 0 and well["errors"] == 0, well
        with lab.apart(1, 2):
            status, found = _on_hosts(lab)
    errors = [each for each in found["findings"] if each["level"] == "error"]
    assert status == 1
    assert [each["name"] for each in errors] == [
        "rank 1 cannot connect to rank 2",
        "rank 2 cannot connect to rank 1",
    ]
    for each, address in zip(errors, ("10.77.0.3", "10.77.0.2"), strict=True):
        assert each["value"].startswith(f"at {address} port ")
        assert "timed out" in each["value"] or "No route" in each["value"]
        assert each["advice"].startswith("Let these hosts connect to all TCP ports of each other")


@pytest.mark.usefixtures("namespaces")
def test_hosts_that_take_loopback() -> None:
    with Lab(hosts=2, rate="1gbit") as lab:
        status, found = _on_hosts(lab, "export GLOO_SOCKET_IFNAME=lo")
    assert status == 1
    errors = [each for each in found["findings"] if each["level"] == "error"]
    assert {each["name"] for each in errors} == {
        "Gloo listens at",
        "rank 0 cannot connect to rank 1",
        "rank 1 cannot connect to rank 0",
    }
    of_rank = {each["name"]: each for each in errors}["rank 0 cannot connect to rank 1"]
    assert "127.0.0.1" in of_rank["value"] and "loopback of its own host" in of_rank["value"]
    assert of_rank["advice"] == (
        "Set GLOO_SOCKET_IFNAME on rank 1's host to an interface that others reach."
    )

"""torchrun on two hosts, as network namespaces with names and addresses of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from nested_values import different_paths
from repository import ROOT, SUPPORT
from train_processes import finished

from benchmarks.netlab.lab import Lab, why_impossible

SECONDS = 120
PROGRAM = SUPPORT / "host_training.py"

#: The file of names on each host, and the options of torchrun and the variables of its ranks. A
#: system may give its own name the address of loopback, which no other host reaches.
NAMES = {
    "names that all hosts know": (
        "127.0.0.1 localhost\n10.77.0.1 host0\n10.77.0.2 host1\n",
        "",
        "env -u GLOO_SOCKET_IFNAME",
    ),
    "names that no other host knows": (
        "127.0.0.1 localhost\n127.0.1.1 host$RANK\n",
        "--local-addr $ADDRESS --rdzv-conf is_host=$((1 - RANK))",
        "env GLOO_SOCKET_IFNAME=eth0",
    ),
}

_ON_A_HOST = """
hostname host$RANK
ADDRESS=10.77.0.$((RANK + 1))
cat > hosts$RANK <<END
{hosts}END
mount --bind hosts$RANK /etc/hosts
exec env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u LOCAL_WORLD_SIZE {variables} \
    {python} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 \
    --rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:$MASTER_PORT {options} {program} .
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank found on one host."""
    folder = tmp_path_factory.mktemp("alone")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    program = ("--nproc-per-node", "2", PROGRAM, folder)
    finished(*torchrun, *program, environment=_environment(), seconds=SECONDS)
    return _found(folder)


def _environment() -> dict[str, str]:
    """Of torchrun; Gloo takes loopback on one host."""
    mine = {"PYTHONPATH": f"{ROOT}:{SUPPORT}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {**os.environ, **mine}


def _found(folder: Path) -> list[Any]:
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def _possible() -> None:
    reason = why_impossible()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.usefixtures("_possible")
@pytest.mark.parametrize("names", NAMES)
def test_two_hosts_train_as_one_does(
    names: str, alone: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, options, variables = NAMES[names]
    script = _ON_A_HOST.format(
        hosts=hosts, options=options, variables=variables, python=sys.executable, program=PROGRAM
    )
    monkeypatch.chdir(tmp_path)
    lines: list[bytes] = []
    with Lab(hosts=2, rate="1gbit") as lab:
        status = lab.run(
            ["unshare", "--uts", "--mount", "sh", "-ec", script],
            timeout=SECONDS,
            environment=_environment(),
            output=lambda rank, is_error, line: lines.append(line),
        )
        sent = [link.sent for link in lab.link_bytes()]
    assert status == 0, b"".join(lines).decode(errors="replace")
    found = _found(tmp_path)
    # torchrun numbers hosts as they come.
    assert sorted(place["host"] for _, place in found) == ["host0", "host1"]
    assert [place["local_rank"] for _, place in found] == ["0", "0"]
    for (result, _), (expected, _), raised in zip(
        found, alone, ("PeerError", "ArithmeticError"), strict=True
    ):
        assert different_paths(result, expected) == []
        assert result["raised"] == raised
        assert result["bytes"] > 0
    assert min(sent) > found[0][0]["bytes"]  # it went through the links

"""Each framework's example runs by its command; Ray, logs, and torchrun on two hosts."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launched_ranks import free_port, launched
from nested_values import different_paths
from netlab_hosts import namespaces  # noqa: F401
from on_ranks import on_pool
from repository import ROOT, SUPPORT
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from train_processes import finished

from benchmarks.netlab.lab import Lab
from torch_commhook import attach

#: What a script imports first of its framework, and what it prints at last.
SCRIPTS = {
    "lightning_training": "lightning",
    "fabric_training": "lightning",
    "accelerate_training": "accelerate",
    "transformers_training": "transformers",
}


def _command(script: Path) -> list[str]:
    """That which the script's docstring names, with this Python."""
    text = ast.get_docstring(ast.parse(script.read_text())) or ""
    (line,) = (line.strip() for line in text.splitlines() if str(script.name) in line)
    launcher, *rest = line.split()
    if launcher == "torchrun":
        port = f"--master-port={free_port()}"
        return [sys.executable, "-m", "torch.distributed.run", port, *rest]
    assert launcher == "python"
    return [sys.executable, *rest]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script(name: str) -> None:
    pytest.importorskip(SCRIPTS[name])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = _command(ROOT / "examples" / f"{name}.py")
    printed = finished(*command, environment=environment, seconds=170).stdout
    assert "steps, 7." in printed and "times less traffic" in printed, printed


# ---- Ray Train, two workers on the CPU -----------------------------------------------------------

RAY_SCRIPT = ROOT / "examples" / "ray_training.py"
#: Those of the run, and of that which goes on from it.
RAY_STEPS = (4, 7)
RAY_SECONDS = 500  # Ray takes long to start, and lowers the priority of its workers


def _example() -> Any:
    """The example's model, data and hook, for which it needs no Ray."""
    spec = importlib.util.spec_from_file_location("ray_training", RAY_SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    nothing = mock.MagicMock()
    with mock.patch.dict(
        sys.modules, {"ray": nothing, "ray.train": nothing, "ray.train.torch": nothing}
    ):
        spec.loader.exec_module(module)
    return module


def _loop(rank: int, folder: str) -> None:
    """Write what the example saves, from a plain loop that ends and begins anew as it does."""
    torch.distributed.init_process_group("gloo")
    example = _example()
    saved: list[dict[str, Any]] = []
    for start, end in zip((0, *RAY_STEPS), RAY_STEPS, strict=False):
        model = DDP(example.make_model())
        optimizer = example.make_optimizer(model)
        handle = attach(model, example.make_hook())
        if saved:
            model.module.load_state_dict(saved[-1]["model"])
            optimizer.load_state_dict(saved[-1]["optimizer"])
            handle.load_state_dict(saved[-1]["hook"])
        for step in range(start, end):
            inputs, labels = example.make_batch(rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        state = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "hook": handle.state_dict(gather=True),
            "step": end,
        }
        saved.append(state)
        if rank == 0:
            torch.save((state, handle.stats().bytes_sent), Path(folder) / f"loop{end}.pt")
        handle.remove()


def _run(folder: Path, steps: int) -> tuple[dict[str, Any], int]:
    """The checkpoint of the example's run, and the bytes that it says its hook has sent."""
    command = (sys.executable, RAY_SCRIPT, "--steps", str(steps), "--folder", folder)
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    printed = finished(*command, environment=environment, seconds=RAY_SECONDS).stdout
    said = re.search(r"loss [\d.]+, (\d+) bytes of gradients in (\d+) steps", printed)
    checkpoint = re.search(r"^checkpoint: (.*)$", printed, re.MULTILINE)
    assert said is not None and checkpoint is not None, printed
    return torch.load(Path(checkpoint[1]) / "training.pt", weights_only=True), int(said[1])


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
def test_ray_does_as_a_loop_does(tmp_path: Path) -> None:
    """Also after it goes on: the hook of each worker then has what it remembered."""
    launched(_loop, str(tmp_path), seconds=RAY_SECONDS)
    for steps in RAY_STEPS:
        expected, expected_sent = torch.load(tmp_path / f"loop{steps}.pt", weights_only=True)
        saved, sent = _run(tmp_path, steps)
        assert {"rank0", "rank1"} <= saved["hook"].keys()
        assert sent == expected_sent > 0
        assert different_paths(saved, expected) == []


# ---- logs ----------------------------------------------------------------------------------------


def _train_and_log(writer: object) -> None:
    from torch_commhook import attach, hooks

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = torch.nn.Linear(64, 64)
    handle = attach(model, hooks.blockwise())
    for step in range(3):
        model(torch.arange(64.0)).sum().backward()
        handle.log_to(writer, step)


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs tensorboard")
@on_pool("one_launched")
def test_tensorboard(rank: int, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        _train_and_log(writer)
    events = EventAccumulator(str(tmp_path)).Reload()
    found = [(event.step, event.value) for event in events.Scalars("commhook/steps")]
    assert found == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert "commhook/relative_error" in events.Tags()["scalars"]


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb")
@on_pool("one_launched")
def test_weights_and_biases(rank: int, tmp_path: Path) -> None:
    import wandb

    run = wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(console="off"))
    _train_and_log(run)
    run.log({"ended": 1}, step=3)  # which sends the step before
    summary = dict(run.summary)
    run.finish()
    assert summary["commhook/steps"] == 3
    assert 0 < summary["commhook/relative_error"] < 0.01


# ---- two hosts -----------------------------------------------------------------------------------

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


@pytest.mark.usefixtures("namespaces")
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

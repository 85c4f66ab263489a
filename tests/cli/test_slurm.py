"""The place of a rank from Slurm's variables, for ``train`` and for scripts."""

from __future__ import annotations

import os
import random
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from launched_ranks import free_port
from repository import ROOT
from train_processes import TINY, finished, read_metrics

from torch_commhook.cli.place import PlaceError, read_place
from torch_commhook.cli.slurm import first_host, slurm_variables
from torch_commhook.integrations import slurm

#: The variables of the fourth task of a step on three hosts.
TASK = {
    "SLURM_JOB_ID": "7041234",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "5",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_NODELIST": "node[08-09,11]",
}
PLACE = {
    "RANK": "3",
    "WORLD_SIZE": "5",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node08",
    "MASTER_PORT": "16236",
}

TRAIN = (sys.executable, "-m", "torch_commhook", "train")


def test_a_task_of_srun_finds_its_place() -> None:
    assert slurm_variables(TASK) == PLACE
    place = read_place({**TASK, **PLACE})
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (3, 5, 1, 2)


def test_a_step_on_a_part_of_the_job_goes_before_the_job() -> None:
    step = {"SLURM_STEP_NODELIST": "node09", "SLURM_STEP_NUM_TASKS": "4"}
    step["SLURM_STEP_TASKS_PER_NODE"] = "4"
    found = slurm_variables({**TASK, **step, "SLURM_NODEID": "0"})
    assert found == {**PLACE, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node09"}


def test_steps_of_a_job_have_ports_of_their_own() -> None:
    ports = {slurm_variables({**TASK, "SLURM_STEP_ID": step})["MASTER_PORT"] for step in "012"}
    assert len(ports) == 3
    highest = slurm_variables({**TASK, "SLURM_JOB_ID": "9999", "SLURM_STEP_ID": "0"})
    assert highest["MASTER_PORT"] == "24999"


def test_what_is_set_already_stays() -> None:
    given = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500", "WORLD_SIZE": "5"}
    assert slurm_variables({**TASK, **given}) == {**PLACE, **given}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {name: value for name, value in TASK.items() if name != "SLURM_STEP_ID"},  # sbatch's script
        {name: value for name, value in TASK.items() if name != "SLURM_PROCID"},
        {**TASK, "SLURM_NTASKS": "1"},
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},
        {**TASK, "RANK": "0"},  # torchrun's
        {**TASK, "COMMHOOK_LAUNCHER_PID": "1"},
    ],
)
def test_other_processes_are_left_alone(environment: dict[str, str]) -> None:
    assert slurm_variables(environment) == {}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node[01-04,7]", "node01"),
        ("node[7,01-04]", "node7"),
        ("gpu3,node[01-04]", "gpu3"),
        ("rack[2-3]n[10-12],x", "rack2n10"),
        ("a-b.c[005]-ib0", "a-b.c005-ib0"),
    ],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize("hosts", ["", "node[", "node[1", "node[]", "a b"])
def test_what_is_no_list_of_hosts_is_refused(hosts: str) -> None:
    with pytest.raises(PlaceError, match=r"like node\[01-04,7\], got '"):
        first_host(hosts)


@pytest.mark.parametrize("missing", ["NTASKS", "LOCALID", "NODELIST", "JOB_ID"])
def test_what_is_missing_is_named(missing: str) -> None:
    environment = {name: value for name, value in TASK.items() if name != f"SLURM_{missing}"}
    with pytest.raises(PlaceError, match=rf"srun has started .*SLURM_{missing}\b.* is missing"):
        slurm_variables(environment)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PlaceError, match=r"SLURM_LOCALID must be a whole number, got 'x'"):
        slurm_variables({**TASK, "SLURM_LOCALID": "x"})
    with pytest.raises(PlaceError, match=r"WORLD_SIZE: must be the 5 tasks .* got '8'"):
        slurm_variables({**TASK, "WORLD_SIZE": "8"})


def test_a_script_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(TASK))
    assert slurm.set_variables()
    assert os.environ == {**TASK, **PLACE}
    assert not slurm.set_variables()  # with the variables that it has set


# ---- processes -----------------------------------------------------------------------------------

_SRUN = """#!/bin/bash
# Two tasks on this host, as srun starts them.
export SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_TASKS_PER_NODE=2 SLURM_NODEID=0
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
done
wait -n && wait -n
"""


@pytest.fixture
def slurm_host(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script on a host with ``srun``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("srun", _SRUN), ("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in PLACE}
    return environment | {
        "PATH": f"{folder}:{environment['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": str(_job_of_a_free_port()),
        "SLURM_NODELIST": "localhost",
        "SLURM_PROCID": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _job_of_a_free_port() -> int:
    for _ in range(100):
        job = random.randrange(10000)
        with suppress(OSError):
            return free_port(15000 + job) - 15000
    raise AssertionError("no port is free")


def test_the_example_trains_as_on_one_host(tmp_path: Path, slurm_host: dict[str, str]) -> None:
    arguments = (*TINY, "--steps", "4")
    script = ROOT / "examples" / "slurm_training.sbatch"
    printed = finished("bash", script, *arguments, folder=tmp_path, environment=slurm_host)
    assert "2 ranks (gloo on cpu" in printed.stdout
    hook = ("--hook", "error_feedback(blockwise(bits=4))", "--out", "alone")
    finished(*TRAIN, *hook, *arguments, "--ranks", "2", folder=tmp_path, environment=slurm_host)
    of_slurm, alone = (
        [(x["loss"], x["bytes_sent"]) for x in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("results", "alone")
    )
    assert of_slurm == alone and len(alone) == 4


def test_train_says_what_is_missing(tmp_path: Path, slurm_host: dict[str, str]) -> None:
    task = {**slurm_host, "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    del task["SLURM_NODELIST"]
    done = finished(*TRAIN, folder=tmp_path, environment=task, code=2)
    assert "SLURM_STEP_NODELIST or SLURM_NODELIST or SLURM_JOB_NODELIST is missing" in done.stderr

"""Translates the environment variables of Slurm's ``srun`` to those of torch.distributed."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch_commhook.cli.place import PlaceError
from torch_commhook.cli.rank_process import LAUNCHER_PID

_LOWEST_PORT, _PORTS = 15000, 10000
_SRUN = "srun has started this process, and environment variable"


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank's place, for one of several tasks of ``srun``.

    ``MASTER_ADDR`` is the first host of the step. ``MASTER_PORT`` is 15000 plus the last four
    digits of the sum of the job's number and the step's number. Both keep values that are set.

    Args:
        environment: the environment of the process.

    Returns:
        ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``, and
        ``LOCAL_WORLD_SIZE`` if Slurm tells it. Empty if ``srun`` has not started the process (as in
        a batch script), if the step has one task, or if a launcher in the step has set ``RANK``.

    Raises:
        PlaceError: a variable of Slurm is missing or wrong, or ``WORLD_SIZE`` has another value.
    """
    if "RANK" in environment or LAUNCHER_PID in environment:
        return {}
    is_step = "SLURM_STEP_ID" in environment or "SLURM_STEPID" in environment
    if not is_step or "SLURM_PROCID" not in environment:  # a batch script has no step number
        return {}
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if tasks == 1:
        return {}
    hosts = _first_of(environment, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    number = _number(environment, "SLURM_JOB_ID", "SLURM_JOBID")
    number += _number(environment, "SLURM_STEP_ID", "SLURM_STEPID")
    found = {
        "RANK": str(_number(environment, "SLURM_PROCID")),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": str(_number(environment, "SLURM_LOCALID")),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(hosts),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(_LOWEST_PORT + number % _PORTS),
    }
    here = _tasks_here(environment)
    if here is not None:
        found["LOCAL_WORLD_SIZE"] = str(here)
    if environment.get("WORLD_SIZE", found["WORLD_SIZE"]) != found["WORLD_SIZE"]:
        raise PlaceError(
            f"environment variable WORLD_SIZE: must be the {tasks} tasks of the Slurm step, or "
            f"not be set, got {environment['WORLD_SIZE']!r}"
        )
    return found


def first_host(hosts: str) -> str:
    """The first host of a list in Slurm's notation: ``node[01-04,7],gpu1`` gives ``node01``.

    Raises:
        PlaceError: the text is no such list.
    """
    first = re.sub(r"\[([^\]\[,-]+)[^\]\[]*\]", r"\1", hosts.strip()).split(",")[0]
    if not re.fullmatch(r"[\w.-]+", first):
        raise PlaceError(f"the hosts of the Slurm step must be like node[01-04,7], got {hosts!r}")
    return first


def _tasks_here(environment: Mapping[str, str]) -> int | None:
    """The number of tasks on this host, from a list such as ``2(x3),1``; None if unknown."""
    per_host = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE"))
    if per_host is None or "SLURM_NODEID" not in environment:
        return None
    counts: list[int] = []
    for part in per_host.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    number = _number(environment, "SLURM_NODEID")
    return counts[number] if number < len(counts) else None


def _first_of(environment: Mapping[str, str], *names: str) -> str:
    """The value of the first variable that is set and not empty."""
    for name in names:
        if environment.get(name):
            return environment[name]
    raise PlaceError(f"{_SRUN} {' or '.join(names)} is missing; start it with srun --export=ALL")


def _number(environment: Mapping[str, str], *names: str) -> int:
    text = _first_of(environment, *names)
    if not text.isdecimal():
        raise PlaceError(f"{_SRUN} {' or '.join(names)} must be a whole number, got {text!r}")
    return int(text)

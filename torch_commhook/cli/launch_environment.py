"""A process's place among the ranks: from a launcher's variables, from Slurm's, or of its own."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch_commhook.cli import launcher
from torch_commhook.cli.launcher import LAUNCHER_PID
from torch_commhook.cli.main import OneLineParser
from torch_commhook.cli.option_types import WorldOptions

# ---- reads this process's place among the ranks from the environment variables of a launcher -----


_WORLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


class LaunchError(ValueError):
    """An environment variable is missing or wrong. The message is one sentence that names it."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """A rank's place among all ranks, and among those of this machine.

    ``launcher_pid`` is the process id of our launcher; None under another launcher.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher_pid: int | None = None


def checks_outputs(place: LaunchEnvironment | None) -> bool:
    """Whether this process checks the files that a command will write: one of them does.

    It is the process that launches the ranks, which has no place, or rank 0 of another launcher.
    """
    return place is None or (place.rank == 0 and place.launcher_pid is None)


def read_launch_environment(environment: Mapping[str, str]) -> LaunchEnvironment | None:
    """Read this process's place; returns None if no launcher has started the process.

    Our launcher sets COMMHOOK_LAUNCHER_PID. Others, such as torchrun, set RANK, WORLD_SIZE and
    MASTER_ADDR.

    Raises:
        LaunchError: a variable is missing, no whole number, too small or too large.
    """
    launcher_pid = None
    if LAUNCHER_PID in environment:
        launcher_pid = _number(environment, LAUNCHER_PID, 1)
    elif not all(name in environment for name in _WORLD):
        return None
    else:
        _number(environment, "MASTER_PORT", 0, 65535)  # only checked: torch reads it
    size = _number(environment, "WORLD_SIZE", 1)
    rank = _number(environment, "RANK", 0, size - 1)
    local_size = _number(environment, "LOCAL_WORLD_SIZE", 1, default=size)
    local_rank = _number(environment, "LOCAL_RANK", 0, default=rank)
    return LaunchEnvironment(rank, size, local_rank, local_size, launcher_pid)


def _number(
    environment: Mapping[str, str],
    name: str,
    lowest: int,
    highest: int | None = None,
    default: int | None = None,
) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        value = int(text or "")
        if lowest <= value and (highest is None or value <= highest):
            return value
    except ValueError:
        pass
    limit = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"
    got = "nothing" if text is None else repr(text)
    raise LaunchError(f"environment variable {name}: must be a whole number {limit}, got {got}")


# ---- translates the environment variables of Slurm's srun to those of torch.distributed ----------


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
        LaunchError: a variable of Slurm is missing or wrong, or ``WORLD_SIZE`` has another value.
    """
    if "RANK" in environment or LAUNCHER_PID in environment:
        return {}
    is_step = "SLURM_STEP_ID" in environment or "SLURM_STEPID" in environment
    if not is_step or "SLURM_PROCID" not in environment:  # a batch script has no step number
        return {}
    tasks = _task_number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if tasks == 1:
        return {}
    hosts = _first_of(environment, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    number = _task_number(environment, "SLURM_JOB_ID", "SLURM_JOBID")
    number += _task_number(environment, "SLURM_STEP_ID", "SLURM_STEPID")
    found = {
        "RANK": str(_task_number(environment, "SLURM_PROCID")),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": str(_task_number(environment, "SLURM_LOCALID")),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(hosts),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(_LOWEST_PORT + number % _PORTS),
    }
    here = _tasks_here(environment)
    if here is not None:
        found["LOCAL_WORLD_SIZE"] = str(here)
    if environment.get("WORLD_SIZE", found["WORLD_SIZE"]) != found["WORLD_SIZE"]:
        raise LaunchError(
            f"environment variable WORLD_SIZE: must be the {tasks} tasks of the Slurm step, or "
            f"not be set, got {environment['WORLD_SIZE']!r}"
        )
    return found


def first_host(hosts: str) -> str:
    """The first host of a list in Slurm's notation: ``node[01-04,7],gpu1`` gives ``node01``.

    Raises:
        LaunchError: the text is no such list.
    """
    first = re.sub(r"\[([^\]\[,-]+)[^\]\[]*\]", r"\1", hosts.strip()).split(",")[0]
    if not re.fullmatch(r"[\w.-]+", first):
        raise LaunchError(f"the hosts of the Slurm step must be like node[01-04,7], got {hosts!r}")
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
    number = _task_number(environment, "SLURM_NODEID")
    return counts[number] if number < len(counts) else None


def _first_of(environment: Mapping[str, str], *names: str) -> str:
    """The value of the first variable that is set and not empty."""
    for name in names:
        if environment.get(name):
            return environment[name]
    raise LaunchError(f"{_SRUN} {' or '.join(names)} is missing; start it with srun --export=ALL")


def _task_number(environment: Mapping[str, str], *names: str) -> int:
    text = _first_of(environment, *names)
    if not text.isdecimal():
        raise LaunchError(f"{_SRUN} {' or '.join(names)} must be a whole number, got {text!r}")
    return int(text)


# ---- runs a subcommand on ranks: the process launches the ranks, or is one of them ---------------


_Options = TypeVar("_Options", bound=WorldOptions)


def run_ranked(
    name: str,
    argv: Sequence[str],
    parse_options: Callable[[Sequence[str], LaunchEnvironment | None], _Options],
    launch: Callable[[Sequence[str], _Options], int],
    run_rank: Callable[[_Options, LaunchEnvironment], object],
) -> int:
    """Run a subcommand on ranks; returns the exit code.

    The process joins the world that the environment describes: by COMMHOOK_LAUNCHER_PID for our own
    launcher, by RANK, WORLD_SIZE and MASTER_ADDR for torchrun and others, or by the variables of
    Slurm's srun for one of several tasks. Otherwise it launches its own ranks and waits for them.

    Args:
        name: the subcommand.
        argv: its arguments.
        parse_options: parses them, for a rank if a place is given, or ends the process.
        launch: starts ranks and waits for them; returns the exit code.
        run_rank: runs a rank.
    """
    try:
        os.environ.update(slurm_variables(os.environ))
        place = read_launch_environment(os.environ)
    except LaunchError as error:
        OneLineParser(prog=f"commhook {name}").error(str(error))
    if place is not None:
        launcher.end_on_signals(place.rank, name)
        launcher.watch_parent(place.launcher_pid)
    with contextlib.ExitStack() as stack:
        if place is not None and place.rank > 0:  # rank 0 prints the errors, which all ranks have
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        options = parse_options(argv, place)
    if checks_outputs(place):
        for note in options.notes:
            print(f"commhook {name}: note: {note}", file=sys.stderr)
    if place is None:
        return launch(argv, options)
    try:
        faulthandler.enable()
        run_rank(options, place)
    except BaseException as error:
        launcher.fail(error, place.rank, name)
    launcher.finish()

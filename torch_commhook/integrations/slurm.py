"""Scripts that Slurm's ``srun`` starts, one process for each rank."""

from __future__ import annotations

import os

from torch_commhook.cli.launch_environment import slurm_variables


def set_variables() -> bool:
    """Set the variables of ``torch.distributed.init_process_group()`` from Slurm's variables.

    Call it first in a script that ``srun`` starts. The script may also run alone or under torchrun:
    without several tasks of ``srun`` the call changes nothing. ``commhook train`` calls it itself.

    Sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, and, if Slurm reports the tasks of each host,
    ``LOCAL_WORLD_SIZE``. Existing values of ``MASTER_ADDR`` and ``MASTER_PORT`` stay. Their
    defaults are the step's first host, and a port derived from the job's number.

    Returns:
        Whether ``srun`` has started the process as one of several tasks.

    Raises:
        ValueError: a variable of Slurm's is missing or invalid, or ``WORLD_SIZE`` has another
            value.

    Example:
        >>> set_variables()  # srun has not started this process
        False
    """
    found = slurm_variables(os.environ)
    os.environ.update(found)
    return bool(found)

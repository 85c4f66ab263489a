"""Scripts that Slurm's ``srun`` starts, one process for each rank."""

from __future__ import annotations

import os

from torch_commhook.cli.slurm import slurm_variables


def set_variables() -> bool:
    """Set the variables that ``torch.distributed.init_process_group()`` reads, from Slurm's.

    Call it first in a script that ``srun`` starts, and may start by itself or under torchrun too:
    without several tasks of ``srun`` it changes nothing. ``commhook train`` does so by itself.

    Sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, and ``LOCAL_WORLD_SIZE`` where Slurm tells the
    tasks of each host. ``MASTER_ADDR``, by default the step's first host, and ``MASTER_PORT``, by
    default derived from the job's number, stay where they are set.

    Returns:
        Whether ``srun`` has started the process as one of several tasks.

    Raises:
        ValueError: a variable of Slurm's is missing or cannot be read, or ``WORLD_SIZE`` is set to
            something else.

    Example:
        >>> set_variables()  # srun has not started this process
        False
    """
    found = slurm_variables(os.environ)
    os.environ.update(found)
    return bool(found)

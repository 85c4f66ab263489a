"""Testing hooks and process groups without processes."""

from torch_commhook.process_group.simulated.link import MismatchedCollectiveError
from torch_commhook.process_group.simulated.scheduler import DeadlockError
from torch_commhook.testing.ranks import run_ranks
from torch_commhook.testing.simulate import Simulation, simulate

__all__ = [
    "DeadlockError",
    "MismatchedCollectiveError",
    "Simulation",
    "run_ranks",
    "simulate",
]

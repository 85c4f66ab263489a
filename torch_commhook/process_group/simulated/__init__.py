"""A process group among threads, which ``torch_commhook.testing.run_ranks`` makes."""

from torch_commhook.process_group.simulated.group import SimulatedProcessGroup

__all__ = ["SimulatedProcessGroup"]

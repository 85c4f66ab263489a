"""Process groups and works in Python."""

from torch_commhook._C import ProcessGroup, Work
from torch_commhook.process_group.registration import register
from torch_commhook.process_group.simulated import SimulatedProcessGroup
from torch_commhook.process_group.wrapper import WrapperProcessGroup

__all__ = ["ProcessGroup", "SimulatedProcessGroup", "Work", "WrapperProcessGroup", "register"]

"""Process groups and works in Python."""

from torch_commhook._C import ProcessGroup, Work
from torch_commhook.process_group.broadcast import broadcast_coalesced
from torch_commhook.process_group.registration import register
from torch_commhook.process_group.wrapper import WrapperProcessGroup

__all__ = ["ProcessGroup", "Work", "WrapperProcessGroup", "broadcast_coalesced", "register"]

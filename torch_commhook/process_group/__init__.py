"""Process groups and works in Python."""

from torch_commhook._C import ProcessGroup, Work

__all__ = ["ProcessGroup", "Work"]

"""Communication hooks.

Each is an object that can be given to :func:`torch_commhook.attach` and to
``DistributedDataParallel.register_comm_hook(None, hook)``, and prints as it is written.
"""

from torch_commhook.hooks.base import Hook
from torch_commhook.hooks.cpp import cpp
from torch_commhook.hooks.mean import allreduce, cast

__all__ = ["Hook", "allreduce", "cast", "cpp"]

"""Communication hooks.

Each hook is an object for :func:`torch_commhook.attach` or for
``DistributedDataParallel.register_comm_hook(None, hook)``. It prints as the call that makes it.

Each codec of :mod:`torch_commhook.codecs` has a hook of the same name.
"""

from typing import Any

from torch_commhook.codecs.base import CODECS, RESERVED_NAMES
from torch_commhook.hooks.auto import auto
from torch_commhook.hooks.base import Hook
from torch_commhook.hooks.compressed import adaptive, compressed, hook_of_codec
from torch_commhook.hooks.cpp import cpp
from torch_commhook.hooks.hierarchical import hierarchical
from torch_commhook.hooks.local_sgd import local_sgd, outer_sgd
from torch_commhook.hooks.mean import allreduce, cast
from torch_commhook.hooks.policy import policy
from torch_commhook.hooks.powersgd import powersgd
from torch_commhook.hooks.wrappers import after, clip, error_feedback, momentum

__all__ = [
    "Hook",
    "adaptive",
    "after",
    "allreduce",
    "auto",
    "cast",
    "clip",
    "compressed",
    "cpp",
    "error_feedback",
    "hierarchical",
    "local_sgd",
    "momentum",
    "outer_sgd",
    "policy",
    "powersgd",
]
RESERVED_NAMES.update(__all__)
__all__ += CODECS


def __getattr__(name: str) -> Any:
    if name in CODECS:  # a codec may have been registered later
        return hook_of_codec(CODECS[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *CODECS})

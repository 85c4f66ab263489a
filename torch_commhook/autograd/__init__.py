"""Hooks of the autograd engine, with the same checks in eager code and under compiled autograd.

Each kind runs at the same point as PyTorch's own hook of that kind, with the same arguments and
results. Hooks run in order of registration, each on the previous one's result. None, or the very
object that was passed in, leaves values unchanged. The engine takes a snapshot of the hooks first:
a hook that is removed meanwhile still runs, and one that is added does not.

A hook is a Python callable; or an operator (``torch.ops.x.y``) or a C++ function (:class:`cpp`),
which run without the GIL.
"""

from torch_commhook.autograd.finite_check import FiniteCheck
from torch_commhook.autograd.registration import (
    RemovableHandle,
    call_hooks,
    cpp,
    register_hook,
    register_post_accumulate_grad_hook,
    register_posthook,
    register_prehook,
)

__all__ = [
    "FiniteCheck",
    "RemovableHandle",
    "call_hooks",
    "cpp",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "register_posthook",
    "register_prehook",
]

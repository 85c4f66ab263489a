"""Hooks of the autograd engine, with the same checks in eager and under compiled autograd.

Each kind runs where PyTorch's own of that kind does, and gets and returns the same. Hooks run in
order of registration, each on what the one before has made of the values; None, or the very object
that was passed in, leaves them as they are. Whoever runs the hooks takes a snapshot first: one that
is removed meanwhile still runs, one that is added does not.

A hook is a Python callable; or an operator (``torch.ops.x.y``) or a C++ function (:class:`cpp`),
which run without the GIL.
"""

from torch_commhook.autograd.cpp_hook import cpp
from torch_commhook.autograd.finite_check import FiniteCheck
from torch_commhook.autograd.registration import (
    RemovableHandle,
    call_hooks,
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

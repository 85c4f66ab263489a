"""Hooks on parameters whose gradients ``fully_shard()`` or ``replicate()`` writes."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle as TorchHandle


def is_fully_sharded(tensor: Tensor) -> bool:
    """Whether ``fully_shard()`` or ``replicate()`` writes a tensor's gradient.

    Autograd computes gradients of the whole parameters instead. It never calls a hook of this one.
    """
    module = sys.modules.get("torch.distributed._composable_state")
    if module is None or not hasattr(tensor, "device_mesh"):
        return False
    # Other threads may shard a model meanwhile; this copy is atomic.
    for reference in list(module._module_state_mapping.data.values()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.13, or another state
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            if group is not None and any(
                tensor is each.sharded_param for each in group.fsdp_params
            ):
                return True
    return False


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; other tensors unchanged."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


class _Hooks:
    """The library's post-accumulate hooks of one parameter: one of PyTorch's hooks calls them.

    So a hook may remove hooks, as with the engine; ``fully_shard`` itself refuses it.
    """

    def __init__(self) -> None:
        self.hooks: OrderedDict[int, Callable[[Tensor], None]] = OrderedDict()

    def __call__(self, parameter: Tensor) -> None:
        for hook in list(self.hooks.values()):
            hook(parameter)


class RegisteredHook:
    """A hook of a sharded parameter; has the methods of ``_C.Registered``."""

    def __init__(self, parameter: Tensor, hook: Callable[[Tensor], None]) -> None:
        theirs: Any = parameter._post_accumulate_grad_hooks or {}
        ours = next((each for each in theirs.values() if isinstance(each, _Hooks)), None)
        if ours is None:
            ours = _Hooks()
            handle: Any = parameter.register_post_accumulate_grad_hook(ours)
            handle.hooks_dict_ref().move_to_end(handle.id, last=False)  # before PyTorch's own
        self._handle = TorchHandle(ours.hooks)
        ours.hooks[self._handle.id] = hook

    def is_registered(self) -> bool:
        hooks = self._handle.hooks_dict_ref()
        return hooks is not None and self._handle.id in hooks

    def remove(self) -> None:
        self._handle.remove()

"""The common part of the frameworks' modules: a hook on the model that a framework has wrapped."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_commhook.attachment.attaching import attach
from torch_commhook.attachment.handle import HookHandle
from torch_commhook.attachment.sharded.fsdp import trains_shards


def is_alone(where: str, ranks: int) -> bool:
    """Whether training has one process and no process group; if so, warns that no hook is attached.

    ``where`` is the integration's name, and ``ranks`` the framework's number of ranks.
    """
    if ranks > 1 or dist.is_initialized():
        return False
    warnings.warn(
        f"{where}: training runs in one process, so there is nothing to average; the hook is not "
        "attached",
        stacklevel=3,
    )
    return True


def attach_wrapped(
    where: str, model: nn.Module, hook: str | Callable[..., Any], how: str, **options: Any
) -> HookHandle:
    """Attach a hook to a framework's wrapped model: a DDP, or a sharded model.

    Errors begin with ``where``, and end with ``how`` to make the framework wrap the model.

    Raises:
        RuntimeError: the model is neither, so its gradients are not averaged.
    """
    bare = getattr(model, "_orig_mod", model)
    if not isinstance(bare, DistributedDataParallel) and not trains_shards(bare):
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        raise RuntimeError(
            f"{where}: the model must be a DistributedDataParallel, or fully_shard() must have "
            f"been applied to it, for a hook to average its gradients; got "
            f"{type(bare).__name__} in training on {ranks} ranks. {how}"
        )
    return attach(model, hook, **options)

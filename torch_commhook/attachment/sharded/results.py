"""Writing what a hook gives where ``fully_shard`` expects it."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_commhook.hooks.mean import allreduce
from torch_commhook.native.bucket_ops import unflatten_into
from torch_commhook.step.attached_hook import Attached


@torch.no_grad()
def write(result: Tensor, tensor: Tensor, factor: float) -> None:
    """Write ``factor`` times a hook's result, which may lie where it is to be written."""
    if result.data_ptr() == tensor.data_ptr() and result.dtype == tensor.dtype:
        if factor != 1.0:
            tensor.mul_(factor)
    elif result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        unflatten_into(result.clone(), [tensor], scale=factor)
    else:
        unflatten_into(result, [tensor], scale=factor)


def is_plain(attached: Attached) -> bool:
    """Whether a hook does what ``fully_shard`` does without one."""
    return type(attached.hook) is allreduce and attached.stages.is_empty

"""Collectives that return a Future, check what the group gives back, and count their bytes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.metrics import note_collective, ring_all_reduce_bytes


def resolve_group(group: Any = None) -> Any:
    """The process group itself: the default one for None.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ValueError: this rank is not in the group.
        TypeError: no process group.
    """
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError(
                "torch_commhook: a process group is needed; call "
                "torch.distributed.init_process_group() first, or pass process_group="
            )
        group = dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("torch_commhook: this rank is not a member of the given process group")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"torch_commhook: process_group must be a ProcessGroup, got {_C.type_name(group)}"
        )
    return group


def all_reduce(tensor: Tensor, *, group: Any = None) -> torch.futures.Future[Tensor]:
    """Sum a tensor over all ranks, in place.

    Args:
        tensor: contiguous, of a dtype that the group's backend reduces (Gloo takes bfloat16), or
            sparse_coo where the backend reduces that (Gloo does). The bytes of a sparse tensor are
            counted as those of this rank's entries.
        group: the process group; None for the default one.

    Returns:
        A Future of the same tensor, holding the sum. With one rank it is complete at once.

    Raises:
        TypeError: the group gives back no Work, or its Work no Future.
        RuntimeError: torch.distributed is not initialized.
    """
    group = resolve_group(group)
    world_size = group.size()
    note_collective(ring_all_reduce_bytes(_payload_bytes(tensor), world_size))
    if world_size == 1:
        return _C.as_future(tensor, "all_reduce")
    work = group.allreduce([tensor], dist.AllreduceOptions())  # which sums by default
    if not isinstance(work, dist.Work):
        raise TypeError(
            f"{_C.type_name(group)}.allreduce must return a torch.distributed.Work, "
            f"got {_C.type_name(work)}"
        )
    future = work.get_future()
    if not isinstance(future, torch._C.Future):
        raise TypeError(
            f"{_C.type_name(work)}.get_future must return a torch.futures.Future, "
            f"got {_C.type_name(future)}"
        )
    # A Work's own Future holds a list.
    return _C.cast_into(future, tensor, tensor.dtype, f"all_reduce through {_C.type_name(group)}")


def _payload_bytes(tensor: Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        parts = (tensor._indices(), tensor._values())
        return sum(part.numel() * part.element_size() for part in parts)
    return tensor.numel() * tensor.element_size()

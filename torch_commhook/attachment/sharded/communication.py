"""Replacements of ``fully_shard``'s own collectives."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.attachment.sharded import fsdp
from torch_commhook.collectives.futures import completed
from torch_commhook.collectives.gloo_groups import group_name, is_known
from torch_commhook.process_group.registration import register
from torch_commhook.process_group.work import Work
from torch_commhook.process_group.wrapper import WrapperProcessGroup

_numbers = itertools.count()


class _Listener(Protocol):
    """Communicates for a model."""

    def reduce_scatter(self, number: int, out: Tensor, tensor: Tensor, op: fsdp.ReduceOp) -> None:
        """Sum gradients of parameter group ``number``."""

    def all_gather(
        self, out: Tensor, tensor: Tensor, group: dist.ProcessGroup
    ) -> torch.futures.Future[Tensor]:
        """Gather parameters."""

    def wait_for_gather(self, future: torch.futures.Future[Tensor]) -> None:
        """Wait for the Future of :meth:`all_gather`."""

    def all_reduce(self, tensor: Tensor, options: dist.AllreduceOptions) -> None:
        """Average gradients across replicas."""


class _Communication:
    """Allocates from PyTorch's allocator, as ``fully_shard`` does by default."""

    def __init__(self, listener: _Listener) -> None:
        self._listener = listener

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class ReduceScatter(_Communication):
    """The reduce-scatter of one group of parameters."""

    def __init__(self, listener: _Listener, number: int) -> None:
        super().__init__(listener)
        self._number = number

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: fsdp.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Delegate to the listener, and wait: on the CPU for the result, else on the stream."""
        self._listener.reduce_scatter(self._number, output_tensor, input_tensor, op)


class AllGather(_Communication):
    """The all-gather of parameters."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Delegate to the listener.

        Returns:
            A Work, also without ``async_op``: all-gathers ahead of their use then overlap the
            computation, on the CPU as well.
        """
        future = self._listener.all_gather(output_tensor, input_tensor, group)
        return _GatherWork(self._listener, future)


class _GatherWork(Work):
    """The Work of an all-gather; lets the listener wait and handle failures."""

    def __init__(self, listener: _Listener, future: torch.futures.Future[Tensor]) -> None:
        super().__init__()
        self._listener = listener
        self._future = future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._listener.wait_for_gather(self._future)
        return True

    def get_future(self) -> torch.futures.Future[Tensor]:
        return self._future


class ReplicaGroup(WrapperProcessGroup):
    """Replaces a mesh's group across replicas, on which ``fully_shard`` calls all-reduce."""

    def __init__(self, parent: dist.ProcessGroup, listener: _Listener) -> None:
        super().__init__(parent)
        # torch.distributed keeps the group, which must not keep the model's memory.
        self._listener = weakref.ref(listener)
        # Registered with torch.distributed: its functions ask for the backend of a failed group.
        register(self, f"{group_name(parent)}/replicas{next(_numbers)}")

    def forget(self) -> None:
        """Remove the group from ``torch.distributed``."""
        if is_known(self):  # the user may have destroyed all groups
            dist.destroy_process_group(self)

    def shutdown(self) -> None:
        """Do nothing: the parent continues."""

    def abort(self) -> None:
        """Do nothing: the parent continues."""

    def run_collective(
        self, operation: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        if operation != "allreduce":
            return super().run_collective(operation, arguments, keywords)
        tensors, options = arguments
        listener = self._listener()
        assert listener is not None
        listener.all_reduce(tensors[0], options)
        return completed(tensors)

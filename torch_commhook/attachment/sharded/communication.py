"""What ``fully_shard`` calls in place of its own collectives."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from torch_commhook.attachment.sharded import fsdp
from torch_commhook.collectives.futures import completed
from torch_commhook.collectives.gloo_groups import group_name
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
        """Wait for what :meth:`all_gather` gave."""

    def all_reduce(self, tensor: Tensor, options: dist.AllreduceOptions) -> None:
        """Average gradients across replicas."""


class _Communication:
    """Takes memory from PyTorch's allocator, as ``fully_shard`` does by default."""

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
        """Leave it to the listener, and wait: on the CPU for the result, else on the stream."""
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
        """Leave it to the listener.

        Returns:
            A Work, also where none was asked for: parameters that are gathered ahead of their use
            then travel beside the computation, on the CPU as well.
        """
        future = self._listener.all_gather(output_tensor, input_tensor, group)
        return _GatherWork(self._listener, future)


class _GatherWork(Work):
    """Tells the listener where it fails."""

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
    """Stands in a mesh for the group across replicas, through which ``fully_shard`` all-reduces."""

    def __init__(self, parent: dist.ProcessGroup, listener: _Listener) -> None:
        super().__init__(parent)
        # torch.distributed keeps the group, which must not keep the model's memory.
        self._listener = weakref.ref(listener)
        # Known to torch.distributed, whose functions ask for its backend where one fails.
        register(self, f"{group_name(parent)}/replicas{next(_numbers)}")

    def forget(self) -> None:
        """Be known to ``torch.distributed`` no longer."""
        if self in distributed_c10d._world.pg_names:  # its user may have ended all groups
            dist.destroy_process_group(self)

    def shutdown(self) -> None:
        """Nothing: the parent goes on."""

    def abort(self) -> None:
        """Nothing: the parent goes on."""

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

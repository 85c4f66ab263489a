"""Parameters that ``fully_shard`` communicates together, and the collectives that it calls."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.attachment.sharded import fsdp
from torch_commhook.collectives.futures import completed
from torch_commhook.collectives.gloo_groups import group_name, is_known
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.memory.sharded_states import ShardedParameter
from torch_commhook.process_group.base import register
from torch_commhook.process_group.work import Work
from torch_commhook.process_group.wrapper import WrapperProcessGroup

# ---- replacements of fully_shard's own collectives -----------------------------------------------


_numbers = itertools.count()


class _Communication:
    """Allocates from PyTorch's allocator, as ``fully_shard`` does by default."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ReduceScatter(_Communication):
    """The reduce-scatter of one group of parameters.

    Args:
        reduce: sums gradients into an output, and waits: on the CPU for the result, else on the
            stream.
    """

    def __init__(self, reduce: Callable[[Tensor, Tensor, fsdp.ReduceOp], None]) -> None:
        self._reduce = reduce

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: fsdp.ReduceOp,
        async_op: bool = False,
    ) -> None:
        self._reduce(output_tensor, input_tensor, op)


class AllGather(_Communication):
    """The all-gather of parameters.

    Args:
        issue: starts to gather parameters into an output; returns a Future.
        wait: waits for that Future, and handles failures.
    """

    def __init__(
        self,
        issue: Callable[[Tensor, Tensor, dist.ProcessGroup], torch.futures.Future[Tensor]],
        wait: Callable[[torch.futures.Future[Tensor]], None],
    ) -> None:
        self._issue = issue
        self._wait = wait

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Start to gather.

        Returns:
            A Work, also without ``async_op``: all-gathers ahead of their use then overlap the
            computation, on the CPU as well.
        """
        return _GatherWork(self._issue(output_tensor, input_tensor, group), self._wait)


class _GatherWork(Work):
    """The Work of an all-gather."""

    def __init__(
        self,
        future: torch.futures.Future[Tensor],
        wait: Callable[[torch.futures.Future[Tensor]], None],
    ) -> None:
        super().__init__()
        self._future = future
        self._wait = wait

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._wait(self._future)
        return True

    def get_future(self) -> torch.futures.Future[Tensor]:
        return self._future


class ReplicaGroup(WrapperProcessGroup):
    """Replaces a mesh's group across replicas, on which ``fully_shard`` calls all-reduce."""

    def __init__(
        self, parent: dist.ProcessGroup, all_reduce: Callable[[Tensor, dist.AllreduceOptions], None]
    ) -> None:
        super().__init__(parent)
        # torch.distributed keeps the group, which must not keep the model's memory.
        self._all_reduce = weakref.WeakMethod(all_reduce)
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
        all_reduce = self._all_reduce()
        assert all_reduce is not None
        all_reduce(tensors[0], options)
        return completed(tensors)


# ---- parameters that fully_shard communicates together -------------------------------------------


@dataclass(eq=False)
class Unit:
    """Parameters that ``fully_shard`` communicates together.

    It keeps no model alive.

    Attributes:
        reference: returns PyTorch's object of them.
        number: its number among the model's units. The last module's unit, whose gradients come
            first, is 0. Units that are not trained have -1.
        parameters: the description of each that requires grad, by the id of PyTorch's object.
        reduced: those whose gradients this backward reduces, in order.
        shards: this rank's shards, by name, with the tensors of which they are views.
        own: the communication of ``fully_shard`` without a hook.
    """

    reference: weakref.ref[fsdp.ParamGroup]
    number: int
    parameters: dict[int, ShardedParameter]
    reduced: list[ShardedParameter] = field(default_factory=list)
    shards: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    own: fsdp.Communication | None = None

    @property
    def group(self) -> fsdp.ParamGroup:
        return self.reference()

    def note_reduced(self) -> None:
        """Note which parameters' gradients ``fully_shard`` is about to reduce."""
        found = fsdp.with_gradient(self.group)
        if any(id(each) not in self.parameters for each in found):
            raise RuntimeError(
                "torch_commhook: a parameter has a gradient that was frozen when the hook was "
                "attached; remove() the hook and attach it again"
            )
        self.reduced = [self.parameters[id(each)] for each in found]

    def scale(self, op: fsdp.ReduceOp, ranks: int) -> float:
        """The factor by which ``fully_shard`` multiplies a sum over ``ranks`` ranks."""
        if op == dist.ReduceOp.AVG:
            return 1.0 / ranks
        if op == dist.ReduceOp.SUM:
            return 1.0
        factor = fsdp.divide_factor(self.group)
        assert factor is not None  # a premultiplied sum
        return 1.0 / factor

    def shards_of(
        self, parameters: Iterable[ShardedParameter], memory: HookMemory | None
    ) -> list[Tensor]:
        """This rank's shards of some parameters.

        Args:
            parameters: their descriptions.
            memory: is notified if a parameter has moved to other memory.
        """
        flat_of = {self.parameters[id(each)].name: fsdp.local_shard(each) for each in self._all}
        found = []
        for parameter in parameters:
            flat, known = flat_of[parameter.name], self.shards.get(parameter.name)
            if known is None or known[0] is not flat:
                shard = flat.detach().view(parameter.shard_shape)
                if known is not None and memory is not None:
                    memory.replace_parameter(known[1], shard)
                known = self.shards[parameter.name] = flat, shard
            found.append(known[1])
        return found

    @property
    def _all(self) -> list[Any]:
        return [each for each in self.group.fsdp_params if id(each) in self.parameters]

    def named_shards(self, memory: HookMemory | None = None) -> list[tuple[str, Tensor]]:
        """The names and this rank's shards of all parameters that require grad."""
        parameters = self.parameters.values()
        shards = self.shards_of(parameters, memory)
        return [(each.name, shard) for each, shard in zip(parameters, shards, strict=True)]

    def references(self) -> list[Callable[[], Tensor | None]]:
        """Functions that return each of these parameters as the sharded model has it."""
        return [fsdp.reference(each) for each in self._all]

    def take_over(self, gather: AllGather, scatter: ReduceScatter) -> None:
        """Replace ``fully_shard``'s own collectives."""
        self.own = fsdp.communication(self.group)
        fsdp.set_communication(self.group, fsdp.Communication(gather, scatter))

    def _is_ours(self) -> tuple[bool, bool]:
        """Whether each replacement of :meth:`take_over` is still in place."""
        now = fsdp.communication(self.group)
        return isinstance(now.all_gather, AllGather), isinstance(now.reduce_scatter, ReduceScatter)

    def check_communication(self) -> None:
        """Refuse a communication that has replaced the library's."""
        if not all(self._is_ours()):
            raise RuntimeError(
                "torch_commhook: set_custom_reduce_scatter() or set_custom_all_gather() has "
                "replaced "
                "the hook's communication since the hook was attached; remove() the hook first"
            )

    def give_back(self) -> None:
        """Undo :meth:`take_over`."""
        group = self.group
        if group is not None and self.own is not None:
            now = fsdp.communication(group)  # a user may have replaced a part of it
            ours = self._is_ours()
            fsdp.set_communication(
                group,
                fsdp.Communication(
                    self.own.all_gather if ours[0] else now.all_gather,
                    self.own.reduce_scatter if ours[1] else now.reduce_scatter,
                ),
            )
        self.own = None


def process_groups(units: list[Unit]) -> list[dist.ProcessGroup]:
    """The groups whose ranks step together, in the same order on all ranks.

    Includes those of tensor parallelism: ranks with other columns of a parameter must also leave a
    failed step.
    """
    return list(dict.fromkeys(group for unit in units for group in fsdp.axes(unit.group)))

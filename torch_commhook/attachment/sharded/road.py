"""Runs a hook on a model whose parameters ``fully_shard`` has sharded.

``fully_shard`` communicates in groups of parameters, and lets a caller replace a group's all-gather
and reduce-scatter. The library's take their place (``unit.py``). For the all-reduce across replicas
it puts a process group of its own into the mesh. The rest of its input is private to PyTorch
(``fsdp.py``).

A reduce-scatter's input is ordered by rank, so a bucket has a placeholder for each rank's shard of
each parameter (``memory/sharded_memory.py``). A state joins the placeholders to whole parameters
again.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_commhook import _C
from torch_commhook.attachment.road import Road
from torch_commhook.attachment.sharded import fsdp
from torch_commhook.attachment.sharded.fsdp import check_backward, check_fits
from torch_commhook.attachment.sharded.step import (
    Reduction,
    Roots,
    ShardedReplica,
    ShardedStep,
    wait_for,
)
from torch_commhook.attachment.sharded.unit import (
    AllGather,
    ReduceScatter,
    ReplicaGroup,
    Unit,
    process_groups,
)
from torch_commhook.attachment.training_state import BeforeForward, register_first
from torch_commhook.buckets.grad_bucket import hook_on_bucket
from torch_commhook.codecs.base import Codec
from torch_commhook.collectives.agreement import agree_across
from torch_commhook.collectives.compressed import compressed_all_gather
from torch_commhook.collectives.issuing import issue_all_gather, issue_unseen
from torch_commhook.collectives.plain import issue_reduce_scatter
from torch_commhook.hooks.mean import allreduce
from torch_commhook.memory.bucket_memory import BucketWithMemory, ShardedBucket
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.memory.sharded_memory import ReplicaMemory, WholeGradientMemory
from torch_commhook.metrics import (
    BucketTraffic,
    WireMeter,
    count_bucket,
    counting,
    note_collective,
    ring_all_reduce_bytes,
    tensor_bytes,
)
from torch_commhook.native.bucket_ops import unflatten_into
from torch_commhook.spans import active, spans_of
from torch_commhook.step.attached_hook import Attached, HookCall
from torch_commhook.step.step_group import StepGroup
from torch_commhook.wording import warn_user

# ---- writes a hook's results for fully_shard -----------------------------------------------------


@torch.no_grad()
def write(result: Tensor, tensor: Tensor, factor: float) -> None:
    """Write ``factor`` times a hook's result, which may share memory with the destination."""
    if result.data_ptr() == tensor.data_ptr() and result.dtype == tensor.dtype:
        if factor != 1.0:
            tensor.mul_(factor)
    elif result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        unflatten_into(result.clone(), [tensor], scale=factor)
    else:
        unflatten_into(result, [tensor], scale=factor)


# ---- runs a hook on a model whose parameters fully_shard has sharded -----------------------------


class ShardedRoad(Road):
    """A model with ``fully_shard`` whose collectives the library replaces while a hook is attached.

    On a mesh of one dimension the hook takes part in the reduce-scatters. On a mesh of two
    dimensions, and with ``replicate()``, it averages across replicas.

    Args:
        model: the model.
        units: its groups of parameters. Trained ones come first, and have the same process groups.
        weights: the codec for gathered parameters; None gathers them uncompressed.
        devices: as for :class:`StepGroup`.
    """

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        weights: Codec | None,
        devices: Collection[str] | None = None,
    ) -> None:
        self._all_units = units
        self._units = [unit for unit in units if unit.parameters]
        self._attached: Attached | None = None
        #: The hook in the reduce-scatters; on a mesh of one dimension it is the attached one.
        self.shard_attached: Attached | None = None
        self._reducing: Unit | None = None
        first = units[0].group
        self.device: torch.device = first.device
        self._forget: weakref.finalize[..., Any] | None = None
        self._counted: list[Attached] = []  # in this step
        self._runs_module_hooks = False  # in this step
        self._step = ShardedStep(
            process_groups(units),
            fsdp.replica_group(first),
            self._step_begins,
            self._step_done,
            devices,
        )
        # The ranks with other shards, and those with the same ones.
        self._shards = self._step.group_of(fsdp.scatter_group(first) or fsdp.shard_group(first))
        self._replicas = self._step.group_of(fsdp.replica_group(first))
        group = self._replicas or self._shards  # the hook's: across replicas, or among shards
        assert group is not None
        super().__init__(model, group)
        self._weights = weights
        self._gather_group = fsdp.shard_group(first)
        self._roots = Roots(self._step, self._backward_ends)
        self._take_over()
        self._members = _C.module_members(model)
        self._forward_handles = [register_first(model, BeforeForward(self))]

    # ---- replacements of fully_shard's own collectives -------------------------------------------

    def _take_over(self) -> None:
        gather = AllGather(self.all_gather, self.wait_for_gather)
        replaced = None
        model = self.model()
        assert model is not None
        self._roots.listen_to(model)
        if self._replicas is not None:
            replaced = ReplicaGroup(self._replicas.parent, self.all_reduce)
            self._forget = weakref.finalize(self, replaced.forget)
            self._forget.atexit = False
        for unit in self._all_units:
            unit.take_over(gather, ReduceScatter(partial(self.reduce_scatter, unit)))
            fsdp.set_post_backward(unit.group, partial(self.post_backward, unit))
            if replaced is not None:
                fsdp.set_replica_group(unit.group, replaced)

    def _give_back(self) -> None:
        for unit in self._all_units:
            unit.give_back()
            if unit.group is not None:
                fsdp.set_post_backward(unit.group, None)
                if self._replicas is not None:
                    fsdp.set_replica_group(unit.group, self._replicas.parent)
        if self._forget is not None:
            self._forget()

    def _stop(self) -> None:
        """Give the collectives back: the last backward of the hook has ended."""
        self._roots.stop()
        self._step.close()

    def post_backward(self, unit: Unit, *unused: Any) -> None:
        """Note that a unit's gradients are complete; ``fully_shard`` reduces them now."""
        if self._step.is_under_way(unit.number):  # a module that ran twice: its gradients add up
            self._step.wait_for_reductions()
        before, self._reducing = self._reducing, unit
        try:
            check_backward()
            unit.note_reduced()
        except RuntimeError as error:
            self._step.fail(str(error))
            raise
        try:
            fsdp.post_backward(unit.group, *unused)
        finally:
            self._reducing = before

    def reduce_scatter(self, unit: Unit, out: Tensor, tensor: Tensor, op: fsdp.ReduceOp) -> None:
        """Average a unit's gradients over the shards' ranks: their sum, times :meth:`Unit.scale`.

        Raises:
            PeerError: it failed on another rank.
            Exception: the hook raised it.
        """
        step_group, attached = self._shards, self.shard_attached
        assert step_group is not None
        self._step.before_reduction()
        group = step_group.group_for(tensor.device)
        scale = unit.scale(op, group.size())
        meter = WireMeter()
        try:
            if attached is None:
                with counting(meter):
                    future = issue_reduce_scatter(tensor, out, op, group, scale=scale)
                wait_for(future, step_group)
            else:
                assert isinstance(attached.memory, WholeGradientMemory)
                placeholders = attached.memory.shards_of([each.name for each in unit.reduced])
                memory = attached.memory_of(placeholders, unit.number)
                bucket = ShardedBucket(
                    placeholders,
                    memory=memory,
                    shard=out,
                    scale=scale,
                    op=op,
                    buffer=tensor,
                    index=unit.number,
                    bucket_count=len(self._units),
                    process_group=group,
                )
                where = hook_on_bucket(attached.name, unit.number, len(self._units))
                goes_on = self._may_go_on(unit, op, tensor.dtype, step_group)
                if goes_on:
                    out.fill_(math.nan)  # nobody may use these values yet
                with counting(meter):
                    future = attached.start_on_shards(bucket, where)
                traffic = meter.traffic(tensor.numel(), tensor.dtype)

                def finish() -> None:
                    assert isinstance(attached.memory, WholeGradientMemory)
                    if memory is not None:
                        attached.memory.clear_padding(memory)
                    self._count(attached, unit, traffic)

                self._step.wait_or_add(
                    Reduction(unit.number, future, where, step_group, finish, out), goes_on
                )
        except Exception as error:
            raise self._step.fail_with(error, step_group) from None
        if self._attached is not None and self._attached is not attached:
            self._attached.stats.bytes_scattered += meter.bytes_sent

    def _may_go_on(self, unit: Unit, op: object, dtype: torch.dtype, group: StepGroup) -> bool:
        """Whether a reduction may end with the backward: nothing needs its result earlier."""
        is_last = self._replicas is None or group is self._replicas
        return (
            is_last and not self._runs_module_hooks and fsdp.is_written_last(unit.group, op, dtype)
        )

    def all_reduce(self, tensor: Tensor, options: dist.AllreduceOptions) -> None:
        """Average a unit's shard across replicas."""
        unit, attached, step_group = self._reducing, self._attached, self._replicas
        assert step_group is not None
        self._step.before_reduction()
        group = step_group.group_for(tensor.device)
        op: Any = options.reduceOp
        try:
            # Such a hook does the same as fully_shard without one.
            is_plain = (
                attached and type(attached.hook) is allreduce and attached.bucket_hooks.is_empty
            )
            if unit is None or attached is None or is_plain:
                note = ring_all_reduce_bytes(tensor_bytes(tensor), group.size())
                meter = WireMeter()
                with counting(meter):
                    note_collective(note)
                    # With fully_shard's own operation, for the same bits.
                    work = issue_unseen(lambda: group.allreduce([tensor], options), tensor.device)
                    future = work.get_future()
                wait_for(future, step_group)
                if unit is not None and attached is not None:
                    self._count(attached, unit, meter.traffic(tensor.numel(), tensor.dtype))
            else:
                self._run_on_replicas(attached, unit, tensor, op, step_group)
        except Exception as error:
            raise self._step.fail_with(error, step_group) from None

    def _run_on_replicas(
        self, attached: Attached, unit: Unit, tensor: Tensor, op: Any, step_group: StepGroup
    ) -> None:
        # The hook gives a mean. With a divide factor fully_shard asks for a sum, and divides it.
        factor = 1.0 if op == dist.ReduceOp.AVG else float(step_group.size)
        apart = attached.keeps_ranks_apart
        if apart:
            self._counted.append(attached)
        if apart and attached.bucket_hooks.is_empty:
            write(tensor, tensor, factor)
            return
        parameters = unit.shards_of(unit.reduced, attached.memory)
        bucket = BucketWithMemory(
            parameters,
            memory=None if apart else attached.memory_of(parameters, unit.number),
            buffer=tensor,
            index=unit.number,
            bucket_count=len(self._units),
            process_group=step_group.group_for(tensor.device),
        )
        call: HookCall = attached.start(
            bucket, hook_on_bucket(attached.name, unit.number, len(self._units))
        )

        def finish() -> None:
            result = call.result()
            if call.local is not None:
                result = attached.bucket_hooks.after(bucket, result, call.local, call.where)
            write(result, tensor, factor)
            if not apart:
                self._count(attached, unit, call.traffic)

        reduction = Reduction(unit.number, call.future, call.where, step_group, finish, tensor)
        goes_on = self._may_go_on(unit, op, tensor.dtype, step_group)
        self._step.wait_or_add(reduction, goes_on)

    def all_gather(
        self, out: Tensor, tensor: Tensor, group: dist.ProcessGroup
    ) -> torch.futures.Future[Tensor]:
        """Start to gather parameters, through the codec if there is one.

        Args:
            out: the parameters of all ranks. Written.
            tensor: this rank's part.
            group: the group that gathers.

        Returns:
            A Future of ``out``, for :meth:`wait_for_gather`.

        Raises:
            PeerError: a rank has left the previous step.
        """
        self._step.before_gather()
        step_group = self._step.group_of(group)
        inner = group if step_group is None else step_group.group_for(tensor.device)
        meter = WireMeter()
        try:
            # Gathers in a part of the group, of reshard_after_forward=k, send parameters that were
            # decoded before.
            if (
                self._weights is None
                or tensor.dtype == torch.uint8
                or group is not self._gather_group
            ):
                bytes_sent = tensor_bytes(tensor) * (inner.size() - 1)
                future = issue_all_gather(tensor, out.view(inner.size(), *tensor.shape), inner)
            else:
                spans = spans_of(lambda: f"weights, {self._weights!r}")
                with counting(meter), active(spans):
                    future = compressed_all_gather(tensor, self._weights, out=out, group=inner)
                bytes_sent = meter.bytes_sent
        except Exception as error:
            if step_group is None:
                raise
            raise self._step.fail_with(error, step_group) from None
        if self._attached is not None:
            self._attached.stats.bytes_gathered += bytes_sent
        return future

    def wait_for_gather(self, future: torch.futures.Future[Tensor]) -> None:
        """Wait for the Future of :meth:`all_gather`."""
        step_group = self._step.group_of(self._gather_group)
        assert step_group is not None
        try:
            wait_for(future, step_group)
        except Exception as error:
            raise self._step.fail_with(error, step_group) from None

    def _count(self, attached: Attached, unit: Unit, traffic: BucketTraffic) -> None:
        first = attached not in self._counted
        self._counted.append(attached)
        if attached.memory.replays.is_capturing:
            return  # nothing is sent now, and replays are not counted
        stats, units = attached.stats, len(self._units)
        # Units whose gradients come later have larger numbers, but some may come first or never.
        empty = traffic._replace(numel=0, bytes_sent=0, bytes_received=0)
        while len(stats.buckets) < unit.number:
            count_bucket(stats, len(stats.buckets), units, empty, first=False)
        count_bucket(stats, unit.number, units, traffic, first=first)

    # ---- steps -----------------------------------------------------------------------------------

    def _step_begins(self) -> None:
        self._counted = []
        model = self.model() if self.device.type == "cpu" else None  # only the CPU overlaps
        self._runs_module_hooks = model is not None and fsdp.runs_hooks_in_backward(model)
        if not self._roots.are_in_backward:  # of modules grouped for fully_shard, one ran alone
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        for attached in self._all_attached():
            attached.look_at_scale(in_join=False)

    def _backward_ends(self) -> None:
        """Note that a root's backward has ended. The last of several roots ends the step."""
        if self._roots.are_in_backward:
            return
        self._step.end()
        if self._then:
            self._do_then()

    def _step_done(self) -> None:
        for attached in self._all_attached():
            if attached not in self._counted:  # only shards have reduced gradients
                continue
            if attached.local_steps is None:
                attached.memory.count_step()
            else:
                attached.local_steps.note_backward()

    def _all_attached(self) -> list[Attached]:
        found = [each for each in (self._attached, self.shard_attached) if each is not None]
        return found[:1] if len(found) == 2 and found[0] is found[1] else found

    def before_forward(self, module: nn.Module) -> None:
        """Check the model. The model and the roots around it call this before their forward."""
        model = self.model()
        if self._closed or model is None:
            return
        self._roots.recover(module)
        if module is model:
            for root in self._roots.around(model):
                self._forward_handles.append(register_first(root, BeforeForward(self)))
            self._check(model)

    def _check(self, module: nn.Module) -> None:
        """Refuse a model that has changed since the hook was attached."""
        members = _C.module_members(module)
        if members != self._members:
            self._check_units(module)
            self._members = members
        self._roots.check()
        for unit in self._all_units:
            unit.check_communication()

    def _check_units(self, module: nn.Module) -> None:
        known = {id(unit.group) for unit in self._all_units}
        for group in fsdp.param_groups(module):
            if id(group) not in known and fsdp.sharded_parameters(module, group):
                raise RuntimeError(
                    "torch_commhook: fully_shard() was applied to a part of the model since the "
                    "hook was attached; remove() the hook and attach it again"
                )

    # ---- the interface of a road -----------------------------------------------------------------

    @property
    def attached(self) -> Attached | None:
        return self._attached

    @attached.setter
    def attached(self, attached: Attached | None) -> None:
        if attached is not None:
            self._prepare_in(self.group, attached)
        if self._replicas is None:
            self.shard_attached = attached
        self._attached = attached
        self._step.keeps_apart = attached is not None and attached.keeps_ranks_apart
        if attached is None:
            self._close()

    def use_shard_hook(self, attached: Attached) -> None:
        """Let a hook take part in the reduce-scatters, beside the one across replicas."""
        assert self._shards is not None
        self._prepare_in(self._shards, attached)
        self.shard_attached = attached

    def _prepare_in(self, group: StepGroup, attached: Attached) -> None:
        """Let a hook communicate through a group, and ask for its memory."""
        attached.use_group(group, self.device)
        self._prepare(attached)
        lost = attached.memory.error_bytes
        if lost and isinstance(attached.memory, WholeGradientMemory):
            warn_user(
                f"torch_commhook: {attached.hook} keeps errors of whole gradients, "
                f"{lost / 2**20:.1f} MiB on each rank, which do not shrink with the number of "
                "shards; on a mesh of two dimensions it keeps errors of a shard only"
            )

    def _prepare(self, attached: Attached) -> None:
        """Let a hook ask for its memory of all parameters before the first step."""
        for unit in self._units:
            if isinstance(attached.memory, WholeGradientMemory):
                names = [each.name for each in unit.parameters.values()]
                parameters = attached.memory.shards_of(names)
            else:
                parameters = [shard for _, shard in unit.named_shards(attached.memory)]
            attached.memory_of(parameters, unit.number)

    def check_fits(self, attached: Attached) -> None:
        check_fits(attached, "HookHandle.replace")

    def agree(self, what: str, error: Exception | None, settings: dict[str, object]) -> None:
        """Raise on all ranks of the mesh if one fails or settings differ; as :func:`agree`."""
        memory, of_all, of_shard = self._memory, dict(settings), {}
        choices = "the state's choices"  # which only the replicas of a shard share
        if choices in settings and isinstance(memory, ReplicaMemory):
            name = f"{choices} for shard {memory.shard[0]} of part {memory.part[0]}"
            of_shard = {name: of_all.pop(choices)}
        agree_across(self.parents, what, error, of_all, of_shard)

    @property
    def parents(self) -> Sequence[dist.ProcessGroup]:
        return self._step.parents

    @property
    def _memory(self) -> HookMemory | None:
        return None if self._attached is None else self._attached.memory

    @property
    def is_closing(self) -> bool:
        return self._closed and self._step.is_open

    def parameter_buckets(self) -> list[list[Tensor]]:
        """This rank's shards of the parameters of each unit, in order."""
        found = [unit.named_shards(self._memory) for unit in reversed(self._units)]
        return [[shard for _, shard in each] for each in found]

    @property
    def replica(self) -> ShardedReplica:
        return ShardedReplica(self._step, self.group, self._units, self.device)

    def memory_loaded(self, buckets: list[list[str]]) -> None:
        for attached in self._all_attached():
            self._prepare(attached)

    def no_sync(self) -> AbstractContextManager[None]:
        """Let gradients accumulate in a block; as ``set_requires_gradient_sync(False)``."""
        return fsdp.without_reductions([unit.group for unit in self._units])

    def join(self) -> NoReturn:
        raise RuntimeError(
            "HookHandle.join: with fully_shard all ranks must take equally many steps, since each "
            "has a part of the parameters; give each as many batches"
        )

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for handle in self._forward_handles:
            handle.remove()
        if self._step.has_failed:
            self._roots.reset()
        self._give_back()
        self.shard_attached = None
        # Parameters that the codec has decoded; otherwise the backward's end drops them.
        if self._weights is not None and not self._roots.are_unfinished:
            for unit in self._all_units:
                if unit.group is not None:
                    fsdp.drop_whole(unit.group)
        self.after_backward(self._stop)

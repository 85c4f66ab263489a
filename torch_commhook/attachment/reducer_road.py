"""Runs a hook on our own reducer: for a plain module, or DDP with its Python reducer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from torch_commhook import collectives
from torch_commhook.attachment.elastic import ElasticReducer, ElasticTraining, check_elastic_hook
from torch_commhook.attachment.parameters import (
    WatchedParameters,
    buffers_of,
    check_not_in_ddp,
    first_values,
    joined_bytes,
    unpack,
)
from torch_commhook.attachment.road import Road
from torch_commhook.attachment.training_state import BeforeForward
from torch_commhook.native.runtime import skip_dynamo
from torch_commhook.process_group.wrapper import seen_by_cpp
from torch_commhook.reducer.reducer import Reducer
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.step_group import StepGroup, check_is_free, parameters_changed, step_groups

_BROADCAST_BYTES = 250 << 20  # in flight, as in DDP
#: A model up to this size is broadcast from a copy, while the ranks go on attaching.
_MOST_COPIED_BYTES = 64 << 20


class ReducerRoad(Road, Joinable, JoinHook):
    """Averages a model's gradients with our own reducer, while a hook is attached.

    In ``join()`` a rank without more inputs takes part in the others' steps with zeros.

    Args:
        model: a module, or a DDP that was made with the Python reducer.
        parameters: the names and parameters whose gradients are averaged.
        group: the group of the ranks.
        bucket_cap_mb: the capacity of a bucket in MiB.
        gradient_as_bucket_view: whether gradients stay in the buckets' memory.
        broadcast_buffers: whether rank 0 sends its buffers to all ranks before each training step.
        init_sync: whether rank 0 sends its parameters and buffers to all ranks now.
        elastic: the ranks, if they come and go.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: list[tuple[str, Tensor]],
        *,
        group: StepGroup,
        bucket_cap_mb: float,
        gradient_as_bucket_view: bool,
        broadcast_buffers: bool,
        init_sync: bool,
        elastic: ElasticTraining | None = None,
    ) -> None:
        super().__init__(model, group)
        Joinable.__init__(self)
        self.elastic = elastic
        init_sync = init_sync and elastic is None  # new ranks get more than parameters
        # Rank 0's message, the Future of its arrival, and its destination.
        self._first_values: tuple[Tensor, dist.Work, list[Tensor]] | None = None
        if init_sync and self._group.size > 1:
            self._begin_first_broadcast()
        self._watched = WatchedParameters(model, parameters, in_ddp=False)
        self._seen_in_forward = False  # whether parameters were checked since the last step
        self._sync = True
        self._sync_of_forward: bool | None = None
        self._to_check = parameters  # whether a DDP has them; only the first one after a step
        self._buffers_changed = True
        # With elastic, rank 0's buffers are sent at the end of a step, which is repeated as a
        # whole.
        self._broadcast_buffers = broadcast_buffers and self._group.size > 1 and elastic is None
        self._is_notified = False  # whether ranks that have joined know about the current step
        make: Callable[..., Reducer] = Reducer
        if elastic is not None:
            make = partial(ElasticReducer, elastic)
        self.reducer = make(
            parameters,
            self._group,
            capacity_bytes=int(bucket_cap_mb * (1 << 20)),
            sparse=_sparse_names(model),
            as_views=gradient_as_bucket_view,
            should_sync=self._should_sync,
            change_of_parameters=self._watched.change,
            in_join=self._in_join,
            on_step=self._on_step,
            on_captured=self._on_captured,
            on_closed=self._reducer_closed,
        )
        self._forward_handle = model.register_forward_pre_hook(BeforeForward(self))
        if isinstance(model, DistributedDataParallel):
            for handle in model._accum_grad_hooks:  # DDP's own, which would average again
                handle.remove()
            model._accum_grad_hooks.clear()
        _dont_fuse()
        # A parameter, its hook in C++, and that hook's reference to the parameter form a cycle that
        # Python's collector does not see.
        self._end = weakref.finalize(model, self._close)
        self._end.atexit = False

    @classmethod
    def of_ddp(
        cls, model: DistributedDataParallel, parameters: list[tuple[str, Tensor]], group: StepGroup
    ) -> ReducerRoad:
        """Make one with the settings of a DDP, and remove the DDP's own hooks."""
        return cls(
            model,
            parameters,
            group=group,
            bucket_cap_mb=model.bucket_bytes_cap / (1 << 20),
            gradient_as_bucket_view=model.gradient_as_bucket_view,
            broadcast_buffers=model.broadcast_buffers,
            init_sync=False,
        )

    @property
    def attached(self) -> Attached | None:
        return self.reducer.attached

    @attached.setter
    def attached(self, attached: Attached | None) -> None:
        if attached is None or attached.keeps_ranks_apart:
            self._end_first_broadcast()
        self.reducer.attached = attached
        if attached is None:
            self._close()

    def memory_loaded(self, buckets: list[list[str]]) -> None:
        self.reducer.memory_loaded(buckets)

    @property
    def _ddp(self) -> DistributedDataParallel | None:
        model = self.model()
        return model if isinstance(model, DistributedDataParallel) else None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        ddp = self._ddp
        if ddp is not None:
            with ddp.no_sync():
                yield
            return
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def join(self) -> Join:
        if self.elastic is not None:
            raise RuntimeError(
                "HookHandle.join: the hook was attached with elastic; a rank without more inputs "
                "leaves by remove()"
            )
        return Join([self])

    @property
    def group(self) -> StepGroup:
        return self._group if self.elastic is None else self.elastic.group

    def check_fits(self, attached: Attached) -> None:
        """Refuse hooks that ``elastic`` does not support; without it any hook fits."""
        if self.elastic is not None:
            check_elastic_hook(attached)

    def agree(self, what: str, error: Exception | None, settings: dict[str, object]) -> None:
        if self.elastic is not None:  # the others are in their steps
            if error is not None:
                raise error
            return
        try:
            super().agree(what, error, settings)
        finally:
            self._end_first_broadcast()

    def parameter_buckets(self) -> list[list[Tensor]]:
        return self.reducer.parameter_buckets()

    def broadcast_from(self, rank: int) -> None:
        """Broadcast one rank's parameters and buffers to all ranks."""
        tensors = self._shared_tensors()
        if tensors:
            group = seen_by_cpp(self._group.parent)
            dist._broadcast_coalesced(group, tensors, _BROADCAST_BYTES, rank)

    def _begin_first_broadcast(self) -> None:
        """Broadcast rank 0's parameters and buffers; a few of them while ranks go on attaching."""
        tensors = self._shared_tensors()
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        is_plain = self._group.recovers and all(
            type(tensor) is Tensor
            and tensor.device.type == "cpu"
            and tensor.layout is torch.strided
            for tensor in tensors
        )
        if not is_plain or not tensors or nbytes > _MOST_COPIED_BYTES:
            self.broadcast_from(0)
            return
        sent = joined_bytes(tensors)
        work = dist.broadcast(sent, group=self._group.parent, group_src=0, async_op=True)
        self._first_values = sent, work, tensors

    def _end_first_broadcast(self) -> None:
        if self._first_values is None:
            return
        (sent, work, tensors), self._first_values = self._first_values, None
        work.wait()
        if self._group.rank != 0:
            unpack(sent, tensors)

    def _shared_tensors(self) -> list[Tensor]:
        model = self.model()
        assert model is not None
        return list(first_values(model).values())

    def main_hook(self) -> None:
        """Take part in the others' step, with gradients of zero."""
        self._is_notified = True  # by another rank
        model = self.model()
        assert model is not None
        if model.training and self._broadcast_buffers:
            self._send_buffers(model, joined=True)
        self.reducer.shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the parameters of a rank that left a join context last."""
        self._join_config = type(self._join_config).construct_disabled_join_config()
        self._is_notified = False
        self.broadcast_from(self._common_rank(is_last_joiner))

    def _common_rank(self, candidate: bool) -> int:
        """The highest rank among the candidates."""
        own = self._group.rank if candidate else -1
        rank = torch.tensor([own], dtype=torch.int64, device=self.join_device)
        dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=self.join_process_group)
        return int(rank.item())

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return self

    @property
    def join_device(self) -> torch.device:
        return self.reducer.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self._group.parent

    @skip_dynamo
    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._forward_handle.remove()
        self.reducer.close()
        if self.elastic is not None:
            self.elastic.leave()

    @property
    def is_closing(self) -> bool:
        return self._closed and not self.reducer.is_closed

    def _reducer_closed(self) -> None:
        self._end.detach()
        self._do_then()
        self._to_check = []
        self._watched.clear()
        self._group.close()
        _fuse_again()
        ddp = self._ddp
        if ddp is not None:
            ddp._register_accum_grad_hook()

    # ---- around a step ---------------------------------------------------------------------------

    def _wants_sync(self) -> bool:
        ddp = self._ddp
        return self._sync if ddp is None else ddp.require_backward_grad_sync

    def _should_sync(self) -> bool:
        """Whether the backward that begins synchronises: as in DDP, its forward decides."""
        syncs, self._sync_of_forward = self._next_syncs(), None  # for one backward
        return syncs

    def _next_syncs(self) -> bool:
        decided = self._sync_of_forward
        # None if the model's own forward was not called.
        return self._wants_sync() if decided is None else decided

    @property
    def _joins(self) -> bool:
        """Whether a join context is active."""
        enable: bool = self._join_config.enable
        return enable

    def _in_join(self) -> bool:
        """Whether ranks that have joined know about the current step."""
        return self._joins and self._is_notified

    @torch.compiler.disable
    def _notify(self) -> None:
        """Notify the ranks that have joined of a step, once."""
        if self._joins and not self._is_notified:
            self._is_notified = True
            Join.notify_join_context(self)

    def before_forward(self, module: nn.Module) -> None:
        """Check the parameters and send buffers. The model calls this before its own forward."""
        if not torch.is_grad_enabled():
            return
        if torch.compiler.is_dynamo_compiling():
            if parameters_changed(self.reducer.key):
                self._check_parameters()
        else:
            self._check_parameters()
            self._seen_in_forward = self._watched.is_sure
        sync = self._sync_of_forward = self._wants_sync()
        # The first forward after a backward that synchronises, whether or not it does so itself. A
        # second forward before the backward must not write buffers that autograd has saved.
        send = self._buffers_changed
        if self._joins:
            if not sync:
                return
            self._notify()
            send = True
        if self.elastic is not None:
            self.elastic.before_forward()
        if send and module.training and self._broadcast_buffers:
            self._buffers_changed = False
            self._send_buffers(module)

    def _on_step(self, begins: bool) -> None:
        """Called around each backward that synchronises and is not traced."""
        if begins:
            self._buffers_changed = True
            if not isinstance(self.model(), DistributedDataParallel):
                check_not_in_ddp(self._to_check, attached=True)
                self._to_check = self._to_check[:1]
            if not self._seen_in_forward:
                self._check_parameters()
            self._notify()  # if the model's own forward was not called
        else:
            self._seen_in_forward = self._is_notified = False

    def _on_captured(self) -> None:
        """Note that compiled autograd captures a backward."""
        self._buffers_changed = self._buffers_changed or self._next_syncs()

    @torch.compiler.disable
    def _check_parameters(self) -> None:
        change = self._watched.change()
        if change is not None:
            # The other ranks' parameters may be unchanged.
            raise self.group.fail_with(RuntimeError(change))

    def _send_buffers(self, module: nn.Module, joined: bool = False) -> None:
        source = 0
        if self._joins:  # rank 0 may have no more steps of its own
            source = self._common_rank(not joined)
        by_device: dict[torch.device, list[Tensor]] = {}
        for buffer in buffers_of(module).values():
            by_device.setdefault(buffer.device, []).append(buffer)
        for buffers in by_device.values():
            group = self._group.parent
            check_is_free(group)
            sent = collectives.broadcast(joined_bytes(buffers), src=source, group=group).wait()
            unpack(sent, buffers)


# DDP with the Python reducer lets Inductor fuse all-reduces in the whole process, since its own
# hooks are for single parameters. Our hooks have buckets. Ranks that compile different graphs, as
# after an exception, must still issue the same collectives.
_fusion_before = False


def _dont_fuse() -> None:
    global _fusion_before
    if torch._inductor.config._fuse_ddp_communication or _count_reducers() == 1:
        _fusion_before = torch._inductor.config._fuse_ddp_communication
    torch._inductor.config._fuse_ddp_communication = False


def _fuse_again() -> None:
    if _count_reducers() == 0:
        torch._inductor.config._fuse_ddp_communication = _fusion_before


def _count_reducers() -> int:
    """The number of reducers that have hooks on parameters."""
    users = {id(user): user for group in step_groups() for user in list(group.users.values())}
    return sum(isinstance(user, Reducer) and not user.is_closed for user in users.values())


def _sparse_names(model: nn.Module) -> frozenset[str]:
    names = set()
    for prefix, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            names.add(f"{prefix}.weight" if prefix else "weight")
    return frozenset(names)

"""Attaching a hook to a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torch_commhook import _C
from torch_commhook._runtime import check_hook, hook_name, run_hook
from torch_commhook.bucket import GradBucket
from torch_commhook.hooks.base import Hook, checked_result_dtype
from torch_commhook.hooks.mean import allreduce
from torch_commhook.metrics import BucketStats, HookStats, WireMeter, counting

#: How long a hook that failed waits for the buckets in flight before it.
_DRAIN_SECONDS = 60.0


@dataclass(eq=False)
class _Attached:
    hook: Callable[..., Any]
    state: object
    name: str
    stats: HookStats = field(default_factory=HookStats)


def _delivery(model: DistributedDataParallel) -> str:
    """Who brings a bucket's result into the gradients (csrc/runtime/ddp_hook.h)."""
    if model.find_unused_parameters or model.static_graph:
        return "reducer"  # it alone knows which gradients to leave as they are
    if any(parameter.is_complex() for parameter in model.parameters()):
        return "reducer"  # the operators take no complex tensors
    return "buffer" if model.gradient_as_bucket_view else "write"


class _DdpRoad:
    """What stands between DDP's reducer and the hook that is attached at the moment.

    A reducer takes one communication hook in its life. This one stays, and calls whatever is
    attached; with nothing attached it averages as DDP does with no hook.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.process_group = model.process_group
        self.attached: _Attached | None = None
        self._running: _Attached | None = None  # in this backward
        self._plain = allreduce()
        self._buckets: dict[int, GradBucket] = {}
        # The model's reducer owns this; a handle that outlives the model keeps nothing of it.
        buckets = self._buckets
        self.model = weakref.ref(model, lambda _: buckets.clear())

        def choose_delivery() -> str:
            model = self.model()
            return "reducer" if model is None else _delivery(model)

        _C.register_ddp_hook(model.reducer, self._run, choose_delivery, _DRAIN_SECONDS)

    def _run(
        self, torch_bucket: dist.GradBucket, first: bool, rebuilt: bool
    ) -> tuple[str, Any, torch.dtype]:
        """Called by the reducer for each bucket that is full (csrc/runtime/ddp_hook.h)."""
        index = torch_bucket.index()
        if rebuilt:
            bucket = GradBucket.from_torch(torch_bucket, self.process_group)
            self._buckets[index] = bucket
            _C.prefer_huge_pages(bucket.buffer())  # which lives until DDP forms its buckets anew
        else:
            bucket = self._buckets[index]
            bucket._buffer = torch_bucket.buffer()
            bucket._sparse_grad_indices = _C.sparse_grad_indices(torch_bucket)
        if first:
            self._running = self.attached
        attached = self._running
        if attached is None:
            return "none", self._plain.average(bucket), bucket.buffer().dtype
        meter = WireMeter()
        with counting(meter):
            if isinstance(attached.hook, Hook):
                # Bringing the result into the gradients casts it: no pass of its own for that.
                dtype = checked_result_dtype(attached.hook, bucket)
                result: Any = _C.run_average(attached.hook, bucket)
            else:
                dtype = bucket.buffer().dtype
                result = run_hook(attached.hook, attached.state, bucket)
        _note(attached.stats, bucket, first, meter.bytes_sent if meter.collectives else None)
        return attached.name, result, dtype


def _note(stats: HookStats, bucket: GradBucket, first: bool, bytes_sent: int | None) -> None:
    index = bucket.index()
    if first:
        stats.steps += 1
        stats.bytes_sent_last_step = 0
        del stats.buckets[bucket.bucket_count() :]
    if index == len(stats.buckets):
        stats.buckets.append(BucketStats(index, 0, torch.float32))
    entry = stats.buckets[index]
    entry.numel = bucket.buffer().numel()
    entry.dtype = bucket.buffer().dtype
    entry.bytes_sent_last_step = bytes_sent
    entry.bytes_sent = _sum(entry.bytes_sent, bytes_sent)
    stats.bytes_sent_last_step = _sum(stats.bytes_sent_last_step, bytes_sent)
    stats.bytes_sent = _sum(stats.bytes_sent, bytes_sent)


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


_roads: weakref.WeakKeyDictionary[DistributedDataParallel, _DdpRoad] = weakref.WeakKeyDictionary()


class HookHandle:
    """A hook that is attached to a model. Made by :func:`attach`."""

    def __init__(self, road: _DdpRoad, attached: _Attached) -> None:
        self._road = road
        self._attached = attached

    @property
    def hook(self) -> Callable[..., Any]:
        """The hook."""
        return self._attached.hook

    @property
    def is_attached(self) -> bool:
        """Whether the hook is still the one that the model uses."""
        return self._road.attached is self._attached and self._road.model() is not None

    def remove(self) -> None:
        """Take the hook off; from the next backward on gradients are averaged as without one.

        Does nothing where it is off already. All ranks must do so between the same two steps.
        """
        if self.is_attached:
            self._road.attached = None

    def replace(self, hook: Callable[..., Any], *, state: object = None) -> None:
        """Put another hook in this one's place, from the next backward on. Statistics begin anew.

        All ranks must do so between the same two steps.

        Raises:
            RuntimeError: the handle's hook is not attached any more.
            TypeError, ValueError: as :func:`torch_commhook.check_hook`; the old hook then stays.
        """
        if not self.is_attached:
            raise RuntimeError(
                f"HookHandle.replace: hook '{self._attached.name}' is not attached any more; "
                "use attach()"
            )
        self._attached = _checked(hook, state)
        self._road.attached = self._attached

    def stats(self) -> HookStats:
        """What the hook sent while it was attached; see :class:`HookStats`."""
        return self._attached.stats

    def __repr__(self) -> str:
        where = "attached" if self.is_attached else "removed"
        return f"HookHandle({self._attached.name}, {where})"


def _checked(hook: Callable[..., Any], state: object) -> _Attached:
    check_hook(hook)
    if isinstance(hook, Hook) and state is not None:
        raise TypeError(
            f"attach: state must be None for hook '{hook_name(hook)}', which keeps its own, "
            f"got {_C.type_name(state)}"
        )
    return _Attached(hook, state, hook_name(hook))


def attach(model: torch.nn.Module, hook: Callable[..., Any], *, state: object = None) -> HookHandle:
    """Let a model's gradients travel through a communication hook.

    Args:
        model: a ``DistributedDataParallel`` with no hook of its own.
        hook: one of :mod:`torch_commhook.hooks`, or any callable ``hook(state, bucket)`` that
            returns a ``Future[Tensor]`` or a tensor: the average of the bucket's gradients over the
            ranks, as many elements as the bucket has, of its dtype. It gets a
            :class:`torch_commhook.GradBucket`.
        state: passed to a callable of your own as its first argument.

    Returns:
        A handle that removes or replaces the hook and tells what it sent.

    An exception that the hook raises comes out of ``backward()`` with its type and traceback, and
    the next backward works. All ranks must attach the same hook between the same two steps.

    Under ``model.join()`` a rank that has run out of inputs adds zeros, and hooks of this library
    divide by all ranks, as with ``divide_by_initial_world_size=True``.

    Raises:
        TypeError: the model is no DistributedDataParallel, or :func:`torch_commhook.check_hook`
            refuses the hook.
        ValueError: an annotation of the hook says that it is none.
        RuntimeError: a hook is attached already, or was registered with DDP itself.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            "attach: model must be a torch.nn.parallel.DistributedDataParallel, "
            f"got {_C.type_name(model)}"
        )
    attached = _checked(hook, state)
    road = _roads.get(model)
    if road is None:
        road = _new_road(model)
    if road.attached is not None:
        raise RuntimeError(
            f"attach: hook '{road.attached.name}' is attached to this model already; remove() it, "
            f"or replace() it through its handle"
        )
    road.attached = attached
    return HookHandle(road, attached)


def _new_road(model: DistributedDataParallel) -> _DdpRoad:
    if getattr(model, "_use_python_reducer", False):
        raise RuntimeError(
            "attach: this DDP was made with the Python reducer, which calls hooks for single "
            "parameters; make it with torch._dynamo.config.optimize_ddp other than 'python_reducer'"
        )
    registered = getattr(model, "_comm_hooks", [])
    if registered:
        raise RuntimeError(
            "attach: this DDP has a hook already, registered with register_comm_hook: "
            f"'{hook_name(registered[0][0])}'. A reducer keeps its hook for life; wrap the module "
            "in a new DistributedDataParallel"
        )
    road = _roads[model] = _DdpRoad(model)
    return road

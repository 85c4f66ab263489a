"""Attaching a hook to a model."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from torch_commhook import _C
from torch_commhook.attachment.ddp_road import DdpRoad
from torch_commhook.attachment.parameters import check_not_in_ddp, claim, release, trainable
from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.collectives import resolve_group
from torch_commhook.collectives.agreement import agree, check_agreement
from torch_commhook.hooks import __name__ as hooks_module
from torch_commhook.hooks.base import Hook
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.memory.loss_scale import checked_scale, watch, watch_no_more
from torch_commhook.memory.states import LOCAL_STEPS, form_of
from torch_commhook.metrics import HookStats
from torch_commhook.native.runtime import hook_name
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.step_group import StepGroup, check_is_free

if TYPE_CHECKING:
    from torch_commhook.attachment.reducer_road import ReducerRoad

_MOST_MEBIBYTES = 1 << 40

#: The settings of a module; DDP has its own.
_DEFAULTS: dict[str, Any] = {
    "bucket_cap_mb": 25,
    "gradient_as_bucket_view": False,
    "broadcast_buffers": True,
    "init_sync": True,
}

#: Tensors that are made inside of ``torch.inference_mode()`` cannot be modified outside of it.
_OUTSIDE = torch.inference_mode(False)

_roads: weakref.WeakKeyDictionary[torch.nn.Module, DdpRoad | ReducerRoad] = (
    weakref.WeakKeyDictionary()
)


def _current(road: DdpRoad | ReducerRoad) -> DdpRoad | ReducerRoad:
    return road.successor if isinstance(road, DdpRoad) and road.successor is not None else road


class HookHandle:
    """A hook that is attached to a model. Made by :func:`attach`."""

    def __init__(self, road: DdpRoad | ReducerRoad, attached: Attached) -> None:
        self._first_road = road
        self._attached = attached

    @property
    def _road(self) -> DdpRoad | ReducerRoad:
        return _current(self._first_road)

    @property
    def hook(self) -> Callable[..., Any]:
        """The hook."""
        return self._attached.hook

    @property
    def is_attached(self) -> bool:
        """Whether the hook is still the one that the model uses."""
        return self._road.attached is self._attached and self._road.is_alive

    def remove(self) -> None:
        """Take the hook off.

        A DDP model's gradients are averaged as without one from the next backward on; those of a
        plain module stay each rank's own. A backward that is under way goes on through the hook.
        Does nothing where the hook is off already. All ranks must do so between the same two steps.
        A hook that keeps ranks apart leaves them where they are: :meth:`synchronize` comes first.
        """
        if not self.is_attached:
            return
        watch_no_more(self._attached)
        if self._attached.local_steps is not None:
            self._attached.local_steps.close()
        road = self._road
        road.attached = None
        road.after_backward(self._attached.let_go)
        model = road.model()
        if model is not None:
            release(model)
            if not road.is_alive and not road.is_closing:
                _roads.pop(model, None)

    @_OUTSIDE
    def replace(self, hook: Callable[..., Any], *, state: object = None) -> None:
        """Put another hook in this one's place, from the next backward on.

        Statistics begin anew, and the new hook remembers nothing: what the old one had not sent
        goes with it. The scaler stays. All ranks must do so between the same two steps.

        Raises:
            RuntimeError: the handle's hook is not attached any more.
            TypeError, ValueError: as :func:`torch_commhook.check_hook`; the old hook then stays,
                on all ranks.
            RuntimeError: the ranks' hooks differ, or one is refused on another rank.
        """
        if not self.is_attached:
            raise RuntimeError(
                f"HookHandle.replace: hook '{self._attached.name}' is not attached any more; "
                "use attach()"
            )
        replacement, error = None, None
        try:
            replacement = Attached.checked(hook, state, self._attached.memory.of_same_model())
        except Exception as refused:
            error = refused
        agree(self._road.group.parent, "HookHandle.replace", error, {"the hook": _printed(hook)})
        assert replacement is not None
        before = self._attached
        replacement.stages = before.stages
        self._attached = replacement
        try:
            self._begin("HookHandle.replace")
        except BaseException:
            if replacement.local_steps is not None:
                replacement.local_steps.close()
            self._attached = self._road.attached = before
            raise
        watch_no_more(before)
        if before.local_steps is not None:
            before.local_steps.close()

    def _begin(self, op: str) -> None:
        """Have the model use the hook: all ranks, or none.

        Raises:
            Exception: what the hook raised when it was asked what it remembers.
            RuntimeError: it raised on another rank.
        """
        error = None
        hook, group = self._attached.hook, self._road.group.parent
        try:
            if isinstance(hook, Hook):
                hook.check_ranks(group)
            self._road.attached = self._attached
            self._begin_local_steps()
        except Exception as raised:
            error = raised
        agree(group, op, error, {})
        if self._attached.minds_scale and not self._attached.follows_scale:
            watch(self._attached)

    def _begin_local_steps(self) -> None:
        model = self._road.model()
        if self._attached.keeps_ranks_apart and model is not None:
            # Imports torch's compiler, as below.
            from torch_commhook.attachment.local_steps import LocalSteps

            road = self._first_road
            self._attached.local_steps = LocalSteps(model, self._attached, lambda: _current(road))

    # ---- around the hook -------------------------------------------------------------------------

    def register_buffer_prehook(
        self, hook: Callable[[GradBucket], Tensor | None]
    ) -> RemovableHandle:
        """Call ``hook(bucket)`` first with each bucket. It may return another buffer.

        This hook and the next three stay when the communication hook is replaced. What they return
        is checked as autograd checks its hooks: ``TypeError`` for something else than asked for,
        ``RuntimeError`` for another number, dtype, layout, device or size. Under compiled autograd
        they are traced together with the communication hook.
        """
        return self._attached.stages.register("buffer_prehooks", hook)

    def register_prehook(
        self, hook: Callable[[tuple[Tensor, ...]], tuple[Tensor | None, ...] | None]
    ) -> RemovableHandle:
        """Call ``hook(gradients)`` before the communication hook.

        ``gradients`` is a tuple of views of the bucket's buffer, in its parameters' order. The hook
        may return a tuple of others, None in it for those that stay.
        """
        return self._attached.stages.register("prehooks", hook)

    def register_posthook(
        self,
        hook: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor | None, ...] | None],
    ) -> RemovableHandle:
        """Call ``hook(reduced, local)`` with each bucket's result, before it is written.

        Both are tuples of gradients: as the communication hook has made them, and as they were
        before it. The hook may return a tuple of others for ``reduced``.
        """
        return self._attached.stages.register("posthooks", hook)

    def register_post_accumulate_hook(self, hook: Callable[[GradBucket], None]) -> RemovableHandle:
        """Call ``hook(bucket)`` for each bucket when all gradients are written.

        The gradients are those of ``bucket.parameters()``. The hook must return None.
        """
        return self._attached.stages.register("post_accumulate_hooks", hook)

    # ---- around a step ---------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Let gradients add up on each rank, without communication, inside a ``with`` block.

        For gradient accumulation. As in DDP, what counts is whether the model's forward runs
        inside; where it does not run at all, whether backward does. The next backward outside
        averages what has added up.
        """
        return self._road.no_sync()

    def join(self) -> AbstractContextManager[Any]:
        """Let ranks run out of inputs at different times, inside a ``with`` block.

        A rank that leaves the block takes part in the others' steps with gradients of zeros, and
        hooks of this library go on dividing by all ranks. In the end all ranks have the parameters
        of one that was the last to leave. Same as ``DistributedDataParallel.join()``; for other
        participants see ``torch.distributed.algorithms.join``.

        Raises:
            RuntimeError: the hook keeps ranks apart, which must take equally many steps.
        """
        if self._attached.keeps_ranks_apart:
            raise RuntimeError(
                f"HookHandle.join: with hook '{self._attached.name}' all ranks must take equally "
                "many steps; give each as many batches"
            )
        return self._road.join()

    @_OUTSIDE
    def synchronize(self) -> None:
        """Bring ranks together that the hook keeps apart: all have the same parameters then.

        For the end of training, an evaluation in between, or before :meth:`remove`. Does nothing
        where they are together, as with all hooks but :class:`torch_commhook.hooks.local_sgd`. All
        ranks must call it at the same point.

        Raises:
            RuntimeError: the handle's hook is not attached any more.
            PeerError: it failed on another rank. Parameters are as before.
        """
        if not self.is_attached:
            raise RuntimeError(
                f"HookHandle.synchronize: hook '{self._attached.name}' is not attached any more"
            )
        if self._attached.local_steps is not None:
            self._attached.local_steps.synchronize()

    def stats(self) -> HookStats:
        """What the hook has sent while it was attached, up to now; see :class:`HookStats`."""
        attached = self._attached
        stats = attached.stats
        attached.traced_steps.move_to(stats)
        stats.world_size = attached.memory.world_size
        for memory in attached.memory.buckets():
            if memory.index < len(stats.buckets):
                stats.buckets[memory.index].measured(memory.meters())
        return copy.deepcopy(stats)

    # ---- what the hook remembers -----------------------------------------------------------------

    @_OUTSIDE
    def state_dict(self) -> dict[str, Any]:
        """What the hook remembers on this rank, to go on from later.

        Error memory, factors, momentum and steps, by the names of parameters, as plain values and
        tensors: it loads with ``torch.load(..., weights_only=True)`` and goes into
        ``torch.distributed.checkpoint`` as it is. Each rank has its own, under ``"rank0"``,
        ``"rank1"`` and so on. Empty for a hook that remembers nothing.

        Training that goes on from it takes the same steps, bit for bit, where the buckets are the
        same: those of a module are made so when it is loaded; DDP forms its buckets anew after its
        first step, before which they may be others. Seeds are settings of the hook.

        Of a hook that keeps ranks apart this has the rank's parameters too.
        """
        memory, local_steps = self._attached.memory, self._attached.local_steps
        if local_steps is not None:
            return local_steps.state_dict()
        return {} if memory.is_empty else memory.state_dict()

    @_OUTSIDE
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave on this rank.

        All ranks must do so at the same point. For another number of ranks see
        :func:`torch_commhook.reshard_states`. With a hook that keeps ranks apart, this writes the
        rank's parameters; it comes after the model's own ``load_state_dict()``.

        Raises:
            RuntimeError: the handle's hook is not attached any more; the ranks' states are of
                different steps or buckets, or one is refused on another rank.
            ValueError: no such state, or one of other parameters, of another number of ranks, or of
                a hook that remembers other things.

        What the hook remembers then stays, on all ranks.
        """
        if not self.is_attached:
            raise RuntimeError(
                f"HookHandle.load_state_dict: hook '{self._attached.name}' is not attached any more"
            )
        memory, local_steps = self._attached.memory, self._attached.local_steps
        settings: dict[str, object] = {}
        go_on: Callable[[], None] | None = None
        error = None
        try:
            if local_steps is not None:
                apart = local_steps.check_state(state)
                go_on = partial(local_steps.take_state, apart)
                settings = _shared_of_state(apart.rest, apart.position)
            elif not (isinstance(state, dict) and not state and memory.is_empty):
                checked = memory.check_state(state)
                go_on = partial(self._take_state, checked)
                settings = _shared_of_state(checked, None)
        except Exception as refused:
            error = refused
        agree(self._road.group.parent, "HookHandle.load_state_dict", error, settings)
        if go_on is not None:
            go_on()

    def _take_state(self, state: dict[str, Any]) -> None:
        self._attached.memory.take_state(state)
        self._road.memory_loaded(state["buckets"])

    def __repr__(self) -> str:
        where = "attached" if self.is_attached else "removed"
        return f"HookHandle({self._attached.name}, {where})"


@_OUTSIDE
def attach(
    model: torch.nn.Module,
    hook: Callable[..., Any],
    *,
    state: object = None,
    scaler: Any = None,
    process_group: Any = None,
    bucket_cap_mb: float | None = None,
    gradient_as_bucket_view: bool | None = None,
    broadcast_buffers: bool | None = None,
    init_sync: bool | None = None,
) -> HookHandle:
    """Let a model's gradients travel through a communication hook.

    Works eager, under ``torch.compile`` and under compiled autograd. All ranks must attach the same
    hook between the same two steps.

    Args:
        model: any module, whose gradients are from now on averaged over the ranks in each backward;
            or a ``DistributedDataParallel`` with no hook of its own. Either may be compiled.
        hook: one of :mod:`torch_commhook.hooks`, or any callable ``hook(state, bucket)`` that
            returns a ``Future[Tensor]`` or a tensor: the average of the bucket's gradients over the
            ranks, as many elements as the bucket has, of its dtype. It gets a
            :class:`torch_commhook.GradBucket`, and should communicate through
            ``bucket.process_group()``.
        state: passed to a callable of your own as its first argument.
        scaler: the ``torch.amp.GradScaler`` that scales the loss, or another object with its
            ``get_scale()``. The hook rescales its error memory when the scale changes, and
            ``clip`` takes the norm of unscaled gradients. All ranks must give one, with the same
            scale, or none. Asked at the beginning of each backward that synchronises, for hooks to
            which it matters; on CUDA that waits for the device.
        process_group: the ranks, for a module; None for the default group.
        bucket_cap_mb: capacity of a bucket in MiB, for a module; 25 by default.
        gradient_as_bucket_view: for a module: gradients stay in the buckets' memory, as views of
            it, which saves the memory and most of the copies. Off by default.
        broadcast_buffers: for a module: rank 0's buffers (running statistics) go to all ranks
            before each forward that trains and synchronises. On by default.
        init_sync: for a module: rank 0's parameters and buffers go to all ranks now. On by default.

    Returns:
        A handle that removes or replaces the hook and tells what it sent.

    An exception that the hook raises comes out of ``backward()`` with its type and traceback, and
    the next backward works. On Gloo the other ranks get a :class:`PeerError` in the same step; over
    other backends they wait for the group's timeout. With tensors on another device than the CPU,
    or over groups of other backends, the next backward raises a RuntimeError: collectives of the
    step that failed may still be under way there.

    Under ``model.join()`` a rank that has run out of inputs adds zeros, and hooks of this library
    divide by all ranks, as with ``divide_by_initial_world_size=True``.

    Raises:
        TypeError: no module, no scaler, or :func:`torch_commhook.check_hook` refuses the hook; a
            parameter is a DTensor, or FullyShardedDataParallel has flattened it.
        ValueError: an annotation of the hook says that it is none; a scale that is not positive and
            finite (in a later ``backward()`` too); a setting that DDP has itself;
            no parameter requires grad; a parameter is on the meta device, or has an optimizer in
            backward.
        RuntimeError: a hook is attached already, or to another model with one of the parameters, or
            was registered with DDP itself; replicate() was applied to a module; the ranks'
            parameters differ; a step over the group has failed, whose collectives may still be
            under way; torch.distributed is not initialized.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"attach: model must be a torch.nn.Module, got {_C.type_name(model)}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("attach: model must not be a ScriptModule, which takes no Python hooks")
    model = getattr(model, "_orig_mod", model)  # of one that is compiled
    scale = None if scaler is None else checked_scale(scaler)
    memory = HookMemory()
    memory.scaler = scaler
    attached = Attached.checked(hook, state, memory)
    road = _roads.get(model)
    if road is not None:
        road = _current(road)
        if road.is_closing:
            raise RuntimeError(
                "attach: a hook was removed from this model in a backward() that is still under "
                "way; attach the next one after it, or replace() the hook through its handle"
            )
        if not road.is_alive:
            road = None
    if road is not None and road.attached is not None:
        raise RuntimeError(
            f"attach: hook '{road.attached.name}' is attached to this model already; remove() it, "
            f"or replace() it through its handle"
        )
    given = {
        "bucket_cap_mb": bucket_cap_mb,
        "gradient_as_bucket_view": gradient_as_bucket_view,
        "broadcast_buffers": broadcast_buffers,
        "init_sync": init_sync,
    }
    is_ddp = isinstance(model, DistributedDataParallel)
    if is_ddp:
        for name, value in {"process_group": process_group, **given}.items():
            if value is not None:
                raise ValueError(
                    f"attach: {name} must be given to DistributedDataParallel, which has it "
                    f"already; got {value!r} for a model of that class"
                )
    settings = {name: _DEFAULTS[name] if value is None else value for name, value in given.items()}
    parameters = trainable(model)
    if not is_ddp:
        check_not_in_ddp(parameters)
        _check_capacity(settings["bucket_cap_mb"])
    claim(parameters, model, partial(_attached_to, weakref.ref(model)))
    group: Any = model.process_group if is_ddp else resolve_group(process_group)
    check_is_free(group)
    shared = _shared(model, hook, settings)
    shared["the scaler's scale"] = scale
    check_agreement(group, parameters, shared)
    prefix = "module." if is_ddp else ""  # a model's states and patterns are the same in DDP
    names = [(name.removeprefix(prefix), parameter) for name, parameter in parameters]
    memory.know(names, rank=group.rank(), world_size=group.size())
    if road is None:
        road = _roads[model] = _new_road(model, parameters, group, settings)
    handle = HookHandle(road, attached)
    try:
        handle._begin("attach")
    except BaseException:
        handle.remove()
        raise
    return handle


def _attached_to(owner: weakref.ref[torch.nn.Module]) -> str | None:
    model = owner()
    road = None if model is None else _roads.get(model)
    if road is None:
        return None
    road = _current(road)
    return road.attached.name if road.is_alive and road.attached is not None else None


def _check_capacity(mebibytes: object) -> None:
    number = isinstance(mebibytes, (int, float)) and not isinstance(mebibytes, bool)
    if not number or not 0 < mebibytes <= _MOST_MEBIBYTES:  # type: ignore[operator]
        raise ValueError(
            f"attach: bucket_cap_mb must be a positive number of MiB, got {mebibytes!r}"
        )


def _shared(
    model: torch.nn.Module, hook: Callable[..., Any], settings: dict[str, Any]
) -> dict[str, object]:
    """What all ranks must attach alike."""
    shared: dict[str, object] = {"the hook": _printed(hook)}
    if isinstance(model, DistributedDataParallel):
        shared["bucket_cap_mb"] = model.bucket_bytes_cap / (1 << 20)
        shared["the Python reducer"] = model._use_python_reducer
        return shared
    for name in ("bucket_cap_mb", "broadcast_buffers", "init_sync"):
        shared[name] = settings[name]
    return shared


def _shared_of_state(state: dict[str, Any], position: dict[str, Any] | None) -> dict[str, object]:
    """What of a checked state all ranks must load alike: plain values, since they are sent."""
    shared = {"steps": state["steps"], "choices": state["choices"], LOCAL_STEPS: position}
    return {f"the state's {key}": value for key, value in {**shared, **form_of(state)}.items()}


def _printed(hook: object) -> str:
    """What ranks compare. Hooks of the library print as they are written; of others none knows."""
    return repr(hook) if type(hook).__module__.startswith(hooks_module) else "another"


def _new_road(
    model: torch.nn.Module,
    parameters: list[tuple[str, Tensor]],
    group: Any,
    settings: dict[str, Any],
) -> DdpRoad | ReducerRoad:
    if isinstance(model, DistributedDataParallel):
        registered = getattr(model, "_comm_hooks", [])
        if registered:
            raise RuntimeError(
                "attach: this DDP has a hook already, registered with register_comm_hook: "
                f"'{hook_name(registered[0][0])}'. A reducer keeps its hook for life; wrap the "
                "module in a new DistributedDataParallel"
            )
        if not model._use_python_reducer:
            return DdpRoad(model)
    # Imports torch's compiler, which takes seconds, and which DDP alone does not need.
    from torch_commhook.attachment.reducer_road import ReducerRoad

    if isinstance(model, DistributedDataParallel):
        return ReducerRoad.of_ddp(model, parameters, StepGroup(group))
    return ReducerRoad(model, parameters, group=StepGroup(group), **settings)

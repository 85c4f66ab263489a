"""Attaches a hook to a model: checks the arguments, and chooses the reducer that runs the hook."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torch_commhook import _C
from torch_commhook.attachment.ddp_road import DdpRoad
from torch_commhook.attachment.handle import (
    HookHandle,
    begin_hook,
    outside_inference_mode,
)
from torch_commhook.attachment.parameters import (
    check_not_in_ddp,
    check_values,
    claim,
    ignored_names,
    release,
    trainable,
)
from torch_commhook.attachment.road import Road, compared_settings, road_in_use, roads
from torch_commhook.attachment.sharded.attaching import attach_sharded
from torch_commhook.attachment.sharded.fsdp import trains_shards
from torch_commhook.codecs.base import Codec
from torch_commhook.collectives.agreement import agree, can_agree, described, digest_of
from torch_commhook.collectives.gloo_groups import check_not_managed, group_rank, resolve_group
from torch_commhook.elastic.ranks import Elastic
from torch_commhook.hooks.expressions import as_hook
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.memory.watches import Scaler, checked_scale
from torch_commhook.native.runtime import hook_name
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.link import check_connections
from torch_commhook.step.step_group import StepGroup, check_is_free

_MOST_MEBIBYTES = 1 << 40

#: The settings of a module; DDP has its own.
_DEFAULTS: dict[str, Any] = {
    "bucket_cap_mb": 25,
    "gradient_as_bucket_view": False,
    "broadcast_buffers": True,
    "init_sync": True,
}


@outside_inference_mode
# Over 80 lines: the docstring describes each argument and error.
def attach(
    model: torch.nn.Module,
    hook: Callable[..., Any] | str,
    *,
    state: object = None,
    scaler: Scaler | None = None,
    process_group: dist.ProcessGroup | None = None,
    bucket_cap_mb: float | None = None,
    gradient_as_bucket_view: bool | None = None,
    broadcast_buffers: bool | None = None,
    init_sync: bool | None = None,
    connections: int | None = None,
    elastic: Elastic | None = None,
    shard_hook: Callable[..., Any] | str | None = None,
    weights: Codec | None = None,
) -> HookHandle:
    """Average a model's gradients through a communication hook.

    Works in eager code, under ``torch.compile`` and under compiled autograd. All ranks must attach
    the same hook between the same two steps.

    Args:
        model: a module, a ``DistributedDataParallel`` without a hook, or a model with modules that
            ``fully_shard()`` or ``replicate()`` was applied to. It may be compiled. The hook
            averages a plain module's gradients over the ranks in each backward. On a sharded model
            it averages across replicas if the mesh has two dimensions; else it takes part in the
            reduce-scatters: see ``docs/sharded.md``.
        hook: one of :mod:`torch_commhook.hooks`; or a callable ``hook(state, bucket)``; or a text
            for :func:`torch_commhook.parse_hook`, such as ``"error_feedback(blockwise(bits=4))"``.
            A callable gets a :class:`torch_commhook.GradBucket`, and returns a ``Future[Tensor]``
            or a tensor: the mean over the ranks of the bucket's gradients, with the bucket's number
            of elements and dtype. It should communicate through ``bucket.process_group()``.
        state: the first argument of a callable hook.
        scaler: the ``torch.amp.GradScaler`` that scales the loss, or another object with a method
            ``get_scale()``. The hook then rescales its error memory when the scale changes, and
            ``clip`` takes the norm of unscaled gradients. Either all ranks give a scaler, with the
            same scale, or none does. Hooks that need the scale read it at the beginning of each
            backward that synchronises; on CUDA the host then waits for the device.
        process_group: the ranks that average, for a module. None means the default group.
        bucket_cap_mb: the capacity of a bucket in MiB, for a module. The default is 25.
        gradient_as_bucket_view: for a module: whether gradients are views of the buckets' memory.
            Views save memory, and most copies of gradients. Parameters whose ``grad_dtype`` is
            another dtype keep gradients of their own. Off by default.
        broadcast_buffers: for a module: whether rank 0 sends its buffers (running statistics) to
            all ranks in the first forward in training after each step. On by default.
        init_sync: for a module: whether rank 0 sends its parameters and buffers to all ranks now.
            On by default. As in DDP, those of ``_ddp_params_and_buffers_to_ignore`` stay each
            rank's own, here and in each forward.
        connections: the number of connections between two ranks that carry a large message, 1 to
            16. It applies to ranks over Gloo with tensors on the CPU; elsewhere, and among
            simulated ranks, ``attach`` warns that it has no effect. Several connections fill a link
            with long delays better than one. By default ``attach`` takes one among more than 16
            ranks, else four if they are faster. To find out, ranks on several machines with a round
            trip of 5 ms or more send each other a few MiB.
        elastic: for a module on the CPU: how training continues when ranks are lost, and how it
            admits new ranks. Uses connections of the library's own: see
            :class:`torch_commhook.Elastic`.
        shard_hook: for a sharded model on a mesh of two dimensions: the hook of its
            reduce-scatters. None leaves the reduce-scatters unchanged.
        weights: for a sharded model: the codec that compresses parameters in their all-gathers, in
            forward and backward. Each rank's own shards stay exact. None gathers parameters
            uncompressed.

    Returns:
        A handle that removes or replaces the hook and reports what it sent. As a context manager
        it removes the hook at the end of the block.

    If the hook raises an exception, ``backward()`` raises it with its type and traceback, and the
    next backward works. Over Gloo the other ranks raise a :class:`PeerError` in the same step. Over
    other backends they wait until the group's timeout. With tensors on another device than the
    CPU, or over other backends, the next backward raises a RuntimeError, because collectives of the
    failed step may still be running.

    An optimizer that steps inside ``backward()``, before gradients are averaged, raises a
    RuntimeError. It may step in :meth:`HookHandle.register_post_accumulate_hook`.

    Inside ``model.join()`` a rank without inputs contributes zeros. Hooks of this library divide by
    the number of all ranks, as with ``divide_by_initial_world_size=True``.

    Raises:
        TypeError: ``model`` is not a module, ``scaler`` is not a scaler, ``connections`` is not an
            int; :func:`torch_commhook.check_hook` refuses the hook; a parameter is a DTensor that
            ``fully_shard()`` has not made, or FullyShardedDataParallel has flattened it; the hook
            of a sharded model needs whole gradients, which no rank has.
        ValueError: a text is not a hook expression; an annotation says that the hook takes no
            bucket or returns no tensor; the scale is not positive and finite (``backward()`` raises
            this too); ``connections`` is out of range; a setting belongs to DDP; no parameter
            requires grad; a parameter is on the meta device, has an optimizer in backward, or has
            ``grad_dtype = None``; the model is in DDP and a ``grad_dtype`` is not the parameter's
            dtype.
        RuntimeError: another rank raised one of these errors; a parameter or buffer cannot get
            rank 0's values, because it is expanded, not dense, or of a class that refuses
            ``copy_``; a hook is attached to the model, to another model with one of its parameters,
            or to DDP itself; replicate() was applied to a module; the ranks' parameters or settings
            differ; a step over the group has failed, and its collectives may still be running;
            torch.distributed is not initialized.

    All ranks raise if one does, before anything is written. Only errors of the process group itself
    stay one rank's. If only some ranks have sharded the model, all wait until the group's timeout.
    With ``elastic`` a rank that raises does not join the others.

    Example:
        >>> def train(rank):
        ...     torch.manual_seed(0)
        ...     model = nn.Linear(4, 1, bias=False)
        ...     handle = attach(model, hooks.cast(torch.bfloat16))
        ...     model(torch.full((1, 4), float(rank))).sum().backward()  # gradients: 0 and 1
        ...     return model.weight.grad.tolist(), handle.stats().bytes_sent
        >>> run_ranks(train, 2)
        [([[0.5, 0.5, 0.5, 0.5]], 8), ([[0.5, 0.5, 0.5, 0.5]], 8)]
    """
    given = {
        "bucket_cap_mb": bucket_cap_mb,
        "gradient_as_bucket_view": gradient_as_bucket_view,
        "broadcast_buffers": broadcast_buffers,
        "init_sync": init_sync,
    }

    def check_arguments() -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        """Check what does not depend on the kind of model; return both hooks."""
        _check_module(model)
        check_connections(connections)
        checked = as_hook(hook), None if shard_hook is None else as_hook(shard_hook)
        if is_sharded:
            _check_unoccupied(module)
            _check_none_given({"process_group": process_group, **given}, _SHARDED)
            _check_not_elastic(elastic)
        return checked

    module: torch.nn.Module = getattr(model, "_orig_mod", model)
    is_sharded = isinstance(module, torch.nn.Module) and trains_shards(module)
    if is_sharded:
        return attach_sharded(
            module,
            check_arguments,
            state=state,
            scaler=scaler,
            connections=connections,
            weights=weights,
            attached_to=partial(_attached_to, weakref.ref(module)),
        )

    def checked() -> tuple[Attached, float | None]:
        """The hook, and the scaler's scale, both checked."""
        both = check_arguments()
        for name, value in (("shard_hook", shard_hook), ("weights", weights)):
            if value is not None:
                raise ValueError(
                    f"attach: {name} is for models that fully_shard() was applied to, got one "
                    "without"
                )
        scale = None if scaler is None else checked_scale(scaler)
        memory = HookMemory()
        memory.scaler = scaler
        attached = Attached.checked(both[0], state, memory)
        attached.connections = connections
        return attached, scale

    if elastic is not None:
        attached, _ = checked()
        if process_group is not None or connections is not None:
            raise ValueError(
                "attach: with elastic, process_group and connections must be None: the ranks have "
                "connections of the library's own"
            )
        return _attach_elastic(module, attached, given, elastic)
    return _attach(module, checked, process_group, given)


def _attach(
    model: torch.nn.Module,
    checked: Callable[[], tuple[Attached, float | None]],
    process_group: dist.ProcessGroup | None,
    given: dict[str, Any],
) -> HookHandle:
    """Attach a hook; as :func:`attach`.

    Args:
        model: the module.
        checked: checks the user's other arguments; returns the hook and the scaler's scale.
        process_group: the user's argument.
        given: the user's settings, by name; None for those that the user left out.
    """
    settings = {name: _DEFAULTS[name] if value is None else value for name, value in given.items()}
    error: Exception | None = None
    shared: dict[str, object] = {}
    try:
        attached, scale = checked()
        parameters, shared = _checked_model(model, attached, process_group, given, settings)
        shared["the scaler's scale"] = scale
        shared["connections"] = attached.connections
    except Exception as refused:
        error = refused
    try:
        group = _group_of(model, process_group)
    except Exception:
        if error is None:
            raise
        raise error from None  # no other rank can hear it
    if error is not None and not can_agree(group):
        raise error
    road = _lasting_road(model)
    is_new = road is None
    step_group = StepGroup(group, greeting=digest_of(error, shared)) if road is None else road.group
    try:
        # Nothing is written before, and nothing that one rank alone refuses is checked after.
        agree(group, "attach", error, shared, step_group.all_alike)
        step_group.expect_comparison()  # begin_hook compares
        if road is None:
            road = roads[model] = _new_road(model, parameters, step_group, settings)
    except BaseException:
        if is_new:
            step_group.close()
        raise
    # States and patterns are the same with and without DDP.
    prefix = "module." if isinstance(model, DistributedDataParallel) else ""
    names = [(name.removeprefix(prefix), parameter) for name, parameter in parameters]
    attached.memory.set_parameters(names, rank=group_rank(group), world_size=group.size())
    handle = HookHandle(road, attached)
    try:
        begin_hook(road, attached, "attach")
    except BaseException:
        handle.remove()
        if is_new and road.attached is None:
            road.attached = None  # the next hook may have other settings
            release(model)
            if not road.is_alive:
                roads.pop(model, None)
        raise
    return handle


def _group_of(model: torch.nn.Module, process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The ranks that average.

    Raises:
        TypeError, ValueError, RuntimeError: no hook can use the group.
    """
    if isinstance(model, DistributedDataParallel):
        group: dist.ProcessGroup = model.process_group
    else:
        group = resolve_group(process_group)
    check_not_managed("attach", group)
    check_is_free(group)
    return group


def _checked_model(
    model: torch.nn.Module,
    attached: Attached,
    process_group: dist.ProcessGroup | None,
    given: dict[str, Any],
    settings: dict[str, Any],
) -> tuple[list[tuple[str, Tensor]], dict[str, object]]:
    """Check a model that is not sharded, and claim its parameters.

    Returns:
        The names and parameters whose gradients are averaged; settings that must be the same on
        all ranks.
    """
    _check_unoccupied(model)
    is_ddp = isinstance(model, DistributedDataParallel)
    if isinstance(model, DistributedDataParallel):
        _check_none_given({"process_group": process_group, **given}, _DDP)
        if _lasting_road(model) is None:
            _check_no_comm_hook(model)
    parameters = trainable(model)
    if not is_ddp:
        check_not_in_ddp(parameters)
        _check_capacity(settings["bucket_cap_mb"])
    claim(parameters, model, partial(_attached_to, weakref.ref(model)))
    shared: dict[str, object] = {"the parameters": described(parameters)}
    shared |= _shared(model, attached.given, settings)
    if not is_ddp and _group_of(model, process_group).size() > 1:
        shared |= check_values(
            model,
            init_sync=settings["init_sync"],
            broadcast_buffers=settings["broadcast_buffers"],
        )
    return parameters, shared


def _attach_elastic(
    model: torch.nn.Module, attached: Attached, given: dict[str, Any], elastic: Elastic
) -> HookHandle:
    """Attach a hook with ``elastic``; as :func:`attach`."""
    # Imports torch's compiler, which takes seconds, and which a hook on DDP does not need.
    from torch_commhook.attachment.elastic import ElasticTraining, check_fits
    from torch_commhook.attachment.reducer_road import ReducerRoad

    if not isinstance(elastic, Elastic):
        raise TypeError(
            f"attach: elastic must be a torch_commhook.Elastic, got {_C.type_name(elastic)}"
        )
    if isinstance(model, DistributedDataParallel):
        raise ValueError("attach: with elastic, model must be the module itself, got one in DDP")
    if given["gradient_as_bucket_view"]:
        raise ValueError(
            "attach: with elastic, gradient_as_bucket_view must be False, since a step that is "
            "repeated needs the gradients"
        )
    _check_unoccupied(model)
    settings = {name: _DEFAULTS[name] if value is None else value for name, value in given.items()}
    parameters = trainable(model)
    check_not_in_ddp(parameters)
    _check_capacity(settings["bucket_cap_mb"])
    check_fits(attached, model, parameters)
    claim(parameters, model, partial(_attached_to, weakref.ref(model)))
    attached.connections = 1
    training = None
    try:
        shared = _shared(model, attached.given, settings)
        training = ElasticTraining(
            model,
            attached,
            elastic,
            parameters,
            shared,
            broadcast_buffers=settings["broadcast_buffers"],
        )
        group = training.group
        road = roads[model] = ReducerRoad(
            model, parameters, group=group, elastic=training, **settings
        )
        attached.memory.set_parameters(parameters, rank=group.rank, world_size=group.size)
        handle = HookHandle(road, attached)
        begin_hook(road, attached, "attach")
        training.begin(road.reducer)
    except BaseException:
        if training is not None:
            training.leave()
        road_there = roads.pop(model, None)
        if road_there is not None:
            road_there.attached = None
        release(model)
        raise
    return handle


def _check_module(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"attach: model must be a torch.nn.Module, got {_C.type_name(model)}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("attach: model must not be a ScriptModule, which takes no Python hooks")


def _lasting_road(model: object) -> Road | None:
    """The road of a model on DDP's own reducer, which stays when its hook is removed, or None."""
    first = roads.get(model) if isinstance(model, torch.nn.Module) else None
    road = None if first is None else road_in_use(first)
    return road if isinstance(road, DdpRoad) and road.is_alive else None


def _check_unoccupied(model: torch.nn.Module) -> None:
    """Refuse a model that has a hook."""
    first = roads.get(model)
    if first is None:
        return
    road = road_in_use(first)
    if road.is_closing:
        raise RuntimeError(
            "attach: a hook was removed from this model in a backward() that is still "
            "running; attach the next one after it, or replace() the hook through its handle"
        )
    if road.is_alive and road.attached is not None:
        raise RuntimeError(
            f"attach: hook '{road.attached.name}' is attached to this model already; remove() it, "
            f"or replace() it through its handle"
        )


_DDP = "be given to DistributedDataParallel, which has it already", "a model of that class"
_SHARDED = "follow from how fully_shard() was applied", "a sharded model"


def _check_not_elastic(elastic: Elastic | None) -> None:
    if elastic is not None:
        raise ValueError(
            "attach: elastic is for a module on the CPU, got one that fully_shard() was applied to"
        )


def _check_no_comm_hook(model: DistributedDataParallel) -> None:
    """Refuse a DDP that has a hook of PyTorch's."""
    registered = getattr(model, "_comm_hooks", [])
    if registered:
        raise RuntimeError(
            "attach: this DDP has a hook already, registered with register_comm_hook: "
            f"'{hook_name(registered[0][0])}'. A reducer keeps its hook for life; wrap the "
            "module in a new DistributedDataParallel"
        )


def _check_none_given(given: dict[str, object], why: tuple[str, str]) -> None:
    """Refuse settings that the model already has."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"attach: {name} must {why[0]}; got {value!r} for {why[1]}")


def _attached_to(owner: weakref.ref[torch.nn.Module]) -> str | None:
    model = owner()
    first = None if model is None else roads.get(model)
    if first is None:
        return None
    road = road_in_use(first)
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
    """The settings that must be the same on all ranks."""
    shared = compared_settings(hook)
    if isinstance(model, DistributedDataParallel):
        shared["bucket_cap_mb"] = model.bucket_bytes_cap / (1 << 20)
        shared["the Python reducer"] = model._use_python_reducer
        return shared
    for name in ("bucket_cap_mb", "broadcast_buffers", "init_sync"):
        shared[name] = settings[name]
    shared["the ignored parameters and buffers"] = sorted(ignored_names(model))
    return shared


def _new_road(
    model: torch.nn.Module,
    parameters: list[tuple[str, Tensor]],
    group: StepGroup,
    settings: dict[str, Any],
) -> Road:
    if isinstance(model, DistributedDataParallel):
        if not model._use_python_reducer:
            return DdpRoad(model, group, _successor)
    # Imports torch's compiler, which takes seconds, and which a hook on DDP does not need.
    from torch_commhook.attachment.reducer_road import ReducerRoad

    if isinstance(model, DistributedDataParallel):
        return ReducerRoad.of_ddp(model, parameters, group)
    return ReducerRoad(model, parameters, group=group, **settings)


def _successor(
    model: DistributedDataParallel,
    parameters: list[tuple[str, Tensor]],
    group: StepGroup,
    used_before: list[bool],
) -> Road:
    """The road that replaces DDP's own reducer; see :meth:`DdpRoad.hand_over`."""
    # Imports torch's compiler, as above.
    from torch_commhook.attachment.reducer_road import ReducerRoad

    road = ReducerRoad.of_ddp(model, parameters, group)
    road.reducer.use.set_before(used_before)
    return road

"""Attaches a hook to a model: checks the arguments, and chooses the reducer that runs the hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torch_commhook import _C
from torch_commhook.attachment.ddp_road import DdpRoad
from torch_commhook.attachment.handle import Attaching, HookHandle, outside_inference_mode
from torch_commhook.attachment.parameters import (
    check_not_in_ddp,
    check_values,
    first_values,
    ignored_names,
    kind_of,
    trainable,
    why_not_written,
)
from torch_commhook.attachment.road import Road, compared_settings, first_road, road_in_use
from torch_commhook.attachment.sharded.attaching import AttachingToShards
from torch_commhook.attachment.sharded.fsdp import trains_shards
from torch_commhook.codecs.base import Codec
from torch_commhook.collectives.agreement import agree, can_agree, described, digest_of
from torch_commhook.collectives.gloo_groups import check_not_managed, resolve_group
from torch_commhook.elastic.ranks import Elastic
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.memory.watches import Scaler
from torch_commhook.native.runtime import hook_name
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
    wire: str = "auto",
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
            16. It applies to tensors that go over the library's transport (``wire``); elsewhere,
            and among simulated ranks, ``attach`` warns that it has no effect. Several connections
            fill a link
            with long delays better than one. By default ``attach`` takes one among more than 16
            ranks, else four if they are faster. To find out, ranks on several machines with a round
            trip of 5 ms or more send each other a few MiB.
        wire: what carries a hook's messages of tensors on a device, such as CUDA. ``"host"``: the
            library's transport, which copies encoded messages to memory of the host and back, on
            streams of its own: for ranks on several machines that a slow link connects. A failed
            step then recovers as on the CPU. ``"device"``: the group's backend, such as NCCL.
            ``"auto"``: the transport if that backend is Gloo or ``commhook``, which go through the
            host in any case; or if up to 16 ranks on several machines have a round trip of 5 ms or
            more, and a link below 5 Gbit/s, which ``attach`` measures; else the backend. Tensors on
            the CPU always use the transport.
        elastic: for a module: how training continues when ranks are lost, and how it
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
    next backward works. If the group has a CPU backend that is Gloo or none, the other ranks raise
    a :class:`PeerError` in the same step; otherwise they wait until the group's timeout. After a
    step that went over NCCL or another backend of the group (``wire``), the next backward raises a
    RuntimeError, because collectives of the failed step may still be running.

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
    module: torch.nn.Module = getattr(model, "_orig_mod", model)
    kind: type[Attaching] = _AttachingToModule
    if isinstance(module, torch.nn.Module) and trains_shards(module):
        kind = AttachingToShards
    elif elastic is not None:
        kind = _AttachingWithElastic
    return kind(
        model=module,
        hook=hook,
        state=state,
        scaler=scaler,
        connections=connections,
        wire=wire,
        elastic=elastic,
        shard_hook=shard_hook,
        weights=weights,
        process_group=process_group,
        settings={
            "bucket_cap_mb": bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "broadcast_buffers": broadcast_buffers,
            "init_sync": init_sync,
        },
    ).run()


class _AttachingToModule(Attaching):
    """Attaches a hook to a module, or to one in DDP."""

    _parameters: list[tuple[str, Tensor]]
    _step_group: StepGroup

    @property
    def _settings(self) -> dict[str, Any]:
        return {name: _DEFAULTS[name] if v is None else v for name, v in self.settings.items()}

    def check(self) -> dict[str, object]:
        common, model = self._check_hook(), self.model
        self.check_unoccupied()
        if isinstance(model, DistributedDataParallel):
            self.check_none_given(
                "be given to DistributedDataParallel, which has it already", "a model of that class"
            )
            registered = getattr(model, "_comm_hooks", [])
            if registered and _lasting_road(model) is None:
                raise RuntimeError(
                    "attach: this DDP has a hook already, registered with register_comm_hook: "
                    f"'{hook_name(registered[0][0])}'. A reducer keeps its hook for life; wrap the "
                    "module in a new DistributedDataParallel"
                )
        self._check_parameters()
        self._check_wire()
        self.check_unshared(self._parameters)
        shared = {"the parameters": described(self._parameters), **self._shared()}
        if not isinstance(model, DistributedDataParallel) and self._group().size() > 1:
            shared |= check_values(
                model,
                init_sync=self._settings["init_sync"],
                broadcast_buffers=self._settings["broadcast_buffers"],
            )
        return {**shared, **common}

    def _check_hook(self) -> dict[str, object]:
        """Check the hook, and what does not depend on the model; return :meth:`common_settings`."""
        hook, _ = self.check_arguments()
        for name, value in (("shard_hook", self.shard_hook), ("weights", self.weights)):
            if value is not None:
                raise ValueError(
                    f"attach: {name} is for models that fully_shard() was applied to, got one "
                    "without"
                )
        common = self.common_settings()
        self.attached = self.checked(hook, self.state, HookMemory())
        return common

    def _check_parameters(self) -> None:
        """Find the parameters whose gradients are averaged, and check them."""
        self._parameters = trainable(self.model)
        if not isinstance(self.model, DistributedDataParallel):
            check_not_in_ddp(self._parameters)
            mebibytes = self._settings["bucket_cap_mb"]
            is_number = isinstance(mebibytes, (int, float)) and not isinstance(mebibytes, bool)
            if not is_number or not 0 < mebibytes <= _MOST_MEBIBYTES:
                raise ValueError(
                    f"attach: bucket_cap_mb must be a positive number of MiB, got {mebibytes!r}"
                )

    def _check_wire(self) -> None:
        """Refuse another way of messages than that of a DDP's earlier hook, whose group stays."""
        lasting, wanted = _lasting_road(self.model), self.devices_over_host()
        if lasting is None or wanted is None:
            return
        for name, parameter in self._parameters:
            device = parameter.device
            is_carried = device.type == "cpu" or device.type in wanted
            if lasting.group.carries(device) != is_carried:
                raise ValueError(
                    f"attach: wire={self.wire!r} must be as for the first hook of this "
                    f"DistributedDataParallel, which has '{name}' on {device}"
                )

    def _shared(self) -> dict[str, object]:
        """The settings that must be the same on all ranks."""
        model, shared = self.model, compared_settings(self.attached.given)
        if isinstance(model, DistributedDataParallel):
            shared["bucket_cap_mb"] = model.bucket_bytes_cap / (1 << 20)
            shared["the Python reducer"] = model._use_python_reducer
            return shared
        for name in ("bucket_cap_mb", "broadcast_buffers", "init_sync"):
            shared[name] = self._settings[name]
        shared["the ignored parameters and buffers"] = sorted(ignored_names(model))
        return shared

    def _group(self) -> dist.ProcessGroup:
        """The ranks that average."""
        if isinstance(self.model, DistributedDataParallel):
            group: dist.ProcessGroup = self.model.process_group
        else:
            group = resolve_group(self.process_group)
        check_not_managed("attach", group)
        check_is_free(group)
        return group

    def agree(self, error: Exception | None, settings: dict[str, object]) -> None:
        try:
            group = self._group()
        except Exception:
            if error is None:
                raise
            raise error from None  # no other rank can hear it
        if error is not None and not can_agree(group):
            raise error
        lasting = _lasting_road(self.model)
        if lasting is None:
            greeting = digest_of(error, settings)
            step_group = StepGroup(group, greeting=greeting, devices=self.devices_over_host())
        else:
            step_group = lasting.group
        try:
            agree(group, "attach", error, settings, step_group.all_alike)
            step_group.expect_comparison()  # begin_hook compares
        except BaseException:
            if lasting is None:
                step_group.close()
            raise
        self._step_group = step_group

    def open(self) -> Road:
        road = _lasting_road(self.model) or self._new_road()
        # States and patterns are the same with and without DDP.
        prefix = "module." if isinstance(self.model, DistributedDataParallel) else ""
        names = [(name.removeprefix(prefix), each) for name, each in self._parameters]
        group = road.group
        self.attached.memory.set_parameters(names, rank=group.rank, world_size=group.size)
        return road

    def _new_road(self) -> Road:
        model, group = self.model, self._step_group
        try:
            if isinstance(model, DistributedDataParallel) and not model._use_python_reducer:
                return DdpRoad(model, group)
            # Imports torch's compiler, which takes seconds, and which a hook on DDP does not need.
            from torch_commhook.attachment.reducer_road import ReducerRoad

            if isinstance(model, DistributedDataParallel):
                return ReducerRoad.of_ddp(model, self._parameters, group)
            return ReducerRoad(model, self._parameters, group=group, **self._settings)
        except BaseException:
            group.close()
            raise


class _AttachingWithElastic(_AttachingToModule):
    """Attaches a hook to a module whose ranks come and go. A rank that raises does not join."""

    def check(self) -> dict[str, object]:
        # Imports torch's compiler, as above.
        from torch_commhook.attachment.elastic import check_elastic_hook

        self._check_hook()
        if self.process_group is not None or self.connections is not None:
            raise ValueError(
                "attach: with elastic, process_group and connections must be None: the ranks have "
                "connections of the library's own"
            )
        if not isinstance(self.elastic, Elastic):
            raise TypeError(
                "attach: elastic must be a torch_commhook.Elastic, got "
                f"{_C.type_name(self.elastic)}"
            )
        if isinstance(self.model, DistributedDataParallel):
            raise ValueError(
                "attach: with elastic, model must be the module itself, got one in DDP"
            )
        if self.settings["gradient_as_bucket_view"]:
            raise ValueError(
                "attach: with elastic, gradient_as_bucket_view must be False, since a step that is "
                "repeated needs the gradients"
            )
        self.check_unoccupied()
        self._check_parameters()
        check_elastic_hook(self.attached)
        self._check_state()
        self.check_unshared(self._parameters)
        self.attached.connections = 1
        return {}

    def _check_state(self) -> None:
        """Refuse a model whose state new ranks cannot receive."""
        ignored = ignored_names(self.model)
        if ignored:
            raise ValueError(
                "attach: with elastic, new ranks get all parameters and buffers from another rank, "
                "so the model's _ddp_params_and_buffers_to_ignore must be empty, got "
                f"{sorted(ignored)}"
            )
        for name, tensor in first_values(self.model).items():
            why = why_not_written(tensor)
            if why is not None:
                raise RuntimeError(
                    "attach: with elastic, new ranks get all parameters and buffers from another "
                    f"rank, but {kind_of(self.model, name)} '{name}' cannot be written: {why}"
                )

    def agree(self, error: Exception | None, settings: dict[str, object]) -> None:
        if error is not None:  # the other ranks may be in their steps
            raise error

    def _new_road(self) -> Road:
        from torch_commhook.attachment.elastic import ElasticTraining
        from torch_commhook.attachment.reducer_road import ReducerRoad

        assert self.elastic is not None
        training = ElasticTraining(
            self.model,
            self.attached,
            self.elastic,
            self._parameters,
            self._shared(),
            broadcast_buffers=self._settings["broadcast_buffers"],
        )
        try:
            return ReducerRoad(
                self.model,
                self._parameters,
                group=training.group,
                elastic=training,
                **self._settings,
            )
        except BaseException:
            training.leave()
            raise

    def begin(self, road: Road) -> None:
        super().begin(road)
        assert road.elastic is not None
        road.elastic.begin()


def _lasting_road(model: object) -> Road | None:
    """The road of a model on DDP's own reducer, which stays when its hook is removed, or None."""
    first = first_road(model) if isinstance(model, torch.nn.Module) else None
    road = None if first is None else road_in_use(first)
    return road if isinstance(road, DdpRoad) and road.is_alive else None

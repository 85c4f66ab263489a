"""Attaching a hook to a model whose parameters ``fully_shard`` has sharded."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torch_commhook import _C
from torch_commhook.attachment.handle import Attaching
from torch_commhook.attachment.parameters import class_name
from torch_commhook.attachment.road import Road, compared_settings, printed_hook
from torch_commhook.attachment.sharded import fsdp
from torch_commhook.attachment.sharded.fsdp import check_fits
from torch_commhook.attachment.sharded.road import ShardedRoad
from torch_commhook.attachment.sharded.unit import ReduceScatter, Unit
from torch_commhook.codecs.base import Codec
from torch_commhook.collectives.agreement import agree_across
from torch_commhook.collectives.gloo_groups import group_rank
from torch_commhook.memory.sharded_memory import ReplicaMemory, WholeGradientMemory
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.bucket_hooks import BucketHooks
from torch_commhook.wording import warn_user

# ---- the hooks that may run around a communication hook on a sharded model -----------------------


class ShardedHooks(BucketHooks):
    """Refuses hooks that need gradients which no rank has.

    Args:
        on_shards: whether the communication hook takes part in reduce-scatters.
    """

    def __init__(self, *, on_shards: bool) -> None:
        super().__init__()
        self._on_shards = on_shards

    def register(self, kind: str, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook; as :meth:`BucketHooks.register`."""
        if kind == "post_accumulate_hooks":
            raise RuntimeError(
                "HookHandle.register_post_accumulate_hook: fully_shard() writes the gradients of "
                "sharded parameters, and calls their own hooks then; use "
                "Tensor.register_post_accumulate_grad_hook"
            )
        if self._on_shards:
            name = f"register_{kind.removesuffix('s')}"
            if kind == "posthooks":
                raise RuntimeError(
                    f"HookHandle.{name}: a reduce-scatter leaves no whole gradient; use "
                    "Tensor.register_post_accumulate_grad_hook of the model's parameters, which "
                    "gets their shards with the mean gradient"
                )
            raise RuntimeError(
                f"HookHandle.{name}: in a reduce-scatter no gradient has its parameter's shape; "
                "attach a torch_commhook.hooks.Hook of your own with average_shard()"
            )
        return super().register(kind, hook)


# ---- attaching a hook to a model whose parameters fully_shard has sharded ------------------------


class AttachingToShards(Attaching):
    """Attaches a hook to a model with ``fully_shard`` modules."""

    _units: list[Unit]
    _shard_attached: Attached | None = None

    def check(self) -> dict[str, object]:
        model = self.model
        hook, shard_hook = self.check_arguments()
        self.check_unoccupied()
        self.check_none_given("follow from how fully_shard() was applied", "a sharded model")
        if self.elastic is not None:
            raise ValueError(
                "attach: elastic is for a module, got one that fully_shard() was applied to"
            )
        fsdp.reshard(model)
        units = self._units = _units(model)
        _check_units(model, units)
        first = units[0].group
        has_replicas = fsdp.replica_group(first) is not None
        _check_weights(units, self.weights)
        self.attached = self._checked_on(not has_replicas, hook, self.state)
        if shard_hook is not None:
            if not has_replicas:
                raise ValueError(
                    "attach: shard_hook is for models on a mesh of two dimensions, whose replicas "
                    "the hook averages across; on one dimension the hook itself averages the shards"
                )
            if fsdp.shard_group(first) is None:
                raise ValueError(
                    "attach: shard_hook is for sharded models, and replicate() leaves parameters "
                    "whole"
                )
            self._shard_attached = self._checked_on(True, shard_hook, None, is_shard_hook=True)
        shared = {**self._shared(), **self.common_settings()}
        self.check_unshared(_parameters(model, units))
        return shared

    def _checked_on(
        self,
        on_shards: bool,
        hook: Callable[..., Any],
        state: object,
        *,
        is_shard_hook: bool = False,
    ) -> Attached:
        """A hook, checked."""
        attached = self.checked(
            hook, state, WholeGradientMemory() if on_shards else ReplicaMemory()
        )
        attached.stats.of_shards = on_shards
        attached.bucket_hooks = ShardedHooks(on_shards=on_shards)
        check_fits(attached, is_shard_hook=is_shard_hook)
        return attached

    def _shared(self) -> dict[str, object]:
        """The settings that must be the same on all ranks."""
        forms = [form for unit in self._units for form in unit.parameters.values()]
        group = self._units[0].group
        shards, replicas = fsdp.shard_group(group), fsdp.replica_group(group)
        after_forward = [fsdp.forward_group(unit.group) for unit in self._units]
        return {
            **compared_settings(self.attached.given),
            "shard_hook": None
            if self._shard_attached is None
            else printed_hook(self._shard_attached.given),
            "weights": None if self.weights is None else repr(self.weights),
            "the number of parameter groups": len(self._units),
            "the mesh": (
                None if shards is None else shards.size(),
                None if replicas is None else replicas.size(),
            ),
            "reshard_after_forward": [
                None if each is None else each.size() for each in after_forward
            ],
            "the parameters": [f"{form.name} {tuple(form.shape)} {form.dtype}" for form in forms],
        }

    def agree(self, error: Exception | None, settings: dict[str, object]) -> None:
        agree_across(_axes(self.model), "attach", error, settings)

    def open(self) -> Road:
        self._name_parameters()
        return ShardedRoad(self.model, self._units, self.weights, self.devices_over_host())

    def _name_parameters(self) -> None:
        part = fsdp.part_of(unit.group for unit in self._units)
        group = self._units[0].group
        shards, replicas = fsdp.shard_group(group), fsdp.replica_group(group)
        forms = [form for unit in self._units for form in unit.parameters.values()]
        for each in (self.attached, self._shard_attached):
            if each is None:
                continue
            assert isinstance(each.memory, (WholeGradientMemory, ReplicaMemory))
            each.memory.part = part
            if isinstance(each.memory, WholeGradientMemory):
                assert shards is not None
                each.memory.set_sharded(forms, rank=group_rank(shards))
        if replicas is not None:
            memory = self.attached.memory
            assert isinstance(memory, ReplicaMemory)
            memory.shard = (0, 1) if shards is None else (group_rank(shards), shards.size())
            memory.parameters = forms
            if self._shard_attached is not None:
                assert isinstance(self._shard_attached.memory, WholeGradientMemory)
                self._shard_attached.memory.replica = group_rank(replicas), replicas.size()
                memory.of_shard_hook = self._shard_attached.memory
            named = [each for unit in self._units for each in unit.named_shards()]
            memory.set_parameters(named, rank=group_rank(replicas), world_size=replicas.size())

    def begin(self, road: Road) -> None:
        super().begin(road)
        if self._shard_attached is not None:
            assert isinstance(road, ShardedRoad)
            road.use_shard_hook(self._shard_attached)


def _units(model: nn.Module) -> list[Unit]:
    """A model's groups of parameters; those that are trained come first.

    Raises:
        ValueError: a group has parameters outside the model.
    """
    groups = _groups(model)
    last = sum(map(bool, map(fsdp.trainable, groups))) - 1
    return [
        Unit(weakref.ref(group), max(last - i, -1), fsdp.sharded_parameters(model, group))
        for i, group in enumerate(groups)
    ]


def _groups(model: nn.Module) -> list[fsdp.ParamGroup]:
    return sorted(fsdp.param_groups(model), key=lambda each: not fsdp.trainable(each))


def _axes(model: nn.Module) -> list[dist.ProcessGroup]:
    """Process groups that together reach all ranks of the mesh, even if modules differ."""
    return list(dict.fromkeys(each for one in _groups(model) for each in fsdp.mesh_groups(one)))


def _check_units(model: nn.Module, units: list[Unit]) -> None:
    """Refuse a model that cannot have a hook."""
    groups = [unit.group for unit in units]
    for unit, group in zip(units, groups, strict=True):
        for parameter, form in zip(fsdp.trainable(group), unit.parameters.values(), strict=True):
            if parameter.is_meta:
                raise ValueError(
                    f"attach: parameter '{form.name}' is on the meta device; materialise the model "
                    "(model.to_empty(device=...), then load or initialise it) before attaching"
                )
        now = fsdp.communication(group)
        # The library's own belongs to a hook on a part of the model, or around it.
        if not isinstance(now.reduce_scatter, ReduceScatter) and not fsdp.is_default(now):
            raise RuntimeError(
                "attach: a module's communication was replaced by set_custom_reduce_scatter(), "
                "set_custom_all_gather() or another setter of FSDPModule, but the hook must "
                "replace it"
            )
        for of_group in (fsdp.shard_group, fsdp.scatter_group, fsdp.replica_group):
            if unit.parameters and of_group(group) is not of_group(groups[0]):
                raise ValueError(_of_meshes(model, units[0], unit))


def _of_meshes(model: nn.Module, first: Unit, other: Unit) -> str:
    """The error for modules that are sharded over several meshes."""
    axes = [
        [get(unit.group) for get in (fsdp.shard_group, fsdp.replica_group)]
        for unit in (first, other)
    ]
    ranks = [[each and dist.get_process_group_ranks(each) for each in of_one] for of_one in axes]
    if ranks[0] == ranks[1]:
        return (
            f"attach: the modules of {class_name(model)} are sharded over several meshes of the "
            "same ranks; make the mesh once, and give it to each fully_shard()"
        )
    names = [next(iter(unit.parameters.values())).name for unit in (first, other)]
    return (
        f"attach: the modules of {class_name(model)} are sharded over different meshes, as "
        f"parameters '{names[0]}' and '{names[1]}' are; attach a hook to each part that is sharded "
        "over one mesh. A module beside those of another mesh needs a fully_shard() of its own: "
        "for module in (attention, router, experts): attach(module, hook)"
    )


def _parameters(model: nn.Module, units: list[Unit]) -> list[tuple[str, Tensor]]:
    sharded = {id(parameter) for unit in units for parameter in fsdp.trainable(unit.group)}
    found: list[tuple[str, Tensor]] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in sharded:
            found.append((name, parameter))
        else:
            warn_user(
                f"attach: parameter '{name}' is in no module that fully_shard() was applied to, or "
                "in its ignored_params; neither fully_shard() nor the hook averages its gradient"
            )
    return found


def check_weights_codec(weights: object) -> None:
    """Refuse a codec that cannot compress parameters."""
    if not isinstance(weights, Codec):
        raise TypeError(
            f"attach: weights must be one of torch_commhook.codecs, got {_C.type_name(weights)}"
        )
    if weights.exchange != "all_to_all" or weights.is_random:
        raise ValueError(
            f"attach: weights must be a codec that sends all values, and the same ones each time, "
            f"got {weights}"
        )


def _check_weights(units: list[Unit], weights: object) -> None:
    if weights is None:
        return
    check_weights_codec(weights)
    if fsdp.shard_group(units[0].group) is None:
        raise ValueError("attach: weights is for sharded models, not for replicate()")
    for unit in units:
        dtypes = fsdp.gathered_dtypes(unit.group)
        if len(dtypes) > 1:
            names = ", ".join(sorted(map(str, dtypes)))
            raise ValueError(
                "attach: weights need modules that gather all their parameters in one dtype, "
                f"got {names}"
            )

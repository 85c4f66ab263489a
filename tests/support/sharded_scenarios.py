"""The features of ``fully_shard``, each as a scenario that runs with and without a hook."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from operator import methodcaller
from typing import Any

import torch
from rank_pool import KEPT_GROUPS
from sharded_models import (
    Layers,
    Mesh,
    Scenario,
    Training,
    are_threads,
    at_once,
    by_layer,
    differences,
    layers,
    loss_of,
    sharded_modules,
    take_steps,
    whole,
)
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from torch_commhook import hooks

SHARDED = ("fsdp-3", "hsdp-4")


# ---- gradient accumulation -----------------------------------------------------------------------


def _micro_batches(
    at: Training, count: int = 3, settings: Sequence[str] = ("requires_gradient_sync",)
) -> None:
    """The settings of sharded modules are true for the last of so many."""
    for number in range(count):
        for module, name in product(sharded_modules(at.model), settings):
            getattr(module, f"set_{name}")(number == count - 1)
        at.backward(number)


def _micro_batches_in_no_sync(at: Training) -> None:
    if at.handle is None:
        _micro_batches(at)
        return
    with at.handle.no_sync():
        at.backward(0)
        at.backward(1)
    at.backward(2)


def _two_backwards(at: Training) -> None:
    """Both backwards average."""
    at.backward(0)
    at.backward(1)


# ---- forwards and backwards ----------------------------------------------------------------------


def _two_forwards(at: Training) -> None:
    (loss_of(at.model(at.batch(0))) + loss_of(at.model(at.batch(1)))).backward()


def _backward_twice(at: Training) -> None:
    loss = loss_of(at.model(at.batch()))
    loss.backward(retain_graph=True)
    loss.backward()


def _evaluate_between(at: Training) -> None:
    at.model.eval()
    with torch.no_grad():
        at.model(at.batch(1))
    at.model.train()
    at.backward()
    with torch.no_grad():
        at.model(at.batch(2))


def _input_needs_gradient(at: Training) -> None:
    loss_of(at.model(at.batch().requires_grad_())).backward()


def _clip(at: Training, norms: tuple[float, ...] = (2.0,)) -> list[Tensor]:
    at.backward()
    parameters = list(at.model.parameters())
    totals = [torch.nn.utils.clip_grad_norm_(parameters, 0.25, norm) for norm in norms]
    assert all(isinstance(total, DTensor) for total in totals)
    return [whole(total) for total in totals]


def _prefetch(model: Any, ahead: int = 1) -> None:
    parts = [layer for layer in model if isinstance(layer, nn.Linear)]
    for number, part in enumerate(parts):
        part.set_modules_to_forward_prefetch(parts[number + 1 : number + 1 + ahead])
        part.set_modules_to_backward_prefetch(parts[max(number - ahead, 0) : number][::-1])


_unshard_async = methodcaller("_set_unshard_async_op", True)


def _unshard_ahead(at: Training) -> None:
    if hasattr(at.model, "unshard"):
        at.model[0].unshard(async_op=True)
        at.model.unshard()
    at.backward()


# ---- parameters ----------------------------------------------------------------------------------


def _tied() -> nn.Module:
    """The first and the last layer share a weight."""
    model = Layers(5, 7, 5, 7)
    model[4].weight = model[0].weight
    return model


def in_groups(*groups: str, **settings: Any) -> Callable[[nn.Module, Mesh], None]:
    """Shards the parts of each group, given by their names, together, and then the model."""

    def shard(model: nn.Module, mesh: Mesh, **more: Any) -> None:
        for group in groups:
            parts = [model.get_submodule(name) for name in group.split()]
            mesh.apply(parts if len(parts) > 1 else parts[0], **settings, **more)
        mesh.apply(model, **settings, **more)

    return shard


def _frozen() -> nn.Module:
    model = layers()
    model[0].weight.requires_grad_(False)  # a part of a group
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)  # a group
    return model


class _Branches(nn.Module):
    """Two of three branches take part: in turns, or chosen by the rank."""

    def __init__(self, by_rank: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.by_rank = by_rank
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        which = int(inputs[0, 0] > 0) if self.by_rank else self.calls % 3
        self.calls += 1
        hidden = torch.tanh(self.first(inputs))
        return sum(b(hidden) for i, b in enumerate(self.branches) if i != which)


def shard_each(model: Any, mesh: Mesh, of: str, **settings: Any) -> None:
    """Shards the modules of one of a model's lists, and the model."""
    for part in getattr(model, of):
        mesh.apply(part, **settings)
    mesh.apply(model, **settings)


def _partly_frozen() -> nn.Module:
    model = layers()
    model[2].requires_grad_(False)
    return model


def _ignoring(model: nn.Module, mesh: Mesh) -> None:
    ignored = set(model[2].parameters())
    mesh.apply(model[0])
    mesh.apply(model, ignored_params=ignored)


def _columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() == 2 else None


def _largest(parameter: nn.Parameter) -> Shard:
    """Shards one of two matrices by rows, the other one by columns."""
    return Shard(parameter.shape.index(max(parameter.shape)))


def _even() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), Layers(6, 12, 6), nn.Linear(6, 1))


def _placed(model: nn.Module, mesh: Mesh, by: Callable[[nn.Parameter], Shard | None]) -> None:
    mesh.apply(model[1], shard_placement_fn=by)
    mesh.apply(model)


def _on_meta(model: nn.Module, mesh: Mesh) -> None:
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model.to("meta")
    by_layer(model, mesh)
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        whole = torch.distributed.tensor.distribute_tensor(
            values[name], parameter.device_mesh, parameter.placements
        )
        with torch.no_grad():
            parameter.copy_(whole)


# ---- other layers --------------------------------------------------------------------------------


class _Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        return checkpoint(self.inner, inputs, use_reentrant=self.reentrant)


def _checkpointed(reentrant: bool) -> nn.Module:
    parts = [_Checkpointed(nn.Sequential(nn.Linear(5, 5), nn.Tanh()), reentrant) for _ in range(3)]
    return nn.Sequential(*parts, nn.Linear(5, 1))


def _shard_inside_checkpoints(model: nn.Module, mesh: Mesh) -> None:
    for part in model:
        mesh.apply(part.inner if isinstance(part, _Checkpointed) else part)
    mesh.apply(model)


def _blocks() -> nn.Module:
    return nn.Sequential(*(Layers(5, 7, 5) for _ in range(2)), nn.Linear(5, 1))


def _compile_blocks(model: Any) -> None:
    for block in model[:2]:
        block.compile(backend="aot_eager")


def _each_its_own_root(model: nn.Module, mesh: Mesh) -> None:
    for layer in model:
        if any(True for _ in layer.parameters()):
            mesh.apply(layer)


# ---- settings ------------------------------------------------------------------------------------


def policy(
    param: torch.dtype | None, reduce: torch.dtype | None, output: torch.dtype | None = None
) -> Callable[[nn.Module, Mesh], None]:
    settings = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=output)
    return partial(by_layer, mp_policy=settings)


def _divide(factor: float, only_sums: bool) -> Callable[[Any], None]:
    def prepare(model: Any) -> None:
        for module in sharded_modules(model):
            module.set_gradient_divide_factor(factor)
        if only_sums:
            _only_sums(model)

    return prepare


def _only_sums(model: Any) -> None:
    for module in sharded_modules(model):
        module.set_force_sum_reduction_for_comms(True)


def _separate_group(model: Any) -> None:
    groups = [
        g for each in sharded_modules(model) for g in each._get_fsdp_state()._fsdp_param_groups
    ]
    name = groups[0].mesh_info.shard_process_group.group_name
    if are_threads():
        model.set_separate_reduce_scatter_group(True)
        return
    if name not in _separate_groups:  # PyTorch gives the next one the same name
        model.set_separate_reduce_scatter_group(True)
        _separate_groups[name] = groups[0].mesh_info.reduce_scatter_process_group
        KEPT_GROUPS.add(_separate_groups[name].group_name)
    for group in groups:
        group.mesh_info.reduce_scatter_process_group = _separate_groups[name]


_separate_groups: dict[str, Any] = {}


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

TWICE = {"fsdp": 2, "hsdp": 2, "replicate": 2}

SCENARIOS: dict[str, Scenario] = {
    "layers": Scenario(
        meshes=(
            *("fsdp-2", "fsdp-3", "fsdp-4", "hsdp-2", "hsdp-4", "replicate-2", "replicate-3"),
            *("gloo-fsdp-3", "gloo-hsdp-4", "gloo-replicate-2"),
        )
    ),
    "one group": Scenario(shard=at_once),
    "each layer its own root": Scenario(shard=_each_its_own_root),
    "two modules in one group": Scenario(shard=in_groups("0 4")),
    "input needs gradient": Scenario(step=_input_needs_gradient),
    "bf16, reduced in f32": Scenario(shard=policy(BF16, F32), rounding=0.05),
    "bf16, reduced in bf16": Scenario(shard=policy(BF16, BF16), rounding=0.05),
    "bf16, reduced as they are": Scenario(shard=policy(BF16, None), rounding=0.08),
    "f32, reduced in bf16": Scenario(shard=policy(None, BF16), rounding=0.03),
    "f32, reduced in f16": Scenario(shard=policy(None, F16), rounding=0.01),
    "bf16, output in f32": Scenario(shard=policy(BF16, F32, F32), rounding=0.05),
    "bf16, output in f16": Scenario(shard=policy(BF16, BF16, F16), rounding=0.05),
    "a model in bf16": Scenario(net=lambda: layers().bfloat16(), rounding=0.1),
    "gradients add up": Scenario(step=_micro_batches),
    "gradients add up in no_sync": Scenario(step=_micro_batches_in_no_sync),
    "gradients in bf16 add up": Scenario(
        shard=policy(BF16, None), step=_micro_batches, averages=False
    ),
    "gradients in bf16 add up in f32": Scenario(
        shard=policy(BF16, F32), step=_micro_batches, rounding=0.05
    ),
    "gradients add up in shards": Scenario(
        step=partial(_micro_batches, settings=("requires_all_reduce",)),
        encodings=3,
        backwards={"fsdp": 3},
    ),
    "not the last backward": Scenario(
        step=partial(
            _micro_batches, count=2, settings=("is_last_backward", "requires_gradient_sync")
        )
    ),
    "two backwards": Scenario(step=_two_backwards, encodings=2, backwards=TWICE),
    "parameters stay after backward": Scenario(
        prepare=methodcaller("set_reshard_after_backward", False), step=_micro_batches
    ),
    "two forwards": Scenario(step=_two_forwards, encodings=2),
    "a graph twice": Scenario(step=_backward_twice, encodings=2, backwards=TWICE),
    "evaluation between steps": Scenario(step=_evaluate_between),
    "clip_grad_norm_": Scenario(step=_clip, averages=False),
    # No shard is empty, since an empty one has no largest element.
    "clip_grad_norm_ of three norms": Scenario(
        net=partial(Layers, 5, 7, 9),
        step=partial(_clip, norms=(math.inf, 2.0, 1.0)),
        averages=False,
        meshes=SHARDED,
    ),
    "prefetching": Scenario(prepare=_prefetch),
    "asynchronous unshard": Scenario(prepare=_unshard_async),
    "prefetching two ahead asynchronously": Scenario(
        prepare=lambda model: (_prefetch(model, 2), _unshard_async(model)), meshes=SHARDED
    ),
    "unshard ahead": Scenario(step=_unshard_ahead),
    "whole after forward": Scenario(
        shard=partial(by_layer, reshard_after_forward=False), meshes=SHARDED
    ),
    "sharded after forward": Scenario(
        shard=partial(by_layer, reshard_after_forward=True), meshes=SHARDED
    ),
    "sharded among two after forward": Scenario(
        shard=partial(by_layer, reshard_after_forward=2), meshes=("fsdp-4",)
    ),
    "offloaded": Scenario(
        shard=partial(by_layer, offload_policy=CPUOffloadPolicy(pin_memory=False))
    ),
    "divided by 3": Scenario(prepare=_divide(3.0, False), factor=3.0, plain_works=False),
    "divided by 1": Scenario(prepare=_divide(1.0, False), factor=1.0, plain_works=False),
    "divided by 2": Scenario(prepare=_divide(2.0, False), factor=2.0, meshes=("fsdp-2", "hsdp-4")),
    # PyTorch's replicate() divides twice in this case.
    "sums divided by 3": Scenario(prepare=_divide(3.0, True), factor=3.0, meshes=SHARDED),
    "only sums": Scenario(prepare=_only_sums),
    "divided by 3 in f16": Scenario(
        shard=policy(None, F16),
        prepare=_divide(3.0, False),
        factor=3.0,
        rounding=0.01,
        meshes=SHARDED,
    ),
    "a group for reduce-scatters": Scenario(
        prepare=_separate_group, meshes=SHARDED, needs="set_separate_reduce_scatter_group"
    ),
    "an all-reduce hook of the user's": Scenario(
        shard=at_once,
        prepare=methodcaller("set_all_reduce_hook", lambda gradient: gradient.mul_(2)),
        factor=1.0,
        meshes=("fsdp-2",),
    ),
    "more buffers": Scenario(
        prepare=methodcaller("set_reduce_scatter_max_input_buffers", 3),
        needs="set_reduce_scatter_max_input_buffers",
    ),
    "columns": Scenario(net=_even, shard=partial(_placed, by=_columns), meshes=SHARDED),
    "the largest dimension": Scenario(
        net=_even, shard=partial(_placed, by=_largest), meshes=("fsdp-4", "hsdp-4")
    ),
    "tied": Scenario(net=_tied, shard=in_groups("2", "0 4")),
    "tied in one group": Scenario(net=_tied, shard=at_once),
    "frozen": Scenario(net=_frozen),
    "unused by turns": Scenario(
        net=partial(_Branches, False), shard=partial(shard_each, of="branches")
    ),
    "unused by turns in one group": Scenario(net=partial(_Branches, False), shard=at_once),
    "unused on some ranks": Scenario(
        net=partial(_Branches, True),
        shard=at_once,
        prepare=methodcaller("set_reduce_scatter_unused_params", True),
        needs="set_reduce_scatter_unused_params",
    ),
    "ignored": Scenario(net=_partly_frozen, shard=_ignoring),
    "from the meta device": Scenario(shard=_on_meta, meshes=SHARDED),
    "checkpoints": Scenario(net=partial(_checkpointed, False), shard=_shard_inside_checkpoints),
    "checkpoints inside": Scenario(net=partial(_checkpointed, False)),
    "reentrant checkpoints": Scenario(
        net=partial(_checkpointed, True),
        shard=_shard_inside_checkpoints,
        step=_input_needs_gradient,
    ),
    "reentrant checkpoints inside": Scenario(
        net=partial(_checkpointed, True), step=_input_needs_gradient
    ),
    "compiled blocks": Scenario(
        net=_blocks,
        prepare=_compile_blocks,
        meshes=("gloo-fsdp-3", "gloo-hsdp-4", "gloo-replicate-2"),
    ),
}


def places_of(scenarios: dict[str, Scenario]) -> list[tuple[str, str]]:
    """Each scenario that this torch supports, on each of its meshes."""
    return [
        (name, place)
        for name, each in scenarios.items()
        if hasattr(FSDPModule, each.needs)
        for place in each.meshes
    ]


PLACES = places_of(SCENARIOS)


def unlike_plain(scenario: Scenario, place: str, rank: int) -> list[str]:
    """The differences between a training with ``allreduce()`` and with ``fully_shard`` alone."""
    adam, mesh, count = partial(torch.optim.Adam, lr=1e-2), Mesh.of(place), scenario.count
    got = take_steps(scenario, mesh, rank, hooks.allreduce(), optimizer=adam, count=count)
    plain = take_steps(scenario, Mesh.of(place), rank, None, optimizer=adam, count=count)
    found = differences(got, plain)
    if scenario.backwards is None:
        takes_part = got.stats.steps or place == "fsdp-1"  # one rank has nothing to reduce
        return found if takes_part else [*found, "the hook took no part"]
    steps = count * scenario.backwards.get(mesh.kind, 1)
    return found if got.stats.steps == steps else [*found, f"{got.stats.steps} steps"]

"""Models sharded by ``fully_shard``, their steps with and without a hook, and a reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from rank_pool import KEPT_GROUPS
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from torch_commhook import HookHandle, attach


@dataclass
class Mesh:
    """The sharding of a model.

    Attributes:
        kind: ``fsdp``, ``hsdp`` or ``replicate``.
        mesh: the ranks.
    """

    kind: str
    mesh: DeviceMesh

    @classmethod
    def of(cls, place: str) -> Mesh:
        """Over all ranks; the name ends with their number: ``hsdp-4``, the replicas' axis first."""
        kind, _, ranks = place.rpartition("-")
        if kind == "hsdp":
            return cls(kind, device_mesh((2, int(ranks) // 2), ("replicas", "shards")))
        return cls(kind, device_mesh((int(ranks),), ("ranks",)))

    def apply(self, module: Any, **settings: Any) -> None:
        """Applies ``fully_shard`` or ``replicate`` to a module, or to several together."""
        if self.kind != "replicate":
            fully_shard(module, mesh=self.mesh, **settings)
            return
        for name in ("reshard_after_forward", "shard_placement_fn"):
            settings.pop(name, None)
        replicate(module, mesh=self.mesh, **settings)


@cache
def device_mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    KEPT_GROUPS.update(group.group_name for group in mesh.get_all_groups())
    return mesh


def two_axes(names: tuple[str, str]) -> DeviceMesh:
    """Four ranks, two by two."""
    return device_mesh((2, 2), names)


class Layers(nn.Sequential):
    """Linear layers of uneven sizes; the last bias has one element."""

    def __init__(self, *sizes: int) -> None:
        sizes = sizes or (5, 7, 9, 1)
        layers: list[nn.Module] = []
        for number in range(len(sizes) - 1):
            layers += [nn.Linear(sizes[number], sizes[number + 1]), nn.Tanh()]
        super().__init__(*layers[:-1])


def layers() -> nn.Module:
    """The usual model."""
    torch.manual_seed(0)
    return Layers()


def gradients_of_step(model: Any, rank: int, number: int = 0) -> list[Tensor]:
    """This rank's parts of the gradients after a step on its batch with this number."""
    model.zero_grad()
    loss_of(model(batch(rank, number))).backward()
    reshard(model)
    return [local(p.grad) for p in model.parameters() if p.grad is not None]


def same_bits(got: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether there are gradients, and all are equal."""
    return len(got) == len(expected) > 0 and all(
        one.equal(other) for one, other in zip(got, expected, strict=True)
    )


def by_layer(model: nn.Module, mesh: Mesh, **settings: Any) -> None:
    """Shards each layer that has parameters, and the model."""
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            mesh.apply(layer, **settings)
    mesh.apply(model, **settings)


def at_once(model: nn.Module, mesh: Mesh, **settings: Any) -> None:
    """Shards the model alone, as one group of parameters."""
    mesh.apply(model, **settings)


def batch(rank: int, number: int) -> Tensor:
    """A rank's inputs."""
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * number + rank))


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().sum()


Batches = Callable[[int], Tensor]


def plain_step(model: Any, batches: Batches, handle: HookHandle | None) -> None:
    """One backward on one batch."""
    loss_of(model(batches(0))).backward()


def nothing(model: Any) -> None:
    """Leaves a model unchanged."""


@dataclass(frozen=True)
class Scenario:
    """A model, its sharding, and its step.

    Attributes:
        net: makes the model.
        shard: shards it.
        prepare: called with the sharded model, before a hook is attached.
        step: a step of the sharded model.
        whole_step: the same step of an unsharded model, in float64 on one rank's batches.
        meshes: its kinds of mesh, each with a number of ranks.
        rounding: the greatest distance of gradients from the reference without a codec, relative to
            the largest gradient.
        encodings: the number of encodings of a gradient in a step.
        backwards: the number of backwards in a step with the hook; on each kind of mesh that
            differs.
        factor: the divisor of the sum over ranks; None for the number of ranks.
        plain_works: whether ``fully_shard`` supports it over Gloo without a hook.
        averages: whether gradients are the mean of the ranks' own gradients.
    """

    net: Callable[[], nn.Module] = layers
    shard: Callable[[nn.Module, Mesh], None] = by_layer
    prepare: Callable[[Any], None] = nothing
    step: Callable[[Any, Batches, HookHandle | None], None] = plain_step
    whole_step: Callable[[Any, Batches, HookHandle | None], None] = plain_step
    meshes: tuple[str, ...] = ("fsdp-3", "hsdp-4", "replicate-2")
    rounding: float = 1e-5
    encodings: int = 1
    backwards: dict[str, int] = field(default_factory=dict)
    factor: float | None = None
    plain_works: bool = True
    averages: bool = True


@dataclass
class Steps:
    """The results of steps.

    Attributes:
        gradients: after each step, this rank's shard of each parameter's gradient.
        whole: the same for whole parameters; empty unless requested.
        parameters: this rank's shards at the end.
        stats: the hook's.
    """

    gradients: list[list[Tensor | None]] = field(default_factory=list)
    whole: list[list[Tensor | None]] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    stats: Any = None
    state: Any = None


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole(tensor: Tensor) -> Tensor:
    """All ranks' parts of a tensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules to which ``fully_shard`` or ``replicate`` was applied."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Makes a model's parameters its shards, which have the gradients."""
    for module in sharded_modules(model):
        module.reshard()


def take_steps(
    scenario: Scenario,
    mesh: Mesh,
    data_rank: int,
    hook: Any,
    *,
    rate: float = 0.05,
    count: int = 3,
    gather: bool = False,
    same_batches: bool = False,
    **settings: Any,
) -> Steps:
    """Trains a new model.

    Args:
        scenario: the model and its step.
        mesh: the ranks.
        data_rank: selects this rank's batches.
        hook: attached to the model; None for plain ``fully_shard``.
        rate: the optimizer's learning rate.
        count: the number of steps.
        gather: whether to keep whole gradients.
        same_batches: whether each step uses the first step's batches.
        settings: for :func:`attach`.
    """
    model = scenario.net()
    scenario.shard(model, mesh)
    scenario.prepare(model)
    handle = None if hook is None else attach(model, hook, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    done = Steps()
    for number in range(count):
        optimizer.zero_grad()
        first = 0 if same_batches else 10 * number
        scenario.step(model, lambda i, first=first: batch(data_rank, first + i), handle)
        reshard(model)
        gradients = [parameter.grad for parameter in model.parameters()]
        done.gradients.append([None if each is None else local(each) for each in gradients])
        if gather:
            done.whole.append([None if each is None else whole(each) for each in gradients])
        optimizer.step()
    reshard(model)
    done.parameters = [local(parameter) for parameter in model.parameters()]
    if handle is not None:
        done.stats = handle.stats()
        done.state = handle.state_dict()
        handle.remove()
    return done


def differences(got: Steps, expected: Steps) -> list[str]:
    """The differences in bits between two trainings."""
    found = [] if any(each is not None for each in got.gradients[0]) else ["no gradient at all"]
    for step, (ours, theirs) in enumerate(zip(got.gradients, expected.gradients, strict=True)):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if (one is None) != (other is None):
                found.append(f"step {step}, parameter {number}: {one} and {other}")
            elif one is not None and other is not None:
                found += _bits(one, other, f"step {step}, gradient {number}")
    for number, (mine, other) in enumerate(zip(got.parameters, expected.parameters, strict=True)):
        found += _bits(mine, other, f"parameter {number}")
    return found


def _bits(one: Tensor, other: Tensor, what: str) -> list[str]:
    if one.dtype == other.dtype and torch.equal(one, other):
        return []
    return [f"{what}: {one.dtype} {one.flatten()[:4]} and {other.dtype} {other.flatten()[:4]}"]


def reference(
    scenario: Scenario, ranks: int, *, number: int = 0
) -> tuple[list[Tensor | None], float]:
    """The mean of all ranks' gradients in float64, in the first step.

    Returns:
        It by parameter, and the mean over the ranks of the largest gradient.
    """
    total: list[Tensor | None] = []
    largest = 0.0
    for rank in range(ranks):
        model = copy.deepcopy(scenario.net()).double()
        scenario.whole_step(model, lambda i, rank=rank: batch(rank, number + i).double(), None)
        gradients = [parameter.grad for parameter in model.parameters()]
        largest += max(float(each.abs().max()) for each in gradients if each is not None) / ranks
        total = [
            _add(a, b) for a, b in zip(total or [None] * len(gradients), gradients, strict=True)
        ]
    factor = scenario.factor or ranks
    mean = [None if each is None else each / factor for each in total]
    return mean, largest * ranks / factor


def _add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def far(
    got: Sequence[Tensor | None], expected: Sequence[Tensor | None], bound: float, what: str
) -> list[str]:
    """The gradients that are further than a bound from the reference's."""
    found = []
    for number, (mine, other) in enumerate(zip(got, expected, strict=True)):
        if mine is None or other is None:
            if mine is not None and bool(mine.any()):
                found.append(f"{what}, gradient {number}: {mine.flatten()[:4]} and None")
            if mine is None and other is not None:
                found.append(f"{what}, gradient {number}: None")
            continue
        if mine.shape != other.shape:
            found.append(f"{what}, gradient {number}: {mine.shape} and {other.shape}")
            continue
        if not mine.numel():  # an empty shard
            continue
        distance = float((mine.double() - other).abs().max())
        if not distance <= bound:
            found.append(f"{what}, gradient {number}: {distance} is more than {bound}")
    return found


def micro_sync(model: Any, sync: bool) -> None:
    """``set_requires_gradient_sync`` of a model, if it is sharded."""
    for module in sharded_modules(model):
        module.set_requires_gradient_sync(sync)


def unsynchronised(model: Any, handle: HookHandle | None) -> AbstractContextManager[None]:
    """The handle's ``no_sync``; for a model without a hook, the same by its own settings."""
    return nullcontext() if handle is None else handle.no_sync()

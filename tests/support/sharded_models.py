"""Models sharded by ``fully_shard``, their steps and failures, a reference, and ranks for tests."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mode_cases import OwnError
from rank_pool import KEPT_GROUPS
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from torch_commhook import HookHandle, PeerError, attach, hooks
from torch_commhook.process_group import SimulatedProcessGroup
from torch_commhook.testing import run_ranks


@dataclass
class Mesh:
    kind: str  # ``fsdp``, ``hsdp`` or ``replicate``
    mesh: DeviceMesh  # the ranks

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


def are_threads() -> bool:
    """Whether the ranks are threads, whose groups end with a test."""
    return isinstance(dist.group.WORLD, SimulatedProcessGroup)


def device_mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """All ranks; a process keeps the mesh for further tests."""
    if are_threads():
        return init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return _kept_mesh(sizes, names)


@cache
def _kept_mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    KEPT_GROUPS.update(group.group_name for group in mesh.get_all_groups())
    return mesh


class Layers(nn.Sequential):
    """Linear layers of uneven sizes; the last bias has one element."""

    def __init__(self, *sizes: int) -> None:
        sizes = sizes or (5, 7, 9, 1)
        layers: list[nn.Module] = []
        for number in range(len(sizes) - 1):
            layers += [nn.Linear(sizes[number], sizes[number + 1]), nn.Tanh()]
        super().__init__(*layers[:-1])


def layers() -> nn.Module:
    torch.manual_seed(0)
    return Layers()


def gradients_of_step(
    model: Any, rank: int, number: int = 0, *, of_inputs: bool = False
) -> list[Tensor]:
    """This rank's parts of the gradients after a step on its batch with this number.

    ``of_inputs`` says whether the backward reaches the inputs.
    """
    model.zero_grad()
    loss_of(model(batch(rank, number).requires_grad_(of_inputs))).backward()
    reshard(model)
    return [local(p.grad) for p in model.parameters() if p.grad is not None]


def same_bits(got: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether there are gradients, and all are equal; see :func:`are_equal`."""
    return len(got) == len(expected) > 0 and all(map(are_equal, got, expected))


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits.

    Gloo adds the numbers of three processes in another order than the library, which adds them in
    the order of ranks. So theirs may differ by rounding.
    """
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    is_of_three = dist.is_initialized() and not are_threads() and dist.get_world_size() == 3
    if not is_of_three or not one.is_floating_point():
        return torch.equal(one, other)
    bound = (
        16 * torch.finfo(one.dtype).eps * max(1e-3, float(one.abs().max()) if one.numel() else 0)
    )
    return torch.allclose(one, other, rtol=0, atol=bound)


def by_layer(model: nn.Module, mesh: Mesh, **settings: Any) -> None:
    """Shards each layer that has parameters, and the model."""
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            mesh.apply(layer, **settings)
    mesh.apply(model, **settings)


def sharded(place: str, **settings: Any) -> nn.Module:
    """The usual model, sharded by layers."""
    model = layers()
    by_layer(model, Mesh.of(place), **settings)
    return model


def at_once(model: nn.Module, mesh: Mesh, **settings: Any) -> None:
    """Shards the model alone, as one group of parameters."""
    mesh.apply(model, **settings)


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * number + rank))


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().sum()


@dataclass
class Training:
    """A model in training, as a step gets it."""

    model: Any  # it may be unsharded
    rank: int  # selects the data
    number: int = 0  # the step's, from 0
    optimizer: Any = None  # for the parameters
    handle: HookHandle | None = None  # of the hook; None without one
    # values that a scenario keeps from one step to the next
    memory: dict[str, Any] = field(default_factory=dict)

    def batch(self, number: int = 0, rows: int = 6, columns: int = 5) -> Tensor:
        """One of the step's inputs, in the dtype of the first parameter."""
        inputs = torch.randn(rows, columns, generator=self._generator(number))
        return inputs.to(next(self.model.parameters()).dtype)

    def tokens(self, number: int = 0) -> Tensor:
        """Indices into a vocabulary of 8: two sequences of 16."""
        return torch.randint(0, 8, (2, 16), generator=self._generator(number))

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.number + 100 * number + self.rank)

    def backward(self, number: int = 0) -> Tensor:
        """Forward and backward on one of the step's inputs; returns the loss."""
        loss = loss_of(self.model(self.batch(number)))
        loss.backward()
        return loss


Step = Callable[[Training], Any]


def nothing(model: Any) -> None:
    """Leaves a model unchanged."""


@dataclass(frozen=True)
class Scenario:
    net: Callable[[], nn.Module] = layers  # makes the model, after a seed has been set
    shard: Callable[[Any, Mesh], None] = by_layer  # shards it
    # called with the sharded model, before a hook is attached
    prepare: Callable[[Any], None] = nothing
    # a step of a sharded or an unsharded model; its result is compared, too
    step: Step = Training.backward
    # its kinds of mesh, each with a number of ranks
    meshes: tuple[str, ...] = ("fsdp-3", "hsdp-4", "replicate-2")
    # the greatest distance of gradients from the reference without a codec, relative to the largest
    # gradient
    rounding: float = 1e-5
    encodings: int = 1  # the number of encodings of a gradient in a step
    # the number of backwards in a step with the hook, on each kind of mesh; one where it is not
    # given. None for any number
    backwards: dict[str, int] | None = field(default_factory=dict)
    factor: float | None = None  # the divisor of the sum over ranks; None for the number of ranks
    plain_works: bool = True  # whether ``fully_shard`` supports it over Gloo without a hook
    averages: bool = True  # whether gradients are the mean of the ranks' own gradients
    count: int = 3  # the number of steps that are compared
    steps_itself: bool = False  # whether ``step`` calls the optimizer
    needs: str = "reshard"  # a method of ``FSDPModule`` that came with the torch that supports it


@dataclass
class Steps:
    results: list[Any] = field(default_factory=list)  # of each step
    # after each step, this rank's shard of each parameter's gradient
    gradients: list[list[Tensor | None]] = field(default_factory=list)
    # the same for whole parameters; empty unless requested
    whole: list[list[Tensor | None]] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)  # this rank's shards at the end
    stats: Any = None  # the hook's
    state: Any = None  # the hook's


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


def local_part(tensor: Tensor | None) -> Tensor | None:
    """This rank's part of a tensor, if there is one."""
    return None if tensor is None else local(tensor)


def sgd_at(rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    return partial(torch.optim.SGD, lr=rate)


_SGD = sgd_at(0.05)


def take_steps(
    scenario: Scenario,  # the model and its step
    mesh: Mesh,  # the ranks
    data_rank: int,  # selects this rank's batches
    hook: Any,  # attached to the model; None for plain ``fully_shard``
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = _SGD,  # makes the optimizer
    count: int = 3,  # the number of steps
    gather: bool = False,  # whether to keep whole gradients
    same_batches: bool = False,  # whether each step uses the first step's batches
) -> Steps:
    torch.manual_seed(0)
    model = scenario.net()
    scenario.shard(model, mesh)
    scenario.prepare(model)
    handle = None if hook is None else attach(model, hook)
    training = Training(model, data_rank, 0, optimizer(model.parameters()), handle)
    done = Steps()
    for number in range(count):
        training.number = 0 if same_batches else number
        torch.manual_seed(100 * number + data_rank)  # for dropout
        done.results.append(scenario.step(training))
        reshard(model)
        gradients = [parameter.grad for parameter in model.parameters()]
        done.gradients.append([local_part(each) for each in gradients])
        # Without gradients, any two trainings are equal.
        assert number or scenario.steps_itself or any(each is not None for each in gradients)
        if gather:
            done.whole.append([None if each is None else whole(each) for each in gradients])
        if not scenario.steps_itself:
            training.optimizer.step()
        # Zeroed gradients are added to.
        training.optimizer.zero_grad(set_to_none=number % 2 == 0)
    reshard(model)
    done.parameters = [local(parameter) for parameter in model.parameters()]
    if training.handle is not None:  # a step may have attached another hook
        done.stats = training.handle.stats()
        done.state = training.handle.state_dict()
        training.handle.remove()
    return done


def differences(got: Steps, expected: Steps) -> list[str]:
    """The differences in bits between two trainings."""
    parts = [[each.results, each.gradients, each.parameters] for each in (got, expected)]
    return unlike(*parts, "results, gradients, parameters")


def unlike(one: Any, other: Any, place: str = "") -> list[str]:
    """The differences in bits between tensors, values, or lists of these."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        one, other = local(one), local(other)
        if are_equal(one, other):
            return []
        return [f"{place}: {one.dtype} {one.flatten()[:4]} and {other.dtype} {other.flatten()[:4]}"]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return [f"{place}: {len(one)} and {len(other)}"]
        pairs = enumerate(zip(one, other, strict=True))
        return [text for i, pair in pairs for text in unlike(*pair, f"{place}[{i}]")]
    return [] if one == other else [f"{place}: {one} and {other}"]


def reference(scenario: Scenario, ranks: int) -> tuple[list[Tensor | None], float]:
    """The mean of all ranks' gradients in float64, in the first step of unsharded models.

    Returns:
        It by parameter, and the mean over the ranks of the largest gradient.
    """
    every = []
    largest = 0.0
    for rank in range(ranks):
        torch.manual_seed(0)
        model = scenario.net().double()
        scenario.step(Training(model, rank))
        every.append([parameter.grad for parameter in model.parameters()])
        largest += max(float(each.abs().max()) for each in every[-1] if each is not None)
    factor = scenario.factor or ranks
    mean: list[Tensor | None] = []
    for of_ranks in zip(*every, strict=True):
        given = [each for each in of_ranks if each is not None]
        mean.append(torch.stack(given).sum(0) / factor if given else None)
    return mean, largest / factor


def far(
    got: Sequence[Tensor | None], expected: Sequence[Tensor | None], bound: float, what: str
) -> list[str]:
    """The gradients that are further than a bound from the reference's."""
    found = []
    for number, (mine, other) in enumerate(zip(got, expected, strict=True)):
        where = f"{what}, gradient {number}"
        if mine is None or other is None:
            if other is not None or (mine is not None and bool(mine.any())):
                found.append(f"{where}: {mine} and {other}")
        elif mine.shape != other.shape:
            found.append(f"{where}: {mine.shape} and {other.shape}")
        elif mine.numel():  # no empty shard
            distance = float((mine.double() - other).abs().max())
            if not distance <= bound:
                found.append(f"{where}: {distance} is more than {bound}")
    return found


# ---- tests on ranks ------------------------------------------------------------------------------


#: The beginning of the name of a mesh whose ranks are processes with connections.
GLOO = "gloo-"
_POOLS = {2: "two_ranks", 3: "three_ranks", 4: "four_ranks"}


def run_on(
    request: pytest.FixtureRequest, place: str, function: Callable[..., Any], *args: Any
) -> None:
    """Calls ``function(rank, mesh's name, *args)`` on all ranks; it returns what is wrong.

    The ranks are threads of this process. For the name ``gloo-fsdp-3`` they are three processes,
    and the function gets ``fsdp-3``. It must then be at the top level of a module.
    """
    name = place.removeprefix(GLOO)
    number = int(name.rpartition("-")[2])
    if place == name:
        found = run_ranks(function, number, name, *args)
    else:
        found = request.getfixturevalue(_POOLS[number]).run(function, name, *args)
    assert not any(found), found


def _call_test(rank: int, place: str, module: str, name: str, arguments: dict[str, Any]) -> Any:
    test = getattr(importlib.import_module(module), name).__wrapped__
    return test(rank, place, **arguments)


def on_ranks(*places: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a test of a function of a rank, a mesh's name, and parameters or fixtures.

    It runs on each of the meshes as :func:`run_on` says.
    """
    return partial(_as_test, places)


def on_processes(*places: str) -> Callable[[Callable[..., Any]], Any]:
    """Like :func:`on_ranks`, on processes: for what compiles, recovers, or patches the library."""
    return partial(_as_test, [pytest.param(f"{GLOO}{place}", id=place) for place in places])


def _as_test(places: Any, function: Callable[..., Any]) -> Any:
    _, _, *others = inspect.signature(function).parameters.values()

    @wraps(function)
    def test(request: pytest.FixtureRequest, place: str, **arguments: Any) -> None:
        run_on(request, place, _call_test, function.__module__, function.__name__, arguments)

    own = list(inspect.signature(test, follow_wrapped=False).parameters.values())[:2]
    test.__signature__ = inspect.Signature([*own, *others])  # type: ignore[attr-defined]
    return pytest.mark.parametrize("place", places)(test)


# ---- failures of one rank ------------------------------------------------------------------------


class Failing(hooks.Hook):
    """Averages exactly, and raises an error in one of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.fails_in: int | None = None  # the number of successful calls before; None for all

    def set(self, calls: int, fails: bool) -> None:
        """Makes it fail after so many calls, or never."""
        self.fails_in = calls if fails else None

    def check_shards(self) -> None:
        pass

    def average(self, bucket: Any) -> Any:
        self._call()
        return hooks.allreduce().average(bucket)

    def average_shard(self, bucket: Any) -> Any:
        self._call()
        return hooks.allreduce().average_shard(bucket)

    def _call(self) -> None:
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in < 0:
                raise OwnError("boo")


class _Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise OwnError("boo")


class Trap(nn.Module):
    """Returns its input, or raises an error: in ``forward`` or in ``backward``."""

    def __init__(self) -> None:
        super().__init__()
        self.raises_in = ""

    def set(self, where: str, raises: bool) -> None:
        self.raises_in = where if raises else ""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.raises_in == "forward":
            raise OwnError("boo")
        return _Raising.apply(inputs) if self.raises_in == "backward" else inputs * 1


#: The places of the traps among the layers: before, between and after them.
TRAPS = ("first", "middle", "last")


def with_traps() -> nn.Module:
    """Three layers with traps."""
    torch.manual_seed(0)
    parts = list(Layers(5, 6, 6, 1))
    return nn.Sequential(Trap(), *parts[:2], Trap(), *parts[2:], Trap())


def trap_of(model: Any, where: str) -> Trap:
    traps = [part for part in model if isinstance(part, Trap)]
    return traps[TRAPS.index(where)]


def new_model(place: str) -> nn.Module:
    """A sharded model with traps."""
    model = with_traps()
    by_layer(model, Mesh.of(place))
    return model


one_step = partial(gradients_of_step, of_inputs=True)


def check_outcome(model: nn.Module, rank: int, number: int, fails: int) -> None:
    """This rank leaves a step with the right error, which another rank or this one raises."""
    with pytest.raises(OwnError if rank == fails else PeerError) as caught:
        one_step(model, rank, number)
    if rank != fails:
        says = str(caught.value)
        # The whole reason of the failed rank, not inside another rank's error.
        assert says.startswith(f"torch_commhook: this step failed on rank {fails}: "), says
        assert says.count("failed on") == 1, says

"""Trains replicas of a sharded model apart; and a reference on one process in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from sharded_models import batch, layers, local, loss_of, reshard, same_bits, sharded, whole
from torch import Tensor, nn

from torch_commhook import attach, codecs, hooks
from torch_commhook.hooks import outer_sgd

MEAN = outer_sgd(1.0, 0.0)
PLACES = ["hsdp-4", "replicate-2"]
INT4 = partial(hooks.blockwise, bits=4, block_size=32)

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def shards_of(place: str) -> int:
    """The number of shards of each replica."""
    return int(place[-1]) // 2 if place.startswith("hsdp") else 1


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    """A rank's step on its own batch."""
    optimizer.zero_grad()
    loss_of(model(batch(rank, number))).backward()
    optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    """This rank's shards."""
    reshard(model)
    return [local(parameter) for parameter in model.parameters()]


def whole_values(model: nn.Module) -> list[Tensor]:
    """Whole parameters of this rank's replica."""
    reshard(model)
    return [whole(parameter) for parameter in model.parameters()]


class Reference:
    """DiLoCo on the replicas of a mesh. Each steps with the mean of its ranks' gradients."""

    def __init__(
        self,
        place: str,
        make_optimizer: MakeOptimizer,
        H: int,  # noqa: N803
        outer: outer_sgd,
    ) -> None:
        self.shards = shards_of(place)
        first = layers().double()
        self.replicas = [copy.deepcopy(first) for _ in range(int(place[-1]) // self.shards)]
        self.optimizers = [make_optimizer(model.parameters()) for model in self.replicas]
        self.anchor = [parameter.detach().clone() for parameter in first.parameters()]
        self.outer = torch.optim.SGD(
            self.anchor,
            lr=outer.lr,
            momentum=outer.momentum,
            nesterov=outer.nesterov and outer.momentum > 0,
        )
        self.every = H
        self.steps = 0

    def step(self) -> None:
        number, self.steps = self.steps, self.steps + 1
        for which, (model, optimizer) in enumerate(
            zip(self.replicas, self.optimizers, strict=True)
        ):
            optimizer.zero_grad()
            for shard in range(self.shards):
                # Not loss_of(), which casts.
                output = model(batch(which * self.shards + shard, number).double())
                (output.square().sum() / self.shards).backward()
            optimizer.step()
        if self.steps % self.every == 0:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """Averages the replicas."""
        own = [list(model.parameters()) for model in self.replicas]
        for number, anchor in enumerate(self.anchor):
            distances = torch.stack([anchor - parameters[number] for parameters in own])
            anchor.grad = distances.mean(0)
        self.outer.step()
        for parameters in own:
            for parameter, anchor in zip(parameters, self.anchor, strict=True):
                parameter.copy_(anchor)

    def values(self, rank: int) -> list[Tensor]:
        """The parameters of a rank's replica."""
        return [p.detach().clone() for p in self.replicas[rank // self.shards].parameters()]


def farthest(got: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(got, expected, strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel())


def between_replicas(mine: list[Tensor], rank: int, place: str) -> bool:
    """Whether the other replica has the same bits as this rank. All ranks must call it."""
    every: list[Any] = [None] * int(place[-1])
    dist.all_gather_object(every, mine)
    return same_bits(mine, every[(rank + shards_of(place)) % len(every)])


def tensors_by_path(state: Any, path: str = "") -> dict[str, Tensor]:
    """The tensors of nested dicts, by their keys joined with slashes."""
    if isinstance(state, Tensor):
        return {path: state}
    items = state.items() if isinstance(state, dict) else ()
    return {k: v for key, each in items for k, v in tensors_by_path(each, f"{path}/{key}").items()}


def _hooks_within(place: str) -> dict[str, Any]:
    """Settings of ``attach`` that compress messages within a replica, if it has shards."""
    if not place.startswith("hsdp"):
        return {}
    return {"shard_hook": hooks.error_feedback(INT4()), "weights": codecs.blockwise()}


def goes_on(
    rank: int,
    place: str,
    make_hook: Callable[[], Any],  # makes a hook
    steps: int,  # taken before the state is saved
    more: int,  # steps taken after it
    # of a distributed checkpoint of the state; None to load the state as it is
    folder: Path | None = None,
    *,
    # makes settings of ``attach`` for a mesh
    within: Callable[[str], dict[str, Any]] = _hooks_within,
    gather: bool = False,  # whether each rank loads one state of all ranks
    copies: bool = False,  # whether to copy the parameters, which the state does not contain
) -> None:
    """Checks that training continues from a hook's state with the same bits."""
    model = sharded(place)
    handle = attach(model, make_hook(), **within(place))
    optimizer = sgd(model.parameters())
    for number in range(steps):
        one_step(model, optimizer, rank, number)
    state = copy.deepcopy(handle.state_dict(gather=gather))
    of_rank = f"rank{dist.get_world_size() - 1 if gather else rank}"
    assert of_rank in state or of_rank in state["shard_hook"]
    other = sharded(place)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    if copies:
        copy_parameters(model, other)
    again = attach(other, make_hook(), **within(place))
    if folder is not None:
        checkpoint.save({"hook": state}, checkpoint_id=folder)
        into = {"hook": again.state_dict()}
        checkpoint.load(into, checkpoint_id=folder)
        state = into["hook"]
    again.load_state_dict(state)
    other_optimizer = sgd(other.parameters())
    assert same_bits(values(model), values(other))
    for number in range(steps, steps + more):
        one_step(model, optimizer, rank, number)
        one_step(other, other_optimizer, rank, number)
        assert same_bits(values(model), values(other)), number
    for each in (handle, again):
        each.synchronize()
        each.remove()
    assert same_bits(values(model), values(other))


def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for parameter, other in zip(target.parameters(), source.parameters(), strict=True):
            parameter.copy_(other)

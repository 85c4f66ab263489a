"""Ways in which one rank fails in a step of a sharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mode_cases import OwnError
from sharded_models import Layers, Mesh, batch, by_layer, local, loss_of, reshard, unlike
from torch import Tensor, nn

from torch_commhook import PeerError, hooks


class Failing(hooks.Hook):
    """Averages exactly, and raises an error in one of its calls.

    Attributes:
        fails_in: the number of successful calls before; None for all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fails_in: int | None = None

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


def one_step(model: nn.Module, rank: int, number: int) -> list[Tensor]:
    """This rank's gradients of a step."""
    model.zero_grad()
    loss_of(model(batch(rank, number).requires_grad_())).backward()
    reshard(model)
    return [local(p.grad) for p in model.parameters() if p.grad is not None]


def check_outcome(model: nn.Module, rank: int, number: int, fails: int) -> None:
    """This rank leaves a step with the right error, which another rank or this one raises."""
    with pytest.raises(OwnError if rank == fails else PeerError) as caught:
        one_step(model, rank, number)
    if rank != fails:
        says = str(caught.value)
        # The whole reason of the failed rank, not inside another rank's error.
        assert says.startswith(f"torch_commhook: this step failed on rank {fails}: "), says
        assert says.count("failed on") == 1, says


def plain_gradients(place: str, rank: int, number: int) -> list[Tensor]:
    """The gradients of ``fully_shard`` without a hook."""
    return one_step(new_model(place), rank, number)


def check_equal(got: list[Tensor], expected: list[Tensor], when: str) -> None:
    """Gradients have the same bits."""
    assert unlike(got, expected) == [], when

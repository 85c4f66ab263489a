"""``local_sgd`` with fragments in the background, across replicas of sharded models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from local_training import StreamingTurns
from rank_pool import RankPool
from sharded_local import (
    INT4,
    PLACES,
    Reference,
    between_replicas,
    farthest,
    goes_on,
    one_step,
    sgd,
    values,
    whole_values,
)
from sharded_models import on_processes, on_ranks, sharded
from torch import Tensor

from torch_commhook import attach, hooks, reshard_states
from torch_commhook.hooks import local_sgd, outer_sgd

_OUTER = outer_sgd(0.7, 0.5)


class _Streaming(StreamingTurns, Reference):
    """Fragments of layers in turn, of the usual model's three."""

    def __init__(self, place: str, H: int, fragments: int, delay: int, mix: float) -> None:  # noqa: N803
        Reference.__init__(self, place, sgd, 1 << 30, _OUTER)
        self.settings = H, fragments, delay, mix
        layers = [number // 2 for number in range(len(self.anchor))]  # of weight and bias each
        self.fragment_of = [layer % fragments for layer in layers]
        self.outers = [
            torch.optim.SGD(
                [a for a, of in zip(self.anchor, self.fragment_of, strict=True) if of == number],
                lr=_OUTER.lr,
                momentum=_OUTER.momentum,
                nesterov=_OUTER.nesterov,
            )
            for number in range(fragments)
        ]

    def train(self) -> None:
        Reference.step(self)

    def take_means(self, fragment: int) -> None:
        own = [list(model.parameters()) for model in self.replicas]
        for number, anchor in enumerate(self.anchor):
            if self.fragment_of[number] == fragment:
                anchor.grad = torch.stack([anchor - each[number] for each in own]).mean(0)

    def move(self, fragment: int) -> None:
        mix = self.settings[3]
        self.outers[fragment].step()
        for model in self.replicas:
            for number, parameter in enumerate(model.parameters()):
                if self.fragment_of[number] == fragment:
                    parameter.copy_(mix * parameter + (1 - mix) * self.anchor[number])


@pytest.mark.parametrize(
    ("fragments", "delay", "mix"), [(2, 0, 0.0), (2, 2, 0.5), (3, 1, 0.5), (1, 3, 0.0)]
)
@on_processes(*PLACES)
def test_it_moves_as_plain_pytorch_does(
    rank: int, place: str, fragments: int, delay: int, mix: float
) -> None:
    expected = _Streaming(place, 6, fragments, delay, mix)
    model = sharded(place)
    start = whole_values(model)
    handle = attach(model, local_sgd(6, outer=_OUTER, fragments=fragments, delay=delay, mix=mix))
    optimizer = sgd(model.parameters())
    for number in range(15):
        one_step(model, optimizer, rank, number)
        expected.step()
    wanted = expected.values(rank)
    assert farthest(whole_values(model), wanted) <= 1e-4 * farthest(start, wanted)
    handle.synchronize()
    assert between_replicas(values(model), rank, place)
    handle.remove()


# ---- states --------------------------------------------------------------------------------------


def _hook() -> Any:
    return local_sgd(6, hook=hooks.error_feedback(INT4()), fragments=2, delay=2, mix=0.5)


@pytest.mark.parametrize("steps", [4, 5, 6])
@on_ranks(*PLACES)
def test_training_goes_on(rank: int, place: str, steps: int) -> None:
    goes_on(rank, place, _hook, steps, 5)


@on_processes(*PLACES)
def test_a_distributed_checkpoint(rank: int, place: str, tmp_path: Path) -> None:
    goes_on(rank, place, _hook, 4, 5, tmp_path)


def _under_way(rank: int, place: str, folder: str, goes_on: bool) -> list[Tensor]:
    model = sharded(place)
    handle = attach(model, local_sgd(4, outer=_OUTER, fragments=2, delay=1, mix=0.5))
    if goes_on:
        handle.load_state_dict(torch.load(f"{folder}/then{rank}", weights_only=True))
        assert handle.state_dict()["local_steps"]["steps_in_flight"] == 0
    else:
        optimizer = sgd(model.parameters())
        for number in range(6):
            one_step(model, optimizer, rank, number)
        torch.save(handle.state_dict(), f"{folder}/{rank}")
    handle.synchronize()
    handle.remove()
    return whole_values(model)


def test_other_shards_come_to_the_same(
    four_ranks: RankPool, two_ranks: RankPool, tmp_path: Path
) -> None:
    """What has come of an exchange is cut as the parameters are."""
    before = four_ranks.run(_under_way, "hsdp-4", str(tmp_path), False)
    states = [torch.load(tmp_path / str(rank), weights_only=True) for rank in range(4)]
    for rank, state in enumerate(reshard_states(states, 2, shards=1)):
        torch.save(state, tmp_path / f"then{rank}")
    after = two_ranks.run(_under_way, "replicate-2", str(tmp_path), True)
    assert farthest(before[0], after[0]) < 1e-6

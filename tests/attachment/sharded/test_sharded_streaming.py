"""``local_sgd`` with fragments in the background, across replicas of sharded models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from local_training import StreamingTurns
from mode_cases import OwnError
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
    shards_of,
    tensors_by_path,
    values,
    whole_values,
)
from sharded_models import (
    Mesh,
    by_layer,
    on_processes,
    on_ranks,
    same_bits,
    sharded,
    trap_of,
    with_traps,
)
from torch import Tensor

from torch_commhook import PeerError, attach, hooks, reshard_states
from torch_commhook.attachment.sharded import replica
from torch_commhook.attachment.sharded.step import ShardedStep
from torch_commhook.collectives.futures import driven
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


def _trained(rank: int, place: str, settings: list[tuple[int, int, float]]) -> list[str]:
    found = []
    for fragments, delay, mix in settings:
        expected = _Streaming(place, 6, fragments, delay, mix)
        model = sharded(place)
        start = whole_values(model)
        hook = local_sgd(6, outer=_OUTER, fragments=fragments, delay=delay, mix=mix)
        handle = attach(model, hook)
        optimizer = sgd(model.parameters())
        for number in range(15):
            one_step(model, optimizer, rank, number)
            expected.step()
        got, wanted = whole_values(model), expected.values(rank)
        moved = farthest(start, wanted)
        if not farthest(got, wanted) <= 1e-4 * moved:
            found.append(f"{fragments}, {delay}, {mix}: {farthest(got, wanted)} of {moved}")
        handle.synchronize()
        if not between_replicas(values(model), rank, place):
            found.append(f"{fragments}, {delay}, {mix}: apart in the end")
        handle.remove()
    return found


@pytest.mark.parametrize("place", PLACES)
def test_it_moves_as_plain_pytorch_does(ranks: RankPool, place: str) -> None:
    settings = [(2, 0, 0.0), (2, 2, 0.5), (3, 1, 0.5), (1, 3, 0.0)]
    assert ranks.run(_trained, place, settings, timeout=120) == [[]] * ranks.world_size


# ---- failures ------------------------------------------------------------------------------------


class _Fails(hooks.error_feedback):
    """Has sent, and remembers what that has lost, when it fails."""

    is_failing = False

    def __init__(self) -> None:
        super().__init__(INT4())

    def average(self, bucket: Any) -> Any:
        result = super().average(bucket)
        if self.is_failing:
            driven(result).wait()  # nothing goes on that writes to what it remembers
            raise OwnError("boo")
        return result


def _raised(model: Any, optimizer: Any, rank: int, number: int) -> str:
    try:
        one_step(model, optimizer, rank, number)
    except (OwnError, PeerError) as error:
        return type(error).__name__
    return "nothing"


@on_processes(*PLACES)
def test_a_rank_that_fails_where_one_begins(rank: int, place: str) -> list[str]:
    """Each rank in turn. All ranks of the mesh raise where it was to end, and nothing has moved."""
    found = []
    for fails in range(int(place[-1])):
        failing = _Fails()
        model = sharded(place)
        hook = local_sgd(4, outer=_OUTER, hook=failing, fragments=2, delay=1, mix=0.5)
        handle = attach(model, hook)
        optimizer = sgd(model.parameters())
        said = [_raised(model, optimizer, rank, number) for number in range(5)]
        before = tensors_by_path(handle.state_dict())
        failing.is_failing = rank == fails
        said.append(_raised(model, optimizer, rank, 5))  # one begins
        own = values(model)
        optimizer.zero_grad()
        failing.is_failing = False
        said.append(_raised(model, optimizer, rank, 6))
        kind = "OwnError" if rank == fails else "PeerError"
        if said != ["nothing"] * 6 + [kind]:
            found.append(f"rank {fails} has failed: {said}")
        if same_bits(values(model), own):
            found.append(f"rank {fails} has failed: the step was not its own")
        now = tensors_by_path(handle.state_dict())
        found += [
            f"rank {fails} has failed: {name} has changed"
            for name, tensor in before.items()
            if "local_sgd_parameter" not in name and not torch.equal(tensor, now[name])
        ]
        steps = handle.stats().steps
        said = [_raised(model, optimizer, rank, number) for number in (7, 8)]
        if said != ["nothing"] * 2 or handle.stats().steps != steps + 1:
            found.append(f"rank {fails} has failed: then {said}, {handle.stats().steps}")
        handle.synchronize()
        if not between_replicas(values(model), rank, place):
            found.append(f"rank {fails} has failed: apart")
        handle.remove()
    return found


def _saved_in_between(rank: int, place: str) -> list[str]:
    """A state that is saved after one shard's exchange has failed, and before that raises."""
    failing = _Fails()
    hook = local_sgd(4, outer=_OUTER, hook=failing, fragments=2, delay=1, mix=0.5)
    model, other = sharded(place), sharded(place)
    handle = attach(model, hook)
    again = attach(other, local_sgd(4, outer=_OUTER, hook=_Fails(), fragments=2, delay=1, mix=0.5))
    optimizer = sgd(model.parameters())
    failing.is_failing = rank == 1
    said = [_raised(model, optimizer, rank, number) for number in range(2)]
    state, here = copy.deepcopy(handle.state_dict()), [each.clone() for each in values(model)]
    found = [f"{name}: {value}" for name, value in state["local_steps"].items() if "in" in name]
    failing.is_failing = False
    said += [_raised(model, optimizer, rank, number) for number in (2, 3)]
    again.load_state_dict(state)
    if not same_bits(values(other), here):
        found.append("other parameters")
    optimizer = sgd(other.parameters())
    for number in range(3):
        one_step(other, optimizer, rank, number)
    for each, of in ((handle, model), (again, other)):
        each.synchronize()
        if not between_replicas(values(of), rank, place):
            found.append("apart")
        each.remove()
    return [*said, *found]


@pytest.mark.parametrize("place", PLACES)
def test_a_state_after_one_shards_failure(ranks: RankPool, place: str) -> None:
    for rank, found in enumerate(ranks.run(_saved_in_between, place)):
        kind = "OwnError" if rank == 1 else "PeerError"
        assert found == ["nothing"] * 2 + [kind, "nothing", "steps_in_flight: -1"]


def _interrupted(rank: int, place: str, where: str) -> list[Any]:
    """Ctrl-C on rank 1 where the ranks of its replica agree on an exchange that went well."""
    model = sharded(place)
    handle = attach(model, local_sgd(4, outer=_OUTER, fragments=2, delay=1, mix=0.5))
    optimizer = sgd(model.parameters())

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    said = []
    for number in range(10):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and number == 2:
                patch.setattr(*_AGREEMENTS[where], interrupt)
            try:
                one_step(model, optimizer, rank, number)
            except (KeyboardInterrupt, PeerError) as error:
                said.append((number, type(error).__name__))
    exchanges = handle.stats().steps
    anchors = list(tensors_by_path(handle.state_dict()).items())
    anchors = [tensor for name, tensor in anchors if "local_sgd_anchor" in name]
    is_same = between_replicas(anchors, rank, place)
    handle.synchronize()
    is_same = is_same and between_replicas(values(model), rank, place)
    handle.remove()
    return [said, exchanges, is_same]


_AGREEMENTS = {
    "it tells": (replica, "is_on_any_rank"),
    "it ends": (ShardedStep, "end_exchange"),
}


@pytest.mark.parametrize("where", _AGREEMENTS)
def test_ctrl_c_where_a_replica_agrees(four_ranks: RankPool, where: str) -> None:
    """No rank counts the exchange as failed: the replica's next step ends it."""
    raised = [[(2, "PeerError")], [(2, "KeyboardInterrupt")], [], []]
    expected = [[said, 4, True] for said in raised]
    assert four_ranks.run(_interrupted, "hsdp-4", where) == expected


@on_processes(*PLACES)
def test_a_backward_that_fails_meanwhile(rank: int, place: str) -> list[str]:
    """It is a replica's own, and ends no exchange that is under way."""
    model = with_traps()
    by_layer(model, Mesh.of(place))
    handle = attach(model, local_sgd(4, outer=_OUTER, delay=3))
    optimizer = sgd(model.parameters())
    found = []
    for number in range(4):
        one_step(model, optimizer, rank, number)
    trap_of(model, "middle").raises_in = "backward" if rank == 0 else ""
    said = _raised(model, optimizer, rank, 4)
    in_replica = rank // shards_of(place) == 0
    expected = "OwnError" if rank == 0 else "PeerError" if in_replica else "nothing"
    if said != expected:
        found.append(f"{said}, not {expected}")
    trap_of(model, "middle").raises_in = ""
    for number in range(5, 8 if in_replica else 7):  # as many steps as the others
        one_step(model, optimizer, rank, number)
    if handle.stats().steps != 1:
        found.append(f"{handle.stats().steps} exchanges")
    if not between_replicas(values(model), rank, place):  # of one fragment, with no mix
        found.append("apart")
    handle.remove()
    return found


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

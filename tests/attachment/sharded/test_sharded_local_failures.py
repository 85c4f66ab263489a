"""``local_sgd`` across replicas of sharded models: its failures, and other hooks in its place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from mode_cases import OwnError
from rank_pool import RankPool
from sharded_failures import Failing, trap_of, with_traps
from sharded_local import (
    INT4,
    MEAN,
    PLACES,
    between_replicas,
    one_step,
    same,
    sgd,
    sharded,
    shards_of,
    tensors_by_path,
    values,
)
from sharded_models import Mesh, by_layer

from torch_commhook import PeerError, attach, hooks
from torch_commhook.collectives.futures import driven
from torch_commhook.hooks import local_sgd

# ---- failures ------------------------------------------------------------------------------------


class _FailsAfter(hooks.error_feedback):
    """Has sent, and remembers what that has lost, when it fails."""

    def __init__(self) -> None:
        super().__init__(INT4())
        self.is_failing = False

    def average(self, bucket: Any) -> Any:
        result = super().average(bucket)
        if self.is_failing and bucket.index() == bucket.bucket_count() - 1:
            driven(result).wait()  # nothing goes on that writes to what it remembers
            raise OwnError("boo")
        return result


class _FailsBefore(Failing):
    """Fails before anything is sent."""

    @property
    def is_failing(self) -> bool:
        return self.fails_in is not None

    @is_failing.setter
    def is_failing(self, value: bool) -> None:
        self.fails_in = 0 if value else None


def _raised(action: Callable[[], Any]) -> str:
    try:
        action()
    except (OwnError, PeerError) as error:
        return type(error).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _fail_at_an_exchange(rank: int, place: str, make_hook: Any, at_the_end: bool) -> list[str]:
    """Each rank in turn; beside it a training in which nothing fails."""
    failing, working = make_hook(), make_hook()
    models = [sharded(place), sharded(place)]
    handles = [
        attach(model, local_sgd(2, hook=hook))
        for model, hook in zip(models, (failing, working), strict=True)
    ]
    optimizers = [sgd(model.parameters()) for model in models]
    found = []
    for fails in range(int(place[-1])):
        for model, optimizer in zip(models, optimizers, strict=True):
            one_step(model, optimizer, rank, 2 * fails)
        failing.is_failing = rank == fails
        if not at_the_end:
            said = _raised(partial(one_step, models[0], optimizers[0], rank, 2 * fails + 1))
        else:
            before, state = values(models[0]), tensors_by_path(handles[0].state_dict())
            said = _raised(handles[0].synchronize)
            if not same(values(models[0]), before):
                found.append(f"rank {fails} has failed: parameters have moved")
            now = tensors_by_path(handles[0].state_dict())
            found += [
                f"rank {fails} has failed: {name} has changed"
                for name, tensor in state.items()
                if not torch.equal(tensor, now[name])
            ]
        if said != ("OwnError" if rank == fails else "PeerError"):
            found.append(f"rank {fails} has failed: {said}")
        failing.is_failing = False
        if not at_the_end:
            one_step(models[1], optimizers[1], rank, 2 * fails + 1)
        for handle in handles:
            handle.synchronize()
        if not same(values(models[0]), values(models[1])):
            found.append(f"rank {fails} has failed: other parameters then")
        if not between_replicas(values(models[0]), rank, place):
            found.append(f"rank {fails} has failed: apart")
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("make_hook", [_FailsBefore, _FailsAfter])
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_fails_at_an_exchange(
    ranks: RankPool, place: str, make_hook: Any, at_the_end: bool
) -> None:
    found = ranks.run(_fail_at_an_exchange, place, make_hook, at_the_end)
    assert found == [[]] * ranks.world_size


def _fail_in_a_backward(rank: int, place: str) -> list[str]:
    """It is a replica's own: the other replica goes on, and the next exchange works."""
    model = with_traps()
    by_layer(model, Mesh.of(place))
    handle = attach(model, local_sgd(2, outer=MEAN))
    optimizer = sgd(model.parameters())
    found = []
    for fails in range(int(place[-1])):
        trap_of(model, "middle").raises_in = "backward" if rank == fails else ""
        said = _raised(lambda: one_step(model, optimizer, rank, 0))
        in_replica = rank // shards_of(place) == fails // shards_of(place)
        expected = "OwnError" if rank == fails else "PeerError" if in_replica else "nothing"
        if said != expected:
            found.append(f"rank {fails} has failed: {said}, not {expected}")
        trap_of(model, "middle").raises_in = ""
        for number in range(2 if in_replica else 1):  # as many steps as the others
            one_step(model, optimizer, rank, number)
        if not between_replicas(values(model), rank, place):
            found.append(f"rank {fails} has failed: apart")
    if handle.stats().steps != int(place[-1]):
        found.append(f"{handle.stats().steps} exchanges")
    handle.remove()
    return found


@pytest.mark.parametrize("place", PLACES)
def test_a_failure_in_a_backward_is_a_replicas_own(ranks: RankPool, place: str) -> None:
    assert ranks.run(_fail_in_a_backward, place) == [[]] * ranks.world_size


# ---- other hooks in its place --------------------------------------------------------------------


def _replaced(rank: int, place: str) -> list[str]:
    """By a hook that averages gradients, and back."""
    model, plain = sharded(place), sharded(place)
    handle = attach(model, local_sgd(2, outer=MEAN))
    optimizer = sgd(model.parameters())
    found = []
    for number in range(2):
        one_step(model, optimizer, rank, number)
    handle.replace(hooks.allreduce())
    with torch.no_grad():
        for parameter, other in zip(plain.parameters(), model.parameters(), strict=True):
            parameter.copy_(other)
    other = sgd(plain.parameters())
    for number in range(2, 4):
        one_step(model, optimizer, rank, number)
        one_step(plain, other, rank, number)
        if not same(values(model), values(plain)):
            found.append(f"step {number}: other bits than fully_shard")
    handle.replace(local_sgd(2, outer=MEAN))
    for number in range(2):
        one_step(model, optimizer, rank, number)
        if between_replicas(values(model), rank, place) != (number == 1):
            found.append(f"again, step {number}")
    if handle.stats().steps != 1:
        found.append(f"{handle.stats().steps} exchanges")
    handle.remove()
    return found


@pytest.mark.parametrize("place", PLACES)
def test_replaced_and_back(ranks: RankPool, place: str) -> None:
    assert ranks.run(_replaced, place) == [[]] * ranks.world_size


def _removed(rank: int, place: str, steps: int) -> list[str]:
    """It leaves ``fully_shard`` as it was, and says where replicas are apart."""
    model, plain = sharded(place), sharded(place)
    handle = attach(model, local_sgd(2, outer=MEAN))
    optimizer = sgd(model.parameters())
    for number in range(steps):
        one_step(model, optimizer, rank, number)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle.remove()
    said = [str(each.message) for each in caught if each.category is RuntimeWarning]
    found = [] if len(said) == steps % 2 else [f"said {said}"]
    with torch.no_grad():
        for parameter, other in zip(plain.parameters(), model.parameters(), strict=True):
            parameter.copy_(other)
    other = sgd(plain.parameters())
    one_step(model, optimizer, rank, 5)
    one_step(plain, other, rank, 5)
    return found if same(values(model), values(plain)) else [*found, "other bits"]


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_removed(ranks: RankPool, place: str, steps: int) -> None:
    assert ranks.run(_removed, place, steps) == [[]] * ranks.world_size


def _refused(rank: int, place: str, name: str) -> str:
    hook = {
        "one dimension": lambda: local_sgd(4),
        "clip": lambda: local_sgd(4, hook=hooks.clip(1.0)),
        "clip inside": lambda: local_sgd(4, hook=hooks.after(3, hooks.clip(1.0))),
    }[name]()
    try:
        attach(sharded(place), hook)
    except TypeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("place", "name", "message"),
    [
        ("fsdp-2", "one dimension", "shard over a mesh of two dimensions"),
        ("hsdp-4", "clip", "clip_grad_norm_"),
        ("hsdp-4", "clip inside", "clip_grad_norm_"),
    ],
)
def test_refused(ranks: RankPool, place: str, name: str, message: str) -> None:
    for said in ranks.run(_refused, place, name):
        assert message in said

"""``local_sgd`` across replicas of sharded models: its failures, and other hooks in its place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from mode_cases import OwnError
from sharded_local import (
    INT4,
    MEAN,
    PLACES,
    between_replicas,
    copy_parameters,
    one_step,
    sgd,
    shards_of,
    tensors_by_path,
    values,
)
from sharded_models import (
    Failing,
    Mesh,
    by_layer,
    on_processes,
    on_ranks,
    run_on,
    same_bits,
    sharded,
    trap_of,
    with_traps,
)

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
    return "nothing"


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("make_hook", [_FailsBefore, _FailsAfter])
@on_processes(*PLACES)
def test_a_rank_that_fails_at_an_exchange(
    rank: int, place: str, make_hook: Any, at_the_end: bool
) -> None:
    """Each rank in turn; beside it a training in which nothing fails."""
    failing, working = make_hook(), make_hook()
    models = [sharded(place), sharded(place)]
    handles = [
        attach(model, local_sgd(2, hook=hook))
        for model, hook in zip(models, (failing, working), strict=True)
    ]
    optimizers = [sgd(model.parameters()) for model in models]
    for fails in range(int(place[-1])):
        for model, optimizer in zip(models, optimizers, strict=True):
            one_step(model, optimizer, rank, 2 * fails)
        failing.is_failing = rank == fails
        if not at_the_end:
            said = _raised(partial(one_step, models[0], optimizers[0], rank, 2 * fails + 1))
        else:
            before, state = values(models[0]), tensors_by_path(handles[0].state_dict())
            said = _raised(handles[0].synchronize)
            assert same_bits(values(models[0]), before), fails
            now = tensors_by_path(handles[0].state_dict())
            assert [name for name in state if not torch.equal(state[name], now[name])] == []
        assert said == ("OwnError" if rank == fails else "PeerError"), fails
        failing.is_failing = False
        if not at_the_end:
            one_step(models[1], optimizers[1], rank, 2 * fails + 1)
        for handle in handles:
            handle.synchronize()
        assert same_bits(values(models[0]), values(models[1])), fails
        assert between_replicas(values(models[0]), rank, place), fails
    for handle in handles:
        handle.remove()


@on_processes(*PLACES)
def test_a_failure_in_a_backward_is_a_replicas_own(rank: int, place: str) -> None:
    """It is a replica's own: the other replica goes on, and the next exchange works."""
    model = with_traps()
    by_layer(model, Mesh.of(place))
    handle = attach(model, local_sgd(2, outer=MEAN))
    optimizer = sgd(model.parameters())
    for fails in range(int(place[-1])):
        trap_of(model, "middle").raises_in = "backward" if rank == fails else ""
        said = _raised(lambda: one_step(model, optimizer, rank, 0))
        in_replica = rank // shards_of(place) == fails // shards_of(place)
        expected = "OwnError" if rank == fails else "PeerError" if in_replica else "nothing"
        assert said == expected, fails
        trap_of(model, "middle").raises_in = ""
        for number in range(2 if in_replica else 1):  # as many steps as the others
            one_step(model, optimizer, rank, number)
        assert between_replicas(values(model), rank, place), fails
    assert handle.stats().steps == int(place[-1])
    handle.remove()


# ---- other hooks in its place --------------------------------------------------------------------


@on_ranks(*PLACES)
def test_replaced_and_back(rank: int, place: str) -> None:
    """By a hook that averages gradients, and back."""
    model, plain = sharded(place), sharded(place)
    handle = attach(model, local_sgd(2, outer=MEAN))
    optimizer = sgd(model.parameters())
    for number in range(2):
        one_step(model, optimizer, rank, number)
    handle.replace(hooks.allreduce())
    copy_parameters(model, plain)
    other = sgd(plain.parameters())
    for number in range(2, 4):
        one_step(model, optimizer, rank, number)
        one_step(plain, other, rank, number)
        assert same_bits(values(model), values(plain)), number
    handle.replace(local_sgd(2, outer=MEAN))
    for number in range(2):
        one_step(model, optimizer, rank, number)
        assert between_replicas(values(model), rank, place) == (number == 1), number
    assert handle.stats().steps == 1
    handle.remove()


@pytest.mark.parametrize("steps", [2, 3])
@on_ranks(*PLACES)
def test_removed(rank: int, place: str, steps: int) -> None:
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
    assert len(said) == steps % 2
    copy_parameters(model, plain)
    other = sgd(plain.parameters())
    one_step(model, optimizer, rank, 5)
    one_step(plain, other, rank, 5)
    assert same_bits(values(model), values(plain))


_REFUSED: dict[str, Callable[[], Any]] = {
    "one dimension": lambda: local_sgd(4),
    "clip": lambda: local_sgd(4, hook=hooks.clip(1.0)),
    "clip inside": lambda: local_sgd(4, hook=hooks.after(3, hooks.clip(1.0))),
}


def _refused(rank: int, place: str, name: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        attach(sharded(place), _REFUSED[name]())


@pytest.mark.parametrize(
    ("place", "name", "message"),
    [
        ("fsdp-2", "one dimension", "shard over a mesh of two dimensions"),
        ("hsdp-4", "clip", "clip_grad_norm_"),
        ("hsdp-4", "clip inside", "clip_grad_norm_"),
    ],
)
def test_refused(request: pytest.FixtureRequest, place: str, name: str, message: str) -> None:
    run_on(request, place, _refused, name, message)

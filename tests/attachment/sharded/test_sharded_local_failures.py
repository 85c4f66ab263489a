"""``local_sgd`` across replicas of sharded models: its failures, and other hooks in its place."""

from __future__ import annotations

import copy
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
    same_bits,
    sharded,
    trap_of,
    with_traps,
)

from torch_commhook import PeerError, attach, hooks
from torch_commhook.attachment.sharded import step as replica
from torch_commhook.attachment.sharded.step import ShardedStep
from torch_commhook.collectives.futures import await_lazy
from torch_commhook.hooks import local_sgd, outer_sgd

# ---- failures ------------------------------------------------------------------------------------


class _FailsAfter(hooks.error_feedback):
    """Fails after it has sent a message and stored the error: in the last bucket, or in any."""

    def __init__(self, *, in_any: bool = False) -> None:
        super().__init__(INT4())
        self.is_failing = False
        self.in_any = in_any

    def average(self, bucket: Any) -> Any:
        result = super().average(bucket)
        is_last = bucket.index() == bucket.bucket_count() - 1
        if self.is_failing and (self.in_any or is_last):
            await_lazy(result).wait()  # nothing goes on that writes to what it remembers
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


# ---- failures of exchanges in the background -----------------------------------------------------


def _in_background(hook: Any = None, fragments: int = 2, delay: int = 1, mix: float = 0.5) -> Any:
    outer = outer_sgd(0.7, 0.5)
    return local_sgd(4, outer=outer, hook=hook, fragments=fragments, delay=delay, mix=mix)


@on_processes(*PLACES)
def test_a_rank_that_fails_where_an_exchange_begins(rank: int, place: str) -> None:
    """Each rank in turn. All ranks of the mesh raise where it was to end, and nothing has moved."""
    for fails in range(int(place[-1])):
        failing = _FailsAfter(in_any=True)
        model = sharded(place)
        handle = attach(model, _in_background(failing))
        optimizer = sgd(model.parameters())
        step = partial(one_step, model, optimizer, rank)
        for number in range(5):
            step(number)
        before = tensors_by_path(handle.state_dict())
        failing.is_failing = rank == fails
        step(5)  # an exchange begins
        own = values(model)
        optimizer.zero_grad()
        failing.is_failing = False
        assert _raised(partial(step, 6)) == ("OwnError" if rank == fails else "PeerError"), fails
        assert not same_bits(values(model), own), "the step was not its own"
        now = tensors_by_path(handle.state_dict())
        for name, tensor in before.items():
            assert "local_sgd_parameter" in name or torch.equal(tensor, now[name]), name
        steps = handle.stats().steps
        for number in (7, 8):
            step(number)
        assert handle.stats().steps == steps + 1
        handle.synchronize()
        assert between_replicas(values(model), rank, place), fails
        handle.remove()


@on_processes(*PLACES)
def test_a_state_after_one_shards_failure(rank: int, place: str) -> None:
    """It is saved after the exchange of one shard has failed, and before that raises."""
    failing = _FailsAfter(in_any=True)
    model, other = sharded(place), sharded(place)
    handle = attach(model, _in_background(failing))
    again = attach(other, _in_background(_FailsAfter(in_any=True)))
    step = partial(one_step, model, sgd(model.parameters()), rank)
    failing.is_failing = rank == 1
    for number in range(2):
        step(number)
    state, here = copy.deepcopy(handle.state_dict()), values(model)
    in_flight = {name: value for name, value in state["local_steps"].items() if "in" in name}
    assert in_flight == {"steps_in_flight": -1}
    failing.is_failing = False
    assert _raised(partial(step, 2)) == ("OwnError" if rank == 1 else "PeerError")
    step(3)
    again.load_state_dict(state)
    assert same_bits(values(other), here)
    optimizer = sgd(other.parameters())
    for number in range(3):
        one_step(other, optimizer, rank, number)
    for each, of in ((handle, model), (again, other)):
        each.synchronize()
        assert between_replicas(values(of), rank, place)
        each.remove()


_AGREEMENTS = {
    "it tells": (replica, "is_on_any_rank"),
    "it ends": (ShardedStep, "end_exchange"),
}


def _interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", _AGREEMENTS)
@on_processes("hsdp-4")
def test_ctrl_c_where_a_replica_agrees(rank: int, place: str, where: str) -> None:
    """Ctrl-C on rank 1 where the ranks of its replica agree on an exchange that went well.

    No rank counts the exchange as failed: the replica's next step ends it.
    """
    model = sharded(place)
    handle = attach(model, _in_background())
    optimizer = sgd(model.parameters())
    said = []
    for number in range(10):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and number == 2:
                patch.setattr(*_AGREEMENTS[where], _interrupt)
            try:
                one_step(model, optimizer, rank, number)
            except (KeyboardInterrupt, PeerError) as error:
                said.append((number, type(error).__name__))
    assert said == {0: [(2, "PeerError")], 1: [(2, "KeyboardInterrupt")]}.get(rank, [])
    assert handle.stats().steps == 4
    tensors = tensors_by_path(handle.state_dict()).items()
    anchors = [tensor for name, tensor in tensors if "local_sgd_anchor" in name]
    assert between_replicas(anchors, rank, place)
    handle.synchronize()
    assert between_replicas(values(model), rank, place)
    handle.remove()


@on_processes(*PLACES)
def test_a_backward_that_fails_meanwhile(rank: int, place: str) -> None:
    """It is a replica's own, and ends no exchange that is under way."""
    model = with_traps()
    by_layer(model, Mesh.of(place))
    handle = attach(model, _in_background(fragments=1, delay=3, mix=0.0))
    step = partial(one_step, model, sgd(model.parameters()), rank)
    for number in range(4):
        step(number)
    trap_of(model, "middle").raises_in = "backward" if rank == 0 else ""
    in_replica = rank // shards_of(place) == 0
    expected = "OwnError" if rank == 0 else "PeerError" if in_replica else "nothing"
    assert _raised(partial(step, 4)) == expected
    trap_of(model, "middle").raises_in = ""
    for number in range(5, 8 if in_replica else 7):  # as many steps as the others
        step(number)
    assert handle.stats().steps == 1
    assert between_replicas(values(model), rank, place)  # of one fragment, with no mix
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


@pytest.mark.parametrize(
    "hook", [hooks.clip(1.0), hooks.after(3, hooks.clip(1.0))], ids=["clip", "clip inside"]
)
@on_ranks("hsdp-4")
def test_refused(rank: int, place: str, hook: hooks.Hook) -> None:
    with pytest.raises(TypeError, match="clip_grad_norm_"):
        attach(sharded(place), local_sgd(4, hook=hook))

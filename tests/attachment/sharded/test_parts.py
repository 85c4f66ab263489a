"""Hooks on parts of a sharded model, on models around it, and on models that are compiled."""

from __future__ import annotations

import pytest
import torch
from rank_pool import RankPool
from sharded_failures import Failing, outcome
from sharded_models import (
    Layers,
    Mesh,
    batch,
    by_layer,
    gradients_of_step,
    layers,
    local,
    loss_of,
    reshard,
    same_bits,
)
from torch import nn
from torch._dynamo import compiled_autograd

from torch_commhook import attach, hooks

PLACES = ["fsdp-2", "hsdp-4", "replicate-2"]


def _halves(place: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Layers(5, 7, 6), Layers(6, 5, 1))
    mesh = Mesh.of(place)
    for half in model:
        for layer in half:
            if any(True for _ in layer.parameters()):
                mesh.apply(layer)
    mesh.apply(model)
    return model


def _on_each_half(rank: int, place: str) -> list[str]:
    expected = [gradients_of_step(_halves(place), rank, number) for number in range(2)]
    model = _halves(place)
    handles = [
        attach(half, hook)
        for half, hook in zip(model, (hooks.allreduce(), hooks.cast()), strict=True)
    ]
    found = []
    for number in range(2):
        got = gradients_of_step(model, rank, number)
        if not same_bits(got[:4], expected[number][:4]):
            found.append(f"step {number}: the first half has other bits")
        if same_bits(got[4:], expected[number][4:]):
            found.append(f"step {number}: the second half's hook does nothing")
    found += [f"{handle.stats().steps} steps" for handle in handles if handle.stats().steps != 2]
    handles[1].replace(hooks.allreduce())
    if not same_bits(gradients_of_step(model, rank, 0), expected[0]):
        found.append("replaced")
    for handle in handles:
        handle.remove()
    if not same_bits(gradients_of_step(model, rank, 1), expected[1]):
        found.append("removed")
    return found


@pytest.mark.parametrize("place", PLACES)
def test_a_hook_on_each_half(ranks: RankPool, place: str) -> None:
    assert ranks.run(_on_each_half, place) == [[]] * ranks.world_size


def _half_that_fails(rank: int, place: str, which: int) -> list[str]:
    """The model's root is around the part, which hears of its forward from the second one on."""
    expected = [gradients_of_step(_halves(place), rank, number) for number in range(2)]
    model = _halves(place)
    failing = [Failing(), Failing()]
    handles = [attach(half, hook) for half, hook in zip(model, failing, strict=True)]
    found = [] if same_bits(gradients_of_step(model, rank, 0), expected[0]) else ["first"]
    for fails in range(int(place[-1])):
        failing[which].fails_in = 0 if rank == fails else None
        found += outcome(model, rank, 3, fails)
        failing[which].fails_in = None
        for number in range(2):
            if not same_bits(gradients_of_step(model, rank, number), expected[number]):
                found.append(f"after rank {fails} has failed")
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_a_hook_on_a_half_that_fails(ranks: RankPool, place: str, which: int) -> None:
    assert ranks.run(_half_that_fails, place, which) == [[]] * ranks.world_size


def _around(rank: int, place: str) -> list[str]:
    """The model itself is not sharded, its parts are."""
    inner = _halves(place)
    expected = gradients_of_step(_halves(place), rank)
    model = nn.Sequential(inner, nn.Identity())
    handle = attach(model, hooks.allreduce())
    found = [] if same_bits(gradients_of_step(model, rank), expected) else ["other bits"]
    found += [] if handle.stats().steps == 1 else ["steps"]
    handle.remove()
    return found


@pytest.mark.parametrize("place", PLACES)
def test_a_model_around_a_sharded_one(ranks: RankPool, place: str) -> None:
    assert ranks.run(_around, place) == [[]] * ranks.world_size


def _part_alone(rank: int, place: str) -> list[str]:
    """A part is called without the rest of the model."""
    model = layers()
    by_layer(model, Mesh.of(place))
    handle = attach(model, hooks.allreduce())
    model(batch(rank, 0))
    inputs = batch(rank, 1)
    model[0](inputs).square().sum().backward()
    model.zero_grad()
    expected = layers()
    by_layer(expected, Mesh.of(place))
    found = (
        []
        if same_bits(gradients_of_step(model, rank), gradients_of_step(expected, rank))
        else ["other bits"]
    )
    handle.remove()
    return found


@pytest.mark.parametrize("place", PLACES)
def test_a_part_that_is_called_alone(ranks: RankPool, place: str) -> None:
    assert ranks.run(_part_alone, place) == [[]] * ranks.world_size


def _compiled(rank: int, place: str, attach_compiled: bool) -> list[str]:
    """Forwards are cut at PyTorch's own hooks, in front of which the library's stands."""
    torch._dynamo.reset()
    plain, model = layers(), layers()
    for each in (plain, model):
        by_layer(each, Mesh.of(place))
    expected = [gradients_of_step(plain, rank, number) for number in range(3)]
    compiled = torch.compile(model, backend="aot_eager")
    handle = attach(compiled if attach_compiled else model, hooks.allreduce())
    found = []
    for number in range(3):
        model.zero_grad()
        loss_of(compiled(batch(rank, number))).backward()
        reshard(model)
        got = [local(p.grad) for p in model.parameters()]
        for one, other in zip(got, expected[number], strict=True):
            if not torch.allclose(one, other, rtol=1e-5, atol=1e-6):
                found.append(f"step {number}: other gradients")
    if handle.stats().steps != 3:
        found.append("steps")
    handle.remove()
    return found


@pytest.mark.parametrize("attach_compiled", [False, True], ids=["model", "compiled model"])
@pytest.mark.parametrize("place", ["fsdp-2", "replicate-2"])
def test_a_compiled_model(ranks: RankPool, place: str, attach_compiled: bool) -> None:
    assert ranks.run(_compiled, place, attach_compiled) == [[]] * ranks.world_size


def _under_compiled_autograd(rank: int, place: str) -> list[str]:
    """There ``fully_shard`` gives other gradients, with a hook or without."""
    torch._dynamo.reset()
    plain, model = layers(), layers()
    for each in (plain, model):
        by_layer(each, Mesh.of(place))
    expected = gradients_of_step(plain, rank)
    handle = attach(model, hooks.blockwise())
    loss = loss_of(model(batch(rank, 1)))
    found = []
    with compiled_autograd._enable(torch.compile(backend="eager")):
        for backward in (loss.backward, lambda: loss_of(model(batch(rank, 2))).backward()):
            try:
                backward()
            except (RuntimeError, AssertionError) as error:
                found.append(str(error)[:57])
    handle.replace(hooks.allreduce())
    found.append(str(same_bits(gradients_of_step(model, rank), expected)))
    handle.remove()
    return found


@pytest.mark.parametrize("place", PLACES)
def test_compiled_autograd_is_refused(ranks: RankPool, place: str) -> None:
    message = "torch_commhook: compiled autograd runs this backward, in "
    if torch.__version__ < "2.12":  # refuses it by itself
        message = "queue_callback() is only supported when Compiled Autograd"
    assert ranks.run(_under_compiled_autograd, place) == [[message] * 2 + ["True"]] * (
        ranks.world_size
    )


def _after_evaluation(rank: int, place: str) -> list[str]:
    """After a forward without gradients the root's parameters are whole."""
    plain, model = layers(), layers()
    for each in (plain, model):
        Mesh.of(place).apply(each)
    with torch.no_grad():
        model(batch(rank, 0))
    handle = attach(model, hooks.allreduce())
    found = (
        []
        if same_bits(gradients_of_step(model, rank), gradients_of_step(plain, rank))
        else ["other bits"]
    )
    handle.remove()
    return found


@pytest.mark.parametrize("place", PLACES)
def test_attached_after_an_evaluation(ranks: RankPool, place: str) -> None:
    assert ranks.run(_after_evaluation, place) == [[]] * ranks.world_size

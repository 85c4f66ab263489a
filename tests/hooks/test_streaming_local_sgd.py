"""``hooks.local_sgd`` with fragments that are exchanged in turn, in the background."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layered_net import BUCKET_CAP_MB, batch
from local_training import (
    MEAN,
    ROADS,
    attached,
    farthest,
    net,
    parameters_of,
    same,
    train,
)
from rank_pool import RankPool
from streaming_reference import Held, Streaming, trained_as
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach, hooks
from torch_commhook.hooks import local_sgd, outer_sgd
from torch_commhook.process_group import RecordingProcessGroup

pytestmark = pytest.mark.usefixtures("no_hook_on_optimizers_left")

_OUTER = outer_sgd(0.7, 0.5)
_STEPS = 16

# ---- what it computes ----------------------------------------------------------------------------


def _all_trained(rank: int, settings: list[dict[str, Any]], road: str) -> list[Any]:
    made = [local_sgd(7, outer=_OUTER, **each) for each in settings]
    return [trained_as(rank, hook, _STEPS, road) for hook in made]


def _differences(ranks: RankPool, settings: list[dict[str, Any]], road: str) -> list[str]:
    results = ranks.run(_all_trained, settings, road, timeout=120)
    found = []
    start = parameters_of(net())
    for number, each in enumerate(settings):
        wanted = Streaming(ranks.world_size, 7, outer=_OUTER, **each)
        for _ in range(_STEPS):
            wanted.step()
        assert farthest(start, parameters_of(wanted.anchor)) > 1e-3
        anchors = dict(wanted.anchor.named_parameters())
        for rank, of_rank in enumerate(results):
            parameters, anchor = of_rank[number]
            if not farthest(parameters, parameters_of(wanted.models[rank])) < 2e-6:
                found.append(f"{each}: parameters of rank {rank}")
            if not farthest([anchors[name] for name in anchor], list(anchor.values())) < 2e-6:
                found.append(f"{each}: anchors of rank {rank}")
            if not same(list(anchor.values()), list(results[0][number][1].values())):
                found.append(f"{each}: anchors of rank {rank} are not those of rank 0")
    return found


@pytest.mark.parametrize("fragments", [1, 2, 3])
@pytest.mark.parametrize("pool", ["two_ranks", "three_ranks"])
def test_it_moves_as_plain_pytorch_does(
    request: pytest.FixtureRequest, pool: str, fragments: int
) -> None:
    settings = [
        {"fragments": fragments, "delay": delay, "mix": mix}
        for delay in (0, 1, 2)
        for mix in (0.0, 0.5)
    ]
    assert _differences(request.getfixturevalue(pool), settings, "module") == []


@pytest.mark.parametrize("road", ROADS[1:])
def test_on_each_road(two_ranks: RankPool, road: str) -> None:
    assert _differences(two_ranks, [{"fragments": 3, "delay": 2, "mix": 0.5}], road) == []


def _one_fragment_at_once(rank: int) -> list[Any]:
    """With and without naming what does nothing: parameters, and what a state has."""
    found: list[Any] = []
    for settings in ({}, {"fragments": 1, "delay": 0, "mix": 0}):
        model, handle = attached(local_sgd(3, hook=hooks.cast(), **settings))
        train(model, torch.optim.AdamW(model.parameters(), lr=0.01), rank, 7)
        state = handle.state_dict()
        found.append((parameters_of(model), state["local_steps"], list(state[f"rank{rank}"])))
        handle.synchronize()
        handle.remove()
    return found


def test_one_fragment_without_delay_is_local_sgd(two_ranks: RankPool) -> None:
    """Of which ``test_local_sgd.py`` tests the rest."""
    assert str(local_sgd(3, fragments=1, delay=0, mix=0)) == "local_sgd(3)"
    for plain, named in two_ranks.run(_one_fragment_at_once):
        assert same(plain[0], named[0])
        assert plain[1:] == named[1:] == ({"done": 1, "is_open": False}, ["local_sgd_parameter"])


def _in_16_bits(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters and an anchor; a mixed parameter must be rounded once, from float32."""
    model = nn.Linear(16, 16, bias=False).to(torch.bfloat16)
    handle = attach(model, local_sgd(1, outer=MEAN, mix=0.3))
    start = model.weight.detach().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradient = torch.randn(16, 16, generator=torch.Generator().manual_seed(rank))
    (model.weight.float() * gradient).sum().backward()
    own = model.weight.detach().add(model.weight.grad, alpha=-0.1)
    optimizer.step()
    anchor = handle.state_dict()["shared"]["local_sgd_anchor"]["weight"]
    mixed = (own.float() * 0.3).add(anchor, alpha=1.0 - 0.3)
    assert torch.equal(model.weight, mixed.to(torch.bfloat16))
    handle.synchronize()
    anchor = handle.state_dict()["shared"]["local_sgd_anchor"]["weight"]
    handle.remove()
    return start, own, anchor


def test_anchors_of_16_bits_are_float32(two_ranks: RankPool) -> None:
    (start, first, anchor), (_, second, other) = two_ranks.run(_in_16_bits)
    # The first exchange leaves ranks apart, and the second takes them together.
    assert anchor.dtype == torch.float32 and torch.equal(anchor, other)
    mean = (first.float() + second.float()) / 2
    mixed = [(0.3 * own.float() + 0.7 * mean).to(torch.bfloat16) for own in (first, second)]
    assert torch.allclose(anchor, (mixed[0].float() + mixed[1].float()) / 2, atol=2e-3)
    assert not torch.allclose(anchor, start, atol=2e-2)


# ---- what travels, and when ----------------------------------------------------------------------


def _recorded(rank: int, fragments: int) -> list[Any]:
    recording = RecordingProcessGroup(dist.group.WORLD)
    model = net()
    handle = attach(
        model,
        local_sgd(6, fragments=fragments, delay=1),
        process_group=recording,
        bucket_cap_mb=BUCKET_CAP_MB,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recording.clear()  # of what attach() sends
    sent = []
    for step in range(13):
        before = recording.total.bytes_sent
        train(model, optimizer, rank, range(step, step + 1))
        sent.append(recording.total.bytes_sent - before)
    stats = handle.stats()
    assert handle.state_dict()["steps"] == stats.steps
    handle.synchronize()
    handle.remove()
    return [sent, stats.steps, stats.bytes_sent, stats.bytes_sent_last_step]


@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_a_fragment_travels_at_a_time(two_ranks: RankPool, fragments: int) -> None:
    """Layers of one size: of 6 steps as much as without fragments, in as many equal parts."""
    numel = sum(parameter.numel() for parameter in net().parameters())
    for sent, steps, counted, last in two_ranks.run(_recorded, fragments):
        every = 6 // fragments
        expected = [4 * numel // fragments if n % every == every - 1 else 0 for n in range(13)]
        assert sent == expected
        assert (steps, counted, last) == (2 * fragments, sum(sent), 4 * numel // fragments)


def _late(rank: int) -> list[bool]:
    """Whether results were there when a step returned, until the one that needs them."""
    held = Held()
    model, handle = attached(local_sgd(4, outer=MEAN, hook=held, delay=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, rank, 3)
    found = []
    for step in range(3, 7):
        if step == 6:
            threading.Timer(0.2, held.release.set).start()
        train(model, optimizer, rank, range(step, step + 1))
        found.append(held.release.is_set())
    assert handle.stats().steps == 1
    handle.remove()
    return found


def test_only_the_step_that_needs_a_result_waits(two_ranks: RankPool) -> None:
    assert two_ranks.run(_late) == [[False, False, False, True]] * 2


# ---- together at will ----------------------------------------------------------------------------


def _synchronized(rank: int, road: str, steps: int, uneven: bool) -> list[Any]:
    hook = local_sgd(6, outer=_OUTER, fragments=2, delay=2, mix=0.5)
    model, handle = attached(hook, road)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, rank, steps + (rank if uneven else 0))
    apart, before = parameters_of(model), handle.stats().steps
    handle.synchronize()
    together, exchanges = parameters_of(model), handle.stats().steps - before
    handle.synchronize()
    assert same(together, parameters_of(model))
    state = handle.state_dict()
    anchors = state["shared"]["local_sgd_anchor"]
    names = dict(net().named_parameters())
    assert same(together, [anchors[name] for name in names])
    train(model, optimizer, rank, 4)
    assert handle.stats().steps == before + exchanges  # a round begins anew: 3, and 2 on its way
    train(model, optimizer, rank, 1)
    assert handle.stats().steps == before + exchanges + 1
    handle.synchronize()
    handle.remove()
    return [apart, together, exchanges, state["local_steps"]]


@pytest.mark.parametrize(
    ("road", "steps", "uneven", "exchanges"),
    [
        ("module", 1, True, 1),  # the other rank, a step ahead, has not begun one either
        ("module", 3, True, 2),  # one is under way
        ("module", 5, False, 1),  # one has just ended
        ("ddp", 4, False, 2),
    ],
)
def test_synchronize(
    two_ranks: RankPool, road: str, steps: int, uneven: bool, exchanges: int
) -> None:
    first, second = two_ranks.run(_synchronized, road, steps, uneven)
    assert not same(first[0], second[0])
    assert same(first[1], second[1])
    assert first[2] == second[2] == exchanges
    for position in (first[3], second[3]):
        assert position.pop("fragments") > 1
        assert position == {
            "done": 0,
            "is_open": False,
            "steps_of_round": 0,
            "fragment": 0,
            "steps_in_flight": -1,
        }


def _new_round(rank: int) -> list[int]:
    """The exchanges after each step that follows a ``synchronize()`` with nothing to do."""
    model, handle = attached(local_sgd(4, outer=_OUTER, delay=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, rank, 6)  # an exchange has just ended, in the middle of a round
    handle.synchronize()
    found = [handle.stats().steps]
    for step in range(6):
        train(model, optimizer, rank, range(step, step + 1))
        found.append(handle.stats().steps)
    handle.remove()
    return found


def test_synchronize_begins_a_round_where_nobody_is_apart(two_ranks: RankPool) -> None:
    assert two_ranks.run(_new_round) == [[1, 1, 1, 1, 1, 1, 2]] * 2


# ---- what becomes of an exchange under way -------------------------------------------------------


def _left(rank: int, way: str) -> list[Any]:
    hook = local_sgd(2, hook=hooks.error_feedback(hooks.blockwise(bits=4)), delay=1)
    model, handle = attached(hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, rank, 2)
    here = parameters_of(model)
    found: list[Any] = []
    if way == "removed":
        with pytest.warns(RuntimeWarning, match="was removed 2 steps after"):
            handle.remove()
        state = handle.state_dict()
        assert state["local_steps"]["steps_in_flight"] == 0
        model, handle = attached(hook)  # goes on from there
        handle.load_state_dict(state)
        train(model, torch.optim.SGD(model.parameters(), lr=0.01), rank, range(2, 3))
        found.append(parameters_of(model))
    elif way == "replaced":
        with pytest.warns(RuntimeWarning, match="was removed 2 steps after"):
            handle.replace(hooks.allreduce())
        assert same(here, parameters_of(model))
        handle.remove()
    elif way == "lost":
        with pytest.warns(RuntimeWarning, match="lost its model"):
            inner = weakref.ref(model)
            del model, optimizer
            gc.collect()
        assert inner() is None
        return found
    elif way == "goes on":
        train(model, optimizer, rank, range(2, 3))
        found.append(parameters_of(model))
    handle.remove()
    return found


def test_it_is_left_while_one_is_under_way(two_ranks: RankPool) -> None:
    wanted = two_ranks.run(_left, "goes on")
    got = two_ranks.run(_left, "removed")
    assert all(same(*a, *b) for a, b in zip(got, wanted, strict=True))
    assert two_ranks.run(_left, "replaced") == [[], []]
    assert two_ranks.run(_left, "lost") == [[], []]


def _rebuilt(rank: int) -> tuple[list[Tensor], list[bool]]:
    """DDP forms its buckets anew in the fifth step, when an exchange is under way."""
    model = DDP(net(), bucket_cap_mb=BUCKET_CAP_MB)
    hook = local_sgd(6, outer=_OUTER, fragments=2, delay=2, mix=0.5)
    handle = attach(model, hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.5)
    steps, changes = handle._attached.local_steps, []
    settle = handle._attached.memory.before_change
    assert settle is not None

    def change() -> None:
        changes.append(steps._background is not None and steps._background.means is None)
        settle()

    handle._attached.memory.before_change = change
    for step in range(10):
        optimizer.zero_grad()
        if step < 3:
            with model.no_sync():
                model(batch(rank, step)).square().sum().backward()
        else:
            model(batch(rank, step)).square().sum().backward()
        optimizer.step()
    found = parameters_of(model), changes
    handle.synchronize()
    handle.remove()
    return found


def test_buckets_that_are_formed_anew_meanwhile(two_ranks: RankPool) -> None:
    wanted = Streaming(2, 6, 2, 2, 0.5, _OUTER)
    for _ in range(10):
        wanted.step()
    for rank, (parameters, changes) in enumerate(two_ranks.run(_rebuilt)):
        assert any(changes)
        assert farthest(parameters, parameters_of(wanted.models[rank])) < 2e-6

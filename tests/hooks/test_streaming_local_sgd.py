"""``hooks.local_sgd`` with fragments that are exchanged in turn, in the background."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layered_net import BUCKET_CAP_MB
from local_training import (
    MEAN,
    ROADS,
    Training,
    all_same,
    attached,
    backward,
    farthest,
    net,
    parameters_of,
    same,
    train,
)
from on_ranks import of_all_ranks, on_ranks
from rank_pool import RankPool
from streaming_reference import Held, Streaming
from torch import Tensor, nn

from torch_commhook import attach, hooks
from torch_commhook.hooks import local_sgd, outer_sgd
from torch_commhook.hooks.fragments import fragments_of
from torch_commhook.process_group import RecordingProcessGroup
from torch_commhook.testing import run_ranks

pytestmark = pytest.mark.usefixtures("no_hook_on_optimizers_left")

_OUTER = outer_sgd(0.7, 0.5)
_STEPS = 16

# ---- what it computes ----------------------------------------------------------------------------


def _all_trained(rank: int, settings: list[dict[str, Any]], road: str) -> list[Any]:
    """For each of the settings, the parameters, and the anchors by name."""
    found = []
    for each in settings:
        run = Training(rank, local_sgd(7, outer=_OUTER, **each), road, momentum=0.5)
        run.train(_STEPS)
        found.append((run.parameters, run.anchors))
        run.end()
    return found


def _differences(results: list[Any], settings: list[dict[str, Any]]) -> list[str]:
    """The settings and ranks whose results differ from the reference's."""
    found = []
    start = parameters_of(net())
    for number, each in enumerate(settings):
        wanted = Streaming(len(results), 7, outer=_OUTER, **each)
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
@pytest.mark.parametrize("ranks", [2, 3])
def test_it_moves_as_plain_pytorch_does(two_ranks: RankPool, ranks: int, fragments: int) -> None:
    """Two ranks are processes, and three are threads."""
    settings = [
        {"fragments": fragments, "delay": delay, "mix": mix}
        for delay in (0, 1, 2)
        for mix in (0.0, 0.5)
    ]
    if ranks == 2:
        results = two_ranks.run(_all_trained, settings, "module", timeout=120)
    else:
        results = run_ranks(_all_trained, ranks, settings, "module")
    assert _differences(results, settings) == []


@pytest.mark.parametrize("road", ROADS[1:])
def test_on_each_road(road: str) -> None:
    settings = [{"fragments": 3, "delay": 2, "mix": 0.5}]
    assert _differences(run_ranks(_all_trained, 2, settings, road), settings) == []


@on_ranks(2)
def test_one_fragment_without_delay_is_local_sgd(rank: int) -> None:
    """With and without naming what does nothing. ``test_local_sgd.py`` tests the rest."""
    assert str(local_sgd(3, fragments=1, delay=0, mix=0)) == "local_sgd(3)"
    found: list[Any] = []
    for settings in ({}, {"fragments": 1, "delay": 0, "mix": 0}):
        model, handle = attached(local_sgd(3, hook=hooks.cast(), **settings))
        train(model, torch.optim.AdamW(model.parameters(), lr=0.01), rank, 7)
        state = handle.state_dict()
        assert state["local_steps"] == {"done": 1, "is_open": False}
        assert list(state[f"rank{rank}"]) == ["local_sgd_parameter"]
        found.append(parameters_of(model))
        handle.synchronize()
        handle.remove()
    assert same(*found)


@on_ranks(2)
def test_anchors_of_16_bits_are_float32(rank: int) -> None:
    """A mixed parameter is rounded once, from float32."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False).to(torch.bfloat16)
    handle = attach(model, local_sgd(1, outer=MEAN, mix=0.3))

    def anchor() -> Tensor:
        return handle.state_dict()["shared"]["local_sgd_anchor"]["weight"]

    start = model.weight.detach().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradient = torch.randn(16, 16, generator=torch.Generator().manual_seed(rank))
    (model.weight.float() * gradient).sum().backward()
    own = model.weight.detach().add(model.weight.grad, alpha=-0.1)
    optimizer.step()
    mixed = (own.float() * 0.3).add(anchor(), alpha=1.0 - 0.3)
    assert torch.equal(model.weight, mixed.to(torch.bfloat16))
    # The first exchange leaves ranks apart, and the second takes them together.
    handle.synchronize()
    last = anchor()
    handle.remove()
    assert last.dtype == torch.float32 and all_same([[each] for each in of_all_ranks(last)])
    every = [each.float() for each in of_all_ranks(own)]
    mean = sum(every) / 2
    mixed = sum((0.3 * each + 0.7 * mean).to(torch.bfloat16).float() for each in every) / 2
    assert torch.allclose(last, mixed, atol=2e-3)
    assert not torch.allclose(last, start, atol=2e-2)


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
    run = Training(rank, local_sgd(4, outer=MEAN, hook=held, delay=3))
    run.train(3)
    found = []
    for step in range(3, 7):
        if step == 6:
            threading.Timer(0.2, held.release.set).start()
        run.train()
        found.append(held.release.is_set())
    assert run.exchanges == 1
    run.handle.remove()
    return found


def test_only_the_step_that_needs_a_result_waits(two_ranks: RankPool) -> None:
    assert two_ranks.run(_late) == [[False, False, False, True]] * 2


# ---- together at will ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("road", "steps", "uneven", "exchanges"),
    [
        ("module", 1, True, 1),  # the other rank, a step ahead, has not begun one either
        ("module", 3, True, 2),  # one is under way
        ("module", 5, False, 1),  # one has just ended
        ("ddp", 4, False, 2),
    ],
)
@on_ranks(2)
def test_synchronize(rank: int, road: str, steps: int, uneven: bool, exchanges: int) -> None:
    run = Training(rank, local_sgd(6, outer=_OUTER, fragments=2, delay=2, mix=0.5), road)
    run.train(steps + (rank if uneven else 0))
    apart, before = run.parameters, run.exchanges
    run.handle.synchronize()
    together = run.parameters
    assert all_same(of_all_ranks(together)) and not all_same(of_all_ranks(apart))
    assert run.exchanges == before + exchanges
    run.handle.synchronize()
    assert same(together, run.parameters)
    anchors = run.anchors
    assert same(together, [anchors[name] for name, _ in net().named_parameters()])
    position = run.handle.state_dict()["local_steps"]
    assert position.pop("fragments") > 1
    assert position == {
        "done": 0,
        "is_open": False,
        "steps_of_round": 0,
        "fragment": 0,
        "steps_in_flight": -1,
    }
    run.train(4)
    assert run.exchanges == before + exchanges  # a round begins anew: 3, and 2 on its way
    run.train()
    assert run.exchanges == before + exchanges + 1
    run.end()


@on_ranks(2)
def test_synchronize_begins_a_round_where_nobody_is_apart(rank: int) -> None:
    run = Training(rank, local_sgd(4, outer=_OUTER, delay=2))
    run.train(6)  # an exchange has just ended, in the middle of a round
    run.handle.synchronize()
    found = [run.exchanges]
    for _ in range(6):
        run.train()
        found.append(run.exchanges)
    run.handle.remove()
    assert found == [1, 1, 1, 1, 1, 1, 2]


# ---- what becomes of an exchange under way -------------------------------------------------------


def _left(rank: int, way: str) -> list[Any]:
    hook = local_sgd(2, hook=hooks.error_feedback(hooks.blockwise(bits=4)), delay=1)
    run = Training(rank, hook)
    run.train(2)
    here = run.parameters
    if way == "lost":
        with pytest.warns(RuntimeWarning, match="lost its model"):
            inner = weakref.ref(run.model)
            del run.model, run.optimizer
            gc.collect()
        assert inner() is None
        return []
    if way == "replaced":
        with pytest.warns(RuntimeWarning, match="was removed 2 steps after"):
            run.handle.replace(hooks.allreduce())
        assert same(here, run.parameters)
        run.handle.remove()
        return []
    if way == "removed":
        with pytest.warns(RuntimeWarning, match="was removed 2 steps after"):
            run.handle.remove()
        state = run.handle.state_dict()
        assert state["local_steps"]["steps_in_flight"] == 0
        run = Training(rank, hook)  # goes on from there
        run.handle.load_state_dict(state)
        run.done = 2
    run.train()
    run.handle.remove()
    return run.parameters


def test_it_is_left_while_one_is_under_way(two_ranks: RankPool) -> None:
    wanted = two_ranks.run(_left, "goes on")
    got = two_ranks.run(_left, "removed")
    assert all(map(same, got, wanted))
    assert two_ranks.run(_left, "replaced") == [[], []]
    assert two_ranks.run(_left, "lost") == [[], []]


def _rebuilt(rank: int) -> tuple[list[Tensor], list[bool]]:
    """DDP forms its buckets anew in the fifth step, when an exchange is under way."""
    hook = local_sgd(6, outer=_OUTER, fragments=2, delay=2, mix=0.5)
    run = Training(rank, hook, "ddp", momentum=0.5)
    steps, memory, changes = run.handle._attached.local_steps, run.handle._attached.memory, []
    settle = memory.before_change
    assert settle is not None

    def change() -> None:
        changes.append(steps._background is not None and steps._background.means is None)
        settle()

    memory.before_change = change
    for step in range(10):
        run.optimizer.zero_grad()
        with run.model.no_sync() if step < 3 else nullcontext():
            backward(run.model, rank, step)
        run.optimizer.step()
    found = run.parameters, changes
    run.end()
    return found


def test_buckets_that_are_formed_anew_meanwhile(two_ranks: RankPool) -> None:
    wanted = Streaming(2, 6, 2, 2, 0.5, _OUTER)
    for _ in range(10):
        wanted.step()
    for rank, (parameters, changes) in enumerate(two_ranks.run(_rebuilt)):
        assert any(changes)
        assert farthest(parameters, parameters_of(wanted.models[rank])) < 2e-6


# ---- how parameters are cut into fragments -------------------------------------------------------


def _transformer(layers: int) -> dict[str, int]:
    sizes = {"embed.weight": 100, "head.weight": 60, "norm.weight": 4, "norm.bias": 4}
    for layer in range(layers):
        sizes |= {f"layers.{layer}.attn.0.weight": 30, f"layers.{layer}.mlp.2.bias": 5}
    return sizes


def test_layers_are_dealt_out_in_turn() -> None:
    found = fragments_of(_transformer(12), 3)
    for layer in range(12):
        assert found[f"layers.{layer}.attn.0.weight"] == layer % 3
        assert found[f"layers.{layer}.mlp.2.bias"] == layer % 3


def test_modules_outside_of_layers_go_where_there_is_least() -> None:
    found = fragments_of(_transformer(7), 3)  # 105, 70 and 70 elements in layers
    assert found["embed.weight"] == 1
    assert found["head.weight"] == 2
    assert found["norm.weight"] == found["norm.bias"] == 0


def test_layers_of_several_lists_are_numbered_on() -> None:
    sizes = {f"{part}.{layer}.weight": 1 for part in ("up", "down.blocks") for layer in range(5)}
    found = fragments_of(sizes, 4)
    assert [found[f"down.blocks.{layer}.weight"] for layer in range(5)] == [0, 1, 2, 3, 0]
    assert [found[f"up.{layer}.weight"] for layer in range(5)] == [1, 2, 3, 0, 1]


def test_the_order_does_not_matter() -> None:
    sizes = list(_transformer(11).items())
    wanted = fragments_of(dict(sizes), 4)
    for seed in range(5):
        random.Random(seed).shuffle(sizes)
        assert fragments_of(dict(sizes), 4) == wanted


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ({"a.weight": 8, "a.bias": 1, "b.weight": 4}, 2),
        ({"a.weight": 8, "a.bias": 1, "b.weight": 4}, 3),
        ({"layers.0.weight": 8, "layers.1.weight": 8, "head.weight": 2}, 3),
        ({"weight": 0, "bias": 0, "other": 0}, 3),
        (_transformer(3), 10),
    ],
)
def test_no_fragment_is_empty(sizes: dict[str, int], count: int) -> None:
    found = fragments_of(sizes, count)
    assert found.keys() == sizes.keys()
    assert set(found.values()) == set(range(count))


@pytest.mark.usefixtures("one_rank")
def test_more_fragments_than_parameters() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(
        ValueError, match="fragments must be at most 2, the number of the model's parameters"
    ):
        attach(model, local_sgd(8, fragments=3))
    attach(model, local_sgd(8, fragments=2)).remove()
    model, handle = attached(local_sgd(20))
    with pytest.raises(ValueError, match="fragments must be at most 12"):
        handle.replace(local_sgd(20, fragments=13))
    assert handle.is_attached
    handle.remove()

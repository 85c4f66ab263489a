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
    Held,
    Streaming,
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
from on_ranks import of_all_ranks, on_processes, on_ranks
from rank_pool import RankPool
from torch import Tensor, nn

from torch_commhook import attach, hooks
from torch_commhook.hooks import local_sgd, outer_sgd
from torch_commhook.hooks.local_sgd import fragments_of
from torch_commhook.process_group import RecordingProcessGroup
from torch_commhook.testing import run_ranks

pytestmark = pytest.mark.usefixtures("no_hook_on_optimizers_left")

_OUTER = outer_sgd(0.7, 0.5)
_STEPS = 16

# ---- what it computes ----------------------------------------------------------------------------


def _moves_as_plain_pytorch_does(rank: int, settings: list[dict[str, Any]], road: str) -> None:
    """Compare the parameters and anchors of each of the settings with the reference's."""
    for each in settings:
        run = Training(rank, local_sgd(7, outer=_OUTER, **each), road, momentum=0.5)
        run.train(_STEPS)
        wanted = Streaming(dist.get_world_size(), 7, outer=_OUTER, **each)
        for _ in range(_STEPS):
            wanted.step()
        assert farthest(parameters_of(net()), parameters_of(wanted.anchor)) > 1e-3
        assert farthest(run.parameters, parameters_of(wanted.models[rank])) < 2e-6, each
        named, anchors = dict(wanted.anchor.named_parameters()), run.anchors
        own = list(anchors.values())
        assert farthest([named[name] for name in anchors], own) < 2e-6, each
        assert all_same(of_all_ranks(own)), each
        run.end()


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
        two_ranks.run(_moves_as_plain_pytorch_does, settings, "module")
    else:
        run_ranks(_moves_as_plain_pytorch_does, ranks, settings, "module")


@pytest.mark.parametrize("road", ROADS[1:])
@on_ranks(2)
def test_on_each_road(rank: int, road: str) -> None:
    settings = {"fragments": 3, "delay": 2, "mix": 0.5}
    _moves_as_plain_pytorch_does(rank, [settings], road)


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


@pytest.mark.parametrize("fragments", [1, 2, 3])
@on_processes
def test_a_fragment_travels_at_a_time(rank: int, fragments: int) -> None:
    """Layers of one size: of 6 steps as much as without fragments, in as many equal parts."""
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
    every, each = 6 // fragments, 4 * sum(p.numel() for p in model.parameters()) // fragments
    flag = torch.float32.itemsize  # whether a user has written parameters
    assert sent == [each + flag if n % every == every - 1 else 0 for n in range(13)]
    assert (stats.steps, stats.bytes_sent) == (2 * fragments, sum(sent) - 2 * fragments * flag)
    assert stats.bytes_sent_last_step == each


@on_processes
def test_only_the_step_that_needs_a_result_waits(rank: int) -> None:
    held = Held()
    run = Training(rank, local_sgd(4, outer=MEAN, hook=held, delay=3))
    run.train(3)
    for step in range(3, 7):
        if step == 6:
            threading.Timer(0.2, held.release.set).start()
        run.train()
        assert held.release.is_set() == (step == 6)
    assert run.exchanges == 1
    run.handle.remove()


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


@on_processes
def test_it_is_left_while_one_is_under_way(rank: int) -> None:
    hook = local_sgd(2, hook=hooks.error_feedback(hooks.blockwise(bits=4)), delay=1)
    goes_on, removed, replaced, lost = (Training(rank, hook) for _ in range(4))
    for run in (goes_on, removed, replaced, lost):
        run.train(2)
    goes_on.train()
    goes_on.handle.remove()

    with pytest.warns(RuntimeWarning, match="was removed 2 steps after"):
        removed.handle.remove()
    state = removed.handle.state_dict()
    assert state["local_steps"]["steps_in_flight"] == 0
    resumed = Training(rank, hook)  # goes on from there
    resumed.handle.load_state_dict(state)
    resumed.done = 2
    resumed.train()
    resumed.handle.remove()
    assert same(resumed.parameters, goes_on.parameters)

    here = replaced.parameters
    with pytest.warns(RuntimeWarning, match="was removed 2 steps after"):
        replaced.handle.replace(hooks.allreduce())
    assert same(here, replaced.parameters)
    replaced.handle.remove()

    with pytest.warns(RuntimeWarning, match="lost its model"):
        inner = weakref.ref(lost.model)
        del run, lost.model, lost.optimizer
        gc.collect()
    assert inner() is None


@on_processes
def test_buckets_that_are_formed_anew_meanwhile(rank: int) -> None:
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
    wanted = Streaming(2, 6, 2, 2, 0.5, _OUTER)
    for _ in range(10):
        wanted.step()
    assert any(changes)
    assert farthest(run.parameters, parameters_of(wanted.models[rank])) < 2e-6
    run.end()


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

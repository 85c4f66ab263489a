"""``hooks.local_sgd``: steps of each rank's own, and the exchange after every H of them."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layered_net import batch
from local_training import (
    MEAN,
    ROADS,
    all_same,
    attached,
    backward,
    farthest,
    net,
    parameters_of,
    same,
    steps_done,
    train,
)
from rank_pool import RankPool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import optimizer as torch_optimizer

from torch_commhook import attach, hooks
from torch_commhook.hooks import Hook, local_sgd, outer_sgd
from torch_commhook.process_group import RecordingProcessGroup
from torch_commhook.testing import run_ranks, simulate

pytestmark = pytest.mark.usefixtures("no_hook_on_optimizers_left")


# ---- what it computes ----------------------------------------------------------------------------


def _trained(rank: int, road: str, hook: Any, steps: int) -> list[Tensor]:
    model, handle = attached(hook, road)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), rank, steps)
    handle.remove()
    return parameters_of(model)


@pytest.mark.parametrize("road", ROADS)
def test_with_h_1_it_is_data_parallel_sgd(two_ranks: RankPool, road: str) -> None:
    got = two_ranks.run(_trained, road, local_sgd(1, outer=MEAN), 5)
    wanted = two_ranks.run(_trained, road, hooks.allreduce(), 5)
    assert all_same(got)
    start = parameters_of(net())
    assert farthest(got[0], wanted[0]) < 2e-7 < 1e-3 < farthest(start, wanted[0])


def _reference(H: int, outer: outer_sgd, steps: int, ranks: int = 2) -> list[Tensor]:  # noqa: N803
    """Plain PyTorch, all ranks in one process."""
    anchor = net()
    outer_optimizer = torch.optim.SGD(
        anchor.parameters(),
        lr=outer.lr,
        momentum=outer.momentum,
        nesterov=outer.nesterov and outer.momentum > 0,
    )
    models = [copy.deepcopy(anchor) for _ in range(ranks)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.5) for m in models]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train(model, optimizer, rank, range(step, step + 1))
        if (step + 1) % H == 0:
            every = zip(*(model.parameters() for model in models), strict=True)
            for parameter, own in zip(anchor.parameters(), every, strict=True):
                parameter.grad = parameter.detach() - torch.stack(list(own)).mean(0)
            outer_optimizer.step()
            for model in models:
                model.load_state_dict(anchor.state_dict())
    return parameters_of(models[0])


def _with_inner_momentum(rank: int, hook: Any, steps: int, road: str) -> list[Tensor]:
    model, handle = attached(hook, road)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    train(model, optimizer, rank, steps)
    handle.remove()
    return parameters_of(model)


@pytest.mark.parametrize(
    "outer",
    [outer_sgd(), outer_sgd(0.5, 0.8, nesterov=False), outer_sgd(0.9, 0.0)],
    ids=["nesterov", "momentum", "plain"],
)
def test_it_moves_as_plain_pytorch_does(two_ranks: RankPool, outer: outer_sgd) -> None:
    got = two_ranks.run(_with_inner_momentum, local_sgd(3, outer=outer), 9, "module")
    assert all_same(got)
    wanted = _reference(3, outer, 9)
    assert farthest(got[0], wanted) < 1e-6
    assert farthest(wanted, _reference(3, MEAN, 9)) > 1e-4


def _between_exchanges(rank: int, road: str) -> list[Any]:
    model, handle = attached(local_sgd(2), road)
    alone = net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, alone)]
    found = []
    for step in range(3):
        for each, optimizer in zip((model, alone), optimizers, strict=True):
            train(each, optimizer, rank, range(step, step + 1))
        gradients = [[p.grad.clone() for p in m.parameters()] for m in (model, alone)]
        found.append((same(*gradients), same(parameters_of(model), parameters_of(alone))))
    handle.remove()
    return found


@pytest.mark.parametrize("road", ROADS)
def test_gradients_and_steps_in_between_are_the_ranks_own(two_ranks: RankPool, road: str) -> None:
    for found in two_ranks.run(_between_exchanges, road):
        assert found[:2] == [(True, True), (True, False)]
        assert found[2] == (False, False)


def _regression(rank: int, hook: Any) -> list[float]:
    """Losses on all ranks' data, which differ, after so many steps on this rank's own."""
    generator = torch.Generator().manual_seed(1)
    every = torch.randn(4, 64, 20, generator=generator) + torch.arange(4.0).view(4, 1, 1) / 4
    truth = torch.randn(20, generator=generator)
    targets = every @ truth + 0.1 * torch.randn(4, 64, generator=generator)
    model = nn.Linear(20, 1, bias=False)
    nn.init.zeros_(model.weight)
    handle = attach(model, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(64):
        optimizer.zero_grad()
        (model(every[rank])[:, 0] - targets[rank]).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            losses.append((model(every)[..., 0] - targets).square().mean().item())
    handle.remove()
    return losses


def test_it_converges_on_four_ranks() -> None:
    runs = {
        name: run_ranks(_regression, 4, hook)
        for name, hook in {
            "allreduce": hooks.allreduce(),
            "local": local_sgd(8, outer=MEAN),
            "momentum": local_sgd(8, outer=outer_sgd(0.7, 0.5)),
            "int4": local_sgd(
                8, outer=MEAN, hook=hooks.error_feedback(hooks.blockwise(bits=4, block_size=32))
            ),
        }.items()
    }
    first, optimum = runs["allreduce"][0][0], runs["allreduce"][0][-1]
    assert first > 100 * optimum
    for name, losses in runs.items():
        ends = [of_rank[-1] for of_rank in losses]
        assert max(ends) == min(ends), name
        assert ends[0] < 1.5 * optimum, name


def test_an_error_that_is_fed_back_is_that_of_the_distances(two_ranks: RankPool) -> None:
    """Coarse messages lose much of each round, and little of all rounds together."""

    def ends(hook: Any) -> list[Tensor]:
        return two_ranks.run(_trained, "module", local_sgd(2, outer=MEAN, hook=hook), 24)[0]

    exact = ends(hooks.allreduce())
    without = farthest(ends(hooks.blockwise(bits=4, block_size=256)), exact)
    fed_back = farthest(ends(hooks.error_feedback(hooks.blockwise(bits=4, block_size=256))), exact)
    assert 0 < fed_back < 0.7 * without


# ---- traffic -------------------------------------------------------------------------------------

_INT4 = "int4 with error feedback"


def _inner(name: str) -> Hook:
    if name == _INT4:
        return hooks.error_feedback(hooks.blockwise(bits=4))
    return hooks.cast(torch.bfloat16) if name == "cast" else hooks.allreduce()


def _traffic(rank: int, name: str, H: int, road: str) -> Any:  # noqa: N803
    model, handle = attached(local_sgd(H, hook=_inner(name)), road)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), rank, 16)
    stats = handle.stats()
    handle.remove()
    return stats.steps, stats.bytes_sent, stats.bytes_sent_last_step, len(stats.buckets)


@pytest.mark.parametrize("road", ["module", "ddp"])
@pytest.mark.parametrize("name", ["allreduce", "cast", _INT4])
def test_traffic_falls_by_h(two_ranks: RankPool, name: str, road: str) -> None:
    numel = sum(parameter.numel() for parameter in net().parameters())
    each = two_ranks.run(_traffic, name, 1, road)[0]
    steps, sent, last, buckets = two_ranks.run(_traffic, name, 8, road)[0]
    assert (each[0], steps) == (16, 2)
    assert buckets > 1
    assert last == each[2]
    assert sent == 2 * last
    if name != _INT4:
        assert last == (4 if name == "allreduce" else 2) * numel  # 2 (W - 1) / W = 1 for 2 ranks
    else:
        assert last < 4 * numel / 6


def _recorded(rank: int, name: str, staged: bool) -> tuple[list[int], int | None, int]:
    recording = RecordingProcessGroup(dist.group.WORLD)
    model = net()
    handle = attach(model, local_sgd(4, hook=_inner(name)), process_group=recording)
    if staged:
        handle.register_prehook(lambda gradients: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recording.clear()  # of what attach() sends
    counts = []
    for step in range(8):
        train(model, optimizer, rank, range(step, step + 1))
        counts.append(len(recording.records))
    sent, total = handle.stats().bytes_sent, recording.total.bytes_sent
    handle.remove()
    return counts, sent, total


@pytest.mark.parametrize(
    ("name", "staged"), [("allreduce", False), ("allreduce", True), (_INT4, False)]
)
def test_nothing_travels_but_what_is_counted(two_ranks: RankPool, name: str, staged: bool) -> None:
    numel = sum(parameter.numel() for parameter in net().parameters())
    inner = _inner(name)
    wire_bytes = simulate(inner, [[torch.zeros(numel)]] * 2).bytes_sent
    results = two_ranks.run(_recorded, name, staged)
    for (counts, sent, total), of_rank in zip(results, wire_bytes, strict=True):
        assert counts[:3] == [0, 0, 0] and counts[3] == counts[6] > 0
        assert sent == total == 2 * of_rank


# ---- what a step is ------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
class TestSteps:
    def _model(self, H: int = 100, model: nn.Module | None = None) -> Any:  # noqa: N803
        return attached(local_sgd(H, outer=MEAN), model=model)

    def test_gradients_that_add_up_are_one_step(self) -> None:
        model, handle = self._model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(3):
            optimizer.zero_grad()
            with handle.no_sync():
                backward(model, 0, 0)
            backward(model, 0, 1)
            backward(model, 0, 2)
            optimizer.step()
            assert steps_done(handle) == number + 1
        handle.remove()

    @pytest.mark.parametrize("to_none", [False, True])
    def test_a_step_that_is_skipped_is_one(self, to_none: bool) -> None:
        model, handle = self._model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(4):
            optimizer.zero_grad(set_to_none=to_none)
            backward(model, 0, 0)
            assert steps_done(handle) == number
            if number % 2:
                optimizer.step()
        handle.remove()

    def test_an_update_by_hand_is_a_step(self) -> None:
        model, handle = self._model(H=2)
        for number in range(5):
            model.zero_grad()
            backward(model, 0, number)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
        assert (handle.stats().steps, steps_done(handle)) == (2, 0)
        handle.synchronize()  # of the fifth nobody has told
        handle.synchronize()
        assert handle.stats().steps == 3
        handle.remove()

    def test_a_closure_is_part_of_its_step(self) -> None:
        model, handle = self._model()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(batch(0)).square().sum()
            loss.backward()
            return loss

        for number in range(2):
            optimizer.step(closure)
            assert steps_done(handle) == number + 1
        handle.remove()

    def test_a_forward_without_gradients_ends_nothing(self) -> None:
        model, handle = self._model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        backward(model, 0, 0)
        optimizer.zero_grad()
        with torch.no_grad():
            model(batch(0))
        assert steps_done(handle) == 0
        model(batch(0))
        assert steps_done(handle) == 1
        model(batch(0))
        assert steps_done(handle) == 1
        handle.remove()

    def test_several_optimizers_of_a_model_take_one_step_together(self) -> None:
        model, handle = self._model()
        layers = model.layers
        first = torch.optim.SGD(layers[:3].parameters(), lr=0.01)
        second = torch.optim.AdamW(layers[3:].parameters(), lr=0.01)
        for number in range(3):
            model.zero_grad()
            backward(model, 0, number)
            first.step()
            assert steps_done(handle) == number
            second.step()
            assert steps_done(handle) == number + 1
        handle.remove()

    def test_parameters_that_nobody_steps_hold_nothing_up(self) -> None:
        model, handle = self._model()
        optimizer = torch.optim.SGD(model.layers[:3].parameters(), lr=0.01)
        for number in range(3):
            model.zero_grad()
            backward(model, 0, number)
            assert steps_done(handle) == number
            optimizer.step()
        handle.remove()

    def test_an_optimizer_of_another_model_is_none_of_its_business(self) -> None:
        _, handle = self._model()
        other = net()
        optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
        train(other, optimizer, 0, 2)
        assert steps_done(handle) == 0
        handle.remove()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_parameters_that_are_loaded_later_are_the_anchor(self, dtype: torch.dtype) -> None:
        model, handle = self._model(H=2, model=net(dtype))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            loaded = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
            model.load_state_dict(loaded)
            train(model, optimizer, 0, 4)
            assert same(parameters_of(model), list(loaded.values()))
        handle.remove()

    def test_a_copy_of_the_model_is_another_one(self) -> None:
        model, handle = self._model()
        backward(model, 0, 0)
        copied = copy.deepcopy(model)
        model.zero_grad()
        copied(batch(0))
        assert steps_done(handle) == 0
        model(batch(0))
        assert steps_done(handle) == 1
        handle.remove()

    def test_small_moves_of_16_bits_add_up(self) -> None:
        model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
        nn.init.ones_(model.weight)
        handle = attach(model, local_sgd(1, outer=outer_sgd(0.1, 0.0)))
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
        ones = torch.ones(1, 1, dtype=torch.bfloat16)
        for _ in range(10):  # each less than half of what bfloat16 can tell from 1
            optimizer.zero_grad()
            model(ones).sum().backward()
            optimizer.step()
        assert model.weight.item() == pytest.approx(1 - 10 * 0.1 * 2.0**-6, abs=2.0**-9)
        handle.remove()

    def test_stages_see_each_backward(self) -> None:
        model, handle = self._model(H=4)
        seen = []
        handle.register_prehook(lambda gradients: tuple(2 * g for g in gradients))
        handle.register_post_accumulate_hook(lambda bucket: seen.append(bucket.index()))
        other = net()
        for each in (model, other):
            backward(each, 0, 0)
        for parameter, plain in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(parameter.grad, 2 * plain.grad)
        assert seen == list(range(len(seen))) and len(seen) > 1
        assert handle.stats().steps == 0
        handle.remove()


def _with_a_skip(rank: int, road: str) -> tuple[list[Tensor], int, int]:
    """Rank 1 alone has an infinite gradient in the step that comes before an exchange."""
    model, handle = attached(local_sgd(3), road)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    taken = 0
    for step in range(6):
        optimizer.zero_grad()
        loss = model(batch(rank, step)).square().sum()
        if rank == 1 and step == 2:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        before = parameters_of(model)
        scaler.step(optimizer)
        taken += not same(before, parameters_of(model))
        scaler.update()
    found = parameters_of(model), handle.stats().steps, taken
    handle.remove()
    return found


@pytest.mark.parametrize("road", ["module", "ddp"])
def test_a_scaler_that_skips_a_step_on_one_rank(two_ranks: RankPool, road: str) -> None:
    first, second = two_ranks.run(_with_a_skip, road)
    assert same(first[0], second[0])
    assert (first[1], second[1]) == (2, 2)
    assert (first[2], second[2]) == (6, 5)


# ---- together at will ----------------------------------------------------------------------------


def _synchronized(rank: int, road: str, uneven: bool) -> list[list[Tensor]]:
    model, handle = attached(local_sgd(4), road)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle.register_prehook(lambda gradients: None)  # so that each backward has its stages
    train(model, optimizer, rank, 4 + (rank if uneven else 2))
    apart = parameters_of(model)
    handle.synchronize()
    together = parameters_of(model)
    handle.synchronize()
    again = parameters_of(model)
    assert handle.stats().steps == 2
    handle.remove()
    with pytest.raises(RuntimeError, match="not attached any more"):
        handle.synchronize()
    return [apart, together, again]


@pytest.mark.parametrize(("road", "uneven"), [("module", False), ("module", True), ("ddp", False)])
def test_synchronize(two_ranks: RankPool, road: str, uneven: bool) -> None:
    first, second = two_ranks.run(_synchronized, road, uneven)
    assert not same(first[0], second[0])
    assert same(first[1], second[1])
    assert same(first[1], first[2]) and same(first[1], second[2])


@pytest.mark.usefixtures("one_rank")
def test_synchronize_is_nothing_to_other_hooks() -> None:
    model, handle = attached(hooks.allreduce())
    before = parameters_of(model)
    handle.synchronize()
    assert same(before, parameters_of(model))
    handle.remove()


# ---- several models, and none --------------------------------------------------------------------


def _two_models(rank: int) -> Any:
    models = [net(), net()]
    handles = [
        attach(model, local_sgd(H, outer=MEAN)) for model, H in zip(models, (2, 3), strict=True)
    ]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        for model in models:
            backward(model, rank, step)
        optimizer.step()
    counts = [handle.stats().steps for handle in handles]
    handles[0].remove()
    own = parameters_of(models[0])
    for step in range(3):
        optimizer.zero_grad()
        for model in models:
            backward(model, rank, step)
        optimizer.step()
    found = counts, own, parameters_of(models[0]), parameters_of(models[1])
    handles[1].remove()
    return found


def test_two_models_and_one_optimizer(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_two_models)
    assert first[0] == second[0] == [3, 2]
    assert same(first[1], second[1])
    assert not same(first[2], second[2])  # on their own from there on
    assert same(first[3], second[3])


class _Container(torch.optim.Optimizer):
    """Of an optimizer for each part of a model, which may fail and may be asked to step alone."""

    def __init__(self, *parts: nn.Module) -> None:
        self.parts = [torch.optim.SGD(part.parameters(), lr=0.01) for part in parts]
        self.fails = False
        super().__init__([p for part in parts for p in part.parameters()], {})

    def step(self, closure: Any = None) -> None:
        if self.fails:
            raise ArithmeticError
        for part in self.parts:
            part.step()


def _in_container(rank: int, parts: int) -> list[Any]:
    model, handle = attached(local_sgd(2), "module")
    of_it = [model] if parts == 1 else list(model.children())
    container = _Container(*of_it)
    counts: list[Any] = []
    for step in range(6):
        backward(model, rank, step)
        container.fails = step == 3
        if container.fails:
            with pytest.raises(ArithmeticError):
                container.step()
            for part in container.parts:  # its own step never ends, and those of others count
                part.step()
        else:
            container.step()
        container.zero_grad()
        counts.append((steps_done(handle), handle.stats().steps))
    handle.remove()
    return counts


@pytest.mark.parametrize("parts", [1, 2])
def test_an_optimizer_of_optimizers_takes_one_step(two_ranks: RankPool, parts: int) -> None:
    expected = [(1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3)]
    assert two_ranks.run(_in_container, parts) == [expected] * 2


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("road", "removed"),
    # A DDP gets back PyTorch's Python reducer, whose hooks keep it.
    [(road, removed) for road in ROADS for removed in (False, True) if road != ROADS[2]]
    + [(ROADS[2], False)],
)
def test_nothing_keeps_a_model(road: str, removed: bool) -> None:
    model, handle = attached(local_sgd(2), road)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, 0, 2)
    copied = copy.deepcopy(model) if road == "module" else None
    assert torch_optimizer._global_optimizer_post_hooks
    if removed:
        handle.remove()
        assert not torch_optimizer._global_optimizer_post_hooks
    inner = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert inner() is None
    assert not torch_optimizer._global_optimizer_post_hooks
    if copied is not None:
        train(copied, torch.optim.SGD(copied.parameters(), lr=0.01), 0, 1)


# ---- what it refuses -----------------------------------------------------------------------------


def test_it_prints_as_it_is_written() -> None:
    assert str(local_sgd(8)) == "local_sgd(8)"
    assert str(local_sgd(8, outer=outer_sgd(0.7, 0.9))) == "local_sgd(8)"
    assert (
        str(local_sgd(8, outer=MEAN, hook=hooks.cast()))
        == "local_sgd(8, outer=outer_sgd(lr=1.0, momentum=0.0, nesterov=True), hook=cast(bfloat16))"
    )
    text = "local_sgd(8, fragments=3, delay=2, mix=0.25)"
    assert str(local_sgd(8, fragments=3, delay=2, mix=0.25)) == text


@pytest.mark.usefixtures("one_rank")
class TestRefused:
    def test_without_attach(self) -> None:
        model = DDP(net())
        model.register_comm_hook(None, local_sgd(2))
        with pytest.raises(RuntimeError, match=r"use torch_commhook\.attach"):
            backward(model, 0, 0)

    @pytest.mark.parametrize("road", ROADS)
    def test_uneven_inputs(self, road: str) -> None:
        model, handle = attached(local_sgd(2), road)
        with pytest.raises(RuntimeError, match="equally many steps"):
            handle.join()
        if road == "ddp":
            with pytest.raises(RuntimeError, match="equally many steps"), model.join():
                backward(model, 0, 0)
        with suppress(RuntimeError):
            handle.remove()

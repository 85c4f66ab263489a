"""``hooks.local_sgd``: what it computes and sends, what counts as a step, what it refuses."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layered_net import batch
from local_training import (
    MEAN,
    ROADS,
    Streaming,
    Training,
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
from on_ranks import of_all_ranks, on_processes, on_ranks
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import optimizer as torch_optimizer

from torch_commhook import attach, hooks
from torch_commhook.hooks import local_sgd, outer_sgd
from torch_commhook.process_group import RecordingProcessGroup
from torch_commhook.testing import run_ranks, simulate

pytestmark = pytest.mark.usefixtures("no_hook_on_optimizers_left")

# ---- what it computes ----------------------------------------------------------------------------


def _trained(
    rank: int, hook: Any, steps: int, road: str = "module", momentum: float = 0.0
) -> list[Tensor]:
    run = Training(rank, hook, road, momentum=momentum)
    run.train(steps)
    run.handle.remove()
    return run.parameters


@pytest.mark.parametrize("road", ROADS)
@on_ranks(2)
def test_with_h_1_it_is_data_parallel_sgd(rank: int, road: str) -> None:
    got, wanted = (
        _trained(rank, hook, 5, road) for hook in (local_sgd(1, outer=MEAN), hooks.allreduce())
    )
    assert all_same(of_all_ranks(got))
    assert farthest(got, wanted) < 2e-7 < 1e-3 < farthest(parameters_of(net()), wanted)


def _reference(outer: outer_sgd) -> list[Tensor]:
    reference = Streaming(2, 3, fragments=1, delay=0, mix=0.0, outer=outer)
    for _ in range(9):
        reference.step()
    return parameters_of(reference.models[0])


@pytest.mark.parametrize(
    "outer",
    [outer_sgd(), outer_sgd(0.5, 0.8, nesterov=False), outer_sgd(0.9, 0.0)],
    ids=["nesterov", "momentum", "plain"],
)
@on_processes
def test_it_moves_as_plain_pytorch_does(rank: int, outer: outer_sgd) -> None:
    got, wanted = _trained(rank, local_sgd(3, outer=outer), 9, momentum=0.5), _reference(outer)
    assert all_same(of_all_ranks(got))
    assert farthest(got, wanted) < 1e-6
    assert farthest(wanted, _reference(MEAN)) > 1e-4


@pytest.mark.parametrize("road", ROADS)
@on_ranks(2)
def test_gradients_and_steps_in_between_are_the_ranks_own(rank: int, road: str) -> None:
    run, alone = Training(rank, local_sgd(2), road), net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
    found = []
    for step in range(3):
        run.train()
        train(alone, optimizer, rank, range(step, step + 1))
        gradients = ([p.grad for p in model.parameters()] for model in (run.model, alone))
        found.append((same(*gradients), same(run.parameters, parameters_of(alone))))
    run.handle.remove()
    assert found == [(True, True), (True, False), (False, False)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_error_that_is_fed_back_is_that_of_the_distances(ranks: int) -> None:
    """Coarse messages lose much of each round, and little of all rounds together."""

    def ends(hook: Any) -> list[Tensor]:
        results = run_ranks(_trained, ranks, local_sgd(2, outer=MEAN, hook=hook), 24)
        assert all_same(results)
        return results[0]

    exact = ends(hooks.allreduce())
    without = farthest(ends(hooks.blockwise(bits=4, block_size=256)), exact)
    fed_back = farthest(ends(hooks.error_feedback(hooks.blockwise(bits=4, block_size=256))), exact)
    assert 0 < fed_back < 0.7 * without


# ---- what it sends, and when ---------------------------------------------------------------------

INSIDE = {
    "allreduce": hooks.allreduce,
    "cast": lambda: hooks.cast(torch.bfloat16),
    "int4 with error feedback": lambda: hooks.error_feedback(hooks.blockwise(bits=4)),
}
NUMEL = sum(parameter.numel() for parameter in net().parameters())


@pytest.mark.parametrize("road", ["module", "ddp"])
@pytest.mark.parametrize("name", INSIDE)
@on_ranks(2)
def test_traffic_falls_by_h(rank: int, name: str, road: str) -> None:
    found = []
    for H in (1, 8):  # noqa: N806
        run = Training(rank, local_sgd(H, hook=INSIDE[name]()), road)
        run.train(16)
        found.append(run.handle.stats())
        run.handle.remove()
    each, late = found
    assert (each.steps, late.steps) == (16, 2)
    assert len(late.buckets) > 1
    last = late.bytes_sent_last_step
    assert last == each.bytes_sent_last_step
    assert late.bytes_sent == 2 * last
    if name in ("allreduce", "cast"):
        assert last == (4 if name == "allreduce" else 2) * NUMEL  # 2 (W - 1) / W = 1 for 2 ranks
    else:
        assert last < 4 * NUMEL / 6


@pytest.mark.parametrize(
    ("name", "staged"),
    [("allreduce", False), ("allreduce", True), ("int4 with error feedback", False)],
)
@on_processes
def test_nothing_travels_but_what_is_counted(rank: int, name: str, staged: bool) -> None:
    recording = RecordingProcessGroup(dist.group.WORLD)
    model = net()
    handle = attach(model, local_sgd(4, hook=INSIDE[name]()), process_group=recording)
    if staged:
        handle.register_prehook(lambda gradients: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recording.clear()  # of what attach() sends
    counts = []
    for step in range(8):
        train(model, optimizer, rank, range(step, step + 1))
        counts.append(len(recording.records))
    assert counts[:3] == [0, 0, 0] and counts[3] == counts[6] > 0
    exchange = simulate(INSIDE[name](), [[torch.zeros(NUMEL)]] * 2).bytes_sent[rank]
    flags = 2 * torch.float32.itemsize  # whether a user has written parameters
    assert handle.stats().bytes_sent == recording.total.bytes_sent - flags == 2 * exchange
    handle.remove()


# ---- writes to parameters ------------------------------------------------------------------------

WRITTEN = {
    "defaults": local_sgd(2),
    "int4": local_sgd(2, hook=hooks.error_feedback(hooks.blockwise(bits=4))),
    "error reset": local_sgd(
        2, outer=MEAN, hook=hooks.error_feedback(hooks.topk(0.1)), error_reset=True
    ),
    "mix": local_sgd(4, fragments=2, delay=1, mix=0.5),
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", WRITTEN)
@on_ranks(2)
def test_anchors_stay_alike_whatever_each_rank_writes(rank: int, name: str, road: str) -> None:
    """A write that differs between ranks is a part of their training."""
    run = Training(rank, copy.deepcopy(WRITTEN[name]), road)
    for number in range(9):
        with torch.no_grad():
            for index, parameter in enumerate(run.model.parameters()):
                if (rank + index + number) % 3:
                    parameter.view(-1)[0].add_(0.01 * (rank + 1))
        if number == 4:
            run.handle.synchronize()
            assert all_same(of_all_ranks([*run.parameters, *run.anchors.values()]))
        run.train()
    run.handle.synchronize()
    assert all_same(of_all_ranks([*run.parameters, *run.anchors.values()]))
    run.handle.remove()


@pytest.mark.parametrize("at", [0, 1])
@on_ranks(2)
def test_a_write_of_one_rank_moves_as_its_steps_do(rank: int, at: int) -> None:
    """At the begin of a round as in its middle."""
    run = Training(rank, local_sgd(2, outer=outer_sgd(0.7, 0.5)), lr=0.0)
    expected = net()
    outer = torch.optim.SGD(expected.parameters(), lr=0.7, momentum=0.5, nesterov=True)
    for number in range(6):
        if number % 2 == at:
            with torch.no_grad():
                for parameter in run.model.parameters():
                    parameter += rank  # on average half of the ranks' difference
            for parameter in expected.parameters():
                parameter.grad = torch.full_like(parameter, -0.5)
        run.train()
        if number % 2:
            outer.step()
            assert farthest(run.parameters, parameters_of(expected)) < 1e-5
    run.end()


@pytest.mark.parametrize("name", ["defaults", "error reset"])
@on_ranks(2)
def test_a_state_of_a_round_in_which_ranks_wrote_different_values(rank: int, name: str) -> None:
    run = Training(rank, copy.deepcopy(WRITTEN[name]))
    run.train(2)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter += 0.01 * rank
    run.train()
    state = copy.deepcopy(run.handle.state_dict())
    run.end()
    resumed = Training(rank, copy.deepcopy(WRITTEN[name]))
    resumed.handle.load_state_dict(state)
    resumed.train()
    resumed.handle.synchronize()
    assert all_same(of_all_ranks([*resumed.parameters, *resumed.anchors.values()]))
    resumed.handle.remove()


def _vector_to_parameters(model: nn.Module, values: list[Tensor]) -> None:
    flat = torch.cat([value.flatten() for value in values])
    nn.utils.vector_to_parameters(flat, model.parameters())


def _copy_data(model: nn.Module, values: list[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data.copy_(value)


def _set_data(model: nn.Module, values: list[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data = value.clone()


@torch.no_grad()
def _copy(model: nn.Module, values: list[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("load", [_vector_to_parameters, _copy_data, _set_data, _copy])
@on_ranks(2)
def test_equal_writes_between_rounds_are_a_load(rank: int, load: Any, name: str) -> None:
    run = Training(rank, copy.deepcopy(WRITTEN[name]), lr=0.0)
    for number in range(2):
        values = [torch.full_like(each, number + 0.5) for each in run.parameters]
        load(run.model, values)
        run.train(4)
        if name == "mix":
            run.handle.synchronize()
        assert same(run.parameters, values)  # nothing has moved from them
    run.end()


@pytest.mark.parametrize("layer", [0, -1])
@on_ranks(2)
def test_parameters_of_two_dtypes_in_one_bucket(rank: int, layer: int) -> None:
    """Their gradients have one dtype, and each is exchanged in its own."""
    model = net()
    model.layers[layer].bfloat16()
    for parameter in model.layers[layer].parameters():
        parameter.grad_dtype = torch.float32
    handle = attach(model, local_sgd(1, outer=outer_sgd(1.0, 0.5)))
    before = parameters_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2e-4 * rank, dtype=torch.float32)
    optimizer.step()
    after = parameters_of(model)
    for old, new in zip(before, after, strict=True):
        if old.dtype is torch.float32:
            assert torch.allclose(old - new, torch.full_like(old, 1.5e-4), atol=1e-7)
    handle.synchronize()  # nothing to do
    assert same(parameters_of(model), after)
    assert handle.stats().steps == 1
    handle.remove()


# ---- what counts as a step -----------------------------------------------------------------------


@pytest.fixture
def run(one_rank: None) -> Iterator[Training]:
    """A training of one rank, with an exchange after 100 steps."""
    training = Training(0, local_sgd(100, outer=MEAN))
    yield training
    training.handle.remove()


@pytest.mark.usefixtures("one_rank")
class TestSteps:
    def test_gradients_that_add_up_are_one_step(self, run: Training) -> None:
        for number in range(3):
            run.optimizer.zero_grad()
            with run.handle.no_sync():
                backward(run.model, 0, 0)
            backward(run.model, 0, 1)
            backward(run.model, 0, 2)
            run.optimizer.step()
            assert steps_done(run.handle) == number + 1

    @pytest.mark.parametrize("to_none", [False, True])
    def test_a_step_that_is_skipped_is_one(self, run: Training, to_none: bool) -> None:
        for number in range(4):
            run.optimizer.zero_grad(set_to_none=to_none)
            backward(run.model, 0, 0)
            assert steps_done(run.handle) == number
            if number % 2:
                run.optimizer.step()

    def test_an_update_by_hand_is_a_step(self) -> None:
        run = Training(0, local_sgd(2, outer=MEAN))
        for number in range(5):
            run.model.zero_grad()
            backward(run.model, 0, number)
            with torch.no_grad():
                for parameter in run.model.parameters():
                    parameter -= 0.01 * parameter.grad
        assert (run.exchanges, steps_done(run.handle)) == (2, 0)
        run.handle.synchronize()  # of the fifth nobody has told
        run.handle.synchronize()
        assert run.exchanges == 3
        run.handle.remove()

    def test_a_closure_is_part_of_its_step(self, run: Training) -> None:
        optimizer = torch.optim.LBFGS(run.model.parameters(), lr=0.01, max_iter=3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = run.model(batch(0)).square().sum()
            loss.backward()
            return loss

        for number in range(2):
            optimizer.step(closure)
            assert steps_done(run.handle) == number + 1

    def test_a_forward_without_gradients_ends_nothing(self, run: Training) -> None:
        backward(run.model, 0, 0)
        run.optimizer.zero_grad()
        with torch.no_grad():
            run.model(batch(0))
        assert steps_done(run.handle) == 0
        for _ in range(2):
            run.model(batch(0))
            assert steps_done(run.handle) == 1

    def test_several_optimizers_of_a_model_take_one_step_together(self, run: Training) -> None:
        layers = run.model.layers
        first = torch.optim.SGD(layers[:3].parameters(), lr=0.01)
        second = torch.optim.AdamW(layers[3:].parameters(), lr=0.01)
        for number in range(3):
            run.model.zero_grad()
            backward(run.model, 0, number)
            first.step()
            assert steps_done(run.handle) == number
            second.step()
            assert steps_done(run.handle) == number + 1

    def test_parameters_that_nobody_steps_hold_nothing_up(self, run: Training) -> None:
        optimizer = torch.optim.SGD(run.model.layers[:3].parameters(), lr=0.01)
        for number in range(3):
            run.model.zero_grad()
            backward(run.model, 0, number)
            assert steps_done(run.handle) == number
            optimizer.step()

    def test_an_optimizer_that_steps_only_some_parameters_on_each_rank(self, run: Training) -> None:
        optimizer = ZeroRedundancyOptimizer(run.model.parameters(), torch.optim.SGD, lr=0.01)
        backward(run.model, 0, 0)
        before = run.parameters
        with pytest.raises(RuntimeError, match="ZeroRedundancyOptimizer steps only some parameter"):
            optimizer.step()
        assert same(run.parameters, before)

    def test_an_optimizer_steps_after_backward(self, run: Training) -> None:
        for parameter in run.model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: run.optimizer.step())
        before = run.parameters
        with pytest.raises(RuntimeError, match=r"local_sgd.*steps inside backward\(\)"):
            backward(run.model, 0, 0)
        assert same(run.parameters, before)

    def test_an_optimizer_of_another_model_is_none_of_its_business(self, run: Training) -> None:
        other = net()
        train(other, torch.optim.SGD(other.parameters(), lr=0.01), 0, 2)
        assert steps_done(run.handle) == 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_parameters_that_are_loaded_later_are_the_anchor(self, dtype: torch.dtype) -> None:
        run = Training(0, local_sgd(2, outer=MEAN), model=net(dtype), lr=0.0)
        for _ in range(2):
            before = run.model.state_dict()
            loaded = {name: torch.randn_like(value) for name, value in before.items()}
            run.model.load_state_dict(loaded)
            run.train(4)
            assert same(run.parameters, list(loaded.values()))
        run.handle.remove()

    def test_a_copy_of_the_model_is_another_one(self, run: Training) -> None:
        backward(run.model, 0, 0)
        copied = copy.deepcopy(run.model)
        run.model.zero_grad()
        copied(batch(0))
        assert steps_done(run.handle) == 0
        run.model(batch(0))
        assert steps_done(run.handle) == 1

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

    def test_stages_see_each_backward(self, run: Training) -> None:
        seen = []
        run.handle.register_prehook(lambda gradients: tuple(2 * g for g in gradients))
        run.handle.register_post_accumulate_hook(lambda bucket: seen.append(bucket.index()))
        other = net()
        for each in (run.model, other):
            backward(each, 0, 0)
        for parameter, plain in zip(run.model.parameters(), other.parameters(), strict=True):
            assert torch.equal(parameter.grad, 2 * plain.grad)
        assert seen == list(range(len(seen))) and len(seen) > 1
        assert run.exchanges == 0


@pytest.mark.parametrize("road", ["module", "ddp"])
@on_ranks(2)
def test_a_scaler_that_skips_a_step_on_one_rank(rank: int, road: str) -> None:
    """Rank 1 alone has an infinite gradient in the step that comes before an exchange."""
    run = Training(rank, local_sgd(3), road)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    taken = 0
    for step in range(6):
        run.optimizer.zero_grad()
        loss = run.model(batch(rank, step)).square().sum()
        scaler.scale(loss * torch.inf if (rank, step) == (1, 2) else loss).backward()
        before = run.parameters
        scaler.step(run.optimizer)
        taken += not same(before, run.parameters)
        scaler.update()
    assert all_same(of_all_ranks(run.parameters))
    assert (run.exchanges, taken) == (2, 6 - rank)
    run.handle.remove()


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


@pytest.mark.parametrize("parts", [1, 2])
@on_ranks(2)
def test_an_optimizer_of_optimizers_takes_one_step(rank: int, parts: int) -> None:
    model, handle = attached(local_sgd(2))
    layers = model.layers
    container = _Container(*([model] if parts == 1 else [layers[:3], layers[3:]]))
    counts = []
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
    assert counts == [(1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3)]


# ---- together at will ----------------------------------------------------------------------------


@pytest.mark.parametrize(("road", "uneven"), [("module", False), ("module", True), ("ddp", False)])
@on_ranks(2)
def test_synchronize(rank: int, road: str, uneven: bool) -> None:
    run = Training(rank, local_sgd(4), road)
    run.handle.register_prehook(lambda gradients: None)  # so that each backward has its stages
    run.train(4 + (rank if uneven else 2))
    apart = run.parameters
    run.handle.synchronize()
    together = run.parameters
    assert all_same(of_all_ranks(together)) and not all_same(of_all_ranks(apart))
    run.handle.synchronize()
    assert same(together, run.parameters)
    assert run.exchanges == 2
    run.handle.remove()
    with pytest.raises(RuntimeError, match="no longer attached"):
        run.handle.synchronize()


@pytest.mark.usefixtures("one_rank")
def test_synchronize_is_nothing_to_other_hooks() -> None:
    model, handle = attached(hooks.allreduce())
    before = parameters_of(model)
    handle.synchronize()
    assert same(before, parameters_of(model))
    handle.remove()


# ---- several models, and models that go away -----------------------------------------------------


@on_ranks(2)
def test_two_models_and_one_optimizer(rank: int) -> None:
    models = first, second = net(), net()
    handles = [attach(first, local_sgd(2, outer=MEAN)), attach(second, local_sgd(3, outer=MEAN))]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.01)

    def train_both(steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            for model in models:
                backward(model, rank, step)
            optimizer.step()

    train_both(6)
    assert [handle.stats().steps for handle in handles] == [3, 2]
    handles[0].remove()
    assert all_same(of_all_ranks(parameters_of(first)))
    train_both(3)
    assert not all_same(of_all_ranks(parameters_of(first)))  # on their own from there on
    assert all_same(of_all_ranks(parameters_of(second)))
    handles[1].remove()


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


# ---- where it refuses to run ---------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
def test_it_must_be_attached() -> None:
    model = DDP(net())
    model.register_comm_hook(None, local_sgd(2))
    with pytest.raises(RuntimeError, match=r"use torch_commhook\.attach"):
        backward(model, 0, 0)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("road", ROADS)
def test_uneven_inputs_are_refused(road: str) -> None:
    model, handle = attached(local_sgd(2), road)
    with pytest.raises(RuntimeError, match="equally many steps"):
        handle.join()
    if road == "ddp":
        with pytest.raises(RuntimeError, match="equally many steps"), model.join():
            backward(model, 0, 0)
    with suppress(RuntimeError):
        handle.remove()

"""What counts as a step of ``hooks.local_sgd``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from layered_net import batch
from local_training import (
    MEAN,
    attached,
    backward,
    net,
    parameters_of,
    same,
    steps_done,
    train,
)
from rank_pool import RankPool
from torch import Tensor, nn

from torch_commhook import attach
from torch_commhook.hooks import local_sgd, outer_sgd

pytestmark = pytest.mark.usefixtures("no_hook_on_optimizers_left")


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

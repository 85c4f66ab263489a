"""Users' own post-accumulate-grad hooks beside those of our reducer, and what the reducer calls."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from gloo_threads import in_threads
from layered_net import Net, batch, gradients_of
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach, hooks

pytestmark = pytest.mark.usefixtures("one_rank")


def tripled(state: object, bucket: Any) -> Tensor:
    return bucket.buffer() * 3


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_they_come_before_ours(compiled: bool) -> None:
    def backward() -> None:
        context: Any = nullcontext()
        if compiled:
            context = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
        loss = model(torch.ones(1, 2)).sum()
        with context:
            loss.backward()

    def add(value: float) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            parameter.grad.add_(value)

        return hook

    model = nn.Linear(2, 2, bias=False)
    model.weight.register_post_accumulate_grad_hook(add(1))
    handle = attach(model, tripled)
    last = model.weight.register_post_accumulate_grad_hook(add(100))
    for _ in range(2):
        model.zero_grad()
        backward()
        assert model.weight.grad.tolist() == [[306, 306], [306, 306]]
    last.remove()
    handle.remove()
    model.zero_grad()
    backward()
    assert model.weight.grad.tolist() == [[2, 2], [2, 2]]


def test_one_registered_while_ours_counts_alone() -> None:
    model = nn.Linear(2, 2)
    handle = attach(model, tripled)
    model(torch.ones(1, 2)).sum().backward()
    seen: list[Tensor] = []
    own = model.weight.register_post_accumulate_grad_hook(seen.append)
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    assert len(seen) == 1 and seen[0] is model.weight
    assert model.weight.grad.tolist() == [[3, 3], [3, 3]]
    handle.remove()
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    assert len(seen) == 2
    assert model.weight.grad.tolist() == [[1, 1], [1, 1]]
    own.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert len(seen) == 2


def test_one_that_takes_ours_off() -> None:
    model = Net()
    handle = attach(model, hooks.allreduce(), bucket_cap_mb=0.004)
    model(batch(0)).sum().backward()
    first = model.layers[5].bias.register_post_accumulate_grad_hook(lambda _: handle.remove())
    model.zero_grad()
    model(batch(0)).sum().backward()
    first.remove()
    assert not handle.is_attached
    model.zero_grad()
    model(batch(0)).sum().backward()
    assert all(gradient is not None for gradient in gradients_of(model))


def test_hooks_thrown_away() -> None:
    model = Net()
    handle = attach(model, tripled)
    for parameter in model.parameters():
        parameter._post_accumulate_grad_hooks = None
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    model(batch(0)).sum().backward()
    assert handle.stats().steps == 0
    handle.remove()
    model(batch(0)).sum().backward()


def test_python_is_entered_once_for_each_bucket() -> None:
    model = Net()
    handle = attach(model, hooks.allreduce(), bucket_cap_mb=0.002)
    for _ in range(2):
        model(batch(0)).sum().backward()
    loss = model(batch(0)).sum()
    calls: Counter[str] = Counter()

    def profile(frame: Any, event: str, argument: object) -> None:
        if event == "call" and "torch_commhook" in frame.f_code.co_filename:
            calls[frame.f_code.co_name] += 1

    sys.setprofile(profile)
    try:
        loss.backward()
    finally:
        sys.setprofile(None)
    buckets = len(handle.stats().buckets)
    assert buckets > 3
    assert (calls["ready"], calls["enter_backward"], calls["bucket_full"]) == (0, 1, buckets)


def _assert_tripled(model: Net, number: int) -> None:
    own = Net()
    own.load_state_dict(model.state_dict())
    own(batch(0, number)).sum().backward()
    for got, want in zip(model.parameters(), own.parameters(), strict=True):
        assert torch.allclose(got.grad, 3 * want.grad)


def test_a_model_in_each_of_several_threads() -> None:
    def train() -> None:
        model = Net()
        attach(model, tripled, bucket_cap_mb=0.004)
        for number in range(10):
            model.zero_grad()
            model(batch(0, number)).sum().backward()
            _assert_tripled(model, number)

    assert in_threads([train] * 4) == []


def test_one_model_in_several_threads() -> None:
    """They may raise, in many ways, but not crash; and what comes after them is right."""
    model = Net()
    attach(model, tripled, bucket_cap_mb=0.004)

    def train() -> None:
        for number in range(10):
            with contextlib.suppress(Exception):
                model(batch(0, number)).sum().backward()

    assert in_threads([train] * 4) == []
    model.zero_grad()
    model(batch(0)).sum().backward()
    _assert_tripled(model, 0)


def test_a_backward_in_another_thread_meanwhile() -> None:
    def hook(state: object, bucket: Any) -> Tensor:
        if threading.current_thread() is other:
            inside.set()
            assert ended.wait(30)
        return bucket.buffer()

    def run() -> None:
        try:
            model(batch(0)).sum().backward()
        except RuntimeError as error:
            errors.append(str(error))

    model = Net()
    errors: list[str] = []
    inside, ended = threading.Event(), threading.Event()
    other = threading.Thread(target=run)
    attach(model, hook, bucket_cap_mb=0.004)
    other.start()
    assert inside.wait(30)
    model(batch(0)).sum().backward()
    ended.set()
    other.join(30)
    assert len(errors) == 1 and "another backward() of this model began in another" in errors[0]
    model.zero_grad()
    model(batch(0)).sum().backward()
    assert gradients_of(model)[0] is not None


@pytest.mark.parametrize("kind", ["module", "ddp"])
def test_nothing_of_ours_is_compiled_on_its_own(kind: str) -> None:
    """Where a compiled function calls backward, which the engine then runs."""

    def graphs(with_hook: bool) -> int:
        model: nn.Module = Net()
        if kind == "ddp":
            model = DDP(model)
        if with_hook:
            attach(model, hooks.allreduce())

        @torch.compile(backend="eager")
        def step(x: Tensor) -> None:
            model(x).sum().backward()

        torch._dynamo.reset()
        counters.clear()
        for number in range(3):
            step(batch(0, number))
        return counters["stats"]["unique_graphs"]

    assert graphs(with_hook=True) == graphs(with_hook=False)

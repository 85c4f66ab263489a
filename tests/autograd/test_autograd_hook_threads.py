"""Autograd hooks in several threads, and those that come and go: in a hook, with tensors, at exit.

Threads run, register, remove and count at the same time, on a tensor that had a hook before. The
engine reads its own lists of hooks without a lock: the first registration of a kind must not fall
into a backward, with PyTorch's hooks as with ours.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from autograd_apis import both, leaf
from gloo_threads import in_threads
from layered_net import BUCKET_CAP_MB, Net, batch
from torch import Tensor

from torch_commhook import _C, attach, autograd
from torch_commhook.reducer import reducer

THREADS = 4
ROUNDS = 30

#: For each kind, hooks that turn the sign of gradients of 1 and -1. An operator has no GIL.
TURNING: dict[str, dict[str, Callable[..., Any]]] = {
    "python": {
        "hook": lambda grad: -grad,
        "prehook": lambda grads: (-grads[0],),
        "posthook": lambda inputs, outputs: (inputs[0] * outputs[0],),
        "post_accumulate": lambda parameter: None,
    },
    "operator": {
        "hook": torch.ops.aten.neg.default,
        "prehook": torch.ops.aten._foreach_neg.default,
        "posthook": torch.ops.aten._foreach_mul.List,
        "post_accumulate": torch.ops.aten._assert_tensor_metadata.default,
    },
}
REGISTER: dict[str, Callable[..., autograd.RemovableHandle]] = {
    "hook": autograd.register_hook,
    "prehook": autograd.register_prehook,
    "posthook": autograd.register_posthook,
    "post_accumulate": autograd.register_post_accumulate_grad_hook,
}
each_way = pytest.mark.parametrize("way", TURNING)


@pytest.fixture(autouse=True)
def threads_take_turns() -> Iterator[None]:
    """After any few instructions, instead of every 5 milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Graph:
    """A leaf and a node, with places for all kinds of hook."""

    def __init__(self) -> None:
        self.x = leaf()
        self.y = self.x.neg()
        node = self.y.grad_fn
        self.places = [
            ("hook", self.x),
            ("hook", self.y),
            ("prehook", node),
            ("posthook", node),
            ("post_accumulate", self.x),
        ]

    def register(self, hooks: dict[str, Callable[..., Any]]) -> list[autograd.RemovableHandle]:
        """One hook in each place."""
        return [REGISTER[kind](on, hooks[kind]) for kind, on in self.places]

    def backward(self) -> None:
        """Through a node of the caller's own, and those that all share."""
        (self.y * 3).sum().backward(retain_graph=True)

    def gradient(self) -> Tensor:
        """Of ones; does not run what is after accumulation."""
        return torch.autograd.grad(self.y.sum(), self.x, retain_graph=True)[0]


def counting(calls: list[str]) -> dict[str, Callable[..., Any]]:
    """Hooks that change nothing and note their kind."""

    def note(kind: str) -> Callable[..., None]:
        return lambda *values: calls.append(kind)

    return {kind: note(kind) for kind in REGISTER}


@each_way
def test_backward_passes_over_the_same_nodes(way: str) -> None:
    graph = Graph()
    calls: list[str] = []
    graph.register(TURNING[way])
    graph.register(counting(calls))

    def run() -> None:
        for _ in range(ROUNDS):
            graph.backward()

    assert in_threads([run] * THREADS) == []
    times = THREADS * ROUNDS
    # 3, turned on y and before the node: 3; by the node: -3; times 3 after it: -9; on x: 9.
    assert graph.x.grad.tolist() == [9 * times] * 2
    assert Counter(calls) == {kind: times for kind in REGISTER} | {"hook": 2 * times}


@each_way
def test_hooks_come_and_go_meanwhile(way: str) -> None:
    graph = Graph()
    calls: list[str] = []
    graph.register(counting(calls))
    expected = graph.gradient()
    calls.clear()

    def change() -> None:
        for _ in range(2 * ROUNDS):
            handles = graph.register(TURNING[way])
            assert all(handle.is_registered for handle in handles)
            for handle in handles:
                handle.remove()
            assert not any(handle.is_registered for handle in handles)

    def run() -> None:
        for _ in range(ROUNDS):
            assert graph.gradient().abs().tolist() == [1, 1]
            graph.backward()

    assert in_threads([run, run, run, change, change]) == []
    times = 6 * ROUNDS
    want = {"hook": 2 * times, "prehook": times, "posthook": times, "post_accumulate": times // 2}
    assert Counter(calls) == want
    assert torch.equal(graph.gradient(), expected)


def test_one_handle_in_several_threads() -> None:
    graph = Graph()
    calls: list[str] = []
    graph.register(counting(calls))
    others: list[str] = []
    for _ in range(ROUNDS):
        handles = graph.register(counting(others))

        def remove(handles: list[autograd.RemovableHandle] = handles) -> None:
            for handle in handles:
                handle.remove()

        assert in_threads([remove] * THREADS) == []
    graph.backward()
    assert others == []
    assert len(calls) == 5


def test_first_hooks_of_a_tensor_from_several_threads() -> None:
    """No backward runs: whoever comes first makes the list that all others find."""
    graphs = [Graph() for _ in range(ROUNDS)]
    calls: list[str] = []

    def register() -> None:
        for graph in graphs:
            graph.register(counting(calls))

    assert in_threads([register] * THREADS) == []
    for graph in graphs:
        graph.backward()
    assert len(calls) == 5 * THREADS * ROUNDS


# ---- the counting of a reducer -------------------------------------------------------------------

PARAMETERS, BUCKETS = 12, 3


class Listener:
    """Takes the place of a reducer, and notes what it is told."""

    def __init__(self, tell_full: bool) -> None:
        self.arrivals = _C.Arrivals(self, PARAMETERS)
        self.arrivals.assign([number % BUCKETS for number in range(PARAMETERS)])
        self.parameters = [leaf() for _ in range(PARAMETERS)]
        self.tell_full = tell_full
        self.full: list[int] = []
        self.again = 0

    def enter_backward(self) -> None:
        self.arrivals.count_in_this_backward(self.tell_full)

    def bucket_full(self, bucket: int) -> None:
        self.full.append(bucket)

    def came_again(self, number: int) -> None:
        self.again += 1

    def count(self) -> None:
        for number, parameter in enumerate(self.parameters):
            _C.count_arrivals(parameter, 0, self.arrivals, number)

    def stop_counting(self) -> None:
        for parameter in self.parameters:
            _C.stop_counting(parameter)

    def run(self) -> None:
        for _ in range(ROUNDS):
            torch.stack(self.parameters).sum().backward()


@pytest.mark.parametrize("tell_full", [False, True])
def test_gradients_arrive_in_several_threads(tell_full: bool) -> None:
    """None is lost or counted twice, and one of them fills its bucket."""
    listener = Listener(tell_full)
    listener.count()
    order: list[int] = []

    def look_on() -> None:
        for _ in range(ROUNDS):
            order.extend(listener.arrivals.take_order())
            assert len(listener.arrivals.missing()) <= PARAMETERS

    assert in_threads([*[listener.run] * THREADS, look_on]) == []
    order += listener.arrivals.take_order()
    assert Counter(order) == dict.fromkeys(range(PARAMETERS), THREADS * ROUNDS)
    assert listener.arrivals.missing() == []
    assert sorted(listener.full) == (list(range(BUCKETS)) if tell_full else [])
    for parameter in listener.parameters:
        assert parameter.grad.tolist() == [THREADS * ROUNDS] * 2


def test_counting_stops_and_begins_meanwhile() -> None:
    listener = Listener(tell_full=True)
    listener.count()

    def change() -> None:
        for _ in range(ROUNDS):
            listener.stop_counting()
            listener.arrivals.reset()
            listener.count()

    assert in_threads([*[listener.run] * THREADS, change]) == []
    listener.arrivals.reset()
    listener.full.clear()
    torch.stack(listener.parameters).sum().backward()
    assert sorted(listener.full) == list(range(BUCKETS))
    listener.arrivals.close()
    listener.run()
    assert sorted(listener.full) == list(range(BUCKETS))


def take_turns_in_the_reducer(frame: FrameType, event: str, argument: object) -> Any:
    """For ``sys.settrace``: lets other threads run between any two lines of the reducer."""
    if os.path.dirname(frame.f_code.co_filename) != os.path.dirname(reducer.__file__):
        return None

    def at_line(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and random.random() < 0.4:
            time.sleep(random.choice((0, 0, 1e-5, 1e-4)))
        return at_line

    return at_line


@pytest.mark.usefixtures("one_rank")
def test_backward_passes_of_one_model_at_the_same_time() -> None:
    """They fail; what comes after them is right."""
    fails = True

    def hook(state: object, bucket: Any) -> Tensor:
        if fails:
            raise RuntimeError("not now")
        return bucket.buffer() * 3

    def run() -> None:
        sys.settrace(take_turns_in_the_reducer)
        for number in range(10):
            with contextlib.suppress(Exception):
                model(batch(0, number)).sum().backward()

    for _ in range(30):
        fails = True
        model = Net()
        attach(model, hook, bucket_cap_mb=BUCKET_CAP_MB)
        assert in_threads([run] * THREADS) == []
        fails = False
        model.zero_grad()
        model(batch(0)).sum().backward()
        own = Net()
        own.load_state_dict(model.state_dict())
        own(batch(0)).sum().backward()
        for got, want in zip(model.parameters(), own.parameters(), strict=True):
            torch.testing.assert_close(got.grad, 3 * want.grad)


# ---- coming and going ----------------------------------------------------------------------------


def test_handles() -> None:
    x = leaf()
    with autograd.register_hook(x, lambda grad: grad * 2) as handle:
        x.sum().backward()
        assert handle.is_registered
    assert not handle.is_registered
    x.sum().backward()
    handle.remove()
    assert x.grad.tolist() == [3, 3]


def test_a_hook_that_deletes_its_tensor() -> None:
    held = [leaf()]
    held.append(held[0] * 1)
    loss = held[1].sum()
    autograd.register_hook(held[1], lambda grad: held.clear())
    autograd.register_post_accumulate_grad_hook(held[0], lambda parameter: held.clear())
    loss.backward()
    assert held == []


def test_a_handle_dropped_and_a_hook_replaced_in_mid_backward() -> None:
    x = leaf()
    calls: list[str] = []
    y = x * 1
    z = y * 1

    def replaces(grad: Tensor) -> Tensor:
        calls.append("z")
        state.pop("handle").remove()
        state["handle"] = autograd.register_hook(y, lambda grad: calls.append("new"))
        return grad * 2

    state = {"handle": autograd.register_hook(y, lambda grad: calls.append("old"))}
    autograd.register_hook(z, replaces)
    z.sum().backward()
    assert calls == ["z", "new"]
    assert x.grad.tolist() == [2, 2]


def test_the_interpreter_ends_with_hooks_alive() -> None:
    code = """
import torch
from torch_commhook import autograd
x = torch.ones(2, requires_grad=True)
y = x * 1
class Hook:
    def __call__(self, *values): pass
    def __del__(self): pass
handles = [
    autograd.register_hook(x, Hook()), autograd.register_hook(y, Hook()),
    autograd.register_prehook(y.grad_fn, Hook()), autograd.register_posthook(y.grad_fn, Hook()),
    autograd.register_post_accumulate_grad_hook(x, Hook()),
]
y.sum().backward(retain_graph=True)
import builtins
builtins.kept = (x, y)
print("ends")
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert (result.returncode, result.stdout.strip()) == (0, "ends"), result.stderr


@both
def test_memory_stays_flat(api: Any) -> None:
    """Registering, calling and removing leaves nothing behind."""
    x = leaf()
    loss = (x * 1).sum()

    def cycle(count: int) -> None:
        for _ in range(count):
            handle = api.hook(x, lambda grad: grad * 1)
            torch.autograd.grad(loss, x, retain_graph=True)
            handle.remove()

    cycle(200)
    gc.collect()
    before = len(gc.get_objects())
    cycle(500)
    gc.collect()
    assert len(gc.get_objects()) - before < 50

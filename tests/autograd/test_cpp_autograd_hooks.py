"""Hooks of the autograd engine in C++."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from autograd_apis import backward, in_modes, leaf
from cpp_libraries import library
from gloo_threads import in_threads

from torch_commhook import autograd, load_cpp_hooks


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    load_cpp_hooks(library("autograd_hooks"))


@in_modes
def test_each_kind(mode: str) -> None:
    x, w = leaf(1.0, 2.0), leaf(3.0, 4.0)
    y = x * w
    autograd.register_hook(x, autograd.cpp("scale", factor=10.0))
    autograd.register_prehook(y.grad_fn, autograd.cpp("scale_all"))
    autograd.register_posthook(y.grad_fn, autograd.cpp("add_outputs"))
    autograd.register_post_accumulate_grad_hook(x, autograd.cpp("halve"))
    backward(y.sum(), mode)
    # 2 comes to the node; 2 w + 2 goes on to x.
    assert x.grad is not None and x.grad.tolist() == [40.0, 50.0]
    assert w.grad is not None and w.grad.tolist() == [2.0, 4.0]


def test_among_others_in_order() -> None:
    seen = []
    x = leaf(1.0)
    for hook in (lambda grad: grad + 1, autograd.cpp("scale", factor=3.0), seen.append):
        autograd.register_hook(x, hook)
    autograd.register_hook(x, autograd.cpp("unchanged"))
    x.sum().backward()
    assert [grad.item() for grad in seen] == [6.0] and x.grad.item() == 6.0


@in_modes
@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("throws an int", RuntimeError, "threw an object that is not a std::exception"),
        ("raises", RuntimeError, r"hook 'cpp\('wrong', how='raises'\)': out of order"),
        ("index", IndexError, r"(?s)no such place.*raised by hook 'cpp\('wrong'"),
        ("dtype", RuntimeError, "has changed the type of value .was torch.float32.*got torch.f"),
        ("size", RuntimeError, "has changed the size of value .was \\[2\\], got \\[1, 2\\]"),
    ],
)
def test_what_a_hook_can_do_wrong(
    mode: str, how: str, error: type[Exception], message: str
) -> None:
    x = leaf()
    autograd.register_hook(x, autograd.cpp("wrong", how=how))
    with pytest.raises(error, match=message):
        backward(x.sum(), mode)


def test_a_wrong_number_of_values() -> None:
    y = leaf() * 2
    autograd.register_prehook(y.grad_fn, autograd.cpp("one_less"))
    with pytest.raises(RuntimeError, match=r"one_less'\)' has returned an incorrect number.*got 0"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: autograd.cpp("none"), ValueError, "there is no autograd hook 'none' in C"),
        (lambda: autograd.cpp(1), TypeError, "name must be a str, got int"),
        (lambda: autograd.cpp("scale"), TypeError, "factor must be given"),
        (lambda: autograd.cpp("wrong", how="make"), ValueError, r"(?s)made wrong.*cpp\('wrong'"),
        (lambda: autograd.cpp("nothing"), TypeError, "was made without a function to call"),
        (
            lambda: autograd.register_hook(leaf(), autograd.cpp("halve")),
            TypeError,
            r"hook 'cpp\('halve'\)' is one for kind 'post_accumulate', got kind 'tensor'",
        ),
        (
            lambda: autograd.register_posthook((leaf() * 2).grad_fn, autograd.cpp("scale_all")),
            TypeError,
            "is one for kind 'prehook', got kind 'posthook'",
        ),
    ],
)
def test_errors(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_called_from_python() -> None:
    a, b = torch.ones(2), torch.full((2,), 3.0)
    assert autograd.cpp("scale", factor=2.0)(a).tolist() == [2.0, 2.0]
    assert autograd.cpp("unchanged")(a) is not None
    doubled = autograd.cpp("scale_all")((a, None))
    assert doubled[0].tolist() == [2.0, 2.0] and doubled[1] is None
    assert autograd.cpp("add_outputs")((a,), (b,))[0].tolist() == [4.0, 4.0]
    hooks = [autograd.cpp("scale", factor=2.0), lambda grad: grad + 1]
    assert autograd.call_hooks(hooks, (a,), "tensor")[0].tolist() == [3.0, 3.0]


def test_copies_and_names() -> None:
    hook = autograd.cpp("scale", factor=2)
    assert repr(hook) == "cpp('scale', factor=2.0)" and hook.kind == "tensor"
    for other in (copy.copy(hook), copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
        assert repr(other) == repr(hook)


def test_several_threads() -> None:
    x = leaf(1.0)
    y = x * 2
    autograd.register_hook(y, autograd.cpp("scale", factor=1.0))
    autograd.register_prehook(y.grad_fn, autograd.cpp("scale_all", factor=1.0))

    def run() -> None:
        for _ in range(100):
            torch.autograd.grad(y.sum(), x, retain_graph=True)

    assert in_threads([run] * 4) == []


@pytest.mark.usefixtures("gil_counter")
def test_no_gil_is_taken() -> None:
    from gil_calls import count_gil_calls

    def takes(hook: Any) -> int:
        x = leaf()
        y = x
        for _ in range(50):
            y = y * 1.0
            if hook is not None:
                autograd.register_hook(y, hook)
        loss = y.sum()
        loss.backward(retain_graph=True)
        with count_gil_calls() as calls:
            loss.backward(retain_graph=True)
        return calls.acquired

    plain = takes(None)
    assert takes(autograd.cpp("scale", factor=1.0)) == plain
    assert takes(lambda grad: None) >= plain + 50

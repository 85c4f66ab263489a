"""Autograd hooks that come and go: in a hook, with their tensors, at exit."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import torch
from autograd_apis import both, leaf
from torch import Tensor

from torch_commhook import autograd


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

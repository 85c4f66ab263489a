"""How hooks are called, point by point, on PyTorch's registration and ours, eager and compiled.

Where PyTorch checks nothing, which is under compiled autograd, only ours is asked. Other files have
messages (``test_autograd_hooks.py``), post-accumulate hooks that return a tensor
(``test_autograd_suite_tensor.py``), and order (``test_autograd_suite_node.py``).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from autograd_apis import (
    NODE_ERRORS,
    TENSOR_ERRORS,
    PyTorchs,
    backward,
    both_in_modes,
    checked,
    leaf,
    note,
)
from torch import Tensor

from torch_commhook import autograd

KINDS = ["hook", "prehook", "posthook", "post_accumulate"]
in_kinds = pytest.mark.parametrize("kind", KINDS)
in_node_kinds = pytest.mark.parametrize("kind", ["prehook", "posthook"])


class Target:
    """A leaf x and y = x * 1, with hooks of one kind."""

    def __init__(self, api: Any, kind: str) -> None:
        self.x = leaf()
        self.y = self.x * 1
        on = {"hook": self.y, "prehook": self.y.grad_fn, "posthook": self.y.grad_fn}.get(
            kind, self.x
        )
        self.register = functools.partial(getattr(api, kind.removeprefix("leaf ")), on)

    def backward(self, mode: str) -> None:
        backward(self.y.sum(), mode, retain_graph=True)


# ---- which run -----------------------------------------------------------------------------------


@both_in_modes
@in_kinds
def test_removed_runs_and_added_does_not(api: Any, mode: str, kind: str) -> None:
    calls: list[str] = []
    handles: dict[str, Any] = {}
    target = Target(api, kind)

    def changes(*values: object) -> None:
        calls.append("changes")
        handles["removed"].remove()
        if "added" not in handles:
            handles["added"] = target.register(note(calls, "added"))

    target.register(changes)
    handles["removed"] = target.register(note(calls, "removed"))
    target.backward(mode)
    assert calls == ["changes", "removed"]
    calls.clear()
    target.backward(mode)
    assert calls == ["changes", "added"]


@both_in_modes
@in_kinds
def test_exceptions_keep_their_type(api: Any, mode: str, kind: str) -> None:
    class BooError(Exception):
        pass

    raised: list[BooError] = []

    def raises(*values: object) -> None:
        boo = BooError("boo")
        if mode != "compiled":
            raised.append(boo)
        raise boo

    calls: list[str] = []
    target = Target(api, kind)
    handle = target.register(raises)
    target.register(note(calls, "next"))
    with pytest.raises(BooError, match="boo") as seen:
        target.backward(mode)
    assert mode == "compiled" or raised == [seen.value]
    assert calls == []
    handle.remove()
    target.x.grad = None
    target.backward("eager")
    assert calls == ["next"]
    assert target.x.grad.tolist() == [1, 1]


# ---- what they return ----------------------------------------------------------------------------


def nothing(*values: object) -> None:
    return None


def same(value: Any, *others: object) -> Any:
    return value


def same_in_another_tuple(values: tuple[Any, ...], *others: object) -> tuple[Any, ...]:
    return (*values,)


@checked
@pytest.mark.parametrize("hook", [nothing, same])
def test_unchanged_parameter(api: Any, mode: str, hook: Callable[..., Any]) -> None:
    """Compiled, PyTorch refuses the parameter itself."""
    target = Target(api, "post_accumulate")
    target.register(hook)
    target.backward(mode)
    assert target.x.grad.tolist() == [1, 1]


def _change(kind: str, change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def tensor_hook(grad: Tensor) -> Tensor:
        return change(grad)

    def node_hook(values: tuple[Any, ...], *others: Any) -> tuple[Any, ...]:
        return (change(values[0]), *values[1:])

    return node_hook if kind in ("prehook", "posthook") else tensor_hook


@both_in_modes
@pytest.mark.parametrize("kind", ["hook", "leaf hook", "prehook", "posthook"])
def test_each_hook_works_on_what_the_last_one_made(api: Any, mode: str, kind: str) -> None:
    target = Target(api, kind)
    target.register(_change(kind, lambda grad: grad + 1))
    target.register(nothing)
    target.register(_change(kind, lambda grad: grad * 10))
    target.register(same_in_another_tuple if kind in ("prehook", "posthook") else same)
    target.register(_change(kind, lambda grad: grad - 3))
    target.register(same)
    target.backward(mode)
    assert target.x.grad.tolist() == [17, 17]


@both_in_modes
@in_node_kinds
def test_a_none_drops_a_gradient(api: Any, mode: str, kind: str) -> None:
    """And the next hook finds None there."""
    found: list[bool] = []
    x, y = leaf(1.0, 2.0, 3.0, 4.0), leaf(5.0, 6.0, 7.0, 8.0)
    first, second = x.split(2)  # two gradients go into its node
    product = x * y  # two come out of its node
    node = first.grad_fn if kind == "prehook" else product.grad_fn
    register = getattr(api, kind)
    register(node, lambda values, *others: (values[0], None))
    register(node, lambda values, *others: found.append(values[1] is None))
    backward((first + second).sum() if kind == "prehook" else product.sum(), mode)
    assert found == [True]
    if kind == "prehook":
        assert x.grad.tolist() == [1, 1, 0, 0]
    else:
        assert x.grad.tolist() == [5, 6, 7, 8]
        assert y.grad is None


@both_in_modes
@in_node_kinds
def test_the_only_gradient_may_be_dropped(api: Any, mode: str, kind: str) -> None:
    x = leaf()
    y = x.exp()
    getattr(api, kind)(y.grad_fn, lambda *values: (None,))
    backward(y.sum(), mode)
    assert x.grad is None


@checked
@in_node_kinds
def test_a_none_is_not_replaced(api: Any, mode: str, kind: str) -> None:
    x = leaf()
    first, second = x.unbind()
    product = x * torch.ones(2)
    node = first.grad_fn if kind == "prehook" else product.grad_fn
    made = torch.ones_like(second if kind == "prehook" else x)
    getattr(api, kind)(node, lambda values, *others: (values[0], made))
    with pytest.raises(RuntimeError, match="can't replace a None gradient with a non-None value"):
        backward(first if kind == "prehook" else product.sum(), mode)


# ---- without the engine --------------------------------------------------------------------------

CHAINS: dict[str, list[Callable[..., Any]]] = {
    "tensor": [lambda grad: grad + 1, lambda grad: None, lambda grad: grad * 10],
    "prehook": [
        lambda grads: (grads[0] + 1,), lambda grads: grads, lambda grads: (grads[0] * 10,),
    ],
    "posthook": [
        lambda inputs, outputs: (inputs[0] + 1,),
        lambda inputs, outputs: None,
        lambda inputs, outputs: (inputs[0] * 10 + outputs[0],),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", CHAINS)
def test_values_without_the_engine(kind: str) -> None:
    """As PyTorch's hooks change the gradient of y = 3x in its engine."""
    x = leaf()
    y = (x * 1).expm1()
    register = {"tensor": PyTorchs.hook, "prehook": PyTorchs.prehook}.get(kind, PyTorchs.posthook)
    for hook in CHAINS[kind]:
        register(y if kind == "tensor" else y.grad_fn, hook)
    y.sum().backward()
    ones, slope = torch.ones(2), x.detach().exp()
    args: Any = {"posthook": ((slope,), (ones,))}.get(kind, (ones,))
    (value,) = autograd.call_hooks(CHAINS[kind], args, kind)
    assert torch.allclose(value if kind == "posthook" else value * slope, x.grad)


@pytest.mark.parametrize("error", TENSOR_ERRORS)
def test_errors_of_tensor_hooks_without_the_engine(error: str) -> None:
    hook, kind, message = TENSOR_ERRORS[error]
    with pytest.raises(kind, match=message):
        autograd.call_hooks([hook], (torch.ones(2),))


@pytest.mark.parametrize("error", NODE_ERRORS)
@pytest.mark.parametrize("stage", ["prehook", "posthook"])
def test_errors_of_node_hooks_without_the_engine(error: str, stage: str) -> None:
    hook, kind, message = NODE_ERRORS[error]
    values = (torch.ones(2),)
    with pytest.raises(kind, match=message):
        autograd.call_hooks([hook], values if stage == "prehook" else (values, values), stage)


def test_a_post_accumulate_hook_without_the_engine() -> None:
    x = leaf()
    assert autograd.call_hooks([lambda parameter: None], (x,), "post_accumulate")[0] is x
    with pytest.raises(RuntimeError, match="hooks should return None"):
        autograd.call_hooks([lambda parameter: parameter * 2], (x,), "post_accumulate")


@pytest.mark.parametrize(
    ("hooks", "args", "kind", "error", "message"),
    [
        (None, (), "tensor", TypeError, "hooks must be a sequence, got None"),
        (print, (), "tensor", TypeError, "hooks must be a sequence, got builtin_function_or"),
        ([3], (), "tensor", TypeError, "a hook must be callable, got int"),
        ([print], torch.ones(2), "tensor", TypeError, "args must be a sequence, got torch.Tensor"),
        ([print], (1,), "tensor", TypeError, r"args\[0\] must be a tensor or None, got int"),
        ([print], (None, None), "tensor", ValueError, "one tensor for kind 'tensor', got 2"),
        ([], (None, None), "tensr", ValueError, "kind must be 'tensor', .* got 'tensr'"),
        ([], (None,), None, ValueError, "kind must be 'tensor', .* got None"),
        ([print], (None,), "posthook", ValueError, "two sequences of tensors for kind 'posthook'"),
        ([print], ((), None), "posthook", TypeError, r"args\[1\] must be a sequence, got None"),
    ],
)
def test_what_call_hooks_does_not_take(
    hooks: Any, args: Any, kind: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        autograd.call_hooks(hooks, args, kind)


def test_call_hooks_takes_any_sequence() -> None:
    x = torch.ones(2)
    double = {"a": lambda grads: tuple(2 * grad for grad in grads)}
    for values in (lambda: deque([x, x]), {"x": x, "y": x}.values, lambda: iter([x, x])):
        for hooks in (lambda: double, double.values, lambda: iter(double.values())):
            doubled = autograd.call_hooks(hooks(), values(), "prehook")
            assert [value.tolist() for value in doubled] == [[2, 2], [2, 2]]
    (value,) = autograd.call_hooks([lambda a, b: None], deque([[x], iter([x])]), "posthook")
    assert value is x

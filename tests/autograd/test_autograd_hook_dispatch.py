"""How hooks are called, point by point, and hooks on nodes, on PyTorch's registration and ours.

Where PyTorch checks nothing, which is under compiled autograd, only ours is asked. Other files have
messages (``test_autograd_hooks.py``) and post-accumulate hooks that return a tensor
(``test_autograd_suite_tensor.py``).
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from autograd_apis import (
    NODE_ERRORS,
    TENSOR_ERRORS,
    Ours,
    PyTorchs,
    accumulator,
    backward,
    both,
    both_in_modes,
    checked,
    function,
    leaf,
    note,
)
from torch import Tensor, nn

from torch_commhook import autograd

KINDS = ["hook", "prehook", "posthook", "post_accumulate"]
in_kinds = pytest.mark.parametrize("kind", KINDS)
in_node_kinds = pytest.mark.parametrize("kind", ["prehook", "posthook"])

Double = function(lambda ctx, x: x * 2, lambda ctx, grad: grad * 2)
DOUBLE: dict[str, Callable[[Tensor], Tensor]] = {
    "in python": Double.apply,
    "in c++": lambda x: x * 2,
}
in_both_languages = pytest.mark.parametrize("language", DOUBLE)


class Target:
    """A leaf x and y, which is x or twice x, with hooks of one kind."""

    def __init__(self, api: Any, kind: str, language: str | None = None) -> None:
        self.x = leaf()
        self.y = self.x * 1 if language is None else DOUBLE[language](self.x)
        on = {"hook": self.y, "prehook": self.y.grad_fn, "posthook": self.y.grad_fn}.get(
            kind, self.x
        )
        self.register = functools.partial(getattr(api, kind.removeprefix("leaf ")), on)

    def backward(self, mode: str) -> None:
        backward(self.y.sum(), mode, retain_graph=True)


# ---- which run -----------------------------------------------------------------------------------


@both_in_modes
@pytest.mark.parametrize(
    ("kind", "language"),
    [*((kind, None) for kind in KINDS), *itertools.product(("prehook", "posthook"), DOUBLE)],
)
def test_removed_runs_and_added_does_not(
    api: Any, mode: str, kind: str, language: str | None
) -> None:
    """But one that was removed before does not run; removing it twice does no harm."""
    calls: list[str] = []
    handles: dict[str, Any] = {}
    target = Target(api, kind, language)

    def changes(*values: object) -> None:
        calls.append("changes")
        handles["removed"].remove()
        handles["gone"].remove()
        if "added" not in handles:
            handles["added"] = target.register(note(calls, "added"))

    handles["gone"] = target.register(note(calls, "gone"))
    target.register(changes)
    handles["removed"] = target.register(note(calls, "removed"))
    handles["gone"].remove()
    target.backward(mode)
    assert calls == ["changes", "removed"]
    calls.clear()
    target.backward(mode)
    assert calls == ["changes", "added"]
    assert target.x.grad.tolist() == [2 if language is None else 4] * 2


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


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        *itertools.product(["tensor"], TENSOR_ERRORS),
        *itertools.product(["prehook", "posthook"], NODE_ERRORS),
    ],
)
def test_errors_without_the_engine(stage: str, error: str) -> None:
    hook, kind, message = (TENSOR_ERRORS if stage == "tensor" else NODE_ERRORS)[error]
    values = (torch.ones(2),)
    with pytest.raises(kind, match=message):
        autograd.call_hooks([hook], (values, values) if stage == "posthook" else values, stage)


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


# ---- pre-hooks and post-hooks of nodes -----------------------------------------------------------


@both_in_modes
@in_both_languages
def test_prehooks_feed_each_other_and_then_posthooks(api: Any, mode: str, language: str) -> None:
    events: list[str] = []
    seen: list[Tensor] = []
    x = leaf()
    y = DOUBLE[language](x)

    def triple(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        events.append("pre")
        return (grads[0] * 3,)

    def look(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        events.append("post")
        seen.extend((inputs[0] * 1, outputs[0] * 1))
        return (inputs[0] + 1, *inputs[1:])

    for _ in range(2):
        api.posthook(y.grad_fn, look)
    for hook in (triple, lambda grads: None, triple, lambda grads: grads, note(events, "none")):
        api.prehook(y.grad_fn, hook)
    backward(y.sum(), mode)
    assert events == ["pre", "pre", "none", "post", "post"]
    assert [grad.tolist() for grad in seen] == [[18, 18], [9, 9], [19, 19], [9, 9]]
    assert x.grad.tolist() == [20, 20]


@both_in_modes
def test_an_output_that_is_no_tensor_has_none(api: Any, mode: str) -> None:
    scaled = function(
        lambda ctx, x, factor, y: (x * factor, factor, y * factor),
        lambda ctx, x, factor, y: (x * 3, None, y * 3),
    )
    nones: list[bool] = []

    def hook(grads: tuple[Any, ...]) -> tuple[Any, ...]:
        nones.extend(grad is None for grad in grads)
        return (grads[0] * 2, None, grads[2] * 5)

    x, y = leaf(), leaf()
    first, _, last = scaled.apply(x, 3, y)
    api.prehook(first.grad_fn, hook)
    backward((first + last).sum(), mode)
    assert nones == [False, True, False]
    assert (x.grad.tolist(), y.grad.tolist()) == ([6, 6], [15, 15])


@both
def test_a_posthook_registered_while_the_node_unpacks_what_it_saved(api: Any) -> None:
    """It runs; what went into the node has been given up by then."""
    given: list[Any] = []

    def halves(inputs: tuple[Tensor | None, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        given.extend(outputs)
        return tuple(value if value is None else value / 2 for value in inputs)

    def unpack(saved: Tensor) -> Tensor:
        api.posthook(torch._C._current_autograd_node(), halves)
        return saved

    x = torch.rand(3, 3, requires_grad=True)
    (plain,) = torch.autograd.grad(sum(torch.var_mean(x, dim=0)).sum(), x)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
        total = sum(torch.var_mean(x, dim=0)).sum()
        total.backward()
    assert all(value is None for value in given)
    assert torch.allclose(x.grad, plain / 2)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("kind", ["prehook", "posthook"])
def test_a_function_object_that_was_never_applied(kind: str) -> None:
    """Whether it has a node depends on the release."""

    def is_refused(api: Any) -> bool:
        try:
            getattr(api, kind)(Double(), print)
        except (RuntimeError, TypeError):
            return True
        return False

    assert is_refused(Ours) == is_refused(PyTorchs)


# ---- nodes that accumulate -----------------------------------------------------------------------


@both_in_modes
def test_hooks_of_the_accumulator_see_what_tensor_hooks_made(api: Any, mode: str) -> None:
    counts: list[int] = []
    seen: list[Tensor] = []
    x = leaf()
    node = accumulator(x)

    def pre(grads: tuple[Tensor, ...]) -> None:
        counts.append(len(grads))
        seen.append(grads[0] * 1)

    def post(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        counts.extend((len(inputs), len(outputs)))
        seen.append(outputs[0] * 1)

    api.posthook(node, post)
    api.prehook(node, pre)
    api.hook(x, lambda grad: grad * 7)
    backward(x.sum(), mode)
    assert counts == [1, 0, 1]
    assert [grad.tolist() for grad in seen] == [[7, 7], [7, 7]]


@both
def test_accumulators_that_are_not_asked_for(api: Any) -> None:
    calls: list[str] = []
    x, y = leaf(), leaf()
    api.hook(x, note(calls, "tensor"))
    copy = x.clone()
    node = copy.grad_fn.next_functions[0][0]
    api.prehook(node, note(calls, "pre"))
    api.posthook(node, note(calls, "post"))
    api.post_accumulate(x, note(calls, "accumulated"))
    total = (x + y + copy).sum()
    total.backward(inputs=[y], retain_graph=True)
    assert calls == []
    assert y.grad.tolist() == [1, 1]
    total.backward()
    assert calls == ["tensor", "pre", "accumulated", "post"]


class Chain:
    """A leaf x, y = 2x, z = 2y, with a hook of each kind on x, y and their nodes."""

    def __init__(self, api: Any) -> None:
        self.events: list[str] = []
        self.x = leaf(1.0)
        self.y = self.x * 2
        self.z = self.y * 2
        self.node = accumulator(self.x)  # kept alive
        for name, tensor, node in (("x", self.x, self.node), ("y", self.y, self.y.grad_fn)):
            api.hook(tensor, note(self.events, name))
            api.prehook(node, note(self.events, f"pre {name}"))
            api.posthook(node, note(self.events, f"post {name}"))
        api.post_accumulate(self.x, note(self.events, "accumulated"))

    def run(self, function: Callable[..., object], **options: Any) -> list[str]:
        self.events.clear()
        function(self.z, retain_graph=True, **options)
        return list(self.events)


@both
def test_which_hooks_run_for_which_inputs(api: Any) -> None:
    """A gradient that is asked for passes the tensor's hooks; its node runs where more needs it."""
    chain = Chain(api)
    y_node = ["y", "pre y", "post y"]
    x_node = ["x", "pre x", "accumulated", "post x"]
    assert chain.run(torch.autograd.grad, inputs=[chain.y]) == ["y"]
    assert chain.run(torch.autograd.grad, inputs=[chain.x]) == [*y_node, "x"]
    assert chain.run(torch.autograd.grad, inputs=[chain.x, chain.y]) == [*y_node, "x"]
    assert chain.run(torch.autograd.backward) == y_node + x_node
    assert chain.run(torch.autograd.backward, inputs=[chain.x, chain.y]) == y_node + x_node


# ---- order in a whole graph ----------------------------------------------------------------------


def hook_everything(api: Any, out: Tensor, leaves: dict[str, Tensor], events: list[str]) -> Tensor:
    """Registers hooks on all nodes, on leaves and on the output; returns the loss of the output.

    Events name nodes with their distance from the loss.
    """
    loss = out.sum()

    def visit(node: Any, depth: int) -> None:
        name = f"{node.name().rpartition(':')[2]} {depth}"
        api.posthook(node, note(events, f"post {name}"))
        api.prehook(node, note(events, f"pre {name}"))
        for following, _ in node.next_functions:
            if following is not None:
                visit(following, depth + 1)

    visit(loss.grad_fn, 0)
    for name, tensor in leaves.items():
        api.post_accumulate(tensor, note(events, f"accumulated {name}"))
        api.hook(tensor, note(events, f"tensor {name}"))
    api.hook(out, note(events, "tensor out"))
    return loss


def around(node: str) -> list[str]:
    return [f"pre {node}", f"post {node}"]


def around_leaf(name: str, depth: int) -> list[str]:
    node = f"AccumulateGrad {depth}"
    return [f"tensor {name}", f"pre {node}", f"accumulated {name}", f"post {node}"]


@both
def test_order_in_a_module_with_a_backward_hook(api: Any) -> None:
    events: list[str] = []
    x = torch.ones(1, 2, requires_grad=True)
    linear = nn.Linear(2, 2)
    linear.register_full_backward_hook(note(events, "module"))
    leaves = {"x": x, "w": linear.weight, "b": linear.bias}
    hook_everything(api, linear(x), leaves, events).backward()
    assert events == [
        *around("SumBackward0 0"),
        "tensor out",
        *around("BackwardHookFunctionBackward 1"),
        *around("AddmmBackward0 2"),
        *around_leaf("b", 3),
        *around("TBackward0 3"),
        *around_leaf("w", 4),
        "pre BackwardHookFunctionBackward 3",
        "module",
        "post BackwardHookFunctionBackward 3",
        *around_leaf("x", 4),
    ]


@both_in_modes
def test_order_in_a_module(api: Any, mode: str) -> None:
    events: list[str] = []
    linear = nn.Linear(2, 2, bias=False)
    out = linear(torch.ones(1, 2))
    backward(hook_everything(api, out, {"w": linear.weight}, events), mode)
    assert events == [
        *around("SumBackward0 0"),
        "tensor out",
        *around("MmBackward0 1"),
        *around("TBackward0 2"),
        *around_leaf("w", 3),
    ]

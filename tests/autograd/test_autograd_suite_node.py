"""Hooks on nodes as PyTorch's own tests of autograd ask for them, on its registration and ours.

``autograd_suite.json`` tells which of PyTorch's tests is expressed by which of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from autograd_apis import Ours, PyTorchs, accumulator, backward, both, both_in_modes, leaf, note
from torch import Tensor, nn
from torch.autograd import Function


class Double(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


DOUBLE: dict[str, Callable[[Tensor], Tensor]] = {
    "in python": Double.apply,
    "in c++": lambda x: x * 2,
}
in_both_languages = pytest.mark.parametrize("language", DOUBLE)


# ---- pre-hooks and post-hooks --------------------------------------------------------------------


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
    class Scaled(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: int, y: Tensor) -> tuple[Tensor, int, Tensor]:
            ctx.factor = factor
            return x * factor, factor, y * factor

        @staticmethod
        def backward(ctx: Any, x: Tensor, factor: None, y: Tensor) -> tuple[Any, ...]:
            return x * ctx.factor, None, y * ctx.factor

    nones: list[bool] = []

    def hook(grads: tuple[Any, ...]) -> tuple[Any, ...]:
        nones.extend(grad is None for grad in grads)
        return (grads[0] * 2, None, grads[2] * 5)

    x, y = leaf(), leaf()
    first, _, last = Scaled.apply(x, 3, y)
    api.prehook(first.grad_fn, hook)
    backward((first + last).sum(), mode)
    assert nones == [False, True, False]
    assert (x.grad.tolist(), y.grad.tolist()) == ([6, 6], [15, 15])


@both_in_modes
@in_both_languages
@pytest.mark.parametrize("kind", ["prehook", "posthook"])
def test_hooks_that_are_removed(api: Any, mode: str, language: str, kind: str) -> None:
    """Before, and by one that runs before them; twice does no harm."""
    calls: list[str] = []
    handles: dict[str, Any] = {}

    def removes(*values: object) -> None:
        calls.append("removes")
        handles["later"].remove()
        handles["gone"].remove()

    x = leaf()
    y = DOUBLE[language](x)
    register = getattr(api, kind)
    handles["gone"] = register(y.grad_fn, note(calls, "gone"))
    register(y.grad_fn, removes)
    handles["later"] = register(y.grad_fn, note(calls, "later"))
    handles["gone"].remove()
    backward(y.sum(), mode)
    assert calls == ["removes", "later"]
    assert x.grad.tolist() == [2, 2]


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

"""How long hooks live, as PyTorch's own tests of autograd ask for it, on its registration and ours.

``autograd_suite.json`` tells which of PyTorch's tests is expressed by which of these.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from autograd_apis import Ours, accumulator, both, leaf
from torch import Tensor, nn
from torch.autograd import Function

KINDS = ["hook", "prehook", "posthook"]
in_kinds = pytest.mark.parametrize("kind", KINDS)


class Double(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Halves(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        half = len(x) // 2
        return x[:half].clone(), x[half:].clone()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return torch.cat((first, second))


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "in c++": lambda x: x * 2,
    "in python": Double.apply,
    "one of two, in c++": lambda x: (x * 2).split(1)[0],
    "one of two, in python": lambda x: Halves.apply(x)[0],
}
with_operations = pytest.mark.parametrize("operation", OPERATIONS)
backwards = pytest.mark.parametrize("backward", ["not run", "run", "run, graph retained"])


class Marker:
    """Stands for what a hook holds."""


@pytest.fixture(autouse=True, scope="module")
def only_new_objects_are_collected() -> Iterator[None]:
    """Else each collection looks through all that torch has imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Only counting references frees anything."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def holding(*held: object) -> Callable[..., None]:
    def hook(*values: object) -> None:
        assert held

    return hook


def register(api: Any, kind: str, tensor: Tensor, hook: Callable[..., Any]) -> Any:
    return getattr(api, kind)(
        tensor if kind in ("hook", "post_accumulate") else tensor.grad_fn, hook
    )


def run(tensor: Tensor, backward: str) -> None:
    if backward != "not run":
        tensor.sum().backward(retain_graph=backward != "run")


# ---- without the garbage collector ---------------------------------------------------------------


def hooked_node(
    api: Any, kind: str, operation: str, backward: str, *, holds_node: bool
) -> tuple[weakref.ref[Marker], Any]:
    """An object that only the hook of a freed node holds, and the hook's handle."""
    marker = Marker()
    y = OPERATIONS[operation](leaf())
    held = (marker, y.grad_fn) if holds_node else (marker,)
    handle = register(api, kind, y, holding(*held))
    run(y, backward)
    return weakref.ref(marker), handle


@both
@in_kinds
@with_operations
@backwards
@pytest.mark.parametrize("holds_node", [False, True])
def test_a_hook_goes_with_its_node(
    api: Any, kind: str, operation: str, backward: str, holds_node: bool
) -> None:
    """Only the garbage collector frees one that holds its node."""
    with no_collection():
        gone, handle = hooked_node(api, kind, operation, backward, holds_node=holds_node)
        assert holds_node or gone() is None
    gc.collect()
    assert gone() is None
    handle.remove()


@both
@pytest.mark.parametrize("kind", ["hook", "post_accumulate"])
@backwards
def test_a_hook_goes_with_its_leaf(api: Any, kind: str, backward: str) -> None:
    marker = Marker()
    gone = weakref.ref(marker)
    x = leaf()
    handle = register(api, kind, x, holding(marker))
    del marker
    with no_collection():
        run(x * 2, backward)
        assert gone() is not None
        del x
        assert gone() is None
    handle.remove()


@both
def test_a_hook_goes_with_a_copy_changed_through_a_view(api: Any) -> None:
    """Where the change saves its output."""

    def scope() -> weakref.ref[Marker]:
        marker = Marker()
        x = torch.rand(2, 2, requires_grad=True).clone()
        api.posthook(x.grad_fn, holding(marker))
        torch.nn.functional.relu(x.view(4), inplace=True)
        return weakref.ref(marker)

    with no_collection():
        assert scope()() is None


@both
@in_kinds
def test_a_hook_that_was_removed_is_let_go(api: Any, kind: str) -> None:
    y = leaf() * 2
    marker = Marker()
    gone = weakref.ref(marker)
    handle = register(api, kind, y, holding(marker))
    del marker
    assert gone() is not None
    handle.remove()
    assert gone() is None


@both
def test_a_hook_on_an_accumulator_goes_with_it(api: Any) -> None:
    """The leaf does not keep the node, so hooks on it are gone unless something else does."""
    calls: list[object] = []
    x = leaf()
    api.prehook(accumulator(x), calls.append)
    x.sum().backward()
    assert calls == []
    kept = accumulator(x)
    api.prehook(kept, calls.append)
    x.sum().backward()
    assert len(calls) == 1


# ---- cycles --------------------------------------------------------------------------------------


@both
def test_a_hook_that_holds_its_leaf(api: Any) -> None:
    def scope() -> weakref.ref[Marker]:
        marker = Marker()
        x = leaf()
        api.hook(x, holding(marker, x))
        return weakref.ref(marker)

    gone = scope()
    gc.collect()
    assert gone() is None


@both
@in_kinds
@pytest.mark.parametrize("operation", ["in c++", "in python"])
def test_a_hook_that_holds_its_node_is_not_collected_early(
    api: Any, kind: str, operation: str
) -> None:
    calls: list[str] = []

    def scope() -> Tensor:
        y = OPERATIONS[operation](leaf())
        node = y.grad_fn

        def hook(*values: object) -> None:
            calls.append(node.name())

        register(api, kind, y, hook)
        return y.clone()

    out = scope()
    for count in (1, 2):
        gc.collect()
        out.sum().backward(retain_graph=True)
        assert len(calls) == count


# ---- copies --------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("kind", ["hook", "post_accumulate"])
@pytest.mark.parametrize("make", [leaf, lambda: nn.Parameter(torch.ones(2))], ids=["leaf", "param"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.filterwarnings("ignore:backward hook .* on tensor will not be serialized")
def test_copies_have_no_hooks(
    api: Any, kind: str, make: Callable[[], Tensor], copied: Callable[[Tensor], Tensor]
) -> None:
    calls: list[object] = []
    x = make()
    register(api, kind, x, calls.append)
    other = copied(x)
    other.sum().backward()
    assert calls == []
    x.sum().backward()
    assert len(calls) == 1


@both
def test_pickling_warns_of_hooks_left_out(api: Any, request: pytest.FixtureRequest) -> None:
    if api is Ours:
        reason = "pickling says nothing of ours, which it leaves out"
        fails = pytest.mark.xfail(strict=True, raises=pytest.fail.Exception, reason=reason)
        request.applymarker(fails)
    x = leaf()
    api.hook(x, print)
    with pytest.warns(UserWarning, match="will not be serialized"):
        pickle.dumps(x)


@both
def test_hooks_go_with_a_parameter_that_changes_its_type(api: Any) -> None:
    model = nn.Linear(2, 1)
    api.hook(model.weight, lambda grad: grad * 2)

    def add(parameter: Tensor) -> None:
        parameter.grad.add_(1)

    api.post_accumulate(model.weight, add)
    model.double()
    model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    assert model.weight.grad.dtype == torch.float64
    assert model.weight.grad.tolist() == [[3, 3]]


@both
def test_swapped_tensors_swap_their_hooks(api: Any) -> None:
    x, y = leaf(), leaf()
    api.hook(x, lambda grad: grad * 2)
    torch.utils.swap_tensors(x, y)
    (x + y).sum().backward()
    assert (x.grad.tolist(), y.grad.tolist()) == ([1, 1], [2, 2])

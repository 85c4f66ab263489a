"""How long hooks live, changes in place, and gradcheck, as in PyTorch's own tests of autograd.

``autograd_suite.json`` tells which of PyTorch's tests is expressed by which of these.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from autograd_apis import Ours, accumulator, backward, both, both_in_modes, function, leaf, note
from torch import Tensor, nn
from torch.autograd import Function, gradcheck
from torch.autograd.gradcheck import GradcheckError

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


#: Two outputs, whose gradients count twice and three times.
Both = function(lambda ctx, x: (x * 2, x * 3), lambda ctx, first, second: first * 2 + second * 3)
TWO_OUTPUTS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "in python": Both.apply,
    "in c++": functools.partial(torch.var_mean, dim=0),
}
two_outputs = pytest.mark.parametrize("kind", TWO_OUTPUTS)


# ---- in place ------------------------------------------------------------------------------------


@both_in_modes
@pytest.mark.parametrize("times", [1, 2])
def test_a_hook_stays_with_the_version_it_was_registered_for(
    api: Any, mode: str, times: int
) -> None:
    seen: list[Tensor] = []

    def old(grad: Tensor) -> Tensor:
        seen.append(grad * 1)
        return grad + 10

    def new(grad: Tensor) -> Tensor:
        seen.append(grad * 1)
        return grad + 1

    x = leaf()
    y = x.clone()
    api.hook(y, old)
    for _ in range(times):
        y.mul_(2)
    api.hook(y, new)
    backward(y.sum(), mode)
    before = 2 * 2**times  # (1 + 1), doubled
    assert [grad.tolist() for grad in seen] == [[1, 1], [before, before]]
    assert x.grad.tolist() == [before + 10] * 2


@both_in_modes
@two_outputs
def test_versions_of_one_of_two_outputs(api: Any, mode: str, kind: str) -> None:
    seen: dict[str, Tensor] = {}

    def keeping(name: str) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            seen[name] = grad * 1

        return hook

    first, second = TWO_OUTPUTS[kind](torch.rand(3, 3, requires_grad=True))
    api.hook(first, keeping("first"))
    api.hook(second, keeping("second"))
    first.mul_(2)
    api.hook(first, keeping("first, changed"))
    backward((first + second * 3).sum(), mode)
    assert {name: set(grad.flatten().tolist()) for name, grad in seen.items()} == {
        "first, changed": {1}, "first": {2}, "second": {3},
    }  # fmt: skip


@both_in_modes
def test_changing_a_view_gives_other_views_new_versions(api: Any, mode: str) -> None:
    calls: list[str] = []
    base = leaf(1.0).clone()
    view, other = base[:], base[:]
    api.hook(view, note(calls, "view before"))
    api.hook(other, note(calls, "other before"))
    view.mul_(2)
    assert other.grad_fn is not None  # asking makes the new version
    api.hook(other, note(calls, "other"))
    backward((view + other).sum(), mode)
    assert calls == ["other"]


@both
def test_the_node_of_a_replaced_view_does_not_run(api: Any) -> None:
    calls: list[str] = []
    x, y = leaf(), leaf()
    view = x.clone().view(-1)
    api.hook(view, note(calls, "old view"))
    total = view + y
    view += y
    grads = torch.autograd.grad((view + total).sum(), (total, y), retain_graph=True)
    assert [grad.tolist() for grad in grads] == [[1, 1], [2, 2]]
    assert calls == []
    torch.autograd.grad((view + total).sum(), x)  # where it is needed, it does
    assert calls == ["old view"]


@both
def test_retain_grad_moves_where_hooks_stay(api: Any) -> None:
    calls: list[str] = []
    x = leaf()
    y = x.clone()
    y.retain_grad()
    api.hook(y, lambda grad: grad * 5)
    api.hook(y, note(calls, "before"))
    y.mul_(3)
    y.sum().backward()
    assert calls == ["before"]
    assert y.grad.tolist() == [1, 1]
    assert x.grad.tolist() == [15, 15]


@both
@two_outputs
def test_retain_grad_of_two_outputs(api: Any, kind: str) -> None:
    x = torch.rand(3, 3, requires_grad=True)
    first, second = TWO_OUTPUTS[kind](x)
    for tensor in (first, second):
        tensor.retain_grad()
        api.hook(tensor, lambda grad: grad * 7)
    first.mul_(2)
    (first + second).sum().backward()
    assert torch.equal(first.grad, torch.ones_like(first))
    assert torch.equal(second.grad, torch.full_like(second, 7))


@both
def test_retain_grad_of_views(api: Any) -> None:
    calls: list[str] = []
    base = leaf(1.0).clone()
    view, other = base[:], base[:]
    for tensor in (view, other):
        tensor.retain_grad()
        api.hook(tensor, note(calls, "view"))
    (view + other).sum().backward(retain_graph=True)
    assert calls == ["view", "view"]
    calls.clear()
    view.mul_(2)
    view.grad = other.grad = None
    (view + other).sum().backward()
    assert [view.grad.item(), other.grad.item()] == [1, 1]
    assert calls == []


# ---- gradcheck -----------------------------------------------------------------------------------


def hooked(api: Any, function: Callable[[Tensor], Tensor], hook: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        y = function(x)
        api.hook(y, hook)
        return y

    return forward


def shifted(grad: Tensor) -> Tensor:
    return grad + 0.01


MISMATCHES: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype, str]] = {
    "real": (torch.clone, torch.float64, "Jacobian mismatch for output 0"),
    "complex": (torch.clone, torch.complex128, "imaginary part of complex outputs only"),
    "to complex": (
        lambda x: torch.complex(x, x), torch.float64, "imaginary part of complex outputs only",
    ),
    "to real": (torch.real, torch.complex128, "Jacobian mismatch for output 0"),
}  # fmt: skip


@both
@pytest.mark.parametrize("case", MISMATCHES)
def test_gradcheck_notices_changed_gradients(api: Any, case: str) -> None:
    function, dtype, message = MISMATCHES[case]
    x = torch.ones(2, 2, dtype=dtype, requires_grad=True)
    forward = hooked(api, function, shifted)
    for fast in (False, True) if case == "real" else (False,):
        with pytest.raises(GradcheckError, match=message):
            gradcheck(forward, (x,), fast_mode=fast)
        assert not gradcheck(forward, (x,), raise_exception=False, fast_mode=fast)


@both
def test_gradcheck_accepts_hooks_that_change_nothing(api: Any) -> None:
    calls: list[str] = []

    def scaled(grad: Tensor | None) -> Tensor | None:
        calls.append("scaled")
        return None if grad is None else grad * 1

    x = torch.rand(2, 2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(hooked(api, torch.sin, scaled), (x,), check_batched_grad=True)
    assert calls


@both
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_gradcheck_notices_gradients_from_nowhere(api: Any, sparse: bool) -> None:
    x = torch.ones(1, dtype=torch.float64)
    x = (x.to_sparse() if sparse else x).requires_grad_()
    function = torch.Tensor.to_dense if sparse else torch.clone
    with pytest.raises(GradcheckError, match="backward not multiplied by grad_output"):
        gradcheck(
            hooked(api, lambda x: function(x.clone()), shifted),
            (x,), atol=0.1, masked=sparse, check_batched_grad=False,
        )  # fmt: skip


@both
def test_gradcheck_notices_other_sparse_dimensions(api: Any) -> None:
    def restructured(grad: Tensor) -> Tensor:
        return grad.to_dense().to_sparse(1)

    def forward(x: Tensor) -> Tensor:
        return hooked(api, torch.clone, restructured)(x).to_dense()

    x = torch.ones(2, 2, dtype=torch.float64).to_sparse().requires_grad_()
    with pytest.raises(GradcheckError, match="grad is sparse tensor, but has incorrect sparse_dim"):
        gradcheck(forward, (x,), atol=0.1, masked=True, check_batched_grad=False)


@both
@pytest.mark.filterwarnings("ignore:Backwards compatibility")
def test_gradcheck_tries_hooks_without_a_gradient(api: Any) -> None:
    def refuses(grad: Tensor | None) -> None:
        if grad is None:
            raise RuntimeError("no gradient")

    x = torch.ones(1, dtype=torch.float64, requires_grad=True)
    with pytest.raises(GradcheckError, match="to handle undefined output grads"):
        gradcheck(hooked(api, torch.clone, refuses), (x,))

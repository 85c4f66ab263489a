"""Hooks on tensors and views that are then changed in place, and what gradcheck says of hooks.

``autograd_suite.json`` tells which of PyTorch's tests is expressed by which of these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from autograd_apis import backward, both, both_in_modes, function, leaf, note
from torch import Tensor
from torch.autograd import gradcheck
from torch.autograd.gradcheck import GradcheckError

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

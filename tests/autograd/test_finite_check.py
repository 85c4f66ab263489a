"""FiniteCheck: what it counts, on which road, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from autograd_apis import backward, both_in_modes, leaf
from on_ranks import of_all_ranks, on_ranks
from sharded_models import batch, loss_of, sharded
from torch import Tensor
from torch_releases import HOOKS_MAY_WRITE, since

from torch_commhook import attach, autograd
from torch_commhook.autograd import FiniteCheck

NAN, INF = float("nan"), float("inf")

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize(
    ("tensors", "got"),
    [
        (3, "int"),
        (torch.tensor(1.0), "torch.Tensor"),
        ([("x", leaf()), torch.ones(2)], "torch.Tensor in place 1"),
        ([("x", 3)], r"\(str, int\) in place 0"),
        ([([], leaf())], r"\(list, torch.Tensor\) in place 0"),
    ],
)
def test_only_named_tensors_are_watched(tensors: Any, got: str) -> None:
    with pytest.raises(TypeError, match=rf"pairs of a name and a tensor, .* got {got}$"):
        FiniteCheck().watch(tensors)


def test_names_need_not_be_strings() -> None:
    check, x = FiniteCheck(), leaf()
    check.watch(enumerate([x]))
    (x * INF).sum().backward()
    with pytest.raises(RuntimeError, match=r"2 of 0$"):
        check.raise_if_nonfinite()


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def test_nothing_is_watched_where_a_tensor_cannot_be() -> None:
    check, x = FiniteCheck(), leaf(INF)
    with pytest.raises(RuntimeError, match="'bad' must require grad"):
        check.watch([("good", x), ("bad", torch.ones(1))])
    (x * INF).sum().backward()
    check.raise_if_nonfinite()


@both_in_modes
def test_a_hook_of_any_tensor(api: Any, mode: str) -> None:
    check = FiniteCheck()
    for step in range(1, 4):
        x = leaf(1.0, 2.0, 3.0)
        y = x * 2
        for tensor in (x, y):
            api.hook(tensor, check)
        backward((y * torch.tensor([1, NAN, INF])).sum(), mode)
        assert int(check.count) == 4 * step
        assert x.grad[0] == 2  # as it was


@both_in_modes
def test_a_hook_after_accumulation_looks_at_the_gradient(api: Any, mode: str) -> None:
    check, x = FiniteCheck(), leaf(INF, 2.0)  # the parameter itself is not checked
    api.post_accumulate(x, check)
    backward((x * torch.tensor([1.0, 2.0])).sum(), mode)
    assert int(check.count) == 0
    backward((x * torch.tensor([1.0, NAN])).sum(), mode)
    assert int(check.count) == 1
    backward((x * torch.tensor([1.0, 1.0])).sum(), mode)
    assert int(check.count) == 2  # what was accumulated before is still there


@since("2.13")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_in_compiled_code(backend: str) -> None:
    check = FiniteCheck()

    def function(x: Tensor) -> Tensor:
        y = x * 2
        check(y)
        y.register_hook(check)
        return (y * torch.tensor([1.0, NAN])).sum()

    compiled = torch.compile(function, backend=backend, fullgraph=HOOKS_MAY_WRITE)
    for step in range(3):
        loss = compiled(torch.tensor([1.0, INF], requires_grad=True))
        assert int(check.count) == 2 * step + 1
        loss.backward()
        assert int(check.count) == 2 * step + 2


def run_eager(module: torch.nn.Module, loss_of: Callable[[Tensor], Tensor]) -> None:
    loss_of(module(torch.ones(5, 3))).backward()


def run_compiled(module: torch.nn.Module, loss_of: Callable[[Tensor], Tensor]) -> None:
    loss_of(torch.compile(module, backend="aot_eager")(torch.ones(5, 3))).backward()


def run_all_compiled(module: torch.nn.Module, loss_of: Callable[[Tensor], Tensor]) -> None:
    with torch._dynamo.compiled_autograd._enable(
        torch.compile(backend="aot_eager", fullgraph=True)
    ):
        run_compiled(module, loss_of)


@pytest.mark.parametrize("run", [run_eager, run_compiled, run_all_compiled])
def test_watching_a_model(run: Callable[..., None]) -> None:
    module, check = model(), FiniteCheck()
    module[0].weight.requires_grad_(False)
    handles = check.watch(module)
    assert len(handles) == 3
    run(module, lambda y: y.sum())
    check.raise_if_nonfinite()
    for step in range(1, 3):
        run(module, lambda y: (y * torch.tensor([NAN, 0.0])).sum())
        assert int(check.count) == step * (4 + 4 + 1)
    with pytest.raises(RuntimeError) as error:
        check.raise_if_nonfinite()
    assert str(error.value) == (
        "FiniteCheck: gradients must be finite, got 18 infinite or NaN values: "
        "8 of '0.bias', 8 of '2.weight', 2 of '2.bias'"
    )
    check.reset()
    check.raise_if_nonfinite()
    for handle in handles:
        handle.remove()
    run(module, lambda y: y.sum() * NAN)
    assert int(check.count) == 0


def test_tensors_by_name_and_without() -> None:
    check = FiniteCheck("cpu")
    for _ in range(2):
        x = leaf(1.0, 2.0)
        y = x * 2
        check.watch([("y", y), ("x", x)])
        autograd.register_hook(y, check)
        (y * NAN).sum().backward()
    with pytest.raises(RuntimeError, match=r"got 12 .*: 4 of 'y', 4 of 'x', 4 of tensors that are"):
        check.raise_if_nonfinite()


def test_many_names() -> None:
    check = FiniteCheck()
    tensors = [(f"t{i}", leaf(1.0)) for i in range(14)]
    check.watch(tensors)
    sum(tensor * NAN for _, tensor in tensors).backward()
    with pytest.raises(RuntimeError, match=r"got 14 .* 1 of 't0', .* 1 of 't9', and of 4 more$"):
        check.raise_if_nonfinite()


def test_gradients_of_gradients() -> None:
    check, x = FiniteCheck(), leaf(1.0, 2.0)
    y = x**3
    check.watch([("y", y)])
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    grad.sum().backward()
    assert x.grad.tolist() == [6, 12] and int(check.count) == 0


@pytest.mark.parametrize("place", ["fsdp-2", "hsdp-2", "replicate-2"])
@pytest.mark.parametrize("attached", [False, True])
@on_ranks(2)
def test_watching_a_sharded_model(rank: int, attached: bool, place: str) -> None:
    """Each rank counts the values of its shards."""
    module, check, seen = sharded(place), FiniteCheck(), FiniteCheck()
    if attached:
        attach(module, "allreduce()")
    check.watch(module)
    for parameter in module.parameters():
        autograd.register_post_accumulate_grad_hook(parameter, seen)
    (loss_of(module(batch(rank, 0))) * NAN).backward()
    own = sum(parameter.to_local().numel() for parameter in module.parameters())
    assert int(check.count) == int(seen.count) == own
    elements = sum(parameter.numel() for parameter in module.parameters())
    assert sum(of_all_ranks(own)) == elements * (1 if place == "fsdp-2" else 2)
    with pytest.raises(RuntimeError, match=f"got {own} infinite or NaN values: .* of '0.weight'"):
        check.raise_if_nonfinite()


def test_sparse_gradients() -> None:
    check, table = FiniteCheck(), torch.nn.Embedding(10, 3, sparse=True)
    check.watch(table)
    (table(torch.tensor([1, 1, 4])) * torch.tensor([1, NAN, 1])).sum().backward()
    assert table.weight.grad.is_sparse and int(check.count) == 3


def test_made_in_inference_mode() -> None:
    with torch.inference_mode():
        check = FiniteCheck()
    x = leaf(1.0)
    autograd.register_hook(x, check)
    (x * NAN).backward()
    assert int(check.count) == 1


def test_refused() -> None:
    check = FiniteCheck("meta")
    with pytest.raises(ValueError, match="'w' must be on the device of the check, meta, got cpu;"):
        check.watch([("w", leaf(1.0))])
    with pytest.raises(ValueError, match=r"^check_finite: tensors\[0\] must be on the device of"):
        check(leaf(1.0))

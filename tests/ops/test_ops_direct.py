"""The bucket operators past torch.ops: the same for everyone who has a say in a call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_commhook.native.bucket_ops as ops
from torch_commhook import _C

commhook = torch.ops.commhook


def tensors() -> list[Tensor]:
    return [torch.arange(3.0), torch.arange(8.0).view(2, 4).t()]


def flatten(given: list[Tensor]) -> Tensor:
    return ops.flatten(given, scale=0.5, out=torch.empty(11))


def unflatten_into(given: list[Tensor]) -> Tensor:
    into = [torch.zeros_like(tensor) for tensor in given]
    ops.unflatten_into(torch.arange(11.0), into, scale=0.5)
    return torch.cat([tensor.reshape(-1) for tensor in into])


BOTH = pytest.mark.parametrize("call", [flatten, unflatten_into])


def test_plain_calls_go_past_torch_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_ops", None)
    want = torch.cat([tensor.reshape(-1) for tensor in tensors()]) * 0.5
    assert torch.equal(flatten(tensors()), want)
    assert torch.equal(ops.flatten(tuple(tensors()), scale=0.5, out=torch.empty(11)), want)
    assert torch.equal(unflatten_into(tensors()), torch.arange(11.0) * 0.5)
    parameter = torch.nn.Parameter(torch.ones(2))
    with torch.no_grad():
        assert ops.flatten([parameter], out=torch.empty(2)).tolist() == [1, 1]


@pytest.mark.parametrize("scale", [2, True, torch.tensor(2.0)])
def test_other_numbers_go_through_torch_ops(scale: float) -> None:
    assert not _C.flatten_out([torch.ones(2)], scale, torch.empty(2))
    assert not _C.unflatten_into(torch.ones(2), [torch.empty(2)], scale)
    assert ops.flatten([torch.ones(2)], scale=scale, out=torch.empty(2)).tolist() == [scale] * 2
    into = torch.empty(2)
    ops.unflatten_into(torch.ones(2), [into], scale=scale)
    assert into.tolist() == [scale] * 2


@pytest.mark.parametrize(
    ("base", "method"),
    [(TorchDispatchMode, "__torch_dispatch__"), (TorchFunctionMode, "__torch_function__")],
)
@BOTH
def test_a_mode_sees_the_operator(
    call: Callable[[list[Tensor]], Tensor], base: type, method: str
) -> None:
    seen = []

    def see(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        seen.append(func)
        return func(*args, **(kwargs or {}))

    want = call(tensors())
    with type("Mode", (base,), {method: see})():
        assert torch.equal(call(tensors()), want)
    operators = {commhook.flatten.out, commhook.unflatten_into.default}
    if base is TorchFunctionMode:
        operators.add(commhook.unflatten_into)
    assert operators & set(seen)


def test_a_subclass_is_asked() -> None:
    seen = []

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    def asked_of(call: Callable[..., object], *arguments: object, **options: object) -> bool:
        seen.clear()
        call(*arguments, **options)
        return any("commhook" in name for name in seen)

    asked, out = torch.ones(2).as_subclass(Asked), torch.empty(2)
    assert asked_of(ops.flatten, [torch.ones(0), asked], out=out)
    assert out.tolist() == [1, 1]
    assert asked_of(ops.flatten, [torch.ones(2)], out=asked)
    assert asked_of(ops.unflatten_into, asked, [out])
    assert asked_of(ops.unflatten_into, out, [asked])


@BOTH
def test_traced_and_compiled(call: Callable[[list[Tensor]], Tensor]) -> None:
    want = call(tensors())
    assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(tensors()), want)
    traced = torch.fx.experimental.proxy_tensor.make_fx(call)(tensors())
    assert torch.equal(traced(tensors()), want) and "commhook" in traced.code


@pytest.mark.parametrize("bad", [None, 3, "x", [torch.ones(1), None], [[torch.ones(1)]]])
def test_what_is_no_list_of_tensors(bad: object) -> None:
    with pytest.raises((TypeError, RuntimeError, ValueError), match="flatten"):
        ops.flatten(bad, out=torch.empty(1))  # type: ignore[arg-type]
    with pytest.raises((TypeError, RuntimeError, ValueError), match="unflatten_into"):
        ops.unflatten_into(torch.empty(1), bad)  # type: ignore[arg-type]
    assert not _C.flatten_out(bad, 1.0, torch.empty(1))  # type: ignore[arg-type]
    assert not _C.unflatten_into(torch.empty(1), bad, 1.0)  # type: ignore[arg-type]


def test_refusals_are_the_same() -> None:
    memory = torch.ones(8)
    for call in (
        lambda: ops.flatten([memory[:4]], out=memory[2:6]),
        lambda: commhook.flatten.out([memory[:4]], out=memory[2:6]),
    ):
        with pytest.raises(ValueError, match=r"^flatten: out must share no memory"):
            call()
    for write in (ops.unflatten_into, commhook.unflatten_into):
        with pytest.raises(ValueError, match=r"^unflatten_into: tensors must share no memory"):
            write(torch.ones(8), [memory[:4], memory[3:7]])
        with pytest.raises(RuntimeError, match=r"unflatten_into: tensors\[0\] must not require"):
            write(torch.ones(2), [torch.ones(2, requires_grad=True)])

"""The checks of hooks as operators: that each call runs exactly once, and what a hook may not do.

What check_finite counts is tested in test_ops_check_finite.py, ``FiniteCheck`` in
test_finite_check.py, what CUDA does in test_cuda_check.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from ops_reference import DTYPES, INF, NAN, new_count, of, one_thread  # noqa: F401
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_releases import HOOKS_MAY_WRITE, since

from torch_commhook import autograd
from torch_commhook.native.check_ops import check_finite, check_hook_result

commhook = torch.ops.commhook
backends = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Calls:
    """The hooks' names in the calls that the kernel of check_hook_result has got."""

    def __init__(self) -> None:
        self.hooks: list[str] = []

    def __call__(self, result: Tensor, value: Tensor, hook: str) -> None:
        self.hooks.append(hook)

    def of(self, function: Callable[[], Any]) -> int:
        """How many a function makes."""
        before = len(self.hooks)
        function()
        return len(self.hooks) - before


@pytest.fixture
def calls() -> Iterator[Calls]:
    kernel = Calls()
    library = torch.library.Library("commhook", "IMPL")
    library.impl("check_hook_result", kernel, "CPU")
    yield kernel
    library._destroy()


def compiled_autograd(backend: str) -> Any:
    return torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True))


# ---- check_hook_result: what it refuses ----------------------------------------------------------

F32 = r"torch\.float32, torch\.strided, cpu"
REFUSED = {
    "dtype": (lambda v: v.half(), rf"type of value \(was {F32}, got torch.float16, torch.strided"),
    "layout": (
        lambda v: v.to_sparse(),
        rf"type of value \(was {F32}, got torch.float32, torch.sparse_coo, cpu\)$",
    ),
    "device": (
        lambda v: torch.empty_like(v, device="meta"),
        rf"type of value \(was {F32}, got torch.float32, torch.strided, meta\)$",
    ),
    "length": (lambda v: v[:1], r"size of value \(was \[2, 3\], got \[1, 3\]\)$"),
    "dimensions": (lambda v: v[None], r"size of value \(was \[2, 3\], got \[1, 2, 3\]\)$"),
    "scalar": (lambda v: v.sum(), r"size of value \(was \[2, 3\], got \[\]\)$"),
}


@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode, torch.inference_mode])
@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, mode: Any) -> None:
    make_result, message = REFUSED[what]
    with mode():
        value = torch.ones(2, 3)
        with pytest.raises(RuntimeError, match=rf"^hook 'halve' has changed the {message}"):
            check_hook_result(make_result(value), value, "halve")


def test_accepted() -> None:
    value = torch.ones(2, 3)
    sparse = value.to_sparse()
    for result, was in (
        (value, value),
        (torch.empty(3, 2).t(), value),
        (torch.empty(0, 3), torch.empty(0, 3)),
        (sparse, sparse * 2),
        (value.to("meta"), value.to("meta")),
        (value.clone().requires_grad_(), value),
        (value.to(torch.complex64).conj(), value.to(torch.complex64)),
    ):
        assert check_hook_result(result, was, "hook") is None


def test_a_result_stays_differentiable_twice() -> None:
    def hook(grad: Tensor) -> Tensor:
        result = grad**2
        check_hook_result(result, grad, "square")
        return result

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = x**2
    y.register_hook(hook)
    (first,) = torch.autograd.grad((y * x).sum(), x, create_graph=True)
    assert first.tolist() == [3, 20]  # x^2 from the product, 2 x * x^2 through the hook
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.tolist() == [8, 28]  # 2 x + 6 x^2


# ---- check_hook_result: each call runs once ------------------------------------------------------


def forward(x: Tensor) -> Tensor:
    y = x.sin()
    check_hook_result(y, x, "first")
    check_hook_result(y, x, "first")  # not the same call
    check_hook_result(x, x, "last")
    return y * 2


def hooked(x: Tensor) -> Tensor:
    def hook(grad: Tensor) -> Tensor:
        check_hook_result(y, z, "of the forward's values")
        result = grad * 2
        check_hook_result(result, grad, "of the gradient")
        return result

    y, z = x.sin(), x.cos()
    y.register_hook(hook)
    return (y * z).sum()


@backends
def test_calls_in_compiled_code(calls: Calls, backend: str) -> None:
    function = torch.compile(forward, backend=backend, fullgraph=True)
    for x in (torch.ones(3), torch.ones(3, requires_grad=True)):
        for _ in range(2):
            calls.hooks.clear()
            y = function(x)
            assert calls.hooks == ["first", "first", "last"]
            if x.requires_grad:
                assert calls.of(y.sum().backward) == 0


@since("2.13")
@backends
def test_calls_in_a_compiled_backward(calls: Calls, backend: str) -> None:
    function = torch.compile(hooked, backend=backend, fullgraph=True)
    for _ in range(2):
        calls.hooks.clear()
        loss = function(torch.ones(3, requires_grad=True))
        assert calls.hooks == []
        loss.backward()
        assert calls.hooks == ["of the forward's values", "of the gradient"]


@backends
def test_calls_under_compiled_autograd(calls: Calls, backend: str) -> None:
    def hook(grad: Tensor) -> Tensor:
        result = grad + 1
        check_hook_result(result, grad, "hook")
        return result

    def step() -> None:
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        for tensor in (x, y):
            autograd.register_hook(tensor, hook)
        y.sum().backward()

    with compiled_autograd(backend):
        for _ in range(3):
            assert calls.of(step) == 2


class Checked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", new_count())

    def forward(self, x: Tensor) -> Tensor:
        y = x.log()
        check_hook_result(y, x, "log")
        check_finite([y, x], self.count)
        return y + 1


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("road", ["export", "decompose", "save", "compile"])
def test_calls_in_an_exported_program(calls: Calls, road: str, strict: bool, tmp_path: Any) -> None:
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(
        Checked(), (torch.ones(4, 3),), dynamic_shapes={"x": {0: rows}}, strict=strict
    )
    if road == "decompose":
        program = program.run_decompositions()
    elif road == "save":
        torch.export.save(program, tmp_path / "program.pt2")
        program = torch.export.load(tmp_path / "program.pt2")
    module = program.module()
    run = torch.compile(module, fullgraph=True) if road == "compile" else module
    assert calls.of(lambda: run(torch.ones(2, 3))) == 1
    assert calls.of(lambda: run(torch.zeros(7, 3))) == 1
    assert int(module.count) == 21


def test_nothing_is_copied_once_compiled() -> None:
    def function(x: Tensor, count: Tensor) -> Tensor:
        y = x.sin()
        check_hook_result(y, x, "sin")
        check_finite([y], count)
        return y

    function = torch.compile(function, fullgraph=True)
    _, (code,) = run_and_get_code(function, torch.ones(3, 4), new_count())
    assert code.count("commhook.check_hook_result.default(") == 1, code
    assert code.count("commhook.check_finite.default(") == 1, code
    made = [line for line in code.splitlines() if " = empty_strided_cpu(" in line]
    assert len(made) == 1, code  # y itself


# ---- dynamic shapes ------------------------------------------------------------------------------


@backends
def test_sizes_that_change_do_not_compile_again(calls: Calls, backend: str) -> None:
    def function(x: Tensor, y: Tensor, count: Tensor) -> Tensor:
        check_hook_result(x, y, "hook")
        check_finite([x, y], count)
        return x + 1

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    count = new_count()
    for size in (3, 5, 8):
        x, y = torch.full((size,), NAN), torch.ones(size)
        for tensor in (x, y):
            torch._dynamo.mark_dynamic(tensor, 0)
        assert calls.of(lambda x=x, y=y: compiled(x, y, count)) == 1
    assert counter.frame_count == 1 and int(count) == 16


@backends
def test_sizes_that_only_the_kernel_knows(backend: str) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        positive = x.masked_select(x > 0)
        check_hook_result(positive, y, "positive")
        return positive * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        assert compiled(torch.tensor([1.0, -1.0, 2.0]), torch.ones(2)).tolist() == [2, 4]
        with pytest.raises(RuntimeError, match=r"'positive' has changed the size.*\[2\], got \[3"):
            compiled(torch.tensor([1.0, 3.0, 2.0]), torch.ones(2))


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_mismatch_comes_out_of_backward(mode: str) -> None:
    def hook(grad: Tensor) -> Tensor:
        check_hook_result(grad[:1], grad, "first_only")
        return grad

    x = torch.ones(3, requires_grad=True)
    autograd.register_hook(x, hook)
    with (
        compiled_autograd("aot_eager") if mode == "compiled" else nullcontext(),
        pytest.raises(Exception, match="hook 'first_only' has changed the size of value") as error,
    ):
        (x * 2).sum().backward()
    assert isinstance(error.value, RuntimeError)


# ---- check_finite: each call counts once ---------------------------------------------------------


@backends
def test_counts_in_compiled_code(backend: str) -> None:
    def function(x: Tensor, count: Tensor) -> Tensor:
        y = x * 2
        check_finite([y, x], count)
        check_finite([y, x], count)
        return y.nan_to_num().sum()

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    count = new_count()
    for step in range(1, 4):
        x = torch.tensor([1.0, NAN, INF], requires_grad=step > 1)
        loss = compiled(x, count)
        assert int(count) == 8 * step
        if step > 1:
            loss.backward()
        assert int(count) == 8 * step


@backends
def test_counts_in_a_compiled_backward(backend: str) -> None:
    count = new_count()

    def function(x: Tensor) -> Tensor:
        def hook(grad: Tensor) -> None:
            check_finite([grad], count)
            check_finite([y], count)

        y = x * torch.tensor([1.0, NAN])
        check_finite([y], count)
        y.register_hook(hook)
        return (y * torch.tensor([INF, NAN])).sum()

    compiled = torch.compile(function, backend=backend, fullgraph=HOOKS_MAY_WRITE)
    for step in range(3):
        loss = compiled(torch.ones(2, requires_grad=True))
        assert int(count) == 4 * step + 1
        loss.backward()
        assert int(count) == 4 * step + 4


# ---- both ----------------------------------------------------------------------------------------


def samples() -> Iterator[Any]:
    x = torch.ones(3, 4)
    for grad in (False, True):
        a, b = (x.clone().requires_grad_(grad) for _ in range(2))
        yield commhook.check_hook_result.default, (a, b, "hook")
        yield commhook.check_hook_result.default, (a, a, "")
        yield commhook.check_finite.default, ([a, b.t(), a[:, ::2]], new_count())
    yield commhook.check_hook_result.default, (x[:0], x[:0], "hook")
    yield commhook.check_hook_result.default, (x.sum(), x.sum(), "hook")
    yield commhook.check_finite.default, ([], new_count())
    yield commhook.check_finite.default, ([x[:0], x.int(), x.sum()], of(1))
    for dtype in (*DTYPES, torch.complex64):
        yield commhook.check_finite.default, ([x.to(dtype) * NAN], new_count())


@pytest.mark.parametrize("sample", range(15))
def test_opcheck(sample: int) -> None:
    every = list(samples())
    assert len(every) == 15
    operator, arguments = every[sample]
    torch.library.opcheck(operator, arguments)


def test_none_is_no_tensor() -> None:
    x, count = torch.ones(2), new_count()
    for call, message in [
        (lambda: commhook.check_hook_result(None, x, "f"), "check_hook_result: result must be a t"),
        (lambda: commhook.check_hook_result(x, None, "f"), "check_hook_result: value must be a t"),
        (lambda: commhook.check_finite([x], None), "check_finite: count must be a tensor, got No"),
        (lambda: commhook.check_finite([None], count), "tensors"),  # PyTorch's message
    ]:
        with pytest.raises((TypeError, RuntimeError), match=message):
            call()

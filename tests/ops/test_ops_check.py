"""The checks of hooks as operators: each call runs once, what a hook may not do, what is counted.

``FiniteCheck`` is tested in test_finite_check.py, what CUDA does in test_cuda_check.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from ops_reference import (
    DTYPES,
    INF,
    LEVELS,
    NAN,
    SHAPE_CLASSES,
    SOURCE_CLASSES,
    check_counts,
    check_counts_of_16_bits,
    counted,
    cpu_level,
    new_count,
    of,
    one_thread,  # noqa: F401
    threads,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_releases import HOOKS_MAY_WRITE, since

from torch_commhook import autograd
from torch_commhook.native.bucket_ops import check_finite, check_hook_result

commhook = torch.ops.commhook
backends = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
each_level = pytest.mark.parametrize("level", LEVELS)
two_levels = pytest.mark.parametrize("level", ["reference", LEVELS[1]])

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
    count = new_count()

    def run(x: Tensor) -> Tensor:
        y = forward(x)
        check_finite([y, x], count)
        check_finite([y, x], count)
        return y.nan_to_num().sum()

    function = torch.compile(run, backend=backend, fullgraph=True)
    for step in range(1, 5):
        calls.hooks.clear()
        loss = function(torch.tensor([1.0, NAN, INF], requires_grad=step > 2))
        assert calls.hooks == ["first", "first", "last"]
        assert int(count) == 8 * step
        if step > 2:
            assert calls.of(loss.backward) == 0
        assert int(count) == 8 * step


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


# ---- check_finite: what it counts ----------------------------------------------------------------


@each_level
@pytest.mark.parametrize("name", [*SHAPE_CLASSES, *SOURCE_CLASSES])
def test_shapes_and_dtypes(level: str, name: str) -> None:
    with cpu_level(level):
        check_counts(name)


@each_level
def test_every_16_bit_value(level: str) -> None:
    with cpu_level(level):
        check_counts_of_16_bits()
        # The greatest of each, and the least: all bits of an exponent but one, and none.
        for dtype in DTYPES:
            info = torch.finfo(dtype)
            edges = [info.max, info.min, info.tiny, info.smallest_normal / 2, 0.0, -0.0]
            assert counted(torch.tensor(edges, dtype=dtype)) == 0
            # Blocks of nothing else overflow no lane.
            assert counted(torch.full((200_003,), NAN, dtype=dtype)[1:]) == 200_002


@pytest.mark.parametrize("count", [1, 2])
def test_threads(count: int) -> None:
    x = torch.zeros(1_000_003)
    x[::1001] = INF
    with threads(count):
        assert counted(x, x[1:], x.view(-1)[:77]) == 1000 + 999 + 1


@two_levels
def test_other_dtypes_and_layouts(level: str) -> None:
    with cpu_level(level):
        z = torch.tensor([1 + 1j, complex(NAN, 1), complex(1, INF), complex(NAN, NAN)])
        assert counted(z, z.conj(), z.to(torch.complex128)[::2]) == 3 + 3 + 1
        assert counted(torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn)) == 1
        assert counted(torch.tensor([1.0, INF, NAN]).to(torch.float8_e5m2)) == 2
        integers = [torch.ones(3, dtype=d) for d in (torch.int8, torch.int64, torch.bool)]
        assert counted(*integers) == 0
        assert counted(*integers, torch.tensor(NAN)) == 1
        dense = torch.tensor([[0.0, NAN], [INF, 1.0]])
        coo = torch.sparse_coo_tensor([[0, 0], [1, 1]], [NAN, NAN], (2, 2))  # stored twice
        assert counted(dense.to_sparse(), coo, dense) == 6
        for layout in (torch.sparse_csr, torch.sparse_csc):
            assert counted(dense.to_sparse(layout=layout)) == 2
        bsr = torch.sparse_bsr_tensor([0, 1], [0], torch.full((1, 2, 2), NAN), (2, 2))
        assert counted(bsr) == 4


def test_counts_add_up() -> None:
    count = torch.full((1, 1), 40)
    version = count._version
    check_finite([torch.tensor([NAN, 1.0])], count)
    assert count.tolist() == [[41]] and count._version == version + 1
    with torch.inference_mode():
        check_finite([torch.tensor([INF])], count)
    check_finite([], count)
    assert count.tolist() == [[42]] and count._version == version + 3
    check_finite([torch.tensor([NAN], requires_grad=True) * 2], count)
    assert count.tolist() == [[43]] and not count.requires_grad


# ---- check_finite: what it refuses ---------------------------------------------------------------


FINITE_REFUSED = {
    "dtype": (lambda: ([of()], of(dtype=torch.int32)), TypeError, "count must be of dtype torch.i"),
    "sparse": (lambda: ([], of(1).to_sparse()), TypeError, r"count must be dense .*sparse_coo$"),
    "length": (lambda: ([], of(2)), ValueError, "count must hold one element, got 2$"),
    "empty": (lambda: ([], of(0)), ValueError, "count must hold one element, got 0$"),
    "device": (
        lambda: ([of(3), of(3, device="meta")], of()),
        ValueError,
        r"tensors\[1\] must be on the device of count, cpu, got meta$",
    ),
}


@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode])
@two_levels
@pytest.mark.parametrize("what", FINITE_REFUSED)
def test_check_finite_refuses(what: str, level: str, mode: Any) -> None:
    make_arguments, error, message = FINITE_REFUSED[what]
    with cpu_level(level), mode(), pytest.raises(error, match=f"^check_finite: {message}"):
        check_finite(*make_arguments())


@two_levels
def test_what_only_the_kernel_of_check_finite_sees(level: str) -> None:
    with cpu_level(level):
        count, x = new_count(), torch.full((4,), NAN)
        with pytest.raises(TypeError, match=r"^check_finite: tensors\[1\] must be dense or sparse"):
            check_finite([x, x.to_mkldnn()], count)
        with torch.inference_mode():
            inference = new_count()
        with pytest.raises(RuntimeError, match="count must not be an inference tensor outside of"):
            check_finite([x], inference)
        x.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=r"^check_finite: tensors\[0\] must have a storage of"):
            check_finite([x], count)
        assert int(count) == 0 and int(inference) == 0


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

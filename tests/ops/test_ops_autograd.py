"""Derivatives of the bucket operators, and the operators under torch.compile and torch.export.

gradcheck, and gradients by hand in every dtype; no graph breaks, and the bits of eager.
"""

from __future__ import annotations

import pytest
import torch
from ops_reference import (
    DTYPES,
    PAIRS,
    assert_same_bits,
    converted,
    maker,
    one_thread,  # noqa: F401
)
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import torch_commhook.native.bucket_ops as ops

pytestmark = pytest.mark.usefixtures("fresh_compiler")
backends = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
new = maker(torch.float64)


def inputs(dtype=torch.float64):
    """Leaves of the common layouts."""
    make = maker(dtype)
    return [
        make(3).requires_grad_(),
        make(2, 3).t().requires_grad_(),
        make(4, 2)[:, ::2].detach().requires_grad_(),
        make().requires_grad_(),
        make(0).requires_grad_(),
        make(2, 2, 2, 1).to(memory_format=torch.channels_last).requires_grad_(),
    ]


def check_derivatives(function, given):
    assert gradcheck(function, given)
    assert gradgradcheck(function, given)


@pytest.mark.parametrize("scale", [1.0, -0.3])
def test_flatten(scale):
    def function(*tensors):
        again = tensors[0], tensors[0].expand(2, 3), tensors[1][::2]
        return ops.flatten([*tensors, *again], scale=scale)

    check_derivatives(function, inputs())


@pytest.mark.parametrize("scale", [1.0, -0.3])
def test_flatten_stats(scale):
    def function(*tensors):
        stats = ops.flatten_stats(tensors, scale=scale)
        return stats.buffer, stats.sum_of_squares

    check_derivatives(function, inputs())
    for only in (0, 1):
        assert gradcheck(lambda *tensors: function(*tensors)[only], inputs())  # noqa: B023


@pytest.mark.parametrize("scale", [1.0, -0.3])
def test_unflatten(scale):
    like = [tensor.detach() for tensor in inputs()]
    total = sum(tensor.numel() for tensor in like)

    def function(buffer):
        return tuple(ops.unflatten(buffer, like, scale=scale))

    for buffer in (new(total), new(1, total, 1), new(total + 3)[3:].detach()):
        check_derivatives(function, [buffer.requires_grad_()])


# ---- gradients by hand ---------------------------------------------------------------------------


def test_flatten_gives_each_tensor_a_gradient_of_its_dtype_and_strides():
    for target in DTYPES:
        tensors = [
            maker(dtype)(3, 4).t().detach().requires_grad_(t)
            for dtype in DTYPES
            for t in (True, False)
        ]
        weights = maker(target)(12 * len(tensors))
        ops.flatten(tensors, scale=0.3, dtype=target).backward(weights)
        for i, tensor in enumerate(tensors):
            if not tensor.requires_grad:
                assert tensor.grad is None
                continue
            expected = converted(weights[12 * i : 12 * i + 12].view(4, 3), 0.3, tensor.dtype)
            assert_same_bits(tensor.grad, expected, f"{tensor.dtype} to {target}")
            assert tensor.grad.stride() == tensor.stride()


def test_flatten_stats_adds_both_gradients():
    for source, target in PAIRS:
        tensor = maker(source)(40).requires_grad_()
        weights = maker(target, seed=1)(40)
        stats = ops.flatten_stats([tensor], scale=0.5, dtype=target)
        assert not stats.nonfinite_count.requires_grad
        torch.autograd.backward(
            [stats.buffer, stats.sum_of_squares], [weights, torch.tensor(2.0).double()]
        )
        expected = 0.5 * weights.double() + 2.0 * 2 * 0.25 * tensor.detach().double()
        assert tensor.grad.dtype == source
        torch.testing.assert_close(tensor.grad.double(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_flatten_stats_computes_in_float64(dtype):
    # The factor is past the range of float16, and once past that of float32; the gradient is not.
    for scale, value, weight in ((300.0, 0.01, 1.0), (1.0, 0.01, 40000.0), (1e20, 1e-30, 1e-9)):
        tensor = torch.full((4,), value).to(dtype).requires_grad_()
        stats = ops.flatten_stats([tensor], scale=scale, dtype=torch.float64)
        (stats.sum_of_squares * weight).backward()
        expected = 2 * scale**2 * weight * tensor.detach().double()
        assert_same_bits(tensor.grad, expected.to(dtype), (scale, value, weight))


def test_unflatten_collects_the_gradients_in_the_buffers_dtype():
    for source in DTYPES:
        buffer = maker(source)(48).requires_grad_()
        like = [torch.empty(4, 3, dtype=dtype).t() for dtype in DTYPES]
        results = ops.unflatten(buffer, like, scale=0.3)
        assert all(result.requires_grad for result in results)
        weights = [maker(dtype, seed=i)(3, 4) for i, dtype in enumerate(DTYPES)]
        torch.autograd.backward(results, weights)
        expected = ops.flatten(weights, scale=0.3, dtype=source)
        assert_same_bits(buffer.grad, expected, source)


def test_a_result_that_is_not_used_has_a_gradient_of_zero():
    buffer = new(7).requires_grad_()
    like = [new(3), new(2), new(2)]
    ops.unflatten(buffer, like, scale=3.0)[1].sum().backward()
    assert buffer.grad.tolist() == [0, 0, 0, 3, 3, 0, 0]
    tensor = new(3).requires_grad_()
    ops.flatten_stats([tensor, new(2)]).sum_of_squares.backward()
    assert_same_bits(tensor.grad, 2 * tensor.detach())


def test_a_gradient_that_is_not_contiguous():
    tensors = [new(3).requires_grad_(), new(3).requires_grad_()]
    buffer = ops.flatten(tensors, scale=2.0)
    buffer.backward(torch.arange(12.0, dtype=torch.float64)[::2])
    assert [tensor.grad.tolist() for tensor in tensors] == [[0, 4, 8], [12, 16, 20]]
    expanded = new(6).requires_grad_()
    ops.flatten([expanded]).sum().backward()  # the gradient of sum has stride 0
    assert (expanded.grad == 1).all()


def test_like_gets_no_gradient():
    like = [new(3).requires_grad_(), new(2)]
    buffer = new(5).requires_grad_()
    torch.cat(ops.unflatten(buffer, like)).sum().backward()
    assert like[0].grad is None and (buffer.grad == 1).all()


def test_backward_does_not_depend_on_what_the_tensors_hold_later():
    # A gradient bucket is flattened and then overwritten: only shapes are kept for flatten.
    tensor = new(3).requires_grad_()
    buffer = ops.flatten([tensor], scale=2.0)
    with torch.no_grad():
        tensor.fill_(7)
    buffer.sum().backward()
    assert (tensor.grad == 2).all()
    # flatten_stats needs the values, and says so.
    stats = ops.flatten_stats([tensor])
    with torch.no_grad():
        tensor.fill_(8)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stats.sum_of_squares.backward()


def test_flatten_keeps_no_tensor_for_backward():
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda _: None):
        ops.flatten([new(3).requires_grad_()]).sum()
        ops.unflatten(new(3).requires_grad_(), [new(3)])
    assert packed == []
    with torch.inference_mode():
        inference = new(3)
    tensor = new(3).requires_grad_()
    ops.flatten([inference, tensor], scale=2.0).sum().backward()
    assert (tensor.grad == 2).all()


def test_torch_func():
    like = [new(2), new(1)]

    def ours(x, y):
        buffer = ops.flatten([x, y.t()], scale=0.5)
        stats = ops.flatten_stats([x, y], scale=2.0)
        parts = ops.unflatten(x, like, scale=3.0)
        return (buffer**2).sum() + stats.sum_of_squares + sum((part**3).sum() for part in parts)

    def plain(x, y):
        both = torch.cat([x, y.t().reshape(-1)])
        return ((both / 2) ** 2).sum() + ((2 * both) ** 2).sum() + ((3 * x) ** 3).sum()

    x, y = new(3), new(2, 3)
    for transform in (
        lambda f: torch.func.grad(f, (0, 1))(x, y),
        lambda f: torch.func.jvp(f, (x, y), (y[0], y))[1],
        lambda f: torch.func.hessian(f)(x, y),
        lambda f: torch.func.vjp(f, x, y)[1](torch.ones((), dtype=torch.float64)),
    ):
        torch.testing.assert_close(transform(ours), transform(plain))


def test_under_no_grad_nothing_is_recorded():
    tensor = new(3).requires_grad_()
    with torch.no_grad():
        assert not ops.flatten([tensor]).requires_grad
        assert not ops.flatten_stats([tensor]).buffer.requires_grad
        assert not ops.unflatten(tensor, [new(3)])[0].requires_grad
    assert not ops.flatten([tensor.detach()]).requires_grad
    assert not ops.unflatten(new(3), [tensor])[0].requires_grad


def test_forward_mode_is_refused_rather_than_lost():
    def dual():
        return forward_ad.make_dual(new(3), new(3))

    with forward_ad.dual_level():
        for call in (
            lambda: ops.flatten([new(3), dual()]),
            lambda: ops.flatten([dual()], out=new(3)),
            lambda: ops.flatten([new(3)], out=dual()),
            lambda: ops.flatten_stats([dual()]),
            lambda: ops.unflatten(dual(), [new(3)]),
            lambda: ops.unflatten_into(dual(), [new(3)]),
            lambda: ops.unflatten_into(new(3), [dual()]),
        ):
            with pytest.raises(NotImplementedError, match="must not be a dual tensor"):
                call()
        ops.flatten([new(3)])
        ops.unflatten(new(3), [dual()])  # whose contents are not read


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_autograd(backend):
    def loss():
        torch.manual_seed(0)
        tensors = [torch.rand(2, 3).requires_grad_(), torch.rand(4).requires_grad_()]
        buffer = ops.flatten(tensors, scale=2.0)
        stats = ops.flatten_stats([buffer, *tensors], scale=0.5)
        parts = ops.unflatten(stats.buffer.view(2, 10), [buffer, *tensors], scale=3.0)
        total = sum((part**2).sum() for part in parts) + stats.sum_of_squares.float()
        return total, tensors

    expected, leaves = loss()
    expected.backward()
    got, compiled_leaves = loss()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
        got.backward()
    for leaf, compiled in zip(leaves, compiled_leaves, strict=True):
        torch.testing.assert_close(compiled.grad, leaf.grad)


# ---- compiled ------------------------------------------------------------------------------------


def tensors(rows: int = 8) -> list[torch.Tensor]:
    new = maker(torch.float32, seed=rows)
    return [new(rows, 3), new(5, rows).t(), new(rows), new(2, rows)[:, ::2]]


def pass_through_every_operator(inputs, buffer, destinations):
    """Work on both sides of each operator, so that the compiler has something to fuse with."""
    doubled = [tensor * 2 for tensor in inputs]
    flat = ops.flatten(doubled, scale=0.5, dtype=torch.bfloat16)
    stats = ops.flatten_stats(doubled)
    ops.flatten(doubled, scale=3.0, out=buffer)
    read_after_write = buffer + 1
    ops.unflatten_into(buffer, destinations, scale=0.5)
    mixed = destinations[0] * 2 + stats.sum_of_squares
    parts = ops.unflatten(flat.float() + 1, doubled, scale=0.25)
    return [flat, *stats, read_after_write, mixed, *parts]


def results_of(function, rows: int = 8):
    inputs = tensors(rows)
    count = sum(tensor.numel() for tensor in inputs)
    buffer, destinations = torch.zeros(count), [torch.zeros_like(tensor) for tensor in inputs]
    results = function(inputs, buffer, destinations)
    return [*results, buffer, *destinations]


def assert_all_same(actual, expected):
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_same_bits(one, other, f"result {i}")


@backends
def test_every_operator(backend):
    compiled = torch.compile(pass_through_every_operator, backend=backend, fullgraph=True)
    expected = results_of(pass_through_every_operator)
    for _ in range(2):
        assert_all_same(results_of(compiled), expected)


@backends
def test_backward(backend):
    def loss(inputs):
        stats = ops.flatten_stats([tensor * 2 for tensor in inputs], scale=0.5)
        parts = ops.unflatten(ops.flatten(inputs, dtype=torch.float64).exp(), inputs)
        return stats.sum_of_squares + sum(part.double().sum() for part in parts)

    results = []
    for function in (loss, torch.compile(loss, backend=backend, fullgraph=True)):
        inputs = [tensor.detach().requires_grad_() for tensor in tensors()]
        value = function(inputs)
        value.backward()
        results.append([value.detach(), *(tensor.grad for tensor in inputs)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def graphs_of(function, *args) -> list[torch.fx.GraphModule]:
    """The graphs that a compiler gets from the function, functional and traced to ATen."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(*args)
    return graphs


def test_writes_are_kept_where_nothing_is_returned():
    def write(buffer, first, second, out):
        ops.unflatten_into(buffer, [first, second])
        ops.flatten([first, second], scale=2.0, out=out)

    buffer = torch.arange(6.0)
    first, second, out = torch.zeros(2), torch.zeros(2, 2).t(), torch.zeros(6)
    graphs = graphs_of(write, buffer, first, second, out)
    assert first.tolist() == [0, 1] and second.tolist() == [[2, 3], [4, 5]]
    assert out.tolist() == [0, 2, 4, 6, 8, 10]
    code = "".join(graph.code for graph in graphs)
    assert code.count("unflatten_into") >= 1 and code.count("commhook.flatten") >= 1, code


@backends
def test_views_of_one_buffer_are_written(backend):
    def write(buffer, memory):
        ops.unflatten_into(buffer, [memory[1:4], memory[6:].view(2, 2).t()])
        ops.flatten([buffer[:2] + 7], out=memory[4:6])
        return memory.sum()

    results = []
    for function in (write, torch.compile(write, backend=backend, fullgraph=True)):
        memory = torch.zeros(10)
        results.append([function(torch.arange(1.0, 8.0), memory), memory])
    assert_all_same(*results)
    assert results[1][1].tolist() == [0, 1, 2, 3, 8, 9, 4, 6, 5, 7]


def test_sizes_that_change_do_not_compile_again():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        pass_through_every_operator, backend=counter, fullgraph=True, dynamic=True
    )
    results_of(compiled, 8)
    compilations = counter.frame_count
    for rows in (8, 12, 14, 32):
        assert_all_same(results_of(compiled, rows), results_of(pass_through_every_operator, rows))
    assert counter.frame_count == compilations


def test_another_scale_is_not_mistaken_for_the_first():
    def function(values, scale):
        return ops.flatten([values], scale=scale)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for scale in (1.0, 0.5, 0.25):
        assert compiled(torch.ones(3), scale).tolist() == [scale] * 3


def test_errors_of_shapes_come_while_compiling():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(buffer, destination):
        ops.unflatten_into(buffer, [destination])

    with pytest.raises(Exception, match="buffer must hold 3 elements, as many as tensors, got 4"):
        function(torch.zeros(4), torch.zeros(3))


class Bucketed(torch.nn.Module):
    """Flattens what two layers give, and takes the result apart again."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.second = torch.nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.first(x)
        parts = [hidden, self.second(hidden)]
        stats = ops.flatten_stats(parts, scale=0.5, dtype=torch.bfloat16)
        buffer = torch.empty(hidden.shape[0] * 6)
        with torch.no_grad():
            ops.flatten([part.detach() for part in parts], out=buffer)
        return ops.unflatten(stats.buffer, parts, scale=2.0), stats.nonfinite_count, buffer


@pytest.mark.parametrize("road", ["export", "decompose", "save"])
def test_export(road, tmp_path):
    torch.manual_seed(0)
    module = Bucketed()
    program = torch.export.export(
        module, (torch.randn(5, 3),), dynamic_shapes={"x": {0: torch.export.Dim("rows", min=2)}}
    )
    if road == "decompose":
        program = program.run_decompositions()
    elif road == "save":
        torch.export.save(program, tmp_path / "program.pt2")
        program = torch.export.load(tmp_path / "program.pt2")
    code = program.graph_module.code
    assert "commhook.flatten_stats" in code and "commhook.unflatten" in code
    for rows in (2, 5, 9):
        x = torch.randn(rows, 3)
        parts, count, buffer = module(x)
        with torch.no_grad():
            exported_parts, exported_count, exported_buffer = program.module()(x)
        assert_all_same([*exported_parts, exported_count], [*parts, count])
        assert_same_bits(exported_buffer, buffer)

"""Derivatives of the bucket operators: gradcheck, and gradients by hand in every dtype."""

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
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import torch_commhook.native.bucket_ops as ops

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

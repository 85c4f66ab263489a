"""GradBucket and BucketLayout."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist

from torch_commhook import BucketLayout, GradBucket


def _parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    conv = torch.randn(4, 3, 5, 2, generator=generator).to(memory_format=torch.channels_last)
    return [
        torch.randn(3, 4, generator=generator),
        conv,
        torch.randn((), generator=generator),
        torch.randn(0, 7, generator=generator),
        torch.randn(6, 5, generator=generator).t(),
        torch.randn(10, generator=generator)[::2],  # not dense: row-major in the bucket
    ]


def _gradients(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.randn_like(parameter) for parameter in parameters]


def _bucket() -> tuple[list[torch.Tensor], list[torch.Tensor], GradBucket]:
    parameters = _parameters()
    gradients = _gradients(parameters)
    return parameters, gradients, GradBucket(parameters, gradients, index=1, bucket_count=3)


def test_layout_describes_each_gradient() -> None:
    layout = BucketLayout(_parameters())
    assert layout.lengths == [12, 120, 1, 0, 30, 5]
    assert layout.offsets == [0, 12, 132, 133, 133, 163]
    assert layout.numel == 168 and len(layout) == 6
    assert layout.sizes[1] == (4, 3, 5, 2) and layout.strides[1] == (30, 1, 6, 3)
    assert layout.strides[4] == (1, 5)
    assert layout.strides[5] == (1,)
    assert layout == BucketLayout(_parameters()) and layout != BucketLayout(_parameters()[:2])


def test_gradients_are_views_with_the_parameters_strides() -> None:
    parameters, gradients, bucket = _bucket()
    views = bucket.gradients()
    for view, gradient, parameter in zip(views, gradients, parameters, strict=True):
        assert torch.equal(view, gradient)
        if parameter.is_contiguous() or parameter.dim() > 1:
            assert view.stride() == parameter.stride()
    bucket.buffer().zero_()
    assert all(not view.any() for view in views)


def test_a_dense_parameter_lies_in_the_buffer_as_in_memory() -> None:
    parameter = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    gradient = torch.randn_like(parameter)
    bucket = GradBucket([parameter], [gradient])
    in_memory = gradient.as_strided((gradient.numel(),), (1,))
    assert torch.equal(bucket.buffer(), in_memory)
    # A gradient with other strides than its parameter's lands in the same place.
    assert torch.equal(GradBucket([parameter], [gradient.contiguous()]).buffer(), in_memory)


def test_layout_flattens_and_unflattens() -> None:
    parameters = _parameters()
    gradients = _gradients(parameters)
    layout = BucketLayout(parameters)
    buffer = layout.flatten(gradients, scale=0.5, dtype=torch.float64)
    assert all(
        torch.equal(view, gradient.double() * 0.5)
        for view, gradient in zip(layout.views(buffer), gradients, strict=True)
    )
    restored = [torch.full_like(gradient, float("nan")) for gradient in gradients]
    layout.unflatten_into(buffer, restored, scale=2.0)
    assert all(torch.equal(a, b) for a, b in zip(restored, gradients, strict=True))


def test_pytorchs_methods() -> None:
    parameters, _, bucket = _bucket()
    assert bucket.index() == 1 and not bucket.is_last() and bucket.bucket_count() == 3
    assert GradBucket(parameters, buffer=bucket.buffer(), index=2, bucket_count=3).is_last()
    assert all(a is b for a, b in zip(bucket.parameters(), parameters, strict=True))
    assert bucket.first_parameter() is parameters[0]
    assert bucket.buffer().shape == (168,)
    assert bucket.offsets() == [0, 12, 132, 133, 133, 163]
    assert bucket.lengths() == [12, 120, 1, 0, 30, 5]
    assert bucket.sizes()[2] == () and bucket.strides()[0] == (4, 1)
    assert bucket.sparse_grad_indices() is None and bucket.process_group() is None
    theirs = {name for name in dir(dist.GradBucket) if not name.startswith("_")}
    assert theirs <= set(dir(GradBucket))


def test_missing_gradients_are_zeros() -> None:
    parameters = [torch.randn(3), torch.randn(2)]
    bucket = GradBucket(parameters, [None, torch.ones(2)])
    assert bucket.buffer().tolist() == [0, 0, 0, 1, 1]
    assert GradBucket(parameters, [None, None]).buffer().tolist() == [0] * 5


def test_a_given_buffer_is_shared_and_written() -> None:
    parameters = [torch.randn(3), torch.randn(2)]
    buffer = torch.zeros(5)
    assert GradBucket(parameters, buffer=buffer).buffer() is buffer
    bucket = GradBucket(parameters, [torch.ones(3), torch.full((2,), 2.0)], buffer)
    assert bucket.buffer() is buffer and buffer.tolist() == [1, 1, 1, 2, 2]


def test_set_buffer() -> None:
    _, _, bucket = _bucket()
    buffer = torch.ones(168)
    bucket.set_buffer(buffer)
    assert bucket.buffer() is buffer
    assert all((view == 1).all() for view in bucket.gradients())


def test_a_layout_of_other_things() -> None:
    for parameters in (None, torch.ones(2, 2), [1]):
        with pytest.raises(TypeError, match=r"^BucketLayout: parameters"):
            BucketLayout(parameters)  # type: ignore[arg-type]
    layout = BucketLayout([torch.ones(3)])
    with pytest.raises(TypeError, match=r"^BucketLayout: buffer must be a tensor, got None"):
        layout.views(None)  # type: ignore[arg-type]


def test_complex_gradients() -> None:
    parameters = [torch.ones(2, 3, dtype=torch.complex64).t(), torch.ones(2, dtype=torch.complex64)]
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    buffer = torch.empty(8, dtype=torch.complex64)
    for bucket in (GradBucket(parameters, gradients), GradBucket(parameters, gradients, buffer)):
        assert all(torch.equal(a, b) for a, b in zip(bucket.gradients(), gradients, strict=True))
    assert bucket.buffer() is buffer


def test_sparse_indices_survive_the_way_to_pytorch_and_back() -> None:
    gradient = torch.sparse_coo_tensor([[1, 3]], torch.randn(2, 3), (5, 3), check_invariants=True)
    indices = torch.tensor([1, 3])
    bucket = GradBucket([torch.zeros(5, 3)], buffer=gradient, sparse_grad_indices=indices)
    again = GradBucket.from_torch(bucket.to_torch()).sparse_grad_indices()
    assert again is not None and again.tolist() == [1, 3]


def test_a_bucket_needs_parameters() -> None:
    with pytest.raises(ValueError, match="parameters must hold at least one tensor"):
        GradBucket([], buffer=torch.empty(0))


def test_copies_share_and_deep_copies_do_not() -> None:
    _, gradients, bucket = _bucket()
    shallow, deep = copy.copy(bucket), copy.deepcopy(bucket)
    bucket.buffer().zero_()
    assert shallow.buffer() is bucket.buffer() and shallow.index() == 1
    assert deep.index() == 1 and deep.bucket_count() == 3
    assert all(torch.equal(a, b) for a, b in zip(deep.gradients(), gradients, strict=True))


def test_pickle() -> None:
    _, gradients, bucket = _bucket()
    loaded = pickle.loads(pickle.dumps(bucket))
    assert (loaded.index(), loaded.bucket_count()) == (1, 3)
    assert all(torch.equal(a, b) for a, b in zip(loaded.gradients(), gradients, strict=True))
    assert loaded.strides() == bucket.strides()


def test_to_and_from_torch_copy_nothing() -> None:
    parameters, _, bucket = _bucket()
    theirs = bucket.to_torch()
    assert isinstance(theirs, dist.GradBucket)
    assert theirs.index() == 1 and not theirs.is_last()
    assert theirs.buffer().data_ptr() == bucket.buffer().data_ptr()
    assert torch.equal(theirs.gradients()[0], bucket.gradients()[0])
    back = GradBucket.from_torch(theirs)
    assert back.buffer().data_ptr() == bucket.buffer().data_ptr()
    assert all(a is b for a, b in zip(back.parameters(), parameters, strict=True))
    assert (back.index(), back.bucket_count()) == (1, 3)
    assert back.strides() == bucket.strides()
    assert GradBucket.wrap(bucket) is bucket
    assert GradBucket.wrap(theirs).bucket_count() == 3
    with pytest.raises(TypeError, match=r"of torch_commhook or torch.distributed, got int"):
        GradBucket.wrap(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("most", "wanted"), [(10, [0, 1, 2, 3, 4]), (3, [0, 2, 4]), (1, [0])])
def test_a_sample_is_evenly_spaced(most: int, wanted: list[int]) -> None:
    sample = GradBucket([torch.zeros(5)], buffer=torch.arange(5.0)).sample(most)
    assert sample is not None and sample.tolist() == wanted


@pytest.mark.parametrize(
    "gradient", [torch.ones(4).to_sparse(), torch.ones(4, dtype=torch.complex64)], ids=str
)
def test_there_is_no_sample_of_sparse_and_complex_gradients(gradient: torch.Tensor) -> None:
    bucket = GradBucket([torch.zeros(4, dtype=gradient.dtype)], buffer=gradient)
    assert bucket.sample(4) is None


def test_a_sparse_bucket_holds_its_gradient() -> None:
    parameter = torch.randn(5, 3)
    gradient = torch.sparse_coo_tensor([[1, 3]], torch.randn(2, 3), (5, 3))
    bucket = GradBucket([parameter], [gradient])
    assert bucket.gradients()[0] is bucket.buffer()
    assert torch.equal(bucket.buffer().to_dense(), gradient.to_dense())
    assert bucket.to_torch().buffer().layout is torch.sparse_coo


def test_dynamo_traces_a_bucket_whole() -> None:
    def scaled(buffer: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        bucket = GradBucket([first, second], buffer=buffer, index=0, bucket_count=2)
        total = torch.zeros(())
        for gradient in bucket.gradients():
            total = total + gradient.sum() * (2 if bucket.is_last() else 3)
        return total + bucket.offsets()[1]

    first, second = torch.randn(3, 2), torch.randn(4)
    buffer = torch.randn(10)
    compiled = torch.compile(scaled, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(buffer, first, second), scaled(buffer, first, second))


def test_dynamo_takes_a_bucket_as_argument() -> None:
    def doubled(bucket: GradBucket) -> torch.Tensor:
        return bucket.buffer() * 2 + bucket.index()

    _, _, bucket = _bucket()
    compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(bucket), doubled(bucket))

"""Codecs on CUDA: the bits of the CPU, streams and graphs, and that nothing waits for the device.

What a warp does with its blocks needs no GPU, in test_cuda_blocks.py; nor does what topk sends, in
test_cuda_topk.py.
"""

from __future__ import annotations

import random

import pytest
import torch
from cuda_kernels import kernels_of
from test_codecs import everything, of_each_codec, rounding_for, same, some_tensors
from test_cuda_bucket import on_device

from torch_commhook.codecs import CODECS, Codec

pytestmark = pytest.mark.cuda


@of_each_codec
def test_the_bits_of_the_cpu(codec: Codec) -> None:
    rng = random.Random(1)
    torch.manual_seed(1)
    for _ in range(50):
        tensors = some_tensors(rng)
        numel = sum(tensor.numel() for tensor in tensors)
        shards, scale = rng.choice([1, 2, 3, 8]), rng.choice([1.0, 0.5, 1 / 3])
        error = torch.randn(numel) * 1e-3 if rng.random() < 0.5 else None
        right = everything(codec, tensors, shards, scale, error)
        device_error = None if error is None else error.cuda()
        got = everything(codec, on_device(tensors), shards, scale, device_error)
        assert all(same(a.cpu(), b) for a, b in zip(got, right, strict=True)), (shards, scale)


@pytest.mark.parametrize("block_size", [8, 32, 64, 544, 1024, 4096])
@pytest.mark.parametrize("name", ["blockwise", "fp8", "sign"])
def test_blocks_of_all_sizes(name: str, block_size: int) -> None:
    if name == "sign" and block_size < 32:
        pytest.skip("has no such blocks")
    codec = CODECS[name](block_size=block_size)  # type: ignore[call-arg]
    tensors = [torch.randn(3 * 4096 + 17), torch.randn(100).half()]
    error = torch.randn(sum(tensor.numel() for tensor in tensors)) * 1e-3
    right = everything(codec, tensors, 2, 0.5, error)
    got = everything(codec, on_device(tensors), 2, 0.5, error.cuda())
    assert all(same(a.cpu(), b) for a, b in zip(got, right, strict=True))


@of_each_codec
@pytest.mark.parametrize("count", [1, 300, 1000, 2500])
def test_many_tensors(codec: Codec, count: int) -> None:
    """More than one table of a kernel's arguments holds."""
    torch.manual_seed(count)
    tensors = [torch.randn(1 + 37 * i % 501) for i in range(count)]
    error = torch.zeros(sum(tensor.numel() for tensor in tensors))
    right = everything(codec, tensors, 2, 0.5, error)
    got = everything(codec, on_device(tensors), 2, 0.5, error.cuda())
    assert all(same(a.cpu(), b) for a, b in zip(got, right, strict=True))


@of_each_codec
def test_large_tensors(codec: Codec) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(3_000_001), torch.randn(1000, 2000).t(), torch.randn(7).half()]
    error = torch.zeros(sum(tensor.numel() for tensor in tensors))
    right = everything(codec, tensors, 3, 1.0, error)
    got = everything(codec, on_device(tensors), 3, 1.0, error.cuda())
    assert all(same(a.cpu(), b) for a, b in zip(got, right, strict=True))


@of_each_codec
def test_nothing_waits_and_a_graph_takes_it(codec: Codec) -> None:
    x = torch.randn(100_000, device="cuda")
    out, error = torch.empty_like(x), torch.zeros_like(x) if codec.takes_error else None
    message = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8, device="cuda")
    rounding = rounding_for(codec, device="cuda")

    def both() -> None:
        codec.encode([x], message, error=error, rounding=rounding)
        codec.decode(message, [out], rounding=rounding)

    both()
    if error is not None:
        error.zero_()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    want = out.clone()
    if error is not None:
        error.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)


@of_each_codec
def test_blocks_take_one_launch(codec: Codec) -> None:
    if codec.exchange != "all_to_all":
        pytest.skip("looks at all values more than once")
    tensors = [torch.randn(1 + 37 * i % 5001, device="cuda") for i in range(161)]
    numel = sum(tensor.numel() for tensor in tensors)
    message = torch.empty(codec.nbytes(numel), dtype=torch.uint8, device="cuda")
    rounding = rounding_for(codec, device="cuda")
    assert len(kernels_of(lambda: codec.encode(tensors, message, rounding=rounding))) == 1
    assert len(kernels_of(lambda: codec.decode(message, tensors, rounding=rounding))) == 1

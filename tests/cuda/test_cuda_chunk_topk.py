"""What chunk_topk writes on CUDA: what the CPU writes, of random values and settings."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_device import DEVICE, KernelDevice
from sparse_codecs import check_encoding, random_error, random_values, values_of
from torch import Tensor

from torch_commhook.codecs.chunk_topk import chunk_topk


def codec_of(draw: random.Random) -> chunk_topk:
    chunk = 1 << draw.randint(6, 12)
    k = draw.choice([1, 5, chunk // 64, chunk // 32, chunk // 8, chunk // 2, chunk])
    return chunk_topk(max(1, k), chunk, draw.choice([2, 4, 8]))


def check(device: KernelDevice, codec: chunk_topk, p: Tensor, error: Tensor | None) -> None:
    """That the CUDA kernels write the CPU's message, error and values."""
    nbytes = codec.nbytes(p.numel())
    message, other = check_encoding(device, codec.encode, p, nbytes, error)
    out, own_out = torch.empty_like(p), torch.empty(p.numel(), device=device.name)
    codec.decode_sum(torch.stack([message] * 3), [out], scale=0.5)
    with device.kernels():
        codec.decode_sum(torch.stack([other] * 3), [own_out], scale=0.5)
    torch.testing.assert_close(own_out.cpu(), out, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("seed", range(60))
def test_the_message_of_the_cpu(seed: int, kernel_device: KernelDevice) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    numel = draw.choice([1, 2, 100, 1000, 4096, 5000, 12_345])
    error = random_error(draw, numel)
    check(kernel_device, codec_of(draw), random_values(draw, numel), error)


@pytest.mark.parametrize("magnitudes", [[0.0], [1.0], [0.0, 3.0], [2.0, 2.0 + 2**-22, 2.25]])
def test_few_magnitudes(magnitudes: list[float], kernel_device: KernelDevice) -> None:
    """Of one magnitude those of the lowest places are sent."""
    draw, p = random.Random(len(magnitudes)), values_of(magnitudes, 9000)
    for form in ((64, 4096, 2), (700, 1024, 4), (20, 64, 2)):
        check(kernel_device, chunk_topk(*form), p, random_error(draw, 9000))


def test_places_that_are_none_are_ignored(kernel_device: KernelDevice) -> None:
    """A message comes from another process. The CPU refuses it; CUDA would have to wait."""
    codec = chunk_topk(64, 4096)
    message = torch.full((codec.nbytes(100),), 255, dtype=torch.uint8)
    (own,) = kernel_device.copy([message])
    out = torch.ones(100, device=kernel_device.name)
    with kernel_device.kernels():
        codec.decode(own, [out])
    assert out.eq(0).all()


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("error_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tensors", [1, 1880])
def test_one_launch_each_way(tensors: int, error_dtype: torch.dtype | None) -> None:
    pieces = [torch.randn(100, device=DEVICE.name) for _ in range(tensors)]
    numel, codec, error = 100 * tensors, chunk_topk(), None
    if error_dtype is not None:
        error = torch.zeros(numel, dtype=error_dtype, device=DEVICE.name)
    message = torch.empty(codec.nbytes(numel), dtype=torch.uint8, device=DEVICE.name)
    rounding = torch.tensor([1, 2], device=DEVICE.name)
    names = DEVICE.kernels_of(lambda: codec.encode(pieces, message, error=error, rounding=rounding))
    assert len(names) == 1, names
    assert len(DEVICE.kernels_of(lambda: codec.decode(message, pieces))) == 1

"""What chunk_topk writes on CUDA: what the CPU writes, of random values and settings."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_device import DEVICE, KernelDevice
from torch import Tensor

from torch_commhook.codecs.chunk_topk import chunk_topk


def values(draw: random.Random, numel: int) -> Tensor:
    p = torch.randn(numel) * 10.0 ** draw.randint(-44, 30)
    if draw.random() < 0.3:  # many of one magnitude
        p = p.sign() * draw.choice([0.0, 1.0, 2.0**-149, torch.finfo(torch.float32).max])
    if draw.random() < 0.3:
        p *= torch.rand(numel) < draw.choice([0.001, 0.05])
    if draw.random() < 0.3:
        places = torch.randint(numel, (draw.randint(1, 50),))
        p[places] = draw.choice([torch.nan, torch.inf, -torch.inf, 0.0])
    return p


def codec_of(draw: random.Random) -> chunk_topk:
    chunk = 1 << draw.randint(6, 12)
    k = draw.choice([1, 5, chunk // 64, chunk // 32, chunk // 8, chunk // 2, chunk])
    return chunk_topk(max(1, k), chunk, draw.choice([2, 4, 8]))


def error_of(draw: random.Random, numel: int) -> Tensor | None:
    """None, or zeros of either dtype, at any place of their storage."""
    dtype = draw.choice([None, torch.float32, torch.bfloat16])
    offset = draw.choice([0, 0, 1, 3])
    return None if dtype is None else torch.zeros(numel + offset, dtype=dtype)[offset:]


def check(device: KernelDevice, codec: chunk_topk, p: Tensor, error: Tensor | None) -> None:
    """That the CUDA kernels write the CPU's message, error and values."""
    message = torch.empty(codec.nbytes(p.numel()), dtype=torch.uint8)
    rounding = torch.tensor([5, 3])
    own, other, own_rounding = device.copy([p, message, rounding])
    own_error = None if error is None else device.copy([error])[0]
    codec.encode([p], message, scale=0.5, error=error, rounding=rounding)
    out, own_out = torch.empty_like(p), torch.empty_like(own)
    codec.decode_sum(torch.stack([message] * 3), [out], scale=0.5)
    with device.kernels():
        codec.encode([own], other, scale=0.5, error=own_error, rounding=own_rounding)
        codec.decode_sum(torch.stack([other] * 3), [own_out], scale=0.5)
    assert torch.equal(other.cpu(), message)
    torch.testing.assert_close(own_out.cpu(), out, rtol=0, atol=0, equal_nan=True)
    if error is not None and own_error is not None:
        as_bits = torch.int32 if error.dtype == torch.float32 else torch.int16
        assert torch.equal(own_error.cpu().view(as_bits), error.view(as_bits))


@pytest.mark.parametrize("seed", range(60))
def test_the_message_of_the_cpu(seed: int, kernel_device: KernelDevice) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    numel = draw.choice([1, 2, 100, 1000, 4096, 5000, 12_345])
    check(kernel_device, codec_of(draw), values(draw, numel), error_of(draw, numel))


@pytest.mark.parametrize("magnitudes", [[0.0], [1.0], [0.0, 3.0], [2.0, 2.0 + 2**-22, 2.25]])
def test_few_magnitudes(magnitudes: list[float], kernel_device: KernelDevice) -> None:
    """Of one magnitude those of the lowest places are sent."""
    draw = random.Random(len(magnitudes))
    torch.manual_seed(len(magnitudes))
    p = torch.tensor(magnitudes)[torch.randint(len(magnitudes), (9000,))]
    p *= torch.randint(2, (9000,)) * 2.0 - 1
    for form in ((64, 4096, 2), (700, 1024, 4), (20, 64, 2)):
        check(kernel_device, chunk_topk(*form), p, error_of(draw, 9000))


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

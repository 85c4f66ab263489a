"""What topk and chunk_topk send from CUDA: what the CPU sends, of random values and settings."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from cuda_on_host import load_cuda_on_host
from kernel_device import DEVICE, KernelDevice
from sparse_codecs import check_encoding, random_error, random_values, values_of
from torch import Tensor

from torch_commhook.codecs.sparse_codec import chunk_topk

encode = torch.ops.commhook.topk_encode
of_few_magnitudes = pytest.mark.parametrize(
    "magnitudes", [[0.0], [1.0], [0.0, 3.0], [2.0, 2.0 + 2**-22, 2.25]]
)


@pytest.mark.parametrize(
    "seeds", [range(first, first + 20) for first in range(0, 100, 20)], ids=str
)
def test_the_entries_of_the_cpu(seeds: range, kernel_device: KernelDevice) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        numel = draw.choice([1, 2, 100, 1000, 5000, 20_000])
        p, count = random_values(draw, numel), max(1, numel // 10)
        count = draw.choice([1, numel, count, draw.randint(1, numel)])
        error = random_error(draw, numel)
        check_encoding(kernel_device, encode, p, 8 * count, error, f"seed {seed}")


@of_few_magnitudes
def test_few_magnitudes_in_many_parts(magnitudes: list[float], kernel_device: KernelDevice) -> None:
    """Ties are sent in the order of their indices, whatever blocks of threads they fall to."""
    draw, numel = random.Random(len(magnitudes)), 150_001
    p = values_of(magnitudes, numel)
    for count in (1, 70_000, numel - 1):
        error = random_error(draw, numel)
        check_encoding(kernel_device, encode, p, 8 * count, error, count)


@pytest.mark.long
@pytest.mark.parametrize("parts", [0, 1, 31, 32, 33, 100])
def test_a_part_learns_from_those_before_it(parts: int) -> None:
    """Back to the last one that knows all before it; from there on each knows its own counts."""
    load_cuda_on_host()
    for complete in {*range(parts)[:2], *range(parts)[-2:], parts // 2} & set(range(parts)):
        above, equal = [3 + i for i in range(parts)], [5 * i for i in range(parts)]
        known = [2 if i == complete else 1 + i % 2 * (i < complete) for i in range(parts)]
        found = torch.ops.commhook_on_host.look_back(known, above, equal)
        before = [sum(above[complete:]), sum(equal[complete:])]
        assert found == [*before, 2, before[0] + 1, before[1] + 2]
    if parts == 0:
        assert torch.ops.commhook_on_host.look_back([], [], []) == [0, 0, 2, 1, 2]
    else:
        with pytest.raises(RuntimeError, match="waits for one that need not have begun"):
            torch.ops.commhook_on_host.look_back([2] * (parts - 1) + [0], [0] * parts, [0] * parts)


# ---- chunk_topk ----------------------------------------------------------------------------------


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
def test_the_message_of_chunks(seed: int, kernel_device: KernelDevice) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    numel = draw.choice([1, 2, 100, 1000, 4096, 5000, 12_345])
    error = random_error(draw, numel)
    check(kernel_device, codec_of(draw), random_values(draw, numel), error)


@of_few_magnitudes
def test_few_magnitudes_in_chunks(magnitudes: list[float], kernel_device: KernelDevice) -> None:
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


# ---- launches ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("error_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tensors", [1, 1880])
def test_launches(tensors: int, error_dtype: torch.dtype | None) -> None:
    """Of topk four, of randomk three, one of which writes zeros: the host does not play that one.

    Of chunk_topk one each way.
    """
    device, numel, error = DEVICE.name, 100 * tensors, None
    pieces = [torch.randn(100, device=device) for _ in range(tensors)]
    if error_dtype is not None:
        error = torch.zeros(numel, dtype=error_dtype, device=device)
    message = torch.empty(200 * tensors, dtype=torch.uint8, device=device)
    rounding, zeros = torch.tensor([1, 2], device=device), 0 if device == "cpu" else 1

    def launched(encode: Callable[..., None], nbytes: int) -> list[str]:
        own = message[:nbytes]
        return DEVICE.kernels_of(lambda: encode(pieces, own, error=error, rounding=rounding))

    assert len(launched(encode, numel // 10 * 8)) <= 3 + zeros
    assert len(launched(torch.ops.commhook.randomk_encode, numel // 10 * 4)) <= 2 + zeros
    codec = chunk_topk()
    nbytes = codec.nbytes(numel)
    assert len(launched(codec.encode, nbytes)) == 1
    assert len(DEVICE.kernels_of(lambda: codec.decode(message[:nbytes], pieces))) == 1

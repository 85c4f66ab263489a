"""What topk sends from CUDA: the entries that the CPU sends, of random values."""

from __future__ import annotations

import random

import pytest
import torch
from cuda_on_host import load_cuda_on_host
from kernel_device import DEVICE, KernelDevice
from sparse_codecs import check_encoding, random_error, random_values, values_of

encode = torch.ops.commhook.topk_encode


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


@pytest.mark.parametrize("magnitudes", [[0.0], [1.0], [0.0, 3.0], [2.0, 2.0 + 2**-22, 2.25]])
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


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("error_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tensors", [1, 1880])
def test_launches(tensors: int, error_dtype: torch.dtype | None) -> None:
    """Four for topk, three for randomk; the host does not play the one that writes zeros."""
    pieces = [torch.randn(100, device=DEVICE.name) for _ in range(tensors)]
    numel = 100 * tensors
    error = None
    if error_dtype is not None:
        error = torch.zeros(numel, dtype=error_dtype, device=DEVICE.name)
    message = torch.empty(numel // 10 * 8, dtype=torch.uint8, device=DEVICE.name)
    rounding = torch.tensor([1, 2], device=DEVICE.name)
    ops = torch.ops.commhook
    names = DEVICE.kernels_of(
        lambda: ops.topk_encode(pieces, message, error=error, rounding=rounding)
    )
    zeros = 0 if DEVICE.name == "cpu" else 1
    assert len(names) <= 3 + zeros, names
    names = DEVICE.kernels_of(
        lambda: ops.randomk_encode(pieces, message[: numel // 10 * 4], rounding, error=error)
    )
    assert len(names) <= 2 + zeros, names

"""What topk sends from CUDA: the entries that the CPU sends, of random values."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_device import KernelDevice


def values(draw: random.Random) -> torch.Tensor:
    numel = draw.choice([1, 2, 100, 1000, 5000, 20_000])
    p = torch.randn(numel) * 10.0 ** draw.randint(-44, 30)
    if draw.random() < 0.3:  # many of one magnitude
        p = p.sign() * draw.choice([0.0, 1.0, 2.0**-149])
    if draw.random() < 0.3:
        places = torch.randint(numel, (draw.randint(1, 50),))
        p[places] = draw.choice([torch.nan, torch.inf, -torch.inf, 0.0])
    return p


@pytest.mark.parametrize(
    "seeds", [range(first, first + 20) for first in range(0, 100, 20)], ids=str
)
def test_the_entries_of_the_cpu(seeds: range, kernel_device: KernelDevice) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        p = values(draw)
        numel = p.numel()
        count = draw.choice([1, numel, max(1, numel // 10), draw.randint(1, numel)])
        error = torch.zeros_like(p) if draw.random() < 0.5 else None
        message = torch.empty(8 * count, dtype=torch.uint8)
        own, other = kernel_device.copy([p, message])
        own_error = None if error is None else kernel_device.copy([error])[0]
        torch.ops.commhook.topk_encode([p], message, error=error)
        with kernel_device.kernels():
            torch.ops.commhook.topk_encode([own], other, error=own_error)
        assert torch.equal(other.cpu(), message), f"seed {seed}"
        if error is not None and own_error is not None:
            bits = [each.cpu().view(torch.int32) for each in (error, own_error)]
            assert torch.equal(*bits), f"seed {seed}"

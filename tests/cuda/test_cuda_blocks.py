"""The CUDA kernels of block codecs on random cases: they give the bits of the CPU's."""

from __future__ import annotations

import random

import pytest
import torch
from codec_examples import everything
from kernel_device import KernelDevice
from kernel_runs import FORMS, least_block
from torch import Tensor

from torch_commhook import codecs

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


class Case:
    """Random tensors, a codec's settings, and what its operators take with them."""

    def __init__(self, name: str, seed: int) -> None:
        self.seed, self.draw = seed, random.Random(f"{name} {seed}")
        draw = self.draw
        self.generator = torch.Generator().manual_seed(seed)
        operators, settings = FORMS[name]
        sizes = [32, 64, 128, 256, 256, 512, 544, 1024, 4096]
        sizes += {8: [8, 72, 200], 16: [16, 48, 208], 32: []}[least_block(name)]
        is_random = operators == "blockwise" and draw.random() < 0.5
        self.rounding = None
        if is_random:
            settings = {**settings, "rounding": "stochastic"}
            self.rounding = torch.tensor([draw.getrandbits(62) - (1 << 61), draw.getrandbits(20)])
        self.codec = codecs.CODECS[operators](**settings, block_size=draw.choice(sizes))
        self.scale = draw.choice([1.0, 0.5, 1 / 3, 1e-3])
        self.tensors = [self.values(dtype) for dtype in self.dtypes()]
        numel = sum(tensor.numel() for tensor in self.tensors)
        self.shards, self.added = draw.choice([1, 1, 2, 3, 7]), draw.randint(1, 4)
        ends = sorted(draw.randint(0, numel) for _ in range(draw.randint(0, 5)))
        self.sizes = [b - a for a, b in zip([0, *ends], [*ends, numel], strict=True)]
        self.error = self.float32(numel) if draw.random() < 0.5 else None

    def dtypes(self) -> list[torch.dtype]:
        choice = self.draw.choice([DTYPES, [torch.float32]])
        return [self.draw.choice(choice) for _ in range(self.draw.randint(1, 12))]

    def float32(self, numel: int) -> Tensor:
        """At any address that is a multiple of four, up to the end of their memory."""
        first = self.draw.randrange(4)
        return torch.randn(first + numel, generator=self.generator)[first:]

    def values(self, dtype: torch.dtype) -> Tensor:
        numel = self.draw.choice([0, 1, 7, 64, 255, 256, 1000, 3000])
        values = self.float32(numel) * 10.0 ** self.draw.randint(-42, 4)
        if numel > 2 and self.draw.random() < 0.3:
            places = torch.randint(numel, (2,), generator=self.generator)
            values[places] = self.draw.choice([torch.nan, torch.inf, -torch.inf, 3e38, -0.0])
        if self.draw.random() < 0.2:
            values.zero_()
        return values if dtype is torch.float32 else values.to(dtype)

    def results(self, device: KernelDevice) -> list[Tensor]:
        """What all operators write, the errors last."""
        # A copy in a memory of the same offset is as badly aligned.
        tensors = device.copy(self.tensors)
        error = None if self.error is None else device.copy([self.error])[0]
        rounding = None if self.rounding is None else device.copy([self.rounding])[0]
        found = everything(
            self.codec,
            tensors,
            self.shards,
            self.scale,
            error,
            self.sizes,
            rounding=rounding,
            added=self.added,
        )
        return [tensor.cpu() for tensor in found]

    def check(self, device: KernelDevice, warps: int = 128) -> list[Tensor]:
        """Checks that a device's kernels write the bits of the CPU's; returns the errors."""
        right = self.results(KernelDevice("cpu"))
        with device.kernels(warps):
            got = self.results(device)
        assert all(map(_same, got, right)), f"seed {self.seed}"
        return got[-3:] if self.error is not None else []


def _same(one: Tensor, other: Tensor) -> bool:
    both_nan = one.isnan() & other.isnan() if one.is_floating_point() else torch.tensor(False)
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[one.element_size()]
    return bool((both_nan | (one.view(integers) == other.view(integers))).all())


@pytest.mark.parametrize("name", FORMS)
def test_the_largest_numbers(name: str, kernel_device: KernelDevice) -> None:
    for seed in range(20):
        case = Case(name, seed)
        case.scale = 1.0
        for tensor in case.tensors:
            if tensor.numel():
                places = torch.randint(tensor.numel(), (3,), generator=case.generator)
                factor = case.draw.choice([1.0, 0.9999, 0.25])
                tensor.view(-1)[places] = torch.finfo(tensor.dtype).max * factor
        errors = case.check(kernel_device)
        assert all(error.isfinite().all() for error in errors), f"seed {seed}"


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("seeds", [range(first, first + 10) for first in range(0, 60, 10)], ids=str)
def test_the_bits_of_the_cpu(name: str, seeds: range, kernel_device: KernelDevice) -> None:
    for seed in seeds:
        case = Case(name, seed)
        case.check(kernel_device, case.draw.choice([1, 5, 128]))

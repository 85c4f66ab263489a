"""The CUDA kernels of block codecs on random cases: they give the bits of the CPU's."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from kernel_device import KernelDevice
from kernel_runs import FORMS, least_block
from torch import Tensor

from torch_commhook import codecs

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


class Case:
    """Random tensors, a codec's settings, and what its operators take with them."""

    def __init__(self, name: str, seed: int) -> None:
        self.draw = draw = random.Random(f"{name} {seed}")
        self.generator = torch.Generator().manual_seed(seed)
        self.operators, settings = FORMS[name]
        sizes = [32, 64, 128, 256, 256, 512, 1024, 4096]
        sizes += {8: [8, 72, 200], 16: [16, 48, 208], 32: []}[least_block(name)]
        self.block_size = draw.choice(sizes)
        self.settings = {**settings, "block_size": self.block_size}
        self.codec = codecs.CODECS[self.operators](**self.settings)
        self.scale = draw.choice([1.0, 0.5, 1 / 3, 1e-3])
        self.tensors = [self.values(dtype) for dtype in self.dtypes()]
        self.numel = sum(tensor.numel() for tensor in self.tensors)
        self.shards = draw.choice([1, 1, 2, 3, 7])
        ends = sorted(draw.randint(0, self.numel) for _ in range(draw.randint(0, 5)))
        self.sizes = [b - a for a, b in zip([0, *ends], [*ends, self.numel], strict=True)]
        self.rounding = (
            torch.tensor([draw.getrandbits(62) - (1 << 61), draw.getrandbits(20)])
            if self.operators == "blockwise" and draw.random() < 0.5
            else None
        )
        self.error = self.float32(self.numel) if draw.random() < 0.5 else None
        self.factors = [1 + draw.random() for _ in range(draw.randint(1, 4))]

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

    def operator(self, which: str) -> Callable[..., None]:
        return getattr(torch.ops.commhook, f"{self.operators}_{which}")

    def message(self, shards: int, fill: int) -> Tensor:
        return torch.full((self.codec.nbytes(self.numel, shards),), fill, dtype=torch.uint8)

    def results(self, device: KernelDevice | None) -> dict[str, Tensor]:
        """What all operators write, with the CPU's kernels or those of a device."""

        def there(*tensors: Tensor) -> list[Tensor]:
            return list(tensors) if device is None else device.copy(tensors)

        tensors = there(*self.tensors)
        rounding = {} if self.rounding is None else {"rounding": there(self.rounding)[0]}
        settings = {**self.settings, "shards": self.shards}
        # A copy in a memory of the same offset is as badly aligned.
        errors = [None] * 3 if self.error is None else there(*[self.error] * 3)
        if device is None:
            errors = [None if error is None else error.clone() for error in errors]
        (message,) = there(self.message(self.shards, 0xAA if device is None else 0x55))
        self.operator("encode")(
            tensors, message, **settings, scale=self.scale, error=errors[0], **rounding
        )
        decoded = there(*(torch.full_like(tensor, 7) for tensor in self.tensors))
        self.operator("decode")(message, decoded, **settings)

        nbytes = sum(part.nbytes for part in self.codec.chunks(self.sizes))
        fill = 0xAA if device is None else 0x55
        (chunks,) = there(torch.full((nbytes,), fill, dtype=torch.uint8))
        settings = {**self.settings, "sizes": self.sizes}
        self.operator("encode")(
            tensors, chunks, **settings, scale=self.scale, error=errors[2], **rounding
        )
        of_chunks = there(*(torch.full_like(tensor, 7) for tensor in self.tensors))
        self.operator("decode")(chunks, of_chunks, **settings)

        messages = torch.stack(there(*(self.message(1, 0) for _ in self.factors)))
        for factor, each in zip(self.factors, messages, strict=True):
            values = [tensor * factor for tensor in tensors]
            self.operator("encode")(values, each, **self.settings)
        (reduced,) = there(self.message(1, 0xAA if device is None else 0x55))
        self.operator("reduce")(
            messages,
            reduced,
            self.numel,
            **self.settings,
            scale=0.25,
            error=errors[1],
            **rounding,
        )
        sums = there(*(torch.full_like(tensor, 7) for tensor in self.tensors))
        self.operator("decode_sum")(messages, sums, **self.settings, scale=self.scale)
        results = {"message": message, "messages": messages, "reduced": reduced, "chunks": chunks}
        results |= {f"error {i}": error for i, error in enumerate(errors) if error is not None}
        results |= {f"decoded {i}": tensor for i, tensor in enumerate(decoded)}
        results |= {f"decoded from chunks {i}": tensor for i, tensor in enumerate(of_chunks)}
        results |= {f"sum {i}": tensor for i, tensor in enumerate(sums)}
        return {name: tensor.cpu() for name, tensor in results.items()}


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
        right = case.results(None)
        with kernel_device.kernels():
            got = case.results(kernel_device)
        different = [result for result in right if not _same(right[result], got[result])]
        assert not different, f"seed {seed}"
        errors = [tensor for result, tensor in got.items() if result.startswith("error")]
        assert all(error.isfinite().all() for error in errors), f"seed {seed}"


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("seeds", [range(first, first + 10) for first in range(0, 60, 10)], ids=str)
def test_the_bits_of_the_cpu(name: str, seeds: range, kernel_device: KernelDevice) -> None:
    for seed in seeds:
        case = Case(name, seed)
        right = case.results(None)
        with kernel_device.kernels(case.draw.choice([1, 5, 128])):
            got = case.results(kernel_device)
        different = [result for result in right if not _same(right[result], got[result])]
        assert not different, f"seed {seed}"

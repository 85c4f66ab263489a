"""Shared by the tests of codecs that send some of the values: topk and randomk."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from kernel_device import KernelDevice
from ops_reference import LEVELS, cpu_level
from torch import Tensor


@pytest.fixture(params=LEVELS)
def each_level(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs at each level of the CPU kernels that the processor has."""
    with cpu_level(request.param):
        yield


#: Kinds of values, each made from their number.
INPUTS: dict[str, Callable[[int], Tensor]] = {
    "gaussian": torch.randn,
    "heavy tail": lambda d: torch.randn(d) / torch.rand(d).add(1e-9) ** 3,
    "one magnitude": lambda d: torch.randn(d).sign() * 0.3,
    "few magnitudes": lambda d: torch.randint(-3, 4, (d,)).float(),
    "zeros": torch.zeros,
    "ascending": lambda d: torch.arange(d).float(),
    "descending": lambda d: -torch.arange(d, 0, -1).float(),
    "denormal": lambda d: torch.randn(d) * 1e-41,
    "huge": lambda d: torch.randn(d) * 1e38,
    "much that is not finite": lambda d: torch.randn(d).log() / (torch.rand(d) < 0.9),
}


@dataclass(frozen=True)
class SparseCase:
    """Tensors of any forms, dtypes and magnitudes, drawn from ``seed``; settings of encoding."""

    seed: int
    shapes: list[list[int]]
    magnitude: float
    density: float
    level: str
    with_error: bool

    def drawn(self, *, special: float) -> DrawnTensors:
        """The tensors.

        Args:
            special: the frequency of zeros, denormals, infinities and NaNs in a tensor.
        """
        rng, generator = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        tensors = []
        for shape in self.shapes:
            x = torch.randn(shape, generator=generator) * self.magnitude
            if x.numel() and rng.random() < special:
                value = rng.choice([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45])
                x.view(-1)[rng.randrange(x.numel())] = value
            x = x.to(rng.choice([torch.float32, torch.float64, torch.float16, torch.bfloat16]))
            tensors.append(x.transpose(0, -1) if x.dim() > 1 and rng.random() < 0.5 else x)
        flat = torch.cat([x.reshape(-1).float() for x in tensors])
        scale = rng.choice([1.0, 0.25, 1 / 3])
        if not self.with_error:
            return DrawnTensors(tensors, scale, None, flat * scale)
        error = torch.randn(len(flat), generator=generator) * self.magnitude
        return DrawnTensors(tensors, scale, error, flat * scale + error)


@dataclass(frozen=True)
class DrawnTensors:
    """Tensors and the arguments of encoding them.

    Attributes:
        values: all values to send: float32, flat.
    """

    tensors: list[Tensor]
    scale: float
    error: Tensor | None
    values: Tensor

    def empty(self) -> list[Tensor]:
        """Tensors to decode into."""
        return [torch.full_like(x, 3.0) for x in self.tensors]

    def check_error(self, indices: Tensor) -> None:
        """Checks that the error has all finite values that were not sent."""
        if self.error is not None:
            left = torch.where(self.values.isfinite(), self.values, 0)
            left[indices] = 0
            np.testing.assert_array_equal(self.error.numpy(), left.numpy())

    def check_decoded(self, out: list[Tensor], indices: Tensor, values: Tensor) -> None:
        """Checks that decoding has written the sent values, and zeros elsewhere."""
        restored = torch.zeros_like(self.values).index_copy(0, indices, values)
        for got, piece in zip(out, restored.split([x.numel() for x in out]), strict=True):
            expected = piece.view(got.shape).to(got.dtype)
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def sparse_cases(*, most: int, dimensions: int) -> st.SearchStrategy[SparseCase]:
    """Up to four tensors with ``dimensions`` dimensions, each of at most ``most``."""
    shape = st.lists(st.integers(0, most), max_size=dimensions)
    return st.builds(
        SparseCase,
        seed=st.integers(0, 2**31),
        shapes=st.lists(shape, min_size=1, max_size=4),
        magnitude=st.sampled_from([1e-44, 1e-30, 1.0, 1e30]),
        density=st.sampled_from([1e-9, 0.01, 0.3, 1.0]),
        level=st.sampled_from(LEVELS),
        with_error=st.booleans(),
    )


# ---- on CUDA -------------------------------------------------------------------------------------


def random_values(draw: random.Random, numel: int) -> Tensor:
    """Values of any magnitude, often many equal ones, few that are not zero, or special ones."""
    p = torch.randn(numel) * 10.0 ** draw.randint(-44, 30)
    if draw.random() < 0.3:
        p = p.sign() * draw.choice([0.0, 1.0, 2.0**-149, torch.finfo(torch.float32).max])
    if draw.random() < 0.3:
        p *= torch.rand(numel) < draw.choice([0.001, 0.05])
    if draw.random() < 0.3:
        places = torch.randint(numel, (draw.randint(1, 50),))
        p[places] = draw.choice([torch.nan, torch.inf, -torch.inf, 0.0])
    return p


def values_of(magnitudes: list[float], numel: int) -> Tensor:
    """Values of few magnitudes and of both signs."""
    torch.manual_seed(len(magnitudes))
    p = torch.tensor(magnitudes)[torch.randint(len(magnitudes), (numel,))]
    return p * (torch.randint(2, (numel,)) * 2.0 - 1)


def random_error(draw: random.Random, numel: int) -> Tensor | None:
    """None, or zeros of either dtype, at any place of their storage."""
    dtype = draw.choice([None, torch.float32, torch.bfloat16])
    offset = draw.choice([0, 0, 1, 3])
    return None if dtype is None else torch.zeros(numel + offset, dtype=dtype)[offset:]


def check_encoding(
    device: KernelDevice,
    encode: Callable[..., None],
    p: Tensor,
    nbytes: int,
    error: Tensor | None,
    context: object = "",
) -> tuple[Tensor, Tensor]:
    """Checks that the CUDA kernels encode as the CPU does; returns the CPU's and their message."""
    message, rounding = torch.empty(nbytes, dtype=torch.uint8), torch.tensor([5, 3])
    own, other, own_rounding = device.copy([p, message, rounding])
    own_error = None if error is None else device.copy([error])[0]
    encode([p], message, scale=0.5, error=error, rounding=rounding)
    with device.kernels():
        encode([own], other, scale=0.5, error=own_error, rounding=own_rounding)
    assert torch.equal(other.cpu(), message), context
    if error is not None and own_error is not None:
        as_bits = torch.int32 if error.dtype == torch.float32 else torch.int16
        assert torch.equal(own_error.cpu().view(as_bits), error.view(as_bits)), context
    return message, other

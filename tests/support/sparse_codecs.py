"""Shared by the tests of codecs that send some of the values: topk and randomk."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
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

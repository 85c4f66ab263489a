"""Tensors of all dtypes and strides, with bits that depend on the rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda base: base.view(4, 60),
    "offset": lambda base: base[1:18],
    "transposed": lambda base: base.view(12, 20).t(),
    "channels_last": lambda base: base.view(2, 6, 5, 4).permute(0, 3, 1, 2),
    "permuted": lambda base: base.view(4, 5, 12).permute(2, 0, 1),
    "strided": lambda base: base[::2],
    "columns": lambda base: base.view(12, 20)[:, 3:7],
    "scalar": lambda base: base[7],
    "empty": lambda base: base[:0].view(0, 3),
}
ELEMENTS = 240

DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
    }
    - {torch.quint8},
    key=str,
)


def base_of(dtype: torch.dtype, rank: int) -> Tensor:
    """Random bits, including all kinds of NaN if the dtype has them."""
    generator = torch.Generator().manual_seed(100 * DTYPES.index(dtype) + rank)
    count = 2 if dtype is torch.bool else 256
    shape = (ELEMENTS * dtype.itemsize,)
    return torch.randint(count, shape, dtype=torch.uint8, generator=generator).view(dtype)


def bits(tensor: Tensor) -> Tensor:
    """A tensor's bits as integers, in logical order."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return tensor.view(width).flatten()


def of_layouts(dtypes: Any, rank: int) -> dict[str, Tensor]:
    return {
        f"{dtype} {name}": layout(base_of(dtype, rank))
        for name, layout in LAYOUTS.items()
        for dtype in dtypes
    }


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return [name for name in a if not torch.equal(bits(a[name]), bits(b[name]))]

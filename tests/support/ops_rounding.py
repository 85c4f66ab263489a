"""Values that show the rounding of 16-bit dtypes: written out, and as every pattern of bits."""

from __future__ import annotations

import math

import torch

import torch_commhook.native.bucket_ops as ops

INF = math.inf
FP16_STEP = 2.0**-10  # between 1 and 2
BF16_STEP = 2.0**-7

#: dtype: (float32 value, its value in the dtype). Rounding is to nearest, ties to even.
ROUNDED = {
    torch.float16: [
        (1 + FP16_STEP / 2, 1.0),  # ties
        (1 + 3 * FP16_STEP / 2, 1 + 2 * FP16_STEP),
        (-1 - FP16_STEP / 2, -1.0),
        (1 + FP16_STEP / 2 + 2.0**-23, 1 + FP16_STEP),  # just above, just below
        (1 + 3 * FP16_STEP / 2 - 2.0**-23, 1 + FP16_STEP),
        (65504.0, 65504.0),  # the largest
        (65519.996, 65504.0),
        (65520.0, INF),  # the tie
        (-65520.0, -INF),
        (3.0e38, INF),
        (2.0**-14, 2.0**-14),  # the smallest normal
        (2.0**-24, 2.0**-24),  # the smallest denormal
        (2.0**-25, 0.0),  # ties of denormals
        (3 * 2.0**-25, 2.0**-23),
        (-(2.0**-25), -0.0),
        (2.0**-25 * (1 + 2.0**-23), 2.0**-24),
        (2.0**-40, 0.0),
        (-(2.0**-149), -0.0),
    ],
    torch.bfloat16: [
        (1 + BF16_STEP / 2, 1.0),
        (1 + 3 * BF16_STEP / 2, 1 + 2 * BF16_STEP),
        (-1 - BF16_STEP / 2, -1.0),
        (1 + BF16_STEP / 2 + 2.0**-23, 1 + BF16_STEP),
        (1 + 3 * BF16_STEP / 2 - 2.0**-23, 1 + BF16_STEP),
        ((2 - BF16_STEP) * 2.0**127, (2 - BF16_STEP) * 2.0**127),  # the largest
        ((2 - BF16_STEP / 2 - 2.0**-23) * 2.0**127, (2 - BF16_STEP) * 2.0**127),
        ((2 - BF16_STEP / 2) * 2.0**127, INF),  # the tie
        (-(2 - BF16_STEP / 2) * 2.0**127, -INF),
        ((2 - 2.0**-23) * 2.0**127, INF),
        (2.0**-126, 2.0**-126),
        (2.0**-133, 2.0**-133),  # the smallest denormal
        (2.0**-134, 0.0),
        (3 * 2.0**-134, 2.0**-132),
        (-(2.0**-134), -0.0),
        (2.0**-149, 0.0),
    ],
}
for rounded in ROUNDED.values():
    rounded += [(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, -INF), (math.nan, math.nan)]


def every_16bit(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)


def float32_patterns() -> torch.Tensor:
    """Every upper half of a float32, with lower halves at and next to every tie of both dtypes."""
    lower = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    upper = torch.arange(1 << 16, dtype=torch.int64)
    bits = (upper[:, None] << 16) + torch.tensor(lower)
    return bits.reshape(-1).to(torch.int32).view(torch.float32)


def there_and_back(source: torch.Tensor, dtype: torch.dtype, scale: float = 1.0):
    """The source converted by each operator: flatten, flatten_stats, unflatten, unflatten_into."""
    destination = torch.zeros_like(source, dtype=dtype)
    ops.unflatten_into(source, [destination], scale=scale)
    return (
        ops.flatten([source], scale=scale, dtype=dtype),
        ops.flatten_stats([source], scale=scale, dtype=dtype).buffer,
        ops.unflatten(source, [destination.new_empty(source.shape)], scale=scale)[0],
        destination,
    )

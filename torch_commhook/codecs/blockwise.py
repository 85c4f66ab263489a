"""Block quantisation: values as integers of 8, 4 or 2 bits, with a step for each block of values.

In ``csrc/ops/codecs`` stand the operators (``blockwise.cpp``), the arithmetic
(``blockwise_math.h``) and the kernels for the CPU (``blockwise_kernels.inl``).
"""

from __future__ import annotations

import torch

from torch_commhook.codecs.base import check_setting, register_codec, text_of
from torch_commhook.codecs.block_codec import (
    BlockCodec,
    BlockForm,
    check_block_size,
    register_fakes,
)


def _form(op: str, *, bits: int, block_size: int, symmetric: bool) -> BlockForm:
    torch._check_value(bits in (2, 4, 8), lambda: f"{op}: bits must be 2, 4 or 8, got {bits}")
    check_block_size(op, block_size, 16 if bits == 2 else 8)
    return BlockForm(block_size, bits, 1 if symmetric else 2)


register_fakes("blockwise", _form)


@register_codec
class blockwise(BlockCodec):  # noqa: N801 (a codec is written as it is called)
    """Integers of 8, 4 or 2 bits, with a step for each block of values.

    With p a value in float32, times the scale, plus its error:

    - symmetric: ``p ~ q * step``, ``step = max|p| / n``, q from -n to n, n = 127, 7 or 1;
    - else: ``p ~ low + q * step``, ``step = (max - min) / n``, q from 0 to n, n = 255, 15 or 3.

    Symmetric codes of 2 bits that are rounded to the nearest have a smaller step: the mean of the
    magnitudes above 0.767 times the mean magnitude, at most ``max|p|``. Of a Gaussian it is 1.224
    sigma, the best of three levels, and a message loses 0.190 of its power. Where a few values are
    large and alike, and the others zeros, it loses nothing. Larger values come back as one step:
    use error feedback. (As in Li, Zhang, Liu, "Ternary Weight Networks", 2016.)

    Rounded to the nearest (ties to even), all others are off by at most half a step;
    stochastically by less than a step, and by nothing on average, with numbers that follow from
    seed, step and a value's place alone (Philox4x32-10, 16 bits for each value; the step's lowest
    32 bits count). A block of zeros comes back as zeros. A block with an infinity or NaN in it
    comes back as NaN, and its error stays as it was; so does one that is not symmetric, if
    ``max - min`` is beyond float32.

    Bytes for each value: ``bits / 8 + 4 / block_size``, and ``4 / block_size`` more where it is not
    symmetric.

    Args:
        bits: 8, 4 or 2.
        block_size: values in a block; a multiple of 8 up to 4096, with 2 bits of 16.
        symmetric: whether zero is the middle of what a block can hold; else blocks reach from their
            least value to their largest.
        rounding: ``"nearest"``, or ``"stochastic"``: right on average, with twice the mean square
            error.

    Raises:
        TypeError: a setting of another type.
        ValueError: another setting.

    Example:
        >>> codec = codecs.blockwise(bits=4, block_size=8)
        >>> values = torch.tensor([7.0, -3.0, 1.0, 0.4, 0.0, 2.0, -7.0, 5.0])
        >>> message = torch.empty(codec.nbytes(8), dtype=torch.uint8)
        >>> codec.encode([values], message)
        >>> codec.decode(message, [values])
        >>> values
        tensor([ 7., -3.,  1.,  0.,  0.,  2., -7.,  5.])
    """

    def __init__(
        self,
        bits: int = 8,
        block_size: int = 256,
        symmetric: bool = True,
        rounding: str = "nearest",
    ) -> None:
        check_setting("blockwise", "bits", bits, "an int")
        check_setting("blockwise", "block_size", block_size, "an int")
        check_setting("blockwise", "symmetric", symmetric, "a bool")
        super().__init__(
            "blockwise",
            _form("blockwise", bits=bits, block_size=block_size, symmetric=symmetric),
            {"bits": bits, "block_size": block_size, "symmetric": symmetric},
        )
        if rounding not in ("nearest", "stochastic"):
            raise ValueError(
                f"blockwise: rounding must be 'nearest' or 'stochastic', got {rounding!r}"
            )
        self._rounding = rounding

    @property
    def bits(self) -> int:
        """Of a value: 8, 4 or 2."""
        bits: int = self._settings["bits"]
        return bits

    @classmethod
    def examples(cls) -> list[blockwise]:
        return [
            cls(),
            cls(bits=4),
            cls(bits=8, symmetric=False),
            cls(bits=4, block_size=64, symmetric=False),
            cls(bits=2),
            cls(bits=2, block_size=64, symmetric=False),
            cls(rounding="stochastic"),
        ]

    @property
    def is_random(self) -> bool:
        return self._rounding == "stochastic"

    def __repr__(self) -> str:
        return text_of(type(self), {**self._settings, "rounding": self._rounding})

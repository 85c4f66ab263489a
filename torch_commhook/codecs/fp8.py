"""8-bit floats, with a scale for each block of values.

``csrc/ops/codecs`` has the operators (``fp8.cpp``), the arithmetic (``fp8_math.h``) and the CPU
kernels (``fp8_kernels.inl``).
"""

from __future__ import annotations

import torch

from torch_commhook.codecs.base import check_setting, register_codec
from torch_commhook.codecs.block_codec import (
    BlockCodec,
    BlockForm,
    check_block_size,
    register_fakes,
)


def _form(op: str, *, format: str, block_size: int) -> BlockForm:
    torch._check_value(
        format in ("e4m3", "e5m2"),
        lambda: f"{op}: format must be 'e4m3' or 'e5m2', got '{format}'",
    )
    check_block_size(op, block_size, 8)
    return BlockForm(block_size, 8, 1)


register_fakes("fp8", _form)


@register_codec
class fp8(BlockCodec):  # noqa: N801 (a codec is written as it is called)
    """8-bit floats, with a scale for each block: ``p ~ q * step``, ``step = max|p| / largest``.

    ``"e4m3"`` (``torch.float8_e4m3fn``) has magnitudes from 2^-9 to 448, and is off by at most 2^-4
    of a value. ``"e5m2"`` has magnitudes from 2^-16 to 57344, and is off by at most 2^-3. Smaller
    values are off by at most half of the smallest magnitude. A block with an infinity or NaN
    decodes to NaN, and its error stays unchanged.

    Bytes for each value: ``1 + 4 / block_size``.

    Args:
        format: ``"e4m3"`` or ``"e5m2"``.
        block_size: the number of values in a block; a multiple of 8 up to 4096.

    Raises:
        TypeError: a setting has another type.
        ValueError: a setting has another value.

    Example:
        >>> codec = codecs.fp8(block_size=8)
        >>> values = torch.tensor([448.0, 1.0, 2.0, 3.0, 100.0, -0.5, 0.0, -448.0])
        >>> message = torch.empty(codec.nbytes(8), dtype=torch.uint8)
        >>> codec.encode([values], message)
        >>> codec.decode(message, [values])
        >>> values
        tensor([ 448.0000,    1.0000,    2.0000,    3.0000,   96.0000,   -0.5000,
                   0.0000, -448.0000])
    """

    def __init__(self, format: str = "e4m3", block_size: int = 256) -> None:
        check_setting("fp8", "format", format, "a str")
        check_setting("fp8", "block_size", block_size, "an int")
        super().__init__(
            "fp8",
            _form("fp8", format=format, block_size=block_size),
            {"format": format, "block_size": block_size},
        )

    @classmethod
    def examples(cls) -> list[fp8]:
        return [cls(), cls("e5m2", 64)]

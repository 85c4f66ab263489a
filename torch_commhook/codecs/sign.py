"""Signs: a bit for each value, with the mean magnitude of each block of values.

``csrc/ops/codecs`` has the operators (``sign.cpp``) and the CPU kernels (``sign_kernels.inl``).
"""

from __future__ import annotations

from torch_commhook.codecs.base import check_setting, register_codec
from torch_commhook.codecs.block_codec import (
    BlockCodec,
    BlockForm,
    check_block_size,
    register_fakes,
)


def _form(op: str, *, block_size: int) -> BlockForm:
    check_block_size(op, block_size, 32)
    return BlockForm(block_size, 1, 1)


register_fakes("sign", _form)


@register_codec
class sign(BlockCodec):  # noqa: N801 (a codec is written as it is called)
    """The sign of each value, and the mean magnitude of each block: ``p ~ s`` or ``-s``.

    For a block with d values p, the squared error is ``|p|^2 - |p|_1^2 / d``, the least that any
    magnitude achieves. For Gaussian values it is 1 - 2 / pi of their square. A block with an
    infinity or NaN decodes to NaN, and its error stays unchanged. Without error feedback a sum of
    signs can stop making progress.

    Bytes for each value: ``1 / 8 + 4 / block_size``.

    Args:
        block_size: the number of values in a block; a multiple of 32 up to 4096.

    Raises:
        TypeError: a setting has another type.
        ValueError: ``block_size`` has another value.

    Example:
        >>> codec = codecs.sign(block_size=32)
        >>> values = torch.tensor([3.0, -1.0] * 16)
        >>> message = torch.empty(codec.nbytes(32), dtype=torch.uint8)
        >>> codec.encode([values], message)
        >>> codec.decode(message, [values])
        >>> values[:4], message.numel()
        (tensor([ 2., -2.,  2., -2.]), 32)
    """

    def __init__(self, block_size: int = 1024) -> None:
        check_setting("sign", "block_size", block_size, "an int")
        form = _form("sign", block_size=block_size)
        super().__init__("sign", form, {"block_size": block_size})

    @classmethod
    def examples(cls) -> list[sign]:
        return [cls(), cls(32)]

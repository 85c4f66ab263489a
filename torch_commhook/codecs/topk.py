"""The values of largest magnitude, with their indices.

``csrc/ops/codecs`` has the operators (``topk.cpp``), the CPU implementation (``topk_cpu.cpp``) and
its kernels (``topk_kernels.inl``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_commhook.codecs.base import register_codec, text_of
from torch_commhook.codecs.checks import check_memory, check_message, check_messages, check_values
from torch_commhook.codecs.sparse_codec import GatheredCodec, SparseCodec, check_entries

_BYTES_OF_ENTRY = 8


@torch.library.register_fake("commhook::topk_encode")
def _encode_fake(
    tensors: Sequence[Tensor],
    message: Tensor,
    *,
    scale: float = 1.0,
    error: Tensor | None = None,
    rounding: Tensor | None = None,
) -> None:
    op = "topk_encode"
    numel = check_values(op, tensors)
    check_message(op, "message", message, None)
    check_entries(op, message.numel(), _BYTES_OF_ENTRY, numel)
    check_memory(op, error, rounding, numel)


@torch.library.register_fake("commhook::topk_decode")
def _decode_fake(message: Tensor, tensors: Sequence[Tensor]) -> None:
    op = "topk_decode"
    numel = check_values(op, tensors)
    check_message(op, "message", message, None)
    check_entries(op, message.numel(), _BYTES_OF_ENTRY, numel)


@torch.library.register_fake("commhook::topk_decode_sum")
def _decode_sum_fake(messages: Tensor, tensors: Sequence[Tensor], *, scale: float = 1.0) -> None:
    op = "topk_decode_sum"
    numel = check_values(op, tensors)
    check_messages(op, messages)
    check_message(op, "messages", messages, None)
    check_entries(op, messages.shape[1], _BYTES_OF_ENTRY, numel)


@register_codec
class topk(SparseCodec, GatheredCodec):  # noqa: N801 (a codec is written as it is called)
    """The k values of largest magnitude of a bucket, with their indices; the others become 0.

    Of d values ``k = ceil(density * d)`` are sent, at least one; of equal magnitudes the first. No
    other k values leave a smaller error: ``|x - C(x)|^2 <= (1 - k / d) |x|^2``. Sent values are
    exact and leave no error; all others are error.

    A NaN counts as the largest value, and an infinity as the next: they are sent, as far as there
    is room. They never leave an error, because it would stay in all later messages.

    Bytes for each sent value: 8. Each rank gets the messages of all ranks, so the traffic grows
    with their number: over W ranks it is less than that of a cast to 16 bits if the density is
    below ``1 / (2 W)``.

    Args:
        density: the fraction of values that are sent, in (0, 1].

    Raises:
        TypeError: a setting has another type.
        ValueError: ``density`` is out of range.

    Example:
        >>> codec = codecs.topk(density=0.25)
        >>> values = torch.tensor([1.0, -9.0, 2.0, 3.0, 8.0, 4.0, 5.0, 0.0])
        >>> message = torch.empty(codec.nbytes(8), dtype=torch.uint8)
        >>> codec.encode([values], message)
        >>> codec.decode(message, [values])
        >>> values
        tensor([ 0., -9.,  0.,  0.,  8.,  0.,  0.,  0.])
    """

    def __init__(self, density: float = 0.01) -> None:
        super().__init__("topk", density, _BYTES_OF_ENTRY)
        self._settings = {}

    @classmethod
    def examples(cls) -> list[topk]:
        return [cls(), cls(0.1)]

    def __repr__(self) -> str:
        return text_of(type(self), {"density": self._density})

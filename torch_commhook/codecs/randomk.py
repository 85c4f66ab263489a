"""Values at random places that are the same on all ranks, without indices.

``csrc/ops/codecs`` has the operators (``randomk.cpp``), the choice of places (``randomk_math.h``),
the CPU implementation (``randomk_cpu.cpp``) and its kernels (``randomk_kernels.inl``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_commhook.codecs.base import check_setting, register_codec, text_of
from torch_commhook.codecs.checks import check_memory, check_message, check_values
from torch_commhook.codecs.sparse_codec import SparseCodec, check_entries

_ops = torch.ops.commhook

_BYTES_OF_ENTRY = 4


@torch.library.register_fake("commhook::randomk_encode")
def _encode_fake(
    tensors: Sequence[Tensor],
    message: Tensor,
    rounding: Tensor,
    *,
    unbiased: bool = False,
    scale: float = 1.0,
    error: Tensor | None = None,
) -> None:
    op = "randomk_encode"
    numel = check_values(op, tensors)
    check_message(op, "message", message, None)
    check_entries(op, message.numel(), _BYTES_OF_ENTRY, numel)
    check_memory(op, error, rounding, numel)


@torch.library.register_fake("commhook::randomk_decode")
def _decode_fake(message: Tensor, tensors: Sequence[Tensor], rounding: Tensor) -> None:
    op = "randomk_decode"
    numel = check_values(op, tensors)
    check_message(op, "message", message, None)
    check_entries(op, message.numel(), _BYTES_OF_ENTRY, numel)
    check_memory(op, None, rounding, numel)


@register_codec
class randomk(SparseCodec):  # noqa: N801 (a codec is written as it is called)
    """k values of a bucket at random places, the same on all ranks; the others become 0.

    Of d values ``k = ceil(density * d)`` are sent, at least one, each value with probability
    ``k / d``. ``rounding`` determines the places: seed and step (the step's lowest 32 bits count)
    select a permutation (a Feistel network on Philox4x32-10). So a message needs no indices. If all
    ranks give the same ``rounding``, messages can be added up.

    On average ``|x - C(x)|^2 = (1 - k / d) |x|^2``. Sent values are exact and leave no error; all
    others are error. ``unbiased`` scales the sent values by ``d / k``: then C(x) is x on average,
    and its squared deviation is ``(d / k - 1) |x|^2``, which no error memory can correct.

    If any value is infinite or NaN, after the scaling by ``d / k`` if there is one, all sent values
    are NaN. This value itself need not be among them. The sent values then also stay in the error;
    the infinite or NaN value leaves no error.

    Bytes for each sent value: 4.

    Args:
        density: the fraction of values that are sent, in (0, 1].
        unbiased: whether to scale the sent values. Not for error feedback.

    Raises:
        TypeError: a setting has another type.
        ValueError: ``density`` is out of range.

    Example:
        >>> codec = codecs.randomk(density=0.25)
        >>> values, restored = torch.arange(1.0, 9.0), torch.empty(8)
        >>> message = torch.empty(codec.nbytes(8), dtype=torch.uint8)
        >>> rounding = torch.tensor([0, 1])  # seed and step
        >>> codec.encode([values], message, rounding=rounding)
        >>> codec.decode(message, [restored], rounding=rounding)
        >>> int(restored.count_nonzero()), message.numel()
        (2, 8)
    """

    exchange = "all_reduce"

    def __init__(self, density: float = 0.01, unbiased: bool = False) -> None:
        super().__init__("randomk", density, _BYTES_OF_ENTRY)
        check_setting("randomk", "unbiased", unbiased, "a bool")
        self._unbiased = unbiased

    @classmethod
    def examples(cls) -> list[randomk]:
        return [cls(), cls(0.1), cls(0.1, unbiased=True)]

    @property
    def is_random(self) -> bool:
        return True

    @property
    def takes_error(self) -> bool:
        return not self._unbiased

    def encode(
        self,
        tensors: Sequence[Tensor],
        message: Tensor,
        *,
        shards: int = 1,
        scale: float = 1.0,
        error: Tensor | None = None,
        rounding: Tensor | None = None,
    ) -> None:
        self._check_shards(shards)
        drawn = self._given("encode", rounding)
        if self._unbiased and error is not None:
            raise ValueError(
                f"{self}.encode: error must be None for an unbiased codec, got a tensor"
            )
        _ops.randomk_encode(
            tensors, message, drawn, unbiased=self._unbiased, scale=scale, error=error
        )

    def decode(
        self,
        message: Tensor,
        tensors: Sequence[Tensor],
        *,
        shards: int = 1,
        rounding: Tensor | None = None,
    ) -> None:
        self._check_shards(shards)
        _ops.randomk_decode(message, tensors, self._given("decode", rounding))

    def decode_sum(
        self,
        messages: Tensor,
        tensors: Sequence[Tensor],
        *,
        scale: float = 1.0,
        rounding: Tensor | None = None,
    ) -> None:
        numbers = messages.reshape(-1).view(torch.float32)
        rows = numbers.view(len(messages), len(numbers) // len(messages))
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        if scale != 1.0:
            total.mul_(scale)
        self.decode(total.view(torch.uint8), tensors, rounding=rounding)

    def __repr__(self) -> str:
        return text_of(type(self), {"density": self._density, "unbiased": self._unbiased})

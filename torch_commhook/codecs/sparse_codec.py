"""The bases of codecs that send some of the values, in one shard."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from torch_commhook.codecs.base import Codec, Shard, check_setting
from torch_commhook.codecs.checks import ERROR_DTYPES

_MAX_NUMEL = (1 << 31) - 1


def check_entries(op: str, nbytes: int, bytes_of_entry: int, numel: int) -> None:
    """For fakes: refuse a message that does not hold 1 to ``numel`` entries of this size."""
    if not (isinstance(nbytes, int) and isinstance(numel, int)):
        return  # without a guard; the kernel sees the rest
    count = nbytes // bytes_of_entry
    torch._check_value(
        nbytes % bytes_of_entry == 0 and min(numel, 1) <= count <= numel,
        lambda: (
            f"{op}: a message must hold {bytes_of_entry} bytes for each of 1 to {numel} entries, "
            f"got {nbytes} bytes"
        ),
    )


def check_numel(name: str, numel: int) -> None:
    """Raise ValueError if a codec's messages cannot have this number of values."""
    if not 0 <= numel <= _MAX_NUMEL:
        raise ValueError(f"{name}: numel must be at least 0 and less than 2^31, got {numel}")


class OneShardCodec(Codec):
    """A codec that sends some of the values in one shard: ranks add up whole messages."""

    error_dtypes = ERROR_DTYPES

    def rounds_error_at_random(self, error: Tensor | None) -> bool:
        # Most values wait for many steps, while their errors grow by less than the last bit.
        return error is not None and error.dtype == torch.bfloat16

    def _check_shards(self, shards: int) -> None:
        if shards != 1:
            raise ValueError(
                f"{self}: shards must be 1, since ranks add up whole messages "
                f"({self.exchange}), got {shards}"
            )

    def reduce(
        self,
        messages: Tensor,
        message: Tensor,
        numel: int,
        *,
        scale: float = 1.0,
        error: Tensor | None = None,
        rounding: Tensor | None = None,
    ) -> None:
        """Refused: ranks add up whole messages.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{self}.reduce: exchange must be 'all_to_all', got {self.exchange!r}; see decode_sum"
        )


class GatheredCodec(OneShardCodec):
    """A codec whose messages all ranks gather, through three operators.

    ``<name>_encode``, ``<name>_decode`` and ``<name>_decode_sum`` also take the codec's settings.
    """

    exchange = "all_gather"
    _name: str
    _settings: dict[str, Any]

    def _call(self, method: str, *arguments: Any, **more: Any) -> None:
        getattr(torch.ops.commhook, f"{self._name}_{method}")(*arguments, **self._settings, **more)

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
        self._call("encode", tensors, message, scale=scale, error=error, rounding=rounding)

    def decode(
        self,
        message: Tensor,
        tensors: Sequence[Tensor],
        *,
        shards: int = 1,
        rounding: Tensor | None = None,
    ) -> None:
        self._check_shards(shards)
        self._call("decode", message, tensors)

    def decode_sum(
        self,
        messages: Tensor,
        tensors: Sequence[Tensor],
        *,
        scale: float = 1.0,
        rounding: Tensor | None = None,
    ) -> None:
        self._call("decode_sum", messages, tensors, scale=scale)


class SparseCodec(OneShardCodec):
    """A codec that sends k of d values: ``k = ceil(density * d)``, at least 1.

    Args:
        name: the codec's name.
        density: the fraction of values that are sent, in (0, 1]. Replaced by the nearest fraction
            with a denominator of at most 10^9, so that a hundredth of 700 is 7.
        bytes_of_entry: the number of bytes of a sent value.
    """

    def __init__(self, name: str, density: float, bytes_of_entry: int) -> None:
        check_setting(name, "density", density, "a number")
        if not 0 < density <= 1:
            raise ValueError(f"{name}: density must be more than 0 and at most 1, got {density}")
        self._name = name
        self._density = density
        self._fraction = Fraction(density).limit_denominator(10**9).as_integer_ratio()
        self._bytes_of_entry = bytes_of_entry

    def entries(self, numel: int) -> int:
        """Return the number of sent values among ``numel`` values.

        Raises:
            ValueError: ``numel`` is negative, or 2^31 or more.
        """
        check_numel(self._name, numel)
        numerator, denominator = self._fraction
        return min(numel, max(1, -(-numel * numerator // denominator)))

    def shards(self, numel: int, shards: int = 1) -> list[Shard]:
        self._check_shards(shards)
        return [Shard(numel, self.entries(numel) * self._bytes_of_entry)]

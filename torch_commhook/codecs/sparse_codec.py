"""Codecs that send some of the values, in one segment: ``topk``, ``chunk_topk`` and ``randomk``.

In C++, in ``csrc/ops/codecs``: for each its operators (``<name>.cpp``), the CPU implementation
(``<name>_cpu.cpp``) and its kernels (``<name>_kernels.inl``); ``chunk_topk_math.h`` has the form of
a message and its levels, ``randomk_math.h`` the choice of places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_commhook.codecs.base import (
    ERROR_DTYPES,
    Codec,
    Segment,
    check_memory,
    check_message,
    check_messages,
    check_setting,
    register_codec,
    text_of,
)
from torch_commhook.native.bucket_ops import check_tensors

# ---- the bases of codecs that send some of the values, in one segment ----------------------------


_MAX_NUMEL = (1 << 31) - 1


def register_fakes(name: str, check_length: Callable[..., None], *, has_sum: bool = False) -> None:
    """Register the fakes of a codec's operators; they check all that needs no data.

    The operators' schemas name this module (``set_python_module``), and PyTorch compares it with
    the module that registers.

    Args:
        name: the codec's name.
        check_length: ``check_length(op, name, nbytes, numel, **settings)`` checks the codec's own
            settings, and the length of a message of ``numel`` values.
        has_sum: whether there is an operator ``<name>_decode_sum``.
    """

    def check_coded(op: str, tensors: Sequence[Tensor], message: Tensor, settings: Any) -> int:
        numel = check_tensors(op, tensors)
        check_message(op, "message", message, None)
        check_length(op, "message", message.numel(), numel, **settings)
        return numel

    @torch.library.register_fake(f"commhook::{name}_encode")
    def encode(
        tensors: Sequence[Tensor],
        message: Tensor,
        rounding: Tensor | None = None,
        *,
        scale: float = 1.0,
        error: Tensor | None = None,
        **settings: Any,
    ) -> None:
        op = f"{name}_encode"
        check_memory(op, error, rounding, check_coded(op, tensors, message, settings))

    @torch.library.register_fake(f"commhook::{name}_decode")
    def decode(
        message: Tensor,
        tensors: Sequence[Tensor],
        rounding: Tensor | None = None,
        **settings: Any,
    ) -> None:
        op = f"{name}_decode"
        check_memory(op, None, rounding, check_coded(op, tensors, message, settings))

    if not has_sum:
        return

    @torch.library.register_fake(f"commhook::{name}_decode_sum")
    def decode_sum(
        messages: Tensor, tensors: Sequence[Tensor], *, scale: float = 1.0, **settings: Any
    ) -> None:
        op = f"{name}_decode_sum"
        numel = check_tensors(op, tensors)
        check_messages(op, messages)
        check_message(op, "messages", messages, None)
        check_length(op, "messages", messages.shape[1], numel, **settings)


def check_entries(
    bytes_of_entry: int, op: str, name: str, nbytes: int, numel: int, *, unbiased: bool = False
) -> None:
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


class OneSegmentCodec(Codec):
    """A codec that sends some of the values in one segment: ranks add up whole messages.

    ``<name>_encode``, ``<name>_decode`` and ``<name>_decode_sum`` also take the codec's settings.
    """

    exchange = "all_gather"
    error_dtypes = ERROR_DTYPES
    _name: str
    _settings: dict[str, Any]

    def rounds_error_at_random(self, error: Tensor | None) -> bool:
        # Most values wait for many steps, while their errors grow by less than the last bit.
        return error is not None and error.dtype == torch.bfloat16

    def _check_segments(self, segments: int) -> None:
        if segments != 1:
            raise ValueError(
                f"{self}: segments must be 1, since ranks add up whole messages "
                f"({self.exchange}), got {segments}"
            )

    def _call(self, method: str, *arguments: Any, **more: Any) -> None:
        getattr(torch.ops.commhook, f"{self._name}_{method}")(*arguments, **self._settings, **more)

    def encode(
        self,
        tensors: Sequence[Tensor],
        message: Tensor,
        *,
        segments: int = 1,
        scale: float = 1.0,
        error: Tensor | None = None,
        rounding: Tensor | None = None,
    ) -> None:
        self._check_segments(segments)
        self._drawn_from("encode", rounding)
        if error is not None and not self.takes_error:
            raise ValueError(
                f"{self}.encode: error must be None for an unbiased codec, got a tensor"
            )
        self._call("encode", tensors, message, scale=scale, error=error, rounding=rounding)

    def decode(
        self,
        message: Tensor,
        tensors: Sequence[Tensor],
        *,
        segments: int = 1,
        rounding: Tensor | None = None,
    ) -> None:
        self._check_segments(segments)
        self._call("decode", message, tensors, **self._drawn_from("decode", rounding))

    def decode_sum(
        self,
        messages: Tensor,
        tensors: Sequence[Tensor],
        *,
        scale: float = 1.0,
        rounding: Tensor | None = None,
    ) -> None:
        self._call("decode_sum", messages, tensors, scale=scale)

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

    def __repr__(self) -> str:
        return text_of(type(self), self._settings)


class SparseCodec(OneSegmentCodec):
    """A codec that sends k of d values: ``k = ceil(density * d)``, at least 1.

    ``density`` is replaced by the nearest fraction with a denominator of at most 10^9, so that a
    hundredth of 700 is 7. A sent value has ``bytes_of_entry`` bytes.
    """

    def __init__(self, name: str, density: float, bytes_of_entry: int) -> None:
        check_setting(name, "density", density, "a number")
        if not 0 < density <= 1:
            raise ValueError(f"{name}: density must be more than 0 and at most 1, got {density}")
        self._name = name
        self._density = density
        self._settings = {}
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

    def segments(self, numel: int, segments: int = 1) -> list[Segment]:
        self._check_segments(segments)
        return [Segment(numel, self.entries(numel) * self._bytes_of_entry)]


# ---- the values of largest magnitude, with their indices -----------------------------------------


_TOPK_BYTES = 8


register_fakes("topk", partial(check_entries, _TOPK_BYTES), has_sum=True)


@register_codec
class topk(SparseCodec):  # noqa: N801 (a codec is written as it is called)
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
        super().__init__("topk", density, _TOPK_BYTES)

    @classmethod
    def examples(cls) -> list[topk]:
        return [cls(), cls(0.1)]

    def __repr__(self) -> str:
        return text_of(type(self), {"density": self._density})


# ---- the largest values of each chunk, in few bits -----------------------------------------------


_CHUNKS = tuple(1 << power for power in range(6, 13))
_BITS = (2, 4, 8)


def _words(entries: int, chunk: int, bits: int) -> int:
    """The number of 32-bit words of a chunk's part of a message: levels, places, codes."""
    places = entries * (chunk.bit_length() - 1)
    return min(entries, 1) - (-places // 32) - (-entries * bits // 32)


def _bytes(numel: int, k: int, chunk: int, bits: int) -> int:
    rest = min(numel % chunk, k)
    return 4 * (numel // chunk * _words(k, chunk, bits) + _words(rest, chunk, bits))


def _check_form(name: str, k: int, chunk: int, bits: int) -> None:
    torch._check_value(
        chunk in _CHUNKS,
        lambda: (
            f"{name}: chunk must be a power of two from {_CHUNKS[0]} to {_CHUNKS[-1]}, got {chunk}"
        ),
    )
    torch._check_value(
        1 <= k <= chunk,
        lambda: f"{name}: k must be at least 1 and at most chunk, {chunk}, got {k}",
    )
    torch._check_value(bits in _BITS, lambda: f"{name}: bits must be 2, 4 or 8, got {bits}")


def _check_chunks(
    op: str, name: str, nbytes: int, numel: int, *, k: int, chunk: int, bits: int
) -> None:
    """For fakes: refuse settings, and a message of another length than they determine."""
    _check_form(op, k, chunk, bits)
    if not (isinstance(nbytes, int) and isinstance(numel, int)):
        return  # without a guard; the kernel checks the rest
    expected = _bytes(numel, k, chunk, bits)
    torch._check_value(
        nbytes == expected,
        lambda: f"{op}: {name} must hold {expected} bytes for {numel} values, got {nbytes} bytes",
    )


register_fakes("chunk_topk", _check_chunks, has_sum=True)


@register_codec
class chunk_topk(OneSegmentCodec):  # noqa: N801 (a codec is written as it is called)
    """The k values of largest magnitude of each chunk, in few bits; the others become 0.

    A chunk has ``chunk`` values in the order of ``flatten``, across the tensors' borders; the last
    one may have fewer. Of equal magnitudes the first are sent. Zeros are never sent. The method is
    that of SparseLoCo (Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo",
    2025), which sends the updates of local steps (:class:`~torch_commhook.hooks.local_sgd`).

    A value is sent as its place in the chunk, its sign, and the number of a level that represents
    its magnitude. The lowest and the highest level of each chunk are sent in bfloat16. With 2 bits
    there are no others: they are the means of the smaller and of the larger sent magnitudes, which
    two rounds of Lloyd's algorithm separate. With 4 or 8 bits, 8 or 128 levels lie between the
    smallest and the largest of these magnitudes, nearly evenly by their logarithms.

    For k = 64 of 4,096 values the rounding to levels loses this part of the squares of the sent
    values:

    ========================  =======  =======  ========
    values                    2 bits   4 bits   8 bits
    ========================  =======  =======  ========
    Gaussian                  0.0038   0.00043  0.000001
    Student t, 3 degrees      0.052    0.0039   0.000014
    ========================  =======  =======  ========

    The values that are not sent make up at most the part ``1 - k / chunk`` of the squares of all
    values. These values and the rounding are error.

    If a chunk has an infinity or a NaN, all values that it sends are NaN. Such a value counts as
    larger than all numbers, so its place is among those sent, as far as there is room. The chunk's
    finite values stay in the error completely; the others leave no error.

    Bytes for each chunk: 4 for its levels, and ``log2(chunk) + bits`` bits for each sent value, in
    whole words of 4 bytes. With the defaults, 0.0283 for each element. Each rank gets the messages
    of all ranks, so the traffic grows with their number.

    Args:
        k: the number of values of each chunk that are sent, 1 to ``chunk``.
        chunk: the number of values of a chunk, a power of two from 64 to 4,096.
        bits: the number of bits of a sent value beside its place: 2, 4 or 8.

    Raises:
        TypeError: a setting has another type.
        ValueError: a setting has another value.

    Example:
        >>> codec = codecs.chunk_topk(k=2, chunk=64)
        >>> values = torch.zeros(64)
        >>> values[3], values[9], values[20] = 4.0, -8.0, 1.0
        >>> message = torch.empty(codec.nbytes(64), dtype=torch.uint8)
        >>> codec.encode([values], message)
        >>> codec.decode(message, [values])
        >>> values.nonzero().flatten().tolist(), values[[3, 9]].tolist()
        ([3, 9], [4.0, -8.0])
    """

    def __init__(self, k: int = 64, chunk: int = 4096, bits: int = 2) -> None:
        for name, value in (("k", k), ("chunk", chunk), ("bits", bits)):
            check_setting("chunk_topk", name, value, "an int")
        _check_form("chunk_topk", k, chunk, bits)
        self._name = "chunk_topk"
        self._settings = {"k": k, "chunk": chunk, "bits": bits}

    @classmethod
    def examples(cls) -> list[chunk_topk]:
        return [cls(), cls(20, 64, 4)]

    def entries(self, numel: int) -> int:
        """Return the highest number of sent values among ``numel`` values: zeros are not sent.

        Raises:
            ValueError: ``numel`` is negative, or 2^31 or more.
        """
        check_numel("chunk_topk", numel)
        k: int = self._settings["k"]
        chunk: int = self._settings["chunk"]
        return numel // chunk * k + min(numel % chunk, k)

    def segments(self, numel: int, segments: int = 1) -> list[Segment]:
        self._check_segments(segments)
        check_numel("chunk_topk", numel)
        return [Segment(numel, _bytes(numel, **self._settings))]


# ---- values at random places that are the same on all ranks, without indices ---------------------


_RANDOMK_BYTES = 4


register_fakes("randomk", partial(check_entries, _RANDOMK_BYTES))


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
        super().__init__("randomk", density, _RANDOMK_BYTES)
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

    def _call(self, method: str, *arguments: Any, **more: Any) -> None:
        if method == "encode":
            more["unbiased"] = self._unbiased
        super()._call(method, *arguments, **more)

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

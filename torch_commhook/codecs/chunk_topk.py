"""The largest values of each chunk, in few bits.

``csrc/ops/codecs`` has the form of a message and its levels (``chunk_topk_math.h``), the operators
(``chunk_topk.cpp``), their CPU implementation (``chunk_topk_cpu.cpp``) and its kernels
(``chunk_topk_kernels.inl``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_commhook.codecs.base import Shard, check_setting, register_codec, text_of
from torch_commhook.codecs.checks import check_memory, check_message, check_messages, check_values
from torch_commhook.codecs.sparse_codec import GatheredCodec, check_numel

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


def _check_bytes(
    op: str, name: str, nbytes: int, numel: int, k: int, chunk: int, bits: int
) -> None:
    if not (isinstance(nbytes, int) and isinstance(numel, int)):
        return  # without a guard; the kernel checks the rest
    expected = _bytes(numel, k, chunk, bits)
    torch._check_value(
        nbytes == expected,
        lambda: f"{op}: {name} must hold {expected} bytes for {numel} values, got {nbytes} bytes",
    )


def _check_coded(
    op: str, tensors: Sequence[Tensor], message: Tensor, k: int, chunk: int, bits: int
) -> int:
    """Check the values and the message of a call that encodes or decodes; returns their number."""
    _check_form(op, k, chunk, bits)
    numel = check_values(op, tensors)
    check_message(op, "message", message, None)
    _check_bytes(op, "message", message.numel(), numel, k, chunk, bits)
    return numel


@torch.library.register_fake("commhook::chunk_topk_encode")
def _encode_fake(
    tensors: Sequence[Tensor],
    message: Tensor,
    *,
    k: int,
    chunk: int,
    bits: int,
    scale: float = 1.0,
    error: Tensor | None = None,
    rounding: Tensor | None = None,
) -> None:
    op = "chunk_topk_encode"
    numel = _check_coded(op, tensors, message, k, chunk, bits)
    check_memory(op, error, rounding, numel)


@torch.library.register_fake("commhook::chunk_topk_decode")
def _decode_fake(
    message: Tensor, tensors: Sequence[Tensor], *, k: int, chunk: int, bits: int
) -> None:
    _check_coded("chunk_topk_decode", tensors, message, k, chunk, bits)


@torch.library.register_fake("commhook::chunk_topk_decode_sum")
def _decode_sum_fake(
    messages: Tensor,
    tensors: Sequence[Tensor],
    *,
    k: int,
    chunk: int,
    bits: int,
    scale: float = 1.0,
) -> None:
    op = "chunk_topk_decode_sum"
    _check_form(op, k, chunk, bits)
    numel = check_values(op, tensors)
    check_messages(op, messages)
    check_message(op, "messages", messages, None)
    _check_bytes(op, "messages", messages.shape[1], numel, k, chunk, bits)


@register_codec
class chunk_topk(GatheredCodec):  # noqa: N801 (a codec is written as it is called)
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

    def shards(self, numel: int, shards: int = 1) -> list[Shard]:
        self._check_shards(shards)
        check_numel("chunk_topk", numel)
        return [Shard(numel, _bytes(numel, **self._settings))]

    def __repr__(self) -> str:
        return text_of(type(self), self._settings)

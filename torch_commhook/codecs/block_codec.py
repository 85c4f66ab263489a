"""Codecs that send values in blocks: ``blockwise``, ``fp8`` and ``sign``.

The base has the form of a message, the methods, and the operators' fakes. In C++, in
``csrc/ops/codecs``: ``block_codec.h``; and for each codec its operators (``<name>.cpp``), CPU
kernels (``<name>_kernels.inl``) and arithmetic (``<name>_math.h``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_commhook.codecs.base import (
    ERROR_DTYPES,
    Codec,
    Segment,
    check_failed,
    check_memory,
    check_message,
    check_messages,
    check_ranks,
    check_setting,
    register_codec,
    text_of,
    with_old_argument,
)
from torch_commhook.native.bucket_ops import check_tensors
from torch_commhook.wording import keep_old_method

# ---- the base ------------------------------------------------------------------------------------


_MAX_BLOCK_SIZE = 4096
_MOST_SEGMENTS = 1 << 20
#: A message's segments, their codes and their parameters begin at multiples of this many bytes.
_SEGMENT_ALIGNMENT = 16


@dataclass(frozen=True)
class BlockForm:
    """A message form: a few bits for each value, and a few float32 parameters for each block.

    Attributes:
        block_size: the number of values in a block.
        bits: the number of bits of a value.
        parameters: the number of parameters of a block.

    Example:
        >>> form = codecs.BlockForm(block_size=256, bits=4, parameters=1)
        >>> form.nbytes(1024)  # 512 bytes of codes, 16 of parameters
        528
    """

    block_size: int
    bits: int
    parameters: int

    @with_old_argument
    def segments(self, op: str, numel: int, segments: int) -> list[Segment]:
        """The parts of a message. Each has about equally many whole blocks."""
        _check_segments(op, "segments", segments)
        if numel < 0:  # torch._check_value needs a message with a known size
            raise ValueError(f"{op}: numel must be at least 0, got {numel}")
        size = self.block_size
        blocks = (numel + size - 1) // size
        found = []
        for segment in range(segments):
            first, last = blocks * segment // segments, blocks * (segment + 1) // segments
            count = min(numel, last * size) - min(numel, first * size)
            found.append(Segment(count, self._bytes(count, last - first)))
        return found

    @with_old_argument
    def nbytes(self, numel: int, segments: int = 1) -> int:
        """The number of bytes of a message."""
        size = self.block_size
        blocks = (numel + size - 1) // size
        first = blocks * (segments - 1) // segments  # of the last; only this one may end early
        least = blocks // segments
        longer = first - (segments - 1) * least
        return (
            (segments - 1 - longer) * self._bytes(least * size, least)
            + longer * self._bytes((least + 1) * size, least + 1)
            + self._bytes(numel - first * size, blocks - first)
        )

    def _bytes(self, count: int, blocks: int) -> int:
        """The number of bytes of a segment."""
        codes = _filled_up((count * self.bits + 7) // 8)
        return _filled_up(codes + blocks * self.parameters * 4)


keep_old_method(BlockForm, "shards", "segments")


def _filled_up(nbytes: int) -> int:
    return (nbytes + _SEGMENT_ALIGNMENT - 1) // _SEGMENT_ALIGNMENT * _SEGMENT_ALIGNMENT


def check_block_size(op: str, block_size: int, multiple: int) -> None:
    torch._check_value(
        multiple <= block_size <= _MAX_BLOCK_SIZE and block_size % multiple == 0,
        lambda: (
            f"{op}: block_size must be a multiple of {multiple} of at most {_MAX_BLOCK_SIZE}, got "
            f"{block_size}"
        ),
    )


def _check_segments(op: str, name: str, segments: int) -> None:
    # Dynamo of torch 2.11 does not trace torch._check_value.
    if not 1 <= segments <= _MOST_SEGMENTS:
        raise ValueError(f"{op}: {name} must be at least 1 and at most 2^20, got {segments}")


def _check_sizes(op: str, shards: int, sizes: Sequence[int] | None, numel: int) -> None:
    if sizes is None:
        return
    if shards != 1:
        raise ValueError(f"{op}: shards must be 1 if sizes are given, got {shards}")
    if not 1 <= len(sizes) <= _MOST_SEGMENTS:
        raise ValueError(
            f"{op}: sizes must be at least 1 number and at most 2^20, got {len(sizes)}"
        )
    if not all(isinstance(size, int) for size in (*sizes, numel)):
        return  # without a guard; the kernel checks the rest
    if any(size < 0 for size in sizes):
        raise ValueError(f"{op}: sizes must be at least 0, got {list(sizes)}")
    if sum(sizes) != numel:
        raise ValueError(f"{op}: sizes must add up to {numel} elements, got {list(sizes)}")


# ---- the codec -----------------------------------------------------------------------------------


class BlockCodec(Codec):
    """A codec that sends values in blocks, through five operators.

    ``<name>_encode``, ``<name>_decode``, ``<name>_decode_sum``, ``<name>_reduce`` and
    ``<name>_reduce_shards`` pass over memory once. The values, in the order of
    ``torch.ops.commhook.flatten``, are divided into blocks across the tensors' borders. A message's
    segments have about equally many whole blocks; the last block may be shorter. With fewer blocks
    than segments, some segments are empty. Each chunk begins with a new block.

    A segment has the codes of its blocks, then their parameters. Zeros pad both to multiples of 16
    bytes, at most 27 bytes for each segment. So consecutive chunks and messages begin at such
    multiples, too.

    The operators take what ``sign_encode`` and its like take, in that order and by those names. A
    subclass whose operators draw random numbers overrides :attr:`is_random`, and one whose
    constructor has other settings than its operators overrides ``__repr__``.

    Args:
        name: the codec's name; the operators' names begin with it.
        form: the form of its messages.
        settings: its operators' own arguments.
        library: the namespace of its operators in ``torch.ops``.

    Example:
        >>> class signs(codecs.BlockCodec):  # by the operators of another codec
        ...     def __init__(self, size=64):
        ...         form = codecs.BlockForm(block_size=size, bits=1, parameters=1)
        ...         super().__init__("sign", form, {"block_size": size})
        ...     def __repr__(self):
        ...         return f"signs(size={self.block_size})"
        >>> found = simulate(hooks.compressed(signs()), [[torch.ones(640)], [torch.ones(640)]])
        >>> found.result[0][:2], found.wire_bytes
        (tensor([1., 1.]), 160)
    """

    error_dtypes = ERROR_DTYPES

    def __init__(
        self, name: str, form: BlockForm, settings: dict[str, Any], *, library: str = "commhook"
    ) -> None:
        self._name = name
        self._form = form
        self._settings = settings
        self._library = library

    @property
    def block_size(self) -> int:
        """The number of values in a block."""
        return self._form.block_size

    def _call(self, method: str, *arguments: Any, **more: Any) -> None:
        operator = getattr(getattr(torch.ops, self._library), f"{self._name}_{method}")
        operator(*arguments, **more, **self._settings)

    def segments(self, numel: int, segments: int = 1) -> list[Segment]:
        return self._form.segments(self._name, numel, segments)

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
        drawn = self._drawn_from("encode", rounding)
        self._call("encode", tensors, message, shards=segments, scale=scale, error=error, **drawn)

    def decode(
        self,
        message: Tensor,
        tensors: Sequence[Tensor],
        *,
        segments: int = 1,
        rounding: Tensor | None = None,
    ) -> None:
        self._call("decode", message, tensors, shards=segments)

    def encode_chunks(
        self,
        tensors: Sequence[Tensor],
        message: Tensor,
        sizes: Sequence[int],
        *,
        scale: float = 1.0,
        error: Tensor | None = None,
        rounding: Tensor | None = None,
    ) -> None:
        drawn = self._drawn_from("encode_chunks", rounding)
        self._call("encode", tensors, message, sizes=sizes, scale=scale, error=error, **drawn)

    def decode_chunks(
        self,
        message: Tensor,
        tensors: Sequence[Tensor],
        sizes: Sequence[int],
        *,
        rounding: Tensor | None = None,
    ) -> None:
        self._call("decode", message, tensors, sizes=sizes)

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
        drawn = self._drawn_from("reduce", rounding)
        self._call("reduce", messages, message, numel, scale=scale, error=error, **drawn)

    def reduce_segments(
        self,
        messages: Sequence[Tensor],
        message: Tensor,
        numel: int,
        *,
        scale: float = 1.0,
        error: Tensor | None = None,
        rounding: Tensor | None = None,
        failed: Tensor | None = None,
    ) -> None:
        """Reduce messages in separate tensors, such as shared memory; as ``reduce``.

        Args:
            messages: 1 to 16 messages, each of ``numel`` values in one segment.
            message: as many bytes as one of them, sharing no memory with them. Written.
            numel: the number of values in each.
            scale, error, rounding: as for :meth:`encode`.
            failed: one int64. If it is not zero, nothing is read or written: other ranks may still
                be reading ``message``.

        Raises:
            TypeError, ValueError, RuntimeError: as :meth:`encode`.
        """
        drawn = self._drawn_from("reduce_segments", rounding)
        more = {"scale": scale, "error": error, "failed": failed}
        self._call("reduce_shards", messages, message, numel, **more, **drawn)

    def __repr__(self) -> str:
        return text_of(type(self), self._settings)


# ---- fakes ---------------------------------------------------------------------------------------


def register_fakes(name: str, form_of: Callable[..., BlockForm]) -> None:
    """Register the fakes of a block codec's operators; they check all that needs no data.

    The operators' schemas name this module (``set_python_module``), and PyTorch compares it with
    the module that registers.

    Args:
        name: the codec's name.
        form_of: ``form_of(op, **settings)`` checks the codec's own settings, with the operator's
            name in errors, and returns the form of its messages.
    """

    def register(op: str, check: Callable[..., int]) -> None:
        @torch.library.register_fake(f"commhook::{op}")
        def fake(
            *arguments: Any,
            scale: float = 1.0,
            error: Tensor | None = None,
            rounding: Tensor | None = None,
            failed: Tensor | None = None,
            **more: Any,
        ) -> None:
            parts = {key: more.pop(key) for key in ("shards", "sizes") if key in more}
            numel = check(op, form_of(op, **more), *arguments, **parts)
            check_memory(op, error, rounding, numel)
            check_failed(op, failed)

    register(f"{name}_encode", _check_encode)
    register(f"{name}_decode", _check_decode)
    register(f"{name}_decode_sum", _check_decode_sum)
    register(f"{name}_reduce", _check_reduce)
    register(f"{name}_reduce_shards", _check_reduce_shards)


# Each checks an operator's tensors, and returns the number of values. In the operators' schemas a
# segment is called a shard.


def _check_encode(
    op: str,
    form: BlockForm,
    tensors: Sequence[Tensor],
    message: Tensor,
    shards: int = 1,
    sizes: Sequence[int] | None = None,
) -> int:
    _check_segments(op, "shards", shards)
    numel = check_tensors(op, tensors)
    _check_sizes(op, shards, sizes, numel)
    check_message(op, "message", message, _known_bytes(form, numel, shards, sizes))
    return numel


def _check_decode(
    op: str, form: BlockForm, message: Tensor, tensors: Sequence[Tensor], **parts: Any
) -> int:
    return _check_encode(op, form, tensors, message, **parts)


def _check_decode_sum(op: str, form: BlockForm, messages: Tensor, tensors: Sequence[Tensor]) -> int:
    numel = check_tensors(op, tensors)
    _check_rows(op, messages, _known_bytes(form, numel))
    return numel


def _check_reduce(op: str, form: BlockForm, messages: Tensor, message: Tensor, numel: int) -> int:
    known = _known_bytes(form, numel)
    _check_rows(op, messages, known)
    check_message(op, "message", message, known)
    return numel


def _check_reduce_shards(
    op: str, form: BlockForm, messages: Sequence[Tensor], message: Tensor, numel: int
) -> int:
    check_ranks(op, "messages", len(messages), 1)
    known = _known_bytes(form, numel)
    check_message(op, "message", message, known)
    for i, each in enumerate(messages):
        check_message(op, f"messages[{i}]", each, known)
    return numel


def _check_rows(op: str, messages: Tensor, known: int | None) -> None:
    """Check messages in one tensor: each row must have the known number of bytes."""
    check_messages(op, messages)
    check_message(op, "messages", messages, None if known is None else known * len(messages))


def _known_bytes(
    form: BlockForm, numel: int, segments: int = 1, sizes: Sequence[int] | None = None
) -> int | None:
    """The length of a message, if it is known without a guard; the kernel checks the rest."""
    parts = [numel] if sizes is None else sizes
    if not all(isinstance(part, int) for part in parts):
        return None
    return sum(form.nbytes(part, segments) for part in parts)


# ---- block quantisation: integers of 8, 4 or 2 bits, with a step for each block ------------------


def _blockwise_form(op: str, *, bits: int, block_size: int, symmetric: bool) -> BlockForm:
    torch._check_value(bits in (2, 4, 8), lambda: f"{op}: bits must be 2, 4 or 8, got {bits}")
    check_block_size(op, block_size, 16 if bits == 2 else 8)
    return BlockForm(block_size, bits, 1 if symmetric else 2)


register_fakes("blockwise", _blockwise_form)


@register_codec
class blockwise(BlockCodec):  # noqa: N801 (a codec is written as it is called)
    """Integers of 8, 4 or 2 bits, with a step for each block of values.

    Let p be a value in float32, times the scale, plus its error:

    - symmetric: ``p ~ q * step``, ``step = max|p| / n``, q from -n to n, n = 127, 7 or 1;
    - else: ``p ~ low + q * step``, ``step = (max - min) / n``, q from 0 to n, n = 255, 15 or 3.

    Symmetric codes of 2 bits that are rounded to the nearest have a smaller step: the mean of the
    magnitudes above 0.767 times the mean magnitude, at most ``max|p|``. For a Gaussian this is
    1.224 sigma, the best of three levels; a message then loses 0.190 of its power. It loses nothing
    if a few values are large and alike, and the others zero. Larger values decode to one step: use
    error feedback. (As in Li, Zhang, Liu, "Ternary Weight Networks", 2016.)

    Rounding to the nearest (ties to even) is off by at most half a step, apart from that case.
    Stochastic rounding is off by less than a step, and unbiased. Its random numbers depend on seed,
    step and the value's position only (Philox4x32-10, 16 bits for each value; the step's lowest 32
    bits count). A block of zeros decodes to zeros. A block with an infinity or NaN decodes to NaN,
    and its error stays unchanged; so does an asymmetric block if ``max - min`` exceeds float32.

    Bytes for each value: ``bits / 8 + 4 / block_size``, plus ``4 / block_size`` if not symmetric.

    Args:
        bits: the number of bits of a value: 8, 4 or 2.
        block_size: the number of values in a block; a multiple of 8 up to 4096, with 2 bits of 16.
        symmetric: whether a block's range is symmetric around zero; else it reaches from the
            block's smallest value to its largest.
        rounding: ``"nearest"``, or ``"stochastic"``: unbiased, with twice the mean square error.

    Raises:
        TypeError: a setting has another type.
        ValueError: a setting has another value.

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
            _blockwise_form("blockwise", bits=bits, block_size=block_size, symmetric=symmetric),
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


# ---- 8-bit floats, with a scale for each block of values -----------------------------------------


def _fp8_form(op: str, *, format: str, block_size: int) -> BlockForm:
    torch._check_value(
        format in ("e4m3", "e5m2"),
        lambda: f"{op}: format must be 'e4m3' or 'e5m2', got '{format}'",
    )
    check_block_size(op, block_size, 8)
    return BlockForm(block_size, 8, 1)


register_fakes("fp8", _fp8_form)


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
            _fp8_form("fp8", format=format, block_size=block_size),
            {"format": format, "block_size": block_size},
        )

    @classmethod
    def examples(cls) -> list[fp8]:
        return [cls(), cls("e5m2", 64)]


# ---- signs: a bit for each value, with the mean magnitude of each block of values ----------------


def _sign_form(op: str, *, block_size: int) -> BlockForm:
    check_block_size(op, block_size, 32)
    return BlockForm(block_size, 1, 1)


register_fakes("sign", _sign_form)


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
        form = _sign_form("sign", block_size=block_size)
        super().__init__("sign", form, {"block_size": block_size})

    @classmethod
    def examples(cls) -> list[sign]:
        return [cls(), cls(32)]

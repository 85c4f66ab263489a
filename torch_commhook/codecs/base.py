"""The base class of all codecs, the table of them, and what they share."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torch_commhook.native.bucket_ops import (
    check_dense,
    check_flat,
    flatten,
    unflatten_into,
)
from torch_commhook.wording import keep_old_method, warn_user

# ---- checks of the fakes of all codecs' operators ------------------------------------------------


#: The dtypes of errors.
ERROR_DTYPES = (torch.float32, torch.bfloat16)

#: The highest number of ranks that may share memory.
MOST_RANKS = 16


def check_message(op: str, name: str, message: Tensor, nbytes: int | None) -> None:
    _check_buffer(op, name, message, (torch.uint8,), nbytes, "bytes")


def check_memory(op: str, error: Tensor | None, rounding: Tensor | None, numel: int) -> None:
    if error is not None:
        _check_buffer(op, "error", error, ERROR_DTYPES, numel, "elements")
    _check_numbers(op, "rounding", rounding, 2, "two numbers, seed and step")


def _check_buffer(
    op: str, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], numel: int | None, what: str
) -> None:
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{op}: {name} must be of dtype {allowed}, got {tensor.dtype}")
    torch._check_value(
        tensor.is_contiguous() and (numel is None or tensor.numel() == numel),
        lambda: (
            f"{op}: {name} must be contiguous and hold {numel} {what}, got sizes "
            f"{list(tensor.shape)} with strides {list(tensor.stride())}"
        ),
    )


def _check_numbers(op: str, name: str, tensor: Tensor | None, count: int, contract: str) -> None:
    if tensor is None:
        return
    if tensor.dtype is not torch.int64:
        raise TypeError(f"{op}: {name} must be a dense tensor of dtype int64, got {tensor.dtype}")
    torch._check_value(
        tensor.numel() == count,
        lambda: f"{op}: {name} must hold {contract}, got sizes {list(tensor.shape)}",
    )


def check_messages(op: str, messages: Tensor) -> None:
    torch._check_value(
        messages.dim() == 2 and messages.shape[0] >= 1,
        lambda: (
            f"{op}: messages must have two dimensions, one row for each message, got sizes "
            f"{list(messages.shape)}"
        ),
    )


def check_ranks(op: str, name: str, ranks: int, least: int) -> None:
    """Refuse a list with too few or too many tensors. It must have one for each rank."""
    torch._check_value(
        least <= ranks <= MOST_RANKS,
        lambda: (
            f"{op}: {name} must be {least} to {MOST_RANKS} tensors, one for each rank, got {ranks}"
        ),
    )


def check_failed(op: str, failed: Tensor | None) -> None:
    """Refuse anything but one int64."""
    _check_numbers(op, "failed", failed, 1, "one number")


# ---- the base class of all codecs, and the table of them -----------------------------------------


def check_setting(codec: str, name: str, value: object, kind: str) -> None:
    """Raise a TypeError if a codec's setting is of another kind. A bool is no number.

    ``kind`` is ``"an int"``, ``"a number"``, ``"a bool"`` or ``"a str"``.
    """
    types: dict[str, tuple[type, ...]] = {
        "an int": (int,),
        "a number": (int, float),
        "a bool": (bool,),
        "a str": (str,),
    }
    if not isinstance(value, types[kind]) or (isinstance(value, bool) and kind != "a bool"):
        raise TypeError(f"{codec}: {name} must be {kind}, got {value!r}")


class Segment(NamedTuple):
    """A part of a message that can be decoded by itself.

    Attributes:
        numel: the number of values.
        nbytes: the number of bytes.

    Example:
        >>> codecs.fp8().segments(1024, 2)
        [Segment(numel=512, nbytes=528), Segment(numel=512, nbytes=528)]
    """

    numel: int
    nbytes: int


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _has_old_argument(method: Callable[..., Any]) -> bool:
    names = inspect.signature(method).parameters
    return "shards" in names and "segments" not in names


def with_old_argument(method: _Method) -> _Method:
    """Let a method take ``segments`` by its old name, ``shards``, with a DeprecationWarning.

    A user's method that has only ``shards`` also takes ``segments``, without a warning.
    """
    is_old = _has_old_argument(method)
    other, own = ("segments", "shards") if is_old else ("shards", "segments")

    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        if other in named:
            if not is_old:
                what = f"{method.__qualname__}: shards is deprecated: use segments"
                warn_user(what, DeprecationWarning)
            named[own] = named.pop(other)
        return method(*arguments, **named)

    return call  # type: ignore[return-value]


class Codec(ABC):
    """The base class of codecs: encodes gradients into a message, and decodes it.

    A message is a flat tensor of bytes. Its length depends on the number of values only, so all
    ranks know it. It may consist of segments. Each segment is a message of its own, with
    consecutive values of the bucket.

    A codec keeps no state between calls: the caller keeps the error memory and the seeds of random
    numbers. Ranks compare the text of the codecs that they attach. A codec with settings needs a
    ``__repr__`` that shows them.

    Example:
        >>> codec = codecs.blockwise(bits=8)
        >>> codec.segments(1000, 2)
        [Segment(numel=512, nbytes=528), Segment(numel=488, nbytes=512)]
        >>> message = torch.empty(codec.nbytes(1000), dtype=torch.uint8)
        >>> values, restored = torch.linspace(-1, 1, 1000), torch.empty(1000)
        >>> codec.encode([values], message)
        >>> codec.decode(message, [restored])
        >>> message.numel(), bool((restored - values).abs().max() < 0.005)
        (1024, True)
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        is_old = keep_old_method(cls, "shards", "segments")
        for name in ("segments", "encode", "decode"):
            if inspect.isfunction(method := vars(cls).get(name)):
                is_old |= _has_old_argument(method)
                setattr(cls, name, with_old_argument(method))
        if keep_old_method(cls, "reduce_shards", "reduce_segments"):
            what = "the method reduce_shards is deprecated: use reduce_segments"
            warn_user(f"{cls.__qualname__}: {what}", DeprecationWarning)
        if is_old:
            what = "the method and the argument shards are deprecated: use segments"
            warn_user(f"{cls.__qualname__}: {what}", DeprecationWarning)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    #: How ranks add up their messages (:func:`torch_commhook.collectives.compressed_all_reduce`).
    #: ``"all_to_all"``: in segments, with :meth:`reduce`. ``"all_gather"``: each rank gets all
    #: messages, and adds them up with :meth:`decode_sum`. ``"all_reduce"``: messages are float32
    #: numbers that may be added up, if all ranks give the same ``rounding``. The last two need one
    #: segment only, and no :meth:`reduce`.
    exchange: str = "all_to_all"

    @classmethod
    def examples(cls) -> Sequence[Codec]:
        """Return the settings that tests and benchmarks try."""
        return [cls()]

    @property
    def is_random(self) -> bool:
        """Whether :meth:`encode` and :meth:`reduce` need random numbers."""
        return False

    @property
    def takes_error(self) -> bool:
        """Whether :meth:`encode` accepts an error."""
        return True

    #: The dtypes of errors that :meth:`encode` and :meth:`reduce` accept. For a codec that accepts
    #: float32 only, collectives copy a bfloat16 error.
    error_dtypes: Sequence[torch.dtype] = (torch.float32,)

    @abstractmethod
    def segments(self, numel: int, segments: int = 1) -> list[Segment]:
        """Return the parts of a message of ``numel`` values, in order. Some may be empty."""

    @abstractmethod
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
        """Write the message of tensors. Their values are in the order of ``flatten``.

        Args:
            tensors: dense tensors of dtype float64, float32, float16 or bfloat16, of any shapes and
                strides, on one device.
            message: a contiguous uint8 tensor with the total length of :meth:`segments`, at an
                address that is a multiple of 4. All of it is written.
            segments: the number of segments.
            scale: the values' factor, applied in float32.
            error: the errors of earlier messages: a flat tensor of one of :attr:`error_dtypes`,
                with one element per value. Added to the values, and replaced by this message's
                error. Computed in float32, and rounded to its dtype. An element stays unchanged if
                its new error is not finite, or it would never be finite again.
            rounding: int64, ``[seed, step]``, on the tensors' device: determines the random
                numbers. Needed if :attr:`is_random`.

        Raises:
            TypeError: a tensor has another dtype or layout.
            ValueError: there are no tensors, several devices, sizes that do not fit, or tensors
                that share memory.
            RuntimeError: a tensor requires grad while gradients are recorded.
        """

    @abstractmethod
    def decode(
        self,
        message: Tensor,
        tensors: Sequence[Tensor],
        *,
        segments: int = 1,
        rounding: Tensor | None = None,
    ) -> None:
        """Write a message's values into tensors.

        Args:
            message: a message that :meth:`encode` of a codec with the same settings has written.
            tensors: dense destinations with any strides that reach each element once. They share no
                memory, and have the message's number of values.
            segments: as for :meth:`encode`.
            rounding: the argument of :meth:`encode`. Only guaranteed for codecs with the
                :attr:`exchange` ``"all_reduce"``. For others each rank has its own, so a message
                must contain all that decoding needs.

        Raises:
            TypeError, ValueError, RuntimeError: as :meth:`encode`.
        """

    def decode_sum(
        self,
        messages: Tensor,
        tensors: Sequence[Tensor],
        *,
        scale: float = 1.0,
        rounding: Tensor | None = None,
    ) -> None:
        """Write ``scale`` times the sum of several messages' values into tensors.

        Sums the values in float32, in the order of the messages, then scales the sum and rounds it
        to the tensors' dtypes.

        Args:
            messages: shape ``(messages, bytes)``, one segment each.
            tensors: as for :meth:`decode`.
            scale: the sum's factor, applied in float32.
            rounding: as for :meth:`decode`.

        Raises:
            TypeError, ValueError, RuntimeError: as :meth:`encode`.
        """
        numel = sum(tensor.numel() for tensor in tensors)
        total = self._sum_of(messages, numel, rounding)
        if scale != 1.0:
            total.mul_(scale)
        unflatten_into(total, tensors)

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
        """Write one message for each of several consecutive runs of the tensors' values.

        The caller chooses where chunks end, unlike segments. Each chunk has its own message of one
        segment for :meth:`decode` and :meth:`decode_sum`.

        Args:
            tensors: as for :meth:`encode`.
            message: as long as all of :meth:`chunks`. Written.
            sizes: the number of values of each chunk; at least one number. 0 is an empty chunk of
                no bytes. The sum must be the number of the tensors' values.
            scale, error: as for :meth:`encode`.
            rounding: as for :meth:`encode`. Block codecs draw different numbers for each chunk; a
                codec without an operator for chunks draws the same numbers.

        Raises:
            TypeError, ValueError, RuntimeError: as :meth:`encode`.
        """
        counts, nbytes = self._checked_chunks("encode_chunks", sizes, tensors, message)
        if len(tensors) == 1 and tensors[0].layout is torch.strided:
            values = tensors[0].reshape(-1)
        else:
            values = flatten(tensors, dtype=torch.float32)
        errors = [None] * len(counts) if error is None else error.split(counts)
        pieces = zip(values.split(counts), message.split(nbytes), errors, strict=True)
        for own, part, lost in pieces:
            if own.numel():
                self.encode([own], part, scale=scale, error=lost, rounding=rounding)

    def decode_chunks(
        self,
        message: Tensor,
        tensors: Sequence[Tensor],
        sizes: Sequence[int],
        *,
        rounding: Tensor | None = None,
    ) -> None:
        """Write the values of consecutive messages into tensors.

        Args:
            message: the output of :meth:`encode_chunks`, or several ranks' messages.
            tensors: as for :meth:`decode`.
            sizes: as for :meth:`encode_chunks`.
            rounding: as for :meth:`decode`.

        Raises:
            TypeError, ValueError, RuntimeError: as :meth:`encode`.
        """
        counts, nbytes = self._checked_chunks("decode_chunks", sizes, tensors, message)
        values = torch.empty(sum(counts), dtype=torch.float32, device=message.device)
        for own, part in zip(values.split(counts), message.split(nbytes), strict=True):
            if own.numel():
                self.decode(part, [own], rounding=rounding)
        unflatten_into(values, tensors)

    def _checked_chunks(
        self, method: str, sizes: Sequence[int], tensors: Sequence[Tensor], message: Tensor
    ) -> tuple[list[int], list[int]]:
        """The number of values of each chunk, and of the bytes of its message."""
        counts, numel = list(sizes), sum(tensor.numel() for tensor in tensors)
        if not counts or any(count < 0 for count in counts) or sum(counts) != numel:
            raise ValueError(
                f"{self}.{method}: sizes must be numbers of at least 0 that add up to the tensors' "
                f"{numel} values, got {counts}"
            )
        nbytes = [part.nbytes for part in self.chunks(counts)]
        if message.shape != (sum(nbytes),):
            raise ValueError(
                f"{self}.{method}: message must be flat and hold {sum(nbytes)} bytes, got sizes "
                f"{list(message.shape)}"
            )
        return counts, nbytes

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
        """Write the message of ``scale`` times the sum of several messages' values.

        Sums the values in float32, in the order of the messages.

        Args:
            messages: shape ``(messages, bytes)``, each of ``numel`` values in one segment.
            message: as many bytes as one of them. Written.
            numel: the number of values in each.
            scale, error, rounding: as for :meth:`encode`.

        Raises:
            TypeError, ValueError, RuntimeError: as :meth:`encode`.
        """
        total = self._sum_of(messages, numel)
        self.encode([total], message, scale=scale, error=error, rounding=rounding)

    def _sum_of(self, messages: Tensor, numel: int, rounding: Tensor | None = None) -> Tensor:
        total = torch.empty(numel, dtype=torch.float32, device=messages.device)
        if numel == 0:  # the messages may have no bytes
            return total
        self.decode(messages[0], [total], rounding=rounding)
        if len(messages) > 1:
            one = torch.empty_like(total)
            for each in messages[1:]:
                self.decode(each, [one], rounding=rounding)
                total += one
        return total

    def rounds_error_at_random(self, error: Tensor | None) -> bool:
        """Whether :meth:`encode` rounds this error at random, if it gets ``rounding``."""
        return False

    def _drawn_from(self, method: str, rounding: Tensor | None) -> dict[str, Tensor]:
        """The argument ``rounding`` of operators that draw random numbers.

        Raises:
            ValueError: the caller did not give seed and step.
        """
        if not self.is_random:
            return {}
        if rounding is None:
            raise ValueError(f"{self}.{method}: rounding must be given, [seed, step], got None")
        return {"rounding": rounding}

    @with_old_argument
    def nbytes(self, numel: int, segments: int = 1) -> int:
        """Return the number of bytes of a message of ``numel`` values."""
        return sum(segment.nbytes for segment in self.segments(numel, segments))

    def chunks(self, sizes: Sequence[int]) -> list[Segment]:
        """Return the messages that :meth:`encode_chunks` writes, one for each of ``sizes``."""
        return [Segment(size, self.nbytes(size)) for size in sizes]


def error_for(codec: Codec, error: Tensor | None) -> Tensor | None:
    """An error in a dtype that a codec accepts: itself, or a copy for :func:`keep_error`."""
    if error is None or error.dtype in codec.error_dtypes:
        return error
    return error.to(torch.float32)


def keep_error(error: Tensor | None, lost: Tensor | None) -> None:
    """Write a new error into an error memory, if :func:`error_for` returned a copy."""
    if error is not None and lost is not None and lost is not error:
        write_saturated(error, lost)


def write_saturated(error: Tensor, lost: Tensor) -> None:
    """Round values to an error's dtype. The largest finite values stay finite."""
    if lost.dtype == error.dtype:
        error.copy_(lost)
    else:
        limits = torch.finfo(error.dtype)
        error.copy_(lost.clamp(limits.min, limits.max))


#: The codecs by name.
CODECS: dict[str, type[Codec]] = {}

#: Names that codecs must not have: those of hooks, since each codec has a hook of its name.
RESERVED_NAMES: set[str] = set()

#: The arguments of a codec's hook beside the codec's settings.
HOOK_SETTINGS = ("seed", "process_group")

_Class = TypeVar("_Class", bound=type[Codec])


def register_codec(cls: _Class) -> _Class:
    """Register a codec under the name of its class. A class decorator.

    Args:
        cls: a subclass of :class:`Codec`. :mod:`torch_commhook.hooks` then has a hook of its name.

    Returns:
        The class itself.

    Raises:
        TypeError: ``cls`` is no subclass of :class:`Codec`, or does not define all abstract methods
            and properties of its base classes. The error names the missing ones.
        ValueError: another codec or a hook has the name; or a setting has the name of an argument
            of the codec's hook.

    Example:
        >>> codecs.register_codec(dict)
        Traceback (most recent call last):
            ...
        TypeError: register_codec: cls must be a subclass of Codec, got <class 'dict'>
    """
    if not (isinstance(cls, type) and issubclass(cls, Codec)):
        raise TypeError(f"register_codec: cls must be a subclass of Codec, got {cls!r}")
    missing = ", ".join(sorted(cls.__abstractmethods__))
    if missing:
        raise TypeError(
            f"register_codec: {cls.__name__} must define all abstract methods and properties of "
            f"its base classes; missing: {missing}"
        )
    if cls.__name__ in RESERVED_NAMES:
        raise ValueError(f"register_codec: there is a hook named {cls.__name__} already")
    for name in HOOK_SETTINGS:
        if name in inspect.signature(cls).parameters:
            raise ValueError(
                f"register_codec: {cls.__name__} must have no setting named {name}: its hook has "
                "an argument of that name"
            )
    other = CODECS.setdefault(cls.__name__, cls)
    if other is not cls:
        raise ValueError(f"register_codec: there is a codec named {cls.__name__} already, {other}")
    return cls


def text_of(cls: type[Codec], settings: dict[str, Any]) -> str:
    """The text of a codec with settings that are no defaults, such as ``blockwise(bits=4)``."""
    parameters = inspect.signature(cls).parameters
    said = [
        f"{key}={value!r}" for key, value in settings.items() if value != parameters[key].default
    ]
    return f"{cls.__name__}({', '.join(said)})"


# ---- decay of error memory -----------------------------------------------------------------------


#: Elements whose copies stay in a cache of the CPU; the number that other devices take at a time.
_CHUNK = 1 << 16
_DEVICE_CHUNK = 1 << 20

_WORD = (1 << 32) - 1
#: Separates these random numbers from those with which a codec rounds the same element.
_SALT = 0x6D6F6D65


def check_decay(what: str, decay: object) -> None:
    """Refuse a decay that is not a factor in (0, 1].

    Raises:
        TypeError: ``decay`` is not a number.
        ValueError: it is out of range, or NaN.
    """
    if not isinstance(decay, (int, float, torch.SymFloat)) or isinstance(decay, bool):
        raise TypeError(f"{what} must be a number, got {type(decay).__qualname__}")
    if not 0 < decay <= 1:
        raise ValueError(f"{what} must be greater than 0 and at most 1, got {decay}")


def decays_at_random(error: Tensor | None, decay: float) -> bool:
    """Whether :func:`decay_error` rounds this error at random, if it gets ``rounding``."""
    return error is not None and error.dtype == torch.bfloat16 and decay != 1.0


@torch.library.custom_op("commhook::decay_error", mutates_args=("error",))
def decay_error(error: Tensor, decay: float, rounding: Tensor | None = None) -> None:
    """Multiply an error memory by ``decay``, in place.

    Args:
        error: flat, float32 or bfloat16. Multiplied in float32. Written.
        decay: in (0, 1].
        rounding: int64, ``[seed, step]``, on the same device. A bfloat16 error is then rounded at
            random, without bias. Rounded to the nearest, a factor near 1 would change nothing.

    Raises:
        TypeError, ValueError: a tensor is of another kind, or ``decay`` out of range.
    """
    check_flat("decay_error", "error", error, ERROR_DTYPES)
    check_decay("decay_error: decay", decay)
    if rounding is not None:
        check_dense("decay_error", "rounding", rounding, (torch.int64,))
        if rounding.shape != (2,) or rounding.device != error.device:
            raise ValueError(
                "decay_error: rounding must be [seed, step] on the error's device, got sizes "
                f"{list(rounding.shape)} on {rounding.device}"
            )
    if error.dtype == torch.float32 or rounding is None:
        error.mul_(decay)
        return
    key = _key_of(rounding)
    size = _CHUNK if error.device.type == "cpu" else _DEVICE_CHUNK
    for begin in range(0, len(error), size):
        _decay_at_random(error[begin : begin + size], decay, key, begin)


def _decay_at_random(piece: Tensor, decay: float, key: Tensor, begin: int) -> None:
    places = torch.arange(begin, begin + len(piece), dtype=torch.int64, device=piece.device)
    noise = _scrambled((places + key).bitwise_and_(_WORD)).bitwise_right_shift_(16)
    value = piece.to(torch.float32).mul_(decay)
    # The sum reaches the upper half with the probability that the magnitude rounds up.
    bits = (value.view(torch.int32) + noise.to(torch.int32)).bitwise_and_(-(1 << 16))
    piece.copy_(torch.where(value.isfinite(), bits.view(torch.float32), value))


def _key_of(rounding: Tensor) -> Tensor:
    """The 32-bit key of a step's random numbers; an element's place is their other input."""
    seed, step = rounding.unbind()
    key = _scrambled(step.bitwise_and(_WORD).bitwise_xor_(_SALT))
    key = _scrambled((seed >> 32).bitwise_and_(_WORD).bitwise_xor_(key))
    return _scrambled(seed.bitwise_and(_WORD).bitwise_xor_(key))


def _scrambled(bits: Tensor) -> Tensor:
    """As ``scrambled`` in ``csrc/ops/codecs/error_math.h``, for 32 bits each; in place."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits.bitwise_xor_(bits >> shift).mul_(factor).bitwise_and_(_WORD)  # products wrap around
    return bits.bitwise_xor_(bits >> 16)


# ---- seeds of codecs' random numbers -------------------------------------------------------------


def mix_seeds(*numbers: int) -> int:
    """Mix similar numbers into one of 63 bits (splitmix64)."""
    mask = (1 << 64) - 1
    state = 0
    for number in numbers:
        state = (state + (number & mask) + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1

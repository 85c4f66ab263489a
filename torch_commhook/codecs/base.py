"""What all codecs share, and the table of them."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torch_commhook.native.bucket_ops import flatten, unflatten_into


def check_setting(codec: str, name: str, value: object, kind: str) -> None:
    """Refuse a codec's setting that is of another type.

    Args:
        codec: its name.
        name: of the setting.
        value: what was given.
        kind: ``"an int"``, ``"a number"``, ``"a bool"`` or ``"a str"``.

    Raises:
        TypeError: the value is none. A bool is no number.
    """
    types: dict[str, tuple[type, ...]] = {
        "an int": (int,),
        "a number": (int, float),
        "a bool": (bool,),
        "a str": (str,),
    }
    if not isinstance(value, types[kind]) or (isinstance(value, bool) and kind != "a bool"):
        raise TypeError(f"{codec}: {name} must be {kind}, got {value!r}")


class Shard(NamedTuple):
    """A part of a message that can be decoded by itself.

    Attributes:
        numel: values in it.
        nbytes: bytes in it.

    Example:
        >>> codecs.fp8().shards(1024, 2)
        [Shard(numel=512, nbytes=528), Shard(numel=512, nbytes=528)]
    """

    numel: int
    nbytes: int


class Codec(ABC):
    """What gradients become on the wire, and back.

    A message is a flat tensor of bytes. Its length follows from the number of values alone, so that
    all ranks know it. It may be made in shards, each of which is a message of its own; a shard's
    values follow each other in the bucket.

    A codec keeps nothing between calls: what a message has lost, and what random numbers follow
    from, are the caller's. It prints as it is written, by which ranks compare what they attach: one
    with settings brings a ``__repr__`` that shows them.

    Example:
        >>> codec = codecs.blockwise(bits=8)
        >>> codec.shards(1000, 2)
        [Shard(numel=512, nbytes=528), Shard(numel=488, nbytes=512)]
        >>> message = torch.empty(codec.nbytes(1000), dtype=torch.uint8)
        >>> values, restored = torch.linspace(-1, 1, 1000), torch.empty(1000)
        >>> codec.encode([values], message)
        >>> codec.decode(message, [restored])
        >>> message.numel(), bool((restored - values).abs().max() < 0.005)
        (1024, True)
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    #: How ranks add up what they encode (:func:`torch_commhook.collectives.compressed_all_reduce`):
    #: ``"all_to_all"``: in shards, with :meth:`reduce`; ``"all_gather"``: each rank gets every
    #: message, and adds them up with :meth:`decode_sum`; ``"all_reduce"``: messages are float32
    #: numbers that may be added up, if all ranks give the same ``rounding``. The last two need no
    #: shards but one, and no :meth:`reduce`.
    exchange: str = "all_to_all"

    @classmethod
    def examples(cls) -> Sequence[Codec]:
        """The settings that tests and benchmarks try."""
        return [cls()]

    @property
    def is_random(self) -> bool:
        """Whether :meth:`encode` and :meth:`reduce` need random numbers."""
        return False

    @property
    def takes_error(self) -> bool:
        """Whether :meth:`encode` may be given an error."""
        return True

    #: The dtypes of errors that :meth:`encode` and :meth:`reduce` take. Collectives give a codec
    #: that takes float32 alone a copy of a bfloat16 error.
    error_dtypes: Sequence[torch.dtype] = (torch.float32,)

    @abstractmethod
    def shards(self, numel: int, shards: int = 1) -> list[Shard]:
        """The parts of a message of ``numel`` values, in order; some may be empty."""

    @abstractmethod
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
        """Write the message of tensors, whose values come in the order of ``flatten``.

        Args:
            tensors: dense, of dtype float64, float32, float16 or bfloat16, of any shapes and
                strides, on one device.
            message: written, all of it; contiguous, uint8, as long as :meth:`shards` says in
                all, at an address that is a multiple of 4.
            shards: how many.
            scale: factor, applied in float32.
            error: what earlier messages have lost, flat, as many as the values, of one of
                :attr:`error_dtypes`. Added to them, and replaced by what this message loses. It
                stays as it was where that is not finite, or it would never be finite again.
                Computed in float32, and rounded to its dtype.
            rounding: int64, ``[seed, step]`` on the tensors' device, from which random numbers
                follow. Needed where :attr:`is_random`.

        Raises:
            TypeError: a tensor of another dtype or layout.
            ValueError: no tensors, several devices, sizes that do not fit, or memory that is
                shared.
            RuntimeError: a tensor requires grad while gradients are recorded.
        """

    @abstractmethod
    def decode(
        self,
        message: Tensor,
        tensors: Sequence[Tensor],
        *,
        shards: int = 1,
        rounding: Tensor | None = None,
    ) -> None:
        """Write a message's values into tensors.

        Args:
            message: what :meth:`encode` has written, by a codec of the same settings.
            tensors: dense destinations of any strides that reach each element once, with as many
                elements as the message has values, sharing no memory.
            shards: as in :meth:`encode`.
            rounding: what :meth:`encode` was given. Only codecs whose :attr:`exchange` is
                ``"all_reduce"`` are sure to get it: elsewhere each rank has its own, and what
                decoding needs must be in the message.

        Raises:
            TypeError, ValueError, RuntimeError: as in :meth:`encode`.
        """

    def decode_sum(
        self,
        messages: Tensor,
        tensors: Sequence[Tensor],
        *,
        scale: float = 1.0,
        rounding: Tensor | None = None,
    ) -> None:
        """Write ``scale`` times the sum of what several messages hold into tensors.

        The values are added up in float32, in the order of the messages, then scaled, and then
        rounded to the tensors' dtypes.

        Args:
            messages: of shape ``(messages, bytes)``, each in one shard.
            tensors: as in :meth:`decode`.
            scale: factor, applied in float32.
            rounding: as in :meth:`decode`.

        Raises:
            TypeError, ValueError, RuntimeError: as in :meth:`encode`.
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
        """Write a message for each of several runs of the tensors' values, one after another.

        Unlike shards, chunks end where the caller says. Each has a message of its own, in one
        shard, which :meth:`decode` and :meth:`decode_sum` take.

        Args:
            tensors: as in :meth:`encode`.
            message: written; as long as :meth:`chunks` says in all.
            sizes: values of each chunk, at least one number; 0 is an empty chunk, of no bytes. They
                add up to the number of the tensors' values.
            scale, error: as in :meth:`encode`.
            rounding: as in :meth:`encode`. Block codecs draw other numbers for each chunk; a codec
                without an operator for chunks draws the same ones.

        Raises:
            TypeError, ValueError, RuntimeError: as in :meth:`encode`.
        """
        counts = self._checked_sizes("encode_chunks", sizes, tensors)
        nbytes = [part.nbytes for part in self.chunks(counts)]
        self._check_bytes("encode_chunks", message, sum(nbytes))
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
        """Write the values of messages that follow one another into tensors.

        Args:
            message: such as :meth:`encode_chunks` has written, or several ranks' messages.
            tensors: as in :meth:`decode`.
            sizes: as in :meth:`encode_chunks`.
            rounding: as in :meth:`decode`.

        Raises:
            TypeError, ValueError, RuntimeError: as in :meth:`encode`.
        """
        counts = self._checked_sizes("decode_chunks", sizes, tensors)
        nbytes = [part.nbytes for part in self.chunks(counts)]
        self._check_bytes("decode_chunks", message, sum(nbytes))
        values = torch.empty(sum(counts), dtype=torch.float32, device=message.device)
        for own, part in zip(values.split(counts), message.split(nbytes), strict=True):
            if own.numel():
                self.decode(part, [own], rounding=rounding)
        unflatten_into(values, tensors)

    def _checked_sizes(
        self, method: str, sizes: Sequence[int], tensors: Sequence[Tensor]
    ) -> list[int]:
        counts, numel = list(sizes), sum(tensor.numel() for tensor in tensors)
        if not counts or any(count < 0 for count in counts) or sum(counts) != numel:
            raise ValueError(
                f"{self}.{method}: sizes must be numbers of at least 0 that add up to the tensors' "
                f"{numel} values, got {counts}"
            )
        return counts

    def _check_bytes(self, method: str, message: Tensor, nbytes: int) -> None:
        if message.shape != (nbytes,):
            raise ValueError(
                f"{self}.{method}: message must be flat and hold {nbytes} bytes, got sizes "
                f"{list(message.shape)}"
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
        """Write the message of ``scale`` times the sum of what several messages hold.

        The values are added up in float32, in the order of the messages.

        Args:
            messages: of shape ``(messages, bytes)``, each of ``numel`` values in one shard.
            message: written; of as many bytes as one of them.
            numel: values in each.
            scale, error, rounding: as in :meth:`encode`.

        Raises:
            TypeError, ValueError, RuntimeError: as in :meth:`encode`.
        """
        total = self._sum_of(messages, numel)
        self.encode([total], message, scale=scale, error=error, rounding=rounding)

    def _sum_of(self, messages: Tensor, numel: int, rounding: Tensor | None = None) -> Tensor:
        total = torch.empty(numel, dtype=torch.float32, device=messages.device)
        if numel == 0:  # of which the messages may have no bytes to look at
            return total
        self.decode(messages[0], [total], rounding=rounding)
        if len(messages) > 1:
            one = torch.empty_like(total)
            for each in messages[1:]:
                self.decode(each, [one], rounding=rounding)
                total += one
        return total

    def rounds_error_at_random(self, error: Tensor | None) -> bool:
        """Whether :meth:`encode` rounds this error at random, if it is given ``rounding``."""
        return False

    def _given(self, method: str, rounding: Tensor | None) -> Tensor:
        """What random numbers follow from.

        Raises:
            ValueError: it was not given.
        """
        if rounding is None:
            raise ValueError(f"{self}.{method}: rounding must be given, [seed, step], got None")
        return rounding

    def nbytes(self, numel: int, shards: int = 1) -> int:
        """Bytes of a message of ``numel`` values."""
        return sum(shard.nbytes for shard in self.shards(numel, shards))

    def chunks(self, sizes: Sequence[int]) -> list[Shard]:
        """The messages that :meth:`encode_chunks` writes, one for each of ``sizes``, in order."""
        return [Shard(size, self.nbytes(size)) for size in sizes]


def error_for(codec: Codec, error: Tensor | None) -> Tensor | None:
    """An error as a codec takes it: the tensor itself, or a copy for :func:`keep_error`."""
    if error is None or error.dtype in codec.error_dtypes:
        return error
    return error.to(torch.float32)


def keep_error(error: Tensor | None, lost: Tensor | None) -> None:
    """Write what an encoding has lost into an error, if :func:`error_for` gave a copy."""
    if error is not None and lost is not None and lost is not error:
        write_saturated(error, lost)


def write_saturated(error: Tensor, lost: Tensor) -> None:
    """Round values to an error's dtype; the largest finite ones stay finite."""
    if lost.dtype == error.dtype:
        error.copy_(lost)
    else:
        limits = torch.finfo(error.dtype)
        error.copy_(lost.clamp(limits.min, limits.max))


#: The codecs by name.
CODECS: dict[str, type[Codec]] = {}

#: Names that codecs must not have: those of hooks, of which there is one under each codec's name.
RESERVED_NAMES: set[str] = set()

#: What a codec's hook is given beside the codec's settings.
HOOK_SETTINGS = ("seed", "process_group")

_Class = TypeVar("_Class", bound=type[Codec])


def register_codec(cls: _Class) -> _Class:
    """Make a codec known under the name of its class: a decorator.

    Args:
        cls: a subclass of :class:`Codec`. There is then a hook of its name in
            :mod:`torch_commhook.hooks`.

    Returns:
        The class itself.

    Raises:
        TypeError: no subclass of :class:`Codec`.
        ValueError: another one has the name, or a hook; or a setting has that of one of its hook's.

    Example:
        >>> codecs.register_codec(dict)
        Traceback (most recent call last):
            ...
        TypeError: register_codec: cls must be a subclass of Codec, got <class 'dict'>
    """
    if not (isinstance(cls, type) and issubclass(cls, Codec)):
        raise TypeError(f"register_codec: cls must be a subclass of Codec, got {cls!r}")
    if cls.__name__ in RESERVED_NAMES:
        raise ValueError(f"register_codec: there is a hook named {cls.__name__} already")
    for name in HOOK_SETTINGS:
        if name in inspect.signature(cls).parameters:
            raise ValueError(
                f"register_codec: {cls.__name__} must have no setting named {name}, which its hook "
                "has"
            )
    other = CODECS.setdefault(cls.__name__, cls)
    if other is not cls:
        raise ValueError(f"register_codec: there is a codec named {cls.__name__} already, {other}")
    return cls


def text_of(cls: type[Codec], settings: dict[str, Any]) -> str:
    """Such as ``blockwise(bits=4)``: what differs from the defaults."""
    parameters = inspect.signature(cls).parameters
    said = [
        f"{key}={value!r}" for key, value in settings.items() if value != parameters[key].default
    ]
    return f"{cls.__name__}({', '.join(said)})"

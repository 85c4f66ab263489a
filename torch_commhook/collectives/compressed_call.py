"""What collectives of codecs' messages share: arguments, memory, errors, and their base."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.codecs.base import (
    ERROR_DTYPES,
    Codec,
    check_decay,
    decay_error,
    decays_at_random,
    error_for,
    keep_error,
)
from torch_commhook.collectives.futures import (
    StreamNumber,
    Used,
    is_capturing,
    on_side_stream,
    on_wire,
    then_on_side_stream,
)
from torch_commhook.collectives.gloo_groups import exchanges, group_rank
from torch_commhook.collectives.issuing import (
    Place,
    issue_all_gather,
    issue_all_to_all,
    place_in,
)
from torch_commhook.collectives.traced import traced_all_gather, traced_all_to_all
from torch_commhook.metrics import CallMeter, note_collective
from torch_commhook.native.bucket_ops import BUCKET_DTYPES
from torch_commhook.spans import timed

# ---- memory for encoded messages -----------------------------------------------------------------


class MessageBuffers:
    """Memory for messages that is reused from call to call."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self.stream = StreamNumber()  # the stream on which CUDA work uses them

    def get(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A tensor with undefined contents: that of the last call with this name, if it fits."""
        buffer = self._buffers.get(name)
        if (
            buffer is None
            or buffer.shape != torch.Size(shape)
            or buffer.dtype != dtype
            or buffer.device != device
        ):
            with torch.inference_mode(False):  # otherwise no other call could write to it
                buffer = self._buffers[name] = torch.empty(shape, dtype=dtype, device=device)
            _C.prefer_huge_pages(buffer)
        return buffer

    def __reduce__(self) -> tuple[type[MessageBuffers], tuple[()]]:
        return MessageBuffers, ()  # a copy needs no contents


# ---- measures the error of a message, on a sample of its values ----------------------------------
#
# A measurement takes a few passes over the values. On all values it would cost more than the rest
# of a step, in time and in memory. So large messages are measured on some of their values.


#: The sample: all values of a small message, one in so many of a larger one, up to a maximum.
_LEAST, _ONE_IN, _MOST = 1 << 14, 32, 1 << 20
#: Consecutive values in a sample: whole blocks of any codec that has blocks.
_PIECE = 1 << 12


class MessageError:
    """A sample of a message's values, with the error that is added to them, before encoding."""

    def __init__(self, sources: Sequence[Tensor], error: Tensor | None) -> None:
        numel = sum(tensor.numel() for tensor in sources)
        self._places = _places(numel)
        with torch.no_grad():
            self._values = _values_at(sources, self._places)
            if error is not None:
                self._values += _values_at([error], self._places)

    def note(
        self, meter: CallMeter, codec: Codec, error: Tensor | None, rounding: Tensor | None
    ) -> None:
        """Record the message's error.

        Args:
            codec, rounding: encoded the message.
            error: the message's error, if it is remembered. Otherwise the sample is encoded by
                itself: a codec that chooses among all values then chooses among these.
        """
        values = self._values
        with torch.no_grad():
            if error is not None:
                lost = _values_at([error], self._places)
            else:
                message = torch.empty(
                    codec.nbytes(values.numel()), dtype=torch.uint8, device=values.device
                )
                lost = torch.empty_like(values)
                codec.encode([values], message, rounding=rounding)
                codec.decode(message, [lost], rounding=rounding)
                torch.sub(values, lost, out=lost)
            norms = [torch.linalg.vector_norm(v, dtype=torch.float64) for v in (lost, values)]
            meter.note_squares(norms[0].square(), norms[1].square())


def _places(numel: int) -> list[tuple[int, int]]:
    """The positions of the sample's values: pieces, each by begin and end."""
    if numel <= _LEAST:
        return [(0, numel)]
    pieces = min(max(numel // _ONE_IN, _LEAST), _MOST) // _PIECE
    between = numel // pieces // _PIECE * _PIECE
    return [(i * between, i * between + _PIECE) for i in range(pieces)]


def _values_at(tensors: Sequence[Tensor], places: Sequence[tuple[int, int]]) -> Tensor:
    """Values of tensors at ascending pieces, in the order of ``flatten``, as float32."""
    found: list[Tensor] = []
    waiting = list(reversed(places))
    begin = 0
    for tensor in tensors:
        end = begin + tensor.numel()
        flat: Tensor | None = None
        while waiting and waiting[-1][0] < end:
            first, last = waiting.pop()
            if flat is None:
                flat = tensor.reshape(-1)
            found.append(flat[first - begin : min(last, end) - begin])
            if last > end:
                waiting.append((end, last))
        begin = end
    if not found:
        return tensors[0].new_empty(0, dtype=torch.float32)
    return torch.cat([piece.to(torch.float32) for piece in found])


# ---- the arguments of compressed sums, and their checks ------------------------------------------


_LARGEST_FLOAT = int(sys.float_info.max)


class SumArguments(NamedTuple):
    """Arguments of ``compressed_all_reduce``, which describes them."""

    codec: Codec
    scale: float
    error: Tensor | None
    sum_error: Tensor | None
    rounding: Tensor | None
    buffers: MessageBuffers | None
    meter: CallMeter | None
    timeout: timedelta | None = None
    error_decay: float = 1.0
    #: Of the stages, if they were taken before.
    places: tuple[Place | None, Place | None] = (None, None)


def check_arguments(
    op: str,
    arguments: SumArguments,
    numel: int,
    device: torch.device,
    group: dist.ProcessGroup,
    *,
    encodes_once: bool = False,
) -> None:
    """Refuse arguments that would fail in a later stage, when other ranks are already waiting.

    Args:
        op: the function's name in errors.
        numel: the number of elements of ``error``.
        device: the tensors' device.
        encodes_once: whether no sum is encoded: ``rounding`` is then one pair of seed and step.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    _check_settings(op, arguments)
    check_decay(f"{op}: error_decay", arguments.error_decay)
    for name, tensor in (("error", arguments.error), ("sum_error", arguments.sum_error)):
        if tensor is not None:
            _check_dtype(op, name, tensor, *ERROR_DTYPES)
            _check_error(op, name, tensor, device)
    codec, rounding = arguments.codec, arguments.rounding
    if rounding is not None:
        _check_dtype(op, "rounding", rounding, torch.int64)
    shape, content = ((2,), "seed and step") if encodes_once else ((2, 2), "rows of seed and step")
    draws = codec.is_random or (
        rounding is not None
        and (
            codec.rounds_error_at_random(arguments.error)
            or decays_at_random(arguments.error, arguments.error_decay)
        )
    )
    if draws and (rounding is None or rounding.shape != shape):
        raise ValueError(
            f"{op}: rounding must be of shape {shape} for {codec}, {content}, got "
            f"{None if rounding is None else list(rounding.shape)}"
        )
    if torch.compiler.is_dynamo_compiling():  # sizes may be dynamic
        return
    error, sum_error = arguments.error, arguments.sum_error
    if error is not None and error.shape != (numel,):
        raise ValueError(
            f"{op}: error must be flat and hold {numel} elements, got sizes {list(error.shape)}"
        )
    if sum_error is not None and codec.exchange == "all_to_all":
        begin, end = segment_range(codec, numel, rank=group_rank(group), world_size=group.size())
        if sum_error.shape != (end - begin,):
            raise ValueError(
                f"{op}: sum_error must be flat and hold {end - begin} elements, got sizes "
                f"{list(sum_error.shape)}"
            )


def _check_settings(op: str, arguments: SumArguments) -> None:
    codec, scale = arguments.codec, arguments.scale
    if not isinstance(codec, Codec):
        raise TypeError(f"{op}: codec must be a Codec, got {type(codec).__qualname__}")
    numbers = (int, float, torch.SymInt, torch.SymFloat)
    if not isinstance(scale, numbers) or isinstance(scale, bool):
        raise TypeError(f"{op}: scale must be a number, got {type(scale).__qualname__}")
    if isinstance(scale, int) and not -_LARGEST_FLOAT <= scale <= _LARGEST_FLOAT:
        got = f"an int of {scale.bit_length()} bits"
        raise ValueError(f"{op}: scale must be a number that a float can hold, got {got}")
    for name, value, kind in (
        ("buffers", arguments.buffers, MessageBuffers),
        ("meter", arguments.meter, CallMeter),
        ("timeout", arguments.timeout, timedelta),
    ):
        if value is not None and not isinstance(value, kind):
            raise TypeError(
                f"{op}: {name} must be a {kind.__name__} or None, got {type(value).__qualname__}"
            )


def _check_dtype(op: str, name: str, tensor: object, *dtypes: torch.dtype) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__qualname__}")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(map(str, dtypes))
        raise TypeError(f"{op}: {name} must be of dtype {allowed}, got {tensor.dtype}")


def _check_error(op: str, name: str, error: Tensor, device: torch.device) -> None:
    if error.device != device:
        raise ValueError(
            f"{op}: {name} must be on the tensors' device, {device}, got {error.device}"
        )
    if error.layout is not torch.strided or error.dim() != 1:
        raise ValueError(f"{op}: {name} must be dense and flat, got sizes {list(error.shape)}")
    if not error.is_contiguous():
        raise ValueError(f"{op}: {name} must be contiguous, got strides {list(error.stride())}")


def checked_sizes(what: str, given: Sequence[int], world_size: int, contract: str) -> list[int]:
    """Numbers, one for each rank, checked.

    Args:
        what: the function and its argument.
        contract: what the numbers must be, such as ``"numbers of rows"``.

    Raises:
        TypeError: they are no list of ints.
        ValueError: there is not one for each rank, or one is negative.
    """
    if not isinstance(given, Sequence) or any(
        not isinstance(size, int) or isinstance(size, bool) for size in given
    ):
        raise TypeError(f"{what} must be a list of ints, got {given!r}")
    sizes = list(given)
    if len(sizes) != world_size or any(size < 0 for size in sizes):
        raise ValueError(f"{what} must be {world_size} {contract}, one for each rank, got {sizes}")
    return sizes


def segment_range(codec: Codec, numel: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """The elements ``[begin, end)`` whose sum a rank encodes in :func:`compressed_all_reduce`."""
    if codec.exchange != "all_to_all":
        return 0, 0
    counts = [segment.numel for segment in codec.segments(numel, world_size)]
    begin = sum(counts[:rank])
    return begin, begin + counts[rank]


def listed_tensors(op: str, name: str, tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """A tensor or several that codecs support, as a list.

    Raises:
        ValueError: there are none, or they are on several devices.
        TypeError: a value is not a tensor, or has another dtype.
    """
    if not isinstance(tensors, (Tensor, Iterable)):
        raise TypeError(
            f"{op}: {name} must be a tensor or a list of tensors, got {type(tensors).__qualname__}"
        )
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not found:
        raise ValueError(f"{op}: {name} must hold at least one tensor, got none")
    for i, tensor in enumerate(found):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name}[{i}] must be a tensor, got {type(tensor).__qualname__}")
        if tensor.dtype not in BUCKET_DTYPES:
            raise TypeError(
                f"{op}: {name}[{i}] must be of dtype float64, float32, float16 or "
                f"bfloat16, got {tensor.dtype}"
            )
        if tensor.device != found[0].device:
            raise ValueError(
                f"{op}: {name}[{i}] must be on the device of {name}[0], {found[0].device}, got "
                f"{tensor.device}"
            )
    return found


def destinations_for(
    op: str,
    out: Tensor | Sequence[Tensor] | None,
    sources: Sequence[Tensor],
    numel: int,
    as_many_as: str = "tensors",
) -> list[Tensor]:
    """The tensors of ``out``, or a new flat one of the first source's dtype.

    Raises:
        TypeError, ValueError: as :func:`listed_tensors`; or they do not hold ``numel`` elements.
    """
    if out is None:
        return [sources[0].new_empty(numel)]
    destinations = listed_tensors(op, "out", out)
    room = sum(tensor.numel() for tensor in destinations)
    if room != numel:
        raise ValueError(
            f"{op}: out must hold {numel} elements, as many as {as_many_as}, got {room}"
        )
    return destinations


# ---- the base of collectives of codecs' messages -------------------------------------------------


class CompressedCall:
    """One running collective of messages.

    It does not reference the group: a Gloo thread may release a callback last. If a group were
    destroyed with it, that thread would wait for its own end.
    """

    def __init__(
        self, arguments: SumArguments, destinations: list[Tensor], group: dist.ProcessGroup
    ) -> None:
        self.codec = arguments.codec
        #: What the messages are, for ranks to compare.
        self.form = type(arguments.codec).__name__
        self.destinations = destinations
        self.device = destinations[0].device
        self.buffers = MessageBuffers() if arguments.buffers is None else arguments.buffers
        self.meter = arguments.meter
        self.timeout = arguments.timeout
        self.error_decay = arguments.error_decay
        self.places = arguments.places
        self.world_size: int = group.size()
        self.rank: int = group_rank(group)
        # Read once: later stages run in other threads, which cannot tell whether a compiler traces.
        self.is_traced = torch.compiler.is_dynamo_compiling()
        if self.is_traced or is_capturing(self.device):  # replays would measure in each step
            self.meter = None
        self._is_inference = not self.is_traced and torch.is_inference_mode_enabled()

    def on_side_stream(self, used: Used) -> AbstractContextManager[None]:
        """The context of the work that the caller does: on CUDA, one of the library's streams."""
        if self.is_traced:
            return nullcontext()
        return on_side_stream(self.device, self.buffers.stream, used)

    @contextmanager
    def later_stage(self, name: str) -> Iterator[None]:
        """The context of work after a collective, on any thread; the meter counts it under a name.

        Tensors made in ``torch.inference_mode()`` can be written only in that mode.
        """
        mode = torch.inference_mode() if self._is_inference else torch.no_grad()
        with mode, timed(self.meter, name):
            yield

    def encode(
        self,
        sources: list[Tensor],
        error: Tensor | None,
        rounding: Tensor | None,
        encode_with: Callable[..., None],
    ) -> None:
        """Encode this rank's values, measure the message's error if it is due, and decay it.

        Args:
            sources, error, rounding: as for ``Codec.encode``.
            encode_with: the codec's method, of these.
        """
        measured = None
        if self.meter is not None and self.meter.is_due():
            measured = MessageError(sources, error)
        with timed(self.meter, "encode"):
            lost = error_for(self.codec, error)
            encode_with(sources, error=lost, rounding=rounding)
            keep_error(error, lost)
        if self.meter is not None and measured is not None:
            measured.note(self.meter, self.codec, error, rounding)
        if error is not None and self.error_decay != 1.0:
            with timed(self.meter, "encode"):
                decay_error(error, self.error_decay, rounding)

    def then_decode(
        self, first: torch.futures.Future[Tensor], decode: Callable[[Tensor], None]
    ) -> torch.futures.Future[Tensor]:
        """Let ``decode`` write a collective's messages to the destinations.

        Returns:
            A Future of the first destination.
        """

        def finish(done: torch.futures.Future[Tensor]) -> Tensor:
            received = done.value()
            with self.later_stage("decode"):
                decode(received)
            return self.destinations[0]

        return then_on_side_stream(on_wire(first, self.meter, self.device), finish, self.device)

    def buffer(self, name: str, *shape: int) -> Tensor:
        if self.is_traced:  # the compiler plans memory itself
            return torch.empty(shape, dtype=torch.uint8, device=self.device)
        return self.buffers.get(name, shape, torch.uint8, self.device)

    def is_exchanged(self, group: dist.ProcessGroup) -> bool:
        """Whether messages have their own lengths, without padding."""
        return self.timeout is None and exchanges(group, self.device)

    def issue_all_to_all(
        self, message: Tensor, sizes: Sequence[int], group: dist.ProcessGroup
    ) -> torch.futures.Future[Tensor]:
        """Send each rank its part of a message, and receive this rank's parts of all.

        Args:
            message: flat bytes.
            sizes: the size of each part in bytes, the same on all ranks.

        Returns:
            A Future of the parts, flat, each of ``sizes[self.rank]`` bytes.
        """
        own = [sizes[self.rank]] * self.world_size
        note_collective(sum(sizes) - own[0], sum(own) - own[0])
        if self.is_traced:
            return traced_all_to_all(message, sizes, own, group, self.form)
        out = self.buffer("segments", sum(own))
        if self.is_exchanged(group):
            place = self.places[0] or place_in(group)
            place.form = self.form
            return place.exchange(0, message.split(list(sizes)), out.split(own), out)
        return issue_all_to_all(message, sizes, own, out, group, self.timeout)

    def gathered_bytes(self, sizes: Sequence[int], group: dist.ProcessGroup) -> tuple[int, int]:
        """Bytes that this rank sends and receives in :meth:`issue_gather`."""
        others = self.world_size - 1
        if self.is_exchanged(group):
            return sizes[self.rank] * others, sum(sizes) - sizes[self.rank]
        return max(sizes) * others, max(sizes) * others

    def issue_gather(
        self,
        name: str,
        message: Tensor,
        sizes: Sequence[int],
        group: dist.ProcessGroup,
        *,
        is_second: bool = False,
        place: Place | None = None,
    ) -> torch.futures.Future[Tensor]:
        """Send every rank all messages, on any thread. Does not count the bytes.

        Args:
            name: the name of their buffer.
            message: flat bytes, as long as the longest message.
            sizes: the sizes of the messages in bytes, the same on all ranks.
            is_second: whether this is a second stage; used while a compiler traces.
            place: its place; None for the next one, if it needs one.

        Returns:
            A Future of the messages for :meth:`without_padding`: one after another, flat, or of
            shape ``(ranks, longest)``.
        """
        is_exchanged = self.is_exchanged(group)
        if self.is_traced:
            exact = list(sizes) if is_exchanged else None
            return traced_all_gather(
                message, group, sizes=exact, is_second=is_second, form=self.form
            )
        if is_exchanged:
            gathered = self.buffer(name, sum(sizes))
            place = place or place_in(group)
            place.form = self.form
            own = message[: sizes[self.rank]]
            return place.gather(own, gathered.split(list(sizes)), gathered)
        result = self.buffer(name, self.world_size, len(message))
        return issue_all_gather(message, result, group, self.timeout)

    def expect_gather(
        self, name: str, sizes: Sequence[int], place: Place, group: dist.ProcessGroup
    ) -> None:
        """Request the messages that :meth:`issue_gather` will write to the named buffer."""
        if self.is_exchanged(group):
            place.form = self.form
            place.expect_gather(self.buffer(name, sum(sizes)).split(list(sizes)))

    def without_padding(self, name: str, messages: Tensor, sizes: Sequence[int]) -> Tensor:
        """Messages of these sizes in bytes, one after another: flat bytes, ``sum(sizes)`` of them.

        ``messages`` have shape ``(messages, bytes)``, and are copied to the named buffer if one is
        padded; or they are flat, and none is padded.
        """
        if messages.dim() == 1 or all(size == messages.shape[1] for size in sizes):
            return messages.view(-1)
        pieces = [message[:size] for message, size in zip(messages, sizes, strict=True)]
        return torch.cat(pieces, out=self.buffer(name, sum(sizes)))

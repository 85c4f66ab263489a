"""CUDA streams on which collectives of several stages run, beside that of the gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from torch_commhook.thread_values import ThreadValue, setting

#: Of each device. One bucket is encoded while another's message is on the wire and the sum of a
#: third is encoded or decoded. With two, a bucket's encoding would wait for the decoding of the
#: bucket before the last, and the wire for both.
_STREAMS = 3

#: The kinds of devices that run work on streams.
_WITH_STREAMS = frozenset({"cuda"})

#: Tensors that a call uses: each one, or several together, which nobody looks at one by one.
Used = Sequence[Tensor | Sequence[Tensor] | None]

_numbers = itertools.count()
_of_device: dict[tuple[int, int], torch.cuda.Stream] = {}
_used: ThreadValue[UsedTensors] = ThreadValue()


def has_streams(device: torch.device) -> bool:
    """Whether a device runs work later than the host issues it, on streams."""
    return device.type in _WITH_STREAMS


def is_capturing(device: torch.device) -> bool:
    """Whether work for a device goes into a CUDA graph at the moment, instead of running."""
    return has_streams(device) and torch.cuda.is_current_stream_capturing()


class StreamNumber:
    """One of a device's streams, given out in turn when it is first asked for."""

    def __init__(self) -> None:
        self._number: int | None = None

    def get(self) -> int:
        if self._number is None:
            self._number = next(_numbers) % _STREAMS
        return self._number


def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    index = torch.cuda.current_device() if device.index is None else device.index
    key = index, number
    if key not in _of_device:
        # Above others: what it has is short, and links are idle until it is done.
        _of_device[key] = torch.cuda.Stream(index, priority=-1)
    return _of_device[key]


class _Use(NamedTuple):
    device: torch.device
    owner: torch.cuda.Stream  # to which the memory belongs
    user: torch.cuda.Stream
    tensors: Used

    def record(self) -> None:
        """Let the allocator keep the memory from others until the stream is done with it."""
        flat: list[Tensor] = []
        for one in self.tensors:
            if one is not None:
                flat.extend([one] if isinstance(one, Tensor) else one)
        # Gradients may be views of one bucket.
        for tensor in {tensor.untyped_storage().data_ptr(): tensor for tensor in flat}.values():
            if has_streams(tensor.device):
                tensor.record_stream(self.user)


class UsedTensors:
    """Tensors that streams of the library still use, until somebody has waited for the result.

    A reference keeps a tensor's memory from others. That costs nothing for each tensor, and the
    memory is free as soon as the result has been waited for. Where nobody waits, as after an error,
    or another stream does, the allocator is told of the use instead.
    """

    __slots__ = ("_uses",)

    def __init__(self) -> None:
        self._uses: list[_Use] = []

    def add(self, use: _Use) -> None:
        """Keep what a stream uses."""
        self._uses.append(use)

    def waited_for(self) -> None:
        """Let go of the tensors: the current stream now waits for all that uses them."""
        uses, self._uses = self._uses, []
        for use in uses:
            if torch.cuda.current_stream(use.device) != use.owner:
                use.record()  # the owner waits for nothing

    def __len__(self) -> int:
        return len(self._uses)

    def __del__(self) -> None:
        for use in self._uses:
            use.record()


def keeping(used: UsedTensors) -> setting[UsedTensors]:
    """Let ``used`` keep what :func:`beside` uses on this thread inside."""
    return setting(_used, used)


@contextmanager
def beside(device: torch.device, number: StreamNumber, tensors: Used) -> Iterator[None]:
    """Let CUDA work inside run on a stream of its own, after what the current one has to do so far.

    Nothing of it is waited for: whoever uses its results waits for a Future that is completed
    inside. On other devices nothing changes.

    Args:
        device: of the tensors.
        number: of the stream.
        tensors: that are used inside, and belong to the current stream. Their memory is kept from
            others until that use has ended: by references where :func:`keeping` has somebody who
            says when, or else by the allocator.
    """
    if not has_streams(device):
        yield
        return
    stream = _stream(device, number.get())
    current = torch.cuda.current_stream(device)
    if stream != current:
        stream.wait_stream(current)
        use = _Use(device, current, stream, tensors)
        keeper = _used.value
        if keeper is None:
            use.record()
        else:
            keeper.add(use)
    with torch.cuda.stream(stream):
        yield


def current_place(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A function whose contexts bring back the stream that is current now, on any thread."""
    if not has_streams(device):
        return nullcontext
    stream = torch.cuda.current_stream(device)
    return lambda: torch.cuda.stream(stream)

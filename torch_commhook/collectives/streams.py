"""CUDA streams for collectives of several stages, beside the gradients' stream."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from torch_commhook.thread_values import ThreadValue, setting

#: For each device. While one bucket is encoded, another's message is on the wire, and the sum of a
#: third is encoded or decoded. With two streams, a bucket's encoding would wait for the decoding of
#: the bucket before the last, and the wire for both.
_STREAMS = 3

#: The kinds of devices with streams.
_WITH_STREAMS = frozenset({"cuda"})

#: Tensors that a call uses: single tensors, or groups of them that are handled together.
Used = Sequence[Tensor | Sequence[Tensor] | None]

_numbers = itertools.count()
_of_device: dict[tuple[int, int], torch.cuda.Stream] = {}
_used: ThreadValue[UsedTensors] = ThreadValue()


def has_streams(device: torch.device) -> bool:
    """Whether a device runs work asynchronously, on streams."""
    return device.type in _WITH_STREAMS


def is_capturing(device: torch.device) -> bool:
    """Whether work for a device is being captured into a CUDA graph instead of running."""
    return has_streams(device) and torch.cuda.is_current_stream_capturing()


class StreamNumber:
    """The number of one of a device's streams, assigned in turn on first use."""

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
        # With priority: its work is short, and links are idle until it is done.
        _of_device[key] = torch.cuda.Stream(index, priority=-1)
    return _of_device[key]


class _Use(NamedTuple):
    device: torch.device
    owner: torch.cuda.Stream  # the stream that owns the memory
    user: torch.cuda.Stream
    tensors: Used

    def record(self) -> None:
        """Tell the allocator not to reuse the memory until the stream is done with it."""
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

    A reference protects a tensor's memory. It costs nothing per tensor, and the memory is free as
    soon as somebody has waited for the result. If nobody waits, as after an error, or another
    stream does, the allocator is told instead.
    """

    __slots__ = ("_uses",)

    def __init__(self) -> None:
        self._uses: list[_Use] = []

    def add(self, use: _Use) -> None:
        """Keep tensors that a stream uses."""
        self._uses.append(use)

    def waited_for(self) -> None:
        """Release the tensors: the current stream now waits for all their uses."""
        uses, self._uses = self._uses, []
        for use in uses:
            if torch.cuda.current_stream(use.device) != use.owner:
                use.record()  # the owner does not wait

    def __len__(self) -> int:
        return len(self._uses)

    def __del__(self) -> None:
        for use in self._uses:
            use.record()


def keeping(used: UsedTensors) -> setting[UsedTensors]:
    """Let ``used`` keep the tensors of :func:`beside` on this thread inside the block."""
    return setting(_used, used)


@contextmanager
def beside(device: torch.device, number: StreamNumber, tensors: Used) -> Iterator[None]:
    """Run the block's CUDA work on another stream, after the present work of the current one.

    Nothing waits for this work: users of its results wait for a Future that is completed inside the
    block. On other devices nothing changes.

    Args:
        device: the tensors' device.
        number: the stream.
        tensors: tensors that the block uses and that belong to the current stream. Their memory is
            protected until then: by references if :func:`keeping` is active, or else by the
            allocator.
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
    """A function whose contexts restore the present current stream, on any thread."""
    if not has_streams(device):
        return nullcontext
    stream = torch.cuda.current_stream(device)
    return lambda: torch.cuda.stream(stream)

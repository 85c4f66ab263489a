"""CUDA streams on which collectives of several stages run, beside that of the gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: Of each device. While one bucket is encoded or decoded, another's message is on the wire.
_STREAMS = 2

_numbers = itertools.count()
_of_device: dict[tuple[int, int], torch.cuda.Stream] = {}


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


@contextmanager
def beside(
    device: torch.device, number: StreamNumber, tensors: Iterable[Tensor | None]
) -> Iterator[None]:
    """Let CUDA work inside run on a stream of its own, after what the current one has to do so far.

    Nothing of it is waited for: whoever uses its results waits for a Future that is completed
    inside. On other devices nothing changes.

    Args:
        device: of the tensors.
        number: of the stream.
        tensors: that are used inside, and belong to the current stream. Their memory is kept from
            others until that use has ended.
    """
    if device.type != "cuda":
        yield
        return
    stream = _stream(device, number.get())
    current = torch.cuda.current_stream(device)
    if stream != current:
        stream.wait_stream(current)
        # Gradients may be views of one bucket.
        memories = {t.untyped_storage().data_ptr(): t for t in tensors if t is not None}
        for tensor in memories.values():
            if tensor.is_cuda:
                tensor.record_stream(stream)
    with torch.cuda.stream(stream):
        yield

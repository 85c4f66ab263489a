"""Memory for encoded messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_commhook.collectives.streams import StreamNumber


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
        return buffer

    def __reduce__(self) -> tuple[type[MessageBuffers], tuple[()]]:
        return MessageBuffers, ()  # a copy needs no contents

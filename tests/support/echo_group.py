"""A group of two ranks on any device; the second sends the same as the first.

It needs one process. Like NCCL, it runs its collectives on a separate stream, after a pause.
Futures are complete at once and name the device. Memory holds NaN until the stream has written it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_commhook.process_group import ProcessGroup


class EchoGroup(ProcessGroup):
    def __init__(self, device: str, pause: Callable[[], None], *, is_late: bool = True) -> None:
        super().__init__(0, 2)
        self._device = torch.device(device)  # the tensors', with its index
        self._stream = torch.Stream(self._device)
        self._pause = pause  # makes the current stream wait for a while
        # Only a wait for the Future gives its values; otherwise the host waits in each collective.
        self._is_late = is_late

    def getBackendName(self) -> str:  # noqa: N802
        return "echo"

    def _run(self, outputs: Any, written: Sequence[Tensor], write: Callable[[], object]) -> Any:
        current = torch.accelerator.current_stream(self._device)
        self._stream.wait_stream(current)
        with self._stream:
            for tensor in written:
                tensor.view(torch.uint8).fill_(0xFF)
            self._pause()
            write()
            future: torch.futures.Future[Any] = torch.futures.Future(devices=[self._device])
            future.set_result(outputs)
        for tensor in written:
            tensor.record_stream(self._stream)
        if not self._is_late:
            torch.accelerator.synchronize(self._device)
        return future

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._run(tensors, [], lambda: None)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        def write() -> None:
            for tensor, value in zip(tensors, own, strict=True):
                tensor.copy_(value).mul_(2)

        own = [tensor.clone() for tensor in tensors]
        return self._run(tensors, tensors, write)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        def write() -> None:
            for each in outputs[0]:
                each.copy_(inputs[0])

        return self._run(outputs, outputs[0], write)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        own = input.clone()  # the input may be a part of the output
        return self._run(output, [output], lambda: output.view(2, -1).copy_(own.view(-1)))

    def alltoall_base(
        self, output: Tensor, input: Tensor, gets: list[int], sends: list[int], opts: Any = None
    ) -> Any:
        own = input[: sends[0] if sends else len(input) // 2]
        return self._run(output, [output], lambda: output.copy_(torch.cat([own, own])))

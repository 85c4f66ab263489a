"""Process groups that count broadcasts, and tensors of all dtypes and strides."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import ProcessGroup, Work
from torch_commhook.process_group import WrapperProcessGroup


class Counting(WrapperProcessGroup):
    """Wraps another group; records its broadcasts, and how many are in flight."""

    def __init__(self, parent: dist.ProcessGroup) -> None:
        super().__init__(parent)
        self.sent: list[tuple[torch.dtype, int]] = []
        self.places: list[int] = []
        self.in_flight = self.most_in_flight = 0

    def change_arguments(self, operation: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        assert operation == "broadcast", operation
        ((tensor,), _) = arguments
        assert tensor.dim() == 1 and tensor.is_contiguous() and not tensor.requires_grad
        self.sent.append((tensor.dtype, tensor.numel()))
        self.places.append(tensor.data_ptr())
        return arguments

    def wrap_work(self, operation: str, arguments: tuple[Any, ...], work: Any) -> Any:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

        def wait() -> bool:
            done = work.wait()
            self.in_flight -= 1
            return done

        return _Work(wait)

    def bytes_sent(self) -> list[int]:
        return [numel * dtype.itemsize for dtype, numel in self.sent]


class _Work(Work):
    def __init__(self, wait: Callable[[], bool]) -> None:
        super().__init__()
        self._wait = wait

    def wait(self, timeout: timedelta) -> bool:
        return self._wait()


class Alone(ProcessGroup):
    """Broadcasts do nothing; those with numbers in `failing` fail: at once, or in wait."""

    def __init__(self, size: int = 1, failing: dict[int, str] | None = None) -> None:
        super().__init__(0, size)
        self.failing = failing or {}
        self.started = self.waited = 0

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        number = self.started
        if self.failing.get(number) == "start":
            raise KeyError(f"broadcast {number}")
        self.started += 1

        def wait() -> bool:
            self.waited += 1
            if self.failing.get(number) == "wait":
                raise KeyError(f"wait {number}")
            return True

        return _Work(wait)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda base: base.view(4, 60),
    "offset": lambda base: base[1:18],
    "transposed": lambda base: base.view(12, 20).t(),
    "channels_last": lambda base: base.view(2, 6, 5, 4).permute(0, 3, 1, 2),
    "permuted": lambda base: base.view(4, 5, 12).permute(2, 0, 1),
    "strided": lambda base: base[::2],
    "columns": lambda base: base.view(12, 20)[:, 3:7],
    "scalar": lambda base: base[7],
    "empty": lambda base: base[:0].view(0, 3),
}
ELEMENTS = 240

DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
    }
    - {torch.quint8},
    key=str,
)


def base_of(dtype: torch.dtype, rank: int) -> Tensor:
    """Random bits, including all kinds of NaN if the dtype has them."""
    generator = torch.Generator().manual_seed(100 * DTYPES.index(dtype) + rank)
    count = 2 if dtype is torch.bool else 256
    shape = (ELEMENTS * dtype.itemsize,)
    return torch.randint(count, shape, dtype=torch.uint8, generator=generator).view(dtype)


def bits(tensor: Tensor) -> Tensor:
    """A tensor's bits as integers, in logical order."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return tensor.view(width).flatten()


def of_layouts(dtypes: Any, rank: int) -> dict[str, Tensor]:
    return {
        f"{dtype} {name}": layout(base_of(dtype, rank))
        for name, layout in LAYOUTS.items()
        for dtype in dtypes
    }


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return [name for name in a if not torch.equal(bits(a[name]), bits(b[name]))]

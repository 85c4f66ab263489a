"""Files that the ranks of a pool map, in place of memory that GPUs share."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.codecs import CODECS, Codec
from torch_commhook.collectives import compressed_all_reduce, symmetric
from torch_commhook.collectives.message_buffers import MessageBuffers

CODEC = CODECS["blockwise"]()


def summed(
    rank: int,
    buffers: MessageBuffers | None = None,
    group: dist.ProcessGroup | None = None,
    codec: Codec = CODEC,
    numel: int = 1000,
) -> Tensor:
    """The compressed sum of values that depend on the rank."""
    x, out = torch.randn(numel, generator=torch.Generator().manual_seed(rank)), torch.zeros(numel)
    compressed_all_reduce(x, codec, out=out, buffers=buffers, group=group).wait()
    return out


class Files:
    """A double of PyTorch's symmetric memory.

    Args:
        rank: this rank.
        folder: for the files.
        fails: the operation that raises an error: "allocate" or "share".
    """

    def __init__(self, rank: int, folder: str, fails: str) -> None:
        self.rank, self.folder, self.fails = rank, folder, fails
        self.numbers = count()
        #: This rank's memories that are still in use.
        self.alive: weakref.WeakSet[_Memory] = weakref.WeakSet()

    def allocate(self, nbytes: int, _device: object, group: dist.ProcessGroup) -> Any:
        if self.fails == "allocate":
            raise MemoryError("there is none left")
        number = next(self.numbers)

        def of_rank(rank: int) -> Tensor:
            path = f"{self.folder}/{number} of rank {rank}"
            return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)

        memory = _Memory(of_rank(self.rank))
        self.alive.add(memory)

        def share() -> tuple[list[Tensor], object]:
            if self.fails == "share":
                raise RuntimeError("the driver shares nothing")
            return [of_rank(rank) for rank in range(group.size())], memory

        return symmetric._Allocation(memory.tensor, share)


class _Memory:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def with_files(
    rank: int, folder: str, *, obstacle: str = "", machine: str = "m", gpu: str = "", **more: str
) -> Iterator[Files]:
    files = Files(rank, folder, more.get("fails", ""))
    place = symmetric._Place(obstacle, machine, gpu or f"gpu {rank}", more.get("torch", "2"))
    with ExitStack() as stack:
        for name, double in [
            ("_may_share", lambda *_: True),
            ("_own_place", lambda _: place),
            ("_missing_link", lambda *_: more.get("link", "")),
            ("_allocate", files.allocate),
        ]:
            stack.enter_context(mock.patch.object(symmetric, name, double))
        yield files

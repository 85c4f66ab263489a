"""Ranks that share memory, as threads or by mapped files; the same sums over a simulated group."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import ProcessGroup
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.codecs.block_codec import BlockCodec
from torch_commhook.collectives import compressed, compressed_all_reduce, symmetric
from torch_commhook.collectives.message_buffers import MessageBuffers
from torch_commhook.collectives.sum_arguments import shard_range
from torch_commhook.collectives.symmetric_memory import SymmetricBuffers
from torch_commhook.testing import run_ranks

BLOCK_CODECS: list[Codec] = [
    example
    for cls in CODECS.values()
    for example in cls.examples()
    if isinstance(example, BlockCodec)
]

#: Around the codecs' blocks, including ranks without a block, and a block that is cut short.
SIZES = (1, 255, 256, 257, 2048, 5003)


class Case:
    """The inputs of each rank for several sums, and their compression."""

    def __init__(self, codec: Codec, ranks: int, numel: int, *, steps: int = 3, seed: int = 0):
        self.codec, self.ranks, self.numel, self.steps = codec, ranks, numel, steps
        draw = random.Random(f"{codec} {ranks} {numel} {seed}")
        generator = torch.Generator().manual_seed(draw.getrandbits(30))
        self.scale = draw.choice([1.0, 1 / ranks])
        self.keeps_errors = draw.random() < 0.7
        self.error_dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])
        cut = draw.randint(0, numel)
        self.values = [
            [
                torch.randn(numel, generator=generator)
                .mul_(10.0 ** draw.randint(-3, 3))
                .split([cut, numel - cut])
                for _ in range(ranks)
            ]
            for _ in range(steps)
        ]

    def of_rank(self, rank: int, device: str = "cpu", **options: Any) -> list[Tensor]:
        """A rank's results of each step, and its memory at the end."""
        codec, numel = self.codec, self.numel
        begin, end = shard_range(codec, numel, rank=rank, world_size=self.ranks)
        error = shard_error = rounding = None
        if self.keeps_errors:
            error = torch.zeros(numel, dtype=self.error_dtype, device=device)
            shard_error = torch.zeros(end - begin, dtype=self.error_dtype, device=device)
        if codec.is_random:
            rounding = torch.tensor([[7 + rank, 1], [90 + rank, 1]], device=device)
        results = []
        for step in range(self.steps):
            out = torch.full((numel,), 5.0, device=device)
            compressed_all_reduce(
                [tensor.to(device) for tensor in self.values[step][rank]],
                codec,
                scale=self.scale,
                out=out,
                error=error,
                shard_error=shard_error,
                rounding=rounding,
                **options,
            ).wait()
            results.append(out)
            if rounding is not None:
                rounding[:, 1] += 1
        kept = [tensor for tensor in (error, shard_error) if tensor is not None]
        return [tensor.cpu() for tensor in (*results, *kept)]

    def over_collectives(self) -> list[list[Tensor]]:
        """For each rank, the result of :meth:`of_rank` with a simulated group's collectives."""
        return run_ranks(self.of_rank, self.ranks)


def shared_memories(ranks: int, nbytes: int, device: str = "cpu") -> list[Tensor]:
    return [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(ranks)]


class SharedRanks:
    """Ranks as threads with shared memory.

    Args:
        ranks: their number.
        message_bytes: bytes of the largest message, and of the largest message of a sum.
        device: the memory's device.
    """

    def __init__(self, ranks: int, message_bytes: int, device: str = "cpu") -> None:
        self.ranks, self.device = ranks, device
        nbytes = SymmetricBuffers.bytes_for(ranks, message_bytes, message_bytes)
        memories = shared_memories(ranks, nbytes, device)
        if device == "cuda":
            torch.cuda.synchronize()
        self.of_rank = [
            SymmetricBuffers(memories, rank, message_bytes, message_bytes) for rank in range(ranks)
        ]

    def run(
        self, function: Callable[..., Any], *, timeout: float = 30, **options: Any
    ) -> list[Any]:
        """Runs ``function(rank, group=, buffers=)`` on every rank, with sums in shared memory."""
        seconds = timedelta(seconds=timeout)

        def shared(buffers: MessageBuffers, _codec: Codec, shards: Any, *_: Any) -> Any:
            memory = buffers.shared  # type: ignore[attr-defined]
            memory.check()
            assert memory.fits([shard.nbytes for shard in shards])
            return memory

        def call(rank: int) -> Any:
            buffers = MessageBuffers()
            buffers.shared = self.of_rank[rank]  # type: ignore[attr-defined]
            buffers.stream._number = 1000 + rank  # a separate stream for each rank
            stream = torch.cuda.stream(torch.cuda.Stream()) if self.device == "cuda" else None
            with stream or nullcontext():
                return function(
                    rank, group=ProcessGroup(rank, self.ranks), buffers=buffers, **options
                )

        with (
            mock.patch.object(compressed, "symmetric_buffers", shared),
            mock.patch.object(compressed, "group_timeout", lambda *_: seconds),
            ThreadPoolExecutor(self.ranks) as pool,
        ):
            return list(pool.map(call, range(self.ranks)))


def warm_up(case: Case, device: str) -> None:
    """Loads the kernels of a sum: one GPU may load none while another rank's barrier waits."""
    if device == "cuda":
        steps, case.steps = case.steps, 1
        alone = SharedRanks(case.ranks, case.codec.nbytes(case.numel, case.ranks), device)
        alone.run(case.of_rank, timeout=1e-3, device=device)
        torch.cuda.synchronize()
        case.steps = steps


def same(one: Tensor, other: Tensor) -> bool:
    """Whether the bits are equal, with NaNs in the same places."""
    assert one.dtype == other.dtype
    integers = torch.int32 if one.element_size() == 4 else torch.int16
    nan = one.isnan() & other.isnan()
    return bool((nan | (one.view(integers) == other.view(integers))).all())


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

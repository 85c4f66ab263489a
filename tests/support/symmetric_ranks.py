"""Ranks that share memory as threads; tests of their sums, for the CPU's kernels and for CUDA's.

A file imports the tests, and has a fixture ``device``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from kernel_device import KernelDevice
from ops_reference import same_bits
from torch import Tensor

from torch_commhook import ProcessGroup
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.codecs.block_codec import BlockCodec
from torch_commhook.collectives import compressed, compressed_all_reduce
from torch_commhook.collectives.compressed_call import MessageBuffers, segment_range
from torch_commhook.collectives.symmetric_memory import (
    SymmetricBuffers,
    control_words,
    symmetric_barrier,
    symmetric_gather,
)
from torch_commhook.testing import run_ranks

BLOCK_CODECS: list[Codec] = [
    example
    for cls in CODECS.values()
    for example in cls.examples()
    if isinstance(example, BlockCodec)
]

of_each_block_codec = pytest.mark.parametrize("codec", BLOCK_CODECS, ids=repr)
CODEC = CODECS["blockwise"]()

#: Around the codecs' blocks, including ranks without a block, and a block that is cut short.
SIZES = (1, 255, 256, 257, 2048, 5003)


class Case:
    """The inputs of each rank for several sums, and their compression."""

    def __init__(self, codec: Codec, ranks: int, numel: int, *, steps: int = 3, seed: int = 0):
        self.codec, self.ranks, self.numel, self.steps = codec, ranks, numel, steps
        draw = random.Random(f"{codec} {ranks} {numel} {seed}")
        generator = torch.Generator().manual_seed(draw.getrandbits(30))
        self.scale = draw.choice([1.0, 1 / ranks])
        self.keeps_errors = draw.random() < 0.7 and codec.takes_error
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
        begin, end = segment_range(codec, numel, rank=rank, world_size=self.ranks)
        error = sum_error = rounding = None
        if self.keeps_errors:
            error = torch.zeros(numel, dtype=self.error_dtype, device=device)
            sum_error = torch.zeros(end - begin, dtype=self.error_dtype, device=device)
        if codec.is_random:
            own = 0 if codec.exchange == "all_reduce" else rank  # these ranks draw alike
            rounding = torch.tensor([[7 + own, 1], [90 + rank, 1]], device=device)
        results = []
        for step in range(self.steps):
            out = torch.full((numel,), 5.0, device=device)
            future = compressed_all_reduce(
                [tensor.to(device) for tensor in self.values[step][rank]],
                codec,
                scale=self.scale,
                out=out,
                error=error,
                sum_error=sum_error,
                rounding=rounding,
                **options,
            )
            # No other tensor may get the memory of what is summed before it has been read.
            torch.full((numel,), torch.nan, device=device)
            future.wait()
            results.append(out)
            if rounding is not None:
                rounding[:, 1] += 1
        kept = [tensor for tensor in (error, sum_error) if tensor is not None]
        return [tensor.cpu() for tensor in (*results, *kept)]

    def over_collectives(self) -> list[list[Tensor]]:
        """For each rank, the result of :meth:`of_rank` with a simulated group's collectives."""
        return run_ranks(self.of_rank, self.ranks)


def shared_memories(ranks: int, nbytes: int, device: str = "cpu") -> list[Tensor]:
    return [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(ranks)]


class SharedRanks:
    """Threads that share memory for messages of so many bytes, and for sums of so many."""

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

        def shared(buffers: MessageBuffers, _codec: Codec, segments: Any, *_: Any) -> Any:
            memory = buffers.shared  # type: ignore[attr-defined]
            memory.check()
            assert memory.fits([segment.nbytes for segment in segments])
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
            mock.patch.object(compressed, "SHARING_DEVICES", ("cpu", "cuda")),
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


def assert_the_bits_of_collectives(case: Case, got: list[list[Tensor]]) -> None:
    for rank, (own, right) in enumerate(zip(got, case.over_collectives(), strict=True)):
        wrong = [i for i, pair in enumerate(zip(own, right, strict=True)) if not same_bits(*pair)]
        assert not wrong, f"{case.numel} values, rank {rank}"


# ---- tests ---------------------------------------------------------------------------------------


@of_each_block_codec
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_bits_of_the_collectives(codec: Codec, ranks: int, device: KernelDevice) -> None:
    if device.name == "cuda" and ranks > 3:
        pytest.skip("a GPU has 32 queues, and streams of one queue wait for each other")
    is_long = device.is_slow or device.name == "cuda"
    for seed, numel in enumerate((1, 257, 2049) if is_long and ranks != 3 else SIZES):
        case = Case(codec, ranks, numel, steps=2 if is_long else 3, seed=seed)
        warm_up(case, device.name)
        shared = SharedRanks(ranks, codec.nbytes(numel, ranks), device.name)
        with device.kernels(random.Random(seed).choice([1, 5, 128])):
            got = shared.run(case.of_rank, device=device.name)
        assert_the_bits_of_collectives(case, got)


@pytest.mark.real_time
def test_a_rank_that_does_not_come(device: KernelDevice) -> None:
    shared = SharedRanks(3, CODEC.nbytes(1000, 3), device.name)

    def fails(rank: int, others: str, **options: Any) -> None:
        """The first sum is NaN; a segment that nobody came for keeps its error. The next raises."""
        begin, end = segment_range(CODEC, 1000, rank=rank, world_size=3)
        sum_error = torch.full((end - begin,), 0.25, device=device.name)
        x, out = (torch.ones(1000, device=device.name) for _ in range(2))
        options["out"] = out
        compressed_all_reduce(x, CODEC, sum_error=sum_error, **options).wait()
        assert out.cpu().isnan().all()
        assert (sum_error == 0.25).all() or rank == 1
        if device.name == "cuda":
            torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match=rf"rank [{others}] of the group did not reach"):
            compressed_all_reduce(x, CODEC, **options)

    def first(rank: int, **options: Any) -> None:
        if rank != 1:
            fails(rank, "012", **options)

    def then(rank: int, **options: Any) -> None:
        if rank == 1:  # learns of it, and waits for nobody
            fails(rank, "02", **options)

    begun = time.monotonic()
    with device.kernels():
        shared.run(first, timeout=0.5)
        shared.run(then, timeout=60)
    assert time.monotonic() - begun < 10 or device.is_slow


def test_a_barrier_that_waits_in_vain(device: KernelDevice) -> None:
    def controls(ranks: int) -> list[Tensor]:
        words = control_words(ranks)
        return [torch.zeros(words, dtype=torch.int64, device=device.name) for _ in range(ranks)]

    def found() -> list[list[int]]:
        return [each.tolist() for each in given]

    with device.kernels():
        given, other, begun = controls(3), [0, ~1, 0, 0, 0], time.monotonic()
        symmetric_barrier(given, 1, timeout=0.05)
        # The CPU names the first rank that it missed, the kernels name the last.
        own = [0, 0, 0, 1, 3 if device.is_slow or device.name == "cuda" else 1]
        assert found() == [other, own, other]
        assert time.monotonic() - begun >= 0.05
        symmetric_barrier(given, 1, timeout=60)  # waits no more
        assert found() == [other, own, other]
        given = controls(2)
        symmetric_barrier(given, 0, timeout=0.05)
        assert found() == [[0, 0, 1, 2], [~1, 0, 0, 0]]
        symmetric_barrier(given, 1, timeout=60)  # to which the other rank came
        assert found()[1] == [~1, 0, 1, 0]
        symmetric_barrier(given, 1, timeout=60)
        assert found()[1] == [~1, 0, 2, 1]


def at_offset(tensor: Tensor, offset: int, device: str) -> Tensor:
    """A copy so many bytes past an address that is a multiple of 16."""
    whole = torch.zeros(len(tensor) + offset, dtype=torch.uint8, device=device)
    whole[offset:] = tensor
    return whole[offset:]


@of_each_block_codec
def test_segments_at_any_addresses(codec: Codec, device: KernelDevice) -> None:
    """Their sum is that of a matrix of messages; where the exchange has failed, it stays."""
    assert isinstance(codec, BlockCodec)
    draw = random.Random(repr(codec))
    generator = torch.Generator().manual_seed(1)
    rounding = torch.tensor([3, 4]) if codec.is_random else None
    for offsets in [(0,), (4, 4, 4), (0, 0, 0, 0), (0, 8, 4), (12,) * 16]:
        numel = draw.choice([1, 256, 1000, 4097])
        messages = [torch.empty(codec.nbytes(numel), dtype=torch.uint8) for _ in offsets]
        for each in messages:
            codec.encode([torch.randn(numel, generator=generator)], each, rounding=rounding)
        error = torch.randn(numel, generator=generator)
        right, right_error = torch.empty_like(messages[0]), error.clone()
        codec.reduce(
            torch.stack(messages), right, numel, scale=0.3, error=right_error, rounding=rounding
        )
        there = [at_offset(m, by, device.name) for m, by in zip(messages, offsets, strict=True)]
        more = {} if rounding is None else {"rounding": rounding.to(device.name)}
        with device.kernels():
            for failed in (None, torch.tensor([0], device=device.name)):
                got = torch.zeros_like(right, device=device.name)
                more["error"] = got_error = error.to(device.name, copy=True)
                codec.reduce_segments(there, got, numel, scale=0.3, failed=failed, **more)
                assert torch.equal(got.cpu(), right), offsets
                assert torch.equal(got_error.cpu(), right_error), offsets
            failed = torch.tensor([1], device=device.name)
            codec.reduce_segments(there[1:] or there, got, numel, failed=failed, **more)
            assert torch.equal(got.cpu(), right)  # which other ranks may still read
            assert torch.equal(got_error.cpu(), right_error)


def test_gathered_segments(device: KernelDevice) -> None:
    for sizes in [(4,), (0, 0), (8, 0, 12), (4096, 40, 16), (20_000,) * 16]:
        segments = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
        there = [at_offset(segment, 4 * (i % 3), device.name) for i, segment in enumerate(segments)]
        message = torch.zeros(sum(sizes), dtype=torch.uint8, device=device.name)
        with device.kernels():
            for failed in (None, torch.tensor([0], device=device.name)):
                message.zero_()
                symmetric_gather(there, message, failed=failed)
                assert torch.equal(message.cpu(), torch.cat(segments)), sizes
            symmetric_gather(there, message, failed=torch.tensor([2], device=device.name))
            assert (message == 255).all()

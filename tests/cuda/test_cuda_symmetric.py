"""The CUDA kernels of sums over shared memory: they give the bits of the collectives on the CPU.

The ranks are threads, on the host or on one GPU. What several GPUs do stands at the end.
"""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from kernel_device import KernelDevice
from symmetric_ranks import BLOCK_CODECS, SIZES, Case, SharedRanks, same, warm_up
from torch import Tensor

from torch_commhook.codecs import CODECS, Codec
from torch_commhook.codecs.block_codec import BlockCodec
from torch_commhook.collectives import compressed_all_reduce
from torch_commhook.collectives.message_buffers import MessageBuffers
from torch_commhook.collectives.symmetric import obstacle_of
from torch_commhook.collectives.symmetric_ops import (
    control_words,
    symmetric_barrier,
    symmetric_gather,
)

of_each_codec = pytest.mark.parametrize("codec", BLOCK_CODECS, ids=repr)
CODEC = CODECS["blockwise"]()


@of_each_codec
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_bits_of_the_collectives(codec: Codec, ranks: int, kernel_device: KernelDevice) -> None:
    if kernel_device.name == "cuda" and ranks > 3:
        pytest.skip("a GPU has 32 queues, and streams of one queue wait for each other")
    for seed, numel in enumerate(SIZES if ranks == 3 else (1, 257, 2049)):
        case = Case(codec, ranks, numel, steps=2, seed=seed)
        right = case.over_collectives()
        warm_up(case, kernel_device.name)
        shared = SharedRanks(ranks, codec.nbytes(numel, ranks), kernel_device.name)
        with kernel_device.kernels(random.Random(seed).choice([1, 5, 128])):
            got = shared.run(case.of_rank, device=kernel_device.name)
        for rank in range(ranks):
            pairs = zip(got[rank], right[rank], strict=True)
            wrong = [i for i, pair in enumerate(pairs) if not same(*pair)]
            assert not wrong, f"{numel} values, rank {rank}"


def test_the_kernels_of_a_sum(kernel_device: KernelDevice) -> None:
    case = Case(CODEC, 2, 5000, steps=1)
    warm_up(case, kernel_device.name)
    shared = SharedRanks(2, CODEC.nbytes(5000, 2), kernel_device.name)
    with kernel_device.kernels():
        names = kernel_device.kernels_of(
            lambda: shared.run(case.of_rank, device=kernel_device.name)
        )
    for kernel, count in [
        ("encode_kernel", 2),
        ("barrier_kernel", 4),
        ("reduce_shards_kernel", 2),
        ("gather_kernel", 2),
        ("decode_kernel", 2),
    ]:
        assert sum(kernel in name for name in names) == count, kernel


def test_a_rank_that_does_not_come(kernel_device: KernelDevice) -> None:
    shared = SharedRanks(3, CODEC.nbytes(1000, 3), kernel_device.name)

    def without_rank_1(rank: int, **options: Any) -> None:
        if rank == 1:
            return
        out = torch.zeros(1000, device=kernel_device.name)
        x = torch.ones(1000, device=kernel_device.name)
        compressed_all_reduce(x, CODEC, out=out, **options).wait()
        assert out.cpu().isnan().all()
        if kernel_device.name == "cuda":
            torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match=r"rank [012] of the group did not reach"):
            compressed_all_reduce(x, CODEC, out=out, **options)

    with kernel_device.kernels():
        shared.run(without_rank_1, timeout=0.5)


def test_a_barrier_that_waits_in_vain(cuda_kernels: None, kernel_device: KernelDevice) -> None:
    controls = [
        torch.zeros(control_words(3), dtype=torch.int64, device=kernel_device.name)
        for _ in range(3)
    ]
    symmetric_barrier(controls, 1, timeout=0.05)
    other = [0, ~1, 0, 0, 0]
    for _ in range(2):
        got = [each.tolist() for each in controls]
        assert got == [other, [0, 0, 0, 1, 3], other]
        symmetric_barrier(controls, 1, timeout=60)  # waits no more


def at_offset(tensor: Tensor, offset: int, device: str) -> Tensor:
    """A copy so many bytes past an address that is a multiple of 16."""
    whole = torch.zeros(len(tensor) + offset, dtype=torch.uint8, device=device)
    whole[offset:] = tensor
    return whole[offset:]


@of_each_codec
def test_shards_at_any_addresses(codec: Codec, kernel_device: KernelDevice) -> None:
    assert isinstance(codec, BlockCodec)
    device = kernel_device.name
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
        there = [at_offset(m, by, device) for m, by in zip(messages, offsets, strict=True)]
        got, got_error = torch.zeros_like(right, device=device), error.to(device, copy=True)
        more: dict[str, Any] = {"error": got_error}
        if rounding is not None:
            more["rounding"] = rounding.to(device)
        with kernel_device.kernels():
            codec.reduce_shards(there, got, numel, scale=0.3, **more)
            assert torch.equal(got.cpu(), right), offsets
            assert torch.equal(got_error.cpu(), right_error), offsets
            failed = torch.tensor([1], device=device)
            codec.reduce_shards(there[1:] or there, got, numel, failed=failed, **more)
            assert torch.equal(got.cpu(), right)  # which other ranks may still read
            assert torch.equal(got_error.cpu(), right_error)


def test_gathered_shards(cuda_kernels: None, kernel_device: KernelDevice) -> None:
    device = kernel_device.name
    for sizes in [(4,), (0, 0), (8, 0, 12), (4096, 40, 16), (20_000,) * 16]:
        shards = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
        there = [at_offset(shard, 4 * (i % 3), device) for i, shard in enumerate(shards)]
        message = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        symmetric_gather(there, message, failed=torch.tensor([0], device=device))
        assert torch.equal(message.cpu(), torch.cat(shards)), sizes
        symmetric_gather(there, message, failed=torch.tensor([2], device=device))
        assert (message == 255).all()


# ---- several GPUs --------------------------------------------------------------------------------


def _on_gpus(rank: int, ranks: int, store: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", rank),
    )
    try:
        for codec in BLOCK_CODECS:
            case = Case(codec, ranks, 100_003)
            got = case.of_rank(rank, "cuda", buffers=MessageBuffers())
            assert obstacle_of(dist.group.WORLD) == ""
            right = case.of_rank(rank, "cuda")  # over NCCL, since it gives no buffers
            assert all(map(same, got, right)), codec
    finally:
        dist.destroy_process_group()


@pytest.mark.cuda
def test_gpus_get_the_bits_of_nccl(tmp_path: Any) -> None:
    gpus = torch.cuda.device_count()
    if gpus < 2:
        pytest.skip(f"needs two GPUs that NVLink joins, found {gpus}")
    mp.spawn(_on_gpus, (gpus, str(tmp_path / "store")), nprocs=gpus)

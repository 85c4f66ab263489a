"""The CUDA kernels of sums over shared memory: they give the bits of the collectives on the CPU.

The ranks are threads, on the host or on one GPU. What several GPUs do stands at the end.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from kernel_device import KernelDevice
from ops_reference import same_bits
from symmetric_ranks import (
    BLOCK_CODECS,
    CODEC,
    Case,
    SharedRanks,
    test_a_barrier_that_waits_in_vain,  # noqa: F401
    test_a_rank_that_does_not_come,  # noqa: F401
    test_gathered_segments,  # noqa: F401
    test_segments_at_any_addresses,  # noqa: F401
    test_the_bits_of_the_collectives,  # noqa: F401
    warm_up,
)

from torch_commhook.collectives.compressed_call import MessageBuffers
from torch_commhook.collectives.symmetric import obstacle_of


@pytest.fixture
def device(kernel_device: KernelDevice) -> KernelDevice:
    return kernel_device


def test_the_kernels_of_a_sum(device: KernelDevice) -> None:
    case = Case(CODEC, 2, 5000, steps=1)
    warm_up(case, device.name)
    shared = SharedRanks(2, CODEC.nbytes(5000, 2), device.name)
    with device.kernels():
        names = device.kernels_of(lambda: shared.run(case.of_rank, device=device.name))
    counts = {"encode": 2, "barrier": 4, "reduce_shards": 2, "gather": 2, "decode": 2}
    for kernel, count in counts.items():
        assert sum(f"{kernel}_kernel" in name for name in names) == count, kernel


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
            assert all(map(same_bits, got, right)), codec
    finally:
        dist.destroy_process_group()


@pytest.mark.cuda
def test_gpus_get_the_bits_of_nccl(tmp_path: Any) -> None:
    gpus = torch.cuda.device_count()
    if gpus < 2:
        pytest.skip(f"needs two GPUs that NVLink joins, found {gpus}")
    mp.spawn(_on_gpus, (gpus, str(tmp_path / "store")), nprocs=gpus)

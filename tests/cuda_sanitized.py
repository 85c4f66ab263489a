"""Calls every CUDA kernel on small tensors, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python tests/cuda_sanitized.py

Compares with the CPU, so that a run whose kernels do nothing fails. ``make gpu`` runs it.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # compute-sanitizer may change it

from test_codecs import EXAMPLES, everything, same, some_tensors
from test_cuda_bucket import on_device

import torch_commhook._ops as ops
from torch_commhook._check_ops import check_finite

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: Some more than one table of a kernel's arguments holds, and some of them empty.
LISTS = ([0, 1, 31, 4097, 70_001], [i % 7 for i in range(250)], [9] * 1900)
ROUNDS = 3


def check_buckets() -> None:
    """Flatten, statistics, back, and the check, between all dtypes, at odd offsets."""
    for lengths in LISTS:
        for dtype in DTYPES:
            tensors = [torch.randn(length).to(dtype) for length in lengths]
            memory = torch.zeros(sum(lengths) + len(lengths), dtype=dtype).cuda()
            copies, at = [], 0
            for tensor in tensors:  # at all alignments
                copies.append(memory[at : at + len(tensor)].copy_(tensor))
                at += len(tensor) + 1
            for target in DTYPES:
                want = ops.flatten(tensors, scale=0.5, dtype=target)
                got = ops.flatten(copies, scale=0.5, dtype=target)
                assert torch.equal(got.cpu(), want)
                stats = ops.flatten_stats(copies, scale=0.5, dtype=target)
                assert torch.equal(stats.buffer.cpu(), want)
                back = [torch.zeros_like(copy) for copy in copies]
                ops.unflatten_into(got, back, scale=2.0)
                right = [torch.zeros_like(tensor) for tensor in tensors]
                ops.unflatten_into(want, right, scale=2.0)
                assert all(torch.equal(a.cpu(), b) for a, b in zip(back, right, strict=True))
            bad = torch.zeros(1, dtype=torch.int64).cuda()
            copies[-1][-1:] = float("inf")
            check_finite(copies, bad)
            assert bad.item() == 1


def check_codecs() -> None:
    """What every codec writes, on tensors of all kinds."""
    rng = random.Random(0)
    for codec in EXAMPLES:
        for shards in range(1, ROUNDS + 1):
            tensors = [*some_tensors(rng), torch.randn(3001)]
            error = torch.randn(sum(tensor.numel() for tensor in tensors)) * 1e-3
            right = everything(codec, tensors, shards, 0.5, error)
            got = everything(codec, on_device(tensors), shards, 0.5, error.cuda())
            assert all(same(a.cpu(), b) for a, b in zip(got, right, strict=True)), codec


def main() -> int:
    if not torch.ops.commhook.has_cuda_kernels():
        print("this build has no CUDA kernels")
        return 1
    torch.manual_seed(0)
    check_buckets()
    check_codecs()
    torch.cuda.synchronize()
    print("the same as on the CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())

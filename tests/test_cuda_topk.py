"""What topk sends from CUDA, played on the host: the entries that the CPU sends."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from host_library import compile_host_library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_host_library("cuda_topk.cpp", tmp_path_factory.mktemp("cuda_topk"))


@pytest.mark.parametrize("seed", range(100))
def test_the_entries_of_the_cpu(library: ctypes.CDLL, seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    numel = draw.choice([1, 2, 100, 1000, 5000])
    p = torch.randn(numel) * 10.0 ** draw.randint(-44, 30)
    if draw.random() < 0.3:  # many of one magnitude
        p = p.sign() * draw.choice([0.0, 1.0, 2.0**-149])
    if draw.random() < 0.3:
        places = torch.randint(numel, (draw.randint(1, 50),))
        p[places] = draw.choice([torch.nan, torch.inf, -torch.inf, 0.0])
    count = draw.choice([1, numel, max(1, numel // 10), draw.randint(1, numel)])
    message = torch.empty(8 * count, dtype=torch.uint8)
    torch.ops.commhook.topk_encode([p], message)
    indices, values = torch.full((count,), -1, dtype=torch.int32), torch.zeros(count)
    library.select_entries(
        ctypes.c_void_p(p.data_ptr()),
        ctypes.c_int64(numel),
        ctypes.c_int64(count),
        ctypes.c_int64(draw.choice([1, 7, 256, 4096])),
        ctypes.c_void_p(indices.data_ptr()),
        ctypes.c_void_p(values.data_ptr()),
    )
    assert torch.equal(indices, message[: 4 * count].view(torch.int32))
    assert torch.equal(values.view(torch.int32), message[4 * count :].view(torch.int32))

"""Codecs on CUDA: the bits of the CPU, on a GPU and with the same kernels on the host; streams and
graphs, and that nothing waits for the device.

Random settings of the codecs of blocks are tried in test_cuda_blocks.py, what topk sends in
test_cuda_topk.py.
"""

from __future__ import annotations

import random

import pytest
import torch
from codec_examples import everything, of_each_codec, rounding_for, same, some_tensors
from kernel_device import DEVICE, KernelDevice, no_waiting_on_gpu
from torch import Tensor

from torch_commhook.codecs import CODECS, Codec


def assert_the_bits_of_the_cpu(
    device: KernelDevice,
    codec: Codec,
    tensors: list[Tensor],
    shards: int,
    scale: float,
    error: Tensor | None,
    warps: int = 128,
) -> None:
    right = everything(codec, tensors, shards, scale, error)
    with device.kernels(warps):
        device_error = None if error is None else device.copy([error])[0]
        got = everything(codec, device.copy(tensors), shards, scale, device_error)
    assert all(same(a.cpu(), b) for a, b in zip(got, right, strict=True)), (shards, scale)


@of_each_codec
def test_the_bits_of_the_cpu(codec: Codec, kernel_device: KernelDevice) -> None:
    rng = random.Random(1)
    torch.manual_seed(1)
    for _ in range(50):
        tensors = some_tensors(rng)
        numel = sum(tensor.numel() for tensor in tensors)
        shards, scale = rng.choice([1, 2, 3, 8]), rng.choice([1.0, 0.5, 1 / 3])
        error = torch.randn(numel) * 1e-3 if rng.random() < 0.7 else None
        if error is not None and rng.random() < 0.5:
            error = error.bfloat16()
        warps = rng.choice([1, 5, 128])
        assert_the_bits_of_the_cpu(kernel_device, codec, tensors, shards, scale, error, warps)


@of_each_codec
@pytest.mark.parametrize("count", [1, 300, 1000, 2500])
def test_many_tensors(codec: Codec, count: int, kernel_device: KernelDevice) -> None:
    """More than one table of a kernel's arguments holds."""
    torch.manual_seed(count)
    tensors = [torch.randn(1 + 37 * i % 501) for i in range(count)]
    error = torch.zeros(sum(tensor.numel() for tensor in tensors))
    assert_the_bits_of_the_cpu(kernel_device, codec, tensors, 2, 0.5, error)


@pytest.mark.parametrize("name", ["blockwise", "fp8", "sign"])
def test_a_block_of_more_tensors_than_a_table(name: str, kernel_device: KernelDevice) -> None:
    codec = CODECS[name](block_size=4096)  # type: ignore[call-arg]
    tensors = [torch.randn(1 + i % 2) for i in range(5000)]
    assert_the_bits_of_the_cpu(kernel_device, codec, tensors, 2, 0.5, torch.randn(7500) * 1e-3)


@of_each_codec
def test_large_tensors(codec: Codec, kernel_device: KernelDevice) -> None:
    """More than one tile for each warp, also where a GPU has room for 10,000 of them."""
    torch.manual_seed(0)
    n = 2000 if kernel_device.name == "cuda" else 200  # the host takes its time
    tensors = [torch.randn(3 * n * n + 1), torch.randn(n, 2 * n).t(), torch.randn(7).half()]
    error = torch.zeros(sum(tensor.numel() for tensor in tensors))
    assert_the_bits_of_the_cpu(kernel_device, codec, tensors, 3, 1.0, error, warps=64)


@pytest.mark.cuda
@of_each_codec
def test_nothing_waits_and_a_graph_takes_it(codec: Codec) -> None:
    x = torch.randn(100_000, device="cuda")
    out, error = torch.empty_like(x), torch.zeros_like(x) if codec.takes_error else None
    message = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8, device="cuda")
    rounding = rounding_for(codec, device="cuda")

    def both() -> None:
        codec.encode([x], message, error=error, rounding=rounding)
        codec.decode(message, [out], rounding=rounding)

    def memory_calls() -> int:
        return torch.cuda.memory_stats()["num_device_alloc"]

    both()
    if error is not None:
        error.zero_()
    calls_before = memory_calls()
    with no_waiting_on_gpu():
        both()
    assert memory_calls() == calls_before
    want = out.clone()
    if error is not None:
        error.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)


def test_foreign_memory_that_is_not_aligned_is_refused(kernel_device: KernelDevice) -> None:
    """The card would fail at it, and then do nothing more for the program."""
    ops = torch.ops.commhook
    device = kernel_device.name
    values = torch.ones(64, device=device)
    format_ = {"bits": 8, "block_size": 64, "symmetric": True}

    def message(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=device)

    error = kernel_device.misaligned(64, torch.float32)
    numbers = kernel_device.misaligned(2, torch.int64)
    failed = numbers[:1]
    rounding = torch.zeros(2, dtype=torch.int64, device=device)
    row, rows, sparse = message(80), message(160).view(2, 80), message(16)
    shards = [message(80), message(80)]
    for name, call in {
        "blockwise_encode: error": lambda: ops.blockwise_encode(
            [values], row, **format_, error=error
        ),
        "blockwise_encode: rounding": lambda: ops.blockwise_encode(
            [values], row, **format_, rounding=numbers
        ),
        "blockwise_reduce: error": lambda: ops.blockwise_reduce(
            rows, row, 64, **format_, error=error
        ),
        "blockwise_reduce_shards: failed": lambda: ops.blockwise_reduce_shards(
            shards, row, 64, **format_, failed=failed
        ),
        "symmetric_gather: failed": lambda: ops.symmetric_gather(
            shards, rows.view(-1), failed=failed
        ),
        "topk_encode: error": lambda: ops.topk_encode([values], sparse, error=error),
        "topk_encode: rounding": lambda: ops.topk_encode([values], sparse, rounding=numbers),
        "randomk_encode: error": lambda: ops.randomk_encode(
            [values], sparse, rounding, error=error
        ),
        "randomk_encode: rounding": lambda: ops.randomk_encode([values], sparse, numbers),
        "randomk_decode: rounding": lambda: ops.randomk_decode(sparse, [values], numbers),
    }.items():
        with kernel_device.kernels(), pytest.raises(ValueError, match=f"^{name} must begin at an"):
            call()
    assert not any(tensor.any() for tensor in (row, rows, sparse))
    assert (values == 1).all()


@pytest.mark.usefixtures("cuda_kernels")
@of_each_codec
@pytest.mark.parametrize(("count", "launches"), [(161, 1), (1880, 1), (4000, 3)])
def test_blocks_take_one_launch(codec: Codec, count: int, launches: int) -> None:
    if codec.exchange != "all_to_all":
        pytest.skip("looks at all values more than once")
    tensors = [torch.randn(1 + 37 * i % 501, device=DEVICE.name) for i in range(count)]
    numel = sum(tensor.numel() for tensor in tensors)
    message = torch.empty(codec.nbytes(numel), dtype=torch.uint8, device=DEVICE.name)
    rounding = rounding_for(codec, device=DEVICE.name)
    encoding = DEVICE.kernels_of(lambda: codec.encode(tensors, message, rounding=rounding))
    decoding = DEVICE.kernels_of(lambda: codec.decode(message, tensors, rounding=rounding))
    assert all("encode_kernel" in name for name in encoding) and len(encoding) == launches
    assert all("decode_kernel" in name for name in decoding) and len(decoding) == launches

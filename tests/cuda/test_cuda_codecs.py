"""Codecs on CUDA: the bits of the CPU, on a GPU and with the same kernels on the host; streams and
graphs, and that nothing waits for the device.

What topk sends is tried in test_cuda_topk.py.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from codec_examples import everything, of_each_codec, rounding_for, some_chunks, some_tensors
from kernel_device import DEVICE, KernelDevice, no_waiting_on_gpu
from kernel_runs import FORMS, least_block
from ops_reference import same_bits
from torch import Tensor

from torch_commhook.codecs import CODECS, Codec


def assert_the_bits_of_the_cpu(
    device: KernelDevice,
    codec: Codec,
    tensors: list[Tensor],
    segments: int,
    scale: float,
    error: Tensor | None,
    warps: int = 128,
    *,
    rounding: Tensor | None = None,
    **more: Any,
) -> list[Tensor]:
    """Returns what all operators write, the errors last."""
    right = everything(codec, tensors, segments, scale, error, rounding=rounding, **more)
    with device.kernels(warps):
        copies = device.copy(tensors)
        own = [None if each is None else device.copy([each])[0] for each in (error, rounding)]
        found = everything(codec, copies, segments, scale, own[0], rounding=own[1], **more)
    got = [tensor.cpu() for tensor in found]
    assert all(map(same_bits, got, right)), (codec, segments, scale)
    return got


@of_each_codec
def test_the_bits_of_the_cpu(codec: Codec, kernel_device: KernelDevice) -> None:
    rng = random.Random(1)
    torch.manual_seed(1)
    for _ in range(50):
        tensors = some_tensors(rng)
        numel = sum(tensor.numel() for tensor in tensors)
        segments, scale = rng.choice([1, 2, 3, 8]), rng.choice([1.0, 0.5, 1 / 3])
        error = torch.randn(numel) * 1e-3 if rng.random() < 0.7 else None
        if error is not None and rng.random() < 0.5:
            error = error.bfloat16()
        warps = rng.choice([1, 5, 128])
        assert_the_bits_of_the_cpu(kernel_device, codec, tensors, segments, scale, error, warps)


def random_case(form: str, seed: int) -> tuple[random.Random, Codec, list[Tensor], dict[str, Any]]:
    """A codec of blocks with random settings, tensors, and what its operators take with them."""
    draw = random.Random(f"{form} {seed}")
    torch.manual_seed(seed)
    name, settings = FORMS[form]
    sizes = [32, 64, 128, 256, 256, 512, 544, 1024, 4096]
    sizes += {8: [8, 72, 200], 16: [16, 48, 208], 32: []}[least_block(form)]
    more: dict[str, Any] = {"scale": draw.choice([1.0, 0.5, 1 / 3, 1e-3]), "error": None}
    if name == "blockwise" and draw.random() < 0.5:
        settings = {**settings, "rounding": "stochastic"}
        more["rounding"] = torch.tensor([draw.getrandbits(62) - (1 << 61), draw.getrandbits(20)])
    tensors, more["sizes"] = some_chunks(draw)
    for i, x in enumerate(tensors):
        if x.is_contiguous():  # at any address that its dtype allows
            first = draw.randrange(4)
            tensors[i] = torch.cat([x.new_zeros(first), x.view(-1)])[first:].view(x.shape)
    if draw.random() < 0.5:
        first = draw.randrange(4)  # at any address that is a multiple of four
        more["error"] = torch.randn(first + sum(more["sizes"]))[first:]
    more |= {"segments": draw.choice([1, 1, 2, 3, 7]), "added": draw.randint(1, 4)}
    return draw, CODECS[name](**settings, block_size=draw.choice(sizes)), tensors, more


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seeds", [range(first, first + 10) for first in range(0, 60, 10)], ids=str)
def test_blocks_of_any_size(form: str, seeds: range, kernel_device: KernelDevice) -> None:
    for seed in seeds:
        draw, codec, tensors, more = random_case(form, seed)
        warps = draw.choice([1, 5, 128])
        assert_the_bits_of_the_cpu(kernel_device, codec, tensors, warps=warps, **more)


@pytest.mark.parametrize("form", FORMS)
def test_the_largest_numbers(form: str, kernel_device: KernelDevice) -> None:
    for seed in range(20):
        draw, codec, tensors, more = random_case(form, seed)
        for tensor in tensors:
            tensor.nan_to_num_(0.0, 0.0, 0.0)
            for _ in range(3 if tensor.numel() else 0):
                place = tuple(draw.randrange(size) for size in tensor.shape)
                tensor[place] = torch.finfo(tensor.dtype).max * draw.choice([1.0, 0.9999, 0.25])
        got = assert_the_bits_of_the_cpu(kernel_device, codec, tensors, **{**more, "scale": 1.0})
        errors = [] if more["error"] is None else got[-3:]
        assert all(error.isfinite().all() for error in errors), f"seed {seed}"


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
    device = kernel_device.name
    values, memory = torch.ones(64, device=device), torch.zeros(400, dtype=torch.uint8).to(device)
    row, rows, sparse = memory[:80], memory[80:240].view(2, 80), memory[240:256]
    segments, both = [memory[:80], memory[80:160]], memory[160:320]
    numbers = kernel_device.misaligned(2, torch.int64)
    foreign = {"error": kernel_device.misaligned(64, torch.float32), "rounding": numbers}
    foreign["failed"] = numbers[:1]
    good = {"rounding": torch.zeros(2, dtype=torch.int64, device=device)}
    blocks = {"bits": 8, "block_size": 64, "symmetric": True}
    for name, given, options, arguments in (
        ("blockwise_encode", ([values], row), blocks, ("error", "rounding")),
        ("blockwise_reduce", (rows, row, 64), blocks, ("error",)),
        ("blockwise_reduce_shards", (segments, both[80:], 64), blocks, ("failed",)),
        ("symmetric_gather", (segments, both), {}, ("failed",)),
        ("topk_encode", ([values], sparse), {}, ("error", "rounding")),
        ("randomk_encode", ([values], sparse), good, ("error", "rounding")),
        ("randomk_decode", (sparse, [values]), good, ("rounding",)),
    ):
        for argument in arguments:
            wrong, message = {argument: foreign[argument]}, f"^{name}: {argument} must begin at an"
            with kernel_device.kernels(), pytest.raises(ValueError, match=message):
                getattr(torch.ops.commhook, name)(*given, **{**options, **wrong})
    assert not memory.any() and (values == 1).all()


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
